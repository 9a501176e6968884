//! The RPC door end to end over RDMA devices: what goes in comes out, by ranges, in batches, under every threshold and with any
//! number of credits, and kernel iWARP and ours understand each other through it. tests/rdma-vm/suite runs this; elsewhere it
//! says that it is skipped.
#![cfg(feature = "verbs")]

use std::num::NonZeroU32;
use std::time::Duration;

use bulkhead::client::rpc::{AsyncRpcClient, GetRange, PutOptions, RpcClient, RpcOptions, Status};
use bulkhead::client::{Client, Options, ServerUrl};
use bulkhead::fabric::SharedSpan;

mod common;
use common::daemon::{Builder, Daemon};
use common::pattern::Pattern;

#[path = "native/doors.rs"]
mod doors;
use doors::{SIZES, Stream, door_of};

mod rdma;
use rdma::{Bed, SIW, Settings, Siw, assert_back, beds, resources};

fn at(ip: &str) -> String {
    if ip.contains(':') { format!("rpc+verbs://[{ip}]:0") } else { format!("rpc+verbs://{ip}:0") }
}

/// For a client on a machine that is emulated.
fn options() -> RpcOptions {
    RpcOptions { connect_timeout: Duration::from_secs(60), ..RpcOptions::default() }
}

fn connect(url: &ServerUrl, options: RpcOptions) -> RpcClient {
    RpcClient::connect(url.clone(), options).unwrap_or_else(|error| panic!("{url}: {error}"))
}

fn text(daemon: &Daemon) -> Client {
    Client::connect(door_of(daemon, "memcache://"), Options::default()).expect("the text door is open")
}

/// Runs `test` over each device, against a daemon that `builder` makes. Afterwards nothing is left: of calls in the daemon, of
/// connections in the kernel.
fn over_each_device(builder: impl Fn() -> Builder, test: impl Fn(&Bed, &Daemon, &ServerUrl)) {
    for bed in beds() {
        let before = resources(bed.device);
        let daemon = builder().flags(&["--rpc", &at(bed.v4)]).start();
        test(bed, &daemon, &door_of(&daemon, "rpc+verbs://"));
        daemon.assert_nothing_leaks();
        drop(daemon);
        assert_back(bed.device, &before);
    }
}

fn put(client: &mut RpcClient, key: &str, seed: u64, len: u64) {
    client
        .put(key, &mut Stream::new(seed, len), len, PutOptions { flags: seed as u32, ..PutOptions::default() })
        .unwrap();
}

fn assert_whole(client: &mut RpcClient, key: &str, seed: u64, len: u64) {
    let mut copy = Stream::new(seed, len);
    let info = client.get(key, &mut copy).unwrap().unwrap_or_else(|| panic!("{key} was stored"));
    assert_eq!((info.len, info.flags, copy.at), (len, seed as u32, len), "{key}");
}

/// Ranges of values of pattern `seed`, in one go: their keys, first octets and lengths.
fn assert_ranges(client: &mut RpcClient, wanted: &[(&str, u64, usize, u64)]) {
    let range = |&(key, offset, len, _): &(&str, u64, usize, u64)| GetRange {
        key: key.as_bytes().to_vec(),
        version: 0,
        offset,
        into: SharedSpan::new(len.max(1)).unwrap().slice(0..len),
    };
    let ranges: Vec<GetRange> = wanted.iter().map(range).collect();
    for ((range, got), (key, offset, len, seed)) in
        ranges.iter().zip(client.get_ranges(&ranges, None).unwrap()).zip(wanted)
    {
        let there = got.len.saturating_sub(*offset).min(*len as u64);
        assert_eq!((got.status, u64::from(got.count)), (Status::Ok, there), "{key} from {offset} on, {len} octets");
        let mut octets = vec![0; there as usize];
        range.into.copy_out(0, &mut octets);
        Pattern(*seed).check(*offset, &octets, key);
    }
}

#[test]
fn what_one_door_stores_the_other_gives() {
    over_each_device(
        || Daemon::builder().memory("256MiB").pool("512MiB"),
        |_, daemon, url| {
            for crc32c in [false, true] {
                let (mut rpc, mut text) = (connect(url, RpcOptions { crc32c, ..options() }), text(daemon));
                for len in SIZES.into_iter().chain([64 << 20]) {
                    put(&mut rpc, "by-rpc", 1, len);
                    text.put("by-text", &mut Stream::new(2, len), len, 2, None).unwrap();
                    assert_whole(&mut rpc, "by-text", 2, len);
                    let mut copy = Stream::new(1, len);
                    assert_eq!(text.get("by-rpc", &mut copy).unwrap().unwrap().flags, 1);
                    assert_eq!(copy.at, len);
                    let ends =
                        [(0, 1), (len / 3, 4097), (len.saturating_sub(5), 70_001), (len, 9), (len + 7, 1), (0, 0)];
                    assert_ranges(&mut rpc, &ends.map(|(offset, count)| ("by-text", offset, count, 2)));
                }
                assert!(rpc.delete("by-rpc").unwrap() && !rpc.delete("by-rpc").unwrap());
            }
        },
    );
}

#[test]
fn any_two_thresholds_understand_each_other() {
    const THRESHOLDS: [u32; 3] = [1024, 4096, 262_144];
    for server in THRESHOLDS {
        over_each_device(
            || Daemon::builder().setting("RPC__INLINE", &format!("{server}B")),
            |bed, _, url| {
                for client in THRESHOLDS {
                    let mut rpc = connect(url, RpcOptions { inline_bytes: client, ..options() });
                    // Segments that end in the middle of pages, of words, of windows.
                    for len in [0, 1, 700, 1023, 4000, 100_003] {
                        put(&mut rpc, "key", len, len);
                        assert_whole(&mut rpc, "key", len, len);
                    }
                    for key in 0..64 {
                        put(&mut rpc, &format!("batch-{key}"), key, 40 * key);
                    }
                    let keys: Vec<String> = (0..64).map(|key| format!("batch-{key}")).collect();
                    let wanted: Vec<_> =
                        keys.iter().zip(0..).map(|(key, seed)| (key.as_str(), seed, 3000, seed)).collect();
                    assert_ranges(&mut rpc, &wanted);
                    let present = rpc.leading(&keys).unwrap();
                    let mut listed: Vec<_> = rpc.list("batch-").map(|entry| entry.unwrap().key).collect();
                    listed.sort_unstable();
                    assert_eq!((present, listed.len()), (64, 64), "{} {server} {client}", bed.device);
                    assert!(rpc.delete_all(&keys).unwrap().iter().all(|status| *status == Status::Ok));
                }
            },
        );
    }
}

#[test]
fn memory_in_odd_segments_is_read_and_written_right() {
    over_each_device(Daemon::builder, |_, _, url| {
        for segment in [4096, 30_001, 262_144] {
            let segment_bytes_max = NonZeroU32::new(segment).unwrap();
            let mut rpc = connect(url, RpcOptions { segment_bytes_max, range_bytes: segment * 16, ..options() });
            for len in [4097, 300_007, 1 << 20] {
                put(&mut rpc, "key", len, len);
                assert_whole(&mut rpc, "key", len, len);
            }
        }
    });
}

#[test]
fn one_credit_and_sixty_four_carry_many_calls() {
    for credits in [1, 64] {
        over_each_device(
            || Daemon::builder().setting("RPC__CREDITS", &credits.to_string()),
            |_, _, url| {
                let asked = NonZeroU32::new(64).unwrap();
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let rpc =
                        AsyncRpcClient::connect(url.clone(), RpcOptions { credits: asked, ..options() }).await.unwrap();
                    let tasks: Vec<_> = (0..100_u64)
                        .map(|seed| {
                            let rpc = rpc.clone();
                            tokio::spawn(async move {
                                let (key, len) = (format!("{seed}"), (seed * 997) as usize);
                                let value = SharedSpan::new(len.max(1)).unwrap().slice(0..len);
                                value.copy_in(0, &Pattern(seed).octets(0, len));
                                rpc.put(&key, &value, PutOptions::default()).await.unwrap();
                                let (_, octets) = rpc.get(&key).await.unwrap().unwrap();
                                assert_eq!(octets.len(), len);
                                Pattern(seed).check(0, &octets, &key);
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await.unwrap();
                    }
                });
            },
        );
    }
}

#[test]
fn memory_of_a_call_given_up_is_not_written_any_more() {
    const LEN: usize = 1 << 20;
    over_each_device(Daemon::builder, |_, _, url| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let rpc = AsyncRpcClient::connect(url.clone(), options()).await.unwrap();
            let value = SharedSpan::new(LEN).unwrap();
            value.copy_in(0, &Pattern(1).octets(0, LEN));
            rpc.put("key", &value, PutOptions::default()).await.unwrap();
            let mut given_up = Vec::new();
            for round in 0..20 {
                let mut into = SharedSpan::new(LEN).unwrap();
                let ranges = [GetRange { key: b"key".to_vec(), version: 0, offset: 0, into: into.whole() }];
                let asked = rpc.get_ranges(&ranges, None);
                // The future is dropped wherever the transfer stands.
                let answered = tokio::time::timeout(Duration::from_millis(round), asked).await;
                drop(ranges);
                if answered.is_err() {
                    let waited = tokio::time::timeout(rdma::PATIENCE, async {
                        while into.get_mut().is_none() {
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                    });
                    waited.await.expect("the memory comes back");
                    into.get_mut().unwrap().fill(0xC5);
                    given_up.push(into);
                }
            }
            assert!(!given_up.is_empty(), "none was in time to be given up");
            // Whatever the server still did, it did not do it there.
            rpc.ping().await.unwrap();
            let (_, octets) = rpc.get("key").await.unwrap().unwrap();
            Pattern(1).check(0, &octets, "the connection is good");
            for into in &mut given_up {
                assert!(into.get_mut().unwrap().iter().all(|octet| *octet == 0xC5));
            }
        });
    });
}

#[test]
fn addresses_of_ipv6_are_as_good() {
    for bed in beds() {
        let before = resources(bed.device);
        let daemon = Daemon::builder().flags(&["--rpc", &at(bed.v6)]).start();
        let url = door_of(&daemon, "rpc+verbs://");
        assert!(url.to_string().starts_with(&format!("rpc+verbs://[{}]:", bed.v6)), "{url}");
        let mut rpc = connect(&url, options());
        for len in [0, 193, 262_145, 8 << 20] {
            put(&mut rpc, "key", len, len);
            assert_whole(&mut rpc, "key", len, len);
        }
        drop(rpc);
        daemon.assert_nothing_leaks();
        drop(daemon);
        assert_back(bed.device, &before);
    }
}

/// A client on siw and the door of our own iWARP, and the other way round.
#[test]
fn siw_and_our_iwarp_understand_each_other() {
    if beds().is_empty() {
        return;
    }
    let siw = Siw::take();
    let ours = format!("rpc+iwarp://{}:0", SIW.v4);
    let daemon =
        Daemon::builder().flags(&["--rpc", &at(SIW.v4), "--rpc", &ours, "--rpc", &format!("{ours}?crc=off")]).start();
    let place = |url: &ServerUrl| match url.clone() {
        ServerUrl::RpcIwarp { host, port, .. } | ServerUrl::RpcVerbs { host, port } => (host, port),
        other => panic!("{other}"),
    };
    let (host, port) = place(&door_of(&daemon, "rpc+verbs://"));
    let kernel = [true, false].map(|crc| ServerUrl::RpcIwarp { host: host.clone(), port, crc });
    let found = daemon.doors().iter().filter(|door| door.starts_with("rpc+iwarp://"));
    let found = found.map(|door| place(&door.parse().unwrap()));
    let across: Vec<_> = found.map(|(host, port)| ServerUrl::RpcVerbs { host, port }).collect();
    assert_eq!(across.len(), 2);
    // The native door is tried under all eight (tests/rdma_native.rs).
    for (revision, peer_to_peer, crc) in
        [(2, false, false), (2, false, true), (2, true, false), (2, true, true), (1, false, true)]
    {
        let settings = Settings { crc, peer_to_peer, revision };
        siw.set(settings);
        for url in kernel.iter().chain(&across) {
            let mut rpc = connect(url, options());
            for len in &SIZES[..10] {
                put(&mut rpc, "key", *len, *len);
                assert_whole(&mut rpc, "key", *len, *len);
            }
        }
        println!("siw and our iWARP, {settings:?}: every size");
    }
    daemon.assert_nothing_leaks();
}
