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
    /// Its group, where Slurm says it.
    pub gid: Option<u32>,
    /// Slurm's numbers of the GPUs that it has on this node; none are looked up for a job that does not ask.
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
        let has_mps = text(host, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").is_some();
        let request = Request::of(text(host, "SLURM_JOB_COMMENT").as_deref(), has_mps);
        let gpus = match request {
            Ok(None) => None,
            _ => numbers(host, "SLURM_JOB_GPUS")?,
        };
        Ok(Self {
            id: JobId::of(host)?,
            uid: number(host, "SLURM_JOB_UID")?,
            gid: text(host, "SLURM_JOB_GID").and_then(|gid| gid.parse().ok()),
            gpus: gpus.unwrap_or_default(),
            has_mps,
            request,
        })
    }
}

/// Slurm's numbers of the GPUs that a step has, where it says them: a part of the job's. A user cannot set them.
pub fn gpus_of_step(host: &Host) -> Result<Option<Vec<u32>>, Error> {
    numbers(host, "SLURM_STEP_GPUS")
}

fn text(host: &Host, variable: &str) -> Option<String> {
    Some(
        host.env
            .get_filled(variable)?
            .to_string_lossy()
            .into_owned(),
    )
}

/// A list of numbers, such as `0,1` or `0-3`.
fn numbers(host: &Host, variable: &'static str) -> Result<Option<Vec<u32>>, Error> {
    let Some(list) = text(host, variable) else {
        return Ok(None);
    };
    let parsed = list
        .parse::<CpuSet>()
        .map_err(|_| malformed(variable, list))?;
    let numbers = parsed
        .iter()
        .filter_map(|number| u32::try_from(number).ok());
    Ok(Some(numbers.collect()))
}

/// The name of this node in Slurm, the only thing that a health check is told.
pub fn node_name(host: &Host) -> Result<String, Error> {
    word(host, "SLURMD_NODENAME")
}

fn malformed(variable: &'static str, value: String) -> Error {
    SlurmFailure::BadVariable { variable, value }.into()
}

fn value(host: &Host, variable: &'static str) -> Result<String, Error> {
    let value = text(host, variable);
    Ok(value.ok_or(SlurmFailure::NoVariable(variable))?)
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
