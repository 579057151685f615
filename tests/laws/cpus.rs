//! The CPU plan on made-up machines: whatever nodes, threads, GPUs, masks and quotas they have, and whatever sysfs
//! hides, a plan stays within the mask and leaves a CPU, and nobody takes what belongs to another GPU.

use std::path::PathBuf;

use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::{Just, Strategy, any};
use proptest::{prop_assert, prop_assert_eq, prop_assert_ne, prop_oneof};
use uni_cumps::cpus::{CpuPlan, CpuSet, HostGpu, Machine, Quota, Setting, places, plan};
use uni_cumps::gpu::PciAddress;

use crate::{MANY, law};

/// One GPU: its bus, its node, and what sysfs shows of it.
#[derive(Clone, Debug)]
struct Card {
    bus: u8,
    node: usize,
    shows: Shows,
}

#[derive(Clone, Copy, Debug)]
enum Shows {
    Everything,
    NoNode,
    Nothing,
    Overlap,
}

fn cards() -> impl Strategy<Value = Vec<Card>> {
    let shows = prop_oneof![
        6 => Just(Shows::Everything),
        1 => Just(Shows::NoNode),
        1 => Just(Shows::Nothing),
        1 => Just(Shows::Overlap),
    ];
    vec((any::<u8>(), 0..4usize, shows), 0..8).prop_map(|cards| {
        let mut cards: Vec<Card> = cards
            .into_iter()
            .map(|(bus, node, shows)| Card { bus, node, shows })
            .collect();
        cards.sort_by_key(|card| card.bus);
        cards.dedup_by_key(|card| card.bus);
        cards
    })
}

fn machines() -> impl Strategy<Value = Machine> {
    let cpus = prop_oneof![999 => 1..48usize, 1 => 1025..1100usize];
    let threads = prop_oneof![Just(1), Just(2), Just(4)];
    let shape = (cpus, 1..4usize, threads, any::<bool>(), any::<bool>());
    let quota = option::weighted(0.3, 0.1..40.0);
    // Two bits a core.
    let speeds = option::weighted(0.3, any::<u64>());
    let garbled = btree_set(0..64usize, 0..4);
    (shape, cards(), any::<[u64; 2]>(), quota, speeds, garbled).prop_map(
        |((cpus, nodes, threads, adjacent, full), cards, holes, quota, speeds, garbled)| {
            let hole = |cpu: usize| (holes[0] | holes[1]) >> (cpu % 64) & 1 == 0;
            let mask: CpuSet = (0..cpus).filter(|cpu| full || !hole(*cpu)).collect();
            let cores = cpus.div_ceil(threads);
            let core = |cpu: usize| if adjacent { cpu / threads } else { cpu % cores };
            let node = |cpu: usize| core(cpu) * nodes / cores;
            let of_core = |cpu: usize| -> CpuSet {
                let thread = |thread: usize| match adjacent {
                    true => core(cpu) * threads + thread,
                    false => core(cpu) + thread * cores,
                };
                (0..threads).map(thread).filter(|cpu| *cpu < cpus).collect()
            };
            let listed = |cpu: usize| match garbled.contains(&cpu) {
                true => CpuSet::from_iter([cpu, cpu / 2]),
                false => of_core(cpu),
            };
            let local = |wanted: usize| {
                (0..cpus)
                    .filter(|cpu| node(*cpu) == wanted)
                    .collect::<CpuSet>()
            };
            let gpu = |card: &Card| HostGpu {
                address: address(card.bus),
                node: match card.shows {
                    Shows::Everything | Shows::Overlap => Some((card.node % nodes).to_string()),
                    Shows::NoNode => Some("-1".to_owned()),
                    Shows::Nothing => None,
                },
                local: match card.shows {
                    Shows::Everything => Some(local(card.node % nodes)),
                    Shows::NoNode => Some((0..cpus).collect()),
                    Shows::Nothing => None,
                    Shows::Overlap => Some(local(card.node % nodes).union(&local(0))),
                },
            };
            Machine {
                siblings: mask.iter().map(|cpu| (cpu, listed(cpu))).collect(),
                gpus: cards.iter().map(gpu).collect(),
                performance: match speeds {
                    None => Default::default(),
                    Some(bits) => mask
                        .iter()
                        .map(|cpu| (cpu, speed(bits, core(cpu))))
                        .collect(),
                },
                quota: quota.map(|cpus| Quota {
                    cpus,
                    file: PathBuf::from("/sys/fs/cgroup/cpu.max"),
                }),
                mask,
            }
        },
    )
}

fn speed(bits: u64, core: usize) -> u64 {
    [1024, 1000, 700, 400][(bits >> (core % 32 * 2) & 3) as usize]
}

fn address(bus: u8) -> PciAddress {
    format!("0000:{bus:02x}:00.0").parse().unwrap()
}

/// Which GPU each worker is on, as numbers that any machine's GPUs can be counted by.
fn deployments() -> impl Strategy<Value = Vec<Option<usize>>> {
    vec(option::weighted(0.9, 0..8usize), 0..6)
}

fn on(machine: &Machine, devices: &[Option<usize>]) -> Vec<Option<PciAddress>> {
    let gpus = &machine.gpus;
    let nth = |nth: usize| (!gpus.is_empty()).then(|| gpus[nth % gpus.len()].address);
    devices.iter().map(|device| device.and_then(nth)).collect()
}

fn settings() -> impl Strategy<Value = Setting> {
    prop_oneof![
        1 => Just(Setting::Off),
        6 => Just(Setting::Auto),
        3 => (0..64usize).prop_map(Setting::First),
    ]
}

#[test]
fn a_plan_stays_within_the_mask_and_leaves_a_cpu() {
    let inputs = (machines(), deployments(), settings());
    law(MANY, inputs, |(machine, devices, setting)| {
        let devices = on(&machine, &devices);
        let Ok(plan) = plan(setting, &devices, &machine) else {
            prop_assert!(matches!(setting, Setting::First(_)));
            return Ok(());
        };
        let pinned = plan.pinned();
        prop_assert!(pinned.is_subset(&machine.mask));
        prop_assert!(pinned.is_empty() || pinned.len() < machine.mask.len());
        let is_pinned = plan.kind.as_str() == "auto" || plan.kind.as_str() == "explicit";
        prop_assert_eq!(is_pinned, !pinned.is_empty());
        prop_assert_eq!(
            plan.workers.len(),
            if is_pinned { devices.len() } else { 0 }
        );
        if setting == Setting::Auto && machine.quota.is_some() {
            prop_assert!(pinned.is_empty() || pinned.len() < machine.usable());
        }
        prop_assert_ne!(plan.why, "");
        Ok(())
    });
}

#[test]
fn workers_of_one_deployment_share_no_core_and_keep_off_the_service() {
    let inputs = (machines(), deployments(), settings());
    law(MANY, inputs, |(machine, devices, setting)| {
        let Ok(plan) = plan(setting, &on(&machine, &devices), &machine) else {
            return Ok(());
        };
        let cores = machine.cores();
        let mut used: Vec<usize> = Vec::new();
        let workers = plan.workers.iter().filter_map(|worker| worker.cpus.first());
        for cpu in workers.chain(plan.service) {
            used.extend(cores.iter().position(|core| core.contains(cpu)));
        }
        let all = used.len();
        used.sort_unstable();
        used.dedup();
        prop_assert_eq!(used.len(), all);
        for worker in &plan.workers {
            prop_assert!(cores.contains(&worker.cpus));
        }
        Ok(())
    });
}

#[test]
fn deployments_on_different_gpus_never_meet() {
    let pairs = vec((any::<bool>(), 0..8usize), 1..12);
    law(MANY, (machines(), pairs), |(machine, workers)| {
        // Each GPU belongs to one of the two; a worker without a GPU goes with either.
        let of = |side: bool| -> Vec<Option<PciAddress>> {
            let place = |nth: usize| machine.gpus.get(nth).map(|gpu| gpu.address);
            let is_ours = |nth: usize| nth % 2 == usize::from(side);
            workers
                .iter()
                .filter(|(which, nth)| *which == side && (is_ours(*nth) || place(*nth).is_none()))
                .map(|(_, nth)| place(*nth))
                .collect()
        };
        let (one, other) = (of(false), of(true));
        // Where neither worker is on a listed GPU, nothing tells the deployments apart.
        let has_gpu = |devices: &[Option<PciAddress>]| devices.iter().any(Option::is_some);
        if !has_gpu(&one) || !has_gpu(&other) {
            return Ok(());
        }
        let pinned =
            |devices: &[_]| plan(Setting::Auto, devices, &machine).map(|plan| plan.pinned());
        let (one, other) = (pinned(&one).unwrap(), pinned(&other).unwrap());
        prop_assert!(one.is_disjoint(&other), "{one} and {other}");
        Ok(())
    });
}

#[test]
fn each_core_belongs_to_one_gpu() {
    law(MANY, machines(), |machine| {
        let mut taken = CpuSet::default();
        let places = places(&machine);
        prop_assert_eq!(places.len(), machine.gpus.len());
        for place in places.values() {
            prop_assert_eq!(place.service.is_some(), place.fits());
            prop_assert_eq!(place.nth(0).is_some(), place.fits());
            for core in place.workers.iter().chain(&place.service) {
                prop_assert!(taken.is_disjoint(core));
                prop_assert!(core.is_subset(&place.pool) && core.is_subset(&place.share));
                taken = taken.union(core);
            }
        }
        prop_assert!(taken.is_subset(&machine.mask));
        Ok(())
    });
}

#[test]
fn a_share_has_nothing_that_another_gpu_reserves() {
    law(MANY, machines(), |machine| {
        let places = places(&machine);
        for (address, place) in &places {
            prop_assert!(place.share.is_subset(&place.pool));
            prop_assert!(place.pool.is_subset(&machine.mask));
            for (_, other) in places.iter().filter(|(other, _)| *other != address) {
                for core in other.nth(0).into_iter().chain(&other.service) {
                    prop_assert!(place.share.is_disjoint(core));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_plan_depends_on_nothing_but_its_machine_and_its_devices() {
    let inputs = (machines(), deployments(), settings());
    law(MANY, inputs, |(machine, devices, setting)| {
        let devices = on(&machine, &devices);
        let again = plan(setting, &devices, &machine.clone());
        prop_assert_eq!(plan(setting, &devices, &machine), again);
        Ok(())
    });
}

#[test]
fn pools_fit_into_what_is_left() {
    let inputs = (machines(), deployments(), settings());
    law(MANY, inputs, |(machine, devices, setting)| {
        let Ok(plan) = plan(setting, &on(&machine, &devices), &machine) else {
            return Ok(());
        };
        let left = plan.left();
        prop_assert!((1..=plan.usable).contains(&left));
        prop_assert!((1..=machine.mask.len().max(1)).contains(&plan.usable));
        prop_assert!((1..=4).contains(&plan.preprocess_threads()));
        prop_assert!((1..=8).contains(&plan.png_threads()));
        prop_assert!((1..=4).contains(&plan.encode_workers()));
        prop_assert!(plan.preprocess_threads() <= left);
        prop_assert!(images(&plan) <= left);
        prop_assert!(plan.copy_workers() * plan.encode_workers() <= left);
        prop_assert!(plan.copy_workers() >= 1);
        Ok(())
    });
}

fn images(plan: &CpuPlan) -> usize {
    plan.encode_workers() * plan.png_threads()
}

#[test]
fn a_set_of_cpus_is_read_as_it_was_written() {
    law(MANY, btree_set(0..3000usize, 0..64), |cpus| {
        let set: CpuSet = cpus.iter().copied().collect();
        prop_assert_eq!(&set.to_string().parse::<CpuSet>().unwrap(), &set);
        prop_assert!(set.iter().eq(cpus.iter().copied()));
        Ok(())
    });
}

#[test]
fn any_text_is_a_list_of_cpus_or_refused() {
    law(MANY, "[0-9,-]{0,12}|[ -~]{0,12}", |text| {
        if let Ok(set) = text.parse::<CpuSet>() {
            prop_assert_eq!(set.to_string().parse::<CpuSet>().unwrap(), set);
        }
        Ok(())
    });
}

#[test]
fn an_address_is_read_as_it_was_written() {
    let parts = (any::<u32>(), any::<u8>(), 0..32u8, 0..8u8);
    law(MANY, vec(parts, 2), |parts| {
        let written = |(domain, bus, device, function): (u32, u8, u8, u8)| {
            format!("{domain:08X}:{bus:02X}:{device:02X}.{function}")
        };
        let parsed: Vec<PciAddress> = parts
            .iter()
            .map(|part| written(*part).parse().unwrap())
            .collect();
        for address in &parsed {
            prop_assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), *address);
        }
        prop_assert_eq!(parsed[0].cmp(&parsed[1]), parts[0].cmp(&parts[1]));
        Ok(())
    });
}
