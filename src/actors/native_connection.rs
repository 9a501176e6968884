//! `NativeConnection`: one peer of the native door.
//!
//! ```text
//!  CqPoller -- Events --> NativeConnection -- Turn --> CreditManager -- posts --> queue pair
//!                              |   ^  `----- Fill --> BulkWindow -- Filled --> CreditManager
//!                              |   `-- Posted, Missed, Over, Finished -- CreditManager
//!                              `-- Reserve, Fill, AwaitSpace --> StoreActor, as on the other doors
//! ```
//!
//! It reads the own ring until it is empty, executes requests in order, and decides the order of what is sent; where the
//! octets of a body come from and when they leave is the others' business. A window of the peer is copied once, straight
//! into the pages of the value that is arriving, and given back.
//!
//! The end: the queue pair is told to disconnect, the connection stays, silent, until the fabric has reported its last
//! event, and `BulkWindow` until the disk has returned its slots. Only then are memory regions and the place among the
//! connections given back.
//!
//! Its mailbox is used by `do_send` alone: events of a queue pair whose depth bounds them, and answers to what was asked.

use crate::actors::bulk_window::{self, BulkWindow, Fill, Source};
use crate::actors::connection::{Admission, Drain, Kill, Lane, Revoked, ask};
use crate::actors::cq_poller::{Attachments, Events};
use crate::actors::credit_manager::{self, CreditManager, Finish, PLACES_MAX, Parts, Told, Turn};
use crate::actors::store::{Filled, Reserved, SpaceFreed};
use crate::config::NativeConfig;
use crate::fabric::{self, Access, Attributes, Cause, ConnectRequest, Event, FabricError, MemoryRegion, QueuePair};
use crate::fabric::{QpNum, SharedSpan};
use crate::programs::memcache::exchange::{Bodies, Exchange, Replies};
use crate::programs::memcache::session::INPUT_BYTES;
use crate::store::Pinned;
use crate::store::claims::Revoker;
use crate::wire::memcache::parse::CloseReason;
use crate::wire::memcache::response as reply;
use crate::wire::native::conversation::{Conversation, Step};
use crate::wire::native::descriptor::{Descriptor, Negotiated, Nonce, RemoteAddress};
use crate::wire::native::endpoint::EndCause;
use crate::wire::native::poison::Poison;
use crate::wire::native::record::Record;
use crate::wire::native::ring::{ControlRing, RingMemory};
use crate::wire::native::stream::{Inbound, Outbound, PIPELINE_BYTES_MAX, Value};
use crate::wire::native::window::RxWindows;
use actix::prelude::*;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Records taken in one turn before others of the lane run.
const RECORDS_PER_TURN: usize = 512;
/// Text beyond this stops parsing until some has left.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Values that are looked up ahead, besides one for each slot.
const PINS_AHEAD: usize = 4;
/// Octets of the two buffers that Reads of the peer's counter land in, each.
const SINK_BYTES: usize = 4096;

/// The own control region, as its owner sees it.
struct Ring(Rc<Life>);

impl Ring {
    fn region(&self) -> &MemoryRegion {
        &self.0.regions[0]
    }
}

impl RingMemory for Ring {
    fn load(&self, offset: usize) -> u64 {
        self.region().span().load_u64_acquire(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.region().span().store_u64_release(offset, word);
    }

    fn watch(&self, offset: usize, word: u64) {
        self.region().watch(offset, word);
    }
}

/// Answers on their way to their places.
struct Outward {
    outbound: Outbound<Source>,
    /// Values pinned by what is not in a slot yet.
    pins: Arc<AtomicUsize>,
    /// More of them are of no use: the slots are full before.
    pins_ahead_max: usize,
}

impl Replies for Outward {
    fn text(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut text = Vec::new();
        write(&mut text);
        self.outbound.text(&text);
    }

    fn value(&mut self, key: &[u8], pinned: Pinned, cas: Option<u64>) {
        let len = pinned.len();
        let mut line = Vec::with_capacity(key.len() + 64);
        reply::value_line(&mut line, key, pinned.flags(), len, cas);
        let in_ram = pinned.pieces().iter().take_while(|piece| piece.segment.is_resident());
        let quick_len = in_ram.map(|piece| u64::from(piece.len)).sum();
        let source = Source::new(pinned, self.pins.clone());
        self.outbound.value(&line, Value { source, len, quick_len });
    }

    fn is_full(&self, pins_max: usize) -> bool {
        self.outbound.text_bytes() >= TEXT_BYTES_MAX
            || self.pins.load(Ordering::Relaxed) >= pins_max.min(self.pins_ahead_max)
    }
}

impl Bodies for Conversation {
    fn accept_body(&mut self, len: u64) {
        Self::accept_body(self, len);
    }

    fn swallow_body(&mut self, len: u64) {
        Self::swallow_body(self, len);
    }

    fn abandon_body(&mut self) {
        Self::abandon_body(self);
    }
}

/// What a connection of a native door is made of, besides the request.
#[derive(Clone)]
pub struct NativeLane {
    pub lane: Lane,
    pub fabric: Arc<dyn fabric::Lane>,
    pub attachments: Attachments,
    pub config: NativeConfig,
}

/// The actor. One per peer, on one lane for its life.
pub struct NativeConnection {
    exchange: Exchange,
    machine: Conversation,
    inbound: Inbound,
    outward: Outward,
    ring: ControlRing,
    windows: RxWindows,
    own_rx: SharedSpan,
    /// Octets of the window at the front that were copied.
    lease_copied: usize,
    /// Places that can be taken.
    room: usize,
    room_max: usize,
    /// Since when the next record does not fit, and what was read by then.
    full: Option<(u64, u64)>,
    turn: Turn,
    /// A window was given up: its release is due.
    released: bool,
    ending: Option<Over>,
    over: bool,
    finishing: bool,
    draining: bool,
    turn_is_due: bool,
    qp: Arc<dyn QueuePair>,
    number: QpNum,
    credit: Addr<CreditManager>,
    bulk: Addr<BulkWindow>,
    /// Slots that wait for the disk.
    filling: Arc<AtomicUsize>,
    lane: NativeLane,
    /// With what is given back last.
    own_ring: Ring,
}

/// What is given back last, in this order: not before the disk has returned the last slot it was to fill, so
/// `BulkWindow` has it too.
struct Life {
    _qp: Arc<dyn QueuePair>,
    /// The control ring, the windows.
    regions: [MemoryRegion; 2],
    _admission: Admission,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Over {
    Quit,
    LineTooLong,
    End(EndCause),
    Fabric(Cause),
    Stalled,
    Idle,
    Shutdown,
}

impl Over {
    /// One word for counting.
    fn cause(&self) -> &'static str {
        match self {
            Self::Quit => "quit",
            Self::LineTooLong => "line_too_long",
            Self::End(end) => end.cause(),
            Self::Fabric(cause) => word_of(cause),
            Self::Stalled => "stalled",
            Self::Idle => "idle",
            Self::Shutdown => "shutdown",
        }
    }
}

/// One word for counting.
fn word_of(cause: &Cause) -> &'static str {
    match cause {
        Cause::Local => "local",
        Cause::Peer => "peer",
        Cause::Lost(_) => "lost",
        Cause::TimedOut => "timed_out",
        Cause::PeerFault(_) => "peer_fault",
        Cause::RefusedByPeer(_) => "refused_by_peer",
    }
}

impl NativeConnection {
    /// Accepts the peer of `request`, whose descriptor is `peer`, on the lane of this thread.
    ///
    /// # Errors
    /// What the fabric lacks; the peer was rejected then.
    pub fn start_on_lane(
        request: ConnectRequest,
        peer: Descriptor,
        lane: NativeLane,
        admission: Admission,
    ) -> Result<Addr<Self>, FabricError> {
        let shortage = |what| move |source| FabricError::System { what, source };
        let NativeConfig { ring, windows, .. } = lane.config;
        let qp: Arc<dyn QueuePair> = Arc::from(lane.fabric.admit(request, Attributes::default())?);
        let ring_bytes = ring.mapping_bytes(4096);
        let half = usize::try_from(windows.half_bytes()).unwrap_or(usize::MAX);
        let own_ring = SharedSpan::new(usize::try_from(ring_bytes).unwrap_or(usize::MAX))
            .map_err(shortage("map a control ring"))?;
        let own_rx = SharedSpan::new(half).map_err(shortage("map bulk windows"))?;
        let ring_region = qp.register(own_ring, Access::BOTH)?;
        let rx_region = qp.register(own_rx.clone(), Access::WRITE)?;
        let bufs = qp.allocate(windows.window_bytes() as usize, windows.window_count() as usize)?;
        let sinks = qp.allocate(SINK_BYTES, 2)?;
        let at = |region: &MemoryRegion, address| {
            let key = region.remote().key;
            RemoteAddress { address, key }
        };
        // Addresses of regions are at least 2^32, and a half is shorter.
        let bulk_address = windows.bulk_address(rx_region.remote().address).ok_or(FabricError::Unaligned)?;
        let own = Descriptor {
            ring,
            ring_at: at(&ring_region, ring_region.remote().address),
            ring_bytes: u32::try_from(ring_bytes).unwrap_or(u32::MAX),
            nonce: Nonce::ours(std::process::id()),
            windows,
            bulk_at: at(&rx_region, bulk_address),
        };
        let number = qp.number();
        // Who is not established is rejected and was never a connection. No event is missed: the poller of this queue
        // pair is on this thread, and its turn comes after `attach`.
        qp.establish(&own.encode())?;
        let attachments = lane.attachments.clone();
        let limits = Negotiated::between(own.windows, peer.windows);
        let address = Self::create(|ctx| {
            let address = ctx.address();
            let revoker: Revoker = Arc::new(move || address.do_send(Revoked));
            let receiving = RxWindows::new(own.windows, limits);
            let life = Rc::new(Life { _qp: qp.clone(), regions: [ring_region, rx_region], _admission: admission });
            let filling = Arc::default();
            let bulk = BulkWindow::new(bufs, lane.lane.clone(), life.clone(), Arc::clone(&filling)).start();
            let metrics = lane.lane.session.metrics.clone();
            let credit = CreditManager::new(Parts {
                peer,
                limits,
                qp: qp.clone(),
                releases: receiving.releases(),
                connection: ctx.address().recipient(),
                bulk: bulk.clone(),
                metrics: metrics.clone(),
                sinks,
            })
            .start();
            bulk.do_send(bulk_window::Serve(credit.clone()));
            metrics.connections.total.add(1);
            metrics.connections.current.add(1);
            metrics.native.total.add(1);
            metrics.native.current.add(1);
            let room_max = PLACES_MAX.min(2 * peer.ring.slot_count() as usize);
            Self {
                exchange: Exchange::new(lane.lane.session.clone(), revoker),
                machine: Conversation::new(),
                inbound: Inbound::new(PIPELINE_BYTES_MAX),
                outward: Outward {
                    outbound: Outbound::new(limits.fragment_bytes_max),
                    pins: Arc::default(),
                    pins_ahead_max: own.windows.window_count() as usize + PINS_AHEAD,
                },
                ring: ControlRing::new(own.ring.slot_count()),
                windows: receiving,
                own_ring: Ring(life),
                own_rx,
                lease_copied: 0,
                room: room_max,
                room_max,
                full: None,
                turn: Turn::default(),
                released: false,
                ending: None,
                over: false,
                finishing: false,
                draining: false,
                turn_is_due: false,
                qp,
                number,
                credit,
                bulk,
                filling,
                lane,
            }
        });
        attachments.attach(number, address.clone().recipient());
        Ok(address)
    }

    fn count_messages(&self, count: u64) {
        self.lane.lane.session.metrics.connections.messages.add(count);
    }

    /// The one place that acts.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        if self.over {
            return;
        }
        let taken = self.take_turn(ctx);
        self.hand_on();
        if let Err(cause) = taken {
            return self.end(ctx, Over::End(cause));
        }
        if self.draining && !self.is_busy() {
            self.ending.get_or_insert(Over::Shutdown);
        }
        if self.ending.is_some() && !self.finishing && self.outward.outbound.is_empty() {
            self.finishing = true;
            self.count_messages(1);
            self.credit.do_send(Finish);
        }
    }

    fn take_turn(&mut self, ctx: &mut Context<Self>) -> Result<(), EndCause> {
        let mut records = 0;
        loop {
            let taken = self.poll_ring(RECORDS_PER_TURN - records)?;
            records += taken;
            let mut moved = taken > 0;
            while self.ending.is_none() && self.step()? {
                moved = true;
            }
            while let Some(asked) = self.exchange.poll_ask() {
                self.count_messages(1);
                ask(&self.lane.lane, asked, ctx.address());
            }
            if !moved {
                return Ok(());
            }
            if records == RECORDS_PER_TURN {
                self.take_another_turn(ctx);
                return Ok(());
            }
        }
    }

    /// Others of the lane run first.
    fn take_another_turn(&mut self, ctx: &mut Context<Self>) {
        if !std::mem::replace(&mut self.turn_is_due, true) {
            let turn = tokio::task::yield_now().into_actor(self).map(|(), actor, ctx| {
                actor.turn_is_due = false;
                actor.drive(ctx);
            });
            ctx.spawn(turn);
        }
    }

    /// Takes up to `count_max` records out of the own ring and returns how many.
    fn poll_ring(&mut self, count_max: usize) -> Result<usize, EndCause> {
        let mut count = 0;
        while count < count_max {
            let Some(copy) = self.ring.poll(&self.own_ring).map_err(Poison::from)? else { break };
            let received = &self.lane.lane.session.metrics.connections.bytes_read;
            match Record::decode(copy.octets()).map_err(Poison::from)? {
                Record::Inline(text) => {
                    if text.len() > self.inbound.room() {
                        let read = self.inbound.read_bytes();
                        if self.full.is_none_or(|(_, before)| before != read) {
                            self.full = Some((self.lane.lane.session.store.clock().now_ms(), read));
                        }
                        break;
                    }
                    received.add(text.len() as u64);
                    self.inbound.handle_inline(text);
                }
                Record::Ready { sequence, len } => {
                    received.add(u64::from(len.get()));
                    let lease = self.windows.handle_ready(sequence, len)?;
                    self.inbound.handle_ready(lease);
                }
                Record::Release { sequence } => self.turn.released.push(sequence),
            }
            self.full = None;
            self.ring.consume(&self.own_ring);
            count += 1;
        }
        if count > 0 {
            self.turn.record_count += count;
            self.exchange.handle_moved();
        }
        Ok(count)
    }

    /// One step of the conversation. False if nothing can be done now.
    fn step(&mut self) -> Result<bool, EndCause> {
        let (exchange, outward, machine) = (&mut self.exchange, &mut self.outward, &mut self.machine);
        if exchange.is_waiting() || outward.is_full(exchange.context().pins_max) {
            return Ok(false);
        }
        if exchange.resume(outward) {
            return Ok(true);
        }
        // Windows of a body that nobody wants are given back by the step that passes them.
        self.released |= machine.is_swallowing();
        match machine.step(&mut self.inbound)? {
            Step::NeedMore => return Ok(false),
            Step::Command(command) => {
                if exchange.execute(command, outward, machine) {
                    self.ending = Some(Over::Quit);
                }
            }
            Step::Refused { reply } => {
                if let Some(reply) = reply {
                    outward.outbound.text(reply);
                }
            }
            Step::Body { remaining, len } => return Ok(self.take_body(remaining, len)),
            Step::BodyEnd => exchange.handle_body_end(true, outward),
            Step::Close(CloseReason::Quit) => self.ending = Some(Over::Quit),
            Step::Close(_) => self.ending = Some(Over::LineTooLong),
        }
        Ok(true)
    }

    /// Copies the window at the front into the value that is arriving. False if there is no room for all of it now.
    fn take_body(&mut self, remaining: u64, len: u32) -> bool {
        let Some(offset) = self.inbound.lease().map(|lease| lease.offset() as usize) else { return false };
        let len = len as usize;
        // As on the other doors, only a short value that is at hand goes without a claim.
        let whole = len as u64 == remaining && len <= INPUT_BYTES;
        while self.lease_copied < len {
            let Some(draft) = self.exchange.poll_draft(whole) else { return false };
            let spare = draft.spare();
            let count = spare.len().min(len - self.lease_copied);
            self.own_rx.copy_out(offset + self.lease_copied, &mut spare[..count]);
            draft.advance(count);
            self.lane.lane.session.metrics.copied.window_to_arena.add(count as u64);
            self.lease_copied += count;
            self.exchange.touch_claim();
        }
        self.lease_copied = 0;
        drop(self.machine.take_body(&mut self.inbound));
        self.released = true;
        true
    }

    /// Gives places to what is to be sent, and hands all of it to the others.
    fn hand_on(&mut self) {
        let mut fills = Vec::new();
        while self.room > 0
            && let Some((place, fill)) = self.outward.outbound.poll_place()
        {
            self.room -= 1;
            self.turn.places.push(place);
            fills.extend(fill);
        }
        let turn = std::mem::take(&mut self.turn);
        let is_release_due = std::mem::take(&mut self.released);
        let Turn { completions, released, record_count, places } = &turn;
        if !completions.is_empty() || !released.is_empty() || *record_count > 0 || !places.is_empty() || is_release_due
        {
            self.count_messages(1);
            self.credit.do_send(turn);
        }
        // Behind the places: what is filled must find them.
        if !fills.is_empty() {
            self.count_messages(1);
            self.bulk.do_send(Fill(fills));
        }
    }

    /// Something of an answer has not left.
    fn is_sending(&self) -> bool {
        !self.outward.outbound.is_empty() || self.room < self.room_max
    }

    fn is_busy(&self) -> bool {
        self.is_sending() || self.exchange.is_storing() || self.exchange.is_retrieving()
    }

    /// Nothing more is sent or executed. The queue pair's last event ends the actor.
    fn end(&mut self, ctx: &mut Context<Self>, over: Over) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let metrics = &self.lane.lane.session.metrics;
        let closed = &metrics.connections.closed;
        let count = match &over {
            Over::Quit => &closed.by_quit,
            Over::LineTooLong => &closed.protocol,
            Over::End(EndCause::FailedRead) => &closed.failed_read,
            Over::End(_) => &closed.protocol,
            Over::Fabric(Cause::Peer) => &closed.by_peer,
            Over::Fabric(_) => &closed.socket_error,
            Over::Stalled => &closed.stalled,
            Over::Idle => &closed.idle,
            Over::Shutdown => &closed.shutdown,
        };
        count.add(1);
        metrics.native.ends.add(over.cause());
        let (qp, cause) = (self.number.0, over.cause());
        match &over {
            Over::End(why) => tracing::warn!(qp, cause, %why, "native connection ended"),
            Over::Fabric(why @ Cause::PeerFault(_)) => tracing::warn!(qp, cause, %why, "native connection ended"),
            Over::Fabric(why) => tracing::debug!(qp, cause, %why, "native connection ended"),
            _ => tracing::debug!(qp, cause, "native connection ended"),
        }
        self.exchange.forget();
        self.inbound = Inbound::new(0);
        self.outward.outbound = Outbound::new(1);
        self.credit.do_send(credit_manager::Stop);
        self.bulk.do_send(bulk_window::Stop);
        self.qp.disconnect();
        if let Over::Fabric(_) = over {
            // Its last event has come.
            ctx.stop();
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        if self.over {
            return;
        }
        let timers = &self.lane.lane.timers;
        let now_ms = self.exchange.context().store.clock().now_ms();
        let before = |wait: Duration| now_ms.saturating_sub(wait.as_millis() as u64);
        let stalled_ms = before(timers.stall_timeout);
        if self.full.is_some_and(|(since, _)| since < stalled_ms) {
            return self.end(ctx, Over::End(EndCause::PipelineTooDeep));
        }
        if self.filling.load(Ordering::Relaxed) > 0 {
            // The next octets are the disk's to bring, which it does whatever the peer does: slots are bounded.
            self.exchange.handle_moved();
        }
        let half_a_request = self.exchange.is_receiving() || self.machine.is_swallowing();
        let is_its_turn = self.is_sending() || half_a_request && !self.exchange.is_waiting();
        if self.exchange.moved_ms() < stalled_ms && is_its_turn {
            return self.end(ctx, Over::Stalled);
        }
        let idle = timers.idle_timeout.is_some_and(|wait| self.exchange.moved_ms() < before(wait));
        if idle && !self.is_busy() {
            return self.end(ctx, Over::Idle);
        }
        self.drive(ctx);
        self.inbound.rest();
        self.outward.outbound.rest();
        self.qp.rest();
    }
}

impl Actor for NativeConnection {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let timers = &self.lane.lane.timers;
        let shortest = timers.idle_timeout.map_or(timers.stall_timeout, |idle| idle.min(timers.stall_timeout));
        ctx.run_interval((shortest / 4).clamp(Duration::from_millis(20), Duration::from_secs(5)), Self::tick);
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        self.lane.attachments.detach(self.number);
        let metrics = &self.lane.lane.session.metrics;
        metrics.connections.current.sub(1);
        metrics.native.current.sub(1);
    }
}

impl Handler<Events> for NativeConnection {
    type Result = ();

    fn handle(&mut self, events: Events, ctx: &mut Self::Context) {
        self.count_messages(1);
        for event in events.0 {
            match event {
                Event::Completed { completion, .. } => self.turn.completions.push(completion),
                Event::Disconnected { cause, .. } => {
                    if self.over {
                        return ctx.stop();
                    }
                    return self.end(ctx, Over::Fabric(cause));
                }
                // A look at the ring follows in any case.
                _ => {}
            }
        }
        if self.over {
            // Buffers that come back are freed.
            self.turn = Turn::default();
            return;
        }
        self.drive(ctx);
    }
}

impl Handler<Told> for NativeConnection {
    type Result = ();

    fn handle(&mut self, told: Told, ctx: &mut Self::Context) {
        if self.over {
            return;
        }
        match told {
            Told::Posted(count) => {
                self.room += count;
                self.exchange.handle_moved();
            }
            Told::Missed(value) => {
                self.outward.outbound.handle_missed(value);
                // Its last pins go with the places that are being cancelled.
                self.take_another_turn(ctx);
            }
            Told::Over(cause) => return self.end(ctx, Over::End(cause)),
            // The queue pair has ended; its last event is on its way and says why.
            Told::Refused(_) => return self.qp.disconnect(),
            Told::Finished => {
                let over = self.ending.clone().unwrap_or(Over::Shutdown);
                return self.end(ctx, over);
            }
        }
        self.drive(ctx);
    }
}

impl Handler<Reserved> for NativeConnection {
    type Result = ();

    fn handle(&mut self, reserved: Reserved, ctx: &mut Self::Context) {
        self.count_messages(1);
        self.exchange.handle_claim(reserved.0, &mut self.outward, &mut self.machine);
        self.after_answer(ctx);
    }
}

impl Handler<Filled> for NativeConnection {
    type Result = ();

    fn handle(&mut self, filled: Filled, ctx: &mut Self::Context) {
        self.count_messages(1);
        self.exchange.handle_segment(filled.0, &mut self.outward, &mut self.machine);
        self.after_answer(ctx);
    }
}

impl Handler<SpaceFreed> for NativeConnection {
    type Result = ();

    fn handle(&mut self, _: SpaceFreed, ctx: &mut Self::Context) {
        self.count_messages(1);
        self.exchange.handle_retry(&mut self.outward, &mut self.machine);
        self.after_answer(ctx);
    }
}

impl Handler<Revoked> for NativeConnection {
    type Result = ();

    fn handle(&mut self, _: Revoked, ctx: &mut Self::Context) {
        self.count_messages(1);
        self.exchange.handle_revoked(&mut self.outward, &mut self.machine);
        self.after_answer(ctx);
    }
}

impl NativeConnection {
    fn after_answer(&mut self, ctx: &mut Context<Self>) {
        if !self.exchange.is_receiving() {
            // The value was given up: the rest of its window vanishes with it.
            self.lease_copied = 0;
        }
        self.drive(ctx);
    }
}

impl Handler<Drain> for NativeConnection {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        self.draining = true;
        self.drive(ctx);
    }
}

impl Handler<Kill> for NativeConnection {
    type Result = ();

    fn handle(&mut self, _: Kill, ctx: &mut Self::Context) {
        self.end(ctx, Over::Shutdown);
        ctx.stop();
    }
}
