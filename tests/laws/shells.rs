//! What we print for shells comes back byte for byte through real ones, whatever is in it.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::strategy::Strategy;
use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::shell::{self, Shell};

use crate::invented::{text_without_nul, word};
use crate::law;

/// Values for one call of each shell, at the most, and calls: 15,000 values for each shell, give or take a tenth.
const BATCH: usize = 1000;
const BATCHES: u32 = 30;

/// A shell of this machine and how it is told to evaluate what is printed for it.
struct Real {
    dialect: Shell,
    path: &'static str,
    /// Its arguments; `FILE` is the file with the code. In the end it becomes a program that prints its environment.
    arguments: &'static [&'static str],
}

const POSIX: &[&str] = &[
    "-c",
    "set -eu; eval \"$(/bin/cat FILE)\"; exec /usr/bin/env -0",
];

const KNOWN: [Real; 9] = [
    real(Shell::Posix, "/bin/sh", POSIX),
    real(Shell::Posix, "/bin/dash", POSIX),
    real(Shell::Posix, "/bin/ksh", POSIX),
    real(Shell::Bash, "/bin/bash", POSIX),
    real(Shell::Zsh, "/bin/zsh", POSIX),
    real(
        Shell::Fish,
        "/usr/bin/fish",
        &[
            "--no-config",
            "-c",
            "/bin/cat FILE | source; exec /usr/bin/env -0",
        ],
    ),
    real(
        Shell::Fish,
        "/usr/bin/fish",
        &[
            "--no-config",
            "-c",
            "eval (/bin/cat FILE); exec /usr/bin/env -0",
        ],
    ),
    real(
        Shell::Csh,
        "/bin/tcsh",
        &["-fc", "eval \"`/bin/cat FILE`\"; exec /usr/bin/env -0"],
    ),
    real(
        Shell::Elvish,
        "/usr/bin/elvish",
        &[
            "-norc",
            "-c",
            "eval (/bin/cat FILE | slurp); exec /usr/bin/env -0",
        ],
    ),
];

const fn real(dialect: Shell, path: &'static str, arguments: &'static [&'static str]) -> Real {
    Real {
        dialect,
        path,
        arguments,
    }
}

/// Those that are missing are named, past the capture of the test's output.
static SHELLS: LazyLock<Vec<Real>> = LazyLock::new(|| {
    let (found, missing): (Vec<Real>, Vec<Real>) = KNOWN
        .into_iter()
        .partition(|shell| Path::new(shell.path).exists());
    for shell in missing {
        let note = format!("{} is not there: nothing is quoted for it\n", shell.path);
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

impl Real {
    /// The values for one call each: tcsh takes a time that grows with the square of their number.
    fn portions<'v>(
        &'v self,
        values: &'v [String],
    ) -> impl Iterator<Item = (&'v Self, &'v [String])> {
        let size = if self.dialect == Shell::Csh {
            50
        } else {
            BATCH
        };
        values.chunks(size).map(move |values| (self, values))
    }

    /// Evaluates `code` as it would the output of `uni-cumps env`, and returns which of our variables are exported
    /// then.
    fn environment_after(&self, code: &str, locale: &str) -> Result<Vec<String>, TestCaseError> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("code");
        fs::write(&file, code)?;
        let file = file.to_str().unwrap();
        let output = Command::new(self.path)
            .args(self.arguments.iter().map(|arg| arg.replace("FILE", file)))
            .env_clear()
            .env("LC_ALL", locale)
            .env("HOME", directory.path())
            // Code that is quoted wrongly may write files.
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        prop_assert!(output.status.success(), "{}: {said}", self.path);
        let printed = String::from_utf8_lossy(&output.stdout);
        // tcsh sets VENDOR.
        let is_ours = |entry: &&str| entry.starts_with('V') && entry.as_bytes()[1].is_ascii_digit();
        Ok(printed
            .split_terminator('\0')
            .filter(is_ours)
            .map(str::to_owned)
            .collect())
    }
}

#[test]
fn a_program_finds_the_exported_values_in_its_environment() {
    law(BATCHES, vec(value(), 1..BATCH), |values| {
        for (shell, values) in SHELLS.iter().flat_map(|shell| shell.portions(&values)) {
            // What a shell cannot take is refused, and never printed wrongly.
            let (lines, exported): (Vec<String>, Vec<String>) = values
                .iter()
                .enumerate()
                .map(|(place, value)| (format!("V{place:03}"), value))
                .filter_map(|(key, value)| {
                    let line = shell.dialect.set(&key, value);
                    prop_refused_rightly(shell.dialect, value, line.is_err());
                    Some((line.ok()?, format!("{key}={value}")))
                })
                .unzip();
            let code = lines.join("\n") + "\n";
            for locale in ["C", "C.UTF-8"] {
                let mut found = shell.environment_after(&code, locale)?;
                found.sort();
                let wrong = exported
                    .iter()
                    .zip(&found)
                    .find(|(one, other)| one != other);
                prop_assert!(wrong.is_none(), "{}, {locale}: {wrong:?}", shell.path);
                prop_assert_eq!(found.len(), exported.len(), "{}, {}", shell.path, locale);
            }
        }
        Ok(())
    });
}

fn prop_refused_rightly(dialect: Shell, value: &str, refused: bool) {
    assert_eq!(
        refused,
        dialect == Shell::Csh && value.contains('\n'),
        "{value:?}"
    );
}

#[test]
fn what_was_set_is_taken_away_again_and_what_never_was_does_no_harm() {
    for shell in SHELLS.iter() {
        let set = shell.dialect.set("V1", "x").unwrap();
        let code = [set, shell.dialect.unset("V1"), shell.dialect.unset("V2")];
        let found = shell
            .environment_after(&(code.join("\n") + "\n"), "C")
            .unwrap();
        assert!(
            !found.iter().any(|entry| entry.starts_with('V')),
            "{}: {found:?}",
            shell.path
        );
    }
}

#[test]
fn a_quoted_text_is_one_word() {
    law(BATCHES, vec(value(), 1..BATCH), |values| {
        let words: Vec<String> = values.iter().map(|value| shell::quote(value)).collect();
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("code");
        fs::write(&file, format!("set -- {}", words.join(" ")))?;
        for shell in SHELLS.iter().filter(|shell| shell.dialect.is_posix()) {
            for locale in ["C", "C.UTF-8"] {
                let print = "set -eu; eval \"$(/bin/cat \"$0\")\"; printf '%s\\0' \"$@\"";
                let output = Command::new(shell.path)
                    .args([OsStr::new("-c"), OsStr::new(print), file.as_os_str()])
                    .env_clear()
                    .env("LC_ALL", locale)
                    .current_dir(directory.path())
                    .stdin(Stdio::null())
                    .output()?;
                prop_assert!(output.status.success(), "{}: {output:?}", shell.path);
                let printed = String::from_utf8_lossy(&output.stdout);
                let printed: Vec<&str> = printed.split_terminator('\0').collect();
                prop_assert_eq!(&printed, &values, "{}, LC_ALL={}", shell.path, locale);
            }
        }
        Ok(())
    });
}
