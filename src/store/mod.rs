//! The store: values as immutable lists of pieces, their heads in RAM, their bodies in RAM while room lasts and on disk.
//!
//! [`Store`] is a shared handle. Look-up, commit, delete and touch are plain calls on any thread; what has to wait (claims,
//! memory, write-behind, growth of the pool) is driven by the `Store` actor through the calls marked so below.
//!
//! Lock order: index entry, then policy, then segment state, then residency lists. The namespace and the
//! books of holds (under an index entry) and the allocators of arena and extents are leaves. No lock is held over I/O or a message, and no index entry over an allocation or an eviction.

pub mod claims;
mod clock;
mod commit;
pub mod directories;
pub mod draft;
pub mod eviction;
pub mod extents;
pub mod fifo;
pub mod files;
pub mod hold;
pub mod key;
pub mod location;
pub mod namespace;
pub mod object;
mod pin;
pub mod pool;
mod relocate;
#[cfg(test)]
pub(crate) mod rig;
pub mod segment;
mod space;
pub mod sparse;
pub mod uring;
pub mod whole;

pub use clock::Clock;
pub(crate) use commit::refusal;
pub use commit::{Committed, Condition, Deleted, Expiry, Joined, Side};
pub use pin::Pinned;
pub use relocate::RelocateError;
pub use space::{GROWTH_LOW_BYTES, Short};

use crate::fabric::region::{Block, Region};
use crate::store::claims::{Claims, ExtraPin};
use crate::store::eviction::S3Fifo;
use crate::store::extents::Extents;
use crate::store::files::{DELIMITER, FILE_BYTES, Files};
use crate::store::hold::AllHolds;
use crate::store::key::ObjectKey;
use crate::store::location::DriveLoad;
use crate::store::namespace::Namespace;
use crate::store::object::{Object, Piece};
use crate::store::segment::{Class, Residency, SEGMENT_BYTES_MAX, Segment};
use crate::wake::Wake;
use dashmap::DashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Sizes a [`Store`] is made with, in octets.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub memory_bytes: u64,
    pub head_bytes: u64,
    pub value_bytes_max: u64,
    pub index_bytes_max: u64,
    pub pinned_share: f64,
    /// One for each drive.
    pub pool_bytes: Vec<u64>,
}

/// Result of a look-up.
#[derive(Debug)]
pub enum Lookup {
    Hit(Pinned),
    Miss(Miss),
    /// Readers pin as much as they may; ask again when some are done.
    Busy,
}

/// Why there is nothing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Miss {
    Absent,
    Expired,
    Flushed,
}

/// What happened so far; all only grow.
#[derive(Debug, Default)]
pub struct Counters {
    pub stored: AtomicU64,
    pub evictions: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub evicted_unread: AtomicU64,
    pub expired: AtomicU64,
    pub expired_unread: AtomicU64,
    pub flushed: AtomicU64,
    pub lost: AtomicU64,
    pub claims_revoked: AtomicU64,
    pub claims_refused: AtomicU64,
    pub written_behind_bytes: AtomicU64,
    pub warmed: AtomicU64,
    /// Octets of them, copied once more.
    pub warmed_bytes: AtomicU64,
    pub head_hits: AtomicU64,
    pub head_misses: AtomicU64,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}

/// What is where now.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Gauges {
    pub objects: u64,
    /// Names in the namespace.
    pub names: u64,
    pub value_bytes: u64,
    pub index_bytes: u64,
    pub memory_bytes: u64,
    pub memory_free_bytes: u64,
    pub memory_dirty_bytes: u64,
    pub memory_writing_bytes: u64,
    pub memory_clean_bytes: u64,
    pub memory_ram_only_bytes: u64,
    pub pool_bytes: u64,
    pub pool_used_bytes: u64,
    pub extents: u64,
    pub claims: u64,
    pub claimed_bytes: u64,
    pub writers_waiting: u64,
    pub pins: u64,
    pub pinned_bytes: u64,
    /// Objects that peers asked to keep, and the octets of `pinned_bytes` that they are.
    pub held: u64,
    pub held_bytes: u64,
}

struct Shared {
    clock: Clock,
    sizes: Sizes,
    index: DashMap<ObjectKey, Arc<Object>, ahash::RandomState>,
    namespace: Option<Namespace>,
    files: Option<Files>,
    /// What holes are pieces of, in a store that has files.
    zeros: Option<Arc<Segment>>,
    region: Arc<Region>,
    extents: Arc<Extents>,
    drive_loads: Arc<[DriveLoad]>,
    residency: Arc<Residency>,
    claims: Arc<Claims>,
    wake: Arc<Wake>,
    policies: [Mutex<S3Fifo<Arc<Object>>>; 2],
    versions: AtomicU64,
    /// Objects of this version and older are gone.
    flushed_version: AtomicU64,
    /// When the next flush takes effect, in milliseconds; `u64::MAX` is never.
    flush_at_ms: AtomicU64,
    index_bytes: AtomicU64,
    value_bytes: AtomicU64,
    pins: AtomicU64,
    extra_pins: [ExtraPin; 2],
    holds: AllHolds,
    /// Records of held objects, which stay though their key be gone.
    held_index_bytes: AtomicU64,
    /// Octets read from disk so far: the clock that tells how long ago a segment was read.
    cold_bytes: AtomicU64,
    counters: Counters,
}

/// The store; clones share it.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

impl Store {
    /// An empty store. Its pool has no file yet: see [`Store::extents`].
    ///
    /// # Errors
    /// The arena cannot be mapped.
    pub fn new(sizes: Sizes) -> io::Result<Self> {
        Self::make(sizes, None, false)
    }

    /// As [`Store::new`], with a namespace: it can [`list`](Store::list). Setting a new key and removing one take longer
    /// then, and every key takes more of the index.
    ///
    /// # Errors
    /// The arena cannot be mapped.
    pub fn with_namespace(sizes: Sizes) -> io::Result<Self> {
        Self::make(sizes, Some(Namespace::default()), false)
    }

    /// As [`Store::with_namespace`], with [files]: every key takes still more of the index.
    ///
    /// # Errors
    /// The arena cannot be mapped.
    pub fn with_files(sizes: Sizes) -> io::Result<Self> {
        Self::make(sizes, Some(Namespace::of_files()), true)
    }

    fn make(sizes: Sizes, namespace: Option<Namespace>, has_files: bool) -> io::Result<Self> {
        let wake = Arc::new(Wake::default());
        let (clock, residency) = (Clock::default(), Arc::<Residency>::default());
        let files = has_files.then(|| Files::new(sizes.index_bytes_max, clock.now_ms(), clock.now_ns()));
        let zeros = if has_files {
            // Read and never written, so that the kernel has one page for all of it.
            let block = Region::map(SEGMENT_BYTES_MAX, Arc::default())?.allocate(SEGMENT_BYTES_MAX);
            block.map(|block| Segment::hole(block, &residency))
        } else {
            None
        };
        let shared = Shared {
            clock,
            index: DashMap::with_hasher(ahash::RandomState::new()),
            namespace,
            files,
            zeros,
            region: Region::map(sizes.memory_bytes, wake.clone())?,
            extents: Extents::new(&sizes.pool_bytes, wake.clone()),
            drive_loads: sizes.pool_bytes.iter().map(|_| DriveLoad::default()).collect(),
            residency,
            claims: Claims::new(wake.clone()),
            wake,
            policies: Default::default(),
            versions: AtomicU64::new(0),
            flushed_version: AtomicU64::new(0),
            flush_at_ms: AtomicU64::new(u64::MAX),
            index_bytes: AtomicU64::new(0),
            value_bytes: AtomicU64::new(0),
            pins: AtomicU64::new(0),
            extra_pins: Default::default(),
            holds: AllHolds::default(),
            held_index_bytes: AtomicU64::new(0),
            cold_bytes: AtomicU64::new(0),
            counters: Counters::default(),
            sizes,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub fn clock(&self) -> &Clock {
        &self.shared.clock
    }

    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub fn claims(&self) -> &Arc<Claims> {
        &self.shared.claims
    }

    pub fn extents(&self) -> &Arc<Extents> {
        &self.shared.extents
    }

    /// Rung when something became free that was waited for, and when write-behind or growth is due.
    pub fn wake(&self) -> &Arc<Wake> {
        &self.shared.wake
    }

    /// Sizes it was made with.
    pub fn sizes(&self) -> &Sizes {
        &self.shared.sizes
    }

    /// Largest value that can be held now: the configured bound, or the pool if that is smaller.
    pub fn value_bytes_max(&self) -> u64 {
        let bound = self.shared.sizes.value_bytes_max;
        bound.min(self.capacity_bytes(Class::Large).max(self.shared.sizes.head_bytes))
    }

    /// A value of `len` octets is of this class.
    pub fn class_of(&self, len: u64) -> Class {
        if len <= self.shared.sizes.head_bytes { Class::Small } else { Class::Large }
    }

    pub fn gauges(&self) -> Gauges {
        let shared = &self.shared;
        let (claims, claimed_bytes) = shared.claims.granted();
        let (held, held_bytes) = shared.holds.held();
        Gauges {
            objects: self.policy(Class::Small).len() as u64 + self.policy(Class::Large).len() as u64,
            names: shared.namespace.as_ref().map_or(0, Namespace::len) as u64,
            value_bytes: shared.value_bytes.load(Ordering::Relaxed),
            index_bytes: shared.index_bytes.load(Ordering::Relaxed),
            memory_bytes: shared.region.len(),
            memory_free_bytes: shared.region.free_bytes(),
            memory_dirty_bytes: shared.residency.dirty_bytes(),
            memory_writing_bytes: shared.residency.writing_bytes(),
            memory_clean_bytes: shared.residency.clean_bytes(),
            memory_ram_only_bytes: shared.residency.ram_only_bytes(),
            pool_bytes: shared.extents.capacity_bytes(),
            pool_used_bytes: shared.extents.used_bytes(),
            extents: shared.extents.count(),
            claims: claims as u64,
            claimed_bytes,
            writers_waiting: shared.claims.queued() as u64,
            pins: shared.pins.load(Ordering::Relaxed),
            pinned_bytes: shared.claims.pinned_bytes(),
            held,
            held_bytes,
        }
    }

    /// Finds a living object and pins it.
    pub fn get(&self, key: &[u8], now: u64) -> Lookup {
        let found = {
            let Some(entry) = self.shared.index.get(key) else { return Lookup::Miss(Miss::Absent) };
            match self.death(entry.value(), now) {
                None => return self.pin(entry.value()).map_or(Lookup::Busy, Lookup::Hit),
                Some(miss) => (entry.value().clone(), miss),
            }
        };
        let (object, miss) = found;
        self.bury(&object, miss);
        Lookup::Miss(miss)
    }

    /// The living object of that key without a pin: it may be evicted meanwhile, which its holder does not notice.
    pub fn peek(&self, key: &[u8], now: u64) -> Option<Arc<Object>> {
        let entry = self.shared.index.get(key)?;
        self.death(entry.value(), now).is_none().then(|| entry.value().clone())
    }

    /// As [`Store::peek`], and buries what is dead.
    fn living(&self, key: &[u8], now: u64) -> Option<Arc<Object>> {
        let (object, death) = {
            let entry = self.shared.index.get(key)?;
            (entry.value().clone(), self.death(entry.value(), now))
        };
        let Some(miss) = death else { return Some(object) };
        self.bury(&object, miss);
        None
    }

    /// Sets when the object expires. False if there is none.
    pub fn touch(&self, key: &[u8], expiry: u64, now: u64) -> bool {
        let Some(entry) = self.shared.index.get(key) else { return false };
        let alive = self.death(entry.value(), now).is_none();
        if alive {
            entry.value().expiry.store(expiry, Ordering::Relaxed);
        }
        alive
    }

    /// Takes the object out of the index. False if there was none.
    pub fn delete(&self, key: &[u8], now: u64) -> bool {
        let Some(object) = self.shared.index.remove_if(key, |_, object| self.depart(object)).map(|(_, o)| o) else {
            return false;
        };
        self.death(&object, now).is_none()
    }

    /// Everything stored so far is gone at `at_ms` of the clock (now, if that is past). Takes the place of an earlier call
    /// that has not come to effect.
    pub fn flush_all(&self, at_ms: u64) {
        if at_ms <= self.shared.clock.now_ms() {
            self.shared.flush_at_ms.store(u64::MAX, Ordering::Relaxed);
            self.flush();
        } else {
            self.shared.flush_at_ms.store(at_ms, Ordering::Relaxed);
            self.shared.wake.ring();
        }
    }

    fn flush(&self) {
        // The larger of two flushes at the same time: what is gone must not come back.
        let versions = self.shared.versions.load(Ordering::Relaxed);
        self.shared.flushed_version.fetch_max(versions, Ordering::Relaxed);
        self.shared.wake.ring();
    }

    /// Does what a clock brings: a flush that is due. Called by the `Store` actor.
    pub fn handle_time(&self, now_ms: u64) {
        let flush_at_ms = &self.shared.flush_at_ms;
        let due = flush_at_ms.load(Ordering::Relaxed);
        // A flush that was asked for meanwhile stays asked for.
        if due <= now_ms && flush_at_ms.compare_exchange(due, u64::MAX, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.flush();
        }
    }

    /// Looks at up to `count` objects and takes out those that are dead; `cursor` keeps the place. False once all were
    /// seen. Called by the `Store` actor.
    pub fn crawl(&self, cursor: &mut Crawl, count: usize) -> bool {
        let now = self.shared.clock.now();
        let class = if cursor.large { Class::Large } else { Class::Small };
        let mut dead = Vec::new();
        let more = self.policy(class).crawl(&mut cursor.at, count, |object| {
            if let Some(miss) = self.death(object, now) {
                dead.push((object.clone(), miss));
            }
        });
        for (object, miss) in dead {
            self.bury(&object, miss);
        }
        if more {
            return true;
        }
        cursor.large = !cursor.large;
        cursor.large
    }

    /// The octets of `object` were lost with a drive: it leaves the index.
    pub fn drop_lost(&self, object: &Arc<Object>) {
        let removed = self
            .shared
            .index
            .remove_if(object.key.as_bytes(), |_, found| Arc::ptr_eq(found, object) && self.depart(found));
        if removed.is_some() {
            Counters::add(&self.shared.counters.lost, 1);
        }
    }

    fn policy(&self, class: Class) -> MutexGuard<'_, S3Fifo<Arc<Object>>> {
        self.shared.policies[class as usize].lock().expect("no panic under this lock")
    }

    /// Under the index entry of the object, so that it is enrolled exactly while it is indexed.
    fn enroll(&self, object: &Arc<Object>) {
        let mut policy = self.policy(object.class);
        let standing = policy.enroll(object.clone());
        *object.standing() = Some(standing);
    }

    /// Under the index entry of an object that leaves the index with its key. Always true, for use in conditions.
    fn depart(&self, object: &Arc<Object>) -> bool {
        self.unlink(object);
        self.remove_name(object)
    }

    /// Under the index entry of a key that is new.
    fn insert_name(&self, key: &ObjectKey) {
        let Some(namespace) = &self.shared.namespace else { return };
        self.shared.index_bytes.fetch_add(namespace.insert(key.clone()), Ordering::Relaxed);
        if let Some(files) = &self.shared.files {
            self.shared.index_bytes.fetch_add(FILE_BYTES, Ordering::Relaxed);
            files.directories.touch(
                key.as_bytes(),
                namespace.shared(key.as_bytes(), DELIMITER),
                self.shared.clock.now_ns(),
            );
        }
    }

    /// Under the index entry of an object whose key leaves the index. Always true, for use in conditions.
    fn remove_name(&self, object: &Object) -> bool {
        let Some(namespace) = &self.shared.namespace else { return true };
        let key = object.key.as_bytes();
        self.shared.index_bytes.fetch_sub(namespace.remove(key), Ordering::Relaxed);
        if let Some(files) = &self.shared.files {
            let departed = object.record().map_or(0, |record| files.depart(record));
            // Wraps where it is less than nothing, as it should.
            self.shared.index_bytes.fetch_add((departed - FILE_BYTES as i64) as u64, Ordering::Relaxed);
            files.directories.touch(key, namespace.shared(key, DELIMITER), self.shared.clock.now_ns());
        }
        true
    }

    /// Under the index entry of an object that leaves the index.
    fn unlink(&self, object: &Arc<Object>) {
        let mut policy = self.policy(object.class);
        let standing = object.standing().take();
        let withdrawn = standing.and_then(|standing| policy.withdraw(standing));
        drop(policy);
        drop(withdrawn);
        self.forget(object);
    }

    fn forget(&self, object: &Object) {
        self.shared.index_bytes.fetch_sub(object.index_bytes(), Ordering::Relaxed);
        self.shared.value_bytes.fetch_sub(object.len, Ordering::Relaxed);
    }

    fn death(&self, object: &Object, now: u64) -> Option<Miss> {
        let expiry = object.expiry();
        if expiry != 0 && expiry <= now {
            Some(Miss::Expired)
        } else if object.version() <= self.shared.flushed_version.load(Ordering::Relaxed) {
            Some(Miss::Flushed)
        } else {
            None
        }
    }

    fn bury(&self, object: &Arc<Object>, miss: Miss) {
        let dead = self
            .shared
            .index
            .remove_if(object.key.as_bytes(), |_, found| Arc::ptr_eq(found, object) && self.depart(found));
        if dead.is_some() {
            let counters = &self.shared.counters;
            match miss {
                Miss::Expired => {
                    Counters::add(&counters.expired, 1);
                    Counters::add(&counters.expired_unread, u64::from(!object.read.load(Ordering::Relaxed)));
                }
                _ => Counters::add(&counters.flushed, 1),
            }
        }
    }
}

impl Object {
    fn standing(&self) -> MutexGuard<'_, Option<eviction::Standing>> {
        self.standing.lock().expect("no panic under this lock")
    }
}

impl Piece {
    /// The part of `ram`, the block of its segment, that is this piece.
    pub fn octets<'a>(&self, ram: &'a Block) -> &'a [u8] {
        &ram.as_slice()[self.start as usize..(self.start + self.len) as usize]
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("gauges", &self.gauges()).finish()
    }
}

/// Place of a crawl through all objects.
#[derive(Clone, Copy, Debug, Default)]
pub struct Crawl {
    large: bool,
    at: (bool, usize),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::segment::{SEGMENT_BYTES_MAX, footprint};

    fn store() -> Store {
        store_with_head(256 << 10)
    }

    fn store_with_head(head_bytes: u64) -> Store {
        Store::new(Sizes { head_bytes, value_bytes_max: 1 << 20, ..Sizes::small() }).unwrap()
    }

    #[test]
    fn behind_a_head_of_any_length_windows_hold_whole_segments() {
        const KIB: u64 = 1 << 10;
        for head_kib in [64, 128, 192, 256, 320, 448, 512] {
            let store = store_with_head(head_kib * KIB);
            store.extents().add_file(0, 16 << 20);
            for len in [head_kib * KIB + 1, 512 * KIB + 1, 700_001, 1 << 20] {
                store.put(b"key", &vec![7; len as usize], 0, 0).unwrap();
                let object = store.peek(b"key", store.clock().now()).unwrap();
                let (mut at, mut extent_bytes) = (0, 0);
                for piece in object.pieces() {
                    let (first, last) = (at / SEGMENT_BYTES_MAX, (at + u64::from(piece.len) - 1) / SEGMENT_BYTES_MAX);
                    assert_eq!(first, last, "head {head_kib} KiB, {len}: {} octets at {at}", piece.len);
                    assert!(at.is_multiple_of(4096), "head {head_kib} KiB, {len}: a piece at {at}");
                    at += u64::from(piece.len);
                    extent_bytes += piece.segment.extent_bytes();
                }
                assert_eq!(at, len);
                if len > 512 * KIB {
                    assert_eq!(extent_bytes, footprint(len, Class::Large), "head {head_kib} KiB, {len}");
                }
            }
        }
    }

    #[test]
    fn a_touch_between_the_look_and_the_commit_is_kept() {
        let store = store();
        let now = store.clock().now();
        store.put(b"n", b"1", 0, 0).unwrap();
        let old = store.peek(b"n", now).unwrap();
        let mut draft = store.draft(1, None);
        let filling = store.fill(draft.want().unwrap()).unwrap();
        draft.begin(filling);
        draft.put(b"2");
        assert!(store.touch(b"n", now + 100, now));
        let condition = Condition::Version(old.version());
        assert!(matches!(store.commit(b"n", draft, 0, Expiry::Kept, condition, now), Committed::Stored { .. }));
        assert_eq!(store.peek(b"n", now).unwrap().expiry(), now + 100);
    }
}
