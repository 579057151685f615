//! `checkpoint`: real processes that the stand-in for libcuda takes for CUDA processes leave their GPUs and come back.

use std::fs;
use std::process::Child;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{
    Call, Done, Sandbox, Sleeper, U0, U1, freeze, is_running, pid, set_mode, signal, uuid,
    wait_until, without_root,
};

pub(crate) const RUNNING: u32 = 0;
pub(crate) const LOCKED: u32 = 1;
pub(crate) const CHECKPOINTED: u32 = 2;

/// A process that uses CUDA, in this state.
pub(crate) fn target(machine: &Sandbox, state: u32) -> Sleeper {
    let sleeper = Sleeper::new();
    machine.cuda_process(sleeper.pid(), state);
    sleeper
}

/// `checkpoint` with these words, and `--pid` for each of these processes.
pub(crate) fn checkpoint<'s>(
    machine: &'s Sandbox,
    words: &[&str],
    targets: &[&Sleeper],
) -> Call<'s> {
    let pids = targets
        .iter()
        .map(|target| format!("--pid={}", target.pid()));
    machine.run(["checkpoint"]).with(words).with(pids)
}

/// What the driver was made to do, without the questions.
pub(crate) fn acts(machine: &Sandbox) -> String {
    let calls = machine.cuda_calls();
    let acts = calls.lines().filter(|line| {
        let word = line.split(' ').next().unwrap_or_default();
        ["lock", "checkpoint", "restore", "unlock"].contains(&word)
    });
    acts.map(|line| format!("{line}\n")).collect()
}

/// Tells nvidia-smi that these processes have this much memory, in MiB, on these GPUs.
pub(crate) fn uses(machine: &Sandbox, apps: &[(&Sleeper, &str, &str)]) {
    let rows = apps
        .iter()
        .map(|(app, gpu, memory)| format!("{}, {gpu}, {memory}\n", app.pid()));
    fs::write(machine.bin().join("apps.csv"), rows.collect::<String>()).unwrap();
}

/// Tells nvidia-smi the model, the free memory, persistence mode and MIG mode of each GPU.
fn conditions(machine: &Sandbox, gpus: &[(&str, &str, &str, &str)]) {
    let row = |(index, (name, free, persistence, mig)): (usize, &(&str, &str, &str, &str))| {
        format!("{}, {name}, {free}, {persistence}, {mig}\n", uuid(index))
    };
    let rows: String = gpus.iter().enumerate().map(row).collect();
    fs::write(machine.bin().join("gpu-state.csv"), rows).unwrap();
}

/// The suspended processes as `status` shows them.
fn suspended(machine: &Sandbox) -> Vec<Value> {
    let status = machine.run(["status", "--json"]).succeeds().json();
    status["suspended_processes"].as_array().unwrap().clone()
}

/// The files of the ledger.
pub(crate) fn entries(machine: &Sandbox) -> usize {
    let files = fs::read_dir(machine.records().join(".suspended"));
    let names = files
        .into_iter()
        .flatten()
        .map(|file| file.unwrap().file_name());
    names
        .filter(|name| name.to_string_lossy().ends_with(".json"))
        .count()
}

#[test]
fn a_process_leaves_its_gpu_and_comes_back() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    checkpoint(&machine, &["suspend"], &[&target])
        .prints(&format!(
            "pid={pid} program=sleep before=running after=checkpointed gpus=GPU-U0 memory_mib=812\n"
        ))
        .said_nothing();
    assert_eq!(machine.cuda_state(pid), CHECKPOINTED);
    let acts_then = acts(&machine);
    let (lock, rest) = acts_then.split_once('\n').unwrap();
    assert!(lock.starts_with(&format!("lock {pid} timeout=")), "{lock}");
    assert_eq!(rest, format!("checkpoint {pid}\n"));

    checkpoint(&machine, &["resume"], &[&target])
        .prints(&format!(
            "pid={pid} program=sleep before=checkpointed after=running gpus=GPU-U0 memory_mib=812\n"
        ))
        .said_nothing();
    assert_eq!(machine.cuda_state(pid), RUNNING);
    assert_eq!(acts(&machine), format!("restore {pid}\nunlock {pid}\n"));
    assert_eq!(entries(&machine), 0);
}

#[test]
fn all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 3].map(|state| target(&machine, state));
    let [a, b, c] = [&targets[0], &targets[1], &targets[2]];
    // Whatever the order in which they are named, and however often.
    checkpoint(&machine, &["suspend", "--quiet"], &[c, a, b, a]).succeeds();
    let words = |acts: String| -> Vec<String> {
        let line = |line: &str| line.split(" timeout").next().unwrap().to_owned();
        acts.lines().map(line).collect()
    };
    let in_turn = |actions: [&str; 2]| -> Vec<String> {
        let mut pids = targets.iter().map(Sleeper::pid).collect::<Vec<_>>();
        pids.sort_unstable();
        let of = |action: &str| {
            pids.iter()
                .map(|pid| format!("{action} {pid}"))
                .collect::<Vec<_>>()
        };
        actions.map(of).concat()
    };
    assert_eq!(words(acts(&machine)), in_turn(["lock", "checkpoint"]));
    checkpoint(&machine, &["resume", "--all", "--quiet"], &[]).succeeds();
    assert_eq!(words(acts(&machine)), in_turn(["restore", "unlock"]));
}

#[test]
fn the_single_steps_lead_through_every_state() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    for (step, before, after) in [
        ("lock", "running", "locked"),
        ("checkpoint", "locked", "checkpointed"),
        ("restore", "checkpointed", "locked"),
        ("unlock", "locked", "running"),
    ] {
        checkpoint(&machine, &[step, "--quiet"], &[&target]).prints(&format!(
            "pid={pid} program=sleep before={before} after={after} gpus=unknown memory_mib=unknown\n"
        ));
        checkpoint(&machine, &["state"], &[&target])
            .prints(&format!("pid={pid} state={after}\n"))
            .said_nothing();
    }
    let thread = pid + 1;
    checkpoint(&machine, &["restore-thread"], &[&target])
        .prints(&format!("pid={pid} restore_thread_id={thread}\n"));
    let found = checkpoint(&machine, &["restore-thread", "--json"], &[&target])
        .succeeds()
        .json();
    assert_eq!(found, json!({"pid": pid, "restore_thread_id": thread}));
}

#[test]
fn a_step_that_is_done_already_does_nothing_and_succeeds() {
    let machine = Sandbox::new();
    for (words, state) in [
        ("suspend", CHECKPOINTED),
        ("resume", RUNNING),
        ("lock", LOCKED),
        ("checkpoint", CHECKPOINTED),
        ("unlock", RUNNING),
    ] {
        let target = target(&machine, state);
        checkpoint(&machine, &[words], &[&target]).succeeds();
        assert_eq!(acts(&machine), "", "{words}");
        assert_eq!(machine.cuda_state(target.pid()), state);
    }
}

#[test]
fn a_step_from_a_wrong_state_is_refused_and_touches_nothing() {
    let machine = Sandbox::new();
    for (words, state, sentence) in [
        (
            "lock",
            CHECKPOINTED,
            "is checkpointed; to lock it, it must be running",
        ),
        (
            "checkpoint",
            RUNNING,
            "is running; to checkpoint it, it must be locked",
        ),
        (
            "restore",
            RUNNING,
            "is running; to restore it, it must be checkpointed",
        ),
        (
            "restore",
            LOCKED,
            "is locked; to restore it, it must be checkpointed",
        ),
        (
            "unlock",
            CHECKPOINTED,
            "is checkpointed; to unlock it, it must be locked",
        ),
        ("suspend", LOCKED, "is locked already"),
        (
            "suspend",
            3,
            "is failed: an earlier checkpoint or restore went wrong for good",
        ),
        ("resume", 3, "is failed"),
        ("resume", 4, "is checkpointing already"),
        ("suspend", 5, "is restoring already"),
        ("suspend", 77, "is unknown-77 already"),
    ] {
        let target = target(&machine, state);
        checkpoint(&machine, &[words], &[&target]).fails(sentence);
        assert_eq!(acts(&machine), "", "{words}");
        assert_eq!(machine.cuda_state(target.pid()), state);
    }
}

#[test]
fn cuda_is_initialised_only_to_restore_and_never_where_a_control_daemon_could_be() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let with_mask = |words: &[&str]| {
        let call = checkpoint(&machine, words, &[&target]);
        call.env("CUDA_VISIBLE_DEVICES", "0")
            .env("CUDA_MPS_PIPE_DIRECTORY", machine.path("t/elsewhere"))
            .env("CUDA_CHECKPOINT_JOB_FILE", "/ours")
            .succeeds();
    };
    with_mask(&["suspend", "--quiet"]);
    assert!(!machine.cuda_calls().contains("init"));
    with_mask(&["resume", "--quiet"]);
    let calls = machine.cuda_calls();
    let init = calls
        .lines()
        .find(|line| line.starts_with("init "))
        .unwrap();
    let mps = init.split(' ').nth(1).unwrap();
    assert!(mps.starts_with("mps=<S>/t/uni-cumps-nowhere-"), "{init}");
    assert!(init.ends_with(" empty=true mask=none job=none"), "{init}");
    // Nothing of it is left.
    assert_eq!(fs::read_dir(machine.path("t")).unwrap().count(), 0);
}

#[test]
fn the_job_of_a_process_is_named_to_the_driver() {
    let machine = Sandbox::new();
    let mut command = std::process::Command::new("/bin/sleep");
    command
        .arg("600")
        .env("CUDA_CHECKPOINT_JOB_FILE", "/proc/7/fd/9");
    let target = Sleeper(command.spawn().unwrap());
    machine.cuda_process(target.pid(), CHECKPOINTED);
    checkpoint(&machine, &["resume", "--quiet"], &[&target]).succeeds();
    assert!(machine.cuda_calls().contains("job=/proc/7/fd/9"));
}

#[test]
fn a_process_comes_back_on_another_gpu_however_that_is_spelled() {
    let machine = Sandbox::with_gpus(3);
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    let bare = U1.trim_start_matches("GPU-");
    let digits = bare.replace('-', "");
    for words in [
        vec!["--to", "1"],
        vec!["--to", U1],
        vec!["--to", &digits],
        vec!["--gpu-map", "0=1"],
        vec!["--gpu-map", "0=1", "--gpu-map", "1=0", "--gpu-map", "2=2"],
        vec!["--gpu-map", "0=1,1=0"],
    ] {
        checkpoint(&machine, &["suspend"], &[&target]).succeeds();
        machine.cuda_calls();
        let mut all = vec!["resume"];
        all.extend(words);
        checkpoint(&machine, &all, &[&target]).prints(&format!(
            "pid={pid} program=sleep before=checkpointed after=running gpus=GPU-U1 memory_mib=812\n"
        ));
        let map = "GPU-U0=GPU-U1 GPU-U1=GPU-U0 GPU-U2=GPU-U2";
        assert_eq!(
            acts(&machine),
            format!("restore {pid} {map}\nunlock {pid}\n")
        );
    }
}

#[test]
fn a_map_that_changes_nothing_is_not_given_to_the_driver() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    for words in [["--to", "0"], ["--gpu-map", "1=1"]] {
        checkpoint(&machine, &["suspend"], &[&target]).succeeds();
        machine.cuda_calls();
        checkpoint(&machine, &["resume"], &[&target])
            .with(words)
            .succeeds();
        assert_eq!(acts(&machine), format!("restore {pid}\nunlock {pid}\n"));
    }
}

#[test]
fn what_is_no_gpu_and_no_map_is_refused() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, CHECKPOINTED);
    let short = &U0[..U0.len() - 1];
    for (words, sentence) in [
        (
            ["--to", short],
            "has 31 hexadecimal digits; a GPU's UUID has 32",
        ),
        (["--to", "MIG-0a1b2c3d"], "is a MIG instance"),
        (
            ["--to", ""],
            "is neither nvidia-smi's index of a GPU nor a UUID",
        ),
        (["--gpu-map", "0"], "is not of the form OLD=NEW"),
        (
            ["--gpu-map", "0=x"],
            "is neither nvidia-smi's index of a GPU nor a UUID",
        ),
        (["--timeout", "0"], "unexpected argument '--timeout'"),
        (
            ["--deadline", "0"],
            "it must be a number of seconds from 0.001 to 86400",
        ),
        (
            ["--deadline", "inf"],
            "it must be a number of seconds from 0.001 to 86400",
        ),
    ] {
        checkpoint(&machine, &["resume"], &[&target])
            .with(words)
            .breaks_usage()
            .said(sentence);
    }
    checkpoint(&machine, &["resume", "--to=1", "--gpu-map=0=1"], &[&target]).breaks_usage();
    for (words, sentence, hint) in [
        (
            ["--gpu-map=0=7"],
            "this machine has no GPU 7",
            "--gpu-map 0=1",
        ),
        (
            ["--gpu-map=0=1,0=0"],
            "is to be replaced by two",
            "each GPU once on each side",
        ),
        (
            ["--gpu-map=0=1,1=1"],
            "is to replace two",
            "each GPU once on each side",
        ),
        // Nobody has told which GPU it was on.
        (
            ["--to=1"],
            "--to needs to know the one GPU that pid",
            "--gpu-map OLD=NEW",
        ),
    ] {
        checkpoint(&machine, &["resume"], &[&target])
            .with(words)
            .fails(sentence)
            .said(hint);
    }
    assert_eq!(acts(&machine), "");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
}

#[test]
fn a_number_that_is_no_process_id_is_not_understood() {
    let machine = Sandbox::new();
    for words in [
        &["suspend"][..],
        &["suspend", "--pid", "0"],
        &["suspend", "--pid", "-1"],
        &["suspend", "--pid", "x"],
        &["suspend", "--pid", "99999999999"],
        &["state"],
        &["lock", "--pid", "1", "--timeout", "0"],
        &["lock", "--pid", "1", "--pid", "2"],
        &["resume", "--pid", "1", "--all"],
        &[],
    ] {
        machine.run(["checkpoint"]).with(words).breaks_usage();
    }
}

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
    for verb in ["suspend", "lock", "state"] {
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
fn another_model_of_gpu_is_refused() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    checkpoint(&machine, &["suspend"], &[&target]).succeeds();
    machine.cuda_calls();
    let gpu = |name, mig| (name, "9999", "Enabled", mig);
    conditions(
        &machine,
        &[
            gpu("NVIDIA H200", "Disabled"),
            gpu("NVIDIA A100", "Disabled"),
        ],
    );
    checkpoint(&machine, &["resume", "--to", "1"], &[&target])
        .fails("a restore needs the same model");
    conditions(
        &machine,
        &[
            gpu("NVIDIA H200", "Disabled"),
            gpu("NVIDIA H200", "Enabled"),
        ],
    );
    checkpoint(&machine, &["resume", "--to", "1"], &[&target])
        .fails("GPU GPU-U1 is divided into MIG instances");
    assert_eq!(acts(&machine), "");
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
fn a_driver_of_12_can_suspend_but_not_move() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    let with =
        |words: &[&str]| checkpoint(&machine, words, &[&target]).env("STUB_CUDA_VERSION", "12080");
    with(&["suspend"]).succeeds();
    with(&["resume", "--to=1"])
        .fails("driver too old: has 12.8, needs 13.0 (r580) to restore on another GPU");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
    with(&["resume"]).succeeds();
}

#[test]
fn without_persistence_mode_and_without_cuda_a_restore_would_kill() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    uses(&machine, &[(&target, U0, "812")]);
    let gpu = |persistence| [("NVIDIA H200", "100000", persistence, "Disabled")];
    conditions(&machine, &gpu("Disabled"));
    checkpoint(&machine, &["check"], &[&target])
        .succeeds()
        .said_nothing();
    let found = checkpoint(&machine, &["check", "--json"], &[&target])
        .succeeds()
        .json();
    let note = found["notes"][0].as_str().unwrap();
    assert!(note.starts_with("persistence mode is off"), "{note}");
    machine.faults("init 999");
    let found = checkpoint(&machine, &["check", "--json"], &[&target])
        .finish()
        .exited(1)
        .json();
    assert_eq!(found["blockers"][0]["id"], "persistence");
    conditions(&machine, &gpu("Enabled"));
    checkpoint(&machine, &["check"], &[&target]).succeeds();
    // A restore that cannot initialise CUDA is not asked for.
    machine.faults("init 999");
    machine.cuda_process(target.pid(), CHECKPOINTED);
    machine.cuda_calls();
    checkpoint(&machine, &["resume"], &[&target])
        .fails("the restore of pid")
        .said("cuInit failed");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
    assert!(!machine.cuda_calls().contains("restore"));
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

#[test]
fn the_states_of_several_processes_are_shown_and_one_that_has_none_is_said() {
    let machine = Sandbox::new();
    let locked = target(&machine, LOCKED);
    let plain = Sleeper::new();
    let mut pids = [locked.pid(), plain.pid()];
    pids.sort_unstable();
    let done = checkpoint(&machine, &["state"], &[&locked, &plain])
        .finish()
        .exited(1)
        .said_nothing();
    assert_eq!(
        done.text(),
        format!(
            "pid={} state=locked\npid={1} state=none reason=pid {1} does not use CUDA\n",
            locked.pid(),
            plain.pid()
        )
    );
    let found = checkpoint(&machine, &["state", "--json"], &[&locked, &plain])
        .finish()
        .exited(1)
        .json();
    let expected = json!({"processes": [
        {"pid": locked.pid(), "state": "locked", "reason": null},
        {"pid": plain.pid(), "state": null, "reason": format!("pid {} does not use CUDA", plain.pid())},
    ]});
    assert_eq!(found, expected);
    machine
        .run(["checkpoint", "state", &format!("--pid={}", plain.pid())])
        .fails("cannot tell the state: pid");
}

#[test]
fn status_shows_who_is_suspended_and_resume_takes_the_only_one() {
    let machine = Sandbox::with_gpus(2);
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U1, "812")]);
    checkpoint(&machine, &["suspend"], &[&target]).succeeds();
    let line =
        format!("suspended pid={pid} state=checkpointed program=sleep gpus=GPU-U1 memory_mib=812");
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.lines().any(|found| found == line), "{status}");
    let entry = &suspended(&machine)[0];
    assert_eq!(entry["pid"], pid);
    assert_eq!(entry["state"], "checkpointed");
    assert_eq!(entry["gpus"], json!([{"uuid": U1, "memory_mib": 812}]));
    assert!(entry["suspended_at"].as_f64().unwrap() > 1e9);
    let file = machine.records().join(".suspended");
    let mode = |path: &std::path::Path| crate::directories::mode(path);
    assert_eq!(mode(&file), 0o700);

    machine.run(["checkpoint", "resume"]).succeeds();
    assert_eq!(machine.cuda_state(pid), RUNNING);
    assert_eq!(suspended(&machine), Vec::<Value>::new());
    machine
        .run(["checkpoint", "resume"])
        .fails("no process of yours is suspended here")
        .said("hint: uni-cumps checkpoint suspend --pid PID");
    machine.run(["checkpoint", "resume", "--all"]).prints("");
}

#[test]
fn of_several_suspended_processes_one_must_be_named_or_all() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    for target in &targets {
        checkpoint(&machine, &["suspend", "--quiet"], &[target]).succeeds();
    }
    let [a, b] = [targets[0].pid(), targets[1].pid()];
    machine
        .run(["checkpoint", "resume"])
        .fails(&format!("several processes are suspended: {a}, {b}"))
        .said(&format!("hint: --pid {a}, or --all"));
    machine
        .run(["checkpoint", "resume", "--all", "--quiet"])
        .succeeds();
    assert_eq!([a, b].map(|pid| machine.cuda_state(pid)), [RUNNING; 2]);
}

#[test]
fn who_has_ended_is_not_suspended_any_more() {
    let machine = Sandbox::new();
    let targets = [RUNNING; 2].map(|state| target(&machine, state));
    checkpoint(&machine, &["suspend", "--quiet"], &[&targets[0]]).succeeds();
    machine.kill(targets[0].pid());
    assert_eq!(suspended(&machine), Vec::<Value>::new());
    // Showing it changes nothing; the next command that writes there removes it.
    assert_eq!(entries(&machine), 1);
    checkpoint(&machine, &["suspend", "--quiet"], &[&targets[1]]).succeeds();
    assert_eq!(entries(&machine), 1);
    machine.kill(targets[1].pid());
    let shown = machine.run(["prune", "--dry-run"]).succeeds().text();
    assert!(
        shown.starts_with("would remove ledger entry of a suspended process: <S>/h/"),
        "{shown}"
    );
    machine.run(["prune"]).succeeds();
    assert_eq!(entries(&machine), 0);
}

#[test]
fn who_was_resumed_by_somebody_else_is_shown_as_running_and_forgotten_by_resume() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    machine.cuda_process(target.pid(), RUNNING);
    assert_eq!(suspended(&machine)[0]["state"], "running");
    machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
    assert_eq!(entries(&machine), 0);
}

#[test]
fn a_driver_that_does_not_answer_hides_no_suspended_process() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    machine.libcuda(None);
    assert_eq!(suspended(&machine)[0]["state"], Value::Null);
    let status = machine.run(["status"]).succeeds().text();
    assert!(
        status.contains(&format!("suspended pid={} state=unknown", target.pid())),
        "{status}"
    );
}

#[test]
fn who_cannot_be_remembered_is_not_taken_away_but_comes_back_all_the_same() {
    let machine = Sandbox::new();
    let away = target(&machine, CHECKPOINTED);
    let here = target(&machine, RUNNING);
    // A file where the directory would be.
    fs::write(machine.path("h/.cache"), "").unwrap();
    checkpoint(&machine, &["suspend", "--quiet"], &[&here])
        .fails("cannot create the record directory");
    assert_eq!(machine.cuda_state(here.pid()), RUNNING);
    checkpoint(&machine, &["resume"], &[&away])
        .succeeds()
        .said("the ledger of suspended processes cannot be changed");
    assert_eq!(machine.cuda_state(away.pid()), RUNNING);
    checkpoint(&machine, &["resume"], &[&away])
        .unset("HOME")
        .env("HOME", "relative")
        .succeeds();
}

#[test]
fn a_person_sees_tables_and_what_to_type_next() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    uses(&machine, &[(&target, U0, "812")]);
    let line = |words: &str| {
        format!(
            "{} checkpoint {words}",
            crate::support::uni_cumps().display()
        )
    };
    let shown = machine
        .on_a_terminal(&line(&format!("suspend --color never --pid {pid}")))
        .succeeds()
        .text();
    assert!(shown.contains("PID"), "{shown}");
    assert!(shown.contains("checkpointed"), "{shown}");
    assert!(
        shown.contains(&format!("next: uni-cumps checkpoint resume --pid {pid}")),
        "{shown}"
    );
    let status = machine.on_a_terminal(&format!(
        "{} status --color never",
        crate::support::uni_cumps().display()
    ));
    let shown = status.succeeds().text();
    let rows: Vec<&str> = shown.lines().map(str::trim_end).collect();
    let head = rows
        .iter()
        .position(|row| row.starts_with("SUSPENDED"))
        .unwrap();
    let words: Vec<&str> = rows[head + 1].split_whitespace().collect();
    assert_eq!(
        words,
        [&*pid.to_string(), "checkpointed", "sleep", "0", "812"]
    );
}

#[test]
fn completion_offers_the_suspended_processes() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    let offered = machine
        .run(["--", "uni-cumps", "checkpoint", "resume", "--pid", ""])
        .env("UNI_CUMPS_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", "4")
        .succeeds();
    assert!(
        offered.text().contains(&target.pid().to_string()),
        "{offered:#?}"
    );
}

/// Starts a suspension whose checkpoint waits, and comes back when it does.
fn in_the_middle(
    machine: &Sandbox,
    words: &[&str],
    targets: &[&Sleeper],
    slow: &str,
) -> Child {
    machine.faults(&format!("{slow} slow"));
    let child = checkpoint(machine, words, targets).spawn();
    let path = machine.path("cuda/calls");
    wait_until("the step has begun", || {
        let calls = fs::read_to_string(&path).unwrap_or_default();
        calls.lines().any(|line| line.starts_with(slow))
    });
    child
}

fn go(machine: &Sandbox) {
    fs::write(machine.path("cuda/go"), "").unwrap();
}

#[test]
fn ctrl_c_lets_the_step_end_and_then_undoes_what_was_done() {
    for (number, code) in [
        (Signal::SIGINT, 130),
        (Signal::SIGTERM, 143),
        (Signal::SIGHUP, 129),
        (Signal::SIGQUIT, 131),
    ] {
        let machine = Sandbox::new();
        let targets = [RUNNING; 2].map(|state| target(&machine, state));
        let both = [&targets[0], &targets[1]];
        let child = in_the_middle(
            &machine,
            &["suspend", "--quiet", "--json"],
            &both,
            "checkpoint",
        );
        signal(i32::try_from(child.id()).unwrap(), number);
        go(&machine);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let failure: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(failure["error"]["code"], "interrupted");
        assert_eq!(failure["left_in"], json!([]));
        for target in both {
            assert_eq!(machine.cuda_state(target.pid()), RUNNING);
        }
        assert_eq!(entries(&machine), 0);
        // The second one was not even begun.
        assert_eq!(acts(&machine).matches("checkpoint").count(), 1);
    }
}

#[test]
fn a_resumption_that_is_interrupted_leaves_them_suspended() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
    let child = in_the_middle(&machine, &["resume", "--quiet"], &[&target], "restore");
    signal(i32::try_from(child.id()).unwrap(), Signal::SIGINT);
    go(&machine);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
    assert_eq!(entries(&machine), 1);
}

#[test]
fn a_signal_that_is_ignored_interrupts_nothing() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    machine.faults("checkpoint slow");
    let call = checkpoint(&machine, &["suspend", "--quiet"], &[&target]);
    let child = call
        .under(["/usr/bin/env", "--ignore-signal=INT,HUP"])
        .command()
        .spawn()
        .unwrap();
    wait_until("the step has begun", || {
        machine.cuda_state(target.pid()) == LOCKED
    });
    for number in [Signal::SIGINT, Signal::SIGHUP] {
        signal(i32::try_from(child.id()).unwrap(), number);
    }
    go(&machine);
    assert!(child.wait_with_output().unwrap().status.success());
    assert_eq!(machine.cuda_state(target.pid()), CHECKPOINTED);
}

#[test]
fn killed_in_the_middle_it_leaves_a_process_that_runs() {
    for slow in ["lock", "checkpoint", "restore"] {
        let machine = Sandbox::new();
        let target = target(&machine, RUNNING);
        let words = match slow {
            "restore" => {
                checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
                "resume"
            }
            _ => "suspend",
        };
        let child = in_the_middle(&machine, &[words, "--quiet"], &[&target], slow);
        signal(i32::try_from(child.id()).unwrap(), Signal::SIGKILL);
        child.wait_with_output().unwrap();
        go(&machine);
        let unlocked = || {
            machine
                .cuda_calls_so_far()
                .lines()
                .last()
                .is_some_and(|line| line.starts_with("unlock"))
        };
        wait_until("the process runs again", unlocked);
        wait_until("the process runs again", || {
            machine.cuda_state(target.pid()) == RUNNING
        });
        // The next one finds nothing in its way, and the ledger is put right.
        machine.faults("");
        checkpoint(&machine, &["suspend", "--quiet"], &[&target]).succeeds();
        machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
        assert_eq!(entries(&machine), 0);
    }
}

#[test]
fn two_at_once_take_turns_on_one_process() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let first = in_the_middle(&machine, &["suspend", "--quiet"], &[&target], "checkpoint");
    let second = checkpoint(&machine, &["resume", "--quiet"], &[&target]).spawn();
    go(&machine);
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    // Whichever came second: it found what the other one had left.
    assert_eq!(machine.cuda_state(target.pid()), RUNNING);
    assert_eq!(entries(&machine), 0);
}
