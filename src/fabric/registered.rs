//! Registered memory: what a queue pair may send from and receive into, and what its peer may reach.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::region::aligned::{AlignedBuf, AlignedPiece};
use super::region::shared::SharedSpan;
pub use crate::wire::native::descriptor::RemoteKey;
use crate::wire::native::ring::RingMemory;

/// What a peer is told about memory it may reach: `len` octets from `address` on, under `key`.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct RemoteSpan {
    pub key: RemoteKey,
    pub address: u64,
    pub len: u64,
}

/// What a key lets its holder do. Invalidation by the peer is a right of its own (RFC 5040 §8.1.1(7)).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Access {
    pub remote_write: bool,
    pub remote_read: bool,
    pub remote_invalidate: bool,
}

impl Access {
    /// The peer may write.
    pub const WRITE: Self = Self { remote_write: true, remote_read: false, remote_invalidate: false };
    /// The peer may read.
    pub const READ: Self = Self { remote_write: false, remote_read: true, remote_invalidate: false };
    /// The peer may write and read.
    pub const BOTH: Self = Self { remote_write: true, remote_read: true, remote_invalidate: false };

    /// The same, and the peer may give the key back by a Send with Invalidate.
    pub const fn invalidatable(self) -> Self {
        Self { remote_invalidate: true, ..self }
    }
}

/// Why a target refuses an access.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum AccessError {
    #[error("key {key:#010x} opens nothing on this queue pair")]
    Key { key: u32 },
    #[error("key {key:#010x} does not give this right")]
    Right { key: u32 },
    #[error("{len} octets at {address:#x} pass the end of the address space")]
    Wrap { address: u64, len: u64 },
    #[error("{len} octets at {address:#x} are not within the region of key {key:#010x}")]
    Bounds { key: u32, address: u64, len: u64 },
}

/// A private buffer registered with one queue pair: the source of a Write or Send, the sink of a Read or Receive. It has
/// one owner at a time; posting gives it away and the completion gives it back. Aligned to 4 KiB.
pub struct LocalBuf {
    /// Goes before the memory it speaks of.
    #[cfg(feature = "verbs")]
    registration: Option<LocalRegistration>,
    piece: AlignedPiece,
    domain: Domain,
}

/// What a device knows a local buffer by, for as long as this lives.
#[cfg(feature = "verbs")]
#[derive(Clone)]
pub(super) struct LocalRegistration {
    pub(super) local_key: u32,
    pub(super) _keep: Arc<dyn std::any::Any + Send + Sync>,
}

/// Who may use a buffer: one queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Domain(u64);

impl Domain {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// `count` buffers of `buf_bytes` octets, rounded up to 4 KiB.
    pub(super) fn allocate(self, buf_bytes: usize, count: usize) -> io::Result<Vec<LocalBuf>> {
        Ok(self.cut(buf_bytes, count)?.map(|piece| LocalBuf::new(piece, self)).collect())
    }

    /// The same, each known to a device: `register` gets address and length of the memory as a whole, which lives as long
    /// as the last buffer.
    #[cfg(feature = "verbs")]
    pub(super) fn allocate_registered(
        self,
        buf_bytes: usize,
        count: usize,
        register: impl FnOnce(std::ptr::NonNull<u8>, usize) -> io::Result<LocalRegistration>,
    ) -> io::Result<Vec<LocalBuf>> {
        let mut bufs: Vec<_> = self.cut(buf_bytes, count)?.map(|piece| LocalBuf::new(piece, self)).collect();
        let Some(first) = bufs.first() else { return Ok(bufs) };
        let (base, len) = first.piece.whole();
        let registration = register(base, len)?;
        bufs.iter_mut().for_each(|buf| buf.registration = Some(registration.clone()));
        Ok(bufs)
    }

    fn cut(self, buf_bytes: usize, count: usize) -> io::Result<impl Iterator<Item = AlignedPiece>> {
        let buf_bytes = buf_bytes.checked_next_multiple_of(super::region::aligned::ALIGN_BYTES);
        let sizes = buf_bytes.and_then(|each| Some((each, each.checked_mul(count)?)));
        let (each, whole) = sizes.ok_or(io::ErrorKind::InvalidInput)?;
        let (_, pieces) = AlignedBuf::new(whole)?.split(each);
        Ok(pieces.into_iter())
    }

    pub(super) fn owns(self, buf: &LocalBuf) -> bool {
        buf.domain == self
    }
}

impl LocalBuf {
    fn new(piece: AlignedPiece, domain: Domain) -> Self {
        Self {
            #[cfg(feature = "verbs")]
            registration: None,
            piece,
            domain,
        }
    }

    /// The key under which the device that this buffer was allocated for knows it.
    #[cfg(feature = "verbs")]
    pub(super) fn local_key(&self) -> Option<u32> {
        self.registration.as_ref().map(|registration| registration.local_key)
    }

    /// Position among the buffers allocated with it, from zero.
    pub fn index(&self) -> usize {
        self.piece.index()
    }

    /// Who may use it.
    pub(super) fn domain(&self) -> Domain {
        self.domain
    }

    /// Octets, a multiple of 4 KiB.
    pub fn len(&self) -> usize {
        self.piece.as_slice().len()
    }

    /// Never: an empty buffer cannot be allocated.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Keeps the first `at` octets and gives the rest, which is a buffer of the same queue pair: each may go to a different
    /// place at the same time.
    ///
    /// # Panics
    /// When `at` is no multiple of 4 KiB, or one of the two would be empty.
    pub fn split_off(&mut self, at: usize) -> Self {
        Self {
            #[cfg(feature = "verbs")]
            registration: self.registration.clone(),
            piece: self.piece.split_off(at),
            domain: self.domain,
        }
    }

    /// Takes back what [`split_off`](Self::split_off) gave.
    ///
    /// # Panics
    /// When `rest` does not begin where this ends, or belongs to another buffer.
    pub fn rejoin(&mut self, rest: Self) {
        self.piece.rejoin(rest.piece);
    }

    /// All of it.
    pub fn as_slice(&self) -> &[u8] {
        self.piece.as_slice()
    }

    /// All of it, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.piece.as_mut_slice()
    }
}

impl AsRef<[u8]> for LocalBuf {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for LocalBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalBuf").field("index", &self.index()).field("len", &self.len()).finish()
    }
}

/// The peer's access to a span of memory, for as long as this guard lives: dropping it deregisters.
#[must_use = "dropping a memory region takes the peer's access away"]
pub struct MemoryRegion {
    remote: RemoteSpan,
    span: SharedSpan,
    revoker: Weak<dyn Revoker>,
}

/// Takes a key out of service. After `revoke` returns no octet of its memory is read or written under it.
pub(super) trait Revoker: Send + Sync {
    fn revoke(&self, key: RemoteKey) -> bool;

    /// The lane says when the word at `offset` is not `value` any more, once. Nothing to do where every Write is reported.
    fn watch(&self, _key: RemoteKey, _offset: usize, _value: u64) {}
}

impl MemoryRegion {
    #[cfg(feature = "verbs")]
    pub(super) fn new(remote: RemoteSpan, span: SharedSpan, revoker: Weak<dyn Revoker>) -> Self {
        Self { remote, span, revoker }
    }

    /// What to tell the peer.
    pub fn remote(&self) -> RemoteSpan {
        self.remote
    }

    /// The key alone.
    pub fn key(&self) -> RemoteKey {
        self.remote.key
    }

    /// The memory behind the key.
    pub fn span(&self) -> &SharedSpan {
        &self.span
    }

    /// Asks for [`Event::Written`](super::Event::Written) once the word at `offset` is another than `value`, which was
    /// just read there. It holds until that event or the next call. Hardware says nothing of other Writes, software
    /// fabrics report each in any case.
    ///
    /// # Panics
    /// Where the word does not lie in the span or is not aligned.
    pub fn watch(&self, offset: usize, value: u64) {
        if let Some(revoker) = self.revoker.upgrade() {
            revoker.watch(self.remote.key, offset, value);
        }
    }

    /// Takes the peer's access away now; `false` when it was gone already. Afterwards nobody writes to the span under
    /// this key any more.
    pub fn invalidate(&self) -> bool {
        self.revoker.upgrade().is_some_and(|revoker| revoker.revoke(self.remote.key))
    }
}

/// A control ring of the native protocol, which the peer Writes into.
impl RingMemory for MemoryRegion {
    fn load(&self, offset: usize) -> u64 {
        self.span.load_u64_acquire(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.span.store_u64_release(offset, word);
    }

    fn watch(&self, offset: usize, word: u64) {
        Self::watch(self, offset, word);
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.invalidate();
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion").field("remote", &self.remote).finish()
    }
}

/// The regions of one queue pair of a software fabric. Whoever places or fetches octets does so inside [`Regions::with`],
/// under the lock that invalidation takes too.
pub(super) struct Regions {
    table: Mutex<Table>,
    /// Regions of the whole lane.
    count: Arc<AtomicUsize>,
}

struct Table {
    entries: HashMap<RemoteKey, Entry>,
    random: Random,
}

struct Entry {
    span: SharedSpan,
    base: u64,
    access: Access,
}

/// Which right an access needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Right {
    Write,
    Read,
}

impl Regions {
    pub(super) fn new(count: Arc<AtomicUsize>) -> Arc<Self> {
        Arc::new(Self { table: Mutex::new(Table { entries: HashMap::new(), random: Random::new() }), count })
    }

    /// A fresh random key and a random base of at least 2^32 for `span`, which must begin at a word boundary.
    pub(super) fn register(self: &Arc<Self>, span: SharedSpan, access: Access) -> MemoryRegion {
        assert!(span.is_aligned(), "registered memory begins at a word boundary");
        let mut table = self.table();
        let key = table.fresh_key();
        // Page-aligned, and no address of the region wraps or is small enough to be mistaken for an offset.
        let base = ((table.random.next() >> 2) | 1 << 32) & !0xfff;
        let remote = RemoteSpan { key, address: base, len: span.len() as u64 };
        table.entries.insert(key, Entry { span: span.clone(), base, access });
        self.count.fetch_add(1, Ordering::Relaxed);
        let own: Arc<dyn Revoker> = Arc::<Self>::clone(self);
        MemoryRegion { remote, span, revoker: Arc::downgrade(&own) }
    }

    /// A key that opens nothing by itself: the sink of one Read.
    pub(super) fn mint_key(&self) -> RemoteKey {
        self.table().fresh_key()
    }

    /// Calls `act` with the memory named, while nobody can invalidate it. Zero octets are never checked (RFC 5041 §5.2);
    /// the caller leaves them out.
    pub(super) fn with<T>(
        &self,
        key: RemoteKey,
        address: u64,
        len: u64,
        right: Right,
        act: impl FnOnce(&SharedSpan, usize) -> T,
    ) -> Result<T, AccessError> {
        let table = self.table();
        let entry = table.entries.get(&key).ok_or(AccessError::Key { key: key.0 })?;
        let granted = match right {
            Right::Write => entry.access.remote_write,
            Right::Read => entry.access.remote_read,
        };
        if !granted {
            return Err(AccessError::Right { key: key.0 });
        }
        let end = address.checked_add(len).ok_or(AccessError::Wrap { address, len })?;
        let bounds = AccessError::Bounds { key: key.0, address, len };
        let offset = address.checked_sub(entry.base).ok_or(bounds)?;
        if end - entry.base > entry.span.len() as u64 {
            return Err(bounds);
        }
        Ok(act(&entry.span, usize::try_from(offset).expect("within a span")))
    }

    /// The peer gives a key back.
    pub(super) fn invalidate_by_peer(&self, key: RemoteKey) -> Result<(), AccessError> {
        let mut table = self.table();
        let entry = table.entries.get(&key).ok_or(AccessError::Key { key: key.0 })?;
        if !entry.access.remote_invalidate {
            return Err(AccessError::Right { key: key.0 });
        }
        table.entries.remove(&key);
        self.count.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Takes every key out of service, at the end of the queue pair.
    pub(super) fn clear(&self) {
        let mut table = self.table();
        self.count.fetch_sub(table.entries.len(), Ordering::Relaxed);
        table.entries.clear();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Revoker for Regions {
    fn revoke(&self, key: RemoteKey) -> bool {
        let removed = self.table().entries.remove(&key).is_some();
        if removed {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        removed
    }
}

impl Table {
    fn fresh_key(&mut self) -> RemoteKey {
        loop {
            let key = RemoteKey(self.random.next() as u32);
            // 0 and 1 stand for "no key" in start-up frames and to some hardware.
            if key.0 > 1 && !self.entries.contains_key(&key) {
                return key;
            }
        }
    }
}

/// Numbers a peer cannot guess: a keyed hash (the key comes from the system) of a counter.
pub(super) struct Random {
    state: RandomState,
    counter: u64,
}

impl Random {
    pub(super) fn new() -> Self {
        Self { state: RandomState::new(), counter: 0 }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.counter += 1;
        self.state.hash_one(self.counter)
    }
}

/// The part of a posted buffer a request names, checked.
pub(super) fn is_within(range: &Range<usize>, buf: &LocalBuf) -> bool {
    range.start <= range.end && range.end <= buf.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions() -> (Arc<Regions>, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        (Regions::new(count.clone()), count)
    }

    #[test]
    fn a_key_opens_its_range_with_its_rights_until_it_is_revoked() {
        let (regions, count) = regions();
        let region = regions.register(SharedSpan::new(100).unwrap(), Access::WRITE);
        let RemoteSpan { key, address, len } = region.remote();
        assert!(address >= 1 << 32 && len == 100 && count.load(Ordering::Relaxed) == 1);
        let touch = |address, len, right| regions.with(key, address, len, right, |_, offset| offset);
        assert_eq!(touch(address + 60, 40, Right::Write), Ok(60));
        assert_eq!(touch(address, 1, Right::Read), Err(AccessError::Right { key: key.0 }));
        for (address, len) in [(address + 60, 41), (address - 1, 2), (address + 101, 1), (0, 1), (address, 1 << 40)] {
            assert_eq!(touch(address, len, Right::Write), Err(AccessError::Bounds { key: key.0, address, len }));
        }
        assert_eq!(touch(u64::MAX, 2, Right::Write), Err(AccessError::Wrap { address: u64::MAX, len: 2 }));
        assert_eq!(regions.invalidate_by_peer(key), Err(AccessError::Right { key: key.0 }));
        assert!(region.invalidate() && !region.invalidate());
        assert_eq!(touch(address, 1, Right::Write), Err(AccessError::Key { key: key.0 }));
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_region_ends_with_its_guard_with_the_peers_word_or_with_the_queue_pair() {
        let (regions, count) = regions();
        drop(regions.register(SharedSpan::new(8).unwrap(), Access::BOTH));
        assert_eq!(count.load(Ordering::Relaxed), 0);
        let region = regions.register(SharedSpan::new(8).unwrap(), Access::READ.invalidatable());
        regions.invalidate_by_peer(region.key()).unwrap();
        assert!(!region.invalidate());
        let region = regions.register(SharedSpan::new(8).unwrap(), Access::READ);
        regions.clear();
        drop(regions);
        drop(region);
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }

    /// RFC 5040 §8.1.1(8): keys are sparse over the whole range, and none is one that stands for "no key".
    #[test]
    fn keys_are_unlike_each_other_and_never_zero_or_one() {
        let (regions, _) = regions();
        let mut keys: Vec<u32> = (0..10_000).map(|_| regions.mint_key().0).collect();
        assert!(keys.iter().all(|key| *key > 1));
        assert!(keys.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1 << 16).count() < 100, "they count");
        keys.sort_unstable();
        keys.dedup();
        assert!(keys.len() > 9_990 && keys[0] < 1 << 24 && keys[keys.len() - 1] > u32::MAX - (1 << 24));
    }
}
