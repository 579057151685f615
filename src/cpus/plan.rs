//! The plan of one deployment: where its workers and its service run, and how many threads its pools get.

use std::str::FromStr;

use crate::cpus::{CpuSet, Machine, Place, places, unplaced};
use crate::error::Error;
use crate::gpu::PciAddress;

/// What the user says about the CPUs of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// `off`: nothing is pinned.
    Off,
    /// `auto`: by the place of each worker's GPU.
    Auto,
    /// A number: the first worker's CPU, the next workers on the next cores.
    First(usize),
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The setting has none of the three forms.
    #[error("{0:?} is none of auto, off and the number of a CPU")]
    NotASetting(String),
    /// The named CPU may not be used.
    #[error("CPU {first} is not among the CPUs that this process may use, {mask}")]
    OutsideMask {
        /// The named CPU.
        first: usize,
        /// The CPUs of the process.
        mask: CpuSet,
    },
    /// The workers do not fit between the named CPU and the service's core.
    #[error(
        "from CPU {first} on there are {cores} core(s) for {workers} worker(s): of the CPUs that this process may use, {mask}, the last core is the service's"
    )]
    TooFewCores {
        /// The named CPU.
        first: usize,
        /// The cores at or above it, without the last one.
        cores: usize,
        /// The workers.
        workers: usize,
        /// The CPUs of the process.
        mask: CpuSet,
    },
    /// Nothing would be left for everything else.
    #[error(
        "CPU {first} for {workers} worker(s) pins each of the CPUs that this process may use, {mask}, and leaves none for other threads"
    )]
    WouldPinAll {
        /// The named CPU.
        first: usize,
        /// The workers.
        workers: usize,
        /// The CPUs of the process.
        mask: CpuSet,
    },
}

impl PlanError {
    /// A word that stays, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotASetting(_) => "err_not_a_number",
            Self::OutsideMask { .. } => "err_outside_mask",
            Self::TooFewCores { .. } => "err_too_few_cores_above",
            Self::WouldPinAll { .. } => "err_would_pin_all",
        }
    }
}

impl PlanError {
    /// A short name that stays the same for good, for `--json`.
    fn code(&self) -> &'static str {
        match self {
            Self::NotASetting(_) => "bad-core",
            Self::OutsideMask { .. } => "core-outside-mask",
            Self::TooFewCores { .. } => "too-few-cores",
            Self::WouldPinAll { .. } => "would-pin-all",
        }
    }

    fn hint(&self) -> String {
        match self {
            Self::NotASetting(_) => "--core auto".to_owned(),
            Self::OutsideMask { mask, .. } => match mask.first() {
                Some(cpu) => format!("--core {cpu}, or --core auto"),
                None => "--core auto".to_owned(),
            },
            Self::TooFewCores { .. } => "--core auto, or a lower number".to_owned(),
            Self::WouldPinAll { .. } => "allow more CPUs, or plan fewer workers".to_owned(),
        }
    }
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Self::CpuPlan {
            code: error.code(),
            message: error.to_string(),
            hint: error.hint(),
        }
    }
}

impl FromStr for Setting {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let text = text.trim();
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            // More than a usize holds is a CPU that no mask has.
            _ if is_number => Ok(Self::First(text.parse().unwrap_or(usize::MAX))),
            _ => Err(PlanError::NotASetting(text.to_owned())),
        }
    }
}

/// What came of the setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing was to be pinned.
    Off,
    /// Placed by GPU.
    Auto,
    /// Placed from the named CPU on.
    Explicit,
    /// Nothing pinned: there is no CPU, or nothing to place.
    NoCpuOrWorker,
    /// Nothing pinned: a pool has fewer than two cores a GPU.
    PoolTooSmall,
    /// Nothing pinned: a GPU has fewer cores than workers.
    NeedMoreCores,
    /// Nothing pinned: no CPU would be left.
    WouldPinAll,
    /// Nothing pinned: the quota would be used up.
    QuotaTooSmall,
}

impl Kind {
    /// A word that stays, for programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::Explicit => "explicit",
            Self::NoCpuOrWorker => "none_no_cpu_or_worker",
            Self::PoolTooSmall => "none_pool_too_small",
            Self::NeedMoreCores => "none_need_more_cores",
            Self::WouldPinAll => "none_would_pin_all",
            Self::QuotaTooSmall => "none_quota_too_small",
        }
    }
}

/// Where one worker runs: on all allowed threads of one core, so that its few busy threads do not wait for one another
/// and find the core awake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Its CPUs.
    pub cpus: CpuSet,
    /// How they were found.
    pub why: String,
}

/// The plan of one deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuPlan {
    /// What came of the setting.
    pub kind: Kind,
    /// One entry a worker, in the order of the devices; empty where nothing is pinned.
    pub workers: Vec<Worker>,
    /// The CPU of the deployment's service, the process that hands out the work.
    pub service: Option<usize>,
    /// How the plan came about, or why nothing is pinned.
    pub why: String,
    /// How many CPUs may run at once, [`Machine::usable`].
    pub usable: usize,
}

impl CpuPlan {
    /// The CPUs that workers and service are pinned to.
    pub fn pinned(&self) -> CpuSet {
        let workers = self.workers.iter().flat_map(|worker| worker.cpus.iter());
        workers.chain(self.service).collect()
    }

    /// How many CPUs may run besides the pinned ones, at least 1. All pools are sized from it.
    pub fn left(&self) -> usize {
        self.usable.saturating_sub(self.pinned().len()).max(1)
    }

    /// Threads of one operation in the service: a quarter of what is left, from 1 to 4.
    pub fn preprocess_threads(&self) -> usize {
        (self.left() / 4).clamp(1, 4)
    }

    /// Threads that compress one PNG image: what is left, at most 8.
    pub fn png_threads(&self) -> usize {
        self.left().min(8)
    }

    /// Images that are compressed at once, from 1 to 4: their threads together stay within what is left.
    pub fn encode_workers(&self) -> usize {
        (self.left() / self.png_threads()).clamp(1, 4)
    }

    /// Threads that copy one large result: the part of what is left that one image gets.
    pub fn copy_workers(&self) -> usize {
        (self.left() / self.encode_workers()).max(1)
    }

    fn nothing(machine: &Machine, kind: Kind, why: String) -> Self {
        Self {
            kind,
            workers: Vec::new(),
            service: None,
            why,
            usable: machine.usable(),
        }
    }
}

/// Plans a deployment whose workers use these devices, in the order of the workers; a worker on no GPU has none.
///
/// At least one CPU of the mask stays free. `auto` pins nothing, and says why, where it would be more; a named CPU that
/// cannot be had is an error.
pub fn plan(
    setting: Setting,
    devices: &[Option<PciAddress>],
    machine: &Machine,
) -> Result<CpuPlan, PlanError> {
    match setting {
        Setting::Off => {
            let why = "pinning is off".to_owned();
            Ok(CpuPlan::nothing(machine, Kind::Off, why))
        }
        Setting::Auto => Ok(match auto(devices, machine) {
            Ok(plan) => plan,
            Err((kind, why)) => {
                CpuPlan::nothing(machine, kind, format!("nothing is pinned: {why}"))
            }
        }),
        Setting::First(first) => explicit(first, devices.len(), machine),
    }
}

fn auto(devices: &[Option<PciAddress>], machine: &Machine) -> Result<CpuPlan, (Kind, String)> {
    if machine.mask.is_empty() || devices.is_empty() {
        let why = "there is no CPU or no worker to place".to_owned();
        return Err((Kind::NoCpuOrWorker, why));
    }
    let places = places(machine);
    let listed = |device: &Option<PciAddress>| device.and_then(|address| places.get(&address));
    // A worker without a place stays on the cores of the deployment's first GPU. On the whole mask, as in the
    // reference, it would take those of another deployment's GPU.
    let unplaced = unplaced(machine);
    let otherwise = devices.iter().find_map(listed).unwrap_or(&unplaced);
    let homes: Vec<&Place> = devices
        .iter()
        .map(|device| listed(device).unwrap_or(otherwise))
        .collect();
    if let Some(home) = homes.iter().find(|home| !home.fits()) {
        let (cores, of) = (home.cores, home.of);
        let why = format!(
            "{home}: each of {of} takes two cores, and there are {cores}; allow more CPUs, or name one"
        );
        return Err((Kind::PoolTooSmall, why));
    }
    let mut workers = Vec::new();
    for (place, home) in homes.iter().enumerate() {
        let before = &homes[..place];
        let nth = before.iter().filter(|other| other.address == home.address);
        let Some(core) = home.nth(nth.count()) else {
            let own = home.workers.len();
            let why = format!("{home}: it has more workers than cores of its own, which are {own}");
            return Err((Kind::NeedMoreCores, why));
        };
        let why = match listed(&devices[place]) {
            None if home.address.is_some() => {
                format!("auto: a device that sysfs does not list, beside {home}")
            }
            _ => format!("auto: {home}"),
        };
        let cpus = core.clone();
        workers.push(Worker { cpus, why });
    }
    let plan = CpuPlan {
        kind: Kind::Auto,
        workers,
        service: homes[0].service.as_ref().and_then(CpuSet::first),
        why: format!("auto: the first worker is on {}", homes[0]),
        usable: machine.usable(),
    };
    leaves_enough(&plan, machine)?;
    Ok(plan)
}

/// The reference pins up to the whole mask less one CPU even where a quota lets fewer run, so that the pinned threads
/// use it up and all others wait; here they must leave some of it.
fn leaves_enough(plan: &CpuPlan, machine: &Machine) -> Result<(), (Kind, String)> {
    let (pinned, allowed) = (plan.pinned().len(), machine.mask.len());
    if pinned >= allowed {
        let why = format!(
            "workers and service would take all {allowed} allowed CPUs, {}, and leave none for other threads",
            machine.mask
        );
        return Err((Kind::WouldPinAll, why));
    }
    match &machine.quota {
        Some(quota) if pinned >= machine.usable() => {
            let (cpus, file) = (quota.cpus, quota.file.display());
            let why = format!(
                "workers and service would take {pinned} CPUs, and the quota of {cpus} CPUs in {file} leaves nothing for other threads"
            );
            Err((Kind::QuotaTooSmall, why))
        }
        _ => Ok(()),
    }
}

/// The workers on the named CPU's core and those above it, the service on the last one, whatever the devices, the
/// quota and the performance: the user has decided.
fn explicit(first: usize, workers: usize, machine: &Machine) -> Result<CpuPlan, PlanError> {
    let mask = || machine.mask.clone();
    let mut cores = machine.cores();
    let Some(start) = cores.iter().position(|core| core.contains(first)) else {
        let mask = mask();
        return Err(PlanError::OutsideMask { first, mask });
    };
    let service = cores.pop().and_then(|core| core.first());
    let above = cores.get(start..).unwrap_or_default();
    if above.len() < workers {
        return Err(PlanError::TooFewCores {
            first,
            cores: above.len(),
            workers,
            mask: mask(),
        });
    }
    let why = format!("from CPU {first} on, as set");
    let plan = CpuPlan {
        kind: Kind::Explicit,
        workers: above[..workers]
            .iter()
            .map(|core| Worker {
                cpus: core.clone(),
                why: why.clone(),
            })
            .collect(),
        service,
        why: format!("{why}; the service on the last allowed core"),
        usable: machine.usable(),
    };
    if plan.pinned().len() >= machine.mask.len() {
        let mask = mask();
        return Err(PlanError::WouldPinAll {
            first,
            workers,
            mask,
        });
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::cpus::{HostGpu, Quota};

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn gpu(nth: u8) -> PciAddress {
        format!("0000:0{nth}:00.0").parse().unwrap()
    }

    /// A machine without second threads, its GPUs given by node and local CPUs.
    fn machine(mask: &str, gpus: &[(Option<&str>, Option<&str>)]) -> Machine {
        let gpus = (0..).zip(gpus).map(|(nth, (node, local))| HostGpu {
            address: gpu(nth),
            node: node.map(str::to_owned),
            local: local.map(set),
        });
        Machine {
            mask: set(mask),
            gpus: gpus.collect(),
            ..Machine::default()
        }
    }

    fn auto(machine: &Machine, devices: &[Option<u8>]) -> CpuPlan {
        let devices: Vec<_> = devices.iter().map(|nth| nth.map(gpu)).collect();
        plan(Setting::Auto, &devices, machine).unwrap()
    }

    /// Its workers' CPUs, a space between them, and the service's.
    fn pinned(machine: &Machine, devices: &[Option<u8>]) -> (String, Option<usize>) {
        let plan = auto(machine, devices);
        let cpus = plan.workers.iter().map(|worker| worker.cpus.to_string());
        (cpus.collect::<Vec<_>>().join(" "), plan.service)
    }

    fn placed(workers: &str, service: usize) -> (String, Option<usize>) {
        (workers.to_owned(), Some(service))
    }

    #[test]
    fn a_second_worker_keeps_off_the_cores_of_a_gpu_without_a_node() {
        let machine = machine("0-7", &[(Some("0"), Some("0-7")), (None, None)]);
        // Each its first and its service, then the cores between in turn.
        assert_eq!(pinned(&machine, &[Some(0); 3]), placed("0 2 4", 7));
        assert_eq!(pinned(&machine, &[Some(1); 3]), placed("1 3 5", 6));
        assert_eq!(auto(&machine, &[Some(0); 4]).kind, Kind::NeedMoreCores);
    }

    #[test]
    fn a_gpu_on_no_node_does_not_take_the_cores_of_those_with_one() {
        let gpus = [(Some("-1"), Some("0-7")), (Some("0"), Some("0-3"))];
        let machine = machine("0-7", &gpus);
        assert_eq!(pinned(&machine, &[Some(0)]), placed("4", 7));
        assert_eq!(pinned(&machine, &[Some(1)]), placed("0", 3));
    }

    #[test]
    fn a_worker_on_no_gpu_stays_with_the_gpu_of_its_deployment() {
        let machine = machine("0-7", &[(Some("0"), Some("0-7")); 2]);
        assert_eq!(pinned(&machine, &[None, Some(1), None]), placed("1 3 5", 6));
        assert_eq!(pinned(&machine, &[Some(0), None]), placed("0 2", 7));
        assert_eq!(pinned(&machine, &[None, None]), placed("0 1", 7));
    }

    #[test]
    fn a_node_with_too_few_allowed_cores_does_not_keep_its_gpu_from_others() {
        let gpus = [(Some("0"), Some("0-3")), (Some("1"), Some("4-7"))];
        let machine = machine("0-4", &gpus);
        assert_eq!(pinned(&machine, &[Some(0)]), placed("0", 3));
        assert_eq!(pinned(&machine, &[Some(1)]), placed("1", 4));
        let share = |nth| places(&machine)[&gpu(nth)].share.to_string();
        assert_eq!(
            (share(0), share(1)),
            ("0,2-3".to_owned(), "1-2,4".to_owned())
        );
    }

    #[test]
    fn a_quota_that_would_be_used_up_pins_nothing_unless_a_cpu_was_named() {
        let with = |cpus| Machine {
            quota: Some(Quota {
                cpus,
                file: PathBuf::from("/sys/fs/cgroup/cpu.max"),
            }),
            ..machine("0-7", &[(Some("0"), Some("0-7"))])
        };
        let plan_of = |cpus| auto(&with(cpus), &[Some(0)]);
        let refused = plan_of(2.9);
        assert_eq!(refused.kind, Kind::QuotaTooSmall);
        assert!(
            refused
                .why
                .contains("quota of 2.9 CPUs in /sys/fs/cgroup/cpu.max")
        );
        assert!(refused.pinned().is_empty());
        assert_eq!(plan_of(3.0).kind, Kind::Auto);
        let named = plan(Setting::First(2), &[None], &with(1.0)).unwrap();
        assert_eq!((named.pinned(), named.left()), (set("2,7"), 1));
    }

    #[test]
    fn workers_get_performance_cores_and_the_service_one_from_the_other_end() {
        let machine = Machine {
            performance: (0..8)
                .map(|cpu| (cpu, if cpu < 4 { 400 } else { 1024 }))
                .collect(),
            ..machine("0-7", &[(Some("0"), Some("0-7"))])
        };
        assert_eq!(pinned(&machine, &[Some(0); 2]), placed("4 5", 3));
        let named = plan(Setting::First(0), &[None], &machine).unwrap();
        assert_eq!(named.pinned(), set("0,7"));
    }

    #[test]
    fn without_sysfs_any_core_is_taken_and_one_core_is_too_few() {
        assert_eq!(pinned(&machine("0-3", &[]), &[Some(0)]), placed("0", 3));
        assert_eq!(
            pinned(&machine("2040-2047", &[]), &[Some(0)]),
            placed("2040", 2047)
        );
        let kind = |mask, devices: &[_]| auto(&machine(mask, &[]), devices).kind;
        assert_eq!(kind("3", &[Some(0)]), Kind::PoolTooSmall);
        assert_eq!(kind("3-4", &[Some(0)]), Kind::WouldPinAll);
        assert_eq!(kind("", &[Some(0)]), Kind::NoCpuOrWorker);
        assert_eq!(kind("0-3", &[]), Kind::NoCpuOrWorker);
    }

    #[test]
    fn a_setting_is_off_auto_or_a_number() {
        assert_eq!("off".parse(), Ok(Setting::Off));
        assert_eq!(" auto ".parse(), Ok(Setting::Auto));
        assert_eq!("08".parse(), Ok(Setting::First(8)));
        let huge = "99999999999999999999999".parse().unwrap();
        let refused = plan(huge, &[None], &machine("0-3", &[])).unwrap_err();
        assert_eq!(refused.kind(), "err_outside_mask");
        for text in ["", "on", "AUTO", "-1", "+1", "1.0", "0-3", "\u{661}"] {
            assert!(text.parse::<Setting>().is_err(), "{text}");
        }
    }
}
