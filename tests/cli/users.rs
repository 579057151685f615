//! Several users on one machine, and what one of them prepares for another. These tests need root.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::directories::{home_of, mode};
use crate::support::{Call, N0, Sandbox, Sleeper, is_running, our_uid, pid, without_root};

const USER: u32 = 1000;
const ATTACKER: u32 = 65534;

/// A call of a user who has this home.
fn as_user<'s>(machine: &'s Sandbox, uid: u32, home: &Path, args: &[&str]) -> Call<'s> {
    machine.run(args).user(uid).env("HOME", home)
}

/// A shell line of another user.
fn sh_as(machine: &Sandbox, uid: u32, line: &str) {
    machine.sh(&format!(
        "setpriv --reuid={uid} --regid={uid} --clear-groups /bin/sh -ec '{line}'"
    ));
}

fn owner(path: impl AsRef<Path>) -> u32 {
    fs::symlink_metadata(path).unwrap().uid()
}

/// What is in a directory, by name.
fn names_in(directory: PathBuf) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The directories of a user whose TMPDIR has somebody else's `uni-cumps`: private, and his own all the way.
#[track_caller]
fn has_directories_of_his_own(machine: &Sandbox, uid: u32, name: &str) {
    let parent = machine.path(format!("t/uni-cumps-{uid}"));
    let own = parent.join(name);
    for directory in [&parent, &own, &own.join("pipe"), &own.join("log")] {
        assert_eq!(owner(directory), uid, "{directory:?}");
        assert_eq!(mode(directory), 0o700, "{directory:?}");
    }
}

#[test]
fn user_lifecycle() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let call = |args: &[&str]| as_user(&machine, USER, &home, args);
    let record = call(&["start"]).succeeds().said_nothing().json();
    assert_eq!(record["uid"], USER);
    let own = machine.runtime().join(N0);
    let records = home.join(".cache/unilab/cuda-mps");
    for directory in [
        &records,
        &records.join(N0),
        &machine.runtime(),
        &own,
        &own.join("pipe"),
        &own.join("log"),
    ] {
        assert_eq!(owner(directory), USER, "{directory:?}");
        assert_eq!(mode(directory), 0o700, "{directory:?}");
    }
    let file = records.join(N0).join("daemon.json");
    assert_eq!((owner(&file), mode(&file)), (USER, 0o600));
    assert_eq!(owner(own.join("pipe/control")), USER);
    assert_eq!(owner(format!("/proc/{}", pid(&record))), USER);

    call(&["status"]).prints(&format!(
        "platform=Linux nvidia_smi_available=True
gpu index=0 uuid=GPU-U0
daemon name=gpu-u0 state=live pid={} mode=single_gpu gpus=GPU-U0 servers=0 clients=0 age_s=…
compatible_topology_modes=single_gpu,single_task_multi_gpu,task_per_gpu
",
        pid(&record)
    ));
    call(&["env"]).prints(
        "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/gpu-u0/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/gpu-u0/log
",
    );
    let stopped = call(&["stop"]).succeeds().said_nothing().json();
    assert_eq!(stopped, json!({"stopped": [record]}));
    machine.has_no_daemon();
    assert!(!records.join(N0).exists());
    assert_eq!(names_in(own), ["log"]);
}

#[test]
fn two_users_own_tmpdir() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let mut pids = Vec::new();
    for uid in [USER, ATTACKER] {
        let home = home_of(&machine, uid);
        let call = |args: &[&str]| as_user(&machine, uid, &home, args).env("TMPDIR", &home);
        let record = call(&["start"]).succeeds().json();
        let status = call(&["status"]).succeeds().text();
        let line = format!("daemon name=gpu-u0 state=live pid={} ", pid(&record));
        assert!(status.contains(&line), "{status}");
        assert_eq!(status.matches("daemon name=").count(), 1, "{status}");
        pids.push(pid(&record));
    }
    pids.sort_unstable();
    let mut daemons = machine.daemons();
    daemons.sort_unstable();
    assert_eq!(daemons, pids);
}

#[test]
fn second_user() {
    if without_root() {
        return;
    }
    let machine = Sandbox::with_gpus(2);
    let homes = [USER, ATTACKER].map(|uid| (uid, home_of(&machine, uid)));
    let [(first, first_home), (second, second_home)] = &homes;
    let record = as_user(&machine, *first, first_home, &["start", "--gpus", "0"])
        .succeeds()
        .json();
    let own = machine.runtime().join(N0);
    assert_eq!(record["pipe_directory"], own.join("pipe").to_str().unwrap());
    let record = as_user(&machine, *second, second_home, &["start", "--gpus", "1"])
        .succeeds()
        .json();
    has_directories_of_his_own(&machine, *second, record["name"].as_str().unwrap());
    assert_eq!(machine.daemons().len(), 2);
    for (uid, home) in &homes {
        as_user(&machine, *uid, home, &["env"]).succeeds();
        as_user(&machine, *uid, home, &["stop"]).succeeds();
    }
    machine.has_no_daemon();
}

// What somebody prepared.

#[test]
fn attack_chmod_symlink_root() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    machine.sh("mkdir etc-like; chmod 755 etc-like; echo data > etc-like/passwd-like");
    sh_as(
        &machine,
        ATTACKER,
        "mkdir $RT; chmod 777 $RT; ln -s $S/etc-like $RT/$N0",
    );
    machine.start(&[]);
    assert_eq!(mode(machine.path("etc-like")), 0o755);
    assert_eq!(names_in(machine.path("etc-like")), ["passwd-like"]);
    has_directories_of_his_own(&machine, 0, N0);
}

#[test]
fn attack_chmod_symlink_user() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let public = home.join("public_html");
    sh_as(
        &machine,
        USER,
        "mkdir h1000/public_html; chmod 755 h1000/public_html",
    );
    sh_as(
        &machine,
        ATTACKER,
        "mkdir $RT; chmod 777 $RT; ln -s $S/h1000/public_html $RT/$N0",
    );
    as_user(&machine, USER, &home, &["start"]).succeeds();
    assert_eq!(mode(&public), 0o755);
    assert_eq!(names_in(public), Vec::<String>::new());
    has_directories_of_his_own(&machine, USER, N0);
}

#[test]
fn attack_log_append() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    machine.sh("echo \"root file\" > victim.txt; chmod 600 victim.txt");
    sh_as(
        &machine,
        ATTACKER,
        "mkdir -p $RT/$N0/log; chmod 777 $RT; ln -s $S/victim.txt $RT/$N0/log/control.log",
    );
    machine.start(&[]);
    assert_eq!(machine.sh("cat victim.txt"), "root file\n");
    has_directories_of_his_own(&machine, 0, N0);
}

#[test]
fn attack_pipe_symlink_lock() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    machine.sh(
        "mkdir -p -m 700 m/p m/l; CUDA_MPS_PIPE_DIRECTORY=$S/m/p CUDA_MPS_LOG_DIRECTORY=$S/m/l \"$CONTROL\" -d",
    );
    let other = machine.daemons();
    let before = names_in(machine.path("m/p"));
    sh_as(
        &machine,
        ATTACKER,
        "mkdir -p $RT/$N0; chmod 777 $RT; ln -s $S/m/p $RT/$N0/pipe",
    );
    machine.start(&[]);
    assert_eq!(names_in(machine.path("m/p")), before);
    has_directories_of_his_own(&machine, 0, N0);
    machine.run(["stop"]).succeeds();
    assert_eq!(machine.daemons(), other);
    assert_eq!(names_in(machine.path("m/p")), before);
}

#[test]
fn attack_dos_precreate() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    sh_as(&machine, ATTACKER, "mkdir -p $RT/$N0; chmod 777 $RT");
    for name in [N0, "other"] {
        let call = |args: &[&str]| as_user(&machine, USER, &home, args);
        call(&["start", "--name", name]).succeeds();
        has_directories_of_his_own(&machine, USER, name);
        call(&["env"]).succeeds();
        call(&["stop"]).succeeds();
    }
    machine.has_no_daemon();
    assert_eq!(names_in(machine.runtime()), [N0]);
}

#[test]
fn a_link_in_place_of_the_shared_parent_is_not_followed() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    machine.sh("mkdir etc-like; chmod 755 etc-like");
    sh_as(&machine, ATTACKER, "ln -s $S/etc-like $RT");
    machine.start(&[]);
    assert_eq!(mode(machine.path("etc-like")), 0o755);
    assert_eq!(names_in(machine.path("etc-like")), Vec::<String>::new());
    has_directories_of_his_own(&machine, 0, N0);
}

#[test]
fn somebody_who_takes_both_default_places_is_named() {
    if without_root() {
        return;
    }
    for prepare in ["mkdir $RT $RT-0", "mkdir $RT; ln -s $S/etc-like $RT-0"] {
        let machine = Sandbox::new();
        machine.sh("mkdir etc-like; chmod 755 etc-like");
        sh_as(&machine, ATTACKER, prepare);
        machine
            .run(["start"])
            .fails("\"<S>/t/uni-cumps-0\" cannot be used as the parent of runtime directories")
            .said("uid 65534")
            .said("choose other directories with --pipe-dir and --log-dir");
        machine.has_no_daemon();
        assert_eq!(mode(machine.path("etc-like")), 0o755);
        assert_eq!(names_in(machine.path("etc-like")), Vec::<String>::new());
    }
}

// Whose HOME it is.

#[test]
fn sudo_keeps_home() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let record = machine.run(["start"]).env("HOME", &home).succeeds().json();
    // What is shared stays the user's: his cache, the directory of all records, their lock.
    for path in [
        "",
        ".cache",
        ".cache/unilab",
        ".cache/unilab/cuda-mps",
        ".cache/unilab/cuda-mps/.lock",
    ] {
        assert_eq!(owner(home.join(path)), USER, "{path}");
    }
    let call = |args: &[&str]| as_user(&machine, USER, &home, args);
    // Root's own record is closed to him, and he is told whose it is.
    let status = call(&["status"]).succeeds().text();
    assert!(status.contains("state=damaged"), "{status}");
    assert!(status.contains("belongs to uid 0"), "{status}");
    call(&["env"]).fails_in_the_shell("no recorded daemon is live");
    call(&["stop", "--name", N0]).fails("Permission denied");
    call(&["start"]).fails("Permission denied");
    let mine = call(&["start", "--name", "mine"]).succeeds().json();
    assert_eq!(mine["uid"], USER);
    call(&["stop"]).succeeds();
    assert_eq!(machine.daemons(), [pid(&record)]);
    machine.run(["stop"]).env("HOME", &home).succeeds();
    machine.has_no_daemon();
}

#[test]
fn record_other_uid() {
    let machine = Sandbox::new();
    let process = Sleeper::new();
    let mut record = machine.reference_record("a", process.pid());
    record["uid"] = json!(12345);
    machine.write_record("a", &record);
    let before = fs::read(machine.record_file("a")).unwrap();
    let sentence = &format!("daemon a belongs to uid 12345; you are uid {}", our_uid());
    let status = machine.run(["status"]).succeeds().text();
    assert!(status.contains("managed_daemons=none"), "{status}");
    machine
        .run(["env", "--name", "a"])
        .fails_in_the_shell(sentence);
    machine.run(["start", "--name", "a"]).fails(sentence);
    machine.run(["stop", "--name", "a"]).fails(sentence);
    let stopped = machine.run(["stop", "--all"]).succeeds().json();
    assert_eq!(stopped, json!({"stopped": []}));
    assert_eq!(fs::read(machine.record_file("a")).unwrap(), before);
    assert!(is_running(process.pid()));
    machine.has_no_daemon();
}

#[test]
fn a_daemon_that_runs_as_another_user_than_its_record_says_is_not_signalled() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let daemon = machine.start(&[]);
    let mut lie = daemon.clone();
    lie["uid"] = json!(USER);
    let directory = home.join(".cache/unilab/cuda-mps").join(N0);
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("daemon.json"), lie.to_string()).unwrap();
    for path in directory.ancestors().take(4) {
        chown(path, Some(USER), Some(USER)).unwrap();
    }
    chown(directory.join("daemon.json"), Some(USER), Some(USER)).unwrap();
    as_user(&machine, USER, &home, &["stop", "--name", N0])
        .finish()
        .exited(1);
    assert_eq!(machine.daemons(), [pid(&daemon)]);
    machine.run(["env"]).succeeds();
}

#[test]
fn doctor_knows_whose_daemon_serves_whom() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = machine.path("u");
    fs::create_dir(&home).unwrap();
    chown(&home, Some(1001), Some(1001)).unwrap();
    let [of_root, of_user] = ["r", "u"].map(|owner| {
        let directory = machine.path(owner).join("open");
        fs::create_dir_all(directory.join("pipe")).unwrap();
        directory
    });
    machine.sh("chown -R 1001:1001 u; chmod -R go+rx r u; chmod 1777 bin; : > bin/calls; chmod 666 bin/calls");
    let start = |directory: &Path| {
        machine
            .run(["start", "--force", "--pipe-dir"])
            .and(directory.join("pipe"))
            .and("--log-dir")
            .and(directory.join("log"))
    };
    start(&of_root).succeeds();
    start(&of_user).user(1001).env("HOME", &home).succeeds();
    let verdict = |directory: &Path, uid: u32| {
        let empty = machine.path("empty");
        let call = machine.run(["doctor", "--only", "identity", "--json"]);
        let report = call
            .user(uid)
            .env("HOME", empty)
            .env("CUDA_MPS_PIPE_DIRECTORY", directory.join("pipe"))
            .finish()
            .json();
        let error = report["cuda_process_sharing"]["error"].to_string();
        let check = report["checks"][0]["status"].as_str().unwrap().to_owned();
        (check, error.contains("serves that user only"))
    };
    assert_eq!(verdict(&of_root, 1001), ("ok".to_owned(), false));
    assert_eq!(verdict(&of_root, 0), ("ok".to_owned(), false));
    assert_eq!(verdict(&of_user, 1001), ("ok".to_owned(), false));
    assert_eq!(verdict(&of_user, 0), ("fail".to_owned(), true));
    assert_eq!(verdict(&of_user, 1002), ("fail".to_owned(), true));
}
