//! Commands that are answered at once, against the store. Texts and corner cases follow memcached 1.6.18 unless
//! `docs/memcache.md` says otherwise.

use crate::metrics::Metrics;
use crate::store::draft::Draft;
use crate::store::segment::Content;
use crate::store::{Committed, Condition, Expiry, Joined, Side, Store};
use crate::wire::memcache::number::{append_padded_number, parse_stored_number};
use crate::wire::memcache::request::{Direction, StoreHeader, StoreVerb};
use crate::wire::memcache::response::{self as reply, stat_line};
use std::time::Instant;

/// An exptime up to this counts from now, a larger one is a date (30 days).
const RELATIVE_EXPTIME_MAX: i64 = 60 * 60 * 24 * 30;
/// A longer value is no number: 20 digits and blanks around them.
const NUMBER_BYTES_MAX: u64 = 64;
/// Conflicts with other writers before `incr` gives up; each conflict is somebody else's success.
const ARITHMETIC_TRIES_MAX: usize = 1000;

/// What `version` and `stats` answer: the memcached whose replies these are, then our own.
///
/// libmemcached asks for the version, takes the first three numbers in it, and gives up on a server whose first is zero;
/// clients with feature tables expect no less than 1.6 of one that takes today's commands.
pub const VERSION: &str = concat!("1.6.18-bulkhead-", env!("CARGO_PKG_VERSION"));

/// The store's expiry for a client's exptime: 0 is never, the past is at once.
pub fn expiry_of(exptime: i64, now: u64) -> u64 {
    match exptime {
        0 => 0,
        1..=RELATIVE_EXPTIME_MAX => now.saturating_add(exptime as u64),
        later if later > 0 => later as u64,
        _ => now.max(1),
    }
}

/// The command and its arguments, kept while the body arrives.
#[derive(Clone, Debug)]
pub struct StoreCommand {
    pub verb: StoreVerb,
    pub key: Vec<u8>,
    pub flags: u32,
    pub exptime: i64,
    pub len: u64,
    pub cas: u64,
    pub noreply: bool,
}

impl From<StoreHeader<'_>> for StoreCommand {
    fn from(header: StoreHeader<'_>) -> Self {
        let StoreHeader { verb, key, flags, exptime, len, cas, noreply } = header;
        Self { verb, key: key.to_vec(), flags, exptime, len, cas, noreply }
    }
}

/// What became of a storage command whose body is whole.
#[derive(Debug)]
pub enum Stored {
    /// Answer this.
    Reply(&'static [u8]),
    /// Joining needs space that is not to be had at once: try again with this.
    Later(Draft),
}

/// Makes the whole body of `command` visible.
pub fn store(store: &Store, metrics: &Metrics, command: &StoreCommand, draft: Draft, now: u64) -> Stored {
    let counts = &metrics.memcache;
    let condition = match command.verb {
        StoreVerb::Append => return join(store, command, draft, Side::Back, now),
        StoreVerb::Prepend => return join(store, command, draft, Side::Front, now),
        StoreVerb::Set => Condition::Any,
        StoreVerb::Add => Condition::Absent,
        StoreVerb::Replace => Condition::Present,
        StoreVerb::Cas => Condition::Version(command.cas),
    };
    let expiry = expiry_of(command.exptime, now);
    let committed = store.commit(&command.key, draft, command.flags, expiry, condition, now);
    if command.verb == StoreVerb::Cas {
        match committed {
            Committed::NotFound => counts.cas_misses.add(1),
            Committed::Exists => counts.cas_badval.add(1),
            _ => counts.cas_hits.add(1),
        }
    }
    Stored::Reply(match committed {
        Committed::Stored { .. } => reply::STORED,
        Committed::NotStored => reply::NOT_STORED,
        Committed::NotFound => reply::NOT_FOUND,
        Committed::Exists => reply::EXISTS,
    })
}

fn join(store: &Store, command: &StoreCommand, mut draft: Draft, side: Side, now: u64) -> Stored {
    loop {
        let Some(old) = store.peek(&command.key, now) else { return Stored::Reply(reply::NOT_STORED) };
        if old.len().saturating_add(command.len) > store.value_bytes_max() {
            return Stored::Reply(reply::TOO_LARGE);
        }
        match store.commit_joined(&old, draft, side, now) {
            Joined::Done(Committed::Stored { .. }) => return Stored::Reply(reply::STORED),
            Joined::Done(_) => return Stored::Reply(reply::NOT_STORED),
            // Somebody else was faster: join with what is there now.
            Joined::Changed(back) => draft = back,
            Joined::Short(back, _) => return Stored::Later(back),
        }
    }
}

/// `incr` and `decr`: appends the answer.
pub fn arithmetic(
    store: &Store,
    metrics: &Metrics,
    key: &[u8],
    delta: u64,
    direction: Direction,
    now: u64,
    out: &mut Vec<u8>,
) {
    let counts = &metrics.memcache;
    let (hits, misses) = match direction {
        Direction::Increment => (&counts.incr_hits, &counts.incr_misses),
        Direction::Decrement => (&counts.decr_hits, &counts.decr_misses),
    };
    for _ in 0..ARITHMETIC_TRIES_MAX {
        let Some(old) = store.peek(key, now) else {
            misses.add(1);
            return out.extend_from_slice(reply::NOT_FOUND);
        };
        let mut octets = Vec::new();
        if old.len() <= NUMBER_BYTES_MAX {
            for piece in old.pieces() {
                // A value this short lives in RAM, unless it was about to grow past its head.
                let Content::Ram(ram) = piece.segment.content() else {
                    return out.extend_from_slice(reply::OUT_OF_MEMORY);
                };
                octets.extend_from_slice(piece.octets(&ram));
            }
        }
        let Some(number) = parse_stored_number(&octets) else {
            return out.extend_from_slice(reply::NON_NUMERIC);
        };
        let number = direction.apply(number, delta);
        let mut value = Vec::new();
        append_padded_number(&mut value, number, octets.len());
        let mut draft = store.draft(value.len() as u64, None);
        while let Some(want) = draft.want() {
            let Ok(filling) = store.fill(want) else { return out.extend_from_slice(reply::OUT_OF_MEMORY) };
            draft.begin(filling);
            draft.put(&value);
        }
        let condition = Condition::Version(old.version());
        if let Committed::Stored { .. } = store.commit(key, draft, old.flags(), Expiry::Kept, condition, now) {
            hits.add(1);
            return reply::number_line(out, number);
        }
    }
    out.extend_from_slice(reply::OUT_OF_MEMORY);
}

/// `delete`.
pub fn delete(store: &Store, metrics: &Metrics, key: &[u8], now: u64) -> &'static [u8] {
    if store.delete(key, now) {
        metrics.memcache.delete_hits.add(1);
        reply::DELETED
    } else {
        metrics.memcache.delete_misses.add(1);
        reply::NOT_FOUND
    }
}

/// `touch`, and the touching half of `gat`.
pub fn touch(store: &Store, metrics: &Metrics, key: &[u8], exptime: i64, now: u64) -> &'static [u8] {
    metrics.memcache.cmd_touch.add(1);
    if store.touch(key, expiry_of(exptime, now), now) {
        metrics.memcache.touch_hits.add(1);
        reply::TOUCHED
    } else {
        metrics.memcache.touch_misses.add(1);
        reply::NOT_FOUND
    }
}

/// `flush_all`.
pub fn flush_all(store: &Store, metrics: &Metrics, delay: i64) -> &'static [u8] {
    metrics.memcache.cmd_flush.add(1);
    let now_ms = store.clock().now_ms();
    let at_ms = if delay <= 0 { 0 } else { expiry_of(delay, now_ms / 1000).saturating_mul(1000) };
    store.flush_all(if at_ms <= now_ms { 0 } else { at_ms });
    reply::OK
}

/// What `stats` tells of the daemon besides the store and the counters.
#[derive(Clone, Debug)]
pub struct Facts {
    pub started: Instant,
    pub lanes: usize,
    pub connections_max: usize,
}

/// `stats [argument]`: appends the answer.
pub fn stats(store: &Store, metrics: &Metrics, facts: &Facts, argument: Option<&[u8]>, out: &mut Vec<u8>) {
    match argument {
        None => general(store, metrics, facts, out),
        Some(b"reset") => {
            metrics.memcache.reset();
            return out.extend_from_slice(reply::RESET);
        }
        Some(b"settings") => settings(store, facts, out),
        Some(b"items") => items(store, out),
        Some(b"slabs") => slabs(store, metrics, out),
        Some(b"conns") => stat_line(out, "curr_connections", metrics.connections.current.get()),
        Some(b"sizes") => stat_line(out, "sizes_status", "disabled"),
        Some(_) => return out.extend_from_slice(reply::ERROR),
    }
    out.extend_from_slice(reply::END);
}

fn general(store: &Store, metrics: &Metrics, facts: &Facts, out: &mut Vec<u8>) {
    let (counts, connections) = (&metrics.memcache, &metrics.connections);
    let (gauges, counters) = (store.gauges(), store.counters());
    let load = |count: &std::sync::atomic::AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed);
    let (user, system) = cpu_seconds();
    stat_line(out, "pid", std::process::id());
    stat_line(out, "uptime", facts.started.elapsed().as_secs());
    stat_line(out, "time", store.clock().now());
    stat_line(out, "version", VERSION);
    stat_line(out, "pointer_size", usize::BITS);
    stat_line(out, "rusage_user", format_args!("{user:.6}"));
    stat_line(out, "rusage_system", format_args!("{system:.6}"));
    for (name, value) in [
        ("max_connections", facts.connections_max as u64),
        ("curr_connections", connections.current.get()),
        ("total_connections", connections.total.get()),
        ("rejected_connections", connections.rejected.get()),
        ("connection_structures", connections.current.get()),
        ("threads", facts.lanes as u64),
    ] {
        stat_line(out, name, value);
    }
    for named in counts.list() {
        stat_line(out, named.name, named.count.get());
    }
    for (name, value) in [
        ("cmd_meta", 0),
        ("auth_cmds", 0),
        ("auth_errors", 0),
        ("idle_kicks", connections.closed.idle.get()),
        ("bytes_read", connections.bytes_read.get()),
        ("bytes_written", connections.bytes_written.get()),
        ("limit_maxbytes", limit_bytes(store)),
        ("accepting_conns", 1),
        ("listen_disabled_num", 0),
        ("conn_yields", 0),
        ("hash_power_level", gauges.objects.max(1).ilog2().into()),
        ("hash_bytes", gauges.index_bytes),
        ("hash_is_expanding", 0),
        ("bytes", gauges.value_bytes + gauges.index_bytes),
        ("curr_items", gauges.objects),
        ("total_items", load(&counters.stored)),
        ("evictions", load(&counters.evictions)),
        ("reclaimed", load(&counters.expired)),
        ("expired_unfetched", load(&counters.expired_unread)),
        ("evicted_unfetched", load(&counters.evicted_unread)),
        ("evicted_active", 0),
        ("crawler_reclaimed", load(&counters.expired)),
        ("lrutail_reflocked", 0),
        ("direct_reclaims", load(&counters.evictions)),
    ] {
        stat_line(out, name, value);
    }
}

/// All that may be held, in RAM and on disk: monitors divide `bytes` by it.
fn limit_bytes(store: &Store) -> u64 {
    let gauges = store.gauges();
    gauges.memory_bytes + gauges.pool_bytes
}

fn settings(store: &Store, facts: &Facts, out: &mut Vec<u8>) {
    let sizes = store.sizes();
    stat_line(out, "maxbytes", limit_bytes(store));
    stat_line(out, "maxconns", facts.connections_max);
    stat_line(out, "evictions", "on");
    stat_line(out, "cas_enabled", "yes");
    stat_line(out, "item_size_max", store.value_bytes_max());
    stat_line(out, "num_threads", facts.lanes);
    stat_line(out, "flush_enabled", "yes");
    stat_line(out, "memory_bytes", sizes.memory_bytes);
    stat_line(out, "head_bytes", sizes.head_bytes);
    stat_line(out, "pool_bytes", sizes.pool_bytes.iter().sum::<u64>());
    stat_line(out, "index_bytes_max", sizes.index_bytes_max);
}

/// One class stands for all: there are no slabs.
fn items(store: &Store, out: &mut Vec<u8>) {
    let (gauges, counters) = (store.gauges(), store.counters());
    let load = |count: &std::sync::atomic::AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed);
    for (name, value) in [
        ("number", gauges.objects),
        ("age", 0),
        // As `bytes` of the general statistics: keys and records count.
        ("mem_requested", gauges.value_bytes + gauges.index_bytes),
        ("evicted", load(&counters.evictions)),
        ("evicted_nonzero", 0),
        ("evicted_time", 0),
        ("evicted_unfetched", load(&counters.evicted_unread)),
        ("expired_unfetched", load(&counters.expired_unread)),
        ("outofmemory", load(&counters.claims_refused)),
        ("tailrepairs", 0),
        ("reclaimed", load(&counters.expired)),
    ] {
        stat_line(out, format_args!("items:1:{name}"), value);
    }
}

fn slabs(store: &Store, metrics: &Metrics, out: &mut Vec<u8>) {
    let gauges = store.gauges();
    let page = crate::store::segment::SEGMENT_BYTES_MAX;
    for (name, value) in [
        ("chunk_size", page),
        ("chunks_per_page", 1),
        ("total_pages", gauges.memory_bytes / page),
        ("total_chunks", gauges.memory_bytes / page),
        ("used_chunks", (gauges.memory_bytes - gauges.memory_free_bytes) / page),
        ("free_chunks", gauges.memory_free_bytes / page),
        ("get_hits", metrics.memcache.get_hits.get()),
        ("cmd_set", metrics.memcache.cmd_set.get()),
    ] {
        stat_line(out, format_args!("1:{name}"), value);
    }
    stat_line(out, "active_slabs", 1);
    stat_line(out, "total_malloced", gauges.memory_bytes);
}

fn cpu_seconds() -> (f64, f64) {
    // Fields 14 and 15 of /proc/self/stat, in ticks of 10 ms; the command in field 2 may hold blanks, so count behind it.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11);
    let mut seconds = || fields.next().and_then(|ticks| ticks.parse::<f64>().ok()).unwrap_or(0.0) / 100.0;
    (seconds(), seconds())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exptimes_are_relative_up_to_thirty_days_and_dates_beyond() {
        let now = 1_800_000_000;
        assert_eq!(expiry_of(0, now), 0);
        assert_eq!(expiry_of(1, now), now + 1);
        assert_eq!(expiry_of(2_592_000, now), now + 2_592_000);
        assert_eq!(expiry_of(2_592_001, now), 2_592_001, "a date in 1970");
        assert_eq!(expiry_of(-1, now), now);
        assert_eq!(expiry_of(i64::MIN, now), now);
        assert_eq!(expiry_of(i64::MAX, now), i64::MAX as u64);
    }

    #[test]
    fn libmemcached_finds_three_numbers_of_which_the_first_is_not_zero_in_the_version() {
        let numbers: Vec<u8> = VERSION.split(['.', '-']).take(3).map(|number| number.parse().unwrap()).collect();
        assert!(numbers[0] > 0, "{VERSION}");
        assert!(numbers >= vec![1, 6, 0], "clients that look for what 1.6 brought");
        assert!(VERSION.ends_with(env!("CARGO_PKG_VERSION")) && !VERSION.contains(' '));
    }

    fn statistics(store: &Store, argument: Option<&[u8]>) -> std::collections::HashMap<String, String> {
        let facts = Facts { started: Instant::now(), lanes: 1, connections_max: 1 };
        let mut out = Vec::new();
        stats(store, &Metrics::default(), &facts, argument, &mut out);
        let text = String::from_utf8(out).unwrap();
        let lines = text.strip_suffix("END\r\n").unwrap().lines().map(|line| {
            let mut words = line.split(' ').skip(1).map(str::to_owned);
            (words.next().unwrap(), words.next().unwrap())
        });
        lines.collect()
    }

    #[test]
    fn the_same_quantity_has_the_same_number_in_every_kind_of_statistics() {
        let sizes = crate::store::Sizes {
            memory_bytes: 8 << 20,
            head_bytes: 64 << 10,
            value_bytes_max: 1 << 20,
            index_bytes_max: 1 << 20,
            pinned_share: 0.5,
            pool_bytes: vec![64 << 20],
        };
        let store = Store::new(sizes).unwrap();
        assert_eq!(
            store.commit(b"key", store.draft(0, None), 0, 0, Condition::Any, 1),
            Committed::Stored { version: 1 }
        );
        let (general, items) = (statistics(&store, None), statistics(&store, Some(b"items")));
        assert_eq!(general["bytes"], items["items:1:mem_requested"]);
        assert_ne!(general["bytes"], "0", "an empty value has a key and a record");
        assert_eq!(general["limit_maxbytes"], statistics(&store, Some(b"settings"))["maxbytes"]);
    }
}
