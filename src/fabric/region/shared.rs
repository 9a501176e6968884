//! Memory with more than one writer: its owner, and the peers that hold a key to it.
//!
//! It is never a `&[u8]`. Every access is an atomic one of a whole aligned word, so a peer that writes while the owner
//! reads is a race on values, never undefined behaviour. The rule for readers: look at a word once, copy what it speaks
//! of, judge the copy.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::aligned::AlignedBuf;

/// Octets of one word, the unit of every access.
pub const WORD_BYTES: usize = 8;

struct SharedMemory {
    pages: AlignedBuf,
}

impl SharedMemory {
    fn words(&self) -> &[AtomicU64] {
        let (base, len) = self.pages.as_raw();
        // SAFETY: the mapping is page-aligned, initialised and lives as long as `self`; `pages` is private to this type
        // and never lends a `&[u8]`, so all access in this process is through these atomics.
        unsafe { std::slice::from_raw_parts(base.as_ptr().cast::<AtomicU64>().cast_const(), len / WORD_BYTES) }
    }
}

/// A range of memory that peers may write to. Clones name the same memory and keep it mapped.
#[derive(Clone)]
pub struct SharedSpan {
    memory: Arc<SharedMemory>,
    start: usize,
    len: usize,
}

impl SharedSpan {
    /// Fresh zeroed memory of `len` octets.
    ///
    /// # Errors
    /// `InvalidInput` for zero or an overflowing length, else what `mmap` says.
    pub fn new(len: usize) -> io::Result<Self> {
        Ok(Self { memory: Arc::new(SharedMemory { pages: AlignedBuf::new(len)? }), start: 0, len })
    }

    /// Octets.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the span names no octet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the first octet begins a word, as registered memory must.
    pub fn is_aligned(&self) -> bool {
        self.start.is_multiple_of(WORD_BYTES)
    }

    /// The part `range` of this span.
    ///
    /// # Panics
    /// When `range` does not lie in the span.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} octets", self.len);
        Self { memory: Arc::clone(&self.memory), start: self.start + range.start, len: range.end - range.start }
    }

    /// All of the memory that this span is a part of.
    pub fn whole(&self) -> Self {
        let (_, len) = self.memory.pages.as_raw();
        Self { memory: Arc::clone(&self.memory), start: 0, len }
    }

    /// The memory as the owner's alone, for as long as the borrow lasts: `None` while another span names any of it. What is
    /// registered has a span of its own, so whoever gets it here knows that no peer can reach it.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let (start, len) = (self.start, self.len);
        let memory = Arc::get_mut(&mut self.memory)?;
        Some(&mut memory.pages.as_mut_slice()[start..start + len])
    }

    /// The word at `offset`, read as a little-endian number. Whatever its writer stored before it (with Release) is
    /// visible afterwards.
    ///
    /// # Panics
    /// When the word does not lie in the span or is not aligned in memory.
    pub fn load_u64_acquire(&self, offset: usize) -> u64 {
        u64::from_le(self.word(offset).load(Ordering::Acquire))
    }

    /// Stores `value`, little-endian, after everything stored before.
    ///
    /// # Panics
    /// When the word does not lie in the span or is not aligned in memory.
    pub fn store_u64_release(&self, offset: usize, value: u64) {
        self.word(offset).store(value.to_le(), Ordering::Release);
    }

    /// Copies octets from `offset` on into private memory.
    ///
    /// # Panics
    /// When they do not lie in the span.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let (words, skip) = self.words_from(offset, into.len());
        let mut words = words.iter();
        let mut rest = into;
        if skip > 0 && !rest.is_empty() {
            let word = next_word(&mut words).load(Ordering::Relaxed).to_ne_bytes();
            let (head, tail) = rest.split_at_mut(rest.len().min(WORD_BYTES - skip));
            head.copy_from_slice(&word[skip..skip + head.len()]);
            rest = tail;
        }
        let mut chunks = rest.chunks_exact_mut(WORD_BYTES);
        for (chunk, word) in chunks.by_ref().zip(words.by_ref()) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        let tail = chunks.into_remainder();
        if !tail.is_empty() {
            let word = next_word(&mut words).load(Ordering::Relaxed).to_ne_bytes();
            tail.copy_from_slice(&word[..tail.len()]);
        }
    }

    /// Stores `octets` at `offset`. The last whole aligned word among them is stored last, with Release: who loads it
    /// with Acquire and finds the new value sees all the others. Octets beside the range are left alone, even when
    /// others write them at the same time.
    ///
    /// # Panics
    /// When they do not lie in the span.
    pub fn copy_in(&self, offset: usize, octets: &[u8]) {
        let (words, skip) = self.words_from(offset, octets.len());
        let head_len = if skip == 0 { 0 } else { octets.len().min(WORD_BYTES - skip) };
        let (head, rest) = octets.split_at(head_len);
        let whole = &words[usize::from(head_len > 0)..];
        if !head.is_empty() {
            merge(&words[0], skip, head);
        }
        let chunks = rest.chunks_exact(WORD_BYTES);
        let tail = chunks.remainder();
        let count = chunks.len();
        if !tail.is_empty() {
            merge(&whole[count], 0, tail);
        }
        let Some((last_word, words)) = whole[..count].split_last() else { return };
        let value_of = |chunk: &[u8]| u64::from_ne_bytes(chunk.try_into().expect("a chunk is a word"));
        for (chunk, word) in chunks.clone().zip(words) {
            word.store(value_of(chunk), Ordering::Relaxed);
        }
        let last = chunks.last().expect("as many chunks as words");
        last_word.store(value_of(last), Ordering::Release);
    }

    /// Address and length, for a device that reads and writes by itself.
    #[cfg(feature = "verbs")]
    pub(in crate::fabric) fn as_raw(&self) -> (std::ptr::NonNull<u8>, usize) {
        let (base, _) = self.memory.pages.as_raw();
        // SAFETY: `start` lies within the mapping, or is its end.
        (unsafe { base.add(self.start) }, self.len)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let (words, skip) = self.words_from(offset, WORD_BYTES);
        assert!(skip == 0, "offset {offset} is no word boundary");
        &words[0]
    }

    /// The words that cover `len` octets from `offset`, and how many octets of the first lie before them.
    fn words_from(&self, offset: usize, len: usize) -> (&[AtomicU64], usize) {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "{len} octets at {offset} of {}", self.len);
        let start = self.start + offset;
        let words = start / WORD_BYTES..(start + len).div_ceil(WORD_BYTES);
        (&self.memory.words()[words], start % WORD_BYTES)
    }
}

fn next_word<'a>(words: &mut impl Iterator<Item = &'a AtomicU64>) -> &'a AtomicU64 {
    words.next().expect("the words cover the range")
}

/// Replaces octets of one word and keeps its others, whoever writes those.
fn merge(word: &AtomicU64, skip: usize, octets: &[u8]) {
    let merged = |old: u64| {
        let mut bytes = old.to_ne_bytes();
        bytes[skip..skip + octets.len()].copy_from_slice(octets);
        Some(u64::from_ne_bytes(bytes))
    };
    word.fetch_update(Ordering::Release, Ordering::Relaxed, merged).expect("the closure never declines");
}

impl fmt::Debug for SharedSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSpan").field("start", &self.start).field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_goes_in_and_comes_out_and_leaves_its_neighbours_alone() {
        for offset in 0..20 {
            for len in 0..40 {
                let span = SharedSpan::new(64).unwrap();
                span.copy_in(0, &[0xee; 64]);
                let octets: Vec<u8> = (1..=len as u8).collect();
                span.copy_in(offset, &octets);
                let mut whole = [0; 64];
                span.copy_out(0, &mut whole);
                let mut expected = [0xee; 64];
                expected[offset..offset + len].copy_from_slice(&octets);
                assert_eq!(whole, expected, "{len} octets at {offset}");
                let mut part = vec![0; len];
                span.copy_out(offset, &mut part);
                assert_eq!(part, octets);
            }
        }
    }

    #[test]
    fn a_reader_that_sees_the_last_word_sees_the_whole_record() {
        let span = SharedSpan::new(256).unwrap();
        std::thread::scope(|scope| {
            let writer = span.clone();
            scope.spawn(move || {
                for round in 1..=20_000u64 {
                    let mut record = [round as u8; 200];
                    record[192..].copy_from_slice(&round.to_le_bytes());
                    writer.copy_in(56, &record);
                    while writer.load_u64_acquire(0) != round {
                        std::hint::spin_loop();
                    }
                }
            });
            for round in 1..=20_000u64 {
                while span.load_u64_acquire(248) != round {
                    std::hint::spin_loop();
                }
                let mut record = [0; 192];
                span.copy_out(56, &mut record);
                assert_eq!(record, [round as u8; 192]);
                span.store_u64_release(0, round);
            }
        });
    }

    #[test]
    fn memory_is_lent_as_octets_to_its_only_owner() {
        let mut span = SharedSpan::new(64).unwrap();
        span.copy_in(8, &[7; 4]);
        let mut part = span.slice(8..12);
        assert!(span.get_mut().is_none() && part.get_mut().is_none(), "two spans name it");
        drop(span);
        let octets = part.get_mut().unwrap();
        assert_eq!(octets, [7; 4]);
        octets.fill(9);
        let whole = part.whole();
        assert_eq!((whole.len(), whole.load_u64_acquire(8)), (4096, 0x0909_0909));
    }

    #[test]
    fn numbers_are_little_endian_in_memory() {
        let span = SharedSpan::new(16).unwrap();
        span.store_u64_release(8, 0x0102_0304_0506_0708);
        let mut octets = [0; 8];
        span.copy_out(8, &mut octets);
        assert_eq!(octets, [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(span.slice(8..16).load_u64_acquire(0), 0x0102_0304_0506_0708);
    }

    #[test]
    #[should_panic(expected = "octets at")]
    fn an_access_beyond_the_end_of_a_part_panics_though_the_memory_goes_on() {
        SharedSpan::new(4096).unwrap().slice(0..16).copy_in(9, &[0; 8]);
    }
}
