//! Claims on GPUs for the CPU plan: a lock file for each client of a GPU, so that two of them do not take the same cores. A
//! lock is the kernel's and goes with its last holder, however that ends; the file stays, since whoever has it open
//! would otherwise lock another one than a newcomer.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::libc;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::{Errno, FdFlags, fcntl_setfd};

use crate::gpu::PciAddress;
use crate::host::{Host, is_still_at};

/// Where every user's clients find the same files: not in TMPDIR. What /run/lock holds is not cleaned up by age, as the
/// files in /tmp may be (tmpfiles.d(5)).
const PLACES: [&str; 2] = ["/run/lock/uni-cumps", "/tmp/uni-cumps-locks"];

/// How many clients of one GPU are told apart. MPS takes 60 at the most.
const SLOTS: usize = 64;

/// Why a GPU cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Others hold every lock of the GPU.
    #[error("GPU {address} is claimed by others (its lock is {path:?})")]
    Held {
        /// The GPU.
        address: PciAddress,
        /// The last lock that was tried.
        path: PathBuf,
    },
    /// A lock file cannot be used.
    #[error("GPU {address} cannot be claimed: {path:?}: {reason}")]
    Unusable {
        /// The GPU.
        address: PciAddress,
        /// The lock file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// There is no place for lock files.
    #[error("there is no directory for the locks of GPUs: neither {} can be used", PLACES.join(" nor "))]
    NoPlace,
}

/// The lock files of this machine's GPUs.
pub struct Locks<'h> {
    host: &'h Host,
    names: Names,
}

enum Names {
    /// `<directory>/<address>.<slot>.lock`
    Slots(PathBuf),
    /// `<prefix>-<address>.lock`: one client a GPU, as other programs do it.
    Single(PathBuf),
}

/// A GPU's lock, held as long as this or a process that inherits it exists.
#[derive(Debug)]
pub struct Claim {
    /// How many clients of the GPU were there before: the number of the lock.
    pub slot: usize,
    file: File,
}

/// A lock that somebody holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The number of the lock.
    pub slot: usize,
    /// Who took it, where the kernel says so. It may have gone and left it to a child.
    pub pid: Option<i32>,
}

impl<'h> Locks<'h> {
    /// The lock files where they are usually, or those that begin with `prefix`. Creates nothing.
    pub fn of(host: &'h Host, prefix: Option<&Path>) -> Self {
        let names = match prefix {
            Some(prefix) => Names::Single(host.cwd.join(prefix)),
            None => {
                let is_there = |place: &&&str| is_shared(&host.root.at(place));
                let place = PLACES.iter().find(is_there).unwrap_or(&PLACES[0]);
                Names::Slots(PathBuf::from(place))
            }
        };
        Self { host, names }
    }

    /// Claims each of these GPUs once, or none of them. They are claimed in the order of their addresses, so that of two
    /// who claim the same GPUs at the same time one gets them.
    pub fn claim(
        &mut self,
        addresses: &[PciAddress],
    ) -> Result<BTreeMap<PciAddress, Claim>, ClaimError> {
        self.make_place()?;
        let distinct: BTreeSet<&PciAddress> = addresses.iter().collect();
        distinct
            .into_iter()
            .map(|address| Ok((*address, self.claim_one(address)?)))
            .collect()
    }

    /// Who has claimed a GPU, by slot.
    pub fn holders(&self, address: &PciAddress) -> Vec<Holder> {
        let held = fs::read_to_string(self.host.root.at("/proc/locks")).unwrap_or_default();
        self.files(address)
            .enumerate()
            .filter_map(|(slot, path)| {
                let meta = fs::symlink_metadata(self.host.root.at(path)).ok()?;
                let pid = flock_holder(&held, meta.dev(), meta.ino())?;
                Some(Holder { slot, pid })
            })
            .collect()
    }

    fn files(&self, address: &PciAddress) -> impl Iterator<Item = PathBuf> {
        let (slots, directory, prefix) = match &self.names {
            Names::Slots(directory) => (SLOTS, directory.clone(), None),
            Names::Single(prefix) => (1, PathBuf::new(), Some(prefix.clone())),
        };
        let address = address.to_string();
        (0..slots).map(move |slot| match &prefix {
            None => directory.join(format!("{address}.{slot}.lock")),
            Some(prefix) => {
                let mut path = prefix.clone().into_os_string();
                path.push(format!("-{address}.lock"));
                path.into()
            }
        })
    }

    fn make_place(&mut self) -> Result<(), ClaimError> {
        let Names::Slots(directory) = &mut self.names else {
            return Ok(());
        };
        // One that is there already is everybody's: the first user may have been unable to make the better one.
        let at = |place: &&&str| self.host.root.at(place);
        let there = PLACES.iter().find(|place| is_shared(&at(place)));
        let place = there.or_else(|| PLACES.iter().find(|place| is_open_to_all(&at(place))));
        let place = place.ok_or(ClaimError::NoPlace)?;
        if self.host.uid == 0 {
            take_over(&at(&place)).map_err(|_| ClaimError::NoPlace)?;
        }
        *directory = PathBuf::from(place);
        Ok(())
    }

    fn claim_one(&self, address: &PciAddress) -> Result<Claim, ClaimError> {
        let mut last = PathBuf::new();
        for (slot, path) in self.files(address).enumerate() {
            match lock(&self.host.root.at(&path)) {
                Ok(Some(file)) => return Ok(Claim { slot, file }),
                Ok(None) => last = path,
                Err(error) => {
                    return Err(ClaimError::Unusable {
                        address: *address,
                        path,
                        reason: error.to_string(),
                    });
                }
            }
        }
        Err(ClaimError::Held {
            address: *address,
            path: last,
        })
    }
}

impl Claim {
    /// Lets a program that takes our place, or that we start, hold the lock as well. What that leaves running in the
    /// background goes on holding it.
    pub fn hand_on(&self) -> io::Result<()> {
        Ok(fcntl_setfd(&self.file, FdFlags::empty())?)
    }
}

/// Whether a directory is there, made if it was missing, in which everybody may keep files of his own.
fn is_open_to_all(place: &Path) -> bool {
    if fs::symlink_metadata(place).is_err() {
        // Somebody else may be faster, and then it is his.
        let _ = make_shared(place);
    }
    is_shared(place)
}

/// Makes the directory aside, since the umask narrows a new one: of clients that start at once, one would find it closed
/// and go elsewhere.
fn make_shared(place: &Path) -> io::Result<()> {
    let parent = place.parent().unwrap_or(place);
    let aside = tempfile::Builder::new()
        .prefix(".uni-cumps-")
        .tempdir_in(parent)?;
    fs::set_permissions(aside.path(), fs::Permissions::from_mode(0o1777))?;
    // One that is there stays, also while it is still empty: somebody may be about to make his lock in it.
    match renameat_with(CWD, aside.path(), CWD, place, RenameFlags::NOREPLACE) {
        // A file system that cannot do it.
        Err(Errno::INVAL | Errno::NOSYS) => fs::rename(aside.path(), place)?,
        renamed => renamed?,
    }
    let _ = aside.keep();
    Ok(())
}

/// Makes root the owner of the directory: the sticky bit does not keep an owner from replacing root's files, nor from
/// putting a link in the place of the directory.
fn take_over(place: &Path) -> io::Result<()> {
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(place)?;
    match directory.metadata()?.uid() {
        0 => Ok(()),
        _ => std::os::unix::fs::fchown(&directory, Some(0), Some(0)),
    }
}

/// Whether everybody may keep files of his own in this directory, which nobody else can remove.
fn is_shared(place: &Path) -> bool {
    fs::symlink_metadata(place)
        .is_ok_and(|meta| meta.is_dir() && meta.permissions().mode() & 0o1002 == 0o1002)
}

/// Takes the lock of a file that nobody else has taken; `None` if somebody has.
fn lock(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        if is_still_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Opens a lock file, made if it was missing, without following a link or waiting for a FIFO. For another user's file in a
/// directory with the sticky bit, asking to create it would be refused (proc(5), protected_regular), and a lock needs
/// no right to write.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let created = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .custom_flags(flags.bits())
        .open(path);
    match created {
        Ok(file) => {
            // The umask has narrowed it, and everybody's clients must be able to lock it.
            file.set_permissions(fs::Permissions::from_mode(0o644))?;
            Ok(file)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits())
            .open(path),
        Err(error) => Err(error),
    }
}

/// Whether `/proc/locks` lists a flock(2) lock on this file, and who took it.
fn flock_holder(locks: &str, device: u64, inode: u64) -> Option<Option<i32>> {
    let file = format!(
        "{:02x}:{:02x}:{inode}",
        libc::major(device),
        libc::minor(device)
    );
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        // A waiting lock has an arrow in front of its kind.
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid = words.nth(2)?;
        (words.next()? == file).then(|| pid.parse().ok().filter(|pid| *pid > 0))
    })
}
