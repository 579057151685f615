//! What is printed: inert on a terminal, and the same JSON when it is read again.

use proptest::collection::vec;
use proptest::strategy::Strategy;
use proptest::{prop_assert, prop_assert_eq, prop_oneof};
use serde_json::Value;
use uni_cumps::Ui;
use uni_cumps::ui::{Tone, json_text, plain, printable};

use crate::invented::{json, text};
use crate::{MANY, law};

/// Control characters, and those that Unicode gives the property Bidi_Control.
fn acts_on_a_terminal(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}')
        || ('\u{202a}'..='\u{202e}').contains(&letter)
        || ('\u{2066}'..='\u{2069}').contains(&letter)
}

#[test]
fn what_is_printable_is_inert_and_stays_as_it_is() {
    law(MANY, text(), |text| {
        let shown = printable(&text);
        prop_assert!(!shown.contains(acts_on_a_terminal), "{shown:?}");
        prop_assert_eq!(printable(&shown), shown.as_str());
        if !text.contains(acts_on_a_terminal) {
            prop_assert_eq!(shown, text);
        }
        Ok(())
    });
}

#[test]
fn every_line_that_is_printed_is_inert() {
    let rows = vec(vec(text(), 0..4), 0..3);
    law(MANY, (text(), rows), |(text, rows)| {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut ui = Ui::new((&mut out, true), (&mut err, true), false);
        ui.line(&text);
        ui.verdict("word", Tone::Bad, &text);
        ui.verbatim(&format!("{text}\n"));
        let cells: Vec<_> = rows
            .iter()
            .map(|row| row.iter().map(plain).collect())
            .collect();
        ui.table(&["A", "B"], &cells);
        ui.note(&text);
        let out = String::from_utf8(out).unwrap();
        let err = String::from_utf8(err).unwrap();
        prop_assert_eq!(
            out.lines().count(),
            4 + rows.len() + text.matches('\n').count()
        );
        for line in out.split('\n').chain(err.split('\n')) {
            prop_assert!(!line.contains(acts_on_a_terminal), "{line:?}");
        }
        Ok(())
    });
}

#[test]
fn json_is_ascii_and_reads_back_as_it_was() {
    law(
        MANY,
        prop_oneof![json(), text().prop_map(Value::from)],
        |value: Value| {
            let text = json_text(&value);
            let inert = |byte: u8| byte == b'\n' || (b' '..=b'~').contains(&byte);
            prop_assert!(text.bytes().all(inert), "{text:?}");
            prop_assert!(text.ends_with('\n'));
            prop_assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
            Ok(())
        },
    );
}
