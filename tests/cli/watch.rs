//! `status --watch`: a screen that is drawn again and again, and lines for a program.

use std::io::{BufRead, BufReader};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Call, Sandbox, is_stopped, signal, uni_cumps, wait_until};

const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// A shell line on a terminal on which this other line types, when nvidia-smi has been called so often.
fn typed<'s>(machine: &'s Sandbox, line: &str, looks: usize, typist: &str) -> Call<'s> {
    let script = "n=0; looked() { [ $LOOKS = 0 ] || [ \"$(grep -c '^nvidia-smi' $CALLS 2>/dev/null)\" -ge $LOOKS ]; }
        { until looked || [ $n = 2000 ]; do sleep 0.01; n=$((n+1)); done; eval \"$TYPIST\"; } |
        exec script -qec \"$LINE\" /dev/null";
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let call = machine.run([""; 0]).under(["/bin/sh", "-c", script]);
    call.env("LINE", line)
        .env("TYPIST", typist)
        .env("LOOKS", looks.to_string())
        .env("CALLS", machine.bin().join("calls"))
        .env("SHELL", "/bin/sh")
        .env("TERM", "xterm")
        .env("NO_COLOR", "1")
        .env("PATH", path)
}

/// The watch on a terminal, and behind it its exit status and the terminal's modes.
fn watch(options: &str) -> String {
    format!(
        "trap : INT QUIT; {} status {options}; echo status=$?; stty -a",
        uni_cumps().display()
    )
}

/// What was drawn, and what stood behind it.
#[track_caller]
fn drawn(text: &str) -> (String, String) {
    let (before, rest) = text.split_once(ENTER).unwrap();
    assert_eq!(before, "");
    let (drawn, behind) = rest.rsplit_once(LEAVE).unwrap();
    (drawn.to_owned(), behind.replace("\r\n", "\n"))
}

/// The terminal is as it was.
#[track_caller]
fn is_restored(behind: &str) {
    for mode in [" icanon", " echo "] {
        assert!(behind.contains(mode), "{mode} in {behind:?}");
    }
}

#[test]
fn q_ends_it_and_the_terminal_is_as_before() {
    for key in ["q", "Q", "xyz\\033[Aq"] {
        let machine = Sandbox::new();
        machine.start(&["--name", "a"]);
        machine.calls();
        let typist = format!("printf '{key}'");
        let text = typed(&machine, &watch("--watch"), 1, &typist)
            .succeeds()
            .text();
        let (screen, behind) = drawn(&text);
        assert!(
            screen.starts_with("\x1b[H\x1b[?7luni-cumps status at "),
            "{screen:?}"
        );
        for part in [
            " UTC, every 2 s; q ends it\x1b[K\r\n",
            "GPU  UUID",
            "\r\na ",
        ] {
            assert!(screen.contains(part), "{part:?} in {screen:?}");
        }
        assert!(screen.ends_with("\x1b[K\x1b[J\x1b[?7h"), "{screen:?}");
        assert!(!screen.contains("xyz"), "keys are not echoed");
        assert!(behind.starts_with("status=0\n"), "{behind:?}");
        is_restored(&behind);
    }
}

#[test]
fn the_keys_that_end_a_program_end_it() {
    for (key, status) in [("\\003", 130), ("\\034", 131)] {
        let machine = Sandbox::new();
        let typist = format!("printf '{key}'");
        let call = typed(&machine, &watch("--watch=60"), 1, &typist);
        // The tests themselves may ignore both signals.
        let output = call.spawn().wait_with_output().unwrap();
        let (_, behind) = drawn(&String::from_utf8_lossy(&output.stdout));
        let expected = format!("status={status}\n");
        assert!(behind.contains(&expected), "{behind:?}");
        is_restored(&behind);
    }
}

#[test]
fn a_signal_ends_it_and_the_terminal_is_as_before() {
    for (name, status) in [("TERM", 143), ("HUP", 129)] {
        let machine = Sandbox::new();
        let file = machine.bin().join("pid");
        // A program in the background of a shell without jobs keeps its process group.
        let background = format!(" & pid=$!; echo $pid >{}; wait $pid; echo", file.display());
        // The tests themselves may ignore the signal, as under nohup.
        let line = watch("--watch=60")
            .replacen("; echo", &background, 1)
            .replacen("; ", "; /usr/bin/env --default-signal=HUP,TERM ", 1);
        let kill = format!("kill -{name} $(cat {})", file.display());
        let text = typed(&machine, &line, 1, &kill).finish().text();
        assert!(text.contains(&format!("status={status}\r\n")), "{text:?}");
        assert!(text.contains(LEAVE), "{text:?}");
        is_restored(&text);
    }
}

#[test]
fn it_looks_again_and_shows_what_is_new() {
    let machine = Sandbox::new();
    let start = format!("{} start --name new >/dev/null; n=0
        until [ \"$(grep -c get_server_list $CALLS)\" -ge 3 ] || [ $n = 2000 ]; do sleep 0.01; n=$((n+1)); done
        printf q", uni_cumps().display());
    let text = typed(&machine, &watch("--watch=0.5"), 2, &start)
        .succeeds()
        .text();
    let (screen, _) = drawn(&text);
    let frames: Vec<&str> = screen.split("\x1b[H").skip(1).collect();
    assert!(frames.len() >= 3, "{screen:?}");
    assert!(frames[0].contains("No daemon. To start one"), "{screen:?}");
    assert!(
        frames.last().unwrap().contains("\r\nnew     live   "),
        "{screen:?}"
    );
}

#[test]
fn a_small_screen_says_how_much_is_left_out() {
    let machine = Sandbox::with_gpus(16);
    let line = format!("stty rows 6 cols 20; {}", watch("--watch=60"));
    let text = typed(&machine, &line, 1, "printf q").succeeds().text();
    let (screen, _) = drawn(&text);
    assert_eq!(screen.matches("\r\n").count(), 5, "{screen:?}");
    assert!(
        screen.ends_with("\r\n… 16 more lines\x1b[K\x1b[J\x1b[?7h"),
        "{screen:?}"
    );
}

#[test]
fn ctrl_z_gives_the_terminal_back_until_fg() {
    let machine = Sandbox::new();
    let typist = "echo \"$JOB\"; look 1; printf '\\032'; sleep 0.5; stopped; echo 'stty -a >modes'; made modes
        echo fg; look 3; printf q; echo 'echo $? >status'; made status; echo exit";
    let typist = format!(
        "look() {{ m=0; until [ \"$(grep -c '^nvidia-smi' $CALLS 2>/dev/null)\" -ge $1 ] || [ $m = 2000 ]; do sleep 0.01; m=$((m+1)); done; }}
        made() {{ m=0; until [ -s $1 ] || [ $m = 2000 ]; do sleep 0.01; m=$((m+1)); done; }}
        stopped() {{ made is-stopped; }}
        {typist}"
    );
    let job = format!("{} status --watch=0.5", uni_cumps().display());
    let shell = typed(&machine, "bash --norc --noprofile -i", 0, &typist).env("JOB", job);
    let shell = shell.spawn();
    wait_until("it stands still", || {
        machine.processes().into_iter().any(is_stopped)
    });
    machine.sh("echo >is-stopped");
    let output = shell.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let status = std::fs::read_to_string(machine.path("status")).unwrap_or_default();
    assert_eq!(status, "0\n", "{text:?}");
    is_restored(&machine.sh("cat modes"));
    assert_eq!(text.matches(ENTER).count(), 2, "{text:?}");
    assert_eq!(text.matches(LEAVE).count(), 2, "{text:?}");
}

#[test]
fn for_a_program_each_look_is_a_line_of_json() {
    let machine = Sandbox::new();
    machine.conduct("servers 4711\nclients 11");
    machine.start(&["--name", "a"]);
    for (number, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let watch = machine.run(["status", "--watch=0.5", "--json"]);
        let mut child = watch.spawn();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for line in lines.take(2) {
            let report: Value = serde_json::from_str(&line.unwrap()).unwrap();
            assert_eq!(report["managed_daemons"][0]["clients"], 1);
            assert_eq!(report["platform"], "Linux");
        }
        signal(i32::try_from(child.id()).unwrap(), number);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status));
        assert!(output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn in_plain_text_an_empty_line_stands_between_two_reports() {
    let machine = Sandbox::new();
    let once = machine.run(["status"]).succeeds().text();
    let mut child = machine.run(["status", "--watch=0.5"]).spawn();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let wanted = format!("{once}\n{once}");
    let seen: Vec<String> = lines
        .take(wanted.lines().count())
        .map(Result::unwrap)
        .collect();
    assert_eq!(machine.normal(&seen.join("\n")), wanted.trim_end());
    signal(i32::try_from(child.id()).unwrap(), Signal::SIGINT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn it_ends_when_its_reader_goes_away() {
    let machine = Sandbox::new();
    let line = format!(
        "{} status --watch=0.5 --json | head -n 2; echo ${{PIPESTATUS[0]}}",
        uni_cumps().display()
    );
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let call = machine.run([""; 0]).under(["/bin/bash", "-c", &line]);
    let text = call.env("PATH", path).succeeds().said_nothing().text();
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.ends_with("}\n0\n"), "{text}");
}

#[test]
fn a_terminal_that_cannot_be_drawn_upon_gets_one_report_after_the_other() {
    let machine = Sandbox::new();
    // The second report stands there when the third look begins.
    let looks = "n=0; until [ \"$(grep -c '^nvidia-smi' $CALLS)\" -ge 3 ] || [ $n = 2000 ]; do sleep 0.01; n=$((n+1)); done; printf '\\003'";
    let call = typed(&machine, &watch("--watch=0.5"), 1, looks).env("TERM", "dumb");
    let output = call.spawn().wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!text.contains('\x1b'), "{text:?}");
    assert!(text.contains("uni-cumps start\r\n\r\nGPU"), "{text:?}");
    assert!(text.contains("status=130\r\n"), "{text:?}");
}

#[test]
fn a_pause_that_makes_no_sense_is_not_understood() {
    let machine = Sandbox::new();
    for value in ["0", "0.4", "3601", "nan", "inf", "-1", "2s", ""] {
        machine
            .run(["status", &format!("--watch={value}")])
            .breaks_usage();
    }
    machine.run(["status", "--watch", "5"]).breaks_usage();
}
