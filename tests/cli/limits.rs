//! Limits of daemons: set at the start and later, each read back, shown as the daemon says them.

use std::fs;

use serde_json::{Value, json};

use crate::support::{
    N0, Sandbox, U0, U1, U2, freeze, pid, uni_cumps, uuid, wait_until, without_root,
};

const UNLIMITED: &str =
    "limits daemon=a of=default threads=100.0 memory=GPU-U0=none priority=normal\n";

/// A machine with a daemon named `a` that behaves like this.
fn machine_with(conduct: &str, gpus: usize) -> (Sandbox, Value) {
    let machine = Sandbox::with_gpus(gpus);
    machine.conduct(conduct);
    let all: Vec<String> = (0..gpus).map(|index| index.to_string()).collect();
    let record = machine.start(&["--gpus", &all.join(","), "--name", "a"]);
    machine.calls();
    (machine, record)
}

/// What stands in the record of the daemon `a`.
fn recorded(machine: &Sandbox) -> Value {
    let text = fs::read_to_string(machine.record_file("a")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["limits"].take()
}

/// What the control program was told to set, in order.
fn told(machine: &Sandbox) -> Vec<String> {
    let calls = machine.calls();
    calls
        .lines()
        .filter_map(|line| line.trim().strip_prefix("< "))
        .filter(|line| line.starts_with("set_"))
        .map(str::to_owned)
        .collect()
}

/// The plain lines without that of the daemon itself.
fn shown(machine: &Sandbox) -> String {
    let text = machine.run(["limits"]).succeeds().said_nothing().text();
    let (daemon, rest) = text.split_once('\n').unwrap();
    assert!(
        daemon.starts_with("daemon name=a state=live pid="),
        "{text}"
    );
    rest.to_owned()
}

#[test]
fn a_daemon_without_limits_says_so() {
    let (machine, record) = machine_with("", 1);
    let daemon = pid(&record);
    machine.run(["limits"]).prints(&format!(
        "daemon name=a state=live pid={daemon}\n{UNLIMITED}"
    ));
    let limits = machine.run(["limits", "--json"]).succeeds().json();
    let default = json!({"threads": 100.0, "memory": {U0: null}, "priority": "normal"});
    assert_eq!(
        limits,
        json!({"daemons": [{"name": "a", "pid": daemon, "default": default, "servers": []}]})
    );
    assert!(record.get("limits").is_none());
    assert_eq!(told(&machine), [""; 0], "nothing is set by looking");
}

#[test]
fn limits_are_set_one_by_one_and_cleared() {
    let (machine, _) = machine_with("", 1);
    for (setting, line) in [
        (
            "threads=30",
            "threads=30.0 memory=GPU-U0=none priority=normal",
        ),
        (
            "memory=8GiB",
            "threads=30.0 memory=GPU-U0=8G priority=normal",
        ),
        ("priority=low", "threads=30.0 memory=GPU-U0=8G priority=low"),
        // From 1 GiB on the rest is not shown.
        ("memory=1536M", "threads=30.0 memory=GPU-U0=1G priority=low"),
        (
            "memory=512M",
            "threads=30.0 memory=GPU-U0=512M priority=low",
        ),
        (
            "threads=12.345",
            "threads=12.3 memory=GPU-U0=512M priority=low",
        ),
        ("threads=", "threads=100.0 memory=GPU-U0=512M priority=low"),
        ("memory=0=", "threads=100.0 memory=GPU-U0=none priority=low"),
        ("memory=0=1G", "threads=100.0 memory=GPU-U0=1G priority=low"),
        ("memory=", "threads=100.0 memory=GPU-U0=none priority=low"),
        (
            "priority=",
            "threads=100.0 memory=GPU-U0=none priority=normal",
        ),
    ] {
        let done = machine.run(["limits", "--set", setting]).succeeds();
        let line = format!("limits daemon=a of=default {line}\n");
        assert!(done.text().ends_with(&line), "{setting}: {done:?}");
        assert_eq!(shown(&machine), line);
    }
    assert_eq!(
        told(&machine),
        [
            "set_default_active_thread_percentage 30",
            "set_default_device_pinned_mem_limit 0 8192M",
            "set_default_client_priority 1",
            "set_default_device_pinned_mem_limit 0 1536M",
            "set_default_device_pinned_mem_limit 0 512M",
            "set_default_active_thread_percentage 12.345",
            "set_default_active_thread_percentage 100",
            "set_default_device_pinned_mem_limit 0 0M",
            "set_default_device_pinned_mem_limit 0 1024M",
            "set_default_device_pinned_mem_limit 0 0M",
            "set_default_client_priority 0",
        ]
    );
}

#[test]
fn what_was_confirmed_is_recorded() {
    let (machine, record) = machine_with("", 1);
    let set = |settings: &[&str]| {
        let settings = settings.iter().map(|setting| format!("--set={setting}"));
        machine.run(["limits"]).with(settings).succeeds();
        recorded(&machine)
    };
    assert_eq!(
        set(&["threads=30", "memory=1536M", "priority=low"]),
        json!({"threads": 30.0, "memory": {U0: "1536M"}, "priority": "low"})
    );
    let status = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(status["managed_daemons"][0]["limits"]["threads"], 30.0);
    assert_eq!(set(&["memory=", "priority="]), json!({"threads": 30.0}));
    assert_eq!(set(&["threads="]), Value::Null);
    let now = machine.run(["stop"]).succeeds().json();
    assert_eq!(now["stopped"][0], record);
}

#[test]
fn each_gpu_has_its_own_memory_limit_by_the_daemons_own_number() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--gpus", "2,0", "--name", "a"]);
    machine.calls();
    let by_uuid = format!("memory={}=1G", U0.to_uppercase());
    machine
        .run(["limits", "--set", "memory=2G", "--set", &by_uuid])
        .succeeds();
    assert_eq!(
        shown(&machine),
        "limits daemon=a of=default threads=100.0 memory=GPU-U2=2G,GPU-U0=1G priority=normal\n"
    );
    assert_eq!(
        recorded(&machine)["memory"],
        json!({U0: "1024M", U2: "2048M"})
    );
    let calls = machine.calls();
    assert!(!calls.contains("nvidia-smi"), "a UUID needs none: {calls}");
    machine.run(["limits", "--set=memory=0=4G"]).succeeds();
    assert_eq!(
        told(&machine),
        ["set_default_device_pinned_mem_limit 1 4096M"]
    );
    let limits = machine.run(["limits", "--json"]).succeeds().json();
    let memory = &limits["daemons"][0]["default"]["memory"];
    assert_eq!(*memory, json!({U2: "2G", U0: "4G"}));
}

#[test]
fn a_gpu_that_the_daemon_does_not_serve_is_refused_and_nothing_is_set() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--gpus", "2,0", "--name", "a"]);
    machine.calls();
    for gpu in ["1", "7", U1, "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"] {
        let setting = format!("memory={gpu}=1G");
        let named = machine.normal(gpu);
        machine
            .run(["limits", "--set=threads=30", "--set", &setting])
            .fails(&format!(
                "error: the daemon does not serve GPU {named}, so it can have no limit there\n\
                 cause: it serves GPU-U2, GPU-U0\n\
                 hint: name one that it serves, such as GPU-U2\n"
            ));
    }
    machine
        .run(["start", "--gpus", "1", "--memory", "0=1G"])
        .fails("error: the daemon does not serve GPU 0, so it can have no limit there\ncause: it serves GPU-U1\n");
    assert_eq!(told(&machine), [""; 0]);
    assert_eq!(machine.daemons().len(), 1);
}

#[test]
fn values_that_nvidia_would_misread_are_not_understood() {
    let (machine, _) = machine_with("", 1);
    for setting in [
        "threads=0",
        "threads=101",
        "threads=30%",
        "memory=1.5G",
        "memory=1T",
        "memory=0G",
        "memory=100",
        "memory=-1G",
        "memory=GPU0=1G",
        "memory=all=1G",
        "memory=0,1=1G",
        "priority=high",
        "priority=1",
        "cores=2",
        "threads",
        "",
    ] {
        machine
            .run(["limits", "--set", setting])
            .breaks_usage()
            .said("--set <LIMIT=VALUE>");
    }
    for option in [
        ["--threads", "0"],
        ["--memory", "1.5G"],
        ["--memory", "0="],
        ["--memory", ""],
        ["--priority", "1"],
    ] {
        machine
            .run(["start", "--name", "b"])
            .with(option)
            .breaks_usage();
    }
    assert_eq!(machine.calls(), "");
}

#[test]
fn one_limit_is_not_set_twice() {
    let (machine, _) = machine_with("", 1);
    for (one, other, what) in [
        ("threads=30", "threads=", "threads"),
        ("memory=1G", "memory=2G", "memory"),
        ("memory=0=1G", &format!("memory={U0}=2G"), "memory=GPU-U0"),
        ("priority=low", "priority=low", "priority"),
    ] {
        machine
            .run(["limits", "--set", one, "--set", other])
            .fails(&format!("error: {what} is set twice\n"));
    }
    machine
        .run(["start", "--memory=1G", "--memory=2G"])
        .fails("error: memory is set twice\n");
    assert_eq!(told(&machine), [""; 0]);
}

#[test]
fn a_refusal_with_status_0_is_a_failure_that_says_what_the_daemon_has() {
    for (conduct, setting, cause) in [
        (
            "refused",
            "threads=30",
            "it has threads=100.0, and said: Insufficient privileges for UID 1002. Control deamon",
        ),
        (
            "refused",
            "memory=8G",
            "it has no memory limit, and said: Insufficient privileges",
        ),
        (
            "refused",
            "priority=low",
            "it has priority=normal, and said: Insufficient privileges",
        ),
        ("ignored", "threads=30", "it has threads=100.0\n"),
        ("ignored", "memory=8G", "it has no memory limit\n"),
        ("ignored", "priority=low", "it has priority=normal\n"),
        ("wrong", "threads=30", "it has threads=15.0\n"),
        ("wrong", "memory=8G", "it has a memory limit of 1M\n"),
        ("wrong", "priority=low", "it has priority=normal\n"),
        ("wrong", "priority=", "it has priority=low\n"),
        (
            "refused",
            "memory=",
            "it has no memory limit, and said: Insufficient privileges",
        ),
    ] {
        let (machine, record) = machine_with(&format!("limits {conduct}\n"), 1);
        let asked = match setting {
            "memory=8G" => "memory=GPU-U0=8192M",
            "memory=" => "memory=GPU-U0=",
            other => other,
        };
        machine
            .run(["limits", "--set", setting])
            .fails(&format!(
                "error: the daemon did not confirm {asked}\ncause: {cause}"
            ))
            .said("hint: tail <S>/t/uni-cumps/a/log/control.log\n");
        let failure = machine.run(["limits", "--json", "--set", setting]);
        let failure = failure.finish().exited(1).json();
        assert_eq!(failure["error"]["code"], "limit-not-confirmed");
        assert_eq!(recorded(&machine), Value::Null);
        assert_eq!(machine.daemons(), [pid(&record)], "it goes on");
    }
}

#[test]
fn the_daemons_log_is_quoted_where_it_says_why() {
    let (machine, _) = machine_with("limits ignored\n", 1);
    machine
        .run(["limits", "--set=memory=8G"])
        .fails("control.log says:\nNo default pinned memory limit set for the device!\n");
}

#[test]
fn what_was_confirmed_before_a_failure_stays_and_is_told() {
    // A daemon of which only memory limits are not taken.
    let machine = Sandbox::new();
    let front_end = machine.bin().join("real");
    fs::create_dir(&front_end).unwrap();
    machine.start(&["--name", "a"]);
    machine.sh("mv $S/bin/nvidia-cuda-mps-control $S/bin/real/");
    machine.script(
        "nvidia-cuda-mps-control",
        "cd \"$(/usr/bin/dirname \"$0\")\"; /bin/grep -v '^set_default_device' | ./real/nvidia-cuda-mps-control",
    );
    machine
        .run([
            "limits",
            "--set=threads=30",
            "--set=memory=8G",
            "--set=priority=low",
        ])
        .fails(
            "note: threads=30 was confirmed before that\n\
             error: the daemon did not confirm memory=GPU-U0=8192M\n\
             cause: it has no memory limit\n",
        );
    assert_eq!(recorded(&machine), json!({"threads": 30.0}));
    assert_eq!(
        shown(&machine),
        "limits daemon=a of=default threads=30.0 memory=GPU-U0=none priority=normal\n"
    );
}

#[test]
fn running_servers_get_what_a_server_can_get() {
    let (machine, _) = machine_with("servers 77 78\n", 2);
    machine
        .run([
            "limits",
            "--set=threads=30",
            "--set=memory=1=8G",
            "--set=priority=low",
        ])
        .succeeds()
        .said(
            "note: server 77 keeps its priority until it ends\n\
             note: server 78 keeps its priority until it ends\n",
        );
    assert_eq!(
        shown(&machine),
        "limits daemon=a of=default threads=30.0 memory=GPU-U0=none,GPU-U1=8G priority=low\n\
         limits daemon=a of=server pid=77 threads=30.0 memory=GPU-U0=none,GPU-U1=8G\n\
         limits daemon=a of=server pid=78 threads=30.0 memory=GPU-U0=none,GPU-U1=8G\n"
    );
    assert_eq!(
        told(&machine),
        [
            "set_default_active_thread_percentage 30",
            "set_default_device_pinned_mem_limit 1 8192M",
            "set_default_client_priority 1",
            "set_active_thread_percentage 77 30",
            "set_device_pinned_mem_limit 77 1 8192M",
            "set_active_thread_percentage 78 30",
            "set_device_pinned_mem_limit 78 1 8192M",
        ]
    );
    let limits = machine.run(["limits", "--json"]).succeeds().json();
    assert_eq!(
        limits["daemons"][0]["servers"][1],
        json!({"pid": 78, "ready": true, "threads": 30.0, "memory": {U0: null, U1: "8G"}})
    );
    // What a server makes of a cleared memory limit is not known.
    let cleared = machine.run(["limits", "--set=threads=", "--set=memory="]);
    assert_eq!(
        cleared.succeeds().stderr.replace(U1, "GPU-U1"),
        "note: server 77 keeps its memory limit of 8G on GPU-U1 until it ends\n\
         note: server 78 keeps its memory limit of 8G on GPU-U1 until it ends\n"
    );
    assert!(shown(&machine).contains(
        "of=default threads=100.0 memory=GPU-U0=none,GPU-U1=none priority=low\n\
             limits daemon=a of=server pid=77 threads=100.0 memory=GPU-U0=none,GPU-U1=8G\n"
    ));
}

#[test]
fn a_server_that_is_not_ready_cannot_confirm_anything() {
    let (machine, _) = machine_with("servers 77 78\nbusy 78\n", 1);
    assert!(shown(&machine).ends_with("limits daemon=a of=server pid=78 not-ready\n"));
    let limits = machine.run(["limits", "--json"]).succeeds().json();
    assert_eq!(
        limits["daemons"][0]["servers"][1],
        json!({"pid": 78, "ready": false, "threads": null, "memory": null})
    );
    machine.run(["limits", "--set=threads=30"]).fails(
        "error: server 78 of daemon a does not tell its limits\n\
         cause: it is still starting, or has failed; servers that start from now on have the limits\n\
         hint: wait and ask again: uni-cumps limits --name a\n",
    );
    // The daemon and the other server have it.
    assert_eq!(recorded(&machine), json!({"threads": 30.0}));
    assert!(shown(&machine).contains("of=server pid=77 threads=30.0"));
}

#[test]
fn all_live_daemons_are_shown_and_one_is_chosen() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--gpus", "0", "--name", "a", "--threads", "30"]);
    machine.start(&["--gpus", "1,2", "--name", "b", "--memory", "2=4G"]);
    let gone = machine.start(&["--gpus", "0", "--name", "c", "--force"]);
    machine.kill(pid(&gone));
    let lines = |args: &[&str]| {
        let text = machine.run(["limits"]).with(args).succeeds().text();
        let lines = text.lines().filter(|line| line.starts_with("limits "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let a = "limits daemon=a of=default threads=30.0 memory=GPU-U0=none priority=normal";
    let b = "limits daemon=b of=default threads=100.0 memory=GPU-U1=none,GPU-U2=4G priority=normal";
    assert_eq!(lines(&[]), [a, b]);
    assert_eq!(lines(&["--name", "b"]), [b]);
    assert_eq!(lines(&["--gpu", "0"]), [a]);
    assert_eq!(lines(&["--gpus", U2]), [b]);
    machine
        .run(["limits", "--set", "threads=50"])
        .fails("error: several daemons are live: a, b\n");
    machine
        .run(["limits", "--name", "c"])
        .fails("error: daemon c is no longer running");
    machine
        .run(["limits", "--name", "c", "--set", "threads=50"])
        .fails("error: daemon c is no longer running");
    machine
        .run(["limits", "--name", "d"])
        .fails("no daemon named d");
    machine
        .run(["limits", "--name", "a", "--gpu", "0"])
        .breaks_usage();
    machine
        .run(["limits", "--gpu", "1", "--set", "threads=50"])
        .succeeds();
    assert_eq!(lines(&["--name", "b"]), [b.replace("100.0", "50.0")]);
    assert_eq!(lines(&["--name", "a"]), [a]);
}

#[test]
fn without_a_daemon_there_are_no_limits() {
    let machine = Sandbox::new();
    for args in [&["limits"][..], &["limits", "--set", "threads=30"]] {
        machine
            .run(args)
            .fails("error: no recorded daemon is live\nhint: uni-cumps start\n");
    }
    let failure = machine.run(["limits", "--json"]).finish().exited(1).json();
    assert_eq!(failure["error"]["code"], "no-live-daemon");
    assert!(!machine.records().exists());
}

#[test]
fn a_daemon_that_is_stopped_is_not_asked_and_hides_no_other() {
    let machine = Sandbox::with_gpus(2);
    let frozen = pid(&machine.start(&["--gpus", "0", "--name", "a"]));
    machine.start(&["--gpus", "1", "--name", "b"]);
    freeze(frozen);
    let sentence = format!(
        "error: the daemon a (pid {frozen}) is stopped and does not answer\n\
         hint: let it go on: kill -CONT {frozen}\n"
    );
    let both = machine.run(["limits"]).finish().exited(1).said(&sentence);
    let text = both.text();
    assert!(
        text.contains("\nlimits daemon=a unknown\ndaemon name=b state=live"),
        "{text}"
    );
    let both = machine.run(["limits", "--json"]).finish().exited(1).json();
    assert_eq!(both["daemons"][0]["error"]["code"], "not-answering");
    assert_eq!(both["daemons"][0]["name"], "a");
    assert_eq!(both["daemons"][1]["default"]["threads"], 100.0);
    machine.run(["limits", "--name", "a"]).fails(&sentence);
    let set = ["limits", "--name", "a", "--set", "threads=30"];
    machine.run(set).fails(&sentence);
}

#[test]
fn a_daemon_of_another_pid_namespace_is_not_asked() {
    if without_root() {
        return;
    }
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    let (machine, _) = machine_with("", 1);
    for args in [&["--name", "a"][..], &["--name", "a", "--set=threads=30"]] {
        let asked = machine.run(["limits"]).with(args).under(elsewhere);
        asked.fails("daemon a was started in another pid namespace");
    }
    let all = machine.run(["limits"]).under(elsewhere).finish();
    let text = all.exited(1).text();
    assert!(text.contains("limits daemon=a unknown\n"), "{text}");
    assert_eq!(machine.calls(), "");
}

#[test]
fn a_daemon_that_ends_in_between_is_told() {
    let (machine, _) = machine_with("limits die\n", 1);
    machine.run(["limits", "--set", "threads=30"]).fails(
        "error: the daemon did not confirm threads=30\n\
         cause: Cannot find MPS control daemon process\n",
    );
    machine.has_no_daemon();
    assert_eq!(recorded(&machine), Value::Null);
    machine.run(["limits"]).fails("no recorded daemon is live");
}

#[test]
fn start_sets_limits_before_it_says_that_it_has_started() {
    let machine = Sandbox::new();
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
    assert_eq!(recorded(&machine), limits);
    assert_eq!(
        told(&machine),
        [
            "set_default_active_thread_percentage 30",
            "set_default_device_pinned_mem_limit 0 8192M",
            "set_default_client_priority 1",
        ]
    );
    assert_eq!(
        shown(&machine),
        "limits daemon=a of=default threads=30.0 memory=GPU-U0=8G priority=low\n"
    );
    machine.run(["stop"]).succeeds();
    // The next one has none.
    let next = machine.start(&["--name", "a"]);
    assert!(next.get("limits").is_none());
    assert_eq!(shown(&machine), UNLIMITED);
}

#[test]
fn a_start_whose_limit_is_not_confirmed_fails_and_leaves_nothing() {
    for conduct in ["refused", "ignored", "wrong", "die"] {
        let machine = Sandbox::new();
        machine.conduct(&format!("limits {conduct}\n"));
        machine
            .run(["start", "--name", "a", "--memory", "8G"])
            .fails("error: the daemon did not confirm memory=GPU-U0=8192M\n");
        machine.has_no_daemon();
        assert!(!machine.records().join("a").exists(), "{conduct}");
        assert!(!machine.runtime().join("a/pipe").exists());
        let foreground = ["start", "--foreground", "--threads", "30"];
        let failed = machine.run(foreground).finish().exited(1);
        failed.said("error: the daemon did not confirm threads=30\n");
        machine.has_no_daemon();
        assert!(!machine.record_file(N0).exists());
        // Nobody has asked for limits here.
        machine.start(&["--name", "a"]);
    }
}

#[test]
fn a_foreground_daemon_has_its_limits_when_it_is_recorded() {
    let machine = Sandbox::new();
    let mut child = machine
        .run(["start", "--foreground", "--name", "a", "--threads", "30"])
        .spawn();
    wait_until("it is recorded", || machine.record_file("a").exists());
    assert_eq!(recorded(&machine), json!({"threads": 30.0}));
    machine.run(["limits", "--set", "priority=low"]).succeeds();
    assert_eq!(
        recorded(&machine),
        json!({"threads": 30.0, "priority": "low"})
    );
    machine.run(["stop"]).succeeds();
    assert!(child.wait().unwrap().success());
}

#[test]
fn each_of_several_daemons_gets_the_limits_that_concern_it() {
    let machine = Sandbox::with_gpus(3);
    let started = machine
        .run([
            "start",
            "--gpus",
            "all",
            "--threads",
            "30",
            "--memory",
            "1=8G",
        ])
        .succeeds()
        .json();
    let limits: Vec<&Value> = started["started"]
        .as_array()
        .unwrap()
        .iter()
        .map(|record| &record["limits"])
        .collect();
    let plain = json!({"threads": 30.0});
    let own = json!({"threads": 30.0, "memory": {U1: "8192M"}});
    assert_eq!(limits, [&plain, &own, &plain]);
    machine.run(["stop", "--all"]).succeeds();
    machine
        .run(["start", "--gpus", "all", "--memory", "3=8G"])
        .fails("does not serve GPU 3, so it can have no limit there\ncause: it serves GPU-U0, GPU-U1, GPU-U2\n");
    machine.has_no_daemon();
}

#[test]
fn a_daemon_that_is_kept_keeps_its_limits() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0,1", "--name", "a", "--threads", "50"]);
    machine
        .run(["start", "--gpus", "0,1", "--name", "a", "--threads", "30"])
        .succeeds()
        .said("is kept\nnote: its limits stay as they are; to set them: uni-cumps limits --name a --set …\n");
    assert!(shown(&machine).contains("threads=50.0"));
    let same = ["start", "--gpus", "0,1", "--name", "a", "--threads", "50"];
    let same = machine.run(same).succeeds().stderr;
    assert!(same.ends_with(") is kept\n"), "{same}");
}

#[test]
fn a_daemon_that_lost_its_record_is_recorded_with_the_limits_that_it_has() {
    let machine = Sandbox::new();
    let limited = ["--name", "a", "--threads", "30", "--memory", "8G"];
    let record = machine.start(&limited);
    fs::remove_file(machine.record_file("a")).unwrap();
    let again = machine
        .run(["start", "--name", "a", "--threads", "20"])
        .succeeds();
    assert_eq!(pid(&again.json()), pid(&record));
    assert_eq!(
        again.json()["limits"],
        json!({"threads": 20.0, "memory": {U0: "8192M"}})
    );
    again.said("note: it has limits that were set before: uni-cumps limits --name a\n");
}

#[test]
fn a_daemon_whose_limits_fail_while_it_is_recorded_again_is_a_recorded_one() {
    for conduct in ["limits refused\n", "limits die\n"] {
        let (machine, record) = machine_with(conduct, 1);
        fs::remove_file(machine.record_file("a")).unwrap();
        let failed = machine.run(["start", "--name", "a", "--threads", "20"]);
        failed.fails("the daemon did not confirm threads=20");
        assert!(
            !machine
                .record_file("a")
                .with_file_name("starting.json")
                .exists()
        );
        assert_eq!(recorded(&machine), Value::Null);
        machine.calls();
        match conduct {
            "limits die\n" => machine.run(["stop", "--name", "a"]).fails("stale"),
            _ => {
                assert_eq!(machine.daemons(), [pid(&record)]);
                let done = machine.run(["stop"]).succeeds();
                assert!(machine.calls().contains("< quit\n"));
                done
            }
        };
        machine.has_no_daemon();
    }
}

#[test]
fn the_servers_of_a_daemon_that_is_recorded_again_get_its_limits_too() {
    let (machine, _) = machine_with("servers 77\n", 1);
    fs::remove_file(machine.record_file("a")).unwrap();
    machine
        .run(["start", "--name", "a", "--threads", "20"])
        .succeeds();
    assert_eq!(
        told(&machine),
        [
            "set_default_active_thread_percentage 20",
            "set_active_thread_percentage 77 20"
        ]
    );
}

#[test]
fn a_dry_run_shows_how_the_limits_would_be_set() {
    let machine = Sandbox::with_gpus(2);
    let limited = [
        "start",
        "--dry-run",
        "--gpus",
        "1",
        "--threads",
        "30",
        "--memory",
        "8G",
    ];
    let text = machine.run(limited).succeeds().said_nothing().text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 6, "{text}");
    for (line, begins) in [
        (
            lines[4],
            "printf 'set_default_active_thread_percentage 30\\nget_default_active_thread_percentage\\nuni-cumps-",
        ),
        (
            lines[5],
            "printf 'set_default_device_pinned_mem_limit 0 8192M\\nget_default_device_pinned_mem_limit 0\\nuni-cumps-",
        ),
    ] {
        assert!(line.starts_with(begins), "{line}");
    }
    let pasted = machine.sh(&String::from_utf8(machine.run(limited).succeeds().stdout).unwrap());
    assert!(pasted.contains("\n30.0\n30.0\n"), "{pasted}");
    assert!(pasted.contains("\n8G\n"), "{pasted}");
    machine
        .run([
            "start",
            "--dry-run",
            "--foreground",
            "--gpus",
            "0",
            "--threads",
            "30",
        ])
        .succeeds()
        .said("note: once it answers, its limits are set and read back\n");
}

#[test]
fn on_a_terminal_limits_are_a_table() {
    let machine = Sandbox::with_gpus(2);
    machine.conduct("servers 77\nbusy 77\n");
    machine.start(&[
        "--gpus",
        "0,1",
        "--name",
        "a",
        "--threads",
        "30",
        "--memory",
        "1=8G",
    ]);
    let line = format!("{} limits", uni_cumps().display());
    let seen = machine.on_a_terminal(&line).env("NO_COLOR", "1").finish();
    let text = seen.text().replace("\r\n", "\n");
    let (heading, rows) = text.split_once('\n').unwrap();
    assert_eq!(
        heading.split_whitespace().collect::<Vec<_>>(),
        ["DAEMON", "OF", "THREADS", "PRIORITY", "MEMORY", "GPU"]
    );
    let rows: Vec<Vec<&str>> = rows
        .lines()
        .map(|row| row.split_whitespace().collect())
        .collect();
    assert_eq!(
        rows,
        [
            &[
                "a", "next", "server", "30.0", "%", "normal", "none", "GPU-U0"
            ][..],
            &["8G", "GPU-U1"],
            &["a", "server", "77", "not", "ready"],
        ]
    );
}

#[test]
fn status_shows_the_limits_that_were_set() {
    let machine = Sandbox::with_gpus(2);
    let limits = ["--threads", "30", "--memory", "1=8G", "--priority", "low"];
    machine.start(&[&["--gpus", "0,1", "--name", "a"][..], &limits].concat());
    let text = machine.run(["status"]).succeeds().text();
    let limits = " age_s=… limits=threads=30,memory=GPU-U1=8192M,priority=low\n";
    assert!(text.contains(limits), "{text}");
    let line = format!("{} status", uni_cumps().display());
    let seen = machine.on_a_terminal(&line).env("NO_COLOR", "1").finish();
    let limits = " threads=30 memory=1=8192M priority=low ";
    assert!(seen.text().contains(limits), "{}", seen.text());
    machine
        .run(["limits", "--set", "threads=", "--set", "priority="])
        .succeeds();
    let text = machine.run(["status"]).succeeds().text();
    assert!(text.contains(" limits=memory=GPU-U1=8192M\n"), "{text}");
}

#[test]
fn sixteen_gpus_are_asked_one_by_one() {
    let machine = Sandbox::with_gpus(16);
    let all: Vec<String> = (0..16).map(|index| index.to_string()).collect();
    machine.start(&["--gpus", &all.join(","), "--name", "a", "--memory", "1G"]);
    let limits = machine.run(["limits", "--json"]).succeeds().json();
    let memory = limits["daemons"][0]["default"]["memory"]
        .as_object()
        .unwrap();
    assert_eq!(memory.len(), 16);
    for index in 0..16 {
        assert_eq!(memory[&uuid(index)], "1G");
    }
}
