//! Where pipes, logs and records lie: the options, TMPDIR, HOME, and what is made private.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use crate::support::{Call, Done, N0, Sandbox, our_uid, pid, set_mode, uni_cumps, without_root};

/// The permission bits of a path, and of a link itself.
pub(crate) fn mode(path: impl AsRef<Path>) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// A home directory of its own for the user `uid`.
pub(crate) fn home_of(machine: &Sandbox, uid: u32) -> PathBuf {
    let home = machine.path(format!("h{uid}"));
    fs::create_dir(&home).unwrap();
    chown(&home, Some(uid), Some(uid)).unwrap();
    home
}

/// `start --name a` with a pipe and a log directory.
fn start_in<'s>(machine: &'s Sandbox, pipe: impl AsRef<OsStr>, log: impl AsRef<OsStr>) -> Call<'s> {
    machine
        .run(["start", "--name", "a", "--pipe-dir"])
        .and(pipe)
        .and("--log-dir")
        .and(log)
}

/// A start that went wrong before anything was done.
#[track_caller]
fn nothing_was_done(machine: &Sandbox) {
    machine.has_no_daemon();
    assert!(!machine.record_file("a").exists());
    assert!(!machine.record_file(N0).exists());
    assert!(!machine.runtime().exists());
}

/// The directories that a record names, with the sandbox's path replaced.
fn directories(machine: &Sandbox, done: &Done<'_>) -> [String; 2] {
    let record = done.json();
    ["pipe_directory", "log_directory"].map(|key| machine.normal(record[key].as_str().unwrap()))
}

// Given directories.

#[test]
fn start_explicit_dirs() {
    let machine = Sandbox::new();
    let started = start_in(&machine, machine.path("x/p"), machine.path("x/l")).succeeds();
    assert_eq!(directories(&machine, &started), ["<S>/x/p", "<S>/x/l"]);
    for private in ["x/p", "x/l"] {
        assert_eq!(mode(machine.path(private)), 0o700, "{private}");
    }
    assert!(machine.path("x/p/control").exists());
    assert!(machine.path("x/l/control.log").exists());
    assert!(!machine.runtime().exists());
    machine.run(["env", "--name", "a"]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/x/p
export CUDA_MPS_LOG_DIRECTORY=<S>/x/l
",
    );
    machine.run(["stop", "--name", "a"]).succeeds();
    machine.has_no_daemon();
    assert_eq!(fs::read_dir(machine.path("x/p")).unwrap().count(), 0);
}

#[test]
fn start_pipe_dir_only() {
    let machine = Sandbox::new();
    let started = machine
        .run(["start", "--pipe-dir"])
        .and(machine.path("x/p"))
        .succeeds();
    assert_eq!(
        directories(&machine, &started),
        ["<S>/x/p", "<S>/t/uni-cumps/gpu-u0/log"]
    );
    let own = machine.runtime().join(N0);
    assert!(own.join("log/control.log").exists());
    assert!(!own.join("pipe").exists());
}

#[test]
fn start_log_dir_only() {
    let machine = Sandbox::new();
    let started = machine
        .run(["start", "--log-dir"])
        .and(machine.path("x/l"))
        .succeeds();
    assert_eq!(
        directories(&machine, &started),
        ["<S>/t/uni-cumps/gpu-u0/pipe", "<S>/x/l"]
    );
    assert!(machine.path("x/l/control.log").exists());
    assert!(!machine.runtime().join(N0).join("log").exists());
}

#[test]
fn start_same_dirs() {
    let machine = Sandbox::new();
    let sentence = "the pipe and the log directory must be different directories";
    let pipe = machine.path("x");
    for log in ["x", "x/../x/"] {
        start_in(&machine, &pipe, machine.path(log)).fails(sentence);
    }
    assert!(!pipe.exists());
    machine.sh("mkdir x; ln -s x y");
    start_in(&machine, &pipe, machine.path("y"))
        .fails(sentence)
        .said("both are \"<S>/x\"");
    nothing_was_done(&machine);
}

#[test]
fn start_log_named_log_in_pipe() {
    let machine = Sandbox::new();
    start_in(&machine, machine.path("x"), machine.path("x/log"))
        .fails("the log directory must not be named \"log\" within the pipe directory");
    assert!(!machine.path("x").exists());
    nothing_was_done(&machine);
}

#[test]
fn start_path_limit() {
    let machine = Sandbox::new();
    let log = machine.path("l");
    let of_length = |letter: &str, bytes: usize| {
        let room = bytes + 1 - machine.path("x").as_os_str().len();
        let filled = letter.repeat(room / letter.len()) + &"x".repeat(room % letter.len());
        machine.path(filled)
    };
    let longest = of_length("p", 87);
    start_in(&machine, &longest, &log).succeeds();
    assert!(longest.join("control_privileged").exists());
    machine.run(["stop"]).succeeds();
    // The limit counts bytes, not letters.
    for too_long in [of_length("q", 88), of_length("é", 88)] {
        start_in(&machine, &too_long, &log)
            .fails("the pipe directory's path is too long: 88 bytes, and CUDA MPS takes 87")
            .said(&format!("hint: --pipe-dir /tmp/mps-{}-a/pipe", our_uid()));
        assert!(!too_long.exists());
    }
    nothing_was_done(&machine);
}

#[test]
fn start_relative_dirs() {
    let machine = Sandbox::new();
    fs::create_dir(machine.path("w")).unwrap();
    start_in(&machine, "p", "../l")
        .cwd(machine.path("w"))
        .succeeds()
        .said("the pipe directory is \"<S>/w/p\", relative to the working directory");
    machine.run(["env", "--name", "a"]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/w/p
export CUDA_MPS_LOG_DIRECTORY=<S>/l
",
    );
}

#[test]
fn start_tilde() {
    let machine = Sandbox::with_gpus(2);
    let started = start_in(&machine, "~/p", "~/l")
        .and("--gpus")
        .and("0")
        .succeeds();
    assert_eq!(directories(&machine, &started), ["<S>/h/p", "<S>/h/l"]);
    machine
        .run(["start", "--name", "b", "--gpus", "1"])
        .and("--pipe-dir")
        .and("~nosuchuser/p")
        .and("--log-dir")
        .and(machine.path("l2"))
        .fails("there is no user \"~nosuchuser\"");
    assert!(!machine.path("l2").exists());
    assert!(!machine.record_file("b").exists());
}

#[test]
fn start_empty_dir_option() {
    let machine = Sandbox::new();
    let cwd = machine.path("w");
    fs::create_dir(&cwd).unwrap();
    let given = machine.path("given");
    for (pipe, log) in [(Path::new(""), given.as_path()), (&given, Path::new(""))] {
        start_in(&machine, pipe, log)
            .cwd(&cwd)
            .breaks_usage()
            .said("the path is empty");
    }
    assert_eq!(fs::read_dir(&cwd).unwrap().count(), 0);
    assert!(!given.exists());
    nothing_was_done(&machine);
}

#[test]
fn start_nonutf8_dir() {
    let machine = Sandbox::new();
    let odd = machine.path(OsStr::from_bytes(b"\xff"));
    start_in(&machine, &odd, machine.path("l")).fails("is not UTF-8");
    assert!(!odd.exists() && !machine.path("l").exists());
    nothing_was_done(&machine);
}

#[test]
fn start_chmods_user_dir() {
    let machine = Sandbox::new();
    let (shared, logs) = (machine.path("shared"), machine.path("logs"));
    machine.sh("mkdir shared logs; chmod 1777 shared; chmod 755 logs; touch shared/other");
    start_in(&machine, &shared, &logs)
        .fails("\"<S>/shared\" cannot be used as the pipe directory")
        .said("others may write to it (mode 1777)")
        .said("hint: name a directory of your own: <S>/shared/mps\n");
    assert_eq!((mode(&shared), mode(&logs)), (0o1777, 0o755));
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 1);
    nothing_was_done(&machine);

    set_mode(&shared, 0o755);
    start_in(&machine, &shared, &logs)
        .succeeds()
        .said("others can reach the daemon in \"<S>/shared\" (mode 0755): chmod 700 <S>/shared");
    assert_eq!((mode(&shared), mode(&logs)), (0o755, 0o755));
}

#[test]
fn a_log_directory_that_others_may_write_to_is_refused() {
    let machine = Sandbox::new();
    machine.sh("mkdir logs; chmod 770 logs");
    start_in(&machine, machine.path("p"), machine.path("logs"))
        .fails("\"<S>/logs\" cannot be used as the log directory")
        .said("others may write to it (mode 0770)");
    assert_eq!(mode(machine.path("logs")), 0o770);
    nothing_was_done(&machine);
}

#[test]
fn start_explicit_dir_restart() {
    let machine = Sandbox::new();
    let start = || start_in(&machine, machine.path("p"), machine.path("l"));
    for _ in 0..2 {
        start().succeeds();
        machine.run(["stop", "--name", "a"]).succeeds();
    }
    // And over the leftovers of a daemon that ended without us.
    let record = start().succeeds().json();
    machine.sh(
        "CUDA_MPS_PIPE_DIRECTORY=$S/p; export CUDA_MPS_PIPE_DIRECTORY; echo quit | \"$CONTROL\"",
    );
    crate::support::wait_until("it is gone", || machine.daemons().is_empty());
    assert!(machine.path("p/control").exists());
    let again = start().succeeds().json();
    assert_ne!(record["pid"], again["pid"]);
    assert_eq!(machine.daemons(), [pid(&again)]);
}

#[test]
fn start_dir_unwritable() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, 65534);
    machine.sh("mkdir -m 755 ro rp rl");
    let start = |pipe: &str, log: &str| start_in(&machine, machine.path(pipe), machine.path(log));
    start("ro/p", "ro/l")
        .user(65534)
        .env("HOME", &home)
        .fails("cannot create the directory \"<S>/ro/p\"")
        .said("Permission denied");
    start("rp", "rl")
        .user(65534)
        .env("HOME", &home)
        .fails("\"<S>/rp\" cannot be used as the pipe directory")
        .said("it belongs to uid 0, and you are uid 65534");
    assert_eq!(mode(machine.path("rp")), 0o755);
    start_in(&machine, machine.path("p"), "/dev/null/x")
        .fails("cannot create the directory \"/dev/null/x\"");
    assert!(!home.join(".cache/unilab/cuda-mps/a").exists());
    nothing_was_done(&machine);
}

// HOME and the records.

#[test]
fn start_home_missing() {
    let machine = Sandbox::new();
    let home = machine.path("nohome/x");
    let started = machine.run(["start"]).env("HOME", &home).succeeds();
    let file = home
        .join(".cache/unilab/cuda-mps")
        .join(N0)
        .join("daemon.json");
    assert_eq!(fs::read(file).unwrap(), started.stdout);
}

#[test]
fn start_record_dir_blocked() {
    let machine = Sandbox::new();
    fs::write(machine.path("h/.cache"), "").unwrap();
    for _ in 0..2 {
        machine
            .run(["start"])
            .fails("cannot create the record directory \"<S>/h/.cache/unilab\"");
        machine.has_no_daemon();
    }
    assert!(!machine.runtime().exists());
    assert_eq!(fs::read(machine.path("h/.cache")).unwrap(), b"");
}

#[test]
fn start_home_readonly_user() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = machine.path("h65534");
    fs::create_dir(&home).unwrap();
    set_mode(&home, 0o555);
    machine
        .run(["start"])
        .user(65534)
        .env("HOME", &home)
        .fails("cannot create the record directory")
        .said("Permission denied");
    nothing_was_done(&machine);
}

#[test]
fn start_cache_unsearchable() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, 65534);
    machine.sh("mkdir -p h65534/.cache/unilab/cuda-mps/a; chmod 000 h65534/.cache/unilab");
    let call = |args: &[&str]| machine.run(args).user(65534).env("HOME", &home);
    call(&["status"])
        .fails("cannot list the records in")
        .said("Permission denied");
    call(&["env"])
        .fails_in_the_shell("cannot list the records in")
        .said("Permission denied");
    call(&["start"])
        .fails("cannot create the record directory")
        .said("Permission denied");
    call(&["stop", "--all"])
        .fails("cannot list the records in")
        .said("Permission denied");
    call(&["stop", "--name", "a"])
        .fails("error: ")
        .said("Permission denied");
    nothing_was_done(&machine);
}

#[test]
fn home_unset_no_passwd() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let sentence = "HOME is not set and uid 12345 has no entry in the password database";
    machine.sh("mkdir t12345; chown 12345 t12345");
    let unset = |command: &str| {
        machine
            .run([command])
            .user(12345)
            .env("TMPDIR", machine.path("t12345"))
            .unset("HOME")
    };
    for command in ["status", "start", "stop"] {
        unset(command)
            .fails("the home directory is not known")
            .said(sentence);
        // An empty one is none.
        unset(command)
            .env("HOME", "")
            .fails("the home directory is not known")
            .said(sentence);
    }
    unset("env").fails_in_the_shell("the home directory is not known");
    nothing_was_done(&machine);
    assert_eq!(fs::read_dir(machine.path("t12345")).unwrap().count(), 0);
}

#[test]
fn home_relative() {
    let machine = Sandbox::new();
    let cwd = machine.path("w1");
    fs::create_dir(&cwd).unwrap();
    for command in ["start", "status", "stop", "doctor"] {
        machine
            .run([command])
            .cwd(&cwd)
            .env("HOME", "hh")
            .fails("the home directory is not known")
            .said("HOME=\"hh\" is not an absolute path");
    }
    machine
        .run(["env"])
        .cwd(&cwd)
        .env("HOME", "hh")
        .fails_in_the_shell("the home directory is not known");
    assert_eq!(fs::read_dir(cwd).unwrap().count(), 0);
    nothing_was_done(&machine);
}

#[test]
fn xdg_ignored() {
    let machine = Sandbox::new();
    machine.sh("mkdir -m 700 xr xc xs");
    let started = machine
        .run(["start"])
        .env("XDG_CACHE_HOME", machine.path("xc"))
        .env("XDG_STATE_HOME", machine.path("xs"))
        .env("XDG_RUNTIME_DIR", machine.path("xr"))
        .succeeds();
    assert_eq!(
        directories(&machine, &started),
        ["<S>/t/uni-cumps/gpu-u0/pipe", "<S>/t/uni-cumps/gpu-u0/log"]
    );
    assert!(machine.record_file(N0).exists());
    for unused in ["xr", "xc", "xs"] {
        assert_eq!(fs::read_dir(machine.path(unused)).unwrap().count(), 0);
    }
}

#[test]
fn paths_with_spaces_quotes() {
    let machine = Sandbox::new();
    let (home, tmp) = ("h o'me \"q\"", "t m'p $x");
    for directory in [home, tmp] {
        fs::create_dir(machine.path(directory)).unwrap();
    }
    let call = |args: &[&str]| {
        machine
            .run(args)
            .env("HOME", machine.path(home))
            .env("TMPDIR", machine.path(tmp))
    };
    let pipe = format!("<S>/{tmp}/uni-cumps/a/pipe");
    let log = format!("<S>/{tmp}/uni-cumps/a/log");
    let started = call(&["start", "--name", "a"]).succeeds();
    assert_eq!(directories(&machine, &started), [pipe.clone(), log.clone()]);

    let code = String::from_utf8(call(&["env"]).succeeds().stdout).unwrap();
    let seen = machine.sh(&format!(
        "{code}\nprintf '%s\\n' \"$CUDA_MPS_PIPE_DIRECTORY\" \"$CUDA_MPS_LOG_DIRECTORY\""
    ));
    assert_eq!(machine.normal(&seen), format!("{pipe}\n{log}\n"));
    let env = call(&["env", "--json"]).succeeds().json();
    let in_json = env["env"]["CUDA_MPS_PIPE_DIRECTORY"].as_str().unwrap();
    assert_eq!(machine.normal(in_json), pipe);
    call(&["stop"]).succeeds();
    machine.has_no_daemon();
}

// Modes.

/// Starts a daemon under a umask; whatever it is, what we make is private.
#[track_caller]
fn everything_is_private_under_the_umask(umask: &str) {
    let machine = Sandbox::new();
    let script = format!("umask {umask}; exec \"$@\"");
    machine
        .run(["start"])
        .under(["/bin/sh", "-c", &script, "sh"])
        .succeeds();
    let own = machine.runtime().join(N0);
    let record = machine.record_file(N0);
    let cache = machine.path("h/.cache");
    for directory in [
        &cache,
        &cache.join("unilab"),
        &machine.records(),
        &machine.records().join(N0),
        &machine.runtime(),
        &own,
        &own.join("pipe"),
        &own.join("log"),
    ] {
        assert_eq!(mode(directory), 0o700, "{directory:?}");
    }
    assert_eq!(mode(record), 0o600);
    machine.run(["stop"]).succeeds();
}

#[test]
fn umask_000() {
    everything_is_private_under_the_umask("000");
}

#[test]
fn umask_077() {
    everything_is_private_under_the_umask("077");
}

#[test]
fn our_own_directories_are_closed_again_if_somebody_opened_them() {
    let machine = Sandbox::new();
    machine.sh("mkdir -p $RT/$N0/pipe $RT/$N0/log; chmod -R 777 $RT");
    machine.start(&[]);
    let own = machine.runtime().join(N0);
    for directory in [
        &machine.runtime(),
        &own,
        &own.join("pipe"),
        &own.join("log"),
    ] {
        assert_eq!(mode(directory), 0o700, "{directory:?}");
    }
}

// TMPDIR.

#[test]
fn start_tmpdir_long() {
    let machine = Sandbox::new();
    let long = machine.path("t").join("d".repeat(40));
    fs::create_dir(&long).unwrap();
    machine
        .run(["start"])
        .env("TMPDIR", &long)
        .fails("the pipe directory's path is too long")
        .said(&format!("hint: --pipe-dir /tmp/mps-{}-", our_uid()));
    assert_eq!(fs::read_dir(long).unwrap().count(), 0);
    nothing_was_done(&machine);
}

#[test]
fn start_name_64_default_dir() {
    let machine = Sandbox::new();
    let name = "x".repeat(64);
    machine
        .run(["start", "--name", &name])
        .fails("the pipe directory's path is too long")
        .said(&format!(
            "hint: --pipe-dir /tmp/mps-{}-xxxxxxxxxxxxxxxx/pipe",
            our_uid()
        ));
    assert!(!machine.records().exists());
    nothing_was_done(&machine);
}

#[test]
fn tmpdir_differs() {
    let machine = Sandbox::new();
    let first = machine.start(&[]);
    fs::create_dir(machine.path("t2")).unwrap();
    let elsewhere = || machine.run(["start"]).env("TMPDIR", machine.path("t2"));
    elsewhere().fails("is already live with pid");
    assert_eq!(machine.daemons(), [pid(&first)]);
    assert!(!machine.path("t2/uni-cumps").exists());
    // Without its record nobody can know of the daemon in the other TMPDIR.
    machine.sh("rm -r $REC");
    let second = elsewhere().succeeds();
    assert_eq!(
        directories(&machine, &second)[0],
        "<S>/t2/uni-cumps/gpu-u0/pipe"
    );
    assert_eq!(machine.daemons().len(), 2);
}

/// The call sees the sandbox's directory `realtmp` as /tmp. The sandbox itself and the programs stay where they are.
fn with_a_tmp_of_its_own<'s>(machine: &Sandbox, call: Call<'s>) -> Call<'s> {
    let fake = machine.path("realtmp");
    let _ = fs::create_dir(&fake);
    set_mode(&fake, 0o1777);
    let mut script = String::new();
    let sandbox = machine.path("");
    for needed in [&sandbox, uni_cumps().parent().unwrap()] {
        if let Ok(below) = needed.strip_prefix("/tmp") {
            let place = fake.join(below);
            script += &format!(
                "/bin/mkdir -p {1:?}; /bin/mount --bind {0:?} {1:?}\n",
                needed, place
            );
        }
    }
    script += &format!("/bin/mount --rbind {fake:?} /tmp; exec \"$@\"");
    call.under(["/usr/bin/unshare", "-m", "/bin/sh", "-ec", &script, "sh"])
}

#[test]
fn real_tmp_default() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let start = machine.run(["start"]).unset("TMPDIR");
    let started = with_a_tmp_of_its_own(&machine, start).succeeds();
    assert_eq!(
        directories(&machine, &started),
        ["/tmp/uni-cumps/gpu-u0/pipe", "/tmp/uni-cumps/gpu-u0/log"]
    );
    assert_eq!(machine.daemons(), [pid(&started.json())]);
    let parent = machine.path("realtmp/uni-cumps");
    for directory in ["", N0, &format!("{N0}/pipe"), &format!("{N0}/log")] {
        assert_eq!(mode(parent.join(directory)), 0o700, "{directory}");
    }
    let stop = machine.run(["stop"]).unset("TMPDIR");
    with_a_tmp_of_its_own(&machine, stop).succeeds();
    machine.has_no_daemon();
}

#[test]
fn tmpdir_invalid() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let start = machine.run(["start"]).env("TMPDIR", "/nonexistent");
    let started = with_a_tmp_of_its_own(&machine, start)
        .succeeds()
        .said("TMPDIR=\"/nonexistent\" is not a directory; using /tmp");
    assert_eq!(
        directories(&machine, &started)[0],
        "/tmp/uni-cumps/gpu-u0/pipe"
    );
}

// After the end.

#[test]
fn stop_leaves_files() {
    let machine = Sandbox::new();
    machine.start(&[]);
    machine.run(["stop"]).succeeds();
    let own = machine.runtime().join(N0);
    assert!(!own.join("pipe").exists());
    assert!(!machine.records().join(N0).exists());
    let log = fs::read_to_string(own.join("log/control.log")).unwrap();
    assert!(log.contains("Starting control daemon\n"), "{log}");
    assert_eq!(fs::read_dir(own).unwrap().count(), 1);
}

#[test]
fn a_given_pipe_directory_is_emptied_and_stays() {
    let machine = Sandbox::new();
    machine.sh("mkdir -m 700 p; touch p/mine");
    start_in(&machine, machine.path("p"), machine.path("l")).succeeds();
    machine.run(["stop"]).succeeds();
    let left: Vec<_> = fs::read_dir(machine.path("p"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["mine"]);
}
