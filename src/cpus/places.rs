//! Which cores are whose: the pool of each GPU of the machine, and its own cores in there.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::cpus::{CpuSet, HostGpu, Machine};
use crate::gpu::PciAddress;

/// Which cores a GPU picks from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// The allowed cores of its own NUMA node.
    NodeLocal,
    /// Its node is unknown or has too few allowed cores, so those that no GPU with a node of its own reserves.
    Elsewhere,
    /// sysfs does not list it, so all allowed cores.
    Unplaced,
}

/// A GPU's place among the CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The GPU; none for a device that sysfs does not list.
    pub address: Option<PciAddress>,
    /// Its NUMA node as sysfs writes it.
    pub node: Option<String>,
    /// What kind of pool it picks from.
    pub home: Home,
    /// Which of the pool's GPUs it is, from 0.
    pub rank: usize,
    /// How many GPUs pick from the pool.
    pub of: usize,
    /// How many cores the pool has.
    pub cores: usize,
    /// The allowed CPUs of the pool.
    pub pool: CpuSet,
    /// The cores of this GPU's workers in the order in which they are taken: that of the first one, which is reserved,
    /// then its turn of those that nobody reserves. Empty where the pool has fewer than two cores a GPU.
    pub workers: Vec<CpuSet>,
    /// The core of this GPU's service, which is reserved. A service runs on its first CPU.
    pub service: Option<CpuSet>,
    /// The pool without what other GPUs reserve, for a process that is to be bound as a whole. Empty where others
    /// reserve everything.
    pub share: CpuSet,
}

impl Place {
    /// The core of the `nth` worker on this GPU, from 0.
    pub fn nth(&self, nth: usize) -> Option<&CpuSet> {
        self.workers.get(nth)
    }

    /// Whether the pool has the two cores that each of its GPUs takes.
    pub fn fits(&self) -> bool {
        self.cores >= 2 * self.of
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nth, of, pool) = (self.rank + 1, self.of, &self.pool);
        match self.home {
            Home::NodeLocal => {
                write!(
                    f,
                    "GPU {nth} of {of} on a NUMA node with the allowed CPUs {pool}"
                )
            }
            Home::Elsewhere if pool.is_empty() => write!(
                f,
                "GPU {nth} of {of} whose NUMA node is unknown or has too few allowed cores, and other GPUs reserve all the rest"
            ),
            Home::Elsewhere => write!(
                f,
                "GPU {nth} of {of} whose NUMA node is unknown or has too few allowed cores, on what other GPUs leave, {pool}"
            ),
            Home::Unplaced => write!(f, "a device that sysfs does not list, on all allowed CPUs"),
        }
    }
}

/// GPUs that pick from one pool, in the order of their ranks.
struct Group<'m> {
    gpus: Vec<&'m HostGpu>,
    home: Home,
    /// The pool as places in the list of cores, ascending.
    pool: Vec<usize>,
}

impl Group<'_> {
    fn fits(&self) -> bool {
        self.pool.len() >= 2 * self.gpus.len()
    }

    /// What the GPU at `rank` keeps from all others: its first worker's core and its service's, counted from both ends
    /// of the pool.
    fn reserved(&self, rank: usize) -> Option<(usize, usize)> {
        let from_the_top = self.pool.len().checked_sub(rank + 1)?;
        self.fits()
            .then(|| (self.pool[rank], self.pool[from_the_top]))
    }

    fn all_reserved(&self) -> impl Iterator<Item = usize> + '_ {
        let pairs = (0..self.gpus.len()).filter_map(|rank| self.reserved(rank));
        pairs.flat_map(|(first, service)| [first, service])
    }
}

/// The GPUs by NUMA node, each node with its allowed cores. Nodes do not share cores: where their lists overlap, the
/// shortest one comes first. A GPU without a node lists all online CPUs, and in the reference takes those of another.
fn by_node<'m>(machine: &'m Machine, cores: &[CpuSet]) -> Vec<Group<'m>> {
    let mut nodes: Vec<Vec<&HostGpu>> = Vec::new();
    for gpu in &machine.gpus {
        match nodes.iter_mut().find(|node| node[0].node == gpu.node) {
            Some(node) => node.push(gpu),
            None => nodes.push(vec![gpu]),
        }
    }
    let local = |gpus: &[&HostGpu]| gpus[0].local.clone().unwrap_or_default();
    nodes.sort_by_key(|gpus| local(gpus).len());
    let mut taken = BTreeSet::new();
    let with_pool = |gpus: Vec<&'m HostGpu>| {
        let local = local(&gpus);
        let is_local = |core: &CpuSet| core.first().is_some_and(|cpu| local.contains(cpu));
        let group = Group {
            home: Home::NodeLocal,
            pool: (0..cores.len())
                .filter(|core| !taken.contains(core) && is_local(&cores[*core]))
                .collect(),
            gpus,
        };
        if group.fits() {
            taken.extend(group.pool.iter().copied());
        }
        group
    };
    nodes.into_iter().map(with_pool).collect()
}

/// All groups: those whose node has two cores a GPU, and the other GPUs as one group over what those leave.
///
/// In the reference a node with an allowed CPU or two keeps its GPUs from pinning anything; here they join the GPUs
/// whose node has none.
fn groups<'m>(machine: &'m Machine, cores: &[CpuSet]) -> Vec<Group<'m>> {
    let (mut groups, without): (Vec<_>, Vec<_>) =
        by_node(machine, cores).into_iter().partition(Group::fits);
    let mut gpus: Vec<&HostGpu> = without.into_iter().flat_map(|group| group.gpus).collect();
    if gpus.is_empty() {
        return groups;
    }
    gpus.sort_by_key(|gpu| gpu.address);
    let reserved: BTreeSet<usize> = groups.iter().flat_map(Group::all_reserved).collect();
    groups.push(Group {
        gpus,
        home: Home::Elsewhere,
        pool: (0..cores.len())
            .filter(|core| !reserved.contains(core))
            .collect(),
    });
    groups
}

/// Deals each core that nobody reserves to one of the GPUs that may use it, in turn.
///
/// In the reference a GPU's second worker may take the core that another pool counts as its own, so that deployments
/// on different GPUs collide; here a core has one owner, however many workers there are.
fn dealt(
    groups: &[Group<'_>],
    reserved: &BTreeSet<usize>,
    cores: usize,
) -> BTreeMap<PciAddress, Vec<usize>> {
    let mut hands: BTreeMap<PciAddress, Vec<usize>> = BTreeMap::new();
    let mut turns: BTreeMap<Vec<PciAddress>, usize> = BTreeMap::new();
    for core in (0..cores).filter(|core| !reserved.contains(core)) {
        let takers: Vec<PciAddress> = groups
            .iter()
            .filter(|group| group.fits() && group.pool.binary_search(&core).is_ok())
            .flat_map(|group| group.gpus.iter().map(|gpu| gpu.address))
            .collect();
        if takers.is_empty() {
            continue;
        }
        let turn = turns.entry(takers.clone()).or_default();
        hands
            .entry(takers[*turn % takers.len()])
            .or_default()
            .push(core);
        *turn += 1;
    }
    hands
}

/// The place of each GPU of the machine.
pub fn places(machine: &Machine) -> BTreeMap<PciAddress, Place> {
    let cores = machine.cores_by_performance();
    let groups = groups(machine, &cores);
    let reserved: BTreeSet<usize> = groups.iter().flat_map(Group::all_reserved).collect();
    let mut hands = dealt(&groups, &reserved, cores.len());
    let mut places = BTreeMap::new();
    for group in &groups {
        for (rank, gpu) in group.gpus.iter().enumerate() {
            let dealt = hands.remove(&gpu.address).unwrap_or_default();
            let place = place(group, rank, &dealt, &reserved, &cores);
            places.insert(gpu.address, place);
        }
    }
    places
}

/// The place of the group's GPU at `rank`, to which the cores `dealt` were dealt.
fn place(
    group: &Group<'_>,
    rank: usize,
    dealt: &[usize],
    reserved: &BTreeSet<usize>,
    cores: &[CpuSet],
) -> Place {
    let gpu = group.gpus[rank];
    let own = group.reserved(rank);
    let is_own = |core| own.is_some_and(|(first, service)| first == core || service == core);
    let workers = own.iter().map(|(first, _)| first).chain(dealt);
    let shared = group.pool.iter();
    let shared = shared.filter(|core| !reserved.contains(core) || is_own(**core));
    Place {
        address: Some(gpu.address),
        node: gpu.node.clone(),
        home: group.home,
        rank,
        of: group.gpus.len(),
        cores: group.pool.len(),
        pool: CpuSet::all(group.pool.iter().map(|core| &cores[*core])),
        workers: workers.map(|core| cores[*core].clone()).collect(),
        service: own.map(|(_, service)| cores[service].clone()),
        share: CpuSet::all(shared.map(|core| &cores[*core])),
    }
}

/// The place of a device that sysfs does not list: a GPU where sysfs is hidden, or no GPU at all. Nothing is known that
/// could keep it from the cores of listed GPUs.
pub fn unplaced(machine: &Machine) -> Place {
    let mut workers = machine.cores_by_performance();
    let cores = workers.len();
    let service = workers.pop().filter(|_| cores >= 2);
    Place {
        address: None,
        node: None,
        home: Home::Unplaced,
        rank: 0,
        of: 1,
        cores,
        pool: machine.mask.clone(),
        workers,
        service,
        share: machine.mask.clone(),
    }
}
