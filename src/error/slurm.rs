//! What goes wrong in the hooks of a Slurm cluster.

use std::io;

/// Why a hook cannot do what it is for.
#[derive(Debug, thiserror::Error)]
pub enum SlurmFailure {
    /// Slurm has not called us.
    #[error("{0} is not set: this is a hook, which Slurm calls")]
    NoVariable(&'static str),
    /// A variable is not what Slurm sets.
    #[error("{variable}={value:?} is not what Slurm sets")]
    BadVariable {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// The job's user is not known on this node.
    #[error("uid {0} has no entry in the password database of this node")]
    NoUser(u32),
    /// The user's rights could not be taken on.
    #[error("cannot become uid {uid}")]
    NotBecome {
        /// The user.
        uid: u32,
        /// The system's reason.
        source: io::Error,
    },
    /// A GPU that Slurm has given to a job is not there, or fails.
    #[error("GPU {index} of the job is not usable")]
    Gpu {
        /// nvidia-smi's index.
        index: u32,
        /// What nvidia-smi says.
        reason: String,
    },
    /// The job asked for a shared GPU and has none.
    #[error("this job asked for a shared GPU and has none: {0}")]
    NotShared(String),
    /// Slurm does not tell which jobs are there, so nothing was touched.
    #[error("Slurm does not tell which jobs are on node {node}")]
    NoJobs {
        /// The node.
        node: String,
        /// What squeue says.
        reason: String,
    },
    /// Something of a job is left.
    #[error("something is left of {job}: {}", left.join("; "))]
    Left {
        /// The job.
        job: String,
        /// What is left.
        left: Vec<String>,
    },
}

impl SlurmFailure {
    pub(super) fn code(&self) -> &'static str {
        match self {
            Self::NoVariable(_) => "not-in-slurm",
            Self::BadVariable { .. } => "bad-slurm-variable",
            Self::NoUser(_) => "no-job-user",
            Self::NotBecome { .. } => "not-become",
            Self::Gpu { .. } => "job-gpu-unusable",
            Self::NotShared(_) => "not-shared",
            Self::NoJobs { .. } => "jobs-unknown",
            Self::Left { .. } => "left-of-job",
        }
    }

    pub(super) fn cause(&self) -> Option<String> {
        match self {
            Self::NotBecome { source, .. } => Some(source.to_string()),
            Self::Gpu { reason, .. } | Self::NoJobs { reason, .. } => Some(reason.clone()),
            Self::NoVariable(_)
            | Self::BadVariable { .. }
            | Self::NoUser(_)
            | Self::NotShared(_)
            | Self::Left { .. } => None,
        }
    }

    pub(super) fn hint(&self) -> String {
        match self {
            Self::NoVariable(_) | Self::BadVariable { .. } => {
                "what belongs into slurm.conf: uni-cumps slurm install".into()
            }
            Self::NoUser(uid) => format!("getent passwd {uid}"),
            Self::NotBecome { .. } => "hooks run as root; see SlurmdUser in slurm.conf".into(),
            Self::Gpu { .. } => "nvidia-smi -L, and once it lists the GPU: scontrol update nodename=NODE state=resume".into(),
            Self::NotShared(_) => "sbatch --gres=gpu:1 --comment=cumps:share, or without the comment".into(),
            Self::NoJobs { node, .. } => format!("squeue -h -o %A -w {node}"),
            Self::Left { .. } => "once it is gone: scontrol update nodename=NODE state=resume".into(),
        }
    }
}
