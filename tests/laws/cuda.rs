//! A made-up machine with CUDA processes, whose driver goes wrong as a test tells it: at a certain call, or from there on.

use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Map;
use uni_cumps::checkpoint::{
    Action, After, Ending, GpuPair, Limits, ProcessState, Purpose, Share, Suspended,
};
use uni_cumps::cli::CALL_COMMAND;
use uni_cumps::driver::DriverFailure;
use uni_cumps::error::{CheckpointFailure, Error};
use uni_cumps::record::ProcessId;
use uni_cumps::runner::{Finished, Invocation, Mode, RunError, Status};
use uni_cumps::store::Ledger;
use uni_cumps::suspension::{self, Destination, Order, Outcome};
use uni_cumps::{Host, Ui, process};

use crate::fake::{StillClock, host_with_programs, install, write};
use crate::support::uuid;

/// What the driver can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    State,
    Thread,
    Does(Action),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// This is what the driver answers.
    Code(u32),
    /// It does not answer.
    Hang,
    /// The child that asks crashes.
    Crash,
    /// The process ends.
    End,
    /// The process gets into this state, which no call brings about.
    Become(u32),
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// At which call.
    pub(crate) word: Word,
    /// About which process.
    pub(crate) process: usize,
    /// How many of these calls go well before.
    pub(crate) after: u32,
    /// How many then go wrong.
    pub(crate) times: u32,
    pub(crate) trouble: Trouble,
    /// What was asked for is done all the same.
    pub(crate) is_done: bool,
    /// How many questions for the state of this process fail then.
    pub(crate) silence: u32,
}

/// A call of the driver, and what came of it.
#[derive(Clone)]
pub(crate) struct Made {
    pub(crate) process: usize,
    pub(crate) word: Word,
    /// With a map.
    pub(crate) is_elsewhere: bool,
    /// Nothing where the driver did not get as far as an answer.
    pub(crate) code: Option<u32>,
    pub(crate) before: u32,
    pub(crate) after: u32,
}

impl fmt::Debug for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let map = if self.is_elsewhere { " with a map" } else { "" };
        let Self {
            process,
            word,
            code,
            before,
            after,
            ..
        } = self;
        write!(f, "{process}: {word:?}{map}: {code:?}, {before} to {after}")
    }
}

/// A process as the driver has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) state: u32,
    pub(crate) gpus: Vec<usize>,
    /// The ledger tells of it.
    pub(crate) is_remembered: bool,
    pub(crate) runs: bool,
}

impl Process {
    pub(crate) fn is(&self, state: ProcessState) -> bool {
        self.runs && self.state == state.0
    }

    /// Its GPUs as the ledger writes them.
    pub(crate) fn uuids(&self) -> Vec<String> {
        self.gpus.iter().map(|gpu| uuid(*gpu)).collect()
    }
}

/// A machine before a command.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) gpus: usize,
    pub(crate) processes: Vec<Process>,
    pub(crate) faults: Vec<Fault>,
    /// These are not restored on other GPUs; the driver answers this.
    pub(crate) immovable: (Vec<usize>, u32),
}

/// What a command made of a machine.
pub(crate) struct Done {
    pub(crate) purpose: Purpose,
    pub(crate) result: Result<Vec<Outcome>, Error>,
    pub(crate) before: Vec<Process>,
    pub(crate) after: Vec<Process>,
    pub(crate) calls: Vec<Made>,
    pub(crate) ledger: Vec<Suspended>,
}

pub(crate) fn pid(process: usize) -> i32 {
    101 + i32::try_from(process).unwrap()
}

fn id(process: usize) -> ProcessId {
    ProcessId {
        pid: pid(process),
        start_ticks: 7,
    }
}

/// Where a test may put a GPU's free memory, persistence mode and MIG mode, for nvidia-smi to tell.
pub(crate) fn condition_file(gpu: usize) -> String {
    format!("condition/{gpu}")
}

/// `/proc/<pid>/stat` of a process that is in this state.
pub(crate) fn stat(pid: i32, state: char) -> String {
    format!("{pid} (python3) {state} 1 1{} 7 0 0\n", " 0".repeat(16))
}

/// A directory in memory, where there is such a thing: the ledger waits for the disk.
fn directory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = tempfile::tempdir_in(memory);
    made.or_else(|_| tempfile::tempdir()).unwrap()
}

impl Machine {
    /// Has the processes suspended, resumed or whatever it is.
    pub(crate) fn run(&self, purpose: Purpose, destination: &Destination) -> Done {
        self.run_with(purpose, destination, &|_| {})
    }

    /// Likewise, on a machine whose files below its root are `changed` before.
    pub(crate) fn run_with(
        &self,
        purpose: Purpose,
        destination: &Destination,
        changed: &dyn Fn(&Path),
    ) -> Done {
        let directory = directory();
        let root = directory.path();
        install(root, "bin/nvidia-smi");
        fs::create_dir(root.join("tmp")).unwrap();
        write(root, "proc/meminfo", "MemAvailable: 1048576 kB\n");
        write(root, "proc/sys/kernel/random/boot_id", "b1\n");
        write(root, "proc/self/status", "CapEff: 0\n");
        for process in 0..self.processes.len() {
            let pid = pid(process);
            write(root, &format!("proc/{pid}/stat"), stat(pid, 'S'));
            let status = format!("Tgid:\t{pid}\n");
            write(root, &format!("proc/{pid}/status"), status);
            write(root, &format!("proc/{pid}/cmdline"), "/bin/python3\0");
        }
        changed(root);
        let clock = StillClock::default();
        let driver = Arc::new(Mutex::new(Driver {
            root: root.to_owned(),
            clock: clock.clone(),
            machine: self.clone(),
            seen: vec![0; self.faults.len()],
            silence: vec![0; self.processes.len()],
            calls: Vec::new(),
        }));
        let programs = Arc::clone(&driver);
        let answer = Box::new(move |call: &Invocation| programs.lock().unwrap().answer(call));
        let host = Host {
            env: [("PATH", "/bin"), ("HOME", "/home")].into_iter().collect(),
            clock: Box::new(clock),
            ..host_with_programs(root, answer)
        };
        self.remember(&host);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut ui = Ui::new((&mut out, false), (&mut err, false), false);
        // In another order, and one of them twice.
        let pids = (0..self.processes.len()).rev().chain([0]).map(pid);
        let order = Order {
            purpose,
            pids: &pids.collect::<Vec<i32>>(),
            destination,
            limits: Limits {
                lock: Duration::from_secs(1),
                deadline: Duration::from_secs(1),
            },
            force: false,
        };
        let result = suspension::carry_out(&host, &mut ui, &order);
        let driver = driver.lock().unwrap();
        Done {
            purpose,
            result,
            before: self.processes.clone(),
            after: driver.machine.processes.clone(),
            calls: driver.calls.clone(),
            ledger: Ledger::of(&host).unwrap().list(),
        }
    }

    fn remember(&self, host: &Host) {
        let ledger = Ledger::of(host).unwrap();
        for (at, process) in self.processes.iter().enumerate() {
            if !process.is_remembered {
                continue;
            }
            let share = |uuid: String| Share {
                uuid: uuid.parse().unwrap(),
                memory_mib: Some(100),
            };
            let entry = Suspended {
                process: id(at),
                uid: host.uid,
                place: process::place(host),
                program: "python3".to_owned(),
                gpus: process.uuids().into_iter().map(share).collect(),
                suspended_at: 1.0,
                unknown: Map::new(),
            };
            ledger.lock(&[id(at)]).unwrap().put(&entry).unwrap();
        }
    }
}

/// The machine's programs: nvidia-smi, and ourselves as the child that calls the driver.
struct Driver {
    root: std::path::PathBuf,
    clock: StillClock,
    machine: Machine,
    /// How often the call of each fault was made.
    seen: Vec<u32>,
    /// How many questions for the state of each process fail from now on.
    silence: Vec<u32>,
    calls: Vec<Made>,
}

const ILLEGAL_STATE: u32 = 401;

fn finished(status: Status, stdout: String) -> Result<Finished, RunError> {
    Ok(Finished {
        status,
        stdout,
        stderr: String::new(),
        process_group: 0,
    })
}

impl Driver {
    fn answer(&mut self, call: &Invocation) -> Result<Finished, RunError> {
        let args: Vec<&str> = call.args.iter().map(|arg| arg.to_str().unwrap()).collect();
        if call.program.ends_with("nvidia-smi") {
            return finished(Status::Exited(0), self.rows(args[0]));
        }
        assert_eq!(args[0], CALL_COMMAND);
        let limit = match call.mode {
            Mode::Uninterrupted(limit) => limit,
            // A question may be cut off, before anything is touched.
            Mode::Captured(limit) if self.has_only_been_asked() => limit,
            _ => panic!("{call:?} can be cut off"),
        };
        let word = match args[1] {
            "version" => return finished(Status::Exited(0), json(&Ok(13000))),
            "init" => return finished(Status::Exited(0), json(&Ok(0))),
            "state" => Word::State,
            "restore-thread" => Word::Thread,
            "lock" => Word::Does(Action::Lock),
            "checkpoint" => Word::Does(Action::Checkpoint),
            "restore" => Word::Does(Action::Restore),
            "unlock" => Word::Does(Action::Unlock),
            other => panic!("nobody expected {other}"),
        };
        let pairs = args[3..]
            .iter()
            .filter_map(|arg| arg.strip_prefix("--pair="));
        let pairs: Vec<GpuPair> = pairs.map(|pair| pair.parse().unwrap()).collect();
        let number: i32 = args[2].parse().unwrap();
        let process = (0..self.machine.processes.len()).find(|process| pid(*process) == number);
        let process = process.expect("only who is meant is asked about");
        self.ask(process, word, &pairs, limit)
    }

    fn has_only_been_asked(&self) -> bool {
        let asks = |made: &Made| !matches!(made.word, Word::Does(_));
        self.calls.iter().all(asks)
    }

    fn rows(&self, query: &str) -> String {
        let gpus = 0..self.machine.gpus;
        let row = |gpu: usize| match query {
            "--query-gpu=index,uuid,compute_mode,mig.mode.current" => {
                format!("{gpu}, {}, Default, Disabled\n", uuid(gpu))
            }
            query if query.starts_with("--query-gpu=") => {
                let condition = fs::read_to_string(self.root.join(condition_file(gpu)));
                let condition = condition.unwrap_or_else(|_| "1000, Enabled, Disabled".to_owned());
                format!("{}, NVIDIA H200, {condition}\n", uuid(gpu))
            }
            _ => self.apps_on(gpu),
        };
        gpus.map(row).collect()
    }

    /// Who is suspended is not listed.
    fn apps_on(&self, gpu: usize) -> String {
        let row = |(at, process): (usize, &Process)| {
            let is_on = process.runs && process.gpus.contains(&gpu);
            (is_on && !process.is(ProcessState::CHECKPOINTED))
                .then(|| format!("{}, {}, 100\n", pid(at), uuid(gpu)))
        };
        let processes = self.machine.processes.iter().enumerate();
        processes.filter_map(row).collect()
    }

    /// The fault that this call meets.
    fn fault(&mut self, process: usize, word: Word) -> Option<Fault> {
        let mut met = None;
        for (fault, seen) in self.machine.faults.iter().zip(&mut self.seen) {
            if (fault.process, fault.word) != (process, word) {
                continue;
            }
            if (fault.after..fault.after.saturating_add(fault.times)).contains(seen) {
                met = met.or(Some(*fault));
            }
            *seen += 1;
        }
        let silence = &mut self.silence[process];
        if let Some(fault) = met {
            *silence += fault.silence;
        } else if word == Word::State && *silence > 0 {
            *silence -= 1;
            met = Some(Fault {
                word,
                process,
                after: 0,
                times: 1,
                trouble: Trouble::Crash,
                is_done: false,
                silence: 0,
            });
        }
        met
    }

    fn ask(
        &mut self,
        process: usize,
        word: Word,
        pairs: &[GpuPair],
        limit: Duration,
    ) -> Result<Finished, RunError> {
        let fault = self.fault(process, word);
        let before = self.machine.processes[process].state;
        let mut answer = match fault.is_none_or(|fault| fault.is_done) {
            true => self.obey(process, word, pairs),
            false => Err(ILLEGAL_STATE),
        };
        let target = &mut self.machine.processes[process];
        match fault.map(|fault| fault.trouble) {
            Some(Trouble::End) => {
                target.runs = false;
                fs::remove_dir_all(self.root.join(format!("proc/{}", pid(process)))).unwrap();
                answer = Err(304);
            }
            Some(Trouble::Become(state)) => {
                target.state = state;
                answer = match word {
                    Word::State => Ok(state),
                    Word::Thread => Ok(1),
                    Word::Does(_) => Err(600),
                };
            }
            Some(Trouble::Code(code)) => answer = Err(code),
            Some(Trouble::Hang | Trouble::Crash) | None => {}
        }
        let is_silent = matches!(
            fault.map(|fault| fault.trouble),
            Some(Trouble::Hang | Trouble::Crash)
        );
        self.calls.push(Made {
            process,
            word,
            is_elsewhere: !pairs.is_empty(),
            code: (!is_silent).then(|| answer.err().unwrap_or(0)),
            before,
            after: target.state,
        });
        match fault.map(|fault| fault.trouble) {
            Some(Trouble::Hang) => {
                self.clock.advance(limit);
                Err(RunError::TimedOut(limit))
            }
            Some(Trouble::Crash) => finished(Status::Signaled(11), String::new()),
            _ => finished(
                Status::Exited(0),
                json(&answer.map_err(|code| DriverFailure::Call {
                    call: "cu".to_owned(),
                    code,
                    name: "CUDA_ERROR".to_owned(),
                })),
            ),
        }
    }

    /// A driver that does as it is told, if it can.
    fn obey(&mut self, process: usize, word: Word, pairs: &[GpuPair]) -> Result<u32, u32> {
        let (immovable, code) = &self.machine.immovable;
        if !pairs.is_empty() && immovable.contains(&process) {
            return Err(*code);
        }
        let gpus = self.machine.gpus;
        let target = &mut self.machine.processes[process];
        let action = match word {
            _ if !target.runs => return Err(1),
            Word::State => return Ok(target.state),
            Word::Thread => return Ok(1),
            Word::Does(action) => action,
        };
        if !target.is(action.from()) {
            return Err(ILLEGAL_STATE);
        }
        if !pairs.is_empty() {
            let place = |gpu: &usize| {
                let pair = pairs.iter().find(|pair| pair.old.to_string() == uuid(*gpu));
                let new = pair.expect("every GPU is named").new.to_string();
                (0..gpus).find(|gpu| uuid(*gpu) == new).unwrap()
            };
            assert_eq!(pairs.len(), gpus);
            target.gpus = target.gpus.iter().map(place).collect();
        }
        target.state = action.to().0;
        Ok(0)
    }
}

fn json(answer: &Result<u32, DriverFailure>) -> String {
    serde_json::to_string(answer).unwrap()
}

/// A line for each process and each call.
impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}: {:?}", self.purpose, self.result)?;
        for (at, (before, after)) in self.before.iter().zip(&self.after).enumerate() {
            writeln!(f, "{at}: {before:?}\n   {after:?}")?;
        }
        for call in &self.calls {
            writeln!(f, "{call:?}")?;
        }
        let entry = |entry: &Suspended| (entry.process.pid, entry.gpus.clone());
        let ledger: Vec<_> = self.ledger.iter().map(entry).collect();
        writeln!(f, "{ledger:?}")
    }
}

impl Done {
    /// How the command failed.
    pub(crate) fn failure(&self) -> Option<&CheckpointFailure> {
        match &self.result {
            Ok(_) => None,
            Err(Error::Checkpoint(failure)) => Some(failure),
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Nothing was to be touched, since something stands in the way.
    pub(crate) fn is_blocked(&self) -> bool {
        self.failure().is_some_and(|failure| {
            !matches!(
                failure,
                CheckpointFailure::Step { .. } | CheckpointFailure::NotMoved { .. }
            )
        })
    }

    /// What is said of a process that is not as it was.
    pub(crate) fn left(&self, process: usize) -> Option<Ending> {
        let mut left = self.failure()?.left();
        left.find(|ending| ending.pid == pid(process)).copied()
    }

    /// What is said of a process, whatever came of it.
    pub(crate) fn told(&self, process: usize) -> After {
        let before = After::State(ProcessState(self.before[process].state));
        match &self.result {
            Ok(outcomes) => {
                let mut endings = outcomes.iter().map(|outcome| outcome.ending);
                let ending = endings.find(|ending| ending.pid == pid(process));
                ending.map_or(before, |ending| ending.after)
            }
            Err(_) => self.left(process).map_or(before, |ending| ending.after),
        }
    }

    /// The calls about a process.
    pub(crate) fn calls_about(&self, process: usize) -> impl DoubleEndedIterator<Item = &Made> {
        self.calls
            .iter()
            .filter(move |call| call.process == process)
    }

    /// The driver would not say in which state a process is, however often it was asked in the end; that one is on the way
    /// to a state is none yet.
    pub(crate) fn is_secret(&self, process: usize) -> bool {
        let asked = self.calls_about(process).rev();
        let mut asked = asked
            .filter(|call| call.word == Word::State)
            .map(|call| (call.code == Some(0)).then_some(call.after));
        asked.next() == Some(None) && matches!(asked.next(), Some(None | Some(4 | 5)))
    }

    /// Whatever was tried to unlock a process since it was locked, it did not help.
    pub(crate) fn is_stuck(&self, process: usize) -> bool {
        let locked = ProcessState::LOCKED.0;
        let since = self.calls_about(process).rev();
        let since = since.take_while(|call| (call.before, call.after) == (locked, locked));
        let unlocks = since.filter(|call| call.word == Word::Does(Action::Unlock));
        unlocks.count() >= 2
    }
}
