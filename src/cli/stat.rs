//! `bulkhead stat`.

use std::ffi::OsString;

use bulkhead::error::Exit;

use super::server::ServerArgs;
use super::{Failure, key_octets, miss, print};

/// Show length, flags and version (`cas`) of a value
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:\n  bulkhead stat films/intro\n  bulkhead stat films/intro --json | jq .len_bytes")]
pub struct Args {
    /// Key of the value
    key: OsString,
    /// One JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let info = args.server.connect()?.stat(key_octets(&args.key))?.ok_or_else(|| miss(&args.key))?;
    let key = args.key.to_string_lossy();
    let text = if args.json {
        serde_json::json!({ "key": key, "len_bytes": info.len, "flags": info.flags, "cas": info.cas }).to_string()
    } else {
        format!("key {key}\nlen_bytes {}\nflags {}\ncas {}", info.len, info.flags, info.cas)
    };
    print(&format!("{text}\n"))?;
    Ok(Exit::Done)
}
