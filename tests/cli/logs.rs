//! `logs`: made-up logs in the directories of daemons that run or have run.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{
    Call, Sandbox, U0, pid, set_mode, signal, uni_cumps, wait_until, without_root,
};

/// A line that somebody said at this second of a minute.
fn line(second: &str, source: &str, text: &str) -> String {
    format!("[2026-11-29 16:44:{second} {source} {:>5}] {text}\n", 100)
}

fn control(second: &str, text: &str) -> String {
    line(second, "Control", text)
}

fn server(second: &str, text: &str) -> String {
    line(second, "Server", text)
}

/// A machine with daemon `a`, and the directory of its logs, which are empty.
fn machine() -> (Sandbox, PathBuf) {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    let log = machine.runtime().join("a/log");
    fs::write(log.join("control.log"), "").unwrap();
    (machine, log)
}

fn append(file: impl AsRef<Path>, text: impl AsRef<[u8]>) {
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(file)
        .unwrap();
    file.write_all(text.as_ref()).unwrap();
}

/// Two logs of four messages in all.
fn four(log: &Path) -> String {
    let (first, third) = (
        control("01.000", "NEW CLIENT 7 from user 0"),
        control("03.000", "Removed Shm file at \n"),
    );
    let (second, fourth) = (
        server("02.500", "Warning: it is warm"),
        server("04.000", "Server is handling a fatal GPU error."),
    );
    fs::write(log.join("control.log"), format!("{first}{third}")).unwrap();
    fs::write(log.join("server.log"), format!("{second}{fourth}")).unwrap();
    first + &second + &third + &fourth
}

#[test]
fn both_logs_are_one_row_by_time_and_each_line_is_as_it_was() {
    let (machine, log) = machine();
    let all = four(&log);
    for args in [
        &["logs"][..],
        &["logs", "--name", "a"],
        &["logs", "--gpu", "0"],
        &["logs", "--gpus", U0, "-n", "all"],
        &["logs", "-n", "4"],
    ] {
        machine.run(args).prints(&all).said_nothing();
    }
    let lines: Vec<&str> = all.split_inclusive('\n').collect();
    machine
        .run(["logs", "--control"])
        .prints(&[lines[0], lines[2], lines[3]].concat());
    machine
        .run(["logs", "--server"])
        .prints(&[lines[1], lines[4]].concat());
    machine
        .run(["logs", "-n", "2"])
        .prints(&lines[2..].concat());
    machine.run(["logs", "-n", "0"]).prints("");
    machine
        .run(["logs", "--level", "warning"])
        .prints(&[lines[1], lines[4]].concat());
    machine
        .run(["logs", "--level", "info", "-n", "2"])
        .prints(&[lines[1], lines[4]].concat());
    machine.run(["logs", "--level", "error"]).prints(lines[4]);
}

#[test]
fn each_message_is_an_object_on_a_line() {
    let (machine, log) = machine();
    fs::write(log.join("control.log"), "of an older daemon\n").unwrap();
    append(
        log.join("control.log"),
        control("03.000", "Removed Shm file at \n"),
    );
    append(
        log.join("server.log"),
        b"[2026-11-29 16:44:02.500 Legacy Server   12] Server has started \xff\x1b[31m\xc3\xa9",
    );
    let done = machine.run(["logs", "--json"]).succeeds().said_nothing();
    let text = done.text();
    assert!(text.is_ascii() && text.lines().count() == 3, "{text}");
    let messages: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let nobody = Value::Null;
    assert_eq!(
        messages,
        [
            json!({"time": nobody, "source": nobody, "pid": nobody, "level": "info", "file": "control.log",
                   "text": "of an older daemon"}),
            json!({"time": "2026-11-29 16:44:02.500", "source": "Legacy Server", "pid": 12, "level": "info",
                   "file": "server.log", "text": "Server has started \u{fffd}\u{1b}[31mé"}),
            json!({"time": "2026-11-29 16:44:03.000", "source": "Control", "pid": 100, "level": "noise",
                   "file": "control.log", "text": "Removed Shm file at "}),
        ]
    );
}

/// What a person sees of `uni-cumps` with these arguments.
fn seen(machine: &Sandbox, args: &str) -> String {
    let line = format!("{} {args}", uni_cumps().display());
    let call: Call<'_> = machine.on_a_terminal(&line).env("TERM", "xterm");
    call.finish().text().replace("\r\n", "\n")
}

#[test]
fn a_person_sees_levels_as_colours_and_nothing_acts_on_the_terminal() {
    let (machine, log) = machine();
    four(&log);
    append(
        log.join("server.log"),
        server("05.000", "evil \x1b]0;owned\x07\u{9b}\u{202e}"),
    );
    append(log.join("server.log"), "and a second line\n");
    assert_eq!(
        seen(&machine, "logs"),
        "\x1b[2m2026-11-29 16:44:01.000 Control     100\x1b[0m NEW CLIENT 7 from user 0
\x1b[2m2026-11-29 16:44:02.500  Server     100\x1b[0m \x1b[33mWarning: it is warm\x1b[0m
\x1b[2m2026-11-29 16:44:03.000 Control     100\x1b[0m \x1b[2mRemoved Shm file at \x1b[0m
\x1b[2m2026-11-29 16:44:04.000  Server     100\x1b[0m \x1b[31mServer is handling a fatal GPU error.\x1b[0m
\x1b[2m2026-11-29 16:44:05.000  Server     100\x1b[0m evil \\u{1b}]0;owned\\u{7}\\u{9b}\\u{202e}
\x1b[2m   \x1b[0m and a second line
"
    );
    for args in ["logs --raw", "logs --json"] {
        let text = seen(&machine, args);
        let raw = ['\x1b', '\x07', '\u{9b}', '\u{202e}'];
        assert!(text.contains("owned") && !text.contains(raw), "{text:?}");
    }
}

#[test]
fn a_person_sees_the_last_fifty_and_is_told_so() {
    let (machine, log) = machine();
    for number in 0..60 {
        let text = control(&format!("{number:02}.000"), &format!("number {number}"));
        append(log.join("control.log"), text);
    }
    let text = seen(&machine, "logs --color never");
    assert_eq!(text.matches("number ").count(), 50, "{text}");
    assert!(
        text.starts_with(
            "note: these are the last 50 messages; for all of them: -n all\n2026-11-29 16:44:10.000"
        ),
        "{text}"
    );
    for (args, count) in [
        ("logs -n all", 60),
        ("logs -n 3", 3),
        ("logs --since 2026-11-29", 60),
        ("logs --json", 60),
    ] {
        let text = seen(&machine, args);
        assert_eq!(text.matches("number ").count(), count, "{args}");
        assert!(!text.contains("note"), "{args}");
    }
}

#[test]
fn raw_is_one_file_behind_the_other_byte_for_byte() {
    let (machine, log) = machine();
    let (first, second) = (b"\xff\x00no end".to_vec(), server("01.000", "x\r"));
    fs::write(log.join("control.log"), &first).unwrap();
    fs::write(log.join("server.log"), &second).unwrap();
    let raw = machine.run(["logs", "--raw"]).succeeds();
    assert_eq!(raw.stdout, [&first[..], second.as_bytes()].concat());
    let raw = machine.run(["logs", "--raw", "--server"]).succeeds();
    assert_eq!(raw.stdout, second.as_bytes());
    for option in [
        &["-n", "1"][..],
        &["--since", "1h"],
        &["--level", "info"],
        &["--json"],
    ] {
        machine
            .run(["logs", "--raw"])
            .with(option)
            .breaks_usage()
            .said("cannot be used with");
    }
}

#[test]
fn lines_that_are_broken_are_given_out_as_they_are() {
    let (machine, log) = machine();
    let long = control("02.000", &"x".repeat(1 << 20));
    let file = [
        b"a beginning without a stamp\n".to_vec(),
        control("01.000", "a message").into_bytes(),
        b"\xff\xfe\x00 of two lines\n".to_vec(),
        long.clone().into_bytes(),
        control("01.998", "late by a moment").into_bytes(),
        b"[2026-11-29 16:44:03.0".to_vec(),
    ]
    .concat();
    fs::write(log.join("control.log"), &file).unwrap();
    let all = machine.run(["logs"]).succeeds().said_nothing();
    assert_eq!(all.stdout, [&file[..], b"\n"].concat());
    let last = machine.run(["logs", "-n", "2"]).succeeds();
    assert_eq!(last.stdout[..100], long.as_bytes()[..100]);
    assert!(last.stdout.ends_with(b"moment\n[2026-11-29 16:44:03.0\n"));
    // What has no stamp belongs to what stands before it, in every choice.
    let since = machine
        .run(["logs", "--since", "2026-11-29 16:44:01", "-n", "3"])
        .succeeds();
    assert!(
        since
            .stdout
            .starts_with(b"[2026-11-29 16:44:01.000 Control   100] a message\n\xff\xfe")
    );
}

#[test]
fn a_large_log_is_not_read_from_its_beginning() {
    let (machine, log) = machine();
    // A hole of 64 GiB takes no room, and hours to read.
    let file = OpenOptions::new()
        .write(true)
        .open(log.join("control.log"))
        .unwrap();
    file.set_len(64 << 30).unwrap();
    drop(file);
    let lines: String = (0..5000)
        .map(|number| control("01.000", &format!("number {number}")))
        .collect();
    append(log.join("control.log"), format!("\n{lines}"));
    let begun = Instant::now();
    let last = machine.run(["logs", "-n", "3000"]).succeeds().text();
    assert_eq!(last.lines().count(), 3000);
    assert!(last.starts_with(&control("01.000", "number 2000")));
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn since_is_a_time_on_the_wall() {
    let (machine, log) = machine();
    let all = four(&log);
    let lines: Vec<&str> = all.split_inclusive('\n').collect();
    machine
        .run(["logs", "--since", "2026-11-29 16:44:02.500"])
        .prints(&lines[1..].concat());
    machine
        .run(["logs", "--since", "2026-11-29T16:44:03"])
        .prints(&lines[2..].concat());
    machine.run(["logs", "--since", "2999-01-01"]).prints("");
    machine.run(["logs", "--since", "2026-11-29"]).prints(&all);
    // The whole time since 1970, and more than that.
    for ago in ["999999h", "9999999999w"] {
        machine.run(["logs", "--since", ago]).prints(&all);
    }
    for wrong in ["yesterday", "", "-1", "1.5h", "2026-11-29 25:00", "16:44"] {
        machine
            .run(["logs", &format!("--since={wrong}")])
            .breaks_usage()
            .said("it must be a time ago, such as 90, 10m");
    }
    for wrong in ["-1", "x", "1.5", "4294967296"] {
        machine
            .run(["logs", &format!("-n{wrong}")])
            .breaks_usage()
            .said("it must be a whole number, or all");
    }
}

#[test]
fn a_time_ago_is_that_of_the_daemons_own_zone() {
    let machine = Sandbox::new();
    let started = machine
        .run(["start", "--name", "a"])
        .env("TZ", "<+08>-8")
        .finish();
    assert_eq!(started.code, 0, "{started:?}");
    let log = machine.runtime().join("a/log/control.log");
    let stamp = |zone: &str, ago: &str| {
        let format = "+[%Y-%m-%d %H:%M:%S.000 Control   100]";
        let stamp = machine.sh(&format!("TZ='{zone}' date -d '{ago} ago' '{format}'"));
        format!("{} {ago}\n", stamp.trim_end())
    };
    let (old, new) = (
        stamp("<+08>-8", "30 minutes"),
        stamp("<+08>-8", "5 minutes"),
    );
    fs::write(&log, format!("{old}{new}")).unwrap();
    for zone in ["UTC0", "<-05>5"] {
        machine
            .run(["logs", "--since", "10m"])
            .env("TZ", zone)
            .prints(&new);
        machine
            .run(["logs", "--since", "1h"])
            .env("TZ", zone)
            .prints(&format!("{old}{new}"));
    }
    machine.run(["stop"]).succeeds();
    // It is gone, and nothing but the caller's own zone is known.
    fs::write(&log, stamp("<-05>5", "5 minutes")).unwrap();
    let gone = ["logs", "--name", "a", "--since", "10m"];
    machine.run(gone).env("TZ", "UTC0").prints("");
    let text = machine.run(gone).env("TZ", "<-05>5").succeeds().text();
    assert!(text.ends_with("5 minutes\n"), "{text}");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let machine = Sandbox::new();
    for args in [
        &["--control", "--server"][..],
        &["--name", "a", "--gpu", "0"],
        &["--level", "loud"],
        &["--name"],
    ] {
        machine.run(["logs"]).with(args).breaks_usage();
    }
}

#[test]
fn a_daemon_that_is_gone_has_left_its_logs() {
    let (machine, log) = machine();
    machine.run(["stop"]).succeeds();
    let all = four(&log);
    machine.run(["logs", "--name", "a"]).prints(&all);
    machine
        .run(["logs"])
        .fails("error: no recorded daemon is live\ncause: there are logs of a\nhint: uni-cumps logs --name a\n");
    let failure = machine.run(["logs", "--json"]).finish().exited(1).json();
    assert_eq!(failure["error"]["code"], "no-live-daemon");
    // A record of a daemon that was killed.
    let daemon = pid(&machine.start(&["--name", "b", "--log-dir", "elsewhere"]));
    machine.kill(daemon);
    append(machine.path("elsewhere/server.log"), server("01.000", "x"));
    machine
        .run(["logs", "--name", "b", "--server"])
        .prints(&server("01.000", "x"));
    machine.run(["logs"]).fails("there are logs of a, b\n");
}

#[test]
fn who_has_no_logs_is_told_so() {
    let machine = Sandbox::new();
    machine
        .run(["logs"])
        .fails("error: no recorded daemon is live\nhint: uni-cumps start\n");
    machine
        .run(["logs", "--name", "a"])
        .fails("no daemon named a is recorded");
    machine
        .run(["logs", "--name", "../a"])
        .fails("\"../a\" is not a daemon name");
    machine
        .run(["logs", "--gpu", "0"])
        .fails("no live daemon of yours serves GPU 0");
    machine.start(&["--name", "a"]);
    machine
        .run(["logs", "--server"])
        .prints("")
        .said("note: nothing stands in <S>/t/uni-cumps/a/log/server.log yet;");
    machine
        .run(["logs", "--server", "-q"])
        .prints("")
        .said_nothing();
    machine.sh("rm -r $RT/a/log");
    machine
        .run(["logs"])
        .fails("error: daemon a has no log directory \"<S>/t/uni-cumps/a/log\"\nhint: ls -ld <S>/t/uni-cumps/a\n");
    machine.sh("echo x > $RT/a/log");
    machine.run(["logs"]).fails("daemon a has no log directory");
}

#[test]
fn several_live_daemons_are_listed() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0", "--name", "a"]);
    machine.start(&["--gpus", "1", "--name", "b"]);
    machine
        .run(["logs"])
        .fails("several daemons are live: a, b\n")
        .said("hint: --name a");
    for (option, name) in [("--gpu=1", "b"), ("--gpu=0", "a"), ("--name=b", "b")] {
        let file = machine.runtime().join(name).join("log/control.log");
        fs::write(file, control("01.000", name)).unwrap();
        machine
            .run(["logs", option])
            .prints(&control("01.000", name));
    }
}

#[test]
fn a_daemon_that_is_named_is_not_disturbed() {
    let (machine, log) = machine();
    four(&log);
    machine.calls();
    machine.run(["logs", "--name", "a"]).succeeds();
    assert_eq!(machine.calls(), "", "no program is called");
    // One that is frozen has logs like any other.
    let daemon = machine.daemons()[0];
    crate::support::freeze(daemon);
    machine.run(["logs", "--name", "a", "-n", "1"]).succeeds();
    machine.run(["logs", "-n", "1"]).succeeds();
}

#[test]
fn a_start_that_does_not_come_to_its_end_has_logs() {
    let machine = Sandbox::new();
    machine.conduct("launch hang");
    let mut child = machine.run(["start", "--name", "a", "-q"]).spawn();
    wait_until("the launch hangs", || {
        let calls = fs::read_to_string(machine.bin().join("calls"));
        calls.is_ok_and(|calls| calls.contains("nvidia-cuda-mps-control -d"))
    });
    let log = machine.runtime().join("a/log/control.log");
    fs::write(&log, control("01.000", "x")).unwrap();
    machine
        .run(["logs", "--name", "a"])
        .prints(&control("01.000", "x"));
    let mut following = Following::of(machine.run(["logs", "--name", "a", "-f"]));
    assert_eq!(following.line(), control("01.000", "x"));
    signal(i32::try_from(child.id()).unwrap(), Signal::SIGINT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    following.ends_with_note();
}

#[test]
fn what_is_no_file_is_refused_and_nothing_waits_for_it() {
    let (machine, log) = machine();
    fs::write(machine.path("secret"), "a secret\n").unwrap();
    for (make, found) in [
        ("mkfifo", "a FIFO"),
        ("mkdir", "a directory"),
        ("ln -s $S/secret", "a symbolic link"),
        ("ln -s /nowhere", "a symbolic link"),
        ("ln -s /dev/zero", "a symbolic link"),
    ] {
        machine.sh(&format!(
            "rm -rf $RT/a/log/server.log; {make} $RT/a/log/server.log"
        ));
        for args in [&["logs"][..], &["logs", "--raw"], &["logs", "-f"]] {
            machine.run(args).fails(&format!(
                "error: \"<S>/t/uni-cumps/a/log/server.log\" is {found}, and no log\nhint: ls -l <S>/t/uni-cumps/a/log/server.log\n"
            ));
        }
        let failure = machine.run(["logs", "--json"]).finish().exited(1).json();
        assert_eq!(failure["error"]["code"], "not-a-log");
        machine.run(["logs", "--control"]).succeeds();
    }
    assert!(log.exists());
}

#[test]
fn another_users_record_is_not_followed() {
    let (machine, log) = machine();
    four(&log);
    let mut record = machine.reference_record("b", 1);
    record["uid"] = 54_321.into();
    machine.write_record("b", &record);
    machine
        .run(["logs", "--name", "b"])
        .fails("daemon b belongs to uid 54321");
    if without_root() {
        return;
    }
    // A default directory of somebody else's is none of ours.
    machine.sh("mkdir -p $RT/c/log; echo x > $RT/c/log/control.log; chown -R 54321 $RT/c");
    machine
        .run(["logs", "--name", "c"])
        .fails("no daemon named c is recorded");
    machine.sh("mkdir -p $RT/d/log; echo x > $RT/d/log/control.log; chown -R 54321 $RT/d/log");
    machine
        .run(["logs", "--name", "d"])
        .fails("no daemon named d is recorded");
}

#[test]
fn a_log_that_may_not_be_read_is_named() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    set_mode(machine.path("h"), 0o777);
    let started = machine.run(["start", "--name", "a"]).user(54_321).finish();
    assert_eq!(started.code, 0, "{started:?}");
    machine.sh("chown 0 $RT/a/log/control.log; chmod 600 $RT/a/log/control.log");
    machine
        .run(["logs"])
        .user(54_321)
        .fails("cannot read \"<S>/t/uni-cumps/a/log/control.log\"");
}

#[test]
fn a_reader_that_goes_away_ends_it_in_peace() {
    let (machine, log) = machine();
    for _ in 0..2000 {
        append(log.join("control.log"), control("01.000", &"x".repeat(100)));
    }
    for args in ["logs", "logs -f", "logs --json -f", "logs --raw -f"] {
        let line = format!(
            "{{ {} {args}; echo status $? >&2; }} | head -n 1",
            uni_cumps().display()
        );
        let call = machine
            .run([""; 0])
            .under(["/bin/sh", "-c", &line])
            .env("PATH", format!("{}:/usr/bin:/bin", machine.bin().display()));
        let done = call.succeeds();
        assert_eq!(done.text().lines().count(), 1);
        assert_eq!(done.stderr, "status 0\n", "{args}");
    }
    // Also where nothing more is written.
    fs::write(log.join("control.log"), "").unwrap();
    let mut following = Following::of(machine.run(["logs", "-fq"]));
    append(log.join("control.log"), control("01.000", "x"));
    assert_eq!(following.line(), control("01.000", "x"));
    following.out = None;
    assert_eq!(following.child.wait().unwrap().code(), Some(0));
}

/// `logs -f` at work.
struct Following {
    child: Child,
    out: Option<BufReader<ChildStdout>>,
    err: ChildStderr,
}

impl Following {
    fn of(call: Call<'_>) -> Self {
        let mut child = call.spawn();
        Self {
            out: child.stdout.take().map(BufReader::new),
            err: child.stderr.take().unwrap(),
            child,
        }
    }

    /// The next line, which comes in its time or never.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.as_mut().unwrap().read_line(&mut line).unwrap();
        line
    }

    /// It has ended because the daemon has, with nothing but this left to say.
    #[track_caller]
    fn ends_with_note(mut self) -> String {
        let (mut rest, mut told) = (String::new(), String::new());
        self.out
            .as_mut()
            .unwrap()
            .read_to_string(&mut rest)
            .unwrap();
        self.err.read_to_string(&mut told).unwrap();
        let note = "note: daemon a does not run, so nothing more comes\n";
        assert!(told.ends_with(note), "{told}");
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        rest
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_comes_is_followed_across_truncation_rename_and_removal() {
    let (machine, log) = machine();
    let (control_log, server_log) = (log.join("control.log"), log.join("server.log"));
    append(&control_log, control("01.000", "old"));
    let mut following = Following::of(machine.run(["logs", "-f"]));
    assert_eq!(following.line(), control("01.000", "old"));
    let mut comes = |file: &Path, second: &str, text: &str| {
        let written = control(second, text);
        append(file, &written);
        assert_eq!(following.line(), written);
    };
    comes(&control_log, "02.000", "appended");
    comes(&server_log, "03.000", "a file that has come only now");
    fs::write(&control_log, "").unwrap();
    comes(&control_log, "04.000", "behind a truncation");
    // As a daemon does, which keeps what it has opened.
    let renamed = log.join("control.log.1");
    fs::rename(&control_log, &renamed).unwrap();
    comes(&renamed, "05.000", "into the renamed file");
    comes(&control_log, "06.000", "into the new one");
    comes(&renamed, "07.000", "into the old one again");
    fs::remove_file(&server_log).unwrap();
    comes(&control_log, "08.000", "while the other is away");
    comes(&server_log, "09.000", "and it is there again");
    // What stands in the place of a log is not read, and the log goes on when it is back.
    fs::remove_file(&server_log).unwrap();
    fs::write(machine.path("secret"), "a secret\n").unwrap();
    symlink(machine.path("secret"), &server_log).unwrap();
    comes(&control_log, "10.000", "with a link beside it");
    fs::remove_file(&server_log).unwrap();
    machine.sh("mkfifo $RT/a/log/server.log");
    comes(&control_log, "11.000", "with a FIFO beside it");
    fs::remove_file(&server_log).unwrap();
    comes(&server_log, "12.000", "a file again");
    fs::remove_dir_all(&log).unwrap();
    fs::create_dir(&log).unwrap();
    comes(&control_log, "13.000", "in a new directory");
    machine.run(["stop", "--name", "a"]).succeeds();
    following.ends_with_note();
}

#[test]
fn a_line_is_printed_when_it_has_an_end() {
    let (machine, log) = machine();
    let file = log.join("control.log");
    let written = control("01.000", "in two parts");
    let (first, second) = written.split_at(30);
    append(&file, first);
    let mut following = Following::of(machine.run(["logs", "-f", "-n", "5"]));
    append(log.join("server.log"), server("00.000", "meanwhile"));
    assert_eq!(following.line(), server("00.000", "meanwhile"));
    append(&file, second);
    assert_eq!(following.line(), written);
    append(&file, "no end");
    machine.kill(machine.daemons()[0]);
    assert_eq!(following.ends_with_note(), "no end\n");
}

#[test]
fn what_comes_is_chosen_like_what_is_there() {
    let (machine, log) = machine();
    let file = log.join("control.log");
    append(&file, control("01.000", "Failed: old"));
    append(&file, control("02.000", "Failed: new"));
    let chosen = ["logs", "-f", "--control", "--level", "error", "-n", "1"];
    let mut following = Following::of(machine.run(chosen));
    assert_eq!(following.line(), control("02.000", "Failed: new"));
    append(
        log.join("server.log"),
        server("03.000", "Failed: of a server"),
    );
    append(&file, control("03.000", "of no interest"));
    append(&file, control("04.000", "Failed again"));
    assert_eq!(following.line(), control("04.000", "Failed again"));
    let mut objects = Following::of(machine.run(["logs", "-f", "--json", "-n0"]));
    let mut raw = Following::of(machine.run(["logs", "-f", "--raw", "--control"]));
    for second in ["01", "02", "03", "04"] {
        assert!(raw.line().contains(&format!("44:{second}.000 ")));
    }
    // Only what comes once it has looked is shown; when that is nobody tells.
    let (found, first) = std::sync::mpsc::channel();
    let mut out = objects.out.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        found.send(line).unwrap();
    });
    let mut object = None;
    wait_until("an object has come", || {
        append(&file, control("05.000", "new"));
        object = first.recv_timeout(Duration::from_millis(100)).ok();
        object.is_some()
    });
    reader.join().unwrap();
    let object: Value = serde_json::from_str(&object.unwrap()).unwrap();
    assert_eq!(object["time"], "2026-11-29 16:44:05.000");
    assert_eq!(raw.line(), control("05.000", "new"));
    fs::write(&file, "bytes without a stamp\n").unwrap();
    wait_until("the new beginning is read", || {
        raw.line() == "bytes without a stamp\n"
    });
}

#[test]
fn following_a_daemon_that_is_gone_ends_at_once() {
    let (machine, log) = machine();
    let all = four(&log);
    machine.kill(machine.daemons()[0]);
    for args in [
        &["logs", "--name", "a", "-f"][..],
        &["logs", "--name", "a", "-f", "--raw"],
    ] {
        let done = machine.run(args).succeeds();
        assert_eq!(
            done.stderr,
            "note: daemon a does not run, so nothing more comes\n"
        );
        assert_eq!(done.text().len(), all.len());
    }
    machine.sh("rm -r $REC/a");
    machine
        .run(["logs", "--name", "a", "-f"])
        .prints(&all)
        .said("note: daemon a does not run");
}

#[test]
fn ctrl_c_ends_it_as_a_shell_expects() {
    let (machine, log) = machine();
    append(log.join("control.log"), control("01.000", "x"));
    let mut following = Following::of(machine.run(["logs", "-f"]));
    assert_eq!(following.line(), control("01.000", "x"));
    signal(i32::try_from(following.child.id()).unwrap(), Signal::SIGINT);
    // The shell that waits for it calls this 130, and ends its own loop as well.
    let status = following.child.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::SIGINT as i32));
}
