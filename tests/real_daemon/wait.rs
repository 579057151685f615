//! Waiting for NVIDIA's own daemon, and what `status` learns from it.

use serde_json::{Value, json};

use crate::support::{freeze, is_running, pid, signal};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("a_wait_ends_when_somebody_starts_it", ready),
    ("a_daemon_without_clients_is_idle_at_once", idle),
    ("a_wait_ends_when_somebody_stops_it", gone),
    ("status_shows_that_it_has_nothing_to_do", nothing_to_do),
    ("a_frozen_daemon_is_waited_for", frozen),
];

fn ready(driver: &Driver) {
    let machine = driver.machine();
    let wait = ["wait", "--name", "a", "--for", "ready", "--json"];
    let wait = machine.run(wait).spawn();
    let daemon = pid(&machine.start(&["--name", "a"]));
    let output = wait.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let expected =
        json!({"record_state": "live", "pid": daemon, "servers": 0, "clients": 0, "reason": null});
    assert_eq!(report["state"], expected);
}

fn idle(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    for condition in ["idle", "ready"] {
        let wait = ["wait", "--timeout", "0", "--for", condition, "--json"];
        let report = machine.run(wait).succeeds().json();
        assert_eq!(report["reached"], true);
    }
    let wait = ["wait", "--timeout", "1", "--for", "attached=1"];
    machine
        .run(wait)
        .fails("waited 1 s in vain for daemon a to have a client")
        .said(", servers 0, clients 0\n");
}

fn gone(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&["--name", "a"]));
    let wait = machine.run(["wait", "--for", "gone", "--json"]).spawn();
    machine.run(["stop", "--name", "a"]).succeeds();
    let output = wait.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!is_running(daemon));
    // Whoever waited may start it again.
    machine.run(["wait", "--for", "gone"]).succeeds();
    machine.start(&["--name", "a"]);
}

fn nothing_to_do(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    let report = machine.run(["status", "--json"]).succeeds().json();
    let daemon = &report["managed_daemons"][0];
    assert_eq!(daemon["servers"], 0, "{daemon:#}");
    assert_eq!(daemon["clients"], 0, "{daemon:#}");
    assert!(daemon["age_s"].as_u64().unwrap() < 60, "{daemon:#}");
}

fn frozen(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&["--name", "a"]));
    freeze(daemon);
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["managed_daemons"][0]["servers"], Value::Null);
    machine
        .run(["wait", "--for", "ready", "--timeout", "0"])
        .fails("in vain for daemon a to be ready")
        .said("its process is stopped");
    let wait = machine.run(["wait", "--for", "ready"]).spawn();
    signal(daemon, nix::sys::signal::Signal::SIGCONT);
    let output = wait.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}
