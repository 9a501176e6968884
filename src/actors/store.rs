//! `StoreActor`: what has to wait for space, and the work that makes space.
//!
//! Look-up and commit never come here. A connection that got no claim, no segment or no pin asks, and is answered in
//! arrival order when write-behind, a finished reader, a dropped claim or a new pool file made room: all of them ring the
//! store's bell, which this actor listens to.

use crate::actors::disk_tail::{DiskTail, TailError, TailWritten, WriteTail};
use crate::config::TimersConfig;
use crate::fabric::region::Block;
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
/// Objects looked at for expiry in each tick: a million in under two minutes, for a tenth of a per cent of a core.
const CRAWL_COUNT: usize = 1000;
/// A claim granted after a wait keeps this share of `claim_idle` to show that its peer is alive: octets it sent before
/// are in the socket by now.
const GRACE_AFTER_WAIT: u64 = 10;

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
    crawl: Crawl,
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
        let write_depth = depth.max(1) * drives.len();
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
            crawl: Crawl::default(),
        }
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
            let idle_ms = self.claim_idle_ms - self.claim_idle_ms / GRACE_AFTER_WAIT;
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
        ctx.spawn(made.into_actor(self).map(move |made, _, _| {
            let bytes = match made {
                Ok(Ok(grown)) => grown.map_or(0, |grown| grown.bytes),
                Ok(Err(error)) => {
                    tracing::warn!(drive, %error, "the pool cannot grow further");
                    0
                }
                Err(_) => 0,
            };
            reply.do_send(Grown { drive, bytes });
        }));
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        let now_ms = self.store.clock().now_ms();
        self.store.handle_time(now_ms);
        self.store.crawl(&mut self.crawl, CRAWL_COUNT);
        if !self.claims.is_empty() || !self.fills.is_empty() {
            let revoked = self.store.claims().revoke_idle(now_ms, self.claim_idle_ms);
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
        match &written.result {
            Ok(_) => {}
            // The daemon ends; that is no fault of the drive.
            Err(TailError::Cancelled) => return segment.handle_written(None),
            Err(error) => tracing::error!(drive, %error, "write-behind failed"),
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
