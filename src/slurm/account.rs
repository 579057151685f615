//! Calling ourselves as a job's user. Hooks are root's, and daemons are their users'.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::unistd::{Gid, Uid, User, initgroups, setgid, setgroups, setuid};

use crate::cli::AS_USER_COMMAND;
use crate::error::{Error, SlurmFailure};
use crate::host::{Host, USUAL_PATH};
use crate::runner::{Finished, Invocation, Mode, RunError};

/// A user of this node, and where what is recorded for him lies.
pub struct Account<'h> {
    host: &'h Host,
    uid: u32,
    gid: u32,
    home: PathBuf,
}

impl<'h> Account<'h> {
    /// The user `uid`, with a home of ours: his own may lie on a server that is away.
    pub(super) fn of(host: &'h Host, uid: u32, home: PathBuf) -> Result<Self, Error> {
        let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
        let user = user.ok_or(SlurmFailure::NoUser(uid))?;
        Ok(Self {
            host,
            uid,
            gid: user.gid.as_raw(),
            home,
        })
    }

    /// Creates a directory of this user's, which nobody else may enter.
    pub(super) fn create(&self, directory: &Path) -> Result<(), Error> {
        let at = self.host.root.at(directory);
        let created = match DirBuilder::new().mode(0o700).create(&at) {
            // Left by a hook that was killed. Nobody but root can have put anything here.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && at.is_dir() => Ok(()),
            created => created,
        };
        created
            .and_then(|()| chown(&at, Some(self.uid), Some(self.gid)))
            .map_err(|source| Error::File {
                doing: "create",
                path: directory.to_owned(),
                source,
            })
    }

    /// Calls one of our commands as this user.
    pub(super) fn call(
        &self,
        purpose: &'static str,
        words: &[&str],
        limit: Duration,
    ) -> Result<Finished, RunError> {
        let ids = [self.uid.to_string(), self.gid.to_string()];
        let args = [AS_USER_COMMAND, &ids[0], &ids[1], "--"];
        self.host.runner.run(&Invocation {
            purpose,
            program: self.host.ourselves.clone(),
            args: args.iter().chain(words).map(OsString::from).collect(),
            env: self.environment(),
            stdin: Vec::new(),
            mode: Mode::Captured(limit),
        })
    }

    /// The administrator's environment, without what is said of the job.
    fn environment(&self) -> Vec<(OsString, OsString)> {
        let replaced = |key: &str| {
            ["HOME", "PATH", "TMPDIR"].contains(&key)
                || key.starts_with("SLURM")
                || key.starts_with("CUDA_")
        };
        let kept = self.host.env.all();
        let kept = kept.filter(|(key, _)| !key.to_str().is_some_and(replaced));
        let path = self.host.env.get("PATH").unwrap_or(USUAL_PATH.as_ref());
        kept.map(|(key, value)| (key.clone(), value.clone()))
            .chain([
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
        match User::from_uid(Uid::from_raw(uid))? {
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
