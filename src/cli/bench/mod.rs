//! `bulkhead bench`: a closed loop of connections, each with so many requests in flight.

mod driver;
mod histogram;
mod native;
mod phase;
mod rpc;
mod values;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead::client::AnyClient;
use bulkhead::config::TimeSpan;
use bulkhead::error::Exit;
use serde_json::json;

use self::driver::{Driver, Op, Pick, Plan, Tally};
use self::phase::{Connection, Phase};
use self::values::{Item, SizeRange};
use super::server::ServerArgs;
use super::{Failure, print};

const EXAMPLES: &str = "\
Examples:
  bulkhead bench --op get --size 1MiB --connections 4
  bulkhead bench --op set --size 64KiB --connections 2 --depth 8 --seconds 5 --json
  bulkhead bench --op get --size 1MiB..8MiB --keys 940 --verify     4 GiB, every octet checked
  bulkhead bench --op get --size 64KiB --batch 64 --server rpc+iwarp://127.0.0.1:20049

get first loads its keys, unless --no-load. set --verify reads back afterwards what was stored. Latencies run \
from a request's first octet written to its reply's last octet read; ttfb is the time to the value's first octet \
with one request in flight on each connection (measured in a short run of its own if --depth is more than 1); over RPC a value is seen when it is whole. \
Exit code 1 means that requests failed, 76 that values came back wrong.";

/// Measure a server
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// What to measure
    #[arg(long)]
    op: Op,
    /// Length of values: SIZE, or MIN..MAX, from which each key takes its own
    #[arg(long, value_name = "SIZE", default_value = "1MiB")]
    size: SizeRange,
    /// Connections at once
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// Requests in flight on each connection
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    depth: u32,
    /// get over RPC: values in one call; at least so many requests are in flight
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: u32,
    /// Length of the run in seconds, or with a unit
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    seconds: Duration,
    /// Number of keys, picked at random
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    keys: u32,
    /// Front of every key
    #[arg(long, value_name = "TEXT", default_value = "bench-", value_parser = parse_prefix)]
    key_prefix: String,
    /// Check every octet read; send octets that can be checked
    #[arg(long)]
    verify: bool,
    /// get: take the keys as an earlier run has loaded them
    #[arg(long)]
    no_load: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let time = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => text.parse::<TimeSpan>()?.0,
    };
    let is_usable = !time.is_zero() && time <= Duration::from_secs(86_400 * 365);
    if is_usable { Ok(time) } else { Err("want more than nothing, at most a year".to_owned()) }
}

fn parse_prefix(text: &str) -> Result<String, String> {
    const LEN_MAX: usize = 200;
    let is_sendable = text.len() <= LEN_MAX && text.bytes().all(|octet| octet > b' ' && octet != 0x7f);
    if is_sendable { Ok(text.to_owned()) } else { Err(format!("want at most {LEN_MAX} octets without blanks")) }
}

/// The parts of a run that every phase needs.
struct Bench {
    items: Arc<Vec<Item>>,
    connections: Vec<Connection>,
    stall_timeout: Duration,
}

impl Bench {
    fn run(&mut self, plan: &Plan, time: Option<Duration>, is_random: bool) -> Result<Phase, Failure> {
        let connections = std::mem::take(&mut self.connections);
        let step = connections.len();
        let make = |deadline: Option<Instant>, index: usize| {
            let pick = match is_random {
                // Different for each connection, never zero, and the same in every run.
                true => Pick::Random { state: (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) },
                false => Pick::Each { next: index, step },
            };
            Driver::new(Plan { deadline, ..plan.clone() }, Arc::clone(&self.items), pick)
        };
        let phase = phase::run(connections, time, self.stall_timeout, make);
        let mut phase = phase.map_err(|err| Failure::new(Exit::Unavailable, format!("cannot run: {err}")))?;
        self.connections = std::mem::take(&mut phase.connections);
        Ok(phase)
    }
}

pub fn run(args: Args) -> Result<Exit, Failure> {
    let url = args.server.url()?;
    let options = args.server.options();
    if args.batch > 1 && !(url.is_rpc() && args.op == Op::Get) {
        return Err(Failure::new(Exit::Usage, "only get over RPC has several values in a call".to_owned()));
    }
    rpc::refuse_lengths(&url, args.op, args.size.max()).map_err(|text| Failure::new(Exit::Usage, text))?;
    let version = match args.server.connect()? {
        // There is no procedure that tells it.
        AnyClient::Rpc(mut client) => client.ping().map(|()| None)?,
        mut client => Some(client.version()?),
    };
    let pingpong = phase::pingpong_64_p50_us()
        .map_err(|err| Failure::new(Exit::Unavailable, format!("no ping-pong over loopback: {err}")))?;
    let connections = (0..args.connections)
        .map(|_| Connection::connect(&url, options, args.server.rpc_options()))
        .collect::<Result<Vec<_>, _>>()?;
    let items = Arc::new(values::items(&args.key_prefix, args.keys, args.size));
    let mut bench = Bench { items, connections, stall_timeout: options.io_timeout };
    let plan = Plan {
        op: args.op,
        depth: args.depth.max(args.batch) as usize,
        batch: args.batch as usize,
        is_checked: args.verify,
        only_stored: false,
        deadline: None,
        count_max: u64::MAX,
    };
    let one_by_one = Plan { depth: 1, batch: 1, ..plan.clone() };

    let mut loaded = None;
    if args.op == Op::Get && !args.no_load {
        // Always octets that can be checked, so that a later run with --no-load --verify finds what it expects.
        let phase = bench.run(&Plan { op: Op::Set, is_checked: true, ..one_by_one.clone() }, None, false)?;
        loaded = Some(phase);
    }
    let main = bench.run(&plan, Some(args.seconds), true)?;
    let mut first_octet = main.tally.first_octet.clone();
    let mut extra = Tally::new();
    if args.op == Op::Get && plan.depth > 1 {
        let phase = bench.run(&Plan { count_max: 200, ..one_by_one.clone() }, Some(Duration::from_secs(1)), true)?;
        first_octet = phase.tally.first_octet.clone();
        extra.merge(phase.tally);
    }
    let mut checked = None;
    if args.op == Op::Set && args.verify {
        let phase = bench.run(&Plan { op: Op::Get, only_stored: true, ..one_by_one }, None, false)?;
        checked = Some(phase.tally.operations - phase.tally.misses);
        extra.merge(phase.tally);
    }

    let tally = &main.tally;
    let load_errors = loaded.as_ref().map_or(0, |phase| phase.tally.errors);
    let errors = tally.errors + extra.errors + load_errors;
    let corrupt = tally.corrupt + extra.corrupt;
    let per_second = |count: u64| count as f64 / main.seconds.max(f64::MIN_POSITIVE);
    let report = json!({
        "op": match args.op { Op::Get => "get", Op::Set => "set" },
        "server": url.to_string(),
        "version": version,
        "size": args.size.to_string(),
        "connections": args.connections,
        "depth": plan.depth,
        "batch": plan.batch,
        "keys": args.keys,
        "seconds": main.seconds,
        "operations": tally.operations,
        "bytes": tally.bytes,
        "ops_per_second": per_second(tally.operations),
        "bytes_per_second": per_second(tally.bytes),
        "p50_us": tally.latency.quantile_us(0.5),
        "p99_us": tally.latency.quantile_us(0.99),
        "ttfb_p50_us": first_octet.quantile_us(0.5),
        "errors": errors,
        "misses": tally.misses + extra.misses,
        "corrupt": corrupt,
        "verified": args.verify,
        "read_back": checked,
        "load_seconds": loaded.as_ref().map(|phase| phase.seconds),
        "load_bytes": loaded.as_ref().map(|phase| phase.tally.bytes),
        "load_errors": load_errors,
        "pingpong_64_p50_us": pingpong,
        "cpu_seconds_client": main.cpu_seconds,
    });
    let text = match (args.json, &report) {
        (false, serde_json::Value::Object(fields)) => {
            fields.iter().map(|(name, value)| format!("{name:20} {value}\n")).collect()
        }
        _ => format!("{report}\n"),
    };
    print(&text)?;
    let load_error = loaded.and_then(|phase| phase.tally.first_error);
    let first_error = load_error.or(main.tally.first_error).or(extra.first_error).unwrap_or_default();
    if corrupt > 0 {
        return Err(Failure::new(Exit::Protocol, format!("{corrupt} values came back wrong")));
    }
    if errors > 0 {
        return Err(Failure::new(Exit::Refused, format!("{errors} requests failed, the first: {first_error}")));
    }
    Ok(Exit::Done)
}
