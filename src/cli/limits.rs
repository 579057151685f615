//! `limits`, and the limits that `start` sets.

use clap::Args;

use super::DaemonArgs;

use crate::limits::{MemorySetting, Priority, Setting, ThreadPercentage};

/// What `start` limits each program of the daemon to.
#[derive(Debug, Args)]
pub struct StartLimits {
    /// The most of a GPU's threads that each program may occupy, in percent: 1 to 100
    #[arg(long, value_name = "PCT")]
    pub threads: Option<ThreadPercentage>,
    /// The most memory that each program may take on each GPU, such as 8G or 512M, or on one GPU: 0=8G; repeatable
    #[arg(long, value_name = "SIZE|GPU=SIZE")]
    pub memory: Vec<MemorySetting>,
    /// Whose work goes first, unless a program says it for itself
    #[arg(long, value_enum)]
    pub priority: Option<Priority>,
}

impl StartLimits {
    /// The same as settings.
    pub fn settings(&self) -> Vec<Setting> {
        let threads = self.threads.clone().map(|it| Setting::Threads(Some(it)));
        let memory = self
            .memory
            .iter()
            .map(|it| Setting::Memory(it.gpus.clone(), Some(it.limit)));
        let priority = self.priority.map(|it| Setting::Priority(Some(it)));
        threads.into_iter().chain(memory).chain(priority).collect()
    }
}

/// `limits`
#[derive(Debug, Args)]
#[command(mut_arg("name", |arg| arg.help("The daemon's label [default: every live daemon; with --set, the only one]")))]
pub struct LimitsArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Set a limit for programs that connect from now on: threads=30, memory=8G for every GPU, memory=GPU=8G for one,
    /// priority=low; nothing behind the last = clears it; repeatable
    #[arg(long, value_name = "LIMIT=VALUE")]
    pub set: Vec<Setting>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
