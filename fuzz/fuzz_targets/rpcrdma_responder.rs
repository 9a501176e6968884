//! The responder under hostile messages, with an owner that does as it is told: whatever arrives, each answer can be sent,
//! writes only where and as much as was offered, and leaves nothing behind; credit is never zero; Receives that are needed
//! are never fewer than what is granted and not in service.
//!
//! Input: `[reply sizes: 1 octet | { length: 2 octets | message }…]`.
#![no_main]

use bulkhead::wire::onc_rpc::{Item, PayloadWriter};
use bulkhead::wire::rpcrdma::chunk::Segment;
use bulkhead::wire::rpcrdma::header::{Fixed, Message};
use bulkhead::wire::rpcrdma::private_data::Agreed;
use bulkhead::wire::rpcrdma::responder::{IncomingCall, Limits, Received, ReplyPlan, Responder, Span};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;
use std::num::NonZeroU32;

const LIMITS: Limits = Limits {
    calls_max: NonZeroU32::new(4).unwrap(),
    long_call_bytes_max: 4096,
    read_chunk_bytes_max: 100_000,
    read_bytes_max: 150_000,
    read_segments_max: 64,
};
const INLINE_BYTES: u32 = 1024;

/// The Send of a plan as far as it is not items, which are zeros.
fn sent(plan: &ReplyPlan) -> Vec<u8> {
    let spell = |span: &Span| match span {
        Span::Octets(range) => plan.octets[range.clone()].to_vec(),
        Span::Item { len, .. } => vec![0; *len as usize],
    };
    plan.message.iter().flat_map(spell).collect()
}

fn check_answer(message: &[u8], asked: Fixed) {
    assert!(message.len() <= INLINE_BYTES as usize);
    let fixed = Fixed::of(message).expect("an answer has a header");
    assert_eq!((fixed.xid, fixed.credit >= 1 && fixed.credit <= 4), (asked.xid, true));
    Message::decode(message).expect("an answer decodes");
}

fn check_writes(plan: &ReplyPlan, call: &IncomingCall) {
    let offered: Vec<&Segment> = call.offer.writes.iter().flatten().chain(call.offer.reply.iter().flatten()).collect();
    for write in &plan.writes {
        let end = write.offset + write.from.len();
        let is_inside = |segment: &&Segment| {
            segment.handle == write.handle
                && segment.offset <= write.offset
                && end <= segment.offset + u64::from(segment.length)
        };
        assert!(offered.iter().any(|segment| is_inside(segment)), "a Write where nothing was offered");
    }
}

fn plant() {
    let vectors = seeds::vectors(include_str!("../../tests/vectors/rpcrdma.json"));
    let messages = vectors.iter().flat_map(seeds::octets_in);
    seeds::plant(messages.map(|message| [&[0xe1][..], &(message.len() as u16).to_be_bytes(), &message].concat()));
}

fuzz_target!(init: plant(), |input: &[u8]| {
    let Some((sizes, mut rest)) = input.split_first() else { return };
    let agreed =
        Agreed { call_inline_bytes: 4096, reply_inline_bytes: INLINE_BYTES, remote_invalidate: sizes & 1 != 0 };
    let mut responder = Responder::new(agreed, LIMITS);
    responder.set_receives(u32::from(sizes >> 5));
    let mut sent_last = None;
    while let Some((len, behind)) = rest.split_first_chunk::<2>() {
        let len = usize::from(u16::from_be_bytes(*len)).min(behind.len());
        let (message, next) = behind.split_at(len);
        rest = next;
        let needed = responder.receives_needed();
        let call = match responder.handle_received(message) {
            Received::Drop(_) => {
                assert_eq!(responder.receives_needed(), needed);
                continue;
            }
            Received::Refuse(refusal) => {
                check_answer(&refusal.octets, Fixed::of(message).expect("it was answered"));
                continue;
            }
            Received::Call(call) => call,
        };
        let asked = Fixed::of(message).expect("a call has a header");
        if let Some(long) = &call.long {
            // Its memory has whatever is last in the message.
            let mut stream = message.to_vec();
            stream.resize(long.len as usize, 0);
            stream[..8].copy_from_slice(&[0; 8]);
            if sizes & 2 != 0 {
                stream[..4].copy_from_slice(&call.xid.0.to_be_bytes());
            }
            if let Err(refusal) = responder.handle_pulled(call.xid, &stream) {
                check_answer(&refusal.octets, asked);
                responder.handle_sent(call.xid);
                continue;
            }
        }
        if sizes & 4 != 0 && sent_last.is_none() {
            // Stays in service: a duplicate of it is dropped.
            sent_last = Some(call.xid);
            continue;
        }
        let mut writer = PayloadWriter::new();
        writer.words().u32(call.xid.0);
        writer.words().u32(1);
        for token in 0..u32::from(sizes >> 3 & 3) {
            writer.item(Item { token, len: token * 700 + u32::from(*sizes) });
        }
        let plan = responder.plan_reply(call.xid, &writer.finish());
        check_writes(&plan, &call);
        check_answer(&sent(&plan), asked);
        assert!(plan.fault.is_none() || plan.writes.is_empty() && plan.invalidate.is_none());
        responder.handle_sent(call.xid);
    }
    assert_eq!(responder.calls(), usize::from(sent_last.is_some()));
});
