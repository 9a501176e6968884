//! Responder: judges what arrives, says what is pulled and where a reply goes. It moves no octets itself.
//!
//! ```text
//!            handle_received            handle_pulled            plan_reply, refuse            handle_sent
//!  (absent) ────────────────▶ Pulling ───────────────▶ InService ──────────────────▶ Answering ───────────▶ (absent)
//!      │      a long call        │ refused                │   ▲                         ▲
//!      │                         └────────────────────────┼───┼─────────────────────────┘
//!      └──────────────────── a call with its stream inline┼───┘
//!                                                         └──▶ (absent) by handle_dropped, from Pulling too
//! ```
//! What the owner keeps to: a message is handed in once its Receive is done with, and whatever comes of it, a Receive is
//! posted in its place ([`Responder::receives_needed`] says how many there must be). RDMA Reads of a call end before its
//! reply is planned. The Writes of a plan are posted first, its Send last, on one queue pair; what they move from is given
//! back when the Send has completed, and [`Responder::handle_sent`] is told. A Read, Write or Send that fails ends the
//! connection, and with it the machine.

mod judge;
mod plan;
#[cfg(test)]
mod tests;

pub use judge::Fault;
pub use plan::{ReplyPlan, Span, Write};

use super::chunk::{ReadChunk, Segment};
use super::credit::CreditGrant;
use super::duplicate::CallMark;
use super::header::{self, HEADER_BYTES_MIN, HeaderError, Message, Placement, RdmaError, Transport, VERSION};
use super::private_data::Agreed;
use super::{RemoteKey, Xid};
use crate::wire::onc_rpc::{MessageType, Payload};
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

const RDMA_DONE: u32 = 3;

/// What a call may ask of the responder's memory. What is more is refused before anything is pulled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Calls in service at once, and so the most that is granted.
    pub calls_max: NonZeroU32,
    /// Octets of the stream of a long call: it is held whole.
    pub long_call_bytes_max: u32,
    /// Octets of one read chunk.
    pub read_chunk_bytes_max: u64,
    /// Octets of all read chunks of a call, position zero included.
    pub read_bytes_max: u64,
    /// Segments of all read chunks of a call: each is an RDMA Read of its own.
    pub read_segments_max: usize,
}

/// Where a call wants its results.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Offer {
    /// Write chunks in list order, one for each eligible result; one without segments wants its result inline.
    pub writes: Vec<Vec<Segment>>,
    pub reply: Option<Vec<Segment>>,
    /// The one handle of all segments of the call, if the reply may invalidate it.
    invalidate: Option<RemoteKey>,
}

/// A call, judged as far as it can be without its program.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct IncomingCall {
    pub xid: Xid,
    /// The payload stream, less what read chunks carry; empty if it is to be pulled.
    pub inline: Vec<u8>,
    /// The chunk at position zero: pull it whole, and tell [`Responder::handle_pulled`], before anything else.
    pub long: Option<ReadChunk>,
    /// The other read chunks, in order of position: they neither overlap nor leave the stream.
    pub reads: Vec<ReadChunk>,
    pub offer: Arc<Offer>,
}

impl IncomingCall {
    /// By what it is known again: handles and offsets are others each time.
    pub fn mark(&self) -> CallMark {
        let mut checksum = crc32c::crc32c(&self.inline);
        for chunk in self.reads.iter().chain(&self.long) {
            checksum = crc32c::crc32c_append(checksum, &chunk.position.to_be_bytes());
            checksum = crc32c::crc32c_append(checksum, &chunk.len.to_be_bytes());
        }
        CallMark { xid: self.xid, checksum }
    }
}

/// What came of a message.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Received {
    /// Nothing is said.
    Drop(DropReason),
    /// An RDMA_ERROR is sent.
    Refuse(Refusal),
    Call(IncomingCall),
}

/// Why nothing is said to a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum DropReason {
    /// Its xid cannot be trusted (RFC 8166 §4.5).
    TooShort(usize),
    /// RDMA_DONE (§4.6.2).
    Done,
    /// RDMA_ERROR, of whatever version: an error is never answered with an error (§4.2.4).
    Error,
    /// A reply in the other direction, to a call that nobody made (RFC 8167).
    Reply,
    /// The call with this xid is being served, or its reply is on its way.
    InService,
    /// The peer has more calls unanswered than it was ever granted.
    Overrun,
}

impl DropReason {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::TooShort(_) => "too_short",
            Self::Done => "done",
            Self::Error => "error",
            Self::Reply => "reply",
            Self::InService => "in_service",
            Self::Overrun => "overrun",
        }
    }
}

/// An RDMA_ERROR to be sent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Refusal {
    /// The whole message.
    pub octets: Vec<u8>,
    pub fault: Fault,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Pulling,
    InService,
    Answering,
}

#[derive(Debug)]
struct Call {
    state: State,
    offer: Arc<Offer>,
}

/// The responder's side of one connection.
#[derive(Debug)]
pub struct Responder {
    agreed: Agreed,
    limits: Limits,
    credits: CreditGrant,
    /// Calls from their arrival until their reply is sent. Those not yet answered are as many as `calls_max` at most,
    /// those answered as many as the owner's send queue takes.
    calls: HashMap<Xid, Call>,
}

impl Responder {
    pub fn new(agreed: Agreed, limits: Limits) -> Self {
        Self { agreed, limits, credits: CreditGrant::new(limits.calls_max), calls: HashMap::new() }
    }

    /// So many Receives stand for calls: see [`CreditGrant::set_receives`].
    pub fn set_receives(&mut self, receives: u32) {
        self.credits.set_receives(receives);
    }

    /// Receives that must be posted now, and before every answer is: see [`CreditGrant::receives_needed`].
    pub const fn receives_needed(&self) -> u32 {
        self.credits.receives_needed()
    }

    /// Calls of which something is still to come: to be pulled, answered, or to leave.
    pub fn calls(&self) -> usize {
        self.calls.len()
    }

    /// A message has arrived.
    pub fn handle_received(&mut self, message: &[u8]) -> Received {
        if message.len() < HEADER_BYTES_MIN {
            return Received::Drop(DropReason::TooShort(message.len()));
        }
        let call = match Message::decode(message) {
            Ok(Message::Transport(call)) => call,
            Ok(Message::Error { .. }) | Err(HeaderError::UnknownError(_)) => return Received::Drop(DropReason::Error),
            Err(HeaderError::TooShort(len)) => return Received::Drop(DropReason::TooShort(len)),
            Err(HeaderError::Version(fixed)) => {
                let error = RdmaError::OUR_VERSIONS;
                return Received::Refuse(self.answer_header(fixed.xid, fixed.vers, error, Fault::Version(fixed.vers)));
            }
            Err(HeaderError::Procedure(fixed)) if fixed.proc == RDMA_DONE => return Received::Drop(DropReason::Done),
            Err(HeaderError::Procedure(fixed)) => {
                let fault = Fault::Procedure(fixed.proc);
                return Received::Refuse(self.answer_header(fixed.xid, VERSION, RdmaError::Chunk, fault));
            }
            Err(HeaderError::Lists { fixed, error }) => {
                let fault = Fault::Lists(error);
                return Received::Refuse(self.answer_header(fixed.xid, VERSION, RdmaError::Chunk, fault));
            }
        };
        if call.placement == Placement::Inline && call.message_type() == Some(MessageType::Reply) {
            return Received::Drop(DropReason::Reply);
        }
        self.handle_call(&call)
    }

    fn handle_call(&mut self, call: &Transport<'_>) -> Received {
        let judged = match judge::judge(call, &self.limits, &self.agreed) {
            Ok(judged) => judged,
            Err(fault) => {
                return Received::Refuse(self.answer_header(call.xid, VERSION, RdmaError::Chunk, fault));
            }
        };
        if self.calls.contains_key(&call.xid) {
            return Received::Drop(DropReason::InService);
        }
        if self.credits.in_service() >= self.limits.calls_max.get() {
            return Received::Drop(DropReason::Overrun);
        }
        self.credits.handle_call();
        let state = if judged.long.is_some() { State::Pulling } else { State::InService };
        let offer = Arc::new(judged.offer);
        self.calls.insert(call.xid, Call { state, offer: Arc::clone(&offer) });
        let inline = call.payload.to_vec();
        Received::Call(IncomingCall { xid: call.xid, inline, long: judged.long, reads: judged.reads, offer })
    }

    /// The stream of a long call was pulled.
    ///
    /// # Errors
    /// The refusal to send, if it is no call with this xid.
    ///
    /// # Panics
    /// Unless the call is being pulled.
    pub fn handle_pulled(&mut self, xid: Xid, stream: &[u8]) -> Result<(), Refusal> {
        let call = self.calls.get_mut(&xid).filter(|call| call.state == State::Pulling);
        let call = call.expect("the stream of a call is pulled once");
        match judge::judge_stream(xid, stream) {
            Ok(()) => {
                call.state = State::InService;
                Ok(())
            }
            Err(fault) => Err(self.refuse_any(xid, fault)),
        }
    }

    /// Places the reply to a call. If it does not fit what the call offers, the plan is an RDMA_ERROR and writes nothing.
    ///
    /// # Panics
    /// Unless the call is in service.
    pub fn plan_reply(&mut self, xid: Xid, payload: &Payload) -> ReplyPlan {
        let call = self.in_service(xid);
        let offer = Arc::clone(&call.offer);
        call.state = State::Answering;
        let grant = self.credits.handle_answer();
        match plan::plan(xid, grant, &offer, payload, self.agreed.reply_inline_bytes) {
            Ok(plan) => plan,
            Err(fault) => ReplyPlan::error(header::encode_error(xid, VERSION, grant, RdmaError::Chunk), fault),
        }
    }

    /// Where the items of a reply would go, while its octets are still to be had: nothing is decided by it. An item goes to
    /// the same place of its write chunk whatever becomes of the others, and a reply of which some items turn out to be
    /// empty fits if this one does.
    ///
    /// # Errors
    /// [`Fault`]: it does not fit what the call offers, as [`Responder::plan_reply`] would find.
    ///
    /// # Panics
    /// Unless the call is in service.
    pub fn preview_reply(&self, xid: Xid, payload: &Payload) -> Result<ReplyPlan, Fault> {
        let call = self.calls.get(&xid).filter(|call| call.state == State::InService);
        let call = call.expect("a reply is to a call in service");
        plan::plan(xid, self.credits.grant(), &call.offer, payload, self.agreed.reply_inline_bytes)
    }

    /// Answers a call with ERR_CHUNK: its program found that an item is in a chunk that may not be, or its RDMA Reads
    /// failed once before.
    ///
    /// # Panics
    /// Unless the call is being pulled, of which nothing may be on its way then, or in service.
    pub fn refuse(&mut self, xid: Xid, fault: Fault) -> Refusal {
        let call = self.calls.get(&xid).filter(|call| call.state != State::Answering);
        call.expect("a call is refused before it is answered");
        self.refuse_any(xid, fault)
    }

    /// The call will have no reply from here: it is a duplicate of one that is being served elsewhere.
    ///
    /// # Panics
    /// Unless the call is being pulled or in service.
    pub fn handle_dropped(&mut self, xid: Xid) {
        let call = self.calls.remove(&xid).filter(|call| call.state != State::Answering);
        call.expect("a call is dropped before it is answered");
        self.credits.handle_dropped();
    }

    /// The Send of the answer to a call has completed: what it and its Writes moved from is free. The errors that
    /// [`Responder::handle_received`] gives are not told here.
    ///
    /// # Panics
    /// Unless the call is being answered.
    pub fn handle_sent(&mut self, xid: Xid) {
        let call = self.calls.remove(&xid).filter(|call| call.state == State::Answering);
        call.expect("an answer is sent once");
    }

    fn in_service(&mut self, xid: Xid) -> &mut Call {
        let call = self.calls.get_mut(&xid).filter(|call| call.state == State::InService);
        call.expect("a call in service is answered once")
    }

    fn refuse_any(&mut self, xid: Xid, fault: Fault) -> Refusal {
        self.calls.get_mut(&xid).expect("the caller knows the call").state = State::Answering;
        let grant = self.credits.handle_answer();
        Refusal { octets: header::encode_error(xid, VERSION, grant, RdmaError::Chunk), fault }
    }

    /// Answers a message that never became a call.
    fn answer_header(&mut self, xid: Xid, vers: u32, error: RdmaError, fault: Fault) -> Refusal {
        self.credits.handle_call();
        let grant = self.credits.handle_answer();
        Refusal { octets: header::encode_error(xid, vers, grant, error), fault }
    }
}
