//! `run` on a terminal: its keys reach the program as if we were not there.

use std::fs;

use crate::run::machine;
use crate::support::{Call, Sandbox, is_running, is_stopped, uni_cumps, wait_until};

/// Options with which the program takes our place, and with which it runs beside us.
const BOTH: [&str; 2] = ["", "--require-mps"];

/// A shell line on a terminal on which this other line types. It can wait until something stands in a file.
fn typed<'s>(machine: &'s Sandbox, line: &str, typist: &str) -> Call<'s> {
    let script =
        "until_in() { n=0; until [ -s $1 ] || [ $n = 3000 ]; do sleep 0.01; n=$((n+1)); done; }
        eval \"$TYPIST\" | exec script -qec \"exec $LINE\" /dev/null";
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let call = machine.run([""; 0]).under(["/bin/sh", "-c", script]);
    call.env("LINE", line)
        .env("TYPIST", format!("{{ {typist}; }}"))
        .env("SHELL", "/bin/sh")
        .env("TERM", "xterm")
        .env("PATH", path)
}

/// `run` with these options and a shell line.
fn run_sh(options: &str, line: &str) -> String {
    format!("{} run {options} -- sh -c '{line}'", uni_cumps().display())
}

fn pid_in(machine: &Sandbox, file: &str) -> i32 {
    let mut found = None;
    wait_until("a pid is written", || {
        let text = fs::read_to_string(machine.path(file)).unwrap_or_default();
        found = text.strip_suffix('\n').and_then(|pid| pid.parse().ok());
        found.is_some()
    });
    found.unwrap()
}

/// Its exit status, though the tests themselves may ignore SIGINT.
fn exit_status(call: Call<'_>) -> Option<i32> {
    call.spawn().wait_with_output().unwrap().status.code()
}

#[test]
fn ctrl_c_reaches_the_program_once() {
    for options in BOTH {
        let machine = machine();
        let line = run_sh(options, "echo $$ >pid; exec sleep 600");
        let call = typed(&machine, &line, "until_in pid; printf \"\\003\"");
        assert_eq!(exit_status(call), Some(130));
        assert!(!is_running(pid_in(&machine, "pid")));

        let line =
            "trap \"echo INT >>ints\" INT; echo >ready; until [ -s ints ]; do sleep 0.01; done
            sleep 0.2; # a second one would come within this time
            exit 3";
        let line = run_sh(options, line);
        let call = typed(&machine, &line, "until_in ready; printf \"\\003\"");
        assert_eq!(exit_status(call), Some(3));
        assert_eq!(fs::read(machine.path("ints")).unwrap(), b"INT\n");
    }
}

#[test]
fn ctrl_c_reaches_a_program_that_has_left_the_terminal() {
    let machine = machine();
    let line =
        run_sh("--require-mps", "echo $$ >pid; exec sleep 600").replace("-- sh", "-- setsid sh");
    let call = typed(&machine, &line, "until_in pid; printf \"\\003\"");
    assert_eq!(exit_status(call), Some(130));
    assert!(!is_running(pid_in(&machine, "pid")));
}

#[test]
fn ctrl_z_stops_it_and_fg_lets_it_go_on() {
    for options in BOTH {
        let machine = machine();
        machine.sh("mkfifo hold");
        let job = run_sh(options, "echo $$ $PPID >pids; read x <hold; exit 3");
        let typist = "echo \"$JOB\"; until_in pids; printf \"\\032\"; until_in stopped; echo fg; until_in over
            echo \"echo \\$? >status\"; until_in status; echo exit";
        let bash = "bash --norc --noprofile -i";
        let shell = typed(&machine, bash, typist).env("JOB", job).spawn();
        let mut both: Vec<i32> = Vec::new();
        wait_until("it runs", || {
            let text = fs::read_to_string(machine.path("pids")).unwrap_or_default();
            let pids = text.split_whitespace().map(|pid| pid.parse().unwrap());
            both = pids.collect();
            text.ends_with('\n')
        });
        // Where the program has taken our place, its parent is the shell.
        if options.is_empty() {
            both.truncate(1);
        }
        wait_until("all stand still", || {
            both.iter().all(|pid| is_stopped(*pid))
        });
        machine.sh("echo >stopped");
        wait_until("all go on", || !both.iter().any(|pid| is_stopped(*pid)));
        machine.sh("echo >hold; echo >over");
        let output = shell.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(fs::read(machine.path("status")).unwrap(), b"3\n");
    }
}

#[test]
fn a_program_reads_from_the_terminal() {
    for options in BOTH {
        let machine = machine();
        let line = run_sh(
            options,
            "echo >ready; read x; echo \"<$x>\"; test -t 0 -a -t 1 -a -t 2 && exit 3",
        );
        let done = typed(&machine, &line, "until_in ready; echo hello")
            .finish()
            .exited(3);
        assert!(done.text().contains("<hello>\r\n"), "{done:?}");
    }
}

#[test]
fn a_person_sees_what_is_waited_for_while_the_program_is_silent() {
    let machine = machine();
    let seen = |options: &str, line: &str, code| {
        let call = typed(&machine, &run_sh(options, line), ":");
        call.finish().exited(code).text()
    };
    let text = seen("--require-mps", "sleep 1.6; exit 3", 3);
    for frame in [
        "| waiting for a client of daemon a (0 s)",
        "/ waiting for a client of daemon a (1 s)",
    ] {
        assert!(text.contains(frame), "{text:?}");
    }
    assert!(text.ends_with("\x1b8\x1b[K"), "{text:?}");
    for options in ["-q --require-mps", "-v --require-mps"] {
        let text = seen(options, "sleep 0.6; exit 3", 3);
        assert!(!text.contains("waiting for"), "{text:?}");
    }
    let piped = format!(
        "{} 2>&1 | cat",
        run_sh("--require-mps", "sleep 0.6; exit 3")
    );
    let text = typed(&machine, &piped, ":").finish().exited(0).text();
    assert!(!text.contains("waiting for"), "{text:?}");
}

#[test]
fn a_programs_lines_stay_as_they_are() {
    let machine = machine();
    let line = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.15; done; echo -n prompt; sleep 600";
    let call = typed(&machine, &run_sh("--require-mps=1", line), ":");
    let text = call.finish().exited(125).text();
    let (program, failure) = text
        .split_once("\x1b[31merror\x1b[0m: the command was ended")
        .unwrap();
    assert_eq!(program, "1\r\n2\r\n3\r\n4\r\n5\r\n6\r\nprompt");
    assert!(!failure.contains("waiting"), "{text:?}");
}
