//! A peer of the RPC door that makes its calls by hand: memory, chunks and messages are what it is told.

use bulkhead::fabric::{
    Access, Address, Attributes, Cause, Event, Fabric, Flags, Lane, MemoryRegion, QueuePair, SharedSpan, Source,
    Status, Work, WorkKind,
};
use bulkhead::programs::bulkhead::answer::{Answer, Expectation};
use bulkhead::programs::bulkhead::{Item, Request};
use bulkhead::programs::rpc::{Data, ReplyFault};
use bulkhead::wire::onc_rpc::{OpaqueAuth, Part, Payload, Xid};
use bulkhead::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, Segment};
use bulkhead::wire::rpcrdma::header::{Header, Message, Placement, RdmaError};
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The limit only turns a hang into a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);
const RECEIVES: usize = 64;
/// Octets of memory that nobody wrote to.
const FRESH: u8 = 0xee;

/// A call: what is asked, and how it travels.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    pub request: Request<'a, Item>,
    /// What is called instead of that, of another program, with any xid; [`taken`] takes its answer apart.
    pub other: Option<Payload>,
    /// Octets of the argument that may be reduced.
    pub data: Vec<u8>,
    /// `data` goes in a read chunk of segments of these lengths; a sum beyond its length is roundup.
    pub cuts: Option<Vec<u32>>,
    /// Write chunks, each of segments of these lengths.
    pub writes: Vec<Vec<u32>>,
    pub reply: Option<Vec<u32>>,
    /// The stream goes in a chunk at position zero, of segments of at most so many octets.
    pub long: Option<usize>,
}

impl<'a> Ask<'a> {
    /// All inline.
    pub fn new(request: Request<'a, Item>) -> Self {
        Self { request, other: None, data: Vec::new(), cuts: None, writes: Vec::new(), reply: None, long: None }
    }

    /// A call to another program.
    pub fn other(payload: Payload) -> Self {
        Self { other: Some(payload), ..Self::new(Request::Null) }
    }

    /// The same with these octets.
    pub fn with(self, data: &[u8]) -> Self {
        Self { data: data.to_vec(), ..self }
    }
}

/// Memory of a chunk.
type Chunk = Vec<MemoryRegion>;

/// A call that was sent.
#[derive(Debug)]
pub struct Pending {
    pub xid: Xid,
    expectation: Expectation,
    writes: Vec<Chunk>,
    reply: Option<Chunk>,
    /// Open to the server until the call is answered.
    pub sources: Vec<MemoryRegion>,
}

impl Pending {
    /// No octet of what it offers was written to.
    pub fn is_untouched(&self) -> bool {
        let mut regions = self.writes.iter().chain(&self.reply).flatten();
        regions.all(|region| octets_of(region).iter().all(|octet| *octet == FRESH))
    }
}

/// What came back.
#[derive(Debug)]
pub struct Replied {
    pub answer: Answer,
    /// Octets of each eligible result.
    pub data: Vec<Vec<u8>>,
    pub granted: u32,
    pub placement: Placement,
}

/// How a call ended.
#[derive(Debug)]
pub enum Outcome {
    Replied(Replied),
    /// RDMA_ERROR.
    Error(RdmaError),
    /// A reply without results, or one that cannot be used.
    Fault(ReplyFault),
}

impl Outcome {
    pub fn replied(self) -> Replied {
        match self {
            Self::Replied(replied) => replied,
            other => panic!("no answer: {other:?}"),
        }
    }
}

/// One connection.
pub struct Raw {
    lane: Arc<dyn Lane>,
    pub qp: Box<dyn QueuePair>,
    /// What the server told of itself.
    pub server: PrivateData,
    pub ended: Option<Cause>,
    /// Messages that came and were not looked at, with the key that each took out of service.
    pub messages: VecDeque<(Vec<u8>, Option<bulkhead::fabric::RemoteKey>)>,
    next_xid: u32,
}

pub fn octets_of(region: &MemoryRegion) -> Vec<u8> {
    let mut octets = vec![0; region.span().len()];
    region.span().copy_out(0, &mut octets);
    octets
}

impl Raw {
    pub async fn connect(fabric: &dyn Fabric, address: &Address, inline_bytes: u32) -> Self {
        Self::dial(fabric, address, inline_bytes, false).await.expect("connected")
    }

    /// `Err` has the private data of a rejection.
    pub async fn dial(
        fabric: &dyn Fabric,
        address: &Address,
        inline_bytes: u32,
        remote_invalidate: bool,
    ) -> Result<Self, Vec<u8>> {
        let own = PrivateData { remote_invalidate, send_bytes: inline_bytes, receive_bytes: inline_bytes };
        Self::dial_with(fabric, address, &own.encode(), inline_bytes).await
    }

    /// The same with any private data, and Receives of so many octets, whatever it says.
    pub async fn dial_with(
        fabric: &dyn Fabric,
        address: &Address,
        private_data: &[u8],
        receive_bytes: u32,
    ) -> Result<Self, Vec<u8>> {
        let lane = fabric.lane().unwrap();
        let qp = lane.dial(address, Attributes { never_reads: true, ..Attributes::default() }).unwrap();
        for buf in qp.allocate(receive_bytes as usize, RECEIVES).unwrap() {
            qp.post_receive(buf).unwrap();
        }
        qp.establish(private_data).unwrap();
        let (started, mut events) = (Instant::now(), Vec::new());
        let server = loop {
            assert!(started.elapsed() < PATIENCE, "no answer to a dial");
            lane.progress(Instant::now(), &mut events, 1);
            match events.pop() {
                Some(Event::Established { private_data, .. }) => break PrivateData::of_peer(&private_data),
                Some(Event::Rejected { private_data, .. }) => return Err(private_data),
                // Receives of one that is rejected.
                Some(Event::Completed { .. }) => {}
                Some(other) => panic!("not connected: {other:?}"),
                None => tokio::task::yield_now().await,
            }
        };
        let (ended, messages) = (None, VecDeque::new());
        Ok(Self { lane, qp, server, ended, messages, next_xid: 1000 })
    }

    /// One look at the fabric.
    pub async fn turn(&mut self) {
        let mut events = Vec::new();
        self.lane.progress(Instant::now(), &mut events, 64);
        for event in events {
            match event {
                Event::Completed { completion, .. } if completion.kind == WorkKind::Receive => {
                    let Some(buf) = completion.buf.filter(|_| completion.status == Status::Done) else { continue };
                    self.messages.push_back((buf.as_slice()[..completion.len].to_vec(), completion.invalidated));
                    let _ = self.qp.post_receive(buf);
                }
                Event::Disconnected { cause, .. } => self.ended = Some(cause),
                _ => {}
            }
        }
        tokio::task::yield_now().await;
    }

    /// Turns until `enough`. False at the end of the connection.
    pub async fn until(&mut self, mut enough: impl FnMut(&Self) -> bool) -> bool {
        let started = Instant::now();
        while !enough(self) {
            if self.ended.is_some() {
                return false;
            }
            assert!(started.elapsed() < PATIENCE, "the server says nothing");
            self.turn().await;
        }
        true
    }

    /// Waits for the end.
    pub async fn end(&mut self) -> Cause {
        self.until(|raw| raw.ended.is_some()).await;
        self.ended.clone().expect("it has ended")
    }

    /// The next message.
    pub async fn receive(&mut self) -> Vec<u8> {
        assert!(self.until(|raw| !raw.messages.is_empty()).await, "ended: {:?}", self.ended);
        self.messages.pop_front().expect("there is one").0
    }

    pub fn post(&mut self, work: Work) {
        self.qp.post(&mut vec![work]).unwrap();
        self.qp.kick();
    }

    /// Sends any octets.
    pub fn send(&mut self, message: &[u8]) {
        let from = if message.len() <= self.qp.attributes().inline_bytes_max {
            Source::Inline(message.to_vec())
        } else {
            let mut buf = self.qp.allocate(message.len(), 1).unwrap().remove(0);
            buf.as_mut_slice()[..message.len()].copy_from_slice(message);
            Source::Buffer { buf, range: 0..message.len() }
        };
        self.post(Work::Send { from, invalidate: None, flags: Flags::default() });
    }

    /// The same, unless the connection has ended.
    pub fn try_send(&mut self, message: &[u8]) {
        if self.ended.is_none() && !message.is_empty() {
            let mut buf = self.qp.allocate(message.len(), 1).unwrap().remove(0);
            buf.as_mut_slice()[..message.len()].copy_from_slice(message);
            let from = Source::Buffer { buf, range: 0..message.len() };
            let _ = self.qp.post(&mut vec![Work::Send { from, invalidate: None, flags: Flags::default() }]);
            self.qp.kick();
        }
    }

    /// Memory with `octets`, open to the server.
    pub fn expose(&self, octets: &[u8], access: Access) -> MemoryRegion {
        let span = SharedSpan::new(octets.len().max(1)).unwrap();
        span.copy_in(0, octets);
        self.qp.register(span, access).unwrap()
    }

    fn chunk(&self, lengths: &[u32]) -> Chunk {
        lengths.iter().map(|&len| self.expose(&vec![FRESH; len as usize], Access::WRITE.invalidatable())).collect()
    }

    fn segments(chunk: &Chunk, lengths: &[u32]) -> Vec<Segment> {
        let segment = |(region, &length): (&MemoryRegion, &u32)| Segment {
            handle: region.key(),
            length,
            offset: region.remote().address,
        };
        chunk.iter().zip(lengths).map(segment).collect()
    }

    fn sources(&self, octets: &[u8], cuts: &[u32], position: u32, sources: &mut Vec<MemoryRegion>) -> Vec<ReadSegment> {
        let mut octets = octets.to_vec();
        // A roundup's octets may be anything.
        octets.resize(cuts.iter().sum::<u32>() as usize, 0x55);
        let mut rest = &octets[..];
        let mut segments = Vec::new();
        for &length in cuts {
            let (part, behind) = rest.split_at(length as usize);
            rest = behind;
            let region = self.expose(part, Access::READ.invalidatable());
            let target = Segment { handle: region.key(), length, offset: region.remote().address };
            segments.push(ReadSegment { position, target });
            sources.push(region);
        }
        segments
    }

    /// The message of a call, and what it opens.
    pub fn prepare(&mut self, ask: &Ask<'_>) -> (Vec<u8>, Pending) {
        let xid = Xid(self.next_xid);
        self.next_xid += 1;
        self.prepare_as(xid, ask)
    }

    pub fn prepare_as(&mut self, xid: Xid, ask: &Ask<'_>) -> (Vec<u8>, Pending) {
        let (mut sources, mut reads, mut stream) = (Vec::new(), Vec::new(), Vec::new());
        let payload = match &ask.other {
            Some(payload) => payload.clone().with_xid(xid),
            None => ask.request.encode(xid, OpaqueAuth::NONE),
        };
        for part in payload.parts() {
            match (part, &ask.cuts) {
                (Part::Bytes(bytes), _) => stream.extend_from_slice(bytes),
                (Part::Item(_), None) => {
                    stream.extend_from_slice(&ask.data);
                    stream.resize(stream.len().next_multiple_of(4), 0);
                }
                // It is the only one, so nothing before it was taken out.
                (Part::Item(_), Some(cuts)) => {
                    reads.extend(self.sources(&ask.data, cuts, stream.len() as u32, &mut sources))
                }
            }
        }
        if let Some(part_bytes) = ask.long {
            let cuts: Vec<u32> = stream.chunks(part_bytes).map(|part| part.len() as u32).collect();
            let long = self.sources(&stream, &cuts, 0, &mut sources);
            reads.splice(0..0, long);
            stream.clear();
        }
        let chunks: Vec<Chunk> = ask.writes.iter().map(|lengths| self.chunk(lengths)).collect();
        let reply = ask.reply.as_ref().map(|lengths| self.chunk(lengths));
        let lists = ChunkLists {
            reads,
            writes: chunks.iter().zip(&ask.writes).map(|(chunk, lengths)| Self::segments(chunk, lengths)).collect(),
            reply: reply.iter().zip(&ask.reply).map(|(chunk, lengths)| Self::segments(chunk, lengths)).next(),
        };
        let placement = if ask.long.is_some() { Placement::Chunk } else { Placement::Inline };
        let mut message = Header { xid, credit: 32, placement, lists }.encode();
        message.extend(stream);
        let pending = Pending { xid, expectation: ask.request.expectation(), writes: chunks, reply, sources };
        (message, pending)
    }

    pub fn ask(&mut self, ask: &Ask<'_>) -> Pending {
        let (message, pending) = self.prepare(ask);
        self.send(&message);
        pending
    }

    /// The answer to `pending`; others stay where they are.
    pub async fn answer(&mut self, pending: &Pending) -> Outcome {
        read(&self.answer_to(pending).await, pending)
    }

    /// The same as it came.
    pub async fn answer_to(&mut self, pending: &Pending) -> Vec<u8> {
        let of = |message: &[u8]| message.get(..4) == Some(&pending.xid.0.to_be_bytes()[..]);
        let came = self.until(|raw| raw.messages.iter().any(|(message, _)| of(message))).await;
        assert!(came, "{:?} is not answered: {:?}", pending.xid, self.ended);
        let at = self.messages.iter().position(|(message, _)| of(message)).expect("it came");
        self.messages.remove(at).expect("it is there").0
    }

    /// Calls another program.
    pub async fn call_other(&mut self, ask: &Ask<'_>) -> Result<Taken, RdmaError> {
        let pending = self.ask(ask);
        taken(&self.answer_to(&pending).await, &pending)
    }

    pub async fn call(&mut self, ask: &Ask<'_>) -> Outcome {
        let pending = self.ask(ask);
        self.answer(&pending).await
    }
}

/// What came with an answer.
#[derive(Debug)]
pub struct Taken {
    /// The RPC message, less what is in write chunks.
    pub stream: Vec<u8>,
    /// Octets in each write chunk.
    pub chunks: Vec<Vec<u8>>,
    pub granted: u32,
    pub placement: Placement,
}

/// Takes an answer apart.
pub fn read(message: &[u8], pending: &Pending) -> Outcome {
    let Taken { stream, chunks, granted, placement } = match taken(message, pending) {
        Ok(taken) => taken,
        Err(error) => return Outcome::Error(error),
    };
    let lengths: Vec<_> =
        pending.writes.iter().zip(&chunks).map(|(c, o)| (!c.is_empty()).then_some(o.len() as u64)).collect();
    let (xid, answer) = match pending.expectation.decode(&stream, &lengths) {
        Ok(decoded) => decoded,
        Err(fault) => return Outcome::Fault(fault),
    };
    assert_eq!(xid, pending.xid);
    let data = match &answer {
        Answer::Get(got) => got
            .iter()
            .map(|got| match &got.data {
                Data::Inline(range) => stream[range.clone()].to_vec(),
                Data::Chunk { index, len } => chunks[*index][..*len as usize].to_vec(),
            })
            .collect(),
        _ => Vec::new(),
    };
    Outcome::Replied(Replied { answer, data, granted, placement })
}

/// The same, whatever program it is of.
///
/// # Errors
/// An RDMA_ERROR.
pub fn taken(message: &[u8], pending: &Pending) -> Result<Taken, RdmaError> {
    let reply = match Message::decode(message).expect("a message") {
        Message::Error { error, .. } => return Err(error),
        Message::Transport(reply) => reply,
    };
    reply.check_reply().unwrap();
    let taken = |chunk: &Chunk, returned: &[Segment]| {
        assert_eq!(chunk.len(), returned.len(), "all segments come back");
        let mut octets = Vec::new();
        let mut is_full = true;
        for (region, segment) in chunk.iter().zip(returned) {
            assert_eq!((segment.handle, segment.offset), (region.key(), region.remote().address));
            assert!(is_full || segment.length == 0, "a gap");
            is_full = segment.length as usize == region.span().len();
            octets.extend_from_slice(&octets_of(region)[..segment.length as usize]);
        }
        octets
    };
    let returned: Vec<Vec<Segment>> = reply.writes.chunks().map(|chunk| chunk.to_vec()).collect();
    assert_eq!(returned.len(), pending.writes.len(), "all write chunks come back");
    let chunks: Vec<_> = pending.writes.iter().zip(&returned).map(|(chunk, back)| taken(chunk, back)).collect();
    assert_eq!(reply.reply.is_some(), pending.reply.is_some(), "a reply chunk comes back");
    let long = pending.reply.iter().zip(reply.reply).map(|(chunk, back)| taken(chunk, &back.to_vec())).next();
    let stream = match reply.placement {
        Placement::Inline => {
            assert!(long.is_none_or(|long| long.is_empty()), "both inline and in the reply chunk");
            reply.payload.to_vec()
        }
        Placement::Chunk => long.expect("a reply chunk"),
    };
    Ok(Taken { stream, chunks, granted: reply.credit, placement: reply.placement })
}
