//! The hidden command that makes one checkpoint call of the CUDA driver and prints what came of it, for the process that
//! called it. Signals do not end it: an interrupted call leaves driver and process apart.

use crate::checkpoint::{Call, ProcessState};
use crate::cli::CallArgs;
use crate::driver::{Checkpointer, DriverFailure};
use crate::error::Error;
use crate::host::Host;
use crate::process;
use crate::runner::hold_every_signal;
use crate::runtime_dir;
use crate::ui::Ui;

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &CallArgs) -> Result<u8, Error> {
    let _held = hold_every_signal();
    let call = args.call();
    let is_alone = || process::our_parent() != Some(args.parent);
    if call.acts() && is_alone() {
        // Nobody waits any more, so nothing is begun.
        return Ok(0);
    }
    let result = Checkpointer::open().and_then(|driver| {
        let result = driver.call(args.pid, &call);
        if call.acts() && is_alone() {
            // Who called us was killed, and nobody else will look after the processes.
            let_run(host, &driver, args);
        }
        result
    });
    // Plain data, which always has a JSON form.
    ui.json(&serde_json::to_value(result).unwrap_or_default());
    Ok(0)
}

fn let_run(host: &Host, driver: &Checkpointer, args: &CallArgs) {
    for touched in &args.touched {
        if process::still_running(host, *touched).is_some() {
            // There is nobody to tell of a failure. The ledger knows the process.
            let _ = let_one_run(driver, touched.pid);
        }
    }
    runtime_dir::remove_nowhere(host);
}

fn let_one_run(driver: &Checkpointer, pid: i32) -> Result<(), DriverFailure> {
    let state = || driver.call(pid, &Call::State).map(ProcessState);
    if state()? == ProcessState::CHECKPOINTED {
        driver.call(pid, &Call::Restore(None))?;
    }
    if state()? == ProcessState::LOCKED {
        driver.call(pid, &Call::Unlock)?;
    }
    Ok(())
}
