//! Files of the store: read without being led astray, written aside and renamed, changed under a lock.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use serde_json::Value;

use crate::error::Error;
use crate::host::Host;
use crate::record::fnv;

/// Files that are being written have names that begin like this.
const ASIDE: &str = ".aside-";
/// A record has less than 1 KiB.
const SIZE_LIMIT: u64 = 64 << 10;
/// How long we wait for another uni-cumps that works on the same thing.
const LOCK_LIMIT: Duration = Duration::from_secs(20);

/// A file's content and its owner. Opens without following a link or waiting for the other end of a FIFO.
pub fn read_regular_file(path: &Path) -> io::Result<(Vec<u8>, u32)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
        .map_err(|error| describe_open_failure(path, error))?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if meta.len() > SIZE_LIMIT {
        return Err(io::Error::other(format!(
            "{} bytes are too many for a record",
            meta.len()
        )));
    }
    let mut content = Vec::with_capacity(4096);
    file.take(SIZE_LIMIT).read_to_end(&mut content)?;
    Ok((content, meta.uid()))
}

fn describe_open_failure(path: &Path, error: io::Error) -> io::Error {
    if error.raw_os_error() == Some(libc::ELOOP) {
        return io::Error::other("it is a symbolic link");
    }
    let denied = error.kind() == io::ErrorKind::PermissionDenied;
    let owner = path.parent().and_then(|parent| fs::metadata(parent).ok());
    match owner {
        Some(meta) if denied => io::Error::other(format!(
            "{error} (the directory belongs to uid {})",
            meta.uid()
        )),
        _ => error,
    }
}

/// Creates a directory, and those above it, for their owner alone.
pub(super) fn create_private(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(path)
}

/// Writes `content` into `directory/file` so that at any moment the old or the new one stands there, with the mode `mode`.
/// Nobody else writes to the directory meanwhile: the caller holds its lock, or is the only one.
pub fn replace(directory: &Path, file: &str, mode: u32, content: &Value) -> io::Result<()> {
    sweep(directory);
    let mut aside = tempfile::Builder::new()
        .prefix(ASIDE)
        .tempfile_in(directory)?;
    aside.write_all(crate::ui::json_text(content).as_bytes())?;
    aside
        .as_file()
        .set_permissions(fs::Permissions::from_mode(mode))?;
    aside.as_file().sync_all()?;
    // The new name is not waited for: the power cut that loses it ends the process that the file tells of as well.
    aside.persist(directory.join(file))?;
    Ok(())
}

pub(super) fn is_aside(file: &Path) -> bool {
    file.as_os_str()
        .as_encoded_bytes()
        .starts_with(ASIDE.as_bytes())
}

/// Removes files that a killed writer has left. The caller holds the lock, so nobody is writing now.
pub(super) fn sweep(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        if is_aside(Path::new(&entry.file_name())) {
            // Best effort: it is in nobody's way.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Removes a file, which need not be there.
pub(super) fn unlink(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// A file whose bytes stand for what may be changed by one process at a time.
///
/// The locks are POSIX ones: the kernel knows their holder's pid, they end with the process, and neither a child nor a
/// daemon inherits them.
pub struct LockFile<'h> {
    host: &'h Host,
    file: File,
    path: PathBuf,
}

impl<'h> LockFile<'h> {
    /// Opens the lock file. What was `created` must still be given to its owner.
    pub fn open(
        host: &'h Host,
        path: PathBuf,
        created: impl FnOnce(&File) -> io::Result<()>,
    ) -> Result<Self, Error> {
        let open = |create: bool| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(create)
                .mode(0o600)
                .custom_flags(OFlag::O_NOFOLLOW.bits())
                .open(host.root.at(&path))
        };
        let file = match open(true) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open(false),
            Err(error) => Err(error),
            Ok(file) => created(&file).map(|()| file),
        };
        match file {
            Ok(file) => Ok(Self { host, file, path }),
            Err(source) => Err(Error::File {
                doing: "open the lock file",
                path,
                source,
            }),
        }
    }

    fn set(&self, kind: i32, byte: i64) -> nix::Result<()> {
        fcntl(&self.file, FcntlArg::F_SETLK(&region(kind, byte))).map(drop)
    }

    /// Takes the lock on a byte. Waits for its present holder, and names it when the waiting was in vain.
    pub fn acquire(&self, byte: i64) -> Result<(), Error> {
        self.acquire_within(byte, LOCK_LIMIT)
    }

    /// Likewise for at most `limit`.
    pub fn acquire_within(&self, byte: i64, limit: Duration) -> Result<(), Error> {
        let attempt = || match self.set(libc::F_WRLCK, byte) {
            Ok(()) => Some(Ok(())),
            Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => None,
            Err(errno) => Some(Err(Error::File {
                doing: "lock",
                path: self.path.clone(),
                source: errno.into(),
            })),
        };
        self.host
            .wait_for(limit, attempt)
            .unwrap_or_else(|| Err(self.busy(byte)))
    }

    fn busy(&self, byte: i64) -> Error {
        let mut wanted = region(libc::F_WRLCK, byte);
        let asked = fcntl(&self.file, FcntlArg::F_GETLK(&mut wanted));
        let held = asked.is_ok() && wanted.l_type != libc::F_UNLCK as libc::c_short;
        Error::Busy {
            lock: self.path.clone(),
            pid: (held && wanted.l_pid > 0).then_some(wanted.l_pid),
        }
    }

    /// Gives the lock on a byte back.
    pub(super) fn release(&self, byte: i64) {
        // Unlocking what we hold cannot fail.
        let _ = self.set(libc::F_UNLCK, byte);
    }
}

/// The byte of a lock file that stands for a name. Two names that share a byte only wait for each other once in a while.
/// Byte 0 is nobody's.
pub fn byte_of(name: &str) -> i64 {
    1 + i64::try_from(fnv(name) >> 2).unwrap_or(0)
}

fn region(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}
