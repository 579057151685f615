//! `env`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use serde_json::json;

use crate::support::{Sandbox, U0, freeze, pid, uni_cumps};

const A: &str = "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log
";
const B: &str = "export CUDA_VISIBLE_DEVICES=GPU-U1
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/b/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/b/log
";

#[test]
fn env_basic() {
    let machine = Sandbox::new();
    machine.conduct("servers 4711");
    machine.start(&["--name", "a"]);
    machine.run(["env"]).prints(A).said_nothing();
    machine
        .run(["env", "--name", "a", "--shell", "posix"])
        .prints(A);
    for args in [
        vec!["env", "--json"],
        vec!["env", "--name", "a", "--json", "--shell", "posix"],
    ] {
        let variables = machine.run(args).succeeds().json();
        let directory = machine.runtime().join("a");
        assert_eq!(
            variables,
            json!({
                "env": {
                    "CUDA_MPS_LOG_DIRECTORY": directory.join("log"),
                    "CUDA_MPS_PIPE_DIRECTORY": directory.join("pipe"),
                    "CUDA_VISIBLE_DEVICES": U0,
                },
                "name": "a",
            })
        );
    }
    // A client finds the daemon by it.
    let code = machine.run(["env"]).succeeds();
    let code = String::from_utf8(code.stdout).unwrap();
    let answer = machine.sh(&format!("{code}\necho get_server_list | \"$CONTROL\""));
    assert_eq!(answer, "4711\n");
}

#[test]
fn env_none() {
    let machine = Sandbox::new();
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live")
        .said("hint: uni-cumps start");
    let failure = machine.run(["env", "--json"]).finish().exited(1).json();
    assert_eq!(failure["error"]["code"], "no-live-daemon");
    assert!(!machine.records().exists(), "nothing is written");
    machine.sh("mkdir -p \"$REC\"");
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live");
}

#[test]
fn env_multiple() {
    let machine = Sandbox::with_gpus(2);
    machine.start(&["--gpus", "0", "--name", "a"]);
    machine.start(&["--gpus", "1", "--name", "b"]);
    machine
        .run(["env"])
        .fails_in_the_shell("several daemons are live: a, b");
    machine.run(["env", "--name", "a"]).prints(A);
    machine.run(["env", "--name", "b"]).prints(B);
    machine
        .run(["env", "--name", "c"])
        .fails_in_the_shell("no daemon named c is recorded");
}

#[test]
fn env_stale() {
    let machine = Sandbox::with_gpus(2);
    let a = machine.start(&["--gpus", "0", "--name", "a"]);
    machine.kill(pid(&a));
    machine
        .run(["env"])
        .fails_in_the_shell("no recorded daemon is live");
    machine
        .run(["env", "--name", "a"])
        .fails_in_the_shell("daemon a is no longer running")
        .said("hint: uni-cumps start --name a");
    let failure = machine
        .run(["env", "--name", "a", "--json"])
        .finish()
        .exited(1)
        .json();
    assert_eq!(failure["error"]["code"], "stale");
    machine.start(&["--gpus", "1", "--name", "b"]);
    machine.run(["env"]).prints(B);
}

#[test]
fn env_no_gpu_query() {
    let machine = Sandbox::new();
    let queries = |verb: &str| {
        machine.calls();
        machine.run([verb]).succeeds();
        let calls = machine.calls();
        (calls.matches("nvidia-smi").count(), calls)
    };
    assert_eq!(queries("status").0, 1);
    assert_eq!(queries("start").0, 1);
    assert_eq!(queries("env"), (0, String::new()), "no program at all");
    assert_eq!(queries("doctor").0, 1);
    assert_eq!(queries("stop").0, 0);
}

#[test]
fn env_hung_daemon() {
    let machine = Sandbox::new();
    let record = machine.start(&["--name", "a"]);
    freeze(pid(&record));
    machine.run(["env"]).prints(A);
    machine.run(["env", "--name", "a"]).prints(A);
}

#[test]
fn name_invalid_env_stop() {
    let machine = Sandbox::new();
    for name in ["../x", "A", ""] {
        machine
            .run(["env", "--name", name])
            .fails_in_the_shell("is not a daemon name");
        machine
            .run(["stop", "--name", name])
            .fails("is not a daemon name");
    }
    machine
        .run(["env", "--name", "nope"])
        .fails_in_the_shell("no daemon named nope is recorded");
    machine
        .run(["stop", "--name", "nope"])
        .fails("no daemon named nope is recorded");
    assert!(!machine.path("h/.cache").exists(), "nothing is written");
}

/// The POSIX shells of this machine. Those that are missing are named, past the capture of the test's output.
static SHELLS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut found = vec!["/bin/sh".to_owned()];
    for name in ["dash", "bash", "zsh", "ksh"] {
        let places = ["/bin", "/usr/bin", "/usr/local/bin"].map(|bin| format!("{bin}/{name}"));
        match places.into_iter().find(|path| Path::new(path).exists()) {
            Some(path) => found.push(path),
            None => {
                let note = format!("{name} is not installed: env is not tried in it\n");
                io::stderr().write_all(note.as_bytes()).unwrap();
            }
        }
    }
    found
});

#[test]
fn every_shell_takes_the_variables_byte_for_byte() {
    for odd in [
        "with blank",
        " a  b ",
        "it's",
        "say \"x\"",
        "$HOME`id`$(id)",
        "back\\slash\\",
        "new\nline",
        "*?[a]~#&;|<>(){}!",
        "é\u{9b}\u{1b}[31m",
        "-n=%s\t",
    ] {
        let machine = Sandbox::new();
        let (home, tmp) = (machine.path("h").join(odd), machine.path("t").join(odd));
        fs::create_dir(&home).unwrap();
        fs::create_dir(&tmp).unwrap();
        let record = machine
            .run(["start", "--name", "a"])
            .env("HOME", &home)
            .env("TMPDIR", &tmp)
            .succeeds()
            .json();
        assert!(home.join(".cache/unilab/cuda-mps/a/daemon.json").exists());
        assert_eq!(
            record["pipe_directory"],
            json!(tmp.join("uni-cumps/a/pipe"))
        );
        let expected = format!(
            "{U0}\0{0}/uni-cumps/a/pipe\0{0}/uni-cumps/a/log\0",
            tmp.display()
        );
        for shell in SHELLS.iter() {
            let output = Command::new(shell)
                .arg("-c")
                .arg(
                    "set -eu
                     eval \"$(\"$UNI_CUMPS\" env)\"
                     exec /usr/bin/env -0",
                )
                .env_clear()
                .env("UNI_CUMPS", uni_cumps())
                .env("HOME", &home)
                .env("TMPDIR", &tmp)
                .stdin(Stdio::null())
                .output()
                .unwrap();
            assert!(output.status.success(), "{shell} {odd:?}: {output:?}");
            let value = |key: &str| {
                let key = format!("{key}=");
                let exported = output.stdout.split(|byte| *byte == 0);
                let mut entries = exported.filter_map(|entry| entry.strip_prefix(key.as_bytes()));
                let entry = entries.next().unwrap_or_default();
                String::from_utf8_lossy(entry).into_owned() + "\0"
            };
            let exported = value("CUDA_VISIBLE_DEVICES")
                + &value("CUDA_MPS_PIPE_DIRECTORY")
                + &value("CUDA_MPS_LOG_DIRECTORY");
            assert_eq!(exported, expected, "{shell}");
        }
        machine
            .run(["stop"])
            .env("HOME", &home)
            .env("TMPDIR", &tmp)
            .succeeds();
        machine.has_no_daemon();
    }
}

#[test]
fn a_shell_that_stops_at_errors_stops_where_there_is_no_daemon() {
    let machine = Sandbox::new();
    for shell in SHELLS.iter() {
        let done = machine
            .run(["env"])
            .under([
                shell,
                "-c",
                "set -e; eval \"$(\"$@\")\"; echo reached",
                "sh",
            ])
            .finish();
        assert_ne!(done.code, 0, "{shell}");
        done.printed("");
    }
}
