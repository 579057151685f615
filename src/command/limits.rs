//! `limits`: what the programs of a daemon may use, as the daemon itself says it, and setting it on one that runs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::LimitsArgs;
use crate::daemon::{self, Observed, Unasked};
use crate::error::{Error, LimitFailure};
use crate::gpu::Gpu;
use crate::host::Host;
use crate::limits::{self, Change, Priority, Setting};
use crate::mps::{AskError, Control, FoundLimits, Scope, ServerLimits};
use crate::nvidia_smi;
use crate::process;
use crate::record::DaemonRecord;
use crate::runner::hold_signals;
use crate::server_limits;
use crate::store::Store;
use crate::ui::{Answer, Cell, Tone, Ui, error_json, plain};

/// How long a daemon may take to name its servers.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// What one daemon says.
struct Answered {
    default: FoundLimits,
    /// Its servers by pid. One that is gone by now is not among them.
    servers: Vec<(i32, Option<FoundLimits>)>,
}

/// The daemons that were asked.
struct Report(Vec<(Observed, Result<Answered, Error>)>);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &LimitsArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    let (name, gpu) = (args.daemon.name.as_deref(), args.daemon.gpu.as_deref());
    if !args.set.is_empty() {
        let meant = daemon::meant(host, &store, name, gpu)?;
        let record = set(host, ui, &store, meant, &args.set)?;
        let daemon = daemon::observe(host, &process::place(host), record);
        let answered = ask(host, &daemon)?;
        ui.answer(&Report(vec![(daemon, Ok(answered))]), args.json);
        return Ok(0);
    }
    if name.is_some() || gpu.is_some() {
        let daemon = daemon::meant(host, &store, name, gpu)?;
        daemon::reachable(host, &store, daemon.clone())?;
        let answered = ask(host, &daemon)?;
        ui.answer(&Report(vec![(daemon, Ok(answered))]), args.json);
        return Ok(0);
    }
    let (mut daemons, _) = daemon::observe_all(host, &store)?;
    daemons.retain(|daemon| daemon.state.runs());
    if daemons.is_empty() {
        return Err(Error::NoLiveDaemon);
    }
    let mut report = Report(Vec::new());
    for daemon in daemons {
        let reachable = daemon::reachable(host, &store, daemon.clone());
        let answered = match reachable.and_then(|_| ask(host, &daemon)) {
            Err(error @ Error::Interrupted(_)) => return Err(error),
            answered => answered,
        };
        if let Err(error) = &answered {
            ui.failure(error, false);
        }
        report.0.push((daemon, answered));
    }
    ui.answer(&report, args.json);
    Ok(u8::from(
        report.0.iter().any(|(_, answered)| answered.is_err()),
    ))
}

/// How a daemon is asked, or the complaint that it cannot be.
fn control_of<'h>(host: &'h Host, daemon: &Observed) -> Result<Control<'h>, Error> {
    let (name, pid) = (daemon.record.name.clone(), daemon.record.process.pid);
    daemon.control(host)?.map_err(|reason| match reason {
        Unasked::Stopped => LimitFailure::Stopped { name, pid }.into(),
        Unasked::OtherPidNamespace => Error::OtherPidNamespace(name),
        Unasked::Unreachable(_) => daemon::unreachable(daemon),
        Unasked::State(_) => Error::NotAnswering {
            name,
            pid,
            cause: reason.to_string(),
            stopped: false,
        },
    })
}

fn ask(host: &Host, daemon: &Observed) -> Result<Answered, Error> {
    let control = control_of(host, daemon)?;
    let devices = daemon.record.served().devices().len();
    answers(&control, devices).map_err(|error| daemon::no_answer(&daemon.record, error))
}

fn answers(control: &Control<'_>, devices: usize) -> Result<Answered, AskError> {
    let mut servers = Vec::new();
    for server in control.servers(ANSWER_LIMIT)? {
        match control.server_limits(server, devices)? {
            ServerLimits::Found(found) => servers.push((server, Some(found))),
            ServerLimits::NotReady => servers.push((server, None)),
            ServerLimits::Gone => {}
        }
    }
    Ok(Answered {
        default: control.default_limits(devices)?,
        servers,
    })
}

/// Sets the limits of a daemon and its servers, and returns the record that says so. What was confirmed before a
/// failure is recorded as well.
fn set(
    host: &Host,
    ui: &mut Ui<'_>,
    store: &Store<'_>,
    meant: Observed,
    settings: &[Setting],
) -> Result<DaemonRecord, Error> {
    let name = daemon::reachable(host, store, meant)?.name;
    let locked = store.lock(&name)?;
    let entry = locked.entry().ok_or(Error::NoRecord(name))?;
    let daemon = daemon::observe(host, &process::place(host), entry.into_record()?);
    let before = daemon::reachable(host, store, daemon.clone())?;
    let control = control_of(host, &daemon)?;
    let changes = changes(host, &before, settings)?;
    // The record is to say what the daemon has, whenever a signal comes.
    let _held = hold_signals();
    let (mut record, mut confirmed) = (before.clone(), 0);
    let result = changes.iter().try_for_each(|change| {
        control.change(change, Scope::Default)?;
        record.limits.take_over(change);
        confirmed += 1;
        Ok(())
    });
    if record != before {
        locked.put(&record)?;
    }
    if let Err(error) = result {
        for change in &changes[..confirmed] {
            ui.note(format!("{change} was confirmed before that"));
        }
        return Err(error);
    }
    server_limits::change(ui, &control, &record, &changes)?;
    Ok(record)
}

/// What the settings mean for a daemon. nvidia-smi is called only where a GPU is named by its index.
fn changes(host: &Host, record: &DaemonRecord, settings: &[Setting]) -> Result<Vec<Change>, Error> {
    let numbering = match settings.iter().any(Setting::names_an_index) {
        true => Gpu::identities(&nvidia_smi::discover(host)?.gpus),
        false => Vec::new(),
    };
    let served = record.served();
    limits::changes(settings, &served, &numbering)
        .map_err(|misplaced| LimitFailure::of(misplaced, served.devices()).into())
}

fn threads_text(found: &FoundLimits) -> String {
    found
        .threads
        .map_or("unknown".to_owned(), |threads| format!("{threads:.1}"))
}

fn priority_text(found: &FoundLimits) -> &'static str {
    found.priority.map_or("unknown", Priority::as_str)
}

/// Each device of the daemon with its limit.
fn memory<'r>(
    record: &DaemonRecord,
    found: &'r FoundLimits,
) -> impl Iterator<Item = (String, Option<&'r str>)> {
    let devices = record.served().devices().into_iter();
    devices.zip(found.memory.iter().map(Option::as_deref))
}

/// `GPU-…=8G,GPU-…=none`.
fn memory_text(record: &DaemonRecord, found: &FoundLimits) -> String {
    let each: Vec<String> = memory(record, found)
        .map(|(gpu, limit)| format!("{gpu}={}", limit.unwrap_or("none")))
        .collect();
    each.join(",")
}

fn memory_json(record: &DaemonRecord, found: &FoundLimits) -> Value {
    let each = memory(record, found).map(|(gpu, limit)| (gpu, limit.into()));
    Value::Object(each.collect())
}

impl Answer for Report {
    fn to_json(&self) -> Value {
        let daemon = |(daemon, answered): &(Observed, Result<Answered, Error>)| {
            let record = &daemon.record;
            let mut value = match answered {
                Err(error) => error_json(error),
                Ok(answered) => {
                    let server = |(pid, found): &(i32, Option<FoundLimits>)| {
                        json!({
                            "pid": pid,
                            "ready": found.is_some(),
                            "threads": found.as_ref().and_then(|found| found.threads),
                            "memory": found.as_ref().map(|found| memory_json(record, found)),
                        })
                    };
                    json!({
                        "default": {
                            "threads": answered.default.threads,
                            "memory": memory_json(record, &answered.default),
                            "priority": answered.default.priority.map(Priority::as_str),
                        },
                        "servers": answered.servers.iter().map(server).collect::<Vec<_>>(),
                    })
                }
            };
            value["name"] = record.name.as_str().into();
            value["pid"] = record.process.pid.into();
            value
        };
        json!({"daemons": self.0.iter().map(daemon).collect::<Vec<_>>()})
    }

    fn print(&self, ui: &mut Ui<'_>) {
        for (daemon, answered) in &self.0 {
            let record = &daemon.record;
            ui.line(daemon.line());
            let Ok(answered) = answered else {
                ui.line(format!("limits daemon={} unknown", record.name));
                continue;
            };
            ui.line(format!(
                "limits daemon={} of=default threads={} memory={} priority={}",
                record.name,
                threads_text(&answered.default),
                memory_text(record, &answered.default),
                priority_text(&answered.default),
            ));
            for (pid, found) in &answered.servers {
                let limits = match found {
                    Some(found) => format!(
                        "threads={} memory={}",
                        threads_text(found),
                        memory_text(record, found)
                    ),
                    None => "not-ready".to_owned(),
                };
                ui.line(format!(
                    "limits daemon={} of=server pid={pid} {limits}",
                    record.name
                ));
            }
        }
    }

    fn show(&self, ui: &mut Ui<'_>) {
        let mut rows: Vec<Vec<Cell>> = Vec::new();
        for (daemon, answered) in &self.0 {
            let record = &daemon.record;
            let name = &record.name;
            let Ok(answered) = answered else {
                let unknown = ("unknown".to_owned(), Tone::Bad);
                rows.push(vec![plain(name), unknown]);
                continue;
            };
            let default = &answered.default;
            let priority = plain(priority_text(default));
            rows.extend(limit_rows(record, "next server", default, &priority));
            for (pid, found) in &answered.servers {
                let server = format!("server {pid}");
                match found {
                    Some(found) => {
                        rows.extend(limit_rows(record, &server, found, &plain("-")));
                    }
                    None => rows.push(vec![
                        plain(name),
                        plain(server),
                        ("not ready".to_owned(), Tone::Doubtful),
                    ]),
                }
            }
        }
        ui.table(
            &["DAEMON", "OF", "THREADS", "PRIORITY", "MEMORY", "GPU"],
            &rows,
        );
    }
}

/// A row for each device; what is not of a device stands in the first one.
fn limit_rows(
    record: &DaemonRecord,
    of: &str,
    found: &FoundLimits,
    priority: &Cell,
) -> Vec<Vec<Cell>> {
    let first = [
        plain(&record.name),
        plain(of),
        plain(format!("{} %", threads_text(found))),
        priority.clone(),
    ];
    let row = |(at, (gpu, limit)): (usize, (String, Option<&str>))| {
        let mut row = match at {
            0 => first.to_vec(),
            _ => vec![plain(""); first.len()],
        };
        row.push(limit.map_or(("none".to_owned(), Tone::Faint), plain));
        row.push(plain(gpu));
        row
    };
    memory(record, found).enumerate().map(row).collect()
}
