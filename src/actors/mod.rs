//! The actors, and how a service starts and stops them.
//!
//! ```text
//!            Listener (one per address)
//!               | starts                    lanes: one Arbiter and thread each
//!               v
//!  peer <-> Connection (one per peer) --- ReadTail ---> DiskTail (one per lane) <-> drives
//!               |      <--- TailRead ---                    ^ |
//!               | Reserve, Fill, AwaitSpace       WriteTail | | TailWritten
//!               v                                           | v
//!            StoreActor (one) ------------------------------+
//!               ^ rung by the store's bell
//!            store::Store, shared by all: look-up and commit are plain calls
//! ```

pub mod admin;
pub mod connection;
pub mod disk_tail;
pub mod listener;
pub mod local;
pub mod store;

use crate::actors::connection::Lane;
use crate::actors::disk_tail::{DiskTail, TailMetrics};
use crate::actors::listener::{Door, Listener, Refuse, Registry};
use crate::actors::local::Local;
use crate::actors::store::StoreActor;
use crate::config::Config;
use crate::error::Exit;
use crate::fabric::staging::{STAGING_BUF_BYTES, Staging};
use crate::metrics::Metrics;
use crate::programs::memcache::engine::Facts;
use crate::programs::memcache::session::{self, INPUT_BYTES, LONG_LINE_BYTES_MAX};
use crate::store::pool::{PoolDir, PoolError, PoolFiles};
use crate::store::{Sizes, Store};
use actix::prelude::*;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

/// Why the daemon did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    #[error("cannot listen on {url}: {source}")]
    Bind { url: String, source: io::Error },
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("cannot map {bytes} octets for the arena: {source}")]
    Arena { bytes: u64, source: io::Error },
    #[error("cannot make {bytes} octets of staging buffers: {source}")]
    Staging { bytes: u64, source: io::Error },
    #[error("a lane ended before it began")]
    Lane,
}

impl StartError {
    /// What `bulkhead serve` exits with.
    pub fn exit_code(&self) -> Exit {
        match self {
            Self::Pool(error) => error.exit_code(),
            Self::Bind { .. } => Exit::Unavailable,
            Self::Arena { .. } | Self::Staging { .. } => Exit::Config,
            Self::Lane => Exit::Bug,
        }
    }
}

/// RAM that the configuration allows, by what takes it; the process stays under the sum.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemorySum {
    pub arena_bytes: u64,
    pub staging_bytes: u64,
    pub index_bytes: u64,
    pub connections_bytes: u64,
    /// Code, threads, allocator and kernel buffers mapped for rings.
    pub process_bytes: u64,
}

/// Input buffer, text of replies, actor and timers of one busy connection.
const CONNECTION_BYTES: u64 = INPUT_BYTES as u64 + (24 << 10);
const PROCESS_BYTES: u64 = 32 << 20;

impl MemorySum {
    pub fn of(config: &Config) -> Self {
        Self {
            arena_bytes: config.store.memory_bytes,
            staging_bytes: config.store.staging_bytes * config.lanes as u64,
            index_bytes: config.store.index_bytes_max,
            connections_bytes: config.limits.connections_max as u64 * CONNECTION_BYTES + LONG_LINE_BYTES_MAX,
            process_bytes: PROCESS_BYTES,
        }
    }

    pub fn total_bytes(&self) -> u64 {
        self.arena_bytes + self.staging_bytes + self.index_bytes + self.connections_bytes + self.process_bytes
    }
}

impl fmt::Display for MemorySum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        write!(
            f,
            "memory {} MiB = arena {} + staging {} + index {} + connections {} + process {}",
            mib(self.total_bytes()),
            mib(self.arena_bytes),
            mib(self.staging_bytes),
            mib(self.index_bytes),
            mib(self.connections_bytes),
            mib(self.process_bytes)
        )
    }
}

/// A running daemon. Dropping it without [`Handle::shutdown`] leaves the actors to the end of the System.
pub struct Handle {
    doors: Vec<String>,
    addresses: Vec<SocketAddr>,
    memory_sum: MemorySum,
    local: Local,
    metrics: Arc<Metrics>,
    draining: Arc<AtomicBool>,
    registry: Registry,
    listeners: Vec<Addr<Listener>>,
    admin: Option<actix_web::dev::ServerHandle>,
    drives: Arc<[Arc<PoolFiles>]>,
    tails: Vec<Addr<DiskTail>>,
    arbiters: Vec<Arbiter>,
    shutdown_grace: Duration,
}

/// Starts everything in order: addresses are bound, pools opened and wiped, lanes started, doors opened. Call it inside
/// an actix System; [`Handle::shutdown`] ends what it started and not the System.
///
/// # Errors
/// [`StartError`]; nothing keeps running then, and no pool was touched unless all addresses were free.
pub async fn start(config: Config) -> Result<Handle, StartError> {
    let mut doors: Vec<(String, Door)> = Vec::new();
    for address in &config.listen.memcache {
        doors.push(bind_tcp(*address).await?);
    }
    for path in &config.listen.unix {
        doors.push(bind_unix(path)?);
    }
    let admin_socket = config.listen.admin.map(admin::bind).transpose()?;

    let mut drives = Vec::new();
    for pool in &config.store.pools {
        drives.push(Arc::new(PoolFiles::new(PoolDir::open(&pool.dir, pool.bytes)?)));
    }
    let drives: Arc<[Arc<PoolFiles>]> = drives.into();
    let store = make_store(&config, &drives)?;
    let metrics = Arc::new(Metrics::default());
    let tail_metrics = Arc::new(TailMetrics::default());
    let context = session::Context {
        store: store.clone(),
        metrics: metrics.clone(),
        facts: Arc::new(Facts {
            started: Instant::now(),
            lanes: config.lanes,
            connections_max: config.limits.connections_max,
        }),
        pins_max: config.limits.pins_per_connection_max,
        line_bytes_max: config.limits.line_bytes_max,
        reserve_wait_ms: config.timers.reserve_wait.as_millis() as u64,
    };

    let staging_count = (config.store.staging_bytes / STAGING_BUF_BYTES as u64).max(1) as usize;
    let staging: Result<Vec<Staging>, _> = (0..config.lanes.max(1)).map(|_| Staging::new(staging_count)).collect();
    let staging = staging.map_err(|source| StartError::Staging { bytes: config.store.staging_bytes, source })?;

    // From the first lane on nothing fails but the admin port, whose socket is bound already.
    let mut arbiters = Vec::new();
    let mut made = Vec::new();
    for staging in staging {
        let arbiter = Arbiter::new();
        let (drives, depth) = (drives.clone(), config.store.disk_depth);
        let (for_tail, tail_metrics) = (staging.clone(), tail_metrics.clone());
        let tail = DiskTail::start_in_arbiter(&arbiter.handle(), move |_| {
            DiskTail::new(drives, for_tail, depth, tail_metrics)
        });
        made.push((arbiter.handle(), staging, tail));
        arbiters.push(arbiter);
    }
    let Some((first, lane_staging, tail)) = made.first() else { return Err(StartError::Lane) };
    let actor = StoreActor::new(store.clone(), tail.clone(), drives.clone(), config.store.disk_depth, &config.timers);
    // One wait for each connection, the writes in flight and one growth: only `do_send` reaches it, so this bound is theirs.
    let waits_max = config.limits.connections_max + config.store.disk_depth * drives.len() + 1;
    let store_actor = StoreActor::start_in_arbiter(first, move |ctx| {
        ctx.set_mailbox_capacity(waits_max);
        actor
    });
    let local =
        Local { store: store.clone(), actor: store_actor.clone(), tail: tail.clone(), staging: lane_staging.clone() };
    let tails = made.iter().map(|(_, _, tail)| tail.clone()).collect();
    let lanes: Arc<[(ArbiterHandle, Lane)]> = made
        .into_iter()
        .map(|(arbiter, staging, tail)| {
            let (session, store, timers) = (context.clone(), store_actor.clone(), config.timers.clone());
            (arbiter, Lane { session, store, tail, staging, timers })
        })
        .collect();

    let draining = Arc::new(AtomicBool::new(false));
    let places = Arc::new(Semaphore::new(config.limits.connections_max));
    let registry = Registry::default();
    let (mut urls, mut addresses, mut listeners) = (Vec::new(), Vec::new(), Vec::new());
    for (url, door) in doors {
        if let Door::Tcp(listener) = &door {
            addresses.extend(listener.local_addr());
        }
        urls.push(url);
        let listener = Listener::new(door, lanes.clone(), places.clone(), registry.clone(), metrics.clone());
        listeners.push(listener.start());
    }
    let admin = match admin_socket {
        None => None,
        Some((url, socket)) => {
            urls.push(url.clone());
            let views = admin::Views {
                store,
                metrics: metrics.clone(),
                tails: tail_metrics,
                staging: lanes.iter().map(|(_, lane)| lane.staging.clone()).collect(),
                draining: draining.clone(),
            };
            Some(admin::serve(socket, views).map_err(|source| StartError::Bind { url, source })?)
        }
    };
    Ok(Handle {
        doors: urls,
        addresses,
        memory_sum: MemorySum::of(&config),
        local,
        metrics,
        draining,
        registry,
        listeners,
        admin,
        drives,
        tails,
        arbiters,
        shutdown_grace: config.timers.shutdown_grace,
    })
}

fn make_store(config: &Config, drives: &[Arc<PoolFiles>]) -> Result<Store, StartError> {
    let sizes = Sizes {
        memory_bytes: config.store.memory_bytes,
        head_bytes: config.store.head_bytes,
        value_bytes_max: config.store.value_bytes_max,
        index_bytes_max: config.store.index_bytes_max,
        pinned_share: config.store.pinned_share,
        pool_bytes: drives.iter().map(|drive| drive.capacity_bytes()).collect(),
    };
    let bytes = sizes.memory_bytes;
    let store = Store::new(sizes).map_err(|source| StartError::Arena { bytes, source })?;
    for (index, drive) in drives.iter().enumerate() {
        // One file each before the first value comes; the others follow as they are needed.
        match drive.grow()? {
            Some(grown) => store.extents().add_file(index, grown.bytes),
            None => _ = store.extents().end_growth(index),
        }
    }
    Ok(store)
}

async fn bind_tcp(address: SocketAddr) -> Result<(String, Door), StartError> {
    let failed = |source| StartError::Bind { url: format!("memcache://{address}"), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((format!("memcache://{bound}"), Door::Tcp(listener)))
}

fn bind_unix(path: &Path) -> Result<(String, Door), StartError> {
    let url = format!("memcache+unix:{}", path.display());
    let failed = |source| StartError::Bind { url: url.clone(), source };
    // A socket that nobody listens on is left over from a daemon that was killed.
    if std::os::unix::net::UnixStream::connect(path)
        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path).map_err(failed)?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    Ok((url.clone(), Door::Unix(listener, PathBuf::from(path))))
}

impl Handle {
    /// URLs of the doors and of the admin port, with the ports they really have.
    pub fn doors(&self) -> &[String] {
        &self.doors
    }

    /// Addresses of the TCP doors, in the order of the configuration.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    pub fn memory_sum(&self) -> MemorySum {
        self.memory_sum
    }

    /// The store behind the doors: an embedding service may use it directly.
    pub fn store(&self) -> &Store {
        self.local.store()
    }

    /// The store with what waits for space and disk: for the actors of an embedding service.
    pub fn local(&self) -> &Local {
        &self.local
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Listeners refuse, transfers in flight finish within `shutdown_grace`, disks come to rest and are emptied, lanes end.
    pub async fn shutdown(self) {
        self.draining.store(true, Ordering::Relaxed);
        for listener in &self.listeners {
            let _ = listener.send(Refuse).await;
        }
        self.registry.drain();
        let deadline = tokio::time::Instant::now() + self.shutdown_grace;
        while !self.registry.is_empty() && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let cut = self.registry.len();
        if cut > 0 {
            tracing::warn!(connections = cut, "transfers did not finish within shutdown_grace");
            self.registry.kill();
        }
        if let Some(admin) = self.admin {
            admin.stop(false).await;
        }
        for tail in &self.tails {
            let _ = tail.send(disk_tail::Stop).await;
        }
        for drive in self.drives.iter() {
            // They would be wiped at the next start; a cache that is not running should not keep its drive full.
            if let Err(error) = drive.discard() {
                tracing::warn!(%error, "pool files are left for the next start to wipe");
            }
        }
        for arbiter in self.arbiters {
            arbiter.stop();
            let _ = arbiter.join();
        }
    }
}
