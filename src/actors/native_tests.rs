//! The native door on one lane of a test, over fabrics in this process.

use crate::actors::cq_poller::CqPoller;
use crate::actors::listener::{Refuse, Registry};
use crate::actors::native_listener::{NativeDoor, NativeListener};
use crate::actors::rig::{Rig, converse, octets, set, until, value_reply};
use crate::config::NativeConfig;
use crate::fabric::faulty::{Faults, Faulty};
use crate::fabric::iwarp::Iwarp;
use crate::fabric::loopback::Loopback;
use crate::fabric::traced::{Traced, What};
use crate::fabric::{Address, Fabric, Resources, WorkKind};
use crate::wire::native::descriptor::{RingGeometry, WindowGeometry};
use crate::wire::native::requester::Shape;
use actix::prelude::*;
use peer::{Answered, Dialled, Geometry, Peer, assert_value, line};
use std::sync::Arc;
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
    listener: Addr<NativeListener>,
    lanes: Vec<Arc<dyn crate::fabric::Lane>>,
}

fn native(geometry: Geometry) -> NativeConfig {
    let (slots, window_bytes, window_count) = geometry;
    NativeConfig {
        windows: WindowGeometry::new(window_bytes, window_count).unwrap(),
        ring: RingGeometry::new(slots).unwrap(),
        connections_max: 300,
        allow: Vec::new(),
    }
}

impl Door {
    /// The server's side goes through `server`, peers through `client`.
    fn open(rig: Rig, server: &dyn Fabric, client: Arc<dyn Fabric>, address: &Address, geometry: Geometry) -> Self {
        let door = NativeDoor::bind(server, address, &native(geometry), 1).unwrap();
        let (address, lanes) = (door.address(), door.lanes().to_vec());
        let places = Arc::new(Semaphore::new(300));
        let lane = [(Arbiter::current(), rig.lane.clone())];
        let metrics = rig.metrics.clone();
        let listener = NativeListener::open(door, &lane, places, Registry::default(), metrics);
        Self { rig, fabric: client, address, listener, lanes }
    }

    fn loopback(geometry: Geometry) -> Self {
        let network = Loopback::new();
        let address = Address::Name("door".to_owned());
        Self::open(rig(), &network, Arc::new(network.clone()), &address, geometry)
    }

    fn iwarp(geometry: Geometry) -> Self {
        let fabric = Iwarp::default();
        let address = Address::Socket(([127, 0, 0, 1], 0).into());
        Self::open(rig(), &fabric, Arc::new(fabric), &address, geometry)
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
        for _ in 0..2 {
            peer.get("cold");
            assert_value(peer.answer().await, "cold", 5, &value);
        }
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
    let network = Loopback::new();
    let server = Traced::new(Arc::new(network.clone()));
    let trace = server.trace();
    let address = Address::Name("traced".to_owned());
    let door = Door::open(rig(), &server, Arc::new(network), &address, DEFAULT);
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

/// Changes octets of piece `index` of `key` on disk.
fn spoil(rig: &Rig, key: &[u8], index: usize) {
    use std::os::unix::fs::FileExt;
    let object = rig.store.peek(key, 1).unwrap();
    let content = object.pieces()[index].segment.content();
    let crate::store::segment::Content::Disk { extent, .. } = content else { panic!("it is in RAM") };
    let file = rig.drives[0].file(extent.file()).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file.as_file()));
    let plain = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    plain.write_all_at(&[0xff; 16], extent.byte_offset() + 1000).unwrap();
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
    let mut peer = door.connect(DEFAULT).await;
    peer.get("key");
    assert_eq!(peer.answer().await, Answered::Values(Vec::new()), "it is gone");
    drop(peer);
    door.assert_quiet().await;
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
