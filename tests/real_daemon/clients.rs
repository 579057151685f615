//! `clients` and `stop --drain` with NVIDIA's own daemon. Without a GPU no server becomes ready, so there is no client; what
//! a server does is played by a script.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bounded_stop::{busy, front_end, with_servers};
use crate::support::{Sleeper, is_running, our_uid, pid, wait_until};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("an_idle_daemon_has_no_servers_and_no_clients", idle),
    ("a_server_that_comes_up_is_told_with_its_state", coming_up),
    ("who_is_no_client_is_not_terminated", no_client),
    ("an_idle_daemon_is_drained_at_once", drained),
    ("a_daemon_that_is_blocked_is_told", blocked),
];

fn idle(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    machine
        .run(["clients"])
        .prints("daemon name=a servers=0\n")
        .said_nothing();
    let report = machine.run(["ps", "--json"]).succeeds().json();
    let expected = json!({"daemons": [{"name": "a", "servers": [], "error": null}]});
    assert_eq!(report, expected);
    assert!(!machine.calls().contains("compute-apps"));
}

fn coming_up(driver: &Driver) {
    let machine = with_servers(driver, 1, "");
    let (_, server) = busy(&machine);
    let report = machine.run(["clients", "--json"]).succeeds().said_nothing();
    let state = match driver.name() {
        "535" => Value::Null,
        _ => json!("INITIALIZING"),
    };
    let expected = json!([{"pid": server, "uid": our_uid(), "state": state, "clients": []}]);
    assert_eq!(report.json()["daemons"][0]["servers"], expected);
    // It has no clients, and so is not waited for.
    let done = machine
        .run(["stop", "--drain", "60", "--timeout", "1"])
        .succeeds();
    assert!(!done.stderr.contains("still has clients"), "{done:?}");
    assert!(!is_running(server));
    machine.has_no_daemon();
}

fn no_client(driver: &Driver) {
    let machine = with_servers(driver, 1, "");
    let (record, server) = busy(&machine);
    let stranger = Sleeper::new();
    for (process, sentence) in [
        (stranger.pid(), "was not found among the clients of"),
        (1, "was not found among the clients of"),
        (server, "is a server of daemon a, and no client"),
        (pid(&record), "is the control process of daemon a"),
    ] {
        let process = process.to_string();
        for signal in [&[][..], &["--signal"]] {
            machine
                .run(["clients", "--terminate", &process])
                .with(signal)
                .fails(sentence);
        }
    }
    assert!(is_running(stranger.pid()) && is_running(server) && is_running(pid(&record)));
}

fn drained(driver: &Driver) {
    let machine = driver.machine();
    let record = machine.start(&["--name", "a"]);
    let begun = Instant::now();
    let done = machine.run(["stop", "--drain", "60"]).succeeds();
    assert_eq!(done.said_nothing().json(), json!({"stopped": [record]}));
    assert!(begun.elapsed() < Duration::from_secs(30));
    machine.has_no_daemon();
}

/// One connected front-end that says nothing keeps every other one out.
fn blocked(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    let mut idle: Command = front_end(&machine, "a");
    let mut idle = idle.stdin(Stdio::piped()).spawn().unwrap();
    let log = machine.runtime().join("a/log/control.log");
    wait_until("it is connected", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.matches("NEW UI").count() > text.matches("UI closed").count()
    });
    let report = machine.run(["clients", "--json"]).finish().exited(1).json();
    assert_eq!(report["daemons"][0]["servers"], json!([]));
    assert!(report["daemons"][0]["error"].is_string(), "{report:#}");
    let begun = Instant::now();
    let stranger = Sleeper::new();
    machine
        .run(["clients", "--terminate", &stranger.pid().to_string()])
        .fails("was not found among the clients of")
        .said("cause: daemon a could not be asked: ");
    assert!(begun.elapsed() < Duration::from_secs(30));
    drop(idle.stdin.take());
    idle.wait().unwrap();
    machine.run(["clients"]).prints("daemon name=a servers=0\n");
}
