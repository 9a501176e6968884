//! The native door end to end over RDMA devices: everything that goes in comes out, in every geometry, and kernel iWARP and
//! ours understand each other through it. tests/rdma-vm/suite runs this; elsewhere it says that it is skipped.
#![cfg(feature = "verbs")]

use bulkhead::client::{AsyncClient, Geometry, NativeClient, ServerUrl};

mod common;
use common::daemon::Daemon;
use common::pattern::Pattern;

#[path = "native/doors.rs"]
mod doors;
use doors::{Doors, GEOMETRIES, SIZES, Stream, connect, cross, cross_whole, door_of, geometry, options, with_geometry};

mod rdma;
use rdma::{Bed, Program, SIW, Settings, Siw, assert_back, beds, resources};

fn at(ip: &str) -> String {
    if ip.contains(':') { format!("native+verbs://[{ip}]:0") } else { format!("native+verbs://{ip}:0") }
}

/// Runs `test` over each device. Afterwards nothing is left: of values in the daemon, of connections in the kernel.
fn over_each_device(builder: impl Fn() -> common::Builder, test: impl Fn(&Bed, &Doors)) {
    for bed in beds() {
        let before = resources(bed.device);
        let doors = Doors::open(&at(bed.v4), builder().pool("256MiB"));
        test(bed, &doors);
        doors.daemon.assert_nothing_leaks();
        drop(doors);
        assert_back(bed.device, &before);
    }
}

#[test]
fn what_one_door_stores_the_other_gives() {
    over_each_device(Daemon::builder, |_, doors| {
        let mut native = doors.native(Geometry::default());
        cross_whole(&mut native, &mut doors.text(), &SIZES);
        assert!(native.delete("a").unwrap() && !native.delete("a").unwrap());
    });
}

#[test]
fn any_two_geometries_understand_each_other() {
    let (smallest, largest) = (GEOMETRIES[0], GEOMETRIES[3]);
    for server in [smallest, largest] {
        over_each_device(
            || with_geometry(server),
            |_, doors| {
                for client in GEOMETRIES {
                    let (mut native, mut text) = (doors.native(client), doors.text());
                    for len in [0, 1, 193, 4097, 30_001] {
                        cross(&mut native, &mut text, len);
                    }
                    if client == largest {
                        cross(&mut native, &mut text, if server == largest { 8 << 20 } else { 1 << 20 });
                    }
                }
            },
        );
    }
}

#[test]
fn many_connections_of_any_depth_are_answered() {
    over_each_device(
        || with_geometry(geometry(64, 64, 2)),
        |_, doors| {
            for connections in [1, 16, 64] {
                doors.assert_all_are_answered(geometry(64, 16, 2), connections, &[1, 16]);
            }
        },
    );
}

#[test]
fn values_come_from_disk() {
    over_each_device(|| Daemon::builder().memory("16MiB"), |_, doors| doors.assert_values_come_from_disk(16 << 20));
}

#[test]
fn tasks_share_a_connection() {
    over_each_device(Daemon::builder, |_, doors| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = AsyncClient::connect(doors.native.clone(), options(Geometry::default())).await.unwrap();
            let value = Pattern(9).octets(0, 300_000);
            client.put("c", value.clone(), 7, None).await.unwrap();
            let (one, other) = tokio::join!(client.get("c"), client.get("c"));
            assert!(one.unwrap().unwrap().1 == value && other.unwrap().unwrap().1 == value);
        });
    });
}

#[test]
fn addresses_of_ipv6_are_as_good() {
    for bed in beds() {
        let before = resources(bed.device);
        let doors = Doors::open(&at(bed.v6), Daemon::builder().pool("256MiB"));
        assert!(doors.native.to_string().starts_with(&format!("native+verbs://[{}]:", bed.v6)), "{}", doors.native);
        cross_whole(&mut doors.native(Geometry::default()), &mut doors.text(), &[0, 193, 262_145, 8 << 20]);
        doors.daemon.assert_nothing_leaks();
        drop(doors);
        assert_back(bed.device, &before);
    }
}

/// A daemon at siw's address whose doors are siw itself, and our iWARP on TCP with CRCs and without.
struct Meeting {
    daemon: Daemon,
    kernel: ServerUrl,
    ours: [ServerUrl; 2],
}

impl Meeting {
    fn new() -> Self {
        let ours = format!("native+iwarp://{}:0", SIW.v4);
        let flags = ["--native", &at(SIW.v4), "--native", &ours, "--native", &format!("{ours}?crc=off")];
        let daemon = Daemon::builder().pool("256MiB").flags(&flags).start();
        let kernel = door_of(&daemon, "native+verbs://");
        let ours = daemon.doors().iter().filter(|door| door.starts_with("native+iwarp://"));
        let ours: Vec<ServerUrl> = ours.map(|door| door.parse().unwrap()).collect();
        Self { kernel, ours: ours.try_into().expect("two doors"), daemon }
    }
}

/// Every way in which the two can be set up: our CRCs, siw's, peer-to-peer mode, the revision of siw.
fn every_setting(mut exchange: impl FnMut(usize, Settings)) {
    if beds().is_empty() {
        return;
    }
    let siw = Siw::take();
    for revision in [2, 1] {
        for peer_to_peer in [false, true] {
            for crc in [false, true] {
                let settings = Settings { crc, peer_to_peer, revision };
                siw.set(settings);
                (0..2).for_each(|door| exchange(door, settings));
            }
        }
    }
}

/// Puts and gets values of every size but the largest.
fn exchange(client: &mut NativeClient) {
    for (at, size) in SIZES[..11].iter().copied().enumerate() {
        client.put("key", &mut Stream::new(at as u64, size), size, at as u32, None).unwrap();
        let mut copy = Stream::new(at as u64, size);
        let info = client.get("key", &mut copy).unwrap().unwrap();
        assert_eq!((info.len, info.flags, copy.at), (size, at as u32, size));
    }
}

#[test]
fn clients_on_siw_use_the_door_of_our_iwarp_under_every_setting() {
    let meeting = (!beds().is_empty()).then(Meeting::new);
    every_setting(|door, settings| {
        let meeting = meeting.as_ref().expect("there are devices");
        let ServerUrl::NativeIwarp { host, port, crc } = meeting.ours[door].clone() else { panic!("iWARP") };
        let mut client = connect(&ServerUrl::NativeVerbs { host, port }, Geometry::default());
        exchange(&mut client);
        println!("siw's client and our door, our CRC {crc}, {settings:?}: every size");
    });
    if let Some(meeting) = meeting {
        meeting.daemon.assert_nothing_leaks();
    }
}

#[test]
fn clients_on_our_iwarp_use_the_door_of_siw_under_every_setting() {
    let meeting = (!beds().is_empty()).then(Meeting::new);
    every_setting(|door, settings| {
        let meeting = meeting.as_ref().expect("there are devices");
        let ServerUrl::NativeVerbs { host, port } = meeting.kernel.clone() else { panic!("verbs") };
        let crc = door == 0;
        let mut client = connect(&ServerUrl::NativeIwarp { host, port, crc }, Geometry::default());
        exchange(&mut client);
        println!("our client and siw's door, our CRC {crc}, {settings:?}: every size");
    });
    if let Some(meeting) = meeting {
        meeting.daemon.assert_nothing_leaks();
    }
}

/// What one kind of door stores, clients of the others get, all at the same address.
#[test]
fn the_doors_of_a_daemon_meet_in_one_store() {
    if beds().is_empty() || Program::path().is_none() {
        return;
    }
    let meeting = Meeting::new();
    let ServerUrl::NativeIwarp { host, port, .. } = meeting.ours[0].clone() else { panic!("iWARP") };
    let across = ServerUrl::NativeVerbs { host, port };
    let mut clients: Vec<_> = [&meeting.kernel, &meeting.ours[0], &meeting.ours[1], &across]
        .map(|url| connect(url, Geometry::default()))
        .into();
    let len = (1 << 20) + 1;
    for writer in 0..clients.len() {
        let seed = writer as u64;
        clients[writer].put("key", &mut Stream::new(seed, len), len, 0, None).unwrap();
        for reader in &mut clients {
            let mut copy = Stream::new(seed, len);
            assert_eq!(reader.get("key", &mut copy).unwrap().unwrap().len, len);
            assert_eq!(copy.at, len);
        }
    }
    drop(clients);
    meeting.daemon.assert_nothing_leaks();
}
