//! `start`: a control daemon of the user's own for one GPU, recorded once it answers.

use std::time::UNIX_EPOCH;

use crate::cli::StartArgs;
use crate::daemon::{self, State};
use crate::error::Error;
use crate::gpu::{ComputeMode, GpuUuid};
use crate::host::Host;
use crate::launch::{Launch, end_unannounced};
use crate::mps::{self, CONTROL, Control, Keeper, Socket};
use crate::nvidia_smi::{self, Discovery};
use crate::process::{self, Running};
use crate::record::{Belongs, DaemonName, DaemonRecord, Place, ProcessId};
use crate::runner::hold_signals;
use crate::runtime_dir::{self, Directories};
use crate::store::{Entry, Locked, Store};
use crate::topology::{self, Plan};
use crate::ui::Ui;

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StartArgs) -> Result<u8, Error> {
    let discovery = nvidia_smi::discover(host)?;
    let mask = host.env.visible_devices();
    let plan = topology::resolve(args.gpus.as_deref(), &discovery.gpus, mask.as_deref())
        .map_err(|error| discovery.explain(error))?;
    let name = match args.name.as_deref() {
        Some(name) if !name.is_empty() => name.parse()?,
        _ => DaemonName::for_gpu(&plan.gpu.uuid)?,
    };
    let (directories, path_notes) = runtime_dir::plan(
        host,
        &name,
        args.pipe_dir.as_deref(),
        args.log_dir.as_deref(),
    )?;
    let control = Control::find(host, &directories.pipe, &directories.log)
        .ok_or(Error::NoProgram(CONTROL))?;
    for note in path_notes
        .into_iter()
        .chain(gpu_notes(&discovery, &plan, mask.as_deref()))
        .chain(environment_notes(host, &directories))
        .chain(server_note(&control))
    {
        ui.note(note);
    }

    let store = Store::of(host)?;
    let locked = store.lock(&name)?;
    let start = Start {
        host,
        store: &store,
        locked: &locked,
        here: process::place(host),
        gpus: [plan.gpu.uuid.clone()],
        plan,
        name,
        directories: &directories,
        force: args.force,
    };
    let launch = Launch {
        host,
        control: &control,
        directories: &directories,
        gpus: &start.gpus,
    };
    // From here on we would leave something behind.
    let _held = hold_signals();
    let way = locked.with_all(|| start.prepare(ui))?;
    let record = match way {
        Way::Adopt(process) => {
            launch.answers()?;
            let record = start.adopt(ui, &process)?;
            if args.foreground {
                // It has another parent than us, and nobody can change that.
                return Err(Error::AlreadyLive {
                    name: record.name,
                    pid: process.id.pid,
                });
            }
            record
        }
        Way::Launch if args.foreground => {
            let finished = launch
                .foreground(|process| {
                    ui.json(&start.put(process)?.to_json());
                    locked.release();
                    Ok(())
                })
                .map_err(|failure| start.take_back(failure))?;
            start.forget_foreground()?;
            return Ok(finished.status.shell_code());
        }
        Way::Launch => launch
            .detached(|found| start.may_join(found), |process| start.put(process))
            .map_err(|failure| start.take_back(failure))?,
    };
    ui.json(&record.to_json());
    let name_option = match args.name {
        Some(_) => format!(" --name {}", record.name),
        None => String::new(),
    };
    ui.next_step(format!("eval \"$(uni-cumps env{name_option})\""));
    Ok(0)
}

/// What the caller should know about the GPU.
fn gpu_notes(discovery: &Discovery, plan: &Plan, mask: Option<&str>) -> Vec<String> {
    let mut notes = discovery.messages.clone();
    if discovery.compute_mode(&plan.gpu) == Some(&ComputeMode::Prohibited) {
        notes.push(format!(
            "GPU {} has compute mode Prohibited and takes no program; an administrator can change it: sudo nvidia-smi -i {} -c DEFAULT",
            plan.gpu, plan.gpu.index
        ));
    }
    if let Some(mask) = mask
        && !topology::visible(&discovery.gpus, Some(mask)).shows(&plan.gpu)
    {
        notes.push(format!(
            "CUDA_VISIBLE_DEVICES={mask:?} hides GPU {}; --gpus goes before it",
            plan.gpu
        ));
    }
    notes
}

/// The variables of the caller that the daemon does not get, since it would hand them to all its servers.
fn environment_notes(host: &Host, directories: &Directories) -> Vec<String> {
    let ours = [
        ("CUDA_MPS_PIPE_DIRECTORY", &directories.pipe),
        ("CUDA_MPS_LOG_DIRECTORY", &directories.log),
    ];
    let ambient = host.env.all().filter_map(|(key, value)| {
        let key = key.to_str().filter(|key| key.starts_with("CUDA_MPS_"))?;
        let same = ours
            .iter()
            .any(|(name, path)| *name == key && path.as_os_str() == value);
        (!same).then(|| format!("{key}={value:?} of your environment is not passed to the daemon"))
    });
    ambient.collect()
}

fn server_note(control: &Control<'_>) -> Option<String> {
    control.server_program().is_none().then(|| {
        "nvidia-cuda-mps-server was found neither on PATH nor beside the control program: programs will fail with CUDA error 805".to_owned()
    })
}

/// How the daemon comes about.
enum Way {
    /// It runs already, provably ours, and lacks only a record.
    Adopt(Running),
    /// It is launched.
    Launch,
}

struct Start<'s> {
    host: &'s Host,
    store: &'s Store<'s>,
    locked: &'s Locked<'s>,
    here: Place,
    plan: Plan,
    gpus: [GpuUuid; 1],
    name: DaemonName,
    directories: &'s Directories,
    force: bool,
}

impl Start<'_> {
    /// Refuses what must not be, before anything is touched, and then clears the way and writes the intent. The lock on
    /// all records is held, so that no other start decides about the same GPU meanwhile.
    fn prepare(&self, ui: &mut Ui<'_>) -> Result<Way, Error> {
        let entry = self.locked.entry();
        self.refuse_if_taken(entry.as_ref())?;
        match self.refuse_if_gpu_taken() {
            Err(taken @ Error::GpuTaken { .. }) if self.force => {
                ui.note(format!("{taken}: their servers take turns on it"));
            }
            result => result?,
        }
        let way = match self.left_by_interrupted_start(ui, entry.as_ref())? {
            Some(process) => Way::Adopt(process),
            None => self.way(mps::keeper(self.host, &self.directories.pipe))?,
        };
        self.refuse_if_blocked()?;
        for note in runtime_dir::create(self.host, self.directories)? {
            ui.note(note);
        }
        if matches!(entry, Some(Entry::Record(_) | Entry::Damaged { .. })) {
            self.locked.quarantine()?;
        }
        let us = i32::try_from(std::process::id()).unwrap_or_default();
        let launcher = process::running(self.host, us).map_or(
            ProcessId {
                pid: us,
                start_ticks: 0,
            },
            |running| running.id,
        );
        self.locked.put_intent(&self.record(launcher))?;
        Ok(way)
    }

    fn refuse_if_taken(&self, entry: Option<&Entry>) -> Result<(), Error> {
        let record = match entry {
            None | Some(Entry::Damaged { .. }) => return Ok(()),
            Some(Entry::Record(record) | Entry::Intent(record)) => record,
        };
        if record.uid != self.host.uid {
            return Err(daemon::other_user(self.host, record));
        }
        if matches!(entry, Some(Entry::Intent(_))) {
            return match record.belongs(&self.here) {
                // We hold the lock under which its start would work, so that start is over.
                Belongs::Here | Belongs::OtherBoot => Ok(()),
                Belongs::OtherPidNamespace => Err(Error::OtherPidNamespace(self.name.clone())),
                Belongs::OtherHost => Err(daemon::other_host(self.host, self.store, record)),
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
            State::OtherHost => Err(daemon::other_host(self.host, self.store, record)),
        }
    }

    /// Two servers on one GPU take turns on it, which is what MPS is there to avoid.
    fn refuse_if_gpu_taken(&self) -> Result<(), Error> {
        let (daemons, others) = daemon::observe_all(self.host, self.store)?;
        let recorded = daemons.iter().filter_map(|daemon| {
            let found = (&daemon.record, daemon.record.process.pid);
            daemon.state.runs().then_some(found)
        });
        let unfinished = others.iter().filter_map(|other| {
            let (intent, pid) = other.intent.as_ref()?;
            Some((intent, (*pid)?))
        });
        for (record, pid) in recorded.chain(unfinished) {
            if record.name != self.name && record.gpu_uuids.contains(&self.plan.gpu.uuid) {
                return Err(Error::GpuTaken {
                    gpu: self.plan.gpu.clone(),
                    by: record.name.clone(),
                    pid,
                });
            }
        }
        Ok(())
    }

    /// The daemon that an interrupted start of this name has launched, if it is the one that is wanted now. Any other is
    /// ended: nobody was told of it.
    fn left_by_interrupted_start(
        &self,
        ui: &mut Ui<'_>,
        entry: Option<&Entry>,
    ) -> Result<Option<Running>, Error> {
        let Some(Entry::Intent(intent)) = entry else {
            return Ok(None);
        };
        if intent.belongs(&self.here) != Belongs::Here {
            return Ok(None);
        }
        let keeper = daemon::settled_keeper(self.host, &intent.pipe_directory);
        let process = match keeper {
            Keeper::Process(process) if process.uid == self.host.uid => process,
            _ => return Ok(None),
        };
        if intent.pipe_directory == self.directories.pipe && self.serves_just_this_gpu(&process) {
            return Ok(Some(process));
        }
        end_unannounced(self.host, &process)?;
        ui.note(format!(
            "ended {}, which an interrupted start had left",
            process.id
        ));
        Ok(None)
    }

    /// What to do about the process that keeps our pipe directory. A daemon of this user in our own default directory
    /// has only lost its record; lock and socket have been seen to agree.
    fn way(&self, keeper: Keeper) -> Result<Way, Error> {
        match keeper {
            Keeper::Nobody => Ok(Way::Launch),
            Keeper::Process(process)
                if self.directories.pipe_is_our_own()
                    && process.uid == self.host.uid
                    && self.serves_just_this_gpu(&process) =>
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

    /// Whether a daemon that was faster than ours is one that an interrupted start of this name had launched.
    fn may_join(&self, process: &Running) -> bool {
        self.directories.pipe_is_our_own()
            && process.uid == self.host.uid
            && self.serves_just_this_gpu(process)
    }

    fn serves_just_this_gpu(&self, process: &Running) -> bool {
        let visible = process::variable_of(self.host, process.id.pid, "CUDA_VISIBLE_DEVICES");
        visible.as_deref() == Some(self.plan.gpu.uuid.as_str())
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

    fn record(&self, process: ProcessId) -> DaemonRecord {
        let now = self.host.clock.now().duration_since(UNIX_EPOCH);
        DaemonRecord {
            name: self.name.clone(),
            uid: self.host.uid,
            place: self.here.clone(),
            topology_mode: self.plan.mode,
            gpu_uuids: vec![self.plan.gpu.uuid.clone()],
            gpu_indices: vec![self.plan.gpu.index],
            pipe_directory: self.directories.pipe.clone(),
            log_directory: self.directories.log.clone(),
            process,
            created_at: now.unwrap_or_default().as_secs_f64(),
            unknown: serde_json::Map::new(),
        }
    }

    fn put(&self, process: &Running) -> Result<DaemonRecord, Error> {
        let record = self.record(process.id);
        self.locked.put(&record)?;
        Ok(record)
    }

    /// Records a daemon that runs already. Where it logs, only its own environment knows.
    fn adopt(&self, ui: &mut Ui<'_>, process: &Running) -> Result<DaemonRecord, Error> {
        let mut record = self.record(process.id);
        if let Some(log) = process::variable_of(self.host, process.id.pid, "CUDA_MPS_LOG_DIRECTORY")
        {
            record.log_directory = log.into();
        }
        self.locked.put(&record)?;
        ui.note(format!(
            "{} ran already in {:?} without a record; it is recorded again",
            process.id, record.pipe_directory
        ));
        Ok(record)
    }

    /// Takes the intent back after a failed launch. Where something is left running, the intent stays, so that the next
    /// command knows where to look.
    fn take_back(&self, failure: Error) -> Error {
        if !matches!(failure, Error::LeftRunning { .. }) {
            mps::clear(self.host, &self.directories.pipe);
            runtime_dir::remove_if_empty(self.host, &self.directories.pipe);
            // What is left of it is an intent without a daemon, which the next start overwrites.
            let _ = self.locked.remove();
        }
        failure
    }

    /// The foreground daemon has ended: its record goes, unless somebody has started another one meanwhile.
    fn forget_foreground(&self) -> Result<(), Error> {
        let locked = self.store.lock(&self.name)?;
        let Some(Entry::Record(record)) = locked.entry() else {
            return Ok(());
        };
        let daemon = daemon::observe(self.host, &self.here, record);
        if daemon.state.is_over() {
            daemon::forget(self.host, &locked, &daemon.record)?;
        }
        Ok(())
    }
}
