//! Binding a client to the CPUs near its GPU: which GPUs its daemon serves and where they sit, what other clients have
//! claimed, and the process's own mask.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rustix::thread::{CpuSet as Mask, sched_setaffinity};

use crate::claims::{Claim, ClaimError, Locks};
use crate::cli::Cpus;
use crate::cpu_topology;
use crate::cpus::{CpuSet, Home, Machine, Place, places};
use crate::gpu::{GpuUuid, PciAddress};
use crate::host::Host;
use crate::nvidia_smi;
use crate::runner::{Invocation, Mode};

/// The thread pools that are sized by a variable, and not by the mask.
const THREADS: [&str; 4] = [
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
];

/// The worker's core and the service's CPU, for programs that pin their own threads.
const WORKER: &str = "UNI_CUMPS_WORKER_CPUS";
const SERVICE: &str = "UNI_CUMPS_SERVICE_CPU";

/// A process that is bound, or is going to be.
pub struct Binding {
    /// The CPUs.
    pub cpus: CpuSet,
    /// What the program is told of them.
    pub variables: Vec<(&'static str, String)>,
    /// Held for the program, which must inherit them.
    pub claims: Vec<Claim>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// What is asked for.
pub struct Wanted<'w> {
    /// To which CPUs.
    pub cpus: &'w Cpus,
    /// What the names of GPUs' locks begin with, if they are not ours.
    pub lock_prefix: Option<&'w Path>,
    /// It is only to be shown, and nothing claimed.
    pub shown: bool,
}

/// Why a process is not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindingError {
    /// Nothing says which CPUs may be used.
    #[error("the CPUs that this process may use are not known")]
    NoMask,
    /// The list has CPUs that may not be used.
    #[error("{wanted} is not within the CPUs that this process may use, {mask}")]
    OutsideMask {
        /// The list.
        wanted: CpuSet,
        /// The process's CPUs.
        mask: CpuSet,
    },
    /// The GPU's place is not known.
    #[error("it is not known where GPU {0} sits")]
    NoPlace(GpuUuid),
    /// No CPU of the GPU's node may be used.
    #[error("no CPU near GPU {0} may be used")]
    NoneNear(GpuUuid),
    /// Others reserve what there is.
    #[error("{0}")]
    TooFew(String),
    /// A GPU could not be claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The system refused.
    #[error("the system does not let this process be bound to {cpus}: {reason}")]
    Refused {
        /// The CPUs.
        cpus: CpuSet,
        /// The system's reason.
        reason: String,
    },
}

/// Finds out which CPUs a client of these GPUs is to be bound to. `auto` claims the GPUs.
pub fn find(host: &Host, wanted: &Wanted<'_>, gpus: &[GpuUuid]) -> Result<Binding, BindingError> {
    let mask = cpu_topology::process_mask(&host.root).ok_or(BindingError::NoMask)?;
    let machine = cpu_topology::machine(&host.root, mask);
    let mut binding = match wanted.cpus {
        Cpus::List(list) if !list.is_subset(&machine.mask) => {
            return Err(BindingError::OutsideMask {
                wanted: list.clone(),
                mask: machine.mask,
            });
        }
        Cpus::List(list) => Binding::to(host, &machine, list.clone(), 1),
        Cpus::Node => Binding::to(host, &machine, near(host, &machine, gpus)?, 1),
        Cpus::Auto => auto(host, &machine, gpus, wanted)?,
    };
    binding.forget_others(host);
    Ok(binding)
}

/// Where each of these GPUs sits.
pub fn addresses(host: &Host, gpus: &[GpuUuid]) -> Result<Vec<PciAddress>, BindingError> {
    let known = known_addresses(host);
    let address = |gpu: &GpuUuid| {
        let found = known.iter().find(|(uuid, _)| uuid == gpu);
        found
            .map(|(_, address)| *address)
            .ok_or_else(|| BindingError::NoPlace(gpu.clone()))
    };
    gpus.iter().map(address).collect()
}

/// All GPUs and where they sit. Only where the kernel module does not tell, nvidia-smi is asked.
fn known_addresses(host: &Host) -> Vec<(GpuUuid, PciAddress)> {
    match cpu_topology::gpu_addresses(&host.root) {
        told if told.is_empty() => nvidia_smi::addresses(host),
        told => told,
    }
}

/// The CPUs of the GPUs' NUMA nodes that may be used.
fn near(host: &Host, machine: &Machine, gpus: &[GpuUuid]) -> Result<CpuSet, BindingError> {
    let mut found = CpuSet::default();
    for (gpu, address) in gpus.iter().zip(addresses(host, gpus)?) {
        let listed = machine.gpus.iter().find(|listed| listed.address == address);
        let local = listed.and_then(|listed| listed.local.as_ref());
        let local = local.ok_or_else(|| BindingError::NoPlace(gpu.clone()))?;
        let near = local.intersection(&machine.mask);
        if near.is_empty() {
            return Err(BindingError::NoneNear(gpu.clone()));
        }
        found = found.union(&near);
    }
    Ok(found)
}

/// The process's share of its GPUs' pools: without what other GPUs reserve, and without the worker cores of those who have
/// claimed the same GPU before.
fn auto(
    host: &Host,
    machine: &Machine,
    gpus: &[GpuUuid],
    wanted: &Wanted<'_>,
) -> Result<Binding, BindingError> {
    let addresses = addresses(host, gpus)?;
    let all = places(machine);
    let places: Vec<&Place> = addresses
        .iter()
        .zip(gpus)
        .map(|(address, gpu)| {
            all.get(address)
                .ok_or_else(|| BindingError::NoPlace(gpu.clone()))
        })
        .collect::<Result<_, _>>()?;
    if let Some(place) = places.iter().find(|place| !place.fits()) {
        return Err(BindingError::TooFew(format!(
            "{place}: each of its {} takes two cores, and there are {}",
            place.of, place.cores
        )));
    }
    let mut locks = Locks::of(host, wanted.lock_prefix);
    let claims = match wanted.shown {
        true => BTreeMap::new(),
        false => locks.claim(&addresses)?,
    };
    let mut cpus = CpuSet::default();
    let mut workers = CpuSet::default();
    let mut clients = 1;
    let mut notes = Vec::new();
    for (place, address) in places.iter().zip(&addresses) {
        let holders = locks.holders(address);
        let mut held: BTreeSet<usize> = holders.iter().map(|holder| holder.slot).collect();
        let slot = match claims.get(address) {
            Some(claim) => claim.slot,
            None => (0..).find(|slot| !held.contains(slot)).unwrap_or_default(),
        };
        // Those below ours were tried, and are held also where the kernel does not list them: in a container it hides a
        // lock whose taker has ended and left it to a child.
        held.extend(0..slot);
        held.remove(&slot);
        clients = clients.max(held.len() + 1);
        let taken = held.iter().filter_map(|other| place.nth(*other));
        let own = place.share.difference(&CpuSet::all(taken));
        if own.is_empty() {
            return Err(BindingError::TooFew(format!(
                "{place}: other GPUs and clients reserve every core there"
            )));
        }
        cpus = cpus.union(&own);
        match place.nth(slot) {
            Some(core) => workers = workers.union(core),
            None => notes.push(format!(
                "{place}: no core of its own is left for client {}",
                slot + 1
            )),
        }
    }
    let service = places
        .first()
        .and_then(|place| place.service.as_ref()?.first());
    let mut binding = Binding::to(host, machine, cpus, clients);
    if !workers.is_empty() {
        binding.variables.push((WORKER, workers.to_string()));
    }
    let service = service.map(|cpu| (SERVICE, cpu.to_string()));
    binding.variables.extend(service);
    let elsewhere = places.iter().filter(|place| place.home != Home::NodeLocal);
    notes.extend(elsewhere.map(|place| place.to_string()));
    binding.notes = notes;
    binding.claims = claims.into_values().collect();
    Ok(binding)
}

impl Binding {
    /// To these CPUs, which this many clients of a GPU share. Thread pools get what the quota lets run of them, unless the
    /// caller has sized them.
    fn to(host: &Host, machine: &Machine, cpus: CpuSet, clients: usize) -> Self {
        let threads = (cpus.len().min(machine.usable()) / clients).max(1);
        let unset = THREADS
            .into_iter()
            .filter(|key| host.env.get(key).is_none());
        Self {
            cpus,
            variables: unset.map(|key| (key, threads.to_string())).collect(),
            claims: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// The caller may be bound itself, and then the cores that it was told are not those of this program.
    fn forget_others(&mut self, host: &Host) {
        for key in [WORKER, SERVICE] {
            let is_told = self.variables.iter().any(|(told, _)| *told == key);
            if !is_told && host.env.get_filled(key).is_some() {
                self.variables.push((key, String::new()));
            }
        }
    }

    /// Binds this process, and with it the program that takes its place or that it starts. Never to more than before.
    pub fn apply(&self, host: &Host) -> Result<(), BindingError> {
        let refused = |reason: String| BindingError::Refused {
            cpus: self.cpus.clone(),
            reason,
        };
        for claim in &self.claims {
            claim
                .hand_on()
                .map_err(|error| refused(error.to_string()))?;
        }
        let mut mask = Mask::new();
        if self.cpus.iter().all(|cpu| cpu < Mask::MAX_CPU) {
            self.cpus.iter().for_each(|cpu| mask.set(cpu));
            return sched_setaffinity(None, &mask).map_err(|errno| refused(errno.to_string()));
        }
        self.apply_with_taskset(host).map_err(refused)
    }

    /// The call of a program as somebody would make it who binds it by hand.
    pub fn shown(&self, call: Invocation) -> Invocation {
        let mut args = vec![
            "-c".into(),
            self.cpus.to_string().into(),
            call.program.into(),
        ];
        args.extend(call.args);
        Invocation {
            program: "taskset".into(),
            args,
            ..call
        }
    }

    /// On machines with more CPUs than the system call's usual argument has bits.
    fn apply_with_taskset(&self, host: &Host) -> Result<(), String> {
        let program = host
            .find_program("taskset")
            .ok_or("taskset is not on PATH")?;
        let us = std::process::id().to_string();
        let call = Invocation {
            purpose: "bind this process",
            program,
            args: ["-cp", &self.cpus.to_string(), &us]
                .map(Into::into)
                .to_vec(),
            env: Vec::new(),
            stdin: Vec::new(),
            mode: Mode::Captured(std::time::Duration::from_secs(5)),
        };
        match host.runner.run(&call) {
            Ok(finished) if finished.status.success() => Ok(()),
            Ok(finished) => Err(finished.said()),
            Err(error) => Err(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::host::fake::{Answer, exits, host};

    fn apply(answer: Option<Answer>) -> Result<(), BindingError> {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bin")).unwrap();
        let taskset = root.path().join("bin/taskset");
        std::fs::write(&taskset, "").unwrap();
        std::fs::set_permissions(taskset, std::fs::Permissions::from_mode(0o755)).unwrap();
        let host = host(root.path(), answer.into_iter().collect());
        let machine = Machine::default();
        let cpus = "2000-2003".parse().unwrap();
        Binding::to(&host, &machine, cpus, 1).apply(&host)
    }

    #[test]
    fn cpus_beyond_the_system_calls_bits_are_left_to_taskset() {
        let us = std::process::id().to_string();
        let done: Answer = Box::new(move |call| {
            assert_eq!(call.program, Path::new("/bin/taskset"));
            assert_eq!(call.args, ["-cp", "2000-2003", &us]);
            exits(0, "", "")(call)
        });
        apply(Some(done)).unwrap();
        let failed = exits(
            1,
            "",
            "taskset: failed to set pid's affinity: Invalid argument",
        );
        let refusal = apply(Some(failed)).unwrap_err().to_string();
        assert!(refusal.ends_with("Invalid argument"), "{refusal}");
    }
}
