//! What a machine must have to be tested on, and what nvidia-smi says of it.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Failed;
use serde_json::Value;

use crate::machine::{Machine, within};

/// The branch of drivers that brought the restore on another GPU.
const REMAP: u32 = 580;

/// Why there is no GPU.
pub(crate) fn no_gpu() -> Option<String> {
    no_program("nvidia-smi").or_else(|| match smi(&["-L"]) {
        Ok(rows) if !rows.is_empty() => None,
        _ => Some("nvidia-smi lists no GPU".to_owned()),
    })
}

/// Why no daemon can be started.
pub(crate) fn no_daemon() -> Option<String> {
    no_program("nvidia-cuda-mps-control")
}

/// Why the driver cannot take a process off its GPU. It is asked about this process, which does not use CUDA: a driver that
/// can says so.
pub(crate) fn no_checkpoint() -> Option<String> {
    let us = std::process::id().to_string();
    let asked = || {
        let output = Machine::new()?.checkpoint_output(&["state", "--pid", &us])?;
        Ok::<Value, Failed>(serde_json::from_slice(&output.stdout)?)
    };
    match asked() {
        Ok(answer) => {
            let error = &answer["error"];
            let is_missing = error["code"] == "driver-too-old" || error["code"] == "no-driver";
            is_missing.then(|| {
                error["message"]
                    .as_str()
                    .map_or_else(|| error.to_string(), str::to_owned)
            })
        }
        Err(failed) => Some(failed.message().unwrap_or_default().to_owned()),
    }
}

/// The UUIDs of the first GPU and of another one of its model, or why there are none.
pub(crate) fn two_gpus() -> Result<[String; 2], String> {
    let failed = |failed: Failed| failed.message().unwrap_or_default().to_owned();
    let rows = smi(&[
        "--query-gpu=driver_version,name,uuid,mig.mode.current",
        "--format=csv,noheader",
    ]);
    let rows: Vec<[String; 4]> = rows
        .map_err(failed)?
        .into_iter()
        .filter_map(|row| <[String; 4]>::try_from(row).ok())
        .filter(|[_, _, _, mig]| mig != "Enabled")
        .collect();
    let [version, model, first, _] = rows.first().ok_or("nvidia-smi lists no GPU")?;
    let branch = version
        .split('.')
        .next()
        .and_then(|branch| branch.parse().ok());
    if branch.is_none_or(|branch: u32| branch < REMAP) {
        return Err(format!(
            "the driver is {version}, and another GPU needs {REMAP}"
        ));
    }
    let other = rows.iter().skip(1).find(|[_, name, _, _]| name == model);
    let [_, _, other, _] = other.ok_or_else(|| format!("there is no second {model}"))?;
    Ok([first.clone(), other.clone()])
}

/// The rows that nvidia-smi prints, in their cells.
pub(crate) fn smi(args: &[&str]) -> Result<Vec<Vec<String>>, Failed> {
    let mut command = Command::new("nvidia-smi");
    command.args(args);
    let output = within(Duration::from_secs(60), command)?;
    crate::machine::expect(output.status.success(), &output)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let cells = |row: &str| row.split(',').map(|cell| cell.trim().to_owned()).collect();
    Ok(text.lines().map(cells).collect())
}

/// One cell about the first GPU.
pub(crate) fn of_first_gpu(field: &str) -> Result<String, Failed> {
    let query = format!("--query-gpu={field}");
    let rows = smi(&[&query, "--format=csv,noheader,nounits", "--id=0"])?;
    let cell = rows.into_iter().flatten().next();
    cell.ok_or_else(|| format!("nvidia-smi does not say {field}").into())
}

/// How much memory of the first GPU is in use, in MiB.
pub(crate) fn used_mib() -> Result<u64, Failed> {
    let cell = of_first_gpu("memory.used")?;
    cell.parse()
        .map_err(|_| format!("{cell} is no memory").into())
}

/// The GPUs on which nvidia-smi lists a process. In a container it may list none, or by other numbers.
pub(crate) fn gpus_of(pid: &str) -> Result<Vec<String>, Failed> {
    let rows = smi(&["--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"])?;
    let pair = |row: Vec<String>| <[String; 2]>::try_from(row).ok();
    let rows = rows.into_iter().filter_map(pair);
    Ok(rows
        .filter(|[listed, _]| listed == pid)
        .map(|[_, gpu]| gpu)
        .collect())
}

fn no_program(program: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|directory| directory.join(program).exists());
    (!is_there).then(|| format!("{program} is not on PATH"))
}
