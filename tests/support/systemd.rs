//! What the real systemd understands of a drop-in: it parses a unit with it and prints what it has read.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use super::{our_uid, say, set_mode};

const SYSTEMD: &str = "/lib/systemd/systemd";

/// It refuses to look at units as root without being process 1.
const NOBODY: u32 = 65534;

/// A service with a drop-in, as systemd has read it.
#[derive(Debug)]
pub struct Service {
    printed: String,
    /// What it complained about.
    pub said: String,
}

impl Service {
    /// Whether these are the variables that it sets, in this order.
    pub fn sets<K: AsRef<str>, V: AsRef<str>>(&self, variables: &[(K, V)]) -> bool {
        let lines: String = variables
            .iter()
            .map(|(key, value)| format!("\t\tEnvironment: {}={}\n", key.as_ref(), value.as_ref()))
            .collect();
        let another = "\t\tEnvironment: ";
        let around = self.printed.split_once(&lines);
        around.is_some_and(|(before, after)| !before.contains(another) && !after.contains(another))
    }

    pub fn takes_away(&self, variables: &[&str]) -> bool {
        let lines: String = variables
            .iter()
            .map(|key| format!("\t\tUnsetEnvironment: {key}\n"))
            .collect();
        self.printed.contains(&lines)
    }

    /// The command that must succeed before the service starts.
    pub fn must_succeed(&self) -> Option<&str> {
        let (_, rest) = self.printed.split_once("\t\t-> ExecStartPre:\n")?;
        rest.lines().next()?.trim().strip_prefix("Command Line: ")
    }
}

/// A service with this drop-in. `None`, with a note, where systemd is not installed or cannot be asked.
pub fn service(drop_in: &str) -> Option<Service> {
    static CAN_BE_ASKED: LazyLock<bool> = LazyLock::new(|| {
        let can = Path::new(SYSTEMD).exists() && is_known(&ask(""));
        if !can {
            say("systemd is not there, or cannot be asked: what it would read is not tried");
        }
        can
    });
    CAN_BE_ASKED.then(|| {
        let service = ask(drop_in);
        assert!(is_known(&service), "{service:?}");
        service
    })
}

fn is_known(service: &Service) -> bool {
    service.printed.contains("-> Unit t.service:\n")
}

fn ask(drop_in: &str) -> Service {
    let directory = tempfile::Builder::new()
        .prefix("uc-")
        .tempdir_in("/tmp")
        .unwrap();
    set_mode(&directory, 0o755);
    let below = |name: &str| directory.path().join(name);
    let units = below("units");
    fs::create_dir_all(units.join("t.service.d")).unwrap();
    for name in ["home", "run"] {
        fs::create_dir(below(name)).unwrap();
        set_mode(below(name), 0o700);
    }
    let write = |name: &str, text: &str| fs::write(units.join(name), text).unwrap();
    let head = "[Unit]\nDefaultDependencies=no\n";
    write("default.target", &format!("{head}Requires=t.service\n"));
    write(
        "t.service",
        &format!("{head}[Service]\nExecStart=/bin/true\n"),
    );
    write("t.service.d/mps.conf", drop_in);
    let mut command = Command::new(SYSTEMD);
    if our_uid() == 0 {
        for name in ["home", "run"] {
            // Where that is not possible, systemd will not read anything.
            let _ = chown(below(name), Some(NOBODY), Some(NOBODY));
        }
        command = Command::new("/usr/bin/setpriv");
        command
            .args([
                &format!("--reuid={NOBODY}"),
                &format!("--regid={NOBODY}"),
                "--clear-groups",
            ])
            .arg(SYSTEMD);
    }
    let output = command
        .args(["--user", "--test"])
        .env_clear()
        .env("HOME", below("home"))
        .env("XDG_CONFIG_HOME", below("home"))
        .env("XDG_RUNTIME_DIR", below("run"))
        .env("SYSTEMD_UNIT_PATH", &units)
        .env("SYSTEMD_LOG_TARGET", "console")
        .env("SYSTEMD_LOG_LEVEL", "info")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Service {
        printed: String::from_utf8_lossy(&output.stdout).into_owned(),
        said: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}
