//! strace: which system calls a command makes, and ending it at one of them or making that one fail.
//!
//! Without `-f` strace watches the binary's first thread and none of the programs it calls.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::world::World;

/// The calls that matter: other programs, processes, and everything done with files. strace leaves out the names that a
/// machine does not know (`?`).
const CALLS: [&str; 27] = [
    "clone",
    "clone3",
    "vfork",
    "fork",
    "wait4",
    "waitid",
    "pidfd_open",
    "pidfd_send_signal",
    "kill",
    "openat",
    "mkdir",
    "mkdirat",
    "rename",
    "renameat",
    "renameat2",
    "link",
    "linkat",
    "unlink",
    "unlinkat",
    "rmdir",
    "fsync",
    "fdatasync",
    "write",
    "fchmod",
    "fcntl",
    "flock",
    "connect",
];

/// One call, as strace shows it.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) name: String,
    /// The how many-th call of this name it is, from 1.
    pub(crate) number: usize,
    pub(crate) line: String,
}

impl Call {
    /// It only looks, so being killed before it leaves the same as being killed before the next call. What other
    /// programs do meanwhile is not looked at here: waiting for them counts.
    pub(crate) fn only_looks(&self) -> bool {
        match self.name.as_str() {
            "openat" => !self.line.contains("O_CREAT"),
            // The first is the standard library's own question, in debug builds, whether a descriptor is still open.
            "fcntl" => self.line.contains("F_GETFD") || self.line.contains("F_GETLK"),
            _ => false,
        }
    }
}

fn strace() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|directory| directory.join("strace"))
        .find(|file| file.is_file())
}

/// Why calls cannot be traced here, if they cannot.
pub(crate) fn missing() -> Option<String> {
    let Some(strace) = strace() else {
        return Some("strace is not installed".to_owned());
    };
    let mut probe = Command::new(strace);
    probe.args(["-qq", "-o/dev/null", "-etrace=openat"]);
    probe.args(["-einject=openat:signal=KILL:when=1", "/bin/true"]);
    let output = probe.stdin(Stdio::null()).output().unwrap();
    let works = output.status.signal() == Some(9);
    let said = String::from_utf8_lossy(&output.stderr);
    (!works).then(|| format!("strace does not work here: {}", said.trim()))
}

/// How a command under strace ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The exit status; a signal is negative.
    pub(crate) code: i32,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn by_kill(&self) -> bool {
        self.code == -9
    }
}

/// A command of the binary under strace. Its output goes to files: a daemon that it leaves behind may keep them open.
pub(crate) struct Traced {
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Traced {
    fn start(world: &World, args: &[&str], options: &[String]) -> Self {
        let stdout = world.machine.path("stdout");
        let stderr = world.machine.path("stderr");
        let strace = strace().unwrap();
        let words = [strace.to_str().unwrap(), "-qq", "-y"];
        let words = words.into_iter().chain(options.iter().map(String::as_str));
        let child = world
            .machine
            .run(args)
            .under(words)
            .command()
            .stdout(File::create(&stdout).unwrap())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        Self {
            child,
            stdout,
            stderr,
        }
    }

    pub(crate) fn has_printed(&self) -> bool {
        fs::metadata(&self.stdout).is_ok_and(|meta| meta.len() > 0)
    }

    /// How it has ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<Ended> {
        let status = self.child.try_wait().unwrap()?;
        Some(Ended {
            code: status
                .code()
                .unwrap_or_else(|| -status.signal().unwrap_or(0)),
            stderr: fs::read_to_string(&self.stderr).unwrap_or_default(),
        })
    }

    pub(crate) fn wait(mut self) -> Ended {
        self.child.wait().unwrap();
        let ended = self.ended().unwrap();
        assert!(!ended.stderr.contains("strace: "), "{ended:?}");
        ended
    }
}

/// The calls that the command makes, of those that matter.
pub(crate) fn calls(world: &World, run: impl FnOnce(Traced) -> Ended, args: &[&str]) -> Vec<Call> {
    let log = log(world);
    let names = CALLS.map(|name| format!("?{name}")).join(",");
    let options = [format!("-o{}", log.display()), format!("-etrace={names}")];
    let ended = run(Traced::start(world, args, &options));
    assert!(ended.code == 0 || ended.code == 1, "{ended:?}");
    read(&log)
}

fn read(log: &Path) -> Vec<Call> {
    let text = fs::read_to_string(log).unwrap();
    let mut numbers = BTreeMap::new();
    text.lines()
        .filter_map(|line| {
            let (name, _) = line.split_once('(')?;
            let number = numbers.entry(name.to_owned()).or_insert(0);
            CALLS.contains(&name).then(|| {
                *number += 1;
                Call {
                    name: name.to_owned(),
                    number: *number,
                    line: line.to_owned(),
                }
            })
        })
        .collect()
}

fn log(world: &World) -> PathBuf {
    world.machine.path("strace")
}

/// Starts the command, which SIGKILL ends before its `number`-th call of `name`.
pub(crate) fn kill_at(world: &World, args: &[&str], name: &str, number: usize) -> Traced {
    inject(world, args, name, &format!("signal=KILL:when={number}"))
}

/// Starts the command, whose `number`-th call of `name` fails with `error` and does nothing.
pub(crate) fn fail_at(
    world: &World,
    args: &[&str],
    name: &str,
    number: usize,
    error: &str,
) -> Traced {
    inject(world, args, name, &format!("error={error}:when={number}"))
}

fn inject(world: &World, args: &[&str], name: &str, what: &str) -> Traced {
    let options = [
        format!("-o{}", log(world).display()),
        format!("-etrace={name}"),
        format!("-einject={name}:{what}"),
    ];
    Traced::start(world, args, &options)
}

/// The call that was made to fail. Which one comes `number`-th may change a little from run to run: a command that waits
/// looks more or less often.
pub(crate) fn failed(world: &World) -> String {
    let text = fs::read_to_string(log(world)).unwrap_or_default();
    let line = text.lines().find(|line| line.ends_with("(INJECTED)"));
    line.unwrap_or("none").to_owned()
}
