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
pub mod bulk_window;
pub mod connection;
pub mod cq_poller;
pub mod credit_manager;
pub mod disk_tail;
pub mod exported;
pub mod fabric_listener;
pub mod gate;
pub mod listener;
pub mod local;
mod memory_sum;
pub mod native_connection;
mod native_memory;
#[cfg(test)]
mod native_role_tests;
#[cfg(test)]
mod native_tests;
pub mod nfs_connection;
#[cfg(test)]
mod rig;
pub mod rpc_connection;
pub mod rpc_credit_manager;
#[cfg(test)]
mod rpc_tests;
pub mod rpcbind;
mod slot_memory;
pub mod store;
#[cfg(test)]
mod tests;

pub use memory_sum::MemorySum;

use crate::actors::connection::Lane;
use crate::actors::disk_tail::{DiskTail, TailMetrics};
use crate::actors::exported::Exported;
use crate::actors::fabric_listener::{Close, FabricDoor, FabricListener, Protocol};
use crate::actors::gate::Gate;
use crate::actors::listener::{Door, Listener, Refuse, Registry, Spoken};
use crate::actors::local::Local;
use crate::actors::native_connection::NativeProtocol;
use crate::actors::nfs_connection::NfsDoor;
use crate::actors::rpc_connection::{RpcDoor, RpcProtocol};
use crate::actors::rpcbind::{Place, Registration, RpcbindError};
use crate::actors::store::StoreActor;
use crate::config::{Config, FabricAddress, Network, Pin, Speech};
use crate::error::Exit;
use crate::fabric::Address;
use crate::fabric::staging::{STAGING_BUF_BYTES, Staging};
use crate::machine::numa::{self, PlaceError, Placement};
use crate::machine::{SYSFS, interfaces};
use crate::metrics::Metrics;
use crate::programs::memcache::engine::Facts;
use crate::programs::memcache::session;
use crate::programs::nfs::files::Settings;
use crate::programs::nfs::{Export, FileSystem, Rules};
use crate::store::pool::{PoolDir, PoolError, PoolFiles};
use crate::store::{Sizes, Store};
use actix::prelude::*;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, oneshot};

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
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error("cannot ask for {what}: {source}")]
    Machine { what: &'static str, source: io::Error },
    #[error("cannot register at rpcbind: {0}")]
    Rpcbind(#[from] RpcbindError),
    #[error("a lane ended before it began")]
    Lane,
}

impl StartError {
    /// What `bulkhead serve` exits with.
    pub fn exit_code(&self) -> Exit {
        match self {
            Self::Pool(error) => error.exit_code(),
            Self::Bind { .. } => Exit::Unavailable,
            Self::Machine { .. } | Self::Rpcbind(_) => Exit::Unavailable,
            Self::Arena { .. } | Self::Staging { .. } | Self::Place(_) => Exit::Config,
            Self::Lane => Exit::Bug,
        }
    }
}

/// A running daemon. Dropping it without [`Handle::shutdown`] leaves the actors to the end of the System.
pub struct Handle {
    doors: Vec<String>,
    addresses: Vec<SocketAddr>,
    native_addresses: Vec<Address>,
    rpc_addresses: Vec<Address>,
    nfs_addresses: Vec<SocketAddr>,
    fabric_listeners: Vec<(Recipient<Refuse>, Recipient<Close>)>,
    memory_sum: MemorySum,
    local: Local,
    metrics: Arc<Metrics>,
    draining: Arc<AtomicBool>,
    registry: Registry,
    listeners: Vec<Addr<Listener>>,
    admin: Option<actix_web::dev::ServerHandle>,
    drives: Arc<[Arc<PoolFiles>]>,
    files: Option<Arc<FileSystem>>,
    tails: Vec<Addr<DiskTail>>,
    arbiters: Vec<Arbiter>,
    shutdown_grace: Duration,
    registration: Option<Registration>,
}

/// Starts everything in order: addresses are bound, pools opened and wiped, lanes started, doors opened, RPC doors
/// registered where that is configured. Call it inside an actix System; [`Handle::shutdown`] ends what it started and not
/// the System.
///
/// # Errors
/// [`StartError`]; nothing keeps running then, and no pool was touched unless all addresses were free.
pub async fn start(config: Config) -> Result<Handle, StartError> {
    let placement = placement(&config)?;
    let mut doors: Vec<(String, Door)> = Vec::new();
    for address in &config.listen.memcache {
        doors.push(bind_tcp("memcache", *address).await?);
    }
    for path in &config.listen.unix {
        doors.push(bind_unix(path)?);
    }
    // In the order of `places_to_come_to`.
    let mut near = placement.doors.into_iter();
    let mut native_doors = Vec::new();
    for (address, near) in config.listen.native.iter().zip(&mut near) {
        native_doors.push(bind_fabric::<NativeProtocol>(address, &config.native, config.lanes, near)?);
    }
    let mut rpc_doors = Vec::new();
    let rpc_door = RpcDoor::new(config.rpc.clone());
    for (address, near) in config.listen.rpc.iter().zip(&mut near) {
        rpc_doors.push(bind_fabric::<RpcProtocol>(address, &rpc_door, config.lanes, near)?);
    }
    let mut nfs_doors = Vec::new();
    for address in &config.listen.nfs_tcp {
        let door = bind_tcp("nfs+tcp", *address).await?;
        if Gate::is_open(&Address::Socket(*address), &config.nfs.allow) {
            let url = &door.0;
            tracing::warn!(url, "everybody who reaches this door may mount: nfs.allow would say who may");
        }
        nfs_doors.push(door);
    }
    let admin_socket = config.listen.admin.map(admin::bind).transpose()?;

    let mut drives = Vec::new();
    for pool in &config.store.pools {
        drives.push(Arc::new(PoolFiles::new(PoolDir::open(&pool.dir, pool.bytes)?)));
    }
    let drives: Arc<[Arc<PoolFiles>]> = drives.into();
    let store = make_store(&config, &drives)?;
    let exported = make_export(&config, &store);
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

    // From the first lane on nothing fails but the admin port, whose socket is bound already, and rpcbind.
    let mut arbiters = Vec::new();
    let mut made = Vec::new();
    for (staging, place) in staging.into_iter().zip(placement.lanes) {
        let arbiter = Arbiter::new();
        if !place.cores.is_empty() {
            // Before the first actor of the lane, so that its ring and its buffers are touched first where it stays.
            let (placed, is_placed) = oneshot::channel();
            arbiter.spawn_fn(move || {
                if let Err(error) = numa::pin_this_thread(&place.cores) {
                    tracing::warn!(%error, cores = ?place.cores, "a lane runs wherever it is put");
                }
                let _ = placed.send(());
            });
            is_placed.await.map_err(|_| StartError::Lane)?;
        }
        let (drives, depth) = (drives.clone(), config.store.disk_depth);
        let (for_tail, tail_metrics) = (staging.clone(), tail_metrics.clone());
        let loads = store.drive_loads().clone();
        let tail = DiskTail::start_in_arbiter(&arbiter.handle(), move |_| {
            DiskTail::new(drives, for_tail, depth, tail_metrics).with_loads(loads)
        });
        made.push((arbiter.handle(), staging, tail));
        arbiters.push(arbiter);
    }
    let Some((first, lane_staging, tail)) = made.first() else { return Err(StartError::Lane) };
    let actor = StoreActor::new(store.clone(), tail.clone(), drives.clone(), config.store.disk_depth, &config.timers)
        .with_files(exported.as_ref().map(|exported| exported.export.files().clone()));
    // One wait for each connection and for each call of RPC, the writes in flight and one growth: only `do_send` reaches it,
    // so this bound is theirs.
    let rpc_calls_max = config.listen.rpc.len() * config.rpc.connections_max * config.rpc.credits_max as usize;
    let waits_max = config.limits.connections_max + rpc_calls_max + config.store.disk_depth * drives.len() + 1;
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
            (arbiter, Lane { session, store, tail, staging, timers, exported: exported.clone() })
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
        let (lanes, places, registry) = (lanes.clone(), places.clone(), registry.clone());
        listeners.push(Listener::new(door, Spoken::Memcache, lanes, places, registry, metrics.clone()).start());
    }
    let mut nfs_addresses = Vec::new();
    let nfs_door = exported.clone().map(|exported| NfsDoor { exported, shared: rpc_door.shared.clone() });
    for ((url, door), nfs_door) in nfs_doors.into_iter().zip(nfs_door.iter().cycle()) {
        if let Door::Tcp(listener) = &door {
            nfs_addresses.extend(listener.local_addr());
        }
        urls.push(url);
        let (lanes, places, registry) = (lanes.clone(), places.clone(), registry.clone());
        let spoken = Spoken::Nfs(nfs_door.clone());
        listeners.push(Listener::new(door, spoken, lanes, places, registry, metrics.clone()).start());
    }
    let mut fabric_listeners = Vec::new();
    let mut fabrics = Vec::new();
    let native_addresses = native_doors.iter().map(|(_, door)| door.address()).collect();
    let rpc_addresses = rpc_doors.iter().map(|(_, door)| door.address()).collect();
    for (url, door) in native_doors {
        fabrics.extend(door.lanes().iter().map(Arc::downgrade));
        urls.push(url);
        fabric_listeners.push(open_fabric(door, &lanes, &places, &registry, &metrics));
    }
    for (url, door) in rpc_doors {
        fabrics.extend(door.lanes().iter().map(Arc::downgrade));
        urls.push(url);
        fabric_listeners.push(open_fabric(door, &lanes, &places, &registry, &metrics));
    }
    let admin = match admin_socket {
        None => None,
        Some((url, socket)) => {
            urls.push(url.clone());
            let views = admin::Views {
                store,
                metrics: metrics.clone(),
                tails: tail_metrics,
                fabrics,
                staging: lanes.iter().map(|(_, lane)| lane.staging.clone()).collect(),
                draining: draining.clone(),
            };
            Some(admin::serve(socket, views).map_err(|source| StartError::Bind { url, source })?)
        }
    };
    let mut handle = Handle {
        doors: urls,
        addresses,
        native_addresses,
        rpc_addresses,
        nfs_addresses,
        fabric_listeners,
        memory_sum: MemorySum::of(&config),
        local,
        metrics,
        draining,
        registry,
        listeners,
        admin,
        drives,
        files: exported.map(|exported| exported.export.files().clone()),
        tails,
        arbiters,
        shutdown_grace: config.timers.shutdown_grace,
        registration: None,
    };
    if let Some(socket) = &config.rpc.rpcbind {
        // Last, so that whoever finds a door there is served.
        match register(socket, &handle.rpc_addresses, &handle.nfs_addresses).await {
            Ok(registration) => handle.registration = Some(registration),
            Err(error) => {
                handle.shutdown().await;
                return Err(error.into());
            }
        }
    }
    Ok(handle)
}

async fn register(
    socket: &Path,
    rpc_addresses: &[Address],
    nfs_addresses: &[SocketAddr],
) -> Result<Registration, RpcbindError> {
    let (mut services, left_out) = rpcbind::services(rpc_addresses);
    for address in left_out {
        tracing::warn!(%address, "this RPC door is not registered: rpcbind keeps one IPv4 and one IPv6 address");
    }
    let (of_nfs, left_out) = rpcbind::nfs_services(nfs_addresses);
    for address in left_out {
        tracing::warn!(%address, "this NFS door is not registered: rpcbind keeps one IPv4 and one IPv6 address");
    }
    services.extend(of_nfs);
    rpcbind::register(Place::at(socket), services).await
}

/// Binds a door on a fabric, whose connections go to the lanes `near`. With its URL, in which the port is what it is.
fn bind_fabric<P: Protocol>(
    address: &FabricAddress<P::Speech>,
    config: &P::Config,
    lane_count: usize,
    near: Vec<usize>,
) -> Result<(String, FabricDoor<P>), StartError> {
    let fabric = fabric_listener::fabric_of(address);
    let mut door = FabricDoor::<P>::bind(&*fabric, &address.address, config, lane_count)?;
    door.keep_to(near);
    let url = FabricAddress::<P::Speech>::new(address.fabric, door.address()).to_string();
    let (_, allow): (_, &[Network]) = P::limits(config);
    if Gate::is_open(&door.address(), allow) {
        let scheme = P::Speech::SCHEME;
        tracing::warn!(url, "everybody who reaches this door may read and write: {scheme}.allow would say who may");
    }
    Ok((url, door))
}

fn open_fabric<P: Protocol>(
    door: FabricDoor<P>,
    lanes: &[(ArbiterHandle, Lane)],
    places: &Arc<Semaphore>,
    registry: &Registry,
    metrics: &Arc<Metrics>,
) -> (Recipient<Refuse>, Recipient<Close>) {
    let listener = FabricListener::open(door, lanes, places.clone(), registry.clone(), metrics.clone());
    (listener.clone().recipient(), listener.recipient())
}

/// A door on a fabric, as the placement of lanes sees it.
fn fabric_place<S: Speech>(door: &FabricAddress<S>) -> numa::Door {
    let address = match door.address {
        Address::Socket(address) => Some(address),
        Address::Name(_) => None,
    };
    numa::Door { url: door.to_string(), address, is_on_device: door.is_on_device() }
}

/// The addresses that peers come to: native doors, then RPC doors, then the others.
pub fn places_to_come_to(config: &Config) -> Vec<numa::Door> {
    let native = config.listen.native.iter().map(fabric_place);
    let rpc = config.listen.rpc.iter().map(fabric_place);
    let on_tcp = |scheme: &'static str| {
        move |address: &SocketAddr| numa::Door {
            url: format!("{scheme}://{address}"),
            address: Some(*address),
            is_on_device: false,
        }
    };
    let memcache = config.listen.memcache.iter().map(on_tcp("memcache"));
    native.chain(rpc).chain(memcache).chain(config.listen.nfs_tcp.iter().map(on_tcp("nfs+tcp"))).collect()
}

/// Where lanes run and which of them each door on a fabric uses.
///
/// # Errors
/// [`StartError::Place`], [`StartError::Machine`].
pub fn placement(config: &Config) -> Result<Placement, StartError> {
    let doors = places_to_come_to(config);
    if config.pin == Pin::Off {
        return Ok(Placement::anywhere(config.lanes.max(1), doors.len()));
    }
    let failed = |what| move |source| StartError::Machine { what, source };
    let interfaces = interfaces::interfaces().map_err(failed("the addresses of this host"))?;
    let allowed = numa::allowed_cores().map_err(failed("the cores of this process"))?;
    Ok(numa::place(Path::new(SYSFS), &interfaces, &allowed, &config.pin, config.lanes.max(1), &doors)?)
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
    // Only who lists pays for the names in order, and only who mounts for the tree.
    let made = match (config.listen.nfs_tcp.is_empty(), config.listen.rpc.is_empty()) {
        (false, _) => Store::with_files(sizes),
        (true, false) => Store::with_namespace(sizes),
        (true, true) => Store::new(sizes),
    };
    let store = made.map_err(|source| StartError::Arena { bytes, source })?;
    for (index, drive) in drives.iter().enumerate() {
        // One file each before the first value comes; the others follow as they are needed.
        match drive.grow()? {
            Some(grown) => store.extents().add_file(index, grown.bytes),
            None => _ = store.extents().end_growth(index),
        }
    }
    Ok(store)
}

/// The file system of all NFS doors, if there is one.
fn make_export(config: &Config, store: &Store) -> Option<Exported> {
    if config.listen.nfs_tcp.is_empty() {
        return None;
    }
    let nfs = &config.nfs;
    // Nothing that a client could guess is at stake: it only has to differ from start to start.
    let boot = RandomState::new().hash_one(std::process::id());
    let files = FileSystem::new(store.clone(), Settings { fsid: nfs.fsid, boot, uid: nfs.uid, gid: nfs.gid });
    let rules = Rules { root_squash: nfs.root_squash, groups: nfs.allow.iter().map(Network::to_string).collect() };
    Some(Exported::new(Arc::new(Export::new(Arc::new(files), rules)), &nfs.allow))
}

async fn bind_tcp(scheme: &str, address: SocketAddr) -> Result<(String, Door), StartError> {
    let failed = |source| StartError::Bind { url: format!("{scheme}://{address}"), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((format!("{scheme}://{bound}"), Door::Tcp(listener)))
}

fn bind_unix(path: &Path) -> Result<(String, Door), StartError> {
    let url = format!("memcache+unix:{}", path.display());
    let failed = |source| StartError::Bind { url: url.clone(), source };
    // A socket that nobody listens on is left over from a daemon that was killed. Whatever else has that name is refused in
    // the same words when one connects to it, and is not ours to remove.
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket
        && std::os::unix::net::UnixStream::connect(path)
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

    /// Addresses of the memcache doors on TCP, in the order of the configuration.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Addresses of the native doors, in the order of the configuration.
    pub fn native_addresses(&self) -> &[Address] {
        &self.native_addresses
    }

    /// Addresses of the RPC doors, in the order of the configuration.
    pub fn rpc_addresses(&self) -> &[Address] {
        &self.rpc_addresses
    }

    /// Addresses of the NFS doors on TCP, in the order of the configuration.
    pub fn nfs_addresses(&self) -> &[SocketAddr] {
        &self.nfs_addresses
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

    /// What is registered at rpcbind is taken back, listeners refuse, transfers in flight finish within `shutdown_grace`,
    /// disks come to rest and are emptied, lanes end.
    pub async fn shutdown(mut self) {
        self.draining.store(true, Ordering::Relaxed);
        // First: until it is done, whoever finds a door there is served.
        if let Some(registration) = self.registration.take() {
            registration.withdraw().await;
        }
        for listener in &self.listeners {
            let _ = listener.send(Refuse).await;
        }
        for (listener, _) in &self.fabric_listeners {
            let _ = listener.send(Refuse).await;
        }
        if let Some(files) = &self.files {
            // Nobody writes any more for long enough: while transfers end, the other doors show what was written.
            files.handle_time(u64::MAX);
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
        for (_, listener) in &self.fabric_listeners {
            let _ = listener.send(Close).await;
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
