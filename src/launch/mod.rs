//! Starting a daemon of the user's own: what is wanted (`wanted`), whether and how it may be (`decide`), whether its GPUs are
//! to be exclusive (`exclusive`), and bringing it up until it is recorded (`bring_up`).

mod bring_up;
mod decide;
mod exclusive;
mod wanted;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::compute_mode;
use crate::daemon::{self, State};
use crate::error::Error;
use crate::gpu::{ComputeMode, Device, GpuUuid};
use crate::host::Host;
use crate::limits::{Change, DaemonLimits};
use crate::mps::{self, Control, Scope};
use crate::nvidia_smi;
use crate::process::{self, Running};
use crate::record::{DaemonName, DaemonRecord, Place, ProcessId, TopologyMode};
use crate::runner::{Finished, hold_signals};
use crate::runtime_dir::{self, Directories};
use crate::server_limits;
use crate::store::{Entry, Locked, Store};
use crate::topology::Plan;
use crate::ui::Ui;
use bring_up::Launch;
pub use bring_up::end_unannounced;
use decide::{Decision, Way};
pub use wanted::{Part, Request};

/// The compute mode of each GPU before it was made exclusive.
type ModesBefore = BTreeMap<GpuUuid, String>;

/// A daemon that is to be. Nothing has been touched for it yet.
pub struct Wanted<'h> {
    host: &'h Host,
    plan: Plan,
    name: DaemonName,
    directories: Directories,
    control: Control<'h>,
    here: Place,
    limits: Vec<Change>,
    force: bool,
    exclusive: bool,
    /// The compute modes that are to be changed, as they are now.
    compute_modes: ModesBefore,
    /// The GPUs that are to be exclusive and are not yet.
    shared: Vec<GpuUuid>,
    /// The directories that were asked for, with their options.
    places: Vec<(&'static str, PathBuf)>,
    notes: Vec<String>,
}

impl<'h> Wanted<'h> {
    /// Whether it is one of several daemons that were asked for together, be it the only one.
    pub fn is_one_of_several(&self) -> bool {
        self.plan.mode == TopologyMode::TaskPerGpu
    }

    /// Its name.
    pub fn name(&self) -> &DaemonName {
        &self.name
    }

    /// The limits that were asked for.
    pub fn limits(&self) -> DaemonLimits {
        let mut limits = DaemonLimits::default();
        for change in &self.limits {
            limits.take_over(change);
        }
        limits
    }

    /// What was asked for and does not hold for the daemon that is there. One that came up since we looked at the GPUs may
    /// have made them exclusive.
    pub fn unlike(&self, record: &DaemonRecord, is_new: bool) -> Vec<String> {
        let name = &record.name;
        let mut notes = Vec::new();
        let limits = self.limits();
        if !limits.is_empty() && limits != record.limits {
            notes.push(format!(
                "its limits stay as they are; to set them: uni-cumps limits --name {name} --set …"
            ));
        }
        let is_made_exclusive =
            |gpu: &&GpuUuid| is_new && record.compute_modes_before.contains_key(*gpu);
        for gpu in self.shared.iter().filter(|gpu| !is_made_exclusive(gpu)) {
            notes.push(format!(
                "its GPU {gpu} is not exclusive and stays so; to have it exclusive: uni-cumps stop --name {name}, and the same start again"
            ));
        }
        for (option, asked) in &self.places {
            let path = match *option {
                "--log-dir" => &record.log_directory,
                _ => &record.pipe_directory,
            };
            if asked != path {
                notes.push(format!(
                    "{option} {asked:?} has no effect on it: it works in {path:?}; to move it: uni-cumps stop --name {name}, and the same start again"
                ));
            }
        }
        notes
    }

    /// The daemon, if it is there already and answers. For a single GPU that is no success, as the Python command
    /// has it.
    pub fn is_there(&self) -> Result<Option<DaemonRecord>, Error> {
        if self.plan.mode == TopologyMode::SingleGpu {
            return Ok(None);
        }
        let store = Store::of(self.host)?;
        let Some(Entry::Record(record)) = store.entry(&self.name) else {
            return Ok(None);
        };
        let wanted = self.plan.devices.iter().all(|device| record.covers(device))
            && record.gpu_uuids.len() == self.plan.devices.len();
        let is_ours = record.uid == self.host.uid && wanted;
        let daemon = daemon::observe(self.host, &self.here, record);
        let is_live = matches!(daemon.state, State::Live(_));
        Ok((is_ours && is_live).then_some(daemon.record))
    }

    /// Starts the daemon and returns its record. It answers by then.
    pub fn start(&self, ui: &mut Ui<'_>) -> Result<DaemonRecord, Error> {
        let store = Store::of(self.host)?;
        let locked = self.lock(ui, &store)?;
        // From here on we would leave something behind.
        let _held = hold_signals();
        let (way, modes) = self.prepare(ui, &store, &locked)?;
        match way {
            Way::Adopt(process) => self.adopt(ui, &locked, &process, &modes),
            Way::Launch => ui
                .waiting("waiting for the daemon's first answer", || {
                    let put = |process: &Running| {
                        self.limit()?;
                        self.put(&locked, process, &modes)
                    };
                    self.launch(&self.plan.visible_devices())
                        .detached(|found| self.may_join(found), put)
                })
                .map_err(|failure| self.take_back(ui, &locked, &modes, failure)),
        }
    }

    /// Runs the daemon until it ends. Its record is handed to `ready` as soon as it answers.
    pub fn foreground(
        &self,
        ui: &mut Ui<'_>,
        ready: impl FnOnce(&mut Ui<'_>, &DaemonRecord),
    ) -> Result<Finished, Error> {
        let store = Store::of(self.host)?;
        let locked = self.lock(ui, &store)?;
        let _held = hold_signals();
        let (way, modes) = self.prepare(ui, &store, &locked)?;
        if let Way::Adopt(process) = way {
            // It has another parent than us, and nobody can change that.
            let record = self.adopt(ui, &locked, &process, &modes)?;
            return Err(Error::AlreadyLive {
                name: record.name,
                pid: process.id.pid,
            });
        }
        let finished = self
            .launch(&self.plan.visible_devices())
            .foreground(|process| {
                self.limit()?;
                ready(ui, &self.put(&locked, process, &modes)?);
                locked.release();
                Ok(())
            })
            .map_err(|failure| self.take_back(ui, &locked, &modes, failure))?;
        self.forget_foreground(ui, &store)?;
        Ok(finished)
    }

    /// Shows what a start would do: the same decision without a lock, and then the calls. Nothing is touched.
    /// Returns the record that there would be, its process not being known.
    pub fn show(&self, ui: &mut Ui<'_>, foreground: bool) -> Result<DaemonRecord, Error> {
        self.tell(ui);
        let store = Store::of(self.host)?;
        let entry = store.entry(&self.name);
        if let Some(pid) = entry
            .as_ref()
            .and_then(|entry| daemon::launcher(self.host, &self.here, entry))
        {
            return Err(Error::Busy {
                lock: store.lock_file(),
                pid: Some(pid),
            });
        }
        let decision = Decision::of(self, &store, entry.as_ref())?;
        self.tell_decision(ui, &decision);
        for note in runtime_dir::check(self.host, &self.directories)? {
            ui.note(note);
        }
        if let Way::Adopt(process) = &decision.way {
            ui.note(format!(
                "{} runs already without a record and would be recorded",
                process.id
            ));
        }
        ui.call_with(&nvidia_smi::call(self.host)?, &[]);
        let [launch, question] = self
            .control
            .calls_of_a_start(&self.plan.visible_devices(), foreground);
        for gpu in self.compute_modes.keys() {
            let call =
                nvidia_smi::compute_mode_call(self.host, gpu, &ComputeMode::ExclusiveProcess)?;
            if let Some(call) = call {
                ui.call_with(&call, &[]);
            }
        }
        if let Way::Launch = decision.way {
            let missing = self.missing_directories();
            if !missing.is_empty() {
                ui.making(&missing);
            }
            ui.call_with_environment(&launch);
        }
        if !foreground {
            ui.call_with_environment(&question);
            for change in &self.limits {
                ui.call_with_environment(&self.control.call_of_a_change(change));
            }
        } else if !self.limits.is_empty() {
            ui.note("once it answers, its limits are set and read back");
        }
        let nobody = ProcessId {
            pid: 0,
            start_ticks: 0,
        };
        Ok(self.record(nobody, &self.compute_modes))
    }

    /// Sets the limits that were asked for; each is confirmed.
    fn limit(&self) -> Result<(), Error> {
        let mut changes = self.limits.iter();
        changes.try_for_each(|change| self.control.change(change, Scope::Default))
    }

    fn missing_directories(&self) -> Vec<&Path> {
        [&self.directories.pipe, &self.directories.log]
            .into_iter()
            .map(PathBuf::as_path)
            .filter(|path| !self.host.root.at(path).exists())
            .collect()
    }

    fn launch<'l>(&'l self, visible: &'l str) -> Launch<'l> {
        Launch {
            host: self.host,
            control: &self.control,
            directories: &self.directories,
            visible,
        }
    }

    fn tell(&self, ui: &mut Ui<'_>) {
        for note in &self.notes {
            ui.note(note);
        }
    }

    fn tell_decision(&self, ui: &mut Ui<'_>, decision: &Decision) {
        if let Some(taken) = &decision.taken_all_the_same {
            ui.note(format!("{taken}: their servers take turns on it"));
        }
        if let Some(left) = &decision.left_behind {
            ui.note(format!(
                "{} was left by an interrupted start and is ended",
                left.id
            ));
        }
    }

    fn lock<'s>(&self, ui: &mut Ui<'_>, store: &'s Store<'_>) -> Result<Locked<'s>, Error> {
        self.tell(ui);
        store.lock(&self.name)
    }

    /// Refuses what must not be, before anything is touched, then clears the way, writes the intent and makes the GPUs
    /// exclusive. While that is decided the lock on all records is held, so that no other start decides about the same GPU.
    fn prepare(
        &self,
        ui: &mut Ui<'_>,
        store: &Store<'_>,
        locked: &Locked<'_>,
    ) -> Result<(Way, ModesBefore), Error> {
        let to_change = self.modes_to_change()?;
        let (way, old) = locked.with_all(|| {
            let entry = locked.entry();
            let mut decision = Decision::of(self, store, entry.as_ref())?;
            self.tell_decision(ui, &decision);
            if let Some(left) = decision.left_behind.take() {
                end_unannounced(self.host, &left)?;
                decision = Decision::of(self, store, entry.as_ref())?;
            }
            if let Way::Adopt(_) = decision.way {
                self.launch("").answers()?;
            }
            for note in runtime_dir::create(self.host, &self.directories)? {
                ui.note(note);
            }
            if matches!(entry, Some(Entry::Record(_) | Entry::Damaged { .. })) {
                locked.quarantine()?;
            }
            let old = self.old_modes(entry.as_ref());
            let mut modes = to_change.clone();
            modes.extend(old.clone());
            match &decision.way {
                // It runs and is ours: whatever fails from here on, it is no start that could be taken back.
                Way::Adopt(process) => locked.put(&self.record_of(process, &modes))?,
                Way::Launch => locked.put_intent(&self.record(launcher(self.host), &modes))?,
            }
            Ok((decision.way, old))
        })?;
        match self.change_modes(ui, &to_change, &old) {
            Ok(modes) => Ok((way, modes)),
            Err(failure) if matches!(way, Way::Adopt(_)) => Err(failure),
            Err(failure) => {
                let modes = to_change.into_iter().chain(old).collect();
                Err(self.take_back(ui, locked, &modes, failure))
            }
        }
    }

    fn record(&self, process: ProcessId, modes: &ModesBefore) -> DaemonRecord {
        let now = self.host.clock.now().duration_since(UNIX_EPOCH);
        let gpus = self.plan.devices.iter().map(Device::gpu);
        let served = self.plan.served();
        DaemonRecord {
            name: self.name.clone(),
            uid: self.host.uid,
            place: self.here.clone(),
            topology_mode: self.plan.mode,
            gpu_uuids: served.gpus,
            gpu_indices: gpus.map(|gpu| gpu.index).collect(),
            mig_uuid: served.mig,
            compute_modes_before: modes.clone(),
            pipe_directory: self.directories.pipe.clone(),
            log_directory: self.directories.log.clone(),
            process,
            created_at: now.unwrap_or_default().as_secs_f64(),
            limits: self.limits(),
            unknown: serde_json::Map::new(),
        }
    }

    fn put(
        &self,
        locked: &Locked<'_>,
        process: &Running,
        modes: &ModesBefore,
    ) -> Result<DaemonRecord, Error> {
        let record = self.record(process.id, modes);
        locked.put(&record)?;
        Ok(record)
    }

    /// The record of a daemon that runs already. Where it logs, only its own environment knows.
    fn record_of(&self, process: &Running, modes: &ModesBefore) -> DaemonRecord {
        let mut record = self.record(process.id, modes);
        if let Some(log) = process::variable_of(self.host, process.id.pid, "CUDA_MPS_LOG_DIRECTORY")
        {
            record.log_directory = log.into();
        }
        record.limits = DaemonLimits::default();
        record
    }

    /// Sets the limits of a daemon that runs already and was recorded again. What it has then is recorded, also when not
    /// all of them were confirmed.
    fn adopt(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        process: &Running,
        modes: &ModesBefore,
    ) -> Result<DaemonRecord, Error> {
        let mut record = self.record_of(process, modes);
        ui.note(format!(
            "{} ran already in {:?} without a record; it is recorded again",
            process.id, record.pipe_directory
        ));
        let limited = self.limit();
        let found = self.control.default_limits(self.plan.devices.len());
        if let Ok(found) = &found {
            record.limits = found.as_set(&record.served().devices());
        }
        if limited.is_ok() {
            for change in &self.limits {
                record.limits.take_over(change);
            }
        }
        locked.put(&record)?;
        limited?;
        found.map_err(|error| daemon::no_answer(&record, error))?;
        server_limits::change(ui, &self.control, &record, &self.limits)?;
        if record.limits != self.limits() {
            ui.note(format!(
                "it has limits that were set before: uni-cumps limits --name {}",
                self.name
            ));
        }
        Ok(record)
    }

    /// Takes the intent back after a failed launch. Where something is left running, the intent stays, so that the next
    /// command knows where to look.
    fn take_back(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        modes: &ModesBefore,
        failure: Error,
    ) -> Error {
        if !matches!(failure, Error::LeftRunning { .. }) {
            // The failure that we have is the one to tell.
            let _ = compute_mode::restore(self.host, ui, modes);
            mps::clear(self.host, &self.directories.pipe);
            runtime_dir::remove_if_empty(self.host, &self.directories.pipe);
            // What is left of it is an intent without a daemon, which the next start overwrites.
            let _ = locked.remove();
        }
        failure
    }

    /// The foreground daemon has ended: its record goes, unless somebody has started another one meanwhile.
    fn forget_foreground(&self, ui: &mut Ui<'_>, store: &Store<'_>) -> Result<(), Error> {
        let locked = store.lock(&self.name)?;
        let Some(Entry::Record(record)) = locked.entry() else {
            return Ok(());
        };
        let daemon = daemon::observe(self.host, &self.here, record);
        if daemon.state.is_over() {
            daemon::forget(self.host, ui, &locked, &daemon.record)?;
        }
        Ok(())
    }
}

/// Who starts a daemon.
fn launcher(host: &Host) -> ProcessId {
    let pid = process::our_pid();
    let unknown = ProcessId {
        pid,
        start_ticks: 0,
    };
    process::running(host, pid).map_or(unknown, |running| running.id)
}
