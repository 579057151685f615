//! What is kept of jobs and of their daemons, below `/run/uni-cumps`: root's files, gone with the machine's boot. What a
//! task reads of its job lies in `slurm/<cluster>/<job>/<node>/job.json`; who uses a daemon, in `daemons/<key>/users.json`,
//! beside the directory `user`, which is that user's.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;
use crate::gpu::GpuUuid;
use crate::host::Host;
use crate::limits::{MemoryLimit, ThreadPercentage};
use crate::record::fnv;
use crate::store::{LockFile, byte_of, read_regular_file, replace};

use super::JobId;

/// What a task prolog reads of its job. Its user's group may.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job's user.
    pub uid: u32,
    /// What came of its wish.
    pub outcome: Outcome,
}

impl JobRecord {
    /// Whether Slurm itself tells the tasks their share of the threads.
    pub fn has_mps(&self) -> bool {
        matches!(self.outcome, Outcome::Shared { has_mps: true, .. })
    }
}

/// What came of a job's wish for a shared GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its tasks share these GPUs.
    Shared {
        /// The daemons: one, or one for each GPU.
        daemons: Vec<Address>,
        /// Slurm itself tells the tasks their share of the threads.
        has_mps: bool,
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
pub struct Address {
    /// What it serves, each with Slurm's number of it.
    pub gpus: Vec<(u32, GpuUuid)>,
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`.
    pub log: PathBuf,
}

/// A daemon, and which jobs use it.
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

/// How long a hook waits for another one that starts or ends the same daemon. Longer than either may take.
const LOCK_LIMIT: Duration = Duration::from_secs(180);
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

/// Creates a directory of root's, and those above it, which everybody may enter.
fn create(at: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o755).recursive(true).create(at)
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

    /// Writes a file of a directory that this hook alone writes to, or that is locked.
    fn write<T: Serialize>(
        &self,
        directory: &Path,
        (file, mode): (&str, u32),
        content: &T,
    ) -> Result<(), Error> {
        let path = directory.join(file);
        let at = self.host.root.at(directory);
        // Plain data, which always has a JSON form.
        let content = serde_json::to_value(content).unwrap_or(Value::Null);
        create(&at)
            .and_then(|()| replace(&at, file, mode, &content))
            .map_err(|error| {
                // A directory that was made for it in vain goes as well.
                let _ = fs::remove_dir(&at);
                failed("write", &path)(error)
            })
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

    /// Records a job for the tasks of its user, and for nobody else: their group may enter its directory.
    pub(super) fn put_job(
        &self,
        job: &JobId,
        gid: Option<u32>,
        record: &JobRecord,
    ) -> Result<(), Error> {
        let directory = self.job_directory(job);
        self.write(&directory, (JOB, 0o644), record)?;
        let at = self.host.root.at(&directory);
        let Some(gid) = gid else { return Ok(()) };
        chown(&at, None, Some(gid))
            .and_then(|()| fs::set_permissions(&at, fs::Permissions::from_mode(0o750)))
            .map_err(failed("give to the job", &directory))
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
    pub(super) fn jobs_on(&self, node: &str) -> Result<Vec<JobId>, Error> {
        let mut jobs = Vec::new();
        let mut add = |cluster: &str, number: u32| {
            let job = JobId {
                cluster: cluster.to_owned(),
                number,
                node: node.to_owned(),
            };
            if !jobs.contains(&job) {
                jobs.push(job);
            }
        };
        let base = self.base.join("slurm");
        for cluster in self.names(&base) {
            for job in self.names(&base.join(&cluster)) {
                let is_here = base.join(&cluster).join(&job).join(node);
                if let Ok(number) = job.parse()
                    && self.host.root.at(is_here).exists()
                {
                    add(&cluster, number);
                }
            }
        }
        for users in self.all_users()?.iter().filter(|users| users.node == node) {
            users.jobs.iter().for_each(|job| add(&users.cluster, *job));
        }
        Ok(jobs)
    }

    fn names(&self, directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(self.host.root.at(directory));
        entries
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect()
    }

    /// The right to decide about a daemon.
    pub(super) fn lock(&self, key: &str) -> Result<LockFile<'h>, Error> {
        let directory = self.daemons();
        create(&self.host.root.at(&directory)).map_err(failed("create", &directory))?;
        let lock = LockFile::open(self.host, directory.join(".lock"), |_| Ok(()))?;
        lock.acquire_within(byte_of(key), LOCK_LIMIT)?;
        Ok(lock)
    }

    pub(super) fn users(&self, key: &str) -> Result<Option<Users>, Error> {
        self.read(&self.daemons().join(key).join(USERS))
    }

    pub(super) fn put_users(&self, users: &Users) -> Result<(), Error> {
        self.write(&self.daemons().join(users.key()), (USERS, 0o600), users)
    }

    /// Forgets a daemon and removes what its user has there; a link of his is removed and not followed.
    pub(super) fn forget_daemon(&self, key: &str) -> Result<(), Error> {
        self.remove(&self.daemons().join(key))
    }

    /// The users of every daemon.
    pub(super) fn all_users(&self) -> Result<Vec<Users>, Error> {
        let names = self.names(&self.daemons()).into_iter();
        let keys = names.filter(|name| !name.starts_with('.'));
        keys.filter_map(|key| self.users(&key).transpose())
            .collect()
    }

    fn remove(&self, directory: &Path) -> Result<(), Error> {
        match fs::remove_dir_all(self.host.root.at(directory)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(failed("remove", directory)),
        }
    }
}
