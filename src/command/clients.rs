//! `clients`: who is on the GPUs through our daemons, and the safe end of one of them.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::census::{self, Client, Counted, Ended, Ending, Server};
use crate::cli::ClientsArgs;
use crate::daemon::{self, Observed};
use crate::error::Error;
use crate::host::Host;
use crate::mps::ServerState;
use crate::store::Store;
use crate::ui::{Answer, Cell, Tone, Ui, plain, python_bool};

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &ClientsArgs) -> Result<u8, Error> {
    let daemons = daemons(host, args)?;
    if let Some(pid) = args.terminate {
        let is_named = args.daemon.name.is_some() || args.daemon.gpu.is_some();
        let ending = Ending {
            pid,
            name: daemons
                .first()
                .filter(|_| is_named)
                .map(|daemon| &daemon.record.name),
            signal: args.signal,
            limit: Duration::from_secs(args.timeout),
        };
        let waiting = format!("waiting for the end of client {pid}");
        let ended = ui.waiting(&waiting, || census::end_client(host, &daemons, &ending))?;
        ui.answer(&ended, args.json);
        return Ok(0);
    }
    let counted = ui.waiting("asking the daemons", || census::take(host, &daemons))?;
    let failed = counted.iter().any(|daemon| daemon.servers.is_err());
    let now = host.clock.now().duration_since(UNIX_EPOCH);
    let report = Report {
        counted,
        now: now.unwrap_or_default().as_secs(),
    };
    ui.answer(&report, args.json);
    // Nobody may take it for an answer that there are no clients.
    Ok(u8::from(failed))
}

/// The daemon that is meant, or all that run.
fn daemons(host: &Host, args: &ClientsArgs) -> Result<Vec<Observed>, Error> {
    let store = Store::of(host)?;
    let (name, gpu) = (args.daemon.name.as_deref(), args.daemon.gpu.as_deref());
    if name.is_none() && gpu.is_none() {
        let (mut all, _) = daemon::observe_all(host, &store)?;
        all.retain(|daemon| daemon.state.runs());
        return Ok(all);
    }
    let meant = daemon::meant(host, &store, name, gpu)?;
    match meant.state.runs() {
        true => Ok(vec![meant]),
        false => daemon::reachable(host, &store, meant).map(|_| Vec::new()),
    }
}

struct Report {
    counted: Vec<Counted>,
    /// Seconds since 1970.
    now: u64,
}

impl Answer for Report {
    fn to_json(&self) -> Value {
        let daemons = self.counted.iter().map(|daemon| {
            let servers = daemon.servers.as_ref();
            json!({
                "name": daemon.name.as_str(),
                "servers": servers.map_or(Vec::new(), |it| it.iter().map(server_json).collect()),
                "error": servers.err(),
            })
        });
        json!({"daemons": daemons.collect::<Vec<_>>()})
    }

    fn print(&self, ui: &mut Ui<'_>) {
        if self.counted.is_empty() {
            ui.line("daemons=none");
        }
        for Counted { name, servers } in &self.counted {
            let servers = match servers {
                Ok(servers) => servers,
                Err(reason) => {
                    ui.line(format!("daemon name={name} error={reason}"));
                    continue;
                }
            };
            ui.line(format!("daemon name={name} servers={}", servers.len()));
            for server in servers {
                ui.line(format!(
                    "server daemon={name} pid={} uid={} state={} clients={}",
                    server.pid,
                    server.uid,
                    or_unknown(server.state.map(ServerState::word)),
                    server.clients.len()
                ));
                for client in &server.clients {
                    ui.line(format!(
                        "client daemon={name} server={} pid={} uid={} user={} since={} memory_mib={} threads={} program={}",
                        server.pid,
                        client.pid,
                        client.uid,
                        or_unknown(client.user.as_ref()),
                        or_unknown(client.since),
                        or_unknown(client.memory_mib),
                        or_unknown(client.threads),
                        or_unknown(client.program.as_ref()),
                    ));
                }
            }
        }
    }

    fn show(&self, ui: &mut Ui<'_>) {
        if self.counted.is_empty() {
            ui.line("No daemon. To start one: uni-cumps start");
            return;
        }
        let rows: Vec<Vec<Cell>> = self.counted.iter().flat_map(|it| self.rows(it)).collect();
        if !rows.is_empty() {
            let heading = [
                "DAEMON", "SERVER", "STATE", "CLIENT", "PROGRAM", "USER", "AGE", "MIB", "THREADS",
            ];
            ui.table(&heading, &rows);
        }
        for Counted { name, servers } in &self.counted {
            if let Err(reason) = servers {
                ui.verdict(name.as_str(), Tone::Bad, reason);
            }
        }
    }
}

impl Report {
    /// A row for each client, and one for whoever has none.
    fn rows(&self, daemon: &Counted) -> Vec<Vec<Cell>> {
        let name = || plain(&daemon.name);
        let Ok(servers) = &daemon.servers else {
            return Vec::new();
        };
        if servers.is_empty() {
            let mut row = vec![name(), ("none".to_owned(), Tone::Faint)];
            row.resize(9, ("-".to_owned(), Tone::Faint));
            return vec![row];
        }
        let rows_of = |server: &Server| -> Vec<Vec<Cell>> {
            let first = || vec![name(), plain(server.pid), state_cell(server.state)];
            if server.clients.is_empty() {
                let mut row = first();
                row.push(("none".to_owned(), Tone::Faint));
                row.resize(9, ("-".to_owned(), Tone::Faint));
                return vec![row];
            }
            let clients = server.clients.iter();
            clients
                .map(|client| [first(), self.client_cells(client)].concat())
                .collect()
        };
        servers.iter().flat_map(rows_of).collect()
    }

    fn client_cells(&self, client: &Client) -> Vec<Cell> {
        let cell = |value: Option<String>| match value {
            Some(value) => plain(value),
            None => ("?".to_owned(), Tone::Faint),
        };
        let age = client
            .since
            .map(|since| age(self.now.saturating_sub(since)));
        vec![
            plain(client.pid),
            cell(client.program.clone()),
            plain(
                client
                    .user
                    .clone()
                    .unwrap_or_else(|| client.uid.to_string()),
            ),
            cell(age),
            cell(client.memory_mib.map(|memory| memory.to_string())),
            cell(client.threads.map(|threads| format!("{threads} %"))),
        ]
    }
}

fn state_cell(state: Option<ServerState>) -> Cell {
    match state {
        Some(state @ ServerState::Active) => (state.word().to_owned(), Tone::Good),
        Some(state @ ServerState::Initializing) => (state.word().to_owned(), Tone::Doubtful),
        Some(state @ ServerState::Fault) => (state.word().to_owned(), Tone::Bad),
        None => ("?".to_owned(), Tone::Faint),
    }
}

fn server_json(server: &Server) -> Value {
    let client = |client: &Client| {
        json!({
            "pid": client.pid,
            "program": client.program,
            "uid": client.uid,
            "user": client.user,
            "since": client.since,
            "memory_mib": client.memory_mib,
            "threads": client.threads,
        })
    };
    json!({
        "pid": server.pid,
        "uid": server.uid,
        "state": server.state.map(ServerState::word),
        "clients": server.clients.iter().map(client).collect::<Vec<_>>(),
    })
}

fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or("unknown".to_owned(), |value| value.to_string())
}

/// A time in its two largest units.
fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

impl Answer for Ended {
    fn to_json(&self) -> Value {
        json!({"terminated": {
            "pid": self.pid,
            "program": self.program,
            "daemon": self.daemon.as_str(),
            "server": self.server,
            "signalled": self.signalled,
            "running": self.runs,
        }})
    }

    fn print(&self, ui: &mut Ui<'_>) {
        ui.line(format!(
            "terminated pid={} daemon={} server={} signalled={} running={} program={}",
            self.pid,
            self.daemon,
            self.server,
            python_bool(self.signalled),
            python_bool(self.runs),
            or_unknown(self.program.as_ref()),
        ));
    }

    fn show(&self, ui: &mut Ui<'_>) {
        let program = self.program.as_deref().unwrap_or("?");
        let end = match (self.runs, self.signalled) {
            (true, _) => "it runs on, and its next CUDA call fails with error 810",
            (false, true) => "SIGTERM has ended it",
            (false, false) => "it has ended",
        };
        let text = format!(
            "pid {} ({program}) is no client of {} any more; {end}",
            self.pid, self.daemon
        );
        ui.verdict("done", Tone::Good, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_its_two_largest_units() {
        for (seconds, expected) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min 0 s"),
            (3599, "59 min 59 s"),
            (3600, "1 h 0 min"),
            (86_399, "23 h 59 min"),
            (86_400, "1 d 0 h"),
            (200_000, "2 d 7 h"),
        ] {
            assert_eq!(age(seconds), expected);
        }
    }
}
