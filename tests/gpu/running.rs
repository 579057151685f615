//! A program on the GPU as a test sees it: what it is told, what it answers, and whether that is right.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use libtest_mimic::Failed;

use crate::Outcome;
use crate::machine::{Machine, ended};
use crate::{pattern, program};

/// How long CUDA may take to wake up every GPU.
const START: Duration = Duration::from_secs(60);
/// How long anything else may take.
const ANSWER: Duration = Duration::from_secs(30);

pub(crate) struct Program {
    child: Child,
    pid: String,
    stdin: ChildStdin,
    answers: Receiver<String>,
    seed: u32,
    steps: u32,
}

impl Program {
    /// On the first GPU, which it shares with nobody.
    pub(crate) fn start(machine: &Machine, seed: u32) -> Result<Self, Failed> {
        Self::spawn(machine.program(&std::env::current_exe()?), seed)
    }

    /// On the first GPU as a client of the machine's daemon.
    pub(crate) fn client(machine: &Machine, seed: u32) -> Result<Self, Failed> {
        let mut command = machine.program(&std::env::current_exe()?);
        command.envs(machine.client_env()?);
        Self::spawn(command, seed)
    }

    /// A copy of the test binary, in whatever way it is to be started.
    pub(crate) fn spawn(mut command: Command, seed: u32) -> Result<Self, Failed> {
        command.env(program::VARIABLE, seed.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(|error| format!("{command:?}: {error}"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".into());
        };
        let (sender, answers) = channel();
        // It ends with the program.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let program = Self {
            pid: child.id().to_string(),
            child,
            stdin,
            answers,
            seed,
            steps: 0,
        };
        match program.hear(START)?.as_str() {
            program::READY => Ok(program),
            other => Err(format!("the program does not begin: {other}").into()),
        }
    }

    pub(crate) fn pid(&self) -> &str {
        &self.pid
    }

    /// Gives an order, and does not wait.
    pub(crate) fn tell(&mut self, order: &str) -> Outcome {
        writeln!(self.stdin, "{order}")?;
        Ok(self.stdin.flush()?)
    }

    pub(crate) fn hear(&self, limit: Duration) -> Result<String, Failed> {
        self.answers.recv_timeout(limit).map_err(|error| {
            let pid = &self.pid;
            match error {
                RecvTimeoutError::Timeout => format!("program {pid} is silent for {limit:?}"),
                RecvTimeoutError::Disconnected => format!("program {pid} has ended"),
            }
            .into()
        })
    }

    /// Whether nothing is heard for this time.
    pub(crate) fn is_silent(&self, time: Duration) -> bool {
        matches!(
            self.answers.recv_timeout(time),
            Err(RecvTimeoutError::Timeout)
        )
    }

    pub(crate) fn ask(&mut self, order: &str) -> Result<String, Failed> {
        self.tell(order)?;
        self.hear(ANSWER)
    }

    /// Has it take a step, which must come out as it would have if it had never been disturbed.
    pub(crate) fn step(&mut self) -> Outcome {
        self.tell("step")?;
        self.stepped()
    }

    /// The step that it was told to take comes out right.
    pub(crate) fn stepped(&mut self) -> Outcome {
        self.steps += 1;
        let answer = self.hear(ANSWER)?;
        let expected = program::sum_text(pattern::expected(self.seed, self.steps));
        if answer == expected {
            return Ok(());
        }
        let (pid, steps) = (&self.pid, self.steps);
        Err(format!("step {steps} of program {pid} comes to {answer}, not to {expected}").into())
    }

    /// Keeps the GPU busy for some seconds and then takes a step, for which `stepped` waits.
    pub(crate) fn spin(&mut self, seconds: u32) -> Outcome {
        match self.ask(&format!("spin {seconds}"))?.as_str() {
            program::SPINNING => Ok(()),
            other => Err(format!("the program does not spin: {other}").into()),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        // The driver may hold it up. Then it is left: it cannot do anything any more.
        let _ = ended(&mut self.child, Duration::from_secs(10));
    }
}
