//! `run`: a program as a client of a daemon. It takes our place, unless it is to be proven that it really is one.

use std::ffi::OsString;

use crate::attachment;
use crate::binding::{self, Binding};
use crate::cli::{CpuChoice, RunArgs};
use crate::daemon::{self, State};
use crate::error::Error;
use crate::host::Host;
use crate::launch::{Request, Wanted};
use crate::limits::Limits;
use crate::per_node;
use crate::process;
use crate::record::{DaemonName, DaemonRecord};
use crate::runner::{Invocation, Mode, hold_signals_to_pass_on};
use crate::store::{Entry, Store};
use crate::ui::Ui;

/// What `env` and GNU's other tools use, so that the program's own status can be told from our failures.
pub(super) fn exit_status(error: &Error) -> u8 {
    match error {
        Error::CannotExecute { source, .. } if source.kind() == std::io::ErrorKind::NotFound => 127,
        Error::CannotExecute { .. } => 126,
        _ => super::interruption(error).unwrap_or(125),
    }
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &RunArgs) -> Result<u8, Error> {
    if !args.per_node || args.dry_run {
        let (record, _) = daemon_for(host, ui, args)?;
        return run_as_client(host, ui, args, &record);
    }
    let store = Store::of(host)?;
    let here = process::place(host);
    let recorded = |name: &DaemonName| match store.entry(name) {
        Some(Entry::Record(record)) => Some(record),
        _ => None,
    };
    let is_live = |record: &DaemonRecord| {
        let found = recorded(&record.name).filter(|found| found.process == record.process);
        found.is_some_and(|found| daemon::observe(host, &here, found).state.reachable())
    };
    // Between the start of the daemon and the end of our part in it, a signal ends calls and the program, and then us.
    let _held = hold_signals_to_pass_on();
    let part = per_node::join(host, || daemon_for(host, ui, args), is_live)?;
    let outcome = run_as_client(host, ui, args, part.record());
    part.leave(host, ui, |name| Some(recorded(name)?.process));
    outcome
}

fn run_as_client(
    host: &Host,
    ui: &mut Ui<'_>,
    args: &RunArgs,
    record: &DaemonRecord,
) -> Result<u8, Error> {
    let limits = Limits {
        threads: args.threads.clone(),
        memory: args.memory,
        priority: args.priority,
    };
    let mut variables = record.client_environment().to_vec();
    variables.extend(limits.client_environment(record.gpu_uuids.len()));
    let mode = match args.require_mps.is_some() || args.per_node {
        true => Mode::Beside,
        false => Mode::Replacing,
    };
    let bound = bind(host, ui, args, record)?;
    variables.extend(bound.iter().flat_map(|binding| binding.variables.clone()));
    let call = program(host, &args.command, &variables, mode);
    if args.dry_run {
        let call = match &bound {
            Some(binding) => binding.shown(call),
            None => call,
        };
        ui.call_with(&call, &variables);
        return Ok(0);
    }
    match args.require_mps {
        Some(seconds) => attachment::proven(host, ui, &call, record, seconds),
        None => match host.runner.run(&call) {
            Ok(finished) => Ok(finished.status.shell_code()),
            Err(error) => Err(attachment::not_run(&call, error)),
        },
    }
}

/// Binds us, and with us the program, to the CPUs that were asked for. What comes back holds the claims on the GPUs, until
/// the program has inherited them.
fn bind(
    host: &Host,
    ui: &mut Ui<'_>,
    args: &RunArgs,
    record: &DaemonRecord,
) -> Result<Option<Binding>, Error> {
    let CpuChoice::To(cpus) = &args.cpus else {
        return Ok(None);
    };
    let wanted = binding::Wanted {
        cpus,
        lock_prefix: args.lock_prefix.as_deref(),
        shown: args.dry_run,
    };
    let bound = binding::find(host, &wanted, &record.gpu_uuids).and_then(|binding| {
        if !args.dry_run {
            binding.apply(host)?;
        }
        Ok(binding)
    });
    match bound {
        Ok(binding) => {
            for note in &binding.notes {
                ui.note(note);
            }
            Ok(Some(binding))
        }
        Err(error) if args.strict_cpus => Err(Error::NotBound {
            reason: error.to_string(),
        }),
        Err(error) => {
            ui.note(format!("the program is not bound to CPUs: {error}"));
            Ok(None)
        }
    }
}

/// The user's program with the whole environment of the caller and these variables.
fn program(
    host: &Host,
    command: &[OsString],
    variables: &[(&'static str, String)],
    mode: Mode,
) -> Invocation {
    let inherited = host
        .env
        .all()
        .filter(|(key, _)| !variables.iter().any(|(ours, _)| key.as_os_str() == *ours))
        .map(|(key, value)| (key.clone(), value.clone()));
    let ours = variables
        .iter()
        .map(|(key, value)| (OsString::from(key), OsString::from(value)));
    let (name, arguments) = command
        .split_first()
        .map_or((OsString::new(), &[][..]), |(name, rest)| {
            (name.clone(), rest)
        });
    Invocation {
        purpose: "run the program",
        program: name.into(),
        args: arguments.to_vec(),
        env: inherited.chain(ours).collect(),
        stdin: Vec::new(),
        mode,
    }
}

/// The daemon that is meant, started if there is none and that was asked for, and whether we have started it.
fn daemon_for(host: &Host, ui: &mut Ui<'_>, args: &RunArgs) -> Result<(DaemonRecord, bool), Error> {
    let store = Store::of(host)?;
    // The only live daemon may be that of another job, with another GPU.
    let is_open = args.daemon.name.is_none() && args.daemon.gpu.is_none();
    let visible = match args.per_node && is_open {
        true => Some(wanted(host, args)?),
        false => None,
    };
    let name = match &visible {
        Some(visible) => Some(visible.name().as_str()),
        None => args.daemon.name.as_deref(),
    };
    let found = find(host, &store, args, name);
    let is_absent = matches!(
        found,
        Err(Error::NoLiveDaemon | Error::NoRecord(_) | Error::Stale(_) | Error::NoDaemonForGpu(_))
    );
    if (args.start || args.per_node) && is_absent {
        let wanted = match visible {
            Some(visible) => visible,
            None => wanted(host, args)?,
        };
        return start(host, ui, &store, args, &wanted);
    }
    let (record, notes) = found?;
    for note in notes {
        ui.note(note);
    }
    Ok((record, false))
}

fn find(
    host: &Host,
    store: &Store<'_>,
    args: &RunArgs,
    name: Option<&str>,
) -> Result<(DaemonRecord, Vec<String>), Error> {
    let found = match &args.daemon.gpu {
        None if args.by_rank => daemon::of_rank(host, store)?,
        gpu => daemon::meant(host, store, name, gpu.as_deref())?,
    };
    if args.require_mps.is_some() && matches!(found.state, State::OtherPidNamespace { .. }) {
        // The daemon names its clients by other numbers than ours.
        return Err(Error::OtherPidNamespace(found.record.name));
    }
    daemon::for_client(host, store, found)
}

/// The daemon that there would be.
fn wanted<'h>(host: &'h Host, args: &RunArgs) -> Result<Wanted<'h>, Error> {
    let request = Request {
        gpus: args.daemon.gpu.as_deref(),
        name: args.daemon.name.as_deref(),
        ..Request::default()
    };
    Wanted::only(host, request)
}

/// Starts the daemon that was not there. Somebody who does the same at the same time may be faster.
fn start(
    host: &Host,
    ui: &mut Ui<'_>,
    store: &Store<'_>,
    args: &RunArgs,
    wanted: &Wanted<'_>,
) -> Result<(DaemonRecord, bool), Error> {
    if args.dry_run {
        return Ok((wanted.show(ui, false)?, true));
    }
    let named = |name: &DaemonName| {
        let found = daemon::select(host, store, Some(name.as_str()))?;
        Ok((daemon::reachable(host, store, found)?, false))
    };
    match wanted.start(ui) {
        Ok(record) => {
            if !args.per_node {
                ui.note(format!(
                    "started daemon {0} (pid {1}); to end it: uni-cumps stop --name {0}",
                    record.name, record.process.pid
                ));
            }
            Ok((record, true))
        }
        Err(Error::AlreadyLive { name, .. }) => named(&name),
        // Whoever has named a daemon gets that one or none.
        Err(Error::GpuTaken { by, .. }) if args.daemon.name.is_none() => named(&by),
        Err(error) => Err(error),
    }
}
