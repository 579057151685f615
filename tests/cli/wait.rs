//! Waiting until a daemon is as somebody needs it.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::{N0, Sandbox, U1, freeze, our_uid, pid, signal, uni_cumps, wait_until};

/// How often the daemons were asked by now.
fn questions(machine: &Sandbox) -> usize {
    let calls = fs::read_to_string(machine.bin().join("calls")).unwrap_or_default();
    calls.matches("get_server_list").count()
}

/// A daemon `a` with a server, whose clients stand in a file.
fn with_clients(pids: &str) -> Sandbox {
    let machine = Sandbox::new();
    let file = machine.path("clients");
    fs::write(&file, pids).unwrap();
    machine.conduct(&format!("servers 4711\nclients-in {}", file.display()));
    machine.start(&["--name", "a"]);
    machine.calls();
    machine
}

/// Other clients from now on. In one step: a look between two would see none.
fn now_has_clients(machine: &Sandbox, pids: &str) {
    let aside = machine.path("clients.new");
    fs::write(&aside, pids).unwrap();
    fs::rename(aside, machine.path("clients")).unwrap();
}

/// A plain line without its time.
fn line(text: &str) -> &str {
    let (line, time) = text.trim_end().rsplit_once(" waited_s=").unwrap();
    assert!(time.parse::<f64>().unwrap() >= 0.0);
    line
}

/// How a wait that runs beside us ends: with 0 and this line.
#[track_caller]
fn ends_with(wait: Child, expected: &str) {
    let output = wait.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(line(&text), expected);
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn what_is_so_already_is_told_at_once() {
    let machine = Sandbox::new();
    let daemon = pid(&machine.start(&["--name", "a"]));
    for options in [
        &["--name", "a"][..],
        &["--gpu", "0"],
        &["--gpus", "0"],
        &["--timeout", "0"],
        &[],
    ] {
        for condition in ["ready", "idle"] {
            let wait = machine.run(["wait", "--for", condition]).with(options);
            let text = wait.succeeds().said_nothing().text();
            let expected = format!(
                "wait name=a for={condition} reached=True state=live pid={daemon} servers=0 clients=0"
            );
            assert_eq!(line(&text), expected);
        }
    }
    let report = machine.run(["wait", "--for=ready", "--json"]).succeeds();
    let mut report = report.said_nothing().json();
    assert!(report["waited_s"].take().as_f64().unwrap() < 10.0);
    let expected = json!({
        "name": "a",
        "for": "ready",
        "reached": true,
        "state": {"record_state": "live", "pid": daemon, "servers": 0, "clients": 0, "reason": null},
        "waited_s": null,
    });
    assert_eq!(report, expected);
}

#[test]
fn ready_waits_for_a_daemon_that_somebody_else_starts() {
    for options in [&["--name", N0][..], &["--gpu", "0"], &[]] {
        let machine = Sandbox::new();
        let wait = machine.run(["wait", "--for", "ready"]).with(options);
        let mut wait = wait.spawn();
        // Long enough for a look or two that find nothing.
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(wait.try_wait().unwrap(), None);
        let daemon = pid(&machine.start(&[]));
        ends_with(
            wait,
            &format!(
                "wait name={N0} for=ready reached=True state=live pid={daemon} servers=0 clients=0"
            ),
        );
    }
}

#[test]
fn attached_waits_for_so_many_clients() {
    let machine = with_clients("11");
    let daemon = machine.daemons()[0];
    let wait = machine.run(["wait", "--name", "a", "--for", "attached=2"]);
    let wait = wait.spawn();
    wait_until("it has asked twice", || questions(&machine) >= 2);
    now_has_clients(&machine, "11 12 13");
    ends_with(
        wait,
        &format!(
            "wait name=a for=attached=2 reached=True state=live pid={daemon} servers=1 clients=3"
        ),
    );
}

#[test]
fn idle_waits_for_the_last_client_to_leave() {
    let machine = with_clients("11 12");
    let daemon = machine.daemons()[0];
    let wait = machine.run(["wait", "--for", "idle"]).spawn();
    wait_until("it has asked twice", || questions(&machine) >= 2);
    now_has_clients(&machine, "12");
    let before = questions(&machine);
    wait_until("it has asked again", || questions(&machine) >= before + 2);
    now_has_clients(&machine, "");
    ends_with(
        wait,
        &format!("wait name=a for=idle reached=True state=live pid={daemon} servers=1 clients=0"),
    );
}

#[test]
fn gone_waits_for_the_end_and_asks_nothing() {
    for options in [&["--name", "a"][..], &["--gpu", "0"], &[]] {
        let machine = Sandbox::new();
        machine.start(&["--name", "a"]);
        machine.calls();
        let wait = machine.run(["wait", "--for", "gone"]).with(options);
        let mut wait = wait.spawn();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(wait.try_wait().unwrap(), None);
        assert_eq!(questions(&machine), 0);
        machine.run(["stop"]).succeeds();
        let output = wait.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // The record goes a moment after the process.
        let ends = ["absent", "stale"].map(|state| {
            format!("wait name=a for=gone reached=True state={state} pid=none servers=unknown clients=unknown")
        });
        assert!(ends.contains(&line(&text).to_owned()), "{output:?}");
        assert!(output.status.success());
    }
}

#[test]
fn a_daemon_that_was_killed_is_gone_though_its_record_stays() {
    let machine = Sandbox::new();
    let daemon = pid(&machine.start(&["--name", "a"]));
    let wait = machine
        .run(["wait", "--name", "a", "--for", "gone"])
        .spawn();
    machine.kill(daemon);
    ends_with(
        wait,
        "wait name=a for=gone reached=True state=stale pid=none servers=unknown clients=unknown",
    );
}

#[test]
fn a_daemon_whose_name_another_one_has_is_gone() {
    let machine = Sandbox::new();
    let daemon = pid(&machine.start(&["--name", "a"]));
    let wait = machine
        .run(["wait", "--name", "a", "--for", "gone"])
        .spawn();
    // Seen by its connection to the daemon.
    std::thread::sleep(Duration::from_millis(300));
    freeze(i32::try_from(wait.id()).unwrap());
    machine.kill(daemon);
    let next = pid(&machine.start(&["--name", "a"]));
    signal(i32::try_from(wait.id()).unwrap(), Signal::SIGCONT);
    ends_with(
        wait,
        &format!(
            "wait name=a for=gone reached=True state=live pid={next} servers=unknown clients=unknown"
        ),
    );
}

#[test]
fn a_daemon_whose_pipe_directory_is_kept_is_not_gone() {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    machine.kill(machine.daemons()[0]);
    let other = machine.start_by_hand("t/uni-cumps/a/pipe", "l");
    let wait = ["wait", "--name", "a", "--for", "gone", "--timeout", "0"];
    machine
        .run(wait)
        .fails("waited 0 s in vain for daemon a to be gone")
        .said(&format!(
            "cause: last seen: stale, pid {other} keeps its pipe directory\n"
        ));
    machine.kill(other);
    machine.run(wait).succeeds();
}

#[test]
fn nothing_is_gone_already() {
    let machine = Sandbox::new();
    for options in [&["--name", "a"][..], &["--gpu", "0"], &[]] {
        let wait = machine.run(["wait", "--for", "gone"]).with(options);
        let text = wait.succeeds().said_nothing().text();
        let name = if options == ["--name", "a"] {
            "a"
        } else {
            "none"
        };
        let expected = format!(
            "wait name={name} for=gone reached=True state=absent pid=none servers=unknown clients=unknown"
        );
        assert_eq!(line(&text), expected);
    }
    assert!(!machine.records().exists(), "a wait leaves nothing");
}

#[test]
fn a_wait_in_vain_tells_the_last_state() {
    let machine = with_clients("11");
    let daemon = machine.daemons()[0];
    for (arguments, sentence, seen, hint) in [
        (
            "--name b --for ready",
            "waited 0 s in vain for daemon b to be ready",
            "absent, no daemon named b is recorded".to_owned(),
            "uni-cumps start --name b",
        ),
        (
            "--for attached=2",
            "waited 0 s in vain for daemon a to have 2 clients",
            format!("live, pid {daemon}, servers 1, clients 1"),
            "uni-cumps run --name a -- CMD, or wait longer with --timeout",
        ),
        (
            "--gpu 0 --for idle",
            "waited 0 s in vain for daemon a to have no client",
            format!("live, pid {daemon}, servers 1, clients 1"),
            "wait longer with --timeout, or uni-cumps stop --name a",
        ),
        (
            "--for gone",
            "waited 0 s in vain for daemon a to be gone",
            format!("live, pid {daemon}, servers 1, clients 1"),
            "uni-cumps stop --name a",
        ),
    ] {
        let wait = ["wait", "--timeout", "0"].into_iter();
        machine
            .run(wait.chain(arguments.split(' ')))
            .fails(sentence)
            .said(&format!("cause: last seen: {seen}\nhint: {hint}\n"));
    }
    let wait = ["wait", "--for", "attached=2", "--timeout=1", "--json"];
    let failed = machine.run(wait).finish().exited(1);
    let mut report = failed.json();
    assert!(report["waited_s"].take().as_f64().unwrap() >= 1.0);
    let expected = json!({
        "name": "a",
        "for": "attached=2",
        "reached": false,
        "state": {"record_state": "live", "pid": daemon, "servers": 1, "clients": 1, "reason": null},
        "waited_s": null,
        "error": {
            "code": "timed-out",
            "message": format!(
                "waited 1 s in vain for daemon a to have 2 clients: last seen: live, pid {daemon}, servers 1, clients 1"
            ),
            "hint": "uni-cumps run --name a -- CMD, or wait longer with --timeout",
        },
    });
    assert_eq!(report, expected);
    failed.said("error: waited 1 s in vain for daemon a to have 2 clients\n");
}

#[test]
fn a_daemon_is_asked_now_and_then() {
    let machine = with_clients("");
    let wait = ["wait", "--for", "attached=1", "--timeout", "2"];
    machine
        .run(wait)
        .fails("in vain for daemon a to have a client");
    let asked = questions(&machine);
    assert!((4..=8).contains(&asked), "{asked}");
}

#[test]
fn a_daemon_that_is_silent_is_not_ready() {
    let machine = Sandbox::new();
    machine.conduct("answers never");
    let daemon = machine.start_by_hand("p", "l");
    let mut record = machine.reference_record("a", daemon);
    record["pipe_directory"] = machine.path("p").to_str().unwrap().into();
    record["log_directory"] = machine.path("l").to_str().unwrap().into();
    machine.write_record("a", &record);
    let begun = Instant::now();
    machine
        .run(["wait", "--for", "ready", "--timeout", "1"])
        .fails("waited 1 s in vain for daemon a to be ready")
        .said(&format!("live, pid {daemon}, no answer within 1 s"));
    assert!(begun.elapsed() < Duration::from_secs(15));
}

#[test]
fn a_stopped_daemon_is_not_asked_until_it_goes_on() {
    let machine = with_clients("");
    let daemon = machine.daemons()[0];
    freeze(daemon);
    machine
        .run(["wait", "--for", "ready", "--timeout", "1"])
        .fails("in vain for daemon a to be ready")
        .said("not-answering, pid ")
        .said("its process is stopped")
        .said(&format!("hint: let it go on: kill -CONT {daemon}"));
    assert_eq!(questions(&machine), 0);
    let wait = machine.run(["wait", "--for", "idle"]).spawn();
    std::thread::sleep(Duration::from_millis(200));
    signal(daemon, Signal::SIGCONT);
    ends_with(
        wait,
        &format!("wait name=a for=idle reached=True state=live pid={daemon} servers=1 clients=0"),
    );
}

#[test]
fn a_daemon_that_dies_meanwhile_is_told() {
    let machine = with_clients("11");
    let daemon = machine.daemons()[0];
    let spawn = |condition: &str| {
        let before = questions(&machine);
        let wait = ["wait", "--name", "a", "--timeout", "3", "--for", condition];
        let wait = machine.run(wait).spawn();
        wait_until("it has asked", || questions(&machine) > before);
        wait
    };
    let (attached, idle) = (spawn("attached=2"), spawn("idle"));
    machine.kill(daemon);
    let told = |wait: Child| {
        let output = wait.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    // Nobody will see its clients leave.
    let idle = told(idle);
    assert!(
        idle.starts_with("error: daemon a is no longer running; its record is stale\n"),
        "{idle}"
    );
    let attached = told(attached);
    assert!(
        attached.contains("cause: last seen: stale\nhint: uni-cumps start --name a\n"),
        "{attached}"
    );
}

#[test]
fn what_nobody_else_can_change_fails_at_once() {
    let machine = Sandbox::with_gpus(2);
    let mut record = machine.reference_record("far", 1);
    record["host"] = "elsewhere".into();
    machine.write_record("far", &record);
    let mut record = machine.reference_record("theirs", 1);
    record["uid"] = (our_uid() + 1).into();
    machine.write_record("theirs", &record);
    for condition in ["ready", "attached=1", "idle", "gone"] {
        for (name, sentence) in [
            ("far", "daemon far was started on host \"elsewhere\""),
            ("theirs", "daemon theirs belongs to uid "),
        ] {
            let wait = ["wait", "--name", name, "--for", condition];
            machine.run(wait).fails(sentence);
        }
    }
    machine
        .run(["wait", "--name", "none", "--for", "idle"])
        .fails("no daemon named none is recorded");
    machine
        .run(["wait", "--for", "idle"])
        .fails("no recorded daemon is live");
    machine
        .run(["wait", "--gpu", "7", "--for", "ready"])
        .fails("GPU selector \"7\" matches no GPU of this machine");
    machine.start(&["--name", "a", "--gpus", "0"]);
    machine.start(&["--name", "b", "--gpus", U1]);
    machine
        .run(["wait", "--for", "ready"])
        .fails("several daemons are live: a, b");
    machine
        .run(["wait", "--name", "No Name", "--for", "ready"])
        .fails("No Name");
    machine.remove_program("nvidia-cuda-mps-control");
    let failed = machine.run(["wait", "--name", "a", "--for=ready", "--json"]);
    let failed = failed
        .finish()
        .exited(1)
        .said("nvidia-cuda-mps-control is not on PATH");
    assert_eq!(failed.json()["error"]["code"], "no-program");
}

#[test]
fn a_record_that_cannot_be_read_is_waited_for() {
    let machine = Sandbox::new();
    let file = machine.record_file("a");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, "{").unwrap();
    for condition in ["ready", "gone"] {
        let wait = ["wait", "--name", "a", "--timeout", "0", "--for", condition];
        machine
            .run(wait)
            .fails("in vain for daemon a to be")
            .said("last seen: damaged, <S>/h/.cache/unilab/cuda-mps/a/daemon.json: ");
    }
    let mut wait = machine
        .run(["wait", "--name", "a", "--for", "ready"])
        .spawn();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(wait.try_wait().unwrap(), None);
    let daemon = pid(&machine.start(&["--name", "a"]));
    ends_with(
        wait,
        &format!("wait name=a for=ready reached=True state=live pid={daemon} servers=0 clients=0"),
    );
}

#[test]
fn an_interruption_ends_the_wait() {
    let machine = with_clients("");
    for (number, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        machine.calls();
        let wait = machine.run(["wait", "--for", "attached=1"]).spawn();
        wait_until("it has asked twice", || questions(&machine) >= 2);
        signal(i32::try_from(wait.id()).unwrap(), number);
        let output = wait.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert_eq!(output.stdout, b"");
    }
    assert_eq!(machine.daemons().len(), 1);
}

#[test]
fn a_wait_that_makes_no_sense_is_not_understood() {
    let machine = Sandbox::new();
    for arguments in [
        "",
        "--for",
        "--for attached",
        "--for attached=",
        "--for attached=0",
        "--for attached=-1",
        "--for attached=two",
        "--for live",
        "--for Ready",
        "--for ready --timeout -1",
        "--for ready --timeout soon",
        "--for ready --name a --gpu 0",
        "--for ready --for gone",
    ] {
        let words = arguments.split_whitespace();
        machine.run(["wait"]).with(words).breaks_usage();
    }
    machine
        .run(["wait", "--for", "attached=0"])
        .breaks_usage()
        .said("the number of clients must be 1 or more, as in attached=2");
}

#[test]
fn a_person_sees_what_is_waited_for_and_what_came_of_it() {
    let machine = Sandbox::new();
    let seen = |arguments: &str| {
        let line = format!("{} wait {arguments}", uni_cumps().display());
        let call = machine.on_a_terminal(&line).env("NO_COLOR", "1");
        call.finish().text().replace("\r\n", "\n")
    };
    let text = seen("--name a --for ready --timeout 1");
    assert!(
        text.contains("| waiting for daemon a to be ready (0 s)"),
        "{text:?}"
    );
    let daemon = pid(&machine.start(&["--name", "a"]));
    let text = seen("--for ready");
    let text = text.rsplit_once(", after ").unwrap().0;
    assert_eq!(text, format!("ready daemon a (pid {daemon}), 0 clients"));
    machine.run(["stop"]).succeeds();
    let text = seen("--for gone");
    assert!(
        text.starts_with("gone no daemon is live, after 0."),
        "{text:?}"
    );
}

#[test]
fn a_wait_for_one_of_several_daemons_is_about_that_one() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--name", "a", "--gpus", "0"]);
    machine.start(&["--name", "b", "--gpus", "1"]);
    let wait = machine.run(["wait", "--gpu", U1, "--for", "gone"]).spawn();
    machine.run(["stop", "--name", "a"]).succeeds();
    std::thread::sleep(Duration::from_millis(200));
    let mut wait = wait;
    assert_eq!(wait.try_wait().unwrap(), None);
    machine.run(["stop", "--name", "b"]).succeeds();
    let output = wait.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.starts_with("wait name=b for=gone reached=True "),
        "{text}"
    );
}
