//! The checkpoint of a CUDA process as values: its states, the calls that change them, and which GPU takes the place of
//! which. Pure.
//!
//! ```text
//!            lock                  checkpoint
//!  running ────────▶ locked ─────────────────────▶ checkpointed       failed: no way out
//!     ▲                │  ▲                              │
//!     └─── unlock ─────┘  └────────── restore ───────────┘
//! ```

mod blockers;
mod ending;
mod gpu_map;
mod suspended;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use blockers::{
    Blocker, Clientship, CudaState, DriverFacts, GpuCondition, Halt, Machine, Purpose, Subject,
    Verdict, judge,
};
pub use ending::{After, Ending};
pub use gpu_map::{GpuMap, GpuName, GpuPair, MapError, NameError, NamedPair, WholeUuid};
pub use suspended::{Share, Suspended, gpu_list, memory_of, memory_text};

/// `CUprocessState`, the number as the driver gives it: a newer driver may have states that we do not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessState(pub u32);

impl ProcessState {
    /// It computes.
    pub const RUNNING: Self = Self(0);
    /// Its CUDA calls wait.
    pub const LOCKED: Self = Self(1);
    /// Its GPU memory is in host memory, and its GPUs are free of it.
    pub const CHECKPOINTED: Self = Self(2);
    /// A checkpoint or a restore failed beyond repair.
    pub const FAILED: Self = Self(3);
    /// On its way to storage of the caller's own, since 13.4.
    pub const CHECKPOINTING: Self = Self(4);
    /// On its way back from there.
    pub const RESTORING: Self = Self(5);

    /// The state in a word, as `cuda.h` of 13.4 names it.
    pub fn word(self) -> String {
        let known = match self.0 {
            0 => "running",
            1 => "locked",
            2 => "checkpointed",
            3 => "failed",
            4 => "checkpointing",
            5 => "restoring",
            other => return format!("unknown-{other}"),
        };
        known.to_owned()
    }
}

impl fmt::Display for ProcessState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word())
    }
}

/// What a driver must support, and the first branch of drivers that does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since {
    /// The CUDA version: 12080 for 12.8.
    pub cuda: i32,
    /// The branch.
    pub branch: u16,
}

impl Since {
    /// The checkpoint calls.
    pub const CHECKPOINT: Self = Self {
        cuda: 12080,
        branch: 570,
    };
    /// Their restore on other GPUs. An older driver takes the pairs for reserved bytes that are not zero.
    pub const REMAP: Self = Self {
        cuda: 13000,
        branch: 580,
    };

    /// The complaint about a driver that supports only the version `has`.
    pub fn lacking(self, has: i32) -> String {
        let (has, needs) = (version_text(has), version_text(self.cuda));
        format!(
            "driver too old: has {has}, needs {needs} (r{})",
            self.branch
        )
    }
}

/// `12.4` for 12040, as `cuDriverGetVersion` counts.
pub fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// What changes a process's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Waits for the work in progress, and holds back what comes.
    Lock,
    /// Moves the GPU memory into host memory and leaves the GPUs.
    Checkpoint,
    /// Moves it back.
    Restore,
    /// Lets the process go on.
    Unlock,
}

impl Action {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Unlock => "unlock",
        }
    }

    /// The state that it needs.
    pub fn from(self) -> ProcessState {
        match self {
            Self::Lock => ProcessState::RUNNING,
            Self::Checkpoint | Self::Unlock => ProcessState::LOCKED,
            Self::Restore => ProcessState::CHECKPOINTED,
        }
    }

    /// The state that it brings about.
    pub fn to(self) -> ProcessState {
        match self {
            Self::Unlock => ProcessState::RUNNING,
            Self::Lock | Self::Restore => ProcessState::LOCKED,
            Self::Checkpoint => ProcessState::CHECKPOINTED,
        }
    }
}

/// One call of the driver about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Which CUDA version the driver supports, 12080 for 12.8. About no process.
    Version,
    /// In which state the process is.
    State,
    /// Which of its threads carries out checkpoint and restore. A process without CUDA has none.
    RestoreThread,
    /// `Action::Lock`, which is given up after this time. 0 would be never.
    Lock {
        /// Milliseconds.
        timeout_ms: u32,
    },
    /// `Action::Checkpoint`.
    Checkpoint,
    /// Whether CUDA can be initialised, which a restore needs. About no process.
    Init,
    /// `Action::Restore`, if need be on other GPUs.
    Restore(Option<GpuMap>),
    /// `Action::Unlock`.
    Unlock,
}

impl Call {
    /// Its word on the command line of the child that makes it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::State => "state",
            Self::RestoreThread => "restore-thread",
            Self::Lock { .. } => Action::Lock.word(),
            Self::Checkpoint => Action::Checkpoint.word(),
            Self::Init => "init",
            Self::Restore(_) => Action::Restore.word(),
            Self::Unlock => Action::Unlock.word(),
        }
    }

    /// Whether it initialises CUDA in the process that makes it.
    pub fn initialises(&self) -> bool {
        matches!(self, Self::Init | Self::Restore(_))
    }

    /// Whether it changes the process's state.
    pub fn acts(&self) -> bool {
        match self {
            Self::Version | Self::State | Self::RestoreThread | Self::Init => false,
            Self::Lock { .. } | Self::Checkpoint | Self::Restore(_) | Self::Unlock => true,
        }
    }

    /// Its options there.
    pub fn options(&self) -> Vec<String> {
        match self {
            Self::Lock { timeout_ms } => vec![format!("--timeout-ms={timeout_ms}")],
            Self::Restore(map) => {
                let pairs = map.iter().flat_map(GpuMap::pairs);
                pairs.map(|pair| format!("--pair={pair}")).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// What the driver's calls of one command may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long all locks together may wait for work in progress.
    pub lock: Duration,
    /// After this time any other call is taken to hang.
    pub deadline: Duration,
}
