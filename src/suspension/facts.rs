//! What can be known of processes and of the machine before a checkpoint or a restore. Changes nothing.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use super::{Destination, Order};
use crate::attachment;
use crate::checkpoint::{
    Call, Clientship, CudaState, DriverFacts, GpuMap, Halt, Machine, NamedPair, ProcessState,
    Purpose, Share, Subject,
};
use crate::daemon;
use crate::driver::{Caller, DriverFailure};
use crate::error::{CheckpointFailure, Error};
use crate::gpu::Gpu;
use crate::host::Host;
use crate::mps::{self, Control, Socket};
use crate::nvidia_smi::{self, App};
use crate::process;
use crate::runner::side_by_side;
use crate::runtime_dir;
use crate::store::{Ledger, Store};

/// How long the driver may take to tell a state, and a daemon its clients.
pub(super) const QUICK: Duration = Duration::from_secs(5);
/// How long CUDA may take to be initialised: without persistence mode some seconds for each GPU.
const INIT: Duration = Duration::from_secs(60);
/// `CUDA_ERROR_INVALID_VALUE`: about a process that runs, that it has nothing to do with CUDA.
const INVALID_VALUE: u32 = 1;

/// Gathers what is to be known about these processes.
pub(super) struct Gatherer<'h> {
    host: &'h Host,
    caller: &'h Caller<'h>,
    ledger: Option<&'h Ledger<'h>>,
    /// A question hung; the next would as well.
    has_hung: Cell<bool>,
}

impl<'h> Gatherer<'h> {
    pub(super) fn new(
        host: &'h Host,
        caller: &'h Caller<'h>,
        ledger: Option<&'h Ledger<'h>>,
    ) -> Self {
        Self {
            host,
            caller,
            ledger,
            has_hung: Cell::new(false),
        }
    }

    /// What the driver can do.
    fn driver(&self) -> Result<DriverFacts, Error> {
        match self.caller.ask(0, &Call::Version, QUICK) {
            // A driver counts in thousands.
            Ok(version) => Ok(DriverFacts::Able(
                i32::try_from(version).unwrap_or(i32::MAX),
            )),
            Err(DriverFailure::Interrupted(signal)) => Err(Error::Interrupted(signal)),
            Err(failure) => Ok(DriverFacts::Unable {
                reason: failure.to_string(),
                is_old: matches!(
                    failure,
                    DriverFailure::Outdated(_) | DriverFailure::TooOld(_)
                ),
            }),
        }
    }

    /// What is known of the processes, and what of the machine.
    pub(super) fn all(&self, order: &Order<'_>) -> Result<(Vec<Subject>, Machine), Error> {
        let driver = self.driver()?;
        let able = matches!(driver, DriverFacts::Able(_));
        let only_looks = order.purpose == Purpose::Look;
        let (apps, gpus) = match only_looks {
            true => Default::default(),
            false => {
                let (apps, gpus) = side_by_side(
                    || nvidia_smi::apps(self.host),
                    || nvidia_smi::conditions(self.host),
                );
                (apps?, gpus?)
            }
        };
        let pids = order.pids.iter();
        let mut subjects: Vec<Subject> = pids
            .map(|pid| self.subject(*pid, able, &apps))
            .collect::<Result<_, Error>>()?;
        self.send(&mut subjects, order.destination)?;
        if order.purpose.takes_away() {
            self.clients(&mut subjects)?;
        }
        let machine = Machine {
            driver,
            available_mib: self.available_mib(),
            gpus,
            no_init: None,
        };
        Ok((subjects, machine))
    }

    fn subject(&self, pid: i32, able: bool, apps: &[App]) -> Result<Subject, Error> {
        let host = self.host;
        let running = process::running(host, pid);
        let leader = process::leader_of(host, pid).filter(|leader| *leader != pid);
        let uid = running.map_or(0, |process| process.uid);
        let stopped = running.is_some_and(|process| process.stopped);
        let halt = match stopped {
            true => Some(Halt::Stopped),
            false => process::is_frozen(host, pid).then_some(Halt::Frozen),
        };
        let is_ours = process::may_trace(host, uid);
        let is_elsewhere = process::shares_namespace(host, pid, "pid") == Some(false);
        let may_be_asked = able
            && running.is_some()
            && leader.is_none()
            && halt.is_none()
            && is_ours
            && !is_elsewhere;
        let mine: Vec<&App> = apps.iter().filter(|app| app.pid == pid).collect();
        let mask = process::variable_of(host, pid, "CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let listed: Vec<Share> = mine
            .iter()
            .filter_map(|app| {
                Some(Share {
                    uuid: app.gpu.clone()?,
                    memory_mib: app.memory_mib,
                })
            })
            .collect();
        // A suspended process is not listed any more.
        let remembered = || Some(self.ledger?.entry(running?.id)?.gpus);
        Ok(Subject {
            pid,
            process: running.map(|process| process.id),
            program: process::program_name(host, pid).unwrap_or_default(),
            thread_of: leader,
            uid,
            is_ours,
            is_elsewhere,
            halt,
            cuda: match may_be_asked {
                true => self.state(pid)?,
                false => CudaState::NotAsked,
            },
            clientship: Clientship::None,
            has_mig: mine.iter().any(|app| app.gpu.is_none())
                || mask.to_ascii_uppercase().contains("MIG-"),
            shares: match listed.is_empty() {
                true => remembered().unwrap_or_default(),
                false => listed,
            },
            map: None,
            strays: None,
        })
    }

    /// The state of a process that uses CUDA. Some that do not have a state all the same, but no thread to restore them.
    fn state(&self, pid: i32) -> Result<CudaState, Error> {
        if self.has_hung.get() {
            let reason = "not asked, since it did not answer about another process";
            return Ok(CudaState::Unknown(reason.to_owned()));
        }
        let asked = self.caller.ask(pid, &Call::RestoreThread, QUICK);
        let asked = asked.and_then(|_| self.caller.ask(pid, &Call::State, QUICK));
        match asked {
            Ok(state) => Ok(CudaState::State(ProcessState(state))),
            Err(DriverFailure::Call {
                code: INVALID_VALUE,
                ..
            }) => Ok(CudaState::None),
            Err(DriverFailure::Interrupted(signal)) => Err(Error::Interrupted(signal)),
            Err(failure) => {
                self.has_hung
                    .set(matches!(failure, DriverFailure::TimedOut(_)));
                Ok(CudaState::Unknown(failure.to_string()))
            }
        }
    }

    /// The states of suspended processes, as far as the driver tells them.
    pub(super) fn states(&self, pids: &[i32]) -> Result<Vec<Option<ProcessState>>, Error> {
        let state = |pid: &i32| match self.state(*pid)? {
            CudaState::State(state) => Ok(Some(state)),
            _ => Ok(None),
        };
        pids.iter().map(state).collect()
    }

    /// Says of each process where its GPUs are to go.
    fn send(&self, subjects: &mut [Subject], destination: &Destination) -> Result<(), Error> {
        if matches!(destination, Destination::Back) {
            return Ok(());
        }
        let gpus = nvidia_smi::discover(self.host)?.gpus;
        for subject in subjects
            .iter_mut()
            .filter(|subject| subject.process.is_some())
        {
            send_one(subject, destination, &gpus)?;
        }
        Ok(())
    }

    /// Asks the daemons that the processes could have reached who their clients are.
    fn clients(&self, subjects: &mut [Subject]) -> Result<(), Error> {
        let host = self.host;
        let (daemons, _) = match Store::of(host) {
            Ok(store) => daemon::observe_all(host, &store)?,
            Err(_) => Default::default(),
        };
        let recorded = daemons
            .into_iter()
            .map(|daemon| daemon.record.pipe_directory);
        let own = |subject: &Subject| -> PathBuf {
            let named = process::variable_of(host, subject.pid, "CUDA_MPS_PIPE_DIRECTORY");
            let named = named.filter(|pipe| !pipe.is_empty());
            let named = named.unwrap_or_else(|| runtime_dir::NVIDIA_DEFAULT.to_owned());
            // The same path may be another directory to it, as with PrivateTmp= of systemd.
            match process::shares_namespace(host, subject.pid, "mnt") {
                Some(false) => format!("/proc/{}/root{named}", subject.pid).into(),
                _ => named.into(),
            }
        };
        let mut pipes: Vec<PathBuf> = recorded.chain(subjects.iter().map(own)).collect();
        pipes.push(runtime_dir::effective_pipe(host));
        pipes.sort();
        pipes.dedup();
        for pipe in pipes {
            let socket = mps::control_socket(host, &pipe);
            let answer = match socket {
                // What is closed to us is closed to a process of ours.
                Socket::Absent | Socket::Orphan | Socket::Hidden(_) | Socket::Other(_) => continue,
                _ => Control::find(host, &pipe, &pipe)
                    .map(|control| attachment::clients_of(&control, QUICK)),
            };
            match answer.map(mps::unless_interrupted).transpose()? {
                Some(Ok(clients)) => {
                    for subject in subjects.iter_mut() {
                        if let Some(client) =
                            clients.iter().find(|client| client.pid == subject.pid)
                        {
                            subject.clientship = Clientship::Of(client.server);
                        }
                    }
                }
                Some(Err(_)) | None => {
                    for subject in subjects.iter_mut().filter(|subject| own(subject) == pipe) {
                        subject.clientship = Clientship::Unknown(format!(
                            "the control daemon in {} does not say",
                            pipe.display()
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    fn available_mib(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.host.root.at("/proc/meminfo")).ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes / 1024)
    }

    /// Why CUDA cannot be initialised by us, which a restore needs.
    pub(super) fn no_init(&self, machine: &Machine) -> Result<Option<String>, Error> {
        if !matches!(machine.driver, DriverFacts::Able(_)) {
            return Ok(None);
        }
        match self.caller.ask(0, &Call::Init, INIT) {
            Err(DriverFailure::Interrupted(signal)) => Err(Error::Interrupted(signal)),
            asked => Ok(asked.err().map(|failure| failure.to_string())),
        }
    }
}

fn send_one(
    subject: &mut Subject,
    destination: &Destination,
    gpus: &[Gpu],
) -> Result<(), CheckpointFailure> {
    let pairs = match destination {
        Destination::Back => return Ok(()),
        Destination::Pairs(pairs) => pairs.clone(),
        Destination::To(gpu) => {
            let pair = match subject.shares.as_slice() {
                [share] => NamedPair::of(&share.uuid, *gpu),
                _ => None,
            };
            let Some(pair) = pair else {
                subject.strays = Some(subject.shares.len());
                return Ok(());
            };
            vec![pair]
        }
    };
    subject.map = GpuMap::complete(&pairs, gpus)?;
    Ok(())
}
