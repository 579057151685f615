//! Calling other programs: a call is a value, and `CommandRunner` is the one way to make it happen.

mod child;
mod signals;
mod system;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

pub use signals::{
    Arrived, Held, Watched, hold_every_signal, hold_signals, hold_signals_to_pass_on, watch_signals,
};
pub use system::SystemRunner;

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

impl Invocation {
    /// The files that execvp(3) would try for the program, in its order.
    pub fn candidates(&self) -> Vec<PathBuf> {
        let name = self.program.as_os_str().as_bytes();
        if name.is_empty() {
            return Vec::new();
        }
        if name.contains(&b'/') {
            return vec![self.program.clone()];
        }
        let path = self.env.iter().find(|(key, _)| key == "PATH");
        let path = path.map_or(OsStr::new("/bin:/usr/bin"), |(_, path)| path);
        // An empty entry is the working directory.
        std::env::split_paths(path)
            .map(|directory| directory.join(&self.program))
            .collect()
    }

    /// What the program sees as its arguments, this name first.
    fn words<'c>(&'c self, name: &'c OsStr) -> Vec<&'c OsStr> {
        let arguments = self.args.iter().map(OsString::as_os_str);
        std::iter::once(name).chain(arguments).collect()
    }
}

/// How a call relates to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The output is collected; after the time the program and the processes it started are ended.
    Captured(Duration),
    /// Likewise, but a signal that reaches us waits until the program has ended.
    Uninterrupted(Duration),
    /// The program lives as long as it likes. Its output goes to our stderr, and SIGINT, SIGTERM and SIGHUP that reach
    /// us are passed on to it.
    Foreground,
    /// The program takes our place: same process, same descriptors, in the caller's working directory. Only a failure
    /// comes back.
    Replacing,
    /// The program runs beside us as a child would beside a shell: with the caller's descriptors and working directory and
    /// in our process group. Signals that reach us are passed on to it. What it leaves behind becomes our child, so that
    /// all that it has started can be told.
    Beside,
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
    /// Standard output, with what is not UTF-8 replaced. Empty where it was not collected.
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
    /// We could not get as far as starting it.
    #[error("{0}")]
    Setup(#[source] io::Error),
    /// It did not end within its time and was ended.
    #[error("it did not finish within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// We were asked to end by this signal; the program was ended.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
}

/// Makes calls happen.
pub trait CommandRunner: Send + Sync {
    /// Makes one call and waits for its end.
    fn run(&self, call: &Invocation) -> Result<Finished, RunError>;
}

/// Does two things that need nothing of each other at the same time, so that they take as long as the longer one. A signal
/// reaches the calls of both, and otherwise has its effect afterwards: it would end us and leave the calls behind.
pub fn side_by_side<A: Send, B>(one: impl Fn() -> A + Sync, other: impl FnOnce() -> B) -> (A, B) {
    let _held = hold_signals();
    let one = &one;
    thread::scope(|scope| {
        let started = thread::Builder::new().spawn_scoped(scope, one);
        let other = other();
        (ended(started, one), other)
    })
}

/// Likewise one thing with each of these.
pub fn with_each<T: Sync, A: Send>(all: &[T], work: impl Fn(&T) -> A + Sync) -> Vec<A> {
    let _held = hold_signals();
    let work = &work;
    thread::scope(|scope| {
        let start = |one| thread::Builder::new().spawn_scoped(scope, move || work(one));
        let started: Vec<_> = all.iter().map(start).collect();
        let each = started.into_iter().zip(all);
        each.map(|(started, one)| ended(started, || work(one)))
            .collect()
    })
}

/// What a thread has come to; where none could be had, the work is done here.
fn ended<A>(started: io::Result<ScopedJoinHandle<'_, A>>, work: impl FnOnce() -> A) -> A {
    match started {
        Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        Err(_) => work(),
    }
}
