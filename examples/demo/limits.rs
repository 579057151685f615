//! The limits of the stand-in control daemon, as drivers 535 to 555 keep them: sizes are read by their first letter,
//! refusals have no status, and a server that is not ready says nothing.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

use crate::stand_in::{Conduct, directory};

/// Of the daemon, or of the server of this pid.
type Scope = Option<i32>;

/// What has been set.
#[derive(Default)]
struct Limits {
    threads: HashMap<Scope, f64>,
    memory: HashMap<(Scope, u32), u64>,
    priority: u8,
}

/// What 550 and 555 say to another user than their own; the spelling is NVIDIA's.
const REFUSAL: &str = "Insufficient privileges for UID 1002. Control deamon settings can only be modified by the user \
                       started it or by the root user.\n";

static LIMITS: Mutex<Option<Limits>> = Mutex::new(None);

/// Whether it is a question about limits.
pub(crate) fn knows(word: &str) -> bool {
    let limit = word
        .strip_prefix("get_")
        .or_else(|| word.strip_prefix("set_"));
    limit.is_some_and(|limit| {
        [
            "default_active_thread_percentage",
            "active_thread_percentage",
            "default_device_pinned_mem_limit",
            "device_pinned_mem_limit",
            "default_client_priority",
        ]
        .contains(&limit)
    })
}

fn log(text: &str) {
    let file = directory("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps").join("control.log");
    let file = OpenOptions::new().append(true).create(true).open(file);
    if let Ok(mut file) = file {
        let _ = writeln!(file, "{text}");
    }
}

/// A size as NVIDIA reads it, in MiB: the digits, and the first letter behind them. 0 is no limit.
fn mebibytes(text: &str) -> u64 {
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    let number = text[..end].parse().unwrap_or(0);
    match text[end..]
        .chars()
        .next()
        .map(|unit| unit.to_ascii_uppercase())
    {
        Some('G') => number * 1024,
        Some('T' | '.') => 1,
        _ => number,
    }
}

/// Answers `get_…` and `set_…`.
pub(crate) fn answer(command: &str, conduct: &Conduct) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let (word, mut words) = (words[0], &words[1..]);
    let sets = word.starts_with("set_");
    let mut scope = None;
    if !word.contains("_default_") {
        let pid = words.first().and_then(|pid| pid.parse().ok()).unwrap_or(0);
        let named = |key| {
            let pids = conduct.text(key).unwrap_or_default().to_owned();
            pids.split_whitespace().any(|one| one.parse() == Ok(pid))
        };
        if !named("servers") {
            return format!("Server {pid} not found\n");
        }
        if named("busy") {
            log(&format!("Server {pid} is <busy>"));
            return String::new();
        }
        scope = Some(pid);
        words = &words[1..];
    }
    let takes = match conduct.text("limits") {
        Some("die") if sets => std::process::exit(1),
        Some("refused") if sets => {
            return REFUSAL.to_owned();
        }
        how => sets && how != Some("ignored"),
    };
    let wrong = conduct.is("limits", "wrong");
    let mut limits = LIMITS.lock().unwrap_or_else(PoisonError::into_inner);
    let limits = limits.get_or_insert_default();
    if word.ends_with("thread_percentage") {
        let value = words.first().and_then(|text| text.parse::<f64>().ok());
        let value = value.filter(|value| *value > 0.0 && *value <= 100.0);
        match value {
            Some(value) if takes => {
                let value = if wrong { value / 2.0 } else { value };
                limits.threads.insert(scope, value);
            }
            None if sets => log("Invalid percentage, expected between (0.0, 100.0]"),
            _ => {}
        }
        return format!("{:.1}\n", limits.threads.get(&scope).unwrap_or(&100.0));
    }
    if word.ends_with("client_priority") {
        let value = words.first().and_then(|text| text.parse::<u8>().ok());
        match value.unwrap_or(0) {
            _ if !sets => return format!("{}\n", limits.priority),
            value @ 0..=1 if takes => limits.priority = if wrong { 1 - value } else { value },
            0..=1 => {}
            _ => return "Invalid priority value - must be 0 or 1!\n".to_owned(),
        }
        return String::new();
    }
    // A UUID is no number, and what it was meant for goes to device 0 as no limit.
    let device = words.first().and_then(|text| text.parse::<u32>().ok());
    if device.is_some_and(|device| device > 31) {
        log("Invalid device ordinal!");
        return String::new();
    }
    let size = device.and(words.get(1)).copied().unwrap_or_default();
    let place = (scope, device.unwrap_or(0));
    if sets {
        match mebibytes(size) {
            _ if !takes => {}
            0 => {
                limits.memory.remove(&place);
            }
            size => {
                limits.memory.insert(place, if wrong { 1 } else { size });
            }
        }
        return String::new();
    }
    match limits.memory.get(&place) {
        None => {
            log("No default pinned memory limit set for the device!");
            String::new()
        }
        Some(size) if *size >= 1024 => format!("{}G\n", size / 1024),
        Some(size) => format!("{size}M\n"),
    }
}
