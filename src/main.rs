//! argv and streams in, exit code out; nothing else.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use uni_cumps::{Host, Ui};

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
