//! The configuration file as it is written, and the defaults that depend on the machine.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::units::{list, text};
use super::{
    Auto, ByteSize, Config, ConfigError, FabricKind, GIB, KIB, LimitsConfig, ListenConfig, LogConfig, LogFormat,
    MEMORY_BYTES_MIN, MEMORY_STEP_BYTES, MIB, NativeAddress, NativeConfig, Network, NfsConfig, Pin, PoolConfig,
    RpcAddress, RpcConfig, Settings, StoreConfig, Switch, TimeSpan, TimersConfig,
};
use crate::fabric::Address;
use crate::wire::native::descriptor::{GeometryError, RingGeometry, WindowGeometry};
use crate::wire::native::ring::SLOT_BYTES;

/// The file as it is written. Every key has a default; `Auto` ones depend on the machine.
#[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct File {
    #[serde(with = "text")]
    lanes: Auto<usize>,
    #[serde(with = "super::pin")]
    pin: Pin,
    listen: ListenSection,
    store: StoreSection,
    limits: LimitsSection,
    timers: TimersSection,
    native: NativeSection,
    rpc: RpcSection,
    nfs: NfsSection,
    log: LogSection,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct NativeSection {
    #[serde(with = "text")]
    window: ByteSize,
    windows: u32,
    #[serde(with = "text")]
    ring: ByteSize,
    connections_max: usize,
    #[serde(deserialize_with = "list::deserialize")]
    allow: Vec<Network>,
}

impl Default for NativeSection {
    fn default() -> Self {
        let (window, ring) = (ByteSize(256 * KIB), ByteSize(64 * KIB));
        Self { window, windows: 4, ring, connections_max: 256, allow: Vec::new() }
    }
}

impl NativeSection {
    fn resolve(self) -> Result<NativeConfig, ConfigError> {
        let Self { window, windows, ring, connections_max, allow } = self;
        let wrong = |key, error: GeometryError| ConfigError::Relation(format!("{key}: {error}"));
        Ok(NativeConfig {
            windows: WindowGeometry::new(window.0, windows).map_err(|error| wrong("native.window", error))?,
            ring: RingGeometry::within(ring.0).map_err(|error| wrong("native.ring", error))?,
            connections_max,
            allow,
        })
    }
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct RpcSection {
    #[serde(with = "text")]
    inline: ByteSize,
    credits: u32,
    #[serde(with = "text")]
    window: ByteSize,
    windows: u32,
    reads: usize,
    #[serde(with = "text")]
    long: ByteSize,
    segments: usize,
    connections_max: usize,
    #[serde(deserialize_with = "list::deserialize")]
    allow: Vec<Network>,
    #[serde(with = "text")]
    rpcbind: Switch<String>,
}

impl Default for RpcSection {
    fn default() -> Self {
        Self {
            inline: ByteSize(4 * KIB),
            credits: 64,
            window: ByteSize(256 * KIB),
            windows: 4,
            reads: 16,
            long: ByteSize(2 * MIB),
            segments: 2048,
            connections_max: 64,
            allow: Vec::new(),
            rpcbind: Switch::Off,
        }
    }
}

impl RpcSection {
    fn resolve(self) -> Result<RpcConfig, ConfigError> {
        let Self { inline, credits, window, windows, reads, long, segments, connections_max, allow, rpcbind } = self;
        let windows = WindowGeometry::new(window.0, windows);
        Ok(RpcConfig {
            inline_bytes: u32::try_from(inline.0).unwrap_or(u32::MAX),
            credits_max: credits,
            windows: windows.map_err(|error| ConfigError::Relation(format!("rpc.window: {error}")))?,
            reads_max: reads,
            long_bytes_max: long.0,
            segments_max: segments,
            connections_max,
            allow,
            rpcbind: rpcbind.into_option().map(PathBuf::from),
        })
    }
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct NfsSection {
    #[serde(deserialize_with = "list::deserialize")]
    allow: Vec<Network>,
    root_squash: bool,
    #[serde(with = "text")]
    uid: Auto<u32>,
    #[serde(with = "text")]
    gid: Auto<u32>,
    fsid: u64,
}

/// `bulkhead`, in ASCII.
const FSID: u64 = u64::from_be_bytes(*b"bulkhead");

impl Default for NfsSection {
    fn default() -> Self {
        let loopback = ["127.0.0.0/8", "::1/128"].map(|network| network.parse().expect("a network"));
        Self { allow: loopback.to_vec(), root_squash: false, uid: Auto::Auto, gid: Auto::Auto, fsid: FSID }
    }
}

impl NfsSection {
    fn resolve(self) -> NfsConfig {
        let Self { allow, root_squash, uid, gid, fsid } = self;
        let or = |set, own: fn() -> u32| match set {
            Auto::Set(id) => id,
            Auto::Auto => own(),
        };
        NfsConfig { allow, root_squash, uid: or(uid, user_id), gid: or(gid, group_id), fsid }
    }
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct ListenSection {
    #[serde(deserialize_with = "list::deserialize")]
    memcache: Vec<SocketAddr>,
    #[serde(deserialize_with = "list::deserialize")]
    unix: Vec<PathBuf>,
    #[serde(deserialize_with = "list::deserialize")]
    native: Vec<NativeAddress>,
    #[serde(deserialize_with = "list::deserialize")]
    rpc: Vec<RpcAddress>,
    #[serde(deserialize_with = "list::deserialize")]
    nfs_tcp: Vec<SocketAddr>,
    #[serde(with = "text")]
    admin: Switch<SocketAddr>,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct StoreSection {
    #[serde(with = "text")]
    memory: Auto<ByteSize>,
    #[serde(with = "text")]
    head: ByteSize,
    #[serde(with = "text")]
    value_max: ByteSize,
    #[serde(with = "text")]
    staging: ByteSize,
    #[serde(with = "text")]
    index_bytes_max: Auto<ByteSize>,
    pinned_share: f64,
    disk_depth: usize,
    /// Empty: one pool at the default place.
    #[serde(deserialize_with = "list::deserialize")]
    pools: Vec<PoolEntry>,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct LimitsSection {
    connections_max: usize,
    pins_per_connection_max: usize,
    #[serde(with = "text")]
    line_bytes_max: ByteSize,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct TimersSection {
    #[serde(with = "text")]
    stall_timeout: TimeSpan,
    #[serde(with = "text")]
    reserve_wait: TimeSpan,
    #[serde(with = "text")]
    claim_idle: TimeSpan,
    #[serde(with = "text")]
    shutdown_grace: TimeSpan,
    #[serde(with = "text")]
    idle_timeout: Switch<TimeSpan>,
}

#[derive(Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields, default)]
struct LogSection {
    level: String,
    #[serde(with = "text")]
    format: LogFormat,
}

/// `"DIR[:SIZE]"` or `{ dir = "DIR", size = "SIZE" }`; the table takes any directory name.
#[derive(Clone, Debug, PartialEq)]
struct PoolEntry(PoolConfig);

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PoolTable {
    dir: PathBuf,
    #[serde(with = "text", default)]
    size: Auto<ByteSize>,
}

impl FromStr for PoolEntry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

impl Serialize for PoolEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let size = self.0.bytes.map_or(Auto::Auto, |bytes| Auto::Set(ByteSize(bytes)));
        PoolTable { dir: self.0.dir.clone(), size }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PoolEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entry;
        impl<'de> de::Visitor<'de> for Entry {
            type Value = PoolEntry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"DIR[:SIZE]\" or { dir = \"DIR\", size = \"SIZE\" }")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<PoolEntry, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<PoolEntry, A::Error> {
                let table = PoolTable::deserialize(de::value::MapAccessDeserializer::new(map))?;
                let bytes = match table.size {
                    Auto::Auto => None,
                    Auto::Set(size) => Some(size.0),
                };
                Ok(PoolEntry(PoolConfig { dir: table.dir, bytes }))
            }
        }
        from.deserialize_any(Entry)
    }
}

impl Default for ListenSection {
    fn default() -> Self {
        Self {
            memcache: vec![SocketAddr::from(([127, 0, 0, 1], 11211))],
            unix: Vec::new(),
            native: vec![NativeAddress::new(
                FabricKind::Iwarp { crc: true },
                Address::Socket(([127, 0, 0, 1], 11212).into()),
            )],
            rpc: Vec::new(),
            nfs_tcp: Vec::new(),
            admin: Switch::On(SocketAddr::from(([127, 0, 0, 1], 11290))),
        }
    }
}

impl Default for StoreSection {
    fn default() -> Self {
        Self {
            memory: Auto::Auto,
            head: ByteSize(256 * KIB),
            value_max: ByteSize(16 * GIB),
            staging: ByteSize(16 * MIB),
            index_bytes_max: Auto::Auto,
            pinned_share: 0.25,
            disk_depth: 32,
            pools: Vec::new(),
        }
    }
}

impl Default for LimitsSection {
    fn default() -> Self {
        Self { connections_max: 1024, pins_per_connection_max: 64, line_bytes_max: ByteSize(MIB) }
    }
}

impl Default for TimersSection {
    fn default() -> Self {
        let seconds = |count| TimeSpan(Duration::from_secs(count));
        Self {
            stall_timeout: seconds(30),
            reserve_wait: seconds(10),
            claim_idle: seconds(1),
            shutdown_grace: seconds(10),
            idle_timeout: Switch::Off,
        }
    }
}

impl Default for LogSection {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

/// What the defaults are worked out from.
pub(super) struct Machine {
    pub memory_bytes: u64,
    pub cores: usize,
    pub default_pool: PathBuf,
}

impl Machine {
    pub fn here() -> Self {
        let pool = default_pool(std::env::var_os("XDG_CACHE_HOME").as_deref(), std::env::var_os("HOME").as_deref());
        Self {
            memory_bytes: machine_memory_bytes(),
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
            default_pool: pool,
        }
    }
}

/// RAM of this machine, or of this control group where that has less, in bytes.
pub fn machine_memory_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).and_then(|rest| {
        let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(KIB)
    });
    let group = fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    // Without /proc there is nothing to go by; a gibibyte gives the default of a small machine.
    total.unwrap_or(GIB).min(group.unwrap_or(u64::MAX))
}

/// `$XDG_CACHE_HOME/bulkhead/pool`, else `$HOME/.cache/bulkhead/pool` if that can be made, else a place of this user's
/// under /var/tmp. A relative XDG_CACHE_HOME is void, as its specification says.
fn default_pool(xdg_cache_home: Option<&OsStr>, home: Option<&OsStr>) -> PathBuf {
    let absolute = |dir: &OsStr| Some(PathBuf::from(dir)).filter(|dir| dir.is_absolute());
    if let Some(cache) = xdg_cache_home.and_then(absolute) {
        return cache.join("bulkhead/pool");
    }
    if let Some(home) = home.and_then(absolute).filter(|home| home.is_dir()) {
        let pool = home.join(".cache/bulkhead/pool");
        let existing = pool.ancestors().find(|dir| dir.exists()).unwrap_or(&home);
        if dir_is_writable(existing) {
            return pool;
        }
    }
    PathBuf::from(format!("/var/tmp/bulkhead-{}/pool", user_id()))
}

/// Whether this user can make files in `dir`, found by making one: without a name where the file system has such files,
/// so that nothing is left behind even by a crash.
fn dir_is_writable(dir: &Path) -> bool {
    let nameless = fs::OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(dir);
    match nameless {
        Ok(_) => true,
        Err(err) if err.raw_os_error() == Some(libc::EOPNOTSUPP) || err.kind() == ErrorKind::IsADirectory => {
            let named = dir.join(format!(".bulkhead-probe-{}", std::process::id()));
            let made = fs::OpenOptions::new().write(true).create_new(true).open(&named).is_ok();
            made && fs::remove_file(&named).is_ok()
        }
        Err(_) => false,
    }
}

/// Effective user id, as a number: a name may be missing in a container.
pub(crate) fn user_id() -> u32 {
    effective_id("Uid:")
}

fn group_id() -> u32 {
    effective_id("Gid:")
}

fn effective_id(name: &str) -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix(name));
    ids.and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

impl File {
    /// Every `auto` worked out.
    pub fn resolve(self, machine: &Machine) -> Result<Settings, ConfigError> {
        let Self { lanes, pin, listen, store, limits, timers, native, rpc, nfs, log } = self;
        let memory_bytes = match store.memory {
            Auto::Set(size) => size.0,
            Auto::Auto => {
                let quarter = (machine.memory_bytes / 4).min(4 * GIB);
                (quarter - quarter % MEMORY_STEP_BYTES).max(MEMORY_BYTES_MIN)
            }
        };
        let index_bytes_max = match store.index_bytes_max {
            Auto::Set(size) => size.0,
            Auto::Auto => 64 * MIB + memory_bytes / 16,
        };
        let lanes = match lanes {
            Auto::Set(lanes) => lanes,
            Auto::Auto => machine.cores.saturating_sub(1).max(1),
        };
        let mut pools: Vec<_> = store.pools.into_iter().map(|entry| entry.0).collect();
        if pools.is_empty() {
            pools.push(PoolConfig { dir: machine.default_pool.clone(), bytes: None });
        }
        let daemon = Config {
            listen: ListenConfig {
                memcache: listen.memcache,
                unix: listen.unix,
                native: listen.native,
                rpc: listen.rpc,
                nfs_tcp: listen.nfs_tcp,
                admin: listen.admin.into_option(),
            },
            store: StoreConfig {
                memory_bytes,
                head_bytes: store.head.0,
                value_bytes_max: store.value_max.0,
                staging_bytes: store.staging.0,
                index_bytes_max,
                pinned_share: store.pinned_share,
                pools,
                disk_depth: store.disk_depth,
            },
            limits: LimitsConfig {
                connections_max: limits.connections_max,
                pins_per_connection_max: limits.pins_per_connection_max,
                line_bytes_max: usize::try_from(limits.line_bytes_max.0).unwrap_or(usize::MAX),
            },
            timers: TimersConfig {
                stall_timeout: timers.stall_timeout.0,
                reserve_wait: timers.reserve_wait.0,
                claim_idle: timers.claim_idle.0,
                shutdown_grace: timers.shutdown_grace.0,
                idle_timeout: timers.idle_timeout.into_option().map(|span| span.0),
            },
            native: native.resolve()?,
            rpc: rpc.resolve()?,
            nfs: nfs.resolve(),
            lanes,
            pin,
        };
        Ok(Settings { daemon, log: LogConfig { level: log.level, format: log.format } })
    }
}

impl From<&Settings> for File {
    fn from(settings: &Settings) -> Self {
        let Settings { daemon: Config { listen, store, limits, timers, native, rpc, nfs, lanes, pin }, log } = settings;
        Self {
            lanes: Auto::Set(*lanes),
            pin: pin.clone(),
            listen: ListenSection {
                memcache: listen.memcache.clone(),
                unix: listen.unix.clone(),
                native: listen.native.clone(),
                rpc: listen.rpc.clone(),
                nfs_tcp: listen.nfs_tcp.clone(),
                admin: listen.admin.into(),
            },
            store: StoreSection {
                memory: Auto::Set(ByteSize(store.memory_bytes)),
                head: ByteSize(store.head_bytes),
                value_max: ByteSize(store.value_bytes_max),
                staging: ByteSize(store.staging_bytes),
                index_bytes_max: Auto::Set(ByteSize(store.index_bytes_max)),
                pinned_share: store.pinned_share,
                disk_depth: store.disk_depth,
                pools: store.pools.iter().cloned().map(PoolEntry).collect(),
            },
            limits: LimitsSection {
                connections_max: limits.connections_max,
                pins_per_connection_max: limits.pins_per_connection_max,
                line_bytes_max: ByteSize(limits.line_bytes_max as u64),
            },
            timers: TimersSection {
                stall_timeout: TimeSpan(timers.stall_timeout),
                reserve_wait: TimeSpan(timers.reserve_wait),
                claim_idle: TimeSpan(timers.claim_idle),
                shutdown_grace: TimeSpan(timers.shutdown_grace),
                idle_timeout: timers.idle_timeout.map(TimeSpan).into(),
            },
            native: NativeSection {
                window: ByteSize(u64::from(native.windows.window_bytes())),
                windows: native.windows.window_count(),
                ring: ByteSize(u64::from(native.ring.slot_count()) * SLOT_BYTES as u64),
                connections_max: native.connections_max,
                allow: native.allow.clone(),
            },
            rpc: RpcSection {
                inline: ByteSize(rpc.inline_bytes.into()),
                credits: rpc.credits_max,
                window: ByteSize(rpc.windows.window_bytes().into()),
                windows: rpc.windows.window_count(),
                reads: rpc.reads_max,
                long: ByteSize(rpc.long_bytes_max),
                segments: rpc.segments_max,
                connections_max: rpc.connections_max,
                allow: rpc.allow.clone(),
                rpcbind: rpc.rpcbind.as_ref().map(|path| path.display().to_string()).into(),
            },
            nfs: NfsSection {
                allow: nfs.allow.clone(),
                root_squash: nfs.root_squash,
                uid: Auto::Set(nfs.uid),
                gid: Auto::Set(nfs.gid),
                fsid: nfs.fsid,
            },
            log: LogSection { level: log.level.clone(), format: log.format },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn defaults_follow_the_machine() {
        let machine = |memory_bytes, cores| Machine { memory_bytes, cores, default_pool: "/p".into() };
        let daemon = |machine| File::default().resolve(&machine).unwrap().daemon;
        let large = daemon(machine(1 << 40, 64));
        assert_eq!((large.store.memory_bytes, large.lanes), (4 * GIB, 63));
        assert_eq!(large.store.index_bytes_max, 320 * MIB);
        let odd = daemon(machine(8 * GIB - 12_345, 2));
        assert_eq!((odd.store.memory_bytes, odd.lanes), (2 * GIB - MIB, 1));
        let tiny = daemon(machine(16 * MIB, 1));
        assert_eq!((tiny.store.memory_bytes, tiny.lanes), (8 * MIB, 1));
        for config in [large, odd, tiny] {
            config.check().unwrap();
            assert_eq!(config.store.pools, [PoolConfig { dir: "/p".into(), bytes: None }]);
        }
        Config::of_this_machine().check().unwrap();
    }

    #[test]
    fn the_default_pool_is_where_this_user_may_write() {
        let home = tempfile::tempdir().unwrap();
        let os = |path: &Path| path.as_os_str().to_owned();
        let elsewhere = PathBuf::from(format!("/var/tmp/bulkhead-{}/pool", user_id()));
        assert_eq!(default_pool(Some(OsStr::new("/x")), None), PathBuf::from("/x/bulkhead/pool"));
        assert_eq!(default_pool(None, Some(&os(home.path()))), home.path().join(".cache/bulkhead/pool"));
        assert_eq!(default_pool(Some(OsStr::new("relative")), None), elsewhere);
        assert_eq!(default_pool(None, Some(OsStr::new("/nonexistent"))), elsewhere);
        assert_eq!(default_pool(None, Some(OsStr::new("/proc"))), elsewhere);
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "looking leaves no trace");
        if user_id() != 0 {
            fs::set_permissions(home.path(), fs::Permissions::from_mode(0o500)).unwrap();
            assert_eq!(default_pool(None, Some(&os(home.path()))), elsewhere);
        }
    }
}
