//! Where segments come from and what goes for them: memory and extents, write-behind, eviction.

use crate::fabric::region::Block;
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::{Draft, Want};
use crate::store::extents::{Extent, NoExtent};
use crate::store::key::ObjectKey;
use crate::store::object::Object;
use crate::store::segment::{
    Class, Crcs, Filling, SEGMENT_BYTES_MAX, Segment, WriteJob, block_bytes_min, footprint, next_cut,
};
use crate::store::{Counters, Store};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

/// Segments are not split below this for want of a larger block.
const SMALLEST_SPLIT_BYTES: u64 = 16 << 10;
/// The next pool file is made once less than this is free in those there are.
pub const GROWTH_LOW_BYTES: u64 = 512 << 20;
const _: () = assert!(SEGMENT_BYTES_MAX.is_multiple_of(SMALLEST_SPLIT_BYTES));

impl Store {
    /// A claim for a value of `len` octets, if no writer waits before this one (`first`: this is the first that waits).
    pub fn try_claim(&self, len: u64, first: bool, revoker: &Revoker) -> Option<Claim> {
        let class = self.class_of(len);
        let now_ms = self.shared.clock.now_ms();
        let capacity = self.capacity_bytes(class);
        let (bytes, pins) = (footprint(len, class), self.pins_bytes_max(class));
        self.shared.claims.try_claim(class, bytes, capacity, pins, first, now_ms, revoker)
    }

    /// A claim for blocks of `bytes` octets in all, if no writer waits.
    pub(super) fn try_claim_bytes(&self, class: Class, bytes: u64, revoker: &Revoker) -> Option<Claim> {
        let now_ms = self.shared.clock.now_ms();
        let (capacity, pins) = (self.capacity_bytes(class), self.pins_bytes_max(class));
        self.shared.claims.try_claim(class, bytes, capacity, pins, false, now_ms, revoker)
    }

    /// Adds to such a claim, if no writer waits.
    pub(super) fn try_extend(&self, claim: &Claim, class: Class, more_bytes: u64) -> bool {
        self.shared.claims.try_extend(claim, more_bytes, self.capacity_bytes(class), self.pins_bytes_max(class))
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

    pub(super) fn capacity_bytes(&self, class: Class) -> u64 {
        match class {
            // The rest is where large values pass through.
            Class::Small => self.shared.region.len() / 8 * 7,
            Class::Large => self.shared.extents.capacity_bytes(),
        }
    }

    /// What readers may pin, the one long value aside.
    pub(crate) fn pins_bytes_max(&self, class: Class) -> u64 {
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

    pub(super) fn take_extent(&self, bytes: u64) -> Result<Extent, Short> {
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
    pub(super) fn evict(&self, class: Class) -> bool {
        // Only a race with a reader sends us round again.
        for _ in 0..16 {
            let victim = self.policy(class).evict(|object, standing| *object.standing() = Some(standing));
            let Some(victim) = victim else { return false };
            *victim.standing() = None;
            let unpinned = |_: &ObjectKey, found: &Arc<Object>| {
                Arc::ptr_eq(found, &victim) && victim.pins.load(Ordering::SeqCst) == 0 && self.remove_name(&victim)
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
}
