//! A value whose octets are arriving: visible to nobody until it is committed, gone without a trace if it is dropped.

use crate::store::claims::Claim;
use crate::store::object::Piece;
use crate::store::segment::{Class, Filling, Residency, SEGMENT_BYTES_MAX};
use std::sync::Arc;

/// What the next segment of a draft must be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Want {
    pub class: Class,
    /// Octets to come before the value or its head ends, or a body reaches a multiple of the longest segment.
    pub remaining: u64,
    /// It is a part of the head.
    pub head: bool,
}

/// A value under construction.
///
/// Octets go into [`Draft::spare`]; when that is empty and [`Draft::want`] says so, the next segment has to be had from
/// [`crate::store::Store::fill`] and given to [`Draft::begin`].
#[derive(Debug)]
#[must_use = "a dropped draft gives its space back"]
pub struct Draft {
    class: Class,
    len: u64,
    head_bytes: u64,
    received: u64,
    pieces: Vec<Piece>,
    filling: Option<Filling>,
    claim: Option<Claim>,
    residency: Arc<Residency>,
}

impl Draft {
    pub(super) fn new(
        len: u64,
        class: Class,
        head_bytes: u64,
        claim: Option<Claim>,
        residency: Arc<Residency>,
    ) -> Self {
        Self { class, len, head_bytes, received: 0, pieces: Vec::new(), filling: None, claim, residency }
    }

    /// Octets of the whole value.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn claim(&self) -> Option<&Claim> {
        self.claim.as_ref()
    }

    /// The segment that must begin before more octets can be taken.
    pub fn want(&self) -> Option<Want> {
        if self.filling.is_some() || self.received == self.len {
            return None;
        }
        let head = self.received < self.head_bytes;
        // Behind a head of another length, or a segment that came out shorter, the cuts return to multiples of 256 KiB:
        // then a window of that size holds whole segments, which the disk can put there, and `footprint` is exact.
        let grid = (self.received + 1).next_multiple_of(SEGMENT_BYTES_MAX);
        let end = if head { self.head_bytes } else { grid };
        Some(Want { class: self.class, remaining: end.min(self.len) - self.received, head })
    }

    /// The segment that was wanted.
    pub fn begin(&mut self, filling: Filling) {
        assert!(
            self.want().is_some_and(|want| filling.missing() as u64 <= want.remaining),
            "no such segment was wanted"
        );
        self.filling = Some(filling);
    }

    /// Where the next octets go; empty when a segment is wanted or the value is complete.
    pub fn spare(&mut self) -> &mut [u8] {
        self.filling.as_mut().map_or(&mut [], Filling::spare)
    }

    /// `count` octets were put into [`Draft::spare`].
    pub fn advance(&mut self, count: usize) {
        let filling = self.filling.as_mut().expect("octets go into a segment that has begun");
        filling.advance(count);
        self.received += count as u64;
        if filling.missing() == 0
            && let Some(filling) = self.filling.take()
        {
            let segment = filling.seal(&self.residency);
            self.pieces.push(Piece { start: 0, len: segment.len(), segment });
        }
    }

    /// Copies as much of `octets` as there is room for and says how much that was.
    pub fn put(&mut self, octets: &[u8]) -> usize {
        let spare = self.spare();
        let count = spare.len().min(octets.len());
        if count > 0 {
            spare[..count].copy_from_slice(&octets[..count]);
            self.advance(count);
        }
        count
    }

    /// All octets are there.
    pub fn is_complete(&self) -> bool {
        self.received == self.len
    }

    /// The segments that are complete.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// # Panics
    /// If octets are missing.
    pub(super) fn into_parts(self) -> (Class, u64, Vec<Piece>, Option<Claim>) {
        assert!(self.is_complete(), "{} of {} octets arrived", self.received, self.len);
        (self.class, self.len, self.pieces, self.claim)
    }
}
