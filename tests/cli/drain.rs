//! `stop --drain`: the clients are waited for before anything is stopped.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::clients::serving;
use crate::support::{Sandbox, Sleeper, freeze, is_running, pid, signal, uni_cumps, wait_until};

/// `stop --drain` in the background, once it has asked for the clients.
fn draining(machine: &Sandbox, args: &[&str]) -> Child {
    let stop = machine.run(["stop"].iter().chain(args)).spawn();
    wait_until("it waits for the clients", || {
        let calls = fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
        calls.matches("get_client_list").count() >= 3
    });
    stop
}

#[test]
fn a_stop_that_drains_waits_for_the_clients_before_it_says_quit() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    let record = serving(&machine, &server, &[client.pid()]);
    let mut stop = draining(&machine, &["--drain", "60"]);
    assert!(stop.try_wait().unwrap().is_none());
    assert!(is_running(pid(&record)));
    assert!(!machine.calls().contains("quit"));
    // No record is locked meanwhile, and new clients are served.
    machine.run(["env"]).succeeds();
    machine.run(["start", "--name", "a"]).fails("already live");
    fs::write(machine.path("clients"), "").unwrap();
    let output = stop.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report, json!({"stopped": [record]}));
    machine.has_no_daemon();
    assert!(machine.calls().contains("quit"));
}

#[test]
fn when_the_time_to_drain_is_over_the_daemon_is_stopped_all_the_same() {
    for seconds in ["0", "1"] {
        let machine = Sandbox::new();
        let (server, client) = (Sleeper::new(), Sleeper::new());
        let record = serving(&machine, &server, &[client.pid()]);
        let done = machine.run(["stop", "--drain", seconds]).succeeds();
        assert_eq!(done.json(), json!({"stopped": [record]}));
        let note = format!("note: daemon a was waited for {seconds} s: it still has clients\n");
        assert_eq!(done.stderr, note);
        machine.has_no_daemon();
        assert!(is_running(client.pid()));
    }
}

#[test]
fn interrupted_while_it_drains_nothing_is_stopped() {
    for args in [&["--drain", "60"][..], &["--drain", "60", "--all"]] {
        let machine = Sandbox::with_gpus(2);
        // The first of them has nobody to wait for.
        machine.start(&["--name", "0", "--gpus", "1"]);
        let (server, client) = (Sleeper::new(), Sleeper::new());
        serving(&machine, &server, &[client.pid()]);
        let named = [args, &["--name", "a"]].concat();
        let args = if args.contains(&"--all") {
            args
        } else {
            &named
        };
        let mut stop = draining(&machine, args);
        signal(i32::try_from(stop.id()).unwrap(), Signal::SIGINT);
        wait_until("it has ended", || stop.try_wait().unwrap().is_some());
        let status = stop.wait().unwrap();
        let by_signal = status.signal() == Some(Signal::SIGINT as i32);
        assert!(by_signal || status.code() == Some(130), "{status:?}");
        assert_eq!(machine.daemons().len(), 2);
        assert!(machine.record_file("a").exists() && machine.record_file("0").exists());
        assert!(!machine.calls().contains("quit"));
    }
}

#[test]
fn a_daemon_without_clients_or_that_cannot_be_asked_is_not_waited_for() {
    let begun = Instant::now();
    let machine = Sandbox::new();
    let server = Sleeper::new();
    let record = serving(&machine, &server, &[]);
    let done = machine.run(["stop", "--drain", "60"]).succeeds();
    assert_eq!(done.said_nothing().json(), json!({"stopped": [record]}));
    freeze(pid(&machine.start(&["--name", "a"])));
    machine
        .run(["stop", "--drain", "60"])
        .fails("does not answer");
    machine.run(["stop", "--drain", "60", "--force"]).succeeds();
    machine.has_no_daemon();
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_daemon_that_dies_while_it_is_drained_is_gone() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    let record = serving(&machine, &server, &[client.pid()]);
    let stop = draining(&machine, &["--drain", "60"]);
    let begun = Instant::now();
    machine.kill(pid(&record));
    let output = stop.wait_with_output().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("daemon a was not running; its stale record was removed"),
        "{said}"
    );
}

#[test]
fn the_wait_for_clients_is_shown_to_a_person() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    let line = format!("{} stop --drain 1", uni_cumps().display());
    let text = machine.on_a_terminal(&line).succeeds().text();
    assert!(
        text.contains("| waiting for the clients of daemon a to end (0 s)"),
        "{text:?}"
    );
}

#[test]
fn the_time_to_drain_is_a_number_of_seconds_up_to_a_day() {
    let machine = Sandbox::new();
    for time in ["-1", "soon", "86401", ""] {
        machine
            .run(["stop", &format!("--drain={time}")])
            .breaks_usage();
    }
}
