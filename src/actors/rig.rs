//! One lane of a daemon on the thread of a test, without doors.

use crate::actors::connection::{Connection, Lane, Socket};
use crate::actors::disk_tail::{DiskTail, TailMetrics};
use crate::actors::local::Local;
use crate::actors::store::StoreActor;
use crate::config::Config;
use crate::fabric::staging::{STAGING_BUF_BYTES, Staging};
use crate::metrics::Metrics;
use crate::programs::memcache::engine::Facts;
use crate::programs::memcache::session;
use crate::store::pool::{PoolDir, PoolFiles};
use crate::store::{Sizes, Store};
use actix::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;

pub struct Rig {
    pub lane: Lane,
    pub local: Local,
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub tails: Arc<TailMetrics>,
    pub drives: Arc<[Arc<PoolFiles>]>,
    _dir: TempDir,
}

impl Rig {
    /// As [`Config::small`] says after `change`, with the pool's one file made.
    pub fn new(change: impl FnOnce(&mut Config)) -> Self {
        let rig = Self::without_files(change);
        let grown = rig.drives[0].grow().unwrap().unwrap();
        rig.store.extents().add_file(0, grown.bytes);
        rig
    }

    pub fn without_files(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::small(dir.path().join("pool"));
        // Little is kept for readers, so that the sums of claims in the tests are plain.
        config.store.pinned_share = 1.0 / 64.0;
        change(&mut config);
        let pool = &config.store.pools[0];
        let drives: Arc<[_]> = [Arc::new(PoolFiles::new(PoolDir::open(&pool.dir, pool.bytes).unwrap()))].into();
        let sizes = Sizes {
            memory_bytes: config.store.memory_bytes,
            head_bytes: config.store.head_bytes,
            value_bytes_max: config.store.value_bytes_max,
            index_bytes_max: config.store.index_bytes_max,
            pinned_share: config.store.pinned_share,
            pool_bytes: vec![drives[0].capacity_bytes()],
        };
        let store = Store::new(sizes).unwrap();
        let metrics = Arc::new(Metrics::default());
        let staging = Staging::new(config.store.staging_bytes as usize / STAGING_BUF_BYTES).unwrap();
        let depth = config.store.disk_depth;
        let tails = Arc::new(TailMetrics::default());
        let tail = DiskTail::new(drives.clone(), staging.clone(), depth, tails.clone());
        let tail = tail.with_loads(store.drive_loads().clone()).start();
        let actor = StoreActor::new(store.clone(), tail.clone(), drives.clone(), depth, &config.timers).start();
        let session = session::Context {
            store: store.clone(),
            metrics: metrics.clone(),
            facts: Arc::new(Facts { started: Instant::now(), lanes: 1, connections_max: 1 }),
            pins_max: config.limits.pins_per_connection_max,
            line_bytes_max: config.limits.line_bytes_max,
            reserve_wait_ms: config.timers.reserve_wait.as_millis() as u64,
        };
        let local = Local { store: store.clone(), actor: actor.clone(), tail: tail.clone(), staging: staging.clone() };
        let lane = Lane { session, store: actor, tail, staging, timers: config.timers, exported: None };
        Self { lane, local, store, metrics, tails, drives, _dir: dir }
    }

    /// A connection of this lane, and the peer's end.
    pub fn connect(&self) -> (Addr<Connection>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Connection::start_on_lane(Socket::Unix(ours), self.lane.clone(), Box::new(())), theirs)
    }

    /// Stores values of 1 MiB until `key` has no more in RAM than its head. Returns how many of its pieces are on disk.
    pub async fn push_out(&self, key: &[u8]) -> u64 {
        for round in 0..64_u32 {
            let Some(object) = self.store.peek(key, self.store.clock().now()) else { panic!("{key:?} is gone") };
            let cold = object.pieces().iter().filter(|piece| !piece.segment.is_resident()).count();
            if cold + 1 >= object.pieces().len() {
                return cold as u64;
            }
            self.local.put(&round.to_le_bytes(), &octets(1 << 20, round), 0, 0).await.unwrap();
        }
        panic!("{key:?} stays in RAM");
    }
}

/// Octets that differ from place to place and from `seed` to `seed`.
pub fn octets(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13 ^ at ^ seed.wrapping_mul(40_503)) as u8).collect()
}

/// Lets others run until `holds`; the limit only turns a hang into a failure.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < limit, "never: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The same limit for a future.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("an answer")
}

/// Sends `request` and expects exactly `reply`.
pub async fn converse(peer: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin), request: &[u8], reply: &[u8]) {
    peer.write_all(request).await.unwrap();
    expect(peer, reply).await;
}

pub async fn expect(peer: &mut (impl AsyncReadExt + Unpin), reply: &[u8]) {
    let mut got = vec![0; reply.len()];
    soon(peer.read_exact(&mut got)).await.unwrap();
    assert!(got == reply, "{} octets begin {:?}", got.len(), got[..got.len().min(64)].escape_ascii().to_string());
}

/// Everything until the end of the stream. A reset is an end too.
pub async fn rest(peer: &mut (impl AsyncReadExt + Unpin)) -> Vec<u8> {
    let mut got = Vec::new();
    let _ = soon(peer.read_to_end(&mut got)).await;
    got
}

pub fn set(key: &str, value: &[u8]) -> Vec<u8> {
    [format!("set {key} 0 0 {}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

pub fn value_reply(key: &str, value: &[u8]) -> Vec<u8> {
    [format!("VALUE {key} 0 {}\r\n", value.len()).as_bytes(), value, b"\r\nEND\r\n"].concat()
}

/// An actor that hands its messages on to the test.
pub struct Inbox<M>(mpsc::UnboundedSender<M>);

impl<M: Unpin + 'static> Inbox<M> {
    pub fn open() -> (Addr<Self>, mpsc::UnboundedReceiver<M>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender).start(), receiver)
    }
}

impl<M: Unpin + 'static> Actor for Inbox<M> {
    type Context = Context<Self>;
}

impl<M: Message<Result = ()> + Unpin + 'static> Handler<M> for Inbox<M> {
    type Result = ();

    fn handle(&mut self, message: M, _: &mut Self::Context) {
        let _ = self.0.send(message);
    }
}

/// Ends an actor from outside.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Die;

/// An asker that can be told to die.
pub struct Mortal;

impl Actor for Mortal {
    type Context = Context<Self>;
}

impl Handler<Die> for Mortal {
    type Result = ();

    fn handle(&mut self, _: Die, ctx: &mut Self::Context) {
        ctx.stop();
    }
}

impl Handler<crate::actors::store::Reserved> for Mortal {
    type Result = ();

    fn handle(&mut self, _: crate::actors::store::Reserved, _: &mut Self::Context) {}
}

impl Handler<crate::actors::store::Filled> for Mortal {
    type Result = ();

    fn handle(&mut self, _: crate::actors::store::Filled, _: &mut Self::Context) {}
}
