//! `start`: a control daemon of the user's own for one GPU, recorded once it answers.

use crate::cli::StartArgs;
use crate::error::Error;
use crate::host::Host;
use crate::launch::{Request, Wanted};
use crate::ui::Ui;

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &StartArgs) -> Result<u8, Error> {
    let request = Request {
        gpus: args.gpus.as_deref(),
        name: args.name.as_deref(),
        pipe_dir: args.pipe_dir.as_deref(),
        log_dir: args.log_dir.as_deref(),
        force: args.force,
    };
    let wanted = Wanted::of(host, request)?;
    if args.dry_run {
        wanted.show(ui, args.foreground)?;
        return Ok(0);
    }
    if args.foreground {
        let finished = wanted.foreground(ui, |ui, record| ui.json(&record.to_json()))?;
        return Ok(finished.status.shell_code());
    }
    let record = wanted.start(ui)?;
    ui.json(&record.to_json());
    let name_option = match args.name {
        Some(_) => format!(" --name {}", record.name),
        None => String::new(),
    };
    ui.next_step(format!("eval \"$(uni-cumps env{name_option})\""));
    Ok(0)
}
