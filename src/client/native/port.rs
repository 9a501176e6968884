//! An endpoint attached to a queue pair: the memory behind it, its posts, its completions.
//!
//! ```text
//!   Prepared::new(queue pair, geometry)   ring, windows and slots exist; descriptor() tells of them
//!        | establish() ... the peer's private data
//!        v
//!   attach(peer, machine) -> Port         poll_ring, endpoint.step, endpoint.poll_fill, poll_post
//! ```

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use crate::fabric::{
    Access, Attributes, Completion, Event, Flags, LocalBuf, MemoryRegion, PostError, QpNum, QueuePair, SharedSpan,
    Source, Status, Work, WorkKind,
};
use crate::wire::native::descriptor::{Descriptor, GeometryError, Nonce, RemoteAddress, RingGeometry, WindowGeometry};
use crate::wire::native::egress::{Post, WorkId};
use crate::wire::native::endpoint::{EndCause, Endpoint, Settings};
use crate::wire::native::ring::{COMMIT_BYTES, RECORD_BYTES_MAX};
use crate::wire::native::stream::PIPELINE_BYTES_MAX;
use crate::wire::native::window::{RxLease, Ticket};

/// Records taken out of the ring in one turn, at most: answers are read in between.
const RECORD_COUNT_MAX: usize = 64;
/// Octets of the Read that fetches the peer's counter.
const COUNTER_BYTES: usize = 8;
/// Pause before posts that the queue refused are tried again.
const POST_PAUSE: Duration = Duration::from_millis(1);
const PAGE_BYTES: u64 = 4096;

/// How one side's memory is divided. Each side has its own; neither need know the other's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Geometry {
    /// Octets of the control ring: 256 for each record, at least two.
    pub ring_bytes: u64,
    /// Octets of a window: a power of two, at least 4,096.
    pub window_bytes: u64,
    /// Windows to receive into, and as many slots to send from.
    pub window_count: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self { ring_bytes: 64 << 10, window_bytes: 256 << 10, window_count: 4 }
    }
}

impl Geometry {
    /// Ring and windows, checked.
    ///
    /// # Errors
    /// [`GeometryError`].
    pub fn parts(self) -> Result<(RingGeometry, WindowGeometry), GeometryError> {
        let windows = WindowGeometry::new(self.window_bytes, self.window_count)?;
        Ok((RingGeometry::within(self.ring_bytes)?, windows))
    }
}

/// What a queue pair for this protocol must be able to do: no Receives, and one Read at a time.
pub fn attributes(handshake_timeout: Duration) -> Attributes {
    Attributes { receive_depth: 1, read_depth: 1, handshake_timeout, ..Attributes::default() }
}

/// A queue pair with its memory, before the peer is known.
#[derive(Debug)]
pub struct Prepared {
    qp: Box<dyn QueuePair>,
    own: Descriptor,
    ring: MemoryRegion,
    windows: MemoryRegion,
    slots: Vec<LocalBuf>,
    readback: Vec<LocalBuf>,
}

impl Prepared {
    /// Makes ring, windows and slots, and opens the first two to the peer.
    ///
    /// # Errors
    /// `InvalidInput` for a geometry that cannot be had; `OutOfMemory`, and what else the fabric says.
    pub fn new(qp: Box<dyn QueuePair>, geometry: Geometry, nonce: Nonce) -> io::Result<Self> {
        let invalid = |error: GeometryError| io::Error::new(io::ErrorKind::InvalidInput, error.to_string());
        let (ring_geometry, windows_geometry) = geometry.parts().map_err(invalid)?;
        if qp.attributes().inline_bytes_max < RECORD_BYTES_MAX + COMMIT_BYTES {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the fabric carries no control record inline"));
        }
        let ring_bytes = ring_geometry.mapping_bytes(PAGE_BYTES);
        let span = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other).and_then(SharedSpan::new);
        let ring = qp.register(span(ring_bytes)?, Access::BOTH).map_err(io::Error::other)?;
        let windows = qp.register(span(windows_geometry.half_bytes())?, Access::WRITE).map_err(io::Error::other)?;
        let window_bytes = windows_geometry.window_bytes() as usize;
        let slots = qp.allocate(window_bytes, geometry.window_count as usize).map_err(io::Error::other)?;
        let readback = qp.allocate(COUNTER_BYTES, 1).map_err(io::Error::other)?;
        let bulk_address = windows_geometry.bulk_address(windows.remote().address);
        let bulk_address = bulk_address.ok_or_else(|| io::Error::other("a region too low to be described"))?;
        let at = |address, key| RemoteAddress { address, key };
        let own = Descriptor {
            ring: ring_geometry,
            ring_at: at(ring.remote().address, ring.key()),
            ring_bytes: u32::try_from(ring_bytes).map_err(io::Error::other)?,
            nonce,
            windows: windows_geometry,
            bulk_at: at(bulk_address, windows.key()),
        };
        Ok(Self { qp, own, ring, windows, slots, readback })
    }

    /// What to tell the peer.
    pub fn descriptor(&self) -> &Descriptor {
        &self.own
    }

    /// The memory of the own control ring.
    pub fn ring(&self) -> &SharedSpan {
        self.ring.span()
    }

    /// The queue pair's name in events.
    pub fn number(&self) -> QpNum {
        self.qp.number()
    }

    /// Asks, or accepts, with the descriptor as private data.
    ///
    /// # Errors
    /// What the fabric says.
    pub fn establish(&self) -> io::Result<()> {
        self.qp.establish(&self.own.encode()).map_err(io::Error::other)
    }

    /// The endpoint, now that the peer's descriptor is known. Its time begins `now`.
    pub fn attach<V: Clone, M>(
        self,
        peer: Descriptor,
        machine: M,
        stall_timeout: Duration,
        now: Instant,
    ) -> Port<V, M> {
        let queue_depth = u32::try_from(self.qp.attributes().send_depth).unwrap_or(u32::MAX);
        let settings =
            Settings { own: self.own, peer, queue_depth, pipeline_bytes_max: PIPELINE_BYTES_MAX, stall_timeout };
        Port {
            endpoint: Endpoint::new(settings, machine),
            qp: self.qp,
            ring: self.ring,
            windows: self.windows,
            slots: self.slots.into_iter().map(Some).collect(),
            readback: self.readback.into_iter().next(),
            reported: VecDeque::new(),
            work: Vec::new(),
            posted: Vec::new(),
            retry_at: None,
            is_closed: false,
            started: now,
        }
    }
}

/// An endpoint with all that it needs of a fabric. The owner drives the lane and brings the events.
#[derive(Debug)]
pub struct Port<V, M> {
    /// What decides. Its `poll_ring`, `poll_post` and completions go through the methods here.
    pub endpoint: Endpoint<V, M>,
    qp: Box<dyn QueuePair>,
    ring: MemoryRegion,
    windows: MemoryRegion,
    /// By index; `None` while the fabric has it.
    slots: Vec<Option<LocalBuf>>,
    readback: Option<LocalBuf>,
    /// Requests whose success will be reported: the fabric's number and the endpoint's.
    reported: VecDeque<(u32, WorkId)>,
    work: Vec<Work>,
    /// For each of `work`, the endpoint's number if it will be reported.
    posted: Vec<Option<WorkId>>,
    /// When to post again what the queue refused.
    retry_at: Option<Instant>,
    /// The queue pair takes nothing more.
    is_closed: bool,
    started: Instant,
}

impl<V: Clone, M> Port<V, M> {
    /// The queue pair's name in events.
    pub fn number(&self) -> QpNum {
        self.qp.number()
    }

    /// Time as the endpoint counts it.
    pub fn time(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    /// When [`Port::poll_ring`] and [`Port::poll_post`] want to be called though nothing happened.
    pub fn deadline(&self) -> Option<Instant> {
        let deadline = self.endpoint.deadline().and_then(|deadline| self.started.checked_add(deadline));
        [deadline, self.retry_at].into_iter().flatten().min()
    }

    /// Takes records out of the own ring; gives their number.
    ///
    /// # Errors
    /// [`EndCause`].
    pub fn poll_ring(&mut self, now: Instant) -> Result<usize, EndCause> {
        let now = self.time(now);
        self.endpoint.poll_ring(&self.ring, now, RECORD_COUNT_MAX)
    }

    /// The memory that a lease names a part of, from [`RxLease::offset`] on.
    pub fn windows(&self) -> &SharedSpan {
        self.windows.span()
    }

    /// Copies all octets of a lease to the front of `into`.
    ///
    /// # Panics
    /// If `into` is shorter.
    pub fn copy_out(&self, lease: &RxLease, into: &mut [u8]) {
        self.windows().copy_out(lease.offset() as usize, &mut into[..lease.len() as usize]);
    }

    /// The slot of a grant, to be filled from its front.
    ///
    /// # Panics
    /// If that slot was not granted.
    pub fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        self.slots[slot as usize].as_mut().expect("a granted slot is not with the fabric").as_mut_slice()
    }

    /// A slot is filled, see [`Endpoint::handle_filled`].
    pub fn handle_filled(&mut self, ticket: Ticket) {
        self.endpoint.handle_filled(ticket);
    }

    /// A request ended.
    ///
    /// # Errors
    /// [`EndCause`].
    pub fn handle_completed(&mut self, completion: Completion, now: Instant) -> Result<(), EndCause> {
        let Completion { id, kind, status, buf, .. } = completion;
        let mut counter = 0;
        if let Some(buf) = buf {
            match kind {
                WorkKind::Read => {
                    counter = buf.as_slice().first_chunk().copied().map_or(0, u64::from_le_bytes);
                    self.readback = Some(buf);
                }
                WorkKind::Write | WorkKind::Send | WorkKind::Receive => {
                    let index = buf.index();
                    self.slots[index] = Some(buf);
                }
            }
        }
        if status != Status::Done {
            // The end of the connection is on its way, and says why.
            self.is_closed = true;
            return Ok(());
        }
        match self.reported.front() {
            Some((index, work)) if *index == id.index => {
                let (work, now) = (*work, self.time(now));
                self.reported.pop_front();
                self.endpoint.handle_completion(work, || counter, now)
            }
            _ => Ok(()),
        }
    }

    /// Posts all that can be; gives the number of posts. The fabric starts at once. What it refuses for want of room is
    /// kept and tried again, see [`Port::deadline`].
    ///
    /// # Errors
    /// [`EndCause`].
    pub fn poll_post(&mut self, now: Instant) -> Result<usize, EndCause> {
        if self.is_closed {
            return Ok(0);
        }
        let time = self.time(now);
        while let Some(post) = self.endpoint.poll_post(time)? {
            self.take(post);
        }
        if self.work.is_empty() || self.retry_at.is_some_and(|at| now < at) {
            return Ok(0);
        }
        self.retry_at = None;
        let count = self.work.len();
        match self.qp.post(&mut self.work) {
            Ok(first) => {
                let indices = (0..).map(|at: u32| first.index.wrapping_add(at));
                let reported = indices.zip(self.posted.drain(..)).filter_map(|(index, id)| id.map(|id| (index, id)));
                self.reported.extend(reported);
                self.qp.kick();
            }
            Err(PostError::Ended | PostError::NotConnected) => self.is_closed = true,
            // The endpoint counts what is in flight, so it is not our queue that is full: the device is short of memory.
            Err(PostError::Full { .. }) => {
                self.retry_at = Some(now + POST_PAUSE);
                return Ok(0);
            }
            // The endpoint cuts to what was granted.
            Err(error) => panic!("{count} requests were refused: {error}"),
        }
        Ok(count)
    }

    fn take(&mut self, post: Post) {
        let control = |to: RemoteAddress, octets: &[u8], signaled| Work::Write {
            from: Source::Inline(octets.to_vec()),
            key: to.key,
            address: to.address,
            flags: Flags { signaled, ..Flags::default() },
        };
        match post {
            Post::Control { id, to, write, signaled } => {
                self.work.push(control(to, write.octets(), signaled));
                self.posted.push(signaled.then_some(id));
            }
            Post::Body { id, slot, len, to, ready_to, ready, .. } => {
                let buf = self.slots[slot as usize].take().expect("a filled slot is not with the fabric");
                let from = Source::Buffer { buf, range: 0..len as usize };
                let write = Work::Write { from, key: to.key, address: to.address, flags: Flags::SIGNALED };
                self.work.extend([write, control(ready_to, ready.octets(), false)]);
                self.posted.extend([Some(id), None]);
            }
            Post::Credits { id, from } => {
                let into = self.readback.take().expect("one Read is in flight at a time");
                let (key, address, flags) = (from.key, from.address, Flags::SIGNALED);
                self.work.push(Work::Read { into, range: 0..COUNTER_BYTES, key, address, flags });
                self.posted.push(Some(id));
            }
        }
    }

    /// Whether `event` belongs to this queue pair.
    pub fn owns(&self, event: &Event) -> bool {
        event.qp() == Some(self.qp.number())
    }

    /// Ends the connection. Its events go on to the last, which is for [`Port::handle_disconnected`].
    pub fn disconnect(&mut self) {
        self.is_closed = true;
        self.qp.disconnect();
    }

    /// The last event of the queue pair has come: whatever was to be sent stays here.
    pub fn handle_disconnected(&mut self) {
        (self.is_closed, self.retry_at) = (true, None);
        self.endpoint.handle_disconnected();
        for work in self.work.drain(..) {
            match work {
                Work::Write { from: Source::Buffer { buf, .. }, .. } => {
                    let index = buf.index();
                    self.slots[index] = Some(buf);
                }
                Work::Read { into, .. } => self.readback = Some(into),
                Work::Write { .. } | Work::Send { .. } => {}
            }
        }
    }

    /// After [`Port::handle_disconnected`]: every fill was answered, every lease dropped, every buffer is back. Nothing is
    /// lost when this is dropped now.
    pub fn is_released(&self) -> bool {
        self.endpoint.is_released() && self.readback.is_some() && self.slots.iter().all(Option::is_some)
    }
}
