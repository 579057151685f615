//! What the daemon gets from its surroundings, and where it lives.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::libc;

use crate::support::{Sandbox, is_running, pid, uni_cumps, without_root};
use crate::{Driver, Test};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_caller_that_reads_to_the_end_is_not_kept_waiting",
        no_pipe_is_kept,
    ),
    (
        "a_lock_of_the_caller_is_free_after_the_caller",
        no_lock_is_kept,
    ),
    (
        "signals_that_the_caller_ignores_reach_the_daemon",
        no_signal_is_ignored,
    ),
    (
        "the_daemon_gets_a_small_environment_and_the_root_directory",
        environment,
    ),
    ("only_the_owner_reaches_the_daemon", only_the_owner),
    (
        "pipe_directories_of_87_bytes_work_and_88_are_refused",
        path_limit,
    ),
    ("strange_paths_come_back_byte_for_byte", strange_paths),
    ("a_link_or_a_wrapper_as_control_program_works", wrappers),
    ("no_shell_is_needed", no_shell),
    ("the_log_tells_only_of_this_start", log_of_this_start),
    ("an_unprivileged_user_has_his_own", unprivileged_user),
];

fn no_pipe_is_kept(driver: &Driver) {
    let machine = driver.machine();
    let line = format!(
        "exec 9>&1; x=$({0} start --name a 2>&1); test -n \"$x\"",
        uni_cumps().display()
    );
    // `output` reads the pipe to its end, which never comes while the daemon holds it.
    machine
        .run([""; 0])
        .under(["/usr/bin/timeout", "20", "/bin/bash", "-c", &line])
        .succeeds();
    let daemon = machine.daemons()[0];
    let open: Vec<String> = fs::read_dir(format!("/proc/{daemon}/fd"))
        .unwrap()
        .map(|entry| {
            fs::read_link(entry.unwrap().path())
                .unwrap()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    let foreign: Vec<&String> = open
        .iter()
        .filter(|target| !target.starts_with("socket:") && *target != "/dev/null")
        // The daemon's own.
        .filter(|target| *target != "anon_inode:[eventfd]")
        .filter(|target| !target.starts_with(&*machine.path("").to_string_lossy()))
        .collect();
    assert_eq!(foreign, Vec::<&String>::new(), "{open:?}");
}

fn no_lock_is_kept(driver: &Driver) {
    let machine = driver.machine();
    let line = format!(
        "exec 9>lock; flock 9; {} start --name a >/dev/null",
        uni_cumps().display()
    );
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    machine
        .run([""; 0])
        .under(["/bin/bash", "-c", &line])
        .env("PATH", path)
        .succeeds();
    machine.sh("flock -n lock true");
}

/// As after `nohup`, or `&` in a script. NVIDIA's daemon cuts a server off with SIGINT.
fn no_signal_is_ignored(driver: &Driver) {
    let machine = driver.machine();
    let line = "trap '' HUP INT QUIT USR1; exec \"$@\"";
    let start = machine.run(["start", "--name", "a"]);
    let record = start.under(["/bin/sh", "-c", line, "sh"]).succeeds().json();
    let daemon = procfs::process::Process::new(pid(&record)).unwrap();
    let ignored = daemon.status().unwrap().sigign;
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1] {
        assert_eq!(ignored >> (signal - 1) & 1, 0, "{signal} in {ignored:x}");
    }
}

fn environment(driver: &Driver) {
    let machine = driver.machine();
    fs::create_dir(machine.path("job")).unwrap();
    let record = machine
        .run(["start"])
        .cwd(machine.path("job"))
        .env("MY_SECRET_TOKEN", "hunter2")
        .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "0")
        .env("CUDA_VISIBLE_DEVICES", "0")
        .succeeds()
        .said("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        .json();
    let daemon = pid(&record);
    let environ = fs::read_to_string(format!("/proc/{daemon}/environ")).unwrap();
    let mut keys: Vec<&str> = environ
        .split_terminator('\0')
        .filter_map(|entry| Some(entry.split_once('=')?.0))
        .collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        [
            "CUDA_MPS_LOG_DIRECTORY",
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_MPS_PROTOCOL_VERSION",
            "CUDA_VISIBLE_DEVICES",
            "HOME",
            "LD_LIBRARY_PATH",
            "PATH",
            "TMPDIR",
        ]
    );
    assert!(environ.contains(&format!("CUDA_VISIBLE_DEVICES={}", crate::support::U0)));
    assert_eq!(
        fs::read_link(format!("/proc/{daemon}/cwd"))
            .unwrap()
            .to_str(),
        Some("/")
    );
}

fn only_the_owner(driver: &Driver) {
    if without_root() {
        return;
    }
    for mask in ["000", "002", "077"] {
        let machine = driver.machine();
        let line = format!(
            "umask {mask}; exec {} start --name a",
            uni_cumps().display()
        );
        machine
            .run([""; 0])
            .under(["/bin/sh", "-c", &line])
            .succeeds();
        for directory in [
            machine.runtime(),
            machine.runtime().join("a/pipe"),
            machine.records().join("a"),
        ] {
            assert_eq!(
                fs::metadata(&directory).unwrap().mode() & 0o7777,
                0o700,
                "{directory:?}"
            );
        }
        assert_eq!(
            fs::metadata(machine.record_file("a")).unwrap().mode() & 0o777,
            0o600
        );
        machine.sh(
            "! setpriv --reuid=65534 --regid=65534 --clear-groups env -i CUDA_MPS_PIPE_DIRECTORY=$RT/a/pipe $CONTROL </dev/null 2>/dev/null",
        );
    }
}

fn path_of(machine: &Sandbox, length: usize) -> String {
    let start = format!("{}/", machine.path("").display()).replace("//", "/");
    format!("{start}{}", "p".repeat(length - start.len()))
}

fn path_limit(driver: &Driver) {
    let machine = driver.machine();
    let longest = path_of(&machine, 87);
    machine.start(&["--name", "a", "--pipe-dir", &longest, "--log-dir", "l"]);
    machine.run(["stop"]).succeeds();
    let too_long = path_of(&machine, 88);
    machine
        .run([
            "start",
            "--name",
            "a",
            "--pipe-dir",
            &too_long,
            "--log-dir",
            "l2",
        ])
        .fails("88 bytes")
        .said("87");
    assert!(
        !machine.path("l2").exists(),
        "refused before anything is made"
    );
    machine.has_no_daemon();
}

fn strange_paths(driver: &Driver) {
    let machine = driver.machine();
    let name = "a b/q'uo\"te \\ $(x) `y` ;rm\n-é";
    let home = machine.path("h o'me");
    fs::create_dir(&home).unwrap();
    let pipe = machine.path("s").join(name);
    let start = [
        "start",
        "--pipe-dir",
        pipe.to_str().unwrap(),
        "--log-dir",
        "l",
    ];
    let record = machine.run(start).env("HOME", &home).succeeds().json();
    assert_eq!(record["pipe_directory"], pipe.to_str().unwrap());
    let env = machine.run(["env"]).env("HOME", &home).succeeds();
    let code = String::from_utf8(env.stdout).unwrap() + "\nprintf %s \"$CUDA_MPS_PIPE_DIRECTORY\"";
    assert_eq!(machine.sh(&code), pipe.to_str().unwrap());
    machine.run(["stop"]).env("HOME", &home).succeeds();
    machine.has_no_daemon();
}

fn wrappers(driver: &Driver) {
    let machine = driver.machine();
    let program = fs::read_link(machine.bin().join("nvidia-cuda-mps-control")).unwrap();
    machine.script(
        "nvidia-cuda-mps-control",
        &format!("exec {} \"$@\"", program.display()),
    );
    let daemon = pid(&machine.start(&["--name", "a"]));
    assert!(is_running(daemon));
    // Where the wrapper's server lies, only the wrapper knows.
    let doctor = ["doctor", "--skip", "server-program"];
    machine.run(doctor).succeeds();
    machine.run(["stop"]).succeeds();
    assert!(!is_running(daemon));
}

/// PATH holds NVIDIA's programs and nothing else.
fn no_shell(driver: &Driver) {
    let machine = driver.machine();
    assert_eq!(
        fs::read_dir(machine.bin()).unwrap().count(),
        3,
        "two programs and the GPUs' rows"
    );
    machine.start(&[]);
    machine.run(["status"]).succeeds();
    machine.run(["stop"]).succeeds();
}

fn log_of_this_start(driver: &Driver) {
    let machine = driver.machine();
    machine.start(&["--name", "a"]);
    machine.run(["stop"]).succeeds();
    // The next daemon cannot bind where a directory is.
    machine.sh("mkdir -p -m 700 $RT/a/pipe/control_privileged/x");
    let failed = machine
        .run(["start", "--name", "a"])
        .fails("did not start the daemon");
    assert!(!failed.stderr.contains("Exit with status"), "{failed:?}");
    machine.has_no_daemon();
    assert!(!machine.record_file("a").exists());
}

fn unprivileged_user(driver: &Driver) {
    if without_root() {
        return;
    }
    let machine = driver.machine();
    let user = 65534;
    machine.sh("mkdir -m 700 $S/hu; chown 65534:65534 $S/hu");
    let home = machine.path("hu");
    let record = machine
        .run(["start"])
        .user(user)
        .env("HOME", &home)
        .succeeds()
        .json();
    assert_eq!(record["uid"], user);
    let daemon = pid(&record);
    assert_eq!(fs::metadata(format!("/proc/{daemon}")).unwrap().uid(), user);
    machine
        .run(["doctor"])
        .user(user)
        .env("HOME", &home)
        .succeeds();
    machine
        .run(["stop"])
        .user(user)
        .env("HOME", &home)
        .succeeds();
    assert!(!is_running(daemon));
}
