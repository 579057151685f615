//! What the planner knows of a machine: the CPUs that may be used, how they make up cores, and where its GPUs sit.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::cpus::CpuSet;
use crate::gpu::PciAddress;

/// How much CPU time a cgroup lets its processes use.
#[derive(Clone, Debug, PartialEq)]
pub struct Quota {
    /// In CPUs: 2.5 means two and a half seconds of CPU time each second.
    pub cpus: f64,
    /// The file that says so, as the machine names it.
    pub file: PathBuf,
}

/// An NVIDIA GPU as sysfs lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostGpu {
    /// Its place on the bus.
    pub address: PciAddress,
    /// `numa_node` as it is written, `-1` where the firmware does not say; absent where the kernel knows no nodes.
    pub node: Option<String>,
    /// `local_cpulist`, where it is known and not empty. For the node `-1` the kernel lists all online CPUs.
    pub local: Option<CpuSet>,
}

/// Everything that the planner sees.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Machine {
    /// The CPUs that this process may run on. Offline ones are not among them.
    pub mask: CpuSet,
    /// The tightest quota of this process's cgroups.
    pub quota: Option<Quota>,
    /// `thread_siblings_list` of each CPU of the mask. A CPU that is missing is a core of its own.
    pub siblings: BTreeMap<usize, CpuSet>,
    /// The machine's GPUs, whether this process may use them or not, in the order of their addresses.
    pub gpus: Vec<HostGpu>,
    /// How fast each CPU of the mask is, in a unit that only compares CPUs of this machine; empty where nothing says it.
    pub performance: BTreeMap<usize, u64>,
}

impl Machine {
    /// How many CPUs may run at once: those of the mask, or what the quota lets run, rounded down; at least 1.
    pub fn usable(&self) -> usize {
        let mask = self.mask.len();
        // A float's conversion saturates, so a huge quota is no limit.
        let quota = self.quota.as_ref().map(|quota| quota.cpus.floor() as usize);
        quota.map_or(mask, |quota| quota.min(mask)).max(1)
    }

    /// The mask's CPUs by core, cores in the order of their first CPU.
    ///
    /// Sibling lists may contradict each other where one cannot be read. The reference then gets overlapping cores and
    /// pins a CPU twice; here a CPU belongs to the first core that names it.
    pub fn cores(&self) -> Vec<CpuSet> {
        let mut taken = BTreeSet::new();
        let mut cores = Vec::new();
        for cpu in self.mask.iter() {
            if taken.contains(&cpu) {
                continue;
            }
            let siblings = self.siblings.get(&cpu).into_iter().flat_map(CpuSet::iter);
            let core: CpuSet = siblings
                .filter(|sibling| self.mask.contains(*sibling) && !taken.contains(sibling))
                .chain([cpu])
                .collect();
            taken.extend(core.iter());
            cores.push(core);
        }
        cores
    }

    /// The cores of the fastest kind first, those of one kind in the order of their first CPU.
    ///
    /// The reference goes by number alone, so that on hybrid machines workers beyond the performance cores, and
    /// whatever is counted from the top, land where the numbering has it.
    pub fn cores_by_performance(&self) -> Vec<CpuSet> {
        let kinds = fastest_of_each_kind(self.performance.values().copied().collect());
        let kind = |core: &CpuSet| {
            let speed = core
                .iter()
                .filter_map(|cpu| self.performance.get(&cpu))
                .max();
            kinds
                .iter()
                .filter(|fastest| Some(*fastest) >= speed)
                .count()
        };
        let mut cores = self.cores();
        cores.sort_by_key(kind);
        cores
    }
}

/// CPUs of one kind differ by a few percent where some may boost higher, and which ones do can change at run time; the
/// kinds of a hybrid machine differ by a fifth and more.
fn fastest_of_each_kind(speeds: BTreeSet<u64>) -> Vec<u64> {
    let mut kinds: Vec<u64> = Vec::new();
    for speed in speeds.into_iter().rev() {
        if kinds
            .last()
            .is_none_or(|fastest| speed < fastest - fastest / 10)
        {
            kinds.push(speed);
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn sets(texts: &[&str]) -> Vec<CpuSet> {
        texts.iter().map(|text| set(text)).collect()
    }

    fn machine(mask: &str, siblings: &[(usize, &str)], performance: &[(usize, u64)]) -> Machine {
        Machine {
            mask: set(mask),
            siblings: siblings
                .iter()
                .map(|(cpu, list)| (*cpu, set(list)))
                .collect(),
            performance: performance.iter().copied().collect(),
            ..Machine::default()
        }
    }

    #[test]
    fn contradictory_sibling_lists_still_make_a_partition() {
        let lists = [(0, "0"), (1, "1,3"), (2, "0-2"), (3, "2-3"), (4, "0-9")];
        assert_eq!(
            machine("0-5", &lists, &[]).cores(),
            sets(&["0", "1,3", "2", "4-5"])
        );
    }

    #[test]
    fn a_mask_of_second_threads_has_cores_of_one_thread() {
        let lists = [(8, "0,8"), (9, "1,9")];
        assert_eq!(machine("8-9", &lists, &[]).cores(), sets(&["8", "9"]));
    }

    #[test]
    fn a_machine_may_have_more_than_1024_cpus() {
        let machine = Machine {
            mask: (0..2048).collect(),
            siblings: (0..2048)
                .map(|cpu| (cpu, CpuSet::from_iter([cpu, (cpu + 1024) % 2048])))
                .collect(),
            ..Machine::default()
        };
        let cores = machine.cores();
        assert_eq!((cores.len(), cores.last()), (1024, Some(&set("1023,2047"))));
    }

    #[test]
    fn performance_cores_come_first_and_are_one_kind_though_some_boost_higher() {
        let lists = [(2, "2-3"), (3, "2-3"), (4, "4-5"), (5, "4-5")];
        let speeds = [
            (0, 3800),
            (1, 3800),
            (2, 5200),
            (3, 5200),
            (4, 5400),
            (5, 5400),
            (6, 2500),
        ];
        assert_eq!(
            machine("0-6", &lists, &speeds).cores_by_performance(),
            sets(&["2-3", "4-5", "0", "1", "6"])
        );
        let speeds = [(0, 1), (1, 2)];
        assert_eq!(
            machine("0-1", &[], &speeds).cores_by_performance(),
            sets(&["1", "0"])
        );
    }

    #[test]
    fn a_quota_is_rounded_down_and_lets_at_least_one_cpu_run() {
        let with = |cpus| Machine {
            quota: Some(Quota {
                cpus,
                file: PathBuf::new(),
            }),
            ..machine("0-7", &[], &[])
        };
        for (cpus, usable) in [(0.5, 1), (1.9, 1), (2.0, 2), (8.5, 8), (1e30, 8)] {
            assert_eq!(with(cpus).usable(), usable);
        }
        assert_eq!(Machine::default().usable(), 1);
    }
}
