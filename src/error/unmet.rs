//! What keeps a learner and a collector from sharing a GPU through MPS.

use std::path::PathBuf;

use crate::gpu::GpuUuid;

/// The first prerequisite of sharing that is not met.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unmet {
    /// The backend has no collector process.
    #[error("the backend {0:?} does not share a GPU between processes; mjwarp does")]
    Backend(String),
    /// The rank is not one of the world.
    #[error("rank {rank} is not below the world size {world_size}")]
    Rank {
        /// The rank.
        rank: i64,
        /// The number of ranks.
        world_size: i64,
    },
    /// No collector device was named.
    #[error("there is no collector device")]
    NoCollector,
    /// A device is not a CUDA device.
    #[error("the {role}'s device {device:?} is not a CUDA device")]
    NotCuda {
        /// `learner` or `collector`.
        role: &'static str,
        /// The device as typed.
        device: String,
    },
    /// A CUDA device has no ordinal.
    #[error("the {role}'s device {device:?} has no valid ordinal")]
    BadDevice {
        /// `learner` or `collector`.
        role: &'static str,
        /// The device as typed.
        device: String,
    },
    /// CUDA does not work in a process with this environment.
    #[error("CUDA is not available for the learner: {0}")]
    NoCuda(String),
    /// The machine computes with AMD's ROCm.
    #[error("this machine has AMD's ROCm and no CUDA driver; MPS is NVIDIA's")]
    Rocm,
    /// A process sees fewer devices.
    #[error("the learner's device cuda:{ordinal} does not exist: a process sees {count}")]
    OutOfRange {
        /// The ordinal.
        ordinal: u32,
        /// How many devices there are.
        count: usize,
    },
    /// The two are on different GPUs.
    #[error("learner and collector are on two GPUs: {learner} and {collector}")]
    DifferentGpus {
        /// The learner's.
        learner: GpuUuid,
        /// The collector's.
        collector: GpuUuid,
    },
    /// The collector's device names no GPU.
    #[error("the collector's device {device:?} names no GPU: {reason}")]
    CollectorUnknown {
        /// The device as typed.
        device: String,
        /// Why not.
        reason: String,
    },
    /// An index in a mask names no GPU.
    #[error("CUDA_VISIBLE_DEVICES entry {0:?} names no GPU of this machine")]
    UnknownOrdinal(String),
    /// There is no daemon where a program would look for it.
    #[error("{0}")]
    NoDaemon(String),
    /// Something else stands there.
    #[error("{0}, not a control socket")]
    NotASocket(String),
    /// The socket is closed to this user.
    #[error("{0}")]
    NoAccess(String),
    /// The daemon does not answer.
    #[error("the control daemon in {pipe:?} does not answer: {reason}")]
    NotAnswering {
        /// Its pipe directory.
        pipe: PathBuf,
        /// What was seen.
        reason: String,
    },
    /// Two processes are not clients of one server.
    #[error("{0}")]
    NotTogether(String),
}

impl Unmet {
    pub(super) fn hint(&self) -> String {
        match self {
            Self::Backend(_) => "--backend mjwarp, or --mode none for a mere look".into(),
            Self::Rank { .. } => "--rank 0 --world-size 1".into(),
            Self::NoCollector => "--collector cuda:0".into(),
            Self::NotCuda { role, .. } | Self::BadDevice { role, .. } => format!("--{role} cuda:0"),
            Self::NoCuda(_) => "uni-cumps doctor".into(),
            Self::Rocm => "use a machine with an NVIDIA GPU".into(),
            Self::OutOfRange { .. } => "--learner cuda:0, or widen CUDA_VISIBLE_DEVICES".into(),
            Self::DifferentGpus { learner, .. } => format!("export CUDA_VISIBLE_DEVICES={learner}"),
            Self::CollectorUnknown { .. } | Self::UnknownOrdinal(_) => {
                "nvidia-smi --query-gpu=index,uuid --format=csv".into()
            }
            Self::NoDaemon(_) => "uni-cumps start && eval \"$(uni-cumps env)\"".into(),
            Self::NotASocket(_) | Self::NoAccess(_) => {
                "eval \"$(uni-cumps env)\", or unset CUDA_MPS_PIPE_DIRECTORY".into()
            }
            Self::NotAnswering { .. } => "uni-cumps doctor".into(),
            Self::NotTogether(_) => {
                "start both with the environment of one daemon: eval \"$(uni-cumps env)\"".into()
            }
        }
    }

    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Backend(_) => "unsupported-backend",
            Self::Rank { .. } => "bad-rank",
            Self::NoCollector => "no-collector",
            Self::NotCuda { .. } => "not-cuda",
            Self::BadDevice { .. } => "bad-device",
            Self::NoCuda(_) => "no-cuda",
            Self::Rocm => "rocm",
            Self::OutOfRange { .. } => "device-out-of-range",
            Self::DifferentGpus { .. } => "different-gpus",
            Self::CollectorUnknown { .. } => "collector-unknown",
            Self::UnknownOrdinal(_) => "unknown-ordinal",
            Self::NoDaemon(_) => "no-daemon",
            Self::NotASocket(_) => "not-a-socket",
            Self::NoAccess(_) => "no-access",
            Self::NotAnswering { .. } => "not-answering",
            Self::NotTogether(_) => "not-together",
        }
    }
}
