//! A server around a responder: pulls what a call names, carries it out once, and answers when it likes.

use super::client::octets;
use super::plan::{Clock, Due, Ending, Plan, RpcRdma};
use super::sim::{SERVER, Side};
use bulkhead::fabric::{
    Attributes, Completion, Event, Flags, Lane, LocalBuf, PostError, QueuePair, Source, Status, Work, WorkKind,
};
use bulkhead::wire::codec::Reader;
use bulkhead::wire::onc_rpc::{AcceptStatus, CallHeader, Item, Payload, PayloadWriter, Reply, ReplyHeader, Xid};
use bulkhead::wire::rpcrdma::chunk::{ReadChunk, Segment, pieces};
use bulkhead::wire::rpcrdma::duplicate::{Admission, Bounds, CallKey, DuplicateCache, arguments_checksum};
use bulkhead::wire::rpcrdma::private_data::{Agreed, PrivateData};
use bulkhead::wire::rpcrdma::responder::{IncomingCall, Limits, Received, ReplyPlan, Responder, Span};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::time::{Duration, Instant};

pub const PROGRAM: u32 = 0x2000_0001;
/// The last word of arguments and results.
pub const TRAILER: u32 = 0x7a11_e400;
/// Octets of a Write that is posted inline, and of a buffer to Read into.
const INLINE_BYTES_MAX: usize = 1024;
const BUFFER_BYTES: usize = 4096;
const READ_BUFFERS: usize = 8;
const SEND_DEPTH: usize = 64;
/// As the daemon's. No copy of a call is under way for so long here.
const AGE_MAX: Duration = Duration::from_secs(120);
/// Pause before posts that the queue refused are tried again.
const PAUSE: Duration = Duration::from_micros(10);

/// The octets of an argument and of a result.
pub fn argument(number: u64, at: usize, len: u32) -> Vec<u8> {
    octets(number, 0, at, len)
}

pub fn result(number: u64, at: usize, len: u32) -> Vec<u8> {
    octets(number, 1, at, len)
}

/// A call as the server understood it.
struct Request {
    number: u64,
    wanted: Vec<u32>,
    reply_padding: usize,
    key: CallKey,
}

/// A call on its way through the server.
struct Job {
    call: IncomingCall,
    /// Reads that are not done: which chunk, and where in it.
    missing: usize,
    long: Vec<u8>,
    chunks: Vec<Vec<u8>>,
    request: Option<Request>,
}

/// What a posted request was for.
enum Posted {
    Read { xid: Xid, chunk: Option<usize>, at: usize, len: usize },
    Answer(Xid),
}

struct Wanted {
    xid: Xid,
    chunk: Option<usize>,
    at: usize,
    from: Segment,
}

/// One connection.
struct Connection {
    qp: Box<dyn QueuePair>,
    responder: Responder,
    sends: Vec<LocalBuf>,
    reads: Vec<LocalBuf>,
    buffer_count: usize,
    jobs: BTreeMap<u32, Job>,
    wanted: VecDeque<Wanted>,
    answers: VecDeque<(Xid, Request)>,
    /// An answer that the queue has had no room for.
    planned: Option<(Xid, Vec<Work>)>,
    /// What each index of the send queue is, where it is reported.
    posted: HashMap<u32, Posted>,
    retry_at: Option<Instant>,
    back: usize,
}

pub struct Server {
    plan: Plan,
    connection: Option<Connection>,
    generation: u64,
    cache: DuplicateCache,
    /// How often each call was carried out.
    pub executed: BTreeMap<u64, u32>,
    /// Calls that were answered from memory.
    pub replayed: u64,
}

impl Server {
    pub fn new(plan: Plan) -> Self {
        let cache = DuplicateCache::new(Bounds { entries_max: 1 << 16, bytes_max: 1 << 24, age_max: AGE_MAX });
        Self { plan, connection: None, generation: 0, cache, executed: BTreeMap::new(), replayed: 0 }
    }

    fn admit(&mut self, event: Event, lane: &dyn Lane) {
        let Event::ConnectRequest(request) = event else { return };
        self.generation += 1;
        let peer = PrivateData::of_peer(request.private_data());
        let own = self.plan.told[SERVER];
        let calls_max = self.plan.credits[SERVER];
        let receives = calls_max.get() as usize + 4;
        let attributes = Attributes {
            send_depth: SEND_DEPTH,
            receive_depth: receives,
            read_depth: 4,
            inline_bytes_max: INLINE_BYTES_MAX,
            ..Attributes::default()
        };
        let Ok(qp) = lane.admit(request, attributes) else { return };
        let allocate = |bytes: u32, count: usize| qp.allocate(bytes as usize, count);
        let Ok(all) = allocate(own.receive_bytes, receives) else { return };
        let Ok(sends) = allocate(own.send_bytes, calls_max.get() as usize + 4) else { return };
        let Ok(reads) = allocate(BUFFER_BYTES as u32, READ_BUFFERS) else { return };
        let buffer_count = all.len() + sends.len() + reads.len();
        for buf in all {
            qp.post_receive(buf).unwrap();
        }
        let limits = Limits {
            calls_max,
            long_call_bytes_max: 1 << 20,
            read_chunk_bytes_max: 1 << 20,
            read_bytes_max: 1 << 21,
            read_segments_max: 1000,
        };
        let mut responder = Responder::new(Agreed::between(peer, own), limits);
        responder.set_receives(calls_max.get());
        if qp.establish(&own.encode()).is_err() {
            return;
        }
        self.connection = Some(Connection {
            qp,
            responder,
            sends,
            reads,
            buffer_count,
            jobs: BTreeMap::new(),
            wanted: VecDeque::new(),
            answers: VecDeque::new(),
            planned: None,
            posted: HashMap::new(),
            retry_at: None,
            back: 0,
        });
    }

    fn handle_completed(&mut self, completion: Completion, clock: &mut Clock) {
        let Some(connection) = &mut self.connection else { return };
        let Completion { id, kind, status, buf, len, .. } = completion;
        if status != Status::Done {
            connection.back += usize::from(buf.is_some());
            return;
        }
        if kind == WorkKind::Receive {
            let buf = buf.expect("a Receive has a buffer");
            let message = buf.as_slice()[..len].to_vec();
            if let Err((_, _buf)) = connection.qp.post_receive(buf) {
                connection.back += 1;
            }
            if clock.dice.one_in(8) {
                let receives = clock.dice.below(self.plan.credits[SERVER].get().into()) + 1;
                connection.responder.set_receives(receives as u32);
            }
            match connection.responder.handle_received(&message) {
                Received::Call(call) => connection.begin(call),
                Received::Refuse(refusal) => panic!("{}", refusal.fault),
                Received::Drop(reason) => panic!("{reason:?}"),
            }
            self.take_pulled(clock);
            return;
        }
        let Some(posted) = connection.posted.remove(&id.index) else { return };
        let buf = buf.expect("what is noted has a buffer");
        match posted {
            Posted::Read { xid, chunk, at, len } => {
                if let Some(job) = connection.jobs.get_mut(&xid.0) {
                    let into = chunk.map_or(&mut job.long, |chunk| &mut job.chunks[chunk]);
                    into[at..at + len].copy_from_slice(&buf.as_slice()[..len]);
                    job.missing -= 1;
                }
                connection.reads.push(buf);
                self.take_pulled(clock);
            }
            Posted::Answer(xid) => {
                connection.responder.handle_sent(xid);
                connection.sends.push(buf);
            }
        }
    }

    /// Carries out what is pulled, later.
    fn take_pulled(&mut self, clock: &mut Clock) {
        let Some(connection) = &mut self.connection else { return };
        let pulled = |job: &Job| job.missing == 0 && job.request.is_none();
        let ready: Vec<u32> = connection.jobs.iter().filter(|(_, job)| pulled(job)).map(|(xid, _)| *xid).collect();
        for xid in ready {
            let Some(job) = connection.jobs.get_mut(&xid) else { continue };
            if job.call.long.is_some() {
                connection.responder.handle_pulled(Xid(xid), &job.long).expect("a call of ours");
            }
            let request = job.understand();
            clock.note(|| format!("server understands {}", request.number));
            match self.cache.admit(request.key, clock.elapsed()) {
                Admission::Execute => {
                    let factor = if clock.dice.one_in(5) { 20 } else { 1 };
                    let delay = clock.delay() * factor;
                    let generation = self.generation;
                    job.request = Some(request);
                    clock.after(delay, SERVER, Due::Executed { generation, xid: Xid(xid) });
                }
                Admission::Running => panic!("what a connection has begun ends with it here"),
                Admission::Replay(_) => {
                    self.replayed += 1;
                    connection.jobs.remove(&xid);
                    connection.answers.push_back((Xid(xid), request));
                }
            }
        }
    }
}

impl Connection {
    fn begin(&mut self, call: IncomingCall) {
        let xid = call.xid;
        let mut missing = 0;
        let mut want = |chunk: Option<usize>, of: &ReadChunk| {
            let mut at = 0;
            for whole in pieces(&of.segments, 0, of.len).expect("all of it") {
                let mut offset = 0;
                while offset < whole.length {
                    let length = (whole.length - offset).min(BUFFER_BYTES as u32);
                    let from = Segment { length, offset: whole.offset + u64::from(offset), ..whole };
                    self.wanted.push_back(Wanted { xid, chunk, at, from });
                    at += length as usize;
                    offset += length;
                    missing += 1;
                }
            }
        };
        call.long.iter().for_each(|long| want(None, long));
        call.reads.iter().enumerate().for_each(|(at, chunk)| want(Some(at), chunk));
        let long = vec![0; call.long.as_ref().map_or(0, |long| long.len as usize)];
        let chunks = call.reads.iter().map(|chunk| vec![0; chunk.len as usize]).collect();
        self.jobs.insert(xid.0, Job { call, missing, long, chunks, request: None });
    }

    /// Posts what can be: Reads, answers in the order in which they are ready.
    fn post(&mut self, now: Instant) {
        if self.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.retry_at = None;
        while let Some(wanted) = self.wanted.front()
            && let Some(into) = self.reads.pop()
        {
            let Wanted { xid, chunk, at, from } = *wanted;
            let range = 0..from.length as usize;
            let work = Work::Read { into, range, key: from.handle, address: from.offset, flags: Flags::SIGNALED };
            match self.hand_over(vec![work], now) {
                Ok(index) => {
                    self.posted.insert(index, Posted::Read { xid, chunk, at, len: from.length as usize });
                    self.wanted.pop_front();
                }
                Err(work) => {
                    self.reads.extend(work.into_iter().filter_map(buffer));
                    return;
                }
            }
        }
        self.answer(now);
    }

    fn answer(&mut self, now: Instant) {
        loop {
            if self.planned.is_none() {
                if self.sends.is_empty() {
                    return;
                }
                let Some((xid, request)) = self.answers.pop_front() else { return };
                let plan = self.responder.plan_reply(xid, &reply(xid, &request));
                assert_eq!(plan.fault, None, "call {}", request.number);
                self.planned = Some((xid, self.works(&plan, &request)));
            }
            let Some((xid, work)) = self.planned.take() else { return };
            match self.hand_over(work, now) {
                Ok(index) => drop(self.posted.insert(index, Posted::Answer(xid))),
                Err(work) => {
                    self.planned = Some((xid, work));
                    return;
                }
            }
        }
    }

    /// Writes, then the Send.
    fn works(&mut self, plan: &ReplyPlan, request: &Request) -> Vec<Work> {
        let spelt = |span: &Span| match span {
            Span::Octets(range) => plan.octets[range.clone()].to_vec(),
            Span::Item { token, start, len } => {
                let whole = result(request.number, *token as usize, request.wanted[*token as usize]);
                whole[*start as usize..][..*len as usize].to_vec()
            }
        };
        let mut work = Vec::new();
        for write in &plan.writes {
            for (at, piece) in spelt(&write.from).chunks(INLINE_BYTES_MAX).enumerate() {
                work.push(Work::Write {
                    from: Source::Inline(piece.to_vec()),
                    key: write.handle,
                    address: write.offset + (at * INLINE_BYTES_MAX) as u64,
                    flags: Flags::default(),
                });
            }
        }
        let message: Vec<u8> = plan.message.iter().flat_map(spelt).collect();
        let mut buf = self.sends.pop().expect("looked for before");
        buf.as_mut_slice()[..message.len()].copy_from_slice(&message);
        let from = Source::Buffer { buf, range: 0..message.len() };
        work.push(Work::Send { from, invalidate: plan.invalidate, flags: Flags::SIGNALED });
        work
    }

    /// Gives the index of the last; what was not taken comes back.
    fn hand_over(&mut self, mut work: Vec<Work>, now: Instant) -> Result<u32, Vec<Work>> {
        let count = work.len() as u32;
        match self.qp.post(&mut work) {
            Ok(first) => Ok(first.index.wrapping_add(count - 1)),
            Err(PostError::Full { .. }) => {
                self.retry_at = Some(now + PAUSE);
                Err(work)
            }
            Err(PostError::Ended | PostError::NotConnected) => Err(work),
            Err(error) => panic!("{error}"),
        }
    }
}

fn buffer(work: Work) -> Option<LocalBuf> {
    match work {
        Work::Read { into, .. } => Some(into),
        Work::Send { from: Source::Buffer { buf, .. }, .. } => Some(buf),
        _ => None,
    }
}

impl Job {
    /// Puts the stream together and reads it.
    fn understand(&self) -> Request {
        let stream = if self.call.long.is_some() { &self.long } else { &self.call.inline };
        let (mut whole, mut taken) = (Vec::new(), 0);
        for (chunk, octets) in self.call.reads.iter().zip(&self.chunks) {
            let before = chunk.position as usize - whole.len();
            whole.extend_from_slice(&stream[taken..taken + before]);
            taken += before;
            whole.extend_from_slice(octets);
            whole.resize(whole.len().next_multiple_of(4), 0);
        }
        whole.extend_from_slice(&stream[taken..]);
        let mut reader = Reader::new(&whole);
        let header = CallHeader::read(&mut reader).expect("a call");
        assert_eq!((header.xid, header.program), (self.call.xid, PROGRAM));
        let number = reader.u64().unwrap();
        let wanted = reader.array(8, 4, Reader::u32).unwrap();
        let reply_padding = reader.u32().unwrap() as usize;
        let padding = reader.opaque(usize::MAX).unwrap();
        assert!(padding.iter().all(|octet| *octet == 7));
        let count = reader.count(8, 4).unwrap();
        let mut items: Vec<Range<usize>> = Vec::new();
        for at in 0..count {
            let start = reader.offset() + 4;
            let found = reader.opaque(usize::MAX).unwrap();
            assert!(found == argument(number, at, found.len() as u32), "argument {at} of {number}");
            items.push(start..start + found.len());
        }
        assert_eq!(reader.u32().unwrap(), TRAILER);
        reader.finish().unwrap();
        let key = CallKey {
            peer: IpAddr::V4(Ipv4Addr::LOCALHOST),
            program: header.program,
            version: header.version,
            procedure: header.procedure,
            xid: header.xid,
            checksum: arguments_checksum(&whole, &items),
            spoilt: None,
        };
        Request { number, wanted, reply_padding, key }
    }
}

fn reply(xid: Xid, request: &Request) -> Payload {
    let mut message = PayloadWriter::new();
    let words = message.words();
    ReplyHeader { xid, reply: Reply::accepted(AcceptStatus::Success) }.write(words);
    words.u64(request.number);
    words.opaque(&vec![9; request.reply_padding]);
    words.count(request.wanted.len());
    (0..).zip(&request.wanted).for_each(|(token, len)| message.item(Item { token, len: *len }));
    message.words().u32(TRAILER);
    message.finish()
}

impl Side<RpcRdma> for Server {
    fn handle_event(&mut self, event: Event, lane: &dyn Lane, clock: &mut Clock) -> Result<(), Ending> {
        if let Event::ConnectRequest(_) = event {
            self.admit(event, lane);
            return Ok(());
        }
        // The rest of a queue pair for which memory was short is nobody's.
        let number = self.connection.as_ref().map(|connection| connection.qp.number());
        if event.qp() != number {
            return Ok(());
        }
        match event {
            Event::Completed { completion, .. } => {
                self.handle_completed(completion, clock);
                Ok(())
            }
            Event::Rejected { .. } | Event::Disconnected { .. } => {
                let Some(mut connection) = self.connection.take() else { return Ok(()) };
                connection
                    .sends
                    .extend(connection.planned.take().into_iter().flat_map(|(_, work)| work).filter_map(buffer));
                let free = connection.sends.len() + connection.reads.len();
                assert_eq!(free + connection.back, connection.buffer_count, "a buffer was lost");
                // What was begun is carried out; the answer is kept.
                for job in connection.jobs.into_values() {
                    if let Some(request) = job.request {
                        *self.executed.entry(request.number).or_default() += 1;
                        self.cache.complete(&request.key, &request.number.to_be_bytes(), clock.elapsed());
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn handle_due(&mut self, due: Due, clock: &mut Clock) {
        let Due::Executed { generation, xid } = due else { panic!("{due:?}") };
        let Some(connection) = self.connection.as_mut().filter(|_| generation == self.generation) else { return };
        let Some(request) = connection.jobs.remove(&xid.0).and_then(|job| job.request) else { return };
        clock.note(|| format!("server carries {} out", request.number));
        *self.executed.entry(request.number).or_default() += 1;
        self.cache.complete(&request.key, &request.number.to_be_bytes(), clock.elapsed());
        connection.answers.push_back((xid, request));
    }

    fn drive(&mut self, clock: &mut Clock) -> Result<(), Ending> {
        if let Some(connection) = &mut self.connection {
            connection.post(clock.now);
        }
        Ok(())
    }

    fn wakes_at(&self) -> Option<Instant> {
        self.connection.as_ref().and_then(|connection| connection.retry_at)
    }

    fn disconnect(&mut self) -> bool {
        self.connection.as_ref().map(|connection| connection.qp.disconnect()).is_some()
    }

    fn is_over(&self) -> bool {
        self.connection.is_none()
    }
}
