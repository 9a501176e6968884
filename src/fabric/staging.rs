//! A lane's pool of 256 KiB buffers between disk and wire, fixed at start.
//!
//! Each buffer has one owner at a time and goes home when dropped, wherever that happens: in a reply, in the in-flight
//! table of a ring, in a message to an actor that has ended. So the pool can neither leak nor hand a buffer out twice.

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Semaphore;

use super::region::aligned::{AlignedBuf, AlignedPiece, Region};

/// Bytes of one staging buffer: the longest segment of a value.
pub const STAGING_BUF_BYTES: usize = 256 * 1024;

/// Most buffers of one pool: a ring registers no more (`IORING_MAX_REG_BUFFERS`). 4 GiB.
pub const STAGING_COUNT_MAX: usize = 1 << 14;

/// A pool of [`StagingBuf`]s in one region. Clones share it.
#[derive(Clone)]
pub struct Staging {
    shared: Arc<Shared>,
}

struct Shared {
    region: Region,
    count: usize,
    /// Never fewer pieces than `permits`: a piece is put back before its permit is.
    free: Mutex<Vec<AlignedPiece>>,
    /// One permit per free buffer; it is what makes waiting fair: a returned buffer belongs to the longest waiter.
    permits: Arc<Semaphore>,
}

impl Staging {
    /// A pool of `count` buffers of 256 KiB, from 1 to [`STAGING_COUNT_MAX`].
    ///
    /// # Errors
    /// `InvalidInput` for another count, else what the system says when it has no such memory.
    pub fn new(count: usize) -> io::Result<Self> {
        if count == 0 || count > STAGING_COUNT_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a staging pool has 1 to {STAGING_COUNT_MAX} buffers, not {count}"),
            ));
        }
        let (region, pieces) = AlignedBuf::new(count * STAGING_BUF_BYTES)?.split(STAGING_BUF_BYTES);
        let permits = Arc::new(Semaphore::new(count));
        Ok(Self { shared: Arc::new(Shared { region, count, free: Mutex::new(pieces), permits }) })
    }

    /// Buffers of the pool, out or in.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Buffers nobody has and nobody was promised.
    pub fn available(&self) -> usize {
        self.shared.permits.available_permits()
    }

    /// A buffer if one is free now. Never overtakes those who wait in [`take`](Self::take).
    pub fn try_take(&self) -> Option<StagingBuf> {
        self.shared.permits.try_acquire().ok()?.forget();
        Some(self.hand_out())
    }

    /// A buffer as soon as one is free, in the order of asking (from the first poll). Dropping the future gives its
    /// place, or the buffer it was just given, to the next.
    pub fn take(&self) -> impl Future<Output = StagingBuf> + Send + 'static + use<> {
        let staging = self.clone();
        async move {
            let permits = Arc::clone(&staging.shared.permits);
            permits.acquire().await.expect("the semaphore is never closed").forget();
            staging.hand_out()
        }
    }

    /// The whole region, for registration with a ring.
    pub fn region(&self) -> &Region {
        &self.shared.region
    }

    /// The caller has taken a permit.
    fn hand_out(&self) -> StagingBuf {
        let piece = self.shared.free().pop().expect("a permit stands for a piece that is there");
        StagingBuf { piece: Some(piece), home: Arc::clone(&self.shared) }
    }
}

impl Shared {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<AlignedPiece>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staging").field("count", &self.count()).field("available", &self.available()).finish()
    }
}

/// One buffer of 256 KiB, aligned to 4 KiB, with a stable address. Holds whatever its last owner left in it.
pub struct StagingBuf {
    /// `None` only inside `drop`.
    piece: Option<AlignedPiece>,
    home: Arc<Shared>,
}

impl StagingBuf {
    /// Position in its region, from zero: the index of the registered buffer.
    pub fn index(&self) -> u16 {
        u16::try_from(self.piece().index()).expect("a pool has at most 2^14 buffers")
    }

    /// Whether the buffer was cut from `region`.
    pub fn is_of(&self, region: &Region) -> bool {
        self.piece().is_of(region)
    }

    /// All 256 KiB.
    pub fn as_slice(&self) -> &[u8] {
        self.piece().as_slice()
    }

    /// All 256 KiB, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.piece.as_mut().expect("taken only in drop").as_mut_slice()
    }

    fn piece(&self) -> &AlignedPiece {
        self.piece.as_ref().expect("taken only in drop")
    }
}

impl AsRef<[u8]> for StagingBuf {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl Drop for StagingBuf {
    fn drop(&mut self) {
        if let Some(piece) = self.piece.take() {
            self.home.free().push(piece);
            self.home.permits.add_permits(1);
        }
    }
}

impl std::fmt::Debug for StagingBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StagingBuf").field("index", &self.index()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_distinct_and_come_home_on_drop() {
        let staging = Staging::new(3).unwrap();
        let mut bufs: Vec<_> = std::iter::from_fn(|| staging.try_take()).collect();
        assert_eq!((bufs.len(), staging.available()), (3, 0));
        let mut indexes: Vec<_> = bufs.iter().map(StagingBuf::index).collect();
        indexes.sort_unstable();
        assert_eq!(indexes, [0, 1, 2]);
        for (value, buf) in (1..).zip(&mut bufs) {
            buf.as_mut_slice().fill(value);
        }
        for (value, buf) in (1..).zip(&bufs) {
            assert_eq!(buf.as_slice().len(), STAGING_BUF_BYTES);
            assert!(buf.as_slice().iter().all(|&byte| byte == value));
        }
        bufs.pop();
        assert_eq!(staging.available(), 1);
        drop(bufs);
        assert_eq!(staging.available(), 3);
    }

    #[test]
    fn a_pool_of_none_or_too_many_is_refused() {
        assert!(Staging::new(0).is_err());
        assert!(Staging::new(STAGING_COUNT_MAX + 1).is_err());
    }

    #[test]
    fn a_buffer_outlives_the_handle_of_its_pool() {
        let staging = Staging::new(1).unwrap();
        let mut buf = staging.try_take().unwrap();
        drop(staging);
        buf.as_mut_slice().fill(7);
        assert_eq!(buf.as_slice()[STAGING_BUF_BYTES - 1], 7);
    }

    #[tokio::test]
    async fn the_longest_waiter_gets_the_returned_buffer_and_nobody_overtakes() {
        let staging = Staging::new(1).unwrap();
        let held = staging.try_take().unwrap();
        let mut first = Box::pin(staging.take());
        let mut second = Box::pin(staging.take());
        assert!(futures_poll(&mut first).is_none());
        assert!(futures_poll(&mut second).is_none());
        drop(held);
        assert!(staging.try_take().is_none(), "the buffer belongs to the first waiter already");
        assert!(futures_poll(&mut second).is_none());
        let buf = futures_poll(&mut first).expect("the first waiter's turn");
        drop(buf);
        drop(futures_poll(&mut second).expect("then the second's"));
        assert_eq!(staging.available(), 1);
    }

    #[tokio::test]
    async fn a_waiter_that_gives_up_passes_its_buffer_on() {
        let staging = Staging::new(1).unwrap();
        let held = staging.try_take().unwrap();
        let mut first = Box::pin(staging.take());
        let mut second = Box::pin(staging.take());
        assert!(futures_poll(&mut first).is_none());
        assert!(futures_poll(&mut second).is_none());
        drop(held);
        drop(first);
        assert!(futures_poll(&mut second).is_some());
    }

    #[test]
    fn threads_that_take_and_drop_never_share_a_buffer() {
        let staging = Staging::new(4).unwrap();
        std::thread::scope(|scope| {
            for value in 0..8u8 {
                let staging = &staging;
                scope.spawn(move || {
                    for _ in 0..200 {
                        let Some(mut buf) = staging.try_take() else { continue };
                        buf.as_mut_slice()[..64].fill(value);
                        std::thread::yield_now();
                        assert!(buf.as_slice()[..64].iter().all(|&byte| byte == value));
                    }
                });
            }
        });
        assert_eq!(staging.available(), 4);
    }

    /// One poll without a waker that matters.
    fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
