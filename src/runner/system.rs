//! Making calls happen on this machine.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::{Pid, getpgid, getpid};
use rustix::fs::OFlags;

use super::child::{Child, Kinship};
use super::signals::{
    Arrival, Arrivals, ends_are_told, hold, hold_signals, signals_to_hold, signals_to_pass_on,
};
use super::{CommandRunner, Finished, Invocation, Mode, RunError, Status};

/// Makes calls happen on this machine.
///
/// The output goes through memory files and not through pipes: a daemon that the program leaves behind would keep a
/// pipe open. A child runs in its own process group with default signal handling, and none of our descriptors, nor of
/// those that we inherited, reaches it.
pub struct SystemRunner {
    /// The mask that we were started with, which is what a child gets.
    child_mask: SigSet,
    /// The calls in progress, whose ends belong to whoever made them.
    calls: Mutex<Vec<Pid>>,
    /// The working directory that we were started in, for a program that is the user's own.
    directory: Option<OwnedFd>,
    /// A program runs beside us. Signals are for it, and its orphans are ours.
    has_company: AtomicBool,
}

/// What a captured program may print; the rest is dropped.
const OUTPUT_LIMIT: u64 = 4 << 20;

impl SystemRunner {
    /// A runner whose children get the signal mask of now.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            child_mask: SigSet::thread_get_mask()?,
            calls: Mutex::new(Vec::new()),
            directory: rustix::fs::open(
                ".",
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                rustix::fs::Mode::empty(),
            )
            .ok(),
            has_company: AtomicBool::new(false),
        })
    }

    /// Moves to `/`, so that no child that lives on keeps the caller's directory busy. A directory that we could not come
    /// back to, such as another user's private one, is not left.
    pub fn leave_caller(&self) -> io::Result<()> {
        match &self.directory {
            Some(_) => std::env::set_current_dir("/"),
            None => Ok(()),
        }
    }

    /// Goes back to where the caller is.
    fn return_to_caller(&self) -> io::Result<()> {
        match &self.directory {
            Some(directory) => Ok(rustix::process::fchdir(directory)?),
            None => Ok(()),
        }
    }

    /// Waits until `child` ends, a signal arrives or `until` is there.
    fn wait(&self, child: &Child, arrivals: Option<&Arrivals>, until: Option<Instant>) -> Event {
        loop {
            if let Some(signal) = arrivals.and_then(Arrivals::next) {
                return Event::Signal(signal);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if child.has_ended() {
                return Event::Ended;
            }
            if left == Some(Duration::ZERO) {
                return Event::TimeIsUp;
            }
            let arrivals =
                arrivals.map(|arrivals| PollFd::new(arrivals.as_fd(), PollFlags::POLLIN));
            let mut fds = Vec::from_iter(arrivals);
            // Kernels before 5.3 have no pidfd: look again every few milliseconds.
            let mut longest = Duration::from_millis(5);
            if let Some(pidfd) = &child.pidfd {
                fds.push(PollFd::new(pidfd.as_fd(), PollFlags::POLLIN));
                longest = Duration::from_secs(3600);
            }
            if getpid() == Pid::from_raw(1) || self.has_company() {
                self.reap_orphans();
                longest = longest.min(Duration::from_secs(1));
            }
            let nap = left.unwrap_or(longest).min(longest) + Duration::from_millis(1);
            let timeout = PollTimeout::try_from(nap).unwrap_or(PollTimeout::MAX);
            // An interrupted poll is only another look.
            let _ = poll(&mut fds, timeout);
        }
    }

    fn has_company(&self) -> bool {
        self.has_company.load(Ordering::Acquire)
    }

    /// As the first process of a container, or with a program beside us, we inherit orphans; nobody else would reap them.
    fn reap_orphans(&self) {
        let calls = self.calls();
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        while let Ok(status) = waitid(Id::All, flags) {
            match status.pid() {
                Some(pid) if !calls.contains(&pid) => {
                    let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
                }
                _ => return,
            }
        }
    }

    fn calls(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A signal shows itself to one call only, and it is meant for all that are in progress side by side.
    fn pass_on_to_other_calls(&self, number: i32) {
        if !self.calls().is_empty()
            && let Ok(signal) = Signal::try_from(number)
        {
            // Signalling oneself cannot fail.
            let _ = nix::sys::signal::kill(getpid(), signal);
        }
    }

    fn reap(&self, child: &Child) -> Result<Status, RunError> {
        let status = child.reap().map_err(RunError::Spawn);
        self.calls().retain(|pid| *pid != child.pid);
        status
    }
}

enum Event {
    Ended,
    Signal(Arrival),
    TimeIsUp,
}

/// A file without a name, in memory: it needs no directory, and a full disk does not touch it.
fn memory_file(content: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"uni-cumps", MFdFlags::MFD_CLOEXEC)?);
    io::Write::write_all(&mut file, content)?;
    file.rewind()?;
    Ok(file)
}

fn text(mut file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(OUTPUT_LIMIT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl SystemRunner {
    /// Starts a call's program. Held across the start: a child that ends at once must not be taken for an orphan.
    fn spawn(
        &self,
        call: &Invocation,
        file: &Path,
        words: &[&OsStr],
        kinship: &Kinship<'_>,
    ) -> io::Result<Child> {
        let mut calls = self.calls();
        let child = Child::start(file, words, &call.env, &self.child_mask, kinship)?;
        calls.push(child.pid);
        Ok(child)
    }

    /// A child that has nothing of ours but these streams. It is called by its own name, as a shell would pass it:
    /// `/proc/<pid>/cmdline` shows that for the daemon's life.
    fn spawn_stranger(
        &self,
        call: &Invocation,
        streams: [BorrowedFd<'_>; 3],
    ) -> Result<Child, RunError> {
        let name = call.program.file_name().unwrap_or_default();
        let words = call.words(name);
        self.spawn(call, &call.program, &words, &Kinship::Stranger(streams))
            .map_err(RunError::Spawn)
    }

    fn capture(
        &self,
        call: &Invocation,
        limit: Duration,
        may_be_interrupted: bool,
    ) -> Result<Finished, RunError> {
        let _held = hold_signals();
        let arrivals = may_be_interrupted.then(|| Arrivals::of(signals_to_hold()));
        let arrivals = arrivals.transpose().map_err(RunError::Setup)?;
        if let Some(signal) = arrivals.as_ref().and_then(Arrivals::next) {
            return Err(RunError::Interrupted(signal.number));
        }
        let stdin = memory_file(&call.stdin).map_err(RunError::Setup)?;
        let stdout = memory_file(b"").map_err(RunError::Setup)?;
        let stderr = memory_file(b"").map_err(RunError::Setup)?;
        let streams = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
        let child = self.spawn_stranger(call, streams)?;
        let until = Some(Instant::now() + limit);
        let stopped_early = match self.wait(&child, arrivals.as_ref(), until) {
            Event::Ended => None,
            Event::TimeIsUp => Some(RunError::TimedOut(limit)),
            Event::Signal(signal) => Some(RunError::Interrupted(signal.number)),
        };
        if stopped_early.is_some() {
            child.end_group();
        }
        let status = self.reap(&child)?;
        if let Some(RunError::Interrupted(number)) = stopped_early {
            self.pass_on_to_other_calls(number);
        }
        if let Some(error) = stopped_early {
            return Err(error);
        }
        Ok(Finished {
            status,
            stdout: text(stdout).map_err(RunError::Setup)?,
            stderr: text(stderr).map_err(RunError::Setup)?,
            process_group: child.pid.as_raw(),
        })
    }

    fn foreground(&self, call: &Invocation) -> Result<Finished, RunError> {
        let _held = hold_signals();
        let arrivals = Arrivals::of(signals_to_hold()).map_err(RunError::Setup)?;
        let stdin = memory_file(&call.stdin).map_err(RunError::Setup)?;
        let ours = io::stderr();
        let streams = [stdin.as_fd(), ours.as_fd(), ours.as_fd()];
        let child = self.spawn_stranger(call, streams)?;
        self.attend(&child, &arrivals, |_| true)
    }

    fn beside(&self, call: &Invocation) -> Result<Finished, RunError> {
        let signals = signals_to_pass_on();
        let _held = hold(&signals);
        let arrivals = Arrivals::of(&signals).map_err(RunError::Setup)?;
        self.return_to_caller().map_err(RunError::Setup)?;
        // Without it only what stays below the program can be told.
        let _ = nix::sys::prctl::set_child_subreaper(true);
        self.has_company.store(true, Ordering::Release);
        let child = self.spawn_heir(call).map_err(RunError::Spawn);
        let finished = child.and_then(|child| {
            // The keys of a terminal reach the whole process group, and with it a child that has not left it.
            let reached = || getpgid(Some(child.pid)) == getpgid(None);
            self.attend(&child, &arrivals, |signal| {
                !(signal.from_kernel && reached())
            })
        });
        self.has_company.store(false, Ordering::Release);
        finished
    }

    /// A child that has the caller's descriptors, found as execvp(3) finds a program: what is not there or not for us is
    /// passed over, and of all refusals a missing permission is the one to tell.
    fn spawn_heir(&self, call: &Invocation) -> io::Result<Child> {
        let mut refusal = io::Error::from(Errno::ENOENT);
        for file in call.candidates() {
            match self.spawn_or_interpret(call, &file) {
                Err(error) if is_passed_over(&error) => {
                    if refusal.kind() != ErrorKind::PermissionDenied {
                        refusal = error;
                    }
                }
                result => return result,
            }
        }
        Err(refusal)
    }

    fn spawn_or_interpret(&self, call: &Invocation, file: &Path) -> io::Result<Child> {
        let words = call.words(call.program.as_os_str());
        match self.spawn(call, file, &words, &Kinship::Heir) {
            // A script without a first line that names its interpreter.
            Err(error) if error.raw_os_error() == Some(Errno::ENOEXEC as i32) => {
                let shell = Path::new("/bin/sh");
                let mut words = call.words(file.as_os_str());
                words.insert(0, shell.as_os_str());
                self.spawn(call, shell, &words, &Kinship::Heir)
            }
            result => result,
        }
    }

    /// Waits for a child's end, however long, and passes the signals on to it that `concern` it.
    fn attend(
        &self,
        child: &Child,
        arrivals: &Arrivals,
        concern: impl Fn(Arrival) -> bool,
    ) -> Result<Finished, RunError> {
        loop {
            match self.wait(child, Some(arrivals), None) {
                Event::Ended => break,
                Event::TimeIsUp => {}
                Event::Signal(signal) if !concern(signal) => {}
                Event::Signal(signal) => {
                    // Not reaped yet, so the number is still our child's.
                    if let Ok(signal) = Signal::try_from(signal.number) {
                        let _ = nix::sys::signal::kill(child.pid, signal);
                    }
                }
            }
        }
        Ok(Finished {
            status: self.reap(child)?,
            stdout: String::new(),
            stderr: String::new(),
            process_group: child.pid.as_raw(),
        })
    }

    fn replacing(&self, call: &Invocation) -> RunError {
        if let Err(error) = self.return_to_caller() {
            return RunError::Setup(error);
        }
        let error = Command::new(&call.program)
            .args(&call.args)
            .env_clear()
            .envs(call.env.iter().map(|(key, value)| (key, value)))
            .exec();
        RunError::Spawn(error)
    }
}

/// Whether execvp(3) goes on to the next directory of PATH.
fn is_passed_over(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::NotADirectory
            | ErrorKind::PermissionDenied
            | ErrorKind::StaleNetworkFileHandle
            | ErrorKind::TimedOut
    )
}

impl CommandRunner for SystemRunner {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        if call.mode != Mode::Replacing && !ends_are_told() {
            return Err(RunError::Setup(io::Error::other(
                "SIGCHLD is ignored, so that nobody could tell how a program ends; put this in front of uni-cumps: env --default-signal=CHLD",
            )));
        }
        match call.mode {
            // Where a program runs beside us, a signal is for that, and not for what we ask meanwhile.
            Mode::Captured(limit) => self.capture(call, limit, !self.has_company()),
            Mode::Uninterrupted(limit) => self.capture(call, limit, false),
            Mode::Foreground => self.foreground(call),
            Mode::Beside => self.beside(call),
            Mode::Replacing => Err(self.replacing(call)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;

    fn shell(script: &str, mode: Mode) -> Invocation {
        Invocation {
            purpose: "test",
            program: "/bin/sh".into(),
            args: ["-c", script].map(OsString::from).to_vec(),
            env: vec![("PATH".into(), "/usr/bin:/bin".into())],
            stdin: b"question\n".to_vec(),
            mode,
        }
    }

    fn run(script: &str, limit: Duration) -> Result<Finished, RunError> {
        let runner = SystemRunner::new().unwrap();
        runner.run(&shell(script, Mode::Captured(limit)))
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_call_has_its_input_its_environment_and_nothing_else() {
        let finished = run("cat; env | sort; echo oops >&2; exit 3", LONG).unwrap();
        assert_eq!(finished.status, Status::Exited(3));
        assert!(
            finished.stdout.starts_with("question\nPATH="),
            "{finished:?}"
        );
        assert!(!finished.stdout.contains("CARGO"), "{finished:?}");
        assert_eq!(finished.stderr, "oops\n");
        assert_eq!(finished.said(), format!("oops\n{}", finished.stdout.trim()));
    }

    #[test]
    fn no_descriptor_above_2_reaches_a_call() {
        let finished = run("ls /proc/self/fd | sort -n | tail -n 1", LONG).unwrap();
        // 3 is the directory that ls itself has opened.
        assert_eq!(finished.stdout, "3\n");
    }

    #[test]
    fn a_signal_is_a_status_and_not_an_error() {
        let finished = run("kill -KILL $$", LONG).unwrap();
        assert_eq!(finished.status, Status::Signaled(9));
        assert_eq!(finished.status.shell_code(), 137);
    }

    #[test]
    fn what_is_not_utf_8_is_replaced() {
        assert_eq!(run("printf '\\377'", LONG).unwrap().stdout, "\u{fffd}");
    }

    #[test]
    fn a_child_that_lives_on_does_not_keep_us_waiting() {
        let begun = Instant::now();
        let finished = run("sleep 60 & echo $!", LONG).unwrap();
        assert!(begun.elapsed() < LONG);
        let left = Pid::from_raw(finished.stdout.trim().parse().unwrap());
        nix::sys::signal::kill(left, Signal::SIGKILL).unwrap();
    }

    #[test]
    fn a_call_that_takes_too_long_is_ended_with_its_children() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display();
        // It ignores SIGTERM, and so does its child.
        let script = format!("trap '' TERM; sleep 60 & echo $! >{path}; sleep 60");
        let limit = Duration::from_millis(300);
        assert!(matches!(run(&script, limit), Err(RunError::TimedOut(found)) if found == limit));
        let child: i32 = std::fs::read_to_string(file.path())
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let deadline = Instant::now() + LONG;
        let is_gone = || {
            let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z "))
        };
        while !is_gone() {
            assert!(Instant::now() < deadline, "the child lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error() {
        let runner = SystemRunner::new().unwrap();
        let mut call = shell("", Mode::Captured(LONG));
        call.program = "/nonexistent".into();
        let error = runner.run(&call).unwrap_err();
        assert!(matches!(error, RunError::Spawn(error) if error.kind() == io::ErrorKind::NotFound));
    }
}
