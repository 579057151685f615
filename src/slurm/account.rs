//! Calling ourselves as a job's user. Hooks are root's, and daemons are their users'.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::unistd::{Gid, Uid, User, initgroups, setgid, setgroups, setuid};

use crate::cli::AS_USER_COMMAND;
use crate::error::{Error, SlurmFailure};
use crate::host::Host;
use crate::runner::{Finished, Invocation, Mode, RunError};

/// How long one of our commands may take, those that wait for a daemon or for its clients among them.
const CALL_LIMIT: Duration = Duration::from_secs(60);

/// Variables of a hook that its daemons need.
const KEPT: [&str; 6] = [
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_VISIBLE_DEVICES",
    "TZ",
];

/// A user of this node, and where what is recorded for him lies.
pub(super) struct Account<'h> {
    host: &'h Host,
    uid: u32,
    gid: u32,
    home: PathBuf,
}

impl<'h> Account<'h> {
    /// The user `uid`, with a home of ours: his own may lie on a server that is away, and so may the database of users. Once
    /// the home is there, it says his group.
    pub(super) fn of(host: &'h Host, uid: u32, home: PathBuf) -> Result<Self, Error> {
        let of_home = fs::symlink_metadata(host.root.at(&home)).ok();
        let of_home = of_home
            .filter(|meta| meta.uid() == uid)
            .map(|meta| meta.gid());
        let of_database = || Some(User::from_uid(Uid::from_raw(uid)).ok()??.gid.as_raw());
        let gid = of_home.or_else(of_database);
        Ok(Self {
            host,
            uid,
            gid: gid.ok_or(SlurmFailure::NoUser(uid))?,
            home,
        })
    }

    /// Creates this user's home, which nobody else may enter.
    pub(super) fn create_home(&self) -> Result<(), Error> {
        let at = self.host.root.at(&self.home);
        let created = match DirBuilder::new().mode(0o700).create(&at) {
            // Left by a hook that was killed. Nobody but root can have put anything here.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && at.is_dir() => Ok(()),
            created => created,
        };
        created
            .and_then(|()| chown(&at, Some(self.uid), Some(self.gid)))
            .map_err(|source| Error::File {
                doing: "create",
                path: self.home.clone(),
                source,
            })
    }

    /// Calls one of our commands as this user.
    pub(super) fn call(&self, purpose: &'static str, words: &[&str]) -> Result<Finished, RunError> {
        let ids = [self.uid.to_string(), self.gid.to_string()];
        let args = [AS_USER_COMMAND, &ids[0], &ids[1], "--"];
        self.host.runner.run(&Invocation {
            purpose,
            program: self.host.ourselves.clone(),
            args: args.iter().chain(words).map(OsString::from).collect(),
            env: self.environment(),
            stdin: Vec::new(),
            mode: Mode::Captured(CALL_LIMIT),
        })
    }

    /// What the user may see of the administrator's environment.
    fn environment(&self) -> Vec<(OsString, OsString)> {
        let kept = KEPT.into_iter();
        let kept = kept.filter_map(|key| Some((key.into(), self.host.env.get(key)?.to_owned())));
        let path = self.host.env.search_path();
        kept.chain([
            ("HOME".into(), self.home.clone().into()),
            ("PATH".into(), path.to_owned()),
        ])
        .collect()
    }
}

/// Becomes a user and calls ourselves with these words; only a failure comes back. The binary is called by its open file:
/// its directories need not be the user's to enter.
pub fn become_user(uid: u32, gid: u32, words: &[OsString]) -> Error {
    let become_him = || -> nix::Result<()> {
        let group = Gid::from_raw(gid);
        // Where the database is away, he has one group.
        match User::from_uid(Uid::from_raw(uid)).ok().flatten() {
            Some(user) => {
                let name = std::ffi::CString::new(user.name).map_err(|_| nix::Error::EINVAL)?;
                initgroups(&name, group)?;
            }
            None => setgroups(&[group])?,
        }
        setgid(group)?;
        setuid(Uid::from_raw(uid))
    };
    let source = match become_him() {
        Err(errno) => errno.into(),
        Ok(()) => Command::new("/proc/self/exe")
            .arg0(crate::cli::PROGRAM)
            .args(words)
            .exec(),
    };
    SlurmFailure::NotBecome { uid, source }.into()
}
