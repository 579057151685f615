//! The hidden command that looks at the CUDA driver and prints what it saw, for the process that called it.

use crate::cli::LookArgs;
use crate::driver;
use crate::error::Error;
use crate::ui::Ui;

pub(super) fn run(ui: &mut Ui<'_>, args: &LookArgs) -> Result<u8, Error> {
    let seen = driver::look(args.through_daemon);
    // Both sides are plain data, which always has a JSON form.
    ui.json(&serde_json::to_value(seen).unwrap_or_default());
    Ok(0)
}
