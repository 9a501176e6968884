//! The native door of a whole daemon, over iWARP on sockets of loopback: two lanes, both doors, more than the memory holds.

use bulkhead::actors::{Handle, start};
use bulkhead::config::{Config, NativeAddress};
use bulkhead::fabric::iwarp::{Iwarp, Options};
use bulkhead::fabric::{Address, Fabric};
use bulkhead::wire::native::descriptor::{RingGeometry, WindowGeometry};
use bulkhead::wire::native::requester::Shape;
use peer::{Answered, Dialled, Geometry, Peer, assert_value, line};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "native/peer.rs"]
mod peer;

mod common;
use common::{Daemon, Pattern};

const DEFAULT: Geometry = (256, 256 << 10, 4);

fn config(dir: &Path) -> Config {
    let mut config = Config::small(dir.join("pool"));
    config.lanes = 2;
    config.listen.native = vec!["native+iwarp://127.0.0.1:0".parse().unwrap()];
    config
}

fn value(seed: u64, len: usize) -> Arc<Vec<u8>> {
    Arc::new(Pattern(seed).octets(0, len))
}

async fn until_quiet(handle: &Handle) {
    let limit = Instant::now() + peer::PATIENCE;
    let metrics = handle.metrics();
    loop {
        let gauges = handle.store().gauges();
        let held = [
            metrics.native.current.get(),
            metrics.connections.current.get(),
            gauges.pins,
            gauges.pinned_bytes,
            gauges.claims,
            gauges.claimed_bytes,
        ];
        if held == [0; 6] {
            return;
        }
        assert!(Instant::now() < limit, "connections, pins, claims: {held:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn connect(handle: &Handle) -> Peer {
    Peer::connect(&Iwarp::default(), &handle.native_addresses()[0], DEFAULT).await
}

#[actix::test]
async fn more_than_the_memory_holds_goes_in_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let handle = start(config(dir.path())).await.unwrap();
    let mut peers = [connect(&handle).await, connect(&handle).await, connect(&handle).await];
    // 40 MiB through an arena of 16, two requests of a peer in flight.
    for round in 0..5 {
        for (at, peer) in peers.iter_mut().enumerate() {
            let seed = round * 3 + at as u64;
            peer.set(&format!("k{seed}"), seed as u32, &value(seed, 2_700_001));
        }
        for peer in &mut peers {
            assert_eq!(peer.answer().await, line("STORED"));
        }
    }
    for peer in &mut peers {
        (0..15).for_each(|seed| peer.get(&format!("k{seed}")));
    }
    for peer in &mut peers {
        for (seed, answer) in peer.answers(15).await.into_iter().enumerate() {
            assert_value(answer, &format!("k{seed}"), seed as u32, &value(seed as u64, 2_700_001));
        }
    }
    drop(peers);
    until_quiet(&handle).await;
    assert_eq!(handle.metrics().native.ends.list(), [("peer", 3)]);
    handle.shutdown().await;
}

#[actix::test]
async fn a_shutdown_lets_a_transfer_in_flight_finish_and_then_disconnects() {
    let dir = tempfile::tempdir().unwrap();
    let handle = start(config(dir.path())).await.unwrap();
    let octets = value(1, 8 << 20);
    let (mut busy, mut idle) = (connect(&handle).await, connect(&handle).await);
    busy.set("key", 0, &octets);
    assert_eq!(busy.answer().await, line("STORED"));
    busy.get("key");
    // The answer has begun.
    while busy.endpoint.inbound.is_empty() && busy.answers.is_empty() {
        busy.turn();
        tokio::task::yield_now().await;
    }
    let metrics = handle.metrics().clone();
    let shutdown = actix::spawn(handle.shutdown());
    assert_value(busy.answer().await, "key", 0, &octets);
    busy.end().await;
    idle.end().await;
    shutdown.await.unwrap();
    assert_eq!(metrics.native.ends.list(), [("shutdown", 2)]);
}

#[actix::test]
async fn a_door_without_crcs_serves_peers_that_ask_for_none() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.listen.native = vec!["native+iwarp://127.0.0.1:0?crc=off".parse().unwrap()];
    let handle = start(config).await.unwrap();
    for crc in [false, true] {
        let fabric = Iwarp::new(Options { crc, ..Options::default() });
        let mut peer = Peer::connect(&fabric, &handle.native_addresses()[0], DEFAULT).await;
        peer.set("key", 0, &value(3, 500_000));
        peer.get("key");
        assert_value(peer.answers(2).await.remove(1), "key", 0, &value(3, 500_000));
    }
    handle.shutdown().await;
}

#[actix::test]
async fn geometry_comes_from_the_configuration_and_limits_hold() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.native.windows = WindowGeometry::new(8192, 2).unwrap();
    config.native.ring = RingGeometry::new(4).unwrap();
    config.native.connections_max = 2;
    config.listen.native = vec![NativeAddress::from_str("native+loopback:limits").unwrap()];
    let handle = start(config).await.unwrap();
    let fabric: &dyn Fabric = bulkhead::actors::fabric_listener::loopback();
    let address = Address::Name("limits".to_owned());
    let mut first = Peer::connect(fabric, &address, DEFAULT).await;
    let second = Peer::connect(fabric, &address, DEFAULT).await;
    let Dialled::Rejected(why) = Peer::dial(fabric, &address, DEFAULT, |_| {}).await else { panic!("one too many") };
    assert_eq!(why, b"too_many_connections");
    first.set("key", 0, &value(1, 1 << 20));
    first.get("key");
    assert_value(first.answers(2).await.remove(1), "key", 0, &value(1, 1 << 20));
    drop(second);
    let limit = Instant::now() + peer::PATIENCE;
    loop {
        match Peer::dial(fabric, &address, DEFAULT, |_| {}).await {
            Dialled::Connected(_) => break,
            _ => assert!(Instant::now() < limit, "the place of a peer that left stays taken"),
        }
    }
    drop(first);
    until_quiet(&handle).await;
    handle.shutdown().await;
}

#[actix::test]
async fn a_peer_that_stalls_is_cut_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.timers.stall_timeout = Duration::from_millis(200);
    let handle = start(config).await.unwrap();
    let mut peer = connect(&handle).await;
    peer.set("key", 0, &value(1, 8 << 20));
    assert_eq!(peer.answer().await, line("STORED"));
    // It asks for more than its windows hold, and takes nothing of it; another sends half a value.
    let (mut deaf, mut dumb) = (connect(&handle).await, connect(&handle).await);
    deaf.get("key");
    dumb.endpoint.machine.handle_asked(Shape::Line, 20);
    dumb.endpoint.outbound.text(b"set half 0 0 1000\r\n");
    deaf.turn();
    dumb.turn();
    let limit = Instant::now() + peer::PATIENCE;
    while handle.metrics().native.ends.get("stalled") < 2 {
        assert!(Instant::now() < limit, "{:?}", handle.metrics().native.ends.list());
        peer.turn();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    peer.get("half");
    assert_eq!(peer.answer().await, Answered::Values(Vec::new()));
    drop((peer, deaf, dumb));
    until_quiet(&handle).await;
    handle.shutdown().await;
}

#[actix::test]
async fn the_binary_serves_both_doors_and_shows_what_became_of_connections() {
    let daemon = Daemon::builder().flags(&["--native", "native+iwarp://127.0.0.1:0"]).start();
    let door = daemon.doors().iter().find_map(|door| door.strip_prefix("native+iwarp://")).unwrap();
    let address = Address::Socket(door.parse().unwrap());
    let mut peer = Peer::connect(&Iwarp::default(), &address, DEFAULT).await;
    peer.set("key", 5, &value(1, 300_000));
    assert_eq!(peer.answer().await, line("STORED"));
    let metrics = daemon.admin_get("/metrics");
    assert!(metrics.contains("bulkhead_native_connection_current 1\n"), "{metrics}");
    peer.ask("set key 0 0 3\r\nabc\r\n", Shape::Line);
    peer.end().await;
    let limit = Instant::now() + peer::PATIENCE;
    loop {
        let metrics = daemon.admin_get("/metrics");
        if metrics.contains("bulkhead_native_connection_current 0\n") {
            assert!(
                metrics.contains("bulkhead_native_connection_closed_total{cause=\"inline_body\"} 1\n"),
                "{metrics}"
            );
            break;
        }
        assert!(Instant::now() < limit, "{metrics}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(daemon.log().matches("native connection ended").count(), 1, "logged once");
}
