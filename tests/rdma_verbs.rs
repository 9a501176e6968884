//! The native door over RDMA devices: daemon and client, and what the kernel still has of them afterwards.
//!
//! They need the devices and addresses of tests/rdma-vm, and say that they are skipped where `BULKHEAD_TEST_BEDS` does not
//! name `verbs`.
#![cfg(feature = "verbs")]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bulkhead::client::{AsyncClient, Client, Geometry, NativeClient, Options, Outcome, ServerUrl};

mod common;
use common::daemon::Daemon;
use common::pattern::Pattern;

const PATIENCE: Duration = Duration::from_secs(120);

/// Devices and their addresses.
fn beds() -> &'static [(&'static str, &'static str)] {
    let beds = std::env::var("BULKHEAD_TEST_BEDS").unwrap_or_default();
    if !beds.split(',').any(|bed| bed == "verbs") {
        println!("skipped: it needs RDMA devices; tests/rdma-vm/suite brings them");
        return &[];
    }
    &[("rxe", "10.99.0.1"), ("siw", "10.98.0.1")]
}

fn start(ip: &str) -> (Daemon, ServerUrl, ServerUrl) {
    let door = format!("native+verbs://{ip}:0");
    let daemon = Daemon::builder()
        .memory("64MiB")
        .pool("256MiB")
        .flags(&["--native", &door, "--log-level", "bulkhead=debug"])
        .start();
    let door = |scheme: &str| daemon.doors().iter().find(|door| door.starts_with(scheme)).expect("a door").parse();
    let (native, text) = (door("native+verbs://").unwrap(), door("memcache://").unwrap());
    (daemon, native, text)
}

/// What the kernel counts of a device: `rxe0: pd 1 cq 1 qp 1 cm_id 0 …`, without what clients of this test hold for good.
fn resources(device: &str) -> String {
    let said = Command::new("rdma").arg("resource").output().expect("iproute2's rdma");
    let said = String::from_utf8(said.stdout).unwrap();
    let line = said.lines().find(|line| line.contains(&format!(" {device}0:"))).expect("the device");
    let mut words = line.split_whitespace().skip(2);
    let mut kept = Vec::new();
    while let (Some(what), Some(count)) = (words.next(), words.next()) {
        if matches!(what, "cq" | "qp" | "cm_id" | "mr") {
            kept.push(format!("{what} {count}"));
        }
    }
    kept.join(" ")
}

fn assert_back(device: &str, before: &str) {
    let limit = Instant::now() + PATIENCE;
    loop {
        let now = resources(device);
        if now == before {
            return;
        }
        assert!(Instant::now() < limit, "{device}: {now}, before {before}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn what_one_door_stores_the_other_gives_and_every_geometry_works() {
    for &(device, ip) in beds() {
        let before = resources(device);
        let (daemon, native_url, text) = start(ip);
        let mut text = Client::connect(text, Options::default()).unwrap();
        for geometry in [
            Geometry::default(),
            Geometry { ring_bytes: 512, window_bytes: 4096, window_count: 2 },
            Geometry { ring_bytes: 4096, window_bytes: 1 << 20, window_count: 2 },
        ] {
            let mut native =
                NativeClient::connect(native_url.clone(), Options { geometry, ..Options::default() }).unwrap();
            for size in [0, 1, 191, 192, 193, 4096, 262_144, 262_145, 1 << 20, 5_000_001] {
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
            assert!(native.delete("a").unwrap() && !native.delete("a").unwrap());
            // Many requests on their way at once.
            let value = Pattern(3).octets(0, 70_000);
            for round in 0..32 {
                let octets = std::io::Cursor::new(value.clone());
                native.submit_set(format!("{round}"), octets, value.len() as u64, 0, None).unwrap();
                native.submit_get(format!("{round}")).unwrap();
            }
            let mut buffer = vec![0; 100_000];
            for _ in 0..32 {
                assert_eq!(native.wait_into(&mut buffer).unwrap(), Outcome::Stored);
                assert!(matches!(native.wait_into(&mut buffer).unwrap(), Outcome::Value(info) if info.len == 70_000));
                assert_eq!(buffer[..70_000], value);
            }
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = AsyncClient::connect(native_url, Options::default()).await.unwrap();
            let value = Pattern(9).octets(0, 300_000);
            client.put("c", value.clone(), 7, None).await.unwrap();
            let (one, other) = tokio::join!(client.get("c"), client.get("c"));
            assert!(one.unwrap().unwrap().1 == value && other.unwrap().unwrap().1 == value);
        });
        drop(runtime);
        daemon.assert_nothing_leaks();
        drop((text, daemon));
        assert_back(device, &before);
    }
}

/// Clients that leave, clients that are killed in the middle, and a daemon that is asked to go: the kernel has nothing left.
#[test]
fn nothing_is_left_of_connections_that_end_or_are_killed() {
    for &(device, ip) in beds() {
        let before = resources(device);
        let (daemon, url, _) = start(ip);
        let idle = resources(device);
        let mut client = NativeClient::connect(url.clone(), Options::default()).unwrap();
        let value = Pattern(1).octets(0, 20 << 20);
        client.put("large", &mut &value[..], value.len() as u64, 0, None).unwrap();
        drop(client);
        for round in 0..40 {
            let mut client = NativeClient::connect(url.clone(), Options::default()).unwrap();
            client.put("small", &mut &b"abc"[..], 3, 0, None).unwrap();
            if round % 2 == 0 {
                // It has asked and goes without an answer.
                client.submit_get("large").unwrap();
            }
        }
        for round in 0..10 {
            let mut child = Command::new(env!("CARGO_BIN_EXE_bulkhead"))
                .args(["get", "large", "-o", "-", "--server", &url.to_string()])
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            // Nobody reads, so it stands in the middle of the value; or it is killed while it connects.
            std::thread::sleep(Duration::from_millis(100 * (round % 4)));
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let limit = Instant::now() + PATIENCE;
        while !daemon.admin_get("/metrics").contains("bulkhead_native_connection_current 0\n") {
            assert!(Instant::now() < limit, "{}", daemon.admin_get("/metrics"));
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_back(device, &idle);
        daemon.assert_nothing_leaks();
        drop(daemon);
        assert_back(device, &before);
    }
}
