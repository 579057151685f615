//! The ledger of suspended processes: one file for each, so that `status` shows them and `resume` finds them again. An
//! entry counts only while its process runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::Store;
use super::file::{LockFile, byte_of, read_regular_file, replace, unlink};
use crate::checkpoint::Suspended;
use crate::error::Error;
use crate::host::Host;
use crate::process;
use crate::record::{Belongs, Place, ProcessId};

/// Below the records. No daemon has such a name.
const DIRECTORY: &str = ".suspended";
/// The byte of the lock file that is held while the directory is written to.
const WRITING: i64 = 0;

/// The suspended processes of the caller's home.
pub struct Ledger<'h> {
    host: &'h Host,
    store: Store<'h>,
    directory: PathBuf,
    here: Place,
}

impl<'h> Ledger<'h> {
    /// The ledger of this home, which need not exist.
    pub fn of(host: &'h Host) -> Result<Self, Error> {
        let store = Store::of(host)?;
        let directory = store.base.join(DIRECTORY);
        Ok(Self {
            host,
            store,
            directory,
            here: process::place(host),
        })
    }

    /// The processes of this machine that run, the one that was suspended first at the front.
    pub fn list(&self) -> Vec<Suspended> {
        let entries = self.entries().into_iter().map(|(_, entry)| entry);
        let mut running: Vec<Suspended> = entries.filter(|entry| self.runs(entry)).collect();
        running.sort_by(|one, other| one.suspended_at.total_cmp(&other.suspended_at));
        running
    }

    /// What is remembered of a process.
    pub fn entry(&self, process: ProcessId) -> Option<Suspended> {
        let entry = self.read(&self.file(process))?;
        (entry.process == process && self.runs(&entry)).then_some(entry)
    }

    /// The files of processes that have certainly ended.
    pub fn ended(&self) -> Vec<PathBuf> {
        let ended = |entry: &Suspended| match entry.place.seen_from(&self.here) {
            Belongs::Here => !self.runs(entry),
            Belongs::OtherBoot => true,
            Belongs::OtherHost | Belongs::OtherPidNamespace => false,
        };
        let all = self.entries().into_iter();
        all.filter(|(_, entry)| ended(entry))
            .map(|(path, _)| path)
            .collect()
    }

    /// The right to change what is remembered of these processes. Waits for its present holder, and names it when the
    /// waiting was in vain.
    pub fn lock(&self, processes: &[ProcessId]) -> Result<LockedLedger<'_>, Error> {
        self.store.create_base()?;
        self.store.create_shared(&self.directory)?;
        let lock = self.store.open_lock(self.directory.join(".lock"))?;
        let name = |process: &ProcessId| byte_of(&self.file(*process));
        let mut bytes: Vec<i64> = processes.iter().map(name).collect();
        // In one order for everybody, so that no two wait for each other.
        bytes.sort_unstable();
        bytes.dedup();
        for byte in bytes {
            lock.acquire(byte)?;
        }
        Ok(LockedLedger { ledger: self, lock })
    }

    /// Every entry that we have written, with its file.
    fn entries(&self) -> Vec<(PathBuf, Suspended)> {
        if self.store.leads_astray(&self.directory) {
            return Vec::new();
        }
        let files = fs::read_dir(self.host.root.at(&self.directory));
        let names = files
            .into_iter()
            .flatten()
            .filter_map(|file| file.ok()?.file_name().into_string().ok())
            .filter(|name| name.ends_with(".json"));
        let entry = |name: String| Some((self.directory.join(&name), self.read(&name)?));
        names.filter_map(entry).collect()
    }

    /// The entry in a file, if we have written it, under this name.
    fn read(&self, name: &str) -> Option<Suspended> {
        if self.store.leads_astray(&self.directory) {
            return None;
        }
        let path = self.host.root.at(self.directory.join(name));
        let (content, owner) = read_regular_file(&path).ok()?;
        let entry = Suspended::from_json(&content).ok()?;
        let is_its_own = name == file(&entry.place, entry.process);
        (owner == self.host.uid && is_its_own).then_some(entry)
    }

    fn runs(&self, entry: &Suspended) -> bool {
        entry.place.seen_from(&self.here) == Belongs::Here
            && process::still_running(self.host, entry.process).is_some()
    }

    fn file(&self, process: ProcessId) -> String {
        file(&self.here, process)
    }
}

/// The file name of an entry. The boot is in it, since machines may share a home.
fn file(place: &Place, process: ProcessId) -> String {
    let boot = place.boot_id.as_deref().unwrap_or("boot");
    let boot = boot.split('-').next().unwrap_or_default();
    format!("{boot}-{}-{}.json", process.pid, process.start_ticks)
}

/// The right to change what is remembered of some processes.
pub struct LockedLedger<'l> {
    ledger: &'l Ledger<'l>,
    lock: LockFile<'l>,
}

impl LockedLedger<'_> {
    /// Where we are, as every entry of now must have it.
    pub fn here(&self) -> &Place {
        &self.ledger.here
    }

    /// What is remembered of a process now.
    pub fn entry(&self, process: ProcessId) -> Option<Suspended> {
        self.ledger.entry(process)
    }

    /// Remembers a process.
    pub fn put(&self, entry: &Suspended) -> Result<(), Error> {
        let file = self.ledger.file(entry.process);
        self.write("write", &file, |directory| {
            replace(directory, &file, 0o600, &entry.to_json())
        })
    }

    /// Forgets a process.
    pub fn remove(&self, process: ProcessId) -> Result<(), Error> {
        let file = self.ledger.file(process);
        self.write("remove", &file, |directory| unlink(&directory.join(&file)))
    }

    /// Removes an entry whose process has ended, by its file.
    pub fn forget(&self, ended: &Path) -> Result<(), Error> {
        let file = ended.file_name().unwrap_or_default().to_string_lossy();
        self.write("remove", &file, |directory| unlink(&directory.join(&*file)))
    }

    fn write(
        &self,
        doing: &'static str,
        file: &str,
        change: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<(), Error> {
        let ledger = self.ledger;
        self.lock.acquire(WRITING)?;
        let changed = change(&ledger.host.root.at(&ledger.directory));
        self.lock.release(WRITING);
        changed.map_err(|source| Error::File {
            doing,
            path: ledger.directory.join(file),
            source,
        })
    }
}
