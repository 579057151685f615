//! Records on disk: `Store` reads, `Locked` writes. A record is written aside, synced and renamed, under a lock, and
//! there is no other way to write one. The ledger of suspended processes lies beside them.

mod file;
mod ledger;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use nix::fcntl::OFlag;

use crate::error::Error;
use crate::host::Host;
use crate::record::{DaemonName, DaemonRecord};
use crate::runtime_dir;

use file::{create_private, is_aside, sweep};

pub use file::{LockFile, byte_of, read_regular_file, replace};
pub use ledger::{Ledger, LockedLedger};

/// Below the home directory, as the Python command has it.
const BASE: &str = ".cache/unilab/cuda-mps";
const RECORD: &str = "daemon.json";
/// What `start` is about to do, in the form of a record whose process is that `start`. It stands until the record does.
const INTENT: &str = "starting.json";
/// The directory of records that were replaced, and how many of them are kept.
const QUARANTINE: &str = ".stale";
const QUARANTINED: usize = 8;

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
            let is_directory = match entry.file_type() {
                Ok(kind) if !kind.is_symlink() => kind.is_dir(),
                _ => entry.path().is_dir(),
            };
            if let Some(name) = name
                && is_directory
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
        // Beside a record an intent says nothing any more.
        if let Some(record) = read(RECORD) {
            return Some(record.map_or_else(damaged, Entry::Record));
        }
        read(INTENT).map(|intent| intent.map_or_else(damaged, Entry::Intent))
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
        let lock = self.open_lock(self.lock_file())?;
        lock.acquire(byte_of(name.as_str()))?;
        Ok(Locked {
            store: self,
            name: name.clone(),
            lock,
        })
    }
}

impl<'h> Store<'h> {
    fn open_lock(&self, path: PathBuf) -> Result<LockFile<'h>, Error> {
        LockFile::open(self.host, path, |new| self.give_to_owner_of_home(new))
    }

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

/// The byte that stands for the question which daemon serves which GPU.
const ALL: i64 = 0;

/// The right to change one daemon's record.
pub struct Locked<'s> {
    store: &'s Store<'s>,
    name: DaemonName,
    lock: LockFile<'s>,
}

impl Locked<'_> {
    /// Holds the question "which daemon serves which GPU" as well, while `decide` answers it.
    pub fn with_all<T>(&self, decide: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        self.lock.acquire(ALL)?;
        let decision = decide();
        self.lock.release(ALL);
        decision
    }

    /// Lets others work on this daemon while we only wait for its end.
    pub fn release(&self) {
        self.lock.release(byte_of(self.name.as_str()));
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
        replace(&directory, file, 0o600, &record.to_json())
    }

    fn unlink(&self, file: &'static str) -> Result<(), Error> {
        let path = self.store.host.root.at(self.directory().join(file));
        file::unlink(&path).map_err(self.failed("remove", file))
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
