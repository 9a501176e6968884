//! The command line: one file per subcommand.

mod bench;
mod doctor;
mod get;
mod ls;
mod part_file;
mod pool;
mod progress;
mod put;
mod rm;
mod serve;
mod server;
mod stat;
mod stats;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;

use bulkhead::client::ClientError;
use bulkhead::config::ConfigError;
use bulkhead::error::Exit;
use clap::{Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  bulkhead serve                                   a daemon: native on port 11212, memcache on 11211
  bulkhead put films/intro intro.mp4 --ttl 7d      store a file
  bulkhead get films/intro -o copy.mp4             fetch it
  bulkhead ls films/ --server rpc+iwarp://HOST     list keys, of a daemon with --rpc
  bulkhead doctor                                  would it work on this machine, and if not, why?
  tar c dir | bulkhead put dir.tar -               store what a pipe delivers

Exit codes:
  0 done   1 miss, refused, a local file failed, or doctor found trouble   64 usage or unreadable input
  69 server unreachable, port busy, pool locked or gone   70 bug   76 protocol error
  78 bad configuration or unmarked pool";

/// An object store for large values: heads in RAM, tails on disk.
#[derive(Debug, Parser)]
#[command(name = "bulkhead", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(Box<serve::Args>),
    Put(put::Args),
    Get(get::Args),
    Rm(rm::Args),
    Ls(ls::Args),
    Stat(stat::Args),
    Stats(stats::Args),
    Bench(bench::Args),
    Doctor(Box<doctor::Args>),
    Pool(pool::Args),
}

/// Why a command did not do what was asked: one line for stderr and the code to leave with.
#[derive(Debug)]
pub struct Failure {
    pub exit: Exit,
    message: String,
}

impl Failure {
    fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, whatever a file name or a server put into it.
        f.write_str(&self.message.replace(['\n', '\r'], " "))
    }
}

impl From<ClientError> for Failure {
    fn from(err: ClientError) -> Self {
        Self::new(err.exit_code(), err.to_string())
    }
}

impl From<ConfigError> for Failure {
    fn from(err: ConfigError) -> Self {
        Self::new(err.exit_code(), err.to_string())
    }
}

/// Parses the command line and runs the subcommand.
pub fn run() -> Result<Exit, Failure> {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(err) => {
            // Help and version come this way too, and are no failure.
            let exit = if err.use_stderr() { Exit::Usage } else { Exit::Done };
            let _ = err.print();
            return Ok(exit);
        }
    };
    match cli.command {
        Command::Serve(args) => serve::run(*args),
        Command::Put(args) => put::run(args),
        Command::Get(args) => get::run(args),
        Command::Rm(args) => rm::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Stats(args) => stats::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(*args),
        Command::Pool(args) => pool::run(args),
    }
}

/// A panic anywhere is a bug: it is logged and ends the process with 70, before half a process goes on without the
/// thread that died.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        part_file::abandon_after_panic();
        let backtrace = std::backtrace::Backtrace::capture();
        if tracing::dispatcher::has_been_set() {
            tracing::error!(%panic, %backtrace, "a bug ended the process");
        } else {
            let _ = writeln!(io::stderr(), "bulkhead: bug: {panic}\n{backtrace}");
        }
        std::process::exit(Exit::Bug.code().into());
    }));
}

/// Text of a command's result on stdout.
fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|err| Failure::new(Exit::Refused, format!("cannot write to stdout: {err}")))
}

/// A key as the shell gave it. What cannot be sent the client refuses.
fn key_octets(key: &OsString) -> &[u8] {
    key.as_bytes()
}

fn miss(key: &OsStr) -> Failure {
    Failure::new(Exit::Refused, format!("no value under `{}`", key.display()))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_help_with_an_example() {
        for command in Cli::command().get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            assert!(help.contains("bulkhead "), "{help}");
            assert!(command.get_about().is_some(), "{help}");
        }
    }
}
