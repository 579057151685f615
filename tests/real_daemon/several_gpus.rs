//! One daemon over several GPUs, one for each, and one for a MIG instance. The daemons run without any GPU; which ones are
//! there only the stand-in for nvidia-smi says.

use std::fs;

use serde_json::json;

use crate::support::{Sandbox, U0, U1, pid};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    ("one_daemon_over_two_gpus", two_gpus),
    ("a_daemon_for_each_gpu", each_gpu),
    ("a_daemon_for_a_mig_instance", mig_instance),
];

/// The `CUDA_VISIBLE_DEVICES` that the daemon hands to its servers.
fn visible(daemon: i32) -> String {
    let environ = fs::read(format!("/proc/{daemon}/environ")).unwrap();
    let environ = String::from_utf8(environ).unwrap();
    let mut variables = environ.split('\0');
    let value = variables.find_map(|it| it.strip_prefix("CUDA_VISIBLE_DEVICES="));
    value.unwrap().to_owned()
}

fn machine(driver: &Driver, gpus: usize) -> Sandbox {
    Sandbox::with_real_control(&driver.directory, gpus)
}

fn two_gpus(driver: &Driver) {
    let machine = machine(driver, 2);
    let daemon = machine.start(&["--gpus", "1,0"]);
    assert_eq!(visible(pid(&daemon)), format!("{U1},{U0}"));
    let again = machine
        .run(["start", "--gpus", "0,1", "-q"])
        .succeeds()
        .json();
    assert_eq!(again["pid"], daemon["pid"]);
    machine.run(["stop", "--gpu", "0"]).succeeds();
    machine.has_no_daemon();
}

fn each_gpu(driver: &Driver) {
    let machine = machine(driver, 8);
    let report = machine.run(["start", "--gpus", "all"]).succeeds().json();
    assert_eq!(report["started"].as_array().unwrap().len(), 8);
    assert_eq!(machine.daemons().len(), 8);
    let again = machine
        .run(["start", "--gpus", "all", "-q"])
        .succeeds()
        .json();
    assert_eq!(again["started"], json!([]));
    machine.run(["stop", "--gpu", "7"]).succeeds();
    let again = machine
        .run(["start", "--gpus", "all", "-q"])
        .succeeds()
        .json();
    assert_eq!(again["started"].as_array().unwrap().len(), 1);
    machine.run(["stop", "--all"]).succeeds();
    machine.has_no_daemon();
}

fn mig_instance(driver: &Driver) {
    let machine = machine(driver, 1);
    let mig = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f";
    machine.gpu_rows(format!("0, {U0}, [N/A], Enabled\n"));
    let list =
        format!("GPU 0: NVIDIA A100 (UUID: {U0})\n  MIG 7g.40gb     Device  0: (UUID: {mig})\n");
    fs::write(machine.bin().join("list.txt"), list).unwrap();
    let daemon = machine.start(&[]);
    assert_eq!(visible(pid(&daemon)), mig);
    let env = machine.run(["env", "--json"]).succeeds().json();
    assert_eq!(env["env"]["CUDA_VISIBLE_DEVICES"], mig);
    machine.run(["stop"]).succeeds();
    machine.has_no_daemon();
}
