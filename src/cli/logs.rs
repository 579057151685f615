//! The command line of `logs`.

use std::str::FromStr;

use clap::Args;

use super::DaemonArgs;

use crate::log_line::{Level, Since};

/// `logs`
#[derive(Debug, Args)]
#[command(mut_arg("name", |arg| arg.help("The daemon's label; one that is gone has left its logs [default: the only live daemon]")))]
pub struct LogsArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Only control.log: what the control daemon says
    #[arg(long, conflicts_with = "server")]
    pub control: bool,
    /// Only server.log: what the daemon's servers say
    #[arg(long)]
    pub server: bool,
    /// Go on with what comes, also when a log is truncated or replaced, until the daemon ends
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last N messages; the lines of one message count once [default: 50 on a terminal without --since,
    /// otherwise all]
    #[arg(
        short = 'n',
        long = "lines",
        value_name = "N|all",
        allow_negative_numbers = true
    )]
    pub lines: Option<Lines>,
    /// Only what was said since then: 90 (seconds), 10m, 2h or 1d ago, or at a local time: 2026-11-29 or "2026-11-29 16:44"
    #[arg(long, value_name = "TIME")]
    pub since: Option<Since>,
    /// Only messages of this level and above
    #[arg(long, value_enum)]
    pub level: Option<Level>,
    /// The bytes of the files as they are, control.log and then server.log
    #[arg(long, conflicts_with_all = ["lines", "since", "level", "json"])]
    pub raw: bool,
    /// Print a JSON object for each message, one a line
    #[arg(long)]
    pub json: bool,
}

/// How many messages are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// Every one.
    All,
    /// The last ones, so many of them.
    Last(u32),
}

impl FromStr for Lines {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "all" => Ok(Self::All),
            number => number
                .parse()
                .map(Self::Last)
                .map_err(|_| "it must be a whole number, or all"),
        }
    }
}
