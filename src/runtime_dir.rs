//! Where a daemon's pipe and log directories lie, whose they are, and how long their paths may be. The directory's mode
//! is the only protection of a control daemon: its sockets are open to everybody, whatever the umask.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use nix::fcntl::{AT_FDCWD, AtFlags, OFlag};
use nix::sys::statfs::{self, FsType, fstatfs};
use nix::unistd::{AccessFlags, faccessat};
use tempfile::TempDir;

use crate::error::Error;
use crate::host::Host;
use crate::record::DaemonName;

/// The longest pipe directory, in bytes, with which a control daemon starts. One more, and it exits with 1 and no word:
/// `/control_privileged` then no longer fits a socket address. Measured with drivers 535, 550 and 555.
pub const PIPE_LIMIT: usize = 87;

/// The pipe directory that CUDA programs look at when nothing tells them another one.
pub const NVIDIA_DEFAULT: &str = "/tmp/nvidia-mps";

const PIPE: &str = "the pipe directory";
const LOG: &str = "the log directory";
const PARENT: &str = "the parent of runtime directories";

/// The two directories of a daemon, absolute and without links, before anything is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directories {
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`.
    pub log: PathBuf,
    /// The directory of ours that holds the default ones, where a default is used.
    pub own: Option<PathBuf>,
}

impl Directories {
    /// Whether the pipe directory is the default one, made by us for this daemon.
    pub fn pipe_is_our_own(&self) -> bool {
        self.own
            .as_ref()
            .is_some_and(|own| self.pipe.starts_with(own))
    }
}

/// Decides where the directories are and whether a daemon can work there, creating nothing. The notes are for the user.
pub fn plan(
    host: &Host,
    name: &DaemonName,
    pipe: Option<&Path>,
    log: Option<&Path>,
) -> Result<(Directories, Vec<String>), Error> {
    let mut notes = Vec::new();
    let own = match (pipe, log) {
        (Some(_), Some(_)) => None,
        _ => Some(default_parent(host, &mut notes)?.join(name.as_str())),
    };
    let place = |given: Option<&Path>, default: &str| match (given, &own) {
        (Some(path), _) => typed_path(host, path),
        (None, Some(own)) => Ok(own.join(default)),
        (None, None) => Ok(PathBuf::from(default)),
    };
    let directories = Directories {
        pipe: place(pipe, "pipe")?,
        log: place(log, "log")?,
        own: own.clone(),
    };
    for path in [&directories.pipe, &directories.log] {
        if path.to_str().is_none() {
            return Err(Error::NotUnicode(path.clone()));
        }
    }
    if directories.pipe == directories.log {
        return Err(Error::SameDirectories(directories.pipe));
    }
    if directories.log == directories.pipe.join("log") {
        return Err(Error::LogIsFifo(directories.log));
    }
    let length = directories.pipe.as_os_str().len();
    if length > PIPE_LIMIT {
        return Err(Error::PipeTooLong {
            length,
            limit: PIPE_LIMIT,
            shorter: PathBuf::from(format!("/tmp/mps-{}-{}/pipe", host.uid, short(name))),
            path: directories.pipe,
        });
    }
    if pipe.is_some_and(|path| path.is_relative() && !path.starts_with("~")) {
        notes.push(format!(
            "the pipe directory is {:?}, relative to the working directory",
            directories.pipe
        ));
    }
    if directories.pipe == Path::new(NVIDIA_DEFAULT) {
        notes.push(format!(
            "{NVIDIA_DEFAULT} is where every CUDA program of this machine looks: other people's programs will find this daemon"
        ));
    }
    Ok((directories, notes))
}

/// The pipe directory that a CUDA program with the caller's environment uses.
pub fn effective_pipe(host: &Host) -> PathBuf {
    match host.env.get_filled("CUDA_MPS_PIPE_DIRECTORY") {
        Some(path) => host.cwd.join(path),
        None => PathBuf::from(NVIDIA_DEFAULT),
    }
}

/// The names of directories where no control daemon is begin like this.
const NOWHERE: &str = "uni-cumps-nowhere-";

/// A new empty directory for us alone, where no control daemon is, in the first place that takes one. It goes when it is
/// dropped.
pub fn nowhere(host: &Host) -> Option<TempDir> {
    let tmp = temporary_directory(host, &mut Vec::new());
    let places = [tmp, "/tmp".into(), "/dev/shm".into()];
    let mut made = places.iter().filter_map(|place| {
        let mut builder = tempfile::Builder::new();
        builder
            .prefix(NOWHERE)
            .permissions(fs::Permissions::from_mode(0o700));
        builder.tempdir_in(host.root.at(place)).ok()
    });
    made.next()
}

/// Removes the directory of ours where no control daemon is, if that is what this process was given.
pub fn remove_nowhere(host: &Host) {
    let pipe = effective_pipe(host);
    let name = pipe.file_name().unwrap_or_default();
    if name.as_encoded_bytes().starts_with(NOWHERE.as_bytes()) {
        // Not empty, not ours, or gone: then it stays as it is.
        let _ = fs::remove_dir(host.root.at(&pipe));
    }
}

/// The name of the network file system that a directory lies on, if it does.
pub fn network_file_system_of(host: &Host, path: &Path) -> Option<&'static str> {
    network_file_system(&open_directory(host, path, PIPE).ok()?)
}

/// The first 16 letters of a name, for a hint.
fn short(name: &DaemonName) -> &str {
    let text = name.as_str();
    &text[..text.len().min(16)]
}

/// `$TMPDIR/uni-cumps`, or `$TMPDIR/uni-cumps-<uid>` where the former belongs to somebody else.
fn default_parent(host: &Host, notes: &mut Vec<String>) -> Result<PathBuf, Error> {
    let tmp = temporary_directory(host, notes);
    let shared = tmp.join("uni-cumps");
    match fs::symlink_metadata(host.root.at(&shared)) {
        Ok(meta) if !meta.is_dir() || meta.uid() != host.uid => {
            Ok(tmp.join(format!("uni-cumps-{}", host.uid)))
        }
        _ => Ok(shared),
    }
}

/// `TMPDIR` if it is a directory, else `/tmp`. Python's rule, said aloud.
fn temporary_directory(host: &Host, notes: &mut Vec<String>) -> PathBuf {
    if let Some(value) = host.env.get_filled("TMPDIR") {
        let path = normalised(host, &host.cwd.join(value));
        if host.root.at(&path).is_dir() {
            return path;
        }
        notes.push(format!("TMPDIR={value:?} is not a directory; using /tmp"));
    }
    PathBuf::from("/tmp")
}

/// A path as the user typed it: `~` and `~user` expanded, absolute, links of existing parts followed.
fn typed_path(host: &Host, path: &Path) -> Result<PathBuf, Error> {
    let bytes = path.as_os_str().as_bytes();
    let expanded = if bytes.first() == Some(&b'~') {
        let end = bytes
            .iter()
            .position(|byte| *byte == b'/')
            .unwrap_or(bytes.len());
        let rest = OsStr::from_bytes(bytes[end..].strip_prefix(b"/").unwrap_or(&[]));
        home_of(host, OsStr::from_bytes(&bytes[1..end]))?.join(rest)
    } else {
        host.cwd.join(path)
    };
    Ok(normalised(host, &expanded))
}

fn home_of(host: &Host, user: &OsStr) -> Result<PathBuf, Error> {
    if user.is_empty() {
        return home(host);
    }
    let user = user.to_string_lossy();
    let found = nix::unistd::User::from_name(&user).ok().flatten();
    found
        .map(|user| user.dir)
        .ok_or_else(|| Error::NoSuchUser(format!("~{user}")))
}

/// The caller's home: `HOME`, or the password database where the variable is unset or empty.
pub fn home(host: &Host) -> Result<PathBuf, Error> {
    if let Some(value) = host.env.get_filled("HOME") {
        let path = PathBuf::from(value);
        if path.is_absolute() {
            return Ok(path);
        }
        return Err(Error::NoHome {
            reason: format!("HOME={value:?} is not an absolute path"),
        });
    }
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(host.uid));
    match user.ok().flatten() {
        Some(user) if user.dir.is_absolute() => Ok(user.dir),
        _ => Err(Error::NoHome {
            reason: format!(
                "HOME is not set and uid {} has no entry in the password database",
                host.uid
            ),
        }),
    }
}

/// `path` without `.`, `..` and links, as far as it exists.
fn normalised(host: &Host, path: &Path) -> PathBuf {
    let mut result = PathBuf::from("/");
    let mut parts: Vec<std::ffi::OsString> = components(path);
    // As many links as the kernel would follow.
    let mut links = 0;
    while let Some(part) = parts.pop() {
        if part == ".." {
            result.pop();
            continue;
        }
        result.push(&part);
        if let Ok(target) = fs::read_link(host.root.at(&result))
            && links < 40
        {
            links += 1;
            result.pop();
            if target.is_absolute() {
                result = PathBuf::from("/");
            }
            parts.extend(components(&target));
        }
    }
    result
}

/// The parts of a path, last first.
fn components(path: &Path) -> Vec<std::ffi::OsString> {
    let mut parts: Vec<_> = path
        .components()
        .filter_map(|component| match component {
            Component::Normal(part) => Some(part.to_owned()),
            Component::ParentDir => Some(std::ffi::OsString::from_vec(b"..".to_vec())),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect();
    parts.reverse();
    parts
}

/// Creates what is missing, mode 0700, and checks the rest. Nothing that exists already is changed, except that our own
/// default directories are closed to others again. The notes are for the user.
pub fn create(host: &Host, directories: &Directories) -> Result<Vec<String>, Error> {
    let touches = true;
    Preparation { host, touches }.prepare(directories)
}

/// The checks of `create` alone.
pub fn check(host: &Host, directories: &Directories) -> Result<Vec<String>, Error> {
    let touches = false;
    Preparation { host, touches }.prepare(directories)
}

/// How directories are made ready.
struct Preparation<'h> {
    host: &'h Host,
    /// Otherwise they are only looked at, as far as they exist.
    touches: bool,
}

impl Preparation<'_> {
    fn prepare(&self, directories: &Directories) -> Result<Vec<String>, Error> {
        let host = self.host;
        let mut notes = Vec::new();
        if let Some(own) = &directories.own {
            let parent = own.parent().unwrap_or(own);
            if let Some((above, mode)) = replaceable_in(host, parent) {
                return Err(unsafe_directory(
                    parent,
                    PARENT,
                    format!("everybody may replace it, since {above:?} has mode {mode:04o}"),
                    format!(
                        "set TMPDIR to a directory of your own, or chmod +t {}",
                        crate::shell::quote_path(above)
                    ),
                ));
            }
            self.own_directory(parent, PARENT)?;
            self.own_directory(own, "a runtime directory")?;
        }
        for (path, role) in [(&directories.pipe, PIPE), (&directories.log, LOG)] {
            let is_ours = directories
                .own
                .as_ref()
                .is_some_and(|own| path.starts_with(own));
            if is_ours {
                self.own_directory(path, role)?;
            } else {
                notes.extend(self.given_directory(path, role)?);
            }
        }
        let existing = directories.pipe.ancestors();
        let mut existing = existing.skip_while(|path| !host.root.at(path).exists());
        if let Some(name) = existing
            .next()
            .and_then(|path| network_file_system_of(host, path))
        {
            return Err(unsafe_directory(
                &directories.pipe,
                PIPE,
                format!(
                    "it lies on {name}, and a socket there joins processes of one machine only"
                ),
                "choose a directory on a local file system with --pipe-dir",
            ));
        }
        Ok(notes)
    }

    /// Makes a directory, if that is our task; whether it is there then.
    fn make(&self, path: &Path, recursive: bool) -> Result<bool, Error> {
        let place = self.host.root.at(path);
        if !self.touches {
            return Ok(fs::symlink_metadata(place).is_ok());
        }
        match DirBuilder::new()
            .mode(0o700)
            .recursive(recursive)
            .create(place)
        {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(true),
            result => result
                .map(|()| true)
                .map_err(|source| cannot_create(path, source)),
        }
    }

    /// One of our default directories: made by us, mode 0700.
    fn own_directory(&self, path: &Path, role: &'static str) -> Result<(), Error> {
        if !self.make(path, false)? {
            return Ok(());
        }
        let (directory, mode) = owned_by_us(self.host, path, role)?;
        if mode & 0o077 != 0 && self.touches {
            directory
                .set_permissions(fs::Permissions::from_mode(0o700))
                .map_err(|source| cannot_create(path, source))?;
        }
        match role {
            PIPE | LOG => refuse_what_others_put(self.host, path, role),
            _ => Ok(()),
        }
    }

    /// A directory that the user named: created if it is missing, never changed if it exists.
    fn given_directory(&self, path: &Path, role: &'static str) -> Result<Option<String>, Error> {
        let host = self.host;
        if !self.make(path, true)? {
            return Ok(None);
        }
        let (_, mode) = owned_by_us(host, path, role)?;
        if mode & 0o022 != 0 {
            let remedy = match mode & 0o1000 {
                0 => format!("chmod 700 {}", crate::shell::quote_path(path)),
                // It is meant for everybody, as /tmp is.
                _ => format!(
                    "name a directory of your own: {}",
                    crate::shell::quote_path(&path.join("mps"))
                ),
            };
            return Err(unsafe_directory(
                path,
                role,
                format!("others may write to it (mode {:04o})", mode & 0o7777),
                remedy,
            ));
        }
        if let Some((parent, mode)) = replaceable_in(host, path) {
            return Err(unsafe_directory(
                path,
                role,
                format!("everybody may replace it, since {parent:?} has mode {mode:04o}"),
                format!("chmod o-w {}", crate::shell::quote_path(parent)),
            ));
        }
        // The control program would go on without its log, and say so in a line that nobody sees.
        let writable = AccessFlags::W_OK | AccessFlags::X_OK;
        let flags = AtFlags::AT_EACCESS;
        if let Err(errno) = faccessat(AT_FDCWD, &host.root.at(path), writable, flags) {
            return Err(unsafe_directory(
                path,
                role,
                format!(
                    "you cannot write to it: {} (mode {:04o})",
                    errno.desc(),
                    mode & 0o7777
                ),
                format!("chmod 700 {}", crate::shell::quote_path(path)),
            ));
        }
        let open_to_others = role == PIPE && mode & 0o011 != 0;
        Ok(open_to_others.then(|| {
            format!(
                "others can reach the daemon in {path:?} (mode {:04o}): chmod 700 {}",
                mode & 0o7777,
                crate::shell::quote_path(path)
            )
        }))
    }
}

fn unsafe_directory(
    path: &Path,
    role: &'static str,
    reason: impl Into<String>,
    remedy: impl Into<String>,
) -> Error {
    Error::UnsafeDirectory {
        path: path.to_owned(),
        role,
        reason: reason.into(),
        remedy: remedy.into(),
    }
}

fn cannot_create(path: &Path, source: io::Error) -> Error {
    Error::File {
        doing: "create the directory",
        path: path.to_owned(),
        source,
    }
}

/// Opens a directory without following a link in its last part.
fn open_directory(host: &Host, path: &Path, role: &'static str) -> Result<File, Error> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(host.root.at(path))
        .map_err(|source| match fs::symlink_metadata(host.root.at(path)) {
            Ok(meta) if !meta.is_dir() || meta.uid() != host.uid => unsafe_directory(
                path,
                role,
                format!("{}, owned by uid {}", kind(&meta), meta.uid()),
                "choose other directories with --pipe-dir and --log-dir",
            ),
            _ => Error::File {
                doing: "open the directory",
                path: path.to_owned(),
                source,
            },
        })
}

fn kind(meta: &fs::Metadata) -> &'static str {
    match meta.file_type() {
        kind if kind.is_dir() => "a directory",
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_file() => "a regular file",
        _ => "not a directory",
    }
}

fn owned_by_us(host: &Host, path: &Path, role: &'static str) -> Result<(File, u32), Error> {
    let directory = open_directory(host, path, role)?;
    let meta = directory
        .metadata()
        .map_err(|source| cannot_create(path, source))?;
    if meta.uid() != host.uid {
        return Err(unsafe_directory(
            path,
            role,
            format!(
                "it belongs to uid {}, and you are uid {}",
                meta.uid(),
                host.uid
            ),
            "choose other directories with --pipe-dir and --log-dir",
        ));
    }
    Ok((directory, meta.mode()))
}

/// Refuses a directory of ours in which something of somebody else's lies: it was open once, and the daemon would follow
/// a link there, or take a file for its own.
fn refuse_what_others_put(host: &Host, path: &Path, role: &'static str) -> Result<(), Error> {
    let entries = fs::read_dir(host.root.at(path)).map_err(|source| cannot_create(path, source))?;
    for entry in entries.flatten() {
        let file = path.join(entry.file_name());
        if let Ok(meta) = fs::symlink_metadata(host.root.at(&file))
            && meta.uid() != host.uid
        {
            return Err(unsafe_directory(
                path,
                role,
                format!("uid {} has put {:?} there", meta.uid(), entry.file_name()),
                format!("rm -r {}", crate::shell::quote_path(&file)),
            ));
        }
    }
    Ok(())
}

/// The directory above and its mode, if everybody may replace `path` in it.
fn replaceable_in<'p>(host: &Host, path: &'p Path) -> Option<(&'p Path, u32)> {
    let parent = path.parent()?;
    let mode = fs::metadata(host.root.at(parent)).ok()?.mode() & 0o7777;
    (mode & 0o1002 == 0o002).then_some((parent, mode))
}

/// The name of the network file system that a directory lies on. Numbers from `linux/magic.h` and Lustre's headers.
fn network_file_system(directory: &File) -> Option<&'static str> {
    let kind: FsType = fstatfs(directory).ok()?.filesystem_type();
    if kind == statfs::NFS_SUPER_MAGIC {
        return Some("NFS");
    }
    match kind.0 {
        0x517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x0bd0_0bd0 => Some("Lustre"),
        0x5346_414f | 0x6b41_4653 => Some("AFS"),
        0x00c3_6400 => Some("Ceph"),
        0x4750_4653 => Some("GPFS"),
        _ => None,
    }
}

/// The parents that our default directories may be in, under the present TMPDIR.
fn own_parents(host: &Host) -> [PathBuf; 2] {
    let tmp = temporary_directory(host, &mut Vec::new());
    [
        tmp.join("uni-cumps"),
        tmp.join(format!("uni-cumps-{}", host.uid)),
    ]
}

/// The default directories of daemons that this user has or had, by name.
pub fn own_directories(host: &Host) -> Vec<(DaemonName, PathBuf)> {
    let is_ours = |path: &Path| {
        fs::symlink_metadata(host.root.at(path))
            .is_ok_and(|meta| meta.is_dir() && meta.uid() == host.uid)
    };
    let mut found = Vec::new();
    for parent in own_parents(host) {
        if !is_ours(&parent) {
            continue;
        }
        for entry in fs::read_dir(host.root.at(&parent)).into_iter().flatten() {
            let name = entry
                .ok()
                .and_then(|entry| entry.file_name().into_string().ok());
            if let Some(name) = name
                && let Ok(daemon) = name.parse()
                && is_ours(&parent.join(&name))
            {
                found.push((daemon, parent.join(name)));
            }
        }
    }
    found.sort();
    found
}

/// The file in a log directory by which the programs of a node count themselves.
pub const PER_NODE: &str = ".per-node";

/// What a daemon and we make in a default directory.
const MADE: [&str; 10] = [
    "log",
    "log/.per-node",
    "log/control.log",
    "log/server.log",
    "pipe",
    "pipe/control",
    "pipe/control_lock",
    "pipe/control_privileged",
    "pipe/log",
    "pipe/nvidia-cuda-mps-control.pid",
];

/// Whether a default directory holds nothing but what a daemon makes, so that it may go as a whole.
pub fn is_removable(host: &Host, own: &Path) -> bool {
    holds_only(&host.root.at(own), host.uid, &|path| {
        path.to_str().is_some_and(|path| MADE.contains(&path))
    })
}

/// Whether `directory` and everything in it is this user's, and everything in it, by its path from there, is `known`.
/// A link is not followed: it is one more file.
pub fn holds_only(directory: &Path, uid: u32, known: &dyn Fn(&Path) -> bool) -> bool {
    fn ours(path: &Path, uid: u32) -> Option<fs::Metadata> {
        fs::symlink_metadata(path)
            .ok()
            .filter(|meta| meta.uid() == uid)
    }
    fn look(root: &Path, below: &Path, uid: u32, known: &dyn Fn(&Path) -> bool) -> bool {
        let Ok(mut entries) = fs::read_dir(root.join(below)) else {
            return false;
        };
        entries.all(|entry| {
            entry.is_ok_and(|entry| {
                let below = below.join(entry.file_name());
                let meta = ours(&root.join(&below), uid);
                known(&below)
                    && meta.is_some_and(|meta| !meta.is_dir() || look(root, &below, uid, known))
            })
        })
    }
    ours(directory, uid).is_some_and(|meta| meta.is_dir())
        && look(directory, Path::new(""), uid, known)
}

/// Removes a directory of ours that is removable, with all that is in it.
pub fn remove(host: &Host, directory: &Path) -> Result<(), Error> {
    fs::remove_dir_all(host.root.at(directory)).map_err(|source| Error::File {
        doing: "remove",
        path: directory.to_owned(),
        source,
    })
}

/// Removes the pipe directory of a daemon that is gone if it is one of our default ones and empty. The logs stay.
pub fn remove_if_empty(host: &Host, pipe: &Path) {
    let parent = pipe.ancestors().nth(2).and_then(Path::file_name);
    let is_default = pipe.ends_with("pipe")
        && parent.and_then(OsStr::to_str).is_some_and(|parent| {
            parent == "uni-cumps" || parent == format!("uni-cumps-{}", host.uid)
        });
    if is_default {
        // Not empty, not ours, or gone: then it stays as it is.
        let _ = fs::remove_dir(host.root.at(pipe));
    }
}
