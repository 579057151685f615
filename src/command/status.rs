//! `status`: the machine's GPUs, the caller's mask and the recorded daemons, without changing anything.

mod watch;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::attachment::{self, Load};
use crate::checkpoint::{self, ProcessState, Suspended};
use crate::cli::StatusArgs;
use crate::daemon::{self, Observed, State, Unrecorded};
use crate::error::{Error, SmiFailure};
use crate::gpu::{Device, Gpu};
use crate::host::Host;
use crate::mps::{self, Keeper};
use crate::nvidia_smi::{self, Discovery};
use crate::record::TopologyMode;
use crate::runner::side_by_side;
use crate::runtime_dir;
use crate::store::Store;
use crate::suspension;
use crate::topology::{self, Visibility};
use crate::ui::{Answer, Cell, Tone, Ui, plain, python_bool};

struct Report {
    discovery: Result<Discovery, SmiFailure>,
    mask: Option<String>,
    visibility: Visibility,
    daemons: Vec<Daemon>,
    others: Vec<Unrecorded>,
    control_pipes: Vec<Value>,
    /// Control daemons that no record speaks of, where programs of this caller would look for one.
    unmanaged: Vec<Unmanaged>,
    /// The processes that were taken off their GPUs, and their states.
    suspended: Vec<(Suspended, Option<ProcessState>)>,
}

/// How long all daemons together may take to answer.
const ASK_LIMIT: Duration = Duration::from_secs(1);

/// A recorded daemon and what it tells of itself.
struct Daemon {
    observed: Observed,
    load: Load,
    /// Whole seconds since it was started; none for one that was started in the future, as the clock says.
    age: Option<u64>,
}

struct Unmanaged {
    pipe: PathBuf,
    /// Known unless it is of another pid namespace.
    pid: Option<i32>,
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StatusArgs) -> Result<u8, Error> {
    if let Some(pause) = args.watch {
        return watch::run(host, ui, args.json, pause);
    }
    let report = gather(host)?;
    ui.answer(&report, args.json);
    Ok(0)
}

fn gather(host: &Host) -> Result<Report, Error> {
    let ask_daemons = || {
        let (daemons, others) = daemon::observe_all(host, &Store::of(host)?)?;
        let loads = attachment::loads_of(host, &daemons, ASK_LIMIT)?;
        Ok::<_, Error>((daemons, others, loads))
    };
    let (discovery, asked) = side_by_side(|| nvidia_smi::discover(host), ask_daemons);
    if let Err(SmiFailure::Interrupted(signal)) = discovery {
        return Err(Error::Interrupted(signal));
    }
    let (daemons, others, loads) = asked?;
    let gpus = discovery.as_ref().map_or(&[][..], |found| &found.gpus);
    let mask = host.env.visible_devices();
    let visibility = topology::visible(gpus, mask.as_deref());
    Ok(Report {
        control_pipes: daemon::control_pipes(&daemons),
        unmanaged: unmanaged(host, &daemons),
        suspended: suspension::away(host)?,
        discovery,
        mask,
        visibility,
        daemons: daemons
            .into_iter()
            .zip(loads)
            .map(|(observed, load)| Daemon {
                age: age(host, &observed),
                observed,
                load,
            })
            .collect(),
        others,
    })
}

fn age(host: &Host, daemon: &Observed) -> Option<u64> {
    let now = host
        .clock
        .now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()?;
    let started = Duration::try_from_secs_f64(daemon.record.created_at).ok()?;
    Some(now.checked_sub(started)?.as_secs())
}

fn unmanaged(host: &Host, daemons: &[Observed]) -> Vec<Unmanaged> {
    let mut places = vec![runtime_dir::effective_pipe(host)];
    let default = Path::new(runtime_dir::NVIDIA_DEFAULT);
    if !places.iter().any(|place| place == default) {
        places.push(default.to_owned());
    }
    places.retain(|place| {
        !daemons
            .iter()
            .any(|daemon| daemon.record.pipe_directory == *place)
    });
    let running = |pipe: PathBuf| {
        let pid = match mps::keeper(host, &pipe) {
            Keeper::Nobody => return None,
            Keeper::Process(process) => Some(process.id.pid),
            Keeper::Elsewhere | Keeper::Contradiction(_) => None,
        };
        Some(Unmanaged { pipe, pid })
    };
    places.into_iter().filter_map(running).collect()
}

impl Answer for Report {
    fn to_json(&self) -> Value {
        let mut pipes = self.control_pipes.clone();
        pipes.extend(self.unmanaged.iter().map(|daemon| {
            json!({
                "path": mps::control_path(&daemon.pipe),
                "kind": "unix_socket",
                "managed_names": [],
                "pid": daemon.pid,
            })
        }));
        json!({
            "platform": "Linux",
            "nvidia_smi_available": self.discovery.is_ok(),
            "diagnostic": self.diagnostic(),
            "cuda_visible_devices": self.mask,
            "cuda_visible_devices_notes": self.visibility.notes,
            "gpus": self.gpus().iter().map(|gpu| self.gpu_json(gpu)).collect::<Vec<_>>(),
            "control_pipes": pipes,
            "managed_daemons": self.daemons.iter().map(Daemon::to_json).collect::<Vec<_>>(),
            "suspended_processes": self.suspended.iter().map(suspended_json).collect::<Vec<_>>(),
            "other_records": self.others.iter().map(unrecorded_json).collect::<Vec<_>>(),
            "compatible_topology_modes": TopologyMode::ALL.map(TopologyMode::as_str),
        })
    }

    /// The lines of the Python command, and behind them what it did not show.
    fn print(&self, ui: &mut Ui<'_>) {
        let available = python_bool(self.discovery.is_ok());
        ui.line(format!("platform=Linux nvidia_smi_available={available}"));
        if let Some(diagnostic) = self.diagnostic() {
            ui.line(format!("diagnostic={diagnostic}"));
        }
        for gpu in self.gpus() {
            let mark = match self.mask {
                Some(_) => format!(" visible={}", python_bool(self.is_visible(gpu))),
                None => String::new(),
            };
            ui.line(match gpu {
                Gpu::Usable { identity, .. } => {
                    format!("gpu index={} uuid={}{mark}", identity.index, identity.uuid)
                }
                Gpu::Unusable { index, diagnostic } => {
                    let index = index.map_or("unknown".to_owned(), |index| index.to_string());
                    format!("gpu index={index} uuid=none{mark} unusable={diagnostic}")
                }
            });
            for device in parts(gpu) {
                let Device::Mig(gpu, instance) = &device else {
                    continue;
                };
                let mark = match self.mask {
                    Some(_) => format!(" visible={}", python_bool(self.visibility.shows(&device))),
                    None => String::new(),
                };
                ui.line(format!(
                    "mig gpu={} number={} profile={} uuid={}{mark}",
                    gpu.index, instance.number, instance.profile, instance.uuid
                ));
            }
        }
        if let Some(mask) = &self.mask {
            ui.line(format!("cuda_visible_devices={mask}"));
        }
        for note in &self.visibility.notes {
            ui.line(format!("cuda_visible_devices_note={note}"));
        }
        if self.daemons.is_empty() {
            ui.line("managed_daemons=none");
        }
        for daemon in &self.daemons {
            ui.line(daemon.line());
        }
        for other in &self.others {
            let Unrecorded {
                name, word, reason, ..
            } = other;
            ui.line(format!("record name={name} state={word} reason={reason}"));
        }
        for daemon in &self.unmanaged {
            let pid = daemon
                .pid
                .map_or("unknown".to_owned(), |pid| pid.to_string());
            ui.line(format!(
                "unmanaged pipe={} pid={pid}",
                daemon.pipe.display()
            ));
        }
        for (entry, state) in &self.suspended {
            ui.line(format!(
                "suspended pid={} state={} program={} gpus={} memory_mib={}",
                entry.process.pid,
                state_word(*state),
                entry.program,
                checkpoint::gpu_list(&entry.gpus),
                checkpoint::memory_text(&entry.gpus),
            ));
        }
        let modes = TopologyMode::ALL.map(TopologyMode::as_str).join(",");
        ui.line(format!("compatible_topology_modes={modes}"));
    }

    /// For a person.
    fn show(&self, ui: &mut Ui<'_>) {
        if let Some(diagnostic) = self.diagnostic() {
            let tone = match self.discovery {
                Ok(_) => Tone::Doubtful,
                Err(_) => Tone::Bad,
            };
            ui.verdict("nvidia-smi", tone, &diagnostic);
        }
        let with_parts = |gpu| std::iter::once(self.gpu_row(gpu)).chain(self.part_rows(gpu));
        let rows: Vec<Vec<Cell>> = self.gpus().iter().flat_map(with_parts).collect();
        if rows.is_empty() {
            ui.line("No GPU.");
        } else {
            ui.table(&["GPU", "UUID", "COMPUTE MODE", "VISIBLE"], &rows);
        }
        if let Some(mask) = &self.mask {
            ui.line(format!("CUDA_VISIBLE_DEVICES={mask}"));
            for note in &self.visibility.notes {
                ui.verdict("note", Tone::Doubtful, note);
            }
        }
        ui.line("");
        let rows: Vec<Vec<Cell>> = self
            .daemons
            .iter()
            .map(|daemon| self.daemon_row(daemon))
            .chain(self.others.iter().map(unrecorded_row))
            .collect();
        if rows.is_empty() {
            ui.line("No daemon. To start one: uni-cumps start");
        } else {
            ui.table(&DAEMON_COLUMNS, &rows);
        }
        for daemon in &self.unmanaged {
            let pid = daemon
                .pid
                .map_or("unknown".to_owned(), |pid| pid.to_string());
            let text = format!(
                "a control daemon without a record in {} (pid {pid})",
                daemon.pipe.display()
            );
            ui.verdict("unmanaged", Tone::Doubtful, &text);
        }
        if !self.suspended.is_empty() {
            ui.line("");
            let rows: Vec<Vec<Cell>> = self
                .suspended
                .iter()
                .map(|it| self.suspended_row(it))
                .collect();
            ui.table(&["SUSPENDED", "STATE", "PROGRAM", "GPU", "MIB"], &rows);
            ui.next_step("uni-cumps checkpoint resume");
        }
    }
}

impl Report {
    fn gpus(&self) -> &[Gpu] {
        self.discovery.as_ref().map_or(&[], |found| &found.gpus)
    }

    fn diagnostic(&self) -> Option<String> {
        match &self.discovery {
            Ok(found) => found.diagnostic(),
            Err(failure) => Some(failure.to_string()),
        }
    }

    fn is_visible(&self, gpu: &Gpu) -> bool {
        self.visibility.gpus.contains(gpu)
    }

    fn gpu_json(&self, gpu: &Gpu) -> Value {
        match gpu {
            Gpu::Usable {
                identity,
                compute_mode,
                mig,
            } => {
                let mut value = json!({
                    "index": identity.index,
                    "uuid": identity.uuid,
                    "usable": true,
                    "visible": self.is_visible(gpu),
                    "compute_mode": compute_mode.to_string(),
                });
                if mig.is_some() {
                    let part = |device: &Device| {
                        let mut part = json!(device.mig());
                        part["visible"] = self.visibility.shows(device).into();
                        part
                    };
                    value["mig"] = parts(gpu).iter().map(part).collect();
                }
                value
            }
            Gpu::Unusable { index, diagnostic } => json!({
                "index": index,
                "uuid": null,
                "usable": false,
                "visible": self.is_visible(gpu),
                "diagnostic": diagnostic,
            }),
        }
    }

    fn part_rows(&self, gpu: &Gpu) -> impl Iterator<Item = Vec<Cell>> {
        let row = |device: Device| {
            let instance = device.mig()?;
            Some(vec![
                plain(device.number()),
                plain(&instance.uuid),
                plain(format!("MIG {}", instance.profile)),
                yes_or_no(self.visibility.shows(&device)),
            ])
        };
        parts(gpu).into_iter().filter_map(row)
    }

    fn gpu_row(&self, gpu: &Gpu) -> Vec<Cell> {
        let visible = yes_or_no(self.is_visible(gpu));
        match gpu {
            Gpu::Usable {
                identity,
                compute_mode,
                ..
            } => vec![
                plain(identity.index),
                plain(&identity.uuid),
                plain(compute_mode),
                visible,
            ],
            Gpu::Unusable { index, diagnostic } => vec![
                plain(index.map_or("?".to_owned(), |index| index.to_string())),
                (diagnostic.clone(), Tone::Bad),
                plain("-"),
                visible,
            ],
        }
    }

    fn daemon_row(&self, daemon: &Daemon) -> Vec<Cell> {
        let record = &daemon.observed.record;
        let state = &daemon.observed.state;
        let tone = match state {
            State::Live(_) => Tone::Good,
            State::NotAnswering(_) | State::OtherPidNamespace { .. } | State::OtherHost => {
                Tone::Doubtful
            }
            State::Unreachable(_) | State::Stale | State::OtherBoot => Tone::Bad,
        };
        let devices = record.served().devices();
        let devices: Vec<String> = devices.iter().map(|uuid| self.short(uuid)).collect();
        let limits = record.limits.settings(|uuid| self.short(uuid));
        vec![
            plain(&record.name),
            (state.word().to_owned(), tone),
            plain(record.process.pid),
            plain(devices.join(",")),
            plain(daemon.load.servers.map_or("-".to_owned(), text)),
            plain(daemon.load.clients.map_or("-".to_owned(), text)),
            match limits.is_empty() {
                true => ("none".to_owned(), Tone::Faint),
                false => plain(limits.join(" ")),
            },
            plain(daemon.age.map_or("-".to_owned(), for_people)),
            plain(record.pipe_directory.display()),
        ]
    }

    fn suspended_row(&self, (entry, state): &(Suspended, Option<ProcessState>)) -> Vec<Cell> {
        let tone = match state {
            Some(ProcessState::CHECKPOINTED) => Tone::Good,
            Some(ProcessState::FAILED) => Tone::Bad,
            _ => Tone::Doubtful,
        };
        let gpus: Vec<String> = entry
            .gpus
            .iter()
            .map(|share| self.short(share.uuid.as_str()))
            .collect();
        vec![
            plain(entry.process.pid),
            (state_word(*state), tone),
            plain(&entry.program),
            plain(gpus.join(",")),
            plain(checkpoint::memory_text(&entry.gpus)),
        ]
    }

    /// A device as the table above numbers it, or by its UUID where it is not there.
    fn short(&self, uuid: &str) -> String {
        let devices = self.gpus().iter().flat_map(Gpu::devices);
        let gpus = self.gpus().iter().filter_map(Gpu::identity);
        let gpus = gpus.map(|gpu| Device::Gpu(gpu.clone()));
        devices
            .chain(gpus)
            .find(|device| device.uuid() == uuid)
            .map_or(uuid.to_owned(), |device| device.number())
    }
}

/// The columns of the table of daemons.
const DAEMON_COLUMNS: [&str; 9] = [
    "DAEMON",
    "STATE",
    "PID",
    "GPU",
    "SERVERS",
    "CLIENTS",
    "LIMITS",
    "AGE",
    "PIPE DIRECTORY",
];

impl Daemon {
    fn to_json(&self) -> Value {
        let mut value = self.observed.to_json();
        value["servers"] = self.load.servers.into();
        value["clients"] = self.load.clients.into();
        value["age_s"] = self.age.into();
        value
    }

    /// The line of the Python command, and behind it what that did not show.
    fn line(&self) -> String {
        let record = &self.observed.record;
        let line = format!(
            "{} mode={} gpus={} servers={} clients={} age_s={}",
            self.observed.line(),
            record.topology_mode.as_str(),
            record.gpu_list(),
            self.load.servers.map_or("unknown".to_owned(), text),
            self.load.clients.map_or("unknown".to_owned(), text),
            self.age.map_or("unknown".to_owned(), text),
        );
        match record.limits.settings(str::to_owned) {
            none if none.is_empty() => line,
            limits => format!("{line} limits={}", limits.join(",")),
        }
    }
}

fn text(number: impl ToString) -> String {
    number.to_string()
}

/// A time in the largest unit of which there are two or more, or else in seconds.
fn for_people(seconds: u64) -> String {
    let units = [("d", 86_400), ("h", 3600), ("m", 60)];
    let unit = units.into_iter().find(|(_, size)| seconds >= 2 * size);
    let (unit, size) = unit.unwrap_or(("s", 1));
    format!("{}{unit}", seconds / size)
}

/// The MIG instances of a GPU.
fn parts(gpu: &Gpu) -> Vec<Device> {
    let mut devices = gpu.devices();
    devices.retain(|device| device.mig().is_some());
    devices
}

fn yes_or_no(is_visible: bool) -> Cell {
    match is_visible {
        true => ("yes".to_owned(), Tone::Good),
        false => ("no".to_owned(), Tone::Faint),
    }
}

fn state_word(state: Option<ProcessState>) -> String {
    state.map_or("unknown".to_owned(), ProcessState::word)
}

fn suspended_json((entry, state): &(Suspended, Option<ProcessState>)) -> Value {
    let mut value = entry.to_json();
    value["state"] = state.map(ProcessState::word).into();
    value
}

fn unrecorded_row(other: &Unrecorded) -> Vec<Cell> {
    let mut row = vec![plain("-"); DAEMON_COLUMNS.len()];
    row[0] = plain(&other.name);
    row[1] = (other.word.to_owned(), Tone::Bad);
    // The last column is the widest.
    row[DAEMON_COLUMNS.len() - 1] = plain(&other.reason);
    row
}

fn unrecorded_json(other: &Unrecorded) -> Value {
    json!({
        "name": other.name.as_str(),
        "record_state": other.word,
        "reason": other.reason,
    })
}
