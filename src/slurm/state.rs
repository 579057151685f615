//! What is kept of jobs and of their daemons, below `/run/uni-cumps`: root's files, gone with the machine's boot. What a
//! task reads of its job lies in `slurm/<cluster>/<job>/<node>/job.json`; who uses a daemon, in `daemons/<key>/users.json`,
//! beside the directory `user`, which is that user's.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;
use crate::gpu::GpuUuid;
use crate::host::Host;
use crate::limits::{MemoryLimit, ThreadPercentage};
use crate::record::fnv;
use crate::store::{LockFile, byte_of, read_regular_file, replace};

use super::JobId;

/// What a task prolog reads of its job. Everybody may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job's user.
    pub uid: u32,
    /// What came of its wish.
    pub outcome: Outcome,
}

/// What came of a job's wish for a shared GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its tasks share these GPUs.
    Shared {
        /// The daemons: one, or one for each GPU.
        places: Vec<Place>,
        /// The most of the threads that a task may occupy.
        threads: Option<ThreadPercentage>,
        /// The most memory that a task may take.
        memory: Option<MemoryLimit>,
    },
    /// It has none, for this reason. Its tasks must not run.
    Refused(String),
}

/// A daemon, as its clients find it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// What it serves.
    pub gpus: Vec<GpuUuid>,
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`.
    pub log: PathBuf,
}

/// Who uses a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Users {
    pub(super) cluster: String,
    pub(super) node: String,
    pub(super) uid: u32,
    pub(super) gpus: Vec<GpuUuid>,
    pub(super) jobs: Vec<u32>,
    /// What the compute modes were before they were made exclusive.
    pub(super) compute_modes_before: BTreeMap<GpuUuid, String>,
}

impl Users {
    /// The name of a daemon in every path: whose it is, and of which node and GPUs. It has at most 27 bytes.
    pub(super) fn key(&self) -> String {
        let gpus: Vec<&str> = self.gpus.iter().map(GpuUuid::as_str).collect();
        let what = format!("{}/{}/{}", self.cluster, self.node, gpus.join(","));
        format!("{}-{:016x}", self.uid, fnv(&what))
    }

    pub(super) fn are_of(&self, job: &JobId) -> bool {
        self.cluster == job.cluster && self.node == job.node && self.jobs.contains(&job.number)
    }
}

const JOB: &str = "job.json";
const USERS: &str = "users.json";

pub(super) struct State<'h> {
    host: &'h Host,
    base: PathBuf,
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File {
        doing,
        path,
        source,
    }
}

impl<'h> State<'h> {
    pub(super) fn new(host: &'h Host, base: &Path) -> Self {
        let base = base.to_owned();
        Self { host, base }
    }

    fn job_directory(&self, job: &JobId) -> PathBuf {
        let cluster = self.base.join("slurm").join(&job.cluster);
        cluster.join(job.number.to_string()).join(&job.node)
    }

    fn daemons(&self) -> PathBuf {
        self.base.join("daemons")
    }

    /// The directory of a daemon's user.
    pub(super) fn of_user(&self, key: &str) -> PathBuf {
        self.daemons().join(key).join("user")
    }

    fn write<T: Serialize>(&self, directory: &Path, file: &str, content: &T) -> Result<(), Error> {
        let path = directory.join(file);
        let at = self.host.root.at(directory);
        // Plain data, which always has a JSON form.
        let content = serde_json::to_value(content).unwrap_or(Value::Null);
        DirBuilder::new()
            .mode(0o755)
            .recursive(true)
            .create(&at)
            .and_then(|()| replace(&at, file, 0o644, &content))
            .map_err(failed("write", &path))
    }

    fn read<T: for<'d> Deserialize<'d>>(&self, path: &Path) -> Result<Option<T>, Error> {
        let (content, owner) = match read_regular_file(&self.host.root.at(path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(failed("read", path))?,
        };
        if owner != 0 {
            let forged = io::Error::other(format!("uid {owner} wrote it, and not root"));
            return Err(failed("believe", path)(forged));
        }
        let content = serde_json::from_slice(&content);
        content
            .map(Some)
            .map_err(|error| failed("read", path)(error.into()))
    }

    pub(super) fn put_job(&self, job: &JobId, record: &JobRecord) -> Result<(), Error> {
        self.write(&self.job_directory(job), JOB, record)
    }

    pub(super) fn job(&self, job: &JobId) -> Result<Option<JobRecord>, Error> {
        self.read(&self.job_directory(job).join(JOB))
    }

    pub(super) fn forget_job(&self, job: &JobId) -> Result<(), Error> {
        let directory = self.job_directory(job);
        self.remove(&directory)?;
        // Another node of the same machine may have its own there.
        let _ = directory
            .parent()
            .map(|job| fs::remove_dir(self.host.root.at(job)));
        Ok(())
    }

    /// The jobs of this node that something is kept of.
    pub(super) fn jobs_on(&self, node: &str) -> Vec<JobId> {
        let names = |directory: &Path| -> Vec<String> {
            let entries = fs::read_dir(self.host.root.at(directory))
                .into_iter()
                .flatten();
            entries
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .collect()
        };
        let base = self.base.join("slurm");
        let mut jobs = Vec::new();
        for cluster in names(&base) {
            for number in names(&base.join(&cluster)) {
                let Ok(number) = number.parse() else { continue };
                let job = JobId {
                    cluster: cluster.clone(),
                    number,
                    node: node.to_owned(),
                };
                if self.host.root.at(self.job_directory(&job)).exists() {
                    jobs.push(job);
                }
            }
        }
        for users in self
            .all_users()
            .into_iter()
            .filter(|users| users.node == node)
        {
            for number in users.jobs {
                let job = JobId {
                    cluster: users.cluster.clone(),
                    number,
                    node: node.to_owned(),
                };
                if !jobs.contains(&job) {
                    jobs.push(job);
                }
            }
        }
        jobs
    }

    /// The right to decide about a daemon.
    pub(super) fn lock(&self, key: &str) -> Result<LockFile<'h>, Error> {
        let directory = self.daemons();
        DirBuilder::new()
            .mode(0o755)
            .recursive(true)
            .create(self.host.root.at(&directory))
            .map_err(failed("create", &directory))?;
        let lock = LockFile::open(self.host, directory.join(".lock"), |_| Ok(()))?;
        lock.acquire(byte_of(key))?;
        Ok(lock)
    }

    pub(super) fn users(&self, key: &str) -> Result<Option<Users>, Error> {
        self.read(&self.daemons().join(key).join(USERS))
    }

    pub(super) fn put_users(&self, users: &Users) -> Result<(), Error> {
        self.write(&self.daemons().join(users.key()), USERS, users)
    }

    /// Forgets a daemon and removes what its user has there; a link of his is removed and not followed.
    pub(super) fn forget_daemon(&self, key: &str) -> Result<(), Error> {
        self.remove(&self.daemons().join(key))
    }

    /// The users of every daemon. What cannot be read is none of a hook's.
    pub(super) fn all_users(&self) -> Vec<Users> {
        let entries = fs::read_dir(self.host.root.at(self.daemons()));
        entries
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let name = entry.ok()?.file_name().into_string().ok()?;
                self.users(&name).ok()?
            })
            .collect()
    }

    fn remove(&self, directory: &Path) -> Result<(), Error> {
        match fs::remove_dir_all(self.host.root.at(directory)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(failed("remove", directory)),
        }
    }
}
