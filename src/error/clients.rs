//! What keeps a client of a daemon from being ended safely.

use crate::record::DaemonName;

/// Why a client was not ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientFailure {
    /// There is no such process.
    #[error("no process with pid {0} runs")]
    NotRunning(i32),
    /// It is none that a daemon would have among its clients.
    #[error("pid {pid} is {what} of daemon {name}, and no client")]
    Ours {
        /// The process.
        pid: i32,
        /// The control process or a server.
        what: &'static str,
        /// The daemon.
        name: DaemonName,
    },
    /// No daemon that was asked counts it among its clients.
    #[error("pid {pid} was not found among the clients of {}", asked(name.as_ref()))]
    NoClient {
        /// The process.
        pid: i32,
        /// The daemon that was asked, if it was one.
        name: Option<DaemonName>,
        /// The process whose thread it is.
        thread_of: Option<i32>,
        /// The daemons that could not be asked, and why.
        unasked: Vec<(DaemonName, String)>,
    },
    /// It is not ours to signal.
    #[error("pid {pid} belongs to uid {uid}; you are uid {ours}, and nothing was done")]
    OtherUser {
        /// The process.
        pid: i32,
        /// Its owner.
        uid: u32,
        /// Our uid.
        ours: u32,
    },
    /// The daemon would not let go of it.
    #[error("daemon {name} did not let go of its client {pid}")]
    Refused {
        /// The daemon.
        name: DaemonName,
        /// The process.
        pid: i32,
        /// What the daemon answered, or why it did not.
        reason: String,
    },
    /// The daemon has said that it let go, and goes on listing it.
    #[error("daemon {name} still lists its client {pid} after {seconds} s")]
    StillListed {
        /// The daemon.
        name: DaemonName,
        /// The process.
        pid: i32,
        /// How long was waited.
        seconds: u64,
    },
    /// SIGTERM did not end it.
    #[error("pid {pid} still runs {seconds} s after SIGTERM")]
    StillRuns {
        /// The process.
        pid: i32,
        /// How long was waited.
        seconds: u64,
    },
}

fn asked(name: Option<&DaemonName>) -> String {
    name.map_or("any live daemon of yours".to_owned(), |name| {
        format!("daemon {name}")
    })
}

impl ClientFailure {
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::NotRunning(_) => "no-such-process",
            Self::Ours { .. } => "not-a-client",
            Self::NoClient { .. } => "not-a-client",
            Self::OtherUser { .. } => "other-users-process",
            Self::Refused { .. } => "terminate-refused",
            Self::StillListed { .. } => "still-a-client",
            Self::StillRuns { .. } => "client-still-running",
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        match self {
            Self::NotRunning(_) | Self::Ours { .. } => None,
            Self::NoClient {
                thread_of, unasked, ..
            } => {
                let thread = thread_of.map(|leader| format!("it is a thread of process {leader}"));
                let unasked = unasked
                    .iter()
                    .map(|(name, reason)| format!("daemon {name} could not be asked: {reason}"));
                let causes: Vec<String> = thread.into_iter().chain(unasked).collect();
                (!causes.is_empty()).then(|| causes.join("\n"))
            }
            Self::OtherUser { .. } => {
                Some("only your own processes are signalled, also by root".into())
            }
            Self::Refused { reason, .. } => Some(reason.clone()),
            Self::StillListed { .. } => {
                Some("it answered that it let go; nothing was signalled".into())
            }
            Self::StillRuns { .. } => Some("the daemon has let go of it before".into()),
        }
    }

    pub(super) fn hint(&self) -> String {
        match self {
            Self::NotRunning(_) => "uni-cumps clients".into(),
            Self::Ours { name, .. } => format!("uni-cumps stop --name {name}"),
            Self::NoClient {
                thread_of: Some(leader),
                ..
            } => format!("--terminate {leader}"),
            Self::NoClient { .. } => "uni-cumps clients lists them".into(),
            Self::OtherUser { .. } => {
                "without --signal the daemon lets go of it all the same".into()
            }
            Self::Refused { name, .. } => format!("uni-cumps clients --name {name}"),
            Self::StillListed { name, .. } => {
                format!("give it more time with --timeout, or see uni-cumps clients --name {name}")
            }
            Self::StillRuns { pid, .. } => {
                format!("as no client, it may be ended: kill -KILL {pid}")
            }
        }
    }
}
