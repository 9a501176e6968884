//! The pure iWARP decoders under hostile octets: start-up frames and what is settled by them, FPDUs, DDP and RDMAP headers,
//! Read Requests, Terminates, and the stream of them all. However a stream is cut, the same segments come out and the same
//! fault ends it.
//!
//! Input: `[choices: 1 octet | octets…]`. Choices: 0x01 CRCs are on; 0x02 the octets are ULPDUs, each behind its length in one
//! octet, and the target frames them, so that the fuzzer gets past length and CRC; the rest is how the stream is cut.
#![no_main]

use bulkhead::wire::iwarp::ddp::Header;
use bulkhead::wire::iwarp::mpa::{self, FPDU_BYTES_MAX, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Terminate, TerminateHead};
use bulkhead::wire::iwarp::startup::{Form, Offer, READS_SERVED_MAX, ReadyFrame, answer, refusal};
use bulkhead::wire::iwarp::stream::{Kind, PeerError, Receiver};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

const FORMS: [Form; 3] = [Form::PeerToPeer(ReadyFrame::Write), Form::ClientServer, Form::Revision1];

/// What a stream comes to when its octets arrive in steps of `step`.
fn drive(stream: &[u8], crc: bool, step: usize) -> (Vec<(Kind, Vec<u8>)>, Option<PeerError>, usize) {
    let mut receiver = Receiver::new(crc, 4);
    receiver.await_read(1, 0, 64);
    receiver.await_read(2, u64::MAX - 3, 8);
    let (mut start, mut end, mut segments) = (0, 0, Vec::new());
    loop {
        match receiver.next(&stream[start..end]) {
            Ok(Some((segment, len))) => {
                assert!(len <= end - start);
                assert!(segment.payload.len() < len);
                start += len;
                if let Kind::ReadRequest(_) = segment.kind {
                    if segments.len() % 2 == 0 {
                        receiver.response_sent();
                    }
                }
                segments.push((segment.kind, segment.payload.to_vec()));
            }
            Ok(None) if end == stream.len() => return (segments, None, start),
            Ok(None) => {
                assert!(end - start < FPDU_BYTES_MAX, "more octets are wanted than a frame may have");
                end = (end + step).min(stream.len());
            }
            Err(fault) => {
                let octets = fault.terminate.encode();
                assert!(octets.len() <= 4 + 2 + 18 + 28);
                assert_eq!(Terminate::decode(&octets).as_ref(), Some(&fault.terminate), "{fault}");
                return (segments, Some(fault.error), start);
            }
        }
    }
}

fn start_up(octets: &[u8]) {
    for kind in [FrameKind::Request, FrameKind::Reply] {
        let Ok(Some((frame, len))) = Frame::decode(kind, octets) else { continue };
        let encoded = frame.encode(kind);
        assert_eq!(encoded.len(), len);
        // But for reserved bits the octets are the same.
        assert_eq!((&encoded[..16], &encoded[17..]), (&octets[..16], &octets[17..len]));
        assert_eq!(Frame::decode(kind, &encoded), Ok(Some((frame.clone(), len))));
        for cut in 0..len.min(64) {
            assert_eq!(Frame::decode(kind, &octets[..cut]), Ok(None));
        }
        for (form, never_reads) in FORMS.into_iter().flat_map(|form| [(form, false), (form, true)]) {
            let offer = Offer { form, crc: false, read_depth: 16, never_reads };
            if let Ok((terms, reason)) = offer.conclude(&frame) {
                assert!(terms.reads_out <= 16 && (1..=usize::from(READS_SERVED_MAX)).contains(&terms.reads_in));
                assert!(never_reads || terms.reads_out > 0 || reason.is_some());
                assert_eq!(terms.crc, frame.crc);
            }
        }
        let (reply, terms) = answer(&frame, false, 16);
        assert!(terms.reads_out <= 16 && terms.reads_in <= usize::from(READS_SERVED_MAX));
        for reply in [&reply, &refusal(&frame, frame.private_data.clone())] {
            assert_eq!((reply.revision, reply.word.is_some()), (frame.revision, frame.word.is_some()));
            let octets = reply.encode(FrameKind::Reply);
            assert_eq!(Frame::decode(FrameKind::Reply, &octets), Ok(Some((reply.clone(), octets.len()))));
        }
    }
}

fn headers(ulpdu: &[u8]) {
    let Ok((header, payload)) = Header::decode(ulpdu) else { return };
    // Reserved bits of the first octet are not kept.
    let (first, rest, control) = match header {
        Header::Tagged(header) => (header.encode()[0], header.encode()[1..].to_vec(), header.control),
        Header::Untagged(header) => (header.encode()[0], header.encode()[1..].to_vec(), header.control),
    };
    assert_eq!((first, &rest[..]), (ulpdu[0] & 0xc3, &ulpdu[1..ulpdu.len() - payload.len()]));
    if let Ok(operation) = Operation::decode(control) {
        assert_eq!(operation.control(), control & 0xcf);
    }
    if let Some(request) = payload.first_chunk() {
        assert_eq!(ReadRequest::decode(request).encode(), *request);
    }
    if let Some(terminate) = Terminate::decode(payload) {
        let again = Terminate::decode(&terminate.encode()).expect("ours");
        // The first reading of four octets, written as the RFC has it, may have a second one.
        assert_eq!(again.culprit, terminate.culprit);
        let head = TerminateHead(*payload.first_chunk().expect("four octets"));
        assert!(head.to_string().len() < 200);
    }
}

fuzz_target!(
    init: {
        let vectors = seeds::vectors(include_str!("../../tests/vectors/iwarp.json"));
        seeds::plant(vectors.iter().flat_map(|vector| {
            let octets = seeds::unhex(vector["hex"].as_str().unwrap()).unwrap();
            let crc = u8::from(vector["crc_negotiated"] == true);
            let raw = [&[crc | 0x40][..], &octets].concat();
            // The ULPDU alone, for the target to frame.
            let ulpdu = octets.get(2..).and_then(|rest| rest.get(..usize::from(octets[1])));
            [Some(raw), ulpdu.map(|ulpdu| [&[crc | 2, ulpdu.len() as u8][..], ulpdu].concat())].into_iter().flatten()
        }));
    },
    |input: &[u8]| {
        let Some((choices, octets)) = input.split_first() else { return };
        let crc = choices & 1 != 0;
        start_up(octets);
        let mut framed = Vec::new();
        if choices & 2 != 0 {
            let mut rest = octets;
            while let [len, after @ ..] = rest {
                let (ulpdu, after) = after.split_at(after.len().min(usize::from(*len)));
                headers(ulpdu);
                mpa::put_fpdu(&mut framed, ulpdu, &[], crc);
                rest = after;
            }
        } else {
            headers(octets);
        }
        let stream = if framed.is_empty() { octets } else { &framed[..] };
        let whole = drive(stream, crc, stream.len().max(1));
        assert_eq!(drive(stream, crc, 1), whole);
        assert_eq!(drive(stream, crc, usize::from(choices >> 2) + 1), whole);
    }
);
