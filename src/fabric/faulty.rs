//! Any fabric, made worse by a seed: connections drop, events come late, posts and registrations are refused.
//!
//! The contract holds all the same: events of one queue pair keep their order, every buffer comes back, the disconnection
//! is the last event. The same seed and the same calls give the same faults.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::{
    Access, Address, Attributes, Cause, ConnectRequest, Event, Fabric, FabricError, Lane, Listener, LocalBuf,
    MemoryRegion, PostError, QpNum, QueuePair, Resources, SharedSpan, Work, WorkId,
};

/// How often what goes wrong, in thousandths.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Faults {
    /// Of posts: the connection is lost right after.
    pub drop_per_mille: u32,
    /// Of turns and queue pairs with news: the news waits for another turn.
    pub delay_per_mille: u32,
    /// Of posts: refused as if the queue were full.
    pub refuse_per_mille: u32,
    /// Of dials, admissions, allocations and registrations: refused as if memory were short.
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
    /// Queue pairs we let drop: their disconnection is reported as a loss.
    dropped: HashMap<QpNum, Weak<Mutex<bool>>>,
}

impl FaultyLane {
    fn wrap(&self, inner: Box<dyn QueuePair>) -> Box<dyn QueuePair> {
        let dropped = Arc::new(Mutex::new(false));
        lock(&self.state).dropped.insert(inner.number(), Arc::downgrade(&dropped));
        Box::new(FaultyQueuePair { inner, plan: self.plan.clone(), dropped })
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
        let mut fresh = Vec::new();
        let more = self.inner.progress(now, &mut fresh, events_max);
        let mut state = lock(&self.state);
        for mut event in fresh {
            let number = event.qp();
            if let Event::Disconnected { qp, cause } = &mut event {
                let dropped = state.dropped.remove(qp).and_then(|dropped| dropped.upgrade());
                if dropped.is_some_and(|dropped| *lock(&dropped)) {
                    *cause = Cause::Lost("by an injected fault".into());
                }
            }
            if let Event::Rejected { qp, .. } = &event {
                state.dropped.remove(qp);
            }
            match state.waiting.iter_mut().find(|(waiting, _)| *waiting == number) {
                Some((_, queue)) => queue.push_back(event),
                None => state.waiting.push_back((number, VecDeque::from([event]))),
            }
        }
        let mut room = events_max;
        for _ in 0..state.waiting.len() {
            let Some((number, mut queue)) = state.waiting.pop_front() else { break };
            if !self.plan.happens(self.plan.faults.delay_per_mille) {
                let count = queue.len().min(room);
                room -= count;
                events.extend(queue.drain(..count));
            }
            if !queue.is_empty() {
                state.waiting.push_back((number, queue));
            }
        }
        more || !state.waiting.is_empty()
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

    fn reports_writes(&self) -> bool {
        self.inner.reports_writes()
    }

    fn resources(&self) -> Resources {
        self.inner.resources()
    }
}

#[derive(Debug)]
struct FaultyQueuePair {
    inner: Box<dyn QueuePair>,
    plan: Plan,
    dropped: Arc<Mutex<bool>>,
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
        self.inner.allocate(buf_bytes, count)
    }

    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        self.plan.shortage()?;
        self.inner.register(span, access)
    }

    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        self.inner.establish(private_data)
    }

    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        if self.plan.happens(self.plan.faults.refuse_per_mille) {
            return Err(PostError::Full { posted: work.len(), depth: self.inner.attributes().send_depth });
        }
        let id = self.inner.post(work)?;
        if self.plan.happens(self.plan.faults.drop_per_mille) {
            *lock(&self.dropped) = true;
            self.inner.disconnect();
        }
        Ok(id)
    }

    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        self.inner.post_receive(buf)
    }

    fn kick(&self) {
        self.inner.kick();
    }

    fn disconnect(&self) {
        self.inner.disconnect();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::loopback::Loopback;
    use super::super::{Flags, Source, Status};
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
        let faults = Faults { drop_per_mille: 10, delay_per_mille: 300, refuse_per_mille: 200, shortage_per_mille: 0 };
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
