//! What goes wrong when somebody says, or leaves out, which GPUs are meant.

use super::{SmiFailure, list};
use crate::gpu::{Device, GpuIdentity, SelectorError, UuidError};

/// Why it is not clear which devices are meant, or why they cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Selection {
    /// `--gpus` cannot be read.
    #[error("{0}")]
    Selector(#[from] SelectorError),
    /// `--gpus` names a GPU that is not here.
    #[error("GPU selector {selector:?} matches no GPU of this machine")]
    NoSuchGpu {
        /// The entry.
        selector: String,
        /// The GPUs that could have been named.
        usable: Vec<GpuIdentity>,
        /// The one GPU whose UUID begins like the entry.
        abbreviated: Option<GpuIdentity>,
    },
    /// `--gpus` names a MIG instance that is not here.
    #[error("GPU selector {selector:?} matches no MIG instance of this machine")]
    NoSuchMig {
        /// The entry.
        selector: String,
        /// The instances that could have been named.
        instances: Vec<Device>,
    },
    /// `--gpus` or the mask names a GPU whose row nvidia-smi could not fill in.
    #[error("{} is not usable", by_index(*index))]
    UnusableGpu {
        /// nvidia-smi's index, where the row still says one.
        index: Option<u32>,
        /// nvidia-smi's text.
        diagnostic: String,
    },
    /// `--gpus` names a GPU in MIG mode.
    #[error("GPU {gpu} is in MIG mode, and programs see only its instances")]
    Divided {
        /// The GPU.
        gpu: GpuIdentity,
        /// Its instances.
        instances: Vec<Device>,
    },
    /// What is meant is a MIG instance, or may be one, and nvidia-smi did not list them.
    #[error("the MIG instances of this machine could not be listed")]
    InstancesUnknown(SmiFailure),
    /// No `--gpus`, and more than one device is visible.
    #[error("{} GPUs are visible and one must be chosen", visible.len())]
    SeveralGpus {
        /// What is visible.
        visible: Vec<Device>,
    },
    /// `--gpus` names more than one GPU where one is meant.
    #[error("{selector:?} names several GPUs, and one is meant here")]
    SeveralSelected {
        /// The selector as typed.
        selector: String,
    },
    /// `--gpus` names a device for the second time.
    #[error("GPU {0} is named twice")]
    Twice(Device),
    /// `--gpus` names a MIG instance among others, for one daemon.
    #[error("a daemon serves whole GPUs or one MIG instance")]
    MigAmongSeveral {
        /// There are whole GPUs among them.
        is_mixed: bool,
    },
    /// The machine has no usable GPU.
    #[error("no usable NVIDIA GPU was found")]
    NoGpu {
        /// What nvidia-smi had to say.
        diagnostic: Option<String>,
    },
    /// The caller's `CUDA_VISIBLE_DEVICES` leaves no GPU.
    #[error("CUDA_VISIBLE_DEVICES={mask:?} leaves no GPU visible")]
    MaskHidesAll {
        /// The variable's value.
        mask: String,
        /// What is wrong with it.
        notes: Vec<String>,
    },
}

fn by_index(index: Option<u32>) -> String {
    index.map_or("a GPU without an index".to_owned(), |index| {
        format!("GPU index {index}")
    })
}

impl Selection {
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::Selector(_) => "bad-selector",
            Self::NoSuchGpu { .. } => "no-such-gpu",
            Self::NoSuchMig { .. } => "no-such-mig",
            Self::UnusableGpu { .. } => "unusable-gpu",
            Self::Divided { .. } => "gpu-in-mig-mode",
            Self::InstancesUnknown(_) => "mig-instances-unknown",
            Self::SeveralGpus { .. } => "several-gpus",
            Self::SeveralSelected { .. } => "several-selected",
            Self::Twice(_) => "selected-twice",
            Self::MigAmongSeveral { .. } => "mig-among-several",
            Self::NoGpu { .. } => "no-gpu",
            Self::MaskHidesAll { .. } => "mask-hides-all",
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        match self {
            Self::Selector(SelectorError::Empty) => None,
            Self::Selector(SelectorError::Uuid(UuidError::Mig(_))) => {
                Some("a whole GPU is meant here".into())
            }
            Self::Selector(SelectorError::Uuid(UuidError::Malformed(_))) => Some(
                "a GPU is named by nvidia-smi's index or by its UUID, GPU-…, a MIG instance by MIG-…"
                    .into(),
            ),
            Self::NoSuchGpu {
                abbreviated: Some(gpu),
                ..
            } => Some(format!(
                "a UUID must be complete here; {gpu} begins like it"
            )),
            Self::NoSuchGpu { usable, .. } if usable.is_empty() => {
                Some("no GPU is usable".to_owned())
            }
            Self::NoSuchGpu { usable, .. } => Some(format!("usable are {}", list(usable))),
            Self::NoSuchMig { instances, .. } | Self::Divided { instances, .. } => {
                Some(match instances.is_empty() {
                    true => "there is no MIG instance".to_owned(),
                    false => format!("there are {}", list(instances)),
                })
            }
            Self::InstancesUnknown(failure) => Some(failure.to_string()),
            Self::UnusableGpu { diagnostic, .. } => Some(format!("nvidia-smi says {diagnostic:?}")),
            Self::SeveralGpus { visible } => Some(format!("visible are {}", list(visible))),
            Self::SeveralSelected { .. } | Self::Twice(_) => None,
            Self::MigAmongSeveral { is_mixed: true } => {
                Some("a program cannot see MIG instances beside whole GPUs".into())
            }
            Self::MigAmongSeveral { is_mixed: false } => {
                Some("each MIG instance needs a daemon of its own".into())
            }
            Self::NoGpu { diagnostic } => diagnostic.clone(),
            Self::MaskHidesAll { notes, .. } => (!notes.is_empty()).then(|| notes.join("; ")),
        }
    }

    pub(super) fn hint(&self) -> String {
        let name = |device: &Device| match device {
            Device::Gpu(gpu) => format!("--gpus {}", gpu.index),
            Device::Mig(_, instance) => format!("--gpus {}", instance.uuid),
        };
        match self {
            Self::Selector(SelectorError::Uuid(UuidError::Mig(_))) => {
                "nvidia-smi -L lists the whole GPUs; give one as --gpus GPU-…".into()
            }
            Self::Selector(_) => "--gpus 0, or --gpus GPU-… as `nvidia-smi -L` prints it".into(),
            Self::NoSuchGpu {
                abbreviated: Some(gpu),
                ..
            } => format!("--gpus {}", gpu.uuid),
            Self::NoSuchMig { instances, .. } if instances.is_empty() => "nvidia-smi -L".into(),
            Self::NoSuchMig { instances, .. } | Self::Divided { instances, .. } => {
                match instances.first() {
                    Some(instance) => name(instance),
                    None => "as administrator: nvidia-smi mig -cgi 19,19 -C, or nvidia-smi -mig 0 to leave MIG mode".into(),
                }
            }
            Self::InstancesUnknown(failure) => failure.hint(),
            Self::SeveralGpus { visible } => match visible.first() {
                Some(device) => name(device),
                None => "uni-cumps status".into(),
            },
            Self::SeveralSelected { selector } => {
                let mut entries = crate::gpu::entries(selector).filter(|entry| *entry != "all");
                format!("name one: --gpus {}", entries.next().unwrap_or("0"))
            }
            Self::Twice(_) => "name each GPU once".into(),
            Self::MigAmongSeveral { .. } => "one daemon for each: --topology task_per_gpu".into(),
            Self::NoSuchGpu { .. } | Self::UnusableGpu { .. } | Self::NoGpu { .. } => {
                "uni-cumps status".into()
            }
            Self::MaskHidesAll { .. } => {
                "unset CUDA_VISIBLE_DEVICES, or name the GPU with --gpus".into()
            }
        }
    }
}
