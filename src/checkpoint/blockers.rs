//! What stands in the way of a checkpoint or a restore, before anything is touched.

use super::{Action, GpuMap, ProcessState, Share, Since, memory_of};
use crate::gpu::GpuUuid;
use crate::record::ProcessId;

/// What a command is about to do with processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Lock and checkpoint.
    Suspend,
    /// Restore and unlock.
    Resume,
    /// This alone.
    Only(Action),
    /// Nothing but to ask.
    Look,
}

impl Purpose {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Suspend => "suspend",
            Self::Resume => "resume",
            Self::Only(action) => action.word(),
            Self::Look => "tell the state",
        }
    }

    /// Whether it takes a process away from its GPUs, or begins to.
    pub fn takes_away(self) -> bool {
        matches!(
            self,
            Self::Suspend | Self::Only(Action::Lock | Action::Checkpoint)
        )
    }

    /// What takes a process there from `state`: nothing where it is there already, `None` where nothing does.
    pub fn steps(self, state: ProcessState) -> Option<&'static [Action]> {
        match (self, state) {
            (Self::Look, _) => Some(&[]),
            (Self::Suspend, ProcessState::RUNNING) => Some(&[Action::Lock, Action::Checkpoint]),
            (Self::Suspend, ProcessState::CHECKPOINTED) => Some(&[]),
            (Self::Resume, ProcessState::CHECKPOINTED) => Some(&[Action::Restore, Action::Unlock]),
            (Self::Resume, ProcessState::LOCKED) => Some(&[Action::Unlock]),
            (Self::Resume, ProcessState::RUNNING) => Some(&[]),
            (Self::Only(Action::Lock), ProcessState::RUNNING) => Some(&[Action::Lock]),
            (Self::Only(Action::Checkpoint), ProcessState::LOCKED) => Some(&[Action::Checkpoint]),
            (Self::Only(Action::Restore), ProcessState::CHECKPOINTED) => Some(&[Action::Restore]),
            (Self::Only(Action::Unlock), ProcessState::LOCKED) => Some(&[Action::Unlock]),
            // A locked process was not restored just because a restore ends there.
            (Self::Only(action), state) if action.to() == state && action != Action::Restore => {
                Some(&[])
            }
            _ => None,
        }
    }
}

/// What keeps a process from answering the driver, which would wait for it for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halt {
    /// A signal or a debugger has stopped it.
    Stopped,
    /// Its cgroup is frozen.
    Frozen,
}

/// What the driver says of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaState {
    /// It uses CUDA and is in this state.
    State(ProcessState),
    /// It does not use CUDA.
    None,
    /// The driver did not say.
    Unknown(String),
    /// It was not asked, since something else is in the way.
    NotAsked,
}

/// Whether a process is a client of an MPS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clientship {
    /// No daemon that it could have reached counts it.
    None,
    /// Of this server.
    Of(i32),
    /// The daemon that it would have reached does not say.
    Unknown(String),
}

/// What is known of one process.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// As it was typed.
    pub pid: i32,
    /// The process, or the thread, of that number; none if none runs.
    pub process: Option<ProcessId>,
    /// The file name of its program.
    pub program: String,
    /// The process that it is a thread of, where that is another one.
    pub thread_of: Option<i32>,
    /// Its user.
    pub uid: u32,
    /// Whether we may act on that user's processes.
    pub is_ours: bool,
    /// It is known to be in another pid namespace than we, so that the driver knows it by another number.
    pub is_elsewhere: bool,
    /// What it is halted by.
    pub halt: Option<Halt>,
    /// What the driver says.
    pub cuda: CudaState,
    /// Whether MPS is in between.
    pub clientship: Clientship,
    /// It uses a part of a GPU.
    pub has_mig: bool,
    /// What it has on which GPUs, or had before it was suspended; empty where that is not known.
    pub shares: Vec<Share>,
    /// Where its GPUs are to go.
    pub map: Option<GpuMap>,
    /// On how many GPUs it is known to be, where it must be one, since that is to go to another, and is not.
    pub strays: Option<usize>,
}

impl Subject {
    /// Its state.
    pub fn state(&self) -> Option<ProcessState> {
        match self.cuda {
            CudaState::State(state) => Some(state),
            _ => None,
        }
    }
}

/// What the driver can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverFacts {
    /// It has the checkpoint calls, and supports this CUDA version: 12080 for 12.8.
    Able(i32),
    /// It cannot checkpoint, or there is none.
    Unable {
        /// Why.
        reason: String,
        /// It is there, but old.
        is_old: bool,
    },
}

/// What nvidia-smi says of a GPU's present condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCondition {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Its model.
    pub name: String,
    /// Its free memory in MiB.
    pub free_mib: Option<u64>,
    /// Whether the driver keeps it initialised when nobody uses it.
    pub is_persistent: Option<bool>,
    /// Whether it is divided.
    pub has_mig: Option<bool>,
}

/// What is known of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The driver.
    pub driver: DriverFacts,
    /// Host memory that a program could have, in MiB.
    pub available_mib: Option<u64>,
    /// The GPUs, as far as nvidia-smi tells.
    pub gpus: Vec<GpuCondition>,
    /// Why CUDA cannot be initialised, where that was tried and failed.
    pub no_init: Option<String>,
}

/// One thing in the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocker {
    /// The process that it concerns; none where it concerns all.
    pub pid: Option<i32>,
    /// Which kind it is; stays the same.
    pub id: &'static str,
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

/// What stands in the way, and what is worth knowing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// What stands in the way.
    pub blockers: Vec<Blocker>,
    /// What does not, but may.
    pub notes: Vec<String>,
}

impl Verdict {
    fn block(
        &mut self,
        pid: Option<i32>,
        id: &'static str,
        what: String,
        remedy: impl Into<String>,
    ) {
        let remedy = remedy.into();
        self.blockers.push(Blocker {
            pid,
            id,
            what,
            remedy,
        });
    }
}

/// Finds everything that stands in the way of `purpose`. `force` lets MPS clients pass.
pub fn judge(purpose: Purpose, subjects: &[Subject], machine: &Machine, force: bool) -> Verdict {
    let mut verdict = Verdict::default();
    driver(&mut verdict, subjects, machine);
    for subject in subjects {
        if process(&mut verdict, subject) {
            cuda(&mut verdict, purpose, subject);
        }
        // Whatever a process is: once it is suspended, it must be able to come back.
        if purpose.takes_away() {
            surroundings(&mut verdict, subject, machine, force);
        }
    }
    let doing = |action: Action| {
        let does = move |subject: &&Subject| {
            let steps = subject.state().and_then(|state| purpose.steps(state));
            steps.is_some_and(|steps| steps.contains(&action))
        };
        subjects.iter().filter(does)
    };
    host_memory(&mut verdict, doing(Action::Checkpoint), machine);
    gpu_memory(&mut verdict, doing(Action::Restore), machine);
    for subject in subjects {
        other_gpus(&mut verdict, subject, machine);
    }
    if doing(Action::Restore).next().is_some() || purpose.takes_away() {
        persistence(&mut verdict, machine);
    }
    verdict
}

fn driver(verdict: &mut Verdict, subjects: &[Subject], machine: &Machine) {
    match &machine.driver {
        DriverFacts::Able(version) => {
            let is_moved = subjects.iter().any(|subject| subject.map.is_some());
            if is_moved && *version < Since::REMAP.cuda {
                let lacking = Since::REMAP.lacking(*version);
                verdict.block(
                    None,
                    "driver-too-old",
                    format!("{lacking} to restore on another GPU"),
                    "without --to or --gpu-map it comes back where it was",
                );
            }
        }
        DriverFacts::Unable {
            reason,
            is_old: true,
        } => verdict.block(
            None,
            "driver-too-old",
            reason.clone(),
            "install a driver of branch 570 or newer; nvidia-smi shows the present one",
        ),
        DriverFacts::Unable {
            reason,
            is_old: false,
        } => {
            verdict.block(None, "no-driver", reason.clone(), "uni-cumps doctor");
        }
    }
}

/// Whether the process is one that the driver may be asked about.
fn process(verdict: &mut Verdict, subject: &Subject) -> bool {
    let pid = subject.pid;
    let before = verdict.blockers.len();
    let mut block = |id, what, remedy: String| verdict.block(Some(pid), id, what, remedy);
    if subject.process.is_none() {
        block(
            "no-such-process",
            format!("no process with pid {pid} runs"),
            format!("ps -fp {pid}"),
        );
        return false;
    }
    if let Some(leader) = subject.thread_of {
        block(
            "thread-id",
            format!("{pid} is a thread of process {leader}"),
            format!("--pid {leader}"),
        );
        return false;
    }
    if !subject.is_ours {
        block(
            "other-user",
            format!("pid {pid} belongs to uid {}", subject.uid),
            "as that user, or with sudo".to_owned(),
        );
    }
    if subject.is_elsewhere {
        block(
            "pid-namespace",
            format!("pid {pid} is in another pid namespace, such as a container"),
            "run uni-cumps in the same container".to_owned(),
        );
    }
    match subject.halt {
        Some(Halt::Stopped) => block(
            "stopped",
            format!("pid {pid} is stopped, and the driver would wait for it for ever"),
            format!("kill -CONT {pid}"),
        ),
        Some(Halt::Frozen) => block(
            "frozen",
            format!("the cgroup of pid {pid} is frozen, and the driver would wait for it for ever"),
            "thaw it: echo 0 into its cgroup.freeze".to_owned(),
        ),
        None => {}
    }
    verdict.blockers.len() == before
}

fn cuda(verdict: &mut Verdict, purpose: Purpose, subject: &Subject) {
    let pid = subject.pid;
    let mut block = |id, what, remedy: String| verdict.block(Some(pid), id, what, remedy);
    match &subject.cuda {
        CudaState::NotAsked => {}
        CudaState::None => block(
            "not-cuda",
            format!("pid {pid} does not use CUDA"),
            "nvidia-smi lists the processes that use a GPU; a launcher's child may be meant"
                .to_owned(),
        ),
        CudaState::Unknown(reason) => block(
            "no-answer",
            format!("the driver does not say in which state pid {pid} is: {reason}"),
            "another process that shares memory with it may be locked: uni-cumps status".to_owned(),
        ),
        CudaState::State(state)
            if subject.map.is_some()
                && matches!(purpose, Purpose::Resume)
                && *state != ProcessState::CHECKPOINTED =>
        {
            block(
                "state",
                format!("pid {pid} is {state}, and only a suspended process can be moved"),
                format!("uni-cumps checkpoint suspend --pid {pid}"),
            );
        }
        CudaState::State(state) if purpose.steps(*state).is_none() => {
            let (what, remedy) = wrong_state(purpose, *state, pid);
            block("state", what, remedy);
        }
        CudaState::State(_) => {}
    }
}

fn wrong_state(purpose: Purpose, state: ProcessState, pid: i32) -> (String, String) {
    let call = |verb: &str| format!("uni-cumps checkpoint {verb} --pid {pid}");
    let remedy = match (purpose, state) {
        (_, ProcessState::FAILED) => format!("it can only be ended: kill {pid}"),
        (Purpose::Suspend, ProcessState::LOCKED) => {
            format!("unless somebody is working on it: {}", call("resume"))
        }
        (_, ProcessState::RUNNING) => call("suspend"),
        (_, ProcessState::LOCKED) => call("unlock"),
        (_, ProcessState::CHECKPOINTED) => call("resume"),
        _ => format!("wait, and look again: {}", call("state")),
    };
    let what = match (purpose, state) {
        (_, ProcessState::FAILED) => {
            format!("pid {pid} is failed: an earlier checkpoint or restore went wrong for good")
        }
        (Purpose::Only(action), state) => {
            format!(
                "pid {pid} is {state}; to {} it, it must be {}",
                action.word(),
                action.from()
            )
        }
        (_, state) => {
            format!("pid {pid} is {state} already, by somebody else or an earlier attempt")
        }
    };
    (what, remedy)
}

fn surroundings(verdict: &mut Verdict, subject: &Subject, machine: &Machine, force: bool) {
    let pid = subject.pid;
    let forced =
        "NVIDIA does not support it, and the process may be lost; to try all the same: --force";
    match &subject.clientship {
        _ if force => {}
        Clientship::None => {}
        Clientship::Of(server) => verdict.block(
            Some(pid),
            "mps-client",
            format!("pid {pid} is an MPS client of server {server}, which cannot be checkpointed"),
            forced,
        ),
        Clientship::Unknown(reason) => verdict.block(
            Some(pid),
            "mps-client",
            format!("pid {pid} may be an MPS client, which cannot be checkpointed: {reason}"),
            forced,
        ),
    }
    let is_divided = |share: &Share| {
        let gpu = machine.gpus.iter().find(|gpu| gpu.uuid == share.uuid);
        gpu.is_some_and(|gpu| gpu.has_mig == Some(true))
    };
    if subject.has_mig || subject.shares.iter().any(is_divided) {
        verdict.block(
            Some(pid),
            "mig",
            format!("pid {pid} uses a MIG instance, which cannot be checkpointed"),
            "run it on a GPU without MIG; as administrator: nvidia-smi -mig 0",
        );
    }
}

/// The GPU memory of all processes must fit into host memory together: the driver pins it there.
fn host_memory<'s>(
    verdict: &mut Verdict,
    subjects: impl Iterator<Item = &'s Subject>,
    machine: &Machine,
) {
    let mut needed = 0;
    for subject in subjects {
        match memory_of(&subject.shares) {
            Some(memory) => needed = memory.saturating_add(needed),
            None => verdict.notes.push(format!(
                "how much GPU memory pid {} has is not known, so neither is whether host memory can hold it",
                subject.pid
            )),
        }
    }
    if let Some(available) = machine
        .available_mib
        .filter(|available| *available < needed)
    {
        verdict.block(
            None,
            "host-memory",
            format!(
                "the GPU memory is {needed} MiB, and {available} MiB of host memory are available"
            ),
            "free host memory: ps --sort=-rss -eo pid,rss,args | head",
        );
    }
}

/// A restore that does not find enough memory fails, and so do all later ones (NVIDIA/cuda-checkpoint#44).
fn gpu_memory<'s>(
    verdict: &mut Verdict,
    subjects: impl Iterator<Item = &'s Subject>,
    machine: &Machine,
) {
    let mut needed: Vec<(GpuUuid, u64)> = Vec::new();
    for subject in subjects {
        for share in &subject.shares {
            let place = subject
                .map
                .as_ref()
                .map_or_else(|| share.uuid.clone(), |map| map.place_of(&share.uuid));
            let memory = share.memory_mib.unwrap_or(0);
            match needed.iter_mut().find(|(gpu, _)| *gpu == place) {
                Some((_, sum)) => *sum = sum.saturating_add(memory),
                None => needed.push((place, memory)),
            }
        }
        if memory_of(&subject.shares).is_none() {
            verdict.notes.push(format!(
                "how much GPU memory pid {} needs is not known, so neither is whether its GPU has it",
                subject.pid
            ));
        }
    }
    for (gpu, needed) in needed {
        let condition = machine.gpus.iter().find(|condition| condition.uuid == gpu);
        let free = condition.and_then(|condition| condition.free_mib);
        if let Some(free) = free.filter(|free| *free < needed) {
            verdict.block(
                None,
                "gpu-memory",
                format!("GPU {gpu} has {free} MiB free, and {needed} MiB come back"),
                "end what uses it, or choose another with --to: nvidia-smi",
            );
        }
    }
}

fn other_gpus(verdict: &mut Verdict, subject: &Subject, machine: &Machine) {
    if let (Some(known), Some(_)) = (subject.strays, subject.state()) {
        let pid = subject.pid;
        let found = match known {
            0 => "it was not suspended by this user, or nvidia-smi did not list it".to_owned(),
            several => format!("it was on {several}"),
        };
        verdict.block(
            Some(pid),
            "gpu-unknown",
            format!("--to needs to know the one GPU that pid {pid} was on: {found}"),
            "--gpu-map OLD=NEW",
        );
    }
    let Some(map) = &subject.map else { return };
    let condition = |gpu: &GpuUuid| machine.gpus.iter().find(|condition| condition.uuid == *gpu);
    for share in &subject.shares {
        let place = map.place_of(&share.uuid);
        let (Some(old), Some(new)) = (condition(&share.uuid), condition(&place)) else {
            continue;
        };
        if old.name != new.name {
            verdict.block(
                Some(subject.pid),
                "gpu-model",
                format!(
                    "GPU {} is a {}, and GPU {} a {}: a restore needs the same model",
                    old.uuid, old.name, new.uuid, new.name
                ),
                "choose a GPU of the same model: nvidia-smi -L",
            );
        }
        if new.has_mig == Some(true) && place != share.uuid {
            verdict.block(
                Some(subject.pid),
                "mig",
                format!("GPU {place} is divided into MIG instances"),
                "choose a GPU without MIG",
            );
        }
    }
}

/// Without persistence mode a restore needs CUDA initialised in the process that asks for it, or the target dies
/// (NVIDIA/cuda-checkpoint#25). Ours always initialises it.
fn persistence(verdict: &mut Verdict, machine: &Machine) {
    if let Some(reason) = &machine.no_init {
        verdict.block(
            None,
            "persistence",
            format!("CUDA cannot be initialised, and without that a restore may end the process: {reason}"),
            "uni-cumps doctor; where persistence mode is off, as administrator: nvidia-smi -pm 1",
        );
    } else if machine
        .gpus
        .iter()
        .any(|gpu| gpu.is_persistent == Some(false))
    {
        verdict.notes.push(
            "persistence mode is off, so that a restore takes some seconds longer; as administrator: nvidia-smi -pm 1"
                .to_owned(),
        );
    }
}
