//! RDMA devices: hardware, soft-RoCE, soft-iWARP. Connections are made by librdmacm, data moved by libibverbs.
//!
//! ```text
//!  post ─► send queue ─► device ─► completion queue ─┐
//!  peer's Writes ─► memory, a word of it watched ────┼─► progress ─► events
//!  connection manager ─► event channel ──────────────┘
//! ```
//! Every connection has its protection domain, its queue pair and its completion queue; a lane polls those of its
//! connections in turn. Asleep, it waits on one epoll descriptor: the completion channel of each device, the event channel
//! of the connection manager, its bell, and a timer. The timer is for memory: a Write of the peer completes nothing here,
//! so while an owner watches a word ([`MemoryRegion::watch`]) the lane looks again after `WATCH_MIN`, twice as long each
//! time nothing came, up to `WATCH_MAX`.
//!
//! A region whose key the peer may give back is a memory window of type 2 where the device has them, bound by a request
//! once the connection is there; elsewhere, as every other region, a registration of its own.
#![allow(unsafe_code)]

mod cm;
mod device;
mod end;
mod queue_pair;
mod regions;
mod sys;
mod timer;

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::queue::{Counted, Places, grant, lock};
use super::sys::{Bell, Epoll, READY_COUNT_MAX};
use super::{
    Access, Address, Attributes, Cause, ConnectRequest, Event, Fabric, FabricError, Lane, Listener, LocalBuf,
    MemoryRegion, PRIVATE_DATA_BYTES_MAX, PostError, QpNum, QueuePair, Resources, SharedSpan, Work, WorkId,
};
use cm::{EventChannel, Happened, Identifier, Terms};
use device::{CompletionChannel, Device, Devices};
use end::{Closing, End, Phase};
use timer::Timer;

/// Tokens of a lane's descriptors; completion channels follow.
const BELL: u64 = 0;
const TIMER: u64 = 1;
const MANAGER: u64 = 2;
const CHANNELS: u64 = 3;
/// First and longest pause between two looks at watched words.
const WATCH_MIN: Duration = Duration::from_micros(10);
const WATCH_MAX: Duration = Duration::from_millis(2);
/// Turns after which the descriptors are looked at though the lane has not slept: memory alone is cheap to look at.
const TURNS_PER_LOOK: u32 = 16;
/// Connection requests that the kernel keeps for a listener.
const BACKLOG: i32 = 1024;
/// Events of the connection manager taken in one turn.
const MANAGER_EVENTS_MAX: usize = 64;

/// The fabric of this machine's RDMA devices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verbs;

impl Fabric for Verbs {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn lane(&self) -> Result<Arc<dyn Lane>, FabricError> {
        static TOLD: Mutex<bool> = Mutex::new(false);
        let mut told = lock(&TOLD);
        if !*told {
            device::describe_all().map_err(system("look for RDMA devices"))?;
            *told = true;
        }
        drop(told);
        let bell = Bell::new().map_err(system("make an eventfd"))?;
        let timer = Timer::new().map_err(system("make a timer"))?;
        let manager = EventChannel::new().map_err(system("make an event channel of the connection manager"))?;
        let epoll = Epoll::new().map_err(system("make an epoll instance"))?;
        for (fd, token) in [(bell.as_fd(), BELL), (timer.as_fd(), TIMER), (manager.as_fd(), MANAGER)] {
            epoll.add(fd, token, true, false).map_err(system("watch the descriptors of a lane"))?;
        }
        let shared = LaneShared {
            bell,
            epoll,
            timer,
            manager: Arc::new(manager),
            devices: Devices::default(),
            channels: Mutex::default(),
            state: Mutex::default(),
            driver: Mutex::default(),
            region_count: AtomicUsize::new(0),
            watch_count: AtomicUsize::new(0),
            half_open_count: Arc::default(),
            was_posted: AtomicBool::new(false),
        };
        Ok(Arc::new(VerbsLane { shared: Arc::new(shared) }))
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> FabricError {
    move |source| FabricError::System { what, source }
}

struct VerbsLane {
    shared: Arc<LaneShared>,
}

struct LaneShared {
    bell: Bell,
    epoll: Epoll,
    timer: Timer,
    manager: Arc<EventChannel>,
    devices: Devices,
    /// One for each device in use, until it is removed; by its descriptor's token.
    channels: Mutex<HashMap<u64, Arc<CompletionChannel>>>,
    state: Mutex<LaneState>,
    /// Held by whoever drives: only then are queue pairs and completion queues destroyed. Taken before any other lock.
    driver: Mutex<Driver>,
    region_count: AtomicUsize,
    /// Words watched.
    watch_count: AtomicUsize,
    half_open_count: Arc<AtomicUsize>,
    /// An answer may come soon.
    was_posted: AtomicBool,
}

/// Everything is found by its token: a number of the same sequence that queue pairs have.
#[derive(Default)]
struct LaneState {
    places: Places,
    ends: HashMap<u64, Arc<End>>,
    /// The same, those whose turn is next in front.
    order: VecDeque<Arc<End>>,
    listeners: HashMap<u64, (Identifier, SocketAddr)>,
    closing: HashMap<u64, Closing>,
    outbox: VecDeque<Event>,
}

#[derive(Default)]
struct Driver {
    /// Turns since the descriptors were looked at.
    turns: u32,
    /// The lane was armed: the next turn and the first one awake look at the descriptors.
    looks_due: u32,
    /// The last pause of the timer, if nothing has come since.
    pause: Option<Duration>,
}

/// Ends of all lanes by number: a device tells one process as a whole what went wrong with a queue pair.
static ENDS: Mutex<Option<HashMap<u64, std::sync::Weak<End>>>> = Mutex::new(None);

/// A peer that waits for an answer.
struct Pending {
    id: Identifier,
    terms: Terms,
    counted: Counted,
}

impl super::Pending for Pending {
    fn reject(self: Box<Self>, private_data: &[u8]) {
        if let Err(error) = self.id.reject(private_data) {
            tracing::debug!(%error, "a peer was not told that it is rejected");
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl LaneShared {
    /// Where the completions of `device` are announced.
    fn channel_of(&self, device: &Arc<Device>) -> io::Result<Arc<CompletionChannel>> {
        let mut channels = lock(&self.channels);
        if let Some(channel) = channels.values().find(|channel| Arc::ptr_eq(channel.device(), device)) {
            return Ok(Arc::clone(channel));
        }
        let channel = Arc::new(CompletionChannel::new(Arc::clone(device))?);
        // The numbers of queue pairs begin there, and none comes twice.
        let token = CHANNELS + QpNum::next().0;
        self.epoll.add(channel.as_fd(), token, true, false)?;
        channels.insert(token, Arc::clone(&channel));
        Ok(channel)
    }

    /// Reads what the device says about faults, for whichever lane.
    fn mark_misused(&self, device: &Device) {
        let ends = lock(&ENDS);
        device.poll_faults(|number, what| {
            let end = ends.as_ref().and_then(|ends| ends.get(&number)).and_then(std::sync::Weak::upgrade);
            if let Some(end) = end {
                // What it says first is the cause.
                let _ = end.fault.set(what.to_str().unwrap_or("a fault"));
            }
        });
    }

    fn end(
        self: &Arc<Self>,
        attributes: Attributes,
        id: Identifier,
        number: QpNum,
        phase: Phase,
        terms: Terms,
    ) -> Result<Box<dyn QueuePair>, FabricError> {
        let place = lock(&self.state).places.take();
        let place = place.ok_or_else(|| system("find a place for a queue pair")(io::ErrorKind::OutOfMemory.into()))?;
        let end = match End::new(self, number, place, attributes, id, phase, terms) {
            Ok(end) => Arc::new(end),
            Err(error) => {
                lock(&self.state).places.give_back(place);
                return Err(system("make a queue pair")(error));
            }
        };
        lock(&ENDS).get_or_insert_default().insert(number.0, Arc::downgrade(&end));
        let mut state = lock(&self.state);
        state.ends.insert(number.0, Arc::clone(&end));
        state.order.push_back(Arc::clone(&end));
        drop(state);
        // A lane asleep has not armed this queue yet.
        self.bell.ring();
        Ok(Box::new(VerbsQueuePair { end }))
    }

    /// One end's turn. `true` when there is more to do for it.
    fn turn(&self, end: &Arc<End>, now: Instant) -> bool {
        let turn = end.turn(now);
        let mut state = lock(&self.state);
        state.outbox.extend(turn.events);
        if turn.over {
            state.ends.remove(&end.number.0);
            state.order.retain(|other| !Arc::ptr_eq(other, end));
            state.places.give_back(end.place);
            state.closing.extend(turn.closing.map(|closing| (end.number.0, closing)));
            drop(state);
            if let Some(ends) = &mut *lock(&ENDS) {
                ends.remove(&end.number.0);
            }
        }
        turn.more
    }

    fn handle(&self, token: u64, happened: Happened) {
        if matches!(happened, Happened::Removed)
            && let Some(device) = self.devices.remove(token)
        {
            // Its connections and its listener hear of it themselves; with the last of them it is closed.
            tracing::debug!(device = device.name(), "an RDMA device was removed");
            lock(&self.channels).retain(|_, channel| !Arc::ptr_eq(channel.device(), &device));
            return;
        }
        let mut state = lock(&self.state);
        if let Some(end) = state.ends.get(&token).cloned() {
            drop(state);
            let mut events = Vec::new();
            end.handle(happened, &mut events);
            lock(&self.state).outbox.extend(events);
            return;
        }
        match happened {
            Happened::Request { id, terms, private_data } => {
                let listener = state.listeners.get(&token).map(|(_, address)| *address);
                let (Some(listener), Some(peer)) = (listener, id.peer()) else { return };
                // Upper layers here Read from whoever dials. That it Reads itself is its own affair: Linux's NFS client
                // does not.
                if terms.is_deaf() {
                    tracing::debug!(%peer, ?terms, "a peer that serves no Reads was refused");
                    drop(state);
                    let _ = id.reject(&[]);
                    return;
                }
                // Events of it belong to nobody until it is admitted.
                id.set_token(QpNum::next().0);
                let pending = Box::new(Pending { id, terms, counted: Counted::new(&self.half_open_count) });
                let (peer, listener) = (Address::Socket(peer), Address::Socket(listener));
                let request = ConnectRequest::new(peer, listener, private_data, pending);
                state.outbox.push_back(Event::ConnectRequest(request));
            }
            Happened::Removed if state.listeners.contains_key(&token) => {
                let gone = state.listeners.remove(&token);
                drop(state);
                if let Some((_, address)) = gone {
                    tracing::error!(%address, "the RDMA device of a door was removed: nobody can connect there any more");
                }
            }
            Happened::Disconnected | Happened::Removed => {
                let closed = state.closing.remove(&token);
                drop(state);
                drop(closed);
            }
            _ => {}
        }
    }

    /// What the descriptors say.
    fn look(&self) -> io::Result<bool> {
        let mut ready = Vec::new();
        self.epoll.poll(&mut ready)?;
        let mut more = ready.len() == READY_COUNT_MAX;
        for ready in ready {
            match ready.token {
                // What they stand for may have come after this turn's look at it.
                BELL => {
                    let _ = self.bell.silence();
                    more = true;
                }
                TIMER => {
                    self.timer.silence();
                    more = true;
                }
                MANAGER => {
                    let mut count = 0;
                    while count < MANAGER_EVENTS_MAX
                        && let Some((token, happened)) = self.manager.poll()?
                    {
                        self.handle(token, happened);
                        count += 1;
                    }
                    more |= count > 0;
                }
                token => {
                    let channel = lock(&self.channels).get(&token).cloned();
                    while let Some(number) = channel.as_ref().and_then(|channel| channel.poll()) {
                        if let Some(end) = lock(&self.state).ends.get(&number) {
                            end.is_armed.store(false, Ordering::SeqCst);
                        }
                        more = true;
                    }
                }
            }
        }
        Ok(more)
    }

    fn expire(&self, now: Instant) {
        let mut state = lock(&self.state);
        let late: Vec<_> = state.closing.extract_if(|_, closing| closing.deadline <= now).collect();
        drop(state);
        drop(late);
    }

    fn ends(&self) -> Vec<Arc<End>> {
        lock(&self.state).order.iter().cloned().collect()
    }
}

impl Lane for VerbsLane {
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError> {
        let Address::Socket(mut socket) = *address else { return Err(FabricError::Address(address.clone())) };
        let token = QpNum::next().0;
        let id = Identifier::new(&self.shared.manager, token).map_err(system("make an identifier"))?;
        id.bind(socket).and_then(|()| id.listen(BACKLOG)).map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => FabricError::AddressInUse(address.clone()),
            _ => FabricError::System { what: "listen", source },
        })?;
        socket.set_port(id.port());
        lock(&self.shared.state).listeners.insert(token, (id, socket));
        Ok(Box::new(VerbsListener { address: socket, token, lane: Arc::clone(&self.shared) }))
    }

    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        let Address::Socket(peer) = *address else { return Err(FabricError::Address(address.clone())) };
        let attributes = grant(attributes)?;
        let number = QpNum::next();
        let id = Identifier::new(&self.shared.manager, number.0).map_err(system("make an identifier"))?;
        // Memory is registered before the peer is asked, so the device must be known now: it is that of the address from
        // which this machine would send to the peer. Nothing is sent for this.
        let bound = source_towards(peer).and_then(|source| id.bind(source));
        bound.map_err(system("find the RDMA device towards the peer"))?;
        let terms = Terms { reads_in: u8::MAX, reads_out: u8::MAX };
        self.shared.end(attributes, id, number, Phase::Dialled(peer), terms)
    }

    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        let pending = request.into_pending::<Pending>()?;
        let attributes = match grant(attributes) {
            Ok(attributes) => attributes,
            Err(error) => {
                super::Pending::reject(pending, &[]);
                return Err(error);
            }
        };
        let Pending { mut id, terms, counted } = *pending;
        let number = QpNum::next();
        id.set_token(number.0);
        id.migrate(&self.shared.manager).map_err(system("take a connection over"))?;
        self.shared.end(attributes, id, number, Phase::Admitted { _counted: counted }, terms)
    }

    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool {
        let shared = &self.shared;
        let mut driver = lock(&shared.driver);
        shared.bell.look();
        shared.expire(now);
        let mut more = false;
        let mut turns = lock(&shared.state).order.len();
        while turns > 0 {
            turns -= 1;
            let mut state = lock(&shared.state);
            if state.outbox.len() >= events_max {
                more = true;
                break;
            }
            let Some(end) = state.order.pop_front() else { break };
            state.order.push_back(Arc::clone(&end));
            drop(state);
            more |= shared.turn(&end, now);
        }
        driver.turns += 1;
        let is_due = driver.looks_due > 0 || driver.turns >= TURNS_PER_LOOK;
        if is_due && lock(&shared.state).outbox.len() < events_max {
            driver.turns = 0;
            driver.looks_due = driver.looks_due.saturating_sub(1);
            match shared.look() {
                Ok(found) => more |= found,
                Err(error) => tracing::error!(%error, "a lane cannot look at its descriptors"),
            }
        }
        let mut state = lock(&shared.state);
        let count = state.outbox.len().min(events_max);
        if count > 0 {
            driver.pause = None;
        }
        events.extend(state.outbox.drain(..count));
        more || !state.outbox.is_empty()
    }

    fn arm(&self) {
        let shared = &self.shared;
        let mut driver = lock(&shared.driver);
        driver.looks_due = 2;
        shared.bell.arm();
        for end in shared.ends() {
            end.arm();
        }
        if shared.watch_count.load(Ordering::SeqCst) > 0 {
            if shared.was_posted.swap(false, Ordering::Relaxed) {
                driver.pause = None;
            }
            let pause = driver.pause.map_or(WATCH_MIN, |pause| (pause * 2).min(WATCH_MAX));
            driver.pause = Some(pause);
            if let Err(error) = shared.timer.set(pause) {
                tracing::error!(%error, "a lane cannot set its timer");
            }
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }

    fn deadline(&self) -> Option<Instant> {
        let ends = self.shared.ends();
        let closing = lock(&self.shared.state).closing.values().map(|closing| closing.deadline).min();
        ends.iter().filter_map(|end| end.deadline()).chain(closing).min()
    }

    fn wakes_for_writes(&self) -> bool {
        false
    }

    fn resources(&self) -> Resources {
        let state = lock(&self.shared.state);
        Resources {
            queue_pairs: state.ends.len(),
            regions: self.shared.region_count.load(Ordering::Relaxed),
            half_open: self.shared.half_open_count.load(Ordering::Relaxed),
            listeners: state.listeners.len(),
            closing: state.closing.len(),
        }
    }
}

impl Drop for VerbsLane {
    fn drop(&mut self) {
        // Ends and lane own each other until the last event; nobody will ask for that one now.
        let driver = lock(&self.shared.driver);
        for end in self.shared.ends() {
            end.fail(Cause::Local);
            self.shared.turn(&end, Instant::now());
        }
        drop(driver);
        let state = std::mem::take(&mut *lock(&self.shared.state));
        drop(state);
    }
}

impl fmt::Debug for VerbsLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsLane").field("resources", &self.resources()).finish()
    }
}

/// The address from which this machine sends to `peer`, says its routing table. Connecting a datagram socket sends nothing.
fn source_towards(peer: SocketAddr) -> io::Result<SocketAddr> {
    let any: SocketAddr = match peer {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(peer)?;
    let mut source = socket.local_addr()?;
    source.set_port(0);
    Ok(source)
}

struct VerbsListener {
    address: SocketAddr,
    token: u64,
    lane: Arc<LaneShared>,
}

impl Listener for VerbsListener {
    fn address(&self) -> Address {
        Address::Socket(self.address)
    }
}

impl Drop for VerbsListener {
    fn drop(&mut self) {
        let gone = lock(&self.lane.state).listeners.remove(&self.token);
        drop(gone);
    }
}

impl fmt::Debug for VerbsListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsListener").field("address", &self.address).finish()
    }
}

struct VerbsQueuePair {
    end: Arc<End>,
}

impl QueuePair for VerbsQueuePair {
    fn number(&self) -> QpNum {
        self.end.number
    }

    fn attributes(&self) -> Attributes {
        self.end.attributes()
    }

    fn allocate(&self, buf_bytes: usize, count: usize) -> Result<Vec<LocalBuf>, FabricError> {
        self.end.allocate(buf_bytes, count).map_err(system("allocate registered buffers"))
    }

    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        if !span.is_aligned() {
            return Err(FabricError::Unaligned);
        }
        self.end.register(span, access)
    }

    fn can_be_invalidated(&self) -> bool {
        self.end.pd.device().has_windows()
    }

    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        if private_data.len() > PRIVATE_DATA_BYTES_MAX {
            return Err(FabricError::PrivateDataTooLong { len: private_data.len() });
        }
        self.end.establish(private_data)?;
        self.end.lane.bell.ring();
        Ok(())
    }

    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        let id = self.end.post(work)?;
        self.end.lane.was_posted.store(true, Ordering::Relaxed);
        self.end.lane.bell.ring();
        Ok(id)
    }

    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        self.end.post_receive(buf)
    }

    fn kick(&self) {}

    fn disconnect(&self) {
        self.end.fail(Cause::Local);
        self.end.lane.bell.ring();
    }
}

impl Drop for VerbsQueuePair {
    fn drop(&mut self) {
        self.end.take_unanswered();
        self.disconnect();
    }
}

impl fmt::Debug for VerbsQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsQueuePair").field("number", &self.end.number).finish()
    }
}
