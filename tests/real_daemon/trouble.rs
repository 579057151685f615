//! Daemons that died, froze, lost their sockets or belong to somebody else.

use std::process::Command;

use nix::sys::signal::Signal;

use crate::support::{N0, Sandbox, U0, is_running, pid, signal, wait_until, without_root};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_killed_daemon_is_stale_and_its_leftovers_are_no_obstacle",
        killed,
    ),
    ("a_stopped_daemon_hangs_nothing", stopped),
    (
        "an_unmanaged_daemon_on_the_same_pipe_is_not_touched",
        unmanaged,
    ),
    (
        "a_daemon_whose_pipe_was_taken_over_is_the_one_that_is_stopped",
        taken_over,
    ),
    (
        "a_daemon_without_its_sockets_is_still_stopped",
        without_sockets,
    ),
    ("a_daemon_whose_record_was_lost_is_adopted", adopted),
    ("a_record_of_a_stranger_stops_nobody", stranger),
    ("a_longer_old_pid_file_does_not_matter", old_pid_file),
    (
        "another_pid_namespace_neither_judges_nor_destroys",
        other_pid_namespace,
    ),
    (
        "a_silent_client_makes_doctor_report_and_not_hang",
        silent_client,
    ),
    ("an_interrupted_start_is_put_right", interrupted_start),
];

fn killed(driver: &Driver) {
    let machine = driver.machine();
    let given = ["--pipe-dir", "p", "--log-dir", "l"];
    for options in [&[][..], &given] {
        let daemon = pid(&machine.start(&[&["--name", "a"], options].concat()));
        machine.kill(daemon);
        let status = machine.run(["status", "--json"]).succeeds().json();
        assert_eq!(status["managed_daemons"][0]["record_state"], "stale");
        machine
            .run(["env", "--name", "a"])
            .fails_in_the_shell("stale");
        let again = pid(&machine.start(&[&["--name", "a"], options].concat()));
        assert_eq!(machine.daemons(), [again]);
        machine.run(["stop"]).succeeds();
        machine.has_no_daemon();
    }
}

fn stopped(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&["--name", "a"]));
    signal(daemon, Signal::SIGSTOP);
    wait_until("it is stopped", || {
        machine
            .run(["status"])
            .succeeds()
            .text()
            .contains("state=not-answering")
    });
    machine.run(["env"]).succeeds();
    machine.run(["doctor"]).finish().exited(1);
    machine.run(["start", "--name", "a"]).fails("already live");
    machine
        .run(["stop"])
        .fails("does not answer")
        .said("kill -CONT");
    assert!(machine.record_file("a").exists());
    signal(daemon, Signal::SIGCONT);
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}

/// A daemon started by hand in `p` and `l`.
fn by_hand(machine: &Sandbox) -> i32 {
    machine.sh(
        "mkdir -m 700 p l; CUDA_MPS_PIPE_DIRECTORY=$S/p CUDA_MPS_LOG_DIRECTORY=$S/l $CONTROL -d",
    );
    machine.daemons()[0]
}

/// Whether the control program itself still refuses to start a second daemon in `p`.
fn guards_its_directory(machine: &Sandbox) -> bool {
    let output = Command::new(machine.bin().join("nvidia-cuda-mps-control"))
        .arg("-d")
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("p"))
        .env("CUDA_MPS_LOG_DIRECTORY", machine.path("l"))
        .output()
        .unwrap();
    !output.status.success()
}

fn unmanaged(driver: &Driver) {
    let machine = driver.machine();
    let stranger = by_hand(&machine);
    let start = ["start", "--name", "a", "--pipe-dir", "p", "--log-dir", "l2"];
    machine
        .run(start)
        .fails("another control daemon already uses")
        .said(&format!("pid {stranger}"));
    assert!(guards_its_directory(&machine));
    assert_eq!(machine.daemons(), [stranger]);
    assert!(!machine.record_file("a").exists());
    let status = machine
        .run(["status"])
        .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("p"))
        .succeeds();
    assert!(
        status
            .text()
            .contains(&format!("unmanaged pipe=<S>/p pid={stranger}\n"))
    );
    machine
        .run(["doctor"])
        .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("p"))
        .succeeds();
    machine
        .run(["stop", "--all"])
        .prints("{\n  \"stopped\": []\n}\n");
    assert!(is_running(stranger));
}

fn taken_over(driver: &Driver) {
    let machine = driver.machine();
    let ours = pid(&machine.start(&["--name", "a", "--pipe-dir", "p", "--log-dir", "l"]));
    machine.sh(
        "rm p/control_lock; CUDA_MPS_PIPE_DIRECTORY=$S/p CUDA_MPS_LOG_DIRECTORY=$S/l $CONTROL -d",
    );
    let stranger = *machine
        .daemons()
        .iter()
        .find(|daemon| **daemon != ours)
        .unwrap();
    machine
        .run(["env"])
        .fails_in_the_shell("not reachable")
        .said(&format!("pid {stranger}"));
    machine.run(["stop", "--name", "a"]).succeeds();
    assert!(!is_running(ours));
    assert!(is_running(stranger));
    assert!(guards_its_directory(&machine));
}

fn without_sockets(driver: &Driver) {
    for loss in [
        "rm $RT/a/pipe/control",
        "rm $RT/a/pipe/control_privileged",
        "rm $RT/a/pipe/control $RT/a/pipe/control_privileged",
        "rm -r $RT/a/pipe",
    ] {
        let machine = driver.machine();
        let daemon = pid(&machine.start(&["--name", "a"]));
        machine.sh(loss);
        if !machine.runtime().join("a/pipe/control").exists() {
            machine.run(["env"]).fails_in_the_shell("not reachable");
            machine.run(["start", "--name", "a"]).fails("not reachable");
            let status = machine.run(["status"]).succeeds().text();
            assert!(status.contains("state=unreachable"), "{loss}: {status}");
        }
        machine.run(["stop"]).succeeds();
        assert!(!is_running(daemon), "{loss}");
        assert!(!machine.record_file("a").exists());
    }
}

fn adopted(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&[]));
    std::fs::remove_dir_all(machine.records()).unwrap();
    let record = machine
        .run(["start"])
        .succeeds()
        .said("recorded again")
        .json();
    assert_eq!(pid(&record), daemon);
    assert_eq!(machine.daemons(), [daemon]);
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}

fn stranger(driver: &Driver) {
    let machine = driver.machine();
    let daemon = by_hand(&machine);
    let sleeper = crate::support::Sleeper::new();
    let mut record = machine.reference_record("a", sleeper.pid());
    record["pipe_directory"] = machine.path("p").to_str().unwrap().into();
    machine.write_record("a", &record);
    machine.run(["stop", "--name", "a"]).fails("not certain");
    assert!(is_running(sleeper.pid()) && is_running(daemon));
    assert!(machine.record_file("a").exists());
}

fn old_pid_file(driver: &Driver) {
    let machine = driver.machine();
    machine.sh(
        "mkdir -p -m 700 $RT/$N0/pipe; printf 4194304999 >$RT/$N0/pipe/nvidia-cuda-mps-control.pid",
    );
    let daemon = pid(&machine.start(&[]));
    assert_eq!(machine.daemons(), [daemon]);
    let file = machine
        .runtime()
        .join(N0)
        .join("pipe/nvidia-cuda-mps-control.pid");
    let text = std::fs::read_to_string(file).unwrap();
    assert_ne!(text, daemon.to_string(), "the file is of no use");
    assert_eq!(
        text.starts_with(&daemon.to_string()),
        driver.writes_pid_file()
    );
    machine.run(["stop"]).succeeds();
}

fn other_pid_namespace(driver: &Driver) {
    if without_root() {
        return;
    }
    let machine = driver.machine();
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    let daemon = pid(&machine.start(&["--name", "a"]));
    let status = machine.run(["status"]).under(elsewhere).succeeds().text();
    assert!(status.contains("state=other-pid-namespace"), "{status}");
    machine.run(["env"]).under(elsewhere).succeeds();
    for command in [["start", "--name", "a"], ["stop", "--name", "a"]] {
        machine
            .run(command)
            .under(elsewhere)
            .fails("another pid namespace");
    }
    assert!(is_running(daemon));
    machine.run(["stop", "--name", "a"]).succeeds();
    machine.has_no_daemon();
}

/// One connected client that says nothing blocks a control daemon for everybody.
fn silent_client(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    let mut idle = Command::new(machine.bin().join("nvidia-cuda-mps-control"))
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", machine.runtime().join("a/pipe"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let log = machine.runtime().join("a/log/control.log");
    wait_until("it is connected", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.matches("NEW UI").count() > text.matches("UI closed").count()
    });
    let report = machine.run(["doctor"]).finish().exited(1).text();
    assert!(
        report.contains("valid=False") && report.contains("does not answer"),
        "{report}"
    );
    drop(idle.stdin.take());
    idle.wait().unwrap();
    machine.run(["doctor"]).succeeds();
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}

/// What a start that was killed after the launch leaves: an intent and a daemon without a record.
fn interrupted_start(driver: &Driver) {
    for end in ["start", "stop", "all"] {
        let machine = driver.machine();
        let daemon = pid(&machine.start(&["--name", "a"]));
        let file = machine.record_file("a");
        let mut intent: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        intent["pid"] = 999_999.into();
        std::fs::write(file.with_file_name("starting.json"), intent.to_string()).unwrap();
        std::fs::remove_file(&file).unwrap();
        let status = machine.run(["status"]).succeeds().text();
        assert!(
            status.contains("record name=a state=interrupted"),
            "{status}"
        );
        match end {
            "start" => {
                let record = machine.run(["start", "--name", "a"]).succeeds().json();
                assert_eq!(pid(&record), daemon);
                assert_eq!(record["gpu_uuids"][0], U0);
                machine.run(["stop"]).succeeds();
            }
            "stop" => drop(machine.run(["stop", "--name", "a"]).succeeds()),
            _ => drop(machine.run(["stop", "--all"]).succeeds()),
        }
        machine.has_no_daemon();
        assert!(!file.parent().unwrap().exists());
    }
}
