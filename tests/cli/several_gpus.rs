//! Machines with several GPUs: one daemon over some of them, one for each, and which daemon is meant by a GPU.

use serde_json::{Value, json};

use crate::support::{N0, Sandbox, U0, U1, U2, freeze, pid, uuid};

const N1: &str = "gpu-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41";

/// The names of these daemons, in their order.
fn names(daemons: &Value) -> Vec<&str> {
    let each = daemons.as_array().unwrap().iter();
    each.map(|daemon| daemon["name"].as_str().unwrap())
        .collect()
}

#[test]
fn one_daemon_serves_several_gpus() {
    let machine = Sandbox::with_gpus(3);
    let record = machine.start(&["--gpus", "2,0"]);
    assert_eq!(record["topology_mode"], "single_task_multi_gpu");
    assert_eq!(record["gpu_uuids"], json!([U2, U0]));
    assert_eq!(record["gpu_indices"], json!([2, 0]));
    let name = record["name"].as_str().unwrap();
    assert!(name.starts_with("gpus-2-") && name.len() == 23, "{name}");
    let calls = machine.calls();
    assert!(
        calls.contains("CUDA_VISIBLE_DEVICES=GPU-U2,GPU-U0\n"),
        "{calls}"
    );
    let env = machine.run(["env", "--json"]).succeeds().json();
    assert_eq!(env["env"]["CUDA_VISIBLE_DEVICES"], format!("{U2},{U0}"));
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}

#[test]
fn the_same_gpus_in_any_order_are_one_daemon_which_is_kept() {
    let machine = Sandbox::with_gpus(3);
    let first = machine.start(&["--gpus", "0,1"]);
    let again = machine.run(["start", "--gpus", "1,0"]).succeeds();
    let name = first["name"].as_str().unwrap();
    let kept = format!("note: daemon {name} (pid {}) is kept\n", pid(&first));
    assert_eq!(again.stderr, kept);
    assert_eq!(again.json(), first);
    assert_eq!(machine.daemons(), [pid(&first)]);
}

#[test]
fn all_means_a_daemon_for_each_gpu() {
    for gpus in [2, 8, 16] {
        let machine = Sandbox::with_gpus(gpus);
        let report = machine.run(["start", "--gpus", "all"]).succeeds().json();
        assert_eq!(report["kept"], json!([]));
        assert_eq!(report["failed"], json!([]));
        let started = report["started"].as_array().unwrap();
        assert_eq!(started.len(), gpus);
        for (index, record) in started.iter().enumerate() {
            assert_eq!(record["gpu_uuids"], json!([uuid(index)]));
            assert_eq!(record["topology_mode"], "task_per_gpu");
            assert_eq!(record["name"], uuid(index).to_lowercase());
        }
        assert_eq!(machine.daemons().len(), gpus);
        let status = machine.run(["status", "--json"]).succeeds().json();
        let daemons = status["managed_daemons"].as_array().unwrap();
        assert!(
            daemons
                .iter()
                .all(|daemon| daemon["record_state"] == "live")
        );
        machine.run(["stop", "--all"]).succeeds();
        machine.has_no_daemon();
    }
}

#[test]
fn daemons_that_are_there_are_kept_and_the_others_started() {
    let machine = Sandbox::with_gpus(3);
    let first = machine.start(&["--gpus", "1"]);
    let done = machine.run(["start", "--gpus", "all"]).succeeds();
    let report = done.json();
    assert_eq!(report["kept"], json!([N1]));
    assert_eq!(names(&report["started"]).len(), 2);
    assert_eq!(
        done.stderr,
        format!("note: daemon {N1} (pid {}) is kept\n", pid(&first))
    );
    let again = machine
        .run(["start", "--gpus", "all", "-q"])
        .succeeds()
        .said_nothing()
        .json();
    assert_eq!(again["started"], json!([]));
    assert_eq!(again["kept"].as_array().unwrap().len(), 3);
}

#[test]
fn a_part_that_fails_is_named_and_leaves_the_others_running() {
    let machine = Sandbox::with_gpus(3);
    let other = machine.start(&["--gpus", "1", "--name", "other"]);
    let done = machine.run(["start", "--gpus", "all"]).finish().exited(1);
    let report = done.json();
    assert_eq!(names(&report["started"]).len(), 2);
    assert_eq!(report["kept"], json!([]));
    assert_eq!(names(&report["failed"]), [N1]);
    assert_eq!(report["failed"][0]["error"]["code"], "gpu-taken");
    assert!(
        done.stderr.contains("error: daemon other (pid "),
        "{done:?}"
    );
    assert_eq!(machine.daemons().len(), 3);
    assert!(machine.daemons().contains(&pid(&other)));
}

#[test]
fn a_gpu_that_another_daemon_covers_is_refused_whichever_way_round() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--gpus", "0,1", "--name", "pair"]);
    for gpus in ["1", "1,2"] {
        machine
            .run(["start", "--gpus", gpus])
            .fails("daemon pair (pid ")
            .said(") already serves GPU index 1 (GPU-U1)");
    }
    machine.start(&["--gpus", "2"]);
    machine
        .run(["start", "--gpus", "0,2"])
        .fails("already serves GPU index");
    assert_eq!(machine.daemons().len(), 2);
}

#[test]
fn the_topology_may_be_said() {
    let machine = Sandbox::with_gpus(3);
    let each = ["start", "--gpus", "0,2", "--topology", "task_per_gpu"];
    let report = machine.run(each).succeeds().json();
    assert_eq!(names(&report["started"]).len(), 2);
    machine.run(["stop", "--all"]).succeeds();
    let over_all = machine.start(&["--gpus", "all", "--topology", "single_task_multi_gpu"]);
    assert_eq!(over_all["gpu_uuids"], json!([U0, U1, U2]));
    machine.run(["stop"]).succeeds();
    let masked = machine
        .run(["start", "--topology", "task_per_gpu"])
        .env("CUDA_VISIBLE_DEVICES", "2,1");
    let report = masked.succeeds().json();
    assert_eq!(report["started"][0]["gpu_uuids"], json!([U2]));
    assert_eq!(names(&report["started"]).len(), 2);
    machine
        .run(["start", "--gpus", "0,1", "--topology", "single_gpu"])
        .fails("names several GPUs, and one is meant here");
    machine
        .run(["start", "--gpus", "0", "--topology", "multi"])
        .breaks_usage();
}

#[test]
fn all_are_the_visible_ones() {
    let machine = Sandbox::with_gpus(3);
    let report = machine
        .run(["start", "--gpus", "all"])
        .env("CUDA_VISIBLE_DEVICES", "1")
        .succeeds()
        .json();
    assert_eq!(names(&report["started"]), [N1]);
    machine
        .run(["start", "--gpus", "all"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .fails("leaves no GPU visible");
}

#[test]
fn one_name_or_directory_is_not_given_to_several_daemons() {
    let machine = Sandbox::with_gpus(2);
    for option in [
        ["--name", "a"],
        ["--pipe-dir", "/tmp/x"],
        ["--log-dir", "/tmp/x"],
    ] {
        machine
            .run(["start", "--gpus", "all"])
            .with(option)
            .fails("2 daemons cannot have one name, one directory or one foreground");
    }
    machine
        .run(["start", "--gpus", "all", "--foreground"])
        .fails("2 daemons cannot have one name, one directory or one foreground");
    machine.has_no_daemon();
}

#[test]
fn a_daemon_is_meant_by_the_gpu_that_it_serves() {
    let machine = Sandbox::with_gpus(4);
    machine.start(&["--gpus", "0"]);
    machine.start(&["--gpus", "1,2", "--name", "pair"]);
    for (gpu, seen) in [
        ("0", "GPU-U0"),
        (U0, "GPU-U0"),
        ("2", "GPU-U1,GPU-U2"),
        ("1,2", "GPU-U1,GPU-U2"),
    ] {
        for option in ["--gpu", "--gpus"] {
            let env = machine.run(["env", option, gpu]).succeeds().text();
            assert!(
                env.contains(&format!("CUDA_VISIBLE_DEVICES={seen}\n")),
                "{gpu}: {env}"
            );
        }
    }
    machine
        .run(["env", "--gpu", "3"])
        .fails_in_the_shell("no live daemon of yours serves GPU 3");
    machine
        .run(["env", "--gpu", "0,1"])
        .fails_in_the_shell("no live daemon of yours serves GPU 0,1");
    let doctor = machine
        .run(["doctor", "--name", "pair", "--json"])
        .finish()
        .json();
    assert_eq!(doctor["valid"], true, "{doctor:#}");
    assert_eq!(doctor["plan"]["topology_mode"], "single_task_multi_gpu");
    let stopped = machine.run(["stop", "--gpu", "1"]).succeeds().json();
    assert_eq!(names(&stopped["stopped"]), ["pair"]);
    machine.run(["stop", "--gpus", "0"]).succeeds();
    machine.has_no_daemon();
}

#[test]
fn several_daemons_of_one_gpu_are_listed() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0"]);
    machine.start(&["--gpus", "0,1", "--force", "--name", "pair"]);
    machine
        .run(["stop", "--gpu", "0"])
        .fails(&format!(
            "several daemons are live: {}, pair",
            N0.replace("0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40", "u0")
        ))
        .said("hint: --name ");
    machine.run(["stop", "--gpu", "1"]).succeeds();
}

#[test]
fn whoever_comes_first_the_daemons_of_two_starts_at_once_are_started_once() {
    let machine = Sandbox::with_gpus(4);
    let starts: Vec<_> = (0..4)
        .map(|_| machine.run(["start", "--gpus", "all", "-q"]).spawn())
        .collect();
    let mut started = 0;
    for start in starts {
        let output = start.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let count = |key: &str| report[key].as_array().unwrap().len();
        assert_eq!(count("started") + count("kept"), 4);
        started += count("started");
    }
    assert_eq!(started, 4);
    assert_eq!(machine.daemons().len(), 4);
}

#[test]
fn a_dry_run_shows_each_daemon_and_touches_nothing() {
    let machine = Sandbox::with_gpus(2);
    let shown = machine
        .run(["start", "--gpus", "all", "--dry-run"])
        .succeeds()
        .text();
    for gpu in ["GPU-U0", "GPU-U1"] {
        assert!(
            shown.contains(&format!("CUDA_VISIBLE_DEVICES={gpu} ")),
            "{shown}"
        );
    }
    machine.has_no_daemon();
    assert!(!machine.records().exists());
}

#[test]
fn interrupted_in_the_middle_the_daemons_that_are_up_stay_recorded() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0"]);
    machine.conduct("launch hang");
    let child = machine.run(["start", "--gpus", "all", "-q"]).spawn();
    crate::support::wait_until("the second launch hangs", || {
        machine.calls().contains("CUDA_VISIBLE_DEVICES=GPU-U1")
    });
    crate::support::signal(
        i32::try_from(child.id()).unwrap(),
        nix::sys::signal::Signal::SIGINT,
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["started"], json!([]));
    assert_eq!(report["kept"], json!([U0.to_lowercase()]));
    assert_eq!(names(&report["failed"]), [N1]);
    assert_eq!(report["failed"][0]["error"]["code"], "interrupted");
    assert_eq!(machine.daemons().len(), 1);
    machine.run(["env", "--gpu", U0]).succeeds();
}

#[test]
fn a_daemon_that_does_not_answer_is_not_kept() {
    let machine = Sandbox::with_gpus(2);
    let first = machine.start(&["--gpus", "1"]);
    freeze(pid(&first));
    let done = machine.run(["start", "--gpus", "all"]).finish().exited(1);
    let report = done.json();
    assert_eq!(names(&report["started"]).len(), 1);
    assert_eq!(report["kept"], json!([]));
    assert_eq!(names(&report["failed"]), [N1]);
    assert_eq!(report["failed"][0]["error"]["code"], "already-live");
    machine.kill(pid(&first));
}

#[test]
fn directories_that_have_no_effect_on_a_kept_daemon_are_told() {
    let machine = Sandbox::with_gpus(2);
    let [pipe, log] = ["p", "l"].map(|name| machine.path(name).display().to_string());
    let start = ["start", "--gpus", "0,1", "--pipe-dir", &pipe];
    let first = machine.run(start).succeeds().json();
    let again = machine.run(start).succeeds();
    let name = first["name"].as_str().unwrap();
    let kept = format!("note: daemon {name} (pid {}) is kept\n", pid(&first));
    assert!(again.stderr.ends_with(&kept), "{again:?}");
    machine
        .run(["start", "--gpus", "0,1", "--log-dir", &log])
        .succeeds()
        .said("note: --log-dir \"<S>/l\" has no effect on it: it works in \"<S>/t/uni-cumps/");
    machine
        .run(["start", "--gpus", "0,1", "--pipe-dir", &log])
        .succeeds()
        .said("note: --pipe-dir \"<S>/l\" has no effect on it: it works in \"<S>/p\"");
}

#[test]
fn a_lost_gpu_is_named_and_leaves_the_others_running() {
    let machine = Sandbox::with_gpus(2);
    let lost = "[GPU is lost]";
    machine.gpu_rows(format!("0, {U0}, Default\n1, {lost}, {lost}\n"));
    let done = machine.run(["start", "--gpus", "all"]).finish().exited(1);
    let report = done.json();
    assert_eq!(names(&report["started"]).len(), 1);
    assert_eq!(report["failed"][0]["name"], json!(null));
    assert_eq!(report["failed"][0]["error"]["code"], "unusable-gpu");
    done.said("error: GPU index 1 is not usable\ncause: nvidia-smi says \"[GPU is lost]\"\n");
    machine
        .run(["start", "--gpus", "all", "--dry-run"])
        .finish()
        .exited(1)
        .said("error: GPU index 1 is not usable");
    // One that the mask hides is not meant.
    machine
        .run(["start", "--gpus", "all"])
        .env("CUDA_VISIBLE_DEVICES", "0")
        .succeeds();
    machine.run(["stop", "--all"]).succeeds();
    machine
        .run([
            "start",
            "--gpus",
            "all",
            "--topology",
            "single_task_multi_gpu",
        ])
        .succeeds()
        .said("note: a GPU is left out, since GPU index 1 is not usable: nvidia-smi says");
}

#[test]
fn a_part_that_cannot_be_planned_is_named_and_leaves_the_others_running() {
    let machine = Sandbox::with_gpus(2);
    // The one with the short UUID has a directory with a short path.
    machine.gpu_rows(format!("0, GPU-ab, Default\n1, {U1}, Default\n"));
    let fill = 60 - machine.path("t").as_os_str().len();
    let long = machine.path("t").join("x".repeat(fill));
    std::fs::create_dir(&long).unwrap();
    let shown = machine
        .run(["start", "--gpus", "all", "--dry-run"])
        .env("TMPDIR", &long)
        .finish()
        .exited(1);
    assert!(
        shown.text().contains("CUDA_VISIBLE_DEVICES=GPU-ab "),
        "{shown:?}"
    );
    shown
        .said("error: the pipe directory's path is too long")
        .said("note: so there is no daemon gpu-u1");
    let done = machine
        .run(["start", "--gpus", "all"])
        .env("TMPDIR", &long)
        .finish()
        .exited(1);
    let report = done.json();
    assert_eq!(names(&report["started"]), ["gpu-ab"]);
    assert_eq!(names(&report["failed"]), [N1]);
    assert_eq!(machine.daemons().len(), 1);
}
