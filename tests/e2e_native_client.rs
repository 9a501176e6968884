//! The native client and the daemon: both doors meet one store.

use bulkhead::client::{AsyncClient, ClientError, Geometry, NativeClient, Options, Outcome, ServerUrl};

mod common;
use common::daemon::Daemon;
use common::pattern::Pattern;

#[path = "native/doors.rs"]
mod doors;
use doors::{Doors, GEOMETRIES, SIZES, Stream, cross, cross_whole, geometry, with_geometry};

fn start(crc: bool) -> Doors {
    let door = if crc { "native+iwarp://127.0.0.1:0" } else { "native+iwarp://127.0.0.1:0?crc=off" };
    let doors = Doors::open(door, Daemon::builder().memory("256MiB"));
    // Who copies the line talks to the door as it was asked for.
    assert!(matches!(doors.native, ServerUrl::NativeIwarp { crc: given, .. } if given == crc), "{}", doors.native);
    doors
}

#[test]
fn what_one_door_stores_the_other_gives() {
    for crc in [true, false] {
        let doors = start(crc);
        cross_whole(&mut doors.native(Geometry::default()), &mut doors.text(), &SIZES);
        doors.daemon.assert_nothing_leaks();
    }
}

#[test]
fn values_on_disk_come_through_the_native_door() {
    let doors = Doors::open("native+iwarp://127.0.0.1:0", Daemon::builder().memory("16MiB"));
    doors.assert_values_come_from_disk(16 << 20);
    doors.daemon.assert_nothing_leaks();
}

#[test]
fn requests_in_flight_on_many_connections_of_any_geometry_are_answered() {
    let Doors { daemon, native, .. } = start(true);
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
    let Doors { mut daemon, native, .. } = start(true);
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
    let Doors { daemon, native, .. } = start(true);
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
    let Doors { daemon, native, .. } = start(false);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = AsyncClient::connect(native, Options::default()).await.unwrap();
        let stream = |seed| Stream::new(seed, LEN);
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

#[test]
fn a_hundred_mebibytes_cross_the_doors() {
    let doors = start(true);
    cross(&mut doors.native(Geometry::default()), &mut doors.text(), 100 << 20);
    doors.daemon.assert_nothing_leaks();
}

#[test]
#[ignore = "moves 24 GiB and needs 9 GiB of disk: cargo test --release --test e2e_native_client -- --ignored"]
fn four_gibibytes_cross_the_doors() {
    let doors = Doors::open("native+iwarp://127.0.0.1:0", Daemon::builder().memory("256MiB").pool("9GiB"));
    cross(&mut doors.native(Geometry::default()), &mut doors.text(), 4 << 30);
    doors.daemon.assert_nothing_leaks();
    assert!(doors.daemon.rss_max_bytes() < doors.daemon.memory_sum_bytes());
}

/// The smallest ring and windows, the largest, and what lies between: each with each, as server and as client.
#[test]
fn any_two_geometries_understand_each_other() {
    std::thread::scope(|scope| {
        for server in GEOMETRIES {
            scope.spawn(move || {
                let doors = Doors::open("native+iwarp://127.0.0.1:0", with_geometry(server));
                for client in GEOMETRIES {
                    let (mut native, mut text) = (doors.native(client), doors.text());
                    for len in [0, 1, 193, 4097, 300_001, 8 << 20] {
                        cross(&mut native, &mut text, len);
                    }
                }
                doors.daemon.assert_nothing_leaks();
            });
        }
    });
}

#[test]
fn many_connections_of_any_depth_are_answered() {
    // Those of one round may still be leaving when those of the next come.
    let builder = Daemon::builder().setting("NATIVE__CONNECTIONS_MAX", "512");
    let doors = Doors::open("native+iwarp://127.0.0.1:0", builder);
    for connections in [1, 16, 64, 256] {
        doors.assert_all_are_answered(geometry(64, 16, 2), connections, &[1, 2, 16, 64]);
    }
    doors.daemon.assert_nothing_leaks();
}
