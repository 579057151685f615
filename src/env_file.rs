//! The environment of a daemon's clients in the forms that launchers other than shells read: `.env` files, systemd's
//! drop-ins, GitHub's variable file, the flags of docker and podman. Pure text.

use std::path::Path;

use crate::shell::{Unwritable, quote};

/// In which form `env` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Code for the shell that --shell names
    Shell,
    /// One object
    Json,
    /// A .env file, as python-dotenv and docker compose read it
    Dotenv,
    /// Flags for docker run and podman run: variables, pipe directory, IPC namespace, user
    Docker,
    /// A drop-in for a systemd service, NAME.service.d/mps.conf
    Systemd,
    /// Append to the file that $GITHUB_ENV names, for the later steps of a GitHub Actions job
    Github,
}

/// An entry of a `.env` file. A plain value stands as it is, one in single quotes is taken literally, and only double
/// quotes can hold a quote or a backslash. There docker compose replaces `$X` and python-dotenv knows no way to keep it
/// from replacing `${X}`.
pub fn dotenv(key: &str, value: &str) -> Result<String, Unwritable> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-:,=@+%".contains(&byte);
    if !value.is_empty() && value.bytes().all(is_plain) {
        return Ok(format!("{key}={value}"));
    }
    if value.contains('\r') {
        return Err("a carriage return, which readers of .env files take for the end of a line");
    }
    let needs_escapes = value.contains(['\'', '\\']);
    if value.contains("${") || (needs_escapes && value.contains('$')) {
        return Err("a dollar sign, which the readers of .env files replace in different ways");
    }
    if !needs_escapes {
        return Ok(format!("{key}='{value}'"));
    }
    let mut quoted = String::new();
    for letter in value.chars() {
        match letter {
            '\n' => quoted.push_str("\\n"),
            '"' | '\\' => quoted.extend(['\\', letter]),
            _ => quoted.push(letter),
        }
    }
    Ok(format!("{key}=\"{quoted}\""))
}

/// What stands in a `.env` file where there is no daemon: programs that read it find no GPU, rather than a GPU without
/// MPS.
pub const DOTENV_FAILS: &str = "CUDA_VISIBLE_DEVICES=uni-cumps-has-no-daemon";

/// A line of a service's section that sets a variable (systemd.exec(5), systemd.syntax(7)).
pub fn systemd(key: &str, value: &str) -> Result<String, Unwritable> {
    let mut quoted = String::new();
    for letter in value.chars() {
        match letter {
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '"' | '\\' => quoted.extend(['\\', letter]),
            // Specifiers, such as %h.
            '%' => quoted.push_str("%%"),
            // systemd ignores the whole assignment.
            _ if letter.is_ascii_control() => {
                return Err("a control character, which systemd refuses");
            }
            // systemd ignores the rest of the file.
            _ if is_noncharacter(letter) => {
                return Err("a noncharacter of Unicode, which systemd refuses");
            }
            _ => quoted.push(letter),
        }
    }
    Ok(format!("Environment=\"{key}={quoted}\""))
}

/// One of the code points that Unicode gives to nobody.
fn is_noncharacter(letter: char) -> bool {
    matches!(letter, '\u{fdd0}'..='\u{fdef}') || u32::from(letter) & 0xfffe == 0xfffe
}

/// A line of a service's section that makes it fail.
pub const SYSTEMD_FAILS: &str = "ExecStartPre=/bin/false";

/// An entry of GitHub's variable file. A value of several lines ends at a delimiter that must not be one of them.
pub fn github(key: &str, value: &str) -> String {
    if !value.contains(['\n', '\r']) {
        return format!("{key}={value}\n");
    }
    let mut delimiter = String::from("END");
    while value.contains(&delimiter) {
        delimiter.push('_');
    }
    format!("{key}<<{delimiter}\n{value}\n{delimiter}\n")
}

/// The flags of `docker run` and `podman run`, each a word of a POSIX shell. CUDA finds the daemon by the path that it
/// has outside, shares memory with its server, and is served only as the daemon's own user.
pub fn docker(
    variables: &[(&str, String)],
    pipe: &Path,
    user: (u32, u32),
) -> Result<Vec<String>, Unwritable> {
    let pipe = pipe.to_string_lossy();
    if pipe.contains("\r\n") {
        return Err("a carriage return before a newline, which docker's --mount leaves out");
    }
    let mount = [
        "type=bind".to_owned(),
        format!("source={pipe}"),
        format!("target={pipe}"),
    ];
    let variables = variables
        .iter()
        .flat_map(|(key, value)| ["--env".to_owned(), quote(&format!("{key}={value}"))]);
    let others = [
        "--mount".to_owned(),
        quote(&mount.map(|field| csv_field(&field)).join(",")),
        "--ipc=host".to_owned(),
        format!("--user={}:{}", user.0, user.1),
    ];
    Ok(variables.chain(others).collect())
}

/// `--mount` is read as a record of comma-separated values.
fn csv_field(field: &str) -> String {
    match field.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}

/// A flag that neither docker nor podman has: the container is not started.
pub const DOCKER_FAILS: &str = "--uni-cumps-has-no-daemon";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dotenv_value_is_quoted_as_little_as_possible() {
        let written = |value| dotenv("K", value).unwrap();
        assert_eq!(written("/a/b-1"), "K=/a/b-1");
        assert_eq!(written(""), "K=''");
        assert_eq!(written("a $b\nc"), "K='a $b\nc'");
        assert_eq!(written("it's \\\n\""), "K=\"it's \\\\\\n\\\"\"");
        assert!(dotenv("K", "${HOME}").is_err());
        assert!(dotenv("K", "it's $HOME").is_err());
        assert!(dotenv("K", "a\rb").is_err());
    }

    #[test]
    fn systemd_expands_nothing_in_a_value() {
        let line = systemd("K", "a \"b\" \\ %h $X\n").unwrap();
        assert_eq!(line, "Environment=\"K=a \\\"b\\\" \\\\ %%h $X\\n\"");
        for refused in ["\x1b", "\x7f", "\r", "\u{fdd0}", "\u{ffff}", "\u{1fffe}"] {
            assert!(systemd("K", refused).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn a_github_delimiter_is_not_part_of_the_value() {
        assert_eq!(github("K", "a=b<<c"), "K=a=b<<c\n");
        assert_eq!(github("K", "END\nEND_"), "K<<END__\nEND\nEND_\nEND__\n");
    }

    #[test]
    fn docker_flags_are_words_of_a_shell() {
        let flags = |variables: &[(&str, String)], pipe: &str, user| {
            docker(variables, Path::new(pipe), user).map(|flags| flags.join(" "))
        };
        let odd = flags(&[("K", "a b".to_owned())], "/p,q", (1000, 100)).unwrap();
        assert_eq!(
            odd,
            "--env 'K=a b' --mount 'type=bind,\"source=/p,q\",\"target=/p,q\"' --ipc=host --user=1000:100"
        );
        let plain = flags(&[], "/p", (0, 0)).unwrap();
        assert_eq!(
            plain,
            "--mount type=bind,source=/p,target=/p --ipc=host --user=0:0"
        );
        assert!(flags(&[], "/p\r\nq", (0, 0)).is_err());
    }
}
