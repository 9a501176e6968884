//! One end of a connection: what it is made of, what comes in, and how it ends.

mod handshake;
mod sending;

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use socket2::SockRef;

use super::super::queue::{Place, ReceiveQueue, SendQueue};
use super::super::registered::{AccessError, Domain, Regions, Right};
use super::super::{Attributes, Cause, Event, QpNum, RemoteKey, Source, Status, TURN_BYTES_MAX, Work};
use super::outbound::{Outbound, Sequence};
use super::{Closing, LaneShared, Options, Pending, Segments, lock};
use crate::wire::iwarp::mpa;
use crate::wire::iwarp::rdmap::{ReadRequest, Terminate};
use crate::wire::iwarp::startup::{ReadyFrame, Terms};
use crate::wire::iwarp::stream::{Fault, Kind, MemoryFault, PeerError, Receiver, Sender};

/// First and largest size of the buffer for what comes in: a turn and one frame.
pub(super) const INBOX_BYTES_MIN: usize = 16 << 10;
pub(super) const INBOX_BYTES_MAX: usize = TURN_BYTES_MAX + (64 << 10) + 64;
/// Where every Read sink is said to be; its STag alone tells them apart.
const SINK_OFFSET: u64 = 1 << 32;

pub(super) struct End {
    pub(super) number: QpNum,
    pub(super) place: Place,
    pub(super) domain: Domain,
    pub(super) lane: Arc<LaneShared>,
    pub(super) regions: Arc<Regions>,
    pub(super) is_ready: AtomicBool,
    pub(super) options: Options,
    pub(super) state: Mutex<EndState>,
}

pub(super) struct EndState {
    pub(super) attributes: Attributes,
    pub(super) phase: Phase,
    pub(super) queue: SendQueue<Stage>,
    pub(super) receives: ReceiveQueue,
    pub(super) link: Option<Link>,
    /// What the lane has to report, in order.
    pub(super) events: VecDeque<Event>,
    /// Why the connection ends, once it does; the first reason stays.
    pub(super) failure: Option<Failure>,
    /// Private data of the Request, until the connection is there.
    pub(super) question: Vec<u8>,
    /// The last turn left octets in the socket.
    pub(super) has_unread: bool,
}

pub(super) enum Phase {
    Dialled(std::net::SocketAddr),
    Admitted(Box<Pending>),
    /// TCP is being connected.
    Connecting,
    /// The Request is on its way.
    Asking,
    Connected,
    Ended,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Stage {
    #[default]
    Waiting,
    /// All of it lies before this place of the stream.
    Queued(u64),
    /// A Read whose Response is awaited.
    Asked,
    /// A Read that is complete.
    Answered,
}

/// Why it ends.
pub(super) struct Failure {
    cause: Cause,
    terminate: Option<Terminate>,
    /// All frames that were made go out before the Terminate, which counts on it.
    ends_batch: bool,
}

impl Failure {
    fn lost(what: impl ToString) -> Self {
        Cause::Lost(what.to_string()).into()
    }
}

impl From<Cause> for Failure {
    fn from(cause: Cause) -> Self {
        Self { cause, terminate: None, ends_batch: false }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        let cause = Cause::PeerFault(fault.error.to_string());
        Self { cause, terminate: Some(fault.terminate), ends_batch: false }
    }
}

/// The message that is being sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Message {
    None,
    /// The front of `owed`, so many octets of it.
    Response(u32),
    /// The request at `next`, so many octets of it.
    Work(usize),
}

/// The stream of one connection.
pub(super) struct Link {
    stream: TcpStream,
    receiver: Receiver,
    sender: Sender,
    inbox: Vec<u8>,
    start: usize,
    end: usize,
    /// The last read took all there was room for.
    was_filled: bool,
    out: Outbound,
    is_blocked: bool,
    /// A responder sends nothing before the first frame of the initiator (RFC 5044 §7.1.2(4)).
    may_send: bool,
    /// That frame was promised: without it the handshake is not over.
    awaited_ready: Option<ReadyFrame>,
    /// Our ready-to-receive frame is a Read whose Response has not come.
    awaits_ready_response: bool,
    /// What epoll watches for: (readable, writable).
    interest: (bool, bool),
    message: Message,
    /// Position in the send queue of the first request that is not wholly on the stream's way.
    next: usize,
    /// Requests that have ended.
    retired: Sequence,
    /// Reads whose Responses are awaited, oldest first.
    reads: VecDeque<Sequence>,
    read_depth: usize,
    owed: VecDeque<ReadRequest>,
    /// After a Response it is a request's turn, and the reverse.
    response_was_last: bool,
    /// The region that the Write in progress has reached.
    writing: Option<RemoteKey>,
    /// Regions reported as written since the last Receive of this turn.
    written: Vec<RemoteKey>,
    /// Why the socket takes no more.
    broken: Option<String>,
    /// A segment of a Response, copied out of memory that may change.
    scratch: Vec<u8>,
}

impl Link {
    pub(super) fn new(stream: TcpStream, interest: (bool, bool)) -> Self {
        Self {
            stream,
            receiver: Receiver::new(true, 0),
            sender: Sender::new(true, mpa::ULPDU_BYTES_MAX),
            inbox: Vec::new(),
            start: 0,
            end: 0,
            was_filled: false,
            out: Outbound::default(),
            is_blocked: false,
            may_send: false,
            awaited_ready: None,
            awaits_ready_response: false,
            interest,
            message: Message::None,
            next: 0,
            retired: 0,
            reads: VecDeque::new(),
            read_depth: 0,
            owed: VecDeque::new(),
            response_was_last: false,
            writing: None,
            written: Vec::new(),
            broken: None,
            scratch: Vec::new(),
        }
    }

    /// Full operation begins.
    fn begin(&mut self, options: &Options, terms: &Terms) {
        let is_local = || self.stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
        let ulpdu_max = match options.segments {
            Segments::Large => mpa::ULPDU_BYTES_MAX,
            Segments::Auto if is_local() => mpa::ULPDU_BYTES_MAX,
            Segments::Auto | Segments::Mss => {
                SockRef::from(&self.stream).tcp_mss().map_or(512, |mss| mpa::mulpdu(mss as usize))
            }
            Segments::UpTo(ulpdu_max) => ulpdu_max,
        };
        self.receiver = Receiver::new(terms.crc, terms.reads_in);
        self.sender = Sender::new(terms.crc, ulpdu_max);
        self.read_depth = terms.reads_out;
    }
}

impl End {
    /// Puts the end on its lane's list.
    pub(super) fn mark_ready(self: &Arc<Self>) {
        if !self.is_ready.swap(true, Ordering::SeqCst) {
            lock(&self.lane.state).ready.push_back(Arc::clone(self));
            self.lane.bell.ring();
        }
    }

    pub(super) fn fail(self: &Arc<Self>, cause: Cause) {
        let mut state = lock(&self.state);
        if state.failure.is_none() && !matches!(state.phase, Phase::Ended) {
            state.failure = Some(cause.into());
            drop(state);
            self.mark_ready();
        }
    }

    /// Sends at once, as far as it goes; news is left for the lane.
    pub(super) fn kick(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if matches!(state.phase, Phase::Connected) && state.failure.is_none() {
            let more = self.send(state);
            if more || !state.events.is_empty() || state.failure.is_some() || self.wants_watch(state) {
                self.mark_ready();
            }
        }
    }

    fn wants_watch(&self, state: &EndState) -> bool {
        state.link.as_ref().is_some_and(|link| link.interest.1 != link.is_blocked || link.broken.is_some())
    }

    /// The lane's turn for this end. `true` when there is more to do at once.
    pub(super) fn turn(self: &Arc<Self>, now: Instant, readable: bool, writable: bool) -> bool {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let mut more = false;
        if writable && let Some(link) = &mut state.link {
            link.is_blocked = false;
        }
        if state.failure.is_none() {
            match state.phase {
                Phase::Connecting if readable || writable => self.finish_connecting(state),
                Phase::Asking if readable => self.take_reply(state),
                _ => {}
            }
        }
        if state.failure.is_none() && matches!(state.phase, Phase::Connected) {
            if readable {
                if let Some(link) = &mut state.link {
                    link.written.clear();
                }
                self.receive(state, TURN_BYTES_MAX);
            }
            if state.failure.is_none() {
                more = self.send(state);
            }
            let broken = state.link.as_mut().and_then(|link| link.broken.take());
            if let Some(broken) = broken
                && state.failure.is_none()
            {
                // What the peer said before it closed tells more than the error.
                self.receive(state, INBOX_BYTES_MAX);
                state.failure.get_or_insert(Failure::lost(broken));
            }
        } else if state.failure.is_none() {
            self.send_handshake(state);
        }
        if let Some(failure) = state.failure.take() {
            if matches!(state.phase, Phase::Asking) && matches!(failure.cause, Cause::Local | Cause::TimedOut) {
                self.answer_before_leaving(state);
            }
            self.close(state, failure, now);
            more = false;
        }
        self.watch(state);
        let handshake = match state.phase {
            Phase::Connecting | Phase::Asking => true,
            Phase::Connected => state.link.as_ref().is_some_and(|link| link.awaited_ready.is_some() && !link.may_send),
            Phase::Dialled(_) | Phase::Admitted(_) | Phase::Ended => false,
        };
        let timeout = state.attributes.handshake_timeout;
        let mut events = std::mem::take(&mut state.events);
        let ended = matches!(state.phase, Phase::Ended);
        // A lane that slept now might never be woken: who waits for the descriptor's edges is not told of what was there.
        let has_unread = !ended && state.has_unread;
        drop(guard);
        let mut lane = lock(&self.lane.state);
        lane.outbox.append(&mut events);
        if handshake {
            lane.deadlines.entry(self.number.0).or_insert(now + timeout);
        } else {
            lane.deadlines.remove(&self.number.0);
        }
        if ended && lane.ends.remove(&self.number.0).is_some() {
            lane.places.give_back(self.place);
        }
        drop(lane);
        if more {
            self.mark_ready();
        }
        more || has_unread
    }

    fn watch(&self, state: &mut EndState) {
        let Some(link) = &mut state.link else { return };
        let connecting = matches!(state.phase, Phase::Connecting);
        let wanted = (true, connecting || link.is_blocked);
        if wanted != link.interest {
            link.interest = wanted;
            // A descriptor that is a member stays one until it is closed: the change cannot be refused.
            let _ = self.lane.epoll.change(link.stream.as_fd(), self.number.0, wanted.0, wanted.1);
        }
    }

    /// Takes what the socket has, at most `bytes_max` octets.
    fn receive(&self, state: &mut EndState, bytes_max: usize) {
        let mut budget = bytes_max;
        state.has_unread = false;
        loop {
            if let Err(failure) = self.take_frames(state) {
                state.failure = Some(failure);
                return;
            }
            let Some(link) = &mut state.link else { return };
            // A read that left room has taken all there was; epoll tells of what comes later.
            if budget == 0 || budget < bytes_max && !link.was_filled {
                state.has_unread = link.was_filled;
                return;
            }
            match link.fill_inbox(budget) {
                Ok((0, false)) => return,
                Ok((0, true)) => {
                    let clean = link.start == link.end && link.receiver.is_between_messages();
                    let what = "the peer closed in the middle of a message";
                    state.failure = Some(if clean { Cause::Peer.into() } else { Failure::lost(what) });
                    return;
                }
                Ok((len, _)) => budget -= len,
                Err(error) => {
                    state.failure = Some(Failure::lost(error));
                    return;
                }
            }
        }
    }

    /// Takes every whole frame of the inbox. What was complete before a fault is reported as complete.
    fn take_frames(&self, state: &mut EndState) -> Result<(), Failure> {
        let outcome = self.place_frames(state);
        if let Some(link) = &mut state.link {
            link.retire_done(&mut state.queue, &mut state.events, self.number);
        }
        outcome
    }

    fn place_frames(&self, state: &mut EndState) -> Result<(), Failure> {
        let EndState { link, queue, receives, events, .. } = state;
        let Some(link) = link.as_mut() else { return Ok(()) };
        let Link { receiver, inbox, start, end, reads, retired, owed, writing, written, may_send, .. } = link;
        let (awaited_ready, awaits_ready_response) = (&mut link.awaited_ready, &mut link.awaits_ready_response);
        while let Some((segment, len)) = receiver.next(&inbox[*start..*end])? {
            *start += len;
            let is_first = !std::mem::replace(may_send, true);
            let payload = segment.payload;
            match segment.kind {
                // The one ready-to-receive frame that would otherwise take a Receive.
                Kind::Send { offset: 0, last: true, invalidate: None, .. }
                    if is_first && payload.is_empty() && *awaited_ready == Some(ReadyFrame::Send) => {}
                Kind::Write { stag, offset, last } => {
                    let key = RemoteKey(stag);
                    if !payload.is_empty() {
                        let placed = self.regions.with(key, offset, payload.len() as u64, Right::Write, |span, at| {
                            span.copy_in(at, payload);
                        });
                        placed.map_err(|error| segment.fault(PeerError::Memory(memory_fault(error))))?;
                        *writing = Some(key);
                    }
                    // The last segment may be an empty one, with any STag.
                    if last
                        && let Some(key) = writing.take()
                        && !written.contains(&key)
                    {
                        written.push(key);
                        events.push_back(Event::Written { qp: self.number, key });
                    }
                }
                Kind::ReadResponse { .. } if std::mem::take(awaits_ready_response) => {}
                Kind::ReadResponse { done, last } => {
                    let sequence = *reads.front().expect("the receiver awaits it");
                    let posted = queue.get_mut((sequence - *retired) as usize).expect("in flight");
                    let Work::Read { into, range, .. } = &mut posted.work else {
                        unreachable!("only Reads are awaited")
                    };
                    let at = range.start + done as usize;
                    into.as_mut_slice()[at..at + payload.len()].copy_from_slice(payload);
                    if last {
                        posted.state = Stage::Answered;
                        reads.pop_front();
                    }
                }
                Kind::ReadRequest(request) => {
                    if request.len > 0 {
                        let key = RemoteKey(request.source_stag);
                        let len = u64::from(request.len);
                        let checked = self.regions.with(key, request.source_offset, len, Right::Read, |_, _| ());
                        checked.map_err(|error| segment.fault(PeerError::Memory(memory_fault(error))))?;
                    }
                    owed.push_back(request);
                }
                Kind::Send { offset, last, invalidate, solicited } => {
                    let buf = receives.front_mut().ok_or_else(|| segment.fault(PeerError::NoReceive))?;
                    let (at, room) = (offset as usize, buf.len());
                    let into = buf.as_mut_slice().get_mut(at..at + payload.len());
                    into.ok_or_else(|| segment.fault(PeerError::TooLong(room)))?.copy_from_slice(payload);
                    if last {
                        let invalidated = invalidate.map(RemoteKey);
                        if let Some(key) = invalidated {
                            let gone = self.regions.invalidate_by_peer(key);
                            gone.map_err(|_| segment.fault(PeerError::CannotInvalidate))?;
                        }
                        let len = at + payload.len();
                        let completion = receives.retire(Status::Done, len, invalidated, solicited);
                        written.clear();
                        let qp = self.number;
                        events.extend(completion.map(|completion| Event::Completed { qp, completion }));
                    }
                }
                Kind::Terminate(head) => return Err(Cause::RefusedByPeer(head.to_string()).into()),
            }
        }
        Ok(())
    }

    /// Sends for one turn. `true` when more could be sent at once.
    fn send(&self, state: &mut EndState) -> bool {
        let EndState { link, queue, events, failure, .. } = state;
        let Some(link) = link.as_mut() else { return false };
        let mut budget = TURN_BYTES_MAX;
        loop {
            if link.is_blocked || link.broken.is_some() {
                return false;
            }
            if link.may_send
                && let Err(ended) = link.fill(queue, &self.regions, budget)
            {
                *failure = Some(ended);
                return false;
            }
            if link.out.is_empty() {
                return false;
            }
            let before = link.out.sent();
            let retired = link.retired;
            let payload_of = |sequence: Sequence| payload_of(queue, sequence - retired);
            match link.out.write(&link.stream, payload_of) {
                Ok(all) => link.is_blocked = !all,
                Err(error) => link.broken = Some(error.to_string()),
            }
            budget = budget.saturating_sub((link.out.sent() - before) as usize);
            link.retire_done(queue, events, self.number);
            if budget == 0 {
                return !link.is_blocked && link.has_work(queue);
            }
        }
    }

    /// The last acts: buffers come back, the peer is told, the socket goes on by itself.
    fn close(&self, state: &mut EndState, failure: Failure, now: Instant) {
        let was_connected = matches!(state.phase, Phase::Connected);
        state.phase = Phase::Ended;
        if let Some(link) = state.link.take() {
            let retired = link.retired;
            let payload_of = |sequence| payload_of(&state.queue, sequence - retired);
            let mut rest = match failure.ends_batch {
                true => link.out.rest_of_batch(payload_of),
                false => link.out.rest_of_frame(payload_of),
            };
            if let Some(terminate) = &failure.terminate {
                link.sender.put_terminate(&mut rest, terminate);
            }
            let lost = match failure.cause {
                Cause::Lost(_) => true,
                Cause::TimedOut => link.awaited_ready.is_some(),
                _ => false,
            };
            if was_connected && !lost {
                let deadline = now + state.attributes.handshake_timeout;
                Closing::begin(&self.lane, link.stream, self.number.0, rest, deadline);
            }
        }
        state.flush(self.number);
        state.events.push_back(Event::Disconnected { qp: self.number, cause: failure.cause });
        self.regions.clear();
    }
}

impl EndState {
    fn flush(&mut self, qp: QpNum) {
        while self.queue.len() > 0 {
            let completion = self.queue.retire(Status::Flushed);
            self.events.extend(completion.map(|completion| Event::Completed { qp, completion }));
        }
        while let Some(completion) = self.receives.retire(Status::Flushed, 0, None, false) {
            self.events.push_back(Event::Completed { qp, completion });
        }
    }
}

impl Link {
    /// Gives back what a busy time has made grow, unless it is in use.
    pub(super) fn rest(&mut self) {
        if self.start == self.end && self.inbox.len() > INBOX_BYTES_MIN {
            (self.start, self.end, self.was_filled) = (0, 0, false);
            self.inbox = Vec::new();
        }
        if self.scratch.capacity() > INBOX_BYTES_MIN {
            self.scratch = Vec::new();
        }
        self.out.rest();
    }

    /// Reads once, at most `bytes_max` octets: how many came, and whether the peer has closed.
    fn fill_inbox(&mut self, bytes_max: usize) -> io::Result<(usize, bool)> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start > 0 && self.inbox.len() - self.end < self.inbox.len() / 4 {
            self.inbox.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.inbox.len() || self.was_filled && self.inbox.len() < INBOX_BYTES_MAX {
            // It holds at most one unfinished frame, so the largest size is never full.
            let len = (self.inbox.len() * 2).clamp(INBOX_BYTES_MIN, INBOX_BYTES_MAX);
            self.inbox.resize(len, 0);
        }
        let room = &mut self.inbox[self.end..];
        let len = room.len().min(bytes_max);
        loop {
            return match (&self.stream).read(&mut room[..len]) {
                Ok(0) => Ok((0, true)),
                Ok(taken) => {
                    self.end += taken;
                    self.was_filled = taken == len;
                    Ok((taken, false))
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok((0, false)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }
}

fn payload_of(queue: &SendQueue<Stage>, position: u64) -> &[u8] {
    match queue.get(position as usize).map(|posted| &posted.work) {
        Some(Work::Write { from, .. } | Work::Send { from, .. }) => Source::as_slice(from),
        _ => unreachable!("a request stays in flight while its payload is on the way"),
    }
}

fn memory_fault(error: AccessError) -> MemoryFault {
    match error {
        AccessError::Key { .. } => MemoryFault::Stag,
        AccessError::Right { .. } => MemoryFault::Rights,
        AccessError::Wrap { .. } => MemoryFault::Wrap,
        AccessError::Bounds { .. } => MemoryFault::Bounds,
    }
}
