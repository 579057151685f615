//! The safe end of a client, and waiting until there is none. A client that is killed in the middle of its GPU work may leave
//! the server and all its other clients undefined, so the daemon lets go of it first, and only then may it be signalled.

use std::time::Duration;

use super::LIMIT;
use crate::attachment;
use crate::daemon::Observed;
use crate::error::{ClientFailure, Error};
use crate::host::Host;
use crate::mps::{AskError, Control, Termination, unless_interrupted};
use crate::process::{self, Handle, Running};
use crate::record::DaemonName;

/// Time between two questions, at first and in the end. Each leaves five lines in the daemon's log.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// How long a question may take when the time is up.
const LEAST: Duration = Duration::from_secs(1);

/// Which client is to be ended, and how.
pub struct Ending<'e> {
    /// The client.
    pub pid: i32,
    /// The daemon that is meant; otherwise whichever has the client.
    pub name: Option<&'e DaemonName>,
    /// Whether it gets SIGTERM once the daemon has let go of it.
    pub signal: bool,
    /// How long the daemon may take, and then the process.
    pub limit: Duration,
}

/// A client that no daemon counts among its clients any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its pid.
    pub pid: i32,
    /// The file name of its program.
    pub program: Option<String>,
    /// The daemon whose client it was.
    pub daemon: DaemonName,
    /// The server that it was connected to.
    pub server: i32,
    /// Whether it got SIGTERM. One that has ended by itself needs none.
    pub signalled: bool,
    /// Whether the process still runs.
    pub runs: bool,
}

/// Has the daemon let go of a client, waits until it does not list it any more, and then ends the process if that is asked.
pub fn end_client(host: &Host, daemons: &[Observed], ending: &Ending<'_>) -> Result<Ended, Error> {
    let pid = ending.pid;
    let gone = || Error::from(ClientFailure::NotRunning(pid));
    // Known from here on by its start as well: the number may be given away while we wait.
    let process = process::running(host, pid).ok_or_else(gone)?;
    let handle = match ending.signal {
        true => Some(hold(host, &process)?.ok_or_else(gone)?),
        false => None,
    };
    let found = find(host, daemons, ending, &process)?;
    if ending.signal && process.uid != host.uid {
        return Err(ClientFailure::OtherUser {
            pid,
            uid: process.uid,
            ours: host.uid,
        }
        .into());
    }
    let program = process::program_name(host, pid).filter(|name| !name.is_empty());
    let_go(host, &found, pid, ending.limit)?;
    let mut ended = Ended {
        pid,
        program,
        daemon: found.name.clone(),
        server: found.server,
        signalled: false,
        runs: process::still_running(host, process.id).is_some(),
    };
    if let Some(handle) = handle.filter(|_| ended.runs) {
        handle
            .terminate()
            .map_err(|source| Error::Signal { pid, source })?;
        if !handle.wait(host, ending.limit) {
            let seconds = ending.limit.as_secs();
            return Err(ClientFailure::StillRuns { pid, seconds }.into());
        }
        (ended.signalled, ended.runs) = (true, false);
    }
    Ok(ended)
}

fn hold(host: &Host, process: &Running) -> Result<Option<Handle>, Error> {
    let pid = process.id.pid;
    Handle::of(host, process.id).map_err(|source| Error::Signal { pid, source })
}

/// Where a client is.
struct Found<'h> {
    name: &'h DaemonName,
    control: Control<'h>,
    server: i32,
}

/// The daemon and the server that count a process among their clients.
fn find<'h>(
    host: &'h Host,
    daemons: &'h [Observed],
    ending: &Ending<'_>,
    process: &Running,
) -> Result<Found<'h>, Error> {
    let pid = ending.pid;
    let mut unasked = Vec::new();
    for daemon in daemons {
        let name = &daemon.record.name;
        let ours = |what| ClientFailure::Ours {
            pid,
            what,
            name: name.clone(),
        };
        let keeper = daemon.state.process().map(|keeper| keeper.id.pid);
        if keeper == Some(pid) {
            return Err(ours("the control process").into());
        }
        if keeper == Some(process.parent) {
            return Err(ours("a server").into());
        }
        let asked = match daemon.control(host)? {
            Ok(control) => {
                let place = unless_interrupted(place_of(&control, pid))?;
                place.map(|place| (control, place))
            }
            Err(reason) => Err(reason.to_string()),
        };
        match asked {
            Ok((_, Some(Place::Server))) => return Err(ours("a server").into()),
            Ok((control, Some(Place::ClientOf(server)))) => {
                return Ok(Found {
                    name,
                    control,
                    server,
                });
            }
            Ok((_, None)) => {}
            Err(reason) => unasked.push((name.clone(), reason)),
        }
    }
    Err(ClientFailure::NoClient {
        pid,
        name: ending.name.cloned(),
        thread_of: process::leader_of(host, pid).filter(|leader| *leader != pid),
        unasked,
    }
    .into())
}

enum Place {
    Server,
    ClientOf(i32),
}

/// What a daemon counts a process as.
fn place_of(control: &Control<'_>, pid: i32) -> Result<Option<Place>, AskError> {
    let servers = control.servers(LIMIT)?;
    if servers.contains(&pid) {
        return Ok(Some(Place::Server));
    }
    for server in servers {
        if is_listed(control, server, pid)? {
            return Ok(Some(Place::ClientOf(server)));
        }
    }
    Ok(None)
}

/// Whether a server counts a process among its clients. One that is gone counts nobody.
fn is_listed(control: &Control<'_>, server: i32, pid: i32) -> Result<bool, AskError> {
    let clients = control.clients(server, LIMIT)?;
    Ok(clients.is_some_and(|clients| clients.contains(&pid)))
}

/// Has the daemon let go of a client, and waits until it does not list it any more.
fn let_go(host: &Host, found: &Found<'_>, pid: i32, limit: Duration) -> Result<(), Error> {
    let Found {
        name,
        control,
        server,
    } = found;
    let refused = |reason| {
        Error::from(ClientFailure::Refused {
            name: (*name).clone(),
            pid,
            reason,
        })
    };
    let deadline = host.clock.monotonic() + limit;
    let answer = unless_interrupted(control.terminate_client(*server, pid, limit))?;
    let look = || unless_interrupted(is_listed(control, *server, pid));
    if let Termination::Refused(said) = answer.map_err(refused)? {
        // It may have gone by itself, or have been taken away by a session whose answer was lost.
        return match look()? {
            Ok(false) => Ok(()),
            _ => Err(refused(format!("it answered: {said}"))),
        };
    }
    let mut last = Ok(true);
    let mut is_gone = || {
        last = look()?;
        Ok(last == Ok(false))
    };
    if again(host, deadline, &mut is_gone)? {
        return Ok(());
    }
    Err(match last {
        Err(reason) => refused(reason),
        Ok(_) => ClientFailure::StillListed {
            name: (*name).clone(),
            pid,
            seconds: limit.as_secs(),
        }
        .into(),
    })
}

/// Waits until a daemon has no client or has ended. Otherwise says at this time of the clock why that is not known.
pub fn wait_for_no_client(
    host: &Host,
    control: &Control<'_>,
    daemon: &Running,
    until: Duration,
) -> Result<Result<(), String>, Error> {
    let mut why = String::new();
    let is_over = again(host, until, &mut || {
        let left = until.saturating_sub(host.clock.monotonic());
        let clients = attachment::clients_of(control, left.clamp(LEAST, LIMIT));
        why = match unless_interrupted(clients)? {
            Ok(clients) if clients.is_empty() => return Ok(true),
            Ok(_) => "it still has clients".to_owned(),
            // Who does not answer may have clients.
            Err(reason) => format!("it does not name its clients: {reason}"),
        };
        Ok(process::still_running(host, daemon.id).is_none())
    })?;
    Ok(if is_over { Ok(()) } else { Err(why) })
}

/// Looks again and again, ever less often, until it sees what it looks for.
fn again(
    host: &Host,
    until: Duration,
    look: &mut dyn FnMut() -> Result<bool, Error>,
) -> Result<bool, Error> {
    let mut pause = PAUSES.0;
    loop {
        if look()? {
            return Ok(true);
        }
        let left = until.saturating_sub(host.clock.monotonic());
        if left.is_zero() {
            return Ok(false);
        }
        host.clock.sleep(pause.min(left));
        pause = (pause * 3 / 2).min(PAUSES.1);
    }
}
