//! The index: look-ups that hit and miss, and commits that replace, among a hundred thousand objects.
//!
//! `cargo bench --bench index`; `cargo bench --bench index -- --test` only sees whether it runs.

use std::hint::black_box;

use bulkhead::store::{Lookup, Sizes, Store};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const OBJECTS: u32 = 100_000;

fn filled() -> Store {
    let store = Store::new(Sizes {
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
    let store = filled();
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
}

criterion_group!(benches, index);
criterion_main!(benches);
