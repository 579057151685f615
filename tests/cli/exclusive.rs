//! `start --exclusive`: nobody but the daemon's server computes on its GPUs, and `stop` gives them back as they were.

use std::fs;

use serde_json::json;

use crate::support::{N0, Sandbox, U0, U1, pid};

/// The compute mode of each GPU.
fn modes(machine: &Sandbox) -> Vec<String> {
    let rows = fs::read_to_string(machine.bin().join("gpus.csv")).unwrap();
    let mode = |row: &str| row.split(", ").nth(2).unwrap().to_owned();
    rows.lines().map(mode).collect()
}

#[test]
fn the_gpu_is_exclusive_while_the_daemon_runs() {
    let machine = Sandbox::with_gpus(2);
    let record = machine.start(&["--gpus", "0", "--exclusive"]);
    assert_eq!(record["compute_modes_before"], json!({U0: "Default"}));
    assert_eq!(modes(&machine), ["Exclusive_Process", "Default"]);
    assert!(
        machine
            .calls()
            .contains("nvidia-smi -i GPU-U0 -c EXCLUSIVE_PROCESS\n")
    );
    machine.run(["stop"]).succeeds().said_nothing();
    assert_eq!(modes(&machine), ["Default", "Default"]);
    assert!(
        machine
            .calls()
            .contains("nvidia-smi -i GPU-U0 -c DEFAULT\n")
    );
}

#[test]
fn what_was_exclusive_before_stays_so() {
    let machine = Sandbox::with_gpus(2);
    machine.gpu_rows(format!("0, {U0}, Exclusive_Process\n1, {U1}, Prohibited\n"));
    let record = machine.start(&["--gpus", "0,1", "--exclusive"]);
    assert_eq!(record["compute_modes_before"], json!({U1: "Prohibited"}));
    machine.run(["stop"]).succeeds();
    assert_eq!(modes(&machine), ["Exclusive_Process", "Prohibited"]);
}

#[test]
fn without_an_administrators_rights_the_command_for_one_is_said() {
    let machine = Sandbox::new();
    fs::write(machine.bin().join("no-administrator"), "").unwrap();
    let started = machine.run(["start", "--exclusive"]).succeeds();
    let record = started.json();
    started.said("note: GPU GPU-U0 was not made exclusive: ").said("Insufficient Permissions; as administrator: sudo nvidia-smi -i GPU-U0 -c EXCLUSIVE_PROCESS\n");
    assert_eq!(record["compute_modes_before"], json!(null));
    machine.calls();
    machine.run(["stop"]).succeeds().said_nothing();
    assert!(!machine.calls().contains("nvidia-smi"));
}

#[test]
fn a_mode_that_somebody_has_changed_meanwhile_stays() {
    let machine = Sandbox::new();
    machine.start(&["--exclusive"]);
    machine.gpu_rows(format!("0, {U0}, Prohibited\n"));
    machine.run(["stop"]).succeeds().said("GPU GPU-U0 did not get its compute mode Default back: it is not as it was left; as administrator: sudo nvidia-smi -i GPU-U0 -c DEFAULT");
    assert_eq!(modes(&machine), ["Prohibited"]);
}

#[test]
fn what_cannot_be_given_back_is_said_and_the_daemon_stopped_all_the_same() {
    let machine = Sandbox::new();
    machine.start(&["--exclusive"]);
    fs::write(machine.bin().join("no-administrator"), "").unwrap();
    machine
        .run(["stop"])
        .succeeds()
        .said("Insufficient Permissions; as administrator: sudo nvidia-smi -i GPU-U0 -c DEFAULT");
    machine.has_no_daemon();
    assert!(!machine.record_file(N0).exists());
}

#[test]
fn without_nvidia_smi_the_mode_that_was_there_is_said() {
    let machine = Sandbox::new();
    machine.start(&["--exclusive"]);
    fs::remove_file(machine.bin().join("nvidia-smi")).unwrap();
    machine
        .run(["stop"])
        .succeeds()
        .said("GPU GPU-U0 did not get its compute mode Default back: nvidia-smi is not on PATH; as administrator: sudo nvidia-smi -i GPU-U0 -c DEFAULT");
    machine.has_no_daemon();
}

#[test]
fn a_start_that_fails_gives_the_gpu_back() {
    let machine = Sandbox::new();
    machine.conduct("launch fail no memory");
    machine
        .run(["start", "--exclusive"])
        .fails("did not start the daemon");
    assert_eq!(modes(&machine), ["Default"]);
    machine.has_no_daemon();
}

#[test]
fn a_daemon_that_was_lost_leaves_the_gpu_to_the_next_one_or_gives_it_back() {
    let machine = Sandbox::new();
    let lost = machine.start(&["--exclusive"]);
    machine.kill(pid(&lost));
    let next = machine.start(&["--exclusive"]);
    assert_eq!(next["compute_modes_before"], json!({U0: "Default"}));
    assert_eq!(modes(&machine), ["Exclusive_Process"]);
    machine.kill(pid(&next));
    let plain = machine.start(&[]);
    assert_eq!(plain["compute_modes_before"], json!(null));
    assert_eq!(modes(&machine), ["Default"]);
    machine.run(["stop"]).succeeds();
    let lost = machine.start(&["--exclusive"]);
    machine.kill(pid(&lost));
    machine.run(["prune"]).succeeds();
    assert_eq!(modes(&machine), ["Default"]);
}

#[test]
fn a_dry_run_shows_the_call_and_changes_nothing() {
    let machine = Sandbox::new();
    let shown = machine
        .run(["start", "--exclusive", "--dry-run"])
        .succeeds()
        .text();
    assert!(
        shown.contains("nvidia-smi -i GPU-U0 -c EXCLUSIVE_PROCESS\n"),
        "{shown}"
    );
    assert_eq!(modes(&machine), ["Default"]);
}

#[test]
fn what_has_no_compute_mode_is_refused_or_left_alone() {
    let machine = Sandbox::new();
    machine.gpu_rows(format!("0, {U0}, [N/A]\n"));
    machine
        .run(["start", "--exclusive"])
        .succeeds()
        .said("the compute mode of GPU index 0 (GPU-U0) is unknown and stays so");
    machine.run(["stop"]).succeeds();
    machine.gpu_rows(format!("0, {U0}, Default, Enabled\n"));
    let mig = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f";
    let list =
        format!("GPU 0: NVIDIA A100 (UUID: {U0})\n  MIG 3g.20gb     Device  0: (UUID: {mig})\n");
    fs::write(machine.bin().join("list.txt"), list).unwrap();
    machine
        .run(["start", "--exclusive"])
        .fails("a MIG instance cannot be made exclusive");
}

#[test]
fn a_daemon_that_is_kept_does_not_become_exclusive_and_that_is_told() {
    let machine = Sandbox::with_gpus(2);
    machine.run(["start", "--gpus", "all"]).succeeds();
    let again = ["start", "--gpus", "all", "--exclusive"];
    for gpu in ["u0", "u1"] {
        let upper = gpu.to_uppercase();
        machine.run(again).succeeds().said(&format!(
            "note: its GPU GPU-{upper} is not exclusive and stays so; to have it exclusive: uni-cumps stop --name gpu-{gpu}, and the same start again\n"
        ));
    }
    assert_eq!(modes(&machine), ["Default", "Default"]);
    machine.run(["stop", "--all"]).succeeds();
    machine.run(again).succeeds();
    let kept = machine.run(again).succeeds();
    assert!(!kept.stderr.contains("is not exclusive"), "{kept:?}");
    assert_eq!(modes(&machine), ["Exclusive_Process", "Exclusive_Process"]);
}
