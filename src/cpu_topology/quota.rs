//! How much CPU time the cgroups of this process let it use, in either version of cgroups.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::cpu_topology::text;
use crate::cpus::Quota;
use crate::host::Root;
use crate::process::CGROUPS;

/// The tightest quota over this process's cgroup and those above it. A level that cannot be read or understood, or
/// whose period is 0, is skipped; with period 0 the reference fails.
///
/// The reference reads cgroup v2 alone; where the `cpu` controller is one of v1, or both are mounted, this counts too.
pub fn quota(root: &Root) -> Option<Quota> {
    let groups = groups(root);
    let new = unified_levels(&groups).filter_map(|level| unified_quota(root, &level));
    let old = old_levels(&groups).filter_map(|level| old_quota(root, &level));
    new.chain(old)
        .min_by(|one, other| one.cpus.total_cmp(&other.cpus))
}

/// All files that `quota` looks at and that are there.
pub fn quota_files(root: &Root) -> Vec<PathBuf> {
    let groups = groups(root);
    let new = unified_levels(&groups).map(|level| level.join("cpu.max"));
    let old = old_levels(&groups)
        .flat_map(|level| ["cpu.cfs_quota_us", "cpu.cfs_period_us"].map(|file| level.join(file)));
    let files = new.chain(old).filter(|file| root.at(file).exists());
    // A link to a controller and its own name are one directory, looked at twice.
    files.collect::<BTreeSet<_>>().into_iter().collect()
}

/// The cgroups of this process, a line for each hierarchy.
fn groups(root: &Root) -> String {
    text(root, "/proc/self/cgroup").unwrap_or_default()
}

fn unified_levels(groups: &str) -> impl Iterator<Item = PathBuf> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"));
    levels(CGROUPS, path.unwrap_or("/")).into_iter()
}

fn old_levels(groups: &str) -> impl Iterator<Item = PathBuf> {
    old_directories(groups).flat_map(|(directory, path)| levels(&directory, path))
}

/// Where the `cpu` controller of cgroup v1 is mounted, and the path of the process there. `cpu` is usually a link to
/// the directory that is named after all of its controllers.
fn old_directories(groups: &str) -> impl Iterator<Item = (String, &str)> {
    groups
        .lines()
        .filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let is_cpu = controllers.split(',').any(|name| name == "cpu");
            is_cpu.then_some((controllers, path))
        })
        .flat_map(|(controllers, path)| {
            ["cpu", controllers].map(|name| (format!("{CGROUPS}/{name}"), path))
        })
}

/// The directories from the cgroup at `path` up to where cgroups are mounted. Directories that do not exist belong to
/// it: in a container, `path` may be the host's while only the container's own cgroup is mounted. A path with `..` lies
/// outside of what is mounted.
fn levels(mounted: &str, path: &str) -> Vec<PathBuf> {
    let mounted = Path::new(mounted);
    let path = Path::new(path.trim_start_matches('/'));
    let is_outside = path.components().any(|part| part == Component::ParentDir);
    let deepest = match is_outside {
        true => mounted.to_owned(),
        false => mounted.join(path),
    };
    let levels = deepest.ancestors();
    levels
        .take_while(|level| level.starts_with(mounted))
        .map(Path::to_owned)
        .collect()
}

fn unified_quota(root: &Root, level: &Path) -> Option<Quota> {
    let file = level.join("cpu.max");
    let limits = text(root, &file)?;
    let mut words = limits.split_whitespace();
    let cpus = cpus(words.next()?, words.next()?)?;
    Some(Quota { cpus, file })
}

fn old_quota(root: &Root, level: &Path) -> Option<Quota> {
    let file = level.join("cpu.cfs_quota_us");
    let period = text(root, level.join("cpu.cfs_period_us"))?;
    let cpus = cpus(text(root, &file)?.trim(), period.trim())?;
    Some(Quota { cpus, file })
}

/// Both in microseconds. No limit is `max` in v2 and -1 in v1.
fn cpus(quota: &str, period: &str) -> Option<f64> {
    let number = |text: &str| text.parse().ok().filter(|number: &u32| *number > 0);
    // The kernel takes periods up to a second; quotas can be larger than 32 bits.
    let quota: u64 = quota.parse().ok().filter(|number| *number > 0)?;
    Some(quota as f64 / f64::from(number(period)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake;

    fn found(files: &[(&str, &str)]) -> Option<(f64, String)> {
        let directory = tempfile::tempdir().unwrap();
        fake::write(directory.path(), files);
        let root = Root::new(directory.path());
        quota(&root).map(|quota| (quota.cpus, quota.file.display().to_string()))
    }

    #[test]
    fn an_old_cgroup_counts() {
        let base = "/sys/fs/cgroup/cpu,cpuacct";
        for (group, level) in [("/", ""), ("/a", "/a"), ("/a", ""), ("/docker/x/y", "")] {
            let file = format!("{base}{level}/cpu.cfs_quota_us");
            let period = format!("{base}{level}/cpu.cfs_period_us");
            let line = format!("5:cpuset:/z\n4:cpu,cpuacct:{group}\n");
            let files = [
                ("/proc/self/cgroup", line.as_str()),
                (&file, "150000\n"),
                (&period, "100000\n"),
            ];
            assert_eq!(found(&files), Some((1.5, file.clone())));
            for (quota, period_text) in [("-1", "100000"), ("150000", "0"), ("x", "100000")] {
                let files = [files[0], (&file, quota), (&period, period_text)];
                assert_eq!(found(&files), None);
            }
        }
    }

    #[test]
    fn the_tighter_version_counts_on_a_hybrid_host() {
        let with = |unified| {
            found(&[
                ("/proc/self/cgroup", "1:cpu:/a\n0::/b\n"),
                ("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "300000\n"),
                ("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n"),
                ("/sys/fs/cgroup/b/cpu.max", unified),
            ])
        };
        assert_eq!(with("max 100000").map(|found| found.0), Some(3.0));
        let (cpus, file) = with("200000 100000\n").unwrap();
        assert_eq!((cpus, file.as_str()), (2.0, "/sys/fs/cgroup/b/cpu.max"));
    }

    #[test]
    fn a_level_with_period_0_is_skipped() {
        let files = [
            ("/proc/self/cgroup", "0::/a\n"),
            ("/sys/fs/cgroup/a/cpu.max", "100000 0\n"),
            ("/sys/fs/cgroup/cpu.max", "300000 100000\n"),
        ];
        assert_eq!(found(&files).map(|found| found.0), Some(3.0));
    }
}
