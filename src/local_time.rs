//! The clock on the wall, which the logs of a daemon are written by: which time zone a process has, as the C library
//! finds it (tzset(3)), and what o'clock it is there.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::host::Host;
use crate::log_line::LocalTime;

/// Where zones are kept by their names.
const ZONES: &str = "/usr/share/zoneinfo";

/// The time of day that was `ago` before now, where `TZ` has this value; `None` before the year 1.
pub fn before_now(host: &Host, ago: Duration, variable: Option<&str>) -> Option<LocalTime> {
    let now = host
        .clock
        .now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()?;
    let now = i64::try_from(now.as_millis()).ok()?;
    let then = now.checked_sub(i64::try_from(ago.as_millis()).ok()?)?;
    let then = Timestamp::from_millisecond(then).ok()?;
    let local = zone(host, variable).to_datetime(then);
    LocalTime::read(&format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:03}",
        local.year(),
        local.month(),
        local.day(),
        local.hour(),
        local.minute(),
        local.second(),
        local.millisecond()
    ))
}

/// The zone of a process with this `TZ`; UTC where it names none.
fn zone(host: &Host, variable: Option<&str>) -> TimeZone {
    let read = |path: &Path| {
        let bytes = fs::read(host.root.at(path)).ok()?;
        TimeZone::tzif("local", &bytes).ok()
    };
    let zone = match variable {
        None => read(Path::new("/etc/localtime")),
        Some(text) => {
            let name = text.strip_prefix(':').unwrap_or(text);
            // An absolute path takes the place of the directory.
            let of_file = (!name.is_empty()).then(|| read(&Path::new(ZONES).join(name)));
            of_file.flatten().or_else(|| TimeZone::posix(name).ok())
        }
    };
    zone.unwrap_or(TimeZone::UTC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fake;

    #[test]
    fn the_time_is_that_of_the_zone() {
        let root = tempfile::tempdir().unwrap();
        let host = fake::host(root.path(), Vec::new());
        // The fake clock begins with 1970.
        host.clock.sleep(Duration::from_millis(1_700_000_000_123));
        let local = |variable: Option<&str>| {
            let ago = Duration::from_secs(3_600);
            before_now(&host, ago, variable).unwrap().to_string()
        };
        for (variable, time) in [
            (None, "2023-11-14 21:13:20.123"),
            (Some(""), "2023-11-14 21:13:20.123"),
            (Some("UTC0"), "2023-11-14 21:13:20.123"),
            (Some("<+0530>-5:30"), "2023-11-15 02:43:20.123"),
            (
                Some(":CET-1CEST,M3.5.0,M10.5.0/3"),
                "2023-11-14 22:13:20.123",
            ),
            (Some("Nowhere/At_All"), "2023-11-14 21:13:20.123"),
        ] {
            assert_eq!(local(variable), time, "{variable:?}");
        }
    }

    #[test]
    fn a_zone_is_read_from_its_file() {
        // A zone of two hours east, in the first form of the format (tzfile(5)).
        let mut file = b"TZif".to_vec();
        file.resize(20, 0);
        for count in [0_u32, 0, 0, 0, 1, 4] {
            file.extend(count.to_be_bytes());
        }
        file.extend(7_200_i32.to_be_bytes());
        file.extend([0, 0]);
        file.extend(b"EET\0");
        let root = tempfile::tempdir().unwrap();
        for path in ["etc/localtime", "usr/share/zoneinfo/Land/Town", "x/zone"] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &file).unwrap();
        }
        let host = fake::host(root.path(), Vec::new());
        for variable in [None, Some("Land/Town"), Some(":Land/Town"), Some("/x/zone")] {
            let time = before_now(&host, Duration::ZERO, variable).unwrap();
            assert_eq!(time.to_string(), "1970-01-01 02:00:00.000", "{variable:?}");
        }
    }

    #[test]
    fn a_time_before_all_others_is_none() {
        let root = tempfile::tempdir().unwrap();
        let host = fake::host(root.path(), Vec::new());
        assert_eq!(before_now(&host, Duration::MAX, None), None);
    }
}
