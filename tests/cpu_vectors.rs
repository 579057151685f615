//! The vectors that the Python original's CPU plan was recorded with, and what is different here, with the reason.
//!
//! A vector that differs without being in [`CHANGED`] fails, and so does one in there that no longer differs.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use serde_json::{Map, Value, json};
use uni_cumps::cpu_topology;
use uni_cumps::cpus::{self, CpuPlan, CpuSet, Home, HostGpu, Machine, Place, Quota, Setting};
use uni_cumps::gpu::PciAddress;
use uni_cumps::host::Root;

const STRICT: &str = "the kernel writes digits only";
const OLD_QUOTA: &str = "cgroup v1 counts as well";
const PERIOD: &str = "a level with period 0 is skipped like any other that makes no sense";
const ONE_FAMILY: &str = "display and compute GPUs are one family";
const ALL_GPUS: &str = "the machine's GPUs are listed whichever one is asked about";
const SPELLING: &str = "nvidia-smi's spelling of an address is the same address";
const PARTITION: &str = "a CPU belongs to one core, also where sibling lists contradict each other";
const QUOTA: &str = "what is pinned must leave some of the quota";
const FEW_LOCAL: &str =
    "a GPU whose node has too few allowed cores joins those whose node has none";
const NEVER_NEGATIVE: &str = "no CPU has a negative number, so it is refused where it is read";

/// Section and name of a vector, the reason, and the fields of the outcome that are others here.
const CHANGED: &[(&str, &str, &str, &str)] = &[
    (
        "parse_cpu_list",
        "inner_space",
        STRICT,
        r#"{"error": true}"#,
    ),
    ("parse_cpu_list", "plus", STRICT, r#"{"error": true}"#),
    ("parse_cpu_list", "underscore", STRICT, r#"{"error": true}"#),
    (
        "cgroup_quota",
        "hybrid_v1_quota_ignored",
        OLD_QUOTA,
        r#"{"expected": 2.0}"#,
    ),
    (
        "cgroup_quota",
        "zero_period",
        PERIOD,
        r#"{"expected": null}"#,
    ),
    (
        "host_gpus",
        "class_splits",
        ONE_FAMILY,
        r#"{"expected": [
        {"address": "0000:01:00.0", "node": "0", "local": "0-15"},
        {"address": "0000:41:00.0", "node": "0", "local": "0-15"},
        {"address": "0000:81:00.0", "node": "0", "local": "0-15"}]}"#,
    ),
    (
        "host_gpus",
        "class_splits_display",
        ONE_FAMILY,
        r#"{"expected": [
        {"address": "0000:01:00.0", "node": "0", "local": "0-15"},
        {"address": "0000:41:00.0", "node": "0", "local": "0-15"},
        {"address": "0000:81:00.0", "node": "0", "local": "0-15"}]}"#,
    ),
    (
        "host_gpus",
        "unknown_address",
        ALL_GPUS,
        r#"{"expected": [{"address": "0000:01:00.0", "node": "0", "local": "0-15"}]}"#,
    ),
    (
        "plan",
        "auto_one_gpu_smt_quota_2",
        QUOTA,
        r#"{"expected": {
        "kind": "none_quota_too_small", "workers": [], "result": null, "pinned": "",
        "left": 2, "png_threads": 2, "copy_workers": 2}}"#,
    ),
    (
        "plan",
        "auto_address_nvidia_smi_spelling",
        SPELLING,
        r#"{"expected": {
        "workers": [{"cpus": "0", "pool": {"kind": "node_local", "rank": 0, "gpus": 1, "cpus": "0-15"}}]}}"#,
    ),
    (
        "plan",
        "auto_two_node_one_local_core",
        FEW_LOCAL,
        r#"{"expected": {
        "kind": "auto", "workers": [{"cpus": "1,17", "pool": {"kind": "elsewhere", "rank": 0, "gpus": 1}}],
        "result": 8, "pinned": "1,8,17", "left": 15,
        "preprocess_threads": 3, "encode_workers": 1, "copy_workers": 15}}"#,
    ),
    (
        "plan",
        "auto_two_node_sibling_list_malformed",
        PARTITION,
        r#"{"expected": {"result": 16, "pinned": "0,16"}}"#,
    ),
    (
        "plan",
        "auto_compute_first",
        ONE_FAMILY,
        r#"{"expected": {
        "workers": [{"cpus": "1,9", "pool": {"kind": "node_local", "rank": 1, "gpus": 3, "cpus": "0-15"}}],
        "result": 6, "pinned": "1,6,9"}}"#,
    ),
    (
        "plan",
        "auto_display_gpu_alone",
        ONE_FAMILY,
        r#"{"expected": {
        "workers": [{"cpus": "0,8", "pool": {"kind": "node_local", "rank": 0, "gpus": 3, "cpus": "0-15"}}]}}"#,
    ),
    (
        "plan",
        "auto_mixed_classes_in_one_deployment",
        ONE_FAMILY,
        r#"{"expected": {
        "workers": [
            {"cpus": "1,9", "pool": {"kind": "node_local", "rank": 1, "gpus": 3, "cpus": "0-15"}},
            {"cpus": "0,8", "pool": {"kind": "node_local", "rank": 0, "gpus": 3, "cpus": "0-15"}}],
        "result": 6, "pinned": "0-1,6,8-9"}}"#,
    ),
    (
        "plan",
        "explicit_negative",
        NEVER_NEGATIVE,
        r#"{"error": {"kind": "err_not_a_number"}}"#,
    ),
];

/// Compares the outcome of each vector of a section with the recorded one: `{"expected": …}` or `{"error": …}`.
fn check(section: &str, outcome: impl Fn(&Value) -> Value) {
    let vectors = vectors();
    let mut wrong = Vec::new();
    let mut names = BTreeSet::new();
    for (place, vector) in vectors[section].as_array().unwrap().iter().enumerate() {
        let name = vector["name"]
            .as_str()
            .map_or(place.to_string(), str::to_owned);
        let recorded = match vector.get("error") {
            Some(error) => json!({ "error": error }),
            None => json!({ "expected": vector["expected"] }),
        };
        let ours = outcome(vector);
        let changed = CHANGED
            .iter()
            .find(|changed| (changed.0, changed.1) == (section, name.as_str()));
        let expected = match changed {
            Some((_, _, _, fields)) => patched(&recorded, serde_json::from_str(fields).unwrap()),
            None => recorded.clone(),
        };
        if ours != expected {
            wrong.push(format!("{name}: {ours}\n  and not {expected}"));
        }
        if let Some((_, _, reason, _)) = changed
            && ours == recorded
        {
            wrong.push(format!("{name} is no longer different: {reason}"));
        }
        names.insert(name);
    }
    for changed in CHANGED.iter().filter(|changed| changed.0 == section) {
        assert!(
            names.contains(changed.1),
            "there is no vector {}",
            changed.1
        );
    }
    assert!(wrong.is_empty(), "{section}:\n{}", wrong.join("\n"));
}

/// The recorded outcome with other fields; another kind of outcome, or one without fields, is replaced as a whole.
fn patched(recorded: &Value, change: Value) -> Value {
    let (Value::Object(new), Some(Value::Object(old))) =
        (&change["expected"], recorded.get("expected"))
    else {
        return change;
    };
    let mut fields = old.clone();
    fields.extend(new.clone());
    json!({ "expected": fields })
}

fn vectors() -> Value {
    serde_json::from_str(&fs::read_to_string("tests/vectors/cpu-plan.json").unwrap()).unwrap()
}

fn set(list: &Value) -> CpuSet {
    list.as_str().unwrap().parse().unwrap()
}

/// A machine's file tree, built in a temporary directory.
struct Tree {
    _directory: tempfile::TempDir,
    root: Root,
}

fn tree(files: &Map<String, Value>) -> Tree {
    let directory = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = directory.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text.as_str().unwrap()).unwrap();
    }
    Tree {
        root: Root::new(directory.path()),
        _directory: directory,
    }
}

/// The tree of the vector's host, with its own files and without those that it removes.
fn tree_of(vector: &Value) -> Tree {
    let host = vector["host"].as_str().unwrap();
    let mut files = vectors()["hosts"][host].as_object().unwrap().clone();
    if let Some(more) = vector["files"].as_object() {
        files.extend(more.clone());
    }
    for path in vector["remove"].as_array().into_iter().flatten() {
        files.remove(path.as_str().unwrap()).unwrap();
    }
    tree(&files)
}

fn with_quota(mask: CpuSet, cpus: Option<f64>) -> Machine {
    Machine {
        mask,
        quota: cpus.map(|cpus| Quota {
            cpus,
            file: PathBuf::from("/sys/fs/cgroup/cpu.max"),
        }),
        ..Machine::default()
    }
}

#[test]
fn cpu_lists_are_read() {
    check("parse_cpu_list", |vector| {
        match vector["input"].as_str().unwrap().parse::<CpuSet>() {
            Ok(cpus) => json!({ "expected": cpus.iter().collect::<Vec<_>>() }),
            Err(_) => json!({ "error": true }),
        }
    });
}

#[test]
fn cpu_lists_are_written() {
    check("format_cpu_list", |vector| {
        let cpus = vector["input"].as_array().unwrap().iter();
        let cpus: CpuSet = cpus
            .map(|cpu| usize::try_from(cpu.as_u64().unwrap()).unwrap())
            .collect();
        json!({ "expected": cpus.to_string() })
    });
}

#[test]
fn quotas_are_found() {
    check("cgroup_quota", |vector| {
        let tree = tree(vector["files"].as_object().unwrap());
        let quota = cpu_topology::quota(&tree.root);
        json!({ "expected": quota.map(|quota| quota.cpus) })
    });
}

#[test]
fn quotas_leave_so_many_cpus() {
    for vector in vectors()["cgroup_quota"].as_array().unwrap() {
        for usable in vector["usable"].as_array().into_iter().flatten() {
            let machine = with_quota(set(&usable["mask"]), vector["expected"].as_f64());
            assert_eq!(json!(machine.usable()), usable["expected"], "{vector}");
        }
    }
}

#[test]
fn cores_are_found() {
    check("cores", |vector| {
        let tree = tree_of(vector);
        let cores = cpu_topology::machine(&tree.root, set(&vector["mask"])).cores();
        let cores: Vec<Vec<usize>> = cores.iter().map(|core| core.iter().collect()).collect();
        json!({ "expected": cores })
    });
}

#[test]
fn gpus_are_found() {
    let as_recorded = |gpu: &HostGpu| {
        json!({
            "address": gpu.address.to_string(),
            "node": gpu.node,
            "local": gpu.local.as_ref().map(ToString::to_string),
        })
    };
    check("host_gpus", |vector| {
        let gpus = cpu_topology::gpus(&tree_of(vector).root);
        let gpus: Vec<Value> = gpus.iter().map(as_recorded).collect();
        json!({ "expected": gpus })
    });
}

#[test]
fn pools_are_sized() {
    for vector in vectors()["pools"].as_array().unwrap() {
        let usable = usize::try_from(vector["usable"].as_u64().unwrap()).unwrap();
        let machine = with_quota((0..usable).collect(), None);
        let plan = cpus::plan(Setting::Off, &[], &machine).unwrap();
        for (size, found) in sizes(&plan) {
            assert_eq!(json!(found), vector[size], "{size} of {vector}");
        }
    }
}

fn sizes(plan: &CpuPlan) -> [(&'static str, usize); 6] {
    [
        ("usable", plan.usable),
        ("left", plan.left()),
        ("preprocess_threads", plan.preprocess_threads()),
        ("png_threads", plan.png_threads()),
        ("encode_workers", plan.encode_workers()),
        ("copy_workers", plan.copy_workers()),
    ]
}

/// The pool of a worker as the vectors name it.
fn pool(plan: &CpuPlan, place: Option<&Place>) -> Value {
    if plan.kind == cpus::Kind::Explicit {
        return json!({ "kind": "named" });
    }
    let Some(place) = place else {
        return json!({ "kind": "unplaced", "rank": 0, "gpus": 1 });
    };
    let mut pool = json!({ "rank": place.rank, "gpus": place.of });
    match place.home {
        Home::NodeLocal => {
            pool["kind"] = "node_local".into();
            pool["cpus"] = place.pool.to_string().into();
        }
        Home::Elsewhere => pool["kind"] = "elsewhere".into(),
        Home::Unplaced => pool["kind"] = "unplaced".into(),
    }
    pool
}

fn as_recorded(
    plan: &CpuPlan,
    devices: &[Option<PciAddress>],
    places: &BTreeMap<PciAddress, Place>,
) -> Value {
    let place = |worker: usize| devices[worker].and_then(|device| places.get(&device));
    let workers: Vec<Value> = plan
        .workers
        .iter()
        .enumerate()
        .map(|(nth, worker)| json!({ "cpus": worker.cpus.to_string(), "pool": pool(plan, place(nth)) }))
        .collect();
    let mut fields = json!({
        "kind": plan.kind.as_str(),
        "workers": workers,
        "result": plan.service,
        "pinned": plan.pinned().to_string(),
    });
    for (size, found) in sizes(plan) {
        fields[size] = found.into();
    }
    json!({ "expected": fields })
}

#[test]
fn deployments_are_planned() {
    check("plan", |vector| {
        let tree = tree_of(vector);
        let mask = set(&vector["mask"]);
        let machine = Machine {
            quota: with_quota(mask.clone(), vector["quota"].as_f64()).quota,
            ..cpu_topology::machine(&tree.root, mask)
        };
        let devices: Vec<Option<PciAddress>> = vector["addresses"]
            .as_array()
            .unwrap()
            .iter()
            .map(|address| Some(address.as_str()?.parse().unwrap()))
            .collect();
        let setting = match &vector["setting"] {
            Value::String(text) => text.clone(),
            number => number.to_string(),
        };
        let plan = setting
            .parse()
            .and_then(|setting| cpus::plan(setting, &devices, &machine));
        match plan {
            Ok(plan) => as_recorded(&plan, &devices, &cpus::places(&machine)),
            Err(error) => json!({ "error": { "kind": error.kind() } }),
        }
    });
}
