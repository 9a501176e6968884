//! Any fabric, made worse by a seed: connections drop, requests are carried out late and one by one, events come late,
//! posts and registrations are refused.
//!
//! The contract holds all the same: requests and events of one queue pair keep their order, every buffer comes back, the
//! disconnection is the last event. The same seed and the same calls give the same faults.
//!
//! # Requests that are held
//! Software fabrics carry a batch out in one go, hardware does not: between any two requests the peer may look. So here
//! a posted request may be held, with its buffer, and go to the fabric in a later turn; octets leave the buffer only then.
//! A request takes room in the queue until a completion of it, or of a later one, is handed out, as in hardware.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use super::queue::{check, lock};
use super::registered::Domain;
use super::{
    Access, Address, Attributes, Cause, Completion, ConnectRequest, Event, Fabric, FabricError, Lane, Listener,
    LocalBuf, MemoryRegion, PostError, QpNum, QueuePair, Resources, SharedSpan, Status, Work, WorkId, WorkKind,
};

/// How often what goes wrong, in thousandths.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Faults {
    /// Of posts: the connection is lost right after.
    pub drop_per_mille: u32,
    /// Of turns and queue pairs with news: the news waits for another turn.
    pub delay_per_mille: u32,
    /// Of turns and requests: the oldest that is held, and all behind it, wait for another turn. 0 holds none.
    pub hold_per_mille: u32,
    /// Of posts: refused as if the queue were full.
    pub refuse_per_mille: u32,
    /// Of dials, admissions, allocations, registrations and `establish`: refused as if memory were short.
    pub shortage_per_mille: u32,
}

/// A fabric with faults.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Fabric>,
    plan: Plan,
}

#[derive(Clone, Debug)]
struct Plan {
    faults: Faults,
    /// SplitMix64.
    state: Arc<Mutex<u64>>,
}

impl Plan {
    fn happens(&self, per_mille: u32) -> bool {
        if per_mille == 0 {
            return false;
        }
        let mut state = lock(&self.state);
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = *state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % 1000 < u64::from(per_mille)
    }

    fn shortage(&self) -> Result<(), FabricError> {
        if self.happens(self.faults.shortage_per_mille) {
            let source = std::io::ErrorKind::OutOfMemory.into();
            return Err(FabricError::System { what: "find memory, by an injected fault", source });
        }
        Ok(())
    }
}

impl Faulty {
    pub fn new(inner: Arc<dyn Fabric>, seed: u64, faults: Faults) -> Self {
        Self { inner, plan: Plan { faults, state: Arc::new(Mutex::new(seed)) } }
    }
}

impl Fabric for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn lane(&self) -> Result<Arc<dyn Lane>, FabricError> {
        let state = Mutex::new(LaneState::default());
        Ok(Arc::new(FaultyLane { inner: self.inner.lane()?, plan: self.plan.clone(), state }))
    }
}

#[derive(Debug)]
struct FaultyLane {
    inner: Arc<dyn Lane>,
    plan: Plan,
    state: Mutex<LaneState>,
}

#[derive(Debug, Default)]
struct LaneState {
    /// News of each queue pair not handed out yet, in the order in which queue pairs first had some.
    waiting: VecDeque<(Option<QpNum>, VecDeque<Event>)>,
    /// Queue pairs before their last event. In their order, so that faults follow from the seed.
    wires: BTreeMap<QpNum, Wire>,
}

/// A queue pair as its lane knows it. What is held outlives the handle: it comes back with the last events.
#[derive(Debug)]
struct Wire {
    held: Arc<Mutex<Held>>,
    inner: Weak<dyn QueuePair>,
}

/// Requests that the fabric does not have yet.
#[derive(Debug, Default)]
struct Held {
    requests: VecDeque<(WorkId, Work)>,
    /// Of the buffers that the queue pair has allocated.
    domain: Option<Domain>,
    /// Index of the first request whose place in the queue is not known to be free.
    first_index: u32,
    /// We let it drop: its disconnection is reported as a loss.
    dropped: bool,
}

impl Held {
    /// Gives the fabric as many as the plan lets go; `true` if there were any.
    fn pass(&mut self, inner: &dyn QueuePair, plan: &Plan) -> bool {
        let (mut batch, before) = (Vec::new(), self.requests.len());
        while !self.requests.is_empty() && !plan.happens(plan.faults.hold_per_mille) {
            let Some((id, work)) = self.requests.pop_front() else { break };
            batch.push(work);
            if let Err(error) = inner.post(&mut batch) {
                assert!(matches!(error, PostError::Full { .. } | PostError::Ended), "checked when posted: {error}");
                batch.drain(..).for_each(|work| self.requests.push_front((id, work)));
                break;
            }
        }
        self.requests.len() < before
    }

    /// Takes all or nothing. A request takes room until a completion says otherwise.
    fn post(&mut self, work: &mut Vec<Work>, inner: &dyn QueuePair) -> Result<WorkId, PostError> {
        let attributes = inner.attributes();
        let depth = attributes.send_depth;
        // Takes nothing, and says which number the next request has and whether there can be one.
        let next = inner.post(&mut Vec::new())?;
        let first = WorkId { index: next.index.wrapping_add(self.requests.len() as u32), ..next };
        let in_flight = first.index.wrapping_sub(self.first_index) as usize;
        if in_flight + work.len() > depth {
            return Err(PostError::Full { posted: work.len(), depth });
        }
        work.iter().try_for_each(|request| check(request, self.domain, &attributes))?;
        let ids = (0..).map(|at| WorkId { index: first.index.wrapping_add(at), ..first });
        self.requests.extend(ids.zip(work.drain(..)));
        Ok(first)
    }

    /// What is held when the connection ends never leaves.
    fn flush(&mut self, qp: QpNum) -> impl Iterator<Item = Event> {
        self.requests.drain(..).map(move |(id, work)| {
            let (kind, buf, status) = (work.kind(), work.into_buffer(), Status::Flushed);
            let completion = Completion { id, kind, status, buf, len: 0, invalidated: None, solicited: false };
            Event::Completed { qp, completion }
        })
    }
}

impl FaultyLane {
    fn wrap(&self, inner: Box<dyn QueuePair>) -> Box<dyn QueuePair> {
        let (inner, held) = (Arc::<dyn QueuePair>::from(inner), Arc::<Mutex<Held>>::default());
        let wire = Wire { held: Arc::clone(&held), inner: Arc::downgrade(&inner) };
        lock(&self.state).wires.insert(inner.number(), wire);
        Box::new(FaultyQueuePair { inner, plan: self.plan.clone(), held })
    }
}

impl LaneState {
    /// Takes an event of the fabric; the last one of a queue pair brings back what is held.
    fn handle(&mut self, mut event: Event) {
        let number = event.qp();
        let (mut flushed, mut dropped) = (Vec::new(), false);
        if let Event::Disconnected { qp, .. } | Event::Rejected { qp, .. } = &event
            && let Some(wire) = self.wires.remove(qp)
        {
            let mut held = lock(&wire.held);
            flushed.extend(held.flush(*qp));
            dropped = held.dropped;
        }
        if let Event::Disconnected { cause, .. } = &mut event
            && dropped
        {
            *cause = Cause::Lost("by an injected fault".into());
        }
        let events = flushed.into_iter().chain([event]);
        match self.waiting.iter_mut().find(|(waiting, _)| *waiting == number) {
            Some((_, queue)) => queue.extend(events),
            None => self.waiting.push_back((number, events.collect())),
        }
    }

    /// A completion is handed out: its place in the queue is free, and so are those before it.
    fn make_room(&self, event: &Event) {
        if let Event::Completed { qp, completion } = event
            && completion.kind != WorkKind::Receive
            && let Some(wire) = self.wires.get(qp)
        {
            lock(&wire.held).first_index = completion.id.index.wrapping_add(1);
        }
    }
}

impl Lane for FaultyLane {
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError> {
        self.inner.listen(address)
    }

    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        self.plan.shortage()?;
        Ok(self.wrap(self.inner.dial(address, attributes)?))
    }

    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        self.plan.shortage()?;
        Ok(self.wrap(self.inner.admit(request, attributes)?))
    }

    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool {
        // A post takes the arming of the lane below back, so whoever wanted to sleep must come again.
        let mut has_passed = false;
        for wire in lock(&self.state).wires.values() {
            if let Some(inner) = wire.inner.upgrade() {
                has_passed |= lock(&wire.held).pass(&*inner, &self.plan);
            }
        }
        let mut fresh = Vec::new();
        let more = self.inner.progress(now, &mut fresh, events_max);
        let mut state = lock(&self.state);
        fresh.into_iter().for_each(|event| state.handle(event));
        let mut room = events_max;
        for _ in 0..state.waiting.len() {
            let Some((number, mut queue)) = state.waiting.pop_front() else { break };
            if !self.plan.happens(self.plan.faults.delay_per_mille) {
                let count = queue.len().min(room);
                room -= count;
                queue.iter().take(count).for_each(|event| state.make_room(event));
                events.extend(queue.drain(..count));
            }
            if !queue.is_empty() {
                state.waiting.push_back((number, queue));
            }
        }
        let is_held = state.wires.values().any(|wire| !lock(&wire.held).requests.is_empty());
        more || has_passed || is_held || !state.waiting.is_empty()
    }

    fn arm(&self) {
        self.inner.arm();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.inner.descriptor()
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn wakes_for_writes(&self) -> bool {
        self.inner.wakes_for_writes()
    }

    fn resources(&self) -> Resources {
        let inner = self.inner.resources();
        let state = lock(&self.state);
        let ended = state.waiting.iter().filter(|(_, queue)| queue.back().is_some_and(Event::is_last)).count();
        Resources { queue_pairs: inner.queue_pairs + ended, ..inner }
    }
}

#[derive(Debug)]
struct FaultyQueuePair {
    inner: Arc<dyn QueuePair>,
    plan: Plan,
    held: Arc<Mutex<Held>>,
}

impl QueuePair for FaultyQueuePair {
    fn number(&self) -> QpNum {
        self.inner.number()
    }

    fn attributes(&self) -> Attributes {
        self.inner.attributes()
    }

    fn allocate(&self, buf_bytes: usize, count: usize) -> Result<Vec<LocalBuf>, FabricError> {
        self.plan.shortage()?;
        let bufs = self.inner.allocate(buf_bytes, count)?;
        lock(&self.held).domain = bufs.first().map(LocalBuf::domain);
        Ok(bufs)
    }

    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        self.plan.shortage()?;
        self.inner.register(span, access)
    }

    fn can_be_invalidated(&self) -> bool {
        self.inner.can_be_invalidated()
    }

    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        self.plan.shortage()?;
        self.inner.establish(private_data)
    }

    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        if self.plan.happens(self.plan.faults.refuse_per_mille) {
            return Err(PostError::Full { posted: work.len(), depth: self.inner.attributes().send_depth });
        }
        let id = if self.plan.faults.hold_per_mille > 0 {
            lock(&self.held).post(work, &*self.inner)?
        } else {
            self.inner.post(work)?
        };
        if self.plan.happens(self.plan.faults.drop_per_mille) {
            lock(&self.held).dropped = true;
            self.inner.disconnect();
        }
        Ok(id)
    }

    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        self.inner.post_receive(buf)
    }

    fn kick(&self) {
        lock(&self.held).pass(&*self.inner, &self.plan);
        self.inner.kick();
    }

    fn rest(&self) {
        self.inner.rest();
    }

    fn disconnect(&self) {
        self.inner.disconnect();
    }
}

#[cfg(test)]
mod tests {
    use super::super::loopback::Loopback;
    use super::super::{Flags, RemoteSpan, Source};
    use super::*;

    /// What one connection sees of a hundred posted Writes: completions done, flushed, posts refused, and how it ended.
    fn run(seed: u64, faults: Faults) -> (usize, usize, usize, Option<Cause>, usize) {
        let fabric = Faulty::new(Arc::new(Loopback::new()), seed, faults);
        let lane = fabric.lane().unwrap();
        let address = Address::Name("faulty".into());
        let _listener = lane.listen(&address).unwrap();
        let near = lane.dial(&address, Attributes::default()).unwrap();
        near.establish(b"").unwrap();
        let (mut far, mut region) = (None, None);
        let (mut done, mut flushed, mut refused, mut ended, mut turns) = (0, 0, 0, None, 0);
        let (mut posted, mut connected) = (0, false);
        while ended.is_none() {
            let mut events = Vec::new();
            lane.progress(Instant::now(), &mut events, 8);
            turns += 1;
            for event in events {
                match event {
                    Event::ConnectRequest(request) => {
                        let qp = lane.admit(request, Attributes::default()).unwrap();
                        region = Some(qp.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap());
                        qp.establish(b"").unwrap();
                        far = Some(qp);
                    }
                    Event::Established { qp, .. } if qp == near.number() => connected = true,
                    Event::Completed { completion, .. } => match completion.status {
                        Status::Done => {
                            assert_eq!(flushed, 0, "nothing is done after a flush");
                            done += 1;
                        }
                        _ => flushed += 1,
                    },
                    Event::Disconnected { qp, cause } if qp == near.number() => ended = Some(cause),
                    _ => {}
                }
            }
            if connected && posted < 100 {
                let remote = region.as_ref().expect("registered before it was established").remote();
                let from = Source::Inline(vec![7]);
                let write = Work::Write { from, key: remote.key, address: remote.address, flags: Flags::SIGNALED };
                match near.post(&mut vec![write]) {
                    Ok(_) => posted += 1,
                    Err(PostError::Full { .. }) => refused += 1,
                    Err(PostError::Ended) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            if done == 100 {
                near.disconnect();
            }
        }
        drop(far);
        assert_eq!(done + flushed, posted);
        (done, flushed, refused, ended, turns)
    }

    #[test]
    fn without_faults_nothing_changes() {
        let (done, flushed, refused, ended, _) = run(1, Faults::default());
        assert_eq!((done, flushed, refused, ended), (100, 0, 0, Some(Cause::Local)));
    }

    #[test]
    fn faults_come_as_often_as_asked_and_the_seed_replays_them() {
        let faults = Faults {
            drop_per_mille: 10,
            delay_per_mille: 300,
            hold_per_mille: 300,
            refuse_per_mille: 200,
            shortage_per_mille: 0,
        };
        let (mut lost, mut refusals) = (0, 0);
        for seed in 0..200 {
            let outcome = run(seed, faults);
            assert_eq!(outcome, run(seed, faults), "seed {seed}");
            lost += usize::from(matches!(outcome.3, Some(Cause::Lost(_))));
            refusals += outcome.2;
        }
        // 1 - 0.99^100 is 63 %.
        assert!((90..=165).contains(&lost), "{lost} of 200 connections were lost");
        assert!(refusals > 500, "{refusals}");
    }

    /// Two lanes and a connected queue pair on each.
    type Pair = [(Arc<dyn Lane>, Box<dyn QueuePair>); 2];

    fn connected(fabric: &dyn Fabric, send_depth: usize) -> Pair {
        let lanes = [fabric.lane().unwrap(), fabric.lane().unwrap()];
        let address = Address::Name("held".into());
        let _listener = lanes[1].listen(&address).unwrap();
        let near = lanes[0].dial(&address, Attributes { send_depth, ..Attributes::default() }).unwrap();
        near.establish(b"").unwrap();
        let mut events = Vec::new();
        lanes[0].progress(Instant::now(), &mut events, 8);
        lanes[1].progress(Instant::now(), &mut events, 8);
        let Some(Event::ConnectRequest(request)) = events.pop() else { panic!("{events:?}") };
        let far = lanes[1].admit(request, Attributes::default()).unwrap();
        far.establish(b"").unwrap();
        lanes[0].progress(Instant::now(), &mut events, 8);
        assert!(matches!(events[..], [Event::Established { .. }]), "{events:?}");
        let [first, second] = lanes;
        [(first, near), (second, far)]
    }

    #[test]
    fn what_is_held_fills_the_queue_and_is_flushed_in_order_with_its_buffers() {
        let fabric = Faulty::new(Arc::new(Loopback::new()), 1, Faults { hold_per_mille: 1000, ..Faults::default() });
        let [(lane, near), (_far_lane, far)] = connected(&fabric, 3);
        let span = SharedSpan::new(8).unwrap();
        let region = far.register(span.clone(), Access::WRITE).unwrap();
        let RemoteSpan { key, address, .. } = region.remote();
        let write = |buf| {
            let from = Source::Buffer { buf, range: 0..8 };
            Work::Write { from, key, address, flags: Flags::SIGNALED }
        };
        let mut work: Vec<_> = near.allocate(8, 4).unwrap().into_iter().map(write).collect();
        let mut foreign = vec![write(far.allocate(8, 1).unwrap().remove(0))];
        assert_eq!(near.post(&mut foreign), Err(PostError::ForeignBuffer));
        assert_eq!(near.post(&mut work), Err(PostError::Full { posted: 4, depth: 3 }));
        let mut last = work.split_off(3);
        assert_eq!(near.post(&mut work).unwrap().index, 0);
        assert_eq!(near.post(&mut last), Err(PostError::Full { posted: 1, depth: 3 }));
        near.kick();
        let mut events = Vec::new();
        assert!(lane.progress(Instant::now(), &mut events, 8));
        near.disconnect();
        lane.progress(Instant::now(), &mut events, 8);
        assert_eq!(span.load_u64_acquire(0), 0);
        let of_near = |event: Event| match event {
            Event::Completed { qp, completion } if qp == near.number() => {
                assert_eq!(completion.status, Status::Flushed);
                Some(completion.buf.map(|buf| buf.index()))
            }
            Event::Disconnected { qp, .. } if qp == near.number() => Some(None),
            _ => None,
        };
        let seen: Vec<_> = events.into_iter().filter_map(of_near).collect();
        assert_eq!(seen, [Some(0), Some(1), Some(2), None]);
    }

    /// A lane that was armed passed a request on, which took the arming back, and said that there was nothing to do.
    #[test]
    fn a_turn_that_lets_a_request_go_is_no_time_to_sleep() {
        let mut landed = 0;
        for seed in 0..50 {
            let faults = Faults { hold_per_mille: 500, ..Faults::default() };
            let fabric = Faulty::new(Arc::new(Loopback::new()), seed, faults);
            let [(lane, near), (_far_lane, far)] = connected(&fabric, 3);
            let span = SharedSpan::new(8).unwrap();
            let region = far.register(span.clone(), Access::WRITE).unwrap();
            let RemoteSpan { key, address, .. } = region.remote();
            let from = Source::Inline(vec![7; 8]);
            near.post(&mut vec![Work::Write { from, key, address, flags: Flags::default() }]).unwrap();
            lane.arm();
            assert!(lane.progress(Instant::now(), &mut Vec::new(), 8), "seed {seed}");
            landed += usize::from(span.load_u64_acquire(0) != 0);
        }
        assert!((1..50).contains(&landed), "{landed}");
    }

    #[test]
    fn a_queue_pair_counts_until_its_last_event_is_handed_out() {
        let fabric = Faulty::new(Arc::new(Loopback::new()), 1, Faults { delay_per_mille: 1000, ..Faults::default() });
        let lane = fabric.lane().unwrap();
        drop(lane.dial(&Address::Name("nobody".into()), Attributes::default()).unwrap());
        assert!(lane.progress(Instant::now(), &mut Vec::new(), 8));
        assert_eq!(lane.resources().queue_pairs, 1);
    }

    #[test]
    fn a_shortage_is_an_error_and_no_more() {
        let faults = Faults { shortage_per_mille: 1000, ..Faults::default() };
        let fabric = Faulty::new(Arc::new(Loopback::new()), 1, faults);
        let lane = fabric.lane().unwrap();
        let dialled = lane.dial(&Address::Name("x".into()), Attributes::default());
        assert!(matches!(dialled, Err(FabricError::System { .. })));
        assert_eq!(lane.resources(), Resources::default());
    }
}
