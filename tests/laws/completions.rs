//! Completion of any command line: candidates or none, and never a complaint at the press of a key.

use std::ffi::OsString;

use proptest::collection::vec;
use proptest::prop_assert_eq;
use proptest::sample::select;
use uni_cumps::Ui;

use crate::fake::host;
use crate::invented::word;
use crate::law;

const COMMANDS: &[&str] = &["doctor", "help", "start", "stop", "validate", "visibility"];

/// What may stand behind a command, in an order that nobody expects.
const WORDS: &[&str] = &[
    "",
    "-",
    "--",
    "-1",
    "-vqx",
    "--color",
    "--color=",
    "--name",
    "--name=",
    "--nothing",
    "--only",
    "--pid",
    "--pipe-dir=..",
    "=",
    "stop",
    "~/..",
];

#[test]
fn no_command_line_makes_completion_complain() {
    let directory = tempfile::tempdir().unwrap();
    // fish completes the last word; the others say in a variable which one they mean.
    let asked = ["uni-cumps", "--", "uni-cumps"].map(OsString::from);
    law(2000, (select(COMMANDS), vec(word(WORDS), 1..6)), |line| {
        let mut host = host(directory.path());
        host.env = [("UNI_CUMPS_COMPLETE", "fish")].into_iter().collect();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut ui = Ui::new((&mut out, false), (&mut err, false), false);
        let (command, words) = line;
        let words = [command.to_owned()].into_iter().chain(words);
        let args = asked.iter().cloned().chain(words.map(OsString::from));
        uni_cumps::run(args, host, &mut ui);
        prop_assert_eq!(String::from_utf8(err).unwrap(), "");
        Ok(())
    });
}
