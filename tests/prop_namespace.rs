//! The namespace against a sorted map: what is listed is what lives, in order, whatever is set, deleted, evicted, expired
//! and flushed, by one thread or by many.

mod rig;

use bulkhead::store::namespace::{Listed, Query};
use bulkhead::store::{Condition, Crawl, Sizes, Store};
use rig::{Seeded, assert_whole, for_each_seed};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn store(index_bytes_max: u64) -> Store {
    let sizes = Sizes {
        memory_bytes: 4 * MIB,
        head_bytes: 64 << 10,
        value_bytes_max: MIB,
        index_bytes_max,
        pinned_share: 0.25,
        pool_bytes: vec![MIB],
    };
    Store::with_namespace(sizes).unwrap()
}

/// All of a listing, in as many calls as it takes, each of them within its bounds.
fn list(store: &Store, query: &Query<'_>, now: u64) -> Vec<Listed> {
    let mut after = query.after.to_vec();
    let mut found: Vec<Listed> = Vec::new();
    loop {
        let listing = store.list(&Query { after: &after, ..*query }, now).expect("there is a namespace");
        let bytes: usize = listing.entries.iter().map(|entry| entry.name.as_bytes().len() + query.overhead_bytes).sum();
        assert!(listing.entries.len() <= query.count_max.max(1));
        assert!(bytes <= query.bytes_max || listing.entries.len() == 1, "{bytes} octets");
        found.extend(listing.entries);
        let Some(next) = listing.next else { break };
        // A directory comes before the place within it.
        let goes_on = next.as_bytes() > after.as_slice() || after.len() > next.as_bytes().len();
        assert!(goes_on, "a listing that does not go on never ends");
        after = next.as_bytes().to_vec();
    }
    let names: Vec<_> = found.iter().map(|entry| entry.name.as_bytes()).collect();
    assert!(names.is_sorted_by(|one, other| one < other), "out of order or twice: {names:?}");
    found
}

/// What a listing must be: the names and, for keys, their versions.
fn wanted(model: &BTreeMap<Vec<u8>, u64>, query: &Query<'_>) -> Vec<(Vec<u8>, Option<u64>)> {
    let mut found = BTreeMap::new();
    for (key, version) in model.iter().filter(|(key, _)| key.starts_with(query.prefix)) {
        let rest = &key[query.prefix.len()..];
        match query.delimiter.and_then(|delimiter| rest.iter().position(|octet| *octet == delimiter)) {
            Some(at) => found.insert(key[..=query.prefix.len() + at].to_vec(), None),
            None => found.insert(key.clone(), Some(*version)),
        };
    }
    found.into_iter().filter(|(name, _)| name.as_slice() > query.after).collect()
}

fn key(random: &mut Seeded) -> Vec<u8> {
    // Octets around the delimiter, so that what sorts on either side of a directory comes up.
    let parts: [&[u8]; 9] = [b"a", b"b", b"a-", b"a0", b"\xff", b"", b"\0", b"/", b"ab"];
    let mut key = Vec::new();
    for at in 0..=random.below(4) {
        if at > 0 {
            key.push(b'/');
        }
        let part: &&[u8] = random.pick(&parts);
        key.extend_from_slice(part);
    }
    if key.is_empty() { b"a".to_vec() } else { key }
}

#[test]
fn what_is_listed_is_what_lives() {
    for_each_seed(0..24, |seed| {
        let mut random = Seeded::new(seed);
        let store = store(if random.one_in(2) { 12_000 } else { MIB });
        let mut now = store.clock().now();
        let mut model: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
        let mut listed = 0;
        for _ in 0..600 {
            let some = key(&mut random);
            match random.below(16) {
                0..=7 => {
                    let expiry = if random.one_in(4) { now + 1 + random.below(5) } else { 0 };
                    let version = store.put(&some, b"value", 1, expiry).unwrap();
                    model.insert(some, version);
                }
                8 | 9 => assert!(!store.delete(&some, now) || model.remove(&some).is_some()),
                10 => _ = store.touch(&some, now + random.below(3), now),
                11 => now += random.below(3),
                12 => _ = store.crawl(&mut Crawl::default(), 20),
                13 if random.one_in(12) => store.flush_all(0),
                _ => {
                    // Evicted, dead or flushed: told by the index.
                    model.retain(|key, version| store.peek(key, now).is_some_and(|found| found.version() == *version));
                    let (prefix, after) = (key(&mut random), key(&mut random));
                    let query = Query {
                        after: if random.one_in(2) { &after } else { b"" },
                        delimiter: if random.one_in(2) { Some(b'/') } else { None },
                        bytes_max: if random.one_in(2) { 40 } else { usize::MAX },
                        overhead_bytes: random.below(20) as usize,
                        ..Query::new(if random.one_in(2) { &prefix } else { b"" }, random.below(8) as usize)
                    };
                    let wanted = wanted(&model, &query);
                    let found: Vec<_> = list(&store, &query, now)
                        .into_iter()
                        .map(|entry| (entry.name.as_bytes().to_vec(), entry.object.map(|facts| facts.version)))
                        .collect();
                    // A place within a directory names the directory itself when the rest of it is still to be listed.
                    let skipped = usize::from(found.len() == wanted.len() + 1);
                    assert_eq!(found[skipped..], wanted, "{query:?}");
                    assert!(skipped == 0 || query.after.starts_with(&found[0].0) && found[0].1.is_none(), "{query:?}");
                    listed += found.len();
                }
            }
            let gauges = store.gauges();
            assert_eq!(gauges.names, gauges.objects);
        }
        assert!(listed > 100, "hardly anything was listed");
        store.flush_all(0);
        assert_eq!(list(&store, &Query::new(b"", 100), now), []);
        assert_whole(&store);
    });
}

/// Thousands of dead names are buried a few at a time, and a directory whose names all died is none.
#[test]
fn the_dead_are_passed_over_in_bounded_steps() {
    let store = store(4 * MIB);
    let now = store.clock().now();
    for number in 0..3000 {
        store.put(format!("dir/{number:05}").as_bytes(), b"", 0, now + 1).unwrap();
        store.put(format!("key-{number:05}").as_bytes(), b"", 0, now + 1).unwrap();
    }
    store.put(b"dir/02999/x", b"", 0, 0).unwrap();
    store.put(b"zero", b"", 0, 0).unwrap();
    let mut after = Vec::new();
    let mut names = Vec::new();
    for call in 0.. {
        let before = store.gauges().names;
        let query = Query { after: &after, delimiter: Some(b'/'), ..Query::new(b"", 10) };
        let listing = store.list(&query, now + 2).unwrap();
        assert!(before - store.gauges().names <= 300, "too many at once");
        names.extend(listing.entries.iter().map(|entry| entry.name.as_bytes().to_vec()));
        let Some(next) = listing.next else {
            assert!(call > 10);
            break;
        };
        after = next.as_bytes().to_vec();
    }
    assert_eq!(names, [b"dir/".to_vec(), b"zero".to_vec()]);
    assert_eq!(store.gauges().objects, 2);
    store.flush_all(0);
    assert_eq!(list(&store, &Query::new(b"", 100), now), []);
    assert_whole(&store);
}

/// Directories are passed over, not walked: a listing touches no name below one but the first.
#[test]
fn a_directory_is_one_entry_however_much_is_in_it() {
    let store = store(4 * MIB);
    let now = store.clock().now();
    for number in 0..2000 {
        store.put(format!("d/{}/{number:05}", number % 4).as_bytes(), b"", 0, now + 1).unwrap();
    }
    for name in ["d/0", "d/1-", "d/4", "e", "d"] {
        store.put(name.as_bytes(), b"12345", 7, 0).unwrap();
    }
    let query = Query { delimiter: Some(b'/'), ..Query::new(b"d/", 100) };
    let listing = store.list(&query, now).unwrap();
    let names: Vec<_> = listing.entries.iter().map(|entry| (entry.name.as_bytes(), entry.object.is_some())).collect();
    let wanted: [(&[u8], bool); 7] = [
        (b"d/0", true),
        (b"d/0/", false),
        (b"d/1-", true),
        (b"d/1/", false),
        (b"d/2/", false),
        (b"d/3/", false),
        (b"d/4", true),
    ];
    assert_eq!(names, wanted);
    assert_eq!(listing.next, None);
    let facts = listing.entries[0].object.unwrap();
    assert_eq!((facts.len, facts.flags, facts.expiry), (5, 7, 0));
    let after = Query { after: b"d/1/", ..query };
    assert_eq!(store.list(&after, now).unwrap().entries, listing.entries[4..]);
}

#[test]
fn names_count_in_the_bound_of_the_index() {
    let value = [0; 10];
    let (mut counts, mut bytes) = (Vec::new(), Vec::new());
    for make in [Store::new, Store::with_namespace, Store::with_files] {
        let sizes = store(100_000).sizes().clone();
        let store = make(sizes).unwrap();
        for number in 0..2000_u32 {
            store.put(&number.to_be_bytes(), &value, 0, 0).unwrap();
        }
        let gauges = store.gauges();
        assert!(gauges.index_bytes <= 100_000);
        counts.push(gauges.objects);
        bytes.push(gauges.index_bytes / gauges.objects);
        store.flush_all(0);
        let mut place = Crawl::default();
        while store.crawl(&mut place, 5000) {}
        assert_whole(&store);
    }
    assert!(counts.is_sorted_by(|one, other| one > other), "{counts:?}");
    assert!(bytes.is_sorted_by(|one, other| one < other), "{bytes:?}");
}

/// Set, delete, expiry, flush and eviction of the same keys by several threads, while others list: at rest namespace and
/// index agree, and what was there all the time was in every listing, once.
#[test]
fn threads_leave_the_namespace_as_the_index() {
    for_each_seed(0..4, |seed| {
        // With little room for the index eviction takes part; with much the keys that nobody touches must stay.
        let crowded = seed % 2 == 1;
        let store = store(if crowded { 20_000 } else { 8 * MIB });
        let kept: BTreeSet<Vec<u8>> =
            (0..40).map(|number| format!("{}/kept/{number}", number % 5).into_bytes()).collect();
        if !crowded {
            kept.iter().for_each(|key| _ = store.put(key, b"kept", 0, 0).unwrap());
        }
        let end = Instant::now() + Duration::from_millis(600);
        let done = AtomicBool::new(false);
        let (changes, listings) = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4_u64)
                .map(|thread| {
                    let (store, mut random) = (&store, Seeded::new(seed * 100 + thread));
                    scope.spawn(move || {
                        let mut changes = 0_u64;
                        while Instant::now() < end {
                            let now = store.clock().now();
                            // Few enough that threads meet at the same key all the time.
                            let key = format!("{}/{}", random.below(5), random.below(12)).into_bytes();
                            match random.below(12) {
                                0..=4 => {
                                    let expiry = if random.one_in(8) { now } else { 0 };
                                    changes += u64::from(store.put(&key, b"value", 0, expiry).is_ok());
                                }
                                5 => {
                                    let draft = store.draft(0, None);
                                    _ = store.commit(&key, draft, 0, 0, Condition::Absent, now);
                                }
                                6..=8 => changes += u64::from(store.delete(&key, now)),
                                9 => _ = store.touch(&key, now, now),
                                10 => _ = store.get(&key, now),
                                _ if crowded && random.one_in(20) => store.flush_all(0),
                                _ => _ = store.crawl(&mut Crawl::default(), 8),
                            }
                        }
                        changes
                    })
                })
                .collect();
            let listers: Vec<_> = (0..2_u64)
                .map(|thread| {
                    let (store, kept, done, mut random) = (&store, &kept, &done, Seeded::new(seed * 100 + 50 + thread));
                    scope.spawn(move || {
                        let mut listings = 0_u64;
                        while !done.load(Ordering::Relaxed) {
                            let now = store.clock().now();
                            let delimiter = if random.one_in(3) { Some(b'/') } else { None };
                            let query = Query { delimiter, ..Query::new(b"", 1 + random.below(20) as usize) };
                            let found: BTreeSet<_> =
                                list(store, &query, now).iter().map(|entry| entry.name.as_bytes().to_vec()).collect();
                            if !crowded {
                                match delimiter {
                                    None => assert!(kept.is_subset(&found), "{found:?}"),
                                    Some(_) => {
                                        assert_eq!(found, (0..5).map(|n| format!("{n}/").into_bytes()).collect())
                                    }
                                }
                            }
                            listings += 1;
                        }
                        listings
                    })
                })
                .collect();
            let changes: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            done.store(true, Ordering::Relaxed);
            let listings: Vec<_> = listers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
            let sum = |ended: Vec<std::thread::Result<u64>>| {
                ended.into_iter().map(|count| count.expect("no panic")).sum::<u64>()
            };
            (sum(changes), sum(listings))
        });
        assert!(changes > 1000 && listings > 10, "nothing happened: {changes} changes, {listings} listings");
        let now = store.clock().now();
        let found: Vec<_> = list(&store, &Query::new(b"", 1000), now);
        for entry in &found {
            let object = store.peek(entry.name.as_bytes(), now).expect("listed at rest");
            assert_eq!(entry.object.unwrap().version, object.version());
        }
        let gauges = store.gauges();
        assert_eq!((gauges.names, gauges.objects), (found.len() as u64, found.len() as u64));
        for entry in &found {
            assert!(store.delete(entry.name.as_bytes(), now));
        }
        assert_whole(&store);
    });
}
