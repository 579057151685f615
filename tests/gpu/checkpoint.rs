//! Programs leave their GPU and come back, and compute on as if nothing had happened.

use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use libtest_mimic::Failed;
use serde_json::Value;

use crate::machine::{Machine, text, wait_until};
use crate::running::Program;
use crate::{Outcome, Test, pattern, surroundings};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_program_that_could_be_suspended_is_ready",
        a_program_that_could_be_suspended_is_ready,
    ),
    (
        "a_suspended_program_frees_its_gpu_and_computes_on_afterwards",
        a_suspended_program_frees_its_gpu_and_computes_on_afterwards,
    ),
    (
        "single_steps_lead_there_and_back",
        single_steps_lead_there_and_back,
    ),
    (
        "a_step_from_the_wrong_state_is_refused",
        a_step_from_the_wrong_state_is_refused,
    ),
    (
        "a_call_of_a_suspended_program_waits_for_its_resumption",
        a_call_of_a_suspended_program_waits_for_its_resumption,
    ),
    (
        "two_programs_are_suspended_and_resumed_together",
        two_programs_are_suspended_and_resumed_together,
    ),
    (
        "a_program_and_a_process_without_cuda_stay_as_they_are",
        a_program_and_a_process_without_cuda_stay_as_they_are,
    ),
];

/// The state that a command says it has brought each process to.
fn after(answer: &Value) -> Result<Vec<String>, Failed> {
    let processes = answer["processes"].as_array().ok_or("no processes")?;
    processes.iter().map(|it| text(&it["after"])).collect()
}

fn expect_after(answer: &Value, states: &[&str]) -> Outcome {
    match after(answer)? == states {
        true => Ok(()),
        false => Err(format!("not {states:?}: {answer}").into()),
    }
}

fn expect_state(machine: &Machine, program: &Program, expected: &str) -> Outcome {
    let state = machine.state(program.pid())?;
    match state == expected {
        true => Ok(()),
        false => Err(format!("the program is {state}, not {expected}").into()),
    }
}

fn a_program_that_could_be_suspended_is_ready() -> Outcome {
    let machine = Machine::new()?;
    let program = Program::start(&machine, 1)?;
    let found = machine.checkpoint(0, &["check", "--pid", program.pid()])?;
    let is_running = found["processes"][0]["state"] == "running";
    match found["ready"] == true && is_running {
        true => expect_state(&machine, &program, "running"),
        false => Err(found.to_string().into()),
    }
}

fn a_suspended_program_frees_its_gpu_and_computes_on_afterwards() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 2)?;
    program.step()?;
    let before = surroundings::used_mib()?;
    let is_listed = !surroundings::gpus_of(program.pid())?.is_empty();

    let answer = machine.checkpoint(0, &["suspend", "--pid", program.pid()])?;
    expect_after(&answer, &["checkpointed"])?;
    expect_state(&machine, &program, "checkpointed")?;
    let is_free = || Ok(surroundings::used_mib()? + pattern::MIB <= before);
    wait_until("the GPU memory is free", Duration::from_secs(10), is_free)?;
    match is_listed {
        true => {
            let is_away = || Ok(surroundings::gpus_of(program.pid())?.is_empty());
            let what = "nvidia-smi does not list the program";
            wait_until(what, Duration::from_secs(10), is_away)?;
        }
        false => eprintln!("nvidia-smi lists no program by our numbers, before or after"),
    }
    let status = machine.run(&["status", "--json"])?;
    let status: Value = serde_json::from_slice(&status.stdout)?;
    let shown = &status["suspended_processes"][0]["pid"];
    if *shown != program.pid().parse::<u32>()? {
        return Err(format!("status does not show it: {status}").into());
    }

    let answer = machine.checkpoint(0, &["resume"])?;
    expect_after(&answer, &["running"])?;
    expect_state(&machine, &program, "running")?;
    program.step()?;
    let is_back = || Ok(surroundings::used_mib()? + pattern::MIB / 2 > before);
    wait_until("the GPU memory is in use", Duration::from_secs(10), is_back)?;
    let memory = program.ask("memory")?;
    let bye = program.ask("exit")?;
    match bye == "bye" && memory.split(' ').count() == 2 {
        true => Ok(()),
        false => Err(format!("{memory}, {bye}").into()),
    }
}

fn single_steps_lead_there_and_back() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 3)?;
    program.step()?;
    let answer = machine.checkpoint(0, &["restore-thread", "--pid", program.pid()])?;
    let thread = answer["restore_thread_id"].to_string();
    let threads = Path::new("/proc").join(program.pid()).join("task");
    if !threads.join(&thread).exists() {
        return Err(format!("the program has no thread {thread}").into());
    }
    for (step, state) in [
        ("lock", "locked"),
        ("checkpoint", "checkpointed"),
        ("restore", "locked"),
        ("unlock", "running"),
        // Not every lock has a checkpoint behind it.
        ("lock", "locked"),
        ("unlock", "running"),
    ] {
        let answer = machine.checkpoint(0, &[step, "--pid", program.pid()])?;
        expect_after(&answer, &[state])?;
        expect_state(&machine, &program, state)?;
    }
    program.step()
}

fn a_step_from_the_wrong_state_is_refused() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 4)?;
    for step in ["checkpoint", "restore"] {
        let answer = machine.checkpoint(1, &[step, "--pid", program.pid()])?;
        if answer["error"]["code"] != "state" {
            return Err(answer.to_string().into());
        }
        expect_state(&machine, &program, "running")?;
    }
    program.step()
}

fn a_call_of_a_suspended_program_waits_for_its_resumption() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 5)?;
    machine.checkpoint(0, &["suspend", "--pid", program.pid()])?;
    program.tell("step")?;
    if !program.is_silent(Duration::from_secs(2)) {
        return Err("the program has said something".into());
    }
    machine.checkpoint(0, &["resume", "--pid", program.pid()])?;
    program.stepped()?;
    program.step()
}

fn two_programs_are_suspended_and_resumed_together() -> Outcome {
    let machine = Machine::new()?;
    let mut one = Program::start(&machine, 6)?;
    let mut other = Program::start(&machine, 7)?;
    let both = format!("{},{}", one.pid(), other.pid());
    let answer = machine.checkpoint(0, &["suspend", "--pid", &both])?;
    expect_after(&answer, &["checkpointed", "checkpointed"])?;
    let answer = machine.checkpoint(0, &["resume", "--all"])?;
    expect_after(&answer, &["running", "running"])?;
    for program in [&mut one, &mut other] {
        program.step()?;
        program.step()?;
    }
    Ok(())
}

/// A process that does nothing; it ends with the test.
pub(crate) struct Sleeper(Child);

impl Sleeper {
    pub(crate) fn start() -> Result<Self, Failed> {
        Ok(Self(Command::new("sleep").arg("300").spawn()?))
    }

    pub(crate) fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_program_and_a_process_without_cuda_stay_as_they_are() -> Outcome {
    let machine = Machine::new()?;
    let sleeper = Sleeper::start()?;
    let found = machine.checkpoint(1, &["check", "--pid", &sleeper.pid()])?;
    if found["blockers"][0]["id"] != "not-cuda" {
        return Err(found.to_string().into());
    }
    let mut program = Program::start(&machine, 8)?;
    let both = format!("{},{}", program.pid(), sleeper.pid());
    let answer = machine.checkpoint(1, &["suspend", "--pid", &both])?;
    if answer["error"]["code"] != "not-cuda" {
        return Err(answer.to_string().into());
    }
    expect_state(&machine, &program, "running")?;
    program.step()
}
