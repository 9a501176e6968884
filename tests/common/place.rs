//! Where values lie, as the counters tell, and how they are pushed there.

use super::client::Client;
use super::daemon::Daemon;
use super::pattern::Pattern;
use super::{KIB, MIB};

/// Where a value lies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Location {
    Ram,
    HalfOut,
    Disk,
}

impl Location {
    /// Where the value lay that was read once between two looks at [`reads`].
    ///
    /// # Panics
    /// If not one was.
    pub fn between(before: [u64; 3], after: [u64; 3]) -> Self {
        match (after[0] - before[0], after[1] - before[1], after[2] - before[2]) {
            (1, 0, 0) => Self::Ram,
            (1, 0, 1..) => Self::HalfOut,
            (0, 1, 1..) => Self::Disk,
            other => panic!("head hits, head misses, disk reads: {other:?}"),
        }
    }
}

/// Reads that found the first octet in RAM, and on disk, and segments read from disk.
pub fn reads(daemon: &Daemon) -> [u64; 3] {
    ["bulkhead_store_head_hits_total", "bulkhead_store_head_misses_total", "bulkhead_disk_reads_total"]
        .map(|name| daemon.metric(name).unwrap_or_else(|| panic!("no metric {name}")) as u64)
}

/// Pushes others' bodies out of RAM: `bytes` in values of 8 MiB.
pub fn push_bodies(client: &mut Client, bytes: u64) {
    for index in 0..bytes.div_ceil(8 * MIB) {
        client.set(&format!("filler-body-{index}"), Pattern(9000 + index), 8 * MIB);
    }
}

/// Pushes others' heads of 256 KiB out too: `bytes` in values that are little more than a head.
pub fn push_heads(client: &mut Client, bytes: u64) {
    for index in 0..bytes / (256 * KIB) {
        client.set(&format!("filler-head-{index}"), Pattern(9900 + index), 256 * KIB + 1);
    }
}
