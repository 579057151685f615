//! `checkpoint`: CUDA processes leave their GPUs and come back.

use std::time::Duration;

use serde_json::{Value, json};

use crate::checkpoint::{
    Action, Blocker, CudaState, Limits, ProcessState, Purpose, Subject, Suspended, gpu_list,
    memory_of, memory_text,
};
use crate::cli::{CheckpointArgs, CheckpointVerb as Verb, Target};
use crate::error::{CheckpointFailure, Error};
use crate::host::Host;
use crate::store::Ledger;
use crate::suspension::{self, Destination, Examined, Order, Outcome};
use crate::ui::{Answer, Cell, Tone, Ui, plain, python_bool};

/// How long a lock may take that nobody has asked for: where a resumption is undone.
const LOCK: Duration = Duration::from_secs(10);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &CheckpointArgs) -> Result<u8, Error> {
    let only = Purpose::Only;
    let (purpose, pids, target, lock, patience, force) = match &args.verb {
        Verb::Suspend {
            pids,
            wait,
            patience,
            force,
        } => {
            let pids = pids.pids.clone();
            (
                Purpose::Suspend,
                pids,
                None,
                wait.timeout,
                patience,
                force.force,
            )
        }
        Verb::Resume {
            pid,
            all,
            target,
            patience,
        } => {
            let pids = suspended(host, pid, *all)?;
            (Purpose::Resume, pids, Some(target), LOCK, patience, false)
        }
        Verb::Lock {
            pid,
            wait,
            patience,
            force,
        } => (
            only(Action::Lock),
            vec![pid.pid],
            None,
            wait.timeout,
            patience,
            force.force,
        ),
        Verb::Checkpoint {
            pid,
            patience,
            force,
        } => (
            only(Action::Checkpoint),
            vec![pid.pid],
            None,
            LOCK,
            patience,
            force.force,
        ),
        Verb::Restore {
            pid,
            target,
            patience,
        } => (
            only(Action::Restore),
            vec![pid.pid],
            Some(target),
            LOCK,
            patience,
            false,
        ),
        Verb::Unlock { pid, patience } => (
            only(Action::Unlock),
            vec![pid.pid],
            None,
            LOCK,
            patience,
            false,
        ),
        Verb::Check {
            pids,
            target,
            force,
        } => {
            return check(host, ui, &pids.pids, target, force.force, args.json);
        }
        Verb::State { pids } => return state(host, ui, &pids.pids, args.json),
        Verb::RestoreThread { pid } => return restore_thread(host, ui, pid.pid, args.json),
    };
    let order = Order {
        purpose,
        pids: &pids,
        destination: &target.map_or(Destination::Back, destination),
        limits: Limits {
            lock,
            deadline: patience.deadline,
        },
        force,
    };
    let outcomes = suspension::carry_out(host, ui, &order)?;
    ui.answer(&Done { purpose, outcomes }, args.json);
    Ok(0)
}

fn check(
    host: &Host,
    ui: &mut Ui<'_>,
    pids: &[i32],
    target: &Target,
    force: bool,
    json: bool,
) -> Result<u8, Error> {
    let order = Order {
        destination: &destination(target),
        force,
        ..Order::look(Purpose::Suspend, pids)
    };
    let found = suspension::examine(host, &order)?;
    ui.answer(&found, json);
    Ok(u8::from(!found.verdict.blockers.is_empty()))
}

fn restore_thread(host: &Host, ui: &mut Ui<'_>, pid: i32, json: bool) -> Result<u8, Error> {
    let thread = suspension::restore_thread(host, pid)?;
    match json {
        true => ui.json(&json!({"pid": pid, "restore_thread_id": thread})),
        false => ui.line(format!("pid={pid} restore_thread_id={thread}")),
    }
    Ok(0)
}

fn destination(target: &Target) -> Destination {
    match target {
        Target { to: Some(gpu), .. } => Destination::To(*gpu),
        Target { gpu_map, .. } if !gpu_map.is_empty() => Destination::Pairs(gpu_map.clone()),
        Target { .. } => Destination::Back,
    }
}

/// The processes that are meant: those that are named, all that were suspended, or the only one.
fn suspended(host: &Host, named: &[i32], all: bool) -> Result<Vec<i32>, Error> {
    if !named.is_empty() {
        return Ok(named.to_vec());
    }
    let pids_of = |entries: &[Suspended]| entries.iter().map(|entry| entry.process.pid).collect();
    if all {
        return Ok(pids_of(&Ledger::of(host)?.list()));
    }
    let (away, _): (Vec<Suspended>, Vec<_>) = suspension::away(host)?.into_iter().unzip();
    let pids: Vec<i32> = pids_of(&away);
    match pids.len() {
        0 => Err(CheckpointFailure::NoneSuspended.into()),
        1 => Ok(pids),
        _ => Err(CheckpointFailure::SeveralSuspended {
            pids_suspended: pids,
        }
        .into()),
    }
}

fn state(host: &Host, ui: &mut Ui<'_>, pids: &[i32], json: bool) -> Result<u8, Error> {
    let found = suspension::examine(host, &Order::look(Purpose::Look, pids))?;
    let blockers = found.verdict.blockers;
    let failed = !blockers.is_empty();
    let subjects = found.subjects;
    ui.answer(&States { subjects, blockers }, json);
    Ok(u8::from(failed))
}

/// What was done.
struct Done {
    purpose: Purpose,
    outcomes: Vec<Outcome>,
}

impl Answer for Done {
    fn to_json(&self) -> Value {
        let process = |outcome: &Outcome| {
            json!({
                "pid": outcome.ending.pid,
                "program": outcome.program,
                "before": outcome.ending.before.word(),
                "after": outcome.ending.after.word(),
                "gpus": outcome.shares,
                "memory_mib": memory_of(&outcome.shares),
            })
        };
        let processes: Vec<Value> = self.outcomes.iter().map(process).collect();
        json!({"operation": self.purpose.word(), "processes": processes})
    }

    fn print(&self, ui: &mut Ui<'_>) {
        for outcome in &self.outcomes {
            let ending = &outcome.ending;
            ui.line(format!(
                "pid={} program={} before={} after={} gpus={} memory_mib={}",
                ending.pid,
                outcome.program,
                ending.before,
                ending.after.word(),
                gpu_list(&outcome.shares),
                memory_text(&outcome.shares),
            ));
        }
    }

    fn show(&self, ui: &mut Ui<'_>) {
        if self.outcomes.is_empty() {
            ui.line("No process is suspended.");
            return;
        }
        let row = |outcome: &Outcome| -> Vec<Cell> {
            vec![
                plain(outcome.ending.pid),
                plain(&outcome.program),
                plain(outcome.ending.before),
                (outcome.ending.after.word(), Tone::Good),
                plain(gpu_list(&outcome.shares)),
                plain(memory_text(&outcome.shares)),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.outcomes.iter().map(row).collect();
        ui.table(&["PID", "PROGRAM", "BEFORE", "NOW", "GPU", "MIB"], &rows);
        if self.purpose == Purpose::Suspend {
            let pids: Vec<String> = self
                .outcomes
                .iter()
                .map(|outcome| format!(" --pid {}", outcome.ending.pid))
                .collect();
            ui.next_step(format!("uni-cumps checkpoint resume{}", pids.concat()));
        }
    }
}

/// The states of processes.
struct States {
    subjects: Vec<Subject>,
    blockers: Vec<Blocker>,
}

impl States {
    /// What keeps the state of a process from being told.
    fn obstacle(&self, subject: &Subject) -> Option<&Blocker> {
        let concerns = |blocker: &&Blocker| blocker.pid.is_none_or(|pid| pid == subject.pid);
        let blocker = self.blockers.iter().find(concerns);
        blocker.filter(|_| subject.state().is_none())
    }
}

impl Answer for States {
    fn to_json(&self) -> Value {
        let process = |subject: &Subject| {
            let obstacle = self.obstacle(subject);
            json!({
                "pid": subject.pid,
                "state": subject.state().map(ProcessState::word),
                "reason": obstacle.map(|obstacle| &obstacle.what),
                "hint": obstacle.map(|obstacle| &obstacle.remedy),
            })
        };
        json!({"processes": self.subjects.iter().map(process).collect::<Vec<_>>()})
    }

    fn print(&self, ui: &mut Ui<'_>) {
        for subject in &self.subjects {
            let obstacle = self.obstacle(subject);
            let why = obstacle.map(|it| format!(" reason={} hint={}", it.what, it.remedy));
            let state = state_text(subject);
            let why = why.unwrap_or_default();
            ui.line(format!("pid={} state={state}{why}", subject.pid));
        }
    }

    fn show(&self, ui: &mut Ui<'_>) {
        let row = |subject: &Subject| -> Vec<Cell> {
            let obstacle = self.obstacle(subject);
            let why = obstacle.map(|it| format!("{}; {}", it.what, it.remedy));
            vec![
                plain(subject.pid),
                plain(state_text(subject)),
                plain(why.unwrap_or_default()),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.subjects.iter().map(row).collect();
        ui.table(&["PID", "STATE", ""], &rows);
    }
}

fn state_text(subject: &Subject) -> String {
    match &subject.cuda {
        CudaState::State(state) => state.word(),
        CudaState::None | CudaState::Unknown(_) | CudaState::NotAsked => "none".to_owned(),
    }
}

impl Answer for Examined {
    fn to_json(&self) -> Value {
        let process = |subject: &Subject| {
            json!({
                "pid": subject.pid,
                "state": subject.state().map(|state| state.word()),
                "gpus": subject.shares,
                "memory_mib": memory_of(&subject.shares),
            })
        };
        let blocker = |blocker: &Blocker| {
            json!({
                "pid": blocker.pid,
                "id": blocker.id,
                "message": blocker.what,
                "hint": blocker.remedy,
            })
        };
        json!({
            "operation": self.purpose.word(),
            "ready": self.verdict.blockers.is_empty(),
            "processes": self.subjects.iter().map(process).collect::<Vec<_>>(),
            "blockers": self.verdict.blockers.iter().map(blocker).collect::<Vec<_>>(),
            "notes": self.verdict.notes,
        })
    }

    fn print(&self, ui: &mut Ui<'_>) {
        for subject in &self.subjects {
            ui.line(format!(
                "pid={} state={} gpus={} memory_mib={}",
                subject.pid,
                state_text(subject),
                gpu_list(&subject.shares),
                memory_text(&subject.shares),
            ));
        }
        for Blocker {
            pid,
            id,
            what,
            remedy,
        } in &self.verdict.blockers
        {
            let pid = pid.map_or("all".to_owned(), |pid| pid.to_string());
            ui.line(format!(
                "blocker pid={pid} id={id} message={what} hint={remedy}"
            ));
        }
        for note in &self.verdict.notes {
            ui.line(format!("note={note}"));
        }
        let ready = python_bool(self.verdict.blockers.is_empty());
        ui.line(format!("operation={} ready={ready}", self.purpose.word()));
    }

    fn show(&self, ui: &mut Ui<'_>) {
        let row = |subject: &Subject| -> Vec<Cell> {
            vec![
                plain(subject.pid),
                plain(state_text(subject)),
                plain(gpu_list(&subject.shares)),
                plain(memory_text(&subject.shares)),
            ]
        };
        let rows: Vec<Vec<Cell>> = self.subjects.iter().map(row).collect();
        ui.table(&["PID", "STATE", "GPU", "MIB"], &rows);
        for blocker in &self.verdict.blockers {
            ui.verdict(blocker.id, Tone::Bad, &blocker.what);
            ui.line(format!("    {}", blocker.remedy));
        }
        for note in &self.verdict.notes {
            ui.verdict("note", Tone::Doubtful, note);
        }
        if self.verdict.blockers.is_empty() {
            ui.verdict(
                "ready",
                Tone::Good,
                &format!(
                    "nothing known stands in the way of a {}",
                    self.purpose.word()
                ),
            );
        }
    }
}
