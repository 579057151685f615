//! The hooks in a real Slurm of two nodes on one machine, unpacked from Debian's packages by `tests/slurm/onebox fetch`.
//! The GPUs, nvidia-smi and the control program are stand-ins; where NVIDIA's own control program is unpacked, it is tried
//! as well. Where Slurm is not there, the last lines say so, or `UNI_CUMPS_SLURM=required` makes it a failure.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod accidents;
mod onebox;
mod sharing;
mod without_rights;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use libtest_mimic::{Arguments, Failed, Trial};

use onebox::OneBox;

type Test = (&'static str, fn(&OneBox));

/// Where the packages are unpacked.
fn packages() -> PathBuf {
    support::target().join("slurm")
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // There is one cluster.
    arguments.test_threads = Some(1);
    let tests: Vec<Test> = [sharing::TESTS, accidents::TESTS, without_rights::TESTS].concat();
    let missing = match packages().join("root/usr/sbin/slurmd").exists() {
        false => {
            let reason = std::fs::read_to_string(packages().join("missing")).unwrap_or_default();
            Some(match reason.trim() {
                "" => "there is no Slurm here: sudo tests/slurm/onebox fetch".to_owned(),
                reason => format!("there is no Slurm here: {reason}"),
            })
        }
        true if support::our_uid() != 0 => {
            Some("only root can run a Slurm of several users".into())
        }
        true => None,
    };
    let required = std::env::var_os("UNI_CUMPS_SLURM").is_some_and(|value| value == "required");
    let onebox = match missing.is_none() && !arguments.list {
        true => Some(Arc::new(Mutex::new(OneBox::up()))),
        false => None,
    };
    let trials = tests.into_iter().map(|(name, test)| {
        let onebox = onebox.clone();
        Trial::test(name, move || match &onebox {
            Some(onebox) => {
                // A test that has failed has left something; the next one cleans up before it begins.
                let onebox = onebox.lock().unwrap_or_else(PoisonError::into_inner);
                onebox.begin();
                test(&onebox);
                Ok(())
            }
            None => Err(Failed::without_message()),
        })
        .with_ignored_flag(missing.is_some() && !required)
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    if let Some(missing) = missing {
        support::say(&format!("tests/slurm were skipped: {missing}"));
    }
    conclusion.exit_code()
}
