//! The memcache codec: request lines in, reply lines out, and the framing of a stream that carries values.
//!
//! `cargo bench --bench codec`; `cargo bench --bench codec -- --test` only sees whether it runs.

use std::hint::black_box;

use bulkhead::wire::memcache::conversation::{Conversation, Step};
use bulkhead::wire::memcache::parse::{LINE_BYTES_MAX, Parsed, Parser};
use bulkhead::wire::memcache::request::Command;
use bulkhead::wire::memcache::response::value_line;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

fn lines(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("line");
    let many_keys = (0..100).fold(String::from("get"), |line, key| format!("{line} object/{key:04}")) + "\r\n";
    for (name, line) in [
        ("get", "get models/7b/part-0001\r\n"),
        ("set", "set models/7b/part-0001 0 3600 1048576\r\n"),
        ("get_100_keys", &many_keys),
        ("unknown", "nonsense models/7b/part-0001 0 3600 1048576\r\n"),
    ] {
        group.throughput(Throughput::Bytes(line.len() as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut parser = Parser::new(LINE_BYTES_MAX);
                match parser.parse(black_box(line.as_bytes())) {
                    Parsed::NeedMore => panic!("the line is whole"),
                    parsed => _ = black_box(parsed),
                }
            });
        });
    }
    group.finish();
}

/// A stream of pipelined sets and gets, as it lies in an input buffer.
fn stream(criterion: &mut Criterion) {
    let mut input = Vec::new();
    for number in 0..100 {
        input.extend_from_slice(format!("set object/{number:04} 0 0 100\r\n{}\r\n", "x".repeat(100)).as_bytes());
        input.extend_from_slice(format!("get object/{number:04}\r\n").as_bytes());
    }
    let mut group = criterion.benchmark_group("stream");
    group.throughput(Throughput::Elements(200));
    group.bench_function("100_sets_and_gets", |bencher| {
        bencher.iter(|| {
            let mut conversation = Conversation::new(LINE_BYTES_MAX);
            let (mut at, mut requests) = (0, 0);
            loop {
                let (consumed, step) = conversation.step(&input[at..]);
                at += consumed;
                match step {
                    Step::Command(Command::Store(header)) => conversation.accept_body(header.len),
                    Step::Command(_) => requests += 1,
                    Step::Body { available, .. } => {
                        conversation.body_taken(available as u64);
                        at += available;
                    }
                    Step::BodyEnd { intact } => requests += u32::from(intact),
                    Step::NeedMore => break,
                    Step::Refused { .. } | Step::Close(_) => panic!("every request is good"),
                }
            }
            assert_eq!((at, requests), (input.len(), 200));
        });
    });
    group.finish();
}

fn replies(criterion: &mut Criterion) {
    let mut out = Vec::with_capacity(128);
    criterion.bench_function("value_line", |bencher| {
        bencher.iter(|| {
            out.clear();
            value_line(&mut out, black_box(b"models/7b/part-0001"), 0, black_box(1 << 20), Some(12_345_678));
            black_box(out.len())
        });
    });
}

criterion_group!(codec, lines, stream, replies);
criterion_main!(codec);
