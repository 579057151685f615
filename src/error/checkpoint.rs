//! What goes wrong with the checkpoint and the restore of processes.

use crate::checkpoint::{Action, After, Blocker, Ending, MapError, ProcessState};

/// Why processes were not suspended, resumed or asked about.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CheckpointFailure {
    /// Something stands in the way, and nothing was touched.
    #[error("cannot {doing}: {}", first(blockers))]
    Blocked {
        /// The command.
        doing: &'static str,
        /// All that was found; at least one.
        blockers: Vec<Blocker>,
    },
    /// A step failed, and what had been done was undone.
    #[error("could not {doing}: the {} of pid {pid} failed", action.word())]
    Step {
        /// The command.
        doing: &'static str,
        /// The process.
        pid: i32,
        /// The step.
        action: Action,
        /// What the driver said.
        reason: String,
        /// Its number for that.
        code: Option<u32>,
        /// How every process came out.
        endings: Vec<Ending>,
    },
    /// The driver would not restore on other GPUs, and the processes run where they were.
    #[error("pid {pid} cannot be restored on other GPUs")]
    NotMoved {
        /// The process that the driver refused.
        pid: i32,
        /// What the driver said.
        reason: String,
        /// How every process came out.
        endings: Vec<Ending>,
    },
    /// A signal asked us to end, and what had been done was undone.
    #[error("interrupted by signal {signal}, could not {doing}")]
    Interrupted {
        /// The command.
        doing: &'static str,
        /// The signal's number.
        signal: i32,
        /// How every process came out.
        endings: Vec<Ending>,
    },
    /// The driver did not say which thread restores a process.
    #[error("the driver does not tell the restore thread of pid {pid}")]
    NoThread {
        /// The process.
        pid: i32,
        /// What it said instead.
        reason: String,
    },
    /// The pairs of GPUs make no map.
    #[error("{0}")]
    Map(#[from] MapError),
    /// No process was named, and none is suspended.
    #[error("no process of yours is suspended here")]
    NoneSuspended,
    /// No process was named, and several are suspended.
    #[error("several processes are suspended: {}", pids(pids_suspended))]
    SeveralSuspended {
        /// They.
        pids_suspended: Vec<i32>,
    },
}

fn first(blockers: &[Blocker]) -> &str {
    blockers.first().map_or("", |blocker| &blocker.what)
}

fn pids(pids: &[i32]) -> String {
    let words: Vec<String> = pids.iter().map(ToString::to_string).collect();
    words.join(", ")
}

impl CheckpointFailure {
    /// The processes that are not as they were, or that cannot stay as they are.
    pub fn left(&self) -> impl Iterator<Item = &Ending> {
        self.endings().iter().filter(|ending| !ending.is_well())
    }

    /// How the processes came out, where they were touched.
    pub fn endings(&self) -> &[Ending] {
        match self {
            Self::Step { endings, .. }
            | Self::NotMoved { endings, .. }
            | Self::Interrupted { endings, .. } => endings,
            _ => &[],
        }
    }

    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Blocked { blockers, .. } => {
                blockers.first().map_or("blocked", |blocker| blocker.id)
            }
            Self::Step { .. } => "checkpoint-failed",
            Self::NotMoved { .. } => "gpu-map-refused",
            Self::Interrupted { .. } => "interrupted",
            Self::NoThread { .. } => "no-answer",
            Self::Map(_) => "gpu-map",
            Self::NoneSuspended => "none-suspended",
            Self::SeveralSuspended { .. } => "several-suspended",
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        let sentences = || self.endings().iter().map(Ending::sentence);
        match self {
            Self::Blocked { blockers, .. } => {
                let others: Vec<&str> = blockers
                    .iter()
                    .skip(1)
                    .map(|blocker| blocker.what.as_str())
                    .collect();
                (!others.is_empty()).then(|| format!("besides: {}", others.join("; ")))
            }
            Self::Step { reason, .. } | Self::NotMoved { reason, .. } => {
                let all: Vec<String> = std::iter::once(reason.clone()).chain(sentences()).collect();
                Some(all.join("; "))
            }
            Self::Interrupted { .. } => {
                let all: Vec<String> = sentences().collect();
                (!all.is_empty()).then(|| all.join("; "))
            }
            Self::NoThread { reason, .. } => Some(reason.clone()),
            Self::Map(_) => None,
            Self::NoneSuspended | Self::SeveralSuspended { .. } => None,
        }
    }

    pub(super) fn hint(&self) -> String {
        if let Some(hint) = self.left().find_map(hint_for) {
            return hint;
        }
        match self {
            Self::Blocked { blockers, .. } => blockers.first().map_or_else(String::new, |blocker| blocker.remedy.clone()),
            Self::Step { pid, code, action, .. } => match (code, action) {
                (Some(600), _) => "its GPU work takes longer than that: give --timeout more seconds".into(),
                (Some(2 | 304), Action::Restore) => {
                    format!("once a restore has lacked memory, the driver may refuse every further one of pid {pid}: free memory and try once more, or end it")
                }
                (Some(304 | 800), _) => {
                    "the driver needs a debugger's rights: root's, or those of /proc/sys/kernel/yama/ptrace_scope".into()
                }
                _ => format!("uni-cumps checkpoint check --pid {pid}"),
            },
            Self::NotMoved { .. } => "the GPUs must be of one model; some drivers refuse all the same".into(),
            Self::Interrupted { .. } => "what had been done was undone".into(),
            Self::NoThread { pid, .. } => format!("uni-cumps checkpoint check --pid {pid}"),
            Self::Map(MapError::Unnamed) => "nvidia-smi -L; without a map it comes back where it was".into(),
            Self::Map(MapError::NoSuchGpu(_)) => "nvidia-smi -L".into(),
            Self::Map(_) => "--gpu-map 0=1, each GPU once on each side".into(),
            Self::NoneSuspended => "uni-cumps checkpoint suspend --pid PID".into(),
            Self::SeveralSuspended { pids_suspended } => match pids_suspended.first() {
                Some(pid) => format!("--pid {pid}, or --all"),
                None => "--all".into(),
            },
        }
    }
}

/// What helps a process that was left in another state.
fn hint_for(left: &Ending) -> Option<String> {
    let pid = left.pid;
    match left.after {
        After::State(ProcessState::LOCKED) => {
            Some(format!("uni-cumps checkpoint unlock --pid {pid}"))
        }
        After::State(ProcessState::CHECKPOINTED) => {
            Some(format!("uni-cumps checkpoint resume --pid {pid}"))
        }
        After::State(ProcessState::RUNNING) => None,
        After::Gone => Some(format!("pid {pid} has ended: leave it out, and try again")),
        After::State(ProcessState::FAILED) => Some(format!(
            "pid {pid} cannot compute any more and can only be ended: kill {pid}"
        )),
        After::State(_) | After::Unknown => Some(format!("uni-cumps checkpoint state --pid {pid}")),
    }
}
