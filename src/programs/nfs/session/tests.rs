//! A client's octets, a disk that is a map, and what the session makes of them.

use super::*;
use crate::fabric::staging::Staging;
use crate::programs::mount;
use crate::programs::nfs::files::Settings;
use crate::programs::nfs::files::tests::rig::{Disk, Seeded, for_each_seed, octets, write_one};
use crate::programs::nfs::{
    self, Create, CreateHow, FileHandle, FileSystem, Name, NfsError, Place, Rules, SetAttributes, procedure,
};
use crate::programs::service::DUPLICATES;
use crate::programs::stream::{TAIL_READS, TailRead};
use crate::store::draft::Want;
use crate::store::rig::with_pools;
use crate::store::segment::Class;
use crate::store::{Lookup, Sizes, Store};
use crate::wire::codec::{Codec, Reader, Writer};
use crate::wire::onc_rpc::record::{Mark, marked};
use crate::wire::onc_rpc::{AcceptStatus, AuthSys, CallHeader, Denial, OpaqueAuth, Reply, ReplyHeader, Versions};
use crate::wire::rpcrdma::duplicate::Bounds;
use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const STAGING_COUNT: usize = 24;

fn sizes() -> Sizes {
    Sizes {
        memory_bytes: 16 * MIB,
        value_bytes_max: 64 * MIB,
        index_bytes_max: 64 * MIB,
        pinned_share: 0.5,
        pool_bytes: vec![64 * MIB],
        ..Sizes::small()
    }
}

/// One server, and connections to it.
struct Server {
    export: Arc<Export>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    disk: Disk,
    staging: Staging,
}

impl Server {
    fn new(sizes: Sizes) -> Self {
        let store = with_pools(Store::with_files, sizes);
        let files = FileSystem::new(store, Settings { fsid: 7, boot: 9, uid: 1, gid: 2 });
        Self {
            export: Arc::new(Export::new(Arc::new(files), Rules::default())),
            shared: Arc::default(),
            metrics: Arc::default(),
            disk: Disk::default(),
            staging: Staging::new(STAGING_COUNT).unwrap(),
        }
    }

    fn store(&self) -> &Store {
        self.export.files().store()
    }

    fn connect(&self) -> Peer<'_> {
        self.connect_with(0)
    }

    fn connect_with(&self, reserve_wait_ms: u64) -> Peer<'_> {
        let client = Client { address: IpAddr::from([192, 0, 2, 1]), is_allowed: true };
        let session = Session::new(Context {
            export: self.export.clone(),
            client,
            shared: self.shared.clone(),
            metrics: self.metrics.clone(),
            calls_max: 16,
            reserve_wait_ms,
        });
        Peer { server: self, session, received: Vec::new(), reads: Vec::new(), asks: 0 }
    }

    /// What another door sees.
    fn value(&self, key: &[u8]) -> Option<Vec<u8>> {
        let store = self.store();
        match store.get(key, store.clock().now()) {
            Lookup::Hit(pinned) => pinned.to_vec(),
            _ => None,
        }
    }

    /// Everything clean goes out of RAM.
    fn make_cold(&self) {
        while write_one(self.store(), &self.disk, true, false) {}
        let want = Want { class: Class::Large, remaining: 32 << 10, head: false };
        let mut held = Vec::new();
        while self.store().gauges().memory_clean_bytes > 0 {
            let Ok(filling) = self.store().fill(want) else { break };
            held.push(filling);
        }
    }
}

/// The client's end.
struct Peer<'a> {
    server: &'a Server,
    session: Session,
    received: Vec<u8>,
    reads: Vec<TailRead>,
    asks: usize,
}

impl Peer<'_> {
    fn turn(&mut self) {
        self.session.process();
        while self.session.is_turn_over {
            self.session.process();
        }
        while let Some(action) = self.session.poll_action() {
            match action {
                Action::Read(read) => self.reads.push(read),
                Action::Ask(Ask::Retry) => self.asks += 1,
                Action::Ask(other) => panic!("{other:?}"),
            }
        }
    }

    /// Feeds as much of `octets` as is wanted, `step` at a time, and says how much.
    fn feed(&mut self, octets: &[u8], step: usize) -> usize {
        let mut fed = 0;
        while fed < octets.len() && self.session.wants_input() {
            let (direct, buffer) = self.session.targets();
            assert!(direct.is_empty() && !buffer.is_empty());
            let count = buffer.len().min(step).min(octets.len() - fed);
            buffer[..count].copy_from_slice(&octets[fed..fed + count]);
            self.session.handle_input(count);
            fed += count;
            self.turn();
        }
        fed
    }

    fn send(&mut self, most: usize) -> usize {
        let mut slices = Vec::new();
        let offered = self.session.gather(&mut slices);
        let whole: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        assert_eq!(whole.len(), offered);
        let count = offered.min(most);
        self.received.extend_from_slice(&whole[..count]);
        if count > 0 {
            self.session.handle_sent(count);
            self.turn();
        }
        count
    }

    /// Answers a disk read; it fails if `is_lost`.
    fn read(&mut self, at: usize, is_lost: bool) {
        let TailRead { ticket, segment, extent, crcs } = self.reads.remove(at);
        let buf = (!is_lost).then(|| {
            let mut buf = self.server.staging.try_take().expect("a buffer is free");
            buf.as_mut_slice()[..segment.len() as usize].copy_from_slice(&self.server.disk.read(extent, crcs));
            buf
        });
        self.session.handle_read(ticket, buf);
        self.turn();
    }

    /// Everything that comes without input.
    fn settle(&mut self) {
        loop {
            if self.send(usize::MAX) > 0 {
                continue;
            }
            if self.reads.is_empty() {
                return;
            }
            self.read(0, false);
        }
    }

    /// The replies that have come, in order.
    fn replies(&mut self) -> Vec<Vec<u8>> {
        let mut rest = &self.received[..];
        let mut replies = Vec::new();
        while let Some((mark, behind)) = rest.split_first_chunk::<4>() {
            let mark = Mark::read(*mark);
            assert!(mark.is_last);
            let Some((reply, behind)) = behind.split_at_checked(mark.len as usize) else { break };
            replies.push(reply.to_vec());
            rest = behind;
        }
        let left = rest.to_vec();
        self.received = left;
        replies
    }

    fn converse(&mut self, call: &[u8]) -> Vec<Vec<u8>> {
        let record = marked(call);
        assert_eq!(self.feed(&record, usize::MAX), record.len());
        self.settle();
        self.replies()
    }

    /// The results of a call that is executed.
    fn ask(&mut self, call: &[u8]) -> Vec<u8> {
        let mut replies = self.converse(call);
        assert_eq!(replies.len(), 1);
        results(&replies.remove(0)).1
    }
}

/// The xid and results of a reply.
fn results(reply: &[u8]) -> (u32, Vec<u8>) {
    let mut reader = Reader::new(reply);
    let header = ReplyHeader::read(&mut reader).unwrap();
    assert_eq!(header.reply, Reply::accepted(AcceptStatus::Success));
    (header.xid.0, reader.rest().to_vec())
}

fn header(xid: u32, program: u32, procedure: u32) -> Writer {
    let sys = AuthSys { stamp: 1, machine_name: b"host", uid: 0, gid: 0, gids: vec![] }.body();
    let mut writer = Writer::new();
    let (credential, verifier) = (AuthSys::around(&sys), OpaqueAuth::NONE);
    CallHeader { xid: Xid(xid), program, version: 3, procedure, credential, verifier }.write(&mut writer);
    writer
}

fn nfs_call(xid: u32, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = header(xid, nfs::PROGRAM_NUMBER, procedure);
    arguments(&mut writer);
    writer.finish()
}

fn read_call(xid: u32, file: FileHandle, offset: u64, count: u32) -> Vec<u8> {
    nfs_call(xid, procedure::READ, |words| {
        file.write(words);
        words.u64(offset);
        words.u32(count);
    })
}

fn write_call(xid: u32, file: FileHandle, offset: u64, data: &[u8], stable: Stable) -> Vec<u8> {
    nfs_call(xid, procedure::WRITE, |words| {
        file.write(words);
        words.u64(offset);
        words.u32(data.len() as u32);
        stable.write(words);
        words.opaque(data);
    })
}

fn getattr_call(xid: u32, file: FileHandle) -> Vec<u8> {
    nfs_call(xid, procedure::GETATTR, |words| file.write(words))
}

/// A file, made through the file system itself.
fn create(server: &Server, name: &[u8]) -> FileHandle {
    let root = nfs::files::Caller { uid: 0, gid: 0, gids: Vec::new() };
    let place = Place { dir: server.export.files().root(), name: Name(name) };
    let how = CreateHow::Guarded(SetAttributes::default());
    server.export.files().create(&root, &Create { place, how }).unwrap().obj.unwrap()
}

/// A file of these octets.
fn filled(server: &Server, name: &[u8], octets: &[u8]) -> FileHandle {
    let file = create(server, name);
    let mut peer = server.connect();
    for (at, part) in octets.chunks(TRANSFER_BYTES_MAX as usize).enumerate() {
        let offset = at as u64 * u64::from(TRANSFER_BYTES_MAX);
        let written = peer.ask(&write_call(at as u32, file, offset, part, Stable::FileSync));
        assert_eq!(written[..4], [0; 4]);
    }
    file
}

/// Octets of a READ that was done, and whether the file ends with them.
fn data_of(results: &[u8]) -> (Vec<u8>, bool) {
    let mut reader = Reader::new(results);
    assert_eq!(reader.u32(), Ok(0));
    let _ = Option::<nfs::Attributes>::read(&mut reader).unwrap();
    let count = reader.u32().unwrap();
    let eof = reader.bool().unwrap();
    let data = reader.opaque(TRANSFER_BYTES_MAX as usize).unwrap().to_vec();
    reader.finish().unwrap();
    assert_eq!(count as usize, data.len());
    (data, eof)
}

#[test]
fn calls_that_cost_much_go_one_by_one_and_others_of_the_lane_between_them() {
    let server = Server::new(sizes());
    for number in 0..9_000 {
        server.store().put(format!("d/{number}").as_bytes(), b"", 0, 0).unwrap();
    }
    let root = server.export.files().root();
    let mut peer = server.connect();
    let rename = |xid: u32, from: &[u8], to: &[u8]| {
        marked(&nfs_call(xid, procedure::RENAME, |words| {
            for name in [from, to] {
                root.write(words);
                words.opaque(name);
            }
        }))
    };
    let calls: Vec<_> = (0..6).flat_map(|xid| [rename(2 * xid, b"d", b"e"), rename(2 * xid + 1, b"e", b"d")]).collect();
    let calls = calls.concat();
    peer.session.targets().1[..calls.len()].copy_from_slice(&calls);
    peer.session.handle_input(calls.len());
    peer.session.handle_eof();
    peer.session.process();
    let offered = peer.session.gather(&mut Vec::new());
    assert!(offered > 0 && peer.session.is_turn_over && peer.session.is_busy(), "{offered}");
    assert!(peer.session.ended().is_none(), "there is more in its input");
    peer.turn();
    peer.settle();
    let replies = peer.replies();
    assert_eq!(replies.len(), 12);
    assert!(2 * offered <= replies.concat().len(), "{offered} octets in the first turn");
    assert_eq!(peer.session.ended(), Some(End::ByPeer));
}

#[test]
fn both_programs_are_served_and_others_are_not() {
    let server = Server::new(sizes());
    let mut peer = server.connect();
    let mounted = {
        let mut writer = header(1, mount::PROGRAM_NUMBER, mount::procedure::MNT);
        writer.opaque(b"/");
        peer.ask(&writer.finish())
    };
    let mut reader = Reader::new(&mounted);
    assert_eq!(reader.u32(), Ok(0));
    assert_eq!(FileHandle::read(&mut reader), Ok(server.export.files().root()));
    assert_eq!(peer.ask(&nfs_call(2, procedure::NULL, |_| {})), b"");
    let denied = |peer: &mut Peer<'_>, call: &[u8]| {
        let reply = peer.converse(call).remove(0);
        let header = ReplyHeader::read(&mut Reader::new(&reply)).unwrap();
        match header.reply {
            Reply::Accepted { status, .. } => Ok(status),
            Reply::Denied(denial) => Err(denial),
        }
    };
    // NFSACL, and the fourth version.
    assert_eq!(denied(&mut peer, &header(3, 100_227, 0).finish()), Ok(AcceptStatus::ProgUnavail));
    let mut fourth = nfs_call(4, procedure::NULL, |_| {});
    fourth[19] = 4;
    let third = AcceptStatus::ProgMismatch(Versions { low: 3, high: 3 });
    assert_eq!(denied(&mut peer, &fourth), Ok(third));
    assert_eq!(denied(&mut peer, &nfs_call(5, 22, |_| {})), Ok(AcceptStatus::ProcUnavail));
    let getattr = getattr_call(6, server.export.files().root());
    assert_eq!(denied(&mut peer, &getattr[..getattr.len() - 4]), Ok(AcceptStatus::GarbageArgs));
    let mut version = nfs_call(7, procedure::NULL, |_| {});
    version[11] = 3;
    assert_eq!(denied(&mut peer, &version), Err(Denial::RpcMismatch(Versions { low: 2, high: 2 })));
    assert!(peer.session.is_idle() && peer.session.ended().is_none());
}

#[test]
fn what_is_written_is_read_however_the_stream_is_cut() {
    for (len, step) in [(0, 1), (1, 1), (5000, 1), (100_003, 7), (400_001, 100_000), (1 << 20, usize::MAX)] {
        let server = Server::new(sizes());
        let file = create(&server, b"f");
        let data = octets(7, len);
        let stream = [
            marked(&write_call(1, file, 3, &data, Stable::Unstable)),
            marked(&read_call(2, file, 3, len as u32 + 9)),
            marked(&write_call(3, file, 0, b"abc", Stable::FileSync)),
        ]
        .concat();
        let mut peer = server.connect();
        assert_eq!(peer.feed(&stream, step), stream.len());
        peer.settle();
        let replies = peer.replies();
        let replies: Vec<(u32, Vec<u8>)> = replies.iter().map(|reply| results(reply)).collect();
        assert_eq!(replies.iter().map(|(xid, _)| *xid).collect::<Vec<_>>(), [1, 2, 3]);
        let expected = if len == 0 { (vec![], true) } else { (data.clone(), true) };
        assert!(data_of(&replies[1].1) == expected, "{len} octets");
        let seen = server.value(b"f").expect("it was committed");
        assert!(seen[..3] == b"abc"[..] && seen[3..] == data[..], "{len} octets, in steps of {step}");
    }
}

/// Nothing of a READ holds up what comes behind it, and what is decided is what there was.
#[test]
fn a_read_from_disk_holds_up_nobody_and_shows_what_was_there_when_it_was_asked_for() {
    let server = Server::new(sizes());
    let data = octets(3, 2 << 20);
    let file = filled(&server, b"f", &data);
    server.make_cold();
    let mut peer = server.connect();
    let calls = [
        read_call(1, file, 0, 1 << 20),
        read_call(2, file, 1 << 20, 1 << 20),
        getattr_call(3, file),
        write_call(4, file, 0, b"other", Stable::FileSync),
        getattr_call(5, server.export.files().root()),
    ];
    for call in &calls {
        let record = marked(call);
        assert_eq!(peer.feed(&record, usize::MAX), record.len());
    }
    while peer.send(1000) > 0 {}
    let xids: Vec<u32> = peer.replies().iter().map(|reply| results(reply).0).collect();
    assert_eq!(xids, [3, 4, 5]);
    assert_eq!(peer.reads.len(), TAIL_READS - 1, "as many as may run ahead of the first");
    // The disk answers in another order.
    while let Some(last) = peer.reads.len().checked_sub(1) {
        peer.read(last, false);
        while peer.send(70_000) > 0 {}
    }
    let replies = peer.replies();
    let mut found: HashMap<u32, Vec<u8>> = replies.iter().map(|reply| results(reply)).collect();
    let (first, second) = data.split_at(1 << 20);
    assert!(data_of(&found.remove(&1).unwrap()).0 == first && data_of(&found.remove(&2).unwrap()).0 == second);
    assert!(found.is_empty() && server.staging.available() == STAGING_COUNT);
    assert!(peer.session.is_idle() && !peer.session.has_tail_reads());
}

#[test]
fn octets_that_are_lost_are_an_error_and_the_file_is_gone() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", &octets(3, 1 << 20));
    server.make_cold();
    let mut peer = server.connect();
    let record = marked(&read_call(1, file, 0, 1 << 20));
    peer.feed(&record, usize::MAX);
    // Twice: once more is tried.
    while !peer.reads.is_empty() {
        peer.read(0, true);
    }
    peer.settle();
    let replies = peer.replies();
    let (xid, refused) = results(&replies[0]);
    assert_eq!((replies.len(), xid, &refused[..4]), (1, 1, &[0, 0, 0, NfsError::Io as u8][..]));
    assert_eq!(peer.ask(&getattr_call(2, file)), [0, 0, 0, NfsError::Stale as u8]);
    assert!(peer.session.ended().is_none());
    assert!(peer.session.is_idle() && !peer.session.has_tail_reads());
}

#[test]
fn a_read_of_more_than_the_buffers_there_are_leaves_as_they_come() {
    let server = Server::new(sizes());
    let data = octets(3, 2 << 20);
    let file = filled(&server, b"f", &data);
    server.make_cold();
    let mut peer = server.connect();
    // Four segments and a part of a fifth, with four buffers.
    let record = marked(&read_call(1, file, 1000, 1 << 20));
    peer.feed(&record, usize::MAX);
    peer.settle();
    let replies = peer.replies();
    assert!(data_of(&results(&replies[0]).1).0 == data[1000..1000 + (1 << 20)]);
    assert_eq!(server.staging.available(), STAGING_COUNT);
    // And where a lane has one buffer for all, each READ gets it in its turn.
    server.make_cold();
    let records =
        [read_call(2, file, 0, 600_000), read_call(3, file, 700_000, 600_000)].map(|call| marked(&call)).concat();
    peer.feed(&records, usize::MAX);
    for _ in 0..1000 {
        while peer.send(100_000) > 0 {}
        let busy = STAGING_COUNT - server.staging.available();
        while peer.reads.len() > 1 - busy.min(1) {
            let read = peer.reads.pop().unwrap();
            peer.session.handle_read_back(read.ticket);
        }
        if !peer.reads.is_empty() {
            peer.read(0, false);
        }
        peer.turn();
    }
    let replies = peer.replies();
    let mut found: HashMap<u32, Vec<u8>> = replies.iter().map(|reply| results(reply)).collect();
    assert!(data_of(&found.remove(&2).unwrap()).0 == data[..600_000]);
    assert!(data_of(&found.remove(&3).unwrap()).0 == data[700_000..1_300_000]);
    assert!(peer.session.is_idle() && server.staging.available() == STAGING_COUNT);
}

#[test]
fn no_more_calls_are_read_while_much_waits_to_leave() {
    let server = Server::new(sizes());
    let data = octets(3, 8 << 20);
    let file = filled(&server, b"f", &data);
    let mut peer = server.connect();
    let reads: Vec<u8> =
        (0..100).flat_map(|xid| marked(&read_call(xid, file, u64::from(xid % 8) << 20, 1 << 20))).collect();
    let fed = peer.feed(&reads, 200);
    assert!(fed < reads.len() / 10, "{fed} octets were taken");
    let mut fed = fed;
    for _ in 0..10_000 {
        peer.send(300_000);
        fed += peer.feed(&reads[fed..], 200);
    }
    peer.settle();
    let replies = peer.replies();
    assert_eq!((fed, replies.len()), (reads.len(), 100));
    for reply in &replies {
        let (xid, results) = results(reply);
        let at = (xid as usize % 8) << 20;
        assert!(data_of(&results).0 == data[at..at + (1 << 20)]);
    }
    // Calls with short replies are bounded by their number.
    let short: Vec<u8> = (0..1000).flat_map(|xid| marked(&getattr_call(xid, file))).collect();
    let fed = peer.feed(&short, 100);
    assert!(fed < 4000, "{fed} octets were taken");
}

/// Some clients begin with the same xid whenever they are started. Their CREATE and REMOVE were answered as those of an earlier
/// life had been, and not executed.
#[test]
fn what_was_answered_long_ago_is_executed() {
    let mut server = Server::new(sizes());
    server.shared = Arc::new(Shared::new(Bounds { age_max: Duration::ZERO, ..DUPLICATES }));
    let root = server.export.files().root();
    let remove = nfs_call(1, procedure::REMOVE, |words| {
        root.write(words);
        words.opaque(b"f");
    });
    for life in 0..3 {
        create(&server, b"f");
        assert_eq!(server.connect().ask(&remove)[..4], [0; 4], "life {life}");
        assert_eq!(server.value(b"f"), None, "life {life}");
    }
    assert_eq!(server.metrics.rpc_calls.replayed.get(), 0);
}

#[test]
fn a_call_that_comes_again_is_answered_as_the_first_was() {
    let server = Server::new(sizes());
    let root = server.export.files().root();
    let remove = |xid| {
        nfs_call(xid, procedure::REMOVE, |words| {
            root.write(words);
            words.opaque(b"f");
        })
    };
    create(&server, b"f");
    let mut peer = server.connect();
    let first = peer.converse(&remove(1));
    drop(peer);
    let mut again = server.connect();
    assert_eq!(again.converse(&remove(1)), first);
    assert_eq!(server.metrics.rpc_calls.replayed.get(), 1);
    assert_eq!(again.ask(&remove(2))[..4], [0, 0, 0, NfsError::NoEnt as u8]);
    // A WRITE too.
    let file = create(&server, b"g");
    let write = write_call(3, file, 0, b"first", Stable::FileSync);
    let first = again.converse(&write);
    again.ask(&write_call(4, file, 0, b"other", Stable::FileSync));
    let mut third = server.connect();
    assert_eq!(third.converse(&write), first);
    assert_eq!(server.value(b"g"), Some(b"other".to_vec()));
}

/// Clients begin with the xid that they like. And a copy of the first may be late.
#[test]
fn a_write_of_other_octets_is_another_though_all_else_is_the_same() {
    for len in [1, 255, 256, 257, 50_000] {
        let server = Server::new(sizes());
        let file = create(&server, b"f");
        let old = octets(1, len);
        let call = |data: &[u8]| marked(&write_call(1, file, 0, data, Stable::FileSync));
        let mut late = server.connect();
        let seen = call(&old).len() - len.next_multiple_of(4) + len.min(256) - 1;
        assert_eq!(late.feed(&call(&old)[..seen], usize::MAX), seen, "it is not told yet which it is");
        for (at, bit) in [(len.min(256) - 1, 1), (0, 2)] {
            let mut new = old.clone();
            new[at] ^= bit;
            for (data, replayed) in [(&old, bit == 2), (&new, false), (&new, true)] {
                let before = server.metrics.rpc_calls.replayed.get();
                // Octet by octet, and as it comes.
                for step in [1, usize::MAX] {
                    let mut peer = server.connect();
                    let record = call(data);
                    assert_eq!(peer.feed(&record, step), record.len());
                    peer.settle();
                    assert_eq!(results(&peer.replies()[0]).1[..4], [0; 4]);
                }
                let count = server.metrics.rpc_calls.replayed.get() - before;
                assert_eq!(count, 1 + u64::from(replayed), "octet {at} of {len}");
            }
            assert_eq!(server.value(b"f"), Some(new), "octet {at} of {len}");
        }
        let value = server.value(b"f");
        assert_eq!(late.feed(&call(&old)[seen..], usize::MAX), call(&old).len() - seen);
        late.settle();
        assert_eq!((late.replies().len(), server.value(b"f")), (1, value), "the late copy is answered");
    }
}

#[test]
fn a_write_that_ends_before_it_is_known_which_it_is_leaves_nothing() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", b"before");
    let data = octets(1, 5000);
    let record = marked(&write_call(1, file, 0, &data, Stable::FileSync));
    let mut lost = server.connect();
    lost.feed(&record[..record.len() - 4900], usize::MAX);
    assert!(!lost.session.is_busy() && lost.session.is_stalled(u64::MAX));
    drop(lost);
    assert_eq!(server.value(b"f"), Some(b"before".to_vec()));
    let mut next = server.connect();
    assert_eq!(next.converse(&record[4..]).len(), 1);
    assert_eq!((server.value(b"f"), server.metrics.rpc_calls.replayed.get()), (Some(data), 0));
}

#[test]
fn a_write_that_arrives_elsewhere_is_waited_for_and_taken_up_when_it_is_lost() {
    let server = Server::new(sizes());
    let file = create(&server, b"f");
    let data = octets(1, 50_000);
    let record = marked(&write_call(1, file, 0, &data, Stable::FileSync));
    let mut lost = server.connect();
    lost.feed(&record[..20_000], usize::MAX);
    let mut next = server.connect();
    let fed = next.feed(&record, 1000);
    assert!(fed < record.len() && next.asks == 1, "{fed} octets, {} asks", next.asks);
    assert!(!next.session.is_stalled(u64::MAX) && next.session.is_busy());
    next.session.handle_retry();
    next.turn();
    assert_eq!(next.asks, 2, "it still runs there");
    drop(lost);
    next.session.handle_retry();
    next.turn();
    assert_eq!(next.feed(&record[fed..], 1000), record.len() - fed);
    next.settle();
    assert_eq!(next.replies().len(), 1);
    assert_eq!(server.value(b"f"), Some(data));
}

#[test]
fn a_read_waits_for_pins_and_what_comes_behind_it_waits_too() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", &octets(1, 1 << 20));
    let look = |key: &[u8]| server.store().get(key, server.store().clock().now());
    // Others pin as much as they may.
    let mut pinned = Vec::new();
    for number in 0..16_u8 {
        while write_one(server.store(), &server.disk, true, false) {}
        server.store().put(&[b'k', number], &octets(2, 4 << 20), 0, 0).unwrap();
        match look(&[b'k', number]) {
            Lookup::Hit(pin) => pinned.push(pin),
            _ => break,
        }
    }
    assert!(matches!(look(b"f"), Lookup::Busy), "{} are pinned", pinned.len());
    let stream = [marked(&read_call(1, file, 0, 100)), marked(&getattr_call(2, file))].concat();
    let mut peer = server.connect_with(60_000);
    assert_eq!(peer.feed(&stream, usize::MAX), stream.len());
    for asks in 2..5 {
        assert_eq!(peer.send(usize::MAX), 0);
        peer.session.handle_retry();
        peer.turn();
        assert_eq!(peer.asks, asks);
    }
    assert!(peer.session.is_busy() && !peer.session.is_stalled(u64::MAX));
    pinned.clear();
    peer.session.handle_retry();
    peer.turn();
    peer.settle();
    let replies: Vec<(u32, Vec<u8>)> = peer.replies().iter().map(|reply| results(reply)).collect();
    let xids: BTreeSet<u32> = replies.iter().map(|(xid, _)| *xid).collect();
    assert_eq!(xids, BTreeSet::from([1, 2]));
    assert_eq!(server.metrics.rpc_calls.nfs.get("READ"), 1);
    let read = replies.iter().find(|(xid, _)| *xid == 1).expect("it is there");
    assert!(data_of(&read.1).0 == octets(1, 100));
}

#[test]
fn a_write_without_space_is_answered_and_its_data_is_skipped() {
    // No memory but for a few blocks, all of which others have.
    let server = Server::new(Sizes { memory_bytes: 4 * MIB, ..sizes() });
    let file = create(&server, b"f");
    // So that nobody evicts it.
    let pinned = server.store().get(b"f", server.store().clock().now());
    let mut held = Vec::new();
    for remaining in [256 << 10, 64 << 10, 16 << 10] {
        let want = Want { class: Class::Large, remaining, head: false };
        while let Ok(filling) = server.store().fill(want) {
            held.push(filling);
        }
    }
    let mut peer = server.connect();
    let stream =
        [marked(&write_call(1, file, 0, &octets(1, 300_000), Stable::Unstable)), marked(&getattr_call(2, file))]
            .concat();
    let mut fed = 0;
    for _ in 0..100 {
        fed += peer.feed(&stream[fed..], usize::MAX);
        peer.session.handle_retry();
        peer.turn();
    }
    peer.settle();
    let replies: Vec<_> = peer.replies().iter().map(|reply| results(reply)).collect();
    assert_eq!((fed, replies.len()), (stream.len(), 2));
    let jukebox = (NfsError::Jukebox as u32).to_be_bytes();
    assert_eq!((replies[0].0, &replies[0].1[..4]), (1, &jukebox[..]));
    assert!(peer.session.is_idle());
    drop((held, pinned));
    let written = peer.ask(&write_call(3, file, 0, b"now", Stable::FileSync));
    assert_eq!(written[..4], [0; 4]);
    assert_eq!(server.value(b"f"), Some(b"now".to_vec()));
}

#[test]
fn a_write_that_is_refused_takes_nothing_and_keeps_the_stream() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", b"before");
    let mut peer = server.connect();
    let mut status = |call: &[u8]| {
        let results = peer.ask(call);
        u32::from_be_bytes(results[..4].try_into().unwrap())
    };
    let long = octets(1, 200_000);
    assert_eq!(status(&write_call(1, file, 64 * MIB, &long, Stable::FileSync)), NfsError::FBig as u32);
    let stale = FileHandle::new(&[0; 28]).unwrap();
    assert_eq!(status(&write_call(2, stale, 0, &long, Stable::FileSync)), NfsError::BadHandle as u32);
    let root = server.export.files().root();
    assert_eq!(status(&write_call(3, root, 0, &long, Stable::FileSync)), NfsError::IsDir as u32);
    assert_eq!(status(&getattr_call(4, file)), 0);
    assert_eq!(server.value(b"f"), Some(b"before".to_vec()));
}

#[test]
fn a_write_of_another_length_than_its_record_is_garbage() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", b"before");
    let whole = write_call(1, file, 0, &octets(1, 5000), Stable::FileSync);
    let garbage = |reply: &[u8]| {
        let header = ReplyHeader::read(&mut Reader::new(reply)).unwrap();
        assert_eq!(header, ReplyHeader { xid: Xid(1), reply: Reply::accepted(AcceptStatus::GarbageArgs) });
    };
    let mut peer = server.connect();
    for call in [&whole[..whole.len() - 4], &whole[..whole.len() - 4000], &[&whole[..], &[0; 4]].concat()] {
        garbage(&peer.converse(call)[0]);
        assert_eq!(server.value(b"f"), Some(b"before".to_vec()), "nothing of it was taken");
    }
    // In fragments the length of a record is known only at its end.
    for call in [&whole[..whole.len() - 4], &[&whole[..], &[0; 4]].concat()] {
        let (first, second) = call.split_at(2000);
        let mark = Mark { is_last: false, len: 2000 }.octets();
        let stream = [&mark[..], first, &marked(second)].concat();
        assert_eq!(peer.feed(&stream, 999), stream.len());
        peer.settle();
        garbage(&peer.replies()[0]);
    }
    // Count and length of the data do not agree; more than one WRITE may have.
    let mut other = whole.clone();
    let count = other.len() - 5000 - 12;
    other[count + 3] ^= 1;
    garbage(&peer.converse(&other)[0]);
    assert_eq!(peer.ask(&getattr_call(2, file))[..4], [0; 4], "the stream goes on");
}

#[test]
fn messages_longer_than_a_call_may_be_are_garbage_and_records_longer_than_any_end_the_stream() {
    let server = Server::new(sizes());
    let root = server.export.files().root();
    let long = [getattr_call(1, root), vec![0; CALL_BYTES_MAX]].concat();
    let mut peer = server.connect();
    let reply = peer.converse(&long).remove(0);
    let garbage = ReplyHeader { xid: Xid(1), reply: Reply::accepted(AcceptStatus::GarbageArgs) };
    assert_eq!(ReplyHeader::read(&mut Reader::new(&reply)), Ok(garbage));
    assert_eq!(peer.ask(&getattr_call(2, root))[..4], [0; 4]);
    let endless = Mark { is_last: false, len: RECORD_LIMITS.bytes_max + 1 }.octets().to_vec();
    let empty = Mark { is_last: false, len: 0 }.octets().repeat(RECORD_LIMITS.fragments_max as usize + 1);
    let no_call = marked(&[0; 3]);
    let reply = marked(&[0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]);
    for stream in [endless, empty, no_call, marked(b""), reply] {
        let mut peer = server.connect();
        peer.feed(&[marked(&getattr_call(1, root)), stream].concat(), usize::MAX);
        assert_eq!(peer.session.ended(), None, "what was asked before is answered");
        peer.settle();
        assert_eq!((peer.replies().len(), peer.session.ended()), (1, Some(End::Protocol)));
        assert!(!peer.session.wants_input());
    }
}

#[test]
fn the_end_of_the_stream_waits_for_the_answers() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", &octets(1, 1 << 20));
    server.make_cold();
    let mut peer = server.connect();
    peer.feed(&[marked(&read_call(1, file, 0, 1 << 20)), marked(&getattr_call(2, file))].concat(), usize::MAX);
    peer.feed(&marked(&getattr_call(3, file))[..50], usize::MAX);
    peer.session.handle_eof();
    peer.turn();
    assert_eq!(peer.session.ended(), None);
    peer.settle();
    assert_eq!((peer.replies().len(), peer.session.ended()), (2, Some(End::ByPeer)));
}

/// Half a record made a shutdown wait for as long as it may.
#[test]
fn a_shutdown_waits_for_what_has_begun_and_for_no_half_record() {
    let server = Server::new(sizes());
    let file = create(&server, b"f");
    let data = octets(1, 9000);
    let getattr = marked(&getattr_call(1, file));
    let write = marked(&write_call(2, file, 0, &data, Stable::Unstable));
    // The data of a WRITE begins so far behind the front, and the WRITE when 256 octets of it are here.
    let head = write.len() - data.len();
    let long = marked(&[&getattr_call(3, file)[..], &vec![0; CALL_BYTES_MAX]].concat());
    let table: [(&str, &[u8], bool); 7] = [
        ("half a mark", &getattr[..2], false),
        ("a mark", &getattr[..4], false),
        ("half a call", &getattr[..getattr.len() - 1], false),
        ("a WRITE that is not known yet", &write[..head + 255], false),
        ("one that has begun", &write[..head + 256], true),
        ("one that lacks an octet", &write[..write.len() - 1], true),
        ("a call that is refused at its end", &long[..long.len() - 1], false),
    ];
    for (row, octets, is_busy) in table {
        let mut peer = server.connect();
        peer.feed(octets, usize::MAX);
        assert_eq!((peer.session.is_busy(), peer.session.ended()), (is_busy, None), "{row}");
        // Nor is what was answered before it lost.
        let mut peer = server.connect();
        peer.feed(&getattr, usize::MAX);
        peer.feed(octets, usize::MAX);
        assert!(peer.session.is_busy(), "{row}: an answer is there");
        while peer.send(usize::MAX) > 0 {}
        assert_eq!((peer.session.is_busy(), peer.replies().len()), (is_busy, 1), "{row}");
    }
}

#[test]
fn whose_turn_it_is() {
    let server = Server::new(sizes());
    let file = filled(&server, b"f", &octets(1, 1 << 20));
    server.make_cold();
    let mut peer = server.connect();
    let is_stalled = |peer: &Peer<'_>| peer.session.is_stalled(u64::MAX);
    assert!(!is_stalled(&peer) && peer.session.is_idle(), "nobody's");
    let record = marked(&read_call(1, file, 0, 1 << 20));
    peer.feed(&record[..3], usize::MAX);
    assert!(is_stalled(&peer) && !peer.session.is_busy(), "half a mark");
    peer.feed(&record[3..], usize::MAX);
    assert!(!is_stalled(&peer) && peer.session.is_busy(), "it is the disk's");
    while !peer.reads.is_empty() {
        peer.read(0, false);
    }
    assert!(is_stalled(&peer), "it has octets to take");
    assert_eq!(peer.session.give_back(), 4);
    assert!(is_stalled(&peer), "even where they were taken back");
    peer.turn();
    peer.settle();
    assert!(!is_stalled(&peer) && peer.session.is_idle());
    let write = marked(&write_call(2, file, 0, &octets(2, 9000), Stable::Unstable));
    peer.feed(&write[..5000], usize::MAX);
    assert!(is_stalled(&peer) && peer.session.is_busy());
    peer.session.rest();
    peer.feed(&write[5000..], usize::MAX);
    peer.settle();
    peer.session.rest();
    assert_eq!((peer.replies().len(), peer.session.input.capacity()), (2, 0));
}

#[test]
fn listings_are_cut_to_what_is_held_for_them() {
    let server = Server::new(sizes());
    for n in 0..2000 {
        server.store().put(format!("a-long-name-that-takes-some-room-{n}").as_bytes(), b"", 0, 0).unwrap();
    }
    let mut peer = server.connect();
    let root = server.export.files().root();
    let reply = peer.ask(&nfs_call(1, procedure::READDIRPLUS, |words| {
        root.write(words);
        words.u64(0);
        words.u64(0);
        words.u32(1 << 20);
        words.u32(1 << 20);
    }));
    assert_eq!(reply[..4], [0; 4]);
    assert!((60_000..=65_540).contains(&reply.len()), "{} octets", reply.len());
}

/// Requests of any kind cut anywhere, disk reads in any order: every call has one reply, and every READ what was there.
#[test]
fn any_interleaving_gives_every_call_its_reply() {
    for_each_seed(0..40, |seed| {
        let mut random = Seeded::new(seed);
        let server = Server::new(sizes());
        let mut model = octets(seed, 3 << 20);
        let file = filled(&server, b"f", &model);
        let (mut stream, mut expected) = (Vec::new(), HashMap::new());
        for xid in 0..60 {
            let offset = random.below(model.len() as u64);
            match random.below(4) {
                0 => stream.extend(marked(&getattr_call(xid, file))),
                1 => {
                    let len = (random.below(200_000) as usize).min(model.len() - offset as usize);
                    let data = octets(seed + u64::from(xid), len);
                    let stable = *random.pick(&[Stable::Unstable, Stable::Unstable, Stable::FileSync]);
                    model[offset as usize..offset as usize + len].copy_from_slice(&data);
                    stream.extend(marked(&write_call(xid, file, offset, &data, stable)));
                }
                _ => {
                    let count = random.below(700_000) as u32;
                    let end = (offset as usize + count as usize).min(model.len());
                    expected.insert(xid, model[offset as usize..end].to_vec());
                    stream.extend(marked(&read_call(xid, file, offset, count)));
                }
            }
        }
        let mut peer = server.connect();
        let mut fed = 0;
        for _ in 0..200_000 {
            match random.below(8) {
                0..=2 => {
                    let most = *random.pick(&[1, 30, 4000, 100_000]);
                    let end = (fed + 1 + random.below(most) as usize).min(stream.len());
                    fed += peer.feed(&stream[fed..end], usize::MAX);
                }
                3 => _ = peer.send(1 + random.below(300_000) as usize),
                4 | 5 if !peer.reads.is_empty() => {
                    let at = random.below(peer.reads.len() as u64) as usize;
                    if random.one_in(6) {
                        let read = peer.reads.remove(at);
                        peer.session.handle_read_back(read.ticket);
                    } else {
                        peer.read(at, false);
                    }
                }
                6 if random.one_in(40) => server.make_cold(),
                6 if random.one_in(10) => _ = peer.session.give_back(),
                7 if random.one_in(10) => peer.session.give_back_memory(),
                _ => {}
            }
            peer.turn();
            if fed == stream.len() && peer.session.is_idle() {
                break;
            }
        }
        let replies = peer.replies();
        assert_eq!((fed, replies.len()), (stream.len(), 60), "seed {seed}");
        for reply in &replies {
            let (xid, results) = results(reply);
            assert_eq!(results[..4], [0; 4]);
            if let Some(expected) = expected.remove(&xid) {
                assert!(data_of(&results).0 == expected, "seed {seed}: call {xid}");
            }
        }
        assert!(expected.is_empty());
        assert!(!peer.session.has_tail_reads() && server.staging.available() == STAGING_COUNT);
        drop(peer);
        server.export.files().handle_time(u64::MAX);
        assert_eq!(server.store().gauges().pins, 0);
    });
}
