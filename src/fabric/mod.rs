//! Fabrics: what moves RDMA operations between two queue pairs.
//!
//! The interface has the shape of verbs, never blocks and knows no runtime. A [`Fabric`] gives each thread that drives
//! connections a [`Lane`] (a completion queue and its event channel); a lane dials and admits [`QueuePair`]s; a queue
//! pair registers memory and takes [`Work`].
//!
//! ```text
//!  initiator                                   responder
//!  lane.dial(address) ─► queue pair            lane.listen(address)
//!  register, post receives                                │
//!  establish(private data) ──────────────────► Event::ConnectRequest
//!                                              lane.admit(request) ─► queue pair, or request.reject(private data)
//!                                              register, post receives
//!  Event::Established(private data) ◄───────── establish(private data) ─► Event::Established
//!  post … Event::Completed …                   post … Event::Completed …
//!  disconnect ─► Event::Disconnected           Event::Disconnected: the last event of a queue pair
//! ```
//!
//! # What every fabric promises
//! - Writes of one queue pair land in the order of posting, and of each Write the last whole aligned 8 octets are stored
//!   last, with Release: a receiver may poll for them ([`SharedSpan::load_u64_acquire`]).
//! - A Send is delivered after everything posted before it was placed. A Read sees everything posted before it.
//! - Completions of a queue come in the order of posting. After the first failure every other request of the queue pair
//!   is flushed; then comes [`Event::Disconnected`], and nothing after it.
//! - A posted buffer comes back with its completion or flush and never before.
//! - The **target** checks key, rights and bounds. A violation ends exactly that connection and changes no octet.
//! - A key opens memory to one queue pair. Keys and addresses are hard to guess; addresses are at least 2^32.
//! - A local completion says nothing about the peer, except that of a Read.
//!
//! # How to drive a lane
//! ```text
//! loop {
//!     while lane.progress(now, &mut events, 32) { hand out events, yield }
//!     hand out events; spin a little if events keep coming
//!     lane.arm();
//!     if lane.progress(now, &mut events, 32) or events came { continue }
//!     sleep until lane.descriptor() is readable or lane.deadline() has passed
//! }
//! ```
//! A queue pair may be posted to from any thread. Posting wakes a sleeping lane; [`QueuePair::kick`] does at once, on the
//! caller's thread, what the lane would do next for that queue pair.

pub mod faulty;
pub mod iwarp;
pub mod loopback;
mod queue;
pub mod region;
mod registered;
pub mod spin;
pub mod staging;
pub(crate) mod sys;
pub mod traced;
#[cfg(feature = "verbs")]
pub mod verbs;

pub use region::shared::SharedSpan;
pub use registered::{Access, AccessError, LocalBuf, MemoryRegion, RemoteKey, RemoteSpan};

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;

/// Most octets of private data in a request, a reply or a refusal of ours: what an InfiniBand connection request carries.
/// A fabric may deliver more than the peer's upper layer sent; the rest is padding.
pub const PRIVATE_DATA_BYTES_MAX: usize = 56;

/// Octets a software fabric moves for one queue pair and direction in one turn, at most (rounded up to one segment).
pub const TURN_BYTES_MAX: usize = 256 << 10;

/// Where a listener is, or who is dialled.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Address {
    Socket(SocketAddr),
    /// A name within this process, for [`loopback`].
    Name(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(address) => address.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Names a queue pair among all of the process, for ever.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct QpNum(pub u64);

impl QpNum {
    fn next() -> Self {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }
}

/// What a queue pair is made for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attributes {
    /// Requests posted and not completed, Receives aside.
    pub send_depth: usize,
    /// Receives posted and not completed.
    pub receive_depth: usize,
    /// Reads outstanding in each direction, at least 1. More may be posted; they wait. A fabric may serve more of the peer's.
    pub read_depth: usize,
    /// It posts no Reads, so a peer that is dialled need not serve any. Some do not: Linux's NFS server does not.
    pub never_reads: bool,
    /// Octets of an inline request.
    pub inline_bytes_max: usize,
    /// From the first octet of the handshake to its last; also what a peer may take to say goodbye.
    pub handshake_timeout: Duration,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            send_depth: 512,
            receive_depth: 512,
            read_depth: 16,
            never_reads: false,
            inline_bytes_max: 256,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// Names a posted request: unique for the life of the process, up to 2^32 requests of one queue in flight.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct WorkId {
    /// The queue pair's place in its lane.
    pub slot: u16,
    /// How often that place was given away before.
    pub generation: u16,
    /// Requests posted to the same queue before, modulo 2^32.
    pub index: u32,
}

impl WorkId {
    /// For hardware, which carries 64 bits.
    pub const fn to_bits(self) -> u64 {
        (self.slot as u64) << 48 | (self.generation as u64) << 32 | self.index as u64
    }

    /// The reverse of [`WorkId::to_bits`].
    pub const fn from_bits(bits: u64) -> Self {
        Self { slot: (bits >> 48) as u16, generation: (bits >> 32) as u16, index: bits as u32 }
    }
}

/// Where the octets of a Write or Send come from.
#[derive(Debug)]
pub enum Source {
    /// Copied when posted, at most [`Attributes::inline_bytes_max`].
    Inline(Vec<u8>),
    /// A part of a registered buffer, which travels with the request.
    Buffer { buf: LocalBuf, range: Range<usize> },
}

impl Source {
    /// Octets to move.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there is nothing to move.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The octets; none when the range is not within the buffer (such a request is refused when posted).
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Inline(octets) => octets,
            Self::Buffer { buf, range } => buf.as_slice().get(range.clone()).unwrap_or_default(),
        }
    }
}

/// How a request is carried out.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Flags {
    /// Its completion is reported. A request with a buffer, a failed and a flushed one always are.
    pub signaled: bool,
    /// It waits until every earlier Read has completed.
    pub fenced: bool,
    /// The peer is asked to wake for this Send.
    pub solicited: bool,
}

impl Flags {
    /// Reported, nothing else.
    pub const SIGNALED: Self = Self { signaled: true, fenced: false, solicited: false };
}

/// A request for the send queue.
#[derive(Debug)]
pub enum Work {
    /// Puts octets into the peer's memory. The peer's processor learns nothing of it but what it finds there.
    Write { from: Source, key: RemoteKey, address: u64, flags: Flags },
    /// Fetches `range.len()` octets of the peer's memory into `buf`.
    Read { into: LocalBuf, range: Range<usize>, key: RemoteKey, address: u64, flags: Flags },
    /// Fills the peer's oldest Receive, and takes one of the peer's own keys out of service where asked.
    Send { from: Source, invalidate: Option<RemoteKey>, flags: Flags },
}

/// What a completed request was.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum WorkKind {
    Write,
    Read,
    Send,
    Receive,
}

impl Work {
    pub fn kind(&self) -> WorkKind {
        match self {
            Self::Write { .. } => WorkKind::Write,
            Self::Read { .. } => WorkKind::Read,
            Self::Send { .. } => WorkKind::Send,
        }
    }

    pub fn flags(&self) -> Flags {
        match self {
            Self::Write { flags, .. } | Self::Read { flags, .. } | Self::Send { flags, .. } => *flags,
        }
    }

    /// Octets it moves.
    pub fn len(&self) -> usize {
        match self {
            Self::Write { from, .. } | Self::Send { from, .. } => from.len(),
            Self::Read { range, .. } => range.len(),
        }
    }

    /// Whether it moves no octet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether success is reported.
    fn is_reported(&self) -> bool {
        self.flags().signaled || self.buffer().is_some()
    }

    fn buffer(&self) -> Option<(&LocalBuf, &Range<usize>)> {
        match self {
            Self::Write { from: Source::Buffer { buf, range }, .. }
            | Self::Send { from: Source::Buffer { buf, range }, .. }
            | Self::Read { into: buf, range, .. } => Some((buf, range)),
            _ => None,
        }
    }

    fn into_buffer(self) -> Option<LocalBuf> {
        match self {
            Self::Write { from: Source::Buffer { buf, .. }, .. }
            | Self::Send { from: Source::Buffer { buf, .. }, .. }
            | Self::Read { into: buf, .. } => Some(buf),
            _ => None,
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Status {
    Done,
    /// The peer refused this request: key, rights, bounds, no Receive, or one too short.
    Refused,
    /// The connection ended first. Whether the peer has seen any of it is unknown.
    Flushed,
}

/// The end of a posted request.
#[derive(Debug)]
pub struct Completion {
    pub id: WorkId,
    pub kind: WorkKind,
    pub status: Status,
    /// The buffer that travelled with the request.
    pub buf: Option<LocalBuf>,
    /// Octets moved; of a Receive, the length of the message, which begins at the start of the buffer.
    pub len: usize,
    /// The key of ours that the peer's Send took out of service. Linux's software devices do it and do not say so: where
    /// this is `None`, invalidate.
    pub invalidated: Option<RemoteKey>,
    /// The peer asked to be attended to. Hardware does not say.
    pub solicited: bool,
}

/// Something that happened on a lane. Events of one queue pair come in order.
#[derive(Debug)]
pub enum Event {
    /// A peer wants a queue pair.
    ConnectRequest(ConnectRequest),
    /// A peer came to a listener of this lane and never asked properly: there will be no request of it. `why` is one word
    /// for counting.
    HandshakeFailed { peer: Address, why: &'static str },
    /// The queue pair is connected. The initiator sees the responder's private data, the responder none.
    Established { qp: QpNum, private_data: Vec<u8> },
    /// The responder declined. The last event of its queue pair.
    Rejected { qp: QpNum, private_data: Vec<u8> },
    /// A request ended.
    Completed { qp: QpNum, completion: Completion },
    /// The peer wrote to the region of `key`. Several Writes may be one event. Hardware reports only what
    /// [`MemoryRegion::watch`] asks for.
    Written { qp: QpNum, key: RemoteKey },
    /// The last event of a queue pair that was established, or failed to be.
    Disconnected { qp: QpNum, cause: Cause },
}

impl Event {
    /// The queue pair it belongs to.
    pub fn qp(&self) -> Option<QpNum> {
        match self {
            Self::ConnectRequest(_) | Self::HandshakeFailed { .. } => None,
            Self::Established { qp, .. }
            | Self::Rejected { qp, .. }
            | Self::Completed { qp, .. }
            | Self::Written { qp, .. }
            | Self::Disconnected { qp, .. } => Some(*qp),
        }
    }

    /// Nothing of its queue pair comes after it.
    fn is_last(&self) -> bool {
        matches!(self, Self::Rejected { .. } | Self::Disconnected { .. })
    }
}

/// Why a connection ended.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    #[error("this side disconnected")]
    Local,
    #[error("the peer disconnected")]
    Peer,
    #[error("the connection was lost: {0}")]
    Lost(String),
    #[error("the peer did not answer in time")]
    TimedOut,
    #[error("the peer broke the protocol: {0}")]
    PeerFault(String),
    #[error("the peer refused what we did: {0}")]
    RefusedByPeer(String),
}

impl Cause {
    /// One word for counting.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Peer => "peer",
            Self::Lost(_) => "lost",
            Self::TimedOut => "timed_out",
            Self::PeerFault(_) => "peer_fault",
            Self::RefusedByPeer(_) => "refused_by_peer",
        }
    }
}

/// Why a fabric cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("{0} is no address of this fabric")]
    Address(Address),
    #[error("{0} is taken")]
    AddressInUse(Address),
    #[error("{len} octets of private data; a request carries {PRIVATE_DATA_BYTES_MAX}")]
    PrivateDataTooLong { len: usize },
    #[error("the connection request came from another fabric")]
    ForeignRequest,
    #[error("the queue pair was established, or ended, before")]
    State,
    #[error("memory that begins at no multiple of 8 octets cannot be registered")]
    Unaligned,
    #[error("a queue pair with a depth of zero or above {max} is of no use")]
    Attributes { max: usize },
}

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    #[error("{posted} requests on top of those in flight are more than the depth of {depth}")]
    Full { posted: usize, depth: usize },
    #[error("{len} inline octets, the limit is {max}")]
    InlineTooLong { len: usize, max: usize },
    #[error("the range {start}..{end} does not lie in the buffer of {len} octets")]
    Range { start: usize, end: usize, len: usize },
    #[error("the buffer was allocated by another queue pair")]
    ForeignBuffer,
    #[error("a Read, and the queue pair was made for none")]
    NeverReads,
    #[error("the queue pair is not connected yet")]
    NotConnected,
    #[error("the connection has ended")]
    Ended,
}

/// The words of a refusal, of at most [`PRIVATE_DATA_BYTES_MAX`] octets and fit to be printed, without the zeros that some
/// fabrics put behind them. `None` if it has none.
pub fn said(private_data: &[u8]) -> Option<String> {
    let said = &private_data[..private_data.len().min(PRIVATE_DATA_BYTES_MAX)];
    let last = said.iter().rposition(|octet| *octet != 0)?;
    Some(said[..=last].escape_ascii().to_string())
}

/// What a lane holds, for gauges and for tests that nothing leaks.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Resources {
    /// Queue pairs whose last event has not been handed out.
    pub queue_pairs: usize,
    /// Registered regions.
    pub regions: usize,
    /// Connections that listeners of this lane know and nobody has admitted or rejected.
    pub half_open: usize,
    /// Listeners.
    pub listeners: usize,
    /// Connections that ended here and whose peer has not said goodbye.
    pub closing: usize,
}

/// A kind of network.
pub trait Fabric: Send + Sync + fmt::Debug {
    /// Its name in URLs.
    fn name(&self) -> &'static str;

    /// A lane for one thread.
    ///
    /// # Errors
    /// [`FabricError::System`] when descriptors or memory are short.
    fn lane(&self) -> Result<Arc<dyn Lane>, FabricError>;
}

/// Drives the queue pairs of one thread.
pub trait Lane: Send + Sync + fmt::Debug {
    /// Waits for peers at `address`; their requests are events of this lane. Dropping the listener ends it.
    ///
    /// # Errors
    /// [`FabricError::Address`], [`FabricError::AddressInUse`], [`FabricError::System`].
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError>;

    /// A queue pair for a connection to `address`. Nothing is sent before [`QueuePair::establish`].
    ///
    /// # Errors
    /// [`FabricError::Address`], [`FabricError::Attributes`], [`FabricError::System`].
    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError>;

    /// A queue pair for the peer that asked, on this lane, whichever lane listened. Dropping it before
    /// [`QueuePair::establish`] rejects the request. On an error the request is rejected.
    ///
    /// # Errors
    /// [`FabricError::ForeignRequest`], [`FabricError::Attributes`], [`FabricError::System`].
    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError>;

    /// One turn: moves at most [`TURN_BYTES_MAX`] octets per queue pair and direction and appends at most `events_max`
    /// events. `true` when there is more to do right now.
    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool;

    /// From now on work makes the descriptor readable. Call [`Lane::progress`] exactly once more before sleeping, for what
    /// came before; the call after that, the first one awake, takes the arming back.
    fn arm(&self);

    /// What to sleep on: readable when there is something to do. Level-triggered; valid for the life of the lane.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// When [`Lane::progress`] must be called again though nothing happens.
    fn deadline(&self) -> Option<Instant>;

    /// Whether a sleeper is woken by what its peers write. Where not, Writes are found by looking: [`Lane::progress`] costs
    /// no system call, and a sleep lasts as long as was guessed beforehand.
    fn wakes_for_writes(&self) -> bool {
        true
    }

    /// What the lane holds.
    fn resources(&self) -> Resources;
}

/// Lets the tokio runtime of this thread wait for [`Lane::descriptor`]: after [`Lane::arm`] and one more
/// [`Lane::progress`] without news, `readable().await` and `clear_ready()`.
///
/// # Errors
/// What the system says when no descriptor is left.
///
/// # Panics
/// Outside of a runtime.
pub fn watch(lane: &dyn Lane) -> io::Result<AsyncFd<File>> {
    sys::watch(File::from(lane.descriptor().try_clone_to_owned()?))
}

/// Puts this thread to sleep until [`Lane::descriptor`] is readable or `until` has come (`None`: no such time), after
/// [`Lane::arm`] and one more [`Lane::progress`] without news. It may wake for no reason.
///
/// # Errors
/// What the system says.
pub fn sleep(lane: &dyn Lane, until: Option<Instant>) -> io::Result<()> {
    sys::wait_readable(lane.descriptor(), until.map(|until| until.saturating_duration_since(Instant::now())))
}

/// Accepts peers at one address, for as long as it lives.
pub trait Listener: Send + Sync + fmt::Debug {
    /// The address in use; of port 0, the port that was found.
    fn address(&self) -> Address;
}

/// One end of a connection. Dropping it disconnects; its lane goes on to report its events up to the last.
pub trait QueuePair: Send + Sync + fmt::Debug {
    fn number(&self) -> QpNum;

    /// What was granted.
    fn attributes(&self) -> Attributes;

    /// Private buffers registered with this queue pair, `buf_bytes` octets each (rounded up to 4 KiB).
    ///
    /// # Errors
    /// [`FabricError::System`].
    fn allocate(&self, buf_bytes: usize, count: usize) -> Result<Vec<LocalBuf>, FabricError>;

    /// Opens `span` to the peer of this queue pair. Its memory must begin at a multiple of 8 octets.
    ///
    /// # Errors
    /// [`FabricError::Unaligned`], [`FabricError::System`].
    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError>;

    /// Whether the peer can close regions of this side by a Send with Invalidate, cheaply and so that nothing of them is
    /// left. Without it, such a right is not given away.
    fn can_be_invalidated(&self) -> bool {
        true
    }

    /// Asks the peer that was dialled, or accepts the peer that was admitted. Registering and posting Receives belong
    /// before it: the peer may act on the private data at once.
    ///
    /// # Errors
    /// [`FabricError::PrivateDataTooLong`], [`FabricError::State`] for a second call, [`FabricError::System`].
    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError>;

    /// Takes all of `work`, in order, or nothing of it. A responder may post after [`QueuePair::establish`], an initiator
    /// after [`Event::Established`]. Gives the id of the first; each next has an index one higher.
    ///
    /// # Errors
    /// Any [`PostError`]; `work` is then as it was.
    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError>;

    /// Lends a buffer to one message of the peer. Allowed before the connection is made.
    ///
    /// # Errors
    /// Any [`PostError`], with the buffer.
    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)>;

    /// Starts posted work at once, on this thread, as far as it goes in one turn. Events still come from the lane. Without
    /// effect where hardware does the work.
    fn kick(&self);

    /// Gives back memory that a busy time has made grow. For now and then: what is needed again is made anew.
    fn rest(&self) {}

    /// Ends the connection. Requests not completed are flushed: wait for completions first. Octets of completed ones
    /// still reach the peer.
    fn disconnect(&self);
}

/// A peer that waits for an answer. Dropping it rejects it without private data.
#[must_use = "dropping a request rejects it"]
pub struct ConnectRequest {
    peer: Address,
    listener: Address,
    private_data: Vec<u8>,
    pending: Option<Box<dyn Pending>>,
}

/// What a fabric remembers of a peer that waits.
trait Pending: Send {
    fn reject(self: Box<Self>, private_data: &[u8]);
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl ConnectRequest {
    fn new(peer: Address, listener: Address, private_data: Vec<u8>, pending: Box<dyn Pending>) -> Self {
        Self { peer, listener, private_data, pending: Some(pending) }
    }

    /// Who asks.
    pub fn peer(&self) -> &Address {
        &self.peer
    }

    /// The address of the listener that was asked.
    pub fn listener(&self) -> &Address {
        &self.listener
    }

    /// The peer's private data, at times longer than what its upper layer sent.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Declines; at most [`PRIVATE_DATA_BYTES_MAX`] octets say why, more are cut off.
    pub fn reject(mut self, private_data: &[u8]) {
        if let Some(pending) = self.pending.take() {
            pending.reject(&private_data[..private_data.len().min(PRIVATE_DATA_BYTES_MAX)]);
        }
    }

    /// The fabric's own part, if `P` is its type; else the request is rejected.
    fn into_pending<P: Pending + 'static>(mut self) -> Result<Box<P>, FabricError> {
        let pending = self.pending.take().ok_or(FabricError::ForeignRequest)?;
        pending.into_any().downcast().map_err(|_| FabricError::ForeignRequest)
    }
}

impl Drop for ConnectRequest {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            pending.reject(&[]);
        }
    }
}

impl fmt::Debug for ConnectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectRequest").field("peer", &self.peer).field("listener", &self.listener).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_shown_as_words_whatever_it_holds() {
        for (private_data, shown) in [
            (&b"not_allowed"[..], "not_allowed"),
            (b"busy\0\0\0", "busy"),
            (b"closed today", "closed today"),
            (b"\x1b[2J\n\0", "\\x1b[2J\\n"),
            (b"\0a", "\\x00a"),
            (&[b'x'; 148], &"x".repeat(PRIVATE_DATA_BYTES_MAX)),
        ] {
            assert_eq!(said(private_data).as_deref(), Some(shown));
        }
        for nothing in [&[][..], &[0; 148]] {
            assert_eq!(said(nothing), None);
        }
    }
}
