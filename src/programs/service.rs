//! The calls of one connection, from the message that brings one to the Send that answers it. Decides everything, moves
//! nothing itself: what has to be posted, filled, reserved or waited for is an [`Output`].
//!
//! ```text
//!                 long call                      PUT behind a long call
//!  handle_message ────────▶ Queued ─▶ Pulling ─┬──────▶ Held ──┐
//!        └──────────────────────────────────── dispatch ◀──────┘
//!                                                 │  ├─▶ Waiting (room for a long reply) ─▶ dispatch
//!                                                 │  ├─▶ Busy (a READ; pins) ─▶ dispatch
//!                                                 │  └─▶ Twin (it runs on another connection) ─▶ dispatch
//!           ┌──────────────┬──────────────────────┤
//!           ▼              ▼                      ▼
//!        Getting        Putting, Writing       answered at once
//!     places: Write   Reads: into the draft       │      (Writing, its first octets: ─▶ Twin, or dispatch, or answered)
//!           │              └─▶ Closing (Reads outstanding)
//!           └──────────────┬──────────────────────┘
//!                          ▼
//!                      Answering: Writes of a long reply, then the Send ─▶ handle_sent: forgotten
//! ```
//! **Order.** Calls are independent of each other. Within one, RDMA Reads have ended before it is answered, and its Writes
//! are handed out before its Send. PUT, PUT_MORE and PUT_DROP begin in the order in which they came.
//!
//! **Programs.** `bulkhead` is always served, NFS and MOUNT where there is an [`Export`]; GET and READ are one path here, and what
//! differs between programs is in `request` and `dispatching`.
//!
//! **Bounds.** Long calls and long replies are held within a budget each, of which a call takes its share at once and keeps it
//! until it is answered; octets of values are never held but in buffers that are counted, of which a WRITE that waits for space
//! keeps those it has and gets no more. Whoever waits for pins has neither pins nor room for its reply, and whoever waits for such
//! room has none. So no two calls wait for each other.

mod answering;
mod call;
mod dispatching;
mod getting;
mod pulling;
mod putting;
mod reading;
mod request;
#[cfg(test)]
mod tests;
mod writing;

pub(in crate::programs) use dispatching::denial_of;

use crate::metrics::Metrics;
use crate::programs::bulkhead::put::PutId;
use crate::programs::bulkhead::session::Session;
use crate::programs::bulkhead::{CALL_BYTES_MAX, PUT_BYTES_MAX};
use crate::programs::nfs::{Client, Export};
use crate::store::Store;
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::Want;
use crate::store::object::{Object, Piece, Range, Run};
use crate::store::segment::Filling;
use crate::wire::native::window::Ticket;
use crate::wire::rpcrdma::duplicate::{Admission, Bounds, CallKey, CallMark, DuplicateCache};
use crate::wire::rpcrdma::private_data::Agreed;
use crate::wire::rpcrdma::responder::{DropReason, Fault, IncomingCall, Limits, Received, Responder};
use crate::wire::rpcrdma::{RemoteKey, Xid};
use call::{Budget, Call, Place, Stage};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::mem;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Replies that all connections remember together, and their octets.
///
/// After two minutes, as long as Linux's server waits, a call is another one: a copy that is under way comes within the time in
/// which a client connects again.
pub const DUPLICATES: Bounds = Bounds { entries_max: 4096, bytes_max: 1 << 20, age_max: Duration::from_secs(120) };

/// What the connections of all RPC doors share: see [`DuplicateCache`], to which it tells the time.
#[derive(Debug)]
pub struct Shared {
    duplicates: Mutex<DuplicateCache>,
    started: Instant,
}

impl Default for Shared {
    fn default() -> Self {
        Self::new(DUPLICATES)
    }
}

impl Shared {
    pub fn new(bounds: Bounds) -> Self {
        Self { duplicates: Mutex::new(DuplicateCache::new(bounds)), started: Instant::now() }
    }

    /// The memory of `peer` refused an RDMA Read or Write of this call, which ended their connection: when it comes again it is
    /// refused.
    pub fn handle_refused(&self, peer: IpAddr, call: CallMark) {
        self.with(|duplicates, now| duplicates.handle_rdma_failed(peer, call, now));
    }

    pub(in crate::programs) fn take_failure(&self, peer: IpAddr, call: CallMark) -> bool {
        self.with(|duplicates, now| duplicates.take_failure(peer, call, now))
    }

    pub(in crate::programs) fn admit(&self, key: CallKey) -> Admission {
        self.with(|duplicates, now| duplicates.admit(key, now))
    }

    pub(in crate::programs) fn complete(&self, key: &CallKey, reply: &[u8]) {
        self.with(|duplicates, now| duplicates.complete(key, reply, now));
    }

    pub(in crate::programs) fn forget(&self, key: &CallKey) {
        self.with(|duplicates, _| duplicates.forget(key));
    }

    /// The time is read under the lock, so it does not run backwards.
    fn with<T>(&self, act: impl FnOnce(&mut DuplicateCache, Duration) -> T) -> T {
        let mut duplicates = self.duplicates.lock().unwrap_or_else(PoisonError::into_inner);
        act(&mut duplicates, self.started.elapsed())
    }
}

/// What a connection may use.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub agreed: Agreed,
    pub calls_max: NonZeroU32,
    /// Octets of long calls held at a time, and of long replies.
    pub long_bytes_max: u64,
    /// Segments that the read chunks of one call may have.
    pub segments_max: usize,
    /// Octets of a buffer, for what is pulled and for what is pushed.
    pub window_bytes: u32,
    /// Places handed out and not filled.
    pub places_max: usize,
    /// How long a call waits for what readers hold.
    pub reserve_wait: Duration,
    /// How long a draft may be without a call.
    pub draft_idle: Duration,
}

/// What the service is made of, besides.
#[derive(Clone)]
pub struct Surroundings {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub shared: Arc<Shared>,
    /// The peer, as duplicates are known by.
    pub peer: IpAddr,
    pub nfs: Option<Nfs>,
}

/// Where NFS and MOUNT are served: what of, and who the peer is to them.
#[derive(Clone, Debug)]
pub struct Nfs {
    pub export: Arc<Export>,
    pub client: Client,
}

/// Where the octets of a place are.
#[derive(Clone, Debug)]
pub enum PlaceSource {
    /// In a value that stays pinned while its call is served.
    Value(Arc<Object>),
    /// In a part of a value that is being written, as it was.
    Run(Arc<Run>),
    /// In the reply itself.
    Octets(Arc<Vec<u8>>),
}

impl PlaceSource {
    /// Octets that lie in segments.
    pub fn range(&self, offset: u64, len: u64) -> Option<Range<'_>> {
        match self {
            Self::Value(object) => Some(object.range(offset, len)),
            Self::Run(run) => Some(run.range(offset, len)),
            Self::Octets(_) => None,
        }
    }

    fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + '_ {
        self.range(offset, len).into_iter().flatten()
    }
}

/// What the owner does next.
#[derive(Debug)]
pub enum Output<B> {
    /// Post an RDMA Read of `len` octets into the start of `buf`; [`Service::handle_read`] follows.
    Read { call: CallMark, number: u64, buf: B, len: u32, key: RemoteKey, address: u64 },
    /// Fill a slot with `len` octets from `offset` of the source on, of a run as its value counts; [`Service::handle_filled`] or [`Service::handle_failed`] follows,
    /// unless it is cancelled. `slow` if they may have to come from disk. Tickets count up from zero.
    Fill { ticket: Ticket, source: PlaceSource, offset: u64, len: u32, slow: bool },
    /// The slot of a place is not wanted any more; if it is filled all the same, it is free.
    Cancel(Ticket),
    /// Post an RDMA Write of the first `len` octets of a filled slot, which is free when that has completed.
    Write { call: CallMark, ticket: Ticket, len: u32, key: RemoteKey, address: u64 },
    /// A filled slot is free.
    Retire(Ticket),
    /// Post a Send; [`Service::handle_sent`] follows. One without a call answers the oldest message whose Receive is
    /// [withheld](Repost::WithAnswer).
    Send { xid: Option<Xid>, octets: Vec<u8>, invalidate: Option<RemoteKey> },
    /// Ask for a claim; [`Service::handle_claim`] follows. Answers come in the order of asking.
    Reserve { len: u64 },
    /// Ask for a segment; [`Service::handle_segment`] follows, likewise.
    Segment(Want),
    /// Ask to hear when something came free; [`Service::handle_retry`] follows.
    Retry,
}

/// When the Receive of a message is posted again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Repost {
    Now,
    /// Just before its answer, an RDMA_ERROR: so a peer that takes no answers has no Receives.
    WithAnswer,
}

/// The machine of one connection. `B` is a buffer that is read into.
pub struct Service<B> {
    around: Surroundings,
    revoker: Revoker,
    terms: Terms,
    responder: Responder,
    calls: HashMap<Xid, Call<B>>,
    next_number: u64,
    session: Session,
    /// Calls of each value that arrives, in order.
    spans: HashMap<PutId, VecDeque<Xid>>,
    /// Free buffers.
    free: Vec<B>,
    /// Calls with something to pull, in turn.
    pulls: VecDeque<Xid>,
    /// Calls with something to place, in turn.
    placing: VecDeque<Xid>,
    places: HashMap<Ticket, Place>,
    next_ticket: u64,
    long_calls: Budget,
    long_replies: Budget,
    /// Long calls that wait for room.
    queued: VecDeque<Xid>,
    /// Numbers of long calls that have not begun.
    long_numbers: BTreeSet<u64>,
    /// By number, so that they begin in the order in which they came.
    held: BTreeMap<u64, Xid>,
    /// Calls that wait for room for their replies.
    waiting: VecDeque<Xid>,
    claims: VecDeque<PutId>,
    segments: VecDeque<PutId>,
    is_retry_asked: bool,
    /// Requests handed out to be posted that have not completed.
    posted: usize,
    outputs: VecDeque<Output<B>>,
}

impl<B: AsRef<[u8]>> Service<B> {
    /// `free` are buffers of [`Terms::window_bytes`] octets, at least one. `revoker` is called when a claim is taken back;
    /// [`Service::handle_revoked`] must follow. As many Receives are posted as there may be calls.
    pub fn new(around: Surroundings, revoker: Revoker, terms: Terms, free: Vec<B>) -> Self {
        assert!(!free.is_empty(), "nothing to pull into");
        let mut responder = Responder::new(
            terms.agreed,
            Limits {
                calls_max: terms.calls_max,
                long_call_bytes_max: terms.long_bytes_max.min(CALL_BYTES_MAX as u64) as u32,
                read_chunk_bytes_max: PUT_BYTES_MAX.into(),
                read_bytes_max: u64::from(PUT_BYTES_MAX) + CALL_BYTES_MAX as u64,
                read_segments_max: terms.segments_max,
            },
        );
        responder.set_receives(terms.calls_max.get());
        Self {
            session: Session::new(terms.draft_idle.as_millis() as u64),
            around,
            revoker,
            terms,
            responder,
            calls: HashMap::new(),
            next_number: 0,
            spans: HashMap::new(),
            free,
            pulls: VecDeque::new(),
            placing: VecDeque::new(),
            places: HashMap::new(),
            next_ticket: 0,
            long_calls: Budget::new(terms.long_bytes_max),
            long_replies: Budget::new(terms.long_bytes_max),
            queued: VecDeque::new(),
            long_numbers: BTreeSet::new(),
            held: BTreeMap::new(),
            waiting: VecDeque::new(),
            claims: VecDeque::new(),
            segments: VecDeque::new(),
            is_retry_asked: false,
            posted: 0,
            outputs: VecDeque::new(),
        }
    }

    /// What to do now.
    pub fn poll_output(&mut self) -> Option<Output<B>> {
        if self.outputs.is_empty() {
            self.pull();
            self.place();
        }
        let output = self.outputs.pop_front()?;
        self.posted += usize::from(matches!(output, Output::Read { .. } | Output::Write { .. } | Output::Send { .. }));
        Some(output)
    }

    /// A call has no answer, or that has not left.
    pub fn is_serving(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Something was handed out to be posted and has not completed.
    pub fn is_posting(&self) -> bool {
        self.posted > 0
    }

    /// When [`Service::handle_time`] is due because of a call's deadline.
    pub fn deadline(&self) -> Option<Duration> {
        self.calls.values().filter_map(|call| call.stage.deadline()).min()
    }

    /// A message has come.
    pub fn handle_message(&mut self, message: &[u8], now: Duration) -> Repost {
        let counts = &self.around.metrics.rpc_calls;
        // Answers that do not leave are held too. Whoever keeps to its credits never has twice as many.
        if self.calls.len() >= 2 * self.terms.calls_max.get() as usize {
            counts.dropped.add(DropReason::Overrun.cause());
            return Repost::Now;
        }
        match self.responder.handle_received(message) {
            Received::Drop(reason) => {
                counts.dropped.add(reason.cause());
                Repost::Now
            }
            Received::Refuse(refusal) => {
                counts.refused.add(refusal.fault.cause());
                self.outputs.push_back(Output::Send { xid: None, octets: refusal.octets, invalidate: None });
                Repost::WithAnswer
            }
            Received::Call(call) => {
                self.begin(call, now);
                Repost::Now
            }
        }
    }

    fn begin(&mut self, incoming: IncomingCall, now: Duration) {
        let mark = incoming.mark();
        let IncomingCall { xid, inline, long, reads, offer } = incoming;
        let number = self.next_number;
        self.next_number += 1;
        let is_long = long.is_some();
        let stage = long.map_or(Stage::Dispatched, |long| Stage::Queued { long });
        let (stream, key) = (inline, None);
        let call = Call {
            mark,
            number,
            came: now,
            stream,
            reads,
            offer,
            key,
            head: None,
            known: None,
            stage,
            held_call: 0,
            held_reply: 0,
            reads_out: 0,
        };
        self.calls.insert(xid, call);
        if self.around.shared.take_failure(self.around.peer, mark) {
            return self.refuse(xid, Fault::FailedBefore);
        }
        if is_long {
            self.long_numbers.insert(number);
            self.queued.push_back(xid);
            self.begin_long();
        } else {
            self.dispatch(xid, now);
        }
    }

    fn set_stage(&mut self, xid: Xid, stage: Stage<B>) {
        if let Some(call) = self.calls.get_mut(&xid) {
            call.stage = stage;
        }
    }

    /// Deadlines, waits and idle drafts.
    pub fn handle_time(&mut self, now: Duration) {
        self.handle_get_times(now);
        self.retry_twins(now);
        self.session.drafts().handle_time(self.around.store.clock().now_ms());
    }

    /// Something came free, or some time went by.
    pub fn handle_retry(&mut self, now: Duration) {
        self.is_retry_asked = false;
        self.retry_gets(now);
        self.retry_reads(now);
        self.retry_writes(now);
    }

    /// Tries again once something came free.
    fn ask_retry(&mut self) {
        if !mem::replace(&mut self.is_retry_asked, true) {
            self.outputs.push_back(Output::Retry);
        }
    }

    /// Calls of which that is true, in the order in which they came.
    fn calls_that(&self, is_meant: impl Fn(&Call<B>) -> bool) -> Vec<Xid> {
        let mut calls: Vec<(u64, Xid)> =
            self.calls.iter().filter(|(_, call)| is_meant(call)).map(|(xid, call)| (call.number, *xid)).collect();
        calls.sort_unstable_by_key(|(number, _)| *number);
        calls.into_iter().map(|(_, xid)| xid).collect()
    }

    /// The answer to the oldest [`Output::Reserve`].
    pub fn handle_claim(&mut self, claim: Option<Claim>) {
        let Some(id) = self.claims.pop_front() else { return };
        self.session.drafts().handle_claim(id, &self.around.store, claim);
        self.run(id);
    }

    /// The answer to the oldest [`Output::Segment`].
    pub fn handle_segment(&mut self, filling: Option<Filling>) {
        let Some(id) = self.segments.pop_front() else { return };
        self.session.drafts().handle_segment(id, &self.around.store, filling);
        self.run(id);
    }

    /// A claim was taken back.
    pub fn handle_revoked(&mut self) {
        for id in self.session.drafts().handle_revoked() {
            self.run(id);
        }
    }
}

impl<B> Drop for Service<B> {
    fn drop(&mut self) {
        // What was not executed may come again, on the next connection.
        for key in self.calls.values_mut().filter_map(|call| call.key.take()) {
            self.around.shared.forget(&key);
        }
    }
}
