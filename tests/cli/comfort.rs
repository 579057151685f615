//! `completions` and `man`: what helps while one types, tried in the shells themselves.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use crate::support::{Sandbox, uni_cumps};

const SHELLS: [&str; 5] = ["bash", "zsh", "fish", "elvish", "powershell"];

/// A machine that finds the program on its PATH.
fn machine() -> Sandbox {
    let machine = Sandbox::new();
    symlink(uni_cumps(), machine.bin().join("uni-cumps")).unwrap();
    machine
}

/// The same with two daemons recorded, of which none runs.
fn machine_with_daemons() -> Sandbox {
    let machine = machine();
    for name in ["learner", "collector"] {
        machine.write_record(name, &machine.reference_record(name, 1));
    }
    machine
}

/// Where a program is. One that is missing is named, past the capture of the test's output.
fn installed(program: &str) -> Option<String> {
    let places = ["/bin", "/usr/bin", "/usr/local/bin"].map(|bin| format!("{bin}/{program}"));
    let found = places.into_iter().find(|path| Path::new(path).exists());
    if found.is_none() {
        let note = format!("{program} is not installed: what it would show is not tried\n");
        std::io::stderr().write_all(note.as_bytes()).unwrap();
    }
    found
}

/// The lines that a shell prints which runs `script`.
fn in_a_shell(machine: &Sandbox, shell: &[&str], script: &str) -> Vec<String> {
    let path = format!("{}:/usr/bin:/bin", machine.bin().display());
    let done = machine
        .run([""; 0])
        .under(shell.iter().chain(&[script]))
        .env("PATH", path)
        .env("S", machine.path(""))
        .succeeds()
        .said_nothing();
    done.text().lines().map(str::to_owned).collect()
}

/// The candidates for the last of these words, asked as the script for fish asks.
fn candidates(machine: &Sandbox, words: &[&str]) -> Vec<String> {
    let answer = machine
        .run(["--", "uni-cumps"].iter().chain(words))
        .env("UNI_CUMPS_COMPLETE", "fish")
        .succeeds()
        .said_nothing();
    let text = answer.text();
    text.lines()
        .map(|line| line.split('\t').next().unwrap().to_owned())
        .collect()
}

/// The commands that the help shows.
fn shown_commands(machine: &Sandbox) -> Vec<String> {
    shown_below(machine, &[])
}

/// The verbs that the help of a command lists; nothing where it has none.
fn shown_below(machine: &Sandbox, command: &[&str]) -> Vec<String> {
    let help = machine.run(command).and("--help").succeeds().text();
    let (_, commands) = help.split_once("\nCommands:\n").unwrap_or_default();
    let commands = commands.lines().take_while(|line| !line.is_empty());
    commands
        .map(|line| line.split_whitespace().next().unwrap().to_owned())
        .collect()
}

#[test]
fn each_shell_gets_a_script_that_asks_us_by_a_variable_of_our_own() {
    let machine = machine();
    for shell in SHELLS {
        let script = machine
            .run(["completions", shell])
            .succeeds()
            .said_nothing();
        let script = script.text();
        assert!(script.contains("UNI_CUMPS_COMPLETE"), "{script}");
        assert!(
            script.contains("uni-cumps -- ") || shell == "bash",
            "{script}"
        );
        assert!(!script.contains("<S>"), "{script}");
        assert_eq!(script, format!("{}\n", script.trim()));
    }
    machine
        .run(["completions", "tcsh"])
        .breaks_usage()
        .said("bash, zsh, fish, elvish, powershell");
    machine.run(["completions"]).breaks_usage();
    assert_eq!(machine.calls(), "");
    assert!(!machine.records().exists());
}

#[test]
fn commands_flags_values_and_paths_complete() {
    let machine = machine_with_daemons();
    machine.sh("mkdir -p runs/old; touch runs/a.json");
    let all = candidates(&machine, &[""]);
    let (flags, commands): (Vec<_>, Vec<_>) = all.into_iter().partition(|it| it.starts_with('-'));
    assert_eq!(commands, shown_commands(&machine));
    let everywhere = ["--verbose", "--quiet", "--color", "--help", "--version"];
    assert_eq!(flags, everywhere);
    for (words, expected) in [
        (&["sto"][..], &["stop"][..]),
        (&["stop", "--t"], &["--timeout"]),
        (&["stop", "--name", ""], &["collector", "learner"]),
        (&["start", "--name", "l"], &["learner"]),
        (&["env", "--name=c"], &["--name=collector"]),
        (&["--color", "a"], &["auto", "always"]),
        (&["env", "--shell", "p"], &["posix", "powershell"]),
        (&["doctor", "--only", "ma"], &["mask"]),
        (&["completions", "f"], &["fish"]),
        (&["start", "--pipe-dir", "r"], &["runs/"]),
        (&["doctor", "--capture", "runs/"], &["runs/old/"]),
        (
            &["validate", "--manifest", "runs/"],
            &["runs/a.json", "runs/old/"],
        ),
        (&["wait", "--for", "i"], &["idle"]),
        (&["start", "--gpus", ""], &[]),
        (&["stop", "--name", "nobody"], &[]),
    ] {
        assert_eq!(candidates(&machine, words), expected, "{words:?}");
    }
}

#[test]
fn what_is_hidden_is_never_offered() {
    let machine = machine();
    for words in [&["look"][..], &["look-at-cuda-driver"], &["help", "look"]] {
        assert_eq!(candidates(&machine, words), [""; 0], "{words:?}");
    }
    let inside = candidates(&machine, &["look-at-cuda-driver", "--t"]);
    assert_eq!(inside, [""; 0]);
}

#[test]
fn every_name_in_the_store_is_offered() {
    let machine = machine_with_daemons();
    machine.sh(
        "mkdir \"$REC/damaged\" \"$REC/starting\" \"$REC/empty\" \"$REC/Not-A-Name\" \"$REC/.stale\"
         echo '{' > \"$REC/damaged/daemon.json\"
         cp \"$REC/learner/daemon.json\" \"$REC/starting/starting.json\"",
    );
    let names = candidates(&machine, &["stop", "--name", ""]);
    assert_eq!(names, ["collector", "damaged", "learner", "starting"]);
}

#[test]
fn without_records_or_a_home_there_are_no_candidates_and_no_complaint() {
    let machine = machine();
    machine.sh("touch file; mkdir -p closed/.cache/unilab/cuda-mps; echo > h/.cache");
    for home in ["h", "file", "missing", "closed"] {
        let home = machine.path(home);
        for shell in SHELLS {
            machine
                .run(["--", "uni-cumps", "stop", "--name", ""])
                .env("UNI_CUMPS_COMPLETE", shell)
                .env("_CLAP_COMPLETE_INDEX", "3")
                .env("HOME", &home)
                .prints("")
                .said_nothing();
        }
    }
    machine
        .run(["--", "uni-cumps", "stop", "--name", ""])
        .env("UNI_CUMPS_COMPLETE", "fish")
        .env("HOME", "not/absolute")
        .prints("")
        .said_nothing();
    // Not a question that a script of ours would ask, and no reason to complain either.
    machine
        .run(["--", "uni-cumps"])
        .env("UNI_CUMPS_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", "9")
        .prints("")
        .said_nothing();
}

#[test]
fn an_answer_changes_nothing_and_calls_nobody() {
    let machine = machine_with_daemons();
    let tree = "find . -printf '%p %y %m %s %T@ %C@\\n' | sort";
    let before = machine.sh(tree);
    for words in [
        &[""][..],
        &["stop", "--name", ""],
        &["start", "--gpus", ""],
        &["doctor", "--only", ""],
        &["start", "--pipe-dir", "t/"],
    ] {
        candidates(&machine, words);
    }
    assert_eq!(machine.sh(tree), before);
    assert_eq!(machine.calls(), "");
    let fresh = Sandbox::new();
    candidates(&fresh, &["stop", "--name", ""]);
    assert!(!fresh.path("h/.cache").exists());
}

#[test]
fn a_variable_that_somebody_has_exported_keeps_no_command_from_its_work() {
    let machine = machine_with_daemons();
    let exported = |args: &[&str]| machine.run(args).env("UNI_CUMPS_COMPLETE", "bash");
    exported(&["visibility", "GPU-x"]).prints("GPU-x\n");
    exported(&["frobnicate"]).breaks_usage();
    machine
        .run(["--", "status"])
        .env("UNI_CUMPS_COMPLETE", "nosh")
        .breaks_usage();
}

#[test]
fn bash_completes() {
    let Some(bash) = installed("bash") else {
        return;
    };
    let machine = machine_with_daemons();
    // What bash does at the press of Tab, the words as it splits them.
    let script = r#"
        source <(uni-cumps completions bash)
        [[ $(complete -p uni-cumps) =~ -F\ ([a-z_]+) ]]
        tab() {
            local IFS=' ' word
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_TYPE=9
            COMP_POINT=${#COMP_LINE} COMPREPLY=()
            word=${COMP_WORDS[COMP_CWORD]}
            "${BASH_REMATCH[1]}" uni-cumps "${word#=}" "${COMP_WORDS[COMP_CWORD - 1]}"
            echo "${COMPREPLY[*]}"
        }
        tab uni-cumps st
        tab uni-cumps look
        tab uni-cumps stop --name ''
        tab uni-cumps stop --name l
        tab uni-cumps stop --name =
        tab uni-cumps stop --name = l
        tab uni-cumps stop --timeout = 5 --name = c
        tab uni-cumps --color = al
        tab uni-cumps start --name = x --pipe-dir b
    "#;
    let expected = [
        "status start stop",
        "",
        "collector learner",
        "learner",
        "collector learner",
        "learner",
        "collector",
        "always",
        "bin/",
    ];
    let shell = [bash.as_str(), "--norc", "-c"];
    assert_eq!(in_a_shell(&machine, &shell, script), expected);
    assert_eq!(machine.calls(), "");
}

#[test]
fn fish_completes() {
    let Some(fish) = installed("fish") else {
        return;
    };
    let machine = machine_with_daemons();
    let script = "
        uni-cumps completions fish | source
        complete -C 'uni-cumps stop --name '
        complete -C 'uni-cumps env --name=l'
        complete -C 'uni-cumps look'
        complete -C 'uni-cumps sta'
    ";
    let shell = [fish.as_str(), "-c"];
    let lines = in_a_shell(&machine, &shell, script);
    let expected = [
        "collector",
        "learner",
        "--name=learner",
        "status\tShow the machine's GPUs and the recorded daemons; changes nothing",
        "start\tStart a control daemon of your own and record it",
    ];
    assert_eq!(lines, expected);
    assert_eq!(machine.calls(), "");
}

#[test]
fn zsh_completes() {
    let Some(zsh) = installed("zsh") else {
        return;
    };
    let machine = machine_with_daemons();
    let shell = [zsh.as_str(), "-f", "-c"];
    in_a_shell(&machine, &shell, "uni-cumps completions zsh | zsh -n");
    // A zsh on a terminal of its own, where Tab is pressed and then a key that shows the line as it is now.
    let script = r#"
        setup='PS1= RPS1=; autoload -U compinit; compinit -D -u
            source <(uni-cumps completions zsh)
            show() { print -r -- "$BUFFER" >> $S/lines; BUFFER= }; zle -N show; bindkey "^T" show
            print REA""DY'
        zmodload zsh/zpty zsh/zselect
        zpty typist zsh -f -i
        zpty -w typist $setup
        zpty -r typist seen '*READY*'
        typed=('stop --name l' 'look' 'val' 'start --pipe-dir b' '--color=al')
        for line in $typed; zpty -w -n typist "uni-cumps $line"$'\t\C-t'
        until (( SECONDS > 30 )) || [[ -f $S/lines && $(wc -l < $S/lines) -ge $#typed ]]; do
            zpty -r -t typist seen || zselect -t 1
        done
        zpty -d typist
        print -r -- "$(<$S/lines)"
    "#;
    let expected = [
        "uni-cumps stop --name learner ",
        "uni-cumps look",
        "uni-cumps validate ",
        "uni-cumps start --pipe-dir bin/",
        "uni-cumps --color=always ",
    ];
    assert_eq!(in_a_shell(&machine, &shell, script), expected);
    assert_eq!(machine.calls(), "");
}

#[test]
fn elvish_completes() {
    let Some(elvish) = installed("elvish") else {
        return;
    };
    let machine = machine_with_daemons();
    // The editor's names are there only on a terminal, so the script gets names of ours.
    let script = "
        var complete = [&]
        var editor = (ns [&edit:=(ns [&completion:=(ns [&arg-completer=[&]])])])
        var keep = {|after| set complete = $after[edit:][completion:][arg-completer][uni-cumps] }
        eval &ns=$editor &on-end=$keep (uni-cumps completions elvish | slurp)
        $complete uni-cumps stop --name ''
        $complete uni-cumps look
        $complete uni-cumps st
    ";
    let shell = [elvish.as_str(), "-norc", "-c"];
    let lines = in_a_shell(&machine, &shell, script);
    assert_eq!(lines, ["collector", "learner", "status", "start", "stop"]);
    assert_eq!(machine.calls(), "");
}

/// The manual page as it is printed, its hyphens as they are typed.
fn page(machine: &Sandbox) -> String {
    let page = machine.run(["man"]).succeeds().said_nothing().text();
    page.replace("\\-", "-")
}

#[test]
fn the_manual_page_has_the_sections_that_one_looks_for() {
    let page = page(&machine());
    let sections: Vec<&str> = page
        .lines()
        .filter_map(|it| it.strip_prefix(".SH "))
        .collect();
    let expected = [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "COMMANDS",
        "EXIT STATUS",
        "FILES",
        "ENVIRONMENT",
    ];
    assert_eq!(sections, expected);
    assert!(page.contains("\nuni-cumps - Share an NVIDIA GPU"), "{page}");
}

#[test]
fn the_manual_page_has_every_command_with_its_flags_and_none_that_is_hidden() {
    let machine = machine();
    let page = page(&machine);
    assert!(!page.contains("look-at") && !page.contains("through-daemon"));
    let (options, commands) = page.split_once("\n.SH COMMANDS\n").unwrap();
    let titles: Vec<&str> = commands
        .lines()
        .filter_map(|it| it.strip_prefix(".SS "))
        .collect();
    let mut shown = Vec::new();
    let mut all = shown_commands(&machine);
    all.retain(|command| command != "help");
    for command in all {
        let verbs = shown_below(&machine, &[&command]);
        let verbs = verbs.into_iter().map(|verb| format!("{command} {verb}"));
        shown.extend(std::iter::once(command.clone()).chain(verbs));
    }
    shown.retain(|command| !command.ends_with(" help"));
    assert_eq!(titles, shown);
    let section_of = |command: &str| {
        let (_, section) = commands.split_once(&format!(".SS {command}\n")).unwrap();
        section.split("\n.S").next().unwrap()
    };
    for command in shown {
        // What every verb takes stands in the section of its command.
        let section = match command.split_once(' ') {
            Some((above, _)) => section_of(above).to_owned() + section_of(&command),
            None => section_of(&command).to_owned(),
        };
        let words = command.split(' ').chain(["--help"]);
        let help = machine.run(words).succeeds().text();
        let (_, flags) = help.split_once("\nOptions:\n").unwrap();
        for line in flags
            .lines()
            .map(str::trim)
            .filter(|it| it.starts_with('-'))
        {
            let mut words = line.split([' ', ',', '[']);
            let Some(flag) = words.find(|word| word.starts_with("--")) else {
                continue;
            };
            let described = format!("\\fB{flag}\\fR");
            let is_there = section.contains(&described) || options.contains(&described);
            assert!(is_there, "{command} {flag}: {section}");
        }
    }
}

#[test]
fn groff_has_nothing_to_say_against_the_manual_page() {
    let Some(groff) = installed("groff") else {
        return;
    };
    let machine = machine();
    let typeset = |options: &str| {
        let line = format!("uni-cumps man | {groff} -man -ww {options}");
        in_a_shell(&machine, &["/bin/sh", "-c"], &line).join("\n")
    };
    assert_eq!(typeset("-z"), "");
    let read = typeset("-Tascii -P-cbou");
    for line in [
        "       uni-cumps start [--gpus <GPUS>] [--topology <TOPOLOGY>]",
        "       -v, --verbose\n",
        "       $TMPDIR/uni-cumps/<name>/{pipe,log}\n",
        "Typical use:  uni-cumps start; eval \"$(uni-cumps env)\"; ",
    ] {
        assert!(read.contains(line), "{line:?} in {read}");
    }
    assert!(!read.contains('\\'), "{read}");
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    let machine = machine();
    for args in [
        &["man"][..],
        &["completions", "zsh"],
        &["--", "uni-cumps", ""],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let call = machine.run(args).env("UNI_CUMPS_COMPLETE", "fish");
        let child = call.command().stdout(writer).stderr(Stdio::piped()).spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    }
}
