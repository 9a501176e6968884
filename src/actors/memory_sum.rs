//! What a daemon may take of RAM, known before it starts.

use crate::config::Config;
use crate::fabric::iwarp;
use crate::programs::memcache::output::TEXT_BYTES_MAX;
use crate::programs::memcache::session::{INPUT_BYTES, LONG_LINE_BYTES_MAX};
use crate::programs::nfs;
use crate::programs::service::DUPLICATES;
use crate::wire::native::stream::PIPELINE_BYTES_MAX;
use std::fmt;

/// RAM that the configuration allows, by what takes it; the process stays under the sum.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemorySum {
    pub arena_bytes: u64,
    pub staging_bytes: u64,
    pub index_bytes: u64,
    pub connections_bytes: u64,
    /// Windows and rings of native connections.
    pub native_bytes: u64,
    /// Messages, windows, long calls and long replies of RPC connections, and what is remembered of their calls.
    pub rpc_bytes: u64,
    /// Code, threads, allocator and kernel buffers mapped for rings.
    pub process_bytes: u64,
}

/// Input buffer, text of replies, and the last reply beyond its bound, actor and timers of one busy connection.
const CONNECTION_BYTES: u64 = (INPUT_BYTES + TEXT_BYTES_MAX) as u64 + (16 << 10);
/// Actors and sinks, input, text of replies, and what its queue pair takes: one busy native connection without its windows
/// and ring.
const NATIVE_BYTES: u64 = (64 << 10) + (PIPELINE_BYTES_MAX + iwarp::QUEUE_PAIR_BYTES_MAX) as u64;
/// Actors, tables of calls and places, and what its queue pair takes: one busy RPC connection without its buffers.
const RPC_BYTES: u64 = (128 << 10) + iwarp::QUEUE_PAIR_BYTES_MAX as u64;
/// Input buffer, replies and the last one beyond their bound, actor, timers and what is known of calls: one busy connection
/// that mounts.
const NFS_BYTES: u64 = (nfs::session::INPUT_BYTES + 2 * nfs::session::MESSAGE_BYTES_MAX) as u64 + (32 << 10);
/// What is remembered of calls that were answered.
const RPC_SHARED_BYTES: u64 = DUPLICATES.bytes_max as u64 + DUPLICATES.entries_max as u64 * 256;
const PROCESS_BYTES: u64 = 32 << 20;

impl MemorySum {
    pub fn of(config: &Config) -> Self {
        let native_bytes =
            config.native.windows.mapping_bytes() + config.native.ring.mapping_bytes(4096) + NATIVE_BYTES;
        Self {
            arena_bytes: config.store.memory_bytes,
            staging_bytes: config.store.staging_bytes * config.lanes as u64,
            index_bytes: config.store.index_bytes_max,
            connections_bytes: config.limits.connections_max as u64 * Self::connection_bytes(config)
                + LONG_LINE_BYTES_MAX,
            native_bytes: config.listen.native.len() as u64 * config.native.connections_max as u64 * native_bytes,
            rpc_bytes: Self::rpc_bytes(config),
            process_bytes: PROCESS_BYTES,
        }
    }

    /// Of a busy connection on a socket: any of them may mount, where one may.
    fn connection_bytes(config: &Config) -> u64 {
        if config.listen.nfs_tcp.is_empty() { CONNECTION_BYTES } else { CONNECTION_BYTES.max(NFS_BYTES) }
    }

    fn rpc_bytes(config: &Config) -> u64 {
        if config.listen.rpc.is_empty() {
            return if config.listen.nfs_tcp.is_empty() { 0 } else { RPC_SHARED_BYTES };
        }
        let rpc = &config.rpc;
        // A message is received into one buffer, held as another while its call is served, and answered from a third.
        let messages = 3 * u64::from(rpc.credits_max) * u64::from(rpc.inline_bytes).next_multiple_of(4096);
        let connection = messages + rpc.windows.mapping_bytes() + 2 * rpc.long_bytes_max + RPC_BYTES;
        config.listen.rpc.len() as u64 * rpc.connections_max as u64 * connection + RPC_SHARED_BYTES
    }

    pub fn total_bytes(&self) -> u64 {
        self.arena_bytes
            + self.staging_bytes
            + self.index_bytes
            + self.connections_bytes
            + self.native_bytes
            + self.rpc_bytes
            + self.process_bytes
    }
}

impl fmt::Display for MemorySum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        write!(
            f,
            "memory {} MiB = arena {} + staging {} + index {} + connections {} + native {} + rpc {} + process {}",
            mib(self.total_bytes()),
            mib(self.arena_bytes),
            mib(self.staging_bytes),
            mib(self.index_bytes),
            mib(self.connections_bytes),
            mib(self.native_bytes),
            mib(self.rpc_bytes),
            mib(self.process_bytes)
        )
    }
}
