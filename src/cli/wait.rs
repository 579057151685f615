//! The command line of `wait`.

use std::fmt;
use std::str::FromStr;

use clap::Args;

use super::DaemonArgs;

/// `wait`
#[derive(Debug, Args)]
#[command(mut_arg("name", |arg| arg.help("The daemon's label; it need not be recorded yet [default: the only live daemon]")))]
pub struct WaitArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// What to wait for: ready (it answers), attached=K (it has K clients or more), idle (it answers and has no client),
    /// or gone (it has ended, and nobody keeps its pipe directory)
    #[arg(long = "for", value_name = "ready|attached=K|idle|gone")]
    pub condition: Condition,
    /// How long to wait; then the last state is told, with status 1. 0 looks once
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(..=31_536_000))]
    pub timeout: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How a daemon is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It is recorded, runs and answers.
    Ready,
    /// At least so many clients are connected; one or more.
    Attached(usize),
    /// It answers, and no client is connected.
    Idle,
    /// Its process has ended, and so has whatever kept its pipe directory.
    Gone,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::Attached(count) => write!(f, "attached={count}"),
            Self::Idle => f.write_str("idle"),
            Self::Gone => f.write_str("gone"),
        }
    }
}

impl FromStr for Condition {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text {
            "ready" => Ok(Self::Ready),
            "idle" => Ok(Self::Idle),
            "gone" => Ok(Self::Gone),
            _ => {
                let count = text.strip_prefix("attached=").map(str::parse);
                match count {
                    Some(Ok(count @ 1..)) => Ok(Self::Attached(count)),
                    Some(_) => Err("the number of clients must be 1 or more, as in attached=2"),
                    None => Err("it must be ready, attached=K, idle or gone"),
                }
            }
        }
    }
}
