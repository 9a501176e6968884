//! The native door of the real daemon among peers that break every rule there is. Whatever they do costs their own
//! connection, is counted once under its cause and logged once; a client beside them never notices, and in the end
//! nothing is held that was not held before.
//!
//! The mutations run for a few seconds, from a seed that a failure prints. `BULKHEAD_ATTACK_SECONDS` and
//! `BULKHEAD_ATTACK_SEED` say otherwise.

mod common;
#[allow(dead_code, reason = "a peer with manners, of which this needs a part")]
#[path = "native/peer.rs"]
mod peer;
#[path = "native/raw.rs"]
mod raw;

use bulkhead::client::{NativeClient, Options, ServerUrl};
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::fabric::traced::{Traced, What};
use bulkhead::fabric::{self, Address, Cause, Fabric, Flags, RemoteKey, Source, Work, WorkKind};
use bulkhead::wire::iwarp::ddp::{Msn, Untagged};
use bulkhead::wire::iwarp::mpa::{self, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::stream::Sender;
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::ring::{CommitWord, SLOT_BYTES, SLOTS_OFFSET};
use bulkhead::wire::seq::{BulkSequence, ControlSequence};
use common::{Daemon, KIB, MIB, Pattern};
use peer::{Peer, line};
use raw::{Geometry, PATIENCE, Raw, Wire};
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const DEFAULT: Geometry = (256, 256 << 10, 4);

type Samples = BTreeMap<String, f64>;

/// A daemon under attack, and a client that must not notice.
struct Scene {
    daemon: Daemon,
    /// Gauges before anybody came.
    before: Samples,
    /// What fails is only what happens to the good client.
    fault: Arc<Mutex<Option<String>>>,
    rounds: Arc<AtomicU64>,
    done: Arc<AtomicBool>,
    client: Option<std::thread::JoinHandle<()>>,
}

impl Scene {
    fn start(settings: &[(&str, &str)]) -> Self {
        let doors = ["--native", "native+iwarp://127.0.0.1:0", "--native", "native+iwarp://127.0.0.1:0?crc=off"];
        let builder = Daemon::builder().flags(&doors).flags(&["--log-level", "warn,bulkhead=debug"]).memory("64MiB");
        let daemon = settings.iter().fold(builder, |builder, (name, value)| builder.setting(name, value)).start();
        let url: ServerUrl = doors_of(&daemon)[0].parse().unwrap();
        // What is made once, for the first peer of a kind, is not what is looked for.
        drop(NativeClient::connect(url.clone(), Options::default()).unwrap());
        daemon.connect().expect_in_step();
        let start = Instant::now();
        while daemon.metric("bulkhead_connection_current") != Some(0.0) {
            assert!(start.elapsed() < PATIENCE, "the first two stay");
        }
        let before = gauges(&daemon);
        let (fault, rounds, done) = (Arc::default(), Arc::default(), Arc::default());
        let mut scene = Self { daemon, before, fault, rounds, done, client: None };
        let (fault, rounds, done) = (scene.fault.clone(), scene.rounds.clone(), scene.done.clone());
        let (ready, waits) = std::sync::mpsc::channel();
        scene.client = Some(std::thread::spawn(move || {
            let served = std::panic::catch_unwind(|| serve_well(url, &rounds, &done, &ready));
            if let Err(panic) = served {
                let text = panic.downcast_ref::<String>().cloned();
                *fault.lock().unwrap() = Some(text.unwrap_or_else(|| "it panicked".to_owned()));
            }
        }));
        waits.recv().expect("the good client is served");
        scene
    }

    /// The door with CRCs, and the one without.
    fn door(&self, crc: bool) -> SocketAddr {
        let door = &doors_of(&self.daemon)[usize::from(!crc)];
        door.strip_prefix("native+iwarp://").unwrap().split('?').next().unwrap().parse().unwrap()
    }

    /// Stores a value by the text door.
    fn store(&self, key: &str, len: u64) {
        self.daemon.connect().set(key, Pattern(len), len);
    }

    fn causes(&self) -> Samples {
        let mut causes = samples(&self.daemon);
        causes.retain(|name, _| is_cause(name));
        causes
    }

    fn sample(&self, name: &str) -> f64 {
        samples(&self.daemon).get(name).copied().unwrap_or(0.0)
    }

    fn logged(&self, cause: &str) -> usize {
        let needle = format!("cause=\"{cause}\"");
        let log = self.daemon.log();
        log.lines().filter(|line| line.contains("native connection ") && line.contains(&needle)).count()
    }

    /// `attack` costs one connection, or one peer its chance to become one. `kind` is `closed` or `rejected`.
    #[track_caller]
    fn costs_one(&self, what: &str, kind: &str, cause: &str, attack: impl FnOnce()) {
        let (before, logged) = (self.causes(), self.logged(cause));
        let rounds = self.rounds.load(Ordering::SeqCst);
        attack();
        let name = format!("bulkhead_native_connection_{kind}_total{{cause=\"{cause}\"}}");
        let mut expected = before;
        *expected.entry(name).or_default() += 1.0;
        let (start, mut found) = (Instant::now(), self.causes());
        while found != expected {
            assert!(start.elapsed() < PATIENCE, "{what}: {found:?} in place of {expected:?}");
            std::thread::sleep(Duration::from_millis(2));
            found = self.causes();
        }
        while self.logged(cause) != logged + 1 {
            assert!(start.elapsed() < PATIENCE, "{what}: logged {} times", self.logged(cause) - logged);
            std::thread::sleep(Duration::from_millis(2));
        }
        // The good client goes on.
        while self.rounds.load(Ordering::SeqCst) <= rounds {
            self.assert_unnoticed();
            assert!(start.elapsed() < PATIENCE, "{what}: the good client stands still");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[track_caller]
    fn assert_unnoticed(&self) {
        let fault = self.fault.lock().unwrap();
        assert!(fault.is_none(), "the good client: {fault:?}");
    }

    /// All connections but the good client's have ended; every one that was accepted is counted under one cause.
    #[track_caller]
    fn assert_all_ended(&self) {
        let start = Instant::now();
        loop {
            let all = samples(&self.daemon);
            let of = |name: &str| all.get(name).copied().unwrap_or(0.0);
            let closed: f64 =
                all.iter().filter(|(name, _)| name.contains("native_connection_closed")).map(|(_, n)| n).sum();
            let left = of("bulkhead_native_connection_accepted_total") - closed;
            if of("bulkhead_native_connection_current") == 1.0 && of("bulkhead_fabric_half_open") == 0.0 {
                assert_eq!(left, 1.0, "each connection has one cause: {all:?}");
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{left} connections stay: {all:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The good client leaves, and everything is as it was before it came.
    #[track_caller]
    fn end(mut self) {
        let rounds = self.rounds.load(Ordering::SeqCst);
        self.assert_all_ended();
        self.done.store(true, Ordering::SeqCst);
        self.client.take().unwrap().join().unwrap();
        self.assert_unnoticed();
        assert!(rounds > 0);
        self.daemon.assert_nothing_leaks();
        let start = Instant::now();
        loop {
            let now = gauges(&self.daemon);
            let differ: Vec<_> = self.before.iter().filter(|(name, value)| now.get(*name) != Some(value)).collect();
            if differ.is_empty() {
                break;
            }
            let found: Vec<_> = differ.iter().map(|(name, value)| (name, value, now.get(*name))).collect();
            assert!(start.elapsed() < PATIENCE, "not as before: {found:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let (rss, sum) = (self.daemon.rss_max_bytes(), self.daemon.memory_sum_bytes());
        assert!(rss < sum, "{rss} octets were resident, the sum is {sum}");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
    }
}

fn doors_of(daemon: &Daemon) -> Vec<String> {
    daemon.doors().iter().filter(|door| door.starts_with("native+")).cloned().collect()
}

/// Values go in and come back, in flight with each other, until `done`. One connection all the time.
fn serve_well(url: ServerUrl, rounds: &AtomicU64, done: &AtomicBool, ready: &std::sync::mpsc::Sender<()>) {
    let mut client = NativeClient::connect(url, Options::default()).unwrap();
    let mut copy = vec![0; 700 << 10];
    let mut round = 0;
    while !done.load(Ordering::SeqCst) {
        let len = [0, 1, 191, 193, 4096, 300_000, 700 << 10][round as usize % 7];
        let (key, pattern) = (format!("good{}", round % 5), Pattern(round));
        let value = std::io::Cursor::new(pattern.octets(0, len));
        client.submit_set(&key, value, len as u64, round as u32, None).unwrap();
        client.submit_get(&key).unwrap();
        client.submit_get("good-missing").unwrap();
        assert_eq!(client.wait_into(&mut copy).unwrap(), bulkhead::client::Outcome::Stored);
        let found = client.wait_into(&mut copy).unwrap();
        let bulkhead::client::Outcome::Value(info) = found else { panic!("{found:?}") };
        assert_eq!((info.len, info.flags), (len as u64, round as u32));
        pattern.check(0, &copy[..len], "the good client's value");
        assert_eq!(client.wait_into(&mut copy).unwrap(), bulkhead::client::Outcome::Miss);
        round += 1;
        rounds.store(round, Ordering::SeqCst);
        let _ = ready.send(());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_cause(name: &str) -> bool {
    name.starts_with("bulkhead_native_connection_closed") || name.starts_with("bulkhead_native_connection_rejected")
}

fn samples(daemon: &Daemon) -> Samples {
    let text = daemon.admin_get("/metrics");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

/// All gauges but how much memory the process has.
fn gauges(daemon: &Daemon) -> Samples {
    let text = daemon.admin_get("/metrics");
    let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" gauge"));
    let names: Vec<_> = kinds.filter(|name| !name.contains("resident_memory")).collect();
    assert!(names.len() >= 30, "{names:?}");
    samples(daemon).into_iter().filter(|(name, _)| names.contains(&name.as_str())).collect()
}

fn lane() -> Arc<dyn fabric::Lane> {
    Iwarp::default().lane().unwrap()
}

fn vectors(kind: &str) -> Vec<(String, Value, Value)> {
    let all: Value = serde_json::from_str(include_str!("vectors/v3.json")).unwrap();
    let of_kind = all["vectors"].as_array().unwrap().iter().filter(|vector| vector["kind"] == kind);
    let found: Vec<_> = of_kind
        .map(|vector| (vector["id"].as_str().unwrap().to_owned(), vector["given"].clone(), vector["expect"].clone()))
        .collect();
    assert!(!found.is_empty(), "no vectors of {kind}");
    found
}

fn octets(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

/// What a descriptor, a slot, a record or a counter may not be, each on a connection of its own.
#[test]
fn every_malformed_vector_costs_its_connection_and_is_counted_under_its_cause() {
    let scene = Scene::start(&[]);
    let lane = lane();
    scene.store("eight", 8 * 4096);
    let connect = |geometry| Raw::connect(&lane, scene.door(true), geometry);
    let refused = |raw: &mut Raw| assert_eq!(raw.end(), Cause::Peer);
    let mut posed = 0;
    for (id, given, expect) in vectors("desc_decode") {
        let private_data = octets(&given["hex"]);
        let reply = || {
            let mut wire = Wire::dial(scene.door(true));
            let request = Frame { private_data: private_data.clone(), ..Wire::request(DEFAULT, true) };
            wire.say(&request.encode(FrameKind::Request));
            let reply = wire.reply().expect("a Reply");
            (reply.rejected, String::from_utf8_lossy(&reply.private_data).into_owned())
        };
        if expect["accept"].as_bool().unwrap() {
            scene.costs_one(&id, "closed", "peer", || assert!(!reply().0, "{id}"));
        } else {
            let reason = expect["reason"].as_str().unwrap();
            scene.costs_one(&id, "rejected", reason, || assert_eq!(reply(), (true, reason.to_owned()), "{id}"));
        }
        posed += 1;
    }
    for (id, given, expect) in vectors("slot_poll") {
        if expect["state"] != "poison" {
            continue;
        }
        // As on record, but for the sequence: the connection is a fresh one.
        let mut slot = octets(&given["slot_hex"]);
        let word = u64::from_le_bytes(*slot.last_chunk().unwrap());
        let sequence = (word >> 8).wrapping_sub(number(&given["expect_sequence"])).wrapping_add(1);
        let at = slot.len() - 8;
        slot[at..].copy_from_slice(&(sequence << 8 | word & 0xff).to_le_bytes());
        scene.costs_one(&id, "closed", expect["reason"].as_str().unwrap(), || {
            let mut raw = connect(DEFAULT);
            raw.write_ring(SLOTS_OFFSET as u64, &slot);
            refused(&mut raw);
        });
        posed += 1;
    }
    for (id, given, expect) in vectors("frame") {
        if expect["ok"].as_bool().unwrap() {
            continue;
        }
        let cause = match expect["reason"].as_str().unwrap() {
            "length" => "frame_length".to_owned(),
            reason => format!("record_{reason}"),
        };
        scene.costs_one(&id, "closed", &cause, || {
            let mut raw = connect(DEFAULT);
            raw.control(&octets(&given["record_hex"]));
            refused(&mut raw);
        });
        posed += 1;
    }
    for (id, given, expect) in vectors("ready_state") {
        if expect["ok"].as_bool().unwrap() {
            continue;
        }
        let cause = format!("ready_{}", expect["reason"].as_str().unwrap());
        scene.costs_one(&id, "closed", &cause, || {
            let mut raw = connect(DEFAULT);
            assert_eq!(number(&given["max_fragment"]), 256 * KIB);
            raw.inline("set half 0 0 1000000\r\n");
            (1..number(&given["next_rx_sequence"])).for_each(|_| raw.body(b"x"));
            raw.control(&octets(&given["record_hex"]));
            refused(&mut raw);
        });
        posed += 1;
    }
    for (id, given, expect) in vectors("release_state") {
        if expect["ok"].as_bool().unwrap() {
            continue;
        }
        let cause = format!("release_{}", expect["reason"].as_str().unwrap());
        scene.costs_one(&id, "closed", &cause, || {
            let mut raw = connect((256, 4096, 4));
            raw.inline("get eight\r\n");
            // A line and four fragments, then the others.
            raw.await_records(5);
            raw.release(number(&given["released"]));
            assert_eq!(number(&given["next_tx_sequence"]), 9);
            raw.await_records(9);
            raw.control(&octets(&given["record_hex"]));
            refused(&mut raw);
        });
        posed += 1;
    }
    for (id, given, expect) in vectors("credit_read") {
        if expect["ok"].as_bool().unwrap() {
            continue;
        }
        assert_eq!(octets(&given["readback_hex"])[..2], [1, 1], "one more than was sent");
        scene.costs_one(&id, "closed", "credit_ahead", || {
            let mut raw = connect((4, 4096, 4));
            raw.claim_consumed(257);
            raw.inline(&"get nothing\r\n".repeat(400));
            assert_eq!(raw.end_deaf(), Cause::Peer);
        });
        posed += 1;
    }
    assert_eq!(posed, 23 + 5 + 9 + 2 + 2 + 1);
    scene.end();
}

/// A slot's octets for `record` as control record `sequence`.
fn slot_of(record: &Record<'_>, sequence: u64) -> Vec<u8> {
    let mut encoded = [0; 192];
    let len = record.encode(&mut encoded);
    let word = CommitWord::new(ControlSequence::new(sequence).unwrap(), len as u8).word();
    let mut slot = vec![0; SLOT_BYTES - 8 - len];
    slot.extend(&encoded[..len]);
    slot.extend(word.to_le_bytes());
    slot
}

/// What is on no record, in the order of the layers: handshake, frames, memory, records, conversation.
#[test]
fn every_cause_is_met_counted_and_logged() {
    let scene = Scene::start(&[]);
    let (lane, door) = (lane(), scene.door(true));
    scene.store("big", 4 * MIB);
    scene.store("eight", 8 * 4096);
    let request = || Wire::request(DEFAULT, true);

    let handshake = |what: &str, cause: &str, octets: Vec<u8>| {
        scene.costs_one(what, "rejected", cause, || {
            let mut wire = Wire::dial(door);
            wire.say(&octets);
            wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
            wire.hear_the_end();
        });
    };
    let encoded = |frame: &Frame| frame.encode(FrameKind::Request);
    handshake("TCP and a goodbye", "handshake_closed", Vec::new());
    handshake("half a Request", "handshake_closed", encoded(&request())[..50].to_vec());
    handshake("another protocol", "handshake_malformed", b"GET / HTTP/1.1\r\nHost: bulkhead\r\n\r\n".to_vec());
    handshake("a Request and more", "handshake_surplus", [encoded(&request()), vec![0]].concat());
    handshake("markers", "markers", encoded(&Frame { markers: true, ..request() }));
    let mut deaf = request();
    deaf.word.as_mut().unwrap().ird = 0;
    handshake("no Reads", "read_depth", encoded(&deaf));
    scene.costs_one("a reset in the Request", "rejected", "handshake_lost", || {
        let mut wire = Wire::dial(door);
        wire.say(&encoded(&request())[..50]);
        while scene.sample("bulkhead_fabric_half_open") == 0.0 {}
        wire.reset();
    });
    // Half-made connections end by themselves, three at once.
    let mut half_made = vec![Wire::dial(door), Wire::dial(door), Wire::dial(door)];
    half_made[1].say(&encoded(&request())[..30]);
    half_made[2].say(&encoded(&request()));
    assert!(!half_made[2].reply().unwrap().rejected);
    for wire in &mut half_made {
        wire.hear_the_end();
    }
    // Peers may see the end before it is counted.
    let counts = || {
        let rejected = scene.sample("bulkhead_native_connection_rejected_total{cause=\"handshake_timed_out\"}");
        let closed = scene.sample("bulkhead_native_connection_closed_total{cause=\"timed_out\"}");
        (rejected, closed, scene.logged("handshake_timed_out"), scene.logged("timed_out"))
    };
    let start = Instant::now();
    while counts() != (2.0, 1.0, 2, 1) {
        assert!(start.elapsed() < PATIENCE, "{:?}", counts());
        std::thread::sleep(Duration::from_millis(2));
    }

    // Frames.
    let frames = |what: &str, cause: &str, make: &dyn Fn(&Wire) -> Vec<u8>| {
        scene.costs_one(what, "closed", cause, || {
            let mut wire = Wire::connect(door, DEFAULT, true);
            let octets = make(&wire);
            wire.say(&octets);
            if cause == "lost" {
                wire.stream.shutdown(std::net::Shutdown::Write).unwrap();
            }
            wire.hear_the_end();
        });
    };
    frames("a bad CRC", "peer_fault", &|wire| {
        let mut octets = wire.fpdu(1, 0, b"abcd");
        octets[17] ^= 1;
        octets
    });
    frames("a frame of no length", "peer_fault", &|_| vec![0; 12]);
    frames("half a frame", "lost", &|wire| wire.fpdu(1, 0, b"abcd")[..9].to_vec());
    frames("a Terminate", "refused_by_peer", &|_| {
        let mut octets = Vec::new();
        Sender::new(true, 1 << 10).put_terminate(&mut octets, &Terminate::bare(Reason::CRC));
        octets
    });
    let reads = |count: u32, stag: u32, len: u32, address: u64| -> Vec<u8> {
        let one = |msn| {
            let request = ReadRequest { sink_stag: 9, sink_offset: 9, len, source_stag: stag, source_offset: address };
            let control = Operation::ReadRequest.control();
            let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(msn), offset: 0 };
            let mut out = Vec::new();
            mpa::put_fpdu(&mut out, &header.encode(), &request.encode(), true);
            out
        };
        (1..=count).flat_map(one).collect()
    };
    frames("a Read of windows", "peer_fault", &|wire| {
        let at = wire.server.unwrap().window_at(BulkSequence::FIRST);
        reads(1, at.key.0, 8, at.address)
    });
    frames("a Read beyond the ring", "peer_fault", &|wire| {
        let server = wire.server.unwrap();
        reads(1, server.ring_at.key.0, server.ring_bytes, server.ring_at.address + 8)
    });
    frames("more Reads than were agreed on", "peer_fault", &|wire| {
        let server = wire.server.unwrap();
        reads(64, server.ring_at.key.0, server.ring_bytes, server.ring_at.address)
    });

    // Memory.
    let raws = |what: &str, cause: &str, geometry: Geometry, attack: &dyn Fn(&mut Raw)| {
        scene.costs_one(what, "closed", cause, || {
            let mut raw = Raw::connect(&lane, door, geometry);
            attack(&mut raw);
            raw.end();
        });
    };
    raws("a key that opens nothing", "peer_fault", DEFAULT, &|raw| {
        let at = raw.server.ring_at;
        raw.write(RemoteKey(at.key.0 ^ 0x55), at.address + 128, b"abcdefgh");
    });
    raws("beyond the ring", "peer_fault", DEFAULT, &|raw| {
        let bytes = u64::from(raw.server.ring_bytes);
        raw.write_ring(bytes - 4, b"abcdefgh");
    });
    raws("before the windows", "peer_fault", DEFAULT, &|raw| {
        // The half that the server sends from is not there.
        let at = raw.server.bulk_at;
        raw.write(at.key, at.address, b"abcdefgh");
    });
    raws("an address that wraps", "peer_fault", DEFAULT, &|raw| {
        let key = raw.server.ring_at.key;
        raw.write(key, u64::MAX - 3, b"abcdefgh");
    });
    raws("a Send", "peer_fault", DEFAULT, &|raw| {
        raw.post(Work::Send { from: Source::Inline(vec![1]), invalidate: None, flags: Flags::default() });
    });

    // Records.
    raws("five windows of four", "window_overrun", DEFAULT, &|raw| {
        // All seen at once, so none of them can have been given back.
        let ready = |n| Record::Ready { sequence: BulkSequence::new(n).unwrap(), len: NonZeroU32::MIN };
        let mut slots = slot_of(&Record::Inline(b"set k 0 0 9\r\n"), 1).to_vec();
        slots.extend((1..=5).flat_map(|n| slot_of(&ready(n), n + 1)));
        raw.write_ring(SLOTS_OFFSET as u64, &slots);
    });
    raws("a window without a header", "stray_ready", DEFAULT, &|raw| raw.body(b"abc"));
    raws("more than the body", "ready_beyond_body", DEFAULT, &|raw| {
        raw.inline("set k 0 0 3\r\n");
        raw.body(b"abcd");
    });
    raws("a body of text", "inline_body", DEFAULT, &|raw| raw.inline("set k 0 0 3\r\nabc\r\n"));
    raws("no trailer", "trailer", DEFAULT, &|raw| {
        raw.inline("set k 0 0 3\r\n");
        raw.body(b"abc");
        raw.inline("xx");
    });
    raws("a line without an end", "line_too_long", DEFAULT, &|raw| raw.inline(&"x".repeat(8300)));
    raws("a counter that goes back", "credit_regression", (2, 4096, 2), &|raw| {
        // The third record needs a look at the counter, which is 2 by then; and the fifth needs another.
        for count in 1..=3 {
            raw.inline("version\r\n");
            raw.await_records(count);
        }
        raw.claim_consumed(1);
        raw.inline(&"get nothing\r\n".repeat(400));
        raw.end_deaf();
    });

    // And those that do no wrong.
    raws("quit", "quit", DEFAULT, &|raw| raw.inline("quit\r\n"));
    scene.costs_one("a goodbye", "closed", "peer", || drop(Wire::connect(door, DEFAULT, true)));
    scene.costs_one("a reset", "closed", "lost", || {
        let mut wire = Wire::connect(door, DEFAULT, true);
        let octets = wire.inline("version\r\n");
        wire.say(&octets);
        wire.hear(1, PATIENCE);
        wire.reset();
    });
    scene.end();
}

/// Where a Write of a conversation goes, by what the server told of itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Ring,
    Window,
}

/// One Write of a conversation, posted when `after` records of the server had come.
#[derive(Clone, Debug)]
struct Step {
    after: usize,
    place: Place,
    offset: u64,
    octets: Vec<u8>,
}

/// What a peer with manners writes while it stores, reads and deletes, one thing after the other.
fn recorded(door: SocketAddr) -> Vec<Step> {
    let fabric = Traced::new(Arc::new(Iwarp::default()));
    let trace = fabric.trace();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut steps = Vec::new();
    runtime.block_on(async {
        let mut peer = Peer::connect(&fabric, &Address::Socket(door), DEFAULT).await;
        let server = peer.server;
        trace.take();
        let value = Arc::new(Pattern(5).octets(0, 200_000));
        for request in 0..7 {
            match request {
                0 => peer.set("a", 0, &Arc::new(b"abc".to_vec())),
                1 => peer.get("a"),
                2 => peer.set("b", 0, &value),
                3 => peer.get("b"),
                4 => peer.get("a missing b"),
                5 => peer.ask("delete a\r\n", bulkhead::wire::native::requester::Shape::Line),
                _ => peer.ask("touch b 0\r\n", bulkhead::wire::native::requester::Shape::Line),
            }
            while peer.answers.is_empty() {
                // A turn reads first, and posts then.
                peer.turn();
                let after = peer.consumed();
                for entry in trace.take() {
                    let What::Posted { kind: WorkKind::Write, len, target, inline, .. } = entry.what else { continue };
                    let (key, address) = target.unwrap();
                    let octets = inline.unwrap_or_else(|| value[..len].to_vec());
                    let is_ring = key == server.ring_at.key;
                    let base =
                        if is_ring { server.ring_at.address } else { server.window_at(BulkSequence::FIRST).address };
                    let place = if is_ring { Place::Ring } else { Place::Window };
                    steps.push(Step { after, place, offset: address - base, octets });
                }
                tokio::task::yield_now().await;
            }
            let answer = peer.answers.pop_front().unwrap();
            match request {
                0 | 2 => assert_eq!(answer, line("STORED")),
                5 => assert_eq!(answer, line("DELETED")),
                6 => assert_eq!(answer, line("TOUCHED")),
                _ => assert!(matches!(answer, peer::Answered::Values(_))),
            }
        }
    });
    steps
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % below as u64) as usize
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |value| value.parse().expect("a whole number"))
}

/// Replays `steps`, of which step `n` of `wrong` goes to a wrong place. True if the last answer came.
fn replay(raw: &mut Raw, steps: &[Step], wrong: &[(usize, u32, u64)]) -> bool {
    for (index, step) in steps.iter().enumerate() {
        // What was changed may make the server wait for ever, or say less than it did.
        raw.until(Duration::from_millis(10), |raw| raw.records.len() >= step.after);
        if raw.ended.is_some() {
            return false;
        }
        let (base, key) = match step.place {
            Place::Ring => (raw.server.ring_at.address, raw.server.ring_at.key),
            Place::Window => (raw.server.window_at(BulkSequence::FIRST).address, raw.server.bulk_at.key),
        };
        let (key_mask, address_mask) =
            wrong.iter().find(|(at, ..)| *at == index).map_or((0, 0), |(_, key, address)| (*key, *address));
        raw.write(RemoteKey(key.0 ^ key_mask), base.wrapping_add(step.offset) ^ address_mask, &step.octets);
    }
    raw.until(Duration::from_millis(10), |raw| raw.text().ends_with("TOUCHED\r\n"))
}

/// Changes a conversation on the fabric: flips, lengths, order, what is missing and what comes twice, keys and addresses.
fn mutate(steps: &mut Vec<Step>, dice: &mut Dice) -> Vec<(usize, u32, u64)> {
    let mut wrong = Vec::new();
    for _ in 0..=dice.roll(3) {
        let at = dice.roll(steps.len());
        let octets = &mut steps[at].octets;
        match dice.roll(9) {
            0 | 1 => {
                let bit = dice.roll(octets.len() * 8);
                octets[bit / 8] ^= 1 << (bit % 8);
            }
            2 => {
                let len = dice.roll(octets.len()).max(1);
                octets.truncate(len);
            }
            3 => octets.resize(octets.len() + 1 + dice.roll(600), dice.roll(256) as u8),
            4 => {
                let other = dice.roll(steps.len());
                steps.swap(at, other);
            }
            5 if steps.len() > 1 => drop(steps.remove(at)),
            6 => {
                let twice = steps[at].clone();
                steps.insert(dice.roll(steps.len()), twice);
            }
            7 => wrong.push((at, 1 << dice.roll(32), 0)),
            _ => wrong.push((at, 0, 1 << dice.roll(64))),
        }
    }
    wrong
}

#[test]
fn mutated_conversations_cost_their_connections_and_nothing_else() {
    let scene = Scene::start(&[("TIMERS__STALL_TIMEOUT", "2s")]);
    let limit = Duration::from_secs(setting("BULKHEAD_ATTACK_SECONDS", 5));
    let seed = setting("BULKHEAD_ATTACK_SEED", 1);
    let steps = recorded(scene.door(true));
    let start = Instant::now();
    let (mut by_fabric, mut by_octets) = (0_u64, 0_u64);
    std::thread::scope(|scope| {
        let (scene, steps) = (&scene, &steps);
        let by_fabric = &mut by_fabric;
        scope.spawn(move || {
            let lane = lane();
            let mut dice = Dice(seed);
            // As it was recorded, it is answered as it was.
            assert!(replay(&mut Raw::connect(&lane, scene.door(true), DEFAULT), steps, &[]), "no mutation");
            while start.elapsed() < limit {
                let mut changed = steps.clone();
                let wrong = mutate(&mut changed, &mut dice);
                let mut raw = Raw::connect(&lane, scene.door(true), DEFAULT);
                replay(&mut raw, &changed, &wrong);
                drop(raw);
                *by_fabric += 1;
                let fault = scene.fault.lock().unwrap();
                assert!(fault.is_none(), "seed {seed}, conversation {by_fabric}: {fault:?}");
            }
        });
        let by_octets = &mut by_octets;
        scope.spawn(move || {
            let mut dice = Dice(seed ^ 0xffff);
            while start.elapsed() < limit {
                mutated_octets(scene, &mut dice);
                *by_octets += 1;
                let fault = scene.fault.lock().unwrap();
                assert!(fault.is_none(), "seed {seed}, stream {by_octets}: {fault:?}");
            }
        });
    });
    assert!(by_fabric > 20 && by_octets > 100, "{by_fabric} conversations, {by_octets} streams");
    scene.assert_all_ended();
    eprintln!("{by_fabric} conversations and {by_octets} streams changed: {:?}", scene.causes());
    let all = samples(&scene.daemon);
    let of = |name: &str| all.iter().filter(|(sample, _)| sample.starts_with(name)).map(|(_, n)| n).sum::<f64>();
    // The warm-up, the good client, what was recorded and its replay; and every socket is one or the other.
    let came = of("bulkhead_native_connection_accepted_total") + of("bulkhead_native_connection_rejected_total");
    assert_eq!(came, 4.0 + by_fabric as f64 + by_octets as f64);
    scene.end();
}

/// A whole conversation on one stream, changed anywhere from the first octet of the Request on.
fn mutated_octets(scene: &Scene, dice: &mut Dice) {
    let crc = dice.roll(4) == 0;
    let mut wire = Wire::dial(scene.door(crc));
    let mut octets = Wire::request(DEFAULT, crc).encode(FrameKind::Request);
    let change = |octets: &mut Vec<u8>, dice: &mut Dice| {
        for _ in 0..=dice.roll(2) {
            let at = dice.roll(octets.len());
            match dice.roll(6) {
                0 | 1 => octets[at] ^= 1 << dice.roll(8),
                2 => octets.truncate(at.max(1)),
                3 => octets.insert(at, dice.roll(256) as u8),
                4 if octets.len() > 1 => drop(octets.remove(at)),
                _ => {
                    let len = dice.roll(octets.len() - at).min(300);
                    let part: Vec<u8> = octets.drain(at..at + len).collect();
                    let to = dice.roll(octets.len() + 1);
                    octets.splice(to..to, part);
                }
            }
            if octets.is_empty() {
                octets.push(0);
            }
        }
    };
    let in_request = dice.roll(8) == 0;
    if in_request {
        change(&mut octets, dice);
    }
    let say = |wire: &Wire, octets: &[u8]| std::io::Write::write_all(&mut &wire.stream, octets).is_ok();
    say(&wire, &octets);
    if in_request {
        // No answer comes of what is incomplete: it is given up here.
        wire.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    }
    if wire.reply().is_none_or(|reply| reply.rejected) || wire.server.is_none() {
        return;
    }
    let mut octets = wire.fpdu(1, 0, b"");
    for (index, len) in [3, 5000, 40_000].into_iter().enumerate() {
        octets.extend(wire.inline(&format!("set o{index} 0 0 {len}\r\n")));
        octets.extend(wire.body(index as u64 + 1, &Pattern(9).octets(0, len)));
        octets.extend(wire.inline(&format!("\r\nget o{index}\r\n")));
    }
    octets.extend(wire.inline("delete o1\r\ntouch o0 0\r\nstats\r\n"));
    change(&mut octets, dice);
    let cut = 1 + dice.roll(20_000);
    if octets.chunks(cut).all(|part| say(&wire, part)) {
        wire.hear(30_000, Duration::from_millis(2 + dice.roll(4) as u64));
    }
    if dice.roll(3) == 0 {
        wire.reset();
    }
}

/// Where a peer of the crowd stops.
const STAGES: usize = 9;

/// A peer that has come as far as `stage`, and no further.
fn stopped_at(scene: &Scene, stage: usize, n: usize) -> Wire {
    let door = scene.door(true);
    if stage < 3 {
        let mut wire = Wire::dial(door);
        let request = Wire::request(DEFAULT, true).encode(FrameKind::Request);
        // Nothing; within the private data; all but the ready-to-receive frame.
        wire.say(&request[..[0, request.len() - 1 - n % 50, request.len()][stage]]);
        if stage == 2 {
            assert!(!wire.reply().unwrap().rejected);
        }
        return wire;
    }
    let geometry = match stage {
        6 => (8, 4096, 2),
        7 => (2, 4096, 2),
        _ => DEFAULT,
    };
    let mut wire = Wire::connect(door, geometry, true);
    match stage {
        3 => {}
        // In the middle of a GET: a part of its octets was taken.
        4 => {
            let octets = wire.inline("get big\r\n");
            wire.say(&octets);
            wire.hear(1 + n * 100, PATIENCE);
        }
        // In the middle of a SET.
        5 => {
            let mut octets = wire.inline(&format!("set half{n} 0 0 {}\r\n", 3 * MIB));
            octets.extend(wire.body(1, &Pattern(n as u64).octets(0, 1 + n * 300)));
            wire.say(&octets);
        }
        // Windows that are never released.
        6 => {
            let octets = wire.inline("get eight\r\n");
            wire.say(&octets);
            wire.hear(4096, PATIENCE);
        }
        // A ring that is full.
        7 => {
            let octets = wire.inline(&"get nothing\r\n".repeat(200));
            wire.say(&octets);
            wire.hear(1, PATIENCE);
        }
        // Within a frame.
        _ => {
            let octets = wire.inline("get nothing\r\n");
            wire.say(&octets[..1 + n % (octets.len() - 1)]);
        }
    }
    wire
}

#[test]
fn five_hundred_peers_killed_or_stalled_at_every_stage_leave_nothing() {
    let limits = [("TIMERS__STALL_TIMEOUT", "2s"), ("NATIVE__CONNECTIONS_MAX", "600")];
    let scene = Scene::start(&limits);
    scene.store("big", 4 * MIB);
    scene.store("eight", 8 * 4096);
    let mut crowd: Vec<(usize, Wire)> = Vec::new();
    for n in 0..500 {
        let stage = n % STAGES;
        let wire = stopped_at(&scene, stage, n);
        match n / STAGES % 3 {
            0 => drop(wire),
            1 => wire.reset(),
            _ => crowd.push((stage, wire)),
        }
    }
    // Who waits for the server or owes it something is cut; who is idle is not.
    let stalled = crowd.iter().filter(|(stage, _)| (4..=7).contains(stage)).count() as f64;
    let silent = |stage: usize| crowd.iter().filter(|(at, _)| *at == stage).count() as f64;
    let (in_request, unready) = (silent(0) + silent(1), silent(2));
    let start = Instant::now();
    let expected = [
        ("bulkhead_native_connection_closed_total{cause=\"stalled\"}", stalled),
        ("bulkhead_native_connection_closed_total{cause=\"timed_out\"}", unready),
        ("bulkhead_native_connection_rejected_total{cause=\"handshake_timed_out\"}", in_request),
        ("bulkhead_native_connection_current", 1.0 + silent(3) + silent(8)),
    ];
    loop {
        let all = samples(&scene.daemon);
        let found = expected.map(|(name, _)| (name, all.get(name).copied().unwrap_or(0.0)));
        if found == expected {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{found:?} in place of {expected:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    while scene.logged("stalled") as f64 != stalled {
        assert!(start.elapsed() < PATIENCE, "logged {} times", scene.logged("stalled"));
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(crowd);
    scene.assert_all_ended();
    let all = samples(&scene.daemon);
    let of = |name: &str| all.iter().filter(|(sample, _)| sample.starts_with(name)).map(|(_, n)| n).sum::<f64>();
    let came = of("bulkhead_native_connection_accepted_total") + of("bulkhead_native_connection_rejected_total");
    assert_eq!(came, 2.0 + 500.0, "each is counted once");
    scene.end();
}
