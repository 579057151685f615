//! `doctor`.

use serde_json::{Value, json};

use crate::support::{Done, N0, Sandbox, U0, U1, freeze, is_running, pid, set_mode, without_root};

/// The plain report of a healthy GPU.
fn healthy(gpu: &str, daemons: &str) -> String {
    format!(
        "topology_mode=single_gpu
gpus={gpu}
valid=True
{daemons}"
    )
}

/// The plain report of the first GPU with a fault.
fn faulty(daemons: &str, error: &str) -> String {
    format!(
        "topology_mode=single_gpu
gpus=GPU-U0
valid=False
{daemons}error={error}
"
    )
}

fn line(name: &str, state: &str, pid: i32) -> String {
    format!("daemon name={name} state={state} pid={pid}\n")
}

/// The error of a report that is not valid.
#[track_caller]
fn error_of(done: &Done<'_>) -> String {
    let text = done.text();
    assert!(text.contains("\nvalid=False\n"), "{done:#?}");
    let error = text.lines().find_map(|line| line.strip_prefix("error="));
    error.unwrap_or_else(|| panic!("{done:#?}")).to_owned()
}

#[test]
fn doctor_valid() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let report = healthy("GPU-U0", &line("gpu-u0", "live", pid(&record)));
    machine
        .run(["doctor"])
        .succeeds()
        .printed_before_checks(&report)
        .said_nothing();
    machine
        .run(["doctor", "--gpus", &U0.to_uppercase()])
        .succeeds()
        .printed_before_checks(&report);
    for args in [
        vec!["doctor", "--json"],
        vec!["doctor", "--gpus", "0", "--json"],
    ] {
        let report = machine.run(&args).succeeds().json();
        let selector = if args.len() == 2 { "auto" } else { "0" };
        assert_eq!(report["valid"], true);
        assert_eq!(
            report["compatible_topology_modes"],
            json!(["single_gpu", "single_task_multi_gpu", "task_per_gpu"])
        );
        assert_eq!(
            report["plan"],
            json!({
                "gpus": [{"index": 0, "uuid": U0}],
                "selector": selector,
                "topology_mode": "single_gpu",
            })
        );
        assert_eq!(report["managed_daemons"][0]["name"], N0);
        assert_eq!(report["managed_daemons"][0]["process_live"], true);
        assert_eq!(report["managed_daemons"][0]["record_state"], "live");
        assert_eq!(
            report["cuda_process_sharing"],
            json!({
                "ambient_server": false,
                "collector_device": "cuda:0",
                "collector_gpu_uuid": "0A1B2C3D0E4F5A6B7C8D9E0F1A2B3C40",
                "configured": "mps",
                "control_pid": pid(&record),
                "control_pipe": machine.runtime().join(N0).join("pipe/control"),
                "control_pipe_kind": "unix_socket",
                "effective": "mps",
                "learner_device": "cuda:0",
                "learner_gpu_uuid": "0A1B2C3D0E4F5A6B7C8D9E0F1A2B3C40",
                "pipe_directory": record["pipe_directory"],
                "pipe_directory_env": null,
                "rank": 0,
                "server_pid": null,
                "validated": true,
                "world_size": 1,
            })
        );
    }
}

#[test]
fn doctor_no_torch() {
    // No Python is near, and the daemon is asked.
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.calls();
    machine.run(["doctor"]).succeeds();
    assert_eq!(
        machine.calls(),
        "nvidia-smi --query-gpu=index,uuid,compute_mode,mig.mode.current --format=csv,noheader
nvidia-cuda-mps-control
    CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
    CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
    CUDA_MPS_PROTOCOL_VERSION=2
    < get_server_list
    < <marker>
"
    );
}

#[test]
fn doctor_path_lost() {
    // nvidia-smi lies in no standard directory, and needs the caller's environment.
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.script(
        "nvidia-smi",
        &format!("[ \"$NEEDED\" = yes ] || exit 4; echo '0, {U0}, Default'"),
    );
    machine.run(["doctor"]).env("NEEDED", "yes").succeeds();
}

#[test]
fn doctor_server_pid() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    let report = machine.run(["doctor", "--json"]).succeeds().json();
    let sharing = &report["cuda_process_sharing"];
    assert_eq!(sharing["server_pid"], Value::Null);
    assert_eq!(sharing["control_pid"], record["pid"]);

    let machine = Sandbox::new();
    machine.conduct("servers 4711");
    let record = machine.start(&[]);
    let report = machine.run(["doctor", "--json"]).succeeds().json();
    let sharing = &report["cuda_process_sharing"];
    assert_eq!(sharing["server_pid"], 4711);
    assert_eq!(sharing["control_pid"], record["pid"]);
}

#[test]
fn doctor_535() {
    let machine = Sandbox::new();
    machine.conduct("pid-file no");
    let daemon = machine.start_by_hand("p", "l");
    let pipe = machine.path("p");
    machine
        .run(["doctor"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .succeeds()
        .printed_before_checks(&healthy("GPU-U0", ""));
    let report = machine
        .run(["doctor", "--json"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .succeeds()
        .json();
    let sharing = &report["cuda_process_sharing"];
    assert_eq!(sharing["control_pid"], daemon);
    assert_eq!(sharing["pipe_directory_env"], json!(pipe));
}

#[test]
fn doctor_no_daemon() {
    let machine = Sandbox::new();
    let pipe = machine.path("none/p");
    machine
        .run(["doctor"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .finish()
        .exited(1)
        .printed_before_checks(&faulty(
            "",
            "there is no \"<S>/none/p/control\"; to start a daemon: uni-cumps start",
        ));
    let report = machine
        .run(["doctor", "--json"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .finish()
        .exited(1)
        .json();
    assert_eq!(report["valid"], false);
    assert_eq!(report["managed_daemons"], json!([]));
    let error = report["cuda_process_sharing"]["error"].as_str().unwrap();
    assert!(error.contains("none/p/control"), "{error}");

    let done = machine.run(["doctor"]).finish().exited(1);
    assert_eq!(
        error_of(&done),
        "there is no \"/tmp/nvidia-mps/control\"; to start a daemon: uni-cumps start"
    );
    assert!(!machine.path("none").exists(), "nothing is made");
}

#[test]
fn doctor_hint_unquoted() {
    let machine = Sandbox::new();
    let pipe = machine.path("a b;touch pwned/p");
    let done = machine
        .run(["doctor"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .finish()
        .exited(1);
    let error = error_of(&done);
    let (_, command) = error.split_once("to start a daemon: ").unwrap();
    assert_eq!(command, "uni-cumps start");

    std::fs::create_dir_all(pipe.join("control")).unwrap();
    let done = machine
        .run(["doctor"])
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .finish()
        .exited(1);
    let error = error_of(&done);
    let (_, word) = error.split_once("not a control socket; see ").unwrap();
    assert_eq!(
        machine.normal(&machine.sh(&format!("printf %s {word}"))),
        "<S>/a b;touch pwned/p"
    );
}

#[test]
fn doctor_stale() {
    let machine = Sandbox::new();
    let a = machine.start(&["--name", "a"]);
    machine.kill(pid(&a));
    let stale = line("a", "stale", pid(&a));
    machine
        .run(["doctor"])
        .finish()
        .exited(1)
        .printed_before_checks(&faulty(
            &stale,
            "there is no \"/tmp/nvidia-mps/control\"; to start a daemon: uni-cumps start",
        ));
    let b = machine.start(&["--name", "b"]);
    let live = line("b", "live", pid(&b));
    machine
        .run(["doctor"])
        .succeeds()
        .printed_before_checks(&healthy("GPU-U0", &(stale + &live)));
}

#[test]
fn doctor_two_live() {
    let machine = Sandbox::new();
    let a = machine.start(&["--name", "a"]);
    // `start` refuses a second daemon for the GPU; somebody made one by hand.
    let b = machine.start_by_hand("p", "l");
    let mut record = machine.reference_record("b", b);
    record["pipe_directory"] = json!(machine.path("p"));
    machine.write_record("b", &record);
    machine
        .run(["doctor"])
        .finish()
        .exited(1)
        .printed_before_checks(&faulty(
            &(line("a", "live", pid(&a)) + &line("b", "live", b)),
            "several daemons serve this GPU: a, b; stop all but one: uni-cumps stop --name b",
        ));
}

#[test]
fn doctor_cvd() {
    let machine = Sandbox::with_gpus(2);
    let record = machine.start(&["--gpus", "1"]);
    let valid = healthy("GPU-U1", &line("gpu-u1", "live", pid(&record)));
    machine
        .run(["doctor"])
        .fails("2 GPUs are visible and one must be chosen");
    for mask in ["1", U1, "1,1", "1,-1,0"] {
        machine
            .run(["doctor"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .succeeds()
            .printed_before_checks(&valid);
    }
    for mask in ["", "-1", "bad"] {
        machine
            .run(["doctor"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .fails("leaves no GPU visible");
    }
    for mask in [
        "1",
        "1,1",
        "all",
        "1,0",
        "GPU-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41,bad",
        "GPU-1a1b2c",
        "1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41",
        "1,-1",
    ] {
        machine
            .run(["doctor", "--gpus", "1"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .succeeds()
            .printed_before_checks(&valid);
    }
    for mask in [
        "0",
        "",
        "-1",
        "bad",
        "MIG-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41",
        "7",
    ] {
        let done = machine
            .run(["doctor", "--gpus", "1"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .finish()
            .exited(1);
        let error = error_of(&done);
        let hidden = format!("CUDA_VISIBLE_DEVICES={mask:?} hides GPU index 1");
        assert!(error.starts_with(&hidden), "{error}");
    }
}

#[test]
fn doctor_cvd_1gpu() {
    let machine = Sandbox::new();
    machine.start(&[]);
    for mask in ["0,0", &format!("0,{U0}"), "0"] {
        machine
            .run(["doctor"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .succeeds();
    }
    for mask in ["", "-1"] {
        machine
            .run(["doctor"])
            .env("CUDA_VISIBLE_DEVICES", mask)
            .fails("leaves no GPU visible");
    }
}

#[test]
fn doctor_selectors() {
    let machine = Sandbox::with_gpus(2);
    for (selector, sentence) in [
        ("all", "names several GPUs"),
        ("0,0", "is named twice"),
        ("9", "matches no GPU of this machine"),
        ("bad", "is not a GPU UUID"),
        ("MIG-1", "is not a GPU UUID"),
    ] {
        machine.run(["doctor", "--gpus", selector]).fails(sentence);
    }
    machine
        .run(["doctor"])
        .fails("2 GPUs are visible and one must be chosen");
    let failure = machine
        .run(["doctor", "--json"])
        .finish()
        .exited(1)
        .said("2 GPUs are visible and one must be chosen")
        .json();
    assert_eq!(failure["error"]["code"], "several-gpus");
    assert_eq!(failure["error"]["hint"], "--gpus 0");
}

#[test]
fn doctor_bad_pipe() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    machine.sh("mkdir p1 p2 p3; touch p1/control; mkfifo p2/control; mkdir -m 700 p3/x");
    let doctor = |pipe: &str| {
        machine
            .run(["doctor"])
            .env("CUDA_MPS_PIPE_DIRECTORY", machine.path(pipe))
    };
    assert_eq!(
        error_of(&doctor("p1").finish().exited(1)),
        "\"<S>/p1/control\" is a regular file, not a control socket; see <S>/p1"
    );
    assert_eq!(
        error_of(&doctor("p2").finish().exited(1)),
        "the control daemon in \"<S>/p2\" does not answer: Cannot find MPS control daemon process"
    );
    set_mode(machine.path("h"), 0o755);
    let error = error_of(&doctor("p3/x/y").user(65534).finish().exited(1));
    assert!(error.contains("Permission denied"), "{error}");

    let daemon = machine.start_by_hand("p4", "l4");
    doctor("p4").succeeds();
    freeze(daemon);
    assert_eq!(
        error_of(&doctor("p4").finish().exited(1)),
        "the control daemon in \"<S>/p4\" does not answer: no answer within 5 s"
    );
    machine.kill(daemon);
    assert_eq!(
        error_of(&doctor("p4").finish().exited(1)),
        "nobody listens on \"<S>/p4/control\"; to start a daemon: uni-cumps start"
    );
}

#[test]
fn a_stopped_daemon_is_named_without_waiting_for_it() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    freeze(pid(&record));
    let done = machine.run(["doctor"]).finish().exited(1);
    let error = error_of(&done);
    assert!(error.contains("is stopped (state T)"), "{error}");
    assert!(error.ends_with(&format!("kill -CONT {}", pid(&record))));
}

#[test]
fn a_daemon_whose_socket_is_gone_is_to_be_stopped_first() {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    machine.sh("rm \"$RT/$N0/pipe/control\"");
    let done = machine.run(["doctor"]).finish().exited(1);
    let error = error_of(&done);
    assert!(error.contains("there is no"), "{error}");
    // `uni-cumps start` would be refused.
    assert!(error.contains("uni-cumps stop --name gpu-u0"), "{error}");
    assert!(is_running(pid(&record)));
}

#[test]
fn doctor_is_not_green_without_a_control_program() {
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.remove_program("nvidia-cuda-mps-control");
    let done = machine.run(["doctor"]).finish().exited(1);
    assert_eq!(
        error_of(&done),
        "nvidia-cuda-mps-control is not on PATH, so the daemon cannot be asked"
    );
}
