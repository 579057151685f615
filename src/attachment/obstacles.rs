//! What keeps a program, and what it has started, from being a client of its daemon.

use std::fs;
use std::path::Path;

use crate::daemon::{self, Observed};
use crate::diagnosis::{control_faults, server_faults};
use crate::host::Host;
use crate::mps::log_end;
use crate::process::{self, Running};
use crate::record::DaemonRecord;

/// What keeps a program from being a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

fn obstacle(what: impl Into<String>, remedy: impl Into<String>) -> Obstacle {
    Obstacle {
        what: what.into(),
        remedy: remedy.into(),
    }
}

/// Why none of these processes is a client of the recorded daemon. There is always a reason, if only that none is known.
pub fn obstacles(host: &Host, record: &DaemonRecord, family: &[Running]) -> Vec<Obstacle> {
    let observed = daemon::observe(host, &process::place(host), record.clone());
    let mut found: Vec<Obstacle> = of_daemon(&observed).into_iter().collect();
    found.extend(
        family
            .iter()
            .flat_map(|process| of_process(host, record, process)),
    );
    if !found.is_empty() {
        return found;
    }
    if !family.iter().any(|process| uses_cuda(host, process.id.pid)) {
        return vec![obstacle(
            "none of its processes has loaded the CUDA driver (libcuda.so.1)",
            "if it only takes long to begin, give it more time: --require-mps=SECONDS",
        )];
    }
    let log = |name| log_end(host, &record.log_directory, name).unwrap_or_default();
    let (control, server) = (log("control.log"), log("server.log"));
    let faults = control_faults(&control, &server)
        .into_iter()
        .chain(server_faults(&server, 0));
    found.extend(faults.map(|fault| obstacle(fault.what, fault.remedy)));
    if found.is_empty() {
        found.push(obstacle(
            "it has loaded the CUDA driver and has the daemon's environment; nothing else is known to be wrong",
            "uni-cumps doctor --probe",
        ));
    }
    found
}

fn of_daemon(observed: &Observed) -> Option<Obstacle> {
    let name = &observed.record.name;
    (!observed.state.reachable()).then(|| {
        obstacle(
            format!(
                "the daemon is no longer reachable (state {})",
                observed.state.word()
            ),
            format!("uni-cumps stop --name {name}; uni-cumps start --name {name}"),
        )
    })
}

/// What is wrong with one process, as far as we may look at it.
fn of_process(host: &Host, record: &DaemonRecord, process: &Running) -> Vec<Obstacle> {
    let pid = process.id.pid;
    let name = process::program_name(host, pid).unwrap_or_else(|| "?".to_owned());
    let who = format!("pid {pid} ({name})");
    let mut found = Vec::new();
    if process.stopped {
        found.push(obstacle(
            format!("{who} is stopped"),
            "find out what stops it: a debugger, or reading a terminal in the background (then: </dev/null)",
        ));
    }
    if !daemon::serves(record.uid, process.uid) {
        found.push(obstacle(
            format!(
                "{who} runs as uid {}, and the daemon serves uid {} only",
                process.uid, record.uid
            ),
            "run the whole command as the daemon's user, without sudo",
        ));
    }
    if process::shares_namespace(host, pid, "ipc") == Some(false) {
        found.push(obstacle(
            format!("{who} is in another IPC namespace, such as a container's"),
            "start the container with the flags of uni-cumps env --format docker",
        ));
    }
    if !process::may_be_looked_at(host, pid) {
        return found;
    }
    match process::variable_of(host, pid, "CUDA_MPS_PIPE_DIRECTORY") {
        Some(pipe) if Path::new(&pipe) == record.pipe_directory => {}
        Some(pipe) => found.push(obstacle(
            format!("{who} has CUDA_MPS_PIPE_DIRECTORY={pipe:?}, another daemon's"),
            "find out which wrapper or script sets it",
        )),
        None => found.push(obstacle(
            format!("{who} has lost CUDA_MPS_PIPE_DIRECTORY"),
            "find out which wrapper clears its environment: sudo, env -i, ssh, a container",
        )),
    }
    let mask = process::variable_of(host, pid, "CUDA_VISIBLE_DEVICES");
    if let Some(mask) = mask.filter(|mask| record.is_hidden_by(mask)) {
        found.push(obstacle(
            format!("{who} has CUDA_VISIBLE_DEVICES={mask:?}, which names no GPU of the daemon"),
            "leave CUDA_VISIBLE_DEVICES to uni-cumps",
        ));
    }
    found
}

/// Whether a process has loaded the CUDA driver.
fn uses_cuda(host: &Host, pid: i32) -> bool {
    let maps = fs::read(host.root.at(format!("/proc/{pid}/maps"))).unwrap_or_default();
    maps.split(|byte| *byte == b'\n').any(|line| {
        line.windows(b"/libcuda.so".len())
            .any(|part| part == b"/libcuda.so")
    })
}
