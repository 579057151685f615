//! A machine with a stranger's control daemon on it, what is to be found there, and what must be true of it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde_json::Value;

use crate::Driver;
use crate::support::{N0, Sandbox, is_running, start_ticks};

/// The machine. All commands work on the daemon of its only GPU.
pub(crate) struct World {
    pub(crate) machine: Sandbox,
    /// A daemon that somebody has started by hand, with directories of its own.
    stranger: i32,
    /// The file tree, seen from here: another one if the commands run in another mount namespace.
    tree: PathBuf,
}

pub(crate) const NSENTER: &str = "/usr/bin/nsenter";

/// The word for what must never be, unless a scene begins with it.
pub(crate) const NO_RECORD: &str = "daemon without a record";

/// What a command has left.
#[derive(Clone, Default)]
pub(crate) struct Found {
    /// The daemons, without the stranger's.
    pub(crate) daemons: Vec<i32>,
    pub(crate) record: Option<Value>,
    pub(crate) intent: Option<Value>,
}

impl std::fmt::Debug for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pid = |record: &Option<Value>| match record {
            Some(record) => format!("of pid {}", record["pid"]),
            None => "none".to_owned(),
        };
        let (record, intent) = (pid(&self.record), pid(&self.intent));
        let daemons = &self.daemons;
        write!(f, "[daemons {daemons:?}, record {record}, intent {intent}]")
    }
}

impl Found {
    /// In the words of the figures.
    pub(crate) fn word(&self) -> &'static str {
        match (&self.record, &self.intent, self.daemons.is_empty()) {
            (Some(_), _, false) => "recorded",
            (Some(_), _, true) => "stale record",
            (None, Some(_), false) => "interrupted intent with a daemon",
            (None, Some(_), true) => "interrupted intent",
            (None, None, false) => NO_RECORD,
            (None, None, true) => "nothing",
        }
    }
}

fn pid_of(record: &Value) -> i32 {
    i32::try_from(record["pid"].as_i64().unwrap()).unwrap()
}

/// Whether the process that a record means is running.
fn runs(record: &Value) -> bool {
    let pid = pid_of(record);
    is_running(pid) && start_ticks(pid) == record["process_start_ticks"].as_u64()
}

fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// The pipe directory that a control program was started with.
fn pipe_of(pid: i32) -> Option<PathBuf> {
    let environ = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let environ = String::from_utf8_lossy(&environ);
    let key = "CUDA_MPS_PIPE_DIRECTORY=";
    let entry = environ
        .split('\0')
        .find_map(|entry| entry.strip_prefix(key))?;
    Some(entry.into())
}

fn lock_holder(pipe: &Path) -> Option<i32> {
    let file = File::open(pipe.join("control_lock")).ok()?;
    let mut wanted = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_GETLK(&mut wanted)).ok()?;
    (wanted.l_type != libc::F_UNLCK as libc::c_short).then_some(wanted.l_pid)
}

/// Whether somebody listens on the socket at `path`. Nothing is connected, so that nobody is disturbed.
fn is_listened_on(path: &Path) -> bool {
    const LISTENS: &str = "00010000";
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let path = path.to_str().unwrap();
    sockets
        .lines()
        .any(|line| line.ends_with(path) && line.split_whitespace().nth(3) == Some(LISTENS))
}

impl World {
    pub(crate) fn new(driver: &Driver) -> Self {
        let machine = driver.machine();
        let stranger = machine.start_by_hand("x/pipe", "x/log");
        Self {
            machine,
            stranger,
            tree: PathBuf::from("/"),
        }
    }

    /// The machine as the process `pid` sees it.
    pub(crate) fn seen_by(mut self, pid: u32) -> Self {
        self.tree = PathBuf::from(format!("/proc/{pid}/root"));
        self
    }

    /// Where `path` of the machine is for us.
    pub(crate) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.tree.join(path.strip_prefix("/").unwrap())
    }

    fn record_directory(&self) -> PathBuf {
        self.at(self.machine.records().join(N0))
    }

    pub(crate) fn record_file(&self) -> PathBuf {
        self.at(self.machine.record_file(N0))
    }

    pub(crate) fn intent_file(&self) -> PathBuf {
        self.record_file().with_file_name("starting.json")
    }

    /// The daemons that run here, without the stranger's.
    pub(crate) fn daemons(&self) -> Vec<i32> {
        let mut daemons = self.machine.daemons();
        daemons.retain(|pid| *pid != self.stranger);
        daemons
    }

    /// Whether the process is a control daemon that has come up.
    fn is_up(&self, pid: i32) -> bool {
        pipe_of(pid).is_some_and(|pipe| {
            lock_holder(&self.at(&pipe)) == Some(pid) && is_listened_on(&pipe.join("control"))
        })
    }

    /// The processes of this machine that are neither the stranger's daemon nor one that has come up. One between two
    /// programs has neither arguments nor an environment yet, so nobody can tell of which machine it is: it may be of
    /// this one. (Threads of the kernel have neither, nor a program.)
    fn restless(&self) -> Vec<i32> {
        let mark = self.machine.path("");
        let mark = mark.to_str().unwrap().trim_end_matches('/').as_bytes();
        let read = |process: &Path, file| fs::read(process.join(file)).unwrap_or_default();
        let is_named = |process: &Path| {
            let environ = read(process, "environ");
            environ.windows(mark.len()).any(|part| part == mark)
        };
        let is_nameless = |process: &Path| {
            let is_empty = ["environ", "cmdline"].map(|file| read(process, file).is_empty());
            is_empty == [true, true] && fs::read_link(process.join("exe")).is_ok()
        };
        // Asked once more in the end: it may have got its environment between two looks.
        let is_of_here =
            |process: &Path| is_named(process) || is_nameless(process) || is_named(process);
        fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| {
                let process = entry.ok()?.path();
                let pid = process.file_name()?.to_str()?.parse().ok()?;
                is_of_here(&process).then_some(pid)
            })
            .filter(|pid| *pid != self.stranger && !self.is_up(*pid) && is_running(*pid))
            .collect()
    }

    /// Waits until whatever was coming up is up and answers, and whatever was ending has ended.
    #[track_caller]
    pub(crate) fn settle(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let restless = self.restless();
            let lines: Vec<_> = restless.iter().map(|pid| command_line(*pid)).collect();
            // A daemon that is told to quit looks as ever for a while, but it does not answer.
            let answers = |pid: &i32| pipe_of(*pid).is_some_and(|pipe| self.answers_in(&pipe));
            let daemons = self.daemons();
            // One that ends may be a zombie to look at while another thread of it still holds the lock.
            let pipe = self.machine.runtime().join(N0).join("pipe");
            let holder = lock_holder(&self.at(&pipe));
            let is_held = holder.is_some_and(|holder| !daemons.contains(&holder));
            if restless.is_empty() && !is_held && daemons.iter().all(answers) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "neither up nor gone: {restless:?} {lines:?}, daemons {daemons:?}, lock {holder:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether a daemon in `pipe` answers a question.
    fn answers_in(&self, pipe: &Path) -> bool {
        let program = self.machine.bin().join("nvidia-cuda-mps-control");
        let mut question = match self.namespace() {
            None => Command::new(program),
            Some(namespace) => {
                let mut nsenter = Command::new(NSENTER);
                nsenter.arg(namespace).arg(program);
                nsenter
            }
        };
        question
            .env_clear()
            .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut question = question.spawn().unwrap();
        let mut input = question.stdin.take().unwrap();
        // It may not read it.
        let _ = input.write_all(b"hello\n");
        drop(input);
        let answer = question.wait_with_output().unwrap();
        String::from_utf8_lossy(&answer.stdout).contains("Unknown command \"hello\"")
    }

    /// What is here once it has settled.
    #[track_caller]
    pub(crate) fn find(&self) -> Found {
        self.settle();
        let read = |file: PathBuf| {
            let content = fs::read(&file).ok()?;
            let torn = |error| panic!("{error} in {file:?}: {content:?}");
            Some(serde_json::from_slice(&content).unwrap_or_else(torn))
        };
        Found {
            daemons: self.daemons(),
            record: read(self.record_file()),
            intent: read(self.intent_file()),
        }
    }

    /// What is here, and nothing of it is wrong. A daemon whose record the row itself has taken away is `lost`.
    #[track_caller]
    pub(crate) fn check(&self, lost: Option<i32>) -> Found {
        let found = self.find();
        assert!(found.daemons.len() < 2, "{found:?}");
        for daemon in &found.daemons {
            let recorded = found
                .record
                .as_ref()
                .is_some_and(|record| pid_of(record) == *daemon && runs(record));
            let intended = found.intent.as_ref().is_some_and(|intent| {
                intent["pipe_directory"].as_str() == pipe_of(*daemon).unwrap().to_str()
            });
            assert!(
                recorded || intended || lost == Some(*daemon),
                "nobody knows of the daemon {daemon}: {found:?}"
            );
        }
        if let Some(record) = &found.record
            && runs(record)
        {
            assert!(found.daemons.contains(&pid_of(record)), "{found:?}");
        }
        self.the_stranger_answers();
        found
    }

    #[track_caller]
    fn the_stranger_answers(&self) {
        assert!(is_running(self.stranger), "the stranger's daemon is gone");
        let pipe = self.machine.path("x/pipe");
        assert!(self.answers_in(&pipe), "the stranger's daemon is mute");
    }

    /// The option that takes nsenter to the commands' mount namespace, if it is another one.
    fn namespace(&self) -> Option<String> {
        let process = self.tree.parent()?;
        Some(format!("--mount={}/ns/mnt", process.display()))
    }

    /// A call of the binary on this machine.
    fn call(&self, args: &[&str]) -> crate::support::Call<'_> {
        let call = self.machine.run(args);
        match self.namespace() {
            None => call,
            Some(namespace) => call.under([NSENTER.to_owned(), namespace]),
        }
    }

    #[track_caller]
    pub(crate) fn run(&self, args: &[&str]) -> crate::support::Done<'_> {
        let done = self.call(args).finish();
        assert!(matches!(done.code, 0 | 1), "{done:?}");
        assert!(!done.stderr.contains("panicked"), "{done:?}");
        assert_eq!(done.code == 1, done.stderr.contains("error: "), "{done:?}");
        done
    }

    /// The record directories as they are, for seeing that they stay so.
    fn listing(&self) -> Vec<(PathBuf, Vec<u8>)> {
        fn walk(directory: &Path, list: &mut Vec<(PathBuf, Vec<u8>)>) {
            for entry in fs::read_dir(directory).into_iter().flatten() {
                let path = entry.unwrap().path();
                list.push((path.clone(), fs::read(&path).unwrap_or_default()));
                walk(&path, list);
            }
        }
        let mut list = Vec::new();
        walk(&self.at(self.machine.records()), &mut list);
        list.sort();
        list
    }

    /// `status` says what was found and changes nothing.
    #[track_caller]
    pub(crate) fn status_tells(&self, found: &Found) {
        let before = self.listing();
        let done = self.run(&["status"]).exited(0);
        assert_eq!(self.listing(), before);
        let text = done.text();
        let word = match (&found.record, &found.intent) {
            (Some(record), _) if runs(record) => "daemon name=gpu-u0",
            (Some(_), _) => "state=stale",
            (None, Some(_)) => "state=interrupted",
            (None, None) => "managed_daemons=none",
        };
        assert!(text.contains(word), "{found:?}: {done:?}");
        let live = found.record.as_ref().is_some_and(runs);
        assert_eq!(text.contains("state=live"), live, "{found:?}: {done:?}");
    }

    /// `start` succeeds or, where it refuses, a second one does. Afterwards one daemon runs, and it is recorded.
    /// Returns how many refusals there were.
    #[track_caller]
    pub(crate) fn start_brings_one_up(&self, found: &Found) -> usize {
        let live = found.record.as_ref().filter(|record| runs(record));
        let first = self.run(&["start"]);
        let mut refusals = 0;
        match live {
            Some(record) => {
                let sentence = format!("is already live with pid {}", record["pid"]);
                first.exited(1).said(&sentence);
            }
            None if first.code == 0 => {}
            None => {
                refusals = 1;
                self.check(None);
                let second = self.run(&["start"]);
                assert_eq!(second.code, 0, "first {first:?}\nthen {second:?}");
            }
        }
        let now = self.check(None);
        assert_eq!(now.word(), "recorded", "{now:?}");
        if live.is_none() {
            assert!(now.intent.is_none(), "{now:?}");
        }
        self.status_tells(&now);
        refusals
    }

    /// `stop` succeeds, and nothing of ours is left.
    #[track_caller]
    pub(crate) fn stop_ends_it(&self) {
        let done = self.run(&["stop", "--name", N0]).exited(0);
        assert!(self.daemons().is_empty(), "it returned too early: {done:?}");
        self.has_nothing_left();
    }

    /// `stop` ends what a killed command has left, or finds nothing to end; then one can be started and stopped.
    #[track_caller]
    pub(crate) fn stop_comes_first(&self, found: &Found) {
        let done = self.run(&["stop", "--name", N0]);
        let sentence = match (found.daemons.is_empty(), found.word()) {
            (false, _) => None,
            (true, "nothing") => Some("no daemon named"),
            (true, _) => Some("was not running"),
        };
        match sentence {
            None => drop(done.exited(0)),
            Some(sentence) => drop(done.exited(1).said(sentence)),
        }
        let nothing = self.check(None);
        assert_eq!(nothing.word(), "nothing", "{nothing:?}");
        self.start_brings_one_up(&nothing);
        self.stop_ends_it();
    }

    /// No daemon but the stranger's, no record, no intent, no file that was to become one.
    #[track_caller]
    pub(crate) fn has_nothing_left(&self) {
        let found = self.check(None);
        assert_eq!(found.word(), "nothing", "{found:?}");
        let left: Vec<_> = fs::read_dir(self.record_directory())
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert!(left.is_empty(), "left in the record directory: {left:?}");
        assert!(!self.record_directory().exists());
    }

    /// Ends the daemons and forgets all, after something went wrong.
    pub(crate) fn end_all(&self) {
        let mut processes = self.machine.processes();
        processes.retain(|pid| *pid != self.stranger);
        for pid in processes {
            self.machine.kill(pid);
        }
        self.wipe();
    }

    /// Where `start` puts stale records aside.
    pub(crate) fn quarantine(&self) -> PathBuf {
        self.at(self.machine.records().join(".stale"))
    }

    /// Ends the daemons with SIGKILL, and waits until they are gone.
    #[track_caller]
    pub(crate) fn kill_daemons(&self) {
        for daemon in self.daemons() {
            self.machine.kill(daemon);
        }
        self.settle();
    }

    /// Forgets all that was ever recorded or logged. Nothing may be running.
    #[track_caller]
    pub(crate) fn wipe(&self) {
        assert_eq!(self.daemons(), Vec::<i32>::new());
        for directory in [self.machine.path("h/.cache"), self.machine.runtime()] {
            let _ = fs::remove_dir_all(self.at(directory));
        }
    }
}
