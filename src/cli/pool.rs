//! `bulkhead pool`.

use std::path::PathBuf;

use bulkhead::error::Exit;
use bulkhead::store::pool::{Initialized, init};
use clap::Subcommand;

use super::{Failure, print};

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
            let found = init(&dir).map_err(|err| Failure::new(err.exit_code(), err.to_string()))?;
            let now = if found == Initialized::Now { "is" } else { "was already" };
            print(&format!("{} {now} a pool\n", dir.display()))?;
            Ok(Exit::Done)
        }
    }
}
