//! Calling libcuda in a child process of ours, which may hang or crash without taking us along.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::{DriverFailure, Seen};
use crate::checkpoint::Call;
use crate::cli::{CALL_COMMAND, LOOK_COMMAND, THROUGH_DAEMON};
use crate::host::Host;
use crate::process;
use crate::record::ProcessId;
use crate::runner::{Invocation, Mode, RunError, Status};
use crate::runtime_dir;

/// What a process saw that went through a control daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The devices, with their memory.
    pub seen: Seen,
    /// The server that counts the process among its clients.
    pub server: Option<i32>,
}

/// Has a child of ours look, with the caller's environment and, if given, another mask. Not through a control daemon.
pub fn look_in_child(
    host: &Host,
    mask: Option<&str>,
    limit: Duration,
) -> Result<Seen, DriverFailure> {
    let mut env = environment(host, NOWHERE.as_ref());
    if let Some(mask) = mask {
        set(&mut env, MASK, mask);
    }
    let args = vec![LOOK_COMMAND.into()];
    in_child(host, args, env, Mode::Captured(limit))
}

/// Has a child of ours initialise CUDA on these devices through the daemon in `pipe` and look for itself among the clients.
pub fn probe_in_child(
    host: &Host,
    visible: &str,
    pipe: &Path,
    limit: Duration,
) -> Result<Probe, DriverFailure> {
    let mut env = environment(host, pipe);
    set(&mut env, MASK, visible);
    let args = vec![LOOK_COMMAND.into(), THROUGH_DAEMON.into()];
    in_child(host, args, env, Mode::Captured(limit))
}

/// Makes the driver's checkpoint calls, each in a child of its own.
pub struct Caller<'h> {
    host: &'h Host,
}

impl<'h> Caller<'h> {
    /// Calls the driver of this machine.
    pub fn new(host: &'h Host) -> Self {
        Self { host }
    }

    /// Asks about the process `pid`, which may take `limit`: for its state, its thread, or, with pid 0, for what the driver can.
    pub fn ask(&self, pid: i32, question: &Call, limit: Duration) -> Result<u32, DriverFailure> {
        self.call(pid, question, Vec::new(), Mode::Captured(limit))
    }

    /// The state of a process, asked in the middle of a work that a signal must not cut off.
    pub fn state(&self, pid: i32, limit: Duration) -> Result<u32, DriverFailure> {
        self.call(pid, &Call::State, Vec::new(), Mode::Uninterrupted(limit))
    }

    /// Acts on the first of these processes, which may take `limit`. A signal that reaches us does not cut it off: an
    /// interrupted call leaves the driver and the process apart (checkpoint-restore/criu#2547). Should we be killed
    /// meanwhile, the child lets all of them run.
    pub fn act(
        &self,
        on: ProcessId,
        others: &[ProcessId],
        call: &Call,
        limit: Duration,
    ) -> Result<(), DriverFailure> {
        let touched = std::iter::once(&on).chain(others);
        let touched = touched.map(|it| format!("--touched={}-{}", it.pid, it.start_ticks));
        let call = self.call(on.pid, call, touched.collect(), Mode::Uninterrupted(limit));
        call.map(drop)
    }

    fn call(
        &self,
        pid: i32,
        call: &Call,
        further: Vec<String>,
        mode: Mode,
    ) -> Result<u32, DriverFailure> {
        let host = self.host;
        let nowhere = call
            .initialises()
            .then(|| runtime_dir::nowhere(host))
            .flatten();
        let pipe = nowhere.as_ref().map_or(NOWHERE.as_ref(), TempDir::path);
        let mut env = environment(host, pipe);
        // A mask would hide GPUs from a restore that must name all of them, and a log may go to standard output.
        env.retain(|(key, _)| key != MASK && key != JOB_FILE && key != "CUDA_LOG_FILE");
        // Processes that share memory are treated as one only by who names the same job. Another user's process may name
        // any file.
        let is_ours = process::running(host, pid).is_some_and(|it| it.uid == host.uid);
        let job = process::variable_of(host, pid, JOB_FILE).filter(|_| is_ours);
        if let Some(job) = job {
            set(&mut env, JOB_FILE, job);
        }
        let mut args: Vec<OsString> = [CALL_COMMAND, call.word()].map(OsString::from).into();
        args.push(pid.to_string().into());
        args.push(format!("--parent={}", process::our_pid()).into());
        args.extend(call.options().into_iter().map(OsString::from));
        args.extend(further.into_iter().map(OsString::from));
        in_child(host, args, env, mode)
    }
}

/// Where no control daemon is, so that a child does not become an MPS client.
const NOWHERE: &str = "/nonexistent";
const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
const MASK: &str = "CUDA_VISIBLE_DEVICES";
const JOB_FILE: &str = "CUDA_CHECKPOINT_JOB_FILE";

type Variables = Vec<(OsString, OsString)>;

/// The caller's environment with another pipe directory.
fn environment(host: &Host, pipe: &Path) -> Variables {
    let mut env = host.env.to_vec();
    set(&mut env, PIPE, pipe);
    env
}

fn set(env: &mut Variables, key: &str, value: impl Into<OsString>) {
    env.retain(|(name, _)| name != key);
    env.push((key.into(), value.into()));
}

/// Calls our own binary, which prints a `Result<T, DriverFailure>`.
fn in_child<T: DeserializeOwned>(
    host: &Host,
    args: Vec<OsString>,
    env: Variables,
    mode: Mode,
) -> Result<T, DriverFailure> {
    let call = Invocation {
        purpose: "call the CUDA driver",
        program: host.ourselves.clone(),
        args,
        env,
        stdin: Vec::new(),
        mode,
    };
    let failed = |reason: String| Err(DriverFailure::Child(reason));
    match host.runner.run(&call) {
        Ok(finished) if finished.status == Status::Exited(0) => {
            serde_json::from_str::<Result<T, DriverFailure>>(&finished.stdout)
                .unwrap_or_else(|error| failed(error.to_string()))
        }
        Ok(finished) => failed(match finished.status {
            Status::Signaled(signal) => format!("signal {signal} ended it"),
            Status::Exited(status) => format!("it exited with {status}: {}", finished.said()),
        }),
        Err(RunError::Interrupted(signal)) => Err(DriverFailure::Interrupted(signal)),
        Err(RunError::TimedOut(limit)) => Err(DriverFailure::TimedOut(limit.as_secs_f64())),
        Err(error) => failed(error.to_string()),
    }
}
