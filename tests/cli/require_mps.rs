//! `run --require-mps`: whatever of the command is a client is found, and whatever keeps all of it from being one is named
//! when it is ended.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};

use crate::directories::home_of;
use crate::run::{after, machine, run, run_sh};
use crate::support::{
    Call, Done, Sandbox, freeze, is_running, pid, signal, wait_until, without_root,
};

const USER: u32 = 1000;

/// A machine with a daemon that has a server. Who writes his pid into `clients` is its client; nobody can before the
/// daemon is asked, and nobody goes on before the answer is given.
fn machine_with_server() -> Sandbox {
    let machine = Sandbox::new();
    machine.sh("mkfifo clients");
    machine.conduct(&format!(
        "servers 4711\nclients-in {}\n",
        machine.path("clients").display()
    ));
    machine.start(&["--name", "a"]);
    machine
}

/// The command is ended within a second; this is said of the cause.
#[track_caller]
fn ends<'s>(call: Call<'s>, cause: &str) -> Done<'s> {
    call.finish()
        .exited(125)
        .said(
            "error: the command was ended: none of its processes was a client of daemon a within 1 s\n",
        )
        .said(cause)
}

/// Nothing of the sandbox runs but this many daemons.
#[track_caller]
fn only_daemons_are_left(machine: &Sandbox, daemons: usize) {
    assert_eq!(machine.daemons().len(), daemons);
    assert_eq!(machine.processes().len(), daemons);
}

/// The pid that a program has written into a file.
fn pid_in(file: PathBuf) -> i32 {
    let mut found = None;
    wait_until("a pid is written", || {
        let text = fs::read_to_string(&file).unwrap_or_default();
        found = text.strip_suffix('\n').and_then(|pid| pid.parse().ok());
        found.is_some()
    });
    found.unwrap()
}

fn pid_of(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

// Whose client it is.

#[test]
fn a_program_that_is_a_client_itself_passes() {
    let machine = machine_with_server();
    for status in [0, 7] {
        run_sh(
            &machine,
            &["--require-mps"],
            &format!("echo $$ >clients; echo out; exit {status}"),
        )
        .finish()
        .exited(status)
        .printed("out\n")
        .said_nothing();
    }
    run_sh(
        &machine,
        &["--require-mps"],
        "echo $$ >clients; kill -TERM $$",
    )
    .finish()
    .exited(143)
    .said_nothing();
}

/// It lives for longer than the limit.
#[test]
fn a_child_that_is_a_client_passes() {
    let machine = machine_with_server();
    let line = "sh -c 'echo $$ >clients; exec sleep 1.3' & wait; exit 0";
    run_sh(&machine, &["--require-mps=1"], line)
        .succeeds()
        .said_nothing();
}

#[test]
fn an_orphan_in_a_session_of_its_own_passes() {
    let machine = machine_with_server();
    let orphan = "(setsid sh -c 'echo $$ >orphan; echo $$ >clients; exec sleep 600' >log 2>&1 &)";
    let line = format!("{orphan}; sleep 1.3; exit 0");
    run_sh(&machine, &["--require-mps=1"], &line)
        .succeeds()
        .said_nothing();
    // It has become ours, and nobody has ended it.
    assert!(is_running(pid_in(machine.path("orphan"))));
}

#[test]
fn somebody_elses_client_does_not_count() {
    let machine = Sandbox::new();
    machine.conduct("servers 4711\nclients 1 asker\n");
    machine.start(&["--name", "a"]);
    let line = "echo $$ >pid; exec sleep 600";
    ends(
        run_sh(&machine, &["--require-mps=1"], line),
        "cause: none of its processes has loaded the CUDA driver",
    );
    assert!(!is_running(pid_in(machine.path("pid"))));
}

#[test]
fn a_daemon_that_takes_its_time_is_waited_for() {
    let machine = machine_with_server();
    let real = fs::read_link(machine.bin().join("nvidia-cuda-mps-control")).unwrap();
    machine.sh("mkdir slow");
    symlink(&real, machine.path("slow/nvidia-cuda-mps-control")).unwrap();
    let slow = format!(
        "sleep 0.4; exec {}slow/nvidia-cuda-mps-control \"$@\"",
        machine.path("").display()
    );
    machine.script("nvidia-cuda-mps-control", &slow);
    run_sh(&machine, &["--require-mps"], "echo $$ >clients; exit 0")
        .succeeds()
        .said_nothing();
}

// What is passed on.

#[test]
fn a_signal_that_is_sent_to_us_reaches_the_program_once() {
    let machine = machine();
    let names = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"];
    let line = format!(
        "for s in {}; do trap \"echo $s >>got\" $s; done; echo $$ >pid; until [ -e over ]; do sleep 0.01; done; exit 3",
        names.join(" ")
    );
    let child = run_sh(&machine, &["--require-mps"], &line).spawn();
    let program = pid_in(machine.path("pid"));
    let got = || fs::read_to_string(machine.path("got")).unwrap_or_default();
    for name in names {
        signal(pid_of(&child), format!("SIG{name}").parse().unwrap());
        wait_until("the signal has arrived", || got().contains(name));
    }
    assert!(is_running(program));
    machine.sh("touch over");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(3));
    assert_eq!(got(), names.join("\n") + "\n");
}

#[test]
fn a_signal_that_ends_the_program_is_its_status() {
    let machine = machine();
    for number in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR2] {
        let _ = fs::remove_file(machine.path("pid"));
        let child = run_sh(&machine, &["--require-mps"], "echo $$ >pid; exec sleep 600").spawn();
        let program = pid_in(machine.path("pid"));
        signal(pid_of(&child), number);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(128 + number as i32));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        assert!(!is_running(program));
    }
}

/// It is sent before we can have looked for any; blocked, it waits.
#[test]
fn a_signal_of_the_first_moment_is_passed_on() {
    let machine = machine();
    let line = "until grep -q 'ShdPnd:.*4...$' /proc/$$/status; do sleep 0.01; done; exit 3";
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTERM);
    // For the thread of this test, and what it starts.
    blocked.thread_block().unwrap();
    for _ in 0..5 {
        // Not sh, which may let all signals through.
        let program = ["/bin/bash", "-c", line];
        let child = run(&machine, &["--require-mps"], program).spawn();
        signal(pid_of(&child), Signal::SIGTERM);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
    }
}

#[test]
fn what_is_ignored_is_not_passed_on() {
    let machine = machine();
    let line = "trap 'exit 4' HUP; echo $$ >pid; until [ -e over ]; do sleep 0.01; done; exit 3";
    let call = after(
        run_sh(&machine, &["--require-mps"], line),
        "trap '' HUP; exec \"$@\"",
    );
    let child = call.spawn();
    pid_in(machine.path("pid"));
    signal(pid_of(&child), Signal::SIGHUP);
    machine.sh("touch over");
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(3));
}

#[test]
fn the_program_goes_on_if_we_are_killed() {
    let machine = machine();
    let mut child = run_sh(&machine, &["--require-mps"], "echo $$ >pid; exec sleep 600").spawn();
    let program = pid_in(machine.path("pid"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_running(program));
}

// What is no client.

#[test]
fn a_program_that_ends_well_and_was_no_client_has_failed() {
    let machine = machine();
    let done = run_sh(&machine, &["--require-mps"], "echo out; exit 0").finish();
    let done = done.exited(125).printed("out\n");
    assert_eq!(
        done.stderr,
        "error: the command ended with status 0, and none of its processes was seen as a client of daemon a
cause: it does not use CUDA, used it only between two looks, or ran without MPS
hint: for a program without CUDA, leave --require-mps out; otherwise: uni-cumps doctor
"
    );
}

#[test]
fn what_a_program_leaves_behind_is_a_client_in_time_or_ended() {
    let machine = machine_with_server();
    let line = "(sh -c 'echo $$ >client; echo $$ >clients; exec sleep 600' >log 2>&1 &); exit 0";
    let done = run_sh(&machine, &["--require-mps"], line).finish();
    done.exited(0).said_nothing();
    let client = pid_in(machine.path("client"));
    assert!(is_running(client));
    machine.kill(client);
    let machine = self::machine();
    let line = "(sleep 600 >log 2>&1 & echo $! >left); exit 0";
    ends(run_sh(&machine, &["--require-mps=1"], line), "cause: ");
    assert!(!is_running(pid_in(machine.path("left"))));
}

#[test]
fn what_strangers_start_is_never_ended() {
    let machine = machine();
    // A shell becomes uni-cumps and leaves it a child, which then ends and leaves an orphan.
    let shell = "(sh -c 'sleep 600 >log 2>&1 & echo $! >stranger; sleep 0.3' &); exec \"$@\"";
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let call = run_sh(&machine, &["--require-mps=1"], "sleep 600").env("PATH", path);
    ends(call.under(["/bin/sh", "-c", shell, "sh"]), "cause: ");
    let stranger = pid_in(machine.path("stranger"));
    assert!(is_running(stranger));
    machine.kill(stranger);
}

#[test]
fn a_command_without_a_client_leaves_nothing_running() {
    let machine = machine();
    // Neither of them minds SIGTERM, one is an orphan in a session of its own, and both go on to fork.
    let orphan = "trap \"\" TERM; echo $$ >orphan; while :; do sleep 600 & sleep 0.05; done";
    let line = format!(
        "trap '' TERM; (setsid sh -c '{orphan}' >log 2>&1 &); while :; do (sleep 600 &); sleep 0.05; done"
    );
    let done = ends(run_sh(&machine, &["--require-mps=1"], &line), "cause: ");
    assert_eq!(done.stderr.lines().count(), 3, "{done:?}");
    assert!(!is_running(pid_in(machine.path("orphan"))));
    only_daemons_are_left(&machine, 1);
}

#[test]
fn children_that_we_had_before_are_left_alone() {
    let machine = machine();
    let call = run_sh(&machine, &["--require-mps=1"], "exec sleep 600");
    let jobs = "env -i S=$S /bin/sleep 600 >log 2>&1 & echo $! >job; exec \"$@\"";
    ends(
        after(call, jobs),
        "cause: none of its processes has loaded the CUDA driver",
    );
    assert!(is_running(pid_in(machine.path("job"))));
    assert_eq!(machine.processes().len(), 2);
}

#[test]
fn a_command_that_we_may_not_end_is_named_and_left() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let start = machine.run(["start", "--name", "a"]);
    start.user(USER).env("HOME", &home).succeeds();
    machine.sh("cp /usr/bin/setpriv sudo; chmod 4755 sudo");
    let sudo = machine.path("sudo").into_os_string().into_string().unwrap();
    let line = "exec \"$0\" --reuid=65534 --clear-groups sleep 600 >/dev/null 2>&1";
    let program = run(
        &machine,
        &["--require-mps=1"],
        ["/bin/sh", "-c", line, &sudo],
    );
    let done = ends(
        program.user(USER).env("HOME", &home),
        "runs as uid 65534, and the daemon serves uid 1000 only\n",
    );
    let done = done.said("\nhint: run the whole command as the daemon's user, without sudo\n");
    let mut left = machine.processes();
    left.retain(|process| !machine.daemons().contains(process));
    assert_eq!(left.len(), 1, "{done:?}");
    done.said(&format!("note: pid {} could not be ended\n", left[0]));
}

// Why it is none.

const WITH_DRIVER: &str = "LD_PRELOAD=$S/lib/libcuda.so.1 exec sleep 600";

/// Each line of shell, with the cause and the hint that are told of it. The pid that a cause begins with is left out.
const CAUSES: [(&str, &str, &str); 7] = [
    (
        "exec env -i S=$S sleep 600",
        "(sleep) has lost CUDA_MPS_PIPE_DIRECTORY",
        "find out which wrapper clears its environment: sudo, env -i, ssh, a container",
    ),
    (
        "CUDA_MPS_PIPE_DIRECTORY=/other exec sleep 600",
        "(sleep) has CUDA_MPS_PIPE_DIRECTORY=\"/other\", another daemon's",
        "find out which wrapper or script sets it",
    ),
    (
        "CUDA_VISIBLE_DEVICES=GPU-ffffffff-0e4f-5a6b-7c8d-9e0f1a2b3c40 exec sleep 600",
        "(sleep) has CUDA_VISIBLE_DEVICES=\"GPU-ffffffff-0e4f-5a6b-7c8d-9e0f1a2b3c40\", which names no GPU of the daemon",
        "leave CUDA_VISIBLE_DEVICES to uni-cumps",
    ),
    (
        "kill -STOP $$",
        "(sh) is stopped",
        "find out what stops it: a debugger, or reading a terminal in the background (then: </dev/null)",
    ),
    (
        "exec sleep 600",
        "none of its processes has loaded the CUDA driver (libcuda.so.1)",
        "if it only takes long to begin, give it more time: --require-mps=SECONDS",
    ),
    (
        WITH_DRIVER,
        "it has loaded the CUDA driver and has the daemon's environment; nothing else is known to be wrong",
        "uni-cumps doctor --probe",
    ),
    (
        "exec unshare -i sleep 600",
        "(sleep) is in another IPC namespace, such as a container's",
        "start the container with the flags of uni-cumps env --format docker",
    ),
];

#[test]
fn each_cause_is_named_with_its_remedy() {
    let machine = machine();
    let mut causes = CAUSES.to_vec();
    causes.retain(|(line, ..)| !line.contains("unshare") || !without_root());
    // All at once, since each of them takes a second.
    let start = |cause: &(&str, _, _)| run_sh(&machine, &["--require-mps=1"], cause.0).spawn();
    let children: Vec<Child> = causes.iter().map(start).collect();
    for ((line, cause, hint), child) in causes.into_iter().zip(children) {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(125), "{line}");
        let said = String::from_utf8(output.stderr).unwrap();
        let (_, told) = said.split_once(" within 1 s\ncause: ").unwrap();
        let told = match told.strip_prefix("pid ") {
            Some(told) => told.split_once(' ').unwrap().1,
            None => told,
        };
        assert_eq!(told, format!("{cause}\nhint: {hint}\n"), "{line}");
    }
    only_daemons_are_left(&machine, 1);
}

#[test]
fn what_the_daemons_log_says_is_told_of_a_program_that_has_loaded_the_driver() {
    let machine = machine();
    let log = machine.runtime().join("a/log");
    let round = "Starting new server 12 for user 0\nServer 12 exited with status 1\n".repeat(3);
    fs::write(
        log.join("control.log"),
        format!("Starting control daemon\n{round}"),
    )
    .unwrap();
    let words = "Driver initialization failed with: no CUDA-capable device is detected";
    fs::write(log.join("server.log"), words).unwrap();
    ends(
        run_sh(&machine, &["--require-mps=1"], WITH_DRIVER),
        &format!(
            "cause: the server cannot start: it ended 3 times in a row, saying {words:?}\nhint: tail server.log"
        ),
    );
}

#[test]
fn a_daemon_that_dies_meanwhile_is_named() {
    let machine = Sandbox::new();
    let daemon = pid(&machine.start(&["--name", "a"]));
    let line = "echo $$ >pid; exec sleep 600";
    let child = run_sh(&machine, &["--require-mps=1"], line).spawn();
    pid_in(machine.path("pid"));
    machine.kill(daemon);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains(
            "\ncause: the daemon could not be asked: Cannot find MPS control daemon process
the daemon is no longer reachable (state stale)
hint: uni-cumps doctor\n"
        ),
        "{said}"
    );
    only_daemons_are_left(&machine, 0);
}

#[test]
fn a_daemon_that_never_answers_holds_nothing_up() {
    let machine = Sandbox::new();
    let daemon = pid(&machine.start(&["--name", "a"]));
    freeze(daemon);
    let began = Instant::now();
    ends(
        run_sh(&machine, &["-q", "--require-mps=1"], "exec sleep 600"),
        "\ncause: the daemon could not be asked: no answer within 1 s\n",
    );
    assert!(began.elapsed() < Duration::from_secs(8));
    // A program that cannot be run is told of at once, and one that ends before the daemon has answered soon.
    let began = Instant::now();
    run(&machine, &["-q", "--require-mps"], ["/no/where"])
        .finish()
        .exited(127);
    assert!(began.elapsed() < Duration::from_secs(4));
    run_sh(&machine, &["-q", "--require-mps=1"], "exit 3")
        .finish()
        .exited(3);
}

#[test]
fn of_many_causes_a_few_are_told() {
    let machine = machine();
    let line = "for i in 1 2 3 4 5 6 7 8 9 10 11; do env -i S=$S sleep 600 & done; wait";
    let done = ends(
        run_sh(&machine, &["--require-mps=1"], line),
        "\nand 3 more like these\nhint: find out which wrapper",
    );
    assert_eq!(
        done.stderr
            .matches("(sleep) has lost CUDA_MPS_PIPE_DIRECTORY\n")
            .count(),
        8
    );
    only_daemons_are_left(&machine, 1);
}

// As the first process of a container.

#[test]
fn as_the_first_process_orphans_are_reaped_and_the_daemon_is_not_taken_for_one() {
    if without_root() {
        return;
    }
    let first = |options: &[&str], line| {
        let machine = Sandbox::new();
        let options = [&["-q", "--start", "--name=a"], options].concat();
        let unshare = ["/usr/bin/unshare", "-pf", "--mount-proc", "--kill-child"];
        let done = run_sh(&machine, &options, line).under(unshare).finish();
        wait_until("the namespace is over", || machine.processes().is_empty());
        (done.code, done.stderr)
    };
    let orphan =
        "(sh -c 'echo $$ >orphan; exec sleep 0.05' &); until [ -s orphan ]; do sleep 0.01; done";
    let reaped = "while [ -d /proc/$(cat orphan) ]; do sleep 0.01; done";
    let line = format!("{orphan}; {reaped}; exit 3");
    assert_eq!(first(&["--require-mps"], &line), (3, String::new()));
    let (code, said) = first(&["--require-mps=1"], "exec sleep 600");
    assert_eq!(code, 125);
    let cause = "\ncause: none of its processes has loaded the CUDA driver";
    assert!(said.contains(cause), "{said}");
}
