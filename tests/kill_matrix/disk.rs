//! Disks that fail: at each call in turn, full or read-only from the beginning, and full in between.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::{Child, Command, Stdio};

use crate::killed::{
    AFTER_THE_RECORD_WAS_LOST, Before, Figures, IN_THE_FOREGROUND, ON_AN_EMPTY_MACHINE,
    OVER_A_STALE_RECORD, STOP_OF_A_LIVE_DAEMON, STOP_OF_A_STALE_RECORD, Scene, is_faithful,
    is_put_right,
};
use crate::support::{N0, wait_until};
use crate::trace::{self, Call, Ended};
use crate::world::{Found, NSENTER, World};
use crate::{Driver, Needs, Row, nightly};

pub(crate) const ROWS: &[Row] = &[
    ("start_on_an_empty_machine_fails", Needs::Strace, |driver| {
        matrix(driver, &ON_AN_EMPTY_MACHINE)
    }),
    ("start_over_a_stale_record_fails", Needs::Strace, |driver| {
        matrix(driver, &OVER_A_STALE_RECORD)
    }),
    (
        "start_of_a_daemon_whose_record_was_lost_fails",
        Needs::Strace,
        |driver| matrix(driver, &AFTER_THE_RECORD_WAS_LOST),
    ),
    ("start_in_the_foreground_fails", Needs::Strace, |driver| {
        matrix(driver, &IN_THE_FOREGROUND)
    }),
    ("stop_of_a_live_daemon_fails", Needs::Strace, |driver| {
        matrix(driver, &STOP_OF_A_LIVE_DAEMON)
    }),
    ("stop_of_a_stale_record_fails", Needs::Strace, |driver| {
        matrix(driver, &STOP_OF_A_STALE_RECORD)
    }),
    ("the_disk_is_full", Needs::Root, full),
    (
        "the_temporary_directory_is_full",
        Needs::Root,
        temporary_directory_is_full,
    ),
    ("the_disk_is_read_only", Needs::Root, read_only),
];

/// The ways in which a call fails on a full, a read-only and a broken disk, on a network file system without locks, and
/// where no process can be made.
pub(crate) fn errors(world: &World, call: &Call) -> &'static [&'static str] {
    let ours = [world.machine.path("h"), world.machine.path("t")];
    let is_ours = ours
        .iter()
        .any(|path| call.line.contains(path.to_str().unwrap()));
    match call.name.as_str() {
        "clone" | "clone3" | "vfork" | "fork" => &["EAGAIN"],
        _ if !is_ours => &[],
        "openat" if call.line.contains("O_CREAT") => &["ENOSPC", "EROFS", "EIO"],
        "openat" | "connect" => &["EIO"],
        "mkdir" | "mkdirat" | "rename" | "renameat" | "renameat2" | "link" | "linkat" => {
            &["ENOSPC", "EROFS", "EIO"]
        }
        "unlink" | "unlinkat" | "rmdir" | "fchmod" => &["EROFS", "EIO"],
        "fsync" | "fdatasync" | "write" => &["ENOSPC", "EIO"],
        "flock" => &["ENOLCK"],
        "fcntl" if call.line.contains("F_UNLCK") => &[],
        "fcntl" if call.line.contains("F_SETLK") || call.line.contains("F_GETLK") => &["ENOLCK"],
        _ => &[],
    }
}

/// Makes each call of the command fail in turn: in one of its ways, and in the long run in each.
fn matrix(driver: &Driver, scene: &Scene) -> String {
    let world = World::new(driver);
    let calls = scene.calls(&world);
    let mut figures = Figures::default();
    for (turn, call) in calls.iter().enumerate() {
        let errors = errors(&world, call);
        let errors = match errors.len() {
            many @ 2.. if !nightly() => &errors[turn % many..=turn % many],
            _ => errors,
        };
        for error in errors {
            let Call { name, number, line } = call;
            let what = format!("{error} of {name} {number}, {line}");
            figures.case(&world, &what, |figures| {
                let before = (scene.prepare)(&world);
                let traced = trace::fail_at(&world, scene.command, name, *number, error);
                let ended = crate::caught(|| scene.run(&world, traced));
                let failed = trace::failed(&world);
                if failed.contains("F_UNLCK") {
                    // To unlock what one holds cannot fail.
                    return world.end_all();
                }
                let ended = ended.unwrap_or_else(|said| panic!("{said}, {failed}"));
                let found = world.check(before.lost);
                is_faithful(&world, scene, &before, &found);
                figures.count(outcome(scene, &before, &ended, &found));
                is_put_right(&world, &found, figures);
            });
        }
    }
    figures.report("failing calls")
}

/// The command has either done its work or said that it has not, and nothing is left that nobody knows of. Returns the
/// word for the figures.
#[track_caller]
fn outcome(scene: &Scene, before: &Before, ended: &Ended, found: &Found) -> &'static str {
    let all = format!("{ended:?} {found:?}");
    assert!(matches!(ended.code, 0 | 1), "{all}");
    let failed = ended.code == 1;
    assert!(!ended.stderr.contains("panicked"), "{all}");
    assert_eq!(failed, ended.stderr.contains("error: "), "{all}");
    match (scene.command, failed) {
        (["start"], false) => assert_eq!(found.word(), "recorded", "{all}"),
        // What a failed start has launched is gone; what it was to take over goes on.
        (["start", ..], true) => {
            let lost: Vec<i32> = before.lost.into_iter().collect();
            assert_eq!(found.daemons, lost, "{all}");
        }
        // `stop` has ended a foreground start.
        (_, false) => assert_eq!(found.word(), "nothing", "{all}"),
        (_, true) if found.daemons.is_empty() => {}
        (_, true) => assert_eq!(found.word(), "recorded", "{all}"),
    }
    match (failed, &found.intent) {
        (false, _) => "success",
        (true, None) => "failure",
        (true, Some(_)) => "failure that leaves an intent",
    }
}

/// A mount namespace, kept by a process of ours that waits for the end of its input.
struct Mounts(Child);

impl Mounts {
    /// Runs the shell line, `$0` being `directory`, in a new mount namespace.
    fn new(world: &World, directory: &str, line: &str) -> Self {
        let ready = world.machine.path("mounted");
        let mut command = Command::new("/usr/bin/unshare");
        command
            .args(["-m", "/bin/sh", "-ec"])
            .arg(format!("{line}; echo >\"$1\"; read end"))
            .arg(world.machine.path(directory))
            .arg(&ready)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::piped());
        let mut mounts = Self(command.spawn().unwrap());
        wait_until("the disk is mounted", || {
            assert!(mounts.0.try_wait().unwrap().is_none(), "{line} failed");
            ready.exists()
        });
        mounts
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const SMALL: &str = "mount -t tmpfs -o size=64k,mode=1777 tmpfs \"$0\"";
const PAGE: usize = 4096;

/// A machine with a small disk of its own at `directory`.
fn small_disk(driver: &Driver, directory: &str) -> (World, Mounts) {
    let world = World::new(driver);
    let mounts = Mounts::new(&world, directory, SMALL);
    let pid = mounts.0.id();
    (world.seen_by(pid), mounts)
}

/// Fills the disk and leaves room for so many files of up to 4 KiB.
fn fill(world: &World, directory: &str, files: usize) {
    let path = world.at(world.machine.path(directory)).join("filler");
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        .unwrap();
    while file.write_all(&[0; PAGE]).is_ok() {}
    let length = file.metadata().unwrap().len();
    file.set_len(length - (files * PAGE) as u64).unwrap();
    if files == 0 {
        assert!(
            fs::write(path.with_extension("more"), [0]).is_err(),
            "it is not full"
        );
        fs::remove_file(path.with_extension("more")).unwrap();
    }
}

fn empty_again(world: &World, directory: &str) {
    fs::remove_file(world.at(world.machine.path(directory)).join("filler")).unwrap();
}

fn full(driver: &Driver) -> String {
    let (world, _mounts) = small_disk(driver, "h");
    let mut figures = Figures::default();
    for stale in [false, true] {
        for room in 0..4 {
            let what = format!("room for {room} files, a stale record: {stale}");
            figures.case(&world, &what, |figures| {
                world.wipe();
                let mut before = Before::default();
                if stale {
                    world.run(&["start"]).exited(0);
                    before.record = fs::read(world.record_file()).ok();
                    world.kill_daemons();
                }
                fill(&world, "h", room);
                let done = world.run(&["start"]);
                let found = world.check(None);
                is_faithful(&world, &OVER_A_STALE_RECORD, &before, &found);
                world.status_tells(&found);
                figures.count(if done.code == 0 { "success" } else { "failure" });
                match room {
                    // Neither the intent nor, with one file more, the record.
                    0 | 1 => {
                        done.exited(1).said("No space left on device");
                        assert!(
                            found.daemons.is_empty() && found.record.is_none(),
                            "{found:?}"
                        );
                    }
                    _ => {
                        done.exited(0);
                        assert_eq!(found.word(), "recorded", "{found:?}");
                        // To stop it takes no room.
                        fill(&world, "h", 0);
                        world.stop_ends_it();
                    }
                }
                empty_again(&world, "h");
                world.start_brings_one_up(&world.check(None));
                world.stop_ends_it();
            });
        }
    }
    figures.report("starts on a full disk")
}

/// Sockets need no room, and the daemon's log is lost.
fn temporary_directory_is_full(driver: &Driver) -> String {
    let (world, _mounts) = small_disk(driver, "t");
    let mut figures = Figures::default();
    for room in 0..3 {
        figures.case(&world, &format!("room for {room} files"), |figures| {
            world.wipe();
            fill(&world, "t", room);
            let done = world.run(&["start"]);
            let found = world.check(None);
            let expected = if done.code == 0 {
                "recorded"
            } else {
                "nothing"
            };
            assert_eq!(found.word(), expected, "{done:?}");
            world.status_tells(&found);
            figures.count(if done.code == 0 { "success" } else { "failure" });
            empty_again(&world, "t");
            world.start_brings_one_up(&found);
            world.stop_ends_it();
        });
    }
    figures.report("starts without room for logs")
}

fn read_only(driver: &Driver) -> String {
    let world = World::new(driver);
    let mounts = Mounts::new(&world, "h", "mount --bind \"$0\" \"$0\"");
    let world = world.seen_by(mounts.0.id());
    let remount = |how: &str| {
        let status = Command::new(NSENTER)
            .arg(format!("--mount=/proc/{}/ns/mnt", mounts.0.id()))
            .args(["/bin/mount", "-o", &format!("remount,bind,{how}")])
            .arg(world.machine.path("h"))
            .status();
        assert!(status.unwrap().success());
    };
    let nothing = Found::default();

    // From the beginning.
    remount("ro");
    world
        .run(&["start"])
        .exited(1)
        .said("Read-only file system");
    assert_eq!(world.check(None).word(), "nothing");
    world.status_tells(&nothing);
    world.run(&["stop", "--name", N0]).exited(1);
    world.run(&["stop", "--all"]).exited(0);
    remount("rw");
    world.start_brings_one_up(&nothing);

    // While a daemon runs: it is told, and used, and either stopped or not.
    remount("ro");
    let live = world.check(None);
    world.status_tells(&live);
    world.run(&["env"]).exited(0);
    world.run(&["start"]).exited(1);
    let done = world.run(&["stop"]).exited(1).said("Read-only file system");
    let after = world.check(None);
    assert_eq!(after.daemons, live.daemons, "{done:?}");
    world.status_tells(&after);
    remount("rw");
    world.stop_ends_it();

    // With a stale record.
    world.run(&["start"]).exited(0);
    world.kill_daemons();
    remount("ro");
    let stale = world.check(None);
    world.status_tells(&stale);
    for command in [&["start"][..], &["stop", "--name", N0], &["stop", "--all"]] {
        world.run(command).exited(1).said("Read-only file system");
        assert_eq!(world.check(None).word(), "stale record");
    }
    remount("rw");
    world.start_brings_one_up(&stale);
    world.stop_ends_it();
    "empty, with a live daemon, with a stale record; all refused by name, and all put right"
        .to_owned()
}
