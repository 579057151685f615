//! The command line as types. Their doc comments are the help text.

mod checkpoint;
mod clients;
mod lazy;
mod limits;
mod logs;
mod slurm;
mod wait;

use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, ValueHint};

use crate::cpus::{CpuSet, Setting};
use crate::env_file::Format;
use crate::gpu::{PciAddress, PciAddressError};
use crate::limits::{MemoryLimit, Priority, ThreadPercentage};
use crate::record::TopologyMode;
use crate::shell::Shell;

pub use checkpoint::{CallArgs, CheckpointArgs, CheckpointVerb, Target};
pub use clients::ClientsArgs;
pub use lazy::Lazy;
pub use limits::{LimitsArgs, StartLimits};
pub use logs::{Lines, LogsArgs};
pub use slurm::{AsUserArgs, STATE_DIRECTORY, SlurmArgs, SlurmHook};
pub use wait::{Condition, WaitArgs};

/// The name of the program, by which shells find what completes its command line.
pub const PROGRAM: &str = "uni-cumps";
/// The variable through which a shell asks for candidates; its value is the shell's name. `COMPLETE`, which other
/// programs take, may be set for them.
pub const COMPLETE: &str = "UNI_CUMPS_COMPLETE";

/// The name by which the binary calls itself for one checkpoint call of the CUDA driver.
pub const CALL_COMMAND: &str = "call-cuda-driver";
/// The name by which the binary calls itself to look at the CUDA driver.
pub const LOOK_COMMAND: &str = "look-at-cuda-driver";
/// The name by which the binary calls itself to do something as another user.
pub const AS_USER_COMMAND: &str = "as-user";
/// The option that makes the look go through the control daemon, with a context.
pub const THROUGH_DAEMON: &str = "--through-daemon";

/// Share an NVIDIA GPU between processes with CUDA MPS.
///
/// Typical use:  uni-cumps start; eval "$(uni-cumps env)"; python train.py; uni-cumps stop
#[derive(Debug, Parser)]
#[command(
    name = PROGRAM,
    version,
    infer_long_args = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What is shown besides the command's own output.
    #[command(flatten)]
    pub show: Show,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Reads a command line, and refuses options that make no sense together.
    pub fn read(args: Vec<OsString>) -> Result<Self, clap::Error> {
        // Never taken apart: that would cost half as much as all that `env` does, and the process ends.
        let mut tree = ManuallyDrop::new(Self::command());
        let mut matches = tree.try_get_matches_from_mut(args)?;
        let cli = Self::from_arg_matches_mut(&mut matches);
        let cli = cli.map_err(|error| error.format(&mut tree))?;
        match cli.conflict() {
            None => Ok(cli),
            Some((verb, message)) => Err(match tree.find_subcommand_mut(verb) {
                Some(command) => command.error(ErrorKind::ArgumentConflict, message),
                None => tree.error(ErrorKind::ArgumentConflict, message),
            }),
        }
    }

    /// Every verb with all its options, for who shows the command line.
    pub fn whole() -> clap::Command {
        let mut tree = Self::command();
        tree.build();
        tree
    }

    /// What is wrong with the options of a verb together.
    fn conflict(&self) -> Option<(&'static str, &'static str)> {
        match &self.command {
            Command::Env(args) => args.conflict().map(|message| ("env", message)),
            Command::Run(args) => args.conflict().map(|message| ("run", message)),
            _ => None,
        }
    }
}

/// Options of every command.
#[derive(Debug, Args)]
pub struct Show {
    /// Trace each program call on standard error, with its time
    #[arg(short, long, global = true, display_order = 100)]
    pub verbose: bool,
    /// Leave the notes out; failures are still told
    #[arg(short, long, global = true, display_order = 101)]
    pub quiet: bool,
    /// When to use colours
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        display_order = 102
    )]
    pub color: When,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// On a terminal, unless NO_COLOR or TERM=dumb says otherwise
    Auto,
    /// Everywhere
    Always,
    /// Nowhere
    Never,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the machine's GPUs and the recorded daemons; changes nothing
    Status(Lazy<StatusArgs>),
    /// Check a GPU's daemon and say what is wrong; changes nothing
    Doctor(Lazy<DoctorArgs>),
    /// Start a control daemon of your own and record it
    Start(Lazy<StartArgs>),
    /// Stop a recorded daemon
    Stop(Lazy<StopArgs>),
    /// Print the environment of a recorded daemon's clients
    Env(Lazy<EnvArgs>),
    /// Run a program as a client of a recorded daemon
    Run(Lazy<RunArgs>),
    /// Show or set what the programs of a daemon may use
    Limits(Lazy<LimitsArgs>),
    /// Show who is on the GPUs through your daemons, and end a client safely
    #[command(visible_alias = "ps")]
    Clients(Lazy<ClientsArgs>),
    /// Wait until a daemon is ready, has clients, has none, or is gone; changes nothing
    Wait(Lazy<WaitArgs>),
    /// Show which CPUs the processes of each GPU should use; changes nothing
    Cpus(Lazy<CpusArgs>),
    /// Suspend CUDA processes into host memory, and bring them back on the same or another GPU
    Checkpoint(Lazy<CheckpointArgs>),
    /// Show what a daemon and its servers have logged
    Logs(Lazy<LogsArgs>),
    /// Share GPUs on a Slurm cluster: the hooks of its nodes
    Slurm(Lazy<SlurmArgs>),
    /// Remove what daemons that are gone have left behind
    Prune(Lazy<PruneArgs>),
    /// Prove that a learner and a collector share one GPU through MPS; changes nothing
    Validate(Lazy<ValidateArgs>),
    /// Print CUDA_VISIBLE_DEVICES with indices replaced by UUIDs
    Visibility(Lazy<VisibilityArgs>),
    /// Print a script that lets a shell complete commands, flags, paths and the names of daemons
    Completions(Lazy<CompletionsArgs>),
    /// Print the manual page; to read it: uni-cumps man | man -l -
    Man,
    /// What `doctor` and `validate` run in a child process
    #[command(name = LOOK_COMMAND, hide = true)]
    Look(Lazy<LookArgs>),
    /// What `checkpoint` runs in a child process
    #[command(name = CALL_COMMAND, hide = true)]
    Call(Lazy<CallArgs>),
    /// What a hook of `slurm` runs as a job's user
    #[command(name = AS_USER_COMMAND, hide = true)]
    AsUser(Lazy<AsUserArgs>),
}

/// `status`
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Look again and again, every 2 s if it is left out, until q or Ctrl-C; with --json one line for each look
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2",
        value_parser = pause
    )]
    pub watch: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `doctor`
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The GPU, or the GPUs of one daemon: nvidia-smi's indices or UUIDs [default: the only visible GPU]
    #[arg(long, alias = "gpu", value_name = "GPU", allow_negative_numbers = true)]
    pub gpus: Option<String>,
    /// The daemon's label; its GPUs are meant
    #[arg(long, conflicts_with = "gpus")]
    pub name: Option<String>,
    /// Also initialise CUDA through the daemon, in a child process, and be seen among its clients
    #[arg(long)]
    pub probe: bool,
    /// Run only this check (repeatable)
    #[arg(long, value_name = "ID", value_parser = clap::builder::PossibleValuesParser::new(CHECK_IDS))]
    pub only: Vec<String>,
    /// Leave this check out (repeatable)
    #[arg(long, value_name = "ID", value_parser = clap::builder::PossibleValuesParser::new(CHECK_IDS))]
    pub skip: Vec<String>,
    /// Instead: write what the checks look at into this new directory, names replaced, for a bug report
    #[arg(long, value_name = "DIR", value_parser = directory(), value_hint = ValueHint::DirPath)]
    pub capture: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// The ids of `doctor`'s checks, in their order.
pub const CHECK_IDS: [&str; 25] = [
    "platform",
    "nvidia-smi",
    "driver",
    "cuda-driver",
    "gpus",
    "compute-mode",
    "mig",
    "control-program",
    "server-program",
    "selection",
    "record",
    "identity",
    "pipe-directory",
    "socket",
    "answer",
    "log-directory",
    "variables",
    "mask",
    "default-pipe",
    "other-daemons",
    "clients",
    "logs",
    "shared-memory",
    "affinity",
    "probe",
];

/// `start`
#[derive(Debug, Args)]
pub struct StartArgs {
    /// GPUs as nvidia-smi's indices or UUIDs: one, several for one daemon over all of them, or all for a daemon for each
    /// that is visible; MIG-UUID for a MIG instance [default: the only visible GPU]
    #[arg(
        long,
        alias = "gpu",
        value_name = "GPUS",
        allow_negative_numbers = true
    )]
    pub gpus: Option<String>,
    /// How the GPUs are used, where --gpus alone means something else
    #[arg(long, value_enum)]
    pub topology: Option<TopologyMode>,
    /// The daemon's label [default: gpu- and the GPU's complete UUID]
    #[arg(long)]
    pub name: Option<String>,
    /// The pipe directory, at most 87 bytes [default: $TMPDIR/uni-cumps/NAME/pipe]
    #[arg(long, value_name = "DIR", value_parser = directory(), value_hint = ValueHint::DirPath)]
    pub pipe_dir: Option<PathBuf>,
    /// The log directory [default: $TMPDIR/uni-cumps/NAME/log]
    #[arg(long, value_name = "DIR", value_parser = directory(), value_hint = ValueHint::DirPath)]
    pub log_dir: Option<PathBuf>,
    /// Detach the daemon (this is the default)
    #[arg(long, conflicts_with = "foreground")]
    pub daemon: bool,
    /// Stay with the daemon until it ends: for systemd and containers. Its log goes to stderr
    #[arg(long)]
    pub foreground: bool,
    /// What each program may use.
    #[command(flatten)]
    pub limits: StartLimits,
    /// Start even if another daemon of yours serves the GPU: their servers take turns on it, which defeats MPS
    #[arg(long)]
    pub force: bool,
    /// Let nobody but the daemon's server compute on the GPUs (EXCLUSIVE_PROCESS) until it is stopped; takes an
    /// administrator
    #[arg(long)]
    pub exclusive: bool,
    /// Only show the program calls, ready to paste; nothing is touched
    #[arg(long)]
    pub dry_run: bool,
}

/// Which recorded daemon is meant.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The daemon's label [default: the only live daemon]
    #[arg(long)]
    pub name: Option<String>,
    /// The daemon that serves this GPU: nvidia-smi's index or a UUID
    #[arg(
        long,
        alias = "gpus",
        value_name = "GPU",
        allow_negative_numbers = true,
        conflicts_with = "name"
    )]
    pub gpu: Option<String>,
}

/// `stop`
#[derive(Debug, Args)]
pub struct StopArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Stop all your recorded daemons on this machine
    #[arg(long, conflicts_with_all = ["name", "gpu"])]
    pub all: bool,
    /// First wait until no client is left, at most this long. New ones are still served meanwhile, and until it is over
    /// nothing is stopped
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub drain: Option<u64>,
    /// How long a daemon may wait for its clients to end. Then they are cut off, and a daemon that is still there gets
    /// SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub timeout: u64,
    /// In the end use SIGKILL, also for a frozen daemon or one that refuses: work in flight may leave the GPU undefined
    #[arg(long)]
    pub force: bool,
}

/// `env`
#[derive(Debug, Args)]
pub struct EnvArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// The daemon of this process's rank among those of its node, as torchrun, srun or mpirun tell it
    #[arg(long, conflicts_with_all = ["name", "gpu"])]
    pub by_rank: bool,
    /// The shell to print for [default: posix]
    #[arg(long, value_enum)]
    pub shell: Option<Shell>,
    /// The form to print in [default: shell]
    #[arg(long, value_enum)]
    pub format: Option<Format>,
    /// Print what takes the variables away again; needs no daemon
    #[arg(long, conflicts_with_all = ["name", "gpu", "by_rank"])]
    pub unset: bool,
    /// Print JSON, as --format json does
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
}

impl EnvArgs {
    /// The form that is meant.
    pub fn form(&self) -> Format {
        match self.json {
            true => Format::Json,
            false => self.format.unwrap_or(Format::Shell),
        }
    }

    /// What is wrong with the options together.
    fn conflict(&self) -> Option<&'static str> {
        if self.shell.is_some() && self.format.is_some_and(|form| form != Format::Shell) {
            return Some("--shell goes with --format shell only");
        }
        let can_unset = matches!(self.form(), Format::Shell | Format::Json | Format::Systemd);
        (self.unset && !can_unset).then_some(
            "--unset goes with --format shell, json or systemd: the other forms can set a variable to nothing, which hides every GPU, but cannot take it away",
        )
    }
}

/// `run`
#[derive(Debug, Args)]
#[command(override_usage = "uni-cumps run [OPTIONS] -- <CMD>...")]
pub struct RunArgs {
    /// Which daemon.
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// The daemon of this process's rank among those of its node, as torchrun, srun or mpirun tell it
    #[arg(long, conflicts_with_all = ["name", "gpu", "start"])]
    pub by_rank: bool,
    /// The most of the GPU's threads that the program may occupy, in percent: 1 to 100
    #[arg(long, value_name = "PCT")]
    pub threads: Option<ThreadPercentage>,
    /// The most memory that the program may take on each GPU: a whole number with M, MB or MiB for 1048576 bytes, or G, GB
    /// or GiB for 1024 times as much
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<MemoryLimit>,
    /// Whose work goes first
    #[arg(long, value_enum)]
    pub priority: Option<Priority>,
    /// Stay with the program, and end it with status 125 unless one of its processes is seen as a client of the daemon
    /// within this time, 30 s if it is left out; a program that ends before with 0 gets 125 as well
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "30",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub require_mps: Option<u64>,
    /// Start the daemon if it is not live
    #[arg(long)]
    pub start: bool,
    /// Likewise, and end it with the last program on this node that was run like this; for all ranks of a job alike
    #[arg(long, conflicts_with_all = ["start", "by_rank"])]
    pub per_node: bool,
    /// Bind the program to CPUs: its share of those near its GPU (auto), all of them (node), a list, or off
    #[arg(long, value_name = "auto|node|off|LIST", default_value = "off")]
    pub cpus: CpuChoice,
    /// With --cpus auto: claim the GPU by the lock PREFIX-ADDR.lock, as another program does it [default: a lock of ours
    /// for each client]
    #[arg(long, value_name = "PREFIX", value_parser = directory(), value_hint = ValueHint::FilePath)]
    pub lock_prefix: Option<PathBuf>,
    /// Fail if the program cannot be bound, rather than run it unbound
    #[arg(long)]
    pub strict_cpus: bool,
    /// Only show the program calls, ready to paste; nothing is touched
    #[arg(long)]
    pub dry_run: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

impl RunArgs {
    /// What is wrong with the options together.
    fn conflict(&self) -> Option<&'static str> {
        let claims = self.cpus == CpuChoice::To(Cpus::Auto);
        (self.lock_prefix.is_some() && !claims)
            .then_some("--lock-prefix goes with --cpus auto only")
    }
}

/// `cpus`
#[derive(Debug, Args)]
pub struct CpusArgs {
    /// The GPUs of the workers: nvidia-smi's indices or UUIDs, or all [default: the visible ones]
    #[arg(long, value_name = "GPUS", allow_negative_numbers = true)]
    pub gpus: Option<String>,
    /// Where workers run: auto (by the place of their GPU), off, or the CPU of the first one
    #[arg(long, value_name = "auto|off|N", default_value = "auto")]
    pub core: Setting,
    /// How many workers each GPU has
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: u16,
    /// Plan for the machine whose /sys and /proc lie in this directory, as a capture of doctor holds them
    #[arg(long, value_name = "DIR", value_parser = directory(), value_hint = ValueHint::DirPath, conflicts_with = "gpus")]
    pub root: Option<PathBuf>,
    /// Plan for a process that may use these CPUs, such as 0-7,16-23
    #[arg(long, value_name = "LIST", value_parser = mask)]
    pub mask: Option<CpuSet>,
    /// Plan for a process that a cgroup lets use this many CPUs, such as 2.5
    #[arg(long, value_name = "CPUS", value_parser = quota)]
    pub quota: Option<f64>,
    /// The PCI address of a worker's GPU, or - for a worker without one; repeatable, in the order of the workers
    #[arg(
        long,
        value_name = "ADDR",
        allow_hyphen_values = true,
        conflicts_with = "gpus"
    )]
    pub device: Vec<Device>,
    /// Look at the locks PREFIX-ADDR.lock, as another program makes them [default: our own]
    #[arg(long, value_name = "PREFIX", value_parser = directory(), value_hint = ValueHint::FilePath, conflicts_with = "root")]
    pub lock_prefix: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A worker's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(pub Option<PciAddress>);

impl FromStr for Device {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        match text {
            "-" => Ok(Self(None)),
            address => Ok(Self(Some(address.parse()?))),
        }
    }
}

/// A list of CPUs that are some: no process may use none.
fn mask(text: &str) -> Result<CpuSet, String> {
    match text.parse::<CpuSet>() {
        Ok(cpus) if cpus.is_empty() => Err("it names no CPU".to_owned()),
        Ok(cpus) => Ok(cpus),
        Err(error) => Err(error.to_string()),
    }
}

/// The time between two looks.
fn pause(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (0.5..=3600.0).contains(seconds));
    let seconds =
        seconds.ok_or_else(|| "it must be a number of seconds from 0.5 to 3600".to_owned());
    Ok(Duration::from_secs_f64(seconds?))
}

/// A quota in CPUs.
fn quota(text: &str) -> Result<f64, String> {
    let quota = text
        .parse()
        .ok()
        .filter(|quota: &f64| quota.is_finite() && *quota > 0.0);
    quota.ok_or_else(|| "it must be a number above 0, such as 2.5".to_owned())
}

/// Whether and to which CPUs `run` binds a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CpuChoice {
    /// It stays as the caller is bound.
    Off,
    /// It is bound to these.
    To(Cpus),
}

/// The CPUs that `run` binds a program to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cpus {
    /// The program's share of the CPUs near its GPU.
    Auto,
    /// All CPUs near its GPU.
    Node,
    /// These.
    List(CpuSet),
}

impl FromStr for CpuChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::To(Cpus::Auto)),
            "node" => Ok(Self::To(Cpus::Node)),
            "off" => Ok(Self::Off),
            list => match list.parse::<CpuSet>() {
                Ok(cpus) if !cpus.is_empty() => Ok(Self::To(Cpus::List(cpus))),
                _ => {
                    Err("it must be auto, node, off or a list of CPUs such as 0-7,16-23".to_owned())
                }
            },
        }
    }
}

/// `prune`
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Only say what would be removed
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `validate`
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// The learner's CUDA device
    #[arg(long, value_name = "DEVICE", default_value = "cuda:0")]
    pub learner: String,
    /// The collector's CUDA device
    #[arg(long, value_name = "DEVICE")]
    pub collector: Option<String>,
    /// The simulation backend
    #[arg(long, required_unless_present = "pids")]
    pub backend: Option<String>,
    /// This process's rank
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub rank: i64,
    /// How many ranks there are
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub world_size: i64,
    /// `mps` fails at the first prerequisite that is not met; `none` only looks and never fails
    #[arg(long, value_enum, ignore_case = true, default_value = "mps")]
    pub mode: SharingMode,
    /// Merge the evidence into this JSON file under `cuda_process_sharing`
    #[arg(long, value_name = "FILE", value_parser = directory(), value_hint = ValueHint::FilePath)]
    pub manifest: Option<PathBuf>,
    /// Instead: are these two running processes clients of one server? Give it twice
    #[arg(long = "pid", value_name = "PID", id = "pids", num_args = 1,
          conflicts_with_all = ["learner", "collector", "backend", "rank", "world_size", "mode", "manifest"])]
    pub pids: Vec<i32>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What a training run asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SharingMode {
    /// MPS, or failure.
    Mps,
    /// Whatever is there.
    None,
}

/// `visibility`
#[derive(Debug, Args)]
pub struct VisibilityArgs {
    /// The list [default: CUDA_VISIBLE_DEVICES]
    #[arg(allow_hyphen_values = true)]
    pub list: Option<String>,
}

/// `completions`
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell, and how it reads the script whenever it starts
    #[arg(value_enum)]
    pub shell: CompletionShell,
}

/// Shells that complete the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompletionShell {
    /// In ~/.bashrc: source <(uni-cumps completions bash)
    Bash,
    /// In ~/.zshrc, after compinit: source <(uni-cumps completions zsh)
    Zsh,
    /// In ~/.config/fish/completions/uni-cumps.fish: uni-cumps completions fish | source
    Fish,
    /// In ~/.config/elvish/rc.elv: eval (uni-cumps completions elvish | slurp)
    Elvish,
    /// In $PROFILE: uni-cumps completions powershell | Out-String | Invoke-Expression
    Powershell,
}

/// The hidden command.
#[derive(Debug, Args)]
pub struct LookArgs {
    /// Through the control daemon, with a context
    #[arg(long)]
    pub through_daemon: bool,
}

/// A path that is not empty: an empty one would mean the working directory.
fn directory() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|value| {
        if value.is_empty() {
            Err("the path is empty")
        } else {
            Ok(PathBuf::from(value))
        }
    })
}
