//! Who is pid N: a process's identity, whether it still runs, waiting for its end, and signals. No other file signals a
//! process that is not its own child.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::host::Host;
use crate::record::{Place, ProcessId};

/// Where cgroups are mounted.
pub const CGROUPS: &str = "/sys/fs/cgroup";

/// What `/proc` says of a process that runs. A zombie does not run: nothing of it is left but its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Who it is.
    pub id: ProcessId,
    /// Its effective user.
    pub uid: u32,
    /// State T or t: stopped by a signal or a debugger. It will not answer.
    pub stopped: bool,
    /// Its parent.
    pub parent: i32,
    /// Its process group.
    pub group: i32,
}

fn proc_path(host: &Host, pid: i32, file: &str) -> PathBuf {
    host.root.at(format!("/proc/{pid}/{file}"))
}

/// What `/proc/<pid>/stat` says, as far as we ask.
struct Stat {
    state: char,
    parent: i32,
    group: i32,
    start_ticks: u64,
}

/// Takes a line of `/proc/<pid>/stat` apart. The program's name in it is whatever bytes it gave itself, brackets and
/// halves of letters among them, on which procfs panics; nothing behind it holds a bracket.
fn parse(line: &[u8], pid: i32) -> Option<Stat> {
    let line = String::from_utf8_lossy(line);
    let named = line.strip_prefix(&format!("{pid} ("))?;
    let (_, fields) = named.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    Some(Stat {
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
        start_ticks: fields.nth(16)?.parse().ok()?,
    })
}

fn stat(host: &Host, pid: i32) -> Option<Stat> {
    stat_on(host, pid, boot_offset(host))
}

fn stat_on(host: &Host, pid: i32, offset: i64) -> Option<Stat> {
    let mut stat = parse(&fs::read(proc_path(host, pid, "stat")).ok()?, pid)?;
    stat.start_ticks = stat.start_ticks.saturating_add_signed(-offset);
    Some(stat)
}

/// How much later, in ticks, processes seem to have started to us than they have on the machine's own clock. A container
/// may have a clock of its own (time_namespaces(7)), and a record must mean the same process in all of them.
fn boot_offset(host: &Host) -> i64 {
    let file = |name| host.root.at("/proc/self").join(name);
    let offsets = fs::read_to_string(file("timens_offsets")).unwrap_or_default();
    let seconds = offsets.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("boottime")).then(|| words.next()?.parse::<i64>().ok())?
    });
    let seconds = seconds.filter(|seconds| *seconds != 0);
    let namespace = |name| fs::read_link(file(name)).ok();
    // The offsets are those of our children.
    let is_ours = || namespace("ns/time") == namespace("ns/time_for_children");
    match seconds {
        Some(seconds) if is_ours() => {
            let ticks = i64::try_from(procfs::ticks_per_second()).unwrap_or_default();
            seconds.saturating_mul(ticks)
        }
        _ => 0,
    }
}

/// The running process with this number, whoever it is.
pub fn running(host: &Host, pid: i32) -> Option<Running> {
    running_on(host, pid, || boot_offset(host))
}

/// Most records are of processes that are gone, and those need no offset.
fn running_on(host: &Host, pid: i32, offset: impl FnOnce() -> i64) -> Option<Running> {
    let uid = fs::metadata(proc_path(host, pid, "")).ok()?.uid();
    let stat = stat_on(host, pid, offset())?;
    let gone = matches!(stat.state, 'Z' | 'X' | 'x');
    (!gone).then_some(Running {
        id: ProcessId {
            pid,
            start_ticks: stat.start_ticks,
        },
        uid,
        stopped: matches!(stat.state, 'T' | 't'),
        parent: stat.parent,
        group: stat.group,
    })
}

/// Whether nothing is left of a process but its status, or only threads that are about to end.
pub fn is_zombie(host: &Host, pid: i32) -> bool {
    stat(host, pid).is_some_and(|stat| matches!(stat.state, 'Z' | 'X' | 'x'))
}

/// The process `id`, if it still runs: the pid alone may have been given to another one.
pub fn still_running(host: &Host, id: ProcessId) -> Option<Running> {
    running(host, id.pid).filter(|found| found.id == id)
}

/// One variable of the environment that a process was started with, where we may read it.
pub fn variable_of(host: &Host, pid: i32, key: &str) -> Option<String> {
    let environ = fs::read(proc_path(host, pid, "environ")).ok()?;
    environ
        .split(|byte| *byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
        .find(|(name, _)| *name == key)
        .map(|(_, value)| value.to_owned())
}

/// When a process started, in whole seconds since 1970. As exact as the machine's clock, whose changes move it.
pub fn started_at(host: &Host, id: ProcessId) -> Option<u64> {
    let text = fs::read_to_string(host.root.at("/proc/stat")).ok()?;
    let boot = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    // In a container with a clock of its own the boot is told on that clock.
    let ticks = id.start_ticks.saturating_add_signed(boot_offset(host));
    let boot: u64 = boot.trim().parse().ok()?;
    Some(boot.saturating_add(ticks / procfs::ticks_per_second()))
}

/// The name of a user in the machine's database.
pub fn user_name(uid: u32) -> Option<String> {
    let user = nix::unistd::User::from_uid(uid.into()).ok()??;
    Some(user.name)
}

/// The file name of the program that a process was called as. `comm` would not do: it is cut to 15 letters, and
/// NVIDIA's control program and server then have the same.
pub fn program_name(host: &Host, pid: i32) -> Option<String> {
    let line = fs::read(proc_path(host, pid, "cmdline")).ok()?;
    let program = line.split(|byte| *byte == 0).next()?;
    let program = std::str::from_utf8(program).ok()?;
    Some(program.rsplit('/').next()?.to_owned())
}

/// Whether a process has written anything anywhere; one that we may not look at may have.
pub fn has_written(host: &Host, pid: i32) -> bool {
    let io = fs::read_to_string(proc_path(host, pid, "io")).unwrap_or_default();
    let written = io.lines().find_map(|line| line.strip_prefix("wchar: "));
    written != Some("0")
}

/// Whether we may see a process's environment and memory map.
pub fn may_be_looked_at(host: &Host, pid: i32) -> bool {
    fs::File::open(proc_path(host, pid, "environ")).is_ok()
}

/// The process that a number means: that of its first thread, where it is the number of another one.
pub fn leader_of(host: &Host, thread: i32) -> Option<i32> {
    status_value(host, &thread.to_string(), "Tgid:")?
        .parse()
        .ok()
}

/// Whether we may act on a user's processes as a debugger does: they are ours, or CAP_SYS_PTRACE is effective.
pub fn may_trace(host: &Host, uid: u32) -> bool {
    const CAP_SYS_PTRACE: u64 = 19;
    let effective = status_value(host, "self", "CapEff:");
    let effective = effective.and_then(|value| u64::from_str_radix(&value, 16).ok());
    uid == host.uid || effective.is_some_and(|set| set & 1 << CAP_SYS_PTRACE != 0)
}

fn status_value(host: &Host, process: &str, key: &str) -> Option<String> {
    let status = fs::read_to_string(host.root.at(format!("/proc/{process}/status"))).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    Some(value.trim().to_owned())
}

/// Whether the cgroup of a process is frozen, by itself or with one above it: the process is there and does nothing.
pub fn is_frozen(host: &Host, pid: i32) -> bool {
    let groups = fs::read_to_string(proc_path(host, pid, "cgroup")).unwrap_or_default();
    let says = |file: String, word: &str| {
        let text = fs::read_to_string(host.root.at(file)).unwrap_or_default();
        text.lines().any(|line| line == word)
    };
    groups.lines().any(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        match (parts.next(), parts.next()) {
            // Beside cgroups of version 1 those of version 2 are mounted one level down.
            (Some(""), Some(path)) => ["", "/unified"]
                .into_iter()
                .any(|mount| says(format!("{CGROUPS}{mount}{path}/cgroup.events"), "frozen 1")),
            (Some("freezer"), Some(path)) => {
                says(format!("{CGROUPS}/freezer{path}/freezer.state"), "FROZEN")
            }
            _ => false,
        }
    })
}

/// Whether a process is in our namespace of this kind, such as `ipc`; `None` where the kernel does not let us see.
pub fn shares_namespace(host: &Host, pid: i32, kind: &str) -> Option<bool> {
    let link = |of: &str| fs::read_link(host.root.at(format!("/proc/{of}/ns/{kind}"))).ok();
    Some(link(&pid.to_string())? == link("self")?)
}

/// A process's running children. The kernel lists them by the thread that started them.
pub fn children_of(host: &Host, pid: i32) -> Vec<Running> {
    let threads = fs::read_dir(proc_path(host, pid, "task"));
    let lists = threads
        .into_iter()
        .flatten()
        .map(|thread| fs::read_to_string(thread?.path().join("children")));
    match lists.collect::<io::Result<Vec<String>>>() {
        Ok(lists) => lists
            .iter()
            .flat_map(|list| list.split_whitespace())
            .filter_map(|child| running(host, child.parse().ok()?))
            .collect(),
        // A kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended.
        Err(_) => all(host).filter(|process| process.parent == pid).collect(),
    }
}

/// All running processes that a process has started, as far as they still have it as an ancestor.
pub fn descendants_of(host: &Host, pid: i32) -> Vec<Running> {
    with_descendants(host, children_of(host, pid))
}

/// These processes and all running ones that they have started.
pub fn with_descendants(host: &Host, mut found: Vec<Running>) -> Vec<Running> {
    let mut next = 0;
    while let Some(parent) = found.get(next).map(|process| process.id.pid) {
        next += 1;
        for child in children_of(host, parent) {
            if !found.iter().any(|known| known.id == child.id) {
                found.push(child);
            }
        }
    }
    found
}

/// Ends a family of processes, whoever joins it meanwhile: first with SIGTERM, after `limit` with SIGKILL. What is still
/// there after as long again, or cannot be signalled, is returned.
pub fn end_all(host: &Host, family: &dyn Fn() -> Vec<Running>, limit: Duration) -> Vec<Running> {
    let signal_all = |signal: fn(&Handle) -> io::Result<()>| {
        let members = family();
        let reached = members.iter().filter(|member| {
            let handle = Handle::of(host, member.id);
            handle.is_ok_and(|handle| handle.is_some_and(|handle| signal(&handle).is_ok()))
        });
        reached.count()
    };
    // Two looks: one whose parent ends during a look, and that so becomes another one's child, may be missed by it.
    let is_gone = || (family().is_empty() && family().is_empty()).then_some(());
    let kill = || (signal_all(Handle::kill) + signal_all(Handle::kill) == 0).then_some(());
    if signal_all(Handle::terminate) > 0 && host.wait_for(limit, is_gone).is_some() {
        return Vec::new();
    }
    host.wait_for(limit, kill);
    family()
}

/// The running processes of this user that were called as `program` with this variable in their environment.
pub fn called_with(host: &Host, program: &str, key: &str, value: &str) -> Vec<Running> {
    all(host)
        .filter(|process| process.uid == host.uid)
        .filter(|process| program_name(host, process.id.pid).as_deref() == Some(program))
        .filter(|process| variable_of(host, process.id.pid, key).as_deref() == Some(value))
        .collect()
}

/// The running processes of a user that have this variable in their environment.
pub fn with_variable(host: &Host, uid: u32, key: &str, value: &str) -> Vec<Running> {
    all(host)
        .filter(|process| process.uid == uid)
        .filter(|process| variable_of(host, process.id.pid, key).as_deref() == Some(value))
        .collect()
}

/// The running processes of a process group. Used for what a failed call left behind.
pub fn members_of_group(host: &Host, group: i32) -> Vec<Running> {
    all(host)
        .filter(|process| process.group == group && process.uid == host.uid)
        .collect()
}

fn all(host: &Host) -> impl Iterator<Item = Running> {
    let offset = boot_offset(host);
    fs::read_dir(host.root.at("/proc"))
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(move |pid| running_on(host, pid, || offset))
}

/// Where we are, for comparing with a record.
pub fn place(host: &Host) -> Place {
    let line = |path: &str| {
        let text = fs::read_to_string(host.root.at(path)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let namespace = fs::read_link(host.root.at("/proc/self/ns/pid")).ok();
    Place {
        // The Python command writes this word where a machine has no name.
        host: line("/proc/sys/kernel/hostname").unwrap_or_else(|| "unknown-host".to_owned()),
        boot_id: line("/proc/sys/kernel/random/boot_id"),
        pid_namespace: namespace.and_then(|link| {
            let text = link.to_str()?;
            text.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
        }),
    }
}

/// A hold on one process: signals reach it or nobody, even if its number is given away meanwhile.
pub struct Handle {
    pidfd: OwnedFd,
    id: ProcessId,
}

impl Handle {
    /// Takes hold of `id`; `None` if it is gone. A zombie is still held: while a process ends, its first thread may be
    /// one already and the others still keep sockets open. `wait` waits for the last of them.
    pub fn of(host: &Host, id: ProcessId) -> io::Result<Option<Self>> {
        if !host.root.is_this_machine() {
            return Err(io::Error::other("the pid is of another machine"));
        }
        let Some(pid) = Pid::from_raw(id.pid) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // Looked at after the pidfd exists: what matches now is what the pidfd holds.
        let same = stat(host, id.pid).is_some_and(|stat| stat.start_ticks == id.start_ticks);
        Ok(same.then_some(Self { pidfd, id }))
    }

    /// Asks the process to end (SIGTERM), also if it is stopped.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::TERM)?;
        self.signal(Signal::CONT)
    }

    /// Ends the process without asking (SIGKILL).
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until the process is gone or a zombie; `false` if it is neither after `limit`.
    pub fn wait(&self, host: &Host, limit: Duration) -> bool {
        let deadline = host.clock.monotonic() + limit;
        loop {
            let left = deadline.saturating_sub(host.clock.monotonic());
            let timeout =
                PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, timeout) {
                Ok(1..) => return true,
                Ok(_) if left.is_zero() => return false,
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => return still_running(host, self.id).is_none(),
            }
        }
    }
}

/// Ourselves.
pub fn our_pid() -> i32 {
    nix::unistd::getpid().as_raw()
}

/// The process that has started us; `None` if it is of another pid namespace.
pub fn our_parent() -> Option<i32> {
    Some(nix::unistd::getppid().as_raw()).filter(|pid| *pid > 0)
}

/// Our effective group.
pub fn group_of_ours() -> u32 {
    nix::unistd::getegid().as_raw()
}

/// Behaves as if somebody had sent us SIGTERM: the foreground program gets it.
pub fn terminate_ourselves() {
    // To the process and not to the thread, so that whoever waits for signals sees it. Signalling oneself cannot fail.
    let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGTERM);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake;

    const PID: i32 = 42;

    fn with(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let root = tempfile::tempdir().unwrap();
        fake::write(root.path(), files);
        let host = fake::host(root.path(), Vec::new());
        (root, host)
    }

    #[test]
    fn a_cgroup_of_either_version_may_be_frozen() {
        for (groups, file, text, expected) in [
            (
                "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cgroup.events",
                "populated 1\nfrozen 1\n",
                true,
            ),
            (
                "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cgroup.events",
                "populated 1\nfrozen 0\n",
                false,
            ),
            (
                "0::/a\n",
                "/sys/fs/cgroup/unified/a/cgroup.events",
                "frozen 1\n",
                true,
            ),
            (
                "7:freezer:/a\n0::/\n",
                "/sys/fs/cgroup/freezer/a/freezer.state",
                "FROZEN\n",
                true,
            ),
            (
                "7:freezer:/a\n0::/\n",
                "/sys/fs/cgroup/freezer/a/freezer.state",
                "THAWED\n",
                false,
            ),
            (
                "7:cpu,cpuacct:/a\n",
                "/sys/fs/cgroup/freezer/a/freezer.state",
                "FROZEN\n",
                false,
            ),
            // The path of another namespace, which is not mounted here.
            ("0::/../../x\n", "/proc/42/comm", "", false),
        ] {
            let (_root, host) = with(&[("/proc/42/cgroup", groups), (file, text)]);
            assert_eq!(is_frozen(&host, PID), expected, "{groups} {text}");
        }
        let (_root, host) = with(&[]);
        assert!(!is_frozen(&host, PID));
    }

    #[test]
    fn a_start_is_told_in_seconds_since_1970() {
        let ticks = procfs::ticks_per_second();
        let id = ProcessId {
            pid: PID,
            start_ticks: 20 * ticks + ticks - 1,
        };
        let (_root, host) = with(&[("/proc/stat", "cpu  1 2 3\nbtime 1700000000\nctxt 5\n")]);
        assert_eq!(started_at(&host, id), Some(1_700_000_020));
        for text in ["", "cpu  1 2 3\n", "btime soon\n"] {
            let (_root, host) = with(&[("/proc/stat", text)]);
            assert_eq!(started_at(&host, id), None);
        }
    }

    #[test]
    fn a_capability_lets_one_act_on_the_processes_of_others() {
        let status = |effective: &str| format!("Name:\tx\nCapEff:\t{effective}\n");
        for (effective, expected) in [
            ("0000000000080000", true),
            ("ffffffffffffffff", true),
            ("0000000000040000", false),
        ] {
            let (_root, host) = with(&[("/proc/self/status", &status(effective))]);
            assert_eq!(may_trace(&host, host.uid + 1), expected, "{effective}");
            assert!(may_trace(&host, host.uid));
        }
        let (_root, host) = with(&[]);
        assert!(!may_trace(&host, host.uid + 1));
    }
}
