//! The `bulkhead` binary: parses the command line and leaves with one of the exit codes of [`bulkhead::error::Exit`].
#![deny(unsafe_code)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::install_panic_hook();
    match cli::run() {
        Ok(exit) => exit.into(),
        Err(failure) => {
            // Nobody may be left to read it; the exit code stays.
            let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("bulkhead: {failure}\n"));
            failure.exit.into()
        }
    }
}
