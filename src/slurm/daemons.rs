//! Joining and leaving the daemons of a node: the first job of a user on its GPUs starts one, the last one out ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::compute_mode;
use crate::error::{Error, SlurmFailure};
use crate::gpu::{Device, Gpu, GpuIdentity, GpuUuid};
use crate::host::Host;
use crate::kernel_module;
use crate::nvidia_smi::{self, Discovery};
use crate::process;
use crate::runner::{Finished, RunError};
use crate::ui::Ui;

use super::account::Account;
use super::state::{State, Users};
use super::{Address, Job, JobId, JobRecord, Outcome, Request};

/// What each of our daemons is recorded as. Each has a home of its own.
const NAME: &str = "slurm";
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
            // A record would be of an earlier job of this number.
            Ok(None) => return self.state.forget_job(&job.id),
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
        let record = JobRecord { uid, outcome };
        self.state.put_job(&job.id, job.gid, &record)
    }

    fn shared(&self, ui: &mut Ui<'_>, job: &Job, request: &Request) -> Result<Outcome, Trouble> {
        if job.gpus.is_empty() {
            let reason = "it has no GPU on this node; ask for one with --gres=gpu:1";
            return Err(Trouble::Refused(reason.to_owned()));
        }
        let found = nvidia_smi::discover(self.host)?;
        // Slurm numbers GPUs by their device files.
        let minors = kernel_module::minors(self.host);
        let gpus: Vec<(u32, GpuIdentity)> = job
            .gpus
            .iter()
            .map(|number| Ok((*number, usable(&found, &minors, *number)?)))
            .collect::<Result<_, Trouble>>()?;
        let sets: Vec<&[(u32, GpuIdentity)]> = match request.per_gpu {
            true => gpus.chunks(1).collect(),
            false => vec![&gpus],
        };
        let daemons = sets
            .into_iter()
            .map(|gpus| self.join_daemon(ui, job, gpus, &found));
        Ok(Outcome::Shared {
            daemons: daemons.collect::<Result<_, Trouble>>()?,
            has_mps: job.has_mps,
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
        gpus: &[(u32, GpuIdentity)],
        found: &Discovery,
    ) -> Result<Address, Trouble> {
        let mut users = Users {
            cluster: job.id.cluster.clone(),
            node: job.id.node.clone(),
            uid: job.uid,
            gpus: gpus.iter().map(|(_, gpu)| gpu.uuid.clone()).collect(),
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
        let _lock = match self.state.lock(&key) {
            Err(error @ Error::Busy { .. }) => return Err(Trouble::Refused(error.to_string())),
            lock => lock?,
        };
        if let Some(there) = self.state.users(&key)? {
            users = there;
        }
        if !users.jobs.contains(&job.id.number) {
            users.jobs.push(job.id.number);
        }
        let alone = gpus.iter().filter(|_| !job.has_mps);
        let devices: Vec<Device> = alone.map(|(_, gpu)| Device::Gpu(gpu.clone())).collect();
        let (to_change, notes) = compute_mode::to_change(found, &devices);
        notes.iter().for_each(|note| ui.note(note));
        users.compute_modes_before.extend(to_change.clone());
        self.state.put_users(&users)?;
        account.create_home()?;
        let numbered = gpus.iter().map(|(number, gpu)| (*number, gpu.uuid.clone()));
        let address = Address {
            gpus: numbered.collect(),
            pipe: directory.join("pipe"),
            log: directory.join("log"),
        };
        if !is_live(&account)? {
            start(&account, &address)?;
        }
        compute_mode::make_exclusive(self.host, ui, &to_change)?;
        Ok(address)
    }

    /// Takes a job off its daemons, and ends those that nobody uses any more. Fails if something is left.
    pub fn leave(&self, ui: &mut Ui<'_>, job: &JobId) -> Result<(), Error> {
        let mut left = Vec::new();
        let all = self.state.all_users()?.into_iter();
        for users in all.filter(|users| users.are_of(job)) {
            match self.leave_daemon(ui, job, &users) {
                Ok(()) => {}
                Err(Error::Slurm(SlurmFailure::Left { left: more, .. })) => left.extend(more),
                Err(error) => left.push(error.to_string()),
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
        if seen.jobs == [job.number] {
            // Nobody is kept from joining meanwhile. Whatever comes of it, the daemon is told to quit.
            let idle = ["wait", "--name", NAME, "--for", "idle", "--timeout", DRAIN];
            interruption(account.call("wait for the clients to end", &idle))?;
        } else {
            end_clients(self.host, &account, job, seen.uid)?;
        }
        let _lock = self.state.lock(&key)?;
        let Some(mut users) = self.state.users(&key)? else {
            return Ok(());
        };
        users.jobs.retain(|number| *number != job.number);
        if !users.jobs.is_empty() {
            return self.state.put_users(&users);
        }
        let stop = ["stop", "--name", NAME, "--timeout", CUT_OFF, "--force"];
        let stopped = interruption(account.call("stop the daemon", &stop))?;
        let gone = ["wait", "--name", NAME, "--for", "gone", "--timeout", "5"];
        let waited = interruption(account.call("see the daemon gone", &gone))?;
        if waited.as_ref().is_none_or(|it| !it.status.success()) {
            let said = stopped.map(|it| it.said()).unwrap_or_default();
            return Err(left(job, format!("its daemon in {directory:?}: {said}")));
        }
        compute_mode::restore(self.host, ui, &users.compute_modes_before)?;
        self.modes_are_back(job, &users)?;
        self.state.forget_daemon(&key)
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

    /// Leaves for each job of this node that is over. They are looked at before `there` tells which jobs the node has: what
    /// comes meanwhile is no business of ours.
    pub fn sweep(
        &self,
        ui: &mut Ui<'_>,
        node: &str,
        there: impl FnOnce() -> Result<BTreeSet<u32>, Error>,
    ) -> Result<(), Error> {
        let known = self.state.jobs_on(node)?;
        if known.is_empty() {
            return Ok(());
        }
        let there = there()?;
        let mut outcome = Ok(());
        for job in known.iter().filter(|job| !there.contains(&job.number)) {
            ui.note(format!("{job} is over, and something of it is left"));
            outcome = outcome.and(self.leave(ui, job));
        }
        outcome
    }
}

/// Has the daemon let go of the clients of one job of several, which may have outlived it.
fn end_clients(host: &Host, account: &Account<'_>, job: &JobId, uid: u32) -> Result<(), Error> {
    let number = job.number.to_string();
    for process in process::with_variable(host, uid, "SLURM_JOB_ID", &number) {
        let pid = process.id.pid.to_string();
        let words = [
            "clients",
            "--name",
            NAME,
            "--terminate",
            &pid,
            "--timeout",
            "5",
            "--json",
        ];
        let Some(told) = interruption(account.call("end a client", &words))? else {
            return Err(left(job, format!("its client {pid}")));
        };
        // Not every process of a job is a client.
        let is_none = ["no-such-process", "not-a-client", "no-record", "stale"]
            .iter()
            .any(|code| told.stdout.contains(&format!("{code:?}")));
        if !told.status.success() && !is_none {
            return Err(left(
                job,
                format!("its client {pid}: {}", told.stderr.trim()),
            ));
        }
    }
    Ok(())
}

fn left(job: &JobId, what: String) -> Error {
    SlurmFailure::Left {
        job: job.to_string(),
        left: vec![what],
    }
    .into()
}

/// The GPU that Slurm gives by this number.
fn usable(
    found: &Discovery,
    minors: &BTreeMap<u32, GpuUuid>,
    number: u32,
) -> Result<GpuIdentity, Trouble> {
    let unusable = |reason: String| {
        let index = number;
        SlurmFailure::Gpu { index, reason }.into()
    };
    let in_mig = || {
        Trouble::Refused(format!(
            "GPU {number} is in MIG mode or a part of one, and only whole GPUs are shared"
        ))
    };
    let is_it = |gpu: &&Gpu| match minors.get(&number) {
        Some(uuid) => gpu.identity().is_some_and(|gpu| gpu.uuid == *uuid),
        None => gpu.index() == Some(number),
    };
    let is_divided = |gpu: &Gpu| matches!(gpu, Gpu::Usable { mig: Some(_), .. });
    match found.gpus.iter().find(is_it) {
        Some(Gpu::Usable { mig: Some(_), .. }) => Err(in_mig()),
        Some(Gpu::Usable { identity, .. }) => Ok(identity.clone()),
        Some(Gpu::Unusable { diagnostic, .. }) => Err(unusable(diagnostic.clone())),
        // Slurm numbers parts of GPUs as well.
        None if found.gpus.iter().any(is_divided) => Err(in_mig()),
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
    let told = interruption(account.call("look for the daemon", &words))?;
    Ok(told.is_some_and(|told| told.status.success()))
}

fn start(account: &Account<'_>, address: &Address) -> Result<(), Trouble> {
    let gpus: Vec<&str> = address.gpus.iter().map(|(_, gpu)| gpu.as_str()).collect();
    let (gpus, pipe, log) = (
        gpus.join(","),
        address.pipe.to_string_lossy(),
        address.log.to_string_lossy(),
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
    match account.call("start the daemon", &words) {
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
