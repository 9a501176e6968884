//! One end of a connection: its state, what was handed to its queue pair, and how it ends.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ibverbs::ibv_wc;
use ibverbs_sys::ibv_wc_flags;

use super::super::queue::{Place, ReceiveQueue, SendQueue};
use super::super::registered::Domain;
use super::super::{
    Access, Attributes, Cause, Completion, Event, FabricError, LocalBuf, MemoryRegion, PostError, QpNum, RemoteKey,
    SharedSpan, Status, Work, WorkId, said,
};
use super::LaneShared;
use super::cm::{Happened, Identifier, Terms};
use super::device::{POLL_COUNT_MAX, ProtectionDomain};
use super::queue_pair::{Hardware, OF_BINDING, OF_RECEIVE, OF_SEND, Verdict, allocate, hardware_binding};
use super::regions::{Binding, Regions};
use super::{Counted, lock};

/// Bindings of windows on their way at one time.
pub(super) const BINDING_COUNT_MAX: usize = 64;
/// Batches of completions taken from one queue in one turn.
const BATCH_COUNT_MAX: usize = 4;
/// How long after its requests were flushed a connection may wait to be told why.
const VERDICT_WAIT: Duration = Duration::from_secs(1);
pub(super) struct End {
    pub(super) number: QpNum,
    pub(super) place: Place,
    pub(super) domain: Domain,
    pub(super) lane: Arc<LaneShared>,
    pub(super) pd: Arc<ProtectionDomain>,
    pub(super) regions: Arc<Regions>,
    /// The completion queue tells its channel of the next completion.
    pub(super) is_armed: AtomicBool,
    /// What the device says went wrong with it.
    pub(super) fault: OnceLock<&'static str>,
    pub(super) state: Mutex<EndState>,
}

pub(super) struct EndState {
    attributes: Attributes,
    phase: Phase,
    queue: SendQueue<Stage>,
    receives: ReceiveQueue,
    /// Requests at the front of the queue that the device has.
    handed_count: usize,
    binding_count: usize,
    hardware: Option<Hardware>,
    failure: Option<Failure>,
    /// The device gave requests back undone.
    was_flushed: bool,
    /// Private data for the peer, until the way to it is known.
    question: Vec<u8>,
    deadline: Option<Instant>,
    terms: Terms,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Stage {
    /// The device says nothing when it is done, or has not got it yet.
    #[default]
    Silent,
    /// The device will say when it is done.
    Awaited,
    Ended(Status),
}

pub(super) enum Phase {
    Dialled(SocketAddr),
    Admitted {
        _counted: Counted,
    },
    /// Address and route are being resolved.
    Resolving,
    /// The peer was asked.
    Asking,
    /// The peer was accepted.
    Accepting,
    Connected,
    Ended,
}

/// Why it ends.
enum Failure {
    Disconnected(Cause),
    Rejected(Vec<u8>),
}

/// An identifier whose queue pair is gone, until the peer has said goodbye.
pub(super) struct Closing {
    pub(super) _id: Identifier,
    pub(super) deadline: Instant,
}

/// What came of a turn.
#[derive(Default)]
pub(super) struct Turn {
    pub(super) events: Vec<Event>,
    pub(super) more: bool,
    /// That was its last one.
    pub(super) over: bool,
    pub(super) closing: Option<Closing>,
}

impl End {
    /// Makes the queue pair and all around it.
    pub(super) fn new(
        lane: &Arc<LaneShared>,
        number: QpNum,
        place: Place,
        asked: Attributes,
        id: Identifier,
        phase: Phase,
        terms: Terms,
    ) -> io::Result<Self> {
        let device = lane.devices.of(&id, &lane.manager)?;
        let channel = lane.channel_of(&device)?;
        let pd = Arc::new(ProtectionDomain::new(Arc::clone(&device))?);
        let bindings = if device.has_windows() { BINDING_COUNT_MAX } else { 0 };
        let send_depth = asked.send_depth.min(device.depth_max().saturating_sub(bindings));
        let receive_depth = asked.receive_depth.min(device.depth_max());
        let read_depth = asked.read_depth.min(device.read_depth_max()).min(u8::MAX.into());
        let completion_depth = send_depth + bindings + receive_depth;
        if send_depth == 0 || read_depth == 0 || completion_depth > device.completion_depth_max() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let domain = Domain::new();
        let attributes = Attributes { send_depth, receive_depth, read_depth, ..asked };
        let hardware = Hardware::new(id, number, &channel, (&pd, domain), &attributes, bindings)?;
        let cap = |depth: u8| depth.min(read_depth as u8);
        Ok(Self {
            number,
            place,
            domain,
            lane: Arc::clone(lane),
            regions: Regions::new(Arc::clone(&pd), Arc::clone(lane)),
            pd,
            is_armed: AtomicBool::new(false),
            fault: OnceLock::new(),
            state: Mutex::new(EndState {
                attributes,
                phase,
                queue: SendQueue::new(place, domain, &attributes),
                receives: ReceiveQueue::new(place, domain, &attributes),
                handed_count: 0,
                binding_count: 0,
                hardware: Some(hardware),
                failure: None,
                was_flushed: false,
                question: Vec::new(),
                deadline: None,
                terms: Terms { reads_in: cap(terms.reads_in), reads_out: cap(terms.reads_out) },
            }),
        })
    }

    pub(super) fn attributes(&self) -> Attributes {
        lock(&self.state).attributes
    }

    pub(super) fn allocate(&self, buf_bytes: usize, count: usize) -> io::Result<Vec<LocalBuf>> {
        allocate(&self.pd, self.domain, buf_bytes, count)
    }

    pub(super) fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        let system = |what| move |source| FabricError::System { what, source };
        let mut state = lock(&self.state);
        if state.hardware.is_none() {
            return Err(FabricError::State);
        }
        // A registration cannot be given back by the peer where the device has windows for that, and can where it has not.
        if !access.remote_invalidate || !self.pd.device().has_windows() {
            return self.regions.register(span, access).map_err(system("register memory"));
        }
        let what = "bind a memory window";
        self.regions.bind(span, access, |binding| state.bind(binding)).map_err(system(what))
    }

    /// Asks the peer that was dialled, or answers the one that was admitted.
    pub(super) fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if state.failure.is_some() {
            return Err(FabricError::State);
        }
        let timeout = state.attributes.handshake_timeout;
        let Some(hardware) = &state.hardware else { return Err(FabricError::State) };
        let outcome = match std::mem::replace(&mut state.phase, Phase::Ended) {
            Phase::Dialled(peer) => {
                state.question = private_data.to_vec();
                state.phase = Phase::Resolving;
                hardware.id.resolve_address(peer, timeout)
            }
            Phase::Admitted { .. } => {
                state.phase = Phase::Accepting;
                hardware.id.accept(state.terms, private_data)
            }
            phase => {
                state.phase = phase;
                return Err(FabricError::State);
            }
        };
        state.deadline = Instant::now().checked_add(timeout);
        if let Err(error) = outcome {
            state.fail(Cause::Lost(error.to_string()));
        }
        Ok(())
    }

    pub(super) fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        let mut state = lock(&self.state);
        match state.phase {
            Phase::Ended => return Err(PostError::Ended),
            _ if state.failure.is_some() => return Err(PostError::Ended),
            Phase::Connected | Phase::Accepting => {}
            Phase::Dialled(_) | Phase::Admitted { .. } | Phase::Resolving | Phase::Asking => {
                return Err(PostError::NotConnected);
            }
        }
        let id = state.queue.post(work)?;
        state.hand_over();
        Ok(id)
    }

    pub(super) fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let Some(hardware) = state.hardware.as_ref().filter(|_| state.failure.is_none()) else {
            return Err((PostError::Ended, buf));
        };
        let id = state.receives.post(buf)?;
        let buf = state.receives.back_mut().expect("it was just posted");
        if let Err(error) = hardware.post_receive(buf, id.index) {
            let buf = state.receives.take_back().expect("it was just posted");
            state.fail(Cause::Lost(format!("a Receive was not taken: {error}")));
            return Err((PostError::Ended, buf));
        }
        Ok(id)
    }

    /// Notes why the connection ends, unless it does already.
    pub(super) fn fail(&self, cause: Cause) {
        lock(&self.state).fail(cause);
    }

    /// Takes back a peer that was never answered: it is rejected when dropped.
    pub(super) fn take_unanswered(&self) {
        let mut state = lock(&self.state);
        if matches!(state.phase, Phase::Admitted { .. }) {
            if let Some(hardware) = &state.hardware
                && let Err(error) = hardware.id.reject(&[])
            {
                tracing::debug!(%error, "a peer that is not wanted was not told");
            }
            state.phase = Phase::Resolving;
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        lock(&self.state).deadline
    }

    /// Asks for an event at the next completion.
    pub(super) fn arm(&self) {
        if self.is_armed.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut state = lock(&self.state);
        let armed = state.hardware.as_ref().map_or(Ok(()), |hardware| hardware.completions.arm());
        if let Err(error) = armed {
            state.fail(Cause::Lost(format!("a completion queue cannot be armed: {error}")));
        }
    }

    /// The connection manager has something to say.
    pub(super) fn handle(&self, happened: Happened, events: &mut Vec<Event>) {
        let mut state = lock(&self.state);
        if matches!(state.phase, Phase::Ended) {
            return;
        }
        let timeout = state.attributes.handshake_timeout;
        let state = &mut *state;
        let Some(hardware) = &state.hardware else { return };
        let lost = |error: io::Error| Cause::Lost(error.to_string());
        match happened {
            Happened::AddressResolved => {
                if let Err(error) = hardware.id.resolve_route(timeout) {
                    state.fail(lost(error));
                }
            }
            Happened::RouteResolved => {
                state.phase = Phase::Asking;
                if let Err(error) = hardware.id.connect(state.terms, &state.question) {
                    state.fail(lost(error));
                }
            }
            Happened::Established { terms, private_data } => {
                let is_asker = matches!(state.phase, Phase::Asking);
                if state.failure.is_some() || !is_asker && !matches!(state.phase, Phase::Accepting) {
                    return;
                }
                let is_deaf = terms.is_deaf() && !state.attributes.never_reads;
                if is_asker && (terms.reads_in == 0 || is_deaf) {
                    return state.fail(Cause::PeerFault("no Read can be outstanding".to_owned()));
                }
                state.phase = Phase::Connected;
                state.deadline = None;
                let private_data = if is_asker { private_data } else { Vec::new() };
                events.push(Event::Established { qp: self.number, private_data });
                state.hand_over();
            }
            Happened::Rejected { status, private_data } => {
                // A refusal of the upper layer: 28 is "consumer defined" of the InfiniBand CM, iWARP has a bit for it.
                let by_upper_layer = status == 28 || self.pd.device().is_iwarp();
                match state.phase {
                    Phase::Asking if by_upper_layer => {
                        state.failure.get_or_insert(Failure::Rejected(private_data));
                    }
                    _ => {
                        let said = said(&private_data).map(|word| format!(": {word}")).unwrap_or_default();
                        state.fail(Cause::Lost(format!("refused with status {status}{said}")));
                    }
                }
            }
            Happened::Failed { what, status } => {
                let timed_out = matches!(status.saturating_abs(), libc::ETIMEDOUT);
                let cause = Cause::Lost(format!("{what}: {}", io::Error::from_raw_os_error(status.saturating_abs())));
                state.fail(if timed_out { Cause::TimedOut } else { cause });
            }
            Happened::Disconnected => {
                // What came before it still counts.
                self.take_completions(state, events, usize::MAX);
                self.blame(state, events);
                state.fail(Cause::Peer);
            }
            Happened::Removed => state.fail(Cause::Lost("the device was removed".to_owned())),
            Happened::Request { .. } => {}
        }
    }

    /// Fails with the peer's fault if the queue pair has left the states in which it works because of one.
    fn blame(&self, state: &mut EndState, events: &mut Vec<Event>) {
        self.lane.mark_misused(self.pd.device());
        let fault = self.fault.get().copied();
        // On iWARP the end of the TCP connection looks the same.
        let is_in_error = || state.hardware.as_ref().is_some_and(Hardware::is_in_error);
        let Some(fault) = fault.or_else(|| (!self.pd.device().is_iwarp() && is_in_error()).then_some("in error"))
        else {
            return;
        };
        // siw raises IBV_EVENT_QP_FATAL for a request of ours too that TCP did not take, and has completed it before.
        self.take_completions(state, events, usize::MAX);
        state.fail(Cause::PeerFault(format!("a request of it was refused here ({fault})")));
    }

    /// The lane's turn for this end.
    pub(super) fn turn(&self, now: Instant) -> Turn {
        let mut turn = Turn::default();
        let mut state = lock(&self.state);
        let state = &mut *state;
        if matches!(state.phase, Phase::Ended) {
            return turn;
        }
        turn.more = self.take_completions(state, &mut turn.events, BATCH_COUNT_MAX);
        if state.failure.is_none() && state.was_flushed {
            self.blame(state, &mut turn.events);
        }
        self.regions.poll_written(|key| turn.events.push(Event::Written { qp: self.number, key }));
        if state.failure.is_none() && state.deadline.is_some_and(|deadline| deadline <= now) {
            state.fail(match state.phase {
                Phase::Connected => Cause::Lost("the queue pair stopped without a word".to_owned()),
                _ => Cause::TimedOut,
            });
        }
        if let Some(failure) = state.failure.take() {
            turn.closing = self.finish(state, failure, now, &mut turn.events);
            turn.over = true;
        }
        turn
    }

    /// Takes up to `batch_count_max` batches. `true` if there may be more.
    fn take_completions(&self, state: &mut EndState, events: &mut Vec<Event>, batch_count_max: usize) -> bool {
        for _ in 0..batch_count_max {
            let Some(hardware) = &state.hardware else { return false };
            let mut batch = [ibv_wc::default(); POLL_COUNT_MAX];
            let count = match hardware.completions.poll(&mut batch) {
                Ok(0) => return false,
                Ok(count) => count,
                Err(error) => {
                    state.fail(Cause::Lost(error.to_string()));
                    return false;
                }
            };
            for completion in &batch[..count] {
                self.take_completion(state, completion, events);
            }
            if count < POLL_COUNT_MAX {
                return false;
            }
        }
        true
    }

    fn take_completion(&self, state: &mut EndState, taken: &ibv_wc, events: &mut Vec<Event>) {
        let (of, index) = (taken.wr_id() & !0xffff_ffff, taken.wr_id() as u32);
        let verdict = taken.error().map(|(status, _)| Verdict::of(status));
        let mut report = |completion: Option<Completion>| {
            events.extend(completion.map(|completion| Event::Completed { qp: self.number, completion }));
        };
        match (of, &verdict) {
            (OF_RECEIVE, None) => {
                let by_peer = (taken.wc_flags & ibv_wc_flags::IBV_WC_WITH_INV).0 != 0;
                let invalidated = by_peer.then_some(RemoteKey(taken.imm_data));
                if let Some(key) = invalidated {
                    self.regions.handle_invalidated(key);
                }
                report(state.receives.retire(Status::Done, taken.len(), invalidated, false));
            }
            (OF_RECEIVE, Some(_)) => report(state.receives.retire(Status::Flushed, 0, None, false)),
            (OF_BINDING, _) => state.binding_count -= 1,
            (_, verdict) => {
                let position = index.wrapping_sub(state.queue.first_index()) as usize;
                if position >= state.handed_count {
                    return state.fail(Cause::Lost("the device completed what it was not given".to_owned()));
                }
                let status = verdict.as_ref().map_or(Status::Done, |verdict| verdict.status());
                // Silent requests before it have left before it. Others say themselves when they are done: siw lets a
                // Write overtake the completion of a Read.
                let silent = if status == Status::Flushed { Status::Flushed } else { Status::Done };
                for before in 0..position {
                    let stage = &mut state.queue.get_mut(before).expect("within the queue").state;
                    if *stage == Stage::Silent {
                        *stage = Stage::Ended(silent);
                    }
                }
                state.queue.get_mut(position).expect("within the queue").state = Stage::Ended(status);
                while let Some(Stage::Ended(status)) = state.queue.get(0).map(|posted| posted.state) {
                    report(state.queue.retire(status));
                    state.handed_count -= 1;
                }
            }
        }
        match verdict {
            None => {}
            // The lane is told why on another way, soon.
            Some(Verdict::Flushed) => {
                state.was_flushed = true;
                if state.deadline.is_none() {
                    state.deadline = Instant::now().checked_add(VERDICT_WAIT);
                }
            }
            // The buffer is good, so the message was not: too long, or with a key that it may not invalidate.
            Some(Verdict::Refused(what) | Verdict::Lost(what)) if of == OF_RECEIVE => {
                state.fail(Cause::PeerFault(format!("its message was refused here: {what}")));
            }
            Some(Verdict::Refused(what)) if of == OF_SEND => state.fail(Cause::RefusedByPeer(what)),
            Some(Verdict::Refused(what) | Verdict::Lost(what)) => state.fail(Cause::Lost(what)),
        }
    }

    /// The last acts: nothing on the device is left, buffers come back, the peer is told.
    fn finish(&self, state: &mut EndState, failure: Failure, now: Instant, events: &mut Vec<Event>) -> Option<Closing> {
        let phase = std::mem::replace(&mut state.phase, Phase::Ended);
        state.deadline = None;
        let qp = self.number;
        let mut closing = None;
        self.take_completions(state, events, usize::MAX);
        self.regions.poll_written(|key| events.push(Event::Written { qp, key }));
        if let Some(mut hardware) = state.hardware.take() {
            let was_connected = matches!(phase, Phase::Connected);
            if was_connected && let Err(error) = hardware.id.disconnect() {
                tracing::debug!(qp = qp.0, %error, "a peer was not told of the end");
            }
            self.regions.close_windows();
            hardware.id.destroy_queue_pair();
            let Hardware { completions, slab, id, .. } = hardware;
            drop((completions, slab));
            if was_connected && matches!(failure, Failure::Disconnected(Cause::Local)) {
                closing =
                    now.checked_add(state.attributes.handshake_timeout).map(|deadline| Closing { _id: id, deadline });
            }
        }
        self.regions.clear();
        while let Some(posted) = state.queue.get(0) {
            let status = if let Stage::Ended(status) = posted.state { status } else { Status::Flushed };
            let completion = state.queue.retire(status);
            events.extend(completion.map(|completion| Event::Completed { qp, completion }));
        }
        while state.receives.len() > 0 {
            let completion = state.receives.retire(Status::Flushed, 0, None, false);
            events.extend(completion.map(|completion| Event::Completed { qp, completion }));
        }
        events.push(match failure {
            Failure::Disconnected(cause) => Event::Disconnected { qp, cause },
            Failure::Rejected(private_data) => Event::Rejected { qp, private_data },
        });
        closing
    }
}

impl EndState {
    fn fail(&mut self, cause: Cause) {
        if !matches!(self.phase, Phase::Ended) {
            self.failure.get_or_insert(Failure::Disconnected(cause));
        }
    }

    /// Gives the device what it has not got yet. What a responder posts waits until the connection is there: the
    /// initiator's queue pair takes nothing before.
    fn hand_over(&mut self) {
        if !matches!(self.phase, Phase::Connected) || self.failure.is_some() {
            return;
        }
        let Self { queue, hardware, handed_count, attributes, .. } = self;
        let (Some(hardware), count) = (hardware, queue.len() - *handed_count) else { return };
        if count == 0 {
            return;
        }
        // One in so many is signaled though nobody asks, so that the queue never fills up with silent ones.
        let period = (attributes.send_depth / 2).max(1) as u32;
        let mut entries = Vec::with_capacity(count);
        for position in *handed_count..queue.len() {
            let index = queue.first_index().wrapping_add(position as u32);
            let posted = queue.get_mut(position).expect("within the queue");
            let is_signaled = posted.work.is_reported() || index.is_multiple_of(period);
            posted.state = if is_signaled { Stage::Awaited } else { Stage::Silent };
            entries.push(hardware.request(&posted.work, index, is_signaled, attributes.send_depth));
        }
        match hardware.post_send(&mut entries) {
            Ok(()) => *handed_count = queue.len(),
            Err(error) => self.fail(Cause::Lost(format!("requests were not taken: {error}"))),
        }
    }

    fn bind(&mut self, binding: &Binding) -> io::Result<()> {
        let (Phase::Connected, Some(hardware)) = (&self.phase, &mut self.hardware) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        if self.binding_count == BINDING_COUNT_MAX {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        hardware.post_send(&mut [hardware_binding(binding)])?;
        self.binding_count += 1;
        Ok(())
    }
}
