//! Times of day as the logs write them: the wall clock of the daemon, compared as text. Where clocks are put back by an
//! hour, that hour is there twice, and nothing in a log tells which one is meant.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// `YYYY-MM-DD HH:MM:SS.mmm`, in local time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalTime([u8; LocalTime::LENGTH]);

/// How times are written: a digit for each 0.
const PATTERN: &[u8; LocalTime::LENGTH] = b"0000-00-00 00:00:00.000";

impl LocalTime {
    /// The bytes of a time.
    pub const LENGTH: usize = 23;

    /// Reads a time that is written in full.
    pub fn read(text: &str) -> Option<Self> {
        let bytes: [u8; Self::LENGTH] = text.as_bytes().try_into().ok()?;
        let fits = bytes
            .iter()
            .zip(PATTERN)
            .all(|(byte, pattern)| match pattern {
                b'0' => byte.is_ascii_digit(),
                other => byte == other,
            });
        let number = |from: usize| text.get(from..from + 2)?.parse::<u8>().ok();
        let is_time = fits
            && (1..=12).contains(&number(5)?)
            && (1..=31).contains(&number(8)?)
            && number(11)? < 24
            && number(14)? < 60
            && number(17)? <= 60;
        is_time.then_some(Self(bytes))
    }
}

impl fmt::Display for LocalTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Digits and signs, by the only way to make one.
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for LocalTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// From when on messages are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// This long ago.
    Ago(Duration),
    /// This time.
    At(LocalTime),
}

/// The text is no time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it must be a time ago, such as 90, 10m, 2h or 1d, or a local time: YYYY-MM-DD[ HH:MM[:SS]]"
)]
pub struct SinceError;

impl FromStr for Since {
    type Err = SinceError;

    fn from_str(text: &str) -> Result<Self, SinceError> {
        let text = text.trim();
        match ago(text) {
            Some(time) => Ok(Self::Ago(time)),
            None => at(text).map(Self::At).ok_or(SinceError),
        }
    }
}

/// A number of seconds, or one with its unit.
fn ago(text: &str) -> Option<Duration> {
    let (number, unit) = match text.char_indices().last()? {
        (_, letter) if letter.is_ascii_digit() => (text, 1),
        (end, letter) => {
            let unit = match letter {
                's' => 1,
                'm' => 60,
                'h' => 3_600,
                'd' => 86_400,
                'w' => 604_800,
                _ => return None,
            };
            (&text[..end], unit)
        }
    };
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let seconds = number.parse::<u64>().ok()?.checked_mul(unit)?;
    Some(Duration::from_secs(seconds))
}

/// A local time, with as much of its end left out as is zero; between day and hour a blank or a T.
fn at(text: &str) -> Option<LocalTime> {
    let (day, hour) = match text.split_once([' ', 'T']) {
        Some((day, hour)) => (day, hour),
        None => (text, "00:00"),
    };
    // There is no 30th of February.
    day.parse::<jiff::civil::Date>().ok()?;
    let rest = match hour.len() {
        5 => ":00.000",
        8 => ".000",
        12 => "",
        _ => return None,
    };
    LocalTime::read(&format!("{day} {hour}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_ago_has_a_unit_or_is_in_seconds() {
        for (text, seconds) in [
            ("90", 90),
            ("90s", 90),
            ("10m", 600),
            ("2h", 7_200),
            ("1d", 86_400),
            ("1w", 604_800),
            (" 0 ", 0),
        ] {
            let ago = Since::Ago(Duration::from_secs(seconds));
            assert_eq!(text.parse(), Ok(ago), "{text}");
        }
    }

    #[test]
    fn a_local_time_may_be_left_unfinished() {
        for (text, time) in [
            ("2026-11-29", "2026-11-29 00:00:00.000"),
            ("2026-11-29 16:44", "2026-11-29 16:44:00.000"),
            ("2026-11-29T16:44:38", "2026-11-29 16:44:38.000"),
            ("2026-11-29 16:44:38.001", "2026-11-29 16:44:38.001"),
        ] {
            let at = Since::At(LocalTime::read(time).unwrap());
            assert_eq!(text.parse(), Ok(at), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "m",
            "-5",
            "+5",
            "5 m",
            "1.5h",
            "10min",
            "5é",
            "yesterday",
            "16:44",
            "2026-11-29 16",
            "2026-11-29 25:00",
            "2026-11-29 16:60",
            "2026-00-29",
            "2026-02-30",
            "2026-13-01",
            "29.11.2026",
            "2026-11-2é",
            "99999999999999999999",
            "99999999999999999999d",
            "18446744073709551615w",
        ] {
            assert_eq!(text.parse::<Since>(), Err(SinceError), "{text}");
        }
    }
}
