//! Quoting and assignment for the shells that we print for. Pure text.

use std::borrow::Cow;
use std::path::Path;

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

/// `export KEY=value` lines for a POSIX shell to evaluate.
pub fn exports<'v>(variables: impl IntoIterator<Item = (&'v str, &'v str)>) -> Vec<String> {
    variables
        .into_iter()
        .map(|(key, value)| format!("export {key}={}", quote(value)))
        .collect()
}

/// What to print where there is nothing true to print: `set -e; eval "$(cmd)"` goes on after empty output.
pub const FAILS: &str = "false";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_paths_stay_as_they_are_and_others_are_quoted() {
        assert_eq!(
            exports([("A", "/tmp/x-1"), ("B", "it's $HOME")]),
            ["export A=/tmp/x-1", "export B='it'\\''s $HOME'"]
        );
        assert_eq!(quote(""), "''");
        assert_eq!(quote("~"), "'~'");
        assert_eq!(quote("=ls"), "'=ls'");
        assert_eq!(quote("a\nb"), "'a\nb'");
    }
}
