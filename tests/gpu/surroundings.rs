//! What a machine must have to be tested on, and what nvidia-smi says of it.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Failed;

use crate::machine::within;

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

/// The rows that nvidia-smi prints, in their cells.
fn smi(args: &[&str]) -> Result<Vec<Vec<String>>, Failed> {
    let mut command = Command::new("nvidia-smi");
    command.args(args);
    let output = within(Duration::from_secs(60), command)?;
    crate::machine::expect(output.status.success(), &output)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let cells = |row: &str| row.split(',').map(|cell| cell.trim().to_owned()).collect();
    Ok(text.lines().map(cells).collect())
}

fn no_program(program: &str) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|directory| directory.join(program).exists());
    (!is_there).then(|| format!("{program} is not on PATH"))
}
