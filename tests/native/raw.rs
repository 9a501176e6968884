//! Peers of the native door without manners: one puts any Write it likes on a queue pair, the other any octet on a socket.

use bulkhead::fabric::{
    Access, Address, Attributes, Cause, Event, Flags, Lane, MemoryRegion, QueuePair, SharedSpan, Source, Work,
};
use bulkhead::wire::iwarp::ddp::Tagged;
use bulkhead::wire::iwarp::mpa::{self, ConnectionWord, Frame, FrameKind};
use bulkhead::wire::iwarp::rdmap::Operation;
use bulkhead::wire::native::descriptor::{Descriptor, Nonce, RemoteAddress, RemoteKey, RingGeometry, WindowGeometry};
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::ring::{CommitWord, ControlRing, RECORD_BYTES_MAX, RingMemory, SLOT_BYTES, SLOTS_OFFSET};
use bulkhead::wire::seq::{BulkSequence, ControlSequence};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The limit only turns a hang into a failure.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Ring slots, window octets, windows.
pub type Geometry = (u32, u64, u32);

struct Ring(SharedSpan);

impl RingMemory for Ring {
    fn load(&self, offset: usize) -> u64 {
        self.0.load_u64_acquire(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.0.store_u64_release(offset, word);
    }
}

/// Our descriptor, with memory at `ring_at` and `rx_at`.
fn described(geometry: Geometry, ring_at: RemoteAddress, rx_at: RemoteAddress) -> Descriptor {
    let (ring, windows) =
        (RingGeometry::new(geometry.0).unwrap(), WindowGeometry::new(geometry.1, geometry.2).unwrap());
    let bulk_at = RemoteAddress { address: windows.bulk_address(rx_at.address).unwrap(), key: rx_at.key };
    let ring_bytes = ring.mapping_bytes(4096) as u32;
    Descriptor { ring, ring_at, ring_bytes, nonce: Nonce::ours(7), windows, bulk_at }
}

/// Octets of `record` and where they go in the ring of `server`, as control record `sequence`.
pub fn framed(server: &Descriptor, record: &[u8], sequence: ControlSequence) -> (u64, Vec<u8>) {
    assert!(record.len() <= RECORD_BYTES_MAX);
    let slot = sequence.slot_index(server.ring.slot_count()) as usize * SLOT_BYTES;
    let at = SLOTS_OFFSET + slot + SLOT_BYTES - 8 - record.len();
    let word = CommitWord::new(sequence, record.len() as u8).word();
    (at as u64, [record, &word.to_le_bytes()].concat())
}

/// A connection on which only the fabric's own manners are kept.
pub struct Raw {
    lane: Arc<dyn Lane>,
    pub qp: Box<dyn QueuePair>,
    pub server: Descriptor,
    pub ended: Option<Cause>,
    ring: Ring,
    reader: ControlRing,
    /// Records the server has sent.
    pub records: Vec<Vec<u8>>,
    next: ControlSequence,
    bulk: BulkSequence,
    _regions: [MemoryRegion; 2],
}

impl Raw {
    pub fn connect(lane: &Arc<dyn Lane>, address: SocketAddr, geometry: Geometry) -> Self {
        let qp = lane.dial(&Address::Socket(address), Attributes::default()).unwrap();
        let ring = RingGeometry::new(geometry.0).unwrap();
        let ring_span = SharedSpan::new(ring.mapping_bytes(4096) as usize).unwrap();
        let rx = SharedSpan::new(geometry.1 as usize * geometry.2 as usize).unwrap();
        let ring_region = qp.register(ring_span.clone(), Access::BOTH).unwrap();
        let rx_region = qp.register(rx, Access::WRITE).unwrap();
        let at = |region: &MemoryRegion| RemoteAddress { address: region.remote().address, key: region.key() };
        let own = described(geometry, at(&ring_region), at(&rx_region));
        qp.establish(&own.encode()).unwrap();
        let (start, mut events) = (Instant::now(), Vec::new());
        let server = loop {
            lane.progress(Instant::now(), &mut events, 8);
            let mine = events.drain(..).find(|event| event.qp() == Some(qp.number()));
            match mine {
                Some(Event::Established { private_data, .. }) => break Descriptor::decode(&private_data).unwrap(),
                Some(event) => panic!("not connected: {event:?}"),
                None => assert!(start.elapsed() < PATIENCE, "no answer to a dial"),
            }
            std::thread::yield_now();
        };
        Self {
            lane: Arc::clone(lane),
            qp,
            server,
            ended: None,
            ring: Ring(ring_span),
            reader: ControlRing::new(geometry.0),
            records: Vec::new(),
            next: ControlSequence::FIRST,
            bulk: BulkSequence::FIRST,
            _regions: [ring_region, rx_region],
        }
    }

    /// One look at the fabric and at the own ring. What has come is consumed.
    pub fn turn(&mut self) {
        self.turn_deaf();
        while let Ok(Some(copy)) = self.reader.poll(&self.ring) {
            self.records.push(copy.octets().to_vec());
            self.reader.consume(&self.ring);
        }
    }

    /// One look at the fabric alone.
    pub fn turn_deaf(&mut self) {
        let mut events = Vec::new();
        self.lane.progress(Instant::now(), &mut events, 64);
        for event in events {
            if event.qp() == Some(self.qp.number())
                && let Event::Disconnected { cause, .. } = event
            {
                self.ended = Some(cause);
            }
        }
        std::thread::yield_now();
    }

    /// Turns until `enough`, or the end, or `limit` has passed. True if it was enough.
    pub fn until(&mut self, limit: Duration, mut enough: impl FnMut(&Self) -> bool) -> bool {
        let start = Instant::now();
        loop {
            self.turn();
            if enough(self) {
                return true;
            }
            if self.ended.is_some() || start.elapsed() > limit {
                return false;
            }
        }
    }

    /// Waits for `count` records of the server.
    pub fn await_records(&mut self, count: usize) {
        let came = self.until(PATIENCE, |raw| raw.records.len() >= count);
        assert!(came, "{} of {count} records: {:?}", self.records.len(), self.ended);
    }

    /// Texts of the INLINE records so far.
    pub fn text(&self) -> String {
        let inline = self.records.iter().filter_map(|record| match Record::decode(record) {
            Ok(Record::Inline(text)) => Some(String::from_utf8_lossy(text).into_owned()),
            _ => None,
        });
        inline.collect()
    }

    /// Waits for the end.
    pub fn end(&mut self) -> Cause {
        self.until(PATIENCE, |raw| raw.ended.is_some());
        self.ended.clone().expect("the server does not end the connection")
    }

    /// Waits for the end, and consumes nothing.
    pub fn end_deaf(&mut self) -> Cause {
        let start = Instant::now();
        while self.ended.is_none() {
            self.turn_deaf();
            assert!(start.elapsed() < PATIENCE, "the server does not end the connection");
        }
        self.end()
    }

    /// The consumed counter that the server Reads.
    pub fn claim_consumed(&self, count: u64) {
        self.ring.store(0, count);
    }

    pub fn post(&mut self, work: Work) {
        let mut works = vec![work];
        let start = Instant::now();
        while self.ended.is_none() && self.qp.post(&mut works).is_err() {
            self.turn_deaf();
            assert!(start.elapsed() < PATIENCE, "a request cannot be posted");
        }
        self.qp.kick();
    }

    /// Any octets to any place.
    pub fn write(&mut self, key: RemoteKey, address: u64, octets: &[u8]) {
        let from = if octets.len() <= self.qp.attributes().inline_bytes_max {
            Source::Inline(octets.to_vec())
        } else {
            let mut buf = self.qp.allocate(octets.len(), 1).unwrap().remove(0);
            buf.as_mut_slice()[..octets.len()].copy_from_slice(octets);
            Source::Buffer { buf, range: 0..octets.len() }
        };
        self.post(Work::Write { from, key, address, flags: Flags::default() });
    }

    pub fn write_ring(&mut self, offset: u64, octets: &[u8]) {
        let RemoteAddress { address, key } = self.server.ring_at;
        self.write(key, address + offset, octets);
    }

    /// The next control record, whatever it is.
    pub fn control(&mut self, record: &[u8]) {
        let (offset, octets) = framed(&self.server, record, self.next);
        self.next = self.next.next().unwrap();
        self.write_ring(offset, &octets);
    }

    pub fn record(&mut self, record: &Record<'_>) {
        let mut octets = [0; RECORD_BYTES_MAX];
        let len = record.encode(&mut octets);
        self.control(&octets[..len]);
    }

    pub fn inline(&mut self, text: &str) {
        text.as_bytes().chunks(191).for_each(|part| self.record(&Record::Inline(part)));
    }

    /// A fragment of `octets` in the next window.
    pub fn body(&mut self, octets: &[u8]) {
        let RemoteAddress { address, key } = self.server.window_at(self.bulk);
        self.write(key, address, octets);
        self.ready(octets.len() as u32);
    }

    /// READY of the next window, whatever is in it.
    pub fn ready(&mut self, len: u32) {
        self.record(&Record::Ready { sequence: self.bulk, len: NonZeroU32::new(len).unwrap() });
        self.bulk = self.bulk.next().unwrap();
    }

    pub fn release(&mut self, sequence: u64) {
        self.record(&Record::Release { sequence: BulkSequence::new(sequence).unwrap() });
    }
}

/// A plain socket that says what it is told.
pub struct Wire {
    pub stream: TcpStream,
    pub server: Option<Descriptor>,
    crc: bool,
    next: ControlSequence,
}

impl Wire {
    /// TCP alone.
    pub fn dial(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { stream, server: None, crc: true, next: ControlSequence::FIRST }
    }

    /// A Request with our descriptor. The memory it speaks of is nowhere: what the server writes is read and dropped.
    pub fn request(geometry: Geometry, crc: bool) -> Frame {
        let at = |address, key| RemoteAddress { address, key: RemoteKey(key) };
        let own = described(geometry, at(1 << 33, 7), at(1 << 34, 8));
        let word =
            ConnectionWord { peer_to_peer: true, rtr_write: true, ird: 16, ord: 16, ..ConnectionWord::default() };
        let private_data = own.encode().to_vec();
        Frame { revision: 2, markers: false, crc, rejected: false, word: Some(word), private_data }
    }

    /// The answer to a Request. `None` if there is none.
    pub fn reply(&mut self) -> Option<Frame> {
        let mut octets = Vec::new();
        loop {
            let mut octet = [0];
            match self.stream.read(&mut octet) {
                Ok(1) => octets.push(octet[0]),
                _ => return None,
            }
            if let Some((reply, _)) = Frame::decode(FrameKind::Reply, &octets).ok()? {
                self.crc = reply.crc;
                self.server = Descriptor::decode(&reply.private_data).ok();
                return Some(reply);
            }
        }
    }

    /// Connected, and the ready-to-receive frame sent.
    pub fn connect(address: SocketAddr, geometry: Geometry, crc: bool) -> Self {
        let mut wire = Self::dial(address);
        wire.say(&Self::request(geometry, crc).encode(FrameKind::Request));
        let reply = wire.reply().expect("a Reply");
        assert!(!reply.rejected, "rejected: {}", reply.private_data.escape_ascii());
        let ready = wire.fpdu(1, 0, b"");
        wire.say(&ready);
        wire
    }

    pub fn say(&mut self, octets: &[u8]) {
        self.stream.write_all(octets).unwrap();
    }

    pub fn fpdu(&self, key: u32, address: u64, octets: &[u8]) -> Vec<u8> {
        let header = Tagged { last: true, control: Operation::Write.control(), stag: key, offset: address };
        let mut out = Vec::new();
        mpa::put_fpdu(&mut out, &header.encode(), octets, self.crc);
        out
    }

    /// The octets on the stream of the next control record.
    pub fn control(&mut self, record: &Record<'_>) -> Vec<u8> {
        let server = self.server.expect("connected");
        let mut encoded = [0; RECORD_BYTES_MAX];
        let len = record.encode(&mut encoded);
        let (offset, octets) = framed(&server, &encoded[..len], self.next);
        self.next = self.next.next().unwrap();
        self.fpdu(server.ring_at.key.0, server.ring_at.address + offset, &octets)
    }

    pub fn inline(&mut self, text: &str) -> Vec<u8> {
        text.as_bytes().chunks(191).flat_map(|part| self.control(&Record::Inline(part))).collect()
    }

    /// A fragment of `octets`, in frames that fit, and its READY.
    pub fn body(&mut self, sequence: u64, octets: &[u8]) -> Vec<u8> {
        let sequence = BulkSequence::new(sequence).unwrap();
        let RemoteAddress { address, key } = self.server.expect("connected").window_at(sequence);
        let mut out = Vec::new();
        for (index, part) in octets.chunks(32 << 10).enumerate() {
            out.extend(self.fpdu(key.0, address + (index as u64) * (32 << 10), part));
        }
        let len = NonZeroU32::new(octets.len() as u32).unwrap();
        out.extend(self.control(&Record::Ready { sequence, len }));
        out
    }

    /// Reads until `count` octets came, the end, or `limit`. The count of what came.
    pub fn hear(&mut self, count: usize, limit: Duration) -> usize {
        let (start, mut heard, mut octets) = (Instant::now(), 0, [0; 16 << 10]);
        while heard < count {
            let Some(rest) = limit.checked_sub(start.elapsed()).filter(|rest| !rest.is_zero()) else { break };
            self.stream.set_read_timeout(Some(rest)).unwrap();
            match self.stream.read(&mut octets) {
                Ok(0) => break,
                Ok(len) => heard += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        heard
    }

    /// Reads to the end.
    ///
    /// # Panics
    /// If it does not come.
    pub fn hear_the_end(&mut self) {
        self.stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut octets = [0; 16 << 10];
        loop {
            match self.stream.read(&mut octets) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    panic!("the server does not close")
                }
                Err(_) => return,
            }
        }
    }

    /// The socket is closed with a reset.
    pub fn reset(self) {
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
    }
}
