//! Reads and writes of extents: one io_uring per lane, or a few blocking threads where io_uring is refused.
//!
//! [`TailIo`] is the one interface to both. An [`Operation`] is given away with everything it needs (buffer, file, and
//! in its tag whatever keeps the extent allocated) and comes back in a [`Completion`], never before the kernel or the
//! thread is done with it. Both backends raise the same eventfd, so their owner waits in the same way.
//!
//! ```text
//!             start                submit             reap
//!  Operation ───────► in-flight ───────────► kernel ───────► Completion { operation, result }
//!                     table      ▲                     │
//!                                └── short, EINTR ─────┘
//! ```
//! With `fabric::{region, sys}` this module and those below it are the only ones with `unsafe`.

mod blocking;
mod queue;
mod ring;
pub(crate) mod sys;

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;

use tokio::io::unix::AsyncFd;
use tracing::{debug, warn};

use super::pool::{EXTENT_ALIGN, PoolFile};
use crate::fabric::LocalBuf;
pub use crate::fabric::region::aligned::{AlignedBuf, AlignedPiece, Region};
use crate::fabric::staging::StagingBuf;
use blocking::Blocking;
pub use queue::{Direction, DriveQueue};
use ring::Ring;

/// An error number of the system.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Errno(pub i32);

impl Errno {
    /// The number in `error`, or `EIO` where it has none.
    pub fn of(error: &io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

/// Memory that is written to disk from where it lies, kept alive and in place by its owner.
///
/// The first octet is aligned as O_DIRECT asks (4 KiB suffices), and the slice reaches to the end of the last 4 KiB
/// that is written. The owner must return the same slice from every `as_ref`.
pub struct WriteSource {
    owner: Box<dyn AsRef<[u8]> + Send>,
}

impl WriteSource {
    /// Takes `owner` along until the write is done.
    pub fn new(owner: impl AsRef<[u8]> + Send + 'static) -> Self {
        Self { owner: Box::new(owner) }
    }

    /// All octets of the owner.
    pub fn as_slice(&self) -> &[u8] {
        (*self.owner).as_ref()
    }
}

impl fmt::Debug for WriteSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteSource").field("len", &self.as_slice().len()).finish()
    }
}

/// The memory of an [`Operation`], which owns it; its kind is the direction.
#[derive(Debug)]
pub enum Payload {
    /// Filled from the file.
    Read(StagingBuf),
    /// Filled from the file: memory that a queue pair sends from, with no need of a copy.
    ReadSlot(LocalBuf),
    /// Written to the file.
    Write(WriteSource),
}

impl Payload {
    /// Which way its octets go.
    pub fn direction(&self) -> Direction {
        match self {
            Self::Read(_) | Self::ReadSlot(_) => Direction::Read,
            Self::Write(_) => Direction::Write,
        }
    }

    fn byte_len(&self) -> usize {
        match self {
            Self::Read(buf) => buf.as_slice().len(),
            Self::ReadSlot(buf) => buf.len(),
            Self::Write(from) => from.as_slice().len(),
        }
    }
}

/// One transfer between memory and a file, with whatever its owner wants back with the result.
#[derive(Debug)]
pub struct Operation<T> {
    file: Arc<PoolFile>,
    offset: u64,
    len: u32,
    /// The memory.
    pub payload: Payload,
    /// The owner's.
    pub tag: T,
}

impl<T> Operation<T> {
    /// Moves `len` octets at `offset`, both multiples of 4 KiB, within the file and within the memory.
    ///
    /// # Errors
    /// `EINVAL` with payload and tag back when one of these does not hold, or `len` is zero.
    pub fn new(
        file: Arc<PoolFile>,
        offset: u64,
        len: u32,
        payload: Payload,
        tag: T,
    ) -> Result<Self, (Errno, Payload, T)> {
        let aligned = offset.is_multiple_of(EXTENT_ALIGN) && u64::from(len).is_multiple_of(EXTENT_ALIGN) && len != 0;
        let within = offset.checked_add(len.into()).is_some_and(|end| end <= file.byte_len());
        if !aligned || !within || (len as usize) > payload.byte_len() {
            return Err((Errno(libc::EINVAL), payload, tag));
        }
        Ok(Self { file, offset, len, payload, tag })
    }
}

/// An operation that is done, one way or the other.
#[derive(Debug)]
pub struct Completion<T> {
    /// Memory and tag, as given.
    pub operation: Operation<T>,
    /// Whether all of it was moved.
    pub result: Result<(), Errno>,
}

/// Which backend moves the bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Backend {
    /// io_uring if the kernel gives one, else blocking threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Ring,
    /// pread and pwrite on a few threads.
    Blocking,
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::Ring),
            "blocking" => Ok(Self::Blocking),
            _ => Err(format!("disk backend is auto, io_uring or blocking, not {text:?}")),
        }
    }
}

/// What became of [`TailIo::submit`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Submitted {
    /// Everything started is on its way.
    All,
    /// The kernel is short of something for a moment: submit again soon.
    Again,
}

/// The disk as one lane sees it. Lives and dies on the thread that made it.
///
/// Dropping it waits for everything in flight; what comes back then is dropped. Call [`wait_all`](Self::wait_all)
/// first to have it.
pub struct TailIo<T: Send + 'static> {
    backend: Inner<T>,
    wake: Arc<OwnedFd>,
}

enum Inner<T: Send + 'static> {
    Ring(Box<Ring<T>>),
    Blocking(Blocking<T>),
}

impl<T: Send + 'static> TailIo<T> {
    /// Room for `in_flight_max` operations at once (bounded to 4,096); reads into pieces of `region` use registered
    /// memory where the kernel allows it.
    ///
    /// # Errors
    /// With [`Backend::Ring`] why there is no ring; else no descriptor or no thread could be had.
    pub fn new(backend: Backend, in_flight_max: usize, region: &Region) -> io::Result<Self> {
        let wake = Arc::new(sys::eventfd()?);
        let in_flight_max = in_flight_max.clamp(1, 4096);
        if backend != Backend::Blocking {
            match Ring::new(in_flight_max, region, &wake) {
                Ok(ring) => return Ok(Self { backend: Inner::Ring(Box::new(ring)), wake }),
                Err(error) if backend == Backend::Ring => return Err(error),
                Err(error) => warn!(%error, "no io_uring here: disk I/O goes through blocking threads"),
            }
        }
        let blocking = Blocking::new(in_flight_max, Arc::clone(&wake))?;
        Ok(Self { backend: Inner::Blocking(blocking), wake })
    }

    /// An eventfd that is readable whenever something may have completed: read its 8 octets, then
    /// [`reap`](Self::reap).
    ///
    /// # Errors
    /// No descriptor left, or none that can be watched.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn watch(&self) -> io::Result<AsyncFd<File>> {
        sys::watch(File::from(self.wake.try_clone()?))
    }

    /// Whether io_uring moves the bytes.
    pub fn is_ring(&self) -> bool {
        matches!(self.backend, Inner::Ring(_))
    }

    /// Operations started and not yet reaped.
    pub fn in_flight(&self) -> usize {
        match &self.backend {
            Inner::Ring(ring) => ring.in_flight(),
            Inner::Blocking(blocking) => blocking.in_flight(),
        }
    }

    /// Whether one more operation may be started.
    pub fn has_room(&self) -> bool {
        match &self.backend {
            Inner::Ring(ring) => ring.has_room(),
            Inner::Blocking(blocking) => blocking.has_room(),
        }
    }

    /// Takes an operation; it moves after the next [`submit`](Self::submit).
    ///
    /// # Panics
    /// Without [room](Self::has_room).
    pub fn start(&mut self, operation: Operation<T>) {
        assert!(self.has_room(), "the caller bounds what it starts");
        match &mut self.backend {
            Inner::Ring(ring) => ring.start(operation),
            Inner::Blocking(blocking) => blocking.start(operation),
        }
    }

    /// Hands everything started to the kernel, in one call.
    ///
    /// # Errors
    /// A broken ring; nothing more can be expected of it.
    pub fn submit(&mut self) -> io::Result<Submitted> {
        match &mut self.backend {
            Inner::Ring(ring) => ring.submit(),
            Inner::Blocking(_) => Ok(Submitted::All),
        }
    }

    /// Appends everything completed to `done`. Operations that have to go on (a short transfer, an interruption) are
    /// started again: [`submit`](Self::submit) after reaping.
    pub fn reap(&mut self, done: &mut VecDeque<Completion<T>>) {
        match &mut self.backend {
            Inner::Ring(ring) => ring.reap(done),
            Inner::Blocking(blocking) => blocking.reap(done),
        }
    }

    /// Blocks until nothing is in flight and appends what completed to `done`. Only for the end of a lane.
    pub fn wait_all(&mut self, done: &mut VecDeque<Completion<T>>) {
        match &mut self.backend {
            Inner::Ring(ring) => ring.wait_all(done),
            Inner::Blocking(blocking) => blocking.wait_all(done),
        }
    }
}

/// How far an operation has come, whoever moves its bytes.
#[derive(Clone, Copy, Debug)]
struct Progress {
    done: u32,
    len: u32,
    retries: u32,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    /// Move the rest, from `done` on.
    Again,
    Done(Result<(), Errno>),
}

impl Progress {
    /// Interruptions in a row after which an operation is given up: a system that says "again" so often will not stop.
    const RETRIES_MAX: u32 = 1000;

    fn new(len: u32) -> Self {
        Self { done: 0, len, retries: 0 }
    }

    /// Judges the result of moving `len - done` octets from `done` on.
    fn advance(&mut self, moved: Result<u32, Errno>) -> Step {
        match moved {
            Err(Errno(libc::EINTR | libc::EAGAIN)) if self.retries < Self::RETRIES_MAX => {
                self.retries += 1;
                Step::Again
            }
            Err(errno) => Step::Done(Err(errno)),
            Ok(moved) => {
                let reached = self.done.saturating_add(moved).min(self.len);
                if reached == self.len {
                    return Step::Done(Ok(()));
                }
                // O_DIRECT goes on at aligned offsets only. A step that does not reach the next one is the end of a
                // file that somebody truncated, and going on would never end.
                let aligned = reached - reached % EXTENT_ALIGN as u32;
                if aligned == self.done {
                    return Step::Done(Err(Errno(libc::EIO)));
                }
                debug!(done = aligned, len = self.len, "short transfer goes on");
                self.done = aligned;
                self.retries = 0;
                Step::Again
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::staging::{STAGING_BUF_BYTES, Staging};
    use crate::store::pool::{PoolDir, PoolFiles};

    const BACKENDS: [Backend; 2] = [Backend::Auto, Backend::Blocking];

    fn pool(bytes: u64) -> (tempfile::TempDir, PoolFiles) {
        let temp = tempfile::tempdir().unwrap();
        let files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(bytes)).unwrap());
        files.grow().unwrap().unwrap();
        (temp, files)
    }

    fn filled(staging: &Staging, seed: u8) -> StagingBuf {
        let mut buf = staging.try_take().unwrap();
        for (at, byte) in buf.as_mut_slice().iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed;
        }
        buf
    }

    fn run<T: Send>(io: &mut TailIo<T>, operation: Operation<T>) -> Completion<T> {
        io.start(operation);
        let mut done = VecDeque::new();
        io.submit().unwrap();
        while done.is_empty() {
            io.reap(&mut done);
            io.submit().unwrap();
            std::thread::yield_now();
        }
        done.pop_front().unwrap()
    }

    #[test]
    fn what_was_written_is_read_back_by_either_backend() {
        for backend in BACKENDS {
            let (_temp, files) = pool(2 << 20);
            let staging = Staging::new(4).unwrap();
            let mut io = TailIo::new(backend, 8, staging.region()).unwrap();
            let file = files.file(0).unwrap();
            for (seed, (offset, len)) in (1..).zip([(0, 4096), (4096, 8192), (1 << 20, STAGING_BUF_BYTES as u32)]) {
                let expected = filled(&staging, seed);
                let source = WriteSource::new(filled(&staging, seed));
                let write = Operation::new(file.clone(), offset, len, Payload::Write(source), seed).unwrap();
                let completion = run(&mut io, write);
                assert_eq!((completion.result, completion.operation.tag), (Ok(()), seed));
                drop(completion);
                let into = staging.try_take().unwrap();
                let read = Operation::new(file.clone(), offset, len, Payload::Read(into), seed).unwrap();
                let completion = run(&mut io, read);
                assert_eq!(completion.result, Ok(()));
                let Payload::Read(buf) = completion.operation.payload else { panic!("a read stays one") };
                assert!(buf.as_slice()[..len as usize] == expected.as_slice()[..len as usize]);
            }
            assert_eq!((io.in_flight(), staging.available()), (0, 4));
        }
    }

    #[test]
    fn a_buffer_of_another_pool_is_read_into_all_the_same() {
        for backend in BACKENDS {
            let (_temp, files) = pool(1 << 20);
            let (staging, other) = (Staging::new(1).unwrap(), Staging::new(1).unwrap());
            let mut io = TailIo::new(backend, 1, staging.region()).unwrap();
            let mut foreign = other.try_take().unwrap();
            foreign.as_mut_slice().fill(0xff);
            let read = Operation::new(files.file(0).unwrap(), 0, 4096, Payload::Read(foreign), ()).unwrap();
            let completion = run(&mut io, read);
            assert_eq!(completion.result, Ok(()));
            let Payload::Read(buf) = completion.operation.payload else { panic!("a read stays one") };
            assert!(buf.is_of(other.region()));
            assert!(buf.as_slice()[..4096].iter().all(|&byte| byte == 0), "a fresh file reads as zeros");
            assert!(buf.as_slice()[4096..].iter().all(|&byte| byte == 0xff));
        }
    }

    #[test]
    fn a_truncated_file_is_an_error_and_the_buffer_comes_back() {
        for backend in BACKENDS {
            let (_temp, files) = pool(1 << 20);
            let staging = Staging::new(1).unwrap();
            let mut io = TailIo::new(backend, 1, staging.region()).unwrap();
            let file = files.file(0).unwrap();
            for end in [0, 4096, 70_000] {
                file.as_file().set_len(end).unwrap();
                let into = staging.try_take().unwrap();
                let read = Operation::new(file.clone(), 0, 131_072, Payload::Read(into), ()).unwrap();
                assert_eq!(run(&mut io, read).result, Err(Errno(libc::EIO)), "{backend:?}, {end}");
                assert_eq!(staging.available(), 1);
            }
        }
    }

    #[test]
    fn dropping_waits_for_everything_in_flight() {
        for backend in BACKENDS {
            let (_temp, files) = pool(2 << 20);
            let staging = Staging::new(8).unwrap();
            let keep = Arc::new(());
            let mut io = TailIo::new(backend, 8, staging.region()).unwrap();
            for at in 0..8 {
                let into = staging.try_take().unwrap();
                let len = STAGING_BUF_BYTES as u32;
                let payload = Payload::Read(into);
                let file = files.file(0).unwrap();
                io.start(Operation::new(file, at * u64::from(len), len, payload, keep.clone()).unwrap());
                // Half of them stay unsubmitted: those too come back.
                if at == 3 {
                    io.submit().unwrap();
                }
            }
            assert!(!io.has_room());
            drop(io);
            assert_eq!((staging.available(), Arc::strong_count(&keep)), (8, 1));
        }
    }

    #[test]
    fn more_files_than_are_registered_at_first_are_reached() {
        let temp = tempfile::tempdir().unwrap();
        let pools: Vec<_> = (0..3)
            .map(|at| {
                let dir = PoolDir::open(&temp.path().join(at.to_string()), Some(1 << 20)).unwrap();
                let files = PoolFiles::new(dir);
                files.grow().unwrap().unwrap();
                files.file(0).unwrap()
            })
            .collect();
        let staging = Staging::new(2).unwrap();
        let mut io = TailIo::new(Backend::Auto, 2, staging.region()).unwrap();
        for (seed, file) in (1..).zip(&pools) {
            let source = WriteSource::new(filled(&staging, seed));
            let write = Operation::new(file.clone(), 0, 4096, Payload::Write(source), ()).unwrap();
            assert_eq!(run(&mut io, write).result, Ok(()));
        }
        for (seed, file) in (1..).zip(&pools) {
            let read = Operation::new(file.clone(), 0, 4096, Payload::Read(staging.try_take().unwrap()), ()).unwrap();
            let completion = run(&mut io, read);
            let Payload::Read(buf) = &completion.operation.payload else { panic!("a read stays one") };
            assert_eq!(buf.as_slice()[0], seed);
        }
    }

    #[test]
    fn an_operation_outside_its_file_or_memory_is_refused_with_everything_back() {
        let (_temp, files) = pool(1 << 20);
        let staging = Staging::new(1).unwrap();
        for (offset, len) in [(1 << 20, 4096), (0, 0), (0, 4097), (512, 4096), (u64::MAX - 4095, 4096), (0, 1 << 19)] {
            let payload = Payload::Read(staging.try_take().unwrap());
            let (errno, payload, tag) = Operation::new(files.file(0).unwrap(), offset, len, payload, 7).unwrap_err();
            assert_eq!((errno, tag), (Errno(libc::EINVAL), 7));
            drop(payload);
            assert_eq!(staging.available(), 1);
        }
    }

    #[test]
    fn short_transfers_go_on_at_aligned_offsets_and_interruptions_are_repeated() {
        let mut progress = Progress::new(16384);
        assert_eq!(progress.advance(Err(Errno(libc::EINTR))), Step::Again);
        assert_eq!(progress.advance(Err(Errno(libc::EAGAIN))), Step::Again);
        assert_eq!(progress.advance(Ok(4096 + 512)), Step::Again);
        assert_eq!(progress.done, 4096);
        assert_eq!(progress.advance(Ok(8192)), Step::Again);
        assert_eq!(progress.done, 12288);
        assert_eq!(progress.advance(Ok(4096)), Step::Done(Ok(())));
        assert_eq!(Progress::new(4096).advance(Ok(0)), Step::Done(Err(Errno(libc::EIO))));
        assert_eq!(Progress::new(4096).advance(Ok(4095)), Step::Done(Err(Errno(libc::EIO))));
        assert_eq!(Progress::new(4096).advance(Err(Errno(libc::ENOSPC))), Step::Done(Err(Errno(libc::ENOSPC))));
    }

    #[test]
    fn a_system_that_never_stops_interrupting_is_an_error_at_last() {
        let mut progress = Progress::new(4096);
        for _ in 0..Progress::RETRIES_MAX {
            assert_eq!(progress.advance(Err(Errno(libc::EAGAIN))), Step::Again);
        }
        assert_eq!(progress.advance(Err(Errno(libc::EAGAIN))), Step::Done(Err(Errno(libc::EAGAIN))));
    }

    #[test]
    fn backends_have_names() {
        assert_eq!("auto".parse(), Ok(Backend::Auto));
        assert_eq!("io_uring".parse(), Ok(Backend::Ring));
        assert_eq!("blocking".parse(), Ok(Backend::Blocking));
        assert!("aio".parse::<Backend>().is_err());
    }
}
