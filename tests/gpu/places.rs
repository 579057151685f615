//! A program comes back on another GPU than the one it left.

use std::process::Output;

use libtest_mimic::Failed;
use serde_json::Value;

use crate::machine::{Machine, expect};
use crate::running::Program;
use crate::surroundings::{gpus_of, two_gpus};
use crate::{Outcome, Test};

pub(crate) const TESTS: &[Test] = &[(
    "a_program_comes_back_on_another_gpu",
    a_program_comes_back_on_another_gpu,
)];

fn a_program_comes_back_on_another_gpu() -> Outcome {
    let [first, other] = two_gpus()?;
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 21)?;
    program.step()?;
    is_on(&mut program, &first)?;
    let output = go(&machine, &program, &first, &other)?;
    let answer: Value = serde_json::from_slice(&output.stdout)?;
    if answer["error"]["code"] == "gpu-map-refused" {
        // Some hardware does (NVBug 5437334). Then the program must run where it was.
        eprintln!("the driver refuses the other GPU: {answer}");
        expect(machine.state(program.pid())? == "running", &output)?;
        program.step()?;
        return is_on(&mut program, &first);
    }
    expect(output.status.success(), &output)?;
    program.step()?;
    is_on(&mut program, &other)?;
    let output = go(&machine, &program, &other, &first)?;
    expect(output.status.success(), &output)?;
    program.step()?;
    is_on(&mut program, &first)
}

/// Takes a program off one GPU, and has it come back on another.
fn go(machine: &Machine, program: &Program, from: &str, to: &str) -> Result<Output, Failed> {
    let is_listed = !gpus_of(program.pid())?.is_empty();
    machine.checkpoint(0, &["suspend", "--pid", program.pid()])?;
    // What nvidia-smi does not list uni-cumps does not know the GPU of.
    let pair = format!("{from}={to}");
    let target = match is_listed {
        true => ["--to", to],
        false => ["--gpu-map", &pair],
    };
    let resume = ["resume", "--pid", program.pid()];
    machine.checkpoint_output(&[&resume[..], &target].concat())
}

/// The program says that it is on this GPU, and so does nvidia-smi if it lists the program.
fn is_on(program: &mut Program, gpu: &str) -> Outcome {
    let said = program.ask("uuid")?;
    let listed = gpus_of(program.pid())?;
    match said == gpu && listed.iter().all(|listed| listed == gpu) {
        true => Ok(()),
        false => {
            Err(format!("not on {gpu}: the program says {said}, nvidia-smi {listed:?}").into())
        }
    }
}
