//! `prune`: removes what daemons that are gone have left behind: stale records, replaced records, runtime directories; and
//! what the ledger tells of processes that have ended.

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
use crate::store::{Entry, Ledger, Store};
use crate::ui::Ui;

/// Something that a daemon has left, and that goes.
struct Leftover {
    kind: &'static str,
    path: PathBuf,
}

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &PruneArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    let prune = Prune {
        host,
        store: &store,
        dry_run: args.dry_run,
    };
    let mut removed = Vec::new();
    let mut failed = Vec::new();
    let mut gone = Vec::new();
    let mut note = |kind: &'static str, path: PathBuf, outcome: Result<bool, Error>| match outcome {
        Ok(true) => {
            removed.push(Leftover { kind, path });
            true
        }
        Ok(false) => false,
        // It hides no other one.
        Err(error) => {
            failed.push(error);
            false
        }
    };
    for name in prune.names()? {
        if note("record", store.directory(&name), prune.record(ui, &name)) {
            gone.push(name);
        }
    }
    for path in store.quarantined() {
        let outcome = prune.quarantined(&path);
        note("replaced record", path, outcome);
    }
    for (name, path) in runtime_dir::own_directories(host) {
        let recorded = store.entry(&name).is_some() && !gone.contains(&name);
        if !recorded {
            let outcome = prune.runtime(&name, &path);
            note("runtime directory", path, outcome);
        }
    }
    let ledger = Ledger::of(host)?;
    for path in ledger.ended() {
        let outcome = match args.dry_run {
            true => Ok(true),
            false => forget(&ledger, &path),
        };
        note("ledger entry of a suspended process", path, outcome);
    }
    for error in &failed {
        ui.failure(error, false);
    }
    show(ui, &removed, args);
    Ok(u8::from(!failed.is_empty()))
}

fn forget(ledger: &Ledger<'_>, ended: &Path) -> Result<bool, Error> {
    ledger.lock(&[])?.forget(ended)?;
    Ok(true)
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

struct Prune<'p> {
    host: &'p Host,
    store: &'p Store<'p>,
    dry_run: bool,
}

impl Prune<'_> {
    /// Every name with something under it.
    fn names(&self) -> Result<Vec<DaemonName>, Error> {
        let (daemons, others) = daemon::observe_all(self.host, self.store)?;
        let recorded = daemons.into_iter().map(|daemon| daemon.record.name);
        let others = others.into_iter().map(|other| other.name);
        let mut names: Vec<DaemonName> = recorded.chain(others).collect();
        names.extend(self.store.empty_names());
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Removes a record whose daemon is certainly gone, the intent of a start that left nothing, or what a killed
    /// writer has left. What cannot be read stays: it may belong to a daemon that runs.
    fn record(&self, ui: &mut Ui<'_>, name: &DaemonName) -> Result<bool, Error> {
        if !self.is_over(name) {
            return Ok(false);
        }
        if self.dry_run {
            return Ok(true);
        }
        let locked = self.store.lock(name)?;
        // Somebody may have started it meanwhile.
        if !self.is_over(name) {
            return Ok(false);
        }
        match locked.entry() {
            Some(Entry::Record(record) | Entry::Intent(record)) => {
                daemon::forget(self.host, ui, &locked, &record)?;
            }
            _ => locked.remove()?,
        }
        Ok(true)
    }

    fn is_over(&self, name: &DaemonName) -> bool {
        let here = process::place(self.host);
        match self.store.entry(name) {
            Some(Entry::Record(record)) => {
                record.uid == self.host.uid
                    && daemon::observe(self.host, &here, record).state.is_over()
            }
            Some(Entry::Intent(intent)) => {
                intent.uid == self.host.uid && daemon::left_nothing(self.host, &here, &intent)
            }
            Some(Entry::Damaged { .. }) => false,
            None => self.store.empty_names().contains(name),
        }
    }

    fn quarantined(&self, path: &Path) -> Result<bool, Error> {
        if !self.store.is_removable(path) {
            return Ok(false);
        }
        if !self.dry_run {
            runtime_dir::remove(self.host, path)?;
        }
        Ok(true)
    }

    /// Removes a default runtime directory that no record speaks of and no daemon uses.
    fn runtime(&self, name: &DaemonName, path: &Path) -> Result<bool, Error> {
        if !self.is_left(path) {
            return Ok(false);
        }
        if self.dry_run {
            return Ok(true);
        }
        // Nobody starts a daemon of this name meanwhile.
        let locked = self.store.lock(name)?;
        if locked.entry().is_some() || !self.is_left(path) {
            return Ok(false);
        }
        runtime_dir::remove(self.host, path)?;
        Ok(true)
    }

    fn is_left(&self, path: &Path) -> bool {
        let pipe = path.join("pipe");
        mps::keeper(self.host, &pipe) == Keeper::Nobody
            && mps::coming_up(self.host, &pipe).is_none()
            && !mps::logs_into(self.host, &path.join("log"))
            && runtime_dir::is_removable(self.host, path)
    }
}
