//! `status --watch`: looks again and again, on a screen of its own or line by line.

use std::time::{Duration, SystemTime};

use super::gather;
use crate::error::Error;
use crate::host::Host;
use crate::runner::{Arrived, watch_signals};
use crate::terminal::{Event, Terminal};
use crate::ui::{Answer, Ui};

/// The least time between two looks, where a look takes longer than the time between them.
const LEAST: Duration = Duration::from_millis(100);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, json: bool, pause: Duration) -> Result<u8, Error> {
    let dumb = host.env.get("TERM").is_none_or(|term| term == "dumb");
    let watched = match !json && ui.can_draw() && !dumb {
        true => {
            let mut terminal = Terminal::open();
            ui.enter_screen();
            let watched = on_screen(host, ui, &mut terminal, pause);
            ui.leave_screen();
            watched
        }
        false => in_lines(host, ui, json, pause),
    };
    match watched {
        // It is how a watch ends.
        Err(Error::Interrupted(signal)) => Ok(u8::try_from(128 + signal).unwrap_or(1)),
        watched => watched,
    }
}

/// How long to wait until the next look, of which the last began at `begun`.
fn left(host: &Host, begun: Duration, pause: Duration) -> Duration {
    let taken = host.clock.monotonic().saturating_sub(begun);
    pause.saturating_sub(taken).max(LEAST)
}

fn in_lines(host: &Host, ui: &mut Ui<'_>, json: bool, pause: Duration) -> Result<u8, Error> {
    let signals = watch_signals(false);
    let mut is_first = true;
    loop {
        let begun = host.clock.monotonic();
        let report = gather(host)?;
        if json {
            ui.json_line(&report.to_json());
        } else {
            if !is_first {
                ui.line("");
            }
            ui.answer(&report, false);
        }
        is_first = false;
        if !ui.is_read() {
            return Ok(0);
        }
        if let Arrived::Signal(signal) = signals.wait(None, left(host, begun, pause)) {
            return Err(Error::Interrupted(signal));
        }
    }
}

fn on_screen(
    host: &Host,
    ui: &mut Ui<'_>,
    terminal: &mut Terminal,
    pause: Duration,
) -> Result<u8, Error> {
    loop {
        let begun = host.clock.monotonic();
        let report = gather(host)?;
        let heading = format!(
            "uni-cumps status at {} UTC, every {} s; q ends it",
            time_of_day(host.clock.now()),
            pause.as_secs_f64()
        );
        let drawing = ui.drawn(&report);
        loop {
            ui.draw(&heading, &drawing, terminal.rows());
            if !ui.is_read() {
                return Ok(0);
            }
            match terminal.wait(left(host, begun, pause)) {
                Event::Quit => return Ok(0),
                Event::Signal(signal) => return Err(Error::Interrupted(signal)),
                Event::Stop => {
                    ui.leave_screen();
                    terminal.stop();
                    ui.enter_screen();
                }
                Event::Resized => {}
                Event::Time => break,
            }
        }
    }
}

/// The time of day in hours, minutes and seconds, of UTC.
fn time_of_day(now: SystemTime) -> String {
    let since = now.duration_since(SystemTime::UNIX_EPOCH);
    let seconds = since.unwrap_or_default().as_secs();
    let part = |size: u64, of: u64| seconds / size % of;
    format!(
        "{:02}:{:02}:{:02}",
        part(3600, 24),
        part(60, 60),
        part(1, 60)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_day_is_that_of_utc() {
        for (seconds, expected) in [
            (0, "00:00:00"),
            (86_399, "23:59:59"),
            (1_700_000_000, "22:13:20"),
        ] {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(time_of_day(time), expected);
        }
    }
}
