//! The index: look-ups that hit and miss, commits that replace, and what a namespace adds to that, among a hundred thousand
//! objects.
//!
//! `cargo bench --bench index`; `cargo bench --bench index -- --test` only sees whether it runs.

use std::hint::black_box;

use bulkhead::store::namespace::Query;
use bulkhead::store::{Lookup, Sizes, Store};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const OBJECTS: u32 = 100_000;

fn filled(has_namespace: bool) -> Store {
    let make = if has_namespace { Store::with_namespace } else { Store::new };
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
    let store = filled(false);
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
    let stores = [("without", filled(false)), ("with", filled(true))];
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
    let [_, (_, store)] = &stores;
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
    group.finish();
}

criterion_group!(benches, index);
criterion_main!(benches);
