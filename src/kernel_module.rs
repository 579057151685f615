//! What NVIDIA's kernel module tells of its GPUs in `/proc/driver/nvidia`, with no program called.

use std::collections::BTreeMap;
use std::fs;

use crate::gpu::GpuUuid;
use crate::host::Host;

/// The GPUs by the numbers of their device files, `/dev/nvidia<N>`; empty where the module does not tell them.
pub fn minors(host: &Host) -> BTreeMap<u32, GpuUuid> {
    let gpus = fs::read_dir(host.root.at("/proc/driver/nvidia/gpus"));
    let gpu = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path().join("information")).ok()?;
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim_start_matches([':', ' ', '\t']).trim().to_owned())
        };
        let minor = value("Device Minor")?.parse().ok()?;
        Some((minor, value("GPU UUID")?.parse().ok()?))
    };
    let gpus = gpus.into_iter().flatten().flatten();
    gpus.filter_map(gpu).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake;

    #[test]
    fn gpus_are_told_by_the_numbers_of_their_device_files() {
        let root = tempfile::tempdir().unwrap();
        let uuid = |digit: char| format!("GPU-{digit}a1b2c3d-0e4f-5a6b-7c8d-9e0f1a2b3c40");
        let text = |uuid: &str, minor: &str| {
            format!(
                "Model: \t\t NVIDIA H100\nIRQ:   \t\t 51\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
            )
        };
        fake::write(
            root.path(),
            &[
                (
                    "/proc/driver/nvidia/gpus/0000:41:00.0/information",
                    &text(&uuid('0'), "1"),
                ),
                (
                    "/proc/driver/nvidia/gpus/0000:c1:00.0/information",
                    &text(&uuid('1'), "0"),
                ),
                (
                    "/proc/driver/nvidia/gpus/0000:c2:00.0/information",
                    &text("GPU-????????", "2"),
                ),
                ("/proc/driver/nvidia/gpus/0000:c3:00.0/power", ""),
            ],
        );
        let host = fake::host(root.path(), Vec::new());
        let expected =
            [(0, uuid('1')), (1, uuid('0'))].map(|(minor, uuid)| (minor, uuid.parse().unwrap()));
        assert_eq!(minors(&host), BTreeMap::from(expected));
        let empty = tempfile::tempdir().unwrap();
        assert_eq!(
            minors(&fake::host(empty.path(), Vec::new())),
            BTreeMap::new()
        );
    }
}
