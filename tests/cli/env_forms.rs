//! `env` in every form that it prints, as the shells and launchers themselves read it.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::support::{Call, Done, Sandbox, U0, installed, our_uid, systemd, uni_cumps};

const VARIABLES: [&str; 3] = [
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
];

/// A directory that most readers would take for something else.
const ODD: &str = " a 'b' \"c\" $HOME`id` \\n\\\\ !! %h,é#;";
/// One that has lines.
const LINES: &str = "x\n'y' \"$X\"\t\\\nEND";
/// What a reader of .env files can take, but none of the plain ways to write it.
const QUOTED: &str = " it's \"a\" \\n\\ #%h\nx";

/// A machine whose daemon `a` has its directories, and its user his home, below one of this name.
struct Machine {
    sandbox: Sandbox,
    below: &'static str,
}

impl Machine {
    fn with_daemon_below(below: &'static str) -> Self {
        let machine = Self::without_daemon_below(below);
        machine.call(&["start", "--name", "a"]).succeeds();
        machine
    }

    fn without_daemon() -> Self {
        Self::without_daemon_below("")
    }

    fn without_daemon_below(below: &'static str) -> Self {
        let sandbox = Sandbox::new();
        symlink(uni_cumps(), sandbox.bin().join("uni-cumps")).unwrap();
        let machine = Self { sandbox, below };
        for parent in ["h", "t"] {
            fs::create_dir_all(machine.odd(parent)).unwrap();
        }
        machine
    }

    fn odd(&self, parent: &str) -> PathBuf {
        self.sandbox.path(parent).join(self.below)
    }

    /// The binary, which programs find on PATH as well.
    fn call(&self, args: &[&str]) -> Call<'_> {
        let path = format!("{}:/usr/bin:/bin", self.sandbox.bin().display());
        self.sandbox
            .run(args)
            .env("HOME", self.odd("h"))
            .env("TMPDIR", self.odd("t"))
            .env("PATH", path)
    }

    fn directory(&self, name: &str) -> String {
        let directory = self.odd("t").join("uni-cumps/a").join(name);
        directory.to_str().unwrap().to_owned()
    }

    /// What a client must have in its environment.
    fn environment(&self) -> Vec<(String, String)> {
        let values = [U0.to_owned(), self.directory("pipe"), self.directory("log")];
        VARIABLES
            .map(str::to_owned)
            .into_iter()
            .zip(values)
            .collect()
    }
}

// What is printed.

/// Each form, what it is for a plain daemon, and what it is where there is none.
const FORMS: [(&[&str], &str, &str); 12] = [
    (&["--shell", "posix"], POSIX, "false\n"),
    (&["--shell", "bash"], POSIX, "false\n"),
    (&["--shell", "zsh"], POSIX, "false\n"),
    (&["--format", "shell"], POSIX, "false\n"),
    (
        &["--shell", "fish"],
        "set -gx CUDA_VISIBLE_DEVICES 'GPU-U0';
set -gx CUDA_MPS_PIPE_DIRECTORY '<S>/t/uni-cumps/a/pipe';
set -gx CUDA_MPS_LOG_DIRECTORY '<S>/t/uni-cumps/a/log';
",
        "false;\n",
    ),
    (
        &["--shell", "csh"],
        "setenv CUDA_VISIBLE_DEVICES 'GPU-U0';
setenv CUDA_MPS_PIPE_DIRECTORY '<S>/t/uni-cumps/a/pipe';
setenv CUDA_MPS_LOG_DIRECTORY '<S>/t/uni-cumps/a/log';
",
        "false;\n",
    ),
    (
        &["--shell", "nu"],
        "$env.CUDA_VISIBLE_DEVICES = \"GPU-U0\"
$env.CUDA_MPS_PIPE_DIRECTORY = \"<S>/t/uni-cumps/a/pipe\"
$env.CUDA_MPS_LOG_DIRECTORY = \"<S>/t/uni-cumps/a/log\"
",
        "error make {msg: \"uni-cumps has no environment to give\"}\n",
    ),
    (
        &["--shell", "powershell"],
        "$env:CUDA_VISIBLE_DEVICES = 'GPU-U0'
$env:CUDA_MPS_PIPE_DIRECTORY = '<S>/t/uni-cumps/a/pipe'
$env:CUDA_MPS_LOG_DIRECTORY = '<S>/t/uni-cumps/a/log'
",
        "throw 'uni-cumps has no environment to give'\n",
    ),
    (
        &["--shell", "elvish"],
        "set-env CUDA_VISIBLE_DEVICES 'GPU-U0'
set-env CUDA_MPS_PIPE_DIRECTORY '<S>/t/uni-cumps/a/pipe'
set-env CUDA_MPS_LOG_DIRECTORY '<S>/t/uni-cumps/a/log'
",
        "fail 'uni-cumps has no environment to give'\n",
    ),
    (
        &["--format", "dotenv"],
        "CUDA_VISIBLE_DEVICES=GPU-U0
CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe
CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log
",
        "CUDA_VISIBLE_DEVICES=uni-cumps-has-no-daemon\n",
    ),
    (
        &["--format", "systemd"],
        "[Service]
Environment=\"CUDA_VISIBLE_DEVICES=GPU-U0\"
Environment=\"CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe\"
Environment=\"CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log\"
",
        "[Service]\nExecStartPre=/bin/false\n",
    ),
    (
        &["--format", "docker"],
        "--env CUDA_VISIBLE_DEVICES=GPU-U0 \
         --env CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe \
         --env CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log \
         --mount type=bind,source=<S>/t/uni-cumps/a/pipe,target=<S>/t/uni-cumps/a/pipe \
         --ipc=host --user=<UID>:<GID>\n",
        "--uni-cumps-has-no-daemon\n",
    ),
];

const POSIX: &str = "export CUDA_VISIBLE_DEVICES=GPU-U0
export CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe
export CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log
";

fn our_ids() -> (u32, u32) {
    (our_uid(), nix::unistd::getegid().as_raw())
}

#[test]
fn each_form_has_its_own_words() {
    let machine = Machine::with_daemon_below("");
    let (uid, gid) = our_ids();
    for (args, expected, _) in FORMS {
        let expected = expected
            .replace("<UID>", &uid.to_string())
            .replace("<GID>", &gid.to_string());
        machine
            .call(&["env"])
            .with(args)
            .prints(&expected)
            .said_nothing();
    }
    let by_flag = machine.call(&["env", "--json"]).succeeds().text();
    machine
        .call(&["env", "--format", "json"])
        .prints(&by_flag)
        .said_nothing();
}

#[test]
fn where_there_is_no_daemon_each_form_has_words_that_fail() {
    let machine = Machine::without_daemon();
    for (args, _, expected) in FORMS {
        let done = machine.call(&["env"]).with(args).finish().exited(1);
        done.printed(expected)
            .said("error: no recorded daemon is live")
            .said("hint: uni-cumps start");
    }
    let failure = machine.call(&["env", "--format", "json"]).finish();
    let failure = failure.exited(1).said("no recorded daemon is live").json();
    assert_eq!(failure["error"]["code"], "no-live-daemon");
}

#[test]
fn what_takes_the_variables_away_needs_no_daemon_and_no_home() {
    let machine = Machine::without_daemon();
    let line = |each: &str| -> String {
        let lines = VARIABLES.map(|key| each.replace("KEY", key) + "\n");
        lines.concat()
    };
    for (args, expected) in [
        (&["--shell", "posix"][..], line("unset KEY")),
        (&["--shell", "bash"], line("unset KEY")),
        (&["--shell", "zsh"], line("unset KEY")),
        (&["--format", "shell"], line("unset KEY")),
        (&[], line("unset KEY")),
        (&["--shell", "fish"], line("set -e KEY; or true;")),
        (&["--shell", "csh"], line("unsetenv KEY;")),
        (&["--shell", "nu"], line("hide-env -i KEY")),
        (
            &["--shell", "powershell"],
            line("Remove-Item Env:KEY -ErrorAction Ignore"),
        ),
        (&["--shell", "elvish"], line("unset-env KEY")),
        (
            &["--format", "systemd"],
            format!("[Service]\nUnsetEnvironment={}\n", VARIABLES.join(" ")),
        ),
        (
            &["--json"],
            "{\n  \"env\": {\n    \"CUDA_MPS_LOG_DIRECTORY\": null,\n    \"CUDA_MPS_PIPE_DIRECTORY\": null,\n    \
             \"CUDA_VISIBLE_DEVICES\": null\n  }\n}\n"
                .to_owned(),
        ),
    ] {
        machine
            .call(&["env", "--unset"])
            .with(args)
            .unset("HOME")
            .prints(&expected)
            .said_nothing();
    }
    for form in ["dotenv", "docker", "github"] {
        machine
            .call(&["env", "--unset", "--format", form])
            .breaks_usage()
            .said("--unset goes with --format shell, json or systemd");
    }
}

#[test]
fn what_a_reader_would_change_is_refused_and_the_variable_is_named() {
    for (below, args, holds) in [
        (LINES, ["--shell", "csh"], "a newline"),
        ("x\ry", ["--shell", "powershell"], "a carriage return"),
        ("$X'", ["--format", "dotenv"], "a dollar sign"),
        ("${X}", ["--format", "dotenv"], "a dollar sign"),
        ("x\ry", ["--format", "dotenv"], "a carriage return"),
        ("x\x1b", ["--format", "systemd"], "a control character"),
        ("x\u{fffe}", ["--format", "systemd"], "a noncharacter"),
        ("x\r\ny", ["--format", "docker"], "a carriage return"),
    ] {
        let machine = Machine::with_daemon_below(below);
        let refused = machine.call(&["env"]).with(args).finish().exited(1);
        let (_, _, fails) = FORMS.into_iter().find(|form| form.0 == args).unwrap();
        refused
            .printed(fails)
            .said("CUDA_MPS_PIPE_DIRECTORY cannot be written for ")
            .said(&format!("cause: its value holds {holds}"))
            .said("hint: give the daemon plainer directories");
        machine.call(&["env", "--json"]).succeeds().said_nothing();
    }
}

// What shells make of it.

/// A shell and what is typed in it.
struct Shell {
    name: &'static str,
    arguments: &'static [&'static str],
    /// As the help tells it.
    evaluate: &'static str,
    /// A script that evaluates it and does something THEN, unless it has failed.
    script: &'static str,
}

const POSIX_SCRIPT: &str = "set -eu; EVALUATE; THEN";

const KNOWN: [Shell; 10] = [
    shell("sh", &["-c"], "eval \"$(uni-cumps env)\"", POSIX_SCRIPT),
    shell("dash", &["-c"], "eval \"$(uni-cumps env)\"", POSIX_SCRIPT),
    shell("ksh", &["-c"], "eval \"$(uni-cumps env)\"", POSIX_SCRIPT),
    shell("bash", &["-c"], "eval \"$(uni-cumps env)\"", POSIX_SCRIPT),
    shell("zsh", &["-fc"], "eval \"$(uni-cumps env)\"", POSIX_SCRIPT),
    shell(
        "fish",
        &["--no-config", "-c"],
        "uni-cumps env --shell fish | source",
        "EVALUATE; or exit 1; THEN",
    ),
    shell(
        "tcsh",
        &["-fec"],
        "eval \"`uni-cumps env --shell csh`\"",
        "EVALUATE; THEN",
    ),
    shell(
        "nu",
        &["-n", "-c"],
        "uni-cumps env --shell nu | save -f mps.nu",
        "EVALUATE; ^nu -n -c 'source mps.nu; ^THEN'",
    ),
    shell(
        "pwsh",
        &["-NoProfile", "-Command"],
        "uni-cumps env --shell powershell | Out-String | Invoke-Expression",
        "EVALUATE; THEN",
    ),
    shell(
        "elvish",
        &["-norc", "-c"],
        "eval (uni-cumps env --shell elvish | slurp)",
        "EVALUATE; THEN",
    ),
];

const fn shell(
    name: &'static str,
    arguments: &'static [&'static str],
    evaluate: &'static str,
    script: &'static str,
) -> Shell {
    Shell {
        name,
        arguments,
        evaluate,
        script,
    }
}

/// The shells of this machine and where they are.
static SHELLS: LazyLock<Vec<(PathBuf, Shell)>> = LazyLock::new(|| {
    let found = KNOWN.map(|shell| Some((installed(shell.name)?, shell)));
    found.into_iter().flatten().collect()
});

impl Shell {
    /// The script that evaluates `env` with these options, and then does something.
    fn script(&self, options: &str, then: &str) -> String {
        let evaluate = self
            .evaluate
            .replace("uni-cumps env", &format!("uni-cumps env{options}"));
        self.script
            .replace("EVALUATE", &evaluate)
            .replace("THEN", then)
    }
}

impl Machine {
    /// A script in a shell.
    fn typed(&self, (path, shell): &(PathBuf, Shell), script: &str) -> Call<'_> {
        // nu calls itself by name.
        let places = path.parent().unwrap().display();
        let places = format!("{}:/usr/bin:/bin:{places}", self.sandbox.bin().display());
        self.call(&[])
            .instead([path.to_str().unwrap()])
            .with(shell.arguments)
            .and(script)
            .env("PATH", places)
            // fish changes what it inherits where it believes letters to be bytes.
            .env("LC_ALL", "C.UTF-8")
    }
}

/// The client's variables in the environment that `env -0` has printed.
fn found_in(done: &Done<'_>) -> Vec<(String, String)> {
    let printed = String::from_utf8(done.stdout.clone()).unwrap();
    let all: BTreeMap<&str, &str> = printed
        .split('\0')
        .filter_map(|entry| entry.split_once('='))
        .collect();
    let ours = VARIABLES
        .iter()
        .filter_map(|key| Some((key, all.get(key)?)));
    ours.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

const PRINT_ENVIRONMENT: &str = "/usr/bin/env -0";
const GO_ON: &str = "/bin/echo reached";

#[test]
fn the_help_tells_what_is_typed_in_each_shell() {
    let help = Sandbox::new().run(["env", "--help"]).succeeds().text();
    for shell in KNOWN {
        assert!(help.contains(shell.evaluate), "{}: {help}", shell.name);
    }
}

#[test]
fn a_program_started_from_any_shell_has_the_values_byte_for_byte() {
    for below in ["", ODD, LINES] {
        let machine = Machine::with_daemon_below(below);
        for shell in SHELLS.iter() {
            if shell.1.name == "tcsh" && below.contains('\n') {
                continue;
            }
            let script = shell.1.script("", PRINT_ENVIRONMENT);
            let done = machine.typed(shell, &script).succeeds().said_nothing();
            assert_eq!(found_in(&done), machine.environment(), "{}", shell.1.name);
        }
    }
}

#[test]
fn no_shell_goes_on_where_there_is_no_daemon() {
    let machine = Machine::without_daemon();
    for shell in SHELLS.iter() {
        let script = shell.1.script("", GO_ON);
        let done = machine.typed(shell, &script).finish();
        assert_ne!(done.code, 0, "{done:?}");
        done.printed("").said("error: no recorded daemon is live");
    }
}

#[test]
fn what_was_set_is_taken_away_in_every_shell_and_what_never_was_does_no_harm() {
    let machine = Machine::without_daemon();
    for shell in SHELLS.iter() {
        let script = shell.1.script(" --unset", PRINT_ENVIRONMENT);
        for is_set in [true, false] {
            let mut call = machine.typed(shell, &script).env("OTHER", "stays");
            if is_set {
                call = VARIABLES.iter().fold(call, |call, key| call.env(key, "x"));
            }
            let done = call.succeeds().said_nothing();
            assert_eq!(found_in(&done), [], "{}", shell.1.name);
            assert!(done.text().contains("OTHER=stays\0"), "{done:?}");
        }
    }
}

// What launchers make of it.

#[test]
fn a_reader_of_env_files_finds_the_values() {
    for below in ["", "with blank", "x\n\"y\" $X\t#", QUOTED] {
        let machine = Machine::with_daemon_below(below);
        let file = machine.call(&["env", "--format", "dotenv"]).succeeds();
        let read = dotenvy::from_read_iter(&file.stdout[..]);
        let read: Vec<(String, String)> = read.map(Result::unwrap).collect();
        assert_eq!(read, machine.environment(), "{file:?}");
    }
}

/// `docker run` with what we print for it.
fn docker_run<'m>(machine: &'m Machine, engine: &Engine, docker: &PathBuf) -> Done<'m> {
    machine
        .call(&[])
        .instead(["/bin/sh", "-c"])
        .and("eval \"\\\"\\$DOCKER\\\" run $(uni-cumps env --format docker) image program\"")
        .env("DOCKER", docker)
        .env("DOCKER_HOST", engine.address())
        .finish()
}

#[test]
fn docker_gives_a_container_all_that_a_client_needs() {
    let Some(docker) = installed("docker") else {
        return;
    };
    for below in ["", ODD, LINES] {
        let machine = Machine::with_daemon_below(below);
        let engine = Engine::at(&machine.sandbox.path("docker.sock"));
        let done = docker_run(&machine, &engine, &docker);
        assert!(done.stderr.contains("seen"), "{done:?}");
        let created = engine.asked_to_create();
        let [container] = &created[..] else {
            panic!("{created:?}");
        };
        let environment = machine.environment().into_iter();
        let environment: HashSet<String> = environment.map(|(k, v)| format!("{k}={v}")).collect();
        let given: Vec<String> = Vec::deserialize(&container["Env"]).unwrap();
        assert_eq!(given.len(), 3, "{given:?}");
        assert_eq!(HashSet::from_iter(given), environment);
        let pipe = machine.directory("pipe");
        let mounts = &container["HostConfig"]["Mounts"];
        assert_eq!(
            *mounts,
            json!([{"Type": "bind", "Source": pipe, "Target": pipe}])
        );
        assert_eq!(container["HostConfig"]["IpcMode"], "host");
        let (uid, gid) = our_ids();
        assert_eq!(container["User"], format!("{uid}:{gid}"));
        assert_eq!(container["Image"], "image");
        assert_eq!(container["Cmd"], json!(["program"]));
    }
}

#[test]
fn docker_starts_no_container_where_there_is_no_daemon() {
    let Some(docker) = installed("docker") else {
        return;
    };
    let machine = Machine::without_daemon();
    let engine = Engine::at(&machine.sandbox.path("docker.sock"));
    let done = docker_run(&machine, &engine, &docker);
    assert_ne!(done.code, 0, "{done:?}");
    done.said("unknown flag: --uni-cumps-has-no-daemon")
        .said("no recorded daemon is live");
    assert_eq!(engine.asked_to_create(), [Value::Null; 0]);
}

#[test]
fn systemd_sets_the_values_byte_for_byte() {
    for below in ["", ODD, LINES] {
        let machine = Machine::with_daemon_below(below);
        let drop_in = machine.call(&["env", "--format", "systemd"]).succeeds();
        let drop_in = String::from_utf8(drop_in.stdout).unwrap();
        let Some(service) = systemd::service(&drop_in) else {
            return;
        };
        assert!(service.sets(&machine.environment()), "{service:#?}");
        assert!(!service.said.contains("mps.conf"), "{service:#?}");
        assert_eq!(service.must_succeed(), None);
    }
}

#[test]
fn systemd_starts_no_service_where_there_is_no_daemon() {
    let machine = Machine::without_daemon();
    let drop_in = machine.call(&["env", "--format", "systemd"]).finish();
    if let Some(service) = systemd::service(&drop_in.text()) {
        assert_eq!(service.must_succeed(), Some("/bin/false"));
    }
}

#[test]
fn systemd_takes_the_variables_away() {
    let machine = Machine::without_daemon();
    let drop_in = machine.call(&["env", "--format", "systemd", "--unset"]);
    if let Some(service) = systemd::service(&drop_in.succeeds().text()) {
        assert!(service.takes_away(&VARIABLES), "{service:#?}");
        assert!(service.sets::<&str, &str>(&[]), "{service:#?}");
    }
}

/// The variables of a file as GitHub's runner reads them (src/Runner.Worker/FileCommandManager.cs).
fn github_reads(text: &str) -> Vec<(String, String)> {
    let mut variables = Vec::new();
    let mut lines = text.split('\n');
    while let Some(line) = lines.next() {
        let (equals, heredoc) = (line.find('='), line.find("<<"));
        let entry = match (equals, heredoc) {
            (None, None) if line.is_empty() => continue,
            (Some(equals), heredoc) if heredoc.is_none_or(|heredoc| equals < heredoc) => {
                (line[..equals].to_owned(), line[equals + 1..].to_owned())
            }
            (_, Some(heredoc)) => {
                let delimiter = &line[heredoc + 2..];
                let value: Vec<&str> = lines.by_ref().take_while(|it| *it != delimiter).collect();
                (line[..heredoc].to_owned(), value.join("\n"))
            }
            _ => panic!("invalid format {line:?}"),
        };
        variables.push(entry);
    }
    variables
}

/// `env --format github` with this file, which is in the sandbox's directory.
fn github<'m>(machine: &'m Machine, file: &str) -> Call<'m> {
    machine
        .call(&["env", "--format", "github"])
        .env("GITHUB_ENV", machine.sandbox.path(file))
}

#[test]
fn github_finds_the_values_behind_what_earlier_steps_have_left() {
    for below in ["", ODD, LINES] {
        let machine = Machine::with_daemon_below(below);
        let file = machine.sandbox.path("vars");
        for (earlier, step) in [
            ("", "0"),
            ("STEP=1\n", "1"),
            ("STEP=2", "2"),
            ("STEP<<EOF\n3\nEOF\n", "3"),
            ("STEP<<EOF\n4\nEOF", "4"),
        ] {
            fs::write(&file, earlier).unwrap();
            github(&machine, "vars").prints("").said_nothing();
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.starts_with(earlier), "{text:?}");
            let mut expected = machine.environment();
            if step != "0" {
                expected.insert(0, ("STEP".to_owned(), step.to_owned()));
            }
            assert_eq!(github_reads(&text), expected, "{text:?}");
        }
    }
}

#[test]
fn githubs_file_has_a_line_for_each_plain_value() {
    let machine = Machine::with_daemon_below("");
    let file = machine.sandbox.path("vars");
    fs::write(&file, "").unwrap();
    github(&machine, "vars")
        .env("GITHUB_ENV", "vars")
        .prints("")
        .said_nothing();
    let written = machine.sandbox.normal(&fs::read_to_string(&file).unwrap());
    assert_eq!(written, POSIX.replace("export ", ""), "by a relative path");
}

#[test]
fn without_a_file_of_githubs_the_step_fails() {
    let machine = Machine::with_daemon_below("");
    for call in [
        github(&machine, "vars").unset("GITHUB_ENV"),
        github(&machine, "vars").env("GITHUB_ENV", ""),
    ] {
        call.fails("GITHUB_ENV names no file to append to")
            .said("hint: --format github is for a step of a GitHub Actions job");
    }
    // The runner makes the file before each step, so a missing one is not read by anybody.
    github(&machine, "missing").fails("<S>/missing");
    assert!(!machine.sandbox.path("missing").exists());
    github(&machine, "h").fails("directory");
    github(&machine, "vars")
        .env("GITHUB_ENV", "/dev/full")
        .fails("No space left on device");
}

#[test]
fn githubs_file_stays_as_it_is_where_there_is_no_daemon() {
    let machine = Machine::without_daemon();
    let file = machine.sandbox.path("vars");
    fs::write(&file, "STEP=1").unwrap();
    github(&machine, "vars").fails("no recorded daemon is live");
    assert_eq!(fs::read_to_string(&file).unwrap(), "STEP=1");
}

// Where it is printed to.

#[test]
fn a_full_disk_is_a_failure() {
    let machine = Machine::with_daemon_below("");
    for args in FORMS.map(|form| form.0) {
        machine
            .call(&["env"])
            .with(args)
            .under(["/bin/sh", "-c", "exec \"$@\" >/dev/full", "sh"])
            .fails("the output could not be written: No space left on device");
    }
}

#[test]
fn what_is_printed_to_nowhere_is_written_nowhere_else() {
    let machine = Machine::with_daemon_below("");
    let tree = "find . -type f -exec cksum {} + | sort";
    let before = machine.sandbox.sh(tree);
    for args in FORMS.map(|form| form.0) {
        machine
            .call(&["env"])
            .with(args)
            .under(["/bin/sh", "-c", "exec \"$@\" >&- 2>&- <&-", "sh"])
            .prints("")
            .said_nothing();
    }
    assert_eq!(machine.sandbox.sh(tree), before);
}

#[test]
fn a_terminal_shows_what_it_would_act_on() {
    let machine = Machine::with_daemon_below("\x1b]0;owned\x07\u{9b}31m\u{202e}");
    for args in FORMS.map(|form| form.0) {
        let line = format!("uni-cumps env {}", args.join(" "));
        let call = machine.sandbox.on_a_terminal(&line);
        let done = call
            .env("HOME", machine.odd("h"))
            .env("TMPDIR", machine.odd("t"))
            .env("NO_COLOR", "1")
            .finish();
        let seen = done.text();
        assert!(
            !seen.contains(['\x1b', '\x07', '\u{9b}', '\u{202e}']),
            "{seen:?}"
        );
        assert!(seen.contains("GPU-U0") || done.code == 1, "{seen:?}");
    }
}
