//! What becomes of files that are being written when their daemon is killed, told to stop, or has no room left.

use bulkhead::programs::nfs;
use bulkhead::wire::codec::Writer;
use bulkhead::wire::onc_rpc::record::{MARK_BYTES, Mark, marked};
use bulkhead::wire::onc_rpc::{AuthSys, CallHeader, OpaqueAuth, Xid};
use nfs3_client::nfs3_types::nfs3::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

mod common;
use common::daemon::Builder;
use common::{Daemon, MIB, Pattern};

#[path = "nfs_load/mod.rs"]
mod load;
use load::Files;

#[path = "nfs_client/mod.rs"]
mod client;
use client::{Peer, mount};
mod rig;

fn builder() -> Builder {
    Daemon::builder().flags(&["--nfs-tcp", "127.0.0.1:0"])
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < limit, "not yet: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// An unstable WRITE, as a record.
fn write_call(xid: u32, file: &nfs_fh3, offset: u64, octets: &[u8]) -> Vec<u8> {
    let sys = AuthSys { stamp: 1, machine_name: b"here", uid: 0, gid: 0, gids: vec![] }.body();
    let (program, procedure) = (nfs::PROGRAM_NUMBER, nfs::procedure::WRITE);
    let (version, credential, verifier) = (3, AuthSys::around(&sys), OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: Xid(xid), program, version, procedure, credential, verifier }.write(&mut writer);
    writer.opaque(&file.data);
    writer.u64(offset);
    writer.u32(octets.len() as u32);
    writer.u32(0);
    writer.opaque(octets);
    marked(&writer.finish())
}

/// Status of the next reply.
fn status(stream: &mut TcpStream) -> std::io::Result<u32> {
    let mut mark = [0; MARK_BYTES];
    stream.read_exact(&mut mark)?;
    let mut reply = vec![0; Mark::read(mark).len as usize];
    stream.read_exact(&mut reply)?;
    Ok(u32::from_be_bytes(reply[24..28].try_into().expect("a reply that was accepted")))
}

/// WRITEs, eight at a time on one connection, until that ends. Adds up those that were done.
fn write_without_end(address: SocketAddr, file: &nfs_fh3, done: &AtomicU64) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    let octets = Pattern(5).octets(0, 64 << 10);
    for xid in 0_u32.. {
        let offset = u64::from(xid % 64) * (64 << 10);
        let sent = stream.write_all(&write_call(xid, file, offset, &octets));
        if sent.is_err() || (xid >= 8 && status(&mut stream).is_err()) {
            return;
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

fn octets_below(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| entry.metadata().unwrap()).filter(|found| found.is_file()).map(|found| found.len()).sum()
}

#[test]
fn a_kill_in_the_middle_of_writes_leaves_a_mount_that_is_usable() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("shared");
    let pool_flag = format!("{}:64MiB", pool.display());
    let serve = || builder().memory("16MiB").pool("64MiB").flags(&["--pool", &pool_flag]).start();
    let mut daemon = serve();
    let peer = Peer::mount(daemon.nfs());
    peer.make_directory("dir").unwrap();
    // On disk, by now.
    let kept = peer.create("dir/kept").unwrap();
    for at in 0..20 {
        peer.write_at(&kept, at * MIB, &Pattern(1).octets(at * MIB, MIB as usize)).unwrap();
    }
    peer.commit(&kept).unwrap();
    let before = peer.write(&kept.handle, 0, b"x", stable_how::UNSTABLE).unwrap().verf;
    let old: Vec<nfs_fh3> =
        (0..4).map(|number| peer.create(&format!("dir/{number}")).unwrap().handle).chain([kept.handle]).collect();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for file in &old[..4] {
            let (address, done) = (daemon.nfs(), &done);
            scope.spawn(move || write_without_end(address, file, done));
        }
        until("writes are done", || done.load(Ordering::Relaxed) > 400);
        daemon.signal("KILL");
        assert_eq!(daemon.wait(), -1);
    });
    assert!(octets_below(&pool) >= MIB, "nobody took the octets of the pool away");

    let again = serve();
    assert_eq!(again.metric("bulkhead_pool_used_bytes"), Some(0.0));
    assert_eq!(mount(again.nfs(), "/").unwrap(), peer.root);
    let peer = Peer::with_root(again.nfs(), 0, peer.root.clone());
    assert_eq!(peer.list("").unwrap(), Vec::<String>::new());
    for file in &old {
        assert_eq!(peer.attributes(file).unwrap_err(), nfsstat3::NFS3ERR_STALE);
        assert_eq!(peer.write(file, 0, b"x", stable_how::UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_STALE);
        assert_eq!(peer.sync(file).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    }
    peer.make_directory("dir").unwrap();
    let file = peer.create("dir/kept").unwrap();
    peer.write_at(&file, 0, b"once more").unwrap();
    assert_ne!(peer.sync(&file.handle).unwrap(), before, "what was not committed is to be written again");
    again.connect().ask("get dir/kept\r\n", "VALUE dir/kept 0 9\r\nonce more\r\nEND\r\n");
}

#[test]
fn a_stop_in_the_middle_of_writes_shows_them_to_the_other_doors_and_ends_well() {
    let mut daemon = builder().setting("TIMERS__SHUTDOWN_GRACE", "3s").start();
    let peer = Peer::mount(daemon.nfs());
    let file = peer.create("file").unwrap();
    let busy = peer.create("busy").unwrap();
    let mut text = daemon.connect();
    text.ask("get file\r\n", "VALUE file 0 0\r\n\r\nEND\r\n");
    // A value that is coming keeps its connection while the daemon ends.
    text.send("set other 0 0 10\r\n12345");
    let done = AtomicU64::new(0);
    let since = std::thread::scope(|scope| {
        let (address, done, handle) = (daemon.nfs(), &done, &busy.handle);
        scope.spawn(move || write_without_end(address, handle, done));
        until("writes are done", || done.load(Ordering::Relaxed) > 50);
        peer.write_at(&file, 0, b"not committed").unwrap();
        let since = Instant::now();
        daemon.signal("TERM");
        since
    });
    assert!(since.elapsed() < Duration::from_secs(3), "whoever writes without end is told to go");
    text.send("67890\r\nget file\r\n");
    text.expect("STORED\r\nVALUE file 0 13\r\nnot committed\r\nEND\r\n");
    let code = daemon.wait();
    assert!(code == 0 && !daemon.log().contains("panicked"), "{code}\n{}", daemon.log());
    assert!(since.elapsed() < Duration::from_secs(20));
}

/// A peer that had sent a part of a call, and would never send the rest, made the end wait for all of the grace.
#[test]
fn a_stop_does_not_wait_for_the_rest_of_calls_that_have_not_begun() {
    let mut daemon = builder().setting("TIMERS__SHUTDOWN_GRACE", "40s").start();
    let peer = Peer::mount(daemon.nfs());
    let file = peer.create("file").unwrap();
    let call = write_call(2, &file.handle, 0, &[7; 1000]);
    let mut streams = Vec::new();
    for len in [2, 4, 50, call.len() - 1000 + 255] {
        let mut stream = TcpStream::connect(daemon.nfs()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(&write_call(len as u32 + 100, &file.handle, 0, b"x")).unwrap();
        assert_eq!(status(&mut stream).unwrap(), 0);
        stream.write_all(&call[..len]).unwrap();
        streams.push(stream);
    }
    let since = Instant::now();
    daemon.signal("TERM");
    let code = daemon.wait();
    assert!(code == 0 && !daemon.log().contains("panicked"), "{code}\n{}", daemon.log());
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    for mut stream in streams {
        assert!(status(&mut stream).is_err(), "nothing is said to half a call");
    }
}

#[test]
fn what_a_full_store_has_no_room_for_waits_or_is_refused_and_room_comes_back() {
    // Values that memory alone holds have 7 MiB here, others 16 MiB.
    let daemon = builder().memory("8MiB").pool("16MiB").flags(&["--value-max", "64MiB"]).start();
    let peer = Peer::mount(daemon.nfs());
    let file = peer.create("file").unwrap();
    let (mut at, mut refusals) = (0, 0);
    let since = Instant::now();
    let part = vec![7; 256 << 10];
    let error = loop {
        match peer.write(&file.handle, at, &part, stable_how::UNSTABLE) {
            Ok(done) => at += u64::from(done.count),
            Err(nfsstat3::NFS3ERR_JUKEBOX) if refusals < 20 => {
                refusals += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(error) => break error,
        }
        assert!(at <= 16 * MIB && since.elapsed() < Duration::from_secs(30), "{at} octets, {refusals} refusals");
    };
    assert!(matches!(error, nfsstat3::NFS3ERR_NOSPC | nfsstat3::NFS3ERR_JUKEBOX), "{error:?}");
    assert!(at >= 4 * MIB, "{at}");
    // What is there is there.
    let mut found = vec![0; at as usize + 1];
    assert_eq!(peer.read_at(&file, 0, &mut found).unwrap() as u64, at);
    assert!(found[..at as usize].iter().all(|octet| *octet == 7));
    // And what is written over it finds room once it was committed, or cut off.
    peer.set_len(&file, MIB).unwrap();
    peer.commit(&file).unwrap();
    peer.write_at(&file, 0, &Pattern(2).octets(0, 3 * MIB as usize)).unwrap();
    peer.close(file).unwrap();
    let other = peer.create("other").unwrap();
    peer.write_at(&other, 0, &Pattern(3).octets(0, 8 * MIB as usize)).unwrap();
    peer.close(other).unwrap();
    let other = peer.open("other").unwrap();
    let mut found = vec![0; 8 * MIB as usize];
    assert_eq!(peer.read_at(&other, 0, &mut found).unwrap(), found.len());
    Pattern(3).check(0, &found, "other");
    drop(peer);
    daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
}

/// Octets far from each other are many parts of few octets: what is kept of each is counted.
#[test]
fn drafts_of_many_parts_stay_within_the_index() {
    let index_bytes_max = 2 * MIB;
    let daemon = builder().setting("STORE__INDEX_BYTES_MAX", "2MiB").flags(&["--value-max", "16GiB"]).start();
    let mut text = daemon.connect();
    text.ask("set other 0 0 1\r\nx\r\n", "STORED\r\n");
    let peer = Peer::mount(daemon.nfs());
    let mut files: Vec<_> = (0..6).map(|number| peer.create(&format!("{number}")).unwrap()).collect();
    let mut streams: Vec<_> = files.iter().map(|_| TcpStream::connect(daemon.nfs()).unwrap()).collect();
    let (mut done, mut later, mut full, mut gone) = (0, 0, 0, 0);
    for round in 0..40 {
        for (stream, file) in streams.iter_mut().zip(&files) {
            let calls = (0..50).map(|number| {
                let xid = round * 50 + number;
                write_call(xid, &file.handle, u64::from(xid) << 20, b"x")
            });
            stream.write_all(&calls.collect::<Vec<_>>().concat()).unwrap();
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            let gone_before = gone;
            for _ in 0..50 {
                match status(stream).unwrap() {
                    0 => done += 1,
                    10008 => later += 1,
                    28 => full += 1,
                    70 => gone += 1,
                    other => panic!("status {other}"),
                }
            }
            if gone > gone_before {
                // It was committed to make room, and evicted before its next write came.
                files[number] = peer.create(&format!("{number} from round {round} on")).unwrap();
            }
        }
        let index_bytes = daemon.metric("bulkhead_store_index_bytes").unwrap();
        assert!(index_bytes <= (index_bytes_max + (64 << 10)) as f64, "{index_bytes} in round {round}");
    }
    assert!(
        done > 2000 && later > 0,
        "{done} done, {later} put off, {full} refused, {gone} of files that were evicted"
    );
    until("all is committed and can be evicted", || daemon.metric("bulkhead_store_pins") == Some(0.0));
    peer.write_at(&peer.create("more").unwrap(), 0, b"x").unwrap();
    drop(peer);
    drop(streams);
    until("all is committed", || daemon.metric("bulkhead_store_pins") == Some(0.0));
    text.ask("flush_all\r\n", "OK\r\n");
    until("nothing is left of them", || daemon.metric("bulkhead_store_index_bytes").unwrap() <= 4096.0);
}
