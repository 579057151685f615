//! What the control program says, session after session, parted by `\xff`: a question has an answer or a failure, and
//! an end. The first byte of a session is its exit status, and a tab stands for the made-up word of the question.
#![no_main]

mod machine;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use uni_cumps::mps::{CONTROL, Control};
use uni_cumps::runner::{CommandRunner, Finished, Invocation, RunError, Status};

const LIMIT: Duration = Duration::from_secs(10);

/// The sessions that are still to come, last first.
struct Program(Mutex<Vec<Vec<u8>>>);

impl CommandRunner for Program {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        let input = String::from_utf8_lossy(&call.stdin);
        let marker = input.lines().find(|line| line.starts_with("uni-cumps-"));
        let marker = marker.expect("every session carries one");
        let session = self
            .0
            .lock()
            .unwrap()
            .pop()
            .ok_or(RunError::TimedOut(LIMIT))?;
        let (code, said) = session.split_first().unwrap_or((&0, &[]));
        let said = String::from_utf8_lossy(said).replace('\t', marker);
        Ok(Finished {
            status: Status::Exited(i32::from(*code)),
            stdout: said.clone(),
            stderr: said,
            process_group: 0,
        })
    }
}

fn install_program() {
    let program = machine::root().join("bin").join(CONTROL);
    fs::write(&program, "").unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
}

fuzz_target!(init: install_program(), |said: &[u8]| {
    let mut sessions: Vec<Vec<u8>> = said
        .split(|byte| *byte == 0xff)
        .map(<[u8]>::to_vec)
        .collect();
    sessions.reverse();
    let host = machine::host(Program(Mutex::new(sessions)));
    let control = Control::find(&host, Path::new("/pipe"), Path::new("/log")).unwrap();
    for answer in [control.quit(LIMIT), control.ask("what is it", LIMIT)] {
        match answer {
            Ok(text) => assert_eq!(text.trim(), text),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
    let _ = control.servers(LIMIT);
    assert!(host.clock.monotonic() <= 3 * LIMIT);
});
