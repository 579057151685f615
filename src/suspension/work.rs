//! The steps of a suspension and their undoing. After every failure the driver is asked in which state the process is, and
//! what is done next follows from that: no failure leaves a process locked if anything can be done about it.

use std::time::Duration;

use super::facts::QUICK;
use crate::checkpoint::{
    Action, After, Call, Ending, GpuMap, Limits, ProcessState, Purpose, Subject,
};
use crate::driver::{Caller, DriverFailure};
use crate::error::CheckpointFailure;
use crate::host::Host;
use crate::process;
use crate::record::ProcessId;
use crate::runner::Held;

/// A process that something is to be done with.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) id: ProcessId,
    /// The file name of its program.
    pub(super) program: String,
    /// Its state before anything was done.
    pub(super) before: ProcessState,
    /// What takes it to where it is to be.
    pub(super) steps: &'static [Action],
    /// Where its GPUs are to go.
    pub(super) map: Option<GpuMap>,
    /// It was restored with the map.
    pub(super) is_moved: bool,
}

/// Everything that the steps need, so that none of it can be missing in the middle.
pub(super) struct Work<'h> {
    pub(super) host: &'h Host,
    pub(super) caller: &'h Caller<'h>,
    pub(super) limits: Limits,
    /// Signals wait; what they ask for is done between two steps.
    pub(super) held: &'h Held,
}

/// Why the work could not be done.
enum Failure {
    Interrupted(i32),
    Step {
        target: usize,
        action: Action,
        reason: String,
        code: Option<u32>,
        /// The driver would not take the map, and the process is suspended as it was.
        map_refused: bool,
    },
}

/// Grace for a call beyond what the driver itself was told to wait.
const GRACE: Duration = Duration::from_secs(5);
/// How often an unlock and a restore are tried where a process is to run again.
const UNLOCKS: u32 = 2;
const RESTORES: u32 = 2;
/// How long an unlock may take.
const UNLOCK: Duration = Duration::from_secs(15);
/// How long a lock whose child was cut off may still come.
const SETTLING_LOCK: Duration = Duration::from_millis(200);
/// How long a process may go on changing its state after the call for that was cut off.
const SETTLING: Duration = Duration::from_secs(10);

impl Work<'_> {
    /// Takes all targets to where they are to be, or back to where they were.
    pub(super) fn carry_out(
        &self,
        purpose: Purpose,
        targets: &mut [Target],
    ) -> Result<Vec<Ending>, CheckpointFailure> {
        let mut touched = Vec::new();
        match self.forth(purpose, targets, &mut touched) {
            Ok(()) => {
                let there = |target: &Target| {
                    let last = target.steps.last().map(|action| action.to());
                    target.ending(After::State(last.unwrap_or(target.before)))
                };
                Ok(targets.iter().map(there).collect())
            }
            Err(failure) => {
                self.back(purpose, targets, &touched, &failure);
                let endings = targets
                    .iter()
                    .map(|target| target.ending(self.observe(target)));
                Err(failure.told(purpose, targets, endings.collect()))
            }
        }
    }

    /// One step of all targets after the other: what shares memory must be locked before any of it is checkpointed, and
    /// restored before any of it goes on.
    fn forth(
        &self,
        purpose: Purpose,
        targets: &mut [Target],
        touched: &mut Vec<usize>,
    ) -> Result<(), Failure> {
        let locks_end = self.host.clock.monotonic() + self.limits.lock;
        for action in [
            Action::Lock,
            Action::Checkpoint,
            Action::Restore,
            Action::Unlock,
        ] {
            for at in 0..targets.len() {
                if !targets[at].steps.contains(&action) {
                    continue;
                }
                self.go_on()?;
                if !touched.contains(&at) {
                    touched.push(at);
                }
                self.step(targets, touched, at, action, locks_end)?;
            }
        }
        // Who runs again is not taken away once more because somebody is impatient.
        match purpose {
            Purpose::Resume | Purpose::Only(Action::Unlock) | Purpose::Look => Ok(()),
            Purpose::Suspend | Purpose::Only(_) => self.go_on(),
        }
    }

    fn go_on(&self) -> Result<(), Failure> {
        self.held
            .asked_to_end()
            .map_or(Ok(()), |signal| Err(Failure::Interrupted(signal)))
    }

    /// One step of one target. A call that reports an error may have done what it was to do all the same; a lock that the
    /// driver does not vouch for is not built on (checkpoint-restore/criu#2469).
    fn step(
        &self,
        targets: &mut [Target],
        touched: &[usize],
        at: usize,
        action: Action,
        locks_end: Duration,
    ) -> Result<(), Failure> {
        let target = &targets[at];
        let call = match action {
            Action::Lock => {
                let left = locks_end.saturating_sub(self.host.clock.monotonic());
                // 0 would mean without end.
                let timeout_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1);
                Call::Lock { timeout_ms }
            }
            Action::Checkpoint => Call::Checkpoint,
            Action::Restore => Call::Restore(target.map.clone()),
            Action::Unlock => Call::Unlock,
        };
        let others = touched.iter().filter(|other| **other != at);
        let others: Vec<ProcessId> = others.map(|at| targets[*at].id).collect();
        let mut outcome = self.call(target, &others, &call);
        let mut after = After::State(action.to());
        if let Err(refusal) = &outcome {
            if action == Action::Lock && refusal.code.is_none() {
                // What the driver began for a child that was cut off may come a little later.
                self.host.clock.sleep(SETTLING_LOCK);
            }
            after = self.observe(target);
            if action == Action::Unlock && after.is(ProcessState::LOCKED) {
                outcome = self.call(target, &others, &call);
                after = match outcome {
                    Ok(()) => After::State(ProcessState::RUNNING),
                    Err(_) => self.observe(target),
                };
            }
        }
        match outcome {
            Err(failure) if action == Action::Lock || !after.is(action.to()) => {
                let code = failure.code;
                Err(Failure::Step {
                    target: at,
                    action,
                    map_refused: action == Action::Restore
                        && targets[at].map.is_some()
                        && after.is(ProcessState::CHECKPOINTED)
                        && code.is_some_and(|code| REFUSALS.contains(&code)),
                    reason: failure.reason,
                    code,
                })
            }
            _ => {
                targets[at].is_moved |= action == Action::Restore && targets[at].map.is_some();
                Ok(())
            }
        }
    }

    /// Undoes what was done, the last first. Where a map is refused, all run where they were: who has not been asked for
    /// yet comes back with the others.
    fn back(&self, purpose: Purpose, targets: &mut [Target], touched: &[usize], failure: &Failure) {
        let map_refused = matches!(
            failure,
            Failure::Step {
                map_refused: true,
                ..
            }
        );
        let mut order: Vec<usize> = match map_refused {
            true => (0..targets.len())
                .filter(|at| !targets[*at].steps.is_empty())
                .collect(),
            false => touched.to_vec(),
        };
        order.reverse();
        // A call about one process may wait for the unlock of another one (NVIDIA/cuda-checkpoint#30): who does not answer
        // comes last.
        let is_silent = |at: &usize| self.look(&targets[*at]) == After::Unknown;
        let (silent, mut answering): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(is_silent);
        answering.extend(silent);
        for at in answering {
            let target = &mut targets[at];
            match purpose {
                _ if map_refused => self.bring_home(target),
                Purpose::Only(Action::Unlock) | Purpose::Look => {}
                _ if target.before == ProcessState::CHECKPOINTED => {
                    self.to_checkpointed(target);
                }
                _ => {
                    self.to_running(target, RESTORES);
                }
            }
        }
    }

    /// Lets a process run on, from whatever state, with at most so many restores. One that the driver itself has refused
    /// is not asked for again: after one that lacked memory every further one fails (NVIDIA/cuda-checkpoint#44).
    fn to_running(&self, target: &Target, mut restores: u32) -> After {
        let mut unlocks = UNLOCKS;
        let mut after = self.observe(target);
        loop {
            match after {
                // Where the driver does not tell, an unlock is worth a try; what became of it the state says.
                After::State(ProcessState::LOCKED) | After::Unknown if unlocks > 0 => {
                    unlocks -= 1;
                    let _ = self.call(target, &[], &Call::Unlock);
                }
                After::State(ProcessState::CHECKPOINTED) if restores > 0 => {
                    let outcome = self.call(target, &[], &Call::Restore(None));
                    let is_final = outcome.is_err_and(|refusal| refusal.code.is_some());
                    restores = if is_final { 0 } else { restores - 1 };
                    // It may be locked from now on, whatever was tried before.
                    unlocks = UNLOCKS;
                }
                _ => return after,
            }
            after = self.observe(target);
        }
    }

    /// Takes a process back to where it was suspended. Where that fails twice it runs: nothing stays locked.
    fn to_checkpointed(&self, target: &mut Target) -> After {
        let lock = Call::Lock {
            timeout_ms: millis(self.limits.lock),
        };
        let mut after = self.observe(target);
        target.note_move(after);
        for (action, call) in [(Action::Lock, lock), (Action::Checkpoint, Call::Checkpoint)] {
            let mut tries = 2;
            while after.is(action.from()) && tries > 0 {
                tries -= 1;
                // What it was worth the state says.
                let _ = self.call(target, &[], &call);
                after = self.observe(target);
            }
        }
        if after.is(ProcessState::CHECKPOINTED) {
            return after;
        }
        // If it turns out to be suspended after all, it is where it belongs.
        after = self.to_running(target, 0);
        target.note_move(after);
        after
    }

    /// Lets a process run where it was before it was to be moved.
    fn bring_home(&self, target: &mut Target) {
        let map = target.map.as_ref().filter(|_| target.is_moved);
        let Some(way_back) = map.map(GpuMap::inverse) else {
            self.to_running(target, RESTORES);
            return;
        };
        let mut restores = RESTORES;
        if self.to_checkpointed(target).is(ProcessState::CHECKPOINTED) {
            let outcome = self.call(target, &[], &Call::Restore(Some(way_back)));
            let is_home = outcome.is_ok() || self.observe(target).is(ProcessState::LOCKED);
            target.is_moved = !is_home;
            let code = outcome.err().and_then(|refusal| refusal.code);
            if code.is_some_and(|code| !REFUSALS.contains(&code)) {
                restores = 0;
            }
        }
        self.to_running(target, restores);
    }

    /// In which state a process is, whatever was said of it. Asked again a few times, since so much depends on it.
    fn observe(&self, target: &Target) -> After {
        let mut in_vain = 0;
        let settled = self.host.wait_for(SETTLING.min(self.limits.deadline), || {
            match self.look(target) {
                After::Unknown => {
                    in_vain += 1;
                    (in_vain >= 3).then_some(After::Unknown)
                }
                After::State(ProcessState::CHECKPOINTING | ProcessState::RESTORING) => None,
                after => Some(after),
            }
        });
        settled.unwrap_or_else(|| self.look(target))
    }

    fn look(&self, target: &Target) -> After {
        if process::still_running(self.host, target.id).is_none() {
            return After::Gone;
        }
        let limit = QUICK.min(self.limits.deadline);
        match self.caller.state(target.id.pid, limit) {
            Ok(state) => After::State(ProcessState(state)),
            Err(_) if process::still_running(self.host, target.id).is_none() => After::Gone,
            Err(_) => After::Unknown,
        }
    }

    /// One call about a process, with those others that must run again should we be killed meanwhile.
    fn call(&self, target: &Target, others: &[ProcessId], call: &Call) -> Result<(), Refusal> {
        if process::still_running(self.host, target.id).is_none() {
            return Err(Refusal {
                reason: "it has ended".to_owned(),
                code: None,
            });
        }
        let limit = match call {
            Call::Lock { timeout_ms } => {
                Duration::from_millis((*timeout_ms).into()) + GRACE.min(self.limits.deadline)
            }
            // It has nothing to move.
            Call::Unlock => UNLOCK.min(self.limits.deadline),
            _ => self.limits.deadline,
        };
        let outcome = self.caller.act(target.id, others, call, limit);
        outcome.map_err(|failure| Refusal {
            code: match &failure {
                DriverFailure::Call { code, .. } => Some(*code),
                _ => None,
            },
            reason: match process::still_running(self.host, target.id) {
                Some(_) => failure.to_string(),
                None => format!("it ended meanwhile: {failure}"),
            },
        })
    }
}

/// `CUresult`s with which a driver turns a map down: INVALID_VALUE, INVALID_DEVICE, NOT_SUPPORTED.
const REFUSALS: [u32; 3] = [1, 101, 801];

/// Why a call failed.
struct Refusal {
    reason: String,
    /// The driver's own number; none where it did not get as far as that.
    code: Option<u32>,
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX).max(1)
}

impl Target {
    /// What is to be done with a process; nothing if nothing leads to where it is to be.
    pub(super) fn of(subject: &Subject, purpose: Purpose) -> Option<Self> {
        let before = subject.state()?;
        Some(Self {
            id: subject.process?,
            program: subject.program.clone(),
            before,
            steps: purpose.steps(before)?,
            map: subject.map.clone(),
            is_moved: false,
        })
    }

    /// It is back from where it was suspended, so that it was restored, whether that could be told then or not.
    fn note_move(&mut self, after: After) {
        let is_back = after.is(ProcessState::LOCKED) || after.is(ProcessState::RUNNING);
        self.is_moved |= self.map.is_some() && is_back;
    }

    fn ending(&self, after: After) -> Ending {
        Ending {
            pid: self.id.pid,
            before: self.before,
            after,
        }
    }
}

impl Failure {
    fn told(self, purpose: Purpose, targets: &[Target], endings: Vec<Ending>) -> CheckpointFailure {
        let doing = purpose.word();
        match self {
            Self::Interrupted(signal) => CheckpointFailure::Interrupted {
                doing,
                signal,
                endings,
            },
            Self::Step {
                target,
                reason,
                map_refused: true,
                ..
            } => CheckpointFailure::NotMoved {
                pid: targets[target].id.pid,
                reason,
                endings,
            },
            Self::Step {
                target,
                action,
                reason,
                code,
                ..
            } => CheckpointFailure::Step {
                doing,
                pid: targets[target].id.pid,
                action,
                reason,
                code,
                endings,
            },
        }
    }
}
