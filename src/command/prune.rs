//! `prune`: removes what daemons that are gone have left behind: stale records, replaced records, runtime directories.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::PruneArgs;
use crate::daemon;
use crate::error::Error;
use crate::host::Host;
use crate::mps::{self, Keeper};
use crate::process;
use crate::record::DaemonName;
use crate::runtime_dir;
use crate::store::{Entry, Store};
use crate::ui::Ui;

/// Something that a daemon has left, and that goes.
struct Leftover {
    kind: &'static str,
    path: PathBuf,
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &PruneArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    let mut leftovers = Vec::new();
    let mut gone = Vec::new();
    let (daemons, others) = daemon::observe_all(host, &store)?;
    let names = daemons.into_iter().map(|daemon| daemon.record.name);
    for name in names.chain(others.into_iter().map(|other| other.name)) {
        if prune_record(host, &store, &name, args.dry_run)? {
            let path = store.directory(&name);
            leftovers.push(Leftover {
                kind: "record",
                path,
            });
            gone.push(name);
        }
    }
    for path in store.quarantined() {
        if args.dry_run || store.remove_quarantined(&path) {
            leftovers.push(Leftover {
                kind: "replaced record",
                path,
            });
        }
    }
    for (name, path) in runtime_dir::own_directories(host) {
        let in_use = store.entry(&name).is_some() && !gone.contains(&name);
        if !in_use && prune_runtime(host, &store, &name, &path, args.dry_run)? {
            leftovers.push(Leftover {
                kind: "runtime directory",
                path,
            });
        }
    }
    show(ui, &leftovers, args);
    Ok(0)
}

fn show(ui: &mut Ui<'_>, leftovers: &[Leftover], args: &PruneArgs) {
    if args.json {
        let list = leftovers
            .iter()
            .map(|left| json!({"kind": left.kind, "path": left.path}));
        ui.json(&json!({"dry_run": args.dry_run, "removed": list.collect::<Vec<Value>>()}));
        return;
    }
    let verb = if args.dry_run {
        "would remove"
    } else {
        "removed"
    };
    for left in leftovers {
        ui.line(format!("{verb} {}: {}", left.kind, left.path.display()));
    }
    if leftovers.is_empty() {
        ui.line("nothing to remove");
    }
}

/// Removes a record whose daemon is certainly gone, or the intent of a start that left nothing. What cannot be read
/// stays: it may belong to a daemon that runs.
fn prune_record(
    host: &Host,
    store: &Store<'_>,
    name: &DaemonName,
    dry_run: bool,
) -> Result<bool, Error> {
    let here = process::place(host);
    let is_over = |entry: &Entry| match entry {
        Entry::Record(record) => {
            record.uid == host.uid && daemon::observe(host, &here, record.clone()).state.is_over()
        }
        Entry::Intent(intent) => {
            intent.uid == host.uid && daemon::left_nothing(host, &here, intent)
        }
        Entry::Damaged { .. } => false,
    };
    if dry_run {
        return Ok(store.entry(name).is_some_and(|entry| is_over(&entry)));
    }
    let locked = store.lock(name)?;
    match locked.entry() {
        Some(entry) if is_over(&entry) => {
            let (Entry::Record(record) | Entry::Intent(record)) = entry else {
                return Ok(false);
            };
            daemon::forget(host, &locked, &record)?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Removes a default runtime directory that no record speaks of and no daemon keeps.
fn prune_runtime(
    host: &Host,
    store: &Store<'_>,
    name: &DaemonName,
    path: &Path,
    dry_run: bool,
) -> Result<bool, Error> {
    let pipe = path.join("pipe");
    if mps::keeper(host, &pipe) != Keeper::Nobody || mps::coming_up(host, &pipe).is_some() {
        return Ok(false);
    }
    if dry_run {
        return Ok(true);
    }
    // Nobody starts a daemon of this name meanwhile.
    let locked = store.lock(name)?;
    if locked.entry().is_some() {
        return Ok(false);
    }
    mps::clear(host, &pipe);
    Ok(runtime_dir::remove(host, path))
}
