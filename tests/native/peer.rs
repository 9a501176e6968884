//! A client of the native door for tests: a whole `Endpoint` over a fabric, driven by whoever waits for its answers.

use bulkhead::fabric::{
    self, Access, Address, Attributes, Cause, Event, Fabric, Flags, LocalBuf, MemoryRegion, QueuePair, SharedSpan,
    Source, Status, Work,
};
use bulkhead::wire::native::descriptor::{Descriptor, Nonce, RemoteAddress, RingGeometry, WindowGeometry};
use bulkhead::wire::native::egress::{Post, WorkId};
use bulkhead::wire::native::endpoint::{EndCause, Endpoint, Settings};
use bulkhead::wire::native::requester::{Answer, Requester, Shape};
use bulkhead::wire::native::ring::{RingMemory, SlotWrite};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a peer waits for anything: the limit only turns a hang into a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The control region.
pub struct Ring(pub SharedSpan);

impl RingMemory for Ring {
    fn load(&self, offset: usize) -> u64 {
        self.0.load_u64_acquire(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.0.store_u64_release(offset, word);
    }
}

/// A whole answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answered {
    Line(String),
    /// Key, flags and octets of each value.
    Values(Vec<(String, u32, Vec<u8>)>),
}

/// Ring slots, window octets, windows.
pub type Geometry = (u32, u64, u32);

/// One connection.
pub struct Peer {
    /// What the server told of itself.
    #[allow(dead_code, reason = "for who looks at single Writes")]
    pub server: Descriptor,
    pub lane: Arc<dyn fabric::Lane>,
    pub qp: Box<dyn QueuePair>,
    pub endpoint: Endpoint<Arc<Vec<u8>>, Requester>,
    pub answers: VecDeque<Answered>,
    pub ended: Option<String>,
    /// It looks at nothing that the server sends, and so releases nothing.
    pub is_deaf: bool,
    ring: Ring,
    rx: SharedSpan,
    bufs: Vec<Option<LocalBuf>>,
    sink: Option<LocalBuf>,
    works: Vec<Work>,
    expected: VecDeque<WorkId>,
    values: Vec<(String, u32, Vec<u8>)>,
    started: Instant,
    _regions: [MemoryRegion; 2],
}

/// What a dial came to.
pub enum Dialled {
    Connected(Box<Peer>),
    /// The private data of a rejection.
    Rejected(Vec<u8>),
    Failed(Cause),
}

impl Peer {
    pub async fn connect(fabric: &dyn Fabric, address: &Address, geometry: Geometry) -> Self {
        match Self::dial(fabric, address, geometry, |_| {}).await {
            Dialled::Connected(peer) => *peer,
            Dialled::Rejected(why) => panic!("rejected: {}", why.escape_ascii()),
            Dialled::Failed(cause) => panic!("not connected: {cause}"),
        }
    }

    /// `change` has the last word on the descriptor's octets.
    pub async fn dial(
        fabric: &dyn Fabric,
        address: &Address,
        geometry: Geometry,
        change: impl FnOnce(&mut Vec<u8>),
    ) -> Dialled {
        let (slots, window_bytes, window_count) = geometry;
        let (ring, windows) =
            (RingGeometry::new(slots).unwrap(), WindowGeometry::new(window_bytes, window_count).unwrap());
        let lane = fabric.lane().unwrap();
        let qp = lane.dial(address, Attributes::default()).unwrap();
        let ring_bytes = ring.mapping_bytes(4096);
        let own_ring = SharedSpan::new(ring_bytes as usize).unwrap();
        let rx = SharedSpan::new(windows.half_bytes() as usize).unwrap();
        let ring_region = qp.register(own_ring.clone(), Access::BOTH).unwrap();
        let rx_region = qp.register(rx.clone(), Access::WRITE).unwrap();
        let at = |region: &MemoryRegion, address| RemoteAddress { address, key: region.key() };
        let own = Descriptor {
            ring,
            ring_at: at(&ring_region, ring_region.remote().address),
            ring_bytes: ring_bytes as u32,
            nonce: Nonce::ours(7),
            windows,
            bulk_at: at(&rx_region, windows.bulk_address(rx_region.remote().address).unwrap()),
        };
        let bufs = qp.allocate(window_bytes as usize, window_count as usize).unwrap();
        let sink = qp.allocate(4096, 1).unwrap().pop();
        let mut private_data = own.encode().to_vec();
        change(&mut private_data);
        qp.establish(&private_data).unwrap();
        let started = Instant::now();
        let mut events = Vec::new();
        let server = loop {
            assert!(started.elapsed() < PATIENCE, "no answer to a dial");
            lane.progress(Instant::now(), &mut events, 1);
            match events.pop() {
                Some(Event::Established { private_data, .. }) => break Descriptor::decode(&private_data).unwrap(),
                Some(Event::Rejected { private_data, .. }) => return Dialled::Rejected(private_data),
                Some(Event::Disconnected { cause, .. }) => return Dialled::Failed(cause),
                _ => tokio::time::sleep(Duration::from_micros(200)).await,
            }
        };
        let settings = Settings {
            own,
            peer: server,
            queue_depth: 512,
            pipeline_bytes_max: 1 << 20,
            stall_timeout: Duration::from_secs(30),
        };
        Dialled::Connected(Box::new(Self {
            server,
            lane,
            qp,
            endpoint: Endpoint::new(settings, Requester::new(!server.nonce.is_ours())),
            answers: VecDeque::new(),
            ended: None,
            is_deaf: false,
            ring: Ring(own_ring),
            rx,
            bufs: bufs.into_iter().map(Some).collect(),
            sink,
            works: Vec::new(),
            expected: VecDeque::new(),
            values: Vec::new(),
            started,
            _regions: [ring_region, rx_region],
        }))
    }

    pub fn ask(&mut self, line: &str, shape: Shape) {
        self.endpoint.ask(line.as_bytes(), shape);
    }

    pub fn set(&mut self, key: &str, flags: u32, value: &Arc<Vec<u8>>) {
        let line = format!("set {key} {flags} 0 {}\r\n", value.len());
        self.endpoint.ask_store(line.as_bytes(), value.clone(), value.len() as u64);
    }

    pub fn get(&mut self, keys: &str) {
        self.ask(&format!("get {keys}\r\n"), Shape::Values);
    }

    /// Records of the server that were read.
    #[allow(dead_code, reason = "for who looks at single Writes")]
    pub fn consumed(&self) -> usize {
        self.ring.load(0) as usize
    }

    /// One turn. True if something moved.
    pub fn turn(&mut self) -> bool {
        if self.ended.is_some() {
            return false;
        }
        match self.try_turn() {
            Ok(moved) => moved,
            Err(end) => panic!("the server broke the protocol: {end}"),
        }
    }

    fn try_turn(&mut self) -> Result<bool, EndCause> {
        let now = self.started.elapsed();
        let mut events = Vec::new();
        let mut moved = self.lane.progress(Instant::now(), &mut events, 32);
        for event in events {
            moved = true;
            match event {
                Event::Completed { completion, .. } if completion.status == Status::Done => {
                    let id = self.expected.pop_front().expect("something was posted");
                    let mut counter = 0;
                    if let Some(buf) = completion.buf {
                        if completion.kind == fabric::WorkKind::Read {
                            counter = u64::from_le_bytes(*buf.as_slice().first_chunk().unwrap());
                            self.sink = Some(buf);
                        } else {
                            let index = buf.index();
                            self.bufs[index] = Some(buf);
                        }
                    }
                    self.endpoint.handle_completion(id, || counter, now)?;
                }
                Event::Disconnected { cause, .. } => {
                    self.ended = Some(cause.to_string());
                    // What the server wrote before it left lies in memory.
                    if !self.is_deaf {
                        self.endpoint.poll_ring(&self.ring, now, 256)?;
                        while self.step()? {}
                    }
                    self.endpoint.handle_disconnected();
                    return Ok(true);
                }
                _ => {}
            }
        }
        moved |= !self.is_deaf && self.endpoint.poll_ring(&self.ring, now, 256)? > 0;
        while self.step()? {
            moved = true;
        }
        while let Some(grant) = self.endpoint.poll_fill() {
            let piece = grant.source;
            let octets = &piece.value[piece.offset as usize..][..piece.len as usize];
            let buf = self.bufs[grant.slot as usize].as_mut().expect("a granted slot is here");
            buf.as_mut_slice()[..octets.len()].copy_from_slice(octets);
            self.endpoint.handle_filled(grant.ticket);
            moved = true;
        }
        while let Some(post) = self.endpoint.poll_post(now)? {
            self.translate(post);
            moved = true;
        }
        if !self.works.is_empty() && self.qp.post(&mut self.works).is_ok() {
            self.qp.kick();
        }
        Ok(moved)
    }

    fn translate(&mut self, post: Post) {
        let control = |to: RemoteAddress, write: &SlotWrite, signaled| Work::Write {
            from: Source::Inline(write.octets().to_vec()),
            key: to.key,
            address: to.address,
            flags: Flags { signaled, ..Flags::default() },
        };
        match post {
            Post::Control { id, to, write, signaled } => {
                self.works.push(control(to, &write, signaled));
                if signaled {
                    self.expected.push_back(id);
                }
            }
            Post::Body { id, slot, len, to, ready_to, ready, .. } => {
                let buf = self.bufs[slot as usize].take().expect("a filled slot is here");
                let from = Source::Buffer { buf, range: 0..len as usize };
                let key = to.key;
                self.works.push(Work::Write { from, key, address: to.address, flags: Flags::SIGNALED });
                self.works.push(control(ready_to, &ready, false));
                self.expected.push_back(id);
            }
            Post::Credits { id, from } => {
                let into = self.sink.take().expect("one Read at a time");
                let (key, address) = (from.key, from.address);
                self.works.push(Work::Read { into, range: 0..8, key, address, flags: Flags::SIGNALED });
                self.expected.push_back(id);
            }
        }
    }

    fn step(&mut self) -> Result<bool, EndCause> {
        match self.endpoint.machine.step(&mut self.endpoint.inbound)? {
            Answer::NeedMore => return Ok(false),
            Answer::Line(line) => {
                let line = String::from_utf8(line.to_vec()).unwrap();
                self.answers.push_back(Answered::Line(line));
            }
            Answer::Value { key, flags, len, .. } => {
                let key = String::from_utf8(key.to_vec()).unwrap();
                self.values.push((key, flags, Vec::with_capacity(len as usize)));
            }
            Answer::Body { len, .. } => {
                let lease = self.endpoint.take_body();
                let octets = &mut self.values.last_mut().unwrap().2;
                let before = octets.len();
                octets.resize(before + len as usize, 0);
                self.rx.copy_out(lease.offset() as usize, &mut octets[before..]);
            }
            Answer::ValueEnd | Answer::Stat(_) => {}
            Answer::End => self.answers.push_back(Answered::Values(std::mem::take(&mut self.values))),
        }
        Ok(true)
    }

    /// Takes turns until `count` answers have come, and takes them.
    pub async fn answers(&mut self, count: usize) -> Vec<Answered> {
        let start = Instant::now();
        while self.answers.len() < count {
            let state = (self.answers.len(), &self.ended);
            assert!(start.elapsed() < PATIENCE && self.ended.is_none(), "{state:?} of {count} answers");
            if self.turn() {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_micros(200)).await;
            }
        }
        self.answers.drain(..count).collect()
    }

    pub async fn answer(&mut self) -> Answered {
        self.answers(1).await.remove(0)
    }

    /// Takes turns until the connection has ended, and says why.
    pub async fn end(&mut self) -> String {
        let start = Instant::now();
        while self.ended.is_none() {
            assert!(start.elapsed() < PATIENCE, "the connection goes on");
            self.turn();
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        self.ended.clone().unwrap()
    }
}

pub fn line(text: &str) -> Answered {
    Answered::Line(text.to_owned())
}

/// As `assert_eq`, without showing all octets.
#[track_caller]
pub fn assert_value(found: Answered, key: &str, flags: u32, octets: &[u8]) {
    let Answered::Values(values) = found else { panic!("{found:?} for {key}") };
    let heads: Vec<_> = values.iter().map(|(key, flags, octets)| (key.as_str(), *flags, octets.len())).collect();
    assert_eq!(heads, [(key, flags, octets.len())]);
    assert!(values[0].2 == octets, "octets of {key}");
}
