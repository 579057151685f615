//! `clients`.

use clap::Args;

use super::DaemonArgs;

/// `clients`
#[derive(Debug, Args)]
#[command(mut_arg("name", |arg| arg.help("The daemon's label [default: every live daemon]")))]
pub struct ClientsArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Instead: have the daemon take this client off the GPU, and wait until it is no longer among the clients. The process
    /// itself goes on, and its next CUDA call fails with error 810
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub terminate: Option<i32>,
    /// Only when the daemon has let go of it, send the process SIGTERM and wait for its end. Never before: a client that is
    /// killed in the middle of its GPU work may leave the server and all its other clients undefined
    #[arg(long, requires = "terminate")]
    pub signal: bool,
    /// How long the daemon may take to let go of the client, and then the process to end
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 10,
        requires = "terminate",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub timeout: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
