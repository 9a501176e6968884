//! Judges the header of a call: what can be said of it before its program has seen it (RFC 8166 §4.5.2).

use super::{Limits, Offer};
use crate::wire::codec::XdrError;
use crate::wire::onc_rpc::MessageType;
use crate::wire::rpcrdma::chunk::{ReadChunk, Segment};
use crate::wire::rpcrdma::header::{Header, Placement, Transport, payload_xid};
use crate::wire::rpcrdma::private_data::Agreed;
use crate::wire::rpcrdma::{RemoteKey, Xid};
use thiserror::Error;

/// Octets of xid and message type: fewer are no RPC message.
const RPC_BYTES_MIN: u64 = 8;
/// Octets that an item of XDR can have with its roundup.
const ITEM_BYTES_MAX: u64 = 1 << 32;

/// Why a call is answered with an RDMA_ERROR: [`Fault::Version`] with ERR_VERS, all others with ERR_CHUNK.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    #[error("RPC-over-RDMA version {0}")]
    Version(u32),
    #[error("procedure {0}")]
    Procedure(u32),
    #[error("chunk lists: {0}")]
    Lists(XdrError),
    #[error("no payload, and no chunk at position zero to pull it from")]
    NoStream,
    /// The RFC is silent; two streams would leave open which one counts.
    #[error("a payload, and a chunk at position zero too")]
    TwoStreams,
    #[error("{0} octets behind a header that has no payload")]
    Behind(usize),
    #[error("the payload is no RPC call")]
    NotACall,
    #[error("the xids of header and RPC message differ")]
    Xid,
    #[error("read position {0} is not a multiple of four")]
    Alignment(u32),
    #[error("read position {position} is past the stream")]
    PastStream { position: u32 },
    #[error("read position {position} is inside the chunk before it")]
    Overlap { position: u32 },
    #[error("a segment reaches past the end of memory")]
    Wraps,
    #[error("a long call of {0} octets")]
    LongCall(u64),
    #[error("a read chunk of {0} octets")]
    ReadChunk(u64),
    #[error("read chunks of {0} octets")]
    ReadBytes(u64),
    #[error("{0} read segments")]
    ReadSegments(usize),
    /// The reply has to repeat all that was offered.
    #[error("the header of a reply would have {bytes} octets, the peer receives {inline_bytes}")]
    ReplyHeader { bytes: usize, inline_bytes: u32 },
    #[error("a result of {bytes} octets for write chunk {index} of {chunk_bytes}")]
    WriteChunk { index: usize, bytes: u64, chunk_bytes: u64 },
    #[error("a reply of {bytes} octets, the peer receives {inline_bytes} and offers no reply chunk")]
    NoReplyChunk { bytes: u64, inline_bytes: u32 },
    #[error("a reply of {bytes} octets for a reply chunk of {chunk_bytes}")]
    ReplyChunk { bytes: u64, chunk_bytes: u64 },
    #[error("a reply of {bytes} octets without write chunks for them, {bytes_max} can be held")]
    LongReply { bytes: u64, bytes_max: u64 },
    /// What the upper-layer binding does not allow (§6.1).
    #[error("a chunk where the program has no item that may be in one")]
    Ineligible,
    /// An RDMA Read or Write of this call ended a connection before: it is not tried again (§4.5.3).
    #[error("its memory could not be reached when the call came before")]
    FailedBefore,
}

impl Fault {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Version(_) => "version",
            Self::Procedure(_) => "procedure",
            Self::Lists(_) => "lists",
            Self::NoStream => "no_stream",
            Self::TwoStreams => "two_streams",
            Self::Behind(_) => "behind",
            Self::NotACall => "not_a_call",
            Self::Xid => "xid",
            Self::Alignment(_) => "alignment",
            Self::PastStream { .. } => "past_stream",
            Self::Overlap { .. } => "overlap",
            Self::Wraps => "wraps",
            Self::LongCall(_) => "long_call",
            Self::ReadChunk(_) => "read_chunk",
            Self::ReadBytes(_) => "read_bytes",
            Self::ReadSegments(_) => "read_segments",
            Self::ReplyHeader { .. } => "reply_header",
            Self::WriteChunk { .. } => "write_chunk",
            Self::NoReplyChunk { .. } => "no_reply_chunk",
            Self::ReplyChunk { .. } => "reply_chunk",
            Self::LongReply { .. } => "long_reply",
            Self::Ineligible => "ineligible",
            Self::FailedBefore => "failed_before",
        }
    }
}

/// What is left to do for a call that passed.
pub(super) struct Judged {
    pub long: Option<ReadChunk>,
    pub reads: Vec<ReadChunk>,
    pub offer: Offer,
}

pub(super) fn judge(call: &Transport<'_>, limits: &Limits, agreed: &Agreed) -> Result<Judged, Fault> {
    let segment_count = call.reads.segments().count();
    if segment_count > limits.read_segments_max {
        return Err(Fault::ReadSegments(segment_count));
    }
    if let Some(segment) = call.reads.segments().find(|segment| !segment.position.is_multiple_of(4)) {
        return Err(Fault::Alignment(segment.position));
    }
    let mut header = call.to_header();
    if !segments(&header).all(Segment::is_addressable) {
        return Err(Fault::Wraps);
    }
    let mut reads = ReadChunk::gather(header.lists.reads.iter().copied());
    let long = if reads.first().is_some_and(|chunk| chunk.position == 0) { Some(reads.remove(0)) } else { None };
    let stream_bytes = match (call.placement, &long) {
        (Placement::Inline, None) => {
            judge_stream(call.xid, call.payload)?;
            call.payload.len() as u64
        }
        (Placement::Inline, Some(_)) => return Err(Fault::TwoStreams),
        (Placement::Chunk, None) => return Err(Fault::NoStream),
        (Placement::Chunk, Some(_)) if !call.payload.is_empty() => return Err(Fault::Behind(call.payload.len())),
        (Placement::Chunk, Some(long)) if long.len > u64::from(limits.long_call_bytes_max) => {
            return Err(Fault::LongCall(long.len));
        }
        (Placement::Chunk, Some(long)) if long.len < RPC_BYTES_MIN => return Err(Fault::NotACall),
        (Placement::Chunk, Some(long)) => long.len,
    };
    judge_positions(&reads, stream_bytes)?;
    if let Some(chunk) = reads.iter().find(|chunk| chunk.len > limits.read_chunk_bytes_max.min(ITEM_BYTES_MAX)) {
        return Err(Fault::ReadChunk(chunk.len));
    }
    let read_bytes = reads.iter().chain(&long).map(|chunk| chunk.len).sum();
    if read_bytes > limits.read_bytes_max {
        return Err(Fault::ReadBytes(read_bytes));
    }
    let invalidate = agreed.remote_invalidate.then(|| one_handle(&header)).flatten();
    header.lists.reads.clear();
    let bytes = header.encoded_bytes();
    if bytes > agreed.reply_inline_bytes as usize {
        return Err(Fault::ReplyHeader { bytes, inline_bytes: agreed.reply_inline_bytes });
    }
    let offer = Offer { writes: header.lists.writes, reply: header.lists.reply, invalidate };
    Ok(Judged { long, reads, offer })
}

/// Judges the beginning of a payload stream.
pub(super) fn judge_stream(xid: Xid, stream: &[u8]) -> Result<(), Fault> {
    if payload_xid(stream) != Some(xid) {
        return Err(Fault::Xid);
    }
    match MessageType::of(stream) {
        Some(MessageType::Call) => Ok(()),
        Some(MessageType::Reply) | None => Err(Fault::NotACall),
    }
}

/// Positions count octets of the stream with all items in it, their roundup included, so each chunk moves those behind it.
fn judge_positions(reads: &[ReadChunk], stream_bytes: u64) -> Result<(), Fault> {
    let (mut removed, mut end) = (0, 0);
    for chunk in reads {
        let position = u64::from(chunk.position);
        if position < end {
            return Err(Fault::Overlap { position: chunk.position });
        }
        // No underflow: `end` is never less than what was removed before it.
        if position - removed > stream_bytes {
            return Err(Fault::PastStream { position: chunk.position });
        }
        removed += chunk.stream_bytes();
        end = position + chunk.stream_bytes();
    }
    Ok(())
}

/// Every segment that a header names.
fn segments(header: &Header) -> impl Iterator<Item = &Segment> {
    let lists = &header.lists;
    let reads = lists.reads.iter().map(|segment| &segment.target);
    reads.chain(lists.writes.iter().flatten()).chain(lists.reply.iter().flatten())
}

/// The handle that all segments share. Some peers offer memory that outlives the call beside memory that does not, and
/// nothing tells them apart: so only a call with one handle has one that may be invalidated.
fn one_handle(header: &Header) -> Option<RemoteKey> {
    let mut all = segments(header).map(|segment| segment.handle);
    let first = all.next()?;
    all.all(|handle| handle == first).then_some(first)
}
