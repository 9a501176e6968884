//! A daemon whose store is a file system over TCP, used through a client of another hand: what every client must be able to do, and
//! what the other doors see of it and it of them.

use bulkhead::client::{AnyClient, Info, Options, ServerUrl};
use nfs3_client::nfs3_types::mount::mountstat3;
use nfs3_client::nfs3_types::nfs3::*;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

mod common;
use common::daemon::Builder;
use common::{Daemon, MIB, Pattern};

#[path = "native/doors.rs"]
mod doors;
use doors::{Stream, door_of};

#[path = "nfs_load/mod.rs"]
mod load;
use load::{Counts, Files};

#[path = "nfs_client/mod.rs"]
mod client;
use client::{Open, Peer, mount};
mod rig;

/// Lengths where words, transfers, segments and heads end.
const SIZES: [u64; 9] = [0, 1, 3, 4097, 262_144, MIB - 1, MIB + 1, 3 * MIB + 2, 20 * MIB];

fn builder() -> Builder {
    Daemon::builder().flags(&["--nfs-tcp", "127.0.0.1:0"])
}

fn with_all_doors() -> Builder {
    builder().flags(&["--native", "native+iwarp://127.0.0.1:0", "--rpc", "rpc+iwarp://127.0.0.1:0"])
}

fn other_doors(daemon: &Daemon) -> Vec<AnyClient> {
    let connect = |url: ServerUrl| AnyClient::connect(url, Options::default()).unwrap();
    ["memcache://", "native+", "rpc+"].map(|scheme| connect(door_of(daemon, scheme))).into()
}

/// A file by its pattern.
fn write_file(peer: &Peer, path: &str, seed: u64, len: u64) -> Open {
    let file = peer.create(path).unwrap();
    for at in (0..len).step_by(MIB as usize) {
        peer.write_at(&file, at, &Pattern(seed).octets(at, (len - at).min(MIB) as usize)).unwrap();
    }
    file
}

fn check_file(peer: &Peer, path: &str, seed: u64, len: u64) {
    let file = peer.open(path).unwrap();
    assert_eq!(peer.len(&file).unwrap(), len, "{path}");
    let mut buffer = vec![0; MIB as usize + 1];
    let mut at = 0;
    loop {
        let count = peer.read_at(&file, at, &mut buffer).unwrap();
        Pattern(seed).check(at, &buffer[..count], path);
        at += count as u64;
        if count < buffer.len() {
            return assert_eq!(at, len, "{path}");
        }
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < limit, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_of_another_hand_passes_the_list() {
    // Less memory than the longest files have octets.
    let daemon = builder().memory("32MiB").pool("2GiB").start();
    let peer = Peer::mount(daemon.nfs());
    load::run(&peer, &Counts { copied_bytes_max: 64 << 20, ..Counts::FULL }, |step| eprintln!("{step}"));
    assert_eq!(peer.list("").unwrap().len(), 0, "nothing is left");
    drop(peer);
    until("no connection is left", || daemon.metric("bulkhead_nfs_connection_current") == Some(0.0));
    // Where entries were that are gone is remembered for a while, for whoever lists their directory.
    daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
}

#[test]
fn what_one_door_writes_the_others_read() {
    let daemon = with_all_doors().memory("64MiB").start();
    let peer = Peer::mount(daemon.nfs());
    let mut others = other_doors(&daemon);
    peer.make_directory("dir").unwrap();
    for (size, seed) in SIZES.into_iter().zip(1..) {
        let file = write_file(&peer, "dir/ours", seed, size);
        peer.close(file).unwrap();
        let mut infos = BTreeSet::new();
        for other in &mut others {
            let mut copy = Stream::new(seed, size);
            let info = other.get("dir/ours", &mut copy).unwrap().expect("it was committed");
            assert_eq!((info.len, info.flags, copy.at), (size, 0, size), "{}", other.url());
            assert_eq!(other.stat("dir/ours").unwrap(), Some(info));
            infos.insert(info.cas);
        }
        assert_eq!(infos.len(), 1, "one version for all");
        for (number, other) in others.iter_mut().enumerate() {
            let (key, seed) = (format!("dir/by-{number}"), seed + 100 * number as u64);
            other.put(&key, &mut Stream::new(seed, size), size, seed as u32, None).unwrap();
            check_file(&peer, &key, seed, size);
        }
    }
    let names: BTreeSet<String> = peer.list("dir").unwrap().into_iter().collect();
    assert_eq!(names, BTreeSet::from(["ours", "by-0", "by-1", "by-2"].map(str::to_owned)));
    for (number, other) in others.iter_mut().enumerate() {
        peer.remove(&format!("dir/by-{number}")).unwrap();
        assert_eq!(other.stat(format!("dir/by-{number}")).unwrap(), None);
    }
    assert!(others[2].delete("dir/ours").unwrap());
    assert_eq!(peer.find("dir/ours").unwrap_err(), nfsstat3::NFS3ERR_NOENT);
    // The directory was made, so it stays.
    assert_eq!(peer.list("dir").unwrap(), Vec::<String>::new());
}

#[test]
fn flags_and_time_to_live_stay_and_the_version_changes_with_a_commit() {
    let daemon = with_all_doors().start();
    let peer = Peer::mount(daemon.nfs());
    let mut text = daemon.connect();
    text.ask("set k 77 3600 5\r\nhello\r\n", "STORED\r\n");
    let mut other = other_doors(&daemon).remove(2);
    let before = other.stat("k").unwrap().unwrap();
    let file = peer.open("k").unwrap();
    peer.write_at(&file, 5, b" world").unwrap();
    assert_eq!(other.stat("k").unwrap(), Some(before), "nobody else sees it");
    assert_eq!(peer.another().read(&file.handle, 0, 100).unwrap(), (b"hello world".to_vec(), true), "this door does");
    peer.commit(&file).unwrap();
    let after = other.stat("k").unwrap().unwrap();
    assert_eq!((after.len, after.flags), (11, 77));
    assert_ne!(after.cas, before.cas);
    text.ask("gets k\r\n", format!("VALUE k 77 11 {}\r\nhello world\r\nEND\r\n", after.cas));
    // What was seen before is not what is there now, and the other way round.
    text.ask(format!("cas k 1 0 1 {}\r\nx\r\n", before.cas), "EXISTS\r\n");
    text.ask(format!("cas k 1 0 1 {}\r\nx\r\n", after.cas), "STORED\r\n");
    // The file is the same one: its handle outlives an overwrite by any door.
    assert_eq!(peer.read(&file.handle, 0, 100).unwrap(), (b"x".to_vec(), true));
    // Time to live: an expired file is gone, and what is written to one keeps its time.
    text.ask("set ttl 0 2 3\r\nabc\r\n", "STORED\r\n");
    let file = peer.open("ttl").unwrap();
    peer.write_at(&file, 0, b"xyz").unwrap();
    peer.commit(&file).unwrap();
    text.ask("get ttl\r\n", "VALUE ttl 0 3\r\nxyz\r\nEND\r\n");
    until("it has expired", || peer.find("ttl").is_err());
    assert_eq!(peer.attributes(&file.handle).unwrap_err(), nfsstat3::NFS3ERR_STALE);
}

#[test]
fn a_commit_a_stable_write_and_an_idle_second_show_what_was_written() {
    let daemon = with_all_doors().start();
    let peer = Peer::mount(daemon.nfs());
    let mut other = other_doors(&daemon).remove(0);
    let mut len = |key: &str| other.stat(key).unwrap().map(|info: Info| info.len);
    let file = peer.create("f").unwrap();
    assert_eq!(len("f"), Some(0), "an empty value at once");
    for (size, stable) in [(100, stable_how::FILE_SYNC), (200, stable_how::DATA_SYNC)] {
        let written = peer.write(&file.handle, 0, &vec![7; size], stable).unwrap();
        assert_eq!((written.count as usize, written.committed), (size, stable));
        assert_eq!(len("f"), Some(size as u64));
    }
    let unstable = peer.write(&file.handle, 0, &[7; 300], stable_how::UNSTABLE).unwrap();
    assert_eq!(unstable.committed, stable_how::UNSTABLE);
    assert_eq!(len("f"), Some(200));
    assert_eq!(peer.sync(&file.handle).unwrap(), unstable.verf);
    assert_eq!(len("f"), Some(300));
    peer.write(&file.handle, 0, &[7; 400], stable_how::UNSTABLE).unwrap();
    until("an idle second is over", || len("f") == Some(400));
    // Until then the other door wins, whatever it does.
    peer.write(&file.handle, 0, &[7; 500], stable_how::UNSTABLE).unwrap();
    let mut text = daemon.connect();
    text.ask("set f 0 0 5\r\nother\r\n", "STORED\r\n");
    assert_eq!(peer.read(&file.handle, 0, 1000).unwrap(), (b"other".to_vec(), true));
    peer.sync(&file.handle).unwrap();
    text.ask("get f\r\n", "VALUE f 0 5\r\nother\r\nEND\r\n");
    peer.write(&file.handle, 0, &[7; 500], stable_how::UNSTABLE).unwrap();
    text.ask("delete f\r\n", "DELETED\r\n");
    assert_eq!(peer.sync(&file.handle).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    assert_eq!(peer.write(&file.handle, 0, b"x", stable_how::UNSTABLE).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    text.ask("get f\r\n", "END\r\n");
}

#[test]
fn after_a_restart_the_root_is_the_same_and_nothing_else_is() {
    let mut daemon = builder().start();
    let peer = Peer::mount(daemon.nfs());
    let file = write_file(&peer, "f", 1, 5000);
    peer.make_directory("dir").unwrap();
    let dir = peer.find("dir").unwrap();
    let before = peer.write(&file.handle, 0, b"x", stable_how::UNSTABLE).unwrap().verf;
    daemon.stop();
    let again = builder().start();
    let peer = Peer::with_root(again.nfs(), 0, peer.root.clone());
    assert_eq!(peer.list("").unwrap(), Vec::<String>::new());
    for old in [&file.handle, &dir] {
        assert_eq!(peer.attributes(old).unwrap_err(), nfsstat3::NFS3ERR_STALE);
    }
    let file = peer.create("f").unwrap();
    let after = peer.write(&file.handle, 0, b"x", stable_how::UNSTABLE).unwrap().verf;
    assert_ne!(before, after, "what was not committed is to be written again");
    assert_eq!(mount(again.nfs(), "/").unwrap(), peer.root);
}

#[test]
fn a_large_directory_is_listed_in_pages_of_equal_worth() {
    const COUNT: usize = 100_000;
    let daemon = builder().memory("256MiB").start();
    let mut text = daemon.connect();
    for first in (0..COUNT).step_by(1000) {
        let sets: String = (first..first + 1000).map(|n| format!("set dir/{n:06} 0 0 1 noreply\r\nx\r\n")).collect();
        text.send(sets);
    }
    text.ask("get dir/099999\r\n", "VALUE dir/099999 0 1\r\nx\r\nEND\r\n");
    let peer = Peer::mount(daemon.nfs());
    let dir = peer.find("dir").unwrap();
    let (entries, calls) = peer.entries(&dir, 64 << 10).unwrap();
    let names: Vec<&str> = entries.iter().map(|(name, _)| name.as_str()).collect();
    let expected: Vec<String> = (0..COUNT).map(|n| format!("{n:06}")).collect();
    assert!(names == expected, "{} entries", names.len());
    // An entry takes some 200 octets.
    let most = COUNT / (64 << 10 >> 8);
    assert!(calls <= most, "{calls} calls, {most} at most");
    let (last, handle) = entries.last().unwrap();
    assert_eq!((last.as_str(), peer.read(handle, 0, 10).unwrap()), ("099999", (b"x".to_vec(), true)));
    // Renamed are at most 10,000 at once; a client copies the others.
    assert_eq!(peer.rename("dir", "other").unwrap_err().raw_os_error(), Some(libc::EXDEV));
    assert_eq!(peer.find("dir").unwrap(), dir);
}

#[test]
fn a_directory_is_renamed_with_all_that_is_in_it() {
    let daemon = with_all_doors().start();
    let peer = Peer::mount(daemon.nfs());
    let mut text = daemon.connect();
    for n in 0..2000 {
        text.send(format!("set a/b/{n} {n} 0 3 noreply\r\nxyz\r\n"));
    }
    text.ask("get a/b/1999\r\n", "VALUE a/b/1999 1999 3\r\nxyz\r\nEND\r\n");
    let open = peer.open("a/b/7").unwrap();
    peer.write_at(&open, 3, b"!").unwrap();
    peer.make_directory("c").unwrap();
    peer.rename("a/b", "c/d").unwrap();
    // What was being written moves along.
    peer.commit(&open).unwrap();
    text.ask("get a/b/7 c/d/7 c/d/1999\r\n", "VALUE c/d/7 7 4\r\nxyz!\r\nVALUE c/d/1999 1999 3\r\nxyz\r\nEND\r\n");
    assert_eq!(peer.list("c/d").unwrap().len(), 2000);
    assert_eq!(peer.find("a/b").unwrap_err(), nfsstat3::NFS3ERR_NOENT);
}

#[test]
fn what_does_not_fit_is_refused_and_what_does_not_fit_now_is_done_later() {
    let daemon = builder().memory("16MiB").pool("64MiB").flags(&["--value-max", "60MiB"]).start();
    let peer = Peer::mount(daemon.nfs());
    let max = peer.fsinfo().maxfilesize;
    assert_eq!(max, 60 * MIB);
    let file = peer.create("f").unwrap();
    assert_eq!(peer.set_len(&file, max + 1).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(peer.write_at(&file, max, b"x").unwrap_err().raw_os_error(), Some(libc::EFBIG));
    assert_eq!(peer.write_at(&file, u64::MAX - 1, b"xyz").unwrap_err().raw_os_error(), Some(libc::EFBIG));
    peer.set_len(&file, max).unwrap();
    peer.write_at(&file, max - 1, b"x").unwrap();
    peer.close(file).unwrap();
    peer.remove("f").unwrap();
    // Two drafts that have no room beside each other: the second waits until the first is committed and evicted.
    let first = write_file(&peer, "first", 1, 40 * MIB);
    let second = write_file(&peer, "second", 2, 40 * MIB);
    assert!(peer.jukeboxes.get() > 0, "it was told to wait");
    peer.close(second).unwrap();
    check_file(&peer, "second", 2, 40 * MIB);
    assert_eq!(peer.attributes(&first.handle).unwrap_err(), nfsstat3::NFS3ERR_STALE, "it had to go");
}

#[test]
fn whoever_is_not_let_in_is_told_so_call_by_call() {
    let daemon = builder().flags(&["--nfs-allow", "192.0.2.0/24"]).start();
    assert!(matches!(mount(daemon.nfs(), "/"), Err(mountstat3::MNT3ERR_ACCES)));
    let allowed = builder().start();
    let root = Peer::mount(allowed.nfs()).root;
    let peer = Peer::with_root(daemon.nfs(), 0, root);
    peer.null().unwrap();
    assert_eq!(peer.attributes(&peer.root).unwrap_err(), nfsstat3::NFS3ERR_ACCES);
    assert_eq!(peer.create("f").map(|_| ()).unwrap_err().raw_os_error(), Some(libc::EACCES));
}

#[test]
fn modes_are_asked_and_the_super_user_is_squashed_where_he_should_be() {
    let daemon = builder().start();
    let root = Peer::mount(daemon.nfs());
    let user = Peer::mount_as(daemon.nfs(), 1000);
    drop(root.create("f").unwrap());
    root.set_mode("f", 0o600).unwrap();
    let denied = |error: std::io::Error| assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    denied(user.create("g").map(|_| ()).unwrap_err());
    let file = user.open("f").unwrap();
    denied(user.read_at(&file, 0, &mut [0; 8]).unwrap_err());
    denied(user.write_at(&file, 0, b"x").unwrap_err());
    root.make_directory("open").unwrap();
    root.set_mode("open", 0o777).unwrap();
    let mine = user.create("open/mine").unwrap();
    user.write_at(&mine, 0, b"x").unwrap();
    assert_eq!(root.attributes(&mine.handle).unwrap().uid, 1000);

    let daemon = builder().flags(&["--nfs-root-squash"]).start();
    denied(Peer::mount(daemon.nfs()).create("f").map(|_| ()).unwrap_err());
}

#[test]
fn sixteen_clients_write_and_read_their_own_files_while_values_come_from_disk() {
    let daemon = builder().memory("16MiB").pool("1GiB").start();
    let address = daemon.nfs();
    std::thread::scope(|scope| {
        for seed in 0..16 {
            scope.spawn(move || {
                let peer = Peer::mount(address);
                let path = format!("f{seed}");
                let file = write_file(&peer, &path, seed, 12 * MIB + seed);
                peer.close(file).unwrap();
                for _ in 0..2 {
                    check_file(&peer, &path, seed, 12 * MIB + seed);
                }
            });
        }
    });
    assert!(daemon.metric("bulkhead_disk_reads_total").unwrap() > 100.0);
    until("no connection is left", || daemon.metric("bulkhead_nfs_connection_current") == Some(0.0));
    assert_eq!(daemon.metric("bulkhead_connection_current"), Some(0.0));
    daemon.assert_nothing_leaks();
}
