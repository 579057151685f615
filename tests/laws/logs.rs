//! The logs of a daemon: no byte of a file is lost, and whichever way it is read, the same messages come out.

use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::Host;
use uni_cumps::log_line::{Level, LocalTime, Log, Message, Since, Wanted, merged, parse};
use uni_cumps::mps::LogFile;
use uni_cumps::ui::Answer;

use crate::fake::host_with_programs;
use crate::invented::text;
use crate::{MANY, law};

/// A stamp that is right, with some milliseconds of a minute.
fn stamp() -> impl Strategy<Value = String> {
    let source = proptest::sample::select(vec!["Control", "Server", "Other", "Legacy Server"]);
    (0..60_000_u32, source, 1..=4_194_304_u32).prop_map(|(time, source, pid)| {
        let (seconds, rest) = (time / 1000, time % 1000);
        format!("[2026-11-29 16:44:{seconds:02}.{rest:03} {source} {pid:>5}]")
    })
}

/// Bytes of a line: mostly a stamp and a text, now and then anything.
fn line() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        6 => (stamp(), text()).prop_map(|(stamp, text)| format!("{stamp} {text}").into_bytes()),
        1 => text().prop_map(String::into_bytes),
        1 => vec(any::<u8>(), 0..40),
        1 => (stamp(), 0..60_usize).prop_map(|(stamp, length)| {
            stamp.as_bytes()[..length.min(stamp.len())].to_vec()
        }),
    ]
}

/// The bytes of a file. Its last line may have no end.
fn file() -> impl Strategy<Value = Vec<u8>> {
    (vec(line(), 0..30), any::<bool>()).prop_map(|(lines, has_end)| {
        let mut bytes = lines.join(&b'\n');
        if has_end {
            bytes.push(b'\n');
        }
        bytes
    })
}

fn host(root: &Path) -> Host {
    host_with_programs(root, Box::new(|call| panic!("nobody is called: {call:?}")))
}

fn open(host: &Host, log: Log, wanted: Wanted, waits: bool) -> LogFile {
    LogFile::open(host, Path::new("/"), log, wanted, waits).unwrap()
}

/// The file as it is read from its beginning.
fn read(host: &Host, bytes: &[u8], log: Log) -> Vec<Message> {
    let path = host.root.at(log.file_name());
    fs::write(path, bytes).unwrap();
    open(host, log, Wanted::default(), false)
        .messages()
        .collect()
}

fn joined(messages: &[Message]) -> Vec<u8> {
    let bytes: Vec<&[u8]> = messages.iter().map(|message| &message.bytes[..]).collect();
    bytes.concat()
}

#[test]
fn any_bytes_are_a_head_and_a_text_and_nothing_is_lost() {
    law(MANY, line(), |line| {
        let parsed = parse(&line);
        prop_assert_eq!([parsed.head, parsed.text].concat(), line.clone());
        prop_assert_eq!(parsed.stamp.is_some(), !parsed.head.is_empty());
        let message = Message {
            log: Log::Server,
            bytes: line,
        };
        // Whatever it is, it has a level and a form for programs.
        let object = message.to_json();
        prop_assert_eq!(object["level"].as_str(), Some(message.level().word()));
        Ok(())
    });
}

#[test]
fn a_stamp_is_read_as_it_was_written() {
    law(MANY, (stamp(), text()), |(written, said)| {
        let line = format!("{written} {said}");
        let parsed = parse(line.as_bytes());
        prop_assert_eq!(parsed.text, said.as_bytes());
        let Some(stamp) = parsed.stamp else {
            return Err(proptest::test_runner::TestCaseError::fail(line));
        };
        let again = format!("[{} {} {:>5}]", stamp.time, stamp.source, stamp.pid);
        prop_assert_eq!(again, written);
        Ok(())
    });
}

#[test]
fn a_time_that_is_asked_for_is_read_or_refused() {
    let times = prop_oneof![
        text(),
        "[0-9]{0,21}[smhdwx]?",
        "[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\\.[0-9]{3})?)?)?",
    ];
    law(MANY, times, |text| {
        if let Ok(Since::At(time)) = text.parse() {
            prop_assert!(time.to_string().starts_with(&text.trim().replace('T', " ")));
            prop_assert_eq!(LocalTime::read(&time.to_string()), Some(time));
        }
        Ok(())
    });
}

#[test]
fn a_file_is_its_messages() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    law(1_000, file(), |bytes| {
        let messages = read(&host, &bytes, Log::Control);
        prop_assert_eq!(joined(&messages), bytes);
        for message in messages.iter().skip(1) {
            prop_assert!(message.time().is_some());
        }
        Ok(())
    });
}

#[test]
fn the_last_messages_are_the_last_of_all_that_are_wanted() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    let levels = proptest::option::of(proptest::sample::select(vec![
        Level::Noise,
        Level::Info,
        Level::Error,
    ]));
    // Many times the same is more than what is looked at first.
    law(
        300,
        (file(), 1..300_usize, 1..1000_usize, levels),
        |(bytes, times, count, level)| {
            let bytes = [&bytes[..], b"\n"].concat().repeat(times);
            let wanted = Wanted { since: None, level };
            let whole = read(&host, &bytes, Log::Control);
            let mut takes = wanted.at_first();
            let chosen = whole.into_iter().filter(|message| {
                takes = wanted.takes(message, takes);
                takes
            });
            let mut all: Vec<Message> = chosen.collect();
            let from_the_beginning = open(&host, Log::Control, wanted, false).messages().count();
            prop_assert_eq!(from_the_beginning, all.len());
            let last = open(&host, Log::Control, wanted, false).last(count);
            prop_assert_eq!(
                last.into_iter().collect::<Vec<_>>(),
                all.split_off(all.len().saturating_sub(count))
            );
            Ok(())
        },
    );
}

#[test]
fn a_file_that_grows_in_any_steps_gives_every_byte_once() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    let path = root.path().join("server.log");
    law(500, (file(), vec(0..2_000_usize, 0..6)), |(bytes, cuts)| {
        fs::write(&path, "").unwrap();
        let mut file = open(&host, Log::Server, Wanted::default(), true);
        let mut ends: Vec<usize> = cuts;
        ends.iter_mut().for_each(|end| *end = bytes.len().min(*end));
        ends.push(bytes.len());
        ends.sort_unstable();
        let mut found = Vec::new();
        for end in ends {
            let so_far = fs::read(&path).unwrap().len();
            let mut more = fs::OpenOptions::new().append(true).open(&path).unwrap();
            std::io::Write::write_all(&mut more, &bytes[so_far..end]).unwrap();
            found.extend(file.news());
            prop_assert!(joined(&found).is_empty() || joined(&found).ends_with(b"\n"));
        }
        found.extend(file.leftovers());
        prop_assert_eq!(joined(&found), bytes);
        Ok(())
    });
}

#[test]
fn two_logs_are_one_row_in_which_each_keeps_its_order() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    law(500, (file(), file()), |(control, server)| {
        let mut all = [
            read(&host, &control, Log::Control),
            read(&host, &server, Log::Server),
        ];
        let is_sorted = |row: &[Message]| row.is_sorted_by_key(Message::time);
        for sorted in [false, true] {
            if sorted {
                all.iter_mut()
                    .for_each(|row| row.sort_by_key(Message::time));
            }
            let [control, server] = all.clone();
            let row: Vec<Message> = merged(control.into_iter(), server.into_iter()).collect();
            for (log, messages) in [Log::Control, Log::Server].into_iter().zip(&all) {
                let of_log = row.iter().filter(|message| message.log == log);
                prop_assert_eq!(&of_log.cloned().collect::<Vec<_>>(), messages);
            }
            prop_assert!(!sorted || is_sorted(&row));
        }
        Ok(())
    });
}
