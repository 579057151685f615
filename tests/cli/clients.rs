//! `clients`: who is on the GPUs, and the safe end of one of them. Servers and clients are processes that sleep; what the
//! daemon says of them the stand-in is told.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{
    Call, Done, Sandbox, Sleeper, U0, freeze, is_running, our_uid, pid, uni_cumps, wait_until,
    without_root,
};

/// The name of the user whom the tests run as.
fn our_name() -> String {
    let output = Command::new("/usr/bin/id").arg("-un").output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap().as_secs()
}

/// The daemon `a` of driver 550 with a server that has these clients. They may leave: the file `clients` says who is there.
pub(crate) fn serving(machine: &Sandbox, server: &Sleeper, clients: &[i32]) -> Value {
    serving_as(machine, server, clients, "")
}

/// Likewise with more to be said of its conduct.
fn serving_as(machine: &Sandbox, server: &Sleeper, clients: &[i32], more: &str) -> Value {
    let file = machine.path("clients");
    let clients: Vec<String> = clients.iter().map(ToString::to_string).collect();
    fs::write(&file, clients.join("\n")).unwrap();
    machine.conduct(&format!(
        "servers {0}\nstatus {0} ACTIVE\nclients-in {1}\n{more}\n",
        server.pid(),
        file.display()
    ));
    let record = machine.start(&["--name", "a", "--gpus", "0"]);
    machine.calls();
    record
}

/// What the daemon lists by now.
fn listed(machine: &Sandbox) -> String {
    fs::read_to_string(machine.path("clients")).unwrap()
}

/// What nvidia-smi says of processes: pid, GPU and memory.
fn apps(machine: &Sandbox, rows: &[(i32, &str, &str)]) {
    let rows = rows
        .iter()
        .map(|(pid, gpu, memory)| format!("{pid}, {gpu}, {memory}\n"));
    fs::write(machine.bin().join("apps.csv"), rows.collect::<String>()).unwrap();
}

fn clients<'s>(machine: &'s Sandbox, args: &[&str]) -> Call<'s> {
    machine.run(["clients"].iter().chain(args))
}

/// The only client in a report.
fn only_client(report: &Value) -> &Value {
    let clients = report["daemons"][0]["servers"][0]["clients"]
        .as_array()
        .unwrap();
    assert_eq!(clients.len(), 1, "{report:#}");
    &clients[0]
}

#[test]
fn servers_and_clients_are_told_with_all_that_is_known_of_them() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    apps(&machine, &[(client.pid(), U0, "812"), (1, U0, "5")]);
    let done = clients(&machine, &["--json"]).succeeds().said_nothing();
    let mut report = done.json();
    let since = report["daemons"][0]["servers"][0]["clients"][0]["since"].take();
    let since = since.as_u64().unwrap();
    assert!((now() - 60..=now() + 1).contains(&since), "{since}");
    let expected = json!({"daemons": [{
        "name": "a",
        "servers": [{
            "pid": server.pid(),
            "uid": our_uid(),
            "state": "ACTIVE",
            "clients": [{
                "pid": client.pid(),
                "program": "sleep",
                "uid": our_uid(),
                "user": our_name(),
                "since": null,
                "memory_mib": 812,
                "threads": 100.0,
            }],
        }],
        "error": null,
    }]});
    assert_eq!(report, expected);
    let text = clients(&machine, &[]).succeeds().said_nothing().text();
    let (server, pid, uid, name) = (server.pid(), client.pid(), our_uid(), our_name());
    assert_eq!(
        text,
        format!(
            "daemon name=a servers=1
server daemon=a pid={server} uid={uid} state=ACTIVE clients=1
client daemon=a server={server} pid={pid} uid={uid} user={name} since={since} memory_mib=812 threads=100 program=sleep
"
        )
    );
    machine.run(["ps"]).prints(&text);
}

#[test]
fn a_person_sees_a_table() {
    let machine = Sandbox::with_gpus(3);
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving_as(&machine, &server, &[client.pid()], "threads 12.5");
    machine.conduct("");
    machine.start(&["--name", "b", "--gpus", "1"]);
    freeze(pid(&machine.start(&["--name", "c", "--gpus", "2"])));
    let line = format!("{} clients", uni_cumps().display());
    let shown = machine.on_a_terminal(&line).env("NO_COLOR", "1").finish();
    let rows: Vec<Vec<String>> = shown
        .text()
        .lines()
        .map(|line| {
            let cells = line.split("  ").map(|cell| cell.trim().to_owned());
            cells.filter(|cell| !cell.is_empty()).collect()
        })
        .collect();
    let heading = [
        "DAEMON", "SERVER", "STATE", "CLIENT", "PROGRAM", "USER", "AGE", "MIB", "THREADS",
    ];
    assert_eq!(rows[0], heading);
    let (server, client) = (server.pid().to_string(), client.pid().to_string());
    let (before, behind) = (&rows[1][..6], &rows[1][7..]);
    assert_eq!(
        before,
        ["a", &server, "ACTIVE", &client, "sleep", &our_name()]
    );
    assert!(rows[1][6].ends_with(" s"), "{rows:?}");
    assert_eq!(behind, ["?", "12.5 %"]);
    assert_eq!(rows[2], ["b", "none", "-", "-", "-", "-", "-", "-", "-"]);
    assert_eq!(rows[3], ["c its process is stopped (state T)"]);
    assert_eq!((rows.len(), shown.code), (4, 1));
}

#[test]
fn without_a_daemon_there_is_nobody_and_nothing_is_called() {
    let machine = Sandbox::new();
    clients(&machine, &[])
        .prints("daemons=none\n")
        .said_nothing();
    clients(&machine, &["--json"]).prints("{\n  \"daemons\": []\n}\n");
    assert_eq!(machine.calls(), "");
    assert!(!machine.records().exists());
    let line = format!("{} clients", uni_cumps().display());
    let shown = machine.on_a_terminal(&line).finish().text();
    assert_eq!(shown.trim_end(), "No daemon. To start one: uni-cumps start");
}

#[test]
fn nvidia_smi_is_called_once_for_all_daemons_and_not_for_nobody() {
    let machine = Sandbox::with_gpus(2);
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    machine.start(&["--name", "b", "--gpus", "1"]);
    machine.calls();
    let report = clients(&machine, &["--json"]).succeeds().json();
    assert_eq!(report["daemons"].as_array().unwrap().len(), 2);
    assert_eq!(machine.calls().matches("nvidia-smi").count(), 1);
    fs::write(machine.path("clients"), "").unwrap();
    clients(&machine, &[]).prints(&format!(
        "daemon name=a servers=1
server daemon=a pid={0} uid={1} state=ACTIVE clients=0
daemon name=b servers=1
server daemon=b pid={0} uid={1} state=ACTIVE clients=0
",
        server.pid(),
        our_uid()
    ));
    assert_eq!(machine.calls().matches("nvidia-smi").count(), 0);
}

#[test]
fn who_has_ended_meanwhile_is_left_out_without_a_complaint() {
    let machine = Sandbox::new();
    let (server, client, gone) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    machine.kill(gone.pid());
    let record = serving(&machine, &server, &[gone.pid(), client.pid(), 4_194_303]);
    let report = clients(&machine, &["--json"]).succeeds().said_nothing();
    assert_eq!(only_client(&report.json())["pid"], client.pid());
    machine.kill(server.pid());
    clients(&machine, &[])
        .prints("daemon name=a servers=0\n")
        .said_nothing();
    machine.kill(pid(&record));
    let lost = Sleeper::new();
    let conduct = format!("lost {}", lost.pid());
    serving_as(&machine, &lost, &[client.pid()], &conduct);
    clients(&machine, &[])
        .prints("daemon name=a servers=0\n")
        .said_nothing();
}

#[test]
fn a_driver_that_tells_no_state_is_believed_to_have_one() {
    let machine = Sandbox::new();
    let server = Sleeper::new();
    machine.conduct(&format!("servers {}\npid-file no", server.pid()));
    machine.start(&["--name", "a", "--gpus", "0"]);
    let report = clients(&machine, &["--json"]).succeeds().json();
    assert_eq!(report["daemons"][0]["servers"][0]["state"], Value::Null);
    let text = clients(&machine, &[]).succeeds().said_nothing().text();
    assert!(text.contains(" state=unknown clients=0\n"), "{text}");
}

#[test]
fn a_fault_is_told() {
    let machine = Sandbox::new();
    let server = Sleeper::new();
    for state in ["FAULT", "INITIALIZING"] {
        machine.conduct(&format!("servers {0}\nstatus {0} {state}", server.pid()));
        let record = machine.start(&["--name", "a", "--gpus", "0"]);
        let text = clients(&machine, &[]).succeeds().text();
        assert!(text.contains(&format!(" state={state} ")), "{text}");
        machine.kill(pid(&record));
    }
}

/// A client that was started with this percentage.
fn limited(percentage: &str) -> Sleeper {
    let mut command = Command::new("/bin/sleep");
    command
        .arg("600")
        .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage);
    let client = Sleeper(command.spawn().unwrap());
    let environ = format!("/proc/{}/cmdline", client.pid());
    wait_until("it is the program", || {
        fs::read(&environ).unwrap().starts_with(b"/bin/sleep")
    });
    client
}

#[test]
fn a_client_has_its_own_percentage_or_its_servers_whichever_is_less() {
    for (own, of_server, expected) in [
        ("30", "threads 100.0", json!(30.0)),
        ("80", "threads 50.0", json!(50.0)),
        ("many", "threads 50.0", json!(50.0)),
        ("30", "threads none", json!(30.0)),
        ("", "threads none", Value::Null),
        ("", "threads nan", Value::Null),
        ("", "threads inf", Value::Null),
    ] {
        let machine = Sandbox::new();
        let (server, client) = (Sleeper::new(), limited(own));
        serving_as(&machine, &server, &[client.pid()], of_server);
        let report = clients(&machine, &["--json"]).succeeds().json();
        assert_eq!(only_client(&report)["threads"], expected, "{own}");
        let text = clients(&machine, &[]).succeeds().text();
        let is_unknown = text.contains(" threads=unknown");
        assert_eq!(is_unknown, expected.is_null(), "{text}");
    }
}

#[test]
fn memory_is_summed_over_gpus_and_unknown_where_it_is_not_told() {
    let machine = Sandbox::with_gpus(2);
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    let other = crate::support::U1;
    for (rows, expected) in [
        (
            &[(client.pid(), U0, "800"), (client.pid(), other, "12")][..],
            json!(812),
        ),
        (&[(client.pid(), U0, "[N/A]")], Value::Null),
        (&[(1, U0, "800")], Value::Null),
    ] {
        apps(&machine, rows);
        let report = clients(&machine, &["--json"]).succeeds().json();
        assert_eq!(only_client(&report)["memory_mib"], expected);
    }
    machine.remove_program("nvidia-smi");
    let report = clients(&machine, &["--json"]).succeeds().said_nothing();
    assert_eq!(only_client(&report.json())["memory_mib"], Value::Null);
}

#[test]
fn a_daemon_that_dies_in_between_hides_no_other() {
    for moment in ["get_server_status", "get_client_list"] {
        let machine = Sandbox::with_gpus(2);
        let (server, client) = (Sleeper::new(), Sleeper::new());
        let dies = format!("dies-at {moment}");
        serving_as(&machine, &server, &[client.pid()], &dies);
        machine.conduct("");
        machine.start(&["--name", "b", "--gpus", "1"]);
        let done = clients(&machine, &["--json"]).finish().exited(1);
        let report = done.json();
        assert_eq!(report["daemons"][0]["name"], "a");
        assert_eq!(report["daemons"][0]["servers"], json!([]));
        let reason = report["daemons"][0]["error"].as_str().unwrap();
        assert!(reason.contains("Cannot find MPS control"), "{reason}");
        assert_eq!(
            report["daemons"][1],
            json!({"name": "b", "servers": [], "error": null})
        );
    }
}

#[test]
fn a_daemon_that_cannot_be_asked_is_told_with_its_reason() {
    let machine = Sandbox::with_gpus(2);
    freeze(pid(&machine.start(&["--name", "a", "--gpus", "0"])));
    machine.start(&["--name", "b", "--gpus", "1"]);
    machine.sh("rm \"$RT/b/pipe/control\" \"$RT/b/pipe/control_privileged\"");
    for args in [&[][..], &["--name", "a"], &["--name", "b"]] {
        let done = clients(&machine, args).finish().exited(1).said_nothing();
        let text = done.text();
        let (frozen, hidden) = (
            "daemon name=a error=its process is stopped (state T)\n",
            "daemon name=b error=there is no \"<S>/t/uni-cumps/b/pipe/control\"\n",
        );
        assert_eq!(text.contains(frozen), args != ["--name", "b"], "{text}");
        assert_eq!(text.contains(hidden), args != ["--name", "a"], "{text}");
    }
}

#[test]
fn a_daemon_may_be_named_or_meant_by_its_gpu() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--name", "a", "--gpus", "0"]);
    let b = machine.start(&["--name", "b", "--gpus", "1"]);
    for args in [["--name", "b"], ["--gpu", "1"], ["--gpus", "1"]] {
        clients(&machine, &args).prints("daemon name=b servers=0\n");
    }
    clients(&machine, &["--name", "c"]).fails("no daemon named c is recorded");
    clients(&machine, &["--gpu", "2"]).fails("no live daemon of yours serves GPU 2");
    let failure = clients(&machine, &["--gpu", "2", "--json"])
        .finish()
        .exited(1)
        .json();
    assert_eq!(failure["error"]["code"], "no-daemon-for-gpu");
    machine.kill(pid(&b));
    clients(&machine, &["--name", "b"]).fails("daemon b is no longer running");
    clients(&machine, &[]).prints("daemon name=a servers=0\n");
}

#[test]
fn without_the_control_program_nobody_can_be_asked() {
    let machine = Sandbox::new();
    machine.start(&["--name", "a", "--gpus", "0"]);
    machine.remove_program("nvidia-cuda-mps-control");
    clients(&machine, &[]).fails("nvidia-cuda-mps-control is not on PATH");
}

#[test]
fn what_is_not_understood_is_refused() {
    let machine = Sandbox::new();
    for args in [
        &["--terminate"][..],
        &["--terminate", "0"],
        &["--terminate", "-5"],
        &["--terminate", "python"],
        &["--terminate", "4294967297"],
        &["--signal"],
        &["--timeout", "5"],
        &["--terminate", "1", "--timeout", "0"],
        &["--terminate", "1", "--timeout", "never"],
        &["--terminate", "1", "2"],
        &["--name", "a", "--gpu", "0"],
    ] {
        clients(&machine, args).breaks_usage();
    }
    assert_eq!(machine.calls(), "");
}

#[test]
fn the_help_tells_the_order_and_its_reason() {
    let machine = Sandbox::new();
    let help = clients(&machine, &["--help"]).succeeds().text();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for promise in [
        "its next CUDA call fails with error 810",
        "Only when the daemon has let go of it",
        "killed in the middle of its GPU work may leave the server and all its other clients undefined",
    ] {
        assert!(help.contains(promise), "{promise} in {help}");
    }
}

/// `clients --terminate` of this process.
fn terminate<'s>(machine: &'s Sandbox, pid: i32, args: &[&str]) -> Call<'s> {
    let pid = pid.to_string();
    machine
        .run(["clients", "--terminate", &pid])
        .with(args.iter())
}

/// The signal that has ended the process; it is waited for.
fn ended_by(mut process: Sleeper) -> Option<i32> {
    process.0.wait().unwrap().signal()
}

/// It fails with this sentence, and the client runs and is listed as before.
#[track_caller]
fn is_refused<'s>(
    machine: &'s Sandbox,
    client: &Sleeper,
    args: &[&str],
    sentence: &str,
) -> Done<'s> {
    let before = listed(machine);
    let done = terminate(machine, client.pid(), args).fails(sentence);
    assert!(is_running(client.pid()));
    assert_eq!(listed(machine), before);
    done
}

#[test]
fn the_daemon_lets_go_of_a_client_which_runs_on() {
    let machine = Sandbox::new();
    let (server, client, other) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[other.pid(), client.pid()]);
    let done = terminate(&machine, client.pid(), &["--json"]);
    let report = done.succeeds().said_nothing().json();
    let expected = json!({"terminated": {
        "pid": client.pid(),
        "program": "sleep",
        "daemon": "a",
        "server": server.pid(),
        "signalled": false,
        "running": true,
    }});
    assert_eq!(report, expected);
    assert_eq!(listed(&machine), other.pid().to_string());
    assert!(is_running(client.pid()) && is_running(other.pid()));
    let calls = machine.calls();
    let asked: Vec<&str> = calls
        .lines()
        .filter_map(|line| line.strip_prefix("    < "))
        .filter(|line| *line != "<marker>")
        .collect();
    let (server, pid) = (server.pid(), client.pid());
    let list = format!("get_client_list {server}");
    let let_go = format!("terminate_client {server} {pid}");
    assert_eq!(asked, ["get_server_list", &list, &let_go, &list]);
    terminate(&machine, other.pid(), &[]).prints(&format!(
        "terminated pid={} daemon=a server={server} signalled=False running=True program=sleep\n",
        other.pid()
    ));
}

#[test]
fn a_signal_comes_only_after_the_daemon_has_let_go() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    let line = format!(
        "{} clients --terminate {} --signal",
        uni_cumps().display(),
        client.pid()
    );
    let shown = machine.on_a_terminal(&line).env("NO_COLOR", "1");
    let text = shown.succeeds().text();
    assert_eq!(
        text.trim_end(),
        format!(
            "done pid {} (sleep) is no client of a any more; SIGTERM has ended it",
            client.pid()
        )
    );
    assert_eq!(listed(&machine), "");
    assert_eq!(ended_by(client), Some(Signal::SIGTERM as i32));
    assert!(is_running(server.pid()));
}

#[test]
fn a_stopped_client_is_ended_as_well() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    freeze(client.pid());
    let report = terminate(&machine, client.pid(), &["--signal", "--json"]).succeeds();
    assert_eq!(report.json()["terminated"]["signalled"], true);
    assert_eq!(report.json()["terminated"]["running"], false);
    assert_eq!(ended_by(client), Some(Signal::SIGTERM as i32));
}

#[test]
fn a_daemon_that_refuses_is_quoted_and_nobody_is_signalled() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving_as(&machine, &server, &[client.pid()], "terminate refused");
    let sentence = "daemon a did not let go of its client";
    let cause = format!(
        "cause: it answered: Server {0} not found; Server {0} not found!\n",
        server.pid()
    );
    for args in [&[][..], &["--signal"]] {
        is_refused(&machine, &client, args, sentence).said(&cause);
    }
    let failure = terminate(&machine, client.pid(), &["--json"])
        .finish()
        .exited(1)
        .json();
    assert_eq!(failure["error"]["code"], "terminate-refused");
}

#[test]
fn a_client_that_has_gone_by_itself_is_done() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving_as(&machine, &server, &[client.pid()], "clients-stay no");
    // The daemon answers that it does not know it.
    let done = terminate(&machine, client.pid(), &["--json"]);
    assert_eq!(done.succeeds().json()["terminated"]["running"], true);
    let asked = machine.calls();
    assert!(asked.contains("< terminate_client "), "{asked}");
}

#[test]
fn a_client_that_stays_listed_is_not_signalled() {
    let machine = Sandbox::new();
    let (server, client) = (Sleeper::new(), Sleeper::new());
    let stays = format!("clients {}", client.pid());
    serving_as(&machine, &server, &[], &stays);
    let begun = Instant::now();
    is_refused(
        &machine,
        &client,
        &["--signal", "--timeout", "1"],
        &format!("daemon a still lists its client {} after 1 s", client.pid()),
    );
    let took = begun.elapsed();
    assert!((1..8).contains(&took.as_secs()), "{took:?}");
}

#[test]
fn a_daemon_that_does_not_answer_or_dies_keeps_the_client_from_a_signal() {
    for (conduct, cause) in [
        ("terminate stuck", "cause: no answer within 1 s\n"),
        ("dies-at terminate_client", "cause: Cannot find MPS control"),
    ] {
        let machine = Sandbox::new();
        let (server, client) = (Sleeper::new(), Sleeper::new());
        serving_as(&machine, &server, &[client.pid()], conduct);
        is_refused(
            &machine,
            &client,
            &["--signal", "--timeout", "1"],
            "daemon a did not let go of its client",
        )
        .said(cause);
    }
}

#[test]
fn a_process_that_does_not_mind_sigterm_is_named() {
    let machine = Sandbox::new();
    let server = Sleeper::new();
    let mut shell = Command::new("/bin/sh");
    let ready = machine.path("ready");
    let line = format!("trap '' TERM; : > {}; exec sleep 600", ready.display());
    let client = Sleeper(shell.args(["-c", &line]).spawn().unwrap());
    wait_until("it ignores SIGTERM", || ready.exists());
    serving(&machine, &server, &[client.pid()]);
    let pid = client.pid();
    terminate(&machine, pid, &["--signal", "--timeout", "1"])
        .fails(&format!("pid {pid} still runs 1 s after SIGTERM"))
        .said(&format!(
            "hint: as no client, it may be ended: kill -KILL {pid}"
        ));
    assert_eq!(listed(&machine), "");
    assert!(is_running(pid));
}

#[test]
fn who_is_no_client_is_refused() {
    let machine = Sandbox::with_gpus(2);
    let (server, client, stranger) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    let record = serving(&machine, &server, &[client.pid()]);
    let sentence = "was not found among the clients of any live daemon of yours";
    for args in [&[][..], &["--signal"]] {
        is_refused(&machine, &stranger, args, sentence);
    }
    is_refused(
        &machine,
        &stranger,
        &["--name", "a"],
        "was not found among the clients of daemon a",
    );
    is_refused(
        &machine,
        &server,
        &["--signal"],
        &format!(
            "pid {} is a server of daemon a, and no client",
            server.pid()
        ),
    )
    .said("hint: uni-cumps stop --name a");
    let daemon = pid(&record);
    terminate(&machine, daemon, &["--signal"])
        .fails(&format!("pid {daemon} is the control process of daemon a"));
    machine.kill(stranger.pid());
    terminate(&machine, stranger.pid(), &[])
        .fails(&format!("no process with pid {} runs", stranger.pid()));
    assert!(is_running(daemon) && is_running(server.pid()));
    let calls = machine.calls();
    assert!(!calls.contains("terminate_client"), "{calls}");
}

#[test]
fn a_client_is_looked_for_with_every_daemon_or_with_the_one_that_is_named() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--name", "0", "--gpus", "1"]);
    freeze(pid(&machine.start(&["--name", "1", "--gpus", "2"])));
    let (server, client) = (Sleeper::new(), Sleeper::new());
    serving(&machine, &server, &[client.pid()]);
    let elsewhere = "was not found among the clients of daemon 0";
    is_refused(&machine, &client, &["--name", "0"], elsewhere);
    is_refused(&machine, &client, &["--gpu", "1"], elsewhere);
    is_refused(
        &machine,
        &client,
        &["--name", "1"],
        "was not found among the clients of daemon 1",
    )
    .said("cause: daemon 1 could not be asked: its process is stopped (state T)\n");
    terminate(&machine, client.pid(), &["--gpu", "0"]).succeeds();
    assert_eq!(listed(&machine), "");
    terminate(&machine, client.pid(), &[])
        .fails("was not found among the clients of any live daemon of yours")
        .said("cause: daemon 1 could not be asked");
}

#[test]
fn the_number_of_a_thread_is_refused_and_the_process_named() {
    let machine = Sandbox::new();
    let program = "import threading,time; threading.Thread(target=time.sleep, args=(600,)).start()";
    let mut command = Command::new("python3");
    let client = Sleeper(command.args(["-c", program]).spawn().unwrap());
    let threads = || -> Vec<i32> {
        let tasks = fs::read_dir(format!("/proc/{}/task", client.pid())).unwrap();
        tasks
            .map(|task| task.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect()
    };
    wait_until("there are two threads", || threads().len() == 2);
    let thread = threads().into_iter().find(|it| *it != client.pid());
    let server = Sleeper::new();
    serving(&machine, &server, &[client.pid()]);
    terminate(&machine, thread.unwrap(), &[])
        .fails("was not found among the clients")
        .said(&format!("it is a thread of process {}", client.pid()))
        .said(&format!("hint: --terminate {}", client.pid()));
}

#[test]
fn another_users_process_is_let_go_and_not_signalled() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let mut command = Command::new("/usr/bin/setpriv");
    command.args(["--reuid=65534", "--clear-groups", "/bin/sleep", "600"]);
    let (server, client) = (Sleeper::new(), Sleeper(command.spawn().unwrap()));
    let status = format!("/proc/{}/cmdline", client.pid());
    wait_until("it is another user's", || {
        fs::read(&status).unwrap().starts_with(b"/bin/sleep")
    });
    serving(&machine, &server, &[client.pid()]);
    is_refused(
        &machine,
        &client,
        &["--signal"],
        "belongs to uid 65534; you are uid 0, and nothing was done",
    );
    assert!(!machine.calls().contains("terminate_client"));
    let report = clients(&machine, &["--json"]).succeeds().json();
    assert_eq!(only_client(&report)["uid"], 65534);
    terminate(&machine, client.pid(), &[]).succeeds();
    assert_eq!(listed(&machine), "");
    assert!(is_running(client.pid()));
}

#[test]
fn a_daemon_of_another_pid_namespace_is_told_nothing() {
    if without_root() {
        return;
    }
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    let machine = Sandbox::new();
    let server = Sleeper::new();
    // There, it would be the number of uni-cumps itself.
    serving(&machine, &server, &[1]);
    terminate(&machine, 1, &["--signal"])
        .under(elsewhere)
        .fails("pid 1 was not found among the clients")
        .said("daemon a could not be asked: it was started in another pid namespace");
    clients(&machine, &[])
        .under(elsewhere)
        .finish()
        .exited(1)
        .printed("daemon name=a error=it was started in another pid namespace, and its pids mean nothing here\n");
    assert_eq!(listed(&machine), "1");
    assert_eq!(machine.calls(), "");
}
