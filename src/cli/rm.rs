//! `bulkhead rm`.

use std::ffi::OsString;

use bulkhead::error::Exit;

use super::server::ServerArgs;
use super::{Failure, key_octets, miss};

/// Remove values
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Examples:\n  bulkhead rm films/intro\n  bulkhead rm a b c      all are tried; a missing one gives exit code 1"
)]
pub struct Args {
    /// Keys to remove
    #[arg(required = true)]
    keys: Vec<OsString>,
    #[command(flatten)]
    server: ServerArgs,
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let mut client = args.server.connect()?;
    let mut missed: Option<Failure> = None;
    for key in &args.keys {
        if !client.delete(key_octets(key))?
            && let Some(earlier) = missed.replace(miss(key))
        {
            eprintln!("bulkhead: {earlier}");
        }
    }
    missed.map_or(Ok(Exit::Done), Err)
}
