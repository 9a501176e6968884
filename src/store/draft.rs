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

/// A value under construction, whose octets may come by many calls of its owner, in order.
///
/// Without a claim it takes what is free and may find nothing. With one it can be filled, unless the claim is taken back because
/// its owner moved nothing for a while and others wait: then the [revoker](crate::store::claims::Revoker) is called, and
/// [`Draft::is_revoked`] is true from then on. The draft stays as it is, and keeps others waiting until its owner drops it, as it
/// should without delay; one that is complete may be committed instead. An owner tells of octets with
/// [`Claim::touch`], and of its own waits for the store, which are not the peer's fault, with [`Claim::set_held_up`].
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

    /// Its claim was taken back.
    pub fn is_revoked(&self) -> bool {
        self.claim.as_ref().is_some_and(Claim::is_revoked)
    }

    /// Octets that are there: the offset of the next one.
    pub fn received(&self) -> u64 {
        self.received
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

#[cfg(test)]
mod tests {
    use crate::store::claims::Revoker;
    use crate::store::rig::with_pools;
    use crate::store::{Committed, Condition, Sizes, Store};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const MIB: u64 = 1 << 20;

    fn store() -> Store {
        with_pools(Store::new, Sizes::small())
    }

    fn counting() -> (Revoker, Arc<AtomicUsize>) {
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        (Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed)), told)
    }

    /// Puts `octets` as one call of an owner that keeps the draft between calls.
    fn put(store: &Store, draft: &mut super::Draft, mut octets: &[u8]) {
        while !octets.is_empty() {
            if let Some(want) = draft.want() {
                let filling = store.fill(want).unwrap();
                draft.begin(filling);
            }
            octets = &octets[draft.put(octets)..];
        }
    }

    #[test]
    fn a_value_arrives_by_many_calls_and_is_seen_by_nobody_before_the_last() {
        let store = store();
        let (revoker, told) = counting();
        let octets: Vec<u8> = (0..1_500_000_u32).map(|at| at as u8 ^ (at >> 11) as u8).collect();
        let len = octets.len() as u64;
        let start_ms = store.clock().now_ms();
        let claim = store.try_claim(len, false, &revoker).unwrap();
        let mut draft = store.draft(len, Some(claim));
        for (call, part) in octets.chunks(99_991).enumerate() {
            put(&store, &mut draft, part);
            assert_eq!(draft.received(), ((call + 1) * 99_991).min(octets.len()) as u64);
            // A slow peer is none that stopped: half of the patience goes by between two calls.
            let now_ms = start_ms + 500 * call as u64;
            draft.claim().unwrap().touch(now_ms);
            assert_eq!(store.claims().revoke_idle(now_ms + 500, 1000), 0);
            assert!(store.peek(b"key", 0).is_none());
        }
        assert!(draft.is_complete() && told.load(Ordering::Relaxed) == 0);
        let done = store.commit(b"key", draft, 0, 0, Condition::Any, 0);
        assert!(matches!(done, Committed::Stored { .. }));
        let found = store.peek(b"key", 0).unwrap();
        assert_eq!(found.range(0, u64::MAX).map(|piece| u64::from(piece.len)).sum::<u64>(), len);
        assert_eq!(store.gauges().claims, 0);
    }

    #[test]
    fn an_idle_draft_is_told_once_and_what_it_held_comes_back_when_it_is_dropped() {
        let store = store();
        let (revoker, told) = counting();
        let now_ms = store.clock().now_ms();
        let claim = store.try_claim(MIB, false, &revoker).unwrap();
        claim.touch(now_ms);
        let mut draft = store.draft(MIB, Some(claim));
        put(&store, &mut draft, &[7; 300_000]);
        assert!(!draft.is_revoked());
        draft.claim().unwrap().set_held_up(true);
        assert_eq!(store.claims().revoke_idle(now_ms + 5000, 1000), 0, "it waits for the store");
        draft.claim().unwrap().set_held_up(false);
        assert_eq!(store.claims().revoke_idle(now_ms + 1000, 1000), 1);
        assert_eq!(store.claims().revoke_idle(now_ms + 9000, 1000), 0);
        assert!(draft.is_revoked() && told.load(Ordering::Relaxed) == 1);
        assert_eq!((draft.received(), store.gauges().claims), (300_000, 1), "nothing is taken from under it");
        drop(draft);
        let gauges = store.gauges();
        assert_eq!((gauges.claims, gauges.claimed_bytes, gauges.pool_used_bytes), (0, 0, 0));
        assert_eq!(gauges.memory_free_bytes, gauges.memory_bytes);
    }
}
