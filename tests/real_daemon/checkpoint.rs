//! `checkpoint` with NVIDIA's own libcuda, which opens without a GPU, and beside NVIDIA's own daemon.

use std::fs;
use std::path::PathBuf;

use serde_json::json;

use crate::support::{Sandbox, Sleeper, pid, say};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("its_libcuda_is_too_old_for_a_checkpoint", too_old),
    (
        "a_process_that_is_no_client_leaves_its_gpu_and_comes_back",
        no_client,
    ),
];

/// The directory of this driver's libcuda, if it was unpacked.
fn libcuda(driver: &Driver) -> Option<PathBuf> {
    let libraries = driver.directory.join("usr/lib");
    let of = |triplet: PathBuf| triplet.join("nvidia/current");
    let found = fs::read_dir(libraries)
        .ok()?
        .map(|entry| of(entry.unwrap().path()))
        .find(|directory| directory.join("libcuda.so.1").exists());
    if found.is_none() {
        say(&format!(
            "no libcuda below {}: it is not tried",
            driver.directory.display()
        ));
    }
    found
}

fn too_old(driver: &Driver) {
    let Some(libcuda) = libcuda(driver) else {
        return;
    };
    let machine = driver.machine();
    let target = Sleeper::new();
    let has = match driver.name() {
        "535" => "12.2",
        "550" => "12.4",
        _ => "12.5",
    };
    let sentence = format!("driver too old: has {has}, needs 12.8 (r570)");
    let pid = format!("--pid={}", target.pid());
    for verb in [
        "suspend",
        "resume",
        "lock",
        "checkpoint",
        "restore",
        "unlock",
        "restore-thread",
    ] {
        machine
            .run(["checkpoint", verb, &pid])
            .env("LD_LIBRARY_PATH", &libcuda)
            .fails(&sentence)
            .said("hint: install a driver of branch 570 or newer");
    }
    let state = machine.run(["checkpoint", "state", &pid]);
    let state = state.env("LD_LIBRARY_PATH", &libcuda).finish().exited(1);
    assert!(
        state
            .text()
            .contains(&format!("state=none reason={sentence} hint="))
    );
    let check = machine.run(["checkpoint", "check", "--json", &pid]);
    let found = check
        .env("LD_LIBRARY_PATH", &libcuda)
        .finish()
        .exited(1)
        .json();
    assert_eq!(found["blockers"][0]["id"], "driver-too-old");
    assert_eq!(found["blockers"][0]["message"], sentence);
}

fn is_away(machine: &Sandbox) -> bool {
    let status = machine.run(["status", "--json"]).succeeds().json();
    status["suspended_processes"] != json!([])
}

fn no_client(driver: &Driver) {
    let machine = driver.machine();
    let daemon = machine.start(&[]);
    let target = Sleeper::new();
    machine.cuda_process(target.pid(), 0);
    let named = format!("--pid={}", target.pid());
    machine
        .run(["checkpoint", "suspend", "--quiet", &named])
        .succeeds();
    assert!(is_away(&machine));
    machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
    assert!(!is_away(&machine));
    // The daemon has given nobody a server meanwhile.
    assert_eq!(machine.processes(), [pid(&daemon)]);
}
