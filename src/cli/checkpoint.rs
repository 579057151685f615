//! `checkpoint` and its verbs, and the hidden command for one call of the driver.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use crate::checkpoint::{Call, GpuMap, GpuName, GpuPair, NamedPair};
use crate::record::ProcessId;

/// `checkpoint`
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Print JSON
    #[arg(long, global = true, display_order = 99)]
    pub json: bool,
    /// What is done with the processes.
    #[command(subcommand)]
    pub verb: CheckpointVerb,
}

/// The verbs of `checkpoint`: the first two are what people want, the last five are their parts.
#[derive(Debug, Subcommand)]
pub enum CheckpointVerb {
    /// Take processes off their GPUs, all or none: lock all, checkpoint all
    Suspend {
        /// Who.
        #[command(flatten)]
        pids: Pids,
        /// How long to wait for them.
        #[command(flatten)]
        wait: Wait,
        /// How long to wait for the driver.
        #[command(flatten)]
        patience: Patience,
        /// Whether MPS clients may be lost.
        #[command(flatten)]
        force: Force,
    },
    /// Bring suspended processes back, all or none: restore all, unlock all
    Resume {
        /// A suspended process; repeatable [default: the only one that was suspended]
        #[arg(long, value_name = "PID", value_delimiter = ',', value_parser = pid())]
        pid: Vec<i32>,
        /// All processes that were suspended
        #[arg(long, conflicts_with = "pid")]
        all: bool,
        /// Where.
        #[command(flatten)]
        target: Target,
        /// How long to wait for the driver.
        #[command(flatten)]
        patience: Patience,
    },
    /// Say what stands in the way, before anything is touched
    Check {
        /// Who.
        #[command(flatten)]
        pids: Pids,
        /// Where they are to come back.
        #[command(flatten)]
        target: Target,
        /// Whether MPS clients may be lost.
        #[command(flatten)]
        force: Force,
    },
    /// Show in which state processes are
    State {
        /// Who.
        #[command(flatten)]
        pids: Pids,
    },
    /// Wait for a process's GPU work and hold back what comes
    Lock {
        /// Who.
        #[command(flatten)]
        pid: Pid,
        /// How long to wait for it.
        #[command(flatten)]
        wait: Wait,
        /// How long to wait for the driver.
        #[command(flatten)]
        patience: Patience,
        /// Whether an MPS client may be lost.
        #[command(flatten)]
        force: Force,
    },
    /// Move a locked process's GPU memory into host memory
    Checkpoint {
        /// Who.
        #[command(flatten)]
        pid: Pid,
        /// How long to wait for the driver.
        #[command(flatten)]
        patience: Patience,
        /// Whether an MPS client may be lost.
        #[command(flatten)]
        force: Force,
    },
    /// Move the GPU memory back; the process stays locked
    Restore {
        /// Who.
        #[command(flatten)]
        pid: Pid,
        /// Where.
        #[command(flatten)]
        target: Target,
        /// How long to wait for the driver.
        #[command(flatten)]
        patience: Patience,
    },
    /// Let a locked process go on
    Unlock {
        /// Who.
        #[command(flatten)]
        pid: Pid,
        /// How long to wait for the driver.
        #[command(flatten)]
        patience: Patience,
    },
    /// Show the thread that carries out checkpoint and restore
    RestoreThread {
        /// Who.
        #[command(flatten)]
        pid: Pid,
    },
}

/// Some processes.
#[derive(Debug, Args)]
pub struct Pids {
    /// A CUDA process; repeatable
    #[arg(long = "pid", required = true, value_name = "PID", value_delimiter = ',', value_parser = pid())]
    pub pids: Vec<i32>,
}

/// One process.
#[derive(Debug, Args)]
pub struct Pid {
    /// The CUDA process
    #[arg(long, value_name = "PID", value_parser = pid())]
    pub pid: i32,
}

/// A number that may be a process's.
fn pid() -> clap::builder::RangedI64ValueParser<i32> {
    clap::value_parser!(i32).range(1..)
}

/// How long a lock waits.
#[derive(Debug, Args)]
pub struct Wait {
    /// How long GPU work in progress may take until all processes are locked
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub timeout: Duration,
}

/// How long a call may take.
#[derive(Debug, Args)]
pub struct Patience {
    /// How long any other call of the driver may take. Then it is ended, and the process is repaired
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub deadline: Duration,
}

/// For who knows better.
#[derive(Debug, Args)]
pub struct Force {
    /// Also an MPS client, which NVIDIA does not support: the process may be lost
    #[arg(long)]
    pub force: bool,
}

/// Where processes come back.
#[derive(Debug, Args)]
pub struct Target {
    /// Restore on this GPU what was on another one: nvidia-smi's index or a UUID
    #[arg(long, value_name = "GPU", conflicts_with = "gpu_map")]
    pub to: Option<GpuName>,
    /// Restore on GPU NEW what was on OLD, each an index or a UUID; repeatable. A GPU that is not named keeps its place,
    /// unless another takes it: then it takes the place that became free
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',')]
    pub gpu_map: Vec<NamedPair>,
}

/// A time in seconds, a part of one included. Without any end a lock could not be given up.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok();
    let seconds = seconds.filter(|seconds| (0.001..=86_400.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "it must be a number of seconds from 0.001 to 86400".to_owned())
}

/// The hidden command for one call.
#[derive(Debug, Args)]
pub struct CallArgs {
    /// The call
    #[arg(value_enum)]
    name: CallName,
    /// About this process
    pub pid: i32,
    /// The process that waits for the answer
    #[arg(long)]
    pub parent: i32,
    /// How long a lock may wait
    #[arg(long, default_value_t = 1)]
    timeout_ms: u32,
    /// Where each GPU goes
    #[arg(long)]
    pair: Vec<GpuPair>,
    /// The processes that must run again if nobody waits for the answer any more
    #[arg(long, value_name = "PID-TICKS", value_parser = identity)]
    pub touched: Vec<ProcessId>,
}

/// A process as the child is told of it.
fn identity(text: &str) -> Result<ProcessId, String> {
    let parse = || {
        let (pid, start_ticks) = text.split_once('-')?;
        Some(ProcessId {
            pid: pid.parse().ok()?,
            start_ticks: start_ticks.parse().ok()?,
        })
    };
    parse().ok_or_else(|| "it must be PID-TICKS".to_owned())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CallName {
    Version,
    State,
    RestoreThread,
    Init,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

impl CallArgs {
    /// The call that is meant.
    pub fn call(&self) -> Call {
        match self.name {
            CallName::Version => Call::Version,
            CallName::State => Call::State,
            CallName::RestoreThread => Call::RestoreThread,
            CallName::Lock => Call::Lock {
                timeout_ms: self.timeout_ms,
            },
            CallName::Checkpoint => Call::Checkpoint,
            CallName::Init => Call::Init,
            CallName::Restore => Call::Restore(GpuMap::of(self.pair.clone())),
            CallName::Unlock => Call::Unlock,
        }
    }
}
