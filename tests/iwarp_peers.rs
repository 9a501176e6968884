//! The iWARP fabric against peers that are not ours: scripted ones that speak octets over TCP, strange ones and hostile
//! ones. Whatever they do costs their own connection and nothing else.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead::fabric::iwarp::{Iwarp, Options, Segments};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Msn, Tagged, Untagged};
use bulkhead::wire::iwarp::mpa::{self, ConnectionWord, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Reason, Terminate};
use bulkhead::wire::iwarp::stream::{Kind, Receiver, Sender};

const PATIENCE: Duration = Duration::from_secs(30);

/// A lane and what it said.
struct Ours {
    lane: Arc<dyn Lane>,
    events: Vec<Event>,
}

impl Ours {
    fn new(options: Options) -> Self {
        Self { lane: Iwarp::new(options).lane().unwrap(), events: Vec::new() }
    }

    fn turn(&mut self) {
        self.lane.progress(Instant::now(), &mut self.events, 32);
    }

    fn until<T>(&mut self, what: &str, mut find: impl FnMut(&mut Vec<Event>) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.turn();
            if let Some(found) = find(&mut self.events) {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "no {what}: {:?}", self.events);
        }
    }

    fn request(&mut self) -> ConnectRequest {
        self.until("request", |events| {
            let at = events.iter().position(|event| matches!(event, Event::ConnectRequest(_)))?;
            let Event::ConnectRequest(request) = events.remove(at) else { unreachable!() };
            Some(request)
        })
    }

    fn cause(&mut self) -> Cause {
        self.until("disconnection", |events| {
            let at = events.iter().position(|event| matches!(event, Event::Disconnected { .. }))?;
            let Event::Disconnected { cause, .. } = events.remove(at) else { unreachable!() };
            Some(cause)
        })
    }

    fn completion(&mut self) -> Completion {
        self.until("completion", |events| {
            let at = events.iter().position(|event| matches!(event, Event::Completed { .. }))?;
            let Event::Completed { completion, .. } = events.remove(at) else { unreachable!() };
            Some(completion)
        })
    }

    /// Nothing is left but listeners.
    fn settle(&mut self) {
        let start = Instant::now();
        loop {
            self.turn();
            self.events.clear();
            let left = self.lane.resources();
            if (Resources { listeners: 0, ..left }) == Resources::default() {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "left behind: {left:?}");
        }
    }
}

/// A peer that is a plain socket.
struct Peer {
    stream: TcpStream,
    inbox: Vec<u8>,
}

impl Peer {
    fn dial(address: &Address) -> Self {
        let Address::Socket(address) = address else { panic!("{address}") };
        Self::of(TcpStream::connect(address).unwrap())
    }

    fn of(stream: TcpStream) -> Self {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, inbox: Vec::new() }
    }

    fn say(&mut self, octets: &[u8]) {
        (&self.stream).write_all(octets).unwrap();
    }

    /// What we say, until `enough` or the end; `true` at the end.
    fn hear(&mut self, ours: &mut Ours, mut enough: impl FnMut(&[u8]) -> bool) -> bool {
        let start = Instant::now();
        loop {
            ours.turn();
            let mut octets = [0; 4096];
            match (&self.stream).read(&mut octets) {
                Ok(0) => return true,
                Ok(len) => self.inbox.extend_from_slice(&octets[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return true,
            }
            if enough(&self.inbox) {
                return false;
            }
            assert!(start.elapsed() < PATIENCE, "heard only {:02x?}", self.inbox);
        }
    }

    fn hear_frame(&mut self, ours: &mut Ours, kind: FrameKind) -> Frame {
        let ended = self.hear(ours, |inbox| Frame::decode(kind, inbox).unwrap().is_some());
        assert!(!ended, "the end in place of a start-up frame");
        let (frame, len) = Frame::decode(kind, &self.inbox).unwrap().unwrap();
        self.inbox.drain(..len);
        frame
    }

    fn hear_to_the_end(&mut self, ours: &mut Ours) -> Vec<u8> {
        assert!(self.hear(ours, |_| false));
        std::mem::take(&mut self.inbox)
    }
}

/// siw as an initiator: CRC off, no peer-to-peer mode; or with either.
fn request(crc: bool, peer_to_peer: bool) -> Frame {
    let word = ConnectionWord { peer_to_peer, rtr_write: peer_to_peer, ird: 4, ord: 4, ..ConnectionWord::default() };
    Frame { revision: 2, markers: false, crc, rejected: false, word: Some(word), private_data: b"hello".to_vec() }
}

fn listen(ours: &Ours) -> Box<dyn Listener> {
    ours.lane.listen(&Address::Socket(([127, 0, 0, 1], 0).into())).unwrap()
}

/// A scripted initiator, admitted; RTR frame sent where it was promised.
fn admitted(ours: &mut Ours, listener: &dyn Listener, frame: &Frame) -> (Peer, Box<dyn QueuePair>, Frame) {
    let mut peer = Peer::dial(&listener.address());
    peer.say(&frame.encode(FrameKind::Request));
    let asked = ours.request();
    assert_eq!(asked.private_data(), frame.private_data);
    let qp = ours.lane.admit(asked, Attributes::default()).unwrap();
    qp.establish(b"welcome").unwrap();
    let reply = peer.hear_frame(ours, FrameKind::Reply);
    assert_eq!((reply.rejected, reply.markers, &reply.private_data[..]), (false, false, &b"welcome"[..]));
    (peer, qp, reply)
}

fn fpdu(header: &[u8], payload: &[u8], crc: bool) -> Vec<u8> {
    let mut out = Vec::new();
    mpa::put_fpdu(&mut out, header, payload, crc);
    out
}

fn write_fpdu(stag: u32, offset: u64, payload: &[u8], crc: bool) -> Vec<u8> {
    let header = Tagged { last: true, control: Operation::Write.control(), stag, offset };
    fpdu(&header.encode(), payload, crc)
}

fn send_work(octets: &[u8]) -> Work {
    Work::Send { from: Source::Inline(octets.to_vec()), invalidate: None, flags: Flags::SIGNALED }
}

fn send_fpdu(msn: u32, payload: &[u8], crc: bool) -> Vec<u8> {
    let control = Operation::Send.control();
    let header = Untagged { last: true, control, own: 0, queue: 0, msn: Msn(msn), offset: 0 };
    fpdu(&header.encode(), payload, crc)
}

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
    }
    let glued = [encode(request(true, true)), write_fpdu(1, 0, b"", true)].concat();
    let long = [&b"MPA ID Req Frame\x00\x02\xff\xff"[..], &[0; 512]].concat();
    for octets in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], b"MPA ID Req Frame\x00\x03\x00\x00", &glued, &long, b"MPA ID Rep Frame"]
    {
        let mut peer = Peer::dial(&listener.address());
        peer.say(octets);
        assert!(peer.hear_to_the_end(&mut ours).is_empty(), "closed without an answer");
    }
    ours.settle();
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
fn protocol_errors_are_answered_with_a_terminate_and_end_that_connection_alone() {
    let mut ours = Ours::new(Options::default());
    let listener = listen(&ours);
    let (mut witness, witness_qp, _) = admitted(&mut ours, &*listener, &request(true, true));
    witness.say(&write_fpdu(1, 0, b"", true));
    let read_request = |stag: u32, len: u32, msn: u32| {
        let request = ReadRequest { sink_stag: 9, sink_offset: 9, len, source_stag: stag, source_offset: 1 << 33 };
        let control = Operation::ReadRequest.control();
        let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(msn), offset: 0 };
        fpdu(&header.encode(), &request.encode(), true)
    };
    let send = |msn, last, offset, control| {
        let header = Untagged { last, control, own: 77, queue: 0, msn: Msn(msn), offset };
        fpdu(&header.encode(), b"abcd", true)
    };
    let mut bad_crc = write_fpdu(1, 0, b"abcd", true);
    bad_crc[17] ^= 1;
    let responded = Tagged { last: true, control: Operation::ReadResponse.control(), stag: 1, offset: 0 }.encode();
    let cases = [
        (bad_crc, Reason::CRC),
        (vec![0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Reason::LENGTH),
        (write_fpdu(77, 1 << 33, b"abcd", true), Reason::TAGGED_STAG),
        (fpdu(&responded, b"", true), Reason::TAGGED_STAG),
        (read_request(77, 8, 1), Reason::READ_STAG),
        (read_request(77, 0, 2), Reason::MSN),
        (send(1, true, 0, Operation::Send.control()), Reason::NO_BUFFER),
        (send(1, true, 4, Operation::Send.control()), Reason::MESSAGE_OFFSET),
        (send(1, true, 0, 0x48), Reason::OPERATION),
        (send(1, true, 0, 0x83), Reason::RDMAP_VERSION),
    ];
    for (octets, reason) in cases {
        let (mut peer, qp, reply) = admitted(&mut ours, &*listener, &request(true, true));
        let word = reply.word.expect("answered in kind");
        assert!(word.peer_to_peer && word.rtr_write && !word.rtr_read && !word.rtr_send);
        peer.say(&[write_fpdu(1, 0, b"", true), octets].concat());
        let said = peer.hear_to_the_end(&mut ours);
        let mut receiver = Receiver::new(true, 1);
        let (segment, len) = receiver.next(&said).unwrap().expect("a whole frame");
        let Kind::Terminate(head) = segment.kind else { panic!("{segment:?}") };
        assert_eq!((head.readings().0, len), (reason, said.len()));
        let terminate = Terminate::decode(segment.payload).unwrap();
        assert_eq!(terminate.culprit.is_some(), reason.layer < 2);
        drop(peer);
        assert!(matches!(ours.cause(), Cause::PeerFault(_)));
        drop(qp);
    }
    let buf = witness_qp.allocate(1, 1).unwrap().remove(0);
    witness_qp.post_receive(buf).unwrap();
    witness.say(&send_fpdu(1, b"fine", true));
    assert_eq!(ours.completion().status, Status::Done);
    drop((witness, witness_qp));
    ours.settle();
}

/// A scripted responder and our initiator.
fn answered(ours: &mut Ours, reply: impl FnOnce(&Frame) -> Vec<u8>) -> (Peer, Box<dyn QueuePair>, Frame) {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = Address::Socket(listener.local_addr().unwrap());
    let qp = ours.lane.dial(&address, Attributes::default()).unwrap();
    qp.establish(b"from us").unwrap();
    ours.turn();
    let mut peer = Peer::of(listener.accept().unwrap().0);
    let request = peer.hear_frame(ours, FrameKind::Request);
    peer.say(&reply(&request));
    (peer, qp, request)
}

fn reply_to(request: &Frame, rtr_write: bool) -> Frame {
    let asked = request.word.expect("we always send one");
    let word = ConnectionWord { peer_to_peer: true, rtr_write, rtr_read: !rtr_write, ..asked };
    Frame { word: Some(word), private_data: b"yes".to_vec(), ..request.clone() }
}

#[test]
fn our_request_offers_peer_to_peer_mode_and_crcs_and_the_ready_frame_goes_first() {
    let mut ours = Ours::new(Options::default());
    let (mut peer, qp, request) = answered(&mut ours, |request| {
        // siw may glue a frame to its Reply.
        let mut octets = reply_to(request, true).encode(FrameKind::Reply);
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
        (|request| reply_to(request, false).encode(FrameKind::Reply), Reason::NO_READY_FRAME),
        (
            |request| {
                let mut reply = reply_to(request, true);
                reply.word.as_mut().unwrap().ord = 17;
                reply.encode(FrameKind::Reply)
            },
            Reason::READ_DEPTH,
        ),
        (
            |request| {
                let mut reply = reply_to(request, true);
                reply.word.as_mut().unwrap().ird = 0;
                reply.encode(FrameKind::Reply)
            },
            Reason::READ_DEPTH,
        ),
    ];
    for (reply, reason) in terminates {
        let mut ours = Ours::new(Options::default());
        let (mut peer, _qp, _) = answered(&mut ours, reply);
        let said = peer.hear_to_the_end(&mut ours);
        // The peer gets the frame that peer-to-peer mode promised even so.
        let ready = if reason == Reason::NO_READY_FRAME { Vec::new() } else { write_fpdu(1, 0, b"", true) };
        let rest = said.strip_prefix(&ready[..]).expect("the ready-to-receive frame comes first");
        let (segment, _) = Receiver::new(true, 1).next(rest).unwrap().expect("a whole frame");
        let Kind::Terminate(head) = segment.kind else { panic!("{segment:?}") };
        assert_eq!(head.readings().0, reason);
        assert!(matches!(ours.cause(), Cause::PeerFault(_)));
    }
    let closes: [Reply; 4] = [
        |request| Frame { markers: true, ..reply_to(request, true) }.encode(FrameKind::Reply),
        |request| Frame { revision: 1, word: None, ..reply_to(request, true) }.encode(FrameKind::Reply),
        |request| request.encode(FrameKind::Request),
        |_| b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
    ];
    for reply in closes {
        let mut ours = Ours::new(Options::default());
        let (mut peer, _qp, _) = answered(&mut ours, reply);
        assert!(peer.hear_to_the_end(&mut ours).is_empty());
        assert!(matches!(ours.cause(), Cause::PeerFault(_)));
    }
    let mut ours = Ours::new(Options::default());
    let (_peer, _qp, _) =
        answered(&mut ours, |request| Frame { rejected: true, ..reply_to(request, true) }.encode(FrameKind::Reply));
    let said = ours.until("rejection", |events| {
        events.iter().find_map(|event| match event {
            Event::Rejected { private_data, .. } => Some(private_data.clone()),
            _ => None,
        })
    });
    assert_eq!(said, b"yes");
}

/// A peer that has agreed to peer-to-peer mode gets its frame and a goodbye, whatever happens here meanwhile.
#[test]
fn whoever_leaves_after_the_reply_sends_the_ready_frame_first() {
    for in_time in [true, false] {
        let mut ours = Ours::new(Options::default());
        let (mut peer, qp, _) = answered(&mut ours, |request| reply_to(request, true).encode(FrameKind::Reply));
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
        let mut octets = reply_to(request, true).encode(FrameKind::Reply);
        Sender::new(true, 1 << 10).put_terminate(&mut octets, &Terminate::bare(Reason::NO_BUFFER));
        octets
    });
    let cause = ours.cause();
    assert!(matches!(cause, Cause::RefusedByPeer(_)), "{cause:?}");
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
        peer.stream.shutdown(std::net::Shutdown::Write).unwrap();
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

/// Mutated traffic, a thousand connections on one lane: no panic, nothing left behind, a good one beside undisturbed.
#[test]
fn mutated_traffic_costs_its_own_connection() {
    let options = Options { crc: false, segments: Segments::UpTo(1442), ..Options::default() };
    let mut ours = Ours::new(options);
    let listener = listen(&ours);
    let (mut witness, witness_qp, _) = admitted(&mut ours, &*listener, &request(true, true));
    witness.say(&write_fpdu(1, 0, b"", true));
    let before = ours.lane.resources();
    let mut dice = 0x5eed_u64;
    let mut roll = |below: usize| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) as usize % below
    };
    for round in 0..1000u32 {
        let crc = round % 2 == 0;
        let frame = request(crc, true);
        let (mut peer, qp, _) = admitted(&mut ours, &*listener, &frame);
        let region = qp.register(SharedSpan::new(4096).unwrap(), Access::BOTH.invalidatable()).unwrap();
        for buf in qp.allocate(4096, 4).unwrap() {
            qp.post_receive(buf).unwrap();
        }
        let to = region.remote();
        let read =
            ReadRequest { sink_stag: 9, sink_offset: 9, len: 4096, source_stag: to.key.0, source_offset: to.address };
        let control = Operation::ReadRequest.control();
        let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(1), offset: 0 }.encode();
        let mut traffic = [
            write_fpdu(1, 0, b"", crc),
            write_fpdu(to.key.0, to.address, &[round as u8; 1000], crc),
            send_fpdu(1, b"message", crc),
            fpdu(&header, &read.encode(), crc),
            send_fpdu(2, &[7; 3000], crc),
        ]
        .concat();
        for _ in 0..1 + roll(3) {
            match roll(4) {
                0 => {
                    let at = roll(traffic.len());
                    traffic[at] ^= 1 << roll(8);
                }
                1 => traffic.truncate(roll(traffic.len()).max(1)),
                2 => {
                    let at = roll(traffic.len());
                    traffic.insert(at, roll(256) as u8);
                }
                _ => {
                    let at = roll(traffic.len());
                    traffic.remove(at);
                }
            }
            if traffic.is_empty() {
                traffic.push(0);
            }
        }
        for piece in traffic.chunks(1 + roll(2000)) {
            if (&peer.stream).write_all(piece).is_err() {
                break;
            }
            ours.turn();
        }
        let _ = peer.stream.shutdown(std::net::Shutdown::Write);
        peer.hear_to_the_end(&mut ours);
        drop(peer);
        ours.cause();
        drop((qp, region));
        let start = Instant::now();
        while ours.lane.resources() != before {
            ours.turn();
            assert!(start.elapsed() < PATIENCE, "left behind: {:?}", ours.lane.resources());
        }
        ours.events.clear();
    }
    let buf = witness_qp.allocate(1, 1).unwrap().remove(0);
    witness_qp.post_receive(buf).unwrap();
    witness.say(&send_fpdu(1, b"fine", true));
    assert_eq!(ours.completion().status, Status::Done);
}
