//! The proof that a program is a client: it runs beside us, the daemon is asked, and without a client its whole tree is ended.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
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
    /// One of its processes is a client.
    Client,
    /// The program has ended before.
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
    let (strangers, us) = (command.strangers.clone(), our_pid());
    let is_silent = || {
        let mut command = family(host, us, &strangers).into_iter();
        !command.any(|process| process::has_written(host, process.id.pid))
    };
    let limit = Duration::from_secs(seconds);
    match ui.waiting_beside(&waiting, &is_silent, || command.watch(&control, limit)) {
        Seen::Client => Ok(command.end().map_err(refused)?.status.shell_code()),
        Seen::End(finished) => match finished.map_err(refused)?.status {
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
        let clients = clients_of(control, limit)?;
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
        let others = obstacles(self.host, record, &self.family());
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

/// The failure of a call of the user's program that did not come about.
pub fn not_run(call: &Invocation, error: RunError) -> Error {
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
