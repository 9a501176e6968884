//! What calls over an RPC door cost, one connection: the programs behind `compare.py rpc`.
//!
//! ```text
//! rpc load URL COUNT BYTES            stores values `0` to `COUNT - 1` of so many octets
//! rpc null URL SECONDS                median round trip of NULL, microseconds
//! rpc get URL SECONDS BYTES DEPTH [CREDITS]
//!                                     octets a second of GETs, a call each, so many submitted at once
//! rpc batch URL SECONDS BYTES COUNT   octets a second of GETs of so many values in one call, a call at a time
//! ```
//!
//! All octets land in memory that was made before. Without arguments, or with `--test`, one short pass of all against a daemon
//! within the process.

#[expect(dead_code, reason = "of what get and set share, it needs the daemon alone")]
mod loopback;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use bulkhead::client::ServerUrl;
use bulkhead::client::rpc::{AsyncRpcClient, GetRange, PutOptions, RpcClient, RpcOptions, Status};
use bulkhead::fabric::SharedSpan;

/// Values that are asked for in turn.
const KEYS: usize = 64;

fn connect(url: &ServerUrl) -> RpcClient {
    RpcClient::connect(url.clone(), RpcOptions::default()).expect("a connection")
}

fn load(url: &ServerUrl, count: usize, bytes: usize) {
    let (mut client, octets) = (connect(url), vec![0x55; bytes]);
    for key in 0..count {
        client.put(key.to_string(), &mut &octets[..], bytes as u64, PutOptions::default()).expect("stored");
    }
}

/// Microseconds.
fn null(url: &ServerUrl, time: Duration) -> f64 {
    let (mut client, mut times) = (connect(url), Vec::new());
    let start = Instant::now();
    while start.elapsed() < time {
        let sent_at = Instant::now();
        client.ping().expect("a reply");
        times.push(sent_at.elapsed());
    }
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn range(key: usize, into: &SharedSpan) -> GetRange {
    GetRange { key: (key % KEYS).to_string().into_bytes(), version: 0, offset: 0, into: into.clone() }
}

/// Octets a second of calls for `count` values each.
fn batch(url: &ServerUrl, time: Duration, bytes: usize, count: usize) -> f64 {
    let (mut client, memory) = (connect(url), SharedSpan::new(count * bytes).expect("memory"));
    let spans: Vec<SharedSpan> = (0..count).map(|at| memory.slice(at * bytes..(at + 1) * bytes)).collect();
    let (start, mut octets, mut key) = (Instant::now(), 0, 0);
    while start.elapsed() < time {
        let ranges: Vec<GetRange> = spans.iter().enumerate().map(|(at, span)| range(key + at, span)).collect();
        for got in client.get_ranges(&ranges, None).expect("a reply") {
            assert_eq!((got.status, got.count as usize), (Status::Ok, bytes));
            octets += bytes;
        }
        key += count;
    }
    octets as f64 / start.elapsed().as_secs_f64()
}

/// Octets a second of calls for one value each, `depth` of them submitted at once.
fn get(url: &ServerUrl, time: Duration, bytes: usize, depth: usize, credits: u32) -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let options = RpcOptions { credits: NonZeroU32::new(credits).expect("a credit"), ..RpcOptions::default() };
        let client = AsyncRpcClient::connect(url.clone(), options).await.expect("a connection");
        let start = Instant::now();
        let tasks: Vec<_> = (0..depth)
            .map(|task| {
                let client = client.clone();
                tokio::spawn(async move {
                    let memory = SharedSpan::new(bytes).expect("memory");
                    let (mut octets, mut key) = (0, task);
                    while start.elapsed() < time {
                        let got = client.get_ranges(&[range(key, &memory)], None).await.expect("a reply");
                        assert_eq!((got[0].status, got[0].count as usize), (Status::Ok, bytes));
                        octets += bytes;
                        key += depth;
                    }
                    octets
                })
            })
            .collect();
        let mut octets = 0;
        for task in tasks {
            octets += task.await.expect("a task that ends");
        }
        octets as f64 / start.elapsed().as_secs_f64()
    })
}

/// One of each, against a daemon of its own.
fn pass() {
    let plan = loopback::Plan::of_arguments();
    let door = "rpc+iwarp://127.0.0.1:0?crc=off".parse().expect("a door");
    loopback::with_doors(
        &plan,
        |config| config.listen.rpc = vec![door],
        |urls| {
            let url = urls.iter().find(|url| url.is_rpc()).expect("the door is open");
            let time = Duration::from_millis(if plan.requests > 100 { 1000 } else { 20 });
            load(url, KEYS, 65_536);
            let rate = |octets: f64| octets / f64::from(1 << 20);
            println!("NULL                              {:.1} us", null(url, time));
            println!("64 KiB a call, one at a time      {:.0} MiB/s", rate(batch(url, time, 65_536, 1)));
            println!("64 x 64 KiB in one call           {:.0} MiB/s", rate(batch(url, time, 65_536, 64)));
            println!("64 KiB a call, 64 at once         {:.0} MiB/s", rate(get(url, time, 65_536, 64, 64)));
            println!("the same with one credit          {:.0} MiB/s", rate(get(url, time, 65_536, 64, 1)));
        },
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let Some((what, rest)) = arguments.split_first() else { return pass() };
    let (url, numbers) = rest.split_first().expect("the URL of a server");
    let url: ServerUrl = url.parse().expect("the URL of a server");
    let numbers: Vec<f64> = numbers.iter().map(|number| number.parse().expect("a number")).collect();
    let time = || Duration::from_secs_f64(numbers[0]);
    match (what.as_str(), numbers.as_slice()) {
        ("load", [count, bytes]) => load(&url, *count as usize, *bytes as usize),
        ("null", [_]) => println!("{}", null(&url, time())),
        ("get", [_, bytes, depth]) => println!("{}", get(&url, time(), *bytes as usize, *depth as usize, 32)),
        ("get", [_, bytes, depth, credits]) => {
            println!("{}", get(&url, time(), *bytes as usize, *depth as usize, *credits as u32));
        }
        ("batch", [_, bytes, count]) => println!("{}", batch(&url, time(), *bytes as usize, *count as usize)),
        _ => {
            eprintln!("usage: rpc load | null | get | batch URL NUMBER..., see the head of benches/rpc.rs");
            std::process::exit(64);
        }
    }
}
