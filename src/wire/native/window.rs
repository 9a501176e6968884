//! Bulk windows: the peer's that we write to, ours that it writes to, and our slots that are sent from.
//!
//! ```text
//!   our TX slots            the peer's RX windows                our RX windows
//!   Waiting -> Granted      take -> in flight -> handle_release   handle_ready -> RxLease -> dropped
//!      -> filled -> posted                                                            |
//!      -> retired, free                                            cumulative RELEASE <+ (contiguous prefix)
//! ```

use super::descriptor::{Descriptor, Negotiated, RemoteAddress, WindowGeometry};
use super::poison::Poison;
use crate::wire::seq::BulkSequence;
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

/// The sender's account of the peer's windows.
#[derive(Debug)]
pub struct PeerWindows {
    peer: Descriptor,
    limits: Negotiated,
    /// `None` once the last sequence was taken.
    next: Option<BulkSequence>,
    released: u64,
}

impl PeerWindows {
    /// Windows of `peer`, none of them in use.
    pub fn new(peer: Descriptor, limits: Negotiated) -> Self {
        Self::resumed(peer, limits, BulkSequence::FIRST)
    }

    /// Windows whose fragments before `next` were all released.
    pub fn resumed(peer: Descriptor, limits: Negotiated, next: BulkSequence) -> Self {
        Self { peer, limits, next: Some(next), released: next.get() - 1 }
    }

    /// Fragments sent so far.
    pub fn sent(&self) -> u64 {
        self.next.map_or(BulkSequence::LAST.get(), |next| next.get() - 1)
    }

    /// Fragments sent and not released.
    pub fn in_flight(&self) -> u64 {
        self.sent() - self.released
    }

    /// Another fragment may be sent.
    pub fn is_free(&self) -> bool {
        self.in_flight() < u64::from(self.limits.in_flight_max)
    }

    /// Takes the next window, which [`PeerWindows::is_free`].
    ///
    /// # Errors
    /// [`Poison::BulkExhausted`].
    pub fn take(&mut self) -> Result<(BulkSequence, RemoteAddress), Poison> {
        assert!(self.is_free(), "a window is taken when one is free");
        let taken = self.next.ok_or(Poison::BulkExhausted)?;
        self.next = taken.next();
        Ok((taken, self.peer.window_at(taken)))
    }

    /// The peer released all windows up to that of `sequence`. To hear so again changes nothing.
    ///
    /// # Errors
    /// [`Poison`]: an older one than before, or one that was never sent.
    pub fn handle_release(&mut self, sequence: BulkSequence) -> Result<(), Poison> {
        let found = sequence.get();
        if found < self.released {
            return Err(Poison::ReleaseRegression { found, last: self.released });
        }
        if found > self.sent() {
            return Err(Poison::ReleaseUnsent { found, sent: self.sent() });
        }
        self.released = found;
        Ok(())
    }
}

/// Which windows in use were given up, from the oldest on.
#[derive(Debug, Default)]
struct Board {
    /// Fragments whose leases, and those of all before them, were dropped.
    prefix: u64,
    /// Of the fragments behind `prefix`: dropped or not.
    dropped: VecDeque<bool>,
    /// The newest release that was given out.
    told: u64,
}

/// Where dropped leases become releases. Several may look at the same windows.
#[derive(Clone, Debug)]
pub struct Releases {
    board: Arc<Mutex<Board>>,
}

impl Releases {
    /// The release that is due, once: all windows up to it were given up.
    pub fn poll(&self) -> Option<BulkSequence> {
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        if board.prefix == board.told {
            return None;
        }
        board.told = board.prefix;
        BulkSequence::new(board.told)
    }

    /// Windows with a lease, or behind one.
    pub fn held(&self) -> usize {
        self.board.lock().unwrap_or_else(PoisonError::into_inner).dropped.len()
    }
}

/// An own RX window that holds octets of the peer, for as long as this lives. Dropped, it is released; a window is
/// released only together with all before it.
#[derive(Debug)]
#[must_use = "dropping a lease gives the window back to the peer"]
pub struct RxLease {
    board: Arc<Mutex<Board>>,
    sequence: BulkSequence,
    offset: u64,
    len: NonZeroU32,
}

impl RxLease {
    /// Which fragment it is.
    pub fn sequence(&self) -> BulkSequence {
        self.sequence
    }

    /// Offset of its first octet in the RX half.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Octets in it, at least 1.
    pub fn len(&self) -> u32 {
        self.len.get()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for RxLease {
    fn drop(&mut self) {
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let index = (self.sequence.get() - board.prefix - 1) as usize;
        board.dropped[index] = true;
        while board.dropped.front() == Some(&true) {
            board.dropped.pop_front();
            board.prefix += 1;
        }
    }
}

/// The receiver's account of its own windows.
#[derive(Debug)]
pub struct RxWindows {
    own: WindowGeometry,
    limits: Negotiated,
    /// `None` once the last sequence has come.
    next: Option<BulkSequence>,
    board: Arc<Mutex<Board>>,
}

impl RxWindows {
    /// Windows of geometry `own`, none of them in use.
    pub fn new(own: WindowGeometry, limits: Negotiated) -> Self {
        Self::resumed(own, limits, BulkSequence::FIRST)
    }

    /// Windows whose fragments before `next` were all released.
    pub fn resumed(own: WindowGeometry, limits: Negotiated, next: BulkSequence) -> Self {
        let told = next.get() - 1;
        let board = Arc::new(Mutex::new(Board { prefix: told, dropped: VecDeque::new(), told }));
        Self { own, limits, next: Some(next), board }
    }

    /// A READY came.
    ///
    /// # Errors
    /// [`Poison`]: not the next fragment, longer than agreed, or more at a time than agreed.
    pub fn handle_ready(&mut self, sequence: BulkSequence, len: NonZeroU32) -> Result<RxLease, Poison> {
        let expected = self.next.map_or(0, BulkSequence::get);
        if sequence.get() != expected {
            return Err(Poison::ReadySequence { found: sequence.get(), expected });
        }
        let max = self.limits.fragment_bytes_max;
        if len.get() > max {
            return Err(Poison::ReadyLength { len: len.get(), max });
        }
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        // A peer can know of no release that was not given out for sending.
        let max = self.limits.in_flight_max;
        if sequence.get() - board.told > u64::from(max) {
            return Err(Poison::WindowOverrun { sequence: sequence.get(), max });
        }
        self.next = sequence.next();
        board.dropped.push_back(false);
        Ok(RxLease { board: self.board.clone(), sequence, offset: self.own.rx_offset(sequence), len })
    }

    /// Where its dropped leases become releases.
    pub fn releases(&self) -> Releases {
        Releases { board: self.board.clone() }
    }
}

/// Names one body place of the egress FIFO; counts up in the order of the places.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ticket(pub u64);

/// One of our TX slots, owned: whoever has it may fill it, or send from it.
#[derive(Debug, Eq, PartialEq)]
#[must_use = "a slot that is dropped is lost to its connection"]
pub struct TxSlot(u32);

impl TxSlot {
    /// Which one, from zero.
    pub fn index(&self) -> u32 {
        self.0
    }
}

/// A slot that has to be filled for the place of `ticket`.
#[derive(Debug)]
pub struct Grant<F> {
    pub ticket: Ticket,
    /// Index of the slot to fill.
    pub slot: u32,
    /// What to fill it with.
    pub source: F,
}

#[derive(Debug)]
enum Fill<F> {
    Waiting(Job<F>),
    /// Failed once: keeps its slot for one more try.
    Again(Job<F>, TxSlot),
    Granted(Job<F>, TxSlot),
    /// Nobody wants it any more, but it is being written to.
    Cancelled(TxSlot),
    Done,
}

#[derive(Debug)]
struct Job<F> {
    source: F,
    slow: bool,
    again: bool,
}

/// What became of a fill that failed.
#[derive(Debug, Eq, PartialEq)]
pub enum FailedFill<F> {
    /// It is tried once more.
    Retried,
    /// It was cancelled before.
    Cancelled,
    /// This could not be had.
    GaveUp(F),
}

/// Our TX slots, and the places that wait for one. `F` says what fills a place.
///
/// Places are filled from the earliest on. But once there is something to send, fills that are slow (a disk) are started
/// before those that are quick (memory), however far ahead, in up to half of the slots, so that the one hides the other.
/// The last free slot goes to the earliest unfilled place alone: reads ahead cannot take all slots and leave none to the
/// place at the front.
#[derive(Debug)]
pub struct TxSlots<F> {
    free: Vec<TxSlot>,
    slot_count: usize,
    fills: VecDeque<Fill<F>>,
    /// Ticket of the front of `fills`.
    first: u64,
    /// Slots that are being filled or will be filled again.
    filling: usize,
    /// Of these, those of slow fills that are wanted.
    filling_slowly: usize,
    /// Fills that wait for their second try.
    again: usize,
}

impl<F: Clone> TxSlots<F> {
    /// `slot_count` slots, at least 1, all free.
    pub fn new(slot_count: u32) -> Self {
        Self {
            free: (0..slot_count).rev().map(TxSlot).collect(),
            slot_count: slot_count as usize,
            fills: VecDeque::new(),
            first: 0,
            filling: 0,
            filling_slowly: 0,
            again: 0,
        }
    }

    /// The next place wants to be filled. `slow` if it takes more than a copy.
    pub fn handle_fill(&mut self, ticket: Ticket, source: F, slow: bool) {
        assert_eq!(ticket.0, self.first + self.fills.len() as u64, "places ask in their order, each once");
        self.fills.push_back(Fill::Waiting(Job { source, slow, again: false }));
    }

    /// The next slot to fill. [`TxSlots::handle_filled`] or [`TxSlots::handle_failed`] must follow.
    pub fn poll_grant(&mut self) -> Option<Grant<F>> {
        if self.again > 0 {
            let index = self.fills.iter().position(|fill| matches!(fill, Fill::Again(..)))?;
            let Fill::Again(job, slot) = std::mem::replace(&mut self.fills[index], Fill::Done) else { return None };
            self.again -= 1;
            return Some(self.grant(index, job, slot));
        }
        let index = self.next_waiting()?;
        let slot = self.free.pop()?;
        let Fill::Waiting(job) = std::mem::replace(&mut self.fills[index], Fill::Done) else { return None };
        self.filling += 1;
        self.filling_slowly += usize::from(job.slow);
        Some(self.grant(index, job, slot))
    }

    /// Which waiting place gets a slot now.
    fn next_waiting(&self) -> Option<usize> {
        if self.free.is_empty() {
            return None;
        }
        let unfilled = |fill: &Fill<F>| !matches!(fill, Fill::Done | Fill::Cancelled(_));
        let earliest = self.fills.iter().position(unfilled)?;
        let earliest_waits = matches!(self.fills[earliest], Fill::Waiting(_));
        let sendable = self.slot_count - self.free.len() - self.filling;
        if self.free.len() == 1 || earliest_waits && sendable == 0 {
            return earliest_waits.then_some(earliest);
        }
        let mut waiting = self.fills.iter().enumerate().skip(earliest).filter_map(|(index, fill)| match fill {
            Fill::Waiting(job) => Some((index, job.slow)),
            _ => None,
        });
        let (first, is_slow) = waiting.next()?;
        if is_slow || self.filling_slowly >= self.slot_count / 2 {
            return Some(first);
        }
        Some(waiting.find(|(_, slow)| *slow).map_or(first, |(index, _)| index))
    }

    fn grant(&mut self, index: usize, job: Job<F>, slot: TxSlot) -> Grant<F> {
        let grant = Grant { ticket: Ticket(self.first + index as u64), slot: slot.0, source: job.source.clone() };
        self.fills[index] = Fill::Granted(job, slot);
        grant
    }

    /// The slot of `ticket` is filled. `None` if nobody wants it any more; it is free again then.
    pub fn handle_filled(&mut self, ticket: Ticket) -> Option<TxSlot> {
        let slot = match self.take(ticket) {
            Fill::Granted(job, slot) => {
                self.filling_slowly -= usize::from(job.slow);
                Some(slot)
            }
            Fill::Cancelled(slot) => {
                self.free.push(slot);
                None
            }
            _ => panic!("{ticket:?} has no slot to fill"),
        };
        self.filling -= 1;
        self.trim();
        slot
    }

    /// The slot of `ticket` could not be filled.
    pub fn handle_failed(&mut self, ticket: Ticket) -> FailedFill<F> {
        let failed = match self.take(ticket) {
            Fill::Granted(job, slot) if !job.again => {
                let index = (ticket.0 - self.first) as usize;
                self.fills[index] = Fill::Again(Job { again: true, ..job }, slot);
                self.again += 1;
                return FailedFill::Retried;
            }
            Fill::Granted(job, slot) => {
                self.filling_slowly -= usize::from(job.slow);
                self.free.push(slot);
                FailedFill::GaveUp(job.source)
            }
            Fill::Cancelled(slot) => {
                self.free.push(slot);
                FailedFill::Cancelled
            }
            _ => panic!("{ticket:?} has no slot to fill"),
        };
        self.filling -= 1;
        self.trim();
        failed
    }

    /// The place of `ticket` is gone. Does nothing if it was filled before.
    pub fn cancel(&mut self, ticket: Ticket) {
        let Some(index) = self.index_of(ticket) else { return };
        self.fills[index] = match self.take(ticket) {
            Fill::Granted(job, slot) => {
                self.filling_slowly -= usize::from(job.slow);
                Fill::Cancelled(slot)
            }
            Fill::Again(job, slot) => {
                self.filling_slowly -= usize::from(job.slow);
                self.filling -= 1;
                self.again -= 1;
                self.free.push(slot);
                Fill::Done
            }
            Fill::Cancelled(slot) => Fill::Cancelled(slot),
            Fill::Waiting(_) | Fill::Done => Fill::Done,
        };
        self.trim();
    }

    /// A slot was sent from, or its place is gone.
    pub fn handle_retired(&mut self, slot: TxSlot) {
        self.free.push(slot);
    }

    /// All places are gone: the connection has ended. Slots that are being filled come back when they are.
    pub fn cancel_all(&mut self) {
        for ticket in self.first..self.first + self.fills.len() as u64 {
            self.cancel(Ticket(ticket));
        }
    }

    /// Slots that are being filled.
    pub fn filling_count(&self) -> usize {
        self.filling - self.again
    }

    /// Nothing waits, nothing is being filled, and every slot is back.
    pub fn is_idle(&self) -> bool {
        self.fills.is_empty() && self.free.len() == self.slot_count
    }

    fn index_of(&self, ticket: Ticket) -> Option<usize> {
        let index = usize::try_from(ticket.0.checked_sub(self.first)?).ok()?;
        (index < self.fills.len()).then_some(index)
    }

    fn take(&mut self, ticket: Ticket) -> Fill<F> {
        match self.index_of(ticket) {
            Some(index) => std::mem::replace(&mut self.fills[index], Fill::Done),
            None => Fill::Done,
        }
    }

    fn trim(&mut self) {
        while let Some(Fill::Done) = self.fills.front() {
            self.fills.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Nonce, RemoteKey, RingGeometry};
    use super::*;

    const LIMITS: Negotiated = Negotiated { fragment_bytes_max: 4096, in_flight_max: 2 };

    fn own() -> WindowGeometry {
        WindowGeometry::new(8192, 3).unwrap()
    }

    fn peer() -> Descriptor {
        let at = |address| RemoteAddress { address, key: RemoteKey(1) };
        let ring = RingGeometry::new(2).unwrap();
        let windows = WindowGeometry::new(4096, 2).unwrap();
        Descriptor { ring, ring_at: at(0x1000), ring_bytes: 4096, nonce: Nonce(0), windows, bulk_at: at(0x10_0000) }
    }

    fn sequence(value: u64) -> BulkSequence {
        BulkSequence::new(value).unwrap()
    }

    fn len(len: u32) -> NonZeroU32 {
        NonZeroU32::new(len).unwrap()
    }

    #[test]
    fn a_sender_stops_at_the_agreed_number_in_flight() {
        let mut windows = PeerWindows::new(peer(), LIMITS);
        assert_eq!(windows.take().unwrap().1.address, 0x10_2000);
        assert_eq!(windows.take().unwrap().1.address, 0x10_3000);
        assert!(!windows.is_free());
        windows.handle_release(sequence(1)).unwrap();
        assert_eq!(windows.take().unwrap(), (sequence(3), RemoteAddress { address: 0x10_2000, key: RemoteKey(1) }));
    }

    /// Every kind of RELEASE against a sender that sent 4 fragments, of which 2 are released.
    #[test]
    fn releases_are_judged_by_this_table() {
        let table = [
            (1, Err(Poison::ReleaseRegression { found: 1, last: 2 })),
            (2, Ok(2)),
            (3, Ok(1)),
            (4, Ok(0)),
            (5, Err(Poison::ReleaseUnsent { found: 5, sent: 4 })),
            (u64::MAX, Err(Poison::ReleaseUnsent { found: u64::MAX, sent: 4 })),
        ];
        for (release, expected) in table {
            let mut windows = PeerWindows::resumed(peer(), LIMITS, sequence(3));
            windows.take().unwrap();
            windows.take().unwrap();
            let judged = windows.handle_release(sequence(release)).map(|()| windows.in_flight());
            assert_eq!(judged, expected, "release {release}");
        }
    }

    /// Every kind of READY against a receiver that waits for fragment 3, with 1 released and 2 leased.
    #[test]
    fn readies_are_judged_by_this_table() {
        let gap = |found| Err(Poison::ReadySequence { found, expected: 3 });
        let table = [
            (2, 1, gap(2)),
            (3, 1, Ok(16_384)),
            (3, 4096, Ok(16_384)),
            (3, 4097, Err(Poison::ReadyLength { len: 4097, max: 4096 })),
            (3, u32::MAX, Err(Poison::ReadyLength { len: u32::MAX, max: 4096 })),
            (4, 1, gap(4)),
            (u64::MAX, 1, gap(u64::MAX)),
        ];
        for (found, octets, expected) in table {
            let mut windows = RxWindows::new(own(), LIMITS);
            drop(windows.handle_ready(sequence(1), len(1)).unwrap());
            assert_eq!(windows.releases().poll(), Some(sequence(1)));
            let _kept = windows.handle_ready(sequence(2), len(1)).unwrap();
            let judged = windows.handle_ready(sequence(found), len(octets)).map(|lease| lease.offset());
            assert_eq!(judged, expected, "fragment {found} of {octets}");
        }
    }

    #[test]
    fn more_fragments_than_agreed_are_poison() {
        let mut windows = RxWindows::new(own(), LIMITS);
        let _first = windows.handle_ready(sequence(1), len(1)).unwrap();
        let _second = windows.handle_ready(sequence(2), len(1)).unwrap();
        let overrun = windows.handle_ready(sequence(3), len(1)).unwrap_err();
        assert_eq!(overrun, Poison::WindowOverrun { sequence: 3, max: 2 });
    }

    #[test]
    fn releases_are_the_contiguous_prefix_of_dropped_leases() {
        let limits = Negotiated { in_flight_max: 3, ..LIMITS };
        let mut windows = RxWindows::new(own(), limits);
        let first = windows.handle_ready(sequence(1), len(1)).unwrap();
        let second = windows.handle_ready(sequence(2), len(1)).unwrap();
        let third = windows.handle_ready(sequence(3), len(1)).unwrap();
        drop(second);
        assert_eq!(windows.releases().poll(), None);
        drop(first);
        assert_eq!(windows.releases().poll(), Some(sequence(2)));
        assert_eq!(windows.releases().poll(), None, "each release is told once");
        drop(third);
        assert_eq!(windows.releases().poll(), Some(sequence(3)));
        assert_eq!(windows.releases().held(), 0);
    }

    #[test]
    fn bulk_sequences_are_used_up_and_do_not_wrap() {
        let mut windows = PeerWindows::resumed(peer(), LIMITS, BulkSequence::LAST);
        windows.take().unwrap();
        assert_eq!(windows.take().unwrap_err(), Poison::BulkExhausted);
        let mut windows = RxWindows::resumed(own(), LIMITS, BulkSequence::LAST);
        drop(windows.handle_ready(BulkSequence::LAST, len(1)).unwrap());
        assert_eq!(windows.releases().poll(), Some(BulkSequence::LAST));
        let after = windows.handle_ready(sequence(1), len(1)).unwrap_err();
        assert_eq!(after, Poison::ReadySequence { found: 1, expected: 0 });
    }

    /// Tickets granted until nothing more is.
    fn granted(slots: &mut TxSlots<&'static str>) -> Vec<u64> {
        std::iter::from_fn(|| slots.poll_grant()).map(|grant| grant.ticket.0).collect()
    }

    fn four_and_four() -> TxSlots<&'static str> {
        let mut slots = TxSlots::new(4);
        for ticket in 0..8 {
            slots.handle_fill(Ticket(ticket), "octets", ticket >= 4);
        }
        slots
    }

    #[test]
    fn slow_fills_start_while_the_first_quick_one_is_on_its_way() {
        let mut slots = four_and_four();
        assert_eq!(granted(&mut slots), [0, 4, 5], "the last slot is kept for place 1");
        let slot = slots.handle_filled(Ticket(0)).unwrap();
        assert_eq!(granted(&mut slots), [1]);
        slots.handle_retired(slot);
        assert_eq!(granted(&mut slots), [0_u64; 0], "place 1 is still the earliest unfilled");
        let slot = slots.handle_filled(Ticket(1)).unwrap();
        assert_eq!(granted(&mut slots), [2]);
        slots.handle_retired(slot);
    }

    #[test]
    fn slow_fills_start_even_if_quick_ones_are_filled_at_once() {
        let mut slots = four_and_four();
        let (mut order, mut sending) = (Vec::new(), VecDeque::new());
        loop {
            while let Some(grant) = slots.poll_grant() {
                order.push(grant.ticket.0);
                if grant.ticket.0 < 4 {
                    sending.push_back(slots.handle_filled(grant.ticket).unwrap());
                }
            }
            let Some(slot) = sending.pop_front() else { break };
            slots.handle_retired(slot);
        }
        assert_eq!(order, [0, 4, 5, 1, 2, 3, 6], "two reads run while four windows leave; the last slot waits");
    }

    #[test]
    fn a_single_slot_serves_one_place_after_the_other() {
        let mut slots = TxSlots::new(1);
        for ticket in 0..4 {
            slots.handle_fill(Ticket(ticket), "octets", ticket % 2 == 1);
        }
        for ticket in 0..4 {
            assert_eq!(granted(&mut slots), [ticket]);
            let slot = slots.handle_filled(Ticket(ticket)).unwrap();
            slots.handle_retired(slot);
        }
        assert!(slots.is_idle());
    }

    #[test]
    fn a_failed_fill_keeps_its_slot_for_one_more_try() {
        let mut slots = four_and_four();
        assert_eq!(granted(&mut slots), [0, 4, 5]);
        assert_eq!(slots.handle_failed(Ticket(4)), FailedFill::Retried);
        assert_eq!(granted(&mut slots), [4]);
        assert_eq!(slots.handle_failed(Ticket(4)), FailedFill::GaveUp("octets"));
        assert_eq!(granted(&mut slots), [6], "its slot serves another");
    }

    #[test]
    fn a_cancelled_place_gives_its_slot_back_when_nobody_writes_to_it() {
        let mut slots = four_and_four();
        assert_eq!(granted(&mut slots), [0, 4, 5]);
        for ticket in 0..8 {
            slots.cancel(Ticket(ticket));
        }
        assert_eq!(granted(&mut slots), [0_u64; 0]);
        assert!(!slots.is_idle());
        assert_eq!(slots.handle_filled(Ticket(0)), None);
        assert_eq!(slots.handle_failed(Ticket(4)), FailedFill::Cancelled);
        assert_eq!(slots.handle_failed(Ticket(5)), FailedFill::Cancelled);
        assert!(slots.is_idle());
        slots.cancel(Ticket(3));
    }
}
