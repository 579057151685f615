//! The ways in which nvidia-smi fails.

use std::path::PathBuf;

use crate::shell::quote_path;

/// Why nvidia-smi gave no list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SmiFailure {
    /// It is not on PATH.
    #[error("nvidia-smi is not on PATH")]
    NotFound,
    /// It could not be executed.
    #[error("{program:?} cannot be executed: {reason}")]
    CannotRun {
        /// The path used.
        program: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// It hung.
    #[error("{program:?} timed out: no answer within {seconds} s")]
    TimedOut {
        /// The path used.
        program: PathBuf,
        /// The limit.
        seconds: u64,
    },
    /// A signal ended it.
    #[error("{program:?} was ended by signal {signal}")]
    Killed {
        /// The path used.
        program: PathBuf,
        /// The signal's number.
        signal: i32,
    },
    /// It exited with an error.
    #[error("{program:?} exited with status {status}: {said}")]
    Failed {
        /// The path used.
        program: PathBuf,
        /// Its exit status.
        status: i32,
        /// What it said, on either stream.
        said: String,
    },
    /// We were asked to end meanwhile.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
}

impl SmiFailure {
    pub(super) fn hint(&self) -> String {
        match self {
            Self::NotFound => {
                "install the NVIDIA driver's tools, or add the directory of nvidia-smi to PATH (WSL: /usr/lib/wsl/lib)"
                    .into()
            }
            Self::CannotRun { program, .. } => format!("ls -l {}", quote_path(program)),
            Self::TimedOut { .. } => {
                "the driver may be wedged: look at `dmesg | grep -i nvrm`; an administrator can reset the GPU or reboot"
                    .into()
            }
            Self::Killed { program, .. } => quote_path(program),
            Self::Failed { status, said, .. } => match status {
                _ if said.contains("version mismatch") => {
                    "the driver was updated under the running kernel module: reload the module or reboot".into()
                }
                9 => "load the driver: `sudo modprobe nvidia`, then try nvidia-smi".into(),
                12 => "install the driver library libnvidia-ml.so.1 of the driver's version".into(),
                4 => "ask an administrator for access to /dev/nvidia*".into(),
                15 => "a GPU has fallen off the bus: reboot the machine".into(),
                _ => "run `nvidia-smi` and mend what it reports".into(),
            },
            Self::Interrupted(_) => "run the command again".into(),
        }
    }
}
