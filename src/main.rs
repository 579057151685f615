//! argv and streams in, exit code out; nothing else.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use uni_cumps::{Host, Ui};

// The unwinder from the archive, so that no libgcc_s.so is loaded: a constructor of that library asks the CPU what it can,
// which a virtual machine answers so slowly that it costs more than all that `env` does.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
#[link(name = "gcc_eh", kind = "static")]
unsafe extern "C" {}

fn main() -> ExitCode {
    let (mut out, mut err) = (io::stdout(), io::stderr());
    let (out_is_terminal, err_is_terminal) = (out.is_terminal(), err.is_terminal());
    let host = match Host::this_machine() {
        Ok(host) => host,
        Err(error) => {
            let _ = io::Write::write_fmt(&mut err, format_args!("error: {error}\n"));
            return ExitCode::FAILURE;
        }
    };
    let color = uni_cumps::wants_color(&host);
    let mut ui = Ui::new(
        (&mut out, out_is_terminal),
        (&mut err, err_is_terminal),
        color,
    );
    uni_cumps::run(std::env::args_os(), host, &mut ui)
}
