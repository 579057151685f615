//! How a process came out of a command that changes its state.

use serde::{Deserialize, Serialize};

use super::ProcessState;

/// What is known of a process afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum After {
    /// It is in this state.
    State(ProcessState),
    /// It has ended.
    Gone,
    /// The driver does not say.
    Unknown,
}

impl After {
    /// In a word.
    pub fn word(self) -> String {
        match self {
            Self::State(state) => state.word(),
            Self::Gone => "gone".to_owned(),
            Self::Unknown => "unknown".to_owned(),
        }
    }

    /// Whether it is in this state.
    pub fn is(self, state: ProcessState) -> bool {
        self == Self::State(state)
    }
}

/// A process before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The process.
    pub pid: i32,
    /// Its state before anything was done.
    pub before: ProcessState,
    /// What is known of it now.
    pub after: After,
}

impl Ending {
    /// Whether it is as it was, and can stay so.
    pub fn is_well(&self) -> bool {
        let can_stay = [ProcessState::RUNNING, ProcessState::CHECKPOINTED].contains(&self.before);
        can_stay && self.after.is(self.before)
    }

    /// In a sentence.
    pub fn sentence(&self) -> String {
        let pid = self.pid;
        match self.after {
            After::State(state) if state == self.before => {
                format!("pid {pid} is {state} as before")
            }
            After::State(ProcessState::RUNNING) => format!("pid {pid} is running again"),
            After::State(state) => format!("pid {pid} is left {state}"),
            After::Gone => format!("pid {pid} has ended"),
            After::Unknown => format!("the driver does not say in which state pid {pid} is"),
        }
    }
}
