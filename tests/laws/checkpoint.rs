//! Suspending and resuming on made-up machines, whose driver goes wrong in any way at any call: nobody is left locked, what
//! is said of a process is so, and the ledger knows who is away and where.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::{Just, any};
use proptest::sample::select;
use proptest::strategy::{BoxedStrategy, Strategy};
use proptest::test_runner::TestCaseResult;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::checkpoint::{
    Action, After, GpuMap, GpuPair, MapError, NamedPair, ProcessState, Purpose,
};
use uni_cumps::error::CheckpointFailure;
use uni_cumps::nvidia_smi;
use uni_cumps::suspension::Destination;

use crate::cuda::{Done, Fault, Machine, Made, Process, Trouble, Word, condition_file, pid, stat};
use crate::fake::write;
use crate::support::uuid;
use crate::{MANY, law};

/// Cases of a law; each is one or two dozen calls of the driver.
const SOME: u32 = 500;

const PURPOSES: [Purpose; 6] = [
    Purpose::Suspend,
    Purpose::Resume,
    Purpose::Only(Action::Lock),
    Purpose::Only(Action::Checkpoint),
    Purpose::Only(Action::Restore),
    Purpose::Only(Action::Unlock),
];

const ACTIONS: [Action; 4] = [
    Action::Lock,
    Action::Checkpoint,
    Action::Restore,
    Action::Unlock,
];

const CODES: [u32; 9] = [1, 2, 101, 201, 304, 401, 600, 800, 801];

/// States that no call brings about.
const STRANGE: [u32; 4] = [3, 4, 5, 9];

/// The states that a purpose can begin with.
fn fitting(purpose: Purpose, is_elsewhere: bool) -> &'static [u32] {
    match purpose {
        Purpose::Resume if is_elsewhere => &[2],
        Purpose::Resume => &[0, 1, 2],
        Purpose::Only(Action::Lock | Action::Unlock) => &[0, 1],
        Purpose::Only(Action::Checkpoint) => &[1, 2],
        Purpose::Only(Action::Restore) => &[2],
        Purpose::Suspend | Purpose::Look => &[0, 2],
    }
}

/// Where the processes are to come back, on a machine with so many GPUs.
fn destination(gpus: usize) -> impl Strategy<Value = Destination> {
    let all = Just((0..gpus).collect::<Vec<usize>>());
    let pairs = (all.prop_shuffle(), 0..=gpus).prop_map(|(new, count)| {
        let pair = |(old, new): (usize, &usize)| format!("{old}={new}").parse().unwrap();
        let pairs = new.iter().enumerate().take(count);
        Destination::Pairs(pairs.map(pair).collect())
    });
    prop_oneof![
        2 => Just(Destination::Back),
        1 => (0..gpus).prop_map(|gpu| Destination::To(gpu.to_string().parse().unwrap())),
        2 => pairs,
    ]
}

fn process(gpus: usize, states: &'static [u32], strange: u32) -> impl Strategy<Value = Process> {
    let state = prop_oneof![
        40 => select(states),
        strange => select(&[0, 1, 2, 3, 4, 5, 9][..]),
    ];
    let gpus = (0..gpus, 0..gpus, any::<bool>()).prop_map(|(one, other, is_alone)| {
        if is_alone || one == other {
            vec![one]
        } else {
            vec![one, other]
        }
    });
    (state, gpus, 0..8).prop_map(|(state, gpus, remembered)| Process {
        state,
        gpus,
        // Who runs is now and then told of by an entry that nobody has taken back.
        is_remembered: (remembered > 0) == (state != 0),
        runs: true,
    })
}

/// What is asked for, of which machine.
type Case = (Purpose, Destination, Machine);

fn case(
    purposes: &'static [Purpose],
    strange: u32,
    faults: BoxedStrategy<Vec<Fault>>,
) -> impl Strategy<Value = Case> {
    let purpose = (1..=4usize, select(purposes)).prop_flat_map(|(gpus, purpose)| {
        let destination = match purpose {
            Purpose::Resume | Purpose::Only(Action::Restore) => destination(gpus).boxed(),
            _ => Just(Destination::Back).boxed(),
        };
        (Just(gpus), Just(purpose), destination)
    });
    let machine = purpose.prop_flat_map(move |(gpus, purpose, destination)| {
        let states = fitting(purpose, destination != Destination::Back);
        let count = prop_oneof![2 => 1..=2usize, 1 => 3..=4usize];
        let processes =
            count.prop_flat_map(move |count| vec(process(gpus, states, strange), count));
        (Just(gpus), Just(purpose), Just(destination), processes)
    });
    (machine, faults).prop_map(|((gpus, purpose, destination, processes), mut faults)| {
        for fault in &mut faults {
            fault.process %= processes.len();
        }
        let machine = Machine {
            gpus,
            processes,
            faults,
            immovable: (Vec::new(), 0),
        };
        (purpose, destination, machine)
    })
}

fn word() -> impl Strategy<Value = Word> {
    prop_oneof![
        6 => Just(Word::State),
        1 => Just(Word::Thread),
        12 => select(&ACTIONS[..]).prop_map(Word::Does),
    ]
}

fn trouble() -> impl Strategy<Value = Trouble> {
    prop_oneof![
        6 => select(&CODES[..]).prop_map(Trouble::Code),
        3 => Just(Trouble::Hang),
        2 => Just(Trouble::Crash),
        1 => Just(Trouble::End),
        1 => select(&STRANGE[..]).prop_map(Trouble::Become),
    ]
}

/// Any number of things that go wrong.
fn faults() -> BoxedStrategy<Vec<Fault>> {
    let times = prop_oneof![4 => Just(1), 3 => 2..12u32, 2 => Just(u32::MAX)];
    let silence = prop_oneof![3 => Just(0), 1 => 2..12u32];
    let when = (word(), 0..4usize, 0..3u32, times);
    let what = (trouble(), any::<bool>(), silence);
    let fault = (when, what).prop_map(|((word, process, after, times), what)| Fault {
        word,
        process,
        // A state that is not told before anything is done only keeps it from being done.
        after: after + u32::from(word == Word::State),
        times,
        trouble: what.0,
        is_done: what.1,
        silence: what.2,
    });
    vec(fault, 0..7).boxed()
}

fn any_case() -> impl Strategy<Value = Case> {
    case(&PURPOSES, 1, faults())
}

/// Tries a law about what comes of any command on any machine.
#[track_caller]
fn law_of(cases: impl Strategy<Value = Case>, holds: impl Fn(&Done) -> TestCaseResult) {
    law(SOME, cases, |(purpose, destination, machine)| {
        holds(&machine.run(purpose, &destination))
    });
}

/// The state that a purpose leads to.
fn goal(purpose: Purpose) -> ProcessState {
    match purpose {
        Purpose::Suspend => ProcessState::CHECKPOINTED,
        Purpose::Resume | Purpose::Look => ProcessState::RUNNING,
        Purpose::Only(action) => action.to(),
    }
}

#[test]
fn nobody_is_left_locked_who_can_be_unlocked() {
    law_of(any_case(), |done| {
        let is_meant = done.result.is_ok() && goal(done.purpose) == ProcessState::LOCKED;
        for (at, (before, after)) in done.before.iter().zip(&done.after).enumerate() {
            if is_meant || !matches!(before.state, 0 | 2) || !after.is(ProcessState::LOCKED) {
                continue;
            }
            let told = done.left(at).map(|ending| ending.after);
            prop_assert!(done.is_stuck(at) || done.is_secret(at), "{:?}", done);
            prop_assert!(
                told == Some(After::State(ProcessState::LOCKED))
                    || told == Some(After::Unknown) && done.is_secret(at),
                "{told:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn what_is_said_of_a_process_is_so() {
    law_of(any_case(), |done| {
        for (at, after) in done.after.iter().enumerate() {
            if done.result.is_ok() {
                prop_assert!(after.is(goal(done.purpose)), "{:?}", done);
                prop_assert_eq!(done.told(at), After::State(goal(done.purpose)));
            } else if !done.is_blocked() {
                let is_so = match done.told(at) {
                    After::State(state) => after.is(state),
                    After::Gone => !after.runs,
                    After::Unknown => after.runs && done.is_secret(at),
                };
                prop_assert!(is_so, "{:?}: {:?}", done.told(at), done.calls);
            }
        }
        Ok(())
    });
}

/// Faults that pass: each once, at most one of a kind for a process, before anything is done. After each, so many questions
/// for the state fail at most.
fn passing(silence: u32) -> BoxedStrategy<Vec<Fault>> {
    let trouble = prop_oneof![
        2 => select(&CODES[..]).prop_map(Trouble::Code),
        1 => Just(Trouble::Hang),
        1 => Just(Trouble::Crash),
    ];
    let trouble = trouble.prop_filter("a lack of memory does not pass", |trouble| {
        *trouble != Trouble::Code(2)
    });
    let fault = (
        select(&ACTIONS[..]),
        0..4usize,
        0..3u32,
        trouble,
        0..=silence,
    );
    let fault = fault.prop_map(|(action, process, after, trouble, silence)| Fault {
        word: Word::Does(action),
        process,
        after,
        times: 1,
        trouble,
        is_done: false,
        silence,
    });
    vec(fault, 0..7).boxed()
}

fn all_or_nothing(purpose: &'static [Purpose], silence: u32, state: ProcessState) {
    let cases = case(purpose, 0, passing(silence)).prop_map(|(purpose, _, mut machine)| {
        let mut met: Vec<(Word, usize)> = Vec::new();
        machine.faults.retain_mut(|fault| {
            // A restore that the driver has refused is not asked for again, so that it passes for nobody who was to leave.
            let is_final = (purpose, fault.word) == (Purpose::Suspend, Word::Does(Action::Restore));
            if is_final && matches!(fault.trouble, Trouble::Code(_)) {
                fault.trouble = Trouble::Hang;
            }
            let is_new = !met.contains(&(fault.word, fault.process));
            met.push((fault.word, fault.process));
            is_new
        });
        (purpose, Destination::Back, machine)
    });
    law_of(cases, |done| {
        for (before, after) in done.before.iter().zip(&done.after) {
            let is_as_before = done.result.is_ok() || !before.is(state) || after.is(state);
            prop_assert!(is_as_before, "{:?}", done);
        }
        Ok(())
    });
}

#[test]
fn who_ran_runs_after_a_suspension_that_a_passing_fault_has_stopped() {
    all_or_nothing(&[Purpose::Suspend], 3, ProcessState::RUNNING);
}

#[test]
fn who_was_suspended_is_so_after_a_resumption_that_a_passing_fault_has_stopped() {
    all_or_nothing(&[Purpose::Resume], 0, ProcessState::CHECKPOINTED);
}

#[test]
fn who_may_not_be_moved_runs_with_all_others_where_they_were() {
    let cases = case(&[Purpose::Resume], 0, Just(Vec::new()).boxed());
    let refusals = (vec(0..4usize, 1..4), select(&[1, 101, 801][..]));
    law(
        SOME,
        (cases, refusals),
        |((purpose, destination, machine), immovable)| {
            let machine = Machine {
                immovable,
                ..machine
            };
            let done = machine.run(purpose, &destination);
            let refused = |call: &Made| call.is_elsewhere && call.code != Some(0);
            if !done.calls.iter().any(refused) {
                prop_assert!(done.result.is_ok() || done.is_blocked());
                return Ok(());
            }
            let is_refused = matches!(done.failure(), Some(CheckpointFailure::NotMoved { .. }));
            prop_assert!(is_refused, "{done:?}");
            for (before, after) in done.before.iter().zip(&done.after) {
                prop_assert_eq!(&before.gpus, &after.gpus);
                prop_assert!(after.is(ProcessState::RUNNING), "{:?}", done);
            }
            Ok(())
        },
    );
}

#[test]
fn the_ledger_holds_who_is_away_and_where() {
    law_of(any_case(), |done| {
        for (at, (before, after)) in done.before.iter().zip(&done.after).enumerate() {
            let steps = done.purpose.steps(ProcessState(before.state));
            let is_taken = done.purpose.takes_away()
                && !done.is_blocked()
                && steps.is_some_and(|steps| !steps.is_empty());
            let is_told_to_be_back =
                !done.is_blocked() && done.told(at) == After::State(ProcessState::RUNNING);
            let is_away = after.runs && !is_told_to_be_back;
            let entry = done
                .ledger
                .iter()
                .find(|entry| entry.process.pid == pid(at));
            prop_assert_eq!(
                entry.is_some(),
                (before.is_remembered || is_taken) && is_away,
                "process {}: {:?}",
                at,
                done
            );
            // Who is on the way is in no place yet.
            let is_somewhere = matches!(done.told(at), After::State(state) if state.0 <= 2);
            let Some(entry) = entry.filter(|_| is_somewhere) else {
                continue;
            };
            let gpus = entry.gpus.iter().map(|share| share.uuid.to_string());
            let (mut gpus, mut places) = (gpus.collect::<Vec<_>>(), after.uuids());
            gpus.sort();
            places.sort();
            prop_assert_eq!(gpus, places, "process {}: {:?}", at, done);
        }
        Ok(())
    });
}

#[test]
fn who_is_refused_a_restore_is_not_restored_again() {
    law_of(any_case(), |done| {
        for at in 0..done.before.len() {
            let restores = done.calls_about(at);
            let restores = restores.filter(|call| call.word == Word::Does(Action::Restore));
            let is_refused = |call: &&Made| !call.is_elsewhere && call.code.unwrap_or(0) != 0;
            let after = restores.skip_while(|call| !is_refused(call)).skip(1);
            prop_assert_eq!(after.count(), 0, "process {}: {:?}", at, done);
        }
        Ok(())
    });
}

/// What stands in the way of a command.
#[derive(Clone, Copy, Debug)]
enum Obstacle {
    Ended,
    Thread,
    Stopped,
    Frozen,
    Elsewhere,
    State(u32),
    Mute(Word),
    Divided,
    PartOfGpu,
    NoHostMemory,
    NoGpuMemory,
}

impl Obstacle {
    /// The blocker that is to be found where this is in the way of a process.
    fn id(self, purpose: Purpose, process: &Process) -> Option<&'static str> {
        let steps = purpose.steps(ProcessState(process.state));
        let does = |action: Action| steps.is_some_and(|steps| steps.contains(&action));
        let id = match self {
            Self::Ended => "no-such-process",
            Self::Thread => "thread-id",
            Self::Stopped => "stopped",
            Self::Frozen => "frozen",
            Self::Elsewhere => "pid-namespace",
            Self::State(_) => "state",
            Self::Mute(_) => "no-answer",
            Self::Divided | Self::PartOfGpu if purpose.takes_away() => "mig",
            Self::NoHostMemory if does(Action::Checkpoint) => "host-memory",
            Self::NoGpuMemory if does(Action::Restore) && process.is_remembered => "gpu-memory",
            Self::Divided | Self::PartOfGpu | Self::NoHostMemory | Self::NoGpuMemory => {
                return None;
            }
        };
        // The shares of one that the ledger does not tell of are not known.
        let is_known = process.is_remembered || process.state < 2;
        (is_known || !matches!(self, Self::Divided)).then_some(id)
    }

    /// Puts it in the way of the first process.
    fn put(self, root: &Path, process: &Process) {
        let pid = pid(0);
        let file = |name: &str| format!("proc/{pid}/{name}");
        let of_gpu = condition_file(process.gpus[0]);
        match self {
            Self::Ended => fs::remove_dir_all(root.join(file(""))).unwrap(),
            Self::Thread => write(root, &file("status"), "Tgid:\t1\n"),
            Self::Stopped => write(root, &file("stat"), stat(pid, 'T')),
            Self::Frozen => {
                write(root, &file("cgroup"), "0::/a\n");
                write(root, "sys/fs/cgroup/a/cgroup.events", "frozen 1\n");
            }
            Self::Elsewhere => {
                for (process, namespace) in [(pid.to_string(), 1), ("self".to_owned(), 2)] {
                    let directory = root.join(format!("proc/{process}/ns"));
                    fs::create_dir(&directory).unwrap();
                    symlink(format!("pid:[{namespace}]"), directory.join("pid")).unwrap();
                }
            }
            Self::State(_) | Self::Mute(_) => {}
            Self::Divided => write(root, &of_gpu, "1000, Enabled, Enabled"),
            Self::PartOfGpu => {
                write(root, &file("environ"), "CUDA_VISIBLE_DEVICES=MIG-1\0");
            }
            Self::NoHostMemory => write(root, "proc/meminfo", "MemAvailable: 1024 kB\n"),
            Self::NoGpuMemory => write(root, &of_gpu, "1, Enabled, Disabled"),
        }
    }
}

fn obstacle() -> impl Strategy<Value = Obstacle> {
    prop_oneof![
        select(
            &[
                Obstacle::Ended,
                Obstacle::Thread,
                Obstacle::Stopped,
                Obstacle::Frozen,
                Obstacle::Elsewhere,
                Obstacle::Divided,
                Obstacle::PartOfGpu,
                Obstacle::NoHostMemory,
                Obstacle::NoGpuMemory,
                Obstacle::Mute(Word::Thread),
                Obstacle::Mute(Word::State),
            ][..]
        ),
        select(&STRANGE[..]).prop_map(Obstacle::State),
    ]
}

#[test]
fn nobody_is_touched_while_something_stands_in_the_way() {
    let cases = case(&PURPOSES, 0, Just(Vec::new()).boxed());
    law(
        SOME,
        (cases, obstacle()),
        |((purpose, _, mut machine), obstacle)| {
            let first = &mut machine.processes[0];
            let Some(id) = obstacle.id(purpose, first) else {
                return Ok(());
            };
            match obstacle {
                Obstacle::State(state) => first.state = state,
                Obstacle::Mute(word) => machine.faults.push(Fault {
                    word,
                    process: 0,
                    after: 0,
                    times: u32::MAX,
                    trouble: Trouble::Hang,
                    is_done: false,
                    silence: 0,
                }),
                _ => {}
            }
            let first = &machine.processes[0];
            let put = |root: &Path| obstacle.put(root, first);
            let done = machine.run_with(purpose, &Destination::Back, &put);
            let Some(CheckpointFailure::Blocked { blockers, .. }) = done.failure() else {
                prop_assert!(false, "{:?}", done);
                return Ok(());
            };
            prop_assert!(
                blockers.iter().any(|blocker| blocker.id == id),
                "{:?}",
                done
            );
            let acts = |call: &Made| matches!(call.word, Word::Does(_));
            prop_assert!(!done.calls.iter().any(acts), "{:?}", done);
            prop_assert_eq!(&done.before, &done.after);
            let remembered = done.before.iter().enumerate();
            let remembered = remembered.filter(|(at, process)| {
                process.is_remembered && !(*at == 0 && matches!(obstacle, Obstacle::Ended))
            });
            prop_assert_eq!(done.ledger.len(), remembered.count());
            Ok(())
        },
    );
}

#[test]
fn a_completed_map_moves_every_gpu_that_it_must_and_no_other() {
    let pairs = vec((0..8usize, 0..8usize, any::<[bool; 2]>()), 0..8);
    let lone = (1..=8usize, pairs);
    // Pairs that fit together, as a part of a map.
    let fitting = (1..=8usize).prop_flat_map(|gpus| {
        let all = Just((0..gpus).collect::<Vec<usize>>()).prop_shuffle();
        (all.clone(), all, 0..=gpus, any::<[bool; 2]>()).prop_map(
            move |(old, new, count, names)| {
                let pairs = old.into_iter().zip(new).take(count);
                (gpus, pairs.map(|(old, new)| (old, new, names)).collect())
            },
        )
    });
    law(
        MANY,
        prop_oneof![1 => lone, 3 => fitting],
        |(gpus, pairs): (usize, Vec<_>)| {
            let pairs = pairs
                .into_iter()
                .map(|(old, new, names)| (old % gpus, new % gpus, names));
            let pairs: Vec<(usize, usize, [bool; 2])> = pairs.collect();
            let name = |gpu: usize, by_index: bool| match by_index {
                true => gpu.to_string(),
                false => uuid(gpu),
            };
            let named: Vec<NamedPair> = pairs
                .iter()
                .map(|(old, new, by)| format!("{}={}", name(*old, by[0]), name(*new, by[1])))
                .map(|pair| pair.parse().unwrap())
                .collect();
            let rows: String = (0..gpus)
                .map(|gpu| format!("{gpu}, {}, Default\n", uuid(gpu)))
                .collect();
            let completed = GpuMap::complete(&named, &nvidia_smi::rows(&rows).0);
            let given: BTreeSet<(usize, usize)> =
                pairs.iter().map(|(old, new, _)| (*old, *new)).collect();
            let olds: BTreeSet<usize> = given.iter().map(|(old, _)| *old).collect();
            let news: BTreeSet<usize> = given.iter().map(|(_, new)| *new).collect();
            let moves = |pairs: &BTreeSet<(usize, usize)>| {
                pairs.iter().filter(|(old, new)| old != new).count()
            };
            if olds.len().min(news.len()) < given.len() {
                let is_refused = matches!(
                    completed,
                    Err(MapError::OldTwice(_) | MapError::NewTwice(_))
                );
                prop_assert!(is_refused, "{completed:?}");
                return Ok(());
            }
            let Some(map) = completed.unwrap() else {
                prop_assert_eq!(moves(&given), 0);
                return Ok(());
            };
            let number = |text: String| (0..gpus).find(|gpu| uuid(*gpu) == text).unwrap();
            let pair =
                |pair: &GpuPair| (number(pair.old.to_string()), number(pair.new.to_string()));
            let map: BTreeSet<(usize, usize)> = map.pairs().iter().map(pair).collect();
            let all: BTreeSet<usize> = (0..gpus).collect();
            prop_assert_eq!(map.len(), gpus);
            prop_assert_eq!(
                map.iter().map(|(old, _)| *old).collect::<BTreeSet<_>>(),
                all.clone()
            );
            prop_assert_eq!(
                map.iter().map(|(_, new)| *new).collect::<BTreeSet<_>>(),
                all
            );
            prop_assert!(map.is_superset(&given));
            // Besides those that are named, each whose place another one takes.
            let displaced = news.difference(&olds).count();
            prop_assert!(moves(&given) > 0);
            prop_assert_eq!(moves(&map), moves(&given) + displaced);
            Ok(())
        },
    );
}
