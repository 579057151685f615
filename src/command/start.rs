//! `start`: control daemons of the user's own, each recorded once it answers.

use serde_json::{Value, json};

use crate::cli::StartArgs;
use crate::error::Error;
use crate::host::Host;
use crate::launch::{Request, Wanted};
use crate::record::DaemonRecord;
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
        return show(ui, &all);
    }
    match all.as_slice() {
        [wanted] if !wanted.is_one_of_several() => one(ui, args, wanted),
        several => set(ui, several),
    }
}

fn show(ui: &mut Ui<'_>, all: &[Wanted<'_>]) -> Result<u8, Error> {
    for wanted in all {
        if kept(ui, wanted)?.is_none() {
            wanted.show(ui, false)?;
        }
    }
    Ok(0)
}

/// The daemon that is there already, where a start may be repeated.
fn kept(ui: &mut Ui<'_>, wanted: &Wanted<'_>) -> Result<Option<DaemonRecord>, Error> {
    let there = wanted.is_there()?;
    if let Some(record) = &there {
        ui.note(format!(
            "daemon {} (pid {}) is kept",
            record.name, record.process.pid
        ));
        let limits = wanted.limits();
        if !limits.is_empty() && limits != record.limits {
            ui.note(format!(
                "its limits stay as they are; to set them: uni-cumps limits --name {} --set …",
                record.name
            ));
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
    if let Some(record) = kept(ui, wanted)? {
        return Ok(Up::Kept(record));
    }
    match wanted.start(ui) {
        // Somebody who does the same at the same time was faster.
        Err(error @ Error::AlreadyLive { .. }) => kept(ui, wanted)?.map(Up::Kept).ok_or(error),
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

/// One daemon for each device. One that cannot be started is told, and keeps no other from its own.
fn set(ui: &mut Ui<'_>, all: &[Wanted<'_>]) -> Result<u8, Error> {
    let mut started: Vec<DaemonRecord> = Vec::new();
    let mut kept: Vec<&str> = Vec::new();
    let mut failed: Vec<Value> = Vec::new();
    for wanted in all {
        match bring_up(ui, wanted) {
            Ok(Up::Kept(_)) => kept.push(wanted.name().as_str()),
            Ok(Up::Started(record)) => started.push(record),
            Err(error @ Error::Interrupted(_)) => return Err(error),
            Err(error) => {
                ui.failure(&error, false);
                let mut told = error_json(&error);
                told["name"] = wanted.name().as_str().into();
                failed.push(told);
            }
        }
    }
    let records: Vec<Value> = started.iter().map(DaemonRecord::to_json).collect();
    ui.json(&json!({"started": records, "kept": kept, "failed": failed}));
    if failed.is_empty() {
        ui.next_step(
            "eval \"$(uni-cumps env --gpu 0)\", or for each rank: uni-cumps run --by-rank -- CMD",
        );
    }
    Ok(u8::from(!failed.is_empty()))
}
