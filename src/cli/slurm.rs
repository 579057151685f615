//! `slurm` and its hooks, and the hidden command for what a hook does as a job's user.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::directory;

/// Where hooks keep what they know, if nothing else is said.
pub const STATE_DIRECTORY: &str = "/run/uni-cumps";

/// `slurm`
#[derive(Debug, Args)]
pub struct SlurmArgs {
    /// Where the hooks of a node keep what they know of its jobs; the same for all of them
    #[arg(long, global = true, value_name = "DIR", default_value = STATE_DIRECTORY, value_parser = directory(),
          value_hint = ValueHint::DirPath, display_order = 98)]
    pub state_dir: PathBuf,
    /// The hook.
    #[command(subcommand)]
    pub hook: SlurmHook,
}

/// The hooks.
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum SlurmHook {
    /// Prolog: start or join the daemon that a job asks for, as the job's user: by --comment=cumps:share, where the comment
    /// may go on with ,per-gpu and ,threads=PCT and ,memory=SIZE, or by --gres=mps:N. Fails only if the node is at fault, since that
    /// drains it
    Prolog,
    /// TaskProlog: print the task's variables; fail where the job asked for a shared GPU and has none
    TaskProlog,
    /// Epilog: leave the daemons of a job; the last one out ends them. Fails if something is left
    Epilog,
    /// HealthCheckProgram: do what the epilog of a job that is gone has not done
    Health,
    /// Print the lines for slurm.conf and gres.conf; edits nothing
    Install,
}

/// The hidden command.
#[derive(Debug, Args)]
pub struct AsUserArgs {
    /// The user
    pub uid: u32,
    /// The user's group
    pub gid: u32,
    /// The command of ours and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}
