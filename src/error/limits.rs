//! What goes wrong with the limits of a daemon.

use std::path::PathBuf;

use super::{list, with_log};
use crate::limits::Misplaced;
use crate::record::DaemonName;
use crate::shell::quote_path;

/// Why a daemon's limits are not as they were asked for, or are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitFailure {
    /// A limit names a GPU that is not the daemon's. NVIDIA's programs would drop all limits without a word.
    #[error("the daemon does not serve GPU {gpu}, so it can have no limit there")]
    NotServed {
        /// The GPU as typed.
        gpu: String,
        /// The UUIDs of those that are served.
        served: Vec<String>,
    },
    /// The same limit is set twice.
    #[error("{0} is set twice")]
    Twice(String),
    /// The daemon shows another limit than the one asked for.
    #[error("the daemon did not confirm {asked}")]
    NotConfirmed {
        /// The setting.
        asked: String,
        /// What it has instead, or why that is not known.
        cause: String,
        /// New lines of control.log.
        log: Option<String>,
        /// The log directory.
        log_directory: PathBuf,
    },
    /// A server is not ready, so what it has is not known.
    #[error("server {server} of daemon {name} does not tell its limits")]
    ServerNotReady {
        /// The daemon.
        name: DaemonName,
        /// The server's pid.
        server: i32,
    },
    /// The daemon's process is stopped.
    #[error("the daemon {name} (pid {pid}) is stopped and does not answer")]
    Stopped {
        /// The daemon.
        name: DaemonName,
        /// Its pid.
        pid: i32,
    },
}

impl LimitFailure {
    /// A daemon that serves these devices cannot take what was asked for.
    pub fn of(misplaced: Misplaced, served: Vec<String>) -> Self {
        match misplaced {
            Misplaced::Twice(what) => Self::Twice(what),
            Misplaced::NotServed(gpu) => Self::NotServed { gpu, served },
        }
    }

    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::NotServed { .. } => "limit-gpu-not-served",
            Self::Twice(_) => "limit-twice",
            Self::NotConfirmed { .. } => "limit-not-confirmed",
            Self::ServerNotReady { .. } => "server-not-ready",
            Self::Stopped { .. } => "not-answering",
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        match self {
            Self::NotServed { served, .. } => Some(format!("it serves {}", list(served))),
            Self::Twice(_) | Self::Stopped { .. } => None,
            Self::NotConfirmed { cause, log, .. } => Some(with_log(cause, log.as_ref())),
            Self::ServerNotReady { .. } => Some("it is still starting, or has failed; servers that start from now on have the limits".to_owned()),
        }
    }

    pub(super) fn hint(&self) -> String {
        match self {
            Self::NotServed { served, .. } => match served.first() {
                Some(gpu) => format!("name one that it serves, such as {gpu}"),
                None => "uni-cumps status".into(),
            },
            Self::Twice(_) => {
                "set each limit once; memory=SIZE is for all GPUs that are not named".into()
            }
            Self::NotConfirmed { log_directory, .. } => {
                format!("tail {}", quote_path(&log_directory.join("control.log")))
            }
            Self::ServerNotReady { name, .. } => {
                format!("wait and ask again: uni-cumps limits --name {name}")
            }
            Self::Stopped { pid, .. } => format!("let it go on: kill -CONT {pid}"),
        }
    }
}
