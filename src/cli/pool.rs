//! `bulkhead pool`.

use std::path::PathBuf;

use bulkhead::error::Exit;
use clap::Subcommand;

use super::Failure;
use super::pending::init;

/// Prepare directories for the daemon
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Examples:\n  bulkhead pool init /mnt/nvme/bulkhead && bulkhead serve --pool /mnt/nvme/bulkhead:500GiB"
)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Mark an empty directory as a pool, which `serve` may fill and wipe
    Init {
        /// The directory; it is made if it does not exist, and left alone if it holds anything
        dir: PathBuf,
    },
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    match args.command {
        Command::Init { dir } => {
            init(&dir).map_err(|err| Failure::new(err.exit_code(), format!("{}: {err}", dir.display())))?;
            Ok(Exit::Done)
        }
    }
}
