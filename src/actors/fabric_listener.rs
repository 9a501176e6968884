//! `FabricListener`: one bound address of a door on a fabric. It judges addresses and private data of peers, admits them up
//! to the limits, and gives each to a lane in turn. What is spoken there is a [`Protocol`].

use crate::actors::connection::{Admission, Drain, Kill};
use crate::actors::cq_poller::{self, Asked, Attachments, CqPoller, Unmade};
use crate::actors::gate::{Gate, Verdict};
use crate::actors::listener::{Refuse, Registry};
use crate::actors::{StartError, connection};
use crate::config::{FabricAddress, FabricKind, Network, Speech};
use crate::fabric::iwarp::{Iwarp, Options};
use crate::fabric::loopback::Loopback;
use crate::fabric::{self, Address, ConnectRequest, Fabric, FabricError};
use crate::metrics::{FabricCounts, Metrics};
use actix::prelude::*;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tokio::sync::Semaphore;

/// The loopback network of this process: where `native+loopback:NAME` is.
pub fn loopback() -> &'static Loopback {
    static NETWORK: OnceLock<Loopback> = OnceLock::new();
    NETWORK.get_or_init(Loopback::new)
}

/// The fabric that `address` is on.
pub fn fabric_of<S>(address: &FabricAddress<S>) -> Arc<dyn Fabric> {
    match address.fabric {
        FabricKind::Iwarp { crc } => Arc::new(Iwarp::new(Options { crc, ..Options::default() })),
        #[cfg(feature = "verbs")]
        FabricKind::Verbs => Arc::new(fabric::verbs::Verbs),
        #[cfg(not(feature = "verbs"))]
        FabricKind::Verbs => unreachable!("such an address is not read without the feature"),
        FabricKind::Loopback => Arc::new(loopback().clone()),
    }
}

/// What is spoken at a door.
pub trait Protocol: Unpin + 'static {
    /// Its word in URLs.
    type Speech: Speech;
    /// What its connections are made with.
    type Config: Clone + Send + Unpin + 'static;
    /// What the private data of a peer says.
    type Peer: Send + 'static;

    /// Connections of one door, and who may have them (empty: all who reach it).
    fn limits(config: &Self::Config) -> (usize, &[Network]);

    /// Where its connections are counted.
    fn counts(metrics: &Metrics) -> &FabricCounts;

    /// Reads a peer's private data.
    ///
    /// # Errors
    /// One word that the peer is told and that is counted.
    fn judge(private_data: &[u8]) -> Result<Self::Peer, &'static str>;

    /// Accepts the peer of `request` on the lane of this thread.
    ///
    /// # Errors
    /// What the fabric lacks; the peer was rejected then.
    fn start_on_lane(
        request: ConnectRequest,
        peer: Self::Peer,
        lane: FabricLane<Self::Config>,
        admission: Admission,
    ) -> Result<(Recipient<Drain>, Recipient<Kill>), FabricError>;
}

/// What a connection on a fabric is made of, besides the request.
#[derive(Clone)]
pub struct FabricLane<C> {
    pub lane: connection::Lane,
    pub fabric: Arc<dyn fabric::Lane>,
    pub attachments: Attachments,
    pub config: C,
}

/// A bound address and the fabric lanes behind it, one for each lane of the daemon. Nobody polls them yet.
pub struct FabricDoor<P: Protocol> {
    listener: Box<dyn fabric::Listener>,
    lanes: Vec<Arc<dyn fabric::Lane>>,
    /// Indices of the lanes that connections go to.
    near: Vec<usize>,
    config: P::Config,
}

impl<P: Protocol> FabricDoor<P> {
    /// Binds `address` on `fabric`, with as many lanes as the daemon will have.
    ///
    /// # Errors
    /// [`StartError::Bind`].
    pub fn bind(
        fabric: &dyn Fabric,
        address: &Address,
        config: &P::Config,
        lane_count: usize,
    ) -> Result<Self, StartError> {
        let failed = |error: FabricError| StartError::Bind {
            url: format!("{}+{}://{address}", P::Speech::SCHEME, fabric.name()),
            source: match error {
                FabricError::System { source, .. } => source,
                FabricError::AddressInUse(_) => io::Error::new(io::ErrorKind::AddrInUse, error.to_string()),
                error => io::Error::other(error.to_string()),
            },
        };
        let lanes: Result<Vec<_>, _> = (0..lane_count.max(1)).map(|_| fabric.lane()).collect();
        let lanes = lanes.map_err(failed)?;
        let listener = lanes[0].listen(address).map_err(failed)?;
        let near = (0..lanes.len()).collect();
        Ok(Self { listener, lanes, near, config: config.clone() })
    }

    /// Connections go to these lanes alone, those on the NUMA node of the door's device. At first they go to all.
    ///
    /// # Panics
    /// For no lane, or one that there is not.
    pub fn keep_to(&mut self, lanes: Vec<usize>) {
        assert!(!lanes.is_empty() && lanes.iter().all(|lane| *lane < self.lanes.len()), "lanes {lanes:?}");
        self.near = lanes;
    }

    /// The fabric's lanes, one for each of the daemon's.
    pub fn lanes(&self) -> &[Arc<dyn fabric::Lane>] {
        &self.lanes
    }

    /// The address it really has.
    pub fn address(&self) -> Address {
        self.listener.address()
    }
}

/// The actor. One per bound address, on the thread of the first lane.
pub struct FabricListener<P: Protocol> {
    door: Option<Box<dyn fabric::Listener>>,
    lanes: Vec<(ArbiterHandle, FabricLane<P::Config>)>,
    near: Vec<usize>,
    gate: Gate,
    pollers: Vec<Addr<CqPoller>>,
    turn: usize,
    places: Arc<Semaphore>,
    /// Those of this door.
    door_places: Arc<Semaphore>,
    registry: Registry,
    metrics: Arc<Metrics>,
}

impl<P: Protocol> FabricListener<P> {
    /// Starts pollers on `lanes`, and the listener. Call it on any thread with an Arbiter.
    pub fn open(
        door: FabricDoor<P>,
        lanes: &[(ArbiterHandle, connection::Lane)],
        places: Arc<Semaphore>,
        registry: Registry,
        metrics: Arc<Metrics>,
    ) -> Addr<Self> {
        let FabricDoor { listener, lanes: fabric_lanes, near, config, .. } = door;
        let (connections_max, allow) = P::limits(&config);
        let gate = Gate::new(&listener.address(), allow);
        let door_places = Arc::new(Semaphore::new(connections_max));
        let mut door_lanes = Vec::new();
        for ((arbiter, lane), fabric) in lanes.iter().zip(fabric_lanes) {
            let (lane, attachments, config) = (lane.clone(), Attachments::default(), config.clone());
            door_lanes.push((arbiter.clone(), FabricLane { lane, fabric, attachments, config }));
        }
        Self::create(|ctx| {
            let door = cq_poller::Door { asked: ctx.address().recipient(), unmade: ctx.address().recipient() };
            door_lanes[0].1.attachments.listen(Some(door));
            let pollers = door_lanes.iter().map(|(arbiter, lane)| {
                let (fabric, attachments) = (lane.fabric.clone(), lane.attachments.clone());
                CqPoller::start_in_arbiter(arbiter, move |_| CqPoller::new(fabric, attachments))
            });
            let pollers = pollers.collect();
            Self {
                door: Some(listener),
                lanes: door_lanes,
                near,
                gate,
                pollers,
                turn: 0,
                places,
                door_places,
                registry,
                metrics,
            }
        })
    }

    fn reject(&self, request: ConnectRequest, cause: &'static str) {
        self.count_rejection(request.peer(), cause);
        request.reject(cause.as_bytes());
    }

    fn count_rejection(&self, peer: &Address, cause: &'static str) {
        self.metrics.connections.rejected.add(1);
        P::counts(&self.metrics).rejections.add(cause);
        tracing::debug!(cause, %peer, "{} connection rejected", P::Speech::SCHEME);
    }

    fn admit(&mut self, request: ConnectRequest) {
        if self.door.is_none() {
            return self.reject(request, "draining");
        }
        if let Verdict::Refuse { log } = self.gate.judge(request.peer(), Instant::now()) {
            if let Some(count) = log {
                let door = P::Speech::SCHEME;
                tracing::warn!(peer = %request.peer(), count, "{door}.allow does not name this peer: it is refused");
            }
            return self.reject(request, "not_allowed");
        }
        let peer = match P::judge(request.private_data()) {
            Ok(peer) => peer,
            Err(cause) => return self.reject(request, cause),
        };
        let permits = (self.places.clone().try_acquire_owned(), self.door_places.clone().try_acquire_owned());
        let (Ok(place), Ok(door_place)) = permits else {
            return self.reject(request, "too_many_connections");
        };
        let id = self.registry.next_id();
        let registry = self.registry.clone();
        let admission: Admission = Box::new((registry.admitted(id, place), door_place));
        let (arbiter, lane) = self.lanes[self.near[self.turn % self.near.len()]].clone();
        self.turn += 1;
        let metrics = self.metrics.clone();
        arbiter.spawn(async move {
            match P::start_on_lane(request, peer, lane, admission) {
                Ok((drain, kill)) => registry.enroll(id, drain, kill),
                Err(error) => {
                    let (door, cause) = (P::Speech::SCHEME, "shortage");
                    metrics.connections.rejected.add(1);
                    P::counts(&metrics).rejections.add(cause);
                    tracing::warn!(cause, %error, "{door} connection rejected");
                }
            }
        });
    }
}

impl<P: Protocol> Actor for FabricListener<P> {
    type Context = Context<Self>;
}

impl<P: Protocol> Handler<Asked> for FabricListener<P> {
    type Result = ();

    fn handle(&mut self, asked: Asked, _: &mut Self::Context) {
        self.admit(asked.0);
    }
}

impl<P: Protocol> Handler<Unmade> for FabricListener<P> {
    type Result = ();

    fn handle(&mut self, unmade: Unmade, _: &mut Self::Context) {
        self.count_rejection(&unmade.peer, unmade.why);
    }
}

impl<P: Protocol> Handler<Refuse> for FabricListener<P> {
    type Result = ();

    fn handle(&mut self, _: Refuse, _: &mut Self::Context) {
        // Connections go on, and so do their pollers.
        self.door = None;
    }
}

/// The pollers end: no connection is left that needs them.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Close;

impl<P: Protocol> Handler<Close> for FabricListener<P> {
    type Result = ();

    fn handle(&mut self, _: Close, ctx: &mut Self::Context) {
        self.pollers.iter().for_each(|poller| poller.do_send(cq_poller::Stop));
        ctx.stop();
    }
}
