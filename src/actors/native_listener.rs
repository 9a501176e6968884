//! `NativeListener`: one bound address of a native door. It judges addresses and descriptors of peers, admits them up to the
//! limits, and gives each to a lane in turn.

use crate::actors::connection::Admission;
use crate::actors::cq_poller::{self, Asked, Attachments, CqPoller, Unmade};
use crate::actors::gate::{Gate, Verdict};
use crate::actors::listener::{Refuse, Registry};
use crate::actors::native_connection::{NativeConnection, NativeLane};
use crate::actors::{StartError, connection};
use crate::config::{NativeAddress, NativeConfig, NativeFabric};
use crate::fabric::iwarp::{Iwarp, Options};
use crate::fabric::loopback::Loopback;
use crate::fabric::{self, Address, ConnectRequest, Fabric, FabricError};
use crate::metrics::Metrics;
use crate::wire::native::descriptor::Descriptor;
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
pub fn fabric_of(address: &NativeAddress) -> Arc<dyn Fabric> {
    match address.fabric {
        NativeFabric::Iwarp { crc } => Arc::new(Iwarp::new(Options { crc, ..Options::default() })),
        #[cfg(feature = "verbs")]
        NativeFabric::Verbs => Arc::new(fabric::verbs::Verbs),
        #[cfg(not(feature = "verbs"))]
        NativeFabric::Verbs => unreachable!("such an address is not read without the feature"),
        NativeFabric::Loopback => Arc::new(loopback().clone()),
    }
}

/// A bound address and the fabric lanes behind it, one for each lane of the daemon. Nobody polls them yet.
pub struct NativeDoor {
    listener: Box<dyn fabric::Listener>,
    lanes: Vec<Arc<dyn fabric::Lane>>,
    /// Indices of the lanes that connections go to.
    near: Vec<usize>,
    config: NativeConfig,
}

impl NativeDoor {
    /// Binds `address` on `fabric`, with as many lanes as the daemon will have.
    ///
    /// # Errors
    /// [`StartError::Bind`].
    pub fn bind(
        fabric: &dyn Fabric,
        address: &Address,
        config: &NativeConfig,
        lane_count: usize,
    ) -> Result<Self, StartError> {
        let failed = |error: FabricError| StartError::Bind {
            url: format!("native+{}://{address}", fabric.name()),
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
pub struct NativeListener {
    door: Option<Box<dyn fabric::Listener>>,
    lanes: Vec<(ArbiterHandle, NativeLane)>,
    near: Vec<usize>,
    gate: Gate,
    pollers: Vec<Addr<CqPoller>>,
    turn: usize,
    places: Arc<Semaphore>,
    native_places: Arc<Semaphore>,
    registry: Registry,
    metrics: Arc<Metrics>,
}

impl NativeListener {
    /// Starts pollers on `lanes`, and the listener. Call it on any thread with an Arbiter.
    pub fn open(
        door: NativeDoor,
        lanes: &[(ArbiterHandle, connection::Lane)],
        places: Arc<Semaphore>,
        registry: Registry,
        metrics: Arc<Metrics>,
    ) -> Addr<Self> {
        let NativeDoor { listener, lanes: fabric_lanes, near, config, .. } = door;
        let gate = Gate::new(&listener.address(), &config.allow);
        let native_places = Arc::new(Semaphore::new(config.connections_max));
        let mut native_lanes = Vec::new();
        for ((arbiter, lane), fabric) in lanes.iter().zip(fabric_lanes) {
            let (lane, attachments, config) = (lane.clone(), Attachments::default(), config.clone());
            native_lanes.push((arbiter.clone(), NativeLane { lane, fabric, attachments, config }));
        }
        Self::create(|ctx| {
            let door = cq_poller::Door { asked: ctx.address().recipient(), unmade: ctx.address().recipient() };
            native_lanes[0].1.attachments.listen(Some(door));
            let pollers = native_lanes.iter().map(|(arbiter, lane)| {
                let (fabric, attachments) = (lane.fabric.clone(), lane.attachments.clone());
                CqPoller::start_in_arbiter(arbiter, move |_| CqPoller::new(fabric, attachments))
            });
            let pollers = pollers.collect();
            Self {
                door: Some(listener),
                lanes: native_lanes,
                near,
                gate,
                pollers,
                turn: 0,
                places,
                native_places,
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
        self.metrics.native.rejections.add(cause);
        tracing::debug!(cause, %peer, "native connection rejected");
    }

    fn admit(&mut self, request: ConnectRequest) {
        if self.door.is_none() {
            return self.reject(request, "draining");
        }
        if let Verdict::Refuse { log } = self.gate.judge(request.peer(), Instant::now()) {
            if let Some(count) = log {
                tracing::warn!(peer = %request.peer(), count, "native.allow does not name this peer: it is refused");
            }
            return self.reject(request, "not_allowed");
        }
        let peer = match Descriptor::decode(request.private_data()) {
            Ok(peer) => peer,
            Err(error) => return self.reject(request, error.cause()),
        };
        let permits = (self.places.clone().try_acquire_owned(), self.native_places.clone().try_acquire_owned());
        let (Ok(place), Ok(native_place)) = permits else {
            return self.reject(request, "too_many_connections");
        };
        let id = self.registry.next_id();
        let registry = self.registry.clone();
        let admission: Admission = Box::new((registry.admitted(id, place), native_place));
        let (arbiter, lane) = self.lanes[self.near[self.turn % self.near.len()]].clone();
        self.turn += 1;
        let metrics = self.metrics.clone();
        arbiter.spawn(async move {
            match NativeConnection::start_on_lane(request, peer, lane, admission) {
                Ok(address) => registry.enroll(id, address.clone().recipient(), address.recipient()),
                Err(error) => {
                    metrics.connections.rejected.add(1);
                    metrics.native.rejections.add("shortage");
                    tracing::warn!(cause = "shortage", %error, "native connection rejected");
                }
            }
        });
    }
}

impl Actor for NativeListener {
    type Context = Context<Self>;
}

impl Handler<Asked> for NativeListener {
    type Result = ();

    fn handle(&mut self, asked: Asked, _: &mut Self::Context) {
        self.admit(asked.0);
    }
}

impl Handler<Unmade> for NativeListener {
    type Result = ();

    fn handle(&mut self, unmade: Unmade, _: &mut Self::Context) {
        self.count_rejection(&unmade.peer, unmade.why);
    }
}

impl Handler<Refuse> for NativeListener {
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

impl Handler<Close> for NativeListener {
    type Result = ();

    fn handle(&mut self, _: Close, ctx: &mut Self::Context) {
        self.pollers.iter().for_each(|poller| poller.do_send(cq_poller::Stop));
        ctx.stop();
    }
}
