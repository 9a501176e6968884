//! What serves one peer on a byte stream, whatever is spoken there: a session, pure, between a socket, the store and the
//! disk.
//!
//! ```text
//!  socket ──▶ targets, handle_input ──▶ process ──▶ gather, handle_sent ──▶ socket
//!                                         │  ▲
//!                             poll_action ▼  │ handle_claim, handle_segment, handle_retry, handle_read
//!                                      store and disk
//! ```
//! The owner reads into [`StreamSession::targets`], calls [`StreamSession::process`], and does what
//! [`StreamSession::poll_action`] and [`StreamSession::gather`] give. Nothing in a session waits: what cannot go on says so and
//! is gone on with by a `handle_*` call.

pub mod pieces;

use crate::fabric::staging::StagingBuf;
use crate::store::claims::Claim;
use crate::store::draft::Want;
use crate::store::pool::ExtentId;
use crate::store::segment::{Crcs, Filling, Segment};
use std::io::IoSlice;
use std::sync::Arc;

/// Input buffer of a connection that is not idle, as far as lines and messages need one.
pub const INPUT_BYTES: usize = 16 << 10;
/// Buffers that one connection may have filled or on their way, however many others want some.
pub const TAIL_READS: usize = 4;
/// The same while buffers are plenty. A fast drive needs two to four megabytes on their way.
pub const TAIL_READS_MAX: usize = 16;
/// Slices that one gather takes: the kernel's limit is 1,024, and a megabyte needs four.
pub const SLICES_MAX: usize = 128;
/// Octets that one gather takes at most: a value of 1 MiB with what is around it leaves in one call.
pub const GATHER_BYTES_MAX: usize = (1 << 20) + (64 << 10);

/// What the owner must ask the `StoreActor` for.
#[derive(Debug)]
pub enum Ask {
    /// A claim; [`StreamSession::handle_claim`] follows.
    Reserve { len: u64 },
    /// A segment; [`StreamSession::handle_segment`] follows.
    Fill { want: Want },
    /// To say when something came free; [`StreamSession::handle_retry`] follows.
    Retry,
}

/// A disk read that is wanted.
#[derive(Debug)]
pub struct TailRead {
    pub ticket: u64,
    pub segment: Arc<Segment>,
    pub extent: ExtentId,
    pub crcs: Crcs,
}

/// What the owner must do for a session.
#[derive(Debug)]
pub enum Action {
    /// Ask the `StoreActor`.
    Ask(Ask),
    /// Start a disk read; [`StreamSession::handle_read`] follows.
    Read(TailRead),
}

/// Why a session ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    Quit,
    ByPeer,
    Protocol,
    FailedRead,
}

/// The machine of one connection.
pub trait StreamSession: Unpin + 'static {
    /// Whether octets of the peer are welcome now.
    fn wants_input(&self) -> bool;

    /// Where the next octets of the peer go: first into the first, then into the second. Either may be empty, not both while
    /// [`StreamSession::wants_input`].
    fn targets(&mut self) -> (&mut [u8], &mut [u8]);

    /// The peer sent `count` octets into [`StreamSession::targets`].
    fn handle_input(&mut self, count: usize);

    /// The peer sends no more.
    fn handle_eof(&mut self);

    /// Does all that can be done with what is there. Call it after every `handle_*`.
    fn process(&mut self);

    /// How many buffers the disk reads of this connection may have, [`TAIL_READS`] to [`TAIL_READS_MAX`]. It keeps those it
    /// has.
    fn set_tail_reads(&mut self, count: usize);

    /// Whether buffers of the disk are filled or on their way.
    fn has_tail_reads(&self) -> bool;

    /// What the owner must do next.
    fn poll_action(&mut self) -> Option<Action>;

    /// What can be sent now, from the front, at most [`GATHER_BYTES_MAX`] octets. Returns the octets.
    fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize;

    /// The first `count` octets of it were sent.
    fn handle_sent(&mut self, count: usize);

    /// The claim asked for, or none after too long a wait.
    fn handle_claim(&mut self, claim: Option<Claim>);

    /// The segment asked for, or none after too long a wait.
    fn handle_segment(&mut self, filling: Option<Filling>);

    /// Something came free, or some time went by.
    fn handle_retry(&mut self);

    /// The claim was taken back: its peer was idle while others waited.
    fn handle_revoked(&mut self);

    /// A disk read ended: its octets, or none if it failed.
    fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>);

    /// A read that [`StreamSession::poll_action`] gave could not be started for want of a buffer.
    fn handle_read_back(&mut self, ticket: u64);

    /// Gives buffers that were read and not sent to others that wait for them. Returns how many.
    fn give_back(&mut self) -> usize;

    /// Lets go of memory that the peer does not take, for writers that wait for some.
    fn give_back_memory(&mut self);

    /// The end, once everything before it was sent.
    fn ended(&self) -> Option<End>;

    /// Nobody has anything to do: no request, no reply.
    fn is_idle(&self) -> bool;

    /// It is the peer's turn to move an octet, and it has not since `since_ms` of the store's clock.
    fn is_stalled(&self, since_ms: u64) -> bool;

    /// When the peer last moved an octet, in milliseconds of the store's clock.
    fn moved_ms(&self) -> u64;

    /// A request is under way: what a shutdown waits for.
    fn is_busy(&self) -> bool;

    /// Gives memory back that only a busy connection needs.
    fn rest(&mut self);
}
