//! The memory of one slot, of which parts may be away at the disk.
//!
//! ```text
//!   lend(0, ..) --+      +-- lend(128 KiB, ..)
//!                 v      v
//!   | away ..... | away ..... | here, for octets from RAM |      each part has one owner; whole again once all are back
//! ```

use crate::fabric::LocalBuf;
use crate::fabric::region::aligned::ALIGN_BYTES;

/// A slot's octets: those that are here can be written to, those that were lent are somebody else's.
pub struct SlotMemory {
    /// With the offset of its first octet, in order; no two adjoin.
    here: Vec<(usize, LocalBuf)>,
    len: usize,
}

impl SlotMemory {
    /// All of `buf`, here.
    pub fn new(buf: LocalBuf) -> Self {
        Self { len: buf.len(), here: vec![(0, buf)] }
    }

    /// Gives `len` octets from `at` on away, rounded up to 4 KiB.
    ///
    /// # Panics
    /// If they are not all here, or `at` is no multiple of 4 KiB.
    pub fn lend(&mut self, at: usize, len: usize) -> LocalBuf {
        let len = len.next_multiple_of(ALIGN_BYTES);
        let index = self.index_of(at, len);
        let (start, mut part) = self.here.remove(index);
        if at + len < start + part.len() {
            self.here.insert(index, (at + len, part.split_off(at + len - start)));
        }
        if start < at {
            let wanted = part.split_off(at - start);
            self.here.insert(index, (start, std::mem::replace(&mut part, wanted)));
        }
        part
    }

    /// What was lent from `at` on is back.
    pub fn take_back(&mut self, at: usize, part: LocalBuf) {
        let index = self.here.partition_point(|(start, _)| *start < at);
        self.here.insert(index, (at, part));
        self.join(index);
        if index > 0 {
            self.join(index - 1);
        }
    }

    /// Joins part `index` with the one behind it if they adjoin.
    fn join(&mut self, index: usize) {
        let (start, part) = &self.here[index];
        let end = start + part.len();
        if self.here.get(index + 1).is_some_and(|(next, _)| *next == end) {
            let (_, next) = self.here.remove(index + 1);
            self.here[index].1.rejoin(next);
        }
    }

    /// `len` octets from `at` on, for writing.
    ///
    /// # Panics
    /// If they are not all here.
    pub fn octets_mut(&mut self, at: usize, len: usize) -> &mut [u8] {
        let index = self.index_of(at, len);
        let (start, part) = &mut self.here[index];
        &mut part.as_mut_slice()[at - *start..at - *start + len]
    }

    /// Nothing is away.
    pub fn is_whole(&self) -> bool {
        matches!(&self.here[..], [(0, part)] if part.len() == self.len)
    }

    /// The slot's buffer.
    ///
    /// # Panics
    /// If it is not whole.
    pub fn into_whole(mut self) -> LocalBuf {
        assert!(self.is_whole(), "parts of a slot are away");
        self.here.remove(0).1
    }

    fn index_of(&self, at: usize, len: usize) -> usize {
        let holds = |(start, part): &(usize, LocalBuf)| *start <= at && at + len <= start + part.len();
        let index = self.here.iter().position(holds);
        index.unwrap_or_else(|| panic!("{len} octets at {at} of a slot of {} are not here", self.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::loopback::Loopback;
    use crate::fabric::{Address, Attributes, Fabric};
    use proptest::prelude::*;

    fn slot(len: usize) -> SlotMemory {
        let lane = Loopback::new().lane().unwrap();
        let address = Address::Name("nobody".to_owned());
        let qp = lane.dial(&address, Attributes::default()).unwrap();
        SlotMemory::new(qp.allocate(len, 1).unwrap().remove(0))
    }

    #[test]
    fn parts_that_come_back_in_any_order_make_the_slot_whole() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut slot = slot(4 * 4096);
            slot.octets_mut(3 * 4096 - 1, 2).fill(9);
            let mut lent: Vec<_> = [0, 2, 1].map(|at| (at * 4096, Some(slot.lend(at * 4096, 4000)))).into();
            slot.octets_mut(3 * 4096, 4096).fill(4);
            for (value, (_, part)) in (1..).zip(&mut lent) {
                part.as_mut().unwrap().as_mut_slice().fill(value);
            }
            for index in order {
                assert!(!slot.is_whole());
                slot.take_back(lent[index].0, lent[index].1.take().unwrap());
            }
            assert!(slot.is_whole());
            let whole = slot.into_whole();
            for (value, octets) in [1, 3, 2, 4].into_iter().zip(whole.as_slice().chunks(4096)) {
                assert!(octets.iter().all(|octet| *octet == value));
            }
        }
    }

    #[test]
    #[should_panic(expected = "are not here")]
    fn what_is_away_cannot_be_written_to() {
        let mut slot = slot(8192);
        let _away = slot.lend(4096, 1);
        slot.octets_mut(4095, 2);
    }

    proptest! {
        #[test]
        fn whatever_is_lent_comes_back_to_its_place(pages in proptest::collection::vec((0usize..16, 1usize..5), 1..20)) {
            let mut slot = slot(16 * 4096);
            let (mut away, mut lent) = ([false; 16], Vec::new());
            for (seed, (first, count)) in (1u8..).zip(pages) {
                let pages = first..(first + count).min(16);
                if away[pages.clone()].iter().any(|away| *away) {
                    let (at, part) = lent.swap_remove(seed as usize % lent.len());
                    let part: LocalBuf = part;
                    away[at / 4096..(at + part.len()) / 4096].fill(false);
                    slot.take_back(at, part);
                    continue;
                }
                away[pages.clone()].fill(true);
                let mut part = slot.lend(pages.start * 4096, pages.len() * 4096 - 1);
                prop_assert_eq!(part.len(), pages.len() * 4096);
                for (page, octets) in pages.clone().zip(part.as_mut_slice().chunks_mut(4096)) {
                    octets.fill(page as u8);
                }
                lent.push((pages.start * 4096, part));
                prop_assert!(!slot.is_whole());
            }
            for (at, part) in lent {
                slot.take_back(at, part);
            }
            let whole = slot.into_whole();
            prop_assert_eq!(whole.len(), 16 * 4096);
            for (page, octets) in whole.as_slice().chunks(4096).enumerate() {
                prop_assert!(octets.iter().all(|octet| *octet == page as u8 || *octet == 0));
            }
        }
    }
}
