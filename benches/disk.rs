//! Cold reads of 256 KiB segments through `DiskTail` against plain `pread` with O_DIRECT, same file, same sizes.
//!
//! `cargo bench --bench disk`; the pool lies in `$BULKHEAD_BENCH_DIR`, or below the target directory. Both sides take
//! turns round by round, since the speed of a disk moves from minute to minute; what counts is the ratio of a round.
//! `DiskTail` also checks CRC32C, `pread` checks nothing.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::oneshot;

use bulkhead::actors::disk_tail::{DiskTail, ReadTail, Stop, TailMetrics, TailRead, TailWritten, WriteTail};
use bulkhead::fabric::staging::{STAGING_BUF_BYTES, Staging};
use bulkhead::store::pool::{ExtentId, PoolDir, PoolFile, PoolFiles};
use bulkhead::store::uring::{AlignedBuf, Backend, WriteSource};

const SEGMENT_BYTES: usize = STAGING_BUF_BYTES;
/// Size of a segment as a power of two of 4 KiB.
const ORDER: u8 = 6;

struct Plan {
    segments: u32,
    reads_per_round: usize,
    rounds: usize,
}

/// Asks for segments and counts the answers, `depth` at a time.
struct Driver {
    tail: Addr<DiskTail>,
    staging: Staging,
    crcs: Vec<[u32; 4]>,
    keep: Arc<()>,
    todo: Vec<u32>,
    asked_at: Vec<Instant>,
    latencies: Vec<Duration>,
    missing: usize,
    done: Option<oneshot::Sender<Vec<Duration>>>,
}

impl Actor for Driver {
    type Context = Context<Self>;
}

#[derive(Message)]
#[rtype(result = "()")]
struct Fill {
    segments: u32,
    done: oneshot::Sender<Vec<Duration>>,
}

#[derive(Message)]
#[rtype(result = "()")]
struct Round {
    segments: Vec<u32>,
    depth: usize,
    done: oneshot::Sender<Vec<Duration>>,
}

fn extent(segment: u32) -> ExtentId {
    ExtentId::new(0, 0, segment << ORDER, ORDER)
}

impl Driver {
    fn read_next(&mut self, buf: bulkhead::fabric::staging::StagingBuf, reply: Recipient<TailRead>) {
        let Some(segment) = self.todo.pop() else { return };
        self.asked_at[segment as usize] = Instant::now();
        self.tail.do_send(ReadTail {
            extent: extent(segment),
            len: SEGMENT_BYTES as u32,
            crcs: self.crcs[segment as usize],
            into: buf,
            keep: self.keep.clone(),
            ticket: segment.into(),
            reply,
        });
    }

    fn finish_one(&mut self) {
        self.missing -= 1;
        if self.missing == 0
            && let Some(done) = self.done.take()
        {
            let _ = done.send(std::mem::take(&mut self.latencies));
        }
    }

    fn write_next(&mut self, reply: Recipient<TailWritten>) {
        let Some(segment) = self.todo.pop() else { return };
        let mut buf = self.staging.try_take().expect("as many buffers as writes");
        let mut state = u64::from(segment) + 1;
        for word in buf.as_mut_slice().chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        self.tail.do_send(WriteTail {
            extent: extent(segment),
            len: SEGMENT_BYTES as u32,
            from: WriteSource::new(buf),
            keep: self.keep.clone(),
            ticket: segment.into(),
            reply,
        });
    }
}

impl Handler<Fill> for Driver {
    type Result = ();

    fn handle(&mut self, fill: Fill, ctx: &mut Self::Context) {
        self.todo = (0..fill.segments).collect();
        self.missing = self.todo.len();
        self.crcs = vec![[0; 4]; self.missing];
        self.asked_at = vec![Instant::now(); self.missing];
        self.done = Some(fill.done);
        for _ in 0..8 {
            self.write_next(ctx.address().recipient());
        }
    }
}

impl Handler<Round> for Driver {
    type Result = ();

    fn handle(&mut self, round: Round, ctx: &mut Self::Context) {
        self.missing = round.segments.len();
        self.todo = round.segments;
        self.done = Some(round.done);
        for _ in 0..round.depth {
            let buf = self.staging.try_take().expect("as many buffers as depth");
            self.read_next(buf, ctx.address().recipient());
        }
    }
}

impl Handler<TailWritten> for Driver {
    type Result = ();

    fn handle(&mut self, written: TailWritten, ctx: &mut Self::Context) {
        self.crcs[written.ticket as usize] = written.result.expect("the disk takes it");
        self.write_next(ctx.address().recipient());
        self.finish_one();
    }
}

impl Handler<TailRead> for Driver {
    type Result = ();

    fn handle(&mut self, read: TailRead, ctx: &mut Self::Context) {
        read.result.expect("what was written comes back");
        self.latencies.push(self.asked_at[read.ticket as usize].elapsed());
        self.read_next(read.buf, ctx.address().recipient());
        self.finish_one();
    }
}

/// One round of plain reads on `depth` threads.
fn pread_round(file: &PoolFile, segments: &[u32], depth: usize) -> Vec<Duration> {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..depth)
            .map(|_| {
                scope.spawn(|| {
                    let mut buf = AlignedBuf::new(SEGMENT_BYTES).expect("memory");
                    let mut latencies = Vec::new();
                    while let Some(&segment) = segments.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let asked_at = Instant::now();
                        let offset = extent(segment).byte_offset();
                        file.as_file().read_exact_at(buf.as_mut_slice(), offset).expect("a good disk");
                        latencies.push(asked_at.elapsed());
                    }
                    latencies
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// `count` different segments in a random order that `seed` decides.
fn shuffled(segments: u32, count: usize, seed: u64) -> Vec<u32> {
    let mut all: Vec<u32> = (0..segments).collect();
    let mut state = seed | 1;
    for at in (1..all.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        all.swap(at, ((state >> 33) % (at as u64 + 1)) as usize);
    }
    all.truncate(count);
    all
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn percentile(latencies: &mut [Duration], percent: usize) -> u128 {
    latencies.sort_unstable();
    latencies[(latencies.len() * percent / 100).min(latencies.len() - 1)].as_micros()
}

async fn compare(backend: Backend, files: &Arc<PoolFiles>, plan: &Plan) {
    let staging = Staging::new(32).expect("memory");
    let drives: Arc<[Arc<PoolFiles>]> = Arc::new([Arc::clone(files)]);
    let metrics = Arc::new(TailMetrics::default());
    let tail = DiskTail::new(drives, staging.clone(), 32, metrics).with_backend(backend).start();
    let driver = Driver {
        tail: tail.clone(),
        staging,
        crcs: Vec::new(),
        keep: Arc::new(()),
        todo: Vec::new(),
        asked_at: Vec::new(),
        latencies: Vec::new(),
        missing: 0,
        done: None,
    }
    .start();
    let (done, filled) = oneshot::channel();
    driver.do_send(Fill { segments: plan.segments, done });
    filled.await.expect("the driver answers");
    let file = files.file(0).expect("the one file");

    for depth in [1, 4, 16] {
        let (mut ours, mut plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut our_latencies, mut plain_latencies) = (Vec::new(), Vec::new());
        for round in 0..plan.rounds {
            let segments = shuffled(plan.segments, plan.reads_per_round, round as u64 * 97 + depth as u64);
            let gigabytes = (segments.len() * SEGMENT_BYTES) as f64 / 1e9;
            let (mut our_speed, mut plain_speed) = (0.0, 0.0);
            for turn in 0..2 {
                if (round + turn) % 2 == 0 {
                    let (done, finished) = oneshot::channel();
                    let started = Instant::now();
                    driver.do_send(Round { segments: segments.clone(), depth, done });
                    our_latencies.extend(finished.await.expect("the driver answers"));
                    our_speed = gigabytes / started.elapsed().as_secs_f64();
                } else {
                    let started = Instant::now();
                    plain_latencies.extend(pread_round(&file, &segments, depth));
                    plain_speed = gigabytes / started.elapsed().as_secs_f64();
                }
            }
            ours.push(our_speed);
            plain.push(plain_speed);
            ratios.push(our_speed / plain_speed);
        }
        let ratio = median(&mut ratios);
        println!(
            "{backend:?} depth {depth:2}: {:.2} GB/s, pread {:.2} GB/s, ratio {ratio:.2} [{:.2}..{:.2}]; \
             p50/p99 {}/{} us, pread {}/{} us",
            median(&mut ours),
            median(&mut plain),
            ratios[0],
            ratios[ratios.len() - 1],
            percentile(&mut our_latencies, 50),
            percentile(&mut our_latencies, 99),
            percentile(&mut plain_latencies, 50),
            percentile(&mut plain_latencies, 99),
        );
    }
    tail.send(Stop).await.expect("the tail stops");
}

fn main() {
    // `cargo bench` says so; with `--test`, and for `cargo test --benches`, all that counts is whether it runs.
    let has = |name| std::env::args().any(|argument| argument == name);
    let plan = if has("--bench") && !has("--test") {
        Plan { segments: 3072, reads_per_round: 512, rounds: 7 }
    } else {
        Plan { segments: 32, reads_per_round: 32, rounds: 1 }
    };
    let parent =
        std::env::var_os("BULKHEAD_BENCH_DIR").map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
    let dir = tempfile::tempdir_in(parent).expect("a directory to work in");
    let bytes = u64::from(plan.segments) * SEGMENT_BYTES as u64;
    let pool = PoolDir::open(&dir.path().join("pool"), Some(bytes)).expect("room for the pool");
    let files = Arc::new(PoolFiles::new(pool));
    files.grow().expect("a good disk").expect("room for the file");
    let direct = files.file(0).expect("the one file").is_direct();
    println!("{} segments of {SEGMENT_BYTES} B, O_DIRECT: {direct}", plan.segments);
    System::new().block_on(async {
        for backend in [Backend::Auto, Backend::Blocking] {
            compare(backend, &files, &plan).await;
        }
    });
}
