//! The lines of control.log and server.log as values: what stands before the text, what the text means, and how the
//! messages of two files become one row. Pure. The form, of drivers 535 to 580:
//! `[YYYY-MM-DD HH:MM:SS.mmm <source> <pid>] text`, in the local time of the daemon.

mod sign;
mod time;

use std::borrow::Cow;
use std::fmt;
use std::iter::Peekable;

pub use sign::{Level, Sign, words};
pub use time::{LocalTime, Since, SinceError};

/// The two logs of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Log {
    /// What the control daemon says.
    Control,
    /// What its servers say.
    Server,
}

impl Log {
    /// The name of the file.
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Control => "control.log",
            Self::Server => "server.log",
        }
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file_name())
    }
}

/// What stands before the text of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp<'l> {
    /// When it was said.
    pub time: LocalTime,
    /// Which kind of process said it: `Control`, `Server`, `Other`, `Client` or `Legacy Server`.
    pub source: &'l str,
    /// Its pid, in the pid namespace of the daemon.
    pub pid: u32,
}

/// Bytes of a log, taken apart. Nothing is lost: `head` and `text` together are all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed<'l> {
    /// The stamp with its brackets and the blank behind it; empty where there is none.
    pub head: &'l [u8],
    /// What the head says.
    pub stamp: Option<Stamp<'l>>,
    /// The rest.
    pub text: &'l [u8],
}

/// A source and a pid are far shorter.
const LONGEST_STAMP: usize = 80;

/// Takes a message apart, whatever it is. One without a stamp is all text.
pub fn parse(message: &[u8]) -> Parsed<'_> {
    let window = &message[..message.len().min(LONGEST_STAMP)];
    let end = window.iter().position(|byte| *byte == b']');
    let stamp = end.and_then(|end| stamp(message.get(1..end)?, message[0]));
    let (head, text) = match (end, stamp) {
        (Some(end), Some(_)) => {
            let blank = usize::from(message.get(end + 1) == Some(&b' '));
            message.split_at(end + 1 + blank)
        }
        _ => (&message[..0], message),
    };
    Parsed { head, stamp, text }
}

/// Reads what stands between the brackets.
fn stamp(inside: &[u8], bracket: u8) -> Option<Stamp<'_>> {
    let inside = std::str::from_utf8(inside)
        .ok()
        .filter(|_| bracket == b'[')?;
    let time = LocalTime::read(inside.get(..LocalTime::LENGTH)?)?;
    let (source, pid) = inside[LocalTime::LENGTH..].rsplit_once(' ')?;
    let source = source
        .strip_prefix(' ')?
        .trim_end_matches(' ')
        .trim_start_matches(' ');
    let is_word =
        |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let is_pid = !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit());
    (is_pid && source.split(' ').all(is_word)).then_some(Stamp {
        time,
        source,
        pid: pid.parse().ok()?,
    })
}

/// One thing that was said: a line with a stamp, and the lines behind it that have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The file that holds it.
    pub log: Log,
    /// Its bytes, with the newlines.
    pub bytes: Vec<u8>,
}

impl Message {
    /// Its parts.
    pub fn parsed(&self) -> Parsed<'_> {
        parse(&self.bytes)
    }

    /// When it was said; `None` for what stands before the first stamp of a file.
    pub fn time(&self) -> Option<LocalTime> {
        self.parsed().stamp.map(|stamp| stamp.time)
    }

    /// The text without the newline at its end, what is not UTF-8 replaced.
    pub fn text(&self) -> Cow<'_, str> {
        let text = self.parsed().text;
        let end = text.len()
            - text
                .iter()
                .rev()
                .take_while(|byte| b"\r\n".contains(byte))
                .count();
        String::from_utf8_lossy(&text[..end])
    }

    /// How it is to be taken, by its first line.
    pub fn level(&self) -> Level {
        Level::of(self.text().lines().next().unwrap_or_default())
    }
}

/// Which messages are asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// From this time on.
    pub since: Option<LocalTime>,
    /// Of this level and above.
    pub level: Option<Level>,
}

impl Wanted {
    /// Whether a message is asked for. What has no stamp follows `before`, the decision on the message before it.
    pub fn takes(&self, message: &Message, before: bool) -> bool {
        let Some(time) = message.time() else {
            return before;
        };
        self.since.is_none_or(|since| time >= since)
            && self.level.is_none_or(|level| message.level() >= level)
    }

    /// The decision before any message: a beginning without a stamp is old, and of no level.
    pub fn at_first(&self) -> bool {
        self.since.is_none() && self.level.is_none()
    }
}

/// The messages of two files as one row, the earlier ones first. Each file keeps its order, since its lines may be a few
/// milliseconds out of theirs, and what has no stamp stays behind what it followed.
pub fn merged(
    control: impl Iterator<Item = Message>,
    server: impl Iterator<Item = Message>,
) -> impl Iterator<Item = Message> {
    Merged {
        control: control.peekable(),
        server: server.peekable(),
    }
}

struct Merged<C: Iterator, S: Iterator> {
    control: Peekable<C>,
    server: Peekable<S>,
}

impl<C, S> Iterator for Merged<C, S>
where
    C: Iterator<Item = Message>,
    S: Iterator<Item = Message>,
{
    type Item = Message;

    fn next(&mut self) -> Option<Message> {
        match (self.control.peek(), self.server.peek()) {
            (Some(control), Some(server)) if server.time() < control.time() => self.server.next(),
            (Some(_), _) => self.control.next(),
            (None, _) => self.server.next(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(log: Log, line: &str) -> Message {
        Message {
            log,
            bytes: format!("{line}\n").into(),
        }
    }

    #[test]
    fn every_source_of_the_drivers_is_read() {
        for source in ["Control", "Other", "Server", "Client", "Legacy Server"] {
            let line = format!("[2026-11-30 06:07:37.586 {source}    12] Cmd:get_server_list");
            let parsed = parse(line.as_bytes());
            let stamp = parsed.stamp.unwrap();
            assert_eq!((stamp.source, stamp.pid), (source, 12));
            assert_eq!(stamp.time.to_string(), "2026-11-30 06:07:37.586");
            assert_eq!(parsed.text, b"Cmd:get_server_list");
        }
    }

    #[test]
    fn what_only_looks_like_a_stamp_is_text() {
        for line in [
            "",
            "[",
            "]",
            "(2026-11-30 06:07:37.586 Control 12] x",
            "[2026-11-30 06:07:37.586] x",
            "[2026-11-30 06:07:37.586 12] x",
            "[2026-11-30 06:07:37.586 Control] x",
            "[2026-11-30 06:07:37.586 Control +1] x",
            "[2026-11-30 06:07:37.586 Control 99999999999] x",
            "[2026-11-30 06:07 Control 12] x",
            "[2026-13-30 06:07:37.586 Control 12] x",
            "[2026-11-30 06:07:37,586 Control 12] x",
            " [2026-11-30 06:07:37.586 Control 12] x",
            "[2026-11-30 06:07:37.586 Cöntrol 12] x",
            "[2026-11-30 06:07:37.58é Control 12] x",
        ] {
            let parsed = parse(line.as_bytes());
            assert_eq!(parsed.stamp, None, "{line}");
            assert_eq!(parsed.text, line.as_bytes());
        }
    }

    #[test]
    fn two_files_become_one_row_and_each_keeps_its_order() {
        let line = |log, time: &str| said(log, &format!("[2026-11-30 06:07:{time} X 1] x"));
        let control = [
            said(Log::Control, "a line of an older daemon"),
            line(Log::Control, "01.005"),
            line(Log::Control, "01.003"),
            line(Log::Control, "03.000"),
        ];
        let server = [
            line(Log::Server, "01.004"),
            line(Log::Server, "03.000"),
            line(Log::Server, "04.000"),
        ];
        let row: Vec<String> = merged(control.into_iter(), server.into_iter())
            .map(|message| {
                let time = message.time().map(|time| time.to_string()[17..].to_owned());
                format!("{:?} {}", message.log, time.unwrap_or_default())
            })
            .collect();
        assert_eq!(
            row,
            [
                "Control ",
                "Server 01.004",
                "Control 01.005",
                "Control 01.003",
                "Control 03.000",
                "Server 03.000",
                "Server 04.000",
            ]
        );
    }

    #[test]
    fn a_message_of_two_lines_is_one_text() {
        let message = said(
            Log::Control,
            "[2026-11-30 06:07:37.586 Control 12] Removed Shm file at \n",
        );
        assert_eq!(message.text(), "Removed Shm file at ");
        assert_eq!(message.level(), Level::Noise);
        let message = said(
            Log::Control,
            "[2026-11-30 06:07:37.586 Control 12] Server 9 exited with status 0\nInvalid",
        );
        assert_eq!(message.level(), Level::Info);
    }
}
