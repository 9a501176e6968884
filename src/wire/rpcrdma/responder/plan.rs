//! Places a reply: which item goes to which write chunk, what stays in the stream, and whether the stream goes behind the
//! header or to the reply chunk (RFC 8166 §3.4.6, §3.5.3, §4.3.2, §4.3.3).

use super::{Fault, Offer};
use crate::wire::codec::roundup_bytes;
use crate::wire::onc_rpc::{Item, Part, Payload};
use crate::wire::rpcrdma::chunk::{self, ChunkLists, Segment};
use crate::wire::rpcrdma::header::{Header, Placement};
use crate::wire::rpcrdma::{RemoteKey, Xid};
use std::ops::Range;

/// Octets that are sent or written.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Span {
    /// Of [`ReplyPlan::octets`].
    Octets(Range<usize>),
    /// `len` octets of the item that is named so, from its octet `start`.
    Item { token: u32, start: u64, len: u64 },
}

impl Span {
    pub fn len(&self) -> u64 {
        match self {
            Self::Octets(range) => range.len() as u64,
            Self::Item { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Parts it after `at` octets, no more than there are.
    fn split(self, at: u64) -> (Self, Self) {
        match self {
            Self::Octets(range) => {
                let middle = range.start + at as usize;
                (Self::Octets(range.start..middle), Self::Octets(middle..range.end))
            }
            Self::Item { token, start, len } => {
                (Self::Item { token, start, len: at }, Self::Item { token, start: start + at, len: len - at })
            }
        }
    }
}

/// An RDMA Write. None is empty, and those to one chunk fill it in order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Write {
    pub from: Span,
    pub handle: RemoteKey,
    /// Offset in what the handle names, as the peer counts.
    pub offset: u64,
}

/// How a call is answered: the Writes, in any order, then the Send.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ReplyPlan {
    /// Everything but the items.
    pub octets: Vec<u8>,
    pub writes: Vec<Write>,
    /// What is sent, one behind the other: never more than the peer receives.
    pub message: Vec<Span>,
    /// The Send invalidates this.
    pub invalidate: Option<RemoteKey>,
    /// The reply did not fit what was offered: the message is an RDMA_ERROR.
    pub fault: Option<Fault>,
}

impl ReplyPlan {
    pub(super) fn error(octets: Vec<u8>, fault: Fault) -> Self {
        let message = vec![Span::Octets(0..octets.len())];
        Self { octets, writes: Vec::new(), message, invalidate: None, fault: Some(fault) }
    }

    /// Octets of the Send.
    pub fn message_bytes(&self) -> u64 {
        self.message.iter().map(Span::len).sum()
    }
}

/// The stream that is left when items have gone to write chunks.
#[derive(Default)]
struct Stream {
    octets: Vec<u8>,
    spans: Vec<Span>,
    bytes: u64,
}

impl Stream {
    fn push_octets(&mut self, octets: &[u8]) {
        if octets.is_empty() {
            return;
        }
        let start = self.octets.len();
        self.octets.extend_from_slice(octets);
        self.bytes += octets.len() as u64;
        match self.spans.last_mut() {
            Some(Span::Octets(range)) => range.end = self.octets.len(),
            _ => self.spans.push(Span::Octets(start..self.octets.len())),
        }
    }

    fn push_item(&mut self, item: Item) {
        let len = u64::from(item.len);
        if len > 0 {
            self.spans.push(Span::Item { token: item.token, start: 0, len });
            self.bytes += len;
        }
        self.push_octets(&[0; 3][..roundup_bytes(len) as usize]);
    }
}

/// Places `payload`, the reply to `xid`, in what was offered.
pub(super) fn plan(
    xid: Xid,
    grant: u32,
    offer: &Offer,
    payload: &Payload,
    inline_bytes: u32,
) -> Result<ReplyPlan, Fault> {
    let mut stream = Stream::default();
    let mut writes = Vec::new();
    let mut returned = Vec::with_capacity(offer.writes.len());
    for part in payload.parts() {
        let item = match part {
            Part::Bytes(octets) => {
                stream.push_octets(octets);
                continue;
            }
            Part::Item(item) => *item,
        };
        // In list order, one chunk for each item, until either runs out.
        let index = returned.len();
        let Some(chunk) = offer.writes.get(index) else {
            stream.push_item(item);
            continue;
        };
        if chunk.is_empty() {
            stream.push_item(item);
            returned.push(Vec::new());
            continue;
        }
        let len = u64::from(item.len);
        let chunk_bytes = chunk::chunk_bytes(chunk);
        let filled = chunk::returned(chunk, len).ok_or(Fault::WriteChunk { index, bytes: len, chunk_bytes })?;
        place(&[Span::Item { token: item.token, start: 0, len }], &filled, &mut writes);
        returned.push(filled);
    }
    returned.extend(offer.writes[returned.len()..].iter().map(|chunk| unused(chunk)));

    let lists = ChunkLists { reads: Vec::new(), writes: returned, reply: offer.reply.as_deref().map(unused) };
    let mut header = Header { xid, credit: grant, placement: Placement::Inline, lists };
    let bytes = header.encoded_bytes() as u64 + stream.bytes;
    let is_short = bytes <= u64::from(inline_bytes);
    if !is_short {
        let chunk = offer.reply.as_deref().ok_or(Fault::NoReplyChunk { bytes, inline_bytes })?;
        let (bytes, chunk_bytes) = (stream.bytes, chunk::chunk_bytes(chunk));
        let filled = chunk::returned(chunk, bytes).ok_or(Fault::ReplyChunk { bytes, chunk_bytes })?;
        place(&stream.spans, &filled, &mut writes);
        header.placement = Placement::Chunk;
        header.lists.reply = Some(filled);
    }
    let mut octets = stream.octets;
    let start = octets.len();
    octets.extend(header.encode());
    let mut message = vec![Span::Octets(start..octets.len())];
    if is_short {
        message.append(&mut stream.spans);
    }
    Ok(ReplyPlan { octets, writes, message, invalidate: offer.invalidate, fault: None })
}

fn unused(chunk: &[Segment]) -> Vec<Segment> {
    chunk.iter().map(|segment| Segment { length: 0, ..*segment }).collect()
}

/// Writes `spans` to the segments of `filled`, which have exactly as many octets.
fn place(spans: &[Span], filled: &[Segment], writes: &mut Vec<Write>) {
    let mut spans = spans.iter().filter(|span| !span.is_empty()).cloned();
    let mut rest: Option<Span> = None;
    for segment in filled {
        let mut at = 0;
        while at < u64::from(segment.length) {
            let span = rest.take().or_else(|| spans.next()).expect("a chunk is filled with what there is");
            let len = span.len().min(u64::from(segment.length) - at);
            let (from, behind) = span.split(len);
            writes.push(Write { from, handle: segment.handle, offset: segment.offset + at });
            rest = (!behind.is_empty()).then_some(behind);
            at += len;
        }
    }
}
