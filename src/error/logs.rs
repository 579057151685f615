//! What goes wrong when somebody reads the logs of a daemon.

use std::path::PathBuf;

use super::list;
use crate::record::DaemonName;
use crate::shell::quote_path;

/// Why logs cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LogFailure {
    /// Something else stands in the place of a log.
    #[error("{path:?} is {found}, and no log")]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What stands there.
        found: &'static str,
    },
    /// The directory of a daemon's logs is gone.
    #[error("daemon {name} has no log directory {directory:?}")]
    NoDirectory {
        /// The daemon.
        name: DaemonName,
        /// Where it was.
        directory: PathBuf,
    },
    /// No daemon was named, and none is live.
    #[error("no recorded daemon is live")]
    NoneLive {
        /// The names under which there are logs.
        left: Vec<DaemonName>,
    },
}

impl LogFailure {
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::NotAFile { .. } => "not-a-log",
            Self::NoDirectory { .. } => "no-logs",
            Self::NoneLive { .. } => "no-live-daemon",
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        match self {
            Self::NotAFile { .. } | Self::NoDirectory { .. } => None,
            Self::NoneLive { left } if left.is_empty() => None,
            Self::NoneLive { left } => Some(format!("there are logs of {}", list(left))),
        }
    }

    pub(super) fn hint(&self) -> String {
        match self {
            Self::NotAFile { path, .. } => format!("ls -l {}", quote_path(path)),
            Self::NoDirectory { directory, .. } => {
                format!(
                    "ls -ld {}",
                    quote_path(directory.parent().unwrap_or(directory))
                )
            }
            Self::NoneLive { left } => match left.first() {
                Some(name) => format!("uni-cumps logs --name {name}"),
                None => "uni-cumps start".into(),
            },
        }
    }
}
