//! The arena: taking and giving blocks, alone and beside a second thread, and filling a segment.
//!
//! `cargo bench --bench arena`; `cargo bench --bench arena -- --test` only sees whether it runs.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bulkhead::fabric::region::Region;
use bulkhead::store::segment::{Filling, Residency};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const SEGMENT: u64 = 256 << 10;

fn blocks(criterion: &mut Criterion) {
    let region = Region::map(64 << 20, Arc::default()).expect("64 MiB of memory");
    let mut group = criterion.benchmark_group("block");
    for (name, len) in [("64", 64), ("4KiB", 4 << 10), ("256KiB", SEGMENT)] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| black_box(region.allocate(black_box(len)).expect("all of it is free")));
        });
    }
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                black_box(region.allocate(4 << 10));
            }
        });
        group.bench_function("4KiB_beside_another_thread", |bencher| {
            bencher.iter(|| black_box(region.allocate(black_box(4 << 10)).expect("most of it is free")));
        });
        ended.store(true, Ordering::Relaxed);
    });
    group.finish();
}

/// Half of the blocks are held, every second one: nothing joins.
fn fragmented(criterion: &mut Criterion) {
    let region = Region::map(64 << 20, Arc::default()).expect("64 MiB of memory");
    let mut held: Vec<_> = std::iter::from_fn(|| region.allocate(4 << 10)).collect();
    let mut index = 0;
    held.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    criterion.bench_function("block/4KiB_in_a_fragmented_arena", |bencher| {
        bencher.iter(|| black_box(region.allocate(black_box(4 << 10)).expect("half of it is free")));
    });
}

fn segments(criterion: &mut Criterion) {
    let region = Region::map(64 << 20, Arc::default()).expect("64 MiB of memory");
    let residency = Arc::<Residency>::default();
    let octets = vec![7_u8; SEGMENT as usize];
    let mut group = criterion.benchmark_group("segment");
    group.throughput(Throughput::Bytes(SEGMENT));
    group.bench_function("copy_256KiB_and_seal", |bencher| {
        bencher.iter(|| {
            let block = region.allocate(SEGMENT).expect("all of it is free");
            let mut filling = Filling::new(block, None, SEGMENT as u32, true);
            filling.spare().copy_from_slice(black_box(&octets));
            filling.advance(octets.len());
            black_box(filling.seal(&residency))
        });
    });
    group.finish();
}

criterion_group!(arena, blocks, fragmented, segments);
criterion_main!(arena);
