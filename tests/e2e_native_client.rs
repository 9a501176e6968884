//! The native client and the daemon: both doors meet one store.

use bulkhead::client::{AsyncClient, Client, ClientError, Geometry, NativeClient, Options, Outcome, ServerUrl};

mod common;
use common::daemon::Daemon;
use common::pattern::Pattern;

fn start(crc: bool) -> (Daemon, ServerUrl, ServerUrl) {
    let door = if crc { "native+iwarp://127.0.0.1:0" } else { "native+iwarp://127.0.0.1:0?crc=off" };
    let daemon = Daemon::builder().memory("256MiB").flags(&["--native", door]).start();
    let door = |scheme: &str| daemon.doors().iter().find(|door| door.starts_with(scheme)).expect("a door").parse();
    let (native, text): (ServerUrl, _) = (door("native+iwarp://").unwrap(), door("memcache://").unwrap());
    // Who copies the line talks to the door as it was asked for.
    assert!(matches!(&native, ServerUrl::NativeIwarp { crc: given, .. } if *given == crc), "{native}");
    (daemon, native, text)
}

#[test]
fn what_one_door_stores_the_other_gives() {
    for crc in [true, false] {
        let (daemon, native, text) = start(crc);
        let mut native = NativeClient::connect(native, Options::default()).unwrap();
        let mut text = Client::connect(text, Options::default()).unwrap();
        for size in [0, 1, 191, 192, 193, 4096, 262_143, 262_144, 262_145, 1 << 20, 8 << 20, 20_000_001] {
            let value = Pattern(size).octets(0, size as usize);
            native.put("a", &mut &value[..], size, 5, None).unwrap();
            text.put("b", &mut &value[..], size, 6, None).unwrap();
            let mut copy = Vec::new();
            let info = text.get("a", &mut copy).unwrap().unwrap();
            assert!(info.flags == 5 && copy == value, "{size} octets by the native door");
            copy.fill(0);
            let info = native.get_into("b", &mut copy).unwrap().unwrap();
            assert!(info.flags == 6 && copy == value, "{size} octets by the text door");
        }
        drop(native);
        daemon.assert_nothing_leaks();
    }
}

#[test]
fn requests_in_flight_on_many_connections_of_any_geometry_are_answered() {
    let (daemon, native, _) = start(true);
    std::thread::scope(|scope| {
        for (index, depth) in [1_u64, 2, 7, 64].into_iter().enumerate() {
            let native = native.clone();
            scope.spawn(move || {
                let window_bytes = 4096 << (2 * index);
                let geometry = Geometry { ring_bytes: 512 << index, window_bytes, window_count: 2 + index as u32 };
                let mut client = NativeClient::connect(native, Options { geometry, ..Options::default() }).unwrap();
                let len = |round: u64| [0, 1, 193, 70_000, 300_001][(round % 5) as usize];
                let mut buffer = vec![0; 400_000];
                for first in (0..128).step_by(depth as usize) {
                    for round in first..first + depth {
                        let value = std::io::Cursor::new(Pattern(round).octets(0, len(round)));
                        client.submit_set(format!("{index}-{round}"), value, len(round) as u64, 0, None).unwrap();
                        client.submit_get(format!("{index}-{round}")).unwrap();
                        client.submit_get("missing").unwrap();
                    }
                    for round in first..first + depth {
                        assert_eq!(client.wait_into(&mut buffer).unwrap(), Outcome::Stored);
                        let found = client.wait_into(&mut buffer).unwrap();
                        assert!(matches!(found, Outcome::Value(info) if info.len == len(round) as u64), "{found:?}");
                        Pattern(round).check(0, &buffer[..len(round)], "in flight");
                        assert_eq!(client.wait_into(&mut buffer).unwrap(), Outcome::Miss);
                    }
                }
            });
        }
    });
    daemon.assert_nothing_leaks();
}

#[test]
fn a_set_that_is_too_large_is_refused_and_the_next_one_is_not() {
    let daemon = Daemon::builder().flags(&["--native", "native+iwarp://127.0.0.1:0", "--value-max", "1MiB"]).start();
    let url: ServerUrl = daemon.doors().iter().find(|door| door.starts_with("native")).unwrap().parse().unwrap();
    let mut client = NativeClient::connect(url, Options::default()).unwrap();
    let value = Pattern(1).octets(0, (1 << 20) + 1);
    client.submit_set("large", std::io::Cursor::new(value.clone()), value.len() as u64, 0, None).unwrap();
    client.submit_set("small", &b"abc"[..], 3, 0, None).unwrap();
    assert!(matches!(client.wait_into(&mut []), Err(ClientError::Refused { .. })));
    assert_eq!(client.wait_into(&mut []).unwrap(), Outcome::Stored);
    let refused = client.put("large", &mut &value[..], value.len() as u64, 0, None).unwrap_err();
    assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");
    assert!(!client.exists("large").unwrap() && client.exists("small").unwrap());
    drop(client);
    daemon.assert_nothing_leaks();
}

/// Kills the daemon with the first octets of a value in hand.
struct Killer<'a> {
    daemon: &'a Daemon,
    taken: usize,
}

impl std::io::Write for Killer<'_> {
    fn write(&mut self, octets: &[u8]) -> std::io::Result<usize> {
        if self.taken == 0 {
            self.daemon.signal("KILL");
        }
        self.taken += octets.len();
        Ok(octets.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_daemon_killed_within_a_value_is_lost_at_once() {
    const LEN: usize = 100 << 20;
    let (mut daemon, native, _) = start(true);
    // The time-out is too long for any test: only the end of the connection can end the wait.
    let options = Options { io_timeout: std::time::Duration::from_secs(86_400), ..Options::default() };
    let mut client = NativeClient::connect(native, options).unwrap();
    client.put("k", &mut std::io::Read::take(std::io::repeat(7), LEN as u64), LEN as u64, 0, None).unwrap();
    let mut sink = Killer { daemon: &daemon, taken: 0 };
    let lost = client.get("k", &mut sink).unwrap_err();
    assert!(matches!(lost, ClientError::Lost { .. }), "{lost}");
    assert!(sink.taken > 0 && sink.taken < LEN);
    assert!(matches!(client.version(), Err(ClientError::Unreachable { .. })));
    assert_eq!(daemon.wait(), -1);
}

#[test]
fn tasks_share_a_connection_to_the_daemon() {
    let (daemon, native, _) = start(true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = AsyncClient::connect(native, Options::default()).await.unwrap();
        let tasks: Vec<_> = (0..80_u64)
            .map(|index| {
                let client = client.clone();
                tokio::spawn(async move {
                    let value = Pattern(index).octets(0, index as usize * 4_001);
                    client.put(format!("k{index}"), value.clone(), 0, None).await.unwrap();
                    let (_, copy) = client.get(format!("k{index}")).await.unwrap().unwrap();
                    assert!(copy == value, "task {index}");
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
    drop(runtime);
    daemon.assert_nothing_leaks();
}

#[test]
fn a_task_streams_both_ways() {
    const LEN: u64 = 20_000_001;
    let (daemon, native, _) = start(false);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = AsyncClient::connect(native, Options::default()).await.unwrap();
        let stream = |seed| Stream { pattern: Pattern(seed), at: 0, len: LEN };
        let puts =
            tokio::join!(client.put_from("a", stream(1), LEN, 3, None), client.put_from("b", stream(2), LEN, 4, None));
        assert!(puts.0.is_ok() && puts.1.is_ok(), "{puts:?}");
        let gets = tokio::join!(client.get_to("a", stream(1)), client.get_to("b", stream(2)));
        for (got, flags) in [(gets.0, 3), (gets.1, 4)] {
            let (info, stream) = got.unwrap().unwrap();
            assert_eq!((info.len, info.flags, stream.at), (LEN, flags, LEN));
        }
        assert!(client.get_to("nothing", Vec::new()).await.unwrap().is_none());
        // A writer that fails costs its own call; what others asked goes on.
        let full = Full { room: 1 << 20 };
        let (failed, whole) = tokio::join!(client.get_to("a", full), client.get_to("b", stream(2)));
        assert!(matches!(failed.map(|_| ()), Err(ClientError::Local { .. })));
        assert_eq!(whole.unwrap().unwrap().1.at, LEN);
    });
    drop(runtime);
    daemon.assert_nothing_leaks();
}

/// A writer that has no room for all.
struct Full {
    room: usize,
}

impl std::io::Write for Full {
    fn write(&mut self, octets: &[u8]) -> std::io::Result<usize> {
        self.room = self.room.checked_sub(octets.len()).ok_or(std::io::ErrorKind::StorageFull)?;
        Ok(octets.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A pattern as a stream, so that a value of any length is never held whole.
struct Stream {
    pattern: Pattern,
    at: u64,
    len: u64,
}

impl std::io::Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = into.len().min(usize::try_from(self.len - self.at).unwrap_or(usize::MAX));
        self.pattern.fill(self.at, &mut into[..count]);
        self.at += count as u64;
        Ok(count)
    }
}

impl std::io::Write for Stream {
    fn write(&mut self, octets: &[u8]) -> std::io::Result<usize> {
        self.pattern.check(self.at, octets, "what came back");
        self.at += octets.len() as u64;
        Ok(octets.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Puts a value of `len` octets by each door and gets it by the other.
fn cross(native: &mut NativeClient, text: &mut Client, len: u64) {
    let stream = |pattern| Stream { pattern: Pattern(pattern), at: 0, len };
    native.put("by-native", &mut stream(1), len, 0, None).unwrap();
    text.put("by-text", &mut stream(2), len, 0, None).unwrap();
    for (key, pattern) in [("by-native", 1), ("by-text", 2)] {
        let (mut here, mut there) = (stream(pattern), stream(pattern));
        assert_eq!(native.get(key, &mut here).unwrap().unwrap().len, len);
        assert_eq!(text.get(key, &mut there).unwrap().unwrap().len, len);
        assert_eq!((here.at, there.at), (len, len), "{key}");
    }
}

#[test]
fn a_hundred_mebibytes_cross_the_doors() {
    let (daemon, native, text) = start(true);
    let mut native = NativeClient::connect(native, Options::default()).unwrap();
    cross(&mut native, &mut Client::connect(text, Options::default()).unwrap(), 100 << 20);
    drop(native);
    daemon.assert_nothing_leaks();
}

#[test]
#[ignore = "moves 24 GiB and needs 9 GiB of disk: cargo test --release --test e2e_native_client -- --ignored"]
fn four_gibibytes_cross_the_doors() {
    let doors = ["--native", "native+iwarp://127.0.0.1:0"];
    let daemon = Daemon::builder().memory("256MiB").pool("9GiB").flags(&doors).start();
    let door = |scheme: &str| daemon.doors().iter().find(|door| door.starts_with(scheme)).unwrap().parse().unwrap();
    let mut native = NativeClient::connect(door("native+iwarp://"), Options::default()).unwrap();
    cross(&mut native, &mut Client::connect(door("memcache://"), Options::default()).unwrap(), 4 << 30);
    drop(native);
    daemon.assert_nothing_leaks();
    assert!(daemon.rss_max_bytes() < daemon.memory_sum_bytes());
}

/// The smallest ring and windows, the largest, and what lies between: each with each, as server and as client.
#[test]
fn any_two_geometries_understand_each_other() {
    // Ring slots, window in KiB, windows.
    let geometries = [(2, 4, 2), (8, 64, 3), (256, 256, 4), (64, 1024, 8)];
    std::thread::scope(|scope| {
        for (slots, window, windows) in geometries {
            scope.spawn(move || {
                let daemon = Daemon::builder()
                    .flags(&["--native", "native+iwarp://127.0.0.1:0"])
                    .setting("NATIVE__RING", &format!("{}B", slots * 256))
                    .setting("NATIVE__WINDOW", &format!("{window}KiB"))
                    .setting("NATIVE__WINDOWS", &windows.to_string())
                    .start();
                let door = |scheme: &str| daemon.doors().iter().find(|door| door.starts_with(scheme)).unwrap();
                let (native, text): (ServerUrl, ServerUrl) =
                    (door("native+iwarp://").parse().unwrap(), door("memcache://").parse().unwrap());
                let mut text = Client::connect(text, Options::default()).unwrap();
                for (slots, window, window_count) in geometries {
                    let geometry = Geometry { ring_bytes: slots * 256, window_bytes: window << 10, window_count };
                    let options = Options { geometry, ..Options::default() };
                    let mut native = NativeClient::connect(native.clone(), options).unwrap();
                    for len in [0, 1, 193, 4097, 300_001, 8 << 20] {
                        cross(&mut native, &mut text, len);
                    }
                }
                drop(text);
                daemon.assert_nothing_leaks();
            });
        }
    });
}

#[test]
fn many_connections_of_any_depth_are_answered() {
    // Those of one round may still be leaving when those of the next come.
    let doors = ["--native", "native+iwarp://127.0.0.1:0"];
    let daemon = Daemon::builder().flags(&doors).setting("NATIVE__CONNECTIONS_MAX", "512").start();
    let door = daemon.doors().iter().find(|door| door.starts_with("native+iwarp://"));
    let native: ServerUrl = door.unwrap().parse().unwrap();
    let geometry = Geometry { ring_bytes: 16 << 10, window_bytes: 16 << 10, window_count: 2 };
    let mut buffer = vec![0; 20_000];
    for connections in [1, 16, 64, 256] {
        let connect = |_| NativeClient::connect(native.clone(), Options { geometry, ..Options::default() }).unwrap();
        let mut clients: Vec<_> = (0..connections).map(connect).collect();
        for depth in [1, 2, 16, 64_u64] {
            // Everything is in flight on all of them before the first answer is waited for.
            for (index, client) in clients.iter_mut().enumerate() {
                for n in 0..depth {
                    let (key, len) = (format!("{index}-{n}"), (n * 97 + index as u64) % 20_000);
                    if n % 2 == 0 {
                        let value = Stream { pattern: Pattern(n), at: 0, len };
                        client.submit_set(key, value, len, 0, None).unwrap();
                    } else {
                        client.submit_get(format!("{index}-{}", n - 1)).unwrap();
                    }
                }
            }
            for (index, client) in clients.iter_mut().enumerate() {
                for n in 0..depth {
                    let outcome = client.wait_into(&mut buffer).unwrap();
                    if n % 2 == 0 {
                        assert_eq!(outcome, Outcome::Stored, "{connections} connections, {depth} deep");
                        continue;
                    }
                    let len = ((n - 1) * 97 + index as u64) % 20_000;
                    assert!(matches!(outcome, Outcome::Value(info) if info.len == len), "{outcome:?}");
                    Pattern(n - 1).check(0, &buffer[..len as usize], "in flight");
                }
            }
        }
        drop(clients);
    }
    daemon.assert_nothing_leaks();
}
