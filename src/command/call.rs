//! The hidden command that makes one checkpoint call of the CUDA driver and prints what came of it, for the process that
//! called it. Signals do not end it: an interrupted call leaves driver and process apart.

use crate::checkpoint::{Call, ProcessState};
use crate::cli::CallArgs;
use crate::driver::{Checkpointer, DriverFailure};
use crate::error::Error;
use crate::process;
use crate::runner::hold_every_signal;
use crate::ui::Ui;

pub(super) fn run(ui: &mut Ui<'_>, args: &CallArgs) -> Result<u8, Error> {
    let _held = hold_every_signal();
    let result = Checkpointer::open().and_then(|driver| {
        let result = driver.call(args.pid, &args.call());
        if changes(&args.call()) && process::our_parent() != Some(args.parent) {
            // Who called us was killed, and nobody else will look after the process.
            let_run(&driver, args.pid)?;
        }
        result
    });
    // Plain data, which always has a JSON form.
    ui.json(&serde_json::to_value(result).unwrap_or_default());
    Ok(0)
}

fn changes(call: &Call) -> bool {
    !matches!(call, Call::Version | Call::State | Call::RestoreThread)
}

fn let_run(driver: &Checkpointer, pid: i32) -> Result<(), DriverFailure> {
    let state = |driver: &Checkpointer| driver.call(pid, &Call::State).map(ProcessState);
    if state(driver)? == ProcessState::CHECKPOINTED {
        driver.call(pid, &Call::Restore(None))?;
    }
    if state(driver)? == ProcessState::LOCKED {
        driver.call(pid, &Call::Unlock)?;
    }
    Ok(())
}
