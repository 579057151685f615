//! The checks. Each sees the facts and nothing else.

use std::cmp::Reverse;

use super::facts::Facts;
use super::logs::{control_faults, explain, server_faults};
use super::{Check, Fault, Status, Wanted};
use crate::checkpoint::version_text;
use crate::daemon::{self, State};
use crate::driver::{DriverFailure, Probe};
use crate::gpu::{ComputeMode, Gpu};
use crate::mps::{self, CONTROL, Keeper, Socket};
use crate::runtime_dir::{NVIDIA_DEFAULT, PIPE_LIMIT};
use crate::shell::quote_path;

/// What a check has to say: its status, one line, and what to type.
pub(super) type Finding = (Status, String, Option<String>);

/// Judges one aspect of the facts.
pub(super) type Judge = fn(&Facts) -> Finding;

/// Every check by its id, in the order in which they are shown.
pub(super) const CHECKS: [(&str, Judge); 25] = [
    ("platform", platform),
    ("nvidia-smi", nvidia_smi),
    ("driver", driver),
    ("cuda-driver", cuda_driver),
    ("gpus", gpus),
    ("compute-mode", compute_mode),
    ("mig", mig),
    ("control-program", control_program),
    ("server-program", server_program),
    ("selection", selection),
    ("record", record),
    ("identity", identity),
    ("pipe-directory", pipe_directory),
    ("socket", socket),
    ("answer", answer),
    ("log-directory", log_directory),
    ("variables", variables),
    ("mask", mask),
    ("default-pipe", default_pipe),
    ("other-daemons", other_daemons),
    ("clients", clients),
    ("logs", logs),
    ("shared-memory", shared_memory),
    ("affinity", affinity),
    ("probe", probe),
];

/// Runs the wanted checks.
pub fn run(facts: &Facts, wanted: Wanted<'_>) -> Vec<Check> {
    CHECKS
        .into_iter()
        .filter(|(id, _)| wanted(id))
        .map(|(id, check)| {
            let (status, evidence, remedy) = check(facts);
            Check {
                id,
                status,
                evidence,
                remedy,
            }
        })
        .collect()
}

fn ok(evidence: impl Into<String>) -> Finding {
    (Status::Ok, evidence.into(), None)
}

fn skip(evidence: impl Into<String>) -> Finding {
    (Status::Skip, evidence.into(), None)
}

fn warn(evidence: impl Into<String>, remedy: impl Into<String>) -> Finding {
    (Status::Warn, evidence.into(), Some(remedy.into()))
}

fn fail(evidence: impl Into<String>, remedy: impl Into<String>) -> Finding {
    (Status::Fail, evidence.into(), Some(remedy.into()))
}

fn platform(facts: &Facts) -> Finding {
    let kernel = &facts.kernel;
    if kernel.to_ascii_lowercase().contains("microsoft") {
        return warn(
            format!("WSL2 ({kernel}), for which NVIDIA documents no MPS"),
            "use Linux on the machine itself",
        );
    }
    match facts.container {
        Some(engine) => ok(format!("Linux {kernel}, in a {engine} container")),
        None => ok(format!("Linux {kernel}")),
    }
}

fn nvidia_smi(facts: &Facts) -> Finding {
    let program = facts.discovery.program.display();
    match facts.discovery.diagnostic() {
        Some(said) => warn(format!("{program} says: {said}"), "nvidia-smi"),
        None => ok(program.to_string()),
    }
}

fn driver(facts: &Facts) -> Finding {
    let Some(version) = &facts.module else {
        return skip("the kernel module's version is not shown here");
    };
    let major = version
        .split('.')
        .next()
        .and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(..535) => warn(
            format!("{version}; older than what uni-cumps was measured with (535)"),
            "update the driver",
        ),
        Some(535..550) => ok(format!(
            "{version}; its control program writes no pid file and lets every user who reaches the sockets change limits"
        )),
        _ => ok(version.clone()),
    }
}

fn cuda_driver(facts: &Facts) -> Finding {
    match &facts.cuda {
        None => skip("not asked"),
        Some(Ok(seen)) => {
            let version = format!("CUDA {}", version_text(seen.driver_version));
            let given = facts.plan.visible_devices();
            if facts.are_shown(seen) {
                let each = seen.devices.iter().map(|device| {
                    format!(
                        "{} with {} multiprocessors",
                        device.uuid, device.multiprocessors
                    )
                });
                let each: Vec<String> = each.collect();
                return ok(format!("{version}; a process sees {}", each.join(", ")));
            }
            match seen.devices.as_slice() {
                [device] => fail(
                    format!(
                        "{version}; a process that is given {given} sees {}",
                        device.uuid
                    ),
                    "nvidia-smi -L",
                ),
                devices => fail(
                    format!(
                        "{version}; a process that is given {} sees {} devices",
                        facts.plan.text(),
                        devices.len()
                    ),
                    "ls -l /dev/nvidia*",
                ),
            }
        }
        Some(Err(DriverFailure::Call { call, code, name })) => {
            let meaning = explain(*code).map_or(String::new(), |text| format!(": {text}"));
            fail(
                format!("{call} failed with CUDA error {code} ({name}){meaning}"),
                "nvidia-smi",
            )
        }
        Some(Err(failure @ DriverFailure::NotOpened(_))) => fail(
            failure.to_string(),
            "install the driver's libcuda.so.1 (Debian: apt install libcuda1), or mount it into the container",
        ),
        Some(Err(failure)) => fail(failure.to_string(), "nvidia-smi"),
    }
}

fn gpus(facts: &Facts) -> Finding {
    let lost: Vec<String> = facts
        .discovery
        .gpus
        .iter()
        .filter_map(|gpu| match gpu {
            Gpu::Unusable { index, diagnostic } => {
                let index = index.map_or("?".to_owned(), |index| index.to_string());
                Some(format!("index {index} is {diagnostic}"))
            }
            Gpu::Usable { .. } => None,
        })
        .collect();
    if lost.is_empty() {
        return ok(format!("{} usable", facts.discovery.gpus.len()));
    }
    warn(
        format!("not all are usable: {}", lost.join("; ")),
        "dmesg | grep -i nvrm",
    )
}

/// The mode of the first GPU whose mode is worth a word, or that of all.
fn compute_mode(facts: &Facts) -> Finding {
    let each = facts.plan.devices.iter().map(|device| {
        let gpu = device.gpu();
        compute_mode_of(facts, gpu.index, facts.discovery.compute_mode(gpu))
    });
    let mut findings: Vec<Finding> = each.collect();
    findings.sort_by_key(|(status, _, remedy)| (Reverse(severity(*status)), remedy.is_none()));
    findings
        .into_iter()
        .next()
        .unwrap_or_else(|| skip("unknown"))
}

fn severity(status: Status) -> u8 {
    match status {
        Status::Ok => 0,
        Status::Skip => 1,
        Status::Warn => 2,
        Status::Fail => 3,
    }
}

fn compute_mode_of(facts: &Facts, index: u32, mode: Option<&ComputeMode>) -> Finding {
    let has_daemon = !facts.running().is_empty();
    match mode {
        Some(ComputeMode::ExclusiveProcess) if has_daemon => {
            ok("Exclusive_Process: only the MPS server computes")
        }
        Some(ComputeMode::ExclusiveProcess) => warn(
            "Exclusive_Process without a daemon: one program at a time",
            format!("uni-cumps start, or as administrator: nvidia-smi -i {index} -c DEFAULT"),
        ),
        Some(ComputeMode::Default) if has_daemon => (
            Status::Ok,
            "Default: programs without the daemon's variables compute beside it".to_owned(),
            Some(format!(
                "as administrator: nvidia-smi -i {index} -c EXCLUSIVE_PROCESS"
            )),
        ),
        Some(ComputeMode::Default) => ok("Default"),
        Some(ComputeMode::ExclusiveThread) => warn(
            "Exclusive_Thread, a mode of old drivers",
            format!("as administrator: nvidia-smi -i {index} -c EXCLUSIVE_PROCESS"),
        ),
        Some(ComputeMode::Prohibited) => fail(
            "Prohibited: no program computes on it",
            format!("as administrator: nvidia-smi -i {index} -c DEFAULT"),
        ),
        Some(ComputeMode::Unknown(text)) => skip(format!("unknown: nvidia-smi says {text:?}")),
        None => skip("unknown"),
    }
}

fn mig(facts: &Facts) -> Finding {
    match &facts.mig {
        None => (
            Status::Skip,
            "the kernel module does not tell".to_owned(),
            Some("nvidia-smi -L lists MIG instances below their GPU".to_owned()),
        ),
        Some(0) => ok("no MIG instances"),
        Some(count) => fail(
            format!(
                "the GPU is divided into {count} MIG instances; programs see those and not the GPU"
            ),
            "choose a GPU without MIG, or as administrator: nvidia-smi -mig 0",
        ),
    }
}

fn control_program(facts: &Facts) -> Finding {
    match &facts.control {
        Some(program) => ok(program.display().to_string()),
        None => fail(
            format!("{CONTROL} is not on PATH"),
            "install it (Debian: apt install nvidia-cuda-mps), or add its directory to PATH",
        ),
    }
}

fn server_program(facts: &Facts) -> Finding {
    match (&facts.control, &facts.server) {
        (None, _) => skip("there is no control program that would look for it"),
        (_, Some(program)) => ok(program.display().to_string()),
        (_, None) => fail(
            "nvidia-cuda-mps-server is neither on PATH nor beside the control program: every program will get CUDA error 805",
            "install it (Debian: apt install nvidia-cuda-mps)",
        ),
    }
}

fn selection(facts: &Facts) -> Finding {
    ok(format!("{} by {}", facts.plan.text(), facts.plan.selector))
}

fn record(facts: &Facts) -> Finding {
    let Some(daemon) = facts.daemons.first() else {
        return skip("no daemon is recorded for this GPU");
    };
    let words: Vec<String> = facts
        .daemons
        .iter()
        .map(|daemon| format!("{} is {}", daemon.record.name, daemon.state.word()))
        .collect();
    let words = words.join(", ");
    let name = &daemon.record.name;
    match &daemon.state {
        _ if facts
            .daemons
            .iter()
            .any(|daemon| matches!(daemon.state, State::Live(_))) =>
        {
            ok(words)
        }
        State::NotAnswering(process) => fail(words, format!("kill -CONT {}", process.id.pid)),
        State::Unreachable(_) => fail(words, format!("uni-cumps stop --name {name}")),
        State::Stale | State::OtherBoot => warn(words, format!("uni-cumps start --name {name}")),
        State::OtherHost | State::OtherPidNamespace { .. } | State::Live(_) => {
            warn(words, "run doctor where the daemon was started")
        }
    }
}

fn identity(facts: &Facts) -> Finding {
    let expected = match facts.running().as_slice() {
        [daemon] => daemon.state.process().map(|process| process.id.pid),
        _ => None,
    };
    match &facts.keeper {
        Keeper::Nobody => skip("no daemon keeps the pipe directory"),
        Keeper::Contradiction(found) => fail(found, "end by hand the one that should not be there"),
        Keeper::Elsewhere => skip("the daemon's process is not visible from here"),
        Keeper::Process(process) => match expected {
            Some(pid) if pid != process.id.pid => fail(
                format!(
                    "the record names pid {pid}, and pid {} runs there",
                    process.id.pid
                ),
                "end by hand the one that should not be there",
            ),
            _ if !daemon::serves(process.uid, facts.uid) => fail(
                format!(
                    "the daemon is pid {} of uid {}: it gives no server to others",
                    process.id.pid, process.uid
                ),
                "uni-cumps start",
            ),
            _ => ok(format!("pid {} of uid {}", process.id.pid, process.uid)),
        },
    }
}

fn pipe_directory(facts: &Facts) -> Finding {
    let path = quote_path(&facts.pipe);
    let length = facts.pipe.as_os_str().len();
    let Some(directory) = &facts.pipe_directory else {
        return skip(format!("{path} is not there"));
    };
    if length > PIPE_LIMIT {
        return fail(
            format!("{path} has {length} bytes; CUDA MPS takes {PIPE_LIMIT}"),
            "uni-cumps start without --pipe-dir",
        );
    }
    if let Some(network) = directory.network {
        return fail(
            format!("{path} lies on {network}, where a socket does not work"),
            "uni-cumps start --pipe-dir on a local file system",
        );
    }
    if directory.uid == facts.uid && directory.mode & 0o077 != 0 {
        return warn(
            format!("{path} is open to others (mode {:04o})", directory.mode),
            format!("chmod 700 {path}"),
        );
    }
    ok(format!(
        "{path}, {length} bytes, uid {}, mode {:04o}",
        directory.uid, directory.mode
    ))
}

fn socket(facts: &Facts) -> Finding {
    let found = facts.socket.describe(&mps::control_path(&facts.pipe));
    match facts.socket {
        Socket::Listening { .. } | Socket::Fifo => ok(found),
        Socket::Absent | Socket::Orphan => match facts.running().as_slice() {
            [daemon] => fail(
                found,
                format!("uni-cumps stop --name {}", daemon.record.name),
            ),
            _ => fail(found, "uni-cumps start"),
        },
        Socket::Other(_) => fail(found, "unset CUDA_MPS_PIPE_DIRECTORY"),
        Socket::Hidden(_) => fail(found, "eval \"$(uni-cumps env)\""),
    }
}

fn answer(facts: &Facts) -> Finding {
    match &facts.servers {
        None => skip("there is nobody to ask"),
        Some(Ok(_)) => ok("the control daemon answers"),
        Some(Err(reason)) => fail(
            format!("the control daemon does not answer: {reason}"),
            "end a client that stays connected and silent, or uni-cumps stop",
        ),
    }
}

fn log_directory(facts: &Facts) -> Finding {
    let Some(logs) = &facts.logs else {
        return skip("no daemon, no logs");
    };
    let path = quote_path(&logs.directory);
    match &logs.control {
        Some(_) => ok(path),
        None => warn(
            format!(
                "there is no control.log in {path}: nobody will be able to tell what went wrong"
            ),
            format!("ls -ld {path}"),
        ),
    }
}

/// The variables that some part of MPS reads, by NVIDIA's documentation.
const KNOWN_VARIABLES: [&str; 9] = [
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_SM_PARTITION",
    "CUDA_MPS_PROTOCOL_VERSION",
    "CUDA_MPS_SERVER_UID",
];

fn variables(facts: &Facts) -> Finding {
    for (key, _) in &facts.variables {
        if key.starts_with("CUDA_MPS") && !KNOWN_VARIABLES.contains(&key.as_str()) {
            return warn(
                format!("nothing reads {key}; did you mean CUDA_MPS_PIPE_DIRECTORY?"),
                format!("unset {key}; eval \"$(uni-cumps env)\""),
            );
        }
    }
    if let Some(percentage) = facts.variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") {
        let valid = percentage
            .trim()
            .parse::<f64>()
            .is_ok_and(|p| p > 0.0 && p <= 100.0);
        if !valid {
            return fail(
                format!(
                    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage:?} is not above 0 and at most 100"
                ),
                "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
            );
        }
    }
    let Some(pipe) = facts.variable("CUDA_MPS_PIPE_DIRECTORY") else {
        return ok("CUDA_MPS_PIPE_DIRECTORY is not set");
    };
    if !pipe.starts_with('/') {
        return fail(
            format!("CUDA_MPS_PIPE_DIRECTORY={pipe:?} is not an absolute path"),
            "eval \"$(uni-cumps env)\"",
        );
    }
    let ours = facts.running();
    let leads_to_ours = ours
        .iter()
        .any(|daemon| daemon.record.pipe_directory.as_os_str() == pipe);
    match (ours.first(), leads_to_ours) {
        (Some(daemon), false) => fail(
            format!(
                "CUDA_MPS_PIPE_DIRECTORY={pipe:?} does not lead to the daemon {}",
                daemon.record.name
            ),
            "eval \"$(uni-cumps env)\"",
        ),
        (None, _) if matches!(facts.socket, Socket::Absent | Socket::Orphan) => fail(
            format!(
                "CUDA_MPS_PIPE_DIRECTORY={pipe:?} leads nowhere: programs silently run without MPS"
            ),
            "unset CUDA_MPS_PIPE_DIRECTORY, or uni-cumps start",
        ),
        _ => ok(format!("CUDA_MPS_PIPE_DIRECTORY={pipe:?}")),
    }
}

fn mask(facts: &Facts) -> Finding {
    let Some(mask) = &facts.mask else {
        return ok("CUDA_VISIBLE_DEVICES is not set");
    };
    let notes = &facts.visibility.notes;
    if !facts.is_visible() {
        return fail(
            format!(
                "CUDA_VISIBLE_DEVICES={mask:?} hides GPU {}",
                facts.plan.text()
            ),
            "unset CUDA_VISIBLE_DEVICES, or eval \"$(uni-cumps env)\"",
        );
    }
    if !notes.is_empty() {
        return warn(
            format!("CUDA_VISIBLE_DEVICES={mask:?}: {}", notes.join("; ")),
            format!(
                "export CUDA_VISIBLE_DEVICES={}",
                facts.plan.visible_devices()
            ),
        );
    }
    ok(format!("CUDA_VISIBLE_DEVICES={mask:?}"))
}

fn default_pipe(facts: &Facts) -> Finding {
    let found = facts
        .default_pipe
        .socket
        .describe(&mps::control_path(NVIDIA_DEFAULT.as_ref()));
    let owner = facts
        .default_pipe
        .uid
        .map_or(String::new(), |uid| format!(" (uid {uid})"));
    match facts.default_pipe.socket {
        Socket::Absent => ok(format!("nothing in {NVIDIA_DEFAULT}")),
        _ if facts.pipe.as_os_str() == NVIDIA_DEFAULT => ok(found),
        Socket::Orphan => warn(
            format!(
                "{found}{owner}: a program without CUDA_MPS_PIPE_DIRECTORY may get CUDA error 805"
            ),
            format!("its owner can remove it: rm -r {NVIDIA_DEFAULT}"),
        ),
        _ => warn(
            format!("{found}{owner}: every program without CUDA_MPS_PIPE_DIRECTORY goes there"),
            "eval \"$(uni-cumps env)\"",
        ),
    }
}

fn other_daemons(facts: &Facts) -> Finding {
    let running = facts.running();
    match running.as_slice() {
        [] => skip("no recorded daemon runs for this GPU"),
        [_] => ok("one daemon serves this GPU"),
        several => {
            let names: Vec<&str> = several
                .iter()
                .map(|daemon| daemon.record.name.as_str())
                .collect();
            fail(
                format!(
                    "several daemons serve this GPU by turns: {}",
                    names.join(", ")
                ),
                format!("uni-cumps stop --name {}", names[names.len() - 1]),
            )
        }
    }
}

/// A GPU takes 48 clients from Volta on, and 60 with CUDA 13.1; beyond, new ones are refused.
const MANY_CLIENTS: usize = 48;

fn clients(facts: &Facts) -> Finding {
    let Some(Ok(servers)) = &facts.servers else {
        return skip("there is nobody to ask");
    };
    if servers.is_empty() {
        return ok("no server yet: the first program starts one");
    }
    let user = |uid: Option<u32>| uid.map_or("?".to_owned(), |uid| uid.to_string());
    let words: Vec<String> = servers
        .iter()
        .map(|server| {
            let clients: Vec<String> = server
                .clients
                .iter()
                .map(|(pid, uid)| format!("{pid} (uid {})", user(*uid)))
                .collect();
            format!(
                "server {} (uid {}) has clients [{}]",
                server.pid,
                user(server.uid),
                clients.join(", ")
            )
        })
        .collect();
    let count = servers
        .iter()
        .map(|server| server.clients.len())
        .max()
        .unwrap_or(0);
    if count >= MANY_CLIENTS {
        return warn(
            format!(
                "{count} clients: new ones may be refused as \"busy or unavailable\" (CUDA error 808)"
            ),
            "start fewer programs",
        );
    }
    ok(words.join("; "))
}

fn logs(facts: &Facts) -> Finding {
    let Some(logs) = &facts.logs else {
        return skip("no daemon, no logs");
    };
    let control = logs.control.as_deref().unwrap_or_default();
    let server = logs.server.as_deref().unwrap_or_default();
    let mut faults = control_faults(control, server);
    faults.extend(server_faults(server, logs.server_idle));
    let Some(Fault { remedy, .. }) = faults.first() else {
        return ok("no faults");
    };
    let words: Vec<&str> = faults.iter().map(|fault| fault.what.as_str()).collect();
    let words = words.join("; ");
    match faults.iter().any(|fault| fault.fatal) {
        true => fail(words, *remedy),
        false => warn(words, *remedy),
    }
}

/// Below this, `/dev/shm` limits what a program can pin and what the server needs.
const LITTLE_SHARED_MEMORY: u64 = 64 << 20;

fn shared_memory(facts: &Facts) -> Finding {
    if facts.other_ipc == Some(true) {
        return warn(
            "the daemon lives in another IPC namespace: programs here may get CUDA error 805",
            "start the container with --ipc=host, or share the daemon's /dev/shm",
        );
    }
    match facts.shared_memory {
        None => warn(
            "there is no /dev/shm",
            "mount it: mount -t tmpfs tmpfs /dev/shm",
        ),
        Some(free) if free < LITTLE_SHARED_MEMORY => warn(
            format!("/dev/shm has only {} MiB free", free >> 20),
            "start the container with --shm-size=1g, or remove what lies in /dev/shm",
        ),
        Some(free) => ok(format!("/dev/shm has {} MiB free", free >> 20)),
    }
}

fn affinity(facts: &Facts) -> Finding {
    match facts.cpus {
        None => skip("no daemon whose CPUs could be seen"),
        Some((allowed, all)) if allowed < all => warn(
            format!("the daemon and its servers may use only {allowed} of {all} CPUs"),
            "start it outside of the pinned job step",
        ),
        Some((allowed, _)) => ok(format!("{allowed} CPUs")),
    }
}

fn probe(facts: &Facts) -> Finding {
    match &facts.probe {
        None => skip("only with doctor --probe"),
        Some(Err(DriverFailure::Call { call, code, name })) => {
            let meaning = explain(*code).map_or(String::new(), |text| format!(": {text}"));
            fail(
                format!(
                    "through the daemon, {call} failed with CUDA error {code} ({name}){meaning}"
                ),
                "uni-cumps doctor --only logs",
            )
        }
        Some(Err(failure)) => fail(
            format!("through the daemon: {failure}"),
            "uni-cumps doctor --only logs",
        ),
        Some(Ok(Probe { seen, server })) => {
            if !facts.are_shown(seen) {
                return fail(
                    format!(
                        "through the daemon a process does not see GPU {}",
                        facts.plan.text()
                    ),
                    "eval \"$(uni-cumps env)\"",
                );
            }
            let each = seen.devices.iter().map(|device| {
                let free = device.free_memory.unwrap_or_default() >> 20;
                format!(
                    "{}, {} multiprocessors, {free} MiB allocatable",
                    device.uuid, device.multiprocessors
                )
            });
            let words = each.collect::<Vec<String>>().join("; ");
            match server {
                Some(server) => ok(format!("{words}; seen as a client of server {server}")),
                None => fail(
                    format!(
                        "{words}, but no server counts the process among its clients: it ran without MPS"
                    ),
                    "eval \"$(uni-cumps env)\"",
                ),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_knows_every_check() {
        let ids = CHECKS.map(|(id, _)| id);
        assert_eq!(ids, crate::cli::CHECK_IDS);
    }
}
