//! Every counter of the daemon, in one struct that its parts share. The admin port turns it into Prometheus text.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows, or a gauge that is moved both ways.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// What memcache clients asked for and got; the names are those of `stats`.
#[derive(Debug, Default)]
pub struct MemcacheCounts {
    pub cmd_get: Count,
    pub cmd_set: Count,
    pub cmd_flush: Count,
    pub cmd_touch: Count,
    pub get_hits: Count,
    pub get_misses: Count,
    pub get_expired: Count,
    pub get_flushed: Count,
    pub delete_hits: Count,
    pub delete_misses: Count,
    pub incr_hits: Count,
    pub incr_misses: Count,
    pub decr_hits: Count,
    pub decr_misses: Count,
    pub cas_hits: Count,
    pub cas_misses: Count,
    pub cas_badval: Count,
    pub touch_hits: Count,
    pub touch_misses: Count,
    pub store_too_large: Count,
    pub store_no_memory: Count,
    pub bad_data_chunks: Count,
}

impl MemcacheCounts {
    /// What `stats reset` sets back.
    pub fn reset(&self) {
        for count in [
            &self.cmd_get,
            &self.cmd_set,
            &self.cmd_flush,
            &self.cmd_touch,
            &self.get_hits,
            &self.get_misses,
            &self.get_expired,
            &self.get_flushed,
            &self.delete_hits,
            &self.delete_misses,
            &self.incr_hits,
            &self.incr_misses,
            &self.decr_hits,
            &self.decr_misses,
            &self.cas_hits,
            &self.cas_misses,
            &self.cas_badval,
            &self.touch_hits,
            &self.touch_misses,
            &self.store_too_large,
            &self.store_no_memory,
            &self.bad_data_chunks,
        ] {
            count.reset();
        }
    }
}

/// Why connections ended.
#[derive(Debug, Default)]
pub struct CloseCounts {
    pub by_peer: Count,
    pub by_quit: Count,
    pub stalled: Count,
    pub idle: Count,
    pub protocol: Count,
    pub failed_read: Count,
    pub socket_error: Count,
    pub shutdown: Count,
}

/// Connections, and octets on their sockets.
#[derive(Debug, Default)]
pub struct ConnectionCounts {
    /// Gauge.
    pub current: Count,
    pub total: Count,
    pub rejected: Count,
    /// Octets of input buffers beyond the first 16 KiB of each connection. Gauge.
    pub long_line_bytes: Count,
    pub bytes_read: Count,
    pub bytes_written: Count,
    pub closed: CloseCounts,
    /// Messages sent by connections to other actors, and received from them.
    pub messages: Count,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Metrics {
    pub memcache: MemcacheCounts,
    pub connections: ConnectionCounts,
    /// Values that could not be read back from disk.
    pub failed_reads: Count,
    /// Disk reads that were given back unsent because others waited for the buffers.
    pub reads_repeated: Count,
}
