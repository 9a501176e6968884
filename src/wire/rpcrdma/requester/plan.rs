//! How a call travels, and how its reply may: what goes inline, what into chunks (RFC 8166 §3.4, §3.5).
//!
//! ```text
//! fits                 RDMA_MSG                    | header | stream                          |
//! with items reduced   RDMA_MSG   + read chunks    | header, read list | stream without them |
//! still too long       RDMA_NOMSG + position zero  | header, read list |   and the stream without them in a chunk
//!
//! the largest reply fits                nothing is offered
//! too long, with eligible results       one write chunk for each, up to the last that may have octets
//! the rest of it still too long         a reply chunk for the rest
//! ```

use super::super::chunk::{READ_ITEM_BYTES, SEGMENT_BYTES};
use super::super::header::{HEADER_BYTES_MIN, Placement};
use super::super::private_data::Agreed;
use crate::wire::codec::{UNIT_BYTES, roundup_bytes};
use crate::wire::onc_rpc::{Item, Part, Payload};
use std::num::NonZeroU32;
use thiserror::Error;

/// Octets of a chunk for a result that can have none: an empty segment is nothing to offer, and without a chunk the
/// results behind it would take the wrong ones.
pub const CHUNK_BYTES_MIN: u64 = 1;
/// Words in front of the segments of a write chunk in its list, and of a reply chunk.
const WRITE_CHUNK_WORDS: usize = 8;
const REPLY_CHUNK_WORDS: usize = 4;

/// When eligible items travel in chunks.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Reduction {
    /// Where the message would not fit otherwise.
    #[default]
    Fit,
    /// Whatever their size, but for those that have no octets.
    Always,
    /// Never: a message that does not fit goes whole. So under RPCSEC_GSS integrity and privacy (§8.2.2.3).
    Never,
}

/// What is asked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Call {
    /// The call message, its xid that of [`Requester::mint_xid`](super::Requester::mint_xid). Items are eligible
    /// arguments.
    pub message: Payload,
    pub arguments: Reduction,
    /// Octets that each eligible result can have at most, in stream order.
    pub results: Vec<u32>,
    pub results_reduction: Reduction,
    /// Octets of the largest reply message, the octets and roundup of eligible results not counted.
    pub reply_bytes_max: u64,
}

/// What a plan is made for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Terms {
    pub agreed: Agreed,
    /// Longer memory is offered in several segments.
    pub segment_bytes_max: NonZeroU32,
}

/// A call that cannot be made over a connection with these thresholds: its lists alone are too long.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("a header of {bytes} octets, the threshold is {threshold}")]
pub struct TooLong {
    pub bytes: u64,
    pub threshold: u32,
}

/// What the memory of a region is for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Memory {
    /// The call message itself, these parts one behind the other: the chunk at position zero.
    Call(Vec<Part>),
    /// An argument.
    Argument(Item),
    /// The eligible result of this index.
    Result(usize),
    /// The reply message, less what goes into write chunks.
    Reply,
}

/// Memory that the responder is to reach.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Region {
    pub memory: Memory,
    /// Octets, at least one.
    pub len: u64,
    /// Of a read chunk, where it belongs.
    pub position: Option<u32>,
}

/// How a call travels.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Plan {
    pub placement: Placement,
    /// What is sent behind the header.
    pub inline: Vec<Part>,
    /// By position, then the results in order, then the reply.
    pub regions: Vec<Region>,
}

impl Terms {
    /// Segments for `len` octets.
    fn segment_count(&self, len: u64) -> usize {
        // The longest item has 2^32 octets with its roundup, a stream what was allocated for it.
        len.div_ceil(u64::from(self.segment_bytes_max.get())) as usize
    }

    fn write_chunk_bytes(&self, len: u64) -> usize {
        WRITE_CHUNK_WORDS + self.segment_count(len) * SEGMENT_BYTES
    }
}

impl Plan {
    /// The plan for `call`.
    ///
    /// # Errors
    /// [`TooLong`].
    pub fn of(call: &Call, terms: &Terms) -> Result<Self, TooLong> {
        let offered = Offered::of(call, terms)?;
        let candidates = candidates(call);
        let arguments = Arguments::of(call, terms, offered.header_bytes, &candidates)?;
        let is_reduced = |at: usize| arguments.reduced.iter().any(|reduced| reduced.part == at);
        let stream = stream(call.message.parts(), is_reduced);
        let mut regions = Vec::new();
        let (placement, inline) = match arguments.placement {
            Placement::Inline => (Placement::Inline, stream),
            Placement::Chunk => {
                let len = parts_bytes(&stream);
                regions.push(Region { memory: Memory::Call(stream), len, position: Some(0) });
                (Placement::Chunk, Vec::new())
            }
        };
        regions.extend(arguments.reduced.iter().map(|candidate| Region {
            memory: Memory::Argument(candidate.item),
            len: candidate.item.len.into(),
            position: Some(candidate.position),
        }));
        let results = offered.results.iter().enumerate();
        regions.extend(results.map(|(at, len)| Region { memory: Memory::Result(at), len: *len, position: None }));
        regions.extend(offered.reply.map(|len| Region { memory: Memory::Reply, len, position: None }));
        Ok(Self { placement, inline, regions })
    }
}

/// What the responder is offered for its reply.
struct Offered {
    /// Octets of each write chunk.
    results: Vec<u64>,
    /// Octets of the reply chunk.
    reply: Option<u64>,
    /// Octets of the call's header with these, without read chunks.
    header_bytes: usize,
}

impl Offered {
    fn of(call: &Call, terms: &Terms) -> Result<Self, TooLong> {
        let threshold = terms.agreed.reply_inline_bytes;
        let in_stream = |len: u32| u64::from(len) + roundup_bytes(len.into());
        let reduced = call.reply_bytes_max + roundup_bytes(call.reply_bytes_max);
        let whole = reduced + call.results.iter().map(|len| in_stream(*len)).sum::<u64>();
        let fits = |lists: usize, payload: u64| (HEADER_BYTES_MIN + lists) as u64 + payload <= threshold.into();
        let wants_chunks = match call.results_reduction {
            Reduction::Fit => !fits(0, whole),
            Reduction::Always => true,
            Reduction::Never => false,
        };
        // What comes behind the last chunk stays inline, and nothing is left there that has octets.
        let count = call.results.iter().rposition(|len| *len > 0).filter(|_| wants_chunks).map_or(0, |last| last + 1);
        let chunk_bytes = |len: &u32| u64::from(*len).max(CHUNK_BYTES_MIN);
        let results: Vec<u64> = call.results[..count].iter().map(chunk_bytes).collect();
        let lists: usize = results.iter().map(|len| terms.write_chunk_bytes(*len)).sum();
        let payload = if count > 0 { reduced } else { whole };
        let reply = (!fits(lists, payload)).then_some(payload);
        let reply_list = reply.map_or(0, |len| REPLY_CHUNK_WORDS + terms.segment_count(len) * SEGMENT_BYTES);
        let header_bytes = HEADER_BYTES_MIN + lists + reply_list;
        // Then the reply is a header that repeats the lists, and nothing else.
        if reply.is_some() && header_bytes as u64 > threshold.into() {
            return Err(TooLong { bytes: header_bytes as u64, threshold });
        }
        Ok(Self { results, reply, header_bytes })
    }
}

/// An argument that may be reduced.
#[derive(Clone, Copy)]
struct Candidate {
    /// Index in the message.
    part: usize,
    item: Item,
    position: u32,
}

impl Candidate {
    /// Octets that it takes inline.
    fn inline_bytes(&self) -> u64 {
        u64::from(self.item.len) + roundup_bytes(self.item.len.into())
    }

    /// Octets that it takes in the read list.
    fn list_bytes(&self, terms: &Terms) -> u64 {
        (terms.segment_count(self.item.len.into()) * READ_ITEM_BYTES) as u64
    }
}

/// Items with octets, whose position is a word.
fn candidates(call: &Call) -> Vec<Candidate> {
    let mut position = 0_u64;
    let mut found = Vec::new();
    for (part, each) in call.message.parts().iter().enumerate() {
        match each {
            Part::Bytes(bytes) => position += bytes.len() as u64,
            Part::Item(item) => {
                if let Ok(position) = u32::try_from(position)
                    && item.len > 0
                {
                    found.push(Candidate { part, item: *item, position });
                }
                position += u64::from(item.len) + roundup_bytes(item.len.into());
            }
        }
    }
    found
}

struct Arguments {
    placement: Placement,
    /// In stream order.
    reduced: Vec<Candidate>,
}

impl Arguments {
    fn of(call: &Call, terms: &Terms, header_bytes: usize, candidates: &[Candidate]) -> Result<Self, TooLong> {
        let threshold = terms.agreed.call_inline_bytes;
        let whole = call.message.stream_bytes();
        let mut reduced: Vec<Candidate> = match call.arguments {
            Reduction::Fit | Reduction::Never => Vec::new(),
            Reduction::Always => candidates.to_vec(),
        };
        let header = |reduced: &[Candidate]| {
            header_bytes as u64 + reduced.iter().map(|candidate| candidate.list_bytes(terms)).sum::<u64>()
        };
        let payload = |reduced: &[Candidate]| whole - reduced.iter().map(Candidate::inline_bytes).sum::<u64>();
        let fits = |reduced: &[Candidate]| header(reduced) + payload(reduced) <= threshold.into();
        if call.arguments == Reduction::Fit && !fits(&reduced) {
            let is_gain = |candidate: &&Candidate| candidate.inline_bytes() > candidate.list_bytes(terms);
            let mut left: Vec<Candidate> = candidates.iter().filter(is_gain).copied().collect();
            left.sort_by_key(|candidate| candidate.item.len);
            while !fits(&reduced)
                && let Some(longest) = left.pop()
            {
                reduced.push(longest);
            }
            reduced.sort_by_key(|candidate| candidate.part);
        }
        if fits(&reduced) {
            return Ok(Self { placement: Placement::Inline, reduced });
        }
        let with_stream =
            |reduced: &[Candidate]| header(reduced) + (terms.segment_count(payload(reduced)) * READ_ITEM_BYTES) as u64;
        if with_stream(&reduced) <= threshold.into() {
            return Ok(Self { placement: Placement::Chunk, reduced });
        }
        // The stream takes what the read list has no room for.
        let bytes = with_stream(&[]);
        if bytes <= threshold.into() {
            return Ok(Self { placement: Placement::Chunk, reduced: Vec::new() });
        }
        Err(TooLong { bytes, threshold })
    }
}

/// The stream without what is reduced, and with the roundup of what is not.
fn stream(parts: &[Part], is_reduced: impl Fn(usize) -> bool) -> Vec<Part> {
    let mut out: Vec<Part> = Vec::with_capacity(parts.len());
    for (at, part) in parts.iter().enumerate() {
        let octets: &[u8] = match part {
            Part::Bytes(bytes) => bytes,
            Part::Item(item) if item.len == 0 || is_reduced(at) => &[],
            Part::Item(item) => {
                out.push(part.clone());
                &[0; UNIT_BYTES - 1][..roundup_bytes(item.len.into()) as usize]
            }
        };
        match out.last_mut() {
            Some(Part::Bytes(bytes)) => bytes.extend_from_slice(octets),
            _ if octets.is_empty() => {}
            _ => out.push(Part::Bytes(octets.to_vec())),
        }
    }
    out
}

/// Octets of all parts together; items have no roundup here.
fn parts_bytes(parts: &[Part]) -> u64 {
    let bytes = |part: &Part| match part {
        Part::Bytes(bytes) => bytes.len() as u64,
        Part::Item(item) => item.len.into(),
    };
    parts.iter().map(bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::onc_rpc::PayloadWriter;
    use proptest::prelude::*;

    fn terms(call_inline_bytes: u32, reply_inline_bytes: u32, segment_bytes_max: u32) -> Terms {
        Terms {
            agreed: Agreed { call_inline_bytes, reply_inline_bytes, remote_invalidate: false },
            segment_bytes_max: NonZeroU32::new(segment_bytes_max).unwrap(),
        }
    }

    /// A call whose message has `words` words and, before the last of them, items of these lengths, each behind its own.
    fn call(words: usize, items: &[u32], results: &[u32], reply_bytes_max: u64) -> Call {
        let mut message = PayloadWriter::new();
        message.words().encoded(&vec![7; (words - items.len() - 1) * 4]);
        (0..).zip(items).for_each(|(token, len)| message.item(Item { token, len: *len }));
        message.words().u32(8);
        Call {
            message: message.finish(),
            arguments: Reduction::Fit,
            results: results.to_vec(),
            results_reduction: Reduction::Fit,
            reply_bytes_max,
        }
    }

    fn reduced(plan: &Plan) -> Vec<(u32, u64)> {
        plan.regions.iter().filter_map(|region| Some((region.position?, region.len))).collect()
    }

    /// Octets of each write chunk, and of the reply chunk.
    fn offered(plan: &Plan) -> (Vec<u64>, Option<u64>) {
        let len_of = |wanted: fn(&Memory) -> bool| {
            plan.regions.iter().filter(move |region| wanted(&region.memory)).map(|region| region.len)
        };
        let results = len_of(|memory| matches!(memory, Memory::Result(_))).collect();
        (results, len_of(|memory| *memory == Memory::Reply).next())
    }

    #[test]
    fn what_is_exactly_as_long_as_the_threshold_fits() {
        let terms = terms(1024, 1024, u32::MAX);
        // 28 of header, 996 of stream.
        let fits = Plan::of(&call(249, &[], &[], 996), &terms).unwrap();
        assert_eq!((fits.placement, fits.regions.len()), (Placement::Inline, 0));
        let long = Plan::of(&call(250, &[], &[], 996), &terms).unwrap();
        assert_eq!((long.placement, reduced(&long)), (Placement::Chunk, vec![(0, 1000)]));
        assert!(long.inline.is_empty());
        let long_reply = Plan::of(&call(249, &[], &[], 997), &terms).unwrap();
        assert_eq!(offered(&long_reply), (vec![], Some(1000)), "a stream is whole words");
        assert_eq!(long_reply.placement, Placement::Chunk, "the reply chunk takes 20 octets of the call's header");
    }

    #[test]
    fn the_longest_items_are_reduced_until_the_rest_fits() {
        let terms = terms(1024, 1024, u32::MAX);
        let plan = Plan::of(&call(11, &[30, 600, 601, 20], &[], 40), &terms).unwrap();
        assert_eq!(plan.placement, Placement::Inline);
        // Seven words, then 32 and 600 octets, each with the length behind it.
        assert_eq!(reduced(&plan), [(28 + 36 + 604, 601)]);
        let plan = Plan::of(&call(11, &[30, 1200, 601, 20], &[], 40), &terms).unwrap();
        assert_eq!(reduced(&plan), [(28 + 36, 1200)]);
        assert_eq!(plan.inline.len(), 7, "{:?}", plan.inline);
    }

    #[test]
    fn what_is_left_of_a_long_call_goes_to_position_zero_beside_its_read_chunks() {
        let terms = terms(1024, 1024, 512);
        let plan = Plan::of(&call(400, &[4000], &[], 40), &terms).unwrap();
        assert_eq!(plan.placement, Placement::Chunk);
        assert_eq!(reduced(&plan), [(0, 1600), (1596, 4000)]);
        let whole = Call { arguments: Reduction::Never, ..call(400, &[4001], &[], 40) };
        let plan = Plan::of(&whole, &terms).unwrap();
        assert_eq!(reduced(&plan), [(0, 1600 + 4004)], "roundup included");
        // 50 segments have no room in the header.
        let plan = Plan::of(&call(400, &[50 * 512], &[], 40), &terms).map(|plan| plan.placement);
        assert_eq!(plan, Err(TooLong { bytes: 28 + 24 * 54, threshold: 1024 }));
    }

    #[test]
    fn nothing_is_offered_for_a_reply_that_fits() {
        let terms = terms(1024, 1024, u32::MAX);
        assert_eq!(offered(&Plan::of(&call(10, &[], &[100, 100], 44), &terms).unwrap()), (vec![], None));
        // 28 of header, 44 of reply, 952 of results.
        assert_eq!(offered(&Plan::of(&call(10, &[], &[100, 852], 44), &terms).unwrap()), (vec![], None));
        assert_eq!(offered(&Plan::of(&call(10, &[], &[100, 853], 44), &terms).unwrap()), (vec![100, 853], None));
    }

    #[test]
    fn chunks_reach_to_the_last_result_that_may_have_octets_and_none_is_empty() {
        let terms = terms(4096, 4096, u32::MAX);
        let wanted = Call { results_reduction: Reduction::Always, ..call(10, &[], &[9, 0, 5, 0, 0], 44) };
        assert_eq!(offered(&Plan::of(&wanted, &terms).unwrap()), (vec![9, 1, 5], None));
        let nothing = Call { results_reduction: Reduction::Always, ..call(10, &[], &[0, 0], 44) };
        assert_eq!(offered(&Plan::of(&nothing, &terms).unwrap()), (vec![], None));
        let inline = Call { results_reduction: Reduction::Never, ..call(10, &[], &[9000, 5], 44) };
        assert_eq!(offered(&Plan::of(&inline, &terms).unwrap()), (vec![], Some(44 + 9000 + 8)));
    }

    #[test]
    fn a_batch_is_bounded_by_both_thresholds() {
        let get = |count: usize| call(11 + 9 * count, &[], &vec![65_536; count], 28 + 36 * count as u64);
        let of = |count, call_bytes, reply_bytes| Plan::of(&get(count), &terms(call_bytes, reply_bytes, u32::MAX));
        assert!(of(64, 4096, 4096).is_ok());
        assert!(of(256, 8192, 8192).is_ok());
        // 28 + 24 for each, 24 for the stream, and 20 for the reply chunk once it is needed.
        assert_eq!(of(41, 1024, 4096), Err(TooLong { bytes: 28 + 41 * 24 + 24, threshold: 1024 }));
        assert!(of(40, 1024, 4096).is_ok());
        assert_eq!(of(41, 4096, 1024), Err(TooLong { bytes: 28 + 41 * 24 + 20, threshold: 1024 }));
        assert!(of(40, 4096, 1024).is_ok());
    }

    #[test]
    fn an_item_whose_position_is_no_word_stays_in_the_stream() {
        let terms = terms(1024, 1024, u32::MAX);
        let plan = Plan::of(&call(10, &[u32::MAX, 5000], &[], 40), &terms).unwrap();
        assert_eq!(reduced(&plan), [(0, 40 + 5000), (32, u32::MAX.into())]);
    }

    proptest! {
        /// However it is cut: what arrives is the message, what is sent fits, and so does any reply.
        #[test]
        fn a_plan_carries_the_message_and_has_room_for_the_reply(
            words in 8_usize..600,
            items in prop::collection::vec(prop_oneof![0_u32..60, 0_u32..3000], 0..6),
            results in prop::collection::vec(prop_oneof![Just(0_u32), 0_u32..60, 0_u32..3000], 0..6),
            reply_bytes_max in 12_u64..3000,
            reductions in prop::array::uniform2(prop_oneof![Just(Reduction::Fit), Just(Reduction::Always), Just(Reduction::Never)]),
            thresholds in prop::array::uniform2(prop_oneof![Just(1024_u32), Just(4096)]),
            segment_bytes_max in prop_oneof![Just(100_u32), Just(1000), Just(u32::MAX)],
        ) {
            let terms = terms(thresholds[0], thresholds[1], segment_bytes_max);
            let call = Call { arguments: reductions[0], results_reduction: reductions[1], ..call(words, &items, &results, reply_bytes_max) };
            let Ok(plan) = Plan::of(&call, &terms) else { return Ok(()) };
            let segments = |region: &Region| terms.segment_count(region.len) as u64;
            prop_assert!(plan.regions.iter().all(|region| region.len > 0));
            let reads: u64 = plan.regions.iter().filter(|region| region.position.is_some()).map(|region| 24 * segments(region)).sum();
            let (chunks, reply_chunk) = offered(&plan);
            let written = |len: u64| 16 * len.div_ceil(segment_bytes_max.into());
            let lists = chunks.iter().map(|len| 8 + written(*len)).sum::<u64>() + reply_chunk.map_or(0, |len| 4 + written(len));
            prop_assert!(28 + reads + lists + parts_bytes(&plan.inline) <= thresholds[0].into());

            // The message, put together by the rule of §3.4.5.
            let mut rest = match plan.placement {
                Placement::Inline => parts_bytes(&plan.inline),
                Placement::Chunk => plan.regions[0].len,
            };
            for (position, len) in reduced(&plan).into_iter().filter(|(position, _)| *position > 0) {
                prop_assert!(position % 4 == 0);
                rest += len + roundup_bytes(len);
            }
            prop_assert_eq!(rest, call.message.stream_bytes());

            // The longest reply: results take chunks in order, the others stay.
            let behind: u64 = results[chunks.len()..].iter().map(|len| u64::from(*len).next_multiple_of(4)).sum();
            let payload = reply_bytes_max.next_multiple_of(4) + behind;
            for (len, chunk) in results.iter().zip(&chunks) {
                prop_assert!(u64::from(*len) <= *chunk);
            }
            match reply_chunk {
                None => prop_assert!(28 + lists + payload <= thresholds[1].into()),
                Some(room) => {
                    prop_assert!(payload <= room);
                    prop_assert!(28 + lists <= thresholds[1].into());
                }
            }
        }
    }
}
