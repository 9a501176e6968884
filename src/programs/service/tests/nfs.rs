//! NFS and MOUNT among the programs of a connection.

use super::*;
use crate::programs::mount;
use crate::programs::nfs::files::Settings;
use crate::programs::nfs::{
    Accessible, Attributes, CookieVerifier, Created, FileHandle, FileSystem, NfsError, PROGRAM_NUMBER, Rules,
    SetAttributes, Stable, VERSION, WccData, WriteDone, procedure,
};
use crate::store::Sizes;
use crate::wire::codec::{Codec, Reader, Writer};
use crate::wire::onc_rpc::{AuthSys, CallHeader};

const FILE_OCTETS_MAX: u64 = 2 << 20;

fn export() -> (Store, Nfs) {
    export_of(4 << 20)
}

fn export_of(pool_bytes: u64) -> (Store, Nfs) {
    let store = Store::with_files(Sizes {
        memory_bytes: 8 << 20,
        head_bytes: 64 << 10,
        value_bytes_max: FILE_OCTETS_MAX,
        index_bytes_max: 1 << 20,
        pinned_share: 0.25,
        pool_bytes: vec![pool_bytes],
    });
    let store = store.unwrap();
    store.extents().add_file(0, pool_bytes);
    let files = FileSystem::new(store.clone(), Settings { fsid: 1, boot: 2, uid: 3, gid: 4 });
    let export = Export::new(Arc::new(files), Rules::default());
    let client = Client { address: IpAddr::from([192, 0, 2, 1]), is_allowed: true };
    (store, Nfs { export: Arc::new(export), client })
}

fn bench() -> Bench {
    let (store, nfs) = export();
    connect(&store, &Arc::default(), &nfs)
}

fn connect(store: &Store, shared: &Arc<Shared>, nfs: &Nfs) -> Bench {
    Bench::with(store.clone(), shared.clone(), terms(), 4, Some(nfs.clone()))
}

/// A call as the super-user makes it.
fn call_of(xid: u32, (program, version): (u32, u32), procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let sys = AuthSys { stamp: 1, machine_name: b"host", uid: 0, gid: 0, gids: vec![] }.body();
    let (credential, verifier) = (AuthSys::around(&sys), OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: Xid(xid), program, version, procedure, credential, verifier }.write(&mut writer);
    arguments(&mut writer);
    writer.finish()
}

fn nfs_call(xid: u32, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    call_of(xid, (PROGRAM_NUMBER, VERSION), procedure, arguments)
}

fn place(dir: &FileHandle, name: &[u8]) -> impl Fn(&mut Writer) {
    move |words| {
        dir.write(words);
        words.opaque(name);
    }
}

/// What is in front of the data of a WRITE, and the length of that.
fn write_stream(xid: u32, file: &FileHandle, offset: u64, len: usize, stable: Stable) -> Vec<u8> {
    nfs_call(xid, procedure::WRITE, |words| {
        file.write(words);
        words.u64(offset);
        words.u32(len as u32);
        stable.write(words);
        words.u32(len as u32);
    })
}

fn read_stream(xid: u32, file: &FileHandle, offset: u64, count: u32) -> Vec<u8> {
    nfs_call(xid, procedure::READ, |words| {
        file.write(words);
        words.u64(offset);
        words.u32(count);
    })
}

/// A way to create.
const GUARDED: u32 = 1;

fn create_stream(xid: u32, dir: &FileHandle, name: &[u8]) -> Vec<u8> {
    nfs_call(xid, procedure::CREATE, |words| {
        place(dir, name)(words);
        words.u32(GUARDED);
        SetAttributes::default().write(words);
    })
}

/// A READ's results.
#[derive(Debug)]
struct Got {
    status: u32,
    eof: bool,
    /// As far as they are in the stream.
    octets: Vec<u8>,
    count: u32,
}

impl Bench {
    fn ask(&mut self, xid: u32, stream: &[u8], lists: ChunkLists) -> Repost {
        self.hear(&[&header(xid, Placement::Inline, lists)[..], stream].concat())
    }

    /// The oldest Read that is held ends.
    fn arrive(&mut self) {
        let (xid, number, buf) = self.reads.pop_front().expect("a Read is held");
        self.service.handle_read(xid, number, buf, self.now);
        self.turn();
    }

    fn plain(&mut self, xid: u32, stream: &[u8]) {
        self.ask(xid, stream, ChunkLists::default());
    }

    /// The data in segments of these lengths, of which the last may be roundup.
    fn write_chunk(&mut self, xid: u32, stream: &[u8], data: &[u8], lengths: &[usize]) {
        let mut data = data.to_vec();
        data.resize(lengths.iter().sum(), 0xaa);
        let (mut reads, mut at) = (Vec::new(), 0);
        for (index, length) in (0..).zip(lengths) {
            let target = self.expose(xid * 10 + index, data[at..at + length].to_vec());
            reads.push(ReadSegment { position: stream.len() as u32, target });
            at += length;
        }
        self.ask(xid, stream, ChunkLists { reads, ..ChunkLists::default() });
    }

    /// The results in a reply that succeeded.
    fn results(&self, xid: u32) -> Vec<u8> {
        let (stream, _) = self.replied(xid);
        assert_eq!(stream[8..24], [0; 16], "accepted, with no verifier, and done");
        stream[24..].to_vec()
    }

    fn status(&self, xid: u32) -> u32 {
        u32::from_be_bytes(*self.results(xid).first_chunk().unwrap())
    }

    fn written(&self, xid: u32) -> WriteDone {
        let results = self.results(xid);
        let mut reader = Reader::new(&results);
        assert_eq!(reader.u32(), Ok(0));
        let done = WriteDone::read(&mut reader).unwrap();
        reader.finish().unwrap();
        done
    }

    fn got(&self, xid: u32) -> Got {
        let results = self.results(xid);
        let mut reader = Reader::new(&results);
        let status = reader.u32().unwrap();
        let attributes = Option::<Attributes>::read(&mut reader).unwrap();
        if status != 0 {
            reader.finish().unwrap();
            return Got { status, eof: false, octets: Vec::new(), count: 0 };
        }
        assert!(attributes.is_some());
        let (count, eof, len) = (reader.u32().unwrap(), reader.bool().unwrap(), reader.u32().unwrap());
        assert_eq!(count, len);
        let octets = reader.rest().to_vec();
        Got { status, eof, octets, count }
    }

    fn root(&mut self, xid: u32) -> FileHandle {
        let stream =
            call_of(xid, (mount::PROGRAM_NUMBER, mount::VERSION), mount::procedure::MNT, |words| words.opaque(b"/"));
        self.plain(xid, &stream);
        let results = self.results(xid);
        let mut reader = Reader::new(&results);
        assert_eq!(reader.u32(), Ok(0));
        FileHandle::read(&mut reader).unwrap()
    }

    /// A file of that name, made by call 1, in the root, which call 0 asks for.
    fn create(&mut self, name: &[u8]) -> FileHandle {
        let root = self.root(0);
        self.plain(1, &create_stream(1, &root, name));
        let results = self.results(1);
        let mut reader = Reader::new(&results);
        assert_eq!(reader.u32(), Ok(0));
        let created = Created::read(&mut reader).unwrap();
        self.log.clear();
        created.obj.unwrap()
    }

    /// Nothing is left of any call, and nothing of drafts once they are committed.
    fn assert_idle(&self) {
        if let Some(nfs) = &self.service.around.nfs {
            assert_eq!(nfs.export.files().handle_time(u64::MAX), 0);
        }
        assert_eq!(self.store.gauges().claims, 0);
        self.assert_at_rest();
    }

    /// What NFS sees of a file, by a READ with a write chunk.
    fn contents(&mut self, xid: u32, file: &FileHandle) -> Vec<u8> {
        let chunk = vec![self.expose(xid * 10, vec![0; 1 << 20])];
        self.ask(xid, &read_stream(xid, file, 0, 1 << 20), offer(vec![chunk], None));
        let got = self.got(xid);
        assert_eq!((got.status, got.eof), (0, true));
        self.memory[&(xid * 10)][..got.count as usize].to_vec()
    }
}

#[test]
fn a_write_is_pulled_into_its_draft_and_each_octet_is_copied_once() {
    let mut bench = bench();
    let file = bench.create(b"f");
    for (xid, pad) in [(2, 0), (3, 1), (4, 2), (5, 3)] {
        let data = octets(30_001 + pad, xid);
        let before = bench.metrics.copied.pulled_to_arena.get();
        // What rounds the item up to words is in a segment of its own, or in the last.
        let lengths = [10_000, 20_001 + pad, (4 - data.len() % 4) % 4];
        bench.write_chunk(xid, &write_stream(xid, &file, 0, data.len(), Stable::FileSync), &data, &lengths);
        let done = bench.written(xid);
        assert_eq!((done.count as usize, done.committed), (data.len(), Stable::FileSync));
        assert_eq!(bench.metrics.copied.pulled_to_arena.get() - before, data.len() as u64);
        assert!(rig::octets(&bench.store, b"f").unwrap() == data, "other doors see it");
        assert!(bench.contents(xid + 10, &file) == data);
    }
    assert!(bench.log.starts_with("R02 R02 R02 R02 R02 S02 W12 "), "{}", bench.log);
    assert_eq!(bench.metrics.rpc_calls.nfs.list(), [("CREATE", 1), ("READ", 4), ("WRITE", 4)]);
    assert_eq!(
        (bench.metrics.rpc_calls.mount.list(), bench.metrics.rpc_calls.procedures.list()),
        (vec![("MNT", 1)], vec![])
    );
    bench.assert_idle();
}

#[test]
fn data_comes_inline_and_in_a_long_call_too() {
    let mut bench = bench();
    let file = bench.create(b"f");
    let data = octets(20_003, 1);
    let whole = |xid: u32, at: usize, end: usize| {
        let mut stream = write_stream(xid, &file, at as u64, end - at, Stable::Unstable);
        stream.extend_from_slice(&data[at..end]);
        stream.resize(stream.len().next_multiple_of(4), 0);
        stream
    };
    bench.plain(2, &whole(2, 0, 101));
    bench.long(3, whole(3, 101, 20_003));
    assert_eq!((bench.written(2).count, bench.written(3).count), (101, 19_902));
    assert_eq!(bench.metrics.copied.input_to_arena.get(), 20_003);
    assert!(bench.contents(4, &file) == data);
    assert!(rig::octets(&bench.store, b"f").unwrap().is_empty(), "it is not committed");
    bench.plain(5, &write_stream(5, &file, 7, 0, Stable::Unstable));
    assert_eq!(bench.written(5).count, 0);
    bench.assert_idle();
}

#[test]
fn writes_of_a_connection_overlap_and_end_in_any_order() {
    let mut bench = bench();
    let file = bench.create(b"f");
    let data = octets(40_000, 2);
    bench.holds.reads = true;
    for (xid, at) in [(2, 0), (3, 30_000), (4, 10_000), (5, 20_000)] {
        let part = &data[at..at + 10_000];
        bench.write_chunk(xid, &write_stream(xid, &file, at as u64, 10_000, Stable::Unstable), part, &[9_000, 1_000]);
    }
    // There are four buffers, and the last is kept for a call that has none.
    assert_eq!(bench.log, "R02 R02 R02 R03 ");
    bench.reads.make_contiguous().reverse();
    bench.holds.reads = false;
    bench.turn();
    for xid in [2, 3, 4, 5] {
        assert_eq!(bench.written(xid).count, 10_000);
    }
    assert!(bench.contents(6, &file) == data);
    assert_eq!(bench.service.free.len(), 4);
    bench.assert_idle();
}

#[test]
fn of_what_may_not_be_written_only_that_is_pulled_by_which_it_is_known_again() {
    let mut bench = bench();
    let file = bench.create(b"f");
    let root = bench.root(9);
    let bad = FileHandle::new(b"bad").unwrap();
    let cases =
        [(&root, 0, NfsError::IsDir), (&bad, 0, NfsError::BadHandle), (&file, FILE_OCTETS_MAX << 20, NfsError::FBig)];
    bench.log.clear();
    for (xid, (file, offset, error)) in (2..).zip(cases) {
        let stream = write_stream(xid, file, offset, 80_000, Stable::Unstable);
        bench.write_chunk(xid, &stream, &[1; 80_000], &[80_000]);
        assert_eq!(bench.status(xid), error.number(), "{error:?}");
    }
    assert_eq!(bench.metrics.rpc_calls.nfs.get("WRITE"), 3);
    let link = nfs_call(8, procedure::SYMLINK, |words| {
        place(&root, b"link")(words);
        SetAttributes::default().write(words);
        words.u32(100);
    });
    bench.write_chunk(8, &link, &[b'p'; 100], &[100]);
    assert_eq!(bench.status(8), NfsError::NotSupp.number());
    assert_eq!(bench.log, "R02 S02 R03 S03 R04 S04 S08 ");
    // More than a WRITE may have is refused for its chunk, and so is a chunk for what may not be in one.
    let long = write_stream(10, &file, 0, (1 << 20) + 4, Stable::Unstable);
    bench.write_chunk(10, &long, &[0; 16], &[(1 << 20) + 4]);
    assert!(bench.is_error(10));
    let name = nfs_call(11, procedure::LOOKUP, |words| {
        root.write(words);
        words.u32(8);
    });
    bench.write_chunk(11, &name, b"the name", &[8]);
    assert!(bench.is_error(11));
    bench.assert_idle();
}

#[test]
fn octets_that_are_read_go_where_they_are_wanted() {
    let mut bench = bench();
    let file = bench.create(b"f");
    let data = octets(30_001, 3);
    // The first part is committed, the rest is in the draft.
    for (xid, range, stable) in [(2, 0..20_000, Stable::FileSync), (3, 20_000..30_001, Stable::Unstable)] {
        let stream = write_stream(xid, &file, range.start as u64, range.len(), stable);
        let len = range.len();
        bench.write_chunk(xid, &stream, &data[range], &[len]);
        bench.written(xid);
    }
    bench.log.clear();
    // A chunk that has as many octets as are asked for, and one with words more.
    for (xid, extra) in [(10, 0), (11, 1), (12, 3), (13, 4)] {
        let chunk = vec![bench.expose(7, vec![0; 11]), bench.expose(8, vec![0; 19_990 + extra])];
        bench.ask(xid, &read_stream(xid, &file, 5, 20_001), offer(vec![chunk], None));
        let got = bench.got(xid);
        assert_eq!((got.status, got.eof, got.count, got.octets.len()), (0, false, 20_001, 0));
        assert!(bench.memory[&7] == data[5..16] && bench.memory[&8][..19_990] == data[16..20_006]);
        assert!(bench.memory[&8][19_990..].iter().all(|octet| *octet == 0), "nothing behind them");
        assert_eq!(bench.replied(xid).1, [Some(20_001)]);
    }
    // 11 octets, then up to each multiple of 8,192 of the file.
    assert!(bench.log.starts_with("W10 W10 W10 W10 S10 "), "{}", bench.log);
    // As much as there is.
    let chunk = vec![bench.expose(9, vec![0; 9000])];
    bench.ask(14, &read_stream(14, &file, 25_000, 9_000), offer(vec![chunk], None));
    let got = bench.got(14);
    assert_eq!((got.eof, got.count, &bench.memory[&9][..5_001]), (true, 5_001, &data[25_000..]));
    // Nothing, and the chunk is unused.
    let chunk = vec![bench.expose(9, vec![0; 9000])];
    bench.ask(15, &read_stream(15, &file, 30_001, 9_000), offer(vec![chunk], None));
    let got = bench.got(15);
    assert_eq!((got.status, got.eof, got.count, bench.replied(15).1), (0, true, 0, vec![Some(0)]));
    assert!(bench.memory[&9].iter().all(|octet| *octet == 0));
    // Inline, with its roundup.
    bench.plain(16, &read_stream(16, &file, 19_990, 101));
    let got = bench.got(16);
    assert_eq!((got.count, &got.octets[..101], &got.octets[101..]), (101, &data[19_990..20_091], &[0; 3][..]));
    assert_eq!(bench.metrics.copied.arena_to_reply.get(), 101);
    // All of it without a chunk of its own.
    let reply = vec![bench.expose(9, vec![0; 11_000]), bench.expose(10, vec![0; 30_000])];
    bench.ask(17, &read_stream(17, &file, 0, u32::MAX), offer(vec![vec![]], Some(reply)));
    let got = bench.got(17);
    assert!((got.eof, got.count) == (true, 30_001) && got.octets[..30_001] == data);
    // Nowhere.
    bench.plain(18, &read_stream(18, &file, 0, 5_000));
    let chunk = vec![bench.expose(9, vec![0; 4_999])];
    bench.ask(19, &read_stream(19, &file, 0, 5_000), offer(vec![chunk], None));
    assert!(bench.is_error(18) && bench.is_error(19));
    bench.assert_idle();
}

#[test]
fn a_read_keeps_what_it_reads_until_the_reply_has_left() {
    let mut bench = bench();
    let file = bench.create(b"f");
    let data = octets(9_000, 4);
    bench.write_chunk(2, &write_stream(2, &file, 0, 9_000, Stable::FileSync), &data, &[9_000]);
    bench.holds.sends = true;
    let chunk = vec![bench.expose(7, vec![0; 9_000])];
    bench.ask(3, &read_stream(3, &file, 0, 9_000), offer(vec![chunk], None));
    assert!(bench.log.ends_with("W03 W03 S03 ") && bench.store.gauges().pins == 1);
    bench.holds.sends = false;
    bench.turn();
    bench.assert_idle();
}

#[test]
fn a_read_waits_for_what_other_readers_hold_and_not_for_ever() {
    let mut bench = bench();
    let root = bench.root(0);
    for name in [b"a", b"b", b"c"] {
        put(&bench.store, name, &octets(600 << 10, 16));
    }
    bench.plain(1, &nfs_call(1, procedure::LOOKUP, place(&root, b"c")));
    let file = FileHandle::read(&mut Reader::new(&bench.results(1)[4..])).unwrap();
    // A quarter of the pool, and one value more.
    let hold = |name: &[u8]| match bench.store.get(name, bench.store.clock().now()) {
        Lookup::Hit(pinned) => pinned,
        other => panic!("{other:?}"),
    };
    let held = (hold(b"a"), hold(b"b"));
    for xid in [2, 3] {
        bench.plain(xid, &read_stream(xid, &file, 0, 10));
        bench.service.handle_retry(bench.now);
        bench.turn();
        assert!(!bench.is_answered(xid) && bench.service.is_retry_asked);
        assert_eq!(bench.metrics.rpc_calls.nfs.get("READ"), u64::from(xid - 2));
        if xid == 2 {
            bench.now += Duration::from_secs(10);
            bench.service.handle_retry(bench.now);
            bench.turn();
            assert_eq!(bench.status(2), NfsError::Jukebox.number());
        }
    }
    drop(held);
    bench.service.handle_retry(bench.now);
    bench.turn();
    assert_eq!((bench.got(3).status, bench.got(3).count), (0, 10));
    bench.assert_idle();
}

#[test]
fn what_cannot_be_read_is_an_error_and_leaves_the_chunk_unused() {
    let mut bench = bench();
    let file = bench.create(b"f");
    let data = octets(20_000, 5);
    bench.write_chunk(2, &write_stream(2, &file, 0, 20_000, Stable::FileSync), &data, &[20_000]);
    bench.holds.fills = true;
    let chunk = vec![bench.expose(7, vec![0; 20_000])];
    bench.ask(3, &read_stream(3, &file, 0, 20_000), offer(vec![chunk], None));
    let (lost, _) = bench.fills.pop_front().unwrap();
    bench.service.handle_failed(lost);
    bench.holds.fills = false;
    bench.turn();
    let got = bench.got(3);
    assert_eq!((got.status, bench.replied(3).1), (NfsError::Io.number(), vec![Some(0)]));
    bench.assert_idle();
}

/// Entries of a READDIR's results.
fn names(results: &[u8]) -> Vec<Vec<u8>> {
    let mut reader = Reader::new(results);
    assert_eq!(reader.u32(), Ok(0));
    Option::<Attributes>::read(&mut reader).unwrap();
    CookieVerifier::read(&mut reader).unwrap();
    let mut names = Vec::new();
    while reader.bool().unwrap() {
        reader.u64().unwrap();
        names.push(reader.opaque(255).unwrap().to_vec());
        reader.u64().unwrap();
    }
    assert_eq!(reader.bool(), Ok(true), "all of them");
    reader.finish().unwrap();
    names
}

#[test]
fn directories_come_inline_and_in_segments_of_the_reply_chunk() {
    let mut bench = bench();
    let root = bench.root(1);
    let list = |xid: u32, count: u32| {
        nfs_call(xid, procedure::READDIR, |words| {
            root.write(words);
            words.u64(0);
            words.u64(0);
            words.u32(count);
        })
    };
    put(&bench.store, b"a", b"1");
    bench.plain(2, &list(2, 600));
    assert_eq!(names(&bench.results(2)), [&b"."[..], b"..", b"a"]);
    let mut all = vec![b".".to_vec(), b"..".to_vec(), b"a".to_vec()];
    for number in 0..200 {
        let name = format!("name-{number:03}");
        put(&bench.store, name.as_bytes(), b"1");
        all.push(name.into_bytes());
    }
    let reply = [3_001, 2_999, 20_000].map(|len| bench.expose(len, vec![0; len as usize])).to_vec();
    bench.log.clear();
    bench.ask(3, &list(3, 20_000), offer(vec![], Some(reply)));
    let mut found = names(&bench.results(3));
    found.sort();
    assert_eq!(found, all);
    assert_eq!(bench.log, "W03 W03 W03 S03 ");
    // One that has no room for what was asked for.
    let reply = vec![bench.expose(9, vec![0; 3_000])];
    bench.ask(4, &list(4, 20_000), offer(vec![], Some(reply)));
    assert!(bench.is_error(4));
    // More than there is room for here: as much as there is.
    let reply = vec![bench.expose(9, vec![0; 1 << 20])];
    bench.ask(5, &list(5, u32::MAX), offer(vec![], Some(reply)));
    assert_eq!(names(&bench.results(5)).len(), all.len());
    bench.assert_idle();
}

#[test]
fn replies_of_directories_have_the_room_there_is_and_wait_for_more() {
    let mut bench = bench();
    let root = bench.root(1);
    bench.holds.sends = true;
    for xid in [2, 3] {
        let reply = vec![bench.expose(xid, vec![0; 64 << 10])];
        let list = nfs_call(xid, procedure::READDIRPLUS, |words| {
            root.write(words);
            words.u64(0);
            words.u64(0);
            words.u32(40_000);
            words.u32(40_000);
        });
        bench.ask(xid, &list, offer(vec![], Some(reply)));
    }
    assert!(bench.is_answered(2) && !bench.is_answered(3));
    bench.holds.sends = false;
    bench.turn();
    assert_eq!((bench.status(2), bench.status(3)), (0, 0));
    bench.assert_idle();
}

#[test]
fn what_has_a_lasting_effect_is_executed_once_over_however_many_connections() {
    let (store, nfs) = export();
    let shared = Arc::<Shared>::default();
    let mut first = connect(&store, &shared, &nfs);
    let root = first.root(0);
    let remove = nfs_call(2, procedure::REMOVE, place(&root, b"f"));
    let data = octets(10_000, 6);
    first.plain(1, &create_stream(1, &root, b"f"));
    let file = first.service.around.nfs.clone().unwrap().export.files().clone();
    let created = Created::read(&mut Reader::new(&first.results(1)[4..])).unwrap().obj.unwrap();
    let write = write_stream(3, &created, 0, 10_000, Stable::Unstable);
    first.write_chunk(3, &write, &data, &[10_000]);
    first.plain(2, &remove);
    let replies: Vec<_> = [1, 2, 3].map(|xid| first.results(xid)).to_vec();
    assert!(replies.iter().all(|reply| reply[..4] == [0; 4]));
    drop(first);
    let mut second = connect(&store, &shared, &nfs);
    second.plain(1, &create_stream(1, &root, b"f"));
    second.plain(2, &remove);
    // Inline now, and without a chunk.
    second.write_chunk(3, &write, &data, &[4_000, 6_000]);
    assert_eq!([1, 2, 3].map(|xid| second.results(xid)).to_vec(), replies);
    assert_eq!((second.metrics.rpc_calls.replayed.get(), second.log.as_str()), (3, "S01 S02 R03 S03 "));
    assert!(file.get_attr(&created).is_err(), "it was removed, and not made again");
    second.sent.clear();
    second.plain(
        4,
        &remove[..].iter().copied().enumerate().map(|(at, octet)| if at == 3 { 4 } else { octet }).collect::<Vec<_>>(),
    );
    assert_eq!(second.status(4), NfsError::NoEnt.number(), "another call is executed");
    second.assert_idle();
}

/// As Linux's client sends it when it is late with the first try, and encodes the next while that is still leaving.
#[test]
fn a_write_whose_first_word_was_zeroed_writes_over_nothing() {
    let (store, nfs) = export();
    let shared = Arc::<Shared>::default();
    let mut bench = connect(&store, &shared, &nfs);
    let file = bench.create(b"f");
    let data = octets(77, 6);
    let spoilt = [&[0; 4], &data[4..]].concat();
    let write = |xid, data: &[u8]| [&write_stream(xid, &file, 0, 77, Stable::Unstable)[..], data, &[0; 3]].concat();
    let mut read_xid = 100;
    let mut try_each = |xid, tries: &[&[u8]], expected: &[u8]| {
        for data in tries {
            bench.plain(xid, &write(xid, data));
            assert_eq!(bench.written(xid).count, 77);
            bench.sent.clear();
        }
        read_xid += 1;
        bench.plain(read_xid, &read_stream(read_xid, &file, 0, 77));
        assert_eq!(&bench.got(read_xid).octets[..77], expected);
    };
    try_each(2, &[&data, &spoilt, &data], &data);
    try_each(3, &[&spoilt], &spoilt);
    try_each(4, &[&spoilt, &data, &spoilt], &data);
    // Another word is another call.
    let other = [&data[..4], &[0; 4], &data[8..]].concat();
    try_each(5, &[&data, &other], &other);
    bench.assert_idle();
}

#[test]
fn a_write_that_its_connection_did_not_live_to_see_is_executed_when_it_comes_again() {
    let (store, nfs) = export();
    let shared = Arc::<Shared>::default();
    let mut first = connect(&store, &shared, &nfs);
    let file = first.create(b"f");
    let data = octets(10_000, 7);
    let write = write_stream(2, &file, 0, 10_000, Stable::FileSync);
    first.holds.reads = true;
    first.write_chunk(2, &write, &data, &[10_000]);
    first.arrive();
    let mut second = connect(&store, &shared, &nfs);
    second.holds.reads = true;
    second.write_chunk(2, &write, &data, &[10_000]);
    assert_eq!(second.log, "R02 R02 ");
    second.arrive();
    // It is being executed: what waits for that keeps nothing.
    second.wait_for_twin();
    assert_eq!((second.log.as_str(), second.service.free.len()), ("R02 R02 ", 3));
    drop(first);
    // Not while something is being pulled for nobody.
    second.wait_for_twin();
    assert_eq!(second.log, "R02 R02 ");
    second.holds.reads = false;
    second.turn();
    second.wait_for_twin();
    assert_eq!(second.written(2).count, 10_000);
    assert_eq!((second.log.as_str(), second.service.free.len()), ("R02 R02 R02 R02 S02 ", 4));
    assert_eq!(second.metrics.rpc_calls.nfs.list(), [("WRITE", 1)]);
    assert!(rig::octets(&store, b"f").unwrap() == data);
    second.assert_idle();
}

/// A call is sent with this xid.
type Way = Box<dyn Fn(&mut Bench, u32)>;

/// The ways in which the same WRITE can come.
fn ways(write: &[u8], data: &[u8]) -> [Way; 4] {
    let (write, data) = (write.to_vec(), data.to_vec());
    let mut whole = [&write[..], &data[..]].concat();
    whole.resize(whole.len().next_multiple_of(4), 0);
    let chunked = |lengths: Vec<usize>| -> Way {
        let (write, data) = (write.clone(), data.clone());
        Box::new(move |bench, xid| bench.write_chunk(xid, &write, &data, &lengths))
    };
    // In one piece, and in more pieces than there are buffers before enough octets are here.
    let mut short = vec![10; data.len().min(300) / 10];
    short.push(data.len() - short.len() * 10);
    let long = whole.clone();
    [
        chunked(vec![data.len()]),
        chunked(short),
        if whole.len() < INLINE as usize - 100 {
            Box::new(move |bench, xid| bench.plain(xid, &whole))
        } else {
            Box::new(move |bench, xid| _ = bench.long(xid, whole.clone()))
        },
        Box::new(move |bench, xid| _ = bench.long(xid, long.clone())),
    ]
}

/// Clients begin with the xid that they like.
#[test]
fn a_write_of_other_octets_is_another_though_all_else_is_the_same() {
    for len in [7, 255, 256, 700, 20_000] {
        for way in 0..4 {
            let (store, nfs) = export();
            let shared = Arc::<Shared>::default();
            let file = connect(&store, &shared, &nfs).create(b"f");
            let write = write_stream(2, &file, 0, len, Stable::FileSync);
            for (seed, at) in [(1, 0), (2, len.min(256) - 1)] {
                let mut data = octets(len, seed);
                let mut first = connect(&store, &shared, &nfs);
                ways(&write, &data)[way](&mut first, 2);
                first.written(2);
                data[at] ^= 1;
                let mut second = connect(&store, &shared, &nfs);
                ways(&write, &data)[way](&mut second, 2);
                assert_eq!(second.written(2).count as usize, len);
                assert!(rig::octets(&store, b"f").unwrap() == data, "{len} octets, way {way}, octet {at}");
                second.assert_idle();
            }
        }
    }
}

#[test]
fn a_write_is_executed_once_in_whatever_way_it_comes() {
    for len in [0, 7, 256, 700, 20_000] {
        for (first_way, way) in [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 1), (2, 1)] {
            let (store, nfs) = export();
            let shared = Arc::<Shared>::default();
            let mut first = connect(&store, &shared, &nfs);
            let file = first.create(b"f");
            let (old, new) = (octets(len, 1), octets(len + 1, 2));
            let write = write_stream(2, &file, 0, len, Stable::FileSync);
            ways(&write, &old)[first_way](&mut first, 2);
            let reply = first.results(2);
            let then = write_stream(3, &file, 0, len + 1, Stable::FileSync);
            ways(&then, &new)[0](&mut first, 3);
            first.written(3);
            // A late copy.
            let mut second = connect(&store, &shared, &nfs);
            ways(&write, &old)[way](&mut second, 2);
            assert_eq!((second.results(2), second.metrics.rpc_calls.replayed.get()), (reply, 1));
            assert!(rig::octets(&store, b"f").unwrap() == new, "{len} octets, {way} after {first_way}");
            assert_eq!(second.metrics.rpc_calls.nfs.list(), [("WRITE", 1)]);
            assert_eq!(second.service.free.len(), 4);
            second.assert_idle();
        }
    }
}

/// The first copy is held up in its connection; what came after it was written over.
#[test]
fn a_late_first_copy_of_a_write_is_not_executed() {
    let (store, nfs) = export();
    let shared = Arc::<Shared>::default();
    let mut late = connect(&store, &shared, &nfs);
    let file = late.create(b"f");
    let (old, new) = (octets(10_000, 1), octets(10_000, 2));
    let write = write_stream(2, &file, 0, 10_000, Stable::FileSync);
    late.holds.reads = true;
    late.write_chunk(2, &write, &old, &[10_000]);
    let mut second = connect(&store, &shared, &nfs);
    second.write_chunk(2, &write, &old, &[10_000]);
    second.write_chunk(3, &write_stream(3, &file, 0, 10_000, Stable::FileSync), &new, &[10_000]);
    second.written(3);
    late.arrive();
    assert!(!late.is_answered(2), "a Read of it is under way");
    late.holds.reads = false;
    late.turn();
    assert_eq!((late.results(2), late.metrics.rpc_calls.replayed.get()), (second.results(2), 1));
    assert!(rig::octets(&store, b"f").unwrap() == new);
    assert_eq!(late.service.free.len(), 4);
    late.assert_idle();
    second.assert_idle();
}

/// A call may be sent again over the other transport.
#[test]
fn a_write_is_executed_once_over_tcp_and_here() {
    use crate::programs::nfs::session;
    use crate::programs::stream::StreamSession;
    use crate::wire::onc_rpc::record::{MARK_BYTES, marked};
    for len in [0, 7, 255, 256, 257, 20_000] {
        for (is_tcp_first, way) in [(true, 0), (true, 1), (true, 2), (false, 0), (false, 1), (false, 2)] {
            let (store, nfs) = export();
            let shared = Arc::<Shared>::default();
            let mut bench = connect(&store, &shared, &nfs);
            let mut tcp = session::Session::new(session::Context {
                export: nfs.export.clone(),
                client: nfs.client,
                shared: shared.clone(),
                metrics: bench.metrics.clone(),
                calls_max: 4,
                reserve_wait_ms: 0,
            });
            let file = bench.create(b"f");
            let (old, new) = (octets(len, 1), octets(len + 1, 2));
            let write = write_stream(2, &file, 0, len, Stable::FileSync);
            let mut call = [&write[..], &old[..]].concat();
            call.resize(call.len().next_multiple_of(4), 0);
            let mut by_tcp = || {
                let call = marked(&call);
                let (_, input) = tcp.targets();
                input[..call.len()].copy_from_slice(&call);
                tcp.handle_input(call.len());
                tcp.process();
                let mut slices = Vec::new();
                tcp.gather(&mut slices);
                let reply: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
                reply[MARK_BYTES + 24..].to_vec()
            };
            let here = |bench: &mut Bench| {
                ways(&write, &old)[way](bench, 2);
                bench.results(2)
            };
            let first = if is_tcp_first { by_tcp() } else { here(&mut bench) };
            bench.write_chunk(3, &write_stream(3, &file, 0, len + 1, Stable::FileSync), &new, &[len + 1]);
            let second = if is_tcp_first { here(&mut bench) } else { by_tcp() };
            assert_eq!((&second, bench.metrics.rpc_calls.replayed.get()), (&first, 1));
            assert!(rig::octets(&store, b"f").unwrap() == new, "{len} octets, tcp first: {is_tcp_first}, way {way}");
            bench.assert_idle();
        }
    }
}

#[test]
fn a_write_waits_for_space_and_does_not_wait_for_ever() {
    // Memory is what is short.
    let (store, nfs) = export_of(64 << 20);
    let mut bench = connect(&store, &Arc::default(), &nfs);
    let root = bench.root(0);
    let open = |bench: &mut Bench, xid: u32, name: &[u8]| {
        bench.plain(xid, &create_stream(xid, &root, name));
        Created::read(&mut Reader::new(&bench.results(xid)[4..])).unwrap().obj.unwrap()
    };
    let files: Vec<_> = (0..8).map(|at| open(&mut bench, 10 + at, &[b'a' + at as u8])).collect();
    // Drafts fill the memory: nobody writes behind here.
    let data = octets(1 << 20, 8);
    let mut waiting = None;
    for (xid, file) in (20..).zip(files.iter().flat_map(|file| [(file, 0), (file, 1 << 20)])) {
        bench.write_chunk(xid, &write_stream(xid, file.0, file.1, 1 << 20, Stable::Unstable), &data, &[1 << 20]);
        if !bench.is_answered(xid) {
            waiting = Some(xid);
            break;
        }
        if bench.status(xid) != 0 {
            break;
        }
    }
    let waiting = waiting.expect("one waits");
    assert!(bench.service.is_retry_asked);
    // Others are served meanwhile, with the buffers that it does not hold.
    bench.plain(60, &nfs_call(60, procedure::NULL, |_| ()));
    assert!(bench.is_answered(60));
    bench.service.handle_retry(bench.now);
    bench.turn();
    assert!(!bench.is_answered(waiting) && bench.service.is_retry_asked);
    // A file is removed.
    bench.plain(61, &nfs_call(61, procedure::REMOVE, place(&root, b"a")));
    bench.service.handle_retry(bench.now);
    bench.turn();
    assert_eq!(bench.written(waiting).count, 1 << 20);
    // Once more, and nothing comes free.
    let mut xid = 70;
    loop {
        xid += 1;
        let file = &files[1 + xid as usize % 7];
        let stream = write_stream(xid, file, 0, 1 << 20, Stable::Unstable);
        bench.write_chunk(xid, &stream, &data, &[1 << 20]);
        if !bench.is_answered(xid) {
            break;
        }
        assert!(xid < 90, "memory is not full");
    }
    bench.now += Duration::from_secs(10);
    bench.service.handle_retry(bench.now);
    bench.turn();
    match bench.status(xid) {
        0 => assert!(bench.written(xid).count < 1 << 20),
        status => assert_eq!(status, NfsError::Jukebox.number()),
    }
    assert_eq!(bench.service.free.len(), 4);
    bench.assert_idle();
}

#[test]
fn whoever_is_not_allowed_learns_nothing() {
    let (store, nfs) = export();
    let allowed = connect(&store, &Arc::default(), &nfs).root(1);
    let client = Client { is_allowed: false, ..nfs.client };
    let mut bench = connect(&store, &Arc::default(), &Nfs { client, ..nfs });
    bench.plain(
        1,
        &call_of(1, (mount::PROGRAM_NUMBER, mount::VERSION), mount::procedure::MNT, |words| words.opaque(b"/")),
    );
    assert_eq!(bench.status(1), mount::MountError::Acces.number());
    bench.plain(2, &nfs_call(2, procedure::GETATTR, |words| allowed.write(words)));
    bench.plain(3, &create_stream(3, &allowed, b"f"));
    let data = [1; 5_000];
    bench.write_chunk(4, &write_stream(4, &allowed, 0, 5_000, Stable::Unstable), &data, &[5_000]);
    assert_eq!([2, 3, 4].map(|xid| bench.status(xid)), [NfsError::Acces.number(); 3]);
    bench.plain(5, &nfs_call(5, procedure::NULL, |_| ()));
    assert!(bench.results(5).is_empty());
    assert_eq!((bench.log.as_str(), store.gauges().objects), ("S01 S02 S03 S04 S05 ", 0));
    bench.assert_idle();
}

#[test]
fn the_caller_is_who_the_credential_says() {
    let mut bench = bench();
    let root = bench.root(1);
    // The root is the daemon's, mode 755.
    let all = 0x3f;
    let bits = |bench: &mut Bench, xid: u32, credential: OpaqueAuth<'_>| {
        let (program, version, procedure, verifier) = (PROGRAM_NUMBER, VERSION, procedure::ACCESS, OpaqueAuth::NONE);
        let mut writer = Writer::new();
        CallHeader { xid: Xid(xid), program, version, procedure, credential, verifier }.write(&mut writer);
        root.write(&mut writer);
        writer.u32(all);
        bench.plain(xid, &writer.finish());
        Accessible::read(&mut Reader::new(&bench.results(xid)[4..])).unwrap().access
    };
    let sys = |uid| AuthSys { stamp: 1, machine_name: b"host", uid, gid: 9, gids: vec![] }.body();
    let (owner, other) = (sys(3), sys(5));
    let found = [
        bits(&mut bench, 2, AuthSys::around(&owner)),
        bits(&mut bench, 3, AuthSys::around(&other)),
        bits(&mut bench, 4, OpaqueAuth::NONE),
    ];
    assert!(found[0] > found[1] && found[1] > 0 && found[1] == found[2], "{found:?}");
    bench.assert_idle();
}

#[test]
fn programs_are_those_that_are_served_here() {
    let null = |xid: u32, program: (u32, u32)| call_of(xid, program, 0, |_| ());
    let bulkhead = (crate::programs::bulkhead::PROGRAM_NUMBER, crate::programs::bulkhead::VERSION);
    let (nfs, mount) = ((PROGRAM_NUMBER, VERSION), (mount::PROGRAM_NUMBER, mount::VERSION));
    let (mut without, mut with) = (Bench::new(), bench());
    for bench in [&mut without, &mut with] {
        for (xid, program) in (1..).zip([bulkhead, nfs, mount, (100_227, 3), (PROGRAM_NUMBER, 4)]) {
            bench.plain(xid, &null(xid, program));
        }
    }
    let status = |bench: &Bench, xid: u32| bench.replied(xid).0[20..24][3];
    let (unavail, mismatch) = (1, 2);
    assert_eq!([1, 2, 3, 4, 5].map(|xid| status(&without, xid)), [0, unavail, unavail, unavail, unavail]);
    assert_eq!([1, 2, 3, 4, 5].map(|xid| status(&with, xid)), [0, 0, 0, unavail, mismatch]);
    assert_eq!(with.metrics.rpc_calls.denied.list(), [("prog_mismatch", 1), ("prog_unavail", 1)]);
    without.assert_idle();
    with.assert_idle();
}

#[test]
fn wcc_data_of_a_write_is_told() {
    let mut bench = bench();
    let file = bench.create(b"f");
    bench.write_chunk(2, &write_stream(2, &file, 0, 5_000, Stable::DataSync), &[1; 5_000], &[5_000]);
    let WccData { before, after } = bench.written(2).file_wcc;
    assert_eq!((before.unwrap().size, after.unwrap().size), (0, 5_000));
    bench.assert_idle();
}
