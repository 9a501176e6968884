//! Two queue pairs in one process: the reference for behaviour.
//!
//! The initiator of a request does its memory work, in its lane's turn or in [`QueuePair::kick`]; the target's tables say
//! what is allowed. The ends may live on different lanes and threads. Locks are taken in one order: the send side of
//! one end, then the inbound side or the regions of the other, then a lane's list; never two of a kind.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::queue::{Place, Places, ReceiveQueue, SendQueue, grant, lock};
use super::registered::{Domain, Regions, Right};
use super::sys::Bell;
use super::{
    Access, AccessError, Address, Attributes, Cause, Completion, ConnectRequest, Event, Fabric, FabricError, Lane,
    Listener, LocalBuf, MemoryRegion, PRIVATE_DATA_BYTES_MAX, Pending, PostError, QpNum, QueuePair, RemoteKey,
    Resources, SharedSpan, Status, TURN_BYTES_MAX, Work, WorkId,
};

/// Octets copied under one hold of a region table.
const COPY_BYTES_MAX: usize = 64 << 10;

/// A network of named addresses within this process. Clones are the same network.
#[derive(Clone, Default)]
pub struct Loopback {
    names: Arc<Mutex<HashMap<Address, Weak<LaneShared>>>>,
}

impl Loopback {
    pub fn new() -> Self {
        Self::default()
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loopback").field("listeners", &lock(&self.names).len()).finish()
    }
}

impl Fabric for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn lane(&self) -> Result<Arc<dyn Lane>, FabricError> {
        let bell = Bell::new().map_err(|source| FabricError::System { what: "make an eventfd", source })?;
        let shared = Arc::new(LaneShared {
            bell,
            state: Mutex::default(),
            region_count: Arc::default(),
            half_open_count: AtomicUsize::new(0),
            listener_count: AtomicUsize::new(0),
        });
        Ok(Arc::new(LoopbackLane { network: self.clone(), shared }))
    }
}

struct LoopbackLane {
    network: Loopback,
    shared: Arc<LaneShared>,
}

struct LaneShared {
    bell: Bell,
    state: Mutex<LaneState>,
    region_count: Arc<AtomicUsize>,
    half_open_count: AtomicUsize,
    listener_count: AtomicUsize,
}

#[derive(Default)]
struct LaneState {
    places: Places,
    ends: HashMap<QpNum, Arc<End>>,
    /// Ends with something to do, each once.
    ready: VecDeque<Arc<End>>,
    requests: VecDeque<ConnectRequest>,
    /// Initiators that wait for an answer, and until when.
    asking: Vec<(Instant, Arc<End>)>,
    outbox: VecDeque<Event>,
}

/// One end of a connection.
struct End {
    number: QpNum,
    attributes: Attributes,
    place: Place,
    domain: Domain,
    lane: Arc<LaneShared>,
    regions: Arc<Regions>,
    is_ready: AtomicBool,
    peer: OnceLock<Weak<End>>,
    send: Mutex<SendSide>,
    inbound: Mutex<Inbound>,
}

struct SendSide {
    /// Each request notes how many of its octets were moved.
    queue: SendQueue<usize>,
    done: VecDeque<Completion>,
}

struct Inbound {
    phase: Phase,
    receives: ReceiveQueue,
    done: VecDeque<Completion>,
    written: Vec<RemoteKey>,
    /// The answer to the handshake, until it is reported.
    answer: Option<Answer>,
    /// Why the connection ends, once it does; the first reason stays.
    failure: Option<Cause>,
}

enum Phase {
    Dialled(Address),
    Admitted(Box<Asked>),
    Asking,
    Connected,
    Ended,
}

enum Answer {
    Accepted(Vec<u8>),
    Rejected(Vec<u8>),
}

/// An initiator that waits for an answer.
struct Asked {
    initiator: Option<Arc<End>>,
    listener_lane: Arc<LaneShared>,
}

impl Asked {
    fn answer(&mut self, answer: Answer, responder: Option<&Arc<End>>) -> bool {
        let Some(initiator) = self.initiator.take() else { return false };
        let mut inbound = lock(&initiator.inbound);
        let waits = matches!(inbound.phase, Phase::Asking) && inbound.failure.is_none();
        if waits {
            if let Some(responder) = responder {
                let first = initiator.peer.set(Arc::downgrade(responder)).is_ok();
                assert!(first && responder.peer.set(Arc::downgrade(&initiator)).is_ok(), "answered once");
            }
            inbound.phase = Phase::Connected;
            inbound.answer = Some(answer);
        }
        drop(inbound);
        initiator.mark_ready();
        waits
    }
}

impl Pending for Asked {
    fn reject(mut self: Box<Self>, private_data: &[u8]) {
        self.answer(Answer::Rejected(private_data.to_vec()), None);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.answer(Answer::Rejected(Vec::new()), None);
        self.listener_lane.half_open_count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LoopbackLane {
    fn end(&self, attributes: Attributes, phase: Phase) -> Result<Box<dyn QueuePair>, FabricError> {
        let attributes = grant(attributes)?;
        let mut state = lock(&self.shared.state);
        let place = state.places.take().ok_or_else(|| FabricError::System {
            what: "find a place for a queue pair",
            source: std::io::ErrorKind::OutOfMemory.into(),
        })?;
        let domain = Domain::new();
        let end = Arc::new(End {
            number: QpNum::next(),
            attributes,
            place,
            domain,
            lane: Arc::clone(&self.shared),
            regions: Regions::new(Arc::clone(&self.shared.region_count)),
            is_ready: AtomicBool::new(false),
            peer: OnceLock::new(),
            send: Mutex::new(SendSide { queue: SendQueue::new(place, domain, &attributes), done: VecDeque::new() }),
            inbound: Mutex::new(Inbound {
                phase,
                receives: ReceiveQueue::new(place, domain, &attributes),
                done: VecDeque::new(),
                written: Vec::new(),
                answer: None,
                failure: None,
            }),
        });
        state.ends.insert(end.number, Arc::clone(&end));
        Ok(Box::new(LoopbackQueuePair { end, network: self.network.clone() }))
    }
}

impl Lane for LoopbackLane {
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError> {
        let mut names = lock(&self.network.names);
        if names.contains_key(address) {
            return Err(FabricError::AddressInUse(address.clone()));
        }
        names.insert(address.clone(), Arc::downgrade(&self.shared));
        self.shared.listener_count.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(LoopbackListener {
            address: address.clone(),
            network: self.network.clone(),
            lane: Arc::clone(&self.shared),
        }))
    }

    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        self.end(attributes, Phase::Dialled(address.clone()))
    }

    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        let asked = request.into_pending::<Asked>()?;
        self.end(attributes, Phase::Admitted(asked))
    }

    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool {
        self.shared.bell.look();
        let was_rung = self.shared.bell.silence();
        let mut state = lock(&self.shared.state);
        while let Some(request) = state.requests.pop_front() {
            state.outbox.push_back(Event::ConnectRequest(request));
        }
        let late: Vec<_> = state.asking.extract_if(.., |(deadline, _)| *deadline <= now).collect();
        // Only what is ready now: an end that readies itself again has its next turn in the next call.
        let mut turns = state.ready.len();
        drop(state);
        for (_, end) in late {
            end.time_out();
        }
        while turns > 0 {
            turns -= 1;
            let mut state = lock(&self.shared.state);
            if state.outbox.len() >= events_max {
                break;
            }
            let Some(end) = state.ready.pop_front() else { break };
            drop(state);
            end.is_ready.store(false, Ordering::SeqCst);
            end.turn(now);
        }
        let mut state = lock(&self.shared.state);
        let count = state.outbox.len().min(events_max);
        events.extend(state.outbox.drain(..count));
        was_rung || !state.outbox.is_empty() || !state.ready.is_empty() || !state.requests.is_empty()
    }

    fn arm(&self) {
        self.shared.bell.arm();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.bell.as_fd()
    }

    fn deadline(&self) -> Option<Instant> {
        lock(&self.shared.state).asking.iter().map(|(deadline, _)| *deadline).min()
    }

    fn resources(&self) -> Resources {
        let state = lock(&self.shared.state);
        Resources {
            queue_pairs: state.ends.len() + state.outbox.iter().filter(|event| event.is_last()).count(),
            regions: self.shared.region_count.load(Ordering::Relaxed),
            half_open: self.shared.half_open_count.load(Ordering::Relaxed),
            listeners: self.shared.listener_count.load(Ordering::Relaxed),
            closing: 0,
        }
    }
}

impl Drop for LoopbackLane {
    fn drop(&mut self) {
        // Ends and lane own each other until the last event; nobody will ask for that one now.
        let (ends, requests) = {
            let mut state = lock(&self.shared.state);
            state.ready.clear();
            state.asking.clear();
            let ends: Vec<_> = state.ends.drain().map(|(_, end)| end).collect();
            (ends, std::mem::take(&mut state.requests))
        };
        drop(requests);
        for end in ends {
            end.fail(Cause::Local, Cause::Peer);
            end.turn(Instant::now());
        }
        let outbox = std::mem::take(&mut lock(&self.shared.state).outbox);
        drop(outbox);
    }
}

impl fmt::Debug for LoopbackLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopbackLane").field("resources", &self.resources()).finish()
    }
}

#[derive(Debug)]
struct LoopbackListener {
    address: Address,
    network: Loopback,
    lane: Arc<LaneShared>,
}

impl Listener for LoopbackListener {
    fn address(&self) -> Address {
        self.address.clone()
    }
}

impl Drop for LoopbackListener {
    fn drop(&mut self) {
        lock(&self.network.names).remove(&self.address);
        self.lane.listener_count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for LaneShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneShared").field("bell", &self.bell).finish_non_exhaustive()
    }
}

impl End {
    /// Puts the end on its lane's list.
    fn mark_ready(self: &Arc<Self>) {
        if !self.is_ready.swap(true, Ordering::SeqCst) {
            lock(&self.lane.state).ready.push_back(Arc::clone(self));
            self.lane.bell.ring();
        }
    }

    fn peer(&self) -> Option<Arc<End>> {
        self.peer.get()?.upgrade()
    }

    /// Notes why this end ends, unless it does already.
    fn note_failure(self: &Arc<Self>, cause: Cause) {
        let mut inbound = lock(&self.inbound);
        if inbound.failure.is_none() && !matches!(inbound.phase, Phase::Ended) {
            inbound.failure = Some(cause);
            drop(inbound);
            self.mark_ready();
        }
    }

    /// Ends the connection for both ends.
    fn fail(self: &Arc<Self>, own: Cause, theirs: Cause) {
        self.note_failure(own);
        if let Some(peer) = self.peer() {
            peer.note_failure(theirs);
        }
    }

    fn time_out(self: &Arc<Self>) {
        let mut inbound = lock(&self.inbound);
        if matches!(inbound.phase, Phase::Asking) && inbound.failure.is_none() {
            inbound.failure = Some(Cause::TimedOut);
            drop(inbound);
            self.mark_ready();
        }
    }

    fn has_failed(&self) -> bool {
        let inbound = lock(&self.inbound);
        inbound.failure.is_some() || matches!(inbound.phase, Phase::Ended)
    }

    /// Moves at most one turn's octets. `true` when the turn ended before the work did.
    fn send_some(self: &Arc<Self>) -> bool {
        let mut send = lock(&self.send);
        let mut budget = TURN_BYTES_MAX;
        while send.queue.len() > 0 {
            if self.has_failed() {
                return false;
            }
            if budget == 0 {
                return true;
            }
            let peer = self.peer().filter(|peer| !peer.has_failed());
            let Some(peer) = peer else {
                self.note_failure(Cause::Peer);
                return false;
            };
            let posted = send.queue.get_mut(0).expect("not empty");
            match carry_out(&mut posted.work, &mut posted.state, &peer, budget) {
                Ok(moved) => {
                    budget = budget.saturating_sub(moved);
                    if posted.state >= posted.work.len() {
                        let completion = send.queue.retire(Status::Done);
                        send.done.extend(completion);
                    }
                }
                // Its regions vanish when the peer ends: that is no violation of ours.
                Err(_) if peer.has_failed() => {
                    self.note_failure(Cause::Peer);
                    return false;
                }
                Err(refusal) => {
                    let completion = send.queue.retire(Status::Refused);
                    send.done.extend(completion);
                    let reason = refusal.to_string();
                    self.fail(Cause::RefusedByPeer(reason.clone()), Cause::PeerFault(reason));
                    return false;
                }
            }
        }
        false
    }

    /// The lane's turn for this end: work, then news, in order.
    fn turn(self: &Arc<Self>, now: Instant) {
        let more = self.send_some();
        let mut events = VecDeque::new();
        let qp = self.number;
        let mut send = lock(&self.send);
        let mut inbound = lock(&self.inbound);
        match inbound.answer.take() {
            Some(Answer::Accepted(private_data)) => events.push_back(Event::Established { qp, private_data }),
            Some(Answer::Rejected(private_data)) => {
                inbound.phase = Phase::Ended;
                inbound.failure = None;
                flush(&mut send, &mut inbound);
                events.extend(completed(qp, &mut inbound.done));
                events.push_back(Event::Rejected { qp, private_data });
                drop((send, inbound));
                self.leave(events);
                return;
            }
            None => {}
        }
        events.extend(inbound.written.drain(..).map(|key| Event::Written { qp, key }));
        events.extend(completed(qp, &mut inbound.done));
        events.extend(completed(qp, &mut send.done));
        if let Some(cause) = inbound.failure.take() {
            inbound.phase = Phase::Ended;
            flush(&mut send, &mut inbound);
            events.extend(completed(qp, &mut send.done));
            events.extend(completed(qp, &mut inbound.done));
            events.push_back(Event::Disconnected { qp, cause });
            drop((send, inbound));
            self.leave(events);
            return;
        }
        let asks = matches!(inbound.phase, Phase::Asking);
        drop((send, inbound));
        let mut state = lock(&self.lane.state);
        state.outbox.append(&mut events);
        if asks && !state.asking.iter().any(|(_, end)| Arc::ptr_eq(end, self)) {
            state.asking.push((now + self.attributes.handshake_timeout, Arc::clone(self)));
        } else if !asks {
            state.asking.retain(|(_, end)| !Arc::ptr_eq(end, self));
        }
        drop(state);
        if more {
            self.mark_ready();
        }
    }

    /// The end's last events; its place is free again.
    fn leave(self: &Arc<Self>, mut events: VecDeque<Event>) {
        self.regions.clear();
        let mut state = lock(&self.lane.state);
        state.outbox.append(&mut events);
        state.asking.retain(|(_, end)| !Arc::ptr_eq(end, self));
        if state.ends.remove(&self.number).is_some() {
            state.places.give_back(self.place);
        }
    }
}

fn completed(qp: QpNum, done: &mut VecDeque<Completion>) -> impl Iterator<Item = Event> {
    done.drain(..).map(move |completion| Event::Completed { qp, completion })
}

fn flush(send: &mut SendSide, inbound: &mut Inbound) {
    while send.queue.len() > 0 {
        let completion = send.queue.retire(Status::Flushed);
        send.done.extend(completion);
    }
    while let Some(completion) = inbound.receives.retire(Status::Flushed, 0, None, false) {
        inbound.done.push_back(completion);
    }
}

/// Why the target refuses a request.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("no Receive was posted")]
    NoReceive,
    #[error("{len} octets for a Receive of {room}")]
    TooLong { len: usize, room: usize },
}

/// Does a part of the oldest request; `done` counts its octets. Gives the octets moved.
fn carry_out(work: &mut Work, done: &mut usize, peer: &Arc<End>, budget: usize) -> Result<usize, Refusal> {
    let total = work.len();
    let part = (total - *done).min(budget).min(COPY_BYTES_MAX);
    match work {
        Work::Write { from, key, address, .. } if total > 0 => {
            // The whole request is judged before its first octet lands, each part again: the key may go meanwhile.
            peer.regions.with(*key, *address, total as u64, Right::Write, |span, offset| {
                span.copy_in(offset + *done, &from.as_slice()[*done..*done + part]);
            })?;
            *done += part;
            if *done == total {
                let mut inbound = lock(&peer.inbound);
                if !inbound.written.contains(key) {
                    inbound.written.push(*key);
                }
                drop(inbound);
                peer.mark_ready();
            }
        }
        Work::Read { into, range, key, address, .. } if total > 0 => {
            peer.regions.with(*key, *address, total as u64, Right::Read, |span, offset| {
                let start = range.start + *done;
                span.copy_out(offset + *done, &mut into.as_mut_slice()[start..start + part]);
            })?;
            *done += part;
        }
        Work::Write { .. } | Work::Read { .. } => {}
        Work::Send { from, invalidate, flags } => {
            let mut inbound = lock(&peer.inbound);
            let buf = inbound.receives.front_mut().ok_or(Refusal::NoReceive)?;
            let room = buf.len();
            let into = buf.as_mut_slice().get_mut(..total).ok_or(Refusal::TooLong { len: total, room })?;
            into.copy_from_slice(from.as_slice());
            if let Some(key) = *invalidate {
                peer.regions.invalidate_by_peer(key)?;
            }
            let completion = inbound.receives.retire(Status::Done, total, *invalidate, flags.solicited);
            inbound.done.extend(completion);
            drop(inbound);
            peer.mark_ready();
            *done = total;
            return Ok(total.max(1));
        }
    }
    Ok(part.max(1))
}

struct LoopbackQueuePair {
    end: Arc<End>,
    network: Loopback,
}

impl QueuePair for LoopbackQueuePair {
    fn number(&self) -> QpNum {
        self.end.number
    }

    fn attributes(&self) -> Attributes {
        self.end.attributes
    }

    fn allocate(&self, buf_bytes: usize, count: usize) -> Result<Vec<LocalBuf>, FabricError> {
        let allocated = self.end.domain.allocate(buf_bytes, count);
        allocated.map_err(|source| FabricError::System { what: "allocate registered buffers", source })
    }

    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        if !span.is_aligned() {
            return Err(FabricError::Unaligned);
        }
        Ok(self.end.regions.register(span, access))
    }

    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        if private_data.len() > PRIVATE_DATA_BYTES_MAX {
            return Err(FabricError::PrivateDataTooLong { len: private_data.len() });
        }
        let mut inbound = lock(&self.end.inbound);
        if inbound.failure.is_some() {
            return Err(FabricError::State);
        }
        match std::mem::replace(&mut inbound.phase, Phase::Asking) {
            Phase::Dialled(address) => {
                drop(inbound);
                self.ask(address, private_data);
            }
            Phase::Admitted(mut asked) => {
                inbound.phase = Phase::Connected;
                inbound.answer = Some(Answer::Accepted(Vec::new()));
                drop(inbound);
                if !asked.answer(Answer::Accepted(private_data.to_vec()), Some(&self.end)) {
                    lock(&self.end.inbound).answer = None;
                    self.end.note_failure(Cause::Peer);
                }
            }
            phase => {
                inbound.phase = phase;
                return Err(FabricError::State);
            }
        }
        self.end.mark_ready();
        Ok(())
    }

    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        let mut send = lock(&self.end.send);
        let inbound = lock(&self.end.inbound);
        match inbound.phase {
            Phase::Ended => return Err(PostError::Ended),
            _ if inbound.failure.is_some() => return Err(PostError::Ended),
            Phase::Connected => {}
            Phase::Dialled(_) | Phase::Admitted(_) | Phase::Asking => return Err(PostError::NotConnected),
        }
        drop(inbound);
        let id = send.queue.post(work)?;
        drop(send);
        self.end.mark_ready();
        Ok(id)
    }

    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        let mut inbound = lock(&self.end.inbound);
        if inbound.failure.is_some() || matches!(inbound.phase, Phase::Ended) {
            return Err((PostError::Ended, buf));
        }
        inbound.receives.post(buf)
    }

    fn kick(&self) {
        self.end.send_some();
        self.end.mark_ready();
    }

    fn disconnect(&self) {
        self.end.fail(Cause::Local, Cause::Peer);
    }
}

impl LoopbackQueuePair {
    fn ask(&self, address: Address, private_data: &[u8]) {
        let lane = lock(&self.network.names).get(&address).and_then(Weak::upgrade);
        let Some(lane) = lane else {
            self.end.note_failure(Cause::Lost(format!("nobody listens at {address}")));
            return;
        };
        lane.half_open_count.fetch_add(1, Ordering::Relaxed);
        let asked = Asked { initiator: Some(Arc::clone(&self.end)), listener_lane: Arc::clone(&lane) };
        let peer = Address::Name(format!("qp {}", self.end.number.0));
        let request = ConnectRequest::new(peer, address, private_data.to_vec(), Box::new(asked));
        lock(&lane.state).requests.push_back(request);
        lane.bell.ring();
    }
}

impl Drop for LoopbackQueuePair {
    fn drop(&mut self) {
        // Not yet answered: the peer hears it as a rejection.
        let mut inbound = lock(&self.end.inbound);
        let unanswered = match inbound.phase {
            Phase::Admitted(_) => Some(std::mem::replace(&mut inbound.phase, Phase::Asking)),
            _ => None,
        };
        drop(inbound);
        drop(unanswered);
        self.disconnect();
    }
}

impl fmt::Debug for LoopbackQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopbackQueuePair").field("number", &self.end.number).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It counted no more while its last event waited for its turn: whoever waited for zero missed that event.
    #[test]
    fn a_queue_pair_counts_until_its_last_event_is_handed_out() {
        let lane = Loopback::new().lane().unwrap();
        let qp = lane.dial(&Address::Name("nobody".into()), Attributes::default()).unwrap();
        qp.post_receive(qp.allocate(1, 1).unwrap().remove(0)).unwrap();
        drop(qp);
        let mut events = Vec::new();
        assert!(lane.progress(Instant::now(), &mut events, 1));
        assert!(matches!(events[..], [Event::Completed { .. }]), "{events:?}");
        assert_eq!(lane.resources().queue_pairs, 1);
        lane.progress(Instant::now(), &mut events, 1);
        assert!(matches!(events[1..], [Event::Disconnected { .. }]), "{events:?}");
        assert_eq!(lane.resources().queue_pairs, 0);
    }
}
