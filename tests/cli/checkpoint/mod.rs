//! `checkpoint`: real processes that the stand-in for libcuda takes for CUDA processes leave their GPUs and come back.

mod blockers;
mod cycle;
mod faults;
mod interrupted;
mod ledger;
mod other_gpus;

use std::fs;

use serde_json::Value;

use crate::support::{Call, Sandbox, Sleeper, uuid};

pub(crate) const RUNNING: u32 = 0;
pub(crate) const LOCKED: u32 = 1;
pub(crate) const CHECKPOINTED: u32 = 2;

/// A process that uses CUDA, in this state.
pub(crate) fn target(machine: &Sandbox, state: u32) -> Sleeper {
    let sleeper = Sleeper::new();
    machine.cuda_process(sleeper.pid(), state);
    sleeper
}

/// `checkpoint` with these words, and `--pid` for each of these processes.
pub(crate) fn checkpoint<'s>(
    machine: &'s Sandbox,
    words: &[&str],
    targets: &[&Sleeper],
) -> Call<'s> {
    let pids = targets
        .iter()
        .map(|target| format!("--pid={}", target.pid()));
    machine.run(["checkpoint"]).with(words).with(pids)
}

/// What the driver was made to do, without the questions.
pub(crate) fn acts(machine: &Sandbox) -> String {
    let calls = machine.cuda_calls();
    let acts = calls.lines().filter(|line| {
        let word = line.split(' ').next().unwrap_or_default();
        ["lock", "checkpoint", "restore", "unlock"].contains(&word)
    });
    acts.map(|line| format!("{line}\n")).collect()
}

/// Tells nvidia-smi that these processes have this much memory, in MiB, on these GPUs.
pub(crate) fn uses(machine: &Sandbox, apps: &[(&Sleeper, &str, &str)]) {
    let rows = apps
        .iter()
        .map(|(app, gpu, memory)| format!("{}, {gpu}, {memory}\n", app.pid()));
    fs::write(machine.bin().join("apps.csv"), rows.collect::<String>()).unwrap();
}

/// Tells nvidia-smi the model, the free memory, persistence mode and MIG mode of each GPU.
fn conditions(machine: &Sandbox, gpus: &[(&str, &str, &str, &str)]) {
    let row = |(index, (name, free, persistence, mig)): (usize, &(&str, &str, &str, &str))| {
        format!("{}, {name}, {free}, {persistence}, {mig}\n", uuid(index))
    };
    let rows: String = gpus.iter().enumerate().map(row).collect();
    fs::write(machine.bin().join("gpu-state.csv"), rows).unwrap();
}

/// The suspended processes as `status` shows them.
fn suspended(machine: &Sandbox) -> Vec<Value> {
    let status = machine.run(["status", "--json"]).succeeds().json();
    status["suspended_processes"].as_array().unwrap().clone()
}

/// The files of the ledger.
pub(crate) fn entries(machine: &Sandbox) -> usize {
    let files = fs::read_dir(machine.records().join(".suspended"));
    let names = files
        .into_iter()
        .flatten()
        .map(|file| file.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().ends_with(".json"))
        .count()
}
