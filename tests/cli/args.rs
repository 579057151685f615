//! The command line: what is not understood, what the help promises, and the exit statuses.

use crate::support::{N0, Sandbox};

#[test]
fn args_errors() {
    let machine = Sandbox::new();
    let misunderstood: [&[&str]; 18] = [
        &[],
        &["frobnicate"],
        &["stat"],
        &["status", "--xml"],
        &["status", "extra"],
        &["start", "--json"],
        &["start", "--gpus"],
        &["start", "--daemon", "--foreground"],
        &["stop", "a"],
        &["env", "--shell", "cmd.exe"],
        &["env", "--shell", "fish", "--format", "docker"],
        &["env", "--format", "dotenv", "--unset"],
        &["env", "--format", "json", "--json"],
        &["env", "--unset", "--name", "a"],
        &["env", "--by-rank", "--name", "a"],
        &["env", "--by-rank=1"],
        &["env", "--shell"],
        &["--json"],
    ];
    for args in misunderstood {
        machine.run(args).breaks_usage().said("--help");
    }
    assert_eq!(machine.calls(), "");
}

#[test]
fn the_help_names_every_command_and_goes_to_standard_output() {
    let machine = Sandbox::new();
    let help = machine.run(["--help"]).succeeds().said_nothing().text();
    for command in ["status", "doctor", "start", "stop", "env"] {
        assert!(help.contains(&format!("\n  {command} ")), "{help}");
        let help = machine.run([command, "--help"]).succeeds().said_nothing();
        let usage = format!("Usage: uni-cumps {command}");
        assert!(help.text().contains(&usage), "{help:?}");
    }
    for (command, option) in [
        ("status", "--json"),
        ("doctor", "--gpus <GPU>"),
        ("doctor", "--json"),
        ("start", "--gpus <GPUS>"),
        ("start", "--name <NAME>"),
        ("start", "--pipe-dir <DIR>"),
        ("start", "--log-dir <DIR>"),
        ("start", "--daemon"),
        ("start", "--foreground"),
        ("stop", "--name <NAME>"),
        ("stop", "--all"),
        ("env", "--name <NAME>"),
        ("env", "--shell <SHELL>"),
        ("env", "--json"),
    ] {
        let help = machine.run([command, "--help"]).succeeds().text();
        assert!(help.contains(option), "{option} in {help}");
    }
}

#[test]
fn the_version_is_printed() {
    let version = format!("uni-cumps {}\n", env!("CARGO_PKG_VERSION"));
    Sandbox::new().run(["--version"]).prints(&version);
}

#[test]
fn an_option_may_be_abbreviated_as_long_as_it_is_unique() {
    let machine = Sandbox::with_gpus(2);
    let status = machine.run(["status", "--js"]).succeeds().json();
    assert_eq!(status["gpus"].as_array().unwrap().len(), 2);
    let record = machine.start(&["--gp", "1", "--na", "a"]);
    assert_eq!(record["name"], "a");
    machine.run(["stop", "--nam=a"]).succeeds();
}

#[test]
fn help_text_wrong() {
    let machine = Sandbox::new();
    let help = machine.run(["start", "--help"]).succeeds().text();
    for promise in [
        "[default: gpu- and the GPU's complete UUID]",
        "[default: $TMPDIR/uni-cumps/NAME/pipe]",
        "[default: $TMPDIR/uni-cumps/NAME/log]",
    ] {
        assert!(help.contains(promise), "{promise} in {help}");
    }
    let record = machine.start(&[]);
    assert_eq!(record["name"], N0);
    let own = machine.path("t/uni-cumps").join(N0);
    assert_eq!(record["pipe_directory"], own.join("pipe").to_str().unwrap());
    assert_eq!(record["log_directory"], own.join("log").to_str().unwrap());
}

#[test]
fn exit_codes() {
    let machine = Sandbox::new();
    machine
        .run(["env"])
        .fails_in_the_shell("error: no recorded daemon is live")
        .said("hint: uni-cumps start");
    machine
        .run(["stop", "--name", "nope"])
        .fails("error: no daemon named nope is recorded");
    machine
        .run(["start", "--gpus", "9"])
        .fails("error: GPU selector \"9\" matches no GPU");
    let doctor = machine.run(["doctor"]).finish().exited(1).text();
    assert!(doctor.contains("\nvalid=False\n"), "{doctor}");
    assert!(!machine.records().exists());
}

#[test]
fn a_failure_with_json_is_one_object_on_standard_output() {
    let machine = Sandbox::new();
    let failure = machine.run(["env", "--json"]).finish().exited(1).json();
    assert_eq!(failure["error"]["code"], "no-live-daemon");
    assert_eq!(failure["error"]["message"], "no recorded daemon is live");
    assert_eq!(failure["error"]["hint"], "uni-cumps start");
    assert_eq!(failure.as_object().unwrap().len(), 1);
}
