//! `run`: a program in our place, with nothing of ours but the daemon's variables; and all that keeps it from running.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::directories::home_of;
use crate::support::{Call, Done, N0, Sandbox, U0, U1, freeze, pid, set_mode, without_root};

const USER: u32 = 1000;

/// Options with which the program takes our place, and with which it runs beside us.
const BOTH: [&[&str]; 2] = [&[], &["--require-mps"]];

/// A machine with one daemon, named a.
pub(crate) fn machine() -> Sandbox {
    let machine = Sandbox::new();
    machine.start(&["--name", "a"]);
    machine.calls();
    machine
}

/// `run` with these options and this program, which finds the machine's own programs on PATH as well.
pub(crate) fn run<'s, A: AsRef<OsStr>>(
    machine: &'s Sandbox,
    options: &[&str],
    program: impl IntoIterator<Item = A>,
) -> Call<'s> {
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let call = machine.run(["run"].iter().chain(options).chain(&["--"]));
    let call = program.into_iter().fold(call, Call::and);
    call.env("PATH", path).env("S", machine.path(""))
}

/// `run` with a line of shell as its program.
pub(crate) fn run_sh<'s>(machine: &'s Sandbox, options: &[&str], line: &str) -> Call<'s> {
    run(machine, options, ["/bin/sh", "-c", line])
}

/// A shell line in front of the call, which is its `"$@"`.
pub(crate) fn after<'s>(call: Call<'s>, line: &str) -> Call<'s> {
    call.under(["/bin/sh", "-c", line, "sh"])
}

/// A failure of ours: nothing was run, and it is said why.
#[track_caller]
fn refuses<'s>(call: Call<'s>, sentence: &str) -> Done<'s> {
    call.finish().exited(125).printed("").said(sentence)
}

/// An executable file.
fn program(machine: &Sandbox, path: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = machine.path(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, content).unwrap();
    set_mode(&path, 0o755);
    path
}

// It takes our place.

#[test]
fn the_program_is_the_process_that_was_called_and_nothing_of_ours_is_left() {
    let machine = machine();
    let child = run_sh(
        &machine,
        &[],
        "echo $$; exec 3>&-; ls -l /proc/$$/exe /proc/$$/fd | grep -c -e uni-cumps -e memfd -e signalfd; echo $PPID",
    )
    .spawn();
    let called = child.id();
    let output = child.wait_with_output().unwrap();
    let us = std::process::id();
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{called}\n0\n{us}\n")
    );
    assert_eq!(output.stderr, b"");
    assert_eq!(machine.calls(), "", "no program is called but this one");
}

#[test]
fn arguments_arrive_byte_for_byte() {
    let machine = machine();
    let arguments: [&[u8]; 13] = [
        b"x",
        b"",
        b" ",
        b"--",
        b"-q",
        b"--name",
        b"--require-mps=0",
        b"a\nb",
        b"\xff\xfe",
        b"*",
        b"$HOME",
        "\u{e9}".as_bytes(),
        b"--help",
    ];
    for options in BOTH {
        let line = ["sh", "-c", "cat /proc/$$/cmdline; exit 3"];
        let call = run(&machine, options, line);
        let call = arguments
            .iter()
            .fold(call, |call, argument| call.and(OsStr::from_bytes(argument)));
        let done = call.finish().exited(3).said_nothing();
        let seen: Vec<&[u8]> = done.stdout.split(|byte| *byte == 0).collect();
        let line = line.map(str::as_bytes);
        let expected = [&line[..], &arguments, &[b""]].concat();
        assert_eq!(seen, expected, "{options:?}");
    }
    // Without the dashes as well: what follows the program is the program's.
    let path = format!("{}:/bin", machine.bin().display());
    machine
        .run(["run", "--name", "a", "echo", "--name", "b", "-v", "--help"])
        .env("PATH", path)
        .prints("--name b -v --help\n");
}

#[test]
fn the_environment_is_the_callers_and_the_daemons_three_variables() {
    let machine = machine();
    let bytes = OsString::from_vec(b"\xff=\n x".to_vec());
    let sandbox = machine.path("").display().to_string();
    let bin = machine.bin().display().to_string();
    let directory = machine.runtime().join("a").display().to_string();
    let mut expected: Vec<Vec<u8>> = [
        "BASH_FUNC_f%%=() { :; }".to_owned(),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=17".to_owned(),
        "CUDA_MPS_CLIENT_PRIORITY=0".to_owned(),
        format!("CUDA_MPS_LOG_DIRECTORY={directory}/log"),
        format!("CUDA_MPS_PIPE_DIRECTORY={directory}/pipe"),
        format!("CUDA_VISIBLE_DEVICES={U0}"),
        "EMPTY=".to_owned(),
        format!("HOME={sandbox}h"),
        format!("LD_LIBRARY_PATH={sandbox}lib"),
        format!("PATH={bin}:/usr/bin:/bin"),
        format!("S={sandbox}"),
        format!("STUB_CHECKPOINT={sandbox}cuda"),
        format!("STUB_GPUS={bin}/gpus.csv"),
        format!("TMPDIR={sandbox}t"),
    ]
    .map(String::into_bytes)
    .to_vec();
    expected.push([b"BYTES=", bytes.as_bytes()].concat());
    expected.sort_unstable();
    for options in BOTH {
        // A shell would leave out what it cannot name.
        let done = run(&machine, options, ["cat", "/proc/self/environ", "/nowhere"])
            .env("BYTES", &bytes)
            .env("EMPTY", "")
            .env("BASH_FUNC_f%%", "() { :; }")
            .env("CUDA_MPS_PIPE_DIRECTORY", "/somebody/elses")
            .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "17")
            .env("CUDA_MPS_CLIENT_PRIORITY", "0")
            .env("CUDA_VISIBLE_DEVICES", "0")
            .finish()
            .exited(1)
            .said("cat: /nowhere: No such file or directory\n");
        let mut seen: Vec<&[u8]> = done.stdout.split(|byte| *byte == 0).collect();
        assert_eq!(seen.pop(), Some(&b""[..]));
        seen.sort_unstable();
        assert_eq!(seen, expected, "{options:?}: {done:?}");
    }
}

#[test]
fn it_runs_where_the_caller_is_even_if_that_is_gone() {
    let machine = machine();
    fs::create_dir(machine.path("job")).unwrap();
    for options in BOTH {
        // A shell complains about a directory that is gone.
        let cwd = |call: Call<'_>| call.finish().exited(3).text();
        let line = "readlink /proc/$$/cwd; exit 3";
        let here = run_sh(&machine, options, line).cwd(machine.path("job"));
        assert_eq!(cwd(here), "<S>/job\n");
        let gone = "mkdir gone; cd gone; rmdir ../gone; exec \"$@\"";
        let gone = after(run_sh(&machine, options, line), gone);
        assert_eq!(cwd(gone), "<S>/gone (deleted)\n");
    }
}

#[test]
fn it_runs_in_a_directory_that_its_user_cannot_enter() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    for mode in [0o700, 0o711, 0o744] {
        let closed = machine.path("closed");
        let _ = fs::create_dir(&closed);
        set_mode(&closed, mode);
        let call = |call: Call<'_>| {
            let call = call.user(USER).env("HOME", &home).cwd(&closed);
            let done = call.finish();
            (done.code, done.text(), done.stderr)
        };
        let (code, _, said) = call(machine.run(["start", "--name", "a"]));
        assert_eq!((code, said.as_str()), (0, ""));
        for options in BOTH {
            let there = call(run_sh(&machine, options, "readlink /proc/$$/cwd; exit 3"));
            assert_eq!(
                there,
                (3, "<S>/closed\n".to_owned(), String::new()),
                "{mode:o} {options:?}"
            );
        }
        assert_eq!(call(machine.run(["stop"])).0, 0);
    }
}

/// A shell line of the program's, as it runs without us.
fn directly<'s>(machine: &'s Sandbox, line: &str) -> Call<'s> {
    let call = machine.run([""; 0]).under(["/bin/sh", "-c", line]);
    call.env("PATH", "/usr/bin:/bin")
}

#[test]
fn every_descriptor_of_the_caller_reaches_it_and_no_other() {
    let machine = machine();
    fs::write(machine.path("seven"), "seven\n").unwrap();
    let caller = "exec 7<seven 9>nine; echo zero | \"$@\"";
    let line = "cat; cat <&7; echo nine >&9; echo error >&2; cd /proc/$$/fd; echo *; exit 3";
    let direct = after(directly(&machine, line), caller)
        .finish()
        .exited(3)
        .text();
    assert!(direct.starts_with("zero\nseven\n0 1 "), "{direct}");
    for options in BOTH {
        let done = after(run_sh(&machine, options, line), caller).finish();
        done.exited(3).printed(&direct).said("error\n");
        assert_eq!(fs::read(machine.path("nine")).unwrap(), b"nine\n");
    }
}

#[test]
fn signals_are_blocked_and_ignored_as_the_caller_has_it() {
    let machine = machine();
    let caller = [
        "/usr/bin/env",
        "--block-signal=USR1,WINCH",
        "--ignore-signal=HUP,QUIT,USR2",
        "--default-signal=PIPE,INT",
    ];
    // A shell might change them, and grep fails for the file that is not there.
    let program = [
        "grep",
        "-e",
        "SigBlk",
        "-e",
        "SigIgn",
        "-e",
        "SigCgt",
        "/proc/self/status",
        "/nowhere",
    ];
    let direct = machine
        .run([""; 0])
        .under(["/usr/bin/env"].iter().chain(&program));
    let direct = direct.under(caller).env("PATH", "/usr/bin:/bin").finish();
    let direct = direct.exited(2).text();
    assert!(direct.contains("SigBlk:\t0000000008000200\n"), "{direct}");
    for options in BOTH {
        let call = run(&machine, options, program).under(caller);
        call.finish().exited(2).printed(&direct);
    }
}

#[test]
fn a_caller_that_ignores_how_children_end_is_told_so_where_that_matters() {
    let machine = machine();
    let ignoring = |options: &[&str], line| {
        let call = run_sh(&machine, options, line);
        call.under(["/usr/bin/env", "--ignore-signal=CHLD"])
            .finish()
    };
    ignoring(&[], "exit 3").exited(3).said_nothing();
    for option in ["--require-mps", "--gpu=0"] {
        ignoring(&[option], "touch $S/ran")
            .exited(125)
            .said("SIGCHLD is ignored, so that nobody could tell how a program ends");
    }
    assert!(!machine.path("ran").exists());
}

#[test]
fn its_exit_status_and_its_death_are_the_programs_own() {
    let machine = machine();
    for status in [0, 1, 2, 125, 255] {
        let line = format!("exit {status}");
        let done = run_sh(&machine, &[], &line).finish();
        done.exited(status).printed("").said_nothing();
    }
    run_sh(&machine, &[], "kill -KILL $$").finish().exited(-9);
    run_sh(&machine, &["--require-mps"], "exit 255")
        .finish()
        .exited(255)
        .said_nothing();
    run_sh(&machine, &["--require-mps"], "kill -KILL $$")
        .finish()
        .exited(137)
        .said_nothing();
}

// It is found as a shell finds it.

#[test]
fn a_program_is_found_as_a_shell_would_find_it() {
    let machine = machine();
    let script = "#!/bin/sh\nexit 3\n";
    program(&machine, "job/rel/on-relative", script);
    program(&machine, "job/here", script);
    program(&machine, "late/second", script);
    program(&machine, "early/second", script);
    // What is first on PATH and no program is passed over.
    set_mode(machine.path("early/second"), 0o644);
    fs::create_dir(machine.path("early/here")).unwrap();
    let path = format!(
        "rel:{0}/early::{0}/nowhere:{0}/late:{1}:/bin",
        machine.path("").display(),
        machine.bin().display()
    );
    for options in BOTH {
        for name in [
            "on-relative",
            "here",
            "./here",
            "rel/on-relative",
            "../job/here",
            "second",
        ] {
            let call = run(&machine, options, [name]).env("PATH", &path);
            let done = call.cwd(machine.path("job")).finish();
            done.exited(3).said_nothing();
        }
        // Where there is no PATH there is no control program either.
        if options.is_empty() {
            let call = run(&machine, options, ["sh", "-c", "exit 3"]);
            call.unset("PATH").finish().exited(3).said_nothing();
        }
    }
}

#[test]
fn a_script_without_a_first_line_is_run_by_sh() {
    let machine = machine();
    let script = program(&machine, "job/script", "echo \"$0|$1|$2\"\nexit 3\n");
    for options in BOTH {
        let absolute = run(
            &machine,
            options,
            [script.as_os_str(), OsStr::new("a b"), OsStr::new("")],
        );
        absolute.finish().exited(3).printed("<S>/job/script|a b|\n");
        let path = format!(
            "{}:{}:/bin",
            machine.path("job").display(),
            machine.bin().display()
        );
        let found = run(&machine, options, ["script", "x"]).env("PATH", path);
        found.finish().exited(3).printed("<S>/job/script|x|\n");
    }
}

#[test]
fn a_program_that_is_not_for_this_user_is_passed_over() {
    if without_root() {
        return;
    }
    let machine = Sandbox::new();
    let home = home_of(&machine, USER);
    let call = |call: Call<'_>| call.user(USER).env("HOME", &home).finish().code;
    assert_eq!(call(machine.run(["start", "--name", "a"])), 0);
    program(&machine, "roots/prog", "#!/bin/sh\nexit 9\n");
    program(&machine, "closed/prog", "#!/bin/sh\nexit 9\n");
    program(&machine, "all/prog", "#!/bin/sh\nexit 3\n");
    set_mode(machine.path("roots/prog"), 0o700);
    set_mode(machine.path("closed"), 0o700);
    let path = |last: &str| {
        let [sandbox, bin] =
            [machine.path(""), machine.bin()].map(|path| path.display().to_string());
        format!("{sandbox}roots:{sandbox}closed:{sandbox}{last}:{bin}")
    };
    for options in BOTH {
        let prog = |last| call(run(&machine, options, ["prog"]).env("PATH", path(last)));
        assert_eq!(prog("all"), 3, "{options:?}");
        assert_eq!(prog("none"), 126, "{options:?}");
    }
}

// Its limits.

#[test]
fn limits_become_the_variables_that_cuda_reads() {
    let machine = machine();
    let line = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT $CUDA_MPS_CLIENT_PRIORITY; exit 3";
    for options in BOTH {
        let limited = |limits: &[&str]| {
            let call = run_sh(&machine, &[options, limits].concat(), line)
                .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "ambient-threads")
                .env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "ambient-memory")
                .env("CUDA_MPS_CLIENT_PRIORITY", "ambient-priority");
            call.finish().exited(3).said_nothing().text()
        };
        assert_eq!(
            limited(&["--threads", "12.50", "--memory=10GiB", "--priority", "low"]),
            "12.5 0=10240M 1\n"
        );
        assert_eq!(
            limited(&["--threads=100"]),
            "100 ambient-memory ambient-priority\n"
        );
        assert_eq!(
            limited(&["--memory", "512m"]),
            "ambient-threads 0=512M ambient-priority\n"
        );
        assert_eq!(
            limited(&["--priority=normal"]),
            "ambient-threads ambient-memory 0\n"
        );
    }
}

#[test]
fn wrong_limits_are_refused_with_what_is_accepted_and_nothing_is_run() {
    let machine = machine();
    for (option, wrong, accepted) in [
        ("--threads", "0", "from 1 to 100"),
        ("--threads", "101", "from 1 to 100"),
        ("--threads", "30%", "from 1 to 100"),
        ("--threads", "-5", "from 1 to 100"),
        ("--threads", "", "from 1 to 100"),
        ("--memory", "1.5G", "G, GB or GiB"),
        ("--memory", "1T", "M, MB or MiB"),
        ("--memory", "0G", "M, MB or MiB"),
        ("--memory", "1024", "M, MB or MiB"),
        ("--memory", "9999999G", "more than 1048576 GiB"),
        ("--priority", "high", "normal, low"),
        ("--require-mps", "0", "1..=86400"),
        ("--require-mps", "86401", "1..=86400"),
        ("--require-mps", "1.5", "invalid digit"),
        ("--require-mps", "", "cannot parse integer"),
    ] {
        let option = format!("{option}={wrong}");
        run_sh(&machine, &[&option], "touch $S/ran")
            .breaks_usage()
            .said(accepted);
    }
    for options in [
        &["--name", "a", "--gpu", "0"][..],
        &["--name", "a", "--by-rank"],
        &["--gpu", "0", "--by-rank"],
        &["--by-rank", "--start"],
    ] {
        run_sh(&machine, options, "touch $S/ran").breaks_usage();
    }
    machine.run(["run"]).breaks_usage();
    machine.run(["run", "--name", "a", "--"]).breaks_usage();
    assert!(!machine.path("ran").exists());
    assert_eq!(machine.calls(), "");
}

// What cannot be run.

#[test]
fn what_is_not_there_gives_127_and_what_cannot_be_executed_126() {
    let machine = machine();
    program(&machine, "job/lost", "#!/nowhere/python\n");
    fs::copy("/bin/true", machine.path("job/busy")).unwrap();
    fs::write(machine.path("job/plain"), "text").unwrap();
    // A file of that name in the working directory is not the one that PATH would find.
    fs::write(machine.path("job/elsewhere"), "text").unwrap();
    let path = format!(
        "{}:{}:/bin:/usr/bin",
        machine.path("job/on-path").display(),
        machine.bin().display()
    );
    program(&machine, "job/on-path/lost-on-path", "#!/nowhere/python\n");
    for options in BOTH {
        let call = |name: &str| {
            let call = run(&machine, options, [name, "x"]).env("PATH", &path);
            after(
                call.cwd(machine.path("job")),
                "exec 9>>busy; exec \"$@\" 9>&9",
            )
        };
        for (name, code, cause) in [
            ("elsewhere", 127, "No such file or directory"),
            ("./nowhere", 127, "No such file or directory"),
            ("/no/where", 127, "No such file or directory"),
            ("", 127, "No such file or directory"),
            ("./lost", 127, "interpreter"),
            ("lost-on-path", 127, "interpreter"),
            ("/", 126, "Permission denied"),
            (".", 126, "Permission denied"),
            ("./plain", 126, "Permission denied"),
            ("./busy", 126, "Text file busy"),
            ("./plain/x", 126, "Not a directory"),
        ] {
            let done = call(name).finish().exited(code).printed("");
            let sentence = format!("error: cannot execute {name:?}\ncause: ");
            let done = done.said(&sentence).said(cause).said("\nhint: ");
            assert_eq!(done.stderr.lines().count(), 3, "{done:?}");
            assert_eq!(
                done.stderr.contains("interpreter"),
                cause == "interpreter",
                "{done:?}"
            );
        }
    }
}

// Which daemon.

#[test]
fn without_a_live_daemon_nothing_runs() {
    let machine = Sandbox::new();
    let sh = |options: &[&str]| run_sh(&machine, options, "touch $S/ran");
    refuses(
        sh(&[]),
        "error: no recorded daemon is live\nhint: uni-cumps start\n",
    );
    refuses(sh(&["--name", "a"]), "no daemon named a is recorded");
    refuses(sh(&["--name", "A"]), "\"A\" is not a daemon name");
    refuses(
        sh(&["--gpu", U0]),
        "no live daemon of yours serves GPU GPU-U0\nhint: uni-cumps start --gpus GPU-U0",
    );
    refuses(
        sh(&["--by-rank"]).env("LOCAL_RANK", "0"),
        "no recorded daemon is live",
    );
    let record = machine.start(&["--name", "a"]);
    machine.kill(pid(&record));
    refuses(
        sh(&["--name", "a"]),
        "daemon a is no longer running; its record is stale",
    );
    refuses(sh(&[]), "no recorded daemon is live");
    refuses(sh(&["--gpu", "0"]), "no live daemon of yours serves GPU 0");
    assert!(!machine.path("ran").exists());
}

#[test]
fn several_live_daemons_are_told_apart_by_name_gpu_or_rank() {
    let machine = Sandbox::with_gpus(3);
    machine.start(&["--name", "a", "--gpus", "0"]);
    machine.start(&["--name", "b", "--gpus", "1"]);
    machine.calls();
    let sh = |options: &[&str]| run_sh(&machine, options, "echo $CUDA_VISIBLE_DEVICES");
    refuses(sh(&[]), "several daemons are live: a, b\nhint: --name a\n");
    sh(&["--name", "b"]).prints("GPU-U1\n").said_nothing();
    sh(&["--gpu", U1]).prints("GPU-U1\n").said_nothing();
    sh(&["--gpu", &U1.to_uppercase().replace("GPU-", "gpu-")]).prints("GPU-U1\n");
    for (rank, printed) in [("0", "GPU-U0\n"), ("1", "GPU-U1\n"), ("3", "GPU-U1\n")] {
        let call = sh(&["--by-rank"]).env("LOCAL_RANK", rank);
        call.env("LOCAL_WORLD_SIZE", "4").prints(printed);
    }
    refuses(
        sh(&["--by-rank"]),
        "no launcher has told this process its rank on the node",
    );
    assert_eq!(machine.calls(), "", "no program is called");
    // An index is nvidia-smi's, whatever is visible.
    sh(&["--gpu", "1"])
        .env("CUDA_VISIBLE_DEVICES", U0)
        .prints("GPU-U1\n")
        .said("note: CUDA_VISIBLE_DEVICES=\"GPU-U0\" of your environment names no GPU of daemon b, and is replaced\n");
    assert_eq!(
        machine.calls(),
        "nvidia-smi --query-gpu=index,uuid,compute_mode,mig.mode.current --format=csv,noheader\n"
    );
    refuses(sh(&["--gpu", "2"]), "no live daemon of yours serves GPU 2");
    refuses(sh(&["--gpu", "7"]), "matches no GPU of this machine");
    refuses(
        sh(&["--gpu", "0,1"]),
        "no live daemon of yours serves GPU 0,1",
    );
    refuses(sh(&["--gpu", "first"]), "hint: --gpus 0, or");
    sh(&["--gpus", "0"]).prints("GPU-U0\n");
}

#[test]
fn two_daemons_of_one_gpu_are_not_chosen_between() {
    let machine = machine();
    machine.start(&["--name", "b", "--force"]);
    refuses(
        run_sh(&machine, &["--gpu", U0], "touch $S/ran"),
        "several daemons are live: a, b",
    );
    assert!(!machine.path("ran").exists());
}

#[test]
fn a_daemon_that_programs_would_not_find_is_refused() {
    let machine = machine();
    fs::remove_file(machine.runtime().join("a/pipe/control")).unwrap();
    for options in [&[][..], &["--name", "a"], &["--gpu", U0], &["--start"]] {
        refuses(
            run_sh(&machine, options, "touch $S/ran"),
            "is alive, but its control socket is not reachable",
        )
        .said("hint: uni-cumps stop --name a");
    }
    assert_eq!(machine.daemons().len(), 1);
    assert!(!machine.path("ran").exists());
}

#[test]
fn a_stopped_daemon_is_noted_and_the_program_waits_for_it_itself() {
    let machine = Sandbox::new();
    let daemon = pid(&machine.start(&["--name", "a"]));
    freeze(daemon);
    run_sh(&machine, &["--start"], "echo ran")
        .prints("ran\n")
        .said(&format!("note: daemon a is stopped and does not answer; programs wait for it: kill -CONT {daemon}"));
}

#[test]
fn another_users_daemon_is_refused() {
    let machine = Sandbox::new();
    let mut record = machine.reference_record("a", 1);
    record["uid"] = 12345.into();
    machine.write_record("a", &record);
    refuses(
        run_sh(&machine, &["--name", "a"], "touch $S/ran"),
        "daemon a belongs to uid 12345",
    );
    refuses(
        run_sh(&machine, &["--name", "a", "--start"], "touch $S/ran"),
        "daemon a belongs to uid 12345",
    );
    refuses(
        run_sh(&machine, &["--gpu", U0], "touch $S/ran"),
        "no live daemon of yours",
    );
    machine.has_no_daemon();
    assert!(!machine.path("ran").exists());
}

#[test]
fn a_daemon_of_another_pid_namespace_can_be_used_but_not_proven() {
    if without_root() {
        return;
    }
    let machine = machine();
    let elsewhere = ["/usr/bin/unshare", "-pf", "--mount-proc"];
    run_sh(&machine, &[], "echo $CUDA_MPS_PIPE_DIRECTORY")
        .under(elsewhere)
        .prints("<S>/t/uni-cumps/a/pipe\n")
        .said("note: daemon a lives in another container or IPC namespace");
    refuses(
        run_sh(&machine, &["--require-mps"], "touch $S/ran").under(elsewhere),
        "daemon a was started in another pid namespace",
    );
    assert!(!machine.path("ran").exists());
}

// A daemon that is not there yet.

#[test]
fn a_daemon_is_started_exactly_when_none_is_live() {
    let machine = Sandbox::with_gpus(2);
    let sh = |options: &[&str]| {
        run_sh(
            &machine,
            options,
            "echo $CUDA_VISIBLE_DEVICES $CUDA_MPS_PIPE_DIRECTORY",
        )
    };
    refuses(sh(&["--start"]), "2 GPUs are visible");
    sh(&["--start"])
        .env("CUDA_VISIBLE_DEVICES", "0")
        .prints("GPU-U0 <S>/t/uni-cumps/gpu-u0/pipe\n")
        .said("note: started daemon gpu-u0 (pid ")
        .said("); to end it: uni-cumps stop --name gpu-u0\n");
    let [first] = machine.daemons()[..] else {
        panic!("one daemon")
    };
    assert!(machine.record_file(N0).exists());
    for options in [
        &["--start"][..],
        &["--start", "--name", N0],
        &["--start", "--gpu", "0"],
    ] {
        sh(options)
            .prints("GPU-U0 <S>/t/uni-cumps/gpu-u0/pipe\n")
            .said_nothing();
        assert_eq!(machine.daemons(), [first]);
    }
    sh(&["--start", "--gpu", U1, "-q"])
        .prints("GPU-U1 <S>/t/uni-cumps/gpu-u1/pipe\n")
        .said_nothing();
    assert_eq!(machine.daemons().len(), 2);
    machine.run(["stop", "--all"]).succeeds();
    sh(&["--start", "--name", "b", "--gpu", "1"]).breaks_usage();
    sh(&["--start", "--name", "b"])
        .env("CUDA_VISIBLE_DEVICES", "1")
        .prints("GPU-U1 <S>/t/uni-cumps/b/pipe\n");
    // One that has died is replaced.
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(machine.record_file("b")).unwrap()).unwrap();
    machine.kill(pid(&record));
    sh(&["--start", "--name", "b"])
        .env("CUDA_VISIBLE_DEVICES", "1")
        .prints("GPU-U1 <S>/t/uni-cumps/b/pipe\n");
    assert_eq!(machine.daemons().len(), 1);
}

#[test]
fn the_daemon_that_was_named_is_not_replaced_by_another_one_of_its_gpu() {
    let machine = machine();
    refuses(
        run_sh(&machine, &["--start", "--name", "b"], "touch $S/ran"),
        "daemon a (pid ",
    )
    .said(") already serves GPU index 0 (GPU-U0)");
    assert_eq!(machine.daemons().len(), 1);
    assert!(!machine.path("ran").exists());
}

#[test]
fn eight_at_once_make_one_daemon_and_all_run() {
    let machine = Sandbox::new();
    let children: Vec<_> = (0..8)
        .map(|_| run_sh(&machine, &["--start"], "echo $CUDA_MPS_PIPE_DIRECTORY").spawn())
        .collect();
    let expected = format!("{}\n", machine.runtime().join(N0).join("pipe").display());
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    }
    assert_eq!(machine.daemons().len(), 1);
}

#[test]
fn a_start_that_fails_runs_nothing() {
    let machine = Sandbox::new();
    machine.conduct("launch fail An instance of this daemon is already running");
    refuses(
        run_sh(&machine, &["--start"], "touch $S/ran"),
        "nvidia-cuda-mps-control did not start the daemon",
    );
    machine.remove_program("nvidia-smi");
    let call = run_sh(&machine, &["--start"], "touch $S/ran").env("PATH", machine.bin());
    refuses(call, "nvidia-smi");
    assert!(!machine.path("ran").exists());
    machine.has_no_daemon();
}

// Only shown.

/// Everything below the home and the temporary directory.
fn traces(machine: &Sandbox) -> String {
    machine.sh("find h t")
}

#[test]
fn a_dry_run_shows_the_call_and_touches_nothing() {
    let machine = machine();
    let before = traces(&machine);
    run(
        &machine,
        &[
            "--dry-run",
            "--threads=30",
            "--memory=1G",
            "--priority=low",
            "--require-mps=5",
        ],
        ["touch", "a b", "it's", "$HOME", "", "x=y"],
    )
    .prints(
        "CUDA_VISIBLE_DEVICES=GPU-U0 CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe \
         CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=30 \
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M CUDA_MPS_CLIENT_PRIORITY=1 \
         touch 'a b' 'it'\\''s' '$HOME' '' x=y\n",
    )
    .said_nothing();
    assert_eq!(traces(&machine), before);
    assert!(!machine.path("a b").exists());
    assert_eq!(machine.calls(), "");
    refuses(
        run(&machine, &["--dry-run", "--name", "b"], ["true"]),
        "no daemon named b",
    );
}

#[test]
fn pasted_into_a_shell_a_dry_run_does_the_same() {
    let machine = machine();
    let odd = program(
        &machine,
        "job/a=b c",
        "#!/bin/sh\nenv | grep ^CUDA | sort\nprintf '%s|' \"$@\"\n",
    );
    let words = [
        odd.as_os_str(),
        OsStr::new("it's"),
        OsStr::new("*"),
        OsStr::new("a\nb"),
        OsStr::new(""),
    ];
    let limits = ["--threads=30", "--memory=1G"];
    let real = run(&machine, &limits, words).succeeds().stdout;
    let shown = run(&machine, &[&limits[..], &["--dry-run"]].concat(), words)
        .succeeds()
        .stdout;
    let pasted = machine.sh(&String::from_utf8(shown).unwrap());
    assert_eq!(pasted, String::from_utf8(real).unwrap());
}

#[test]
fn a_program_whose_name_looks_like_an_assignment_is_pasted_as_a_program() {
    let machine = machine();
    program(&machine, "job/a=b", "#!/bin/sh\necho ran\n");
    let path = format!("{}:/bin", machine.path("job").display());
    let real = run(&machine, &[], ["a=b"]).env("PATH", &path);
    real.prints("ran\n");
    let shown = run(&machine, &["--dry-run"], ["a=b"]).succeeds().stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert_eq!(machine.sh(&format!("PATH={path}; {shown}")), "ran\n");
    run(&machine, &[], ["A=1", "echo"])
        .finish()
        .exited(127)
        .said("hint: to set a variable: uni-cumps run -- env A=1 …\n");
}

#[test]
fn a_dry_run_with_a_start_shows_both_and_pasted_does_both() {
    let machine = Sandbox::new();
    let line = "env | grep ^CUDA | sort";
    let before = traces(&machine);
    let shown = run_sh(&machine, &["--dry-run", "--start", "--name=a"], line).succeeds();
    shown.said_nothing();
    let shown = run_sh(&machine, &["--dry-run", "--start", "--name=a"], line).succeeds();
    assert_eq!(traces(&machine), before);
    machine.has_no_daemon();
    let text = shown.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5, "{text}");
    assert!(lines[0].starts_with("<S>/bin/nvidia-smi "), "{text}");
    assert!(lines[2].ends_with("/nvidia-cuda-mps-control -d"), "{text}");
    assert!(
        lines[4].starts_with("CUDA_VISIBLE_DEVICES=GPU-U0 CUDA_MPS_PIPE_DIRECTORY="),
        "{text}"
    );
    assert!(
        lines[4].ends_with(" /bin/sh -c 'env | grep ^CUDA | sort'"),
        "{text}"
    );
    let pasted = machine.sh(&String::from_utf8(shown.stdout).unwrap());
    let [daemon] = machine.daemons()[..] else {
        panic!("one daemon")
    };
    machine.kill(daemon);
    let real = run_sh(&machine, &["--start", "--name=a"], line).succeeds();
    let real = String::from_utf8(real.stdout).unwrap();
    assert!(pasted.ends_with(&real), "{pasted}\n{real}");
    // A start that is not needed is not shown.
    let shown = run_sh(&machine, &["--dry-run", "--start"], line)
        .succeeds()
        .text();
    assert_eq!(shown.lines().count(), 1, "{shown}");
}

// What is told.

#[test]
fn notes_go_to_standard_error_and_can_be_left_out() {
    let machine = machine();
    let masked =
        |options: &[&str]| run_sh(&machine, options, "echo ran").env("CUDA_VISIBLE_DEVICES", U1);
    let done = masked(&[]).prints("ran\n");
    assert_eq!(
        machine.normal(&done.stderr),
        "note: CUDA_VISIBLE_DEVICES=\"GPU-U1\" of your environment names no GPU of daemon a, and is replaced\n"
    );
    masked(&["-q"]).prints("ran\n").said_nothing();
}

#[test]
fn the_trace_is_told_before_the_program_takes_our_place() {
    let machine = machine();
    let done = run_sh(&machine, &["-v", "--gpu", "0"], "echo told >&2").prints("");
    let said = machine.normal(&done.stderr);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3, "{said}");
    assert!(
        lines[0].contains(" ms, exit 0: <S>/bin/nvidia-smi "),
        "{said}"
    );
    assert_eq!(
        lines[1],
        "trace: takes our place: CUDA_VISIBLE_DEVICES=GPU-U0 \
         CUDA_MPS_PIPE_DIRECTORY=<S>/t/uni-cumps/a/pipe CUDA_MPS_LOG_DIRECTORY=<S>/t/uni-cumps/a/log \
         /bin/sh -c 'echo told >&2'"
    );
    assert_eq!(lines[2], "told");
}
