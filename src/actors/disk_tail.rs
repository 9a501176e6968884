//! `DiskTail`: the disk as one lane sees it. Segments go to and come from their extents; every block is checked.
//!
//! One turn of the actor's I/O future: reap all that completed, start what the queues of the drives give, submit it in
//! one call, then check and answer a few completions. So the disk works while checksums are taken, and other actors of
//! the lane run between two turns.
//!
//! ```text
//!  ReadTail ──► queue ──► in flight ──► CRC ──► TailRead     every message is answered exactly once,
//!  WriteTail ─► queue ──► CRC, in flight ─────► TailWritten  after Stop with `Cancelled` if it was not started
//! ```
//! A read goes into a staging buffer of the lane, or straight into memory that a queue pair sends from. Either is owned by
//! the request, then by the table of what is in flight, then by the answer: nobody else can reach it meanwhile.
//!
//! Only a message that is still in the mailbox when the actor ends, or comes later, is not answered; what it carries is
//! dropped and so goes home. Whoever ends a lane stops those who ask before those who answer.

use std::any::Any;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{self, Poll, Waker};
use std::time::{Duration, Instant};

use actix::prelude::*;
use thiserror::Error;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tracing::{error, warn};

use crate::fabric::LocalBuf;
use crate::fabric::staging::{STAGING_BUF_BYTES, Staging, StagingBuf};
use crate::store::location::DriveLoad;
use crate::store::pool::{CRC_BLOCK_BYTES, CRC_BLOCK_COUNT, EXTENT_ALIGN, ExtentId, PoolFiles, block_crcs};
use crate::store::uring::{
    Backend, Completion, Direction, DriveQueue, Errno, Operation, Payload, Submitted, TailIo, WriteSource,
};

/// Keeps an extent allocated while somebody reads or writes it.
pub type Keep = Arc<dyn Any + Send + Sync>;

/// Reads the first `len` octets of the segment in `extent` into a [`StagingBuf`] or a [`LocalBuf`], and checks them there.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ReadTail<B: Send + 'static = StagingBuf> {
    /// Where the segment lies.
    pub extent: ExtentId,
    /// Octets wanted, at most 256 KiB: the segment's length, or a multiple of 64 KiB below it (part of a block cannot
    /// be checked).
    pub len: u32,
    /// CRC32C of each block, as [`TailWritten`] gave them.
    pub crcs: [u32; CRC_BLOCK_COUNT],
    /// At least `len` octets, rounded up to 4 KiB. Comes back in the answer; a buffer of the lane's own pool is the fastest
    /// for the disk, one of a queue pair needs no copy afterwards.
    pub into: B,
    /// Let go after the answer.
    pub keep: Keep,
    /// The asker's, repeated in the answer.
    pub ticket: u64,
    /// Who gets the answer.
    pub reply: Recipient<TailRead<B>>,
}

/// The answer to [`ReadTail`]: the same buffer, always.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct TailRead<B: Send + 'static = StagingBuf> {
    /// As in the request.
    pub ticket: u64,
    /// The buffer of the request.
    pub buf: B,
    /// With `Ok` the first `len` octets of `buf` are the segment's; otherwise and beyond it holds anything.
    pub result: Result<(), TailError>,
}

/// Writes a segment of `len` octets to `extent`, rounded up to 4 KiB.
#[derive(Message)]
#[rtype(result = "()")]
pub struct WriteTail {
    /// Where the segment shall lie.
    pub extent: ExtentId,
    /// Octets of the segment, at most 256 KiB.
    pub len: u32,
    /// The segment and what follows it in memory up to the next 4 KiB; must not change until the answer.
    pub from: WriteSource,
    /// Let go after the answer.
    pub keep: Keep,
    /// The asker's, repeated in the answer.
    pub ticket: u64,
    /// Who gets the answer.
    pub reply: Recipient<TailWritten>,
}

/// The answer to [`WriteTail`]; the source has been dropped before it is sent.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct TailWritten {
    /// As in the request.
    pub ticket: u64,
    /// CRC32C of each 64 KiB of the segment, the last one perhaps shorter; zero for blocks it does not have.
    pub result: Result<[u32; CRC_BLOCK_COUNT], TailError>,
}

/// Ends the actor: what waits is cancelled, what the kernel has is awaited and answered. Resolves after the last
/// answer was sent.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stop;

/// For tests: reads that the disk has done are answered only after the next `HoldReads(false)`, or at the end.
#[cfg(test)]
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct HoldReads(pub bool);

/// For tests: called whenever a read goes to the kernel.
#[cfg(test)]
#[derive(Message)]
#[rtype(result = "()")]
pub struct OnRead(pub Box<dyn Fn(ExtentId) + Send>);

/// Why a segment did not move.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum TailError {
    /// The system's error; `EIO` also when the file ends too early, `EINVAL` and `ENXIO` for an extent, length or
    /// memory that cannot be.
    #[error("disk: {0}")]
    Io(Errno),
    /// Block `block` of the segment, from zero, is not what was written.
    #[error("checksum of block {block} does not match")]
    Checksum {
        /// Index of the first bad block.
        block: usize,
    },
    /// The actor was stopped first.
    #[error("cancelled")]
    Cancelled,
}

/// What all `DiskTail`s that share it have done.
#[derive(Debug, Default)]
pub struct TailMetrics {
    /// Segments read and found good.
    pub reads: AtomicU64,
    /// Segments written.
    pub writes: AtomicU64,
    /// Octets asked for by `reads`.
    pub read_bytes: AtomicU64,
    /// Octets of the segments in `writes`, without padding.
    pub write_bytes: AtomicU64,
    /// Reads the system failed.
    pub read_errors: AtomicU64,
    /// Writes the system failed.
    pub write_errors: AtomicU64,
    /// Reads whose checksum did not match.
    pub checksum_failures: AtomicU64,
    /// Reads and writes cancelled by a stop.
    pub cancelled: AtomicU64,
    /// Gauge: operations the kernel or a thread has now.
    pub in_flight: AtomicU64,
    /// Gauge: reads and writes that wait for a place at their drive.
    pub waiting: AtomicU64,
}

fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

fn sub(gauge: &AtomicU64, by: u64) {
    gauge.fetch_sub(by, Ordering::Relaxed);
}

/// Completions checked and answered in one turn: 8 segments of 256 KiB take about 0.15 ms of checksums.
const ANSWERS_PER_TURN: usize = 8;
/// Writes summed and started in one turn, for the same reason.
const WRITES_PER_TURN: usize = 8;
/// Pause before submitting again when the kernel is short of memory.
const SUBMIT_PAUSE: Duration = Duration::from_millis(1);

/// Owns one ring (or its substitute) and a queue per drive.
///
/// Its mailbox is used by `do_send` alone: a read carries a staging buffer or (part of) a slot of a connection and a write the
/// claim on dirty memory, so all are bounded where those are handed out.
pub struct DiskTail {
    drives: Arc<[Arc<PoolFiles>]>,
    staging: Staging,
    depth: usize,
    backend: Backend,
    metrics: Arc<TailMetrics>,
    /// One for each drive, or none.
    loads: Arc<[DriveLoad]>,
    queues: Vec<DriveQueue<Job>>,
    /// `None` before the start, and after a start that failed.
    io: Option<TailIo<Ticket>>,
    start_error: Errno,
    /// Completed, not yet answered.
    done: VecDeque<Completion<Ticket>>,
    waker: Option<Waker>,
    stopping: bool,
    stop_waiters: Vec<oneshot::Sender<()>>,
    #[cfg(test)]
    probe: Probe,
}

#[cfg(test)]
#[derive(Default)]
struct Probe {
    holds: bool,
    held: VecDeque<Completion<Ticket>>,
    on_read: Option<Box<dyn Fn(ExtentId) + Send>>,
}

/// What is asked for: where it lies, the memory, and the rest.
struct Job {
    extent: ExtentId,
    payload: Payload,
    tag: Ticket,
}

/// What travels with an operation: all of the message but its memory.
struct Ticket {
    drive: u16,
    len: u32,
    /// When it went to the disk.
    started: Option<Instant>,
    /// Expected by a read, taken by a write.
    crcs: [u32; CRC_BLOCK_COUNT],
    /// Dropped with the ticket, once the answer is sent.
    _keep: Keep,
    ticket: u64,
    reply: Reply,
}

enum Reply {
    Read(Recipient<TailRead>),
    ReadSlot(Recipient<TailRead<LocalBuf>>),
    Write(Recipient<TailWritten>),
}

impl Job {
    fn read<B: Send>(read: ReadTail<B>, payload: fn(B) -> Payload, reply: fn(Recipient<TailRead<B>>) -> Reply) -> Self {
        let ReadTail { extent, len, crcs, into, keep, ticket, reply: to } = read;
        let tag = Ticket { drive: extent.drive(), len, started: None, crcs, _keep: keep, ticket, reply: reply(to) };
        Self { extent, payload: payload(into), tag }
    }

    fn write(write: WriteTail) -> Self {
        let WriteTail { extent, len, from, keep, ticket, reply } = write;
        let (crcs, reply) = (Default::default(), Reply::Write(reply));
        let tag = Ticket { drive: extent.drive(), len, started: None, crcs, _keep: keep, ticket, reply };
        Self { extent, payload: Payload::Write(from), tag }
    }
}

impl DiskTail {
    /// One lane's tail over `drives`, whose indexes extents name, with `depth` (at least 1) operations at each drive.
    /// Reads into buffers of `staging` are the fastest. Not `Send`: make it on the lane's thread.
    pub fn new(drives: Arc<[Arc<PoolFiles>]>, staging: Staging, depth: usize, metrics: Arc<TailMetrics>) -> Self {
        let depth = depth.max(1);
        Self {
            queues: drives.iter().map(|_| DriveQueue::new(depth)).collect(),
            drives,
            staging,
            depth,
            backend: Backend::Auto,
            metrics,
            loads: Arc::default(),
            io: None,
            start_error: Errno(libc::ENXIO),
            done: VecDeque::new(),
            waker: None,
            stopping: false,
            stop_waiters: Vec::new(),
            #[cfg(test)]
            probe: Probe::default(),
        }
    }

    /// Chooses what moves the bytes, before the start.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Tells what it sees of the drives to `loads`, before the start.
    #[must_use]
    pub fn with_loads(mut self, loads: Arc<[DriveLoad]>) -> Self {
        self.loads = loads;
        self
    }

    fn handle_job(&mut self, job: Job) {
        if self.stopping {
            self.refuse(job, TailError::Cancelled);
        } else if self.io.is_none() {
            self.refuse(job, TailError::Io(self.start_error));
        } else if let Some(queue) = self.queues.get_mut(usize::from(job.extent.drive())) {
            let (direction, drive) = (job.payload.direction(), usize::from(job.extent.drive()));
            queue.push(direction, job);
            if direction == Direction::Read
                && let Some(load) = self.loads.get(drive)
            {
                load.add_waiting(1);
            }
            add(&self.metrics.waiting, 1);
            // The I/O future runs once after all messages that are there, and submits for all of them.
            self.wake();
        } else {
            self.refuse(job, TailError::Io(Errno(libc::ENXIO)));
        }
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn begin_stop(&mut self) {
        self.stopping = true;
        #[cfg(test)]
        self.hold_reads(false);
        self.cancel_waiting();
        self.wake();
    }

    fn cancel_waiting(&mut self) {
        let waiting: Vec<Job> = self.queues.iter_mut().flat_map(DriveQueue::drain).collect();
        sub(&self.metrics.waiting, waiting.len() as u64);
        for job in waiting {
            self.handle_no_longer_waiting(&job);
            self.refuse(job, TailError::Cancelled);
        }
    }

    fn handle_no_longer_waiting(&self, job: &Job) {
        if job.payload.direction() == Direction::Read
            && let Some(load) = self.loads.get(usize::from(job.extent.drive()))
        {
            load.sub_waiting(1);
        }
    }

    /// Operations started and not answered.
    fn outstanding(&self) -> usize {
        let at_disk = self.io.as_ref().map_or(0, TailIo::in_flight);
        #[cfg(test)]
        let at_disk = at_disk + self.probe.held.len();
        self.done.len() + at_disk
    }

    #[cfg(test)]
    fn hold_reads(&mut self, holds: bool) {
        self.probe.holds = holds;
        if !holds {
            self.done.append(&mut self.probe.held);
            self.wake();
        }
    }

    fn reap(&mut self) {
        let Some(io) = &mut self.io else { return };
        let known = self.done.len();
        io.reap(&mut self.done);
        self.handle_reaped(known);
    }

    /// Frees the drives' places of all but the first `known` completions.
    fn handle_reaped(&mut self, known: usize) {
        if self.done.len() == known {
            return;
        }
        let now = Instant::now();
        for completion in self.done.range(known..) {
            let Operation { payload, tag, .. } = &completion.operation;
            if let (Direction::Read, Ok(()), Some(started), Some(load)) =
                (payload.direction(), completion.result, tag.started, self.loads.get(usize::from(tag.drive)))
            {
                load.handle_read(now.duration_since(started));
            }
            self.queues[usize::from(tag.drive)].handle_done(payload.direction());
        }
        sub(&self.metrics.in_flight, (self.done.len() - known) as u64);
    }

    /// Starts what the drives have places for; `true` if more may be started in the next turn.
    fn start_waiting(&mut self) -> bool {
        let mut writes_left = WRITES_PER_TURN;
        for drive in 0..self.queues.len() {
            while self.io.as_ref().is_some_and(TailIo::has_room) {
                if writes_left == 0 {
                    return true;
                }
                let Some(job) = self.queues[drive].pop() else { break };
                sub(&self.metrics.waiting, 1);
                self.handle_no_longer_waiting(&job);
                let direction = job.payload.direction();
                if direction == Direction::Write {
                    writes_left -= 1;
                }
                if !self.start(job) {
                    self.queues[drive].handle_done(direction);
                }
            }
        }
        false
    }

    /// Starts a job, or answers it and returns `false`.
    fn start(&mut self, job: Job) -> bool {
        let len = job.tag.len;
        if len == 0 {
            self.answer(job.payload, job.tag, Ok(()));
            return false;
        }
        let drive = &self.drives[usize::from(job.extent.drive())];
        let Some(file) = drive.file(job.extent.file()) else {
            self.refuse(job, TailError::Io(Errno(libc::ENXIO)));
            return false;
        };
        let moved = u64::from(len).next_multiple_of(EXTENT_ALIGN);
        if len as usize > STAGING_BUF_BYTES || moved > job.extent.byte_len() {
            self.refuse(job, TailError::Io(Errno(libc::EINVAL)));
            return false;
        }
        let Job { extent, payload, mut tag } = job;
        if let Payload::Write(from) = &payload {
            // A source that is too short is refused below.
            tag.crcs = from.as_slice().get(..len as usize).map_or_else(Default::default, block_crcs);
        }
        tag.started = Some(Instant::now());
        match Operation::new(file, extent.byte_offset(), moved as u32, payload, tag) {
            Ok(operation) => {
                #[cfg(test)]
                if let (Some(on_read), Direction::Read) = (&self.probe.on_read, operation.payload.direction()) {
                    on_read(extent);
                }
                self.io.as_mut().expect("checked by the caller").start(operation);
                add(&self.metrics.in_flight, 1);
                true
            }
            Err((errno, payload, tag)) => {
                self.answer(payload, tag, Err(errno));
                false
            }
        }
    }

    fn answer_some(&mut self) {
        for _ in 0..ANSWERS_PER_TURN {
            let Some(completion) = self.done.pop_front() else { break };
            #[cfg(test)]
            if self.probe.holds && completion.operation.payload.direction() == Direction::Read {
                self.probe.held.push_back(completion);
                continue;
            }
            let Completion { operation, result } = completion;
            self.answer(operation.payload, operation.tag, result);
        }
    }

    /// Answers a job that the disk has done, or needs no disk.
    fn answer(&self, payload: Payload, tag: Ticket, result: Result<(), Errno>) {
        let Ticket { len, crcs, .. } = tag;
        let result = match (&payload, result) {
            (_, Err(errno)) => Err(TailError::Io(errno)),
            (Payload::Read(buf), Ok(())) => verify(&buf.as_slice()[..len as usize], &crcs),
            (Payload::ReadSlot(buf), Ok(())) => verify(&buf.as_slice()[..len as usize], &crcs),
            (Payload::Write(_), Ok(())) => Ok(()),
        };
        let metrics = &self.metrics;
        match (result, payload.direction()) {
            (Ok(()), Direction::Read) => {
                add(&metrics.reads, 1);
                add(&metrics.read_bytes, len.into());
            }
            (Ok(()), Direction::Write) => {
                add(&metrics.writes, 1);
                add(&metrics.write_bytes, len.into());
            }
            (Err(error), direction) => self.count_failure(error, direction),
        }
        Self::reply(payload, tag, result);
    }

    /// Answers a job that never reached the disk.
    fn refuse(&self, job: Job, error: TailError) {
        self.count_failure(error, job.payload.direction());
        Self::reply(job.payload, job.tag, Err(error));
    }

    fn count_failure(&self, error: TailError, direction: Direction) {
        let counter = match (error, direction) {
            (TailError::Cancelled, _) => &self.metrics.cancelled,
            (TailError::Checksum { .. }, _) => &self.metrics.checksum_failures,
            (_, Direction::Read) => &self.metrics.read_errors,
            (_, Direction::Write) => &self.metrics.write_errors,
        };
        add(counter, 1);
    }

    fn reply(payload: Payload, tag: Ticket, result: Result<(), TailError>) {
        let ticket = tag.ticket;
        match (payload, &tag.reply) {
            (Payload::Read(buf), Reply::Read(reply)) => reply.do_send(TailRead { ticket, buf, result }),
            (Payload::ReadSlot(buf), Reply::ReadSlot(reply)) => reply.do_send(TailRead { ticket, buf, result }),
            (Payload::Write(from), Reply::Write(reply)) => {
                drop(from);
                reply.do_send(TailWritten { ticket, result: result.map(|()| tag.crcs) });
            }
            _ => unreachable!("a job is made of a pair"),
        }
    }

    fn open(&mut self) -> io::Result<IoFuture> {
        let in_flight_max = self.depth.saturating_mul(self.drives.len());
        let io = TailIo::new(self.backend, in_flight_max, self.staging.region())?;
        let wake = io.watch()?;
        self.io = Some(io);
        self.loads.iter().for_each(|load| load.add_places(self.depth as u64));
        Ok(IoFuture { wake, pause: None })
    }
}

fn verify(segment: &[u8], crcs: &[u32; CRC_BLOCK_COUNT]) -> Result<(), TailError> {
    for (block, (octets, &crc)) in segment.chunks(CRC_BLOCK_BYTES).zip(crcs).enumerate() {
        if crc32c::crc32c(octets) != crc {
            return Err(TailError::Checksum { block });
        }
    }
    Ok(())
}

/// The actor's own future: woken by the eventfd, by handlers that queued something, and by itself while there is more
/// to answer. Never a message to itself, which would keep the lane from everything else.
struct IoFuture {
    wake: AsyncFd<File>,
    pause: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl IoFuture {
    /// Takes the wakes that are there and asks for the next.
    fn clear_wakes(&mut self, task: &mut task::Context<'_>) {
        while let Poll::Ready(ready) = self.wake.poll_read_ready(task) {
            // An error means that the runtime is ending; dropping the actor then awaits what is in flight.
            let Ok(mut guard) = ready else { return };
            // One read takes the whole count. "Nothing to read" is the state wanted.
            let _ = guard.get_inner().read(&mut [0; 8]);
            guard.clear_ready();
        }
    }
}

impl ActorFuture<DiskTail> for IoFuture {
    type Output = ();

    fn poll(
        mut self: Pin<&mut Self>,
        tail: &mut DiskTail,
        ctx: &mut Context<DiskTail>,
        task: &mut task::Context<'_>,
    ) -> Poll<()> {
        // Before reaping: a completion after the reap wakes again.
        self.clear_wakes(task);
        tail.reap();
        let more = tail.start_waiting();
        let submitted = match &mut tail.io {
            Some(io) => io.submit(),
            None => Ok(Submitted::All),
        };
        self.pause = match submitted {
            Ok(Submitted::All) => None,
            Ok(Submitted::Again) => {
                let mut pause = Box::pin(tokio::time::sleep(SUBMIT_PAUSE));
                if pause.as_mut().poll(task).is_ready() {
                    task.waker().wake_by_ref();
                }
                Some(pause)
            }
            // The kernel takes nothing any more from a ring that it took from before: a bug, here or there.
            Err(error) => panic!("io_uring refuses its own entries: {error}"),
        };
        tail.answer_some();

        if more || !tail.done.is_empty() {
            task.waker().wake_by_ref();
        } else if tail.outstanding() == 0 && (tail.stopping || !ctx.connected()) {
            ctx.stop();
            return Poll::Ready(());
        }
        tail.waker = Some(task.waker().clone());
        Poll::Pending
    }
}

impl Actor for DiskTail {
    type Context = Context<Self>;

    /// The ring is made here, on the lane's thread, which alone may use it.
    fn started(&mut self, ctx: &mut Self::Context) {
        match self.open() {
            Ok(future) => {
                ctx.spawn(future);
            }
            Err(error) => {
                error!(%error, "no disk I/O on this lane: every request will fail");
                self.start_error = Errno::of(&error);
            }
        }
    }

    /// Whoever stops the actor, it stays until the kernel has given everything back.
    fn stopping(&mut self, _: &mut Self::Context) -> Running {
        if !self.stopping {
            self.begin_stop();
        }
        if self.outstanding() == 0 { Running::Stop } else { Running::Continue }
    }

    fn stopped(&mut self, _: &mut Self::Context) {
        for waiter in self.stop_waiters.drain(..) {
            // Who no longer waits need not know.
            let _ = waiter.send(());
        }
    }
}

impl Drop for DiskTail {
    /// The end of an Arbiter drops its actors without asking. Nothing is lost even then: the kernel is awaited and
    /// everybody is answered.
    fn drop(&mut self) {
        self.cancel_waiting();
        #[cfg(test)]
        self.hold_reads(false);
        if let Some(io) = &mut self.io {
            self.loads.iter().for_each(|load| load.sub_places(self.depth as u64));
            if io.in_flight() > 0 {
                warn!(in_flight = io.in_flight(), "lane ends while the disk works: waiting for it");
            }
            let known = self.done.len();
            io.wait_all(&mut self.done);
            self.handle_reaped(known);
        }
        while !self.done.is_empty() {
            self.answer_some();
        }
    }
}

impl Handler<ReadTail> for DiskTail {
    type Result = ();

    fn handle(&mut self, read: ReadTail, _: &mut Self::Context) {
        self.handle_job(Job::read(read, Payload::Read, Reply::Read));
    }
}

impl Handler<ReadTail<LocalBuf>> for DiskTail {
    type Result = ();

    fn handle(&mut self, read: ReadTail<LocalBuf>, _: &mut Self::Context) {
        self.handle_job(Job::read(read, Payload::ReadSlot, Reply::ReadSlot));
    }
}

impl Handler<WriteTail> for DiskTail {
    type Result = ();

    fn handle(&mut self, write: WriteTail, _: &mut Self::Context) {
        self.handle_job(Job::write(write));
    }
}

#[cfg(test)]
impl Handler<HoldReads> for DiskTail {
    type Result = ();

    fn handle(&mut self, hold: HoldReads, _: &mut Self::Context) {
        self.hold_reads(hold.0);
    }
}

#[cfg(test)]
impl Handler<OnRead> for DiskTail {
    type Result = ();

    fn handle(&mut self, on_read: OnRead, _: &mut Self::Context) {
        self.probe.on_read = Some(on_read.0);
    }
}

impl Handler<Stop> for DiskTail {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) -> Self::Result {
        let (waiter, stopped) = oneshot::channel();
        self.stop_waiters.push(waiter);
        self.begin_stop();
        if self.io.is_none() {
            ctx.stop();
        }
        Box::pin(async move {
            // Dropped unsent only with the actor, which is the same news.
            let _ = stopped.await;
        })
    }
}

#[cfg(test)]
mod tests;
