//! One child process: how it is started, seen to end, and reaped.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use nix::errno::Errno;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

use super::Status;

/// A program that was started and not reaped yet, so that its number is nobody else's.
pub(super) struct Child {
    pub(super) pid: Pid,
    pub(super) pidfd: Option<OwnedFd>,
}

/// What a child gets of ours.
pub(super) enum Kinship<'f> {
    /// These three descriptors and nothing else: a process group of its own, every signal's default.
    Stranger([BorrowedFd<'f>; 3]),
    /// All that the caller has given us.
    Heir,
}

impl Child {
    /// Starts `file` with these words, the first of which is what it is called by, and no other variables than `env`.
    pub(super) fn start(
        file: &Path,
        words: &[&OsStr],
        env: &[(OsString, OsString)],
        mask: &SigSet,
        kinship: &Kinship<'_>,
    ) -> io::Result<Self> {
        let mut actions = PosixSpawnFileActions::init()?;
        let mut attributes = PosixSpawnAttr::init()?;
        let flags =
            PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF;
        attributes.set_sigmask(mask)?;
        match kinship {
            Kinship::Stranger(streams) => {
                give_streams(&mut actions, streams)?;
                attributes.set_flags(flags | PosixSpawnFlags::POSIX_SPAWN_SETPGROUP)?;
                attributes.set_pgroup(Pid::from_raw(0))?;
                // Rust ignores SIGPIPE for itself, and `nohup` and a shell's `&` let us ignore more. NVIDIA's daemon hands
                // that on to its servers, and a server that ignores SIGINT cannot be cut off: `quit -t` ends it with that.
                attributes.set_sigdefault(&SigSet::all())?;
            }
            Kinship::Heir => {
                attributes.set_flags(flags)?;
                // Only that is Rust's and not the caller's.
                attributes.set_sigdefault(&SigSet::from(Signal::SIGPIPE))?;
            }
        }
        let file = c_string(file.as_os_str().as_bytes())?;
        let words = words.iter().map(|word| c_string(word.as_bytes()));
        let words = words.collect::<io::Result<Vec<_>>>()?;
        let env = env
            .iter()
            .map(|(key, value)| {
                let mut entry = key.clone().into_vec();
                entry.push(b'=');
                entry.extend_from_slice(value.as_bytes());
                c_string(&entry)
            })
            .collect::<io::Result<Vec<_>>>()?;
        let pid = posix_spawn(file.as_c_str(), &actions, &attributes, &words, &env)?;
        let pidfd = rustix::process::Pid::from_raw(pid.as_raw()).and_then(|pid| {
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
        });
        Ok(Self { pid, pidfd })
    }

    pub(super) fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        !matches!(
            waitid(Id::Pid(self.pid), flags),
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR)
        )
    }

    /// Ends the program and what is left of its process group. The leader is not reaped yet, so that the group's
    /// number cannot belong to anybody else.
    pub(super) fn end_group(&self) {
        let _ = killpg(self.pid, Signal::SIGKILL);
    }

    pub(super) fn reap(&self) -> io::Result<Status> {
        loop {
            match waitpid(self.pid, None) {
                Ok(WaitStatus::Exited(_, code)) => return Ok(Status::Exited(code)),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    return Ok(Status::Signaled(signal as i32));
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a NUL byte in the call"))
}

/// Gives a child these streams as 0, 1 and 2, and no other descriptor.
fn give_streams(
    actions: &mut PosixSpawnFileActions,
    streams: &[BorrowedFd<'_>; 3],
) -> io::Result<()> {
    // In two steps, since one of the three may itself be a descriptor of 0 to 2.
    let inherited = open_descriptors()?;
    let first_free = inherited.iter().max().copied().unwrap_or(2).max(2) + 1;
    for (target, stream) in (first_free..).zip(streams) {
        actions.add_dup2(stream.as_raw_fd(), target)?;
    }
    for (target, source) in (0..3).zip(first_free..) {
        actions.add_dup2(source, target)?;
        actions.add_close(source)?;
    }
    for descriptor in inherited {
        actions.add_close(descriptor)?;
    }
    Ok(())
}

/// Every descriptor above 2 that is open here. NVIDIA's daemon keeps what it inherits, so a caller's lock would stay
/// held and a caller's `$(…)` would hang.
fn open_descriptors() -> io::Result<Vec<i32>> {
    let numbers = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&number: &i32| number > 2);
    Ok(numbers.collect())
}
