//! The host is renamed, or the clock is moved, between two commands.

use std::fs;
use std::process::Command;

use crate::killed::{Figures, is_put_right};
use crate::support::{N0, hostname, pid};
use crate::world::World;
use crate::{Driver, Needs, Row};

pub(crate) const ROWS: &[Row] = &[
    ("the_host_is_renamed", Needs::Root, renamed),
    (
        "the_clocks_of_two_containers_differ",
        Needs::Root,
        time_namespace,
    ),
    ("the_wall_clock_jumps", Needs::Nothing, wall_clock),
];

fn renamed(driver: &Driver) -> String {
    let world = World::new(driver);
    let elsewhere = |args: &[&str]| {
        let script = "/bin/hostname renamed; exec \"$0\" \"$@\"";
        world
            .machine
            .run(args)
            .under(["/usr/bin/unshare", "-u", "/bin/sh", "-ec", script])
    };
    assert_ne!(hostname(), "renamed");
    let daemon = pid(&world.machine.start(&[]));
    let live = format!("daemon name=gpu-u0 state=live pid={daemon}");
    let status = elsewhere(&["status"]).succeeds().text();
    assert!(status.contains(&live), "{status}");
    elsewhere(&["env"]).succeeds();
    elsewhere(&["start"]).fails("is already live with pid");
    assert_eq!(world.daemons(), [daemon]);
    elsewhere(&["stop"]).succeeds();
    world.has_nothing_left();

    // And the other way round.
    let record = elsewhere(&["start"]).succeeds().json();
    assert_eq!(record["host"], "renamed");
    let found = world.check(None);
    assert_eq!(found.daemons, [pid(&record)]);
    world.status_tells(&found);
    world.start_brings_one_up(&found);
    world.stop_ends_it();

    // A daemon that was gone before its host got another name is stale, and its record is in nobody's way.
    elsewhere(&["start"]).succeeds();
    world.kill_daemons();
    let found = world.check(None);
    world.status_tells(&found);
    world.start_brings_one_up(&found);
    world.run(&["stop", "--name", N0]).exited(0);
    world.has_nothing_left();
    "3 daemons under two names; all told live or stale, and stopped".to_owned()
}

/// In another time namespace (a container that was moved has one) the same process seems to have begun at another time.
/// Whether it is the daemon cannot be told from there; that it is gone must not be said.
fn time_namespace(driver: &Driver) -> String {
    let apart = ["/usr/bin/unshare", "-T", "--boottime", "100000"];
    let world = World::new(driver);
    let known = Command::new(apart[0])
        .args(&apart[1..])
        .arg("/bin/true")
        .output();
    if !known.unwrap().status.success() {
        return "not possible on this kernel".to_owned();
    }
    let elsewhere = |args: &[&str]| {
        let done = world.machine.run(args).under(apart).finish();
        assert!(matches!(done.code, 0 | 1), "{done:?}");
        done
    };
    let mut figures = Figures::default();
    for command in [
        &["start"][..],
        &["stop", "--name", N0],
        &["stop", "--all"],
        &["env"],
    ] {
        figures.case(&world, &format!("{command:?} from there"), |figures| {
            world.wipe();
            world.machine.start(&[]);
            elsewhere(&["status"]).exited(0);
            elsewhere(command);
            let found = world.check(None);
            figures.count(found.word());
            is_put_right(&world, &found, figures);
        });
    }
    figures.report("commands from another time namespace")
}

/// The time of day is in the record, and nothing depends on it.
fn wall_clock(driver: &Driver) -> String {
    let world = World::new(driver);
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    let times = [0.0, now - 1e8, now + 1e8, 4e12];
    for time in times {
        world.wipe();
        world.machine.start(&[]);
        let mut record = world.check(None).record.unwrap();
        record["created_at"] = time.into();
        fs::write(world.record_file(), record.to_string()).unwrap();
        let found = world.check(None);
        world.status_tells(&found);
        world.start_brings_one_up(&found);
        world.stop_ends_it();
    }
    format!("{} daemons of the past and the future", times.len())
}
