//! Objects: immutable values, as a list of pieces.
//!
//! ```text
//! | piece 0        | piece 1        | ... | piece n      |
//!   segment, start,  segment, start,        segment, ...
//!   len              len
//! |<- head (head_bytes) ->|<------- body ------------->|
//! ```

use crate::fabric::region::Block;
use crate::store::eviction::{Candidate, Standing};
use crate::store::files::FileRecord;
use crate::store::key::ObjectKey;
use crate::store::segment::{Class, LISTS_BYTES, Segment};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A part of a segment that is a part of a value.
#[derive(Clone, Debug)]
pub struct Piece {
    pub segment: Arc<Segment>,
    /// First octet within the segment.
    pub start: u32,
    /// Octets.
    pub len: u32,
}

/// What the C library takes for a record that is shared, in octets: its two counts and its own word in front, in steps of two
/// words.
const fn shared_bytes<T>() -> usize {
    (size_of::<T>() + 3 * size_of::<usize>()).next_multiple_of(2 * size_of::<usize>())
}

/// What the index spends on a piece that is no hole, in octets: the records of its segment and its block, and itself; where it
/// may go to disk, places in the lists of what is dirty and of what is clean too.
pub(super) const fn piece_index_bytes(class: Class) -> u64 {
    let lists = match class {
        Class::Small => 0,
        Class::Large => LISTS_BYTES,
    };
    (shared_bytes::<Segment>() + shared_bytes::<Block>() + size_of::<Piece>() + lists) as u64
}

/// Counted reads that save an object from eviction.
const USES_MAX: u8 = 3;

/// So many pieces are walked at most to find an offset: 16 GiB have more than 65,536 of them.
const MARK_PIECES: usize = 64;

/// See [`Object::marks`].
pub(super) fn marks(pieces: &[Piece]) -> Box<[u64]> {
    let mut at = 0;
    let mut marks = Vec::with_capacity(pieces.len().saturating_sub(1) / MARK_PIECES);
    for (index, piece) in pieces.iter().enumerate() {
        if index > 0 && index % MARK_PIECES == 0 {
            marks.push(at);
        }
        at += u64::from(piece.len);
    }
    marks.into()
}

/// The octets between two offsets of a value, as pieces: parts of segments in the order of the value.
#[derive(Clone, Debug)]
pub struct Range<'a> {
    pieces: std::slice::Iter<'a, Piece>,
    /// Octets of the next piece that lie before the range.
    skip: u64,
    left: u64,
}

impl Range<'_> {
    /// Octets to come.
    pub fn bytes(&self) -> u64 {
        self.left
    }
}

impl Iterator for Range<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.left == 0 {
            return None;
        }
        let piece = self.pieces.find(|piece| {
            let before = self.skip >= u64::from(piece.len);
            self.skip -= if before { u64::from(piece.len) } else { 0 };
            !before
        })?;
        let skip = std::mem::take(&mut self.skip) as u32;
        let len = u64::from(piece.len - skip).min(self.left);
        self.left -= len;
        Some(Piece { segment: piece.segment.clone(), start: piece.start + skip, len: len as u32 })
    }
}

/// Consecutive octets of something that is no object, as pieces.
#[derive(Clone, Debug)]
pub struct Run {
    /// Where the first octet is in the value that they are of.
    pub offset: u64,
    pub pieces: Vec<Piece>,
}

impl Run {
    /// The octets from `offset` of the value on, `len` at most; fewer where the run ends before.
    ///
    /// # Panics
    /// If the run begins behind `offset`.
    pub fn range(&self, offset: u64, len: u64) -> Range<'_> {
        assert!(offset >= self.offset, "{offset} is before {}", self.offset);
        let bytes: u64 = self.pieces.iter().map(|piece| u64::from(piece.len)).sum();
        let skip = offset - self.offset;
        Range { pieces: self.pieces.iter(), skip, left: len.min(bytes.saturating_sub(skip)) }
    }
}

/// One version of one value. Only its expiry, its counters and where its segments lie ever change.
#[derive(Debug)]
pub struct Object {
    pub(super) key: ObjectKey,
    pub(super) key_hash: u64,
    pub(super) flags: u32,
    pub(super) len: u64,
    pub(super) class: Class,
    pub(super) pieces: Box<[Piece]>,
    /// Offset in the value of every piece whose index is a multiple of [`MARK_PIECES`], but the first.
    pub(super) marks: Box<[u64]>,
    /// Octets of blocks or extents that its eviction frees.
    pub(super) footprint: u64,
    /// Given at commit, unique in the process: the CAS token.
    pub(super) version: AtomicU64,
    /// Second since the epoch of the store's clock at which it is gone; 0 is never.
    pub(super) expiry: AtomicU64,
    pub(super) uses: AtomicU8,
    pub(super) read: AtomicBool,
    pub(super) pins: AtomicU32,
    /// Changed under the lock of the books of holds alone.
    pub(super) holds: AtomicU32,
    /// Where eviction keeps it. Changed under the policy's lock alone.
    pub(super) standing: Mutex<Option<Standing>>,
    /// Pieces that are holes.
    pub(super) holes: u32,
    /// What it is as a file, in a store that has files: given at commit.
    pub(super) record: OnceLock<Arc<FileRecord>>,
}

impl Object {
    pub fn key(&self) -> &[u8] {
        self.key.as_bytes()
    }

    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Octets of the value.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The CAS token.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// 0 is never; see [`crate::store::Clock`].
    pub fn expiry(&self) -> u64 {
        self.expiry.load(Ordering::Relaxed)
    }

    pub fn class(&self) -> Class {
        self.class
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// What it is as a file, in a store that has files.
    pub fn record(&self) -> Option<&Arc<FileRecord>> {
        self.record.get()
    }

    /// Octets of blocks or extents that it takes.
    pub fn footprint_bytes(&self) -> u64 {
        self.footprint
    }

    /// The octets from `offset` on, `len` at most; fewer, or none, where the value ends before. Finding the first takes the
    /// same time wherever it is, so a reader of a long range may ask for the rest of it again and again.
    pub fn range(&self, offset: u64, len: u64) -> Range<'_> {
        let marked = self.marks.partition_point(|mark| *mark <= offset);
        let skipped = if marked == 0 { 0 } else { self.marks[marked - 1] };
        Range {
            pieces: self.pieces[(marked * MARK_PIECES).min(self.pieces.len())..].iter(),
            skip: offset - skipped,
            left: len.min(self.len.saturating_sub(offset)),
        }
    }

    /// What the index spends on it, in octets, estimated from the sizes of its parts.
    pub(super) fn index_bytes(&self) -> u64 {
        let own = (self.pieces.len() - self.holes as usize) as u64 * piece_index_bytes(self.class);
        let holes = self.holes as usize * size_of::<Piece>();
        let rest = size_of::<Self>() + holes + size_of_val(&*self.marks) + self.key.as_bytes().len() + 128;
        own + rest as u64
    }

    pub(super) fn count_use(&self) {
        self.read.store(true, Ordering::Relaxed);
        let uses = self.uses.load(Ordering::Relaxed);
        if uses < USES_MAX {
            self.uses.store(uses + 1, Ordering::Relaxed);
        }
    }
}

impl Candidate for Arc<Object> {
    fn key_hash(&self) -> u64 {
        self.key_hash
    }

    fn weight(&self) -> u64 {
        self.footprint
    }

    fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Relaxed) > 0
    }

    fn spend_use(&self) -> bool {
        let uses = self.uses.load(Ordering::Relaxed);
        if uses > 0 {
            self.uses.store(uses - 1, Ordering::Relaxed);
        }
        uses > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::rig::with_pools;
    use crate::store::{Sizes, Store};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_range_is_the_same_octets_wherever_the_walk_begins() {
        let sizes = Sizes {
            memory_bytes: 64 * MIB,
            head_bytes: 192 << 10,
            value_bytes_max: 64 * MIB,
            pool_bytes: vec![64 * MIB],
            ..Sizes::small()
        };
        let store = with_pools(Store::new, sizes);
        let len = 35 * MIB + 12_345;
        store.put(b"key", &vec![7; len as usize], 0, 0).unwrap();
        let object = store.peek(b"key", 0).unwrap();
        assert!(object.pieces().len() > 2 * MARK_PIECES && object.marks.len() >= 2);
        // Where every piece lies, counted from the first on.
        let mut places = Vec::new();
        let mut at = 0;
        for piece in object.pieces() {
            places.push((at, Arc::as_ptr(&piece.segment), piece.len));
            at += u64::from(piece.len);
        }
        let ends = places.iter().map(|place| place.0).chain([len, len + 1, u64::MAX]);
        for offset in ends.flat_map(|end| [end.saturating_sub(1), end, end.saturating_add(1)]) {
            for wanted in [0, 1, 300_000, u64::MAX] {
                let range = object.range(offset, wanted);
                let clipped = wanted.min(len.saturating_sub(offset));
                assert_eq!(range.bytes(), clipped);
                let mut at = offset;
                for piece in range {
                    let place = places[places.partition_point(|place| place.0 <= at) - 1];
                    assert_eq!((Arc::as_ptr(&piece.segment), u64::from(piece.start)), (place.1, at - place.0));
                    assert!(piece.len > 0 && piece.start + piece.len <= place.2);
                    at += u64::from(piece.len);
                }
                assert_eq!(at, offset + clipped, "{wanted} octets at {offset}");
            }
        }
    }
}
