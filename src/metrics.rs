//! Every counter of the daemon, in one struct that its parts share. The admin port turns it into Prometheus text.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// A struct of counts whose names, in `stats` and on the admin port, are those of its fields and are written once.
macro_rules! counts {
    ($(#[doc = $about:literal])+ $name:ident { $($(#[doc = $help:literal])+ $field:ident,)+ }) => {
        $(#[doc = $about])+
        #[derive(Debug, Default)]
        pub struct $name {
            $($(#[doc = $help])+ pub $field: Count,)+
        }

        impl $name {
            /// Every count, in the order of the struct.
            pub fn list(&self) -> impl Iterator<Item = Named<'_>> {
                [$(Named { name: stringify!($field), help: concat!($($help),+).trim(), count: &self.$field },)+].into_iter()
            }

            /// Sets all back to zero.
            pub fn reset(&self) {
                self.list().for_each(|named| named.count.reset());
            }
        }
    };
}

/// One count of a list.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    pub name: &'static str,
    /// What is counted, in one line.
    pub help: &'static str,
    pub count: &'a Count,
}

counts! {
    /// What memcache clients asked for and got; the names are those of `stats`.
    MemcacheCounts {
        /// Keys asked for by get, gets, gat and gats.
        cmd_get,
        /// Storage commands begun, whatever came of them.
        cmd_set,
        /// flush_all commands.
        cmd_flush,
        /// Keys touched by touch, gat and gats, found or not.
        cmd_touch,
        /// Keys asked for and found.
        get_hits,
        /// Keys asked for and not found.
        get_misses,
        /// Misses of values that had expired.
        get_expired,
        /// Misses of values that a flush_all took.
        get_flushed,
        /// Deletes that found nothing.
        delete_misses,
        /// Deletes that took a value.
        delete_hits,
        /// incr commands that found nothing.
        incr_misses,
        /// incr commands done.
        incr_hits,
        /// decr commands that found nothing.
        decr_misses,
        /// decr commands done.
        decr_hits,
        /// cas commands that found nothing.
        cas_misses,
        /// cas commands done.
        cas_hits,
        /// cas commands that found another version.
        cas_badval,
        /// Touches done.
        touch_hits,
        /// Touches that found nothing.
        touch_misses,
        /// Values refused because they are longer than the largest taken.
        store_too_large,
        /// Values refused because no space came free in time.
        store_no_memory,
        /// Values refused because no line end followed their octets.
        bad_data_chunks,
    }
}

counts! {
    /// Octets of values that code of the daemon copied, by the way they went; what kernel and fabric copy is not in them.
    /// Beside [`ConnectionCounts::bytes_written`] they say how often an octet is copied before it is sent.
    CopyCounts {
        /// GET by native and RPC: from RAM into the slot that is sent from.
        arena_to_slot,
        /// GET by native and RPC: from a staging buffer, where a segment cannot be read straight into the slot.
        staging_to_slot,
        /// Native SET: from the window that the peer wrote to.
        window_to_arena,
        /// Text GET: values of at most 4 KiB, into the text of the reply. RPC GET: ranges in RAM that have no write chunk.
        arena_to_reply,
        /// Text SET: what came with the command, from the input buffer. RPC PUT: what came in the message. NFS over TCP: the data of
        /// WRITEs.
        input_to_arena,
        /// RPC PUT: from the buffer that it was pulled into.
        pulled_to_arena,
        /// RPC: calls too long for a message, from the buffers that they were pulled into.
        pulled_to_call,
        /// RPC GET: ranges not in RAM that have no write chunk, from a slot.
        slot_to_reply,
        /// RPC: replies too long for a message, into the slots that they are sent from.
        reply_to_slot,
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

/// How often each cause was met. Causes are words of the program, so they are few.
#[derive(Debug, Default)]
pub struct Causes(Mutex<BTreeMap<&'static str, u64>>);

impl Causes {
    /// Once more.
    pub fn add(&self, cause: &'static str) {
        *self.lock().entry(cause).or_default() += 1;
    }

    /// Every cause met so far, in the order of the alphabet.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        self.lock().iter().map(|(cause, count)| (*cause, *count)).collect()
    }

    /// How often `cause` was met.
    pub fn get(&self, cause: &str) -> u64 {
        self.lock().get(cause).copied().unwrap_or(0)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections of the doors of one kind; they are among [`ConnectionCounts`] too.
#[derive(Debug, Default)]
pub struct FabricCounts {
    /// Gauge.
    pub current: Count,
    pub total: Count,
    /// Why peers were rejected.
    pub rejections: Causes,
    /// Why connections ended.
    pub ends: Causes,
}

/// What became of the messages of RPC clients.
#[derive(Debug, Default)]
pub struct RpcCallCounts {
    /// Calls of program `bulkhead` that were executed, by procedure.
    pub procedures: Causes,
    /// The same of NFS.
    pub nfs: Causes,
    /// The same of MOUNT.
    pub mount: Causes,
    /// RDMA_ERROR, by what was wrong.
    pub refused: Causes,
    /// Replies that say why a call was not executed.
    pub denied: Causes,
    /// Messages that were not answered.
    pub dropped: Causes,
    /// Duplicates that were answered as the first was.
    pub replayed: Count,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Metrics {
    pub memcache: MemcacheCounts,
    pub connections: ConnectionCounts,
    pub native: FabricCounts,
    pub rpc: FabricCounts,
    /// Doors for NFS on TCP.
    pub nfs: FabricCounts,
    pub rpc_calls: RpcCallCounts,
    pub copied: CopyCounts,
    /// Values that could not be read back from disk.
    pub failed_reads: Count,
    /// Disk reads that were given back unsent because others waited for the buffers.
    pub reads_repeated: Count,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_every_count_once_with_its_help() {
        let counts = MemcacheCounts::default();
        let names: Vec<_> = counts.list().map(|named| named.name).collect();
        let fields = format!("{counts:?}").matches(": Count(").count();
        assert_eq!(names.len(), fields);
        assert!(names.iter().enumerate().all(|(at, name)| !names[..at].contains(name)), "{names:?}");
        assert!(counts.list().all(|named| named.help.ends_with('.') && !named.help.starts_with(' ')));
        counts.cas_badval.add(3);
        let shown: Vec<_> = counts.list().filter(|named| named.count.get() == 3).map(|named| named.name).collect();
        assert_eq!(shown, ["cas_badval"]);
    }

    #[test]
    fn reset_reaches_every_count() {
        let counts = MemcacheCounts::default();
        counts.list().for_each(|named| named.count.add(7));
        counts.reset();
        assert!(counts.list().all(|named| named.count.get() == 0));
    }
}
