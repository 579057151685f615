//! Records: those of other versions, other machines and other hands, and what is wrong with some.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::{N0, Sandbox, Sleeper, U0, hostname, is_running, our_uid, pid, start_ticks};

/// Writes the file of a record as it is.
fn write(machine: &Sandbox, name: &str, content: impl AsRef<[u8]>) {
    let file = machine.record_file(name);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, content).unwrap();
}

/// The directories in the quarantine that came from `name`.
fn quarantined(machine: &Sandbox, name: &str) -> Vec<PathBuf> {
    let prefix = format!("{name}-");
    let entries = fs::read_dir(machine.records().join(".stale"));
    let entries = entries.into_iter().flatten();
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with(&prefix)
        })
        .collect()
}

/// A record that no command takes for a daemon and none stumbles over, until `start` moves it away.
#[track_caller]
fn is_damaged_and_replaced(machine: &Sandbox, name: &str) {
    let status = machine.run(["status"]).succeeds().text();
    let line = format!("\nrecord name={name} state=damaged reason=");
    assert!(status.contains(&line), "{status}");
    assert!(status.contains("\nmanaged_daemons=none\n"), "{status}");
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["managed_daemons"], json!([]));
    assert_eq!(report["other_records"][0]["name"], name);
    assert_eq!(report["other_records"][0]["record_state"], "damaged");
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live");
    let sentence = format!("the record of daemon {name}");
    machine
        .run(["env", "--name", name])
        .fails_in_the_shell(&sentence);
    machine.run(["stop", "--name", name]).fails(&sentence);
    let report = machine.run(["stop", "--all"]).finish().exited(1).json();
    assert_eq!(report["stopped"], json!([]));
    assert_eq!(report["failed"][0]["name"], name);
    assert_eq!(report["failed"][0]["code"], "damaged-record");
    assert!(
        fs::symlink_metadata(machine.record_file(name)).is_ok(),
        "it is still there"
    );

    let record = machine.start(&["--name", name]);
    assert_eq!(quarantined(machine, name).len(), 1);
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop"]).succeeds();
}

#[test]
fn record_other_host() {
    let machine = Sandbox::new();
    let other = Sleeper::new();
    let mut record = machine.reference_record(N0, other.pid());
    record["host"] = "old-container-id".into();
    machine.write_record(N0, &record);
    let before = fs::read(machine.record_file(N0)).unwrap();
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=gpu-u0 state=other-host pid={} mode=single_gpu gpus=GPU-U0 servers=unknown clients=unknown age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
        other.pid()
    ));
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live");
    machine
        .run(["env", "--name", N0])
        .fails_in_the_shell("was started on host \"old-container-id\"");
    machine.run(["stop"]).fails("no recorded daemon is live");
    machine
        .run(["stop", "--name", N0])
        .fails("was started on host \"old-container-id\"");
    machine
        .run(["stop", "--all"])
        .prints("{\n  \"stopped\": []\n}\n")
        .said("note: daemon gpu-u0 was started on host \"old-container-id\"");
    assert_eq!(fs::read(machine.record_file(N0)).unwrap(), before);

    // It is no obstacle: another name works, and the hint clears it away.
    machine.start(&["--name", "a"]);
    machine.run(["stop"]).succeeds();
    let refused = machine.run(["start"]).fails("was started on host");
    let hint = refused.stderr.lines().find_map(|line| {
        let (_, command) = line.strip_prefix("hint: ")?.split_once("is gone: ")?;
        Some(command.to_owned())
    });
    machine.sh(&hint.unwrap());
    machine.start(&[]);
    assert!(is_running(other.pid()));
}

#[test]
fn record_corrupt() {
    for (name, content) in [
        ("empty", ""),
        ("notjson", "{"),
        ("array", "[]"),
        ("string", "\"text\""),
        (
            "missing",
            "{\"name\": \"missing\", \"uid\": 0, \"host\": \"h\"}",
        ),
    ] {
        let machine = Sandbox::new();
        write(&machine, name, content);
        is_damaged_and_replaced(&machine, name);
        let kept = quarantined(&machine, name)[0].join("daemon.json");
        assert_eq!(fs::read_to_string(kept).unwrap(), content);
    }
    for (name, key, value) in [
        ("pidtext", "pid", json!("abc")),
        ("gpusnull", "gpu_uuids", json!(1)),
    ] {
        let machine = Sandbox::new();
        let mut record = machine.reference_record(name, 1);
        record[key] = value;
        machine.write_record(name, &record);
        is_damaged_and_replaced(&machine, name);
    }
}

#[test]
fn record_nonutf8() {
    let machine = Sandbox::with_gpus(2);
    let good = machine.start(&["--gpus", "0", "--name", "good"]);
    write(&machine, "bad", b"{\"name\":\xff}");
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.contains(&format!(
        "\ndaemon name=good state=live pid={} ",
        pid(&good)
    )));
    assert!(status.contains("\nrecord name=bad state=damaged reason="));
    machine.run(["status", "--json"]).succeeds().json();
    machine.run(["env"]).succeeds();
    machine.run(["env", "--name", "good"]).succeeds();
    machine
        .run(["env", "--name", "bad"])
        .fails_in_the_shell("the record of daemon bad");
    machine
        .run(["stop", "--name", "bad"])
        .fails("the record of daemon bad");
    machine.run(["doctor", "--gpus", "0"]).succeeds();
    let report = machine.run(["stop", "--all"]).finish().exited(1).json();
    assert_eq!(report["stopped"], json!([good]));
    assert_eq!(report["failed"][0]["name"], "bad");
    machine.start(&["--gpus", "1", "--name", "bad"]);
    assert_eq!(quarantined(&machine, "bad").len(), 1);
    machine.start(&["--gpus", "0", "--name", "good"]);
    machine.run(["stop", "--name", "good"]).succeeds();
}

/// A record of the Python command with this text in the place of a value.
fn record_with(machine: &Sandbox, key: &str, text: &str) -> String {
    let mut record = machine.reference_record("bad", 1);
    record[key] = "PLACE".into();
    record.to_string().replace("\"PLACE\"", text)
}

#[test]
fn record_overflow() {
    let machine = Sandbox::new();
    write(&machine, "bad", record_with(&machine, "pid", "1e999"));
    is_damaged_and_replaced(&machine, "bad");
}

#[test]
fn record_deep_json() {
    for text in [
        "[".repeat(20_000) + &"]".repeat(20_000),
        "1".repeat(5000),
        format!("\"{}\"", "x".repeat(100_000)),
    ] {
        let machine = Sandbox::new();
        write(&machine, "bad", record_with(&machine, "pid", &text));
        is_damaged_and_replaced(&machine, "bad");
    }
    // Too long, and else as it should be.
    let machine = Sandbox::new();
    let mut record = machine.reference_record("bad", 1);
    record["more"] = "x".repeat(100_000).into();
    machine.write_record("bad", &record);
    is_damaged_and_replaced(&machine, "bad");
}

#[test]
fn record_lax_types() {
    let other = Sleeper::new();
    for (key, text) in [
        ("gpu_uuids", format!("\"{U0}\"")),
        ("pid", format!("\"{}\"", other.pid())),
        ("pid", format!("{}.0", other.pid())),
        ("pid", "true".to_owned()),
        ("created_at", "NaN".to_owned()),
    ] {
        let machine = Sandbox::new();
        write(&machine, "bad", record_with(&machine, key, &text));
        is_damaged_and_replaced(&machine, "bad");
    }
}

#[test]
fn record_not_a_daemon() {
    let machine = Sandbox::new();
    let other = Sleeper::new();
    machine.write_record("a", &machine.reference_record("a", other.pid()));
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=a state=unreachable pid={} mode=single_gpu gpus=GPU-U0 servers=unknown clients=unknown age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
        other.pid()
    ));
    machine
        .run(["env"])
        .fails_in_the_shell("its control socket is not reachable");
    machine
        .run(["stop"])
        .fails("it is not certain which process is the daemon");
    assert!(is_running(other.pid()));
    assert!(machine.record_file("a").exists());
}

#[test]
fn record_pid_reused() {
    let machine = Sandbox::new();
    let other = Sleeper::new();
    let mut record = machine.reference_record("a", other.pid());
    record["process_start_ticks"] = 1.into();
    machine.write_record("a", &record);
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=a state=stale pid={} mode=single_gpu gpus=GPU-U0 servers=unknown clients=unknown age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
        other.pid()
    ));
    machine
        .run(["env", "--name", "a"])
        .fails_in_the_shell("daemon a is no longer running");
    machine
        .run(["stop", "--name", "a"])
        .fails("its stale record was removed");
    assert!(is_running(other.pid()));
    assert!(!machine.record_file("a").exists());
}

#[test]
fn record_extra_and_name() {
    let machine = Sandbox::new();
    let mut record = machine.start(&["--name", "a"]);
    let started = pid(&record);
    record["added_later"] = json!({"deep": [1, null, "x"]});
    record["name"] = "other".into();
    machine.write_record("a", &record);
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=a state=live pid={started} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
"
    ));
    machine.run(["env"]).succeeds();
    machine
        .run(["env", "--name", "other"])
        .fails_in_the_shell("no daemon named other is recorded");
    let stopped = machine.run(["stop", "--name", "a"]).succeeds().json();
    record["name"] = "a".into();
    assert_eq!(stopped, json!({"stopped": [record]}));
    machine.has_no_daemon();
}

#[test]
fn record_odd_entries() {
    let machine = Sandbox::with_gpus(3);
    let a = machine.start(&["--gpus", "0", "--name", "a"]);
    machine.sh("touch \"$REC/file\"
         mkdir -p \"$REC/Upper\" \"$REC/empty\" \"$REC/d1/daemon.json\"
         cp \"$REC/a/daemon.json\" \"$REC/Upper/\"
         ln -s a \"$REC/link\"");
    let status = machine.run(["status"]).succeeds().text();
    let daemons: Vec<&str> = status
        .lines()
        .filter(|line| line.starts_with("daemon ") || line.starts_with("record "))
        .collect();
    let live = |name: &str| {
        format!(
            "daemon name={name} state=live pid={} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…",
            pid(&a)
        )
    };
    assert_eq!(daemons[..2], [live("a"), live("link")]);
    assert!(daemons[2].starts_with("record name=d1 state=damaged reason="));
    assert_eq!(daemons.len(), 3);
    machine
        .run(["env"])
        .fails_in_the_shell("several daemons are live: a, link");
    let empty = machine.start(&["--gpus", "1", "--name", "empty"]);
    machine
        .run(["env", "--name", "d1"])
        .fails_in_the_shell("the record of daemon d1")
        .said("not a regular file");
    machine
        .run(["stop", "--name", "d1"])
        .fails("the record of daemon d1");
    machine.run(["stop", "--name", "link"]).finish().exited(1);
    assert!(machine.records().join("link").is_symlink());
    assert!(is_running(pid(&empty)));
    machine.start(&["--gpus", "2", "--name", "d1"]);
    assert_eq!(quarantined(&machine, "d1").len(), 1);
    machine.run(["stop", "--name", "a"]).succeeds();
    assert!(!is_running(pid(&a)));
}

#[test]
fn record_fifo() {
    let machine = Sandbox::new();
    machine.sh("mkdir -p \"$REC/a\"; mkfifo \"$REC/a/daemon.json\"");
    is_damaged_and_replaced(&machine, "a");
}

#[test]
fn record_root_is_file() {
    let machine = Sandbox::new();
    machine.sh("mkdir -p h/.cache/unilab; touch \"$REC\"");
    let sentence = "cannot list the records in \"<S>/h/.cache/unilab/cuda-mps\"";
    machine.run(["status"]).fails(sentence);
    machine.run(["env"]).fails_in_the_shell(sentence);
    machine.run(["stop", "--all"]).fails(sentence);
    machine
        .run(["env", "--name", "a"])
        .fails_in_the_shell("Not a directory");
    machine.run(["start"]).finish().exited(1).printed("");
    machine.has_no_daemon();
}

#[test]
fn record_dangling_symlink() {
    let machine = Sandbox::new();
    machine.sh("mkdir -p \"$REC/a\"; ln -s $PWD/elsewhere.json \"$REC/a/daemon.json\"");
    is_damaged_and_replaced(&machine, "a");
    machine.start(&["--name", "a"]);
    assert!(!machine.path("elsewhere.json").exists());
    let record = fs::symlink_metadata(machine.record_file("a")).unwrap();
    assert!(record.is_file());
}

#[test]
fn record_format() {
    let machine = Sandbox::new();
    let started = machine.run(["start", "--name", "a"]).succeeds();
    let file = fs::read(machine.record_file("a")).unwrap();
    assert_eq!(started.stdout, file);
    let record = started.json();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap();
    let namespace = namespace.display().to_string().replace("pid:[", "");
    assert_eq!(
        String::from_utf8(file).unwrap(),
        format!(
            "{{
  \"boot_id\": \"{}\",
  \"created_at\": {},
  \"gpu_indices\": [
    0
  ],
  \"gpu_uuids\": [
    \"{U0}\"
  ],
  \"host\": \"{}\",
  \"log_directory\": \"{runtime}/a/log\",
  \"name\": \"a\",
  \"pid\": {},
  \"pid_namespace\": {},
  \"pipe_directory\": \"{runtime}/a/pipe\",
  \"process_start_ticks\": {},
  \"topology_mode\": \"single_gpu\",
  \"uid\": {}
}}
",
            boot.trim(),
            record["created_at"],
            hostname(),
            machine.daemons()[0],
            namespace.trim_end_matches(']'),
            start_ticks(pid(&record)).unwrap(),
            nix::unistd::geteuid(),
            runtime = machine.runtime().display(),
        )
    );
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    let age = now.as_secs_f64() - record["created_at"].as_f64().unwrap();
    assert!((0.0..60.0).contains(&age));
    let mode = fs::metadata(machine.record_file("a")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o7777, 0o600);
}

/// `tests/records` holds a file of every format that was ever written, the Python command's first.
#[test]
fn every_record_format_that_was_ever_written_is_read() {
    let files = fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/records")).unwrap();
    let mut seen = 0;
    for file in files {
        let machine = Sandbox::new();
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        let mut record: Value = serde_json::from_str(&text).unwrap();
        record["uid"] = our_uid().into();
        record["host"] = hostname().into();
        machine.write_record("a", &record);
        let status = machine.run(["status", "--json"]).succeeds().json();
        let shown = &status["managed_daemons"][0];
        // Only records of ours tell one boot from another.
        let state = match record.get("boot_id") {
            Some(_) => "other-boot",
            None => "stale",
        };
        assert_eq!(shown["record_state"], state);
        for (key, value) in record.as_object().unwrap() {
            assert_eq!(shown[key], *value, "{key}");
        }
        seen += 1;
    }
    assert_eq!(seen, 3);
}

/// What the Python command requires of a record, and of which type.
#[test]
fn a_record_of_ours_is_one_by_the_rules_of_the_python_command() {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    let text = fs::read_to_string(machine.record_file("a")).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    for key in ["host", "topology_mode", "pipe_directory", "log_directory"] {
        assert!(record[key].is_string(), "{key}");
    }
    for key in ["uid", "pid", "process_start_ticks"] {
        assert!(record[key].is_u64(), "{key}");
    }
    assert!(record["created_at"].is_f64());
    let gpus = record["gpu_uuids"].as_array().unwrap();
    assert!(gpus.iter().all(Value::is_string) && !gpus.is_empty());
}
