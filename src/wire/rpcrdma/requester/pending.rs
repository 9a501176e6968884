//! A call that was made, the memory opened for it, and what its reply may be.

use super::super::chunk::{ChunkLists, ReadSegment, Segment, octets_returned};
use super::super::header::{Header, Placement, Transport};
use super::super::{RemoteKey, Xid};
use super::plan::{self, Call, Memory};
use super::{Failure, RegionId, Reply, ReplyFault, Stream};
use crate::wire::onc_rpc::Part;
use std::num::NonZeroU32;
use std::time::Instant;

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    Waiting,
    /// Regions are being opened.
    Registering,
    Sent,
    /// Regions are being closed.
    Fencing(Result<Reply, Failure>),
    /// Over for its caller, and its reply is still to come.
    Orphan,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Access {
    /// The owner was asked to open it.
    Asked,
    Open,
    /// The owner was asked to close it.
    Closing,
    Closed,
}

#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) id: RegionId,
    pub(super) plan: plan::Region,
    pub(super) access: Access,
    pub(super) segments: Vec<Segment>,
}

impl Region {
    fn has(&self, key: RemoteKey) -> bool {
        self.segments.first().is_some_and(|segment| segment.handle == key)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Pending {
    /// Calls before this one.
    pub(super) number: u64,
    pub(super) call: Call,
    pub(super) stage: Stage,
    pub(super) is_cancelled: bool,
    /// It was under way beside one that was cancelled at once, and their connection was lost: the responder may take it for
    /// that one.
    pub(super) is_bystander: bool,
    /// It is sent again on the next connection, whatever its outcome.
    pub(super) is_again: bool,
    /// It holds a credit.
    pub(super) is_unanswered: bool,
    pub(super) attempts: u32,
    pub(super) deadline: Option<Instant>,
    pub(super) placement: Placement,
    pub(super) inline: Vec<Part>,
    pub(super) regions: Vec<Region>,
}

impl Pending {
    /// The responder has closed the region of `key`. `false` if that is none of this call's.
    pub(super) fn close_by_peer(&mut self, key: RemoteKey) -> bool {
        let Some(region) = self.regions.iter_mut().find(|region| region.has(key)) else { return false };
        // What the owner is closing it closes, or finds closed.
        if region.access == Access::Open {
            region.access = Access::Closed;
        }
        true
    }

    /// Header and payload.
    pub(super) fn message(&self, xid: Xid, credits: NonZeroU32) -> Vec<Part> {
        let mut lists = ChunkLists::default();
        for region in &self.regions {
            let segments = || region.segments.clone();
            match (region.plan.position, &region.plan.memory) {
                (Some(position), _) => {
                    lists.reads.extend(region.segments.iter().map(|target| ReadSegment { position, target: *target }));
                }
                (None, Memory::Reply) => lists.reply = Some(segments()),
                (None, _) => lists.writes.push(segments()),
            }
        }
        let header = Header { xid, credit: credits.get(), placement: self.placement, lists }.encode();
        let mut message = vec![Part::Bytes(header)];
        message.extend_from_slice(&self.inline);
        message
    }

    /// Holds a reply against what was offered.
    pub(super) fn judge(&self, reply: &Transport<'_>) -> Result<Reply, ReplyFault> {
        let offered = |wanted: fn(&Memory) -> bool| {
            let regions = self.regions.iter().filter(move |region| wanted(&region.plan.memory));
            regions.map(|region| region.segments.as_slice())
        };
        let writes: Vec<&[Segment]> = offered(|memory| matches!(memory, Memory::Result(_))).collect();
        let returned = reply.writes.chunks().count();
        // A responder that leaves the whole list out has written nothing; others do that when a call failed.
        if returned != writes.len() && returned != 0 {
            return Err(ReplyFault::WriteChunks { offered: writes.len(), returned });
        }
        let mut results = vec![0; writes.len()];
        for (index, (chunk, offered)) in reply.writes.chunks().zip(&writes).enumerate() {
            let octets = octets_returned(offered, chunk.segments());
            results[index] = octets.map_err(|error| ReplyFault::WriteChunk { index, error })?;
        }
        let in_chunk = match (offered(|memory| *memory == Memory::Reply).next(), reply.reply) {
            (_, None) => 0,
            (None, Some(_)) => return Err(ReplyFault::ReplyChunk),
            (Some(offered), Some(chunk)) => octets_returned(offered, chunk.segments()).map_err(ReplyFault::Returned)?,
        };
        let stream = match (reply.placement, in_chunk) {
            (Placement::Inline, 0) => Stream::Inline(reply.payload.to_vec()),
            (Placement::Inline, octets) => return Err(ReplyFault::Both(octets)),
            (Placement::Chunk, 0) => return Err(ReplyFault::NoPayload),
            (Placement::Chunk, octets) => Stream::Chunk(octets),
        };
        Ok(Reply { stream, results })
    }
}

/// The segments of a region: each as long as may be.
pub(super) fn cut(handle: RemoteKey, address: u64, len: u64, segment_bytes_max: NonZeroU32) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut offset = 0;
    while offset < len {
        let length = (len - offset).min(segment_bytes_max.get().into()) as u32;
        segments.push(Segment { handle, length, offset: address.wrapping_add(offset) });
        offset += u64::from(length);
    }
    segments
}
