//! `stop` against daemons that do not simply quit: busy, blocked, frozen, with a server that will not go. What a server
//! does is played by a script, since NVIDIA's needs a GPU.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{
    Sandbox, Sleeper, freeze, is_running, our_uid, pid, signal, uni_cumps, wait_until,
};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("the_clients_of_a_busy_daemon_are_cut_off", busy_is_cut_off),
    ("a_server_that_ends_in_time_is_waited_for", server_ends),
    ("a_stop_that_was_given_up_is_taken_up_again", given_up),
    ("without_patience_an_idle_daemon_still_quits", no_patience),
    ("a_blocked_daemon_gets_sigterm", blocked),
    ("a_frozen_daemon_is_ended_only_with_force", frozen),
    (
        "a_server_that_ignores_sigterm_is_ended_only_with_force",
        stubborn_server,
    ),
    (
        "a_stubborn_server_is_ended_by_the_command_of_the_hint",
        hint_ends_the_server,
    ),
    ("stop_all_goes_on_and_reports_each", stop_all),
    ("a_timeout_is_a_number_of_seconds_up_to_a_day", usage),
    ("a_record_of_another_boot_is_of_the_dead", other_boot),
    ("a_second_daemon_on_a_gpu_needs_force", second_daemon),
    ("the_daemon_has_no_terminal", no_terminal),
];

/// Longer than any refusal takes, and shorter than the time that `stop` gives a daemon to quit.
const AT_ONCE: Duration = Duration::from_secs(10);

/// A machine whose MPS servers are sleeping scripts.
pub(crate) fn with_servers(driver: &Driver, gpus: usize, prepare: &str) -> Sandbox {
    let machine = Sandbox::with_real_control(&driver.directory, gpus);
    machine.script(
        "nvidia-cuda-mps-server",
        &format!("{prepare}\nexec /bin/sleep 600"),
    );
    machine
}

/// A session of NVIDIA's front-end with the daemon `name`.
pub(crate) fn front_end(machine: &Sandbox, name: &str) -> Command {
    let pipe = machine.runtime().join(name).join("pipe");
    let mut command = Command::new(machine.bin().join("nvidia-cuda-mps-control"));
    command
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Has the daemon start a server and returns the server's pid.
fn start_server(machine: &Sandbox, daemon: &Value) -> i32 {
    let name = daemon["name"].as_str().unwrap();
    let mut session = front_end(machine, name).spawn().unwrap();
    let line = format!("start_server -uid {}\n", our_uid());
    std::io::Write::write_all(&mut session.stdin.take().unwrap(), line.as_bytes()).unwrap();
    assert!(session.wait().unwrap().success());
    let daemon = pid(daemon);
    let mut found = None;
    wait_until("the server runs", || {
        let children = fs::read_to_string(format!("/proc/{daemon}/task/{daemon}/children"));
        let children = children.unwrap();
        found = children.split_whitespace().find_map(|child| {
            let line = fs::read(format!("/proc/{child}/cmdline")).ok()?;
            line.starts_with(b"/bin/sleep")
                .then(|| child.parse().unwrap())
        });
        found.is_some()
    });
    found.unwrap()
}

/// A daemon `a` and its server.
pub(crate) fn busy(machine: &Sandbox) -> (Value, i32) {
    let record = machine.start(&["--name", "a"]);
    let server = start_server(machine, &record);
    (record, server)
}

fn log_of(machine: &Sandbox, name: &str) -> String {
    let file = machine.runtime().join(name).join("log/control.log");
    fs::read_to_string(file).unwrap_or_default()
}

/// Waits until `stop` in the background has told the daemon `a` to quit.
fn wait_for_quit(machine: &Sandbox) {
    wait_until("quit was said", || {
        log_of(machine, "a").contains("Cmd:quit\n")
    });
}

/// Neither daemon nor server runs, and neither record nor sockets are left.
#[track_caller]
fn nothing_is_left(machine: &Sandbox, name: &str, processes: &[i32]) {
    machine.has_no_daemon();
    for process in processes {
        assert!(!is_running(*process), "pid {process}");
    }
    assert!(!machine.records().join(name).exists());
    assert!(!machine.runtime().join(name).join("pipe").exists());
}

fn busy_is_cut_off(driver: &Driver) {
    let machine = with_servers(driver, 1, "");
    let (record, server) = busy(&machine);
    let done = machine.run(["stop", "--timeout", "1"]).succeeds();
    assert_eq!(done.json(), json!({"stopped": [record]}));
    assert_eq!(
        done.stderr,
        "note: the clients of a did not end within 1 s and are cut off\n"
    );
    nothing_is_left(&machine, "a", &[pid(&record), server]);
    assert!(log_of(&machine, "a").contains("Exit with status"));
    machine.start(&["--name", "a"]);
}

fn server_ends(driver: &Driver) {
    let machine = with_servers(driver, 1, "");
    let (record, server) = busy(&machine);
    let mut stop = machine.run(["stop"]).spawn();
    wait_for_quit(&machine);
    assert!(stop.try_wait().unwrap().is_none(), "stop waits");
    assert!(is_running(server) && is_running(pid(&record)));
    assert!(machine.record_file("a").exists());
    signal(server, Signal::SIGTERM);
    let output = stop.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report, json!({"stopped": [record]}));
    nothing_is_left(&machine, "a", &[pid(&record), server]);
}

/// The daemon has accepted `quit`, answers nobody any more, and waits.
fn given_up(driver: &Driver) {
    let machine = with_servers(driver, 1, "");
    let (record, server) = busy(&machine);
    let mut stop = machine.run(["stop"]).spawn();
    wait_for_quit(&machine);
    signal(i32::try_from(stop.id()).unwrap(), Signal::SIGINT);
    assert!(!stop.wait().unwrap().success());
    assert!(machine.record_file("a").exists());
    assert!(is_running(server) && is_running(pid(&record)));
    // It also ends the next one while that asks for the clients in vain.
    let stop = machine.run(["stop", "--timeout", "1"]).spawn();
    let children = format!("/proc/{0}/task/{0}/children", stop.id());
    wait_until("it asks the daemon", || {
        fs::read_to_string(&children).is_ok_and(|children| !children.is_empty())
    });
    signal(i32::try_from(stop.id()).unwrap(), Signal::SIGINT);
    let output = stop.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(is_running(server) && is_running(pid(&record)));
    machine
        .run(["stop", "--timeout", "1"])
        .succeeds()
        .said("cut off");
    nothing_is_left(&machine, "a", &[pid(&record), server]);
}

fn no_patience(driver: &Driver) {
    let machine = driver.machine();
    let record = machine.start(&["--name", "a"]);
    machine
        .run(["stop", "--timeout", "0"])
        .succeeds()
        .said_nothing();
    nothing_is_left(&machine, "a", &[pid(&record)]);
    assert!(log_of(&machine, "a").contains("Exit with status 0"));
}

/// A client of the daemon that says nothing.
fn silent_client(machine: &Sandbox, name: &str) -> Child {
    let client = front_end(machine, name).spawn().unwrap();
    wait_until("it is connected", || {
        let log = log_of(machine, name);
        log.matches("NEW UI").count() > log.matches("UI closed").count()
    });
    client
}

fn blocked(driver: &Driver) {
    let machine = driver.machine();
    let record = machine.start(&["--name", "a"]);
    let mut client = silent_client(&machine, "a");
    let done = machine.run(["stop", "--timeout", "1"]).succeeds();
    assert_eq!(done.json(), json!({"stopped": [record]}));
    assert_eq!(
        done.stderr,
        "note: daemon a gets SIGTERM: it did not quit within 1 s\n"
    );
    // The client is a control program as well, and ends when it notices.
    drop(client.stdin.take());
    client.wait().unwrap();
    nothing_is_left(&machine, "a", &[pid(&record)]);
}

fn frozen(driver: &Driver) {
    let machine = with_servers(driver, 1, "");
    let (record, server) = busy(&machine);
    let daemon = pid(&record);
    freeze(daemon);
    let begun = Instant::now();
    machine
        .run(["stop"])
        .fails(&format!("the daemon a (pid {daemon}) does not answer"))
        .said("cause: its process is stopped (state T)")
        .said(&format!("kill -CONT {daemon}, or add --force to end it"));
    assert!(begun.elapsed() < AT_ONCE);
    assert!(is_running(daemon) && is_running(server));
    assert!(machine.record_file("a").exists());
    let done = machine.run(["stop", "--force"]).succeeds();
    assert_eq!(done.json(), json!({"stopped": [record]}));
    assert_eq!(
        done.stderr,
        "note: daemon a gets SIGTERM: it is stopped (state T)\n"
    );
    nothing_is_left(&machine, "a", &[daemon, server]);
}

/// A daemon that cannot be told to quit, with a server that does not mind SIGTERM.
fn stubborn(driver: &Driver) -> (Sandbox, Value, i32) {
    let machine = with_servers(driver, 1, "trap '' TERM");
    let (record, server) = busy(&machine);
    fs::remove_file(machine.runtime().join("a/pipe/control_privileged")).unwrap();
    (machine, record, server)
}

fn stubborn_server(driver: &Driver) {
    let (machine, record, server) = stubborn(driver);
    let done = machine.run(["stop", "--force"]).succeeds();
    assert_eq!(done.json(), json!({"stopped": [record]}));
    assert_eq!(
        done.stderr,
        format!(
            "note: daemon a gets SIGTERM: it refused to quit: Not enough privilege to execute quit command\n\
             note: pid {server} gets SIGKILL: work in flight may leave the GPU undefined until all its clients have ended\n"
        )
    );
    nothing_is_left(&machine, "a", &[pid(&record), server]);
}

fn hint_ends_the_server(driver: &Driver) {
    let (machine, record, server) = stubborn(driver);
    machine
        .run(["stop"])
        .fails(&format!("pid {server} of daemon a is still running"))
        .said("cause: SIGTERM did not end it")
        .said("hint: uni-cumps stop --name a --force");
    // The daemon stays as well: it proves whose the server is.
    assert!(is_running(pid(&record)) && is_running(server));
    assert!(machine.record_file("a").exists());
    // As the hint says.
    machine.run(["stop", "--name", "a", "--force"]).finish();
    nothing_is_left(&machine, "a", &[pid(&record), server]);
}

fn stop_all(driver: &Driver) {
    let machine = with_servers(driver, 3, "");
    let start = |gpu, name| machine.start(&["--gpus", gpu, "--name", name]);
    let [busy, frozen, healthy] = [("0", "a"), ("1", "b"), ("2", "c")].map(|(g, n)| start(g, n));
    let server = start_server(&machine, &busy);
    freeze(pid(&frozen));
    let done = machine
        .run(["stop", "--all", "--timeout", "1"])
        .finish()
        .exited(1);
    let message = format!("the daemon b (pid {}) does not answer", pid(&frozen));
    assert_eq!(
        done.json(),
        json!({
            "stopped": [busy, healthy],
            "failed": [{"name": "b", "code": "not-answering", "message": message}],
        })
    );
    assert_eq!(
        done.stderr,
        format!(
            "note: the clients of a did not end within 1 s and are cut off\n\
             error: {message}\n\
             cause: its process is stopped (state T)\n\
             hint: let it go on with kill -CONT {}, or add --force to end it\n",
            pid(&frozen)
        )
    );
    assert_eq!(machine.daemons(), [pid(&frozen)]);
    assert!(!is_running(server));
    let left = |name| machine.record_file(name).exists();
    assert_eq!(["a", "b", "c"].map(left), [false, true, false]);
    machine.run(["stop", "--all", "--force"]).succeeds();
    nothing_is_left(&machine, "b", &[pid(&frozen)]);
}

fn usage(driver: &Driver) {
    let machine = driver.machine();
    let record = machine.start(&["--name", "a"]);
    for wrong in ["abc", "99999999", "86401", "-1", "1.5", "", "1s"] {
        let option = format!("--timeout={wrong}");
        machine
            .run(["stop", &option])
            .breaks_usage()
            .said("--timeout");
    }
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop", "--timeout", "86400"]).succeeds();
    machine.has_no_daemon();
}

/// The number and even the start time may be those of a living process: after a boot that means nothing.
fn other_boot(driver: &Driver) {
    let machine = driver.machine();
    let innocent = Sleeper::new();
    let mut record = machine.reference_record("a", innocent.pid());
    record["boot_id"] = "00000000-0000-4000-8000-000000000000".into();
    for end in ["start", "stop", "all"] {
        machine.write_record("a", &record);
        let status = machine.run(["status"]).succeeds().text();
        let line = format!("\ndaemon name=a state=other-boot pid={} ", innocent.pid());
        assert!(status.contains(&line), "{status}");
        let report = machine.run(["status", "--json"]).succeeds().json();
        assert_eq!(report["managed_daemons"][0]["record_state"], "other-boot");
        assert_eq!(report["managed_daemons"][0]["process_live"], false);
        machine
            .run(["env", "--name", "a"])
            .fails_in_the_shell("daemon a is no longer running; its record is stale");
        match end {
            "start" => {
                let started = machine.start(&["--name", "a"]);
                assert_eq!(machine.daemons(), [pid(&started)]);
                assert_ne!(started["boot_id"], record["boot_id"]);
                machine.run(["stop"]).succeeds();
            }
            "stop" => {
                machine
                    .run(["stop", "--name", "a", "--force"])
                    .fails("daemon a was not running; its stale record was removed");
            }
            _ => {
                machine
                    .run(["stop", "--all"])
                    .prints("{\n  \"stopped\": []\n}\n");
            }
        }
        nothing_is_left(&machine, "a", &[]);
        assert!(is_running(innocent.pid()));
    }
}

fn second_daemon(driver: &Driver) {
    let machine = driver.machine();
    let first = machine.start(&["--name", "a"]);
    let sentence = format!(
        "daemon a (pid {}) already serves GPU index 0 (GPU-U0)",
        pid(&first)
    );
    machine
        .run(["start", "--name", "b"])
        .fails(&sentence)
        .said("two MPS servers on one GPU share it by time slices")
        .said("uni-cumps stop --name a");
    assert!(!machine.record_file("b").exists());
    assert_eq!(machine.daemons(), [pid(&first)]);
    machine
        .run(["start", "--name", "a", "--force"])
        .fails("daemon a is already live");
    let second = machine
        .run(["start", "--name", "b", "--force"])
        .succeeds()
        .said(&format!(
            "note: {sentence}: their servers take turns on it\n"
        ))
        .json();
    assert_eq!(first["gpu_uuids"], second["gpu_uuids"]);
    let mut daemons = [pid(&first), pid(&second)];
    daemons.sort_unstable();
    let mut running = machine.daemons();
    running.sort_unstable();
    assert_eq!(running, daemons);
    let report = machine.run(["doctor"]).finish().exited(1).text();
    assert!(
        report.contains("several daemons serve this GPU: a, b"),
        "{report}"
    );
    let stopped = machine.run(["stop", "--all"]).succeeds().json();
    assert_eq!(stopped, json!({"stopped": [first, second]}));
    machine.has_no_daemon();
}

/// Field 7 of `/proc/<pid>/stat`: the controlling terminal.
fn terminal_of(pid: i32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields = stat.rsplit_once(") ").unwrap().1;
    fields.split(' ').nth(4).unwrap().to_owned()
}

fn no_terminal(driver: &Driver) {
    let machine = driver.machine();
    let line = format!(
        "/bin/cat /proc/self/stat; exec {} start --name a",
        uni_cumps().display()
    );
    let done = machine.on_a_terminal(&line).succeeds();
    let text = done.text();
    let of_caller = text.rsplit_once(") ").unwrap().1.split(' ').nth(4);
    assert_ne!(of_caller, Some("0"), "the caller has one: {text}");
    let daemons = machine.daemons();
    assert_eq!(daemons.len(), 1);
    assert_eq!(terminal_of(daemons[0]), "0");
    machine.run(["doctor"]).succeeds();
}
