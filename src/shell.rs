//! Quoting and assignment for the shells that we print for. Pure text.

use std::borrow::Cow;
use std::path::Path;

/// A shell that `env` prints code for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shell {
    /// sh, dash, ksh: eval "$(uni-cumps env)"
    Posix,
    /// As posix
    Bash,
    /// As posix
    Zsh,
    /// uni-cumps env --shell fish | source
    Fish,
    /// csh and tcsh: eval "`uni-cumps env --shell csh`"
    Csh,
    /// uni-cumps env --shell nu | save -f mps.nu, and then: source mps.nu
    Nu,
    /// uni-cumps env --shell powershell | Out-String | Invoke-Expression
    Powershell,
    /// eval (uni-cumps env --shell elvish | slurp)
    Elvish,
}

/// What a value holds that a shell cannot take.
pub type Unwritable = &'static str;

impl Shell {
    /// The shell that goes by this program's name, a login shell's leading `-` aside.
    pub fn named(program: &str) -> Option<Self> {
        Some(match program.trim_start_matches('-') {
            "sh" | "dash" | "ash" | "ksh" | "mksh" | "ksh93" | "busybox" => Self::Posix,
            "bash" => Self::Bash,
            "zsh" => Self::Zsh,
            "fish" => Self::Fish,
            "csh" | "tcsh" => Self::Csh,
            "nu" => Self::Nu,
            "pwsh" => Self::Powershell,
            "elvish" => Self::Elvish,
            _ => return None,
        })
    }

    /// The name as `--shell` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Posix => "posix",
            Self::Bash => "bash",
            Self::Zsh => "zsh",
            Self::Fish => "fish",
            Self::Csh => "csh",
            Self::Nu => "nu",
            Self::Powershell => "powershell",
            Self::Elvish => "elvish",
        }
    }

    /// Whether POSIX shell code works in it.
    pub fn is_posix(self) -> bool {
        matches!(self, Self::Posix | Self::Bash | Self::Zsh)
    }

    /// Code that exports a variable. Keys are plain; values are anything without a NUL.
    pub fn set(self, key: &str, value: &str) -> Result<String, Unwritable> {
        Ok(match self {
            Self::Posix | Self::Bash | Self::Zsh => format!("export {key}={}", quote(value)),
            Self::Fish => format!("set -gx {key} {};", quote_fish(value)),
            Self::Csh => format!("setenv {key} {};", quote_csh(value)?),
            Self::Nu => format!("$env.{key} = {}", quote_nu(value)),
            Self::Powershell => format!("$env:{key} = {}", quote_powershell(value)?),
            Self::Elvish => format!("set-env {key} '{}'", value.replace('\'', "''")),
        })
    }

    /// Code that takes a variable out of the environment, and does nothing where there is none.
    pub fn unset(self, key: &str) -> String {
        match self {
            Self::Posix | Self::Bash | Self::Zsh => format!("unset {key}"),
            // It fails where there is none.
            Self::Fish => format!("set -e {key}; or true;"),
            Self::Csh => format!("unsetenv {key};"),
            Self::Nu => format!("hide-env -i {key}"),
            Self::Powershell => format!("Remove-Item Env:{key} -ErrorAction Ignore"),
            Self::Elvish => format!("unset-env {key}"),
        }
    }

    /// Code that fails, for where there is nothing true to print: `set -e; eval "$(cmd)"` goes on after empty output.
    pub fn fails(self) -> &'static str {
        match self {
            Self::Posix | Self::Bash | Self::Zsh => "false",
            Self::Fish | Self::Csh => "false;",
            Self::Nu => "error make {msg: \"uni-cumps has no environment to give\"}",
            Self::Powershell => "throw 'uni-cumps has no environment to give'",
            Self::Elvish => "fail 'uni-cumps has no environment to give'",
        }
    }
}

/// `text` as one word of a POSIX shell.
pub fn quote(text: &str) -> String {
    match shell_escape::unix::escape(Cow::Borrowed(text)) {
        // zsh takes `=ls` for the path of ls.
        Cow::Borrowed(plain) if plain.starts_with('=') => format!("'{plain}'"),
        escaped => escaped.into_owned(),
    }
}

/// A path as one word of a POSIX shell, for hints.
pub fn quote_path(path: &Path) -> String {
    quote(&path.to_string_lossy())
}

/// A program as the word of a POSIX shell that is the command.
pub fn quote_program(program: &Path) -> String {
    let word = quote_path(program);
    match is_assignment(&word) {
        true => format!("'{word}'"),
        false => word,
    }
}

/// Whether a shell takes this plain word, in front of a command, for a variable's assignment.
pub fn is_assignment(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        name.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && name
                .bytes()
                .next()
                .is_some_and(|byte| !byte.is_ascii_digit())
    })
}

/// Newlines stand outside of the quotes, since `eval (cmd)` joins the lines of cmd with blanks.
fn quote_fish(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('\'', "\\'");
    format!("'{}'", escaped.replace('\n', "'\\n'"))
}

/// Backslashes stand outside of the quotes, since tcsh's `backslash_quote` changes what they mean inside. History is
/// looked for even within quotes.
fn quote_csh(text: &str) -> Result<String, Unwritable> {
    if text.contains('\n') {
        return Err("a newline, which csh's backquotes do not let through");
    }
    let mut word = String::from("'");
    for letter in text.chars() {
        match letter {
            '\'' | '\\' | '!' => {
                word.push_str("'\\");
                word.push(letter);
                word.push('\'');
            }
            _ => word.push(letter),
        }
    }
    word.push('\'');
    Ok(word)
}

fn quote_nu(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// PowerShell takes typographic quotes for the plain one, and reads what a program prints line by line.
fn quote_powershell(text: &str) -> Result<String, Unwritable> {
    if text.contains('\r') {
        return Err("a carriage return, which PowerShell takes for the end of a line");
    }
    let mut word = String::from("'");
    for letter in text.chars() {
        word.push(letter);
        if matches!(
            letter,
            '\'' | '\u{2018}' | '\u{2019}' | '\u{201a}' | '\u{201b}'
        ) {
            word.push(letter);
        }
    }
    word.push('\'');
    Ok(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_words_stay_as_they_are_and_others_are_quoted() {
        assert_eq!(quote("/tmp/x-1"), "/tmp/x-1");
        assert_eq!(quote("it's $HOME"), "'it'\\''s $HOME'");
        assert_eq!(quote(""), "''");
        assert_eq!(quote("~"), "'~'");
        assert_eq!(quote("=ls"), "'=ls'");
        assert_eq!(quote("a\nb"), "'a\nb'");
    }

    #[test]
    fn a_program_is_no_assignment() {
        let program = |name| quote_program(Path::new(name));
        assert_eq!(program("A_1=b"), "'A_1=b'");
        for name in ["ls", "=ls", "1=b", "./a=b", "/a=b", "a-b=c", "it's=b"] {
            assert_eq!(program(name), quote(name));
        }
    }

    #[test]
    fn each_shell_has_its_own_assignment() {
        let set = |shell: Shell, value| shell.set("K", value).unwrap();
        assert_eq!(set(Shell::Bash, "a b"), "export K='a b'");
        assert_eq!(set(Shell::Fish, "a\n'\\"), "set -gx K 'a'\\n'\\'\\\\';");
        assert_eq!(
            set(Shell::Csh, "a!'\\ b"),
            "setenv K 'a'\\!''\\'''\\\\' b';"
        );
        assert!(Shell::Csh.set("K", "a\nb").is_err());
        assert_eq!(set(Shell::Nu, "a\"\\$x"), "$env.K = \"a\\\"\\\\$x\"");
        assert_eq!(
            set(Shell::Powershell, "a'\u{2019}$x"),
            "$env:K = 'a''\u{2019}\u{2019}$x'"
        );
        assert!(Shell::Powershell.set("K", "a\rb").is_err());
        assert_eq!(set(Shell::Elvish, "a'b"), "set-env K 'a''b'");
    }

    #[test]
    fn shells_go_by_the_names_of_their_programs() {
        assert_eq!(Shell::named("-tcsh"), Some(Shell::Csh));
        assert_eq!(Shell::named("fish"), Some(Shell::Fish));
        assert_eq!(Shell::named("python3"), None);
    }
}
