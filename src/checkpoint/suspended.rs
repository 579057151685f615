//! A process that was suspended, as the ledger remembers it: nvidia-smi does not list it any more.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::GpuMap;
use crate::gpu::GpuUuid;
use crate::record::{Place, ProcessId};

/// What a process has of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Its memory there, in MiB, where nvidia-smi told.
    pub memory_mib: Option<u64>,
}

/// A process that was taken from its GPUs, or is about to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Suspended {
    /// Who it is.
    pub process: ProcessId,
    /// The user that it runs as.
    pub uid: u32,
    /// Where it runs.
    pub place: Place,
    /// The file name of its program.
    pub program: String,
    /// What it had when it was last seen on its GPUs; empty where that is not known.
    pub gpus: Vec<Share>,
    /// Seconds since 1970 at which it was suspended.
    pub suspended_at: f64,
    /// Fields that we do not know, kept as they were.
    pub unknown: Map<String, Value>,
}

/// The JSON form.
#[derive(Serialize, Deserialize)]
struct Fields {
    pid: i32,
    process_start_ticks: u64,
    uid: u32,
    host: String,
    boot_id: Option<String>,
    pid_namespace: Option<u64>,
    program: String,
    gpus: Vec<Share>,
    suspended_at: f64,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

impl Suspended {
    /// Reads an entry's content.
    pub fn from_json(content: &[u8]) -> Result<Self, String> {
        let fields: Fields = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        if fields.pid <= 0 {
            return Err(format!("pid {} is not a process", fields.pid));
        }
        Ok(Self {
            process: ProcessId {
                pid: fields.pid,
                start_ticks: fields.process_start_ticks,
            },
            uid: fields.uid,
            place: Place {
                host: fields.host,
                boot_id: fields.boot_id,
                pid_namespace: fields.pid_namespace,
            },
            program: fields.program,
            gpus: fields.gpus,
            suspended_at: fields.suspended_at,
            unknown: fields.unknown,
        })
    }

    /// The entry as its file holds it.
    pub fn to_json(&self) -> Value {
        let fields = Fields {
            pid: self.process.pid,
            process_start_ticks: self.process.start_ticks,
            uid: self.uid,
            host: self.place.host.clone(),
            boot_id: self.place.boot_id.clone(),
            pid_namespace: self.place.pid_namespace,
            program: self.program.clone(),
            gpus: self.gpus.clone(),
            suspended_at: self.suspended_at,
            unknown: self.unknown.clone(),
        };
        // Plain data, which always has a JSON form.
        serde_json::to_value(fields).unwrap_or_default()
    }

    /// The process was moved: what it had on its GPUs it now has on those that took their places.
    pub fn moved(&mut self, map: &GpuMap) {
        for share in &mut self.gpus {
            share.uuid = map.place_of(&share.uuid);
        }
    }
}

/// The memory of all shares in MiB; nothing if a share's is not known, or there is none.
pub fn memory_of(shares: &[Share]) -> Option<u64> {
    let all: Option<Vec<u64>> = shares.iter().map(|share| share.memory_mib).collect();
    all.filter(|all| !all.is_empty())
        .map(|all| all.into_iter().fold(0, u64::saturating_add))
}

/// The GPUs of shares as a plain line has them.
pub fn gpu_list(shares: &[Share]) -> String {
    let uuids: Vec<&str> = shares.iter().map(|share| share.uuid.as_str()).collect();
    match uuids.is_empty() {
        true => "unknown".to_owned(),
        false => uuids.join(","),
    }
}

/// The memory of shares in MiB, likewise.
pub fn memory_text(shares: &[Share]) -> String {
    memory_of(shares).map_or("unknown".to_owned(), |memory| memory.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_comes_back_as_it_was_and_keeps_what_it_does_not_know() {
        let written = serde_json::json!({
            "pid": 42,
            "process_start_ticks": 777,
            "uid": 1000,
            "host": "node1",
            "boot_id": "b1",
            "pid_namespace": 1,
            "program": "python3",
            "gpus": [{"uuid": "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40", "memory_mib": 812}],
            "suspended_at": 1_700_000_000.5,
            "added_later": [1, 2],
        });
        let entry = Suspended::from_json(written.to_string().as_bytes()).unwrap();
        assert_eq!(entry.to_json(), written);
        assert_eq!(memory_of(&entry.gpus), Some(812));
    }

    #[test]
    fn memory_that_is_known_in_part_is_not_known() {
        let share = |memory_mib| Share {
            uuid: "GPU-a".parse().unwrap(),
            memory_mib,
        };
        assert_eq!(memory_of(&[]), None);
        assert_eq!(memory_of(&[share(Some(1)), share(None)]), None);
        assert_eq!(memory_of(&[share(Some(1)), share(Some(2))]), Some(3));
    }
}
