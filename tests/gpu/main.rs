//! The real binary on a real GPU, with the machine's own driver. Without a GPU these tests are ignored, with the reason
//! on the last lines.
//!
//! They need no compiler: on a machine without Rust, run the built test binary with `UNI_CUMPS_BIN` naming the built
//! `uni-cumps`.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Output};

use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let missing = missing();
    let trials = [
        Trial::test(
            "the_probe_is_a_client_of_the_daemon",
            the_probe_is_a_client_of_the_daemon,
        ),
        Trial::test(
            "a_pair_on_the_gpu_is_validated",
            a_pair_on_the_gpu_is_validated,
        ),
    ];
    let trials = trials
        .map(|trial| trial.with_ignored_flag(missing.is_some()))
        .into();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(missing) = missing {
        eprintln!("skipped: the tests that need a GPU, since {missing}");
    }
    conclusion.exit_code()
}

/// Why nothing can be tested here.
fn missing() -> Option<String> {
    for program in ["nvidia-smi", "nvidia-cuda-mps-control"] {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|directory| directory.join(program).exists()) {
            return Some(format!("{program} is not on PATH"));
        }
    }
    let listed = Command::new("nvidia-smi").arg("-L").output();
    match listed {
        Ok(output) if output.status.success() => None,
        _ => Some("nvidia-smi lists no GPU".to_owned()),
    }
}

/// A home and a daemon of the test's own; the daemon is stopped at the end whatever happens.
struct Machine(tempfile::TempDir);

impl Machine {
    fn start() -> Result<Self, Failed> {
        let directory = tempfile::Builder::new().prefix("uc-").tempdir_in("/tmp")?;
        let machine = Self(directory);
        let output = machine.run(&["start", "--gpus", "0", "--name", "test"])?;
        expect(output.status.success(), &output)?;
        Ok(machine)
    }

    fn command(&self, args: &[&str]) -> Command {
        let binary = std::env::var_os("UNI_CUMPS_BIN").map(PathBuf::from);
        let binary = binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_uni-cumps").into());
        let mut command = Command::new(binary);
        command
            .args(args)
            .env("HOME", self.0.path())
            .env("TMPDIR", self.0.path())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("CUDA_MPS_PIPE_DIRECTORY");
        command
    }

    fn run(&self, args: &[&str]) -> Result<Output, Failed> {
        Ok(self.command(args).output()?)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.run(&["stop", "--all", "--timeout", "10"]);
    }
}

fn expect(condition: bool, output: &Output) -> Result<(), Failed> {
    if condition {
        return Ok(());
    }
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Err(format!(
        "{}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    )
    .into())
}

fn the_probe_is_a_client_of_the_daemon() -> Result<(), Failed> {
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

fn a_pair_on_the_gpu_is_validated() -> Result<(), Failed> {
    let machine = Machine::start()?;
    let env = machine.run(&["env", "--json"])?;
    let env: Value = serde_json::from_slice(&env.stdout)?;
    let variables = env["env"].as_object().ok_or("no environment")?;
    let pair = [
        "validate",
        "--backend",
        "mjwarp",
        "--collector",
        "cuda:0",
        "--json",
    ];
    let output = machine
        .command(&pair)
        .envs(
            variables
                .iter()
                .map(|(key, value)| (key, value.as_str().unwrap_or_default())),
        )
        .output()?;
    let evidence: Value = serde_json::from_slice(&output.stdout)?;
    expect(evidence["validated"] == true, &output)
}
