//! Joining and leaving the daemons of a node: the first job of a user on its GPUs starts one, the last one out ends it.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use crate::compute_mode;
use crate::error::{Error, SlurmFailure};
use crate::gpu::{Device, Gpu, GpuIdentity, GpuUuid};
use crate::host::Host;
use crate::nvidia_smi::{self, Discovery};
use crate::process;
use crate::runner::{Finished, RunError};
use crate::ui::Ui;

use super::account::Account;
use super::state::{State, Users};
use super::{Job, JobId, JobRecord, Outcome, Place, Request};

/// What each of our daemons is recorded as. Each has a home of its own.
const NAME: &str = "slurm";
/// How long one of our commands may take that waits for a daemon or for its clients.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// How long the clients of the last job may take to end by themselves, and then once they are told, in seconds.
const DRAIN: &str = "10";
const CUT_OFF: &str = "2";

/// A node as its hooks see it.
pub struct Node<'h> {
    host: &'h Host,
    state: State<'h>,
}

/// Why a job has no daemon.
enum Trouble {
    /// The job cannot have what it asks for. Its tasks are told, and the node stays.
    Refused(String),
    /// The node itself is at fault.
    Node(Error),
}

impl<E: Into<Error>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Node(error.into())
    }
}

impl<'h> Node<'h> {
    /// The node whose state is kept below `base`.
    pub fn new(host: &'h Host, base: &Path) -> Self {
        let state = State::new(host, base);
        Self { host, state }
    }

    /// What came of a job's wish; `None` for one that is not recorded.
    pub fn job(&self, job: &JobId) -> Result<Option<JobRecord>, Error> {
        self.state.job(job)
    }

    /// Gives a job what it asks for, and records for its tasks what came of it. Fails only where the node is at fault.
    pub fn join(&self, ui: &mut Ui<'_>, job: &Job) -> Result<(), Error> {
        let request = match &job.request {
            Ok(None) => return Ok(()),
            Ok(Some(request)) => Ok(request),
            Err(error) => Err(Trouble::Refused(format!("its comment: {error}"))),
        };
        let outcome = match request.and_then(|request| self.shared(ui, job, request)) {
            Ok(outcome) => outcome,
            Err(Trouble::Refused(reason)) => Outcome::Refused(reason),
            Err(Trouble::Node(error)) => return Err(error),
        };
        if let Outcome::Refused(reason) = &outcome {
            ui.note(format!("{} gets no shared GPU: {reason}", job.id));
        }
        let uid = job.uid;
        self.state.put_job(&job.id, &JobRecord { uid, outcome })
    }

    fn shared(&self, ui: &mut Ui<'_>, job: &Job, request: &Request) -> Result<Outcome, Trouble> {
        if job.gpus.is_empty() {
            let reason = "it has no GPU on this node; ask for one with --gres=gpu:1";
            return Err(Trouble::Refused(reason.to_owned()));
        }
        let found = nvidia_smi::discover(self.host)?;
        let gpus: Vec<GpuIdentity> = job
            .gpus
            .iter()
            .map(|index| usable(&found, *index))
            .collect::<Result<_, Trouble>>()?;
        let sets: Vec<&[GpuIdentity]> = match request.per_gpu {
            true => gpus.chunks(1).collect(),
            false => vec![&gpus],
        };
        let places = sets
            .into_iter()
            .map(|gpus| self.join_daemon(ui, job, gpus, &found));
        Ok(Outcome::Shared {
            places: places.collect::<Result<_, Trouble>>()?,
            threads: request.threads.clone(),
            memory: request.memory,
        })
    }

    /// Starts the daemon of these GPUs for the job's user, or joins it. The job is among its users before it is there, so
    /// that the epilog finds whatever a prolog leaves that was killed.
    fn join_daemon(
        &self,
        ui: &mut Ui<'_>,
        job: &Job,
        gpus: &[GpuIdentity],
        found: &Discovery,
    ) -> Result<Place, Trouble> {
        let mut users = Users {
            cluster: job.id.cluster.clone(),
            node: job.id.node.clone(),
            uid: job.uid,
            gpus: gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            jobs: Vec::new(),
            compute_modes_before: Default::default(),
        };
        let key = users.key();
        let directory = self.state.of_user(&key);
        let account = match Account::of(self.host, job.uid, directory.clone()) {
            Err(error @ Error::Slurm(SlurmFailure::NoUser(_))) => {
                return Err(Trouble::Refused(error.to_string()));
            }
            account => account?,
        };
        let _lock = self.state.lock(&key)?;
        if let Some(there) = self.state.users(&key)? {
            users = there;
        }
        if !users.jobs.contains(&job.id.number) {
            users.jobs.push(job.id.number);
        }
        let devices: Vec<Device> = gpus.iter().cloned().map(Device::Gpu).collect();
        if !job.has_mps {
            let (before, notes) = compute_mode::to_change(found, &devices);
            notes.iter().for_each(|note| ui.note(note));
            users.compute_modes_before.extend(before);
        }
        self.state.put_users(&users)?;
        account.create(&directory)?;
        let place = Place {
            gpus: users.gpus.clone(),
            pipe: directory.join("pipe"),
            log: directory.join("log"),
        };
        if !is_live(&account)? {
            start(&account, &place)?;
        }
        if !job.has_mps {
            let (before, _) = compute_mode::to_change(found, &devices);
            compute_mode::make_exclusive(self.host, ui, &before)?;
        }
        Ok(place)
    }

    /// Takes a job off its daemons, and ends those that nobody uses any more. Fails if something is left.
    pub fn leave(&self, ui: &mut Ui<'_>, job: &JobId) -> Result<(), Error> {
        let mut left = Vec::new();
        let all = self.state.all_users().into_iter();
        for users in all.filter(|users| users.are_of(job)) {
            if let Err(error) = self.leave_daemon(ui, job, &users) {
                left.push(error.to_string());
            }
        }
        if left.is_empty() {
            return self.state.forget_job(job);
        }
        let job = job.to_string();
        Err(SlurmFailure::Left { job, left }.into())
    }

    fn leave_daemon(&self, ui: &mut Ui<'_>, job: &JobId, seen: &Users) -> Result<(), Error> {
        let key = seen.key();
        let directory = self.state.of_user(&key);
        let account = Account::of(self.host, seen.uid, directory.clone())?;
        let purpose = "wait for the clients to end";
        if seen.jobs == [job.number] {
            // Nobody is kept from joining meanwhile. Whatever comes of it, the daemon is told to quit.
            let idle = ["wait", "--name", NAME, "--for", "idle", "--timeout", DRAIN];
            interruption(account.call(purpose, &idle, CALL_LIMIT))?;
        }
        let _lock = self.state.lock(&key)?;
        let Some(mut users) = self.state.users(&key)? else {
            return Ok(());
        };
        if users.jobs.iter().any(|number| *number != job.number) {
            self.end_clients(&account, job, users.uid)?;
            users.jobs.retain(|number| *number != job.number);
            return self.state.put_users(&users);
        }
        let stop = ["stop", "--name", NAME, "--timeout", CUT_OFF, "--force"];
        let stopped = interruption(account.call("stop the daemon", &stop, CALL_LIMIT))?;
        let gone = ["wait", "--name", NAME, "--for", "gone", "--timeout", "5"];
        let waited = interruption(account.call("see the daemon gone", &gone, CALL_LIMIT))?;
        if waited.as_ref().is_none_or(|it| !it.status.success()) {
            let said = stopped.map(|it| it.said()).unwrap_or_default();
            return Err(left(job, format!("its daemon in {directory:?}: {said}")));
        }
        compute_mode::restore(self.host, ui, &users.compute_modes_before)?;
        self.modes_are_back(job, &users)?;
        self.state.forget_daemon(&key)
    }

    /// Has the daemon let go of the clients of one job of several, which may have outlived it.
    fn end_clients(&self, account: &Account<'_>, job: &JobId, uid: u32) -> Result<(), Error> {
        let number = job.number.to_string();
        for process in process::with_variable(self.host, uid, "SLURM_JOB_ID", &number) {
            let pid = process.id.pid.to_string();
            let words = [
                "clients",
                "--name",
                NAME,
                "--terminate",
                &pid,
                "--timeout",
                "5",
            ];
            // Not all of them are clients.
            interruption(account.call("end a client", &words, CALL_LIMIT))?;
        }
        Ok(())
    }

    fn modes_are_back(&self, job: &JobId, users: &Users) -> Result<(), Error> {
        if users.compute_modes_before.is_empty() {
            return Ok(());
        }
        let found = nvidia_smi::discover(self.host)?;
        let mut exclusive = users.compute_modes_before.keys();
        match exclusive.find(|gpu| found.is_exclusive(gpu)) {
            None => Ok(()),
            Some(gpu) => Err(left(job, format!("GPU {gpu} is still EXCLUSIVE_PROCESS"))),
        }
    }

    /// Leaves for each job of this node that is not among those that are `there`. Returns how many they were.
    pub fn sweep(
        &self,
        ui: &mut Ui<'_>,
        node: &str,
        there: &BTreeSet<u32>,
    ) -> Result<usize, Error> {
        let all = self.state.jobs_on(node).into_iter();
        let dead: Vec<JobId> = all.filter(|job| !there.contains(&job.number)).collect();
        let mut failed = None;
        for job in &dead {
            ui.note(format!("{job} is over, and something of it is left"));
            failed = self.leave(ui, job).err().or(failed);
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(dead.len()),
        }
    }
}

fn left(job: &JobId, what: String) -> Error {
    SlurmFailure::Left {
        job: job.to_string(),
        left: vec![what],
    }
    .into()
}

/// The GPU of an index that Slurm has given.
fn usable(found: &Discovery, index: u32) -> Result<GpuIdentity, Trouble> {
    let unusable = |reason: String| SlurmFailure::Gpu { index, reason }.into();
    match found.gpus.iter().find(|gpu| gpu.index() == Some(index)) {
        Some(Gpu::Usable { mig: Some(_), .. }) => Err(Trouble::Refused(format!(
            "GPU {index} is in MIG mode, and only whole GPUs are shared"
        ))),
        Some(Gpu::Usable { identity, .. }) => Ok(identity.clone()),
        Some(Gpu::Unusable { diagnostic, .. }) => Err(unusable(diagnostic.clone())),
        None => Err(unusable("nvidia-smi does not list it".to_owned())),
    }
}

/// An interruption ends the hook. Any other outcome is for the caller; a call that did not end by itself has none.
fn interruption(called: Result<Finished, RunError>) -> Result<Option<Finished>, Error> {
    match called {
        Ok(finished) => Ok(Some(finished)),
        Err(RunError::Interrupted(signal)) => Err(Error::Interrupted(signal)),
        Err(_) => Ok(None),
    }
}

fn is_live(account: &Account<'_>) -> Result<bool, Error> {
    let words = ["env", "--name", NAME, "--json"];
    let told = interruption(account.call("look for the daemon", &words, CALL_LIMIT))?;
    Ok(told.is_some_and(|told| told.status.success()))
}

fn start(account: &Account<'_>, place: &Place) -> Result<(), Trouble> {
    let gpus: Vec<&str> = place.gpus.iter().map(GpuUuid::as_str).collect();
    let (gpus, pipe, log) = (
        gpus.join(","),
        place.pipe.to_string_lossy(),
        place.log.to_string_lossy(),
    );
    let words = [
        "start",
        "--name",
        NAME,
        "--gpus",
        &gpus,
        "--pipe-dir",
        &pipe,
        "--log-dir",
        &log,
    ];
    match account.call("start the daemon", &words, CALL_LIMIT) {
        Ok(finished) if finished.status.success() => Ok(()),
        Ok(finished) => Err(Trouble::Refused(format!(
            "its daemon did not start: {}",
            finished.stderr.trim()
        ))),
        Err(RunError::Interrupted(signal)) => Err(Error::Interrupted(signal).into()),
        Err(error) => Err(Trouble::Refused(format!(
            "its daemon did not start: {error}"
        ))),
    }
}
