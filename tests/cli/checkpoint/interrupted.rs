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
        calls.lines().any(|line| line.starts_with(slow))
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
fn killed_in_the_middle_it_leaves_a_process_that_runs() {
    for slow in ["lock", "checkpoint", "restore"] {
        let machine = Sandbox::new();
        let target = target(&machine, RUNNING);
        let words = match slow {
            "restore" => {
                checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
                "resume"
            }
            _ => "suspend",
        };
        let child = in_the_middle(&machine, &[words, "--quiet"], &[&target], slow);
        signal(i32::try_from(child.id()).unwrap(), Signal::SIGKILL);
        child.wait_with_output().unwrap();
        go(&machine);
        let unlocked = || {
            machine
                .cuda_calls_so_far()
                .lines()
                .last()
                .is_some_and(|line| line.starts_with("unlock"))
        };
        wait_until("the process runs again", unlocked);
        wait_until("the process runs again", || {
            machine.cuda_state(target.pid()) == RUNNING
        });
        // The next one finds nothing in its way, and the ledger is put right.
        machine.faults("");
        checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
        machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
        assert_eq!(entries(&machine), 0);
    }
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
