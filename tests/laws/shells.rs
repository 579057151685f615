//! What we print for shells comes back byte for byte through real ones, whatever is in it.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::strategy::Strategy;
use proptest::test_runner::TestCaseResult;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::shell;

use crate::invented::{text_without_nul, word};
use crate::law;

/// Values for one call of each shell, at the most, and calls: 15,000 values for each shell, give or take a tenth.
const BATCH: usize = 1000;
const BATCHES: u32 = 30;

/// The POSIX shells of this machine. Those that are missing are named, past the capture of the test's output.
static SHELLS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let (found, missing): (Vec<&str>, Vec<&str>) =
        ["/bin/sh", "/bin/dash", "/bin/bash", "/bin/zsh", "/bin/ksh"]
            .into_iter()
            .partition(|path| Path::new(path).exists());
    for path in missing {
        let note = format!("{path} is not there: nothing is quoted for it\n");
        io::stderr().write_all(note.as_bytes()).unwrap();
    }
    found
});

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => text_without_nul(),
        1 => word(&["", "=ls", "=", "~", "~root", "/a=~:~", "-n", "--", "*", "'", "a'", "!!", "\n", "a\n\n"])
            .prop_map(|text| text.replace('\0', "")),
        // Letters of which most need no quotes.
        1 => "[=a-z/:~.+,@%^-]{0,4}",
    ]
}

/// Each shell evaluates `code` as it would the output of `uni-cumps env`, and then prints just these words with
/// `print`, each with a NUL at its end.
fn every_shell_prints(print: &str, code: &str, words: &[String]) -> TestCaseResult {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("code");
    fs::write(&file, code)?;
    for shell in SHELLS.iter() {
        for locale in ["C", "C.UTF-8"] {
            let output = Command::new(shell)
                .arg("-c")
                .arg(format!("set -eu; eval \"$(/bin/cat \"$0\")\"; {print}"))
                .arg(&file)
                .env_clear()
                .env("LC_ALL", locale)
                .stdin(Stdio::null())
                .output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            prop_assert!(output.status.success(), "{shell}: {said}");
            let printed = String::from_utf8_lossy(&output.stdout);
            let printed: Vec<&str> = printed.split_terminator('\0').collect();
            let wrong = words
                .iter()
                .zip(&printed)
                .find(|(word, found)| word != found);
            prop_assert!(wrong.is_none(), "{shell}, LC_ALL={locale}: {wrong:?}");
            prop_assert_eq!(printed.len(), words.len(), "{}, LC_ALL={}", shell, locale);
        }
    }
    Ok(())
}

#[test]
fn a_program_finds_the_exported_values_in_its_environment() {
    law(BATCHES, vec(value(), 1..BATCH), |values| {
        let variables: Vec<(String, String)> = values
            .into_iter()
            .enumerate()
            .map(|(place, value)| (format!("V{place:03}"), value))
            .collect();
        let pairs = variables
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()));
        let code = shell::exports(pairs).join("\n");
        let words: Vec<String> = variables
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let print = "/usr/bin/env -0 | /usr/bin/sort -z | /bin/grep -za ^V";
        every_shell_prints(print, &code, &words)
    });
}

#[test]
fn a_quoted_text_is_one_word() {
    law(BATCHES, vec(value(), 1..BATCH), |values| {
        let words: Vec<String> = values.iter().map(|value| shell::quote(value)).collect();
        let code = format!("set -- {}", words.join(" "));
        every_shell_prints("printf '%s\\0' \"$@\"", &code, &values)
    });
}
