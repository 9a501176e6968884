//! Messages here are written as words, by hand: nothing of the codec under test builds them.

use super::*;
use crate::wire::onc_rpc::{Item, Part, PayloadWriter};
use crate::wire::rpcrdma::duplicate::{Bounds, DuplicateCache};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

const XID: Xid = Xid(0x77);
const LIMITS: Limits = Limits {
    calls_max: NonZeroU32::new(4).unwrap(),
    long_call_bytes_max: 8192,
    read_chunk_bytes_max: 100_000,
    read_bytes_max: 120_000,
    read_segments_max: 20,
};

fn agreed(reply_inline_bytes: u32) -> Agreed {
    Agreed { call_inline_bytes: 4096, reply_inline_bytes, remote_invalidate: true }
}

fn responder() -> Responder {
    Responder::new(agreed(1024), LIMITS)
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// A call of a program with one argument, an opaque that may be reduced: its length at 40, its octets at 44.
fn rpc(len: u32, rest: &[u8]) -> Vec<u8> {
    let mut octets = words(&[XID.0, 0, 2, 0x2000_0000, 1, 1, 0, 0, 0, 0, len]);
    octets.extend(rest);
    octets
}

fn message(proc: u32, reads: &[[u32; 5]], writes: &[&[[u32; 4]]], reply: Option<&[[u32; 4]]>, rest: &[u8]) -> Vec<u8> {
    let mut out = vec![XID.0, 1, 32, proc];
    for read in reads {
        out.push(1);
        out.extend(read);
    }
    out.push(0);
    let chunk = |out: &mut Vec<u32>, chunk: &[[u32; 4]]| {
        out.extend([1, chunk.len() as u32]);
        out.extend(chunk.iter().flatten());
    };
    for write in writes {
        chunk(&mut out, write);
    }
    out.push(0);
    match reply {
        Some(reply) => chunk(&mut out, reply),
        None => out.push(0),
    }
    let mut octets = words(&out);
    octets.extend(rest);
    octets
}

/// A call of which nothing is reduced, that offers so much for the results.
fn offering(writes: &[&[[u32; 4]]], reply: Option<&[[u32; 4]]>) -> Vec<u8> {
    message(0, &[], writes, reply, &rpc(0, &[]))
}

fn taken(received: Received) -> IncomingCall {
    match received {
        Received::Call(call) => call,
        other => panic!("{other:?}"),
    }
}

/// What a reply with nothing but an RPC header and `rest` says.
fn bytes(len: usize) -> Payload {
    let mut writer = PayloadWriter::new();
    writer.words().encoded(&[words(&[XID.0, 1, 0, 0, 0, 0]), vec![0x55; len - 24]].concat());
    writer.finish()
}

/// An RPC header, items of these lengths, and a last word.
fn items(lens: &[u32]) -> Payload {
    let mut writer = PayloadWriter::new();
    for word in [XID.0, 1, 0, 0, 0, 0] {
        writer.words().u32(word);
    }
    for (token, len) in lens.iter().enumerate() {
        writer.item(Item { token: token as u32, len: *len });
    }
    writer.words().u32(0xfeed_face);
    writer.finish()
}

/// Octet `at` of item `token`.
fn octet(token: u32, at: u64) -> u8 {
    (u64::from(token) * 101 + at * 7 + at / 251) as u8
}

type Memory = BTreeMap<(u32, u64), u8>;

/// Does what the plan says: the octets of the Send, and the memory that was written. No octet is written twice.
fn carry_out(plan: &ReplyPlan) -> (Vec<u8>, Memory) {
    let spell = |span: &Span| -> Vec<u8> {
        match span {
            Span::Octets(range) => plan.octets[range.clone()].to_vec(),
            Span::Item { token, start, len } => (*start..start + len).map(|at| octet(*token, at)).collect(),
        }
    };
    let mut memory = Memory::new();
    for write in &plan.writes {
        assert!(!write.from.is_empty());
        for (offset, octet) in (write.offset..).zip(spell(&write.from)) {
            assert_eq!(memory.insert((write.handle.0, offset), octet), None, "an octet is written twice");
        }
    }
    let message: Vec<u8> = plan.message.iter().flat_map(spell).collect();
    assert_eq!(message.len() as u64, plan.message_bytes());
    (message, memory)
}

/// What the memory of these segments has, as far as their lengths go.
fn recall(memory: &Memory, segments: &[Segment]) -> Vec<u8> {
    let octets =
        |segment: &Segment| (0..u64::from(segment.length)).map(|at| (segment.handle.0, segment.offset + at)).collect();
    segments.iter().flat_map(|segment| -> Vec<(u32, u64)> { octets(segment) }).map(|place| memory[&place]).collect()
}

/// A reply, as its requester sees it: the stream as sent or written, and each write chunk's octets.
struct Seen {
    message: Vec<u8>,
    is_short: bool,
    stream: Vec<u8>,
    writes: Vec<Vec<Segment>>,
    written: Vec<Vec<u8>>,
    reply: Option<Vec<Segment>>,
}

fn see(plan: &ReplyPlan) -> Seen {
    assert_eq!(plan.fault, None);
    let (message, mut memory) = carry_out(plan);
    let Ok(Message::Transport(seen)) = Message::decode(&message) else { panic!("{message:x?}") };
    assert_eq!((seen.xid, seen.reads.is_empty()), (XID, true));
    assert!(seen.credit >= 1);
    assert_eq!(seen.check_reply(), Ok(()));
    let writes: Vec<Vec<Segment>> = seen.writes.chunks().map(|chunk| chunk.to_vec()).collect();
    let written: Vec<Vec<u8>> = writes.iter().map(|chunk| recall(&memory, chunk)).collect();
    let reply = seen.reply.map(|chunk| chunk.to_vec());
    let is_short = seen.placement == Placement::Inline;
    let in_chunk = recall(&memory, reply.as_deref().unwrap_or(&[]));
    for segment in writes.iter().chain(&reply).flatten() {
        memory.retain(|(handle, offset), _| {
            *handle != segment.handle.0
                || *offset < segment.offset
                || *offset >= segment.offset + u64::from(segment.length)
        });
    }
    assert!(memory.is_empty(), "octets were written that the reply does not own up to");
    let stream = if is_short { seen.payload.to_vec() } else { in_chunk };
    Seen { is_short, stream, writes, written, reply, message }
}

fn item(token: u32, len: u32) -> Vec<u8> {
    (0..u64::from(len)).map(|at| octet(token, at)).collect()
}

/// The stream of [`items`] less those that were written to a chunk.
fn stream(lens: &[u32], in_chunk: &[bool]) -> Vec<u8> {
    let mut out = words(&[XID.0, 1, 0, 0, 0, 0]);
    for (token, (len, in_chunk)) in lens.iter().zip(in_chunk).enumerate() {
        out.extend(len.to_be_bytes());
        if !in_chunk {
            out.extend(item(token as u32, *len));
            out.resize(out.len().next_multiple_of(4), 0);
        }
    }
    out.extend(words(&[0xfeed_face]));
    out
}

fn plan(message: &[u8], payload: &Payload) -> ReplyPlan {
    let mut responder = responder();
    taken(responder.handle_received(message));
    responder.plan_reply(XID, payload)
}

fn lengths(chunk: &[Segment]) -> Vec<u32> {
    chunk.iter().map(|segment| segment.length).collect()
}

// Placing replies.

#[test]
fn results_go_to_chunks_in_list_order_and_the_rest_stays_inline() {
    let lens = [5, 6, 7];
    let call = offering(&[&[[1, 4, 0, 100], [2, 10, 0, 200]], &[[3, 6, 0, 300]]], None);
    let seen = see(&plan(&call, &items(&lens)));
    assert!(seen.is_short);
    assert_eq!(seen.stream, stream(&lens, &[true, true, false]));
    assert_eq!(seen.writes.iter().map(|chunk| lengths(chunk)).collect::<Vec<_>>(), [vec![4, 1], vec![6]]);
    assert_eq!(seen.written, [item(0, 5), item(1, 6)]);
}

#[test]
fn an_empty_chunk_wants_its_result_inline_and_comes_back_empty() {
    let lens = [5, 6, 7];
    let call = offering(&[&[[1, 8, 0, 0]], &[], &[[3, 8, 0, 0]]], None);
    let seen = see(&plan(&call, &items(&lens)));
    assert_eq!(seen.stream, stream(&lens, &[true, false, true]));
    assert_eq!(seen.writes.iter().map(|chunk| lengths(chunk)).collect::<Vec<_>>(), [vec![5], vec![], vec![7]]);
    assert_eq!(seen.written, [item(0, 5), vec![], item(2, 7)]);
}

#[test]
fn chunks_without_a_result_come_back_unused_and_none_vanishes() {
    let call = offering(&[&[[1, 8, 0, 10], [2, 8, 0, 20]], &[[3, 8, 0, 30]]], None);
    let seen = see(&plan(&call, &bytes(24)));
    assert_eq!(seen.writes.iter().map(|chunk| lengths(chunk)).collect::<Vec<_>>(), [vec![0, 0], vec![0]]);
    assert_eq!(seen.writes[0][1], Segment { handle: RemoteKey(2), length: 0, offset: 20 });
    let seen = see(&plan(&call, &items(&[3])));
    assert_eq!(seen.writes.iter().map(|chunk| lengths(chunk)).collect::<Vec<_>>(), [vec![3, 0], vec![0]]);
}

#[test]
fn a_result_without_octets_takes_its_chunk() {
    let call = offering(&[&[[1, 8, 0, 10]], &[[2, 8, 0, 20]]], None);
    let seen = see(&plan(&call, &items(&[0, 5])));
    assert_eq!(seen.stream, stream(&[0, 5], &[true, true]));
    assert_eq!(seen.written, [vec![], item(1, 5)]);
}

#[test]
fn no_roundup_is_sent_for_what_is_in_a_chunk_nor_written_there() {
    for len in 1..=9 {
        // The last segment is the four octets that some clients add for a roundup.
        let call = offering(&[&[[1, len, 0, 10], [2, 4, 0, 0xffc]]], None);
        let seen = see(&plan(&call, &items(&[len])));
        assert_eq!(seen.stream, stream(&[len], &[true]), "{len} octets: what follows is not moved");
        assert_eq!(lengths(&seen.writes[0]), [len, 0]);
        assert_eq!(seen.written, [item(0, len)]);
    }
}

#[test]
fn one_octet_more_than_a_write_chunk_holds_is_an_error_and_nothing_is_written() {
    let call = offering(&[&[[1, 64, 0, 0], [2, 36, 0, 100]]], Some(&[[3, 8192, 0, 0]]));
    for len in [99, 100] {
        let seen = see(&plan(&call, &items(&[len])));
        assert_eq!(seen.written, [item(0, len)]);
    }
    let plan = plan(&call, &items(&[101]));
    assert_eq!(plan.fault, Some(Fault::WriteChunk { index: 0, bytes: 101, chunk_bytes: 100 }));
    assert_is_chunk_error(&plan);
}

#[test]
fn an_error_takes_back_what_other_chunks_would_have_got() {
    let call = offering(&[&[[1, 100, 0, 0]], &[[1, 10, 0, 1000]]], None);
    let plan = plan(&call, &items(&[100, 11]));
    assert_eq!(plan.fault, Some(Fault::WriteChunk { index: 1, bytes: 11, chunk_bytes: 10 }));
    assert_is_chunk_error(&plan);
}

fn assert_is_chunk_error(plan: &ReplyPlan) {
    assert_eq!((&plan.writes, plan.invalidate), (&Vec::new(), None));
    let (message, _) = carry_out(plan);
    assert_eq!(message, words(&[XID.0, 1, 1, 4, 2]));
}

#[test]
fn a_reply_of_the_threshold_goes_inline_and_one_octet_more_does_not() {
    for inline_bytes in [1024, 4096, 262_144] {
        let plan = |call: &[u8], payload: &Payload| {
            let mut responder = Responder::new(agreed(inline_bytes), LIMITS);
            taken(responder.handle_received(call));
            responder.plan_reply(XID, payload)
        };
        let none = offering(&[], None);
        let most = inline_bytes as usize - 28;
        for len in [24, most - 1, most] {
            let seen = see(&plan(&none, &bytes(len)));
            assert_eq!((seen.is_short, seen.message.len()), (true, len + 28));
        }
        for len in [most + 1, most + 4, 1 << 20] {
            let plan = plan(&none, &bytes(len));
            assert_eq!(plan.fault, Some(Fault::NoReplyChunk { bytes: len as u64 + 28, inline_bytes }));
            assert_is_chunk_error(&plan);
        }
        // An item that stays inline counts like everything else.
        assert!(plan(&none, &items(&[inline_bytes])).fault.is_some());
        // The header is larger by the reply chunk that it repeats.
        let call = offering(&[], Some(&[[1, 2 << 20, 0, 0]]));
        let most = inline_bytes as usize - 48;
        for (len, is_short) in [(most, true), (most + 1, false)] {
            let seen = see(&plan(&call, &bytes(len)));
            assert_eq!((seen.is_short, seen.stream.len()), (is_short, len));
            assert!(seen.message.len() <= inline_bytes as usize);
        }
    }
}

#[test]
fn a_reply_chunk_comes_back_with_what_was_written_or_zeros() {
    let chunk: &[[u32; 4]] = &[[1, 2000, 0, 0x1000], [2, 3000, 7, 0x9000]];
    let call = offering(&[], Some(chunk));
    let short = see(&plan(&call, &bytes(100)));
    assert_eq!((short.is_short, lengths(&short.reply.unwrap())), (true, vec![0, 0]));
    let Part::Bytes(expected) = bytes(4096).into_parts().remove(0) else { unreachable!() };
    let long = see(&plan(&call, &bytes(4096)));
    assert_eq!((long.is_short, long.stream), (false, expected));
    let reply = long.reply.unwrap();
    assert_eq!(lengths(&reply), [2000, 2096]);
    assert_eq!((reply[1].handle, reply[1].offset), (RemoteKey(2), 7 << 32 | 0x9000));
    assert_eq!(long.message.len(), 64, "the header goes alone");
}

#[test]
fn a_reply_chunk_holds_its_octets_and_not_one_more() {
    let call = offering(&[], Some(&[[1, 1000, 0, 0], [2, 1000, 0, 0]]));
    for len in [1999, 2000] {
        assert_eq!(see(&plan(&call, &bytes(len))).stream.len(), len);
    }
    let plan = plan(&call, &bytes(2001));
    assert_eq!(plan.fault, Some(Fault::ReplyChunk { bytes: 2001, chunk_bytes: 2000 }));
    assert_is_chunk_error(&plan);
}

#[test]
fn a_reply_chunk_without_segments_holds_nothing_and_names_no_handle() {
    let call = offering(&[], Some(&[]));
    let plan_of = |len| plan(&call, &bytes(len));
    let short = plan_of(100);
    assert_eq!(short.invalidate, None);
    assert_eq!(see(&short).reply, Some(vec![]));
    let long = plan_of(2000);
    assert_eq!(long.fault, Some(Fault::ReplyChunk { bytes: 2000, chunk_bytes: 0 }));
    assert_is_chunk_error(&long);
}

#[test]
fn write_chunks_are_filled_first_and_the_reply_chunk_takes_the_reduced_stream() {
    let lens = [3000, 5, 1030];
    let call = offering(&[&[[1, 3000, 0, 0]], &[]], Some(&[[2, 17, 0, 0], [3, 1, 0, 100], [4, 2000, 0, 200]]));
    let seen = see(&plan(&call, &items(&lens)));
    assert!(!seen.is_short);
    assert_eq!(seen.written, [item(0, 3000), vec![]]);
    // With the roundup of what stayed in it.
    assert_eq!(seen.stream, stream(&lens, &[true, false, false]));
}

#[test]
fn a_long_item_is_written_across_segments_of_any_size() {
    let segments: Vec<[u32; 4]> = (0..40).map(|index| [index, index * index, index, 0]).collect();
    let len = (0..40).map(|index| index * index).sum();
    let seen = see(&plan(&offering(&[&segments], None), &items(&[len])));
    assert_eq!(seen.written, [item(0, len)]);
    assert_eq!(lengths(&seen.writes[0]), (0..40).map(|index| index * index).collect::<Vec<_>>());
}

// Send with Invalidate.

#[test]
fn only_the_one_handle_of_all_segments_is_invalidated() {
    let long = |reads: &[[u32; 5]], writes: &[&[[u32; 4]]], reply| message(1, reads, writes, reply, &[]);
    let inline = |reads: &[[u32; 5]], writes: &[&[[u32; 4]]], reply| message(0, reads, writes, reply, &rpc(8, &[]));
    let table = [
        ("no segment at all", offering(&[], None), None),
        ("an empty chunk", offering(&[&[]], Some(&[])), None),
        ("one", offering(&[&[[9, 8, 0, 0]]], None), Some(9)),
        ("an empty chunk beside one", offering(&[&[], &[[9, 8, 0, 0]]], None), Some(9)),
        ("the same everywhere", inline(&[[44, 9, 8, 0, 0]], &[&[[9, 8, 0, 0]]], Some(&[[9, 8, 0, 0]])), Some(9)),
        ("a long call", long(&[[0, 9, 44, 0, 0]], &[], None), Some(9)),
        ("a pad that outlives the call", offering(&[&[[9, 8, 0, 0], [8, 4, 0, 0]]], None), None),
        ("another in the read list", inline(&[[44, 8, 8, 0, 0]], &[&[[9, 8, 0, 0]]], None), None),
        ("another in the reply chunk", offering(&[&[[9, 8, 0, 0]]], Some(&[[8, 8, 0, 0]])), None),
        ("another of no octets", offering(&[&[[9, 8, 0, 0], [8, 0, 0, 0]]], None), None),
    ];
    for (name, message, handle) in table {
        for both_want_it in [false, true] {
            let agreed = Agreed { remote_invalidate: both_want_it, ..agreed(1024) };
            let mut responder = Responder::new(agreed, LIMITS);
            let call = taken(responder.handle_received(&message));
            if call.long.is_some() {
                responder.handle_pulled(XID, &rpc(0, &[])).unwrap();
            }
            let plan = responder.plan_reply(XID, &bytes(24));
            let expected = if both_want_it { handle.map(RemoteKey) } else { None };
            assert_eq!((plan.invalidate, plan.fault), (expected, None), "{name}");
        }
    }
}

// Judging calls.

#[test]
fn chunks_that_fit_the_stream_are_taken_in_any_order_of_the_list() {
    // | header: 40 | length | first: 6 (+ 2) at 44 | length | second: 9 at 56 | and a trailer
    let mut stream = rpc(6, &words(&[9]));
    stream.extend(words(&[0xfeed_face]));
    let orders = [
        [[44, 1, 6, 0, 0], [56, 2, 5, 0, 0], [56, 3, 4, 0, 0]],
        [[56, 2, 5, 0, 0], [44, 1, 6, 0, 0], [56, 3, 4, 0, 0]],
    ];
    for reads in orders {
        let call = taken(responder().handle_received(&message(0, &reads, &[], None, &stream)));
        assert_eq!(call.inline, stream);
        let found: Vec<_> = call.reads.iter().map(|chunk| (chunk.position, chunk.len, chunk.segments.len())).collect();
        assert_eq!(found, [(44, 6, 1), (56, 9, 2)]);
    }
}

#[test]
fn a_long_call_may_have_other_chunks_at_positions_of_its_own_stream() {
    let reads = [[0, 1, 40, 0, 0], [44, 2, 9, 0, 0], [0, 3, 8, 0, 0]];
    let mut responder = responder();
    let call = taken(responder.handle_received(&message(1, &reads, &[], None, &[])));
    assert_eq!(call.long.as_ref().map(|chunk| (chunk.len, chunk.segments.len())), Some((48, 2)));
    assert_eq!(call.reads.iter().map(|chunk| chunk.position).collect::<Vec<_>>(), [44]);
    assert!(call.inline.is_empty());
    let refused = message(1, &[[0, 1, 40, 0, 0], [44, 2, 9, 0, 0]], &[], None, &[]);
    let fault = refusal(Responder::new(agreed(1024), LIMITS).handle_received(&refused));
    assert_eq!(fault, Fault::PastStream { position: 44 });
}

fn refusal(received: Received) -> Fault {
    match received {
        Received::Refuse(refusal) => refusal.fault,
        other => panic!("{other:?}"),
    }
}

#[test]
fn positions_move_by_the_roundup_that_a_chunk_leaves_out_and_not_by_one_that_it_has() {
    let stream = rpc(5, &words(&[9]));
    for (first, second, fits) in
        [(5, 56, true), (8, 56, true), (5, 52, true), (5, 48, false), (5, 60, false), (9, 56, true), (13, 56, false)]
    {
        let reads = [[44, 1, first, 0, 0], [second, 2, 9, 0, 0]];
        let received = responder().handle_received(&message(0, &reads, &[], None, &stream));
        assert_eq!(matches!(received, Received::Call(_)), fits, "{first} octets, then position {second}: {received:?}");
    }
}

#[test]
fn sums_of_segments_are_bounded_not_only_each() {
    let reads = |lens: &[u32]| -> Vec<[u32; 5]> { lens.iter().map(|len| [44, 1, *len, 0, 0]).collect() };
    let judge =
        |reads: &[[u32; 5]]| match responder().handle_received(&message(0, reads, &[], None, &rpc(5, &words(&[9])))) {
            Received::Call(_) => None,
            other => Some(refusal(other)),
        };
    assert_eq!(judge(&reads(&[60_000, 40_000])), None, "the last one fills it exactly");
    assert_eq!(judge(&reads(&[60_000, 40_001])), Some(Fault::ReadChunk(100_001)));
    let mut two = reads(&[100_000]);
    two.push([100_048, 2, 20_000, 0, 0]);
    assert_eq!(judge(&two), None);
    two[1][2] += 1;
    assert_eq!(judge(&two), Some(Fault::ReadBytes(120_001)));
    assert_eq!(judge(&reads(&[1; 20])), None);
    assert_eq!(judge(&reads(&[1; 21])), Some(Fault::ReadSegments(21)));
    let long = |len: u32| message(1, &[[0, 1, len, 0, 0]], &[], None, &[]);
    taken(responder().handle_received(&long(8192)));
    assert_eq!(refusal(responder().handle_received(&long(8193))), Fault::LongCall(8193));
}

/// A reply repeats what the call offers: if that alone is too long, there can be no reply, and it is said at once.
#[test]
fn a_call_that_no_reply_could_answer_is_not_executed() {
    let offer: Vec<[u32; 4]> = (0..70).map(|index| [index, 1, 0, 0]).collect();
    // 28 + 8 + 16 a segment: 61 segments are 1,012 octets, 62 are 1,028.
    taken(responder().handle_received(&offering(&[&offer[..61]], None)));
    let fault = refusal(responder().handle_received(&offering(&[&offer[..62]], None)));
    assert_eq!(fault, Fault::ReplyHeader { bytes: 1028, inline_bytes: 1024 });
}

// Credits.

#[test]
fn every_answer_grants_what_receives_stand_for_and_never_zero() {
    let mut responder = responder();
    let mut grants = Vec::new();
    for (xid, receives) in (1..).zip([0, 1, 3, 9, 2]) {
        responder.set_receives(receives);
        let mut ask = |message: Vec<u8>| {
            let mut message = message;
            message[..4].copy_from_slice(&u32::to_be_bytes(xid));
            // A request of no credit at all.
            message[8..12].copy_from_slice(&[0; 4]);
            match responder.handle_received(&message) {
                Received::Refuse(refusal) => refusal.octets[8..12].to_vec(),
                Received::Call(_) => {
                    let plan = responder.plan_reply(Xid(xid), &bytes(24));
                    responder.handle_sent(Xid(xid));
                    carry_out(&plan).0[8..12].to_vec()
                }
                Received::Drop(reason) => panic!("{reason:?}"),
            }
        };
        let mut well = offering(&[], None);
        well[28..32].copy_from_slice(&u32::to_be_bytes(xid));
        let mut version_2 = offering(&[], None);
        version_2[7] = 2;
        let asked = [ask(well), ask(version_2), ask(message(9, &[], &[], None, &[]))];
        assert!(asked.iter().all(|grant| *grant == asked[0]), "errors grant like replies");
        grants.push(u32::from_be_bytes(asked[0].clone().try_into().unwrap()));
    }
    assert_eq!(grants, [1, 1, 3, 4, 2]);
}

#[test]
fn a_message_that_is_dropped_takes_nothing_from_the_receives_that_are_needed() {
    let mut responder = responder();
    responder.set_receives(4);
    taken(responder.handle_received(&offering(&[], None)));
    responder.plan_reply(XID, &bytes(24));
    responder.handle_sent(XID);
    assert_eq!(responder.receives_needed(), 4);
    for _ in 0..10_000 {
        for dropped in [vec![0; 27], message(3, &[], &[], None, &[]), message(4, &[], &[], None, &[])] {
            assert!(matches!(responder.handle_received(&dropped), Received::Drop(_)));
        }
    }
    assert_eq!((responder.receives_needed(), responder.calls()), (4, 0));
    taken(responder.handle_received(&offering(&[], None)));
}

#[test]
fn calls_beyond_all_credit_are_dropped_and_those_within_it_served() {
    let mut responder = responder();
    let call = |xid: u32| {
        let mut message = offering(&[], None);
        message[..4].copy_from_slice(&xid.to_be_bytes());
        message[28..32].copy_from_slice(&xid.to_be_bytes());
        message
    };
    for xid in 0..4 {
        taken(responder.handle_received(&call(xid)));
    }
    assert_eq!(responder.handle_received(&call(4)), Received::Drop(DropReason::Overrun));
    responder.plan_reply(Xid(2), &bytes(24));
    // The peer may know of the reply before its Send is seen to complete.
    taken(responder.handle_received(&call(4)));
    assert_eq!(responder.calls(), 5);
}

// The two tables.

/// What the responder says to a call, in the words of the table of errors.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Said {
    Nothing,
    ErrVers,
    ErrChunk,
    /// An RDMA_MSG.
    Reply,
}

fn said(octets: &[u8]) -> Said {
    match Message::decode(octets) {
        Ok(Message::Error { error: RdmaError::Version { low: 1, high: 1 }, .. }) => Said::ErrVers,
        Ok(Message::Error { error: RdmaError::Chunk, .. }) => Said::ErrChunk,
        Ok(Message::Transport(reply)) if reply.placement == Placement::Inline => Said::Reply,
        other => panic!("{other:?}"),
    }
}

/// What the program of [`rpc`] makes of a call, by its binding: one argument that may be reduced, at 44, of at most 5,000
/// octets. Its reply has one eligible result of `result_bytes`.
fn execute(responder: &mut Responder, call: &IncomingCall, result_bytes: u32) -> Said {
    let len = u64::from(u32::from_be_bytes(call.inline[40..44].try_into().unwrap()));
    let mut in_chunk = call.reads.iter();
    if let Some(chunk) = in_chunk.next() {
        let is_eligible = chunk.position == 44 && in_chunk.next().is_none();
        if !is_eligible || chunk.len > 5000 {
            return said(&responder.refuse(call.xid, Fault::Ineligible).octets);
        }
        if !chunk.carries(len) {
            // GARBAGE_ARGS.
            let mut writer = PayloadWriter::new();
            writer.words().encoded(&words(&[XID.0, 1, 0, 0, 0, 4]));
            return said(&carry_out(&responder.plan_reply(call.xid, &writer.finish())).0);
        }
    }
    said(&carry_out(&responder.plan_reply(call.xid, &items(&[result_bytes]))).0)
}

/// Every row that concerns the responder of the table of errors in docs/conformance.md, in its order, but those that are
/// about the connection itself.
#[test]
fn errors_are_answered_by_this_table() {
    let null = offering(&[], None);
    let with = |at: usize, word: u32| {
        let mut octets = null.clone();
        octets[at..at + 4].copy_from_slice(&word.to_be_bytes());
        octets
    };
    let cut = |len: usize| {
        let mut octets = message(0, &[[44, 1, 8, 0, 0]], &[&[[1, 8, 0, 0]]], Some(&[[1, 8, 0, 0]]), &[]);
        octets.truncate(len);
        octets
    };
    let reads = |reads: &[[u32; 5]]| message(0, reads, &[], None, &rpc(8, &words(&[1, 2])));
    let count = |at: usize, count: u32| {
        let mut octets = offering(&[&[[1, 8, 0, 0]]], Some(&[[1, 8, 0, 0]]));
        octets[at..at + 4].copy_from_slice(&count.to_be_bytes());
        octets
    };
    let (chunk, nothing, version) = (Said::ErrChunk, Said::Nothing, Said::ErrVers);
    let max = u32::MAX;
    let rows: Vec<(&str, Vec<Vec<u8>>, Said)> = vec![
        ("shorter than 16", (0..16).map(cut).collect(), nothing),
        ("16 to 27 octets", (16..28).map(cut).collect(), nothing),
        ("another version", vec![with(4, 0), with(4, 2), with(4, max)], version),
        ("another version, whatever follows", vec![words(&[XID.0, 2, 9, 0x4d, max, max, max])], version),
        ("RDMA_MSGP", vec![with(12, 2)], chunk),
        ("RDMA_DONE", vec![with(12, 3)], nothing),
        (
            "RDMA_ERROR",
            vec![with(12, 4), words(&[XID.0, 1, 9, 4, 1, 1, 1]), words(&[XID.0, 2, 9, 4, 1, 1, 1])],
            nothing,
        ),
        ("unknown procedures", vec![with(12, 5), with(12, 6), with(12, max)], chunk),
        ("a boolean that is neither", vec![with(16, 2), with(20, max), with(24, 0x0100_0000)], chunk),
        ("a list that is cut", (28..cut(999).len()).map(cut).collect(), chunk),
        (
            "a count beyond the message",
            [24, 52].into_iter().flat_map(|at| [count(at, 1000), count(at, 0x1000_0001), count(at, max)]).collect(),
            chunk,
        ),
        (
            "RDMA_NOMSG without a chunk at position zero",
            vec![
                message(1, &[], &[], None, &[]),
                message(1, &[], &[], Some(&[[1, 8, 0, 0]]), &[]),
                message(1, &[[44, 1, 8, 0, 0]], &[], None, &[]),
            ],
            chunk,
        ),
        ("the xids differ", vec![with(28, 8), message(0, &[], &[], None, &[])], chunk),
        ("no RPC call behind the header", vec![with(32, 2), message(0, &[], &[], None, &words(&[XID.0]))], chunk),
        (
            "a position that is no multiple of four",
            vec![reads(&[[41, 1, 8, 0, 0]]), reads(&[[46, 1, 8, 0, 0]]), reads(&[[max, 1, 8, 0, 0]])],
            chunk,
        ),
        (
            "a position past the stream",
            vec![reads(&[[56, 1, 8, 0, 0]]), reads(&[[4096, 1, 8, 0, 0]]), reads(&[[max - 3, 1, 8, 0, 0]])],
            chunk,
        ),
        ("overlapping positions", vec![reads(&[[44, 1, 8, 0, 0], [48, 1, 8, 0, 0]])], chunk),
        (
            "a position where there is no eligible item",
            vec![reads(&[[40, 1, 8, 0, 0]]), reads(&[[4, 1, 8, 0, 0]]), reads(&[[44, 1, 8, 0, 0], [52, 1, 8, 0, 0]])],
            chunk,
        ),
        (
            "a chunk that is neither the item nor the item and its roundup",
            vec![reads(&[[44, 1, 7, 0, 0]]), reads(&[[44, 1, 9, 0, 0]]), reads(&[[44, 1, 0, 0, 0]])],
            Said::Reply,
        ),
        (
            "a chunk larger than the program's limit or the budget",
            vec![reads(&[[44, 1, 5001, 0, 0]]), reads(&[[44, 1, 100_001, 0, 0]])],
            chunk,
        ),
        (
            "a segment that wraps",
            vec![
                reads(&[[44, 1, 8, max, max - 7]]),
                offering(&[&[[1, 8, max, max - 7]]], None),
                offering(&[], Some(&[[1, 8, 0, 0], [1, 8, max, max]])),
                message(1, &[[0, 1, 44, max, max]], &[], None, &[]),
            ],
            chunk,
        ),
        ("sums that wrap", vec![reads(&[[44, 1, max, 0, 0], [44, 1, 2, 0, 0]])], chunk),
        ("a write chunk too small for the result", vec![offering(&[&[[1, 1999, 0, 0]]], None)], chunk),
        ("a reply too large to go inline", vec![offering(&[], None), offering(&[&[]], None)], chunk),
        ("a reply chunk too small", vec![offering(&[], Some(&[[1, 2031, 0, 0]]))], chunk),
        (
            "two streams, or octets behind none (local policy)",
            vec![
                message(0, &[[0, 1, 44, 0, 0]], &[], None, &rpc(0, &[])),
                message(1, &[[0, 1, 44, 0, 0]], &[], None, &words(&[0xdead_beef])),
            ],
            chunk,
        ),
        ("a reply in the other direction", vec![with(32, 1)], nothing),
        ("nothing of the kind", vec![offering(&[&[[1, 2000, 0, 0]]], None)], Said::Reply),
    ];
    for (row, messages, expected) in rows {
        for message in messages {
            let mut responder = responder();
            let found = match responder.handle_received(&message) {
                Received::Drop(_) => Said::Nothing,
                Received::Refuse(refusal) => {
                    let fixed = header::Fixed::of(&refusal.octets).unwrap();
                    let asked = header::Fixed::of(&message).unwrap();
                    assert_eq!((fixed.xid, fixed.vers, fixed.credit), (asked.xid, asked.vers, 1), "{row}");
                    said(&refusal.octets)
                }
                Received::Call(call) => execute(&mut responder, &call, 2000),
            };
            assert_eq!(found, expected, "{row}: {message:x?}");
        }
    }
}

/// A Read or Write that failed took the connection with it; the call that comes again on the next is refused.
#[test]
fn a_call_whose_memory_failed_is_refused_when_it_comes_again() {
    let peer = std::net::IpAddr::from([192, 0, 2, 1]);
    let mut cache = DuplicateCache::new(Bounds { entries_max: 10, bytes_max: 1000, age_max: Duration::MAX });
    let mut first = responder();
    let call = taken(first.handle_received(&message(1, &[[0, 1, 44, 0, 0]], &[], None, &[])));
    assert_ne!(call.mark(), taken(responder().handle_received(&offering(&[], None))).mark());
    cache.handle_rdma_failed(peer, call.mark(), Duration::ZERO);
    drop(first);
    let mut second = responder();
    // Its memory is elsewhere by now.
    let call = taken(second.handle_received(&message(1, &[[0, 9, 44, 0, 8]], &[], None, &[])));
    assert!(cache.take_failure(peer, call.mark(), Duration::ZERO));
    assert_eq!(said(&second.refuse(call.xid, Fault::FailedBefore).octets), Said::ErrChunk);
    second.handle_sent(call.xid);
    assert_eq!(second.calls(), 0);
}

/// What came of an event.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Outcome {
    Dropped,
    Refused,
    Taken,
    Planned,
    Done,
    /// A mistake of the owner.
    Panicked,
}

/// Every state of a call and every event; a message is a peer's doing, all else the owner's.
#[test]
fn transitions_are_these() {
    use Outcome::{Done, Dropped, Panicked, Planned, Refused, Taken};
    type Event = fn(&mut Responder) -> Outcome;
    fn receive(responder: &mut Responder, message: &[u8]) -> Outcome {
        match responder.handle_received(message) {
            Received::Drop(_) => Dropped,
            Received::Refuse(_) => Refused,
            Received::Call(_) => Taken,
        }
    }
    fn pull(responder: &mut Responder, stream: &[u8]) -> Outcome {
        if responder.handle_pulled(XID, stream).is_ok() { Done } else { Refused }
    }
    let events: [(&str, Event); 9] = [
        ("short call", |responder| receive(responder, &offering(&[], None))),
        ("long call", |responder| receive(responder, &message(1, &[[0, 1, 44, 0, 0]], &[], None, &[]))),
        ("bad header", |responder| receive(responder, &message(9, &[], &[], None, &[]))),
        ("pulled", |responder| pull(responder, &rpc(0, &[]))),
        ("pulled no call", |responder| pull(responder, &words(&[XID.0, 1]))),
        ("reply", |responder| {
            responder.plan_reply(XID, &bytes(24));
            Planned
        }),
        ("refuse", |responder| {
            responder.refuse(XID, Fault::Ineligible);
            Planned
        }),
        ("dropped", |responder| {
            responder.handle_dropped(XID);
            Done
        }),
        ("sent", |responder| {
            responder.handle_sent(XID);
            Done
        }),
    ];
    let (absent, pulling) = (None, Some(State::Pulling));
    let (in_service, answering) = (Some(State::InService), Some(State::Answering));
    // For each state: what comes of each event, and the state after it.
    let table = [
        (
            absent,
            [
                (Taken, in_service),
                (Taken, pulling),
                (Refused, absent),
                (Panicked, absent),
                (Panicked, absent),
                (Panicked, absent),
                (Panicked, absent),
                (Panicked, absent),
                (Panicked, absent),
            ],
        ),
        (
            pulling,
            [
                (Dropped, pulling),
                (Dropped, pulling),
                (Refused, pulling),
                (Done, in_service),
                (Refused, answering),
                (Panicked, pulling),
                (Planned, answering),
                (Done, absent),
                (Panicked, absent),
            ],
        ),
        (
            in_service,
            [
                (Dropped, in_service),
                (Dropped, in_service),
                (Refused, in_service),
                (Panicked, in_service),
                (Panicked, in_service),
                (Planned, answering),
                (Planned, answering),
                (Done, absent),
                (Panicked, absent),
            ],
        ),
        (
            answering,
            [
                (Dropped, answering),
                (Dropped, answering),
                (Refused, answering),
                (Panicked, answering),
                (Panicked, answering),
                (Panicked, answering),
                (Panicked, answering),
                (Panicked, absent),
                (Done, absent),
            ],
        ),
    ];
    let state = |responder: &Responder| responder.calls.get(&XID).map(|call| call.state);
    for (before, row) in table {
        for ((name, event), (outcome, after)) in events.into_iter().zip(row) {
            let mut responder = responder();
            if before == pulling {
                events[1].1(&mut responder);
            } else if before.is_some() {
                events[0].1(&mut responder);
            }
            if before == answering {
                events[5].1(&mut responder);
            }
            assert_eq!(state(&responder), before);
            let found = catch_unwind(AssertUnwindSafe(|| event(&mut responder))).unwrap_or(Panicked);
            assert_eq!(found, outcome, "{before:?}, {name}");
            // What a panic leaves behind is nobody's business: the daemon ends with it.
            if found != Panicked {
                assert_eq!(state(&responder), after, "{before:?}, {name}");
            }
            let in_service = u32::from(matches!(state(&responder), Some(State::Pulling | State::InService)));
            if found != Panicked {
                assert_eq!(responder.credits.in_service(), in_service, "{before:?}, {name}");
            }
        }
    }
}
