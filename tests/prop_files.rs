//! Files, and the file system over them, under threads: whatever is set, deleted, evicted, renamed and made at the same time, every object has one record with
//! its own number, and what is moved together is never seen apart.

mod rig;

use bulkhead::programs::nfs::files::{Caller, Settings};
use bulkhead::programs::nfs::{
    Cookie, Create, CreateHow, FileSystem, MakeDirectory, Name, Place, Read, ReadDirectoryPlus, Rename, SetAttributes,
    Stable,
};
use bulkhead::store::files::Metadata;
use bulkhead::store::namespace::Query;
use bulkhead::store::{Crawl, Sizes, Store};
use rig::{Seeded, for_each_seed};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    Store::with_files(sizes).unwrap()
}

#[test]
fn threads_leave_every_object_with_a_record_of_its_own() {
    for_each_seed(0..4, |seed| {
        // With little room for the index eviction takes part.
        let store = store(if seed % 2 == 1 { 40_000 } else { 8 * MIB });
        let end = Instant::now() + Duration::from_millis(600);
        let changes: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..5_u64)
                .map(|thread| {
                    let (store, mut random) = (&store, Seeded::new(seed * 100 + thread));
                    scope.spawn(move || {
                        let mut changes = 0_u64;
                        while Instant::now() < end {
                            changes += u64::from(act(store, &mut random));
                        }
                        changes
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
        });
        assert!(changes > 1000, "{changes}");
        let now = store.clock().now();
        let mut numbers = BTreeSet::new();
        let listing = store.list(&Query::new(b"", 10_000), now).unwrap();
        for entry in &listing.entries {
            let object = store.peek(entry.name.as_bytes(), now).expect("listed at rest");
            let record = object.record().expect("a store with files");
            assert_eq!(record.key(), object.key());
            assert!(numbers.insert(record.number()), "two have one number");
            let (found, same) = store.file(record.number(), now).expect("it is found by its number");
            assert_eq!((found.key(), same.version()), (object.key(), object.version()));
        }
        let gauges = store.gauges();
        assert_eq!((gauges.names, gauges.objects), (numbers.len() as u64, numbers.len() as u64));
        assert_eq!((gauges.claims, gauges.pins), (0, 0));
    });
}

/// One call of some door. True if it changed something.
fn act(store: &Store, random: &mut Seeded) -> bool {
    let now = store.clock().now();
    // Few enough that threads meet at the same key all the time.
    let mut some = || format!("{}/{}", random.below(4), random.below(8)).into_bytes();
    let (key, other) = (some(), some());
    let [dir, other_dir] = [&key, &other].map(|key| key[..2].to_vec());
    match random.below(16) {
        0..=3 => store.put(&key, b"value", 0, if random.one_in(8) { now } else { 0 }).is_ok(),
        4 | 5 => store.delete(&key, now),
        6 => store.rename(&key, &other, now).is_ok(),
        7 if dir != other_dir => store.rename_directory(&dir, &other_dir, 20, now).is_ok(),
        8 => store.make_directory(&dir, Metadata::new(None, 0)).is_ok(),
        9 => {
            let found = store.directory(&dir, now).unwrap();
            found.is_some_and(|found| store.remove_directory(&found, now).is_ok())
        }
        10 => {
            let Some(object) = store.peek(&key, now) else { return false };
            object.record().expect("a store with files").mark_listed();
            store.place_of(object.record().unwrap().number(), b"").is_some()
        }
        11 | 12 => {
            let Ok(Some(mut draft)) = store.sparse_draft(&key, now) else { return false };
            _ = draft.write(random.below(200_000), &[7; 5000]);
            store.commit_sparse(draft, now).is_ok()
        }
        13 if random.one_in(200) => {
            store.flush_all(0);
            true
        }
        14 => {
            _ = store.crawl(&mut Crawl::default(), 8);
            _ = store.made_directories(b"", b"", 8);
            false
        }
        _ => store.list(&Query { delimiter: Some(b'/'), ..Query::new(b"", 4) }, now).unwrap().next.is_some(),
    }
}

/// The file system by several threads, other doors among them: nobody waits for ever, and nothing is left behind.
#[test]
fn threads_share_a_file_system() {
    for_each_seed(0..3, |seed| {
        let store = store(8 * MIB);
        let settings = Settings { fsid: 1, boot: seed, uid: 0, gid: 0 };
        let system = FileSystem::new(store.clone(), settings);
        let end = Instant::now() + Duration::from_millis(600);
        let written: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..5_u64)
                .map(|thread| {
                    let (system, mut random) = (&system, Seeded::new(seed * 100 + thread));
                    scope.spawn(move || {
                        let mut written = 0;
                        while Instant::now() < end {
                            written += serve(system, &mut random);
                        }
                        written
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
        });
        assert!(written > 1_000_000, "{written}");
        assert_eq!(system.handle_time(u64::MAX), 0);
        let gauges = store.gauges();
        assert_eq!((gauges.claims, gauges.pins, gauges.names), (0, 0, gauges.objects));
    });
}

/// One call of a client, or of another door. Octets that were written.
fn serve(system: &FileSystem, random: &mut Seeded) -> u64 {
    const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"e", b"f"];
    let caller = Caller { uid: 0, gid: 0, gids: Vec::new() };
    let now = system.store().clock().now();
    let mut place = || {
        let dirs = [&b"x"[..], b"y"];
        let at = Place { dir: system.root(), name: Name(dirs[random.below(2) as usize]) };
        let make = MakeDirectory { place: at, attributes: SetAttributes::default() };
        let name = Name(NAMES[random.below(6) as usize]);
        let made = system.make_directory(&caller, &make).ok().and_then(|made| made.obj);
        let dir = made.or_else(|| system.lookup(&caller, &at).ok().map(|found| found.object));
        Place { dir: dir.unwrap_or(system.root()), name }
    };
    let (from, to) = (place(), place());
    let how = CreateHow::Unchecked(SetAttributes::default());
    match random.below(16) {
        0 => _ = system.rename(&caller, &Rename { from, to }),
        1 => _ = system.remove(&caller, &from),
        2 => {
            let [from, to] = [b"x", b"y"].map(|name| Place { dir: system.root(), name: Name(name) });
            _ = system.rename(&caller, &Rename { from, to });
        }
        3 => _ = system.remove_directory(&caller, &Place { dir: system.root(), name: Name(b"y") }),
        4 => _ = system.handle_time(system.store().clock().now_ms() + random.below(2000)),
        5 => _ = system.store().put(b"x/a", b"of another door", 0, 0),
        6 => _ = system.store().delete(b"x/b", now),
        7 => {
            let listing = ReadDirectoryPlus {
                dir: from.dir,
                cookie: Cookie(0),
                verifier: system.cookie_verifier(),
                dircount: 4096,
                maxcount: 8192,
            };
            _ = system.read_directory_plus(&caller, &listing);
        }
        _ => {
            let Some(file) = system.create(&caller, &Create { place: from, how }).ok().and_then(|made| made.obj) else {
                return 0;
            };
            if random.one_in(3) {
                _ = system.read(&caller, &Read { file, offset: random.below(50_000), count: 100_000 });
            }
            let Ok(mut writing) = system.begin_write(&caller, &file, random.below(100_000), 20_000) else { return 0 };
            let _step = system.write(&mut writing, &[7; 20_000]);
            let stable = if random.one_in(4) { Stable::FileSync } else { Stable::Unstable };
            return system.end_write(writing, 20_000, stable).map_or(0, |done| u64::from(done.count));
        }
    }
    0
}

/// Versions are given once: an object that is there before and after, while another that moves with it is not, was seen apart.
#[test]
fn what_lies_in_a_directory_moves_together() {
    let store = store(8 * MIB);
    let now = store.clock().now();
    const COUNT: usize = 200;
    for number in 0..COUNT {
        store.put(format!("x/{number}").as_bytes(), b"", 0, 0).unwrap();
    }
    let done = AtomicBool::new(false);
    let looks = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let lookers: Vec<_> = (0..2)
            .map(|thread| {
                let (store, done, looks, mut random) = (&store, &done, &looks, Seeded::new(thread));
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        let dir = *random.pick(&["x", "y"]);
                        let mut key = || format!("{dir}/{}", random.below(COUNT as u64)).into_bytes();
                        let (one, other) = (key(), key());
                        let version = |key: &[u8]| store.peek(key, now).map(|object| object.version());
                        let (before, between, after) = (version(&one), version(&other), version(&one));
                        assert!(between.is_some() || before.is_none() || before != after, "seen apart");
                        looks.fetch_add(u64::from(before.is_some() && before == after), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        // On a busy machine lookers get their turn late.
        let mut number = 0;
        while number < 600 || looks.load(Ordering::Relaxed) <= 10 && lookers.iter().all(|looker| !looker.is_finished())
        {
            let [from, to] = if number % 2 == 0 { [b"x/", b"y/"] } else { [b"y/", b"x/"] };
            store.rename_directory(from, to, COUNT, now).unwrap();
            number += 1;
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(store.gauges().names, COUNT as u64);
}
