//! `bulkhead stat`.

use std::ffi::OsString;

use bulkhead::client::AnyClient;
use bulkhead::error::Exit;

use super::server::ServerArgs;
use super::{Failure, key_octets, miss, print};

const EXAMPLES: &str = "\
Examples:
  bulkhead stat films/intro
  bulkhead stat films/intro --json | jq .len_bytes

Over RPC it also says what is left to live (ttl_s, 0: for ever), how many octets are in RAM (lead_bytes: from the first \
on without a gap) and on disk alone, and in how many microseconds the first of them could be sent.";

/// Show length, flags and version (`cas`) of a value, and over RPC where it lies
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
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
    let key = key_octets(&args.key);
    let fields = match args.server.connect()? {
        AnyClient::Rpc(mut client) => client.stat(key)?.map(|stat| {
            vec![
                ("len_bytes", stat.len),
                ("flags", stat.flags.into()),
                ("cas", stat.version),
                ("ttl_s", stat.ttl_s.into()),
                ("ram_bytes", stat.ram_bytes),
                ("lead_bytes", stat.lead_bytes),
                ("disk_bytes", stat.disk_bytes),
                ("first_octet_us", stat.first_octet_us.into()),
            ]
        }),
        mut client => {
            client.stat(key)?.map(|info| vec![("len_bytes", info.len), ("flags", info.flags.into()), ("cas", info.cas)])
        }
    };
    let fields = fields.ok_or_else(|| miss(&args.key))?;
    let key = args.key.to_string_lossy();
    let text = if args.json {
        let mut object = serde_json::json!({ "key": key });
        fields.into_iter().for_each(|(name, number)| object[name] = number.into());
        format!("{object}\n")
    } else {
        let lines = fields.into_iter().map(|(name, number)| format!("{name} {number}\n"));
        std::iter::once(format!("key {key}\n")).chain(lines).collect()
    };
    print(&text)?;
    Ok(Exit::Done)
}
