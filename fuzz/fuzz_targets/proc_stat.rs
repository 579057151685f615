//! `/proc/<pid>/stat`: any line is that of a process or of none.
#![no_main]

mod machine;

use std::fs;

use libfuzzer_sys::fuzz_target;
use uni_cumps::process;
use uni_cumps::runner::{CommandRunner, Finished, Invocation, RunError};

struct NoPrograms;

impl CommandRunner for NoPrograms {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        panic!("nobody expected {call:?}")
    }
}

fuzz_target!(|line: &[u8]| {
    let file = machine::root().join("proc/42/stat");
    // Some file systems wait for the disk where a file is written over.
    let _ = fs::remove_file(&file);
    fs::write(file, line).unwrap();
    let host = machine::host(NoPrograms);
    if let Some(process) = process::running(&host, 42) {
        assert_eq!(process.id.pid, 42);
        assert_eq!(process::still_running(&host, process.id), Some(process));
    }
});
