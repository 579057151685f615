//! The machine's CPUs and GPUs as the kernel shows them in /proc and /sys: what `cpus` plans with. Reads only the files
//! of CPUs that may be used.

mod quota;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::str::FromStr;

use crate::cpus::{CpuSet, HostGpu, Machine};
use crate::gpu::{GpuUuid, PciAddress};
use crate::host::Root;

pub use quota::{quota, quota_files};

const PCI_DEVICES: &str = "/sys/bus/pci/devices";
const NVIDIA: &str = "0x10de";
/// VGA and 3D controllers. They are one family: a GPU with a display attached is counted with those without. The
/// reference tells them apart, and two of them on one machine then take the same cores.
const GPU_CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// Everything that the planner sees of the machine, for a process that may use the CPUs of `mask`.
pub fn machine(root: &Root, mask: CpuSet) -> Machine {
    Machine {
        quota: quota(root),
        siblings: siblings(root, &mask),
        gpus: gpus(root),
        performance: performance(root, &mask),
        mask,
    }
}

/// The CPUs that are online.
pub fn online(root: &Root) -> Option<CpuSet> {
    read(root, "/sys/devices/system/cpu/online").filter(|cpus: &CpuSet| !cpus.is_empty())
}

/// `Cpus_allowed_list` of a process, a pid or `self`. It has room for any number of CPUs, and may name some that are
/// offline.
pub fn allowed(root: &Root, process: &str) -> Option<CpuSet> {
    let status = text(root, format!("/proc/{process}/status"))?;
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    list.parse().ok().filter(|cpus: &CpuSet| !cpus.is_empty())
}

/// The CPUs that this process may run on. Those that are offline are left out.
pub fn process_mask(root: &Root) -> Option<CpuSet> {
    let allowed = allowed(root, "self")?;
    let mask = match online(root) {
        Some(online) => allowed.intersection(&online),
        None => allowed,
    };
    (!mask.is_empty()).then_some(mask)
}

/// The NUMA nodes by number, each with its CPUs; none where the kernel knows no nodes.
pub fn nodes(root: &Root) -> Vec<(String, CpuSet)> {
    let directory = "/sys/devices/system/node";
    let mut nodes: Vec<(u32, CpuSet)> = names(root, directory)
        .filter_map(|name| {
            let number = name.strip_prefix("node")?.parse().ok()?;
            let cpus: CpuSet = read(root, format!("{directory}/{name}/cpulist"))?;
            (!cpus.is_empty()).then_some((number, cpus))
        })
        .collect();
    nodes.sort_by_key(|(number, _)| *number);
    nodes
        .into_iter()
        .map(|(number, cpus)| (number.to_string(), cpus))
        .collect()
}

/// Which GPU sits where, as NVIDIA's kernel module tells everybody.
pub fn gpu_addresses(root: &Root) -> Vec<(GpuUuid, PciAddress)> {
    let directory = "/proc/driver/nvidia/gpus";
    names(root, directory)
        .filter_map(|name| {
            let information = text(root, format!("{directory}/{name}/information"))?;
            let uuid = information
                .lines()
                .find_map(|line| line.strip_prefix("GPU UUID:"))?;
            Some((uuid.trim().parse().ok()?, name.parse().ok()?))
        })
        .collect()
}

/// What lies in a directory; nothing where there is none.
fn names(root: &Root, directory: &str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(root.at(directory)).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

fn text(root: &Root, path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(root.at(path)).ok()
}

/// What a file holds, if it can be read and understood.
fn read<T: FromStr>(root: &Root, path: impl AsRef<Path>) -> Option<T> {
    text(root, path)?.trim().parse().ok()
}

/// `thread_siblings_list` of each CPU; a CPU whose list is missing or garbled is alone.
fn siblings(root: &Root, cpus: &CpuSet) -> BTreeMap<usize, CpuSet> {
    let of = |cpu| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let itself = CpuSet::from_iter([cpu]);
        let listed: Option<CpuSet> = read(root, file);
        (cpu, listed.unwrap_or_default().union(&itself))
    };
    cpus.iter().map(of).collect()
}

/// The machine's NVIDIA GPUs in the order of their addresses, whichever of them the caller may use; none without sysfs.
pub fn gpus(root: &Root) -> Vec<HostGpu> {
    let names = names(root, PCI_DEVICES);
    let mut gpus: Vec<HostGpu> = names.filter_map(|name| gpu(root, &name)).collect();
    gpus.sort_by_key(|gpu| gpu.address);
    gpus
}

fn gpu(root: &Root, name: &str) -> Option<HostGpu> {
    let file = |file: &str| format!("{PCI_DEVICES}/{name}/{file}");
    let word = |path: &str| text(root, file(path)).map(|text| text.trim().to_owned());
    let is_gpu = word("vendor")? == NVIDIA && {
        let class = word("class")?;
        GPU_CLASSES.iter().any(|prefix| class.starts_with(prefix))
    };
    let local = || read(root, file("local_cpulist")).filter(|cpus: &CpuSet| !cpus.is_empty());
    is_gpu.then_some(())?;
    Some(HostGpu {
        address: name.parse().ok()?,
        node: word("numa_node"),
        local: local(),
    })
}

/// How fast each of these CPUs is, by the first source that knows all of them: the kernel's own measure on ARM, the
/// highest frequency, or the two kinds of Intel's hybrid CPUs. Empty where none does.
fn performance(root: &Root, cpus: &CpuSet) -> BTreeMap<usize, u64> {
    let from_files = |file: &str| -> Option<BTreeMap<usize, u64>> {
        let path = |cpu| format!("/sys/devices/system/cpu/cpu{cpu}/{file}");
        cpus.iter()
            .map(|cpu| Some((cpu, read(root, path(cpu))?)))
            .collect()
    };
    let from_kinds = || {
        let fast: CpuSet = read(root, "/sys/devices/cpu_core/cpus")?;
        let slow: CpuSet = read(root, "/sys/devices/cpu_atom/cpus")?;
        let of = |cpu| match (fast.contains(cpu), slow.contains(cpu)) {
            (true, _) => Some((cpu, 2)),
            (false, true) => Some((cpu, 1)),
            (false, false) => None,
        };
        cpus.iter().map(of).collect()
    };
    from_files("cpu_capacity")
        .or_else(|| from_files("cpufreq/cpuinfo_max_freq"))
        .or_else(from_kinds)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake;

    fn machine_with(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let directory = tempfile::tempdir().unwrap();
        fake::write(directory.path(), files);
        let root = Root::new(directory.path());
        (directory, root)
    }

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn offline_cpus_are_not_in_the_mask() {
        let status = "Name:\tx\nCpus_allowed:\tffff\nCpus_allowed_list:\t0-15\n";
        let (_directory, root) = machine_with(&[("/proc/self/status", status)]);
        assert_eq!(process_mask(&root), Some(set("0-15")));
        let (_directory, root) = machine_with(&[
            ("/proc/self/status", status),
            ("/sys/devices/system/cpu/online", "0-3,8\n"),
        ]);
        assert_eq!(process_mask(&root), Some(set("0-3,8")));
        assert_eq!(process_mask(&Root::new("/nowhere")), None);
    }

    #[test]
    fn this_process_has_a_mask() {
        assert!(process_mask(&Root::new("/")).is_some());
    }

    #[test]
    fn performance_comes_from_one_source_that_knows_every_cpu() {
        let capacity = |cpu| format!("/sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        let highest = |cpu| format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq");
        let (_directory, root) = machine_with(&[
            (&capacity(0), "1024\n"),
            (&highest(0), "5000000\n"),
            (&highest(1), "3800000\n"),
            ("/sys/devices/cpu_core/cpus", "0\n"),
            ("/sys/devices/cpu_atom/cpus", "1-2\n"),
        ]);
        let of = |cpus| {
            performance(&root, &set(cpus))
                .into_values()
                .collect::<Vec<_>>()
        };
        assert_eq!(of("0"), [1024]);
        assert_eq!(of("0-1"), [5_000_000, 3_800_000]);
        assert_eq!(of("0-2"), [2, 1, 1]);
        assert!(of("0-3").is_empty());
    }

    #[test]
    fn gpus_of_both_classes_are_listed_and_nothing_else_of_nvidia() {
        let device = |address: &str, file: &str| format!("{PCI_DEVICES}/{address}/{file}");
        let devices = [
            ("10000:01:00.0", "0x10de", "0x030200"),
            ("0000:41:00.0", "0x10de", "0x030000"),
            ("0000:41:00.1", "0x10de", "0x040300"),
            ("0000:02:00.0", "0x1002", "0x030000"),
            ("0000:05:00.0", "0x10de", "0x068000"),
            ("0000:c1:00.0", "0x10de", "0x030200"),
        ]
        .map(|(address, vendor, class)| {
            [
                (device(address, "vendor"), vendor),
                (device(address, "class"), class),
            ]
        });
        let files = devices.as_flattened().iter();
        let files: Vec<_> = files.map(|(path, text)| (path.as_str(), *text)).collect();
        let (_directory, root) = machine_with(&files);
        let found: Vec<String> = gpus(&root)
            .iter()
            .map(|gpu| gpu.address.to_string())
            .collect();
        assert_eq!(found, ["0000:41:00.0", "0000:c1:00.0", "10000:01:00.0"]);
    }

    #[test]
    fn nothing_is_known_without_sysfs() {
        let machine = machine(&Root::new("/nowhere"), set("0-1"));
        assert_eq!(machine.cores(), [set("0"), set("1")]);
        assert!(machine.gpus.is_empty() && machine.performance.is_empty());
        assert_eq!(
            (machine.quota, online(&Root::new("/nowhere"))),
            (None, None)
        );
    }
}
