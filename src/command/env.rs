//! `env`: what a client of a recorded daemon needs in its environment. It is on the path of every new shell, so it calls
//! no program and takes no lock.

use serde_json::{Map, Value, json};

use crate::cli::{EnvArgs, Shell};
use crate::daemon::{self, State};
use crate::error::Error;
use crate::host::Host;
use crate::record::DaemonRecord;
use crate::shell;
use crate::store::Store;
use crate::ui::Ui;

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &EnvArgs) -> Result<u8, Error> {
    match reachable_daemon(host, args.name.as_deref()) {
        Ok(daemon) => {
            print(ui, &daemon, args);
            Ok(0)
        }
        Err(error) => {
            if !args.json {
                ui.code(&[shell::FAILS.to_owned()]);
            }
            Err(error)
        }
    }
}

/// The daemon meant, if programs that get its environment will find it. They would otherwise run without MPS, and
/// nothing would say so.
fn reachable_daemon(host: &Host, name: Option<&str>) -> Result<DaemonRecord, Error> {
    let store = Store::of(host)?;
    let daemon = daemon::select(host, &store, name)?;
    match &daemon.state {
        State::Live(_) | State::NotAnswering(_) | State::OtherPidNamespace { reachable: true } => {
            Ok(daemon.record)
        }
        State::OtherPidNamespace { reachable: false } => {
            Err(Error::OtherPidNamespace(daemon.record.name))
        }
        State::Unreachable(_) => Err(daemon::unreachable(&daemon)),
        State::Stale | State::OtherBoot => Err(Error::Stale(daemon.record.name)),
        State::OtherHost => Err(daemon::other_host(host, &store, &daemon.record)),
    }
}

fn print(ui: &mut Ui<'_>, daemon: &DaemonRecord, args: &EnvArgs) {
    let variables = daemon.client_environment();
    if args.json {
        let env: Map<String, Value> = variables
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.into()))
            .collect();
        ui.json(&json!({"name": daemon.name.as_str(), "env": env}));
        return;
    }
    match args.shell {
        Shell::Posix => {
            let pairs = variables.iter().map(|(key, value)| (*key, value.as_str()));
            ui.code(&shell::exports(pairs));
        }
    }
}
