//! Which octets of the pool files belong to whom.
//!
//! Every pool file has a [`Buddy`] over 4 KiB units. An [`Extent`] is a block of one file with one owner; it gives itself
//! back when dropped, so a read or write that keeps it alive can never touch space that was handed to somebody else.

use crate::buddy::{Buddy, order_of};
use crate::store::pool::ExtentId;
use crate::wake::Wake;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Unit and alignment of extents, in octets.
pub const EXTENT_UNIT_BYTES: u64 = crate::store::pool::EXTENT_ALIGN;
const ORDER_MAX: u8 = order_of(crate::fabric::region::BLOCK_BYTES_MAX, EXTENT_UNIT_BYTES);

/// Why no extent was given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NoExtent {
    /// All space that the pools may take is in use.
    Full,
    /// A pool file is still to be made; ask again once it was added.
    Growing,
    /// Every drive failed: nothing that is given back helps.
    Failed,
}

struct Drive {
    files: Vec<Buddy>,
    /// What further files may still bring.
    unmade_bytes: u64,
    failed: bool,
    /// File to look at first.
    hint: usize,
}

impl Drive {
    fn allocate(&mut self, order: u8) -> Option<(usize, usize)> {
        if self.failed {
            return None;
        }
        let count = self.files.len();
        for step in 0..count {
            let file = (self.hint + step) % count;
            if let Some(unit) = self.files[file].allocate(order) {
                self.hint = file;
                return Some((file, unit));
            }
        }
        None
    }

    fn free_bytes(&self) -> u64 {
        if self.failed {
            return 0;
        }
        self.files.iter().map(|file| file.free_units() as u64 * EXTENT_UNIT_BYTES).sum()
    }
}

/// The space of all drives.
pub struct Extents {
    drives: Mutex<(Vec<Drive>, usize)>,
    used_bytes: AtomicU64,
    count: AtomicU64,
    capacity_bytes: AtomicU64,
    free_made_bytes: AtomicU64,
    /// Somebody was told to wait for the next file.
    starved: AtomicBool,
    freed: Arc<Wake>,
}

impl Extents {
    /// One drive for each of `capacities`, in octets, with no file yet.
    pub fn new(capacities: &[u64], freed: Arc<Wake>) -> Arc<Self> {
        let drives = capacities
            .iter()
            .map(|bytes| Drive { files: Vec::new(), unmade_bytes: *bytes, failed: false, hint: 0 })
            .collect();
        Arc::new(Self {
            drives: Mutex::new((drives, 0)),
            used_bytes: AtomicU64::new(0),
            count: AtomicU64::new(0),
            capacity_bytes: AtomicU64::new(capacities.iter().sum()),
            free_made_bytes: AtomicU64::new(0),
            starved: AtomicBool::new(false),
            freed,
        })
    }

    /// What all drives together may hold, in octets. Shrinks when a drive turns out smaller or fails.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    /// Octets in extents.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Extents given out.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// An extent of the smallest power of two that holds `len` octets, on the drives in turn.
    ///
    /// # Errors
    /// [`NoExtent`].
    pub fn allocate(self: &Arc<Self>, len: u64) -> Result<Extent, NoExtent> {
        let order = order_of(len, EXTENT_UNIT_BYTES);
        let bytes = EXTENT_UNIT_BYTES << order;
        let mut guard = self.drives.lock().expect("no panic under this lock");
        let (drives, turn) = &mut *guard;
        let count = drives.len();
        for step in 0..count {
            let drive = (*turn + step) % count;
            if let Some((file, unit)) = drives[drive].allocate(order) {
                *turn = drive + 1;
                self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
                self.count.fetch_add(1, Ordering::Relaxed);
                self.free_made_bytes.fetch_sub(bytes, Ordering::Relaxed);
                let id = ExtentId::new(drive as u16, file as u16, unit as u32, order);
                return Ok(Extent { id, extents: self.clone() });
            }
        }
        if drives.iter().any(|drive| !drive.failed && drive.unmade_bytes > 0) {
            self.starved.store(true, Ordering::Relaxed);
            return Err(NoExtent::Growing);
        }
        Err(if drives.iter().all(|drive| drive.failed) { NoExtent::Failed } else { NoExtent::Full })
    }

    /// The drive that should get its next file now: less than `low_bytes` is free in the files made so far, or what is
    /// free there comes in blocks too small for somebody who asked.
    pub fn growth_wanted(&self, low_bytes: u64) -> Option<usize> {
        if self.free_made_bytes.load(Ordering::Relaxed) >= low_bytes && !self.starved.load(Ordering::Relaxed) {
            return None;
        }
        let guard = self.drives.lock().expect("no panic under this lock");
        let growable = guard.0.iter().enumerate().filter(|(_, drive)| !drive.failed && drive.unmade_bytes > 0);
        growable.min_by_key(|(_, drive)| drive.free_bytes()).map(|(index, _)| index)
    }

    /// A file of `len` octets was made on `drive`.
    pub fn add_file(&self, drive: usize, len: u64) {
        let units = len / EXTENT_UNIT_BYTES;
        let mut guard = self.drives.lock().expect("no panic under this lock");
        let drive = &mut guard.0[drive];
        drive.unmade_bytes = drive.unmade_bytes.saturating_sub(len);
        drive.hint = drive.files.len();
        drive.files.push(Buddy::new(units as usize, ORDER_MAX));
        self.starved.store(false, Ordering::Relaxed);
        self.free_made_bytes.fetch_add(units * EXTENT_UNIT_BYTES, Ordering::Relaxed);
        drop(guard);
        self.freed.signal();
    }

    /// `drive` gets no further file: what it was still to bring is taken off the capacity. Returns that amount.
    pub fn end_growth(&self, drive: usize) -> u64 {
        let mut guard = self.drives.lock().expect("no panic under this lock");
        let lost = std::mem::take(&mut guard.0[drive].unmade_bytes);
        self.starved.store(false, Ordering::Relaxed);
        self.capacity_bytes.fetch_sub(lost, Ordering::Relaxed);
        drop(guard);
        self.freed.signal();
        lost
    }

    /// `drive` failed: nothing more is put there. Returns false if that was known.
    pub fn fail(&self, drive: usize) -> bool {
        let mut guard = self.drives.lock().expect("no panic under this lock");
        let drive = &mut guard.0[drive];
        if drive.failed {
            return false;
        }
        let free = drive.free_bytes();
        drive.failed = true;
        let made: u64 = drive.files.iter().map(|file| file.free_units() as u64 * EXTENT_UNIT_BYTES).sum();
        let lost = made + std::mem::take(&mut drive.unmade_bytes);
        self.capacity_bytes.fetch_sub(lost, Ordering::Relaxed);
        self.free_made_bytes.fetch_sub(free, Ordering::Relaxed);
        drop(guard);
        self.freed.signal();
        true
    }
}

impl fmt::Debug for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extents").field("used_bytes", &self.used_bytes()).finish_non_exhaustive()
    }
}

/// Space on a drive with one owner.
#[derive(Debug)]
pub struct Extent {
    id: ExtentId,
    extents: Arc<Extents>,
}

impl Extent {
    pub fn id(&self) -> ExtentId {
        self.id
    }

    /// Octets, a power of two of at least 4,096.
    pub fn bytes(&self) -> u64 {
        EXTENT_UNIT_BYTES << self.id.order()
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let bytes = self.bytes();
        let extents = &self.extents;
        let mut guard = extents.drives.lock().expect("no panic under this lock");
        let drive = &mut guard.0[usize::from(self.id.drive())];
        drive.files[usize::from(self.id.file())].free(self.id.offset() as usize, self.id.order());
        if drive.failed {
            extents.capacity_bytes.fetch_sub(bytes, Ordering::Relaxed);
        } else {
            extents.free_made_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        extents.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        extents.count.fetch_sub(1, Ordering::Relaxed);
        drop(guard);
        extents.freed.signal();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(capacities: &[u64]) -> Arc<Extents> {
        Extents::new(capacities, Arc::new(Wake::default()))
    }

    #[test]
    fn space_is_taken_from_the_drives_in_turn() {
        let extents = extents(&[1 << 20, 1 << 20]);
        assert_eq!(extents.allocate(1).unwrap_err(), NoExtent::Growing);
        extents.add_file(0, 1 << 20);
        extents.add_file(1, 1 << 20);
        let (one, two) = (extents.allocate(5000).unwrap(), extents.allocate(5000).unwrap());
        assert_ne!(one.id().drive(), two.id().drive());
        assert_eq!(one.bytes(), 8192);
        assert_eq!(extents.used_bytes(), 16384);
        drop((one, two));
        assert_eq!(extents.used_bytes(), 0);
    }

    #[test]
    fn a_full_pool_says_so_and_a_freed_extent_is_given_again() {
        let extents = extents(&[512 << 10]);
        extents.add_file(0, 512 << 10);
        let _one = extents.allocate(256 << 10).unwrap();
        let two = extents.allocate(256 << 10).unwrap();
        assert_eq!(extents.allocate(1).unwrap_err(), NoExtent::Full);
        drop(two);
        assert!(extents.allocate(256 << 10).is_ok());
    }

    #[test]
    fn growth_is_wanted_before_space_runs_out_and_ends_where_the_drive_ends() {
        let extents = extents(&[3 << 20]);
        assert_eq!(extents.growth_wanted(1 << 20), Some(0));
        extents.add_file(0, 1 << 20);
        assert_eq!(extents.growth_wanted(1 << 20), None);
        let held = extents.allocate(4096).unwrap();
        assert_eq!(extents.growth_wanted(1 << 20), Some(0));
        assert_eq!(extents.end_growth(0), 2 << 20);
        assert_eq!(extents.growth_wanted(1 << 20), None);
        assert_eq!(extents.capacity_bytes(), 1 << 20);
        drop(held);
    }

    #[test]
    fn a_failed_drive_gets_nothing_more() {
        let extents = extents(&[1 << 20, 1 << 20]);
        extents.add_file(0, 1 << 20);
        extents.add_file(1, 1 << 20);
        let on_first = extents.allocate(4096).unwrap();
        assert_eq!(on_first.id().drive(), 0);
        assert!(extents.fail(0));
        assert!(!extents.fail(0));
        assert_eq!(extents.capacity_bytes(), (1 << 20) + 4096);
        for _ in 0..8 {
            assert_eq!(extents.allocate(4096).unwrap().id().drive(), 1);
        }
        drop(on_first);
        assert_eq!(extents.capacity_bytes(), 1 << 20);
        assert_eq!(extents.used_bytes(), 0);
        assert!(extents.fail(1));
        assert_eq!(extents.allocate(4096).unwrap_err(), NoExtent::Failed);
    }

    #[test]
    fn growth_is_wanted_too_when_what_is_free_lies_in_pieces() {
        let extents = extents(&[2 << 20]);
        extents.add_file(0, 1 << 20);
        let held: Vec<Extent> = (0..256).map(|_| extents.allocate(4096).unwrap()).collect();
        // Every other one comes back: half is free, in pieces of 4 KiB.
        let _kept: Vec<Extent> = held.into_iter().enumerate().filter(|(n, _)| n % 2 == 0).map(|(_, one)| one).collect();
        assert_eq!(extents.growth_wanted(512 << 10), None);
        assert_eq!(extents.allocate(8192).unwrap_err(), NoExtent::Growing);
        assert_eq!(extents.growth_wanted(512 << 10), Some(0));
        extents.add_file(0, 1 << 20);
        assert!(extents.allocate(8192).is_ok());
    }
}
