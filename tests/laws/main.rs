//! Laws: what holds for every input, tried with thousands of made-up ones. A failure prints the smallest input that
//! was found; nothing is kept on disk.
//!
//! `LAWS_TIMES=10` tries ten times as many.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod checkpoint;
mod completions;
mod control;
mod cpus;
mod cuda;
mod env_files;
mod fake;
mod invented;
mod logs;
mod parsers;
mod printing;
mod processes;
mod records;
mod sequences;
mod shells;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseResult, TestRunner};

/// Cases of a law that costs microseconds.
const MANY: u32 = 10_000;

/// Tries a law with `cases` made-up inputs. A panic breaks it as well.
#[track_caller]
fn law<S: Strategy>(cases: u32, inputs: S, holds: impl Fn(S::Value) -> TestCaseResult) {
    let times = std::env::var("LAWS_TIMES").map_or(1, |times| times.parse().unwrap());
    let config = Config {
        failure_persistence: None,
        max_shrink_iters: 4096,
        ..Config::with_cases(cases * times)
    };
    if let Err(broken) = TestRunner::new(config).run(&inputs, holds) {
        panic!("{broken}");
    }
}
