//! How much daemons have to do: how many servers and clients each one tells of.

use std::thread;
use std::time::Duration;

use super::{AskError, Control};
use crate::daemon::Observed;
use crate::error::Error;
use crate::host::Host;
use crate::mps::unless_interrupted;
use crate::runner::hold_signals;

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
    // A signal has its effect when every call has ended: it would end us and leave the calls behind.
    let _held = hold_signals();
    let asked: Vec<(Load, Result<(), AskError>)> = thread::scope(|scope| {
        let asking: Vec<_> = daemons
            .iter()
            .map(|daemon| {
                let control = control_of(daemon)?;
                Some(scope.spawn(move || load_of(host, &control, limit)))
            })
            .collect();
        let answer = |thread: Option<thread::ScopedJoinHandle<'_, _>>| {
            // A thread that panicked has told nothing.
            thread.and_then(|thread| thread.join().ok())
        };
        let silent = || (Load::default(), Ok(()));
        asking
            .into_iter()
            .map(|thread| answer(thread).unwrap_or_else(silent))
            .collect()
    });
    let mut loads = Vec::new();
    for (load, outcome) in asked {
        // Why a daemon is silent nobody asks here.
        let _ = unless_interrupted(outcome)?;
        loads.push(load);
    }
    Ok(loads)
}
