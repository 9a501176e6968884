//! One mapping of memory, and blocks of it that have exactly one owner.
//!
//! The arena of the store is one [`Region`]. A [`Block`] is a range of it that nobody else holds: writable while it is
//! owned, shared and read-only once it is inside an `Arc`, given back when the last owner drops it. Whoever sends or
//! writes from a block keeps it alive, so memory is never reused under a transfer.
#![allow(unsafe_code)]

pub mod aligned;
pub mod shared;

use crate::buddy::{Buddy, order_of};
use crate::wake::Wake;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Smallest block and unit of [`Region`] offsets, in octets.
pub const UNIT_BYTES: u64 = 64;
/// Largest block, in octets.
pub const BLOCK_BYTES_MAX: u64 = 256 << 10;
const ORDER_MAX: u8 = order_of(BLOCK_BYTES_MAX, UNIT_BYTES);

/// Anonymous private memory, mapped once and never moved. Pages become resident when first written.
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    units: Mutex<Buddy>,
    free_bytes: AtomicU64,
    freed: Arc<Wake>,
}

// SAFETY: `base` is a mapping that lives as long as the Region and is reached only through blocks, whose ranges are
// disjoint because `units` hands each unit out once; everything else in Region is Sync by itself.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` octets (rounded down to a multiple of [`BLOCK_BYTES_MAX`]). `freed` is signalled by every freed
    /// block.
    ///
    /// # Errors
    /// Whatever `mmap` says.
    pub fn map(len: u64, freed: Arc<Wake>) -> io::Result<Arc<Self>> {
        let len = usize::try_from(len / BLOCK_BYTES_MAX * BLOCK_BYTES_MAX)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        if len == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags | libc::MAP_NORESERVE, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping made above. Huge pages are a hint; a refusal changes nothing but speed.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(io::Error::last_os_error)?;
        Ok(Arc::new(Self {
            base,
            len,
            units: Mutex::new(Buddy::new(len / UNIT_BYTES as usize, ORDER_MAX)),
            free_bytes: AtomicU64::new(len as u64),
            freed,
        }))
    }

    /// Size in octets.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Never: an empty region cannot be mapped.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Octets in no block.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes.load(Ordering::Relaxed)
    }

    /// A block of the smallest power of two that holds `len` octets, at least [`UNIT_BYTES`]. Its content is whatever
    /// was there. `None` when no free range is large enough.
    pub fn allocate(self: &Arc<Self>, len: u64) -> Option<Block> {
        let order = order_of(len, UNIT_BYTES);
        if order > ORDER_MAX {
            return None;
        }
        let mut units = self.units.lock().expect("no panic under this lock");
        let unit = units.allocate(order)?;
        // Under the lock: a block given back and taken again must be counted in that order, or the count passes below 0.
        self.free_bytes.fetch_sub(UNIT_BYTES << order, Ordering::Relaxed);
        drop(units);
        Some(Block { region: self.clone(), offset: unit as u64 * UNIT_BYTES, order })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length, and every block held an Arc of this Region, so none
        // is left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len", &self.len).field("free_bytes", &self.free_bytes()).finish()
    }
}

/// A range of a [`Region`] with one owner; gives itself back when dropped.
pub struct Block {
    region: Arc<Region>,
    offset: u64,
    order: u8,
}

impl Block {
    /// Octets, a power of two.
    pub fn len(&self) -> usize {
        (UNIT_BYTES << self.order) as usize
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range lies in the mapping (`Buddy` checks it) and belongs to this Block alone, so nobody writes
        // while `&self` lives. Anonymous memory is always initialised.
        unsafe { std::slice::from_raw_parts(self.region.base.as_ptr().add(self.offset as usize), self.len()) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes this the only view.
        unsafe { std::slice::from_raw_parts_mut(self.region.base.as_ptr().add(self.offset as usize), self.len()) }
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let unit = (self.offset / UNIT_BYTES) as usize;
        let mut units = self.region.units.lock().expect("no panic under this lock");
        units.free(unit, self.order);
        self.region.free_bytes.fetch_add(UNIT_BYTES << self.order, Ordering::Relaxed);
        drop(units);
        self.region.freed.signal();
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("offset", &self.offset).field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(len: u64) -> Arc<Region> {
        Region::map(len, Arc::new(Wake::default())).unwrap()
    }

    #[test]
    fn blocks_are_disjoint_and_come_back() {
        let region = region(1 << 20);
        let mut blocks: Vec<Block> = std::iter::from_fn(|| region.allocate(64 << 10)).collect();
        assert_eq!(blocks.len(), 16);
        assert_eq!(region.free_bytes(), 0);
        for (n, block) in blocks.iter_mut().enumerate() {
            block.as_mut_slice().fill(n as u8);
        }
        for (n, block) in blocks.iter().enumerate() {
            assert!(block.as_slice().iter().all(|octet| *octet == n as u8));
        }
        drop(blocks);
        assert_eq!(region.free_bytes(), 1 << 20);
        assert!(region.allocate(BLOCK_BYTES_MAX).is_some());
        assert!(region.allocate(BLOCK_BYTES_MAX + 1).is_none());
    }

    /// A count that passed below zero once ended the process: the sum it went into overflowed.
    #[test]
    fn the_free_count_is_never_more_than_there_is() {
        let region = region(BLOCK_BYTES_MAX);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200_000 {
                        let taken = region.allocate(BLOCK_BYTES_MAX);
                        assert!(region.free_bytes() <= region.len());
                        drop(taken);
                        assert!(region.free_bytes() <= region.len());
                    }
                });
            }
        });
        assert_eq!(region.free_bytes(), region.len());
    }

    #[actix::test]
    async fn a_freed_block_wakes_whoever_asked() {
        let freed = Arc::new(Wake::default());
        let region = Region::map(1 << 20, freed.clone()).unwrap();
        let block = region.allocate(1000).unwrap();
        freed.want();
        drop(block);
        tokio::time::timeout(std::time::Duration::from_secs(5), freed.rung()).await.expect("woken");
    }
}
