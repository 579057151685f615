//! `start`: a control daemon of the user's own for one GPU, recorded once it answers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use crate::cli::StartArgs;
use crate::daemon::{self, State};
use crate::error::Error;
use crate::gpu::{ComputeMode, Gpu};
use crate::host::Host;
use crate::mps::{self, AskError, CONTROL, Control, Keeper, LogMark, Socket};
use crate::nvidia_smi::{self, Discovery};
use crate::process::{self, Handle, Running};
use crate::record::{DaemonName, DaemonRecord, Place, ProcessId};
use crate::runner::{Finished, RunError, Status, hold_signals};
use crate::runtime_dir::{self, Directories};
use crate::store::{Entry, Locked, Store};
use crate::topology::{self, Plan};
use crate::ui::Ui;

/// How long a launched daemon may take until it answers. It takes milliseconds.
const READY_LIMIT: Duration = Duration::from_secs(10);
/// Less time than this is not enough for one more question; what the last one has shown is the better message.
const SESSION: Duration = Duration::from_millis(100);
/// How long a daemon that did not become ready may take to end.
const END_LIMIT: Duration = Duration::from_secs(3);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StartArgs) -> Result<u8, Error> {
    let discovery = nvidia_smi::discover(host)?;
    let mask = host.env.visible_devices();
    let plan = topology::resolve(args.gpus.as_deref(), &discovery.gpus, mask.as_deref())
        .map_err(|error| discovery.explain(error))?;
    let name = match args.name.as_deref() {
        Some(name) if !name.is_empty() => name.parse()?,
        _ => DaemonName::for_gpu(&plan.gpu.uuid)?,
    };
    let (directories, path_notes) = runtime_dir::plan(
        host,
        &name,
        args.pipe_dir.as_deref(),
        args.log_dir.as_deref(),
    )?;
    let control = Control::find(host, &directories.pipe, &directories.log)
        .ok_or(Error::NoProgram(CONTROL))?;
    for note in path_notes
        .into_iter()
        .chain(gpu_notes(&discovery, &plan, mask.as_deref()))
        .chain(environment_notes(host, &directories))
        .chain(server_note(&control))
    {
        ui.note(note);
    }

    let store = Store::of(host)?;
    let locked = store.lock(&name)?;
    let start = Start {
        host,
        store: &store,
        locked: &locked,
        control: &control,
        here: process::place(host),
        plan,
        name,
        directories,
    };
    // From here on we would leave something behind.
    let _held = hold_signals();
    let way = locked.with_all(|| start.prepare(ui))?;
    let record = match way {
        Way::Adopt(process) => start.adopt(ui, process)?,
        Way::Launch if args.foreground => return start.in_foreground(ui),
        Way::Launch => start.detached()?,
    };
    ui.json(&record.to_json());
    let name_option = match args.name {
        Some(_) => format!(" --name {}", record.name),
        None => String::new(),
    };
    ui.next_step(format!("eval \"$(uni-cumps env{name_option})\""));
    Ok(0)
}

/// What the caller should know about the GPU.
fn gpu_notes(discovery: &Discovery, plan: &Plan, mask: Option<&str>) -> Vec<String> {
    let mut notes = discovery.messages.clone();
    for gpu in &discovery.gpus {
        if let Gpu::Usable {
            identity,
            compute_mode: ComputeMode::Prohibited,
        } = gpu
            && *identity == plan.gpu
        {
            let index = identity.index;
            notes.push(format!(
                "GPU {identity} has compute mode Prohibited and takes no program; an administrator can change it: sudo nvidia-smi -i {index} -c DEFAULT"
            ));
        }
    }
    let visibility = topology::visible(&discovery.gpus, mask);
    let hidden = !visibility
        .gpus
        .iter()
        .any(|gpu| gpu.identity() == Some(&plan.gpu));
    if let Some(mask) = mask
        && hidden
    {
        notes.push(format!(
            "CUDA_VISIBLE_DEVICES={mask:?} hides GPU {}; --gpus goes before it",
            plan.gpu
        ));
    }
    notes
}

/// The variables of the caller that the daemon does not get, since it would hand them to all its servers.
fn environment_notes(host: &Host, directories: &Directories) -> Vec<String> {
    let ours = [
        ("CUDA_MPS_PIPE_DIRECTORY", &directories.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", &directories.log),
    ];
    let ambient = host.env.all().filter_map(|(key, value)| {
        let key = key.to_str().filter(|key| key.starts_with("CUDA_MPS_"))?;
        let same = ours
            .iter()
            .any(|(name, path)| *name == key && path.as_os_str() == value);
        (!same).then(|| format!("{key}={value:?} of your environment is not passed to the daemon"))
    });
    ambient.collect()
}

fn server_note(control: &Control<'_>) -> Option<String> {
    control.server_program().is_none().then(|| {
        "nvidia-cuda-mps-server was found neither on PATH nor beside the control program: programs will fail with CUDA error 805".to_owned()
    })
}

/// How the daemon comes about.
enum Way {
    /// It runs already, provably ours, and lacks only a record.
    Adopt(Running),
    /// It is launched.
    Launch,
}

struct Start<'s> {
    host: &'s Host,
    store: &'s Store<'s>,
    locked: &'s Locked<'s>,
    control: &'s Control<'s>,
    here: Place,
    plan: Plan,
    name: DaemonName,
    directories: Directories,
}

impl Start<'_> {
    /// Refuses what must not be, before anything is touched, and then clears the way and writes the intent. The lock on
    /// all records is held, so that no other start decides about the same GPU meanwhile.
    fn prepare(&self, ui: &mut Ui<'_>) -> Result<Way, Error> {
        let entry = self.locked.entry();
        self.refuse_if_taken(entry.as_ref())?;
        self.refuse_if_gpu_taken()?;
        let way = match self.left_by_interrupted_start(ui, entry.as_ref())? {
            Some(process) => Way::Adopt(process),
            None => self.way(mps::keeper(self.host, &self.directories.pipe))?,
        };
        self.refuse_if_blocked()?;
        for note in runtime_dir::create(self.host, &self.directories)? {
            ui.note(note);
        }
        if matches!(entry, Some(Entry::Record(_) | Entry::Damaged { .. })) {
            self.locked.quarantine()?;
        }
        let us = i32::try_from(std::process::id()).unwrap_or_default();
        let launcher = process::running(self.host, us).map_or(
            ProcessId {
                pid: us,
                start_ticks: 0,
            },
            |running| running.id,
        );
        self.locked.put_intent(&self.record(launcher))?;
        Ok(way)
    }

    fn refuse_if_taken(&self, entry: Option<&Entry>) -> Result<(), Error> {
        let record = match entry {
            None | Some(Entry::Damaged { .. }) => return Ok(()),
            Some(Entry::Record(record) | Entry::Intent(record)) => record,
        };
        if record.uid != self.host.uid {
            return Err(daemon::other_user(self.host, record));
        }
        if matches!(entry, Some(Entry::Intent(_))) {
            // We hold the lock under which its start would work, so that start is over.
            return Ok(());
        }
        let daemon = daemon::observe(self.host, &self.here, record.clone());
        match &daemon.state {
            State::Stale => Ok(()),
            State::Live(process) | State::NotAnswering(process) => Err(Error::AlreadyLive {
                name: self.name.clone(),
                pid: process.id.pid,
            }),
            State::Unreachable(_) => Err(daemon::unreachable(&daemon)),
            State::OtherPidNamespace { .. } => Err(Error::OtherPidNamespace(self.name.clone())),
            State::OtherHost => Err(daemon::other_host(self.host, self.store, record)),
        }
    }

    /// Two servers on one GPU take turns on it, which is what MPS is there to avoid.
    fn refuse_if_gpu_taken(&self) -> Result<(), Error> {
        let (daemons, others) = daemon::observe_all(self.host, self.store)?;
        let recorded = daemons.iter().filter_map(|daemon| {
            let runs = daemon.state.process().is_some() || daemon.state.reachable();
            runs.then_some((&daemon.record, daemon.record.process.pid))
        });
        let unfinished = others.iter().filter_map(|other| {
            let (intent, pid) = other.intent.as_ref()?;
            Some((intent, (*pid)?))
        });
        for (record, pid) in recorded.chain(unfinished) {
            if record.name != self.name && record.gpu_uuids.contains(&self.plan.gpu.uuid) {
                return Err(Error::GpuTaken {
                    gpu: self.plan.gpu.clone(),
                    by: record.name.clone(),
                    pid,
                });
            }
        }
        Ok(())
    }

    /// The daemon that an interrupted start of this name has launched, if it is the one that is wanted now. Any other is
    /// ended: nobody was told of it.
    fn left_by_interrupted_start(
        &self,
        ui: &mut Ui<'_>,
        entry: Option<&Entry>,
    ) -> Result<Option<Running>, Error> {
        let Some(Entry::Intent(intent)) = entry else {
            return Ok(None);
        };
        let Some(process) = daemon::left_by(self.host, &self.here, intent) else {
            return Ok(None);
        };
        if intent.pipe_directory == self.directories.pipe && self.serves_just_this_gpu(&process) {
            return Ok(Some(process));
        }
        self.end(&process)?;
        ui.note(format!(
            "ended {}, which an interrupted start had left",
            process.id
        ));
        Ok(None)
    }

    /// What to do about the process that keeps our pipe directory. A daemon of this user in our own default directory
    /// has only lost its record; lock and socket have been seen to agree.
    fn way(&self, keeper: Keeper) -> Result<Way, Error> {
        match keeper {
            Keeper::Nobody => Ok(Way::Launch),
            Keeper::Process(process)
                if self.directories.pipe_is_our_own()
                    && process.uid == self.host.uid
                    && self.serves_just_this_gpu(&process) =>
            {
                Ok(Way::Adopt(process))
            }
            Keeper::Process(process) => Err(self.pipe_taken(format!(
                "pid {} of uid {} runs there without a record of yours",
                process.id.pid, process.uid
            ))),
            Keeper::Elsewhere => {
                Err(self.pipe_taken("its process is not visible from here".to_owned()))
            }
            Keeper::Contradiction(found) => Err(Error::Contradiction {
                pipe: self.directories.pipe.clone(),
                found,
            }),
        }
    }

    fn serves_just_this_gpu(&self, process: &Running) -> bool {
        let visible = process::variable_of(self.host, process.id.pid, "CUDA_VISIBLE_DEVICES");
        visible.as_deref() == Some(self.plan.gpu.uuid.as_str())
    }

    fn pipe_taken(&self, owner: String) -> Error {
        Error::PipeTaken {
            path: self.directories.pipe.clone(),
            owner,
        }
    }

    fn refuse_if_blocked(&self) -> Result<(), Error> {
        match mps::control_socket(self.host, &self.directories.pipe) {
            Socket::Other(what) => Err(Error::PipeBlocked {
                path: mps::control_path(&self.directories.pipe),
                what,
            }),
            _ => Ok(()),
        }
    }

    fn record(&self, process: ProcessId) -> DaemonRecord {
        let now = self.host.clock.now().duration_since(UNIX_EPOCH);
        DaemonRecord {
            name: self.name.clone(),
            uid: self.host.uid,
            place: self.here.clone(),
            topology_mode: self.plan.mode,
            gpu_uuids: vec![self.plan.gpu.uuid.clone()],
            pipe_directory: self.directories.pipe.clone(),
            log_directory: self.directories.log.clone(),
            process,
            created_at: now.unwrap_or_default().as_secs_f64(),
            unknown: serde_json::Map::new(),
        }
    }

    fn put(&self, process: &Running) -> Result<DaemonRecord, Error> {
        let record = self.record(process.id);
        self.locked.put(&record)?;
        Ok(record)
    }

    fn adopt(&self, ui: &mut Ui<'_>, process: Running) -> Result<DaemonRecord, Error> {
        let log = LogMark::set(self.host, &self.directories.log);
        self.wait_until_ready(&log, || None)?;
        let record = self.put(&process)?;
        ui.note(format!(
            "{} ran already in {:?} without a record; it is recorded again",
            process.id, self.directories.pipe
        ));
        Ok(record)
    }

    /// Launches the daemon with `-d`. Whatever fails afterwards ends what was launched.
    fn detached(&self) -> Result<DaemonRecord, Error> {
        let log = LogMark::set(self.host, &self.directories.log);
        let gpus = [self.plan.gpu.uuid.clone()];
        let mut group = 0;
        let outcome = match self.control.launch(&gpus) {
            Ok(finished) if finished.status.success() => {
                group = finished.process_group;
                self.wait_until_ready(&log, || None)
                    .and_then(|process| self.put(&process))
            }
            Ok(finished) => {
                group = finished.process_group;
                Err(self.launch_failed(said(&finished), &log))
            }
            Err(RunError::Interrupted(signal)) => Err(Error::Interrupted(signal)),
            Err(error) => Err(self.launch_failed(error.to_string(), &log)),
        };
        outcome.map_err(|failure| self.abandon(failure, group))
    }

    /// Runs the daemon with `-f` as our child. It is recorded while it runs.
    fn in_foreground(&self, ui: &mut Ui<'_>) -> Result<u8, Error> {
        let log = LogMark::set(self.host, &self.directories.log);
        let gpus = [self.plan.gpu.uuid.clone()];
        let ended = AtomicBool::new(false);
        let finished = thread::scope(|scope| {
            let child = scope.spawn(|| {
                let finished = self.control.foreground(&gpus);
                ended.store(true, Ordering::Release);
                finished
            });
            let early = || ended.load(Ordering::Acquire).then_some(());
            let recorded = self
                .wait_until_ready(&log, early)
                .and_then(|process| self.put(&process));
            match recorded {
                Ok(record) => {
                    ui.json(&record.to_json());
                    self.locked.release();
                }
                Err(failure) => {
                    let failure = self.abandon(failure, 0);
                    if !ended.load(Ordering::Acquire) {
                        // Not even its process could be told: pass the signal on as if we had got it.
                        process::terminate_ourselves();
                    }
                    return Err(match (failure, child.join()) {
                        (Error::EndedEarly { .. }, Ok(Ok(finished))) => ended_early(&finished),
                        (failure, _) => failure,
                    });
                }
            }
            match child.join() {
                Ok(Ok(finished)) => Ok(finished),
                Ok(Err(error)) => Err(self.launch_failed(error.to_string(), &log)),
                Err(_) => Err(self.launch_failed("its thread panicked".to_owned(), &log)),
            }
        })?;
        self.forget_foreground()?;
        Ok(finished.status.shell_code())
    }

    /// The foreground daemon has ended: its record goes, unless somebody has started another one meanwhile.
    fn forget_foreground(&self) -> Result<(), Error> {
        let locked = self.store.lock(&self.name)?;
        let Some(Entry::Record(record)) = locked.entry() else {
            return Ok(());
        };
        match daemon::observe(self.host, &self.here, record.clone()).state {
            State::Stale => daemon::forget(self.host, &locked, &record),
            _ => Ok(()),
        }
    }

    /// Waits until the daemon has answered a question and its process is certain. `early` may say that it has ended.
    fn wait_until_ready(
        &self,
        log: &LogMark,
        early: impl Fn() -> Option<()>,
    ) -> Result<Running, Error> {
        let deadline = self.host.clock.monotonic() + READY_LIMIT;
        let mut last = String::from("it was not seen");
        let ready = self.host.wait_for(READY_LIMIT, || {
            if early().is_some() {
                return Some(Err(Error::EndedEarly { status: 1 }));
            }
            let left = deadline.saturating_sub(self.host.clock.monotonic());
            if left < SESSION {
                return None;
            }
            match self.control.servers(left) {
                Ok(_) => {}
                Err(AskError::Call(RunError::Interrupted(signal))) => {
                    return Some(Err(Error::Interrupted(signal)));
                }
                Err(error) => {
                    last = error.to_string();
                    return None;
                }
            }
            match self.identify() {
                Ok(process) => Some(Ok(process)),
                Err(reason) => {
                    last = reason;
                    None
                }
            }
        });
        ready.unwrap_or_else(|| {
            Err(Error::NotReady {
                pipe: self.directories.pipe.clone(),
                seconds: READY_LIMIT.as_secs(),
                cause: last,
                log: log.new_lines(),
                log_directory: self.directories.log.clone(),
            })
        })
    }

    /// The process of the daemon that has just answered.
    fn identify(&self) -> Result<Running, String> {
        let pipe = &self.directories.pipe;
        let found = match mps::keeper(self.host, pipe) {
            Keeper::Process(process) => Some(process),
            // A wrapper that takes no lock, or a lock of another pid namespace.
            Keeper::Nobody | Keeper::Elsewhere => {
                let socket = mps::control_socket(self.host, pipe);
                if socket.kind().is_none() {
                    return Err(socket.describe(&mps::control_path(pipe)));
                }
                mps::named_by_pid_file(self.host, pipe)
            }
            Keeper::Contradiction(found) => return Err(found),
        };
        match found {
            Some(process) if process.uid == self.host.uid => Ok(process),
            Some(process) => Err(format!("{} belongs to uid {}", process.id, process.uid)),
            None => Err("it answers, but its process cannot be told".to_owned()),
        }
    }

    fn launch_failed(&self, cause: String, log: &LogMark) -> Error {
        Error::LaunchFailed {
            cause,
            log: log.new_lines(),
            log_directory: self.directories.log.clone(),
        }
    }

    /// Ends what a failed start has launched, and takes the intent back. Nobody has been told of the daemon yet, so it
    /// has no clients that a hard end could harm.
    fn abandon(&self, failure: Error, group: i32) -> Error {
        let mut launched = match mps::keeper(self.host, &self.directories.pipe) {
            Keeper::Process(process) if process.uid == self.host.uid => vec![process],
            _ => Vec::new(),
        };
        if group > 0 {
            launched.extend(process::members_of_group(self.host, group));
        }
        for process in &launched {
            if self.end(process).is_err() {
                return Error::LeftRunning {
                    failure: Box::new(failure),
                    pid: process.id.pid,
                };
            }
        }
        mps::clear(self.host, &self.directories.pipe);
        runtime_dir::remove_if_empty(self.host, &self.directories.pipe);
        // What is left of it is an intent without a daemon, which the next start overwrites.
        let _ = self.locked.remove();
        failure
    }

    fn end(&self, process: &Running) -> Result<(), Error> {
        if daemon::terminate(self.host, process, END_LIMIT)? {
            return Ok(());
        }
        let failed = |source| Error::Signal {
            pid: process.id.pid,
            source,
        };
        if let Some(handle) = Handle::of(self.host, process.id).map_err(failed)? {
            handle.kill().map_err(failed)?;
            if !handle.wait(self.host, END_LIMIT) {
                return Err(failed(std::io::Error::other("SIGKILL did not end it")));
            }
        }
        Ok(())
    }
}

/// A foreground daemon that was not ready yet. Either of two threads may have got a signal that was meant for us; the
/// one that waits for the daemon has passed it on.
fn ended_early(finished: &Finished) -> Error {
    match finished.status {
        Status::Signaled(signal) => Error::Interrupted(signal),
        Status::Exited(_) => Error::EndedEarly {
            status: finished.status.shell_code(),
        },
    }
}

/// What a launch that failed has said.
fn said(finished: &Finished) -> String {
    let status = finished.status.shell_code();
    match finished.said() {
        said if said.is_empty() => format!("it exited with status {status} and said nothing"),
        said => format!("it exited with status {status}: {said}"),
    }
}
