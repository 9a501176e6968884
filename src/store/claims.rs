//! Claims: space promised to values whose octets are still arriving.
//!
//! A claim is all or nothing and takes no space by itself; pages and extents are taken as octets arrive. Claims and pins
//! together never exceed the capacity of their class, and everything else can be evicted, so a granted claim can always be
//! filled.

use crate::store::segment::Class;
use crate::wake::Wake;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Called, from any thread, when a claim is taken back from its idle owner.
pub type Revoker = Arc<dyn Fn() + Send + Sync>;

struct State {
    class: Class,
    /// Changed under the lock of the books.
    bytes: AtomicU64,
    /// Millisecond of the store's clock at which the owner last moved.
    active_ms: AtomicU64,
    /// The owner waits for the store, so it is not idle.
    held_up: AtomicBool,
    revoked: AtomicBool,
    revoker: Revoker,
}

/// The books of one store.
pub struct Claims {
    live: Mutex<Books>,
    /// Writers in the queue: nobody may pass them.
    queued: AtomicUsize,
    pinned_bytes: [AtomicU64; 2],
    wake: Arc<Wake>,
}

#[derive(Default)]
struct Books {
    granted_bytes: [u64; 2],
    next_id: u64,
    claims: HashMap<u64, Arc<State>>,
}

const fn slot(class: Class) -> usize {
    match class {
        Class::Small => 0,
        Class::Large => 1,
    }
}

impl Claims {
    pub fn new(wake: Arc<Wake>) -> Arc<Self> {
        Arc::new(Self {
            live: Mutex::default(),
            queued: AtomicUsize::new(0),
            pinned_bytes: [AtomicU64::new(0), AtomicU64::new(0)],
            wake,
        })
    }

    /// Claims granted and not given back: their number and octets.
    pub fn granted(&self) -> (usize, u64) {
        let books = self.books();
        (books.claims.len(), books.granted_bytes.iter().sum())
    }

    /// Octets that readers keep from being evicted.
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
    }

    /// The same for one class.
    pub fn pinned_bytes_of(&self, class: Class) -> u64 {
        self.pinned_bytes[slot(class)].load(Ordering::Relaxed)
    }

    /// Writers waiting in arrival order.
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    /// A writer joins or leaves the queue.
    pub fn set_queued(&self, count: usize) {
        self.queued.store(count, Ordering::SeqCst);
    }

    pub(super) fn pin(&self, class: Class, bytes: u64) {
        self.pinned_bytes[slot(class)].fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn unpin(&self, class: Class, bytes: u64) {
        self.pinned_bytes[slot(class)].fetch_sub(bytes, Ordering::Relaxed);
        self.wake.signal();
    }

    /// A claim, if no writer waits (`first` says that this is the first of the queue) and the space is there: all of
    /// `capacity_bytes` but what readers pin or may come to pin, `pins_bytes_max`. While there is no other claim, one may
    /// have all that is not pinned now.
    #[expect(clippy::too_many_arguments, reason = "two bounds, and who asks when for what")]
    pub fn try_claim(
        self: &Arc<Self>,
        class: Class,
        bytes: u64,
        capacity_bytes: u64,
        pins_bytes_max: u64,
        first: bool,
        now_ms: u64,
        revoker: &Revoker,
    ) -> Option<Claim> {
        if !first && self.queued.load(Ordering::SeqCst) > 0 {
            return None;
        }
        let pinned = self.pinned_bytes[slot(class)].load(Ordering::Relaxed);
        let mut books = self.books();
        let granted = books.granted_bytes[slot(class)];
        let kept = if granted == 0 { pinned } else { pinned.max(pins_bytes_max) };
        if granted.saturating_add(kept).saturating_add(bytes) > capacity_bytes {
            return None;
        }
        books.granted_bytes[slot(class)] += bytes;
        let id = books.next_id;
        books.next_id += 1;
        let state = Arc::new(State {
            class,
            bytes: AtomicU64::new(bytes),
            active_ms: AtomicU64::new(now_ms),
            held_up: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            revoker: revoker.clone(),
        });
        books.claims.insert(id, state.clone());
        drop(books);
        Some(Claim { id, state, claims: self.clone() })
    }

    /// Adds `more_bytes` to a claim, under the conditions of a new one: a writer that waits is not passed, and nobody waits
    /// here, for it would hold what others wait for.
    pub(super) fn try_extend(&self, claim: &Claim, more_bytes: u64, capacity_bytes: u64, pins_bytes_max: u64) -> bool {
        if self.queued.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let slot = slot(claim.state.class);
        let pinned = self.pinned_bytes[slot].load(Ordering::Relaxed);
        let mut books = self.books();
        let granted = books.granted_bytes[slot];
        let kept = if granted == claim.bytes() { pinned } else { pinned.max(pins_bytes_max) };
        if granted.saturating_add(kept).saturating_add(more_bytes) > capacity_bytes {
            return false;
        }
        books.granted_bytes[slot] += more_bytes;
        claim.state.bytes.fetch_add(more_bytes, Ordering::Relaxed);
        true
    }

    /// Takes back every claim whose owner moved no octet for `idle_ms`. Returns how many. The space is free once the
    /// owners let go.
    pub fn revoke_idle(&self, now_ms: u64, idle_ms: u64) -> usize {
        let idle: Vec<Arc<State>> = {
            let books = self.books();
            let is_idle = |state: &&Arc<State>| {
                !state.held_up.load(Ordering::Relaxed)
                    && now_ms.saturating_sub(state.active_ms.load(Ordering::Relaxed)) >= idle_ms
            };
            books.claims.values().filter(is_idle).cloned().collect()
        };
        let fresh = idle.iter().filter(|state| !state.revoked.swap(true, Ordering::Relaxed));
        fresh.map(|state| (state.revoker)()).count()
    }

    fn books(&self) -> std::sync::MutexGuard<'_, Books> {
        self.live.lock().expect("no panic under this lock")
    }
}

/// The place of the one object of a class that may be pinned beyond the bound.
///
/// Without it an object longer than the bound could be read only while nobody reads another: a steady stream of readers
/// would keep it waiting for ever, and one slow reader of it would keep all others waiting.
#[derive(Debug, Default)]
pub(super) struct ExtraPin {
    /// Version of the object, 0 for none.
    version: AtomicU64,
    bytes: AtomicU64,
}

impl ExtraPin {
    /// Octets pinned beyond the bound.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// The object of that version has the place.
    pub(super) fn is_of(&self, version: u64) -> bool {
        self.version.load(Ordering::SeqCst) == version
    }

    /// False if another object has the place.
    pub(super) fn take(&self, version: u64, bytes: u64) -> bool {
        let taken = self.version.compare_exchange(0, version, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if taken {
            self.bytes.store(bytes, Ordering::SeqCst);
        }
        taken
    }

    /// Does nothing unless the object of that version has the place.
    pub(super) fn give_back(&self, version: u64) {
        if self.version.load(Ordering::SeqCst) == version {
            self.bytes.store(0, Ordering::SeqCst);
            self.version.store(0, Ordering::SeqCst);
        }
    }
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claims").field("granted", &self.granted()).field("queued", &self.queued()).finish()
    }
}

/// Space promised to one value; given back when dropped.
#[must_use = "dropping a claim gives the space back"]
pub struct Claim {
    id: u64,
    state: Arc<State>,
    claims: Arc<Claims>,
}

impl Claim {
    /// Octets claimed.
    pub fn bytes(&self) -> u64 {
        self.state.bytes.load(Ordering::Relaxed)
    }

    /// Gives back what is more than `bytes`.
    pub(super) fn shrink(&self, bytes: u64) {
        let mut books = self.claims.books();
        let less = self.bytes().saturating_sub(bytes);
        books.granted_bytes[slot(self.state.class)] -= less;
        self.state.bytes.fetch_sub(less, Ordering::Relaxed);
        drop(books);
        if less > 0 {
            self.claims.wake.signal();
        }
    }

    /// It was taken back; its owner must let go.
    pub fn is_revoked(&self) -> bool {
        self.state.revoked.load(Ordering::Relaxed)
    }

    /// The peer moved an octet at `now_ms`.
    pub fn touch(&self, now_ms: u64) {
        self.state.active_ms.store(now_ms, Ordering::Relaxed);
    }

    /// The owner begins or ends to wait for the store; its peer is not to blame meanwhile.
    pub fn set_held_up(&self, held_up: bool) {
        self.state.held_up.store(held_up, Ordering::Relaxed);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut books = self.claims.books();
        books.claims.remove(&self.id);
        books.granted_bytes[slot(self.state.class)] -= self.bytes();
        drop(books);
        self.claims.wake.signal();
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(claims: &Arc<Claims>, bytes: u64, first: bool) -> Option<Claim> {
        let revoker: Revoker = Arc::new(|| ());
        claims.try_claim(Class::Large, bytes, 100, 20, first, 0, &revoker)
    }

    #[test]
    fn claims_and_pins_share_the_capacity() {
        let claims = Claims::new(Arc::default());
        claims.pin(Class::Large, 30);
        let held = claim(&claims, 70, false).unwrap();
        assert!(claim(&claims, 1, false).is_none());
        claims.unpin(Class::Large, 30);
        assert!(claim(&claims, 11, false).is_none(), "what readers may come to pin is kept for them");
        let more = claim(&claims, 10, false).unwrap();
        assert_eq!(claims.granted(), (2, 80));
        drop((held, more));
        assert_eq!(claims.granted(), (0, 0));
        assert!(claim(&claims, 100, false).is_some(), "a lone writer may have it all");
    }

    #[test]
    fn nobody_passes_the_queue() {
        let claims = Claims::new(Arc::default());
        claims.set_queued(1);
        assert!(claim(&claims, 1, false).is_none());
        assert!(claim(&claims, 1, true).is_some());
    }

    #[test]
    fn a_claim_grows_within_what_a_new_one_might_have() {
        let claims = Claims::new(Arc::default());
        let one = claim(&claims, 10, false).unwrap();
        assert!(claims.try_extend(&one, 90, 100, 20), "a lone writer may have it all");
        assert!(!claims.try_extend(&one, 1, 100, 20));
        one.shrink(30);
        one.shrink(40);
        assert_eq!((one.bytes(), claims.granted()), (30, (1, 30)));
        let other = claim(&claims, 10, false).unwrap();
        assert!(!claims.try_extend(&one, 41, 100, 20), "what readers may come to pin is kept for them");
        assert!(claims.try_extend(&one, 40, 100, 20));
        drop(other);
        claims.set_queued(1);
        assert!(!claims.try_extend(&one, 1, 100, 20), "nobody passes the queue");
        drop(one);
        assert_eq!(claims.granted(), (0, 0));
    }

    #[test]
    fn idle_owners_are_told_once_and_busy_ones_never() {
        let claims = Claims::new(Arc::default());
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        let revoker: Revoker = Arc::new(move || _ = count.fetch_add(1, Ordering::Relaxed));
        let make = || claims.try_claim(Class::Large, 10, 100, 0, false, 0, &revoker).unwrap();
        let (_idle, busy, held_up) = (make(), make(), make());
        busy.touch(900);
        held_up.set_held_up(true);
        assert_eq!(claims.revoke_idle(1000, 1000), 1);
        assert_eq!(claims.revoke_idle(1000, 1000), 0);
        assert_eq!(told.load(Ordering::Relaxed), 1);
    }
}
