//! `native.allow`: who is not named is turned away by address alone, and nobody else notices.

use bulkhead::actors::start;
use bulkhead::client::{NativeClient, Options};
use bulkhead::config::Config;
use bulkhead::fabric::Address;
use bulkhead::fabric::iwarp::Iwarp;
use bulkhead::wire::iwarp::mpa::{ConnectionWord, Frame, FrameKind};
use bulkhead::wire::native::requester::Shape;
use peer::{Dialled, Geometry, Peer, assert_value, line};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "native/peer.rs"]
mod peer;

mod common;
use common::{Daemon, Pattern};

const DEFAULT: Geometry = (256, 256 << 10, 4);

/// A connection to `door` from another address of this host.
fn connect_from(source: [u8; 4], door: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    socket.connect(&door.into()).unwrap();
    socket.set_read_timeout(Some(peer::PATIENCE)).unwrap();
    socket.into()
}

/// Asks for a connection with `private_data`; the door's answer.
fn ask(stream: &mut TcpStream, private_data: &[u8]) -> Frame {
    let word = ConnectionWord { peer_to_peer: true, rtr_read: true, ird: 1, ord: 1, ..ConnectionWord::default() };
    let request = Frame {
        revision: 2,
        markers: false,
        crc: true,
        rejected: false,
        word: Some(word),
        private_data: private_data.to_vec(),
    };
    stream.write_all(&request.encode(FrameKind::Request)).unwrap();
    let mut inbox = Vec::new();
    let mut some = [0; 600];
    loop {
        if let Some((reply, _)) = Frame::decode(FrameKind::Reply, &inbox).unwrap() {
            return reply;
        }
        let len = stream.read(&mut some).expect("an answer in time");
        assert_ne!(len, 0, "closed without an answer");
        inbox.extend_from_slice(&some[..len]);
    }
}

fn door_on_loopback(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

#[actix::test]
async fn a_peer_that_is_not_named_is_rejected_and_others_do_not_notice() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::small(dir.path().join("pool"));
    config.lanes = 2;
    config.listen.native = vec!["native+iwarp://0.0.0.0:0".parse().unwrap()];
    config.native.allow = vec!["127.0.0.1".parse().unwrap()];
    let handle = start(config).await.unwrap();
    let Address::Socket(bound) = handle.native_addresses()[0] else { panic!("a socket") };
    let door = door_on_loopback(bound.port());
    let (fabric, address) = (Iwarp::default(), Address::Socket(door));
    let dial = || Peer::connect(&fabric, &address, DEFAULT);

    let octets = Arc::new(Pattern(1).octets(0, 3 << 20));
    let mut good = dial().await;
    good.set("key", 7, &octets);
    assert_eq!(good.answer().await, line("STORED"));
    // While its answer is on the way, strangers ask, with and without a descriptor: that is not looked at.
    good.get("key");
    let strangers = std::thread::spawn(move || {
        for n in 0..20_u8 {
            let mut stream = connect_from([127, 0, 0, 2 + n % 2], door);
            let reply = ask(&mut stream, &[0; 56][..usize::from(n) * 2]);
            assert!(reply.rejected && reply.private_data == b"not_allowed", "{reply:?}");
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "and closed");
        }
    });
    assert_value(good.answer().await, "key", 7, &octets);
    while !strangers.is_finished() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    strangers.join().unwrap();

    let metrics = handle.metrics();
    assert_eq!(metrics.native.rejections.list(), [("not_allowed", 20)]);
    assert_eq!(
        (metrics.connections.rejected.get(), metrics.native.current.get(), metrics.native.total.get()),
        (20, 1, 1)
    );
    // The places are all there: another good peer comes, and after both nothing is held.
    let mut another = dial().await;
    another.get("key");
    assert_value(another.answer().await, "key", 7, &octets);
    another.ask("quit\r\n", Shape::Line);
    another.end().await;
    drop((good, another));
    let limit = Instant::now() + peer::PATIENCE;
    loop {
        let gauges = handle.store().gauges();
        let held = [metrics.native.current.get(), metrics.connections.current.get(), gauges.pins, gauges.claims];
        if held == [0; 4] {
            break;
        }
        assert!(Instant::now() < limit, "connections, pins, claims: {held:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    handle.shutdown().await;
}

#[actix::test]
async fn a_door_on_loopback_does_not_ask_who_comes() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::small(dir.path().join("pool"));
    config.listen.native = vec!["native+iwarp://127.0.0.1:0".parse().unwrap()];
    config.native.allow = vec!["192.0.2.0/24".parse().unwrap()];
    let handle = start(config).await.unwrap();
    let dialled = Peer::dial(&Iwarp::default(), &handle.native_addresses()[0], DEFAULT, |_| {}).await;
    assert!(matches!(dialled, Dialled::Connected(_)));
    drop(dialled);
    handle.shutdown().await;
}

#[test]
fn the_flag_reaches_the_door_and_an_address_is_logged_once() {
    let flags =
        ["--native", "native+iwarp://0.0.0.0:0", "--native-allow", "192.0.2.0/24", "--native-allow", "127.0.0.9"];
    let daemon = Daemon::builder().flags(&flags).start();
    let url = daemon.doors().iter().find_map(|door| door.strip_prefix("native+iwarp://")).unwrap();
    let door = door_on_loopback(url.parse::<SocketAddr>().unwrap().port());
    for _ in 0..5 {
        assert_eq!(ask(&mut connect_from([127, 0, 0, 1], door), b"").private_data, b"not_allowed");
    }
    let admitted = ask(&mut connect_from([127, 0, 0, 9], door), b"");
    assert!(admitted.rejected && admitted.private_data != b"not_allowed", "judged by its descriptor: {admitted:?}");
    let url = format!("native+iwarp://{door}").parse().unwrap();
    let refused = NativeClient::connect(url, Options::default()).unwrap_err();
    assert!(refused.to_string().ends_with("the server declined: not_allowed"), "{refused}");
    let metrics = daemon.admin_get("/metrics");
    assert!(metrics.contains("bulkhead_native_connection_rejected_total{cause=\"not_allowed\"} 6\n"), "{metrics}");
    let log = daemon.log();
    assert_eq!(log.matches("native.allow does not name this peer").count(), 1, "{log}");
    assert!(!log.contains("everybody who reaches this door"), "{log}");
}

#[test]
fn a_door_that_is_open_to_everybody_says_so() {
    let daemon = Daemon::builder().flags(&["--native", "native+iwarp://0.0.0.0:0"]).start();
    assert_eq!(daemon.log().matches("everybody who reaches this door").count(), 1, "{}", daemon.log());
    let local = Daemon::builder().flags(&["--native", "native+iwarp://127.0.0.1:0"]).start();
    assert!(!local.log().contains("everybody who reaches this door"), "{}", local.log());
}
