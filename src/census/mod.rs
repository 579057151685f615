//! Who is on the GPUs through our daemons: their servers, the clients of these, and what can be known of each. Servers and
//! clients come and go while one asks; what has ended by then is left out.

mod ending;

use std::time::Duration;

use crate::daemon::Observed;
use crate::error::Error;
use crate::host::Host;
use crate::mps::{AskError, Control, ServerState, unless_interrupted};
use crate::nvidia_smi::{self, App};
use crate::process::{self, Running};
use crate::record::DaemonName;

pub use ending::{Ended, Ending, end_client, wait_for_no_client};

/// How long the daemon may take to answer a question. It takes milliseconds, unless it waits for somebody.
const LIMIT: Duration = Duration::from_secs(5);

/// A daemon and whom it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// The daemon.
    pub name: DaemonName,
    /// Its servers, or why they cannot be told.
    pub servers: Result<Vec<Server>, String>,
}

/// A server.
#[derive(Clone, Debug, PartialEq)]
pub struct Server {
    /// Its pid.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Its state, where the daemon tells it: 535 does not.
    pub state: Option<ServerState>,
    /// Its clients.
    pub clients: Vec<Client>,
}

/// A client.
#[derive(Clone, Debug, PartialEq)]
pub struct Client {
    /// Its pid.
    pub pid: i32,
    /// The file name of its program.
    pub program: Option<String>,
    /// Its user.
    pub uid: u32,
    /// The user's name, where the machine knows it.
    pub user: Option<String>,
    /// When it started, in seconds since 1970.
    pub since: Option<u64>,
    /// Its memory on all its GPUs, in MiB; nothing where the driver does not tell.
    pub memory_mib: Option<u64>,
    /// The most of the GPU's threads that it may occupy, in percent.
    pub threads: Option<f64>,
}

/// Counts whom these daemons serve. One that cannot be asked hides none of the others.
pub fn take(host: &Host, daemons: &[Observed]) -> Result<Vec<Counted>, Error> {
    let mut counted = Vec::new();
    for daemon in daemons {
        let servers = match daemon.control(host)? {
            Ok(control) => servers(host, &control)?,
            Err(reason) => Err(reason.to_string()),
        };
        let name = daemon.record.name.clone();
        counted.push(Counted { name, servers });
    }
    let mut clients: Vec<&mut Client> = counted
        .iter_mut()
        .flat_map(|daemon| &mut daemon.servers)
        .flatten()
        .flat_map(|server| &mut server.clients)
        .collect();
    if !clients.is_empty() {
        let apps = nvidia_smi::apps(host)?;
        for client in &mut clients {
            client.memory_mib = memory_of(client.pid, &apps);
        }
    }
    Ok(counted)
}

fn servers(host: &Host, control: &Control<'_>) -> Result<Result<Vec<Server>, String>, Error> {
    let ask = || -> Result<Vec<Server>, AskError> {
        let mut found = Vec::new();
        for pid in control.servers(LIMIT)? {
            found.extend(server(host, control, pid)?);
        }
        Ok(found)
    };
    unless_interrupted(ask())
}

fn server(host: &Host, control: &Control<'_>, pid: i32) -> Result<Option<Server>, AskError> {
    let Some(process) = process::running(host, pid) else {
        return Ok(None);
    };
    let state = control.server_state(pid, LIMIT)?;
    let Some(pids) = control.clients(pid, LIMIT)? else {
        return Ok(None);
    };
    let running = pids
        .into_iter()
        .filter_map(|pid| process::running(host, pid));
    let running: Vec<Running> = running.collect();
    let threads = match running.is_empty() {
        true => None,
        false => control.server_threads(pid)?,
    };
    let clients = running
        .iter()
        .filter_map(|client| known(host, client, threads));
    let clients = clients.collect();
    // Looked at once more: it may have ended while we asked.
    Ok(
        process::still_running(host, process.id).map(|process| Server {
            pid,
            uid: process.uid,
            state,
            clients,
        }),
    )
}

/// What is known of a client, but for its memory; `None` if it has ended meanwhile.
fn known(host: &Host, client: &Running, of_server: Option<f64>) -> Option<Client> {
    let pid = client.id.pid;
    let program = process::program_name(host, pid).filter(|name| !name.is_empty());
    let own = process::variable_of(host, pid, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    process::still_running(host, client.id).map(|client| Client {
        pid,
        program,
        uid: client.uid,
        user: process::user_name(client.uid),
        since: process::started_at(host, client.id),
        memory_mib: None,
        threads: smallest(own.as_deref(), of_server),
    })
}

/// The percentage that holds: a client may have less than its server gives, and not more. What is no percentage is ignored.
fn smallest(own: Option<&str>, of_server: Option<f64>) -> Option<f64> {
    let own = own.and_then(|own| own.trim().parse().ok());
    let own = own.filter(|own: &f64| *own > 0.0 && *own <= 100.0);
    match (own, of_server) {
        (Some(own), Some(of_server)) => Some(own.min(of_server)),
        (own, of_server) => own.or(of_server),
    }
}

/// The memory of a process on all its GPUs, if all of it is known.
fn memory_of(pid: i32, apps: &[App]) -> Option<u64> {
    let mut mine = apps.iter().filter(|app| app.pid == pid).peekable();
    mine.peek()?;
    mine.map(|app| app.memory_mib).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_the_smaller_percentage() {
        for (own, of_server, expected) in [
            (Some("30"), Some(100.0), Some(30.0)),
            (Some("80"), Some(50.0), Some(50.0)),
            (Some(" 12.5 "), None, Some(12.5)),
            (None, Some(40.0), Some(40.0)),
            (None, None, None),
            (Some(""), Some(40.0), Some(40.0)),
            (Some("0"), Some(40.0), Some(40.0)),
            (Some("-5"), None, None),
            (Some("101"), None, None),
            (Some("nan"), Some(40.0), Some(40.0)),
            (Some("many"), Some(40.0), Some(40.0)),
        ] {
            assert_eq!(smallest(own, of_server), expected, "{own:?} {of_server:?}");
        }
    }

    #[test]
    fn memory_is_the_sum_over_the_gpus_and_unknown_where_a_part_is() {
        let app = |pid, memory_mib| App {
            pid,
            gpu: None,
            memory_mib,
        };
        let apps = [
            app(1, Some(100)),
            app(2, Some(7)),
            app(1, Some(20)),
            app(3, Some(7)),
            app(3, None),
        ];
        assert_eq!(memory_of(1, &apps), Some(120));
        assert_eq!(memory_of(2, &apps), Some(7));
        assert_eq!(memory_of(3, &apps), None);
        assert_eq!(memory_of(4, &apps), None);
    }
}
