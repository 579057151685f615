//! A recorded daemon as it is found now: which state it is in, which one is meant, and how one is ended that will not
//! quit.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::compute_mode;
use crate::error::Error;
use crate::gpu::{Gpu, GpuUuid, MigUuid, Selector, SelectorItem};
use crate::host::Host;
use crate::mps::{self, AskError, Control, Keeper, Socket};
use crate::nvidia_smi;
use crate::process::{self, Handle, Running};
use crate::rank;
use crate::record::{Belongs, DaemonName, DaemonRecord, Place};
use crate::runner::RunError;
use crate::runtime_dir;
use crate::store::{Entry, Locked, Store};
use crate::topology;
use crate::ui::Ui;

/// What is known about a recorded daemon without asking it anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Its process runs and its socket leads to it.
    Live(Running),
    /// Likewise, but the process is stopped and cannot answer.
    NotAnswering(Running),
    /// Its process runs, and its socket is gone or leads elsewhere. Programs would not find it.
    Unreachable(Running),
    /// Its process is gone.
    Stale,
    /// It was started before the machine's last boot, so its process is gone.
    OtherBoot,
    /// It was started in another pid namespace of this machine. Whether it is reachable is all that can be said.
    OtherPidNamespace {
        /// Somebody listens on its socket.
        reachable: bool,
    },
    /// It was started on another machine.
    OtherHost,
}

impl State {
    /// The word that `status` shows.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Live(_) => "live",
            Self::NotAnswering(_) => "not-answering",
            Self::Unreachable(_) => "unreachable",
            Self::Stale => "stale",
            Self::OtherBoot => "other-boot",
            Self::OtherPidNamespace { .. } => "other-pid-namespace",
            Self::OtherHost => "other-host",
        }
    }

    /// The daemon's process, where it certainly runs.
    pub fn process(&self) -> Option<&Running> {
        match self {
            Self::Live(process) | Self::NotAnswering(process) | Self::Unreachable(process) => {
                Some(process)
            }
            Self::Stale | Self::OtherBoot | Self::OtherPidNamespace { .. } | Self::OtherHost => {
                None
            }
        }
    }

    /// Whether the daemon is certainly gone, so that its record may go as well.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Stale | Self::OtherBoot)
    }

    /// Whether the daemon runs, as far as can be told from here.
    pub fn runs(&self) -> bool {
        self.process().is_some() || self.reachable()
    }

    /// Whether programs that are told of it would reach it.
    pub fn reachable(&self) -> bool {
        match self {
            Self::Live(_) | Self::NotAnswering(_) => true,
            Self::OtherPidNamespace { reachable } => *reachable,
            Self::Unreachable(_) | Self::Stale | Self::OtherBoot | Self::OtherHost => false,
        }
    }
}

/// Why a daemon is not asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unasked {
    /// Its process is stopped and would not answer.
    #[error("its process is stopped (state T)")]
    Stopped,
    /// Nobody, or somebody else, would answer. This stands at its socket's place.
    #[error("{0}")]
    Unreachable(String),
    /// The pids that it would tell are those of other processes here.
    #[error("it was started in another pid namespace, and its pids mean nothing here")]
    OtherPidNamespace,
    /// It is gone, or on another machine. The word is that of its state.
    #[error("its state is {0}")]
    State(&'static str),
}

/// A record and the state of its daemon.
#[derive(Clone, Debug, PartialEq)]
pub struct Observed {
    /// The record.
    pub record: DaemonRecord,
    /// What became of the daemon.
    pub state: State,
    /// What stands at its socket's place.
    pub socket: Socket,
}

impl Observed {
    /// How the daemon is asked, or why it need not be tried. Fails where the control program is not installed.
    pub fn control<'h>(&self, host: &'h Host) -> Result<Result<Control<'h>, Unasked>, Error> {
        let record = &self.record;
        Ok(Err(match self.state {
            State::Live(_) => {
                let control = Control::find(host, &record.pipe_directory, &record.log_directory);
                return control.map(Ok).ok_or(Error::NoProgram(mps::CONTROL));
            }
            State::NotAnswering(_) => Unasked::Stopped,
            State::Unreachable(_) => {
                let path = mps::control_path(&record.pipe_directory);
                Unasked::Unreachable(self.socket.describe(&path))
            }
            State::OtherPidNamespace { .. } => Unasked::OtherPidNamespace,
            State::Stale | State::OtherBoot | State::OtherHost => Unasked::State(self.state.word()),
        }))
    }

    /// The record with its state, as `status --json` and `doctor --json` show it.
    pub fn to_json(&self) -> Value {
        let mut value = self.record.to_json();
        value["process_live"] = self.state.process().is_some().into();
        value["record_state"] = self.state.word().into();
        value["reachable"] = self.state.reachable().into();
        value
    }

    /// The daemon's line in plain text.
    pub fn line(&self) -> String {
        format!(
            "daemon name={} state={} pid={}",
            self.record.name,
            self.state.word(),
            self.record.process.pid
        )
    }
}

/// Finds out what became of a recorded daemon.
pub fn observe(host: &Host, here: &Place, record: DaemonRecord) -> Observed {
    let socket = mps::control_socket(host, &record.pipe_directory);
    let state = state(host, here, &record, &socket);
    Observed {
        record,
        state,
        socket,
    }
}

fn state(host: &Host, here: &Place, record: &DaemonRecord, socket: &Socket) -> State {
    match record.place.seen_from(here) {
        Belongs::OtherBoot => return State::OtherBoot,
        Belongs::OtherHost => return State::OtherHost,
        Belongs::OtherPidNamespace => {
            return State::OtherPidNamespace {
                reachable: matches!(socket, Socket::Listening { .. }),
            };
        }
        Belongs::Here => {}
    }
    let running = process::still_running(host, record.process);
    let Some(process) = running.filter(|process| process.uid == record.uid) else {
        return State::Stale;
    };
    match socket {
        Socket::Listening { pid } if pid.is_none_or(|pid| pid == record.process.pid) => {
            if process.stopped {
                State::NotAnswering(process)
            } else {
                State::Live(process)
            }
        }
        Socket::Fifo => State::Live(process),
        _ => State::Unreachable(process),
    }
}

/// A name in the store without a readable record.
#[derive(Clone, Debug, PartialEq)]
pub struct Unrecorded {
    /// The name.
    pub name: DaemonName,
    /// `starting`, `interrupted` or `damaged`.
    pub word: &'static str,
    /// What is known about it.
    pub reason: String,
    /// The intent of a start, and the process that works on it or that it left behind.
    pub intent: Option<(DaemonRecord, Option<i32>)>,
}

/// What became of a start that left no record, or what is wrong with a damaged record; `None` for a record.
pub fn unrecorded(host: &Host, here: &Place, entry: Entry) -> Option<Unrecorded> {
    let intent = match entry {
        Entry::Record(_) => return None,
        Entry::Intent(intent) => intent,
        Entry::Damaged { name, path, reason } => {
            return Some(Unrecorded {
                name,
                word: "damaged",
                reason: format!("{}: {reason}", path.display()),
                intent: None,
            });
        }
    };
    let (word, reason, pid) = match author(host, here, &intent) {
        Some(pid) => ("starting", format!("pid {pid} is starting it"), Some(pid)),
        None => match left_by(host, here, &intent) {
            Some(process) => {
                let pid = process.id.pid;
                let reason = format!("its start was interrupted and left pid {pid} running");
                ("interrupted", reason, Some(pid))
            }
            None => (
                "interrupted",
                "its start was interrupted and left nothing running".to_owned(),
                None,
            ),
        },
    };
    Some(Unrecorded {
        name: intent.name.clone(),
        word,
        reason,
        intent: Some((intent, pid)),
    })
}

/// The `start` that is working on an entry.
pub fn launcher(host: &Host, here: &Place, entry: &Entry) -> Option<i32> {
    match entry {
        Entry::Intent(intent) => author(host, here, intent),
        Entry::Record(_) | Entry::Damaged { .. } => None,
    }
}

/// The `start` that wrote an intent, while it runs.
fn author(host: &Host, here: &Place, intent: &DaemonRecord) -> Option<i32> {
    if intent.place.seen_from(here) != Belongs::Here {
        return None;
    }
    process::still_running(host, intent.process).map(|launcher| launcher.id.pid)
}

/// What an interrupted start left behind: the keeper of the pipe directory that it launched a daemon into, or the
/// control program that is about to become it.
pub fn left_by(host: &Host, here: &Place, intent: &DaemonRecord) -> Option<Running> {
    if intent.place.seen_from(here) != Belongs::Here {
        return None;
    }
    match mps::keeper(host, &intent.pipe_directory) {
        Keeper::Process(process) => (process.uid == host.uid).then_some(process),
        Keeper::Nobody => mps::coming_up(host, &intent.pipe_directory),
        Keeper::Elsewhere | Keeper::Contradiction(_) => None,
    }
}

/// Whether an intent's start is over and nothing of it runs. Asked under the lock, where no start is at work.
pub fn left_nothing(host: &Host, here: &Place, intent: &DaemonRecord) -> bool {
    match intent.place.seen_from(here) {
        Belongs::OtherBoot => true,
        Belongs::Here => {
            author(host, here, intent).is_none()
                && settled_keeper(host, &intent.pipe_directory) == Keeper::Nobody
                && mps::coming_up(host, &intent.pipe_directory).is_none()
        }
        Belongs::OtherHost | Belongs::OtherPidNamespace => false,
    }
}

/// How long a control program that was launched may take to become the daemon, or to give up.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// How long nobody must have been seen. A control program that becomes a daemon forks twice within a few milliseconds,
/// and one look through `/proc` may miss the parent, which has just ended, and the child, which was not there yet.
const QUIET: Duration = Duration::from_millis(25);

/// Who keeps the pipe directory once no control program is about to.
pub fn settled_keeper(host: &Host, pipe: &Path) -> Keeper {
    let mut quiet_since = None;
    let settled = host.wait_for(SETTLE_LIMIT, || {
        let keeper = mps::keeper(host, pipe);
        if keeper != Keeper::Nobody {
            return Some(keeper);
        }
        if mps::coming_up(host, pipe).is_some() {
            quiet_since = None;
            return None;
        }
        let now = host.clock.monotonic();
        let since = *quiet_since.get_or_insert(now);
        (now.saturating_sub(since) >= QUIET).then_some(keeper)
    });
    settled.unwrap_or(Keeper::Nobody)
}

/// All records of this user with their states, by name, and the entries that are none. Records of other users are left
/// out: nothing may be done with them.
pub fn observe_all(
    host: &Host,
    store: &Store<'_>,
) -> Result<(Vec<Observed>, Vec<Unrecorded>), Error> {
    let here = process::place(host);
    let mut observed = Vec::new();
    let mut others = Vec::new();
    for entry in store.list()? {
        match entry {
            Entry::Record(record) if record.uid == host.uid => {
                observed.push(observe(host, &here, record));
            }
            Entry::Record(_) => {}
            Entry::Intent(_) | Entry::Damaged { .. } => {
                others.extend(unrecorded(host, &here, entry));
            }
        }
    }
    Ok((observed, others))
}

/// The daemon of this name, or without one the only daemon that is live.
pub fn select(host: &Host, store: &Store<'_>, name: Option<&str>) -> Result<Observed, Error> {
    if let Some(name) = name {
        let name: DaemonName = name.parse()?;
        let entry = store.entry(&name).ok_or(Error::NoRecord(name))?;
        let record = entry.into_record()?;
        return if record.uid == host.uid {
            Ok(observe(host, &process::place(host), record))
        } else {
            Err(other_user(host, &record))
        };
    }
    let (observed, _) = observe_all(host, store)?;
    only_one(observed)
}

/// The only daemon that programs would reach, or else the only one that runs.
fn only_one(observed: Vec<Observed>) -> Result<Observed, Error> {
    let (reachable, rest): (Vec<_>, Vec<_>) = observed
        .into_iter()
        .filter(|daemon| daemon.state.runs())
        .partition(|daemon| daemon.state.reachable());
    let mut candidates = if reachable.is_empty() {
        rest
    } else {
        reachable
    };
    match candidates.pop() {
        None => Err(Error::NoLiveDaemon),
        Some(daemon) if candidates.is_empty() => Ok(daemon),
        Some(last) => {
            candidates.push(last);
            let names = candidates.into_iter().map(|daemon| daemon.record.name);
            Err(Error::SeveralLive {
                names: names.collect(),
            })
        }
    }
}

/// The daemon that this process's rank uses, of all that programs would reach, in the order of their GPUs.
pub fn of_rank(host: &Host, store: &Store<'_>) -> Result<Observed, Error> {
    let get = |key: &str| Some(host.env.get(key)?.to_string_lossy().into_owned());
    let rank = rank::local(get)?;
    let (mut daemons, _) = observe_all(host, store)?;
    daemons.retain(|daemon| daemon.state.reachable());
    if daemons.is_empty() {
        return Err(Error::NoLiveDaemon);
    }
    daemons.sort_by(|one, other| one.record.by_gpu(&other.record));
    let place = rank::share(rank, daemons.len())?;
    Ok(daemons.swap_remove(place))
}

/// The record of a daemon, if programs that get its environment will find it. They would otherwise run without MPS, and
/// nothing would say so.
pub fn reachable(host: &Host, store: &Store<'_>, daemon: Observed) -> Result<DaemonRecord, Error> {
    match &daemon.state {
        State::Live(_) | State::NotAnswering(_) | State::OtherPidNamespace { reachable: true } => {
            Ok(daemon.record)
        }
        State::OtherPidNamespace { reachable: false } => {
            Err(Error::OtherPidNamespace(daemon.record.name))
        }
        State::Unreachable(_) => Err(unreachable(&daemon)),
        State::Stale | State::OtherBoot => Err(Error::Stale(daemon.record.name)),
        State::OtherHost => Err(other_host(host, store, &daemon.record)),
    }
}

/// The record of a daemon for a client of it, and what the client should know.
pub fn for_client(
    host: &Host,
    store: &Store<'_>,
    daemon: Observed,
) -> Result<(DaemonRecord, Vec<String>), Error> {
    let notes = client_notes(host, &daemon);
    Ok((reachable(host, store, daemon)?, notes))
}

/// What a client of this daemon should know about its own surroundings.
fn client_notes(host: &Host, daemon: &Observed) -> Vec<String> {
    let record = &daemon.record;
    let elsewhere = match &daemon.state {
        State::OtherPidNamespace { .. } => true,
        State::Live(process) | State::NotAnswering(process) => {
            process::shares_namespace(host, process.id.pid, "ipc") == Some(false)
        }
        _ => false,
    };
    let ipc = elsewhere.then(|| {
        format!(
            "daemon {} lives in another container or IPC namespace: clients need its pipe directory and its /dev/shm (docker run --ipc=…)",
            record.name
        )
    });
    let stopped = matches!(daemon.state, State::NotAnswering(_)).then(|| {
        format!(
            "daemon {} is stopped and does not answer; programs wait for it: kill -CONT {}",
            record.name, record.process.pid
        )
    });
    let mask = host.env.visible_devices();
    let mask = mask.filter(|mask| record.is_hidden_by(mask)).map(|mask| {
        format!(
            "CUDA_VISIBLE_DEVICES={mask:?} of your environment names no GPU of daemon {}, and is replaced",
            record.name
        )
    });
    [stopped, ipc, mask].into_iter().flatten().collect()
}

/// The only daemon that serves these GPUs. A UUID says by itself which one is meant; what an index means only nvidia-smi
/// knows.
pub fn of_gpu(host: &Host, store: &Store<'_>, selector: &str) -> Result<Observed, Error> {
    let (mut daemons, _) = observe_all(host, store)?;
    if let Selector::List(items) = topology::parse(selector)? {
        for item in items {
            let named = Named::of(host, &item)?;
            daemons.retain(|daemon| named.is_served_by(&daemon.record));
        }
    }
    only_one(daemons).map_err(|error| match error {
        Error::NoLiveDaemon => Error::NoDaemonForGpu(selector.trim().to_owned()),
        error => error,
    })
}

/// A selector with indices replaced by UUIDs, for looking again and again without asking nvidia-smi each time.
pub fn lasting(host: &Host, selector: &str) -> Result<String, Error> {
    let Selector::List(items) = topology::parse(selector)? else {
        return Ok(selector.to_owned());
    };
    let name = |item: &SelectorItem| {
        Ok(match Named::of(host, item)? {
            Named::Gpu(uuid) => uuid.to_string(),
            Named::Mig(uuid) => uuid.to_string(),
        })
    };
    let names: Result<Vec<String>, Error> = items.iter().map(name).collect();
    Ok(names?.join(","))
}

/// What an entry of a selector names, with indices replaced.
enum Named {
    Gpu(GpuUuid),
    Mig(MigUuid),
}

impl Named {
    fn of(host: &Host, item: &SelectorItem) -> Result<Self, Error> {
        match item {
            SelectorItem::Mig(mig, _) => Ok(Self::Mig(mig.clone())),
            SelectorItem::Uuid(uuid, _) => Ok(Self::Gpu(uuid.clone())),
            SelectorItem::Index(index, text) => {
                let found = nvidia_smi::discover(host)?;
                let mut gpus = found.gpus.iter().filter_map(Gpu::identity);
                if let Some(gpu) = gpus.find(|gpu| gpu.index == *index) {
                    return Ok(Self::Gpu(gpu.uuid.clone()));
                }
                found.resolve(Some(text), None)?;
                Err(Error::NoDaemonForGpu(text.clone()))
            }
        }
    }

    /// Whether a daemon serves it, or a part of it.
    fn is_served_by(&self, record: &DaemonRecord) -> bool {
        match self {
            Self::Gpu(uuid) => record.gpu_uuids.contains(uuid),
            Self::Mig(uuid) => record.mig_uuid.as_ref() == Some(uuid),
        }
    }
}

/// The daemon that is meant: by its name, by the GPUs that it serves, or the only live one.
pub fn meant(
    host: &Host,
    store: &Store<'_>,
    name: Option<&str>,
    gpus: Option<&str>,
) -> Result<Observed, Error> {
    match gpus {
        Some(selector) => of_gpu(host, store, selector),
        None => select(host, store, name),
    }
}

/// Whether a daemon of the user `daemon` gives a server to programs of the user `program`: root's can become anybody, and
/// nobody else's can, not even for root.
pub fn serves(daemon: u32, program: u32) -> bool {
    daemon == 0 || daemon == program
}

/// The refusal to touch another user's record.
pub fn other_user(host: &Host, record: &DaemonRecord) -> Error {
    Error::OtherUser {
        name: record.name.clone(),
        uid: record.uid,
        ours: host.uid,
    }
}

/// The refusal to touch another machine's record.
pub fn other_host(host: &Host, store: &Store<'_>, record: &DaemonRecord) -> Error {
    Error::OtherHost {
        name: record.name.clone(),
        host: record.place.host.clone(),
        here: process::place(host).host,
        directory: store.directory(&record.name),
    }
}

/// The complaint about a daemon that was asked and gave no answer.
pub fn no_answer(record: &DaemonRecord, error: AskError) -> Error {
    match error {
        AskError::Call(RunError::Interrupted(signal)) => Error::Interrupted(signal),
        error => Error::NotAnswering {
            name: record.name.clone(),
            pid: record.process.pid,
            cause: error.to_string(),
            stopped: false,
        },
    }
}

/// The complaint about a daemon whose socket does not lead to it.
pub fn unreachable(daemon: &Observed) -> Error {
    let record = &daemon.record;
    Error::Unreachable {
        name: record.name.clone(),
        pid: record.process.pid,
        found: daemon
            .socket
            .describe(&mps::control_path(&record.pipe_directory)),
    }
}

/// Ends a daemon's process with SIGTERM and waits for its end; `false` if it is still there after `limit`. The daemon
/// has no handler: it ends at once and leaves its files.
pub fn terminate(host: &Host, process: &Running, limit: Duration) -> Result<bool, Error> {
    end_with(host, process, limit, Handle::terminate)
}

/// Likewise with SIGKILL.
pub fn kill(host: &Host, process: &Running, limit: Duration) -> Result<bool, Error> {
    end_with(host, process, limit, Handle::kill)
}

fn end_with(
    host: &Host,
    process: &Running,
    limit: Duration,
    end: fn(&Handle) -> io::Result<()>,
) -> Result<bool, Error> {
    let failed = |source| Error::Signal {
        pid: process.id.pid,
        source,
    };
    let Some(handle) = Handle::of(host, process.id).map_err(failed)? else {
        return Ok(true);
    };
    end(&handle).map_err(failed)?;
    Ok(handle.wait(host, limit))
}

/// Whether the process of a record is certainly its control daemon, so that it may be signalled: it holds the lock of
/// the record's pipe directory, or, where the lock file was removed, it is a control program that was started with
/// that directory.
pub fn is_proven(host: &Host, record: &DaemonRecord, process: &Running) -> bool {
    let pid = process.id.pid;
    if mps::lock_holder(host, &record.pipe_directory) == Some(pid) {
        return true;
    }
    let pipe = process::variable_of(host, pid, "CUDA_MPS_PIPE_DIRECTORY");
    process::program_name(host, pid).as_deref() == Some(mps::CONTROL)
        && pipe.is_some_and(|pipe| Path::new(&pipe) == record.pipe_directory)
}

/// Forgets a daemon that is gone: its record, what it left in its pipe directory, and that its GPUs were exclusive. What
/// cannot be given back is told.
pub fn forget(
    host: &Host,
    ui: &mut Ui<'_>,
    locked: &Locked<'_>,
    record: &DaemonRecord,
) -> Result<(), Error> {
    // The modes of another boot are gone with it.
    if record.place.seen_from(&process::place(host)) == Belongs::Here {
        compute_mode::restore(host, ui, &record.compute_modes_before)?;
    }
    mps::clear(host, &record.pipe_directory);
    runtime_dir::remove_if_empty(host, &record.pipe_directory);
    locked.remove()
}

/// The control pipes as `status --json` reports them: each pipe directory whose socket takes connections, once.
pub fn control_pipes(daemons: &[Observed]) -> Vec<Value> {
    let mut names: BTreeMap<&Path, (&'static str, Vec<&str>)> = BTreeMap::new();
    for daemon in daemons {
        if let Some(kind) = daemon.socket.kind() {
            let pipe = names.entry(&daemon.record.pipe_directory);
            let (_, names) = pipe.or_insert((kind, Vec::new()));
            names.push(daemon.record.name.as_str());
        }
    }
    let pipe = |(directory, (kind, names))| json!({"path": mps::control_path(directory), "kind": kind, "managed_names": names});
    names.into_iter().map(pipe).collect()
}
