//! A snapshot of what `doctor` looks at, for a bug report that can become a test: a directory in the shape of
//! `tests/hosts/`, with home, host and user names replaced.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::cpu_topology;
use crate::daemon::Observed;
use crate::error::Error;
use crate::host::Host;
use crate::mps;
use crate::nvidia_smi;
use crate::process::{self, CGROUPS};
use crate::runtime_dir;
use crate::shell;
use crate::store::Store;
use crate::ui;

/// Files of the kernel that tell what kind of machine it is.
const KERNEL_FILES: [&str; 11] = [
    "/proc/sys/kernel/osrelease",
    "/proc/version",
    "/proc/driver/nvidia/version",
    "/proc/meminfo",
    "/sys/module/nvidia/version",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/node/online",
    "/sys/devices/cpu_core/cpus",
    "/sys/devices/cpu_atom/cpus",
    "/proc/self/cgroup",
    "/proc/self/status",
];

/// What is shown of each CPU.
const CPU_FILES: [&str; 3] = [
    "topology/thread_siblings_list",
    "cpu_capacity",
    "cpufreq/cpuinfo_max_freq",
];

/// What is shown of each PCI device of NVIDIA's.
const DEVICE_FILES: [&str; 5] = ["vendor", "device", "class", "numa_node", "local_cpulist"];

/// Takes the snapshot into `directory`, which must not exist yet. Returns how many files it holds.
pub fn take(host: &Host, directory: &Path, daemons: &[Observed]) -> Result<usize, Error> {
    let cannot = |source| Error::File {
        doing: "write the capture",
        path: directory.to_owned(),
        source,
    };
    DirBuilder::new()
        .mode(0o700)
        .create(host.root.at(directory))
        .map_err(cannot)?;
    let mut capture = Capture {
        host,
        directory,
        names: names(host),
        files: 0,
    };
    capture.everything(daemons).map_err(cannot)?;
    Ok(capture.files)
}

/// What is replaced, the longest first, and by what.
fn names(host: &Host) -> Vec<(String, &'static str)> {
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(host.uid));
    let user = user.ok().flatten().map(|user| user.name);
    let home = runtime_dir::home(host).ok();
    let home = home.map(|home| home.to_string_lossy().into_owned());
    let mut names: Vec<(String, &'static str)> = [
        (home, "/home/user"),
        (Some(process::place(host).host), "host"),
        (user, "user"),
    ]
    .into_iter()
    .filter_map(|(name, replacement)| Some((name?, replacement)))
    // A name of a letter or two would tear everything apart, and gives nothing away.
    .filter(|(name, _)| name.len() > 2)
    .collect();
    names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
    names
}

struct Capture<'c> {
    host: &'c Host,
    directory: &'c Path,
    names: Vec<(String, &'static str)>,
    files: usize,
}

impl Capture<'_> {
    fn everything(&mut self, daemons: &[Observed]) -> io::Result<()> {
        for file in KERNEL_FILES {
            self.copy(file)?;
        }
        self.cpus()?;
        self.devices()?;
        self.nvidia_smi()?;
        for daemon in daemons {
            let record = &daemon.record;
            let name = record.name.as_str();
            self.write(
                Path::new("records").join(format!("{name}.json")),
                &ui::json_text(&daemon.to_json()),
                0o600,
            )?;
            for log in ["control.log", "server.log"] {
                if let Some(text) = mps::log_end(self.host, &record.log_directory, log) {
                    self.write(Path::new("logs").join(name).join(log), &text, 0o600)?;
                }
            }
        }
        if let Ok(store) = Store::of(self.host) {
            let broken = format!("{:#?}\n", store.list().unwrap_or_default());
            self.write("store.txt", &broken, 0o600)?;
        }
        let variables: String = self
            .host
            .env
            .all()
            .filter(|(key, _)| {
                let key = key.to_string_lossy();
                key.starts_with("CUDA_") || key.starts_with("NVIDIA_") || key == "TMPDIR"
            })
            .map(|(key, value)| format!("{}={}\n", key.display(), value.display()))
            .collect();
        self.write("environment.txt", &variables, 0o600)?;
        let about = format!(
            "# A captured machine\n\nTaken by `uni-cumps doctor --capture` {} on Linux {}. Home, host and user names are replaced.\n",
            env!("CARGO_PKG_VERSION"),
            fs::read_to_string(self.host.root.at("/proc/sys/kernel/osrelease"))
                .unwrap_or_default()
                .trim()
        );
        self.write("host.md", &about, 0o600)
    }

    /// A file of the kernel, where there is one.
    fn copy(&mut self, path: &str) -> io::Result<()> {
        self.copy_as(path, path)
    }

    fn copy_as(&mut self, path: &str, place: &str) -> io::Result<()> {
        match fs::read(self.host.root.at(path)) {
            Ok(content) => {
                let text = String::from_utf8_lossy(&content).into_owned();
                self.write(place.trim_start_matches('/'), &text, 0o600)
            }
            Err(_) => Ok(()),
        }
    }

    fn without_names(&self, text: &str) -> String {
        self.names
            .iter()
            .fold(text.to_owned(), |text, (name, replacement)| {
                text.replace(name.as_str(), replacement)
            })
    }

    /// What `cpus --root` plans with.
    fn cpus(&mut self) -> io::Result<()> {
        let online = cpu_topology::online(&self.host.root).unwrap_or_default();
        for cpu in online.iter() {
            for file in CPU_FILES {
                self.copy(&format!("/sys/devices/system/cpu/cpu{cpu}/{file}"))?;
            }
        }
        for (node, _) in cpu_topology::nodes(&self.host.root) {
            self.copy(&format!("/sys/devices/system/node/node{node}/cpulist"))?;
        }
        for file in cpu_topology::quota_files(&self.host.root) {
            // A cgroup may be named after the user or the container. /proc/self/cgroup, in which those names are replaced,
            // has to lead there.
            let path = file.to_string_lossy();
            let place = match path.strip_prefix(CGROUPS) {
                Some(below) => format!("{CGROUPS}{}", self.without_names(below)),
                None => path.to_string(),
            };
            self.copy_as(&path, &place)?;
        }
        Ok(())
    }

    fn devices(&mut self) -> io::Result<()> {
        let devices = Path::new("/sys/bus/pci/devices");
        for entry in fs::read_dir(self.host.root.at(devices))
            .into_iter()
            .flatten()
        {
            let device = devices.join(entry?.file_name());
            let vendor = fs::read_to_string(self.host.root.at(device.join("vendor")));
            if vendor.is_ok_and(|vendor| vendor.trim() == "0x10de") {
                for file in DEVICE_FILES {
                    self.copy(&device.join(file).to_string_lossy())?;
                }
            }
        }
        Ok(())
    }

    /// nvidia-smi as a program that says the same again.
    fn nvidia_smi(&mut self) -> io::Result<()> {
        let Some(finished) = nvidia_smi::raw(self.host) else {
            return Ok(());
        };
        let script = format!(
            "#!/bin/sh\nprintf %s {}\nprintf %s {} >&2\nexit {}\n",
            shell::quote(&finished.stdout),
            shell::quote(&finished.stderr),
            finished.status.shell_code()
        );
        self.write("bin/nvidia-smi", &script, 0o700)
    }

    fn write(&mut self, path: impl AsRef<Path>, text: &str, mode: u32) -> io::Result<()> {
        let path: PathBuf = self.host.root.at(self.directory.join(path));
        let parent = path.parent().unwrap_or(&path);
        DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(parent)?;
        let text = self.without_names(text);
        // A new file each time: nothing is ever overwritten.
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(path)?;
        self.files += 1;
        file.write_all(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Root;
    use crate::host::fake::{self, host};

    #[test]
    fn the_quota_of_a_cgroup_with_a_replaced_name_is_found_again() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        // A container's name is the beginning of its cgroup's.
        let files = [
            ("proc/sys/kernel/hostname", "0123456789ab\n"),
            ("proc/self/cgroup", "0::/docker/0123456789abcdef\n"),
            (
                "sys/fs/cgroup/docker/0123456789abcdef/cpu.max",
                "200000 100000\n",
            ),
        ];
        fake::write(root, &files);
        take(&host(root, Vec::new()), Path::new("/captured"), &[]).unwrap();
        let captured = Root::new(root.join("captured"));
        let quota = cpu_topology::quota(&captured).unwrap();
        assert_eq!(quota.cpus, 2.0);
        assert_eq!(
            quota.file,
            Path::new("/sys/fs/cgroup/docker/hostcdef/cpu.max")
        );
    }
}
