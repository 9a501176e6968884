//! One side of a connection, whole: ring, windows, egress, and the stream between them and a conversation.
//!
//! ```text
//!              own memory                                          posts
//!                 | poll_ring                            poll_post   ^
//!                 v                                                  |
//!                 Intake --------> Inbound --> machine ... Outbound --> Egress <-- handle_completion
//!                                (step)     (text, value) |          ^
//!                                                         v          | handle_filled
//!                                                      TxSlots -- poll_fill --> memory or disk
//! ```
//!
//! The owner does the I/O and tells the time. It calls [`Endpoint::poll_ring`] when memory or a completion may have
//! changed, steps the machine, adds answers to [`Endpoint::outbound`], then serves [`Endpoint::poll_fill`] and
//! [`Endpoint::poll_post`] until both give nothing, and comes back at [`Endpoint::deadline`] at the latest.

use super::conversation::{Conversation, Step};
use super::descriptor::{Descriptor, Negotiated};
use super::egress::{Completed, Egress, Failure, Post, WorkId};
use super::intake::{Arrival, Intake, Look, StopWatch};
use super::poison::Poison;
use super::requester::{Answer, Requester, Shape};
use super::ring::RingMemory;
use super::stream::{Inbound, Outbound, Piece, Value};
use super::window::{FailedFill, Grant, Releases, RxLease, Ticket, TxSlots};
use std::time::Duration;
use thiserror::Error;

/// What an endpoint is made of.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub own: Descriptor,
    pub peer: Descriptor,
    /// Work requests that the send queue takes, at least [`QUEUE_DEPTH_MIN`](super::egress::QUEUE_DEPTH_MIN).
    pub queue_depth: u32,
    /// See [`Inbound::new`].
    pub pipeline_bytes_max: usize,
    /// How long unread text may fill the pipeline, and how long what is ready to be sent may wait for the peer.
    pub stall_timeout: Duration,
}

/// Why an endpoint ends by itself.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum EndCause {
    #[error(transparent)]
    Poison(#[from] Poison),
    #[error("more requests than are kept, and none of them moved")]
    PipelineTooDeep,
    #[error("the peer consumed nothing and released nothing for too long, and something waits for it")]
    Stalled,
    #[error("the octets of a value were lost after its line had left")]
    FailedRead,
}

impl EndCause {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Poison(poison) => poison.cause(),
            Self::PipelineTooDeep => "pipeline_too_deep",
            Self::Stalled => "stalled",
            Self::FailedRead => "failed_read",
        }
    }
}

/// A fill that failed twice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FailedPiece<V> {
    /// Nothing of its value had left: the peer is told of no such value.
    Missed(V),
    /// The stream ends where its octets are due.
    Broken(V),
}

/// One side of a connection. `V` is what the owner finds the octets of a value by; `M` the half of the conversation:
/// [`Conversation`] or [`Requester`].
#[derive(Debug)]
pub struct Endpoint<V, M> {
    /// What came and was not read.
    pub inbound: Inbound,
    /// What is to be sent and has no place yet.
    pub outbound: Outbound<V>,
    /// Reads `inbound`.
    pub machine: M,
    intake: Intake,
    releases: Releases,
    slots: TxSlots<Piece<V>>,
    egress: Egress,
    stopped: StopWatch,
    stall_timeout: Duration,
    ended: bool,
}

impl<V: Clone, M> Endpoint<V, M> {
    /// Before its first record.
    pub fn new(settings: Settings, machine: M) -> Self {
        let Settings { own, peer, queue_depth, pipeline_bytes_max, stall_timeout } = settings;
        let limits = Negotiated::between(own.windows, peer.windows);
        let intake = Intake::new(own.ring, own.windows, limits);
        Self {
            inbound: Inbound::new(pipeline_bytes_max),
            outbound: Outbound::new(limits.fragment_bytes_max),
            machine,
            releases: intake.releases(),
            intake,
            slots: TxSlots::new(own.windows.window_count()),
            egress: Egress::new(peer, limits, queue_depth),
            stopped: StopWatch::default(),
            stall_timeout,
            ended: false,
        }
    }

    /// Takes up to `count_max` records out of the own ring. Returns how many; fewer means that no more can be taken now.
    ///
    /// # Errors
    /// [`EndCause`].
    pub fn poll_ring(&mut self, memory: &impl RingMemory, now: Duration, count_max: usize) -> Result<usize, EndCause> {
        let mut count = 0;
        while count < count_max && !self.ended {
            match self.intake.poll(memory, self.inbound.room())? {
                Look::Empty => break,
                Look::Full => {
                    let read = self.inbound.read_bytes();
                    self.stopped.handle_stopped(now, read);
                    self.stopped.check(now, read, self.stall_timeout)?;
                    break;
                }
                Look::Arrived(Arrival::Inline(text)) => self.inbound.handle_inline(text.as_bytes()),
                Look::Arrived(Arrival::Ready(lease)) => self.inbound.handle_ready(lease),
                Look::Arrived(Arrival::Released(sequence)) => self.egress.handle_released(sequence)?,
            }
            self.stopped.handle_arrival();
            self.egress.handle_record();
            count += 1;
        }
        Ok(count)
    }

    /// Gives places to what is to be sent, and says which slot to fill with what. Each grant is answered by
    /// [`Endpoint::handle_filled`] or [`Endpoint::handle_fill_failed`], at once or later, in any order.
    pub fn poll_fill(&mut self) -> Option<Grant<Piece<V>>> {
        if self.ended {
            return None;
        }
        while self.egress.room() > 0
            && let Some((place, fill)) = self.outbound.poll_place()
        {
            self.egress.enqueue(place);
            if let Some(fill) = fill {
                self.slots.handle_fill(fill.ticket, fill.piece, fill.slow);
            }
        }
        self.slots.poll_grant()
    }

    /// A slot holds its octets.
    pub fn handle_filled(&mut self, ticket: Ticket) {
        if let Some(slot) = self.slots.handle_filled(ticket)
            && let Some(slot) = self.egress.handle_filled(ticket, slot)
        {
            self.slots.handle_retired(slot);
        }
    }

    /// A slot could not be filled. After the first time [`Endpoint::poll_fill`] asks once more.
    pub fn handle_fill_failed(&mut self, ticket: Ticket) -> Option<FailedPiece<V>> {
        let FailedFill::GaveUp(piece) = self.slots.handle_failed(ticket) else { return None };
        match self.egress.handle_failed(ticket) {
            Failure::Missed { value, cancelled, freed } => {
                cancelled.into_iter().for_each(|ticket| self.slots.cancel(ticket));
                freed.into_iter().for_each(|slot| self.slots.handle_retired(slot));
                self.outbound.handle_missed(value);
                Some(FailedPiece::Missed(piece.value))
            }
            Failure::Broken => Some(FailedPiece::Broken(piece.value)),
        }
    }

    /// A signalled work request is done. `counter` gives what the last Read found; it is asked only where that is over.
    ///
    /// # Errors
    /// [`EndCause`].
    pub fn handle_completion(
        &mut self,
        id: WorkId,
        counter: impl FnOnce() -> u64,
        now: Duration,
    ) -> Result<(), EndCause> {
        match self.egress.handle_completion(id)? {
            Completed::Control => {}
            Completed::Slot(slot) => self.slots.handle_retired(slot),
            Completed::Credits => self.egress.handle_credits(counter(), now)?,
        }
        Ok(())
    }

    /// The next thing to post. Call it until it gives nothing, after [`Endpoint::poll_fill`] gave nothing.
    ///
    /// # Errors
    /// [`EndCause`].
    pub fn poll_post(&mut self, now: Duration) -> Result<Option<Post>, EndCause> {
        if self.ended {
            return Ok(None);
        }
        if let Some(sequence) = self.releases.poll() {
            self.egress.handle_release_due(sequence);
        }
        let post = self.egress.poll_post(now)?;
        if post.is_none() && self.egress.broken().is_some() {
            return Err(EndCause::FailedRead);
        }
        if self.egress.held_up_since().is_some_and(|since| now >= since + self.stall_timeout) {
            return Err(EndCause::Stalled);
        }
        Ok(post)
    }

    /// Places came free since the last call: [`Endpoint::poll_fill`] may give more.
    pub fn take_posted(&mut self) -> usize {
        self.egress.take_posted()
    }

    /// When to call [`Endpoint::poll_ring`] and [`Endpoint::poll_post`] again though nothing happened.
    pub fn deadline(&self) -> Option<Duration> {
        let stalled = [self.stopped.since(), self.egress.held_up_since()].into_iter().flatten().min();
        [stalled.map(|since| since + self.stall_timeout), self.egress.deadline()]
            .into_iter()
            .flatten()
            .min()
            .filter(|_| !self.ended)
    }

    /// Nothing is on its way in or out.
    pub fn is_idle(&self) -> bool {
        self.inbound.is_empty() && self.is_sent() && self.is_released()
    }

    /// All that was to be sent has been posted.
    pub fn is_sent(&self) -> bool {
        self.outbound.is_empty() && self.egress.is_empty()
    }

    /// Gives memory back that only a busy connection needs.
    pub fn rest(&mut self) {
        self.inbound.rest();
        self.outbound.rest();
        self.egress.rest();
    }

    /// The queue pair is gone and its last completion has come: nothing more is posted or granted.
    pub fn handle_disconnected(&mut self) {
        self.ended = true;
        self.slots.cancel_all();
        self.egress.take_slots().into_iter().for_each(|slot| self.slots.handle_retired(slot));
        self.inbound = Inbound::new(0);
    }

    /// Every slot is back and every lease dropped: the memory behind them can go.
    pub fn is_released(&self) -> bool {
        self.slots.is_idle() && self.releases.held() == 0
    }
}

impl<V: Clone> Endpoint<V, Conversation> {
    /// The server's next step, see [`Conversation::step`].
    ///
    /// # Errors
    /// [`Poison`].
    pub fn step(&mut self) -> Result<Step<'_>, Poison> {
        self.machine.step(&mut self.inbound)
    }

    /// Takes the window that [`Step::Body`] told of.
    ///
    /// # Panics
    /// If the last step was none.
    pub fn take_body(&mut self) -> RxLease {
        self.machine.take_body(&mut self.inbound)
    }
}

impl<V: Clone> Endpoint<V, Requester> {
    /// The client's next step, see [`Requester::step`].
    ///
    /// # Errors
    /// [`Poison`].
    pub fn step(&mut self) -> Result<Answer<'_>, Poison> {
        self.machine.step(&mut self.inbound)
    }

    /// Takes the window that [`Answer::Body`] told of.
    ///
    /// # Panics
    /// If the last step was none.
    pub fn take_body(&mut self) -> RxLease {
        self.machine.take_body(&mut self.inbound)
    }

    /// Asks with a line, which ends with CR LF.
    ///
    /// # Panics
    /// If the machine [can't](Requester::can_ask) ask with so many octets.
    pub fn ask(&mut self, line: &[u8], shape: Shape) {
        self.machine.handle_asked(shape, line.len());
        self.outbound.text(line);
    }

    /// Asks with a storage line, which ends with CR LF, and a body of `len` octets; see [`Endpoint::poll_fill`].
    ///
    /// # Panics
    /// If the machine [can't](Requester::can_ask) ask with the line's octets and two.
    pub fn ask_store(&mut self, line: &[u8], source: V, len: u64) {
        self.machine.handle_asked(Shape::Line, line.len() + 2);
        if len > 0 {
            self.outbound.value(line, Value { source, len, quick_len: len });
        } else {
            self.outbound.text(line);
            self.outbound.fresh_text(b"\r\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Nonce, RemoteAddress, RemoteKey, RingGeometry, WindowGeometry};
    use super::super::record::Record;
    use super::super::ring::SlotWrite;
    use super::super::ring::tests::TestRegion;
    use super::super::stream::PIPELINE_BYTES_MIN;
    use super::*;
    use crate::wire::memcache::Command;
    use crate::wire::seq::{BulkSequence, ControlSequence};

    const STALL: Duration = Duration::from_secs(30);

    fn side(slot_count: u32) -> Descriptor {
        let at = |address| RemoteAddress { address, key: RemoteKey(1) };
        let (ring, windows) = (RingGeometry::new(slot_count).unwrap(), WindowGeometry::new(4096, 2).unwrap());
        let ring_bytes = ring.mapping_bytes(4096) as u32;
        Descriptor { ring, ring_at: at(1 << 32), ring_bytes, nonce: Nonce::ours(0), windows, bulk_at: at(1 << 40) }
    }

    /// A server and the ring that its peer writes to.
    struct Served {
        endpoint: Endpoint<(), Conversation>,
        region: TestRegion,
        next: ControlSequence,
    }

    impl Served {
        fn new() -> Self {
            let (own, peer) = (side(256), side(256));
            let pipeline_bytes_max = PIPELINE_BYTES_MIN;
            let settings = Settings { own, peer, queue_depth: 64, pipeline_bytes_max, stall_timeout: STALL };
            let endpoint = Endpoint::new(settings, Conversation::new());
            Self { endpoint, region: TestRegion::new(256), next: ControlSequence::FIRST }
        }

        fn come(&mut self, record: &Record<'_>) {
            self.region.write(&SlotWrite::new(record, self.next, 256));
            self.next = self.next.next().unwrap();
        }

        /// Fills and posts all that can be; gives the bodies among it.
        fn bodies(&mut self) -> usize {
            let mut count = 0;
            while let Some(grant) = self.endpoint.poll_fill() {
                self.endpoint.handle_filled(grant.ticket);
            }
            while let Some(post) = self.endpoint.poll_post(Duration::ZERO).unwrap() {
                if let Post::Body { id, .. } = post {
                    count += 1;
                    self.endpoint.handle_completion(id, || panic!("no Read was posted"), Duration::ZERO).unwrap();
                    while let Some(grant) = self.endpoint.poll_fill() {
                        self.endpoint.handle_filled(grant.ticket);
                    }
                }
            }
            count
        }
    }

    /// The reference server leaves the second command in its ring while it answers the first, and never sees the
    /// releases behind it: an answer longer than the windows then hangs for good.
    #[test]
    fn releases_behind_a_pipelined_command_are_seen_while_an_answer_is_under_way() {
        let mut served = Served::new();
        served.come(&Record::Inline(b"get k\r\n"));
        served.come(&Record::Inline(b"version\r\n"));
        assert_eq!(served.endpoint.poll_ring(&served.region, Duration::ZERO, 100), Ok(2));
        assert!(matches!(served.endpoint.step(), Ok(Step::Command(Command::Get { .. }))));
        let value = Value { source: (), len: 6 * 4096, quick_len: 6 * 4096 };
        served.endpoint.outbound.value(b"VALUE k 0 24576\r\n", value);
        assert_eq!(served.bodies(), 2);
        for released in [1, 2, 4] {
            served.come(&Record::Release { sequence: BulkSequence::new(released).unwrap() });
            assert_eq!(served.endpoint.poll_ring(&served.region, Duration::ZERO, 100), Ok(1));
            let expected = if released == 4 { 2 } else { 1 };
            assert_eq!(served.bodies(), expected, "after release {released}");
        }
        assert_eq!(served.endpoint.step(), Ok(Step::Command(Command::Version)), "read long before the answer was out");
    }

    #[test]
    fn a_pipeline_that_is_full_and_does_not_move_ends_the_connection() {
        let mut served = Served::new();
        let line = [b"get ", &[b'k'; 185][..], b"\r\n"].concat();
        assert_eq!(line.len(), 191);
        let fitting = PIPELINE_BYTES_MIN / 191;
        for _ in 0..=fitting {
            served.come(&Record::Inline(&line));
        }
        served.come(&Record::Release { sequence: BulkSequence::FIRST });
        let poll = |served: &mut Served, now| served.endpoint.poll_ring(&served.region, now, 1000);
        assert_eq!(poll(&mut served, STALL), Ok(fitting));
        assert_eq!(served.endpoint.deadline(), Some(STALL * 2));
        assert_eq!(poll(&mut served, STALL * 2 - Duration::from_nanos(1)), Ok(0));
        assert!(matches!(served.endpoint.step(), Ok(Step::Command(_))), "a line is read");
        // One line of room is enough for the record that waited, and the one behind it is judged: it was never sent.
        let error = poll(&mut served, STALL * 2).unwrap_err();
        assert_eq!(error, EndCause::Poison(Poison::ReleaseUnsent { found: 1, sent: 0 }));

        let mut served = Served::new();
        for _ in 0..=fitting {
            served.come(&Record::Inline(&line));
        }
        assert_eq!(poll(&mut served, STALL), Ok(fitting));
        assert_eq!(poll(&mut served, STALL * 2), Err(EndCause::PipelineTooDeep));
    }

    #[test]
    fn a_peer_that_releases_nothing_ends_the_connection() {
        let mut served = Served::new();
        let value = Value { source: (), len: 4 * 4096, quick_len: 4 * 4096 };
        served.endpoint.outbound.value(b"VALUE k 0 16384\r\n", value);
        assert_eq!(served.bodies(), 2);
        assert_eq!(served.endpoint.deadline(), Some(STALL));
        served.come(&Record::Release { sequence: BulkSequence::FIRST });
        let now = STALL - Duration::from_secs(1);
        assert_eq!(served.endpoint.poll_ring(&served.region, now, 9), Ok(1));
        assert!(matches!(served.endpoint.poll_post(now), Ok(Some(Post::Body { .. }))));
        assert!(matches!(served.endpoint.poll_post(now), Ok(None)));
        // A release that says nothing new does not count as life.
        served.come(&Record::Release { sequence: BulkSequence::FIRST });
        assert_eq!(served.endpoint.poll_ring(&served.region, STALL, 9), Ok(1));
        assert_eq!(served.endpoint.deadline(), Some(now + STALL));
        assert_eq!(served.endpoint.poll_post(now + STALL).unwrap_err(), EndCause::Stalled);
    }

    #[test]
    fn after_the_end_nothing_is_posted_and_every_slot_comes_back() {
        let mut served = Served::new();
        let value = Value { source: (), len: 4 * 4096, quick_len: 0 };
        served.endpoint.outbound.value(b"VALUE k 0 16384\r\n", value);
        let first = served.endpoint.poll_fill().unwrap();
        served.endpoint.handle_disconnected();
        assert!(!served.endpoint.is_released(), "a disk still writes to a slot");
        served.endpoint.handle_filled(first.ticket);
        assert!(served.endpoint.is_released());
        assert!(served.endpoint.poll_fill().is_none());
        assert!(matches!(served.endpoint.poll_post(Duration::ZERO), Ok(None)));
        served.come(&Record::Inline(b"x"));
        assert_eq!(served.endpoint.poll_ring(&served.region, Duration::ZERO, 9), Ok(0));
    }
}
