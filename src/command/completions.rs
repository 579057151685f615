//! `completions`: the script with which a shell completes the command line, and the answer to what that script asks at
//! each press of a key. The answer calls no program, takes no lock, creates nothing and complains of nothing.

use std::ffi::OsString;

use clap::ValueEnum;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Zsh};

use crate::cli::{COMPLETE, Cli, CompletionShell, CompletionsArgs, PROGRAM};
use crate::error::Error;
use crate::host::Host;
use crate::store::{Ledger, Store};
use crate::ui::Ui;

pub(super) fn run(ui: &mut Ui<'_>, args: &CompletionsArgs) -> Result<u8, Error> {
    let mut script = Vec::new();
    // Memory takes everything. The program is looked for on PATH, so that the script outlives an update.
    let _ =
        adapter(args.shell).write_registration(COMPLETE, PROGRAM, PROGRAM, PROGRAM, &mut script);
    ui.verbatim(&format!("{}\n", String::from_utf8_lossy(&script).trim()));
    Ok(0)
}

fn adapter(shell: CompletionShell) -> &'static dyn EnvCompleter {
    match shell {
        CompletionShell::Bash => &Bash,
        CompletionShell::Zsh => &Zsh,
        CompletionShell::Fish => &Fish,
        CompletionShell::Elvish => &Elvish,
        CompletionShell::Powershell => &Powershell,
    }
}

/// A command line that a shell wants completed.
pub struct Question {
    shell: CompletionShell,
    words: Vec<OsString>,
}

/// The question of a script of ours, if this call is one: `UNI_CUMPS_COMPLETE=fish uni-cumps -- uni-cumps stop ''`. The
/// variable alone makes none, so that an ordinary command is done even where somebody has exported it.
pub fn question(host: &Host, args: &[OsString]) -> Option<Question> {
    let name = host.env.get_filled(COMPLETE)?.to_str()?;
    let shell = CompletionShell::from_str(name, false).ok()?;
    match args {
        [_, separator, words @ ..] if separator == "--" && !words.is_empty() => Some(Question {
            shell,
            words: words.to_vec(),
        }),
        _ => None,
    }
}

/// Prints the candidates for the word that is being typed, or nothing.
pub fn answer(host: &Host, ui: &mut Ui<'_>, mut question: Question) {
    if question.shell == CompletionShell::Bash {
        separate_values(&mut question.words);
    }
    let mut candidates = Vec::new();
    let completed = adapter(question.shell).write_complete(
        &mut command_line(&names(host), &suspended(host)),
        question.words,
        Some(&host.cwd),
        &mut candidates,
    );
    if completed.is_ok() {
        ui.verbatim(&String::from_utf8_lossy(&candidates));
    }
}

/// bash takes `--name=a` for three words. The value must follow the flag, and the words must stay as many as bash has
/// counted: a flag that changes nothing takes the place of the `=`.
fn separate_values(words: &mut [OsString]) {
    for at in 1..words.len() {
        if words[at] == "=" && words[at - 1].as_encoded_bytes().starts_with(b"--") {
            words.swap(at - 1, at);
            words[at - 1] = OsString::from("--quiet");
        }
    }
}

/// The command line as it is completed, `--name` with these names, and `--pid` of `checkpoint` with these processes.
fn command_line(names: &[String], pids: &[String]) -> clap::Command {
    let all = Cli::whole();
    // The engine offers what is hidden where nothing else fits, so it must not be there at all. What clap adds by itself it
    // adds once more.
    let is_ours = |name: &str| name != "help" && name != "version";
    let shown = all
        .get_subcommands()
        .filter(|it| !it.is_hide_set() && is_ours(it.get_name()));
    clap::Command::new(PROGRAM)
        .version(env!("CARGO_PKG_VERSION"))
        .args(
            all.get_arguments()
                .filter(|arg| is_ours(arg.get_id().as_str())),
        )
        .subcommands(shown)
        .mut_subcommands(|command| {
            command
                .mut_args(|arg| completed(arg, names, &[]))
                .mut_subcommands(|verb| verb.mut_args(|arg| completed(arg, names, pids)))
        })
}

fn completed(arg: clap::Arg, names: &[String], pids: &[String]) -> clap::Arg {
    // Where a value may begin with a hyphen, the engine panics at `visibility --color -1 `.
    let arg = arg.allow_hyphen_values(false);
    let candidates = match arg.get_id().as_str() {
        "name" => names.to_vec(),
        "condition" => ["ready", "attached=1", "idle", "gone"]
            .map(str::to_owned)
            .to_vec(),
        "pid" | "pids" if !pids.is_empty() => pids.to_vec(),
        _ => return arg,
    };
    arg.add(ArgValueCandidates::new(move || {
        candidates.iter().map(CompletionCandidate::new).collect()
    }))
}

/// The suspended processes. Where they cannot be listed there are none.
fn suspended(host: &Host) -> Vec<String> {
    let entries = Ledger::of(host).map(|ledger| ledger.list());
    let entries = entries.unwrap_or_default();
    entries
        .iter()
        .map(|entry| entry.process.pid.to_string())
        .collect()
}

/// The recorded daemons. Where they cannot be listed there are none.
fn names(host: &Host) -> Vec<String> {
    let entries = Store::of(host).and_then(|store| store.list());
    let entries = entries.unwrap_or_default();
    entries
        .iter()
        .map(|entry| entry.name().to_string())
        .collect()
}
