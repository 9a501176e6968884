//! Typed sequence numbers.

use std::num::NonZeroU64;

/// Number of a control record of native version 3: starts at 1 in each direction, one more for each record of any type,
/// 56 bits wide. It never wraps: a sender stops before 2^56, so numbers have a total order.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ControlSequence(NonZeroU64);

impl ControlSequence {
    /// The first record of a direction.
    pub const FIRST: Self = Self(NonZeroU64::MIN);
    /// The last record that a direction can carry.
    pub const LAST: Self = Self(NonZeroU64::new((1 << 56) - 1).unwrap());

    /// `None` outside 1..2^56.
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(value) if value.get() <= Self::LAST.get() => Some(Self(value)),
            _ => None,
        }
    }

    /// As a number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The one after it; `None` when the direction is used up.
    pub const fn next(self) -> Option<Self> {
        Self::new(self.get() + 1)
    }

    /// Slot of a ring of `slot_count` slots (not zero) that carries this record.
    pub const fn slot_index(self, slot_count: u32) -> u32 {
        ((self.get() - 1) % slot_count as u64) as u32
    }
}

/// Number of a bulk fragment of native version 3: starts at 1 in each direction, 64 bits wide, never wraps.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BulkSequence(NonZeroU64);

impl BulkSequence {
    /// The first fragment of a direction.
    pub const FIRST: Self = Self(NonZeroU64::MIN);
    /// The last fragment that a direction can carry.
    pub const LAST: Self = Self(NonZeroU64::MAX);

    /// `None` for zero.
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }

    /// As a number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The one after it; `None` when the direction is used up.
    pub const fn next(self) -> Option<Self> {
        match self.0.checked_add(1) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }

    /// Window, of `window_count` (not zero), that carries this fragment.
    pub const fn window_index(self, window_count: u32) -> u32 {
        ((self.get() - 1) % window_count as u64) as u32
    }
}

/// Message Sequence Number of an untagged message: starts at 1, wraps modulo 2^32 (RFC 5041 §4.3). It wraps, so it has no
/// order: ask whether it is the next one, never which is greater.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Msn(pub u32);

impl Msn {
    pub const FIRST: Self = Self(1);

    /// The number after this one.
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_sequences_are_one_to_two_to_the_fifty_six_exclusive() {
        assert_eq!(ControlSequence::new(0), None);
        assert_eq!(ControlSequence::new(1), Some(ControlSequence::FIRST));
        assert_eq!(ControlSequence::LAST.get(), 0x00ff_ffff_ffff_ffff);
        assert_eq!(ControlSequence::new(1 << 56), None);
        assert_eq!(ControlSequence::LAST.next(), None);
        assert_eq!(ControlSequence::FIRST.next().map(ControlSequence::get), Some(2));
    }

    #[test]
    fn bulk_sequences_end_without_wrapping() {
        assert_eq!(BulkSequence::new(0), None);
        assert_eq!(BulkSequence::LAST.next(), None);
        assert_eq!(BulkSequence::FIRST.next().map(BulkSequence::get), Some(2));
    }

    #[test]
    fn slots_and_windows_are_used_in_turn() {
        let slots: Vec<u32> = (1..=5).map(|n| ControlSequence::new(n).unwrap().slot_index(2)).collect();
        assert_eq!(slots, [0, 1, 0, 1, 0]);
        let windows: Vec<u32> = (1..=5).map(|n| BulkSequence::new(n).unwrap().window_index(3)).collect();
        assert_eq!(windows, [0, 1, 2, 0, 1]);
        assert_eq!(BulkSequence::LAST.window_index(65_535), 65_534, "2^64 - 1 is a multiple of 65,535");
    }
}
