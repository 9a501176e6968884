//! Long ranges of long values over RPC: what another door stored, at offsets and of lengths past 32 bits.

use bulkhead::client::rpc::{GetRange, PutOptions, RpcClient, RpcOptions, Status};
use bulkhead::client::{AnyClient, Options, ServerUrl};
use bulkhead::fabric::SharedSpan;

mod common;
use common::{Daemon, GIB, MIB, Pattern};

#[path = "native/doors.rs"]
mod doors;
use doors::{Stream, door_of};

fn start(builder: common::Builder) -> (Daemon, ServerUrl) {
    let daemon = builder.flags(&["--rpc", "rpc+iwarp://127.0.0.1:0"]).start();
    let rpc = door_of(&daemon, "rpc+iwarp://");
    (daemon, rpc)
}

/// Compares memory with a pattern in pieces.
fn check(pattern: Pattern, offset: u64, span: &SharedSpan, count: u32) {
    let mut piece = vec![0; MIB as usize];
    for at in (0..u64::from(count)).step_by(piece.len()) {
        let len = (u64::from(count) - at).min(MIB) as usize;
        span.copy_out(at as usize, &mut piece[..len]);
        pattern.check(offset + at, &piece[..len], "a range");
    }
}

/// A value of `len` octets by the text door, and each of `places` of it by RPC, in one call each.
fn read_ranges(daemon: &Daemon, rpc: &ServerUrl, len: u64, places: &[(u64, u32)]) {
    let mut text = AnyClient::connect(door_of(daemon, "memcache://"), Options::default()).unwrap();
    text.put("large", &mut Stream::new(16, len), len, 0, None).unwrap();
    for crc32c in [false, true] {
        let mut client = RpcClient::connect(rpc.clone(), RpcOptions { crc32c, ..RpcOptions::default() }).unwrap();
        for &(offset, wanted) in places {
            let into = SharedSpan::new(wanted.max(1) as usize).unwrap();
            let range = GetRange { key: b"large".to_vec(), version: 0, offset, into: into.slice(0..wanted as usize) };
            let got = client.get_ranges(&[range], None).unwrap()[0];
            let count = len.saturating_sub(offset).min(wanted.into()) as u32;
            assert_eq!((got.status, got.len, got.count), (Status::Ok, len, count), "{wanted} at {offset}");
            check(Pattern(16), offset, &into, count);
        }
    }
    let mut client = RpcClient::connect(rpc.clone(), RpcOptions::default()).unwrap();
    let end = len - len / 3;
    let mut tail = Vec::new();
    client.get_range_with("large", end..end + 5 * MIB + 1, |_| Ok(&mut tail)).unwrap().unwrap();
    Pattern(16).check(end, &tail, "a range by writer");
    assert!(client.delete("large").unwrap());
}

/// A value by RPC, all of it by the text door.
fn write_and_read(daemon: &Daemon, rpc: &ServerUrl, len: u64, options: RpcOptions) {
    let mut client = RpcClient::connect(rpc.clone(), options).unwrap();
    client.put("written", &mut Stream::new(17, len), len, PutOptions::default()).unwrap();
    let mut text = AnyClient::connect(door_of(daemon, "memcache://"), Options::default()).unwrap();
    let mut copy = Stream::new(17, len);
    assert_eq!(text.get("written", &mut copy).unwrap().unwrap().len, len);
    assert_eq!(copy.at, len);
    assert!(client.delete("written").unwrap());
}

#[test]
fn ranges_of_a_value_on_disk_are_what_another_door_stored() {
    let (daemon, rpc) = start(Daemon::builder().memory("32MiB"));
    const LEN: u64 = 96 * MIB + 5;
    let places = [
        (0, 0),
        (0, 1),
        (LEN - 1, 1),
        (LEN, 7),
        (u64::MAX, u32::MAX >> 8),
        (0, 96 * MIB as u32 + 5),
        (33 * MIB + 3, 50 * MIB as u32 + 1),
        (LEN - 20 * MIB - 1, 30 * MIB as u32),
    ];
    read_ranges(&daemon, &rpc, LEN, &places);
    write_and_read(&daemon, &rpc, LEN, RpcOptions { range_bytes: 40 * MIB as u32 + 3, ..RpcOptions::default() });
    daemon.assert_nothing_leaks();
}

#[test]
#[ignore = "20 GiB of disk, 5 GiB of RAM, minutes: cargo test --release --test e2e_rpc_large -- --ignored"]
fn ranges_of_16_gib_are_what_another_door_stored() {
    let (daemon, rpc) = start(Daemon::builder().memory("256MiB").pool("20GiB"));
    const LEN: u64 = 16 * GIB;
    let places = [
        (0, 1),
        (LEN - 1, 1),
        (LEN - 1, u32::MAX),
        (LEN, u32::MAX >> 8),
        (4 * GIB - 3, 7),
        (4 * GIB - 1, 64 * MIB as u32 + 1),
        (8 * GIB + 1, 256 * MIB as u32 + 3),
        (LEN - 300 * MIB - 1, 300 * MIB as u32 + 1),
        (3 * GIB + 5, u32::MAX),
    ];
    read_ranges(&daemon, &rpc, LEN, &places);
    write_and_read(
        &daemon,
        &rpc,
        5 * GIB + 1,
        RpcOptions { range_bytes: 1 << 30, crc32c: true, ..RpcOptions::default() },
    );
    daemon.assert_nothing_leaks();
}
