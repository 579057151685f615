//! How much daemons have to do: how many servers and clients each one tells of.

use std::time::Duration;

use super::{AskError, Control};
use crate::daemon::Observed;
use crate::error::Error;
use crate::host::Host;
use crate::mps::unless_interrupted;
use crate::runner::with_each;

/// What a daemon tells of its servers and clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// How many servers it has; `None` where it did not tell.
    pub servers: Option<usize>,
    /// How many clients its servers have in all; `None` where it did not tell.
    pub clients: Option<usize>,
}

/// Asks a daemon for its servers and their clients, within `limit` in all. A server that has ended meanwhile does not count.
/// What the daemon told before it fell silent stands beside the failure.
pub fn load_of(
    host: &Host,
    control: &Control<'_>,
    limit: Duration,
) -> (Load, Result<(), AskError>) {
    let deadline = host.clock.monotonic() + limit;
    let left = || deadline.saturating_sub(host.clock.monotonic());
    let mut load = Load::default();
    let servers = match control.servers(limit) {
        Ok(servers) => servers,
        Err(error) => return (load, Err(error)),
    };
    let (mut running, mut clients) = (servers.len(), 0);
    load.servers = Some(running);
    for server in servers {
        match control.clients(server, left()) {
            Ok(Some(pids)) => clients += pids.len(),
            Ok(None) => running -= 1,
            Err(error) => return (load, Err(error)),
        }
        load.servers = Some(running);
    }
    load.clients = Some(clients);
    (load, Ok(()))
}

/// What each of these daemons tells within `limit`, in their order. All are asked at once, so that silent ones cost the limit
/// once; one that cannot answer is not asked.
pub fn loads_of(host: &Host, daemons: &[Observed], limit: Duration) -> Result<Vec<Load>, Error> {
    let control_of = |daemon: &Observed| daemon.control(host).ok()?.ok();
    let controls: Vec<Option<Control<'_>>> = daemons.iter().map(control_of).collect();
    let askable: Vec<&Control<'_>> = controls.iter().flatten().collect();
    let mut told = with_each(&askable, |control| load_of(host, control, limit)).into_iter();
    let mut loads = Vec::new();
    for control in &controls {
        let told = control.as_ref().and_then(|_| told.next());
        let (load, outcome) = told.unwrap_or((Load::default(), Ok(())));
        // Why a daemon is silent nobody asks here.
        let _ = unless_interrupted(outcome)?;
        loads.push(load);
    }
    Ok(loads)
}
