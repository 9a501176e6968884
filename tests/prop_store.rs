//! The store against a `HashMap`, under random calls, in an arena and a pool so small that eviction, write-behind and
//! shortage happen all the time. The disk is a map from extents to octets.
//!
//! Never wrong octets; what is missing was evicted, and counted; when all is dropped, all space is back.

mod rig;

use bulkhead::store::claims::{Claim, Revoker};
use bulkhead::store::draft::{Draft, Want};
use bulkhead::store::namespace::Query;
use bulkhead::store::object::{Object, Piece};

use bulkhead::store::segment::{Content, Filling};
use bulkhead::store::{Committed, Condition, Crawl, Deleted, Joined, Lookup, Miss, Pinned, Short, Side, Sizes, Store};
use rig::{Disk, Seeded, assert_whole, for_each_seed, grow, octets, write_one};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const HEAD_BYTES: u64 = 64 << 10;

fn store(memory_bytes: u64, pool_bytes: &[u64], index_bytes_max: u64, kind: u64) -> Store {
    let make = match kind {
        0 => Store::new,
        1 => Store::with_namespace,
        _ => Store::with_files,
    };
    make(Sizes {
        memory_bytes,
        head_bytes: HEAD_BYTES,
        value_bytes_max: 64 * MIB,
        index_bytes_max,
        pinned_share: 0.25,
        pool_bytes: pool_bytes.to_vec(),
    })
    .unwrap()
}

fn no_revoker() -> Revoker {
    Arc::new(|| ())
}

/// The octets of an object, or none if a drive lost them.
fn read(disk: &Disk, object: &Object) -> Option<Vec<u8>> {
    let octets = read_pieces(disk, object.pieces().iter().cloned())?;
    assert_eq!(octets.len() as u64, object.len());
    Some(octets)
}

fn read_pieces(disk: &Disk, pieces: impl Iterator<Item = Piece>) -> Option<Vec<u8>> {
    let mut octets = Vec::new();
    for piece in pieces {
        match piece.segment.content() {
            Content::Ram(ram) => octets.extend_from_slice(piece.octets(&ram)),
            Content::Disk { extent, crcs } => {
                let segment = disk.read(extent, crcs);
                assert_eq!(segment.len(), piece.segment.len() as usize);
                octets.extend_from_slice(&segment[piece.start as usize..(piece.start + piece.len) as usize]);
            }
            Content::Lost => return None,
        }
    }
    Some(octets)
}

#[derive(Clone, Debug)]
struct Entry {
    octets: Arc<Vec<u8>>,
    flags: u32,
    expiry: u64,
    version: u64,
}

/// The store, what it should hold, and what the outside holds of it.
struct Model {
    store: Store,
    disk: Disk,
    random: Seeded,
    now: u64,
    entries: HashMap<Vec<u8>, Entry>,
    /// Versions up to this were flushed.
    flushed: u64,
    readers: Vec<(Pinned, Arc<Vec<u8>>)>,
    drafts: Vec<(Draft, Arc<Vec<u8>>)>,
    crawl: Crawl,
    /// Objects that the store dropped by itself and the model had.
    missing: u64,
    /// Objects that left the index because the model said so.
    replaced: u64,
    deleted: u64,
    next_id: u64,
    /// Writes fail once in so many; 0 is never.
    failing: u64,
}

impl Model {
    fn new(seed: u64, failing: u64) -> Self {
        let mut random = Seeded::new(seed);
        let pools: &[u64] = if random.one_in(2) { &[6 * MIB] } else { &[4 * MIB, 2 * MIB] };
        let index_bytes_max = if random.one_in(4) { 20_000 } else { MIB };
        let store = store(4 * MIB, pools, index_bytes_max, random.below(3));
        grow(&store);
        Self {
            now: store.clock().now(),
            store,
            disk: Disk::default(),
            random,
            entries: HashMap::new(),
            flushed: 0,
            readers: Vec::new(),
            drafts: Vec::new(),
            crawl: Crawl::default(),
            missing: 0,
            replaced: 0,
            deleted: 0,
            next_id: seed << 32,
            failing,
        }
    }

    fn key(&mut self) -> Vec<u8> {
        format!("key-{}", self.random.below(24)).into_bytes()
    }

    fn len(&mut self) -> usize {
        let random = &mut self.random;
        (match random.below(8) {
            0 => random.below(3),
            1 => random.below(300),
            2 => 4000 + random.below(200),
            3 => HEAD_BYTES - 50 + random.below(100),
            4 => random.below(HEAD_BYTES),
            5 => 262_144 - 50 + random.below(100),
            6 => random.below(300_000),
            _ => random.below(1_500_000),
        }) as usize
    }

    fn octets(&mut self, len: usize) -> Arc<Vec<u8>> {
        self.next_id += 1;
        Arc::new(octets(self.next_id, len))
    }

    fn write_some(&mut self, count: u64) -> bool {
        let mut wrote = false;
        for _ in 0..count {
            let fails = self.failing > 0 && self.random.one_in(self.failing);
            if !write_one(&self.store, &self.disk, true, fails) {
                break;
            }
            wrote = true;
        }
        wrote
    }

    /// Gives the store room, first by what costs nothing. False if nothing is left to give.
    fn relieve(&mut self, short: Short) -> bool {
        match short {
            Short::Growing => grow(&self.store),
            Short::Memory | Short::Disk => {
                self.write_some(3) || self.readers.pop().is_some() || {
                    let draft = (!self.drafts.is_empty()).then(|| self.drafts.swap_remove(0));
                    draft.is_some()
                }
            }
        }
    }

    fn fill(&mut self, want: Want) -> Option<Filling> {
        loop {
            match self.store.fill(want) {
                Ok(filling) => return Some(filling),
                Err(short) if self.relieve(short) => {}
                Err(short) => {
                    // Every file failed, or there is a bug.
                    assert!(self.failing > 0, "{short} with nothing held: {:?}", self.store.gauges());
                    return None;
                }
            }
        }
    }

    /// Puts up to `bytes` more octets of `octets` into the draft. False if there is no room for them.
    fn put(&mut self, draft: &mut Draft, octets: &[u8], bytes: usize) -> bool {
        let mut at = draft.pieces().iter().map(|piece| piece.len as usize).sum::<usize>();
        let end = octets.len().min(at + bytes);
        while at < end {
            if let Some(want) = draft.want() {
                let Some(filling) = self.fill(want) else { return false };
                draft.begin(filling);
            }
            // Whole segments, so that `pieces` says how much is there.
            at += draft.put(&octets[at..]);
        }
        true
    }

    fn claim(&mut self, len: u64) -> Option<Claim> {
        if self.random.one_in(3) { None } else { self.store.try_claim(len, false, &no_revoker()) }
    }

    fn is_alive(&self, entry: &Entry) -> bool {
        entry.version > self.flushed && (entry.expiry == 0 || entry.expiry > self.now)
    }

    /// Makes model and store agree on whether `key` is there. What the model has and the store does not was evicted.
    fn sync(&mut self, key: &[u8]) -> Option<Entry> {
        let entry = self.entries.get(key).cloned();
        let peeked = self.store.peek(key, self.now);
        match (entry, peeked) {
            (Some(entry), Some(object)) => {
                assert!(self.is_alive(&entry), "{key:?} is dead");
                assert_eq!((object.version(), object.flags()), (entry.version, entry.flags));
                assert_eq!((object.len(), object.expiry()), (entry.octets.len() as u64, entry.expiry));
                Some(entry)
            }
            (Some(entry), None) => {
                self.entries.remove(key);
                match self.store.get(key, self.now) {
                    // Counted by the store as expired or flushed.
                    Lookup::Miss(Miss::Expired | Miss::Flushed) => assert!(!self.is_alive(&entry)),
                    Lookup::Miss(Miss::Absent) => self.missing += 1,
                    other => panic!("{other:?} after no peek"),
                }
                None
            }
            (None, None) => None,
            (None, Some(object)) => panic!("{object:?} came from nowhere"),
        }
    }

    fn commit(&mut self, key: &[u8], draft: Draft, octets: Arc<Vec<u8>>) {
        let old = self.sync(key);
        let version = old.as_ref().map_or(0, |old| old.version);
        let condition = match self.random.below(6) {
            0 => Condition::Absent,
            1 => Condition::Present,
            2 => Condition::Version(version),
            3 => Condition::Version(version.saturating_sub(1)),
            _ => Condition::Any,
        };
        let wanted = match condition {
            Condition::Any => None,
            Condition::Absent => old.is_some().then_some(Committed::NotStored),
            Condition::Present => old.is_none().then_some(Committed::NotStored),
            Condition::Version(asked) => match &old {
                None => Some(Committed::NotFound),
                Some(old) => (old.version != asked).then_some(Committed::Exists),
            },
        };
        let flags = self.random.below(1 << 32) as u32;
        let expiry = if self.random.one_in(4) { self.now + self.random.below(5) } else { 0 };
        let done = self.store.commit(key, draft, flags, expiry, condition, self.now);
        match (done, wanted) {
            (Committed::Stored { version }, None) => {
                self.replaced += u64::from(old.is_some());
                self.entries.insert(key.to_vec(), Entry { octets, flags, expiry, version });
            }
            (done, wanted) => assert_eq!(Some(done), wanted, "{condition:?} of {key:?}"),
        }
    }

    fn set(&mut self) {
        let (key, len) = (self.key(), self.len());
        let octets = self.octets(len);
        let claim = self.claim(len as u64);
        let mut draft = self.store.draft(len as u64, claim);
        if self.put(&mut draft, &octets, len) {
            self.commit(&key, draft, octets);
        }
    }

    /// Begins a draft or goes on with one; once in a while it is dropped half way.
    fn draft(&mut self) {
        if self.drafts.len() < 4 && (self.drafts.is_empty() || self.random.one_in(3)) {
            let len = self.len();
            let octets = self.octets(len);
            let claim = self.claim(len as u64);
            self.drafts.push((self.store.draft(len as u64, claim), octets));
            return;
        }
        let index = self.random.below(self.drafts.len() as u64) as usize;
        let (mut draft, octets) = self.drafts.swap_remove(index);
        if self.random.one_in(5) {
            return;
        }
        if !self.put(&mut draft, &octets, 300_000) {
            return;
        }
        if draft.is_complete() {
            let key = self.key();
            self.commit(&key, draft, octets);
        } else {
            self.drafts.push((draft, octets));
        }
    }

    fn join(&mut self) {
        let key = self.key();
        let len = (if self.random.one_in(3) { self.len() } else { self.random.below(3000) as usize }).min(400_000);
        let octets = self.octets(len);
        let side = if self.random.one_in(2) { Side::Front } else { Side::Back };
        let mut draft = self.store.draft(len as u64, None);
        if !self.put(&mut draft, &octets, len) {
            return;
        }
        loop {
            let Some(entry) = self.sync(&key) else { return };
            let Some(old) = self.store.peek(&key, self.now) else { return };
            if old.len() + len as u64 > 2 * MIB {
                return;
            }
            match self.store.commit_joined(&old, draft, side, self.now) {
                Joined::Done(Committed::Stored { version }) => {
                    let whole = match side {
                        Side::Front => [octets.as_slice(), &entry.octets].concat(),
                        Side::Back => [entry.octets.as_slice(), &octets].concat(),
                    };
                    self.replaced += 1;
                    self.entries.insert(key, Entry { octets: Arc::new(whole), version, ..entry });
                    return;
                }
                // Evicted to make room for what was to be joined to it.
                Joined::Done(Committed::NotFound) => return,
                other @ (Joined::Done(_) | Joined::Changed(_)) => panic!("{other:?} with nobody else there"),
                Joined::Short(back, short) => {
                    drop(old);
                    if !self.relieve(short) {
                        assert!(self.failing > 0, "{short} with nothing held: {:?}", self.store.gauges());
                        return;
                    }
                    draft = back;
                }
            }
        }
    }

    fn check(&mut self, key: &[u8]) {
        let Some(entry) = self.sync(key) else { return };
        match self.store.get(key, self.now) {
            Lookup::Hit(pinned) => {
                match read(&self.disk, &pinned) {
                    Some(found) => {
                        assert!(found == *entry.octets, "wrong octets of {key:?}");
                        let len = found.len();
                        let offset = self.random.below(len as u64 + 2);
                        let wanted = self.random.below(600_000);
                        let end = (offset + wanted).min(len as u64);
                        let found =
                            read_pieces(&self.disk, pinned.range(offset, wanted)).expect("it was there just now");
                        assert!(found == entry.octets[offset.min(end) as usize..end as usize], "a range of {key:?}");
                    }
                    None => {
                        assert!(self.failing > 0, "lost without a failed write");
                        self.store.drop_lost(pinned.object());
                        self.entries.remove(key);
                        self.deleted += 1;
                        return;
                    }
                }
                if self.random.one_in(2) {
                    for piece in pinned.pieces() {
                        if let Content::Disk { extent, crcs } = piece.segment.content() {
                            self.store.warm(&piece.segment, &self.disk.read(extent, crcs));
                        }
                    }
                }
                if self.random.one_in(3) {
                    self.readers.push((pinned, entry.octets));
                }
            }
            Lookup::Busy => assert!(!self.readers.is_empty(), "busy with no reader"),
            Lookup::Miss(miss) => panic!("{miss:?} after a peek"),
        }
    }

    /// All that lives is listed, in order, however many calls it takes.
    fn list(&mut self) {
        if !self.store.has_namespace() {
            assert_eq!(self.store.list(&Query::new(b"", 1), self.now), None);
            return;
        }
        let keys: Vec<Vec<u8>> = self.entries.keys().cloned().collect();
        keys.iter().for_each(|key| _ = self.sync(key));
        let mut wanted: Vec<_> = self.entries.iter().collect();
        wanted.sort_by_key(|(key, _)| *key);
        let (mut after, mut found) = (Vec::new(), Vec::new());
        loop {
            let query = Query { after: &after, ..Query::new(b"key", 1 + self.random.below(9) as usize) };
            let listing = self.store.list(&query, self.now).expect("there is a namespace");
            found.extend(listing.entries);
            match listing.next {
                Some(next) => after = next.as_bytes().to_vec(),
                None => break,
            }
        }
        assert_eq!(found.len(), wanted.len());
        for (found, (key, entry)) in found.iter().zip(wanted) {
            let facts = found.object.expect("nothing was to be joined");
            assert_eq!(found.name.as_bytes(), key);
            assert_eq!((facts.version, facts.len), (entry.version, entry.octets.len() as u64));
            assert_eq!((facts.flags, facts.expiry), (entry.flags, entry.expiry));
        }
    }

    fn end_reader(&mut self) {
        if self.readers.is_empty() {
            return;
        }
        let index = self.random.below(self.readers.len() as u64) as usize;
        let (pinned, octets) = self.readers.swap_remove(index);
        match read(&self.disk, &pinned) {
            Some(found) => assert!(found == *octets, "a reader's octets changed"),
            None => assert!(self.failing > 0, "lost without a failed write"),
        }
    }

    fn step(&mut self) {
        let key = self.key();
        match self.random.below(40) {
            0..=8 => self.set(),
            9..=15 => self.draft(),
            16..=20 => self.join(),
            21..=28 => self.check(&key),
            29..=31 => self.end_reader(),
            32 => {
                let there = self.sync(&key);
                if self.random.one_in(2) {
                    assert_eq!(self.store.delete(&key, self.now), there.is_some());
                } else {
                    let version = there.as_ref().map_or(1, |there| there.version);
                    let other = if there.is_some() { Deleted::Exists } else { Deleted::NotFound };
                    assert_eq!(self.store.delete_if(&key, version + 1, self.now), other);
                    let done = if there.is_some() { Deleted::Done } else { Deleted::NotFound };
                    assert_eq!(self.store.delete_if(&key, version, self.now), done);
                }
                self.entries.remove(&key);
                self.deleted += u64::from(there.is_some());
            }
            33 => {
                let expiry = if self.random.one_in(2) { self.now + self.random.below(4) } else { 0 };
                let there = self.sync(&key).is_some();
                assert_eq!(self.store.touch(&key, expiry, self.now), there);
                if let Some(entry) = self.entries.get_mut(&key) {
                    entry.expiry = expiry;
                }
            }
            34 => self.now += 1,
            35 => _ = self.store.crawl(&mut self.crawl, 7),
            36 if self.random.one_in(10) => {
                if self.random.one_in(2) {
                    self.store.flush_all(0);
                } else {
                    let at_ms = self.store.clock().now_ms() + 3_600_000;
                    self.store.flush_all(at_ms);
                    self.store.handle_time(at_ms - 1);
                    self.check(&key);
                    self.store.handle_time(at_ms);
                }
                self.flushed = self.entries.values().map(|entry| entry.version).max().unwrap_or(0).max(self.flushed);
            }
            37 => _ = write_one(&self.store, &self.disk, false, false),
            38 => _ = self.write_some(8),
            39 if self.random.one_in(2) => self.list(),
            _ if self.random.one_in(8) => {
                // A writer that takes all there is sends everything clean out of RAM.
                self.write_some(u64::MAX);
                let want = Want { class: bulkhead::store::segment::Class::Large, remaining: 8 * MIB, head: false };
                let held: Vec<Filling> = std::iter::from_fn(|| self.store.fill(want).ok()).take(20).collect();
                drop(held);
            }
            _ => {}
        }
    }

    /// Everything the model has is there or was evicted, and everything comes back.
    fn finish(mut self) {
        self.list();
        let keys: Vec<Vec<u8>> = self.entries.keys().cloned().collect();
        for key in &keys {
            self.readers.clear();
            self.check(key);
        }
        let counters = self.store.counters();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let left = load(&counters.evictions) + load(&counters.expired) + load(&counters.flushed);
        assert_eq!(
            load(&counters.stored),
            self.store.gauges().objects + self.replaced + self.deleted + left,
            "an object left the index uncounted, or one was counted twice"
        );
        // A crawl may have buried what the model found missing later.
        assert!(self.missing <= left, "{} missing, {left} evicted or dead", self.missing);
        let gauges = self.store.gauges();
        assert_eq!(gauges.objects, self.entries.len() as u64);
        assert_eq!(gauges.names, if self.store.has_namespace() { gauges.objects } else { 0 });
        while !self.readers.is_empty() {
            self.end_reader();
        }
        self.drafts.clear();
        for key in self.entries.keys() {
            assert!(self.store.delete(key, self.now));
        }
        assert_whole(&self.store);
    }
}

#[test]
fn the_store_agrees_with_a_map_whatever_is_asked_of_it() {
    for_each_seed(0..12, |seed| {
        let mut model = Model::new(seed, 0);
        for _ in 0..2000 {
            model.step();
        }
        model.finish();
    });
}

#[test]
fn failing_drives_lose_values_but_never_mix_them_up() {
    for_each_seed(100..112, |seed| {
        let mut model = Model::new(seed, 60);
        for _ in 0..600 {
            model.step();
        }
        model.finish();
    });
}

/// A record tells its own length and what its octets must be, so values may be joined in any order and still be judged.
fn record(id: u64, len: usize) -> Vec<u8> {
    [&id.to_le_bytes()[..], &(len as u64).to_le_bytes(), &octets(id, len)].concat()
}

#[track_caller]
fn assert_records(mut value: &[u8]) {
    while !value.is_empty() {
        let number = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().unwrap());
        let (id, len) = (number(0), number(8) as usize);
        assert!(value[16..16 + len] == octets(id, len), "wrong octets in record {id:x}");
        value = &value[16 + len..];
    }
}

struct Worker {
    store: Store,
    disk: Arc<Disk>,
    random: Seeded,
    readers: Vec<Pinned>,
    next_id: u64,
    replies: [u64; 4],
}

impl Worker {
    /// A draft with one record, or none if there was no room for long.
    fn draft(&mut self, claimed: bool) -> Option<Draft> {
        self.next_id += 1;
        let len = match self.random.below(4) {
            0 => self.random.below(300),
            1 => self.random.below(HEAD_BYTES),
            2 => self.random.below(300_000),
            _ => self.random.below(700_000),
        } as usize;
        let value = record(self.next_id, len);
        let len = value.len() as u64;
        let claim = if claimed { Some(self.store.try_claim(len, false, &no_revoker())?) } else { None };
        let mut draft = self.store.draft(len, claim);
        let (mut at, mut tries) = (0, 0);
        while at < value.len() {
            if let Some(want) = draft.want() {
                match self.store.fill(want) {
                    Ok(filling) => draft.begin(filling),
                    Err(_) if tries < 200 => {
                        tries += 1;
                        drop(self.readers.pop());
                        std::thread::sleep(Duration::from_micros(50));
                        continue;
                    }
                    Err(_) => return None,
                }
            }
            at += draft.put(&value[at..]);
            if self.random.one_in(60) {
                return None;
            }
        }
        Some(draft)
    }

    fn step(&mut self) {
        let now = self.store.clock().now();
        let key = format!("key-{}", self.random.below(16)).into_bytes();
        match self.random.below(16) {
            0..=4 => {
                let claimed = self.random.one_in(2);
                let Some(draft) = self.draft(claimed) else { return };
                let expiry = if self.random.one_in(8) { now + 1 } else { 0 };
                let condition = *self.random.pick(&[Condition::Any, Condition::Absent, Condition::Present]);
                let done = self.store.commit(&key, draft, 0, expiry, condition, now);
                self.replies[0] += u64::from(matches!(done, Committed::Stored { .. }));
            }
            5 => {
                let Some(draft) = self.draft(false) else { return };
                let Some(old) = self.store.peek(&key, now).filter(|old| old.len() < 2 * MIB) else { return };
                let side = if self.random.one_in(2) { Side::Front } else { Side::Back };
                if let Joined::Done(Committed::Stored { .. }) = self.store.commit_joined(&old, draft, side, now) {
                    self.replies[1] += 1;
                }
            }
            6..=11 => {
                let Lookup::Hit(pinned) = self.store.get(&key, now) else { return };
                assert_records(&read(&self.disk, &pinned).expect("no drive fails here"));
                self.replies[2] += 1;
                for piece in pinned.pieces() {
                    if let Content::Disk { extent, crcs } = piece.segment.content() {
                        self.store.warm(&piece.segment, &self.disk.read(extent, crcs));
                    }
                }
                if self.readers.len() < 4 {
                    self.readers.push(pinned);
                }
            }
            12 if self.random.one_in(2) => self.replies[3] += u64::from(self.store.delete(&key, now)),
            12 => {
                let Some(old) = self.store.peek(&key, now) else { return };
                let done = self.store.delete_if(&key, old.version(), now);
                self.replies[3] += u64::from(done == Deleted::Done);
                let is_still = self.store.peek(&key, now).is_some_and(|found| found.version() == old.version());
                assert!(!is_still, "{done:?}, and there it is");
            }
            13 => _ = self.store.touch(&key, if self.random.one_in(2) { now + 1 } else { 0 }, now),
            14 => _ = self.store.crawl(&mut Crawl::default(), 5),
            _ if self.random.one_in(40) => self.store.flush_all(0),
            _ => {
                let Some(pinned) = self.readers.pop() else { return };
                assert_records(&read(&self.disk, &pinned).expect("no drive fails here"));
            }
        }
    }
}

#[test]
fn threads_that_read_write_evict_and_delete_leave_nothing_behind() {
    for_each_seed(0..2, |seed| {
        let store = store(4 * MIB, &[6 * MIB], 60_000, 2);
        grow(&store);
        let (disk, done) = (Arc::new(Disk::default()), AtomicBool::new(false));
        let end = Instant::now() + Duration::from_millis(1200);
        let replies = std::thread::scope(|scope| {
            let worker = |thread: u64| Worker {
                store: store.clone(),
                disk: disk.clone(),
                random: Seeded::new(seed * 100 + thread),
                readers: Vec::new(),
                next_id: (seed + 1) << 48 | thread << 40,
                replies: [0; 4],
            };
            let workers: Vec<_> = (0..4)
                .map(|thread| {
                    let mut worker = worker(thread);
                    scope.spawn(move || {
                        while Instant::now() < end {
                            worker.step();
                        }
                        worker.replies
                    })
                })
                .collect();
            let (store, disk, done) = (&store, &disk, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    if !write_one(store, disk, true, false) && !grow(store) {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
            });
            // Joined one by one: a thread that fails must not keep the one above.
            let ended: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            done.store(true, Ordering::Relaxed);
            ended.into_iter().map(|replies| replies.expect("a worker failed")).collect::<Vec<_>>()
        });
        let total: u64 = replies.iter().flatten().sum();
        assert!(total > 100, "nothing happened: {replies:?}");
        let now = store.clock().now();
        let gauges = store.gauges();
        assert_eq!((gauges.pins, gauges.pinned_bytes, gauges.claims), (0, 0, 0));
        let mut living = 0;
        for key in 0..16 {
            let key = format!("key-{key}").into_bytes();
            if let Lookup::Hit(pinned) = store.get(&key, now) {
                assert_records(&read(&disk, &pinned).expect("no drive fails here"));
                living += 1;
            }
        }
        assert_eq!(store.gauges().objects, living, "a policy holds what the index does not, or the other way round");
        (0..16).for_each(|key| _ = store.delete(format!("key-{key}").as_bytes(), now));
        assert_whole(&store);
    });
}
