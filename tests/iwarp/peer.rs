//! Our lane, and peers of it that are plain sockets.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead::fabric::iwarp::{Iwarp, Options};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Header, Msn, Tagged, Untagged};
use bulkhead::wire::iwarp::mpa::{self, ConnectionWord, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Terminate};

pub const PATIENCE: Duration = Duration::from_secs(30);

/// A lane and what it said.
pub struct Ours {
    pub lane: Arc<dyn Lane>,
    pub events: Vec<Event>,
}

impl Ours {
    pub fn new(options: Options) -> Self {
        Self { lane: Iwarp::new(options).lane().unwrap(), events: Vec::new() }
    }

    pub fn turn(&mut self) {
        self.lane.progress(Instant::now(), &mut self.events, 32);
    }

    pub fn until<T>(&mut self, what: &str, mut find: impl FnMut(&mut Vec<Event>) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.turn();
            if let Some(found) = find(&mut self.events) {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "no {what}: {:?}", self.events);
        }
    }

    pub fn request(&mut self) -> ConnectRequest {
        self.until("request", |events| {
            let at = events.iter().position(|event| matches!(event, Event::ConnectRequest(_)))?;
            let Event::ConnectRequest(request) = events.remove(at) else { unreachable!() };
            Some(request)
        })
    }

    pub fn cause(&mut self) -> Cause {
        self.until("disconnection", |events| {
            let at = events.iter().position(|event| matches!(event, Event::Disconnected { .. }))?;
            let Event::Disconnected { cause, .. } = events.remove(at) else { unreachable!() };
            Some(cause)
        })
    }

    pub fn completion(&mut self) -> Completion {
        self.until("completion", |events| {
            let at = events.iter().position(|event| matches!(event, Event::Completed { .. }))?;
            let Event::Completed { completion, .. } = events.remove(at) else { unreachable!() };
            Some(completion)
        })
    }

    /// Nothing is left but listeners.
    pub fn settle(&mut self) {
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
pub struct Peer {
    pub stream: TcpStream,
    pub inbox: Vec<u8>,
}

impl Peer {
    pub fn dial(address: &Address) -> Self {
        let Address::Socket(address) = address else { panic!("{address}") };
        Self::of(TcpStream::connect(address).unwrap())
    }

    pub fn of(stream: TcpStream) -> Self {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, inbox: Vec::new() }
    }

    pub fn say(&mut self, octets: &[u8]) {
        (&self.stream).write_all(octets).unwrap();
    }

    /// What we say, until `enough` or the end; `true` at the end.
    pub fn hear(&mut self, ours: &mut Ours, mut enough: impl FnMut(&[u8]) -> bool) -> bool {
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

    pub fn hear_frame(&mut self, ours: &mut Ours, kind: FrameKind) -> Frame {
        let ended = self.hear(ours, |inbox| Frame::decode(kind, inbox).unwrap().is_some());
        assert!(!ended, "the end in place of a start-up frame");
        let (frame, len) = Frame::decode(kind, &self.inbox).unwrap().unwrap();
        self.inbox.drain(..len);
        frame
    }

    /// The next `count` segments we send.
    pub fn hear_segments(&mut self, ours: &mut Ours, count: usize, crc: bool) -> Vec<Heard> {
        let mut heard = Vec::new();
        while heard.len() < count {
            let ended = self.hear(ours, |inbox| mpa::split_fpdu(inbox, crc).unwrap().is_some());
            assert!(!ended, "the end after {} of {count} segments", heard.len());
            let (segment, len) = Heard::split(&self.inbox, crc).unwrap();
            self.inbox.drain(..len);
            heard.push(segment);
        }
        heard
    }

    /// All that we send to the end: whole segments, of which the last one is a Terminate.
    pub fn hear_last_words(&mut self, ours: &mut Ours, crc: bool) -> (Vec<Heard>, Terminate) {
        let octets = self.hear_to_the_end(ours);
        let mut segments = segments(&octets, crc);
        let last = segments.pop().expect("a Terminate");
        let control = Operation::Terminate.control();
        let header = Untagged { last: true, control, own: 0, queue: 2, msn: Msn(1), offset: 0 };
        assert_eq!(last.header, Header::Untagged(header));
        (segments, Terminate::decode(&last.payload).unwrap())
    }

    pub fn hear_to_the_end(&mut self, ours: &mut Ours) -> Vec<u8> {
        assert!(self.hear(ours, |_| false));
        std::mem::take(&mut self.inbox)
    }
}

/// A segment that we sent.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Heard {
    pub header: Header,
    pub payload: Vec<u8>,
}

impl Heard {
    fn split(octets: &[u8], crc: bool) -> Option<(Self, usize)> {
        let (ulpdu, len) = mpa::split_fpdu(octets, crc).unwrap()?;
        let (header, payload) = Header::decode(ulpdu).unwrap();
        Some((Self { header, payload: payload.to_vec() }, len))
    }

    pub fn operation(&self) -> Operation {
        let (Header::Tagged(Tagged { control, .. }) | Header::Untagged(Untagged { control, .. })) = self.header;
        Operation::decode(control).unwrap()
    }

    pub fn tagged(&self) -> Tagged {
        let Header::Tagged(header) = self.header else { panic!("{self:?}") };
        header
    }

    pub fn untagged(&self) -> Untagged {
        let Header::Untagged(header) = self.header else { panic!("{self:?}") };
        header
    }

    pub fn read_request(&self) -> ReadRequest {
        assert_eq!(self.operation(), Operation::ReadRequest);
        ReadRequest::decode(self.payload[..].try_into().unwrap())
    }
}

/// Octets that are whole FPDUs.
pub fn segments(octets: &[u8], crc: bool) -> Vec<Heard> {
    let (mut start, mut segments) = (0, Vec::new());
    while start < octets.len() {
        let (segment, len) = Heard::split(&octets[start..], crc).expect("the stream ends between two frames");
        start += len;
        segments.push(segment);
    }
    segments
}

/// Ours in a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    Responder,
    Initiator,
}

impl Role {
    pub const BOTH: [Self; 2] = [Self::Responder, Self::Initiator];
}

/// A connection in full operation: the ready-to-receive frame was said or heard.
pub fn connected(ours: &mut Ours, listener: &dyn Listener, role: Role, crc: bool) -> (Peer, Box<dyn QueuePair>) {
    match role {
        Role::Responder => {
            let (mut peer, qp, reply) = admitted(ours, listener, &request(crc, true));
            assert_eq!(reply.crc, crc);
            peer.say(&write_fpdu(1, 0, b"", crc));
            (peer, qp)
        }
        Role::Initiator => {
            let (mut peer, qp, _) =
                answered(ours, |request| Frame { crc, ..reply_to(request) }.encode(FrameKind::Reply));
            assert_eq!(peer.hear_segments(ours, 1, crc)[0].operation(), Operation::Write);
            (peer, qp)
        }
    }
}

/// siw as an initiator: CRC off, no peer-to-peer mode; or with either.
pub fn request(crc: bool, peer_to_peer: bool) -> Frame {
    let word = ConnectionWord { peer_to_peer, rtr_write: peer_to_peer, ird: 4, ord: 4, ..ConnectionWord::default() };
    Frame { revision: 2, markers: false, crc, rejected: false, word: Some(word), private_data: b"hello".to_vec() }
}

pub fn listen(ours: &Ours) -> Box<dyn Listener> {
    ours.lane.listen(&Address::Socket(([127, 0, 0, 1], 0).into())).unwrap()
}

/// A scripted initiator, admitted; RTR frame sent where it was promised.
pub fn admitted(ours: &mut Ours, listener: &dyn Listener, frame: &Frame) -> (Peer, Box<dyn QueuePair>, Frame) {
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

pub fn fpdu(header: &[u8], payload: &[u8], crc: bool) -> Vec<u8> {
    let mut out = Vec::new();
    mpa::put_fpdu(&mut out, header, payload, crc);
    out
}

pub fn write_fpdu(stag: u32, offset: u64, payload: &[u8], crc: bool) -> Vec<u8> {
    let header = Tagged { last: true, control: Operation::Write.control(), stag, offset };
    fpdu(&header.encode(), payload, crc)
}

pub fn send_work(octets: &[u8]) -> Work {
    Work::Send { from: Source::Inline(octets.to_vec()), invalidate: None, flags: Flags::SIGNALED }
}

pub fn send_fpdu(msn: u32, payload: &[u8], crc: bool) -> Vec<u8> {
    let control = Operation::Send.control();
    let header = Untagged { last: true, control, own: 0, queue: 0, msn: Msn(msn), offset: 0 };
    fpdu(&header.encode(), payload, crc)
}

/// A scripted responder and our initiator.
pub fn answered(ours: &mut Ours, reply: impl FnOnce(&Frame) -> Vec<u8>) -> (Peer, Box<dyn QueuePair>, Frame) {
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

/// A Reply that agrees to all.
pub fn reply_to(request: &Frame) -> Frame {
    Frame { private_data: b"yes".to_vec(), ..request.clone() }
}

pub fn untagged(operation: Operation, last: bool, own: u32, msn: u32, offset: u32) -> Untagged {
    Untagged { last, control: operation.control(), own, queue: operation.queue(), msn: Msn(msn), offset }
}

pub fn read_fpdu(msn: u32, request: &ReadRequest, crc: bool) -> Vec<u8> {
    fpdu(&untagged(Operation::ReadRequest, true, 0, msn, 0).encode(), &request.encode(), crc)
}

pub fn response_fpdu(last: bool, stag: u32, offset: u64, payload: &[u8], crc: bool) -> Vec<u8> {
    fpdu(&Tagged { last, control: Operation::ReadResponse.control(), stag, offset }.encode(), payload, crc)
}
