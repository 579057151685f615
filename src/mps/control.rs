//! The control program: how it is called to become the daemon, and how the daemon is asked.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::fcntl::OFlag;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::pipe::lock_is_held;
use crate::error::Error;
use crate::host::{Host, is_executable};
use crate::runner::{Finished, Invocation, Mode, RunError};

/// The control program, which is the daemon with `-d` or `-f` and otherwise asks it.
pub const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";

/// The arguments that make the control program the daemon.
const DETACHED: &str = "-d";
const FOREGROUND: &str = "-f";
/// The question that every daemon answers.
const SERVERS: &str = "get_server_list";

/// `-d` takes 3 to 6 ms. A loaded machine gets a thousand times that.
const LAUNCH_LIMIT: Duration = Duration::from_secs(10);

/// Variables of the caller that the daemon keeps. It passes them on to every server for its whole life, so nothing
/// personal is among them, and none of MPS but what we mean.
const KEPT: [&str; 11] = [
    "CUDA_DEVICE_ORDER",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_VISIBLE_DEVICES",
    "TMPDIR",
    "TZ",
    "USER",
];

/// The control daemon of one pipe directory, as it is called and asked.
pub struct Control<'h> {
    pub(super) host: &'h Host,
    program: PathBuf,
    pipe: PathBuf,
    pub(super) log: PathBuf,
    questions: AtomicU32,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens in the pipe directory.
    #[error("{0}")]
    NoDaemon(String),
    /// The daemon took the question and said nothing in time. Such a daemon is stopped, is leaving, or talks to a
    /// client that stays silent.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// Every session was dropped or failed.
    #[error("it dropped every session: {0}")]
    Dropped(String),
    /// Another process of ours kept talking to it all the time.
    #[error("another uni-cumps keeps asking it")]
    Busy,
    /// The control program could not be called.
    #[error("{CONTROL} cannot be called: {0}")]
    Call(RunError),
}

/// An answer, or why there is none. A signal is neither: it ends more than a question, and is the outer failure.
pub fn unless_interrupted<T>(asked: Result<T, AskError>) -> Result<Result<T, String>, Error> {
    match asked {
        Ok(answer) => Ok(Ok(answer)),
        Err(AskError::Call(RunError::Interrupted(signal))) => Err(Error::Interrupted(signal)),
        Err(error) => Ok(Err(error.to_string())),
    }
}

impl<'h> Control<'h> {
    /// The control program on PATH for the daemon in `pipe`; `None` if it is not installed.
    pub fn find(host: &'h Host, pipe: &Path, log: &Path) -> Option<Self> {
        Some(Self {
            host,
            program: host.find_program(CONTROL)?,
            pipe: pipe.to_owned(),
            log: log.to_owned(),
            questions: AtomicU32::new(0),
        })
    }

    /// The server program that the daemon will find through its PATH.
    pub fn server_program(&self) -> Option<PathBuf> {
        std::env::split_paths(&self.search_path())
            .map(|directory| directory.join(SERVER))
            .find(|file| is_executable(&self.host.root.at(file)))
    }

    /// The caller's PATH and behind it where the server lies: beside the control program, or in an sbin directory,
    /// which a user's PATH often lacks (Debian puts the server there).
    fn search_path(&self) -> OsString {
        let given = self.host.env.get("PATH").unwrap_or_default();
        let mut directories: Vec<PathBuf> = std::env::split_paths(given)
            .filter(|directory| directory.is_absolute())
            .collect();
        // A link is followed to where the driver's own files are.
        let real = self
            .host
            .root
            .is_this_machine()
            .then(|| fs::canonicalize(&self.program).ok())
            .flatten();
        let beside = [Some(self.program.as_path()), real.as_deref()]
            .into_iter()
            .flatten()
            .filter_map(Path::parent)
            .flat_map(|bin| {
                let sbin = bin.parent().map(|prefix| prefix.join("sbin"));
                [Some(bin.to_owned()), sbin]
            })
            .flatten()
            .filter(|directory| self.host.root.at(directory).is_dir());
        for directory in beside.chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")]) {
            if !directories.contains(&directory) {
                directories.push(directory);
            }
        }
        // A directory whose name has a colon cannot be on a PATH.
        std::env::join_paths(&directories).unwrap_or_else(|_| given.to_owned())
    }

    fn call(&self, purpose: &'static str, args: &[&str], stdin: &str, mode: Mode) -> Invocation {
        let mut env: Vec<(OsString, OsString)> = KEPT
            .into_iter()
            .filter_map(|key| Some((key.into(), self.host.env.get(key)?.to_owned())))
            .collect();
        env.push(("PATH".into(), self.search_path()));
        env.push(("CUDA_MPS_PIPE_DIRECTORY".into(), self.pipe.clone().into()));
        env.push(("CUDA_MPS_LOG_DIRECTORY".into(), self.log.clone().into()));
        // From CUDA 13.4 there is a version 3 with other commands; version 2 is the one we speak. Older programs do
        // not know the variable.
        env.push(("CUDA_MPS_PROTOCOL_VERSION".into(), "2".into()));
        Invocation {
            purpose,
            program: self.program.clone(),
            args: args.iter().map(OsString::from).collect(),
            env,
            stdin: stdin.as_bytes().to_vec(),
            mode,
        }
    }

    /// The call that becomes the daemon. `-d` or `-f` must be the only argument: anything more turns the program of
    /// 550 and older into the asking front-end.
    fn daemon_call(&self, flag: &str, visible: &str, mode: Mode) -> Invocation {
        let mut call = self.call("start the control daemon", &[flag], "", mode);
        call.env
            .push(("CUDA_VISIBLE_DEVICES".into(), visible.into()));
        call
    }

    /// The calls that `launch`, or `foreground`, and then the first question make. The marker of a question is another
    /// one each time.
    pub fn calls_of_a_start(&self, visible: &str, foreground: bool) -> [Invocation; 2] {
        let flag = if foreground { FOREGROUND } else { DETACHED };
        let mode = Mode::Captured(LAUNCH_LIMIT);
        [
            self.daemon_call(flag, visible, mode),
            self.call_of(SERVERS, mode),
        ]
    }

    /// The call of a session with one question.
    pub(super) fn call_of(&self, question: &str, mode: Mode) -> Invocation {
        self.question_call(&script(question, &self.next_marker()), mode)
    }

    /// Launches the daemon detached for the devices of this `CUDA_VISIBLE_DEVICES`. Exit 0 means that it listens, not yet
    /// that it answers.
    pub fn launch(&self, visible: &str) -> Result<Finished, RunError> {
        let call = self.daemon_call(DETACHED, visible, Mode::Captured(LAUNCH_LIMIT));
        self.host.runner.run(&call)
    }

    /// Runs the daemon as our child until it ends.
    pub fn foreground(&self, visible: &str) -> Result<Finished, RunError> {
        let call = self.daemon_call(FOREGROUND, visible, Mode::Foreground);
        self.host.runner.run(&call)
    }

    /// Asks one question and returns the answer's text. The exit status is no answer: refusals and unknown commands
    /// exit with 0.
    pub fn ask(&self, question: &str, limit: Duration) -> Result<String, AskError> {
        let (answer, _) = self.session(limit, |marker| script(question, marker))?;
        Ok(answer)
    }

    /// The pids of the daemon's servers.
    pub fn servers(&self, limit: Duration) -> Result<Vec<i32>, AskError> {
        let answer = self.ask(SERVERS, limit)?;
        Ok(pids(&answer))
    }

    /// Tells the daemon to quit and returns what it said, which is nothing unless it refused. It waits for the clients
    /// of its servers, and so does this call. The daemon is not yet gone when it returns.
    pub fn quit(&self, limit: Duration) -> Result<String, AskError> {
        // Behind `quit` nothing is answered any more, so the marker goes first.
        let (_, answer) = self.session(limit, |marker| format!("{marker}\nquit\n"))?;
        Ok(answer)
    }

    /// Tells the daemon to quit and to cut its clients off after `seconds`. It does so even while an earlier `quit` waits
    /// for them.
    pub fn quit_after(&self, seconds: u64, limit: Duration) -> Result<String, AskError> {
        let (_, answer) = self.session(limit, |marker| format!("{marker}\nquit -t {seconds}\n"))?;
        Ok(answer)
    }

    /// One session with the daemon: it serves one at a time, and a second one may end with status 0, no output and
    /// nothing done. So ours wait for each other, carry a made-up command whose echo proves that the session was
    /// real, and are repeated without it. A control program that never echoes is taken at its exit status (`patience`).
    ///
    /// Returns what was said before and behind the echo.
    fn session(
        &self,
        limit: Duration,
        script: impl Fn(&str) -> String,
    ) -> Result<(String, String), AskError> {
        let deadline = self.host.clock.monotonic() + limit;
        let left = || deadline.saturating_sub(self.host.clock.monotonic());
        let _turn = self.turn(limit)?;
        let mut without_echo = 0;
        let mut last = String::from("no session took place");
        let mut pause = Duration::from_millis(1);
        loop {
            if left().is_zero() {
                return Err(AskError::Dropped(last));
            }
            let marker = self.next_marker();
            let call = self.question_call(&script(&marker), Mode::Captured(left()));
            let finished = match self.host.runner.run(&call) {
                Ok(finished) => finished,
                Err(RunError::TimedOut(_)) => return Err(AskError::Silent(limit)),
                Err(error) => return Err(AskError::Call(error)),
            };
            if let Some((before, after)) = around_echo(&finished.stdout, &marker) {
                return Ok((before.to_owned(), after.to_owned()));
            }
            if finished.status.success() {
                without_echo += 1;
                if without_echo == self.patience() {
                    let said = finished.stdout.trim();
                    return Ok((said.to_owned(), said.to_owned()));
                }
            } else if finished.stderr.contains("Cannot find MPS control daemon") {
                return Err(AskError::NoDaemon(finished.said()));
            } else {
                without_echo = 0;
            }
            last = match finished.said() {
                said if said.is_empty() => format!("{:?} without a word", finished.status),
                said => said,
            };
            self.host.clock.sleep(pause.min(left()));
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    fn question_call(&self, script: &str, mode: Mode) -> Invocation {
        self.call("ask the control daemon", &[], script, mode)
    }

    /// A word that no daemon knows and no other session uses.
    fn next_marker(&self) -> String {
        let number = self.questions.fetch_add(1, Ordering::Relaxed);
        format!("uni-cumps-{}-{number}", std::process::id())
    }

    /// How many sessions in a row must succeed without an echo until the control program is believed to have none.
    /// NVIDIA's daemon holds its lock and does echo, yet drops a session with status 0 in up to 37 of 100 cases while
    /// another client is connected (measured), and with an error in the others.
    fn patience(&self) -> u32 {
        if lock_is_held(self.host, &self.pipe) {
            20
        } else {
            3
        }
    }

    /// Waits for our turn: a lock on the pipe directory itself, which needs no file of its own.
    fn turn(&self, limit: Duration) -> Result<Option<File>, AskError> {
        let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits())
            .open(self.host.root.at(&self.pipe));
        // A directory that cannot be opened has no daemon that would answer us; the session will say so.
        let Ok(directory) = opened else {
            return Ok(None);
        };
        let locked = self.host.wait_for(limit, || {
            match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK | Errno::INTR) => None,
                // Where a file system has no such locks we go without.
                Ok(()) | Err(_) => Some(()),
            }
        });
        // It ends when the file is closed.
        locked.map(|()| Some(directory)).ok_or(AskError::Busy)
    }
}

/// A session of one question.
fn script(question: &str, marker: &str) -> String {
    format!("{question}\n{marker}\n")
}

/// The pids of an answer that has one on each line; any other line is a message.
pub(super) fn pids(answer: &str) -> Vec<i32> {
    answer
        .lines()
        .filter_map(|line| line.trim().parse().ok())
        .filter(|pid| *pid > 0)
        .collect()
}

/// What a session's output says before and behind the echo of `marker`; `None` if there is no echo.
fn around_echo<'o>(output: &'o str, marker: &str) -> Option<(&'o str, &'o str)> {
    let (before, after) = output.split_once(&format!("Unknown command \"{marker}\""))?;
    Some((before.trim(), after.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::{Answer, exits, host};
    use crate::runner::Status;

    const PIPE: &str = "/pipe";

    /// A machine with a control program and a pipe directory, where nobody holds a lock.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for directory in ["bin", "pipe"] {
            fs::create_dir(root.path().join(directory)).unwrap();
        }
        let program = root.path().join("bin").join(CONTROL);
        fs::write(&program, "").unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(program, executable).unwrap();
        root
    }

    fn ask_within(limit: Duration, answers: Vec<Answer>) -> Result<String, AskError> {
        let root = machine();
        let host = host(root.path(), answers);
        let control = Control::find(&host, Path::new(PIPE), Path::new("/log")).unwrap();
        control.ask("get_server_list", limit)
    }

    fn ask(answers: Vec<Answer>) -> Result<String, AskError> {
        ask_within(Duration::from_secs(5), answers)
    }

    /// What NVIDIA's front-end prints: the answer, and the echo of the word that it does not know.
    fn echoes(answer: &'static str) -> Answer {
        Box::new(move |call| {
            let input = String::from_utf8_lossy(&call.stdin).into_owned();
            let marker = input.lines().last().unwrap();
            Ok(Finished {
                status: Status::Exited(0),
                stdout: format!("{answer}Unknown command \"{marker}\"\n"),
                stderr: String::new(),
                process_group: 0,
            })
        })
    }

    #[test]
    fn the_answer_is_what_stands_before_the_echo() {
        assert_eq!(ask(vec![echoes("12\n34\n")]).unwrap(), "12\n34");
        assert_eq!(ask(vec![echoes("")]).unwrap(), "");
    }

    #[test]
    fn a_dropped_session_is_repeated_whatever_its_status() {
        let dropped = "Cannot send command to MPS control daemon process";
        let sessions = vec![
            exits(0, "", ""),
            exits(1, "", dropped),
            exits(1, "", ""),
            exits(0, "", ""),
            exits(0, "", ""),
            echoes("12\n"),
        ];
        assert_eq!(ask(sessions).unwrap(), "12");
    }

    #[test]
    fn a_program_that_never_echoes_is_believed_after_three_sessions() {
        let sessions = || exits(0, "12\n", "");
        assert_eq!(ask(vec![sessions(), sessions(), sessions()]).unwrap(), "12");
    }

    #[test]
    fn nobody_there_is_said_at_once() {
        let nobody = "Cannot find MPS control daemon process\n";
        let answer = ask(vec![exits(1, "", nobody)]);
        assert!(matches!(answer, Err(AskError::NoDaemon(said)) if said == nobody.trim()));
    }

    #[test]
    fn a_daemon_that_takes_the_question_and_is_silent_is_not_asked_twice() {
        let silent: Answer = Box::new(|call| match call.mode {
            Mode::Captured(limit) => Err(RunError::TimedOut(limit)),
            _ => panic!("a question is captured"),
        });
        assert!(matches!(ask(vec![silent]), Err(AskError::Silent(_))));
    }

    #[test]
    fn sessions_that_are_always_dropped_end_with_what_was_said_last() {
        // After 0, 1, 3, 7, 15, 31 and 63 ms; the eighth would begin when the time is up.
        let sessions = (0..7).map(|_| exits(1, "", "Cannot send command"));
        let answer = ask_within(Duration::from_millis(100), sessions.collect());
        assert!(matches!(answer, Err(AskError::Dropped(said)) if said == "Cannot send command"));
    }

    #[test]
    fn quit_is_sent_behind_the_marker_and_its_refusal_is_the_answer() {
        let root = machine();
        let refusal: Answer = Box::new(|call| {
            let input = String::from_utf8_lossy(&call.stdin).into_owned();
            let lines: Vec<&str> = input.lines().collect();
            assert_eq!(lines[1], "quit");
            let stdout = format!("Unknown command \"{}\"\nNot enough privilege\n", lines[0]);
            exits(0, &stdout, "")(call)
        });
        let host = host(root.path(), vec![refusal]);
        let control = Control::find(&host, Path::new(PIPE), Path::new("/log")).unwrap();
        let said = control.quit(Duration::from_secs(5)).unwrap();
        assert_eq!(said, "Not enough privilege");
    }

    #[test]
    fn a_daemon_is_launched_with_one_argument_and_only_what_we_mean() {
        let root = machine();
        let launched: Answer = Box::new(|call| {
            assert_eq!(call.program, Path::new("/bin").join(CONTROL));
            assert_eq!(call.args, ["-d"]);
            let variable = |key: &str| {
                let found = call.env.iter().find(|(name, _)| name == key);
                found.map(|(_, value)| value.to_string_lossy().into_owned())
            };
            assert_eq!(
                variable("CUDA_VISIBLE_DEVICES").as_deref(),
                Some("GPU-a,GPU-b")
            );
            assert_eq!(variable("CUDA_MPS_PIPE_DIRECTORY").as_deref(), Some(PIPE));
            assert_eq!(variable("CUDA_MPS_PROTOCOL_VERSION").as_deref(), Some("2"));
            assert_eq!(variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), None);
            exits(0, "", "")(call)
        });
        let mut host = host(root.path(), vec![launched]);
        host.env = [("PATH", "/bin"), ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "0")]
            .into_iter()
            .collect();
        let control = Control::find(&host, Path::new(PIPE), Path::new("/log")).unwrap();
        assert!(control.launch("GPU-a,GPU-b").unwrap().status.success());
    }
}
