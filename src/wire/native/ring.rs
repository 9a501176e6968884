//! The control ring: how a record lies in a slot, and how its owner reads it while the peer may write.
//!
//! ```text
//!  region   | consumed | unused | readback | unused | slot 0 | slot 1 | ... | slot n - 1 |
//!           0          8        64         72       128      384
//!
//!  slot     | leftovers | record, 1..192 octets | length | 56-bit sequence, LE |
//!           0                                   248      249                   256
//! ```
//!
//! The last 8 octets of a slot are its commit word. They arrive last, so a slot whose commit word shows the sequence that
//! is expected holds a whole record. Slots are never cleared: an older sequence means an empty slot.

use super::record::Record;
use crate::wire::seq::ControlSequence;
use thiserror::Error;

/// Octets of one slot.
pub const SLOT_BYTES: usize = 256;
/// Octets of the longest record.
pub const RECORD_BYTES_MAX: usize = 192;
/// Octets of a commit word.
pub const COMMIT_BYTES: usize = 8;
/// Where in the region its owner counts the records it has consumed; the peer reads it there.
pub const CONSUMED_OFFSET: usize = 0;
/// Where in the region its owner's own Reads of the peer's counter land.
pub const READBACK_OFFSET: usize = 64;
/// Where in the region the slots start.
pub const SLOTS_OFFSET: usize = 128;

const COMMIT_OFFSET: usize = SLOT_BYTES - COMMIT_BYTES;

/// A control region as its owner sees it: memory that the peer may be writing this very moment, so it is never a slice.
///
/// `offset` is a multiple of 8 within the region. Words are little-endian in memory, numbers here.
pub trait RingMemory {
    /// Reads one word, with acquire ordering: whatever the peer wrote before it is visible after it.
    fn load(&self, offset: usize) -> u64;
    /// Writes one word, with release ordering.
    fn store(&self, offset: usize, word: u64);
    /// Nothing is here until the word at `offset` is another than `word`. For memory whose changes nobody reports by itself.
    fn watch(&self, _offset: usize, _word: u64) {}
}

/// The last word of a slot: which record lies there and how long it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CommitWord(u64);

impl CommitWord {
    /// `len` is in 1..=192.
    pub const fn new(sequence: ControlSequence, len: u8) -> Self {
        Self(sequence.get() << 8 | len as u64)
    }

    /// From the number loaded.
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// As the number to store.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// What a receiver that expects record `expected` makes of it: the length of that record, or `None` if it is not
    /// there yet.
    ///
    /// # Errors
    /// [`RingError`] when the word cannot come from a peer that counts.
    pub const fn judge(self, expected: ControlSequence) -> Result<Option<usize>, RingError> {
        let (sequence, len) = (self.0 >> 8, (self.0 & 0xff) as usize);
        if sequence < expected.get() {
            return Ok(None);
        }
        if sequence > expected.get() {
            return Err(RingError::SequenceJump { found: sequence, expected: expected.get() });
        }
        if len == 0 || len > RECORD_BYTES_MAX {
            return Err(RingError::RecordLength(len));
        }
        Ok(Some(len))
    }
}

/// What one control record puts into the peer's ring: record and commit word, 9..=200 octets, in one Write.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct SlotWrite {
    offset: u64,
    len: u8,
    octets: [u8; RECORD_BYTES_MAX + COMMIT_BYTES],
}

impl SlotWrite {
    /// `record` as record `sequence` of a ring of `slot_count` slots.
    pub fn new(record: &Record<'_>, sequence: ControlSequence, slot_count: u32) -> Self {
        let mut encoded = [0; RECORD_BYTES_MAX];
        let len = record.encode(&mut encoded);
        let mut octets = [0; RECORD_BYTES_MAX + COMMIT_BYTES];
        octets[..len].copy_from_slice(&encoded[..len]);
        octets[len..len + COMMIT_BYTES].copy_from_slice(&CommitWord::new(sequence, len as u8).word().to_le_bytes());
        let slot = u64::from(sequence.slot_index(slot_count)) * SLOT_BYTES as u64;
        let offset = SLOTS_OFFSET as u64 + slot + (COMMIT_OFFSET - len) as u64;
        Self { offset, len: (len + COMMIT_BYTES) as u8, octets }
    }

    /// Offset in the peer's control region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// What to write there.
    pub fn octets(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for SlotWrite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SlotWrite {{ offset: {}, octets: \"{}\" }}", self.offset, self.octets().escape_ascii())
    }
}

/// A record copied out of the ring.
#[derive(Clone, Copy, Debug)]
pub struct RecordCopy {
    len: usize,
    words: [u8; RECORD_BYTES_MAX],
}

impl RecordCopy {
    /// The record's octets, 1..=192.
    pub fn octets(&self) -> &[u8] {
        &self.words[RECORD_BYTES_MAX - self.len..]
    }
}

/// The receiving side of the own ring.
///
/// ```text
///            poll: Some(record)           consume
///   Waiting --------------------> Seen ------------> Waiting for the next
///     ^  |  poll: None             |  ^
///     +--+                         +--+ poll: the same again
/// ```
#[derive(Debug)]
pub struct ControlRing {
    slot_count: u32,
    /// `None` once 2^56 - 1 records were consumed: no more can come.
    expected: Option<ControlSequence>,
}

impl ControlRing {
    /// A ring before its first record.
    pub fn new(slot_count: u32) -> Self {
        Self::resumed(slot_count, ControlSequence::FIRST)
    }

    /// A ring that has consumed all records before `expected`.
    pub fn resumed(slot_count: u32, expected: ControlSequence) -> Self {
        Self { slot_count, expected: Some(expected) }
    }

    /// A copy of the next record, if it has come. It is judged by nobody yet, and the slot still belongs to it.
    ///
    /// # Errors
    /// [`RingError`]: the peer does not count as it must.
    pub fn poll(&self, memory: &impl RingMemory) -> Result<Option<RecordCopy>, RingError> {
        let Some(expected) = self.expected else { return Ok(None) };
        let slot = SLOTS_OFFSET + expected.slot_index(self.slot_count) as usize * SLOT_BYTES;
        let commit = memory.load(slot + COMMIT_OFFSET);
        let Some(len) = CommitWord::from_word(commit).judge(expected)? else {
            memory.watch(slot + COMMIT_OFFSET, commit);
            return Ok(None);
        };
        let mut words = [0; RECORD_BYTES_MAX];
        let first = (RECORD_BYTES_MAX - len) / 8;
        for (index, octets) in words.chunks_exact_mut(8).enumerate().skip(first) {
            let offset = slot + COMMIT_OFFSET - RECORD_BYTES_MAX + index * 8;
            octets.copy_from_slice(&memory.load(offset).to_le_bytes());
        }
        Ok(Some(RecordCopy { len, words }))
    }

    /// The record that [`ControlRing::poll`] gave was used: its slot belongs to the peer again.
    pub fn consume(&mut self, memory: &impl RingMemory) {
        let Some(consumed) = self.expected else { return };
        memory.store(CONSUMED_OFFSET, consumed.get());
        self.expected = consumed.next();
    }
}

/// How a peer's ring writes can be wrong.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
#[non_exhaustive]
pub enum RingError {
    #[error("control record {found} where {expected} was expected")]
    SequenceJump { found: u64, expected: u64 },
    #[error("a control record of {0} octets, not 1 to 192")]
    RecordLength(usize),
}

impl RingError {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::SequenceJump { .. } => "sequence_jump",
            Self::RecordLength(_) => "record_length",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A control region of one thread.
    pub(crate) struct TestRegion(pub RefCell<Vec<u8>>);

    impl TestRegion {
        pub(crate) fn new(slot_count: u32) -> Self {
            Self(RefCell::new(vec![0; SLOTS_OFFSET + SLOT_BYTES * slot_count as usize]))
        }

        pub(crate) fn write(&self, write: &SlotWrite) {
            let at = write.offset() as usize;
            self.0.borrow_mut()[at..at + write.octets().len()].copy_from_slice(write.octets());
        }
    }

    impl RingMemory for TestRegion {
        fn load(&self, offset: usize) -> u64 {
            u64::from_le_bytes(*self.0.borrow()[offset..].first_chunk().unwrap())
        }

        fn store(&self, offset: usize, word: u64) {
            self.0.borrow_mut()[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
        }
    }

    fn sequence(value: u64) -> ControlSequence {
        ControlSequence::new(value).unwrap()
    }

    #[test]
    fn records_of_every_length_come_out_as_they_went_in() {
        let region = TestRegion::new(2);
        let mut ring = ControlRing::new(2);
        let mut at = ControlSequence::FIRST;
        for len in (1..=191_usize).rev().chain(1..=191) {
            let payload: Vec<u8> = (0..len).map(|octet| octet as u8 ^ 0xa5).collect();
            assert!(ring.poll(&region).unwrap().is_none());
            region.write(&SlotWrite::new(&Record::Inline(&payload), at, 2));
            let copy = ring.poll(&region).unwrap().unwrap();
            assert_eq!(Record::decode(copy.octets()), Ok(Record::Inline(&payload)));
            assert_eq!(region.load(CONSUMED_OFFSET), at.get() - 1);
            ring.consume(&region);
            assert_eq!(region.load(CONSUMED_OFFSET), at.get());
            at = at.next().unwrap();
        }
    }

    #[test]
    fn a_ring_ends_with_its_last_sequence_and_never_wraps() {
        let region = TestRegion::new(4);
        let mut ring = ControlRing::resumed(4, ControlSequence::LAST);
        region.write(&SlotWrite::new(&Record::Inline(b"END\r\n"), ControlSequence::LAST, 4));
        assert!(ring.poll(&region).unwrap().is_some());
        ring.consume(&region);
        assert!(ring.poll(&region).unwrap().is_none());
        ring.consume(&region);
        assert_eq!(region.load(CONSUMED_OFFSET), ControlSequence::LAST.get());
    }

    /// Every kind of commit word against every kind of expectation.
    #[test]
    fn commit_words_are_judged_by_this_table() {
        let jump = |found, expected| Err(RingError::SequenceJump { found, expected });
        let table = [
            // word's sequence, its length, expected sequence, judgement
            (0, 0, 1, Ok(None)),
            (0, 255, 1, Ok(None)),
            (4, 0, 5, Ok(None)),
            (4, 193, 5, Ok(None)),
            (5, 1, 5, Ok(Some(1))),
            (5, 192, 5, Ok(Some(192))),
            (5, 0, 5, Err(RingError::RecordLength(0))),
            (5, 193, 5, Err(RingError::RecordLength(193))),
            (5, 255, 5, Err(RingError::RecordLength(255))),
            (6, 16, 5, jump(6, 5)),
            (6, 0, 5, jump(6, 5)),
            ((1 << 56) - 1, 1, 5, jump((1 << 56) - 1, 5)),
            ((1 << 56) - 1, 1, (1 << 56) - 1, Ok(Some(1))),
        ];
        for (found, len, expected, judgement) in table {
            let word = CommitWord::from_word(found << 8 | len);
            assert_eq!(word.judge(sequence(expected)), judgement, "{found} {len} {expected}");
        }
    }
}
