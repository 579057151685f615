//! `doctor`: which GPU is meant, which daemon serves it, whether that is proof of sharing, and everything else that may
//! be wrong. Changes nothing.

use std::path::Path;

use serde_json::{Value, json};

use crate::capture;
use crate::cli::DoctorArgs;
use crate::daemon::{self, Observed, State};
use crate::diagnosis::{self, Check, Facts, Status};
use crate::error::Error;
use crate::host::Host;
use crate::mps::{self, CONTROL, Keeper, Socket};
use crate::record::TopologyMode;
use crate::shell::quote_path;
use crate::store::Store;
use crate::ui::{Answer, Cell, Tone, Ui, plain, python_bool};

struct Report {
    facts: Facts,
    checks: Vec<Check>,
    /// Whether programs for this GPU share it, or why not.
    verdict: Result<(), String>,
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &DoctorArgs) -> Result<u8, Error> {
    if let Some(directory) = &args.capture {
        return capture(host, ui, &host.cwd.join(directory));
    }
    let wanted = |id: &str| {
        let named = |ids: &[String]| ids.iter().any(|named| named == id);
        let asked = args.only.is_empty() && (id != "probe" || args.probe);
        (asked || named(&args.only)) && !named(&args.skip)
    };
    let named = match &args.name {
        Some(name) => Some(daemon::select(host, &Store::of(host)?, Some(name))?),
        None => None,
    };
    let named = named.map(|daemon| daemon.record.gpu_list());
    let facts = diagnosis::gather(host, named.as_deref().or(args.gpus.as_deref()), &wanted)?;
    let report = Report {
        checks: diagnosis::run(&facts, &wanted),
        verdict: verdict(&facts),
        facts,
    };
    ui.answer(&report, args.json);
    let failed = report
        .checks
        .iter()
        .any(|check| check.status == Status::Fail);
    Ok(u8::from(report.verdict.is_err() || failed))
}

/// Writes a snapshot instead of a report. It needs no GPU to be chosen, nor one to be there.
fn capture(host: &Host, ui: &mut Ui<'_>, directory: &Path) -> Result<u8, Error> {
    let (daemons, _) = daemon::observe_all(host, &Store::of(host)?)?;
    let files = capture::take(host, directory, &daemons)?;
    ui.line(format!(
        "captured files={files} directory={}",
        directory.display()
    ));
    ui.note("look it through before you send it: names are replaced, paths and logs may still tell more than you like");
    Ok(0)
}

/// Programs with the environment of the daemon share the GPU if just one daemon of ours runs, or else the one that this
/// shell's variables lead to; if it answers; and if CUDA shows them this GPU.
fn verdict(facts: &Facts) -> Result<(), String> {
    if let (false, Some(mask)) = (facts.is_visible(), &facts.mask) {
        return Err(format!(
            "CUDA_VISIBLE_DEVICES={mask:?} hides GPU {} from the programs of this shell; unset it, or eval \"$(uni-cumps env)\"",
            facts.plan.text()
        ));
    }
    match facts.running().as_slice() {
        [] => {}
        [daemon] => reachable(daemon)?,
        several => {
            let names: Vec<&str> = several
                .iter()
                .map(|daemon| daemon.record.name.as_str())
                .collect();
            return Err(format!(
                "several daemons serve this GPU: {}; stop all but one: uni-cumps stop --name {}",
                names.join(", "),
                names[names.len() - 1]
            ));
        }
    }
    let found = facts.socket.describe(&mps::control_path(&facts.pipe));
    match facts.socket {
        Socket::Listening { .. } | Socket::Fifo => {}
        Socket::Absent | Socket::Orphan => {
            return Err(format!("{found}; to start a daemon: uni-cumps start"));
        }
        Socket::Other(_) => {
            return Err(format!(
                "{found}, not a control socket; see {}",
                quote_path(&facts.pipe)
            ));
        }
        Socket::Hidden(_) => return Err(found),
    }
    if let Keeper::Process(process) = &facts.keeper
        && !daemon::serves(process.uid, facts.uid)
    {
        return Err(format!(
            "the control daemon in {:?} belongs to uid {} and serves that user only; to start your own: uni-cumps start",
            facts.pipe, process.uid
        ));
    }
    match &facts.servers {
        Some(Ok(_)) => {}
        Some(Err(reason)) => {
            return Err(format!(
                "the control daemon in {:?} does not answer: {reason}",
                facts.pipe
            ));
        }
        None => {
            return Err(format!(
                "{CONTROL} is not on PATH, so the daemon cannot be asked"
            ));
        }
    }
    match &facts.cuda {
        // Left out by --only or --skip.
        None => Ok(()),
        Some(Ok(seen)) if facts.are_shown(seen) => Ok(()),
        Some(Ok(_)) => Err(format!(
            "the CUDA driver shows a process no GPU {}",
            facts.plan.text()
        )),
        Some(Err(failure)) => Err(failure.to_string()),
    }
}

/// Our own daemon must be where its record says.
fn reachable(daemon: &Observed) -> Result<(), String> {
    match &daemon.state {
        State::NotAnswering(process) => Err(format!(
            "the daemon {} is stopped (state T) and does not answer; to let it go on: kill -CONT {}",
            daemon.record.name, process.id.pid
        )),
        State::Unreachable(_) => {
            let error = daemon::unreachable(daemon);
            let found = error.cause().unwrap_or_default();
            Err(format!("{error}: {found}; first {}", error.hint()))
        }
        _ => Ok(()),
    }
}

impl Answer for Report {
    fn to_json(&self) -> Value {
        json!({
            "compatible_topology_modes": TopologyMode::ALL.map(TopologyMode::as_str),
            "plan": self.facts.plan.to_json(),
            "managed_daemons": self.facts.daemons.iter().map(Observed::to_json).collect::<Vec<_>>(),
            "cuda_process_sharing": self.sharing_json(),
            "nvidia_smi": self.facts.discovery.program,
            "valid": self.verdict.is_ok(),
            "checks": self.checks.iter().map(Check::to_json).collect::<Vec<_>>(),
        })
    }

    /// The lines of the Python command, and behind them a line a check.
    fn print(&self, ui: &mut Ui<'_>) {
        let plan = &self.facts.plan;
        ui.line(format!("topology_mode={}", plan.mode.as_str()));
        ui.line(format!("gpus={}", plan.visible_devices()));
        ui.line(format!("valid={}", python_bool(self.verdict.is_ok())));
        for daemon in &self.facts.daemons {
            ui.line(daemon.line());
        }
        if let Err(reason) = &self.verdict {
            ui.line(format!("error={reason}"));
        }
        for check in &self.checks {
            let remedy = check
                .remedy
                .as_ref()
                .map(|remedy| format!(" remedy={remedy}"));
            ui.line(format!(
                "check id={} status={} evidence={}{}",
                check.id,
                check.status.word(),
                check.evidence,
                remedy.unwrap_or_default()
            ));
        }
    }

    /// For a person.
    fn show(&self, ui: &mut Ui<'_>) {
        let rows: Vec<Vec<Cell>> = self.checks.iter().flat_map(rows_of).collect();
        ui.table(&["CHECK", "RESULT", "EVIDENCE"], &rows);
        ui.line("");
        match &self.verdict {
            Ok(()) => {
                let text = format!(
                    "programs with this daemon's environment share GPU {}",
                    self.facts.plan.text()
                );
                ui.verdict("valid", Tone::Good, &text);
            }
            Err(reason) => ui.verdict("not valid", Tone::Bad, reason),
        }
    }
}

impl Report {
    /// The evidence in the field names of `validate`, for a learner and a collector with the daemon's environment.
    fn sharing_json(&self) -> Value {
        let facts = &self.facts;
        if let Err(reason) = &self.verdict {
            return json!({"error": reason});
        }
        let servers = facts
            .servers
            .as_ref()
            .and_then(|servers| servers.as_ref().ok());
        let control_pid = match &facts.keeper {
            Keeper::Process(process) => Some(process.id.pid),
            Keeper::Nobody | Keeper::Elsewhere | Keeper::Contradiction(_) => None,
        };
        let seen = facts.cuda.as_ref().and_then(|seen| seen.as_ref().ok());
        json!({
            "ambient_server": false,
            "collector_device": "cuda:0",
            "collector_gpu_uuid": facts.plan.devices.first().map(|device| device.gpu().uuid.token()),
            "configured": "mps",
            "control_pid": control_pid,
            "control_pipe": mps::control_path(&facts.pipe),
            "control_pipe_kind": facts.socket.kind(),
            "effective": "mps",
            "learner_device": "cuda:0",
            "learner_gpu_uuid": seen.and_then(|_| facts.plan.devices.first()).map(|device| device.gpu().uuid.token()),
            "pipe_directory": facts.pipe,
            "pipe_directory_env": facts.variable("CUDA_MPS_PIPE_DIRECTORY"),
            "rank": 0,
            "server_pid": servers.and_then(|servers| servers.first()).map(|server| server.pid),
            "validated": seen.is_some(),
            "world_size": 1,
        })
    }
}

/// A check's row, and below it what to type.
fn rows_of(check: &Check) -> Vec<Vec<Cell>> {
    let tone = match check.status {
        Status::Ok => Tone::Good,
        Status::Warn => Tone::Doubtful,
        Status::Fail => Tone::Bad,
        Status::Skip => Tone::Faint,
    };
    let mut rows = vec![vec![
        plain(check.id),
        (check.status.word().to_owned(), tone),
        plain(&check.evidence),
    ]];
    if let Some(remedy) = &check.remedy {
        rows.push(vec![
            plain(""),
            plain(""),
            (format!("-> {remedy}"), Tone::Faint),
        ]);
    }
    rows
}
