//! control.log, as far as a message quotes it.

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::host::Host;

/// The end of control.log as it was, to tell new lines from those of earlier daemons.
pub struct LogMark {
    path: PathBuf,
    length: u64,
}

/// Lines of control.log that a message quotes at the most.
const TAIL: usize = 12;

impl LogMark {
    /// Remembers where control.log ends now.
    pub fn set(host: &Host, log: &Path) -> Self {
        let path = host.root.at(log.join("control.log"));
        let length = fs::metadata(&path).map_or(0, |meta| meta.len());
        Self { path, length }
    }

    /// The last lines written since.
    pub fn new_lines(&self) -> Option<String> {
        let text = read_end(&self.path, self.length)?;
        let lines: Vec<&str> = text.trim().lines().collect();
        let tail = lines[lines.len().saturating_sub(TAIL)..].join("\n");
        (!tail.is_empty()).then_some(tail)
    }
}

/// How much of a log is read at the most.
const READ_LIMIT: u64 = 64 << 10;

/// The end of a log file; `None` if there is none.
pub fn log_end(host: &Host, directory: &Path, name: &str) -> Option<String> {
    read_end(&host.root.at(directory.join(name)), 0)
}

/// What stands behind the first `known` bytes, or the whole file if it has been truncated meanwhile.
fn read_end(path: &Path, known: u64) -> Option<String> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
        .ok()?;
    let end = file.metadata().ok()?.len();
    let from = if end < known { 0 } else { known };
    file.seek(SeekFrom::Start(from.max(end.saturating_sub(READ_LIMIT))))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(READ_LIMIT).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake::host;

    #[test]
    fn only_new_lines_of_the_log_are_quoted() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path(), Vec::new());
        let file = root.path().join("control.log");
        fs::write(&file, "old\n").unwrap();
        let mark = LogMark::set(&host, Path::new("/"));
        assert_eq!(mark.new_lines(), None);
        fs::write(&file, "old\nnew 1\nnew 2\n").unwrap();
        assert_eq!(mark.new_lines().as_deref(), Some("new 1\nnew 2"));
    }
}
