//! A whole end of our iWARP fabric, in either role, against a peer on a socket that says anything. Nothing the peer does
//! reaches memory it has no right to, loses a posted buffer, or leaves anything behind.
//!
//! Input: `[choices: 1 octet | steps…]`. Choices: 0x01 ours is the initiator; 0x02 CRCs are on; 0x04 the peer's start-up frame
//! comes from the input; else a good one, with 0x18 as the ready-to-receive frame: none, Write, Read, Send; 0x20 that frame
//! is left out; 0x40 short frames. A step is `[kind: 1 octet | length: 1 octet | octets…]`:
//!
//! | kind, modulo 8 | what the peer does |
//! |---|---|
//! | 0 | says the octets |
//! | 1 | says them as an FPDU |
//! | 2 | the same; the STag is of the memory that may be written, the offset counts from its start |
//! | 3 | asks for a Read: length and offset from the octets, of the memory that may be read |
//! | 4 | says the octets as a Send whose MSN is right |
//! | 5 | answers the oldest Read of ours with the octets |
//! | 6 | nothing: ours posts a Send, a Write, a Read; takes its memory away; or leaves |
//! | 7 | nothing: ours has a turn |
#![no_main]

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead::fabric::iwarp::{Iwarp, Options, Segments};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Msn, Tagged, Untagged};
use bulkhead::wire::iwarp::mpa::{self, ConnectionWord, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest};
use bulkhead::wire::iwarp::startup::{Form, ReadyFrame};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

const REGION_BYTES: usize = 4096;
const MARK: u8 = 0xa5;

thread_local! {
    /// One lane for each of the settings a lane has.
    static LANES: RefCell<Vec<Option<OpenLane>>> = RefCell::new((0..16).map(|_| None).collect());
}

struct OpenLane {
    lane: Arc<dyn Lane>,
    listener: Box<dyn Listener>,
    /// Where ours dials.
    peers: TcpListener,
}

impl OpenLane {
    fn new(crc: bool, short: bool, form: Form) -> Self {
        let segments = if short { Segments::UpTo(128) } else { Segments::Large };
        let lane = Iwarp::new(Options { crc, segments, form, ..Options::default() }).lane().unwrap();
        let any = ([127, 0, 0, 1], 0).into();
        let listener = lane.listen(&Address::Socket(any)).unwrap();
        Self { lane, listener, peers: TcpListener::bind(any).unwrap() }
    }
}

/// What came of one queue pair.
#[derive(Default)]
struct Tally {
    posted: usize,
    receives: usize,
    sends_done: usize,
    receives_done: usize,
    ends: usize,
}

impl Tally {
    fn count(&mut self, events: &mut Vec<Event>) {
        for event in events.drain(..) {
            match event {
                Event::Completed { completion, .. } => {
                    assert_eq!(self.ends, 0, "nothing comes after the end");
                    assert!(completion.len <= completion.buf.as_ref().map_or(REGION_BYTES, LocalBuf::len));
                    match completion.kind {
                        WorkKind::Receive => self.receives_done += 1,
                        _ => self.sends_done += 1,
                    }
                }
                Event::Disconnected { .. } | Event::Rejected { .. } => self.ends += 1,
                Event::Established { .. } | Event::Written { .. } | Event::HandshakeFailed { .. } => {
                    assert_eq!(self.ends, 0, "nothing comes after the end");
                }
                Event::ConnectRequest(_) => {}
            }
        }
    }
}

fn filled(region: &MemoryRegion) {
    region.span().copy_in(0, &[MARK; REGION_BYTES]);
}

fn octets_of(span: &SharedSpan) -> [u8; REGION_BYTES] {
    let mut octets = [0; REGION_BYTES];
    span.copy_out(0, &mut octets);
    octets
}

fn fpdu(header: &[u8], payload: &[u8], crc: bool) -> Vec<u8> {
    let mut out = Vec::new();
    mpa::put_fpdu(&mut out, header, payload, crc);
    out
}

/// The peer's side: a socket, and what it must know to be right where it wants to be.
struct Peer {
    stream: TcpStream,
    heard: Vec<u8>,
    crc: bool,
    next_send: u32,
    next_read: u32,
}

impl Peer {
    fn say(&mut self, octets: &[u8]) {
        // A full socket or an end that has left is no finding.
        let _ = self.stream.write(octets);
    }

    /// `true` at the end of what ours says.
    fn hear(&mut self) -> bool {
        let mut octets = [0; 16 << 10];
        loop {
            match self.stream.read(&mut octets) {
                Ok(0) => return true,
                Ok(len) => self.heard.extend_from_slice(&octets[..len]),
                Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
            }
        }
    }

    /// The oldest Read Request that ours has sent, taken out of what was heard.
    fn asked(&mut self) -> Option<ReadRequest> {
        self.hear();
        while let Ok(Some((ulpdu, len))) = mpa::split_fpdu(&self.heard, self.crc) {
            let request =
                (ulpdu[0] & 0x80 == 0 && ulpdu[1] & 0xf == 1).then(|| ulpdu.get(18..)?.first_chunk()).flatten();
            let request = request.map(ReadRequest::decode);
            self.heard.drain(..len);
            if request.is_some() {
                return request;
            }
        }
        None
    }
}

fn run(choices: u8, mut steps: &[u8], open: &OpenLane) {
    let (initiates, crc, own_frame) = (choices & 1 != 0, choices & 2 != 0, choices & 4 != 0);
    let ready =
        [None, Some(ReadyFrame::Write), Some(ReadyFrame::Read), Some(ReadyFrame::Send)][usize::from(choices >> 3 & 3)];
    let lane = &open.lane;
    let (mut events, mut tally) = (Vec::new(), Tally::default());
    let word = ConnectionWord {
        peer_to_peer: ready.is_some(),
        rtr_send: ready == Some(ReadyFrame::Send),
        rtr_write: ready == Some(ReadyFrame::Write),
        rtr_read: ready == Some(ReadyFrame::Read),
        ird: 4,
        ord: 4,
    };
    let good = Frame { revision: 2, markers: false, crc, rejected: false, word: Some(word), private_data: vec![1; 56] };
    let mut start_up = |kind: FrameKind| {
        if !own_frame {
            return good.encode(kind);
        }
        let len = steps.first().map_or(0, |len| usize::from(*len));
        let (octets, rest) = steps.get(1..).unwrap_or_default().split_at_checked(len).unwrap_or((steps, &[]));
        steps = rest;
        // The key is given, so that the fuzzer does not have to find it.
        let key: &[u8] = if kind == FrameKind::Request { b"MPA ID Req Frame" } else { b"MPA ID Rep Frame" };
        [key, octets].concat()
    };

    let attributes = Attributes { send_depth: 8, receive_depth: 8, ..Attributes::default() };
    let (stream, qp) = if initiates {
        let address = Address::Socket(open.peers.local_addr().unwrap());
        let qp = lane.dial(&address, attributes).unwrap();
        (None, Some(qp))
    } else {
        let Address::Socket(address) = open.listener.address() else { unreachable!() };
        (Some(TcpStream::connect(address).unwrap()), None)
    };
    let mut qp = qp;
    let mut memory = None;
    let prepare = |qp: &dyn QueuePair, tally: &mut Tally| {
        for buf in qp.allocate(4096, 2).unwrap() {
            qp.post_receive(buf).unwrap();
            tally.receives += 1;
        }
        let region = |access: Access| qp.register(SharedSpan::new(REGION_BYTES).unwrap(), access).unwrap();
        let (write, read) = (region(Access::WRITE.invalidatable()), region(Access::READ));
        filled(&write);
        filled(&read);
        (write, read)
    };
    let stream = match stream {
        Some(stream) => stream,
        None => {
            let qp = qp.as_ref().expect("dialled");
            memory = Some(prepare(&**qp, &mut tally));
            qp.establish(&[2; 56]).unwrap();
            open.peers.accept().unwrap().0
        }
    };
    stream.set_nonblocking(true).unwrap();
    stream.set_nodelay(true).unwrap();
    // No port of this machine waits after the end.
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    let mut peer = Peer { stream, heard: Vec::new(), crc, next_send: 1, next_read: 1 };
    let now = Instant::now();
    let frame = start_up(if initiates { FrameKind::Reply } else { FrameKind::Request });
    peer.say(&frame);
    for _ in 0..3 {
        lane.progress(now, &mut events, 32);
        if let Some(at) = events.iter().position(|event| matches!(event, Event::ConnectRequest(_))) {
            let Event::ConnectRequest(request) = events.remove(at) else { unreachable!() };
            let admitted = lane.admit(request, attributes).unwrap();
            memory = Some(prepare(&*admitted, &mut tally));
            admitted.establish(&[2; 56]).unwrap();
            qp = Some(admitted);
        }
    }
    if choices & 0x20 == 0 && !initiates {
        match ready {
            None => {}
            Some(ReadyFrame::Write) => {
                let header = Tagged { last: true, control: Operation::Write.control(), stag: 1, offset: 0 };
                peer.say(&fpdu(&header.encode(), &[], crc));
            }
            Some(ReadyFrame::Read) => {
                let control = Operation::ReadRequest.control();
                let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(1), offset: 0 };
                peer.say(&fpdu(&header.encode(), &[0; 28], crc));
                peer.next_read = 2;
            }
            Some(ReadyFrame::Send) => {
                let control = Operation::Send.control();
                let header = Untagged { last: true, control, own: 0, queue: 0, msn: Msn(1), offset: 0 };
                peer.say(&fpdu(&header.encode(), &[], crc));
                peer.next_send = 2;
            }
        }
    }

    // What may not be written stays, and so does what may be from the moment on that it is taken away.
    let mut taken: Option<[u8; REGION_BYTES]> = None;
    while let [kind, len, rest @ ..] = steps {
        let (octets, after) = rest.split_at(rest.len().min(usize::from(*len)));
        steps = after;
        match kind % 8 {
            0 => peer.say(octets),
            1 => peer.say(&fpdu(octets, &[], crc)),
            2 => {
                let mut ulpdu = octets.to_vec();
                if let (Some((write, _)), true) = (&memory, ulpdu.len() >= 14) {
                    ulpdu[2..6].copy_from_slice(&write.key().0.to_be_bytes());
                    let offset = u64::from_be_bytes(*ulpdu[6..].first_chunk().unwrap());
                    let offset = write.remote().address.wrapping_add(offset);
                    ulpdu[6..14].copy_from_slice(&offset.to_be_bytes());
                }
                peer.say(&fpdu(&ulpdu, &[], crc));
            }
            3 => {
                let Some((_, read)) = &memory else { continue };
                let number =
                    |at: usize| octets.get(at..at + 2).map_or(0, |pair| u16::from_be_bytes([pair[0], pair[1]]));
                let request = ReadRequest {
                    sink_stag: 7,
                    sink_offset: u64::from(number(4)),
                    len: u32::from(number(0)),
                    source_stag: read.key().0,
                    source_offset: read.remote().address.wrapping_add(u64::from(number(2))),
                };
                let control = Operation::ReadRequest.control();
                let header = Untagged { last: true, control, own: 0, queue: 1, msn: Msn(peer.next_read), offset: 0 };
                peer.next_read += 1;
                peer.say(&fpdu(&header.encode(), &request.encode(), crc));
            }
            4 => {
                let operation = Operation::send(kind & 0x10 != 0, kind & 0x20 != 0);
                let own = memory
                    .as_ref()
                    .map_or(0, |(write, read)| if kind & 0x40 != 0 { read.key().0 } else { write.key().0 });
                let control = operation.control();
                let header = Untagged { last: true, control, own, queue: 0, msn: Msn(peer.next_send), offset: 0 };
                peer.next_send += 1;
                peer.say(&fpdu(&header.encode(), octets, crc));
            }
            5 => {
                if let Some(asked) = peer.asked() {
                    let control = Operation::ReadResponse.control();
                    let header =
                        Tagged { last: kind & 0x10 == 0, control, stag: asked.sink_stag, offset: asked.sink_offset };
                    let len = octets.len().min(asked.len as usize + usize::from(kind >> 7));
                    peer.say(&fpdu(&header.encode(), &octets[..len], crc));
                }
            }
            6 => {
                let (Some(qp), Some((write, read))) = (&qp, &memory) else { continue };
                let (key, address, flags) = (RemoteKey(77), 1 << 40, Flags::SIGNALED);
                let source = || Source::Inline(octets.to_vec());
                let work = match kind >> 3 & 7 {
                    0 | 1 => Work::Send { from: source(), invalidate: None, flags },
                    2 => Work::Write { from: source(), key, address, flags },
                    3 | 4 => {
                        let into = qp.allocate(4096, 1).unwrap().remove(0);
                        Work::Read { into, range: 0..octets.len(), key, address, flags }
                    }
                    5 => {
                        write.invalidate();
                        taken.get_or_insert_with(|| octets_of(write.span()));
                        continue;
                    }
                    6 => {
                        read.invalidate();
                        continue;
                    }
                    _ => {
                        qp.disconnect();
                        continue;
                    }
                };
                let mut work = vec![work];
                if qp.post(&mut work).is_ok() {
                    tally.posted += 1;
                }
            }
            _ => {
                lane.progress(now, &mut events, 32);
                tally.count(&mut events);
            }
        }
    }

    // Everything was said. What is unfinished runs into its time-out, and who waits for a goodbye gets one.
    let _ = peer.stream.shutdown(std::net::Shutdown::Write);
    let mut late = now;
    for round in 0.. {
        lane.progress(late, &mut events, 32);
        tally.count(&mut events);
        let over = peer.hear();
        peer.heard.clear();
        let left = lane.resources();
        if (Resources { regions: 0, listeners: 0, ..left }) == Resources::default() && over {
            break;
        }
        assert!(round < 10_000, "left behind: {left:?}");
        if round > 100 {
            late += Duration::from_secs(1);
        }
    }
    if qp.is_some() {
        assert_eq!(tally.ends, 1);
    }
    assert_eq!((tally.sends_done, tally.receives_done), (tally.posted, tally.receives));
    if let Some((write, read)) = memory {
        assert_eq!(octets_of(read.span()), [MARK; REGION_BYTES], "memory without that right was written to");
        if let Some(taken) = taken {
            assert_eq!(octets_of(write.span()), taken, "memory was written to after it was taken away");
        }
    }
    drop(qp);
    assert_eq!(lane.resources().regions, 0);
}

fuzz_target!(
    init: {
        let vectors = seeds::vectors(include_str!("../../tests/vectors/iwarp.json"));
        let mut inputs = Vec::new();
        for vector in &vectors {
            let octets = seeds::unhex(vector["hex"].as_str().unwrap()).unwrap();
            let is_start_up = vector["layer"].as_str().unwrap().starts_with("mpa");
            for role in [0, 1] {
                if is_start_up {
                    let rest = &octets[16..];
                    inputs.push([&[role | 0x0c, rest.len() as u8][..], rest, &[7, 0]].concat());
                } else if octets.len() < 256 {
                    // As it is, and as the ULPDU in it, with CRCs.
                    inputs.push([&[role | 0x0a, 0, octets.len() as u8][..], &octets, &[7, 0]].concat());
                    let ulpdu = &octets[2..];
                    inputs.push([&[role | 0x0a, 2, ulpdu.len() as u8][..], ulpdu, &[7, 0]].concat());
                }
            }
        }
        for role in [0x08, 0x09, 0x10, 0x11, 0x18, 0x19, 0, 1] {
            inputs.push(
                [
                    &[role][..],
                    &[4, 3, b'a', b'b', b'c', 0x24, 2, 1, 2, 3, 6, 0, 9, 0, 1, 0, 0, 7, 0],
                    &[6, 1, b'x', 0x16, 4, 1, 2, 3, 4, 0x1e, 8, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 5, 8, 1, 2, 3, 4, 5, 6, 7, 8],
                    &[7, 0, 0x2e, 0, 7, 0, 0x36, 0, 7, 0, 0x3e, 0, 7, 0],
                ]
                .concat(),
            );
        }
        seeds::plant(inputs);
    },
    |input: &[u8]| {
        let Some((choices, steps)) = input.split_first() else { return };
        let form = match choices >> 3 & 3 {
            0 => Form::ClientServer,
            1 => Form::PeerToPeer(ReadyFrame::Write),
            2 => Form::PeerToPeer(ReadyFrame::Read),
            _ => Form::PeerToPeer(ReadyFrame::Send),
        };
        LANES.with_borrow_mut(|lanes| {
            let (crc, short) = (choices & 2 != 0, choices & 0x40 != 0);
            let at = usize::from(choices >> 3 & 3) * 4 + usize::from(crc) * 2 + usize::from(short);
            run(*choices, steps, lanes[at].get_or_insert_with(|| OpenLane::new(crc, short, form)));
        });
    }
);
