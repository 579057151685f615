//! The hidden command that looks at the CUDA driver and prints what it saw, for the process that called it.

use std::time::Duration;

use crate::cli::LookArgs;
use crate::driver::{self, Probe};
use crate::error::Error;
use crate::host::Host;
use crate::mps::Control;
use crate::process;
use crate::runtime_dir;
use crate::ui::Ui;

/// How long the daemon may take to name its clients.
const LIMIT: Duration = Duration::from_secs(5);

pub(super) fn run(host: &Host, ui: &mut Ui<'_>, args: &LookArgs) -> Result<u8, Error> {
    let seen = driver::look(args.through_daemon);
    // Both are plain data, which always has a JSON form.
    let value = match args.through_daemon {
        false => serde_json::to_value(seen),
        // Asked while the context is there: the daemon counts us as long as we run.
        true => serde_json::to_value(seen.map(|seen| Probe {
            seen,
            server: our_server(host),
        })),
    };
    ui.json(&value.unwrap_or_default());
    Ok(0)
}

/// The server that counts this process among its clients.
fn our_server(host: &Host) -> Option<i32> {
    let pipe = runtime_dir::effective_pipe(host);
    let control = Control::find(host, &pipe, &pipe)?;
    let us = process::our_pid();
    let servers = control.servers(LIMIT).ok()?;
    servers.into_iter().find(|server| {
        control
            .clients(*server, LIMIT)
            .is_ok_and(|clients| clients.is_some_and(|clients| clients.contains(&us)))
    })
}
