//! One connection: requests in their order, and the turns that move them. Nothing here sleeps.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::port::{Port, Prepared, attributes};
use crate::client::connection::{DRAIN_BYTES_MAX, Info, Options, STATS_COUNT_MAX, shown};
use crate::client::{ClientError, ServerUrl};
use crate::fabric::spin::Spin;
use crate::fabric::{self, Address, Cause, Event, Fabric, Lane, SharedSpan, WorkKind};
use crate::wire::native::descriptor::{Descriptor, Nonce};
use crate::wire::native::endpoint::{EndCause, Endpoint};
use crate::wire::native::requester::{Answer, Requester, Shape};
use crate::wire::native::window::RxLease;

/// A window with more octets than these is part of a stream.
const SHORT_BYTES_MAX: u32 = 16 << 10;
/// Events of a lane taken in one turn.
const EVENT_COUNT_MAX: usize = 32;
/// Unread text is a matter of the time-out of the link, which also knows of windows.
const STALL_TIMEOUT: Duration = Duration::from_secs(365 * 86_400);

/// Where the octets of a value to be stored come from.
pub(super) enum Source {
    Owned(Box<dyn Read + Send>),
    /// The reader that the caller brings to each turn.
    Caller,
}

/// What an answer must look like.
pub(super) enum Kind {
    /// The key that was asked for, and what was found under it so far.
    Get {
        key: Vec<u8>,
        info: Option<Info>,
    },
    Store {
        source: Option<Source>,
        len: u64,
    },
    /// A word for yes; NOT_FOUND is no.
    YesOrNo {
        yes: &'static [u8],
    },
    Version,
    Stats(Vec<(String, String)>),
}

struct Request {
    /// With its CR LF.
    line: Vec<u8>,
    kind: Kind,
    /// What its answer will be though it goes on.
    failure: Option<ClientError>,
    is_wanted: bool,
}

/// What a request came to.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Outcome {
    /// The value went to where the caller wanted it.
    Value(Info),
    /// There is no such value.
    Miss,
    /// The value is stored.
    Stored,
    /// Done: deleted, touched.
    Done,
    /// The server's version.
    Version(String),
    /// Names and values, in the server's order.
    Stats(Vec<(String, String)>),
}

/// Takes the octets of one value.
pub(super) trait Sink {
    /// A value comes; `false` if nobody wants its octets.
    fn open(&mut self, info: &Info) -> Result<bool, ClientError>;
    /// The next `len` octets lie in `windows` from `offset` on.
    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()>;
    /// The value is whole.
    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Wants none.
pub(super) struct Nothing;

impl Sink for Nothing {
    fn open(&mut self, _: &Info) -> Result<bool, ClientError> {
        Ok(false)
    }

    fn take(&mut self, _: &SharedSpan, _: usize, _: usize) -> io::Result<()> {
        Ok(())
    }
}

/// The front of the caller's memory.
pub(super) struct Into<'a> {
    buffer: &'a mut [u8],
    filled: usize,
}

impl<'a> Into<'a> {
    pub(super) fn new(buffer: &'a mut [u8]) -> Self {
        Self { buffer, filled: 0 }
    }
}

impl Sink for Into<'_> {
    fn open(&mut self, info: &Info) -> Result<bool, ClientError> {
        let capacity = self.buffer.len();
        if info.len > capacity as u64 {
            return Err(ClientError::TooLong { len: info.len, capacity });
        }
        Ok(true)
    }

    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()> {
        // The endpoint lets no more octets come than the value's line said.
        windows.copy_out(offset, &mut self.buffer[self.filled..self.filled + len]);
        self.filled += len;
        Ok(())
    }
}

/// A writer that is made once the value is known to exist. Octets pass through `bounce`.
pub(super) struct Writing<'a, W, F> {
    pub(super) open: Option<F>,
    pub(super) writer: Option<W>,
    pub(super) bounce: &'a mut Vec<u8>,
}

/// Octets that pass on their way to a writer at once: they stay in the processor's cache.
pub(super) const BOUNCE_BYTES: usize = 256 << 10;

impl<W: Write, F: FnOnce(&Info) -> io::Result<W>> Sink for Writing<'_, W, F> {
    fn open(&mut self, info: &Info) -> Result<bool, ClientError> {
        if let Some(open) = self.open.take() {
            self.writer = Some(open(info).map_err(|source| ClientError::Local { source })?);
        }
        Ok(true)
    }

    fn take(&mut self, windows: &SharedSpan, mut offset: usize, mut len: usize) -> io::Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        if self.bounce.len() < len.min(BOUNCE_BYTES) {
            self.bounce.resize(len.min(BOUNCE_BYTES), 0);
        }
        while len > 0 {
            let count = len.min(self.bounce.len());
            windows.copy_out(offset, &mut self.bounce[..count]);
            writer.write_all(&self.bounce[..count])?;
            offset += count;
            len -= count;
        }
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        self.writer.as_mut().map_or(Ok(()), Write::flush)
    }
}

/// A connection that is being made.
pub(super) struct Dial {
    url: ServerUrl,
    lane: Arc<dyn Lane>,
    /// `None` once it is given away.
    prepared: Option<Prepared>,
    deadline: Instant,
    events: Vec<Event>,
    io_timeout: Duration,
}

impl Dial {
    /// Asks the server at `address`.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`]; [`ClientError::Local`] for a geometry that cannot be had.
    pub(super) fn start(
        url: &ServerUrl,
        fabric: &dyn Fabric,
        address: &Address,
        options: Options,
    ) -> Result<Self, ClientError> {
        options.geometry.parts().map_err(|error| ClientError::Local {
            source: io::Error::new(ErrorKind::InvalidInput, error.to_string()),
        })?;
        let begin = || {
            let lane = fabric.lane().map_err(io::Error::other)?;
            let qp = lane.dial(address, attributes(options.connect_timeout)).map_err(io::Error::other)?;
            let nonce = Nonce::ours(std::process::id());
            let prepared = Prepared::new(qp, options.geometry, nonce)?;
            prepared.establish()?;
            io::Result::Ok((lane, prepared))
        };
        let (lane, prepared) = begin().map_err(|source| ClientError::Unreachable { url: url.clone(), source })?;
        Ok(Self {
            url: url.clone(),
            lane,
            prepared: Some(prepared),
            deadline: Instant::now() + options.connect_timeout,
            events: Vec::new(),
            io_timeout: options.io_timeout,
        })
    }

    pub(super) fn lane(&self) -> &Arc<dyn Lane> {
        &self.lane
    }

    /// When [`Dial::turn`] must be called though nothing happened.
    pub(super) fn wakes_at(&self) -> Instant {
        self.lane.deadline().map_or(self.deadline, |deadline| deadline.min(self.deadline))
    }

    /// The link, once the server has accepted.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`]; [`ClientError::Protocol`] if what it says of itself is no descriptor.
    pub(super) fn turn(&mut self, now: Instant) -> Result<Option<Link>, ClientError> {
        self.lane.progress(now, &mut self.events, EVENT_COUNT_MAX);
        let unreachable = |url: &ServerUrl, kind, what: String| ClientError::Unreachable {
            url: url.clone(),
            source: io::Error::new(kind, what),
        };
        for event in self.events.drain(..) {
            match event {
                Event::Established { private_data, .. } => {
                    let peer = Descriptor::decode(&private_data).map_err(|error| ClientError::Protocol {
                        url: self.url.clone(),
                        what: format!("it accepts with no descriptor: {error}"),
                    })?;
                    let Some(prepared) = self.prepared.take() else { continue };
                    let requester = Requester::new(!peer.nonce.is_ours());
                    return Ok(Some(Link {
                        url: self.url.clone(),
                        lane: Arc::clone(&self.lane),
                        port: prepared.attach(peer, requester, STALL_TIMEOUT, now),
                        events: Vec::new(),
                        requests: VecDeque::new(),
                        asked: 0,
                        sources: VecDeque::new(),
                        next_source: 0,
                        io_timeout: self.io_timeout,
                        spin: Spin::new(&*self.lane),
                        moved_at: now,
                        ended: None,
                        may_leave: true,
                        is_broken: false,
                        reply_began: false,
                    }));
                }
                Event::Rejected { private_data, .. } => {
                    return Err(unreachable(&self.url, ErrorKind::ConnectionRefused, declined(&private_data)));
                }
                Event::Disconnected { cause: Cause::TimedOut, .. } => {
                    return Err(unreachable(&self.url, ErrorKind::TimedOut, Cause::TimedOut.to_string()));
                }
                Event::Disconnected { cause, .. } => {
                    return Err(unreachable(&self.url, ErrorKind::ConnectionRefused, cause.to_string()));
                }
                Event::ConnectRequest(_)
                | Event::HandshakeFailed { .. }
                | Event::Completed { .. }
                | Event::Written { .. } => {}
            }
        }
        if now >= self.deadline {
            return Err(unreachable(&self.url, ErrorKind::TimedOut, Cause::TimedOut.to_string()));
        }
        Ok(None)
    }
}

/// What a rejection says.
fn declined(private_data: &[u8]) -> String {
    match fabric::said(private_data) {
        // So it is with a Bulkhead that has no memory for another connection.
        None => "the server declined without a word: it is short of memory, or went away".to_owned(),
        Some(word) => format!("the server declined: {word}"),
    }
}

/// One connection, established.
pub(super) struct Link {
    url: ServerUrl,
    lane: Arc<dyn Lane>,
    port: Port<u64, Requester>,
    events: Vec<Event>,
    /// In the order of submission; the first `asked` of them were given to the endpoint.
    requests: VecDeque<Request>,
    asked: usize,
    /// Of values that are not wholly on their way, with the octets still to be read.
    sources: VecDeque<(u64, Source, u64)>,
    next_source: u64,
    io_timeout: Duration,
    /// Whether waiting for the server begins awake.
    pub(super) spin: Spin,
    /// When octets last moved, or the first request of an idle link was made.
    moved_at: Instant,
    ended: Option<Cause>,
    /// A new connection is cheaper than octets that nobody wants. Not where others share this one.
    pub(super) may_leave: bool,
    /// An error has left the two sides out of step, or the connection is gone.
    pub(super) is_broken: bool,
    /// A part of the answer to the oldest request has come.
    pub(super) reply_began: bool,
}

impl Link {
    pub(super) fn lane(&self) -> &Arc<dyn Lane> {
        &self.lane
    }

    /// Requests without their whole answer.
    pub(super) fn pending_count(&self) -> usize {
        self.requests.len()
    }

    /// Values that are still being sent.
    pub(super) fn is_sending(&self) -> bool {
        !self.sources.is_empty()
    }

    /// A window with more than a few octets is at the front.
    pub(super) fn holds_bulk(&self) -> bool {
        self.port.endpoint.inbound.lease().is_some_and(|lease| lease.len() > SHORT_BYTES_MAX)
    }

    /// Nothing has come that nobody asked for, and the server is there.
    pub(super) fn is_fresh(&mut self, now: Instant) -> bool {
        // Nothing is posted: releases that are due leave with the request that follows.
        let received = self.receive(now).and_then(|_| self.port.poll_ring(now).map_err(|cause| self.fail(cause)));
        received.is_ok() && !self.is_broken && self.ended.is_none() && self.port.endpoint.inbound.is_empty()
    }

    /// When [`Link::turn`] must be called though nothing happened.
    pub(super) fn wakes_at(&self) -> Option<Instant> {
        let stall = (!self.requests.is_empty()).then(|| self.moved_at + self.io_timeout);
        [self.lane.deadline(), self.port.deadline(), stall].into_iter().flatten().min()
    }

    /// Somebody waits from now on: the time-out counts anew.
    pub(super) fn handle_waiting(&mut self, now: Instant) {
        self.moved_at = now;
    }

    /// Adds a request; the next turn sends it. `line` has its CR LF.
    pub(super) fn submit(&mut self, line: Vec<u8>, kind: Kind, now: Instant) {
        if self.requests.is_empty() {
            self.moved_at = now;
            self.reply_began = false;
        }
        self.requests.push_back(Request { line, kind, failure: None, is_wanted: true });
    }

    /// One turn: events, records, requests, fills, posts. `true` if anything moved.
    ///
    /// # Errors
    /// [`ClientError::Local`] if a reader fails or ends early; [`ClientError::Protocol`].
    pub(super) fn turn(&mut self, now: Instant, caller: &mut dyn Read) -> Result<bool, ClientError> {
        let mut moved = self.receive(now)?;
        loop {
            let mut again = false;
            if self.port.poll_ring(now).map_err(|cause| self.fail(cause))? > 0 {
                self.moved_at = now;
                again = true;
            }
            again |= self.ask();
            again |= self.fill(caller)?;
            again |= self.port.poll_post(now).map_err(|cause| self.fail(cause))? > 0;
            if !again {
                return Ok(moved);
            }
            moved = true;
        }
    }

    /// Takes what the lane has to report. `true` if anything moved.
    fn receive(&mut self, now: Instant) -> Result<bool, ClientError> {
        let mut moved = self.lane.progress(now, &mut self.events, EVENT_COUNT_MAX);
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            moved = true;
            match event {
                Event::Completed { completion, .. } => {
                    // A server that has died is still read from: that moves nothing.
                    if completion.kind == WorkKind::Write {
                        self.moved_at = now;
                    }
                    self.port.handle_completed(completion, now).map_err(|cause| self.fail(cause))?;
                }
                Event::Disconnected { cause, .. } => self.ended = Some(cause),
                Event::ConnectRequest(_)
                | Event::Established { .. }
                | Event::Rejected { .. }
                | Event::HandshakeFailed { .. }
                | Event::Written { .. } => {}
            }
        }
        self.events = events;
        Ok(moved)
    }

    /// Asks what can be asked now.
    fn ask(&mut self) -> bool {
        let mut moved = false;
        while let Some(request) = self.requests.get_mut(self.asked) {
            let endpoint = &mut self.port.endpoint;
            if !endpoint.machine.can_ask(request.line.len() + 2) {
                break;
            }
            match &mut request.kind {
                Kind::Store { source, len } => {
                    endpoint.ask_store(&request.line, self.next_source, *len);
                    if let Some(source) = source.take().filter(|_| *len > 0) {
                        self.sources.push_back((self.next_source, source, *len));
                    }
                    self.next_source += 1;
                }
                Kind::Get { .. } => endpoint.ask(&request.line, Shape::Values),
                Kind::Stats(_) => endpoint.ask(&request.line, Shape::Stats),
                Kind::YesOrNo { .. } | Kind::Version => endpoint.ask(&request.line, Shape::Line),
            }
            self.asked += 1;
            moved = true;
        }
        moved
    }

    /// Reads values into slots. All are quick to the endpoint, so their pieces are granted in the order of the stream.
    fn fill(&mut self, caller: &mut dyn Read) -> Result<bool, ClientError> {
        let mut moved = false;
        while let Some(grant) = self.port.endpoint.poll_fill() {
            moved = true;
            let piece = grant.source;
            let (id, source, remaining) = self.sources.front_mut().expect("a value has a source until it is read");
            assert_eq!(*id, piece.value, "pieces are granted in their order");
            let slot = &mut self.port.slot_mut(grant.slot)[..piece.len as usize];
            let read = match source {
                Source::Owned(reader) => reader.read_exact(slot),
                Source::Caller => caller.read_exact(slot),
            };
            if let Err(error) = read {
                self.is_broken = true;
                let source = match error.kind() {
                    ErrorKind::UnexpectedEof => {
                        let what = format!("the value ended within its last {remaining} octets");
                        io::Error::new(ErrorKind::UnexpectedEof, what)
                    }
                    _ => error,
                };
                return Err(ClientError::Local { source });
            }
            // A reader may take longer than a server may.
            self.moved_at = Instant::now();
            *remaining -= u64::from(piece.len);
            if *remaining == 0 {
                self.sources.pop_front();
            }
            self.port.handle_filled(grant.ticket);
        }
        Ok(moved)
    }

    /// Reads on in the answer to the oldest request; gives it once it is whole. Windows that were read go back with the
    /// next turn.
    ///
    /// # Errors
    /// The server's refusal, and [`ClientError::TooLong`], leave the link in step. After all others it
    /// [is broken](Link::is_broken).
    pub(super) fn poll_answer(&mut self, sink: &mut dyn Sink) -> Option<Result<Outcome, ClientError>> {
        while self.asked > 0 {
            let (url, is_alone) = (&self.url, self.requests.len() == 1);
            let request = self.requests.front_mut().expect("what was asked is kept");
            let Endpoint { machine, inbound, .. } = &mut self.port.endpoint;
            let wrong = |what: String| ClientError::Protocol { url: url.clone(), what };
            let answer = match machine.step(inbound) {
                Ok(Answer::NeedMore) => return None,
                Ok(answer) => answer,
                Err(poison) => {
                    self.is_broken = true;
                    return Some(Err(wrong(poison.to_string())));
                }
            };
            self.reply_began = true;
            let mut has_taken = false;
            let settled = match answer {
                Answer::NeedMore => return None,
                Answer::Line(line) => Some(judge(&request.kind, line).unwrap_or_else(|| {
                    self.is_broken = true;
                    Err(wrong(format!("{} is no reply to this command", shown(line))))
                })),
                Answer::Value { key: found, flags, len, cas } => match (&mut request.kind, cas) {
                    (Kind::Get { key, info: info @ None }, Some(cas)) if key == found => {
                        let found = *info.insert(Info { len, flags, cas });
                        let opened = sink.open(&found);
                        request.is_wanted = matches!(opened, Ok(true));
                        let is_cheaper = self.may_leave && is_alone && len > DRAIN_BYTES_MAX;
                        let leaves = !request.is_wanted && is_cheaper;
                        match opened {
                            Err(error @ ClientError::TooLong { .. }) if !leaves => {
                                request.failure = Some(error);
                                None
                            }
                            Err(error) => {
                                self.is_broken = true;
                                Some(Err(error))
                            }
                            Ok(_) if leaves => {
                                self.is_broken = true;
                                Some(Ok(Outcome::Value(found)))
                            }
                            Ok(_) => None,
                        }
                    }
                    _ => {
                        self.is_broken = true;
                        Some(Err(wrong(format!("a value of {} that was not asked for", shown(found)))))
                    }
                },
                Answer::Body { .. } => {
                    let lease: RxLease = machine.take_body(inbound);
                    let (offset, len) = (lease.offset() as usize, lease.len() as usize);
                    has_taken = true;
                    match request.is_wanted.then(|| sink.take(self.port.windows(), offset, len)) {
                        Some(Err(source)) => {
                            self.is_broken = true;
                            Some(Err(ClientError::Local { source }))
                        }
                        Some(Ok(())) | None => None,
                    }
                }
                Answer::ValueEnd => match request.is_wanted.then(|| sink.close()) {
                    Some(Err(source)) => {
                        self.is_broken = true;
                        Some(Err(ClientError::Local { source }))
                    }
                    Some(Ok(())) | None => None,
                },
                Answer::Stat(stat) => match &mut request.kind {
                    Kind::Stats(stats) if stats.len() < STATS_COUNT_MAX => {
                        let text = String::from_utf8_lossy(stat);
                        let (name, value) = text.split_once(' ').unwrap_or((&text, ""));
                        stats.push((name.to_owned(), value.to_owned()));
                        None
                    }
                    _ => {
                        self.is_broken = true;
                        Some(Err(wrong(format!("more than {STATS_COUNT_MAX} statistics"))))
                    }
                },
                Answer::End => Some(match (&mut request.kind, request.failure.take()) {
                    (_, Some(failure)) => Err(failure),
                    (Kind::Get { info: Some(info), .. }, None) => Ok(Outcome::Value(*info)),
                    (Kind::Stats(stats), None) => Ok(Outcome::Stats(std::mem::take(stats))),
                    (_, None) => Ok(Outcome::Miss),
                }),
            };
            if has_taken {
                // A writer may take longer than a server may, which gets its window back only now.
                self.moved_at = Instant::now();
            }
            if let Some(settled) = settled {
                self.requests.pop_front();
                self.asked -= 1;
                self.reply_began = false;
                return Some(settled);
            }
        }
        None
    }

    /// Nothing moves: the reason, if that can last no longer.
    pub(super) fn judge_rest(&mut self, now: Instant) -> Result<(), ClientError> {
        let lost = |kind, what: String| ClientError::Lost { url: self.url.clone(), source: io::Error::new(kind, what) };
        if let Some(cause) = &self.ended {
            self.is_broken = true;
            return Err(lost(ErrorKind::UnexpectedEof, cause.to_string()));
        }
        if !self.requests.is_empty() && now >= self.moved_at + self.io_timeout {
            self.is_broken = true;
            return Err(lost(ErrorKind::TimedOut, "no octet moved within the time-out".to_owned()));
        }
        Ok(())
    }

    fn fail(&mut self, cause: EndCause) -> ClientError {
        self.is_broken = true;
        ClientError::Protocol { url: self.url.clone(), what: cause.to_string() }
    }
}

/// What a line says that is the whole answer; `None` if it says nothing that was asked.
fn judge(kind: &Kind, line: &[u8]) -> Option<Result<Outcome, ClientError>> {
    match (kind, line) {
        (Kind::Store { .. }, b"STORED") => return Some(Ok(Outcome::Stored)),
        (Kind::YesOrNo { yes }, line) if line == *yes => return Some(Ok(Outcome::Done)),
        (Kind::YesOrNo { .. }, b"NOT_FOUND") => return Some(Ok(Outcome::Miss)),
        (Kind::Stats(stats), b"RESET" | b"OK") if stats.is_empty() => return Some(Ok(Outcome::Stats(Vec::new()))),
        (Kind::Version, line) if let Some(version) = line.strip_prefix(b"VERSION ") => {
            return Some(Ok(Outcome::Version(String::from_utf8_lossy(version).into_owned())));
        }
        _ => {}
    }
    let is_refusal = [&b"SERVER_ERROR "[..], b"CLIENT_ERROR ", b"ERROR"].iter().any(|word| line.starts_with(word))
        || matches!(line, b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND");
    is_refusal.then(|| Err(ClientError::Refused { reply: String::from_utf8_lossy(line).into_owned() }))
}

impl Drop for Link {
    fn drop(&mut self) {
        // What was posted goes out with this turn; the lane's own drop says goodbye for the queue pair.
        self.port.disconnect();
        self.lane.progress(Instant::now(), &mut self.events, EVENT_COUNT_MAX);
    }
}
