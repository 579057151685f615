//! `wait`: returns when a daemon is as somebody needs it, or says how it was instead.

use std::time::Duration;

use serde_json::{Value, json};

use crate::attachment::{Load, load_of};
use crate::cli::{Condition, WaitArgs};
use crate::daemon::{self, Observed, State, Unrecorded};
use crate::error::{Error, InVain};
use crate::host::Host;
use crate::mps::{self, CONTROL, Control, Keeper, unless_interrupted};
use crate::process;
use crate::record::{DaemonName, DaemonRecord, ProcessId};
use crate::runner::{Held, hold_signals};
use crate::store::{Entry, Store};
use crate::ui::{self, Answer, Tone, Ui, python_bool};

/// How long the daemon may take to answer, and how long it may when the time is up.
const ASK_LIMIT: Duration = Duration::from_secs(2);
const LEAST: Duration = Duration::from_secs(1);
/// Time between two looks that cost nobody anything.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// Time between two other looks, at first and in the end. Each leaves up to seven lines in a daemon's log.
const ASK_PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(500));

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &WaitArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    let name = args.daemon.name.as_deref().map(str::parse).transpose()?;
    let gpu = args.daemon.gpu.as_deref();
    let gpu = gpu.map(|gpu| daemon::lasting(host, gpu)).transpose()?;
    let begun = host.clock.monotonic();
    let limit = Duration::from_secs(args.timeout);
    // So that whoever interrupts us finds the terminal as it was.
    let held = hold_signals();
    let mut wait = Wait {
        host,
        store: &store,
        condition: args.condition,
        name,
        gpu,
        deadline: begun + limit,
        first: None,
        last: None,
    };
    let waiting = format!("waiting for {}", wait.what());
    let sight = ui.waiting(&waiting, || wait.until(&held))?;
    let report = Report {
        name: wait.name.clone(),
        condition: args.condition,
        waited: host.clock.monotonic().saturating_sub(begun),
        failure: (!sight.reached).then(|| Error::InVain(wait.in_vain(args.timeout, &sight))),
        sight,
    };
    let Some(failure) = &report.failure else {
        ui.answer(&report, args.json);
        return Ok(0);
    };
    ui.failure(failure, false);
    if args.json {
        ui.json(&report.to_json());
    }
    Ok(1)
}

/// What one look has shown.
#[derive(Clone, Debug, Default)]
struct Sight {
    /// The record's state, as `status` shows it; `absent` without a record.
    word: &'static str,
    pid: Option<i32>,
    load: Load,
    /// Why it is not what is waited for, where the rest does not say it.
    reason: Option<String>,
    reached: bool,
    /// The next look asks nobody and connects to nobody.
    is_cheap: bool,
}

impl Sight {
    fn describe(&self) -> String {
        let mut parts = vec![self.word.to_owned()];
        parts.extend(self.pid.map(|pid| format!("pid {pid}")));
        parts.extend(self.load.servers.map(|count| format!("servers {count}")));
        parts.extend(self.load.clients.map(|count| format!("clients {count}")));
        parts.extend(self.reason.clone());
        format!("last seen: {}", parts.join(", "))
    }
}

/// Whether what a daemon tells is what is waited for.
fn is_met(condition: Condition, load: Load) -> bool {
    match condition {
        Condition::Ready => load.servers.is_some(),
        Condition::Attached(wanted) => load.clients.is_some_and(|count| count >= wanted),
        Condition::Idle => load.clients == Some(0),
        // Whoever tells something is there.
        Condition::Gone => false,
    }
}

struct Wait<'w> {
    host: &'w Host,
    store: &'w Store<'w>,
    condition: Condition,
    /// The daemon's name, once it is known.
    name: Option<DaemonName>,
    gpu: Option<String>,
    /// When the time is up.
    deadline: Duration,
    /// The process and the record that were seen first: what is to be gone.
    first: Option<(ProcessId, DaemonRecord)>,
    /// The daemon as it was observed last.
    last: Option<Observed>,
}

impl Wait<'_> {
    fn what(&self) -> String {
        let daemon = match (&self.name, &self.gpu) {
            (Some(name), _) => format!("daemon {name}"),
            (None, Some(gpu)) => format!("a daemon of GPU {gpu}"),
            (None, None) => "a daemon".to_owned(),
        };
        match self.condition {
            Condition::Ready => format!("{daemon} to be ready"),
            Condition::Attached(1) => format!("{daemon} to have a client"),
            Condition::Attached(count) => format!("{daemon} to have {count} clients"),
            Condition::Idle => format!("{daemon} to have no client"),
            Condition::Gone => format!("{daemon} to be gone"),
        }
    }

    fn in_vain(&self, seconds: u64, sight: &Sight) -> InVain {
        let named = match &self.name {
            Some(name) => format!(" --name {name}"),
            None => String::new(),
        };
        let remedy = match (self.condition, sight.word, sight.pid) {
            (Condition::Gone, ..) => format!("uni-cumps stop{named}"),
            (_, "absent" | "stale" | "other-boot" | "interrupted", _) => {
                format!("uni-cumps start{named}")
            }
            (_, "not-answering", Some(pid)) => format!("let it go on: kill -CONT {pid}"),
            (Condition::Attached(_), "live", _) => {
                format!("uni-cumps run{named} -- CMD, or wait longer with --timeout")
            }
            (Condition::Idle, "live", _) => {
                format!("wait longer with --timeout, or uni-cumps stop{named}")
            }
            _ => "uni-cumps doctor".to_owned() + &named,
        };
        InVain {
            what: self.what(),
            seconds,
            seen: sight.describe(),
            remedy,
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.host.clock.monotonic())
    }

    /// Looks until it is so or the time is up. What was seen last is returned.
    fn until(&mut self, held: &Held) -> Result<Sight, Error> {
        let mut pause = ASK_PAUSES.0;
        loop {
            let is_last = self.left().is_zero();
            let sight = self.look(is_last)?;
            if sight.reached || is_last {
                return Ok(sight);
            }
            let left = self.left();
            if sight.is_cheap {
                self.nap(LOOK_PAUSE.min(left), held)?;
            } else {
                self.nap(pause.min(left), held)?;
                pause = pause.mul_f32(1.5).min(ASK_PAUSES.1);
            }
        }
    }

    /// Lets time pass unless somebody asks us to end.
    fn nap(&self, time: Duration, held: &Held) -> Result<(), Error> {
        let end = self.host.clock.monotonic() + time;
        loop {
            if let Some(signal) = held.asked_to_end() {
                return Err(Error::Interrupted(signal));
            }
            let left = end.saturating_sub(self.host.clock.monotonic());
            if left.is_zero() {
                return Ok(());
            }
            self.host.clock.sleep(left.min(LOOK_PAUSE));
        }
    }

    fn look(&mut self, is_last: bool) -> Result<Sight, Error> {
        let Some(name) = self.name.clone() else {
            return match daemon::meant(self.host, self.store, None, self.gpu.as_deref()) {
                Ok(daemon) => {
                    self.name = Some(daemon.record.name.clone());
                    self.sight_of(daemon, is_last)
                }
                Err(error @ (Error::NoLiveDaemon | Error::NoDaemonForGpu(_))) => self.absent(error),
                Err(error) => Err(error),
            };
        };
        match self.store.entry(&name) {
            None => self.absent(Error::NoRecord(name)),
            Some(Entry::Record(record) | Entry::Intent(record)) if record.uid != self.host.uid => {
                Err(daemon::other_user(self.host, &record))
            }
            Some(Entry::Record(record)) => match self.same_as_before(&record, is_last) {
                Some(daemon) => self.sight_of(daemon, false),
                None => {
                    let here = process::place(self.host);
                    self.sight_of(daemon::observe(self.host, &here, record), is_last)
                }
            },
            Some(entry) => self.unrecorded(entry),
        }
    }

    /// The daemon as it was, if its process is still as it was and nothing else matters: a look at its socket would be two
    /// more lines in its log, or one more connection that a stopped daemon has to take when it goes on.
    fn same_as_before(&self, record: &DaemonRecord, is_last: bool) -> Option<Observed> {
        let last = self.last.as_ref().filter(|last| last.record == *record)?;
        let process = last.state.process()?;
        if !self.can_be_kept(&last.state, is_last) {
            return None;
        }
        let now = process::still_running(self.host, process.id)?;
        (now.stopped == process.stopped).then(|| last.clone())
    }

    /// Whether all that matters of a state is its process.
    fn can_be_kept(&self, state: &State, is_last: bool) -> bool {
        match state {
            State::NotAnswering(_) => true,
            State::Live(_) | State::Unreachable(_) => !is_last && self.condition == Condition::Gone,
            _ => false,
        }
    }

    /// There is no record, or no live daemon.
    fn absent(&self, error: Error) -> Result<Sight, Error> {
        let keeper = self.first.as_ref().and_then(|(_, record)| {
            let keeper = mps::keeper(self.host, &record.pipe_directory);
            (keeper != Keeper::Nobody).then_some(keeper)
        });
        match (self.condition, keeper) {
            (Condition::Gone, None) => Ok(Sight {
                word: "absent",
                reached: true,
                is_cheap: true,
                ..Sight::default()
            }),
            (Condition::Gone, Some(keeper)) => Ok(Sight {
                word: "absent",
                reason: Some(kept_by(&keeper)),
                ..Sight::default()
            }),
            // Nobody waits for the clients of a daemon that is not there.
            (Condition::Idle, _) => Err(error),
            // Somebody may be about to start it.
            (Condition::Ready | Condition::Attached(_), _) => Ok(Sight {
                word: "absent",
                reason: Some(error.to_string()),
                is_cheap: true,
                ..Sight::default()
            }),
        }
    }

    /// A start that has not come to its end, or a record that cannot be read.
    fn unrecorded(&self, entry: Entry) -> Result<Sight, Error> {
        let here = process::place(self.host);
        let is_over = match &entry {
            Entry::Intent(intent) if self.condition == Condition::Gone => {
                daemon::launcher(self.host, &here, &entry).is_none()
                    && daemon::left_nothing(self.host, &here, intent)
            }
            _ => false,
        };
        let Some(Unrecorded { word, reason, .. }) = daemon::unrecorded(self.host, &here, entry)
        else {
            return Ok(Sight::default());
        };
        Ok(Sight {
            word,
            reason: Some(reason),
            reached: is_over,
            is_cheap: word != "interrupted",
            ..Sight::default()
        })
    }

    fn sight_of(&mut self, daemon: Observed, is_last: bool) -> Result<Sight, Error> {
        let record = &daemon.record;
        let (first, _) = self
            .first
            .get_or_insert_with(|| (record.process, record.clone()));
        let is_another = *first != record.process;
        let mut sight = Sight {
            word: daemon.state.word(),
            pid: Some(record.process.pid),
            is_cheap: self.can_be_kept(&daemon.state, false),
            ..Sight::default()
        };
        match &daemon.state {
            State::OtherHost => return Err(daemon::other_host(self.host, self.store, record)),
            State::Stale | State::OtherBoot if self.condition == Condition::Idle => {
                return Err(Error::Stale(record.name.clone()));
            }
            State::Stale | State::OtherBoot => {
                sight.pid = None;
                match mps::keeper(self.host, &record.pipe_directory) {
                    Keeper::Nobody => sight.reached = self.condition == Condition::Gone,
                    keeper => sight.reason = Some(kept_by(&keeper)),
                }
            }
            State::NotAnswering(_) => sight.reason = Some("its process is stopped".to_owned()),
            State::Unreachable(_) | State::OtherPidNamespace { reachable: false } => {
                let control = mps::control_path(&record.pipe_directory);
                sight.reason = Some(daemon.socket.describe(&control));
            }
            State::Live(_) | State::OtherPidNamespace { reachable: true } => {
                if self.condition != Condition::Gone || is_last {
                    self.ask(record, &mut sight)?;
                }
            }
        }
        // A start takes a name over only from a daemon that is gone.
        if self.condition == Condition::Gone && is_another {
            sight.reached = true;
            sight.reason = Some("another daemon has its name".to_owned());
        }
        self.last = Some(daemon);
        Ok(sight)
    }

    fn ask(&self, record: &DaemonRecord, sight: &mut Sight) -> Result<(), Error> {
        let control = Control::find(self.host, &record.pipe_directory, &record.log_directory)
            .ok_or(Error::NoProgram(CONTROL))?;
        let (load, outcome) = load_of(self.host, &control, self.left().clamp(LEAST, ASK_LIMIT));
        sight.load = load;
        sight.reached = is_met(self.condition, load);
        if let Err(reason) = unless_interrupted(outcome)? {
            sight.reason = Some(reason);
        }
        Ok(())
    }
}

fn kept_by(keeper: &Keeper) -> String {
    match keeper {
        Keeper::Process(process) => format!("pid {} keeps its pipe directory", process.id.pid),
        Keeper::Contradiction(found) => found.clone(),
        Keeper::Elsewhere | Keeper::Nobody => "somebody keeps its pipe directory".to_owned(),
    }
}

struct Report {
    name: Option<DaemonName>,
    condition: Condition,
    waited: Duration,
    sight: Sight,
    failure: Option<Error>,
}

impl Report {
    /// Seconds, to the millisecond.
    fn waited_s(&self) -> f64 {
        (self.waited.as_secs_f64() * 1000.0).round() / 1000.0
    }
}

impl Answer for Report {
    fn to_json(&self) -> Value {
        let mut value = json!({
            "name": self.name.as_ref().map(DaemonName::as_str),
            "for": self.condition.to_string(),
            "reached": self.sight.reached,
            "state": {
                "record_state": self.sight.word,
                "pid": self.sight.pid,
                "servers": self.sight.load.servers,
                "clients": self.sight.load.clients,
                "reason": self.sight.reason,
            },
            "waited_s": self.waited_s(),
        });
        if let Some(failure) = &self.failure {
            value["error"] = ui::error_json(failure)["error"].take();
        }
        value
    }

    fn print(&self, ui: &mut Ui<'_>) {
        let number = |count: Option<usize>| count.map_or("unknown".to_owned(), |it| it.to_string());
        ui.line(format!(
            "wait name={} for={} reached={} state={} pid={} servers={} clients={} waited_s={}",
            self.name.as_ref().map_or("none", DaemonName::as_str),
            self.condition,
            python_bool(self.sight.reached),
            self.sight.word,
            self.sight
                .pid
                .map_or("none".to_owned(), |pid| pid.to_string()),
            number(self.sight.load.servers),
            number(self.sight.load.clients),
            self.waited_s(),
        ));
    }

    fn show(&self, ui: &mut Ui<'_>) {
        let daemon = match (&self.name, self.sight.pid) {
            (Some(name), Some(pid)) => format!("daemon {name} (pid {pid})"),
            (Some(name), None) => format!("daemon {name}"),
            (None, _) => "no daemon is live".to_owned(),
        };
        let clients = match self.sight.load.clients {
            Some(1) => ", 1 client".to_owned(),
            Some(count) => format!(", {count} clients"),
            None => String::new(),
        };
        let text = format!(
            "{daemon}{clients}, after {:.1} s",
            self.waited.as_secs_f64()
        );
        ui.verdict(&self.condition.to_string(), Tone::Good, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_daemon_tells_is_weighed() {
        let load = |servers, clients| Load { servers, clients };
        let (silent, half) = (load(None, None), load(Some(1), None));
        let (empty, busy) = (load(Some(1), Some(0)), load(Some(2), Some(3)));
        for (condition, met) in [
            (Condition::Ready, [false, true, true, true]),
            (Condition::Idle, [false, false, true, false]),
            (Condition::Attached(1), [false, false, false, true]),
            (Condition::Attached(3), [false, false, false, true]),
            (Condition::Attached(4), [false; 4]),
            (Condition::Gone, [false; 4]),
        ] {
            let seen = [silent, half, empty, busy].map(|load| is_met(condition, load));
            assert_eq!(seen, met, "{condition}");
        }
    }
}
