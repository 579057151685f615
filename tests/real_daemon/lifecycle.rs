//! The ordinary life of a daemon.

use std::io::{BufRead, BufReader};
use std::process::Child;

use nix::sys::signal::Signal;

use crate::support::{
    N0, Sandbox, U0, is_running, pid, signal, start_ticks, wait_until, without_root,
};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("start_status_env_stop", start_status_env_stop),
    ("the_session_of_the_readme", the_session_of_the_readme),
    ("stop_then_start_twenty_times", stop_then_start_twenty_times),
    (
        "sixteen_commands_at_once_all_get_their_answer",
        sixteen_at_once,
    ),
    ("doctor_tells_that_it_answers", doctor_tells_that_it_answers),
    (
        "foreground_ends_with_the_signal_and_its_record",
        foreground_ends_with_the_signal,
    ),
    ("foreground_ends_with_stop", foreground_ends_with_stop),
    (
        "foreground_that_is_killed_leaves_a_recorded_daemon",
        foreground_killed,
    ),
    ("foreground_serves_as_pid_1", foreground_serves_as_pid_1),
    (
        "one_of_foreground_and_detached_wins",
        one_of_foreground_and_detached_wins,
    ),
];

fn start_status_env_stop(driver: &Driver) {
    let machine = driver.machine();
    let record = machine.start(&[]);
    let daemon = pid(&record);
    assert_eq!(machine.daemons(), [daemon]);
    assert_eq!(record["process_start_ticks"], start_ticks(daemon).unwrap());
    assert_eq!(
        std::fs::read_to_string(machine.record_file(N0)).unwrap(),
        python_json(&record),
        "start prints the record file"
    );
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True\n\
         gpu index=0 uuid=GPU-U0\n\
         daemon name=gpu-u0 state=live pid={daemon} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…\n\
         compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu\n"
    ));
    machine.run(["env"]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0\n\
         export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe\n\
         export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log\n",
    );
    let stopped = machine.run(["stop"]).succeeds();
    assert_eq!(stopped.json()["stopped"][0], record);
    assert!(!is_running(daemon));
    machine.has_no_daemon();
    let log = machine.runtime().join(N0).join("log/control.log");
    assert!(log.exists(), "the log stays");
    assert!(!machine.runtime().join(N0).join("pipe").exists());
    assert!(!machine.record_file(N0).exists());
}

/// Python's `json.dumps(record, indent=2, sort_keys=True)` and a newline, for ASCII.
fn python_json(record: &serde_json::Value) -> String {
    serde_json::to_string_pretty(record).unwrap() + "\n"
}

/// The line by which the work is to be judged, and the daemon's own answer through the exported variables.
fn the_session_of_the_readme(driver: &Driver) {
    let machine = driver.machine();
    std::os::unix::fs::symlink(crate::support::uni_cumps(), machine.bin().join("uni-cumps"))
        .unwrap();
    let line = "uni-cumps start && eval \"$(uni-cumps env)\" && uni-cumps doctor; \
                echo get_default_active_thread_percentage | nvidia-cuda-mps-control; \
                uni-cumps status --json && uni-cumps stop";
    let session = machine
        .run([""; 0])
        .under(["/bin/sh", "-ec", line])
        .succeeds();
    let text = session.text();
    assert!(text.contains("\nvalid=True\n"), "{text}");
    assert!(text.contains("\n100.0\n"), "{text}");
    assert!(text.contains("\"record_state\": \"live\""), "{text}");
    machine.has_no_daemon();
}

fn stop_then_start_twenty_times(driver: &Driver) {
    let machine = driver.machine();
    let mut before = pid(&machine.start(&["--name", "a"]));
    for _ in 0..20 {
        machine
            .run(["stop", "--name", "a"])
            .succeeds()
            .said_nothing();
        assert!(!is_running(before), "stop returned early");
        let now = pid(&machine.start(&["--name", "a"]));
        assert_ne!(now, before);
        let status = machine.run(["status", "--json"]).succeeds().json();
        assert_eq!(status["managed_daemons"][0]["pid"], now);
        assert_eq!(status["managed_daemons"][0]["record_state"], "live");
        before = now;
    }
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}

fn sixteen_at_once(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&[]);
    let spawn =
        |command: &str| -> Vec<Child> { (0..16).map(|_| machine.run([command]).spawn()).collect() };
    let (doctors, envs) = (spawn("doctor"), spawn("env"));
    for doctor in doctors {
        let output = doctor.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("valid=True"), "{text}");
        assert!(output.status.success());
    }
    for env in envs {
        assert!(env.wait_with_output().unwrap().status.success());
    }
    machine.run(["stop"]).succeeds();
}

fn doctor_tells_that_it_answers(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&[]));
    let report = machine.run(["doctor", "--json"]).succeeds().json();
    let sharing = &report["cuda_process_sharing"];
    assert_eq!(report["valid"], true);
    assert_eq!(sharing["control_pid"], daemon);
    assert_eq!(sharing["server_pid"], serde_json::Value::Null);
    assert_eq!(report["plan"]["gpus"][0]["uuid"], U0);
}

/// A foreground daemon, and the pid in the record that it has printed.
fn foreground(machine: &Sandbox) -> (Child, i32) {
    let mut child = machine
        .run(["start", "--foreground", "--name", "f"])
        .spawn();
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    for line in out.lines() {
        let line = line.unwrap();
        text.push_str(&line);
        if line == "}" {
            break;
        }
    }
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    (child, pid(&record))
}

fn foreground_ends_with_the_signal(driver: &Driver) {
    for (number, code) in [
        (Signal::SIGTERM, 143),
        (Signal::SIGINT, 130),
        (Signal::SIGHUP, 129),
    ] {
        let machine = driver.machine();
        let (mut child, daemon) = foreground(&machine);
        assert_eq!(machine.daemons(), [daemon]);
        assert!(machine.record_file("f").exists(), "recorded while it runs");
        signal(i32::try_from(child.id()).unwrap(), number);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        machine.has_no_daemon();
        assert!(!machine.record_file("f").exists());
    }
}

fn foreground_ends_with_stop(driver: &Driver) {
    let machine = driver.machine();
    let (mut child, _) = foreground(&machine);
    machine.run(["stop"]).succeeds();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    machine.has_no_daemon();
    assert!(!machine.record_file("f").exists());
}

fn foreground_killed(driver: &Driver) {
    let machine = driver.machine();
    let (mut child, daemon) = foreground(&machine);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_running(daemon));
    let status = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(status["managed_daemons"][0]["record_state"], "live");
    machine.run(["stop", "--name", "f"]).succeeds();
    machine.has_no_daemon();
}

/// As the first process of a container: signals without a handler would be lost, and orphans are ours to reap.
fn foreground_serves_as_pid_1(driver: &Driver) {
    if without_root() {
        return;
    }
    let machine = driver.machine();
    let mut unshare = machine
        .run(["start", "--foreground", "--name", "f"])
        .under(["/usr/bin/unshare", "-pf", "--mount-proc", "--kill-child"])
        .spawn();
    wait_until("the daemon is recorded", || {
        machine.record_file("f").exists()
    });
    let first = parent(machine.daemons()[0]);
    // An orphan of that pid namespace ends as a zombie of its first process.
    let orphan = "(sleep 0.05 &) ; exit 0";
    let output = std::process::Command::new("/usr/bin/nsenter")
        .args(["-t", &first.to_string(), "-p", "-m"])
        .args(["/bin/sh", "-c", orphan])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    wait_until("the orphan is reaped", || {
        let children = std::fs::read_to_string(format!("/proc/{first}/task/{first}/children"));
        children.unwrap().split_whitespace().count() == 1
    });
    signal(first, Signal::SIGTERM);
    unshare.wait().unwrap();
    machine.has_no_daemon();
    assert!(!machine.record_file("f").exists());
}

fn parent(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    line.unwrap().trim().parse().unwrap()
}

fn one_of_foreground_and_detached_wins(driver: &Driver) {
    for _ in 0..5 {
        let machine = driver.machine();
        let mut front = machine
            .run(["start", "--name", "n", "--foreground"])
            .spawn();
        let back = machine.run(["start", "--name", "n"]).finish();
        wait_until("one of them runs", || machine.daemons().len() == 1);
        if back.code == 0 {
            assert_eq!(front.wait().unwrap().code(), Some(1));
        } else {
            back.exited(1).said("already live");
            wait_until("it is recorded", || machine.record_file("n").exists());
        }
        machine.run(["stop", "--name", "n"]).succeeds();
        front.wait().unwrap();
        machine.has_no_daemon();
    }
}
