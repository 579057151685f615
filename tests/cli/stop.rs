//! `stop`.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde_json::{Value, json};

use crate::support::{
    N0, Sandbox, Sleeper, freeze, is_running, pid, signal, wait_until, without_root,
};

const NOTHING: &str = "{\n  \"stopped\": []\n}\n";

/// `stop` that says that it stopped just these daemons.
#[track_caller]
fn stops(machine: &Sandbox, args: &[&str], records: &[&Value]) {
    let done = machine.run(["stop"].iter().chain(args)).succeeds();
    assert_eq!(done.json(), json!({"stopped": records}));
    for record in records {
        assert!(!is_running(pid(record)));
        let name = record["name"].as_str().unwrap();
        assert!(!machine.record_file(name).exists());
    }
}

/// Waits until a `stop` in the background has said `quit` to the daemon and the control program is gone again.
fn wait_for_quit(machine: &Sandbox) {
    wait_until("quit was said", || {
        let calls = fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
        calls.contains("    < quit\n") && machine.daemons().len() == 1
    });
}

#[track_caller]
fn ends_with_success(child: Child) -> Value {
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn stop_default() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.calls();
    stops(&machine, &[], &[&record]);
    assert_eq!(
        machine.calls(),
        "nvidia-cuda-mps-control
    CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
    CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
    CUDA_MPS_PROTOCOL_VERSION=2
    < <marker>
    < quit
"
    );
    machine.has_no_daemon();
    machine.run(["stop"]).fails("no recorded daemon is live");
}

#[test]
fn stop_zombie() {
    // Where nobody reaps, the process number of the old daemon stays.
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    stops(&machine, &[], &[&record]);
    machine.run(["status"]).prints(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
managed_daemons=none
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
    );
    let next = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&next)]);
    assert_ne!(pid(&next), pid(&record));
}

#[test]
fn stop_privileged_socket_gone() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.sh("rm \"$RT/$N0/pipe/control_privileged\"");
    stops(&machine, &[], &[&record]);
    machine.has_no_daemon();
    machine.start(&[]);
}

#[test]
fn stop_535_privileged_socket_gone() {
    let machine = Sandbox::new();
    machine.conduct("pid-file no");
    let record = machine.start(&[]);
    machine.sh("rm \"$RT/$N0/pipe/control_privileged\"");
    stops(&machine, &[], &[&record]);
    machine.has_no_daemon();
}

#[test]
fn stop_both_sockets_gone() {
    for arg in [None, Some("--all")] {
        let machine = Sandbox::new();
        let record = machine.start(&[]);
        machine.sh("rm \"$RT/$N0/pipe/control\" \"$RT/$N0/pipe/control_privileged\"");
        machine
            .run(["env"])
            .fails_in_the_shell("its control socket is not reachable");
        stops(&machine, arg.as_slice(), &[&record]);
        machine.has_no_daemon();
        machine.start(&[]);
    }
}

#[test]
fn stop_535_handwritten() {
    let machine = Sandbox::new();
    machine.conduct("pid-file no");
    let daemon = machine.start_by_hand("p", "l");
    let mut record = machine.reference_record("a", daemon);
    record["pipe_directory"] = json!(machine.path("p"));
    record["log_directory"] = json!(machine.path("l"));
    machine.write_record("a", &record);
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=a state=live pid={daemon} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
"
    ));
    machine.run(["env"]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/p
export CUDA_MPS_LOG_DIRECTORY=<S>/l
",
    );
    stops(&machine, &[], &[&record]);
    assert!(machine.path("p").is_dir(), "it was given, so it stays");
}

#[test]
fn stop_name() {
    let machine = Sandbox::new();
    let record = machine.start(&["--name", "a"]);
    stops(&machine, &["--name", "a"], &[&record]);
    machine
        .run(["stop", "--name", "a"])
        .fails("no daemon named a is recorded");
}

#[test]
fn stop_all() {
    let machine = Sandbox::with_gpus(2);
    let a = machine.start(&["--gpus", "0", "--name", "a"]);
    let b = machine.start(&["--gpus", "1", "--name", "b"]);
    let other = Sleeper::new();
    let mut stale = machine.reference_record("c", other.pid());
    stale["process_start_ticks"] = 1.into();
    machine.write_record("c", &stale);
    stops(&machine, &["--all"], &[&a, &b]);
    machine.has_no_daemon();
    assert!(is_running(other.pid()));
    assert!(!machine.record_file("c").exists());
    machine.run(["status"]).prints(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
gpu index=1 uuid=GPU-U1
managed_daemons=none
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
    );
    machine
        .run(["stop", "--all"])
        .prints(NOTHING)
        .said_nothing();
}

#[test]
fn stop_name_and_all() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0", "--name", "a"]);
    machine.start(&["--gpus", "1", "--name", "b"]);
    machine.run(["stop", "--name", "a", "--all"]).breaks_usage();
    assert_eq!(machine.daemons().len(), 2);
}

#[test]
fn stop_multiple() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0", "--name", "a"]);
    machine.start(&["--gpus", "1", "--name", "b"]);
    machine
        .run(["stop"])
        .fails("several daemons are live: a, b")
        .said("hint: --name a");
    assert_eq!(machine.daemons().len(), 2);
}

#[test]
fn stop_stale() {
    let machine = Sandbox::new();
    let record = machine.start(&["--name", "a"]);
    machine.kill(pid(&record));
    machine.run(["stop"]).fails("no recorded daemon is live");
    assert!(machine.record_file("a").exists());
    machine
        .run(["stop", "--name", "a"])
        .fails("daemon a was not running; its stale record was removed");
    assert!(!machine.record_file("a").exists());
    machine
        .run(["stop", "--name", "a"])
        .fails("no daemon named a is recorded");
    machine.run(["stop", "--all"]).prints(NOTHING);
}

#[test]
fn stop_all_aborts() {
    let machine = Sandbox::with_gpus(3);
    let a = machine.start(&["--gpus", "0", "--name", "a"]);
    let b = machine.start(&["--gpus", "1", "--name", "b"]);
    let c = machine.start(&["--gpus", "2", "--name", "c"]);
    machine.sh("rm \"$RT/b/pipe/control\" \"$RT/b/pipe/control_privileged\"");
    stops(&machine, &["--all"], &[&a, &b, &c]);
    machine.has_no_daemon();
}

#[test]
fn a_daemon_that_cannot_be_stopped_keeps_no_other_one_running() {
    let machine = Sandbox::with_gpus(3);
    let a = machine.start(&["--gpus", "0", "--name", "a"]);
    let b = machine.start(&["--gpus", "1", "--name", "b"]);
    let c = machine.start(&["--gpus", "2", "--name", "c"]);
    freeze(pid(&b));
    let report = machine
        .run(["stop", "--all"])
        .finish()
        .exited(1)
        .said("the daemon b")
        .json();
    assert_eq!(report["stopped"], json!([a, c]));
    assert_eq!(report["failed"].as_array().unwrap().len(), 1);
    assert_eq!(report["failed"][0]["name"], "b");
    assert_eq!(report["failed"][0]["code"], "not-answering");
    assert_eq!(machine.daemons(), [pid(&b)]);
    assert!(machine.record_file("b").exists());
}

#[test]
fn stop_hung() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    freeze(pid(&record));
    machine
        .run(["stop"])
        .fails("does not answer")
        .said("its process is stopped (state T)")
        .said(&format!("kill -CONT {}", pid(&record)));
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert!(machine.record_file(N0).exists());
    signal(pid(&record), Signal::SIGCONT);
    stops(&machine, &[], &[&record]);
}

#[test]
fn stop_busy_server() {
    // The daemon has accepted `quit` and waits for its clients.
    let machine = Sandbox::new();
    machine.conduct("quit ignored");
    let record = machine.start(&[]);
    let mut stop = machine.run(["stop"]).spawn();
    wait_for_quit(&machine);
    assert!(stop.try_wait().unwrap().is_none(), "stop waits for it");
    assert!(machine.record_file(N0).exists());
    // The last client has ended, and so the daemon ends.
    machine.kill(pid(&record));
    assert_eq!(ends_with_success(stop), json!({"stopped": [record]}));
    assert!(!machine.record_file(N0).exists());
}

#[test]
fn a_stop_that_waits_can_be_interrupted() {
    let machine = Sandbox::new();
    machine.conduct("quit ignored");
    let record = machine.start(&[]);
    let mut stop = machine.run(["stop"]).spawn();
    wait_for_quit(&machine);
    signal(i32::try_from(stop.id()).unwrap(), Signal::SIGINT);
    // It would give up by itself only after 30 s.
    let start = Instant::now();
    wait_until("stop has ended", || stop.try_wait().unwrap().is_some());
    // By the signal itself, or, where the question had not been answered yet, with what a shell makes of that.
    let status = stop.wait().unwrap();
    let by_signal = status.signal() == Some(Signal::SIGINT as i32);
    assert!(by_signal || status.code() == Some(130), "{status:?}");
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(machine.record_file(N0).exists());
    assert_eq!(machine.daemons(), [pid(&record)]);
}

#[test]
fn a_daemon_that_refuses_to_quit_is_named_with_its_answer() {
    let machine = Sandbox::new();
    machine.conduct("quit Not enough privilege to execute quit command");
    let record = machine.start(&[]);
    machine
        .run(["stop"])
        .fails("refused to quit")
        .said("it answered: Not enough privilege to execute quit command");
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert!(machine.record_file(N0).exists());
}

/// A client of the daemon that connects and says nothing.
fn idle_client(machine: &Sandbox, socket_name: &str) -> OwnedFd {
    let path = machine.runtime().join(N0).join("pipe").join(socket_name);
    let client = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .unwrap();
    connect(client.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    client
}

#[test]
fn stop_wedged_by_idle_client() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let client = idle_client(&machine, "control_privileged");
    let mut stop = machine.run(["stop"]).spawn();
    wait_until("quit is being said", || {
        let calls = fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
        calls.contains("    < quit\n")
    });
    assert!(stop.try_wait().unwrap().is_none(), "stop waits");
    assert!(is_running(pid(&record)));
    drop(client);
    assert_eq!(ends_with_success(stop), json!({"stopped": [record]}));
    machine.has_no_daemon();
}

#[test]
fn stop_extra_file() {
    let machine = Sandbox::new();
    let record = machine.start(&["--name", "a"]);
    machine.sh("touch \"$REC/a/notes.txt\"");
    stops(&machine, &["--name", "a"], &[&record]);
    assert!(machine.records().join("a/notes.txt").exists());
    machine.start(&["--name", "a"]);
    assert!(machine.records().join("a/notes.txt").exists());
}

#[test]
fn stop_wrong_target() {
    let machine = Sandbox::new();
    let foreign = machine.start_by_hand("m/p", "m/l");
    let other = Sleeper::new();
    let mut record = machine.reference_record("a", other.pid());
    record["pipe_directory"] = json!(machine.path("m/p"));
    record["log_directory"] = json!(machine.path("m/l"));
    machine.write_record("a", &record);
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=a state=unreachable pid={} mode=single_gpu gpus=GPU-U0 servers=unknown clients=unknown age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
        other.pid()
    ));
    machine
        .run(["stop", "--name", "a"])
        .fails("it is not certain which process is the daemon")
        .said(&format!("pid {foreign} listens on"));
    machine.run(["stop", "--all"]).finish().exited(1);
    assert!(is_running(foreign));
    assert!(is_running(other.pid()));
    assert!(machine.record_file("a").exists());
    machine.run(["env"]).fails_in_the_shell("is not reachable");
}

#[test]
fn stop_hijacked_pipe() {
    let machine = Sandbox::with_gpus(2);
    let record = machine.start(&["--gpus", "0", "--name", "a"]);
    let pipe = machine.runtime().join("a/pipe");
    let before = machine.sh("cd \"$RT/a/pipe\"; ls -li");
    let pipe_dir = format!("--pipe-dir={}", pipe.display());
    machine
        .run(["start", "--gpus", "1", "--name", "b", &pipe_dir])
        .fails("another control daemon already uses the pipe directory");
    assert_eq!(machine.sh("cd \"$RT/a/pipe\"; ls -li"), before);

    // Somebody removes the lock and takes the directory over.
    machine.sh("rm \"$RT/a/pipe/control_lock\"");
    let foreign = machine.start_by_hand("t/uni-cumps/a/pipe", "l2");
    stops(&machine, &["--name", "a"], &[&record]);
    assert_eq!(machine.daemons(), [foreign]);
    machine.sh(&format!(
        "echo get_server_list | CUDA_MPS_PIPE_DIRECTORY={} \"$CONTROL\"",
        pipe.display()
    ));
}

#[test]
fn stop_no_control_binary() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.remove_program("nvidia-cuda-mps-control");
    machine
        .run(["stop"])
        .fails("nvidia-cuda-mps-control is not on PATH")
        .said("hint: install it");
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert!(machine.record_file(N0).exists());
}

#[test]
fn stop_start_immediately() {
    let machine = Sandbox::new();
    for _ in 0..5 {
        let record = machine.start(&[]);
        stops(&machine, &[], &[&record]);
        machine.has_no_daemon();
    }
}

#[test]
fn pid_namespace_stop() {
    if without_root() {
        return;
    }
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    for args in [vec!["stop"], vec!["stop", "--name", N0]] {
        machine
            .run(args)
            .under(elsewhere)
            .fails("was started in another pid namespace");
    }
    let report = machine
        .run(["stop", "--all"])
        .under(elsewhere)
        .finish()
        .exited(1)
        .json();
    assert_eq!(report["failed"][0]["code"], "other-pid-namespace");
    assert_eq!(machine.daemons(), [pid(&record)]);
    stops(&machine, &[], &[&record]);
}
