//! A home and, if wanted, a daemon of the test's own; what a test leaves there is ended with it. Every call has a time
//! limit, since a driver may not answer.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use serde_json::Value;

use crate::Outcome;

/// How long one call of uni-cumps may take: CUDA may have to wake up every GPU first.
const LIMIT: Duration = Duration::from_secs(90);
/// How long uni-cumps waits for a call of the driver, so that it can still repair what hangs within `LIMIT`.
const DEADLINE: &str = "30";

pub(crate) struct Machine(tempfile::TempDir);

impl Machine {
    /// Without a daemon.
    pub(crate) fn new() -> Result<Self, Failed> {
        // In /tmp whatever TMPDIR says: a socket's path must be short.
        let directory = tempfile::Builder::new()
            .prefix("uc-gpu-")
            .tempdir_in("/tmp")?;
        std::fs::create_dir(directory.path().join("nowhere"))?;
        Ok(Self(directory))
    }

    /// With a daemon for the first GPU.
    pub(crate) fn start() -> Result<Self, Failed> {
        let machine = Self::new()?;
        let output = machine.run(&["start", "--gpus", "0", "--name", "test"])?;
        expect(output.status.success(), &output)?;
        Ok(machine)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A program in an environment from which no daemon can be reached, and in which GPU 0 is nvidia-smi's.
    pub(crate) fn program(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("HOME", self.0.path())
            .env("TMPDIR", self.0.path())
            .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            .env("CUDA_MPS_PIPE_DIRECTORY", self.path("nowhere"))
            .env_remove("CUDA_VISIBLE_DEVICES");
        command
    }

    /// uni-cumps with these arguments.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program(&uni_cumps());
        command.args(args).env_remove("CUDA_MPS_PIPE_DIRECTORY");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Result<Output, Failed> {
        within(LIMIT, self.command(args))
    }

    /// The variables that make a program a client of this machine's daemon.
    pub(crate) fn client_env(&self) -> Result<Vec<(String, String)>, Failed> {
        let env = self.run(&["env", "--json"])?;
        let env: Value = serde_json::from_slice(&env.stdout)?;
        let variables = env["env"].as_object().ok_or("no environment")?;
        let pair = |(key, value): (&String, &Value)| {
            (key.clone(), value.as_str().unwrap_or_default().to_owned())
        };
        Ok(variables.iter().map(pair).collect())
    }

    /// `checkpoint` with a verb and its arguments, which must come to this exit status. What it printed.
    pub(crate) fn checkpoint(&self, status: i32, args: &[&str]) -> Result<Value, Failed> {
        let output = self.checkpoint_output(args)?;
        expect(output.status.code() == Some(status), &output)?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    pub(crate) fn checkpoint_output(&self, args: &[&str]) -> Result<Output, Failed> {
        let mut words = vec!["checkpoint", "--json"];
        words.extend(args);
        if !["check", "state", "restore-thread"].contains(&args[0]) {
            words.extend(["--deadline", DEADLINE]);
        }
        self.run(&words)
    }

    /// In which state a process is.
    pub(crate) fn state(&self, pid: &str) -> Result<String, Failed> {
        let states = self.checkpoint(0, &["state", "--pid", pid])?;
        text(&states["processes"][0]["state"])
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.run(&["stop", "--all", "--timeout", "10"]);
    }
}

/// The binary under test.
pub(crate) fn uni_cumps() -> PathBuf {
    let named = std::env::var_os("UNI_CUMPS_BIN").map(PathBuf::from);
    named.unwrap_or_else(|| env!("CARGO_BIN_EXE_uni-cumps").into())
}

/// A text of an answer in JSON.
pub(crate) fn text(value: &Value) -> Result<String, Failed> {
    let text = value.as_str().ok_or_else(|| format!("{value} is no text"));
    Ok(text?.to_owned())
}

/// Fails with all that a call has printed, unless the condition holds.
pub(crate) fn expect(condition: bool, output: &Output) -> Outcome {
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

/// Runs a command to its end, and kills it where it does not come to one in time. What it prints goes through files: a
/// pipe could be kept open by a child of it.
pub(crate) fn within(limit: Duration, mut command: Command) -> Result<Output, Failed> {
    let (stdout, stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .spawn()
        .map_err(|error| format!("{command:?}: {error}"))?;
    let status = ended(&mut child, limit)?;
    if status.is_none() {
        child.kill()?;
        ended(&mut child, Duration::from_secs(5))?;
    }
    let output = Output {
        status: status.unwrap_or_default(),
        stdout: read(stdout)?,
        stderr: read(stderr)?,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    match status {
        Some(_) => Ok(output),
        None => Err(format!("{command:?} did not end within {limit:?}: {said}").into()),
    }
}

fn read(mut file: File) -> Result<Vec<u8>, Failed> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// How a child came to its end, if it did so in time.
pub(crate) fn ended(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>, Failed> {
    let deadline = Instant::now() + limit;
    loop {
        let status = child.try_wait()?;
        if status.is_some() || Instant::now() > deadline {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Looks again and again until something is so.
pub(crate) fn wait_until(
    what: &str,
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool, Failed>,
) -> Outcome {
    let deadline = Instant::now() + limit;
    while !condition()? {
        if Instant::now() > deadline {
            return Err(format!("waited {limit:?} in vain until {what}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
