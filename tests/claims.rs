//! Claims on GPUs: the scenarios that the Python original's were recorded with, and what is different here, with the
//! reason; where the lock files are; and what a client of a made-up machine is bound to while others hold claims.

#![allow(clippy::unwrap_used)]

#[path = "laws/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "support/mod.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Barrier;
use std::thread;

use nix::sys::stat::{Mode, umask};
use serde_json::{Value, json};
use uni_cumps::Host;
use uni_cumps::binding::{self, Binding};
use uni_cumps::claims::{Claim, ClaimError, Locks};
use uni_cumps::cli::Cpus;
use uni_cumps::gpu::{GpuUuid, PciAddress};

use crate::support::{U0, U1, set_mode};

/// What `run --cpus auto` asks for.
const AUTO: binding::Wanted<'static> = binding::Wanted {
    cpus: &Cpus::Auto,
    lock_prefix: None,
    shown: false,
};

const ONCE: &str = "a process claims its GPUs once, and so is refused its own";
const REGULAR: &str = "only a regular file is a lock";

/// Scenarios whose steps end otherwise here: the kinds in their order, and the reason.
const CHANGED: &[(&str, &[&str], &str)] = &[
    ("reclaim_is_idempotent", &["ok", "held", "held"], ONCE),
    (
        "directory_in_the_way",
        &["cannot_lock", "cannot_lock"],
        REGULAR,
    ),
    ("fifo_in_the_way", &["cannot_lock"], REGULAR),
];

/// Scenarios with a second user: `tests/cli/bound.rs` plays them with real ones.
const OF_USERS: [&str; 3] = [
    "other_user_can_lock_0644_file",
    "other_user_refused_while_held",
    "other_user_0600_file",
];

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

/// What came of a claim, in the words of the scenarios.
fn kind<T>(claimed: &Result<T, ClaimError>) -> &'static str {
    match claimed {
        Ok(_) => "ok",
        Err(ClaimError::Held { .. }) => "held",
        Err(ClaimError::Unusable { .. } | ClaimError::NoPlace) => "cannot_lock",
    }
}

/// What is in the way of a scenario before it begins.
fn set_up(root: &Path, setup: &Value) {
    let Some(what) = setup["make"].as_str() else {
        return;
    };
    let path = root.join(format!("p-{}.lock", setup["address"].as_str().unwrap()));
    match what {
        "dir" => fs::create_dir(path).unwrap(),
        "symlink" => symlink(setup["to"].as_str().unwrap(), path).unwrap(),
        "fifo" => nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o644)).unwrap(),
        _ => panic!("{setup}"),
    }
}

/// The lock files and their modes.
fn files(root: &Path) -> Value {
    let entries = fs::read_dir(root).unwrap().map(Result::unwrap);
    let files = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().unwrap();
        let address = name.strip_prefix("p-")?.strip_suffix(".lock")?.to_owned();
        let mode = fs::symlink_metadata(entry.path()).unwrap().mode() & 0o7777;
        Some((address, json!(format!("{mode:o}"))))
    });
    Value::Object(files.collect())
}

#[test]
fn the_scenarios_of_the_original_end_as_recorded() {
    let text = fs::read_to_string("tests/vectors/cpu-plan.json").unwrap();
    let vectors: Value = serde_json::from_str(&text).unwrap();
    let scenarios = vectors["claims"].as_array().unwrap();
    assert_eq!(scenarios.len(), 16);
    for scenario in scenarios {
        let name = scenario["name"].as_str().unwrap();
        if !OF_USERS.contains(&name) {
            play(name, scenario);
        }
    }
}

fn play(name: &str, scenario: &Value) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let host = fake::host(root);
    set_up(root, &scenario["setup"]);
    let bits = u32::from_str_radix(scenario["umask"].as_str().unwrap(), 8).unwrap();
    let before = umask(Mode::from_bits_truncate(bits));
    let steps = scenario["steps"].as_array().unwrap();
    let mut held: BTreeMap<&str, Vec<BTreeMap<PciAddress, Claim>>> = BTreeMap::new();
    let mut kinds = Vec::new();
    for step in steps {
        let process = step["proc"].as_str().unwrap();
        if step["op"] == "kill" {
            held.remove(process);
            continue;
        }
        let addresses = step["addresses"].as_array().unwrap().iter();
        let addresses: Vec<PciAddress> = addresses
            .filter_map(|text| Some(address(text.as_str()?)))
            .collect();
        let claimed = Locks::of(&host, Some(Path::new("/p"))).claim(&addresses);
        kinds.push(kind(&claimed));
        held.entry(process).or_default().extend(claimed.ok());
    }
    umask(before);
    let recorded: Vec<&str> = steps
        .iter()
        .filter_map(|step| step["kind"].as_str())
        .collect();
    let changed = CHANGED.iter().find(|changed| changed.0 == name);
    let expected = changed.map_or(&recorded[..], |changed| changed.1);
    assert_eq!(kinds, expected, "{name}");
    let mut files_after = scenario["files_after"].clone();
    if name == "reclaim_is_idempotent" {
        // Refused before it came to the second one.
        files_after.as_object_mut().unwrap().remove("0000:41:00.0");
    }
    assert_eq!(files(root), files_after, "{name}");
}

#[test]
fn a_refused_claim_gives_back_what_it_had_taken() {
    let directory = tempfile::tempdir().unwrap();
    let host = fake::host(directory.path());
    let mut locks = Locks::of(&host, Some(Path::new("/p")));
    let [first, second, third] = ["0000:01:00.0", "0000:41:00.0", "0000:81:00.0"].map(address);
    let _held = locks.claim(&[third]).unwrap();
    // In whichever order they are named.
    for addresses in [[first, second, third], [third, second, first]] {
        assert_eq!(kind(&locks.claim(&addresses)), "held");
        let free = locks.claim(&[second, first]);
        assert_eq!(kind(&free), "ok");
    }
}

/// A machine whose GPUs, by node, sit near these CPUs, and whose process may use CPUs 0 to 15.
fn machine(root: &Path, gpus: &[(&str, &str)]) -> Host {
    fake::write(root, "proc/self/status", "Cpus_allowed_list:\t0-15\n");
    fs::create_dir_all(root.join("run/lock")).unwrap();
    symlink("/proc/locks", root.join("proc/locks")).unwrap();
    for (number, ((node, local), uuid)) in gpus.iter().zip([U0, U1]).enumerate() {
        let address = format!("0000:{}1:00.0", number + 1);
        for (file, text) in [
            ("vendor", "0x10de"),
            ("class", "0x030200"),
            ("numa_node", node),
            ("local_cpulist", local),
        ] {
            fake::write(root, &format!("sys/bus/pci/devices/{address}/{file}"), text);
        }
        let file = format!("proc/driver/nvidia/gpus/{address}/information");
        fake::write(root, &file, format!("GPU UUID: \t {uuid}\n"));
    }
    fake::host(root)
}

fn auto(host: &Host, gpus: &[&str]) -> Binding {
    let gpus: Vec<GpuUuid> = gpus.iter().map(|gpu| gpu.parse().unwrap()).collect();
    binding::find(host, &AUTO, &gpus).unwrap()
}

/// The CPUs, the worker's and the service's.
fn places(binding: &Binding) -> (String, &str, &str) {
    let variable = |key| {
        let found = binding.variables.iter().find(|(name, _)| *name == key);
        found.map_or("", |(_, value)| value.as_str())
    };
    (
        binding.cpus.to_string(),
        variable("UNI_CUMPS_WORKER_CPUS"),
        variable("UNI_CUMPS_SERVICE_CPU"),
    )
}

fn threads(binding: &Binding) -> &str {
    &binding.variables[0].1
}

#[test]
fn clients_of_a_gpu_get_one_core_after_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let host = machine(directory.path(), &[("0", "0-15")]);
    let one = auto(&host, &[U0]);
    assert_eq!(places(&one), ("0-15".to_owned(), "0", "15"));
    assert_eq!(threads(&one), "16");
    let two = auto(&host, &[U0]);
    assert_eq!(places(&two), ("1-15".to_owned(), "1", "15"));
    assert_eq!(threads(&two), "7");
    let three = auto(&host, &[U0]);
    assert_eq!(places(&three), ("2-15".to_owned(), "2", "15"));
    drop(two);
    let again = auto(&host, &[U0]);
    assert_eq!(places(&again), ("1,3-15".to_owned(), "1", "15"));
    assert_eq!(again.claims.len(), 1);
    assert_eq!(again.claims[0].slot, 1);
}

#[test]
fn clients_are_counted_where_the_kernel_does_not_list_their_locks() {
    // In a container a lock is not listed any more once the process that took it has ended and left it to a child.
    let directory = tempfile::tempdir().unwrap();
    let host = machine(directory.path(), &[("0", "0-15")]);
    fs::remove_file(directory.path().join("proc/locks")).unwrap();
    let _one = auto(&host, &[U0]);
    let two = auto(&host, &[U0]);
    assert_eq!(places(&two), ("1-15".to_owned(), "1", "15"));
    assert_eq!(threads(&two), "7");
}

#[test]
fn clients_of_two_gpus_of_a_node_do_not_meet() {
    let directory = tempfile::tempdir().unwrap();
    let host = machine(directory.path(), &[("0", "0-15"), ("0", "0-15")]);
    let one = auto(&host, &[U0]);
    let other = auto(&host, &[U1]);
    assert_eq!(places(&one), ("0,2-13,15".to_owned(), "0", "15"));
    assert_eq!(places(&other), ("1-14".to_owned(), "1", "14"));
    // A client of both is the second one of each.
    let both = auto(&host, &[U1, U0]);
    assert_eq!(both.claims.len(), 2);
    assert!(both.claims.iter().all(|claim| claim.slot == 1));
    assert!(
        !both.cpus.contains(0) && !both.cpus.contains(1),
        "{}",
        both.cpus
    );
}

// Where the files are.

#[test]
fn locks_are_looked_for_where_they_are_made() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let host = machine(root, &[("0", "0-15")]);
    fs::create_dir(root.join("tmp")).unwrap();
    // Somebody's own directory is in the place.
    fs::create_dir(root.join("run/lock/uni-cumps")).unwrap();
    set_mode(root.join("run/lock/uni-cumps"), 0o755);
    let binding = auto(&host, &[U0]);
    let gpu = address("0000:11:00.0");
    assert!(
        root.join("tmp/uni-cumps-locks/0000:11:00.0.0.lock")
            .exists()
    );
    let holders = Locks::of(&host, None).holders(&gpu);
    assert_eq!(holders.len(), 1);
    assert_eq!(holders[0].pid, i32::try_from(std::process::id()).ok());
    drop(binding);
    assert_eq!(Locks::of(&host, None).holders(&gpu), []);
}

#[test]
fn a_place_that_is_a_link_is_not_followed() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let host = machine(root, &[("0", "0-15")]);
    fs::create_dir(root.join("elsewhere")).unwrap();
    set_mode(root.join("elsewhere"), 0o1777);
    symlink(root.join("elsewhere"), root.join("run/lock/uni-cumps")).unwrap();
    // There is no /tmp either.
    let gpu: GpuUuid = U0.parse().unwrap();
    let refused = binding::find(&host, &AUTO, &[gpu]).err();
    assert_eq!(
        refused.unwrap().to_string(),
        "there is no directory for the locks of GPUs: neither /run/lock/uni-cumps nor /tmp/uni-cumps-locks can be used"
    );
    assert_eq!(fs::read_dir(root.join("elsewhere")).unwrap().count(), 0);
    let mode = fs::metadata(root.join("elsewhere")).unwrap().permissions();
    assert_eq!(mode.mode() & 0o7777, 0o1777);
}

#[test]
fn clients_that_start_at_once_all_get_locks_of_their_own() {
    for _ in 0..50 {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let host = machine(root, &[("0", "0-15")]);
        fs::create_dir(root.join("tmp")).unwrap();
        let gpu = address("0000:11:00.0");
        let start = Barrier::new(6);
        let client = || {
            start.wait();
            Locks::of(&host, None).claim(&[gpu]).unwrap()
        };
        let claims: Vec<_> = thread::scope(|scope| {
            let clients: Vec<_> = (0..6).map(|_| scope.spawn(client)).collect();
            clients.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let slots: BTreeSet<usize> = claims.iter().map(|claim| claim[&gpu].slot).collect();
        assert_eq!(slots.len(), 6);
        // Whoever was first has made the place for all of them, and nothing beside it.
        assert!(!root.join("tmp/uni-cumps-locks").exists());
        assert_eq!(fs::read_dir(root.join("run/lock")).unwrap().count(), 1);
    }
}
