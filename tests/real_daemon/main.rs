//! The real binary against NVIDIA's own control daemon, which runs without a GPU. `tests/real_daemon/fetch` unpacks the
//! drivers' control programs; a driver that is not there is skipped with its reason on the last lines, or is a failure
//! where `UNI_CUMPS_REAL_DAEMON=required` says so.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod bounded_stop;
mod checkpoint;
mod clients;
mod lifecycle;
mod limits;
mod logs;
mod run;
mod several_gpus;
mod surroundings;
mod trouble;
mod two_users;
mod wait;

use std::path::PathBuf;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

/// The drivers that are looked for. 535 writes no pid file; 550 and 555 do.
const DRIVERS: [&str; 3] = ["535", "550", "555"];
/// Debian has 555 only in experimental, so it may go away.
const REQUIRED: [&str; 2] = ["535", "550"];

type Test = (&'static str, fn(&Driver));

/// An unpacked driver.
pub(crate) struct Driver {
    directory: PathBuf,
}

impl Driver {
    pub(crate) fn machine(&self) -> support::Sandbox {
        support::Sandbox::with_real_control(&self.directory, 1)
    }

    /// Its branch.
    pub(crate) fn name(&self) -> &str {
        self.directory.file_name().unwrap().to_str().unwrap()
    }

    /// Whether this driver's daemon writes a pid file.
    pub(crate) fn writes_pid_file(&self) -> bool {
        self.name() != "535"
    }
}

fn unpacked() -> PathBuf {
    support::target().join("mps")
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let required =
        std::env::var_os("UNI_CUMPS_REAL_DAEMON").is_some_and(|value| value == "required");
    let tests: Vec<Test> = [
        bounded_stop::TESTS,
        checkpoint::TESTS,
        clients::TESTS,
        lifecycle::TESTS,
        limits::TESTS,
        logs::TESTS,
        run::TESTS,
        several_gpus::TESTS,
        surroundings::TESTS,
        trouble::TESTS,
        two_users::TESTS,
        wait::TESTS,
    ]
    .concat();
    let mut trials = Vec::new();
    let mut skipped = Vec::new();
    for driver in DRIVERS {
        let directory = unpacked().join(driver);
        let present = directory.join("usr/bin/nvidia-cuda-mps-control").exists();
        if !present && required && REQUIRED.contains(&driver) {
            trials.push(Trial::test(format!("{driver}::is_unpacked"), || {
                Err(Failed::from("not there: run tests/real_daemon/fetch"))
            }));
            continue;
        }
        if !present {
            skipped.push(driver);
        }
        for &(name, test) in &tests {
            let directory = directory.clone();
            let trial = Trial::test(format!("{driver}::{name}"), move || {
                test(&Driver { directory });
                Ok(())
            });
            trials.push(trial.with_ignored_flag(!present));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let reasons = std::fs::read_to_string(unpacked().join("missing")).unwrap_or_default();
    for driver in skipped {
        eprintln!(
            "skipped: the tests with NVIDIA's control program of driver {driver}, since target/mps/{driver} is not there; \
             tests/real_daemon/fetch unpacks it where Debian's packages can be had"
        );
    }
    for reason in reasons.lines() {
        eprintln!("skipped: {reason}");
    }
    conclusion.exit_code()
}
