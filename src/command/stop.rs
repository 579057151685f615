//! `stop`: ends a recorded daemon that is provably ours, and returns when it is gone.

use std::time::Duration;

use serde_json::{Value, json};

use crate::attachment;
use crate::census;
use crate::cli::StopArgs;
use crate::daemon::{self, Observed, State, Unrecorded};
use crate::error::Error;
use crate::host::Host;
use crate::mps::{self, CONTROL, Control, Keeper, Socket, unless_interrupted};
use crate::process::{self, Handle, Running};
use crate::record::{Belongs, DaemonName, DaemonRecord};
use crate::store::{Entry, Locked, Store};
use crate::ui::Ui;

/// What `quit -t` gives the clients once they have had their time.
const CUT_OFF: u64 = 2;
/// How long a daemon without a server may take to quit, however short the time for clients. It takes milliseconds.
const IDLE_LIMIT: Duration = Duration::from_secs(1);
/// How long the kernel may take to take down a process that was signalled, and to free its lock.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long the daemon may take to name its clients.
const CLIENTS_LIMIT: Duration = Duration::from_secs(2);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StopArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    let stop = Stop {
        host,
        store: &store,
        limit: Duration::from_secs(args.timeout),
        force: args.force,
    };
    if args.all {
        return stop.all(ui, args.drain);
    }
    let name = match (args.daemon.name.as_deref(), args.daemon.gpu.as_deref()) {
        (Some(name), _) => name.parse()?,
        (None, Some(gpu)) => daemon::of_gpu(host, &store, gpu)?.record.name,
        (None, None) => stop.only_one()?,
    };
    stop.drain(ui, std::slice::from_ref(&name), args.drain)?;
    let stopped = stop.one(ui, &name)?;
    report(ui, &[stopped], &[]);
    Ok(0)
}

fn report(ui: &mut Ui<'_>, stopped: &[DaemonRecord], failed: &[(DaemonName, Error)]) {
    let stopped: Vec<Value> = stopped.iter().map(DaemonRecord::to_json).collect();
    let mut report = json!({"stopped": stopped});
    if !failed.is_empty() {
        let failed = failed.iter().map(|(name, error)| {
            json!({"name": name.as_str(), "code": error.code(), "message": error.to_string()})
        });
        report["failed"] = failed.collect();
    }
    ui.json(&report);
}

struct Stop<'s> {
    host: &'s Host,
    store: &'s Store<'s>,
    /// How long `quit` may wait for clients.
    limit: Duration,
    force: bool,
}

impl Stop<'_> {
    /// The only live daemon, or else the only one that an interrupted start has left.
    fn only_one(&self) -> Result<DaemonName, Error> {
        match daemon::select(self.host, self.store, None) {
            Ok(daemon) => Ok(daemon.record.name),
            Err(Error::NoLiveDaemon) => {
                let (_, others) = daemon::observe_all(self.host, self.store)?;
                let mut left = others
                    .into_iter()
                    .filter(|other| matches!(other.intent, Some((_, Some(_)))));
                match (left.next(), left.next()) {
                    (Some(one), None) => Ok(one.name),
                    _ => Err(Error::NoLiveDaemon),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Stops every daemon of this user on this machine. A failure stops none of the others from being stopped.
    fn all(&self, ui: &mut Ui<'_>, drain: Option<u64>) -> Result<u8, Error> {
        let (daemons, others) = daemon::observe_all(self.host, self.store)?;
        let mut stopped = Vec::new();
        let mut failed = Vec::new();
        let recorded = daemons.into_iter().map(|daemon| daemon.record.name);
        let unrecorded = others.into_iter().map(|Unrecorded { name, .. }| name);
        let names: Vec<DaemonName> = recorded.chain(unrecorded).collect();
        self.drain(ui, &names, drain)?;
        for name in names {
            match self.one(ui, &name) {
                Ok(record) => stopped.push(record),
                // What was to be reached is reached.
                Err(Error::StaleRemoved(_) | Error::NoRecord(_)) => {}
                // Not of this machine, so none of ours to stop.
                Err(error @ Error::OtherHost { .. }) => ui.note(error.to_string()),
                Err(error) => failed.push((name, error)),
            }
        }
        for (_, error) in &failed {
            ui.failure(error, false);
        }
        report(ui, &stopped, &failed);
        Ok(u8::from(!failed.is_empty()))
    }

    /// Waits until no client of these daemons is left, for this many seconds in all. No record is locked meanwhile, and
    /// only for live daemons is it waited.
    fn drain(
        &self,
        ui: &mut Ui<'_>,
        names: &[DaemonName],
        seconds: Option<u64>,
    ) -> Result<(), Error> {
        let Some(seconds) = seconds else {
            return Ok(());
        };
        let until = self.host.clock.monotonic() + Duration::from_secs(seconds);
        let here = process::place(self.host);
        for name in names {
            let Some(Entry::Record(record)) = self.store.entry(name) else {
                continue;
            };
            if record.uid != self.host.uid {
                continue;
            }
            let daemon = daemon::observe(self.host, &here, record);
            let (State::Live(process), Ok(Ok(control))) =
                (&daemon.state, daemon.control(self.host))
            else {
                continue;
            };
            let waiting = format!("waiting for the clients of daemon {name} to end");
            let drained = ui.waiting(&waiting, || {
                census::wait_for_no_client(self.host, &control, process, until)
            })?;
            if let Err(why) = drained {
                ui.note(format!("daemon {name} was waited for {seconds} s: {why}"));
            }
        }
        Ok(())
    }

    /// Stops the daemon of this name and returns its record, which is gone by then.
    fn one(&self, ui: &mut Ui<'_>, name: &DaemonName) -> Result<DaemonRecord, Error> {
        // Looked at first without the lock: where nothing is recorded, nothing is to be created.
        match self.store.entry(name) {
            None => return Err(Error::NoRecord(name.clone())),
            Some(entry @ Entry::Damaged { .. }) => return entry.into_record(),
            Some(Entry::Record(_) | Entry::Intent(_)) => {}
        }
        let locked = self.store.lock(name)?;
        let Some(entry) = locked.entry() else {
            return Err(Error::NoRecord(name.clone()));
        };
        if let Entry::Record(record) | Entry::Intent(record) = &entry
            && record.uid != self.host.uid
        {
            return Err(daemon::other_user(self.host, record));
        }
        if let Entry::Intent(intent) = entry {
            return self.interrupted(ui, &locked, intent);
        }
        let here = process::place(self.host);
        let daemon = daemon::observe(self.host, &here, entry.into_record()?);
        match daemon.state.clone() {
            State::Stale | State::OtherBoot => self.gone(ui, &locked, &daemon.record),
            State::OtherHost => Err(daemon::other_host(self.host, self.store, &daemon.record)),
            State::OtherPidNamespace { .. } => Err(Error::OtherPidNamespace(name.clone())),
            State::NotAnswering(process) if self.force => {
                self.prove(&daemon, &process)?;
                self.end(
                    ui,
                    &locked,
                    daemon.record,
                    &process,
                    "it is stopped (state T)",
                )
            }
            State::NotAnswering(process) => Err(Error::NotAnswering {
                name: name.clone(),
                pid: process.id.pid,
                cause: "its process is stopped (state T)".to_owned(),
                stopped: true,
            }),
            // `quit` would reach nobody, or somebody else.
            State::Unreachable(process)
                if daemon::is_proven(self.host, &daemon.record, &process) =>
            {
                let reason = daemon
                    .socket
                    .describe(&mps::control_path(&daemon.record.pipe_directory));
                self.end(ui, &locked, daemon.record, &process, &reason)
            }
            State::Unreachable(process) => Err(not_the_daemon(&daemon, &process)),
            State::Live(process) => {
                self.prove(&daemon, &process)?;
                self.quit(ui, &locked, daemon.record, &process)
            }
        }
    }

    /// What a start has left that never finished: the lock shows that it is over.
    fn interrupted(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        intent: DaemonRecord,
    ) -> Result<DaemonRecord, Error> {
        match intent.place.seen_from(&process::place(self.host)) {
            Belongs::OtherBoot => return self.gone(ui, locked, &intent),
            Belongs::OtherHost => {
                return Err(daemon::other_host(self.host, self.store, &intent));
            }
            Belongs::OtherPidNamespace => return Err(Error::OtherPidNamespace(intent.name)),
            Belongs::Here => {}
        }
        match daemon::settled_keeper(self.host, &intent.pipe_directory) {
            Keeper::Process(process) if process.uid == self.host.uid => {
                crate::launch::end_unannounced(self.host, &process)?;
                self.finish(ui, locked, intent)
            }
            Keeper::Contradiction(found) => Err(Error::Contradiction {
                pipe: intent.pipe_directory,
                found,
            }),
            Keeper::Nobody | Keeper::Elsewhere | Keeper::Process(_) => {
                self.gone(ui, locked, &intent)
            }
        }
    }

    /// A daemon that was gone before we came: nothing is stopped, and nothing of it stays.
    fn gone(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        record: &DaemonRecord,
    ) -> Result<DaemonRecord, Error> {
        daemon::forget(self.host, ui, locked, record)?;
        Err(Error::StaleRemoved(record.name.clone()))
    }

    /// Lock, socket and record must name one process before anything is said to it.
    fn prove(&self, daemon: &Observed, process: &Running) -> Result<(), Error> {
        let pipe = &daemon.record.pipe_directory;
        let contradiction = |found| {
            Err(Error::Contradiction {
                pipe: pipe.clone(),
                found,
            })
        };
        match mps::keeper_beside(self.host, pipe, &daemon.socket) {
            Keeper::Process(keeper) if keeper.id == process.id => Ok(()),
            Keeper::Process(keeper) => contradiction(format!(
                "the record names pid {}, and pid {} runs there",
                process.id.pid, keeper.id.pid
            )),
            Keeper::Contradiction(found) => contradiction(found),
            // A stand-in without lock and socket: its pid file is all that there is.
            Keeper::Nobody
                if daemon.socket == Socket::Fifo
                    && mps::named_by_pid_file(self.host, pipe)
                        .is_some_and(|named| named.id == process.id) =>
            {
                Ok(())
            }
            Keeper::Nobody | Keeper::Elsewhere => {
                contradiction("its process cannot be told from here".to_owned())
            }
        }
    }

    /// Tells the daemon to quit and waits until it is gone. If its clients do not end in time, it is told to cut them
    /// off.
    fn quit(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        record: DaemonRecord,
        process: &Running,
    ) -> Result<DaemonRecord, Error> {
        let control = Control::find(self.host, &record.pipe_directory, &record.log_directory)
            .ok_or(Error::NoProgram(CONTROL))?;
        let has_server = !process::children_of(self.host, process.id.pid).is_empty();
        if has_server {
            self.name_clients(ui, &control, &record)?;
        }
        // A daemon without a server waits for nobody.
        let limit = if has_server {
            self.limit
        } else {
            self.limit.max(IDLE_LIMIT)
        };
        let deadline = self.host.clock.monotonic() + limit;
        let waiting = format!("waiting for daemon {} to quit", record.name);
        match unless_interrupted(ui.waiting(&waiting, || control.quit(limit)))? {
            Ok(said) if said.is_empty() => {}
            Ok(said) => return self.refused(ui, locked, record, process, said),
            // It left while we asked, its sockets went, or it is still waiting: its process will tell.
            Err(_) => {}
        }
        let left = deadline.saturating_sub(self.host.clock.monotonic());
        if ui.waiting(&waiting, || self.wait_for_end(process, left))? {
            return self.finish(ui, locked, record);
        }
        let seconds = limit.as_secs();
        if has_server {
            ui.note(format!(
                "the clients of {} did not end within {seconds} s and are cut off",
                record.name
            ));
            let limit = Duration::from_secs(CUT_OFF) + END_LIMIT;
            // Whatever it answers, its process will tell.
            let ended = ui.waiting(&waiting, || {
                let _ = control.quit_after(CUT_OFF, limit);
                self.wait_for_end(process, END_LIMIT)
            });
            if ended? {
                return self.finish(ui, locked, record);
            }
        }
        let reason = format!("it did not quit within {seconds} s");
        self.end(ui, locked, record, process, &reason)
    }

    fn wait_for_end(&self, process: &Running, limit: Duration) -> Result<bool, Error> {
        let handle = Handle::of(self.host, process.id).map_err(|source| Error::Signal {
            pid: process.id.pid,
            source,
        })?;
        Ok(handle.is_none_or(|handle| handle.wait(self.host, limit)))
    }

    /// Says whom the end of the daemon will hit. One that does not tell is stopped all the same.
    fn name_clients(
        &self,
        ui: &mut Ui<'_>,
        control: &Control<'_>,
        record: &DaemonRecord,
    ) -> Result<(), Error> {
        let clients = unless_interrupted(attachment::clients_of(control, CLIENTS_LIMIT))?;
        for client in clients.unwrap_or_default() {
            let program = process::program_name(self.host, client.pid);
            ui.note(format!(
                "pid {} ({}) is a client of {}",
                client.pid,
                program.as_deref().unwrap_or("?"),
                record.name
            ));
        }
        Ok(())
    }

    /// `quit` came back with a refusal, which exits with 0. Without its privileged socket the daemon refuses everybody.
    fn refused(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        record: DaemonRecord,
        process: &Running,
        said: String,
    ) -> Result<DaemonRecord, Error> {
        let lost_socket = mps::lacks_privileged_socket(self.host, &record.pipe_directory);
        if (lost_socket || self.force) && daemon::is_proven(self.host, &record, process) {
            let reason = format!("it refused to quit: {said}");
            return self.end(ui, locked, record, process, &reason);
        }
        Err(Error::QuitRefused {
            name: record.name,
            pid: process.id.pid,
            said,
        })
    }

    /// Ends a proven daemon that cannot be told to quit, and its servers, which would stay behind. They go first: while
    /// the daemon lives, it proves whose a server is that does not mind.
    fn end(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        record: DaemonRecord,
        process: &Running,
        reason: &str,
    ) -> Result<DaemonRecord, Error> {
        ui.note(format!("daemon {} gets SIGTERM: {reason}", record.name));
        let servers = || process::children_of(self.host, process.id.pid);
        for server in servers() {
            self.end_one(ui, &record, &server)?;
        }
        // A program may have come meanwhile.
        let late = servers();
        for one in std::iter::once(process).chain(&late) {
            self.end_one(ui, &record, one)?;
        }
        self.finish(ui, locked, record)
    }

    fn end_one(&self, ui: &mut Ui<'_>, record: &DaemonRecord, one: &Running) -> Result<(), Error> {
        let waiting = format!("waiting for {} to end", one.id);
        if ui.waiting(&waiting, || daemon::terminate(self.host, one, END_LIMIT))? {
            return Ok(());
        }
        if self.force {
            ui.note(format!(
                "{} gets SIGKILL: work in flight may leave the GPU undefined until all its clients have ended",
                one.id
            ));
            if ui.waiting(&waiting, || daemon::kill(self.host, one, END_LIMIT))? {
                return Ok(());
            }
        }
        Err(Error::StillRunning {
            name: record.name.clone(),
            pid: one.id.pid,
            forced: self.force,
        })
    }

    /// The process is gone. The lock follows within milliseconds, and only then may another daemon be started there.
    fn finish(
        &self,
        ui: &mut Ui<'_>,
        locked: &Locked<'_>,
        record: DaemonRecord,
    ) -> Result<DaemonRecord, Error> {
        let pipe = &record.pipe_directory;
        let ours = record.process.pid;
        self.host.wait_for(END_LIMIT, || {
            (mps::lock_holder(self.host, pipe) != Some(ours)).then_some(())
        });
        daemon::forget(self.host, ui, locked, &record)?;
        Ok(record)
    }
}

fn not_the_daemon(daemon: &Observed, process: &Running) -> Error {
    let pipe = &daemon.record.pipe_directory;
    Error::Contradiction {
        pipe: pipe.clone(),
        found: format!(
            "the recorded pid {} is not a control daemon of this directory, and {}",
            process.id.pid,
            daemon.socket.describe(&mps::control_path(pipe))
        ),
    }
}
