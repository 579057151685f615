//! Several calls at once: one daemon, one success, and a plain word for the others.

use std::fs;
use std::process::{Child, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;

use crate::support::{Call, N0, Sandbox, pid};

/// Starts all of the calls and then waits for each.
fn at_once<'s>(calls: impl IntoIterator<Item = Call<'s>>) -> Vec<Output> {
    let children: Vec<Child> = calls.into_iter().map(Call::spawn).collect();
    children
        .into_iter()
        .map(|child| child.wait_with_output().unwrap())
        .collect()
}

/// The output of the one call that succeeded; each of the others failed with this sentence.
#[track_caller]
fn one_winner(outputs: Vec<Output>, sentence: &str) -> Value {
    let (winners, losers): (Vec<_>, Vec<_>) = outputs
        .into_iter()
        .partition(|output| output.status.success());
    for loser in losers {
        assert_eq!(loser.status.code(), Some(1), "{loser:?}");
        assert!(loser.stdout.is_empty(), "{loser:?}");
        let said = String::from_utf8_lossy(&loser.stderr);
        assert!(said.contains(sentence), "{said}");
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    serde_json::from_slice(&winners[0].stdout).unwrap()
}

/// The daemon of this record is the only one, and it is recorded and live.
#[track_caller]
fn is_the_daemon(machine: &Sandbox, record: &Value) {
    assert_eq!(machine.daemons(), [pid(record)]);
    let report = machine.run(["status", "--json"]).succeeds().json();
    let daemons = report["managed_daemons"].as_array().unwrap();
    assert_eq!(daemons.len(), 1);
    assert_eq!(daemons[0]["pid"], record["pid"]);
    assert_eq!(daemons[0]["record_state"], "live");
    assert!(report["other_records"].as_array().unwrap().is_empty());
}

#[test]
fn race_start_same_name_2() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        let outputs = at_once((0..2).map(|_| machine.run(["start"])));
        let record = one_winner(outputs, "is already live with pid");
        is_the_daemon(&machine, &record);
    }
}

#[test]
fn race_start_same_name_8() {
    for _ in 0..5 {
        let machine = Sandbox::new();
        let outputs = at_once((0..8).map(|_| machine.run(["start"])));
        let record = one_winner(outputs, "is already live with pid");
        is_the_daemon(&machine, &record);
    }
}

#[test]
fn race_start_explicit_2() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        let pipe = format!("--pipe-dir={}", machine.path("p").display());
        let log = format!("--log-dir={}", machine.path("l").display());
        let start = || machine.run(["start", "--name", "a", &pipe, &log]);
        let record = one_winner(at_once([start(), start()]), "is already live with pid");
        is_the_daemon(&machine, &record);
    }
}

#[test]
fn race_start_two_names() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        let outputs = at_once(["a", "b"].map(|name| machine.run(["start", "--name", name])));
        let record = one_winner(outputs, "already serves GPU");
        is_the_daemon(&machine, &record);
    }
}

#[test]
fn race_start_after_kill9() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        let first = machine.start(&[]);
        machine.kill(pid(&first));
        let outputs = at_once((0..2).map(|_| machine.run(["start"])));
        let record = one_winner(outputs, "is already live with pid");
        is_the_daemon(&machine, &record);
    }
}

#[test]
fn race_reader_partial_record() {
    let machine = Sandbox::new();
    let over = AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !over.load(Ordering::Relaxed) {
                if let Ok(content) = fs::read(machine.record_file(N0)) {
                    let record: Value = serde_json::from_slice(&content)
                        .unwrap_or_else(|error| panic!("{error} in {content:?}"));
                    assert_eq!(record["name"], N0);
                    seen += 1;
                }
            }
            seen
        });
        for _ in 0..15 {
            machine.start(&[]);
            machine.run(["stop"]).succeeds();
        }
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(seen > 0, "the reader saw a record");
}

#[test]
fn race_stop_stop() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        let record = machine.start(&["--name", "a"]);
        let outputs = at_once((0..2).map(|_| machine.run(["stop", "--name", "a"])));
        let report = one_winner(outputs, "no daemon named a is recorded");
        assert_eq!(report["stopped"][0]["pid"], record["pid"]);
        machine.has_no_daemon();
        assert!(!machine.record_file("a").exists());
    }
}

#[test]
fn a_start_and_a_stop_at_once_leave_a_recorded_daemon_or_none() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        machine.start(&["--name", "a"]);
        let outputs = at_once([
            machine.run(["stop", "--name", "a"]),
            machine.run(["start", "--name", "a"]),
        ]);
        assert_eq!(outputs[0].status.code(), Some(0), "{outputs:?}");
        match outputs[1].status.code() {
            Some(0) => {
                let record = serde_json::from_slice(&outputs[1].stdout).unwrap();
                is_the_daemon(&machine, &record);
            }
            code => {
                assert_eq!(code, Some(1), "{outputs:?}");
                machine.has_no_daemon();
                assert!(!machine.record_file("a").exists());
            }
        }
    }
}
