//! The machine that a command works on: its file tree, environment, clock and programs. A test gives another one.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::runner::{CommandRunner, SystemRunner};

/// The directory below which every path is looked up. `/` on a real machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Root {
    /// The file tree below `directory`.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// Where the absolute `path` of the machine lies for us.
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Whether this is the machine that we run on, whose pids may be signalled.
    pub fn is_this_machine(&self) -> bool {
        self.0 == Path::new("/")
    }
}

/// The caller's environment.
#[derive(Clone, Debug, Default)]
pub struct Env(BTreeMap<OsString, OsString>);

impl Env {
    /// The value of a variable that is set, even to nothing.
    pub fn get(&self, key: &str) -> Option<&OsStr> {
        self.0.get(OsStr::new(key)).map(OsString::as_os_str)
    }

    /// The caller's `CUDA_VISIBLE_DEVICES`, which may be set to nothing.
    pub fn visible_devices(&self) -> Option<String> {
        let mask = self.get("CUDA_VISIBLE_DEVICES")?;
        Some(mask.to_string_lossy().into_owned())
    }

    /// The value of a variable that is set to something.
    pub fn get_filled(&self, key: &str) -> Option<&OsStr> {
        self.get(key).filter(|value| !value.is_empty())
    }

    /// Where programs are looked for: the caller's PATH, or the usual one where he has none.
    pub fn search_path(&self) -> &OsStr {
        self.get("PATH").unwrap_or(OsStr::new(USUAL_PATH))
    }

    /// All variables, for a call that gets them as they are.
    pub fn to_vec(&self) -> Vec<(OsString, OsString)> {
        let all = self.all();
        all.map(|(key, value)| (key.clone(), value.clone()))
            .collect()
    }

    /// All variables.
    pub fn all(&self) -> impl Iterator<Item = (&OsString, &OsString)> {
        self.0.iter()
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Env {
    fn from_iter<T: IntoIterator<Item = (K, V)>>(variables: T) -> Self {
        Self(
            variables
                .into_iter()
                .map(|(key, value)| (key.into(), value.into()))
                .collect(),
        )
    }
}

/// Time: what o'clock it is, and waiting.
pub trait Clock: Sync {
    /// The time of day.
    fn now(&self) -> SystemTime;
    /// Time that only goes forward, from any beginning.
    fn monotonic(&self) -> Duration;
    /// Lets time pass.
    fn sleep(&self, time: Duration);
}

/// The clock of this machine.
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn monotonic(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Where programs are looked for without a PATH, as the hooks of a cluster are called.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Everything that a command needs from outside.
pub struct Host {
    /// The file tree.
    pub root: Root,
    /// The caller's environment.
    pub env: Env,
    /// The caller's working directory, for relative paths that the user typed.
    pub cwd: PathBuf,
    /// Our own binary, for what must happen in a child process.
    pub ourselves: PathBuf,
    /// The effective user.
    pub uid: u32,
    /// Time.
    pub clock: Box<dyn Clock>,
    /// Other programs. Shared, since a thread that waits for a call may have to be left behind.
    pub runner: Arc<dyn CommandRunner>,
}

// The foreground daemon is waited for in a thread of its own.
const _: () = {
    const fn is_sync<T: Sync + ?Sized>() {}
    is_sync::<dyn Clock>();
    is_sync::<dyn CommandRunner>();
};

impl Host {
    /// This machine. Moves the process out of the caller's directory.
    pub fn this_machine() -> io::Result<Self> {
        let cwd = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
        let runner = SystemRunner::new()?;
        runner.leave_caller()?;
        Ok(Self {
            root: Root::new("/"),
            env: std::env::vars_os().collect(),
            cwd,
            ourselves: std::env::current_exe()?,
            uid: nix::unistd::geteuid().as_raw(),
            clock: Box::new(SystemClock::default()),
            runner: Arc::new(runner),
        })
    }

    /// The first executable file `name` on the caller's PATH, or on the usual one where he has none. An empty entry is
    /// skipped: it would mean the working directory, where anybody may have put a program of that name.
    pub fn find_program(&self, name: &str) -> Option<PathBuf> {
        std::env::split_paths(self.env.search_path())
            .filter(|directory| !directory.as_os_str().is_empty())
            .map(|directory| self.cwd.join(directory).join(name))
            .find(|file| is_executable(&self.root.at(file)))
    }

    /// Looks every few milliseconds, at once for the first time, until `look` sees something or `limit` has passed.
    pub fn wait_for<T>(&self, limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let deadline = self.clock.monotonic() + limit;
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(seen) = look() {
                return Some(seen);
            }
            let left = deadline.checked_sub(self.clock.monotonic())?;
            self.clock.sleep(pause.min(left));
            if left.is_zero() {
                return None;
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

/// Whether `file` is a regular file that somebody may execute.
pub fn is_executable(file: &Path) -> bool {
    file.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Whether an open file is the one that stands at `path`. Somebody may have removed it meanwhile, and a newcomer would lock
/// another file of that name.
pub fn is_still_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    Ok(fs::symlink_metadata(path)
        .is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())))
}

/// Machines for unit tests.
#[cfg(test)]
pub mod fake {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::runner::{Finished, Invocation, RunError, Status};

    /// A clock that stands still unless somebody waits.
    #[derive(Default)]
    pub struct FakeClock(Mutex<Duration>);

    impl Clock for FakeClock {
        fn now(&self) -> SystemTime {
            SystemTime::UNIX_EPOCH + self.monotonic()
        }

        fn monotonic(&self) -> Duration {
            *self.0.lock().unwrap()
        }

        fn sleep(&self, time: Duration) {
            *self.0.lock().unwrap() += time;
        }
    }

    /// Answers a call with what the test has made of it.
    pub type Answer = Box<dyn FnOnce(&Invocation) -> Result<Finished, RunError> + Send>;

    /// Answers calls from a list, and fails the test if a call is missing or too many.
    pub struct ScriptedRunner(Mutex<VecDeque<Answer>>);

    impl CommandRunner for ScriptedRunner {
        fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
            let answer = self.0.lock().unwrap().pop_front();
            answer.unwrap_or_else(|| panic!("nobody expected {call:?}"))(call)
        }
    }

    impl Drop for ScriptedRunner {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                assert!(self.0.lock().unwrap().is_empty(), "a call was expected");
            }
        }
    }

    /// The machine below `root` with `/bin` on PATH and these answers to its calls.
    pub fn host(root: &Path, answers: Vec<Answer>) -> Host {
        Host {
            root: Root::new(root),
            env: [("PATH", "/bin")].into_iter().collect(),
            cwd: PathBuf::from("/"),
            ourselves: PathBuf::from("/bin/uni-cumps"),
            uid: nix::unistd::geteuid().as_raw(),
            clock: Box::new(FakeClock::default()),
            runner: Arc::new(ScriptedRunner(Mutex::new(answers.into()))),
        }
    }

    /// Writes these files below `root`, each under its path on the machine.
    pub fn write(root: &Path, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = Root::new(root).at(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    /// A program that exits with `code`.
    pub fn exits(code: i32, stdout: &str, stderr: &str) -> Answer {
        let finished = Finished {
            status: Status::Exited(code),
            stdout: stdout.to_owned(),
            stderr: stderr.to_owned(),
            process_group: 0,
        };
        Box::new(move |_| Ok(finished))
    }
}
