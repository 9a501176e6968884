//! The one way out: a FIFO of places, the peer's ring and windows, and the send queue.
//!
//! ```text
//!   enqueue:   | text | body 7 | body 8 | text | body 9 |      places, in the order of the stream
//!                        ^        ^               ^
//!   filled in any order: |   8 was filled first   |
//!   posted from the front only: [text] [Write, READY] [Write, READY] [text] ...
//!
//!   release cell: the newest RELEASE that is due; it goes before any place
//! ```
//!
//! Control and bulk sequences are taken when a place is posted, and nowhere else. So whatever the disk does, header,
//! READYs and trailer reach the peer in the order in which their places were taken.

use super::credit::{Credits, Purpose};
use super::descriptor::{Descriptor, Negotiated, RemoteAddress};
use super::poison::Poison;
use super::record::{INLINE_BYTES_MAX, Record};
use super::ring::{CONSUMED_OFFSET, SlotWrite};
use super::window::{PeerWindows, Ticket, TxSlot};
use crate::wire::seq::BulkSequence;
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::time::Duration;

/// Smallest send queue that works: a body takes two work requests, and one signalled write must always find room.
pub const QUEUE_DEPTH_MIN: u32 = 8;
/// Work requests between two signalled control writes, at most.
const SIGNAL_INTERVAL_MAX: u64 = 32;

/// A body up to this length is filled sooner than a peer wakes up.
const SHORT_BODY_BYTES: u32 = 16 << 10;

/// Octets of the stream for one INLINE record, 1..=191.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct InlineText {
    len: u8,
    octets: [u8; INLINE_BYTES_MAX],
}

impl InlineText {
    /// The first 191 octets of `text`, or all if there are fewer.
    ///
    /// # Panics
    /// If there are none.
    pub fn first_of(text: &[u8]) -> Self {
        assert!(!text.is_empty(), "an INLINE carries octets");
        let len = text.len().min(INLINE_BYTES_MAX);
        let mut octets = [0; INLINE_BYTES_MAX];
        octets[..len].copy_from_slice(&text[..len]);
        Self { len: len as u8, octets }
    }

    /// The octets.
    pub fn as_bytes(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }

    /// Without the first `count` octets; `None` if nothing is left.
    fn without_front(&self, count: usize) -> Option<Self> {
        let rest = self.as_bytes().get(count..).filter(|rest| !rest.is_empty())?;
        Some(Self::first_of(rest))
    }
}

impl std::fmt::Debug for InlineText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\"", self.as_bytes().escape_ascii())
    }
}

/// Names a value in the stream that can still turn out to be none.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ValueId(pub u64);

/// What takes a place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// Octets for one INLINE.
    Inline {
        text: InlineText,
        /// Part of a doubtful value: the line before its bodies, or `prefix` octets behind them.
        part_of: Option<PartOf>,
    },
    /// Octets that will lie in a slot: filled later, in any order.
    Body { ticket: Ticket, len: NonZeroU32, value: ValueId },
}

/// How text belongs to a value whose first octets are not there yet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PartOf {
    /// Is not posted before the place of `held_by` is filled. `start`: the first record of the line.
    Line { value: ValueId, held_by: Ticket, start: bool },
    /// The first `prefix` octets of the text end the value; the rest is not part of it.
    Trailer { value: ValueId, prefix: u8 },
}

#[derive(Debug)]
enum State {
    Inline,
    Unfilled,
    Filled(TxSlot),
    Failed,
}

#[derive(Debug)]
struct Entry {
    place: Place,
    state: State,
}

/// A place that could not be filled: what that means for its value.
#[derive(Debug, Eq, PartialEq)]
pub enum Failure {
    /// Nothing of it had left, and nothing will: it is as if it had never been there.
    Missed {
        value: ValueId,
        /// Its other bodies that are not filled: nobody waits for them any more.
        cancelled: Vec<Ticket>,
        /// Those of its slots that were filled.
        freed: Vec<TxSlot>,
    },
    /// Its line has left. Once this place is at the front, [`Egress::broken`] says so.
    Broken,
}

/// Number of a work request on the send queue, from 1, in the order of posting.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct WorkId(pub u64);

/// What has to be posted, in one piece.
#[derive(Debug)]
pub enum Post {
    /// A Write of record and commit word into the peer's ring. The octets are the post's own: inline where the fabric can.
    Control { id: WorkId, to: RemoteAddress, write: SlotWrite, signaled: bool },
    /// Two Writes, chained: `len` octets from slot `slot` (signalled), then the READY of `ready` (not signalled).
    Body {
        id: WorkId,
        slot: u32,
        len: u32,
        to: RemoteAddress,
        ready_id: WorkId,
        ready_to: RemoteAddress,
        ready: SlotWrite,
    },
    /// A Read of 8 octets, little-endian (signalled): into a buffer of the connection, or into
    /// [`READBACK_OFFSET`](super::ring::READBACK_OFFSET) of the own region. No other is in flight.
    Credits { id: WorkId, from: RemoteAddress },
}

/// What a completion was about.
#[derive(Debug, Eq, PartialEq)]
pub enum Completed {
    /// Records are in the peer's ring, or will be.
    Control,
    /// A slot was sent from.
    Slot(TxSlot),
    /// The peer's counter has come: give it to [`Egress::handle_credits`].
    Credits,
}

/// The send queue's bookkeeping.
#[derive(Debug)]
struct SendQueue {
    depth: u32,
    posted: u64,
    retired: u64,
    signaled: VecDeque<(u64, Completed)>,
}

impl SendQueue {
    fn has_room(&self, count: u64) -> bool {
        self.posted - self.retired + count < u64::from(self.depth)
    }

    fn post(&mut self, completed: Option<Completed>) -> WorkId {
        self.posted += 1;
        if let Some(completed) = completed {
            self.signaled.push_back((self.posted, completed));
        }
        WorkId(self.posted)
    }

    /// Whether the next control write is to be signalled.
    fn is_signal_due(&self) -> bool {
        let interval = SIGNAL_INTERVAL_MAX.min(u64::from(self.depth) / 2);
        (self.posted + 1).is_multiple_of(interval)
    }
}

/// The FIFO, and all that posting takes.
#[derive(Debug)]
pub struct Egress {
    peer: Descriptor,
    credits: Credits,
    windows: PeerWindows,
    queue: SendQueue,
    places: VecDeque<Entry>,
    places_max: usize,
    /// Posted places that nobody was told of.
    posted: usize,
    release: Option<BulkSequence>,
    /// What the peer must do before something that is ready can be posted, and since when.
    held_up: Option<(HeldUpBy, Duration)>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum HeldUpBy {
    Slot,
    Window,
}

impl Egress {
    /// An empty FIFO towards `peer`, over a send queue of `queue_depth` work requests.
    ///
    /// # Panics
    /// If `queue_depth` is below [`QUEUE_DEPTH_MIN`].
    pub fn new(peer: Descriptor, limits: Negotiated, queue_depth: u32) -> Self {
        let credits = Credits::new(peer.ring.slot_count());
        Self::resumed(peer, queue_depth, credits, PeerWindows::new(peer, limits))
    }

    /// As [`Egress::new`], from any point of both sequences.
    pub fn resumed(peer: Descriptor, queue_depth: u32, credits: Credits, windows: PeerWindows) -> Self {
        assert!(queue_depth >= QUEUE_DEPTH_MIN, "a send queue of {queue_depth}, fewer than {QUEUE_DEPTH_MIN}");
        let places_max = (credits.slot_count() as usize).saturating_mul(2);
        let queue = SendQueue { depth: queue_depth, posted: 0, retired: 0, signaled: VecDeque::new() };
        let places = VecDeque::new();
        Self { peer, credits, windows, queue, places, places_max, posted: 0, release: None, held_up: None }
    }

    /// Places that are left, of twice as many as the peer's ring has slots.
    pub fn room(&self) -> usize {
        self.places_max - self.places.len()
    }

    /// Places that are taken.
    pub fn place_count(&self) -> usize {
        self.places.len()
    }

    /// No place is taken and no RELEASE is due.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty() && self.release.is_none()
    }

    /// Work requests posted and not known to be done.
    pub fn outstanding(&self) -> u64 {
        self.queue.posted - self.queue.retired
    }

    /// Takes the next place.
    ///
    /// # Panics
    /// If there is no [`Egress::room`].
    pub fn enqueue(&mut self, place: Place) {
        assert!(self.room() > 0, "more places than {}", self.places_max);
        let state = if let Place::Inline { .. } = place { State::Inline } else { State::Unfilled };
        self.places.push_back(Entry { place, state });
    }

    /// The place of `ticket` is filled. Gives the slot back if there is no such place.
    pub fn handle_filled(&mut self, ticket: Ticket, slot: TxSlot) -> Option<TxSlot> {
        let Some(entry) = self.body_mut(ticket) else { return Some(slot) };
        assert!(matches!(entry.state, State::Unfilled), "{ticket:?} is filled once");
        entry.state = State::Filled(slot);
        None
    }

    /// The place of `ticket` cannot be filled.
    pub fn handle_failed(&mut self, ticket: Ticket) -> Failure {
        let Some(entry) = self.body_mut(ticket) else { return Failure::Broken };
        entry.state = State::Failed;
        let Place::Body { value, .. } = entry.place else { return Failure::Broken };
        let start_of_line = |entry: &Entry| {
            matches!(entry.place, Place::Inline { part_of: Some(PartOf::Line { value: of, start: true, .. }), .. }
                if of == value)
        };
        if !self.places.iter().any(start_of_line) {
            return Failure::Broken;
        }
        let before = self.places.len();
        let (mut cancelled, mut freed) = (Vec::new(), Vec::new());
        let mut kept = VecDeque::with_capacity(self.places.len());
        for mut entry in self.places.drain(..) {
            match &mut entry.place {
                Place::Inline { part_of: Some(PartOf::Line { value: of, .. }), .. } if *of == value => continue,
                Place::Inline { text, part_of } => {
                    if let Some(PartOf::Trailer { value: of, prefix }) = *part_of
                        && of == value
                    {
                        let Some(rest) = text.without_front(usize::from(prefix)) else { continue };
                        (*text, *part_of) = (rest, None);
                    }
                }
                Place::Body { value: of, ticket: other, .. } if *of == value => {
                    match entry.state {
                        State::Filled(slot) => freed.push(slot),
                        State::Unfilled => cancelled.push(*other),
                        State::Inline | State::Failed => {}
                    }
                    continue;
                }
                Place::Body { .. } => {}
            }
            kept.push_back(entry);
        }
        self.posted += before - kept.len();
        self.places = kept;
        Failure::Missed { value, cancelled, freed }
    }

    /// The front place can never be filled, and its value's line has left: the stream cannot go on.
    pub fn broken(&self) -> Option<Ticket> {
        match self.places.front() {
            Some(Entry { place: Place::Body { ticket, .. }, state: State::Failed }) => Some(*ticket),
            _ => None,
        }
    }

    /// What comes next is short and will be there in no time: what was posted need not be hurried on its way alone.
    pub fn awaits_short_body(&self) -> bool {
        matches!(self.places.front(), Some(Entry { place: Place::Body { len, .. }, state: State::Unfilled })
            if len.get() <= SHORT_BODY_BYTES)
    }

    /// All windows up to that of `sequence` are to be released. Takes the place of an older one that is due.
    pub fn handle_release_due(&mut self, sequence: BulkSequence) {
        assert!(self.release.is_none_or(|older| older < sequence), "releases only grow");
        self.release = Some(sequence);
    }

    /// The peer released windows of its own.
    ///
    /// # Errors
    /// As [`PeerWindows::handle_release`].
    pub fn handle_released(&mut self, sequence: BulkSequence) -> Result<(), Poison> {
        self.windows.handle_release(sequence)
    }

    /// The peer sent a record.
    pub fn handle_record(&mut self) {
        self.credits.handle_record();
    }

    /// What a Read of the peer's counter brought.
    ///
    /// # Errors
    /// As [`Credits::handle_read`].
    pub fn handle_credits(&mut self, consumed: u64, now: Duration) -> Result<(), Poison> {
        self.credits.handle_read(consumed, now)
    }

    /// A signalled work request is done, and all before it.
    ///
    /// # Errors
    /// [`Poison::UnexpectedCompletion`].
    pub fn handle_completion(&mut self, id: WorkId) -> Result<Completed, Poison> {
        let expected = self.queue.signaled.front().map_or(0, |(expected, _)| *expected);
        match self.queue.signaled.pop_front() {
            Some((number, completed)) if number == id.0 => {
                self.queue.retired = number;
                Ok(completed)
            }
            _ => Err(Poison::UnexpectedCompletion { found: id.0, expected }),
        }
    }

    /// Gives memory back while no place is taken.
    pub fn rest(&mut self) {
        if self.places.is_empty() {
            self.places = VecDeque::new();
        }
    }

    /// The queue pair is gone and nothing of it is under way: all slots that were posted or filled.
    pub fn take_slots(&mut self) -> Vec<TxSlot> {
        let posted = self.queue.signaled.drain(..).filter_map(|(_, completed)| match completed {
            Completed::Slot(slot) => Some(slot),
            Completed::Control | Completed::Credits => None,
        });
        let filled = self.places.drain(..).filter_map(|entry| match entry.state {
            State::Filled(slot) => Some(slot),
            State::Inline | State::Unfilled | State::Failed => None,
        });
        posted.chain(filled).collect()
    }

    /// The next thing to post. Call it until it gives nothing.
    ///
    /// # Errors
    /// [`Poison`]: a sequence is used up.
    pub fn poll_post(&mut self, now: Duration) -> Result<Option<Post>, Poison> {
        if let Some(sequence) = self.release {
            if !self.credits.is_free(Purpose::Release) {
                // Nothing overtakes it.
                self.hold_up(HeldUpBy::Slot, now);
                return Ok(self.poll_credits(now, true));
            }
            if !self.queue.has_room(1) {
                return Ok(None);
            }
            self.release = None;
            return self.post_control(&Record::Release { sequence }).map(Some);
        }
        let Some(front) = self.places.front() else {
            self.held_up = None;
            return Ok(None);
        };
        let (is_ready, work_count) = match (&front.place, &front.state) {
            (Place::Inline { part_of: Some(PartOf::Line { held_by, .. }), .. }, _) => (self.is_filled(*held_by), 1),
            (Place::Inline { .. }, _) => (true, 1),
            (Place::Body { .. }, state) => (matches!(state, State::Filled(_)), 2),
        };
        if !is_ready {
            self.held_up = None;
            return Ok(None);
        }
        if work_count == 2 && !self.windows.is_free() {
            self.hold_up(HeldUpBy::Window, now);
            return Ok(None);
        }
        if !self.credits.is_free(Purpose::Stream) {
            self.hold_up(HeldUpBy::Slot, now);
            return Ok(self.poll_credits(now, true));
        }
        self.held_up = None;
        if let Some(read) = self.poll_credits(now, false) {
            return Ok(Some(read));
        }
        if !self.queue.has_room(work_count) {
            return Ok(None);
        }
        let Some(front) = self.places.pop_front() else { return Ok(None) };
        self.posted += 1;
        match (front.place, front.state) {
            (Place::Body { len, .. }, State::Filled(slot)) => self.post_body(slot, len).map(Some),
            (Place::Inline { text, .. }, _) => self.post_control(&Record::Inline(text.as_bytes())).map(Some),
            (Place::Body { .. }, _) => Ok(None),
        }
    }

    /// Places that have left since the last call: as many can be taken anew.
    pub fn take_posted(&mut self) -> usize {
        std::mem::take(&mut self.posted)
    }

    /// When [`Egress::poll_post`] has to be called again though nothing happened.
    pub fn deadline(&self) -> Option<Duration> {
        self.credits.deadline().filter(|_| matches!(self.held_up, Some((HeldUpBy::Slot, _))))
    }

    /// Since when something is ready and waits for the peer to consume a record or to release a window.
    pub fn held_up_since(&self) -> Option<Duration> {
        self.held_up.map(|(_, since)| since)
    }

    fn hold_up(&mut self, by: HeldUpBy, now: Duration) {
        if self.held_up.is_none_or(|(before, _)| before != by) {
            self.held_up = Some((by, now));
        }
    }

    /// A Read of the peer's counter, if one is due: because something waits for it, or to look ahead.
    fn poll_credits(&mut self, now: Duration, waiting: bool) -> Option<Post> {
        let worth = waiting || self.credits.is_low() && self.credits.deadline().is_none();
        if !worth || !self.queue.has_room(1) || !self.credits.poll_read(now) {
            return None;
        }
        let id = self.queue.post(Some(Completed::Credits));
        let from = self.in_ring(CONSUMED_OFFSET as u64);
        Some(Post::Credits { id, from })
    }

    fn post_control(&mut self, record: &Record<'_>) -> Result<Post, Poison> {
        let write = SlotWrite::new(record, self.credits.take()?, self.credits.slot_count());
        let signaled = self.queue.is_signal_due();
        let id = self.queue.post(signaled.then_some(Completed::Control));
        Ok(Post::Control { id, to: self.in_ring(write.offset()), write, signaled })
    }

    fn post_body(&mut self, slot: TxSlot, len: NonZeroU32) -> Result<Post, Poison> {
        let (sequence, to) = self.windows.take()?;
        let index = slot.index();
        let id = self.queue.post(Some(Completed::Slot(slot)));
        let control = self.credits.take()?;
        let ready = SlotWrite::new(&Record::Ready { sequence, len }, control, self.credits.slot_count());
        let ready_id = self.queue.post(None);
        let ready_to = self.in_ring(ready.offset());
        Ok(Post::Body { id, slot: index, len: len.get(), to, ready_id, ready_to, ready })
    }

    fn in_ring(&self, offset: u64) -> RemoteAddress {
        // Cannot wrap: the region ends below 2^64, see `Descriptor::decode`.
        RemoteAddress { address: self.peer.ring_at.address + offset, key: self.peer.ring_at.key }
    }

    fn body_mut(&mut self, ticket: Ticket) -> Option<&mut Entry> {
        self.places.iter_mut().find(|entry| matches!(entry.place, Place::Body { ticket: of, .. } if of == ticket))
    }

    fn is_filled(&self, ticket: Ticket) -> bool {
        self.places
            .iter()
            .find(|entry| matches!(entry.place, Place::Body { ticket: of, .. } if of == ticket))
            .is_some_and(|entry| matches!(entry.state, State::Filled(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Nonce, RemoteKey, RingGeometry, WindowGeometry};
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn egress(slot_count: u32, window_count: u32) -> Egress {
        let at = |address| RemoteAddress { address, key: RemoteKey(1) };
        let windows = WindowGeometry::new(4096, window_count).unwrap();
        let peer = Descriptor {
            ring: RingGeometry::new(slot_count).unwrap(),
            ring_at: at(0x1000),
            ring_bytes: 1 << 20,
            nonce: Nonce(0),
            windows,
            bulk_at: at(0x1000_0000),
        };
        Egress::new(peer, Negotiated::between(windows, windows), 64)
    }

    fn text(text: &str) -> Place {
        Place::Inline { text: InlineText::first_of(text.as_bytes()), part_of: None }
    }

    fn body(ticket: u64, value: u64) -> Place {
        Place::Body { ticket: Ticket(ticket), len: NonZeroU32::new(9).unwrap(), value: ValueId(value) }
    }

    fn line(held_by: u64, value: u64, start: bool) -> Place {
        let part_of = Some(PartOf::Line { value: ValueId(value), held_by: Ticket(held_by), start });
        Place::Inline { text: InlineText::first_of(b"VALUE "), part_of }
    }

    fn slots(count: usize) -> Vec<TxSlot> {
        let mut slots = super::super::window::TxSlots::new(count as u32);
        (0..count as u64)
            .map(|ticket| {
                slots.handle_fill(Ticket(ticket), (), true);
                slots.poll_grant();
                slots.handle_filled(Ticket(ticket)).unwrap()
            })
            .collect()
    }

    /// What is posted until nothing more is: text, `body len@slot`, `release n`, `credits`.
    fn posts(egress: &mut Egress) -> Vec<String> {
        let mut posts = Vec::new();
        while let Some(post) = egress.poll_post(NOW).unwrap() {
            posts.push(match post {
                Post::Control { write, .. } => match Record::decode(&write.octets()[..write.octets().len() - 8]) {
                    Ok(Record::Inline(octets)) => String::from_utf8_lossy(octets).into_owned(),
                    Ok(Record::Release { sequence }) => format!("release {}", sequence.get()),
                    other => panic!("{other:?}"),
                },
                Post::Body { slot, len, .. } => format!("body {len}@{slot}"),
                Post::Credits { .. } => "credits".to_owned(),
            });
        }
        posts
    }

    #[test]
    fn places_leave_from_the_front_however_they_are_filled() {
        let mut egress = egress(64, 4);
        let mut slots = slots(3).into_iter();
        for place in [text("a"), body(0, 0), body(1, 0), text("b"), body(2, 1), text("c")] {
            egress.enqueue(place);
        }
        assert_eq!(posts(&mut egress), ["a"]);
        egress.handle_filled(Ticket(2), slots.next().unwrap());
        egress.handle_filled(Ticket(1), slots.next().unwrap());
        assert_eq!(posts(&mut egress), [""; 0]);
        egress.handle_filled(Ticket(0), slots.next().unwrap());
        assert_eq!(posts(&mut egress), ["body 9@2", "body 9@1", "b", "body 9@0", "c"]);
        assert_eq!(egress.take_posted(), 6);
        assert_eq!(egress.take_posted(), 0);
    }

    #[test]
    fn a_release_goes_first_and_only_the_newest() {
        let mut egress = egress(8, 4);
        egress.enqueue(text("a"));
        egress.handle_release_due(BulkSequence::new(1).unwrap());
        egress.handle_release_due(BulkSequence::new(3).unwrap());
        assert_eq!(posts(&mut egress), ["release 3", "a"]);
    }

    #[test]
    fn a_full_ring_keeps_one_slot_for_a_release_and_reads_the_counter() {
        let mut egress = egress(2, 4);
        for _ in 0..2 {
            egress.enqueue(text("a"));
        }
        assert_eq!(posts(&mut egress), ["a", "credits"]);
        egress.handle_release_due(BulkSequence::FIRST);
        assert_eq!(posts(&mut egress), ["release 1"]);
        egress.handle_release_due(BulkSequence::new(2).unwrap());
        assert_eq!(posts(&mut egress), [""; 0]);
        assert_eq!(egress.handle_completion(WorkId(2)), Ok(Completed::Credits));
        egress.handle_credits(1, NOW).unwrap();
        assert_eq!(posts(&mut egress), ["release 2", "credits"], "a release before the text that waited longer");
        assert_eq!(egress.deadline(), None, "the Read is under way");
        assert_eq!(egress.handle_completion(WorkId(5)), Ok(Completed::Credits));
        egress.handle_credits(1, NOW).unwrap();
        assert_eq!(posts(&mut egress), [""; 0]);
        assert_eq!(egress.deadline(), Some(NOW + super::super::credit::REST_MIN));
    }

    #[test]
    fn bodies_stop_at_the_windows_of_the_peer_and_go_on_with_its_release() {
        let mut egress = egress(64, 2);
        for (ticket, slot) in slots(3).into_iter().enumerate() {
            egress.enqueue(body(ticket as u64, 0));
            assert_eq!(egress.handle_filled(Ticket(ticket as u64), slot), None);
        }
        assert_eq!(posts(&mut egress), ["body 9@0", "body 9@1"]);
        egress.handle_released(BulkSequence::FIRST).unwrap();
        assert_eq!(posts(&mut egress), ["body 9@2"]);
    }

    #[test]
    fn the_send_queue_is_never_overrun_and_completions_come_in_order() {
        let mut egress = egress(1024, 4);
        for _ in 0..200 {
            egress.enqueue(text("a"));
        }
        assert_eq!(posts(&mut egress).len(), 63);
        assert_eq!(egress.outstanding(), 63);
        let wrong = egress.handle_completion(WorkId(31)).unwrap_err();
        assert_eq!(wrong, Poison::UnexpectedCompletion { found: 31, expected: 32 });
        let mut egress = self::egress(1024, 4);
        for _ in 0..200 {
            egress.enqueue(text("a"));
        }
        posts(&mut egress);
        assert_eq!(egress.handle_completion(WorkId(32)), Ok(Completed::Control));
        assert_eq!(posts(&mut egress).len(), 32);
    }

    #[test]
    fn a_value_whose_first_octets_cannot_be_had_was_never_there() {
        let mut egress = egress(64, 4);
        let part_of = Some(PartOf::Trailer { value: ValueId(7), prefix: 2 });
        let trailer = Place::Inline { text: InlineText::first_of(b"\r\nEND\r\n"), part_of };
        for place in [text("a"), line(0, 7, true), line(0, 7, false), body(0, 7), body(1, 7), body(2, 7), trailer] {
            egress.enqueue(place);
        }
        let slot = slots(1).pop().unwrap();
        assert_eq!(egress.handle_filled(Ticket(1), slot), None);
        assert_eq!(posts(&mut egress), ["a"], "the line is held");
        let Failure::Missed { value, cancelled, freed } = egress.handle_failed(Ticket(0)) else { panic!("broken") };
        assert_eq!((value, cancelled, freed.len()), (ValueId(7), vec![Ticket(2)], 1));
        assert_eq!(posts(&mut egress), ["END\r\n"]);
        assert_eq!(egress.take_posted(), 7, "all places are free again");
        assert_eq!(
            egress.handle_filled(Ticket(2), freed.into_iter().next().unwrap()).map(|slot| slot.index()),
            Some(0)
        );
    }

    #[test]
    fn a_value_whose_line_has_left_breaks_the_stream_where_its_octets_were_due() {
        let mut egress = egress(64, 4);
        let mut slots = slots(2).into_iter();
        for place in [line(0, 7, true), body(0, 7), body(1, 7)] {
            egress.enqueue(place);
        }
        egress.handle_filled(Ticket(0), slots.next().unwrap());
        egress.windows = {
            let mut full = PeerWindows::new(egress.peer, Negotiated { fragment_bytes_max: 4096, in_flight_max: 1 });
            full.take().unwrap();
            full
        };
        assert_eq!(posts(&mut egress), ["VALUE "]);
        assert_eq!(egress.handle_failed(Ticket(1)), Failure::Broken);
        assert_eq!(egress.broken(), None, "what is before it still leaves");
        egress.handle_released(BulkSequence::FIRST).unwrap();
        assert_eq!(posts(&mut egress), ["body 9@0"]);
        assert_eq!(egress.broken(), Some(Ticket(1)));
        assert_eq!(egress.take_slots().len(), 1);
    }
}
