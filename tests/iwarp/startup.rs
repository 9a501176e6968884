//! Start-up frames, in both roles.

use std::time::{Duration, Instant};

use bulkhead::fabric::iwarp::Options;
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::mpa::{ConnectionWord, DEPTH_UNSTATED, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::startup::{Form, ReadyFrame};
use bulkhead::wire::iwarp::stream::{Kind, Receiver, Sender};

use crate::peer::*;

#[test]
fn a_peer_without_peer_to_peer_mode_is_sent_nothing_before_its_first_frame() {
    for crc in [false, true] {
        let mut ours = Ours::new(Options { crc, ..Options::default() });
        let listener = listen(&ours);
        let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &request(false, false));
        assert_eq!(reply.crc, crc, "on if either end wants it");
        let word = reply.word.expect("answered in kind");
        assert_eq!((word.peer_to_peer, word.rtr_write, word.ird, word.ord), (false, false, 4, 4));
        assert_eq!(qp.attributes().read_depth, 4);
        qp.post(&mut vec![send_work(b"waits")]).unwrap();
        for _ in 0..100 {
            ours.turn();
        }
        assert!(!ours.events.iter().any(|event| matches!(event, Event::Completed { .. })));
        let region = qp.register(SharedSpan::new(4096).unwrap(), Access::WRITE).unwrap();
        let to = region.remote();
        peer.say(&write_fpdu(to.key.0, to.address + 4088, b"the last", crc));
        assert_eq!(ours.completion().kind, WorkKind::Send);
        let mut receiver = Receiver::new(crc, 1);
        peer.hear(&mut ours, |inbox| Receiver::new(crc, 1).next(inbox).unwrap().is_some());
        let (segment, _) = receiver.next(&peer.inbox).unwrap().unwrap();
        assert_eq!(segment.payload, b"waits");
        let mut octets = [0; 8];
        region.span().copy_out(4088, &mut octets);
        assert_eq!(&octets, b"the last");
        assert!(ours.events.iter().any(|event| matches!(event, Event::Written { key, .. } if *key == to.key)));
        drop(peer);
        assert_eq!(ours.cause(), Cause::Peer);
    }
}

#[test]
fn revision_1_is_served_and_every_cut_of_the_stream_is_understood() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let old = Frame { revision: 1, word: None, ..request(true, false) };
    let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &old);
    assert_eq!((reply.revision, reply.word, reply.crc), (1, None, true));
    let buf = qp.allocate(4096, 1).unwrap().remove(0);
    qp.post_receive(buf).unwrap();
    for octet in send_fpdu(1, b"one octet at a time", true) {
        peer.say(&[octet]);
        ours.turn();
    }
    let received = ours.completion();
    assert_eq!(&received.buf.unwrap().as_slice()[..received.len], b"one octet at a time");
}

#[test]
fn start_up_frames_that_cannot_be_served_are_refused_or_closed_on() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let mut witness = Witness::new(&mut ours, &*listener);
    let encode = |frame: Frame| frame.encode(FrameKind::Request);
    let no_reads = ConnectionWord { ird: 0, ord: 1, ..ConnectionWord::default() };
    let (markers, useless) =
        (Frame { markers: true, ..request(true, false) }, Frame { word: Some(no_reads), ..request(true, false) });
    for octets in [encode(markers), encode(useless)] {
        let mut peer = Peer::dial(&listener.address());
        peer.say(&octets);
        let reply = peer.hear_frame(&mut ours, FrameKind::Reply);
        assert!(reply.rejected && !reply.markers && reply.word.is_some());
        assert!(peer.hear_to_the_end(&mut ours).is_empty());
        witness.assert_fine(&mut ours);
    }
    let glued = [encode(request(true, true)), write_fpdu(1, 0, b"", true)].concat();
    let long = [&b"MPA ID Req Frame\x00\x02\xff\xff"[..], &[0; 512]].concat();
    for octets in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"MPA ID Req Frame\x00\x03\x00\x00",
        b"MPA ID Req Frame\x00\x00\x00\x00",
        b"MPA ID Req Frame\x10\x02\x00\x02\x00\x01",
        &glued,
        &long,
        b"MPA ID Rep Frame",
    ] {
        let mut peer = Peer::dial(&listener.address());
        peer.say(octets);
        assert!(peer.hear_to_the_end(&mut ours).is_empty(), "closed without an answer");
        witness.assert_fine(&mut ours);
    }
    drop(witness);
    ours.settle();
}

/// As Linux's NFS client: Reads of ours are served, and it Reads nothing.
#[test]
fn a_peer_that_never_reads_is_read_from() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let mute = ConnectionWord { ird: 3, ord: 0, ..ConnectionWord::default() };
    let asked = Frame { word: Some(mute), ..request(true, false) };
    let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &asked);
    let word = reply.word.expect("answered in kind");
    assert_eq!((reply.rejected, word.ird, word.ord, qp.attributes().read_depth), (false, 0, 3, 3));
    let region = qp.register(SharedSpan::new(4096).unwrap(), Access::BOTH).unwrap();
    peer.say(&write_fpdu(region.remote().key.0, region.remote().address, b"first", true));
    let into = qp.allocate(4096, 1).unwrap().remove(0);
    let (key, address, flags) = (RemoteKey(7), 4096, Flags::SIGNALED);
    qp.post(&mut vec![Work::Read { into, range: 0..5, key, address, flags }]).unwrap();
    let asked = peer.hear_segments(&mut ours, 1, true).remove(0).read_request();
    assert_eq!((asked.source_stag, asked.source_offset, asked.len), (7, 4096, 5));
    peer.say(&response_fpdu(true, asked.sink_stag, asked.sink_offset, b"there", true));
    let completion = ours.completion();
    assert_eq!((completion.kind, completion.status), (WorkKind::Read, Status::Done));
    assert_eq!(&completion.buf.unwrap().as_slice()[..5], b"there");
    // It has said that it would not.
    let unasked = ReadRequest {
        sink_stag: 1,
        sink_offset: 0,
        len: 8,
        source_stag: region.remote().key.0,
        source_offset: region.remote().address,
    };
    peer.say(&read_fpdu(1, &unasked, true));
    assert!(matches!(ours.cause(), Cause::PeerFault(_)));
}

#[test]
fn a_peer_that_does_not_complete_its_request_is_closed_at_the_deadline() {
    let mut ours = Ours::new(Options { handshake_timeout: Duration::from_secs(3600), ..Options::default() });
    let listener = listen(&ours);
    let mut peers: Vec<_> = (0..20).map(|_| Peer::dial(&listener.address())).collect();
    for (n, peer) in peers.iter_mut().enumerate() {
        peer.say(&request(true, true).encode(FrameKind::Request)[..n]);
    }
    let start = Instant::now();
    while ours.lane.resources().half_open < 20 {
        ours.turn();
        assert!(start.elapsed() < PATIENCE);
    }
    let deadline = ours.lane.deadline().expect("half-open peers have a deadline");
    ours.lane.progress(deadline + Duration::from_secs(1), &mut ours.events, 32);
    assert_eq!(ours.lane.resources().half_open, 0);
    let late = |event: &Event| matches!(event, Event::HandshakeFailed { why: "handshake_timed_out", .. });
    assert!(ours.events.len() == 20 && ours.events.iter().all(late), "{:?}", ours.events);
    for peer in &mut peers {
        assert!(peer.hear_to_the_end(&mut ours).is_empty());
    }
}

#[test]
fn our_request_offers_peer_to_peer_mode_and_crcs_and_the_ready_frame_goes_first() {
    let mut ours = Ours::new(Options::default());
    let (mut peer, qp, request) = answered(&mut ours, |request| {
        // siw may glue a frame to its Reply.
        let mut octets = reply_to(request).encode(FrameKind::Reply);
        octets.extend(write_fpdu(5, 6, b"", true));
        octets
    });
    assert_eq!((request.revision, request.markers, request.crc), (2, false, true));
    let word = request.word.unwrap();
    assert_eq!((word.peer_to_peer, word.rtr_write, word.rtr_send, word.ird, word.ord), (true, true, false, 16, 16));
    assert_eq!(request.private_data, b"from us");
    let said = ours.until("established", |events| {
        events.iter().find_map(|event| match event {
            Event::Established { private_data, .. } => Some(private_data.clone()),
            _ => None,
        })
    });
    assert_eq!(said, b"yes");
    qp.post(&mut vec![send_work(b"second")]).unwrap();
    let first = write_fpdu(1, 0, b"", true);
    let both = [first, send_fpdu(1, b"second", true)].concat();
    peer.hear(&mut ours, |inbox| inbox.len() >= both.len());
    assert_eq!(peer.inbox, both);
}

#[test]
fn replies_that_do_not_fit_end_the_connection() {
    type Reply = fn(&Frame) -> Vec<u8>;
    let terminates: [(Reply, Reason); 3] = [
        (
            |request| {
                let mut reply = reply_to(request);
                reply.word.as_mut().unwrap().rtr_write = false;
                reply.encode(FrameKind::Reply)
            },
            Reason::NO_READY_FRAME,
        ),
        (
            |request| {
                let mut reply = reply_to(request);
                reply.word.as_mut().unwrap().ord = 129;
                reply.encode(FrameKind::Reply)
            },
            Reason::READ_DEPTH,
        ),
        (
            |request| {
                let mut reply = reply_to(request);
                reply.word.as_mut().unwrap().ird = 0;
                reply.encode(FrameKind::Reply)
            },
            Reason::READ_DEPTH,
        ),
    ];
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let mut witness = Witness::new(&mut ours, &*listener);
    for (reply, reason) in terminates {
        let (mut peer, _qp, _) = answered(&mut ours, reply);
        let said = peer.hear_to_the_end(&mut ours);
        // The peer gets the frame that peer-to-peer mode promised even so.
        let ready = if reason == Reason::NO_READY_FRAME { Vec::new() } else { write_fpdu(1, 0, b"", true) };
        let rest = said.strip_prefix(&ready[..]).expect("the ready-to-receive frame comes first");
        let (segment, _) = Receiver::new(true, 1).next(rest).unwrap().expect("a whole frame");
        let Kind::Terminate(head) = segment.kind else { panic!("{segment:?}") };
        assert_eq!(head.readings().0, reason);
        assert!(matches!(ours.cause(), Cause::PeerFault(_)));
        witness.assert_fine(&mut ours);
    }
    let closes: [Reply; 4] = [
        |request| Frame { markers: true, ..reply_to(request) }.encode(FrameKind::Reply),
        |request| Frame { revision: 1, word: None, ..reply_to(request) }.encode(FrameKind::Reply),
        |request| request.encode(FrameKind::Request),
        |_| b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
    ];
    for reply in closes {
        let (mut peer, _qp, _) = answered(&mut ours, reply);
        assert!(peer.hear_to_the_end(&mut ours).is_empty());
        assert!(matches!(ours.cause(), Cause::PeerFault(_)));
        witness.assert_fine(&mut ours);
    }
    ours.events.clear();
    let (_peer, _qp, _) =
        answered(&mut ours, |request| Frame { rejected: true, ..reply_to(request) }.encode(FrameKind::Reply));
    let said = ours.until("rejection", |events| {
        events.iter().find_map(|event| match event {
            Event::Rejected { private_data, .. } => Some(private_data.clone()),
            _ => None,
        })
    });
    assert_eq!(said, b"yes");
    witness.assert_fine(&mut ours);
}

/// A peer that has agreed to peer-to-peer mode gets its frame and a goodbye, whatever happens here meanwhile.
#[test]
fn whoever_leaves_after_the_reply_sends_the_ready_frame_first() {
    for in_time in [true, false] {
        let mut ours = Ours::new(Options::default());
        let (mut peer, qp, _) = answered(&mut ours, |request| reply_to(request).encode(FrameKind::Reply));
        // The Reply comes, and is not read yet.
        sleep(&*ours.lane, Some(Instant::now() + PATIENCE)).unwrap();
        if in_time {
            qp.disconnect();
        } else {
            ours.lane.progress(Instant::now() + Duration::from_secs(3600), &mut ours.events, 32);
        }
        let cause = ours.cause();
        assert_eq!(cause, if in_time { Cause::Local } else { Cause::TimedOut });
        assert_eq!(peer.hear_to_the_end(&mut ours), write_fpdu(1, 0, b"", true));
        assert!(!ours.events.iter().any(|event| matches!(event, Event::Established { .. })), "{:?}", ours.events);
        drop((peer, qp));
        ours.settle();
    }
}

/// What comes in one piece with the Reply is not heard less well than what comes later.
#[test]
fn a_terminate_glued_to_the_reply_is_heard() {
    let mut ours = Ours::new(Options::default());
    let (_peer, _qp, _) = answered(&mut ours, |request| {
        let mut octets = reply_to(request).encode(FrameKind::Reply);
        Sender::new(true, 1 << 10).put_terminate(&mut octets, &Terminate::bare(Reason::NO_BUFFER));
        octets
    });
    let cause = ours.cause();
    assert!(matches!(cause, Cause::RefusedByPeer(_)), "{cause:?}");
}

const FORMS: [Form; 5] = [
    Form::PeerToPeer(ReadyFrame::Write),
    Form::PeerToPeer(ReadyFrame::Read),
    Form::PeerToPeer(ReadyFrame::Send),
    Form::ClientServer,
    Form::Revision1,
];

/// Our dialler and our listener, in every form, with CRCs asked for by either, both or none: every operation both ways.
#[test]
fn every_form_of_request_carries_every_operation_both_ways() {
    for form in FORMS {
        for (dials, listens) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut far = Ours::new(Options { crc: listens, ..Options::default() });
            let mut near = Ours::new(Options { crc: dials, form, ..Options::default() });
            let listener = listen(&far);
            let near_qp = near.lane.dial(&listener.address(), Attributes::default()).unwrap();
            near_qp.establish(b"").unwrap();
            near.turn();
            let asked = far.request();
            let far_qp = far.lane.admit(asked, Attributes::default()).unwrap();
            far_qp.establish(b"").unwrap();
            let start = Instant::now();
            while !near.events.iter().any(|event| matches!(event, Event::Established { .. })) {
                far.turn();
                near.turn();
                assert!(start.elapsed() < PATIENCE);
            }
            let depth = if form == Form::Revision1 { 1 } else { 16 };
            assert_eq!((near_qp.attributes().read_depth, far_qp.attributes().read_depth), (depth, depth));
            // Without peer-to-peer mode the initiator begins, and what the responder posts waits for it.
            for from_near in [true, false] {
                let (poster, qp, target, peer) = match from_near {
                    true => (&mut near, &near_qp, &mut far, &far_qp),
                    false => (&mut far, &far_qp, &mut near, &near_qp),
                };
                let region = peer.register(SharedSpan::new(4096).unwrap(), Access::BOTH).unwrap();
                peer.post_receive(peer.allocate(4096, 1).unwrap().remove(0)).unwrap();
                let RemoteSpan { key, address, .. } = region.remote();
                let flags = Flags::SIGNALED;
                let reads = (0..3).map(|_| {
                    let into = qp.allocate(4096, 1).unwrap().remove(0);
                    Work::Read { into, range: 0..4096, key, address, flags }
                });
                let write = Work::Write { from: Source::Inline(b"written".to_vec()), key, address, flags };
                let mut work: Vec<Work> = std::iter::once(write).chain(reads).chain([send_work(b"sent")]).collect();
                qp.post(&mut work).unwrap();
                let mut done = Vec::new();
                let start = Instant::now();
                while done.len() < 5 {
                    poster.turn();
                    target.turn();
                    done.extend(poster.events.extract_if(.., |event| matches!(event, Event::Completed { .. })));
                    assert!(start.elapsed() < PATIENCE, "{form:?}: {done:?}");
                }
                let buf_of = |event: &Event| match event {
                    Event::Completed { completion, .. } => completion.buf.as_ref().unwrap().as_slice()[..7].to_vec(),
                    other => panic!("{other:?}"),
                };
                for read in &done[1..4] {
                    assert_eq!(buf_of(read), b"written");
                }
                let received = target.completion();
                assert_eq!(&received.buf.unwrap().as_slice()[..received.len], b"sent");
            }
            near_qp.disconnect();
            assert_eq!(near.cause(), Cause::Local);
            assert_eq!(far.cause(), Cause::Peer);
        }
    }
}

/// RFC 6581 §9.2: an empty Write, Read or Send lets the responder go, shows itself to nobody above, takes no Receive, and
/// the Read is answered.
#[test]
fn each_ready_to_receive_frame_lets_a_responder_send_and_is_seen_by_nobody() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let read = ReadRequest { sink_stag: 1, sink_offset: 0, len: 0, source_stag: 1, source_offset: 0 };
    let kinds = [
        ("C", write_fpdu(1, 0, b"", true), 0),
        ("D", read_fpdu(1, &read, true), 0),
        ("B", send_fpdu(1, b"", true), 1),
        // None is offered: a Write is what we could take.
        ("", write_fpdu(1, 0, b"", true), 0),
    ];
    for (flag, ready, sends) in kinds {
        let mut asked = request(true, true);
        let word = asked.word.as_mut().unwrap();
        (word.rtr_send, word.rtr_write, word.rtr_read) = (flag == "B", flag == "C", flag == "D");
        let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &asked);
        let word = reply.word.expect("answered in kind");
        assert!(word.peer_to_peer);
        assert_eq!((word.rtr_send, word.rtr_read), (flag == "B", flag == "D"));
        assert_eq!(word.rtr_write, flag == "C" || flag.is_empty());
        qp.post(&mut vec![send_work(b"waits")]).unwrap();
        qp.post_receive(qp.allocate(4096, 1).unwrap().remove(0)).unwrap();
        (0..50).for_each(|_| ours.turn());
        ours.events.retain(|event| !matches!(event, Event::Established { .. }));
        assert!(ours.events.is_empty(), "{:?}", ours.events);
        peer.say(&ready);
        let mut heard = peer.hear_segments(&mut ours, if flag == "D" { 2 } else { 1 }, true);
        assert_eq!(heard.pop().unwrap().payload, b"waits");
        if let Some(response) = heard.pop() {
            assert_eq!(response.operation(), Operation::ReadResponse);
            assert!(response.payload.is_empty() && response.tagged().last && response.tagged().stag == 1);
        }
        let sent = ours.completion();
        assert_eq!((sent.kind, sent.status), (WorkKind::Send, Status::Done));
        assert!(ours.events.is_empty(), "{:?}", ours.events);
        // The Receive is still there, for the first message.
        peer.say(&send_fpdu(1 + sends, b"first", true));
        assert_eq!(ours.completion().len, 5);
        // An empty Send later is one.
        qp.post_receive(qp.allocate(4096, 1).unwrap().remove(0)).unwrap();
        peer.say(&send_fpdu(2 + sends, b"", true));
        assert_eq!((ours.completion().kind, ours.events.len()), (WorkKind::Receive, 0));
        drop((peer, qp));
        ours.cause();
        ours.events.clear();
    }
}

/// The initiator sends what the responder would have, before all else, and knows a Read's Response for what it is.
#[test]
fn our_initiator_sends_the_ready_to_receive_frame_that_the_reply_asks_for() {
    for (kind, operation, sends) in
        [("C", Operation::Write, 0), ("D", Operation::ReadRequest, 0), ("B", Operation::Send, 1)]
    {
        let mut ours = Ours::new(Options::default());
        let (mut peer, qp, _) = answered(&mut ours, |request| {
            let mut reply = reply_to(request);
            let word = reply.word.as_mut().unwrap();
            (word.rtr_send, word.rtr_write, word.rtr_read) = (kind == "B", kind == "C", kind == "D");
            (word.ird, word.ord) = (1, 1);
            reply.encode(FrameKind::Reply)
        });
        let ready = peer.hear_segments(&mut ours, 1, true).remove(0);
        assert_eq!(ready.operation(), operation);
        let flags = Flags::SIGNALED;
        let into = qp.allocate(4096, 1).unwrap().remove(0);
        let read = Work::Read { into, range: 0..8, key: RemoteKey(77), address: 1 << 33, flags };
        qp.post(&mut vec![send_work(b"first"), read]).unwrap();
        let send = peer.hear_segments(&mut ours, 1, true).remove(0);
        assert_eq!((send.operation(), send.untagged().msn.0), (Operation::Send, 1 + sends));
        if operation == Operation::ReadRequest {
            // One Read at a time, and that one is out.
            let asked = ready.read_request();
            assert_eq!((asked.len, asked.source_stag, ready.untagged().msn.0), (0, 1, 1));
            (0..50).for_each(|_| ours.turn());
            assert!(!peer.hear(&mut ours, |_| true) && peer.inbox.is_empty());
            peer.say(&response_fpdu(true, asked.sink_stag, asked.sink_offset, b"", true));
        }
        let asked = peer.hear_segments(&mut ours, 1, true).remove(0);
        assert_eq!(asked.untagged().msn.0, if kind == "D" { 2 } else { 1 });
        assert_eq!((asked.read_request().len, asked.read_request().source_stag), (8, 77));
        assert_eq!(ours.completion().kind, WorkKind::Send);
    }
}

/// RFC 5044 §7.1.1: on in both directions if either frame asks for it, and then nothing without one is taken; off, the
/// field is not looked at.
#[test]
fn crcs_are_used_if_either_end_asks_for_them() {
    for role in Role::BOTH {
        for (wants, asks) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut ours = Ours::new(Options { crc: wants, ..Options::default() });
            let listener = listen(&ours);
            let crc = wants || asks;
            let (mut peer, qp) = match role {
                Role::Responder => {
                    let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &request(asks, true));
                    assert_eq!(reply.crc, crc);
                    peer.say(&write_fpdu(1, 0, b"", crc));
                    (peer, qp)
                }
                Role::Initiator => {
                    let (mut peer, qp, request) = answered(&mut ours, |request| {
                        Frame { crc: asks, ..reply_to(request) }.encode(FrameKind::Reply)
                    });
                    assert_eq!(request.crc, wants);
                    assert_eq!(peer.hear_segments(&mut ours, 1, crc)[0].operation(), Operation::Write);
                    (peer, qp)
                }
            };
            qp.post(&mut vec![send_work(b"five!")]).unwrap();
            peer.hear(&mut ours, |inbox| inbox.len() == 32);
            assert_eq!(peer.inbox, send_fpdu(1, b"five!", crc));
            if !crc {
                assert_eq!(peer.inbox[28..], [0; 4]);
            }
            qp.post_receive(qp.allocate(4096, 1).unwrap().remove(0)).unwrap();
            let mut strange = send_fpdu(1, b"five!", false);
            strange[28..].copy_from_slice(b"what");
            peer.say(&strange);
            if crc {
                let (segments, terminate) = {
                    peer.inbox.clear();
                    peer.hear_last_words(&mut ours, true)
                };
                assert_eq!((segments.len(), terminate.reason), (0, Reason::CRC));
            } else {
                assert_eq!(ours.completion().kind, WorkKind::Send);
                assert_eq!(ours.completion().len, 5);
            }
        }
    }
}

/// RFC 5044 §7.1.1, RFC 6581 §6: reserved bits and the "rejected" bit of a Request are nothing; in revision 1 the bit of the
/// connection word is reserved too, and all private data is the upper layer's; revision 2 without a word is legal.
#[test]
fn bits_that_mean_nothing_are_not_looked_at() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let data = [0x80, 1, 2, 3, 4, 5];
    for (flags, revision, private_data) in
        [(0x4f, 1, &data[..]), (0x5f, 1, &data), (0x6f, 1, &data), (0x4f, 2, &data), (0x7f, 2, &data[4..])]
    {
        let mut octets = b"MPA ID Req Frame".to_vec();
        octets.extend_from_slice(&[flags, revision, 0, 6, 0x80, 1, 2, 3, 4, 5]);
        let mut peer = Peer::dial(&listener.address());
        peer.say(&octets);
        let asked = ours.request();
        assert_eq!(asked.private_data(), private_data, "flags {flags:#x}");
        let qp = ours.lane.admit(asked, Attributes::default()).unwrap();
        qp.establish(b"").unwrap();
        let reply = peer.hear_frame(&mut ours, FrameKind::Reply);
        assert_eq!((reply.revision, reply.rejected), (revision, false));
        assert_eq!(reply.word.is_some(), flags & 0x10 != 0 && revision == 2);
    }
}

#[test]
fn a_peer_may_have_as_many_reads_outstanding_as_it_asked_for_up_to_128() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    for (ord, granted) in [(3, 3), (100, 100), (1000, 128), (DEPTH_UNSTATED, 128)] {
        let mut asked = request(true, true);
        asked.word.as_mut().unwrap().ord = ord;
        let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &asked);
        assert_eq!(reply.word.unwrap().ird, if ord == DEPTH_UNSTATED { ord } else { granted });
        peer.say(&write_fpdu(1, 0, b"", true));
        let region = qp.register(SharedSpan::new(1 << 20).unwrap(), Access::READ).unwrap();
        let RemoteSpan { key, address, .. } = region.remote();
        // Nothing is read here, so the first Responses fill the socket and the others wait.
        let ask = |len| ReadRequest { sink_stag: 9, sink_offset: 9, len, source_stag: key.0, source_offset: address };
        let requests: Vec<u8> =
            (1..=u32::from(granted) + 20).flat_map(|msn| read_fpdu(msn, &ask(1 << 20), true)).collect();
        peer.say(&requests);
        let (heard, terminate) = peer.hear_last_words(&mut ours, true);
        assert_eq!(terminate.reason, Reason::NO_BUFFER);
        let culprit = terminate.culprit.unwrap();
        let msn = u32::from_be_bytes(*culprit.header[10..].first_chunk().unwrap());
        let answered = heard.iter().filter(|segment| segment.tagged().last).count() as u32;
        assert!(msn > u32::from(granted) && msn <= u32::from(granted) + 1 + answered, "{msn} after {answered}");
        drop((peer, qp));
        ours.cause();
        ours.events.clear();
    }
}
