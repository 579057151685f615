//! What happens in the middle of a suspension: work that takes long, and the end of uni-cumps.

use std::process::Stdio;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use uni_cumps::cli::CALL_COMMAND;

use crate::machine::{Machine, ended, expect, wait_until};
use crate::running::Program;
use crate::{Outcome, Test};

pub(crate) const TESTS: &[Test] = &[
    (
        "work_that_takes_too_long_is_not_suspended_and_runs_on",
        work_that_takes_too_long_is_not_suspended_and_runs_on,
    ),
    (
        "work_that_ends_in_time_is_waited_for",
        work_that_ends_in_time_is_waited_for,
    ),
    (
        "a_uni_cumps_that_is_killed_in_a_lock_leaves_nothing_locked",
        killed_in_a_lock,
    ),
    (
        "a_uni_cumps_that_is_killed_in_a_checkpoint_leaves_nothing_locked",
        killed_in_a_checkpoint,
    ),
];

/// How many seconds of work are too many.
const BUSY: u32 = 10;

fn work_that_takes_too_long_is_not_suspended_and_runs_on() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 11)?;
    program.spin(BUSY)?;
    let begun = Instant::now();
    let arguments = ["suspend", "--pid", program.pid(), "--timeout", "0.5"];
    let output = machine.checkpoint_output(&arguments)?;
    let took = begun.elapsed();
    expect(output.status.code() == Some(1), &output)?;
    if took > Duration::from_secs(BUSY.into()) {
        return Err(format!("it took {took:?} to give up").into());
    }
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    eprintln!("after {took:?}: {answer}");
    let is_untouched = answer["left_in"].as_array().is_some_and(Vec::is_empty);
    expect(
        answer["error"]["code"] == "checkpoint-failed" && is_untouched,
        &output,
    )?;
    program.stepped()?;
    // Nothing of it is left to be in the way of the next.
    machine.checkpoint(0, &["suspend", "--pid", program.pid()])?;
    machine.checkpoint(0, &["resume", "--pid", program.pid()])?;
    program.step()
}

fn work_that_ends_in_time_is_waited_for() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 12)?;
    program.spin(2)?;
    machine.checkpoint(0, &["suspend", "--pid", program.pid(), "--timeout", "20"])?;
    machine.checkpoint(0, &["resume", "--pid", program.pid()])?;
    program.stepped()?;
    program.step()
}

fn killed_in_a_lock() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 13)?;
    // The lock waits for it, and so is there to be killed beside.
    program.spin(4)?;
    killed_in("lock", &machine, &program)?;
    program.stepped()?;
    program.step()
}

fn killed_in_a_checkpoint() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 14)?;
    program.step()?;
    killed_in("checkpoint", &machine, &program)?;
    program.step()
}

/// Kills a suspension as soon as its child is there that makes this call. The child must see to it that the process does
/// not stay locked; whatever else it has come to, it runs after a resumption.
fn killed_in(call: &str, machine: &Machine, program: &Program) -> Outcome {
    let pid = program.pid();
    let mut suspend = machine.command(&["checkpoint", "suspend", "--pid", pid, "--timeout", "30"]);
    let mut suspend = suspend
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let deadline = Instant::now() + Duration::from_secs(30);
    let child = loop {
        if let Some(child) = caller(call, pid)? {
            break Some(child);
        }
        if suspend.try_wait()?.is_some() || Instant::now() > deadline {
            break None;
        }
    };
    suspend.kill()?;
    ended(&mut suspend, Duration::from_secs(5))?;
    let Some(child) = child else {
        return Err(format!("no child was seen that makes the {call}").into());
    };
    let is_gone = || Ok(caller(call, pid)? != Some(child));
    wait_until("the child has ended", Duration::from_secs(60), is_gone)?;
    let state = machine.state(pid)?;
    eprintln!("killed in the {call}: the program is {state}");
    if !["running", "checkpointed"].contains(&state.as_str()) {
        return Err(format!("the program is left {state}").into());
    }
    machine.checkpoint(0, &["resume", "--pid", pid])?;
    match machine.state(pid)?.as_str() {
        "running" => Ok(()),
        other => Err(format!("the program is {other} after its resumption").into()),
    }
}

/// The child of uni-cumps that makes a call of the driver about this process.
fn caller(call: &str, pid: &str) -> Result<Option<u32>, Failed> {
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Who has ended meanwhile is nobody.
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let wanted = [CALL_COMMAND, call, pid].map(str::as_bytes);
        if words.get(1..4) == Some(&wanted[..]) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
