//! `RpcConnection`: one peer of the RPC door.
//!
//! ```text
//!  CqPoller -- Events --> RpcConnection -- Turn --> RpcCreditManager -- posts --> queue pair
//!                           |   ^   ^ `---- Done -------'   |
//!                           |   |   `---- Filled, Failed -- BulkWindow <-- SlotsRetired
//!                           |   |   ----- Fill, Cancel ---->
//!                           |   `-- Reserved, Filled, SpaceFreed -- StoreActor
//!                           `------ Reserve, Fill, AwaitSpace ---->
//! ```
//! It is a shell around [`Service`], which decides what is pulled, executed, filled, written and sent. What is pulled comes
//! into buffers of this actor and is copied once from there, into the pages of the value that is arriving; what is pushed
//! lies in slots of `BulkWindow`.
//!
//! The end is as on the native door: the queue pair is told to disconnect, the actor stays, silent, until the fabric has
//! reported its last event, and `BulkWindow` until the disk has returned its slots. Drafts and pins go at once.
//!
//! Its mailbox is used by `do_send` alone: events of a queue pair whose depth bounds them, and answers to what was asked.

use crate::actors::bulk_window::{self, BulkWindow, Cancel, Fill, SlotsRetired, Source};
use crate::actors::connection::{Admission, Drain, Kill, Revoked};
use crate::actors::cq_poller::{Events, TransportEvent};
use crate::actors::fabric_listener::{FabricLane, Protocol};
use crate::actors::rpc_credit_manager::{self, Done, Parts, Post, RpcCreditManager, Told, Turn, post_receives};
use crate::actors::store::{self, AwaitSpace, Filled, Reserve, Reserved, SpaceFreed};
use crate::config::{self, Network, RpcConfig};
use crate::fabric::{
    Address, Attributes, Cause, Completion, ConnectRequest, FabricError, LocalBuf, QpNum, QueuePair, Status,
};
use crate::metrics::{FabricCounts, Metrics};
use crate::programs::service::{Nfs, Output, PlaceSource, Repost, Service, Shared, Surroundings, Terms};
use crate::store::claims::Revoker;
use crate::wire::native::egress::ValueId;
use crate::wire::native::stream::{FillRequest, Piece};
use crate::wire::native::window::{Ticket, TxSlot};
use crate::wire::rpcrdma::private_data::{Agreed, PrivateData};
use crate::wire::rpcrdma::session::{Load, Over, Session, Timers};
use actix::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Deepest send queue that is asked for.
const SEND_DEPTH_MAX: usize = 4096;

/// What the connections of RPC doors are made with.
#[derive(Clone, Debug)]
pub struct RpcDoor {
    pub config: RpcConfig,
    pub shared: Arc<Shared>,
}

impl RpcDoor {
    pub fn new(config: RpcConfig) -> Self {
        Self { config, shared: Arc::default() }
    }
}

/// What a connection of an RPC door is made of, besides the request.
pub type RpcLane = FabricLane<RpcDoor>;

/// RPC-over-RDMA, for the listener.
#[derive(Debug)]
pub struct RpcProtocol;

impl Protocol for RpcProtocol {
    type Speech = config::Rpc;
    type Config = RpcDoor;
    type Peer = PrivateData;

    fn limits(door: &RpcDoor) -> (usize, &[Network]) {
        (door.config.connections_max, &door.config.allow)
    }

    fn counts(metrics: &Metrics) -> &FabricCounts {
        &metrics.rpc
    }

    fn judge(private_data: &[u8]) -> Result<PrivateData, &'static str> {
        Ok(PrivateData::of_peer(private_data))
    }

    fn start_on_lane(
        request: ConnectRequest,
        peer: PrivateData,
        lane: RpcLane,
        admission: Admission,
    ) -> Result<(Recipient<Drain>, Recipient<Kill>), FabricError> {
        let address = RpcConnection::start_on_lane(request, peer, lane, admission)?;
        Ok((address.clone().recipient(), address.recipient()))
    }
}

/// The actor. One per peer, on one lane for its life.
pub struct RpcConnection {
    /// `None` after the end.
    service: Option<Service<LocalBuf>>,
    session: Session,
    started: Instant,
    /// Slots that were filled and are neither posted nor given back.
    filled: HashMap<Ticket, (TxSlot, LocalBuf)>,
    /// Receives of messages that are answered with an RDMA_ERROR.
    withheld: VecDeque<LocalBuf>,
    turn: Turn,
    /// Number of the poller's next event.
    next_event: u64,
    deadline: Option<(Duration, SpawnHandle)>,
    qp: Arc<dyn QueuePair>,
    number: QpNum,
    credit: Addr<RpcCreditManager>,
    bulk: Addr<BulkWindow>,
    /// What the fabric said of the end of the queue pair.
    gone: Option<Cause>,
    lane: RpcLane,
}

/// What is given back last: not before the disk has returned the last slot it was to fill.
struct Life {
    _qp: Arc<dyn QueuePair>,
    _admission: Admission,
}

/// As duplicates are known by, and clients of NFS: ports change from connection to connection. Whoever has no address is in this
/// process.
fn ip_of(peer: &Address) -> IpAddr {
    match peer {
        Address::Socket(address) => address.ip(),
        Address::Name(_) => Ipv4Addr::LOCALHOST.into(),
    }
}

impl RpcConnection {
    /// Accepts the peer of `request`, which told `peer` about itself, on the lane of this thread.
    ///
    /// # Errors
    /// What the fabric lacks; the peer was rejected then.
    pub fn start_on_lane(
        request: ConnectRequest,
        peer: PrivateData,
        lane: RpcLane,
        admission: Admission,
    ) -> Result<Addr<Self>, FabricError> {
        let RpcConfig { inline_bytes, credits_max, windows, reads_max, long_bytes_max, segments_max, .. } =
            lane.config.config;
        let (window_count, credits) = (windows.window_count() as usize, credits_max as usize);
        let attributes = Attributes {
            send_depth: (reads_max + 2 * (window_count + credits)).min(SEND_DEPTH_MAX),
            receive_depth: credits,
            read_depth: reads_max,
            ..Attributes::default()
        };
        let ip = ip_of(request.peer());
        let qp: Arc<dyn QueuePair> = Arc::from(lane.fabric.admit(request, attributes)?);
        let credits = credits.min(qp.attributes().receive_depth).max(1);
        let pulled = qp.allocate(windows.window_bytes() as usize, window_count)?;
        let slots = qp.allocate(windows.window_bytes() as usize, window_count)?;
        let sends = qp.allocate(inline_bytes as usize, credits)?;
        // The peer may send as soon as it hears of being accepted.
        post_receives(&*qp, inline_bytes as usize, credits)?;
        let own = PrivateData { remote_invalidate: true, send_bytes: inline_bytes, receive_bytes: inline_bytes };
        let number = qp.number();
        // No event is missed: the poller of this queue pair is on this thread, and its turn comes after `attach`.
        qp.establish(&own.encode())?;
        let attachments = lane.attachments.clone();
        let address = Self::create(|ctx| {
            let address = ctx.address();
            let revoker: Revoker = Arc::new(move || address.do_send(Revoked));
            let life = Rc::new(Life { _qp: qp.clone(), _admission: admission });
            let bulk = BulkWindow::new(slots, lane.lane.clone(), life, Arc::default()).start();
            bulk.do_send(bulk_window::Serve { filled: ctx.address().recipient(), failed: ctx.address().recipient() });
            let metrics = lane.lane.session.metrics.clone();
            let credit = RpcCreditManager::new(Parts {
                qp: qp.clone(),
                sends,
                reads_max,
                connection: ctx.address().recipient(),
                bulk: bulk.clone(),
                metrics: metrics.clone(),
                shared: lane.config.shared.clone(),
                peer: ip,
            })
            .start();
            for counts in
                [(&metrics.connections.total, &metrics.connections.current), (&metrics.rpc.total, &metrics.rpc.current)]
            {
                counts.0.add(1);
                counts.1.add(1);
            }
            let timers = &lane.lane.timers;
            let around = Surroundings {
                store: lane.lane.session.store.clone(),
                metrics,
                shared: lane.config.shared.clone(),
                peer: ip,
                nfs: lane
                    .lane
                    .exported
                    .as_ref()
                    .map(|exported| Nfs { export: exported.export.clone(), client: exported.client(ip) }),
            };
            let terms = Terms {
                agreed: Agreed::between(peer, own),
                calls_max: NonZeroU32::new(credits as u32).unwrap_or(NonZeroU32::MIN),
                long_bytes_max,
                segments_max,
                window_bytes: windows.window_bytes(),
                places_max: 2 * window_count,
                reserve_wait: timers.reserve_wait,
                draft_idle: timers.stall_timeout,
            };
            let session_timers = Timers { stall_timeout: timers.stall_timeout, idle_timeout: timers.idle_timeout };
            Self {
                service: Some(Service::new(around, revoker, terms, pulled)),
                session: Session::new(session_timers, Duration::ZERO),
                started: Instant::now(),
                filled: HashMap::new(),
                withheld: VecDeque::new(),
                turn: Turn::default(),
                next_event: 0,
                deadline: None,
                qp,
                number,
                credit,
                bulk,
                gone: None,
                lane,
            }
        });
        attachments.attach(number, address.clone().recipient(), None);
        Ok(address)
    }

    fn count_message(&self) {
        self.lane.lane.session.metrics.connections.messages.add(1);
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn load(&self) -> Load {
        self.service.as_ref().map_or_else(Load::default, |service| Load {
            is_serving: service.is_serving(),
            is_posting: service.is_posting(),
        })
    }

    /// Tells the service something, then does what it wants.
    fn serve(&mut self, ctx: &mut Context<Self>, tell: impl FnOnce(&mut Service<LocalBuf>, Duration)) {
        let now = self.now();
        if let Some(service) = &mut self.service {
            tell(service, now);
        }
        self.drive(ctx);
    }

    /// The one place that acts.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        let Some(service) = &mut self.service else { return };
        let (mut fills, mut cancelled, mut retired) = (Vec::new(), Vec::new(), Vec::new());
        let mut asked = 0;
        while let Some(output) = service.poll_output() {
            match output {
                Output::Read { call, number, buf, len, key, address } => {
                    self.turn.posts.push(Post::Read { call, number, buf, len, key, address });
                }
                Output::Write { call, ticket, len, key, address } => {
                    let (slot, buf) = self.filled.remove(&ticket).expect("a place is written once, when it is filled");
                    self.turn.posts.push(Post::Write { call, slot, buf, len, key, address });
                }
                Output::Send { xid, octets, invalidate } => {
                    let receive = if xid.is_none() { self.withheld.pop_front() } else { None };
                    self.turn.posts.push(Post::Send { xid, octets, invalidate, receive });
                }
                Output::Fill { ticket, source, offset, len, slow } => {
                    let value = match source {
                        PlaceSource::Value(object) => Source::Object(object),
                        PlaceSource::Run(run) => Source::Run(run),
                        PlaceSource::Octets(octets) => Source::Octets(octets),
                    };
                    let piece = Piece { value, id: ValueId(ticket.0), offset, len };
                    fills.push(FillRequest { ticket, piece, slow });
                }
                Output::Cancel(ticket) => cancelled.push(ticket),
                Output::Retire(ticket) => {
                    let (slot, buf) = self.filled.remove(&ticket).expect("a slot is given back once");
                    retired.push((slot, Some(buf)));
                }
                Output::Reserve { len } => {
                    let address = ctx.address();
                    let revoker: Revoker = Arc::new(move || address.do_send(Revoked));
                    self.lane.lane.store.do_send(Reserve { len, revoker, reply: ctx.address().recipient() });
                    asked += 1;
                }
                Output::Segment(want) => {
                    self.lane.lane.store.do_send(store::Fill { want, reply: ctx.address().recipient() });
                    asked += 1;
                }
                Output::Retry => {
                    self.lane.lane.store.do_send(AwaitSpace { reply: ctx.address().recipient() });
                    asked += 1;
                }
            }
        }
        let deadline = service.deadline();
        self.hand_on(fills, cancelled, retired);
        self.lane.lane.session.metrics.connections.messages.add(asked);
        self.set_deadline(ctx, deadline);
        if let Some(over) = self.session.poll_over(self.now(), &self.load()) {
            self.end(ctx, over);
        }
    }

    fn hand_on(
        &mut self,
        fills: Vec<FillRequest<Source>>,
        cancelled: Vec<Ticket>,
        retired: Vec<(TxSlot, Option<LocalBuf>)>,
    ) {
        let turn = std::mem::take(&mut self.turn);
        if !turn.completions.is_empty() || !turn.receives.is_empty() || !turn.posts.is_empty() {
            self.count_message();
            self.credit.do_send(turn);
        }
        if !retired.is_empty() {
            self.count_message();
            self.bulk.do_send(SlotsRetired(retired));
        }
        // A place may be cancelled in the turn that it is made in.
        if !fills.is_empty() {
            self.count_message();
            self.bulk.do_send(Fill(fills));
        }
        if !cancelled.is_empty() {
            self.count_message();
            self.bulk.do_send(Cancel(cancelled));
        }
    }

    fn set_deadline(&mut self, ctx: &mut Context<Self>, deadline: Option<Duration>) {
        if self.deadline.as_ref().map(|(at, _)| *at) == deadline {
            return;
        }
        if let Some((_, timer)) = self.deadline.take() {
            ctx.cancel_future(timer);
        }
        let Some(at) = deadline else { return };
        let timer = ctx.run_later(at.saturating_sub(self.now()), |actor, ctx| {
            actor.deadline = None;
            actor.serve(ctx, |service, now| service.handle_time(now));
        });
        self.deadline = Some((at, timer));
    }

    /// Nothing more is sent or executed. The queue pair's last event ends the actor.
    fn end(&mut self, ctx: &mut Context<Self>, over: Over) {
        if !self.session.end() {
            return;
        }
        let metrics = &self.lane.lane.session.metrics;
        let closed = &metrics.connections.closed;
        let count = match over {
            Over::Fabric("peer") => &closed.by_peer,
            Over::Fabric(_) => &closed.socket_error,
            Over::Stalled => &closed.stalled,
            Over::Idle => &closed.idle,
            Over::Shutdown => &closed.shutdown,
        };
        count.add(1);
        metrics.rpc.ends.add(over.cause());
        let (qp, cause) = (self.number.0, over.cause());
        match &self.gone {
            Some(why @ Cause::PeerFault(_)) => tracing::warn!(qp, cause, %why, "RPC connection ended"),
            Some(why) => tracing::debug!(qp, cause, %why, "RPC connection ended"),
            None => tracing::debug!(qp, cause, "RPC connection ended"),
        }
        self.service = None;
        self.filled.clear();
        self.withheld.clear();
        self.turn = Turn::default();
        self.credit.do_send(rpc_credit_manager::Stop);
        self.bulk.do_send(bulk_window::Stop);
        self.qp.disconnect();
        if let Over::Fabric(_) = over {
            // Its last event has come.
            ctx.stop();
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        if let Some(over) = self.session.handle_tick(self.now(), &self.load()) {
            return self.end(ctx, over);
        }
        self.serve(ctx, |service, now| service.handle_time(now));
        self.qp.rest();
    }

    fn handle_received(&mut self, completion: Completion) {
        let now = self.now();
        let (Completion { status: Status::Done, buf: Some(buf), len, .. }, Some(service)) =
            (completion, &mut self.service)
        else {
            return;
        };
        self.lane.lane.session.metrics.connections.bytes_read.add(len as u64);
        match service.handle_message(&buf.as_slice()[..len], now) {
            Repost::Now => self.turn.receives.push(buf),
            Repost::WithAnswer => self.withheld.push_back(buf),
        }
    }
}

impl Actor for RpcConnection {
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
        metrics.rpc.current.sub(1);
    }
}

impl Handler<Events> for RpcConnection {
    type Result = ();

    fn handle(&mut self, events: Events, ctx: &mut Self::Context) {
        self.count_message();
        let Events { first, batch } = events;
        assert_eq!(first, self.next_event, "one history, nothing of it twice or missing");
        self.next_event += batch.events.len() as u64;
        let now = self.now();
        for event in batch.events {
            if self.session.is_over() {
                // Buffers that come back are freed.
                if let TransportEvent::Disconnected(_) = event {
                    ctx.stop();
                }
                continue;
            }
            match event {
                TransportEvent::Received(completion) => {
                    self.session.handle_heard(now);
                    self.handle_received(completion);
                }
                TransportEvent::WriteDone(completion)
                | TransportEvent::ReadDone(completion)
                | TransportEvent::SendDone(completion) => {
                    self.session.handle_moved(now);
                    self.turn.completions.push(completion);
                }
                TransportEvent::Disconnected(cause) => {
                    let over = Over::Fabric(cause.word());
                    // What came before is executed, though nobody hears of it.
                    self.drive(ctx);
                    if let Cause::RefusedByPeer(_) = &cause {
                        self.credit.do_send(rpc_credit_manager::Refused);
                    }
                    self.gone = Some(cause);
                    self.end(ctx, over);
                    ctx.stop();
                }
                // Of rings, which there are none.
                TransportEvent::Inline(_)
                | TransportEvent::BulkReady(_)
                | TransportEvent::Released(_)
                | TransportEvent::Stopped
                | TransportEvent::Poisoned(_) => {}
            }
        }
        self.drive(ctx);
    }
}

impl Handler<Told> for RpcConnection {
    type Result = ();

    fn handle(&mut self, told: Told, ctx: &mut Self::Context) {
        let done = match told {
            Told::Done(done) => done,
            // The queue pair has ended; its last event is on its way and says why.
            Told::Refused(_) => return self.qp.disconnect(),
        };
        self.serve(ctx, |service, now| {
            for done in done {
                match done {
                    Done::Read { xid, number, buf } => service.handle_read(xid, number, buf, now),
                    Done::Written => service.handle_written(),
                    Done::Sent(xid) => service.handle_sent(xid, now),
                }
            }
        });
    }
}

impl Handler<bulk_window::Filled> for RpcConnection {
    type Result = ();

    fn handle(&mut self, filled: bulk_window::Filled, ctx: &mut Self::Context) {
        let bulk_window::Filled { ticket, slot, buf } = filled;
        let Some(service) = &mut self.service else { return };
        service.handle_filled(ticket, buf.as_slice());
        self.filled.insert(ticket, (slot, buf));
        self.drive(ctx);
    }
}

impl Handler<bulk_window::Failed> for RpcConnection {
    type Result = ();

    fn handle(&mut self, failed: bulk_window::Failed, ctx: &mut Self::Context) {
        self.serve(ctx, |service, _| service.handle_failed(failed.ticket));
    }
}

impl Handler<Reserved> for RpcConnection {
    type Result = ();

    fn handle(&mut self, reserved: Reserved, ctx: &mut Self::Context) {
        self.count_message();
        self.serve(ctx, |service, _| service.handle_claim(reserved.0));
    }
}

impl Handler<Filled> for RpcConnection {
    type Result = ();

    fn handle(&mut self, filled: Filled, ctx: &mut Self::Context) {
        self.count_message();
        self.serve(ctx, |service, _| service.handle_segment(filled.0));
    }
}

impl Handler<SpaceFreed> for RpcConnection {
    type Result = ();

    fn handle(&mut self, _: SpaceFreed, ctx: &mut Self::Context) {
        self.count_message();
        self.serve(ctx, |service, now| service.handle_retry(now));
    }
}

impl Handler<Revoked> for RpcConnection {
    type Result = ();

    fn handle(&mut self, _: Revoked, ctx: &mut Self::Context) {
        self.count_message();
        self.serve(ctx, |service, _| service.handle_revoked());
    }
}

impl Handler<Drain> for RpcConnection {
    type Result = ();

    fn handle(&mut self, _: Drain, ctx: &mut Self::Context) {
        self.session.handle_drain();
        self.drive(ctx);
    }
}

impl Handler<Kill> for RpcConnection {
    type Result = ();

    fn handle(&mut self, _: Kill, ctx: &mut Self::Context) {
        self.end(ctx, Over::Shutdown);
        ctx.stop();
    }
}
