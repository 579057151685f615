//! `logs`: what a daemon and its servers have said, as one row.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::{Lines, LogsArgs};
use crate::daemon;
use crate::error::{Error, LogFailure};
use crate::host::Host;
use crate::local_time;
use crate::log_line::{Level, LocalTime, Log, Message, Since, Wanted, merged};
use crate::mps::LogFile;
use crate::process;
use crate::record::{Belongs, DaemonName, DaemonRecord, ProcessId};
use crate::runtime_dir;
use crate::store::{Entry, Store};
use crate::ui::{Answer, Tone, Ui};

/// How many messages a person sees who asks for nothing else.
const ON_A_TERMINAL: usize = 50;

/// How often it is looked for more. Some file systems tell nobody of changes, so nothing else would do everywhere.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &LogsArgs) -> Result<u8, Error> {
    let store = Store::of(host)?;
    let meant = Meant::by(host, &store, args)?;
    let directory = &meant.directory;
    let is_missing = match fs::metadata(host.root.at(directory)) {
        Ok(meta) => !meta.is_dir(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    if is_missing {
        return Err(LogFailure::NoDirectory {
            name: meant.name,
            directory: meant.directory,
        }
        .into());
    }
    let wanted = Wanted {
        since: args.since.and_then(|since| meant.from(host, since)),
        level: args.level,
    };
    let mut files = Vec::new();
    for (log, is_left_out) in [(Log::Control, args.server), (Log::Server, args.control)] {
        if !is_left_out {
            files.push(LogFile::open(host, directory, log, wanted, args.follow)?);
        }
    }
    if !files.iter().any(LogFile::has_content) {
        let names: Vec<String> = files
            .iter()
            .map(|file| file.path().display().to_string())
            .collect();
        ui.note(format!(
            "nothing stands in {} yet; a daemon in the foreground, as start --foreground runs it, logs to its own standard output",
            names.join(" and ")
        ));
    }
    let reading = Reading {
        host,
        store: &store,
        meant: &meant,
        files,
    };
    match args.raw {
        true => reading.raw(ui, args.follow),
        false => reading.messages(ui, args),
    }
    Ok(0)
}

/// The daemon that is meant.
struct Meant {
    name: DaemonName,
    directory: PathBuf,
    life: Life,
}

/// By what it is seen that a daemon has ended.
#[derive(Clone, Copy)]
enum Life {
    /// This process is gone.
    Process(ProcessId),
    /// A start is at work, and what comes of it stands in the store.
    Start,
    /// It cannot be seen from here: it may go on.
    Unseen,
    /// It is over.
    Over,
}

impl Meant {
    fn by(host: &Host, store: &Store<'_>, args: &LogsArgs) -> Result<Self, Error> {
        // A daemon that is named is not looked for at its socket: that would leave two lines in its log.
        let Some(name) = &args.daemon.name else {
            let found = daemon::meant(host, store, None, args.daemon.gpu.as_deref());
            return match found {
                Ok(daemon) => Ok(Self::recorded(host, daemon.record)),
                Err(Error::NoLiveDaemon) => Err(LogFailure::NoneLive {
                    left: left(host, store)?,
                }
                .into()),
                Err(error) => Err(error),
            };
        };
        let name: DaemonName = name.parse()?;
        let refused = match store.entry(&name) {
            Some(Entry::Record(record)) if record.uid == host.uid => {
                return Ok(Self::recorded(host, record));
            }
            Some(Entry::Intent(intent)) if intent.uid == host.uid => {
                return Ok(Self {
                    name,
                    directory: intent.log_directory,
                    life: Life::Start,
                });
            }
            Some(Entry::Record(record) | Entry::Intent(record)) => {
                return Err(daemon::other_user(host, &record));
            }
            Some(damaged @ Entry::Damaged { .. }) => damaged.into_record().err(),
            None => None,
        };
        let own = own_logs(host).into_iter().find(|(own, _)| *own == name);
        match own {
            Some((name, directory)) => Ok(Self {
                name,
                directory,
                life: Life::Over,
            }),
            None => Err(refused.unwrap_or(Error::NoRecord(name))),
        }
    }

    fn recorded(host: &Host, record: DaemonRecord) -> Self {
        Self {
            life: life(host, &record),
            name: record.name,
            directory: record.log_directory,
        }
    }

    /// The variable by which the daemon's clock is known, where its process can be seen; otherwise the caller's own.
    fn time_zone(&self, host: &Host) -> Option<String> {
        match self.life {
            Life::Process(id) if process::still_running(host, id).is_some() => {
                process::variable_of(host, id.pid, "TZ")
            }
            _ => Some(host.env.get("TZ")?.to_string_lossy().into_owned()),
        }
    }

    /// The time on the daemon's clock from which on messages are wanted. What was before all times leaves nothing out.
    fn from(&self, host: &Host, since: Since) -> Option<LocalTime> {
        match since {
            Since::At(time) => Some(time),
            Since::Ago(ago) => local_time::before_now(host, ago, self.time_zone(host).as_deref()),
        }
    }

    /// Whether more may come.
    fn goes_on(&self, host: &Host, store: &Store<'_>) -> bool {
        match self.life {
            Life::Process(id) => process::still_running(host, id).is_some(),
            Life::Unseen => true,
            Life::Over => false,
            Life::Start => match store.entry(&self.name) {
                Some(Entry::Record(record) | Entry::Intent(record)) => match life(host, &record) {
                    Life::Process(id) => process::still_running(host, id).is_some(),
                    Life::Unseen | Life::Start => true,
                    Life::Over => false,
                },
                Some(Entry::Damaged { .. }) | None => false,
            },
        }
    }
}

fn life(host: &Host, record: &DaemonRecord) -> Life {
    match record.place.seen_from(&process::place(host)) {
        Belongs::Here => Life::Process(record.process),
        Belongs::OtherBoot => Life::Over,
        Belongs::OtherHost | Belongs::OtherPidNamespace => Life::Unseen,
    }
}

/// The default log directories that this user's daemons have left.
fn own_logs(host: &Host) -> Vec<(DaemonName, PathBuf)> {
    let is_ours = |path: &Path| {
        fs::symlink_metadata(host.root.at(path))
            .is_ok_and(|meta| meta.is_dir() && meta.uid() == host.uid)
    };
    let own = runtime_dir::own_directories(host).into_iter();
    own.map(|(name, own)| (name, own.join("log")))
        .filter(|(_, log)| is_ours(log))
        .collect()
}

/// The names under which there are logs.
fn left(host: &Host, store: &Store<'_>) -> Result<Vec<DaemonName>, Error> {
    let mut names = Vec::new();
    for entry in store.list()? {
        if let Entry::Record(record) | Entry::Intent(record) = entry
            && record.uid == host.uid
            && host.root.at(&record.log_directory).is_dir()
        {
            names.push(record.name);
        }
    }
    names.extend(own_logs(host).into_iter().map(|(name, _)| name));
    names.sort();
    names.dedup();
    Ok(names)
}

/// Logs that are being read.
struct Reading<'r> {
    host: &'r Host,
    store: &'r Store<'r>,
    meant: &'r Meant,
    files: Vec<LogFile>,
}

impl Reading<'_> {
    fn raw(mut self, ui: &mut Ui<'_>, follow: bool) {
        loop {
            let goes_on = follow && self.meant.goes_on(self.host, self.store);
            for file in &mut self.files {
                loop {
                    let bytes = file.bytes();
                    if bytes.is_empty() || !ui.is_heard() {
                        break;
                    }
                    ui.bytes(&bytes);
                }
            }
            if !goes_on {
                return self.end(ui, follow);
            }
            if !self.pause(ui) {
                return;
            }
        }
    }

    fn messages(mut self, ui: &mut Ui<'_>, args: &LogsArgs) {
        let form = Form::of(ui, args.json);
        let last = match args.lines {
            Some(Lines::Last(count)) => Some(count as usize),
            None if ui.for_people() && !args.json && args.since.is_none() => Some(ON_A_TERMINAL),
            Some(Lines::All) | None => None,
        };
        match last {
            None => form.print(ui, row(self.files.iter_mut().map(LogFile::messages))),
            Some(0) => self.files.iter_mut().for_each(LogFile::skip),
            Some(count) => self.last(ui, form, count, args.lines.is_none()),
        }
        if args.follow {
            self.follow(ui, form);
        }
    }

    fn last(&mut self, ui: &mut Ui<'_>, form: Form, count: usize, is_default: bool) {
        // One more of each, to know whether there are more.
        let all = self.files.iter_mut().map(|file| file.last(count + 1));
        let mut last: Vec<Message> = row(all).collect();
        let more = last.len().saturating_sub(count);
        if is_default && more > 0 {
            ui.note(format!(
                "these are the last {count} messages; for all of them: -n all"
            ));
        }
        form.print(ui, last.drain(more..));
    }

    fn follow(mut self, ui: &mut Ui<'_>, form: Form) {
        let mut told: Vec<Option<String>> = vec![None; self.files.len()];
        loop {
            let goes_on = self.meant.goes_on(self.host, self.store);
            let news = self.files.iter_mut().map(|file| {
                let mut news = file.news();
                if !goes_on {
                    news.extend(file.leftovers());
                }
                news
            });
            form.print(ui, row(news));
            for (file, told) in self.files.iter().zip(&mut told) {
                if file.obstacle() != told.as_deref() {
                    *told = file.obstacle().map(str::to_owned);
                    if let Some(obstacle) = told {
                        ui.note(format!("{obstacle}, and is not read"));
                    }
                }
            }
            if !goes_on {
                return self.end(ui, true);
            }
            if !self.pause(ui) {
                return;
            }
        }
    }

    /// Lets time pass; `false` once nobody reads any more.
    fn pause(&self, ui: &mut Ui<'_>) -> bool {
        if !ui.is_heard() {
            return false;
        }
        self.host.clock.sleep(PAUSE);
        ui.is_heard()
    }

    fn end(&self, ui: &mut Ui<'_>, follow: bool) {
        if follow && ui.is_heard() {
            ui.note(format!(
                "daemon {} does not run, so nothing more comes",
                self.meant.name
            ));
        }
    }
}

/// The messages of one or two files as one row.
fn row(
    mut files: impl Iterator<Item: IntoIterator<Item = Message>>,
) -> impl Iterator<Item = Message> {
    let (first, second) = (files.next(), files.next());
    merged(first.into_iter().flatten(), second.into_iter().flatten())
}

/// How messages are printed.
#[derive(Clone, Copy)]
enum Form {
    /// As they stand in the files, for programs.
    Plain,
    /// An object a line.
    Json,
    /// For a person.
    People,
}

/// So much is written at once.
const CHUNK: usize = 64 << 10;

impl Form {
    fn of(ui: &Ui<'_>, json: bool) -> Self {
        match json {
            true => Self::Json,
            false if ui.for_people() => Self::People,
            false => Self::Plain,
        }
    }

    /// Prints a row, as long as somebody reads it.
    fn print(self, ui: &mut Ui<'_>, row: impl Iterator<Item = Message>) {
        let mut chunk: Vec<u8> = Vec::new();
        for message in row {
            match self {
                Self::Plain => {
                    chunk.extend(&message.bytes);
                    if !message.bytes.ends_with(b"\n") {
                        chunk.push(b'\n');
                    }
                    if chunk.len() >= CHUNK {
                        ui.bytes(&chunk);
                        chunk.clear();
                    } else {
                        continue;
                    }
                }
                Self::Json => ui.json_line(&message.to_json()),
                Self::People => message.show(ui),
            }
            if !ui.is_heard() {
                return;
            }
        }
        ui.bytes(&chunk);
    }
}

impl Answer for Message {
    fn to_json(&self) -> Value {
        let stamp = self.parsed().stamp;
        json!({
            "time": stamp.map(|stamp| stamp.time.to_string()),
            "source": stamp.map(|stamp| stamp.source),
            "pid": stamp.map(|stamp| stamp.pid),
            "level": self.level().word(),
            "file": self.log.file_name(),
            "text": self.text(),
        })
    }

    fn print(&self, ui: &mut Ui<'_>) {
        ui.bytes(&self.bytes);
    }

    fn show(&self, ui: &mut Ui<'_>) {
        let tone = match self.level() {
            Level::Error => Tone::Bad,
            Level::Warning => Tone::Doubtful,
            Level::Info => Tone::Plain,
            Level::Noise => Tone::Faint,
        };
        let head = match self.parsed().stamp {
            Some(stamp) => format!("{} {:>7} {:>7}", stamp.time, stamp.source, stamp.pid),
            None => String::new(),
        };
        for (index, line) in self.text().split('\n').enumerate() {
            let head = match index {
                0 if !head.is_empty() => head.as_str(),
                _ => "   ",
            };
            ui.cells(&[(head.to_owned(), Tone::Faint), (line.to_owned(), tone)]);
        }
    }
}
