//! The checked configuration every part of the daemon is started from.
//!
//! ```text
//! defaults < file (--config) < BULKHEAD_* environment < flags  ->  Settings { daemon: Config, log: LogConfig }
//! ```
//! The file is TOML; `configs/bulkhead.toml` shows every key. A variable names its section and key with two underscores
//! between them: `BULKHEAD_STORE__MEMORY=64MiB`. Unknown keys are refused in both. Sizes are octets or carry a unit
//! (`"256KiB"`), times carry a unit (`"100ms"`), and relations between values are checked together.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::error::Exit;
use crate::wire::native::descriptor::{RingGeometry, WindowGeometry};

pub use crate::machine::numa::Pin;
#[cfg(not(feature = "verbs"))]
pub use fabric::NO_VERBS;
pub use fabric::{FabricAddress, FabricKind, Native, NativeAddress, Rpc, RpcAddress, Speech};
pub use file::machine_memory_bytes;
pub(crate) use file::user_id;
use file::{File, Machine};
pub use network::Network;
pub use units::{Auto, ByteSize, Switch, TimeSpan};

mod fabric;
mod file;
mod network;
mod pin;
mod relations;
#[cfg(test)]
mod tests;
mod units;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Step of the head's length, in bytes.
pub const HEAD_STEP_BYTES: u64 = 64 * KIB;
/// Length of one staging buffer, in bytes.
pub const STAGING_STEP_BYTES: u64 = 256 * KIB;
/// Step of the arena's length, in bytes.
pub const MEMORY_STEP_BYTES: u64 = MIB;
/// Smallest arena, in bytes.
pub const MEMORY_BYTES_MIN: u64 = 8 * MIB;
/// Longest path of a Unix socket, in octets: `sun_path` without its final zero.
pub const UNIX_PATH_BYTES_MAX: usize = 107;

/// Everything `bulkhead serve` and [`crate::actors::start`] need, checked: relations between values hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub listen: ListenConfig,
    pub store: StoreConfig,
    pub limits: LimitsConfig,
    pub timers: TimersConfig,
    pub native: NativeConfig,
    pub rpc: RpcConfig,
    pub nfs: NfsConfig,
    /// Threads that serve connections, at least 1.
    pub lanes: usize,
    /// Which cores those threads run on.
    pub pin: Pin,
}

/// Where the doors and the admin port listen.
#[derive(Clone, Debug, PartialEq)]
pub struct ListenConfig {
    /// Memcache text over TCP.
    pub memcache: Vec<SocketAddr>,
    /// Memcache text over Unix sockets.
    pub unix: Vec<PathBuf>,
    /// The native protocol over a fabric.
    pub native: Vec<NativeAddress>,
    /// RPC-over-RDMA over a fabric.
    pub rpc: Vec<RpcAddress>,
    /// NFS version 3 and MOUNT over TCP. One such door, and every RPC door serves both programs too.
    pub nfs_tcp: Vec<SocketAddr>,
    /// Metrics and health over HTTP; `None` switches it off.
    pub admin: Option<SocketAddr>,
}

/// Sizes of the store, in bytes.
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PoolConfig {
    pub dir: PathBuf,
    /// `None`: half of the drive's free space at start.
    pub bytes: Option<u64>,
}

/// Bounds on what peers may ask for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LimitsConfig {
    pub connections_max: usize,
    /// Values one connection may pin at once.
    pub pins_per_connection_max: usize,
    /// Longest `get` line in bytes; other lines stop at 2,048.
    pub line_bytes_max: usize,
}

/// What each connection of a native door gets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NativeConfig {
    /// As many windows to send from as to receive into.
    pub windows: WindowGeometry,
    /// Slots of the control ring.
    pub ring: RingGeometry,
    /// Connections of one native door.
    pub connections_max: usize,
    /// Networks whose peers are admitted; empty: everybody who reaches a door. A door on a loopback address is reached
    /// from this host alone and does not ask.
    pub allow: Vec<Network>,
}

/// What each connection of an RPC door gets.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RpcConfig {
    /// Octets of a message, header and all: its Receives, and the longest Send. A multiple of 1 KiB up to 256 KiB.
    pub inline_bytes: u32,
    /// Calls that a peer may have unanswered: the largest grant, and as many Receives.
    pub credits_max: u32,
    /// Buffers for octets on their way to the peer's memory, and as many for octets on their way from it.
    pub windows: WindowGeometry,
    /// Reads of a peer's memory outstanding at a time.
    pub reads_max: usize,
    /// Octets that calls without a place of their own may take for a connection at a time (those that are too long for a
    /// message and are no data of a value), and as many again for answers.
    pub long_bytes_max: u64,
    /// Segments that the read chunks of one call may have, all together.
    pub segments_max: usize,
    /// Connections of one RPC door.
    pub connections_max: usize,
    /// As [`NativeConfig::allow`].
    pub allow: Vec<Network>,
    /// The socket of the rpcbind where RPC doors are registered; `None`: they are not.
    pub rpcbind: Option<PathBuf>,
}

/// On what terms the store is exported as a file system, where it is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NfsConfig {
    /// Networks whose hosts are served; empty: all that reach a door.
    pub allow: Vec<Network>,
    /// The super-user of a client is nobody here.
    pub root_squash: bool,
    /// Owner of what nobody set an owner of: files that other doors put, and directories that nobody made.
    pub uid: u32,
    pub gid: u32,
    /// Number of the file system, by which clients tell it from others of this host.
    pub fsid: u64,
}

/// Timers.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TimersConfig {
    /// A transfer that moves no octet for this long is cut.
    pub stall_timeout: Duration,
    /// How long a writer waits for space before it is refused; zero refuses at once.
    pub reserve_wait: Duration,
    /// A claim idle this long is revoked while another writer waits.
    pub claim_idle: Duration,
    /// How long transfers may finish after a shutdown signal.
    pub shutdown_grace: Duration,
    /// Idle connections are closed after this; `None` keeps them.
    pub idle_timeout: Option<Duration>,
}

/// How events are written to stderr. Apart from [`Config`], because a service that embeds the daemon has its own log.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LogConfig {
    /// Filter in the form of `tracing_subscriber::EnvFilter`: `info`, `bulkhead=debug,warn`.
    pub level: String,
    pub format: LogFormat,
}

/// Form of one event.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum LogFormat {
    /// One line for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// The whole configuration of the binary.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub daemon: Config,
    pub log: LogConfig,
}

/// Values named on the command line: the last word. `None` and empty lists leave the layers below alone.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub memcache: Option<Vec<SocketAddr>>,
    pub unix: Option<Vec<PathBuf>>,
    pub native: Option<Vec<NativeAddress>>,
    pub native_allow: Vec<Network>,
    pub rpc: Option<Vec<RpcAddress>>,
    pub rpc_allow: Vec<Network>,
    pub rpcbind: Option<Switch<String>>,
    pub nfs_tcp: Option<Vec<SocketAddr>>,
    pub nfs_allow: Vec<Network>,
    pub nfs_root_squash: bool,
    pub admin: Option<Switch<SocketAddr>>,
    pub pools: Vec<PoolConfig>,
    pub memory: Option<ByteSize>,
    pub head: Option<ByteSize>,
    pub value_max: Option<ByteSize>,
    pub lanes: Option<usize>,
    pub pin: Option<Pin>,
    pub log_level: Option<String>,
    pub log_format: Option<LogFormat>,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("`{text}` is not a log format: want `text` or `json`")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// `DIR[:SIZE]`. What follows the last colon is a size, unless it has a slash: so a directory whose name has a colon is
/// given with its size, or with a slash at its end.
impl FromStr for PoolConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (dir, bytes) = match text.rsplit_once(':') {
            Some((dir, size)) if !size.contains('/') => {
                let bytes =
                    size.parse::<ByteSize>().map_err(|err| format!("`{text}`, behind the last colon: {err}"))?;
                (dir, Some(bytes.0))
            }
            _ => (text, None),
        };
        if dir.is_empty() {
            return Err(format!("`{text}` names no directory: want DIR or DIR:SIZE"));
        }
        Ok(Self { dir: PathBuf::from(dir), bytes })
    }
}

/// The configuration is refused; nothing was started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A layer could not be read: no such file, broken TOML, an unknown key, a value of the wrong form.
    #[error("{0}")]
    Read(String),
    /// A value lies outside its range, or two values do not fit together. The text has both numbers.
    #[error("{0}")]
    Relation(String),
}

impl ConfigError {
    /// Always [`Exit::Config`].
    pub const fn exit_code(&self) -> Exit {
        Exit::Config
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Layers.

/// Variables that share our prefix and configure the client, not the daemon.
const CLIENT_VARIABLES: [&str; 1] = ["BULKHEAD_SERVER"];

impl Settings {
    /// Reads all layers, lowest first: defaults, `file`, `environment` (only `BULKHEAD_*` is looked at), `flags`.
    ///
    /// # Errors
    /// [`ConfigError`] for an unreadable file, an unknown key, a value of the wrong form, or values that do not fit.
    pub fn load(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: &Flags,
    ) -> Result<Self, ConfigError> {
        let read = |err: config::ConfigError| ConfigError::Read(err.to_string());
        let mut layers = config::Config::builder();
        if let Some(path) = file {
            // Read here and not by the crate, so that a missing file is named by its path and not by its stem.
            let toml = fs::read_to_string(path)
                .map_err(|err| ConfigError::Read(format!("cannot read {}: {err}", path.display())))?;
            // Parsed on its own first: what is wrong in the file is reported with its name.
            toml::from_str::<File>(&toml)
                .map_err(|err| ConfigError::Read(format!("{}: {}", path.display(), one_line(&err.to_string()))))?;
            layers = layers.add_source(config::File::from_str(&toml, config::FileFormat::Toml));
        }
        let variables: HashMap<String, String> = environment
            .into_iter()
            .filter(|(name, _)| name.starts_with("BULKHEAD_") && !CLIENT_VARIABLES.contains(&name.as_str()))
            .collect();
        layers = layers.add_source(
            config::Environment::with_prefix("BULKHEAD")
                .prefix_separator("_")
                .separator("__")
                .source(Some(variables.into_iter().collect())),
        );
        for (key, value) in flags.layer()? {
            layers = layers.set_override(key, value).map_err(read)?;
        }
        // File and flags are known to be of the right form, so what is wrong here came from a variable.
        let file: File = layers
            .build()
            .and_then(config::Config::try_deserialize)
            .map_err(|err| ConfigError::Read(format!("BULKHEAD_* environment: {err}")))?;
        let settings = file.resolve(&Machine::here())?;
        settings.check()?;
        Ok(settings)
    }

    /// The effective configuration as TOML; reading it back gives the same `Settings`.
    pub fn to_toml(&self) -> String {
        toml::to_string(&File::from(self)).expect("the file's structs hold scalars, lists and tables only")
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.daemon.check()?;
        tracing_subscriber::EnvFilter::try_new(&self.log.level)
            .map_err(|err| ConfigError::Relation(format!("log.level = \"{}\": {err}", self.log.level)))?;
        Ok(())
    }
}

/// An error text of several lines (TOML shows the place with a caret) as one line for a log.
fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.chars().all(|c| " |^".contains(c)));
    lines.collect::<Vec<_>>().join(" ")
}

impl Flags {
    fn layer(&self) -> Result<Vec<(&'static str, config::Value)>, ConfigError> {
        let path = |path: &Path| {
            let text = path.to_str().map(str::to_owned);
            text.ok_or_else(|| ConfigError::Read(format!("{} is not UTF-8", path.display())))
        };
        let mut layer: Vec<(&'static str, config::Value)> = Vec::new();
        if let Some(addresses) = &self.memcache {
            layer.push(("listen.memcache", addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().into()));
        }
        if let Some(paths) = &self.unix {
            let paths = paths.iter().map(|item| path(item)).collect::<Result<Vec<_>, _>>()?;
            layer.push(("listen.unix", paths.into()));
        }
        if let Some(addresses) = &self.native {
            layer.push(("listen.native", addresses.iter().map(NativeAddress::to_string).collect::<Vec<_>>().into()));
        }
        if !self.native_allow.is_empty() {
            let networks = self.native_allow.iter().map(Network::to_string).collect::<Vec<_>>();
            layer.push(("native.allow", networks.into()));
        }
        if let Some(addresses) = &self.rpc {
            layer.push(("listen.rpc", addresses.iter().map(RpcAddress::to_string).collect::<Vec<_>>().into()));
        }
        if !self.rpc_allow.is_empty() {
            let networks = self.rpc_allow.iter().map(Network::to_string).collect::<Vec<_>>();
            layer.push(("rpc.allow", networks.into()));
        }
        if let Some(rpcbind) = &self.rpcbind {
            layer.push(("rpc.rpcbind", rpcbind.to_string().into()));
        }
        if let Some(addresses) = &self.nfs_tcp {
            layer.push(("listen.nfs_tcp", addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().into()));
        }
        if !self.nfs_allow.is_empty() {
            let networks = self.nfs_allow.iter().map(Network::to_string).collect::<Vec<_>>();
            layer.push(("nfs.allow", networks.into()));
        }
        if self.nfs_root_squash {
            layer.push(("nfs.root_squash", true.into()));
        }
        if let Some(admin) = &self.admin {
            layer.push(("listen.admin", admin.to_string().into()));
        }
        if !self.pools.is_empty() {
            let mut pools = Vec::new();
            for pool in &self.pools {
                let mut table = HashMap::from([("dir".to_owned(), path(&pool.dir)?)]);
                if let Some(bytes) = pool.bytes {
                    table.insert("size".to_owned(), bytes.to_string());
                }
                pools.push(table);
            }
            layer.push(("store.pools", pools.into()));
        }
        let sizes = [("store.memory", self.memory), ("store.head", self.head), ("store.value_max", self.value_max)];
        for (key, size) in sizes {
            if let Some(size) = size {
                layer.push((key, size.to_string().into()));
            }
        }
        if let Some(lanes) = self.lanes {
            layer.push(("lanes", lanes.to_string().into()));
        }
        if let Some(pin) = &self.pin {
            layer.push(("pin", pin.to_string().into()));
        }
        if let Some(level) = &self.log_level {
            layer.push(("log.level", level.clone().into()));
        }
        if let Some(format) = self.log_format {
            layer.push(("log.format", format.to_string().into()));
        }
        Ok(layer)
    }
}

impl Config {
    /// The defaults of this machine, without file, environment or flags: where an embedding service starts from.
    pub fn of_this_machine() -> Self {
        File::default().resolve(&Machine::here()).expect("the defaults fit together").daemon
    }

    /// A small daemon for tests, examples and measurements: one door at a free port of loopback, no admin port, one
    /// lane, 16 MiB of RAM for values and a pool of 64 MiB in `pool`, which must not exist or be a pool. Change what is
    /// not wanted.
    pub fn small(pool: impl Into<PathBuf>) -> Self {
        let mut config = Self::of_this_machine();
        config.lanes = 1;
        config.listen = ListenConfig {
            memcache: vec![([127, 0, 0, 1], 0).into()],
            unix: Vec::new(),
            native: Vec::new(),
            rpc: Vec::new(),
            nfs_tcp: Vec::new(),
            admin: None,
        };
        config.store.memory_bytes = 16 * MIB;
        config.store.staging_bytes = STAGING_STEP_BYTES * config.store.disk_depth as u64;
        config.store.index_bytes_max = 16 * MIB;
        config.store.pools = vec![PoolConfig { dir: pool.into(), bytes: Some(64 * MIB) }];
        config
    }
}
