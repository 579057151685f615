//! The map of uni-cumps. Every command gathers facts, decides with a pure function, does the few effects and shows a
//! report. Each row imports only from the rows above it; `tests/architecture.rs` holds this.
//!
//! | row | files | what they know |
//! |---|---|---|
//! | values | `gpu` `record` `limits` `rank` `shell` `env_file` `checkpoint` `log_line` | GPU UUIDs and selectors; daemon records and names; limits of clients; a launcher's ranks; quoting; variables for launchers; states, GPU maps and blockers of a checkpoint; lines of the logs |
//! | failures | `error` | everything that can go wrong, with its code and its hint |
//! | seam | `runner` `host` | calling programs; the file tree, the environment and the clock |
//! | plans | `topology` `sharing` `cpus` | which GPU a selector and a mask mean; what proof of sharing takes; which CPUs are whose; pure |
//! | surface | `cli` `ui` | the command line; everything that is printed |
//! | services | `process` `local_time` `runtime_dir` `store` `manifest` `nvidia_smi` `kernel_module` `compute_mode` `mps` `driver` `daemon` `server_limits` `launch` `diagnosis` `attachment` `per_node` `capture` `cpu_topology` `claims` `binding` `suspension` `census` `slurm` `terminal` | processes and signals; the clock on the wall; private directories; records on disk; a run's manifest; NVIDIA's two programs, its kernel module and libcuda, and exclusive GPUs; a recorded daemon's state; the limits of its servers; bringing one up; what doctor finds and captures; whether a program is a client; who of a node shares one; the machine's CPUs and their quota; claims on GPUs; binding to CPUs; taking processes off their GPUs and back; who is on the GPUs, and how one of them is let go; jobs of a cluster and their daemons; keys, size and signals of a terminal |
//! | commands | `command` | one verb a file; they never import one another |

pub mod attachment;
pub mod binding;
pub mod capture;
pub mod census;
pub mod checkpoint;
pub mod claims;
pub mod cli;
pub mod command;
pub mod compute_mode;
pub mod cpu_topology;
pub mod cpus;
pub mod daemon;
pub mod diagnosis;
pub mod driver;
pub mod env_file;
pub mod error;
pub mod gpu;
pub mod host;
pub mod kernel_module;
pub mod launch;
pub mod limits;
pub mod local_time;
pub mod log_line;
pub mod manifest;
pub mod mps;
pub mod nvidia_smi;
pub mod per_node;
pub mod process;
pub mod rank;
pub mod record;
pub mod runner;
pub mod runtime_dir;
pub mod server_limits;
pub mod sharing;
pub mod shell;
pub mod slurm;
pub mod store;
pub mod suspension;
pub mod terminal;
pub mod topology;
pub mod ui;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

pub use host::Host;
pub use ui::Ui;

/// Whether the environment allows colours on a terminal: `NO_COLOR` (no-color.org) is not set and `TERM` is not `dumb`.
pub fn wants_color(host: &Host) -> bool {
    let dumb = host.env.get("TERM").is_some_and(|term| term == "dumb");
    host.env.get_filled("NO_COLOR").is_none() && !dumb
}

/// Runs the command line `args`, its first word being the program's name, and returns its exit status: 0 done,
/// 1 failed, 2 not understood, 128 and the signal's number when interrupted.
pub fn run(args: impl IntoIterator<Item = OsString>, host: Host, ui: &mut Ui<'_>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let status = match command::question(&host, &args) {
        Some(question) => {
            command::answer(&host, ui, question);
            0
        }
        None => obey(args, host, ui),
    };
    match ui.delivered() {
        true => ExitCode::from(status),
        false => ExitCode::FAILURE,
    }
}

fn obey(args: Vec<OsString>, mut host: Host, ui: &mut Ui<'_>) -> u8 {
    match cli::Cli::read(args) {
        Ok(cli) => {
            ui.show(&cli.show);
            if cli.show.verbose {
                host.runner = Arc::new(ui::Traced(host.runner));
            }
            command::run(&host, ui, &cli.command)
        }
        Err(error) => {
            ui.usage(&error);
            u8::try_from(error.exit_code()).unwrap_or(2)
        }
    }
}
