//! The programs of one node that share a daemon, such as the ranks of a job: whoever comes first starts it, the others wait
//! until it answers, the last one out ends it. They count themselves by a lock on a file beside the daemon's logs, which the
//! kernel gives back when one is killed; nobody waits for a rank of a certain number.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::OFlag;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::Error;
use crate::host::{Host, is_still_at};
use crate::record::{DaemonName, DaemonRecord, ProcessId};
use crate::runner::{Invocation, Mode};
use crate::runtime_dir;
use crate::ui::Ui;

/// How long the last one out may take to end the daemon.
const LIMIT: Duration = Duration::from_secs(120);

/// Our part in a daemon.
pub struct Part {
    file: File,
    path: PathBuf,
    record: DaemonRecord,
}

/// How long a daemon that is just leaving may stand in the way of the next one.
const CHANGE_LIMIT: Duration = Duration::from_secs(20);

/// Takes part in the daemon that `bring_up` finds or starts; it says whether it has started it. Where the last one out is
/// just ending it, it is brought up once more.
pub fn join(
    host: &Host,
    mut bring_up: impl FnMut() -> Result<(DaemonRecord, bool), Error>,
    is_live: impl Fn(&DaemonRecord) -> bool,
) -> Result<Part, Error> {
    let until = host.clock.monotonic() + CHANGE_LIMIT;
    let may_pass = |error: &Error| {
        let passes = matches!(
            error,
            Error::Unreachable { .. } | Error::NoRecord(_) | Error::Stale(_) | Error::NoLiveDaemon
        );
        passes && host.clock.monotonic() < until
    };
    loop {
        let (record, is_new) = match bring_up() {
            Err(error) if may_pass(&error) => {
                host.clock.sleep(Duration::from_millis(20));
                continue;
            }
            up => up?,
        };
        let path = record.log_directory.join(runtime_dir::PER_NODE);
        let file = counted(host, &path).map_err(|source| Error::File {
            doing: "lock",
            path: path.clone(),
            source,
        })?;
        let mut part = Part { file, path, record };
        if is_live(&part.record) {
            if is_new {
                part.claim()?;
            }
            return Ok(part);
        }
        let gone = Error::Stale(part.record.name.clone());
        if !may_pass(&gone) {
            return Err(gone);
        }
    }
}

/// The file, with a shared lock. One that somebody has removed meanwhile is no longer the one that others lock.
fn counted(host: &Host, path: &Path) -> io::Result<File> {
    let at = host.root.at(path);
    let attempt = || {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(&at);
        let file = match file {
            Ok(file) => file,
            Err(error) => return Some(Err(error)),
        };
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK | Errno::INTR) => return None,
            Err(errno) => return Some(Err(errno.into())),
            Ok(()) => {}
        }
        match is_still_at(&file, &at) {
            Ok(true) => Some(Ok(file)),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    };
    let in_vain = || Err(io::Error::from(io::ErrorKind::TimedOut));
    host.wait_for(LIMIT, attempt).unwrap_or_else(in_vain)
}

impl Part {
    /// The daemon's record.
    pub fn record(&self) -> &DaemonRecord {
        &self.record
    }

    /// Notes that the daemon was started for those who count themselves here: only such a one is ended.
    fn claim(&mut self) -> Result<(), Error> {
        let written = self
            .file
            .set_len(0)
            .and_then(|()| write!(self.file, "{}", mark(self.record.process)));
        written.map_err(|source| Error::File {
            doing: "write",
            path: self.path.clone(),
            source,
        })
    }

    /// Leaves; the last one out ends the daemon that is there then, which `now` tells. What does not end is told.
    pub fn leave(
        mut self,
        host: &Host,
        ui: &mut Ui<'_>,
        now: impl FnOnce(&DaemonName) -> Option<ProcessId>,
    ) {
        // First let go, then look whether nobody is left: of two that leave at once, one is the last.
        let _ = flock(&self.file, FlockOperation::Unlock);
        if flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        let mut claim = String::new();
        let read = self.file.rewind();
        let read = read.and_then(|()| self.file.read_to_string(&mut claim));
        if read.is_ok() && now(&self.record.name).is_some_and(|process| claim == mark(process)) {
            let name = self.record.name.as_str();
            let call = Invocation {
                purpose: "stop the daemon",
                program: host.ourselves.clone(),
                args: ["stop", "--name", name].map(Into::into).to_vec(),
                env: host.env.to_vec(),
                stdin: Vec::new(),
                mode: Mode::Uninterrupted(LIMIT),
            };
            match host.runner.run(&call) {
                Ok(stopped) if stopped.status.success() => {}
                Ok(stopped) => {
                    ui.note(format!("daemon {name} was not stopped: {}", stopped.said()))
                }
                Err(error) => ui.note(format!("daemon {name} was not stopped: {error}")),
            }
        }
        // Removed while it is locked: a newcomer that has opened it sees that it is not the one any more.
        let _ = fs::remove_file(host.root.at(&self.path));
    }
}

fn mark(process: ProcessId) -> String {
    format!("{}-{}", process.pid, process.start_ticks)
}
