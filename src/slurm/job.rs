//! A job on this node, as Slurm tells its hooks of it.

use std::fmt;

use crate::cpus::CpuSet;
use crate::error::{Error, SlurmFailure};
use crate::host::Host;

use super::{Request, RequestError};

/// A job, as far as a path of ours names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobId {
    /// The cluster's name.
    pub cluster: String,
    /// The job's number.
    pub number: u32,
    /// The node's name in Slurm, which need not be that of the machine.
    pub node: String,
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job {} of cluster {}", self.number, self.cluster)
    }
}

/// What a prolog knows of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Which one.
    pub id: JobId,
    /// Its user.
    pub uid: u32,
    /// nvidia-smi's indices of the GPUs that it has on this node.
    pub gpus: Vec<u32>,
    /// Others may have the same GPUs: it has an `mps` resource.
    pub has_mps: bool,
    /// What it asks for; `None` if it does not ask for a shared GPU.
    pub request: Result<Option<Request>, RequestError>,
}

impl JobId {
    /// The job that this hook is called for. The variables are those of slurmd, which a user cannot set.
    pub fn of(host: &Host) -> Result<Self, Error> {
        Ok(Self {
            cluster: word(host, "SLURM_CLUSTER_NAME")?,
            number: number(host, "SLURM_JOB_ID")?,
            node: node_name(host)?,
        })
    }
}

impl Job {
    /// The job of a prolog.
    pub fn of(host: &Host) -> Result<Self, Error> {
        let text = |key: &str| Some(host.env.get_filled(key)?.to_string_lossy().into_owned());
        let has_mps = text("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").is_some();
        let gpus = match text("SLURM_JOB_GPUS") {
            None => Vec::new(),
            Some(list) => list
                .parse::<CpuSet>()
                .map_err(|_| malformed("SLURM_JOB_GPUS", list))?
                .iter()
                .filter_map(|index| u32::try_from(index).ok())
                .collect(),
        };
        Ok(Self {
            id: JobId::of(host)?,
            uid: number(host, "SLURM_JOB_UID")?,
            gpus,
            has_mps,
            request: Request::of(text("SLURM_JOB_COMMENT").as_deref(), has_mps),
        })
    }
}

/// The name of this node in Slurm, the only thing that a health check is told.
pub fn node_name(host: &Host) -> Result<String, Error> {
    word(host, "SLURMD_NODENAME")
}

fn malformed(variable: &'static str, value: String) -> Error {
    SlurmFailure::BadVariable { variable, value }.into()
}

fn value(host: &Host, variable: &'static str) -> Result<String, Error> {
    let value = host.env.get_filled(variable);
    let value = value.ok_or(SlurmFailure::NoVariable(variable))?;
    Ok(value.to_string_lossy().into_owned())
}

fn number(host: &Host, variable: &'static str) -> Result<u32, Error> {
    let text = value(host, variable)?;
    text.parse().map_err(|_| malformed(variable, text))
}

/// A value that becomes part of a path.
fn word(host: &Host, variable: &'static str) -> Result<String, Error> {
    let text = value(host, variable)?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match text.bytes().all(is_plain) && !text.starts_with('.') && text.len() <= 64 {
        true => Ok(text),
        false => Err(malformed(variable, text)),
    }
}
