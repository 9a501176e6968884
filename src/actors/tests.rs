//! Start and end of a daemon.

use super::*;
use crate::actors::rig::{converse, octets, rest, set, soon, until, value_reply};
use crate::store::pool;
use std::collections::BTreeMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

fn config(dir: &Path) -> Config {
    Config::small(dir.join("pool"))
}

async fn connect(handle: &Handle) -> TcpStream {
    TcpStream::connect(handle.addresses()[0]).await.unwrap()
}

/// Status and body.
async fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut peer = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    peer.write_all(request.as_bytes()).await.unwrap();
    let answer = String::from_utf8(rest(&mut peer).await).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned())
}

fn admin_address(handle: &Handle) -> SocketAddr {
    let url = handle.doors().last().unwrap();
    url.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics")).unwrap().parse().unwrap()
}

/// Names and lengths of what a directory holds.
fn listing(dir: &Path) -> BTreeMap<String, u64> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())).collect()
}

#[actix::test]
async fn a_shutdown_frees_ports_pool_and_socket_so_that_the_same_start_works_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.lanes = 2;
    config.listen.unix = vec![dir.path().join("door")];
    config.listen.admin = Some(([127, 0, 0, 1], 0).into());
    for round in 0..3 {
        let handle = start(config.clone()).await.unwrap();
        assert_eq!(handle.doors().len(), 3);
        // The later rounds ask for the very ports of the first.
        config.listen.memcache = handle.addresses().to_vec();
        config.listen.admin = Some(admin_address(&handle));
        let value = octets(3_000_000, round);
        let mut peer = connect(&handle).await;
        converse(&mut peer, b"get k\r\n", b"END\r\n").await;
        let (mut reader, mut writer) = peer.split();
        let request = set("k", &value);
        let (sent, ()) = tokio::join!(writer.write_all(&request), rig::expect(&mut reader, b"STORED\r\n"));
        sent.unwrap();
        let mut other = UnixStream::connect(&config.listen.unix[0]).await.unwrap();
        converse(&mut other, b"get k\r\n", &value_reply("k", &value)).await;
        handle.shutdown().await;
        assert_eq!(rest(&mut peer).await, b"");
        assert!(!config.listen.unix[0].exists());
    }
    let again = PoolDir::open(&config.store.pools[0].dir, Some(1 << 20));
    again.expect("the pool is nobody's");
}

#[actix::test]
async fn a_busy_port_leaves_the_pool_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    let pool_dir = config.store.pools[0].dir.clone();
    pool::init(&pool_dir).unwrap();
    std::fs::write(pool_dir.join("extents-0000.bulkhead"), b"left by another").unwrap();
    let before = listing(&pool_dir);
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = busy.local_addr().unwrap();
    let unix = dir.path().join("door");
    config.listen.unix = vec![unix.clone()];
    for admin in [false, true] {
        let mut config = config.clone();
        if admin {
            config.listen.admin = Some(address);
        } else {
            config.listen.memcache.push(address);
        }
        let error = start(config).await.err().expect("the port is busy");
        assert_eq!(error.exit_code(), Exit::Unavailable);
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        assert_eq!(listing(&pool_dir), before);
        assert!(!unix.exists(), "nothing keeps running, and no door is left behind");
    }
    drop(busy);
    config.listen.memcache.push(address);
    start(config).await.unwrap().shutdown().await;
    assert_ne!(listing(&pool_dir), before, "this time it was taken");
}

#[actix::test]
async fn a_pool_has_one_daemon_and_the_second_disturbs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let handle = start(config(dir.path())).await.unwrap();
    let mut peer = connect(&handle).await;
    converse(&mut peer, &set("k", b"v"), b"STORED\r\n").await;
    let error = start(config(dir.path())).await.err().expect("the pool is locked");
    assert!(matches!(error, StartError::Pool(PoolError::Locked { .. })), "{error}");
    assert_eq!(error.exit_code(), Exit::Unavailable);
    converse(&mut peer, b"get k\r\n", &value_reply("k", b"v")).await;
    handle.shutdown().await;
}

#[actix::test]
async fn a_socket_that_a_killed_daemon_left_is_taken_over_and_a_living_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let mut config = config(dir.path());
    config.listen.unix = vec![path.clone()];
    let handle = start(config.clone()).await.unwrap();
    let mut other = config.clone();
    other.store.pools[0].dir = dir.path().join("other");
    assert!(matches!(start(other).await, Err(StartError::Bind { .. })));
    let mut peer = UnixStream::connect(&path).await.unwrap();
    converse(&mut peer, &set("k", b"v"), b"STORED\r\n").await;
    handle.shutdown().await;
}

/// Connecting to a file is refused like connecting to a socket that nobody listens on, and the file was removed.
#[actix::test]
async fn a_file_where_a_socket_should_be_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("letters");
    let link = dir.path().join("link");
    std::fs::write(&path, b"precious").unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for door in [&path, &link] {
        let mut config = config(dir.path());
        config.listen.unix = vec![door.clone()];
        assert!(matches!(start(config).await, Err(StartError::Bind { .. })));
        assert_eq!(std::fs::read(door).unwrap(), b"precious");
    }
    assert!(link.is_symlink());
}

#[actix::test]
async fn a_shutdown_lets_a_request_finish_and_says_so_on_the_admin_port() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.listen.admin = Some(([127, 0, 0, 1], 0).into());
    let handle = start(config).await.unwrap();
    let (admin, metrics) = (admin_address(&handle), handle.metrics().clone());
    assert_eq!(http_get(admin, "/healthz").await, (200, "ok\n".to_owned()));
    let (status, text) = http_get(admin, "/metrics").await;
    assert_eq!(status, 200);
    assert!(text.contains("\nbulkhead_store_objects 0\n") && text.ends_with("# EOF\n"), "{text}");
    assert_eq!(http_get(admin, "/nothing").await.0, 404);

    let mut peer = connect(&handle).await;
    peer.write_all(b"set k 0 0 10\r\n01234").await.unwrap();
    until("the header was read", || metrics.memcache.cmd_set.get() == 1).await;
    let peer_side = async {
        let mut status = 200;
        while status == 200 {
            status = http_get(admin, "/healthz").await.0;
        }
        assert_eq!(status, 503);
        converse(&mut peer, b"56789\r\n", b"STORED\r\n").await;
        assert_eq!(rest(&mut peer).await, b"");
    };
    soon(async { tokio::join!(handle.shutdown(), peer_side) }).await;
    assert_eq!(metrics.connections.closed.shutdown.get(), 1);
}

#[actix::test]
async fn a_shutdown_cuts_what_does_not_finish_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.timers.shutdown_grace = Duration::from_millis(50);
    let handle = start(config).await.unwrap();
    let metrics = handle.metrics().clone();
    let mut peer = connect(&handle).await;
    peer.write_all(b"set k 0 0 10\r\n01234").await.unwrap();
    until("the header was read", || metrics.memcache.cmd_set.get() == 1).await;
    soon(handle.shutdown()).await;
    assert_eq!(rest(&mut peer).await, b"");
}

#[actix::test]
async fn what_an_actor_stores_a_peer_reads_and_the_other_way_round() {
    let dir = tempfile::tempdir().unwrap();
    let handle = start(config(dir.path())).await.unwrap();
    let value = octets(40 << 20, 1);
    soon(handle.local().put(b"k", &value, 7, 0)).await.unwrap();
    let mut peer = connect(&handle).await;
    peer.write_all(b"get k\r\n").await.unwrap();
    let line = b"VALUE k 7 41943040\r\n";
    rig::expect(&mut peer, line).await;
    let mut got = vec![0; value.len()];
    soon(peer.read_exact(&mut got)).await.unwrap();
    assert!(got == value, "most of it came from disk");
    rig::expect(&mut peer, b"\r\nEND\r\n").await;
    converse(&mut peer, &set("l", b"from outside"), b"STORED\r\n").await;
    assert_eq!(handle.local().get(b"l").await, Ok(Some(b"from outside".to_vec())));
    let local = handle.local().clone();
    handle.shutdown().await;
    assert_eq!(soon(local.get(b"k")).await, Err(local::LocalError::Stopped));
}

#[test]
fn the_memory_sum_adds_up() {
    let mut config = Config::small("/var/tmp/nowhere");
    config.lanes = 3;
    let sum = MemorySum::of(&config);
    assert_eq!(sum.staging_bytes, 3 * config.store.staging_bytes);
    let parts = sum.arena_bytes + sum.staging_bytes + sum.index_bytes + sum.connections_bytes + sum.process_bytes;
    assert_eq!((sum.total_bytes(), sum.rpc_bytes), (parts, 0));
    let mut with_rpc = config.clone();
    with_rpc.listen.rpc = vec!["rpc+loopback:sum".parse().unwrap()];
    let connection = MemorySum::of(&with_rpc).rpc_bytes / with_rpc.rpc.connections_max as u64;
    let (windows, long) = (with_rpc.rpc.windows.mapping_bytes(), 2 * with_rpc.rpc.long_bytes_max);
    assert!(connection > windows + long && connection < windows + long + (2 << 20), "{connection}");
    assert!(sum.to_string().starts_with(&format!("memory {} MiB = arena 16 +", parts.div_ceil(1 << 20))), "{sum}");
}
