//! The RPC door on one lane of a test: what it does to its fabric, and what a fabric that fails does to it.

use crate::actors::fabric_listener::{FabricDoor, FabricListener};
use crate::actors::listener::Registry;
use crate::actors::rig::{Rig, octets, until};
use crate::actors::rpc_connection::{RpcDoor, RpcProtocol};
use crate::config::{Config, RpcConfig};
use crate::fabric::faulty::{Faults, Faulty};
use crate::fabric::loopback::Loopback;
use crate::fabric::traced::{Trace, Traced, What};
use crate::fabric::{Address, Fabric, Lane, Resources, WorkKind};
use crate::programs::bulkhead::{Request, StatRequest};
use actix::prelude::*;
use peer::raw::{Ask, Raw};
use peer::{draft, get, key, more, put_chunk, range, stored};
use std::sync::Arc;
use tokio::sync::Semaphore;

#[path = "../../tests/rpc/mod.rs"]
mod peer;

const PLACES: usize = 100;

/// A door over `server`, and the network that its peers are on.
struct Door {
    rig: Rig,
    network: Loopback,
    address: Address,
    lanes: Vec<Arc<dyn Lane>>,
    places: Arc<Semaphore>,
    _listener: Addr<FabricListener<RpcProtocol>>,
}

impl Door {
    fn open(wrap: impl FnOnce(Arc<dyn Fabric>) -> Arc<dyn Fabric>) -> Self {
        let rig = Rig::new(|config| config.store.value_bytes_max = 16 << 20);
        let network = Loopback::new();
        let server = wrap(Arc::new(network.clone()));
        let config: RpcConfig = Config::small("nowhere").rpc;
        let config = RpcConfig { connections_max: PLACES, ..config };
        let address = Address::Name("door".to_owned());
        let door = FabricDoor::bind(&*server, &address, &RpcDoor::new(config), 1).unwrap();
        let (address, lanes) = (door.address(), door.lanes().to_vec());
        let places = Arc::new(Semaphore::new(PLACES));
        let lane = [(Arbiter::current(), rig.lane.clone())];
        let metrics = rig.metrics.clone();
        let _listener = FabricListener::open(door, &lane, places.clone(), Registry::default(), metrics);
        Self { rig, network, address, lanes, places, _listener }
    }

    fn traced() -> (Self, Trace) {
        let mut trace = None;
        let door = Self::open(|network| {
            let traced = Traced::new(network);
            trace = Some(traced.trace());
            Arc::new(traced)
        });
        (door, trace.unwrap())
    }

    fn faulty(seed: u64, faults: Faults) -> Self {
        Self::open(|network| Arc::new(Faulty::new(network, seed, faults)))
    }

    async fn dial(&self) -> Result<Raw, Vec<u8>> {
        Raw::dial(&self.network, &self.address, 4096, true).await
    }

    /// Nothing is left of any connection.
    async fn until_quiet(&self) {
        let metrics = &self.rig.metrics;
        until("all connections have ended", || metrics.rpc.current.get() == 0).await;
        until("the fabric has let go of them", || {
            let Resources { queue_pairs, regions, half_open, .. } = self.lanes[0].resources();
            (queue_pairs, regions, half_open) == (0, 0, 0)
        })
        .await;
        let gauges = self.rig.store.gauges();
        assert_eq!((gauges.pins, gauges.claims, gauges.claimed_bytes, gauges.pinned_bytes), (0, 0, 0, 0));
        let staging = &self.rig.lane.staging;
        until("all staging buffers are back", || staging.available() == staging.count()).await;
        until("all places among the connections are back", || self.places.available_permits() == PLACES).await;
    }
}

fn asks(value: &[u8]) -> Vec<Ask<'_>> {
    let len = value.len() as u32;
    vec![
        put_chunk("k", value),
        draft("k", 1, value.len() as u64, &value[..100_000], vec![70_000, 30_000]),
        more(1, 100_000, &value[100_000..], vec![len - 100_000], true),
        Ask { writes: vec![vec![len]], ..get(vec![range("k", 0, len)]) },
        Ask { reply: Some(vec![len]), ..get(vec![range("k", 0, 50_000)]) },
        Ask {
            long: Some(100),
            ..Ask::new(Request::Stat(StatRequest { until_miss: false, keys: vec![key("k"); 300] }))
        },
        Ask::new(Request::Pin(vec![key("k")])),
    ]
}

/// Memory of the requester alone is exposed (RFC 8166 §3.1): that of the server has no key that a peer could use.
#[actix::test]
async fn no_memory_of_the_server_is_opened_to_a_peer() {
    let (door, trace) = Door::traced();
    let value = octets(300_000, 1);
    let mut peer = door.dial().await.unwrap();
    for ask in asks(&value) {
        let ask = if ask.long.is_some() { Ask { reply: Some(vec![30_000]), ..ask } } else { ask };
        peer.call(&ask).await.replied();
        assert_eq!(door.lanes[0].resources().regions, 0, "{ask:?}");
    }
    let entries = trace.take();
    let count = |is: fn(&What) -> bool| entries.iter().filter(|entry| is(&entry.what)).count();
    assert_eq!(count(|what| matches!(what, What::Registered { .. })), 0);
    for kind in [WorkKind::Read, WorkKind::Write, WorkKind::Send] {
        let posted = |what: &What| matches!(what, What::Posted { kind: posted, .. } if *posted == kind);
        assert!(entries.iter().any(|entry| posted(&entry.what)), "{kind:?}");
    }
    drop(peer);
    door.until_quiet().await;
}

/// What the peer learns from a Send is true only if what went before it did so on the same queue pair (RFC 8166 §2.3.2).
#[actix::test]
async fn reads_have_ended_and_writes_are_posted_before_the_send() {
    let (door, trace) = Door::traced();
    let value = octets(900_000, 2);
    let mut peer = door.dial().await.unwrap();
    for ask in asks(&value) {
        trace.take();
        let ask = if ask.long.is_some() { Ask { reply: Some(vec![30_000]), ..ask } } else { ask };
        peer.call(&ask).await.replied();
        let (mut reads, mut posted, mut sends) = (0, 0, 0);
        for entry in trace.take() {
            match entry.what {
                What::Posted { kind, .. } => {
                    assert_eq!(sends, 0, "{kind:?} behind the Send of {ask:?}");
                    match kind {
                        WorkKind::Read => reads += 1,
                        WorkKind::Send => {
                            assert_eq!(reads, 0, "{reads} Reads are not over");
                            sends += 1;
                        }
                        _ => posted += 1,
                    }
                }
                What::Completed { kind: WorkKind::Read, .. } => reads -= 1,
                _ => {}
            }
        }
        assert_eq!(sends, 1);
        let chunks: usize = ask.writes.iter().flatten().chain(ask.reply.iter().flatten()).count();
        assert_eq!(posted > 0, chunks > 0, "{posted} Writes for {chunks} segments");
    }
    drop(peer);
    door.until_quiet().await;
}

/// An answer that cannot be sent closes the connection (RFC 8166 §4.5.4): its caller would wait for ever.
#[actix::test]
async fn an_answer_that_cannot_be_posted_ends_the_connection() {
    let door = Door::faulty(1, Faults { refuse_per_mille: 1000, ..Faults::default() });
    let mut peer = door.dial().await.unwrap();
    let _pending = peer.ask(&Ask::new(Request::Null));
    peer.end().await;
    assert!(peer.messages.is_empty());
    drop(peer);
    door.until_quiet().await;
    // Because of the post, and not because nothing moved any more.
    assert_eq!(door.rig.metrics.rpc.ends.list(), [("local", 1)]);
}

/// Each step of an accept fails in turn, Receives and all: what was done is undone and nothing else is, the peer is told,
/// and the door goes on.
#[actix::test]
async fn every_step_of_an_accept_may_fail() {
    let (mut rejected, mut served) = (0, 0);
    for seed in 0..20 {
        let door = Door::faulty(seed, Faults { shortage_per_mille: 150, ..Faults::default() });
        for _ in 0..10 {
            match door.dial().await {
                Ok(mut peer) => {
                    peer.call(&Ask::new(Request::Null)).await.replied();
                    served += 1;
                }
                Err(_) => rejected += 1,
            }
        }
        door.until_quiet().await;
    }
    assert!(rejected > 20 && served > 20, "{rejected} rejected, {served} served");
}

/// Connections that are lost, posts that are refused and events that come late in the middle of calls of every kind: each
/// ends, and takes with it all that it held.
#[actix::test]
async fn a_fabric_that_fails_in_the_middle_of_calls_leaves_nothing_behind() {
    let value = octets(300_000, 3);
    let faults = Faults {
        drop_per_mille: 10,
        delay_per_mille: 200,
        hold_per_mille: 200,
        refuse_per_mille: 20,
        shortage_per_mille: 0,
    };
    let mut answered = 0;
    for seed in 0..6 {
        let door = Door::faulty(seed, faults);
        for _ in 0..15 {
            let Ok(mut peer) = door.dial().await else { continue };
            let pending: Vec<_> =
                asks(&value).iter().map(|ask| (peer.ended.is_none()).then(|| peer.ask(ask))).collect();
            peer.until(|peer| peer.messages.len() == pending.len()).await;
            answered += peer.messages.len();
        }
        door.until_quiet().await;
    }
    assert!(answered > 50, "{answered} calls were answered");
}

/// A thousand connections, each with a call, cost no more than one.
#[actix::test]
async fn a_thousand_connections_leave_nothing_behind() {
    let (door, trace) = Door::traced();
    for round in 0..1000 {
        let mut peer = door.dial().await.unwrap();
        stored(peer.call(&peer::put("k", &octets(100, round))).await);
        trace.take();
    }
    door.until_quiet().await;
    assert_eq!(door.rig.metrics.rpc.total.get(), 1000);
}
