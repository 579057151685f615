//! The terminal as something that is looked at and typed into: its keys without Enter, its size, and the signals that its
//! keys send.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::{Signal, raise};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};

use crate::runner::{Arrived, Watched, watch_signals};

/// The terminal while somebody watches it. Its modes are as before when this is dropped.
pub struct Terminal {
    /// Where keys come from, and its modes before; none where nobody can type.
    keys: Option<(File, Termios)>,
    signals: Watched,
}

/// What ends a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Somebody typed q.
    Quit,
    /// A signal asks us to end.
    Signal(i32),
    /// A signal asks us to stop, as Ctrl-Z does.
    Stop,
    /// The size of the terminal may be another one.
    Resized,
    /// The time is up.
    Time,
}

impl Terminal {
    /// Takes keys from standard input, or from the terminal that we are started on where that is no terminal. In the
    /// background this stops us, as it does any program that sets a terminal.
    pub fn open() -> Self {
        let keys = keyboard().and_then(|tty| {
            let modes = tcgetattr(&tty).ok()?;
            Some((tty, modes))
        });
        let terminal = Self {
            keys,
            signals: watch_signals(true),
        };
        terminal.take();
        terminal
    }

    /// How many rows the terminal has; what is not told is the size of old.
    pub fn rows(&self) -> usize {
        let size = tcgetwinsize(rustix::stdio::stdout());
        let rows = size.map_or(0, |size| size.ws_row);
        if rows == 0 { 24 } else { usize::from(rows) }
    }

    /// Waits until something happens or `limit` has passed.
    pub fn wait(&mut self, limit: Duration) -> Event {
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let keys = self.keys.as_ref().map(|(tty, _)| tty.as_fd());
            match self.signals.wait(keys, left) {
                Arrived::Signal(libc::SIGWINCH) => return Event::Resized,
                Arrived::Signal(libc::SIGTSTP) => return Event::Stop,
                Arrived::Signal(signal) => return Event::Signal(signal),
                Arrived::Input if self.is_quit_typed() => return Event::Quit,
                Arrived::Input | Arrived::Nothing if left.is_zero() => return Event::Time,
                Arrived::Input | Arrived::Nothing => {}
            }
        }
    }

    /// Reads one key. What is typed behind q is for whoever reads next.
    fn is_quit_typed(&mut self) -> bool {
        let mut key = [0];
        let Some((tty, _)) = &mut self.keys else {
            return false;
        };
        match tty.read(&mut key) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => false,
            // A terminal that is gone.
            Ok(0) | Err(_) => {
                self.keys = None;
                false
            }
            Ok(_) => matches!(key, [b'q' | b'Q']),
        }
    }

    /// Stops us, with the terminal as it was, until somebody lets us go on.
    pub fn stop(&self) {
        self.give_back();
        // A signal to oneself does not fail. SIGTSTP itself is held back here.
        let _ = raise(Signal::SIGSTOP);
        self.take();
    }

    /// Keys come one by one and unseen. Those that send signals go on doing so.
    fn take(&self) {
        if let Some((tty, before)) = &self.keys {
            let mut modes = before.clone();
            modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            // In another mode these two mean other keys.
            modes.special_codes[SpecialCodeIndex::VMIN] = 1;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            let _ = tcsetattr(tty, OptionalActions::Now, &modes);
        }
    }

    fn give_back(&self) {
        if let Some((tty, before)) = &self.keys {
            let _ = tcsetattr(tty, OptionalActions::Now, before);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.give_back();
    }
}

fn keyboard() -> Option<File> {
    let input = io::stdin();
    if input.is_terminal() {
        return Some(File::from(input.as_fd().try_clone_to_owned().ok()?));
    }
    let mut terminal = OpenOptions::new();
    terminal.read(true).custom_flags(libc::O_NOCTTY);
    terminal.open("/dev/tty").ok()
}
