//! Suspending and resuming two processes, killed before each call that matters, and with each of them failing. Whatever
//! moment it ends at, a process that does not run is one that the ledger tells of and `resume --all` brings back.

use std::fs;

use crate::disk::errors;
use crate::killed::Figures;
use crate::support::{Sandbox, Sleeper, wait_until};
use crate::trace::{self, Call, Ended};
use crate::world::World;
use crate::{Driver, Needs, Row, nightly};

const RUNNING: u32 = 0;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;

pub(crate) const ROWS: &[Row] = &[
    ("suspend_two_processes", Needs::Strace, |driver| {
        killed(driver, "suspend")
    }),
    ("resume_two_processes", Needs::Strace, |driver| {
        killed(driver, "resume")
    }),
    ("suspend_two_processes_fails", Needs::Strace, |driver| {
        failing(driver, "suspend")
    }),
    ("resume_two_processes_fails", Needs::Strace, |driver| {
        failing(driver, "resume")
    }),
];

/// Two processes that use CUDA, and what is to be done with them.
struct Scene {
    world: World,
    targets: [Sleeper; 2],
    words: Vec<String>,
}

impl Scene {
    fn new(driver: &Driver, verb: &str) -> Self {
        let targets = [Sleeper::new(), Sleeper::new()];
        let pids = targets
            .iter()
            .map(|target| format!("--pid={}", target.pid()));
        let words = ["checkpoint", verb, "--quiet"].map(str::to_owned);
        Self {
            world: World::new(driver),
            words: words.into_iter().chain(pids).collect(),
            targets,
        }
    }

    fn words(&self) -> Vec<&str> {
        self.words.iter().map(String::as_str).collect()
    }

    fn machine(&self) -> &Sandbox {
        &self.world.machine
    }

    /// As the command is to find it.
    fn prepare(&self) {
        let machine = self.machine();
        for target in &self.targets {
            machine.cuda_process(target.pid(), RUNNING);
        }
        let _ = fs::remove_dir_all(machine.records().join(".suspended"));
        machine.cuda_calls();
        if self.words[1] == "resume" {
            let mut words = self.words.clone();
            words[1] = "suspend".to_owned();
            machine.run(words).succeeds();
        }
    }

    fn states(&self) -> [u32; 2] {
        [&self.targets[0], &self.targets[1]].map(|target| self.machine().cuda_state(target.pid()))
    }

    /// The calls of the command that matter, on the way that it takes when nothing happens.
    fn calls(&self) -> Vec<Call> {
        self.prepare();
        trace::calls(&self.world, trace::Traced::wait, &self.words())
    }

    /// Waits until the child that made a call is done with it as well.
    fn settle(&self) {
        let binary = crate::support::uni_cumps().as_os_str().as_encoded_bytes();
        let is_ours = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let name = line.split(|byte| *byte == 0).next().unwrap_or_default();
            binary.ends_with(name) && !name.is_empty()
        };
        wait_until("no call is in progress", || {
            !self.machine().processes().iter().any(is_ours)
        });
    }

    /// Who does not run is told of, and comes back. Returns the word for the figures.
    fn is_put_right(&self) -> &'static str {
        let states = self.states();
        let status = self.machine().run(["status", "--json"]).succeeds().json();
        let told = status["suspended_processes"].as_array().unwrap();
        for (target, state) in self.targets.iter().zip(states) {
            let is_told = told.iter().any(|entry| entry["pid"] == target.pid());
            assert!(is_told || state == RUNNING, "{states:?}, {told:?}");
        }
        let all = ["checkpoint", "resume", "--all", "--quiet"];
        self.machine().run(all).succeeds();
        assert_eq!(self.states(), [RUNNING; 2]);
        match states {
            [RUNNING, RUNNING] => "running",
            [CHECKPOINTED, CHECKPOINTED] => "suspended",
            _ if states.contains(&LOCKED) => "locked and told of",
            _ => "one of each",
        }
    }
}

/// Kills the command before each of its calls in turn.
fn killed(driver: &Driver, verb: &str) -> String {
    let scene = Scene::new(driver, verb);
    let mut figures = Figures::default();
    for call in scene.calls() {
        if call.only_looks() && !nightly() {
            continue;
        }
        let what = format!("before {} {}, {}", call.name, call.number, call.line);
        figures.case(&scene.world, &what, |figures| {
            scene.prepare();
            let traced = trace::kill_at(&scene.world, &scene.words(), &call.name, call.number);
            let ended = traced.wait();
            scene.settle();
            let word = scene.is_put_right();
            // How often a lock is waited for may change a little.
            if ended.by_kill() {
                figures.count(word);
            }
        });
    }
    figures.report("kills")
}

/// Makes each call of the command fail in turn. Then nobody is left locked, and what is said is true.
fn failing(driver: &Driver, verb: &str) -> String {
    let scene = Scene::new(driver, verb);
    let mut figures = Figures::default();
    for (turn, call) in scene.calls().iter().enumerate() {
        let errors = errors(&scene.world, call);
        let errors = match errors.len() {
            many @ 2.. if !nightly() => &errors[turn % many..=turn % many],
            _ => errors,
        };
        for error in errors {
            let what = format!("{error} of {} {}, {}", call.name, call.number, call.line);
            figures.case(&scene.world, &what, |figures| {
                scene.prepare();
                let before = scene.states();
                let traced =
                    trace::fail_at(&scene.world, &scene.words(), &call.name, call.number, error);
                let ended = traced.wait();
                let states = scene.states();
                let all = format!("{ended:?} {states:?} {}", trace::failed(&scene.world));
                let goal = if verb == "suspend" {
                    CHECKPOINTED
                } else {
                    RUNNING
                };
                match ended {
                    Ended { code: 0, .. } => assert_eq!(states, [goal; 2], "{all}"),
                    Ended {
                        code: 1,
                        ref stderr,
                    } => {
                        assert!(
                            stderr.contains("error: ") && !stderr.contains("panicked"),
                            "{all}"
                        );
                        assert_eq!(states, before, "{all}");
                    }
                    Ended { .. } => panic!("{all}"),
                }
                figures.count(scene.is_put_right());
            });
        }
    }
    figures.report("failing calls")
}
