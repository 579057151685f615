//! What the ledger is told of a suspension: who is about to be taken away, and who came back.

use std::time::UNIX_EPOCH;

use serde_json::Map;

use super::work::Target;
use crate::checkpoint::{After, Ending, ProcessState, Subject, Suspended};
use crate::error::Error;
use crate::host::Host;
use crate::process;
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
    let locked = match ledger.lock(processes) {
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

/// Writes down, before they are touched, who is about to be taken away.
pub(super) fn remember(
    host: &Host,
    locked: &LockedLedger<'_>,
    subjects: &[Subject],
    targets: &[Target],
) -> Result<(), Error> {
    let now = host
        .clock
        .now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    for target in targets.iter().filter(|target| !target.steps.is_empty()) {
        let known = locked.entry(target.id);
        let is_known = known.is_some();
        let mut entry = known.unwrap_or_else(|| Suspended {
            process: target.id,
            uid: 0,
            place: process::place(host),
            program: target.program.clone(),
            gpus: Vec::new(),
            suspended_at: now.as_secs_f64(),
            unknown: Map::new(),
        });
        let subject = subjects.iter().find(|subject| subject.pid == target.id.pid);
        if let Some(subject) = subject {
            entry.uid = subject.uid;
            if !is_known || !subject.shares.is_empty() {
                entry.gpus = subject.shares.clone();
            }
        }
        locked.put(&entry)?;
    }
    Ok(())
}

/// Brings the ledger up to date: who runs, or has ended, is not away.
pub(super) fn settle(
    locked: &LockedLedger<'_>,
    target: &Target,
    ending: &Ending,
) -> Result<(), Error> {
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
