//! `run` with NVIDIA's own daemon.

use std::fs;

use crate::support::{Call, N0, Sandbox, is_running, pid, wait_until};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    (
        "run_lets_a_program_reach_just_this_daemon",
        a_program_reaches_just_this_daemon,
    ),
    ("run_ends_a_program_that_is_no_client", no_client_is_ended),
    ("run_starts_a_daemon_and_stop_ends_it", start_and_stop),
];

/// `run` with these options and a line of shell, which finds NVIDIA's program on PATH.
fn run_sh<'s>(machine: &'s Sandbox, options: &[&str], line: &str) -> Call<'s> {
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let program = ["--", "/bin/sh", "-c", line];
    let call = machine.run(["run"].iter().chain(options).chain(&program));
    call.env("PATH", path)
}

/// NVIDIA's program asks whichever daemon the environment names.
const ASK: &str = "echo get_server_list | nvidia-cuda-mps-control";

/// What a daemon has logged.
fn log(machine: &Sandbox, name: &str) -> String {
    let log = machine.runtime().join(name).join("log/control.log");
    fs::read_to_string(log).unwrap()
}

fn a_program_reaches_just_this_daemon(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    machine.start(&["--name", "b", "--force"]);
    let before = ["a", "b"].map(|name| log(&machine, name));
    run_sh(&machine, &["--name", "b"], ASK)
        .env("CUDA_MPS_PIPE_DIRECTORY", machine.runtime().join("a/pipe"))
        .prints("")
        .said_nothing();
    // The log comes after the answer.
    wait_until("b has logged the question", || {
        log(&machine, "b")[before[1].len()..].contains("get_server_list")
    });
    assert_eq!(log(&machine, "a"), before[0]);
    // Without the environment it finds nobody.
    let nobody = format!("unset CUDA_MPS_PIPE_DIRECTORY; {ASK}");
    run_sh(&machine, &["--name", "b"], &nobody)
        .finish()
        .exited(1)
        .said("Cannot find MPS control daemon process");
}

fn no_client_is_ended(driver: &Driver) {
    let machine = driver.machine();
    let daemon = pid(&machine.start(&["--name", "a"]));
    run_sh(&machine, &["--require-mps=1"], "echo $$; exec sleep 600")
        .finish()
        .exited(125)
        .said("none of its processes was a client of daemon a within 1 s\ncause: none of its processes has loaded the CUDA driver");
    assert_eq!(machine.processes(), [daemon]);
    run_sh(&machine, &["--require-mps"], &format!("{ASK}; exit 3"))
        .finish()
        .exited(3)
        .said_nothing();
}

fn start_and_stop(driver: &Driver) {
    let machine = driver.machine();
    for options in [&["--start"][..], &["--start", "--require-mps"]] {
        run_sh(&machine, options, &format!("{ASK} && exit 3"))
            .finish()
            .exited(3)
            .printed("");
    }
    let [daemon] = machine.daemons()[..] else {
        panic!("one daemon")
    };
    assert!(machine.record_file(N0).exists());
    machine.run(["stop"]).succeeds().said_nothing();
    assert!(!is_running(daemon));
    machine.has_no_daemon();
}
