//! `NativeConnection`: one peer of the native door.
//!
//! ```text
//!  CqPoller -- Events --> NativeConnection -- Turn --> CreditManager -- posts --> queue pair
//!                              |   ^  `----- Fill --> BulkWindow -- Filled --> CreditManager
//!                              |   `-- Posted, Missed, Over, Finished -- CreditManager
//!                              `-- Reserve, Fill, AwaitSpace --> StoreActor, as on the other doors
//! ```
//!
//! It executes requests in order and decides the order of what is sent; what its peer did comes from the poller, in order;
//! where the octets of a body come from and when they leave is the others' business. A window of the peer is copied once,
//! straight into the pages of the value that is arriving, and given back.
//!
//! The end: the queue pair is told to disconnect, the connection stays, silent, until the fabric has reported its last
//! event, and `BulkWindow` until the disk has returned its slots. Only then are memory regions and the place among the
//! connections given back.
//!
//! Its mailbox is used by `do_send` alone: events of a queue pair whose depth bounds them, and answers to what was asked.

use crate::actors::bulk_window::{self, BulkWindow, Fill, Source};
use crate::actors::connection::{Admission, Drain, Kill, Revoked, ask};
use crate::actors::cq_poller::{Batch, Events, TransportEvent};
use crate::actors::credit_manager::{self, Advance, CreditManager, Finish, PLACES_MAX, Parts, Told, Turn};
use crate::actors::fabric_listener::{FabricLane, Protocol};
use crate::actors::native_memory::{ControlRegion, RxHalf};
use crate::actors::store::{Filled, Reserved, SpaceFreed};
use crate::config::{self, NativeConfig, Network};
use crate::fabric::{Attributes, Cause, ConnectRequest, FabricError, QpNum, QueuePair};
use crate::metrics::{FabricCounts, Metrics};
use crate::programs::memcache::exchange::{Bodies, Exchange, Replies};
use crate::programs::memcache::session::INPUT_BYTES;
use crate::store::Pinned;
use crate::store::claims::Revoker;
use crate::wire::memcache::parse::CloseReason;
use crate::wire::memcache::response as reply;
use crate::wire::native::conversation::{Conversation, Step};
use crate::wire::native::descriptor::{Descriptor, Negotiated, Nonce};
use crate::wire::native::endpoint::EndCause;
use crate::wire::native::intake::{Intake, RingReader, Room};
use crate::wire::native::session::{Limits, Load, LookAhead, Over, Session};
use crate::wire::native::stream::{Inbound, Outbound, PIPELINE_BYTES_MAX, Value};
use actix::prelude::*;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Steps of the conversation taken in one turn before others of the lane run.
const STEPS_PER_TURN: usize = 512;
/// Text beyond this stops parsing until some has left.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Values that are looked up ahead, besides one for each slot.
const PINS_AHEAD: usize = 4;
/// Octets of the two buffers that Reads of the peer's counter land in, each.
const SINK_BYTES: usize = 4096;

/// Answers on their way to their places.
struct Outward {
    outbound: Outbound<Source>,
    /// Values pinned by what is not in a slot yet.
    pins: Arc<AtomicUsize>,
    ahead: LookAhead,
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
        self.ahead.is_full(self.outbound.text_bytes(), self.pins.load(Ordering::Relaxed), pins_max)
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
pub type NativeLane = FabricLane<NativeConfig>;

/// The native protocol, for the listener.
#[derive(Debug)]
pub struct NativeProtocol;

impl Protocol for NativeProtocol {
    type Speech = config::Native;
    type Config = NativeConfig;
    type Peer = Descriptor;

    fn limits(config: &NativeConfig) -> (usize, &[Network]) {
        (config.connections_max, &config.allow)
    }

    fn counts(metrics: &Metrics) -> &FabricCounts {
        &metrics.native
    }

    fn judge(private_data: &[u8]) -> Result<Descriptor, &'static str> {
        Descriptor::decode(private_data).map_err(|error| error.cause())
    }

    fn start_on_lane(
        request: ConnectRequest,
        peer: Descriptor,
        lane: NativeLane,
        admission: Admission,
    ) -> Result<(Recipient<Drain>, Recipient<Kill>), FabricError> {
        let address = NativeConnection::start_on_lane(request, peer, lane, admission)?;
        Ok((address.clone().recipient(), address.recipient()))
    }
}

/// The actor. One per peer, on one lane for its life.
pub struct NativeConnection {
    exchange: Exchange,
    machine: Conversation,
    inbound: Inbound,
    outward: Outward,
    session: Session,
    /// Octets of the window at the front that were copied.
    lease_copied: usize,
    /// Tells the poller what was read.
    room: Room,
    /// What it was told.
    read_told: u64,
    /// Number of the poller's next event.
    next_event: u64,
    turn: Turn,
    /// A window was given up: its release is due.
    released: bool,
    turn_is_due: bool,
    qp: Arc<dyn QueuePair>,
    number: QpNum,
    credit: Addr<CreditManager>,
    bulk: Addr<BulkWindow>,
    /// Slots that wait for the disk.
    filling: Arc<AtomicUsize>,
    /// What the fabric said of the end of the queue pair.
    gone: Option<Cause>,
    lane: NativeLane,
    life: Rc<Life>,
}

/// What is given back last, in this order: not before the disk has returned the last slot it was to fill, so
/// `BulkWindow` has it too.
struct Life {
    _qp: Arc<dyn QueuePair>,
    _control: ControlRegion,
    rx: RxHalf,
    _admission: Admission,
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
        let NativeConfig { ring, windows, .. } = lane.config;
        let qp: Arc<dyn QueuePair> = Arc::from(lane.fabric.admit(request, Attributes::default())?);
        let control = ControlRegion::open(&*qp, ring)?;
        let rx = RxHalf::open(&*qp, windows)?;
        let bufs = qp.allocate(windows.window_bytes() as usize, windows.window_count() as usize)?;
        let sinks = qp.allocate(SINK_BYTES, 2)?;
        let own = Descriptor {
            ring,
            ring_at: control.address(),
            ring_bytes: control.mapping_bytes(),
            nonce: Nonce::ours(std::process::id()),
            windows,
            bulk_at: rx.address(),
        };
        let number = qp.number();
        // Who is not established is rejected and was never a connection. No event is missed: the poller of this queue
        // pair is on this thread, and its turn comes after `attach`.
        qp.establish(&own.encode())?;
        let attachments = lane.attachments.clone();
        let limits = Negotiated::between(own.windows, peer.windows);
        let intake = Intake::new(ring, windows, limits);
        let releases = intake.releases();
        let reader = RingReader::new(intake, PIPELINE_BYTES_MAX);
        let room = reader.room();
        let own_ring = control.ring(reader);
        let address = Self::create(|ctx| {
            let address = ctx.address();
            let revoker: Revoker = Arc::new(move || address.do_send(Revoked));
            let life = Rc::new(Life { _qp: qp.clone(), _control: control, rx, _admission: admission });
            let filling = Arc::default();
            let bulk = BulkWindow::new(bufs, lane.lane.clone(), life.clone(), Arc::clone(&filling)).start();
            let metrics = lane.lane.session.metrics.clone();
            let credit = CreditManager::new(Parts {
                peer,
                limits,
                qp: qp.clone(),
                releases,
                connection: ctx.address().recipient(),
                bulk: bulk.clone(),
                metrics: metrics.clone(),
                sinks,
            })
            .start();
            bulk.do_send(bulk_window::Serve { filled: credit.clone().recipient(), failed: credit.clone().recipient() });
            metrics.connections.total.add(1);
            metrics.connections.current.add(1);
            metrics.native.total.add(1);
            metrics.native.current.add(1);
            let timers = &lane.lane.timers;
            let session = Session::new(Limits {
                places_max: PLACES_MAX.min(2 * peer.ring.slot_count() as usize),
                stall_timeout: timers.stall_timeout,
                idle_timeout: timers.idle_timeout,
            });
            Self {
                exchange: Exchange::new(lane.lane.session.clone(), revoker),
                machine: Conversation::new(),
                inbound: Inbound::new(PIPELINE_BYTES_MAX),
                outward: Outward {
                    outbound: Outbound::new(limits.fragment_bytes_max),
                    pins: Arc::default(),
                    ahead: LookAhead {
                        text_bytes_max: TEXT_BYTES_MAX,
                        pins_max: own.windows.window_count() as usize + PINS_AHEAD,
                    },
                },
                session,
                lease_copied: 0,
                room,
                read_told: 0,
                next_event: 0,
                turn: Turn::default(),
                released: false,
                turn_is_due: false,
                qp,
                number,
                credit,
                bulk,
                filling,
                gone: None,
                lane,
                life,
            }
        });
        attachments.attach(number, address.clone().recipient(), Some(Box::new(own_ring)));
        Ok(address)
    }

    fn count_messages(&self, count: u64) {
        self.lane.lane.session.metrics.connections.messages.add(count);
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.lane.lane.session.store.clock().now_ms())
    }

    /// The work at hand, for the session.
    fn load(&self) -> Load {
        let exchange = &self.exchange;
        Load {
            is_placing: !self.outward.outbound.is_empty(),
            is_storing: exchange.is_storing(),
            is_receiving: exchange.is_receiving() || self.machine.is_swallowing(),
            is_waiting: exchange.is_waiting(),
            is_retrieving: exchange.is_retrieving(),
            moved: Duration::from_millis(exchange.moved_ms()),
            read: self.inbound.read_bytes(),
        }
    }

    /// The one place that acts.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        if self.session.is_over() {
            return;
        }
        let taken = self.take_turn(ctx);
        self.hand_on();
        self.tell_room();
        if let Err(cause) = taken {
            return self.end(ctx, Over::End(cause));
        }
        if self.session.poll_finish(&self.load()) {
            self.count_messages(1);
            self.credit.do_send(Finish);
        }
    }

    fn take_turn(&mut self, ctx: &mut Context<Self>) -> Result<(), EndCause> {
        for _ in 0..STEPS_PER_TURN {
            let moved = self.session.is_open() && self.step()?;
            while let Some(asked) = self.exchange.poll_ask() {
                self.count_messages(1);
                ask(&self.lane.lane, asked, ctx.address());
            }
            if !moved {
                return Ok(());
            }
        }
        self.take_another_turn(ctx);
        Ok(())
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

    /// Text that was read makes room for more.
    fn tell_room(&mut self) {
        let read = self.inbound.read_bytes();
        if std::mem::replace(&mut self.read_told, read) != read && self.room.handle_read(read) {
            self.lane.attachments.wake(self.number);
        }
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
                    self.session.handle_ending(Over::Quit);
                }
            }
            Step::Refused { reply } => {
                if let Some(reply) = reply {
                    outward.outbound.text(reply);
                }
            }
            Step::Body { remaining, len } => return Ok(self.take_body(remaining, len)),
            Step::BodyEnd => exchange.handle_body_end(true, outward),
            Step::Close(CloseReason::Quit) => self.session.handle_ending(Over::Quit),
            Step::Close(_) => self.session.handle_ending(Over::LineTooLong),
        }
        Ok(true)
    }

    /// Copies the window at the front into the value that is arriving. False if there is no room for all of it now.
    fn take_body(&mut self, remaining: u64, len: u32) -> bool {
        let Some(lease) = self.inbound.lease() else { return false };
        let len = len as usize;
        // As on the other doors, only a short value that is at hand goes without a claim.
        let whole = len as u64 == remaining && len <= INPUT_BYTES;
        while self.lease_copied < len {
            let Some(draft) = self.exchange.poll_draft(whole) else { return false };
            let spare = draft.spare();
            let count = spare.len().min(len - self.lease_copied);
            self.life.rx.copy_out(lease, self.lease_copied, &mut spare[..count]);
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
        while self.session.has_room()
            && let Some((place, fill)) = self.outward.outbound.poll_place()
        {
            self.session.handle_place();
            self.turn.places.push(place);
            fills.extend(fill);
        }
        let turn = std::mem::take(&mut self.turn);
        let is_release_due = std::mem::take(&mut self.released);
        let Turn { advances, is_peer_awake, places } = &turn;
        if !advances.is_empty() || *is_peer_awake || !places.is_empty() || is_release_due {
            self.count_messages(1);
            self.credit.do_send(turn);
        }
        // Behind the places: what is filled must find them.
        if !fills.is_empty() {
            self.count_messages(1);
            self.bulk.do_send(Fill(fills));
        }
    }

    /// Nothing more is sent or executed. The queue pair's last event ends the actor.
    fn end(&mut self, ctx: &mut Context<Self>, over: Over) {
        if !self.session.end() {
            return;
        }
        self.lane.attachments.silence(self.number);
        let metrics = &self.lane.lane.session.metrics;
        let closed = &metrics.connections.closed;
        let count = match &over {
            Over::Quit => &closed.by_quit,
            Over::LineTooLong => &closed.protocol,
            Over::End(EndCause::FailedRead) => &closed.failed_read,
            Over::End(_) => &closed.protocol,
            Over::Fabric("peer") => &closed.by_peer,
            Over::Fabric(_) => &closed.socket_error,
            Over::Stalled => &closed.stalled,
            Over::Idle => &closed.idle,
            Over::Shutdown => &closed.shutdown,
        };
        count.add(1);
        metrics.native.ends.add(over.cause());
        let (qp, cause) = (self.number.0, over.cause());
        match (&over, &self.gone) {
            (Over::End(why), _) => tracing::warn!(qp, cause, %why, "native connection ended"),
            (_, Some(why @ Cause::PeerFault(_))) => tracing::warn!(qp, cause, %why, "native connection ended"),
            (_, Some(why)) => tracing::debug!(qp, cause, %why, "native connection ended"),
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
        if self.filling.load(Ordering::Relaxed) > 0 {
            // The next octets are the disk's to bring, which it does whatever the peer does: slots are bounded.
            self.exchange.handle_moved();
        }
        let (now, load) = (self.now(), self.load());
        if let Some(over) = self.session.handle_tick(now, &load) {
            return self.end(ctx, over);
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

impl NativeConnection {
    /// The peer sent something.
    fn handle_record(&mut self, bytes: usize) {
        self.lane.lane.session.metrics.connections.bytes_read.add(bytes as u64);
        self.session.handle_arrival();
        self.exchange.handle_moved();
        self.turn.is_peer_awake = true;
    }

    /// What comes before an end is done before it.
    fn end_in_order(&mut self, ctx: &mut Context<Self>, over: Over) {
        self.drive(ctx);
        self.end(ctx, over);
    }
}

impl Handler<Events> for NativeConnection {
    type Result = ();

    fn handle(&mut self, events: Events, ctx: &mut Self::Context) {
        self.count_messages(1);
        let Events { first, batch: Batch { text, events } } = events;
        assert_eq!(first, self.next_event, "one history, nothing of it twice or missing");
        self.next_event += events.len() as u64;
        let mut text = &text[..];
        for event in events {
            if self.session.is_over() {
                // Buffers that come back are freed.
                if let TransportEvent::Disconnected(_) = event {
                    ctx.stop();
                }
                continue;
            }
            match event {
                TransportEvent::Inline(len) => {
                    let (octets, rest) = text.split_at(len);
                    text = rest;
                    self.handle_record(len);
                    self.inbound.handle_inline(octets);
                }
                TransportEvent::BulkReady(lease) => {
                    self.handle_record(lease.len() as usize);
                    self.inbound.handle_ready(lease);
                }
                TransportEvent::Released(sequence) => {
                    self.handle_record(0);
                    self.turn.advances.push(Advance::Released(sequence));
                }
                TransportEvent::WriteDone(completion)
                | TransportEvent::ReadDone(completion)
                | TransportEvent::SendDone(completion)
                | TransportEvent::Received(completion) => self.turn.advances.push(Advance::Done(completion)),
                TransportEvent::Stopped => self.session.handle_stopped(self.now(), self.inbound.read_bytes()),
                TransportEvent::Poisoned(poison) => self.end_in_order(ctx, Over::End(poison.into())),
                TransportEvent::Disconnected(cause) => {
                    let over = Over::Fabric(cause.word());
                    self.gone = Some(cause);
                    self.end_in_order(ctx, over);
                    ctx.stop();
                }
            }
        }
        self.drive(ctx);
    }
}

impl Handler<Told> for NativeConnection {
    type Result = ();

    fn handle(&mut self, told: Told, ctx: &mut Self::Context) {
        if self.session.is_over() {
            return;
        }
        match told {
            Told::Posted(count) => {
                self.session.handle_posted(count);
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
                let over = self.session.handle_finished();
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
        self.session.handle_drain();
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
