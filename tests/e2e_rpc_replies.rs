//! The requester against a server that answers by hand, over living connections: every row of the error table that is about
//! replies, what follows when a connection is lost, and that nothing is left behind.

use bulkhead::client::rpc::port::{Answer, Finished, Lent, Port, attributes};
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::fabric::loopback::Loopback;
use bulkhead::fabric::{
    Address, Attributes, Cause, Event, Fabric, Flags, Lane, Listener, QueuePair, RemoteKey, Resources, Source, Status,
    Work, WorkKind,
};
use bulkhead::programs::bulkhead::answer::{Answer as Results, Expectation, Got};
use bulkhead::programs::bulkhead::{GetRequest, Item, Key, RangeOf, Request, Status as Word};
use bulkhead::programs::rpc::{ReplyFault as ResultFault, bare_reply};
use bulkhead::wire::onc_rpc::{
    AcceptStatus, OpaqueAuth, Part, Payload, PayloadWriter, Reply, ReplyHeader, Versions, Xid,
};
use bulkhead::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, ReturnedError, Segment};
use bulkhead::wire::rpcrdma::header::{Header, Message, Placement, RdmaError};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use bulkhead::wire::rpcrdma::requester::{Call, Cancel, Failure, Reduction, ReplyFault, Settings};
use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The limit only turns a hang into a failure.
const PATIENCE: Duration = Duration::from_secs(30);
const FABRICS: [&str; 2] = ["loopback", "iwarp"];
const INLINE: u32 = 1024;
const RECEIVES: usize = 16;
/// Turns in which whatever was posted is there.
const TURNS: usize = 300;

/// The server's end.
struct Server {
    qp: Box<dyn QueuePair>,
    messages: VecDeque<Vec<u8>>,
    ended: Option<Cause>,
}

/// What came of a call that the server has in hand.
struct Heard {
    xid: Xid,
    lists: ChunkLists,
}

struct World {
    lanes: [Arc<dyn Lane>; 2],
    listener: Box<dyn Listener>,
    port: Port,
    server: Option<Server>,
    /// Receives of the server.
    receive_count: usize,
    finished: Vec<Finished>,
    ends: Vec<Cause>,
}

fn settings() -> Settings {
    Settings {
        own: PrivateData { remote_invalidate: true, send_bytes: INLINE, receive_bytes: INLINE },
        credits: NonZeroU32::new(4).unwrap(),
        segment_bytes_max: NonZeroU32::new(4096).unwrap(),
        reply_timeout: PATIENCE,
        attempts_max: NonZeroU32::new(3).unwrap(),
        first_xid: Xid(0xffff_fffe),
    }
}

impl World {
    fn new(fabric: &str, settings: Settings) -> Self {
        let (fabric, address): (Arc<dyn Fabric>, _) = match fabric {
            "loopback" => (Arc::new(Loopback::new()), Address::Name("server".into())),
            _ => (Arc::new(Iwarp::default()), Address::Socket(([127, 0, 0, 1], 0).into())),
        };
        let lanes = [fabric.lane().unwrap(), fabric.lane().unwrap()];
        let listener = lanes[1].listen(&address).unwrap();
        let (receive_count, ends) = (RECEIVES, Vec::new());
        Self { lanes, listener, port: Port::new(settings), server: None, receive_count, finished: Vec::new(), ends }
    }

    fn connected(fabric: &str) -> Self {
        let mut world = Self::new(fabric, settings());
        world.connect();
        world
    }

    fn connect(&mut self) {
        let attributes = attributes(self.port.requester(), Duration::from_secs(5));
        let qp = self.lanes[0].dial(&self.listener.address(), attributes).unwrap();
        self.port.attach(qp).unwrap();
        self.until("a connection", |world| world.port.is_established() && world.server.is_some());
    }

    fn turn(&mut self) {
        let mut events = Vec::new();
        self.lanes[1].progress(Instant::now(), &mut events, 64);
        for event in events.drain(..) {
            self.handle_server(event);
        }
        self.lanes[0].progress(Instant::now(), &mut events, 64);
        for event in events {
            if let Event::Disconnected { cause, .. } = &event {
                self.ends.push(cause.clone());
            }
            self.port.handle_event(event);
        }
        self.port.drive(Instant::now());
        self.finished.extend(std::iter::from_fn(|| self.port.take_finished()));
    }

    fn handle_server(&mut self, event: Event) {
        match event {
            Event::ConnectRequest(request) => {
                let qp = self.lanes[1].admit(request, Attributes::default()).unwrap();
                for buf in qp.allocate(INLINE as usize, RECEIVES).unwrap().into_iter().take(self.receive_count) {
                    qp.post_receive(buf).unwrap();
                }
                qp.establish(&settings().own.encode()).unwrap();
                self.server = Some(Server { qp, messages: VecDeque::new(), ended: None });
            }
            Event::Completed { qp, completion } if completion.kind == WorkKind::Receive => {
                let Some(server) = self.server.as_mut().filter(|server| server.qp.number() == qp) else { return };
                let Some(buf) = completion.buf.filter(|_| completion.status == Status::Done) else { return };
                server.messages.push_back(buf.as_slice()[..completion.len].to_vec());
                let _ = server.qp.post_receive(buf);
            }
            Event::Disconnected { qp, cause } => {
                let server = self.server.as_mut().filter(|server| server.qp.number() == qp);
                server.into_iter().for_each(|server| server.ended = Some(cause.clone()));
            }
            _ => {}
        }
    }

    fn until(&mut self, what: &str, mut enough: impl FnMut(&Self) -> bool) {
        let started = Instant::now();
        while !enough(self) {
            assert!(started.elapsed() < PATIENCE, "never: {what}; {:?}", self.ends);
            self.turn();
        }
    }

    /// Both ends have seen the end of the connection.
    fn until_ended(&mut self) {
        let count = self.ends.len();
        self.until("the end", |world| world.ends.len() > count || !world.port.is_attached());
        self.until("the end at the server", |world| world.server.as_ref().is_none_or(|server| server.ended.is_some()));
        self.server = None;
    }

    fn ask(&mut self, results: &[u32], reply_bytes_max: u64) -> Xid {
        let call = |xid: Xid| {
            let mut message = PayloadWriter::new();
            message.words().u32(xid.0);
            (0..10).for_each(|word| message.words().u32(word));
            Call {
                message: message.finish(),
                arguments: Reduction::Fit,
                results: results.to_vec(),
                results_reduction: Reduction::Fit,
                reply_bytes_max,
            }
        };
        self.port.call(Lent { arguments: Vec::new(), results: vec![None; results.len()] }, call)
    }

    /// One with results in chunks of one and two segments, and a reply chunk.
    fn ask_for_all(&mut self) -> Xid {
        self.ask(&[100, 8000], 2000)
    }

    fn heard(&mut self) -> Heard {
        self.until("a call", |world| world.server.as_ref().is_some_and(|server| !server.messages.is_empty()));
        let message = self.server.as_mut().unwrap().messages.pop_front().unwrap();
        let Ok(Message::Transport(call)) = Message::decode(&message) else { panic!("no call: {message:x?}") };
        assert!(call.credit > 0);
        Heard { xid: call.xid, lists: call.to_header().lists }
    }

    /// Messages that the server has and that come while nothing is answered.
    fn count_of_calls(&mut self) -> usize {
        (0..TURNS).for_each(|_| self.turn());
        self.server.as_ref().unwrap().messages.len()
    }

    fn post(&mut self, work: Work) {
        let qp = &self.server.as_ref().unwrap().qp;
        qp.post(&mut vec![work]).unwrap();
        qp.kick();
    }

    fn source(&self, octets: &[u8]) -> Source {
        let mut buf = self.server.as_ref().unwrap().qp.allocate(octets.len().max(1), 1).unwrap().remove(0);
        buf.as_mut_slice()[..octets.len()].copy_from_slice(octets);
        Source::Buffer { buf, range: 0..octets.len() }
    }

    fn answer(&mut self, message: &[u8], invalidate: Option<RemoteKey>) {
        let from = self.source(message);
        self.post(Work::Send { from, invalidate, flags: Flags::default() });
    }

    fn write(&mut self, to: Segment, octets: &[u8]) {
        let from = self.source(octets);
        self.post(Work::Write { from, key: to.handle, address: to.offset, flags: Flags::default() });
    }

    /// What became of a call, told once.
    fn outcome(&mut self, xid: Xid) -> Result<Answer, Failure> {
        self.until("an outcome", |world| world.finished.iter().any(|finished| finished.xid == xid));
        let at = self.finished.iter().position(|finished| finished.xid == xid).unwrap();
        let outcome = self.finished.remove(at).outcome;
        assert!(self.finished.iter().all(|finished| finished.xid != xid), "told twice");
        outcome
    }

    /// The client leaves; nothing of it is left.
    fn finish(mut self) {
        if self.port.is_attached() {
            self.port.disconnect();
            self.until_ended();
        }
        assert_eq!(self.port.pending_count(), 0);
        self.server = None;
        for (lane, listeners) in [(0, 0), (1, 1)] {
            let expected = Resources { listeners, ..Resources::default() };
            self.until("rest", |world| world.lanes[lane].resources() == expected);
        }
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// A header and what is behind it.
fn message(xid: Xid, placement: Placement, lists: ChunkLists, payload: &[u32]) -> Vec<u8> {
    [Header { xid, credit: 4, placement, lists }.encode(), words(payload)].concat()
}

/// An accepted call without results.
fn rpc(xid: Xid) -> Vec<u32> {
    vec![xid.0, 1, 0, 0, 0, 0]
}

/// What was offered, with these octets in its segments, in their order.
fn returned(lists: &ChunkLists, lengths: [u32; 4]) -> ChunkLists {
    let mut lists = ChunkLists { reads: Vec::new(), ..lists.clone() };
    let all = lists.writes.iter_mut().flatten().chain(lists.reply.iter_mut().flatten());
    all.zip(lengths).for_each(|(segment, length)| segment.length = length);
    lists
}

fn good(heard: &Heard) -> Vec<u8> {
    message(heard.xid, Placement::Inline, returned(&heard.lists, [100, 4096, 904, 0]), &rpc(heard.xid))
}

/// Nothing but a header, and a payload of no results.
fn plain(xid: Xid, credit: u32) -> Vec<u8> {
    let header = Header { xid, credit, placement: Placement::Inline, lists: ChunkLists::default() };
    [header.encode(), words(&rpc(xid))].concat()
}

enum Verdict {
    /// The call goes on.
    Drop,
    Fail(Failure),
}

type Row = (&'static str, fn(&Heard) -> Vec<u8>, Verdict);

fn with(heard: &Heard, at: usize, word: u32) -> Vec<u8> {
    let mut octets = plain(heard.xid, 4);
    octets[at..at + 4].copy_from_slice(&word.to_be_bytes());
    octets
}

fn inline(heard: &Heard, lists: ChunkLists) -> Vec<u8> {
    message(heard.xid, Placement::Inline, lists, &rpc(heard.xid))
}

fn alone(heard: &Heard, lists: ChunkLists) -> Vec<u8> {
    message(heard.xid, Placement::Chunk, lists, &[])
}

fn segment(handle: u32, length: u32, offset: u64) -> Segment {
    Segment { handle: RemoteKey(handle), length, offset }
}

/// In the order of the table in docs/conformance.md.
fn rows() -> Vec<Row> {
    use Verdict::{Drop, Fail};
    let fails = |fault| Fail(Failure::Reply(fault));
    let chunk = |index, error| Fail(Failure::Reply(ReplyFault::WriteChunk { index, error }));
    vec![
        ("shorter than 16", |heard| good(heard)[..15].to_vec(), Drop),
        ("one octet", |heard| good(heard)[..1].to_vec(), Drop),
        ("16 octets", |heard| good(heard)[..16].to_vec(), Drop),
        ("27 octets", |heard| good(heard)[..27].to_vec(), Drop),
        ("ERR_CHUNK of 20", |heard| words(&[heard.xid.0, 1, 4, 4, 2]), Fail(Failure::Rdma(RdmaError::Chunk))),
        ("ERR_CHUNK, cut", |heard| words(&[heard.xid.0, 1, 4, 4]), Drop),
        (
            "ERR_VERS of 28 in version 2",
            |heard| words(&[heard.xid.0, 2, 4, 4, 1, 2, 3]),
            Fail(Failure::Rdma(RdmaError::Version { low: 2, high: 3 })),
        ),
        ("ERR_VERS, cut", |heard| words(&[heard.xid.0, 1, 4, 4, 1, 2]), Drop),
        ("an error that is none", |heard| words(&[heard.xid.0, 1, 4, 4, 3, 0, 0]), Drop),
        ("an error for nobody", |heard| words(&[heard.xid.0 ^ 0x55, 1, 4, 4, 2]), Drop),
        ("version 2", |heard| with(heard, 4, 2), Drop),
        ("RDMA_MSGP", |heard| with(heard, 12, 2), Drop),
        ("RDMA_DONE", |heard| with(heard, 12, 3), Drop),
        ("an unknown procedure", |heard| with(heard, 12, 5), Drop),
        ("a boolean that is neither", |heard| with(heard, 20, 2), Drop),
        ("a list that is cut", |heard| good(heard)[..60].to_vec(), Drop),
        (
            "a count beyond the message",
            |heard| words(&[heard.xid.0, 1, 4, 0, 0, 1, 0x1000_0001, 1, 1, 1, 1, 0, 0, heard.xid.0, 1, 0, 0, 0, 0]),
            Drop,
        ),
        (
            "RDMA_NOMSG without a reply chunk",
            |heard| alone(heard, ChunkLists { reply: None, ..returned(&heard.lists, [0; 4]) }),
            fails(ReplyFault::NoPayload),
        ),
        (
            "RDMA_NOMSG with an unused one",
            |heard| alone(heard, returned(&heard.lists, [0; 4])),
            fails(ReplyFault::NoPayload),
        ),
        ("another xid in the message", |heard| with(heard, 28, heard.xid.0 ^ 1), Drop),
        ("an xid that nobody waits for", |heard| plain(Xid(heard.xid.0 ^ 0x55), 4), Drop),
        ("a call from the server", |heard| with(heard, 32, 0), Drop),
        (
            "a read list",
            |heard| {
                let reads = vec![ReadSegment { position: 0, target: segment(4, 64, 0) }];
                inline(heard, ChunkLists { reads, ..ChunkLists::default() })
            },
            Drop,
        ),
        (
            "a segment that wraps",
            |heard| inline(heard, ChunkLists { writes: vec![vec![segment(1, 2, u64::MAX)]], ..ChunkLists::default() }),
            Drop,
        ),
        (
            "a chunk too few",
            |heard| {
                let mut lists = returned(&heard.lists, [0; 4]);
                lists.writes.pop();
                inline(heard, lists)
            },
            fails(ReplyFault::WriteChunks { offered: 2, returned: 1 }),
        ),
        (
            "a segment too few",
            |heard| {
                let mut lists = returned(&heard.lists, [0; 4]);
                lists.writes[1].pop();
                inline(heard, lists)
            },
            chunk(1, ReturnedError::Count { offered: 2, returned: 1 }),
        ),
        (
            "another handle",
            |heard| {
                let mut lists = returned(&heard.lists, [100, 0, 0, 0]);
                lists.writes[0][0].handle.0 ^= 1;
                inline(heard, lists)
            },
            chunk(0, ReturnedError::Segment(0)),
        ),
        (
            "another offset",
            |heard| {
                let mut lists = returned(&heard.lists, [100, 0, 0, 0]);
                lists.writes[0][0].offset += 4;
                inline(heard, lists)
            },
            chunk(0, ReturnedError::Segment(0)),
        ),
        (
            "longer than was offered",
            |heard| inline(heard, returned(&heard.lists, [101, 0, 0, 0])),
            chunk(0, ReturnedError::Length { index: 0, offered: 100, returned: 101 }),
        ),
        ("a gap", |heard| inline(heard, returned(&heard.lists, [0, 4095, 1, 0])), chunk(1, ReturnedError::Gap(1))),
        (
            "longer than the reply chunk",
            |heard| alone(heard, returned(&heard.lists, [0, 0, 0, 2001])),
            fails(ReplyFault::Returned(ReturnedError::Length { index: 0, offered: 2000, returned: 2001 })),
        ),
        (
            "a payload and a reply chunk",
            |heard| inline(heard, returned(&heard.lists, [0, 0, 0, 40])),
            fails(ReplyFault::Both(40)),
        ),
    ]
}

#[test]
fn replies_that_are_none_are_dropped_and_bad_ones_fail_their_call_by_this_table() {
    for fabric in FABRICS {
        let mut world = World::connected(fabric);
        for (name, build, verdict) in rows() {
            let xid = world.ask_for_all();
            let heard = world.heard();
            assert_eq!((heard.xid, heard.lists.writes.len(), heard.lists.reply.is_some()), (xid, 2, true), "{name}");
            world.answer(&build(&heard), None);
            match verdict {
                Verdict::Drop => {
                    world.answer(&good(&heard), None);
                    let answer = world.outcome(xid).unwrap_or_else(|failure| panic!("{name}: {failure}"));
                    assert_eq!(answer.chunks.iter().map(|(_, len)| *len).collect::<Vec<_>>(), [100, 5000], "{name}");
                }
                Verdict::Fail(expected) => {
                    assert_eq!(world.outcome(xid).unwrap_err(), expected, "{name}");
                    // A second answer is to nothing.
                    world.answer(&good(&heard), None);
                }
            }
            assert_eq!(world.count_of_calls(), 0, "{name}: nothing is sent again, and no error to a server");
            assert!(world.ends.is_empty(), "{name}: {:?}", world.ends);
            assert_eq!(world.lanes[0].resources().regions, 0, "{name}: memory stays open");
        }
        world.finish();
    }
}

/// Of a program that is understood: what it may not do, and what it says of itself.
#[test]
fn results_that_are_not_where_they_belong_and_refusals_are_told_to_the_caller() {
    let range = RangeOf { key: Key::new(b"k").unwrap(), version: 0, offset: 0, count: 5000 };
    let request: Request<'_, Item> = Request::Get(GetRequest { crc32c: false, deadline_us: 0, ranges: vec![range] });
    let expectation: Expectation = request.expectation();
    let results = |xid: Xid, len: u32| {
        let data = Item { token: 0, len };
        let got = Got { status: Word::Ok, flags: 0, version: 1, len: len.into(), crc32c: None, data };
        Results::Get(vec![got]).encode(xid)
    };
    let spelt = |payload: Payload, is_inline: bool| -> Vec<u8> {
        let part = |part: &Part| match part {
            Part::Bytes(octets) => octets.clone(),
            Part::Item(item) => vec![7; if is_inline { item.len.next_multiple_of(4) as usize } else { 0 }],
        };
        payload.parts().iter().flat_map(part).collect()
    };
    let versions = AcceptStatus::ProgMismatch(Versions { low: 1, high: 1 });
    let refusal = |xid, status| spelt(bare_reply(&ReplyHeader { xid, reply: Reply::accepted(status) }), true);
    type Build<'a> = Box<dyn Fn(Xid) -> (u32, Vec<u8>) + 'a>;
    let table: Vec<(&str, Build<'_>, ResultFault)> = vec![
        (
            "inline beside its chunk",
            Box::new(|xid| (0, spelt(results(xid, 40), true))),
            ResultFault::ChunkLength { index: 0, item_bytes: 40, chunk_bytes: 0 },
        ),
        (
            "fewer octets than its chunk got",
            Box::new(|xid| (41, spelt(results(xid, 40), false))),
            ResultFault::ChunkLength { index: 0, item_bytes: 40, chunk_bytes: 41 },
        ),
        (
            "a chunk written for no result",
            Box::new(|xid| (40, refusal(xid, AcceptStatus::SystemErr))),
            ResultFault::Unsuccessful(AcceptStatus::SystemErr),
        ),
        (
            "no such program",
            Box::new(|xid| (0, refusal(xid, AcceptStatus::ProgUnavail))),
            ResultFault::Unsuccessful(AcceptStatus::ProgUnavail),
        ),
        ("no such version", Box::new(|xid| (0, refusal(xid, versions))), ResultFault::Unsuccessful(versions)),
        (
            "no such procedure",
            Box::new(|xid| (0, refusal(xid, AcceptStatus::ProcUnavail))),
            ResultFault::Unsuccessful(AcceptStatus::ProcUnavail),
        ),
    ];
    for fabric in FABRICS {
        let mut world = World::connected(fabric);
        for (name, build, expected) in &table {
            let call = |xid| Call {
                message: request.encode(xid, OpaqueAuth::NONE),
                arguments: Reduction::Fit,
                results: expectation.items().to_vec(),
                results_reduction: Reduction::Fit,
                reply_bytes_max: expectation.reduced_bytes_max(),
            };
            let xid = world.port.call(Lent { arguments: Vec::new(), results: vec![None] }, call);
            let heard = world.heard();
            let (len, payload) = build(xid);
            let lists = returned(&heard.lists, [len.min(4096), len.saturating_sub(4096), 0, 0]);
            let header = Header { xid, credit: 4, placement: Placement::Inline, lists };
            world.answer(&[header.encode(), payload].concat(), None);
            let answer = world.outcome(xid).unwrap();
            let chunks: Vec<_> = answer.chunks.iter().map(|(_, len)| Some(*len)).collect();
            assert_eq!(expectation.decode(&answer.stream, &chunks).unwrap_err(), *expected, "{name}");
        }
        world.finish();
    }
}

#[test]
fn grants_are_clamped_and_the_window_is_one_until_the_first_reply_of_each_connection() {
    for fabric in FABRICS {
        let mut world = World::connected(fabric);
        let mut xids: VecDeque<Xid> = (0..12).map(|_| world.ask(&[], 24)).collect();
        let mut unanswered = 0;
        for (granted, window) in [(0, 1), (1, 1), (3, 3), (u32::MAX, 4), (2, 2)] {
            if unanswered == 0 {
                assert_eq!(world.count_of_calls(), 1, "before a reply said more");
            }
            let heard = world.heard();
            world.answer(&plain(heard.xid, granted), None);
            world.outcome(heard.xid).unwrap();
            xids.retain(|xid| *xid != heard.xid);
            // Those of a larger grant are not called back.
            unanswered = world.count_of_calls();
            assert!(unanswered == window || (granted == 2 && unanswered == 3), "{granted} granted: {unanswered}");
        }
        world.port.disconnect();
        world.until_ended();
        world.connect();
        assert_eq!(world.count_of_calls(), 1, "credits of another connection");
        while !xids.is_empty() {
            let heard = world.heard();
            world.answer(&plain(heard.xid, 4), None);
            world.outcome(heard.xid).unwrap();
            xids.retain(|xid| *xid != heard.xid);
        }
        world.finish();
    }
}

#[test]
fn ten_thousand_replies_that_are_none_cost_no_receive() {
    let mut world = World::connected("loopback");
    let xid = world.ask_for_all();
    let heard = world.heard();
    let strange =
        [good(&heard)[..27].to_vec(), with(&heard, 12, 3), with(&heard, 32, 0), with(&heard, 4, 2), plain(Xid(9), 1)];
    for round in 0..2_000 {
        for message in &strange {
            world.answer(message, None);
        }
        world.turn();
        assert!(world.ends.is_empty(), "round {round}: {:?}", world.ends);
    }
    world.answer(&good(&heard), None);
    world.outcome(xid).unwrap();
    world.finish();
}

/// The server's Read is refused, or its Write, or the call finds no Receive: the connection is lost, and the call comes again
/// on the next with its xid and other handles.
#[test]
fn a_call_that_is_lost_with_its_connection_comes_again_with_its_xid() {
    for fabric in FABRICS {
        for how in ["a Read fails", "a Write fails", "a Send fails", "the server goes", "no answer"] {
            let timeout = if how == "no answer" { Duration::from_millis(50) } else { PATIENCE };
            let mut world = World::new(fabric, Settings { reply_timeout: timeout, ..settings() });
            world.receive_count = if how == "a Send fails" { 0 } else { RECEIVES };
            world.connect();
            let xid = world.ask_for_all();
            let first = if how == "a Send fails" { None } else { Some(world.heard()) };
            let wrong =
                |heard: &Heard| Segment { offset: heard.lists.writes[0][0].offset + 1, ..heard.lists.writes[0][0] };
            match (how, &first) {
                ("a Read fails", Some(heard)) => {
                    let into = world.server.as_ref().unwrap().qp.allocate(100, 1).unwrap().remove(0);
                    let Segment { handle: key, offset: address, .. } = heard.lists.writes[0][0];
                    world.post(Work::Read { into, range: 0..100, key, address, flags: Flags::SIGNALED });
                }
                ("a Write fails", Some(heard)) => world.write(wrong(heard), &[7; 100]),
                ("the server goes", _) => world.server.as_ref().unwrap().qp.disconnect(),
                _ => {}
            }
            world.until_ended();
            assert!(world.finished.is_empty(), "{how}");
            world.receive_count = RECEIVES;
            world.connect();
            let second = world.heard();
            assert_eq!(second.xid, xid, "{how}");
            if let Some(first) = first {
                let handle = |heard: &Heard| heard.lists.writes[0][0].handle;
                assert_ne!(handle(&first), handle(&second), "{how}: a handle of another connection");
            }
            world.answer(&good(&second), None);
            world.outcome(xid).unwrap();
            world.finish();
        }
    }
}

#[test]
fn a_handle_of_another_call_closed_by_the_server_ends_the_connection() {
    for fabric in FABRICS {
        let mut world = World::connected(fabric);
        let first = world.ask(&[], 24);
        world.heard();
        world.answer(&plain(first, 4), None);
        let (one, other) = (world.ask(&[3000], 24), world.ask(&[3000], 24));
        let heard = [world.heard(), world.heard()];
        world.answer(&plain(one, 4), Some(heard[1].lists.writes[0][0].handle));
        world.until_ended();
        world.outcome(first).unwrap();
        world.outcome(one).unwrap();
        assert!(world.finished.is_empty(), "the other is sent again");
        world.connect();
        let again = world.heard();
        assert_eq!(again.xid, other);
        world.answer(&plain(other, 4), Some(again.lists.writes[0][0].handle));
        world.outcome(other).unwrap();
        world.finish();
    }
}

/// A server may write to a chunk and use none of it: what its reply says counts, not what the memory holds.
#[test]
fn memory_of_an_unused_chunk_is_not_taken_for_a_result() {
    for fabric in FABRICS {
        let mut world = World::connected(fabric);
        for says in [0, 60] {
            let xid = world.ask(&[3000], 24);
            let heard = world.heard();
            let target = heard.lists.writes[0][0];
            world.write(target, &[7; 3000]);
            let lists = returned(&heard.lists, [says, 0, 0, 0]);
            world.answer(&message(xid, Placement::Inline, lists, &rpc(xid)), Some(target.handle));
            let answer = world.outcome(xid).unwrap();
            assert_eq!(answer.chunks.iter().map(|(_, len)| *len).collect::<Vec<_>>(), [u64::from(says)]);
        }
        world.finish();
    }
}

/// A call is given up just as its answer comes, with and without the handle of its memory: nothing is closed twice, and no
/// other call is touched.
#[test]
fn a_call_is_given_up_while_its_answer_closes_its_memory() {
    for fabric in FABRICS {
        for when in [Cancel::Answered, Cancel::Now] {
            for closes in [false, true] {
                let mut world = World::connected(fabric);
                let first = world.ask(&[], 24);
                world.heard();
                world.answer(&plain(first, 4), None);
                let (given_up, other) = (world.ask(&[3000], 24), world.ask(&[3000], 24));
                let heard = [world.heard(), world.heard()];
                let handle = |heard: &Heard| closes.then_some(heard.lists.writes[0][0].handle);
                world.answer(&plain(given_up, 4), handle(&heard[0]));
                assert!(world.port.cancel(given_up, when));
                let outcome = world.outcome(given_up);
                assert!(matches!(outcome, Err(Failure::Cancelled)), "{when:?}");
                // Who gives up at once may have closed what the server closes then, which ends the connection.
                let is_refused = closes && when == Cancel::Now;
                if is_refused
                    && (0..TURNS).any(|_| {
                        world.turn();
                        !world.ends.is_empty()
                    })
                {
                    world.until_ended();
                    world.connect();
                    assert_eq!(world.heard().xid, other);
                }
                world.answer(&plain(other, 4), None);
                world.outcome(other).unwrap();
                world.finish();
            }
        }
    }
}

/// Something that grows with every connection stops a client after some.
#[test]
fn a_thousand_connections_leave_nothing_behind() {
    let mut world = World::new("loopback", settings());
    for round in 0..1000 {
        world.connect();
        let (one, other) = (world.ask_for_all(), world.ask_for_all());
        let heard = world.heard();
        assert_eq!((heard.xid, world.server.as_ref().unwrap().messages.len()), (one, 0), "one credit, round {round}");
        world.answer(&good(&heard), None);
        world.outcome(one).unwrap();
        let heard = world.heard();
        world.answer(&good(&heard), None);
        world.outcome(other).unwrap();
        world.port.disconnect();
        world.until_ended();
        assert_eq!(world.lanes[0].resources(), Resources::default());
        assert_eq!((world.port.requester().region_count(), world.port.requester().pending_count()), (0, 0));
    }
    world.finish();
}
