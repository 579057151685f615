//! Everything that can go wrong, as data. A failure has a sentence (`Display`), a cause, a stable code for scripts and
//! a hint that can be typed; only `ui` prints them. A new variant does not compile until it has all of these.

mod checkpoint;
mod clients;
mod limits;
mod logs;
mod selection;
mod slurm;
mod smi;
mod unmet;
mod wait;

pub use checkpoint::CheckpointFailure;
pub use clients::ClientFailure;
pub use limits::LimitFailure;
pub use logs::LogFailure;
pub use selection::Selection;
pub use slurm::SlurmFailure;
pub use smi::SmiFailure;
pub use unmet::Unmet;
pub use wait::InVain;

use std::io;
use std::path::PathBuf;

use crate::gpu::Device;
use crate::rank::RankError;
use crate::record::{DaemonName, NameError};
use crate::shell::{Unwritable, is_assignment, quote_path};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    // Selecting GPUs.
    /// It is not clear which GPUs are meant, or they cannot be had.
    #[error("{0}")]
    Selection(#[from] Selection),

    // nvidia-smi.
    /// nvidia-smi gave no list of GPUs.
    #[error("nvidia-smi could not list the GPUs")]
    NvidiaSmi(#[from] SmiFailure),

    // Sharing.
    /// A prerequisite is not met.
    #[error("{0}")]
    Unmet(#[from] Unmet),
    /// The manifest cannot take the evidence.
    #[error("{path:?} is not a JSON object")]
    BadManifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    // Checkpoints.
    /// Processes were not suspended, resumed or asked about.
    #[error("{0}")]
    Checkpoint(#[from] CheckpointFailure),

    // Clients.
    /// A client was not ended.
    #[error("{0}")]
    Client(#[from] ClientFailure),

    // Clusters.
    /// A hook of a Slurm cluster could not do its work.
    #[error("{0}")]
    Slurm(#[from] SlurmFailure),

    // Logs.
    /// The logs of a daemon are not where they should be.
    #[error("{0}")]
    Logs(#[from] LogFailure),

    // Limits.
    /// A daemon's limits are not as they were asked for.
    #[error("{0}")]
    Limits(#[from] LimitFailure),

    // Records.
    /// A name is not a name.
    #[error("{0}")]
    Name(#[from] NameError),
    /// There is no record of this name.
    #[error("no daemon named {0} is recorded")]
    NoRecord(DaemonName),
    /// No name was given and no recorded daemon is live.
    #[error("no recorded daemon is live")]
    NoLiveDaemon,
    /// No name was given and several daemons are live.
    #[error("several daemons are live: {}", list(names))]
    SeveralLive {
        /// Their names.
        names: Vec<DaemonName>,
    },
    /// No live daemon serves the GPU that was asked for.
    #[error("no live daemon of yours serves GPU {0}")]
    NoDaemonForGpu(String),
    /// There is no daemon for a launcher's rank.
    #[error("{0}")]
    Rank(#[from] RankError),
    /// A variable's value cannot be written in the form asked for.
    #[error("{key} cannot be written for {form}")]
    Unwritable {
        /// The variable.
        key: &'static str,
        /// The shell or the format.
        form: &'static str,
        /// What its value holds.
        holds: Unwritable,
    },
    /// This is no step of a GitHub Actions job.
    #[error("GITHUB_ENV names no file to append to")]
    NoGithubEnv,

    // Running programs.
    /// The user's program could not be executed.
    #[error("cannot execute {program:?}")]
    CannotExecute {
        /// The program as typed.
        program: PathBuf,
        /// The first file that could have been meant.
        file: Option<PathBuf>,
        /// The system's reason.
        source: io::Error,
    },
    /// We failed before the user's program could be executed.
    #[error("the program was not started")]
    NotStarted {
        /// The system's reason.
        source: io::Error,
    },
    /// No process of the command became a client in time, and the command was ended.
    #[error(
        "the command was ended: none of its processes was a client of daemon {name} within {seconds} s"
    )]
    NotAttached {
        /// The daemon.
        name: DaemonName,
        /// How long was waited.
        seconds: u64,
        /// What was found.
        causes: Vec<String>,
        /// What to do about the first cause.
        remedy: String,
    },
    /// The command ended well and was never seen to share the GPU.
    #[error(
        "the command ended with status 0, and none of its processes was seen as a client of daemon {name}"
    )]
    EndedUnattached {
        /// The daemon.
        name: DaemonName,
    },

    /// The plan that the user asks for cannot be had.
    #[error("{message}")]
    CpuPlan {
        /// Its code.
        code: &'static str,
        /// What is wrong with it.
        message: String,
        /// What to type.
        hint: String,
    },
    /// Nothing says which CPUs may be used.
    #[error("the CPUs that a process may use are not known")]
    NoCpuMask,
    /// The program could not be bound to CPUs, and that was insisted on.
    #[error("the program cannot be bound to CPUs")]
    NotBound {
        /// Why not.
        reason: String,
    },

    /// A record exists and cannot be read.
    #[error("the record of daemon {name} cannot be read")]
    DamagedRecord {
        /// The daemon.
        name: DaemonName,
        /// The record file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The record is of another user.
    #[error("daemon {name} belongs to uid {uid}; you are uid {ours}")]
    OtherUser {
        /// The daemon.
        name: DaemonName,
        /// Its owner.
        uid: u32,
        /// Our uid.
        ours: u32,
    },
    /// The record is of another machine.
    #[error("daemon {name} was started on host {host:?}; this is {here:?}")]
    OtherHost {
        /// The daemon.
        name: DaemonName,
        /// Its host.
        host: String,
        /// Our host.
        here: String,
        /// The record's directory.
        directory: PathBuf,
    },
    /// The record's pid belongs to another pid namespace.
    #[error("daemon {0} was started in another pid namespace, such as another container")]
    OtherPidNamespace(DaemonName),
    /// The daemon is gone.
    #[error("daemon {0} is no longer running; its record is stale")]
    Stale(DaemonName),
    /// The daemon was gone, and its record is now gone as well.
    #[error("daemon {0} was not running; its stale record was removed")]
    StaleRemoved(DaemonName),
    /// The name is taken by a live daemon.
    #[error("daemon {name} is already live with pid {pid}")]
    AlreadyLive {
        /// The daemon.
        name: DaemonName,
        /// Its pid.
        pid: i32,
    },
    /// The process lives, but its socket does not lead to it.
    #[error("daemon {name} (pid {pid}) is alive, but its control socket is not reachable")]
    Unreachable {
        /// The daemon.
        name: DaemonName,
        /// Its pid.
        pid: i32,
        /// What was found at the socket's place.
        found: String,
    },
    /// Another live daemon of ours serves the GPU.
    #[error("daemon {by} (pid {pid}) already serves GPU {device}")]
    GpuTaken {
        /// The GPU, or the part of one.
        device: Device,
        /// The daemon that serves it.
        by: DaemonName,
        /// Its pid.
        pid: i32,
    },
    /// What can be said of one daemon was said of several.
    #[error("{0} daemons cannot have one name, one directory or one foreground")]
    ForOneDaemon(usize),
    /// A part of a GPU has no compute mode.
    #[error("a MIG instance cannot be made exclusive")]
    ExclusiveMig,
    /// Somebody holds the lock for longer than we wait.
    #[error("another uni-cumps is working on the same records")]
    Busy {
        /// The lock file.
        lock: PathBuf,
        /// The holder, where the kernel says it.
        pid: Option<i32>,
    },

    // Directories.
    /// There is no home directory to keep records in.
    #[error("the home directory is not known")]
    NoHome {
        /// Why not.
        reason: String,
    },
    /// `~user` names nobody.
    #[error("there is no user {0:?}")]
    NoSuchUser(String),
    /// The path is not UTF-8, so no record can name it.
    #[error("the path {0:?} is not UTF-8")]
    NotUnicode(PathBuf),
    /// Pipe and log directory are the same.
    #[error("the pipe and the log directory must be different directories")]
    SameDirectories(PathBuf),
    /// The log directory is where the daemon puts its FIFO.
    #[error("the log directory must not be named \"log\" within the pipe directory")]
    LogIsFifo(PathBuf),
    /// The daemon would fail without a word.
    #[error("the pipe directory's path is too long: {length} bytes, and CUDA MPS takes {limit}")]
    PipeTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        length: usize,
        /// The longest that works.
        limit: usize,
        /// A path that is short enough.
        shorter: PathBuf,
    },
    /// A directory is not private enough, or not a directory.
    #[error("{path:?} cannot be used as {role}")]
    UnsafeDirectory {
        /// The directory.
        path: PathBuf,
        /// What it was to be.
        role: &'static str,
        /// What is wrong with it.
        reason: String,
        /// What to type.
        remedy: String,
    },
    /// A file operation failed.
    #[error("cannot {doing} {path:?}")]
    File {
        /// The operation.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },

    // The control daemon.
    /// A program is not on PATH.
    #[error("{0} is not on PATH")]
    NoProgram(&'static str),
    /// Somebody's daemon answers in the directory.
    #[error("another control daemon already uses the pipe directory {path:?}")]
    PipeTaken {
        /// The pipe directory.
        path: PathBuf,
        /// Its owner, as far as known.
        owner: String,
    },
    /// Something that is not a socket stands where the socket must be.
    #[error("{path:?} is in the way: it is {what}, not a socket")]
    PipeBlocked {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The control program did not start the daemon.
    #[error("nvidia-cuda-mps-control did not start the daemon")]
    LaunchFailed {
        /// What it said, or why it could not be called.
        cause: String,
        /// New lines of control.log.
        log: Option<String>,
        /// The log directory.
        log_directory: PathBuf,
    },
    /// The daemon did not become ready.
    #[error("the control daemon in {pipe:?} did not become ready within {seconds} s")]
    NotReady {
        /// The pipe directory.
        pipe: PathBuf,
        /// How long we waited.
        seconds: u64,
        /// What was seen last.
        cause: String,
        /// New lines of control.log.
        log: Option<String>,
        /// The log directory.
        log_directory: PathBuf,
    },
    /// `start` failed and what it launched could not be ended.
    #[error("{failure}; the daemon it launched (pid {pid}) is still running")]
    LeftRunning {
        /// Why `start` failed.
        failure: Box<Error>,
        /// What is running.
        pid: i32,
    },
    /// The foreground daemon ended before it was ready.
    #[error("the control daemon ended with status {status} before it was ready")]
    EndedEarly {
        /// As a shell reports it.
        status: u8,
    },
    /// A daemon did not become what was waited for.
    #[error("{0}")]
    InVain(InVain),
    /// A signal asked us to end.
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// The daemon does not answer.
    #[error("the daemon {name} (pid {pid}) does not answer")]
    NotAnswering {
        /// The daemon.
        name: DaemonName,
        /// Its pid.
        pid: i32,
        /// What was seen.
        cause: String,
        /// The process is stopped (state T) and would go on after SIGCONT.
        stopped: bool,
    },
    /// `quit` was answered with a refusal.
    #[error("the daemon {name} (pid {pid}) refused to quit")]
    QuitRefused {
        /// The daemon.
        name: DaemonName,
        /// Its pid.
        pid: i32,
        /// The answer.
        said: String,
    },
    /// Everything that may be done was done, and a process is still there.
    #[error("pid {pid} of daemon {name} is still running")]
    StillRunning {
        /// The daemon.
        name: DaemonName,
        /// The process: the daemon itself or one of its servers.
        pid: i32,
        /// Whether SIGKILL was tried.
        forced: bool,
    },
    /// A daemon's process was looked for and something else was found.
    #[error("it is not certain which process is the daemon in {pipe:?}")]
    Contradiction {
        /// The pipe directory.
        pipe: PathBuf,
        /// What was found.
        found: String,
    },
    /// The process could not be signalled.
    #[error("cannot end pid {pid}")]
    Signal {
        /// The process.
        pid: i32,
        /// The system's reason.
        source: io::Error,
    },
}

fn list<T: ToString>(items: &[T]) -> String {
    items
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

fn with_log(cause: &str, log: Option<&String>) -> String {
    match log {
        Some(log) if cause.is_empty() => format!("control.log says:\n{log}"),
        Some(log) => format!("{cause}\ncontrol.log says:\n{log}"),
        None => cause.to_owned(),
    }
}

impl Error {
    /// A short name that stays the same for good, for `--json`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Selection(failure) => failure.code(),
            Self::NvidiaSmi(SmiFailure::NotFound) => "nvidia-smi-not-found",
            Self::NvidiaSmi(SmiFailure::TimedOut { .. }) => "nvidia-smi-timed-out",
            Self::NvidiaSmi(_) => "nvidia-smi-failed",
            Self::Unmet(unmet) => unmet.code(),
            Self::BadManifest { .. } => "bad-manifest",
            Self::Name(_) => "bad-name",
            Self::NoRecord(_) => "no-record",
            Self::NoLiveDaemon => "no-live-daemon",
            Self::SeveralLive { .. } => "several-live",
            Self::CpuPlan { code, .. } => code,
            Self::NoCpuMask => "no-cpu-mask",
            Self::NotBound { .. } => "not-bound",
            Self::NoDaemonForGpu(_) => "no-daemon-for-gpu",
            Self::Rank(error) => error.code(),
            Self::CannotExecute { .. } => "cannot-execute",
            Self::NotStarted { .. } => "not-started",
            Self::NotAttached { .. } => "not-attached",
            Self::EndedUnattached { .. } => "ended-unattached",
            Self::Unwritable { .. } => "unwritable-value",
            Self::NoGithubEnv => "no-github-env",
            Self::Checkpoint(failure) => failure.code(),
            Self::Client(failure) => failure.code(),
            Self::Slurm(failure) => failure.code(),
            Self::Logs(failure) => failure.code(),
            Self::Limits(failure) => failure.code(),
            Self::DamagedRecord { .. } => "damaged-record",
            Self::OtherUser { .. } => "other-user",
            Self::OtherHost { .. } => "other-host",
            Self::OtherPidNamespace(_) => "other-pid-namespace",
            Self::Stale(_) => "stale",
            Self::StaleRemoved(_) => "stale-removed",
            Self::AlreadyLive { .. } => "already-live",
            Self::Unreachable { .. } => "unreachable",
            Self::GpuTaken { .. } => "gpu-taken",
            Self::ForOneDaemon(_) => "for-one-daemon",
            Self::ExclusiveMig => "exclusive-mig",
            Self::Busy { .. } => "busy",
            Self::NoHome { .. } => "no-home",
            Self::NoSuchUser(_) => "no-such-user",
            Self::NotUnicode(_) => "path-not-unicode",
            Self::SameDirectories(_) => "same-directories",
            Self::LogIsFifo(_) => "log-is-fifo",
            Self::PipeTooLong { .. } => "pipe-too-long",
            Self::UnsafeDirectory { .. } => "unsafe-directory",
            Self::File { .. } => "file",
            Self::NoProgram(_) => "no-program",
            Self::PipeTaken { .. } => "pipe-taken",
            Self::PipeBlocked { .. } => "pipe-blocked",
            Self::LaunchFailed { .. } => "launch-failed",
            Self::NotReady { .. } => "not-ready",
            Self::LeftRunning { .. } => "left-running",
            Self::EndedEarly { .. } => "ended-early",
            Self::InVain(_) => "timed-out",
            Self::Interrupted(_) => "interrupted",
            Self::NotAnswering { .. } => "not-answering",
            Self::QuitRefused { .. } => "quit-refused",
            Self::StillRunning { .. } => "still-running",
            Self::Contradiction { .. } => "contradiction",
            Self::Signal { .. } => "signal",
        }
    }

    /// Why it went wrong, where the sentence does not say so itself.
    pub fn cause(&self) -> Option<String> {
        match self {
            Self::Selection(failure) => failure.cause(),
            Self::NvidiaSmi(failure) => Some(failure.to_string()),
            Self::Unmet(_) => None,
            Self::InVain(wait) => Some(wait.seen.clone()),
            Self::Checkpoint(failure) => failure.cause(),
            Self::Client(failure) => failure.cause(),
            Self::Slurm(failure) => failure.cause(),
            Self::Logs(failure) => failure.cause(),
            Self::Limits(failure) => failure.cause(),
            Self::BadManifest { reason, .. } => Some(reason.clone()),
            Self::Name(_) => {
                Some("a name is 1 to 64 of a-z, 0-9 and -, not starting with -".into())
            }
            Self::NoRecord(_)
            | Self::NoLiveDaemon
            | Self::SeveralLive { .. }
            | Self::OtherUser { .. }
            | Self::Stale(_)
            | Self::StaleRemoved(_)
            | Self::AlreadyLive { .. }
            | Self::NoSuchUser(_)
            | Self::NoDaemonForGpu(_)
            | Self::ForOneDaemon(_)
            | Self::ExclusiveMig
            | Self::CpuPlan { .. }
            | Self::NoCpuMask
            | Self::Rank(_)
            | Self::NoGithubEnv
            | Self::Interrupted(_)
            | Self::EndedEarly { .. } => None,
            Self::OtherHost { .. } => {
                Some("from here it cannot be told whether it still runs".into())
            }
            Self::OtherPidNamespace(_) => Some("its pid means nothing here".into()),
            Self::Unwritable { holds, .. } => Some(format!("its value holds {holds}")),
            Self::DamagedRecord { path, reason, .. } => Some(format!("{path:?}: {reason}")),
            Self::Unreachable { found, .. } => Some(found.clone()),
            Self::GpuTaken { .. } => {
                Some("two MPS servers on one GPU share it by time slices, which defeats MPS".into())
            }
            Self::Busy { lock, pid } => Some(match pid {
                Some(pid) => format!("pid {pid} holds {lock:?}"),
                None => format!("{lock:?} is held"),
            }),
            Self::NoHome { reason } => Some(reason.clone()),
            Self::NotUnicode(_) => Some("a record is JSON and can only hold UTF-8".into()),
            Self::SameDirectories(path) => Some(format!("both are {path:?}")),
            Self::LogIsFifo(path) => Some(format!(
                "the daemon makes its FIFO at {path:?} and would log nothing"
            )),
            Self::PipeTooLong { path, .. } => Some(format!("{path:?}")),
            Self::UnsafeDirectory { reason, .. } => Some(reason.clone()),
            Self::File { source, .. } | Self::Signal { source, .. } => Some(source.to_string()),
            Self::NotBound { reason } => Some(reason.clone()),
            Self::CannotExecute { file, source, .. } => Some(match (source.kind(), file) {
                (io::ErrorKind::NotFound, Some(file)) => {
                    format!("{file:?} names an interpreter that is not there")
                }
                _ => source.to_string(),
            }),
            Self::NotStarted { source } => Some(source.to_string()),
            Self::NotAttached { causes, .. } => Some(causes.join("\n")),
            Self::EndedUnattached { .. } => Some(
                "it does not use CUDA, used it only between two looks, or ran without MPS"
                    .to_owned(),
            ),
            Self::NoProgram(_) => None,
            Self::PipeTaken { owner, .. } => Some(owner.clone()),
            Self::PipeBlocked { .. } => None,
            Self::LaunchFailed { cause, log, .. } | Self::NotReady { cause, log, .. } => {
                Some(with_log(cause, log.as_ref()))
            }
            Self::LeftRunning { failure, .. } => failure.cause(),
            Self::NotAnswering { cause, .. } => Some(cause.clone()),
            Self::QuitRefused { said, .. } => Some(format!("it answered: {said}")),
            Self::StillRunning { forced: false, .. } => Some("SIGTERM did not end it".into()),
            Self::StillRunning { forced: true, .. } => Some(
                "SIGKILL did not end it: it hangs in the kernel, as with a wedged driver".into(),
            ),
            Self::Contradiction { found, .. } => Some(found.clone()),
        }
    }

    /// What to type or to do next.
    pub fn hint(&self) -> String {
        match self {
            Self::Selection(failure) => failure.hint(),
            Self::NvidiaSmi(failure) => failure.hint(),
            Self::Unmet(unmet) => unmet.hint(),
            Self::InVain(wait) => wait.remedy.clone(),
            Self::Checkpoint(failure) => failure.hint(),
            Self::Client(failure) => failure.hint(),
            Self::Slurm(failure) => failure.hint(),
            Self::Logs(failure) => failure.hint(),
            Self::Limits(failure) => failure.hint(),
            Self::BadManifest { path, .. } => format!("python3 -m json.tool {}", quote_path(path)),
            Self::Name(_) => "--name my-job".into(),
            Self::NoRecord(_) => "uni-cumps status lists the recorded daemons".into(),
            Self::NoLiveDaemon => "uni-cumps start".into(),
            Self::SeveralLive { names } => match names.first() {
                Some(name) => format!("--name {name}"),
                None => "uni-cumps status".into(),
            },
            Self::CpuPlan { hint, .. } => hint.clone(),
            Self::NoCpuMask => "--mask 0-7, with the CPUs of the machine".into(),
            Self::NotBound { .. } => "uni-cumps cpus shows what may be used; without --strict-cpus it runs unbound".into(),
            Self::NoDaemonForGpu(gpu) => format!("uni-cumps start --gpus {gpu}"),
            Self::Rank(error) => error.hint(),
            Self::CannotExecute { program, .. } if is_assignment(&program.to_string_lossy()) => {
                format!("to set a variable: uni-cumps run -- env {} …", quote_path(program))
            }
            Self::CannotExecute { program, .. } if program.components().count() > 1 => {
                format!("ls -l {}", quote_path(program))
            }
            Self::CannotExecute { program, .. } => format!("command -v {}", quote_path(program)),
            Self::NotStarted { .. } => "without --require-mps the program takes uni-cumps' place".into(),
            Self::NotAttached { remedy, .. } => remedy.clone(),
            Self::EndedUnattached { .. } => {
                "for a program without CUDA, leave --require-mps out; otherwise: uni-cumps doctor".into()
            }
            Self::Unwritable { .. } => {
                "give the daemon plainer directories with start --pipe-dir and --log-dir, or use uni-cumps run"
                    .into()
            }
            Self::NoGithubEnv => {
                "--format github is for a step of a GitHub Actions job; elsewhere: --format shell".into()
            }
            Self::DamagedRecord { path, .. } => {
                format!(
                    "uni-cumps start replaces it once no daemon runs there; to remove it: rm -ri {}",
                    quote_path(path.parent().unwrap_or(path))
                )
            }
            Self::OtherUser { .. } => "use another --name, or your own HOME".into(),
            Self::OtherHost { directory, .. } => format!(
                "use another --name here; if that host or container is gone: rm -r {}",
                quote_path(directory)
            ),
            Self::OtherPidNamespace(_) => {
                "run the command where the daemon was started, or use another --name".into()
            }
            Self::Stale(name) => format!("uni-cumps start --name {name}"),
            Self::StaleRemoved(name) => {
                format!("nothing is left to stop; to start again: uni-cumps start --name {name}")
            }
            Self::AlreadyLive { name, .. } => {
                format!(
                    "eval \"$(uni-cumps env --name {name})\", or first uni-cumps stop --name {name}"
                )
            }
            Self::Unreachable { name, .. } => format!("uni-cumps stop --name {name}"),
            Self::GpuTaken { by, .. } => {
                format!(
                    "eval \"$(uni-cumps env --name {by})\", or first uni-cumps stop --name {by}"
                )
            }
            Self::ForOneDaemon(_) => {
                "leave out --name, --pipe-dir, --log-dir and --foreground, or start one daemon over all of them: --topology single_task_multi_gpu"
                    .into()
            }
            Self::ExclusiveMig => "leave out --exclusive".into(),
            Self::Busy { pid: Some(pid), .. } => format!("wait, or see what it does: ps -fp {pid}"),
            Self::Busy { pid: None, .. } => "wait and try again".into(),
            Self::NoHome { .. } => "HOME=/some/directory uni-cumps …".into(),
            Self::NoSuchUser(_) => "write the directory's absolute path".into(),
            Self::NotUnicode(_) | Self::SameDirectories(_) | Self::LogIsFifo(_) => {
                "give other directories with --pipe-dir and --log-dir".into()
            }
            Self::PipeTooLong { shorter, .. } => format!("--pipe-dir {}", quote_path(shorter)),
            Self::UnsafeDirectory { remedy, .. } => remedy.clone(),
            Self::File { path, source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    format!("make room: df -h {}", quote_path(path.parent().unwrap_or(path)))
                }
                _ => format!("ls -ld {}", quote_path(path.parent().unwrap_or(path))),
            },
            Self::NoProgram(program) => format!(
                "install it (Debian: apt install nvidia-cuda-mps), or add its directory to PATH: command -v {program}"
            ),
            Self::PipeTaken { path, .. } => format!(
                "choose another --pipe-dir, or end that daemon: echo quit | CUDA_MPS_PIPE_DIRECTORY={} nvidia-cuda-mps-control",
                quote_path(path)
            ),
            Self::PipeBlocked { path, .. } => {
                format!("move it away: mv {0} {0}.old", quote_path(path))
            }
            Self::LaunchFailed { log_directory, .. } | Self::NotReady { log_directory, .. } => {
                format!("tail {}", quote_path(&log_directory.join("control.log")))
            }
            Self::LeftRunning { pid, .. } => format!("kill {pid}"),
            Self::EndedEarly { .. } => "its own messages stand above".into(),
            Self::Interrupted(_) => "see how things stand: uni-cumps status".into(),
            Self::NotAnswering {
                pid, stopped: true, ..
            } => format!("let it go on with kill -CONT {pid}, or add --force to end it"),
            Self::NotAnswering { name, .. } => {
                format!(
                    "a connected client that stays silent blocks it; end that, then uni-cumps stop --name {name}"
                )
            }
            Self::QuitRefused { name, .. } => {
                format!("run as its owner: uni-cumps stop --name {name}")
            }
            Self::StillRunning {
                name,
                forced: false,
                ..
            } => {
                format!("uni-cumps stop --name {name} --force")
            }
            Self::StillRunning {
                pid, forced: true, ..
            } => format!("ps -fp {pid}"),
            Self::Contradiction { .. } => {
                "uni-cumps status, and end by hand what should not be there".into()
            }
            Self::Signal { pid, .. } => format!("ps -fp {pid}"),
        }
    }
}
