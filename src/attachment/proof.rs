//! The proof that a program is a client: it runs beside us, the daemon is asked, and without a client its whole tree is ended.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Obstacle, clients_of, obstacles};
use crate::error::Error;
use crate::host::Host;
use crate::mps::{AskError, CONTROL, Control};
use crate::process::{self, Running};
use crate::record::DaemonRecord;
use crate::runner::{Finished, Invocation, RunError, hold_signals_to_pass_on};
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

/// How the wait for a client has ended.
enum Seen {
    /// One of its processes is a client; how the program has ended, if what it left is meant.
    Client(Option<Finished>),
    /// The program has ended before, and left nothing that may become one.
    End(Result<Finished, RunError>),
    /// The time is up; why the daemon could not be asked, if it could not.
    Nothing(Option<AskError>),
}

/// Runs the program beside us and ends it unless one of its processes becomes a client of the daemon in time.
pub fn proven(
    host: &Host,
    ui: &mut Ui<'_>,
    call: &Invocation,
    record: &DaemonRecord,
    seconds: u64,
) -> Result<u8, Error> {
    let control = Control::find(host, &record.pipe_directory, &record.log_directory)
        .ok_or(Error::NoProgram(CONTROL))?;
    let _held = hold_signals_to_pass_on();
    let refused = |error| not_run(call, error);
    let command = Command::begin(host, call).map_err(refused)?;
    let waiting = format!("waiting for a client of daemon {}", record.name);
    let is_silent = || command.tree.is_silent();
    let limit = Duration::from_secs(seconds);
    match ui.waiting_beside(&waiting, &is_silent, || command.watch(&control, limit)) {
        Seen::Client(Some(finished)) => Ok(finished.status.shell_code()),
        Seen::Client(None) => Ok(command.end().map_err(refused)?.status.shell_code()),
        Seen::End(finished) => match finished.map_err(refused)?.status {
            status if status.success() => Err(Error::EndedUnattached {
                name: record.name.clone(),
            }),
            status => Ok(status.shell_code()),
        },
        Seen::Nothing(unanswered) => {
            let causes = command.causes(record, unanswered.as_ref());
            let ending = || process::end_all(host, &|| command.tree.family(), END_LIMIT);
            for left in ui.waiting_beside("waiting for the command to end", &is_silent, ending) {
                ui.note(format!("{} could not be ended", left.id));
            }
            match unanswered {
                Some(AskError::Call(RunError::Interrupted(signal))) => {
                    Err(Error::Interrupted(signal))
                }
                _ => Err(not_attached(record, seconds, causes)),
            }
        }
    }
}

/// The processes that we have started, and what loses its parent among them, which becomes our child.
struct Tree<'h> {
    host: &'h Host,
    /// Those that are not of the command: what we had started before we were uni-cumps, such as the jobs of a shell that
    /// has become us, or the daemon where we are a container's first process.
    strangers: Mutex<Vec<Running>>,
}

impl<'h> Tree<'h> {
    /// Before the command is started.
    fn new(host: &'h Host) -> Self {
        Self {
            host,
            strangers: Mutex::new(process::descendants_of(host, process::our_pid())),
        }
    }

    /// The processes of the command.
    fn family(&self) -> Vec<Running> {
        let mut strangers = self
            .strangers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // What a stranger has started is one as well, also once it has lost its parent and become our child.
        let alive = |one: &&Running| process::still_running(self.host, one.id).is_some();
        let alive = strangers.iter().filter(alive).copied().collect();
        for one in process::with_descendants(self.host, alive) {
            if !strangers.iter().any(|known| known.id == one.id) {
                strangers.push(one);
            }
        }
        let mut family = process::children_of(self.host, process::our_pid());
        family.retain(|child| !strangers.iter().any(|known| known.id == child.id));
        process::with_descendants(self.host, family)
    }

    /// Whether the command has written nothing yet. Our questions to the daemon are children of ours as well.
    fn is_silent(&self) -> bool {
        let wrote = |process: &Running| process::has_written(self.host, process.id.pid);
        let asks = |process: &Running| {
            process::program_name(self.host, process.id.pid).as_deref() == Some(CONTROL)
        };
        !self
            .family()
            .iter()
            .any(|process| wrote(process) && !asks(process))
    }
}

/// The command that runs beside us.
struct Command<'h> {
    host: &'h Host,
    tree: Tree<'h>,
    ended: Receiver<Result<Finished, RunError>>,
}

impl<'h> Command<'h> {
    /// Waits for the program's end in a thread that is left behind with a program that cannot be ended.
    fn begin(host: &'h Host, call: &Invocation) -> Result<Self, RunError> {
        let tree = Tree::new(host);
        let (tell, ended) = mpsc::channel();
        let (runner, call) = (Arc::clone(&host.runner), call.clone());
        thread::Builder::new()
            .spawn(move || tell.send(runner.run(&call)))
            .map_err(RunError::Setup)?;
        Ok(Self { host, tree, ended })
    }

    /// Waits until the program runs, and says how it has ended if it could not or does no longer. Before that, a signal
    /// that is meant for it would end our question to the daemon.
    fn has_begun(&self, limit: Duration) -> Option<Result<Finished, RunError>> {
        let begun = || match self.has_ended() {
            Some(finished) => Some(Some(finished)),
            None => (!self.tree.family().is_empty()).then_some(None),
        };
        self.host.wait_for(limit, begun).flatten()
    }

    fn has_ended(&self) -> Option<Result<Finished, RunError>> {
        self.ended.try_recv().ok()
    }

    /// Waits for the end of the program.
    fn end(&self) -> Result<Finished, RunError> {
        let lost = |error| Err(RunError::Setup(std::io::Error::other(error)));
        self.ended.recv().unwrap_or_else(lost)
    }

    /// Looks again and again for a process of the command among the daemon's clients. A program that ends well may have
    /// left one behind that becomes a client.
    fn watch(&self, control: &Control<'_>, limit: Duration) -> Seen {
        let now = || self.host.clock.monotonic();
        let (mut left, mut pause) = (limit, PAUSES.0);
        let mut over = None;
        let mut event = self.has_begun(limit);
        loop {
            match event {
                Some(Ok(finished)) if finished.status.success() => over = Some(finished),
                Some(finished) => return Seen::End(finished),
                None => {}
            }
            let begun = now();
            let is_over = over.is_some();
            let is_gone = || is_over && self.tree.family().is_empty();
            event = self
                .host
                .wait_for(pause.min(left), || match is_over {
                    false => self.has_ended().map(Some),
                    true => is_gone().then_some(None),
                })
                .flatten();
            if let Some(finished) = over.take_if(|_| is_gone()) {
                return Seen::End(Ok(finished));
            }
            if event.is_some() {
                continue;
            }
            let ask_limit = left.clamp(ASK_LIMITS.0, ASK_LIMITS.1);
            let unanswered = match self.has_client(control, ask_limit) {
                Ok(true) => return Seen::Client(over),
                Ok(false) => None,
                Err(error) => Some(error),
            };
            let interrupted = matches!(unanswered, Some(AskError::Call(RunError::Interrupted(_))));
            if left <= pause || interrupted {
                return Seen::Nothing(unanswered);
            }
            // No more than it may take: Ctrl-Z stops us, and the command, but not the clock.
            left = left.saturating_sub((now() - begun).min(ask_limit + pause));
            pause = (pause * 3 / 2).min(PAUSES.1);
        }
    }

    /// Whether a process of the command is among the daemon's clients. One may come or go while the daemon answers.
    fn has_client(&self, control: &Control<'_>, limit: Duration) -> Result<bool, AskError> {
        let mut family = self.tree.family();
        let clients = clients_of(control, limit)?;
        family.extend(self.tree.family());
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
        let others = obstacles(self.host, record, &self.tree.family());
        unanswered.into_iter().chain(others).collect()
    }
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

/// The failure of a call of the user's program that did not come about.
pub fn not_run(call: &Invocation, error: RunError) -> Error {
    let source = match error {
        RunError::Spawn(source) => source,
        RunError::Setup(source) => return Error::NotStarted { source },
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
