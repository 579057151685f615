//! The whole tool, told to do one thing after the other in any order, beside a model of what should come of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use proptest::collection::vec;
use proptest::prelude::Just;
use proptest::sample::select;
use proptest::strategy::Strategy;
use proptest::test_runner::TestCaseResult;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use serde_json::Value;

use crate::law;
use crate::support::{Sandbox, pid, uuid};

/// Sequences, and the steps of the longest. Each step is two or three calls of the tool.
const SEQUENCES: u32 = 100;
const STEPS: usize = 16;

const GPUS: usize = 2;
const NAMES: [&str; 3] = ["a", "b", "c"];

const LOOKS: &[&[&str]] = &[
    &["status"],
    &["status", "--json"],
    &["doctor", "--gpus", "0"],
];

#[derive(Clone, Debug)]
enum Step {
    Start {
        name: &'static str,
        gpu: usize,
    },
    Stop(&'static str),
    StopAll,
    /// The daemon of this name crashes, if it runs.
    Crash(&'static str),
    /// One of the commands that only look.
    Look(&'static [&'static str]),
    Env(Option<&'static str>),
}

fn step() -> impl Strategy<Value = Step> {
    let name = || select(&NAMES[..]);
    prop_oneof![
        6 => (name(), 0..GPUS).prop_map(|(name, gpu)| Step::Start { name, gpu }),
        3 => name().prop_map(Step::Stop),
        1 => Just(Step::StopAll),
        1 => name().prop_map(Step::Crash),
        1 => select(LOOKS).prop_map(Step::Look),
        2 => proptest::option::of(name()).prop_map(Step::Env),
    ]
}

/// What should be: the recorded daemons by name, with their GPU.
#[derive(Default)]
struct Model(BTreeMap<&'static str, Daemon>);

struct Daemon {
    gpu: usize,
    pid: i32,
    runs: bool,
}

impl Model {
    fn runs(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|daemon| daemon.runs)
    }

    fn running(&self) -> impl Iterator<Item = &Daemon> {
        self.0.values().filter(|daemon| daemon.runs)
    }
}

/// What lies on the disk: for each path what it is, when it was last changed, and a file's content.
type Disk = BTreeMap<PathBuf, (u64, u32, i64, i64, Vec<u8>)>;

fn disk(machine: &Sandbox) -> Disk {
    let mut found = Disk::new();
    for directory in ["h", "t"] {
        look(&machine.path(directory), &mut found);
    }
    found
}

fn look(path: &Path, found: &mut Disk) {
    let meta = fs::symlink_metadata(path).unwrap();
    let mut content = Vec::new();
    if meta.is_file() {
        content = fs::read(path).unwrap();
    }
    let seen = (
        meta.ino(),
        meta.mode(),
        meta.mtime(),
        meta.mtime_nsec(),
        content,
    );
    found.insert(path.to_owned(), seen);
    if meta.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            look(&entry.unwrap().path(), found);
        }
    }
}

/// The call exits with this, and everything is as it was: the daemons, and each file and directory.
fn changes_nothing(machine: &Sandbox, args: &[&str], code: i32) -> TestCaseResult {
    let before = (machine.daemons(), disk(machine));
    let done = machine.run(args).finish();
    prop_assert_eq!(done.code, code, "{:#?}", done);
    prop_assert_eq!((machine.daemons(), disk(machine)), before, "{:#?}", done);
    Ok(())
}

fn take(machine: &Sandbox, model: &mut Model, step: &Step) -> TestCaseResult {
    match step {
        Step::Start { name, gpu } => {
            let number = gpu.to_string();
            let args = ["start", "--gpus", &number, "--name", name];
            let is_taken = model.running().any(|daemon| daemon.gpu == *gpu);
            if is_taken || model.runs(name) {
                return changes_nothing(machine, &args, 1);
            }
            let done = machine.run(args).finish();
            prop_assert_eq!(done.code, 0, "{:#?}", done);
            let daemon = Daemon {
                gpu: *gpu,
                pid: pid(&done.json()),
                runs: true,
            };
            model.0.insert(name, daemon);
            changes_nothing(machine, &args, 1)
        }
        Step::Stop(name) => {
            let args = ["stop", "--name", name];
            let runs = model.runs(name);
            if model.0.remove(name).is_some() {
                let done = machine.run(args).finish();
                prop_assert_eq!(done.code, i32::from(!runs), "{:#?}", done);
            }
            changes_nothing(machine, &args, 1)
        }
        Step::StopAll => {
            let done = machine.run(["stop", "--all"]).finish();
            prop_assert_eq!(done.code, 0, "{:#?}", done);
            let stopped = done.json()["stopped"]
                .as_array()
                .unwrap()
                .iter()
                .map(pid)
                .collect();
            let running: BTreeSet<i32> = model.running().map(|daemon| daemon.pid).collect();
            prop_assert_eq!(running, stopped);
            model.0.clear();
            changes_nothing(machine, &["stop", "--all"], 0)
        }
        Step::Crash(name) => {
            if let Some(daemon) = model.0.get_mut(name).filter(|daemon| daemon.runs) {
                machine.kill(daemon.pid);
                daemon.runs = false;
            }
            Ok(())
        }
        Step::Look(args) => {
            let serves = model.running().any(|daemon| daemon.gpu == 0);
            let fails = args[0] == "doctor" && !serves;
            changes_nothing(machine, args, i32::from(fails))
        }
        Step::Env(Some(name)) => {
            let fails = !model.runs(name);
            changes_nothing(machine, &["env", "--name", name], i32::from(fails))
        }
        Step::Env(None) => {
            let fails = model.running().count() != 1;
            changes_nothing(machine, &["env"], i32::from(fails))
        }
    }
}

/// The daemons that run are just those that are recorded as they should be, and no two serve one GPU.
fn is_as_it_should_be(machine: &Sandbox, model: &Model) -> TestCaseResult {
    let running: BTreeSet<i32> = model.running().map(|daemon| daemon.pid).collect();
    let found: BTreeSet<i32> = machine.daemons().into_iter().collect();
    prop_assert_eq!(&found, &running);
    let served: BTreeSet<usize> = model.running().map(|daemon| daemon.gpu).collect();
    prop_assert_eq!(served.len(), running.len());
    for name in NAMES {
        let record = fs::read(machine.record_file(name)).ok();
        let record: Option<Value> = record.map(|text| serde_json::from_slice(&text).unwrap());
        let daemon = model.0.get(name);
        prop_assert_eq!(record.is_some(), daemon.is_some(), "the record of {}", name);
        if let (Some(record), Some(daemon)) = (record, daemon) {
            prop_assert_eq!(pid(&record), daemon.pid);
            prop_assert_eq!(&record["gpu_uuids"], &serde_json::json!([uuid(daemon.gpu)]));
        }
        let intent = machine.record_file(name).with_file_name("starting.json");
        prop_assert!(!intent.exists(), "{name} is still being started");
    }
    Ok(())
}

#[test]
fn any_sequence_of_commands_leaves_just_the_recorded_daemons_and_one_a_gpu() {
    law(SEQUENCES, vec(step(), 1..=STEPS), |steps| {
        let machine = Sandbox::with_gpus(GPUS);
        let mut model = Model::default();
        for step in &steps {
            take(&machine, &mut model, step)?;
            is_as_it_should_be(&machine, &model)?;
        }
        Ok(())
    });
}
