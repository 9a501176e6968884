//! Userspace iWARP: one ordinary TCP connection per queue pair, driven by [`crate::wire::iwarp`].
//!
//! ```text
//!  post ─► send queue ─► frames (≤ 256 KiB per turn) ─► one sendmsg ─► socket
//!  socket ─► read (≤ 256 KiB per turn) ─► whole frame, CRC, header, key, rights, bounds ─► placed ─► events
//! ```
//! A frame is verified whole before an octet of it is placed. A dialler offers peer-to-peer mode unless told otherwise; towards an initiator that
//! does not, what a responder posts waits for the first frame of the initiator. A protocol error of the peer is answered
//! with a Terminate and ends that connection alone. After the end a socket stays until the peer has said goodbye or the
//! handshake timeout has passed, so that nothing sent before is lost to a reset.

mod end;
mod outbound;
mod queue_pair;
mod sockets;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::queue::{Counted, Places, ReceiveQueue, SendQueue, grant, lock};
use super::registered::{Domain, Regions};
use super::sys::{Bell, Epoll, READY_COUNT_MAX, Ready};
use super::{
    Address, Attributes, Cause, ConnectRequest, Event, Fabric, FabricError, Lane, Listener, QpNum, QueuePair,
    Resources, TURN_BYTES_MAX,
};
use crate::wire::iwarp::startup::{self, Form};
use end::{End, EndState, Phase};
use queue_pair::IwarpQueuePair;
use sockets::{Closing, HalfOpen, Pending, refuse};

/// The bell's token; queue pair numbers begin at 1.
const BELL: u64 = 0;
/// Peers of a lane that have not sent a whole Request. One more is turned away at once.
const HALF_OPEN_COUNT_MAX: usize = 1024;
/// RAM that one queue pair may take besides its regions and buffers: what came in, what goes out (twice, for a buffer that
/// grows), and a segment of a Read Response.
pub const QUEUE_PAIR_BYTES_MAX: usize = end::INBOX_BYTES_MAX + 2 * TURN_BYTES_MAX + (64 << 10);
/// How long a listener rests when the system has no descriptor for the next peer.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How messages are cut into frames.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Segments {
    /// [`Segments::Large`] to peers on the loopback device, else [`Segments::Mss`].
    #[default]
    Auto,
    /// One frame fits one TCP segment, as hardware needs it.
    Mss,
    /// Up to 64 KiB: for peers known to take it, which are ours and Linux `siw`.
    Large,
    /// ULPDUs of at most so many octets, within 128 and 64,768.
    UpTo(usize),
}

/// What both ends of a fabric's connections are made with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Options {
    /// CRCs are used unless both ends are told otherwise (`?crc=off`).
    pub crc: bool,
    pub segments: Segments,
    /// How a dialler asks. A listener takes every form.
    pub form: Form,
    /// What a listener allows a peer for its whole Request.
    pub handshake_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self { crc: true, segments: Segments::Auto, form: Form::default(), handshake_timeout: Duration::from_secs(5) }
    }
}

/// The iWARP fabric.
#[derive(Clone, Copy, Debug, Default)]
pub struct Iwarp {
    options: Options,
}

impl Iwarp {
    pub fn new(options: Options) -> Self {
        Self { options }
    }
}

impl Fabric for Iwarp {
    fn name(&self) -> &'static str {
        "iwarp"
    }

    fn lane(&self) -> Result<Arc<dyn Lane>, FabricError> {
        let system = |what| move |source| FabricError::System { what, source };
        let bell = Bell::new().map_err(system("make an eventfd"))?;
        let epoll = Epoll::new().map_err(system("make an epoll instance"))?;
        epoll.add(bell.as_fd(), BELL, true, false).map_err(system("watch an eventfd"))?;
        let shared = LaneShared {
            bell,
            epoll,
            state: Mutex::default(),
            region_count: Arc::default(),
            half_open_count: Arc::default(),
        };
        Ok(Arc::new(IwarpLane { options: self.options, shared: Arc::new(shared) }))
    }
}

struct IwarpLane {
    options: Options,
    shared: Arc<LaneShared>,
}

struct LaneShared {
    bell: Bell,
    epoll: Epoll,
    state: Mutex<LaneState>,
    region_count: Arc<AtomicUsize>,
    half_open_count: Arc<AtomicUsize>,
}

/// Everything is found by its epoll token: a number of the same sequence that queue pairs have.
#[derive(Default)]
struct LaneState {
    places: Places,
    ends: HashMap<u64, Arc<End>>,
    /// Ends with something to do, each once.
    ready: VecDeque<Arc<End>>,
    listeners: HashMap<u64, Arc<TcpListener>>,
    half_open: HashMap<u64, HalfOpen>,
    closing: HashMap<u64, Closing>,
    /// Of ends in their handshake and of listeners at rest.
    deadlines: HashMap<u64, Instant>,
    outbox: VecDeque<Event>,
}

impl LaneState {
    fn handshake_failed(&mut self, peer: SocketAddr, why: &'static str) {
        self.outbox.push_back(Event::HandshakeFailed { peer: Address::Socket(peer), why });
    }
}

impl IwarpLane {
    fn end(&self, attributes: Attributes, phase: Phase) -> Result<Box<dyn QueuePair>, FabricError> {
        let attributes = grant(attributes)?;
        let mut state = lock(&self.shared.state);
        let place = state.places.take().ok_or_else(|| FabricError::System {
            what: "find a place for a queue pair",
            source: io::ErrorKind::OutOfMemory.into(),
        })?;
        let domain = Domain::new();
        let end = Arc::new(End {
            number: QpNum::next(),
            place,
            domain,
            lane: Arc::clone(&self.shared),
            regions: Regions::new(Arc::clone(&self.shared.region_count)),
            is_ready: AtomicBool::new(false),
            options: self.options,
            state: Mutex::new(EndState {
                attributes,
                phase,
                queue: SendQueue::new(place, domain, &attributes),
                receives: ReceiveQueue::new(place, domain, &attributes),
                link: None,
                events: VecDeque::new(),
                failure: None,
                question: Vec::new(),
                has_unread: false,
            }),
        });
        state.ends.insert(end.number.0, Arc::clone(&end));
        Ok(Box::new(IwarpQueuePair { end }))
    }

    /// Takes peers that wait at a listener.
    fn accept(&self, token: u64, listener: &TcpListener, now: Instant) {
        for _ in 0..64 {
            let (stream, peer) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    tracing::warn!(%error, "a listener rests: no descriptor for the next peer");
                    let _ = self.shared.epoll.change(listener.as_fd(), token, false, false);
                    lock(&self.shared.state).deadlines.insert(token, now + ACCEPT_PAUSE);
                    return;
                }
                // A peer that left before it was taken.
                Err(_) => continue,
            };
            let Ok(listener) = listener.local_addr() else { continue };
            if stream.set_nonblocking(true).is_err() || stream.set_nodelay(true).is_err() {
                continue;
            }
            let mut state = lock(&self.shared.state);
            if state.half_open.len() >= HALF_OPEN_COUNT_MAX {
                state.handshake_failed(peer, "handshakes_too_many");
                continue;
            }
            let token = QpNum::next().0;
            if self.shared.epoll.add(stream.as_fd(), token, true, false).is_ok() {
                let deadline = now + self.options.handshake_timeout;
                let counted = Counted::new(&self.shared.half_open_count);
                let half_open = HalfOpen { stream, peer, listener, inbox: Vec::new(), deadline, counted };
                state.half_open.insert(token, half_open);
            }
        }
    }

    /// Reads on in a Request; a whole one becomes an event.
    fn read_request(&self, state: &mut LaneState, token: u64) {
        let Some(half_open) = state.half_open.get_mut(&token) else { return };
        let request = match half_open.read() {
            Ok(None) => return,
            Ok(Some(request)) => request,
            Err(why) => {
                let peer = half_open.peer;
                state.half_open.remove(&token);
                return state.handshake_failed(peer, why);
            }
        };
        let Some(HalfOpen { stream, peer, listener, counted, .. }) = state.half_open.remove(&token) else { return };
        let removed = self.shared.epoll.remove(stream.as_fd());
        let refused = match removed {
            Err(_) => Some("handshake_lost"),
            Ok(()) if request.markers => Some("markers"),
            // Upper layers here Read from whoever dials. That it Reads itself is its own affair: Linux's NFS client does not.
            Ok(()) if !startup::serves_reads(&request) => Some("read_depth"),
            Ok(()) => None,
        };
        if let Some(why) = refused {
            refuse(&stream, &request, &[]);
            return state.handshake_failed(peer, why);
        }
        let private_data = request.private_data.clone();
        let pending = Box::new(Pending { stream, request, _counted: counted });
        let request = ConnectRequest::new(Address::Socket(peer), Address::Socket(listener), private_data, pending);
        state.outbox.push_back(Event::ConnectRequest(request));
    }

    fn expire(&self, now: Instant) {
        let mut state = lock(&self.shared.state);
        let late: Vec<SocketAddr> =
            state.half_open.extract_if(|_, peer| peer.deadline <= now).map(|(_, late)| late.peer).collect();
        late.into_iter().for_each(|peer| state.handshake_failed(peer, "handshake_timed_out"));
        state.closing.retain(|_, closing| closing.deadline > now);
        if state.deadlines.values().all(|deadline| *deadline > now) {
            return;
        }
        let late: Vec<u64> =
            state.deadlines.extract_if(|_, deadline| *deadline <= now).map(|(token, _)| token).collect();
        let mut ends = Vec::new();
        for token in late {
            if let Some(end) = state.ends.get(&token) {
                ends.push(Arc::clone(end));
            } else if let Some(listener) = state.listeners.get(&token) {
                let _ = self.shared.epoll.change(listener.as_fd(), token, true, false);
            }
        }
        drop(state);
        for end in ends {
            end.fail(Cause::TimedOut);
        }
    }

    fn dispatch(&self, ready: Ready, now: Instant) -> bool {
        if ready.token == BELL {
            return self.shared.bell.silence();
        }
        let mut state = lock(&self.shared.state);
        if let Some(end) = state.ends.get(&ready.token).cloned() {
            drop(state);
            return end.turn(now, ready.readable, ready.writable);
        }
        if let Some(listener) = state.listeners.get(&ready.token).cloned() {
            drop(state);
            self.accept(ready.token, &listener, now);
        } else if state.half_open.contains_key(&ready.token) {
            self.read_request(&mut state, ready.token);
        } else if let Some(closing) = state.closing.get_mut(&ready.token) {
            let had_sent_all = closing.has_sent_all();
            if closing.is_over() {
                state.closing.remove(&ready.token);
            } else if !had_sent_all && closing.has_sent_all() {
                let _ = self.shared.epoll.change(closing.stream.as_fd(), ready.token, true, false);
            }
        }
        false
    }
}

impl Lane for IwarpLane {
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError> {
        let Address::Socket(socket) = address else { return Err(FabricError::Address(address.clone())) };
        let bound = bind(*socket).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => FabricError::AddressInUse(address.clone()),
            _ => FabricError::System { what: "listen", source },
        })?;
        let system = |what| move |source| FabricError::System { what, source };
        let local = bound.local_addr().map_err(system("ask for the address of a listener"))?;
        let token = QpNum::next().0;
        self.shared.epoll.add(bound.as_fd(), token, true, false).map_err(system("watch a listener"))?;
        lock(&self.shared.state).listeners.insert(token, Arc::new(bound));
        Ok(Box::new(IwarpListener { address: local, token, lane: Arc::clone(&self.shared) }))
    }

    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        match address {
            Address::Socket(socket) => self.end(attributes, Phase::Dialled(*socket)),
            Address::Name(_) => Err(FabricError::Address(address.clone())),
        }
    }

    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        let pending = request.into_pending::<Pending>()?;
        if let Err(error) = grant(attributes) {
            super::Pending::reject(pending, &[]);
            return Err(error);
        }
        self.end(attributes, Phase::Admitted(pending))
    }

    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool {
        self.shared.bell.look();
        self.expire(now);
        // Only what is ready now: who readies itself again has its next turn in the next call.
        let (mut turns, has_room) = {
            let state = lock(&self.shared.state);
            (state.ready.len(), state.outbox.len() < events_max)
        };
        let mut more = false;
        if has_room {
            let mut ready = Vec::new();
            if let Err(error) = self.shared.epoll.poll(&mut ready) {
                tracing::error!(%error, "a lane cannot poll its sockets");
            }
            more |= ready.len() == READY_COUNT_MAX;
            for ready in ready {
                more |= self.dispatch(ready, now);
            }
        }
        while turns > 0 {
            turns -= 1;
            let mut state = lock(&self.shared.state);
            if state.outbox.len() >= events_max {
                break;
            }
            let Some(end) = state.ready.pop_front() else { break };
            drop(state);
            end.is_ready.store(false, Ordering::SeqCst);
            more |= end.turn(now, false, false);
        }
        let mut state = lock(&self.shared.state);
        let count = state.outbox.len().min(events_max);
        events.extend(state.outbox.drain(..count));
        more || !state.outbox.is_empty() || !state.ready.is_empty()
    }

    fn arm(&self) {
        self.shared.bell.arm();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }

    fn deadline(&self) -> Option<Instant> {
        let state = lock(&self.shared.state);
        let half_open = state.half_open.values().map(|half_open| half_open.deadline);
        let closing = state.closing.values().map(|closing| closing.deadline);
        state.deadlines.values().copied().chain(half_open).chain(closing).min()
    }

    fn resources(&self) -> Resources {
        let state = lock(&self.shared.state);
        Resources {
            queue_pairs: state.ends.len() + state.outbox.iter().filter(|event| event.is_last()).count(),
            regions: self.shared.region_count.load(Ordering::Relaxed),
            half_open: self.shared.half_open_count.load(Ordering::Relaxed),
            listeners: state.listeners.len(),
            closing: state.closing.len(),
        }
    }
}

impl Drop for IwarpLane {
    fn drop(&mut self) {
        // Ends and lane own each other until the last event; nobody will ask for that one now.
        let state = std::mem::take(&mut *lock(&self.shared.state));
        for end in state.ends.values() {
            end.fail(Cause::Local);
            end.turn(Instant::now(), false, false);
        }
        drop(state);
        drop(std::mem::take(&mut *lock(&self.shared.state)));
    }
}

impl fmt::Debug for IwarpLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IwarpLane").field("resources", &self.resources()).finish()
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

struct IwarpListener {
    address: SocketAddr,
    token: u64,
    lane: Arc<LaneShared>,
}

impl Listener for IwarpListener {
    fn address(&self) -> Address {
        Address::Socket(self.address)
    }
}

impl Drop for IwarpListener {
    fn drop(&mut self) {
        let mut state = lock(&self.lane.state);
        state.listeners.remove(&self.token);
        state.deadlines.remove(&self.token);
    }
}

impl fmt::Debug for IwarpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IwarpListener").field("address", &self.address).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5044 §5.1: what is written goes out at once.
    #[test]
    fn sockets_of_both_roles_do_not_wait_for_more_to_send() {
        let lane = IwarpLane {
            options: Options::default(),
            shared: Arc::new(LaneShared {
                bell: Bell::new().unwrap(),
                epoll: Epoll::new().unwrap(),
                state: Mutex::default(),
                region_count: Arc::default(),
                half_open_count: Arc::default(),
            }),
        };
        let bound = bind(([127, 0, 0, 1], 0).into()).unwrap();
        let ours = queue_pair::connect(bound.local_addr().unwrap()).unwrap();
        assert!(ours.nodelay().unwrap());
        lane.accept(1, &bound, Instant::now());
        let state = lock(&lane.shared.state);
        assert_eq!(state.half_open.len(), 1);
        assert!(state.half_open.values().all(|peer| peer.stream.nodelay().unwrap()));
    }
}
