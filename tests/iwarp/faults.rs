//! Errors and the end, in both roles.

use std::net::Shutdown;

use bulkhead::fabric::iwarp::{Options, Segments};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Tagged, Untagged};
use bulkhead::wire::iwarp::mpa;
use bulkhead::wire::iwarp::rdmap::{Culprit, Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::stream::Sender;

use crate::peer::*;

/// What a Terminate has of the segment that offends (RFC 5040 Figure 10).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Quoted {
    Nothing,
    /// The DDP header and the length of the segment.
    Header,
    /// The Read Request too.
    ReadRequest,
}
use Quoted::{Header, Nothing};

/// The memory that a peer may try: one region of 4,096 octets of each kind, and two Receives of 4,096 octets.
struct Target {
    write: MemoryRegion,
    read: MemoryRegion,
}

impl Target {
    fn new(qp: &dyn QueuePair) -> Self {
        for buf in qp.allocate(4096, 2).unwrap() {
            qp.post_receive(buf).unwrap();
        }
        let region = |access| qp.register(SharedSpan::new(4096).unwrap(), access).unwrap();
        Self { write: region(Access::WRITE), read: region(Access::READ) }
    }
}

/// A connection beside the one that is broken: it works before and after.
struct Witness {
    peer: Peer,
    qp: Box<dyn QueuePair>,
    count: u32,
}

impl Witness {
    fn new(ours: &mut Ours, listener: &dyn Listener) -> Self {
        let (peer, qp) = connected(ours, listener, Role::Responder, true);
        Self { peer, qp, count: 0 }
    }

    fn assert_fine(&mut self, ours: &mut Ours) {
        self.qp.post_receive(self.qp.allocate(4096, 1).unwrap().remove(0)).unwrap();
        self.count += 1;
        self.peer.say(&send_fpdu(self.count, b"fine", true));
        ours.until("the witness", |events| {
            let qp = self.qp.number();
            let at =
                events.iter().position(|event| event.qp() == Some(qp) && matches!(event, Event::Completed { .. }))?;
            let Event::Completed { completion, .. } = events.remove(at) else { unreachable!() };
            assert_eq!(completion.status, Status::Done);
            Some(())
        });
    }
}

/// The culprit as a Terminate must quote it, of an FPDU.
fn culprit_of(octets: &[u8], quoted: Quoted) -> Option<Culprit> {
    if quoted == Nothing {
        return None;
    }
    let header_len = if octets[2] & 0x80 != 0 { 14 } else { 18 };
    Some(Culprit {
        segment_len: u16::from_be_bytes([octets[0], octets[1]]),
        header: octets[2..2 + header_len].to_vec(),
        read_request: (quoted == Quoted::ReadRequest).then(|| octets[20..48].try_into().unwrap()),
    })
}

/// Everything a peer can do wrong in full operation, as it does it and as it is told.
fn faults(target: &Target) -> Vec<(&'static str, Vec<Vec<u8>>, Reason, Quoted)> {
    use Operation::{Send, SendInvalidate, SendSolicitedInvalidate, Write};
    let (write, read) = (target.write.remote(), target.read.remote());
    let with = |header: &Untagged, payload: &[u8]| fpdu(&header.encode(), payload, true);
    let send = |last, msn, offset, len: usize| with(&untagged(Send, last, 0, msn, offset), &vec![7; len]);
    let put = |control, last, stag: u32, offset, payload: &[u8]| {
        fpdu(&Tagged { last, control, stag, offset }.encode(), payload, true)
    };
    let w = |last, stag: RemoteKey, offset, payload: &[u8]| put(Write.control(), last, stag.0, offset, payload);
    let ask = |stag: RemoteKey, offset, len| ReadRequest {
        sink_stag: 9,
        sink_offset: 0x0102_0304_0506,
        len,
        source_stag: stag.0,
        source_offset: offset,
    };
    let r = |request: &ReadRequest| read_fpdu(1, request, true);
    let good = ask(read.key, read.address, 8);
    let raw = |first: u8, control: u8, len: usize| {
        let mut header = vec![0; len];
        (header[0], header[1]) = (first, control);
        let mut out = Vec::new();
        mpa::put_fpdu(&mut out, &header, &[], true);
        out
    };
    let mut bad_crc = w(true, write.key, write.address, b"abcd");
    let end = bad_crc.len() - 1;
    bad_crc[end] ^= 0x80;
    let mut bad_crc_of_a_bad_header = raw(0x80, 0, 14);
    bad_crc_of_a_bad_header[5] ^= 1;
    let invalidate = |operation, stag: RemoteKey| with(&untagged(operation, true, stag.0, 1, 0), b"abcd");
    let other = RemoteKey(!write.key.0);
    vec![
        // MPA (RFC 5044 §8).
        ("CRC", vec![bad_crc], Reason::CRC, Nothing),
        ("CRC before all else", vec![bad_crc_of_a_bad_header], Reason::CRC, Nothing),
        ("a ULPDU of no octets, as a marker looks", vec![vec![0; 4]], Reason::LENGTH, Nothing),
        ("a ULPDU of 13 octets", vec![vec![0, 13]], Reason::LENGTH, Nothing),
        ("an untagged header of 17 octets", vec![raw(0x41, 0x43, 17)], Reason::LENGTH, Nothing),
        // DDP (RFC 5041 §7.2).
        ("DDP version, tagged", vec![raw(0xc2, 0x40, 14)], Reason::TAGGED_VERSION, Header),
        ("DDP version, untagged", vec![raw(0x40, 0x43, 18)], Reason::UNTAGGED_VERSION, Header),
        ("STag", vec![w(true, other, write.address, b"abcd")], Reason::TAGGED_STAG, Header),
        ("right to write", vec![w(true, read.key, read.address, b"abcd")], Reason::TAGGED_STAG, Header),
        ("before the region", vec![w(true, write.key, write.address - 1, b"abcd")], Reason::TAGGED_BOUNDS, Header),
        ("behind the region", vec![w(true, write.key, write.address + 4093, b"abcd")], Reason::TAGGED_BOUNDS, Header),
        ("wrap", vec![w(true, write.key, u64::MAX - 2, b"abcd")], Reason::TAGGED_WRAP, Header),
        (
            "the second segment of a Write",
            vec![w(false, write.key, write.address, b"abcd"), w(true, write.key, 0, b"abcd")],
            Reason::TAGGED_BOUNDS,
            Header,
        ),
        (
            "a Write within a Write",
            vec![w(false, write.key, write.address, b"abcd"), w(true, read.key, write.address, b"abcd")],
            Reason::TAGGED_BOUNDS,
            Header,
        ),
        ("a Response unasked", vec![response_fpdu(true, 1, 0, b"", true)], Reason::TAGGED_STAG, Header),
        (
            "queue of a Send",
            vec![with(&Untagged { queue: 1, ..untagged(Send, true, 0, 1, 0) }, b"")],
            Reason::QUEUE,
            Header,
        ),
        ("queue 3", vec![with(&Untagged { queue: 3, ..untagged(Send, true, 0, 1, 0) }, b"")], Reason::QUEUE, Header),
        (
            "queue of a Read Request",
            vec![with(&Untagged { queue: 0, ..untagged(Operation::ReadRequest, true, 0, 1, 0) }, &good.encode())],
            Reason::QUEUE,
            Header,
        ),
        (
            "queue of a Terminate",
            vec![with(&Untagged { queue: u32::MAX, ..untagged(Operation::Terminate, true, 0, 1, 0) }, &[0; 4])],
            Reason::QUEUE,
            Header,
        ),
        ("MSN 0", vec![send(true, 0, 0, 4)], Reason::MSN, Header),
        ("MSN 2 first", vec![send(true, 2, 0, 4)], Reason::MSN, Header),
        ("MSN twice", vec![send(true, 1, 0, 4), send(true, 1, 0, 4)], Reason::MSN, Header),
        ("MSN within a message", vec![send(false, 1, 0, 4), send(true, 2, 4, 4)], Reason::MSN, Header),
        ("MSN of a Read Request", vec![read_fpdu(2, &good, true)], Reason::MSN, Header),
        (
            "MSN of a Terminate",
            vec![with(&untagged(Operation::Terminate, true, 0, 2, 0), &[0; 4])],
            Reason::MSN,
            Header,
        ),
        ("MO of the first segment", vec![send(true, 1, 4, 4)], Reason::MESSAGE_OFFSET, Header),
        ("MO with a gap", vec![send(false, 1, 0, 4), send(true, 1, 5, 4)], Reason::MESSAGE_OFFSET, Header),
        ("MO twice", vec![send(false, 1, 0, 4), send(true, 1, 0, 4)], Reason::MESSAGE_OFFSET, Header),
        (
            "MO of a Read Request",
            vec![with(&untagged(Operation::ReadRequest, true, 0, 1, 28), &good.encode())],
            Reason::MESSAGE_OFFSET,
            Header,
        ),
        ("no Receive", vec![send(true, 1, 0, 4), send(true, 2, 0, 0), send(true, 3, 0, 4)], Reason::NO_BUFFER, Header),
        ("longer than the Receive", vec![send(true, 1, 0, 4097)], Reason::TOO_LONG, Header),
        (
            "longer in its second segment",
            vec![send(false, 1, 0, 4096), send(true, 1, 4096, 1)],
            Reason::TOO_LONG,
            Header,
        ),
        // RDMAP (RFC 5040 §4.8).
        ("RDMAP version 0", vec![raw(0x41, 0x03, 18)], Reason::RDMAP_VERSION, Header),
        (
            "RDMAP version 2 of a Read Request",
            vec![with(&Untagged { control: 0x81, ..untagged(Operation::ReadRequest, true, 0, 1, 0) }, &good.encode())],
            Reason::RDMAP_VERSION,
            Header,
        ),
        ("operation 8, Immediate Data", vec![raw(0x41, 0x48, 18)], Reason::OPERATION, Header),
        ("operation 15", vec![raw(0xc1, 0x4f, 14)], Reason::OPERATION, Header),
        (
            "a tagged Send",
            vec![put(Send.control(), true, write.key.0, write.address, b"abcd")],
            Reason::OPERATION,
            Header,
        ),
        (
            "a tagged Read Request",
            vec![put(Operation::ReadRequest.control(), true, 1, 2, &good.encode())],
            Reason::OPERATION,
            Header,
        ),
        (
            "an untagged Write",
            vec![with(&Untagged { control: Write.control(), ..untagged(Send, true, 0, 1, 0) }, b"")],
            Reason::OPERATION,
            Header,
        ),
        (
            "a Read Request of 27 octets",
            vec![with(&untagged(Operation::ReadRequest, true, 0, 1, 0), &good.encode()[..27])],
            Reason::UNSPECIFIED,
            Header,
        ),
        (
            "a Read Request of 29 octets",
            vec![with(&untagged(Operation::ReadRequest, true, 0, 1, 0), &[&good.encode()[..], b"!"].concat())],
            Reason::UNSPECIFIED,
            Header,
        ),
        (
            "a Read Request that goes on",
            vec![with(&untagged(Operation::ReadRequest, false, 0, 1, 0), &good.encode())],
            Reason::UNSPECIFIED,
            Header,
        ),
        (
            "a Terminate of 3 octets",
            vec![with(&untagged(Operation::Terminate, true, 0, 1, 0), &[0; 3])],
            Reason::UNSPECIFIED,
            Header,
        ),
        (
            "a Terminate that goes on",
            vec![with(&untagged(Operation::Terminate, false, 0, 1, 0), &[0; 4])],
            Reason::UNSPECIFIED,
            Header,
        ),
        ("a Send that does not advance", vec![send(false, 1, 0, 0)], Reason::UNSPECIFIED, Header),
        ("STag of a Read", vec![r(&ask(other, read.address, 8))], Reason::READ_STAG, Quoted::ReadRequest),
        ("right to read", vec![r(&ask(write.key, write.address, 8))], Reason::READ_RIGHTS, Quoted::ReadRequest),
        (
            "a Read beyond the region",
            vec![r(&ask(read.key, read.address + 1, 4096))],
            Reason::READ_BOUNDS,
            Quoted::ReadRequest,
        ),
        (
            "a Read of 2^32 - 1 octets",
            vec![r(&ask(read.key, read.address, u32::MAX))],
            Reason::READ_BOUNDS,
            Quoted::ReadRequest,
        ),
        ("a Read that wraps", vec![r(&ask(read.key, u64::MAX - 6, 8))], Reason::READ_WRAP, Quoted::ReadRequest),
        ("invalidation of an unknown STag", vec![invalidate(SendInvalidate, other)], Reason::CANNOT_INVALIDATE, Header),
        (
            "invalidation without leave",
            vec![invalidate(SendSolicitedInvalidate, write.key)],
            Reason::CANNOT_INVALIDATE,
            Header,
        ),
    ]
}

/// Each error is told with its layer, type and code and quotes what RFC 5040 Figure 10 asks for; what follows it is neither
/// placed nor delivered; every request comes back; exactly that connection ends.
#[test]
fn each_error_of_a_peer_is_told_exactly_and_ends_that_connection_alone() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let mut witness = Witness::new(&mut ours, &*listener);
        let mut n = 0;
        loop {
            let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
            let target = Target::new(&*qp);
            let mut faults = faults(&target);
            if n == faults.len() {
                assert_eq!(n, 52);
                break;
            }
            let (name, fpdus, reason, quoted) = faults.swap_remove(n);
            n += 1;
            let RemoteSpan { key, address, .. } = target.write.remote();
            // A good Write and a good Send behind it.
            let after = [write_fpdu(key.0, address + 2048, b"after", true), send_fpdu(2, b"after", true)].concat();
            peer.say(&[fpdus.concat(), after].concat());
            let (heard, terminate) = peer.hear_last_words(&mut ours, true);
            assert_eq!(terminate, Terminate { reason, culprit: culprit_of(fpdus.last().unwrap(), quoted) }, "{name}");
            assert!(heard.is_empty(), "{name}: {heard:?}");
            let mut flushed = 0;
            let cause = ours.until("the end", |events| {
                let mut events = events.extract_if(.., |event| event.qp() == Some(qp.number()));
                events.find_map(|event| match event {
                    Event::Disconnected { cause, .. } => Some(cause),
                    Event::Completed { completion, .. } => {
                        flushed += usize::from(completion.status == Status::Flushed);
                        None
                    }
                    _ => None,
                })
            });
            assert!(matches!(cause, Cause::PeerFault(_)), "{name}: {cause:?}");
            let received = if reason == Reason::NO_BUFFER { 2 } else { usize::from(name == "MSN twice") };
            assert_eq!(flushed, 2 - received, "{name}");
            let mut octets = [0; 8];
            target.write.span().copy_out(2048, &mut octets);
            assert_eq!(octets, [0; 8], "{name}: nothing behind it is placed");
            drop((peer, qp));
            witness.assert_fine(&mut ours);
        }
        drop(witness);
        ours.settle();
    }
}

/// RFC 5044 §4.4, §6: with CRCs on, not an octet of a frame is placed before all of it was verified.
#[test]
fn nothing_of_a_frame_with_a_wrong_crc_is_placed() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let (mut peer, qp) = connected(&mut ours, &*listener, Role::Responder, true);
    let region = qp.register(SharedSpan::new(40_000).unwrap(), Access::WRITE).unwrap();
    let mut octets = write_fpdu(region.key().0, region.remote().address, &[7; 40_000], true);
    let at = octets.len() - 5;
    octets[at] ^= 1;
    for piece in octets.chunks(10_000) {
        peer.say(piece);
        (0..20).for_each(|_| ours.turn());
    }
    assert_eq!(peer.hear_last_words(&mut ours, true).1.reason, Reason::CRC);
    let mut found = vec![1; 40_000];
    region.span().copy_out(0, &mut found);
    assert!(found.iter().all(|octet| *octet == 0));
}

/// RFC 5040 §5.2.2: a Response is compared with its Read: STag, offset, length, and where it ends.
#[test]
fn a_response_that_is_not_what_was_asked_for_ends_the_connection() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let mut witness = Witness::new(&mut ours, &*listener);
        type Make = fn(u32, u64) -> Vec<Vec<u8>>;
        let cases: [(Make, Reason); 8] = [
            (|stag, at| vec![response_fpdu(true, stag + 1, at, &[7; 16], true)], Reason::TAGGED_STAG),
            (|stag, at| vec![response_fpdu(true, stag, at + 1, &[7; 16], true)], Reason::TAGGED_BOUNDS),
            (|stag, at| vec![response_fpdu(true, stag, at, &[7; 15], true)], Reason::TAGGED_BOUNDS),
            (|stag, at| vec![response_fpdu(true, stag, at, &[7; 17], true)], Reason::TAGGED_BOUNDS),
            (|stag, at| vec![response_fpdu(false, stag, at, &[7; 16], true)], Reason::TAGGED_BOUNDS),
            (|stag, at| vec![response_fpdu(true, stag, at, b"", true)], Reason::TAGGED_BOUNDS),
            (
                |stag, at| {
                    let second = response_fpdu(true, stag, at + 9, &[7; 8], true);
                    vec![response_fpdu(false, stag, at, &[7; 8], true), second]
                },
                Reason::TAGGED_BOUNDS,
            ),
            (
                |stag, at| vec![response_fpdu(false, stag, at, &[7; 8], true), write_fpdu(9, 9, b"abcd", true)],
                Reason::TAGGED_BOUNDS,
            ),
        ];
        for (make, reason) in cases {
            let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
            let into = qp.allocate(4096, 1).unwrap().remove(0);
            let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
            qp.post(&mut vec![Work::Read { into, range: 0..16, key, address, flags }]).unwrap();
            let asked = peer.hear_segments(&mut ours, 1, true).remove(0).read_request();
            let fpdus = make(asked.sink_stag, asked.sink_offset);
            peer.say(&fpdus.concat());
            let (_, terminate) = peer.hear_last_words(&mut ours, true);
            assert_eq!(terminate, Terminate { reason, culprit: culprit_of(fpdus.last().unwrap(), Header) });
            assert_eq!(ours.completion().status, Status::Flushed);
            assert!(matches!(ours.cause(), Cause::PeerFault(_)));
            witness.assert_fine(&mut ours);
        }
    }
}

/// RFC 5040 §4.8: when the memory of a Read goes while its Response is under way, the Terminate says how far it came.
#[test]
fn a_read_whose_memory_goes_is_told_how_far_it_came() {
    for ulpdu_max in [1442, 64_768] {
        let options = Options { segments: Segments::UpTo(ulpdu_max), ..Options::default() };
        let mut ours = Ours::new(options);
        let listener = listen(&ours);
        let mut witness = Witness::new(&mut ours, &*listener);
        let (mut peer, qp) = connected(&mut ours, &*listener, Role::Responder, true);
        let region = qp.register(SharedSpan::new(64 << 20).unwrap(), Access::READ).unwrap();
        let RemoteSpan { key, address, .. } = region.remote();
        let asked =
            ReadRequest { sink_stag: 9, sink_offset: 5, len: 64 << 20, source_stag: key.0, source_offset: address };
        let before = ReadRequest { len: 3, ..asked };
        peer.say(&[read_fpdu(1, &before, true), read_fpdu(2, &asked, true)].concat());
        (0..20).for_each(|_| ours.turn());
        assert!(region.invalidate());
        let (heard, terminate) = peer.hear_last_words(&mut ours, true);
        let sent: usize = heard[1..].iter().map(|segment| segment.payload.len()).sum();
        assert!(heard[0].tagged().last && (1..64 << 20).contains(&sent), "{sent}");
        assert!(heard[1..].iter().all(|segment| !segment.tagged().last));
        let rest = ReadRequest {
            sink_offset: 5 + sent as u64,
            len: (64 << 20) - sent as u32,
            source_offset: address + sent as u64,
            ..asked
        };
        let culprit = culprit_of(&read_fpdu(2, &rest, true), Quoted::ReadRequest);
        assert_eq!(terminate, Terminate { reason: Reason::READ_STAG, culprit });
        witness.assert_fine(&mut ours);
    }
}

/// RFC 5041 §6.2.1, RFC 5040 §5.4: a Terminate never lies inside a frame that was begun, and nothing comes after it.
#[test]
fn a_terminate_waits_for_the_end_of_the_frame_in_progress() {
    for ulpdu_max in [1442, 64_768] {
        let options = Options { segments: Segments::UpTo(ulpdu_max), ..Options::default() };
        let mut ours = Ours::new(options);
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, Role::Responder, true);
        let buf = qp.allocate(32 << 20, 1).unwrap().remove(0);
        let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
        let from = Source::Buffer { buf, range: 0..32 << 20 };
        qp.post(&mut vec![Work::Write { from, key, address, flags }]).unwrap();
        // Nothing is read here: it stops where the socket is full.
        (0..300).for_each(|_| ours.turn());
        assert!(!ours.events.iter().any(|event| matches!(event, Event::Completed { .. })));
        peer.say(&write_fpdu(77, 1 << 33, b"abcd", true));
        let (heard, terminate) = peer.hear_last_words(&mut ours, true);
        assert_eq!(terminate.reason, Reason::TAGGED_STAG);
        assert!(heard.iter().all(|segment| segment.operation() == Operation::Write && !segment.tagged().last));
        assert_eq!(ours.completion().status, Status::Flushed);
    }
}

/// RFC 5040 §5.4: outstanding work is flushed, the send queue before the Receives, then comes the end. Any length from
/// four octets on is taken.
#[test]
fn a_terminate_of_the_peer_flushes_what_is_outstanding() {
    let quoting = Terminate {
        reason: Reason::READ_BOUNDS,
        culprit: culprit_of(
            &read_fpdu(
                1,
                &ReadRequest { sink_stag: 1, sink_offset: 2, len: 3, source_stag: 4, source_offset: 5 },
                true,
            ),
            Quoted::ReadRequest,
        ),
    };
    let whole = quoting.encode();
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let mut witness = Witness::new(&mut ours, &*listener);
        for len in [4, 5, 6, 20, whole.len() - 1, whole.len()] {
            let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
            let _target = Target::new(&*qp);
            let into = qp.allocate(4096, 1).unwrap().remove(0);
            let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
            qp.post(&mut vec![Work::Read { into, range: 0..16, key, address, flags }, send_work(b"behind")]).unwrap();
            peer.hear_segments(&mut ours, 2, true);
            peer.say(&fpdu(&untagged(Operation::Terminate, true, 0, 1, 0).encode(), &whole[..len], true));
            // Behind the last message of the peer there is nothing.
            peer.say(&send_fpdu(1, b"ghost", true));
            let mut ended = Vec::new();
            let cause = ours.until("the end", |events| {
                let mut events = events.extract_if(.., |event| event.qp() == Some(qp.number()));
                events.find_map(|event| match event {
                    Event::Disconnected { cause, .. } => Some(cause),
                    Event::Completed { completion, .. } => {
                        ended.push((completion.kind, completion.status));
                        None
                    }
                    _ => None,
                })
            });
            let Cause::RefusedByPeer(why) = cause else { panic!("{cause:?}") };
            assert!(why.contains("RDMAP error, type 1 code 1"), "{why}");
            let kinds = [WorkKind::Read, WorkKind::Send, WorkKind::Receive, WorkKind::Receive];
            assert_eq!(ended, kinds.map(|kind| (kind, Status::Flushed)));
            assert!(peer.hear_to_the_end(&mut ours).is_empty(), "a Terminate is not answered");
            witness.assert_fine(&mut ours);
        }
    }
}

/// RFC 5041 §6.2.1: whoever leaves sends what was accepted, then FIN; what the peer still says is read away, since a reset
/// would cost it our last message.
#[test]
fn a_goodbye_loses_nothing_that_was_sent() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
        let target = Target::new(&*qp);
        let RemoteSpan { key, address, .. } = target.write.remote();
        qp.post(&mut vec![send_work(b"the last words")]).unwrap();
        assert_eq!(ours.completion().kind, WorkKind::Send);
        (0..50).for_each(|_| peer.say(&write_fpdu(key.0, address, &[7; 4096], true)));
        qp.disconnect();
        assert!(matches!(qp.post(&mut vec![send_work(b"late")]), Err(PostError::Ended)));
        assert_eq!(ours.cause(), Cause::Local);
        peer.say(&write_fpdu(key.0, address, &[7; 4096], true));
        let heard = segments(&peer.hear_to_the_end(&mut ours), true);
        assert_eq!((heard.len(), &heard[0].payload[..]), (1, &b"the last words"[..]));
        let mut octet = [0];
        assert_eq!(std::io::Read::read(&mut &peer.stream, &mut octet).unwrap(), 0, "FIN, and no reset");
        drop((peer, qp, target));
        ours.settle();
    }
}

/// RFC 5041 §6.2.1, RFC 5044 §8: a FIN is in order between two messages with nothing outstanding, and nowhere else.
#[test]
fn the_end_of_the_stream_is_in_order_between_messages_alone() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let mut witness = Witness::new(&mut ours, &*listener);
        let whole = send_fpdu(1, b"whole", true);
        let part = fpdu(&untagged(Operation::Send, false, 0, 1, 0).encode(), b"part", true);
        for (octets, reads, in_order) in [
            (Vec::new(), false, true),
            (whole.clone(), false, true),
            (whole[..1].to_vec(), false, false),
            (whole[..whole.len() - 1].to_vec(), false, false),
            (part, false, false),
            (Vec::new(), true, false),
        ] {
            let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
            let _target = Target::new(&*qp);
            if reads {
                let into = qp.allocate(4096, 1).unwrap().remove(0);
                let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
                qp.post(&mut vec![Work::Read { into, range: 0..16, key, address, flags }]).unwrap();
                peer.hear_segments(&mut ours, 1, true);
            }
            peer.say(&octets);
            peer.stream.shutdown(Shutdown::Write).unwrap();
            let cause = ours.cause();
            assert!(if in_order { cause == Cause::Peer } else { matches!(cause, Cause::Lost(_)) }, "{cause:?}");
            ours.events.clear();
            witness.assert_fine(&mut ours);
        }
    }
}

#[test]
fn a_terminate_of_the_peer_and_a_loss_inside_a_frame_are_told_apart_from_a_goodbye() {
    let terminate = Terminate::bare(Reason::CRC);
    let mut octets = Vec::new();
    Sender::new(true, 1 << 10).put_terminate(&mut octets, &terminate);
    let half = write_fpdu(1, 0, b"", true)[..9].to_vec();
    for (octets, expected) in [(octets, "refused"), (half, "lost"), (Vec::new(), "peer")] {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let (mut peer, _qp, _) = admitted(&mut ours, &*listener, &request(true, true));
        peer.say(&[write_fpdu(1, 0, b"", true), octets].concat());
        peer.stream.shutdown(Shutdown::Write).unwrap();
        let cause = ours.cause();
        let found = match cause {
            Cause::RefusedByPeer(_) => "refused",
            Cause::Lost(_) => "lost",
            Cause::Peer => "peer",
            _ => "another",
        };
        assert_eq!(found, expected, "{cause:?}");
        ours.settle();
    }
}
