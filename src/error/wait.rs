//! A wait that came to nothing.

/// A daemon did not become what was waited for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("waited {seconds} s in vain for {what}")]
pub struct InVain {
    /// What was waited for, as in `daemon a to be ready`.
    pub what: String,
    /// How long.
    pub seconds: u64,
    /// The last state that was seen.
    pub seen: String,
    /// What to type.
    pub remedy: String,
}
