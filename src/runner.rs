//! Calling other programs: a call is a value, and `CommandRunner` is the one way to make it happen.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{Pid, getpid};

/// One call of another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invocation {
    /// Why it is called, for people.
    pub purpose: &'static str,
    /// The program's absolute path.
    pub program: PathBuf,
    /// Arguments behind the program's name.
    pub args: Vec<OsString>,
    /// The whole environment of the call.
    pub env: Vec<(OsString, OsString)>,
    /// What the program reads, and then the end of the file.
    pub stdin: Vec<u8>,
    /// What happens with its output, and how long it may take.
    pub mode: Mode,
}

/// How a call relates to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The output is collected; after the time the program and the processes it started are ended.
    Captured(Duration),
    /// The program lives as long as it likes. Its output goes to our stderr, and SIGINT, SIGTERM and SIGHUP that reach
    /// us are passed on to it.
    Foreground,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Its exit status.
    Exited(i32),
    /// The number of the signal that ended it.
    Signaled(i32),
}

impl Status {
    /// Whether the program exited with 0.
    pub fn success(self) -> bool {
        self == Self::Exited(0)
    }

    /// The status as a shell reports it: a signal is 128 and its number.
    pub fn shell_code(self) -> u8 {
        match self {
            Self::Exited(code) => u8::try_from(code).unwrap_or(1),
            Self::Signaled(number) => u8::try_from(128 + number).unwrap_or(1),
        }
    }
}

/// A call that ended. A status other than 0 is not an error here: only the caller knows whether it is bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// How it ended.
    pub status: Status,
    /// Standard output, with what is not UTF-8 replaced. Empty for a foreground call.
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
    /// The process group that the call ran in. Processes that it left behind are in it unless they left it.
    pub process_group: i32,
}

impl Finished {
    /// What the program said, on either stream, without the blanks around it.
    pub fn said(&self) -> String {
        let parts = [self.stderr.trim(), self.stdout.trim()];
        parts
            .into_iter()
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("\n")
    }
}

/// Why a call did not end by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It could not be started.
    #[error("{0}")]
    Spawn(#[source] io::Error),
    /// It did not end within its time and was ended.
    #[error("it did not finish within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// We were asked to end by this signal; the program was ended.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
}

/// Makes calls happen.
pub trait CommandRunner: Sync {
    /// Makes one call and waits for its end.
    fn run(&self, call: &Invocation) -> Result<Finished, RunError>;
}

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
}

/// What a captured program may print; the rest is dropped.
const OUTPUT_LIMIT: u64 = 4 << 20;

/// SIGINT, SIGTERM and SIGHUP wait while this exists. A call in progress sees them all the same and ends; whatever is
/// still waiting at the end has its usual effect then.
pub struct Held(SigSet);

/// Holds signals back, in this thread and those that it starts, while being ended halfway would leave something behind.
pub fn hold_signals() -> Held {
    // Neither reading nor setting a mask fails for a valid set.
    let before = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
    let _ = signals_to_hold().thread_block();
    Held(before)
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.thread_set_mask();
    }
}

/// The three signals that ask a program to end, without those that are ignored, as SIGHUP is under nohup.
fn signals_to_hold() -> &'static SigSet {
    static SIGNALS: OnceLock<SigSet> = OnceLock::new();
    SIGNALS.get_or_init(|| {
        let status = procfs::process::Process::myself().and_then(|process| process.status());
        let ignored = status.map_or(0, |status| status.sigign);
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
            .into_iter()
            .filter(|signal| ignored & (1 << (*signal as u64 - 1)) == 0)
            .collect()
    })
}

/// Shows held signals as they arrive.
struct Arrivals(SignalFd);

impl Arrivals {
    fn new() -> io::Result<Self> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self(SignalFd::with_flags(signals_to_hold(), flags)?))
    }

    fn next(&self) -> Option<i32> {
        let info = self.0.read_signal().ok()??;
        i32::try_from(info.ssi_signo).ok()
    }
}

impl SystemRunner {
    /// A runner whose children get the signal mask of now.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            child_mask: SigSet::thread_get_mask()?,
            calls: Mutex::new(Vec::new()),
        })
    }

    /// Waits until `child` ends, a signal arrives or `until` is there.
    fn wait(&self, child: &Child, arrivals: &Arrivals, until: Option<Instant>) -> Event {
        loop {
            if let Some(signal) = arrivals.next() {
                return Event::Signal(signal);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if child.has_ended() {
                return Event::Ended;
            }
            if left == Some(Duration::ZERO) {
                return Event::TimeIsUp;
            }
            let mut fds = vec![PollFd::new(arrivals.0.as_fd(), PollFlags::POLLIN)];
            // Kernels before 5.3 have no pidfd: look again every few milliseconds.
            let mut longest = Duration::from_millis(5);
            if let Some(pidfd) = &child.pidfd {
                fds.push(PollFd::new(pidfd.as_fd(), PollFlags::POLLIN));
                longest = Duration::from_secs(3600);
            }
            if getpid() == Pid::from_raw(1) {
                self.reap_orphans();
                longest = longest.min(Duration::from_secs(1));
            }
            let nap = left.unwrap_or(longest).min(longest) + Duration::from_millis(1);
            let timeout = PollTimeout::try_from(nap).unwrap_or(PollTimeout::MAX);
            // An interrupted poll is only another look.
            let _ = poll(&mut fds, timeout);
        }
    }

    /// As the first process of a container we inherit every orphan; nobody else would reap them.
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

    fn reap(&self, child: &Child) -> Result<Status, RunError> {
        let status = child.reap().map_err(RunError::Spawn);
        self.calls().retain(|pid| *pid != child.pid);
        status
    }
}

enum Event {
    Ended,
    Signal(i32),
    TimeIsUp,
}

struct Child {
    pid: Pid,
    pidfd: Option<OwnedFd>,
}

impl Child {
    fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        !matches!(
            waitid(Id::Pid(self.pid), flags),
            Ok(WaitStatus::StillAlive) | Err(nix::errno::Errno::EINTR)
        )
    }

    /// Ends the program and what is left of its process group. The leader is not reaped yet, so that the group's
    /// number cannot belong to anybody else.
    fn end_group(&self) {
        let _ = killpg(self.pid, Signal::SIGKILL);
    }

    fn reap(&self) -> io::Result<Status> {
        loop {
            match waitpid(self.pid, None) {
                Ok(WaitStatus::Exited(_, code)) => return Ok(Status::Exited(code)),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    return Ok(Status::Signaled(signal as i32));
                }
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn c_string(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a NUL byte in the call"))
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

/// Every descriptor above 2 that is open here. NVIDIA's daemon keeps what it inherits, so a caller's lock would stay
/// held and a caller's `$(…)` would hang.
fn open_descriptors() -> io::Result<Vec<i32>> {
    let numbers = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&number: &i32| number > 2);
    Ok(numbers.collect())
}

impl SystemRunner {
    fn spawn(
        &self,
        call: &Invocation,
        stdin: BorrowedFd<'_>,
        stdout: BorrowedFd<'_>,
        stderr: BorrowedFd<'_>,
    ) -> io::Result<Child> {
        let mut actions = PosixSpawnFileActions::init()?;
        // In two steps, since one of the three may itself be a descriptor of 0 to 2.
        let inherited = open_descriptors()?;
        let first_free = inherited.iter().max().copied().unwrap_or(2).max(2) + 1;
        let streams = [stdin, stdout, stderr];
        for (target, stream) in (first_free..).zip(streams) {
            actions.add_dup2(stream.as_raw_fd(), target)?;
        }
        for (target, source) in (0..3).zip(first_free..) {
            actions.add_dup2(source, target)?;
            actions.add_close(source)?;
        }
        for descriptor in inherited {
            actions.add_close(descriptor)?;
        }

        let mut attributes = PosixSpawnAttr::init()?;
        attributes.set_flags(
            PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
                | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
                | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
        )?;
        attributes.set_pgroup(Pid::from_raw(0))?;
        attributes.set_sigmask(&self.child_mask)?;
        // Rust ignores SIGPIPE for itself, and `nohup` and a shell's `&` let us ignore more. NVIDIA's daemon hands that
        // on to its servers, and a server that ignores SIGINT cannot be cut off: `quit -t` ends it with that.
        attributes.set_sigdefault(&SigSet::all())?;

        let program = c_string(call.program.as_os_str().as_bytes())?;
        // The program's own name, as a shell would pass it: `/proc/<pid>/cmdline` shows it for the daemon's life.
        let name = call.program.file_name().unwrap_or_default();
        let mut argv = vec![c_string(name.as_bytes())?];
        for argument in &call.args {
            argv.push(c_string(argument.as_bytes())?);
        }
        let environment = call
            .env
            .iter()
            .map(|(key, value)| {
                let mut entry = key.clone().into_vec();
                entry.push(b'=');
                entry.extend_from_slice(value.as_bytes());
                c_string(&entry)
            })
            .collect::<io::Result<Vec<_>>>()?;
        // Held across the spawn: a child that ends at once must not be taken for an orphan.
        let mut calls = self.calls();
        let pid = posix_spawn(
            program.as_c_str(),
            &actions,
            &attributes,
            &argv,
            &environment,
        )?;
        calls.push(pid);
        drop(calls);
        let pidfd = rustix::process::Pid::from_raw(pid.as_raw()).and_then(|pid| {
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()
        });
        Ok(Child { pid, pidfd })
    }

    fn capture(&self, call: &Invocation, limit: Duration) -> Result<Finished, RunError> {
        let _held = hold_signals();
        let arrivals = Arrivals::new().map_err(RunError::Spawn)?;
        if let Some(signal) = arrivals.next() {
            return Err(RunError::Interrupted(signal));
        }
        let stdin = memory_file(&call.stdin).map_err(RunError::Spawn)?;
        let stdout = memory_file(b"").map_err(RunError::Spawn)?;
        let stderr = memory_file(b"").map_err(RunError::Spawn)?;
        let child = self
            .spawn(call, stdin.as_fd(), stdout.as_fd(), stderr.as_fd())
            .map_err(RunError::Spawn)?;
        let stopped_early = match self.wait(&child, &arrivals, Some(Instant::now() + limit)) {
            Event::Ended => None,
            Event::TimeIsUp => Some(RunError::TimedOut(limit)),
            Event::Signal(number) => Some(RunError::Interrupted(number)),
        };
        if stopped_early.is_some() {
            child.end_group();
        }
        let status = self.reap(&child)?;
        if let Some(error) = stopped_early {
            return Err(error);
        }
        Ok(Finished {
            status,
            stdout: text(stdout).map_err(RunError::Spawn)?,
            stderr: text(stderr).map_err(RunError::Spawn)?,
            process_group: child.pid.as_raw(),
        })
    }

    fn foreground(&self, call: &Invocation) -> Result<Finished, RunError> {
        let _held = hold_signals();
        let arrivals = Arrivals::new().map_err(RunError::Spawn)?;
        let stdin = memory_file(&call.stdin).map_err(RunError::Spawn)?;
        let ours = io::stderr();
        let child = self
            .spawn(call, stdin.as_fd(), ours.as_fd(), ours.as_fd())
            .map_err(RunError::Spawn)?;
        loop {
            match self.wait(&child, &arrivals, None) {
                Event::Ended => break,
                Event::TimeIsUp => {}
                Event::Signal(number) => {
                    // Not reaped yet, so the number is still our child's.
                    if let Ok(signal) = Signal::try_from(number) {
                        let _ = nix::sys::signal::kill(child.pid, signal);
                    }
                }
            }
        }
        let status = self.reap(&child)?;
        Ok(Finished {
            status,
            stdout: String::new(),
            stderr: String::new(),
            process_group: child.pid.as_raw(),
        })
    }
}

impl CommandRunner for SystemRunner {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        match call.mode {
            Mode::Captured(limit) => self.capture(call, limit),
            Mode::Foreground => self.foreground(call),
        }
    }
}

#[cfg(test)]
mod tests {
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
