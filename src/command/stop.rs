//! `stop`: ends a recorded daemon that is provably ours, and returns when it is gone.

use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::StopArgs;
use crate::daemon::{self, State, Unrecorded};
use crate::error::Error;
use crate::host::Host;
use crate::mps::{self, AskError, CONTROL, Control, Keeper, Socket};
use crate::process::{self, Handle, Running};
use crate::record::{DaemonName, DaemonRecord};
use crate::runner::RunError;
use crate::store::{Entry, Locked, Store};
use crate::ui::Ui;

/// How long `quit` may take. It waits for the clients of the daemon's servers.
const QUIT_LIMIT: Duration = Duration::from_secs(30);
/// How long the kernel may take to take down a process that was signalled, and to free its lock.
const END_LIMIT: Duration = Duration::from_secs(5);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StopArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    if args.all {
        return stop_all(host, ui, &store);
    }
    let name = match args.name.as_deref() {
        Some(name) => name.parse()?,
        None => daemon::select(host, &store, None)?.record.name,
    };
    let stopped = stop(host, &store, &name)?;
    report(ui, &[stopped], &[]);
    Ok(0)
}

/// Stops every daemon of this user on this machine. A failure stops none of the others from being stopped.
fn stop_all(host: &Host, ui: &mut Ui<'_>, store: &Store<'_>) -> Result<u8, Error> {
    let (daemons, others) = daemon::observe_all(host, store)?;
    let mut stopped = Vec::new();
    let mut failed = Vec::new();
    for daemon in daemons {
        let name = daemon.record.name;
        match stop(host, store, &name) {
            Ok(record) => stopped.push(record),
            // What was to be reached is reached.
            Err(Error::StaleRemoved(_) | Error::NoRecord(_)) => {}
            // Not of this machine, so none of ours to stop.
            Err(error @ Error::OtherHost { .. }) => ui.note(error.to_string()),
            Err(error) => failed.push((name, error)),
        }
    }
    for Unrecorded { name, .. } in others {
        match stop(host, store, &name) {
            Ok(record) => stopped.push(record),
            Err(Error::StaleRemoved(_) | Error::NoRecord(_)) => {}
            Err(error) => failed.push((name, error)),
        }
    }
    for (_, error) in &failed {
        ui.failure(error, false);
    }
    report(ui, &stopped, &failed);
    Ok(u8::from(!failed.is_empty()))
}

fn report(ui: &mut Ui<'_>, stopped: &[DaemonRecord], failed: &[(DaemonName, Error)]) {
    let stopped: Vec<Value> = stopped.iter().map(DaemonRecord::to_json).collect();
    let mut report = json!({"stopped": stopped});
    if !failed.is_empty() {
        let failed = failed.iter().map(|(name, error)| {
            json!({"name": name.as_str(), "code": error.code(), "message": error.to_string()})
        });
        report["failed"] = failed.collect();
    }
    ui.json(&report);
}

/// Stops the daemon of this name and returns its record, which is gone by then.
fn stop(host: &Host, store: &Store<'_>, name: &DaemonName) -> Result<DaemonRecord, Error> {
    // Looked at first without the lock: where nothing is recorded, nothing is to be created.
    let entry = store.entry(name);
    if let None | Some(Entry::Damaged { .. }) = entry {
        return match entry {
            Some(entry) => entry.into_record(),
            None => Err(Error::NoRecord(name.clone())),
        };
    }
    let locked = store.lock(name)?;
    let here = process::place(host);
    let record = match locked.entry() {
        None => return Err(Error::NoRecord(name.clone())),
        Some(Entry::Intent(intent)) if intent.uid == host.uid => {
            return match daemon::left_by(host, &here, &intent) {
                Some(process) => end(host, &locked, intent, &process),
                None => gone(host, &locked, &intent),
            };
        }
        Some(Entry::Intent(intent)) => return Err(daemon::other_user(host, &intent)),
        Some(entry) => entry.into_record()?,
    };
    if record.uid != host.uid {
        return Err(daemon::other_user(host, &record));
    }
    let daemon = daemon::observe(host, &here, record.clone());
    match daemon.state {
        State::Stale => gone(host, &locked, &record),
        State::OtherHost => Err(daemon::other_host(host, store, &record)),
        State::OtherPidNamespace { .. } => Err(Error::OtherPidNamespace(name.clone())),
        State::NotAnswering(process) => Err(Error::NotAnswering {
            name: name.clone(),
            pid: process.id.pid,
            cause: "its process is stopped (state T)".to_owned(),
            stopped: true,
        }),
        // `quit` would reach nobody, or somebody else.
        State::Unreachable(process) if daemon::is_proven(host, &record, &process) => {
            end(host, &locked, record, &process)
        }
        State::Unreachable(_) => Err(Error::Contradiction {
            pipe: record.pipe_directory.clone(),
            found: format!(
                "the recorded pid {} is not a control daemon of this directory, and {}",
                record.process.pid,
                daemon
                    .socket
                    .describe(&mps::control_path(&record.pipe_directory))
            ),
        }),
        State::Live(process) => {
            prove(host, &record, &process)?;
            quit(host, &locked, record, &process)
        }
    }
}

/// A daemon that was gone before we came: nothing is stopped, and nothing of it stays.
fn gone(host: &Host, locked: &Locked<'_>, record: &DaemonRecord) -> Result<DaemonRecord, Error> {
    daemon::forget(host, locked, record)?;
    Err(Error::StaleRemoved(record.name.clone()))
}

/// Lock, socket and record must name one process before anything is said to it.
fn prove(host: &Host, record: &DaemonRecord, process: &Running) -> Result<(), Error> {
    let pipe = &record.pipe_directory;
    let contradiction = |found| {
        Err(Error::Contradiction {
            pipe: pipe.clone(),
            found,
        })
    };
    match mps::keeper(host, pipe) {
        Keeper::Process(keeper) if keeper.id == process.id => Ok(()),
        Keeper::Process(keeper) => contradiction(format!(
            "the record names pid {}, and pid {} runs there",
            process.id.pid, keeper.id.pid
        )),
        Keeper::Contradiction(found) => contradiction(found),
        // A stand-in without lock and socket: its pid file is all that there is.
        Keeper::Nobody
            if mps::control_socket(host, pipe) == Socket::Fifo
                && mps::named_by_pid_file(host, pipe)
                    .is_some_and(|named| named.id == process.id) =>
        {
            Ok(())
        }
        Keeper::Nobody | Keeper::Elsewhere => {
            contradiction("its process cannot be told from here".to_owned())
        }
    }
}

/// Tells the daemon to quit and waits until it is gone.
fn quit(
    host: &Host,
    locked: &Locked<'_>,
    record: DaemonRecord,
    process: &Running,
) -> Result<DaemonRecord, Error> {
    let control = Control::find(host, &record.pipe_directory, &record.log_directory)
        .ok_or(Error::NoProgram(CONTROL))?;
    let deadline = host.clock.monotonic() + QUIT_LIMIT;
    let said = match control.quit(QUIT_LIMIT) {
        Ok(said) => said,
        // It left while we asked, or its sockets went; its process will tell.
        Err(AskError::NoDaemon(_)) => String::new(),
        // It is draining. Without a server there is nothing to wait for.
        Err(AskError::Silent(limit)) if has_server(host, process) => {
            return Err(still_running(host, &record, limit));
        }
        Err(AskError::Call(RunError::Interrupted(signal))) => {
            return Err(Error::Interrupted(signal));
        }
        Err(error) => {
            return Err(Error::NotAnswering {
                name: record.name.clone(),
                pid: process.id.pid,
                cause: error.to_string(),
                stopped: false,
            });
        }
    };
    if !said.is_empty() {
        if mps::lacks_privileged_socket(host, &record.pipe_directory)
            && daemon::is_proven(host, &record, process)
        {
            return end(host, locked, record, process);
        }
        return Err(Error::QuitRefused {
            name: record.name.clone(),
            pid: process.id.pid,
            said,
        });
    }
    let failed = |source| Error::Signal {
        pid: process.id.pid,
        source,
    };
    let left = deadline.saturating_sub(host.clock.monotonic());
    let is_gone = match Handle::of(host, process.id).map_err(failed)? {
        Some(handle) => handle.wait(host, left),
        None => true,
    };
    if !is_gone {
        return Err(still_running(host, &record, QUIT_LIMIT));
    }
    finish(host, locked, record)
}

fn has_server(host: &Host, process: &Running) -> bool {
    !process::children_of(host, process.id.pid).is_empty()
}

fn still_running(host: &Host, record: &DaemonRecord, limit: Duration) -> Error {
    Error::StillRunning {
        name: record.name.clone(),
        pid: record.process.pid,
        seconds: limit.as_secs(),
        servers: process::children_of(host, record.process.pid),
    }
}

/// Ends a daemon that cannot be told to quit.
fn end(
    host: &Host,
    locked: &Locked<'_>,
    record: DaemonRecord,
    process: &Running,
) -> Result<DaemonRecord, Error> {
    if !daemon::terminate(host, process, END_LIMIT)? {
        return Err(still_running(host, &record, END_LIMIT));
    }
    finish(host, locked, record)
}

/// The process is gone. The lock follows within milliseconds, and only then may another daemon be started there.
fn finish(host: &Host, locked: &Locked<'_>, record: DaemonRecord) -> Result<DaemonRecord, Error> {
    let pipe = &record.pipe_directory;
    let ours = record.process.pid;
    host.wait_for(END_LIMIT, || {
        (mps::lock_holder(host, pipe) != Some(ours)).then_some(())
    });
    daemon::forget(host, locked, &record)?;
    Ok(record)
}
