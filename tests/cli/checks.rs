//! `doctor`'s checks: a healthy host raises no alarm, and each planted misconfiguration is found by the check that names
//! it, and by no other.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use uni_cumps::host::Root;
use uni_cumps::runner::{CommandRunner, Finished, Invocation, RunError, SystemRunner};
use uni_cumps::{Host, Ui};

use crate::support::{Call, N0, Sandbox, U0, freeze, pid, set_mode};

/// The checks that are not ok or skipped, with their status.
fn alarms(call: Call<'_>) -> BTreeMap<String, String> {
    let done = call.finish();
    let report = done.json();
    let checks = report["checks"].as_array().unwrap();
    checks
        .iter()
        .map(|check| {
            let text = |key: &str| check[key].as_str().unwrap().to_owned();
            assert!(!text("evidence").contains('\n') && !text("evidence").is_empty());
            (text("id"), text("status"))
        })
        .filter(|(_, status)| status == "warn" || status == "fail")
        .collect()
}

fn doctor(machine: &Sandbox) -> Call<'_> {
    // What other people have left in /tmp/nvidia-mps is not this test's business.
    machine.run(["doctor", "--json", "--skip", "default-pipe"])
}

fn is_alarmed(found: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
    let expected = expected
        .iter()
        .map(|(id, status)| ((*id).to_owned(), (*status).to_owned()))
        .collect();
    assert_eq!(*found, expected);
}

#[test]
fn a_healthy_host_raises_no_alarm() {
    let machine = Sandbox::new();
    machine.start(&[]);
    is_alarmed(&alarms(doctor(&machine)), &[]);
    let code = machine.run(["env"]).succeeds().stdout;
    let code = String::from_utf8(code).unwrap();
    // Also with the daemon's own environment.
    let mut call = doctor(&machine);
    for line in code.lines() {
        let (key, value) = line.trim_start_matches("export ").split_once('=').unwrap();
        call = call.env(key, value);
    }
    is_alarmed(&alarms(call), &[]);
}

#[test]
fn a_host_without_a_daemon_is_not_valid_and_says_what_to_type() {
    let machine = Sandbox::new();
    let found = alarms(doctor(&machine));
    is_alarmed(&found, &[("socket", "fail")]);
    let report = machine
        .run(["doctor", "--json", "--only", "socket"])
        .finish()
        .exited(1)
        .json();
    assert_eq!(report["checks"][0]["remedy"], "uni-cumps start");
}

/// A live daemon, something planted, and the alarms that must follow.
fn planted(plant: impl Fn(&Sandbox, &Value), env: &[(&str, &str)], expected: &[(&str, &str)]) {
    let machine = Sandbox::new();
    let record = machine.start(&[]);
    plant(&machine, &record);
    let mut call = doctor(&machine);
    for (key, value) in env {
        call = call.env(key, value);
    }
    is_alarmed(&alarms(call), expected);
}

#[test]
fn a_pipe_variable_that_leads_elsewhere() {
    planted(
        |_, _| (),
        &[("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nowhere")],
        &[("variables", "fail")],
    );
}

#[test]
fn a_pipe_variable_that_is_a_gpu_number() {
    planted(
        |_, _| (),
        &[("CUDA_MPS_PIPE_DIRECTORY", "0")],
        &[("variables", "fail")],
    );
}

#[test]
fn a_misspelt_variable() {
    planted(
        |_, _| (),
        &[("CUDA_MPS_PIPE_DIR", "/tmp/x")],
        &[("variables", "warn")],
    );
}

#[test]
fn a_thread_percentage_of_nothing() {
    for percentage in ["0", "101", "half"] {
        planted(
            |_, _| (),
            &[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage)],
            &[("variables", "fail")],
        );
    }
}

#[test]
fn a_mask_that_hides_the_gpu() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0"]);
    let call = machine.run(["doctor", "--json", "--gpus", "0", "--skip", "default-pipe"]);
    is_alarmed(
        &alarms(call.env("CUDA_VISIBLE_DEVICES", "1")),
        &[("mask", "fail")],
    );
}

#[test]
fn a_strange_mask() {
    planted(
        |_, _| (),
        &[("CUDA_VISIBLE_DEVICES", "0,7")],
        &[("mask", "warn")],
    );
}

#[test]
fn a_missing_server_program() {
    planted(
        |machine, _| machine.remove_program("nvidia-cuda-mps-server"),
        &[],
        &[("server-program", "fail")],
    );
}

#[test]
fn a_missing_control_program() {
    planted(
        |machine, _| machine.remove_program("nvidia-cuda-mps-control"),
        &[],
        &[("control-program", "fail")],
    );
}

#[test]
fn a_prohibited_compute_mode() {
    planted(
        |machine, _| machine.gpu_rows(format!("0, {U0}, Prohibited\n")),
        &[],
        &[("compute-mode", "fail")],
    );
}

#[test]
fn exclusive_mode_is_right_with_a_daemon_and_a_leftover_without() {
    let exclusive = format!("0, {U0}, Exclusive_Process\n");
    planted(|machine, _| machine.gpu_rows(&exclusive), &[], &[]);
    let machine = Sandbox::new();
    machine.gpu_rows(&exclusive);
    is_alarmed(
        &alarms(doctor(&machine)),
        &[("compute-mode", "warn"), ("socket", "fail")],
    );
}

#[test]
fn a_lost_gpu_beside_a_healthy_one() {
    planted(
        |machine, _| {
            machine.gpu_rows(format!(
                "0, {U0}, Default\n1, [GPU is lost], [GPU is lost]\n"
            ))
        },
        &[],
        &[("gpus", "warn")],
    );
}

#[test]
fn a_pipe_directory_that_is_open_to_others() {
    planted(
        |machine, _| set_mode(machine.runtime().join(N0).join("pipe"), 0o755),
        &[],
        &[("pipe-directory", "warn")],
    );
}

#[test]
fn a_frozen_daemon() {
    planted(|_, record| freeze(pid(record)), &[], &[("record", "fail")]);
}

#[test]
fn sockets_that_a_cleaner_has_removed() {
    planted(
        |machine, _| fs::remove_file(machine.runtime().join(N0).join("pipe/control")).unwrap(),
        &[],
        &[("record", "fail"), ("socket", "fail")],
    );
}

#[test]
fn a_stale_record() {
    planted(
        |machine, record| machine.kill(pid(record)),
        &[],
        &[("record", "warn"), ("socket", "fail")],
    );
}

#[test]
fn a_server_that_dies_again_and_again() {
    planted(
        |machine, _| {
            let log = machine.runtime().join(N0).join("log");
            let loops = "[t Control 1] Starting new server 5 for user 0\n[t Control 1] Server 5 exited with status 1\n";
            let control = fs::read_to_string(log.join("control.log")).unwrap() + &loops.repeat(5);
            fs::write(log.join("control.log"), control).unwrap();
            fs::write(
                log.join("server.log"),
                "[t Other 5] Driver initialization failed with: initialization error\n",
            )
            .unwrap();
        },
        &[],
        &[("logs", "fail")],
    );
}

#[test]
fn a_log_directory_without_logs() {
    planted(
        |machine, _| fs::remove_dir_all(machine.runtime().join(N0).join("log")).unwrap(),
        &[],
        &[("log-directory", "warn")],
    );
}

#[test]
fn every_failure_of_the_cuda_driver() {
    let machine = Sandbox::new();
    machine.start(&[]);
    let fails = |call: Call<'_>, words: &str| {
        let report = call.finish().exited(1).json();
        assert_eq!(report["valid"], false);
        assert_eq!(report["checks"][0]["status"], "fail");
        let evidence = report["checks"][0]["evidence"].as_str().unwrap();
        assert!(evidence.contains(words), "{evidence}");
    };
    let only = || machine.run(["doctor", "--json", "--only", "cuda-driver"]);
    machine.libcuda(None);
    fails(only(), "the CUDA driver cannot be opened");
    machine.libcuda(Some(true));
    fails(only(), "has no cuDeviceGetUuid");
    machine.libcuda(Some(false));
    fails(
        only().env("STUB_CUDA", "100"),
        "CUDA error 100 (CUDA_ERROR_NO_DEVICE)",
    );
    fails(
        only().env("STUB_CUDA", "805"),
        "the daemon answered and has no usable server",
    );
    fails(only().env("STUB_CUDA", "wrong-uuid"), "sees GPU-ff1b2c3d");
    fails(only().env("STUB_CUDA", "hang"), "did not answer within 5 s");
}

#[test]
fn the_probe_is_seen_among_the_clients_or_says_that_it_was_not() {
    let machine = Sandbox::new();
    machine.conduct("servers 4242\nclients asker");
    machine.start(&[]);
    let probe = || machine.run(["doctor", "--probe", "--only", "probe", "--json"]);
    let report = probe().succeeds().json();
    assert_eq!(
        machine.normal(report["checks"][0]["evidence"].as_str().unwrap()),
        "GPU-U0, 132 multiprocessors, 71680 MiB allocatable; seen as a client of server 4242"
    );
    machine.run(["stop"]).succeeds();
    machine.conduct("servers 4242");
    machine.start(&[]);
    let report = probe().finish().exited(1).json();
    let evidence = report["checks"][0]["evidence"].as_str().unwrap();
    assert!(evidence.contains("it ran without MPS"), "{evidence}");
    let report = probe().env("STUB_CUDA", "805").finish().exited(1).json();
    let evidence = report["checks"][0]["evidence"].as_str().unwrap();
    assert!(
        evidence.starts_with("through the daemon, cuInit failed with CUDA error 805"),
        "{evidence}"
    );
}

#[test]
fn only_and_skip_choose_the_checks() {
    let machine = Sandbox::new();
    machine.start(&[]);
    let ids = |args: &[&str]| -> Vec<String> {
        let report = machine
            .run(["doctor", "--json"].iter().chain(args))
            .finish()
            .json();
        let checks = report["checks"].as_array().unwrap();
        checks
            .iter()
            .map(|check| check["id"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(ids(&["--only", "gpus", "--only", "mask"]), ["gpus", "mask"]);
    let all = ids(&[]);
    assert!(all.contains(&"gpus".to_owned()) && !all.contains(&"probe".to_owned()));
    assert!(!ids(&["--skip", "gpus"]).contains(&"gpus".to_owned()));
    machine.run(["doctor", "--only", "nonsense"]).breaks_usage();
}

#[test]
fn doctor_changes_nothing() {
    let machine = Sandbox::new();
    machine.start(&[]);
    let listing = || machine.sh("find h t -printf '%p %m %U %s\\n' | grep -v control.log | sort");
    let before = listing();
    machine.run(["doctor", "--probe"]).finish();
    assert_eq!(listing(), before);
}

#[test]
fn a_capture_is_private_new_and_without_names() {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    let home = machine.path("h");
    machine
        .run(["doctor", "--capture", "report"])
        .succeeds()
        .said("look it through");
    let listing = machine.sh("cd report && find . -type f | sort");
    for file in [
        "./bin/nvidia-smi",
        "./records/a.json",
        "./logs/a/control.log",
        "./proc/sys/kernel/osrelease",
        "./host.md",
    ] {
        assert!(
            listing.lines().any(|line| line == file),
            "{file} in {listing}"
        );
    }
    for file in listing.lines() {
        let path = machine.path("report").join(file);
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            mode,
            if file == "./bin/nvidia-smi" {
                0o700
            } else {
                0o600
            },
            "{file}"
        );
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(home.to_str().unwrap()), "{file}");
    }
    // The captured nvidia-smi says the same again.
    let rows = machine.sh("report/bin/nvidia-smi");
    assert_eq!(
        rows,
        fs::read_to_string(machine.bin().join("gpus.csv")).unwrap()
    );
    machine
        .run(["doctor", "--capture", "report"])
        .fails("File exists");
}

/// The programs of a captured machine.
struct Captured(PathBuf, SystemRunner);

impl CommandRunner for Captured {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        let program = self.0.join(call.program.strip_prefix("/").unwrap());
        self.1.run(&Invocation {
            program,
            ..call.clone()
        })
    }
}

/// What `doctor` says of the captured machine.
fn diagnose(captured: &Path, args: &[&str]) -> Value {
    let mut host = Host::this_machine().unwrap();
    host.root = Root::new(captured);
    host.env = [("HOME", "/home/user"), ("PATH", "/bin")]
        .into_iter()
        .collect();
    host.runner = Arc::new(Captured(captured.to_owned(), SystemRunner::new().unwrap()));
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut ui = Ui::new((&mut out, false), (&mut err, false), false);
    let args = ["uni-cumps"].iter().chain(args).map(OsString::from);
    uni_cumps::run(args, host, &mut ui);
    assert_eq!(String::from_utf8(err).unwrap(), "");
    serde_json::from_slice(&out).unwrap()
}

#[test]
fn a_captured_machine_is_diagnosed_as_the_machine_itself() {
    let machine = Sandbox::new();
    machine.gpu_rows(format!(
        "0, {U0}, Prohibited\n1, [GPU is lost], [GPU is lost]\n"
    ));
    let args = [
        "doctor",
        "--json",
        "--gpus",
        "0",
        "--only",
        "gpus",
        "--only",
        "compute-mode",
        "--only",
        "selection",
    ];
    let original = machine.run(args).finish().json();
    let alarm = &original["checks"][1];
    assert_eq!(
        (&alarm["id"], &alarm["status"]),
        (&"compute-mode".into(), &"fail".into())
    );
    machine.run(["doctor", "--capture", "report"]).succeeds();
    let replayed = diagnose(&machine.path("report"), &args);
    assert_eq!(replayed["checks"], original["checks"]);
    assert_eq!(replayed["plan"], original["plan"]);
}
