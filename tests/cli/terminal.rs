//! What a person sees. `script` (bsdutils) gives the binary a terminal.

use crate::support::{Call, Sandbox, uni_cumps};

/// The binary on a terminal; its two streams are one there.
fn on_a_terminal<'s>(machine: &'s Sandbox, args: &str) -> Call<'s> {
    let line = format!("{} {args}", uni_cumps().display());
    machine
        .run([""; 0])
        .under([
            "/bin/sh",
            "-c",
            "exec /usr/bin/script -qec \"$LINE\" /dev/null",
        ])
        .env("LINE", line)
        .env("TERM", "xterm")
        .env("SHELL", "/bin/sh")
}

fn seen(call: Call<'_>) -> String {
    call.finish().text().replace("\r\n", "\n")
}

#[test]
fn status_is_a_table_with_colour() {
    let machine = Sandbox::new();
    let text = seen(on_a_terminal(&machine, "status"));
    assert_eq!(
        text,
        "\x1b[2mGPU\x1b[0m  \x1b[2mUUID\x1b[0m                                      \x1b[2mCOMPUTE MODE\x1b[0m  \x1b[2mVISIBLE\x1b[0m
0    GPU-U0  Default       \x1b[32myes\x1b[0m

No daemon. To start one: uni-cumps start
"
    );
}

#[test]
fn no_color_and_a_dumb_terminal_are_honoured() {
    let machine = Sandbox::new();
    for (key, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let text = seen(on_a_terminal(&machine, "status").env(key, value));
        assert!(
            text.starts_with("GPU  UUID") && !text.contains('\x1b'),
            "{text:?}"
        );
        let text = seen(on_a_terminal(&machine, "stop").env(key, value));
        assert!(
            text.starts_with("error: no recorded") && !text.contains('\x1b'),
            "{text:?}"
        );
    }
}

#[test]
fn start_says_what_to_type_next_and_only_to_a_person() {
    let machine = Sandbox::new();
    let text = seen(on_a_terminal(&machine, "start --name a"));
    assert!(
        text.contains("next\x1b[0m: eval \"$(uni-cumps env --name a)\""),
        "{text:?}"
    );
    machine.run(["stop"]).succeeds();
    machine.run(["start"]).succeeds().said_nothing();
}

#[test]
fn nothing_from_a_record_a_path_or_a_program_reaches_the_terminal_raw() {
    let machine = Sandbox::new();
    let evil = "\x1b]0;owned\x07\u{9b}31m\u{202e}";
    let mut record = machine.reference_record("a", 1);
    record["pipe_directory"] = format!("/tmp/{evil}").into();
    machine.write_record("a", &record);
    let broken = machine.records().join("b");
    std::fs::create_dir_all(&broken).unwrap();
    std::fs::write(broken.join("daemon.json"), format!("{{\"{evil}\"")).unwrap();
    machine.gpu_rows(format!("0, {evil}, Default\n"));
    for command in [
        "status",
        "doctor",
        "start",
        "env --name a",
        "stop --name b",
        "status --json",
    ] {
        for text in [
            seen(
                on_a_terminal(&machine, command)
                    .env("NO_COLOR", "1")
                    .env("CUDA_VISIBLE_DEVICES", evil),
            ),
            piped(&machine, command, evil),
        ] {
            assert!(!text.is_empty(), "{command}");
            let raw = ['\x1b', '\x07', '\u{9b}', '\u{202e}'];
            assert!(!text.contains(raw), "{command}: {text:?}");
            assert!(
                text.contains("31m") || !text.contains("owned"),
                "{command}: {text:?}"
            );
        }
    }
}

/// Both streams of a call that goes to nobody's terminal.
fn piped(machine: &Sandbox, command: &str, mask: &str) -> String {
    let call = machine.run(command.split(' '));
    let done = call.env("CUDA_VISIBLE_DEVICES", mask).finish();
    done.text() + &done.stderr
}
