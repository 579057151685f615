//! Bringing the servers that a daemon runs already to its new limits. One that starts later has them by itself.

use std::time::Duration;

use crate::daemon;
use crate::error::{Error, LimitFailure};
use crate::limits::Change;
use crate::mps::{Control, Scope, ServerLimits};
use crate::record::DaemonRecord;
use crate::ui::Ui;

/// How long the daemon may take to name its servers.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Changes the limits of each running server, for programs that connect from now on. The daemon's own were changed before,
/// so that no server can start between the two with others.
pub fn change(
    ui: &mut Ui<'_>,
    control: &Control<'_>,
    record: &DaemonRecord,
    changes: &[Change],
) -> Result<(), Error> {
    if changes.is_empty() {
        return Ok(());
    }
    let servers = control.servers(ANSWER_LIMIT);
    let servers = servers.map_err(|error| daemon::no_answer(record, error))?;
    let mut servers = servers.into_iter();
    servers.try_for_each(|server| change_one(ui, control, record, server, changes))
}

/// Sets on a running server what can be set there. What a server does when a memory limit is cleared nobody says, so
/// that stays as it is.
fn change_one(
    ui: &mut Ui<'_>,
    control: &Control<'_>,
    record: &DaemonRecord,
    server: i32,
    changes: &[Change],
) -> Result<(), Error> {
    let devices = record.served().devices().len();
    let look = || {
        let looked = control.server_limits(server, devices);
        looked.map_err(|error| daemon::no_answer(record, error))
    };
    let found = match look()? {
        ServerLimits::Found(found) => found,
        ServerLimits::Gone => return Ok(()),
        ServerLimits::NotReady => {
            let name = record.name.clone();
            return Err(LimitFailure::ServerNotReady { name, server }.into());
        }
    };
    for change in changes {
        let kept = match change {
            Change::Priority(_) => Some("its priority".to_owned()),
            Change::Memory {
                limit: None,
                ordinal,
                gpu,
            } => match found.memory.get(*ordinal) {
                Some(Some(limit)) => Some(format!("its memory limit of {limit} on {gpu}")),
                _ => continue,
            },
            Change::Threads(_) | Change::Memory { .. } => None,
        };
        if let Some(what) = kept {
            ui.note(format!("server {server} keeps {what} until it ends"));
            continue;
        }
        if let Err(error) = control.change(change, Scope::Server(server)) {
            return match look()? {
                ServerLimits::Gone => Ok(()),
                ServerLimits::Found(_) | ServerLimits::NotReady => Err(error),
            };
        }
    }
    Ok(())
}
