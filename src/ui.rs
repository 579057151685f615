//! The only file that prints: lines, tables, colours, JSON, failures. Nothing from outside reaches a terminal raw.

mod screen;

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

use crate::cli::{Show, When};
use crate::error::Error;
use crate::runner::{CommandRunner, Finished, Invocation, Mode, RunError, Status};
use crate::shell;

/// How a cell or a line is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Neither good nor bad.
    Plain,
    /// As it should be.
    Good,
    /// Worth a look.
    Doubtful,
    /// Wrong.
    Bad,
    /// Beside the point.
    Faint,
}

impl Tone {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Good => "\x1b[32m",
            Self::Doubtful => "\x1b[33m",
            Self::Bad => "\x1b[31m",
            Self::Faint => "\x1b[2m",
        }
    }
}

/// One cell of a table.
pub type Cell = (String, Tone);

/// A cell without a tone.
pub fn plain(text: impl ToString) -> Cell {
    (text.to_string(), Tone::Plain)
}

/// What a command has to say, in the three forms that it is read in.
pub trait Answer {
    /// For `--json`.
    fn to_json(&self) -> Value;
    /// For scripts.
    fn print(&self, ui: &mut Ui<'_>);
    /// For a person on a terminal.
    fn show(&self, ui: &mut Ui<'_>);
}

/// The two streams of a command.
pub struct Ui<'w> {
    out: &'w mut dyn Write,
    err: &'w mut dyn Write,
    out_is_terminal: bool,
    err_is_terminal: bool,
    out_has_color: bool,
    err_has_color: bool,
    quiet: bool,
    verbose: bool,
    failure: Option<io::Error>,
}

impl<'w> Ui<'w> {
    /// Prints to these streams. Colour is for terminals only, and `NO_COLOR` or `TERM=dumb` turns it off.
    pub fn new(
        (out, out_is_terminal): (&'w mut dyn Write, bool),
        (err, err_is_terminal): (&'w mut dyn Write, bool),
        color: bool,
    ) -> Self {
        Self {
            out,
            err,
            out_is_terminal,
            err_is_terminal,
            out_has_color: color && out_is_terminal,
            err_has_color: color && err_is_terminal,
            quiet: false,
            verbose: false,
            failure: None,
        }
    }

    /// Takes over what the command line says of the output.
    pub fn show(&mut self, show: &Show) {
        (self.quiet, self.verbose) = (show.quiet, show.verbose);
        match show.color {
            When::Auto => {}
            When::Always => (self.out_has_color, self.err_has_color) = (true, true),
            When::Never => (self.out_has_color, self.err_has_color) = (false, false),
        }
    }

    /// Gives an answer in the form that its reader takes.
    pub fn answer(&mut self, answer: &impl Answer, json: bool) {
        if json {
            self.json(&answer.to_json());
        } else if self.for_people() {
            answer.show(self);
        } else {
            answer.print(self);
        }
    }

    /// Whether a person reads standard output.
    pub fn for_people(&self) -> bool {
        self.out_is_terminal
    }

    /// One line of output.
    pub fn line(&mut self, text: impl AsRef<str>) {
        let text = printable(text.as_ref());
        self.write_out(&format!("{text}\n"));
    }

    /// A text for another program, byte for byte; on a terminal it is only looked at.
    pub fn verbatim(&mut self, text: &str) {
        if self.out_is_terminal {
            self.write_out(&printable_lines(text));
        } else {
            self.write_out(text);
        }
    }

    /// Bytes for another program as they are; on a terminal they are only looked at.
    pub fn bytes(&mut self, bytes: &[u8]) {
        if self.out_is_terminal {
            self.write_out(&printable_lines(&String::from_utf8_lossy(bytes)));
        } else {
            self.write_bytes(bytes);
        }
    }

    /// A line of parts with a blank between them, each in its tone.
    pub fn cells(&mut self, cells: &[Cell]) {
        let parts = cells
            .iter()
            .map(|(text, tone)| toned(&printable(text), *tone, self.out_has_color));
        let line = parts.collect::<Vec<_>>().join(" ");
        self.write_out(&format!("{line}\n"));
    }

    /// A call that would be made with the caller's environment and these variables, as a line of shell.
    pub fn call_with(&mut self, call: &Invocation, variables: &[(&str, String)]) {
        let variables = variables
            .iter()
            .map(|(key, value)| format!("{key}={} ", shell::quote(value)));
        self.verbatim(&format!(
            "{}\n",
            command_line(call, &variables.collect::<String>())
        ));
    }

    /// A call that would be made with no variables but its own, as a line of shell.
    pub fn call_with_environment(&mut self, call: &Invocation) {
        let mut variables = String::from("env -i ");
        for (key, value) in &call.env {
            let value = shell::quote(&value.to_string_lossy());
            variables.push_str(&format!("{}={value} ", key.display()));
        }
        self.verbatim(&format!("{}\n", command_line(call, &variables)));
    }

    /// Directories that would be made, for their owner alone, as a line of shell.
    pub fn making(&mut self, directories: &[&Path]) {
        let words: Vec<String> = directories
            .iter()
            .map(|path| shell::quote_path(path))
            .collect();
        self.verbatim(&format!("(umask 077; mkdir -p {})\n", words.join(" ")));
    }

    /// Lets time pass with `work` and shows a person how much of it, in a line that is gone afterwards.
    pub fn waiting<T>(&self, what: &str, work: impl FnOnce() -> T) -> T {
        self.waiting_beside(what, &|| true, work)
    }

    /// Likewise while a program has the terminal, as long as that `is_silent`: with its lines ours would mix.
    pub fn waiting_beside<T>(
        &self,
        what: &str,
        is_silent: &(dyn Fn() -> bool + Sync),
        work: impl FnOnce() -> T,
    ) -> T {
        let is_watched = self.err_is_terminal && !self.quiet && !self.verbose;
        if !is_watched {
            return work();
        }
        thread::scope(|scope| {
            let (working, done) = mpsc::channel::<()>();
            scope.spawn(move || spin(what, is_silent, &done));
            let result = work();
            drop(working);
            result
        })
    }

    /// A JSON document.
    pub fn json(&mut self, value: &Value) {
        self.write_out(&json_text(value));
    }

    /// A JSON document on one line, one of many.
    pub fn json_line(&mut self, value: &Value) {
        self.write_out(&written(value, CompactFormatter));
    }

    /// A table with a heading, its columns aligned.
    pub fn table(&mut self, heading: &[&str], rows: &[Vec<Cell>]) {
        let head: Vec<Cell> = heading
            .iter()
            .map(|title| ((*title).to_owned(), Tone::Faint))
            .collect();
        let all: Vec<Vec<Cell>> = std::iter::once(&head)
            .chain(rows)
            .map(|row| {
                row.iter()
                    .map(|(text, tone)| (printable(text), *tone))
                    .collect()
            })
            .collect();
        let width = |column: usize| {
            let cells = all.iter().filter_map(|row| row.get(column));
            cells
                .map(|(text, _)| text.chars().count())
                .max()
                .unwrap_or(0)
        };
        for row in &all {
            let mut line = String::new();
            for (column, (text, tone)) in row.iter().enumerate() {
                let padding = match column + 1 == row.len() {
                    true => 0,
                    false => width(column) - text.chars().count() + 2,
                };
                line.push_str(&toned(text, *tone, self.out_has_color));
                line.push_str(&" ".repeat(padding));
            }
            self.write_out(&format!("{line}\n"));
        }
    }

    /// A line with a word of some tone in front, for people.
    pub fn verdict(&mut self, word: &str, tone: Tone, text: &str) {
        let word = toned(word, tone, self.out_has_color);
        let text = printable(text);
        self.write_out(&format!("{word} {text}\n"));
    }

    /// Something the user should know; on stderr, so that scripts do not stumble over it.
    pub fn note(&mut self, text: impl AsRef<str>) {
        if !self.quiet {
            self.message("note", Tone::Doubtful, text.as_ref());
        }
    }

    /// What to type next; only for a person.
    pub fn next_step(&mut self, text: impl AsRef<str>) {
        if self.err_is_terminal && !self.quiet {
            self.message("next", Tone::Good, text.as_ref());
        }
    }

    /// A failure: what, why, and what to type. With `json` it is also the one object on standard output.
    pub fn failure(&mut self, error: &Error, json: bool) {
        self.message("error", Tone::Bad, &error.to_string());
        if let Some(cause) = error.cause() {
            self.message("cause", Tone::Faint, &cause);
        }
        self.message("hint", Tone::Good, &error.hint());
        if json {
            self.json(&error_json(error));
        }
    }

    /// What clap says of a command line, or its help.
    pub fn usage(&mut self, error: &clap::Error) {
        let color = match error.use_stderr() {
            true => self.err_has_color,
            false => self.out_has_color,
        };
        let rendered = error.render();
        let text = if color {
            rendered.ansi().to_string()
        } else {
            printable_lines(&rendered.to_string())
        };
        if error.use_stderr() {
            self.write_err(&text);
        } else {
            self.write_out(&text);
        }
    }

    fn message(&mut self, word: &str, tone: Tone, text: &str) {
        let word = toned(word, tone, self.err_has_color);
        let text = printable_lines(text);
        self.write_err(&format!("{word}: {text}\n"));
    }

    fn write_out(&mut self, text: &str) {
        self.write_bytes(text.as_bytes());
    }

    fn write_bytes(&mut self, bytes: &[u8]) {
        if self.failure.is_none() && !bytes.is_empty() {
            let written = self.out.write_all(bytes);
            self.failure = written.and_then(|()| self.out.flush()).err();
        }
    }

    /// Whether standard output still takes what is written. A pipe tells that its reader is gone before anything is written
    /// into it.
    pub fn is_heard(&self) -> bool {
        let stdout = io::stdout();
        let mut watched = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
        let is_broken = poll(&mut watched, PollTimeout::ZERO) == Ok(1);
        self.failure.is_none() && !is_broken
    }

    fn write_err(&mut self, text: &str) {
        // Nobody could be told.
        let _ = self.err.write_all(text.as_bytes());
    }

    /// Whether somebody still takes the output.
    pub fn is_read(&self) -> bool {
        self.failure.is_none()
    }

    /// Whether all output could be written. A reader that went away is no failure of ours; a full disk is.
    pub fn delivered(&mut self) -> bool {
        match self.failure.take() {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                self.message(
                    "error",
                    Tone::Bad,
                    &format!("the output could not be written: {error}"),
                );
                false
            }
            _ => true,
        }
    }
}

fn toned(text: &str, tone: Tone, has_color: bool) -> String {
    if has_color && tone != Tone::Plain {
        format!("{}{text}\x1b[0m", tone.code())
    } else {
        text.to_owned()
    }
}

/// Makes calls as the runner in it does, and tells each of them on standard error, ready to paste.
pub struct Traced(pub Arc<dyn CommandRunner>);

impl CommandRunner for Traced {
    fn run(&self, call: &Invocation) -> Result<Finished, RunError> {
        if call.mode == Mode::Replacing {
            // Nobody is here afterwards.
            trace("takes our place", call);
        }
        let begun = Instant::now();
        let result = self.0.run(call);
        let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
        let end = match &result {
            Ok(Finished {
                status: Status::Exited(code),
                ..
            }) => format!("exit {code}"),
            Ok(Finished {
                status: Status::Signaled(signal),
                ..
            }) => format!("signal {signal}"),
            Err(error) => error.to_string(),
        };
        trace(&format!("{milliseconds:.1} ms, {end}"), call);
        result
    }
}

fn trace(how: &str, call: &Invocation) {
    let line = printable(&command_line(call, &cuda_variables(call)));
    // A call of a thread is told while another thread prints; nobody could be told of a failure.
    let _ = writeln!(io::stderr(), "trace: {how}: {line}");
}

/// A call as one line of shell, with this in front of the program.
fn command_line(call: &Invocation, before: &str) -> String {
    let mut line = String::new();
    if !call.stdin.is_empty() {
        let input = String::from_utf8_lossy(&call.stdin).replace('\n', "\\n");
        line.push_str(&format!("printf {} | ", shell::quote(&input)));
    }
    line.push_str(before);
    line.push_str(&shell::quote_program(&call.program));
    for argument in &call.args {
        line.push(' ');
        line.push_str(&shell::quote(&argument.to_string_lossy()));
    }
    line
}

/// Those variables of a call that concern CUDA, as they are written before a program.
fn cuda_variables(call: &Invocation) -> String {
    call.env
        .iter()
        .filter(|(key, _)| key.as_encoded_bytes().starts_with(b"CUDA_"))
        .map(|(key, value)| {
            format!(
                "{}={} ",
                key.display(),
                shell::quote(&value.to_string_lossy())
            )
        })
        .collect()
}

/// A wait of less time than this is not worth a word.
const UNSEEN: Duration = Duration::from_millis(400);

/// Draws a spinner on standard error until `done` is closed or there is no silence any more, and takes it away again. It
/// stands behind the cursor, which stays where it is, and never goes on to a second line.
fn spin(what: &str, is_silent: &dyn Fn() -> bool, done: &mpsc::Receiver<()>) {
    let begun = Instant::now();
    let goes_on = |time| done.recv_timeout(time) == Err(RecvTimeoutError::Timeout) && is_silent();
    if !goes_on(UNSEEN) {
        return;
    }
    let mut err = io::stderr();
    for frame in ['|', '/', '-', '\\'].into_iter().cycle() {
        let seconds = begun.elapsed().as_secs();
        // Nobody could be told of a failure.
        let _ = write!(
            err,
            "\x1b7\x1b[?7l{frame} {what} ({seconds} s)\x1b[K\x1b[?7h\x1b8"
        );
        if !goes_on(Duration::from_millis(125)) {
            break;
        }
    }
    let _ = write!(err, "\x1b[K");
}

/// A failure as the object that `--json` prints.
pub fn error_json(error: &Error) -> Value {
    let message = match error.cause() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    };
    let mut failure = serde_json::json!({
        "error": {"code": error.code(), "message": message, "hint": error.hint()}
    });
    if let Error::Checkpoint(error) = error {
        let left = error
            .left()
            .map(|left| serde_json::json!({"pid": left.pid, "state": left.after.word()}));
        failure["left_in"] = left.collect();
    }
    failure
}

/// A truth value as the Python command prints it.
pub fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

/// `text` on one line, with everything that a terminal would act on shown as an escape.
pub fn printable(text: &str) -> String {
    text.chars()
        .fold(String::with_capacity(text.len()), |mut shown, letter| {
            if is_inert(letter) {
                shown.push(letter);
            } else {
                shown.extend(letter.escape_default());
            }
            shown
        })
}

/// The same for a text of several lines.
fn printable_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(printable).collect();
    lines.join("\n")
}

/// Neither a control character nor one that changes the direction of writing.
fn is_inert(letter: char) -> bool {
    !letter.is_control()
        && !matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// JSON as Python's `json.dumps(value, indent=2, sort_keys=True)` writes it, with a newline at the end: ASCII only, so
/// that it is inert on a terminal as well.
pub fn json_text(value: &Value) -> String {
    written(value, PrettyFormatter::new())
}

/// JSON in ASCII, laid out by `formatter`, with a newline at the end.
fn written(value: &Value, formatter: impl Formatter) -> String {
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, AsciiFormatter(formatter));
    // Writing a `Value` to memory does not fail.
    let _ = value.serialize(&mut serializer);
    bytes.push(b'\n');
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A form of serde_json's with everything outside of printable ASCII escaped.
struct AsciiFormatter<F>(F);

impl<F: Formatter> Formatter for AsciiFormatter<F> {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        text: &str,
    ) -> io::Result<()> {
        for letter in text.chars() {
            if letter.is_ascii() && !letter.is_ascii_control() {
                writer.write_all(&[letter as u8])?;
            } else {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_array(writer)
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value =
            json!({"b": [], "a": {"text": "é\u{1f600}\u{7f}\n\u{9b}"}, "c": 1_700_000_000.5});
        assert_eq!(
            json_text(&value),
            "{\n  \"a\": {\n    \"text\": \"\\u00e9\\ud83d\\ude00\\u007f\\n\\u009b\"\n  },\n  \"b\": [],\n  \"c\": 1700000000.5\n}\n"
        );
    }

    #[test]
    fn nothing_that_a_terminal_acts_on_is_printed() {
        assert_eq!(
            printable("a\x1b[31m\u{9b}b\r\n\u{202e}é"),
            "a\\u{1b}[31m\\u{9b}b\\r\\n\\u{202e}é"
        );
    }

    #[test]
    fn a_text_for_a_program_is_exact_and_only_looked_at_on_a_terminal() {
        let print = |is_terminal| {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            Ui::new((&mut out, is_terminal), (&mut err, is_terminal), false)
                .verbatim("a\tb\x0bc\nd");
            String::from_utf8(out).unwrap()
        };
        assert_eq!(print(false), "a\tb\x0bc\nd");
        assert_eq!(print(true), "a\\tb\\u{b}c\nd");
    }

    #[test]
    fn tables_are_aligned_and_coloured_only_on_a_terminal() {
        let rows = vec![vec![("live".to_owned(), Tone::Good), plain("x")]];
        let print = |is_terminal, color| {
            let (mut out, mut err) = (Vec::new(), Vec::new());
            Ui::new((&mut out, is_terminal), (&mut err, is_terminal), color)
                .table(&["STATE", "NAME"], &rows);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(print(false, true), "STATE  NAME\nlive   x\n");
        assert_eq!(print(true, false), "STATE  NAME\nlive   x\n");
        assert_eq!(
            print(true, true),
            "\x1b[2mSTATE\x1b[0m  \x1b[2mNAME\x1b[0m\n\x1b[32mlive\x1b[0m   x\n"
        );
    }
}
