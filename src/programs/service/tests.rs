//! A service whose peer's memory is a table, and whose owner does at once, or not, what it is told.

mod nfs;

use super::*;
use crate::programs::bulkhead::answer::Expectation;
use crate::programs::bulkhead::request::{GetRequest, Key, RangeOf, Request, StatRequest};
use crate::programs::bulkhead::rig::{self, put, store};
use crate::programs::bulkhead::{Answer, Put, PutMore, PutResult, Status};
use crate::store::segment::Content;
use crate::store::{Condition, Lookup};
use crate::wire::onc_rpc::{Item, OpaqueAuth, Part};
use crate::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, Segment};
use crate::wire::rpcrdma::header::{Header, Message, Placement, RdmaError};
use std::fmt::Write as _;

const WINDOW: u32 = 8192;
const BASE: u64 = 1 << 40;
/// Octets of a message.
const INLINE: u32 = 1024;

struct Bench {
    service: Service<Vec<u8>>,
    store: Store,
    metrics: Arc<Metrics>,
    /// The peer's, by handle, each from [`BASE`] on.
    memory: HashMap<u32, Vec<u8>>,
    slots: HashMap<Ticket, Vec<u8>>,
    reads: VecDeque<(Xid, u64, Vec<u8>)>,
    fills: VecDeque<(Ticket, Vec<u8>)>,
    claims: VecDeque<u64>,
    sends: VecDeque<Option<Xid>>,
    /// What is not done when it is told.
    holds: Holds,
    /// Whose Read was posted last.
    posted: Option<CallMark>,
    /// What the peer was sent.
    sent: Vec<Vec<u8>>,
    /// R, W, S: a Read, Write or Send, with the last two digits of its xid.
    log: String,
    now: Duration,
}

#[derive(Clone, Copy, Default)]
struct Holds {
    reads: bool,
    fills: bool,
    claims: bool,
    sends: bool,
}

fn terms() -> Terms {
    Terms {
        agreed: Agreed { call_inline_bytes: INLINE, reply_inline_bytes: INLINE, remote_invalidate: false },
        calls_max: NonZeroU32::new(4).unwrap(),
        long_bytes_max: 64 << 10,
        segments_max: 64,
        window_bytes: WINDOW,
        places_max: 8,
        reserve_wait: Duration::from_secs(10),
        draft_idle: Duration::from_secs(30),
    }
}

impl Bench {
    fn new() -> Self {
        Self::of(store(), Arc::default(), terms(), 4)
    }

    fn of(store: Store, shared: Arc<Shared>, terms: Terms, buffers: usize) -> Self {
        Self::with(store, shared, terms, buffers, None)
    }

    fn with(store: Store, shared: Arc<Shared>, terms: Terms, buffers: usize, nfs: Option<Nfs>) -> Self {
        let metrics = Arc::new(Metrics::default());
        let peer = IpAddr::from([192, 0, 2, 1]);
        let around = Surroundings { store: store.clone(), metrics: metrics.clone(), shared, peer, nfs };
        let free = vec![vec![0; WINDOW as usize]; buffers];
        Self {
            service: Service::new(around, Arc::new(|| ()), terms, free),
            store,
            metrics,
            memory: HashMap::new(),
            slots: HashMap::new(),
            reads: VecDeque::new(),
            fills: VecDeque::new(),
            claims: VecDeque::new(),
            sends: VecDeque::new(),
            holds: Holds::default(),
            posted: None,
            sent: Vec::new(),
            log: String::new(),
            now: Duration::ZERO,
        }
    }

    fn note(&mut self, what: char, xid: Option<Xid>) {
        let number = xid.map_or("--".to_owned(), |xid| format!("{:02}", xid.0 % 100));
        write!(self.log, "{what}{number} ").unwrap();
    }

    /// Does what it is told until there is nothing.
    fn turn(&mut self) {
        loop {
            while let Some(output) = self.service.poll_output() {
                self.act(output);
            }
            if !self.holds.reads
                && let Some((xid, number, buf)) = self.reads.pop_front()
            {
                self.service.handle_read(xid, number, buf, self.now);
            } else if !self.holds.fills
                && let Some((ticket, octets)) = self.fills.pop_front()
            {
                self.service.handle_filled(ticket, &octets);
                self.slots.insert(ticket, octets);
            } else if !self.holds.claims
                && let Some(len) = self.claims.pop_front()
            {
                let claim = self.store.try_claim(len, true, &(Arc::new(|| ()) as Revoker));
                self.service.handle_claim(claim);
            } else if !self.holds.sends
                && let Some(xid) = self.sends.pop_front()
            {
                self.service.handle_sent(xid, self.now);
            } else {
                return;
            }
        }
    }

    fn act(&mut self, output: Output<Vec<u8>>) {
        match output {
            Output::Read { call, number, mut buf, len, key, address } => {
                let xid = call.xid;
                self.posted = Some(call);
                self.note('R', Some(xid));
                let at = (address - BASE) as usize;
                buf[..len as usize].copy_from_slice(&self.memory[&key.0][at..at + len as usize]);
                self.reads.push_back((xid, number, buf));
            }
            Output::Fill { ticket, source, offset, len, .. } => {
                let octets = match &source {
                    PlaceSource::Octets(octets) => octets[offset as usize..][..len as usize].to_vec(),
                    PlaceSource::Value(_) | PlaceSource::Run(_) => source
                        .pieces(offset, len.into())
                        .flat_map(|piece| match piece.segment.content() {
                            Content::Ram(ram) => piece.octets(&ram).to_vec(),
                            other => panic!("{other:?}"),
                        })
                        .collect(),
                };
                assert!(len <= WINDOW && octets.len() == len as usize);
                self.fills.push_back((ticket, octets));
            }
            Output::Cancel(ticket) => assert!(!self.slots.contains_key(&ticket), "it is filled"),
            Output::Retire(ticket) => _ = self.slots.remove(&ticket).expect("a filled slot"),
            Output::Write { call, ticket, len, key, address } => {
                self.note('W', Some(call.xid));
                let octets = self.slots.remove(&ticket).expect("a filled slot");
                let at = (address - BASE) as usize;
                let memory = self.memory.get_mut(&key.0).expect("offered memory");
                memory[at..at + len as usize].copy_from_slice(&octets[..len as usize]);
                self.service.handle_written();
            }
            Output::Send { xid, octets, .. } => {
                self.note('S', xid);
                assert!(octets.len() <= INLINE as usize);
                self.sent.push(octets);
                self.sends.push_back(xid);
            }
            Output::Reserve { len } => self.claims.push_back(len),
            Output::Segment(want) => panic!("memory is short: {want:?}"),
            Output::Retry => {}
        }
    }

    fn expose(&mut self, handle: u32, octets: Vec<u8>) -> Segment {
        let length = octets.len() as u32;
        self.memory.insert(handle, octets);
        Segment { handle: RemoteKey(handle), length, offset: BASE }
    }

    /// Hands in a message, and does what comes of it.
    fn hear(&mut self, message: &[u8]) -> Repost {
        let repost = self.service.handle_message(message, self.now);
        self.turn();
        repost
    }

    fn stream(request: &Request<'_, Item>, xid: u32, data: Option<&[u8]>) -> Vec<u8> {
        let mut stream = Vec::new();
        for part in request.encode(Xid(xid), OpaqueAuth::NONE).parts() {
            match (part, data) {
                (Part::Bytes(bytes), _) => stream.extend_from_slice(bytes),
                (Part::Item(_), Some(data)) => {
                    stream.extend_from_slice(data);
                    stream.resize(stream.len().next_multiple_of(4), 0);
                }
                (Part::Item(_), None) => {}
            }
        }
        stream
    }

    fn call(&mut self, request: &Request<'_, Item>, xid: u32, lists: ChunkLists) -> Repost {
        let mut message = header(xid, Placement::Inline, lists);
        message.extend(Self::stream(request, xid, None));
        self.hear(&message)
    }

    /// A PUT whose octets are in a chunk of two segments.
    fn put(&mut self, xid: u32, put: &Put<'_, Item>, octets: &[u8]) -> Repost {
        let request = Request::Put(put.clone());
        self.chunked(xid, &request, octets)
    }

    fn chunked(&mut self, xid: u32, request: &Request<'_, Item>, octets: &[u8]) -> Repost {
        let stream = Self::stream(request, xid, None);
        let (front, back) = octets.split_at(octets.len() / 3);
        let position = stream.len() as u32;
        let targets = [self.expose(xid * 10, front.to_vec()), self.expose(xid * 10 + 1, back.to_vec())];
        let reads = targets.map(|target| ReadSegment { position, target }).to_vec();
        let mut message = header(xid, Placement::Inline, ChunkLists { reads, ..ChunkLists::default() });
        message.extend(stream);
        self.hear(&message)
    }

    /// A call whose stream is in a chunk at position zero.
    fn long(&mut self, xid: u32, stream: Vec<u8>) -> Repost {
        let target = self.expose(xid * 10, stream);
        let reads = vec![ReadSegment { position: 0, target }];
        self.hear(&header(xid, Placement::Chunk, ChunkLists { reads, ..ChunkLists::default() }))
    }

    /// The only answer to call `xid` so far.
    fn reply(&self, xid: u32) -> &[u8] {
        let mut sent = self.sent.iter().filter(|message| message[..4] == xid.to_be_bytes());
        let reply = sent.next().unwrap_or_else(|| panic!("no answer to {xid}: {}", self.log));
        assert!(sent.next().is_none(), "two answers to {xid}");
        reply
    }

    fn is_answered(&self, xid: u32) -> bool {
        self.sent.iter().any(|message| message[..4] == xid.to_be_bytes())
    }

    fn answer(&self, xid: u32, expectation: &Expectation) -> Answer {
        let (stream, chunks) = self.replied(xid);
        expectation.decode(&stream, &chunks).unwrap().1
    }

    /// The stream of a reply, and the octets in each write chunk.
    fn replied(&self, xid: u32) -> (Vec<u8>, Vec<Option<u64>>) {
        let Ok(Message::Transport(reply)) = Message::decode(self.reply(xid)) else { panic!("an error") };
        let chunks = reply.writes.chunks().map(|chunk| (chunk.segment_count() > 0).then(|| chunk.len())).collect();
        let written = |segment: Segment| &self.memory[&segment.handle.0][..segment.length as usize];
        let stream = match reply.placement {
            Placement::Inline => reply.payload.to_vec(),
            Placement::Chunk => reply.reply.unwrap().segments().flat_map(written).copied().collect(),
        };
        (stream, chunks)
    }

    fn put_result(&self, xid: u32) -> PutResult {
        match self.answer(xid, &Expectation::Put) {
            Answer::Put(result) => result,
            other => panic!("{other:?}"),
        }
    }

    fn is_error(&self, xid: u32) -> bool {
        matches!(Message::decode(self.reply(xid)), Ok(Message::Error { error: RdmaError::Chunk, .. }))
    }

    /// Nothing of any call is left, and every buffer is back.
    /// Until a call is looked for again that runs elsewhere.
    fn wait_for_twin(&mut self) {
        self.now = self.service.deadline().expect("it will look again");
        self.service.handle_time(self.now);
        self.turn();
    }

    fn assert_at_rest(&self) {
        let service = &self.service;
        assert!(!service.is_serving() && !service.is_posting());
        assert_eq!((service.long_calls.held, service.long_replies.held), (0, 0));
        assert_eq!((service.places.len(), self.slots.len(), service.spans.len()), (0, 0, 0));
        assert!(service.waiting.is_empty() && service.held.is_empty() && service.long_numbers.is_empty());
        assert_eq!(service.responder.calls(), 0);
        assert_eq!(self.store.gauges().pins, 0);
    }
}

fn header(xid: u32, placement: Placement, lists: ChunkLists) -> Vec<u8> {
    Header { xid: Xid(xid), credit: 8, placement, lists }.encode()
}

fn octets(len: usize, seed: u32) -> Vec<u8> {
    (0..len as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11 ^ seed) as u8).collect()
}

fn key(octets: &'static str) -> Key<'static> {
    Key::new(octets.as_bytes()).unwrap()
}

/// A PUT of a value of `len` octets, of which it brings `data_len`.
fn putting(draft: u64, len: usize, data_len: usize, commit: bool) -> Put<'static, Item> {
    Put {
        key: key("k"),
        draft,
        len: len as u64,
        flags: 0,
        ttl_s: 0,
        condition: Condition::Any,
        commit,
        crc32c: None,
        data: Item { token: 0, len: data_len as u32 },
    }
}

fn more(draft: u64, offset: usize, data_len: usize, commit: bool) -> Request<'static, Item> {
    let data = Item { token: 0, len: data_len as u32 };
    Request::PutMore(PutMore { draft, offset: offset as u64, commit, crc32c: None, data })
}

fn range(name: &'static str, offset: u64, count: u32) -> RangeOf<'static> {
    RangeOf { key: key(name), version: 0, offset, count }
}

fn getting(deadline_us: u32, ranges: Vec<RangeOf<'static>>) -> Request<'static, Item> {
    Request::Get(GetRequest { crc32c: true, deadline_us, ranges })
}

fn offer(writes: Vec<Vec<Segment>>, reply: Option<Vec<Segment>>) -> ChunkLists {
    ChunkLists { reads: Vec::new(), writes, reply }
}

fn statuses(answer: Answer) -> Vec<(Status, u32)> {
    match answer {
        Answer::Get(got) => got.iter().map(|got| (got.status, got.data.len())).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_put_is_pulled_into_its_draft_and_each_octet_is_copied_once() {
    let mut bench = Bench::new();
    let value = octets(30_001, 1);
    bench.put(1, &putting(0, value.len(), value.len(), true), &value);
    assert_eq!(bench.put_result(1).status, Status::Ok);
    // 10,000 octets in two pieces, 20,001 in three.
    assert_eq!(bench.log, "R01 R01 R01 R01 R01 S01 ");
    assert_eq!(rig::octets(&bench.store, b"k").unwrap(), value);
    assert_eq!(bench.metrics.copied.pulled_to_arena.get(), 30_001);
    bench.assert_at_rest();
}

#[test]
fn a_get_is_written_in_pieces_and_the_send_comes_last() {
    let mut bench = Bench::new();
    let value = octets(30_001, 2);
    put(&bench.store, b"k", &value);
    let chunk = vec![bench.expose(7, vec![0; 11]), bench.expose(8, vec![0; 50_000])];
    let request = getting(0, vec![range("k", 5, u32::MAX)]);
    bench.call(&request, 1, offer(vec![chunk], None));
    // 11 octets, then up to each multiple of 8,192 of the value.
    assert_eq!(bench.log, "W01 W01 W01 W01 W01 S01 ");
    let Answer::Get(got) = bench.answer(1, &request.expectation()) else { panic!() };
    assert_eq!(
        (got[0].status, got[0].data.len(), got[0].crc32c),
        (Status::Ok, 29_996, Some(crc32c::crc32c(&value[5..])))
    );
    assert!(bench.memory[&7] == value[5..16] && bench.memory[&8][..29_985] == value[16..]);
    assert!(bench.memory[&8][29_985..].iter().all(|octet| *octet == 0), "nothing behind the range");
    bench.assert_at_rest();
}

#[test]
fn short_ranges_without_a_chunk_come_inline_and_long_ones_by_the_reply_chunk() {
    let mut bench = Bench::new();
    let value = octets(30_001, 3);
    put(&bench.store, b"k", &value);
    let request = getting(0, vec![range("k", 1, 101), range("none", 0, 5), range("k", 30_000, 9)]);
    bench.call(&request, 1, offer(vec![], None));
    assert_eq!(bench.log, "S01 ");
    let found = statuses(bench.answer(1, &request.expectation()));
    assert_eq!(found, [(Status::Ok, 101), (Status::NotFound, 0), (Status::Ok, 1)]);
    let request = getting(0, vec![range("k", 0, u32::MAX), range("k", 3, 2)]);
    let (empty, full) = (Vec::new(), vec![bench.expose(9, vec![0; 2])]);
    let reply = vec![bench.expose(10, vec![0; 40_000])];
    bench.call(&request, 2, offer(vec![empty, full], Some(reply)));
    let found = statuses(bench.answer(2, &request.expectation()));
    assert_eq!(found, [(Status::Ok, 30_001), (Status::Ok, 2)]);
    assert_eq!(bench.memory[&9], value[3..5]);
    let at = bench.memory[&10].windows(100).position(|part| part == &value[..100]).unwrap();
    assert!(bench.memory[&10][at..at + value.len()] == value);
    bench.assert_at_rest();
}

#[test]
fn what_does_not_fit_is_an_error_and_nothing_is_written() {
    let mut bench = Bench::new();
    put(&bench.store, b"k", &octets(100_000, 4));
    let short = vec![bench.expose(7, vec![0; 4999])];
    let (reply, large) = (vec![bench.expose(8, vec![0; 4999])], vec![bench.expose(9, vec![0; 200_000])]);
    let cases = [
        (5000, offer(vec![short.clone()], None), "write_chunk"),
        (5000, offer(vec![], None), "no_reply_chunk"),
        (5000, offer(vec![], Some(reply)), "reply_chunk"),
        // It fits the chunk, and not the room there is for octets that have none of their own.
        (90_000, offer(vec![], Some(large)), "long_reply"),
    ];
    for (xid, (count, lists, cause)) in (1..).zip(cases) {
        bench.call(&getting(0, vec![range("k", 0, count)]), xid, lists);
        assert!(bench.is_error(xid), "{cause}");
        assert_eq!(bench.metrics.rpc_calls.refused.get(cause), 1, "{:?}", bench.metrics.rpc_calls.refused.list());
    }
    assert_eq!(bench.log, "S01 S02 S03 S04 ");
    bench.assert_at_rest();
}

#[test]
fn what_is_late_is_cancelled_and_nothing_of_it_follows_the_send() {
    let mut bench = Bench::new();
    let value = octets(30_001, 5);
    put(&bench.store, b"k", &value);
    let chunks = vec![vec![bench.expose(7, vec![0; 100])], vec![bench.expose(8, vec![0; 30_001])]];
    bench.holds.fills = true;
    let request = getting(5_000, vec![range("k", 0, 100), range("k", 0, u32::MAX)]);
    bench.call(&request, 1, offer(chunks, None));
    assert_eq!(bench.service.deadline(), Some(Duration::from_millis(5)));
    // The first range is filled in time, and one piece of the second.
    for _ in 0..2 {
        let (ticket, octets) = bench.fills.pop_front().unwrap();
        bench.service.handle_filled(ticket, &octets);
        bench.slots.insert(ticket, octets);
        bench.turn();
    }
    bench.now = Duration::from_millis(5);
    bench.service.handle_time(bench.now);
    bench.turn();
    assert_eq!(bench.log, "W01 W01 S01 ");
    assert_eq!(statuses(bench.answer(1, &request.expectation())), [(Status::Ok, 100), (Status::Late, 0)]);
    assert_eq!(bench.service.deadline(), None);
    bench.holds.fills = false;
    bench.turn();
    assert_eq!(bench.log, "W01 W01 S01 ", "what is filled now is for nobody");
    bench.assert_at_rest();
}

#[test]
fn a_range_that_is_lost_says_so_and_takes_no_other_with_it() {
    let mut bench = Bench::new();
    let value = octets(20_000, 6);
    put(&bench.store, b"k", &value);
    let chunks = vec![vec![bench.expose(7, vec![0; 20_000])], vec![bench.expose(8, vec![0; 5])]];
    bench.holds.fills = true;
    let request = getting(0, vec![range("k", 0, u32::MAX), range("k", 1, 5)]);
    bench.call(&request, 1, offer(chunks, None));
    let (lost, _) = bench.fills.pop_front().unwrap();
    bench.service.handle_failed(lost);
    bench.holds.fills = false;
    bench.turn();
    assert_eq!(statuses(bench.answer(1, &request.expectation())), [(Status::IoError, 0), (Status::Ok, 5)]);
    assert_eq!(bench.memory[&8], value[1..6]);
    bench.assert_at_rest();
}

#[test]
fn pins_live_until_the_send_has_completed() {
    let mut bench = Bench::new();
    put(&bench.store, b"k", &octets(100, 7));
    let chunk = vec![bench.expose(7, vec![0; 100])];
    bench.holds.sends = true;
    bench.call(&getting(0, vec![range("k", 0, 100)]), 1, offer(vec![chunk], None));
    assert_eq!((bench.log.as_str(), bench.store.gauges().pins), ("W01 S01 ", 1));
    bench.holds.sends = false;
    bench.turn();
    bench.assert_at_rest();
}

#[test]
fn an_answer_waits_for_reads_that_nobody_needs_any_more() {
    let mut bench = Bench::new();
    let value = octets(40_000, 8);
    let put = Put { crc32c: Some(1), ..putting(5, 50_000, 20_000, false) };
    bench.holds.reads = true;
    bench.put(1, &put, &value[..20_000]);
    bench.chunked(2, &more(5, 20_000, 20_000, false), &value[20_000..]);
    // Three buffers are out; the last is kept for a call that has none.
    assert_eq!(bench.log, "R01 R01 R01 R02 ");
    // The draft is dropped, which ends both.
    let drop = Request::PutDrop { draft: 5 };
    bench.call(&drop, 3, ChunkLists::default());
    assert!(bench.is_answered(3) && !bench.is_answered(1) && !bench.is_answered(2));
    bench.holds.reads = false;
    bench.turn();
    assert_eq!(bench.put_result(1).status, Status::BadDraft);
    assert_eq!(bench.put_result(2).status, Status::BadDraft);
    assert_eq!(bench.service.free.len(), 4);
    bench.assert_at_rest();
}

#[test]
fn ranges_of_a_draft_are_pulled_ahead_and_come_together_in_order() {
    let mut bench = Bench::new();
    let value = octets(60_000, 9);
    bench.holds.reads = true;
    bench.put(1, &putting(5, 60_000, 9_000, false), &value[..9_000]);
    bench.chunked(2, &more(5, 9_000, 21_000, false), &value[9_000..30_000]);
    bench.chunked(3, &more(5, 30_000, 30_000, true), &value[30_000..]);
    assert!(bench.log.starts_with("R01 R01 "), "{}", bench.log);
    bench.holds.reads = false;
    bench.turn();
    for xid in [1, 2, 3] {
        assert_eq!(bench.put_result(xid).status, Status::Ok);
    }
    assert!(rig::octets(&bench.store, b"k").unwrap() == value);
    assert_eq!(bench.metrics.copied.pulled_to_arena.get(), 60_000);
    bench.assert_at_rest();
}

#[test]
fn a_value_that_waits_for_space_pulls_nothing() {
    let mut bench = Bench::new();
    let value = octets(100_000, 10);
    // All that can be claimed is.
    let none: Revoker = Arc::new(|| ());
    let mut claims = Vec::new();
    while let Some(claim) = bench.store.try_claim(100_000, false, &none) {
        claims.push(claim);
    }
    bench.holds.claims = true;
    bench.put(1, &putting(0, value.len(), value.len(), true), &value);
    assert_eq!((bench.log.as_str(), bench.claims.len()), ("", 1));
    bench.call(&Request::Null, 2, ChunkLists::default());
    assert_eq!(bench.log, "S02 ");
    claims.clear();
    bench.holds.claims = false;
    bench.turn();
    assert_eq!(bench.put_result(1).status, Status::Ok);
    bench.put(3, &putting(0, value.len(), value.len(), true), &value);
    assert_eq!(bench.put_result(3).status, Status::Ok);
    bench.assert_at_rest();
}

fn stat_stream(xid: u32, count: usize) -> Vec<u8> {
    let keys = vec![key("some key"); count];
    Bench::stream(&Request::Stat(StatRequest { until_miss: true, keys }), xid, None)
}

#[test]
fn what_belongs_to_drafts_waits_for_long_calls_before_it_and_all_else_overtakes() {
    let mut bench = Bench::new();
    let value = octets(3_000, 11);
    bench.holds.reads = true;
    // The first range of the draft comes in a long call, its octets with it.
    let first = Bench::stream(&Request::Put(putting(5, 3_000, 2_000, false)), 1, Some(&value[..2_000]));
    bench.long(1, first);
    bench.chunked(2, &more(5, 2_000, 1_000, true), &value[2_000..]);
    bench.call(&Request::Null, 3, ChunkLists::default());
    assert_eq!(bench.log, "R01 S03 ");
    bench.holds.reads = false;
    bench.turn();
    assert_eq!((bench.put_result(1).status, bench.put_result(2).status), (Status::Ok, Status::Ok));
    assert!(rig::octets(&bench.store, b"k").unwrap() == value);
    assert_eq!(bench.metrics.copied.input_to_arena.get(), 2_000);
    assert!(bench.metrics.copied.pulled_to_call.get() > 2_000);
    bench.assert_at_rest();
}

/// The second of two long calls may be here first; what belongs to its draft came after it and must not overtake it.
#[test]
fn a_long_call_that_is_held_up_holds_up_what_came_after_it() {
    let mut bench = Bench::new();
    let value = octets(3_000, 21);
    bench.holds.reads = true;
    bench.long(1, stat_stream(1, 10));
    bench.long(2, Bench::stream(&Request::Put(putting(5, 3_000, 2_000, false)), 2, Some(&value[..2_000])));
    bench.chunked(3, &more(5, 2_000, 1_000, true), &value[2_000..]);
    let (xid, number, buf) = bench.reads.pop_back().unwrap();
    assert_eq!(xid, Xid(2));
    bench.service.handle_read(xid, number, buf, bench.now);
    bench.turn();
    assert!(!bench.is_answered(2) && !bench.is_answered(3));
    bench.holds.reads = false;
    bench.turn();
    assert_eq!((bench.put_result(2).status, bench.put_result(3).status), (Status::Ok, Status::Ok));
    assert!(rig::octets(&bench.store, b"k").unwrap() == value);
    bench.assert_at_rest();
}

#[test]
fn long_calls_have_the_room_there_is_and_wait_for_more_in_order() {
    let mut bench = Bench::new();
    bench.holds.reads = true;
    for xid in [1, 2] {
        let stream = stat_stream(xid, 1000);
        assert!(stream.len() < 20_000);
        bench.long(xid, stream);
    }
    let large = octets(50_000, 1);
    let put = Bench::stream(&Request::Put(putting(0, large.len(), large.len(), true)), 3, Some(&large));
    bench.long(3, put);
    bench.long(4, stat_stream(4, 1));
    assert!(!bench.log.contains("R03") && !bench.log.contains("R04"), "{}", bench.log);
    bench.holds.reads = false;
    bench.turn();
    for xid in [1, 2, 4] {
        let found = bench.answer(xid, &Expectation::Stat { count: 1000, until_miss: true });
        assert!(matches!(found, Answer::Stat { leading: 0, .. }));
    }
    assert_eq!(bench.put_result(3).status, Status::Ok);
    bench.assert_at_rest();
}

#[test]
fn long_replies_have_the_room_there_is_and_wait_for_more() {
    let mut bench = Bench::new();
    put(&bench.store, b"some key", b"v");
    bench.holds.sends = true;
    for xid in [1, 2] {
        let reply = vec![bench.expose(xid * 10 + 5, vec![0; 64 << 10])];
        let keys = vec![key("some key"); 1000];
        let stream = Bench::stream(&Request::Stat(StatRequest { until_miss: false, keys }), xid, None);
        let target = bench.expose(xid * 10, stream);
        let reads = vec![ReadSegment { position: 0, target }];
        let lists = ChunkLists { reads, writes: vec![], reply: Some(reply) };
        bench.hear(&header(xid, Placement::Chunk, lists));
    }
    assert!(bench.log.contains("S01") && !bench.log.contains("W02"), "{}", bench.log);
    bench.holds.sends = false;
    bench.turn();
    for xid in [1, 2] {
        let found = bench.answer(xid, &Expectation::Stat { count: 1000, until_miss: false });
        assert!(matches!(found, Answer::Stat { leading: 1000, .. }));
    }
    bench.assert_at_rest();
}

#[test]
fn the_last_buffer_goes_to_a_call_that_has_none() {
    let mut bench = Bench::of(store(), Arc::default(), terms(), 2);
    let value = octets(30_000, 12);
    bench.holds.reads = true;
    bench.put(1, &putting(0, value.len(), value.len(), true), &value);
    assert_eq!(bench.log, "R01 ");
    bench.long(2, stat_stream(2, 1));
    assert_eq!(bench.log, "R01 R02 ");
    bench.holds.reads = false;
    bench.turn();
    assert_eq!(bench.put_result(1).status, Status::Ok);
    bench.assert_at_rest();
}

#[test]
fn a_put_is_executed_once_whatever_comes_over_however_many_connections() {
    let (store, shared) = (store(), Arc::<Shared>::default());
    let connect = || Bench::of(store.clone(), shared.clone(), terms(), 4);
    let value = octets(10_000, 13);
    let put = Put { condition: Condition::Absent, ..putting(0, value.len(), value.len(), true) };
    let (mut first, mut second) = (connect(), connect());
    first.holds.reads = true;
    first.put(1, &put, &value);
    second.put(1, &put, &value);
    second.wait_for_twin();
    assert_eq!(second.log, "", "it is being executed");
    first.holds.reads = false;
    first.turn();
    let version = first.put_result(1).version;
    drop(first);
    // It has not come again: who made it has sent it on each connection once.
    second.wait_for_twin();
    assert_eq!(second.put_result(1), PutResult { status: Status::Ok, version });
    assert_eq!((second.log.as_str(), second.metrics.rpc_calls.replayed.get()), ("S01 ", 1));
    // One whose connection ended before it was executed is executed when it comes again.
    let mut third = connect();
    third.holds.reads = true;
    let other = Put { key: key("other"), ..put };
    third.put(2, &other, &value);
    second.put(2, &other, &value);
    assert_eq!(second.log, "S01 ", "it is being executed");
    // This one goes with its connection while it waits, and leaves nothing behind.
    let mut fourth = connect();
    fourth.put(2, &other, &value);
    drop((third, fourth));
    second.wait_for_twin();
    assert_eq!(second.put_result(2).status, Status::Ok);
    assert_eq!((second.log.as_str(), second.metrics.rpc_calls.replayed.get()), ("S01 R02 R02 S02 ", 1));
    second.assert_at_rest();
}

/// Some clients begin with the same xid whenever they are started. What they asked for was not done, because an earlier life of
/// theirs had been answered, or was refused, because the memory of that one had been.
#[test]
fn what_was_answered_long_ago_is_executed() {
    let (store, shared) = (store(), Arc::new(Shared::new(Bounds { age_max: Duration::ZERO, ..DUPLICATES })));
    let value = octets(100, 13);
    for life in 0..3 {
        let mut bench = Bench::of(store.clone(), shared.clone(), terms(), 4);
        bench.put(1, &Put { condition: Condition::Absent, ..putting(0, 100, 100, true) }, &value);
        assert_eq!(bench.put_result(1).status, Status::Ok, "life {life}");
        assert_eq!(bench.metrics.rpc_calls.replayed.get(), 0);
        assert!(store.delete(b"k", store.clock().now()), "life {life}: it was put");
        shared.handle_refused(IpAddr::from([192, 0, 2, 1]), bench.posted.unwrap());
    }
}

#[test]
fn what_belongs_to_a_connection_is_executed_anew_on_the_next() {
    let (store, shared) = (store(), Arc::<Shared>::default());
    let value = octets(10_000, 14);
    for _ in 0..2 {
        let mut bench = Bench::of(store.clone(), shared.clone(), terms(), 4);
        bench.put(1, &putting(5, 20_000, 10_000, false), &value);
        assert_eq!(bench.put_result(1).status, Status::Ok);
        assert_eq!((bench.log.as_str(), bench.metrics.rpc_calls.replayed.get()), ("R01 R01 S01 ", 0));
    }
    assert_eq!(store.gauges().claims, 0, "drafts end with their connection");
}

#[test]
fn a_call_whose_memory_failed_before_is_refused_once() {
    let (store, shared) = (store(), Arc::<Shared>::default());
    let mut bench = Bench::of(store.clone(), shared.clone(), terms(), 4);
    let value = octets(100, 15);
    bench.holds.reads = true;
    bench.put(1, &putting(0, 100, 100, true), &value);
    shared.handle_refused(IpAddr::from([192, 0, 2, 1]), bench.posted.unwrap());
    drop(bench);
    let mut bench = Bench::of(store, shared, terms(), 4);
    // Another's call with the same xid.
    bench.put(1, &putting(0, 99, 99, true), &value[..99]);
    assert_eq!(bench.put_result(1).status, Status::Ok);
    bench.sent.clear();
    bench.put(1, &putting(0, 100, 100, true), &value);
    assert!(bench.is_error(1));
    assert_eq!(bench.metrics.rpc_calls.refused.list(), [("failed_before", 1)]);
    bench.sent.clear();
    bench.put(1, &putting(0, 100, 100, true), &value);
    assert_eq!(bench.put_result(1).status, Status::Ok);
    bench.assert_at_rest();
}

#[test]
fn the_receive_of_a_message_goes_back_at_once_but_for_one_answered_with_an_error() {
    let mut bench = Bench::new();
    let null = |xid| {
        [header(xid, Placement::Inline, ChunkLists::default()), Bench::stream(&Request::Null, xid, None)].concat()
    };
    let mut version = null(9);
    version[7] = 2;
    assert_eq!(bench.hear(&null(1)), Repost::Now);
    assert_eq!(bench.hear(&null(2)[..20]), Repost::Now);
    assert_eq!(bench.hear(&version), Repost::WithAnswer);
    assert_eq!(bench.log, "S01 S-- ");
    assert_eq!(bench.metrics.rpc_calls.dropped.list(), [("too_short", 1)]);
    assert_eq!(bench.metrics.rpc_calls.refused.list(), [("version", 1)]);
    bench.assert_at_rest();
}

#[test]
fn answers_that_do_not_leave_are_bounded() {
    let mut bench = Bench::new();
    bench.holds.sends = true;
    for xid in 1..20 {
        bench.call(&Request::Null, xid, ChunkLists::default());
    }
    // Four calls may be unanswered.
    assert_eq!(bench.sent.len(), 8);
    assert_eq!(bench.metrics.rpc_calls.dropped.get("overrun"), 11);
    bench.holds.sends = false;
    bench.turn();
    bench.assert_at_rest();
}

#[test]
fn whoever_holds_pins_does_not_wait_for_more_and_whoever_holds_none_is_patient() {
    let mut bench = Bench::new();
    for name in [b"a", b"b", b"c"] {
        put(&bench.store, name, &octets(600 << 10, 16));
    }
    let chunk = |bench: &mut Bench, handle| vec![bench.expose(handle, vec![0; 10])];
    // A quarter of the pool, and one value more.
    let hold = |name: &[u8]| match bench.store.get(name, bench.store.clock().now()) {
        Lookup::Hit(pinned) => pinned,
        other => panic!("{other:?}"),
    };
    let (first, second) = (hold(b"a"), hold(b"b"));
    let request = getting(0, vec![range("a", 0, 10), range("c", 0, 10)]);
    let chunks = vec![chunk(&mut bench, 1), chunk(&mut bench, 2)];
    bench.call(&request, 1, offer(chunks, None));
    assert_eq!(statuses(bench.answer(1, &request.expectation())), [(Status::Ok, 10), (Status::Busy, 0)]);
    let request = getting(0, vec![range("c", 0, 10)]);
    let chunks = vec![chunk(&mut bench, 3)];
    bench.call(&request, 2, offer(chunks, None));
    bench.service.handle_retry(bench.now);
    bench.turn();
    assert!(!bench.is_answered(2));
    drop((first, second));
    bench.service.handle_retry(bench.now);
    bench.turn();
    assert_eq!(statuses(bench.answer(2, &request.expectation())), [(Status::Ok, 10)]);
    bench.assert_at_rest();
}

#[test]
fn a_program_that_is_not_here_is_said_so_and_arguments_that_are_garbage_too() {
    let mut bench = Bench::new();
    let null = Bench::stream(&Request::Null, 1, None);
    let say = |xid: u32, at: usize, value: u8, rest: &[u8]| {
        let mut stream = [&null[..], rest].concat();
        stream[..4].copy_from_slice(&xid.to_be_bytes());
        stream[at] = value;
        [header(xid, Placement::Inline, ChunkLists::default()), stream].concat()
    };
    let cases: [(&str, Vec<u8>); 5] = [
        ("prog_unavail", say(1, 15, 9, b"")),
        ("prog_mismatch", say(2, 19, 9, b"")),
        ("proc_unavail", say(3, 23, 99, b"")),
        ("garbage_args", say(4, 23, 0, b"more")),
        ("denied", say(5, 11, 3, b"")),
    ];
    for (cause, message) in cases {
        bench.hear(&message);
        assert_eq!(bench.metrics.rpc_calls.denied.get(cause), 1, "{cause}");
    }
    assert_eq!(bench.sent.len(), 5);
    bench.assert_at_rest();
}
