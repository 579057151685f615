//! Programs that share the GPU through a daemon.

use serde_json::Value;

use crate::machine::{Machine, expect, within};
use crate::running::Program;
use crate::{Outcome, Test};

pub(crate) const TESTS: &[Test] = &[
    (
        "the_probe_is_a_client_of_the_daemon",
        the_probe_is_a_client_of_the_daemon,
    ),
    (
        "a_pair_on_the_gpu_is_validated",
        a_pair_on_the_gpu_is_validated,
    ),
];

pub(crate) const CHECKPOINT_TESTS: &[Test] = &[(
    "a_client_of_the_daemon_is_not_suspended",
    a_client_of_the_daemon_is_not_suspended,
)];

fn the_probe_is_a_client_of_the_daemon() -> Outcome {
    let machine = Machine::start()?;
    let output = machine.run(&["doctor", "--gpus", "0", "--probe", "--json"])?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let checks = report["checks"].as_array().ok_or("no checks")?;
    let probe = checks
        .iter()
        .find(|check| check["id"] == "probe")
        .ok_or("no probe")?;
    eprintln!("{}", probe["evidence"]);
    expect(report["valid"] == true && probe["status"] == "ok", &output)
}

fn a_pair_on_the_gpu_is_validated() -> Outcome {
    let machine = Machine::start()?;
    let pair = [
        "validate",
        "--backend",
        "mjwarp",
        "--collector",
        "cuda:0",
        "--json",
    ];
    let mut command = machine.command(&pair);
    command.envs(machine.client_env()?);
    let output = within(std::time::Duration::from_secs(90), command)?;
    let evidence: Value = serde_json::from_slice(&output.stdout)?;
    expect(evidence["validated"] == true, &output)
}

fn a_client_of_the_daemon_is_not_suspended() -> Outcome {
    let machine = Machine::start()?;
    let mut program = Program::client(&machine, 1)?;
    program.step()?;
    let found = machine.checkpoint(1, &["check", "--pid", program.pid()])?;
    let blockers = found["blockers"].as_array().ok_or("no blockers")?;
    let mut ids = blockers.iter().map(|blocker| &blocker["id"]);
    if found["ready"] != false || !ids.any(|id| id == "mps-client") {
        return Err(found.to_string().into());
    }
    let output = machine.checkpoint_output(&["suspend", "--pid", program.pid()])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_refused = output.status.code() == Some(1) && said.contains("MPS client");
    expect(is_refused, &output)?;
    program.step()
}
