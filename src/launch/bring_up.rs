//! Bringing a control daemon up: the launch, the wait for its first answer, the proof which process it is. Whatever
//! fails on the way ends what was launched.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::daemon;
use crate::error::Error;
use crate::host::Host;
use crate::mps::{self, Control, Keeper, LogMark, unless_interrupted};
use crate::process::{self, Running};
use crate::runner::{Finished, RunError, Status};
use crate::runtime_dir::Directories;

/// How long a launched daemon may take until it answers. It takes milliseconds.
const READY_LIMIT: Duration = Duration::from_secs(10);
/// Less time than this is not enough for one more question; what the last one has shown is the better message.
const SESSION: Duration = Duration::from_millis(100);
/// How long a daemon that did not become ready may take to end.
const END_LIMIT: Duration = Duration::from_secs(3);

/// A daemon that is to be.
pub(super) struct Launch<'l> {
    /// The machine.
    pub(super) host: &'l Host,
    /// The control program for the daemon's directories.
    pub(super) control: &'l Control<'l>,
    /// Where it works; created before.
    pub(super) directories: &'l Directories,
    /// What it serves: its `CUDA_VISIBLE_DEVICES`.
    pub(super) visible: &'l str,
}

impl Launch<'_> {
    fn pipe(&self) -> &Path {
        &self.directories.pipe
    }

    /// Launches the daemon with `-d` and hands its process to `record`.
    ///
    /// `may_join` says whether a daemon of ours that was faster is as good: an interrupted start may have launched one
    /// that came up only now.
    pub(super) fn detached<T>(
        &self,
        may_join: impl Fn(&Running) -> bool,
        record: impl FnOnce(&Running) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let log = LogMark::set(self.host, &self.directories.log);
        let mut group = 0;
        let ready = match self.control.launch(self.visible) {
            Ok(finished) => {
                group = finished.process_group;
                if finished.status.success() || self.keeper_is(&may_join) {
                    self.wait_until_ready(&log, || None)
                } else {
                    Err(self.failed(said(&finished), &log))
                }
            }
            Err(RunError::Interrupted(signal)) => Err(Error::Interrupted(signal)),
            Err(error) => Err(self.failed(error.to_string(), &log)),
        };
        ready
            .and_then(|process| record(&process))
            .map_err(|failure| self.abandon(failure, group))
    }

    fn keeper_is(&self, accepted: impl Fn(&Running) -> bool) -> bool {
        match mps::keeper(self.host, self.pipe()) {
            Keeper::Process(process) => accepted(&process),
            Keeper::Nobody | Keeper::Elsewhere | Keeper::Contradiction(_) => false,
        }
    }

    /// Runs the daemon with `-f` as our child until it ends. Its process is handed to `record` once it is ready.
    pub(super) fn foreground(
        &self,
        record: impl FnOnce(&Running) -> Result<(), Error>,
    ) -> Result<Finished, Error> {
        let log = LogMark::set(self.host, &self.directories.log);
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let child = thread::Builder::new()
                .spawn_scoped(scope, || {
                    let finished = self.control.foreground(self.visible);
                    ended.store(true, Ordering::Release);
                    finished
                })
                .map_err(|error| self.failed(format!("no thread to wait for it: {error}"), &log))?;
            let early = || ended.load(Ordering::Acquire).then_some(());
            let recorded = self
                .wait_until_ready(&log, early)
                .and_then(|process| record(&process))
                .map_err(|failure| self.abandon(failure, 0));
            if recorded.is_err() && self.host.wait_for(END_LIMIT, early).is_none() {
                // Not even its process could be told: pass a signal on as if we had got it.
                process::terminate_ourselves();
            }
            let finished = match child.join() {
                Ok(Ok(finished)) => Ok(finished),
                Ok(Err(error)) => Err(self.failed(error.to_string(), &log)),
                Err(_) => Err(self.failed("its thread panicked".to_owned(), &log)),
            };
            match recorded {
                Ok(()) => finished,
                Err(Error::EndedEarly { .. }) => {
                    finished.and_then(|finished| Err(ended_early(&finished)))
                }
                Err(failure) => Err(failure),
            }
        })
    }

    /// Waits until a daemon that runs already answers.
    pub(super) fn answers(&self) -> Result<Running, Error> {
        let log = LogMark::set(self.host, &self.directories.log);
        self.wait_until_ready(&log, || None)
    }

    /// Waits until the daemon has answered a question and its process is certain. `early` may say that it has ended.
    fn wait_until_ready(
        &self,
        log: &LogMark,
        early: impl Fn() -> Option<()>,
    ) -> Result<Running, Error> {
        let deadline = self.host.clock.monotonic() + READY_LIMIT;
        let mut last = String::from("it was not seen");
        let ready = self.host.wait_for(READY_LIMIT, || {
            if early().is_some() {
                return Some(Err(Error::EndedEarly { status: 1 }));
            }
            let left = deadline.saturating_sub(self.host.clock.monotonic());
            if left < SESSION {
                return None;
            }
            match unless_interrupted(self.control.servers(left)) {
                Ok(Ok(_)) => {}
                Ok(Err(reason)) => {
                    last = reason;
                    return None;
                }
                Err(error) => return Some(Err(error)),
            }
            match self.identify() {
                Ok(process) => Some(Ok(process)),
                Err(reason) => {
                    last = reason;
                    None
                }
            }
        });
        ready.unwrap_or_else(|| {
            Err(Error::NotReady {
                pipe: self.pipe().to_owned(),
                seconds: READY_LIMIT.as_secs(),
                cause: last,
                log: log.new_lines(),
                log_directory: self.directories.log.clone(),
            })
        })
    }

    /// The process of the daemon that has just answered.
    fn identify(&self) -> Result<Running, String> {
        let found = match mps::keeper(self.host, self.pipe()) {
            Keeper::Process(process) => Some(process),
            // A wrapper that takes no lock, or a lock of another pid namespace.
            Keeper::Nobody | Keeper::Elsewhere => {
                let socket = mps::control_socket(self.host, self.pipe());
                if socket.kind().is_none() {
                    return Err(socket.describe(&mps::control_path(self.pipe())));
                }
                mps::named_by_pid_file(self.host, self.pipe())
            }
            Keeper::Contradiction(found) => return Err(found),
        };
        match found {
            Some(process) if process.uid == self.host.uid => Ok(process),
            Some(process) => Err(format!("{} belongs to uid {}", process.id, process.uid)),
            None => Err("it answers, but its process cannot be told".to_owned()),
        }
    }

    fn failed(&self, cause: String, log: &LogMark) -> Error {
        Error::LaunchFailed {
            cause,
            log: log.new_lines(),
            log_directory: self.directories.log.clone(),
        }
    }

    /// Ends what a failed launch has left running. Nobody has been told of the daemon yet, so it has no clients that a
    /// hard end could harm.
    fn abandon(&self, failure: Error, group: i32) -> Error {
        let mut launched = match daemon::settled_keeper(self.host, self.pipe()) {
            Keeper::Process(process) if process.uid == self.host.uid => vec![process],
            _ => Vec::new(),
        };
        if group > 0 {
            launched.extend(process::members_of_group(self.host, group));
        }
        for process in &launched {
            if end_unannounced(self.host, process).is_err() {
                return Error::LeftRunning {
                    failure: Box::new(failure),
                    pid: process.id.pid,
                };
            }
        }
        failure
    }
}

/// Ends a daemon that nobody was told of: first SIGTERM, then SIGKILL.
pub fn end_unannounced(host: &Host, process: &Running) -> Result<(), Error> {
    if daemon::terminate(host, process, END_LIMIT)? || daemon::kill(host, process, END_LIMIT)? {
        return Ok(());
    }
    Err(Error::Signal {
        pid: process.id.pid,
        source: std::io::Error::other("SIGKILL did not end it"),
    })
}

/// A foreground daemon that was not ready yet. Either of two threads may have got a signal that was meant for us; the
/// one that waits for the daemon has passed it on.
fn ended_early(finished: &Finished) -> Error {
    match finished.status {
        Status::Signaled(signal) => Error::Interrupted(signal),
        Status::Exited(_) => Error::EndedEarly {
            status: finished.status.shell_code(),
        },
    }
}

/// What a launch that failed has said.
fn said(finished: &Finished) -> String {
    let status = finished.status.shell_code();
    match finished.said() {
        said if said.is_empty() => format!("it exited with status {status} and said nothing"),
        said => format!("it exited with status {status}: {said}"),
    }
}
