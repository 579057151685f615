//! Suspending and resuming CUDA processes: what stands in the way is found before anything is touched, every step has its
//! undoing, and the ledger remembers who is away.

mod bookkeeping;
mod facts;
mod work;

use crate::checkpoint::{
    Action, Call, Ending, GpuName, Limits, Machine, NamedPair, ProcessState, Purpose, Share,
    Subject, Suspended, Verdict, judge,
};
use crate::driver::Caller;
use crate::error::{CheckpointFailure, Error};
use crate::host::Host;
use crate::process;
use crate::record::ProcessId;
use crate::runner::hold_every_signal;
use crate::store::Ledger;
use crate::ui::Ui;

use facts::{Gatherer, QUICK};
use work::{Target, Work};

/// Where processes are to come back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Where they were.
    Back,
    /// On this GPU, each from the one that it was on.
    To(GpuName),
    /// As these pairs say.
    Pairs(Vec<NamedPair>),
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Order<'o> {
    /// What is to be done.
    pub purpose: Purpose,
    /// With whom.
    pub pids: &'o [i32],
    /// Where they are to come back.
    pub destination: &'o Destination,
    /// What it may take.
    pub limits: Limits,
    /// MPS clients may be lost.
    pub force: bool,
}

impl<'o> Order<'o> {
    /// Only to look at these processes.
    pub fn look(purpose: Purpose, pids: &'o [i32]) -> Self {
        Self {
            purpose,
            pids,
            destination: &Destination::Back,
            limits: Limits {
                lock: QUICK,
                deadline: QUICK,
            },
            force: false,
        }
    }
}

/// A process that something was done with.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Before and after.
    pub ending: Ending,
    /// The file name of its program.
    pub program: String,
    /// What it has on which GPUs, or had; empty where that is not known.
    pub shares: Vec<Share>,
}

/// Does what is asked for with all processes, or with none.
pub fn carry_out(host: &Host, ui: &mut Ui<'_>, order: &Order<'_>) -> Result<Vec<Outcome>, Error> {
    let caller = Caller::new(host);
    let mut pids = order.pids.to_vec();
    pids.sort_unstable();
    pids.dedup();
    let order = Order {
        pids: &pids,
        ..*order
    };
    if pids.is_empty() {
        return Ok(Vec::new());
    }
    let takes_away = order.purpose.takes_away();
    let identities: Vec<ProcessId> = pids
        .iter()
        .filter_map(|pid| Some(process::running(host, *pid)?.id))
        .collect();
    // Who takes a process away must remember it. Who brings it back need not: a full disk must not keep it locked.
    let ledger = match Ledger::of(host) {
        Err(error) if takes_away => return Err(error),
        ledger => ledger.ok(),
    };
    let locked = match &ledger {
        Some(ledger) => bookkeeping::lock(ui, ledger, &identities, takes_away)?,
        None => None,
    };
    let gatherer = Gatherer::new(host, &caller, ledger.as_ref());
    let subjects = unhindered(ui, &gatherer, &order)?;
    let mut targets: Vec<Target> = subjects
        .iter()
        .filter_map(|subject| Target::of(subject, order.purpose))
        .collect();
    // Between this and the end a signal waits for the end of a step.
    let held = hold_every_signal();
    if let Some(locked) = locked.as_ref().filter(|_| takes_away) {
        bookkeeping::remember(host, locked, &subjects, &targets)?;
    }
    let work = Work {
        host,
        caller: &caller,
        limits: order.limits,
        held: &held,
    };
    let promise = match takes_away {
        true => "; Ctrl-C undoes it after this step",
        false => "",
    };
    let doing = order.purpose.word();
    let waiting = format!("waiting for the driver to {doing}{promise}");
    let result = ui.waiting(&waiting, || work.carry_out(order.purpose, &mut targets));
    let endings = match &result {
        Ok(endings) => endings.as_slice(),
        Err(failure) => failure.endings(),
    };
    if let Some(locked) = &locked {
        bookkeeping::settle(ui, locked, &targets, endings);
    }
    let outcome = |(target, ending): (&Target, &Ending)| Outcome {
        ending: *ending,
        program: target.program.clone(),
        shares: shares_of(&subjects, target),
    };
    Ok(targets.iter().zip(&result?).map(outcome).collect())
}

/// The processes, if nothing stands in the way of what is asked for.
fn unhindered(
    ui: &mut Ui<'_>,
    gatherer: &Gatherer<'_>,
    order: &Order<'_>,
) -> Result<Vec<Subject>, Error> {
    let (subjects, mut machine) = gatherer.all(order)?;
    let judged = |machine: &Machine| judge(order.purpose, &subjects, machine, order.force);
    let mut verdict = judged(&machine);
    let moves_out = matches!(
        order.purpose,
        Purpose::Suspend | Purpose::Only(Action::Checkpoint)
    );
    if moves_out && verdict.blockers.is_empty() {
        // What could not be brought back is not taken away.
        machine.no_init = gatherer.no_init(&machine)?;
        verdict = judged(&machine);
    }
    for note in &verdict.notes {
        ui.note(note);
    }
    if verdict.blockers.is_empty() {
        return Ok(subjects);
    }
    Err(CheckpointFailure::Blocked {
        doing: order.purpose.word(),
        blockers: verdict.blockers,
    }
    .into())
}

/// What a process has where it is now.
fn shares_of(subjects: &[Subject], target: &Target) -> Vec<Share> {
    let subject = subjects.iter().find(|subject| subject.pid == target.id.pid);
    let mut shares = subject
        .map(|subject| subject.shares.clone())
        .unwrap_or_default();
    if let Some(map) = target.map.as_ref().filter(|_| target.is_moved) {
        for share in &mut shares {
            share.uuid = map.place_of(&share.uuid);
        }
    }
    shares
}

/// What stands in the way of what is asked for. Touches nothing.
pub fn examine(host: &Host, order: &Order<'_>) -> Result<Examined, Error> {
    let caller = Caller::new(host);
    let ledger = Ledger::of(host).ok();
    let gatherer = Gatherer::new(host, &caller, ledger.as_ref());
    let (subjects, mut machine) = gatherer.all(order)?;
    let is_away = |subject: &Subject| subject.state() == Some(ProcessState::CHECKPOINTED);
    // Who is away can only come back.
    let purpose = match order.purpose {
        Purpose::Suspend if subjects.iter().any(is_away) => Purpose::Resume,
        purpose => purpose,
    };
    if purpose != Purpose::Look {
        machine.no_init = gatherer.no_init(&machine)?;
    }
    let verdict = judge(purpose, &subjects, &machine, order.force);
    Ok(Examined {
        purpose,
        subjects,
        verdict,
    })
}

/// What was found.
pub struct Examined {
    /// What the processes could be asked for: to be resumed where one of them is suspended already.
    pub purpose: Purpose,
    /// The processes.
    pub subjects: Vec<Subject>,
    /// What stands in the way.
    pub verdict: Verdict,
}

/// The processes that the ledger tells of and that do not run, each with its state; nothing where the driver does not say
/// it. A driver that is not there, or does not answer, hides no process.
pub fn away(host: &Host) -> Result<Vec<(Suspended, Option<ProcessState>)>, Error> {
    let entries = Ledger::of(host)?.list();
    let caller = Caller::new(host);
    let gatherer = Gatherer::new(host, &caller, None);
    let pids: Vec<i32> = entries.iter().map(|entry| entry.process.pid).collect();
    let states = gatherer.states(&pids)?;
    let with_state = entries.into_iter().zip(states);
    // Somebody else has brought it back, or a command was killed before it had begun.
    let is_away = |(_, state): &(_, _)| *state != Some(ProcessState::RUNNING);
    Ok(with_state.filter(is_away).collect())
}

/// The thread that restores a process.
pub fn restore_thread(host: &Host, pid: i32) -> Result<u32, Error> {
    let found = examine(host, &Order::look(Purpose::Look, &[pid]))?;
    if !found.verdict.blockers.is_empty() {
        return Err(CheckpointFailure::Blocked {
            doing: "tell the restore thread",
            blockers: found.verdict.blockers,
        }
        .into());
    }
    let asked = Caller::new(host).ask(pid, &Call::RestoreThread, QUICK);
    asked.map_err(|failure| {
        CheckpointFailure::NoThread {
            pid,
            reason: failure.to_string(),
        }
        .into()
    })
}
