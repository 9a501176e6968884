//! Power-of-two allocator of unit ranges: the one allocator behind the arena (64-octet units) and every pool file
//! (4 KiB units).
//!
//! Free blocks of each order are bits in a `BitTree`, so that a region of millions of units costs two bits a unit, a
//! page of which is touched only once a block of that size was split. The lowest address is taken first, which keeps
//! long-lived blocks together and large ones whole.

/// A set of small integers with "lowest member" in a few word reads.
#[derive(Debug)]
struct BitTree {
    /// `levels[0]` has one bit a member; bit `i` of a higher level says that word `i` below is not empty.
    levels: Vec<Vec<u64>>,
}

impl BitTree {
    fn new(len: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = len.div_ceil(64).max(1);
        loop {
            levels.push(vec![0u64; words]);
            if words == 1 {
                return Self { levels };
            }
            words = words.div_ceil(64);
        }
    }

    fn contains(&self, index: usize) -> bool {
        self.levels[0].get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    fn insert(&mut self, mut index: usize) {
        for level in &mut self.levels {
            let word = &mut level[index / 64];
            let was_empty = *word == 0;
            *word |= 1 << (index % 64);
            if !was_empty {
                return;
            }
            index /= 64;
        }
    }

    fn remove(&mut self, mut index: usize) {
        for level in &mut self.levels {
            let word = &mut level[index / 64];
            *word &= !(1 << (index % 64));
            if *word != 0 {
                return;
            }
            index /= 64;
        }
    }

    fn first(&self) -> Option<usize> {
        let mut index = 0;
        for level in self.levels.iter().rev() {
            let word = level[index];
            if word == 0 {
                return None;
            }
            index = index * 64 + word.trailing_zeros() as usize;
        }
        Some(index)
    }
}

/// Blocks of `2^order` units, each aligned to its own size, `0 <= order <= order_max`.
#[derive(Debug)]
pub struct Buddy {
    free: Vec<BitTree>,
    unit_count: usize,
    free_units: usize,
}

impl Buddy {
    /// All of `unit_count` units free, in blocks of at most `2^order_max`.
    pub fn new(unit_count: usize, order_max: u8) -> Self {
        let mut free: Vec<BitTree> = (0..=order_max).map(|order| BitTree::new((unit_count >> order).max(1))).collect();
        let mut start = 0;
        while start < unit_count {
            let mut order = order_max;
            while start + (1 << order) > unit_count {
                order -= 1;
            }
            free[order as usize].insert(start >> order);
            start += 1 << order;
        }
        Self { free, unit_count, free_units: unit_count }
    }

    /// Units free now.
    pub fn free_units(&self) -> usize {
        self.free_units
    }

    /// First unit of a free block of `2^order` units, now taken; `None` if no block is large enough.
    pub fn allocate(&mut self, order: u8) -> Option<usize> {
        let (mut found, mut index) =
            (order as usize..self.free.len()).find_map(|order| Some((order, self.free[order].first()?)))?;
        self.free[found].remove(index);
        while found > order as usize {
            found -= 1;
            index <<= 1;
            self.free[found].insert(index + 1);
        }
        self.free_units -= 1 << order;
        Some(index << order)
    }

    /// Gives back a block that [`Buddy::allocate`] returned for the same order, and joins it with its free buddies.
    ///
    /// # Panics
    /// If the block is not one: that is a bug of the caller, and memory would be handed out twice.
    pub fn free(&mut self, unit: usize, order: u8) {
        assert!(unit.trailing_zeros() >= u32::from(order) || unit == 0, "unit {unit} is not aligned to order {order}");
        assert!(unit + (1 << order) <= self.unit_count, "unit {unit} of order {order} is out of range");
        let mut order = order as usize;
        self.free_units += 1 << order;
        let mut index = unit >> order;
        assert!(!self.free[order].contains(index), "unit {unit} of order {order} is free already");
        while order + 1 < self.free.len() && self.free[order].contains(index ^ 1) {
            self.free[order].remove(index ^ 1);
            order += 1;
            index >>= 1;
        }
        self.free[order].insert(index);
    }
}

/// The order of the smallest block of `unit_bytes << order` that holds `len` octets.
pub const fn order_of(len: u64, unit_bytes: u64) -> u8 {
    let units = len.div_ceil(unit_bytes);
    if units <= 1 { 0 } else { (u64::BITS - (units - 1).leading_zeros()) as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn order_is_the_smallest_that_fits() {
        for (len, order) in [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (262_144, 12), (262_145, 13)] {
            assert_eq!(order_of(len, 64), order, "{len}");
        }
    }

    #[test]
    fn a_size_that_is_no_power_of_two_is_wholly_usable() {
        let mut buddy = Buddy::new(13, 3);
        let mut taken: Vec<_> = std::iter::from_fn(|| buddy.allocate(0)).collect();
        taken.sort_unstable();
        assert_eq!(taken, (0..13).collect::<Vec<_>>());
        assert_eq!(buddy.free_units(), 0);
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn freeing_twice_is_caught() {
        let mut buddy = Buddy::new(16, 4);
        let unit = buddy.allocate(2).unwrap();
        buddy.free(unit, 2);
        let _other = buddy.allocate(1);
        buddy.free(8, 3);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_everything_joins_again(
            units in 1usize..2000,
            steps in prop::collection::vec((any::<bool>(), 0u8..7, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut buddy = Buddy::new(units, 6);
            let mut owned = vec![false; units];
            let mut held: Vec<(usize, u8)> = Vec::new();
            for (take, order, pick) in steps {
                if take {
                    if let Some(unit) = buddy.allocate(order) {
                        for owner in &mut owned[unit..unit + (1 << order)] {
                            prop_assert!(!*owner);
                            *owner = true;
                        }
                        held.push((unit, order));
                    }
                } else if !held.is_empty() {
                    let (unit, order) = held.swap_remove(pick.index(held.len()));
                    owned[unit..unit + (1 << order)].fill(false);
                    buddy.free(unit, order);
                }
                prop_assert_eq!(buddy.free_units(), owned.iter().filter(|owned| !**owned).count());
            }
            for (unit, order) in held.drain(..) {
                buddy.free(unit, order);
            }
            prop_assert_eq!(buddy.free_units(), units);
            let whole = units / 64;
            prop_assert_eq!(std::iter::from_fn(|| buddy.allocate(6)).count(), whole);
        }
    }
}
