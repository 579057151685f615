//! What comes back from the control program: an answer is what stands beside its own echo, and nothing else that is
//! said, and no babbling, keeps us from an end.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{Just, any};
use proptest::sample::select;
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::mps::{AskError, CONTROL, Control, LogMark};
use uni_cumps::runner::{Finished, Invocation, RunError, Status};

use crate::fake::{Answer, host, host_with_programs, install, write};
use crate::invented::{bytes, phrase, text_of};
use crate::{MANY, law};

const LIMIT: Duration = Duration::from_secs(10);
const PIPE: &str = "/pipe";

/// What the control program prints. `MARKER` stands for the made-up word that the question carried.
const WORDS: &[&str] = &[
    "Unknown command \"MARKER\"\n",
    "Unknown command \"uni-cumps-1-0\"\n",
    "Unknown command \"\"\n",
    "Unknown command \"",
    "MARKER",
    "4711\n",
    "-1\n",
    "99999999999\n",
    "100.0\n",
    "\n",
    "Not enough privilege to execute quit command\n",
    "Cannot find MPS control daemon process\n",
    "Cannot send command\n",
];

fn said() -> impl Strategy<Value = String> {
    phrase(WORDS, &["", "", "\n", " "])
}

/// How one session ends.
#[derive(Clone, Debug)]
enum Session {
    Says(i32, String, String),
    TimesOut,
    CannotBeCalled,
}

fn session() -> impl Strategy<Value = Session> {
    prop_oneof![
        8 => (prop_oneof![Just(0), Just(0), any::<i32>()], said(), said())
            .prop_map(|(code, out, err)| Session::Says(code, out, err)),
        1 => Just(Session::TimesOut),
        1 => Just(Session::CannotBeCalled),
    ]
}

/// The lines that the control program read, the made-up word replaced by `MARKER`, and that word.
fn read(call: &Invocation) -> (Vec<String>, String) {
    let input = String::from_utf8(call.stdin.clone()).unwrap();
    let marker = input.lines().find(|line| line.starts_with("uni-cumps-"));
    let marker = marker.expect("every session carries one").to_owned();
    let lines = input.lines().map(|line| line.replace(&marker, "MARKER"));
    (lines.collect(), marker)
}

/// Sessions end like this, one after the other, and the last one again and again.
fn sessions(script: Vec<Session>) -> Box<Answer> {
    let next = AtomicUsize::new(0);
    Box::new(move |call| {
        let (_, marker) = read(call);
        let number = next.fetch_add(1, Ordering::Relaxed);
        match &script[number.min(script.len() - 1)] {
            Session::Says(code, out, err) => Ok(Finished {
                status: Status::Exited(*code),
                stdout: out.replace("MARKER", &marker),
                stderr: err.replace("MARKER", &marker),
                process_group: 0,
            }),
            Session::TimesOut => Err(RunError::TimedOut(LIMIT)),
            Session::CannotBeCalled => Err(RunError::Spawn(std::io::Error::other("no"))),
        }
    })
}

/// A machine with a control program and a pipe directory that nobody keeps.
fn machine() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    install(root.path(), &format!("bin/{CONTROL}"));
    std::fs::create_dir(root.path().join("pipe")).unwrap();
    root
}

#[test]
fn whatever_is_said_a_question_has_an_end() {
    let root = machine();
    law(MANY, vec(session(), 1..6), |script| {
        let host = host_with_programs(root.path(), sessions(script));
        let control = Control::find(&host, Path::new(PIPE), Path::new("/log")).unwrap();
        let servers = control.servers(LIMIT).map(|pids| format!("{pids:?}"));
        for answer in [servers, control.quit(LIMIT)] {
            match answer {
                Ok(_) => {}
                Err(AskError::Busy) => prop_assert!(false, "nobody else asks"),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
        prop_assert!(host.clock.monotonic() <= 2 * LIMIT);
        Ok(())
    });
}

/// A session that the daemon dropped: whatever it says, it does not echo. Three with status 0 would be believed.
fn dropped() -> impl Strategy<Value = Vec<Session>> {
    let says = (prop_oneof![Just(0), 2..256], said(), said());
    let session = says.prop_map(|(code, out, err)| {
        let out = out.replace("MARKER", "marker");
        let err = err.replace("Cannot find MPS control daemon", "");
        Session::Says(code, out, err)
    });
    vec(session, 0..3)
}

#[test]
fn an_answer_is_what_stands_beside_its_echo() {
    const ECHO: &str = "Unknown command \"MARKER\"";
    let root = machine();
    let before = said().prop_filter("the first echo counts", |text| !text.contains(ECHO));
    law(
        MANY,
        (dropped(), before, said()),
        |(mut script, before, after)| {
            let answered = format!("{before}{ECHO}{after}");
            script.push(Session::Says(0, answered, String::new()));
            for quits in [false, true] {
                let last_marker = Arc::new(Mutex::new(String::new()));
                let answer = sessions(script.clone());
                let program: Box<Answer> = Box::new({
                    let last_marker = Arc::clone(&last_marker);
                    move |call| {
                        let (lines, marker) = read(call);
                        let expected = match quits {
                            true => ["MARKER", "quit"],
                            false => ["what is it", "MARKER"],
                        };
                        assert_eq!(lines, expected);
                        *last_marker.lock().unwrap() = marker;
                        answer(call)
                    }
                });
                let host = host_with_programs(root.path(), program);
                let control = Control::find(&host, Path::new(PIPE), Path::new("/log")).unwrap();
                let (answer, side) = match quits {
                    true => (control.quit(LIMIT), &after),
                    false => (control.ask("what is it", LIMIT), &before),
                };
                let expected = side.replace("MARKER", &last_marker.lock().unwrap());
                prop_assert_eq!(answer.unwrap(), expected.trim());
            }
            Ok(())
        },
    );
}

#[test]
fn a_list_of_servers_comes_back() {
    let root = machine();
    let line_ends = select(&["\n", " \n", "\r\n", "\n\n", "\n\t"][..]);
    let pids = vec((1..=i32::MAX, line_ends), 0..5);
    law(MANY, pids, |lines| {
        let text: String = lines
            .iter()
            .map(|(pid, end)| format!("{pid}{end}"))
            .collect();
        let pids: Vec<i32> = lines.into_iter().map(|(pid, _)| pid).collect();
        let answer = format!("{text}Unknown command \"MARKER\"\n");
        let script = vec![Session::Says(0, answer, String::new())];
        let host = host_with_programs(root.path(), sessions(script));
        let control = Control::find(&host, Path::new(PIPE), Path::new("/log")).unwrap();
        prop_assert_eq!(control.servers(LIMIT).unwrap(), pids);
        Ok(())
    });
}

#[test]
fn the_log_is_quoted_from_where_it_ended_whatever_is_in_it() {
    let root = machine();
    let host = host(root.path());
    let lines = vec(text_of(4), 0..20).prop_map(|lines| lines.join("\n"));
    let new = prop_oneof![bytes(), lines.prop_map(String::into_bytes)];
    law(MANY, (bytes(), new), |(old, new)| {
        write(root.path(), "log/control.log", &old);
        let mark = LogMark::set(&host, Path::new("/log"));
        write(root.path(), "log/control.log", [old, new.clone()].concat());
        let new = String::from_utf8_lossy(&new);
        let lines: Vec<&str> = new.trim().lines().collect();
        let tail = lines[lines.len().saturating_sub(12)..].join("\n");
        prop_assert_eq!(mark.new_lines().unwrap_or_default(), tail);
        Ok(())
    });
}
