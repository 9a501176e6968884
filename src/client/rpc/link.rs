//! One server, over as many connections as it takes, and the turns that move its calls. Nothing here sleeps.

use std::collections::VecDeque;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::port::{Finished, Lent, Port, attributes};
use crate::client::{ClientError, Options, ServerUrl};
use crate::fabric::spin::Spin;
use crate::fabric::{Address, Event, Fabric, Lane};
use crate::programs::bulkhead::PUT_BYTES_MAX;
use crate::wire::onc_rpc::Xid;
use crate::wire::rpcrdma::private_data::PrivateData;
use crate::wire::rpcrdma::requester::{Call, Cancel, Failure, Settings, Terms};

/// Events of a lane taken in one turn.
const EVENT_COUNT_MAX: usize = 32;
/// Before a server is asked once more that could not be reached, doubling.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How a client talks to its server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RpcOptions {
    /// Bound on making a connection, for each address of the server's name.
    pub connect_timeout: Duration,
    /// A call without a reply for longer is taken for lost, and so is its connection.
    pub reply_timeout: Duration,
    /// How often a call is sent, each time over another connection and with the same xid, before it fails.
    pub attempts_max: NonZeroU32,
    /// How often in a row a connection is tried that cannot be made, before the calls that wait for it fail.
    pub connects_max: NonZeroU32,
    /// Octets of the longest message sent, and received, inline: 1,024 to 262,144. What is agreed on is the smaller of each
    /// side's.
    pub inline_bytes: u32,
    /// Calls without an answer to ask the server for. Each costs a Receive and a Send of `inline_bytes`.
    pub credits: NonZeroU32,
    /// Memory of more octets is offered in segments of so many.
    pub segment_bytes_max: NonZeroU32,
    /// Octets of a value in one call, where it is read from a reader or written to a writer: 1 to 2^30.
    pub range_bytes: u32,
    /// Such calls under way at a time.
    pub range_count: NonZeroU32,
    /// Checksums are asked for and sent with all octets of values, and compared.
    pub crc32c: bool,
}

impl Default for RpcOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(60),
            attempts_max: NonZeroU32::new(4).unwrap(),
            connects_max: NonZeroU32::new(5).unwrap(),
            inline_bytes: 4096,
            credits: NonZeroU32::new(32).unwrap(),
            segment_bytes_max: NonZeroU32::new(1 << 30).unwrap(),
            range_bytes: 1 << 20,
            range_count: NonZeroU32::new(4).unwrap(),
            crc32c: false,
        }
    }
}

impl From<Options> for RpcOptions {
    fn from(options: Options) -> Self {
        let (connect_timeout, reply_timeout) = (options.connect_timeout, options.io_timeout);
        Self { connect_timeout, reply_timeout, ..Self::default() }
    }
}

impl RpcOptions {
    fn settings(&self) -> Settings {
        Settings {
            own: PrivateData {
                remote_invalidate: true,
                send_bytes: self.inline_bytes,
                receive_bytes: self.inline_bytes,
            },
            credits: self.credits,
            segment_bytes_max: self.segment_bytes_max,
            reply_timeout: self.reply_timeout,
            attempts_max: self.attempts_max,
            first_xid: Xid(random() as u32),
        }
    }
}

/// Where to count from: somewhere else for each client, also for those that start at the same time and those that start
/// again. A server that remembers calls tells them apart by what is counted.
pub(super) fn random() -> u64 {
    // Keyed by the system for each process, and differently each time.
    std::collections::hash_map::RandomState::new().hash_one(std::process::id())
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// No connection, and nothing to have one for.
    Idle,
    /// A connection is made from then on.
    Due(Instant),
    /// Asked, or established.
    Attached,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Link {
    url: ServerUrl,
    port: Port,
    addresses: Vec<Address>,
    options: RpcOptions,
    state: State,
    /// Connections in a row that could not be made.
    failures: u32,
    /// One was established.
    was_established: bool,
    /// Why the last one ended.
    cause: String,
    events: Vec<Event>,
    finished: VecDeque<Finished>,
    /// Whether waiting for the server begins awake.
    pub(super) spin: Spin,
    /// Goes last: it tells the peer goodbye.
    lane: Arc<dyn Lane>,
}

impl Link {
    /// The server at one of `addresses`, which will be asked in turn.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`] if no descriptors are left; [`ClientError::Local`] for options that cannot be.
    pub(super) fn new(
        url: ServerUrl,
        fabric: &dyn Fabric,
        addresses: Vec<Address>,
        options: RpcOptions,
    ) -> Result<Self, ClientError> {
        use crate::wire::rpcrdma::private_data::{INLINE_BYTES_MAX, INLINE_BYTES_MIN};
        let range = INLINE_BYTES_MIN..=INLINE_BYTES_MAX;
        if !range.contains(&options.inline_bytes) || !(1..=PUT_BYTES_MAX).contains(&options.range_bytes) {
            let what = format!("{} octets inline and {} a range", options.inline_bytes, options.range_bytes);
            return Err(ClientError::Local { source: io::Error::new(ErrorKind::InvalidInput, what) });
        }
        let unreachable = |source| ClientError::Unreachable { url: url.clone(), source };
        if addresses.is_empty() {
            return Err(unreachable(io::Error::new(ErrorKind::NotFound, "the name has no address")));
        }
        let lane = fabric.lane().map_err(|error| unreachable(io::Error::other(error)))?;
        Ok(Self {
            port: Port::new(options.settings()),
            url,
            addresses,
            options,
            state: State::Idle,
            failures: 0,
            was_established: false,
            cause: String::new(),
            events: Vec::new(),
            finished: VecDeque::new(),
            spin: Spin::new(&*lane),
            lane,
        })
    }

    pub(super) fn url(&self) -> &ServerUrl {
        &self.url
    }

    pub(super) fn options(&self) -> &RpcOptions {
        &self.options
    }

    pub(super) fn lane(&self) -> &Arc<dyn Lane> {
        &self.lane
    }

    /// What calls are sized for, while there is a connection.
    pub(super) fn terms(&self) -> Option<Terms> {
        self.port.terms()
    }

    /// Wants a connection, though nothing is asked yet.
    pub(super) fn connect(&mut self, now: Instant) {
        if matches!(self.state, State::Idle) {
            self.state = State::Due(now);
        }
    }

    /// Why there will be no connection: every address was tried. `None` while there is hope.
    pub(super) fn unreachable(&self) -> Option<ClientError> {
        if !matches!(self.state, State::Idle) {
            return None;
        }
        let source = io::Error::new(ErrorKind::ConnectionRefused, self.cause.clone());
        Some(ClientError::Unreachable { url: self.url.clone(), source })
    }

    /// Makes a call, whose message begins with any word: its xid is put there.
    pub(super) fn submit(&mut self, call: Call, lent: Lent, now: Instant) -> Xid {
        self.connect(now);
        self.port.call(lent, |xid| Call { message: call.message.with_xid(xid), ..call })
    }

    /// Gives a call up.
    pub(super) fn cancel(&mut self, xid: Xid, when: Cancel) -> bool {
        self.port.cancel(xid, when)
    }

    /// Calls that are not over.
    pub(super) fn pending_count(&self) -> usize {
        self.port.pending_count()
    }

    /// A call that is over.
    pub(super) fn take_finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    /// When [`Link::turn`] must be called though nothing happened.
    pub(super) fn wakes_at(&self) -> Option<Instant> {
        let due = match self.state {
            State::Due(at) => Some(at),
            State::Idle | State::Attached => None,
        };
        [self.lane.deadline(), self.port.deadline(), due].into_iter().flatten().min()
    }

    /// One turn. `true` if anything moved.
    pub(super) fn turn(&mut self, now: Instant) -> bool {
        let mut moved = self.lane.progress(now, &mut self.events, EVENT_COUNT_MAX);
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            moved = true;
            self.handle(event, now);
        }
        self.events = events;
        if let State::Due(at) = self.state
            && at <= now
        {
            self.dial(now);
            moved = true;
        }
        moved |= self.port.drive(now);
        while let Some(finished) = self.port.take_finished() {
            self.finished.push_back(finished);
            moved = true;
        }
        moved
    }

    fn handle(&mut self, event: Event, now: Instant) {
        if event.qp() != self.port.number() {
            return;
        }
        let cause = match &event {
            Event::Established { .. } => {
                (self.failures, self.was_established) = (0, true);
                None
            }
            Event::Rejected { .. } => Some("the server declined".to_owned()),
            Event::Disconnected { cause, .. } => Some(cause.to_string()),
            _ => None,
        };
        let was_established = self.port.is_established();
        self.port.handle_event(event);
        if let Some(cause) = cause {
            self.failures += u32::from(!was_established);
            self.lost(cause, now);
        }
    }

    fn dial(&mut self, now: Instant) {
        let address = self.failures as usize % self.addresses.len();
        let attributes = attributes(self.port.requester(), self.options.connect_timeout);
        let dialled = self.lane.dial(&self.addresses[address], attributes).map_err(io::Error::other);
        match dialled.and_then(|qp| self.port.attach(qp)) {
            Ok(()) => self.state = State::Attached,
            Err(error) => {
                self.failures += 1;
                self.lost(error.to_string(), now);
            }
        }
    }

    /// There is no connection any more, or none could be made.
    fn lost(&mut self, cause: String, now: Instant) {
        tracing::debug!(url = %self.url, %cause, "an RPC connection is over");
        self.cause = cause;
        let count = self.addresses.len() as u32;
        let failures_max = match self.was_established {
            true => count.saturating_mul(self.options.connects_max.get()),
            // Whoever begins is told at once.
            false => count,
        };
        if self.failures >= failures_max {
            self.failures = 0;
            self.state = State::Idle;
            self.port.abandon();
        } else if self.failures > 0 || self.port.pending_count() > 0 {
            // Each address once without a pause.
            let rounds = self.failures / count;
            let pause = PAUSE_MIN.saturating_mul(1 << rounds.min(10)).min(PAUSE_MAX);
            self.state = State::Due(if rounds == 0 { now } else { now + pause });
        } else {
            self.state = State::Idle;
        }
    }

    /// What a failed call is told as.
    pub(super) fn error(&self, failure: Failure) -> ClientError {
        let local = |kind, failure: Failure| ClientError::Local { source: io::Error::new(kind, failure.to_string()) };
        match failure {
            Failure::Rdma(_) => ClientError::Refused { reply: failure.to_string() },
            Failure::Reply(_) => ClientError::Protocol { url: self.url.clone(), what: failure.to_string() },
            Failure::Lost(0) => {
                let source = io::Error::new(ErrorKind::ConnectionRefused, self.cause.clone());
                ClientError::Unreachable { url: self.url.clone(), source }
            }
            Failure::Lost(_) => {
                let source = io::Error::new(ErrorKind::ConnectionAborted, format!("{failure}: {}", self.cause));
                ClientError::Lost { url: self.url.clone(), source }
            }
            Failure::Refused => local(ErrorKind::OutOfMemory, failure),
            Failure::Cancelled => local(ErrorKind::Interrupted, failure),
            failure => local(ErrorKind::InvalidInput, failure),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // What was posted goes out with this turn; the lane's own drop says goodbye for the queue pair.
        self.port.disconnect();
        self.lane.progress(Instant::now(), &mut self.events, EVENT_COUNT_MAX);
    }
}
