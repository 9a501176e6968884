//! What goes over an established connection, in both roles of ours.

use bulkhead::fabric::iwarp::{Options, Segments};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::Tagged;
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest};

use crate::peer::*;

fn receive(qp: &dyn QueuePair, count: usize) {
    for buf in qp.allocate(4096, count).unwrap() {
        qp.post_receive(buf).unwrap();
    }
}

fn write_part(last: bool, stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
    fpdu(&Tagged { last, control: Operation::Write.control(), stag, offset }.encode(), payload, true)
}

fn send_part(operation: Operation, last: bool, own: u32, msn: u32, offset: u32, payload: &[u8]) -> Vec<u8> {
    fpdu(&untagged(operation, last, own, msn, offset).encode(), payload, true)
}

fn octets_of(region: &MemoryRegion, offset: usize, len: usize) -> Vec<u8> {
    let mut octets = vec![0; len];
    region.span().copy_out(offset, &mut octets);
    octets
}

/// RFC 5040 §5.3: the payload is delivered, then the STag goes out of service, then the Receive completes.
#[test]
fn each_send_of_the_family_is_delivered_as_what_it_is() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
        receive(&*qp, 4);
        let kinds = [
            (Operation::Send, false, false),
            (Operation::SendInvalidate, true, false),
            (Operation::SendSolicited, false, true),
            (Operation::SendSolicitedInvalidate, true, true),
        ];
        for (msn, (operation, invalidates, solicited)) in (1..).zip(kinds) {
            let region = qp.register(SharedSpan::new(8).unwrap(), Access::WRITE.invalidatable()).unwrap();
            let key = region.key();
            // The four octets are RDMAP's own where nothing is invalidated: not looked at.
            peer.say(&send_part(operation, false, key.0, msn, 0, b"in two "));
            peer.say(&send_part(operation, true, key.0, msn, 7, b"parts"));
            let received = ours.completion();
            assert_eq!((received.status, received.len, received.solicited), (Status::Done, 12, solicited));
            assert_eq!(received.invalidated, invalidates.then_some(key));
            assert_eq!(&received.buf.unwrap().as_slice()[..12], b"in two parts");
            assert_eq!(region.invalidate(), !invalidates, "gone is gone");
        }
        for (msn, (operation, invalidates, solicited)) in (1..).zip(kinds) {
            let invalidate = invalidates.then_some(RemoteKey(0x0102_0304));
            let flags = Flags { solicited, ..Flags::SIGNALED };
            qp.post(&mut vec![Work::Send { from: Source::Inline(b"ours".to_vec()), invalidate, flags }]).unwrap();
            let heard = peer.hear_segments(&mut ours, 1, true).remove(0);
            let own = if invalidates { 0x0102_0304 } else { 0 };
            assert_eq!(heard.untagged(), untagged(operation, true, own, msn, 0));
            assert_eq!(heard.payload, b"ours");
        }
    }
}

/// RFC 5041 §5.2, RFC 5040 §5.2.1, §5.3: STag and offset of nothing are not looked at; a Send of nothing takes a Receive.
#[test]
fn messages_of_no_octets_are_one_segment_and_open_nothing() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
        receive(&*qp, 1);
        ours.events.clear();
        let read =
            |sink_stag, len| ReadRequest { sink_stag, sink_offset: u64::MAX, len, source_stag: 7, source_offset: 9 };
        peer.say(&write_part(true, 0xdead, u64::MAX, b""));
        peer.say(&read_fpdu(1, &read(0x0203, 0), true));
        let response = peer.hear_segments(&mut ours, 1, true).remove(0);
        let control = Operation::ReadResponse.control();
        assert_eq!(response.tagged(), Tagged { last: true, control, stag: 0x0203, offset: u64::MAX });
        assert!(response.payload.is_empty() && ours.events.is_empty());
        peer.say(&send_fpdu(1, b"", true));
        assert_eq!((ours.completion().kind, ours.events.len()), (WorkKind::Receive, 0));

        // Ours, with a key that the peer never gave.
        let (key, address, flags) = (RemoteKey(3), 1 << 40, Flags::SIGNALED);
        let into = qp.allocate(4096, 1).unwrap().remove(0);
        let mut work = vec![
            Work::Write { from: Source::Inline(Vec::new()), key, address, flags },
            Work::Read { into, range: 5..5, key, address, flags },
            send_work(b""),
        ];
        qp.post(&mut work).unwrap();
        let heard = peer.hear_segments(&mut ours, 3, true);
        let operations: Vec<_> = heard.iter().map(Heard::operation).collect();
        assert_eq!(operations, [Operation::Write, Operation::ReadRequest, Operation::Send]);
        assert!(heard[0].payload.is_empty() && heard[2].payload.is_empty());
        let asked = heard[1].read_request();
        assert_eq!(asked.len, 0);
        // Nobody may look at this STag and offset either.
        peer.say(&response_fpdu(true, !asked.sink_stag, 4, b"", true));
        for kind in [WorkKind::Write, WorkKind::Read, WorkKind::Send] {
            assert_eq!(ours.completion().kind, kind);
        }
    }
}

/// RFC 5040 §5.2.1, §5.2.2: Responses in the order of the Requests, sink STag and offset as they were asked for, rising
/// without a gap, L on the last segment alone, as many octets as were wanted.
#[test]
fn read_responses_are_exact_in_order_and_of_any_length() {
    for ulpdu_max in [128, 1442, 64_768] {
        let mut ours = Ours::new(Options { segments: Segments::UpTo(ulpdu_max), ..Options::default() });
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, Role::Responder, true);
        let region = qp.register(SharedSpan::new(200_000).unwrap(), Access::READ).unwrap();
        let RemoteSpan { key, address, .. } = region.remote();
        let body: Vec<u8> = (0..200_000_usize).map(|at| (at * 7 % 251) as u8).collect();
        region.span().copy_in(0, &body);
        // Of one payload: less, exactly, one more.
        let room = ulpdu_max - 14;
        let lens = [0, 1, 7, 8, 9, room - 1, room, room + 1, 2 * room, 150_000];
        let ask = |n: usize| ReadRequest {
            sink_stag: 1000 + n as u32,
            // The end of the address space is the asker's own affair.
            sink_offset: u64::MAX - 20 + n as u64,
            len: lens[n] as u32,
            source_stag: key.0,
            source_offset: address + n as u64,
        };
        for msn in 0..lens.len() {
            if msn % 4 == 0 {
                // No more than four at a time were agreed on.
                (0..4.min(lens.len() - msn))
                    .for_each(|n| peer.say(&read_fpdu((msn + n) as u32 + 1, &ask(msn + n), true)));
            }
            let (len, asked, mut done) = (lens[msn], ask(msn), 0);
            loop {
                let part = peer.hear_segments(&mut ours, 1, true).remove(0);
                assert_eq!(part.operation(), Operation::ReadResponse);
                let Tagged { last, stag, offset, .. } = part.tagged();
                assert_eq!((stag, offset), (asked.sink_stag, asked.sink_offset.wrapping_add(done as u64)));
                assert!(part.payload.len() + 14 <= ulpdu_max);
                assert_eq!(part.payload, body[msn + done..][..part.payload.len()]);
                done += part.payload.len();
                assert_eq!(last, done == len, "{done} of {len}");
                if last {
                    break;
                }
                assert_eq!(part.payload.len() % 8, 0);
            }
        }
    }
}

/// RFC 5041 §4.3, §5.2: MSN from 1 on and per queue, MO and TO rise by what came before, L on the last segment alone.
#[test]
fn our_messages_are_cut_and_numbered_as_the_rfc_has_it() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options { segments: Segments::UpTo(128), ..Options::default() });
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
        let body: Vec<u8> = (0..1000_u32).map(|at| (at % 251) as u8).collect();
        let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
        let source = |len: usize| {
            let mut buf = qp.allocate(4096, 1).unwrap().remove(0);
            buf.as_mut_slice()[..1000].copy_from_slice(&body);
            Source::Buffer { buf, range: 0..len }
        };
        let read = |len| {
            let into = qp.allocate(4096, 1).unwrap().remove(0);
            Work::Read { into, range: 0..len, key, address, flags }
        };
        let mut work = vec![
            Work::Send { from: source(1000), invalidate: None, flags },
            read(5),
            Work::Write { from: source(1000), key, address, flags },
            Work::Send { from: source(110), invalidate: None, flags },
            read(6),
            Work::Send { from: source(111), invalidate: None, flags },
        ];
        qp.post(&mut work).unwrap();
        let mut message = |operation: Operation, msn: u32, body: &[u8]| {
            let mut done = 0;
            while done < body.len() {
                let part = peer.hear_segments(&mut ours, 1, true).remove(0);
                assert_eq!(part.operation(), operation);
                let is_read = operation == Operation::ReadRequest;
                let last = is_read || done + part.payload.len() == body.len();
                if operation == Operation::Write {
                    let control = operation.control();
                    assert_eq!(part.tagged(), Tagged { last, control, stag: key.0, offset: address + done as u64 });
                } else {
                    assert_eq!(part.untagged(), untagged(operation, last, 0, msn, done as u32));
                }
                assert!(part.payload.len() + 14 <= 128);
                if is_read {
                    assert_eq!(part.read_request().len, u32::from(body[0]));
                    return;
                }
                assert_eq!(part.payload, body[done..][..part.payload.len()]);
                done += part.payload.len();
            }
        };
        message(Operation::Send, 1, &body);
        message(Operation::ReadRequest, 1, &[5]);
        message(Operation::Write, 0, &body);
        message(Operation::Send, 2, &body[..110]);
        message(Operation::ReadRequest, 2, &[6]);
        message(Operation::Send, 3, &body[..111]);
    }
}

/// RFC 5040 §5.5(12), §6.1: never more Reads outstanding than agreed on, a fenced request waits for all before it, and
/// completions come in the order of posting though a Send is done before a Read.
#[test]
fn our_reads_stay_within_the_depth_and_a_fence_waits_for_them() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let mut asked = request(true, true);
    asked.word.as_mut().unwrap().ird = 2;
    let (mut peer, qp, _) = admitted(&mut ours, &*listener, &asked);
    peer.say(&write_fpdu(1, 0, b"", true));
    let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
    let read = || {
        let into = qp.allocate(4096, 1).unwrap().remove(0);
        Work::Read { into, range: 16..24, key, address, flags }
    };
    let fenced = Flags { fenced: true, ..flags };
    let fenced = Work::Send { from: Source::Inline(b"fenced".to_vec()), invalidate: None, flags: fenced };
    qp.post(&mut vec![read(), send_work(b"free"), read(), read(), fenced]).unwrap();
    let quiet = |ours: &mut Ours, peer: &mut Peer| {
        (0..50).for_each(|_| ours.turn());
        assert!(!peer.hear(ours, |_| true) && peer.inbox.is_empty(), "{:02x?}", peer.inbox);
    };
    let heard = peer.hear_segments(&mut ours, 3, true);
    let reads = [heard[0].read_request(), heard[2].read_request()];
    assert_eq!(heard[1].payload, b"free");
    assert_ne!(reads[0].sink_stag, reads[1].sink_stag);
    quiet(&mut ours, &mut peer);
    assert!(!ours.events.iter().any(|event| matches!(event, Event::Completed { .. })), "the Read comes first");
    peer.say(&response_fpdu(true, reads[0].sink_stag, reads[0].sink_offset, b"12345678", true));
    let third = peer.hear_segments(&mut ours, 1, true).remove(0).read_request();
    quiet(&mut ours, &mut peer);
    let done = ours.completion();
    assert_eq!((done.kind, &done.buf.unwrap().as_slice()[16..24]), (WorkKind::Read, &b"12345678"[..]));
    assert_eq!(ours.completion().kind, WorkKind::Send);
    // In two segments; the fence still waits for the last Read.
    peer.say(&response_fpdu(false, reads[1].sink_stag, reads[1].sink_offset, b"1234", true));
    peer.say(&response_fpdu(true, reads[1].sink_stag, reads[1].sink_offset + 4, b"5678", true));
    quiet(&mut ours, &mut peer);
    peer.say(&response_fpdu(true, third.sink_stag, third.sink_offset, b"12345678", true));
    assert_eq!(peer.hear_segments(&mut ours, 1, true)[0].payload, b"fenced");
    let kinds: Vec<_> = (0..3).map(|_| ours.completion().kind).collect();
    assert_eq!(kinds, [WorkKind::Read, WorkKind::Read, WorkKind::Send]);
}

/// A Write whose last segment is empty was never reported: only the last one was looked at.
#[test]
fn writes_of_many_segments_with_gaps_and_an_empty_end_are_placed_and_reported_once() {
    for role in Role::BOTH {
        let mut ours = Ours::new(Options::default());
        let listener = listen(&ours);
        let (mut peer, qp) = connected(&mut ours, &*listener, role, true);
        receive(&*qp, 1);
        ours.events.clear();
        let region = qp.register(SharedSpan::new(64).unwrap(), Access::WRITE).unwrap();
        let RemoteSpan { key: RemoteKey(stag), address, .. } = region.remote();
        // A gap, a step back, and a Send that begins and ends in between: each segment stands for itself.
        peer.say(&write_part(false, stag, address, b"one "));
        peer.say(&send_part(Operation::Send, false, 0, 1, 0, b"mes"));
        peer.say(&write_part(false, stag, address + 32, b"three"));
        peer.say(&write_part(false, stag, address + 8, b"two"));
        peer.say(&send_part(Operation::Send, true, 0, 1, 3, b"sage"));
        let received = ours.completion();
        assert_eq!(&received.buf.unwrap().as_slice()[..7], b"message");
        assert!(ours.events.is_empty(), "not the end of the Write: {:?}", ours.events);
        peer.say(&write_part(true, stag, address + 60, b""));
        ours.until("a Write", |events| {
            matches!(events[..], [Event::Written { key, .. }] if key.0 == stag).then_some(())
        });
        assert_eq!(octets_of(&region, 0, 12), b"one \0\0\0\0two\0");
        assert_eq!(octets_of(&region, 32, 8), b"three\0\0\0");
    }
}

/// Neither Responses nor requests of ours starve the other.
#[test]
fn read_responses_and_our_sends_take_turns() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let (mut peer, qp) = connected(&mut ours, &*listener, Role::Responder, true);
    (0..20).for_each(|_| ours.turn());
    let region = qp.register(SharedSpan::new(4096).unwrap(), Access::READ).unwrap();
    let RemoteSpan { key, address, .. } = region.remote();
    let ask = ReadRequest { sink_stag: 9, sink_offset: 0, len: 100, source_stag: key.0, source_offset: address };
    let requests: Vec<u8> = (1..=4).flat_map(|msn| read_fpdu(msn, &ask, true)).collect();
    qp.post(&mut (0..6).map(|_| send_work(b"ours")).collect()).unwrap();
    peer.say(&requests);
    let heard: Vec<_> = peer.hear_segments(&mut ours, 10, true).iter().map(Heard::operation).collect();
    let first = heard.iter().position(|operation| *operation == Operation::ReadResponse).unwrap();
    let rest = &heard[first..];
    // From there on one of each, as long as there is both.
    let responses = rest.iter().filter(|operation| **operation == Operation::ReadResponse).count();
    assert_eq!(responses, 4);
    let both = 2 * responses.min(rest.len() - responses);
    for pair in rest[..both].chunks(2) {
        assert_eq!(pair, [Operation::ReadResponse, Operation::Send]);
    }
}
