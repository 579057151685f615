//! `start --dry-run`: what is shown is what would be done, and nothing is.

use std::collections::BTreeSet;
use std::fs;

use crate::support::{Sandbox, U1, pid, set_mode};

/// What a process was started with, its changing parts aside.
fn environment(pid: i32) -> BTreeSet<String> {
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let entries = environ.split(|byte| *byte == 0);
    entries
        .map(|entry| String::from_utf8_lossy(entry).into_owned())
        .filter(|entry| !entry.is_empty())
        .collect()
}

/// Everything below the home and the temporary directory.
fn traces(machine: &Sandbox) -> String {
    machine.sh("find h t")
}

#[test]
fn the_calls_are_shown_and_nothing_is_touched() {
    let machine = Sandbox::with_gpus(2);
    let before = traces(&machine);
    let shown = machine
        .run(["start", "--dry-run", "--gpus", "1", "--name", "a"])
        .succeeds()
        .said_nothing();
    let text = shown.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[..2],
        [
            "<S>/bin/nvidia-smi --query-gpu=index,uuid,compute_mode,mig.mode.current --format=csv,noheader",
            "(umask 077; mkdir -p <S>/t/uni-cumps/a/pipe <S>/t/uni-cumps/a/log)",
        ]
    );
    assert!(
        lines[2].starts_with("env -i HOME=<S>/h LD_LIBRARY_PATH=<S>/lib TMPDIR=<S>/t PATH="),
        "{text}"
    );
    assert!(
        lines[2].ends_with(
            " CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log CUDA_MPS_PROTOCOL_VERSION=2 CUDA_VISIBLE_DEVICES=GPU-U1 <S>/bin/nvidia-cuda-mps-control -d"
        ),
        "{text}"
    );
    assert!(
        lines[3].starts_with("printf 'get_server_list\\nuni-cumps-"),
        "{text}"
    );
    assert!(
        lines[3].ends_with(" <S>/bin/nvidia-cuda-mps-control"),
        "{text}"
    );
    assert_eq!(lines.len(), 4);
    assert_eq!(traces(&machine), before);
    assert!(machine.calls().starts_with("nvidia-smi "));
    machine.has_no_daemon();
}

#[test]
fn pasted_into_a_shell_it_starts_the_same_daemon() {
    let machine = Sandbox::with_gpus(2);
    let started = machine.start(&["--gpus", "1", "--name", "a"]);
    let real = environment(pid(&started));
    machine.run(["stop"]).succeeds();
    let shown = machine.run(["start", "--dry-run", "--gpus", "1", "--name", "a"]);
    let shown = String::from_utf8(shown.succeeds().stdout).unwrap();
    machine.calls();
    let answer = machine.sh(&shown);
    assert!(
        answer.ends_with("\"\n") && answer.contains("Unknown command \"uni-cumps-"),
        "{answer}"
    );
    let [pasted] = machine.daemons()[..] else {
        panic!("one daemon")
    };
    assert_eq!(environment(pasted), real);
    assert!(real.contains(&format!("CUDA_VISIBLE_DEVICES={U1}")));
    // It is the one that start would have launched.
    machine
        .run(["start", "--dry-run", "--gpus", "1", "--name", "a"])
        .succeeds()
        .said(&format!(
            "pid {pasted} runs already without a record and would be recorded"
        ));
    assert!(!machine.record_file("a").exists());
    assert_eq!(pid(&machine.start(&["--gpus", "1", "--name", "a"])), pasted);
}

#[test]
fn a_foreground_daemon_is_shown_as_it_would_be_called() {
    let machine = Sandbox::new();
    let shown = machine
        .run(["start", "--dry-run", "--foreground"])
        .succeeds();
    assert!(
        shown.text().ends_with("/nvidia-cuda-mps-control -f\n"),
        "{shown:?}"
    );
    machine.has_no_daemon();
}

#[test]
fn what_start_would_refuse_is_refused() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0", "--name", "a"]);
    let before = traces(&machine);
    machine
        .run(["start", "--dry-run", "--gpus", "0", "--name", "a"])
        .fails("daemon a is already live");
    machine
        .run(["start", "--dry-run", "--gpus", "0", "--name", "b"])
        .fails("daemon a (pid ");
    machine
        .run([
            "start",
            "--dry-run",
            "--gpus",
            "0",
            "--name",
            "b",
            "--force",
        ])
        .succeeds()
        .said("their servers take turns on it");
    machine
        .run(["start", "--dry-run", "--gpus", "7"])
        .fails("matches no GPU");
    let open = machine.path("open");
    fs::create_dir(&open).unwrap();
    set_mode(&open, 0o777);
    machine
        .run(["start", "--dry-run", "--gpus", "1"])
        .and("--pipe-dir")
        .and(&open)
        .fails("others may write to it");
    machine
        .run(["start", "--dry-run", "--gpus", "1"])
        .and("--pipe-dir")
        .and("p".repeat(88))
        .fails("too long");
    assert_eq!(traces(&machine), before);
}

#[test]
fn a_stale_record_stays_where_it_is() {
    let machine = Sandbox::new();
    let started = machine.start(&["--name", "a"]);
    machine.kill(pid(&started));
    let before = (
        traces(&machine),
        fs::read(machine.record_file("a")).unwrap(),
    );
    machine
        .run(["start", "--dry-run", "--name", "a"])
        .succeeds()
        .said_nothing();
    assert_eq!(
        (
            traces(&machine),
            fs::read(machine.record_file("a")).unwrap()
        ),
        before
    );
}
