//! The real binary on a real GPU, with the machine's own driver. Where something is missing, the tests that need it are
//! ignored, with the reason on the last lines.
//!
//! They need no compiler: on a machine without Rust, `tests/gpu/run` runs the built test binary and the built
//! `uni-cumps`. The programs that compute on the GPU are the test binary itself, called with a variable.

mod checkpoint;
mod facts;
mod machine;
mod moments;
mod pattern;
mod places;
mod program;
mod running;
mod sharing;
mod surroundings;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

type Outcome = Result<(), Failed>;
type Test = (&'static str, fn() -> Outcome);

/// Tests that need the same.
struct Group {
    what: &'static str,
    tests: Vec<Test>,
    /// Why they cannot run here.
    missing: Option<String>,
}

fn main() -> ExitCode {
    if let Some(seed) = program::asked() {
        return program::run(seed);
    }
    let mut arguments = Arguments::from_args();
    // They share one GPU and look at its memory.
    arguments.test_threads.get_or_insert(1);
    let groups = groups();
    let trials = groups.iter().flat_map(|group| {
        let is_ignored = group.missing.is_some();
        let trial =
            move |&(name, test): &Test| Trial::test(name, test).with_ignored_flag(is_ignored);
        group.tests.iter().map(trial)
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    for Group { what, missing, .. } in &groups {
        if let Some(missing) = missing {
            eprintln!("skipped: {what}, since {missing}");
        }
    }
    conclusion.exit_code()
}

fn groups() -> [Group; 6] {
    let gpu = surroundings::no_gpu();
    let daemon = gpu.clone().or_else(surroundings::no_daemon);
    let checkpoint = gpu.or_else(surroundings::no_checkpoint);
    let both = daemon.clone().or_else(|| checkpoint.clone());
    let another = checkpoint
        .clone()
        .or_else(|| surroundings::two_gpus().err());
    let group = |what, tests: &[&[Test]], missing| Group {
        what,
        tests: tests.concat(),
        missing,
    };
    [
        group("the arithmetic", &[pattern::TESTS], None),
        group(
            "the tests of programs that share a GPU",
            &[sharing::TESTS],
            daemon,
        ),
        group(
            "the tests of checkpoints",
            &[checkpoint::TESTS, moments::TESTS],
            checkpoint.clone(),
        ),
        group(
            "the test of a checkpoint of a program that shares a GPU",
            &[sharing::CHECKPOINT_TESTS],
            both,
        ),
        group("the test with another GPU", &[places::TESTS], another),
        // The last, since it may leave the GPU in disorder.
        group("the facts", &[facts::TESTS], checkpoint),
    ]
}
