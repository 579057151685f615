//! `validate` and `visibility`: the reference's own cases, and every way in which the CUDA driver fails.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use crate::support::{Call, N0, Sandbox, U0, U1, freeze, pid, set_mode, without_root};

const T0: &str = "0A1B2C3D0E4F5A6B7C8D9E0F1A2B3C40";

/// `validate` for one GPU, with the environment of the live daemon.
fn validate<'s>(machine: &'s Sandbox, args: &[&str]) -> Call<'s> {
    let fixed = ["validate", "--backend", "mjwarp", "--collector", "cuda:0"];
    machine
        .run(fixed.iter().chain(args))
        .env(
            "CUDA_MPS_PIPE_DIRECTORY",
            machine.runtime().join(N0).join("pipe"),
        )
        .env("CUDA_VISIBLE_DEVICES", U0)
}

fn evidence(machine: &Sandbox, record: &Value) -> Value {
    let pipe = machine.runtime().join(N0).join("pipe");
    json!({
        "ambient_server": false,
        "collector_device": "cuda:0",
        "collector_gpu_uuid": T0,
        "configured": "mps",
        "control_pid": pid(record),
        "control_pipe": pipe.join("control"),
        "control_pipe_kind": "unix_socket",
        "effective": "mps",
        "learner_device": "cuda:0",
        "learner_gpu_uuid": T0,
        "pipe_directory": pipe,
        "pipe_directory_env": pipe,
        "rank": 0,
        "server_pid": null,
        "validated": true,
        "world_size": 1,
    })
}

#[test]
fn a_pair_that_shares_a_gpu_is_validated_with_the_evidence_of_the_reference() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let found = validate(&machine, &["--json"])
        .succeeds()
        .said_nothing()
        .json();
    assert_eq!(found, evidence(&machine, &record));
    let text = validate(&machine, &[]).succeeds().text();
    assert!(
        text.contains("validated=True\n") && text.contains("server_pid=none\n"),
        "{text}"
    );
    machine.conduct("servers 4242");
    machine.run(["stop"]).finish();
}

#[test]
fn a_server_that_runs_is_named() {
    let machine = Sandbox::new();
    machine.conduct("servers 4242");
    machine.start(&[]);
    let found = validate(&machine, &["--json"]).succeeds().json();
    assert_eq!(found["server_pid"], 4242);
}

#[test]
fn each_bad_argument_is_the_first_unmet_prerequisite() {
    let machine = Sandbox::new();
    let call = |args: &[&str]| machine.run(["validate"].iter().chain(args));
    for (args, sentence) in [
        (
            &["--backend", "mujoco", "--rank", "9"][..],
            "the backend \"mujoco\" does not share",
        ),
        (
            &["--backend", "mjwarp", "--rank", "1"],
            "rank 1 is not below the world size 1",
        ),
        (
            &["--backend", "mjwarp", "--world-size", "0"],
            "rank 0 is not below the world size 0",
        ),
        (
            &["--backend", "mjwarp", "--rank", "-1"],
            "rank -1 is not below",
        ),
        (&["--backend", "mjwarp"], "there is no collector device"),
        (
            &[
                "--backend",
                "mjwarp",
                "--learner",
                "cpu",
                "--collector",
                "cuda:0",
            ],
            "the learner's device \"cpu\" is not a CUDA device",
        ),
        (
            &[
                "--backend",
                "mjwarp",
                "--learner",
                "cuda:",
                "--collector",
                "cuda:0",
            ],
            "the learner's device \"cuda:\"",
        ),
        (
            &[
                "--backend",
                "mjwarp",
                "--learner",
                "cuda:x",
                "--collector",
                "cuda:0",
            ],
            "has no valid ordinal",
        ),
        (
            &["--backend", "mjwarp", "--collector", "cuda:-1"],
            "the collector's device \"cuda:-1\" has no valid",
        ),
        (
            &[
                "--backend",
                "mjwarp",
                "--learner",
                "cuda:3",
                "--collector",
                "cuda:0",
            ],
            "cuda:3 does not exist: a process sees 1",
        ),
        (
            &["--backend", "mjwarp", "--collector", "cuda:3"],
            "the collector's device \"cuda:3\" names no GPU",
        ),
    ] {
        call(args).fails(sentence);
    }
    assert_eq!(
        machine.calls().matches("nvidia-cuda-mps-control").count(),
        0
    );
    call(&[]).breaks_usage();
    call(&["--backend", "mjwarp", "--mode", "on"]).breaks_usage();
    call(&["--pid", "1", "--backend", "mjwarp"]).breaks_usage();
}

#[test]
fn two_gpus_are_not_one() {
    let machine = Sandbox::with_gpus(2);
    let other = [
        "validate",
        "--backend",
        "mjwarp",
        "--learner",
        "cuda:1",
        "--collector",
        "cuda:0",
    ];
    machine
        .run(other)
        .fails("learner and collector are on two GPUs: GPU-U1 and GPU-U0");
}

#[test]
fn every_failure_of_the_driver_is_said_in_one_sentence() {
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.libcuda(None);
    validate(&machine, &[]).fails(
        "CUDA is not available for the learner: the CUDA driver cannot be opened: libcuda.so.1",
    );
    machine.libcuda(Some(true));
    validate(&machine, &[]).fails("the CUDA driver has no cuDeviceGetUuid");
    machine.libcuda(Some(false));
    for (conduct, sentence) in [
        (
            "100",
            "cuInit failed with CUDA error 100 (CUDA_ERROR_NO_DEVICE)",
        ),
        (
            "805",
            "cuInit failed with CUDA error 805 (CUDA_ERROR_MPS_CONNECTION_FAILED)",
        ),
        ("wrong-uuid", "learner and collector are on two GPUs"),
        ("hang", "the CUDA driver did not answer within 5 s"),
    ] {
        validate(&machine, &[])
            .env("STUB_CUDA", conduct)
            .fails(sentence);
    }
}

#[test]
fn every_state_of_the_pipe_is_told_apart() {
    let machine = Sandbox::new();
    let at =
        |pipe: &str| validate(&machine, &[]).env("CUDA_MPS_PIPE_DIRECTORY", machine.path(pipe));
    at("none").fails("there is no \"<S>/none/control\"");
    machine.sh("mkdir f; touch f/control");
    at("f").fails("\"<S>/f/control\" is a regular file, not a control socket");
    let record = machine.start(&[]);
    freeze(pid(&record));
    validate(&machine, &[]).fails("does not answer: no answer within 5 s");
    machine.kill(pid(&record));
    validate(&machine, &[]).fails("nobody listens on");
    if without_root() {
        return;
    }
    machine.sh("mkdir -m 700 closed closed/p");
    at("closed/p")
        .user(65534)
        .fails("cannot be looked at: Permission denied");
}

#[test]
fn a_mere_look_never_fails() {
    let machine = Sandbox::new();
    let look = |args: &[&str]| {
        let fixed = ["validate", "--mode", "none", "--backend", "x", "--json"];
        machine
            .run(fixed.iter().chain(args))
            .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("nope"))
    };
    let found = look(&["--collector", "cuda:0"]).succeeds().json();
    assert_eq!(found["configured"], Value::Null);
    assert_eq!(found["ambient_server"], false);
    assert_eq!(found["learner_gpu_uuid"], T0);
    assert_eq!(found["collector_gpu_uuid"], T0);
    assert_eq!(found["control_pipe_kind"], Value::Null);
    let found = look(&["--learner", "cpu"]).succeeds().json();
    assert_eq!(found["pipe_directory"], Value::Null);
    assert_eq!(
        found["pipe_directory_env"],
        machine.path("nope").to_str().unwrap()
    );
    let found = look(&["--learner", "cuda:9"]).succeeds().json();
    assert_eq!(found["learner_gpu_uuid"], Value::Null);
    machine.libcuda(None);
    machine.remove_program("nvidia-smi");
    let found = look(&["--collector", "cuda:0"]).succeeds().json();
    assert_eq!(found["collector_gpu_uuid"], Value::Null);
    machine.start_by_hand("p", "l");
    let found = look(&[])
        .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("p"))
        .succeeds()
        .json();
    assert_eq!(found["ambient_server"], true);
}

#[test]
fn the_manifest_gets_the_evidence_and_keeps_everything_else() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let file = machine.path("run.json");
    fs::write(&file, "{\"z\": 1.50, \"a\": {\"y\": [1,  2]}}").unwrap();
    set_mode(&file, 0o640);
    for _ in 0..2 {
        validate(&machine, &["--manifest", "run.json"]).succeeds();
        let text = fs::read_to_string(&file).unwrap();
        assert!(
            text.starts_with(
                "{\n  \"z\": 1.50,\n  \"a\": {\"y\": [1,  2]},\n  \"cuda_process_sharing\": {\n"
            ),
            "{text}"
        );
        let manifest: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            manifest["cuda_process_sharing"],
            evidence(&machine, &record)
        );
        assert_eq!(
            fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o640
        );
    }
    // Whatever fails leaves it alone.
    let before = fs::read(&file).unwrap();
    validate(&machine, &["--manifest", "run.json", "--rank", "7"]).fails("rank 7");
    assert_eq!(fs::read(&file).unwrap(), before);
    fs::write(&file, "[1]").unwrap();
    validate(&machine, &["--manifest", "run.json"]).fails("is not a JSON object");
    assert_eq!(fs::read(&file).unwrap(), b"[1]");
    validate(&machine, &["--manifest", "none.json"]).fails("cannot read the manifest");
}

#[test]
fn two_processes_are_clients_of_one_server_or_not() {
    let machine = Sandbox::new();
    let (a, b) = (
        crate::support::Sleeper::new(),
        crate::support::Sleeper::new(),
    );
    let (first, second) = (a.pid().to_string(), b.pid().to_string());
    let both = ["validate", "--pid", &first, "--pid", &second];
    machine.conduct(&format!("servers 4242\nclients {first} {second}"));
    machine.start(&[]);
    let text = machine.run(both).succeeds().text();
    assert_eq!(
        text,
        format!(
            "pid={first} client={first} server=4242 gpus=GPU-U0\npid={second} client={second} server=4242 gpus=GPU-U0\nshared=True\n"
        )
    );
    let us = std::process::id().to_string();
    let report = machine
        .run(["validate", "--pid", &first, "--pid", &us, "--json"])
        .succeeds()
        .json();
    assert_eq!(
        report["shared"], true,
        "a descendant of ours is a client: {report}"
    );
    machine.run(["stop"]).succeeds();
    machine.conduct(&format!("servers 4242\nclients {first}"));
    machine.start(&[]);
    let apart = machine.run(both).finish().exited(1);
    assert!(apart.text().ends_with("shared=False\n"));
    apart.said(&format!("pid {second} is not a client of any MPS server"));
    machine
        .run(["validate", "--pid", &first])
        .fails("--pid must be given twice");
    machine
        .run(["validate", "--pid", &first, "--pid", "999999"])
        .fails("pid 999999 does not run");
}

#[test]
fn visibility_replaces_indices_and_nothing_else() {
    let machine = Sandbox::with_gpus(2);
    for (list, printed) in [
        ("0", "GPU-U0\n"),
        ("1,0", "GPU-U1,GPU-U0\n"),
        ("-1", "-1\n"),
        ("MIG-x,1", "MIG-x,GPU-U1\n"),
        ("GPU-zz", "GPU-zz\n"),
    ] {
        machine
            .run(["visibility", list])
            .prints(printed)
            .said_nothing();
    }
    machine.run(["visibility"]).prints("\n");
    machine
        .run(["visibility"])
        .env("CUDA_VISIBLE_DEVICES", "1")
        .prints("GPU-U1\n");
    machine
        .run(["visibility", "0,7"])
        .fails("entry \"7\" names no GPU");
    machine.remove_program("nvidia-smi");
    machine.run(["visibility", U1]).prints("GPU-U1\n");
    machine.run(["visibility", "0"]).fails("nvidia-smi");
}
