//! Records on disk: `Store` reads, `Locked` writes. A record is written aside, synced and renamed, under a lock, and
//! there is no other way to write one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;

use crate::error::Error;
use crate::host::Host;
use crate::record::{DaemonName, DaemonRecord};
use crate::runtime_dir;

/// Below the home directory, as the Python command has it.
const BASE: &str = ".cache/unilab/cuda-mps";
const RECORD: &str = "daemon.json";
/// What `start` is about to do, in the form of a record whose process is that `start`. It stands until the record does.
const INTENT: &str = "starting.json";
/// Files that are being written have names that begin like this.
const ASIDE: &str = ".aside-";
/// The directory of records that were replaced, and how many of them are kept.
const QUARANTINE: &str = ".stale";
const QUARANTINED: usize = 8;
/// A record has less than 1 KiB.
const SIZE_LIMIT: u64 = 64 << 10;
/// How long we wait for another uni-cumps that works on the same daemon.
const LOCK_LIMIT: Duration = Duration::from_secs(20);

/// One name in the store.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// A record.
    Record(DaemonRecord),
    /// A `start` that has not finished, or never will.
    Intent(DaemonRecord),
    /// A record that cannot be read.
    Damaged {
        /// The daemon's name.
        name: DaemonName,
        /// The record's file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Entry {
    /// The name under which it stands.
    pub fn name(&self) -> &DaemonName {
        match self {
            Self::Record(record) | Self::Intent(record) => &record.name,
            Self::Damaged { name, .. } => name,
        }
    }

    /// The record, or the reason why there is none.
    pub fn into_record(self) -> Result<DaemonRecord, Error> {
        match self {
            Self::Record(record) => Ok(record),
            Self::Intent(intent) => Err(Error::NoRecord(intent.name)),
            Self::Damaged { name, path, reason } => {
                Err(Error::DamagedRecord { name, path, reason })
            }
        }
    }
}

/// The records of the caller's home.
pub struct Store<'h> {
    host: &'h Host,
    home: PathBuf,
    base: PathBuf,
}

impl<'h> Store<'h> {
    /// The store of this home, which need not exist.
    pub fn of(host: &'h Host) -> Result<Self, Error> {
        let home = runtime_dir::home(host)?;
        let base = home.join(BASE);
        Ok(Self { host, home, base })
    }

    /// The directory of one daemon's record.
    pub fn directory(&self, name: &DaemonName) -> PathBuf {
        self.base.join(name.as_str())
    }

    /// Every entry, by name. One that cannot be read is among them and hides no other.
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        let cannot_list = |source| Error::File {
            doing: "list the records in",
            path: self.base.clone(),
            source,
        };
        let directory = match fs::read_dir(self.host.root.at(&self.base)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            // A file stands where one of the directories above would be: then there are no records.
            Err(error)
                if error.kind() == io::ErrorKind::NotADirectory
                    && !self.host.root.at(&self.base).exists() =>
            {
                return Ok(Vec::new());
            }
            result => result.map_err(cannot_list)?,
        };
        let mut names = Vec::new();
        for entry in directory {
            let entry = entry.map_err(cannot_list)?;
            let name = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            // Python follows a link to a directory here, and so do we.
            if let Some(name) = name
                && entry.path().is_dir()
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names.iter().filter_map(|name| self.entry(name)).collect())
    }

    /// What the store has under `name`.
    pub fn entry(&self, name: &DaemonName) -> Option<Entry> {
        let read = |file: &str| {
            let path = self.directory(name).join(file);
            let (content, owner) = match read_regular_file(&self.host.root.at(&path)) {
                Ok(found) => found,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
                Err(error) => return Some(Err((path, error.to_string()))),
            };
            let record = DaemonRecord::from_json(name.clone(), &content);
            // Only we can have written what we have started. Another user's record is his, whoever wrote it down.
            let record = record.and_then(|record| {
                let forged = record.uid == self.host.uid && owner != record.uid;
                let reason = || {
                    format!(
                        "uid {owner} wrote it, and it tells of a daemon of uid {}",
                        record.uid
                    )
                };
                if forged { Err(reason()) } else { Ok(record) }
            });
            Some(record.map_err(|reason| (path, reason)))
        };
        let damaged = |(path, reason)| Entry::Damaged {
            name: name.clone(),
            path,
            reason,
        };
        match (read(RECORD), read(INTENT)) {
            (Some(record), _) => Some(record.map_or_else(damaged, Entry::Record)),
            (None, Some(intent)) => Some(intent.map_or_else(damaged, Entry::Intent)),
            (None, None) => None,
        }
    }

    /// The directories of replaced records, the oldest first.
    pub fn quarantined(&self) -> Vec<PathBuf> {
        let directory = self.base.join(QUARANTINE);
        if self.leads_astray(&directory) {
            return Vec::new();
        }
        let entries = fs::read_dir(self.host.root.at(&directory));
        let mut found: Vec<(u128, PathBuf)> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let name = entry.ok()?.file_name();
                let (_, milliseconds) = name.to_str()?.rsplit_once('-')?;
                Some((milliseconds.parse().ok()?, directory.join(&name)))
            })
            .collect();
        found.sort();
        found.into_iter().map(|(_, path)| path).collect()
    }

    /// Whether a replaced record's directory is ours and holds nothing else, so that it may go as a whole.
    pub fn is_removable(&self, quarantined: &Path) -> bool {
        let directory = self.host.root.at(quarantined);
        runtime_dir::holds_only(&directory, self.host.uid, &|path| {
            path == Path::new(RECORD) || path == Path::new(INTENT) || is_aside(path)
        })
    }

    /// The names of directories without a record, such as a writer leaves that was killed before its first file had its
    /// name.
    pub fn empty_names(&self) -> Vec<DaemonName> {
        let entries = fs::read_dir(self.host.root.at(&self.base));
        let mut names: Vec<DaemonName> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(|name| {
                let directory = self.host.root.at(self.directory(name));
                runtime_dir::holds_only(&directory, self.host.uid, &is_aside)
            })
            .collect();
        names.sort();
        names
    }

    /// The file with the locks of all records.
    pub fn lock_file(&self) -> PathBuf {
        self.base.join(".lock")
    }

    /// The lock under which one daemon's record may be changed. Waits for its present holder, and names it when the
    /// waiting was in vain.
    pub fn lock(&self, name: &DaemonName) -> Result<Locked<'_>, Error> {
        let directory = self.directory(name);
        self.create_base()?;
        if fs::symlink_metadata(self.host.root.at(&directory)).is_ok_and(|meta| meta.is_symlink()) {
            return Err(Error::UnsafeDirectory {
                path: directory,
                role: "a record directory",
                reason: "it is a symbolic link".to_owned(),
                remedy: "use the name of the directory that it points to".to_owned(),
            });
        }
        let path = self.lock_file();
        let file = self
            .open_lock(&self.host.root.at(&path))
            .map_err(|source| Error::File {
                doing: "open the lock file",
                path: path.clone(),
                source,
            })?;
        let locked = Locked {
            store: self,
            name: name.clone(),
            file,
            path,
        };
        locked.acquire(byte_of(name))?;
        Ok(locked)
    }
}

impl Store<'_> {
    /// Creates the home and the directories down to the records, as far as they are missing.
    fn create_base(&self) -> Result<(), Error> {
        create_private(&self.host.root.at(&self.home)).map_err(|source| Error::File {
            doing: "create the home",
            path: self.home.clone(),
            source,
        })?;
        let mut directory = self.home.clone();
        for part in Path::new(BASE) {
            directory.push(part);
            self.create_shared(&directory)?;
        }
        Ok(())
    }

    /// Creates one directory that all records share. A link is followed if it is ours.
    fn create_shared(&self, directory: &Path) -> Result<(), Error> {
        if self.leads_astray(directory) {
            return Err(Error::UnsafeDirectory {
                path: directory.to_owned(),
                role: "a record directory",
                reason: "it is a symbolic link that somebody else has made".to_owned(),
                remedy: "uni-cumps as that user, or with a HOME of your own".to_owned(),
            });
        }
        let path = self.host.root.at(directory);
        let created = match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
            Ok(()) => open_no_follow(&path).and_then(|new| self.give_to_owner_of_home(&new)),
        };
        created.map_err(|source| Error::File {
            doing: "create the record directory",
            path: directory.to_owned(),
            source,
        })
    }

    /// Whether a link stands there that somebody else has made. Root, with a user's HOME, must not go where that user
    /// sends it.
    fn leads_astray(&self, directory: &Path) -> bool {
        fs::symlink_metadata(self.host.root.at(directory))
            .is_ok_and(|meta| meta.is_symlink() && meta.uid() != self.host.uid && meta.uid() != 0)
    }

    fn open_lock(&self, path: &Path) -> io::Result<File> {
        let open = |create: bool| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(create)
                .mode(0o600)
                .custom_flags(OFlag::O_NOFOLLOW.bits())
                .open(path)
        };
        match open(true) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open(false),
            Err(error) => Err(error),
            Ok(file) => {
                self.give_to_owner_of_home(&file)?;
                Ok(file)
            }
        }
    }

    /// `sudo` may leave root with a user's HOME. What all records share there must stay the user's, or he could not
    /// start a daemon of his own any more, nor use his cache.
    fn give_to_owner_of_home(&self, new: &File) -> io::Result<()> {
        let home = fs::metadata(self.host.root.at(&self.home))?;
        if self.host.uid == 0 && home.uid() != 0 {
            std::os::unix::fs::fchown(new, Some(home.uid()), Some(home.gid()))?;
        }
        Ok(())
    }
}

fn open_no_follow(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY).bits())
        .open(path)
}

/// The byte of the lock file that stands for one daemon. Two names that share a byte only wait for each other once in
/// a while.
fn byte_of(name: &DaemonName) -> i64 {
    let hash = name
        .as_str()
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    1 + i64::try_from(hash >> 2).unwrap_or(0)
}

/// The byte that stands for the question which daemon serves which GPU.
const ALL: i64 = 0;

/// A file's content and its owner. Opens without following a link or waiting for the other end of a FIFO.
fn read_regular_file(path: &Path) -> io::Result<(Vec<u8>, u32)> {
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
    let mut content = Vec::new();
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

fn create_private(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(path)
}

/// The right to change one daemon's record.
///
/// The lock is a POSIX one: the kernel knows its holder's pid, it ends with the process, and neither a child nor a
/// daemon inherits it.
pub struct Locked<'s> {
    store: &'s Store<'s>,
    name: DaemonName,
    file: File,
    path: PathBuf,
}

impl Locked<'_> {
    fn set(&self, kind: i32, byte: i64) -> nix::Result<()> {
        fcntl(&self.file, FcntlArg::F_SETLK(&region(kind, byte))).map(drop)
    }

    fn acquire(&self, byte: i64) -> Result<(), Error> {
        let attempt = || match self.set(libc::F_WRLCK, byte) {
            Ok(()) => Some(Ok(())),
            Err(
                nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES | nix::errno::Errno::EINTR,
            ) => None,
            Err(errno) => Some(Err(Error::File {
                doing: "lock",
                path: self.path.clone(),
                source: errno.into(),
            })),
        };
        self.store
            .host
            .wait_for(LOCK_LIMIT, attempt)
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

    /// Holds the question "which daemon serves which GPU" as well, while `decide` answers it.
    pub fn with_all<T>(&self, decide: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.acquire(ALL)?;
        let decision = decide();
        // Unlocking what we hold cannot fail.
        let _ = self.set(libc::F_UNLCK, ALL);
        decision
    }

    /// Lets others work on this daemon while we only wait for its end.
    pub fn release(&self) {
        // Unlocking what we hold cannot fail.
        let _ = self.set(libc::F_UNLCK, byte_of(&self.name));
    }

    /// What the store has under our name now.
    pub fn entry(&self) -> Option<Entry> {
        self.store.entry(&self.name)
    }

    fn directory(&self) -> PathBuf {
        self.store.directory(&self.name)
    }

    fn failed(&self, doing: &'static str, file: &str) -> impl FnOnce(io::Error) -> Error {
        let path = self.directory().join(file);
        move |source| Error::File {
            doing,
            path,
            source,
        }
    }

    /// Writes the intent of a start.
    pub fn put_intent(&self, intent: &DaemonRecord) -> Result<(), Error> {
        self.write(INTENT, intent).map_err(|source| {
            // It may stand there and only not be safe on the disk: nothing was started, so it tells of nothing.
            let _ = self.unlink(INTENT);
            let _ = fs::remove_dir(self.store.host.root.at(self.directory()));
            self.failed("write", INTENT)(source)
        })
    }

    /// Writes the record, which replaces the intent.
    pub fn put(&self, record: &DaemonRecord) -> Result<(), Error> {
        self.write(RECORD, record)
            .map_err(self.failed("write", RECORD))?;
        self.unlink(INTENT)
    }

    fn write(&self, file: &str, record: &DaemonRecord) -> io::Result<()> {
        let directory = self.store.host.root.at(self.directory());
        create_private(&directory)?;
        sweep(&directory);
        let mut aside = tempfile::Builder::new()
            .prefix(ASIDE)
            .tempfile_in(&directory)?;
        aside.write_all(crate::ui::json_text(&record.to_json()).as_bytes())?;
        aside.as_file().sync_all()?;
        aside.persist(directory.join(file))?;
        File::open(&directory)?.sync_all()
    }

    fn unlink(&self, file: &'static str) -> Result<(), Error> {
        let path = self.store.host.root.at(self.directory().join(file));
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result.map_err(self.failed("remove", file)),
        }
    }

    /// Removes the record and the intent. A file of somebody else's in the directory stays, and with it the directory.
    pub fn remove(&self) -> Result<(), Error> {
        self.unlink(RECORD)?;
        self.unlink(INTENT)?;
        let directory = self.store.host.root.at(self.directory());
        sweep(&directory);
        let _ = fs::remove_dir(directory);
        Ok(())
    }

    /// Moves the whole record directory to `.stale/<name>-<milliseconds>`, as the Python command does. The oldest ones
    /// there make room.
    pub fn quarantine(&self) -> Result<(), Error> {
        let root = &self.store.host.root;
        let stale = self.store.base.join(QUARANTINE);
        let now = self.store.host.clock.now().duration_since(UNIX_EPOCH);
        let milliseconds = now.unwrap_or_default().as_millis();
        let target = stale.join(format!("{}-{milliseconds}", self.name));
        self.store.create_shared(&stale)?;
        fs::rename(root.at(self.directory()), root.at(target))
            .map_err(self.failed("move away", ""))?;
        let old = self.store.quarantined();
        for directory in &old[..old.len().saturating_sub(QUARANTINED)] {
            if self.store.is_removable(directory) {
                // Best effort: the new record is more important.
                let _ = runtime_dir::remove(self.store.host, directory);
            }
        }
        Ok(())
    }
}

fn is_aside(file: &Path) -> bool {
    file.as_os_str()
        .as_encoded_bytes()
        .starts_with(ASIDE.as_bytes())
}

/// Removes files that a killed writer has left. The caller holds the lock, so nobody is writing now.
fn sweep(directory: &Path) {
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

fn region(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}
