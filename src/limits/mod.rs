//! What a client of a daemon may use, as values: parsed strictly, since NVIDIA's programs take a wrong limit without a
//! word, and written as the one spelling that all their versions read the same.

mod daemon;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use daemon::{Change, DaemonLimits, MemorySetting, Misplaced, Served, Setting, Which, changes};

/// The share of a GPU's threads that a client may occupy, in percent: 1 to 100, at most three decimals. A cap and no
/// reservation. JSON holds it as a number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct ThreadPercentage(String);

/// An upper bound for a client's memory on each of its GPUs, in whole MiB. JSON holds it as `8192M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MemoryLimit {
    mebibytes: u64,
}

/// Whose work goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// Like any other program
    Normal,
    /// Behind programs of normal priority
    Low,
}

/// Why a text is not a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitError {
    /// Not a percentage.
    #[error("it must be a number from 1 to 100, such as 30 or 12.5")]
    Percentage,
    /// Not a size. NVIDIA reads `1.5G` and `1T` as 1 MiB, and `0G` as no limit.
    #[error(
        "it must be a whole number with M, MB or MiB for 1048576 bytes, or G, GB or GiB for 1024 times as much, such as 512M or 10GiB"
    )]
    Size,
    /// More than any GPU has; NVIDIA's number would wrap around.
    #[error("it is more than 1048576 GiB")]
    TooMuch,
    /// Neither of the two priorities.
    #[error("it must be normal or low")]
    Priority,
    /// What stands before a size is not one GPU.
    #[error("a GPU is named by nvidia-smi's index or by its UUID, as in 1=8G")]
    Gpu,
    /// Not a setting.
    #[error(
        "it must be threads=PCT, memory=SIZE, memory=GPU=SIZE or priority=normal|low; nothing behind the last = clears the limit"
    )]
    Setting,
}

/// What NVIDIA's parser holds without wrapping around, and more than any GPU has.
const MOST_MEBIBYTES: u64 = 1 << 30;

impl FromStr for ThreadPercentage {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str, longest| {
            (1..=longest).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
        };
        let value = (is_number(whole, 3) && is_number(decimals, 3))
            .then(|| text.parse::<f64>().ok())
            .flatten()
            .filter(|value| (1.0..=100.0).contains(value));
        value
            .map(|value| Self(value.to_string()))
            .ok_or(LimitError::Percentage)
    }
}

impl ThreadPercentage {
    /// No limit.
    const ALL: f64 = 100.0;

    /// The percentage as a number.
    pub fn value(&self) -> f64 {
        // It was a number when it was read.
        self.0.parse().unwrap_or(Self::ALL)
    }
}

impl TryFrom<f64> for ThreadPercentage {
    type Error = LimitError;

    fn try_from(value: f64) -> Result<Self, LimitError> {
        value.to_string().parse()
    }
}

impl From<ThreadPercentage> for f64 {
    fn from(percentage: ThreadPercentage) -> Self {
        percentage.value()
    }
}

impl fmt::Display for ThreadPercentage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for MemoryLimit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let end = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(end);
        let factor = match unit.to_ascii_lowercase().as_str() {
            "m" | "mb" | "mib" => 1,
            "g" | "gb" | "gib" => 1024,
            _ => return Err(LimitError::Size),
        };
        if number.trim_start_matches('0').is_empty() {
            return Err(LimitError::Size);
        }
        let mebibytes = number.parse::<u64>().ok();
        mebibytes
            .and_then(|number| number.checked_mul(factor))
            .filter(|mebibytes| *mebibytes <= MOST_MEBIBYTES)
            .map(|mebibytes| Self { mebibytes })
            .ok_or(LimitError::TooMuch)
    }
}

impl MemoryLimit {
    /// The limit in MiB.
    pub fn mebibytes(self) -> u64 {
        self.mebibytes
    }
}

impl TryFrom<String> for MemoryLimit {
    type Error = LimitError;

    fn try_from(text: String) -> Result<Self, LimitError> {
        text.parse()
    }
}

impl From<MemoryLimit> for String {
    fn from(limit: MemoryLimit) -> Self {
        limit.to_string()
    }
}

impl Priority {
    /// The priority as options and reports spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// The number that NVIDIA has for it.
    pub fn number(self) -> &'static str {
        match self {
            Self::Normal => "0",
            Self::Low => "1",
        }
    }
}

impl FromStr for Priority {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        [Self::Normal, Self::Low]
            .into_iter()
            .find(|priority| priority.as_str() == text)
            .ok_or(LimitError::Priority)
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}M", self.mebibytes)
    }
}

/// The limits of one client. What is not set is not limited by us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The share of the GPU's threads.
    pub threads: Option<ThreadPercentage>,
    /// The memory on each GPU.
    pub memory: Option<MemoryLimit>,
    /// Whose work goes first.
    pub priority: Option<Priority>,
}

impl Limits {
    /// The variables that CUDA reads in a client that sees this many GPUs. Its GPUs are numbered from 0 in the order of
    /// its `CUDA_VISIBLE_DEVICES`, and old drivers know them by that number only.
    pub fn client_environment(&self, gpus: usize) -> Vec<(&'static str, String)> {
        let threads = self.threads.as_ref().map(ToString::to_string);
        let memory = self.memory.map(|limit| {
            let each: Vec<String> = (0..gpus).map(|gpu| format!("{gpu}={limit}")).collect();
            each.join(",")
        });
        let priority = self.priority.map(|priority| priority.number().to_owned());
        LIMIT_VARIABLES
            .into_iter()
            .zip([threads, memory, priority])
            .filter_map(|(key, value)| Some((key, value?)))
            .collect()
    }
}

/// The variables by which CUDA limits a client: its threads, its memory, its priority.
pub const LIMIT_VARIABLES: [&str; 3] = [
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentage_is_a_number_from_1_to_100() {
        let read = |text: &str| text.parse::<ThreadPercentage>().map(|found| found.0);
        for (text, value) in [
            ("1", "1"),
            ("100", "100"),
            ("012", "12"),
            ("12.50", "12.5"),
            ("99.999", "99.999"),
            ("100.0", "100"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(value), "{text}");
        }
        for text in [
            "", "0", "0.9", "100.001", "101", "-1", "+5", "1e1", "nan", "inf", "30%", " 30", ".5",
            "5.", "1,5", "1.2.3", "٣",
        ] {
            assert_eq!(read(text), Err(LimitError::Percentage), "{text}");
        }
    }

    #[test]
    fn a_size_has_a_unit_and_is_written_in_whole_mebibytes() {
        let read = |text: &str| text.parse::<MemoryLimit>().map(|found| found.to_string());
        for (text, value) in [
            ("512M", "512M"),
            ("512mb", "512M"),
            ("512MiB", "512M"),
            ("10GiB", "10240M"),
            ("1g", "1024M"),
            ("08GB", "8192M"),
            ("1048576G", "1073741824M"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(value), "{text}");
        }
        for text in [
            "", "G", "0G", "000M", "1.5G", "1T", "100", "100K", "-1G", "+1G", "1 G", "1G ", "8Gi",
            "١G",
        ] {
            assert_eq!(read(text), Err(LimitError::Size), "{text}");
        }
        for text in [
            "1048577G",
            "1073741825M",
            "99999999999999999999G",
            "18014398509481984G",
        ] {
            assert_eq!(read(text), Err(LimitError::TooMuch), "{text}");
        }
    }

    #[test]
    fn a_client_is_told_its_limits_and_nothing_else() {
        let limits = Limits {
            threads: "30".parse().ok(),
            memory: "8G".parse().ok(),
            priority: Some(Priority::Low),
        };
        assert_eq!(
            limits.client_environment(2),
            [
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30".to_owned()),
                (
                    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
                    "0=8192M,1=8192M".to_owned()
                ),
                ("CUDA_MPS_CLIENT_PRIORITY", "1".to_owned()),
            ]
        );
        assert_eq!(Limits::default().client_environment(1), []);
    }
}
