//! What stands in the way of a suspension or a resumption is found before anything is touched.

use std::fs;

use serde_json::json;

use crate::support::{
    Done, Sandbox, Sleeper, U0, U1, freeze, is_running, pid, set_mode, wait_until, without_root,
};

use super::{
    CHECKPOINTED, RUNNING, acts, checkpoint, conditions, entries, suspended, target, uses,
};

/// Both that it is refused and that `check` tells it, by its id.
#[track_caller]
fn is_blocked<'s>(
    machine: &'s Sandbox,
    targets: &[&Sleeper],
    id: &str,
    sentence: &str,
) -> Done<'s> {
    let done = checkpoint(machine, &["suspend", "--quiet"], targets).fails(sentence);
    let found = checkpoint(machine, &["check", "--json"], targets)
        .finish()
        .exited(1)
        .json();
    let ids: Vec<&str> = found["blockers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, [id], "{found:#}");
    assert_eq!(found["ready"], false);
    assert_eq!(acts(machine), "");
    assert_eq!(entries(machine), 0);
    done
}

#[test]
fn nothing_stands_in_the_way_of_a_plain_process() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    conditions(
        &machine,
        &[("NVIDIA H200", "100000", "Enabled", "Disabled")],
    );
    checkpoint(&machine, &["check"], &[&target])
        .prints(&format!(
            "pid={pid} state=running gpus=GPU-U0 memory_mib=812\noperation=suspend ready=True\n"
        ))
        .said_nothing();
    let found = checkpoint(&machine, &["check", "--json"], &[&target])
        .succeeds()
        .json();
    let expected = json!({
        "operation": "suspend",
        "ready": true,
        "processes": [{
            "pid": pid,
            "state": "running",
            "gpus": [{"uuid": U0, "memory_mib": 812}],
            "memory_mib": 812,
        }],
        "blockers": [],
        "notes": [],
    });
    assert_eq!(found, expected);
}

#[test]
fn a_process_that_does_not_run_is_refused() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    machine.kill(target.pid());
    is_blocked(
        &machine,
        &[&target],
        "no-such-process",
        "no process with pid",
    );
}

#[test]
fn a_process_without_cuda_is_refused_and_with_it_all_others() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let other = Sleeper::new();
    is_blocked(
        &machine,
        &[&target, &other],
        "not-cuda",
        "does not use CUDA",
    );
    assert_eq!(machine.cuda_state(target.pid()), RUNNING);
}

/// A process with a second thread, and that thread's number.
fn with_a_thread(machine: &Sandbox) -> (Sleeper, i32) {
    let program = "import threading,time; threading.Thread(target=time.sleep, args=(600,)).start()";
    let mut command = std::process::Command::new("python3");
    let target = Sleeper(command.args(["-c", program]).spawn().unwrap());
    let pid = target.pid();
    let threads = || -> Vec<i32> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        tasks
            .map(|task| task.unwrap().file_name().to_str().unwrap().parse().unwrap())
            .collect()
    };
    wait_until("there are two threads", || threads().len() == 2);
    machine.cuda_process(pid, RUNNING);
    let thread = threads().into_iter().find(|thread| *thread != pid).unwrap();
    (target, thread)
}

#[test]
fn the_number_of_a_thread_is_refused_and_the_process_named() {
    let machine = Sandbox::new();
    let (target, thread) = with_a_thread(&machine);
    let pid = target.pid();
    machine.cuda_process(thread, RUNNING);
    for verb in ["suspend", "lock", "restore-thread"] {
        machine
            .run(["checkpoint", verb, &format!("--pid={thread}")])
            .fails(&format!("{thread} is a thread of process {pid}"))
            .said(&format!("hint: --pid {pid}"));
    }
    assert_eq!(acts(&machine), "");
}

#[test]
fn another_users_process_is_refused() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let home = machine.path("u");
    fs::create_dir(&home).unwrap();
    set_mode(&home, 0o777);
    checkpoint(&machine, &["suspend"], &[&target])
        .env("HOME", &home)
        .user(1000)
        .fails("belongs to uid 0")
        .said("hint: as that user, or with sudo");
    assert_eq!(machine.cuda_calls(), "");
}

#[test]
fn root_may_suspend_another_users_process() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let mut command = std::process::Command::new("/usr/bin/setpriv");
    command.args(["--reuid=1000", "--clear-groups", "/bin/sleep", "600"]);
    let target = Sleeper(command.spawn().unwrap());
    machine.cuda_process(target.pid(), RUNNING);
    wait_until("it is another user's", || {
        let line = fs::read_to_string(format!("/proc/{}/cmdline", target.pid())).unwrap();
        line.starts_with("/bin/sleep")
    });
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    assert_eq!(suspended(&machine)[0]["uid"], 1000);
}

#[test]
fn a_stopped_process_is_refused_before_the_driver_waits_for_it() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    freeze(target.pid());
    is_blocked(&machine, &[&target], "stopped", "is stopped")
        .said(&format!("hint: kill -CONT {}", target.pid()));
    assert!(!machine.cuda_calls().contains(&target.pid().to_string()));
}

/// A cgroup that freezes what is in it, gone with the test.
struct Freezer(std::path::PathBuf);

impl Freezer {
    fn of(target: &Sleeper) -> Option<Self> {
        let directory = format!("/sys/fs/cgroup/freezer/uc-{}", target.pid());
        fs::create_dir(&directory).ok()?;
        let freezer = Self(directory.into());
        fs::write(freezer.0.join("cgroup.procs"), target.pid().to_string()).ok()?;
        fs::write(freezer.0.join("freezer.state"), "FROZEN").ok()?;
        Some(freezer)
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        // Whoever is in it goes up.
        let members = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        for pid in members.lines() {
            let _ = fs::write("/sys/fs/cgroup/freezer/cgroup.procs", pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_frozen_process_is_refused_before_the_driver_waits_for_it() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let Some(freezer) = Freezer::of(&target) else {
        crate::support::say("no freezer of cgroup v1 here: a frozen process is not tried");
        return;
    };
    is_blocked(&machine, &[&target], "frozen", "the cgroup of pid");
    assert!(!machine.cuda_calls().contains(&target.pid().to_string()));
    drop(freezer);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
}

#[test]
fn a_process_in_another_pid_namespace_is_refused() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let mut command = std::process::Command::new("/usr/bin/unshare");
    command.args(["--pid", "--fork", "--kill-child", "/bin/sleep", "600"]);
    let outer = Sleeper(command.spawn().unwrap());
    let children = format!("/proc/{0}/task/{0}/children", outer.pid());
    let child = || {
        fs::read_to_string(&children)
            .unwrap_or_default()
            .trim()
            .parse::<i32>()
            .ok()
    };
    wait_until("the child is there", || child().is_some());
    let pid = child().unwrap();
    machine.cuda_process(pid, RUNNING);
    machine
        .run(["checkpoint", "suspend", &format!("--pid={pid}")])
        .fails("is in another pid namespace, such as a container");
    assert_eq!(acts(&machine), "");
}

#[test]
fn an_mps_client_is_refused_unless_it_is_forced() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let server = Sleeper::new();
    machine.conduct(&format!(
        "servers {}\nclients {}",
        server.pid(),
        target.pid()
    ));
    let record = machine.start(&[]);
    is_blocked(
        &machine,
        &[&target],
        "mps-client",
        "is an MPS client of server",
    )
    .said("--force");
    checkpoint(&machine, &["check", "--force"], &[&target]).succeeds();
    checkpoint(&machine, &["suspend", "--force", "--quiet"], &[&target]).succeeds();
    // What is away must be able to come back.
    checkpoint(&machine, &["resume", "--quiet"], &[&target]).succeeds();
    assert!(is_running(pid(&record)));
}

#[test]
fn a_client_of_a_daemon_that_nobody_recorded_is_found_by_the_processs_own_variable() {
    let machine = Sandbox::new();
    let pipe = machine.path("t/p");
    let mut command = std::process::Command::new("/bin/sleep");
    command.arg("600").env("CUDA_MPS_PIPE_DIRECTORY", &pipe);
    let target = Sleeper(command.spawn().unwrap());
    machine.cuda_process(target.pid(), RUNNING);
    let server = Sleeper::new();
    machine.conduct(&format!(
        "servers {}\nclients {}",
        server.pid(),
        target.pid()
    ));
    machine.start_by_hand("t/p", "t/l");
    is_blocked(
        &machine,
        &[&target],
        "mps-client",
        "is an MPS client of server",
    );
    // One that does not say counts as one, when in doubt.
    machine.conduct("answers no-daemon");
    is_blocked(&machine, &[&target], "mps-client", "may be an MPS client")
        .said("the control daemon in <S>/t/p does not say");
}

#[test]
fn a_part_of_a_gpu_is_refused() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    conditions(&machine, &[("NVIDIA H200", "100000", "Enabled", "Enabled")]);
    uses(&machine, &[(&target, U0, "812")]);
    is_blocked(&machine, &[&target], "mig", "uses a MIG instance");
    conditions(&machine, &[("NVIDIA H200", "100000", "Enabled", "[N/A]")]);
    uses(&machine, &[(&target, "MIG-0a1b", "812")]);
    is_blocked(&machine, &[&target], "mig", "uses a MIG instance");
}

#[test]
fn gpu_memory_that_host_memory_cannot_hold_is_refused() {
    let machine = Sandbox::with_gpus(2);
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    let half = available_mib() / 2 + 4096;
    let half = half.to_string();
    uses(
        &machine,
        &[(&targets[0], U0, &half), (&targets[1], U1, &half)],
    );
    // Each of them alone would fit.
    is_blocked(
        &machine,
        &[&targets[0], &targets[1]],
        "host-memory",
        "of host memory are available",
    );
    checkpoint(&machine, &["check"], &[&targets[0]]).succeeds();
}

fn available_mib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn what_does_not_fit_its_gpu_any_more_is_not_restored() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    checkpoint(&machine, &["suspend"], &[&target]).succeeds();
    uses(&machine, &[]);
    machine.cuda_calls();
    let gpu = |free| ("NVIDIA H200", free, "Enabled", "Disabled");
    conditions(&machine, &[gpu("811"), gpu("812")]);
    checkpoint(&machine, &["resume"], &[&target])
        .fails("GPU GPU-U0 has 811 MiB free, and 812 MiB come back");
    let found = checkpoint(&machine, &["check", "--json"], &[&target])
        .finish()
        .exited(1)
        .json();
    assert_eq!(found["operation"], "resume");
    assert_eq!(found["blockers"][0]["id"], "gpu-memory");
    assert_eq!(acts(&machine), "");
    checkpoint(&machine, &["resume", "--to", "1"], &[&target]).succeeds();
}

#[test]
fn a_driver_without_the_calls_is_too_old() {
    let machine = Sandbox::new();
    machine.libcuda(Some(true));
    let target = target(&machine, RUNNING);
    is_blocked(
        &machine,
        &[&target],
        "driver-too-old",
        "driver too old: has 12.4, needs 12.8 (r570)",
    );
    machine.libcuda(None);
    is_blocked(
        &machine,
        &[&target],
        "no-driver",
        "the CUDA driver cannot be opened",
    );
}

#[test]
fn without_cuda_of_our_own_a_restore_would_kill() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    let gpu = |persistence| [("NVIDIA H200", "100000", persistence, "Disabled")];
    conditions(&machine, &gpu("Disabled"));
    let found = checkpoint(&machine, &["check", "--json"], &[&target]);
    let found = found.succeeds().json();
    let note = found["notes"][0].as_str().unwrap();
    assert!(note.starts_with("persistence mode is off"), "{note}");
    for persistence in ["Disabled", "Enabled"] {
        conditions(&machine, &gpu(persistence));
        machine.faults("init 999");
        is_blocked(
            &machine,
            &[&target],
            "persistence",
            "CUDA cannot be initialised",
        );
    }
    // A restore that cannot initialise CUDA is not asked for.
    machine.cuda_process(target.pid(), CHECKPOINTED);
    machine.cuda_calls();
    checkpoint(&machine, &["resume"], &[&target])
        .fails("the restore of pid")
        .said("cuInit failed");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
    assert!(!machine.cuda_calls().contains("restore"));
    // A mask of the caller's hides no GPU from it.
    machine.faults("");
    checkpoint(&machine, &["check"], &[&target])
        .env("CUDA_VISIBLE_DEVICES", "")
        .succeeds();
}

#[test]
fn every_blocker_is_told_and_not_only_the_first() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    freeze(targets[0].pid());
    let plain = Sleeper::new();
    checkpoint(&machine, &["suspend"], &[&targets[0], &plain])
        .fails("cannot suspend: pid")
        .said("is stopped")
        .said("cause: besides: pid")
        .said("does not use CUDA");
    let found = checkpoint(
        &machine,
        &["check", "--json"],
        &[&targets[0], &plain, &targets[1]],
    )
    .finish()
    .exited(1)
    .json();
    assert_eq!(found["blockers"].as_array().unwrap().len(), 2);
}
