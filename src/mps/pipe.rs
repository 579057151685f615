//! What lies in a pipe directory: the socket, the lock, what a daemon leaves behind. And so, who the daemon is.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};

use crate::host::Host;
use crate::process::{self, Running};

/// What stands where the daemon's client socket belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Socket {
    /// Nothing.
    Absent,
    /// A socket that nobody listens on, left behind by a daemon that is gone.
    Orphan,
    /// A socket that takes connections. The pid is 0 for a process outside of our pid namespace, and `None` where the
    /// kernel did not say.
    Listening {
        /// The listener.
        pid: Option<i32>,
    },
    /// A FIFO, as stand-ins of the control program use.
    Fifo,
    /// Something else.
    Other(&'static str),
    /// It cannot be looked at.
    Hidden(String),
}

impl Socket {
    /// The socket's place in a sentence.
    pub fn describe(&self, path: &Path) -> String {
        match self {
            Self::Absent => format!("there is no {path:?}"),
            Self::Orphan => format!("nobody listens on {path:?}"),
            Self::Listening { pid: Some(0) } => {
                format!("a process of another pid namespace listens on {path:?}")
            }
            Self::Listening { pid: Some(pid) } => format!("pid {pid} listens on {path:?}"),
            Self::Listening { pid: None } => format!("{path:?} takes connections"),
            Self::Fifo => format!("{path:?} is a FIFO"),
            Self::Other(what) => format!("{path:?} is {what}"),
            Self::Hidden(reason) => format!("{path:?} cannot be looked at: {reason}"),
        }
    }
}

impl Socket {
    /// The kind as `control_pipes` reports it, if it takes connections.
    pub fn kind(&self) -> Option<&'static str> {
        match self {
            Self::Listening { .. } => Some("unix_socket"),
            Self::Fifo => Some("fifo"),
            Self::Absent | Self::Orphan | Self::Other(_) | Self::Hidden(_) => None,
        }
    }
}

/// The path of the client socket of the daemon in `pipe`.
pub fn control_path(pipe: &Path) -> PathBuf {
    pipe.join("control")
}

/// Looks at the daemon's client socket by connecting and leaving again, which costs the daemon two lines of log.
pub fn control_socket(host: &Host, pipe: &Path) -> Socket {
    let path = host.root.at(control_path(pipe));
    let kind = match fs::metadata(&path) {
        Ok(meta) => meta.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Socket::Absent,
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Socket::Absent,
        Err(error) => return Socket::Hidden(error.to_string()),
    };
    match kind {
        kind if kind.is_fifo() => return Socket::Fifo,
        kind if kind.is_dir() => return Socket::Other("a directory"),
        kind if kind.is_file() => return Socket::Other("a regular file"),
        kind if !kind.is_socket() => return Socket::Other("a device"),
        _ => {}
    }
    // NVIDIA's is a SEQPACKET socket; a stand-in may listen on a stream.
    let answer = match connect_to(&path, SockType::SeqPacket) {
        Err(Errno::EPROTOTYPE) => connect_to(&path, SockType::Stream),
        answer => answer,
    };
    match answer {
        Ok(pid) => Socket::Listening { pid: Some(pid) },
        // Its queue is full: somebody listens.
        Err(Errno::EAGAIN) => Socket::Listening { pid: None },
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Socket::Orphan,
        Err(errno) => Socket::Hidden(errno.desc().to_owned()),
    }
}

fn connect_to(path: &Path, kind: SockType) -> Result<i32, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, kind, flags, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(getsockopt(&socket, sockopt::PeerCredentials)?.pid())
}

/// Who holds the POSIX lock on `control_lock`, which a daemon takes first and keeps for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lock {
    Free,
    Held(i32),
    HeldElsewhere,
}

fn lock(host: &Host, pipe: &Path) -> Lock {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(host.root.at(pipe.join("control_lock")));
    let Ok(file) = opened else {
        return Lock::Free;
    };
    let mut wanted = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(&file, FcntlArg::F_GETLK(&mut wanted)) {
        Err(_) => Lock::Free,
        Ok(_) if wanted.l_type == libc::F_UNLCK as libc::c_short => Lock::Free,
        Ok(_) if wanted.l_pid > 0 => Lock::Held(wanted.l_pid),
        Ok(_) => Lock::HeldElsewhere,
    }
}

/// The process that is the daemon of a pipe directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// There is none.
    Nobody,
    /// This one.
    Process(Running),
    /// There is one, in another pid namespace or of a user whose processes we cannot see.
    Elsewhere,
    /// Lock and socket belong to two processes.
    Contradiction(String),
}

/// How long a process that ends may take to let go of its files.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Who is the daemon in `pipe`: the holder of its lock, or the listener on its socket where the lock file was removed.
pub fn keeper(host: &Host, pipe: &Path) -> Keeper {
    keeper_beside(host, pipe, &control_socket(host, pipe))
}

/// Likewise where the socket was looked at just before. Each look wakes the daemon.
pub fn keeper_beside(host: &Host, pipe: &Path, socket: &Socket) -> Keeper {
    let listener = match socket {
        Socket::Listening { pid } => *pid,
        _ => None,
    };
    let pid = match (lock(host, pipe), listener) {
        (Lock::HeldElsewhere, _) | (Lock::Free, Some(0)) => return Keeper::Elsewhere,
        (Lock::Free, None) => return Keeper::Nobody,
        (Lock::Held(holder), Some(listener)) if holder != listener => {
            return Keeper::Contradiction(format!(
                "pid {holder} holds its lock, and pid {listener} listens on its socket"
            ));
        }
        (Lock::Held(pid), _) | (Lock::Free, Some(pid)) => pid,
    };
    if let Some(process) = process::running(host, pid) {
        return Keeper::Process(process);
    }
    // While a process ends, its first thread may be a zombie before the others have let go of lock and socket.
    host.wait_for(END_LIMIT, || {
        let ending = process::is_zombie(host, pid) && lock(host, pipe) == Lock::Held(pid);
        (!ending).then_some(())
    });
    // Either it has ended between the two looks, or /proc hides other users' processes from us.
    let is_there = lock(host, pipe) != Lock::Free
        || matches!(control_socket(host, pipe), Socket::Listening { .. });
    match is_there {
        true => Keeper::Elsewhere,
        false => Keeper::Nobody,
    }
}

/// A control program of this user that was called for the pipe directory and may be about to become its daemon.
pub fn coming_up(host: &Host, pipe: &Path) -> Option<Running> {
    let pipe = pipe.to_str()?;
    let called = process::called_with(host, super::CONTROL, "CUDA_MPS_PIPE_DIRECTORY", pipe);
    called.into_iter().next()
}

/// Whether a control program of this user logs into `log`.
pub fn logs_into(host: &Host, log: &Path) -> bool {
    let called = |log| process::called_with(host, super::CONTROL, "CUDA_MPS_LOG_DIRECTORY", log);
    log.to_str().is_some_and(|log| !called(log).is_empty())
}

/// Whether a daemon, of whichever pid namespace, holds the lock.
pub(super) fn lock_is_held(host: &Host, pipe: &Path) -> bool {
    lock(host, pipe) != Lock::Free
}

/// The pid of the lock's holder, if it is of our pid namespace.
pub fn lock_holder(host: &Host, pipe: &Path) -> Option<i32> {
    match lock(host, pipe) {
        Lock::Held(pid) => Some(pid),
        Lock::Free | Lock::HeldElsewhere => None,
    }
}

/// Whether the socket through which a daemon takes `quit` is gone. Without it the control program asks through the
/// clients' socket, and is refused.
pub fn lacks_privileged_socket(host: &Host, pipe: &Path) -> bool {
    !host.root.at(pipe.join("control_privileged")).exists()
}

/// The process that the pid file names. A hint only: 535 writes none, and 550 writes over an older, longer one without
/// truncating it.
pub fn named_by_pid_file(host: &Host, pipe: &Path) -> Option<Running> {
    let file = host.root.at(pipe.join("nvidia-cuda-mps-control.pid"));
    let pid = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    process::running(host, pid).filter(|process| process.uid == host.uid)
}

/// Removes what NVIDIA's daemon leaves in its pipe directory. Only for a daemon that is gone: nothing happens while a
/// lock is held or somebody listens, and only files of the right kind go.
pub fn clear(host: &Host, pipe: &Path) {
    if keeper(host, pipe) != Keeper::Nobody {
        return;
    }
    for name in [
        "control",
        "control_privileged",
        "log",
        "nvidia-cuda-mps-control.pid",
        "control_lock",
    ] {
        let path = host.root.at(pipe.join(name));
        let is_leftover = fs::symlink_metadata(&path).is_ok_and(|meta| match name {
            "control" | "control_privileged" => meta.file_type().is_socket(),
            "log" => meta.file_type().is_fifo(),
            _ => meta.is_file(),
        });
        if is_leftover {
            // Best effort: a daemon starts over its own leftovers.
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::host;

    const PIPE: &str = "/pipe";

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("pipe")).unwrap();
        root
    }

    #[test]
    fn leftovers_go_and_what_is_not_one_stays() {
        let root = machine();
        let host = host(root.path(), Vec::new());
        let pipe = root.path().join("pipe");
        drop(std::os::unix::net::UnixListener::bind(pipe.join("control")).unwrap());
        fs::write(pipe.join("control_lock"), "").unwrap();
        fs::create_dir(pipe.join("log")).unwrap();
        fs::write(pipe.join("notes"), "").unwrap();
        assert_eq!(control_socket(&host, Path::new(PIPE)), Socket::Orphan);
        clear(&host, Path::new(PIPE));
        let mut left: Vec<_> = fs::read_dir(pipe)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["log", "notes"]);
    }

    #[test]
    fn nothing_is_cleared_while_somebody_listens() {
        let root = machine();
        let host = host(root.path(), Vec::new());
        let socket = root.path().join("pipe/control");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        clear(&host, Path::new(PIPE));
        assert!(socket.exists());
    }
}
