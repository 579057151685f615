//! `env`: what a client of a recorded daemon needs in its environment, in the form that a shell or a launcher reads. It is
//! on the path of every new shell, so it calls no program and takes no lock.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::cli::EnvArgs;
use crate::daemon;
use crate::env_file::{self, Format};
use crate::error::Error;
use crate::host::Host;
use crate::process;
use crate::record::{CLIENT_VARIABLES, DaemonRecord};
use crate::shell::{Shell, Unwritable};
use crate::store::Store;
use crate::ui::Ui;

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &EnvArgs) -> Result<u8, Error> {
    let (form, shell) = (args.form(), args.shell.unwrap_or(Shell::Posix));
    if args.unset {
        unset(ui, form, shell);
        return Ok(0);
    }
    let printed = wanted(host, args).and_then(|(record, notes)| {
        print(host, ui, &record, form, shell)?;
        Ok(notes)
    });
    match printed {
        Ok(notes) => {
            let shell_note = (form == Format::Shell && args.shell.is_none())
                .then(|| other_shell(host))
                .flatten();
            for note in notes.into_iter().chain(shell_note) {
                ui.note(note);
            }
            Ok(0)
        }
        Err(error) => {
            ui.verbatim(failing(form, shell).as_deref().unwrap_or_default());
            Err(error)
        }
    }
}

fn wanted(host: &Host, args: &EnvArgs) -> Result<(DaemonRecord, Vec<String>), Error> {
    let store = Store::of(host)?;
    let found = match args.by_rank {
        true => daemon::of_rank(host, &store)?,
        false => daemon::meant(
            host,
            &store,
            args.daemon.name.as_deref(),
            args.daemon.gpu.as_deref(),
        )?,
    };
    daemon::for_client(host, &store, found)
}

fn print(
    host: &Host,
    ui: &mut Ui<'_>,
    record: &DaemonRecord,
    form: Format,
    shell: Shell,
) -> Result<(), Error> {
    let variables = record.client_environment();
    let each = |line: &dyn Fn(&str, &str) -> Result<String, Unwritable>, form| {
        let lines = variables.iter().map(|(key, value)| match line(key, value) {
            Ok(line) => Ok(line + "\n"),
            Err(holds) => Err(Error::Unwritable { key, form, holds }),
        });
        lines.collect::<Result<String, Error>>()
    };
    match form {
        Format::Shell => ui.verbatim(&each(&|key, value| shell.set(key, value), shell.name())?),
        Format::Json => {
            let env: Map<String, Value> = variables
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value.into()))
                .collect();
            ui.json(&json!({"name": record.name.as_str(), "env": env}));
        }
        Format::Dotenv => ui.verbatim(&each(&env_file::dotenv, "a .env file")?),
        Format::Systemd => {
            let lines = each(&env_file::systemd, "systemd")?;
            ui.verbatim(&format!("[Service]\n{lines}"));
        }
        Format::Docker => {
            let user = (host.uid, process::group_of_ours());
            let flags = env_file::docker(&variables, &record.pipe_directory, user);
            let [_, key, _] = CLIENT_VARIABLES;
            let form = "docker";
            let flags = flags.map_err(|holds| Error::Unwritable { key, form, holds })?;
            ui.verbatim(&format!("{}\n", flags.join(" ")));
        }
        Format::Github => {
            let entries = variables
                .iter()
                .map(|(key, value)| env_file::github(key, value));
            append(host, &entries.collect::<String>())?;
        }
    }
    Ok(())
}

/// Adds entries to GitHub's variable file, behind what earlier steps have left there.
fn append(host: &Host, entries: &str) -> Result<(), Error> {
    let file = host.env.get_filled("GITHUB_ENV").map(PathBuf::from);
    let path = host.cwd.join(file.ok_or(Error::NoGithubEnv)?);
    let written = OpenOptions::new()
        .read(true)
        .append(true)
        .open(host.root.at(&path))
        .and_then(|mut file| {
            // An earlier step may have ended without a newline.
            let mut last = [b'\n'];
            if file.seek(SeekFrom::End(-1)).is_ok() {
                file.read_exact(&mut last)?;
            }
            let separator = if last == [b'\n'] { "" } else { "\n" };
            file.write_all(format!("{separator}{entries}").as_bytes())
        });
    written.map_err(|source| Error::File {
        doing: "append to",
        path,
        source,
    })
}

/// What takes the variables away again.
fn unset(ui: &mut Ui<'_>, form: Format, shell: Shell) {
    match form {
        Format::Json => {
            let env: Map<String, Value> = CLIENT_VARIABLES
                .into_iter()
                .map(|key| (key.to_owned(), Value::Null))
                .collect();
            ui.json(&json!({"env": env}));
        }
        Format::Systemd => ui.verbatim(&format!(
            "[Service]\nUnsetEnvironment={}\n",
            CLIENT_VARIABLES.join(" ")
        )),
        // The command line lets no other form through.
        Format::Shell | Format::Dotenv | Format::Docker | Format::Github => {
            let lines = CLIENT_VARIABLES.map(|key| shell.unset(key) + "\n");
            ui.verbatim(&lines.concat());
        }
    }
}

/// What to print where there is nothing true to print: whoever reads it must not go on without MPS. A failure in JSON is
/// an object of its own, and GitHub's file is left as it is.
fn failing(form: Format, shell: Shell) -> Option<String> {
    Some(match form {
        Format::Shell => format!("{}\n", shell.fails()),
        Format::Dotenv => format!("{}\n", env_file::DOTENV_FAILS),
        Format::Systemd => format!("[Service]\n{}\n", env_file::SYSTEMD_FAILS),
        Format::Docker => format!("{}\n", env_file::DOCKER_FAILS),
        Format::Json | Format::Github => return None,
    })
}

/// A word to somebody whose shell does not understand what is printed by default. The syntax is never guessed: a script
/// must get the same everywhere.
fn other_shell(host: &Host) -> Option<String> {
    let parent = process::our_parent().and_then(|pid| process::program_name(host, pid));
    let login = host
        .env
        .get("SHELL")
        .and_then(|path| Path::new(path).file_name()?.to_str());
    let shell = parent
        .and_then(|program| Shell::named(&program))
        .or_else(|| Shell::named(login?))?;
    (!shell.is_posix()).then(|| {
        format!(
            "this is for POSIX shells; yours takes uni-cumps env --shell {}",
            shell.name()
        )
    })
}
