//! The limits of a daemon: what may be asked for, what that means for the GPUs of one daemon, and what has been set.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{LimitError, MemoryLimit, Priority, ThreadPercentage};
use crate::gpu::{GpuIdentity, GpuUuid, MigUuid, Selector, SelectorItem};

/// For which of a daemon's GPUs a memory limit is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All that are not named otherwise.
    Every,
    /// This one.
    One(SelectorItem),
}

/// A memory limit as `start --memory` takes it: `SIZE` or `GPU=SIZE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySetting {
    /// For which GPUs.
    pub gpus: Which,
    /// How much.
    pub limit: MemoryLimit,
}

/// One limit as `limits --set` takes it. `None` clears it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// `threads=30`.
    Threads(Option<ThreadPercentage>),
    /// `memory=8G` or `memory=1=8G`.
    Memory(Which, Option<MemoryLimit>),
    /// `priority=low`.
    Priority(Option<Priority>),
}

/// What stands before the size, and the size.
fn memory(text: &str) -> Result<(Which, &str), LimitError> {
    let Some((gpu, size)) = text.split_once('=') else {
        return Ok((Which::Every, text));
    };
    match gpu.parse() {
        Ok(Selector::List(mut items)) if items.len() == 1 && !gpu.contains(',') => {
            let item = items.pop().ok_or(LimitError::Gpu)?;
            Ok((Which::One(item), size))
        }
        _ => Err(LimitError::Gpu),
    }
}

impl FromStr for MemorySetting {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let (gpus, size) = memory(text)?;
        Ok(Self {
            gpus,
            limit: size.parse()?,
        })
    }
}

/// A value, or `None` where there is nothing.
fn filled<T: FromStr>(text: &str) -> Result<Option<T>, T::Err> {
    match text {
        "" => Ok(None),
        text => text.parse().map(Some),
    }
}

impl FromStr for Setting {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        match text.split_once('=') {
            Some(("threads", value)) => Ok(Self::Threads(filled(value)?)),
            Some(("memory", value)) => {
                let (gpus, size) = memory(value)?;
                Ok(Self::Memory(gpus, filled(size)?))
            }
            Some(("priority", value)) => Ok(Self::Priority(filled(value)?)),
            _ => Err(LimitError::Setting),
        }
    }
}

/// What a daemon serves, in the order of its `CUDA_VISIBLE_DEVICES`, which is how it numbers its devices.
#[derive(Clone, Debug)]
pub struct Served {
    /// The GPUs.
    pub gpus: Vec<GpuUuid>,
    /// The MIG instance, a part of the only GPU.
    pub mig: Option<MigUuid>,
}

impl Served {
    /// The UUIDs of its devices, in their order.
    pub fn devices(&self) -> Vec<String> {
        match &self.mig {
            Some(mig) => vec![mig.to_string()],
            None => self.gpus.iter().map(ToString::to_string).collect(),
        }
    }

    /// The daemon's own number for a device; `None` if it does not serve it. What an index means says `numbering`.
    pub fn ordinal(&self, item: &SelectorItem, numbering: &[GpuIdentity]) -> Option<usize> {
        let gpu = match item {
            SelectorItem::Mig(mig, _) => return (self.mig.as_ref() == Some(mig)).then_some(0),
            SelectorItem::Uuid(uuid, _) => uuid,
            SelectorItem::Index(index, _) => {
                let mut numbered = numbering.iter();
                &numbered.find(|gpu| gpu.index == *index)?.uuid
            }
        };
        self.gpus.iter().position(|served| served == gpu)
    }
}

/// A limit of one daemon that is to be set. `None` clears it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The share of each GPU's threads.
    Threads(Option<ThreadPercentage>),
    /// The memory on one GPU.
    Memory {
        /// The daemon's own number for it.
        ordinal: usize,
        /// Its UUID.
        gpu: String,
        /// How much.
        limit: Option<MemoryLimit>,
    },
    /// Whose work goes first.
    Priority(Option<Priority>),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn text<T: ToString>(value: Option<T>) -> String {
            value.map(|value| value.to_string()).unwrap_or_default()
        }
        match self {
            Self::Threads(value) => write!(f, "threads={}", text(value.as_ref())),
            Self::Memory { gpu, limit, .. } => write!(f, "memory={gpu}={}", text(limit.as_ref())),
            Self::Priority(value) => {
                write!(f, "priority={}", text(value.map(Priority::as_str)))
            }
        }
    }
}

/// Why settings are no limits of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misplaced {
    /// The same limit is set twice.
    Twice(String),
    /// It names a GPU that the daemon does not serve.
    NotServed(String),
}

impl Setting {
    /// Whether it names no GPU, or one that the daemon serves.
    pub fn concerns(&self, served: &Served, numbering: &[GpuIdentity]) -> bool {
        match self {
            Self::Memory(Which::One(item), _) => served.ordinal(item, numbering).is_some(),
            Self::Threads(_) | Self::Memory(Which::Every, _) | Self::Priority(_) => true,
        }
    }

    /// Whether nvidia-smi must say which GPU it names.
    pub fn names_an_index(&self) -> bool {
        matches!(self, Self::Memory(Which::One(SelectorItem::Index(..)), _))
    }
}

/// Puts a value where none may be yet.
fn once<T>(place: &mut Option<T>, value: T, what: &str) -> Result<(), Misplaced> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(Misplaced::Twice(what.to_owned())),
    }
}

/// What settings mean for one daemon. A GPU's own limit goes before that for all.
pub fn changes(
    settings: &[Setting],
    served: &Served,
    numbering: &[GpuIdentity],
) -> Result<Vec<Change>, Misplaced> {
    let devices = served.devices();
    let (mut threads, mut priority, mut every) = (None, None, None);
    let mut own = vec![None; devices.len()];
    for setting in settings {
        match setting {
            Setting::Threads(value) => once(&mut threads, value.clone(), "threads")?,
            Setting::Priority(value) => once(&mut priority, *value, "priority")?,
            Setting::Memory(Which::Every, limit) => once(&mut every, *limit, "memory")?,
            Setting::Memory(Which::One(item), limit) => {
                let ordinal = served.ordinal(item, numbering);
                let place = ordinal.and_then(|ordinal| own.get_mut(ordinal));
                match place {
                    Some(place) => once(place, *limit, &format!("memory={}", item.text()))?,
                    None => return Err(Misplaced::NotServed(item.text().to_owned())),
                }
            }
        }
    }
    let memory = own.into_iter().zip(devices).enumerate();
    let memory = memory.filter_map(|(ordinal, (limit, gpu))| {
        let limit = limit.or(every)?;
        Some(Change::Memory {
            ordinal,
            gpu,
            limit,
        })
    });
    Ok(threads
        .map(Change::Threads)
        .into_iter()
        .chain(memory)
        .chain(priority.map(Change::Priority))
        .collect())
}

/// The limits that were set for a daemon and confirmed, as its record holds them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DaemonLimits {
    /// By the UUID of the GPU or the MIG instance.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub memory: BTreeMap<String, MemoryLimit>,
    /// Whose work goes first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// The share of each GPU's threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<ThreadPercentage>,
}

impl DaemonLimits {
    /// Whether none is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// As `limits --set` takes them, each GPU as `gpu` names it.
    pub fn settings(&self, gpu: impl Fn(&str) -> String) -> Vec<String> {
        let threads = self.threads.iter().map(|it| format!("threads={it}"));
        let memory = self.memory.iter();
        let memory = memory.map(|(uuid, limit)| format!("memory={}={limit}", gpu(uuid)));
        let priority = self.priority.iter();
        let priority = priority.map(|it| format!("priority={}", it.as_str()));
        threads.chain(memory).chain(priority).collect()
    }

    /// Takes over a change that the daemon has confirmed.
    pub fn take_over(&mut self, change: &Change) {
        match change {
            Change::Threads(value) => self.threads.clone_from(value),
            Change::Priority(value) => self.priority = *value,
            Change::Memory { gpu, limit, .. } => {
                match limit {
                    Some(limit) => self.memory.insert(gpu.clone(), *limit),
                    None => self.memory.remove(gpu),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(last: u8) -> GpuUuid {
        format!("GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c4{last}")
            .parse()
            .unwrap()
    }

    fn numbering() -> Vec<GpuIdentity> {
        let gpu = |index: u8| GpuIdentity {
            index: index.into(),
            uuid: uuid(index),
        };
        (0..3).map(gpu).collect()
    }

    /// The changes for a daemon over the GPUs 2 and 0, in words.
    fn changed(settings: &[&str]) -> Result<Vec<String>, Misplaced> {
        let settings: Vec<Setting> = settings.iter().map(|text| text.parse().unwrap()).collect();
        let served = Served {
            gpus: vec![uuid(2), uuid(0)],
            mig: None,
        };
        let changes = changes(&settings, &served, &numbering())?;
        let number = |change: &Change| match change {
            Change::Memory { ordinal, .. } => format!("{ordinal}: "),
            _ => String::new(),
        };
        let text = |change: &Change| format!("{}{change}", number(change));
        Ok(changes.iter().map(text).collect())
    }

    #[test]
    fn a_setting_is_a_name_and_a_value_or_nothing_that_clears() {
        for (text, read) in [
            ("threads=30", Setting::Threads("30".parse().ok())),
            ("threads=", Setting::Threads(None)),
            (
                "memory=8G",
                Setting::Memory(Which::Every, "8G".parse().ok()),
            ),
            ("memory=", Setting::Memory(Which::Every, None)),
            ("priority=low", Setting::Priority(Some(Priority::Low))),
            ("priority=", Setting::Priority(None)),
        ] {
            assert_eq!(text.parse(), Ok(read), "{text}");
        }
        for (text, wrong) in [
            ("", LimitError::Setting),
            ("threads", LimitError::Setting),
            ("Threads=30", LimitError::Setting),
            ("cpus=1", LimitError::Setting),
            ("=30", LimitError::Setting),
            ("threads=0", LimitError::Percentage),
            ("threads= 30", LimitError::Percentage),
            ("memory=8", LimitError::Size),
            ("memory=1=8", LimitError::Size),
            ("memory=1=8G=", LimitError::Size),
            ("memory==8G", LimitError::Gpu),
            ("memory=0,1=8G", LimitError::Gpu),
            ("memory=0,=8G", LimitError::Gpu),
            ("memory=all=8G", LimitError::Gpu),
            ("memory=gpu0=8G", LimitError::Gpu),
            ("priority=high", LimitError::Priority),
            ("priority=1", LimitError::Priority),
        ] {
            assert_eq!(text.parse::<Setting>(), Err(wrong), "{text}");
        }
        assert_eq!("1=".parse::<MemorySetting>(), Err(LimitError::Size));
    }

    #[test]
    fn a_gpu_is_numbered_as_the_daemon_numbers_it() {
        let (two, zero) = (uuid(2), uuid(0));
        assert_eq!(
            changed(&["memory=0=1G", "threads=30"]).unwrap(),
            ["threads=30".to_owned(), format!("1: memory={zero}=1024M")]
        );
        let in_upper_case = format!("memory={}=8G", two.as_str().to_uppercase());
        assert_eq!(
            changed(&["memory=1G", &in_upper_case, "priority="]).unwrap(),
            [
                format!("0: memory={two}=8192M"),
                format!("1: memory={zero}=1024M"),
                "priority=".to_owned()
            ]
        );
        assert_eq!(
            changed(&["memory=2=", "memory=1G"]).unwrap(),
            [
                format!("0: memory={two}="),
                format!("1: memory={zero}=1024M")
            ]
        );
        assert_eq!(changed(&[]).unwrap(), [""; 0]);
    }

    #[test]
    fn a_gpu_that_is_not_served_and_a_second_value_are_refused() {
        let not_served = |gpu: &str| Err(Misplaced::NotServed(gpu.to_owned()));
        for gpu in ["1", "7", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"] {
            assert_eq!(changed(&[&format!("memory={gpu}=1G")]), not_served(gpu));
        }
        let twice = |what: &str| Err(Misplaced::Twice(what.to_owned()));
        assert_eq!(changed(&["threads=1", "threads="]), twice("threads"));
        assert_eq!(changed(&["priority=", "priority="]), twice("priority"));
        assert_eq!(changed(&["memory=1G", "memory=2G"]), twice("memory"));
        let by_uuid = format!("memory={}=1G", uuid(0));
        assert_eq!(
            changed(&["memory=0=1G", &by_uuid]),
            twice(&format!("memory={}", uuid(0)))
        );
    }

    #[test]
    fn an_instance_is_the_only_device_of_its_daemon() {
        let mig: MigUuid = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f".parse().unwrap();
        let served = Served {
            gpus: vec![uuid(1)],
            mig: Some(mig.clone()),
        };
        for gpu in [mig.as_str(), "1", uuid(1).as_str()] {
            let setting: Setting = format!("memory={gpu}=1G").parse().unwrap();
            let changes = changes(&[setting], &served, &numbering()).unwrap();
            assert_eq!(changes[0].to_string(), format!("memory={mig}=1024M"));
        }
    }

    #[test]
    fn what_was_set_is_kept_until_it_is_cleared() {
        let mut limits = DaemonLimits::default();
        let served = Served {
            gpus: vec![uuid(0)],
            mig: None,
        };
        let mut set = |settings: &[&str]| {
            let settings: Vec<Setting> = settings.iter().map(|it| it.parse().unwrap()).collect();
            for change in changes(&settings, &served, &[]).unwrap() {
                limits.take_over(&change);
            }
            serde_json::to_value(&limits).unwrap()
        };
        let all = serde_json::json!({
            "threads": 12.5, "memory": {uuid(0).as_str(): "8192M"}, "priority": "low"
        });
        assert_eq!(set(&["threads=12.5", "memory=8G", "priority=low"]), all);
        assert_eq!(
            serde_json::from_value::<DaemonLimits>(all).unwrap().threads,
            "12.5".parse().ok()
        );
        let cleared = set(&["threads=", "memory=", "priority="]);
        assert_eq!(cleared, serde_json::json!({}));
        assert!(limits.is_empty());
        for wrong in [
            serde_json::json!({"threads": 0}),
            serde_json::json!({"memory": {"GPU-0": "1.5G"}}),
            serde_json::json!({"cpus": 1}),
        ] {
            assert!(serde_json::from_value::<DaemonLimits>(wrong).is_err());
        }
    }
}
