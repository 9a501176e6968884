//! The RPC client where it is narrow: thresholds and credits of either side, odd segments, calls given up within a
//! transfer, connections that are cut anywhere.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bulkhead::actors::fabric_listener::loopback;
use bulkhead::client::ClientError;
use bulkhead::client::rpc::{AsyncRpcClient, Cancel, Condition, GetRange, PutOptions, RpcClient, RpcOptions, Status};
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::fabric::{Address, Fabric, SharedSpan};
use common::Pattern;
use rpc::{FABRICS, Served, serve};

mod common;
mod rpc;

/// Only turns a hang into a failure.
const PATIENCE: Duration = Duration::from_secs(120);

fn place(served: &Served) -> (Arc<dyn Fabric>, Address) {
    let fabric: Arc<dyn Fabric> = match served.fabric.name() {
        "loopback" => Arc::new(loopback().clone()),
        _ => Arc::new(Iwarp::default()),
    };
    (fabric, served.address.clone())
}

/// Runs `work` beside the daemon, then sees that nothing is left of it.
async fn beside(served: &Served, work: impl FnOnce(Arc<dyn Fabric>, Address) + Send + 'static) {
    let (fabric, address) = place(served);
    let work = tokio::task::spawn_blocking(move || work(fabric, address));
    actix::clock::timeout(PATIENCE, work).await.expect("it ends").unwrap();
    served.until_quiet().await;
}

const fn count(number: u32) -> NonZeroU32 {
    NonZeroU32::new(number).unwrap()
}

fn octets_of(span: &SharedSpan, len: usize) -> Vec<u8> {
    let mut octets = vec![0; len];
    span.copy_out(0, &mut octets);
    octets
}

fn range(key: &str, offset: u64, into: SharedSpan) -> GetRange {
    GetRange { key: key.as_bytes().to_vec(), version: 0, offset, into }
}

/// Segments of 4,099 octets for so many fit a header of 1,024.
const RANGE_BYTES_MAX: usize = 200_000;

/// Values whose messages lie around the threshold, on either side of it, and ones that are long; batches of 64; more calls
/// than there are credits.
fn narrow(client: &mut RpcClient, inline_bytes: usize, is_too_long: bool) {
    let around = [inline_bytes - 400, inline_bytes - 130, inline_bytes - 60, inline_bytes, inline_bytes + 5];
    let mut values = Vec::new();
    for (number, len) in (0..).zip(around.into_iter().chain([0, 1, 70_001, 300_003])) {
        let (key, pattern) = (format!("narrow-{number}"), Pattern(len as u64));
        let value = pattern.octets(0, len);
        let version = client.put(&key, &mut &value[..], len as u64, PutOptions::default()).unwrap();
        values.push((key, len, version));
    }
    for (key, len, version) in &values {
        let mut copy = Vec::new();
        let info = client.get(key, &mut copy).unwrap().unwrap();
        assert_eq!((info.len as usize, info.cas, copy.len()), (*len, *version, *len));
        Pattern(*len as u64).check(0, &copy, "narrow");
        // One octet more and less of memory decides where the reply goes. What a header has no room to name is read in parts.
        for wanted in (len.saturating_sub(3)..len + 3).filter(|wanted| *wanted <= RANGE_BYTES_MAX) {
            let into = SharedSpan::new(wanted.max(1)).unwrap();
            let got = client.get_ranges(&[range(key, 0, into.slice(0..wanted))], None).unwrap();
            assert_eq!((got[0].status, got[0].count as usize), (Status::Ok, wanted.min(*len)), "{wanted} of {len}");
            Pattern(*len as u64).check(0, &octets_of(&into, wanted.min(*len)), "narrow");
        }
    }
    let whole = SharedSpan::new(64 * 4096).unwrap();
    let ranges: Vec<GetRange> =
        (0..64).map(|at| range("narrow-8", at as u64 * 4099, whole.slice(at * 4096..at * 4096 + 4093))).collect();
    for (at, got) in client.get_ranges(&ranges, None).unwrap().iter().enumerate() {
        assert_eq!((got.status, got.count), (Status::Ok, 4093));
        Pattern(300_003).check(at as u64 * 4099, &octets_of(&ranges[at].into, 4093), "batch");
    }
    let calls: Vec<_> =
        ranges.iter().map(|one| client.submit_ranges(std::slice::from_ref(one), None).unwrap()).collect();
    whole.copy_in(0, &[0; 64 * 4096]);
    // The last first: what came meanwhile is kept.
    for (at, call) in calls.into_iter().enumerate().rev() {
        assert_eq!(client.wait_ranges(call).unwrap()[0].count, 4093);
        let found = octets_of(&ranges[at].into, 4093);
        // What landed before the memory was cleared may be gone, but nothing else is there.
        if found.iter().any(|octet| *octet != 0) {
            let first = found.iter().position(|octet| *octet != 0).unwrap();
            Pattern(300_003).check((at * 4099 + first) as u64, &found[first..first + 1], "single");
        }
    }
    let long = client.get_ranges(&[range("narrow-8", 0, SharedSpan::new(300_003).unwrap())], None);
    match (long, is_too_long) {
        (Ok(got), false) => assert_eq!((got[0].status, got[0].count), (Status::Ok, 300_003)),
        (Err(ClientError::Local { source }), true) => assert!(source.to_string().contains("a header of"), "{source}"),
        (long, _) => panic!("{long:?}"),
    }
    let keys: Vec<String> = (0..500).map(|at| format!("narrow-{at}-{}", "k".repeat(at))).collect();
    let stats = client.stats(&keys).unwrap();
    assert!(stats.len() == 500 && stats.iter().all(|stat| stat.status == Status::NotFound));
    let names: Vec<_> = client.list("narrow-").map(|entry| entry.unwrap().key).collect();
    assert!(names.iter().map(|name| &name[..]).eq(values.iter().map(|(key, ..)| key.as_bytes())));
}

#[actix::test]
async fn thresholds_and_credits_of_either_side_change_nothing_but_the_number_of_calls() {
    const THRESHOLDS: [u32; 3] = [1024, 4096, 262_144];
    for fabric in FABRICS {
        for (index, (theirs, their_credits)) in
            THRESHOLDS.into_iter().flat_map(|each| [(each, 1), (each, 64)]).enumerate()
        {
            let served = serve(fabric, &format!("narrow{index}"), |config| {
                config.rpc.inline_bytes = theirs;
                config.rpc.credits_max = their_credits;
            })
            .await;
            let metrics = served.handle.metrics().clone();
            beside(&served, move |fabric, address| {
                for (ours, credits) in THRESHOLDS.into_iter().flat_map(|each| [(each, 1), (each, 64)]) {
                    let options = RpcOptions {
                        inline_bytes: ours,
                        credits: count(credits),
                        crc32c: credits == 1,
                        range_bytes: 60_001,
                        // Odd, and more of them than a message of 1,024 octets names for a long range.
                        segment_bytes_max: count([4099, 1 << 30][index % 2]),
                        ..RpcOptions::default()
                    };
                    let mut client = RpcClient::over(&fabric, address.clone(), options).unwrap();
                    let inline_bytes = ours.min(theirs) as usize;
                    narrow(&mut client, inline_bytes, inline_bytes == 1024 && index % 2 == 0);
                    let before = metrics.rpc_calls.procedures.get("GET");
                    let whole = SharedSpan::new(64 * 8).unwrap();
                    let ranges: Vec<_> =
                        (0..64).map(|at| range("narrow-8", 1, whole.slice(at * 8..at * 8 + 5))).collect();
                    assert!(client.get_ranges(&ranges, None).unwrap().iter().all(|got| got.count == 5));
                    let calls = metrics.rpc_calls.procedures.get("GET") - before;
                    if ours.min(theirs) >= 4096 {
                        assert_eq!(calls, 1, "{ours} and {theirs}");
                    } else {
                        assert!(calls > 1, "{ours} and {theirs}");
                    }
                }
            })
            .await;
            assert!(served.handle.metrics().rpc_calls.dropped.list().is_empty());
            served.shutdown().await;
        }
    }
}

/// Sixty-four ranges of 64 KiB: the batch of the largest values that the thresholds are for.
#[actix::test]
async fn sixty_four_ranges_of_64_kib_are_one_call_from_4096_upwards() {
    for fabric in FABRICS {
        let served = serve(fabric, "sixty-four", |config| {
            config.rpc.inline_bytes = 4096;
            // Of which readers may pin a quarter.
            config.store.memory_bytes = 64 << 20;
        })
        .await;
        let metrics = served.handle.metrics().clone();
        beside(&served, move |fabric, address| {
            const LEN: usize = 65_536;
            let mut client = RpcClient::over(&fabric, address, RpcOptions::default()).unwrap();
            for at in 0..64 {
                let value = Pattern(at).octets(0, LEN);
                client.put(format!("key-{at}"), &mut &value[..], LEN as u64, PutOptions::default()).unwrap();
            }
            let whole = SharedSpan::new(64 * LEN).unwrap();
            let ranges: Vec<GetRange> =
                (0..64).map(|at| range(&format!("key-{at}"), 0, whole.slice(at * LEN..(at + 1) * LEN))).collect();
            let got = client.get_ranges(&ranges, None).unwrap();
            for got in &got {
                assert_eq!((got.status, got.count as usize), (Status::Ok, LEN));
            }
            for (at, range) in (0..).zip(&ranges) {
                Pattern(at).check(0, &octets_of(&range.into, LEN), "one of 64");
            }
            assert_eq!(metrics.rpc_calls.procedures.get("GET"), 1);
        })
        .await;
        served.shutdown().await;
    }
}

const CANARY: u8 = 0xc5;

/// Memory that came back from calls that were given up: all canaries, for ever.
struct Canaries(VecDeque<SharedSpan>);

impl Canaries {
    /// # Panics
    /// If somebody else can reach the memory.
    fn keep(&mut self, mut span: SharedSpan) {
        span.get_mut().expect("it is nobody else's").fill(CANARY);
        self.0.push_back(span);
        if self.0.len() > 64 {
            self.check(32);
        }
    }

    /// Looks at the oldest ones.
    fn check(&mut self, count: usize) {
        for mut span in self.0.drain(..count) {
            let octets = span.get_mut().expect("it is nobody else's still");
            assert!(octets.iter().all(|octet| *octet == CANARY), "a buffer was written to after it was given back");
        }
    }
}

#[actix::test]
async fn memory_of_a_call_given_up_comes_back_fenced_and_is_never_written_to_again() {
    const LEN: usize = 2 << 20;
    const ROUNDS: usize = 250;
    for fabric in FABRICS {
        let served = serve(fabric, "cancel", |_| {}).await;
        beside(&served, |fabric, address| {
            let mut client = RpcClient::over(&fabric, address, RpcOptions::default()).unwrap();
            let value = Pattern(1).octets(0, LEN);
            client.put("k", &mut &value[..], LEN as u64, PutOptions::default()).unwrap();
            let mut canaries = Canaries(VecDeque::new());
            let (mut given_up, mut partial) = (0, 0);
            for round in 0..ROUNDS {
                let when = if round % 4 == 0 { Cancel::Answered } else { Cancel::Now };
                let mut span = SharedSpan::new(LEN).unwrap();
                span.get_mut().unwrap().fill(0xee);
                let call = client.submit_ranges(&[range("k", 0, span.clone())], None).unwrap();
                // Until octets have landed at some place of the value, from the call's first turn on to its last.
                let place = round * (LEN / ROUNDS) / 8 * 8;
                let limit = Instant::now() + PATIENCE;
                while round % 5 > 0 && octets_of(&span.slice(place..place + 8), 8) == [0xee; 8] {
                    assert!(Instant::now() < limit, "no octet lands at {place}");
                    client.progress();
                }
                let is_given_up = client.cancel_ranges(call, when);
                let octets = span.get_mut().expect("fenced, so nobody else's");
                let landed = octets.iter().zip(&value).filter(|(found, sent)| found == sent).count();
                if is_given_up {
                    given_up += 1;
                    partial += usize::from(landed > LEN / 50 && landed < LEN);
                } else {
                    assert!(octets == value, "round {round}: a reply has come, so all of it has");
                }
                canaries.keep(span);
            }
            assert!(given_up > ROUNDS / 2, "{given_up} of {ROUNDS} were given up");
            // Over loopback the daemon's threads copy without this side's turns.
            assert!(
                fabric.name() == "loopback" || partial > ROUNDS / 4,
                "{partial} of {ROUNDS} were given up within the transfer"
            );
            // Whatever was on its way would have come by now.
            client.ping().unwrap();
            let mut copy = Vec::new();
            client.get("k", &mut copy).unwrap().unwrap();
            assert!(copy == value);
            let count = canaries.0.len();
            canaries.check(count);
        })
        .await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn a_put_given_up_stores_what_was_lent_or_nothing() {
    const LEN: usize = 700_003;
    const ROUNDS: u64 = 120;
    for fabric in FABRICS {
        let served = serve(fabric, "cancel-put", |_| {}).await;
        beside(&served, |fabric, address| {
            let mut client = RpcClient::over(&fabric, address, RpcOptions::default()).unwrap();
            let mut given_up = 0;
            for round in 0..ROUNDS {
                let when = if round % 4 == 0 { Cancel::Answered } else { Cancel::Now };
                let mut span = SharedSpan::new(LEN).unwrap();
                Pattern(round).fill(0, span.get_mut().unwrap());
                let call = client.submit_put("k", &span, PutOptions::default()).unwrap();
                for _ in 0..round % 8 {
                    thread::sleep(Duration::from_micros(round % 5 * 40));
                    client.progress();
                }
                given_up += u64::from(client.cancel_put(call, when));
                span.get_mut().expect("fenced, so nobody else's").fill(CANARY);
                let mut copy = Vec::new();
                let stored = client.get("k", &mut copy).unwrap();
                if stored.is_some() {
                    let is_of = |round: &u64| Pattern(*round).octets(0, 64) == copy[..64];
                    let of = (0..=round).rev().find(is_of).expect("a value that was lent");
                    assert_eq!(copy.len(), LEN);
                    Pattern(of).check(0, &copy, "stored");
                }
            }
            assert!(given_up > 8, "{given_up}");
        })
        .await;
        served.shutdown().await;
    }
}

#[actix::test]
async fn futures_dropped_within_a_transfer_give_their_memory_back_once_it_is_fenced() {
    const LEN: usize = 1 << 20;
    for fabric in FABRICS {
        let served = serve(fabric, "dropped", |_| {}).await;
        beside(&served, |fabric, address| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = AsyncRpcClient::over(&fabric, address, RpcOptions::default()).await.unwrap();
                let value = SharedSpan::new(LEN).unwrap();
                value.copy_in(0, &Pattern(2).octets(0, LEN));
                client.put("k", &value, PutOptions::default()).await.unwrap();
                let mut canaries = Canaries(VecDeque::new());
                let mut dropped = 0;
                for round in 0..130_u64 {
                    let mut span = SharedSpan::new(LEN).unwrap();
                    {
                        let wanted = [range("k", 0, span.clone())];
                        let reading = client.get_ranges(&wanted, None);
                        let patience = Duration::from_micros(round % 13 * 150);
                        dropped += u32::from(tokio::time::timeout(patience, reading).await.is_err());
                    }
                    let limit = Instant::now() + PATIENCE;
                    while span.get_mut().is_none() {
                        assert!(Instant::now() < limit, "the memory does not come back");
                        tokio::task::yield_now().await;
                    }
                    canaries.keep(span);
                }
                assert!(dropped > 10, "{dropped}");
                client.ping().await.unwrap();
                let count = canaries.0.len();
                canaries.check(count);
            });
            // The task of the connection goes with its runtime.
            drop(runtime);
        })
        .await;
        served.shutdown().await;
    }
}

/// A TCP proxy that cuts connections: each of the first ones after so many octets in one direction.
struct Cutter {
    address: SocketAddr,
    cuts: Arc<Mutex<VecDeque<(Direction, i64)>>>,
    connections: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Direction {
    ToServer,
    ToClient,
}

impl Cutter {
    fn before(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (cuts, connections) = (Arc::<Mutex<VecDeque<_>>>::default(), Arc::<AtomicU64>::default());
        let (its_cuts, its_connections) = (Arc::clone(&cuts), Arc::clone(&connections));
        thread::spawn(move || {
            for near in listener.incoming() {
                let Ok(near) = near else { return };
                let Ok(far) = TcpStream::connect(server) else { return };
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                its_connections.fetch_add(1, Ordering::Relaxed);
                let cut = its_cuts.lock().unwrap().pop_front();
                for direction in [Direction::ToServer, Direction::ToClient] {
                    let rest = AtomicI64::new(cut.filter(|(of, _)| *of == direction).map_or(i64::MAX, |(_, at)| at));
                    let (near, far) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                    thread::spawn(move || carry(direction, &near, &far, rest.into_inner()));
                }
            }
        });
        Self { address, cuts, connections }
    }

    fn cut(&self, direction: Direction, at: i64) {
        self.cuts.lock().unwrap().push_back((direction, at));
    }
}

/// Carries octets until `rest` of them are through, then cuts both ways.
fn carry(direction: Direction, near: &TcpStream, far: &TcpStream, mut rest: i64) {
    let (mut from, mut to) = match direction {
        Direction::ToServer => (near, far),
        Direction::ToClient => (far, near),
    };
    let mut octets = vec![0; 64 << 10];
    while rest > 0 {
        let room = octets.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
        match from.read(&mut octets[..room]) {
            Ok(count) if count > 0 && to.write_all(&octets[..count]).is_ok() => rest -= count as i64,
            _ => break,
        }
    }
    let _ = near.shutdown(Shutdown::Both);
    let _ = far.shutdown(Shutdown::Both);
}

/// The connection is cut after every so many octets of a conversation, in either direction, and behind each cut the same
/// calls come again on the next: a PUT that is to be the first of its key is, a DELETE finds what it removes.
#[actix::test]
async fn calls_cut_off_anywhere_come_again_with_their_xid_and_nothing_is_done_twice() {
    let served = serve("iwarp", "", |_| {}).await;
    let Address::Socket(server) = served.address else { panic!("no socket") };
    let metrics = served.handle.metrics().clone();
    let its_metrics = metrics.clone();
    beside(&served, move |fabric, _| {
        let cutter = Cutter::before(server);
        let mut made = 0;
        let mut key = 0;
        // Octets of the handshake, a short PUT, a long one, a GET, a DELETE and their answers lie within these.
        let to_server = (0..1200).step_by(31).chain((1200..44_000).step_by(4001));
        let to_client = (0..1200).step_by(31).chain((1200..44_000).step_by(4001));
        let places = to_server.map(|at| (Direction::ToServer, at)).chain(to_client.map(|at| (Direction::ToClient, at)));
        for (direction, at) in places {
            cutter.cut(direction, at);
            // A second cut, so that a call comes three times.
            if at % 2 == 1 {
                cutter.cut(direction, at);
            }
            let options = RpcOptions { attempts_max: count(8), ..RpcOptions::default() };
            let mut client = loop {
                match RpcClient::over(&fabric, Address::Socket(cutter.address), options) {
                    Ok(client) => break client,
                    // Cut within the handshake: whoever begins is told at once.
                    Err(ClientError::Unreachable { .. }) => made += 1,
                    Err(error) => panic!("{error}"),
                }
            };
            made += 1;
            let absent = PutOptions { condition: Condition::Absent, ..PutOptions::default() };
            for len in [100_usize, 40_000] {
                key += 1;
                let name = format!("key-{key}");
                let value = Pattern(key).octets(0, len);
                let version = client.put(&name, &mut &value[..], len as u64, absent);
                let version = version.unwrap_or_else(|error| panic!("{direction:?} {at}, {len} octets: {error}"));
                let mut copy = Vec::new();
                let info = client.get(&name, &mut copy).unwrap().unwrap();
                assert!(info.cas == version && copy == value, "{direction:?} {at}");
                assert!(client.delete(&name).unwrap(), "{direction:?} {at}: removed twice");
                assert!(!client.delete(&name).unwrap());
            }
        }
        let connections = cutter.connections.load(Ordering::Relaxed);
        assert!(connections > made + 30, "{connections} connections, {made} asked for");
        let replayed = its_metrics.rpc_calls.replayed.get();
        assert!(replayed > 5, "{replayed} were answered as before");
    })
    .await;
    served.shutdown().await;
}

/// Values in several calls live in a draft of their connection: the whole of one is stored, or nothing, and who put it knows.
#[actix::test]
async fn a_long_put_that_is_cut_off_is_whole_or_refused_and_the_client_goes_on() {
    const LEN: usize = 1_000_003;
    let served = serve("iwarp", "", |_| {}).await;
    let Address::Socket(server) = served.address else { panic!("no socket") };
    beside(&served, move |fabric, _| {
        let cutter = Cutter::before(server);
        let options = RpcOptions { range_bytes: 100_000, ..RpcOptions::default() };
        let mut client = RpcClient::over(&fabric, Address::Socket(cutter.address), options).unwrap();
        let (mut whole, mut refused) = (0, 0);
        for round in 0..24_u64 {
            // The next connection that is made is cut within this.
            cutter.cut(Direction::ToServer, 700 + round as i64 * 50_000);
            let value = Pattern(round).octets(0, LEN);
            drop(client);
            client = RpcClient::over(&fabric, Address::Socket(cutter.address), options).unwrap();
            let name = format!("key-{round}");
            match client.put(&name, &mut &value[..], LEN as u64, PutOptions::default()) {
                Ok(_) => {
                    whole += 1;
                    let mut copy = Vec::new();
                    client.get(&name, &mut copy).unwrap().unwrap();
                    assert!(copy == value, "round {round}");
                }
                Err(ClientError::Refused { .. }) => {
                    refused += 1;
                    assert_eq!(client.stat(&name).unwrap(), None, "round {round}");
                }
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        assert!(whole > 0 && refused > 10, "{whole} whole, {refused} refused");
    })
    .await;
    served.shutdown().await;
}
