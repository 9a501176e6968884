//! The store: values as immutable lists of pieces, their heads in RAM, their bodies in RAM while room lasts and on disk.
//!
//! [`Store`] is a shared handle. Look-up, commit, delete and touch are plain calls on any thread; what has to wait (claims,
//! memory, write-behind, growth of the pool) is driven by the `Store` actor through the calls marked so below.
//!
//! Lock order: index entry, then policy, then segment state, then residency lists. The allocators of arena and extents are
//! leaves. No lock is held over I/O or a message, and no index entry over an allocation or an eviction.

pub mod claims;
pub mod draft;
pub mod eviction;
pub mod extents;
pub mod fifo;
pub mod key;
pub mod object;
pub mod pool;
pub mod segment;
pub mod uring;
pub mod whole;

use crate::fabric::region::{Block, Region};
use crate::store::claims::{Claim, Claims, ExtraPin, Revoker};
use crate::store::draft::{Draft, Want};
use crate::store::eviction::S3Fifo;
use crate::store::extents::{Extent, Extents, NoExtent};
use crate::store::key::ObjectKey;
use crate::store::object::{Object, Piece};
use crate::store::segment::{
    Class, Content, Crcs, Filling, Residency, SEGMENT_BYTES_MAX, Segment, WriteJob, block_bytes_min, footprint,
    next_cut,
};
use crate::wake::Wake;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

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

/// Time as the store sees it: seconds of the Unix epoch that never run backwards.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    start_unix_ms: u64,
}

impl Default for Clock {
    fn default() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { start: Instant::now(), start_unix_ms: since.as_millis() as u64 }
    }
}

impl Clock {
    /// Milliseconds of the epoch.
    pub fn now_ms(&self) -> u64 {
        self.start_unix_ms + self.start.elapsed().as_millis() as u64
    }

    /// Seconds of the epoch.
    pub fn now(&self) -> u64 {
        self.now_ms() / 1000
    }
}

/// Under which condition a value becomes visible; judged in the same step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Condition {
    Any,
    Absent,
    Present,
    /// The object of this version is still there.
    Version(u64),
}

/// What became of a commit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Committed {
    Stored {
        version: u64,
    },
    /// There is one already (`Absent`), or none (`Present`).
    NotStored,
    /// None of that key (`Version`).
    NotFound,
    /// Another version (`Version`).
    Exists,
}

/// What became of a commit that joins an object and a draft.
#[derive(Debug)]
pub enum Joined {
    Done(Committed),
    /// The key names another object by now; the draft can be joined with that.
    Changed(Draft),
    /// Not enough space at once; the draft can be joined later.
    Short(Draft, Short),
}

/// Why a segment could not be had now.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Short {
    #[error("no memory is free until write-behind or readers give some back")]
    Memory,
    #[error("no disk space is free until readers or claims give some back")]
    Disk,
    #[error("a pool file is being made")]
    Growing,
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

/// On which side a value grows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    Front,
    Back,
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
}

struct Shared {
    clock: Clock,
    sizes: Sizes,
    index: DashMap<ObjectKey, Arc<Object>, ahash::RandomState>,
    region: Arc<Region>,
    extents: Arc<Extents>,
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
    /// Octets read from disk so far: the clock that tells how long ago a segment was read.
    cold_bytes: AtomicU64,
    counters: Counters,
}

/// The store; clones share it.
#[derive(Clone)]
pub struct Store {
    shared: Arc<Shared>,
}

/// The place beyond the bound is for objects longer than this part of the bound: short ones get in as others leave.
const EXTRA_PIN_DIVISOR: u64 = 4;
/// Pieces smaller than this are joined when a value grows, so that many small appends do not make many small pieces.
const JOINED_BYTES_MAX: u64 = 64 << 10;

impl Store {
    /// An empty store. Its pool has no file yet: see [`Store::extents`].
    ///
    /// # Errors
    /// The arena cannot be mapped.
    pub fn new(sizes: Sizes) -> io::Result<Self> {
        let wake = Arc::new(Wake::default());
        let shared = Shared {
            clock: Clock::default(),
            index: DashMap::with_hasher(ahash::RandomState::new()),
            region: Region::map(sizes.memory_bytes, wake.clone())?,
            extents: Extents::new(&sizes.pool_bytes, wake.clone()),
            residency: Arc::default(),
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
        Gauges {
            objects: self.policy(Class::Small).len() as u64 + self.policy(Class::Large).len() as u64,
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
        let Some(object) = self.shared.index.remove_if(key, |_, object| self.unlink(object)).map(|(_, o)| o) else {
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

    /// A claim for a value of `len` octets, if no writer waits before this one (`first`: this is the first that waits).
    pub fn try_claim(&self, len: u64, first: bool, revoker: &Revoker) -> Option<Claim> {
        let class = self.class_of(len);
        let now_ms = self.shared.clock.now_ms();
        let capacity = self.capacity_bytes(class);
        let (bytes, pins) = (footprint(len, class), self.pins_bytes_max(class));
        self.shared.claims.try_claim(class, bytes, capacity, pins, first, now_ms, revoker)
    }

    /// A value of `len` octets about to arrive, under `claim` unless it is there whole already.
    pub fn draft(&self, len: u64, claim: Option<Claim>) -> Draft {
        Draft::new(len, self.class_of(len), self.shared.sizes.head_bytes, claim, self.shared.residency.clone())
    }

    /// The next segment of a draft: memory, and disk space if its value is large. Evicts what must go.
    ///
    /// # Errors
    /// [`Short`]: nothing to be had at once. Then the `Store` actor hands it out in arrival order.
    pub fn fill(&self, want: Want) -> Result<Filling, Short> {
        let minimum = block_bytes_min(want.class);
        let (mut len, mut bytes) = next_cut(want.remaining, minimum);
        loop {
            let block = self.take_block(bytes, want.class)?;
            // A block may come out smaller than asked for; so does the segment then.
            bytes = bytes.min(block.len() as u64);
            len = len.min(bytes);
            if want.class == Class::Small {
                return Ok(Filling::new(block, None, len as u32, want.head));
            }
            match self.take_extent(bytes) {
                Ok(extent) => return Ok(Filling::new(block, Some(extent), len as u32, want.head)),
                Err(Short::Disk) if bytes > SMALLEST_SPLIT_BYTES => bytes /= 2,
                Err(short) => return Err(short),
            }
            len = len.min(bytes);
        }
    }

    /// Makes a complete draft visible in one step, or says why not. The old object, if any, lives on with its readers.
    pub fn commit(
        &self,
        key: &[u8],
        draft: Draft,
        flags: u32,
        expiry: impl Into<Expiry>,
        condition: Condition,
        now: u64,
    ) -> Committed {
        let (class, len, pieces, claim) = draft.into_parts();
        let done = self.publish(key, pieces, class, len, flags, expiry.into(), condition, now);
        drop(claim);
        done
    }

    /// Makes `old` with the octets of `draft` at one side visible. The two share segments.
    pub fn commit_joined(&self, old: &Object, draft: Draft, side: Side, now: u64) -> Joined {
        let len = old.len() + draft.len();
        let class = self.class_of(len);
        let pieces = match self.join(old, draft.pieces(), side, class) {
            Ok(pieces) => pieces,
            Err(short) => return Joined::Short(draft, short),
        };
        let condition = Condition::Version(old.version());
        match self.publish(old.key(), pieces, class, len, old.flags(), Expiry::Kept, condition, now) {
            Committed::Exists => Joined::Changed(draft),
            done => Joined::Done(done),
        }
    }

    /// A segment was read from disk: `octets` go back into RAM if they were read before and less than an arena full was
    /// read since, that is if they would still be there had they been kept.
    pub fn warm(&self, segment: &Arc<Segment>, octets: &[u8]) {
        let shared = &self.shared;
        let now = shared.cold_bytes.fetch_add(octets.len() as u64, Ordering::Relaxed) + 1;
        let before = segment.mark_cold_read(now);
        if before == 0 || now.saturating_sub(before) > shared.region.len() || segment.is_resident() {
            return;
        }
        let bytes = (octets.len() as u64).max(block_bytes_min(Class::Large));
        let block = shared.region.allocate(bytes).or_else(|| {
            shared.residency.drop_clean(bytes);
            shared.region.allocate(bytes)
        });
        if let Some(mut block) = block {
            block.as_mut_slice()[..octets.len()].copy_from_slice(octets);
            segment.warm(block);
            Counters::add(&shared.counters.warmed, 1);
            Counters::add(&shared.counters.warmed_bytes, octets.len() as u64);
        }
    }

    /// The octets of `object` were lost with a drive: it leaves the index.
    pub fn drop_lost(&self, object: &Arc<Object>) {
        let removed = self
            .shared
            .index
            .remove_if(object.key.as_bytes(), |_, found| Arc::ptr_eq(found, object) && self.unlink(found));
        if removed.is_some() {
            Counters::add(&self.shared.counters.lost, 1);
        }
    }

    /// A segment to write behind, while memory that is free or could be at once is below the watermark, or `wanted` by
    /// somebody who waits. Called by the `Store` actor; [`Store::handle_written`] must follow.
    pub fn next_write(&self, wanted: bool) -> Option<WriteJob> {
        if wanted || self.is_short_of_memory() { self.shared.residency.next_dirty() } else { None }
    }

    /// Write-behind of a segment ended with its checksums, or failed.
    pub fn handle_written(&self, segment: &Arc<Segment>, drive: usize, result: Option<Crcs>) {
        segment.handle_written(result);
        if result.is_some() {
            Counters::add(&self.shared.counters.written_behind_bytes, u64::from(segment.len()));
            self.shared.wake.signal();
            return;
        }
        if self.shared.extents.fail(drive) {
            tracing::error!(drive, "a pool drive failed; nothing more is put there");
        }
        let extent = self.take_extent(u64::from(segment.len())).ok();
        if extent.is_none() {
            Counters::add(&self.shared.counters.lost, 1);
        }
        segment.move_to(extent);
        self.shared.wake.ring();
    }

    /// Free memory, or memory free at once, is below a quarter of the arena.
    pub fn is_short_of_memory(&self) -> bool {
        let shared = &self.shared;
        let spare = shared.region.free_bytes() + shared.residency.clean_bytes() + shared.residency.writing_bytes();
        spare < shared.region.len() / 4
    }

    /// Whether disk work could free memory.
    pub fn has_dirty(&self) -> bool {
        self.shared.residency.dirty_bytes() + self.shared.residency.writing_bytes() > 0
    }

    fn capacity_bytes(&self, class: Class) -> u64 {
        match class {
            // The rest is where large values pass through.
            Class::Small => self.shared.region.len() / 8 * 7,
            Class::Large => self.shared.extents.capacity_bytes(),
        }
    }

    /// What readers may pin, the one long value aside.
    fn pins_bytes_max(&self, class: Class) -> u64 {
        (self.capacity_bytes(class) as f64 * self.shared.sizes.pinned_share) as u64
    }

    fn take_block(&self, bytes: u64, class: Class) -> Result<Block, Short> {
        let shared = &self.shared;
        let mut bytes = bytes;
        loop {
            if class == Class::Small && shared.residency.ram_only_bytes() + bytes > self.capacity_bytes(class) {
                if self.evict(class) {
                    continue;
                }
                return Err(Short::Memory);
            }
            if let Some(block) = shared.region.allocate(bytes) {
                if self.is_short_of_memory() && shared.residency.dirty_bytes() > 0 {
                    shared.wake.ring();
                }
                return Ok(block);
            }
            // Much is free, but in small blocks: a smaller segment loses less than emptying RAM until blocks join.
            if shared.region.free_bytes() >= 8 * bytes && bytes > SMALLEST_SPLIT_BYTES {
                bytes /= 2;
                continue;
            }
            if shared.residency.drop_clean(bytes) > 0 {
                continue;
            }
            if self.has_dirty() || !self.evict(Class::Small) {
                return Err(Short::Memory);
            }
        }
    }

    fn take_extent(&self, bytes: u64) -> Result<Extent, Short> {
        loop {
            match self.shared.extents.allocate(bytes) {
                Ok(extent) => {
                    if self.shared.extents.growth_wanted(GROWTH_LOW_BYTES).is_some() {
                        self.shared.wake.ring();
                    }
                    return Ok(extent);
                }
                Err(NoExtent::Growing) => return Err(Short::Growing),
                Err(NoExtent::Full) if self.evict(Class::Large) => {}
                Err(NoExtent::Full | NoExtent::Failed) => return Err(Short::Disk),
            }
        }
    }

    /// Evicts one object of `class`; false if none can be.
    fn evict(&self, class: Class) -> bool {
        // Only a race with a reader sends us round again.
        for _ in 0..16 {
            let victim = self.policy(class).evict(|object, standing| *object.standing() = Some(standing));
            let Some(victim) = victim else { return false };
            *victim.standing() = None;
            let unpinned = |_: &ObjectKey, found: &Arc<Object>| {
                Arc::ptr_eq(found, &victim) && victim.pins.load(Ordering::SeqCst) == 0
            };
            if self.shared.index.remove_if(victim.key.as_bytes(), unpinned).is_some() {
                self.forget(&victim);
                let counters = &self.shared.counters;
                Counters::add(&counters.evictions, 1);
                Counters::add(&counters.evicted_bytes, victim.len);
                Counters::add(&counters.evicted_unread, u64::from(!victim.read.load(Ordering::Relaxed)));
                return true;
            }
            if let Some(entry) = self.shared.index.get(victim.key.as_bytes())
                && Arc::ptr_eq(entry.value(), &victim)
            {
                self.enroll(&victim);
            }
        }
        false
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

    /// Under the index entry of an object that leaves the index. Always true, for use in conditions.
    fn unlink(&self, object: &Arc<Object>) -> bool {
        let mut policy = self.policy(object.class);
        let standing = object.standing().take();
        let withdrawn = standing.and_then(|standing| policy.withdraw(standing));
        drop(policy);
        drop(withdrawn);
        self.forget(object);
        true
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
            .remove_if(object.key.as_bytes(), |_, found| Arc::ptr_eq(found, object) && self.unlink(found));
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

    /// `None` where readers pin as much as they may.
    fn pin(&self, object: &Arc<Object>) -> Option<Pinned> {
        let shared = &self.shared;
        let extra = &shared.extra_pins[object.class as usize];
        let takes_extra = if object.pins.load(Ordering::SeqCst) > 0 {
            false
        } else {
            let bound = self.pins_bytes_max(object.class);
            let pinned = shared.claims.pinned_bytes_of(object.class).saturating_sub(extra.bytes());
            let fits = pinned.saturating_add(object.footprint) <= bound;
            if !fits
                && (object.footprint <= bound / EXTRA_PIN_DIVISOR || !extra.take(object.version(), object.footprint))
            {
                return None;
            }
            !fits
        };
        if object.pins.fetch_add(1, Ordering::SeqCst) == 0 {
            shared.claims.pin(object.class, object.footprint);
        } else if takes_extra {
            // Another reader was faster, and its pin holds within the bound or had the place before.
            extra.give_back(object.version());
        }
        shared.pins.fetch_add(1, Ordering::Relaxed);
        object.count_use();
        Some(Pinned { object: object.clone(), store: self.clone() })
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one object, and when it may appear")]
    fn publish(
        &self,
        key: &[u8],
        pieces: Vec<Piece>,
        class: Class,
        len: u64,
        flags: u32,
        expiry: Expiry,
        condition: Condition,
        now: u64,
    ) -> Committed {
        let key = ObjectKey::new(key);
        let object = Arc::new(Object {
            key_hash: self.shared.index.hasher().hash_one(key.as_bytes()),
            key: key.clone(),
            flags,
            len,
            class,
            footprint: footprint(len, class),
            pieces: pieces.into(),
            version: AtomicU64::new(u64::MAX),
            expiry: AtomicU64::new(if let Expiry::At(at) = expiry { at } else { 0 }),
            uses: 0.into(),
            read: false.into(),
            pins: 0.into(),
            standing: Mutex::new(None),
        });
        let replaced = match self.shared.index.entry(key) {
            Entry::Occupied(mut entry) => {
                let living = self.death(entry.get(), now).is_none().then(|| entry.get().version());
                if let Some(refusal) = refusal(condition, living) {
                    return refusal;
                }
                if expiry == Expiry::Kept {
                    // Read here and not before: a touch in between must not be lost.
                    object.expiry.store(entry.get().expiry(), Ordering::Relaxed);
                }
                self.unlink(entry.get());
                self.link(&object);
                Some(entry.insert(object.clone()))
            }
            Entry::Vacant(entry) => {
                if let Some(refusal) = refusal(condition, None) {
                    return refusal;
                }
                self.link(&object);
                drop(entry.insert(object.clone()));
                None
            }
        };
        // Its blocks and extents come free here, after the entry is let go.
        drop(replaced);
        Counters::add(&self.shared.counters.stored, 1);
        while self.shared.index_bytes.load(Ordering::Relaxed) > self.shared.sizes.index_bytes_max {
            if !self.evict(Class::Small) && !self.evict(Class::Large) {
                break;
            }
        }
        Committed::Stored { version: object.version() }
    }

    fn link(&self, object: &Arc<Object>) {
        let version = self.shared.versions.fetch_add(1, Ordering::Relaxed) + 1;
        object.version.store(version, Ordering::Relaxed);
        self.enroll(object);
        self.shared.index_bytes.fetch_add(object.index_bytes(), Ordering::Relaxed);
        self.shared.value_bytes.fetch_add(object.len, Ordering::Relaxed);
    }

    fn join(&self, old: &Object, new: &[Piece], side: Side, class: Class) -> Result<Vec<Piece>, Short> {
        let (front, back): (&[Piece], &[Piece]) = match side {
            Side::Front => (new, old.pieces()),
            Side::Back => (old.pieces(), new),
        };
        let mut pieces = Vec::with_capacity(front.len() + back.len());
        pieces.extend_from_slice(front);
        let mut rest = back;
        if let (Some(last), Some(first)) = (front.last(), back.first())
            && u64::from(last.len) + u64::from(first.len) <= JOINED_BYTES_MAX
            && let (Content::Ram(one), Content::Ram(two)) = (last.segment.content(), first.segment.content())
        {
            pieces.pop();
            rest = &back[1..];
            let octets = [last.octets(&one), first.octets(&two)].concat();
            pieces.extend(self.copy(&octets, class)?);
        }
        pieces.extend_from_slice(rest);
        if class == Class::Large {
            pieces = self.give_extents(pieces)?;
        }
        Ok(pieces)
    }

    /// Room on disk for each of `pieces` that has none: pieces of a value that has outgrown its head.
    fn give_extents(&self, pieces: Vec<Piece>) -> Result<Vec<Piece>, Short> {
        let mut given = Vec::with_capacity(pieces.len());
        for piece in pieces {
            if piece.segment.is_ram_only() {
                let bytes = piece.segment.spill_bytes();
                if bytes < block_bytes_min(Class::Large)
                    && let Content::Ram(ram) = piece.segment.content()
                {
                    // The disk takes whole aligned units, and what lies behind such a block is another's.
                    given.extend(self.copy(piece.octets(&ram), Class::Large)?);
                    continue;
                }
                piece.segment.spill(self.take_extent(bytes)?);
            }
            given.push(piece);
        }
        Ok(given)
    }

    /// `octets` in new segments.
    fn copy(&self, octets: &[u8], class: Class) -> Result<Vec<Piece>, Short> {
        let mut pieces = Vec::new();
        let mut rest = octets;
        while !rest.is_empty() {
            let mut filling = self.fill(Want { class, remaining: rest.len() as u64, head: false })?;
            let count = filling.missing();
            filling.spare().copy_from_slice(&rest[..count]);
            filling.advance(count);
            rest = &rest[count..];
            let segment = filling.seal(&self.shared.residency);
            pieces.push(Piece { len: segment.len(), start: 0, segment });
        }
        Ok(pieces)
    }
}

/// When a new object expires.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Expiry {
    /// At this second of the store's clock; 0 is never.
    At(u64),
    /// When the object expires that is replaced, as it is at that moment. Never, if there is none.
    Kept,
}

impl From<u64> for Expiry {
    fn from(at: u64) -> Self {
        Self::At(at)
    }
}

/// Why `condition` does not hold for what is there, if it does not.
fn refusal(condition: Condition, living: Option<u64>) -> Option<Committed> {
    match (condition, living) {
        (Condition::Any, _) | (Condition::Absent, None) | (Condition::Present, Some(_)) => None,
        (Condition::Absent, Some(_)) | (Condition::Present, None) => Some(Committed::NotStored),
        (Condition::Version(_), None) => Some(Committed::NotFound),
        (Condition::Version(wanted), Some(found)) => (wanted != found).then_some(Committed::Exists),
    }
}

/// Segments are not split below this for want of a larger block.
const SMALLEST_SPLIT_BYTES: u64 = 16 << 10;
/// The next pool file is made once less than this is free in those there are.
pub const GROWTH_LOW_BYTES: u64 = 512 << 20;
const _: () = assert!(SEGMENT_BYTES_MAX.is_multiple_of(SMALLEST_SPLIT_BYTES));

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

/// An object that cannot be evicted while this lives. Overwriting or deleting its key leaves it as it is.
pub struct Pinned {
    object: Arc<Object>,
    store: Store,
}

impl Pinned {
    pub fn object(&self) -> &Arc<Object> {
        &self.object
    }

    /// Counted for statistics: was the first octet in RAM when the reader came?
    pub fn count_head(&self) {
        let Some(first) = self.object.pieces.first() else { return };
        let counters = &self.store.shared.counters;
        let counter = if first.segment.is_resident() { &counters.head_hits } else { &counters.head_misses };
        Counters::add(counter, 1);
    }
}

impl Deref for Pinned {
    type Target = Object;

    fn deref(&self) -> &Object {
        &self.object
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.store.shared.pins.fetch_sub(1, Ordering::Relaxed);
        if self.object.pins.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.store.shared.extra_pins[self.object.class as usize].give_back(self.object.version());
            self.store.shared.claims.unpin(self.object.class, self.object.footprint);
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.object.key).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> Store {
        store_with_head(256 << 10)
    }

    fn store_with_head(head_bytes: u64) -> Store {
        let (mib, share) = (1 << 20, 0.25);
        Store::new(Sizes {
            memory_bytes: 8 * mib,
            head_bytes,
            value_bytes_max: mib,
            index_bytes_max: mib,
            pinned_share: share,
            pool_bytes: vec![16 * mib],
        })
        .unwrap()
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
