//! The index: look-ups that hit and miss, commits that replace, what a namespace and files add to that, and pages of a directory,
//! among a hundred thousand objects.
//!
//! `cargo bench --bench index`; `cargo bench --bench index -- --test` only sees whether it runs.

use std::hint::black_box;

use bulkhead::programs::nfs::files::{Caller, Settings};
use bulkhead::programs::nfs::{Cookie, FileSystem, Name, Place, ReadDirectoryPlus};
use bulkhead::store::namespace::Query;
use bulkhead::store::{Lookup, Sizes, Store};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};

const OBJECTS: u32 = 100_000;

fn filled(make: fn(Sizes) -> std::io::Result<Store>) -> Store {
    let store = make(Sizes {
        memory_bytes: 64 << 20,
        head_bytes: 64 << 10,
        value_bytes_max: 1 << 30,
        index_bytes_max: 1 << 30,
        pinned_share: 0.5,
        pool_bytes: vec![1 << 30],
    });
    let store = store.expect("64 MiB of memory");
    store.extents().add_file(0, 1 << 30);
    for number in 0..OBJECTS {
        store.put(key(number).as_bytes(), &number.to_le_bytes(), 0, 0).expect("64 octets each");
    }
    store
}

fn key(number: u32) -> String {
    format!("object/{number:08}")
}

fn index(criterion: &mut Criterion) {
    let store = filled(Store::new);
    let keys: Vec<String> = (0..OBJECTS).map(key).collect();
    let mut at = 0;
    // A stride that is prime visits them all without going from neighbour to neighbour.
    let mut next = || {
        at = (at + 7919) % keys.len();
        keys[at].as_bytes()
    };
    let now = store.clock().now();
    let mut group = criterion.benchmark_group("index");
    group.throughput(Throughput::Elements(1));
    group.bench_function("get_and_pin", |bencher| {
        bencher.iter(|| match store.get(next(), now) {
            Lookup::Hit(pinned) => black_box(pinned.len()),
            other => panic!("{other:?}"),
        });
    });
    group.bench_function("peek", |bencher| bencher.iter(|| black_box(store.peek(next(), now)).is_some()));
    group.bench_function("miss", |bencher| {
        bencher.iter(|| black_box(store.get(black_box(b"object/none"), now)));
    });
    group.bench_function("replace_64_octets", |bencher| {
        bencher.iter(|| store.put(next(), &[7; 64], 0, 0).expect("it takes the place of the old one"));
    });
    group.finish();
    drop(store);
    namespace(criterion, &keys);
}

/// The same calls with and without a namespace, in turn.
fn namespace(criterion: &mut Criterion, keys: &[String]) {
    let stores = [
        ("without", filled(Store::new)),
        ("with", filled(Store::with_namespace)),
        ("files", filled(Store::with_files)),
    ];
    let mut group = criterion.benchmark_group("namespace");
    group.throughput(Throughput::Elements(1));
    let mut number = 0_u64;
    for (name, store) in &stores {
        group.bench_function(format!("set_a_new_key_and_delete_it/{name}"), |bencher| {
            bencher.iter(|| {
                number += 1;
                let key = format!("object/{:016x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                store.put(key.as_bytes(), &[7; 64], 0, 0).expect("64 octets");
                store.delete(key.as_bytes(), 0)
            });
        });
    }
    for (name, store) in &stores {
        let mut at = 0;
        group.bench_function(format!("replace_64_octets/{name}"), |bencher| {
            bencher.iter(|| {
                at = (at + 7919) % keys.len();
                store.put(keys[at].as_bytes(), &[7; 64], 0, 0).expect("it takes the place of the old one")
            });
        });
    }
    let [_, (_, store), (_, with_files)] = stores;
    let now = store.clock().now();
    let mut at = 0;
    group.throughput(Throughput::Elements(64));
    group.bench_function("list_64", |bencher| {
        bencher.iter(|| {
            at = (at + 7919) % (keys.len() - 100);
            let listing = store.list(&Query { after: keys[at].as_bytes(), ..Query::new(b"object/", 64) }, now);
            assert_eq!(listing.expect("there is a namespace").entries.len(), 64);
        });
    });
    pages(&mut group, with_files);
    group.finish();
}

/// READDIRPLUS of a directory of all the objects, from places all over it.
fn pages(group: &mut BenchmarkGroup<'_, WallTime>, store: Store) {
    let settings = Settings { fsid: 1, boot: 1, uid: 0, gid: 0 };
    let system = FileSystem::new(store, settings);
    let caller = Caller { uid: 0, gid: 0, gids: Vec::new() };
    let place = Place { dir: system.root(), name: Name(b"object") };
    let dir = system.lookup(&caller, &place).expect("it has objects").object;
    let now = system.store().clock().now();
    let numbers: Vec<u64> = (0..OBJECTS - 1000)
        .map(|number| {
            let object = system.store().peek(key(number).as_bytes(), now).expect("it is there");
            object.record().expect("a store with files").number().0
        })
        .collect();
    let (verifier, mut at) = (system.cookie_verifier(), 0);
    group.bench_function("readdirplus_page_of_64_names", |bencher| {
        bencher.iter(|| {
            at = (at + 7919) % numbers.len();
            let cookie = Cookie(numbers[at]);
            // Names of eight octets.
            let arguments = ReadDirectoryPlus { dir, cookie, verifier, dircount: 64 * 32, maxcount: 1 << 20 };
            let page = system.read_directory_plus(&caller, &arguments).expect("a page");
            assert_eq!(page.entries, 64);
        });
    });
}

criterion_group!(benches, index);
criterion_main!(benches);
