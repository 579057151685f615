//! What a person sees.

use crate::support::{Call, Sandbox, uni_cumps, wait_until};

/// The binary on a terminal; its two streams are one there.
fn on_a_terminal<'s>(machine: &'s Sandbox, args: &str) -> Call<'s> {
    machine
        .on_a_terminal(&format!("{} {args}", uni_cumps().display()))
        .env("TERM", "xterm")
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
fn colours_are_used_as_the_command_line_says() {
    let machine = Sandbox::new();
    let piped = machine.run(["stop", "--color", "always"]).finish();
    assert!(piped.stderr.starts_with("\x1b[31merror\x1b[0m: no rec"));
    let always = on_a_terminal(&machine, "status --color=always");
    assert!(seen(always.env("NO_COLOR", "1")).contains('\x1b'));
    let never = seen(on_a_terminal(&machine, "--color=never status"));
    assert!(
        never.starts_with("GPU  UUID") && !never.contains('\x1b'),
        "{never:?}"
    );
    machine
        .run(["status", "--color=sometimes"])
        .breaks_usage()
        .said("auto, always, never");
}

#[test]
fn quiet_leaves_notes_out_and_failures_in() {
    let machine = Sandbox::new();
    let ambient = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10");
    let start = |args: &[&str]| machine.run(args).env(ambient.0, ambient.1);
    start(&["start", "--name", "a"])
        .succeeds()
        .said("note: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    machine.run(["stop", "-q"]).succeeds().said_nothing();
    start(&["start", "--name", "a", "--quiet"])
        .succeeds()
        .said_nothing();
    let text = seen(on_a_terminal(&machine, "-q start --name a"));
    assert!(text.contains("already live"), "{text:?}");
    machine.run(["stop", "-q"]).succeeds();
    let text = seen(on_a_terminal(&machine, "-q start --name a"));
    assert!(text.trim_end().ends_with('}'), "{text:?}");
}

#[test]
fn verbose_traces_each_program_call_ready_to_paste() {
    let machine = Sandbox::new();
    let started = machine.run(["start", "--name", "a", "-v"]).succeeds();
    let traces: Vec<&str> = started
        .stderr
        .lines()
        .map(|line| {
            let (time, call) = line
                .strip_prefix("trace: ")
                .unwrap()
                .split_once(" ms, exit 0: ")
                .unwrap();
            assert!(time.parse::<f64>().unwrap() >= 0.0);
            call
        })
        .collect();
    let [smi, launch, question] = &traces[..] else {
        panic!("{traces:?}");
    };
    let bin = machine.bin().display().to_string();
    assert!(
        smi.starts_with(&format!("{bin}/nvidia-smi --query-gpu=")),
        "{smi}"
    );
    let pipe = format!(
        "CUDA_MPS_PIPE_DIRECTORY={}/a/pipe ",
        machine.runtime().display()
    );
    assert!(launch.contains(&pipe), "{launch}");
    assert!(
        launch.ends_with(&format!("{bin}/nvidia-cuda-mps-control -d")),
        "{launch}"
    );
    assert!(
        question.starts_with("printf ") && question.contains(&pipe),
        "{question}"
    );
    machine.calls();
    // Pasted, it asks the daemon again.
    machine.sh(question);
    let asked = machine.calls();
    assert!(asked.contains("get_server_list"), "{asked}");
    machine
        .run(["stop", "--verbose"])
        .succeeds()
        .said("quit\\n");
    assert_eq!(machine.run(["status"]).succeeds().stderr, "");
}

#[test]
fn a_traced_foreground_daemon_ends_as_any_other() {
    let machine = Sandbox::new();
    let foreground = machine
        .run(["start", "--foreground", "--name", "a", "-v"])
        .spawn();
    wait_until("it is recorded", || machine.record_file("a").exists());
    machine.run(["stop"]).succeeds();
    let output = foreground.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("nvidia-cuda-mps-control -f\n"), "{told}");
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

#[test]
fn a_long_wait_is_shown_to_a_person_and_leaves_nothing_behind() {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    machine.conduct("quit ignored");
    machine.run(["stop"]).succeeds();
    machine.start(&["--name", "a"]);
    let text = seen(on_a_terminal(&machine, "stop --timeout 1"));
    assert!(
        text.contains("\x1b7\x1b[?7l| waiting for daemon a to quit (0 s)\x1b[K\x1b[?7h\x1b8"),
        "{text:?}"
    );
    assert!(
        text.contains("\x1b7\x1b[?7l/ waiting for daemon a to quit (0 s)\x1b[K\x1b[?7h\x1b8"),
        "{text:?}"
    );
    let last = text.rfind("waiting for daemon a").unwrap();
    assert!(text[last..].contains("\x1b8\x1b[K"), "{text:?}");
    for args in ["-q stop --timeout 1", "-v stop --timeout 1"] {
        machine.start(&["--name", "a"]);
        let text = seen(on_a_terminal(&machine, args));
        assert!(!text.contains("waiting for"), "{args}: {text:?}");
    }
    machine.start(&["--name", "a"]);
    let piped = machine.run(["stop", "--timeout", "1"]).succeeds();
    assert!(!piped.stderr.contains("waiting for"), "{piped:?}");
}
