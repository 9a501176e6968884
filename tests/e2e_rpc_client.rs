//! The RPC client, blocking and asynchronous, and the daemon: all doors meet one store.

use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bulkhead::client::rpc::{AsyncRpcClient, Condition, GetRange, GotRange, PutOptions, RpcClient, RpcOptions, Status};
use bulkhead::client::{AnyClient, ClientError, Options, ServerUrl};
use bulkhead::fabric::{Fabric, SharedSpan};

mod common;
use common::{Daemon, MIB, Pattern};

#[path = "native/doors.rs"]
mod doors;
use doors::{Stream, door_of};

mod rpc;

/// Lengths where messages, words, pages, windows and ranges end.
const SIZES: [u64; 12] = [0, 1, 3, 1000, 4095, 4096, 4097, 65_536, 262_145, MIB, MIB + 1, 20 * MIB];

const RPC: &str = "rpc+iwarp://127.0.0.1:0";

fn start(builder: common::Builder, rpc: &str) -> Daemon {
    builder.flags(&["--rpc", rpc, "--native", "native+iwarp://127.0.0.1:0"]).start()
}

fn rpc_url(daemon: &Daemon) -> ServerUrl {
    door_of(daemon, "rpc+iwarp://")
}

fn client(daemon: &Daemon, options: RpcOptions) -> RpcClient {
    RpcClient::connect(rpc_url(daemon), options).expect("the RPC door is open")
}

fn checked() -> RpcOptions {
    RpcOptions { crc32c: true, ..RpcOptions::default() }
}

/// GET calls that the daemon has served.
fn get_calls(daemon: &Daemon) -> u64 {
    let metrics = daemon.admin_get("/metrics");
    let count = metrics.lines().find_map(|line| line.strip_prefix("bulkhead_rpc_calls_total{procedure=\"GET\"} "));
    count.map_or(0, |count| count.parse().unwrap())
}

fn octets_of(span: &SharedSpan, count: u32) -> Vec<u8> {
    let mut octets = vec![0; count as usize];
    span.copy_out(0, &mut octets);
    octets
}

#[test]
fn what_one_door_stores_the_others_give() {
    for (door, options) in [(RPC, RpcOptions::default()), ("rpc+iwarp://127.0.0.1:0?crc=off", checked())] {
        let daemon = start(Daemon::builder().memory("256MiB"), door);
        let connect = |url: ServerUrl| match url.is_rpc() {
            true => AnyClient::Rpc(Box::new(RpcClient::connect(url, options).unwrap())),
            false => AnyClient::connect(url, Options::default()).unwrap(),
        };
        let mut clients = ["rpc+", "native+", "memcache://"].map(|scheme| connect(door_of(&daemon, scheme)));
        assert!(clients[0].url().to_string().ends_with(&door["rpc+iwarp://127.0.0.1:0".len()..]));
        for size in SIZES {
            for (number, writer) in clients.iter_mut().enumerate() {
                let seed = size * 3 + number as u64;
                writer.put(format!("by-{number}"), &mut Stream::new(seed, size), size, seed as u32, None).unwrap();
            }
            for reader in &mut clients {
                for number in 0..3 {
                    let (seed, key) = (size * 3 + number, format!("by-{number}"));
                    let mut copy = Stream::new(seed, size);
                    let info = reader.get(&key, &mut copy).unwrap().expect("it was stored");
                    assert_eq!((info.len, info.flags, copy.at), (size, seed as u32, size), "{key} {}", reader.url());
                    assert_eq!(reader.stat(&key).unwrap(), Some(info), "{key} {}", reader.url());
                    let mut buffer = vec![0; size as usize + 1];
                    assert_eq!(reader.get_into(&key, &mut buffer).unwrap(), Some(info));
                    Pattern(seed).check(0, &buffer[..size as usize], "into a buffer");
                    if size > 0 {
                        let short = reader.get_into(&key, &mut buffer[..size as usize - 1]).unwrap_err();
                        assert!(matches!(short, ClientError::TooLong { len, .. } if len == size), "{short}");
                    }
                }
                assert_eq!(reader.get("nothing", &mut Vec::new()).unwrap(), None);
            }
        }
        for remover in &mut clients {
            remover.put("gone", &mut &b"x"[..], 1, 0, None).unwrap();
            assert!(remover.touch("gone", Some(Duration::from_secs(100))).unwrap());
            assert!(remover.delete("gone").unwrap() && !remover.delete("gone").unwrap());
            assert!(!remover.touch("gone", None).unwrap());
        }
        drop(clients);
        daemon.assert_nothing_leaks();
    }
}

#[test]
fn values_on_disk_come_through_the_rpc_door() {
    use common::place::{Location, push_bodies, push_heads, reads};
    const LEN: u64 = (4 << 20) + 1;
    let daemon = start(Daemon::builder().memory("16MiB"), RPC);
    let mut client = client(&daemon, checked());
    let mut filler = daemon.connect();
    for (location, push) in [(Location::HalfOut, push_bodies as fn(&mut _, _)), (Location::Disk, push_heads)] {
        let key = format!("{location:?}");
        client.put(&key, &mut Stream::new(3, LEN), LEN, PutOptions::default()).unwrap();
        push(&mut filler, 28 << 20);
        let stat = client.stat(&key).unwrap().unwrap();
        assert_eq!(stat.ram_bytes + stat.disk_bytes, LEN);
        assert_eq!(stat.lead_bytes > 0, location == Location::HalfOut, "{stat:?}");
        let before = reads(&daemon);
        let into = SharedSpan::new(LEN as usize).unwrap();
        let range = GetRange { key: key.into_bytes(), version: stat.version, offset: 0, into: into.clone() };
        let got = client.get_ranges(&[range], None).unwrap();
        assert_eq!((got[0].status, got[0].count), (Status::Ok, LEN as u32));
        Pattern(3).check(0, &octets_of(&into, got[0].count), "from disk");
        assert_eq!(Location::between(before, reads(&daemon)), location);
    }
    drop(client);
    daemon.assert_nothing_leaks();
}

/// What every door, thresholds and fabric allow.
fn exercise(client: &mut RpcClient) {
    client.ping().unwrap();
    for (number, size) in [0, 1, 3, 4095, 4097, 70_000, 3 * MIB + 1].into_iter().enumerate() {
        let (key, seed) = (format!("exercise/{number}"), number as u64);
        let options = PutOptions { flags: 9, ..PutOptions::default() };
        let version = client.put(&key, &mut Stream::new(seed, size), size, options).unwrap();
        let mut copy = Stream::new(seed, size);
        let info = client.get(&key, &mut copy).unwrap().unwrap();
        assert_eq!((info.len, info.flags, info.cas, copy.at), (size, 9, version, size));
        // Odd offsets and lengths, the end, past it, nothing at all; each into memory of its own, all in one batch.
        let places = [0, 1, 2, 3, 5, 1021, 4093, size / 2, size.saturating_sub(3), size, size + 1, u64::MAX];
        let counts = [0, 1, 2, 3, 7, 1023, 4097, 66_001];
        let whole = SharedSpan::new(places.len() * counts.len() * 66_008).unwrap();
        whole.copy_in(0, &vec![0xee; whole.len()]);
        let wanted = places.iter().flat_map(|place| counts.iter().map(move |count| (*place, *count)));
        let range = |(index, (offset, count)): (usize, (u64, usize))| {
            let into = whole.slice(index * 66_008..index * 66_008 + count);
            GetRange { key: key.clone().into_bytes(), version, offset, into }
        };
        let ranges: Vec<GetRange> = wanted.enumerate().map(range).collect();
        for (index, (range, got)) in ranges.iter().zip(client.get_ranges(&ranges, None).unwrap()).enumerate() {
            let count = size.saturating_sub(range.offset).min(range.into.len() as u64) as u32;
            assert_eq!(got, GotRange { status: Status::Ok, flags: 9, version, len: size, count }, "{range:?}");
            let mut around = vec![0; 66_008];
            whole.copy_out(index * 66_008, &mut around);
            Pattern(seed).check(range.offset, &around[..count as usize], "a range");
            assert!(around[range.into.len()..].iter().all(|octet| *octet == 0xee), "beside {range:?}");
        }
        for (start, end) in [(0, 0), (1, 4), (5, 4095), (1, u64::MAX), (size, size + 9), (size / 3, size / 3 * 2)] {
            let (info, octets) = client.get_range_with(&key, start..end, |_| Ok(Vec::new())).unwrap().unwrap();
            assert_eq!((info.len, octets.len() as u64), (size, end.min(size).saturating_sub(start)), "{start}..{end}");
            Pattern(seed).check(start, &octets, "a range by writer");
        }
    }
    // Statuses of ranges are their own.
    let into = SharedSpan::new(64).unwrap();
    let range = |key: &str, version, at: usize| GetRange {
        key: key.as_bytes().to_vec(),
        version,
        offset: 0,
        into: into.slice(at..at + 8),
    };
    let got = client.get_ranges(&[range("none", 0, 0), range("exercise/5", 0, 8), range("exercise/5", 1, 16)], None);
    let statuses: Vec<_> = got.unwrap().into_iter().map(|got| (got.status, got.count)).collect();
    assert_eq!(statuses, [(Status::NotFound, 0), (Status::Ok, 8), (Status::Changed, 0)]);
    assert!(client.get_ranges(&[], None).unwrap().is_empty());
    // Conditions.
    let mut put =
        |condition| client.put("exercise/c", &mut &b"value"[..], 5, PutOptions { condition, ..PutOptions::default() });
    assert!(matches!(put(Condition::Present), Err(ClientError::Refused { .. })));
    let first = put(Condition::Absent).unwrap();
    assert!(matches!(put(Condition::Absent), Err(ClientError::Refused { .. })));
    let second = put(Condition::Version(first)).unwrap();
    assert!(second > first && matches!(put(Condition::Version(first)), Err(ClientError::Refused { .. })));
    assert!(put(Condition::Present).unwrap() > second);
    assert_eq!(client.delete_version("exercise/c", second).unwrap(), Status::Changed);
    let now = client.stat("exercise/c").unwrap().unwrap().version;
    assert_eq!(client.delete_version("exercise/c", now).unwrap(), Status::Ok);
    assert_eq!(client.stat("exercise/c").unwrap(), None);
    // A value whose reader fails within it is not there, and neither is its draft: the next ones are.
    for _ in 0..20 {
        let short = client.put("exercise/short", &mut Stream::new(1, 3 * MIB), 4 * MIB, PutOptions::default());
        assert!(matches!(short, Err(ClientError::Local { .. })), "{short:?}");
    }
    assert_eq!(client.stat("exercise/short").unwrap(), None);
    let key = vec![b'k'; 1024];
    client.put(&key, &mut &b"long key"[..], 8, PutOptions::default()).unwrap();
    assert!(client.delete(&key).unwrap());
    for key in [&b""[..], &[b'k'; 1025]] {
        assert!(matches!(client.stat(key), Err(ClientError::RpcKey { .. })));
        assert!(matches!(client.put(key, &mut &b""[..], 0, PutOptions::default()), Err(ClientError::RpcKey { .. })));
    }
    let names: Vec<_> = client.list("exercise/").map(|entry| entry.unwrap().key).collect();
    assert_eq!(names, (0..7).map(|number| format!("exercise/{number}").into_bytes()).collect::<Vec<_>>());
    let deleted = client.delete_all(&names).unwrap();
    assert_eq!(deleted, vec![Status::Ok; 7]);
}

#[test]
fn ranges_conditions_and_keys_over_iwarp() {
    let daemon = start(Daemon::builder(), RPC);
    for options in [RpcOptions::default(), checked(), RpcOptions { range_bytes: 99_999, ..RpcOptions::default() }] {
        exercise(&mut client(&daemon, options));
    }
    daemon.assert_nothing_leaks();
}

#[actix::test]
async fn ranges_conditions_and_keys_in_one_process() {
    let served = rpc::serve("loopback", "client", |_| {}).await;
    let (fabric, address): (Arc<dyn Fabric>, _) =
        (Arc::new(bulkhead::actors::fabric_listener::loopback().clone()), served.address.clone());
    let exercised = move || exercise(&mut RpcClient::over(&fabric, address, checked()).unwrap());
    actix::clock::timeout(Duration::from_secs(60), tokio::task::spawn_blocking(exercised)).await.unwrap().unwrap();
    served.until_quiet().await;
    served.shutdown().await;
}

fn batch_of(count: usize, len: usize) -> (SharedSpan, Vec<GetRange>) {
    let whole = SharedSpan::new(count * len).unwrap();
    let range = |at: usize| GetRange {
        key: format!("batch-{at:08}").into_bytes(),
        version: 0,
        offset: 0,
        into: whole.slice(at * len..(at + 1) * len),
    };
    let ranges = (0..count).map(range).collect();
    (whole, ranges)
}

#[test]
fn a_batch_is_one_call_where_the_thresholds_allow_it_and_else_as_few_as_they_do() {
    const LEN: usize = 8192;
    for (ours, theirs) in [(4096, 4096), (1024, 4096), (4096, 1024), (1024, 1024), (262_144, 262_144)] {
        let daemon = start(Daemon::builder().setting("RPC__INLINE", &format!("{theirs}B")), RPC);
        let mut client = client(&daemon, RpcOptions { inline_bytes: ours, ..checked() });
        for at in 0..64 {
            let value = Pattern(at).octets(0, LEN);
            client.put(format!("batch-{at:08}"), &mut &value[..], LEN as u64, PutOptions::default()).unwrap();
        }
        client.delete("batch-00000017").unwrap();
        let before = get_calls(&daemon);
        let (_whole, ranges) = batch_of(64, LEN);
        for (at, got) in client.get_ranges(&ranges, None).unwrap().into_iter().enumerate() {
            if at == 17 {
                assert_eq!((got.status, got.count), (Status::NotFound, 0));
                continue;
            }
            assert_eq!((got.status, got.count as usize), (Status::Ok, LEN), "{at}");
            Pattern(at as u64).check(0, &octets_of(&ranges[at].into, got.count), "batch");
        }
        let calls = get_calls(&daemon) - before;
        match ours.min(theirs) {
            1024 => assert!((2..=64).contains(&calls), "{calls}"),
            _ => assert_eq!(calls, 1),
        }
        drop(client);
        daemon.assert_nothing_leaks();
    }
}

#[test]
fn many_keys_are_looked_at_touched_listed_pinned_and_removed() {
    let daemon = start(Daemon::builder(), RPC);
    let mut client = client(&daemon, RpcOptions::default());
    let keys: Vec<String> = (0..2500).map(|at| format!("many/{at:04}-{}", "x".repeat(at % 40))).collect();
    let mut filler = AnyClient::connect(door_of(&daemon, "memcache://"), Options::default()).unwrap();
    for key in &keys {
        filler.put(key, &mut key.as_bytes(), key.len() as u64, 0, None).unwrap();
    }
    for (missing, ttl) in [(None, 0), (Some(2000), 50)] {
        if let Some(at) = missing {
            filler.delete(&keys[at]).unwrap();
            let touched = client.touch_all(&keys, Some(Duration::from_secs(50))).unwrap();
            let expected = |index: usize| if index == at { Status::NotFound } else { Status::Ok };
            assert!(touched.iter().enumerate().all(|(index, status)| *status == expected(index)));
        }
        let stats = client.stats(&keys).unwrap();
        assert_eq!(stats.len(), keys.len());
        for (index, (key, stat)) in keys.iter().zip(&stats).enumerate() {
            if Some(index) == missing {
                assert_eq!(stat.status, Status::NotFound);
                continue;
            }
            assert_eq!((stat.status, stat.len, stat.ram_bytes), (Status::Ok, key.len() as u64, key.len() as u64));
            assert!(stat.ttl_s <= ttl && stat.ttl_s + 20 > ttl, "{stat:?}");
        }
        assert_eq!(client.leading(&keys).unwrap(), missing.unwrap_or(keys.len()));
    }
    // What is not of the prefix is not listed, on either side of it.
    for key in ["many", "many.", "many0", "zzz", "a"] {
        filler.put(key, &mut &b""[..], 0, 0, None).unwrap();
    }
    let there: Vec<&String> = keys.iter().filter(|key| **key != keys[2000]).collect();
    let listed: Vec<_> = client.list("many/").map(|entry| entry.unwrap()).collect();
    assert!(listed.iter().map(|entry| &entry.key[..]).eq(there.iter().map(|key| key.as_bytes())));
    assert!(listed.iter().all(|entry| entry.len == entry.key.len() as u64 && entry.version > 0));
    let (mut cookie, mut paged) = (Vec::new(), Vec::new());
    loop {
        let page = client.list_page("many/1", &cookie, 300).unwrap();
        assert!(page.entries.len() <= 300);
        paged.extend(page.entries.into_iter().map(|entry| entry.key));
        cookie = page.next;
        if cookie.is_empty() {
            break;
        }
    }
    assert!(paged.iter().map(|key| &key[..]).eq(keys[1000..2000].iter().map(|key| key.as_bytes())));
    assert_eq!(client.list("no such prefix").count(), 0);
    // A prefix of any octets, the last of all too.
    client.put(b"\xff\xff\xff", &mut &b""[..], 0, PutOptions::default()).unwrap();
    assert_eq!(client.list(b"\xff\xff").map(|entry| entry.unwrap().key).collect::<Vec<_>>(), [b"\xff\xff\xff"]);
    let pinned = client.pin(&keys[1990..2010]).unwrap();
    assert_eq!(pinned.iter().filter(|pin| pin.status == Status::Ok).count(), 19);
    assert_eq!(daemon.metric("bulkhead_store_pins"), Some(19.0));
    let unpinned = client.unpin(&keys[1990..2005]).unwrap();
    assert_eq!(unpinned.iter().filter(|status| **status == Status::NotFound).count(), 1);
    assert_eq!(daemon.metric("bulkhead_store_pins"), Some(5.0));
    assert_eq!(client.delete_all(&keys).unwrap().iter().filter(|status| **status == Status::Ok).count(), 2499);
    assert_eq!(client.list("many/").count(), 0);
    assert!(filler.stat(&keys[0]).unwrap().is_none());
    // Pins end with their connection.
    drop(client);
    daemon.assert_nothing_leaks();
}

#[test]
fn tasks_share_a_connection_and_see_the_same_values() {
    let daemon = start(Daemon::builder().memory("256MiB"), RPC);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = AsyncRpcClient::connect(rpc_url(&daemon), checked()).await.unwrap();
        let mut tasks = Vec::new();
        for size in SIZES {
            let client = client.clone();
            tasks.push(tokio::spawn(async move {
                let (key, len) = (format!("task/{size:08}"), size as usize);
                let whole = SharedSpan::new(len.max(1)).unwrap();
                whole.copy_in(0, &Pattern(size).octets(0, len));
                let options = PutOptions { flags: 3, ..PutOptions::default() };
                let version = client.put(&key, &whole.slice(0..len), options).await.unwrap();
                let (stat, octets) = client.get(&key).await.unwrap().unwrap();
                assert_eq!((stat.version, stat.flags, stat.len, octets.len()), (version, 3, size, len));
                Pattern(size).check(0, &octets, "by a task");
                let options = PutOptions { condition: Condition::Absent, ..PutOptions::default() };
                let refused = client.put(&key, &whole.slice(0..len), options).await;
                assert!(matches!(refused, Err(ClientError::Refused { .. })), "{refused:?}");
                let into = SharedSpan::new(100).unwrap();
                let range = |offset, at: usize| GetRange {
                    key: key.clone().into_bytes(),
                    version: 0,
                    offset,
                    into: into.slice(at..at + 33),
                };
                let got = client.get_ranges(&[range(1, 0), range(size / 2, 40)], None).await.unwrap();
                for (got, (offset, at)) in got.iter().zip([(1, 0), (size / 2, 40)]) {
                    assert_eq!(u64::from(got.count), size.saturating_sub(offset).min(33));
                    Pattern(size).check(offset, &octets_of(&into.slice(at..at + 33), got.count), "a range");
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        client.ping().await.unwrap();
        assert_eq!(client.get("nothing").await.unwrap(), None);
        let keys: Vec<String> = SIZES.iter().map(|size| format!("task/{size:08}")).collect();
        let page = client.list_page("task/", "", 4096).await.unwrap();
        assert_eq!(page.entries.iter().map(|entry| entry.len).collect::<Vec<_>>(), SIZES);
        assert_eq!(client.touch_all(&keys, None).await.unwrap(), vec![Status::Ok; SIZES.len()]);
        assert!(client.pin(&keys).await.unwrap().iter().all(|pin| pin.status == Status::Ok));
        assert_eq!(client.unpin(&keys).await.unwrap(), vec![Status::Ok; SIZES.len()]);
        assert!(client.delete(&keys[0]).await.unwrap() && !client.delete(&keys[0]).await.unwrap());
        let stats = client.stats(&keys).await.unwrap();
        assert_eq!(stats.iter().filter(|stat| stat.status == Status::Ok).count(), SIZES.len() - 1);
    });
    let mut text = AnyClient::connect(door_of(&daemon, "memcache://"), Options::default()).unwrap();
    for size in &SIZES[1..] {
        let mut copy = Stream::new(*size, *size);
        assert_eq!(text.get(format!("task/{size:08}"), &mut copy).unwrap().unwrap().len, *size);
        assert_eq!(copy.at, *size);
    }
    drop(text);
    drop(runtime);
    daemon.assert_nothing_leaks();
}

#[test]
fn a_call_outlives_the_client_that_made_it() {
    let daemon = start(Daemon::builder(), RPC);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use bulkhead::client::rpc::RawCall;
        use bulkhead::wire::onc_rpc::OpaqueAuth;
        let client = AsyncRpcClient::connect(rpc_url(&daemon), RpcOptions::default()).await.unwrap();
        let calls: Vec<_> = (0..40).map(|_| client.submit(RawCall::new(0x2042_4c4b, 1, 0, OpaqueAuth::NONE))).collect();
        let mut under_way = Vec::new();
        for call in calls {
            under_way.push(call.await.unwrap());
        }
        drop(client);
        for call in under_way {
            assert_eq!(call.wait().await.unwrap().stream.len(), 24, "a reply without results");
        }
    });
    drop(runtime);
    daemon.assert_nothing_leaks();
}

#[test]
fn who_cannot_be_served_is_told_so() {
    let daemon = start(Daemon::builder().flags(&["--value-max", "1MiB"]), RPC);
    let mut client = client(&daemon, RpcOptions::default());
    for len in [MIB + 1, 5 * MIB] {
        let large = client.put("large", &mut Stream::new(1, len), len, PutOptions::default()).unwrap_err();
        assert!(
            matches!(&large, ClientError::Refused { reply } if reply.contains("longer than the server takes")),
            "{large}"
        );
    }
    client.put("small", &mut &b"abc"[..], 3, PutOptions::default()).unwrap();
    assert_eq!(client.list("").map(|entry| entry.unwrap().key).collect::<Vec<_>>(), [b"small"]);
    drop(client);
    let nobody = "rpc+iwarp://127.0.0.1:1".parse().unwrap();
    assert!(matches!(RpcClient::connect(nobody, RpcOptions::default()), Err(ClientError::Unreachable { .. })));
    let other = RpcClient::connect(door_of(&daemon, "memcache://"), RpcOptions::default()).unwrap_err();
    assert!(matches!(other, ClientError::Url { .. }), "{other}");
    for options in [
        RpcOptions { inline_bytes: 1023, ..RpcOptions::default() },
        RpcOptions { inline_bytes: 262_145, ..RpcOptions::default() },
        RpcOptions { range_bytes: 0, ..RpcOptions::default() },
        RpcOptions { range_bytes: (1 << 30) + 1, ..RpcOptions::default() },
    ] {
        assert!(matches!(RpcClient::connect(rpc_url(&daemon), options), Err(ClientError::Local { .. })));
    }
    daemon.assert_nothing_leaks();
}

fn command(url: &ServerUrl, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.args(args).args(["--server", &url.to_string()]).env_remove("BULKHEAD_SERVER").stdin(Stdio::null());
    command.output().unwrap()
}

/// What a command that did what was asked wrote to stdout.
fn done(url: &ServerUrl, args: &[&str]) -> Vec<u8> {
    let output = command(url, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*stderr), (Some(0), ""), "{args:?}");
    output.stdout
}

fn fails(url: &ServerUrl, args: &[&str], code: i32, says: &str) {
    let output = command(url, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(stderr.contains(says), "`{stderr}` does not say `{says}`");
}

#[test]
fn commands_work_over_rpc() {
    let daemon = start(Daemon::builder(), RPC);
    let (rpc, native) = (rpc_url(&daemon), door_of(&daemon, "native+"));
    let dir = tempfile::tempdir().unwrap();
    let (source, copy) = (dir.path().join("source"), dir.path().join("copy"));
    let (source_name, copy_name) = (source.to_str().unwrap(), copy.to_str().unwrap());
    for len in [0, 1, 4097, 3_000_001] {
        let value = Pattern(len).octets(0, len as usize);
        std::fs::write(&source, &value).unwrap();
        assert!(done(&rpc, &["put", "dir/file", source_name, "--flags", "5", "--ttl", "1h", "--crc32c"]).is_empty());
        assert!(done(&native, &["get", "dir/file"]) == value);
        assert!(done(&rpc, &["get", "dir/file", "--inline", "1KiB", "--credits", "1"]) == value);
        done(&rpc, &["get", "dir/file", "-o", copy_name, "--crc32c"]);
        assert!(std::fs::read(&copy).unwrap() == value);
        for (range, start, end) in
            [("0..0", 0, 0), ("1..4KiB", 1, 4096), ("2MiB..", 2 << 20, len), ("..7", 0, 7), ("5..9999999", 5, len)]
        {
            let end = end.min(len) as usize;
            assert!(
                done(&rpc, &["get", "dir/file", "--range", range]) == value[end.min(start)..end],
                "{range} of {len}"
            );
        }
    }
    let stat: serde_json::Value = serde_json::from_slice(&done(&rpc, &["stat", "dir/file", "--json"])).unwrap();
    assert_eq!((&stat["key"], &stat["len_bytes"], &stat["flags"]), (&"dir/file".into(), &3_000_001.into(), &5.into()));
    assert!((3500..=3600).contains(&stat["ttl_s"].as_u64().unwrap()), "{stat}");
    let cas = stat["cas"].to_string();
    let text = String::from_utf8(done(&rpc, &["stat", "dir/file"])).unwrap();
    assert!(text.contains(&format!("cas {cas}\n")) && text.contains("\nlead_bytes "), "{text}");
    std::fs::write(&source, "x").unwrap();
    for key in ["dir/2", "dir/1", "other", "dir/größe \u{7}"] {
        done(&rpc, &["put", key, source_name]);
    }
    assert_eq!(done(&rpc, &["ls", "dir/"]), "dir/1\ndir/2\ndir/file\ndir/größe \u{7}\n".as_bytes());
    assert_eq!(done(&rpc, &["ls", "o", "--null"]), b"other\0");
    assert_eq!(done(&rpc, &["ls", "nothing"]), b"");
    assert_eq!(done(&rpc, &["ls"]).split(|octet| *octet == b'\n').count(), 6);
    let long = String::from_utf8(done(&rpc, &["ls", "dir/f", "--long"])).unwrap();
    assert_eq!(long.split_whitespace().collect::<Vec<_>>(), ["3000001", &cas, "dir/file"]);
    let json: serde_json::Value = serde_json::from_slice(&done(&rpc, &["ls", "--json", "dir/f"])).unwrap();
    assert_eq!(
        json,
        serde_json::json!({ "key": "dir/file", "len_bytes": 3_000_001, "cas": cas.parse::<u64>().unwrap() })
    );
    done(&rpc, &["rm", "dir/1", "dir/2"]);
    fails(&rpc, &["rm", "dir/1", "other"], 1, "no value under `dir/1`");
    assert_eq!(done(&rpc, &["ls", "dir/f"]), b"dir/file\n");
    fails(&rpc, &["get", "dir/1"], 1, "no value under");
    fails(&rpc, &["stat", "dir/1"], 1, "no value under");
    fails(&rpc, &["get", "dir/1", "--range", "0..1", "-o", copy_name], 1, "no value under");
    fails(&native, &["get", "dir/file", "--range", "0..1"], 64, "name an RPC door");
    fails(&native, &["ls"], 64, "name an RPC door");
    fails(&rpc, &["stats"], 1, "cannot be asked for over RPC");
    fails(&rpc, &["get", "dir/file", "--inline", "1000B"], 64, "want 1KiB to 256KiB");
    fails(&rpc, &["get", "dir/file", "--credits", "0"], 64, "--credits");
    fails(&rpc, &["get", &"k".repeat(1025)], 64, "1 to 1,024");
    fails(&"rpc+iwarp://127.0.0.1:1".parse().unwrap(), &["stat", "k"], 69, "cannot reach");
    daemon.assert_nothing_leaks();
}

#[test]
fn bench_measures_over_rpc_and_checks_every_octet() {
    let daemon = start(Daemon::builder(), RPC);
    let rpc = rpc_url(&daemon);
    let short = ["--seconds", "200ms", "--keys", "70", "--json", "--verify"];
    for args in [
        &["--op", "get", "--size", "1..300KiB", "--connections", "2", "--depth", "3"][..],
        &["--op", "set", "--size", "0..100KiB", "--depth", "4", "--crc32c"],
        &["--op", "get", "--size", "4KiB", "--batch", "64"],
        &["--op", "get", "--size", "0..4KiB", "--batch", "5", "--depth", "17", "--inline", "1KiB", "--credits", "2"],
    ] {
        let words: Vec<&str> = ["bench"].into_iter().chain(args.iter().copied()).chain(short).collect();
        let report: serde_json::Value = serde_json::from_slice(&done(&rpc, &words)).unwrap();
        assert!(report["operations"].as_u64().unwrap() > 0, "{report}");
        for none in ["errors", "misses", "corrupt"] {
            assert_eq!(report[none], 0, "{report}");
        }
        assert_eq!(report["version"], serde_json::Value::Null);
    }
    // Octets that are not those of the key are noticed.
    let mut client = client(&daemon, RpcOptions::default());
    client.put("bench-00000000", &mut Stream::new(1, 4096), 4096, PutOptions::default()).unwrap();
    let wrong =
        ["bench", "--op", "get", "--size", "4096", "--keys", "1", "--no-load", "--seconds", "100ms", "--verify"];
    fails(&rpc, &wrong, 76, "values came back wrong");
    let lost =
        ["bench", "--op", "get", "--size", "9", "--key-prefix", "no-", "--no-load", "--seconds", "100ms", "--json"];
    let report: serde_json::Value = serde_json::from_slice(&done(&rpc, &lost)).unwrap();
    assert!(report["misses"].as_u64().unwrap() > 0, "{report}");
    fails(&door_of(&daemon, "native+"), &["bench", "--op", "get", "--batch", "2"], 64, "only get over RPC");
    fails(&rpc, &["bench", "--op", "set", "--batch", "2"], 64, "only get over RPC");
    fails(&rpc, &["bench", "--op", "set", "--size", "2GiB"], 64, "one call carries");
    drop(client);
    daemon.assert_nothing_leaks();
}
