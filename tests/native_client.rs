//! The native client against a small server made of the same parts, over loopback and over iWARP.

use bulkhead::client::native::port::{Port, Prepared, attributes};
use bulkhead::client::{AsyncClient, ClientError, Geometry, NativeClient, Options, Outcome};
use bulkhead::error::Exit;
use bulkhead::fabric::{self, Address, Event, Fabric, Lane, QpNum, iwarp, loopback};
use bulkhead::wire::memcache::{Command, response};
use bulkhead::wire::native::conversation::{Conversation, Step};
use bulkhead::wire::native::descriptor::{Descriptor, Nonce};
use bulkhead::wire::native::endpoint::{EndCause, Endpoint};
use bulkhead::wire::native::stream::Value;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::process::{Command as Program, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[path = "common/pattern.rs"]
#[allow(dead_code, reason = "shared by several tests, of which this needs a part")]
mod pattern;
use pattern::Pattern;

/// How a server behaves.
#[derive(Clone, Copy, Debug)]
struct Nature {
    geometry: Geometry,
    nonce: Nonce,
    /// Stops for good at a request that it sees before it has answered the one before, and closes when a trailer shares
    /// its record with a command.
    is_fragile: bool,
    /// Accepts with private data that is no descriptor.
    is_mute: bool,
}

impl Default for Nature {
    fn default() -> Self {
        Self { geometry: Geometry::default(), nonce: Nonce::ours(7), is_fragile: false, is_mute: false }
    }
}

#[derive(Clone)]
struct Stored {
    flags: u32,
    cas: u64,
    octets: Arc<Vec<u8>>,
}

/// What tests look at.
#[derive(Default)]
struct Watch {
    stop: AtomicBool,
    connections: AtomicUsize,
    hung: AtomicBool,
    /// Most requests of one connection whose answers had not left when the next was read.
    overlap: AtomicUsize,
}

struct Server {
    fabric: Arc<dyn Fabric>,
    address: Address,
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

/// One connection: keys that begin with a word below are special.
struct Conn {
    port: Port<Arc<Vec<u8>>, Conversation>,
    nature: Nature,
    storing: Option<(Vec<u8>, u32, Vec<u8>)>,
    is_hung: bool,
    answering: usize,
}

enum End {
    Cause(EndCause),
    Close,
}

impl From<EndCause> for End {
    fn from(cause: EndCause) -> Self {
        Self::Cause(cause)
    }
}

impl Conn {
    fn drive(&mut self, values: &mut HashMap<Vec<u8>, Stored>, watch: &Watch, now: Instant) -> Result<(), End> {
        loop {
            let mut moved = !self.is_hung && self.port.poll_ring(now)? > 0;
            while self.step(values, watch)? {
                moved = true;
            }
            while let Some(grant) = self.port.endpoint.poll_fill() {
                moved = true;
                let piece = grant.source;
                let octets = &piece.value[piece.offset as usize..][..piece.len as usize];
                self.port.slot_mut(grant.slot)[..octets.len()].copy_from_slice(octets);
                self.port.handle_filled(grant.ticket);
            }
            moved |= !self.is_hung && self.port.poll_post(now)? > 0;
            if !moved {
                return Ok(());
            }
        }
    }

    fn step(&mut self, values: &mut HashMap<Vec<u8>, Stored>, watch: &Watch) -> Result<bool, End> {
        if self.is_hung {
            return Ok(false);
        }
        let is_busy = !self.port.endpoint.outbound.is_empty();
        let Endpoint { machine, inbound, outbound, .. } = &mut self.port.endpoint;
        let mut was_body_end = false;
        match machine.step(inbound).map_err(EndCause::from)? {
            Step::NeedMore => {
                self.answering = if is_busy { self.answering } else { 0 };
                return Ok(false);
            }
            Step::Command(Command::Store(header)) => {
                let (key, flags, len) = (header.key.to_vec(), header.flags, header.len);
                if key.starts_with(b"vanish") {
                    return Err(End::Close);
                }
                if key.starts_with(b"refused-early") {
                    machine.swallow_body(len);
                    outbound.text(response::OUT_OF_MEMORY_STORING);
                    return Ok(true);
                }
                self.storing = Some((key, flags, Vec::new()));
                machine.accept_body(len);
            }
            Step::Command(Command::Get { keys, with_cas }) => {
                for key in keys {
                    if key.starts_with(b"vanish") {
                        return Err(End::Close);
                    }
                    if key.starts_with(b"silent") {
                        self.is_hung = true;
                        return Ok(false);
                    }
                    if key.starts_with(b"garbage") {
                        outbound.text(b"HTTP/1.1 400\r\n");
                        return Ok(true);
                    }
                    let Some(found) = values.get(key) else { continue };
                    let mut line = Vec::new();
                    let (len, source) = (found.octets.len() as u64, Arc::clone(&found.octets));
                    response::value_line(&mut line, key, found.flags, len, with_cas.then_some(found.cas));
                    outbound.value(&line, Value { source, len, quick_len: len });
                }
                outbound.text(response::END);
            }
            Step::Command(Command::Delete { key, .. }) => {
                let found = values.remove(key).is_some();
                outbound.text(if found { response::DELETED } else { response::NOT_FOUND });
            }
            Step::Command(Command::Touch { key, .. }) => {
                outbound.text(if values.contains_key(key) { response::TOUCHED } else { response::NOT_FOUND });
            }
            Step::Command(Command::Stats { argument: None }) => {
                outbound.text(format!("STAT curr_items {}\r\nSTAT name a b\r\nEND\r\n", values.len()).as_bytes());
            }
            Step::Command(Command::Version) => outbound.text(b"VERSION small 1\r\n"),
            Step::Command(_) => outbound.text(response::ERROR),
            Step::Refused { reply } => outbound.text(reply.unwrap_or_default()),
            Step::Body { .. } => {
                let lease = machine.take_body(inbound);
                if let Some((_, _, octets)) = &mut self.storing {
                    let at = octets.len();
                    octets.resize(at + lease.len() as usize, 0);
                    self.port.copy_out(&lease, &mut octets[at..]);
                }
                return Ok(true);
            }
            Step::BodyEnd => {
                was_body_end = true;
                let (key, flags, octets) = self.storing.take().expect("a header came before");
                let cas = values.values().map(|stored| stored.cas).max().unwrap_or(0) + 1;
                if key.starts_with(b"refused-late") {
                    outbound.text(response::OUT_OF_MEMORY_STORING);
                } else {
                    values.insert(key, Stored { flags, cas, octets: Arc::new(octets) });
                    outbound.text(response::STORED);
                }
            }
            Step::Close(_) => return Err(End::Close),
        }
        self.answering = if is_busy { self.answering + 1 } else { 1 };
        watch.overlap.fetch_max(self.answering, Ordering::SeqCst);
        if self.nature.is_fragile {
            if was_body_end && !self.port.endpoint.inbound.is_empty() {
                return Err(End::Close);
            }
            // A body may follow its line at once; a second request may not.
            if is_busy || self.storing.is_none() && !self.port.endpoint.inbound.is_empty() {
                watch.hung.store(true, Ordering::SeqCst);
                self.is_hung = true;
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn serve(lane: &dyn Lane, nature: Nature, watch: &Watch) {
    let mut values = HashMap::new();
    let mut conns: HashMap<QpNum, Conn> = HashMap::new();
    let mut accepted: HashMap<QpNum, (Prepared, Descriptor)> = HashMap::new();
    let mut events = Vec::new();
    while !watch.stop.load(Ordering::SeqCst) {
        let now = Instant::now();
        let mut more = lane.progress(now, &mut events, 32);
        for event in events.drain(..) {
            more = true;
            match event {
                Event::ConnectRequest(request) => {
                    let Ok(peer) = Descriptor::decode(request.private_data()) else { continue };
                    watch.connections.fetch_add(1, Ordering::SeqCst);
                    let qp = lane.admit(request, attributes(Duration::from_secs(5))).unwrap();
                    if nature.is_mute {
                        qp.establish(&[7; 56]).unwrap();
                        std::mem::forget(qp);
                        continue;
                    }
                    let prepared = Prepared::new(qp, nature.geometry, nature.nonce).unwrap();
                    prepared.establish().unwrap();
                    accepted.insert(prepared.number(), (prepared, peer));
                }
                Event::Established { qp, .. } => {
                    let Some((prepared, peer)) = accepted.remove(&qp) else { continue };
                    let port = prepared.attach(peer, Conversation::new(), Duration::from_secs(30), now);
                    conns.insert(qp, Conn { port, nature, storing: None, is_hung: false, answering: 0 });
                }
                Event::Completed { qp, completion } => {
                    if let Some(conn) = conns.get_mut(&qp) {
                        conn.port.handle_completed(completion, now).unwrap();
                    }
                }
                Event::Disconnected { qp, .. } => drop(conns.remove(&qp)),
                Event::HandshakeFailed { .. } | Event::Rejected { .. } | Event::Written { .. } => {}
            }
        }
        conns.retain(|_, conn| match conn.drive(&mut values, watch, now) {
            Ok(()) => true,
            Err(End::Close) => false,
            Err(End::Cause(cause)) => panic!("a client did wrong: {cause}"),
        });
        if !more {
            lane.arm();
            if !lane.progress(now, &mut events, 32) && events.is_empty() {
                let soon = now + Duration::from_millis(20);
                let until =
                    conns.values().filter_map(|conn| conn.port.deadline()).min().map_or(soon, |at| at.min(soon));
                fabric::sleep(lane, Some(until)).unwrap();
            }
        }
    }
}

impl Server {
    fn start(fabric: Arc<dyn Fabric>, address: Address, nature: Nature) -> Self {
        let watch = Arc::new(Watch::default());
        let (told, tells) = mpsc::channel();
        let thread = std::thread::spawn({
            let (fabric, watch) = (Arc::clone(&fabric), Arc::clone(&watch));
            move || {
                let lane = fabric.lane().unwrap();
                let listener = lane.listen(&address).unwrap();
                told.send(listener.address()).unwrap();
                serve(&*lane, nature, &watch);
            }
        });
        Self { fabric, address: tells.recv().unwrap(), watch, thread: Some(thread) }
    }

    fn looped(nature: Nature) -> Self {
        Self::start(Arc::new(loopback::Loopback::new()), Address::Name("server".to_owned()), nature)
    }

    fn iwarp() -> Self {
        Self::start(
            Arc::new(iwarp::Iwarp::default()),
            Address::Socket("127.0.0.1:0".parse().unwrap()),
            Nature::default(),
        )
    }

    fn client(&self, options: Options) -> NativeClient {
        NativeClient::over(Arc::clone(&self.fabric), self.address.clone(), options).unwrap()
    }

    fn count(&self) -> usize {
        self.watch.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.watch.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server panicked");
        }
    }
}

const SIZES: [usize; 11] = [0, 1, 191, 192, 193, 4096, 262_143, 262_144, 262_145, 1 << 20, 8 << 20];

/// A reader of a pattern.
struct Octets {
    pattern: Pattern,
    at: u64,
    len: u64,
}

impl Octets {
    fn new(seed: u64, len: usize) -> Self {
        Self { pattern: Pattern(seed), at: 0, len: len as u64 }
    }
}

impl Read for Octets {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min((self.len - self.at) as usize);
        self.pattern.fill(self.at, &mut into[..count]);
        self.at += count as u64;
        Ok(count)
    }
}

fn geometry(ring_slots: u64, window_bytes: u64, window_count: u32) -> Geometry {
    Geometry { ring_bytes: ring_slots * 256, window_bytes, window_count }
}

fn with(geometry: Geometry) -> Options {
    Options { geometry, ..Options::default() }
}

/// Puts and gets every size up to `size_max`, into a buffer and through a writer.
fn every_size(client: &mut NativeClient, size_max: usize, what: &str) {
    let mut buffer = vec![0; size_max];
    for (seed, size) in SIZES.into_iter().enumerate().filter(|(_, size)| *size <= size_max) {
        let (key, seed) = (format!("key-{size}"), seed as u64);
        client.put(&key, &mut Octets::new(seed, size), size as u64, size as u32, None).unwrap();
        buffer.fill(0xee);
        let info = client.get_into(&key, &mut buffer).unwrap().unwrap();
        assert_eq!((info.len, info.flags), (size as u64, size as u32), "{what}");
        Pattern(seed).check(0, &buffer[..size], what);
        assert!(buffer[size..].iter().all(|octet| *octet == 0xee), "{what}: octets behind the value are left alone");
        let mut written = Vec::new();
        assert_eq!(client.get(&key, &mut written).unwrap(), Some(info));
        assert_eq!(written.len(), size);
        Pattern(seed).check(0, &written, what);
    }
}

#[test]
fn values_of_every_size_come_back_between_unequal_geometries() {
    let geometries =
        [geometry(2, 4096, 2), geometry(3, 8192, 1), geometry(256, 256 << 10, 4), geometry(64, 1 << 20, 8)];
    for ours in geometries {
        for theirs in geometries {
            let server = Server::looped(Nature { geometry: theirs, ..Nature::default() });
            let mut client = server.client(with(ours));
            // The longest takes thousands of pieces through small windows: one such pair proves it.
            let is_small = ours.window_bytes.min(theirs.window_bytes) < 256 << 10;
            let is_chosen = ours == theirs && ours.window_count == 2;
            let size_max = if is_small && !is_chosen { 1 << 20 } else { 8 << 20 };
            every_size(&mut client, size_max, &format!("{ours:?} to {theirs:?}"));
            assert_eq!(server.count(), 1, "one connection serves all");
        }
    }
}

#[test]
fn values_of_every_size_come_back_over_iwarp() {
    let server = Server::iwarp();
    every_size(&mut server.client(Options::default()), 8 << 20, "iwarp");
}

#[test]
fn misses_and_small_commands_are_answered() {
    let server = Server::looped(Nature::default());
    let mut client = server.client(Options::default());
    assert_eq!(client.get_into("none", &mut []).unwrap(), None);
    assert_eq!(client.stat("none").unwrap(), None);
    assert!(!client.delete("none").unwrap());
    assert!(!client.touch("none", None).unwrap());
    client.put("k", &mut &b"abc"[..], 3, 9, Some(Duration::from_secs(60))).unwrap();
    assert!(client.exists("k").unwrap() && client.touch("k", None).unwrap());
    assert_eq!(client.stat("k").unwrap().map(|info| (info.len, info.flags)), Some((3, 9)));
    assert_eq!(client.version().unwrap(), "small 1");
    let stats = client.stats(None).unwrap();
    assert_eq!(stats, [("curr_items".to_owned(), "1".to_owned()), ("name".to_owned(), "a b".to_owned())]);
    assert!(matches!(client.stats(Some("unknown")), Err(ClientError::Refused { .. })));
    assert!(client.delete("k").unwrap());
    assert!(matches!(client.put("a b", &mut io::empty(), 0, 0, None), Err(ClientError::Key { len: 3 })));
    assert_eq!(server.count(), 1);
}

#[test]
fn requests_in_flight_are_answered_in_their_order_at_every_depth() {
    let server = Server::looped(Nature { geometry: geometry(8, 8192, 3), ..Nature::default() });
    for depth in [1_usize, 2, 3, 16, 64] {
        let mut client = server.client(with(geometry(4, 4096, 2)));
        let lens: Vec<usize> = (0..200).map(|index| [0, 1, 193, 5_000, 40_000][index % 5] + index / 5).collect();
        let mut waiting = std::collections::VecDeque::new();
        let mut buffer = vec![0; 64 << 10];
        let mut settle = |client: &mut NativeClient, (index, is_get): (usize, bool)| {
            let outcome = client.wait_into(&mut buffer).unwrap();
            if !is_get {
                return assert_eq!(outcome, Outcome::Stored);
            }
            let Outcome::Value(info) = outcome else { panic!("{outcome:?} for {index}") };
            assert_eq!((info.len, info.flags), (lens[index] as u64, index as u32));
            Pattern(index as u64).check(0, &buffer[..lens[index]], "in flight");
        };
        for (index, len) in lens.iter().copied().enumerate() {
            for is_get in [false, true] {
                if is_get {
                    client.submit_get(format!("k{}", index % 7)).unwrap();
                } else {
                    let octets = Octets::new(index as u64, len);
                    client.submit_set(format!("k{}", index % 7), octets, len as u64, index as u32, None).unwrap();
                }
                waiting.push_back((index, is_get));
                while waiting.len() >= depth {
                    settle(&mut client, waiting.pop_front().unwrap());
                }
            }
        }
        while let Some(next) = waiting.pop_front() {
            settle(&mut client, next);
        }
        assert_eq!(client.pending_count(), 0);
    }
    assert!(server.watch.overlap.load(Ordering::SeqCst) > 1, "requests did overlap");
    assert_eq!(server.count(), 5);
}

#[test]
fn a_refused_set_leaves_the_pipeline_as_it_was() {
    for key in ["refused-early", "refused-late"] {
        let server = Server::looped(Nature::default());
        let mut client = server.client(Options::default());
        client.submit_set("before", &b"abc"[..], 3, 0, None).unwrap();
        client.submit_set(key, Octets::new(1, 3 << 20), 3 << 20, 0, None).unwrap();
        client.submit_get("before").unwrap();
        client.submit_delete("none").unwrap();
        let mut written = Vec::new();
        assert_eq!(client.wait(&mut written).unwrap(), Outcome::Stored);
        let refused = client.wait(&mut written).unwrap_err();
        assert!(matches!(&refused, ClientError::Refused { reply } if reply.contains("out of memory")), "{refused}");
        assert!(matches!(client.wait(&mut written).unwrap(), Outcome::Value(_)));
        assert_eq!(client.wait(&mut written).unwrap(), Outcome::Miss);
        assert_eq!(written, b"abc");
        assert_eq!(server.count(), 1, "{key}");
        let refused = client.put(key, &mut Octets::new(1, 8 << 20), 8 << 20, 0, None).unwrap_err();
        assert_eq!(refused.exit_code(), Exit::Refused);
        assert!(client.exists("before").unwrap());
    }
}

#[test]
fn a_value_too_long_for_its_buffer_is_an_error_of_that_request_alone() {
    let server = Server::looped(Nature::default());
    let mut client = server.client(Options::default());
    client.put("long", &mut Octets::new(3, 1 << 20), 1 << 20, 0, None).unwrap();
    client.put("short", &mut &b"abc"[..], 3, 0, None).unwrap();
    client.submit_get("long").unwrap();
    client.submit_get("short").unwrap();
    let mut buffer = [0; 8];
    let too_long = client.wait_into(&mut buffer).unwrap_err();
    assert!(matches!(too_long, ClientError::TooLong { len: 1_048_576, capacity: 8 }));
    assert!(matches!(client.wait_into(&mut buffer).unwrap(), Outcome::Value(info) if info.len == 3));
    assert_eq!((&buffer[..3], server.count()), (&b"abc"[..], 1));
    // Alone, a new connection is cheaper than the rest of the value.
    assert!(matches!(client.get_into("long", &mut buffer), Err(ClientError::TooLong { .. })));
    assert!(matches!(client.get_into("short", &mut buffer), Ok(Some(_))));
    assert_eq!(server.count(), 2);
}

#[test]
fn a_reader_or_writer_that_fails_ends_the_connection_and_stores_nothing() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let server = Server::looped(Nature::default());
    let mut client = server.client(Options::default());
    let short = client.put("k", &mut Octets::new(1, 700_000), 700_001, 0, None).unwrap_err();
    assert!(
        matches!(&short, ClientError::Local { source } if source.kind() == io::ErrorKind::UnexpectedEof),
        "{short}"
    );
    assert_eq!(client.stat("k").unwrap(), None);
    client.put("k", &mut Octets::new(1, 700_000), 700_000, 0, None).unwrap();
    assert!(matches!(client.get("k", &mut Full), Err(ClientError::Local { .. })));
    assert_eq!(client.get("k", &mut io::sink()).unwrap().map(|info| info.len), Some(700_000));
    assert_eq!(server.count(), 3);
}

#[test]
fn a_slow_caller_is_no_slow_server() {
    const TIMEOUT: Duration = Duration::from_millis(300);
    const PAUSE: Duration = Duration::from_millis(400);
    struct Slow<T>(T);
    impl Read for Slow<Octets> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            std::thread::sleep(PAUSE);
            self.0.read(into)
        }
    }
    impl Write for Slow<Vec<u8>> {
        fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
            std::thread::sleep(PAUSE);
            self.0.write(octets)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let server = Server::looped(Nature { geometry: geometry(4, 4096, 2), ..Nature::default() });
    let mut client = server.client(Options { io_timeout: TIMEOUT, ..with(geometry(2, 4096, 1)) });
    client.put("k", &mut Slow(Octets::new(2, 16_000)), 16_000, 0, None).unwrap();
    let mut written = Slow(Vec::new());
    client.submit_get("k").unwrap();
    std::thread::sleep(PAUSE);
    client.wait(&mut written).unwrap();
    Pattern(2).check(0, &written.0, "slowly");
    assert_eq!((written.0.len(), server.count()), (16_000, 1));
}

#[test]
fn a_server_that_vanishes_or_falls_silent_is_lost_and_the_next_call_connects_anew() {
    let server = Server::looped(Nature::default());
    let mut client = server.client(Options { io_timeout: Duration::from_millis(300), ..Options::default() });
    let mut buffer = [0; 8];
    for key in ["vanish", "silent"] {
        client.submit_get("none").unwrap();
        client.submit_get(key).unwrap();
        client.submit_get("none").unwrap();
        let first = client.wait_into(&mut buffer);
        assert!(matches!(first, Ok(Outcome::Miss) | Err(ClientError::Lost { .. })), "{first:?}");
        if first.is_ok() {
            let lost = client.wait_into(&mut buffer).unwrap_err();
            assert_eq!(lost.exit_code(), Exit::Unavailable, "{lost}");
        }
        assert_eq!(client.pending_count(), 0);
        assert!(matches!(client.wait_into(&mut buffer), Err(ClientError::Local { .. })));
        assert_eq!(client.get_into("none", &mut buffer).unwrap(), None);
    }
    let lost = client.put("vanish", &mut Octets::new(1, 8 << 20), 8 << 20, 0, None).unwrap_err();
    assert!(matches!(lost, ClientError::Lost { .. }), "{lost}");
    assert_eq!(server.count(), 3, "the last loss was not repaired yet");
    let lost = client.get_into("vanish", &mut buffer).unwrap_err();
    assert!(matches!(lost, ClientError::Lost { .. }), "{lost}");
    drop(server);
    assert_eq!(client.version().unwrap_err().exit_code(), Exit::Unavailable);
}

#[test]
fn what_is_no_answer_and_no_descriptor_is_a_protocol_error() {
    let server = Server::looped(Nature::default());
    let mut client = server.client(Options::default());
    assert_eq!(client.get_into("garbage", &mut []).unwrap_err().exit_code(), Exit::Protocol);
    assert_eq!(client.version().unwrap(), "small 1");
    let mute = Server::looped(Nature { is_mute: true, ..Nature::default() });
    let error = NativeClient::over(Arc::clone(&mute.fabric), mute.address.clone(), Options::default()).unwrap_err();
    assert_eq!(error.exit_code(), Exit::Protocol, "{error}");
    let nobody = Address::Name("nobody".to_owned());
    let error = NativeClient::over(Arc::clone(&mute.fabric), nobody, Options::default()).unwrap_err();
    assert_eq!(error.exit_code(), Exit::Unavailable, "{error}");
    let odd = with(geometry(2, 5000, 1));
    let error = NativeClient::over(Arc::clone(&mute.fabric), mute.address.clone(), odd).unwrap_err();
    assert!(matches!(error, ClientError::Local { .. }), "{error}");
}

#[test]
fn a_server_that_is_no_bulkhead_is_asked_one_thing_at_a_time() {
    for nonce in [Nonce(0x1234), Nonce::ours(1)] {
        let server = Server::looped(Nature { nonce, is_fragile: true, ..Nature::default() });
        let mut client = server.client(Options { io_timeout: Duration::from_secs(2), ..Options::default() });
        let mut submit = || -> Result<(), ClientError> {
            for index in 0..40_u64 {
                let len = [0, 1, 300_000][index as usize % 3];
                client.submit_set("k", Octets::new(index, len), len as u64, 0, None)?;
                client.submit_get("k")?;
            }
            for index in 0..40_u64 {
                assert_eq!(client.wait(&mut io::sink())?, Outcome::Stored);
                let mut written = Vec::new();
                client.wait(&mut written)?;
                Pattern(index).check(0, &written, "one at a time");
            }
            Ok(())
        };
        let submitted = submit();
        if nonce.is_ours() {
            // The server does punish those who pipeline: without that this test would prove nothing.
            assert!(matches!(submitted, Err(ClientError::Lost { .. })), "{submitted:?}");
        } else {
            submitted.unwrap();
            assert!(!server.watch.hung.load(Ordering::SeqCst));
            assert_eq!(server.count(), 1);
        }
    }
}

#[test]
fn tasks_share_one_connection_and_their_requests_overlap() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Server::looped(Nature { geometry: geometry(16, 8192, 3), ..Nature::default() });
    runtime.block_on(async {
        let options = with(geometry(8, 4096, 4));
        let client = AsyncClient::over(Arc::clone(&server.fabric), server.address.clone(), options).await.unwrap();
        let tasks: Vec<_> = (0..100_u64)
            .map(|index| {
                let client = client.clone();
                tokio::spawn(async move {
                    let (key, len) = (format!("k{index}"), SIZES[index as usize % 9]);
                    assert!(client.get(&key).await.unwrap().is_none());
                    client.put(&key, Pattern(index).octets(0, len), 5, None).await.unwrap();
                    let (info, octets) = client.get(&key).await.unwrap().unwrap();
                    assert_eq!((info.len, info.flags, octets.len()), (len as u64, 5, len));
                    Pattern(index).check(0, &octets, "task");
                    let (found, buffer) = client.get_into(&key, vec![0; len]).await.unwrap();
                    assert_eq!(found.unwrap(), Some(info));
                    Pattern(index).check(0, &buffer, "task's buffer");
                    if len > 0 {
                        let (found, _) = client.get_into(&key, vec![0; len - 1]).await.unwrap();
                        assert!(matches!(found, Err(ClientError::TooLong { .. })));
                    }
                    assert!(client.delete(&key).await.unwrap());
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(server.count(), 1);
        assert!(server.watch.overlap.load(Ordering::SeqCst) > 1);
        let refused = client.put("refused-early", vec![1; 100_000], 0, None).await.unwrap_err();
        assert!(matches!(refused, ClientError::Refused { .. }));
        let lost = client.get("vanish").await.unwrap_err();
        assert!(matches!(lost, ClientError::Lost { .. }), "{lost}");
        assert!(matches!(client.get("k").await, Err(ClientError::Lost { .. })));
    });
}

fn run(url: &str, args: &[&str], input: &[u8]) -> Output {
    let mut child = Program::new(env!("CARGO_BIN_EXE_bulkhead"))
        .args(args)
        .env("BULKHEAD_SERVER", url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // A command that fails early closes its end.
        scope.spawn(move || stdin.write_all(input));
        child.wait_with_output().unwrap()
    })
}

#[test]
fn the_commands_work_over_iwarp() {
    let server = Server::iwarp();
    let url = format!("native+iwarp://{}", server.address);
    let value = Pattern(5).octets(0, 700_001);
    let done = |args: &[&str], input: &[u8]| {
        let output = run(&url, args, input);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let code = |args: &[&str]| run(&url, args, b"").status.code().unwrap();
    done(&["put", "k", "-", "--flags", "3"], &value);
    done(&["put", "streamed", "-", "--size", "700001"], &value);
    assert!(done(&["get", "k"], b"") == value);
    assert!(done(&["get", "streamed"], b"") == value);
    let stat: serde_json::Value = serde_json::from_slice(&done(&["stat", "k", "--json"], b"")).unwrap();
    assert_eq!((stat["len_bytes"].as_u64(), stat["flags"].as_u64()), (Some(700_001), Some(3)));
    assert!(String::from_utf8(done(&["stats"], b"")).unwrap().contains("curr_items 2"));
    done(&["rm", "k"], b"");
    assert_eq!((code(&["get", "k"]), code(&["rm", "k"]), code(&["stat", "k"])), (1, 1, 1));
    assert_eq!(code(&["put", "refused-late", "/etc/hostname"]), 1);
    assert_eq!(code(&["get", "garbage"]), 76);
    drop(server);
    assert_eq!(code(&["get", "k"]), 69);
}

#[test]
fn bench_drives_a_native_server_at_any_depth() {
    let server = Server::iwarp();
    let url = format!("native+iwarp://{}", server.address);
    for (op, connections, depth) in [("get", "1", "1"), ("get", "2", "8"), ("set", "2", "4")] {
        let args = ["bench", "--op", op, "--connections", connections, "--depth", depth];
        let rest = ["--size", "1..40000", "--seconds", "300ms", "--keys", "5", "--json", "--verify"];
        let output = run(&url, &[&args[..], &rest[..]].concat(), b"");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["operations"].as_u64() > Some(0), "{report}");
        for none in ["errors", "misses", "corrupt"] {
            assert_eq!(report[none].as_u64(), Some(0), "{none}: {report}");
        }
        assert_eq!(report["server"].as_str(), Some(url.as_str()));
    }
}
