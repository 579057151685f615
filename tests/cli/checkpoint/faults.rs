//! `checkpoint` when the driver fails: every call of every command, from every state, with every kind of fault. Each ends
//! in the state that is stated here, and no process is left locked if anything can be done about it.

use serde_json::{Value, json};

use super::{CHECKPOINTED, LOCKED, RUNNING, acts, checkpoint, entries, target, uses};
use crate::support::{Sandbox, Sleeper, U0, is_running};

/// How a call goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The driver answers with this number and does nothing.
    Code(u32),
    /// The driver does not answer, or the process that called it crashes, before anything was done.
    Silent(&'static str),
    /// It was done, and yet an error is reported, or nothing.
    Done(&'static str),
    /// The target ends.
    Dies,
    /// The target is beyond repair.
    Fails,
}

const FAULTS: [Fault; 15] = [
    Fault::Code(1),
    Fault::Code(2),
    Fault::Code(201),
    Fault::Code(304),
    Fault::Code(401),
    Fault::Code(600),
    Fault::Code(800),
    Fault::Code(801),
    Fault::Silent("hang"),
    Fault::Silent("crash"),
    Fault::Done("done-304"),
    Fault::Done("done-hang"),
    Fault::Done("done-crash"),
    Fault::Dies,
    Fault::Fails,
];

impl Fault {
    fn word(self) -> String {
        match self {
            Self::Code(code) => code.to_string(),
            Self::Silent(word) | Self::Done(word) => word.to_owned(),
            Self::Dies => "die".to_owned(),
            Self::Fails => "failed".to_owned(),
        }
    }

    /// Whether a driver says so that it will not restore on another GPU.
    fn turns_a_map_down(self) -> bool {
        matches!(self, Self::Code(1 | 801))
    }
}

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// As it should.
    Well(u32),
    /// It failed, and the process is in this state.
    Badly(u32),
    /// It failed, and the process is gone.
    Gone,
}

const FAILED: u32 = 3;

/// A command, the state that it begins with, and the calls that it makes.
struct Case {
    before: u32,
    words: &'static [&'static str],
    calls: &'static [&'static str],
    is_moved: bool,
}

impl Case {
    /// The end of the command where `fault` happens at `call`, once or every time.
    fn end(&self, call: &str, fault: Fault, always: bool) -> End {
        let verb = self.words[0];
        match (call, fault) {
            (_, Fault::Dies) => End::Gone,
            (_, Fault::Fails) => End::Badly(FAILED),
            // A lock that the driver does not vouch for is given up again.
            ("lock", _) => End::Badly(RUNNING),
            ("checkpoint", Fault::Done(_)) => End::Well(CHECKPOINTED),
            ("checkpoint", _) => End::Badly(RUNNING),
            ("restore", Fault::Done(_)) if verb == "restore" => End::Well(LOCKED),
            ("restore", Fault::Done(_)) => End::Well(RUNNING),
            // It runs where it was, unless that is refused as well.
            ("restore", fault) if self.is_moved && fault.turns_a_map_down() && !always => {
                End::Badly(RUNNING)
            }
            ("restore", _) => End::Badly(CHECKPOINTED),
            ("unlock", Fault::Done(_)) => End::Well(RUNNING),
            ("unlock", _) if !always => End::Well(RUNNING),
            // What cannot be let go goes back to where it came from, if it came from there.
            ("unlock", _) if self.before == CHECKPOINTED => End::Badly(CHECKPOINTED),
            ("unlock", _) => End::Badly(LOCKED),
            _ => unreachable!("{call}"),
        }
    }

    fn check(&self) {
        for call in self.calls {
            for fault in FAULTS {
                for always in [false, true] {
                    self.try_one(call, fault, always);
                }
            }
        }
    }

    fn try_one(&self, call: &str, fault: Fault, always: bool) {
        let machine = Sandbox::with_gpus(2);
        let target = target(&machine, self.before);
        let pid = target.pid();
        uses(&machine, &[(&target, U0, "812")]);
        let times = if always { "" } else { "#1" };
        machine.faults(&format!("{call}{times} {}", fault.word()));
        let mut words = self.words.to_vec();
        words.extend(["--json", "--quiet", "--deadline=0.2"]);
        let done = checkpoint(&machine, &words, &[&target]).finish();
        let what = format!(
            "{:?} from {}, {call} {fault:?} {always}: {done:?}",
            self.words, self.before
        );
        let end = self.end(call, fault, always);
        let code = if matches!(end, End::Well(_)) { 0 } else { 1 };
        assert_eq!(done.code, code, "{what}");
        let answer = done.json();
        let state = |is: u32| {
            assert!(is_running(pid), "{what}");
            assert_eq!(machine.cuda_state(pid), is, "{what}");
        };
        let left = match end {
            End::Well(is) => {
                state(is);
                assert_eq!(answer["processes"][0]["after"], word(is), "{what}");
                return;
            }
            End::Gone => {
                assert!(!is_running(pid), "{what}");
                Some("gone")
            }
            End::Badly(is) => {
                state(is);
                // As before, and that is a state in which a process may stay.
                (is != self.before || ![RUNNING, CHECKPOINTED].contains(&is)).then(|| word(is))
            }
        };
        let expected: Vec<Value> = left
            .iter()
            .map(|state| json!({"pid": pid, "state": state}))
            .collect();
        assert_eq!(answer["left_in"], json!(expected), "{what}");
        let is_away = !matches!(end, End::Gone | End::Badly(RUNNING));
        if !is_away {
            assert_eq!(entries(&machine), 0, "{what}");
        }
    }
}

fn word(state: u32) -> &'static str {
    ["running", "locked", "checkpointed", "failed"][state as usize]
}

const fn case(before: u32, words: &'static [&'static str], calls: &'static [&'static str]) -> Case {
    Case {
        before,
        words,
        calls,
        is_moved: words.len() > 1,
    }
}

#[test]
fn a_suspension_that_fails_leaves_the_process_running() {
    case(
        RUNNING,
        &["suspend", "--timeout=0.2"],
        &["lock", "checkpoint"],
    )
    .check();
}

#[test]
fn a_resumption_that_fails_leaves_the_process_suspended() {
    case(CHECKPOINTED, &["resume"], &["restore", "unlock"]).check();
}

#[test]
fn a_resumption_elsewhere_that_fails_leaves_it_suspended_or_running_where_it_was() {
    case(
        CHECKPOINTED,
        &["resume", "--gpu-map=0=1"],
        &["restore", "unlock"],
    )
    .check();
}

#[test]
fn a_resumption_of_a_locked_process_lets_it_go() {
    case(LOCKED, &["resume"], &["unlock"]).check();
}

#[test]
fn a_single_step_that_fails_never_leaves_the_process_locked() {
    case(RUNNING, &["lock", "--timeout=0.2"], &["lock"]).check();
    case(LOCKED, &["checkpoint"], &["checkpoint"]).check();
    case(CHECKPOINTED, &["restore"], &["restore"]).check();
    case(CHECKPOINTED, &["restore", "--gpu-map=0=1"], &["restore"]).check();
    case(LOCKED, &["unlock"], &["unlock"]).check();
}

#[test]
fn from_every_other_state_nothing_is_tried_at_all() {
    let machine = Sandbox::new();
    let all = [
        "suspend",
        "resume",
        "lock",
        "checkpoint",
        "restore",
        "unlock",
    ];
    for state in [FAILED, 4, 5, 77] {
        for verb in all {
            let target = target(&machine, state);
            checkpoint(&machine, &[verb], &[&target]).finish().exited(1);
            assert_eq!(machine.cuda_state(target.pid()), state, "{verb}");
        }
    }
    assert_eq!(acts(&machine), "");
}

/// Three processes in this state.
fn three(machine: &Sandbox, state: u32) -> Vec<Sleeper> {
    let mut targets: Vec<Sleeper> = (0..3).map(|_| target(machine, state)).collect();
    targets.sort_by_key(Sleeper::pid);
    targets
}

fn states(machine: &Sandbox, targets: &[Sleeper]) -> Vec<u32> {
    targets
        .iter()
        .map(|target| machine.cuda_state(target.pid()))
        .collect()
}

#[test]
fn what_fails_for_one_of_several_is_undone_for_all_in_reverse() {
    let machine = Sandbox::new();
    let targets = three(&machine, RUNNING);
    let all: Vec<&Sleeper> = targets.iter().collect();
    let [a, b, c] = [targets[0].pid(), targets[1].pid(), targets[2].pid()];
    machine.faults(&format!("checkpoint:{c} 801"));
    checkpoint(&machine, &["suspend", "--quiet"], &all)
        .fails(&format!(
            "could not suspend: the checkpoint of pid {c} failed"
        ))
        .said(&format!(
            "CUDA error 801 (CUDA_ERROR_NOT_SUPPORTED); pid {a} is running as before"
        ));
    assert_eq!(states(&machine, &targets), [RUNNING; 3]);
    let undone: Vec<String> = acts(&machine).lines().skip(6).map(str::to_owned).collect();
    let expected = [
        format!("unlock {c}"),
        format!("restore {b}"),
        format!("unlock {b}"),
        format!("restore {a}"),
        format!("unlock {a}"),
    ];
    assert_eq!(undone, expected);
    assert_eq!(entries(&machine), 0);

    machine.faults("");
    checkpoint(&machine, &["suspend", "--quiet"], &all).succeeds();
    machine.faults(&format!("restore:{b} 2"));
    checkpoint(&machine, &["resume", "--quiet"], &all)
        .fails(&format!("could not resume: the restore of pid {b} failed"))
        .said("the driver may refuse every further one");
    assert_eq!(states(&machine, &targets), [CHECKPOINTED; 3]);
    assert_eq!(entries(&machine), 3);
    machine.faults(&format!("unlock:{b} 304"));
    checkpoint(&machine, &["resume", "--quiet"], &all).fails("the unlock of pid");
    assert_eq!(states(&machine, &targets), [CHECKPOINTED; 3]);
    machine.faults("");
    checkpoint(&machine, &["resume", "--quiet"], &all).succeeds();
}

#[test]
fn a_map_that_is_refused_for_one_of_several_lets_all_run_where_they_were() {
    let machine = Sandbox::with_gpus(2);
    let targets = three(&machine, RUNNING);
    let all: Vec<&Sleeper> = targets.iter().collect();
    uses(
        &machine,
        &[(all[0], U0, "1"), (all[1], U0, "1"), (all[2], U0, "1")],
    );
    checkpoint(&machine, &["suspend", "--quiet"], &all).succeeds();
    machine.cuda_calls();
    let [a, b, c] = [targets[0].pid(), targets[1].pid(), targets[2].pid()];
    machine.faults(&format!("restore:{b}#1 1"));
    checkpoint(&machine, &["resume", "--to=1", "--quiet"], &all)
        .fails(&format!("pid {b} cannot be restored on other GPUs"))
        .said(&format!(
            "pid {a} is running again; pid {b} is running again; pid {c} is running again"
        ));
    assert_eq!(states(&machine, &targets), [RUNNING; 3]);
    assert_eq!(entries(&machine), 0);
    // The first one had been moved, and was moved back.
    let there = "GPU-U0=GPU-U1 GPU-U1=GPU-U0";
    let back = "GPU-U1=GPU-U0 GPU-U0=GPU-U1";
    let calls = acts(&machine);
    let of_a: Vec<&str> = calls
        .lines()
        .filter(|line| line.contains(&a.to_string()))
        .collect();
    let expected = [
        format!("restore {a} {there}"),
        format!("checkpoint {a}"),
        format!("restore {a} {back}"),
        format!("unlock {a}"),
    ];
    assert_eq!(of_a, expected);
}

#[test]
fn a_lock_that_times_out_says_how_to_wait_longer() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    std::fs::write(machine.path(format!("cuda/{}.busy", target.pid())), "").unwrap();
    checkpoint(
        &machine,
        &["suspend", "--quiet", "--timeout=0.5"],
        &[&target],
    )
    .fails("could not suspend: the lock of pid")
    .said("CUDA error 600 (CUDA_ERROR_NOT_READY)")
    .said("hint: its GPU work takes longer than that: give --timeout more seconds");
    assert_eq!(machine.cuda_state(target.pid()), RUNNING);
}

#[test]
fn a_missing_right_is_explained() {
    let machine = Sandbox::new();
    for code in [304, 800] {
        let target = target(&machine, RUNNING);
        machine.faults(&format!("lock {code}"));
        checkpoint(&machine, &["suspend", "--quiet"], &[&target])
            .fails("the lock of pid")
            .said("hint: the driver needs a debugger's rights");
    }
}

#[test]
fn a_process_that_stays_locked_whatever_is_done_is_named_with_what_to_type() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    machine.faults("checkpoint 304\nunlock 304");
    checkpoint(&machine, &["suspend", "--quiet"], &[&target])
        .fails("could not suspend: the checkpoint of pid")
        .said(&format!("pid {pid} is left locked"))
        .said(&format!("hint: uni-cumps checkpoint unlock --pid {pid}"));
    assert_eq!(machine.cuda_state(pid), LOCKED);
    assert_eq!(entries(&machine), 1);
    machine.faults("");
    // What is left by a failure can be picked up by what brings processes back.
    machine.run(["checkpoint", "resume", "--quiet"]).succeeds();
    assert_eq!(machine.cuda_state(pid), RUNNING);
    assert_eq!(entries(&machine), 0);
}

#[test]
fn a_state_that_cannot_be_told_is_asked_for_again_and_then_taken_for_locked() {
    let machine = Sandbox::new();
    let target = target(&machine, RUNNING);
    let pid = target.pid();
    // The first question is that before anything is touched.
    machine.faults("checkpoint 304\nstate#2 304\nstate#3 crash");
    checkpoint(&machine, &["suspend", "--quiet"], &[&target]).fails("is running as before");
    assert_eq!(machine.cuda_state(pid), RUNNING);
    machine.cuda_calls();
    let never: String = (2..40)
        .map(|number| format!("state#{number} 304\n"))
        .collect();
    machine.faults(&format!("checkpoint 304\n{never}"));
    let failed = checkpoint(&machine, &["suspend", "--quiet", "--json"], &[&target])
        .finish()
        .exited(1);
    assert_eq!(
        failed.json()["left_in"],
        json!([{"pid": pid, "state": "unknown"}])
    );
    assert_eq!(machine.cuda_state(pid), RUNNING);
}
