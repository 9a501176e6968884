//! The byte vectors of the iWARP stack: each decodes to what it says, is judged as it says, and encodes back to itself.

use std::collections::HashMap;

use bulkhead::wire::iwarp::ddp::{Header, Msn};
use bulkhead::wire::iwarp::mpa::{self, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::stream::{Fault, Kind, MemoryFault, PeerError, Receiver, Segment, Sender};
use serde_json::Value;

fn vectors() -> Vec<Value> {
    let file: Value = serde_json::from_str(include_str!("vectors/iwarp.json")).unwrap();
    file["vectors"].as_array().unwrap().clone()
}

fn octets(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn number(value: &Value) -> u64 {
    match value {
        Value::String(hex) => u64::from_str_radix(hex.strip_prefix("0x").unwrap(), 16).unwrap(),
        other => other.as_u64().unwrap(),
    }
}

fn is(fields: &Value, name: &str) -> bool {
    number(&fields[name]) == 1
}

/// The memory the vectors assume.
struct Memory {
    regions: HashMap<u32, (u64, u64)>,
    placed: Vec<(u32, u64, Vec<u8>)>,
    messages: Vec<(&'static str, usize, Vec<u8>)>,
}

impl Memory {
    fn new() -> Self {
        let base = 0x7f00_dead_0000;
        let regions =
            HashMap::from([(0x0a01, (0, 0x1_0000)), (0x0b02, (0, 0x1_0000)), (0x1122_3344, (base, base + 0x1_0000))]);
        Self { regions, placed: Vec::new(), messages: Vec::new() }
    }

    fn check(&self, stag: u32, offset: u64, len: u64) -> Result<(), MemoryFault> {
        let &(start, end) = self.regions.get(&stag).ok_or(MemoryFault::Stag)?;
        let after = offset.checked_add(len).ok_or(MemoryFault::Wrap)?;
        if offset < start || after > end { Err(MemoryFault::Bounds) } else { Ok(()) }
    }

    fn take(&mut self, segment: &Segment<'_>) -> Result<(), Fault> {
        let len = segment.payload.len();
        match segment.kind {
            Kind::Write { stag, offset, last } => {
                if len > 0 {
                    let checked = self.check(stag, offset, len as u64);
                    checked.map_err(|fault| segment.fault(PeerError::Memory(fault)))?;
                    self.placed.push((stag, offset, segment.payload.to_vec()));
                }
                if last {
                    let total = self.placed.iter().map(|(_, _, octets)| octets.len()).sum();
                    self.messages.push(("write", total, Vec::new()));
                }
            }
            Kind::ReadRequest(request) if request.len > 0 => {
                let checked = self.check(request.source_stag, request.source_offset, u64::from(request.len));
                checked.map_err(|fault| segment.fault(PeerError::Memory(fault)))?;
            }
            Kind::Send { invalidate, .. } => {
                if let Some(stag) = invalidate {
                    self.regions.remove(&stag).ok_or_else(|| segment.fault(PeerError::CannotInvalidate))?;
                }
                self.messages.push(("send", len, segment.payload.to_vec()));
            }
            _ => {}
        }
        Ok(())
    }
}

fn receiver(vector: &Value) -> Receiver {
    let mut receiver = Receiver::new(vector["crc_negotiated"].as_bool().unwrap(), 16);
    if let Some(msn) = vector["pre"]["msn"].as_u64() {
        receiver = receiver.with_next_send(Msn(msn as u32));
    }
    let read = &vector["pre"]["outstanding_read"];
    if read.is_object() {
        receiver.await_read(
            number(&read["sink_stag"]) as u32,
            number(&read["sink_to"]),
            number(&read["length"]) as u32,
        );
    }
    receiver
}

/// Puts the FPDU of `segment` together again from what was understood of it.
fn encode_again(segment: &Segment<'_>, ulpdu: &[u8], crc: bool, vector: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    let mut sender = Sender::new(crc, mpa::ULPDU_BYTES_MAX);
    let rest = segment.payload.len() as u64;
    let (header, _) = Header::decode(ulpdu).unwrap();
    let part = match (segment.kind, header) {
        (Kind::Write { stag, offset, .. }, _) => sender.tagged(Operation::Write, stag, offset, rest),
        (Kind::ReadResponse { .. }, Header::Tagged(header)) => {
            sender.tagged(Operation::ReadResponse, header.stag, header.offset, rest)
        }
        (Kind::Send { invalidate, solicited, .. }, _) => {
            let msn = vector["pre"]["msn"].as_u64().unwrap_or(1) as u32;
            let mut before = 1;
            while before != msn && before < 100 {
                sender.send(None, false, 0, 0);
                before += 1;
            }
            let part = sender.send(invalidate, solicited, 0, rest);
            if before != msn {
                // The wrap: the same message but for its number.
                let mut header = part.header().to_vec();
                header[10..14].copy_from_slice(&msn.to_be_bytes());
                mpa::put_fpdu(&mut out, &header, segment.payload, crc);
                return out;
            }
            part
        }
        (Kind::ReadRequest(request), _) => {
            sender.put_read_request(&mut out, &request);
            return out;
        }
        (Kind::Terminate(_), _) => {
            sender.put_terminate(&mut out, &Terminate::decode(segment.payload).unwrap());
            return out;
        }
        other => panic!("{other:?}"),
    };
    assert!(part.last);
    mpa::put_fpdu(&mut out, part.header(), segment.payload, crc);
    out
}

fn check_fields(segment: &Segment<'_>, ulpdu: &[u8], fields: &Value) {
    assert_eq!(ulpdu.len() as u64, number(&fields["ulpdu_len"]));
    let (header, _) = Header::decode(ulpdu).unwrap();
    let control = match header {
        Header::Tagged(header) => {
            assert!(is(fields, "T") && header.last == is(fields, "L"));
            assert_eq!(u64::from(header.stag), number(&fields["stag"]));
            assert_eq!(header.offset, number(&fields["to"]));
            header.control
        }
        Header::Untagged(header) => {
            assert!(!is(fields, "T") && header.last == is(fields, "L"));
            assert_eq!(u64::from(header.queue), number(&fields["qn"]));
            assert_eq!(u64::from(header.msn.0), number(&fields["msn"]));
            assert_eq!(u64::from(header.offset), number(&fields["mo"]));
            header.control
        }
    };
    assert_eq!(Operation::decode(control).unwrap() as u64, number(&fields["opcode"]));
    if let Some(payload) = fields["payload"].as_str() {
        assert_eq!(segment.payload, octets(payload));
    }
    match segment.kind {
        Kind::ReadRequest(request) => {
            let expected = ReadRequest {
                sink_stag: number(&fields["sink_stag"]) as u32,
                sink_offset: number(&fields["sink_to"]),
                len: number(&fields["read_len"]) as u32,
                source_stag: number(&fields["src_stag"]) as u32,
                source_offset: number(&fields["src_to"]),
            };
            assert_eq!(request, expected);
        }
        Kind::Send { invalidate, .. } => {
            let expected = fields.get("inval_stag").map(|stag| number(stag) as u32);
            assert_eq!(invalidate, expected);
        }
        Kind::Terminate(head) => {
            assert_eq!(
                head.readings().0,
                reason_of(&fields["term_layer"], &fields["term_etype"], &fields["term_code"])
            );
            let terminate = Terminate::decode(segment.payload).unwrap();
            assert_eq!(terminate.culprit.is_some(), is(fields, "D"));
            if let Some(culprit) = terminate.culprit {
                assert_eq!(u64::from(culprit.segment_len), number(&fields["ddp_seg_len"]));
                assert_eq!(culprit.header, octets(fields["term_ddp_hdr"].as_str().unwrap()));
            }
        }
        _ => {}
    }
}

fn reason_of(layer: &Value, kind: &Value, code: &Value) -> Reason {
    Reason { layer: number(layer) as u8, kind: number(kind) as u8, code: number(code) as u8 }
}

#[test]
fn start_up_frames_are_judged_and_encode_back() {
    let mut count = 0;
    for vector in vectors() {
        let kind = match vector["layer"].as_str().unwrap() {
            "mpa-req" => FrameKind::Request,
            "mpa-rep" => FrameKind::Reply,
            _ => continue,
        };
        count += 1;
        let (id, input) = (&vector["id"], octets(vector["hex"].as_str().unwrap()));
        let fields = &vector["fields"];
        let decoded = Frame::decode(kind, &input);
        if vector["expect"]["result"] == "error" {
            assert!(decoded.is_err(), "{id}");
            continue;
        }
        let (frame, len) = decoded.unwrap().unwrap();
        assert_eq!(len, input.len(), "{id}");
        assert_eq!(frame.encode(kind), input, "{id}");
        // Markers are the caller's reason to refuse.
        assert_eq!(frame.markers, vector["expect"]["result"] == "refuse", "{id}");
        assert_eq!((frame.markers, frame.crc), (is(fields, "M"), is(fields, "C")), "{id}");
        assert_eq!((frame.rejected, frame.word.is_some()), (is(fields, "R"), is(fields, "S")), "{id}");
        assert_eq!(u64::from(frame.revision), number(&fields["rev"]), "{id}");
        if let Some(private_data) = fields["private"].as_str() {
            assert_eq!(frame.private_data, octets(private_data), "{id}");
        }
        if let Some(word) = frame.word {
            assert_eq!((word.peer_to_peer, word.rtr_send), (is(fields, "A"), is(fields, "B")), "{id}");
            assert_eq!((u64::from(word.ird), u64::from(word.ord)), (number(&fields["ird"]), number(&fields["ord"])));
            assert_eq!(word.rtr_write, is(fields, "C_rtr_write"), "{id}");
            assert_eq!(word.rtr_read, is(fields, "D_rtr_read"), "{id}");
        }
        for cut in 0..input.len() {
            assert_eq!(Frame::decode(kind, &input[..cut]), Ok(None), "{id} cut at {cut}");
        }
    }
    assert_eq!(count, 10);
}

#[test]
fn frames_are_understood_judged_and_encode_back() {
    let mut count = 0;
    for vector in vectors() {
        if vector["layer"] != "fpdu" || vector["expect"]["result"] == "unsupported" {
            continue;
        }
        count += 1;
        let (id, input) = (&vector["id"], octets(vector["hex"].as_str().unwrap()));
        let crc = vector["crc_negotiated"].as_bool().unwrap();
        let mut receiver = receiver(&vector);
        for cut in 0..input.len() {
            let before = receiver.next(&input[..cut]);
            assert!(matches!(before, Ok(None)), "{id} cut at {cut}: {before:?}");
        }
        let mut memory = Memory::new();
        let outcome = receiver.next(&input).and_then(|found| {
            let (segment, total) = found.expect("the whole FPDU is there");
            assert_eq!(total, input.len(), "{id}");
            memory.take(&segment).map(|()| segment)
        });
        match vector["expect"]["result"].as_str().unwrap() {
            "error" => {
                let expected = &vector["expect"]["terminate"];
                let fault = outcome.unwrap_err();
                let reason = reason_of(&expected["layer"], &expected["etype"], &expected["code"]);
                assert_eq!(fault.terminate.reason, reason, "{id}: {fault}");
            }
            result => {
                let segment = outcome.unwrap_or_else(|fault| panic!("{id}: {fault}"));
                assert_eq!(matches!(segment.kind, Kind::Terminate(_)), result == "terminate-received", "{id}");
                let (ulpdu, _) = mpa::split_fpdu(&input, crc).unwrap().unwrap();
                check_fields(&segment, ulpdu, &vector["fields"]);
                assert_eq!(encode_again(&segment, ulpdu, crc, &vector), input, "{id}");
            }
        }
    }
    assert_eq!(count, 21);
}

#[test]
fn streams_come_to_the_same_however_they_are_cut() {
    let mut count = 0;
    for vector in vectors() {
        if vector["layer"] != "stream" {
            continue;
        }
        count += 1;
        let input = octets(vector["hex"].as_str().unwrap());
        for cut in 0..=input.len() {
            let (mut receiver, mut memory) = (receiver(&vector), Memory::new());
            let (mut start, mut fpdus) = (0, 0);
            for end in [cut, input.len()] {
                while let Some((segment, total)) = receiver.next(&input[start..end]).unwrap() {
                    memory.take(&segment).unwrap();
                    start += total;
                    fpdus += 1;
                }
            }
            assert_eq!((start, fpdus), (input.len(), number(&vector["fields"]["fpdus"])));
            let placements = vector["placements"].as_array().unwrap();
            assert_eq!(memory.placed.len(), placements.len());
            for ((stag, offset, payload), expected) in memory.placed.iter().zip(placements) {
                assert_eq!((u64::from(*stag), *offset), (number(&expected[0]), number(&expected[1])));
                assert_eq!(*payload, octets(expected[2].as_str().unwrap()));
            }
            let messages = vector["messages"].as_array().unwrap();
            assert_eq!(memory.messages.len(), messages.len());
            for ((kind, len, payload), expected) in memory.messages.iter().zip(messages) {
                assert_eq!(expected[0], *kind);
                match expected[1].as_str() {
                    Some(hex) => assert_eq!(*payload, octets(hex)),
                    None => assert_eq!(*len as u64, number(&expected[1])),
                }
            }
        }
    }
    assert_eq!(count, 2);
}
