//! Keys and values of a run: every octet follows from its key and its offset, so both sides can work it out.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use bulkhead::config::ByteSize;

/// Length of values: `SIZE`, or `MIN..MAX`, from which each key takes its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SizeRange {
    min: u64,
    max: u64,
}

impl FromStr for SizeRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size = |text: &str| text.parse::<ByteSize>().map(|size| size.0);
        let (min, max) = match text.split_once("..") {
            Some((min, max)) => (size(min)?, size(max)?),
            None => (size(text)?, size(text)?),
        };
        if min > max { Err(format!("`{text}` ends before it begins")) } else { Ok(Self { min, max }) }
    }
}

impl SizeRange {
    /// The longest.
    pub const fn max(self) -> u64 {
        self.max
    }
}

impl fmt::Display for SizeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min == self.max {
            true => ByteSize(self.min).fmt(f),
            false => write!(f, "{}..{}", ByteSize(self.min), ByteSize(self.max)),
        }
    }
}

/// One key and the value that belongs to it.
#[derive(Debug)]
pub struct Item {
    pub key: Box<[u8]>,
    pub len: u64,
    pub seed: u64,
    /// Some connection was told STORED in this run.
    stored: AtomicBool,
}

impl Item {
    pub fn mark_stored(&self) {
        self.stored.store(true, Ordering::Relaxed);
    }

    pub fn is_stored(&self) -> bool {
        self.stored.load(Ordering::Relaxed)
    }
}

/// The items of a run, made before it so that nothing is allocated inside it.
pub fn items(prefix: &str, count: u32, sizes: SizeRange) -> Vec<Item> {
    let item = |index| {
        let key = format!("{prefix}{index:08}").into_bytes().into_boxed_slice();
        let seed = key.iter().fold(0xcbf2_9ce4_8422_2325, |hash, octet| mix(hash ^ u64::from(*octet)));
        // The range of all u64 has no span; sizes stop at 2^63.
        let len = sizes.min + mix(seed ^ u64::MAX) % (sizes.max - sizes.min + 1);
        Item { key, len, seed, stored: AtomicBool::new(false) }
    };
    (0..count).map(item).collect()
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// One wide multiplication: cheap beside a copy through a socket, and no two offsets share a pattern.
const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STEP);
    let wide = (value as u128).wrapping_mul((value ^ 0xe703_7ed1_a0b4_28db) as u128);
    (wide >> 64) as u64 ^ wide as u64
}

fn word(seed: u64, index: u64) -> [u8; 8] {
    mix(seed.wrapping_add(index.wrapping_mul(STEP))).to_le_bytes()
}

/// Octets before the first whole word at or after `offset`, at most `len`, and where the first of them lies in its word.
fn front(offset: u64, len: usize) -> (usize, usize) {
    let within = (offset % 8) as usize;
    (within, ((8 - within) % 8).min(len))
}

/// Writes the octets of the value with `seed` from `offset` on.
pub fn fill(seed: u64, offset: u64, into: &mut [u8]) {
    let (within, count) = front(offset, into.len());
    let (head, rest) = into.split_at_mut(count);
    head.copy_from_slice(&word(seed, offset / 8)[within..within + count]);
    let mut index = offset.div_ceil(8);
    let mut words = rest.chunks_exact_mut(8);
    for piece in &mut words {
        piece.copy_from_slice(&word(seed, index));
        index += 1;
    }
    let tail = words.into_remainder();
    tail.copy_from_slice(&word(seed, index)[..tail.len()]);
}

/// Whether `octets` are those of the value with `seed` from `offset` on.
pub fn matches(seed: u64, offset: u64, octets: &[u8]) -> bool {
    let (within, count) = front(offset, octets.len());
    let (head, rest) = octets.split_at(count);
    let mut is_equal = head == &word(seed, offset / 8)[within..within + count];
    let mut index = offset.div_ceil(8);
    let mut words = rest.chunks_exact(8);
    for piece in &mut words {
        is_equal &= piece == word(seed, index);
        index += 1;
    }
    let tail = words.remainder();
    is_equal && tail == &word(seed, index)[..tail.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_a_value_is_the_same_octets() {
        let mut whole = vec![0; 100];
        fill(7, 0, &mut whole);
        for start in 0..40 {
            for end in start..100 {
                let mut piece = vec![0; end - start];
                fill(7, start as u64, &mut piece);
                assert_eq!(piece, whole[start..end], "{start}..{end}");
                assert!(matches(7, start as u64, &piece), "{start}..{end}");
            }
        }
    }

    #[test]
    fn one_wrong_octet_anywhere_is_noticed() {
        for start in 0..9 {
            let mut piece = vec![0; 41];
            fill(7, start, &mut piece);
            for at in 0..piece.len() {
                piece[at] ^= 1;
                assert!(!matches(7, start, &piece), "{start}, {at}");
                piece[at] ^= 1;
            }
            assert!(!matches(8, start, &piece) && !matches(7, start + 8, &piece));
        }
    }

    #[test]
    fn every_key_has_a_length_within_the_range_and_its_own_seed() {
        let range: SizeRange = "1KiB..4KiB".parse().unwrap();
        assert_eq!(range.to_string(), "1KiB..4KiB");
        let made = items("k", 1000, range);
        assert!(made.iter().all(|item| (1024..=4096).contains(&item.len)));
        let mut seeds: Vec<_> = made.iter().map(|item| item.seed).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 1000);
        assert!(items("k", 3, "9".parse().unwrap()).iter().all(|item| item.len == 9));
        assert!("2..1".parse::<SizeRange>().is_err() && "..".parse::<SizeRange>().is_err());
    }
}
