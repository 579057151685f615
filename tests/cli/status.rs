//! `status`.

use std::process::Stdio;

use serde_json::{Map, Value, json};

use crate::support::{
    Call, Done, N0, Sandbox, Sleeper, U0, U1, freeze, is_running, pid, start_ticks, uuid,
    wait_until, without_root,
};

const RECORD_KEYS: [&str; 10] = [
    "created_at",
    "gpu_uuids",
    "host",
    "log_directory",
    "name",
    "pid",
    "pipe_directory",
    "process_start_ticks",
    "topology_mode",
    "uid",
];

/// `object` with just these keys, all of which it must have.
#[track_caller]
fn only(object: &Value, keys: &[&str]) -> Value {
    let entry = |key: &&str| {
        let value = object
            .get(key)
            .unwrap_or_else(|| panic!("{key} in {object}"));
        ((*key).to_owned(), value.clone())
    };
    Value::Object(keys.iter().map(entry).collect::<Map<_, _>>())
}

#[track_caller]
fn only_in_each(list: &Value, keys: &[&str]) -> Value {
    let list = list.as_array().unwrap();
    list.iter().map(|object| only(object, keys)).collect()
}

/// The keys of `status --json` that the Python command prints.
#[track_caller]
fn python_part(done: &Done<'_>) -> Value {
    let mut report = only(
        &done.json(),
        &[
            "compatible_topology_modes",
            "control_pipes",
            "cuda_visible_devices",
            "diagnostic",
            "gpus",
            "managed_daemons",
            "nvidia_smi_available",
            "platform",
        ],
    );
    report["control_pipes"] =
        only_in_each(&report["control_pipes"], &["kind", "managed_names", "path"]);
    report["gpus"] = only_in_each(&report["gpus"], &["index", "uuid"]);
    report["managed_daemons"] = only_in_each(&report["managed_daemons"], &RECORD_KEYS);
    report
}

/// What the Python command prints of a machine with `gpus` GPUs and no daemon.
fn python_report(gpus: usize) -> Value {
    let gpus: Vec<Value> = (0..gpus)
        .map(|index| json!({"index": index, "uuid": uuid(index)}))
        .collect();
    json!({
        "compatible_topology_modes": ["single_gpu", "single_task_multi_gpu", "task_per_gpu"],
        "control_pipes": [],
        "cuda_visible_devices": null,
        "diagnostic": null,
        "gpus": gpus,
        "managed_daemons": [],
        "nvidia_smi_available": true,
        "platform": "Linux",
    })
}

/// A plain report with these lines between the first and the last one.
fn with_smi(lines: &str) -> String {
    format!(
        "platform=Linux nvidia_smi_available=True
{lines}compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
"
    )
}

fn without_smi(lines: &str) -> String {
    with_smi(lines).replace("available=True", "available=False")
}

#[test]
fn status_1gpu() {
    let machine = Sandbox::new();
    machine
        .run(["status"])
        .prints(&with_smi(
            "gpu index=0 uuid=GPU-U0
managed_daemons=none
",
        ))
        .said_nothing();
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), python_report(1));
    assert!(!machine.records().exists(), "nothing is written");
    assert!(!machine.runtime().exists());
}

#[test]
fn status_0gpu_empty() {
    let machine = Sandbox::with_gpus(0);
    machine
        .run(["status"])
        .prints(&with_smi("managed_daemons=none\n"));
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), python_report(0));
}

#[test]
fn status_0gpu_message() {
    let machine = Sandbox::new();
    machine.gpu_rows("No devices were found\n");
    machine.run(["status"]).prints(&with_smi(
        "diagnostic=No devices were found
managed_daemons=none
",
    ));
    let mut expected = python_report(0);
    expected["diagnostic"] = "No devices were found".into();
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), expected);
    machine
        .run(["start"])
        .fails("no usable NVIDIA GPU was found")
        .said("cause: No devices were found");

    machine.script("nvidia-smi", "echo No devices were found; exit 6");
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["nvidia_smi_available"], false);
    assert_eq!(report["gpus"], json!([]));
    let diagnostic = report["diagnostic"].as_str().unwrap();
    assert!(diagnostic.ends_with("exited with status 6: No devices were found"));
    machine
        .run(["start"])
        .fails("nvidia-smi could not list the GPUs")
        .said("No devices were found");
}

#[test]
fn status_2gpu() {
    let machine = Sandbox::with_gpus(2);
    machine.run(["status"]).prints(&with_smi(
        "gpu index=0 uuid=GPU-U0
gpu index=1 uuid=GPU-U1
managed_daemons=none
",
    ));
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), python_report(2));
}

#[test]
fn status_8gpu() {
    let machine = Sandbox::with_gpus(8);
    let gpus: String = (0..8)
        .map(|index| format!("gpu index={index} uuid=GPU-U{index}\n"))
        .collect();
    machine
        .run(["status"])
        .prints(&with_smi(&format!("{gpus}managed_daemons=none\n")));
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), python_report(8));
}

#[test]
fn status_row_formats() {
    let machine = Sandbox::new();
    let upper = U0.to_uppercase();
    let undashed = format!("GPU-{}", U1["GPU-".len()..].replace('-', ""));
    machine.gpu_rows(format!(
        "\n  0 ,  {upper} , Default  \n\n1,{undashed},Default\n   \n2, GPU-zz, Default"
    ));
    machine.run(["status"]).prints(&with_smi(
        "gpu index=0 uuid=GPU-U0
gpu index=1 uuid=GPU-U1
gpu index=2 uuid=GPU-zz
managed_daemons=none
",
    ));
}

#[test]
fn status_no_smi() {
    let machine = Sandbox::new();
    machine.remove_program("nvidia-smi");
    machine.run(["status"]).prints(&without_smi(
        "diagnostic=nvidia-smi is not on PATH
managed_daemons=none
",
    ));
    let mut expected = python_report(0);
    expected["diagnostic"] = "nvidia-smi is not on PATH".into();
    expected["nvidia_smi_available"] = false.into();
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), expected);
}

#[test]
fn status_smi_fails() {
    let machine = Sandbox::new();
    for stream in ["1", "2"] {
        let text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.";
        machine.script("nvidia-smi", &format!("echo \"{text}\" >&{stream}; exit 9"));
        machine.run(["status"]).prints(&without_smi(&format!(
            "diagnostic=\"<S>/bin/nvidia-smi\" exited with status 9: {text}
managed_daemons=none
"
        )));
        let report = machine.run(["status", "--json"]).succeeds().json();
        assert_eq!(report["nvidia_smi_available"], false);
        assert!(report["diagnostic"].as_str().unwrap().ends_with(text));
        machine
            .run(["start"])
            .fails("nvidia-smi could not list the GPUs")
            .said(text)
            .said("hint: load the driver");
    }
}

#[test]
fn status_smi_slow() {
    let machine = Sandbox::new();
    machine.script("nvidia-smi", &format!("sleep 6; echo '0, {U0}, Default'"));
    machine.run(["status"]).prints(&with_smi(
        "gpu index=0 uuid=GPU-U0
managed_daemons=none
",
    ));
}

#[test]
fn status_one_bad_gpu() {
    let machine = Sandbox::new();
    for (row, index, diagnostic) in [
        ("1, [GPU is lost], [GPU is lost]", json!(1), "[GPU is lost]"),
        (
            "1, [Unknown Error], [Unknown Error]",
            json!(1),
            "[Unknown Error]",
        ),
        (
            "1, MIG-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41, Default",
            json!(1),
            "MIG-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41",
        ),
        ("1, [N/A], [N/A]", json!(1), "[N/A]"),
        (
            "Unable to determine the device handle for GPU0000:81:00.0: Unknown Error",
            Value::Null,
            "Unable to determine the device handle for GPU0000:81:00.0: Unknown Error",
        ),
        (
            "1, GPU-1, Default, extra",
            json!(1),
            "1, GPU-1, Default, extra",
        ),
    ] {
        machine.gpu_rows(format!("0, {U0}, Default\n{row}\n"));
        let report = machine.run(["status", "--json"]).succeeds().json();
        assert_eq!(report["nvidia_smi_available"], true, "{row}");
        assert_eq!(report["gpus"].as_array().unwrap().len(), 2, "{row}");
        assert_eq!(
            only(&report["gpus"][0], &["index", "uuid", "usable"]),
            json!({"index": 0, "uuid": U0, "usable": true}),
            "{row}"
        );
        assert_eq!(
            only(
                &report["gpus"][1],
                &["index", "uuid", "usable", "diagnostic"]
            ),
            json!({"index": index, "uuid": null, "usable": false, "diagnostic": diagnostic}),
            "{row}"
        );
        let index = index
            .as_u64()
            .map_or("unknown".to_owned(), |n| n.to_string());
        machine.run(["status"]).prints(&with_smi(&format!(
            "gpu index=0 uuid=GPU-U0
gpu index={index} uuid=none unusable={diagnostic}
managed_daemons=none
"
        )));
    }
    machine
        .run(["start", "--gpus", "1"])
        .fails("GPU index 1 is not usable");
    machine.start(&["--gpus", "0"]);
}

#[test]
fn status_smi_nonutf8() {
    let machine = Sandbox::new();
    machine.gpu_rows(b"0, GPU-\xff, Default\n");
    machine.run(["status"]).prints(&with_smi(
        "gpu index=0 uuid=none unusable=GPU-\u{fffd}
managed_daemons=none
",
    ));
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["gpus"][0]["usable"], false);
}

/// `status --json` with this value of `CUDA_VISIBLE_DEVICES`.
fn under_mask<'s>(machine: &'s Sandbox, mask: &str) -> Call<'s> {
    machine
        .run(["status", "--json"])
        .env("CUDA_VISIBLE_DEVICES", mask)
}

#[test]
fn status_cvd() {
    let machine = Sandbox::with_gpus(2);
    let unset = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(unset["cuda_visible_devices"], Value::Null);
    assert_eq!(unset["gpus"][0]["visible"], true);
    assert_eq!(unset["gpus"][1]["visible"], true);
    for (mask, visible) in [
        ("1", [false, true]),
        (U1, [false, true]),
        ("gpu-1a1b2c3d", [false, true]),
        ("all", [true, true]),
        ("", [false, false]),
        ("-1", [false, false]),
        ("NoDevFiles", [false, false]),
        ("bad", [false, false]),
        ("MIG-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40", [false, false]),
        ("0,0", [true, false]),
        ("1,0", [true, true]),
        ("1,-1,0", [false, true]),
        ("7", [false, false]),
        (&format!("{U0},bad"), [true, false]),
    ] {
        let done = under_mask(&machine, mask).succeeds();
        let mut expected = python_report(2);
        expected["cuda_visible_devices"] = mask.into();
        assert_eq!(python_part(&done), expected, "{mask:?}");
        let gpus = &done.json()["gpus"];
        let seen = [&gpus[0]["visible"], &gpus[1]["visible"]];
        assert_eq!(seen, visible, "{mask:?}");
    }
    machine
        .run(["status"])
        .env("CUDA_VISIBLE_DEVICES", "1")
        .prints(&with_smi(
            "gpu index=0 uuid=GPU-U0 visible=False
gpu index=1 uuid=GPU-U1 visible=True
cuda_visible_devices=1
managed_daemons=none
",
        ));
    machine
        .run(["status"])
        .env("CUDA_VISIBLE_DEVICES", "0,0,7,1")
        .prints(&with_smi(
            "gpu index=0 uuid=GPU-U0 visible=True
gpu index=1 uuid=GPU-U1 visible=False
cuda_visible_devices=0,0,7,1
cuda_visible_devices_note=\"0\" names a GPU for the second time
cuda_visible_devices_note=the list ends before \"7\", which is not the index of a GPU here
managed_daemons=none
",
        ));
}

/// The plain report of a machine with one GPU and its daemon in this state.
fn with_daemon(state: &str, pid: i32) -> String {
    let told = match state {
        "live" => "0",
        _ => "unknown",
    };
    with_smi(&format!(
        "gpu index=0 uuid=GPU-U0
daemon name=gpu-u0 state={state} pid={pid} mode=single_gpu gpus=GPU-U0 servers={told} clients={told} age_s=…
"
    ))
}

fn its_pipe(machine: &Sandbox) -> Value {
    json!([{
        "kind": "unix_socket",
        "managed_names": [N0],
        "path": machine.runtime().join(N0).join("pipe/control"),
    }])
}

#[test]
fn status_live() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine
        .run(["status"])
        .prints(&with_daemon("live", pid(&record)));
    let done = machine.run(["status", "--json"]).succeeds();
    let mut expected = python_report(1);
    expected["managed_daemons"] = json!([only(&record, &RECORD_KEYS)]);
    expected["control_pipes"] = its_pipe(&machine);
    assert_eq!(python_part(&done), expected);
    assert_eq!(
        only(
            &done.json()["managed_daemons"][0],
            &["process_live", "record_state", "reachable"]
        ),
        json!({"process_live": true, "record_state": "live", "reachable": true})
    );
}

#[test]
fn status_stale() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.kill(pid(&record));
    machine
        .run(["status"])
        .prints(&with_daemon("stale", pid(&record)));
    let done = machine.run(["status", "--json"]).succeeds();
    let report = python_part(&done);
    assert_eq!(
        report["managed_daemons"],
        json!([only(&record, &RECORD_KEYS)])
    );
    assert_eq!(
        only(
            &done.json()["managed_daemons"][0],
            &["process_live", "record_state", "reachable"]
        ),
        json!({"process_live": false, "record_state": "stale", "reachable": false})
    );
    assert_eq!(
        report["control_pipes"],
        json!([]),
        "nobody listens on the socket that is left"
    );
}

#[test]
fn status_zombie() {
    let machine = Sandbox::new();
    let pipe = machine.runtime().join(N0).join("pipe");
    machine.sh("mkdir -p -m 700 \"$RT\" \"$RT/$N0\" \"$RT/$N0/pipe\" \"$RT/$N0/log\"");
    // Our own child, which nobody waits for.
    let mut daemon = std::process::Command::new(machine.bin().join("nvidia-cuda-mps-control"))
        .arg("-f")
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .env("CUDA_MPS_LOG_DIRECTORY", pipe.with_file_name("log"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let its_pid = i32::try_from(daemon.id()).unwrap();
    machine.write_record(N0, &machine.reference_record(N0, its_pid));
    wait_until("it is live", || {
        machine.run(["status"]).finish().text() == with_daemon("live", its_pid)
    });

    machine.kill(its_pid);
    assert!(start_ticks(its_pid).is_some(), "it is a zombie");
    machine
        .run(["status"])
        .prints(&with_daemon("stale", its_pid));
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live");
    machine
        .run(["env", "--name", N0])
        .fails_in_the_shell("no longer running");
    machine.run(["stop"]).fails("no recorded daemon is live");
    let record = machine.start(&[]);
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop"]).succeeds();

    machine.write_record(N0, &machine.reference_record(N0, its_pid));
    machine
        .run(["stop", "--all"])
        .prints("{\n  \"stopped\": []\n}\n");
    assert!(!machine.record_file(N0).exists());
    daemon.wait().unwrap();
}

#[test]
fn status_socket_gone() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.sh("rm \"$RT/$N0/pipe/control\"");
    machine
        .run(["status"])
        .prints(&with_daemon("unreachable", pid(&record)));
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["control_pipes"], json!([]));
    assert_eq!(
        only(
            &report["managed_daemons"][0],
            &["process_live", "record_state", "reachable"]
        ),
        json!({"process_live": true, "record_state": "unreachable", "reachable": false})
    );
    machine
        .run(["env"])
        .fails_in_the_shell("its control socket is not reachable");
    machine.run(["doctor"]).finish().exited(1);
    machine
        .run(["start"])
        .fails("its control socket is not reachable")
        .said("hint: uni-cumps stop --name gpu-u0");
    assert_eq!(machine.daemons(), [pid(&record)]);
    let stopped = machine.run(["stop"]).succeeds().json();
    assert_eq!(stopped, json!({"stopped": [record]}));
    machine.has_no_daemon();
}

#[test]
fn status_foreign_daemon() {
    let machine = Sandbox::new();
    let foreign = machine.start_by_hand("m/p", "m/l");
    let pipe = machine.path("m/p");
    machine
        .run(["status"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .prints(&with_smi(&format!(
            "gpu index=0 uuid=GPU-U0
managed_daemons=none
unmanaged pipe=<S>/m/p pid={foreign}
"
        )));
    let report = machine
        .run(["status", "--json"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .succeeds()
        .json();
    assert_eq!(report["managed_daemons"], json!([]));
    assert_eq!(
        report["control_pipes"],
        json!([{
            "kind": "unix_socket",
            "managed_names": [],
            "path": pipe.join("control"),
            "pid": foreign,
        }])
    );
    machine
        .run(["env"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .fails_in_the_shell("no recorded daemon is live");
    machine
        .run(["stop"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .fails("no recorded daemon is live");
    assert!(is_running(foreign));
}

#[test]
fn status_two_daemons() {
    let machine = Sandbox::with_gpus(2);
    let b = machine.start(&["--gpus", "1", "--name", "b"]);
    let a = machine.start(&["--gpus", "0", "--name", "a"]);
    machine.run(["status"]).prints(&with_smi(&format!(
        "gpu index=0 uuid=GPU-U0
gpu index=1 uuid=GPU-U1
daemon name=a state=live pid={} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…
daemon name=b state=live pid={} mode=single_gpu gpus=GPU-U1 servers=0 clients=0 age_s=…
",
        pid(&a),
        pid(&b)
    )));
    let mut expected = python_report(2);
    expected["managed_daemons"] = json!([only(&a, &RECORD_KEYS), only(&b, &RECORD_KEYS)]);
    let pipe = |name: &str| {
        json!({
            "kind": "unix_socket",
            "managed_names": [name],
            "path": machine.runtime().join(name).join("pipe/control"),
        })
    };
    expected["control_pipes"] = json!([pipe("a"), pipe("b")]);
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), expected);
}

#[test]
fn status_shared_pipe_record() {
    let machine = Sandbox::new();
    let a = machine.start(&["--name", "a"]);
    let other = Sleeper::new();
    let mut b = machine.reference_record("b", other.pid());
    b["process_start_ticks"] = 777.into();
    b["pipe_directory"] = a["pipe_directory"].clone();
    b["log_directory"] = a["log_directory"].clone();
    machine.write_record("b", &b);
    let mut expected = python_report(1);
    expected["managed_daemons"] = json!([only(&a, &RECORD_KEYS), b]);
    expected["control_pipes"] = json!([{
        "kind": "unix_socket",
        "managed_names": ["a", "b"],
        "path": machine.runtime().join("a/pipe/control"),
    }]);
    let done = machine.run(["status", "--json"]).succeeds();
    assert_eq!(python_part(&done), expected);
}

/// The calls run with another host name.
const RENAMED_HOST: [&str; 6] = [
    "/usr/bin/unshare",
    "-u",
    "/bin/sh",
    "-c",
    "echo newname > /proc/sys/kernel/hostname; exec \"$@\"",
    "sh",
];

#[test]
fn record_other_host_live() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine
        .run(["status"])
        .under(RENAMED_HOST)
        .prints(&with_daemon("live", pid(&record)));
    machine
        .run(["start"])
        .under(RENAMED_HOST)
        .fails("is already live with pid");
    let stopped = machine.run(["stop"]).under(RENAMED_HOST).succeeds().json();
    assert_eq!(stopped, json!({"stopped": [record]}));
    machine.has_no_daemon();
}

#[test]
fn pid_namespace() {
    if without_root() {
        return;
    }
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine
        .run(["status"])
        .under(elsewhere)
        .prints(&with_daemon("other-pid-namespace", pid(&record)));
    machine.run(["env"]).under(elsewhere).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
",
    );
    machine
        .run(["start"])
        .under(elsewhere)
        .fails("was started in another pid namespace");
    machine
        .run(["start", "--name", "second"])
        .under(elsewhere)
        .fails("already serves GPU");
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine
        .run(["status"])
        .prints(&with_daemon("live", pid(&record)));
    machine.run(["stop"]).succeeds();
}

#[test]
fn stdout_closed() {
    let machine = Sandbox::new();
    // A reader that went away is no failure, a full disk is. Closed, standard output is as good as /dev/null.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = machine.run(["status", "--json"]).command();
    let output = command.stdout(writer).stderr(Stdio::piped()).spawn();
    let output = output.unwrap().wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");

    let redirected = |to: &str| {
        let line = format!("\"$@\" {to}");
        let shell = ["/bin/sh", "-c", &line, "sh"];
        machine.run(["status"]).under(shell).finish()
    };
    redirected("> /dev/full")
        .exited(1)
        .said("the output could not be written");
    redirected(">&-").exited(0).said_nothing();
}

#[test]
fn a_driver_that_was_updated_under_the_kernel_module_is_named_and_daemons_go_on() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.script(
        "nvidia-smi",
        "echo 'Failed to initialize NVML: Driver/library version mismatch'
         echo 'NVML library version: 550.144'
         exit 18",
    );
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["gpus"], json!([]));
    assert_eq!(report["nvidia_smi_available"], false);
    let diagnostic = report["diagnostic"].as_str().unwrap();
    assert!(diagnostic.contains("Driver/library version mismatch"));
    assert_eq!(report["managed_daemons"][0]["record_state"], "live");
    for verb in ["start", "doctor"] {
        machine
            .run([verb])
            .fails("nvidia-smi could not list the GPUs")
            .said("Driver/library version mismatch")
            .said("reload the module or reboot");
    }
    machine.run(["env"]).succeeds();
    let stopped = machine.run(["stop"]).succeeds().json();
    assert_eq!(stopped, json!({"stopped": [record]}));
}

#[test]
fn an_empty_list_is_said_to_be_empty() {
    let machine = Sandbox::with_gpus(0);
    for verb in ["start", "doctor"] {
        machine
            .run([verb])
            .fails("no usable NVIDIA GPU was found")
            .said("nvidia-smi succeeded but listed no GPU");
    }
}

#[test]
fn a_warning_beside_the_rows_is_no_gpu() {
    let warning = "WARNING: infoROM is corrupted at gpu 0000:B3:00.0";
    for (stream, status, diagnostic) in [
        (1, 0, warning.to_owned()),
        (2, 0, warning.to_owned()),
        (1, 14, format!("{warning}; nvidia-smi ended with status 14")),
    ] {
        let machine = Sandbox::new();
        machine.script(
            "nvidia-smi",
            &format!("echo '0, {U0}, Default'; echo '{warning}' >&{stream}; exit {status}"),
        );
        machine.run(["status"]).prints(&with_smi(&format!(
            "diagnostic={diagnostic}
gpu index=0 uuid=GPU-U0
managed_daemons=none
"
        )));
        machine
            .run(["start"])
            .succeeds()
            .said(&format!("note: {warning}"));
    }
}

#[test]
fn a_bad_row_does_not_renumber_the_gpus_behind_it() {
    let machine = Sandbox::new();
    machine.gpu_rows(format!("0, {U0}, Default\n1, \n2, {}, Default\n", uuid(2)));
    machine.run(["status"]).prints(&with_smi(
        "gpu index=0 uuid=GPU-U0
gpu index=1 uuid=none unusable=1,
gpu index=2 uuid=GPU-U2
managed_daemons=none
",
    ));
    machine
        .run(["start", "--gpus", "1"])
        .fails("GPU index 1 is not usable");
    let record = machine.start(&["--gpus", "2"]);
    assert_eq!(record["gpu_uuids"], json!([uuid(2)]));
}

#[test]
fn a_compute_mode_that_is_not_told_is_unknown() {
    let machine = Sandbox::new();
    for mode in [
        "[N/A]",
        "[Not Supported]",
        "N/A",
        "[Unknown Error]",
        "[GPU requires reset]",
    ] {
        machine.gpu_rows(format!("0, {U0}, {mode}\n"));
        let report = machine.run(["status", "--json"]).succeeds().json();
        assert_eq!(report["gpus"][0]["compute_mode"], "unknown", "{mode}");
        assert_eq!(report["gpus"][0]["usable"], true, "{mode}");
    }
    machine.gpu_rows(format!("0, {U0}, Exclusive_Process\n"));
    let report = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(report["gpus"][0]["compute_mode"], "Exclusive_Process");
}

#[test]
fn an_nvidia_smi_that_was_killed_did_not_time_out() {
    let machine = Sandbox::new();
    machine.script("nvidia-smi", "kill -TERM $$");
    machine.run(["status"]).prints(&without_smi(
        "diagnostic=\"<S>/bin/nvidia-smi\" was ended by signal 15
managed_daemons=none
",
    ));
}

#[test]
fn a_stopped_daemon_is_not_answering() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    freeze(pid(&record));
    machine
        .run(["status"])
        .prints(&with_daemon("not-answering", pid(&record)));
}
