//! A daemon and its client in one process, over loopback TCP: what `benches/get.rs` and `benches/set.rs` share.

use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bulkhead::actors::start;
use bulkhead::client::{Client, Options, ServerUrl};
use bulkhead::config::{Config, PoolConfig};
use tokio::sync::oneshot;

/// How much is done.
pub struct Plan {
    /// Octets moved for each size of value, at most.
    pub bytes: u64,
    /// Requests for each size of value, at most.
    pub requests: u64,
    pub memory_bytes: u64,
    pub pool_bytes: u64,
}

impl Plan {
    /// `cargo bench` says `--bench`; with `--test`, and for `cargo test --benches`, all that counts is whether it runs.
    pub fn of_arguments() -> Self {
        let has = |name| std::env::args().any(|argument| argument == name);
        if has("--bench") && !has("--test") {
            Self { bytes: 4 << 30, requests: 20_000, memory_bytes: 1 << 30, pool_bytes: 4 << 30 }
        } else {
            Self { bytes: 8 << 20, requests: 4, memory_bytes: 32 << 20, pool_bytes: 128 << 20 }
        }
    }

    /// Requests for values of `len` octets.
    pub fn count(&self, len: usize) -> u64 {
        (self.bytes / len.max(1) as u64).clamp(1, self.requests)
    }
}

/// Runs `work` with a client of a fresh daemon, whose lanes are threads of this process.
pub fn with_daemon(plan: &Plan, work: impl FnOnce(&mut Client)) {
    with_doors(
        plan,
        |_| {},
        |doors| work(&mut Client::connect(doors[0].clone(), Options::default()).expect("the daemon listens")),
    );
}

/// Runs `work` with the URLs of a fresh daemon, whose settings `adjust` has changed.
pub fn with_doors(plan: &Plan, adjust: impl FnOnce(&mut Config), work: impl FnOnce(&[ServerUrl])) {
    with_printed_doors(plan, adjust, |doors| {
        let urls: Vec<ServerUrl> = doors.iter().filter_map(|door| door.parse().ok()).collect();
        work(&urls);
    });
}

/// The same with all that the daemon prints, doors for other clients too.
pub fn with_printed_doors(plan: &Plan, adjust: impl FnOnce(&mut Config), work: impl FnOnce(&[String])) {
    let parent =
        std::env::var_os("BULKHEAD_BENCH_DIR").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let dir = tempfile::tempdir_in(parent).expect("a directory to work in");
    let mut config = Config::small(dir.path().join("pool"));
    config.store.memory_bytes = plan.memory_bytes;
    config.store.pools = vec![PoolConfig { dir: dir.path().join("pool"), bytes: Some(plan.pool_bytes) }];
    adjust(&mut config);
    let (doors_sender, doors) = mpsc::channel();
    let (end, ended) = oneshot::channel::<()>();
    let daemon = thread::spawn(move || {
        let system = actix::System::new();
        system.block_on(async {
            let handle = start(config).await.expect("the daemon starts");
            doors_sender.send(handle.doors().to_vec()).expect("the client waits");
            let _ = ended.await;
            handle.shutdown().await;
        });
    });
    let doors: Vec<String> = doors.recv().expect("the daemon starts");
    work(&doors);
    drop(end);
    daemon.join().expect("the daemon ends");
}

/// Times `count` calls of `request`, each of which moves `len` octets, and prints a line.
pub fn measure(what: &str, len: usize, count: u64, mut request: impl FnMut(u64)) {
    let mut latencies = Vec::with_capacity(count as usize);
    let start = Instant::now();
    for number in 0..count {
        let began = Instant::now();
        request(number);
        latencies.push(began.elapsed());
    }
    let seconds = start.elapsed().as_secs_f64();
    latencies.sort_unstable();
    let percentile = |share: usize| latencies[(latencies.len() - 1) * share / 1000].as_micros();
    println!(
        "{what} {len:>9} B: {count:>6} requests, {:>8.0}/s, {:>7.1} MiB/s, p50 {} us, p90 {} us, p99 {} us, max {} us",
        count as f64 / seconds,
        (count * len as u64) as f64 / seconds / f64::from(1 << 20),
        percentile(500),
        percentile(900),
        percentile(990),
        latencies.last().copied().unwrap_or(Duration::ZERO).as_micros(),
    );
}

/// Octets that no drive can compress.
pub fn octets(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut octets = Vec::with_capacity(len + 8);
    while octets.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        octets.extend_from_slice(&state.to_le_bytes());
    }
    octets.truncate(len);
    octets
}
