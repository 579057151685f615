//! `start`: control daemons of the user's own, each recorded once it answers.

use serde_json::{Value, json};

use crate::cli::StartArgs;
use crate::error::Error;
use crate::host::Host;
use crate::launch::{Part, Request, Wanted};
use crate::record::{DaemonName, DaemonRecord};
use crate::ui::{Ui, error_json};

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StartArgs) -> Result<u8, Error> {
    let limits = args.limits.settings();
    let request = Request {
        gpus: args.gpus.as_deref(),
        topology: args.topology,
        name: args.name.as_deref(),
        pipe_dir: args.pipe_dir.as_deref(),
        log_dir: args.log_dir.as_deref(),
        limits: &limits,
        force: args.force,
        exclusive: args.exclusive,
    };
    if args.foreground {
        let wanted = Wanted::only(host, request)?;
        if args.dry_run {
            wanted.show(ui, true)?;
            return Ok(0);
        }
        let finished = wanted.foreground(ui, |ui, record| ui.json(&record.to_json()))?;
        return Ok(finished.status.shell_code());
    }
    let all = Wanted::of(host, request)?;
    if args.dry_run {
        return show(ui, all);
    }
    match all.as_slice() {
        [
            Part {
                wanted: Ok(wanted), ..
            },
        ] if !wanted.is_one_of_several() => one(ui, args, wanted),
        _ => set(ui, all),
    }
}

/// Shows each daemon that there would be. One that there cannot be is told, and keeps no other from being shown.
fn show(ui: &mut Ui<'_>, all: Vec<Part<'_>>) -> Result<u8, Error> {
    let mut status = 0;
    for part in all {
        let (is_one_of_several, shown) = match part.wanted {
            Ok(wanted) => (wanted.is_one_of_several(), show_one(ui, &wanted)),
            Err(error) => (true, Err(error)),
        };
        match shown {
            Ok(()) => {}
            Err(error) if is_one_of_several && !is_interruption(&error) => {
                failure(ui, part.name.as_ref(), &error);
                status = 1;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(status)
}

fn show_one(ui: &mut Ui<'_>, wanted: &Wanted<'_>) -> Result<(), Error> {
    if kept(ui, wanted, false)?.is_none() {
        wanted.show(ui, false)?;
    }
    Ok(())
}

/// Tells why one of several daemons cannot be, and which.
fn failure(ui: &mut Ui<'_>, name: Option<&DaemonName>, error: &Error) {
    ui.failure(error, false);
    if let Some(name) = name {
        ui.note(format!("so there is no daemon {name}"));
    }
}

fn is_interruption(error: &Error) -> bool {
    super::exit_status(error) > 128
}

/// The daemon that is there already, where a start may be repeated.
fn kept(ui: &mut Ui<'_>, wanted: &Wanted<'_>, is_new: bool) -> Result<Option<DaemonRecord>, Error> {
    let there = wanted.is_there()?;
    if let Some(record) = &there {
        ui.note(format!(
            "daemon {} (pid {}) is kept",
            record.name, record.process.pid
        ));
        for note in wanted.unlike(record, is_new) {
            ui.note(note);
        }
    }
    Ok(there)
}

/// A daemon that is up.
enum Up {
    Kept(DaemonRecord),
    Started(DaemonRecord),
}

fn bring_up(ui: &mut Ui<'_>, wanted: &Wanted<'_>) -> Result<Up, Error> {
    if let Some(record) = kept(ui, wanted, false)? {
        return Ok(Up::Kept(record));
    }
    match wanted.start(ui) {
        // Somebody who does the same at the same time was faster.
        Err(error @ Error::AlreadyLive { .. }) => {
            kept(ui, wanted, true)?.map(Up::Kept).ok_or(error)
        }
        started => started.map(Up::Started),
    }
}

fn one(ui: &mut Ui<'_>, args: &StartArgs, wanted: &Wanted<'_>) -> Result<u8, Error> {
    let (Up::Kept(record) | Up::Started(record)) = bring_up(ui, wanted)?;
    ui.json(&record.to_json());
    let name_option = match args.name {
        Some(_) => format!(" --name {}", record.name),
        None => String::new(),
    };
    ui.next_step(format!("eval \"$(uni-cumps env{name_option})\""));
    Ok(0)
}

/// One daemon for each device. One that cannot be started is told, and keeps no other from its own;
/// an interruption does, and what is up by then is told all the same.
fn set(ui: &mut Ui<'_>, all: Vec<Part<'_>>) -> Result<u8, Error> {
    let mut started: Vec<DaemonRecord> = Vec::new();
    let mut kept: Vec<String> = Vec::new();
    let mut failed: Vec<Value> = Vec::new();
    let mut interruption = None;
    for part in all {
        match part.wanted.and_then(|wanted| bring_up(ui, &wanted)) {
            Ok(Up::Kept(record)) => kept.push(record.name.to_string()),
            Ok(Up::Started(record)) => started.push(record),
            Err(error) => {
                let mut told = error_json(&error);
                told["name"] = part.name.as_ref().map(DaemonName::as_str).into();
                failed.push(told);
                if is_interruption(&error) {
                    interruption = Some(error);
                    break;
                }
                failure(ui, part.name.as_ref(), &error);
            }
        }
    }
    let records: Vec<Value> = started.iter().map(DaemonRecord::to_json).collect();
    ui.json(&json!({"started": records, "kept": kept, "failed": failed}));
    if let Some(error) = interruption {
        return Err(error);
    }
    if failed.is_empty() {
        ui.next_step(
            "eval \"$(uni-cumps env --gpu 0)\", or for each rank: uni-cumps run --by-rank -- CMD",
        );
    }
    Ok(u8::from(!failed.is_empty()))
}
