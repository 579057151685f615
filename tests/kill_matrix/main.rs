//! uni-cumps ended at every system call that matters, on disks that fail, and many at once. Whatever moment it ends at,
//! no daemon is left that neither a record nor an intent speaks of, no record claims a stranger, and the next
//! `status`, `start` and `stop` put everything right.
//!
//! `strace` ends the binary with SIGKILL before its N-th call, or makes that call fail; where there is no strace, those
//! rows are left out and the last lines say so. NVIDIA's control program is used where `tests/real_daemon/fetch` has
//! unpacked it, and a stand-in otherwise. `UNI_CUMPS_NIGHTLY=1` takes ten times the rounds, all drivers, and every single
//! call; `UNI_CUMPS_SEED` repeats the dice of another run.

#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod disk;
mod killed;
mod races;
mod surroundings;
mod suspended;
mod trace;
mod world;

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;

use libtest_mimic::{Arguments, Failed, Trial};

/// One row of the matrix. It returns its figures.
pub(crate) type Row = (&'static str, Needs, fn(&Driver) -> String);

/// What a row cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    /// strace, and the right to trace.
    Strace,
    /// The right to enter namespaces.
    Root,
}

/// A control program: NVIDIA's of one driver, or the stand-in.
#[derive(Clone, Debug)]
pub(crate) struct Driver(Option<PathBuf>);

impl Driver {
    pub(crate) fn machine(&self) -> support::Sandbox {
        match &self.0 {
            Some(directory) => support::Sandbox::with_real_control(directory, 1),
            None => support::Sandbox::new(),
        }
    }
}

/// Whether this is the long run.
pub(crate) fn nightly() -> bool {
    std::env::var_os("UNI_CUMPS_NIGHTLY").is_some_and(|value| value != "0")
}

/// How many rounds to go: so many in every build, ten times as many in the long run.
pub(crate) fn rounds(usual: usize) -> usize {
    if nightly() { 10 * usual } else { usual }
}

fn unpacked(driver: &str) -> Option<PathBuf> {
    let directory = support::target().join("mps").join(driver);
    directory
        .join("usr/bin/nvidia-cuda-mps-control")
        .exists()
        .then_some(directory)
}

/// The control programs to use, with their names, the usual one first.
fn drivers() -> Vec<(&'static str, Driver)> {
    let mut drivers: Vec<_> = ["550", "535", "555"]
        .into_iter()
        .filter_map(|name| Some((name, Driver(Some(unpacked(name)?)))))
        .collect();
    if drivers.is_empty() || nightly() {
        drivers.push(("stand-in", Driver(None)));
    }
    drivers
}

thread_local! {
    static PANICKED_AT: RefCell<String> = RefCell::default();
}

/// What a panic said, and where.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let place = PANICKED_AT.with(RefCell::take);
        format!("{} ({place})", text.unwrap_or("it panicked"))
    })
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        PANICKED_AT.with(|at| at.replace(place.unwrap_or_default()));
    }));
    let mut arguments = Arguments::from_args();
    // A row mostly waits: for the disk, for programs, for the end of processes.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    arguments.test_threads.get_or_insert(3 * cores);
    let figures: &'static Mutex<Vec<String>> = Box::leak(Box::default());
    let no_strace = trace::missing();
    let is_root = support::our_uid() == 0;
    let mut left_out = 0;
    let mut trials = Vec::new();
    for (number, (driver_name, driver)) in drivers().into_iter().enumerate() {
        let mut rows: Vec<Row> = races::ROWS.to_vec();
        if number == 0 || nightly() {
            rows.extend(
                [
                    killed::ROWS,
                    disk::ROWS,
                    surroundings::ROWS,
                    suspended::ROWS,
                ]
                .concat(),
            );
        }
        // 555 is for the long run.
        if driver_name == "555" && !nightly() {
            continue;
        }
        for (name, needs, row) in rows {
            let possible = match needs {
                Needs::Nothing => true,
                Needs::Strace => no_strace.is_none(),
                Needs::Root => is_root,
            };
            left_out += usize::from(!possible && needs == Needs::Strace);
            let driver = driver.clone();
            let trial = Trial::test(format!("{driver_name}::{name}"), move || {
                let begun = std::time::Instant::now();
                let line = caught(|| row(&driver)).map_err(Failed::from)?;
                let seconds = begun.elapsed().as_secs_f64();
                let line = format!("{driver_name}::{name}: {line} ({seconds:.1} s)");
                figures.lock().unwrap().push(line);
                Ok(())
            });
            trials.push(trial.with_ignored_flag(!possible));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    if !arguments.list {
        for line in figures.lock().unwrap().iter() {
            eprintln!("{line}");
        }
        if let Some(reason) = no_strace
            && left_out > 0
        {
            eprintln!("skipped: {left_out} rows of the kill matrix, since {reason}");
        }
        if !is_root {
            eprintln!("skipped: full and read-only disks and other host names, which need root");
        }
    }
    conclusion.exit_code()
}
