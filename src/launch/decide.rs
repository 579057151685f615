//! Whether a daemon may be started, and how it comes about. Looks, and touches nothing.

use super::Wanted;
use crate::daemon::{self, State};
use crate::error::Error;
use crate::mps::{self, Keeper, Socket};
use crate::process::{self, Running};
use crate::record::Belongs;
use crate::store::{Entry, Store};

/// How the daemon comes about.
pub(super) enum Way {
    /// It runs already, provably ours, and lacks only a record.
    Adopt(Running),
    /// It is launched.
    Launch,
}

/// What is to be done for a start.
pub(super) struct Decision {
    /// How the daemon comes about, once nothing is left behind.
    pub(super) way: Way,
    /// A daemon that an interrupted start of this name has launched and that is not the one wanted now. It is ended
    /// first: nobody was told of it.
    pub(super) left_behind: Option<Running>,
    /// The objection that `--force` has overruled.
    pub(super) taken_all_the_same: Option<Error>,
}

impl Decision {
    /// Decides about what is wanted, with this entry under its name. What must not be is an error.
    pub(super) fn of(
        wanted: &Wanted<'_>,
        store: &Store<'_>,
        entry: Option<&Entry>,
    ) -> Result<Self, Error> {
        wanted.refuse_if_taken(store, entry)?;
        let taken_all_the_same = match wanted.refuse_if_gpu_taken(store) {
            Err(taken @ Error::GpuTaken { .. }) if wanted.force => Some(taken),
            result => result.map(|()| None)?,
        };
        let left = wanted.left_by_interrupted_start(entry);
        let (way, left_behind) = match left {
            Some(process) if wanted.is_wanted(entry, &process) => (Way::Adopt(process), None),
            Some(process) => (Way::Launch, Some(process)),
            None => (
                wanted.way(mps::keeper(wanted.host, &wanted.directories.pipe))?,
                None,
            ),
        };
        wanted.refuse_if_blocked()?;
        Ok(Self {
            way,
            left_behind,
            taken_all_the_same,
        })
    }
}

impl Wanted<'_> {
    fn refuse_if_taken(&self, store: &Store<'_>, entry: Option<&Entry>) -> Result<(), Error> {
        let record = match entry {
            None | Some(Entry::Damaged { .. }) => return Ok(()),
            Some(Entry::Record(record) | Entry::Intent(record)) => record,
        };
        if record.uid != self.host.uid {
            return Err(daemon::other_user(self.host, record));
        }
        if matches!(entry, Some(Entry::Intent(_))) {
            return match record.place.seen_from(&self.here) {
                // We hold the lock under which its start would work, so that start is over.
                Belongs::Here | Belongs::OtherBoot => Ok(()),
                Belongs::OtherPidNamespace => Err(Error::OtherPidNamespace(self.name.clone())),
                Belongs::OtherHost => Err(daemon::other_host(self.host, store, record)),
            };
        }
        let daemon = daemon::observe(self.host, &self.here, record.clone());
        match &daemon.state {
            State::Stale | State::OtherBoot => Ok(()),
            State::Live(process) | State::NotAnswering(process) => Err(Error::AlreadyLive {
                name: self.name.clone(),
                pid: process.id.pid,
            }),
            State::Unreachable(_) => Err(daemon::unreachable(&daemon)),
            State::OtherPidNamespace { .. } => Err(Error::OtherPidNamespace(self.name.clone())),
            State::OtherHost => Err(daemon::other_host(self.host, store, record)),
        }
    }

    /// Two servers on one GPU take turns on it, which is what MPS is there to avoid.
    fn refuse_if_gpu_taken(&self, store: &Store<'_>) -> Result<(), Error> {
        let (daemons, others) = daemon::observe_all(self.host, store)?;
        let recorded = daemons.iter().filter_map(|daemon| {
            let found = (&daemon.record, daemon.record.process.pid);
            daemon.state.runs().then_some(found)
        });
        let unfinished = others.iter().filter_map(|other| {
            let (intent, pid) = other.intent.as_ref()?;
            Some((intent, (*pid)?))
        });
        for (record, pid) in recorded.chain(unfinished) {
            let taken = self
                .plan
                .devices
                .iter()
                .find(|device| record.covers(device));
            if let Some(device) = taken.filter(|_| record.name != self.name) {
                return Err(Error::GpuTaken {
                    device: device.clone(),
                    by: record.name.clone(),
                    pid,
                });
            }
        }
        Ok(())
    }

    /// The daemon that an interrupted start of this name has launched.
    fn left_by_interrupted_start(&self, entry: Option<&Entry>) -> Option<Running> {
        let Some(Entry::Intent(intent)) = entry else {
            return None;
        };
        if intent.place.seen_from(&self.here) != Belongs::Here {
            return None;
        }
        match daemon::settled_keeper(self.host, &intent.pipe_directory) {
            Keeper::Process(process) if process.uid == self.host.uid => Some(process),
            _ => None,
        }
    }

    /// Whether what an intent has left is the daemon that is wanted now.
    fn is_wanted(&self, entry: Option<&Entry>, process: &Running) -> bool {
        let same_place = matches!(entry, Some(Entry::Intent(intent))
            if intent.pipe_directory == self.directories.pipe);
        same_place && self.serves_just_these_devices(process)
    }

    /// What to do about the process that keeps our pipe directory. A daemon of this user in our own default directory
    /// has only lost its record; lock and socket have been seen to agree.
    fn way(&self, keeper: Keeper) -> Result<Way, Error> {
        match keeper {
            Keeper::Nobody => Ok(Way::Launch),
            Keeper::Process(process)
                if self.directories.pipe_is_our_own()
                    && process.uid == self.host.uid
                    && self.serves_just_these_devices(&process) =>
            {
                Ok(Way::Adopt(process))
            }
            Keeper::Process(process) => Err(self.pipe_taken(format!(
                "pid {} of uid {} runs there without a record of yours",
                process.id.pid, process.uid
            ))),
            Keeper::Elsewhere => {
                Err(self.pipe_taken("its process is not visible from here".to_owned()))
            }
            Keeper::Contradiction(found) => Err(Error::Contradiction {
                pipe: self.directories.pipe.clone(),
                found,
            }),
        }
    }

    fn pipe_taken(&self, owner: String) -> Error {
        Error::PipeTaken {
            path: self.directories.pipe.clone(),
            owner,
        }
    }

    fn refuse_if_blocked(&self) -> Result<(), Error> {
        match mps::control_socket(self.host, &self.directories.pipe) {
            Socket::Other(what) => Err(Error::PipeBlocked {
                path: mps::control_path(&self.directories.pipe),
                what,
            }),
            _ => Ok(()),
        }
    }

    /// Whether a daemon that was faster than ours is one that an interrupted start of this name had launched.
    pub(super) fn may_join(&self, process: &Running) -> bool {
        self.directories.pipe_is_our_own()
            && process.uid == self.host.uid
            && self.serves_just_these_devices(process)
    }

    fn serves_just_these_devices(&self, process: &Running) -> bool {
        let visible = process::variable_of(self.host, process.id.pid, "CUDA_VISIBLE_DEVICES");
        visible == Some(self.plan.visible_devices())
    }
}
