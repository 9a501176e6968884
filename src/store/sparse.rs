//! A new version of an object whose octets are written in any order, sparsely, and over each other.
//!
//! ```text
//!   open       | 64 KiB, being written  |      | 256 KiB |             up to 8 blocks, one in each 256 KiB of the value
//!   changes        | piece | piece |       | piece |                   written before, sealed
//!   base       |<--------------- base_len ------------------>|         the object as it was, but what was cut off
//!   zeros      |<------------------------- len ------------------------->|
//! ```
//! Each octet is what the topmost row has that has it. Nothing is read from disk to write: a block that is sealed keeps the
//! octets that were written to it, and what lies between them if that is in RAM or zero; the rest stays where it was.
//!
//! A draft is complete at any time. Its base is pinned and its own blocks are claimed, so it waits for nobody: what cannot be
//! had at once is refused.

use crate::store::claims::{Claim, Revoker};
use crate::store::draft::Want;
use crate::store::object::{Piece, piece_index_bytes};
use crate::store::pin::Pinned;
use crate::store::segment::{Class, Content, Filling, SEGMENT_BYTES_MAX, block_bytes_min};
use crate::store::{Lookup, Short, Store};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The value is written in blocks that lie in one of these each.
const CELL_BYTES: u64 = SEGMENT_BYTES_MAX;
/// Blocks that are open at the same time.
const OPEN_MAX: usize = 8;
/// A block among octets that are in RAM takes so many of them along, so that many small writes do not make many small pieces.
const JOINED_BYTES: u64 = 64 << 10;
/// Claimed octets that may be of blocks which are given back by now, before they are counted again.
const SLACK_BYTES: u64 = 16 << 20;
/// Pieces of a draft's own, beyond one for each [`JOINED_BYTES`]: with more it has to be committed first.
const PIECES_MAX: usize = 1 << 16;
/// Parts of an open block: with more it is sealed, which joins them where what lies between them is in RAM.
const PARTS_MAX: usize = 64;
/// What the index is charged for a draft, in octets: itself, its claim, the lists of its open blocks.
const DRAFT_BYTES: u64 = (size_of::<SparseDraft>() + 512) as u64;
/// And for a piece of it: what the object will be charged, with a hole behind it, and a place in a tree. What is written in order
/// leaves six in nodes of eleven, and what is cut out of them fewer; the nodes above take a fifth more.
const PIECE_BYTES: u64 =
    piece_index_bytes(Class::Large) + size_of::<Piece>() as u64 + (size_of::<(u64, Piece)>() * 5 / 2) as u64;
/// The pieces of one file, those of its base among them, may take this part of the index.
const INDEX_DIVISOR: u64 = 2;

/// Why nothing more was written.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SparseError {
    #[error("a value may have {max} octets")]
    TooLong { max: u64 },
    #[error("blocks of {bytes} octets are more than all there are, {bytes_max}")]
    NoSpace { bytes: u64, bytes_max: u64 },
    /// Others claim, pin or wait for what there is, or drafts fill the index. What was written may have to be committed
    /// before there is more: see [`SparseDraft::is_revoked`].
    #[error("no space can be claimed now")]
    Busy,
    /// As it was committed it takes more of the index than one value may.
    #[error("the value is in too many parts")]
    TooManyParts,
    #[error("no space: {0}")]
    Short(#[from] Short),
}

/// Octets of one block that were written: parts in order that neither meet nor overlap.
#[derive(Debug, Default)]
struct Covered(Vec<Range<u32>>);

impl Covered {
    fn add(&mut self, new: Range<u32>) {
        let first = self.0.partition_point(|part| part.end < new.start);
        let last = self.0.partition_point(|part| part.start <= new.end);
        let joined = self.0[first..last].iter().fold(new, |all, part| all.start.min(part.start)..all.end.max(part.end));
        self.0.splice(first..last, [joined]);
    }

    /// Nothing from `end` on.
    fn cut(&mut self, end: u32) {
        self.0.retain(|part| part.start < end);
        if let Some(last) = self.0.last_mut() {
            last.end = last.end.min(end);
        }
    }

    /// What is not covered before the end of the last part.
    fn gaps(&self) -> Vec<Range<u32>> {
        let starts = std::iter::once(0).chain(self.0.iter().map(|part| part.end));
        starts.zip(&self.0).map(|(start, part)| start..part.start).filter(|gap| !gap.is_empty()).collect()
    }

    fn is_all(&self, len: u32) -> bool {
        matches!(self.0.as_slice(), [all] if *all == (0..len))
    }
}

/// A block that is being written.
#[derive(Debug)]
struct Open {
    /// Of its first octet in the value; a multiple of its length.
    at: u64,
    filling: Filling,
    covered: Covered,
}

impl Open {
    fn len(&self) -> u64 {
        self.filling.octets().len() as u64
    }

    fn end(&self) -> u64 {
        self.at + self.len()
    }
}

/// See the module.
#[must_use = "a dropped draft gives its space back"]
pub struct SparseDraft {
    store: Store,
    base: Pinned,
    /// Octets of the base that still count.
    base_len: u64,
    len: u64,
    changes: BTreeMap<u64, Piece>,
    /// The one that was opened first is the first.
    open: Vec<Open>,
    class: Class,
    claim: Option<Claim>,
    is_changed: bool,
    /// There was no room for another piece: there is, perhaps, once this is an object.
    is_refused: bool,
    records: Records,
    /// Blocks taken, of which some may be given back since they were counted last.
    taken_bytes: u64,
    counted_bytes: u64,
}

/// What a draft takes of the index, which it shares with the objects.
struct Records {
    store: Store,
    bytes: u64,
}

impl Records {
    fn set(&mut self, bytes: u64) {
        self.store.count_index(bytes as i64 - self.bytes as i64);
        self.bytes = bytes;
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// A part of a value below what is open.
enum Below {
    Piece(Piece),
    Hole,
}

impl Store {
    /// Largest value that can be written so: holes take no space, so it may be longer than the pool.
    pub fn sparse_bytes_max(&self) -> u64 {
        self.shared.sizes.value_bytes_max
    }

    /// A new version of the living object of `key`, which is the same as long as nothing is written. `None` if there is none.
    ///
    /// # Errors
    /// [`SparseError::Busy`]: readers pin as much as they may.
    ///
    /// # Panics
    /// On a store without files.
    pub fn sparse_draft(&self, key: &[u8], now: u64) -> Result<Option<SparseDraft>, SparseError> {
        assert!(self.shared.zeros.is_some(), "the store was made with files");
        match self.get(key, now) {
            Lookup::Hit(base) => Ok(Some(SparseDraft {
                store: self.clone(),
                records: {
                    let mut records = Records { store: self.clone(), bytes: 0 };
                    records.set(DRAFT_BYTES);
                    records
                },
                base_len: base.len(),
                len: base.len(),
                class: base.class(),
                base,
                changes: BTreeMap::new(),
                open: Vec::new(),
                claim: None,
                is_changed: false,
                is_refused: false,
                taken_bytes: 0,
                counted_bytes: 0,
            })),
            Lookup::Miss(_) => Ok(None),
            Lookup::Busy => Err(SparseError::Busy),
        }
    }
}

impl SparseDraft {
    /// The object it was begun with.
    pub fn base(&self) -> &Pinned {
        &self.base
    }

    /// Octets of the value now.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Something was written, or another length set.
    pub fn is_changed(&self) -> bool {
        self.is_changed
    }

    /// Octets that it claims beside its base.
    pub fn claimed_bytes(&self) -> u64 {
        self.claim.as_ref().map_or(0, Claim::bytes)
    }

    /// Others wait for what it claims, or it was refused a place in the index: it should be committed without delay.
    pub fn is_revoked(&self) -> bool {
        self.is_refused || self.claim.as_ref().is_some_and(Claim::is_revoked)
    }

    /// What it takes of the index, in octets.
    pub fn index_bytes(&self) -> u64 {
        self.records.bytes
    }

    /// Copies as much of `octets` as there is room for to `offset` of the value, and says how much that was: at least one,
    /// if there are any. The value ends no earlier than they do; between its old end and them are zeros.
    ///
    /// # Errors
    /// [`SparseError`], if nothing was written.
    pub fn write(&mut self, offset: u64, octets: &[u8]) -> Result<usize, SparseError> {
        let max = self.store.sparse_bytes_max();
        let end = offset.checked_add(octets.len() as u64).filter(|end| *end <= max);
        let end = end.ok_or(SparseError::TooLong { max })?;
        if octets.is_empty() {
            return Ok(0);
        }
        let result = self.write_some(offset, end, octets);
        self.count_records();
        result
    }

    fn write_some(&mut self, offset: u64, end: u64, octets: &[u8]) -> Result<usize, SparseError> {
        self.make_records_room(end.max(self.len))?;
        self.grow_class(end)?;
        if let Some(claim) = &self.claim {
            claim.touch(self.store.shared.clock.now_ms());
        }
        let mut done = 0;
        while done < octets.len() {
            let at = offset + done as u64;
            let count = (octets.len() - done).min((CELL_BYTES - at % CELL_BYTES) as usize);
            match self.room(at, count as u64) {
                Ok((index, count)) => {
                    self.put(index, at, &octets[done..done + count as usize]);
                    done += count as usize;
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// The value has `len` octets from now on: it is cut off, or zeros follow.
    ///
    /// # Errors
    /// [`SparseError::TooLong`]; where it grows, what [`SparseDraft::write`] is refused with.
    pub fn set_len(&mut self, len: u64) -> Result<(), SparseError> {
        let max = self.store.sparse_bytes_max();
        if len > max {
            return Err(SparseError::TooLong { max });
        }
        if len > self.len {
            self.make_records_room(len)?;
            self.grow_class(len)?;
        } else {
            self.base_len = self.base_len.min(len);
            self.clear(len, u64::MAX);
            self.open.retain(|open| open.at < len);
            self.open.iter_mut().for_each(|open| open.covered.cut((len - open.at).min(open.len()) as u32));
            self.open.retain(|open| !open.covered.0.is_empty());
        }
        self.len = len;
        self.is_changed = true;
        self.count_records();
        Ok(())
    }

    /// The octets from `offset` on, `len` at most, as pieces in order. They stay what they are, whatever is written later.
    pub fn range(&mut self, offset: u64, len: u64) -> Vec<Piece> {
        let end = offset.saturating_add(len).min(self.len);
        if offset >= end {
            return Vec::new();
        }
        while let Some(index) = self.open.iter().position(|open| open.at < end && offset < open.end()) {
            self.seal(index);
        }
        self.count_records();
        self.pieces(offset, end)
    }

    /// All octets as pieces.
    pub(super) fn sealed_pieces(&mut self) -> Vec<Piece> {
        self.range(0, u64::MAX)
    }

    /// Before the object is counted in its place.
    pub(super) fn give_back_records(&mut self) {
        self.records.set(0);
    }

    fn count_records(&mut self) {
        self.records.set(self.records_bytes(self.len));
    }

    /// What the index is charged for a value of `len` octets beyond its base.
    fn records_bytes(&self, len: u64) -> u64 {
        let open: usize = self.open.iter().map(|open| open.covered.0.len()).sum();
        let holes = len.saturating_sub(self.base_len) / CELL_BYTES + 1;
        DRAFT_BYTES + (self.changes.len() + open) as u64 * PIECE_BYTES + holes * size_of::<Piece>() as u64
    }

    /// Room in the index for what a write adds to a value that has `len` octets then, if need be that of objects that go.
    fn make_records_room(&mut self, len: u64) -> Result<(), SparseError> {
        let records_bytes = self.records_bytes(len) + OPEN_MAX as u64 * PIECE_BYTES;
        let is_within = self.base.index_bytes() + records_bytes <= self.store.sizes().index_bytes_max / INDEX_DIVISOR;
        if !is_within && !self.is_changed {
            return Err(SparseError::TooManyParts);
        }
        // What it has may take the place of its base: how many parts the value has is known when it is committed.
        let is_few = self.changes.len() <= PIECES_MAX + (self.len / JOINED_BYTES) as usize;
        let more_bytes = records_bytes.saturating_sub(self.records.bytes);
        self.is_refused = !(is_within && is_few && self.store.make_index_room(more_bytes));
        if self.is_refused { Err(SparseError::Busy) } else { Ok(()) }
    }

    /// Pieces and holes between two offsets, with nothing open between them.
    fn pieces(&self, from: u64, to: u64) -> Vec<Piece> {
        let zeros = self.store.shared.zeros.as_ref().expect("a store with files has them");
        let mut pieces = Vec::new();
        self.below(from, to, |part, below| match below {
            Below::Piece(piece) => pieces.push(piece),
            Below::Hole => {
                let mut at = part.start;
                while at < part.end {
                    let grid = (at + 1).next_multiple_of(CELL_BYTES);
                    let len = (grid.min(part.end) - at) as u32;
                    pieces.push(Piece { segment: zeros.clone(), start: 0, len });
                    at += u64::from(len);
                }
            }
        });
        pieces
    }

    /// Tells `see` of every part between two offsets, in order.
    fn below(&self, from: u64, to: u64, mut see: impl FnMut(Range<u64>, Below)) {
        let mut at = from;
        // The one before may reach into the range.
        let before = self.changes.range(..from).next_back().map(|(at, piece)| (*at, piece));
        let within = self.changes.range(from..to).map(|(at, piece)| (*at, piece));
        for (start, piece) in before.into_iter().chain(within) {
            let end = start + u64::from(piece.len);
            if end <= at {
                continue;
            }
            if start > at {
                self.base_parts(at, start, &mut see);
                at = start;
            }
            let end = end.min(to);
            let skip = (at - start) as u32;
            let len = (end - at) as u32;
            see(at..end, Below::Piece(Piece { segment: piece.segment.clone(), start: piece.start + skip, len }));
            at = end;
        }
        self.base_parts(at, to, &mut see);
    }

    fn base_parts(&self, from: u64, to: u64, see: &mut impl FnMut(Range<u64>, Below)) {
        let base_end = to.min(self.base_len).max(from);
        let mut at = from;
        if from < base_end {
            for piece in self.base.range(from, base_end - from) {
                let end = at + u64::from(piece.len);
                // A hole is one again, and no piece of zeros.
                let below = if piece.segment.is_hole() { Below::Hole } else { Below::Piece(piece) };
                see(at..end, below);
                at = end;
            }
        }
        if at < to {
            see(at..to, Below::Hole);
        }
    }

    /// A place for octets at `at`, of `count` at most, none of which is in another cell: which block, and how many.
    fn room(&mut self, at: u64, count: u64) -> Result<(usize, u64), SparseError> {
        let end = at + count;
        if let Some(index) = self.open.iter().position(|open| open.at / CELL_BYTES == at / CELL_BYTES) {
            let (open_at, open_end) = (self.open[index].at, self.open[index].end());
            if open_at <= at && end <= open_end {
                return Ok((index, count));
            }
            let wanted = enclosing(open_at.min(at), open_end.max(end), block_bytes_min(self.class));
            let mut filling = self.take(wanted.start, wanted.end - wanted.start)?;
            if filling.octets().len() as u64 == wanted.end - wanted.start {
                let old = &mut self.open[index];
                let shift = (old.at - wanted.start) as u32;
                for part in &mut old.covered.0 {
                    let octets = &old.filling.octets()[part.start as usize..part.end as usize];
                    (part.start, part.end) = (part.start + shift, part.end + shift);
                    filling.octets_mut()[part.start as usize..part.end as usize].copy_from_slice(octets);
                }
                self.taken_bytes -= old.filling.block_bytes();
                (old.at, old.filling) = (wanted.start, filling);
                return Ok((index, count));
            }
            // Memory is short of large blocks.
            self.taken_bytes -= filling.block_bytes();
            self.seal(index);
        }
        // Others need the memory of what could be written behind.
        while self.open.len() >= OPEN_MAX || (self.store.is_short_of_memory() && !self.open.is_empty()) {
            self.seal(0);
        }
        let wanted = self.wanted(at, end);
        let filling = self.take(wanted.start, wanted.end - wanted.start)?;
        // A block may come out smaller than asked for.
        let len = filling.octets().len() as u64;
        let open_at = at / len * len;
        self.open.push(Open { at: open_at, filling, covered: Covered::default() });
        Ok((self.open.len() - 1, end.min(open_at + len) - at))
    }

    /// Which block to open for octets between two offsets of one cell.
    fn wanted(&self, at: u64, end: u64) -> Range<u64> {
        let least = enclosing(at, end, block_bytes_min(self.class));
        let joined = enclosing(at, end, JOINED_BYTES.max(least.end - least.start));
        let (mut has_data, mut all_at_hand) = (false, true);
        self.below(joined.start, joined.end.min(self.len).max(joined.start), |part, below| {
            if let Below::Piece(piece) = below {
                has_data |= part.start < at || part.end > end;
                all_at_hand &= piece.segment.is_resident();
            }
        });
        if !has_data || !all_at_hand {
            return least;
        }
        // No longer than what there is.
        let last = joined.end.min(self.len.max(end));
        let first = if joined.start < self.len { joined.start } else { at };
        enclosing(first.min(at), last, block_bytes_min(self.class))
    }

    /// A block for `len` octets, a power of two, at an offset of the value; it may be of fewer.
    fn take(&mut self, at: u64, len: u64) -> Result<Filling, SparseError> {
        if self.taken_bytes > 2 * self.counted_bytes + SLACK_BYTES {
            self.count();
        }
        if !self.claim_more(len) {
            self.count();
            let (bytes, bytes_max) = (self.taken_bytes + len, self.store.capacity_bytes(self.class));
            if bytes > bytes_max {
                return Err(SparseError::NoSpace { bytes, bytes_max });
            }
            if !self.claim_more(len) {
                return Err(SparseError::Busy);
            }
        }
        let head = at < self.store.shared.sizes.head_bytes;
        match self.store.fill(Want { class: self.class, remaining: len, head }) {
            Ok(filling) => {
                self.taken_bytes += filling.block_bytes();
                Ok(filling)
            }
            Err(short) => {
                // What is open keeps write-behind from making room.
                while !self.open.is_empty() {
                    self.seal(0);
                }
                Err(short.into())
            }
        }
    }

    fn claim_more(&mut self, more_bytes: u64) -> bool {
        let wanted = self.taken_bytes + more_bytes;
        match &self.claim {
            Some(claim) if claim.bytes() >= wanted => true,
            Some(claim) => self.store.try_extend(claim, self.class, wanted - claim.bytes()),
            None => {
                self.claim = self.store.try_claim_bytes(self.class, wanted, &nobody());
                self.claim.is_some()
            }
        }
    }

    /// Counts the blocks that are still taken, and gives back what is claimed beyond them.
    fn count(&mut self) {
        let mut seen = HashSet::new();
        let sealed = self.changes.values().filter(|piece| seen.insert(Arc::as_ptr(&piece.segment)));
        let sealed: u64 = sealed.map(|piece| piece.segment.footprint_bytes()).sum();
        self.taken_bytes = sealed + self.open.iter().map(|open| open.filling.block_bytes()).sum::<u64>();
        self.counted_bytes = self.taken_bytes;
        if let Some(claim) = &self.claim {
            claim.shrink(self.taken_bytes);
        }
    }

    /// A value of `len` octets may be of those that lie on disk, which take other blocks and are claimed elsewhere.
    fn grow_class(&mut self, len: u64) -> Result<(), SparseError> {
        if self.class == Class::Large || self.store.class_of(len) == Class::Small {
            return Ok(());
        }
        while !self.open.is_empty() {
            self.seal(0);
        }
        self.count();
        // Small blocks are rounded up where they get room on disk.
        let bytes = self.taken_bytes + self.base.footprint_bytes();
        let bytes = bytes.next_multiple_of(block_bytes_min(Class::Large))
            + self.changes.len() as u64 * block_bytes_min(Class::Large);
        let claim = self.store.try_claim_bytes(Class::Large, bytes, &nobody()).ok_or(SparseError::Busy)?;
        self.claim = Some(claim);
        self.class = Class::Large;
        (self.taken_bytes, self.counted_bytes) = (bytes, bytes);
        Ok(())
    }

    /// `octets` go to `at`, which is in the block of that index as a whole.
    fn put(&mut self, index: usize, at: u64, octets: &[u8]) {
        let open = &mut self.open[index];
        let start = (at - open.at) as usize;
        open.filling.octets_mut()[start..start + octets.len()].copy_from_slice(octets);
        open.covered.add(start as u32..(start + octets.len()) as u32);
        self.len = self.len.max(at + octets.len() as u64);
        self.is_changed = true;
        // Nothing can be added to it, and it may go to disk.
        let is_full = open.len() == CELL_BYTES && open.covered.is_all(CELL_BYTES as u32);
        if is_full || open.covered.0.len() > PARTS_MAX {
            self.seal(index);
        }
    }

    /// What was written to a block becomes pieces.
    fn seal(&mut self, index: usize) {
        let Open { at, mut filling, mut covered } = self.open.remove(index);
        let Some(last) = covered.0.last() else { return };
        // What the value has behind the last octet written is taken along too, within the block.
        let end = (self.len - at).min(filling.octets().len() as u64) as u32;
        let mut gaps = covered.gaps();
        gaps.push(last.end..end.max(last.end));
        for gap in gaps {
            self.below(at + u64::from(gap.start), at + u64::from(gap.end), |part, below| {
                let part = (part.start - at) as u32..(part.end - at) as u32;
                let into = &mut filling.octets_mut()[part.start as usize..part.end as usize];
                match below {
                    Below::Hole => into.fill(0),
                    Below::Piece(piece) => {
                        let Content::Ram(ram) = piece.segment.content() else { return };
                        into.copy_from_slice(piece.octets(&ram));
                    }
                }
                covered.add(part);
            });
        }
        let len = covered.0.last().map_or(0, |last| last.end);
        let segment = filling.seal_at(len, &self.store.shared.residency);
        for part in covered.0 {
            let start = at + u64::from(part.start);
            self.clear(start, at + u64::from(part.end));
            let piece = Piece { segment: segment.clone(), start: part.start, len: part.end - part.start };
            self.changes.insert(start, piece);
        }
    }

    /// Nothing of the changes lies between two offsets any more.
    fn clear(&mut self, from: u64, to: u64) {
        let before = self.changes.range(..from).next_back().map(|(at, piece)| (*at, piece.clone()));
        if let Some((at, piece)) = before {
            let end = at + u64::from(piece.len);
            if end > from {
                self.changes.insert(at, Piece { len: (from - at) as u32, ..piece.clone() });
                self.keep_behind(at, piece, to);
            }
        }
        while let Some((at, piece)) = self.changes.range(from..to).next().map(|(at, piece)| (*at, piece.clone())) {
            self.changes.remove(&at);
            self.keep_behind(at, piece, to);
        }
    }

    /// Of a piece at `at`, what lies behind `to` stays.
    fn keep_behind(&mut self, at: u64, piece: Piece, to: u64) {
        let end = at + u64::from(piece.len);
        if end > to {
            let skip = (to - at) as u32;
            let rest = Piece { start: piece.start + skip, len: piece.len - skip, segment: piece.segment };
            self.changes.insert(to, rest);
        }
    }
}

/// Whoever owns a draft asks [`SparseDraft::is_revoked`] often enough.
fn nobody() -> Revoker {
    Arc::new(|| ())
}

impl fmt::Debug for SparseDraft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseDraft").field("base", &self.base).field("len", &self.len).finish_non_exhaustive()
    }
}

/// The smallest block that has both offsets, of one cell: a power of two of at least `least`, at a multiple of its length.
fn enclosing(from: u64, to: u64, least: u64) -> Range<u64> {
    let mut len = (to - from).next_power_of_two().max(least);
    while from / len != (to - 1) / len {
        len *= 2;
    }
    let at = from / len * len;
    at..at + len
}
