//! Making a daemon's GPUs exclusive, so that only its server computes on them, and giving them back as they were. That
//! takes an administrator; the modes are lost at a reboot (nvidia-smi's manual).

use std::collections::BTreeMap;

use crate::error::{Error, SmiFailure};
use crate::gpu::{ComputeMode, Device, GpuUuid};
use crate::host::Host;
use crate::nvidia_smi::{self, Discovery};
use crate::ui::Ui;

/// The modes that would be changed to make these devices exclusive, as they are now. A mode that nvidia-smi does not name,
/// or could not set again, stays: that is a note.
pub fn to_change(
    discovery: &Discovery,
    devices: &[Device],
) -> (BTreeMap<GpuUuid, String>, Vec<String>) {
    let mut before = BTreeMap::new();
    let mut notes = Vec::new();
    for gpu in devices.iter().map(Device::gpu) {
        match discovery.compute_mode(gpu) {
            Some(ComputeMode::ExclusiveProcess) => {}
            Some(mode) if mode.argument().is_some() => {
                before.insert(gpu.uuid.clone(), mode.to_string());
            }
            mode => notes.push(format!(
                "the compute mode of GPU {gpu} is {} and stays so: nvidia-smi could not set it again",
                mode.map_or("unknown".to_owned(), ComputeMode::to_string)
            )),
        }
    }
    (before, notes)
}

/// Makes these GPUs exclusive, as far as this user may. What cannot be done is told.
pub fn make_exclusive(
    host: &Host,
    ui: &mut Ui<'_>,
    before: &BTreeMap<GpuUuid, String>,
) -> Result<BTreeMap<GpuUuid, String>, Error> {
    let mut changed = BTreeMap::new();
    for (gpu, mode) in before {
        match set(host, gpu, &ComputeMode::ExclusiveProcess)? {
            Ok(()) => {
                changed.insert(gpu.clone(), mode.clone());
            }
            Err(reason) => ui.note(format!(
                "GPU {gpu} was not made exclusive: {reason}; as administrator: {}",
                command(gpu, &ComputeMode::ExclusiveProcess)
            )),
        }
    }
    Ok(changed)
}

/// Gives GPUs the modes back that they had. One that somebody has changed meanwhile stays. What cannot be done is told.
pub fn restore(
    host: &Host,
    ui: &mut Ui<'_>,
    before: &BTreeMap<GpuUuid, String>,
) -> Result<(), Error> {
    if before.is_empty() {
        return Ok(());
    }
    let found = match nvidia_smi::discover(host) {
        Err(SmiFailure::Interrupted(signal)) => return Err(Error::Interrupted(signal)),
        found => found,
    };
    for (gpu, mode) in before {
        let mode = ComputeMode::from(mode.as_str());
        let failure = match &found {
            Err(failure) => Some(failure.to_string()),
            Ok(found) if found.is_exclusive(gpu) => set(host, gpu, &mode)?.err(),
            Ok(_) => Some("it is not as it was left".to_owned()),
        };
        if let Some(reason) = failure {
            ui.note(format!(
                "GPU {gpu} did not get its compute mode {mode} back: {reason}; as administrator: {}",
                command(gpu, &mode)
            ));
        }
    }
    Ok(())
}

/// Sets a mode and looks whether it is set.
fn set(host: &Host, gpu: &GpuUuid, mode: &ComputeMode) -> Result<Result<(), String>, Error> {
    match nvidia_smi::set_compute_mode(host, gpu, mode) {
        Err(SmiFailure::Interrupted(signal)) => Err(Error::Interrupted(signal)),
        outcome => Ok(outcome.map_err(|failure| failure.to_string())),
    }
}

fn command(gpu: &GpuUuid, mode: &ComputeMode) -> String {
    format!(
        "sudo nvidia-smi -i {gpu} -c {}",
        mode.argument().unwrap_or("DEFAULT")
    )
}
