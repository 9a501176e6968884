//! The byte vectors of RPC-over-RDMA: each header decodes to what it says, is judged by either role as it says, and encodes
//! back to itself; private data, sizes and thresholds come to what they say; calls and replies of NFS version 3 over good
//! headers are judged as its binding demands (RFC 8267 §4), which is here as far as the vectors need it.

use bulkhead::wire::codec::{Reader, roundup_bytes};
use bulkhead::wire::onc_rpc::{Item, MessageType, Payload, PayloadWriter};
use bulkhead::wire::rpcrdma::chunk::{self, Segment};
use bulkhead::wire::rpcrdma::header::{self, Fixed, Message, RdmaError, Transport};
use bulkhead::wire::rpcrdma::private_data::{self, Agreed, PrivateData};
use bulkhead::wire::rpcrdma::responder::{Fault, IncomingCall, Limits, Received, ReplyPlan, Responder, Span};
use bulkhead::wire::rpcrdma::{RemoteKey, Xid};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

fn vectors() -> Vec<Value> {
    let file: Value = serde_json::from_str(include_str!("vectors/rpcrdma.json")).unwrap();
    file["vectors"].as_array().unwrap().clone()
}

fn octets(value: &Value) -> Vec<u8> {
    let hex = value.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn responder() -> Responder {
    let agreed = Agreed { call_inline_bytes: 4096, reply_inline_bytes: 4096, remote_invalidate: true };
    let limits = Limits {
        calls_max: NonZeroU32::new(8).unwrap(),
        long_call_bytes_max: 1 << 20,
        read_chunk_bytes_max: u64::MAX,
        read_bytes_max: u64::MAX,
        read_segments_max: 16,
    };
    Responder::new(agreed, limits)
}

#[test]
fn every_vector_is_used() {
    let mut used = BTreeMap::new();
    let mut ids = BTreeSet::new();
    for vector in vectors() {
        let class = text(&vector["class"]).to_owned();
        match class.as_str() {
            "header" => check_header(&vector),
            "binding" => check_binding(&vector),
            "exchange" => check_exchange(&vector),
            "cm_private" => check_private_data(&vector),
            "size_field" => check_size(&vector),
            "threshold" => check_thresholds(&vector),
            other => panic!("class {other}"),
        }
        assert!(ids.insert(text(&vector["id"]).to_owned()), "an id twice");
        *used.entry(class).or_insert(0) += 1;
    }
    let expected =
        [("binding", 7), ("cm_private", 14), ("exchange", 8), ("header", 47), ("size_field", 7), ("threshold", 4)];
    assert_eq!(used.iter().map(|(class, count)| (class.as_str(), *count)).collect::<Vec<_>>(), expected);
    assert_eq!(ids.len(), 87);
}

// Headers.

fn segment(segment: &Segment) -> Value {
    json!([segment.handle.0, segment.length, segment.offset])
}

/// A header in the words of the vectors.
fn decoded(message: &[u8]) -> Value {
    match Message::decode(message).unwrap() {
        Message::Transport(found) => {
            let reads = found
                .reads
                .segments()
                .map(|read| json!([read.position, read.target.handle.0, read.target.length, read.target.offset]));
            let chunk = |chunk: chunk::WriteChunk<'_>| chunk.segments().map(|each| segment(&each)).collect::<Vec<_>>();
            let proc = Fixed::of(message).unwrap().proc;
            json!({
                "xid": found.xid.0, "vers": 1, "credit": found.credit, "proc": proc,
                "reads": reads.collect::<Vec<_>>(),
                "writes": found.writes.chunks().map(chunk).collect::<Vec<_>>(),
                "reply": found.reply.map(chunk),
                "hdr_len": message.len() - found.payload.len(),
            })
        }
        Message::Error { xid, vers, credit, error } => match error {
            RdmaError::Chunk => json!({"xid": xid.0, "vers": vers, "credit": credit, "proc": 4, "err": 2}),
            RdmaError::Version { low, high } => {
                json!({"xid": xid.0, "vers": vers, "credit": credit, "proc": 4, "err": 1, "low": low, "high": high})
            }
        },
    }
}

/// What was understood of a message, put together again.
fn encode_again(message: &[u8]) -> Vec<u8> {
    match Message::decode(message).unwrap() {
        Message::Transport(found) => [&found.to_header().encode()[..], found.payload].concat(),
        Message::Error { xid, vers, credit, error } => header::encode_error(xid, vers, credit, error),
    }
}

fn responder_says(message: &[u8]) -> (&'static str, Option<Fault>) {
    let refusal = match responder().handle_received(message) {
        Received::Drop(_) => return ("discard", None),
        Received::Call(_) => return ("accept", None),
        Received::Refuse(refusal) => refusal,
    };
    let asked = Fixed::of(message).unwrap();
    match Message::decode(&refusal.octets).unwrap() {
        Message::Error { xid, vers, credit: 1, error } if (xid, vers) == (asked.xid, asked.vers) => match error {
            RdmaError::Version { low: 1, high: 1 } => ("ERR_VERS", Some(refusal.fault)),
            RdmaError::Chunk => ("ERR_CHUNK", Some(refusal.fault)),
            other => panic!("{other}"),
        },
        other => panic!("{other:?}"),
    }
}

/// What the header alone is to a requester. A call in the other direction has a good header too; who reads it sees that it
/// is no reply.
fn requester_says(message: &[u8]) -> &'static str {
    match Message::decode(message) {
        Err(_) => "discard",
        Ok(Message::Error { .. }) => "complete_error",
        Ok(Message::Transport(found)) if found.message_type() == Some(MessageType::Call) => "accept",
        Ok(Message::Transport(found)) if found.check_reply().is_ok() => "accept",
        Ok(Message::Transport(_)) => "discard",
    }
}

fn is_the_reason(reason: &str, fault: &Fault) -> bool {
    match fault {
        Fault::Xid => reason == "rdma_xid differs from RPC xid",
        Fault::Procedure(_) => reason == "proc",
        Fault::NoStream => reason == "NOMSG call without a position-zero chunk",
        Fault::Alignment(_) => reason == "position not a multiple of four",
        Fault::PastStream { .. } => reason == "position beyond the payload stream",
        Fault::ReadChunk(_) => reason == "read chunk length passes 2^32",
        Fault::TwoStreams => reason == "position zero in RDMA_MSG (local policy)",
        Fault::Behind(_) => reason == "octets after a NOMSG header (local policy)",
        Fault::Lists(error) => {
            let word = reason.split(' ').next().unwrap();
            (word == "boolean" && reason.ends_with(&format!("at {}", error.offset)))
                || (word == "segment" && reason.ends_with("does not fit"))
                || word == "truncated"
        }
        _ => false,
    }
}

fn check_header(vector: &Value) {
    let (id, message) = (&vector["id"], octets(&vector["hex"]));
    assert_eq!(message.len() as u64, vector["len"].as_u64().unwrap(), "{id}");
    // Those of a message that is cut are not spelt out.
    let words: String = vector["words"].as_array().unwrap().iter().map(|word| text(&word[0])).collect();
    assert!(words.is_empty() || words == text(&vector["hex"]), "{id}");
    let expect = &vector["expect"];
    assert!(expect["responder"].is_string() || expect["requester"].is_string(), "{id}");
    if let Some(expected) = expect["responder"].as_str() {
        let (said, fault) = responder_says(&message);
        assert_eq!(said, expected, "{id} to a responder: {fault:?}");
        if let (Some(fault), Some(reason)) = (fault, vector["reason"].as_str()) {
            assert!(is_the_reason(reason, &fault), "{id}: {reason}, but {fault}");
        }
    }
    if let Some(expected) = expect["requester"].as_str() {
        assert_eq!(requester_says(&message), expected, "{id} to a requester");
    }
    if vector["decoded"].is_object() {
        assert_eq!(decoded(&message), vector["decoded"], "{id}");
    }
    // What decodes encodes back, even where a role would not take it.
    if Message::decode(&message).is_ok() {
        assert_eq!(encode_again(&message), message, "{id}");
    } else {
        assert!(!vector["decoded"].is_object(), "{id}");
    }
}

// NFS version 3.

/// A part of arguments.
#[derive(Clone, Copy)]
enum Argument {
    /// An opaque of at most so many octets.
    Opaque(u32),
    Words(usize),
    /// The same, and it may be reduced.
    Eligible(u32),
}

/// Arguments of the procedures in the vectors (RFC 1813 §3.3) and what may be reduced of them (RFC 8267 §4).
const PROCEDURES: [(u32, &[Argument]); 3] = [
    (1, &[Argument::Opaque(64)]),
    (6, &[Argument::Opaque(64), Argument::Words(3)]),
    (7, &[Argument::Opaque(64), Argument::Words(4), Argument::Eligible(1 << 20)]),
];
const READ: u32 = 6;
/// Octets of an RPC header without credentials.
const RPC_HEADER_BYTES: usize = 40;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Judged {
    Execute,
    GarbageArgs,
    ChunkError,
}

/// The call's procedure, and what its arguments are by the binding.
fn judge_arguments(call: &IncomingCall) -> (u32, Judged) {
    let mut reader = Reader::new(&call.inline);
    let words: Vec<u32> = (0..6).map(|_| reader.u32().unwrap()).collect();
    let procedure = words[5];
    let (_, arguments) = PROCEDURES.iter().find(|(number, _)| *number == procedure).unwrap();
    reader.opaque_fixed(RPC_HEADER_BYTES - 24).unwrap();
    let (mut removed, mut chunks, mut judged) = (0, call.reads.iter().peekable(), Judged::Execute);
    for argument in *arguments {
        let taken = match *argument {
            Argument::Words(count) => reader.opaque_fixed(count * 4).is_ok(),
            Argument::Opaque(limit) => reader.opaque(limit as usize).is_ok(),
            Argument::Eligible(limit) => {
                let before = reader.clone();
                let len = u64::from(reader.u32().unwrap_or(u32::MAX));
                match chunks.next_if(|chunk| u64::from(chunk.position) == removed + reader.offset() as u64) {
                    Some(chunk) => {
                        removed += len + roundup_bytes(len);
                        len <= u64::from(limit) && chunk.carries(len)
                    }
                    None => {
                        reader = before;
                        reader.opaque(limit as usize).is_ok()
                    }
                }
            }
        };
        if !taken {
            judged = Judged::GarbageArgs;
            break;
        }
    }
    if chunks.next().is_some() {
        judged = Judged::ChunkError;
    } else if reader.finish().is_err() {
        judged = Judged::GarbageArgs;
    }
    (procedure, judged)
}

/// The reply to a READ that finds `len` octets: status, attributes, count, end of file, data.
fn read_reply(xid: Xid, len: u32) -> Payload {
    let mut writer = PayloadWriter::new();
    for word in [xid.0, 1, 0, 0, 0, 0, 0, 1] {
        writer.words().u32(word);
    }
    writer.words().opaque_fixed(&[0; 84]);
    writer.words().u32(len);
    writer.words().bool(true);
    writer.item(Item { token: 0, len });
    writer.finish()
}

fn plan_read(message: &[u8], len: u32) -> ReplyPlan {
    let mut responder = responder();
    let Received::Call(call) = responder.handle_received(message) else { panic!("no call") };
    assert_eq!(judge_arguments(&call), (READ, Judged::Execute));
    responder.plan_reply(call.xid, &read_reply(call.xid, len))
}

fn is_chunk_error(plan: &ReplyPlan) -> bool {
    let [Span::Octets(range)] = &plan.message[..] else { return false };
    let message = Message::decode(&plan.octets[range.clone()]);
    plan.writes.is_empty() && matches!(message, Ok(Message::Error { error: RdmaError::Chunk, .. }))
}

fn check_binding(vector: &Value) {
    let (id, message) = (&vector["id"], octets(&vector["hex"]));
    assert_eq!(decoded(&message), vector["decoded"], "{id}");
    assert_eq!(encode_again(&message), message, "{id}");
    let Received::Call(call) = responder().handle_received(&message) else { panic!("{id}: no call") };
    let (procedure, judged) = judge_arguments(&call);
    match text(&vector["expect"]["nfs3_responder"]) {
        "execute" => assert_eq!(judged, Judged::Execute, "{id}"),
        "GARBAGE_ARGS reply" => assert_eq!(judged, Judged::GarbageArgs, "{id}"),
        "ERR_CHUNK" => assert_eq!(judged, Judged::ChunkError, "{id}"),
        "ERR_CHUNK when more than 100 octets result; never a partial write past the chunk" => {
            assert_eq!((procedure, judged), (READ, Judged::Execute), "{id}");
            for len in [0, 1, 99, 100] {
                let plan = plan_read(&message, len);
                assert_eq!(plan.fault, None, "{id}: {len} octets");
                assert_eq!(plan.writes.iter().map(|write| write.from.len()).sum::<u64>(), u64::from(len));
                assert!(plan.writes.iter().all(|write| write.offset + write.from.len() <= 4096 + 100));
            }
            for len in [101, 104, 8192] {
                assert!(is_chunk_error(&plan_read(&message, len)), "{id}: {len} octets");
            }
        }
        "ERR_CHUNK when the reply exceeds the reply inline threshold" => {
            // 28 of header, 128 of reply before the data.
            for len in 3900..=4000_u32 {
                let plan = plan_read(&message, len);
                let fits = 28 + 128 + len.next_multiple_of(4) <= 4096;
                assert_eq!(plan.fault.is_none(), fits, "{id}: {len} octets");
                assert_eq!(is_chunk_error(&plan), !fits, "{id}: {len} octets");
                assert!(plan.message_bytes() <= 4096);
            }
            assert!(is_chunk_error(&plan_read(&message, 1 << 20)), "{id}");
        }
        other => panic!("{other}"),
    }
}

// Calls and their replies.

/// What a requester makes of the reply, by the chunks that come back and the binding of READ.
fn judge_exchange(call: &[u8], reply: &[u8]) -> String {
    let (Ok(Message::Transport(call)), Ok(Message::Transport(reply))) = (Message::decode(call), Message::decode(reply))
    else {
        panic!("both are good headers")
    };
    assert_eq!(reply.check_reply(), Ok(()));
    if call.xid != reply.xid {
        return format!("discard, RPC {:#x} stays pending", call.xid.0);
    }
    match data_of_reply(&call, &reply) {
        Some(None) => "accept, inline reply".into(),
        Some(Some(octets)) => format!("accept, {octets} octets"),
        None => "fail the RPC, do not use the data".into(),
    }
}

/// Octets of the item in the write chunk, if the call offers one; the outer `None` if the two do not go together.
fn data_of_reply(call: &Transport<'_>, reply: &Transport<'_>) -> Option<Option<u64>> {
    match (call.reply, reply.reply) {
        (Some(offered), Some(back)) => {
            chunk::octets_returned(&offered.to_vec(), back.segments()).ok()?;
        }
        (None, Some(_)) => return None,
        // Left out of a short reply, as some servers do.
        (_, None) => assert!(!reply.payload.is_empty()),
    }
    let offered: Vec<_> = call.writes.chunks().collect();
    let back: Vec<_> = reply.writes.chunks().collect();
    if offered.len() != back.len() {
        return None;
    }
    let mut written = Vec::new();
    for (offered, back) in offered.iter().zip(back) {
        written.push(chunk::octets_returned(&offered.to_vec(), back.segments()).ok()?);
    }
    let Some(&written) = written.first() else { return Some(None) };
    // The data's length is the last word that is inline; a chunk that was there had to be used.
    let length = u32::from_be_bytes(*reply.payload.last_chunk().unwrap());
    (u64::from(length) == written).then_some(Some(written))
}

fn check_exchange(vector: &Value) {
    let id = &vector["id"];
    let (call, reply) = (octets(&vector["call_hex"]), octets(&vector["reply_hex"]));
    for (message, expected) in [(&call, &vector["call"]), (&reply, &vector["reply"])] {
        assert_eq!(&decoded(message), expected, "{id}");
        assert_eq!(&encode_again(message), message, "{id}");
    }
    assert!(matches!(responder().handle_received(&call), Received::Call(_)), "{id}");
    assert_eq!(judge_exchange(&call, &reply), text(&vector["expect"]["requester"]), "{id}");
}

// Connecting.

fn check_private_data(vector: &Value) {
    let (id, input) = (&vector["id"], octets(&vector["hex"]));
    assert_eq!(input.len() as u64, vector["len"].as_u64().unwrap(), "{id}");
    let expect = &vector["expect"];
    if expect.as_str() == Some("absent: R=0, both sizes 1024") {
        assert_eq!(PrivateData::find(&input), None, "{id}");
        assert_eq!(PrivateData::of_peer(&input), PrivateData::ABSENT, "{id}");
        let absent = PrivateData { remote_invalidate: false, send_bytes: 1024, receive_bytes: 1024 };
        assert_eq!(PrivateData::ABSENT, absent);
        return;
    }
    let told = PrivateData {
        remote_invalidate: expect["r"].as_u64().unwrap() == 1,
        send_bytes: expect["send"].as_u64().unwrap() as u32,
        receive_bytes: expect["recv"].as_u64().unwrap() as u32,
    };
    let at = expect["offset"].as_u64().unwrap() as usize;
    assert_eq!(PrivateData::find(&input), Some((at, told)), "{id}");
    assert_eq!(PrivateData::of_peer(&input), told, "{id}");
    // Reserved bits are the one thing that is not kept.
    let mut message = input[at..at + 8].to_vec();
    message[5] &= 1;
    assert_eq!(told.encode().to_vec(), message, "{id}");
}

fn check_size(vector: &Value) {
    let id = &vector["id"];
    let size = |name: &str| vector[name].as_u64().unwrap() as u32;
    assert_eq!(u32::from(private_data::size_code(size("octets"))), size("encoded"), "{id}");
    assert_eq!(private_data::size_octets(size("encoded") as u8), size("decoded"), "{id}");
}

fn check_thresholds(vector: &Value) {
    let side = |name: &str| PrivateData::of_peer(&octets(&vector[name]));
    let expect = &vector["expect"];
    let agreed = Agreed {
        call_inline_bytes: expect["client_to_server"].as_u64().unwrap() as u32,
        reply_inline_bytes: expect["server_to_client"].as_u64().unwrap() as u32,
        remote_invalidate: expect["send_with_invalidate"].as_bool().unwrap(),
    };
    assert_eq!(Agreed::between(side("client_hex"), side("server_hex")), agreed, "{}", vector["id"]);
}

// Inputs of the same kinds that only their class is known of.

/// Memory that outlives a call, offered for a roundup, is neither written nor invalidated.
#[test]
fn a_pad_segment_is_left_alone() {
    let vector = vectors().into_iter().find(|vector| vector["id"] == "H36").unwrap();
    for len in 4997..=5001 {
        let plan = plan_read(&octets(&vector["hex"]), len);
        assert!(plan.writes.iter().all(|write| write.handle == RemoteKey(0xe1)));
        assert_eq!((plan.fault, plan.invalidate), (None, None));
    }
}

#[test]
fn a_read_position_is_judged_wherever_it_points() {
    let vector = vectors().into_iter().find(|vector| vector["id"] == "U01").unwrap();
    let message = octets(&vector["hex"]);
    for position in (0..=200_u32).chain([4096, 5096, u32::MAX - 5000, u32::MAX - 3, u32::MAX]) {
        let mut message = message.clone();
        message[20..24].copy_from_slice(&position.to_be_bytes());
        let expected = match position {
            96 => Some(Judged::Execute),
            4..96 if position % 4 == 0 => Some(Judged::ChunkError),
            _ => None,
        };
        let found = match responder().handle_received(&message) {
            Received::Call(call) => Some(judge_arguments(&call).1),
            Received::Refuse(_) => None,
            Received::Drop(reason) => panic!("{reason:?}"),
        };
        assert_eq!(found, expected, "position {position}");
    }
}

/// Where a call or a reply is cut, something is said or it is dropped, but nothing breaks.
#[test]
fn every_message_cut_at_every_octet_is_judged() {
    for vector in vectors() {
        for name in ["hex", "call_hex", "reply_hex", "client_hex", "server_hex"] {
            let Some(hex) = vector.get(name) else { continue };
            let message = octets(hex);
            for cut in 0..message.len() {
                let cut = &message[..cut];
                responder().handle_received(cut);
                if let Ok(Message::Transport(found)) = Message::decode(cut) {
                    assert_eq!([&found.to_header().encode()[..], found.payload].concat(), cut);
                }
                PrivateData::of_peer(cut);
            }
        }
    }
}
