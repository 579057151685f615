//! SIGKILL before every call that matters, and at random moments.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{N0, pid};
use crate::trace::{self, Ended, Traced};
use crate::world::{Found, NO_RECORD, World};
use crate::{Driver, Needs, Row, nightly, rounds};

pub(crate) const ROWS: &[Row] = &[
    ("start_on_an_empty_machine", Needs::Strace, |driver| {
        matrix(driver, &ON_AN_EMPTY_MACHINE)
    }),
    ("start_over_a_stale_record", Needs::Strace, |driver| {
        matrix(driver, &OVER_A_STALE_RECORD)
    }),
    (
        "start_of_a_daemon_whose_record_was_lost",
        Needs::Strace,
        |driver| matrix(driver, &AFTER_THE_RECORD_WAS_LOST),
    ),
    ("start_over_an_interrupted_start", Needs::Strace, |driver| {
        matrix(driver, &OVER_AN_INTERRUPTED_START)
    }),
    ("start_in_the_foreground", Needs::Strace, |driver| {
        matrix(driver, &IN_THE_FOREGROUND)
    }),
    ("run_with_a_daemon_of_its_own", Needs::Strace, |driver| {
        matrix(driver, &WITH_A_DAEMON_OF_ITS_OWN)
    }),
    ("stop_of_a_live_daemon", Needs::Strace, |driver| {
        matrix(driver, &STOP_OF_A_LIVE_DAEMON)
    }),
    ("stop_of_a_stale_record", Needs::Strace, |driver| {
        matrix(driver, &STOP_OF_A_STALE_RECORD)
    }),
    ("stop_of_an_interrupted_start", Needs::Strace, |driver| {
        matrix(driver, &STOP_OF_AN_INTERRUPTED_START)
    }),
    ("the_next_command_comes_at_once", Needs::Strace, at_once),
    ("killed_at_random_moments", Needs::Nothing, at_random),
    (
        "killed_in_the_foreground_at_random_moments",
        Needs::Nothing,
        in_the_foreground_at_random,
    ),
];

/// What a scene begins with.
#[derive(Default)]
pub(crate) struct Before {
    /// The record, byte by byte.
    pub(crate) record: Option<Vec<u8>>,
    /// A daemon that no record speaks of, which is the scene's doing and not the command's.
    pub(crate) lost: Option<i32>,
}

/// A command and the machine that it finds.
pub(crate) struct Scene {
    pub(crate) prepare: fn(&World) -> Before,
    pub(crate) command: &'static [&'static str],
    run: fn(&World, Traced) -> Ended,
}

pub(crate) const ON_AN_EMPTY_MACHINE: Scene = Scene {
    prepare: empty,
    command: &["start"],
    run: to_the_end,
};
pub(crate) const OVER_A_STALE_RECORD: Scene = Scene {
    prepare: stale,
    ..ON_AN_EMPTY_MACHINE
};
pub(crate) const AFTER_THE_RECORD_WAS_LOST: Scene = Scene {
    prepare: lost,
    ..ON_AN_EMPTY_MACHINE
};
const OVER_AN_INTERRUPTED_START: Scene = Scene {
    prepare: interrupted,
    ..ON_AN_EMPTY_MACHINE
};
pub(crate) const IN_THE_FOREGROUND: Scene = Scene {
    prepare: empty,
    command: &["start", "--foreground"],
    run: until_stopped,
};
const WITH_A_DAEMON_OF_ITS_OWN: Scene = Scene {
    prepare: empty,
    command: &["run", "--start", "--", "/bin/true"],
    run: to_the_end,
};
pub(crate) const STOP_OF_A_LIVE_DAEMON: Scene = Scene {
    prepare: live,
    command: &["stop", "--name", N0],
    run: to_the_end,
};
pub(crate) const STOP_OF_A_STALE_RECORD: Scene = Scene {
    prepare: stale,
    ..STOP_OF_A_LIVE_DAEMON
};
const STOP_OF_AN_INTERRUPTED_START: Scene = Scene {
    prepare: interrupted,
    ..STOP_OF_A_LIVE_DAEMON
};

fn empty(world: &World) -> Before {
    world.wipe();
    Before::default()
}

fn live(world: &World) -> Before {
    world.wipe();
    world.machine.start(&[]);
    Before {
        record: Some(fs::read(world.record_file()).unwrap()),
        lost: None,
    }
}

fn stale(world: &World) -> Before {
    let before = live(world);
    world.kill_daemons();
    before
}

fn lost(world: &World) -> Before {
    world.wipe();
    let daemon = pid(&world.machine.start(&[]));
    fs::remove_dir_all(world.machine.records()).unwrap();
    Before {
        record: None,
        lost: Some(daemon),
    }
}

/// A start was killed between the launch and the record.
fn interrupted(world: &World) -> Before {
    live(world);
    let content = fs::read(world.record_file()).unwrap();
    let mut intent: serde_json::Value = serde_json::from_slice(&content).unwrap();
    intent["pid"] = 999_999.into();
    fs::write(world.intent_file(), intent.to_string()).unwrap();
    fs::remove_file(world.record_file()).unwrap();
    Before::default()
}

fn to_the_end(_: &World, traced: Traced) -> Ended {
    traced.wait()
}

/// A foreground start goes on until somebody stops its daemon. It is up when it has printed the record; if that cannot
/// be printed, a while after the record is there.
fn until_stopped(world: &World, mut traced: Traced) -> Ended {
    let deadline = Instant::now() + Duration::from_secs(30);
    let mut recorded: Option<Instant> = None;
    loop {
        if let Some(ended) = traced.ended() {
            return ended;
        }
        if world.record_file().exists() && !world.intent_file().exists() {
            let since = recorded.get_or_insert_with(Instant::now);
            if traced.has_printed() || since.elapsed() > Duration::from_millis(500) {
                break;
            }
        }
        assert!(Instant::now() < deadline, "it neither ends nor comes up");
        std::thread::sleep(Duration::from_millis(1));
    }
    world.run(&["stop", "--name", N0]).exited(0);
    traced.wait()
}

impl Scene {
    /// The calls that the command makes when nothing ends it.
    pub(crate) fn calls(&self, world: &World) -> Vec<trace::Call> {
        (self.prepare)(world);
        let calls = trace::calls(world, |traced| self.run(world, traced), self.command);
        world.end_all();
        calls
    }

    pub(crate) fn run(&self, world: &World, traced: Traced) -> Ended {
        (self.run)(world, traced)
    }
}

/// How often what was found, and what was wrong.
#[derive(Default)]
pub(crate) struct Figures {
    found: BTreeMap<&'static str, usize>,
    pub(crate) refusals: usize,
    wrong: Vec<String>,
}

impl Figures {
    pub(crate) fn count(&mut self, found: &'static str) {
        *self.found.entry(found).or_default() += 1;
    }

    /// Tries one case. If something is wrong, the machine is put right by force, and the next case is tried.
    pub(crate) fn case(&mut self, world: &World, what: &str, case: impl FnOnce(&mut Self)) {
        if let Err(said) = crate::caught(|| case(self)) {
            self.wrong.push(format!("{what}: {said}"));
            world.end_all();
        }
    }

    /// The figures as a line, if nothing was wrong.
    #[track_caller]
    pub(crate) fn report(self, what: &str) -> String {
        let total: usize = self.found.values().sum();
        let mut line = format!("{total} {what}; found:");
        for (word, count) in &self.found {
            write!(line, " {count} {word},").unwrap();
        }
        if self.refusals > 0 {
            write!(line, " {} more starts were needed,", self.refusals).unwrap();
        }
        let wrong = self.wrong.len();
        assert!(
            wrong == 0,
            "{line} {wrong} wrong:\n{}",
            self.wrong.join("\n")
        );
        line + " all put right"
    }
}

/// Whatever the machine looks like now, the next commands put it right.
pub(crate) fn is_put_right(world: &World, found: &Found, figures: &mut Figures) {
    world.status_tells(found);
    figures.refusals += world.start_brings_one_up(found);
    world.stop_ends_it();
}

/// Kills the command before each of its calls in turn: before each that does something, and in the long run before
/// each.
fn matrix(driver: &Driver, scene: &Scene) -> String {
    let world = World::new(driver);
    let calls = scene.calls(&world);
    let names: BTreeSet<&str> = calls.iter().map(|call| call.name.as_str()).collect();
    let mut figures = Figures::default();
    for name in names {
        for number in 1.. {
            let known = calls
                .iter()
                .find(|call| call.name == name && call.number == number);
            if known.is_some_and(trace::Call::only_looks) && !nightly() {
                continue;
            }
            assert!(number < 1000, "{name} without end");
            let line = known.map_or("", |call| &call.line);
            let mut killed = true;
            // The long run tries everything once more, with `stop` as the next command.
            for stop_first in [false, true] {
                if stop_first && (!nightly() || !killed) {
                    continue;
                }
                let what = format!("before {name} {number}, {line}, stop first: {stop_first}");
                figures.case(&world, &what, |figures| {
                    let before = (scene.prepare)(&world);
                    let traced = trace::kill_at(&world, scene.command, name, number);
                    let ended = scene.run(&world, traced);
                    killed = ended.by_kill();
                    let found = world.check(before.lost);
                    is_faithful(&world, scene, &before, &found);
                    let as_before = before.lost.is_some() && found.word() == NO_RECORD;
                    if killed {
                        let word = if as_before {
                            "no record as before"
                        } else {
                            found.word()
                        };
                        figures.count(word);
                    }
                    if stop_first && !as_before {
                        world.stop_comes_first(&found);
                    } else {
                        is_put_right(&world, &found, figures);
                    }
                });
            }
            if !killed {
                break;
            }
        }
    }
    figures.report("kills")
}

/// The old record is where it was; or `stop` has removed it, after the daemon; or `start` has put it aside.
#[track_caller]
pub(crate) fn is_faithful(world: &World, scene: &Scene, before: &Before, found: &Found) {
    let Some(old) = &before.record else {
        return;
    };
    let now = fs::read(world.record_file()).ok();
    if scene.command[0] == "stop" {
        assert!(now.is_none() || now.as_ref() == Some(old), "{found:?}");
    } else if now.as_ref() != Some(old) {
        let aside = fs::read_dir(world.quarantine()).into_iter().flatten();
        let kept =
            aside.filter_map(|entry| fs::read(entry.unwrap().path().join("daemon.json")).ok());
        assert!(
            kept.into_iter().any(|kept| kept == *old),
            "the stale record is lost: {found:?}"
        );
    }
}

/// A start is killed right after it has called a program, and the next command does not wait for that program.
fn at_once(driver: &Driver) -> String {
    let world = World::new(driver);
    let mut figures = Figures::default();
    // nvidia-smi, the launch, the first question.
    for number in 1..=3 {
        for next in [&["stop", "--name", N0][..], &["start"], &["stop", "--all"]] {
            for round in 0..rounds(4) {
                let what = format!("{next:?} right after program {number}, round {round}");
                figures.case(&world, &what, |figures| {
                    world.wipe();
                    let traced = trace::kill_at(&world, &["start"], "pidfd_open", number);
                    assert!(traced.wait().by_kill());
                    world.run(next);
                    let found = world.check(None);
                    figures.count(found.word());
                    is_put_right(&world, &found, figures);
                });
            }
        }
    }
    figures.report("kills")
}

/// A small generator of numbers: Marsaglia's xorshift.
pub(crate) struct Dice(u64);

impl Dice {
    /// Seeded by the clock, or by `UNI_CUMPS_SEED`.
    pub(crate) fn new() -> (Self, u64) {
        let now = std::time::UNIX_EPOCH.elapsed().unwrap();
        let given = std::env::var("UNI_CUMPS_SEED").ok();
        let seed = given.map_or(now.as_micros() as u64, |text| text.parse().unwrap());
        (Self(seed | 1), seed)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    /// A moment within `time`.
    fn moment(&mut self, time: Duration) -> Duration {
        Duration::from_micros(self.below(time.as_micros() as u64 + 1))
    }
}

/// How long a start and a stop take here and now, when nothing ends them.
fn usual_times(world: &World) -> (Duration, Duration) {
    let time = |args| {
        let begun = Instant::now();
        world.run(args).exited(0);
        begun.elapsed()
    };
    (time(&["start"]), time(&["stop"]))
}

/// Starts the command and ends it with SIGKILL after `moment`. Whether it had not ended by itself.
fn killed_after(world: &World, args: &[&str], moment: Duration) -> bool {
    let mut command = world.machine.run(args).command();
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    std::thread::sleep(moment);
    child.kill().unwrap();
    child.wait().unwrap().code().is_none()
}

/// A length of time within which to kill. It follows the time that a command takes, which a busy machine changes: about
/// one kill in six comes too late.
struct Window(Duration);

impl Window {
    fn adapt(&mut self, killed: bool) {
        self.0 = if killed {
            self.0 * 21 / 20
        } else {
            self.0 * 4 / 5
        };
    }
}

fn at_random(driver: &Driver) -> String {
    let world = World::new(driver);
    let (mut dice, seed) = Dice::new();
    let (start, stop) = usual_times(&world);
    let commands = [&["start"][..], &["stop"]];
    let mut windows = [Window(start), Window(stop)];
    let mut figures = Figures::default();
    for round in 0..rounds(50) {
        for (command, window) in commands.into_iter().zip(&mut windows) {
            let moment = dice.moment(window.0);
            figures.case(
                &world,
                &format!("round {round}, {command:?} {moment:?}"),
                |figures| {
                    match command {
                        ["start"] => empty(&world),
                        _ => live(&world),
                    };
                    let killed = killed_after(&world, command, moment);
                    window.adapt(killed);
                    let found = world.check(None);
                    figures.count(if killed { found.word() } else { "too late" });
                    is_put_right(&world, &found, figures);
                },
            );
        }
    }
    figures.report(&format!("kills (seed {seed})"))
}

fn in_the_foreground_at_random(driver: &Driver) -> String {
    let world = World::new(driver);
    let (mut dice, seed) = Dice::new();
    let (start, _) = usual_times(&world);
    let mut figures = Figures::default();
    for round in 0..rounds(20) {
        // A little more: it goes on when it has started.
        let moment = dice.moment(start * 3 / 2);
        figures.case(&world, &format!("round {round}, {moment:?}"), |figures| {
            world.wipe();
            assert!(killed_after(&world, &["start", "--foreground"], moment));
            let found = world.check(None);
            figures.count(found.word());
            is_put_right(&world, &found, figures);
        });
    }
    figures.report(&format!("kills (seed {seed})"))
}
