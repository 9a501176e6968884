//! Segments: the parts of at most 256 KiB that values are made of, in RAM, on disk, or both.
//!
//! ```text
//!             seal (value longer than a head)        write-behind            RAM needed
//!  Filling ───────────────────────────────▶ dirty ───────────────▶ clean ───────────────▶ cold
//!     │                                       ▲    (dirty while     RAM + disk             disk
//!     └────────▶ resident ────────────────────┘     it is written)
//!   (whole value within a head)   spill: grew past the head by append
//! ```
//!
//! The octets of a segment never change once it is sealed; only where they are does. A reader takes an `Arc` of the RAM
//! block and so keeps it; dropping RAM merely forgets the segment's own `Arc`. An extent belongs to its segment, and disk
//! reads and writes carry an `Arc` of the segment, so space is never reused under them.

use crate::fabric::region::{BLOCK_BYTES_MAX, Block};
use crate::store::extents::{EXTENT_UNIT_BYTES, Extent};
use crate::store::fifo::{Fifo, Place};
use crate::store::location::Medium;
use crate::store::pool::{CRC_BLOCK_COUNT, ExtentId};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Largest segment, in octets: one block of the arena, one extent, one disk request.
pub const SEGMENT_BYTES_MAX: u64 = BLOCK_BYTES_MAX;
/// CRC32C of each [`CRC_BLOCK_BYTES`](crate::store::pool::CRC_BLOCK_BYTES) of a segment.
pub type Crcs = [u32; CRC_BLOCK_COUNT];

/// Whether a value may go to disk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Class {
    /// Within one head: lives in RAM alone.
    Small,
    /// Longer than a head: has an extent for every segment.
    Large,
}

/// Octets of the next segment of a value with `remaining` octets to come, and the size of its block, a power of two.
/// Whole segments first; the end is cut so that rounding up wastes at most an eighth of the last block, or 256 octets.
pub fn next_cut(remaining: u64, block_bytes_min: u64) -> (u64, u64) {
    if remaining >= SEGMENT_BYTES_MAX {
        return (SEGMENT_BYTES_MAX, SEGMENT_BYTES_MAX);
    }
    let above = remaining.next_power_of_two().max(block_bytes_min);
    if above - remaining <= (above / 8).max(256) || above == block_bytes_min {
        return (remaining, above);
    }
    (above / 2, above / 2)
}

/// Smallest block for a segment of `class`, in octets.
pub fn block_bytes_min(class: Class) -> u64 {
    match class {
        Class::Small => crate::fabric::region::UNIT_BYTES,
        Class::Large => EXTENT_UNIT_BYTES,
    }
}

/// Octets of blocks (or extents) a value of `len` takes.
pub fn footprint(len: u64, class: Class) -> u64 {
    let whole = len / SEGMENT_BYTES_MAX * SEGMENT_BYTES_MAX;
    let mut remaining = len - whole;
    let mut total = whole;
    while remaining > 0 {
        let (len, block) = next_cut(remaining, block_bytes_min(class));
        remaining -= len;
        total += block;
    }
    total
}

/// A segment being written by its one owner.
#[derive(Debug)]
pub struct Filling {
    block: Block,
    extent: Option<Extent>,
    len: u32,
    filled: u32,
    head: bool,
}

impl Filling {
    /// Room for `len` octets in `block`, to be kept in `extent` too if there is one.
    pub fn new(block: Block, extent: Option<Extent>, len: u32, head: bool) -> Self {
        assert!(len as usize <= block.len(), "{len} octets in a block of {}", block.len());
        assert!(extent.as_ref().is_none_or(|extent| extent.bytes() <= block.len() as u64));
        Self { block, extent, len, filled: 0, head }
    }

    /// What is not written yet.
    pub fn spare(&mut self) -> &mut [u8] {
        &mut self.block.as_mut_slice()[self.filled as usize..self.len as usize]
    }

    /// The first `count` octets of [`Filling::spare`] were written.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= (self.len - self.filled) as usize, "more octets than the segment has room for");
        self.filled += count as u32;
    }

    /// Octets still missing.
    pub fn missing(&self) -> usize {
        (self.len - self.filled) as usize
    }

    /// All of it, written or not, for an owner who keeps account of that.
    pub(super) fn octets_mut(&mut self) -> &mut [u8] {
        &mut self.block.as_mut_slice()[..self.len as usize]
    }

    /// As [`Filling::octets_mut`], to be read.
    pub(super) fn octets(&self) -> &[u8] {
        &self.block.as_slice()[..self.len as usize]
    }

    /// Octets of its block.
    pub(super) fn block_bytes(&self) -> u64 {
        self.block.len() as u64
    }

    /// The finished segment of the first `len` octets, written or not: what was not must be in no piece.
    pub(super) fn seal_at(mut self, len: u32, residency: &Arc<Residency>) -> Arc<Segment> {
        assert!(len <= self.len, "{len} octets of {}", self.len);
        (self.len, self.filled) = (len, len);
        self.seal(residency)
    }

    /// The finished segment.
    ///
    /// # Panics
    /// If octets are missing.
    pub fn seal(self, residency: &Arc<Residency>) -> Arc<Segment> {
        assert!(self.filled == self.len, "{} octets missing", self.missing());
        let disk = if self.extent.is_some() { Disk::Dirty } else { Disk::Never };
        if disk == Disk::Never {
            residency.ram_only_bytes.fetch_add(self.block.len() as u64, Ordering::Relaxed);
        }
        let segment = Arc::new(Segment {
            len: self.len,
            head: self.head,
            is_hole: false,
            touched: AtomicBool::new(false),
            cold_read: AtomicU64::new(0),
            holds: AtomicU32::new(0),
            residency: residency.clone(),
            state: Mutex::new(State { ram: Some(Arc::new(self.block)), disk, extent: self.extent, listed: None }),
        });
        segment.list(&mut segment.lock());
        segment
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Disk {
    /// Zeros that are nobody's: they stay in memory of their own.
    Hole,
    Never,
    Dirty,
    Writing,
    Clean(Crcs),
    Lost,
}

#[derive(Debug)]
struct State {
    ram: Option<Arc<Block>>,
    disk: Disk,
    extent: Option<Extent>,
    listed: Option<(List, Place)>,
}

/// Where a reader finds the octets of a segment.
#[derive(Debug)]
pub enum Content {
    Ram(Arc<Block>),
    Disk {
        extent: ExtentId,
        crcs: Crcs,
    },
    /// The drive failed before or after they were written.
    Lost,
}

/// Up to 256 KiB of one or several values.
#[derive(Debug)]
pub struct Segment {
    len: u32,
    head: bool,
    is_hole: bool,
    /// Read since it last came up for leaving RAM: it gets one more round.
    touched: AtomicBool,
    /// What [`Segment::mark_cold_read`] was told last.
    cold_read: AtomicU64,
    /// While there are any it stays in RAM.
    holds: AtomicU32,
    residency: Arc<Residency>,
    state: Mutex<State>,
}

impl Segment {
    /// What all holes of a store are pieces of: `zeros`, a block that is not of the arena.
    pub(super) fn hole(zeros: Block, residency: &Arc<Residency>) -> Arc<Self> {
        let state = State { ram: Some(Arc::new(zeros)), disk: Disk::Hole, extent: None, listed: None };
        Arc::new(Self {
            len: SEGMENT_BYTES_MAX as u32,
            head: false,
            is_hole: true,
            touched: AtomicBool::new(false),
            cold_read: AtomicU64::new(0),
            holds: AtomicU32::new(0),
            residency: residency.clone(),
            state: Mutex::new(state),
        })
    }

    /// Its octets are zeros that take no space.
    pub fn is_hole(&self) -> bool {
        self.is_hole
    }

    /// Octets of the block or the extent that it takes.
    pub(super) fn footprint_bytes(&self) -> u64 {
        let state = self.lock();
        match (&state.extent, &state.ram) {
            _ if self.is_hole => 0,
            (Some(extent), _) => extent.bytes(),
            (None, ram) => ram.as_ref().map_or(0, |ram| ram.len() as u64),
        }
    }

    /// Octets.
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Octets of extent that the segment holds.
    pub fn extent_bytes(&self) -> u64 {
        self.lock().extent.as_ref().map_or(0, Extent::bytes)
    }

    /// Where the octets are now. Whoever gets `Disk` keeps the `Arc` of the segment until the read is done.
    pub fn content(&self) -> Content {
        let state = self.lock();
        match (&state.ram, state.disk, &state.extent) {
            (Some(ram), _, _) => {
                self.touched.store(true, Ordering::Relaxed);
                Content::Ram(ram.clone())
            }
            (None, Disk::Clean(crcs), Some(extent)) => Content::Disk { extent: extent.id(), crcs },
            _ => Content::Lost,
        }
    }

    /// What holds it now; no sign that anybody reads it.
    pub fn medium(&self) -> Medium {
        let state = self.lock();
        match (&state.ram, state.disk, &state.extent) {
            (Some(_), _, _) => Medium::Ram,
            (None, Disk::Clean(_), Some(extent)) => Medium::Disk { drive: extent.id().drive() },
            _ => Medium::Lost,
        }
    }

    /// Whether RAM holds it.
    pub fn is_resident(&self) -> bool {
        self.lock().ram.is_some()
    }

    /// Whether it still needs an extent before it may leave RAM.
    pub fn is_ram_only(&self) -> bool {
        self.lock().disk == Disk::Never
    }

    /// Size of the extent that [`Segment::spill`] needs, in octets.
    pub fn spill_bytes(&self) -> u64 {
        self.lock().ram.as_ref().map_or(0, |ram| ram.len() as u64)
    }

    /// Lets a RAM-only segment be written behind to `extent`.
    pub fn spill(self: &Arc<Self>, extent: Extent) {
        let mut state = self.lock();
        if let (Disk::Never, Some(ram)) = (state.disk, &state.ram) {
            self.residency.ram_only_bytes.fetch_sub(ram.len() as u64, Ordering::Relaxed);
            state.extent = Some(extent);
            state.disk = Disk::Dirty;
            self.list(&mut state);
        }
    }

    /// It was read from disk at `now` of a clock that only grows. Returns when it was before, 0 if never.
    pub fn mark_cold_read(&self, now: u64) -> u64 {
        self.cold_read.swap(now, Ordering::Relaxed)
    }

    /// Keeps it in RAM, if it is there or once it comes, until as many [`Segment::release`].
    pub fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends one [`Segment::hold`].
    pub fn release(self: &Arc<Self>) {
        if self.holds.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        let mut state = self.lock();
        // Taken off its list while it was held; in any other state it is listed, or will be.
        if state.listed.is_none() && matches!(state.disk, Disk::Clean(_)) {
            self.list(&mut state);
        }
    }

    /// Puts a copy read from disk back into RAM, unless it is there by now.
    pub fn warm(self: &Arc<Self>, block: Block) {
        let mut state = self.lock();
        if state.ram.is_none() && matches!(state.disk, Disk::Clean(_)) {
            state.ram = Some(Arc::new(block));
            self.list(&mut state);
        }
    }

    /// Write-behind ended. On failure the octets stay in RAM and the segment waits for another extent: see
    /// [`Segment::move_to`].
    pub fn handle_written(self: &Arc<Self>, result: Option<Crcs>) {
        let mut state = self.lock();
        assert!(state.disk == Disk::Writing, "nobody else ends a write");
        self.residency.writing_bytes.fetch_sub(u64::from(self.len), Ordering::Relaxed);
        if let Some(crcs) = result {
            state.disk = Disk::Clean(crcs);
            self.list(&mut state);
        } else {
            state.disk = Disk::Lost;
        }
    }

    /// After a failed write: another extent to try, or none, and then the octets are given up.
    pub fn move_to(self: &Arc<Self>, extent: Option<Extent>) {
        let mut state = self.lock();
        if state.disk != Disk::Lost {
            return;
        }
        match extent {
            Some(extent) => {
                state.extent = Some(extent);
                state.disk = Disk::Dirty;
                self.list(&mut state);
            }
            None => state.ram = None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// Joins the list that the state asks for.
    fn list(self: &Arc<Self>, state: &mut State) {
        let Some(bytes) = state.ram.as_ref().map(|ram| ram.len() as u64) else { return };
        let list = match (state.disk, self.head) {
            (Disk::Dirty, false) => List::DirtyBody,
            (Disk::Dirty, true) => List::DirtyHead,
            (Disk::Clean(_), false) => List::CleanBody,
            (Disk::Clean(_), true) => List::CleanHead,
            _ => return,
        };
        let place = self.residency.push(list, Arc::downgrade(self), bytes);
        state.listed = Some((list, place));
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let state = self.state.get_mut().expect("no panic under this lock");
        let Some(ram) = &state.ram else { return };
        let bytes = ram.len() as u64;
        if state.disk == Disk::Never {
            self.residency.ram_only_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        if let Some((list, place)) = state.listed {
            self.residency.remove(list, place, bytes);
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum List {
    DirtyBody,
    DirtyHead,
    CleanBody,
    CleanHead,
}

/// A segment to be written behind.
#[derive(Debug)]
pub struct WriteJob {
    pub segment: Arc<Segment>,
    pub ram: Arc<Block>,
    pub extent: ExtentId,
}

/// Octets of what lists take for a segment that is now in one for what is dirty, now in one for what is clean: neither gives memory
/// back.
pub(super) const LISTS_BYTES: usize = 2 * Fifo::<Weak<Segment>>::MEMBER_BYTES;

/// Which segments are dirty and which could leave RAM: bodies before heads, the oldest first.
#[derive(Debug, Default)]
pub struct Residency {
    lists: Mutex<[Fifo<Weak<Segment>>; 4]>,
    dirty_bytes: AtomicU64,
    writing_bytes: AtomicU64,
    clean_bytes: AtomicU64,
    ram_only_bytes: AtomicU64,
}

impl Residency {
    /// Octets of segments that have no extent.
    pub fn ram_only_bytes(&self) -> u64 {
        self.ram_only_bytes.load(Ordering::Relaxed)
    }

    /// Octets of RAM not on disk yet and not being written.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.load(Ordering::Relaxed)
    }

    /// Octets being written.
    pub fn writing_bytes(&self) -> u64 {
        self.writing_bytes.load(Ordering::Relaxed)
    }

    /// Octets of RAM that are on disk too.
    pub fn clean_bytes(&self) -> u64 {
        self.clean_bytes.load(Ordering::Relaxed)
    }

    /// The next segment to write: body before head, oldest first. Its [`Segment::handle_written`] must follow.
    pub fn next_dirty(&self) -> Option<WriteJob> {
        loop {
            let segment = self.pop(&[List::DirtyBody, List::DirtyHead])?;
            let mut state = segment.lock();
            let (Some(ram), Disk::Dirty, Some(extent)) = (&state.ram, state.disk, &state.extent) else { continue };
            let (ram, extent) = (ram.clone(), extent.id());
            state.disk = Disk::Writing;
            state.listed = None;
            self.dirty_bytes.fetch_sub(ram.len() as u64, Ordering::Relaxed);
            self.writing_bytes.fetch_add(u64::from(segment.len), Ordering::Relaxed);
            drop(state);
            return Some(WriteJob { segment, ram, extent });
        }
    }

    /// Drops clean segments from RAM, bodies before heads, until `wanted_bytes` came free or none is left that nobody
    /// reads. Returns the octets freed.
    pub fn drop_clean(&self, wanted_bytes: u64) -> u64 {
        let mut freed = 0;
        for list in [List::CleanBody, List::CleanHead] {
            // Twice round: the first may only have spent second chances.
            let mut looks = 2 * self.lock()[list as usize].len();
            while freed < wanted_bytes && looks > 0 {
                looks -= 1;
                let Some(segment) = self.pop(&[list]) else { break };
                let mut state = segment.lock();
                let (Some(ram), Disk::Clean(_)) = (&state.ram, state.disk) else { continue };
                let (bytes, unread) = (ram.len() as u64, Arc::strong_count(ram) == 1);
                self.clean_bytes.fetch_sub(bytes, Ordering::Relaxed);
                state.listed = None;
                // Not a candidate, and not counted as memory that could be had, until it is let go.
                if segment.holds.load(Ordering::Relaxed) > 0 {
                    continue;
                }
                // Readers clone the Arc under this lock, so a count of one means that none has it or can get it now.
                if unread && !segment.touched.swap(false, Ordering::Relaxed) {
                    state.ram = None;
                    freed += bytes;
                } else {
                    segment.list(&mut state);
                }
            }
        }
        freed
    }

    fn lock(&self) -> MutexGuard<'_, [Fifo<Weak<Segment>>; 4]> {
        self.lists.lock().expect("no panic under this lock")
    }

    fn bytes_of(&self, list: List) -> &AtomicU64 {
        match list {
            List::DirtyBody | List::DirtyHead => &self.dirty_bytes,
            List::CleanBody | List::CleanHead => &self.clean_bytes,
        }
    }

    fn push(&self, list: List, segment: Weak<Segment>, bytes: u64) -> Place {
        self.bytes_of(list).fetch_add(bytes, Ordering::Relaxed);
        self.lock()[list as usize].push_back(segment)
    }

    fn remove(&self, list: List, place: Place, bytes: u64) {
        self.bytes_of(list).fetch_sub(bytes, Ordering::Relaxed);
        self.lock()[list as usize].remove(place);
    }

    /// The oldest living member of the first list that has one. Its state still names the list it left.
    fn pop(&self, from: &[List]) -> Option<Arc<Segment>> {
        let mut lists = self.lock();
        for list in from {
            // A dead one is about to leave by itself; taking its place away early does no harm.
            while let Some(segment) = lists[*list as usize].pop_front() {
                if let Some(segment) = segment.upgrade() {
                    return Some(segment);
                }
            }
        }
        None
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fabric::region::Region;
    use crate::store::extents::Extents;
    use crate::wake::Wake;

    struct Rig {
        region: Arc<Region>,
        extents: Arc<Extents>,
        residency: Arc<Residency>,
    }

    fn rig() -> Rig {
        let wake = Arc::new(Wake::default());
        let extents = Extents::new(&[4 << 20], wake.clone());
        extents.add_file(0, 4 << 20);
        Rig { region: Region::map(4 << 20, wake).unwrap(), extents, residency: Arc::default() }
    }

    impl Rig {
        fn segment(&self, len: u32, class: Class, head: bool) -> Arc<Segment> {
            let block = self.region.allocate(u64::from(len).max(block_bytes_min(class))).unwrap();
            let extent = (class == Class::Large).then(|| self.extents.allocate(u64::from(len)).unwrap());
            let mut filling = Filling::new(block, extent, len, head);
            filling.spare().fill(7);
            filling.advance(len as usize);
            filling.seal(&self.residency)
        }
    }

    #[test]
    fn cuts_waste_an_eighth_at_most() {
        for len in (1..600_000u64).step_by(997).chain([1, 63, 64, 65, 4096, 4097, 65_537, 262_144, 262_145]) {
            for class in [Class::Small, Class::Large] {
                let (mut remaining, mut parts) = (len, 0);
                while remaining > 0 {
                    let (cut, block) = next_cut(remaining, block_bytes_min(class));
                    assert!(cut > 0 && cut <= block && block.is_power_of_two() && block <= SEGMENT_BYTES_MAX);
                    remaining -= cut;
                    parts += 1;
                }
                let waste = footprint(len, class) - len;
                assert!(waste <= (len / 4).max(256).max(block_bytes_min(class)), "{len} {class:?}: {waste}");
                assert!(parts <= 3 + 8, "{len}: {parts} segments");
            }
        }
    }

    #[test]
    fn a_large_segment_goes_from_dirty_to_clean_to_cold() {
        let rig = rig();
        let segment = rig.segment(100_000, Class::Large, false);
        assert_eq!(rig.residency.dirty_bytes(), 128 << 10);
        let job = rig.residency.next_dirty().unwrap();
        assert!(Arc::ptr_eq(&job.segment, &segment));
        assert!(rig.residency.next_dirty().is_none());
        assert_eq!(rig.residency.drop_clean(1), 0, "what is being written stays");
        drop(job.ram);
        segment.handle_written(Some([1, 2, 0, 0]));
        assert_eq!(rig.residency.clean_bytes(), 128 << 10);
        assert_eq!(rig.residency.drop_clean(1), 128 << 10);
        assert!(matches!(segment.content(), Content::Disk { crcs: [1, 2, 0, 0], .. }));
        assert_eq!(rig.region.free_bytes(), rig.region.len());
        drop((segment, job.segment));
        assert_eq!(rig.extents.used_bytes(), 0);
    }

    #[test]
    fn bodies_leave_before_heads_and_what_is_read_stays() {
        let rig = rig();
        let head = rig.segment(65_536, Class::Large, true);
        let body = rig.segment(65_536, Class::Large, false);
        let read = rig.segment(65_536, Class::Large, false);
        while let Some(job) = rig.residency.next_dirty() {
            job.segment.handle_written(Some([0; 4]));
        }
        let Content::Ram(held) = read.content() else { panic!("in RAM") };
        assert_eq!(rig.residency.drop_clean(1), 65_536);
        assert!(!body.is_resident() && head.is_resident() && read.is_resident());
        assert_eq!(rig.residency.drop_clean(u64::MAX), 65_536);
        assert!(!head.is_resident() && read.is_resident());
        drop(held);
        assert_eq!(rig.residency.drop_clean(u64::MAX), 65_536);
    }

    #[test]
    fn small_segments_never_queue_for_the_disk_until_they_spill() {
        let rig = rig();
        let segment = rig.segment(5000, Class::Small, true);
        assert!(rig.residency.next_dirty().is_none() && segment.is_ram_only());
        segment.spill(rig.extents.allocate(segment.spill_bytes()).unwrap());
        assert!(rig.residency.next_dirty().is_some());
    }

    #[test]
    fn dead_segments_leave_the_lists() {
        let rig = rig();
        for _ in 0..1000 {
            drop(rig.segment(65_536, Class::Large, false));
        }
        assert!(rig.residency.next_dirty().is_none());
        assert_eq!(rig.residency.dirty_bytes(), 0);
        assert_eq!((rig.region.free_bytes(), rig.extents.used_bytes()), (rig.region.len(), 0));
    }

    #[test]
    fn a_failed_write_is_moved_or_given_up_but_never_wrong() {
        let rig = rig();
        let moved = rig.segment(65_536, Class::Large, false);
        let lost = rig.segment(65_536, Class::Large, false);
        for segment in [&moved, &lost] {
            rig.residency.next_dirty().unwrap();
            segment.handle_written(None);
            assert!(matches!(segment.content(), Content::Ram(_)));
        }
        moved.move_to(Some(rig.extents.allocate(65_536).unwrap()));
        lost.move_to(None);
        assert!(matches!(lost.content(), Content::Lost));
        assert!(Arc::ptr_eq(&rig.residency.next_dirty().unwrap().segment, &moved));
    }
}
