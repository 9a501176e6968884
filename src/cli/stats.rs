//! `bulkhead stats`.

use bulkhead::error::Exit;
use serde_json::{Map, Value};

use super::server::ServerArgs;
use super::{Failure, print};

/// Show the server's statistics
#[derive(clap::Args, Debug)]
#[command(
    after_help = "Examples:\n  bulkhead stats\n  bulkhead stats settings\n  bulkhead stats --json | jq .curr_items"
)]
pub struct Args {
    /// Group: settings, items, slabs, conns, sizes, reset [default: the general one]
    group: Option<String>,
    /// One JSON object; whole numbers are numbers, everything else is text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let stats = args.server.connect()?.stats(args.group.as_deref())?;
    let text = if args.json {
        let number = |text: String| text.parse::<u64>().map_or(Value::String(text), Value::from);
        let object: Map<_, _> = stats.into_iter().map(|(name, value)| (name, number(value))).collect();
        format!("{}\n", Value::Object(object))
    } else {
        stats.iter().map(|(name, value)| format!("{name} {value}\n")).collect()
    };
    print(&text)?;
    Ok(Exit::Done)
}
