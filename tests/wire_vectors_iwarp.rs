//! The byte vectors of the iWARP stack: each decodes to what it says, is judged as it says, and encodes back to itself, from
//! what was decoded and from the fields alone. Every vector has exactly one test.

use std::collections::HashMap;

use bulkhead::wire::iwarp::ddp::{Header, Msn, Tagged, Untagged};
use bulkhead::wire::iwarp::mpa::{self, ConnectionWord, FpduError, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Culprit, Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::stream::{Fault, Kind, MemoryFault, PeerError, Receiver, Segment, Sender};
use serde_json::Value;

fn vectors() -> Vec<Value> {
    let file: Value = serde_json::from_str(include_str!("vectors/iwarp.json")).unwrap();
    file["vectors"].as_array().unwrap().clone()
}

/// The tests of this file, and which vector is whose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum User {
    StartUp,
    Fpdu,
    Stream,
    Marker,
}

fn user_of(vector: &Value) -> User {
    match (vector["layer"].as_str().unwrap(), vector["expect"]["result"].as_str().unwrap()) {
        ("mpa-req" | "mpa-rep", "accept" | "refuse" | "error") => User::StartUp,
        ("fpdu", "accept" | "error" | "terminate-received") => User::Fpdu,
        ("stream", "accept") => User::Stream,
        ("fpdu", "unsupported") => User::Marker,
        other => panic!("{}: nobody knows what to do with {other:?}", vector["id"]),
    }
}

/// The vectors of one test, and how many there are, so that none is left out unseen.
fn vectors_of(user: User, count: usize) -> Vec<Value> {
    let mine: Vec<Value> = vectors().into_iter().filter(|vector| user_of(vector) == user).collect();
    assert_eq!(mine.len(), count, "{user:?}");
    for vector in &mine {
        let len = octets(vector["hex"].as_str().unwrap()).len();
        assert_eq!(len as u64, number(&vector["length"]), "{}", vector["id"]);
    }
    mine
}

#[test]
fn no_vector_is_unused() {
    let all = vectors();
    let ids: std::collections::HashSet<_> = all.iter().map(|vector| vector["id"].as_str().unwrap()).collect();
    assert_eq!((all.len(), ids.len()), (34, 34));
    let parts = [(User::StartUp, 10), (User::Fpdu, 21), (User::Stream, 2), (User::Marker, 1)];
    assert_eq!(parts.iter().map(|(user, count)| vectors_of(*user, *count).len()).sum::<usize>(), all.len());
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

/// The FPDU with header, padding and CRC made anew.
fn framed_again(fpdu: &[u8], crc: bool) -> Vec<u8> {
    let ulpdu_len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
    let ulpdu = &fpdu[2..2 + ulpdu_len];
    let mut out = Vec::new();
    match Header::decode(ulpdu) {
        Ok((Header::Tagged(header), payload)) => mpa::put_fpdu(&mut out, &header.encode(), payload, crc),
        Ok((Header::Untagged(header), payload)) => mpa::put_fpdu(&mut out, &header.encode(), payload, crc),
        // A version that is not ours is never encoded; the rest is.
        Err(_) => mpa::put_fpdu(&mut out, ulpdu, &[], crc),
    }
    out
}

fn pad_of(fpdu: &[u8]) -> usize {
    let ulpdu_len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
    fpdu.len() - 6 - ulpdu_len
}

/// A start-up frame made of nothing but the fields of a vector.
fn frame_of(fields: &Value) -> Frame {
    let word = is(fields, "S").then(|| ConnectionWord {
        peer_to_peer: is(fields, "A"),
        rtr_send: is(fields, "B"),
        rtr_write: is(fields, "C_rtr_write"),
        rtr_read: is(fields, "D_rtr_read"),
        ird: number(&fields["ird"]) as u16,
        ord: number(&fields["ord"]) as u16,
    });
    Frame {
        revision: number(&fields["rev"]) as u8,
        markers: is(fields, "M"),
        crc: is(fields, "C"),
        rejected: is(fields, "R"),
        word,
        private_data: fields["private"].as_str().map(octets).unwrap_or_default(),
    }
}

/// An FPDU made of nothing but the fields of a vector.
fn fpdu_of(fields: &Value, crc: bool) -> Vec<u8> {
    let operation = Operation::decode(0x40 | number(&fields["opcode"]) as u8).unwrap();
    let (control, last) = (operation.control(), is(fields, "L"));
    let payload = match operation {
        Operation::ReadRequest => read_request_of(fields).encode().to_vec(),
        Operation::Terminate => terminate_of(fields).encode(),
        _ => octets(fields["payload"].as_str().unwrap()),
    };
    let mut out = Vec::new();
    if is(fields, "T") {
        let header = Tagged { last, control, stag: number(&fields["stag"]) as u32, offset: number(&fields["to"]) };
        mpa::put_fpdu(&mut out, &header.encode(), &payload, crc);
    } else {
        let header = Untagged {
            last,
            control,
            own: fields.get("inval_stag").map_or(0, |stag| number(stag) as u32),
            queue: number(&fields["qn"]) as u32,
            msn: Msn(number(&fields["msn"]) as u32),
            offset: number(&fields["mo"]) as u32,
        };
        mpa::put_fpdu(&mut out, &header.encode(), &payload, crc);
    }
    assert_eq!(pad_of(&out) as u64, number(&fields["pad"]));
    out
}

fn read_request_of(fields: &Value) -> ReadRequest {
    ReadRequest {
        sink_stag: number(&fields["sink_stag"]) as u32,
        sink_offset: number(&fields["sink_to"]),
        len: number(&fields["read_len"]) as u32,
        source_stag: number(&fields["src_stag"]) as u32,
        source_offset: number(&fields["src_to"]),
    }
}

fn terminate_of(fields: &Value) -> Terminate {
    assert!(!is(fields, "R"), "no vector quotes a Read Request");
    assert_eq!(is(fields, "M"), is(fields, "D"));
    Terminate {
        reason: reason_of(&fields["term_layer"], &fields["term_etype"], &fields["term_code"]),
        culprit: is(fields, "D").then(|| Culprit {
            segment_len: number(&fields["ddp_seg_len"]) as u16,
            header: octets(fields["term_ddp_hdr"].as_str().unwrap()),
            read_request: None,
        }),
    }
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
            assert_eq!(request, read_request_of(fields));
        }
        Kind::Send { invalidate, .. } => {
            let expected = fields.get("inval_stag").map(|stag| number(stag) as u32);
            assert_eq!(invalidate, expected);
        }
        Kind::Terminate(head) => {
            assert_eq!(head.readings().0, terminate_of(fields).reason);
            assert_eq!(Terminate::decode(segment.payload), Some(terminate_of(fields)));
        }
        _ => {}
    }
}

fn reason_of(layer: &Value, kind: &Value, code: &Value) -> Reason {
    Reason { layer: number(layer) as u8, kind: number(kind) as u8, code: number(code) as u8 }
}

#[test]
fn start_up_frames_are_judged_and_encode_back() {
    for vector in vectors_of(User::StartUp, 10) {
        let kind = if vector["layer"] == "mpa-req" { FrameKind::Request } else { FrameKind::Reply };
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
        assert_eq!(frame_of(fields).encode(kind), input, "{id}");
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
}

#[test]
fn frames_are_understood_judged_and_encode_back() {
    for vector in vectors_of(User::Fpdu, 21) {
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
                // What is quoted is what came, and the Terminate survives the trip.
                if let Some(culprit) = &fault.terminate.culprit {
                    assert_eq!(culprit.header, input[2..2 + culprit.header.len()], "{id}");
                    assert_eq!(
                        usize::from(culprit.segment_len) + 6,
                        input.len().saturating_sub(pad_of(&input)),
                        "{id}"
                    );
                }
                assert_eq!(fault.terminate.culprit.is_some(), reason.layer < 2, "{id}");
                assert_eq!(Terminate::decode(&fault.terminate.encode()), Some(fault.terminate), "{id}");
                if reason == Reason::CRC {
                    assert!(matches!(mpa::split_fpdu(&input, true), Err(FpduError::Crc { .. })), "{id}");
                    assert_eq!(framed_again(&input, true)[..input.len() - 4], input[..input.len() - 4], "{id}");
                    assert_ne!(framed_again(&input, true), input, "{id}");
                } else {
                    assert_eq!(framed_again(&input, crc), input, "{id}");
                }
            }
            result => {
                let segment = outcome.unwrap_or_else(|fault| panic!("{id}: {fault}"));
                assert_eq!(matches!(segment.kind, Kind::Terminate(_)), result == "terminate-received", "{id}");
                let (ulpdu, _) = mpa::split_fpdu(&input, crc).unwrap().unwrap();
                check_fields(&segment, ulpdu, &vector["fields"]);
                assert_eq!(encode_again(&segment, ulpdu, crc, &vector), input, "{id}");
                assert_eq!(fpdu_of(&vector["fields"], crc), input, "{id}");
            }
        }
    }
}

/// Layout on record: a marker before the first FPDU belongs to its CRC. We never ask for markers; a peer that sends them
/// all the same is out of step at once.
#[test]
fn a_marker_is_taken_for_a_frame_that_is_too_short() {
    for vector in vectors_of(User::Marker, 1) {
        let (input, fields) = (octets(vector["hex"].as_str().unwrap()), &vector["fields"]);
        assert_eq!((number(&fields["marker_at"]), number(&fields["fpduptr"])), (0, 0));
        let (marker, fpdu) = input.split_at(4);
        assert_eq!(marker, [0; 4]);
        let (ulpdu_len, crc) = (number(&fields["ulpdu_len"]) as usize, &input[input.len() - 4..]);
        assert_eq!(usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]])), ulpdu_len);
        assert_eq!(crc32c::crc32c(&input[..input.len() - 4]).to_le_bytes(), crc);
        let (header, payload) = Header::decode(&fpdu[2..2 + ulpdu_len]).unwrap();
        let Header::Tagged(header) = header else { panic!("{header:?}") };
        assert_eq!(u64::from(header.stag), number(&fields["stag"]));
        assert_eq!(header.offset, number(&fields["to"]));
        assert_eq!(Operation::decode(header.control).unwrap() as u64, number(&fields["opcode"]));
        assert_eq!(payload, octets(fields["payload"].as_str().unwrap()));
        // But for the marker and what it does to the CRC, the FPDU is ours.
        let mut ours = Vec::new();
        mpa::put_fpdu(&mut ours, &header.encode(), payload, true);
        assert_eq!(ours[..ours.len() - 4], fpdu[..fpdu.len() - 4]);
        let fault = receiver(&vector).next(&input).unwrap_err();
        assert_eq!(fault.terminate, Terminate::bare(Reason::LENGTH));
    }
}

#[test]
fn streams_come_to_the_same_however_they_are_cut() {
    for vector in vectors_of(User::Stream, 2) {
        let input = octets(vector["hex"].as_str().unwrap());
        for cut in 0..=input.len() {
            let (mut receiver, mut memory) = (receiver(&vector), Memory::new());
            let (mut start, mut fpdus) = (0, 0);
            for end in [cut, input.len()] {
                while let Some((segment, total)) = receiver.next(&input[start..end]).unwrap() {
                    assert_eq!(framed_again(&input[start..start + total], true), input[start..start + total]);
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
}
