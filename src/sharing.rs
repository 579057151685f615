//! Whether a learner and a collector really share one GPU through MPS: the evidence object of the Python command, and
//! the order in which an explicit request must be met. Pure.

use serde::Serialize;

use crate::error::Unmet;
use crate::gpu::GpuUuid;

/// Backends whose collector is a process of its own on the learner's GPU.
const BACKENDS: [&str; 1] = ["mjwarp"];

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Explicit MPS, or only a look at what is there.
    pub mps: bool,
    /// The learner's device as typed.
    pub learner: String,
    /// The collector's device as typed.
    pub collector: Option<String>,
    /// The simulation backend.
    pub backend: String,
    /// This process's rank.
    pub rank: i64,
    /// How many ranks there are.
    pub world_size: i64,
}

/// What is known, in the field names of the Python command. `control_pid` is ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// `mps`, or nothing for a mere look.
    pub configured: Option<&'static str>,
    /// The mode in force, once every prerequisite is met.
    pub effective: Option<&'static str>,
    /// Whether every prerequisite is met.
    pub validated: bool,
    /// The rank asked about.
    pub rank: i64,
    /// The number of ranks.
    pub world_size: i64,
    /// The learner's device.
    pub learner_device: Option<String>,
    /// The collector's device.
    pub collector_device: Option<String>,
    /// The learner's GPU as the CUDA driver names it.
    pub learner_gpu_uuid: Option<String>,
    /// The collector's GPU by nvidia-smi and the mask.
    pub collector_gpu_uuid: Option<String>,
    /// `CUDA_MPS_PIPE_DIRECTORY` as it is set.
    pub pipe_directory_env: Option<String>,
    /// The pipe directory that a CUDA program would use.
    pub pipe_directory: Option<String>,
    /// The control socket there.
    pub control_pipe: Option<String>,
    /// `unix_socket` or `fifo`.
    pub control_pipe_kind: Option<&'static str>,
    /// A server of the daemon; none before the first program.
    pub server_pid: Option<i32>,
    /// The daemon.
    pub control_pid: Option<i32>,
    /// For a mere look: a daemon answered.
    pub ambient_server: bool,
}

impl Evidence {
    /// The evidence before anything was looked at.
    pub fn of(request: &Request) -> Self {
        Self {
            configured: request.mps.then_some("mps"),
            effective: None,
            validated: false,
            rank: request.rank,
            world_size: request.world_size,
            learner_device: Some(request.learner.clone()),
            collector_device: request.collector.clone(),
            learner_gpu_uuid: None,
            collector_gpu_uuid: None,
            pipe_directory_env: None,
            pipe_directory: None,
            control_pipe: None,
            control_pipe_kind: None,
            server_pid: None,
            control_pid: None,
            ambient_server: false,
        }
    }
}

/// The prerequisites that need no look at the machine, in the order of the Python command. Returns the ordinals of the
/// learner's and the collector's device.
pub fn arguments(request: &Request) -> Result<(u32, u32), Unmet> {
    let backend = request.backend.trim().to_ascii_lowercase();
    if !BACKENDS.contains(&backend.as_str()) {
        return Err(Unmet::Backend(request.backend.clone()));
    }
    if request.world_size < 1 || !(0..request.world_size).contains(&request.rank) {
        return Err(Unmet::Rank {
            rank: request.rank,
            world_size: request.world_size,
        });
    }
    let collector = request.collector.as_deref().ok_or(Unmet::NoCollector)?;
    Ok((
        ordinal("learner", &request.learner)?,
        ordinal("collector", collector)?,
    ))
}

/// The ordinal of a CUDA device: `cuda` is `cuda:0`.
fn ordinal(role: &'static str, device: &str) -> Result<u32, Unmet> {
    let text = device.trim().to_ascii_lowercase();
    if text == "cuda" {
        return Ok(0);
    }
    let device = device.to_owned();
    match text.strip_prefix("cuda:") {
        None | Some("") => Err(Unmet::NotCuda { role, device }),
        Some(index) => index.parse().map_err(|_| Unmet::BadDevice { role, device }),
    }
}

/// The ordinal of a device for a mere look, which takes other families as they come.
pub fn ambient_ordinal(device: Option<&str>) -> Option<u32> {
    ordinal("learner", device?).ok()
}

/// Both processes must be on one physical GPU.
pub fn same_gpu(learner: &GpuUuid, collector: &GpuUuid) -> Result<(), Unmet> {
    if learner == collector {
        return Ok(());
    }
    Err(Unmet::DifferentGpus {
        learner: learner.clone(),
        collector: collector.clone(),
    })
}

/// `CUDA_VISIBLE_DEVICES` entries with nvidia-smi's indices replaced by UUIDs, which survive the renumbering inside an
/// MPS server. Anything else stays as it is.
pub fn with_uuids(
    entries: &[&str],
    uuid_of: impl Fn(u32) -> Option<GpuUuid>,
) -> Result<Vec<String>, Unmet> {
    entries
        .iter()
        .map(|entry| match crate::gpu::parse_index(entry) {
            None => Ok((*entry).to_owned()),
            Some(index) => match uuid_of(index) {
                Some(uuid) => Ok(uuid.to_string()),
                None => Err(Unmet::UnknownOrdinal((*entry).to_owned())),
            },
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request {
            mps: true,
            learner: "cuda:0".to_owned(),
            collector: Some("cuda:0".to_owned()),
            backend: "mjwarp".to_owned(),
            rank: 0,
            world_size: 1,
        }
    }

    #[test]
    fn what_is_well_asked_names_two_ordinals() {
        assert_eq!(arguments(&request()), Ok((0, 0)));
        let other = Request {
            learner: "cuda".to_owned(),
            collector: Some(" CUDA:3 ".to_owned()),
            backend: " MJWarp ".to_owned(),
            rank: 1,
            world_size: 2,
            ..request()
        };
        assert_eq!(arguments(&other), Ok((0, 3)));
    }

    #[test]
    fn the_first_unmet_prerequisite_is_told_in_the_order_of_the_reference() {
        let mut worst = Request {
            backend: "mujoco".to_owned(),
            rank: 1,
            learner: "cpu".to_owned(),
            collector: None,
            ..request()
        };
        assert!(matches!(arguments(&worst), Err(Unmet::Backend(_))));
        worst.backend = "mjwarp".to_owned();
        assert!(matches!(arguments(&worst), Err(Unmet::Rank { .. })));
        worst.rank = 0;
        assert_eq!(arguments(&worst), Err(Unmet::NoCollector));
        worst.collector = Some("cuda:x".to_owned());
        let role = |unmet| match unmet {
            Err(Unmet::NotCuda { role, .. } | Unmet::BadDevice { role, .. }) => role,
            other => panic!("{other:?}"),
        };
        assert_eq!(role(arguments(&worst)), "learner");
        worst.learner = "cuda:-1".to_owned();
        assert_eq!(role(arguments(&worst)), "learner");
        worst.learner = "cuda:0".to_owned();
        assert_eq!(role(arguments(&worst)), "collector");
    }

    #[test]
    fn a_world_without_ranks_is_refused() {
        for (rank, world_size) in [(1, 1), (-1, 1), (0, 0), (0, -1), (2, 2)] {
            let asked = Request {
                rank,
                world_size,
                ..request()
            };
            assert!(matches!(arguments(&asked), Err(Unmet::Rank { .. })));
        }
    }

    #[test]
    fn devices_that_are_not_cuda_are_told_from_bad_ones() {
        for device in ["cpu", "cuda:", "mps", ""] {
            assert!(matches!(
                ordinal("learner", device),
                Err(Unmet::NotCuda { .. })
            ));
        }
        for device in ["cuda:x", "cuda:-1", "cuda:1.0", "cuda:99999999999"] {
            assert!(matches!(
                ordinal("learner", device),
                Err(Unmet::BadDevice { .. })
            ));
        }
    }

    #[test]
    fn only_indices_are_replaced_in_a_mask() {
        let uuid: GpuUuid = "GPU-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41".parse().unwrap();
        let table = |index| (index == 1).then(|| uuid.clone());
        for (entries, replaced) in [
            (vec![], vec![]),
            (vec!["1"], vec![uuid.as_str()]),
            (vec!["-1"], vec!["-1"]),
            (vec!["MIG-x", "1"], vec!["MIG-x", uuid.as_str()]),
            (vec!["GPU-zz"], vec!["GPU-zz"]),
        ] {
            assert_eq!(with_uuids(&entries, table).unwrap(), replaced);
        }
        assert_eq!(
            with_uuids(&["1", "7"], table),
            Err(Unmet::UnknownOrdinal("7".to_owned()))
        );
    }
}
