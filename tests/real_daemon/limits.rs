//! Limits as NVIDIA's own daemons keep and show them.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Call, Sandbox, U0, U1, is_running, our_uid, pid, wait_until};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("limits_are_set_read_back_and_cleared", set_and_cleared),
    ("limits_of_every_percentage_are_confirmed", percentages),
    ("limits_of_memory_are_confirmed_in_every_size", sizes),
    ("limits_of_each_gpu_are_its_own", each_gpu),
    ("start_sets_limits", start),
    ("foreground_sets_limits", foreground),
    ("limits_of_a_server_that_is_not_ready", server_not_ready),
    ("limits_end_with_the_daemon", end_with_the_daemon),
];

/// `limits --set` with these.
fn set<'s>(machine: &'s Sandbox, settings: &[&str]) -> Call<'s> {
    let settings = settings.iter().map(|setting| format!("--set={setting}"));
    machine.run(["limits"]).with(settings)
}

/// What the daemon answers for servers to come.
fn default(machine: &Sandbox) -> Value {
    let mut limits = machine.run(["limits", "--json"]).succeeds().json();
    limits["daemons"][0]["default"].take()
}

fn recorded(machine: &Sandbox) -> Value {
    let text = fs::read_to_string(machine.record_file("a")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["limits"].take()
}

fn set_and_cleared(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    let none = json!({"threads": 100.0, "memory": {U0: null}, "priority": "normal"});
    assert_eq!(default(&machine), none);
    set(&machine, &["threads=30", "memory=8G", "priority=low"])
        .succeeds()
        .said_nothing();
    assert_eq!(
        default(&machine),
        json!({"threads": 30.0, "memory": {U0: "8G"}, "priority": "low"})
    );
    set(&machine, &["memory=512M"]).succeeds();
    assert_eq!(default(&machine)["memory"], json!({U0: "512M"}));
    set(&machine, &["memory=", "threads=", "priority="]).succeeds();
    assert_eq!(default(&machine), none);
    assert_eq!(recorded(&machine), Value::Null);
    // What was none before may be cleared as well.
    set(&machine, &["memory=0=", "threads=", "priority="]).succeeds();
}

fn percentages(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    for (percentage, shown) in [
        ("1", 1.0),
        ("12.345", 12.3),
        ("12.35", 12.3),
        ("12.25", 12.2),
        ("33.333", 33.3),
        ("99.95", 99.9),
        ("99.96", 100.0),
        ("100", 100.0),
    ] {
        let setting = format!("threads={percentage}");
        set(&machine, &[&setting]).succeeds();
        let found = default(&machine)["threads"].as_f64().unwrap();
        // The half is rounded up or down with the precision that the driver has.
        assert!((found - shown).abs() < 0.11, "{percentage}: {found}");
    }
}

fn sizes(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    for (size, shown) in [
        ("1M", "1M"),
        ("1023M", "1023M"),
        ("1024M", "1G"),
        ("1536M", "1G"),
        ("2047MiB", "1G"),
        ("2gb", "2G"),
        ("143771M", "140G"),
        ("1048576G", "1048576G"),
    ] {
        set(&machine, &[&format!("memory={size}")]).succeeds();
        assert_eq!(default(&machine)["memory"][U0], shown, "{size}");
    }
}

fn each_gpu(driver: &Driver) {
    let machine = Sandbox::with_real_control(&driver.directory, 2);
    machine.start(&["--gpus", "1,0", "--name", "a", "--memory", "1=4G"]);
    assert_eq!(default(&machine)["memory"], json!({U1: "4G", U0: null}));
    set(&machine, &[&format!("memory={U0}=2G")]).succeeds();
    assert_eq!(default(&machine)["memory"], json!({U1: "4G", U0: "2G"}));
    let log = machine.runtime().join("a/log/control.log");
    let log = fs::read_to_string(log).unwrap();
    assert!(
        log.contains("Cmd:set_default_device_pinned_mem_limit 1 2048M\n"),
        "by the daemon's own number: {log}"
    );
    set(&machine, &["memory=2=1G"]).fails("the daemon does not serve GPU 2");
}

fn start(driver: &Driver) {
    let machine = driver.machine();
    let record = machine.start(&[
        "--name",
        "a",
        "--threads",
        "30",
        "--memory",
        "8G",
        "--priority",
        "low",
    ]);
    let limits = json!({"threads": 30.0, "memory": {U0: "8192M"}, "priority": "low"});
    assert_eq!(record["limits"], limits);
    let daemon = pid(&record);
    let shown = machine.run(["limits"]).succeeds().said_nothing();
    assert_eq!(
        shown.text(),
        format!(
            "daemon name=a state=live pid={daemon}\n\
             limits daemon=a of=default threads=30.0 memory=GPU-U0=8G priority=low\n"
        )
    );
    let stopped = machine.run(["stop"]).succeeds().json();
    assert_eq!(stopped["stopped"][0], record);
}

fn foreground(driver: &Driver) {
    let machine = driver.machine();
    let mut child = machine
        .run(["start", "--foreground", "--name", "a", "--threads", "30"])
        .spawn();
    wait_until("it is recorded", || machine.record_file("a").exists());
    assert_eq!(recorded(&machine), json!({"threads": 30.0}));
    assert_eq!(default(&machine)["threads"], 30.0);
    machine.run(["stop"]).succeeds();
    assert!(child.wait().unwrap().success());
}

/// A script in a server's place never becomes ready, and the daemon then says nothing about it.
fn server_not_ready(driver: &Driver) {
    let machine = driver.machine();
    machine.script("nvidia-cuda-mps-server", "exec /bin/sleep 600");
    let daemon = pid(&machine.start(&["--name", "a"]));
    machine.sh(&format!(
        "echo start_server -uid {} | CUDA_MPS_PIPE_DIRECTORY=$RT/a/pipe \"$CONTROL\"",
        our_uid()
    ));
    let mut shown = Value::Null;
    wait_until("the daemon has a server", || {
        let mut limits = machine.run(["limits", "--json"]).succeeds().json();
        shown = limits["daemons"][0]["servers"].take();
        shown != json!([])
    });
    let server = shown[0]["pid"].as_i64().unwrap();
    assert_eq!(
        shown,
        json!([{"pid": server, "ready": false, "threads": null, "memory": null}])
    );
    set(&machine, &["threads=30"]).fails(&format!(
        "error: server {server} of daemon a does not tell its limits\n"
    ));
    assert_eq!(default(&machine)["threads"], 30.0);
    assert_eq!(recorded(&machine), json!({"threads": 30.0}));
    machine.run(["stop", "--timeout", "0"]).succeeds();
    assert!(!is_running(daemon));
}

fn end_with_the_daemon(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a", "--threads", "30"]);
    machine.run(["stop"]).succeeds();
    let next = machine.start(&["--name", "a"]);
    assert!(next.get("limits").is_none());
    assert_eq!(default(&machine)["threads"], 100.0);
}
