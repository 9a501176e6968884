//! Our userspace iWARP against the kernel's (`siw`), in both roles. The peer is `tests/rdma-vm/siw_peer.c`, a program on
//! librdmacm without a line of ours, or a plain socket that speaks octets to siw. `tests/rdma-vm/suite` runs this in its VM;
//! elsewhere every test says why it is skipped.
//!
//! What comes out of it is written down in `docs/interop.md`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use bulkhead::fabric::iwarp::{Iwarp, Options, Segments};
use bulkhead::fabric::*;
use bulkhead::wire::iwarp::ddp::{Msn, Tagged, Untagged};
use bulkhead::wire::iwarp::mpa::{self, ConnectionWord, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::{Operation, ReadRequest, Terminate, TerminateHead};

mod rdma;
use rdma::ours::Ours;
use rdma::{PATIENCE, Program, SIW, STOCK, Settings, Siw, hex, skipped, unhex};

const REGION_LEN: usize = 64 << 10;
/// What a queue pair of kernel verbs reports for a request that the end of the connection overtook.
const FLUSHED: &str = "5";
/// And for a Receive whose Send was to invalidate what cannot be.
const INVALIDATION_FAILED: &str = "9";

/// The kernel's siw, for one test at a time.
fn siw_here() -> Option<Siw> {
    if Program::path().is_none() {
        skipped("no kernel siw here; tests/rdma-vm/suite brings one");
        return None;
    }
    Some(Siw::take())
}

fn siw_at(port: u16) -> SocketAddr {
    SocketAddr::new(SIW.v4.parse().expect("an address"), port)
}

/// A running `siw_peer`, and what we do while it thinks.
struct Peer(Program);

/// What siw_peer registered.
struct Theirs {
    index: usize,
    span: RemoteSpan,
}

impl Peer {
    fn start() -> Self {
        Self(Program::start())
    }

    fn tell(&mut self, command: &str) {
        self.0.tell(command);
    }

    /// The next line, while our side goes on. Its words.
    fn hear(&mut self, ours: &mut Ours) -> Vec<String> {
        self.0.hear(|| ours.turn())
    }

    fn ask(&mut self, ours: &mut Ours, command: &str) -> Vec<String> {
        self.tell(command);
        self.hear(ours)
    }

    /// Asks for what cannot fail, and gives what comes behind the first word.
    fn order(&mut self, ours: &mut Ours, command: &str, answer: &str) -> Vec<String> {
        self.0.order(|| ours.turn(), command, answer)
    }

    fn region(&mut self, ours: &mut Ours, len: usize, rights: &str) -> Theirs {
        let words = self.order(ours, &format!("region {len} {rights}"), "region");
        let key = RemoteKey(u32::from_str_radix(&words[1], 16).unwrap());
        let address = u64::from_str_radix(&words[2], 16).unwrap();
        Theirs { index: words[0].parse().unwrap(), span: RemoteSpan { key, address, len: len as u64 } }
    }

    fn fill(&mut self, ours: &mut Ours, at: &Theirs, offset: usize, octets: &[u8]) {
        self.order(ours, &format!("fill {} {offset} {}", at.index, hex(octets)), "filled");
    }

    fn dump(&mut self, ours: &mut Ours, at: &Theirs, offset: usize, len: usize) -> Vec<u8> {
        unhex(&self.order(ours, &format!("dump {} {offset} {len}", at.index), "octets")[0])
    }

    /// Posts, and waits for success.
    fn carry_out(&mut self, ours: &mut Ours, command: &str) {
        self.order(ours, command, "posted");
        let words = self.order(ours, "poll", "completion");
        let operation = command.split(' ').next().unwrap();
        assert_eq!((words[0].as_str(), words[1].as_str()), (operation, "0"), "{command}: {words:?}");
    }
}

/// With CRCs asked for, or not.
fn options(crc: bool) -> Options {
    Options { crc, handshake_timeout: Duration::from_secs(50), ..Options::default() }
}

fn attributes() -> Attributes {
    // siw waits 10 s for a Reply; ours waits longer than an emulated machine needs.
    Attributes { handshake_timeout: Duration::from_secs(50), ..Attributes::default() }
}

/// Octets that differ at every place and with every seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|n| (n.wrapping_mul(0x9e37_79b9).wrapping_add(seed * 77) >> 7) as u8).collect()
}

fn octets_of(span: &SharedSpan, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut octets = vec![0; range.len()];
    span.copy_out(range.start, &mut octets);
    octets
}

fn buffer(qp: &dyn QueuePair, len: usize) -> LocalBuf {
    qp.allocate(len, 1).unwrap().remove(0)
}

fn source(qp: &dyn QueuePair, octets: &[u8]) -> Source {
    let mut buf = buffer(qp, octets.len());
    buf.as_mut_slice()[..octets.len()].copy_from_slice(octets);
    Source::Buffer { buf, range: 0..octets.len() }
}

/// Who dials.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Dialler {
    Siw,
    Ours,
}

/// A connection between siw and us, with a region open at either end and a Receive posted at either end.
struct Pair {
    ours: Ours,
    qp: Box<dyn QueuePair>,
    region: MemoryRegion,
    peer: Peer,
    theirs: Theirs,
    _listener: Option<Box<dyn Listener>>,
    /// Private data as it arrived: ours at siw, siw's at us.
    data: (Vec<u8>, Vec<u8>),
    /// Read depths that siw reported with the connection or the request: IRD, ORD.
    depths: (u32, u32),
}

impl Pair {
    fn new(dialler: Dialler, options: Options, our_data: &[u8], siw_data: &[u8], len: usize) -> Self {
        let mut ours = Ours::over(&Iwarp::new(options));
        let mut peer = Peer::start();
        let open = |qp: &dyn QueuePair| {
            qp.post_receive(buffer(qp, len)).unwrap();
            qp.register(SharedSpan::new(len).unwrap(), Access::BOTH).unwrap()
        };
        let depths = |words: &[String]| (words[0].parse().unwrap(), words[1].parse().unwrap());
        match dialler {
            Dialler::Siw => {
                let (listener, address) = ours.listen(SIW.v4);
                peer.order(&mut ours, &format!("dial {} {}", address.ip(), address.port()), "dialled");
                let theirs = peer.region(&mut ours, len, "wr");
                peer.order(&mut ours, &format!("receive {} 0 {len}", theirs.index), "posted");
                peer.tell(&format!("connect {} 16 16", hex(siw_data)));
                let request = ours.request();
                let theirs_said = request.private_data().to_vec();
                let qp = ours.lane.admit(request, attributes()).unwrap();
                let region = open(&*qp);
                qp.establish(our_data).unwrap();
                let words = peer.hear(&mut ours);
                assert_eq!(words[0], "established", "{words:?}; ours {:?}", ours.events);
                ours.established();
                let data = (unhex(&words[1]), theirs_said);
                Self { ours, qp, region, peer, theirs, _listener: Some(listener), data, depths: depths(&words[2..]) }
            }
            Dialler::Ours => {
                let address = Address::Socket(siw_at(peer.0.listen(SIW.v4)));
                peer.tell("request");
                let qp = ours.lane.dial(&address, attributes()).unwrap();
                let region = open(&*qp);
                qp.establish(our_data).unwrap();
                let words = peer.hear(&mut ours);
                assert_eq!(words[0], "request", "{words:?}; ours {:?}", ours.events);
                let ours_heard = unhex(&words[1]);
                let theirs = peer.region(&mut ours, len, "wr");
                peer.order(&mut ours, &format!("receive {} 0 {len}", theirs.index), "posted");
                peer.tell(&format!("accept {} 16 16", hex(siw_data)));
                let theirs_said = ours.established();
                let answer = peer.hear(&mut ours);
                assert_eq!(answer[0], "established", "{answer:?}");
                let data = (ours_heard, theirs_said);
                Self { ours, qp, region, peer, theirs, _listener: None, data, depths: depths(&words[2..]) }
            }
        }
    }

    /// Every operation, from either end, `len` octets each.
    fn exercise(&mut self, len: usize) {
        let Self { ours, qp, region, peer, theirs, .. } = self;
        let (qp, at) = (&**qp, theirs.index);
        let ours_at = region.remote();

        let said = pattern(len, 1);
        peer.fill(ours, theirs, 0, &said);
        peer.carry_out(ours, &format!("send {at} 0 {len}"));
        let received = ours.done(WorkKind::Receive);
        assert_eq!(&received.buf.unwrap().as_slice()[..received.len], said, "siw's Send");

        let written = pattern(len, 2);
        peer.fill(ours, theirs, 0, &written);
        peer.carry_out(ours, &format!("write {at} 0 {len} {:x} {:x}", ours_at.key.0, ours_at.address));
        ours.until("Written", |event| match event {
            Event::Written { key, .. } if key == ours_at.key => Ok(()),
            event => Err(event),
        });
        assert_eq!(octets_of(region.span(), 0..len), written, "siw's Write");

        let shown = pattern(len, 3);
        region.span().copy_in(0, &shown);
        peer.carry_out(ours, &format!("read {at} 0 {len} {:x} {:x}", ours_at.key.0, ours_at.address));
        assert_eq!(peer.dump(ours, theirs, 0, len), shown, "siw's Read");

        let to = theirs.span;
        let (body, trailer) = (pattern(len, 4), pattern(len.min(100), 5));
        let send = Work::Send { from: source(qp, &trailer), invalidate: None, flags: Flags::SIGNALED };
        let half = len as u64;
        let write =
            Work::Write { from: source(qp, &body), key: to.key, address: to.address + half, flags: Flags::SIGNALED };
        qp.post(&mut vec![write, send]).unwrap();
        let words = peer.order(ours, "poll", "completion");
        assert_eq!(words, ["receive", "0", &trailer.len().to_string()], "our Send");
        assert_eq!(peer.dump(ours, theirs, 0, trailer.len()), trailer, "our Send");
        assert_eq!(peer.dump(ours, theirs, len, len), body, "our Write, placed before our Send was delivered");
        ours.done(WorkKind::Write);
        ours.done(WorkKind::Send);

        let wanted = pattern(len, 6);
        peer.fill(ours, theirs, 0, &wanted);
        let read = Work::Read {
            into: buffer(qp, len),
            range: 0..len,
            key: to.key,
            address: to.address,
            flags: Flags::default(),
        };
        qp.post(&mut vec![read]).unwrap();
        assert_eq!(&ours.done(WorkKind::Read).buf.unwrap().as_slice()[..len], wanted, "our Read");
    }

    /// Either end says goodbye, and the other one hears it.
    fn part(mut self, we_begin: bool) {
        if we_begin {
            self.qp.disconnect();
            assert_eq!(self.ours.cause(), Cause::Local);
            let words = self.peer.ask(&mut self.ours, "event");
            assert_eq!(words, ["event", "RDMA_CM_EVENT_DISCONNECTED", "0"]);
        } else {
            self.peer.order(&mut self.ours, "disconnect", "disconnected");
            assert_eq!(self.ours.cause(), Cause::Peer);
        }
    }
}

fn every_setting(dialler: Dialler) {
    let Some(siw) = siw_here() else { return };
    let mut we_begin = false;
    for revision in [2, 1] {
        for (ours_crc, crc) in [(true, false), (true, true), (false, false), (false, true)] {
            for peer_to_peer in [false, true] {
                let settings = Settings { crc, peer_to_peer, revision };
                siw.set(settings);
                let mut pair = Pair::new(dialler, options(ours_crc), b"ours", b"siw's", REGION_LEN);
                assert_eq!(pair.data, (b"ours".to_vec(), b"siw's".to_vec()));
                pair.exercise(1000);
                println!("{dialler:?} dialled, our CRC {ours_crc}, {settings:?}: depths at siw {:?}", pair.depths);
                we_begin = !we_begin;
                pair.part(we_begin);
            }
        }
    }
}

#[test]
fn a_siw_client_and_our_listener_do_everything_under_every_setting() {
    every_setting(Dialler::Siw);
}

#[test]
fn our_dialler_and_a_siw_listener_do_everything_under_every_setting() {
    every_setting(Dialler::Ours);
}

/// Lengths that are no multiple of 4 leave the frames of the stream at odd places.
#[test]
fn private_data_arrives_octet_for_octet_and_bulk_follows_wherever_the_frames_lie() {
    let Some(_siw) = siw_here() else { return };
    for dialler in [Dialler::Siw, Dialler::Ours] {
        for (ours_len, siw_len) in [(0, 0), (1, 2), (2, 3), (3, 1), (55, 56), (56, 251)] {
            let (our_data, siw_data) = (pattern(ours_len, 7), pattern(siw_len, 8));
            let mut pair = Pair::new(dialler, options(true), &our_data, &siw_data, 2 * REGION_LEN);
            assert_eq!(pair.data, (our_data, siw_data), "{dialler:?} dialled");
            pair.exercise(REGION_LEN);
            println!("{dialler:?} dialled, {ours_len} octets of ours and {siw_len} of siw's: all arrived");
            pair.part(true);
        }
    }
}

#[test]
fn a_mebibyte_goes_both_ways_with_every_operation() {
    let Some(_siw) = siw_here() else { return };
    for (dialler, crc) in [(Dialler::Siw, false), (Dialler::Ours, false), (Dialler::Siw, true), (Dialler::Ours, true)] {
        let mut pair = Pair::new(dialler, options(crc), b"", b"", 2 << 20);
        pair.exercise(1 << 20);
        pair.part(false);
    }
}

#[test]
fn a_refusal_carries_its_reason_both_ways() {
    let Some(siw) = siw_here() else { return };
    for revision in [2, 1] {
        siw.set(Settings { revision, ..STOCK });
        let (mut ours, mut peer) = (Ours::over(&Iwarp::new(options(true))), Peer::start());
        let (_listener, address) = ours.listen(SIW.v4);
        peer.order(&mut ours, &format!("dial {} {}", address.ip(), address.port()), "dialled");
        peer.tell("connect - 16 16");
        ours.request().reject(b"busy");
        let words = peer.hear(&mut ours);
        assert_eq!((words[0].as_str(), words[2].as_str()), ("refused", hex(b"busy").as_str()), "{words:?}");
        println!("our refusal at siw, revision {revision}: {words:?}");
    }
    siw.set(STOCK);
    let (mut ours, mut peer) = (Ours::over(&Iwarp::new(options(true))), Peer::start());
    let port = peer.0.listen(SIW.v4);
    peer.tell("request");
    let qp = ours.lane.dial(&Address::Socket(siw_at(port)), attributes()).unwrap();
    qp.establish(b"please").unwrap();
    assert_eq!(peer.hear(&mut ours)[1], hex(b"please"));
    peer.order(&mut ours, &format!("reject {}", hex(b"closed today")), "rejected");
    let said = ours.until("refusal", |event| match event {
        Event::Rejected { private_data, .. } => Ok(private_data),
        event => Err(event),
    });
    assert_eq!(said, b"closed today");
}

/// Our target refuses what siw does; siw's user sees the end and its requests flushed.
#[test]
fn our_terminate_ends_a_siw_connection() {
    let Some(_siw) = siw_here() else { return };
    for dialler in [Dialler::Siw, Dialler::Ours] {
        let wrongs: [fn(RemoteSpan) -> String; 5] = [
            |to| format!("write 0 0 8 {:x} {:x}", to.key.0 ^ 1, to.address),
            |to| format!("write 0 0 8 {:x} {:x}", to.key.0, to.address + to.len - 7),
            |to| format!("read 0 0 8 {:x} {:x}", to.key.0 ^ 1, to.address),
            |to| format!("read 0 0 8 {:x} {:x}", to.key.0, to.address + to.len - 7),
            |to| format!("invalidate 0 0 8 {:x}", to.key.0),
        ];
        for wrong in wrongs {
            let mut pair = Pair::new(dialler, options(true), b"", b"", REGION_LEN);
            let command = wrong(pair.region.remote());
            pair.peer.order(&mut pair.ours, &command, "posted");
            let cause = pair.ours.cause();
            assert!(matches!(cause, Cause::PeerFault(_)), "{command}: {cause:?}");
            let words = pair.peer.ask(&mut pair.ours, "event");
            assert_eq!(words[1], "RDMA_CM_EVENT_DISCONNECTED", "{command}");
            let first = pair.peer.order(&mut pair.ours, "poll", "completion");
            let second = pair.peer.order(&mut pair.ours, "poll", "completion");
            println!("{dialler:?} dialled, siw's {command}: {cause}; completions {first:?} {second:?}");
            let receive = if first[0] == "receive" { &first } else { &second };
            assert_eq!((receive[0].as_str(), receive[1].as_str()), ("receive", FLUSHED), "{command}");
        }
    }
}

/// siw refuses what we do; the poster's request is refused or flushed, and the cause says what siw said.
#[test]
fn siws_terminate_ends_our_connection() {
    let Some(_siw) = siw_here() else { return };
    let key = |to: RemoteSpan| RemoteKey(to.key.0 ^ 1);
    for dialler in [Dialler::Siw, Dialler::Ours] {
        for (what, reason) in [
            ("write, key", "DDP error, type 1 code 0"),
            ("write, bounds", "DDP error, type 1 code 1"),
            ("read, key", "RDMAP error, type 1 code 0"),
            ("read, bounds", "RDMAP error, type 1 code 1"),
            ("send", "DDP error, type 2 code 2"),
        ] {
            let mut pair = Pair::new(dialler, options(true), b"", b"", REGION_LEN);
            if dialler == Dialler::Siw {
                // Unless it offers peer-to-peer mode nothing of ours leaves before its first frame.
                pair.peer.carry_out(&mut pair.ours, "send 0 0 4");
                pair.ours.done(WorkKind::Receive);
            }
            let to = pair.theirs.span;
            let beyond = to.address + to.len - 7;
            let write =
                |key, address| Work::Write { from: Source::Inline(vec![1; 8]), key, address, flags: Flags::SIGNALED };
            let read = |key, address| Work::Read {
                into: buffer(&*pair.qp, 8),
                range: 0..8,
                key,
                address,
                flags: Flags::SIGNALED,
            };
            let send = || Work::Send { from: Source::Inline(vec![1; 8]), invalidate: None, flags: Flags::SIGNALED };
            let mut work = match what {
                "write, key" => vec![write(key(to), to.address)],
                "write, bounds" => vec![write(to.key, beyond)],
                "read, key" => vec![read(key(to), to.address)],
                "read, bounds" => vec![read(to.key, beyond)],
                // One Receive is posted.
                _ => vec![send(), send()],
            };
            pair.qp.post(&mut work).unwrap();
            let cause = pair.ours.cause();
            println!("{dialler:?} dialled, our {what}: {cause}");
            let Cause::RefusedByPeer(said) = &cause else { panic!("{what}: {cause:?}") };
            assert!(said.starts_with(reason), "{what}: {said}");
        }
    }
}

/// Octets of the one Receive that a plain socket finds.
const RECEIVE_LEN: usize = 64;

/// A plain socket that speaks octets to a listening siw.
struct Raw {
    stream: TcpStream,
    peer: Peer,
    ours: Ours,
    theirs: Theirs,
    reply: Frame,
}

impl Raw {
    fn new(request: &Frame) -> Self {
        let (mut ours, mut peer) = (Ours::over(&Iwarp::new(options(true))), Peer::start());
        let port = peer.0.listen(SIW.v4);
        peer.tell("request");
        let mut stream = TcpStream::connect(siw_at(port)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&request.encode(FrameKind::Request)).unwrap();
        assert_eq!(peer.hear(&mut ours)[0], "request");
        let theirs = peer.region(&mut ours, 4096, "wr");
        peer.order(&mut ours, &format!("receive 0 0 {RECEIVE_LEN}"), "posted");
        peer.order(&mut ours, "accept - 16 16", "established");
        let mut inbox = Vec::new();
        let reply = loop {
            let mut octets = [0; 64];
            let len = stream.read(&mut octets).unwrap();
            assert!(len > 0, "closed without a Reply");
            inbox.extend_from_slice(&octets[..len]);
            if let Some((reply, len)) = Frame::decode(FrameKind::Reply, &inbox).unwrap() {
                assert_eq!(len, inbox.len());
                break reply;
            }
        };
        Self { stream, peer, ours, theirs, reply }
    }

    fn goodbye(mut self) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(self.peer.ask(&mut self.ours, "event")[1], "RDMA_CM_EVENT_DISCONNECTED");
        let mut said = Vec::new();
        self.stream.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"");
    }

    /// Says this, and hears siw to its end: what it said.
    fn last_words(mut self, octets: &[u8]) -> Vec<u8> {
        self.stream.write_all(octets).unwrap();
        let mut said = Vec::new();
        // An end by reset says as much as one by goodbye.
        if let Err(error) = self.stream.read_to_end(&mut said) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "siw goes on");
        }
        assert_eq!(self.peer.ask(&mut self.ours, "event")[1], "RDMA_CM_EVENT_DISCONNECTED");
        said
    }
}

fn fpdu(header: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    mpa::put_fpdu(&mut out, header, payload, true);
    out
}

/// Without peer-to-peer mode: a protocol error between its agreement and its first frame kills this kernel's connection
/// manager.
fn raw_request() -> Frame {
    let word = ConnectionWord { ird: 4, ord: 4, ..ConnectionWord::default() };
    Frame { revision: 2, markers: false, crc: true, rejected: false, word: Some(word), private_data: Vec::new() }
}

/// The octets of siw's Terminates: layer and type change places within their octet, and the three flags are at the other
/// end of theirs. [`Terminate::decode`] reads them all the same.
#[test]
fn siws_terminates_octet_for_octet() {
    let Some(_siw) = siw_here() else { return };
    let tagged = |control, stag, offset| Tagged { last: true, control, stag, offset }.encode().to_vec();
    let untagged = |control, own, queue, msn, offset| {
        Untagged { last: true, control, own, queue, msn: Msn(msn), offset }.encode().to_vec()
    };
    let read = |stag, address, len| {
        let request =
            ReadRequest { sink_stag: 77, sink_offset: 1 << 32, len, source_stag: stag, source_offset: address };
        fpdu(&untagged(0x41, 0, 1, 1, 0), &request.encode())
    };
    let with = |mut header: Vec<u8>, at: usize, value: u8| {
        header[at] = value;
        header
    };
    type Say<'a> = Box<dyn Fn(u32, u64) -> Vec<u8> + 'a>;
    let body = [9; 8];
    let table: Vec<(&str, Say, [u8; 4], &str)> = vec![
        (
            "bad CRC",
            Box::new(|stag, at| {
                let mut octets = fpdu(&tagged(0x40, stag, at), &body);
                *octets.last_mut().unwrap() ^= 1;
                octets
            }),
            [0x02, 0x02, 0, 0],
            "MPA error, type 0 code 2",
        ),
        (
            "Write, unknown STag",
            Box::new(|stag, at| fpdu(&tagged(0x40, stag ^ 0x100, at), &body)),
            [0x11, 0, 3, 0],
            "DDP error, type 1 code 0",
        ),
        (
            "Write, out of bounds",
            Box::new(|stag, at| fpdu(&tagged(0x40, stag, at + 4089), &body)),
            [0x11, 1, 3, 0],
            "DDP error, type 1 code 1",
        ),
        (
            "Write, offset wraps",
            Box::new(|stag, _| fpdu(&tagged(0x40, stag, u64::MAX - 3), &body)),
            [0x01, 0, 3, 0],
            "DDP error, type 0 code 0",
        ),
        (
            "Read, unknown STag",
            Box::new(|stag, at| read(stag ^ 0x100, at, 8)),
            [0x10, 0, 7, 0],
            "RDMAP error, type 1 code 0",
        ),
        (
            "Read, out of bounds",
            Box::new(|stag, at| read(stag, at + 4089, 8)),
            [0x10, 1, 7, 0],
            "RDMAP error, type 1 code 1",
        ),
        (
            "Send, no second Receive",
            Box::new(|_, _| [1, 2].map(|msn| fpdu(&untagged(0x43, 0, 0, msn, 0), &body)).concat()),
            [0x21, 2, 3, 0],
            "DDP error, type 2 code 2",
        ),
        // DDP has a code for it, which is 5.
        (
            "Send, too long",
            Box::new(|_, _| fpdu(&untagged(0x43, 0, 0, 1, 0), &[9; RECEIVE_LEN + 1])),
            [0x21, 2, 3, 0],
            "DDP error, type 2 code 2",
        ),
        (
            "Send, message offset",
            Box::new(|_, _| fpdu(&untagged(0x43, 0, 0, 1, 8), &body)),
            [0x21, 4, 3, 0],
            "DDP error, type 2 code 4",
        ),
        (
            "Send, MSN",
            Box::new(|_, _| fpdu(&untagged(0x43, 0, 0, 2, 0), &body)),
            [0x21, 3, 3, 0],
            "DDP error, type 2 code 3",
        ),
        (
            "queue 3",
            Box::new(|_, _| fpdu(&untagged(0x43, 0, 3, 1, 0), &body)),
            [0x21, 1, 3, 0],
            "DDP error, type 2 code 1",
        ),
        (
            "DDP version, tagged",
            Box::new(|stag, at| fpdu(&with(tagged(0x40, stag, at), 0, 0xc0), &body)),
            [0x11, 4, 0, 0],
            "DDP error, type 1 code 4",
        ),
        (
            "DDP version, untagged",
            Box::new(|_, _| fpdu(&with(untagged(0x43, 0, 0, 1, 0), 0, 0x40), &body)),
            [0x21, 6, 0, 0],
            "DDP error, type 2 code 6",
        ),
        // These two mean something else to who follows the RFC: both readings are told.
        (
            "RDMAP version",
            Box::new(|_, _| fpdu(&untagged(0x83, 0, 0, 1, 0), &body)),
            [0x20, 5, 0, 0],
            "MPA error, type 0 code 5",
        ),
        (
            "operation 8",
            Box::new(|_, _| fpdu(&untagged(0x48, 0, 0, 1, 0), &body)),
            [0x20, 6, 0, 0],
            "MPA error, type 0 code 6",
        ),
    ];
    for (what, say, head, meaning) in table {
        let raw = Raw::new(&raw_request());
        assert!(raw.reply.crc && raw.reply.word.is_some(), "{:?}", raw.reply);
        let octets = say(raw.theirs.span.key.0, raw.theirs.span.address);
        let said = raw.last_words(&octets);
        println!("{what}: {}", hex(&said));
        assert!(!said.is_empty(), "{what}: an end without a Terminate");
        let (ulpdu, total) = mpa::split_fpdu(&said, true).unwrap().unwrap();
        assert_eq!(total, said.len(), "{what}: nothing comes after a Terminate");
        assert_eq!(ulpdu[..2], [0x41, Operation::Terminate.control()], "{what}");
        assert_eq!(ulpdu[18..22], head, "{what}");
        let meant = TerminateHead(head).to_string();
        assert!(meant.starts_with(meaning), "{what}: {meant}");
        let terminate = Terminate::decode(&ulpdu[18..]).unwrap();
        assert_eq!(terminate.culprit.is_some(), head[2] != 0, "{what}");
    }
}

/// A Send that invalidates what cannot be completes in error at siw, and the connection goes on: neither Terminate nor end.
/// The next error sends the Terminate of this one, with the header of the other.
#[test]
fn siw_keeps_the_terminate_of_an_invalidation_for_later() {
    let Some(_siw) = siw_here() else { return };
    let mut raw = Raw::new(&raw_request());
    let say = |own, control, msn| {
        let header = Untagged { last: true, control, own, queue: 0, msn: Msn(msn), offset: 0 };
        fpdu(&header.encode(), &[9; 8])
    };
    let stag = raw.theirs.span.key.0 ^ 0x100;
    raw.stream.write_all(&say(stag, Operation::SendInvalidate.control(), 1)).unwrap();
    let words = raw.peer.order(&mut raw.ours, "poll", "completion");
    assert_eq!(words, ["receive", INVALIDATION_FAILED, "8"]);
    let said = raw.last_words(&say(0, Operation::Send.control(), 2));
    println!("{}", hex(&said));
    let (ulpdu, _) = mpa::split_fpdu(&said, true).unwrap().expect("a Terminate");
    assert_eq!(ulpdu[1], Operation::Terminate.control());
    assert_eq!(ulpdu[18..22], [0x20, 9, 3, 0], "RDMAP type 2 code 9, as siw writes it");
    assert_eq!(ulpdu[24..26], [0x41, Operation::Send.control()]);
}

/// What siw answers to Requests as other initiators make them.
#[test]
fn siw_answers_requests_of_other_kinds() {
    let Some(_siw) = siw_here() else { return };
    let plain = |revision, crc| Frame { revision, crc, word: None, ..raw_request() };
    for (request, crc) in
        [(plain(1, false), false), (plain(1, true), true), (plain(2, false), false), (raw_request(), true)]
    {
        let raw = Raw::new(&request);
        println!("{request:?}: {:?}", raw.reply);
        assert_eq!(raw.reply.revision, request.revision);
        assert_eq!((raw.reply.crc, raw.reply.word.is_some()), (crc, request.word.is_some()));
        assert!(!raw.reply.rejected && !raw.reply.markers);
        raw.goodbye();
    }
}

#[test]
fn messages_cut_into_frames_of_any_size_reach_siw() {
    let Some(_siw) = siw_here() else { return };
    for segments in [Segments::Mss, Segments::Large, Segments::UpTo(1442), Segments::UpTo(128)] {
        for crc in [true, false] {
            let options = Options { segments, ..options(crc) };
            let mut pair = Pair::new(Dialler::Ours, options, b"", b"", 2 * REGION_LEN);
            pair.exercise(REGION_LEN - 3);
            println!("frames cut as {segments:?}, CRC {crc}: all arrived");
            pair.part(true);
        }
    }
}
