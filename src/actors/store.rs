//! `StoreActor`: what has to wait for space, and the work that makes space.
//!
//! Look-up and commit never come here. A connection that got no claim, no segment or no pin asks, and is answered in
//! arrival order when write-behind, a finished reader, a dropped claim or a new pool file made room: all of them ring the
//! store's bell, which this actor listens to.

use crate::actors::disk_tail::{DiskTail, TailError, TailWritten, WriteTail};
use crate::config::TimersConfig;
use crate::fabric::region::Block;
use crate::programs::nfs::FileSystem;
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::Want;
use crate::store::pool::PoolFiles;
use crate::store::segment::{Filling, Segment, WriteJob};
use crate::store::uring::WriteSource;
use crate::store::{Counters, Crawl, GROWTH_LOW_BYTES, Store};
use actix::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Claims space for a value of `len` octets.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Reserve {
    pub len: u64,
    pub revoker: Revoker,
    pub reply: Recipient<Reserved>,
}

/// The claim, or none after `reserve_wait`.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Reserved(pub Option<Claim>);

/// Wants the next segment of a draft.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Fill {
    pub want: Want,
    pub reply: Recipient<Filled>,
}

/// The segment, or none after `reserve_wait`.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Filled(pub Option<Filling>);

/// Wants to hear when anything came free, or shortly after in any case.
#[derive(Message)]
#[rtype(result = "()")]
pub struct AwaitSpace {
    pub reply: Recipient<SpaceFreed>,
}

/// Try again now.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct SpaceFreed;

#[derive(Message)]
#[rtype(result = "()")]
struct Grown {
    drive: usize,
    /// Octets of the new file; 0: there is no room for one.
    bytes: u64,
}

/// How often waits are looked through; also the longest an [`AwaitSpace`] waits.
const TICK: Duration = Duration::from_millis(100);
/// Until growth that failed for want of descriptors is tried again.
const GROWTH_PAUSE: Duration = Duration::from_secs(1);
/// Objects looked at for expiry in each tick: a million in under two minutes, for a tenth of a per cent of a core.
const CRAWL_COUNT: usize = 1000;
/// Every so many writers in the queue shorten the patience with an idle claim by as much as the first: peers that stall
/// in great numbers, one after the other, must not use up `reserve_wait` of those behind them.
const PATIENCE_QUEUE: u64 = 8;
/// The least patience is this part of `claim_idle`, and a claim granted after a wait has half of that at least to show
/// that its peer is alive: octets it sent before are in the socket by now.
const PATIENCE_DIVISOR_MAX: u64 = 5;

struct Waiter<T> {
    what: T,
    since_ms: u64,
}

/// The actor. One per process, on the first lane.
pub struct StoreActor {
    store: Store,
    tail: Addr<DiskTail>,
    drives: Arc<[Arc<PoolFiles>]>,
    write_depth: usize,
    reserve_wait_ms: u64,
    claim_idle_ms: u64,
    claims: VecDeque<Waiter<Reserve>>,
    fills: VecDeque<Waiter<Fill>>,
    retries: Vec<AwaitSpace>,
    writes: HashMap<u64, (Arc<Segment>, usize)>,
    next_ticket: u64,
    growing: bool,
    /// The disk has been told to stop: nothing is written behind any more.
    stopping: bool,
    crawl: Crawl,
    /// Whose drafts are committed when they are due.
    files: Option<Arc<FileSystem>>,
}

impl StoreActor {
    /// `tail` is the disk of the actor's own lane.
    pub fn new(
        store: Store,
        tail: Addr<DiskTail>,
        drives: Arc<[Arc<PoolFiles>]>,
        depth: usize,
        timers: &TimersConfig,
    ) -> Self {
        // A writer is slowed to the disk in any case; a reader behind deep writes would wait for all of them.
        let write_depth = (depth / 4).max(1) * drives.len();
        Self {
            store,
            tail,
            drives,
            write_depth,
            reserve_wait_ms: timers.reserve_wait.as_millis() as u64,
            claim_idle_ms: timers.claim_idle.as_millis() as u64,
            claims: VecDeque::new(),
            fills: VecDeque::new(),
            retries: Vec::new(),
            writes: HashMap::new(),
            next_ticket: 0,
            growing: false,
            stopping: false,
            crawl: Crawl::default(),
            files: None,
        }
    }

    /// Commits the drafts of `files` when they are due.
    #[must_use]
    pub fn with_files(self, files: Option<Arc<FileSystem>>) -> Self {
        Self { files, ..self }
    }

    /// Makes space and hands out what there is, in arrival order.
    fn relieve(&mut self, ctx: &mut Context<Self>) {
        if !self.claims.is_empty() || !self.fills.is_empty() || !self.retries.is_empty() {
            // Before looking: what comes free from here on rings again.
            self.store.wake().want();
        }
        self.write_behind(ctx);
        self.grow(ctx);
        while let Some(waiter) = self.claims.front() {
            let Some(claim) = self.store.try_claim(waiter.what.len, true, &waiter.what.revoker) else { break };
            let idle_ms = self.claim_idle_ms / PATIENCE_DIVISOR_MAX / 2;
            claim.touch(self.store.clock().now_ms().saturating_sub(idle_ms));
            self.answer_claim(Some(claim));
        }
        while let Some(waiter) = self.fills.front() {
            let Ok(filling) = self.store.fill(waiter.what.want) else { break };
            if let Some(waiter) = self.fills.pop_front() {
                waiter.what.reply.do_send(Filled(Some(filling)));
            }
        }
        for retry in self.retries.drain(..) {
            retry.reply.do_send(SpaceFreed);
        }
        // Handing out may have used up what was clean.
        self.write_behind(ctx);
    }

    /// Waits for the bell, does what it asks for, waits again.
    fn listen(&self, ctx: &mut Context<Self>) {
        let wake = self.store.wake().clone();
        let rung = async move {
            wake.rung().await;
            // A bell that is rung while it is answered must not keep the lane.
            tokio::task::yield_now().await;
        };
        ctx.spawn(rung.into_actor(self).map(|(), actor, ctx| {
            actor.relieve(ctx);
            actor.listen(ctx);
        }));
    }

    fn answer_claim(&mut self, claim: Option<Claim>) {
        if let Some(waiter) = self.claims.pop_front() {
            waiter.what.reply.do_send(Reserved(claim));
        }
        self.store.claims().set_queued(self.claims.len());
    }

    fn write_behind(&mut self, ctx: &mut Context<Self>) {
        if self.stopping {
            return;
        }
        let wanted = !self.fills.is_empty() || !self.retries.is_empty();
        while self.writes.len() < self.write_depth {
            let Some(WriteJob { segment, ram, extent }) = self.store.next_write(wanted) else { break };
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            self.writes.insert(ticket, (segment.clone(), usize::from(extent.drive())));
            let (len, from) = (segment.len(), WriteSource::new(Octets(ram)));
            let reply = ctx.address().recipient();
            self.tail.do_send(WriteTail { extent, len, from, keep: segment, ticket, reply });
        }
    }

    fn grow(&mut self, ctx: &mut Context<Self>) {
        if self.growing {
            return;
        }
        let Some(drive) = self.store.extents().growth_wanted(GROWTH_LOW_BYTES) else { return };
        self.growing = true;
        let files = self.drives[drive].clone();
        let made = async move { tokio::task::spawn_blocking(move || files.grow()).await };
        let reply = ctx.address();
        ctx.spawn(made.into_actor(self).map(move |made, _, ctx| {
            let bytes = match made {
                Ok(Ok(grown)) => grown.map_or(0, |grown| grown.bytes),
                Ok(Err(error)) if error.is_passing() => {
                    tracing::warn!(drive, %error, "the pool cannot grow now");
                    ctx.run_later(GROWTH_PAUSE, |actor, ctx| {
                        actor.growing = false;
                        actor.relieve(ctx);
                    });
                    return;
                }
                Ok(Err(error)) => {
                    tracing::warn!(drive, %error, "the pool cannot grow further");
                    0
                }
                Err(_) => 0,
            };
            reply.do_send(Grown { drive, bytes });
        }));
    }

    /// How long a claim may be idle while others wait.
    fn patience_ms(&self) -> u64 {
        let divisor = 1 + self.claims.len() as u64 / PATIENCE_QUEUE;
        self.claim_idle_ms / divisor.min(PATIENCE_DIVISOR_MAX)
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        let now_ms = self.store.clock().now_ms();
        self.store.handle_time(now_ms);
        if let Some(files) = &self.files {
            files.handle_time(now_ms);
        }
        self.store.crawl(&mut self.crawl, CRAWL_COUNT);
        if !self.claims.is_empty() || !self.fills.is_empty() || !self.retries.is_empty() {
            let revoked = self.store.claims().revoke_idle(now_ms, self.patience_ms());
            Counters::add(&self.store.counters().claims_revoked, revoked as u64);
        }
        let late_ms = now_ms.saturating_sub(self.reserve_wait_ms);
        self.claims.retain(|waiter| waiter.what.reply.connected());
        self.fills.retain(|waiter| waiter.what.reply.connected());
        self.store.claims().set_queued(self.claims.len());
        while self.claims.front().is_some_and(|waiter| waiter.since_ms < late_ms) {
            Counters::add(&self.store.counters().claims_refused, 1);
            self.answer_claim(None);
        }
        while self.fills.front().is_some_and(|waiter| waiter.since_ms < late_ms) {
            if let Some(waiter) = self.fills.pop_front() {
                Counters::add(&self.store.counters().claims_refused, 1);
                waiter.what.reply.do_send(Filled(None));
            }
        }
        self.relieve(ctx);
    }
}

/// A block as the source of a write: the whole of it, so that the padding up to 4 KiB is there too.
struct Octets(Arc<Block>);

impl AsRef<[u8]> for Octets {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl Actor for StoreActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.run_interval(TICK, Self::tick);
        self.listen(ctx);
    }
}

impl Handler<Reserve> for StoreActor {
    type Result = ();

    fn handle(&mut self, what: Reserve, ctx: &mut Self::Context) {
        self.claims.push_back(Waiter { what, since_ms: self.store.clock().now_ms() });
        self.store.claims().set_queued(self.claims.len());
        self.relieve(ctx);
    }
}

impl Handler<Fill> for StoreActor {
    type Result = ();

    fn handle(&mut self, what: Fill, ctx: &mut Self::Context) {
        self.fills.push_back(Waiter { what, since_ms: self.store.clock().now_ms() });
        self.relieve(ctx);
    }
}

impl Handler<AwaitSpace> for StoreActor {
    type Result = ();

    fn handle(&mut self, what: AwaitSpace, ctx: &mut Self::Context) {
        // Answered at the next ring or tick, not at once: what was tried just before would fail again.
        self.retries.push(what);
        self.store.wake().want();
        self.write_behind(ctx);
        self.grow(ctx);
    }
}

impl Handler<TailWritten> for StoreActor {
    type Result = ();

    fn handle(&mut self, written: TailWritten, ctx: &mut Self::Context) {
        let Some((segment, drive)) = self.writes.remove(&written.ticket) else { return };
        if written.result == Err(TailError::Cancelled) {
            // No failure of the drive: values must not be moved, evicted or given up for it.
            self.stopping = true;
            return;
        }
        if let Err(error) = &written.result {
            tracing::error!(drive, %error, "write-behind failed");
        }
        self.store.handle_written(&segment, drive, written.result.ok());
        self.relieve(ctx);
    }
}

impl Handler<Grown> for StoreActor {
    type Result = ();

    fn handle(&mut self, grown: Grown, ctx: &mut Self::Context) {
        self.growing = false;
        if grown.bytes > 0 {
            self.store.extents().add_file(grown.drive, grown.bytes);
        } else {
            self.store.extents().end_growth(grown.drive);
        }
        self.relieve(ctx);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::rig::{Die, Inbox, Mortal, Rig, octets, soon, until};
    use crate::store::segment::Class;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::mpsc::UnboundedReceiver;

    const MIB: u64 = 1 << 20;
    const WANT: Want = Want { class: Class::Large, remaining: MIB, head: false };

    fn reserve_for(rig: &Rig, len: u64, reply: Recipient<Reserved>) {
        rig.lane.store.do_send(Reserve { len, revoker: Arc::new(|| ()), reply });
    }

    fn reserve(rig: &Rig, len: u64) -> UnboundedReceiver<Reserved> {
        let (inbox, answers) = Inbox::open();
        reserve_for(rig, len, inbox.recipient());
        answers
    }

    fn fill(rig: &Rig) -> UnboundedReceiver<Filled> {
        let (inbox, answers) = Inbox::open();
        rig.lane.store.do_send(Fill { want: WANT, reply: inbox.recipient() });
        answers
    }

    fn claim_now(rig: &Rig, len: u64) -> Claim {
        rig.store.try_claim(len, false, &(Arc::new(|| ()) as Revoker)).expect("space is free")
    }

    /// Takes all memory there is.
    fn take_all(rig: &Rig) -> Vec<Filling> {
        std::iter::from_fn(|| rig.store.fill(WANT).ok()).collect()
    }

    async fn claimed(answers: &mut UnboundedReceiver<Reserved>) -> Option<Claim> {
        soon(answers.recv()).await.expect("an answer").0
    }

    #[actix::test]
    async fn claims_are_granted_in_arrival_order_though_a_later_one_would_fit() {
        let rig = Rig::new(|_| {});
        let held = claim_now(&rig, 40 * MIB);
        let mut large = reserve(&rig, 60 * MIB);
        until("the large one waits", || rig.store.claims().queued() == 1).await;
        let mut small = reserve(&rig, MIB);
        until("both wait", || rig.store.claims().queued() == 2).await;
        assert!(rig.store.try_claim(MIB, false, &(Arc::new(|| ()) as Revoker)).is_none(), "nobody passes the queue");
        assert!(small.try_recv().is_err() && large.try_recv().is_err());
        drop(held);
        let large = claimed(&mut large).await.expect("all of it is free");
        assert_eq!(large.bytes(), 60 * MIB);
        let small = claimed(&mut small).await.expect("it fits beside the large one");
        assert_eq!(rig.store.claims().granted(), (2, 61 * MIB));
        drop((large, small));
        assert_eq!(rig.store.claims().granted(), (0, 0));
        assert_eq!(rig.store.claims().queued(), 0);
    }

    #[actix::test]
    async fn segments_are_handed_out_in_arrival_order() {
        let rig = Rig::new(|_| {});
        let mut held = take_all(&rig);
        assert!(!held.is_empty());
        let (mut first, mut second) = (fill(&rig), fill(&rig));
        // A message of the same sender, answered after those before it.
        let (inbox, mut freed) = Inbox::open();
        rig.lane.store.do_send(AwaitSpace { reply: inbox.recipient() });
        soon(freed.recv()).await.unwrap();
        assert!(first.try_recv().is_err() && second.try_recv().is_err(), "nothing is free");
        held.pop();
        let got = soon(first.recv()).await.unwrap().0.expect("one came free");
        assert!(second.try_recv().is_err(), "only one came free");
        drop(got);
        assert!(soon(second.recv()).await.unwrap().0.is_some());
    }

    #[actix::test]
    async fn a_segment_that_waits_for_memory_is_had_from_write_behind() {
        let rig = Rig::new(|_| {});
        let value = octets(3 << 20, 1);
        let stored = (0..100_u8).take_while(|key| rig.store.put(&[*key], &value, 0, 0).is_ok()).count();
        assert!((1..100).contains(&stored), "memory ends before the keys do: {stored}");
        assert!(rig.store.has_dirty());
        assert!(soon(fill(&rig).recv()).await.unwrap().0.is_some());
    }

    #[actix::test]
    async fn an_idle_claim_is_revoked_once_somebody_waits_and_not_before() {
        let rig = Rig::new(|config| config.timers.claim_idle = Duration::from_millis(50));
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        let revoker: Revoker = Arc::new(move || _ = count.fetch_add(1, Ordering::SeqCst));
        let idle = rig.store.try_claim(40 * MIB, false, &revoker).unwrap();
        let busy = claim_now(&rig, 10 * MIB);
        busy.set_held_up(true);
        // Several ticks, each of which would revoke it.
        tokio::time::sleep(4 * TICK).await;
        assert!(!idle.is_revoked());
        let mut waiting = reserve(&rig, 50 * MIB);
        until("the idle one is told", || told.load(Ordering::SeqCst) == 1).await;
        assert!(idle.is_revoked() && !busy.is_revoked());
        assert!(waiting.try_recv().is_err(), "the space is not free before its owner lets go");
        drop(idle);
        assert!(claimed(&mut waiting).await.is_some());
        assert_eq!(rig.store.counters().claims_revoked.load(Ordering::Relaxed), 1);
        assert_eq!(told.load(Ordering::SeqCst), 1, "it is told once");
    }

    #[actix::test]
    async fn who_waited_too_long_is_refused_and_the_next_is_served() {
        let rig = Rig::new(|config| {
            config.timers.claim_idle = Duration::from_secs(60);
            config.timers.reserve_wait = Duration::from_millis(50);
        });
        let held = claim_now(&rig, 40 * MIB);
        assert!(claimed(&mut reserve(&rig, 30 * MIB)).await.is_none());
        assert_eq!(rig.store.counters().claims_refused.load(Ordering::Relaxed), 1);
        assert!(claimed(&mut reserve(&rig, 20 * MIB)).await.is_some(), "this one fits");
        drop(held);

        let all = take_all(&rig);
        assert!(soon(fill(&rig).recv()).await.unwrap().0.is_none());
        assert_eq!(rig.store.counters().claims_refused.load(Ordering::Relaxed), 2);
        drop(all);
        assert!(soon(fill(&rig).recv()).await.unwrap().0.is_some());
    }

    #[actix::test]
    async fn the_pool_grows_for_the_one_who_waits() {
        let rig = Rig::without_files(|_| {});
        assert_eq!(rig.drives[0].file_count(), 0);
        assert!(soon(fill(&rig).recv()).await.unwrap().0.is_some());
        assert_eq!(rig.drives[0].file_count(), 1);
        assert_eq!(rig.store.gauges().pool_bytes, 64 * MIB);
    }

    #[actix::test]
    async fn a_pool_that_cannot_grow_ends_there_and_writers_are_refused() {
        let rig = Rig::without_files(|config| {
            config.timers.claim_idle = Duration::from_millis(50);
            config.timers.reserve_wait = Duration::from_millis(50);
        });
        std::fs::remove_dir_all(rig.drives[0].path()).unwrap();
        assert!(soon(fill(&rig).recv()).await.unwrap().0.is_none());
        assert_eq!(rig.store.gauges().pool_bytes, 0);
    }

    #[actix::test]
    async fn askers_that_died_hold_nobody_up() {
        let rig = Rig::new(|_| {});
        let held = claim_now(&rig, 40 * MIB);
        let mortal = Mortal.start();
        reserve_for(&rig, 60 * MIB, mortal.clone().recipient());
        let mut behind = reserve(&rig, MIB);
        until("both wait", || rig.store.claims().queued() == 2).await;
        mortal.send(Die).await.unwrap();
        assert!(claimed(&mut behind).await.is_some());
        drop(held);
        until("what it was granted comes back", || rig.store.claims().granted() == (0, 0)).await;

        let mut all = take_all(&rig);
        let mortal = Mortal.start();
        rig.lane.store.do_send(Fill { want: WANT, reply: mortal.clone().recipient() });
        let mut behind = fill(&rig);
        mortal.send(Die).await.unwrap();
        all.pop();
        assert!(soon(behind.recv()).await.unwrap().0.is_some());
    }

    /// A shutdown cancels writes that wait; that was taken for a drive that had failed, and values were evicted to put
    /// the octets elsewhere.
    #[actix::test]
    async fn a_write_that_a_stop_cancels_is_no_failure_of_its_drive() {
        let rig = Rig::new(|_| {});
        while let Ok(version) = rig.store.put(&rig.store.gauges().objects.to_le_bytes(), &octets(3 << 20, 1), 0, 0) {
            assert!(version < 100, "memory ends");
        }
        let before = rig.store.gauges();
        soon(rig.lane.tail.send(crate::actors::disk_tail::Stop)).await.unwrap();
        let _held = take_all(&rig);
        let mut unfilled = fill(&rig);
        // For every write that the actor may have asked for.
        for ticket in 0..1000 {
            rig.lane.store.do_send(TailWritten { ticket, result: Err(TailError::Cancelled) });
        }
        let (inbox, mut freed) = Inbox::open();
        rig.lane.store.do_send(AwaitSpace { reply: inbox.recipient() });
        soon(freed.recv()).await.unwrap();
        let after = rig.store.gauges();
        assert_eq!((after.objects, after.pool_bytes), (before.objects, before.pool_bytes));
        assert_eq!(rig.store.counters().lost.load(Ordering::Relaxed), 0);
        assert!(unfilled.try_recv().is_err());
    }

    #[actix::test]
    async fn who_awaits_space_hears_in_any_case() {
        let rig = Rig::new(|_| {});
        let (inbox, mut freed) = Inbox::open();
        rig.lane.store.do_send(AwaitSpace { reply: inbox.recipient() });
        assert!(soon(freed.recv()).await.is_some());
    }
}
