//! The log files of a daemon, read from the beginning, from near the end, or as they grow. A daemon keeps the files that
//! it has opened: after a rename or a removal it goes on writing into the old one, and after a truncation at the new end
//! (measured).

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::error::{Error, LogFailure};
use crate::host::Host;
use crate::log_line::{Log, Message, Wanted, parse};

/// How much is read at once.
const BLOCK: usize = 64 << 10;

/// What is longer than this is given out in pieces, whatever stands in the file.
const LONGEST: usize = 16 << 20;

/// How far from the end the last messages are looked for at first.
const NEAR_END: u64 = 64 << 10;

/// One log of a daemon.
pub struct LogFile {
    log: Log,
    /// Its path as we open it, and as it is called.
    place: PathBuf,
    path: PathBuf,
    now: Option<Opened>,
    /// Files that had the name before. The daemon may still write into them.
    before: VecDeque<Opened>,
    /// What stands in the file's place and is none.
    obstacle: Option<String>,
    waits: bool,
    wanted: Wanted,
    /// Whether the last message was wanted.
    takes: bool,
}

/// So many files that had the name before are read on.
const BEFORE: usize = 4;

impl LogFile {
    /// Opens a log of the daemon with this log directory, for what is `wanted` of it. One that is not there yet may come.
    /// Where reading `waits`, a line without an end is held back until it has one.
    pub fn open(
        host: &Host,
        directory: &Path,
        log: Log,
        wanted: Wanted,
        waits: bool,
    ) -> Result<Self, Error> {
        let path = directory.join(log.file_name());
        let place = host.root.at(&path);
        let now = match Opened::at(&place, waits) {
            Ok(opened) => opened,
            Err(NotOpened::Kind(found)) => return Err(LogFailure::NotAFile { path, found }.into()),
            Err(NotOpened::Failed(source)) => {
                return Err(Error::File {
                    doing: "read",
                    path,
                    source,
                });
            }
        };
        Ok(Self {
            log,
            place,
            path,
            now,
            before: VecDeque::new(),
            obstacle: None,
            waits,
            wanted,
            takes: wanted.at_first(),
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether something has been written.
    pub fn has_content(&self) -> bool {
        self.now.as_ref().is_some_and(|opened| opened.length() > 0)
    }

    /// The messages from where reading has come to, up to the end of the file as it is when that is reached.
    pub fn messages(&mut self) -> impl Iterator<Item = Message> {
        let (log, wanted) = (self.log, self.wanted);
        let (opened, takes) = (&mut self.now, &mut self.takes);
        let all = std::iter::from_fn(move || opened.as_mut()?.message(log));
        all.filter(move |message| {
            *takes = wanted.takes(message, *takes);
            *takes
        })
    }

    /// The last `count` messages, read from as near to the end as they are found.
    pub fn last(&mut self, count: usize) -> VecDeque<Message> {
        let mut distance = NEAR_END;
        loop {
            let Some(opened) = &mut self.now else {
                return VecDeque::new();
            };
            let from = opened.length().saturating_sub(distance);
            opened.go_to(from);
            self.takes = self.wanted.at_first();
            // What begins before is not whole.
            let mut is_whole = from == 0;
            let mut found = VecDeque::new();
            for message in self.messages() {
                is_whole |= message.time().is_some();
                if is_whole {
                    found.push_back(message);
                    if found.len() > count {
                        found.pop_front();
                    }
                }
            }
            if from == 0 || found.len() >= count {
                return found;
            }
            distance = distance.saturating_mul(4);
        }
    }

    /// Goes to the end: what stands there by now is not wanted.
    pub fn skip(&mut self) {
        if let Some(opened) = &mut self.now {
            let end = opened.length();
            opened.go_to(end);
        }
    }

    /// What has come since: the rest of a file that has lost its name, the whole of one that has got it, and of one that
    /// was truncated all that it holds now.
    pub fn news(&mut self) -> Vec<Message> {
        let renewed = self.renewed();
        let log = self.log;
        let mut found = Vec::new();
        for opened in self.before.iter_mut().chain(&mut self.now) {
            opened.drain(log, &mut found);
        }
        if let Some(renewed) = renewed {
            let forgotten = self.replace(renewed);
            found.extend(forgotten.and_then(|mut old| old.unfinished(log)));
            if let Some(opened) = &mut self.now {
                opened.drain(log, &mut found);
            }
        }
        self.choose(found)
    }

    /// What is left of last lines, once nothing more will come.
    pub fn leftovers(&mut self) -> Vec<Message> {
        let log = self.log;
        let all = self.before.iter_mut().chain(&mut self.now);
        let left = all.filter_map(|opened| opened.unfinished(log)).collect();
        self.choose(left)
    }

    fn choose(&mut self, mut messages: Vec<Message>) -> Vec<Message> {
        messages.retain(|message| {
            self.takes = self.wanted.takes(message, self.takes);
            self.takes
        });
        messages
    }

    /// Another file has the name now. Of those that had it before, the one that is not read any more is returned.
    fn replace(&mut self, renewed: Opened) -> Option<Opened> {
        self.before.extend(self.now.replace(renewed));
        match self.before.len() > BEFORE {
            true => self.before.pop_front(),
            false => None,
        }
    }

    /// Another file that has the name now.
    fn renewed(&mut self) -> Option<Opened> {
        let there = fs::symlink_metadata(&self.place).ok()?;
        let id = Some((there.dev(), there.ino()));
        if id == self.now.as_ref().map(|opened| opened.id) {
            self.obstacle = None;
            return None;
        }
        match Opened::at(&self.place, self.waits) {
            Ok(opened) => {
                self.obstacle = None;
                opened
            }
            Err(NotOpened::Kind(found)) => {
                self.obstacle = Some(format!("{:?} is {found}", self.path));
                None
            }
            Err(NotOpened::Failed(error)) => {
                self.obstacle = Some(format!("{:?} cannot be read: {error}", self.path));
                None
            }
        }
    }

    /// What has taken the place of the file and cannot be read.
    pub fn obstacle(&self) -> Option<&str> {
        self.obstacle.as_deref()
    }

    /// The next bytes as they are, at most a block of them; nothing where there are no more by now.
    pub fn bytes(&mut self) -> Vec<u8> {
        for opened in self.before.iter_mut().chain(&mut self.now) {
            let bytes = opened.bytes();
            if !bytes.is_empty() {
                return bytes;
            }
        }
        let Some(mut renewed) = self.renewed() else {
            return Vec::new();
        };
        let first = renewed.bytes();
        self.replace(renewed);
        first
    }
}

/// Why a log was not opened.
enum NotOpened {
    Kind(&'static str),
    Failed(io::Error),
}

/// A file and how far it has been read.
struct Opened {
    reader: BufReader<File>,
    id: (u64, u64),
    /// How many of its bytes have been taken.
    read: u64,
    /// A line that has no end yet.
    line: Vec<u8>,
    /// A message to which more may belong.
    message: Vec<u8>,
    waits: bool,
}

impl Opened {
    /// Opens what stands at `place`, which must be a regular file: nothing is waited for, and no link is followed.
    fn at(place: &Path, waits: bool) -> Result<Option<Self>, NotOpened> {
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits())
            .open(place);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let there = fs::symlink_metadata(place).map(|meta| meta.file_type());
                return Err(match there {
                    Ok(kind) if !kind.is_file() => NotOpened::Kind(word_for(kind)),
                    _ => NotOpened::Failed(error),
                });
            }
        };
        let meta = file.metadata().map_err(NotOpened::Failed)?;
        if !meta.is_file() {
            return Err(NotOpened::Kind(word_for(meta.file_type())));
        }
        Ok(Some(Self {
            id: (meta.dev(), meta.ino()),
            reader: BufReader::with_capacity(BLOCK, file),
            read: 0,
            line: Vec::new(),
            message: Vec::new(),
            waits,
        }))
    }

    fn length(&self) -> u64 {
        let meta = self.reader.get_ref().metadata();
        meta.map_or(0, |meta| meta.len())
    }

    /// Goes on reading from there.
    fn go_to(&mut self, offset: u64) {
        // A regular file can be read from anywhere.
        let _ = self.reader.seek(SeekFrom::Start(offset));
        self.read = offset;
        self.line.clear();
        self.message.clear();
    }

    /// The next line that has an end, or for which none is waited. What cannot be read is the end of the file.
    fn line(&mut self) -> Option<Vec<u8>> {
        let left = LONGEST.saturating_sub(self.line.len());
        let mut limited = self.reader.by_ref().take(left as u64);
        let taken = limited.read_until(b'\n', &mut self.line).unwrap_or(0);
        self.read += taken as u64;
        let is_left = !self.waits && !self.line.is_empty();
        let is_whole = is_left || self.line.ends_with(b"\n") || self.line.len() >= LONGEST;
        is_whole.then(|| std::mem::take(&mut self.line))
    }

    /// The next message whose lines have ends.
    fn message(&mut self, log: Log) -> Option<Message> {
        while let Some(line) = self.line() {
            let begins = parse(&line).stamp.is_some();
            let is_full = self.message.len() + line.len() > LONGEST;
            if (begins || is_full) && !self.message.is_empty() {
                let bytes = std::mem::replace(&mut self.message, line);
                return Some(Message { log, bytes });
            }
            match self.message.is_empty() {
                true => self.message = line,
                false => self.message.extend(line),
            }
        }
        let bytes = std::mem::take(&mut self.message);
        (!bytes.is_empty()).then_some(Message { log, bytes })
    }

    fn unfinished(&mut self, log: Log) -> Option<Message> {
        let bytes = std::mem::take(&mut self.line);
        (!bytes.is_empty()).then_some(Message { log, bytes })
    }

    /// Everything up to the end, and once more from the beginning where the file was cut.
    fn drain(&mut self, log: Log, found: &mut Vec<Message>) {
        if self.was_cut() {
            found.extend(self.unfinished(log));
            self.go_to(0);
        }
        found.extend(std::iter::from_fn(|| self.message(log)));
    }

    /// Whether the file is shorter than what was read of it.
    fn was_cut(&self) -> bool {
        self.length() < self.read
    }

    fn bytes(&mut self) -> Vec<u8> {
        if self.was_cut() {
            self.go_to(0);
        }
        let block = self.reader.fill_buf().map(<[u8]>::to_vec);
        let block = block.unwrap_or_default();
        self.reader.consume(block.len());
        self.read += block.len() as u64;
        block
    }
}

fn word_for(kind: fs::FileType) -> &'static str {
    match kind {
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}
