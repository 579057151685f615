//! A machine made of a temporary directory, with a clock that only waiting moves and programs that say what a test
//! has made up.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use uni_cumps::Host;
use uni_cumps::host::{Clock, Root};
use uni_cumps::runner::{CommandRunner, Finished, Invocation, RunError};

use crate::support::{our_uid, set_mode};

#[derive(Clone, Default)]
pub(crate) struct StillClock(Arc<Mutex<Duration>>);

impl StillClock {
    /// Time passes.
    pub(crate) fn advance(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

impl Clock for StillClock {
    fn now(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.monotonic()
    }

    fn monotonic(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep(&self, time: Duration) {
        // A test beside this one that is just starting a program holds a copy of every lock until that runs.
        std::thread::sleep(Duration::from_micros(20));
        self.advance(time);
    }
}

/// What a program does when it is called.
pub(crate) type Answer = dyn Fn(&Invocation) -> Result<Finished, RunError> + Send + Sync;

struct Programs(Box<Answer>);

impl CommandRunner for Programs {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        (self.0)(call)
    }
}

/// The machine below `root`, whose programs answer like this.
pub(crate) fn host_with_programs(root: &Path, answer: Box<Answer>) -> Host {
    Host {
        root: Root::new(root),
        env: [("PATH", "/bin")].into_iter().collect(),
        cwd: PathBuf::from("/"),
        ourselves: PathBuf::from("/bin/uni-cumps"),
        uid: our_uid(),
        clock: Box::new(StillClock::default()),
        runner: Arc::new(Programs(answer)),
    }
}

/// The machine below `root`, where nothing calls a program.
pub(crate) fn host(root: &Path) -> Host {
    host_with_programs(root, Box::new(|call| panic!("nobody expected {call:?}")))
}

/// Puts a new file into the machine below `root`, and before it the directories above it where they are missing. A file
/// that is there is not written over: some file systems wait for the disk then.
pub(crate) fn write(root: &Path, file: &str, content: impl AsRef<[u8]>) {
    let path = root.join(file);
    let _ = fs::remove_file(&path);
    if fs::write(&path, &content).is_err() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

/// Puts an executable file below `root`.
pub(crate) fn install(root: &Path, program: &str) {
    write(root, program, "");
    set_mode(root.join(program), 0o755);
}
