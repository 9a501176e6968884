//! The requester's half of a conversation: calls out, memory opened for them, replies matched and fenced (RFC 8166).
//!
//! ```text
//!             credit, Receive        all regions open          reply              all regions closed
//!  call ──▶ Waiting ──────▶ Registering ──────▶ Sent ─────────────────▶ Fencing ──────▶ Completed
//!              ▲                 │                │ cancel at once ──────▶ │ ──▶ Orphan ──▶ (reply, nobody is told)
//!              └──── connection lost, xid kept ───┘                        └ connection lost ──▶ Completed
//! ```
//!
//! The machine owns no memory. It asks its owner to open regions ([`Output::Register`]) and to take the responder's
//! access away again ([`Output::Invalidate`]), and completes a call only after the last of its regions is closed: by the
//! responder itself (Send with Invalidate), by the owner, or with the connection. Whoever waits for a call gets buffers
//! that nobody else can reach (§4.4.1).
//!
//! Calls go out in the order in which they were made, at most as many unanswered as the responder grants. What a
//! connection loses goes out again on the next one, with the same xid, newly sized and newly registered. Messages that are
//! no replies are dropped, and cost a Receive each: [`Output::Receive`] asks for another.
//!
//! A call that is cancelled at once may break the connection, and a responder that cannot tell whose memory refused it refuses
//! one of the calls that come again, with ERR_CHUNK. So a call that was beside a cancelled one is sent once more after that, over
//! another connection.
//!
//! What is left to whoever reads the results: that each eligible one has as many octets as its write chunk got, and none
//! stayed inline beside its chunk (§6.1). [`Reply::results`] has the octets.

mod pending;
pub mod plan;

pub use plan::{Call, Memory, Plan, Reduction, Terms, TooLong};

use self::pending::{Access, Pending, Region, Stage, cut};
use super::chunk::ReturnedError;
use super::credit::CreditGate;
use super::header::{HeaderError, Message, Placement, RdmaError, ReplyError};
use super::private_data::{Agreed, PrivateData};
use super::{RemoteKey, Xid};
use crate::wire::onc_rpc::Part;
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Receives beyond one for each credit: for messages that are no replies and come when all credits are used.
const RECEIVE_SPARE_COUNT: u32 = 4;

/// What holds for all connections of a requester.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settings {
    /// What this side tells when it connects. With the R bit set the responder may close regions.
    pub own: PrivateData,
    /// Credits to ask for.
    pub credits: NonZeroU32,
    /// Longer memory is offered in several segments, all with the handle of their region.
    pub segment_bytes_max: NonZeroU32,
    /// A call without a reply for longer ends the connection, and is sent again on the next.
    pub reply_timeout: Duration,
    /// How often a call is sent before it fails.
    pub attempts_max: NonZeroU32,
    /// Of the first call. Not the same after each start, or a server that remembers may mistake calls for others.
    pub first_xid: Xid,
}

/// Names a region, among all of a requester's, for ever.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RegionId(pub u64);

/// Memory to be opened to the responder.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Registration {
    pub id: RegionId,
    pub xid: Xid,
    pub memory: Memory,
    /// Octets, at least one.
    pub len: u64,
    pub right: Right,
    /// The responder may close it: the region gets that right too.
    pub remote_invalidate: bool,
}

/// What the responder does with a region.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Right {
    Read,
    Write,
}

/// What the owner is to do, in this order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Output {
    /// Post so many Receives, then [`Requester::handle_receives_posted`].
    Receive(u32),
    /// Open this memory, then [`Requester::handle_registered`] or [`Requester::handle_refused`].
    Register(Registration),
    /// Send these parts as one message, then [`Requester::handle_sent`] once its buffer is free again.
    Send { xid: Xid, message: Vec<Part> },
    /// Close this region, then [`Requester::handle_invalidated`] or [`Requester::handle_invalidate_failed`].
    Invalidate { xid: Xid, id: RegionId },
    /// The call is over, nobody can reach its memory.
    Completed { xid: Xid, outcome: Result<Reply, Failure> },
    /// End the connection, then [`Requester::handle_disconnected`].
    Disconnect(Reason),
}

/// What a call got.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Reply {
    pub stream: Stream,
    /// Octets in the write chunk of each result, from the first on; fewer where not all have one.
    pub results: Vec<u64>,
}

/// Where the reply message is, less what is in write chunks.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Stream {
    /// It begins with the call's xid and is a reply.
    Inline(Vec<u8>),
    /// So many octets at the front of [`Memory::Reply`], which nobody has looked at: its xid is to be compared.
    Chunk(u64),
}

/// Why a call has no reply.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// Nothing of it was sent.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    #[error("its memory could not be registered")]
    Refused,
    /// Whether it was carried out is unknown (RFC 8267 §4). To send it again as it is would be in vain.
    #[error("the server answers: {0}")]
    Rdma(RdmaError),
    #[error("the reply is of no use: {0}")]
    Reply(#[from] ReplyFault),
    #[error("it was cancelled")]
    Cancelled,
    #[error("the connection was lost {0} times before the reply came")]
    Lost(u32),
}

/// What a reply does that its call does not allow. Nothing in its chunks may be used.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum ReplyFault {
    #[error("{returned} write chunks came back of {offered}")]
    WriteChunks { offered: usize, returned: usize },
    #[error("write chunk {index}: {error}")]
    WriteChunk { index: usize, error: ReturnedError },
    #[error("a reply chunk that was not offered")]
    ReplyChunk,
    #[error("reply chunk: {0}")]
    Returned(ReturnedError),
    #[error("{0} octets in the reply chunk of a reply that came inline")]
    Both(u64),
    #[error("neither a payload nor a reply chunk with one")]
    NoPayload,
}

/// Why the connection is to end.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Reason {
    #[error("no reply in time")]
    Timeout,
    #[error("a region could not be closed")]
    Invalidation,
    #[error("a handle was invalidated that is not of this call")]
    ForeignInvalidation,
    #[error("a call was refused, and another's memory may be why")]
    Mistaken,
}

/// What came of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Received {
    /// It answers this call, well or not.
    Answer(Xid),
    Dropped(Dropped),
}

/// Why a message was dropped.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum Dropped {
    #[error(transparent)]
    Header(HeaderError),
    #[error(transparent)]
    Reply(ReplyError),
    #[error("nobody waits for xid {:#x}", .0.0)]
    NotPending(Xid),
}

/// When a cancelled call gives its memory back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cancel {
    /// After its reply: the connection lives on.
    Answered,
    /// At once. A responder that is still at work on it breaks the connection (§8.1.4).
    Now,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Requester {
    settings: Settings,
    gate: CreditGate,
    /// `None` while there is no connection.
    agreed: Option<Agreed>,
    /// The owner was told to end it.
    is_closing: bool,
    calls: BTreeMap<u32, Pending>,
    waiting: VecDeque<Xid>,
    /// Calls that are being registered, in order: each is sent after the one before.
    registering: VecDeque<Xid>,
    /// Which call each region is of.
    regions: BTreeMap<RegionId, Xid>,
    next_xid: u32,
    next_number: u64,
    next_region: u64,
    receives_posted: u32,
    receives_asked: u32,
    sends_posted: u32,
    outputs: VecDeque<Output>,
}

impl Requester {
    /// One without a connection.
    pub fn new(settings: Settings) -> Self {
        Self {
            gate: CreditGate::new(settings.credits),
            settings,
            agreed: None,
            is_closing: false,
            calls: BTreeMap::new(),
            waiting: VecDeque::new(),
            registering: VecDeque::new(),
            regions: BTreeMap::new(),
            next_xid: settings.first_xid.0,
            next_number: 0,
            next_region: 0,
            receives_posted: 0,
            receives_asked: 0,
            sends_posted: 0,
            outputs: VecDeque::new(),
        }
    }

    /// What to tell the responder.
    pub fn private_data(&self) -> &PrivateData {
        &self.settings.own
    }

    /// Whether the next responder may close regions: devices differ.
    ///
    /// # Panics
    /// While there is a connection.
    pub fn set_remote_invalidate(&mut self, remote_invalidate: bool) {
        assert!(self.agreed.is_none(), "it was told already");
        self.settings.own.remote_invalidate = remote_invalidate;
    }

    /// Receives that are posted at a time: one for each credit, and some to spare. They may be posted before the
    /// connection is made.
    pub fn receive_count(&self) -> u32 {
        self.settings.credits.get().saturating_add(RECEIVE_SPARE_COUNT)
    }

    /// Sends that are posted at a time, at most.
    pub fn send_count(&self) -> u32 {
        self.settings.credits.get()
    }

    /// What was agreed on with the responder, while there is one.
    pub const fn agreed(&self) -> Option<Agreed> {
        self.agreed
    }

    /// What calls are sized for now.
    pub fn terms(&self) -> Option<Terms> {
        let segment_bytes_max = self.settings.segment_bytes_max;
        self.agreed.map(|agreed| Terms { agreed, segment_bytes_max })
    }

    /// Who may send how much.
    pub const fn credits(&self) -> &CreditGate {
        &self.gate
    }

    /// Calls whose callers have not been told.
    pub fn pending_count(&self) -> usize {
        self.calls.values().filter(|pending| pending.stage != Stage::Orphan).count()
    }

    /// Regions that are open, or being opened or closed.
    pub fn region_count(&self) -> usize {
        let regions = self.calls.values().flat_map(|pending| &pending.regions);
        regions.filter(|region| region.access != Access::Closed).count()
    }

    /// An xid for the next call.
    pub fn mint_xid(&mut self) -> Xid {
        loop {
            let xid = self.next_xid;
            self.next_xid = xid.wrapping_add(1);
            if !self.calls.contains_key(&xid) {
                return Xid(xid);
            }
        }
    }

    /// Makes a call. It waits for a connection and a credit; the owner bounds how many wait.
    ///
    /// # Panics
    /// If the message does not begin with `xid`, that xid is in use, or its words are not all whole.
    pub fn call(&mut self, xid: Xid, call: Call) {
        let parts = call.message.parts();
        let begins = matches!(parts.first(), Some(Part::Bytes(bytes)) if bytes.starts_with(&xid.0.to_be_bytes()));
        assert!(begins, "a message begins with its xid");
        let is_whole = |part: &Part| !matches!(part, Part::Bytes(bytes) if bytes.len() % 4 != 0);
        assert!(parts.iter().all(is_whole), "XDR comes in words");
        let pending = Pending {
            number: self.next_number,
            call,
            stage: Stage::Waiting,
            is_cancelled: false,
            is_bystander: false,
            is_again: false,
            is_unanswered: false,
            attempts: 0,
            deadline: None,
            placement: Placement::Inline,
            inline: Vec::new(),
            regions: Vec::new(),
        };
        assert!(self.calls.insert(xid.0, pending).is_none(), "an xid is of one call at a time");
        self.next_number += 1;
        self.waiting.push_back(xid);
    }

    /// Gives a call up; it completes with [`Failure::Cancelled`], unless its reply has come already. `false` if there is
    /// no such call.
    pub fn cancel(&mut self, xid: Xid, when: Cancel) -> bool {
        let is_taken_back = self.take_unsent(xid);
        let Some(pending) = self.calls.get_mut(&xid.0) else { return false };
        match pending.stage {
            Stage::Waiting => {
                self.waiting.retain(|waiting| *waiting != xid);
                self.complete(xid, Err(Failure::Cancelled));
            }
            Stage::Registering => self.withdraw(xid, Failure::Cancelled),
            Stage::Sent if is_taken_back => self.withdraw(xid, Failure::Cancelled),
            Stage::Sent => {
                pending.is_cancelled = true;
                if when == Cancel::Now {
                    self.fence(xid, Err(Failure::Cancelled));
                }
            }
            Stage::Fencing(ref mut outcome) => {
                if std::mem::take(&mut pending.is_again) {
                    *outcome = Err(Failure::Cancelled);
                }
            }
            Stage::Orphan => return false,
        }
        true
    }

    /// Fails all calls: no connection will be had.
    ///
    /// # Panics
    /// While there is a connection.
    pub fn abandon(&mut self) {
        assert!(self.agreed.is_none(), "a connection that is there ends first");
        for xid in std::mem::take(&mut self.waiting) {
            let attempts = self.calls[&xid.0].attempts;
            self.complete(xid, Err(Failure::Lost(attempts)));
        }
    }

    /// A connection is there, and this is what the responder told.
    ///
    /// # Panics
    /// If there was one already.
    pub fn handle_connected(&mut self, peer: PrivateData) {
        assert!(self.agreed.is_none(), "one connection at a time");
        self.agreed = Some(Agreed::between(self.settings.own, peer));
    }

    /// The connection, or the attempt to make one, is over, and with it every region of it: nobody can reach them any
    /// more. Calls that were sent go out again on the next.
    pub fn handle_disconnected(&mut self) {
        self.agreed = None;
        self.is_closing = false;
        self.gate.handle_disconnected();
        (self.receives_posted, self.receives_asked, self.sends_posted) = (0, 0, 0);
        self.outputs.retain(|output| matches!(output, Output::Completed { .. }));
        self.registering.clear();
        self.regions.clear();
        let mut calls: Vec<(u64, Xid)> = self.calls.iter().map(|(xid, each)| (each.number, Xid(*xid))).collect();
        calls.sort_by_key(|(number, _)| *number);
        let is_given_up = |each: &Pending| each.is_cancelled && each.is_unanswered && each.stage != Stage::Sent;
        let is_broken_by_us = self.calls.values().any(is_given_up);
        self.waiting.clear();
        for (_, xid) in calls {
            let Some(pending) = self.calls.get_mut(&xid.0) else { continue };
            pending.regions.clear();
            pending.inline.clear();
            pending.is_bystander |= is_broken_by_us && pending.stage == Stage::Sent;
            (pending.is_unanswered, pending.deadline) = (false, None);
            match std::mem::replace(&mut pending.stage, Stage::Waiting) {
                Stage::Orphan => drop(self.calls.remove(&xid.0)),
                Stage::Fencing(_) if std::mem::take(&mut pending.is_again) => self.waiting.push_back(xid),
                Stage::Fencing(outcome) => self.complete(xid, outcome),
                _ if pending.is_cancelled => self.complete(xid, Err(Failure::Cancelled)),
                _ if pending.attempts >= self.settings.attempts_max.get() => {
                    let attempts = pending.attempts;
                    self.complete(xid, Err(Failure::Lost(attempts)));
                }
                _ => self.waiting.push_back(xid),
            }
        }
    }

    /// So many more Receives are posted.
    pub fn handle_receives_posted(&mut self, count: u32) {
        self.receives_posted = self.receives_posted.saturating_add(count);
        self.receives_asked = self.receives_asked.saturating_sub(count);
    }

    /// The responder can reach the region, from `address` on under `key`. Of a region that is none any more: nothing.
    pub fn handle_registered(&mut self, id: RegionId, key: RemoteKey, address: u64) {
        let segment_bytes_max = self.settings.segment_bytes_max;
        let Some((xid, pending, at)) = self.region(id, Access::Asked) else { return };
        let region = &mut pending.regions[at];
        region.access = Access::Open;
        region.segments = cut(key, address, region.plan.len, segment_bytes_max);
        if matches!(pending.stage, Stage::Fencing(_)) {
            // It was cancelled meanwhile.
            self.close(xid);
        }
    }

    /// The region could not be opened: its call fails.
    pub fn handle_refused(&mut self, id: RegionId) {
        let Some((xid, pending, at)) = self.region(id, Access::Asked) else { return };
        pending.regions[at].access = Access::Closed;
        match pending.stage {
            Stage::Registering => self.withdraw(xid, Failure::Refused),
            _ => self.close(xid),
        }
    }

    /// The region is closed.
    pub fn handle_invalidated(&mut self, id: RegionId) {
        let Some((xid, pending, at)) = self.region(id, Access::Closing) else { return };
        pending.regions[at].access = Access::Closed;
        self.close(xid);
    }

    /// The region cannot be closed: its call completes with the connection, and that is to end now (§4.5.4).
    pub fn handle_invalidate_failed(&mut self, id: RegionId) {
        if self.region(id, Access::Closing).is_some() {
            self.disconnect(Reason::Invalidation);
        }
    }

    /// A Send is done: its buffer is free.
    pub fn handle_sent(&mut self) {
        self.sends_posted = self.sends_posted.saturating_sub(1);
    }

    /// A message came, in a Receive that is used up now. `invalidated` is the handle that it closed, where the fabric says
    /// so.
    pub fn handle_received(&mut self, message: &[u8], invalidated: Option<RemoteKey>) -> Received {
        self.receives_posted = self.receives_posted.saturating_sub(1);
        let received = self.judge(message, invalidated);
        if invalidated.is_some() && matches!(received, Received::Dropped(_)) {
            self.disconnect(Reason::ForeignInvalidation);
        }
        received
    }

    fn judge(&mut self, message: &[u8], invalidated: Option<RemoteKey>) -> Received {
        match Message::decode(message) {
            Err(error) => Received::Dropped(Dropped::Header(error)),
            Ok(Message::Error { xid, credit, error, .. }) => {
                self.answer(xid, credit, invalidated, |_| Err(Failure::Rdma(error)))
            }
            Ok(Message::Transport(transport)) => match transport.check_reply() {
                Ok(()) => {
                    let judged = |pending: &Pending| pending.judge(&transport).map_err(Failure::Reply);
                    self.answer(transport.xid, transport.credit, invalidated, judged)
                }
                // Its header is whole, so whom it answers is known; and it cannot be answered better.
                Err(ReplyError::NoReplyChunk) => {
                    let nothing = |_: &Pending| Err(Failure::Reply(ReplyFault::NoPayload));
                    self.answer(transport.xid, transport.credit, invalidated, nothing)
                }
                Err(error) => Received::Dropped(Dropped::Reply(error)),
            },
        }
    }

    fn answer(
        &mut self,
        xid: Xid,
        credit: u32,
        invalidated: Option<RemoteKey>,
        outcome: impl FnOnce(&Pending) -> Result<Reply, Failure>,
    ) -> Received {
        let is_queued = self.is_unsent(xid);
        let Some(pending) = self.calls.get_mut(&xid.0).filter(|each| each.is_unanswered && !is_queued) else {
            return Received::Dropped(Dropped::NotPending(xid));
        };
        if pending.stage == Stage::Registering {
            return Received::Dropped(Dropped::NotPending(xid));
        }
        pending.is_unanswered = false;
        pending.deadline = None;
        self.gate.handle_answered();
        self.gate.handle_grant(credit);
        let is_foreign = invalidated.is_some_and(|key| !pending.close_by_peer(key));
        match pending.stage {
            Stage::Sent => {
                let outcome = if pending.is_cancelled { Err(Failure::Cancelled) } else { outcome(pending) };
                if matches!(outcome, Err(Failure::Rdma(RdmaError::Chunk))) {
                    // The responder refuses one call for each connection that it lost, and this may be the wrong one.
                    pending.is_again = std::mem::take(&mut pending.is_bystander);
                }
                // A call goes out once on each connection: its xid is one of the responder's until that has seen the answer off.
                if pending.is_again {
                    self.disconnect(Reason::Mistaken);
                }
                self.fence(xid, outcome);
            }
            Stage::Orphan => drop(self.calls.remove(&xid.0)),
            _ => self.close(xid),
        }
        if is_foreign {
            self.disconnect(Reason::ForeignInvalidation);
        }
        Received::Answer(xid)
    }

    /// When [`Requester::handle_timeout`] wants to be called.
    pub fn deadline(&self) -> Option<Instant> {
        if self.is_closing { None } else { self.calls.values().filter_map(|pending| pending.deadline).min() }
    }

    /// It is `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.disconnect(Reason::Timeout);
        }
    }

    /// What to do next.
    pub fn poll_output(&mut self, now: Instant) -> Option<Output> {
        if self.agreed.is_some() && !self.is_closing {
            let has = self.receives_posted.saturating_add(self.receives_asked);
            let missing = self.receive_count().saturating_sub(has);
            if missing > 0 {
                self.receives_asked += missing;
                return Some(Output::Receive(missing));
            }
        }
        if let Some(output) = self.outputs.pop_front() {
            return Some(output);
        }
        self.send_registered(now);
        while self.outputs.is_empty() && self.is_open() {
            let Some(xid) = self.waiting.pop_front() else { break };
            self.register(xid);
            self.send_registered(now);
        }
        self.outputs.pop_front()
    }

    /// Another call may begin.
    fn is_open(&self) -> bool {
        let in_flight = self.gate.in_flight();
        let sends = self.sends_posted.saturating_add(self.registering.len() as u32);
        self.agreed.is_some()
            && !self.is_closing
            && self.gate.is_open()
            && in_flight < self.receives_posted
            && sends < self.send_count()
    }

    /// Sizes a call for this connection and asks for its memory.
    fn register(&mut self, xid: Xid) {
        let (Some(terms), Some(pending)) = (self.terms(), self.calls.get_mut(&xid.0)) else { return };
        let plan = match Plan::of(&pending.call, &terms) {
            Ok(plan) => plan,
            Err(too_long) => return self.complete(xid, Err(too_long.into())),
        };
        self.gate.handle_call();
        pending.is_unanswered = true;
        pending.stage = Stage::Registering;
        (pending.placement, pending.inline) = (plan.placement, plan.inline);
        for region in plan.regions {
            let id = RegionId(self.next_region);
            self.next_region += 1;
            self.outputs.push_back(Output::Register(Registration {
                id,
                xid,
                memory: region.memory.clone(),
                len: region.len,
                right: if region.position.is_some() { Right::Read } else { Right::Write },
                remote_invalidate: self.settings.own.remote_invalidate,
            }));
            self.regions.insert(id, xid);
            pending.regions.push(Region { id, plan: region, access: Access::Asked, segments: Vec::new() });
        }
        self.registering.push_back(xid);
    }

    /// Sends what is registered, in order.
    fn send_registered(&mut self, now: Instant) {
        while let Some(xid) = self.registering.front().copied().filter(|_| !self.is_closing) {
            let Some(pending) = self.calls.get_mut(&xid.0) else { return };
            if pending.regions.iter().any(|region| region.access != Access::Open) {
                return;
            }
            self.registering.pop_front();
            pending.stage = Stage::Sent;
            pending.attempts += 1;
            pending.deadline = now.checked_add(self.settings.reply_timeout);
            let message = pending.message(xid, self.gate.requested());
            self.sends_posted += 1;
            self.outputs.push_back(Output::Send { xid, message });
        }
    }

    /// The message of a call is decided and the owner has not got it.
    fn is_unsent(&self, xid: Xid) -> bool {
        self.outputs.iter().any(|output| matches!(output, Output::Send { xid: sent, .. } if *sent == xid))
    }

    /// Takes it back. `false` if the owner has it.
    fn take_unsent(&mut self, xid: Xid) -> bool {
        let is_unsent = self.is_unsent(xid);
        if is_unsent {
            self.outputs.retain(|output| !matches!(output, Output::Send { xid: sent, .. } if *sent == xid));
            self.sends_posted -= 1;
        }
        is_unsent
    }

    /// A call that was not sent will not be.
    fn withdraw(&mut self, xid: Xid, failure: Failure) {
        self.registering.retain(|registering| *registering != xid);
        let Some(pending) = self.calls.get_mut(&xid.0) else { return };
        (pending.is_unanswered, pending.deadline) = (false, None);
        self.gate.handle_answered();
        self.fence(xid, Err(failure));
    }

    /// Completes a call with `outcome` once its regions are closed.
    fn fence(&mut self, xid: Xid, outcome: Result<Reply, Failure>) {
        let Some(pending) = self.calls.get_mut(&xid.0) else { return };
        pending.stage = Stage::Fencing(outcome);
        self.close(xid);
    }

    /// Closes what is open of a call whose outcome is known.
    fn close(&mut self, xid: Xid) {
        let Some(pending) = self.calls.get_mut(&xid.0) else { return };
        let Stage::Fencing(outcome) = &mut pending.stage else { return };
        for region in pending.regions.iter_mut().filter(|region| region.access == Access::Open) {
            region.access = Access::Closing;
            self.outputs.push_back(Output::Invalidate { xid, id: region.id });
        }
        if pending.regions.iter().all(|region| region.access == Access::Closed) {
            // The end of the connection is on its way, and brings it back.
            if pending.is_again {
                return;
            }
            let outcome = std::mem::replace(outcome, Err(Failure::Cancelled));
            if pending.is_unanswered {
                // The regions stay known: a late reply may name their handle.
                pending.stage = Stage::Orphan;
                self.outputs.push_back(Output::Completed { xid, outcome });
            } else {
                self.complete(xid, outcome);
            }
        }
    }

    fn complete(&mut self, xid: Xid, outcome: Result<Reply, Failure>) {
        if let Some(pending) = self.calls.remove(&xid.0) {
            for region in &pending.regions {
                self.regions.remove(&region.id);
            }
        }
        self.outputs.push_back(Output::Completed { xid, outcome });
    }

    fn disconnect(&mut self, reason: Reason) {
        if !self.is_closing {
            self.is_closing = true;
            self.outputs.push_back(Output::Disconnect(reason));
        }
    }

    /// A region in this state, and the call it is of.
    fn region(&mut self, id: RegionId, access: Access) -> Option<(Xid, &mut Pending, usize)> {
        let xid = *self.regions.get(&id)?;
        let pending = self.calls.get_mut(&xid.0)?;
        let at = pending.regions.iter().position(|region| region.id == id && region.access == access)?;
        Some((xid, pending, at))
    }
}

#[cfg(test)]
mod tests;
