//! `run`: a program as a client of a daemon. It takes our place, unless it is to be proven that it really is one.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use crate::attachment::{self, Obstacle};
use crate::binding::{self, Binding};
use crate::cli::{CpuChoice, RunArgs};
use crate::daemon::{self, State};
use crate::error::{Error, SmiFailure};
use crate::gpu::{GpuUuid, SelectorItem};
use crate::host::Host;
use crate::launch::{Request, Wanted};
use crate::limits::Limits;
use crate::mps::{AskError, CONTROL, Control};
use crate::nvidia_smi;
use crate::process::{self, Running};
use crate::record::{DaemonName, DaemonRecord};
use crate::runner::{Finished, Invocation, Mode, RunError, hold_signals_to_pass_on};
use crate::store::Store;
use crate::topology;
use crate::ui::Ui;

/// How long one question to the daemon may take: when the time is up, and while there is plenty of it.
const ASK_LIMITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Time before a question: at first, when it shows whether the program can be run at all, and in the end. Each question
/// leaves five lines in the daemon's log.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// How long a command that is ended may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How many causes are told: a command may have hundreds of processes.
const TOLD: usize = 8;

/// What `env` and GNU's other tools use, so that the program's own status can be told from our failures.
pub(super) fn exit_status(error: &Error) -> u8 {
    match error {
        Error::CannotExecute { source, .. } if source.kind() == std::io::ErrorKind::NotFound => 127,
        Error::CannotExecute { .. } => 126,
        Error::Interrupted(signal) | Error::NvidiaSmi(SmiFailure::Interrupted(signal)) => {
            u8::try_from(128 + signal).unwrap_or(125)
        }
        _ => 125,
    }
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &RunArgs) -> Result<u8, Error> {
    let record = daemon_for(host, ui, args)?;
    let limits = Limits {
        threads: args.threads.clone(),
        memory: args.memory,
        priority: args.priority,
    };
    let mut variables = record.client_environment().to_vec();
    variables.extend(limits.client_environment(record.gpu_uuids.len()));
    let mode = match args.require_mps {
        Some(_) => Mode::Beside,
        None => Mode::Replacing,
    };
    let bound = bind(host, ui, args, &record)?;
    variables.extend(bound.iter().flat_map(|binding| binding.variables.clone()));
    let call = program(host, &args.command, &variables, mode);
    if args.dry_run {
        let call = match &bound {
            Some(binding) => binding.shown(call),
            None => call,
        };
        ui.call_with(&call, &variables);
        return Ok(0);
    }
    match args.require_mps {
        Some(seconds) => proven(host, ui, &call, &record, seconds),
        None => match host.runner.run(&call) {
            Ok(finished) => Ok(finished.status.shell_code()),
            Err(error) => Err(failed(&call, error)),
        },
    }
}

/// Binds us, and with us the program, to the CPUs that were asked for. What comes back holds the claims on the GPUs, until
/// the program has inherited them.
fn bind(
    host: &Host,
    ui: &mut Ui<'_>,
    args: &RunArgs,
    record: &DaemonRecord,
) -> Result<Option<Binding>, Error> {
    if args.cpus == CpuChoice::Off {
        return Ok(None);
    }
    let wanted = binding::Wanted {
        choice: &args.cpus,
        lock_prefix: args.lock_prefix.as_deref(),
        shown: args.dry_run,
    };
    let bound = binding::find(host, &wanted, &record.gpu_uuids).and_then(|binding| {
        if !args.dry_run {
            binding.apply(host)?;
        }
        Ok(binding)
    });
    match bound {
        Ok(binding) => {
            for note in &binding.notes {
                ui.note(note);
            }
            Ok(Some(binding))
        }
        Err(error) if args.strict_cpus => Err(Error::NotBound {
            reason: error.to_string(),
        }),
        Err(error) => {
            ui.note(format!("the program is not bound to CPUs: {error}"));
            Ok(None)
        }
    }
}

/// The user's program with the whole environment of the caller and these variables.
fn program(
    host: &Host,
    command: &[OsString],
    variables: &[(&'static str, String)],
    mode: Mode,
) -> Invocation {
    let inherited = host
        .env
        .all()
        .filter(|(key, _)| !variables.iter().any(|(ours, _)| key.as_os_str() == *ours))
        .map(|(key, value)| (key.clone(), value.clone()));
    let ours = variables
        .iter()
        .map(|(key, value)| (OsString::from(key), OsString::from(value)));
    let (name, arguments) = command
        .split_first()
        .map_or((OsString::new(), &[][..]), |(name, rest)| {
            (name.clone(), rest)
        });
    Invocation {
        purpose: "run the program",
        program: name.into(),
        args: arguments.to_vec(),
        env: inherited.chain(ours).collect(),
        stdin: Vec::new(),
        mode,
    }
}

fn failed(call: &Invocation, error: RunError) -> Error {
    let source = match error {
        RunError::Spawn(source) => source,
        RunError::Interrupted(signal) => return Error::Interrupted(signal),
        RunError::TimedOut(_) => std::io::ErrorKind::TimedOut.into(),
    };
    let mut files = call.candidates().into_iter();
    Error::CannotExecute {
        program: call.program.clone(),
        file: files.find(|file| file.exists()),
        source,
    }
}

/// The daemon that is meant, started if there is none and that was asked for.
fn daemon_for(host: &Host, ui: &mut Ui<'_>, args: &RunArgs) -> Result<DaemonRecord, Error> {
    let store = Store::of(host)?;
    let found = find(host, &store, args);
    let is_absent = matches!(
        found,
        Err(Error::NoLiveDaemon | Error::NoRecord(_) | Error::Stale(_) | Error::NoDaemonForGpu(_))
    );
    if args.start && is_absent {
        return start(host, ui, &store, args);
    }
    let (record, notes) = found?;
    for note in notes {
        ui.note(note);
    }
    Ok(record)
}

fn find(
    host: &Host,
    store: &Store<'_>,
    args: &RunArgs,
) -> Result<(DaemonRecord, Vec<String>), Error> {
    let found = match &args.gpu {
        Some(selector) => daemon::of_gpu(host, store, &gpu(host, selector)?)?,
        None if args.by_rank => daemon::of_rank(host, store)?,
        None => daemon::select(host, store, args.name.as_deref())?,
    };
    if args.require_mps.is_some() && matches!(found.state, State::OtherPidNamespace { .. }) {
        // The daemon names its clients by other numbers than ours.
        return Err(Error::OtherPidNamespace(found.record.name));
    }
    let notes = daemon::client_notes(host, &found);
    Ok((daemon::reachable(host, store, found)?, notes))
}

/// The GPU of a selector. A UUID says it by itself; what an index means only nvidia-smi knows.
fn gpu(host: &Host, selector: &str) -> Result<GpuUuid, Error> {
    if let SelectorItem::Uuid(uuid, _) = topology::only_item(selector)? {
        return Ok(uuid);
    }
    let discovery = nvidia_smi::discover(host)?;
    let mask = host.env.visible_devices();
    let plan = topology::resolve(Some(selector), &discovery.gpus, mask.as_deref())
        .map_err(|error| discovery.explain(error))?;
    Ok(plan.gpu.uuid)
}

/// Starts the daemon that was not there. Somebody who does the same at the same time may be faster.
fn start(
    host: &Host,
    ui: &mut Ui<'_>,
    store: &Store<'_>,
    args: &RunArgs,
) -> Result<DaemonRecord, Error> {
    let wanted = Wanted::of(
        host,
        Request {
            gpus: args.gpu.as_deref(),
            name: args.name.as_deref(),
            ..Request::default()
        },
    )?;
    if args.dry_run {
        return wanted.show(ui, false);
    }
    let named = |name: &DaemonName| {
        let found = daemon::select(host, store, Some(name.as_str()))?;
        daemon::reachable(host, store, found)
    };
    match wanted.start(ui) {
        Ok(record) => {
            ui.note(format!(
                "started daemon {0} (pid {1}); to end it: uni-cumps stop --name {0}",
                record.name, record.process.pid
            ));
            Ok(record)
        }
        Err(Error::AlreadyLive { name, .. }) => named(&name),
        // Whoever has named a daemon gets that one or none.
        Err(Error::GpuTaken { by, .. }) if args.name.is_none() => named(&by),
        Err(error) => Err(error),
    }
}

/// How the wait for a client has ended.
enum Seen {
    /// One of its processes is a client.
    Client,
    /// The program has ended before.
    End(Result<Finished, RunError>),
    /// The time is up; why the daemon could not be asked, if it could not.
    Nothing(Option<AskError>),
}

/// Runs the program beside us and ends it unless one of its processes becomes a client of the daemon in time.
fn proven(
    host: &Host,
    ui: &mut Ui<'_>,
    call: &Invocation,
    record: &DaemonRecord,
    seconds: u64,
) -> Result<u8, Error> {
    let control = Control::find(host, &record.pipe_directory, &record.log_directory)
        .ok_or(Error::NoProgram(CONTROL))?;
    let _held = hold_signals_to_pass_on();
    let not_run = |error| failed(call, error);
    let command = Command::begin(host, call).map_err(not_run)?;
    let waiting = format!("waiting for a client of daemon {}", record.name);
    let (strangers, us) = (command.strangers.clone(), our_pid());
    let is_silent = || {
        let mut command = family(host, us, &strangers).into_iter();
        !command.any(|process| process::has_written(host, process.id.pid))
    };
    let limit = Duration::from_secs(seconds);
    match ui.waiting_beside(&waiting, &is_silent, || command.watch(&control, limit)) {
        Seen::Client => Ok(command.end().map_err(not_run)?.status.shell_code()),
        Seen::End(finished) => match finished.map_err(not_run)?.status {
            status if status.success() => {
                let left = command.family();
                if !left.is_empty() {
                    let pids: Vec<String> = left.iter().map(|one| one.id.to_string()).collect();
                    ui.note(format!("of the command still runs: {}", pids.join(", ")));
                }
                Err(Error::EndedUnattached {
                    name: record.name.clone(),
                })
            }
            status => Ok(status.shell_code()),
        },
        Seen::Nothing(unanswered) => {
            let causes = command.causes(record, unanswered.as_ref());
            let ending = || process::end_all(host, &|| command.family(), END_LIMIT);
            for left in ui.waiting_beside("waiting for the command to end", &is_silent, ending) {
                ui.note(format!("{} could not be ended", left.id));
            }
            Err(not_attached(record, seconds, causes))
        }
    }
}

/// The command that runs beside us. Whatever of it loses its parent becomes our child.
struct Command<'h> {
    host: &'h Host,
    /// Children that we had before: jobs of a shell that has become us, or the daemon where we are a container's first
    /// process.
    strangers: Vec<Running>,
    ended: Receiver<Result<Finished, RunError>>,
}

impl<'h> Command<'h> {
    /// Waits for the program's end in a thread that is left behind with a program that cannot be ended.
    fn begin(host: &'h Host, call: &Invocation) -> Result<Self, RunError> {
        let strangers = process::children_of(host, our_pid());
        let (tell, ended) = mpsc::channel();
        let (runner, call) = (Arc::clone(&host.runner), call.clone());
        thread::Builder::new()
            .spawn(move || tell.send(runner.run(&call)))
            .map_err(RunError::Spawn)?;
        Ok(Self {
            host,
            strangers,
            ended,
        })
    }

    /// Waits until the program runs, and says how it has ended if it could not or does no longer. Before that, a signal
    /// that is meant for it would end our question to the daemon.
    fn has_begun(&self, limit: Duration) -> Option<Result<Finished, RunError>> {
        let begun = || match self.has_ended() {
            Some(finished) => Some(Some(finished)),
            None => (!self.family().is_empty()).then_some(None),
        };
        self.host.wait_for(limit, begun).flatten()
    }

    fn has_ended(&self) -> Option<Result<Finished, RunError>> {
        self.ended.try_recv().ok()
    }

    /// Waits for the end of the program.
    fn end(&self) -> Result<Finished, RunError> {
        let lost = |error| Err(RunError::Spawn(std::io::Error::other(error)));
        self.ended.recv().unwrap_or_else(lost)
    }

    /// The processes of the command.
    fn family(&self) -> Vec<Running> {
        family(self.host, our_pid(), &self.strangers)
    }

    /// Looks again and again for a process of the command among the daemon's clients.
    fn watch(&self, control: &Control<'_>, limit: Duration) -> Seen {
        if let Some(finished) = self.has_begun(limit) {
            return Seen::End(finished);
        }
        let now = || self.host.clock.monotonic();
        let (mut left, mut pause) = (limit, PAUSES.0);
        loop {
            let begun = now();
            if let Some(finished) = self.host.wait_for(pause.min(left), || self.has_ended()) {
                return Seen::End(finished);
            }
            let ask_limit = left.clamp(ASK_LIMITS.0, ASK_LIMITS.1);
            let unanswered = match self.has_client(control, ask_limit) {
                Ok(true) => return Seen::Client,
                Ok(false) => None,
                Err(error) => Some(error),
            };
            if left <= pause {
                return Seen::Nothing(unanswered);
            }
            // No more than it may take: Ctrl-Z stops us, and the command, but not the clock.
            left = left.saturating_sub((now() - begun).min(ask_limit + pause));
            pause = (pause * 3 / 2).min(PAUSES.1);
        }
    }

    /// Whether a process of the command is among the daemon's clients. One may come or go while the daemon answers.
    fn has_client(&self, control: &Control<'_>, limit: Duration) -> Result<bool, AskError> {
        let mut family = self.family();
        let clients = attachment::clients_of(control, limit)?;
        family.extend(self.family());
        Ok(family
            .iter()
            .any(|process| clients.iter().any(|client| client.pid == process.id.pid)))
    }

    /// Why the command has no client, as far as it can be told, with what to do about it.
    fn causes(&self, record: &DaemonRecord, unanswered: Option<&AskError>) -> Vec<Obstacle> {
        let unanswered = unanswered.map(|error| Obstacle {
            what: format!("the daemon could not be asked: {error}"),
            remedy: "uni-cumps doctor".to_owned(),
        });
        let others = attachment::obstacles(self.host, record, &self.family());
        unanswered.into_iter().chain(others).collect()
    }
}

/// What we have started, but for these strangers and all that is theirs.
fn family(host: &Host, us: i32, strangers: &[Running]) -> Vec<Running> {
    let mut family = process::children_of(host, us);
    family.retain(|child| !strangers.iter().any(|known| known.id == child.id));
    process::with_descendants(host, family)
}

fn our_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or_default()
}

fn not_attached(record: &DaemonRecord, seconds: u64, causes: Vec<Obstacle>) -> Error {
    let remedy = causes.first().map(|cause| cause.remedy.clone());
    let mut causes: Vec<String> = causes.into_iter().map(|cause| cause.what).collect();
    let untold = causes.len().saturating_sub(TOLD);
    if untold > 0 {
        causes.truncate(TOLD);
        causes.push(format!("and {untold} more like these"));
    }
    Error::NotAttached {
        name: record.name.clone(),
        seconds,
        causes,
        remedy: remedy.unwrap_or_default(),
    }
}
