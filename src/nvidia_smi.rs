//! The only file that knows nvidia-smi: the query, its rows and placeholders, its exit statuses.

use std::path::PathBuf;
use std::time::Duration;

use crate::checkpoint::GpuCondition;
use crate::error::{Selection, SmiFailure};
use crate::gpu::{ComputeMode, Gpu, GpuIdentity, GpuUuid, MigInstance, PciAddress, parse_index};
use crate::host::Host;
use crate::record::TopologyMode;
use crate::runner::{Finished, Invocation, Mode, RunError, Status};
use crate::topology::{self, Plan};

/// Without persistence mode, each GPU takes about a second to wake up; a wedged driver never answers.
const LIMIT: Duration = Duration::from_secs(30);

/// The query asks for no more than is needed: a further field can make it fail for an ordinary user.
const ARGS: [&str; 2] = [
    "--query-gpu=index,uuid,compute_mode,mig.mode.current",
    "--format=csv,noheader",
];

/// The list that shows MIG instances below their GPUs. No query does.
const LIST_ARGS: [&str; 1] = ["-L"];

/// The query for places on the bus. The one above must not ask for more than everybody may know.
const ADDRESS_ARGS: [&str; 2] = ["--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"];

/// The query for the programs on the GPUs.
const APPS_ARGS: [&str; 2] = [
    "--query-compute-apps=pid,gpu_uuid,used_gpu_memory",
    "--format=csv,noheader,nounits",
];

/// The query for what may change from moment to moment.
const CONDITION_ARGS: [&str; 2] = [
    "--query-gpu=uuid,name,memory.free,persistence_mode,mig.mode.current",
    "--format=csv,noheader,nounits",
];

/// A process on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct App {
    /// Its number, as the driver knows it.
    pub pid: i32,
    /// The GPU; nothing for a part of one.
    pub gpu: Option<GpuUuid>,
    /// Its memory there in MiB; nothing where the driver does not tell, as under WSL.
    pub memory_mib: Option<u64>,
}

/// The GPUs of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// The program that was asked.
    pub program: PathBuf,
    /// Every GPU that was listed, in nvidia-smi's order.
    pub gpus: Vec<Gpu>,
    /// What nvidia-smi said besides.
    pub messages: Vec<String>,
    /// Why MIG instances may be missing from the list.
    pub undivided: Option<SmiFailure>,
}

impl Discovery {
    /// Decides which device is meant, as `topology::resolve` does, and lets nvidia-smi say why there is none.
    pub fn resolve(&self, selector: Option<&str>, mask: Option<&str>) -> Result<Plan, Selection> {
        topology::resolve(selector, &self.gpus, mask).map_err(|error| self.explain(error))
    }

    /// Likewise which devices of one daemon.
    pub fn resolve_one(
        &self,
        selector: Option<&str>,
        mask: Option<&str>,
    ) -> Result<Plan, Selection> {
        let mut plans = self.resolve_all(selector, None, mask)?;
        match (plans.pop(), plans.is_empty()) {
            (Some(plan), true) => Ok(plan),
            _ => Err(Selection::SeveralSelected {
                selector: selector.unwrap_or_default().trim().to_owned(),
            }),
        }
    }

    /// Likewise which daemons.
    pub fn resolve_all(
        &self,
        selector: Option<&str>,
        mode: Option<TopologyMode>,
        mask: Option<&str>,
    ) -> Result<Vec<Plan>, Selection> {
        let plans = topology::resolve_all(selector, mode, &self.gpus, mask);
        plans.map_err(|error| self.explain(error))
    }

    /// Why visible GPUs are not among those that `resolve_all` takes for all.
    pub fn left_out(&self, selector: Option<&str>, mask: Option<&str>) -> Vec<Selection> {
        let left = topology::left_out(selector, &self.gpus, mask).into_iter();
        left.map(|error| self.explain(error)).collect()
    }

    /// Completes a failure to find a GPU with what nvidia-smi said. An instance that is missing says nothing where
    /// instances could not be listed.
    fn explain(&self, error: Selection) -> Selection {
        if let Some(failure) = &self.undivided {
            match &error {
                Selection::Divided { instances, .. } if instances.is_empty() => {
                    return Selection::InstancesUnknown(failure.clone());
                }
                Selection::NoSuchMig { .. } | Selection::MaskHidesAll { .. } => {
                    return Selection::InstancesUnknown(failure.clone());
                }
                _ => {}
            }
        }
        match error {
            Selection::NoGpu { diagnostic: None } => Selection::NoGpu {
                diagnostic: Some(
                    self.diagnostic()
                        .unwrap_or_else(|| "nvidia-smi succeeded but listed no GPU".to_owned()),
                ),
            },
            other => other,
        }
    }

    /// Finds the parts of GPUs in MIG mode; asked only where there are such. Whole GPUs are of use without them, so a
    /// failure is kept beside what was listed.
    fn divide(&mut self, host: &Host) -> Result<(), SmiFailure> {
        let is_divided = |gpu: &Gpu| matches!(gpu, Gpu::Usable { mig: Some(_), .. });
        if !self.gpus.iter().any(is_divided) {
            return Ok(());
        }
        let (list, failure) = answer(host, "list the MIG instances", LIST_ARGS);
        match failure {
            Some(SmiFailure::Interrupted(signal)) => return Err(SmiFailure::Interrupted(signal)),
            Some(failure) => {
                let message = format!("the MIG instances could not be listed: {failure}");
                self.messages.push(message);
                self.undivided = Some(failure);
            }
            None => {}
        }
        let listed = instances(&list);
        for gpu in &mut self.gpus {
            if let Gpu::Usable {
                identity,
                mig: Some(parts),
                ..
            } = gpu
            {
                let mine = listed.iter().filter(|(uuid, _)| *uuid == identity.uuid);
                *parts = mine.map(|(_, instance)| instance.clone()).collect();
            }
        }
        Ok(())
    }

    /// The compute mode of a GPU.
    pub fn compute_mode(&self, of: &GpuIdentity) -> Option<&ComputeMode> {
        self.gpus.iter().find_map(|gpu| match gpu {
            Gpu::Usable {
                identity,
                compute_mode,
                ..
            } if identity == of => Some(compute_mode),
            Gpu::Usable { .. } | Gpu::Unusable { .. } => None,
        })
    }

    /// Whether this GPU takes one process only.
    pub fn is_exclusive(&self, uuid: &GpuUuid) -> bool {
        let mut gpus = self.gpus.iter().filter_map(Gpu::identity);
        let gpu = gpus.find(|gpu| gpu.uuid == *uuid);
        gpu.and_then(|gpu| self.compute_mode(gpu)) == Some(&ComputeMode::ExclusiveProcess)
    }

    /// The messages as one text.
    pub fn diagnostic(&self) -> Option<String> {
        (!self.messages.is_empty()).then(|| self.messages.join("; "))
    }
}

/// Lists the machine's GPUs. The caller's mask plays no part: nvidia-smi does not know it.
pub fn discover(host: &Host) -> Result<Discovery, SmiFailure> {
    let call = call(host)?;
    let program = call.program.clone();
    match host.runner.run(&call) {
        Ok(finished) => {
            let mut found = read(program, &finished)?;
            found.divide(host)?;
            Ok(found)
        }
        Err(error) => Err(not_run(program, error)),
    }
}

fn not_run(program: PathBuf, error: RunError) -> SmiFailure {
    match error {
        RunError::TimedOut(limit) => SmiFailure::TimedOut {
            program,
            seconds: limit.as_secs(),
        },
        RunError::Interrupted(signal) => SmiFailure::Interrupted(signal),
        RunError::Spawn(error) | RunError::Setup(error) => SmiFailure::CannotRun {
            program,
            reason: error.to_string(),
        },
    }
}

fn failed(program: PathBuf, finished: &Finished) -> SmiFailure {
    match finished.status {
        Status::Signaled(signal) => SmiFailure::Killed { program, signal },
        Status::Exited(status) => SmiFailure::Failed {
            program,
            status,
            said: finished.said(),
        },
    }
}

/// The answer to our query as it came, for a capture; `None` if there was none.
pub fn raw(host: &Host) -> Option<Finished> {
    host.runner.run(&call(host).ok()?).ok()
}

/// Where each GPU sits on the PCI bus; nothing where it cannot be told.
pub fn addresses(host: &Host) -> Vec<(GpuUuid, PciAddress)> {
    let stdout = query(host, "ask where the GPUs sit", ADDRESS_ARGS).unwrap_or_default();
    let row = |line: &str| {
        let (uuid, address) = line.split_once(',')?;
        Some((uuid.parse().ok()?, address.parse().ok()?))
    };
    stdout.lines().filter_map(row).collect()
}

/// The processes on the GPUs; nothing where that cannot be told. In a container they may have other numbers.
pub fn apps(host: &Host) -> Result<Vec<App>, SmiFailure> {
    let stdout = query(host, "ask which processes use the GPUs", APPS_ARGS)?;
    let row = |line: &str| {
        let mut cells = line.split(',').map(str::trim);
        let (pid, gpu, memory) = (cells.next()?, cells.next()?, cells.next()?);
        Some(App {
            pid: pid.parse().ok()?,
            gpu: gpu.parse().ok(),
            memory_mib: memory.parse().ok(),
        })
    };
    Ok(stdout.lines().filter_map(row).collect())
}

/// What condition the GPUs are in; nothing where that cannot be told.
pub fn conditions(host: &Host) -> Result<Vec<GpuCondition>, SmiFailure> {
    let stdout = query(host, "ask for the condition of the GPUs", CONDITION_ARGS)?;
    let is_on = |cell: &str| match cell {
        "Enabled" => Some(true),
        "Disabled" => Some(false),
        _ => None,
    };
    let row = |line: &str| {
        let mut cells = line.split(',').map(str::trim);
        Some(GpuCondition {
            uuid: cells.next()?.parse().ok()?,
            name: cells.next()?.to_owned(),
            free_mib: cells.next()?.parse().ok(),
            is_persistent: is_on(cells.next()?),
            has_mig: is_on(cells.next()?),
        })
    };
    Ok(stdout.lines().filter_map(row).collect())
}

/// The call that sets a compute mode; nothing if nvidia-smi cannot set it.
pub fn compute_mode_call(
    host: &Host,
    gpu: &GpuUuid,
    mode: &ComputeMode,
) -> Result<Option<Invocation>, SmiFailure> {
    let Some(argument) = mode.argument() else {
        return Ok(None);
    };
    let mut call = call(host)?;
    call.purpose = "set the compute mode";
    call.args = ["-i", gpu.as_str(), "-c", argument]
        .map(Into::into)
        .to_vec();
    Ok(Some(call))
}

/// Sets a GPU's compute mode, which takes an administrator.
pub fn set_compute_mode(host: &Host, gpu: &GpuUuid, mode: &ComputeMode) -> Result<(), SmiFailure> {
    let Some(call) = compute_mode_call(host, gpu, mode)? else {
        return Ok(());
    };
    let program = call.program.clone();
    match host.runner.run(&call) {
        Ok(finished) if finished.status.success() => Ok(()),
        Ok(finished) => Err(failed(program, &finished)),
        Err(error) => Err(not_run(program, error)),
    }
}

/// What nvidia-smi prints for another query; nothing where it fails, but for an interruption.
fn query<const N: usize>(
    host: &Host,
    purpose: &'static str,
    args: [&str; N],
) -> Result<String, SmiFailure> {
    match answer(host, purpose, args) {
        (_, Some(failure @ SmiFailure::Interrupted(_))) => Err(failure),
        (stdout, _) => Ok(stdout),
    }
}

/// What nvidia-smi prints for another query, and how it fails. It may do both.
fn answer<const N: usize>(
    host: &Host,
    purpose: &'static str,
    args: [&str; N],
) -> (String, Option<SmiFailure>) {
    let mut call = match call(host) {
        Ok(call) => call,
        Err(failure) => return (String::new(), Some(failure)),
    };
    call.purpose = purpose;
    call.args = args.map(Into::into).to_vec();
    let program = call.program.clone();
    match host.runner.run(&call) {
        Ok(finished) => {
            let failure = (!finished.status.success()).then(|| failed(program, &finished));
            (finished.stdout, failure)
        }
        Err(error) => (String::new(), Some(not_run(program, error))),
    }
}

/// The call that lists the GPUs.
pub fn call(host: &Host) -> Result<Invocation, SmiFailure> {
    let program = host.find_program("nvidia-smi");
    Ok(Invocation {
        purpose: "list the GPUs",
        program: program.ok_or(SmiFailure::NotFound)?,
        args: ARGS.map(Into::into).to_vec(),
        env: host.env.to_vec(),
        stdin: Vec::new(),
        mode: Mode::Captured(LIMIT),
    })
}

/// A call that failed may still have listed the healthy GPUs; then the failure is a message beside them.
fn read(program: PathBuf, finished: &Finished) -> Result<Discovery, SmiFailure> {
    let (gpus, mut messages) = rows(&finished.stdout);
    messages.extend(lines(&finished.stderr).map(str::to_owned));
    if !finished.status.success() {
        if !gpus.iter().any(|gpu| gpu.identity().is_some()) {
            return Err(failed(program, finished));
        }
        messages.push(format!(
            "nvidia-smi ended with status {}",
            finished.status.shell_code()
        ));
    }
    Ok(Discovery {
        program,
        gpus,
        messages,
        undivided: None,
    })
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty())
}

/// Takes nvidia-smi's standard output apart into GPUs and messages. A row keeps its own index whatever happens to the
/// rows before it.
pub fn rows(stdout: &str) -> (Vec<Gpu>, Vec<String>) {
    let mut gpus = Vec::new();
    let mut messages = Vec::new();
    for line in lines(stdout) {
        match row(line) {
            Some(gpu) => gpus.push(gpu),
            None => messages.push(line.to_owned()),
        }
    }
    (gpus, messages)
}

fn row(line: &str) -> Option<Gpu> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let index = parse_index(cells[0]);
    let unusable = |diagnostic: &str| Gpu::Unusable {
        index,
        diagnostic: diagnostic.to_owned(),
    };
    if let ([_, uuid, mode, mig @ ..], Some(index)) = (cells.as_slice(), index)
        && mig.len() <= 1
        && mig
            .iter()
            .all(|cell| is_switch(cell) || is_placeholder(cell))
    {
        return Some(match uuid.parse() {
            Ok(uuid) => Gpu::Usable {
                identity: GpuIdentity { index, uuid },
                compute_mode: ComputeMode::from(*mode),
                mig: (mig == ["Enabled"]).then(Vec::new),
            },
            Err(_) if uuid.is_empty() => unusable(line),
            Err(_) => unusable(uuid),
        });
    }
    let speaks_of_a_gpu = index.is_some()
        || (ARGS_FIELDS.contains(&cells.len()) && cells.iter().any(|cell| is_placeholder(cell)))
        || line.starts_with("Unable to determine the device handle");
    speaks_of_a_gpu.then(|| unusable(line))
}

/// How many fields the query asks for; the Python command asks for one less.
const ARGS_FIELDS: std::ops::RangeInclusive<usize> = 3..=4;

/// The MIG instances of `nvidia-smi -L`, each with its GPU:
///
/// ```text
/// GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-…)
///   MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-…)
/// ```
pub fn instances(list: &str) -> Vec<(GpuUuid, MigInstance)> {
    let mut gpu: Option<GpuUuid> = None;
    let mut found = Vec::new();
    for line in lines(list) {
        let uuid = line
            .rsplit_once("UUID: ")
            .map(|(_, rest)| rest.trim_end_matches(')'));
        let Some(uuid) = uuid else { continue };
        if line.starts_with("GPU ") {
            gpu = uuid.parse().ok();
        } else if let Some(instance) = instance(line, uuid)
            && let Some(gpu) = &gpu
        {
            found.push((gpu.clone(), instance));
        }
    }
    found
}

fn instance(line: &str, uuid: &str) -> Option<MigInstance> {
    let (profile, rest) = line.strip_prefix("MIG ")?.split_once(" Device ")?;
    let (number, _) = rest.split_once(':')?;
    Some(MigInstance {
        number: number.trim().parse().ok()?,
        profile: profile.trim().to_owned(),
        uuid: uuid.parse().ok()?,
    })
}

/// What a cell says of a mode that is on or off.
fn is_switch(cell: &str) -> bool {
    matches!(cell, "Enabled" | "Disabled")
}

/// A cell that holds an error's text instead of a value, such as `[N/A]` or `ERR!`.
fn is_placeholder(cell: &str) -> bool {
    (cell.starts_with('[') && cell.ends_with(']')) || cell == "ERR!" || cell == "N/A"
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "GPU-0a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40";
    const B: &str = "GPU-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41";

    fn finished(code: i32, stdout: &str, stderr: &str) -> Finished {
        Finished {
            status: Status::Exited(code),
            stdout: stdout.to_owned(),
            stderr: stderr.to_owned(),
            process_group: 0,
        }
    }

    fn usable(stdout: &str) -> Vec<(u32, String)> {
        let (gpus, _) = rows(stdout);
        gpus.iter()
            .filter_map(Gpu::identity)
            .map(|gpu| (gpu.index, gpu.uuid.to_string()))
            .collect()
    }

    #[test]
    fn a_bad_row_neither_hides_nor_renumbers_the_others() {
        for bad in [
            "1, [GPU is lost], [GPU is lost]",
            "1, [Unknown Error], [Unknown Error]",
            "1, [N/A], [N/A]",
            "1, ERR!, ERR!",
            "1, ",
            "1",
            "1, GPU-x, Default, extra",
            "1, MIG-1a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c41, Default",
            "1, GPU-\u{fffd}, Default",
            "[GPU is lost], [GPU is lost], [GPU is lost]",
            "Unable to determine the device handle for GPU0000:81:00.0: Unknown Error",
        ] {
            let output = format!("0, {A}, Default\n{bad}\n2, {B}, Default\n");
            assert_eq!(
                usable(&output),
                [(0, A.to_owned()), (2, B.to_owned())],
                "{bad}"
            );
            let (gpus, messages) = rows(&output);
            assert_eq!(gpus.len(), 3, "{bad}");
            assert!(messages.is_empty(), "{bad}");
            let Gpu::Unusable { diagnostic, .. } = &gpus[1] else {
                panic!("{bad} is not usable")
            };
            assert!(bad.contains(diagnostic.as_str()), "{bad}");
        }
    }

    #[test]
    fn messages_are_not_gpus() {
        for message in [
            "No devices were found",
            "WARNING: infoROM is corrupted at gpu 0000:B3:00.0",
            "Failed to initialize NVML: Driver/library version mismatch",
            "Treating as warning and moving on.",
        ] {
            let (gpus, messages) = rows(&format!("{message}\n\n0, {A}, Default\n"));
            assert_eq!(gpus.len(), 1, "{message}");
            assert_eq!(messages, [message]);
        }
    }

    #[test]
    fn an_unknown_compute_mode_is_not_taken_for_default() {
        for mode in [
            "[N/A]",
            "[Not Supported]",
            "N/A",
            "[Unknown Error]",
            "[GPU requires reset]",
        ] {
            let (gpus, _) = rows(&format!("0, {A}, {mode}"));
            let [Gpu::Usable { compute_mode, .. }] = gpus.as_slice() else {
                panic!("the GPU is usable")
            };
            assert_eq!(*compute_mode, ComputeMode::Unknown(mode.to_owned()));
        }
    }

    #[test]
    fn a_failed_call_without_a_gpu_is_a_failure_and_quotes_what_was_said() {
        let text = "Failed to initialize NVML: Driver/library version mismatch";
        let failure = read(PathBuf::from("/bin/nvidia-smi"), &finished(18, text, "")).unwrap_err();
        assert!(failure.to_string().ends_with(text));
    }

    #[test]
    fn a_failed_call_that_listed_gpus_is_a_list_with_a_message() {
        let output = format!("0, {A}, Default\nWARNING: infoROM is corrupted at gpu 0000:B3:00.0");
        let found = read(PathBuf::from("/bin/nvidia-smi"), &finished(14, &output, "")).unwrap();
        assert_eq!(found.gpus.len(), 1);
        assert_eq!(
            found.messages,
            [
                "WARNING: infoROM is corrupted at gpu 0000:B3:00.0",
                "nvidia-smi ended with status 14"
            ]
        );
    }
}
