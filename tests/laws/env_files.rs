//! What we write for launchers is refused, or their own readers find it byte for byte, whatever is in it.

use proptest::collection::vec;
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use uni_cumps::env_file;
use uni_cumps::shell::Unwritable;

use crate::invented::{text_without_nul, word};
use crate::support::systemd;
use crate::{MANY, law};

/// Values for one unit, at the most, and units: systemd takes a tenth of a second to start.
const BATCH: usize = 1000;
const BATCHES: u32 = 15;

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => text_without_nul(),
        1 => word(&["", "#", " #", "'#", "''", "\"", "\\", "\\'", "\\n", "$", "${", "$X", "'$X", "%", "%h", "a\n", "\u{feff}", "\u{fdd0}", "\u{fffe}", "\u{1ffff}"])
            .prop_map(|text| text.replace('\0', "")),
        1 => "[=a-z/:~.+,@%^-]{0,4}",
    ]
}

/// The values that are written, behind each other, and with the keys that they get.
fn written(
    values: Vec<String>,
    line: impl Fn(&str, &str) -> Result<String, Unwritable>,
) -> (String, Vec<(String, String)>) {
    let (lines, written): (Vec<String>, Vec<(String, String)>) = values
        .into_iter()
        .enumerate()
        .map(|(place, value)| (format!("V{place:03}"), value))
        .filter_map(|(key, value)| Some((line(&key, &value).ok()? + "\n", (key, value))))
        .unzip();
    (lines.concat(), written)
}

#[test]
fn a_reader_of_env_files_finds_the_values() {
    law(MANY, vec(value(), 1..4), |values| {
        let (text, expected) = written(values, env_file::dotenv);
        let read: Result<Vec<(String, String)>, _> =
            dotenvy::from_read_iter(text.as_bytes()).collect();
        prop_assert!(read.is_ok(), "{text:?}: {read:?}");
        prop_assert_eq!(read.unwrap_or_default(), expected, "{:?}", text);
        Ok(())
    });
}

#[test]
fn only_what_readers_of_env_files_disagree_about_is_refused() {
    law(MANY, value(), |value| {
        if env_file::dotenv("K", &value).is_err() {
            prop_assert!(value.contains(['$', '\r']), "{value:?}");
        }
        Ok(())
    });
}

#[test]
fn systemd_finds_the_values() {
    law(BATCHES, vec(value(), 1..BATCH), |values| {
        let (lines, expected) = written(values, env_file::systemd);
        if let Some(service) = systemd::service(&format!("[Service]\n{lines}")) {
            prop_assert!(service.sets(&expected), "{}", service.said);
            prop_assert!(!service.said.contains("mps.conf"), "{}", service.said);
        }
        Ok(())
    });
}
