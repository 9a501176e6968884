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
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::error::Exit;
use crate::fabric::Address;
use crate::wire::native::descriptor::{RingGeometry, WindowGeometry};
use crate::wire::rpcrdma::private_data;

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

// ---------------------------------------------------------------------------------------------------------------------
// Relations.

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

    /// Checks ranges and relations; every message shows the numbers that do not fit.
    ///
    /// # Errors
    /// [`ConfigError::Relation`] for the first rule broken.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.listen.check()?;
        self.store.check()?;
        self.limits.check()?;
        self.timers.check()?;
        within("native.connections_max", self.native.connections_max, 1, 65_536)?;
        self.rpc.check()?;
        self.check_rpcbind()?;
        within("lanes", self.lanes, 1, 1024)
    }

    fn check_rpcbind(&self) -> Result<(), ConfigError> {
        let Some(path) = &self.rpc.rpcbind else { return Ok(()) };
        let shown = path.display();
        require(path.is_absolute(), || {
            format!("rpc.rpcbind = \"{shown}\": want \"off\" or the absolute path of rpcbind's socket")
        })?;
        let bytes = path.as_os_str().as_bytes().len();
        require(bytes <= UNIX_PATH_BYTES_MAX, || {
            format!("rpc.rpcbind = \"{shown}\" has {bytes} octets: a socket's path has at most {UNIX_PATH_BYTES_MAX}")
        })?;
        let has_address = self.listen.rpc.iter().any(|rpc| matches!(rpc.address, Address::Socket(_)));
        require(has_address || !self.listen.nfs_tcp.is_empty(), || {
            format!(
                "rpc.rpcbind = \"{shown}\", and listen.rpc has no door with an address to register there, nor \
                 listen.nfs_tcp any"
            )
        })
    }
}

fn require(holds: bool, message: impl FnOnce() -> String) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::Relation(message())) }
}

fn within(key: &str, value: usize, min: usize, max: usize) -> Result<(), ConfigError> {
    require((min..=max).contains(&value), || format!("{key} = {value}: want {min} to {max}"))
}

impl RpcConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let (min, max) = (private_data::INLINE_BYTES_MIN, private_data::INLINE_BYTES_MAX);
        let inline = self.inline_bytes;
        require((min..=max).contains(&inline) && inline.is_multiple_of(min), || {
            format!(
                "rpc.inline = {}: want a multiple of {} up to {}",
                ByteSize(inline.into()),
                ByteSize(min.into()),
                ByteSize(max.into())
            )
        })?;
        within("rpc.credits", self.credits_max as usize, 1, 1024)?;
        within("rpc.reads", self.reads_max, 1, 128)?;
        within("rpc.segments", self.segments_max, 16, 16_384)?;
        within("rpc.connections_max", self.connections_max, 1, 65_536)?;
        let long = self.long_bytes_max;
        require((64 * KIB..=64 * MIB).contains(&long), || {
            format!("rpc.long = {}: want {} to {}", ByteSize(long), ByteSize(64 * KIB), ByteSize(64 * MIB))
        })
    }
}

impl ListenConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let on_fabrics = self.native.iter().map(|native| (&native.address, native.to_string()));
        let on_fabrics: Vec<_> = on_fabrics.chain(self.rpc.iter().map(|rpc| (&rpc.address, rpc.to_string()))).collect();
        let on_tcp = !self.memcache.is_empty() || !self.nfs_tcp.is_empty();
        require(on_tcp || !self.unix.is_empty() || !on_fabrics.is_empty(), || {
            "listen.memcache, listen.unix, listen.native, listen.rpc and listen.nfs_tcp are all empty: the daemon would have \
             no door"
                .to_owned()
        })?;
        for (index, (address, url)) in on_fabrics.iter().enumerate() {
            let listed = on_fabrics[..index].iter().any(|(other, _)| other == address);
            let is_free = matches!(address, Address::Socket(socket) if socket.port() == 0);
            require(is_free || !listed, || format!("listen.native and listen.rpc list the address of {url} twice"))?;
        }
        let mut seen = Vec::new();
        let sockets = on_fabrics.iter().filter_map(|(address, _)| match address {
            Address::Socket(address) => Some(*address),
            Address::Name(_) => None,
        });
        seen.extend(sockets.filter(|address| address.port() != 0));
        // Port 0 asks the kernel for a free port, so it never collides.
        let on_tcp = self.memcache.iter().chain(&self.nfs_tcp).chain(&self.admin);
        for address in on_tcp.filter(|address| address.port() != 0) {
            require(!seen.contains(address), || {
                format!(
                    "{address} is listed twice in listen.memcache, listen.native, listen.rpc, listen.nfs_tcp, listen.admin"
                )
            })?;
            seen.push(*address);
        }
        for (index, path) in self.unix.iter().enumerate() {
            let bytes = path.as_os_str().as_bytes().len();
            require((1..=UNIX_PATH_BYTES_MAX).contains(&bytes), || {
                let path = path.display();
                format!("listen.unix = \"{path}\" has {bytes} octets: a socket's path has 1 to {UNIX_PATH_BYTES_MAX}")
            })?;
            require(!self.unix[..index].contains(path), || format!("listen.unix lists {} twice", path.display()))?;
        }
        Ok(())
    }
}

impl StoreConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let size = |bytes| ByteSize(bytes).to_string();
        let (memory, head, staging) = (self.memory_bytes, self.head_bytes, self.staging_bytes);
        require(memory >= MEMORY_BYTES_MIN && memory.is_multiple_of(MEMORY_STEP_BYTES), || {
            let (step, min) = (size(MEMORY_STEP_BYTES), size(MEMORY_BYTES_MIN));
            format!("store.memory = {}: want a multiple of {step}, at least {min}", size(memory))
        })?;
        require(head >= HEAD_STEP_BYTES && head.is_multiple_of(HEAD_STEP_BYTES), || {
            format!("store.head = {}: want a multiple of {}, not zero", size(head), size(HEAD_STEP_BYTES))
        })?;
        require(head <= memory / 4, || {
            format!("store.head = {} is more than a quarter of store.memory = {}", size(head), size(memory))
        })?;
        require(self.value_bytes_max >= 1, || "store.value_max = 0: no value would fit".to_owned())?;
        require(staging >= STAGING_STEP_BYTES && staging.is_multiple_of(STAGING_STEP_BYTES), || {
            format!("store.staging = {}: want a multiple of {}, not zero", size(staging), size(STAGING_STEP_BYTES))
        })?;
        within("store.disk_depth", self.disk_depth, 1, 1024)?;
        let needed = STAGING_STEP_BYTES * self.disk_depth as u64;
        require(staging >= needed, || {
            let (depth, step) = (self.disk_depth, size(STAGING_STEP_BYTES));
            format!("store.staging = {} holds less than store.disk_depth = {depth} buffers of {step}", size(staging))
        })?;
        require(self.index_bytes_max >= MIB, || {
            format!("store.index_bytes_max = {}: want at least {}", size(self.index_bytes_max), size(MIB))
        })?;
        require(self.pinned_share > 0.0 && self.pinned_share <= 1.0, || {
            format!("store.pinned_share = {}: want more than 0, at most 1", self.pinned_share)
        })?;
        require(!self.pools.is_empty(), || "store.pools is empty: want at least one directory".to_owned())?;
        for (index, pool) in self.pools.iter().enumerate() {
            let dir = pool.dir.display();
            require(!pool.dir.as_os_str().is_empty(), || "store.pools has an entry without a directory".to_owned())?;
            if let Some(bytes) = pool.bytes {
                require(bytes >= MIB, || format!("pool {dir} has {}: want at least {}", size(bytes), size(MIB)))?;
            }
            for other in &self.pools[..index] {
                let apart = !pool.dir.starts_with(&other.dir) && !other.dir.starts_with(&pool.dir);
                require(apart, || {
                    format!("pools {} and {dir} are the same or lie in each other", other.dir.display())
                })?;
            }
        }
        Ok(())
    }
}

impl LimitsConfig {
    fn check(&self) -> Result<(), ConfigError> {
        within("limits.connections_max", self.connections_max, 1, 1_000_000)?;
        within("limits.pins_per_connection_max", self.pins_per_connection_max, 1, 65_536)?;
        within("limits.line_bytes_max", self.line_bytes_max, 2_048, 64 << 20)
    }
}

impl TimersConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let timers = [("stall_timeout", Some(self.stall_timeout)), ("claim_idle", Some(self.claim_idle))];
        for (key, value) in timers.into_iter().chain([("idle_timeout", self.idle_timeout)]) {
            require(value != Some(Duration::ZERO), || format!("timers.{key} = 0s: it would cut everything at once"))?;
        }
        let (wait, idle) = (self.reserve_wait, self.claim_idle);
        // A writer that never waits has no use for other writers' idle claims.
        require(wait.is_zero() || wait >= idle, || {
            let (wait, idle) = (TimeSpan(wait), TimeSpan(idle));
            format!(
                "timers.reserve_wait = {wait} is shorter than timers.claim_idle = {idle}: idle claims would outlast it"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../configs/bulkhead.toml");
    const SMALL: &str = include_str!("../configs/small.toml");

    fn load(toml: &str, environment: &[(&str, &str)], flags: &Flags) -> Result<Settings, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bulkhead.toml");
        fs::write(&path, toml).unwrap();
        let environment = environment.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        Settings::load(Some(&path), environment, flags)
    }

    fn refusal(toml: &str) -> String {
        load(toml, &[], &Flags::default()).unwrap_err().to_string()
    }

    fn keys(prefix: &str, table: &toml::Table, into: &mut Vec<String>) {
        for (key, value) in table {
            match value {
                toml::Value::Table(inner) => keys(&format!("{prefix}{key}."), inner, into),
                _ => into.push(format!("{prefix}{key}")),
            }
        }
    }

    #[test]
    fn the_small_daemon_passes_its_own_checks() {
        let config = Config::small("/var/tmp/nowhere");
        config.check().unwrap();
        assert_eq!((config.lanes, config.listen.memcache[0].port(), config.listen.admin), (1, 0, None));
        assert_eq!(config.store.pools[0].bytes, Some(64 << 20));
    }

    #[test]
    fn the_example_file_equals_the_defaults() {
        assert_eq!(toml::from_str::<File>(EXAMPLE).unwrap(), File::default());
        assert_eq!(load(EXAMPLE, &[], &Flags::default()).unwrap(), load("", &[], &Flags::default()).unwrap());
    }

    #[test]
    fn the_example_file_mentions_every_key_and_explains_it() {
        let (mut all, mut shown) = (Vec::new(), Vec::new());
        keys("", &toml::from_str(&toml::to_string(&File::default()).unwrap()).unwrap(), &mut all);
        keys("", &toml::from_str(EXAMPLE).unwrap(), &mut shown);
        all.sort();
        shown.sort();
        assert_eq!(shown, all);
        let lines: Vec<_> = EXAMPLE.lines().collect();
        for pair in lines.windows(2) {
            let is_key = !pair[1].starts_with(['#', '[']) && pair[1].contains('=');
            assert!(!is_key || pair[0].starts_with('#'), "no comment above `{}`", pair[1]);
        }
    }

    #[test]
    fn the_small_file_is_accepted() {
        let small = load(SMALL, &[], &Flags::default()).unwrap();
        assert_eq!(small.daemon.store.memory_bytes, 64 * MIB);
    }

    #[test]
    fn printed_settings_read_back_the_same() {
        let toml = "lanes = 3\npin = [4, 2]\n[listen]\nunix = [\"/run/b.sock\"]\nadmin = \"off\"\nrpc = [\"rpc+iwarp://127.0.0.1:9\"]\n[store]\nmemory = \"100MiB\"\n\
            value_max = 1000001\npinned_share = 0.5\npools = [\"/a:4GiB\", { dir = \"/b:7\" }]\n\
            [timers]\nidle_timeout = \"1500ms\"\n[native]\nallow = [\"10.0.0.0/8\", \"::1\"]\n[nfs]\nallow = []\nroot_squash = true\nuid = 7\ngid = 8\nfsid = 9\n[rpc]\nrpcbind = \"/run/b.sock\"\ninline = \"8KiB\"\ncredits = 7\nreads = 3\nlong = \"64KiB\"\nsegments = 99\n[log]\nformat = \"json\"";
        for toml in ["", toml] {
            let settings = load(toml, &[], &Flags::default()).unwrap();
            assert_eq!(load(&settings.to_toml(), &[], &Flags::default()).unwrap(), settings);
        }
    }

    #[test]
    fn each_layer_overrides_the_one_below() {
        let file = "[store]\nmemory = \"32MiB\"\nhead = \"64KiB\"\nvalue_max = \"1MiB\"";
        let environment = [("BULKHEAD_STORE__MEMORY", "64MiB"), ("BULKHEAD_STORE__HEAD", "128KiB")];
        let flags = Flags { memory: Some(ByteSize(128 * MIB)), ..Flags::default() };
        let store = load(file, &environment, &flags).unwrap().daemon.store;
        assert_eq!((store.memory_bytes, store.head_bytes, store.value_bytes_max), (128 * MIB, 128 * KIB, MIB));
        assert_eq!(store.index_bytes_max, 72 * MIB);
    }

    #[test]
    fn every_kind_of_value_can_come_from_the_environment() {
        let environment = [
            ("BULKHEAD_LANES", "2"),
            ("BULKHEAD_PIN", "0,2-3"),
            ("BULKHEAD_NATIVE__ALLOW", "10.0.0.0/8, fd00::/8"),
            ("BULKHEAD_LISTEN__MEMCACHE", "127.0.0.1:1, [::1]:2"),
            ("BULKHEAD_LISTEN__UNIX", "/run/b.sock"),
            ("BULKHEAD_LISTEN__ADMIN", "off"),
            ("BULKHEAD_STORE__POOLS", "/a:4GiB,/b"),
            ("BULKHEAD_STORE__PINNED_SHARE", "0.5"),
            ("BULKHEAD_LIMITS__CONNECTIONS_MAX", "7"),
            ("BULKHEAD_TIMERS__IDLE_TIMEOUT", "2m"),
            ("BULKHEAD_SERVER", "memcache://elsewhere:1"),
            ("HOME", "/nowhere"),
        ];
        let daemon = load("", &environment, &Flags::default()).unwrap().daemon;
        assert_eq!((daemon.lanes, daemon.pin), (2, Pin::Cores(vec![0, 2, 3])));
        assert_eq!(daemon.native.allow, ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()]);
        assert_eq!(daemon.listen.memcache, ["127.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()]);
        assert_eq!(daemon.listen.unix, [PathBuf::from("/run/b.sock")]);
        assert_eq!(daemon.listen.admin, None);
        let (a, b) = (&daemon.store.pools[0], &daemon.store.pools[1]);
        assert_eq!((a.dir.to_str(), a.bytes, b.dir.to_str(), b.bytes), (Some("/a"), Some(4 * GIB), Some("/b"), None));
        assert_eq!((daemon.store.pinned_share, daemon.limits.connections_max), (0.5, 7));
        assert_eq!(daemon.timers.idle_timeout, Some(Duration::from_secs(120)));
    }

    #[test]
    fn every_flag_reaches_its_key() {
        let flags = Flags {
            memcache: Some(vec![]),
            unix: Some(vec!["/run/b.sock".into()]),
            native: Some(vec!["native+iwarp://127.0.0.1:7?crc=off".parse().unwrap()]),
            admin: Some(Switch::Off),
            pools: vec![PoolConfig { dir: "/a".into(), bytes: Some(5 * MIB) }],
            memory: Some(ByteSize(16 * MIB)),
            head: Some(ByteSize(64 * KIB)),
            value_max: Some(ByteSize(3)),
            native_allow: vec!["10.0.0.0/8".parse().unwrap()],
            rpc: Some(vec!["rpc+iwarp://127.0.0.1:9".parse().unwrap()]),
            rpc_allow: vec!["fd00::/8".parse().unwrap()],
            rpcbind: Some(Switch::On("/run/rpcbind.sock".to_owned())),
            nfs_tcp: Some(vec!["127.0.0.1:2049".parse().unwrap()]),
            nfs_allow: vec!["10.1.0.0/16".parse().unwrap()],
            nfs_root_squash: true,
            lanes: Some(5),
            pin: Some(Pin::Cores(vec![1, 0])),
            log_level: Some("bulkhead=debug".to_owned()),
            log_format: Some(LogFormat::Json),
        };
        let Settings { daemon, log } = load("", &[], &flags).unwrap();
        assert!(daemon.listen.memcache.is_empty() && daemon.listen.admin.is_none());
        assert_eq!(daemon.listen.native, flags.native.unwrap());
        assert_eq!((daemon.native.allow, Some(daemon.pin)), (flags.native_allow, flags.pin));
        assert_eq!((daemon.listen.rpc, daemon.rpc.allow), (flags.rpc.unwrap(), flags.rpc_allow));
        assert_eq!(daemon.rpc.rpcbind, Some("/run/rpcbind.sock".into()));
        assert_eq!((daemon.listen.nfs_tcp, daemon.nfs.allow), (flags.nfs_tcp.unwrap(), flags.nfs_allow));
        assert!(daemon.nfs.root_squash);
        assert_eq!((daemon.listen.unix, daemon.store.pools, daemon.lanes), (flags.unix.unwrap(), flags.pools, 5));
        assert_eq!((daemon.store.memory_bytes, daemon.store.head_bytes), (16 * MIB, 64 * KIB));
        assert_eq!(daemon.store.value_bytes_max, 3);
        assert_eq!(log, LogConfig { level: "bulkhead=debug".to_owned(), format: LogFormat::Json });
    }

    #[test]
    fn unknown_keys_are_refused_by_name_in_every_layer() {
        for (toml, key) in [("speed = 1", "speed"), ("[store]\nmemroy = 1", "memroy"), ("[stroe]\nmemory = 1", "stroe")]
        {
            let text = refusal(toml);
            assert!(text.contains(key) && text.contains("bulkhead.toml") && !text.contains('\n'), "{text}");
        }
        let text = refusal("[store]\npools = [{ dir = \"/a\", szie = 1 }]");
        assert!(text.contains("szie"), "{text}");
        for name in ["BULKHEAD_STORE__MEMROY", "BULKHEAD_MEMORY"] {
            let text = load("", &[(name, "64MiB")], &Flags::default()).unwrap_err().to_string();
            assert!(text.contains("unknown field"), "{text}");
        }
    }

    #[test]
    fn relations_are_refused_with_both_numbers() {
        let cases = [
            ("[store]\nmemory = \"7MiB\"", "7MiB", "8MiB"),
            ("[store]\nmemory = \"10000KiB\"", "10000KiB", "1MiB"),
            ("[store]\nmemory = \"8MiB\"\nhead = \"4MiB\"", "4MiB", "8MiB"),
            ("[store]\nhead = \"100KiB\"", "100KiB", "64KiB"),
            ("[store]\nhead = 0", "0", "64KiB"),
            ("[store]\nstaging = \"300KiB\"", "300KiB", "256KiB"),
            ("[store]\nstaging = \"1MiB\"", "1MiB", "32"),
            ("[store]\nvalue_max = 0", "0", "value_max"),
            ("[store]\nindex_bytes_max = 9", "9", "1MiB"),
            ("[store]\npinned_share = 0.0", "0", "1"),
            ("[store]\npinned_share = 1.5", "1.5", "1"),
            ("[store]\ndisk_depth = 0", "0", "1024"),
            ("[store]\npools = [\"/a:5\"]", "/a", "5"),
            ("[store]\npools = [\"/a\", \"/a/b\"]", "/a", "/a/b"),
            ("[listen]\nmemcache = []\nnative = []", "memcache", "unix"),
            ("[listen]\nadmin = \"127.0.0.1:11211\"", "127.0.0.1:11211", "twice"),
            ("[limits]\nline_bytes_max = 100", "100", "2048"),
            ("[limits]\nconnections_max = 0", "0", "1"),
            ("[timers]\nreserve_wait = \"500ms\"", "500ms", "1s"),
            ("[timers]\nstall_timeout = \"0s\"", "stall_timeout", "0s"),
            ("[log]\nlevel = \"bulkhead=noise\"", "bulkhead=noise", "level"),
            ("lanes = 0", "0", "1024"),
            ("[rpc]\nrpcbind = \"/run/b.sock\"", "/run/b.sock", "listen.rpc has no door"),
            ("[rpc]\nrpcbind = \"on\"", "on", "absolute path"),
        ];
        for (toml, first, second) in cases {
            let text = refusal(toml);
            assert!(text.contains(first) && text.contains(second), "{toml}: {text}");
        }
        let long = format!("[listen]\nunix = [\"/{}\"]", "x".repeat(107));
        assert!(refusal(&long).contains("108") && refusal(&long).contains("107"));
        let long = format!("[rpc]\nrpcbind = \"/{}\"", "x".repeat(107));
        assert!(refusal(&long).contains("108") && refusal(&long).contains("107"));
    }

    #[test]
    fn values_of_the_wrong_form_are_refused_with_the_value() {
        for (toml, value) in [
            ("[store]\nmemory = \"4 parsecs\"", "4 parsecs"),
            ("[store]\nmemory = -1", "-1"),
            ("[store]\nmemory = \"9000000TiB\"", "9000000TiB"),
            ("[timers]\nstall_timeout = 5", "5"),
            ("[listen]\nadmin = \"localhost\"", "localhost"),
            ("[log]\nformat = \"xml\"", "xml"),
            ("[native]\nallow = [\"10.0.0.1/8\"]", "10.0.0.1/8"),
            ("pin = \"everywhere\"", "everywhere"),
            ("pin = []", "pin"),
            ("pin = [-1]", "-1"),
        ] {
            let text = refusal(toml);
            assert!(text.contains(value), "{toml}: {text}");
        }
        let text = load("", &[("BULKHEAD_STORE__MEMORY", "4 parsecs")], &Flags::default()).unwrap_err().to_string();
        assert!(text.contains("4 parsecs"), "{text}");
        let text = Settings::load(Some(Path::new("/no/such.toml")), [], &Flags::default()).unwrap_err().to_string();
        assert!(text.contains("/no/such.toml"), "{text}");
    }

    #[test]
    fn what_follows_the_last_colon_of_a_pool_is_a_size_or_has_a_slash() {
        let pool = |text: &str| text.parse::<PoolConfig>();
        assert_eq!(pool("/a:4GiB"), Ok(PoolConfig { dir: "/a".into(), bytes: Some(4 * GIB) }));
        assert!(pool("/a:b").unwrap_err().contains("/a:b"), "a mistyped size makes no directory");
        assert_eq!(pool("/a:b/"), Ok(PoolConfig { dir: "/a:b/".into(), bytes: None }));
        assert_eq!(pool("/a:1/b"), Ok(PoolConfig { dir: "/a:1/b".into(), bytes: None }));
        assert!(pool("/a:4parsecs").is_err() && pool(":4GiB").is_err() && pool("").is_err());
    }
}
