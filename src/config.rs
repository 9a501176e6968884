//! The checked configuration every part of the daemon is started from.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Everything `bulkhead serve` and [`crate::actors::start`] need, checked: relations between values hold.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: ListenConfig,
    pub store: StoreConfig,
    pub limits: LimitsConfig,
    pub timers: TimersConfig,
    /// Threads that serve connections, at least 1.
    pub lanes: usize,
}

/// Where the doors and the admin port listen.
#[derive(Clone, Debug)]
pub struct ListenConfig {
    /// Memcache text over TCP.
    pub memcache: Vec<SocketAddr>,
    /// Memcache text over Unix sockets.
    pub unix: Vec<PathBuf>,
    /// Metrics and health over HTTP; `None` switches it off.
    pub admin: Option<SocketAddr>,
}

/// Sizes of the store, in bytes.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// The arena: RAM that holds heads and hot bodies. A multiple of 1 MiB, at least 8 MiB.
    pub memory_bytes: u64,
    /// The head of a value: the part kept in RAM longest. A multiple of 64 KiB.
    pub head_bytes: u64,
    /// Largest value taken.
    pub value_bytes_max: u64,
    /// Registered buffers between disk and wire, per lane. A multiple of 256 KiB.
    pub staging_bytes: u64,
    /// Bound on what keys, object records and segment records take.
    pub index_bytes_max: u64,
    /// Bound on what readers may keep from being evicted, as a share of capacity (0..1].
    pub pinned_share: f64,
    /// Disk pools, at least one.
    pub pools: Vec<PoolConfig>,
    /// Requests in flight per drive and lane.
    pub disk_depth: usize,
}

/// One pool directory on one drive.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    pub dir: PathBuf,
    /// `None`: half of the drive's free space at start.
    pub bytes: Option<u64>,
}

/// Bounds on what peers may ask for.
#[derive(Clone, Debug)]
pub struct LimitsConfig {
    pub connections_max: usize,
    /// Values one connection may pin at once.
    pub pins_per_connection_max: usize,
    /// Longest `get` line in bytes; other lines stop at 2,048.
    pub line_bytes_max: usize,
}

/// Timers.
#[derive(Clone, Debug)]
pub struct TimersConfig {
    /// A transfer that moves no octet for this long is cut.
    pub stall_timeout: Duration,
    /// How long a writer waits for space before it is refused.
    pub reserve_wait: Duration,
    /// A claim idle this long is revoked while another writer waits.
    pub claim_idle: Duration,
    /// How long transfers may finish after a shutdown signal.
    pub shutdown_grace: Duration,
    /// Idle connections are closed after this; `None` keeps them.
    pub idle_timeout: Option<Duration>,
}
