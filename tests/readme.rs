//! The README's session and tables are true.

#![allow(clippy::unwrap_used)]

#[path = "support/mod.rs"]
mod support;

use std::fs;
use std::os::unix::fs::symlink;

use support::{N0, Sandbox, hostname, uni_cumps};

fn readme() -> String {
    fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap()
}

/// The text of the only fenced block of this kind.
fn block(kind: &str) -> String {
    let text = readme();
    let start = text.find(&format!("```{kind}\n")).unwrap() + kind.len() + 4;
    let end = text[start..].find("```").unwrap();
    text[start..start + end].to_owned()
}

/// A session with what differs between two machines replaced: numbers, the host, directories.
fn normal(text: &str, machine: &Sandbox) -> String {
    let text = text
        .replace(&*machine.path("t").to_string_lossy(), "/tmp")
        .replace(&*machine.bin().to_string_lossy(), "/usr/bin");
    let mut lines = Vec::new();
    for line in text.lines() {
        let known = [
            "\"boot_id\": ",
            "\"created_at\": ",
            "\"host\": ",
            "\"pid\": ",
            "\"pid_namespace\": ",
        ]
        .into_iter()
        .chain(["\"process_start_ticks\": ", "\"uid\": ", "state=live pid="])
        .find_map(|key| Some(line.find(key)? + key.len()));
        lines.push(match known {
            Some(end) => format!("{}…", &line[..end]),
            None => line.to_owned(),
        });
    }
    lines.join("\n")
}

#[test]
fn the_session_runs_as_it_is_shown() {
    let machine = Sandbox::new();
    symlink(uni_cumps(), machine.bin().join("uni-cumps")).unwrap();
    let shown = block("console");
    let mut script = String::new();
    for line in shown.lines().filter_map(|line| line.strip_prefix("$ ")) {
        script.push_str(&format!(
            "printf '%s\\n' {}\n{line}\n",
            shell_word(&format!("$ {line}"))
        ));
    }
    let session = machine
        .run([""; 0])
        .under(["/bin/sh", "-ec", &script])
        .succeeds()
        .said_nothing();
    let ran = String::from_utf8_lossy(&session.stdout).into_owned();
    assert_eq!(normal(&ran, &machine), normal(&shown, &machine));
    machine.has_no_daemon();
    assert!(hostname().len() > 1 && !machine.record_file(N0).exists());
}

fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[test]
fn every_command_and_flag_of_the_help_is_in_the_table_of_commands() {
    let machine = Sandbox::new();
    let text = readme();
    for command in [
        "status",
        "doctor",
        "start",
        "stop",
        "env",
        "run",
        "clients",
        "wait",
        "cpus",
        "limits",
        "checkpoint suspend",
        "checkpoint resume",
        "checkpoint check",
        "checkpoint state",
        "checkpoint lock",
        "checkpoint checkpoint",
        "checkpoint restore",
        "checkpoint unlock",
        "checkpoint restore-thread",
        "logs",
        "slurm",
        "prune",
        "validate",
        "completions",
        "man",
    ] {
        let row = text
            .lines()
            .find(|line| {
                let row = line.strip_prefix(&format!("| `{command}"));
                row.is_some_and(|rest| rest.starts_with([' ', '`']))
            })
            .unwrap();
        let words = command.split(' ').chain(["--help"]);
        let help = machine.run(words).succeeds().text();
        let every = text
            .lines()
            .skip_while(|line| !line.starts_with("Every command takes "))
            .take_while(|line| !line.is_empty())
            .collect::<String>();
        for flag in help
            .split_whitespace()
            .filter(|word| word.starts_with("--") && word.len() > 2)
        {
            let flag = flag.split('[').next().unwrap_or_default();
            let flag = flag.trim_matches([',', '.', ')']);
            assert!(
                row.contains(flag) || every.contains(flag) || flag == "--help",
                "{command} {flag}"
            );
        }
    }
}

#[test]
fn each_shell_is_told_what_the_help_tells() {
    let machine = Sandbox::new();
    let text = readme();
    let help = machine.run(["completions", "--help"]).succeeds().text();
    let lines: Vec<&str> = help
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- "))
        .filter(|line| line.contains("uni-cumps completions"))
        .collect();
    assert_eq!(lines.len(), 5, "{help}");
    for line in lines {
        let (_, code) = line.rsplit_once(": ").unwrap();
        assert!(text.contains(&format!("'{code}'")), "{code}");
    }
}

#[test]
fn every_state_is_explained() {
    let text = readme();
    for word in [
        "live",
        "not-answering",
        "unreachable",
        "stale",
        "other-pid-namespace",
        "other-host",
        "other-boot",
    ] {
        assert!(text.contains(&format!("`{word}`")), "{word}");
    }
}

#[test]
fn the_number_of_checks_is_true() {
    let machine = Sandbox::new();
    let report = machine.run(["doctor", "--probe", "--json"]).finish().json();
    let checks = report["checks"].as_array().unwrap().len();
    assert!(
        readme().contains(&format!("in {checks} checks")),
        "{checks}"
    );
}

#[test]
fn every_reader_of_the_environment_is_served_as_it_is_told() {
    let machine = Sandbox::new();
    machine.start(&[]);
    let file = machine.path("github_env");
    fs::write(&file, "").unwrap();
    let text = readme();
    let (_, table) = text.split_once("\n| reader | what to type |\n").unwrap();
    let rows = table.lines().skip(1).take_while(|line| !line.is_empty());
    let mut served = 0;
    for row in rows {
        let (_, command) = row.split_once("uni-cumps ").unwrap();
        let command = command.split(['`', ')', '>', '\\']).next().unwrap();
        machine
            .run(command.split_whitespace())
            .env("GITHUB_ENV", &file)
            .succeeds()
            .said_nothing();
        served += 1;
    }
    assert_eq!(served, 11);
}
