//! One verb a file. A command returns its exit status, or the failure that this file shows.

mod as_user;
mod call;
mod checkpoint;
mod clients;
mod completions;
mod cpus;
mod doctor;
mod env;
mod limits;
mod logs;
mod look;
mod man;
mod prune;
mod run;
mod slurm;
mod start;
mod status;
mod stop;
mod validate;
mod visibility;
mod wait;

pub use completions::{answer, question};

use crate::cli::Command;
use crate::env_file::Format;
use crate::error::{CheckpointFailure, Error, SmiFailure};
use crate::host::Host;
use crate::runner::hold_every_signal;
use crate::ui::Ui;

/// Runs one command and shows its failure.
pub fn run(host: &Host, ui: &mut Ui<'_>, command: &Command) -> u8 {
    // What became of processes is told before a signal has its effect.
    let _held = matches!(command, Command::Checkpoint(_)).then(hold_every_signal);
    let (result, json) = match command {
        Command::Run(args) => {
            return run::run(host, ui, args).unwrap_or_else(|error| {
                ui.failure(&error, false);
                run::exit_status(&error)
            });
        }
        Command::Cpus(args) => (cpus::run(host, ui, args), args.json),
        Command::Limits(args) => (limits::run(host, ui, args), args.json),
        Command::Status(args) => (status::run(host, ui, args), args.json),
        Command::Doctor(args) => (doctor::run(host, ui, args), args.json),
        Command::Start(args) => (start::run(host, ui, args), false),
        Command::Stop(args) => (stop::run(host, ui, args), false),
        Command::Env(args) => (env::run(host, ui, args), args.form() == Format::Json),
        Command::Clients(args) => (clients::run(host, ui, args), args.json),
        Command::Wait(args) => (wait::run(host, ui, args), args.json),
        Command::Checkpoint(args) => (checkpoint::run(host, ui, args), args.json),
        Command::Logs(args) => (logs::run(host, ui, args), args.json),
        Command::Slurm(args) => (slurm::run(host, ui, args), false),
        Command::Prune(args) => (prune::run(host, ui, args), args.json),
        Command::Validate(args) => (validate::run(host, ui, args), args.json),
        Command::Visibility(args) => (visibility::run(host, ui, args), false),
        Command::Completions(args) => (completions::run(ui, args), false),
        Command::Man => (man::run(ui), false),
        Command::Look(args) => (look::run(host, ui, args), false),
        Command::Call(args) => (call::run(host, ui, args), false),
        Command::AsUser(args) => (as_user::run(args), false),
    };
    result.unwrap_or_else(|error| {
        ui.failure(&error, json);
        exit_status(&error)
    })
}

fn exit_status(error: &Error) -> u8 {
    match error {
        Error::LeftRunning { failure, .. } => exit_status(failure),
        _ => interruption(error).unwrap_or(1),
    }
}

/// What a shell reports of a program that a signal ended, if one has ended ours.
fn interruption(error: &Error) -> Option<u8> {
    match error {
        Error::Interrupted(signal) | Error::NvidiaSmi(SmiFailure::Interrupted(signal)) => {
            u8::try_from(128 + signal).ok()
        }
        Error::Checkpoint(failure @ CheckpointFailure::Interrupted { signal, .. })
            if failure.left().next().is_none() =>
        {
            u8::try_from(128 + signal).ok()
        }
        _ => None,
    }
}
