//! `/proc`: a process may call itself anything, and no file there, whatever is in it, breaks us.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::{Just, any};
use proptest::sample::select;
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::mps;
use uni_cumps::process::{self, Running};
use uni_cumps::record::ProcessId;

use crate::fake::{host, write};
use crate::invented::{bytes, damaged, text};
use crate::support::our_uid;
use crate::{MANY, law};

const PID: i32 = 42;

/// What a process can be called: any bytes, since it says so itself.
fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..16),
        vec(select(&b"() \n)S0\xff"[..]), 0..16)
    ]
}

/// The line of a process, as the kernel writes it, and what it says.
fn line() -> impl Strategy<Value = (Vec<u8>, Option<Running>)> {
    let numbers = (
        any::<i32>(),
        any::<i32>(),
        any::<u64>(),
        vec(0..=0x7fff_ffff_u32, 42),
    );
    let state = select(&['R', 'S', 'D', 'Z', 'T', 't', 'X', 'x', 'I'][..]);
    (name(), state, numbers).prop_map(|(name, state, (parent, group, start_ticks, rest))| {
        let mut line = format!("{PID} (").into_bytes();
        line.extend(name);
        line.extend(format!(") {state} {parent} {group} 1 0 -1 4194304").into_bytes());
        let numbers = |line: &mut Vec<u8>, numbers: &[u32]| {
            for number in numbers {
                line.extend(format!(" {number}").into_bytes());
            }
        };
        numbers(&mut line, &rest[..12]);
        line.extend(format!(" {start_ticks}").into_bytes());
        numbers(&mut line, &rest[12..]);
        line.push(b'\n');
        let runs = !matches!(state, 'Z' | 'X' | 'x');
        let running = runs.then_some(Running {
            id: ProcessId {
                pid: PID,
                start_ticks,
            },
            uid: our_uid(),
            stopped: matches!(state, 'T' | 't'),
            parent,
            group,
        });
        (line, running)
    })
}

#[test]
fn a_process_is_known_whatever_it_calls_itself() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    law(MANY, line(), |(line, expected)| {
        write(root.path(), "proc/42/stat", line);
        prop_assert_eq!(process::running(&host, PID), expected);
        Ok(())
    });
}

#[test]
fn no_line_of_proc_breaks_us() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    let lines = prop_oneof![
        bytes(),
        damaged(line().prop_map(|(line, _)| line)),
        (name(), bytes()).prop_map(|(name, rest)| [b"42 (", &name[..], b") ", &rest].concat()),
    ];
    law(MANY, lines, |line| {
        write(root.path(), "proc/42/stat", line);
        if let Some(process) = process::running(&host, PID) {
            prop_assert_eq!(process.id.pid, PID);
            prop_assert_eq!(process::still_running(&host, process.id), Some(process));
        }
        Ok(())
    });
}

#[test]
fn the_other_files_of_proc_are_read_whatever_is_in_them() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path());
    let link = prop_oneof!["pid:\\[[0-9]{0,24}\\]", text()];
    write(
        root.path(),
        "proc/42/stat",
        format!("42 (a) S 1 1{}", " 0".repeat(48)),
    );
    let texts = (
        prop_oneof![4 => bytes(), 1 => Just(Vec::new())],
        bytes(),
        link,
    );
    law(MANY, texts, |(one, other, link)| {
        let root = root.path();
        write(root, "proc/42/cmdline", [&one[..], b"\0", &other].concat());
        let name = one.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = std::str::from_utf8(name).ok();
        let expected = name.and_then(|name| name.rsplit('/').next());
        let found = process::program_name(&host, PID);
        prop_assert_eq!(found.as_deref(), expected);

        let environ = [&one[..], b"\0KEYS=no\0KEY=", &other, b"\0"].concat();
        write(root, "proc/42/environ", environ);
        let value = process::variable_of(&host, PID, "KEY");
        match std::str::from_utf8(&other) {
            Ok(text) if !text.contains('\0') => prop_assert_eq!(value.as_deref(), Some(text)),
            _ => prop_assert!(value.is_none_or(|text| !text.contains('\0'))),
        }

        write(root, "proc/sys/kernel/hostname", &one);
        write(root, "proc/sys/kernel/random/boot_id", &other);
        let namespace = root.join("proc/self/ns/pid");
        relink(&link, &namespace);
        let place = process::place(&host);
        let text = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).ok()?.trim().to_owned();
            (!text.is_empty()).then_some(text)
        };
        prop_assert_eq!(place.boot_id, text(&other));
        prop_assert_eq!(Some(place.host), text(&one).or(Some("unknown-host".into())));

        let pid = [b"42", &one[..]].concat();
        write(root, "pipe/nvidia-cuda-mps-control.pid", &pid);
        let named = mps::named_by_pid_file(&host, Path::new("/pipe"));
        let names_it = text(&pid).is_some_and(|pid| pid == "42");
        prop_assert_eq!(named.map(|process| process.id.pid), names_it.then_some(PID));
        Ok(())
    });
}

/// A link to nowhere; a text that no link can hold makes none.
fn relink(target: &str, link: &Path) {
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    let _ = fs::remove_file(link);
    let _ = symlink(target, link);
}
