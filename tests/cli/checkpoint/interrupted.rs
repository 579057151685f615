//! Signals, an end by force, and two commands at once.

use std::fs;
use std::process::Child;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{Sandbox, Sleeper, signal, wait_until};

use super::{CHECKPOINTED, LOCKED, RUNNING, acts, checkpoint, entries, target};

/// Starts a suspension whose checkpoint waits, and comes back when it does.
fn in_the_middle(machine: &Sandbox, words: &[&str], targets: &[&Sleeper], slow: &str) -> Child {
    machine.faults(&format!("{slow} slow"));
    let child = checkpoint(machine, words, targets).spawn();
    let path = machine.path("cuda/calls");
    wait_until("the step has begun", || {
        let calls = fs::read_to_string(&path).unwrap_or_default();
        let begun = slow.replace(':', " ");
        calls.lines().any(|line| line.starts_with(&begun))
    });
    child
}

fn go(machine: &Sandbox) {
    fs::write(machine.path("cuda/go"), "").unwrap();
}

#[test]
fn ctrl_c_lets_the_step_end_and_then_undoes_what_was_done() {
    for (number, code) in [
        (Signal::SIGINT, 130),
        (Signal::SIGTERM, 143),
        (Signal::SIGHUP, 129),
        (Signal::SIGQUIT, 131),
    ] {
        let machine = Sandbox::new();
        let targets = [RUNNING; 2].map(|state| target(&machine, state));
        let both = [&targets[0], &targets[1]];
        let child = in_the_middle(
            &machine,
            &["suspend", "--quiet", "--json"],
            &both,
            "checkpoint",
        );
        signal(i32::try_from(child.id()).unwrap(), number);
        go(&machine);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let failure: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(failure["error"]["code"], "interrupted");
        assert_eq!(failure["left_in"], json!([]));
        for target in both {
            assert_eq!(machine.cuda_state(target.pid()), RUNNING);
        }
        assert_eq!(entries(&machine), 0);
        // The second one was not even begun.
        assert_eq!(acts(&machine).matches("checkpoint").count(), 1);
    }
}

#[test]
fn a_resumption_that_is_interrupted_leaves_them_suspended() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    let child = in_the_middle(&machine, &["resume", "--quiet"], &[&target], "restore");
    signal(i32::try_from(child.id()).unwrap(), Signal::SIGINT);
    go(&machine);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
    assert_eq!(entries(&machine), 1);
}

#[test]
fn a_signal_that_is_ignored_interrupts_nothing() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    machine.faults("checkpoint slow");
    let call = checkpoint(&machine, &["suspend", "--quiet"], &[&target]);
    let child = call
        .under(["/usr/bin/env", "--ignore-signal=INT,HUP"])
        .command()
        .spawn()
        .unwrap();
    wait_until("the step has begun", || {
        machine.cuda_state(target.pid()) == LOCKED
    });
    for number in [Signal::SIGINT, Signal::SIGHUP] {
        signal(i32::try_from(child.id()).unwrap(), number);
    }
    go(&machine);
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
}

#[test]
fn killed_in_the_middle_it_leaves_processes_that_run() {
    for slow in ["lock", "checkpoint", "restore"] {
        let machine = Sandbox::new();
        let targets = [RUNNING; 2].map(|state| target(&machine, state));
        let both = [&targets[0], &targets[1]];
        let words = match slow {
            "restore" => {
                checkpoint(&machine, &["suspend", "--quiet"], &both).succeeds();
                "resume"
            }
            _ => "suspend",
        };
        // At the second process: the first one has been touched as well.
        let second = targets[1].pid().max(targets[0].pid());
        let slow = format!("{slow}:{second}");
        let child = in_the_middle(&machine, &[words, "--quiet"], &both, &slow);
        signal(i32::try_from(child.id()).unwrap(), Signal::SIGKILL);
        child.wait_with_output().unwrap();
        go(&machine);
        for target in both {
            let unlocked = format!("unlock {}\n", target.pid());
            wait_until("the process runs again", || {
                machine.cuda_calls_so_far().contains(&unlocked)
                    && machine.cuda_state(target.pid()) == RUNNING
            });
        }
        wait_until("nothing is left of it", || machine.processes().is_empty());
        assert_eq!(fs::read_dir(machine.path("t")).unwrap().count(), 0);
        // The next one finds nothing in its way, and the ledger is put right.
        machine.faults("");
        assert_eq!(
            machine.run(["status", "--json"]).succeeds().json()["suspended_processes"],
            json!([])
        );
        checkpoint(&machine, &["suspend", "--quiet"], &both).succeeds();
        machine
            .run(["checkpoint", "resume", "--all", "--quiet"])
            .succeeds();
        assert_eq!(entries(&machine), 0);
    }
}

#[test]
fn a_second_signal_takes_nothing_of_the_report_away() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let child = in_the_middle(
        &machine,
        &["suspend", "--quiet", "--json"],
        &[&target],
        "checkpoint",
    );
    for number in [Signal::SIGINT, Signal::SIGTERM] {
        signal(i32::try_from(child.id()).unwrap(), number);
    }
    go(&machine);
    let output = child.wait_with_output().unwrap();
    let failure: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(failure["error"]["code"], "interrupted");
    assert_eq!(machine.cuda_state(target.pid()), RUNNING);
}

#[test]
fn a_process_that_does_not_answer_keeps_no_other_locked() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    let mut pids = [targets[0].pid(), targets[1].pid()];
    pids.sort_unstable();
    let [answers, silent] = pids;
    machine.faults(&format!(
        "lock:{silent} hang\nunlock:{silent} hang\nstate:{silent}#2 hang\nstate:{silent}#3 hang"
    ));
    let words = ["suspend", "--quiet", "--timeout=0.3", "--deadline=0.3"];
    checkpoint(&machine, &words, &[&targets[0], &targets[1]])
        .fails("could not suspend: the lock of pid");
    assert_eq!(machine.cuda_state(answers), RUNNING);
    let calls = acts(&machine);
    let at = |call: String| calls.find(&call).unwrap_or(usize::MAX);
    assert!(
        at(format!("unlock {answers}\n")) < at(format!("unlock {silent}\n")),
        "{calls}"
    );
}

#[test]
fn two_at_once_take_turns_on_one_process() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let first = in_the_middle(&machine, &["suspend", "--quiet"], &[&target], "checkpoint");
    let second = checkpoint(&machine, &["resume", "--quiet"], &[&target]).spawn();
    go(&machine);
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    // Whichever came second: it found what the other one had left.
    assert_eq!(machine.cuda_state(target.pid()), RUNNING);
    assert_eq!(entries(&machine), 0);
}
