//! A daemon's limits: how they are asked for and set, and when they are believed.
//!
//! The daemon refuses with status 0, mostly without a word, and takes wrong values as others. So each limit that is set
//! is asked for afterwards and compared. A percentage is shown with one decimal, memory from 1 GiB on in whole GiB cut
//! off, and no memory limit as nothing at all. No device may be named by its UUID: up to 555 that would clear the limit
//! of device 0.

use std::time::Duration;

use super::control::{AskError, Control, unless_interrupted};
use super::log::LogMark;
use crate::error::{Error, LimitFailure};
use crate::limits::{Change, DaemonLimits, MemoryLimit, Priority};
use crate::runner::{Invocation, Mode};

/// How long the daemon may take for an answer. It takes milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Whose limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those with which the next server starts.
    Default,
    /// Those of the running server of this pid, for programs that connect from now on.
    Server(i32),
}

/// One limit, by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Threads,
    /// On the device of this number.
    Memory(usize),
    Priority,
}

/// The limits that a daemon or a server has.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundLimits {
    /// In percent. `None` where it gave no number.
    pub threads: Option<f64>,
    /// On each device, as NVIDIA shows it: `8G`, `512M`; `None` where there is no limit.
    pub memory: Vec<Option<String>>,
    /// Only a daemon has one.
    pub priority: Option<Priority>,
}

/// What a running server says of its limits.
#[derive(Clone, Debug, PartialEq)]
pub enum ServerLimits {
    /// It has these.
    Found(FoundLimits),
    /// It is still starting, or broken, and says nothing.
    NotReady,
    /// It is gone by now.
    Gone,
}

impl FoundLimits {
    /// The same as if they had been set for these devices, as far as NVIDIA shows them.
    pub fn as_set(&self, devices: &[String]) -> DaemonLimits {
        let threads = self.threads.filter(|threads| *threads < 100.0);
        let memory = devices.iter().zip(&self.memory);
        let memory = memory.filter_map(|(device, limit)| {
            let limit = limit.as_ref()?.parse().ok()?;
            Some((device.clone(), limit))
        });
        DaemonLimits {
            threads: threads.and_then(|threads| threads.try_into().ok()),
            memory: memory.collect(),
            priority: self.priority.filter(|it| *it != Priority::Normal),
        }
    }
}

impl Limit {
    fn of(change: &Change) -> Self {
        match change {
            Change::Threads(_) => Self::Threads,
            Change::Memory { ordinal, .. } => Self::Memory(*ordinal),
            Change::Priority(_) => Self::Priority,
        }
    }

    /// The words behind `get_` or `set_`. No server has a priority that could be asked for.
    fn words(self, scope: Scope) -> String {
        match (self, scope) {
            (Self::Threads, Scope::Default) => "default_active_thread_percentage".into(),
            (Self::Threads, Scope::Server(pid)) => format!("active_thread_percentage {pid}"),
            (Self::Memory(device), Scope::Default) => {
                format!("default_device_pinned_mem_limit {device}")
            }
            (Self::Memory(device), Scope::Server(pid)) => {
                format!("device_pinned_mem_limit {pid} {device}")
            }
            (Self::Priority, _) => "default_client_priority".into(),
        }
    }

    fn question(self, scope: Scope) -> String {
        format!("get_{}", self.words(scope))
    }

    /// The value in an answer, which is its last line unless that is a message.
    fn value(self, answer: &str) -> Option<&str> {
        let line = answer.lines().last()?.trim();
        let is_value = match self {
            Self::Threads => line.parse::<f64>().is_ok_and(f64::is_finite),
            Self::Priority => line == "0" || line == "1",
            Self::Memory(_) => line
                .strip_suffix(['G', 'M'])
                .is_some_and(|number| number.parse::<u64>().is_ok()),
        };
        is_value.then_some(line)
    }

    /// What an answer says beside values.
    fn messages(self, answer: &str) -> Vec<&str> {
        let lines = answer.lines().filter(|line| !line.trim().is_empty());
        lines.filter(|line| self.value(line).is_none()).collect()
    }

    /// A value in words.
    fn shown(self, value: Option<&str>) -> String {
        match (self, value) {
            (Self::Threads, Some(value)) => format!("threads={value}"),
            (Self::Memory(_), Some(value)) => format!("a memory limit of {value}"),
            (Self::Memory(_), None) => "no memory limit".to_owned(),
            (Self::Priority, Some("1")) => "priority=low".to_owned(),
            (Self::Priority, Some(_)) => "priority=normal".to_owned(),
            (Self::Threads | Self::Priority, None) => "told nothing".to_owned(),
        }
    }
}

/// What sets a limit and reads it back.
fn script(change: &Change, scope: Scope) -> String {
    let value = match change {
        Change::Threads(Some(percentage)) => percentage.to_string(),
        Change::Threads(None) => "100".to_owned(),
        Change::Memory {
            limit: Some(limit), ..
        } => limit.to_string(),
        Change::Memory { limit: None, .. } => "0M".to_owned(),
        Change::Priority(priority) => priority.unwrap_or(Priority::Normal).number().to_owned(),
    };
    let limit = Limit::of(change);
    let words = limit.words(scope);
    format!("set_{words} {value}\n{}", limit.question(scope))
}

/// Whether the daemon shows a limit as it was asked for.
fn is_in_force(change: &Change, answer: &str) -> bool {
    let limit = Limit::of(change);
    let value = limit.value(answer);
    match change {
        Change::Threads(asked) => {
            let asked = asked.as_ref().map_or(100.0, |asked| asked.value());
            let found = value.and_then(|value| value.parse::<f64>().ok());
            // One decimal is shown, and the daemon rounds as C does.
            found.is_some_and(|found| (found - asked).abs() < 0.06)
        }
        // No limit is shown as nothing, and a refusal is no nothing.
        Change::Memory { limit: None, .. } => value.is_none() && limit.messages(answer).is_empty(),
        Change::Memory {
            limit: Some(limit), ..
        } => value.is_some_and(|value| is_shown_as(*limit, value)),
        Change::Priority(asked) => value == Some(asked.unwrap_or(Priority::Normal).number()),
    }
}

/// Whether a memory limit is shown in this way. From 1 GiB on the rest is cut off.
fn is_shown_as(limit: MemoryLimit, value: &str) -> bool {
    let mebibytes = limit.mebibytes();
    value == format!("{mebibytes}M")
        || (mebibytes >= 1024 && value == format!("{}G", mebibytes / 1024))
}

impl Control<'_> {
    /// The limits that the daemon's next server starts with, on this many devices.
    pub fn default_limits(&self, devices: usize) -> Result<FoundLimits, AskError> {
        let threads = self.limit(Limit::Threads, Scope::Default)?;
        let priority = self.limit(Limit::Priority, Scope::Default)?;
        Ok(FoundLimits {
            threads: threads.and_then(|value| value.parse().ok()),
            memory: self.memory_limits(Scope::Default, devices)?,
            priority: priority.map(|value| match value.as_str() {
                "1" => Priority::Low,
                _ => Priority::Normal,
            }),
        })
    }

    /// The limits of a running server.
    pub fn server_limits(&self, server: i32, devices: usize) -> Result<ServerLimits, AskError> {
        let scope = Scope::Server(server);
        let answer = self.ask(&Limit::Threads.question(scope), ANSWER_LIMIT)?;
        let Some(threads) = Limit::Threads.value(&answer) else {
            return Ok(match answer.contains("not found") {
                true => ServerLimits::Gone,
                false => ServerLimits::NotReady,
            });
        };
        Ok(ServerLimits::Found(FoundLimits {
            threads: threads.parse().ok(),
            memory: self.memory_limits(scope, devices)?,
            priority: None,
        }))
    }

    /// The most of the GPU's threads that clients of one server may occupy, in percent. A server that is not ready has
    /// none.
    pub fn server_threads(&self, server: i32) -> Result<Option<f64>, AskError> {
        let threads = self.limit(Limit::Threads, Scope::Server(server))?;
        Ok(threads.and_then(|value| value.parse().ok()))
    }

    fn memory_limits(&self, scope: Scope, devices: usize) -> Result<Vec<Option<String>>, AskError> {
        (0..devices)
            .map(|device| self.limit(Limit::Memory(device), scope))
            .collect()
    }

    fn limit(&self, limit: Limit, scope: Scope) -> Result<Option<String>, AskError> {
        let answer = self.ask(&limit.question(scope), ANSWER_LIMIT)?;
        Ok(limit.value(&answer).map(str::to_owned))
    }

    /// Sets a limit, asks for it and compares. A server has no priority of its own.
    pub fn change(&self, change: &Change, scope: Scope) -> Result<(), Error> {
        let log = LogMark::set(self.host, &self.log);
        let asked = match scope {
            Scope::Default => change.to_string(),
            Scope::Server(pid) => format!("{change} for server {pid}"),
        };
        let not_confirmed = |cause: String| LimitFailure::NotConfirmed {
            asked,
            cause,
            log: log.new_lines(),
            log_directory: self.log.clone(),
        };
        let answered = self.ask(&script(change, scope), ANSWER_LIMIT);
        let answer = match unless_interrupted(answered)? {
            Ok(answer) => answer,
            Err(reason) => return Err(not_confirmed(reason).into()),
        };
        let limit = Limit::of(change);
        if is_in_force(change, &answer) {
            return Ok(());
        }
        let value = limit.value(&answer);
        let messages = limit.messages(&answer);
        let found = limit.shown(value);
        Err(not_confirmed(match messages.is_empty() {
            true => format!("it has {found}"),
            false => format!("it has {found}, and said: {}", messages.join("; ")),
        })
        .into())
    }

    /// The call that sets a limit and reads it back.
    pub fn call_of_a_change(&self, change: &Change) -> Invocation {
        self.call_of(
            &script(change, Scope::Default),
            Mode::Captured(ANSWER_LIMIT),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(limit: &str) -> Change {
        Change::Memory {
            ordinal: 1,
            gpu: "GPU-0".to_owned(),
            limit: limit.parse().ok(),
        }
    }

    fn threads(percentage: &str) -> Change {
        Change::Threads(percentage.parse().ok())
    }

    #[test]
    fn devices_are_numbered_and_memory_is_sent_in_whole_mebibytes() {
        for (change, scope, text) in [
            (
                threads("12.5"),
                Scope::Default,
                "set_default_active_thread_percentage 12.5\nget_default_active_thread_percentage",
            ),
            (
                threads(""),
                Scope::Server(7),
                "set_active_thread_percentage 7 100\nget_active_thread_percentage 7",
            ),
            (
                memory("8G"),
                Scope::Default,
                "set_default_device_pinned_mem_limit 1 8192M\nget_default_device_pinned_mem_limit 1",
            ),
            (
                memory(""),
                Scope::Server(7),
                "set_device_pinned_mem_limit 7 1 0M\nget_device_pinned_mem_limit 7 1",
            ),
            (
                Change::Priority(Some(Priority::Low)),
                Scope::Default,
                "set_default_client_priority 1\nget_default_client_priority",
            ),
            (
                Change::Priority(None),
                Scope::Default,
                "set_default_client_priority 0\nget_default_client_priority",
            ),
        ] {
            assert_eq!(script(&change, scope), text);
        }
    }

    #[test]
    fn a_percentage_is_a_number_on_the_last_line() {
        let value = |answer| Limit::Threads.value(answer);
        assert_eq!(value("30.0"), Some("30.0"));
        assert_eq!(value("a remark\n30.0\n"), Some("30.0"));
        for answer in ["", "nan", "inf", "Server 12 not found", "30.0\na remark"] {
            assert_eq!(value(answer), None, "{answer}");
        }
    }

    #[test]
    fn a_limit_is_in_force_when_it_is_shown_as_nvidia_shows_it() {
        let holds = |change: Change, answer: &str| is_in_force(&change, answer);
        // What drivers 535, 550 and 555 answer.
        assert!(holds(threads("30"), "30.0\n30.0"));
        assert!(holds(threads("12.35"), "12.3\n12.3"));
        assert!(holds(threads("12.25"), "12.2\n12.2"));
        assert!(holds(threads("99.96"), "100.0\n100.0"));
        assert!(holds(threads(""), "100.0\n100.0"));
        assert!(holds(memory("8G"), "8G"));
        assert!(holds(memory("1536M"), "1G"));
        assert!(holds(memory("512M"), "512M"));
        assert!(holds(memory(""), ""));
        assert!(holds(Change::Priority(Some(Priority::Low)), "1"));
        assert!(holds(Change::Priority(None), "0"));
        // Refusals, and values that were taken as others.
        assert!(!holds(threads("30"), "100.0\n100.0"));
        assert!(!holds(threads("30"), "30.0\nUnknown command \"get\""));
        assert!(!holds(threads("30"), ""));
        assert!(!holds(threads(""), ""));
        assert!(!holds(threads(""), "nan\nnan"));
        assert!(!holds(memory("8G"), ""));
        assert!(!holds(memory("8G"), "8M"));
        assert!(!holds(memory("8G"), "1M"));
        assert!(!holds(memory("512M"), "0G"));
        assert!(!holds(memory(""), "8G"));
        assert!(!holds(memory(""), "Insufficient privileges for UID 1002"));
        assert!(!holds(memory(""), "Unknown command \"get\""));
        assert!(!holds(memory("8G"), "Insufficient privileges for UID 1002"));
        assert!(!holds(Change::Priority(Some(Priority::Low)), "0"));
        assert!(!holds(Change::Priority(None), ""));
    }
}
