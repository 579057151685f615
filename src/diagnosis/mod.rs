//! What `doctor` finds: facts are gathered once, and each check is a pure function of them with a stable id.

mod checks;
mod facts;
mod logs;

use serde_json::{Value, json};

pub use checks::run;
pub use facts::{Facts, Plan, Wanted, gather};
pub use logs::{Fault, control_faults, server_faults};

/// How a check turned out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, and may surprise.
    Warn,
    /// Does not work.
    Fail,
    /// Could not be looked at, or does not apply.
    Skip,
}

impl Status {
    /// The word that is printed.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skip => "skip",
        }
    }
}

/// One check's outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Its stable id.
    pub id: &'static str,
    /// How it turned out.
    pub status: Status,
    /// One line that says why.
    pub evidence: String,
    /// What to type.
    pub remedy: Option<String>,
}

impl Check {
    /// The check as `doctor --json` shows it.
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "status": self.status.word(),
            "evidence": self.evidence,
            "remedy": self.remedy,
        })
    }
}
