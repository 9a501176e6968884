//! The NFS door on TCP among peers that send what a record was before octets of it were cut or changed, that stall, and that die:
//! whatever they do costs at most their own connection, a client beside them never notices, and in the end nothing is held that was
//! not held before.
//!
//! It runs for a few seconds, from a seed that a failure prints. `BULKHEAD_ATTACK_SECONDS` and `BULKHEAD_ATTACK_SEED` say
//! otherwise.

use bulkhead::programs::{mount, nfs};
use bulkhead::wire::codec::Writer;
use bulkhead::wire::onc_rpc::record::{MARK_BYTES, Mark, marked};
use bulkhead::wire::onc_rpc::{AuthSys, CallHeader, OpaqueAuth, Xid};
use socket2::SockRef;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

mod common;
use common::{Daemon, MIB, Pattern};

#[path = "nfs_load/mod.rs"]
mod load;
use load::Files;

#[path = "nfs_client/mod.rs"]
mod client;
use client::Peer;
mod rig;
use rig::Seeded;

/// Of the file that is read and not written.
const LARGE_BYTES: u64 = 8 * MIB;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn message(xid: u32, program: u32, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let sys = AuthSys { stamp: 1, machine_name: b"attacker", uid: 0, gid: 0, gids: vec![1, 2] }.body();
    let (version, credential, verifier) = (3, AuthSys::around(&sys), OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: Xid(xid), program, version, procedure, credential, verifier }.write(&mut writer);
    arguments(&mut writer);
    writer.finish()
}

/// What attackers know: handles, and a directory of their own.
#[derive(Clone)]
struct Known {
    root: Vec<u8>,
    dir: Vec<u8>,
    file: Vec<u8>,
    large: Vec<u8>,
}

impl Known {
    fn of(peer: &Peer) -> Self {
        peer.make_directory("bad").unwrap();
        let octets = |path: &str| peer.find(path).unwrap().data.to_vec();
        drop(peer.create("bad/file").unwrap());
        let large = peer.create("large").unwrap();
        for at in (0..LARGE_BYTES).step_by(MIB as usize) {
            peer.write_at(&large, at, &Pattern(3).octets(at, MIB as usize)).unwrap();
        }
        peer.close(large).unwrap();
        Self { root: octets(""), dir: octets("bad"), file: octets("bad/file"), large: octets("large") }
    }

    /// A call of every kind.
    fn calls(&self, xid: u32) -> Vec<Vec<u8>> {
        use nfs::procedure::*;
        let call = |procedure: u32, arguments: &dyn Fn(&mut Writer)| {
            message(xid, nfs::PROGRAM_NUMBER, procedure, |words| arguments(words))
        };
        let words = |writer: &mut Writer, words: &[u32]| words.iter().for_each(|word| writer.u32(*word));
        let set = |writer: &mut Writer| words(writer, &[1, 0o644, 0, 0, 1, 0, 5000, 0, 2, 9, 9]);
        let place = |writer: &mut Writer, name: &[u8]| {
            writer.opaque(&self.dir);
            writer.opaque(name);
        };
        let file = |procedure: u32, rest: &[u32]| {
            call(procedure, &|writer| {
                writer.opaque(&self.file);
                words(writer, rest);
            })
        };
        let named = |procedure: u32| call(procedure, &|writer| place(writer, b"name"));
        let write = |data: &[u8], stable: u32| {
            call(WRITE, &|writer| {
                writer.opaque(&self.file);
                words(writer, &[0, 7, data.len() as u32, stable]);
                writer.opaque(data);
            })
        };
        let listing = |procedure: u32, rest: &[u32]| {
            call(procedure, &|writer| {
                writer.opaque(&self.dir);
                words(writer, rest);
            })
        };
        let mount = |procedure: u32, path: &[u8]| {
            message(xid, mount::PROGRAM_NUMBER, procedure, |writer| match path {
                [] => {}
                path => writer.opaque(path),
            })
        };
        vec![
            call(NULL, &|_| {}),
            file(GETATTR, &[]),
            call(SETATTR, &|writer| {
                writer.opaque(&self.file);
                set(writer);
                writer.u32(0);
            }),
            named(LOOKUP),
            file(ACCESS, &[0x3f]),
            file(READLINK, &[]),
            file(READ, &[0, 0, 70_000]),
            call(READ, &|writer| {
                writer.opaque(&self.large);
                words(writer, &[0, 1000, 1 << 20]);
            }),
            write(&[7; 100], 0),
            write(&[8; 9000], 2),
            call(CREATE, &|writer| {
                place(writer, b"name");
                writer.u32(0);
                set(writer);
            }),
            call(MKDIR, &|writer| {
                place(writer, b"directory");
                set(writer);
            }),
            call(SYMLINK, &|writer| {
                place(writer, b"link");
                set(writer);
                writer.opaque(b"to/where");
            }),
            call(MKNOD, &|writer| {
                place(writer, b"node");
                writer.u32(7);
                set(writer);
            }),
            named(REMOVE),
            named(RMDIR),
            call(RENAME, &|writer| {
                place(writer, b"name");
                place(writer, b"other");
            }),
            call(LINK, &|writer| {
                writer.opaque(&self.file);
                place(writer, b"hard");
            }),
            listing(READDIR, &[0, 0, 0, 0, 4096]),
            listing(READDIRPLUS, &[0, 0, 0, 0, 4096, 8192]),
            call(FSSTAT, &|writer| writer.opaque(&self.root)),
            call(FSINFO, &|writer| writer.opaque(&self.root)),
            call(PATHCONF, &|writer| writer.opaque(&self.root)),
            file(COMMIT, &[0, 0, 0]),
            mount(mount::procedure::MNT, b"/bad"),
            mount(mount::procedure::DUMP, b""),
            mount(mount::procedure::UMNT, b"/bad"),
            mount(mount::procedure::EXPORT, b""),
        ]
    }
}

/// One to four changes: an octet, a word that is often at the edge of something, a cut, octets more.
fn mutate(random: &mut Seeded, octets: &mut Vec<u8>) {
    for _ in 0..=random.below(4) {
        let len = octets.len() as u64;
        match random.below(8) {
            0 => octets.truncate(random.below(len + 1) as usize),
            1 => octets.extend((0..random.below(40)).map(|_| 0)),
            2 | 3 if len > 0 => octets[random.below(len) as usize] ^= 1 << random.below(8),
            _ if len >= 4 => {
                let edges = [0, 1, 2, 3, 4, 5, 28, 64, 65, 255, 1024, 4096, 1 << 20, (1 << 20) + 1, 1 << 31, u32::MAX];
                let at = random.below(len / 4) as usize * 4;
                octets[at..at + 4].copy_from_slice(&random.pick(&edges).to_be_bytes());
            }
            _ => {}
        }
    }
}

/// A record in fragments of any length.
fn fragments(random: &mut Seeded, message: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    let mut rest = message;
    while random.below(3) > 0 {
        let (part, behind) = rest.split_at(random.below(rest.len() as u64 + 1) as usize);
        stream.extend(Mark { is_last: false, len: part.len() as u32 }.octets());
        stream.extend(part);
        rest = behind;
    }
    stream.extend(marked(rest));
    stream
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    stream
}

/// Without a word to the other side, in one of two ways.
fn kill(stream: TcpStream, is_reset: bool) {
    if is_reset {
        SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    }
}

fn attack(address: SocketAddr, known: &Known, mut random: Seeded, until: Instant, rounds: &AtomicU64) {
    let mut buffer = vec![0; 100_000];
    while Instant::now() < until {
        let mut stream = connect(address);
        for _ in 0..1 + random.below(60) {
            let mut calls = known.calls(random.below(50) as u32);
            let mut message = calls.swap_remove(random.below(calls.len() as u64) as usize);
            if random.below(4) > 0 {
                mutate(&mut random, &mut message);
            }
            let mut record = if random.one_in(3) { fragments(&mut random, &message) } else { marked(&message) };
            if random.one_in(6) {
                mutate(&mut random, &mut record);
            }
            rounds.fetch_add(1, Ordering::Relaxed);
            if stream.write_all(&record).is_err() || Instant::now() >= until {
                break;
            }
            if random.one_in(3) && matches!(stream.read(&mut buffer), Ok(0)) {
                break;
            }
        }
        match random.below(3) {
            0 => kill(stream, true),
            1 => kill(stream, false),
            _ => {
                // All that was answered, and the end; a peer that owes octets is cut later.
                let _ = stream.shutdown(Shutdown::Write);
                while matches!(stream.read(&mut buffer), Ok(1..)) {}
            }
        }
    }
}

/// A client that does nothing wrong, in a directory of its own.
fn serve_well(address: SocketAddr, until: Instant) -> u64 {
    let peer = Peer::mount(address);
    peer.make_directory("good").unwrap();
    let mut round = 0;
    while Instant::now() < until {
        round += 1;
        let octets = Pattern(round).octets(0, 200_000);
        let file = peer.create("good/file").unwrap();
        peer.write_at(&file, 0, &octets).unwrap();
        peer.commit(&file).unwrap();
        let mut found = vec![0; 200_001];
        assert_eq!(peer.read_at(&file, 0, &mut found).unwrap(), 200_000);
        Pattern(round).check(0, &found[..200_000], "beside an attack");
        assert_eq!(peer.list("good").unwrap(), ["file"]);
    }
    peer.remove("good/file").unwrap();
    round
}

fn serve() -> Daemon {
    let builder = Daemon::builder().flags(&["--nfs-tcp", "127.0.0.1:0"]).memory("32MiB");
    builder.setting("TIMERS__STALL_TIMEOUT", "2s").setting("TIMERS__RESERVE_WAIT", "2s").start()
}

/// As before, once the peers that owe something are cut.
fn assert_quiet(daemon: &Daemon) {
    let limit = Instant::now() + Duration::from_secs(60);
    let metric = |name: &str| daemon.metric(name).unwrap_or_else(|| panic!("no metric {name}"));
    while metric("bulkhead_nfs_connection_current") + metric("bulkhead_store_pins") > 0.0
        || metric("bulkhead_staging_free_buffers") < metric("bulkhead_staging_buffers")
    {
        assert!(
            Instant::now() < limit,
            "{} connections, {} pins, {} of {} buffers",
            metric("bulkhead_nfs_connection_current"),
            metric("bulkhead_store_pins"),
            metric("bulkhead_staging_free_buffers"),
            metric("bulkhead_staging_buffers")
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(metric("bulkhead_connection_current"), 0.0);
    daemon.assert_nothing_leaks_but(&["bulkhead_store_index_bytes"]);
}

#[test]
fn peers_that_send_changed_records_hurt_nobody() {
    let seconds = setting("BULKHEAD_ATTACK_SECONDS", 3);
    let seed = setting("BULKHEAD_ATTACK_SEED", std::process::id().into());
    println!("BULKHEAD_ATTACK_SEED={seed}");
    let daemon = serve();
    let known = Known::of(&Peer::mount(daemon.nfs()));
    let until = Instant::now() + Duration::from_secs(seconds);
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for index in 0..3 {
            let (known, rounds, address) = (&known, &rounds, daemon.nfs());
            scope.spawn(move || attack(address, known, Seeded::new(seed * 31 + index), until, rounds));
        }
        let good = serve_well(daemon.nfs(), until);
        assert!(good > 0, "the good client came to nothing");
    });
    let rounds = rounds.into_inner();
    assert!(rounds > 200, "{rounds} records");
    // The file that they could read is what it was.
    let peer = Peer::mount(daemon.nfs());
    let large = peer.open("large").unwrap();
    let mut found = vec![0; MIB as usize];
    assert_eq!(peer.read_at(&large, 0, &mut found).unwrap(), MIB as usize);
    Pattern(3).check(0, &found, "what nobody may change");
    drop(peer);
    assert_quiet(&daemon);
}

#[test]
fn a_record_cut_anywhere_is_no_call() {
    let daemon = serve();
    let peer = Peer::mount(daemon.nfs());
    let known = Known::of(&peer);
    for (number, call) in known.calls(1).iter().enumerate() {
        let record = marked(call);
        let step = record.len().div_ceil(200);
        for cut in (0..record.len()).step_by(step) {
            let mut stream = TcpStream::connect(daemon.nfs()).unwrap();
            stream.write_all(&record[..cut]).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            let ended = stream.read_to_end(&mut answer);
            assert!(ended.is_ok() && answer.is_empty(), "call {number} cut at {cut}: {ended:?}, {answer:?}");
        }
    }
    assert_eq!(peer.list("bad").unwrap(), ["file"]);
    // The same message, whole as a record and cut as a message: each is answered, or ends the connection.
    for call in &known.calls(1) {
        let mut stream = TcpStream::connect(daemon.nfs()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        for cut in (8..call.len()).step_by(call.len().div_ceil(40)) {
            stream.write_all(&marked(&call[..cut])).unwrap();
            let mut mark = [0; MARK_BYTES];
            stream.read_exact(&mut mark).unwrap();
            let mut answer = vec![0; Mark::read(mark).len as usize];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer[..8], [0, 0, 0, 1, 0, 0, 0, 1]);
        }
    }
    drop(peer);
    assert_quiet(&daemon);
}

/// At which point a peer dies or falls silent.
fn stages(known: &Known) -> Vec<Vec<u8>> {
    let calls: Vec<Vec<u8>> = known.calls(7).iter().map(|call| marked(call)).collect();
    let (read, write) = (&calls[7], &calls[9]);
    vec![
        Vec::new(),
        read[..3].to_vec(),
        read[..40].to_vec(),
        write[..200].to_vec(),
        write[..5000].to_vec(),
        read.clone(),
        read.repeat(60),
        [&calls.concat()[..], &write[..1000]].concat(),
    ]
}

#[test]
fn peers_that_die_at_any_point_leave_nothing() {
    let daemon = serve();
    let known = Known::of(&Peer::mount(daemon.nfs()));
    let stages = stages(&known);
    let mut alive = Vec::new();
    for index in 0..200 {
        let mut stream = connect(daemon.nfs());
        let _ = stream.write_all(&stages[index % stages.len()]);
        if index % 3 == 0 {
            let _ = stream.read(&mut [0; 1000]);
        }
        alive.push(stream);
        // Twenty at a time are there together.
        if alive.len() == 20 {
            alive.drain(..).enumerate().for_each(|(at, stream)| kill(stream, at % 2 == 0));
        }
    }
    assert_quiet(&daemon);
}

#[test]
fn peers_that_fall_silent_in_the_middle_of_something_are_cut_and_others_are_not() {
    let daemon = serve();
    let known = Known::of(&Peer::mount(daemon.nfs()));
    let stages = stages(&known);
    // The kernel takes all of one READ, and then its peer owes nothing.
    let silent: Vec<TcpStream> = stages[1..]
        .iter()
        .filter(|stage| **stage != stages[5])
        .map(|stage| {
            let mut stream = connect(daemon.nfs());
            let _ = stream.write_all(stage);
            stream
        })
        .collect();
    let idle = Peer::mount(daemon.nfs());
    let limit = Instant::now() + Duration::from_secs(60);
    while daemon.metric("bulkhead_nfs_connection_current") != Some(1.0) {
        assert!(Instant::now() < limit, "{}", daemon.admin_get("/metrics"));
        std::thread::sleep(Duration::from_millis(50));
    }
    let stalled = format!("bulkhead_nfs_connection_closed_total{{cause=\"stalled\"}} {}\n", silent.len());
    assert!(daemon.admin_get("/metrics").contains(&stalled), "{}", daemon.admin_get("/metrics"));
    idle.null().expect("whoever owes nothing may be silent");
    for mut stream in silent {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ended = std::io::copy(&mut stream, &mut std::io::sink());
        assert!(
            ended.as_ref().is_ok() || ended.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
        );
    }
    drop(idle);
    assert_quiet(&daemon);
}

/// A call with a lasting effect is executed once, however often it comes and through whichever connection.
#[test]
fn a_call_that_comes_again_on_another_connection_is_not_executed_again() {
    let daemon = serve();
    let peer = Peer::mount(daemon.nfs());
    let root = peer.root.data.to_vec();
    drop(peer.create("once").unwrap());
    let remove = marked(&message(77, nfs::PROGRAM_NUMBER, nfs::procedure::REMOVE, |writer| {
        writer.opaque(&root);
        writer.opaque(b"once");
    }));
    let ask = || {
        let mut stream = TcpStream::connect(daemon.nfs()).unwrap();
        stream.write_all(&remove).unwrap();
        let mut mark = [0; MARK_BYTES];
        stream.read_exact(&mut mark).unwrap();
        let mut answer = vec![0; Mark::read(mark).len as usize];
        stream.read_exact(&mut answer).unwrap();
        answer
    };
    let first = ask();
    assert_eq!(first[24..28], [0; 4], "it was done");
    drop(peer.create("once").unwrap());
    assert_eq!(ask(), first);
    assert_eq!(peer.list("").unwrap(), ["once"], "this one is another");
    assert_eq!(daemon.metric("bulkhead_rpc_calls_replayed_total"), Some(1.0));
}
