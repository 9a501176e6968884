//! Program `bulkhead` from a client's request to its answer, through every pure layer between: the call message, its
//! chunks, the responder, dispatch, the store, the plan of the reply, and the reading of it. What clients see must be
//! what a map of keys says, however a call travels.

#[path = "rig/mod.rs"]
mod rig;

use bulkhead::programs::bulkhead::put::{PutId, Step};
use bulkhead::programs::bulkhead::session::{Executed, Session};
use bulkhead::programs::bulkhead::{
    Answer, Deletion, GetRequest, Item, Key, ListRequest, PROGRAM, Put, PutMore, RangeOf, Request, StatRequest, Status,
    Touch,
};
use bulkhead::programs::rpc::{Arguments, Data, Reduced, Refusal, accept, bare_reply};
use bulkhead::store::claims::Revoker;
use bulkhead::store::object::Piece;
use bulkhead::store::segment::Content;
use bulkhead::store::{Condition, Sizes, Store};
use bulkhead::wire::onc_rpc::{OpaqueAuth, Part, Payload, Xid};
use bulkhead::wire::rpcrdma::RemoteKey;
use bulkhead::wire::rpcrdma::chunk::{self, ChunkLists, ReadSegment, Segment};
use bulkhead::wire::rpcrdma::header::{Header, Message, Placement};
use bulkhead::wire::rpcrdma::private_data::Agreed;
use bulkhead::wire::rpcrdma::responder::{Limits, Received, Responder, Span};
use rig::{Seeded, for_each_seed, octets};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;

/// Where each region of the client begins, as the server counts.
const BASE: u64 = 0xffff_0000;

/// Memory that the client offers for one call; a handle is an index.
#[derive(Default)]
struct Memory {
    regions: Vec<Vec<u8>>,
}

impl Memory {
    /// Segments that hold `octets`, cut at random.
    fn offer(&mut self, random: &mut Seeded, octets: &[u8]) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut rest = octets;
        loop {
            let len = if random.one_in(2) { rest.len() } else { random.below(rest.len() as u64 + 1) as usize };
            segments.push(Segment { handle: RemoteKey(self.regions.len() as u32), length: len as u32, offset: BASE });
            self.regions.push(rest[..len].to_vec());
            rest = &rest[len..];
            if rest.is_empty() || segments.len() == 4 {
                break;
            }
        }
        if !rest.is_empty() {
            let handle = RemoteKey(self.regions.len() as u32);
            segments.push(Segment { handle, length: rest.len() as u32, offset: BASE });
            self.regions.push(rest.to_vec());
        }
        segments
    }

    fn read(&self, segments: &[Segment]) -> Vec<u8> {
        let octets = |segment: &Segment| {
            let start = (segment.offset - BASE) as usize;
            &self.regions[segment.handle.0 as usize][start..start + segment.length as usize]
        };
        segments.iter().flat_map(octets).copied().collect()
    }

    fn write(&mut self, segment: RemoteKey, offset: u64, octets: &[u8]) {
        let start = (offset - BASE) as usize;
        self.regions[segment.0 as usize][start..start + octets.len()].copy_from_slice(octets);
    }
}

/// A call that was sent, and what its reply is to be held against.
struct Sent {
    message: Vec<u8>,
    memory: Memory,
    lists: ChunkLists,
}

/// Puts a call message together, in one of the ways there are.
fn send(random: &mut Seeded, agreed: Agreed, xid: Xid, request: &Request<'_, Item>, data: &[u8]) -> Sent {
    let payload = request.encode(xid, OpaqueAuth::NONE);
    let mut memory = Memory::default();
    let mut lists = ChunkLists::default();
    let reduce = random.one_in(2);
    let mut stream = Vec::new();
    for part in payload.parts() {
        match part {
            Part::Bytes(bytes) => stream.extend_from_slice(bytes),
            Part::Item(item) => {
                assert_eq!(item.len as usize, data.len());
                let mut padded = data.to_vec();
                padded.resize(data.len().next_multiple_of(4), 0);
                if reduce {
                    let octets = if random.one_in(3) { &padded } else { data };
                    let position = stream.len() as u32;
                    let segments = memory.offer(random, octets);
                    lists.reads = segments.into_iter().map(|target| ReadSegment { position, target }).collect();
                } else {
                    stream.extend(padded);
                }
            }
        }
    }
    let expected = request.expectation();
    if !random.one_in(3) {
        // Some of the last results may have no chunk, and some an empty one.
        let count = random.below(expected.items().len() as u64 + 2) as usize;
        lists.writes = (0..count)
            .map(|index| {
                if random.one_in(6) {
                    return Vec::new();
                }
                let len = expected.items().get(index).copied().unwrap_or(8);
                memory.offer(random, &vec![0xee; len as usize])
            })
            .collect();
    }
    let items: u64 = expected.items().iter().map(|len| u64::from(len.next_multiple_of(4))).sum();
    lists.reply = Some(memory.offer(random, &vec![0xdd; (expected.reduced_bytes_max() + items) as usize]));
    let mut header = Header { xid, credit: 8, placement: Placement::Inline, lists };
    let bytes = header.encoded_bytes() + stream.len();
    if bytes > agreed.call_inline_bytes as usize || random.one_in(5) {
        header.placement = Placement::Chunk;
        let segments = memory.offer(random, &stream);
        header.lists.reads.splice(0..0, segments.into_iter().map(|target| ReadSegment { position: 0, target }));
        stream.clear();
    }
    Sent { message: [header.encode(), stream].concat(), memory, lists: header.lists }
}

/// What a client makes of the answer to its call.
struct Answered {
    answer: Answer,
    /// The octets of each range, in order.
    data: Vec<Vec<u8>>,
}

fn receive(sent: &Sent, message: &[u8], request: &Request<'_, Item>, xid: Xid) -> Answered {
    let Ok(Message::Transport(reply)) = Message::decode(message) else { panic!("{message:x?}") };
    assert_eq!(reply.xid, xid);
    let returned: Vec<_> = reply.writes.chunks().collect();
    assert_eq!(returned.len(), sent.lists.writes.len(), "no chunk vanishes");
    let written: Vec<_> = returned
        .iter()
        .zip(&sent.lists.writes)
        .map(|(returned, offered)| {
            let octets = chunk::octets_returned(offered, returned.segments()).unwrap();
            (!offered.is_empty()).then_some(octets)
        })
        .collect();
    let stream = match reply.placement {
        Placement::Inline => reply.payload.to_vec(),
        Placement::Chunk => sent.memory.read(&reply.reply.unwrap().to_vec()),
    };
    let (found, answer) = request.expectation().decode(&stream, &written).unwrap();
    assert_eq!(found, xid);
    let data = match &answer {
        Answer::Get(got) => got
            .iter()
            .map(|got| match &got.data {
                Data::Inline(range) => stream[range.clone()].to_vec(),
                Data::Chunk { index, .. } => sent.memory.read(&returned[*index].to_vec()),
            })
            .collect(),
        _ => Vec::new(),
    };
    if let Answer::Get(got) = &answer {
        for (got, data) in got.iter().zip(&data) {
            assert!(got.crc32c.is_none_or(|crc| crc == crc32c::crc32c(data)));
        }
    }
    Answered { answer, data }
}

/// One connection of a server.
struct Server {
    store: Store,
    responder: Responder,
    session: Session,
    revoker: Revoker,
    /// Replies to PUTs that are not sent yet.
    replies: HashMap<Xid, Payload>,
}

impl Server {
    fn new(agreed: Agreed) -> Self {
        let store = Store::with_namespace(Sizes {
            memory_bytes: 32 << 20,
            head_bytes: 64 << 10,
            value_bytes_max: 4 << 20,
            index_bytes_max: 1 << 20,
            pinned_share: 0.5,
            pool_bytes: vec![32 << 20],
        });
        let store = store.unwrap();
        store.extents().add_file(0, 32 << 20);
        let limits = Limits {
            calls_max: NonZeroU32::new(8).unwrap(),
            long_call_bytes_max: 1 << 20,
            read_chunk_bytes_max: 1 << 30,
            read_bytes_max: 1 << 30,
            read_segments_max: 64,
        };
        let session = Session::new(60_000);
        let responder = Responder::new(agreed, limits);
        Self { store, responder, session, revoker: Arc::new(|| ()), replies: HashMap::new() }
    }

    /// Serves a call to its end; the reply message.
    fn serve(&mut self, xid: Xid, sent: &mut Sent) -> Vec<u8> {
        let call = match self.responder.handle_received(&sent.message) {
            Received::Call(call) => call,
            other => panic!("{other:?}"),
        };
        let stream = match &call.long {
            Some(long) => {
                let stream = sent.memory.read(&long.segments);
                self.responder.handle_pulled(xid, &stream).unwrap();
                stream
            }
            None => call.inline.clone(),
        };
        let chunks: Vec<_> =
            call.reads.iter().map(|read| Reduced { position: u64::from(read.position), len: read.len }).collect();
        let mut items = HashMap::new();
        let payload = match accept(&[&PROGRAM], Arguments { stream: &stream, chunks: &chunks }) {
            Err(Refusal::Reply(header)) => bare_reply(&header),
            Err(refusal) => panic!("{refusal:?}"),
            Ok(accepted) => {
                let request = Request::parse(accepted).unwrap();
                match self.session.execute(xid, &request, &self.store) {
                    Executed::Answer(answer) => answer.encode(xid),
                    Executed::Get(mut get) => {
                        for index in 0..get.len() {
                            let Some((object, range)) = get.reading(index) else { continue };
                            let mut octets = Vec::new();
                            for piece in object.range(range.start, range.end - range.start) {
                                octets.extend(octets_of(&piece));
                            }
                            for (at, part) in octets.chunks(10_000).enumerate() {
                                get.handle_piece(index, at as u32 * 10_000, part);
                            }
                            items.insert(index as u32, octets);
                        }
                        assert!(get.is_done());
                        get.answer().encode(xid)
                    }
                    Executed::Put(id) => {
                        let data = match &request {
                            Request::Put(Put { data, .. }) | Request::PutMore(PutMore { data, .. }) => data,
                            other => panic!("{other:?}"),
                        };
                        let data = match data {
                            Data::Inline(range) => stream[range.clone()].to_vec(),
                            Data::Chunk { index, len } => {
                                let segments = chunk::pieces(&call.reads[*index].segments, 0, u64::from(*len));
                                sent.memory.read(&segments.unwrap())
                            }
                        };
                        self.fill(id, &data);
                        self.replies.remove(&xid).unwrap()
                    }
                    Executed::Dropped(answer, id) => {
                        self.fill(id, &[]);
                        answer.encode(xid)
                    }
                }
            }
        };
        let plan = self.responder.plan_reply(xid, &payload);
        assert_eq!(plan.fault, None);
        let of = |span: &Span| match span {
            Span::Octets(range) => plan.octets[range.clone()].to_vec(),
            Span::Item { token, start, len } => items[token][*start as usize..(start + len) as usize].to_vec(),
        };
        for write in &plan.writes {
            sent.memory.write(write.handle, write.offset, &of(&write.from));
        }
        self.responder.handle_sent(xid);
        plan.message.iter().flat_map(of).collect()
    }

    fn fill(&mut self, id: PutId, data: &[u8]) {
        loop {
            match self.session.drafts().poll(id, &self.store, &self.revoker) {
                Step::Room { at, len, .. } => {
                    let part = &data[at as usize..][..len.min(9000)];
                    self.session.drafts().room(id)[..part.len()].copy_from_slice(part);
                    self.session.drafts().advance(id, part.len(), self.store.clock().now_ms());
                }
                Step::Answer { xid, result } => {
                    self.replies.insert(xid, Answer::<Item>::Put(result).encode(xid));
                }
                Step::Wait | Step::End => return,
                other => panic!("{other:?}: there is room for all"),
            }
        }
    }
}

fn octets_of(piece: &Piece) -> Vec<u8> {
    match piece.segment.content() {
        Content::Ram(ram) => piece.octets(&ram).to_vec(),
        other => panic!("{other:?}: nothing was written behind"),
    }
}

/// What a value is.
#[derive(Clone)]
struct Value {
    octets: Vec<u8>,
    flags: u32,
    ttl_s: u32,
    version: u64,
}

/// A PUT of several calls.
struct Open {
    key: usize,
    value: Value,
    condition: Condition,
    sent: usize,
}

struct Client {
    random: Seeded,
    agreed: Agreed,
    server: Server,
    next_xid: u32,
    keys: Vec<Vec<u8>>,
    model: BTreeMap<Vec<u8>, Value>,
    open: BTreeMap<u64, Open>,
    next_id: u64,
    /// Numbers of the statuses that were met.
    met: BTreeSet<u32>,
}

impl Client {
    fn new(seed: u64) -> Self {
        let mut random = Seeded::new(seed);
        let inline_bytes = *random.pick(&[1024, 4096, 262_144]);
        let agreed = Agreed {
            call_inline_bytes: inline_bytes,
            reply_inline_bytes: inline_bytes,
            remote_invalidate: random.one_in(2),
        };
        let keys = (0..8)
            .map(|index| {
                let len = *random.pick(&[3, 4, 5, 64, 1024]);
                let mut key = octets(seed * 8 + index, len);
                key[0] = b'a' + (index % 3) as u8;
                key
            })
            .collect();
        let server = Server::new(agreed);
        Self {
            random,
            agreed,
            server,
            next_xid: seed as u32,
            keys,
            model: BTreeMap::new(),
            open: BTreeMap::new(),
            next_id: seed << 20,
            met: BTreeSet::new(),
        }
    }

    fn call(&mut self, request: &Request<'_, Item>, data: &[u8]) -> Answered {
        let xid = Xid(self.next_xid);
        self.next_xid = self.next_xid.wrapping_add(1);
        let mut sent = send(&mut self.random, self.agreed, xid, request, data);
        let message = self.server.serve(xid, &mut sent);
        assert!(message.len() <= self.agreed.reply_inline_bytes as usize);
        let answered = receive(&sent, &message, request, xid);
        match &answered.answer {
            Answer::Get(got) => self.met.extend(got.iter().map(|got| got.status.number())),
            Answer::Put(result) => _ = self.met.insert(result.status.number()),
            _ => {}
        }
        answered
    }

    fn value(&mut self) -> Value {
        let len = *self.random.pick(&[0, 1, 5, 900, 5000, 70_000, 300_001]);
        self.next_id += 1;
        let ttl_s = if self.random.one_in(2) { 0 } else { 100_000 };
        Value { octets: octets(self.next_id, len), flags: self.next_id as u32, ttl_s, version: 0 }
    }

    fn pick_key(&mut self) -> usize {
        self.random.below(self.keys.len() as u64) as usize
    }

    fn condition(&mut self, key: usize) -> Condition {
        let version = self.model.get(&self.keys[key]).map_or(7, |value| value.version);
        *self.random.pick(&[
            Condition::Any,
            Condition::Any,
            Condition::Absent,
            Condition::Present,
            Condition::Version(version),
            Condition::Version(version + 1),
        ])
    }

    fn judged(&self, key: usize, condition: Condition) -> Status {
        match (condition, self.model.get(&self.keys[key])) {
            (Condition::Any, _) | (Condition::Absent, None) | (Condition::Present, Some(_)) => Status::Ok,
            (Condition::Absent, Some(_)) => Status::Exists,
            (Condition::Present | Condition::Version(_), None) => Status::NotFound,
            (Condition::Version(wanted), Some(value)) if value.version == wanted => Status::Ok,
            (Condition::Version(_), Some(_)) => Status::Changed,
        }
    }

    /// The answer to a commit: `judged` before it.
    fn committed(&mut self, key: usize, mut value: Value, judged: Status, answered: Answered) {
        let Answer::Put(result) = answered.answer else { panic!("{:?}", answered.answer) };
        assert_eq!(result.status, judged);
        if judged == Status::Ok {
            assert!(result.version > 0 && self.model.values().all(|value| value.version < result.version));
            value.version = result.version;
            self.model.insert(self.keys[key].clone(), value);
        }
    }

    fn crc(&mut self, data: &[u8]) -> Option<u32> {
        self.random.one_in(2).then(|| crc32c::crc32c(data))
    }

    fn put(&mut self) {
        let key = self.pick_key();
        let (value, condition) = (self.value(), self.condition(key));
        let judged = self.judged(key, condition);
        let octets = self.keys[key].clone();
        let commit = self.random.one_in(2);
        let first = if commit { value.octets.len() } else { self.random.below(value.octets.len() as u64 + 1) as usize };
        let data = value.octets[..first].to_vec();
        let draft = self.random.below(20);
        let crc32c = self.crc(&data);
        let wrong = crc32c.is_some() && self.random.one_in(8);
        let request = Request::Put(Put {
            key: Key::new(&octets).unwrap(),
            draft,
            len: value.octets.len() as u64,
            flags: value.flags,
            ttl_s: value.ttl_s,
            condition,
            commit,
            crc32c: crc32c.map(|crc| crc ^ u32::from(wrong)),
            data: Item { token: 0, len: first as u32 },
        });
        let answered = self.call(&request, &data);
        if commit {
            let judged = if judged == Status::Ok && wrong { Status::BadChecksum } else { judged };
            return self.committed(key, value, judged, answered);
        }
        let Answer::Put(result) = answered.answer else { panic!("{:?}", answered.answer) };
        let expected = if self.open.contains_key(&draft) {
            Status::BadDraft
        } else if self.open.len() == 16 {
            Status::Limit
        } else if judged == Status::Ok && wrong {
            Status::BadChecksum
        } else {
            judged
        };
        assert_eq!((result.status, result.version), (expected, 0));
        if expected == Status::Ok {
            self.open.insert(draft, Open { key, value, condition, sent: first });
        }
    }

    fn put_more(&mut self) {
        let draft = self.random.below(20);
        let Some(open) = self.open.get(&draft) else {
            let data = Item { token: 0, len: 0 };
            let more = PutMore { draft, offset: 0, commit: true, crc32c: None, data };
            let answer = self.call(&Request::PutMore(more), b"").answer;
            assert!(matches!(answer, Answer::Put(result) if result.status == Status::BadDraft), "{answer:?}");
            return;
        };
        let (sent, len, key, condition) = (open.sent, open.value.octets.len(), open.key, open.condition);
        let count =
            if self.random.one_in(2) { len - sent } else { self.random.below((len - sent) as u64 + 1) as usize };
        let commit = sent + count == len && !self.random.one_in(4);
        let misplaced = self.random.one_in(10);
        let data = self.open[&draft].value.octets[sent..sent + count].to_vec();
        let more = PutMore {
            draft,
            offset: sent as u64 + u64::from(misplaced),
            commit,
            crc32c: self.crc(&data),
            data: Item { token: 0, len: count as u32 },
        };
        let judged = self.judged(key, condition);
        let answered = self.call(&Request::PutMore(more), &data);
        if commit && !misplaced {
            let open = self.open.remove(&draft).unwrap();
            return self.committed(key, open.value, judged, answered);
        }
        let Answer::Put(result) = answered.answer else { panic!("{:?}", answered.answer) };
        if misplaced {
            assert_eq!(result.status, Status::BadRange);
            self.open.remove(&draft);
        } else {
            assert_eq!((result.status, result.version), (Status::Ok, 0));
            self.open.get_mut(&draft).unwrap().sent += count;
        }
    }

    fn put_drop(&mut self) {
        let draft = self.random.below(20);
        let expected = if self.open.remove(&draft).is_some() { Status::Ok } else { Status::BadDraft };
        assert_eq!(self.call(&Request::PutDrop { draft }, b"").answer, Answer::PutDrop(expected));
    }

    fn get(&mut self) {
        let count = self.random.below(9);
        let picked: Vec<_> = (0..count).map(|_| self.pick_key()).collect();
        let keys: Vec<_> = picked.iter().map(|&key| self.keys[key].clone()).collect();
        let mut ranges = Vec::new();
        for key in &keys {
            let value = self.model.get(key);
            let len = value.map_or(9, |value| value.octets.len() as u64);
            let version = value.map_or(7, |value| value.version);
            ranges.push(RangeOf {
                key: Key::new(key).unwrap(),
                version: *self.random.pick(&[0, 0, version, version + 1]),
                offset: *self.random.pick(&[0, 0, len / 2, len, u64::MAX]),
                count: *self.random.pick(&[0, 1, 7, 4096, 400_000]),
            });
        }
        let crc32c = self.random.one_in(2);
        let request = Request::Get(GetRequest { crc32c, deadline_us: 0, ranges: ranges.clone() });
        let answered = self.call(&request, b"");
        let Answer::Get(got) = answered.answer else { panic!("{:?}", answered.answer) };
        for ((range, got), data) in ranges.iter().zip(got).zip(answered.data) {
            let Some(value) = self.model.get(range.key.as_bytes()) else {
                assert_eq!((got.status, got.version, got.len, data.len()), (Status::NotFound, 0, 0, 0));
                continue;
            };
            let there = (value.flags, value.version, value.octets.len() as u64);
            assert_eq!((got.flags, got.version, got.len), there);
            if range.version != 0 && range.version != value.version {
                assert_eq!((got.status, data.len()), (Status::Changed, 0));
                continue;
            }
            assert_eq!(got.status, Status::Ok);
            let start = (value.octets.len() as u64).min(range.offset) as usize;
            let end = (start + range.count as usize).min(value.octets.len());
            assert!(data == value.octets[start..end], "other octets than were put");
        }
    }

    fn stat(&mut self) {
        let picked: Vec<_> = (0..self.random.below(9)).map(|_| self.pick_key()).collect();
        let keys: Vec<_> = picked.iter().map(|&key| self.keys[key].clone()).collect();
        let until_miss = self.random.one_in(2);
        let request = StatRequest { until_miss, keys: keys.iter().map(|octets| Key::new(octets).unwrap()).collect() };
        let Answer::Stat { leading, stats } = self.call(&Request::Stat(request), b"").answer else { panic!() };
        let run = keys.iter().take_while(|key| self.model.contains_key(*key)).count();
        assert_eq!(leading as usize, run);
        assert_eq!(stats.len(), if until_miss { keys.len().min(run + 1) } else { keys.len() });
        for (key, stat) in keys.iter().zip(stats) {
            let Some(value) = self.model.get(key) else {
                assert_eq!((stat.status, stat.len, stat.version), (Status::NotFound, 0, 0));
                continue;
            };
            let len = value.octets.len() as u64;
            assert_eq!((stat.status, stat.len, stat.version), (Status::Ok, len, value.version));
            assert_eq!((stat.ram_bytes, stat.disk_bytes, stat.lead_bytes), (len, 0, len));
            assert!(stat.ttl_s <= value.ttl_s && (stat.ttl_s == 0) == (value.ttl_s == 0));
        }
    }

    fn delete(&mut self) {
        let picked: Vec<_> = (0..1 + self.random.below(2)).map(|_| self.pick_key()).collect();
        let keys: Vec<_> = picked.iter().map(|&key| self.keys[key].clone()).collect();
        let mut deletions = Vec::new();
        for key in &keys {
            let version = self.model.get(key).map_or(7, |value| value.version);
            let version = *self.random.pick(&[0, version, version + 1]);
            deletions.push(Deletion { key: Key::new(key).unwrap(), version });
        }
        let answer = self.call(&Request::Delete(deletions.clone()), b"").answer;
        let mut expected = Vec::new();
        for deletion in &deletions {
            let found = self.model.get(deletion.key.as_bytes()).map(|value| value.version);
            expected.push(match found {
                None => Status::NotFound,
                Some(version) if deletion.version != 0 && deletion.version != version => Status::Changed,
                Some(_) => {
                    self.model.remove(deletion.key.as_bytes());
                    Status::Ok
                }
            });
        }
        assert_eq!(answer, Answer::Statuses(expected));
    }

    fn touch(&mut self) {
        let key = self.pick_key();
        let octets = self.keys[key].clone();
        let ttl_s = if self.random.one_in(2) { 0 } else { 50_000 };
        let touches = vec![Touch { key: Key::new(&octets).unwrap(), ttl_s }];
        let answer = self.call(&Request::Touch(touches), b"").answer;
        let expected = match self.model.get_mut(&octets) {
            Some(value) => {
                value.ttl_s = ttl_s;
                Status::Ok
            }
            None => Status::NotFound,
        };
        assert_eq!(answer, Answer::Statuses(vec![expected]));
    }

    fn list(&mut self) {
        let prefix = self.random.pick(&[&b""[..], b"a", b"b", b"zz"]).to_vec();
        let count = 1 + self.random.below(4) as u32;
        let bytes = *self.random.pick(&[1044, 1100, 10_000]);
        let mut found = Vec::new();
        let mut cookie = Vec::new();
        loop {
            let request = ListRequest { prefix: &prefix, cookie: &cookie, count, bytes };
            let Answer::List(page) = self.call(&Request::List(request), b"").answer else { panic!() };
            assert_eq!(page.status, Status::Ok);
            found.extend(page.entries.into_iter().map(|entry| (entry.key, entry.version, entry.len)));
            if page.next.is_empty() {
                break;
            }
            cookie = page.next;
        }
        let expected: Vec<_> = self
            .model
            .iter()
            .filter(|(key, _)| key.starts_with(&prefix))
            .map(|(key, value)| (key.clone(), value.version, value.octets.len() as u64))
            .collect();
        assert_eq!(found, expected);
    }

    fn pin(&mut self) {
        let key = self.pick_key();
        let octets = self.keys[key].clone();
        let keys = vec![Key::new(&octets).unwrap()];
        if self.random.one_in(2) {
            let Answer::Pin(pinned) = self.call(&Request::Pin(keys), b"").answer else { panic!() };
            let version = self.model.get(&octets).map(|value| value.version);
            let expected = if version.is_some() { Status::Ok } else { Status::NotFound };
            assert_eq!((pinned[0].status, pinned[0].version), (expected, version.unwrap_or(0)));
        } else {
            let before = self.server.session.holds().len();
            let answer = self.call(&Request::Unpin(keys), b"").answer;
            let is_unpinned = self.server.session.holds().len() < before;
            assert_eq!(answer, Answer::Statuses(vec![if is_unpinned { Status::Ok } else { Status::NotFound }]));
        }
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..=3 => self.put(),
            4..=7 => self.put_more(),
            8 => self.put_drop(),
            9..=12 => self.get(),
            13 | 14 => self.stat(),
            15 => self.delete(),
            16 => self.touch(),
            17 => self.list(),
            18 => self.pin(),
            _ => assert_eq!(self.call(&Request::Null, b"").answer, Answer::Null),
        }
    }
}

#[test]
fn clients_see_what_a_map_says_however_a_call_travels() {
    let met = RefCell::new(BTreeSet::new());
    for_each_seed(0..40, |seed| {
        let mut client = Client::new(seed);
        for _ in 0..150 {
            client.step();
        }
        client.stat();
        client.list();
        met.borrow_mut().append(&mut client.met);
        // What the connection held ends with it.
        let Server { store, session, .. } = client.server;
        drop(session);
        let gauges = store.gauges();
        assert_eq!((gauges.claims, gauges.pins), (0, 0));
        assert_eq!(gauges.objects, client.model.len() as u64);
    });
    use Status::{BadChecksum, BadDraft, BadRange, Changed, Exists, NotFound, Ok};
    for status in [Ok, NotFound, Exists, Changed, BadChecksum, BadDraft, BadRange] {
        let is_met = met.borrow().contains(&status.number());
        assert!(is_met || std::env::var_os("BULKHEAD_SEED").is_some(), "{status:?} never came up");
    }
}
