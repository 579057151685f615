//! The record of a daemon as a value: what `daemon.json` says, in the format of the Python command, and what the
//! daemon's clients must have in their environment.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::gpu::{self, Device, GpuUuid, MigUuid, UuidError};
use crate::limits::{DaemonLimits, Served};

/// A daemon's label: `[a-z0-9][a-z0-9-]{0,63}`, so that it is safe as a directory name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DaemonName(String);

/// The text is not a daemon name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a daemon name")]
pub struct NameError(pub String);

impl DaemonName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name used where none is given: the complete UUID, so that no two devices share one; for several their number
    /// and a hash of all their UUIDs, in whichever order they are named.
    pub fn for_devices(devices: &[Device]) -> Result<Self, NameError> {
        match devices {
            [Device::Gpu(gpu)] => format!("gpu-{}", gpu.uuid.bare()).parse(),
            [Device::Mig(_, instance)] => format!("mig-{}", instance.uuid.bare()).parse(),
            several => {
                let mut uuids: Vec<&str> = several.iter().map(Device::uuid).collect();
                uuids.sort_unstable();
                let hash = fnv(&uuids.join(","));
                format!("gpus-{}-{hash:016x}", several.len()).parse()
            }
        }
    }
}

impl FromStr for DaemonName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let valid = (1..=64).contains(&text.len())
            && text.bytes().all(|byte| letter(byte) || byte == b'-')
            && !text.starts_with('-');
        if valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError(text.to_owned()))
        }
    }
}

impl fmt::Display for DaemonName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// FNV-1a, which stays the same for good.
pub fn fnv(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A process that cannot be mistaken for another one on this machine: a pid is used again, a pid with its start time
/// is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// The number, in the pid namespace of whoever wrote it down.
    pub pid: i32,
    /// Field 22 of `/proc/<pid>/stat`: clock ticks after boot at which the process began.
    pub start_ticks: u64,
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {}", self.pid)
    }
}

/// How a daemon's GPUs relate to the tasks that use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum TopologyMode {
    /// One daemon, one GPU
    SingleGpu,
    /// One daemon over several GPUs
    SingleTaskMultiGpu,
    /// One daemon for each GPU
    TaskPerGpu,
}

impl TopologyMode {
    /// All modes, in the order in which they are reported.
    pub const ALL: [Self; 3] = [Self::SingleGpu, Self::SingleTaskMultiGpu, Self::TaskPerGpu];

    /// The mode as records spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SingleGpu => "single_gpu",
            Self::SingleTaskMultiGpu => "single_task_multi_gpu",
            Self::TaskPerGpu => "task_per_gpu",
        }
    }
}

/// The machine that a record speaks of, as far as a process can know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// `/proc/sys/kernel/hostname`.
    pub host: String,
    /// `/proc/sys/kernel/random/boot_id`: new at each boot, the same in all containers of one kernel.
    pub boot_id: Option<String>,
    /// The inode of `/proc/self/ns/pid`: pids mean something only within one pid namespace.
    pub pid_namespace: Option<u64>,
}

/// A daemon that we started. Without a record nothing may be stopped.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonRecord {
    /// The label, which is the name of the record's directory.
    pub name: DaemonName,
    /// The user the daemon runs as.
    pub uid: u32,
    /// Where it runs. Records of the Python command know only the host.
    pub place: Place,
    /// How its GPUs are used.
    pub topology_mode: TopologyMode,
    /// The GPUs it serves, at least one.
    pub gpu_uuids: Vec<GpuUuid>,
    /// nvidia-smi's indices of these GPUs when the daemon was started; empty where they are not known. They order daemons
    /// and name nothing.
    pub gpu_indices: Vec<u32>,
    /// The MIG instance that it serves, a part of its only GPU.
    pub mig_uuid: Option<MigUuid>,
    /// The compute modes that its GPUs had before they were made exclusive, as nvidia-smi names them. They come back when
    /// the daemon is stopped.
    pub compute_modes_before: BTreeMap<GpuUuid, String>,
    /// `CUDA_MPS_PIPE_DIRECTORY`, absolute.
    pub pipe_directory: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`, absolute.
    pub log_directory: PathBuf,
    /// The daemon's process.
    pub process: ProcessId,
    /// Seconds since 1970 at which the record was written.
    pub created_at: f64,
    /// The limits that were set for it.
    pub limits: DaemonLimits,
    /// Fields that we do not know, kept as they were.
    pub unknown: Map<String, Value>,
}

/// The JSON form. Types are strict: a text where a list belongs would otherwise be taken apart into letters.
#[derive(Serialize, Deserialize)]
struct Fields {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    compute_modes_before: BTreeMap<GpuUuid, String>,
    created_at: f64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    gpu_indices: Vec<u32>,
    /// What clients must have in `CUDA_VISIBLE_DEVICES`: GPUs, or one MIG instance. The Python command hands it on as it is.
    gpu_uuids: Vec<String>,
    host: String,
    log_directory: PathBuf,
    /// The GPU that the MIG instance is a part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mig_gpu_uuid: Option<GpuUuid>,
    pid: i32,
    pipe_directory: PathBuf,
    process_start_ticks: u64,
    topology_mode: TopologyMode,
    uid: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pid_namespace: Option<u64>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

/// The field of the limits. Earlier records have none.
const LIMITS: &str = "limits";

/// Takes the limits out of the fields. What is not ours to read stays where it is: no daemon is lost for its limits.
fn limits_of(fields: &mut Map<String, Value>) -> DaemonLimits {
    let read = |value: &Value| {
        let limits: DaemonLimits = serde_json::from_value(value.clone()).ok()?;
        let is_ours = serde_json::to_value(&limits).is_ok_and(|written| written == *value);
        (is_ours && !limits.is_empty()).then_some(limits)
    };
    match fields.get(LIMITS).and_then(read) {
        Some(limits) => {
            fields.remove(LIMITS);
            limits
        }
        None => DaemonLimits::default(),
    }
}

/// What the fields say is served. A MIG instance stands alone and names its GPU; whole GPUs name no other.
fn served_by(uuids: &[String], mig_gpu: Option<GpuUuid>) -> Result<Served, String> {
    let Some(gpu) = mig_gpu else {
        let gpus: Result<Vec<GpuUuid>, UuidError> = uuids.iter().map(|uuid| uuid.parse()).collect();
        let gpus = gpus.map_err(|error| format!("gpu_uuids: {error}"))?;
        return match gpus.is_empty() {
            true => Err("gpu_uuids is empty".to_owned()),
            false => Ok(Served { gpus, mig: None }),
        };
    };
    match uuids {
        [mig] => Ok(Served {
            gpus: vec![gpu],
            mig: Some(mig.parse().map_err(|error| format!("gpu_uuids: {error}"))?),
        }),
        _ => Err(format!(
            "mig_gpu_uuid is there, and gpu_uuids has {} entries instead of one MIG instance",
            uuids.len()
        )),
    }
}

impl DaemonRecord {
    /// Reads a record file's content. The name is that of the directory; a `name` inside is not looked at.
    pub fn from_json(name: DaemonName, content: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        if !value.is_object() {
            return Err("not a JSON object".to_owned());
        }
        let mut fields: Fields =
            serde_json::from_value(value).map_err(|error| error.to_string())?;
        fields.unknown.remove("name");
        let served = served_by(&fields.gpu_uuids, fields.mig_gpu_uuid)?;
        if fields.pid <= 0 {
            return Err(format!("pid {} is not a process", fields.pid));
        }
        for directory in [&fields.pipe_directory, &fields.log_directory] {
            if !directory.is_absolute() || directory.as_os_str().as_encoded_bytes().contains(&0) {
                return Err(format!("{directory:?} is not an absolute path"));
            }
        }
        Ok(Self {
            name,
            uid: fields.uid,
            place: Place {
                host: fields.host,
                boot_id: fields.boot_id,
                pid_namespace: fields.pid_namespace,
            },
            topology_mode: fields.topology_mode,
            gpu_uuids: served.gpus,
            gpu_indices: fields.gpu_indices,
            mig_uuid: served.mig,
            compute_modes_before: fields.compute_modes_before,
            pipe_directory: fields.pipe_directory,
            log_directory: fields.log_directory,
            process: ProcessId {
                pid: fields.pid,
                start_ticks: fields.process_start_ticks,
            },
            created_at: fields.created_at,
            limits: limits_of(&mut fields.unknown),
            unknown: fields.unknown,
        })
    }

    /// The record as an object, keys sorted, as the file holds it and as `start` and `stop` print it.
    pub fn to_json(&self) -> Value {
        let gpu_of = |_: &MigUuid| self.gpu_uuids.first().cloned();
        let fields = Fields {
            compute_modes_before: self.compute_modes_before.clone(),
            created_at: self.created_at,
            gpu_indices: self.gpu_indices.clone(),
            gpu_uuids: self.served().devices(),
            host: self.place.host.clone(),
            log_directory: self.log_directory.clone(),
            mig_gpu_uuid: self.mig_uuid.as_ref().and_then(gpu_of),
            pid: self.process.pid,
            pipe_directory: self.pipe_directory.clone(),
            process_start_ticks: self.process.start_ticks,
            topology_mode: self.topology_mode,
            uid: self.uid,
            boot_id: self.place.boot_id.clone(),
            pid_namespace: self.place.pid_namespace,
            unknown: self.unknown.clone(),
        };
        // Only a path that is not Unicode cannot be written, and such paths are refused before a record exists.
        let mut value = serde_json::to_value(fields).unwrap_or_default();
        value["name"] = self.name.as_str().into();
        if !self.limits.is_empty() {
            value[LIMITS] = serde_json::to_value(&self.limits).unwrap_or_default();
        }
        value
    }

    /// What it serves.
    pub fn served(&self) -> Served {
        Served {
            gpus: self.gpu_uuids.clone(),
            mig: self.mig_uuid.clone(),
        }
    }

    /// `GPU-…,GPU-…` or `MIG-…`, as `CUDA_VISIBLE_DEVICES` and the plain lines spell what the daemon serves.
    pub fn gpu_list(&self) -> String {
        if let Some(mig) = &self.mig_uuid {
            return mig.to_string();
        }
        let uuids: Vec<&str> = self.gpu_uuids.iter().map(GpuUuid::as_str).collect();
        uuids.join(",")
    }

    /// Whether it serves this device, or a part of it, or what it is a part of.
    pub fn covers(&self, device: &Device) -> bool {
        let parts_differ = match (&self.mig_uuid, device.mig()) {
            (Some(ours), Some(other)) => *ours != other.uuid,
            (_, _) => false,
        };
        self.gpu_uuids.contains(&device.gpu().uuid) && !parts_differ
    }

    /// Whether a mask names devices by UUID, and none that it serves. What an index means only nvidia-smi knows.
    pub fn is_hidden_by(&self, mask: &str) -> bool {
        match &self.mig_uuid {
            Some(mig) => !gpu::entries(mask).any(|entry| entry.parse().as_ref() == Ok(mig)),
            None => gpu::names_none_of(mask, &self.gpu_uuids),
        }
    }

    /// Orders daemons by their GPUs as nvidia-smi counts them, and where that is not known, by age.
    pub fn by_gpu(&self, other: &Self) -> Ordering {
        let unknown = |record: &Self| record.gpu_indices.is_empty();
        unknown(self)
            .cmp(&unknown(other))
            .then_with(|| self.gpu_indices.cmp(&other.gpu_indices))
            .then_with(|| self.created_at.total_cmp(&other.created_at))
            .then_with(|| self.name.cmp(&other.name))
    }

    /// What a client of this daemon must have in its environment, in the order in which `env` prints it.
    pub fn client_environment(&self) -> [(&'static str, String); 3] {
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        let [gpus, pipe, log] = CLIENT_VARIABLES;
        [
            (gpus, self.gpu_list()),
            (pipe, text(&self.pipe_directory)),
            (log, text(&self.log_directory)),
        ]
    }
}

/// The variables that a client has of its daemon.
pub const CLIENT_VARIABLES: [&str; 3] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
];

/// Where a record belongs, seen from here. Decides whether its pid may be looked up at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Belongs {
    /// This machine, this boot, this pid namespace: the pid means something.
    Here,
    /// This machine, but before its last boot: the process is certainly gone.
    OtherBoot,
    /// Another machine, as far as can be told.
    OtherHost,
    /// This machine and boot, but another pid namespace: the pid means nothing here.
    OtherPidNamespace,
}

impl Place {
    /// Compares the place of a record with `here`. The boot decides where both sides know it, since it is the same in all
    /// containers of a machine and survives a renamed host; the host name decides otherwise.
    pub fn seen_from(&self, here: &Place) -> Belongs {
        let same_host = self.host == here.host;
        match (&self.boot_id, &here.boot_id) {
            (Some(then), Some(now)) if then == now => {
                match (self.pid_namespace, here.pid_namespace) {
                    (Some(theirs), Some(ours)) if theirs != ours => Belongs::OtherPidNamespace,
                    _ => Belongs::Here,
                }
            }
            (Some(_), Some(_)) if same_host => Belongs::OtherBoot,
            _ if same_host => Belongs::Here,
            _ => Belongs::OtherHost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> DaemonName {
        "a".parse().unwrap()
    }

    const WRITTEN_BY_THE_REFERENCE: &str = r#"{
  "created_at": 1700000000.5,
  "gpu_uuids": [
    "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40"
  ],
  "host": "node1",
  "log_directory": "/tmp/uni-cumps/a/log",
  "name": "a",
  "pid": 4242,
  "pipe_directory": "/tmp/uni-cumps/a/pipe",
  "process_start_ticks": 777,
  "topology_mode": "single_gpu",
  "uid": 0
}
"#;

    fn reference() -> DaemonRecord {
        DaemonRecord::from_json(name(), WRITTEN_BY_THE_REFERENCE.as_bytes()).unwrap()
    }

    #[test]
    fn names_are_labels_and_never_paths() {
        for text in ["a", "a-b-", "0", &"x".repeat(64)] {
            assert!(text.parse::<DaemonName>().is_ok(), "{text}");
        }
        for text in [
            "",
            "A",
            "-x",
            "a_b",
            "a/b",
            "../x",
            "a\n",
            ".stale",
            "é",
            " a",
            "a.b",
            &"x".repeat(65),
        ] {
            assert!(text.parse::<DaemonName>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_record_of_the_reference_comes_back_as_it_was() {
        let expected: Value = serde_json::from_str(WRITTEN_BY_THE_REFERENCE).unwrap();
        assert_eq!(reference().to_json(), expected);
    }

    #[test]
    fn a_mig_instance_stands_for_itself_and_names_its_gpu() {
        const MIG: &str = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f";
        let gpu = reference().gpu_uuids[0].to_string();
        let read = |uuids: Value, mig_gpu: Option<Value>| {
            let mut value: Value = serde_json::from_str(WRITTEN_BY_THE_REFERENCE).unwrap();
            value["gpu_uuids"] = uuids;
            value["added_later"] = true.into();
            if let Some(mig_gpu) = mig_gpu {
                value["mig_gpu_uuid"] = mig_gpu;
            }
            let record = DaemonRecord::from_json(name(), value.to_string().as_bytes());
            record.map(|record| (record, value))
        };
        let (record, written) = read(serde_json::json!([MIG]), Some(gpu.as_str().into())).unwrap();
        assert_eq!(record.gpu_uuids, reference().gpu_uuids);
        assert_eq!(record.mig_uuid, MIG.parse().ok());
        assert_eq!(record.gpu_list(), MIG);
        assert_eq!(record.to_json(), written);
        let gpu = || Some(Value::from(gpu.as_str()));
        for (uuids, mig_gpu) in [
            (serde_json::json!([MIG]), None),
            (serde_json::json!([MIG]), Some(Value::Null)),
            (serde_json::json!([MIG]), Some(MIG.into())),
            (serde_json::json!([MIG]), Some(1.into())),
            (serde_json::json!([MIG, MIG]), None),
            (serde_json::json!([MIG, MIG]), gpu()),
            (serde_json::json!([MIG, gpu()]), gpu()),
            (serde_json::json!([MIG, gpu()]), None),
            (serde_json::json!([gpu()]), gpu()),
            (serde_json::json!([]), gpu()),
            (serde_json::json!(["MIG-0"]), gpu()),
        ] {
            let read = read(uuids.clone(), mig_gpu.clone());
            assert!(read.is_err(), "{uuids} {mig_gpu:?}");
        }
    }

    #[test]
    fn unknown_fields_are_kept_and_the_directory_names_the_daemon() {
        let mut value: Value = serde_json::from_str(WRITTEN_BY_THE_REFERENCE).unwrap();
        value["name"] = "other".into();
        value["added_later"] = serde_json::json!({"deep": [1, 2]});
        let record = DaemonRecord::from_json(name(), value.to_string().as_bytes()).unwrap();
        assert_eq!(record.name, name());
        assert_eq!(record.to_json()["added_later"], value["added_later"]);
        assert_eq!(record.to_json()["name"], "a");
    }

    #[test]
    fn limits_are_read_and_those_of_others_are_kept_as_they_were() {
        let with = |limits: &Value| {
            let mut value: Value = serde_json::from_str(WRITTEN_BY_THE_REFERENCE).unwrap();
            value["limits"] = limits.clone();
            DaemonRecord::from_json(name(), value.to_string().as_bytes()).unwrap()
        };
        let ours = serde_json::json!({"threads": 30.0, "memory": {"GPU-0": "512M"}});
        let record = with(&ours);
        assert_eq!(record.limits.threads, "30".parse().ok());
        assert_eq!(record.to_json()["limits"], ours);
        for foreign in [
            serde_json::json!({"threads": "30"}),
            serde_json::json!({"threads": 30}),
            serde_json::json!({"cores": 2}),
            serde_json::json!({}),
            serde_json::json!(null),
        ] {
            let record = with(&foreign);
            assert!(record.limits.is_empty());
            assert_eq!(record.to_json()["limits"], foreign);
        }
    }

    #[test]
    fn wrong_types_are_refused_one_by_one() {
        for (key, wrong) in [
            ("pid", serde_json::json!("4242")),
            ("pid", serde_json::json!(4242.0)),
            ("pid", serde_json::json!(true)),
            ("pid", serde_json::json!(0)),
            ("pid", serde_json::json!(-1)),
            ("uid", serde_json::json!(-1)),
            (
                "gpu_uuids",
                serde_json::json!("GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40"),
            ),
            ("gpu_uuids", serde_json::json!([])),
            ("gpu_uuids", serde_json::json!(["0"])),
            ("gpu_uuids", serde_json::json!(null)),
            ("pipe_directory", serde_json::json!("pipe")),
            ("pipe_directory", serde_json::json!("/tmp/\u{0}")),
            ("created_at", serde_json::json!("now")),
            ("topology_mode", serde_json::json!("other")),
            ("host", serde_json::json!(1)),
        ] {
            let mut value: Value = serde_json::from_str(WRITTEN_BY_THE_REFERENCE).unwrap();
            value[key] = wrong.clone();
            let read = DaemonRecord::from_json(name(), value.to_string().as_bytes());
            assert!(read.is_err(), "{key}: {wrong}");
        }
        let deep = "[".repeat(100_000);
        for text in ["", "{", "[]", "null", "\"text\"", "\0\0\0", &deep] {
            assert!(DaemonRecord::from_json(name(), text.as_bytes()).is_err());
        }
    }

    #[test]
    fn the_boot_decides_where_a_record_belongs() {
        let place = |host: &str, boot: Option<&str>, namespace| Place {
            host: host.to_owned(),
            boot_id: boot.map(str::to_owned),
            pid_namespace: namespace,
        };
        let here = place("node1", Some("b1"), Some(1));
        for (then, belongs) in [
            (place("node1", Some("b1"), Some(1)), Belongs::Here),
            (place("renamed", Some("b1"), Some(1)), Belongs::Here),
            (place("node1", Some("b0"), Some(1)), Belongs::OtherBoot),
            (place("node2", Some("b2"), Some(1)), Belongs::OtherHost),
            (
                place("node1", Some("b1"), Some(2)),
                Belongs::OtherPidNamespace,
            ),
            (place("node1", None, None), Belongs::Here),
            (place("node2", None, None), Belongs::OtherHost),
        ] {
            assert_eq!(then.seen_from(&here), belongs, "{then:?}");
        }
    }
}
