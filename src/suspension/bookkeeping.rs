//! What the ledger is told of a suspension: who is about to be taken away, and who came back.

use std::time::UNIX_EPOCH;

use serde_json::Map;

use super::work::Target;
use crate::checkpoint::{After, Ending, ProcessState, Subject, Suspended};
use crate::error::Error;
use crate::host::Host;
use crate::record::ProcessId;
use crate::store::{Ledger, LockedLedger};
use crate::ui::Ui;

/// Locks what the ledger tells of these processes, and forgets those that have ended. Who only comes back need not be
/// written down: then what does not work is told and left.
pub(super) fn lock<'l>(
    ui: &mut Ui<'_>,
    ledger: &'l Ledger<'_>,
    processes: &[ProcessId],
    takes_away: bool,
) -> Result<Option<LockedLedger<'l>>, Error> {
    let locked = ui.waiting("waiting for another uni-cumps that works on them", || {
        ledger.lock(processes)
    });
    let locked = match locked {
        Err(error) if takes_away || matches!(error, Error::Busy { .. }) => return Err(error),
        Err(error) => {
            ui.note(format!(
                "the ledger of suspended processes cannot be changed: {error}"
            ));
            return Ok(None);
        }
        Ok(locked) => locked,
    };
    for ended in ledger.ended() {
        if let Err(error) = locked.forget(&ended) {
            ui.note(format!(
                "the ledger still tells of a process that has ended: {error}"
            ));
        }
    }
    Ok(Some(locked))
}

/// Writes down, before they are touched, who is about to be taken away; all of them or none.
pub(super) fn remember(
    host: &Host,
    locked: &LockedLedger<'_>,
    subjects: &[Subject],
    targets: &[Target],
) -> Result<(), Error> {
    let now = host.clock.now().duration_since(UNIX_EPOCH);
    let away = |target: &&Target| !target.steps.is_empty();
    for target in targets.iter().filter(away) {
        let subject = subjects.iter().find(|subject| subject.pid == target.id.pid);
        let listed = subject.map(|subject| subject.shares.clone());
        let entry = Suspended {
            process: target.id,
            uid: subject.map_or(host.uid, |subject| subject.uid),
            place: locked.here().clone(),
            program: target.program.clone(),
            gpus: listed.unwrap_or_default(),
            suspended_at: now.as_ref().map_or(0.0, |now| now.as_secs_f64()),
            unknown: Map::new(),
        };
        let entry = match locked.entry(target.id) {
            // It is away since then.
            Some(known) if target.before != ProcessState::RUNNING => Suspended {
                gpus: entry.gpus,
                ..known
            },
            _ => entry,
        };
        if let Err(error) = locked.put(&entry) {
            for target in targets.iter().filter(away) {
                if target.before == ProcessState::RUNNING {
                    // Best effort: it goes at the latest when the process has ended.
                    let _ = locked.remove(target.id);
                }
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Brings the ledger up to date: who runs, or has ended, is not away.
pub(super) fn settle(
    ui: &mut Ui<'_>,
    locked: &LockedLedger<'_>,
    targets: &[Target],
    endings: &[Ending],
) {
    for (target, ending) in targets.iter().zip(endings) {
        if let Err(error) = settle_one(locked, target, ending) {
            let pid = ending.pid;
            ui.note(format!("the ledger still tells of pid {pid}: {error}"));
        }
    }
}

fn settle_one(locked: &LockedLedger<'_>, target: &Target, ending: &Ending) -> Result<(), Error> {
    let is_away = match ending.after {
        After::State(state) => state != ProcessState::RUNNING,
        After::Gone => false,
        After::Unknown => true,
    };
    match (locked.entry(target.id), &target.map) {
        _ if !is_away => locked.remove(target.id),
        (Some(mut entry), Some(map)) if target.is_moved => {
            entry.moved(map);
            locked.put(&entry)
        }
        _ => Ok(()),
    }
}
