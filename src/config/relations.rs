//! What values may be, and how they must fit together.

use super::{
    ByteSize, Config, ConfigError, HEAD_STEP_BYTES, KIB, LimitsConfig, ListenConfig, MEMORY_BYTES_MIN,
    MEMORY_STEP_BYTES, MIB, RpcConfig, STAGING_STEP_BYTES, StoreConfig, TimeSpan, TimersConfig, UNIX_PATH_BYTES_MAX,
};
use crate::fabric::Address;
use crate::wire::rpcrdma::private_data;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

impl Config {
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
