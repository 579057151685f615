//! What nobody has written down, found out on the machine and said in one line each. Nothing of it is a failure.

use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use uni_cumps::cli::CALL_COMMAND;

use crate::checkpoint::Sleeper;
use crate::machine::{Machine, uni_cumps, within};
use crate::running::Program;
use crate::surroundings::{gpus_of, no_daemon, of_first_gpu, used_mib};
use crate::{Outcome, Test};

pub(crate) const TESTS: &[Test] = &[("the_facts_are_told", the_facts_are_told)];

/// `nobody`, on most machines.
const OTHER_UID: u32 = 65534;
const LIMIT: Duration = Duration::from_secs(90);

fn the_facts_are_told() -> Outcome {
    let facts: [Test; 5] = [
        ("the machine", the_machine),
        ("what has no CUDA", what_has_no_cuda),
        ("the times, and a lock without cuInit", the_times),
        ("an ordinary user", an_ordinary_user),
        // The last, since it may leave the GPU in disorder.
        ("a client of a daemon", a_client_of_a_daemon),
    ];
    for (what, find) in facts {
        if let Err(failed) = find() {
            let reason = failed.message().unwrap_or_default();
            tell(&format!("{what} could not be found out: {reason}"));
        }
    }
    Ok(())
}

/// On one line, whatever it is made of.
fn tell(fact: &str) {
    let words: Vec<&str> = fact.split_whitespace().collect();
    eprintln!("fact: {}", words.join(" "));
}

fn the_machine() -> Outcome {
    let persistence = of_first_gpu("persistence_mode")?;
    let (name, driver) = (of_first_gpu("name")?, of_first_gpu("driver_version")?);
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.map_or("none".to_owned(), |scope| scope.trim().to_owned());
    tell(&format!(
        "{name}, driver {driver}, persistence mode {persistence}, uid {}, yama ptrace_scope {scope}",
        our_uid()
    ));
    Ok(())
}

fn our_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// One bare call of the driver, as it came out.
fn call(machine: &Machine, call: &str, pid: &str) -> Result<String, Failed> {
    let parent = std::process::id().to_string();
    let command = machine.command(&[CALL_COMMAND, call, pid, "--parent", &parent]);
    let output = within(LIMIT, command)?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

fn what_has_no_cuda() -> Outcome {
    let machine = Machine::new()?;
    let sleeper = Sleeper::start()?;
    for (what, pid) in [
        ("a process without CUDA", sleeper.pid()),
        ("the process 1", "1".to_owned()),
        // Beyond every limit of the kernel.
        ("no process", "4194305".to_owned()),
    ] {
        let state = call(&machine, "state", &pid)?;
        let thread = call(&machine, "restore-thread", &pid)?;
        tell(&format!(
            "of {what} GetState says {state}, GetRestoreThreadId {thread}"
        ));
    }
    Ok(())
}

/// How a verb of `checkpoint` comes out, and how long it takes.
fn tried(machine: &Machine, args: &[&str]) -> Result<String, Failed> {
    let begun = Instant::now();
    let output = machine.checkpoint_output(args)?;
    let took = begun.elapsed().as_millis();
    let said = match output.status.success() {
        true => String::new(),
        false => format!(": {}", String::from_utf8_lossy(&output.stdout)),
    };
    Ok(format!("{} {} in {took} ms{said}", args[0], output.status))
}

fn the_times() -> Outcome {
    let machine = Machine::new()?;
    let mut program = Program::start(&machine, 31)?;
    let pid = program.pid().to_owned();
    let persistence = of_first_gpu("persistence_mode")?;
    let lock = tried(&machine, &["lock", "--pid", &pid])?;
    let unlock = tried(&machine, &["unlock", "--pid", &pid])?;
    tell(&format!("without cuInit in the caller: {lock}; {unlock}"));
    let (before, listed) = (used_mib()?, gpus_of(&pid)?);
    let suspend = tried(&machine, &["suspend", "--pid", &pid])?;
    let between = used_mib()?;
    let resume = tried(&machine, &["resume", "--pid", &pid])?;
    tell(&format!(
        "with persistence mode {persistence}: {suspend}; {resume}"
    ));
    tell(&format!(
        "the GPU has {before} MiB in use before a suspension, {between} MiB during it, {} MiB after it; nvidia-smi lists the program on {listed:?}",
        used_mib()?
    ));
    tell(&format!("the step after it is {}", worth(&program.step())));
    Ok(())
}

fn worth(outcome: &Outcome) -> String {
    match outcome {
        Ok(()) => "right".to_owned(),
        Err(failed) => format!("wrong: {}", failed.message().unwrap_or_default()),
    }
}

/// Whether a user who is not root may act on a process of his own. As root, a user is made for it.
fn an_ordinary_user() -> Outcome {
    let machine = Machine::new()?;
    let is_root = our_uid() == 0;
    let uid = if is_root { OTHER_UID } else { our_uid() };
    let (test, binary) = match is_root {
        // Where the binaries are he may not read.
        true => (
            lent(&machine, "test", std::env::current_exe()?)?,
            lent(&machine, "uni-cumps", uni_cumps())?,
        ),
        false => (std::env::current_exe()?, uni_cumps()),
    };
    let home = machine.path("home");
    std::fs::create_dir(&home)?;
    if is_root {
        std::fs::set_permissions(machine.path(""), PermissionsExt::from_mode(0o755))?;
        chown(&home, Some(uid), Some(uid))?;
    }
    let as_user = |mut command: Command| {
        command.env("HOME", &home).env("TMPDIR", &home);
        if is_root {
            command.uid(uid).gid(uid);
        }
        command
    };
    let mut program = Program::spawn(as_user(machine.program(&test)), 32)?;
    for verb in ["state", "lock", "checkpoint", "resume"] {
        let mut command = as_user(machine.program(&binary));
        command.args(["checkpoint", verb, "--json", "--pid", program.pid()]);
        let output = within(LIMIT, command)?;
        let said = String::from_utf8_lossy(&output.stdout);
        tell(&format!(
            "uid {uid} about its own process: {verb} {}: {said}",
            output.status
        ));
    }
    tell(&format!("the step after it is {}", worth(&program.step())));
    Ok(())
}

/// A copy of a program that everybody may run.
fn lent(machine: &Machine, name: &str, program: PathBuf) -> Result<PathBuf, Failed> {
    let copy = machine.path(name);
    std::fs::copy(program, &copy)?;
    std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o755))?;
    Ok(copy)
}

fn a_client_of_a_daemon() -> Outcome {
    if let Some(missing) = no_daemon() {
        return Err(missing.into());
    }
    let machine = Machine::start()?;
    let mut program = Program::client(&machine, 33)?;
    let pid = program.pid().to_owned();
    for args in [
        ["state", "--pid", &pid, "", ""],
        ["suspend", "--pid", &pid, "--force", "--timeout=5"],
        ["resume", "--pid", &pid, "", ""],
    ] {
        let words: Vec<&str> = args.into_iter().filter(|word| !word.is_empty()).collect();
        let came_out = tried(&machine, &words)?;
        let (state, thread) = (
            call(&machine, "state", &pid)?,
            call(&machine, "restore-thread", &pid)?,
        );
        tell(&format!(
            "a client of a daemon: {came_out}; then GetState says {state}, GetRestoreThreadId {thread}"
        ));
    }
    tell(&format!("the step after it is {}", worth(&program.step())));
    Ok(())
}
