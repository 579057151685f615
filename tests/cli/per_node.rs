//! `run --per-node`: the ranks of a node share a daemon that the first one starts and the last one ends.

use std::fs;
use std::path::PathBuf;
use std::process::Child;

use nix::sys::signal::Signal;

use crate::support::{N0, Sandbox, U0, U1, is_running, pid, signal, wait_until};

/// A rank that writes down where its daemon is, and runs until a file is there.
fn rank(machine: &Sandbox, number: usize) -> Child {
    let script = format!(
        "echo $CUDA_MPS_PIPE_DIRECTORY >seen.{number}.new; /bin/mv seen.{number}.new seen.{number}
         until [ -e end.{number} ]; do /bin/sleep 0.01; done; exit {number}"
    );
    let words = ["run", "--per-node", "--", "/bin/sh", "-c", &script];
    machine.run(words).spawn()
}

fn is_there(machine: &Sandbox, number: usize) -> bool {
    machine.path(format!("seen.{number}")).exists()
}

fn end(machine: &Sandbox, number: usize) {
    fs::write(machine.path(format!("end.{number}")), "").unwrap();
}

fn status(child: Child) -> i32 {
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    output.status.code().unwrap()
}

/// The file by which the ranks count themselves.
fn counter(machine: &Sandbox) -> PathBuf {
    machine.runtime().join(N0).join("log/.per-node")
}

#[test]
fn eight_ranks_that_come_at_once_share_one_daemon_and_the_last_one_out_ends_it() {
    let machine = Sandbox::new();
    let ranks: Vec<Child> = (0..8).map(|number| rank(&machine, number)).collect();
    wait_until("all are there", || {
        (0..8).all(|number| is_there(&machine, number))
    });
    assert_eq!(machine.daemons().len(), 1);
    let starts = machine.calls().matches("control -d").count();
    assert_eq!(starts, 1);
    let pipe = machine.runtime().join(N0).join("pipe");
    for number in 0..8 {
        let seen = fs::read_to_string(machine.path(format!("seen.{number}"))).unwrap();
        assert_eq!(seen.trim(), pipe.to_str().unwrap());
    }
    for (number, child) in ranks.into_iter().enumerate() {
        assert_eq!(machine.daemons().len(), 1, "before rank {number} ends");
        end(&machine, number);
        assert_eq!(status(child), i32::try_from(number).unwrap());
    }
    machine.has_no_daemon();
    assert!(!machine.record_file(N0).exists());
    assert!(!counter(&machine).exists());
}

#[test]
fn two_that_leave_at_once_leave_no_daemon_behind() {
    for _ in 0..10 {
        let machine = Sandbox::new();
        let ranks: Vec<Child> = (0..4).map(|number| rank(&machine, number)).collect();
        wait_until("all are there", || {
            (0..4).all(|number| is_there(&machine, number))
        });
        (0..4).for_each(|number| end(&machine, number));
        for (number, child) in ranks.into_iter().enumerate() {
            assert_eq!(status(child), i32::try_from(number).unwrap());
        }
        machine.has_no_daemon();
        assert!(!counter(&machine).exists());
    }
}

#[test]
fn a_rank_that_comes_while_the_last_one_leaves_has_a_daemon() {
    let machine = Sandbox::new();
    for number in 0..12 {
        // One leaves, another comes.
        let one = rank(&machine, 2 * number);
        wait_until("it is there", || is_there(&machine, 2 * number));
        end(&machine, 2 * number);
        let other = rank(&machine, 2 * number + 1);
        wait_until("the other is there", || is_there(&machine, 2 * number + 1));
        assert_eq!(status(one), i32::try_from(2 * number).unwrap());
        assert_eq!(machine.daemons().len(), 1);
        end(&machine, 2 * number + 1);
        assert_eq!(status(other), i32::try_from(2 * number + 1).unwrap());
        machine.has_no_daemon();
    }
}

#[test]
fn a_daemon_that_was_there_before_stays() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let child = rank(&machine, 3);
    wait_until("it is there", || is_there(&machine, 3));
    end(&machine, 3);
    assert_eq!(status(child), 3);
    assert_eq!(machine.daemons(), [pid(&record)]);
    assert!(!counter(&machine).exists());
}

#[test]
fn a_rank_that_is_killed_counts_no_more() {
    let machine = Sandbox::new();
    let (mut first, second) = (rank(&machine, 0), rank(&machine, 1));
    wait_until("both are there", || {
        is_there(&machine, 0) && is_there(&machine, 1)
    });
    let killed = i32::try_from(first.id()).unwrap();
    signal(killed, Signal::SIGKILL);
    first.wait().unwrap();
    assert!(!is_running(killed));
    end(&machine, 0);
    end(&machine, 1);
    assert_eq!(status(second), 1);
    machine.has_no_daemon();
}

#[test]
fn what_cannot_be_started_fails_every_rank_and_leaves_nothing() {
    let machine = Sandbox::new();
    machine.conduct("launch fail no device");
    let words = ["run", "--per-node", "--", "/bin/true"];
    let done = machine.run(words).finish().exited(125);
    assert!(done.stderr.contains("no device"), "{done:?}");
    machine.has_no_daemon();
    machine.conduct("");
    machine.run(words).prints("").said_nothing();
    machine.has_no_daemon();
    let absent = ["run", "--per-node", "--", "/nonexistent"];
    machine
        .run(absent)
        .finish()
        .exited(127)
        .said("cannot execute");
    machine.has_no_daemon();
}

#[test]
fn with_require_mps_a_rank_that_misses_the_daemon_fails() {
    let machine = Sandbox::new();
    let words = [
        "run",
        "--per-node",
        "--require-mps=1",
        "--",
        "/bin/sleep",
        "60",
    ];
    let done = machine.run(words).finish().exited(125);
    assert!(
        done.stderr.contains("none of its processes was a client"),
        "{done:?}"
    );
    machine.has_no_daemon();
}

#[test]
fn it_goes_with_neither_start_nor_by_rank() {
    let machine = Sandbox::new();
    for option in ["--start", "--by-rank"] {
        let words = ["run", "--per-node", option, "--", "/bin/true"];
        machine.run(words).breaks_usage();
    }
}

#[test]
fn a_rank_takes_the_daemon_of_its_own_gpu_and_not_the_only_one() {
    let machine = Sandbox::with_gpus(2);
    let record = machine.start(&["--gpus", U1, "--name", "of-another-job"]);
    let words = [
        "run",
        "--per-node",
        "--",
        "/bin/sh",
        "-c",
        "echo $CUDA_VISIBLE_DEVICES",
    ];
    let call = machine.run(words).env("CUDA_VISIBLE_DEVICES", "0");
    call.prints("GPU-U0\n").said_nothing();
    assert_eq!(machine.daemons(), [pid(&record)]);
    // On that GPU it is joined, under whatever name, and stays.
    let call = machine.run(words).env("CUDA_VISIBLE_DEVICES", U1);
    call.prints("GPU-U1\n").said_nothing();
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine
        .run(words)
        .finish()
        .exited(125)
        .said("2 GPUs are visible and one must be chosen");
    let call = machine.run(["run", "--per-node", "--gpu", U0, "--", "/bin/true"]);
    call.prints("").said_nothing();
    assert_eq!(machine.daemons(), [pid(&record)]);
}

#[test]
fn what_a_last_rank_that_was_killed_has_left_is_in_nobodys_way() {
    let machine = Sandbox::new();
    let mut killed = rank(&machine, 0);
    wait_until("it is there", || is_there(&machine, 0));
    signal(i32::try_from(killed.id()).unwrap(), Signal::SIGKILL);
    killed.wait().unwrap();
    end(&machine, 0);
    let daemons = machine.daemons();
    assert_eq!(daemons.len(), 1);
    // The next last one out ends the daemon.
    machine
        .run(["run", "--per-node", "--", "/bin/true"])
        .prints("")
        .said_nothing();
    machine.has_no_daemon();
    // A claim of a daemon that is gone, longer than any other.
    fs::write(counter(&machine), "4194303-99999999999999").unwrap();
    machine
        .run(["run", "--per-node", "--", "/bin/true"])
        .prints("")
        .said_nothing();
    machine.has_no_daemon();
    assert!(!counter(&machine).exists());
}

#[test]
fn a_daemon_that_came_in_the_place_of_a_dead_one_is_ended_as_well() {
    let machine = Sandbox::new();
    let first = rank(&machine, 0);
    wait_until("it is there", || is_there(&machine, 0));
    machine.kill(machine.daemons()[0]);
    let second = rank(&machine, 1);
    wait_until("the second is there", || is_there(&machine, 1));
    assert_eq!(machine.daemons().len(), 1);
    end(&machine, 1);
    assert_eq!(status(second), 1);
    assert_eq!(machine.daemons().len(), 1);
    end(&machine, 0);
    assert_eq!(status(first), 0);
    machine.has_no_daemon();
}

#[test]
fn a_signal_reaches_the_program_and_the_daemon_is_ended() {
    for number in [Signal::SIGTERM, Signal::SIGINT] {
        let machine = Sandbox::new();
        let child = rank(&machine, 0);
        wait_until("it is there", || is_there(&machine, 0));
        signal(i32::try_from(child.id()).unwrap(), number);
        assert_eq!(status(child), 128 + number as i32);
        machine.has_no_daemon();
        assert!(!counter(&machine).exists());
    }
}
