//! The native door on one lane of a test, over fabrics in this process.

use crate::actors::cq_poller::CqPoller;
use crate::actors::disk_tail::{HoldReads, OnRead};
use crate::actors::fabric_listener::{FabricDoor, FabricListener};
use crate::actors::listener::{Refuse, Registry};
use crate::actors::native_connection::NativeProtocol;
use crate::actors::rig::{Rig, converse, octets, set, until, value_reply};
use crate::config::{Config, NativeConfig};
use crate::fabric::faulty::{Faults, Faulty};
use crate::fabric::iwarp::Iwarp;
use crate::fabric::loopback::Loopback;
use crate::fabric::traced::{Entry, Trace, Traced, What};
use crate::fabric::{Address, Fabric, Resources, WorkKind};
use crate::metrics::Causes;
use crate::store::pool::ExtentId;
use crate::wire::native::descriptor::{RingGeometry, WindowGeometry};
use crate::wire::native::record::Record;
use crate::wire::native::requester::Shape;
use actix::prelude::*;
use peer::{Answered, Dialled, Geometry, Peer, assert_value, line};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;

#[path = "../../tests/native/peer.rs"]
mod peer;

const DEFAULT: Geometry = (256, 256 << 10, 4);
const SIZES: [usize; 11] = [0, 1, 191, 192, 193, 4096, 262_143, 262_144, 262_145, 1 << 20, 8 << 20];

/// A door over `fabric`, and the same fabric for its peers.
struct Door {
    rig: Rig,
    fabric: Arc<dyn Fabric>,
    address: Address,
    listener: Addr<FabricListener<NativeProtocol>>,
    lanes: Vec<Arc<dyn crate::fabric::Lane>>,
    places: Arc<Semaphore>,
}

const PLACES: usize = 300;

fn native(geometry: Geometry) -> NativeConfig {
    let (slots, window_bytes, window_count) = geometry;
    NativeConfig {
        windows: WindowGeometry::new(window_bytes, window_count).unwrap(),
        ring: RingGeometry::new(slots).unwrap(),
        connections_max: PLACES,
        allow: Vec::new(),
    }
}

impl Door {
    /// The server's side goes through `server`, peers through `client`.
    fn open(rig: Rig, server: &dyn Fabric, client: Arc<dyn Fabric>, address: &Address, geometry: Geometry) -> Self {
        let door = FabricDoor::bind(server, address, &native(geometry), 1).unwrap();
        let (address, lanes) = (door.address(), door.lanes().to_vec());
        let places = Arc::new(Semaphore::new(PLACES));
        let lane = [(Arbiter::current(), rig.lane.clone())];
        let metrics = rig.metrics.clone();
        let listener = FabricListener::open(door, &lane, places.clone(), Registry::default(), metrics);
        Self { rig, fabric: client, address, listener, lanes, places }
    }

    fn loopback(geometry: Geometry) -> Self {
        let network = Loopback::new();
        let address = Address::Name("door".to_owned());
        Self::open(rig(), &network, Arc::new(network.clone()), &address, geometry)
    }

    fn loopback_with(geometry: Geometry, change: impl FnOnce(&mut Config)) -> Self {
        let rig = Rig::new(|config| {
            config.store.value_bytes_max = 16 << 20;
            change(config);
        });
        let network = Loopback::new();
        let address = Address::Name("door".to_owned());
        Self::open(rig, &network, Arc::new(network.clone()), &address, geometry)
    }

    fn iwarp(geometry: Geometry) -> Self {
        let fabric = Iwarp::default();
        let address = Address::Socket(([127, 0, 0, 1], 0).into());
        Self::open(rig(), &fabric, Arc::new(fabric), &address, geometry)
    }

    /// A door over loopback whose work requests are logged.
    fn traced(rig: Rig, geometry: Geometry) -> (Self, Trace) {
        let network = Loopback::new();
        let server = Traced::new(Arc::new(network.clone()));
        let address = Address::Name("traced".to_owned());
        (Self::open(rig, &server, Arc::new(network), &address, geometry), server.trace())
    }

    /// Whether reads that the disk has done stay unanswered from now on.
    async fn hold_reads(&self, holds: bool) {
        self.rig.lane.tail.send(HoldReads(holds)).await.unwrap();
    }

    async fn connect(&self, geometry: Geometry) -> Peer {
        Peer::connect(&*self.fabric, &self.address, geometry).await
    }

    /// Waits until nothing is left of any connection.
    async fn assert_quiet(&self) {
        let native = &self.rig.metrics.native;
        until("all connections have ended", || native.current.get() == 0).await;
        until("the fabric has let go of them", || {
            let Resources { queue_pairs, regions, half_open, .. } = self.lanes[0].resources();
            (queue_pairs, regions, half_open) == (0, 0, 0)
        })
        .await;
        assert_eq!(self.rig.metrics.connections.current.get(), 0);
        let gauges = self.rig.store.gauges();
        assert_eq!((gauges.pins, gauges.claims, gauges.claimed_bytes, gauges.pinned_bytes), (0, 0, 0, 0));
        let staging = &self.rig.lane.staging;
        until("all staging buffers are back", || staging.available() == staging.count()).await;
        until("all places among the connections are back", || self.places.available_permits() == PLACES).await;
    }
}

fn rig() -> Rig {
    Rig::new(|config| config.store.value_bytes_max = 16 << 20)
}

async fn round_trips(door: &Door, geometry: Geometry) {
    let mut peer = door.connect(geometry).await;
    for (seed, size) in SIZES.into_iter().enumerate() {
        let (key, value) = (format!("k{size}"), Arc::new(octets(size, seed as u32)));
        peer.set(&key, seed as u32, &value);
        assert_eq!(peer.answer().await, line("STORED"), "{size}");
        peer.get(&key);
        assert_value(peer.answer().await, &key, seed as u32, &value);
    }
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn values_of_all_sizes_come_back_over_loopback() {
    let door = Door::loopback(DEFAULT);
    round_trips(&door, DEFAULT).await;
    assert_eq!(door.rig.metrics.native.ends.list(), [("peer", 1)]);
}

#[actix::test]
async fn values_of_all_sizes_come_back_over_iwarp() {
    let door = Door::iwarp(DEFAULT);
    round_trips(&door, DEFAULT).await;
}

#[actix::test]
async fn unequal_geometries_agree() {
    for (server, client) in [
        ((2, 4096, 2), DEFAULT),
        (DEFAULT, (2, 4096, 2)),
        ((2, 4096, 2), (2, 4096, 2)),
        ((64, 1 << 20, 8), (8, 8192, 3)),
        ((256, 1 << 20, 8), (256, 1 << 20, 8)),
        ((3, 65_536, 2), (64, 1 << 20, 8)),
    ] {
        let door = Door::loopback(server);
        let mut peer = door.connect(client).await;
        for size in [0, 1, 4097, 300_001, 2_000_003] {
            let value = Arc::new(octets(size, 3));
            peer.set("key", 1, &value);
            peer.get("key");
            let answers = peer.answers(2).await;
            assert_eq!(answers[0], line("STORED"));
            assert_value(answers[1].clone(), "key", 1, &value);
        }
        drop(peer);
        door.assert_quiet().await;
    }
}

#[actix::test]
async fn values_on_disk_come_back_whatever_the_windows() {
    for geometry in [DEFAULT, (16, 4096, 2), (64, 65_536, 4), (64, 1 << 20, 8)] {
        let door = Door::loopback(geometry);
        let value = Arc::new(octets(2_000_003, 9));
        door.rig.local.put(b"cold", &value, 5, 0).await.unwrap();
        assert!(door.rig.push_out(b"cold").await >= 6);
        let mut peer = door.connect(geometry).await;
        let counters = door.rig.store.counters();
        for _ in 0..2 {
            peer.get("cold");
            assert_value(peer.answer().await, "cold", 5, &value);
        }
        assert!(counters.warmed_bytes.load(Ordering::Relaxed) >= 1 << 20, "{geometry:?}: read again, back in RAM");
        drop(peer);
        door.assert_quiet().await;
    }
}

#[actix::test]
async fn sixty_four_requests_in_flight_are_answered_in_order() {
    for door in [Door::loopback((8, 65_536, 2)), Door::iwarp((8, 65_536, 2))] {
        let mut peer = door.connect((16, 65_536, 4)).await;
        let values: Vec<_> = (0..8).map(|seed| Arc::new(octets(seed as usize * 40_000, seed))).collect();
        for round in 0..4 {
            for (index, value) in values.iter().enumerate() {
                peer.set(&format!("k{index}"), round, value);
                peer.get(&format!("k{index}"));
            }
        }
        assert_eq!(peer.endpoint.machine.unanswered_count(), 64);
        let answers = peer.answers(64).await;
        for (at, pair) in answers.chunks(2).enumerate() {
            let (round, index) = (at / 8, at % 8);
            assert_eq!(pair[0], line("STORED"));
            assert_value(pair[1].clone(), &format!("k{index}"), round as u32, &values[index]);
        }
        drop(peer);
        door.assert_quiet().await;
    }
}

#[actix::test]
async fn both_doors_see_the_same_objects() {
    let door = Door::loopback(DEFAULT);
    let (_connection, mut text) = door.rig.connect();
    let mut peer = door.connect(DEFAULT).await;
    for size in [0, 1, 5000, 262_145] {
        let value = Arc::new(octets(size, 4));
        peer.set("native", 0, &value);
        assert_eq!(peer.answer().await, line("STORED"));
        converse(&mut text, b"get native\r\n", &value_reply("native", &value)).await;
        converse(&mut text, &set("text", &value), b"STORED\r\n").await;
        peer.get("text native nothing");
        let Answered::Values(found) = peer.answer().await else { panic!("no values") };
        let expected = [("text".to_owned(), 0, value.to_vec()), ("native".to_owned(), 0, value.to_vec())];
        assert!(found == expected, "{size}");
    }
    peer.ask("incr nothing 1\r\n", Shape::Line);
    peer.ask("delete text\r\n", Shape::Line);
    peer.ask("frob\r\n", Shape::Line);
    let answers = peer.answers(3).await;
    assert_eq!(answers, [line("NOT_FOUND"), line("DELETED"), line("ERROR")]);
}

#[actix::test]
async fn a_body_that_is_refused_is_drained_and_its_windows_come_back() {
    let door = Door::loopback((16, 65_536, 2));
    let mut peer = door.connect((16, 65_536, 2)).await;
    let (large, small) = (Arc::new(octets(17 << 20, 1)), Arc::new(octets(100_000, 2)));
    peer.set("large", 0, &large);
    peer.set("small", 0, &small);
    peer.get("small");
    let answers = peer.answers(3).await;
    assert_eq!(answers[..2], [line("SERVER_ERROR object too large for cache"), line("STORED")]);
    assert_value(answers[2].clone(), "small", 0, &small);
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn peers_that_vanish_in_the_middle_leave_nothing() {
    for over_iwarp in [false, true] {
        let door = if over_iwarp { Door::iwarp(DEFAULT) } else { Door::loopback(DEFAULT) };
        let value = Arc::new(octets(4 << 20, 6));
        door.rig.local.put(b"cold", &value, 0, 0).await.unwrap();
        door.rig.push_out(b"cold").await;
        let total = 40;
        for round in 0..total {
            let mut peer = door.connect(DEFAULT).await;
            match round % 3 {
                0 => (0..8).for_each(|_| peer.get("cold")),
                1 => peer.set("half", 0, &value),
                _ => {}
            }
            for _ in 0..round {
                peer.turn();
                tokio::task::yield_now().await;
            }
            if round % 2 == 0 {
                peer.qp.disconnect();
            }
        }
        door.assert_quiet().await;
        let ends = &door.rig.metrics.native.ends;
        assert_eq!(ends.list().iter().map(|(_, count)| count).sum::<u64>(), total, "{:?}", ends.list());
        // Whoever comes next is served as if nothing had happened.
        let mut peer = door.connect(DEFAULT).await;
        peer.get("cold");
        assert_value(peer.answer().await, "cold", 0, &value);
    }
}

/// A peer was cut as stalled while all that it waited for was a read of the daemon's own.
#[actix::test]
async fn a_read_that_takes_long_is_no_stall_of_the_peer() {
    let rig = Rig::new(|config| config.timers.stall_timeout = Duration::from_millis(100));
    let network = Loopback::new();
    let address = Address::Name("slow".to_owned());
    let door = Door::open(rig, &network, Arc::new(network.clone()), &address, DEFAULT);
    let value = Arc::new(octets(2 << 20, 6));
    door.rig.local.put(b"cold", &value, 0, 0).await.unwrap();
    door.rig.push_out(b"cold").await;
    let mut peer = door.connect(DEFAULT).await;
    door.hold_reads(true).await;
    peer.get("cold");
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(600) {
        peer.turn();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(door.rig.metrics.native.ends.list(), []);
    door.hold_reads(false).await;
    assert_value(peer.answer().await, "cold", 0, &value);
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn a_fabric_that_fails_costs_connections_and_nothing_else() {
    let faults = Faults {
        drop_per_mille: 5,
        delay_per_mille: 200,
        hold_per_mille: 200,
        refuse_per_mille: 100,
        shortage_per_mille: 20,
    };
    for seed in 0..4 {
        let network = Loopback::new();
        let server = Faulty::new(Arc::new(network.clone()), seed, faults);
        let address = Address::Name("faulty".to_owned());
        let door = Door::open(rig(), &server, Arc::new(network), &address, (16, 65_536, 4));
        let value = Arc::new(octets(700_000, seed as u32));
        let mut whole = 0;
        for _ in 0..40 {
            let dialled = Peer::dial(&*door.fabric, &door.address, (16, 65_536, 4), |_| {}).await;
            let Dialled::Connected(mut peer) = dialled else { continue };
            for _ in 0..3 {
                peer.set("key", 0, &value);
                peer.get("key");
            }
            let start = std::time::Instant::now();
            while peer.answers.len() < 6 && peer.ended.is_none() {
                assert!(start.elapsed() < peer::PATIENCE, "seed {seed} stands still");
                peer.turn();
                tokio::time::sleep(Duration::from_micros(100)).await;
            }
            for answer in peer.answers.drain(..) {
                match answer {
                    Answered::Line(text) => assert_eq!(text, "STORED"),
                    values => {
                        whole += 1;
                        assert_value(values, "key", 0, &value);
                    }
                }
            }
        }
        assert!(whole > 0, "seed {seed}");
        door.assert_quiet().await;
        // Who was not established was counted as accepted, as rejected and as ended.
        let native = &door.rig.metrics.native;
        let sum = |causes: &Causes| causes.list().iter().map(|(_, count)| count).sum::<u64>();
        assert_eq!(native.total.get(), sum(&native.ends), "{:?}", native.ends.list());
        assert_eq!(native.total.get() + sum(&native.rejections), 40, "{:?}", native.rejections.list());
        assert_eq!(native.ends.get("shutdown"), 0, "{:?}", native.ends.list());
    }
}

#[actix::test]
async fn bad_descriptors_are_rejected_and_counted_by_cause() {
    let door = Door::loopback(DEFAULT);
    for (at, cause) in [(0, "magic"), (5, "version")] {
        let dialled = Peer::dial(&*door.fabric, &door.address, DEFAULT, |octets| octets[at] ^= 0xff).await;
        let Dialled::Rejected(why) = dialled else { panic!("{cause}: not rejected") };
        assert_eq!(String::from_utf8(why).unwrap(), cause);
        assert_eq!(door.rig.metrics.native.rejections.get(cause), 1);
    }
    let short = Peer::dial(&*door.fabric, &door.address, DEFAULT, |octets| octets.truncate(20)).await;
    assert!(matches!(short, Dialled::Rejected(_)));
    assert_eq!(door.rig.metrics.connections.rejected.get(), 3);
    door.assert_quiet().await;
}

#[actix::test]
async fn a_peer_that_breaks_the_protocol_is_alone_in_losing_its_connection() {
    let door = Door::loopback(DEFAULT);
    let mut good = door.connect(DEFAULT).await;
    let mut bad = door.connect(DEFAULT).await;
    // A body of text where windows are due.
    bad.ask("set key 0 0 3\r\nabc\r\n", Shape::Line);
    bad.end().await;
    assert_eq!(door.rig.metrics.native.ends.list(), [("inline_body", 1)]);
    good.get("nothing");
    assert_eq!(good.answer().await, Answered::Values(Vec::new()));
}

#[actix::test]
async fn quit_is_obeyed_once_earlier_answers_have_reached_the_peer() {
    for door in [Door::loopback(DEFAULT), Door::iwarp(DEFAULT)] {
        let value = Arc::new(octets(3 << 20, 6));
        door.rig.local.put(b"key", &value, 0, 0).await.unwrap();
        let mut peer = door.connect(DEFAULT).await;
        peer.get("key");
        peer.endpoint.outbound.text(b"quit\r\n");
        assert_value(peer.answer().await, "key", 0, &value);
        peer.end().await;
        door.assert_quiet().await;
        assert_eq!(door.rig.metrics.native.ends.list(), [("quit", 1)]);
    }
}

#[actix::test]
async fn a_megabyte_in_ram_is_four_writes_and_four_ready_records_and_few_messages() {
    let (door, trace) = Door::traced(rig(), DEFAULT);
    let value = Arc::new(octets(1 << 20, 6));
    let mut peer = door.connect(DEFAULT).await;
    peer.set("key", 0, &value);
    peer.answer().await;
    trace.take();
    let messages = &door.rig.metrics.connections.messages;
    let before = messages.get();
    peer.get("key");
    assert_value(peer.answer().await, "key", 0, &value);
    let count = messages.get() - before;
    assert!(count <= 24, "{count} messages");
    let lens: Vec<usize> = trace
        .take()
        .into_iter()
        .filter_map(|entry| match entry.what {
            What::Posted { kind: WorkKind::Write, len, .. } => Some(len),
            _ => None,
        })
        .collect();
    assert_eq!(lens.iter().filter(|len| **len == 256 << 10).count(), 4, "{lens:?}");
    // READY: 16 octets of record and 8 of commit word, or whatever it is: all others but VALUE line and trailer.
    let text = b"VALUE key 0 1048576\r\n".len();
    let control: Vec<_> = lens.iter().filter(|len| **len < 256).collect();
    assert_eq!(control.len(), 4 + 2, "four READY, a line of {text}, a trailer: {lens:?}");
}

#[actix::test]
async fn a_megabyte_set_is_few_messages_and_none_of_them_for_a_window() {
    let door = Door::loopback(DEFAULT);
    let mut peer = door.connect(DEFAULT).await;
    let messages = &door.rig.metrics.connections.messages;
    let mut counts = Vec::new();
    for len in [64 << 10, 1 << 20, 4 << 20] {
        let value = Arc::new(octets(len, 6));
        let before = messages.get();
        peer.set("key", 0, &value);
        assert_eq!(peer.answer().await, line("STORED"));
        counts.push(messages.get() - before);
    }
    // Batches of four windows; the leases in them cost nothing.
    assert!(counts[0] <= 8 && counts[1] <= 16 && counts[2] <= 64, "{counts:?}");
}

#[actix::test]
async fn a_peer_that_asks_and_asks_and_takes_no_answer_is_closed_for_it() {
    let mut rig = rig();
    rig.lane.timers.stall_timeout = Duration::from_millis(200);
    let network = Loopback::new();
    let address = Address::Name("deep".to_owned());
    let door = Door::open(rig, &network, Arc::new(network.clone()), &address, DEFAULT);
    let value = Arc::new(octets(4 << 20, 6));
    door.rig.local.put(b"k", &value, 0, 0).await.unwrap();
    let mut peer = door.connect(DEFAULT).await;
    peer.is_deaf = true;
    peer.endpoint.outbound.text("get k\r\n".repeat(200_000).as_bytes());
    peer.end().await;
    assert_eq!(door.rig.metrics.native.ends.list(), [("pipeline_too_deep", 1)]);
    drop(peer);
    door.assert_quiet().await;
}

/// Only text: a RELEASE behind text without room could not be reached, and such a peer is closed.
#[actix::test]
async fn text_beyond_the_input_buffer_is_read_as_answers_leave() {
    let door = Door::loopback(DEFAULT);
    let mut peer = door.connect(DEFAULT).await;
    let count = 80_000;
    let line = "get nothing-that-could-be-found-here\r\n";
    (0..count).for_each(|_| peer.endpoint.outbound.text(line.as_bytes()));
    (0..count).for_each(|_| peer.endpoint.machine.handle_asked(Shape::Values, 0));
    peer.is_deaf = true;
    let read = &door.rig.metrics.connections.bytes_read;
    let mut before = u64::MAX;
    while read.get() != before {
        before = read.get();
        for _ in 0..100 {
            peer.turn();
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }
    assert!((1 << 20..(line.len() * count) as u64 - 65_536).contains(&before), "{before} octets were taken");
    peer.is_deaf = false;
    let answers = peer.answers(count).await;
    assert!(answers.iter().all(|answer| *answer == Answered::Values(Vec::new())));
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn what_a_peer_wrote_before_it_left_is_done() {
    let door = Door::loopback(DEFAULT);
    for round in 0..20 {
        door.rig.local.put(b"key", &octets(1000, round), 0, 0).await.unwrap();
        let mut peer = door.connect(DEFAULT).await;
        peer.endpoint.outbound.text(b"delete key noreply\r\n");
        peer.turn();
        peer.qp.disconnect();
        drop(peer);
        door.assert_quiet().await;
        assert!(door.rig.store.peek(b"key", 1).is_none(), "round {round}");
    }
}

/// The file that holds piece `index` of `key`, open for writing, and where in it.
fn place_of(rig: &Rig, key: &[u8], index: usize) -> (std::fs::File, ExtentId) {
    let object = rig.store.peek(key, 1).unwrap();
    let content = object.pieces()[index].segment.content();
    let crate::store::segment::Content::Disk { extent, .. } = content else { panic!("it is in RAM") };
    let file = rig.drives[0].file(extent.file()).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file.as_file()));
    (std::fs::OpenOptions::new().write(true).open(path).unwrap(), extent)
}

/// Changes octets of piece `index` of `key` on disk.
pub(super) fn spoil(rig: &Rig, key: &[u8], index: usize) {
    let (file, extent) = place_of(rig, key, index);
    file.write_all_at(&[0xff; 16], extent.byte_offset() + 1000).unwrap();
}

#[actix::test]
async fn a_value_whose_first_octets_cannot_be_read_is_as_if_it_were_not_there() {
    for geometry in [DEFAULT, (16, 4096, 2), (64, 65_536, 4), (64, 1 << 20, 8)] {
        let rig = Rig::new(|config| config.store.pools[0].bytes = Some(256 << 20));
        let (bad, good) = (octets(1_300_001, 1), octets(300_000, 2));
        rig.local.put(b"bad", &bad, 0, 0).await.unwrap();
        let is_cold = || {
            let object = rig.store.peek(b"bad", 1).expect("not evicted");
            object.pieces().iter().all(|piece| !piece.segment.is_resident())
        };
        let mut number = 0_u32;
        while !is_cold() {
            rig.local.put(&number.to_le_bytes(), &octets(512 << 10, number), 0, 0).await.unwrap();
            number += 1;
        }
        rig.local.put(b"good", &good, 0, 0).await.unwrap();
        spoil(&rig, b"bad", 0);
        let network = Loopback::new();
        let address = Address::Name("bad".to_owned());
        let door = Door::open(rig, &network, Arc::new(network.clone()), &address, geometry);
        let mut peer = door.connect(geometry).await;
        peer.get("good bad good");
        peer.get("bad");
        peer.get("good");
        let answers = peer.answers(3).await;
        let Answered::Values(values) = &answers[0] else { panic!("no values") };
        assert!(values.iter().all(|(key, _, octets)| key == "good" && *octets == good));
        assert_eq!(values.len(), 2, "{geometry:?}");
        assert_eq!(answers[1], Answered::Values(Vec::new()));
        assert_value(answers[2].clone(), "good", 0, &good);
        drop(peer);
        door.assert_quiet().await;
        assert!(door.rig.store.peek(b"bad", 1).is_none());
        assert_eq!(door.rig.metrics.native.ends.list(), [("peer", 1)]);
    }
}

#[actix::test]
async fn a_value_that_breaks_off_ends_the_connection_and_then_is_gone() {
    let door = Door::loopback(DEFAULT);
    let value = Arc::new(octets(1 << 20, 1));
    door.rig.local.put(b"key", &value, 0, 0).await.unwrap();
    door.rig.push_out(b"key").await;
    spoil(&door.rig, b"key", 2);
    let mut peer = door.connect(DEFAULT).await;
    // The head is in RAM, so the line has left: only the end of the connection tells.
    peer.get("key");
    peer.end().await;
    assert_eq!(door.rig.metrics.native.ends.list(), [("failed_read", 1)]);
    assert_eq!(door.rig.tails.checksum_failures.load(Ordering::Relaxed), 2, "read into the slot, and once more");
    assert_eq!(door.rig.metrics.failed_reads.get(), 2);
    assert_eq!(door.rig.metrics.copied.staging_to_slot.get(), 0);
    let mut peer = door.connect(DEFAULT).await;
    peer.get("key");
    assert_eq!(peer.answer().await, Answered::Values(Vec::new()), "it is gone");
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn a_slot_of_several_segments_waits_for_all_of_them_and_is_read_once_more() {
    // The second window holds pieces 4 to 7, of which one is bad when it is read first.
    let geometry = (64, 1 << 20, 4);
    let door = Door::loopback(geometry);
    let value = Arc::new(octets(3 << 20, 1));
    door.rig.local.put(b"key", &value, 0, 0).await.unwrap();
    door.rig.push_out(b"key").await;
    spoil(&door.rig, b"key", 6);
    let (file, bad) = place_of(&door.rig, b"key", 6);
    let good = value[6 * (256 << 10) + 1000..][..16].to_vec();
    let times = AtomicUsize::new(0);
    let mend = move |extent| {
        if extent == bad && times.fetch_add(1, Ordering::Relaxed) == 1 {
            file.write_all_at(&good, bad.byte_offset() + 1000).unwrap();
        }
    };
    door.rig.lane.tail.send(OnRead(Box::new(mend))).await.unwrap();
    let mut peer = door.connect(geometry).await;
    peer.get("key");
    assert_value(peer.answer().await, "key", 0, &value);
    let tails = &door.rig.tails;
    assert_eq!(tails.checksum_failures.load(Ordering::Relaxed), 1);
    assert_eq!(tails.reads.load(Ordering::Relaxed), 11 + 3, "the good ones of that slot twice");
    assert_eq!(door.rig.metrics.copied.staging_to_slot.get(), 0);
    drop(peer);
    door.assert_quiet().await;
}

/// Everything of the log until `enough` says so, while `peer` takes its turns.
async fn log_until(peer: &mut Peer, trace: &Trace, mut enough: impl FnMut(&[Entry]) -> bool) -> Vec<Entry> {
    let start = std::time::Instant::now();
    let mut entries = Vec::new();
    while !enough(&entries) {
        assert!(start.elapsed() < peer::PATIENCE, "never: {entries:?}");
        peer.turn();
        tokio::time::sleep(Duration::from_micros(200)).await;
        entries.extend(trace.take());
    }
    entries
}

fn is_body(entry: &Entry) -> bool {
    matches!(entry.what, What::Posted { kind: WorkKind::Write, len, .. } if len == 256 << 10)
}

#[actix::test]
async fn tails_go_to_the_disk_in_the_turn_that_posts_the_head() {
    let (door, trace) = Door::traced(rig(), DEFAULT);
    let value = Arc::new(octets(2 << 20, 6));
    door.rig.local.put(b"cold", &value, 0, 0).await.unwrap();
    assert_eq!(door.rig.push_out(b"cold").await, 7);
    let mut peer = door.connect(DEFAULT).await;
    door.hold_reads(true).await;
    let marks = trace.clone();
    door.rig.lane.tail.send(OnRead(Box::new(move |_| marks.mark("read")))).await.unwrap();
    trace.take();
    peer.get("cold");
    let is_read = |entry: &Entry| entry.what == What::Mark("read");
    let log = log_until(&mut peer, &trace, |entries| entries.iter().filter(|entry| is_read(entry)).count() >= 2).await;
    // Both are in flight: none was answered. And between the three nothing has come from the fabric: it was one turn.
    let head = log.iter().position(is_body).expect("the head was posted");
    let reads: Vec<_> = (0..log.len()).filter(|at| is_read(&log[*at])).take(2).collect();
    let turn = head.min(reads[0])..=head.max(reads[1]);
    let is_own = |what: &What| matches!(what, What::Posted { .. } | What::Kicked | What::Mark(_));
    assert!(log[turn].iter().all(|entry| is_own(&entry.what)), "{log:#?}");
    assert_eq!(door.rig.tails.reads.load(Ordering::Relaxed), 0);
    door.hold_reads(false).await;
    assert_value(peer.answer().await, "cold", 0, &value);
    let rest = trace.take();
    assert_eq!(log.iter().chain(&rest).filter(|entry| is_body(entry)).count(), 8);
    let copied = &door.rig.metrics.copied;
    assert_eq!((copied.arena_to_slot.get(), copied.staging_to_slot.get()), (256 << 10, 0), "only the head");
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn windows_of_a_set_are_released_while_the_disk_stands_still() {
    let (door, trace) = Door::traced(rig(), DEFAULT);
    let (cold, new) = (Arc::new(octets(2 << 20, 6)), Arc::new(octets(3 << 20, 7)));
    door.rig.local.put(b"cold", &cold, 0, 0).await.unwrap();
    door.rig.push_out(b"cold").await;
    let mut peer = door.connect(DEFAULT).await;
    door.hold_reads(true).await;
    trace.take();
    peer.get("cold");
    peer.set("new", 0, &new);
    let released = |entry: &Entry| match &entry.what {
        What::Posted { inline: Some(octets), .. } => match Record::decode(&octets[..octets.len() - 8]) {
            Ok(Record::Release { sequence }) => sequence.get(),
            _ => 0,
        },
        _ => 0,
    };
    // Three times as many windows as there are.
    let log = log_until(&mut peer, &trace, |entries| entries.iter().any(|entry| released(entry) == 12)).await;
    assert_eq!(log.iter().filter(|entry| is_body(entry)).count(), 1, "the head alone has left");
    assert_eq!(door.rig.tails.reads.load(Ordering::Relaxed), 0);
    assert!(peer.answers.is_empty());
    door.hold_reads(false).await;
    let answers = peer.answers(2).await;
    assert_value(answers[0].clone(), "cold", 0, &cold);
    assert_eq!(answers[1], line("STORED"));
    drop(peer);
    door.assert_quiet().await;
}

#[actix::test]
async fn a_connection_that_dies_gives_its_place_back_only_after_the_disk_its_slots() {
    for over_iwarp in [false, true] {
        let door = if over_iwarp { Door::iwarp(DEFAULT) } else { Door::loopback(DEFAULT) };
        let value = Arc::new(octets(2 << 20, 6));
        door.rig.local.put(b"cold", &value, 0, 0).await.unwrap();
        door.rig.push_out(b"cold").await;
        door.hold_reads(true).await;
        let mut peer = door.connect(DEFAULT).await;
        peer.get("cold");
        let (sender, started) = std::sync::mpsc::channel();
        door.rig.lane.tail.send(OnRead(Box::new(move |_| sender.send(()).unwrap_or(())))).await.unwrap();
        let start = std::time::Instant::now();
        while started.try_recv().is_err() {
            assert!(start.elapsed() < peer::PATIENCE, "no read");
            peer.turn();
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        drop(peer);
        until("the connection has ended", || door.rig.metrics.native.current.get() == 0).await;
        for _ in 0..50 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            assert_eq!(door.places.available_permits(), PLACES - 1, "the disk has slots of it");
        }
        assert_eq!(door.rig.store.gauges().pins, 0, "but its values are pinned no more");
        // Others are served meanwhile, though nothing comes from the disk.
        let mut other = door.connect(DEFAULT).await;
        other.get("nothing");
        assert_eq!(other.answer().await, Answered::Values(Vec::new()));
        drop(other);
        door.hold_reads(false).await;
        door.assert_quiet().await;
    }
}

#[actix::test]
async fn octets_copied_for_each_octet_served_are_counted() {
    for (head_kib, geometry, is_direct) in
        [(256, DEFAULT, true), (64, DEFAULT, true), (256, (64, 1 << 20, 4), true), (256, (64, 64 << 10, 4), false)]
    {
        let door = Door::loopback_with(geometry, |config| config.store.head_bytes = head_kib << 10);
        let copied = &door.rig.metrics.copied;
        let value = Arc::new(octets(2_000_003, 9));
        let len = value.len() as u64;
        let mut peer = door.connect(geometry).await;
        peer.set("key", 0, &value);
        peer.answer().await;
        assert_eq!(copied.window_to_arena.get(), len, "SET: once");
        peer.get("key");
        assert_value(peer.answer().await, "key", 0, &value);
        assert_eq!((copied.arena_to_slot.get(), copied.staging_to_slot.get()), (len, 0), "GET from RAM: once");
        door.rig.push_out(b"key").await;
        let read_before = door.rig.tails.read_bytes.load(Ordering::Relaxed);
        peer.get("key");
        assert_value(peer.answer().await, "key", 0, &value);
        let (from_ram, staged) = (copied.arena_to_slot.get() - len, copied.staging_to_slot.get());
        let from_disk = door.rig.tails.read_bytes.load(Ordering::Relaxed) - read_before;
        assert_eq!(from_ram, head_kib << 10, "the head is in RAM");
        if is_direct {
            assert_eq!((from_disk, staged), (len - from_ram, 0), "GET from disk: not at all, head {head_kib} KiB");
        } else {
            // Six whole segments; of the end, what is shorter than a window goes straight there.
            let once = 6 * (256 << 10)..=len - from_ram;
            assert!(once.contains(&staged), "GET from disk by staging buffers: once, {geometry:?}: {staged}");
        }
        drop(peer);
        door.assert_quiet().await;
    }
}

#[actix::test]
async fn what_was_appended_does_not_match_windows_and_comes_back_by_staging_buffers() {
    for geometry in [DEFAULT, (64, 1 << 20, 4), (16, 4096, 2)] {
        let door = Door::loopback(geometry);
        let mut peer = door.connect(geometry).await;
        let (first, second) = (Arc::new(octets(700_001, 1)), Arc::new(octets(600_000, 2)));
        peer.set("key", 0, &first);
        let command = format!("append key 0 0 {}\r\n", second.len());
        peer.endpoint.ask_store(command.as_bytes(), second.clone(), second.len() as u64);
        assert_eq!(peer.answers(2).await, [line("STORED"), line("STORED")]);
        door.rig.push_out(b"key").await;
        peer.get("key");
        let whole = [&first[..], &second[..]].concat();
        assert_value(peer.answer().await, "key", 0, &whole);
        let staged = door.rig.metrics.copied.staging_to_slot.get();
        assert!(staged > 0, "{geometry:?}");
        assert!(geometry != DEFAULT || staged < 700_000, "what came first is where it was");
        drop(peer);
        door.assert_quiet().await;
    }
}

#[actix::test]
async fn hundreds_of_connections_share_one_poller() {
    let door = Door::loopback((8, 4096, 2));
    let mut peers = Vec::new();
    for _ in 0..256 {
        peers.push(door.connect((8, 4096, 2)).await);
    }
    assert_eq!(door.rig.metrics.native.current.get(), 256);
    let value = Arc::new(octets(10_000, 2));
    for peer in &mut peers {
        peer.set("key", 0, &value);
        peer.get("key");
    }
    for peer in &mut peers {
        let answers = peer.answers(2).await;
        assert_value(answers[1].clone(), "key", 0, &value);
    }
    drop(peers);
    door.assert_quiet().await;
}

#[actix::test]
async fn a_listener_that_refuses_is_gone_and_its_connections_go_on() {
    let door = Door::loopback(DEFAULT);
    let mut peer = door.connect(DEFAULT).await;
    door.listener.send(Refuse).await.unwrap();
    assert!(matches!(
        Peer::dial(&*door.fabric, &door.address, DEFAULT, |_| {}).await,
        Dialled::Failed(_) | Dialled::Rejected(_)
    ));
    peer.get("nothing");
    assert_eq!(peer.answer().await, Answered::Values(Vec::new()));
}

#[actix::test]
async fn a_poller_that_is_told_to_stop_lets_go_of_its_lane() {
    let lane = Loopback::new().lane().unwrap();
    let poller = CqPoller::new(lane.clone(), crate::actors::cq_poller::Attachments::default()).start();
    poller.send(crate::actors::cq_poller::Stop).await.unwrap();
    until("nobody else has the lane", || Arc::strong_count(&lane) == 1).await;
    assert_eq!(lane.resources(), Resources::default());
}
