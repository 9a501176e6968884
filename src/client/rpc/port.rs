//! A requester attached to queue pairs, one after the other: the memory behind its calls, its posts, its completions.
//!
//! ```text
//!   Port::new(settings)        calls may be made, and wait
//!        | attach(queue pair)  Receives are posted, the responder is asked
//!        | handle_event(Established)
//!        v
//!   drive, handle_event …      calls go out, take_finished gives what they came to
//!        | handle_event(Disconnected)
//!        v
//!   attach(the next one)       what was not answered goes out again
//! ```

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use crate::fabric::{
    Access, Attributes, Completion, Event, FabricError, Flags, LocalBuf, MemoryRegion, PostError, QpNum, QueuePair,
    SharedSpan, Source, Status, Work, WorkKind,
};
use crate::wire::onc_rpc::{Part, Xid};
use crate::wire::rpcrdma::private_data::PrivateData;
use crate::wire::rpcrdma::requester::{
    Call, Cancel, Failure, Memory, Output, RegionId, Registration, Requester, Right, Settings, Stream, Terms,
};

/// Pause before what the fabric has no room for is tried again.
const PAUSE: Duration = Duration::from_millis(1);

/// The octets of an eligible argument.
#[derive(Clone, Debug)]
pub enum Argument {
    /// Copied.
    Octets(Vec<u8>),
    /// All of this memory, which is lent: nobody writes to it before the call is over. It is opened to the responder where
    /// the argument goes into a chunk, and copied else. It begins at a multiple of 8 octets.
    Span(SharedSpan),
}

impl Argument {
    /// Octets.
    pub fn len(&self) -> usize {
        match self {
            Self::Octets(octets) => octets.len(),
            Self::Span(span) => span.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn copy_out(&self, into: &mut [u8]) {
        match self {
            Self::Octets(octets) => into.copy_from_slice(octets),
            Self::Span(span) => span.copy_out(0, into),
        }
    }
}

/// The memory of a call, lent to it until it is over.
#[derive(Clone, Debug, Default)]
pub struct Lent {
    /// Eligible arguments: an item's token is its place here.
    pub arguments: Vec<Argument>,
    /// Where eligible results land if they come in chunks. Without one, memory is made; each is long enough for the result
    /// and begins at a multiple of 8 octets.
    pub results: Vec<Option<SharedSpan>>,
}

/// What a call got.
#[derive(Debug)]
pub struct Answer {
    /// The reply message, less what is in write chunks.
    pub stream: Vec<u8>,
    /// Write chunks, one for each eligible result from the first on: the memory, and the octets at its front that are the
    /// result.
    pub chunks: Vec<(SharedSpan, u64)>,
}

/// A call that is over. Nobody can reach its memory any more.
#[derive(Debug)]
pub struct Finished {
    pub xid: Xid,
    pub outcome: Result<Answer, Failure>,
    pub lent: Lent,
}

/// A call that is not over.
#[derive(Debug, Default)]
struct Entry {
    lent: Lent,
    /// Where results go.
    landings: Vec<SharedSpan>,
    reply: Option<SharedSpan>,
    regions: Vec<(RegionId, MemoryRegion)>,
}

/// A queue pair and its buffers. Fields are dropped in order: the queue pair first.
#[derive(Debug)]
struct Attached {
    qp: Box<dyn QueuePair>,
    receives: Vec<LocalBuf>,
    sends: Vec<LocalBuf>,
    buffer_count: usize,
}

/// See the module's text. The owner drives the lane and brings the events.
#[derive(Debug)]
pub struct Port {
    requester: Requester,
    entries: HashMap<Xid, Entry>,
    attached: Option<Attached>,
    is_established: bool,
    /// What the fabric had no room for, and when to try again.
    blocked: Option<(Output, Instant)>,
    finished: VecDeque<Finished>,
}

/// What a queue pair for `requester` must be able to do.
pub fn attributes(requester: &Requester, handshake_timeout: Duration) -> Attributes {
    Attributes {
        send_depth: requester.send_count() as usize,
        receive_depth: requester.receive_count() as usize,
        // The responder moves all chunks.
        never_reads: true,
        handshake_timeout,
        ..Attributes::default()
    }
}

impl Port {
    /// One without a queue pair.
    pub fn new(settings: Settings) -> Self {
        Self {
            requester: Requester::new(settings),
            entries: HashMap::new(),
            attached: None,
            is_established: false,
            blocked: None,
            finished: VecDeque::new(),
        }
    }

    /// What decides.
    pub const fn requester(&self) -> &Requester {
        &self.requester
    }

    /// What calls are sized for, while there is a connection.
    pub fn terms(&self) -> Option<Terms> {
        self.requester.terms()
    }

    /// Whether a queue pair is attached.
    pub const fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// Whether the responder has accepted.
    pub const fn is_established(&self) -> bool {
        self.is_established
    }

    /// The queue pair's name in events.
    pub fn number(&self) -> Option<QpNum> {
        self.attached.as_ref().map(|attached| attached.qp.number())
    }

    /// Asks the responder. `qp` was dialled with [`attributes`].
    ///
    /// # Errors
    /// What the fabric says; the port is as before then.
    ///
    /// # Panics
    /// If a queue pair is attached.
    pub fn attach(&mut self, qp: Box<dyn QueuePair>) -> io::Result<()> {
        assert!(self.attached.is_none(), "one queue pair at a time");
        self.requester.set_remote_invalidate(qp.can_be_invalidated());
        let own = *self.requester.private_data();
        let (receives, sends) = (self.requester.receive_count(), self.requester.send_count());
        let mut all = qp.allocate(own.receive_bytes as usize, receives as usize).map_err(io::Error::other)?;
        let sends = qp.allocate(own.send_bytes as usize, sends as usize).map_err(io::Error::other)?;
        let buffer_count = all.len() + sends.len();
        for buf in all.drain(..) {
            qp.post_receive(buf).map_err(|(error, _)| io::Error::other(error))?;
        }
        qp.establish(&own.encode()).map_err(io::Error::other)?;
        self.requester.handle_receives_posted(receives);
        self.attached = Some(Attached { qp, receives: all, sends, buffer_count });
        Ok(())
    }

    /// Makes a call: `build` gets its xid. It waits for a connection and for a credit.
    pub fn call(&mut self, lent: Lent, build: impl FnOnce(Xid) -> Call) -> Xid {
        let xid = self.requester.mint_xid();
        self.entries.insert(xid, Entry { lent, ..Entry::default() });
        self.requester.call(xid, build(xid));
        xid
    }

    /// Gives a call up, see [`Requester::cancel`].
    pub fn cancel(&mut self, xid: Xid, when: Cancel) -> bool {
        self.requester.cancel(xid, when)
    }

    /// Fails all calls, see [`Requester::abandon`].
    ///
    /// # Panics
    /// While a queue pair is attached.
    pub fn abandon(&mut self) {
        assert!(self.attached.is_none(), "a connection that is there ends first");
        self.requester.abandon();
    }

    /// A call that is over.
    pub fn take_finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    /// Calls that are not over.
    pub fn pending_count(&self) -> usize {
        self.entries.len()
    }

    /// Something happened to the queue pair.
    pub fn handle_event(&mut self, event: Event) {
        match event {
            Event::Established { private_data, .. } => {
                self.is_established = true;
                self.requester.handle_connected(PrivateData::of_peer(&private_data));
            }
            Event::Completed { completion, .. } => self.handle_completed(completion),
            Event::Rejected { .. } | Event::Disconnected { .. } => self.handle_disconnected(),
            Event::ConnectRequest(_) | Event::HandshakeFailed { .. } | Event::Written { .. } => {}
        }
    }

    fn handle_completed(&mut self, completion: Completion) {
        let Completion { kind, status, buf, len, invalidated, .. } = completion;
        let (Some(attached), Some(buf)) = (&mut self.attached, buf) else { return };
        match (kind, status) {
            (WorkKind::Receive, Status::Done) => {
                self.requester.handle_received(&buf.as_slice()[..len], invalidated);
                attached.receives.push(buf);
            }
            (WorkKind::Receive, _) => attached.receives.push(buf),
            (_, status) => {
                if status == Status::Done {
                    self.requester.handle_sent();
                }
                attached.sends.push(buf);
            }
        }
    }

    /// The last event of the queue pair has come: its keys open nothing any more.
    fn handle_disconnected(&mut self) {
        for entry in self.entries.values_mut() {
            entry.regions.clear();
        }
        (self.blocked, self.is_established) = (None, false);
        self.requester.handle_disconnected();
        self.attached = None;
    }

    /// After the queue pair has ended and before that is told: whether each buffer is back.
    pub fn has_all_buffers(&self) -> bool {
        let back = |attached: &Attached| attached.receives.len() + attached.sends.len();
        self.attached.as_ref().is_none_or(|attached| back(attached) == attached.buffer_count)
    }

    /// Ends the connection. Its events go on to the last.
    pub fn disconnect(&mut self) {
        if let Some(attached) = &self.attached {
            attached.qp.disconnect();
        }
    }

    /// When [`Port::drive`] wants to be called though nothing happened.
    pub fn deadline(&self) -> Option<Instant> {
        let retry_at = self.blocked.as_ref().map(|(_, retry_at)| *retry_at);
        [self.requester.deadline(), retry_at].into_iter().flatten().min()
    }

    /// Does all that can be done now. `true` if there was anything.
    pub fn drive(&mut self, now: Instant) -> bool {
        let mut moved = false;
        while let Some(output) = self.poll_output(now) {
            moved |= self.obey(output, now);
        }
        if moved && let Some(attached) = &self.attached {
            attached.qp.kick();
        }
        moved
    }

    /// What to do next. For owners who do some of it later: each is for [`Port::obey`].
    pub fn poll_output(&mut self, now: Instant) -> Option<Output> {
        match self.blocked.take() {
            Some((output, retry_at)) if retry_at <= now => Some(output),
            Some(blocked) => {
                self.blocked = Some(blocked);
                None
            }
            None => {
                self.requester.handle_timeout(now);
                self.requester.poll_output(now)
            }
        }
    }

    /// Does it. `false` if the fabric has no room now: it is kept, see [`Port::deadline`].
    pub fn obey(&mut self, output: Output, now: Instant) -> bool {
        let Some(attached) = &mut self.attached else {
            // Of an ended connection nothing is left but what calls came to.
            if let Output::Completed { xid, outcome } = output {
                self.complete(xid, outcome);
            }
            return true;
        };
        match output {
            Output::Receive(count) => {
                for _ in 0..count {
                    let Some(buf) = attached.receives.pop() else { break };
                    match attached.qp.post_receive(buf) {
                        Ok(_) => self.requester.handle_receives_posted(1),
                        Err((_, buf)) => {
                            // The end of the connection is on its way.
                            attached.receives.push(buf);
                            break;
                        }
                    }
                }
            }
            Output::Register(registration) => return self.register(registration, now),
            Output::Send { xid, message } => return self.send(xid, message, now),
            Output::Invalidate { xid, id } => {
                if let Some(entry) = self.entries.get_mut(&xid) {
                    // Dropped, they are deregistered.
                    entry.regions.retain(|(region, _)| *region != id);
                }
                self.requester.handle_invalidated(id);
            }
            Output::Completed { xid, outcome } => self.complete(xid, outcome),
            Output::Disconnect(reason) => {
                tracing::debug!(%reason, "an RPC connection is given up");
                attached.qp.disconnect();
            }
        }
        true
    }

    fn register(&mut self, registration: Registration, now: Instant) -> bool {
        let (Some(attached), Some(entry)) = (&self.attached, self.entries.get_mut(&registration.xid)) else {
            self.requester.handle_refused(registration.id);
            return true;
        };
        let access = match registration.right {
            Right::Read => Access::READ,
            Right::Write => Access::WRITE,
        };
        let access = if registration.remote_invalidate { access.invalidatable() } else { access };
        let span = entry.span(&registration).map_err(|source| FabricError::System { what: "find memory", source });
        match span.and_then(|span| attached.qp.register(span, access)) {
            Ok(region) => {
                let remote = region.remote();
                entry.regions.push((registration.id, region));
                self.requester.handle_registered(registration.id, remote.key, remote.address);
            }
            Err(FabricError::System { source, .. }) if source.kind() == io::ErrorKind::WouldBlock => {
                self.blocked = Some((Output::Register(registration), now + PAUSE));
                return false;
            }
            Err(error) => {
                tracing::debug!(%error, "the memory of a call cannot be registered");
                self.requester.handle_refused(registration.id);
            }
        }
        true
    }

    fn send(&mut self, xid: Xid, message: Vec<Part>, now: Instant) -> bool {
        let (Some(attached), Some(entry)) = (&mut self.attached, self.entries.get(&xid)) else { return true };
        // As many as there are credits; one may not be back though its reply is.
        let Some(mut buf) = attached.sends.pop() else {
            self.blocked = Some((Output::Send { xid, message }, now + PAUSE));
            return false;
        };
        let mut len = 0;
        for part in &message {
            let start = len;
            match part {
                Part::Bytes(octets) => {
                    len += octets.len();
                    buf.as_mut_slice()[start..len].copy_from_slice(octets);
                }
                Part::Item(item) => {
                    len += item.len as usize;
                    entry.argument(item.token).copy_out(&mut buf.as_mut_slice()[start..len]);
                }
            }
        }
        let from = Source::Buffer { buf, range: 0..len };
        let mut work = vec![Work::Send { from, invalidate: None, flags: Flags::SIGNALED }];
        let posted = attached.qp.post(&mut work);
        for work in work {
            if let Work::Send { from: Source::Buffer { buf, .. }, .. } = work {
                attached.sends.push(buf);
            }
        }
        match posted {
            Ok(_) => true,
            Err(PostError::Full { .. }) => {
                self.blocked = Some((Output::Send { xid, message }, now + PAUSE));
                false
            }
            // The end of the connection is on its way, and brings the call back.
            Err(PostError::Ended | PostError::NotConnected) => true,
            Err(error) => panic!("a call within the threshold was refused: {error}"),
        }
    }

    fn complete(&mut self, xid: Xid, outcome: Result<crate::wire::rpcrdma::requester::Reply, Failure>) {
        let Some(entry) = self.entries.remove(&xid) else { return };
        let Entry { lent, landings, reply, regions } = entry;
        // Closed already; here they are given back.
        drop(regions);
        let outcome = outcome.map(|answered| {
            let stream = match answered.stream {
                Stream::Inline(stream) => stream,
                Stream::Chunk(len) => {
                    let mut stream = vec![0; len as usize];
                    if let Some(reply) = &reply {
                        reply.copy_out(0, &mut stream);
                    }
                    stream
                }
            };
            Answer { stream, chunks: landings.into_iter().zip(answered.results).collect() }
        });
        self.finished.push_back(Finished { xid, outcome, lent });
    }
}

impl Entry {
    fn argument(&self, token: u32) -> &Argument {
        &self.lent.arguments[token as usize]
    }

    /// The memory of a region.
    fn span(&mut self, registration: &Registration) -> io::Result<SharedSpan> {
        let len = usize::try_from(registration.len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        match &registration.memory {
            Memory::Call(parts) => {
                let span = SharedSpan::new(len)?;
                let mut at = 0;
                for part in parts {
                    match part {
                        Part::Bytes(octets) => {
                            span.copy_in(at, octets);
                            at += octets.len();
                        }
                        Part::Item(item) => {
                            let mut octets = vec![0; item.len as usize];
                            self.argument(item.token).copy_out(&mut octets);
                            span.copy_in(at, &octets);
                            at += octets.len();
                        }
                    }
                }
                Ok(span)
            }
            Memory::Argument(item) => match self.argument(item.token) {
                Argument::Span(span) => Ok(span.clone()),
                Argument::Octets(octets) => {
                    let span = SharedSpan::new(len)?;
                    span.copy_in(0, octets);
                    Ok(span)
                }
            },
            Memory::Result(index) => {
                let lent = self.lent.results.get(*index).and_then(Option::as_ref);
                let span = match lent.filter(|span| span.len() >= len) {
                    Some(span) => span.slice(0..len),
                    None => SharedSpan::new(len)?,
                };
                // Regions of results are asked for in their order; after a lost connection once more.
                self.landings.truncate(*index);
                self.landings.push(span.clone());
                Ok(span)
            }
            Memory::Reply => {
                let span = SharedSpan::new(len)?;
                self.reply = Some(span.clone());
                Ok(span)
            }
        }
    }
}
