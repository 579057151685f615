//! Who is suspended is remembered, shown, offered, and forgotten.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Sandbox, Sleeper, U0, U1};

use super::{CHECKPOINTED, RUNNING, checkpoint, entries, suspended, target, uses};

#[test]
fn status_shows_who_is_suspended_and_resume_takes_the_only_one() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U1, "812")]);
    checkpoint(&machine, &["suspend"], &[&target]).succeeds();
    let line =
        format!("suspended pid={pid} state=checkpointed program=sleep gpus=GPU-U1 memory_mib=812");
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.lines().any(|found| found == line), "{status}");
    let entry = &suspended(&machine)[0];
    assert_eq!(entry["pid"], pid);
    assert_eq!(entry["state"], "checkpointed");
    assert_eq!(entry["gpus"], json!([{"uuid": U1, "memory_mib": 812}]));
    assert!(entry["suspended_at"].as_f64().unwrap() > 1e9);
    let file = machine.records().join(".suspended");
    let mode = |path: &std::path::Path| crate::directories::mode(path);
    assert_eq!(mode(&file), 0o700);

    machine.run(["checkpoint", "resume"]).succeeds();
    assert_eq!(machine.cuda_state(pid), RUNNING);
    assert_eq!(suspended(&machine), Vec::<Value>::new());
    machine
        .run(["checkpoint", "resume"])
        .fails("no process of yours is suspended here")
        .said("hint: uni-cumps checkpoint suspend --pid PID");
    machine.run(["checkpoint", "resume", "--all"]).prints("");
}

#[test]
fn of_several_suspended_processes_one_must_be_named_or_all() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    for target in &targets {
        checkpoint(&machine, &["suspend", "--quiet"], &[target]).succeeds();
    }
    let [a, b] = [targets[0].pid(), targets[1].pid()];
    machine
        .run(["checkpoint", "resume"])
        .fails(&format!("several processes are suspended: {a}, {b}"))
        .said(&format!("hint: --pid {a}, or --all"));
    machine
        .run(["checkpoint", "resume", "--all", "--quiet"])
        .succeeds();
    assert_eq!([a, b].map(|pid| machine.cuda_state(pid)), [RUNNING; 2]);
}

#[test]
fn who_has_ended_is_not_suspended_any_more() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    checkpoint(&machine, &["suspend", "--quiet"], &[&targets[0]]).succeeds();
    machine.kill(targets[0].pid());
    assert_eq!(suspended(&machine), Vec::<Value>::new());
    // Showing it changes nothing; the next command that writes there removes it.
    assert_eq!(entries(&machine), 1);
    checkpoint(&machine, &["suspend", "--quiet"], &[&targets[1]]).succeeds();
    assert_eq!(entries(&machine), 1);
    machine.kill(targets[1].pid());
    let shown = machine.run(["prune", "--dry-run"]).succeeds().text();
    assert!(
        shown.starts_with("would remove ledger entry of a suspended process: <S>/h/"),
        "{shown}"
    );
    machine.run(["prune"]).succeeds();
    assert_eq!(entries(&machine), 0);
}

#[test]
fn who_was_resumed_by_somebody_else_is_not_suspended() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    for target in &targets {
        checkpoint(&machine, &["suspend", "--quiet"], &[target]).succeeds();
    }
    machine.cuda_process(targets[0].pid(), RUNNING);
    assert_eq!(suspended(&machine).len(), 1);
    machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
    assert_eq!(machine.cuda_state(targets[1].pid()), RUNNING);
    machine
        .run(["checkpoint", "resume"])
        .fails("no process of yours is suspended here");
    // What is left in the ledger goes with the next command about it, and is not taken for the truth.
    assert_eq!(entries(&machine), 1);
    uses(&machine, &[(&targets[0], U0, "5")]);
    checkpoint(&machine, &["suspend"], &[&targets[0]]).succeeds();
    assert_eq!(suspended(&machine)[0]["gpus"][0]["memory_mib"], 5);
    checkpoint(&machine, &["resume", "--all"], &[]).succeeds();
    assert_eq!(entries(&machine), 0);
}

#[test]
fn an_entry_under_another_name_is_none() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    machine.sh("cd $REC/.suspended; cp *.json copy.json; echo '{' > bad.json; mkfifo fifo.json");
    assert_eq!(suspended(&machine).len(), 1);
    machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
}

#[test]
fn a_driver_that_hangs_is_not_asked_about_every_process() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 3].map(|state| target(&machine, state));
    let all: Vec<&Sleeper> = targets.iter().collect();
    checkpoint(&machine, &["suspend", "--quiet"], &all).succeeds();
    machine.cuda_calls();
    machine.faults("state hang");
    assert_eq!(suspended(&machine).len(), 3);
    assert_eq!(machine.cuda_calls().matches("state").count(), 1);
}

#[test]
fn a_driver_that_does_not_answer_hides_no_suspended_process() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    machine.libcuda(None);
    assert_eq!(suspended(&machine)[0]["state"], Value::Null);
    let status = machine.run(["status"]).succeeds().text();
    assert!(
        status.contains(&format!("suspended pid={} state=unknown", target.pid())),
        "{status}"
    );
}

#[test]
fn who_cannot_be_remembered_is_not_taken_away_but_comes_back_all_the_same() {
    let machine = Sandbox::new();
    let away = target(&machine, CHECKPOINTED);
    let here = target(&machine, RUNNING);
    // A file where the directory would be.
    fs::write(machine.path("h/.cache"), "").unwrap();
    checkpoint(&machine, &["suspend", "--quiet"], &[&here])
        .fails("cannot create the record directory");
    assert_eq!(machine.cuda_state(here.pid()), RUNNING);
    checkpoint(&machine, &["resume"], &[&away])
        .succeeds()
        .said("the ledger of suspended processes cannot be changed");
    assert_eq!(machine.cuda_state(away.pid()), RUNNING);
    checkpoint(&machine, &["resume"], &[&away])
        .unset("HOME")
        .env("HOME", "relative")
        .succeeds();
}
