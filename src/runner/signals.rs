//! Holding signals back, and seeing them arrive.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Signals wait while this exists. A call in progress sees SIGINT, SIGTERM and SIGHUP all the same and ends; whatever is
/// still waiting at the end has its usual effect then.
pub struct Held(SigSet);

/// Holds signals back, in this thread and those that it starts, while being ended halfway would leave something behind.
pub fn hold_signals() -> Held {
    hold(signals_to_hold())
}

/// Likewise all signals that are passed on to a program beside us.
pub fn hold_signals_to_pass_on() -> Held {
    hold(&signals_to_pass_on())
}

/// Likewise every signal, so that nothing but an end by force or a stop by force comes between two steps.
pub fn hold_every_signal() -> Held {
    hold(&SigSet::all())
}

impl Held {
    /// The number of a signal that has asked us to end meanwhile. It has no further effect then.
    pub fn asked_to_end(&self) -> Option<i32> {
        let signals = [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
        ];
        Some(Arrivals::of(&not_ignored(&signals)).ok()?.next()?.number)
    }
}

/// Signals that wait while this exists and are seen as they arrive, for a program that lives until somebody ends it. Where
/// the kernel does not show them they keep their usual effect.
pub struct Watched {
    shown: Option<(Arrivals, Held)>,
}

/// Watches for the signals that ask a program to end and, where it has a `screen`, for those of a terminal that stops it or
/// changes its size.
pub fn watch_signals(screen: bool) -> Watched {
    let mut signals = vec![
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ];
    if screen {
        signals.extend([Signal::SIGTSTP, Signal::SIGWINCH]);
    }
    let signals = not_ignored(&signals);
    let arrivals = Arrivals::of(&signals).ok();
    Watched {
        shown: arrivals.map(|arrivals| (arrivals, hold(&signals))),
    }
}

/// What ends a wait for signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrived {
    /// The signal of this number.
    Signal(i32),
    /// The other file can be read, or is at its end.
    Input,
    /// Nothing, within the time or up to an interruption.
    Nothing,
}

impl Watched {
    /// Waits until a signal arrives, `other` can be read, or `limit` has passed.
    pub fn wait(&self, other: Option<BorrowedFd<'_>>, limit: Duration) -> Arrived {
        let next = || Some(self.shown.as_ref()?.0.next()?.number);
        if let Some(number) = next() {
            return Arrived::Signal(number);
        }
        let arrivals = self.shown.as_ref().map(|(arrivals, _)| arrivals.as_fd());
        let mut fds: Vec<PollFd<'_>> = other
            .into_iter()
            .chain(arrivals)
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
            .collect();
        // Rounded up, so that nobody looks again and again in the last millisecond.
        let limit = limit + Duration::from_millis(1);
        let ready = poll(
            &mut fds,
            PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX),
        );
        match next() {
            Some(number) => Arrived::Signal(number),
            None if ready.is_ok() && other.is_some() && fds[0].any() == Some(true) => {
                Arrived::Input
            }
            None => Arrived::Nothing,
        }
    }
}

pub(super) fn hold(signals: &SigSet) -> Held {
    // Neither reading nor setting a mask fails for a valid set.
    let before = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
    let _ = signals.thread_block();
    Held(before)
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.thread_set_mask();
    }
}

/// The three signals that ask a program to end, without those that are ignored, as SIGHUP is under nohup.
pub(super) fn signals_to_hold() -> &'static SigSet {
    static SIGNALS: OnceLock<SigSet> = OnceLock::new();
    SIGNALS.get_or_init(|| not_ignored(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]))
}

/// What somebody may send to a program and mean it. Signals that stop it and let it go on reach its whole process group.
pub(super) fn signals_to_pass_on() -> SigSet {
    not_ignored(&[
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGXCPU,
        Signal::SIGPWR,
    ])
}

/// Whether it can be told how a child has ended. Where SIGCHLD is ignored, as some supervisors hand it on, the kernel
/// throws that away.
pub(super) fn ends_are_told() -> bool {
    not_ignored(&[Signal::SIGCHLD]).contains(Signal::SIGCHLD)
}

fn not_ignored(signals: &[Signal]) -> SigSet {
    // We never change what is done with a signal, so one look is enough.
    static IGNORED: OnceLock<u64> = OnceLock::new();
    let ignored = *IGNORED.get_or_init(|| {
        let status = procfs::process::Process::myself().and_then(|process| process.status());
        status.map_or(0, |status| status.sigign)
    });
    signals
        .iter()
        .copied()
        .filter(|signal| ignored & (1 << (*signal as u64 - 1)) == 0)
        .collect()
}

/// Shows held signals as they arrive.
pub(super) struct Arrivals(SignalFd);

/// A signal that has arrived.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    pub(super) number: i32,
    /// The kernel has sent it, as it does for the keys of a terminal, and not a process.
    pub(super) from_kernel: bool,
}

impl AsFd for Arrivals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Arrivals {
    pub(super) fn of(signals: &SigSet) -> io::Result<Self> {
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self(SignalFd::with_flags(signals, flags)?))
    }

    pub(super) fn next(&self) -> Option<Arrival> {
        let info = self.0.read_signal().ok()??;
        Some(Arrival {
            number: i32::try_from(info.ssi_signo).ok()?,
            // sigaction(2): codes of processes are not positive.
            from_kernel: info.ssi_code > 0,
        })
    }
}
