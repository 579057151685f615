//! The command line as types. Their doc comments are the help text.

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Share an NVIDIA GPU between processes with CUDA MPS.
///
/// Typical use:  uni-cumps start; eval "$(uni-cumps env)"; python train.py; uni-cumps stop
#[derive(Debug, Parser)]
#[command(
    name = "uni-cumps",
    version,
    infer_long_args = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the machine's GPUs and the recorded daemons; changes nothing
    Status(StatusArgs),
    /// Check a GPU's daemon and say what is wrong; changes nothing
    Doctor(DoctorArgs),
    /// Start a control daemon of your own and record it
    Start(StartArgs),
    /// Stop a recorded daemon
    Stop(StopArgs),
    /// Print the environment of a recorded daemon's clients
    Env(EnvArgs),
}

/// `status`
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `doctor`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// One GPU: nvidia-smi's index or a UUID [default: the only visible GPU]
    #[arg(long, value_name = "GPU", allow_negative_numbers = true)]
    pub gpus: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `start`
#[derive(Debug, Args)]
pub struct StartArgs {
    /// One GPU: nvidia-smi's index or a UUID [default: the only visible GPU]
    #[arg(long, value_name = "GPU", allow_negative_numbers = true)]
    pub gpus: Option<String>,
    /// The daemon's label [default: gpu- and the GPU's complete UUID]
    #[arg(long)]
    pub name: Option<String>,
    /// The pipe directory, at most 87 bytes [default: $TMPDIR/uni-cumps/NAME/pipe]
    #[arg(long, value_name = "DIR", value_parser = directory())]
    pub pipe_dir: Option<PathBuf>,
    /// The log directory [default: $TMPDIR/uni-cumps/NAME/log]
    #[arg(long, value_name = "DIR", value_parser = directory())]
    pub log_dir: Option<PathBuf>,
    /// Detach the daemon (this is the default)
    #[arg(long, conflicts_with = "foreground")]
    pub daemon: bool,
    /// Stay with the daemon until it ends: for systemd and containers. Its log goes to stderr
    #[arg(long)]
    pub foreground: bool,
}

/// `stop`
#[derive(Debug, Args)]
pub struct StopArgs {
    /// The daemon's label [default: the only live daemon]
    #[arg(long)]
    pub name: Option<String>,
    /// Stop all your recorded daemons on this machine
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
}

/// `env`
#[derive(Debug, Args)]
pub struct EnvArgs {
    /// The daemon's label [default: the only live daemon]
    #[arg(long)]
    pub name: Option<String>,
    /// The shell to print for
    #[arg(long, value_enum, default_value = "posix")]
    pub shell: Shell,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Shells that `env` prints for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// sh, dash, bash, zsh, ksh
    Posix,
}

/// A path that is not empty: an empty one would mean the working directory.
fn directory() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|value| {
        if value.is_empty() {
            Err("the path is empty")
        } else {
            Ok(PathBuf::from(value))
        }
    })
}
