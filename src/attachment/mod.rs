//! Whether a program, or what it has started, is a client of a daemon: who and how many the clients are, the proof for a
//! program that runs beside us, and what keeps it from being one.

mod load;
mod obstacles;
mod proof;

use std::time::Duration;

use crate::mps::{AskError, Control};

pub use load::{Load, load_of, loads_of};
pub use obstacles::{Obstacle, obstacles};
pub use proof::{not_run, proven};

/// A client of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// The process.
    pub pid: i32,
    /// The server that it is connected to.
    pub server: i32,
}

/// All clients of a daemon's servers, as far as the daemon tells. A server that has ended meanwhile has none. Each question
/// may take `limit`.
pub fn clients_of(control: &Control<'_>, limit: Duration) -> Result<Vec<Client>, AskError> {
    let mut found = Vec::new();
    for server in control.servers(limit)? {
        let pids = control.clients(server, limit)?.unwrap_or_default();
        found.extend(pids.into_iter().map(|pid| Client { pid, server }));
    }
    Ok(found)
}
