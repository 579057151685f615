//! A machine of one directory, whose time stands still unless somebody waits.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, SystemTime};

use uni_cumps::Host;
use uni_cumps::host::{Clock, Root};
use uni_cumps::runner::CommandRunner;

#[derive(Default)]
struct StillClock(Mutex<Duration>);

impl Clock for StillClock {
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

/// The directory of this process's machine. A fuzzer ends without cleaning up, so it lies among what is built.
pub fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/machines");
        let root = target.join(std::process::id().to_string());
        for directory in ["bin", "pipe", "proc/42"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        root
    });
    &ROOT
}

/// The machine, with `/bin` on PATH.
pub fn host(runner: impl CommandRunner + 'static) -> Host {
    Host {
        root: Root::new(root()),
        env: [("PATH", "/bin")].into_iter().collect(),
        cwd: PathBuf::from("/"),
        ourselves: PathBuf::from("/bin/uni-cumps"),
        uid: 0,
        clock: Box::new(StillClock::default()),
        runner: Arc::new(runner),
    }
}
