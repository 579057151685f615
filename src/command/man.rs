//! `man`: the manual page, from the same types as the command line and its help. What no option says is written here.

use std::io::{self, Write};

use clap::{Arg, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::cli::{Cli, PROGRAM};
use crate::error::Error;
use crate::ui::Ui;

/// A narrow page is easier to read without gaps and broken words.
const LEFT: &str = ".ad l\n.nh\n";

/// The sections that are lists of terms.
const LISTS: [(&str, &[(&str, &str)]); 3] = [
    (
        "EXIT STATUS",
        &[
            ("0", "Done, or already so."),
            ("1", "Failed, or doctor or validate found a problem."),
            ("2", "The command line was not understood."),
            (
                "125, 126, 127",
                "run: uni-cumps failed; the program cannot be executed; it was not found. Any other status is the program's.",
            ),
            (
                "128+n",
                "Signal n interrupted the command, or ended the daemon of start --foreground.",
            ),
        ],
    ),
    (
        "FILES",
        &[
            (
                "~/.cache/unilab/cuda-mps/<name>/daemon.json",
                "The record of a daemon. A starting.json beside it tells of a start that has not finished.",
            ),
            (
                "~/.cache/unilab/cuda-mps/.suspended/",
                "What checkpoint remembers of the processes that it has taken off their GPUs.",
            ),
            (
                "~/.cache/unilab/cuda-mps/.stale/",
                "The last eight records that were replaced.",
            ),
            (
                "/run/uni-cumps/",
                "What the hooks of a Slurm cluster's node know of its jobs and their daemons. It is root's.",
            ),
            (
                "$TMPDIR/uni-cumps/<name>/{pipe,log}",
                "The directories of a daemon that was started without --pipe-dir or --log-dir. Its logs stay after stop.",
            ),
        ],
    ),
    (
        "ENVIRONMENT",
        &[
            ("HOME", "Where the records are."),
            (
                "TMPDIR",
                "Where pipe and log directories are made; /tmp if it is not set.",
            ),
            (
                "PATH",
                "Where nvidia-smi and nvidia-cuda-mps-control are found.",
            ),
            (
                "CUDA_VISIBLE_DEVICES",
                "The GPUs that may be meant, read as CUDA reads it; --gpus goes before it.",
            ),
            (
                "NO_COLOR",
                "If it is set to anything, there are no colours unless --color asks for them.",
            ),
        ],
    ),
];

pub(super) fn run(ui: &mut Ui<'_>) -> Result<u8, Error> {
    ui.verbatim(&page());
    Ok(0)
}

fn page() -> String {
    let cli = Cli::whole();
    let commands = verbs(&cli);
    let whole = manual(&cli, None, PROGRAM, " <COMMAND>");
    let mut page = written(|to| whole.render_title(to));
    page += LEFT;
    page += &section("NAME", |to| whole.render_name_section(to));
    page += &section("SYNOPSIS", |to| whole.render_synopsis_section(to));
    page += &section("DESCRIPTION", |to| whole.render_description_section(to));
    page += &section("OPTIONS", |to| whole.render_options_section(to));
    page += ".SH COMMANDS\nEvery command also takes the options above, except --version.\n";
    page.extend(commands.map(|command| command_sections(command, &cli, "")));
    page.extend(LISTS.map(|(heading, terms)| section(heading, |to| list(terms).to_writer(to))));
    page
}

fn section(heading: &str, render: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
    format!(".SH {heading}\n{}", body(render))
}

/// The section of a command of `parent`, which stands behind the words `before`, and those of its own verbs.
fn command_sections(command: &Command, parent: &Command, before: &str) -> String {
    let name = format!("{before}{}", command.get_name());
    let behind = match command.has_subcommands() {
        true => " <COMMAND>",
        false => "",
    };
    let man = manual(command, Some(parent), &format!("{PROGRAM} {name}"), behind);
    let section = format!(
        ".SS {name}\n{}.PP\n{}{}",
        body(|to| man.render_synopsis_section(to)),
        body(|to| man.render_description_section(to)),
        body(|to| man.render_options_section(to)),
    );
    let verbs = verbs(command).map(|verb| command_sections(verb, command, &format!("{name} ")));
    section + &verbs.collect::<String>()
}

fn verbs(command: &Command) -> impl Iterator<Item = &Command> {
    let of_its_own = |verb: &&Command| !verb.is_hide_set() && verb.get_name() != "help";
    command.get_subcommands().filter(of_its_own)
}

fn list(terms: &[(&str, &str)]) -> Roff {
    let mut list = Roff::new();
    for (term, text) in terms {
        list.control("TP", []);
        list.text([bold(*term)]);
        list.text([roman(*text)]);
    }
    list
}

/// The manual of one command alone, without the options that it has from its parent.
fn manual(command: &Command, parent: Option<&Command>, name: &str, behind: &str) -> Man {
    let inherited = |arg: &Arg| {
        parent.is_some_and(|parent| {
            let mut everywhere = parent.get_arguments().filter(|it| it.is_global_set());
            arg.get_id() == "help" || everywhere.any(|it| it.get_id() == arg.get_id())
        })
    };
    let command = command.clone().mut_args(|arg| {
        let hidden = arg.is_hide_set() || inherited(&arg);
        values_in_a_line(arg).hide(hidden)
    });
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let words: Vec<String> = shown.map(synopsis).collect();
    let usage = format!("{name} {}{behind}", words.join(" "));
    // An empty date would not be printed at all, and what follows would take its place.
    Man::new(command.bin_name(name).override_usage(usage))
        .date(" ")
        .manual("User Commands")
}

fn synopsis(arg: &Arg) -> String {
    match arg.is_required_set() || arg.is_positional() {
        true => arg.to_string(),
        false => format!("[{arg}]"),
    }
}

/// Values that need no explanation take a line and not one each.
fn values_in_a_line(arg: Arg) -> Arg {
    let values = arg.get_possible_values();
    let explained = values.iter().any(|value| value.get_help().is_some());
    if !arg.get_action().takes_values() || values.is_empty() || explained {
        return arg;
    }
    let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let help = format!("{help}: {}", names.join(", "));
    arg.help(help).hide_possible_values(true)
}

/// What is rendered, without the definitions that each part begins with and without its own heading.
fn body(render: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
    let text = written(render);
    let is_definition = |line: &&str| [".ie", ".el", ".SH"].iter().any(|it| line.starts_with(it));
    text.split_inclusive('\n')
        .skip_while(is_definition)
        .collect()
}

fn written(render: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> String {
    let mut text = Vec::new();
    // Memory takes everything.
    let _ = render(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}
