//! What was answered, so that a call that comes twice is not executed twice (RFC 8166 §4.5.5).
//!
//! ```text
//!            admit: Execute            complete
//!  (absent) ────────────────▶ Running ─────────▶ Done ──▶ (absent) when there are too many, or it is old
//!      ▲                         │ admit: Running │ admit: Replay
//!      └─────────────────────────┘
//!             forget
//! ```
//! When there are too many, the oldest of whoever has most goes: a peer that fills the memory forgets what it did itself, and
//! never makes it forget what another did that has less.
//!
//! Old is what was answered so long ago that no copy of it is under way any more: clients that begin with the same xid whenever
//! they are started would be told what was said to an earlier life of theirs. Looking is what lets old things go, those of the
//! peer that is looked for, so each goes once and nothing needs a timer. Calls that run do not grow old. All times are since
//! a moment that is the same for all owners.
//!
//! One cache serves all connections: a call comes again on a new one, from another port, with other chunks and perhaps
//! reduced otherwise. So a call is known by the peer's address without its port and by what the RPC message says, less the
//! items that may be in chunks; and what is kept is the RPC message of the reply, not the header in front of it, which has
//! to be planned anew for what the second call offers. Of a WRITE the first octets of its data belong to what it says.
//!
//! Linux's client may zero the first word of a WRITE that it is about to send again while it is still being sent
//! (docs/interop.md). What was executed is not undone by such a copy: it is taken for the call that it was made from.
//! That one is not taken for the copy, and is executed after it.

use super::Xid;
use crate::wire::codec::roundup_bytes;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// By what a call is known again.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct CallKey {
    pub peer: IpAddr,
    pub program: u32,
    pub version: u32,
    pub procedure: u32,
    pub xid: Xid,
    /// Of [`arguments_checksum`], and of a WRITE's [first octets](Self::with_first).
    pub checksum: u32,
    /// The checksum of a copy whose first word of data was zeroed, if there can be one and this is none. No call is told from
    /// another by it: of data in a chunk there is no such copy.
    pub spoilt: Option<u32>,
}

/// By what a call is known again that failed before all of it was here: its xid, and what of it does not change from one try
/// to the next. Peers behind one address pick their xids each for itself.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct CallMark {
    pub xid: Xid,
    pub checksum: u32,
}

/// Checksum of a call's payload stream, less `items`: what of it are eligible items, in order, as ranges without their
/// roundup. The result is the same whether an item came inline or in a chunk.
///
/// # Panics
/// If the ranges overlap, are out of order or leave the stream.
pub fn arguments_checksum(stream: &[u8], items: &[Range<usize>]) -> u32 {
    let (mut crc, mut start) = (0, 0);
    for item in items {
        crc = crc32c::crc32c_append(crc, &stream[start..item.start]);
        start = item.end + roundup_bytes(item.len() as u64) as usize;
    }
    crc32c::crc32c_append(crc, &stream[start..])
}

/// Octets of a WRITE's data by which it is known, or all if it has fewer.
pub const FIRST_BYTES: usize = 256;

/// Octets of `len` by which a WRITE is known.
pub fn first_bytes(len: u32) -> usize {
    FIRST_BYTES.min(len as usize)
}

impl CallKey {
    /// The key of a WRITE, of which this is the key without its data, whose data begins with `first`: [`first_bytes`] of it.
    /// Clients begin with what xid they like, so one that was started anew may say all the rest again.
    pub fn with_first(self, first: &[u8]) -> Self {
        Self { checksum: crc32c::crc32c_append(self.checksum, first), ..self }
    }

    /// The same, of a WRITE whose data is all in the message. The word that a client zeroes is that of the roundup, which it
    /// writes where the data begins before it copies that there: where there is no roundup, nothing is zeroed.
    pub fn with_inline_data(self, data: &[u8]) -> Self {
        let (word, rest) = data[..first_bytes(data.len() as u32)].split_at(data.len().min(4));
        let is_zero = word.iter().all(|octet| *octet == 0);
        let zeroed = || crc32c::crc32c_append(crc32c::crc32c_append(self.checksum, &[0; 4][..word.len()]), rest);
        let spoilt = (roundup_bytes(data.len() as u64) > 0 && !is_zero).then(zeroed);
        Self { spoilt, ..self.with_first(word).with_first(rest) }
    }

    /// Under which it is kept.
    const fn place(self) -> Self {
        Self { spoilt: None, ..self }
    }

    /// By what its spoilt copy is known.
    fn spoilt_copy(&self) -> Option<Self> {
        self.spoilt.map(|checksum| Self { checksum, spoilt: None, ..*self })
    }
}

/// What to do with a call.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Admission {
    /// It is new: execute it, then [`DuplicateCache::complete`] or [`DuplicateCache::forget`].
    Execute,
    /// It is being executed: ask again later. The answer of the first copy goes to the connection that it came on, and if
    /// that is lost, nowhere.
    Running,
    /// It was answered with this RPC message: answer so again.
    Replay(Arc<[u8]>),
}

/// How much is remembered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bounds {
    /// Replies, and as many failures.
    pub entries_max: usize,
    /// Octets of all replies together. A longer one is not kept.
    pub bytes_max: usize,
    /// How long after its answer a call is taken for the same one, and how long a failure is remembered. What is as old as
    /// that is not.
    pub age_max: Duration,
}

#[derive(Debug)]
enum Entry {
    Running,
    /// It did not come, but if it comes while its original runs, it waits for that.
    Awaited,
    Done(Arc<[u8]>),
}

/// Whose memory it is: a host can have all addresses of its IPv6 network.
fn share_of(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(_) => peer,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

/// Things that are remembered, by whose they are, each with a weight.
#[derive(Debug)]
struct Shares<T> {
    shares: HashMap<IpAddr, Share<T>>,
    /// What each weighs, the heaviest last.
    weights: BTreeSet<(usize, IpAddr)>,
    len: usize,
}

#[derive(Debug)]
struct Share<T> {
    weight: usize,
    /// Oldest first.
    things: VecDeque<Thing<T>>,
}

#[derive(Debug)]
struct Thing<T> {
    weight: usize,
    since: Duration,
    what: T,
}

impl<T: PartialEq> Shares<T> {
    fn new() -> Self {
        Self { shares: HashMap::new(), weights: BTreeSet::new(), len: 0 }
    }

    fn push(&mut self, peer: IpAddr, weight: usize, since: Duration, what: T) {
        let peer = share_of(peer);
        let share = self.shares.entry(peer).or_insert_with(|| Share { weight: 0, things: VecDeque::new() });
        self.weights.remove(&(share.weight, peer));
        share.weight += weight;
        share.things.push_back(Thing { weight, since, what });
        self.weights.insert((share.weight, peer));
        self.len += 1;
    }

    /// The oldest of whoever has most.
    fn pop(&mut self) -> Option<T> {
        let (_, peer) = *self.weights.last()?;
        self.take(peer, |share| share.things.pop_front())
    }

    /// The oldest of a peer, if it is as old as `age`.
    fn pop_old(&mut self, peer: IpAddr, age: Duration, now: Duration) -> Option<T> {
        self.take(share_of(peer), |share| share.things.pop_front_if(|thing| now.saturating_sub(thing.since) >= age))
    }

    fn remove(&mut self, peer: IpAddr, what: &T) {
        self.take(share_of(peer), |share| {
            let at = share.things.iter().position(|thing| thing.what == *what)?;
            share.things.remove(at)
        });
    }

    fn take(&mut self, peer: IpAddr, take: impl FnOnce(&mut Share<T>) -> Option<Thing<T>>) -> Option<T> {
        let share = self.shares.get_mut(&peer)?;
        let before = share.weight;
        let Thing { weight, what, .. } = take(share)?;
        share.weight -= weight;
        self.len -= 1;
        self.weights.remove(&(before, peer));
        if share.things.is_empty() {
            self.shares.remove(&peer);
        } else {
            self.weights.insert((share.weight, peer));
        }
        Some(what)
    }
}

/// Calls that run, and replies that were given. Running calls do not count: credits bound them.
#[derive(Debug)]
pub struct DuplicateCache {
    bounds: Bounds,
    calls: HashMap<CallKey, Entry>,
    /// Those that are done. A reply weighs its octets and its part of the entries.
    done: Shares<CallKey>,
    bytes: usize,
    failures: HashSet<(IpAddr, CallMark)>,
    failures_order: Shares<(IpAddr, CallMark)>,
}

impl DuplicateCache {
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            calls: HashMap::new(),
            done: Shares::new(),
            bytes: 0,
            failures: HashSet::new(),
            failures_order: Shares::new(),
        }
    }

    /// A call has come.
    pub fn admit(&mut self, key: CallKey, now: Duration) -> Admission {
        while let Some(old) = self.done.pop_old(key.peer, self.bounds.age_max, now) {
            self.drop_reply(&old);
        }
        match self.calls.get(&key.place()) {
            Some(Entry::Running | Entry::Awaited) => return Admission::Running,
            Some(Entry::Done(reply)) => return Admission::Replay(Arc::clone(reply)),
            None => {}
        }
        if let Some(copy) = key.spoilt_copy() {
            match self.calls.entry(copy).or_insert(Entry::Awaited) {
                // That would write over what this writes.
                Entry::Running => return Admission::Running,
                Entry::Awaited | Entry::Done(_) => {}
            }
        }
        self.calls.insert(key.place(), Entry::Running);
        Admission::Execute
    }

    /// A call was executed, and answered with the RPC message `reply`, whether or not that can be sent.
    ///
    /// # Panics
    /// Unless it is running.
    pub fn complete(&mut self, key: &CallKey, reply: &[u8], now: Duration) {
        self.assert_running(key);
        if reply.len() > self.bounds.bytes_max {
            return self.forget(key);
        }
        let reply: Arc<[u8]> = reply.into();
        if let Some(copy) = self.awaited_copy(key) {
            self.keep(copy, Arc::clone(&reply), now);
        }
        self.keep(key.place(), reply, now);
    }

    fn keep(&mut self, key: CallKey, reply: Arc<[u8]>, now: Duration) {
        let weight = reply.len() + self.bounds.bytes_max / self.bounds.entries_max.max(1);
        self.bytes += reply.len();
        self.calls.insert(key, Entry::Done(reply));
        self.done.push(key.peer, weight, now, key);
        while self.done.len > self.bounds.entries_max || self.bytes > self.bounds.bytes_max {
            let oldest = self.done.pop().expect("octets are those of replies");
            self.drop_reply(&oldest);
        }
    }

    /// It was taken out of those that are done.
    fn drop_reply(&mut self, key: &CallKey) {
        if let Some(Entry::Done(reply)) = self.calls.remove(key) {
            self.bytes -= reply.len();
        }
    }

    /// A call that may be executed again was executed, or one was given up before it had an effect.
    ///
    /// # Panics
    /// Unless it is running.
    pub fn forget(&mut self, key: &CallKey) {
        self.assert_running(key);
        self.calls.remove(&key.place());
        if let Some(copy) = self.awaited_copy(key) {
            self.calls.remove(&copy);
        }
    }

    /// The spoilt copy that waits for a call. None if one was executed before it.
    fn awaited_copy(&self, key: &CallKey) -> Option<CallKey> {
        key.spoilt_copy().filter(|copy| matches!(self.calls.get(copy), Some(Entry::Awaited)))
    }

    /// An RDMA Read or Write of a call was refused by the peer's memory, and the connection is lost for it (not: was
    /// flushed, because the connection was lost). The call will come again, with the same fault (RFC 8166 §4.5.3).
    pub fn handle_rdma_failed(&mut self, peer: IpAddr, call: CallMark, now: Duration) {
        self.drop_old_failures(peer, now);
        if self.failures.insert((peer, call)) {
            self.failures_order.push(peer, 1, now, (peer, call));
        }
        while self.failures_order.len > self.bounds.entries_max {
            let oldest = self.failures_order.pop().expect("there is more than something");
            self.failures.remove(&oldest);
        }
    }

    /// Whether a call failed so before: then it is answered with ERR_CHUNK, which ends it for its sender. Answered once:
    /// the next such call is another.
    pub fn take_failure(&mut self, peer: IpAddr, call: CallMark, now: Duration) -> bool {
        self.drop_old_failures(peer, now);
        if !self.failures.remove(&(peer, call)) {
            return false;
        }
        self.failures_order.remove(peer, &(peer, call));
        true
    }

    fn drop_old_failures(&mut self, peer: IpAddr, now: Duration) {
        while let Some(old) = self.failures_order.pop_old(peer, self.bounds.age_max, now) {
            self.failures.remove(&old);
        }
    }

    /// Replies that are kept, and their octets.
    pub fn kept(&self) -> (usize, usize) {
        (self.done.len, self.bytes)
    }

    fn assert_running(&self, key: &CallKey) {
        assert!(
            matches!(self.calls.get(&key.place()), Some(Entry::Running)),
            "a call ends once, and was admitted before"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    const AGE_MAX: Duration = Duration::from_secs(10);
    const NOW: Duration = Duration::from_secs(1000);
    const BOUNDS: Bounds = Bounds { entries_max: 3, bytes_max: 100, age_max: AGE_MAX };

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn key(xid: u32) -> CallKey {
        CallKey { peer: peer(1), program: 100_003, version: 3, procedure: 7, xid: Xid(xid), checksum: 5, spoilt: None }
    }

    #[test]
    fn a_call_is_executed_once_and_answered_as_often_as_it_comes() {
        let mut cache = DuplicateCache::new(BOUNDS);
        assert_eq!(cache.admit(key(1), NOW), Admission::Execute);
        assert_eq!(cache.admit(key(1), NOW), Admission::Running);
        cache.complete(&key(1), b"reply", NOW);
        for _ in 0..2 {
            assert_eq!(cache.admit(key(1), NOW), Admission::Replay(b"reply"[..].into()));
        }
    }

    #[test]
    fn another_call_is_another_even_with_the_same_xid() {
        let mut cache = DuplicateCache::new(BOUNDS);
        cache.admit(key(1), NOW);
        cache.complete(&key(1), b"reply", NOW);
        for other in [
            CallKey { peer: peer(2), ..key(1) },
            CallKey { program: 7, ..key(1) },
            CallKey { version: 4, ..key(1) },
            CallKey { procedure: 8, ..key(1) },
            CallKey { checksum: 6, ..key(1) },
            key(2),
        ] {
            assert_eq!(cache.admit(other, NOW), Admission::Execute, "{other:?}");
        }
    }

    /// A WRITE `a`, and the same with its first word zeroed.
    fn write_and_spoilt(data: &[u8]) -> [CallKey; 2] {
        let mut spoilt = data.to_vec();
        spoilt[..data.len().min(4)].fill(0);
        [data, &spoilt].map(|data| key(1).with_inline_data(data))
    }

    #[test]
    fn a_spoilt_copy_undoes_nothing_and_stands_for_nothing() {
        let replay = |reply: &[u8]| Admission::Replay(reply.into());
        for len in [1, 2, 3, 5, 77, 255, 257, 1001] {
            let [write, spoilt] = write_and_spoilt(&vec![7; len]);
            assert_ne!(write, spoilt);
            // It comes after what it was made from.
            let mut cache = DuplicateCache::new(BOUNDS);
            assert_eq!(cache.admit(write, NOW), Admission::Execute);
            assert_eq!(cache.admit(spoilt, NOW), Admission::Running);
            cache.complete(&write, b"written", NOW);
            assert_eq!([write, spoilt].map(|key| cache.admit(key, NOW)), [replay(b"written"), replay(b"written")]);
            assert_eq!(cache.kept(), (2, 14));
            let chunked = key(1).with_first(&vec![7; first_bytes(len as u32)]);
            assert_eq!(cache.admit(chunked, NOW), replay(b"written"), "the same call, with its data in a chunk");
            assert_eq!(cache.admit(spoilt, NOW + AGE_MAX), Admission::Execute, "both grow old");
            assert_eq!(cache.kept(), (0, 0));
            // Before.
            let mut cache = DuplicateCache::new(BOUNDS);
            assert_eq!(cache.admit(spoilt, NOW), Admission::Execute);
            assert_eq!(cache.admit(write, NOW), Admission::Running, "of two that write at once, the last counts");
            cache.complete(&spoilt, b"spoilt", NOW);
            assert_eq!(cache.admit(write, NOW), Admission::Execute);
            assert_eq!(cache.admit(spoilt, NOW), replay(b"spoilt"));
            cache.complete(&write, b"written", NOW);
            assert_eq!([write, spoilt].map(|key| cache.admit(key, NOW)), [replay(b"written"), replay(b"spoilt")]);
            // After one that came to nothing.
            let mut cache = DuplicateCache::new(BOUNDS);
            cache.admit(write, NOW);
            cache.forget(&write);
            assert_eq!(cache.admit(spoilt, NOW), Admission::Execute);
            cache.forget(&spoilt);
            assert_eq!(cache.calls.len(), 0);
            // Too long a reply is no reason to wait.
            cache.admit(write, NOW);
            cache.complete(&write, &[0; 101], NOW);
            assert_eq!(cache.calls.len(), 0);
        }
    }

    /// The copy's reply is forgotten while the original runs, and another copy is executed: each ends its own.
    #[test]
    fn a_spoilt_copy_that_is_forgotten_belongs_to_nobody_else() {
        let [write, spoilt] = write_and_spoilt(&[7; 77]);
        let mut cache = DuplicateCache::new(BOUNDS);
        cache.admit(spoilt, NOW);
        cache.complete(&spoilt, b"old", NOW);
        assert_eq!(cache.admit(write, NOW), Admission::Execute);
        assert_eq!(cache.admit(spoilt, NOW + AGE_MAX), Admission::Execute);
        cache.complete(&write, b"written", NOW + AGE_MAX);
        cache.complete(&spoilt, b"new", NOW + AGE_MAX);
        assert_eq!(cache.kept(), (2, 10));
    }

    #[test]
    fn what_cannot_be_spoilt_or_is_zero_itself_has_no_copy() {
        for data in [&[7; 4][..], &[7; 256], &[], &[0; 77], &[0, 0, 0, 0, 7]] {
            let known = key(1).with_inline_data(data);
            assert_eq!(known, key(1).with_first(&data[..first_bytes(data.len() as u32)]), "{data:?}");
        }
        assert_eq!(
            key(1).with_inline_data(&[0, 0, 0, 1, 7]).spoilt,
            Some(key(1).with_first(&[0, 0, 0, 0, 7]).checksum)
        );
        assert_eq!(key(1).with_inline_data(&[7; 1001]).checksum, key(1).with_first(&[7; 256]).checksum);
    }

    #[test]
    fn a_call_that_had_no_effect_is_executed_when_it_comes_again() {
        let mut cache = DuplicateCache::new(BOUNDS);
        cache.admit(key(1), NOW);
        cache.forget(&key(1));
        assert_eq!(cache.admit(key(1), NOW), Admission::Execute);
    }

    #[test]
    fn the_oldest_replies_go_when_there_are_too_many_or_they_are_too_long() {
        let mut cache = DuplicateCache::new(BOUNDS);
        let mut complete = |xid, len| {
            assert_eq!(cache.admit(key(xid), NOW), Admission::Execute, "call {xid}");
            cache.complete(&key(xid), &vec![0; len], NOW);
            cache.kept()
        };
        assert_eq!(complete(1, 10), (1, 10));
        assert_eq!(complete(2, 10), (2, 20));
        assert_eq!(complete(3, 10), (3, 30));
        assert_eq!(complete(4, 10), (3, 30));
        assert_eq!(complete(1, 85), (2, 95), "the first was forgotten, and 85 octets push out two");
        assert_eq!(complete(5, 101), (2, 95), "longer than all that may be kept");
    }

    /// A hostile peer must not have a good one's call executed twice by making the server forget that it was.
    #[test]
    fn who_fills_the_memory_forgets_its_own_replies_and_nobody_elses() {
        let bounds = Bounds { entries_max: 16, bytes_max: 1600, age_max: AGE_MAX };
        let of = |peer: IpAddr, xid| CallKey { peer, ..key(xid) };
        let network = |last: u16| IpAddr::from([0x2001, 0xdb8, 0, 7, 9, 9, 9, last]);
        // Many replies, long replies, replies to many addresses of one network.
        let floods: [&dyn Fn(u32) -> (CallKey, usize); 3] =
            [&|xid| (of(peer(9), xid), 0), &|xid| (of(peer(9), xid), 700), &|xid| (of(network(xid as u16), xid), 20)];
        for (row, flood) in floods.iter().enumerate() {
            let mut cache = DuplicateCache::new(bounds);
            for xid in 1..=4 {
                cache.admit(of(peer(1), xid), NOW);
                cache.complete(&of(peer(1), xid), &[0; 100], NOW);
            }
            cache.handle_rdma_failed(peer(1), CallMark { xid: Xid(1), checksum: 1 }, NOW);
            for xid in 100..1000 {
                let (key, len) = flood(xid);
                assert_eq!(cache.admit(key, NOW), Admission::Execute);
                cache.complete(&key, &vec![0; len], NOW);
                cache.handle_rdma_failed(key.peer, CallMark { xid: key.xid, checksum: 1 }, NOW);
                assert!(cache.kept().0 <= 16 && cache.kept().1 <= 1600, "row {row}: {:?}", cache.kept());
            }
            for xid in 1..=4 {
                assert!(matches!(cache.admit(of(peer(1), xid), NOW), Admission::Replay(_)), "row {row}: call {xid}");
            }
            assert!(cache.take_failure(peer(1), CallMark { xid: Xid(1), checksum: 1 }, NOW), "row {row}");
        }
    }

    #[test]
    fn among_equals_all_have_the_same_part() {
        let mut cache = DuplicateCache::new(Bounds { entries_max: 12, bytes_max: 1200, age_max: AGE_MAX });
        for xid in 0..100 {
            for last in 1..=3 {
                let key = CallKey { peer: peer(last), ..key(xid) };
                cache.admit(key, NOW);
                cache.complete(&key, &[0; 10], NOW);
            }
        }
        for last in 1..=3 {
            let kept = (0..100).filter(|xid| cache.calls.contains_key(&CallKey { peer: peer(last), ..key(*xid) }));
            assert_eq!(kept.count(), 4);
        }
    }

    #[test]
    fn running_calls_are_never_pushed_out() {
        let mut cache = DuplicateCache::new(BOUNDS);
        cache.admit(key(1), NOW);
        for xid in 2..20 {
            cache.admit(key(xid), NOW);
            cache.complete(&key(xid), &[0; 30], NOW);
        }
        assert_eq!(cache.admit(key(1), NOW), Admission::Running);
    }

    #[test]
    fn a_failed_call_is_refused_once_when_it_comes_again() {
        let mut cache = DuplicateCache::new(BOUNDS);
        let call = |xid| CallMark { xid: Xid(xid), checksum: 7 };
        assert!(!cache.take_failure(peer(1), call(1), NOW));
        cache.handle_rdma_failed(peer(1), call(1), NOW);
        cache.handle_rdma_failed(peer(1), call(1), NOW);
        assert!(!cache.take_failure(peer(2), call(1), NOW));
        assert!(!cache.take_failure(peer(1), CallMark { checksum: 8, ..call(1) }, NOW), "another's, with the same xid");
        assert!(cache.take_failure(peer(1), call(1), NOW));
        assert!(!cache.take_failure(peer(1), call(1), NOW));
        for xid in 0..10 {
            cache.handle_rdma_failed(peer(1), call(xid), NOW);
        }
        let left: Vec<u32> = (0..10).filter(|&xid| cache.take_failure(peer(1), call(xid), NOW)).collect();
        assert_eq!(left, [7, 8, 9]);
    }

    /// Clients that begin with the same xid whenever they are started were told what had been said to an earlier life of theirs.
    #[test]
    fn what_was_answered_long_ago_is_another_call() {
        let at = |seconds: u64, later_ns: u64| Duration::from_secs(seconds) + Duration::from_nanos(later_ns);
        let mark = CallMark { xid: Xid(1), checksum: 7 };
        // How long after the answer the next comes, and whether it is taken for the same call.
        let table =
            [(at(0, 0), true), (at(9, 999_999_999), true), (AGE_MAX, false), (at(10, 1), false), (at(9999, 0), false)];
        for (age, is_same) in table {
            let mut cache = DuplicateCache::new(BOUNDS);
            // It runs for long: that is no age.
            assert_eq!(cache.admit(key(1), at(0, 0)), Admission::Execute);
            assert_eq!(cache.admit(key(1), NOW), Admission::Running);
            cache.complete(&key(1), b"reply", NOW);
            cache.handle_rdma_failed(peer(1), mark, NOW);
            let expected = if is_same { Admission::Replay(b"reply"[..].into()) } else { Admission::Execute };
            assert_eq!(cache.admit(key(1), NOW + age), expected, "{age:?}");
            assert_eq!(cache.kept(), if is_same { (1, 5) } else { (0, 0) }, "{age:?}");
            assert_eq!(cache.take_failure(peer(1), mark, NOW + age), is_same, "{age:?}");
        }
    }

    /// Being answered again makes nothing younger: who is started every few seconds gets through in the end.
    #[test]
    fn age_counts_from_the_answer_and_not_from_its_repetition() {
        let mut cache = DuplicateCache::new(BOUNDS);
        cache.admit(key(1), NOW);
        cache.complete(&key(1), b"first", NOW);
        for seconds in 1..10 {
            assert!(matches!(cache.admit(key(1), NOW + Duration::from_secs(seconds)), Admission::Replay(_)));
        }
        assert_eq!(cache.admit(key(1), NOW + AGE_MAX), Admission::Execute);
        cache.complete(&key(1), b"second", NOW + AGE_MAX);
        assert_eq!(cache.admit(key(1), NOW + AGE_MAX), Admission::Replay(b"second"[..].into()));
        assert_eq!(cache.kept(), (1, 6));
    }

    /// Every state and every event; `None` is a mistake of the owner.
    #[test]
    fn transitions_are_these() {
        type Event = fn(&mut DuplicateCache) -> Option<Admission>;
        let events: [Event; 3] = [
            |cache| Some(cache.admit(key(1), NOW)),
            |cache| {
                cache.complete(&key(1), b"reply", NOW);
                None
            },
            |cache| {
                cache.forget(&key(1));
                None
            },
        ];
        let replay = || Admission::Replay(b"reply"[..].into());
        // State, event, what comes of it, what the next admission would say.
        let table = [
            ("absent", 0, Some((Some(Admission::Execute), Admission::Running))),
            ("absent", 1, None),
            ("absent", 2, None),
            ("running", 0, Some((Some(Admission::Running), Admission::Running))),
            ("running", 1, Some((None, replay()))),
            ("running", 2, Some((None, Admission::Execute))),
            ("done", 0, Some((Some(replay()), replay()))),
            ("done", 1, None),
            ("done", 2, None),
        ];
        for (state, event, expected) in table {
            let mut cache = DuplicateCache::new(BOUNDS);
            if state != "absent" {
                cache.admit(key(1), NOW);
            }
            if state == "done" {
                cache.complete(&key(1), b"reply", NOW);
            }
            let found = catch_unwind(AssertUnwindSafe(|| events[event](&mut cache)));
            let found = found.ok().map(|outcome| (outcome, cache.admit(key(1), NOW)));
            assert_eq!(found, expected, "{state}, event {event}");
        }
    }

    proptest! {
        #[test]
        fn an_item_counts_the_same_inline_and_in_a_chunk(
            words in prop::collection::vec(any::<u32>(), 1..6),
            item in prop::collection::vec(any::<u8>(), 0..20),
            behind in prop::collection::vec(any::<u32>(), 0..4),
        ) {
            let octets = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
            let reduced = [octets(&words), octets(&behind)].concat();
            let start = words.len() * 4;
            let pad = vec![0; roundup_bytes(item.len() as u64) as usize];
            let whole = [octets(&words), item.clone(), pad, octets(&behind)].concat();
            let checksum = arguments_checksum(&whole, std::slice::from_ref(&(start..start + item.len())));
            prop_assert_eq!(checksum, arguments_checksum(&reduced, &[]));
            prop_assert_eq!(checksum, arguments_checksum(&reduced, std::slice::from_ref(&(start..start))));
            let mut other = reduced;
            other[0] ^= 1;
            prop_assert_ne!(checksum, arguments_checksum(&other, &[]));
        }

        /// Against a list of all that was ever answered, where nothing is pushed out.
        #[test]
        fn a_reply_is_given_again_while_it_is_young_and_never_after(
            steps in prop::collection::vec((1..4_u32, 1..3_u8, 0..6_u64, any::<bool>()), 1..60),
        ) {
            let mut cache = DuplicateCache::new(Bounds { entries_max: 100, bytes_max: 1000, age_max: AGE_MAX });
            let mut answered: HashMap<CallKey, (Duration, u8)> = HashMap::new();
            let mut running: HashSet<CallKey> = HashSet::new();
            let mut now = NOW;
            for (number, (xid, last, pause, ends)) in (0_u8..).zip(steps) {
                now += Duration::from_secs(pause);
                let key = CallKey { peer: peer(last), ..key(xid) };
                let expected = match answered.get(&key) {
                    _ if running.contains(&key) => Admission::Running,
                    Some((at, reply)) if now - *at < AGE_MAX => Admission::Replay([*reply][..].into()),
                    _ => Admission::Execute,
                };
                prop_assert_eq!(cache.admit(key, now), expected.clone());
                if expected == Admission::Execute {
                    running.insert(key);
                }
                if ends && running.remove(&key) {
                    cache.complete(&key, &[number], now);
                    answered.insert(key, (now, number));
                }
                let (entries, bytes) = cache.kept();
                prop_assert!(entries == bytes && entries <= 6, "{} entries, {} octets", entries, bytes);
            }
        }
    }
}
