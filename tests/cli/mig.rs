//! GPUs in MIG mode: their instances are shown and selected, one daemon each, and the whole GPU is refused.

use std::fs;

use serde_json::{Map, Value, json};

use crate::support::{Sandbox, U0, U1, uni_cumps};

const M0: &str = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f";
const M1: &str = "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb";
const M2: &str = "MIG-1f2c7d1b-5a0e-5a1c-8f3e-2b9d3f8e7a60";

/// The first GPU is in MIG mode, as `nvidia-smi -L` of an A100 shows it; the second one is whole.
fn divided() -> Sandbox {
    let machine = Sandbox::with_gpus(2);
    machine.gpu_rows(format!(
        "0, {U0}, Default, Enabled\n1, {U1}, Default, Disabled\n"
    ));
    let list = format!(
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: {U0})
  MIG 3g.20gb     Device  0: (UUID: {M0})
  MIG 1g.5gb      Device  1: (UUID: {M1})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {U1})
"
    );
    fs::write(machine.bin().join("list.txt"), list).unwrap();
    machine
}

/// Both GPUs are in MIG mode, and the second one has no instance yet.
fn both_divided() -> Sandbox {
    let machine = divided();
    machine.gpu_rows(format!(
        "0, {U0}, [N/A], Enabled\n1, {U1}, [N/A], Enabled\n"
    ));
    machine
}

/// A profile of a newer GPU, with an attribute and a number of two digits.
fn h100() -> Sandbox {
    let machine = Sandbox::with_gpus(1);
    machine.gpu_rows(format!("0, {U0}, Default, Enabled\n"));
    let list = format!(
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: {U0})
  MIG 1g.10gb+me  Device 12: (UUID: {M2})
"
    );
    fs::write(machine.bin().join("list.txt"), list).unwrap();
    machine
}

#[test]
fn status_shows_the_instances_below_their_gpu() {
    let machine = divided();
    machine.run(["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
mig gpu=0 number=0 profile=3g.20gb uuid={M0}
mig gpu=0 number=1 profile=1g.5gb uuid={M1}
gpu index=1 uuid=GPU-U1
managed_daemons=none
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
"
    ));
    let status = machine
        .run(["status", "--json"])
        .env("CUDA_VISIBLE_DEVICES", M1)
        .succeeds()
        .json();
    assert_eq!(
        status["gpus"][0]["mig"],
        json!([
            {"number": 0, "profile": "3g.20gb", "uuid": M0, "visible": false},
            {"number": 1, "profile": "1g.5gb", "uuid": M1, "visible": true},
        ])
    );
    assert_eq!(status["gpus"][0]["visible"], true);
    assert_eq!(status["gpus"][1]["visible"], false);
    assert_eq!(status["gpus"][1]["mig"], json!(null));
    let shown = h100().run(["status"]).succeeds().text();
    assert!(
        shown.contains(&format!(
            "mig gpu=0 number=12 profile=1g.10gb+me uuid={M2}\n"
        )),
        "{shown}"
    );
}

#[test]
fn a_person_sees_which_instance_a_daemon_serves() {
    let machine = divided();
    machine.start(&["--gpus", M1, "--name", "part"]);
    let line = format!("{} status", uni_cumps().display());
    let seen = machine.on_a_terminal(&line).env("NO_COLOR", "1").finish();
    let text = seen.text();
    let row = text.lines().find(|line| line.starts_with("part")).unwrap();
    let row: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(row[3..7], ["0:1", "0", "0", "none"], "{text}");
}

#[test]
fn instances_are_listed_only_where_a_gpu_is_in_mig_mode() {
    let machine = Sandbox::with_gpus(2);
    machine.run(["status"]).succeeds();
    assert!(!machine.calls().contains("nvidia-smi -L"));
    let machine = divided();
    machine.run(["status"]).succeeds();
    assert!(machine.calls().contains("nvidia-smi -L\n"));
}

#[test]
fn a_daemon_serves_one_instance() {
    let machine = divided();
    let record = machine.start(&["--gpus", &M0.to_uppercase()]);
    assert_eq!(record["name"], M0.to_lowercase());
    // The Python command makes CUDA_VISIBLE_DEVICES of it, so it is what the daemon serves.
    assert_eq!(record["gpu_uuids"], json!([M0]));
    assert_eq!(record["mig_gpu_uuid"], U0);
    assert_eq!(record["gpu_indices"], json!([0]));
    let file = fs::read_to_string(machine.record_file(&M0.to_lowercase())).unwrap();
    let status = machine.run(["status", "--json"]).succeeds().json();
    let shown = &status["managed_daemons"][0];
    for (key, value) in serde_json::from_str::<Map<String, Value>>(&file).unwrap() {
        assert_eq!(record[&key], value, "{key}");
        assert_eq!(shown[&key], value, "{key}");
    }
    assert_eq!(record["topology_mode"], "single_gpu");
    assert!(
        machine
            .calls()
            .contains(&format!("CUDA_VISIBLE_DEVICES={M0}\n"))
    );
    for options in [&[][..], &["--gpu", M0], &["--gpu", "0"], &["--gpu", U0]] {
        let env = machine
            .run(["env", "--json"])
            .with(options)
            .succeeds()
            .json();
        assert_eq!(env["env"]["CUDA_VISIBLE_DEVICES"], M0, "{options:?}");
    }
    machine.start(&["--gpus", M1]);
    machine
        .run(["env", "--gpu", "0"])
        .fails_in_the_shell("several daemons are live");
    machine
        .run(["start", "--gpus", M0, "--name", "other"])
        .fails(&format!("already serves GPU MIG 3g.20gb ({M0}) of index 0"));
    machine.run(["stop", "--gpu", M1]).succeeds();
    let stopped = machine.run(["stop"]).succeeds().json();
    assert_eq!(stopped["stopped"][0]["gpu_uuids"], json!([M0]));
    assert_eq!(stopped["stopped"][0]["mig_gpu_uuid"], U0);
    machine.has_no_daemon();
}

#[test]
fn a_whole_gpu_in_mig_mode_is_refused_with_its_instances() {
    let machine = divided();
    for selector in ["0", U0, "0,1"] {
        machine
            .run(["start", "--gpus", selector])
            .fails("GPU index 0 (GPU-U0) is in MIG mode, and programs see only its instances")
            .said(&format!(
                "cause: there are MIG 3g.20gb ({M0}) of index 0, MIG 1g.5gb ({M1}) of index 0"
            ))
            .said(&format!("hint: --gpus {M0}"));
    }
    both_divided()
        .run(["start", "--gpus", "1"])
        .fails("is in MIG mode")
        .said("cause: there is no MIG instance");
    assert_eq!(machine.daemons(), Vec::<i32>::new());
}

#[test]
fn instances_and_whole_gpus_are_not_mixed_in_one_daemon() {
    let machine = divided();
    machine
        .run(["start", "--gpus", &format!("{M0},1")])
        .fails("a daemon serves whole GPUs or one MIG instance")
        .said("cause: a program cannot see MIG instances beside whole GPUs")
        .said("hint: one daemon for each: --topology task_per_gpu");
    machine
        .run(["start", "--gpus", &format!("{M0},{M1}")])
        .fails("a daemon serves whole GPUs or one MIG instance")
        .said("cause: each MIG instance needs a daemon of its own");
    machine
        .run([
            "start",
            "--gpus",
            "MIG-00000000-0000-0000-0000-000000000000",
        ])
        .fails("matches no MIG instance of this machine")
        .said(&format!("cause: there are MIG 3g.20gb ({M0})"));
}

#[test]
fn all_means_a_daemon_for_each_instance_and_each_whole_gpu() {
    let machine = divided();
    let report = machine.run(["start", "--gpus", "all"]).succeeds().json();
    let started = report["started"].as_array().unwrap();
    let served: Vec<&str> = started
        .iter()
        .map(|record| record["gpu_uuids"][0].as_str().unwrap())
        .collect();
    assert_eq!(served, [M0, M1, U1]);
    let again = machine
        .run(["start", "--gpus", "all", "-q"])
        .succeeds()
        .json();
    assert_eq!(again["kept"].as_array().unwrap().len(), 3);
    machine.run(["stop", "--all"]).succeeds();
    let report = machine
        .run(["start", "--gpus", "0", "--topology", "task_per_gpu"])
        .succeeds()
        .json();
    assert_eq!(report["started"].as_array().unwrap().len(), 2);
}

#[test]
fn the_only_visible_instance_is_meant_without_a_selector() {
    let machine = h100();
    let record = machine.start(&[]);
    assert_eq!(record["gpu_uuids"], json!([M2]));
    let machine = divided();
    machine
        .run(["start"])
        .fails("3 GPUs are visible and one must be chosen")
        .said(&format!("hint: --gpus {M0}"));
    let masked = machine
        .run(["start"])
        .env("CUDA_VISIBLE_DEVICES", M1)
        .succeeds()
        .json();
    assert_eq!(masked["gpu_uuids"], json!([M1]));
}

#[test]
fn a_mask_that_names_another_instance_is_told() {
    let machine = divided();
    machine.start(&["--gpus", M0]);
    machine
        .run(["env"])
        .env("CUDA_VISIBLE_DEVICES", M1)
        .succeeds()
        .said(&format!(
            "CUDA_VISIBLE_DEVICES=\"{M1}\" of your environment names no GPU of daemon"
        ));
    machine
        .run(["env"])
        .env("CUDA_VISIBLE_DEVICES", M0)
        .succeeds()
        .said_nothing();
}

#[test]
fn a_gpu_without_an_instance_is_named_and_leaves_the_others_running() {
    let machine = both_divided();
    machine
        .run(["start", "--gpus", "1", "--topology", "task_per_gpu"])
        .fails("GPU index 1 (GPU-U1) is in MIG mode")
        .said("cause: there is no MIG instance");
    let done = machine.run(["start", "--gpus", "all"]).finish().exited(1);
    let report = done.json();
    assert_eq!(report["started"].as_array().unwrap().len(), 2);
    assert_eq!(report["failed"].as_array().unwrap().len(), 1);
    assert_eq!(report["failed"][0]["error"]["code"], "gpu-in-mig-mode");
    done.said("error: GPU index 1 (GPU-U1) is in MIG mode")
        .said("cause: there is no MIG instance");
}

#[test]
fn an_instance_that_cannot_be_exclusive_leaves_the_whole_gpu_its_daemon() {
    let machine = divided();
    let done = machine
        .run(["start", "--gpus", "all", "--exclusive"])
        .finish()
        .exited(1);
    let report = done.json();
    assert_eq!(report["started"].as_array().unwrap().len(), 1);
    assert_eq!(report["started"][0]["gpu_uuids"], json!([U1]));
    let failed = report["failed"].as_array().unwrap();
    let names: Vec<&str> = failed
        .iter()
        .map(|part| part["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, [M0.to_lowercase(), M1.to_lowercase()]);
    done.said("a MIG instance cannot be made exclusive");
}

#[test]
fn instances_that_could_not_be_listed_are_not_taken_for_none() {
    let machine = divided();
    machine.script(
        "nvidia-smi",
        &format!(
            "if [ \"$1\" = -L ]; then echo 'GPU access blocked'; exit 6; fi; cat {}",
            machine.bin().join("gpus.csv").display()
        ),
    );
    let cause = "exited with status 6: GPU access blocked";
    let status = machine.run(["status", "--json"]).succeeds().json();
    assert_eq!(status["gpus"].as_array().unwrap().len(), 2);
    let diagnostic = status["diagnostic"].as_str().unwrap();
    assert!(
        diagnostic.starts_with("the MIG instances could not be listed: ")
            && diagnostic.ends_with(cause),
        "{diagnostic}"
    );
    for selector in ["0", M0, "0,1"] {
        let done = machine
            .run(["start", "--gpus", selector])
            .fails("error: the MIG instances of this machine could not be listed\n")
            .said(cause);
        assert!(!done.stderr.contains("-cgi"), "{done:?}");
    }
    let report = machine
        .run(["start", "--gpus", "all"])
        .finish()
        .exited(1)
        .json();
    assert_eq!(report["started"][0]["gpu_uuids"], json!([U1]));
    let code = &report["failed"][0]["error"]["code"];
    assert_eq!(*code, "mig-instances-unknown");
}
