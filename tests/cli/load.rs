//! What `status` shows of each daemon besides its record: servers, clients and age.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{N0, Sandbox, U1, freeze, is_running, pid, signal, uni_cumps, wait_until};

/// The daemon of this name in `status --json`.
fn shown(machine: &Sandbox, name: &str) -> Value {
    let report = machine.run(["status", "--json"]).succeeds().json();
    let daemons = report["managed_daemons"].as_array().unwrap();
    let found = daemons.iter().find(|daemon| daemon["name"] == name);
    found.unwrap().clone()
}

fn counts(daemon: &Value) -> (Value, Value) {
    (daemon["servers"].clone(), daemon["clients"].clone())
}

/// A daemon without a record, which is then recorded as live.
fn recorded(machine: &Sandbox, name: &str) -> i32 {
    let (pipe, log) = (format!("{name}-pipe"), format!("{name}-log"));
    let daemon = machine.start_by_hand(&pipe, &log);
    let mut record = machine.reference_record(name, daemon);
    record["pipe_directory"] = machine.path(&pipe).to_str().unwrap().into();
    record["log_directory"] = machine.path(&log).to_str().unwrap().into();
    machine.write_record(name, &record);
    daemon
}

#[test]
fn a_daemon_tells_its_servers_and_clients() {
    let machine = Sandbox::with_gpus(2);
    machine.conduct("servers 4711\nclients 11 12 13");
    machine.start(&["--name", "a", "--gpus", "0"]);
    machine.conduct("");
    machine.start(&["--name", "b", "--gpus", "1"]);
    let (a, b) = (shown(&machine, "a"), shown(&machine, "b"));
    assert_eq!(counts(&a), (json!(1), json!(3)));
    assert_eq!(counts(&b), (json!(0), json!(0)));
    assert!(a["age_s"].as_u64().unwrap() < 60, "{a:#}");
    let text = machine.run(["status"]).succeeds().text();
    assert!(
        text.contains(" gpus=GPU-U0 servers=1 clients=3 age_s=…\n"),
        "{text}"
    );
    assert!(
        text.contains(" gpus=GPU-U1 servers=0 clients=0 age_s=…\n"),
        "{text}"
    );
}

#[test]
fn a_server_that_ends_meanwhile_does_not_count() {
    let machine = Sandbox::new();
    machine.conduct("servers 4711 4712\nclients 11\nlost 4711");
    machine.start(&["--name", "a"]);
    assert_eq!(counts(&shown(&machine, "a")), (json!(1), json!(1)));
}

#[test]
fn a_person_sees_them_in_columns() {
    let machine = Sandbox::new();
    machine.conduct("servers 4711\nclients 11 12");
    let record = machine.start(&["--name", "a"]);
    let mut stale = machine.reference_record("b", 1);
    stale["process_start_ticks"] = json!(1);
    machine.write_record("b", &stale);
    let line = format!("{} status", uni_cumps().display());
    let call = machine.on_a_terminal(&line).env("NO_COLOR", "1");
    let text = call.succeeds().text().replace("\r\n", "\n");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .skip_while(|line| !line.starts_with("DAEMON"))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let columns = "DAEMON STATE PID GPU SERVERS CLIENTS LIMITS AGE PIPE DIRECTORY";
    assert_eq!(rows[0].join(" "), columns);
    let daemon = pid(&record).to_string();
    assert_eq!(rows[1][..7], ["a", "live", &daemon, "0", "1", "2", "none"]);
    assert!(rows[1][7].ends_with('s'), "{text}");
    assert_eq!(rows[2][..7], ["b", "stale", "1", "0", "-", "-", "none"]);
    assert!(rows[2][7].ends_with('d'), "{text}");
}

#[test]
fn daemons_that_are_silent_cost_their_time_once_and_hide_no_other() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--name", "good", "--gpus", "0"]);
    machine.conduct("answers never");
    for index in 0..10 {
        recorded(&machine, &format!("silent{index}"));
    }
    let begun = Instant::now();
    let report = machine.run(["status", "--json"]).succeeds().json();
    let taken = begun.elapsed();
    assert!(taken >= Duration::from_secs(1), "they were not asked");
    assert!(taken < Duration::from_secs(6), "{taken:?}");
    let daemons = report["managed_daemons"].as_array().unwrap();
    assert_eq!(daemons.len(), 11);
    for daemon in daemons {
        let expected = match daemon["name"] == "good" {
            true => (json!(0), json!(0)),
            false => (Value::Null, Value::Null),
        };
        assert_eq!(daemon["record_state"], "live");
        assert_eq!(counts(daemon), expected, "{daemon:#}");
    }
    assert_eq!(machine.daemons().len(), 11, "a question was left behind");
}

#[test]
fn only_a_daemon_that_can_answer_is_asked() {
    let machine = Sandbox::with_gpus(3);
    let stopped = pid(&machine.start(&["--name", "stopped", "--gpus", "0"]));
    let gone = pid(&machine.start(&["--name", "gone", "--gpus", "1"]));
    machine.start(&["--name", "lost", "--gpus", "2"]);
    freeze(stopped);
    machine.kill(gone);
    machine.sh("rm $RT/lost/pipe/control");
    machine.calls();
    let text = machine.run(["status"]).succeeds().text();
    for state in ["not-answering", "stale", "unreachable"] {
        let line = text.lines().find(|line| line.contains(state)).unwrap();
        assert!(
            line.ends_with(" servers=unknown clients=unknown age_s=…"),
            "{line}"
        );
    }
    let calls = machine.calls();
    assert!(!calls.contains("get_server_list"), "{calls}");
}

#[test]
fn without_the_control_program_nothing_is_told() {
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.remove_program("nvidia-cuda-mps-control");
    let daemon = shown(&machine, N0);
    assert_eq!(daemon["record_state"], "live");
    assert_eq!(counts(&daemon), (Value::Null, Value::Null));
}

#[test]
fn an_age_that_cannot_be_is_unknown() {
    let machine = Sandbox::new();
    let mut record = machine.reference_record("a", 1);
    for created in [json!(4e9), json!(-1e300)] {
        record["created_at"] = created;
        machine.write_record("a", &record);
        assert_eq!(shown(&machine, "a")["age_s"], Value::Null);
        let text = machine.run(["status"]).succeeds().text();
        assert!(text.contains(" age_s=unknown\n"), "{text}");
    }
    record["created_at"] = json!(0);
    machine.write_record("a", &record);
    assert!(shown(&machine, "a")["age_s"].as_u64().unwrap() > 1_700_000_000);
}

#[test]
fn a_status_that_is_interrupted_leaves_no_question_behind() {
    let machine = Sandbox::with_gpus(2);
    machine.conduct("answers never");
    let daemons = [recorded(&machine, "a"), recorded(&machine, "b")];
    machine.calls();
    let child = machine.run(["status"]).spawn();
    wait_until("both are asked", || {
        let calls = std::fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
        calls.matches("get_server_list").count() == 2
    });
    signal(i32::try_from(child.id()).unwrap(), Signal::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(output.stdout, b"");
    let mut left = machine.daemons();
    left.sort();
    let mut expected = daemons;
    expected.sort();
    assert_eq!(left, expected);
}

#[test]
fn a_signal_ends_what_status_asks_side_by_side() {
    for number in [Signal::SIGINT, Signal::SIGTERM] {
        let machine = Sandbox::new();
        machine.conduct("answers never");
        let daemon = recorded(&machine, "a");
        machine.calls();
        machine.script("nvidia-smi", "echo $$ >$0.pid; exec sleep 600");
        let child = machine.run(["status"]).spawn();
        let asked = || {
            let calls = std::fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
            calls.contains("get_server_list")
        };
        let smi = machine.bin().join("nvidia-smi.pid");
        let text = || std::fs::read_to_string(&smi).unwrap_or_default();
        wait_until("both are asked", || asked() && text().ends_with('\n'));
        let begun = Instant::now();
        signal(i32::try_from(child.id()).unwrap(), number);
        let output = child.wait_with_output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(128 + number as i32),
            "{output:?}"
        );
        // Neither was waited for to the end of its time: nvidia-smi has 30 s.
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert!(!is_running(text().trim().parse().unwrap()));
        assert_eq!(machine.daemons(), [daemon]);
    }
}

#[test]
fn doctor_and_env_tell_nothing_of_it() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", U1, "--name", "a"]);
    machine.calls();
    machine.run(["env"]).succeeds();
    assert_eq!(machine.calls(), "", "env asks nobody");
    let report = machine.run(["doctor", "--json"]).with(["--name", "a"]);
    let report = report.finish().json();
    for daemon in report["managed_daemons"].as_array().into_iter().flatten() {
        assert!(daemon.get("servers").is_none(), "{daemon:#}");
    }
    let text = machine.run(["doctor", "--name", "a"]).finish().text();
    assert!(!text.contains("servers="), "{text}");
}
