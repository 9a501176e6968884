//! The calls of one connection to a whole store: messages of a hostile peer, its memory, and what the owner is told to do, in
//! any order. Whatever comes, each answer can be sent, Writes go only where the call offered memory and never behind its Send,
//! the credit is never zero, no more Reads are out than there are buffers, and once all is done nothing is held. Bit 3 of the
//! settings switches NFS and MOUNT on; [`FILE`] in a message stands for the handle of a file, which is another each time.
//!
//! Input: `[settings: 1 | { operation: 1 | operands }…]`; operation modulo 8 is a message (0 to 3: length 2, octets), or what is
//! done: the oldest Read (4), the newest Read (5), a place filled or lost (6), or all else (7).
#![no_main]

use bulkhead::metrics::Metrics;
use bulkhead::programs::bulkhead::{
    Deletion, GetRequest, Item, Key, ListRequest, Put, PutMore, RangeOf, Request, StatRequest,
};
use bulkhead::programs::mount;
use bulkhead::programs::nfs::files::{Caller, Settings};
use bulkhead::programs::nfs::{self, Client, Export, FileHandle, FileSystem, Rules, SetAttributes};
use bulkhead::programs::service::{Nfs, Output, PlaceSource, Repost, Service, Shared, Surroundings, Terms};
use bulkhead::store::claims::Revoker;
use bulkhead::store::draft::Want;
use bulkhead::store::{Condition, Sizes, Store};
use bulkhead::wire::codec::{Codec, Writer};
use bulkhead::wire::native::window::Ticket;
use bulkhead::wire::onc_rpc::{AuthSys, CallHeader, OpaqueAuth, Part, Xid};
use bulkhead::wire::rpcrdma::RemoteKey;
use bulkhead::wire::rpcrdma::chunk::{ChunkLists, ReadSegment, Segment};
use bulkhead::wire::rpcrdma::header::{Header, Message, Placement};
use bulkhead::wire::rpcrdma::private_data::Agreed;
use libfuzzer_sys::fuzz_target;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

#[path = "../seeds.rs"]
mod seeds;

const WINDOW: u32 = 4096;
const BUFFERS: usize = 3;
const INLINE: u32 = 1024;
/// In place of a handle, with as many octets.
const FILE: &[u8; 28] = b"<the handle of file k, here>";
/// Rounds in which everything must come to rest: more than there are calls, places and pieces.
const ROUNDS_MAX: usize = 200_000;

fn key(octets: &'static str) -> Key<'static> {
    Key::new(octets.as_bytes()).expect("a short key")
}

fn put(draft: u64, len: u32, data_len: u32, commit: bool) -> Request<'static, Item> {
    Request::Put(Put {
        key: key("k"),
        draft,
        len: len.into(),
        flags: 0,
        ttl_s: 0,
        condition: Condition::Any,
        commit,
        crc32c: None,
        data: Item { token: 0, len: data_len },
    })
}

/// The stream of a call, its item inline or left out.
fn stream(request: &Request<'_, Item>, xid: u32, is_inline: bool) -> Vec<u8> {
    let payload = request.encode(Xid(xid), OpaqueAuth::NONE);
    let part = |part: &Part| match part {
        Part::Bytes(octets) => octets.clone(),
        Part::Item(item) if is_inline => vec![7; item.len.next_multiple_of(4) as usize],
        Part::Item(_) => Vec::new(),
    };
    payload.parts().iter().flat_map(part).collect()
}

/// What the peer's memory has, where a long call is pulled from it.
fn memory(settings: u8, xid: u32) -> Vec<u8> {
    match settings & 3 {
        0 => stream(&put(1, 9000, 3000, false), xid, true),
        1 => stream(&Request::Stat(StatRequest { until_miss: false, keys: vec![key("k"); 64] }), xid, true),
        2 => stream(&put(0, 3000, 3000, true), xid, true),
        _ => vec![0; 64],
    }
}

struct Owner {
    service: Service<Vec<u8>>,
    store: Store,
    files: Arc<FileSystem>,
    /// Of `k`.
    file: FileHandle,
    settings: u8,
    now: Duration,
    reads: VecDeque<(Xid, u64, Vec<u8>)>,
    fills: VecDeque<(Ticket, PlaceSource, u64, u32)>,
    /// Filled and not posted.
    slots: HashMap<Ticket, u32>,
    sends: VecDeque<Option<Xid>>,
    claims: VecDeque<u64>,
    segments: VecDeque<Want>,
    is_retry_asked: bool,
    withheld: usize,
    /// Where calls with an xid let themselves be written to; nothing once one is answered.
    offers: HashMap<Xid, Vec<Segment>>,
}

impl Owner {
    fn new(settings: u8) -> Self {
        let store = Store::with_files(Sizes {
            memory_bytes: 8 << 20,
            head_bytes: 64 << 10,
            value_bytes_max: 2 << 20,
            index_bytes_max: 1 << 20,
            pinned_share: 0.25,
            pool_bytes: vec![4 << 20],
        })
        .expect("8 MiB");
        store.extents().add_file(0, 4 << 20);
        store.put(b"k", &[5; 30_000], 7, 0).expect("there is room");
        let files = Arc::new(file_system(&store));
        let root = Caller { uid: 0, gid: 0, gids: Vec::new() };
        let place = nfs::Place { dir: files.root(), name: nfs::Name(b"k") };
        let file = files.lookup(&root, &place).expect("it was put").object;
        let export = Arc::new(Export::new(files.clone(), Rules::default()));
        let peer = IpAddr::from([192, 0, 2, 1]);
        let around = Surroundings {
            store: store.clone(),
            metrics: Arc::new(Metrics::default()),
            shared: Arc::new(Shared::default()),
            peer,
            nfs: (settings & 8 != 0).then_some(Nfs { export, client: Client { address: peer, is_allowed: true } }),
        };
        let terms = Terms {
            agreed: Agreed {
                call_inline_bytes: INLINE,
                reply_inline_bytes: INLINE,
                remote_invalidate: settings & 4 != 0,
            },
            calls_max: NonZeroU32::new(4).expect("four"),
            long_bytes_max: 64 << 10,
            segments_max: 64,
            window_bytes: WINDOW,
            places_max: 4,
            reserve_wait: Duration::from_secs(10),
            draft_idle: Duration::from_secs(30),
        };
        let service = Service::new(around, Arc::new(|| ()), terms, vec![vec![0; WINDOW as usize]; BUFFERS]);
        Self {
            service,
            store,
            files,
            file,
            settings,
            now: Duration::ZERO,
            reads: VecDeque::new(),
            fills: VecDeque::new(),
            slots: HashMap::new(),
            sends: VecDeque::new(),
            claims: VecDeque::new(),
            segments: VecDeque::new(),
            is_retry_asked: false,
            withheld: 0,
            offers: HashMap::new(),
        }
    }

    fn hear(&mut self, message: &[u8]) {
        let mut message = message.to_vec();
        if let Some(at) = message.windows(FILE.len()).position(|octets| octets == FILE) {
            message[at..at + FILE.len()].copy_from_slice(self.file.as_bytes());
        }
        let message = &message[..];
        if let Ok(Message::Transport(call)) = Message::decode(message) {
            // Whether it is taken is not known here: one with this xid may be in service.
            let lists = call.to_header().lists;
            let all = lists.writes.into_iter().flatten().chain(lists.reply.into_iter().flatten());
            self.offers.entry(call.xid).or_default().extend(all);
        }
        let repost = self.service.handle_message(message, self.now);
        self.withheld += usize::from(repost == Repost::WithAnswer);
        self.drive();
    }

    fn drive(&mut self) {
        while let Some(output) = self.service.poll_output() {
            match output {
                Output::Read { call, number, mut buf, len, .. } => {
                    assert!(len > 0 && len <= WINDOW);
                    let from = memory(self.settings, call.xid.0);
                    let count = from.len().min(len as usize);
                    buf[..count].copy_from_slice(&from[..count]);
                    self.reads.push_back((call.xid, number, buf));
                    assert!(self.reads.len() <= BUFFERS);
                }
                Output::Fill { ticket, source, offset, len, .. } => {
                    assert!(len > 0 && len <= WINDOW);
                    let room = match &source {
                        PlaceSource::Octets(octets) => (octets.len() as u64).saturating_sub(offset),
                        _ => {
                            source.range(offset, len.into()).map_or(0, |pieces| pieces.map(|p| u64::from(p.len)).sum())
                        }
                    };
                    assert!(u64::from(len) <= room, "past the end of what is there");
                    self.fills.push_back((ticket, source, offset, len));
                }
                Output::Cancel(ticket) => assert!(!self.slots.contains_key(&ticket), "it is filled"),
                Output::Retire(ticket) => assert!(self.slots.remove(&ticket).is_some(), "a slot is given back once"),
                Output::Write { call, ticket, len, key, address } => {
                    assert_eq!(self.slots.remove(&ticket), Some(len));
                    let end = address + u64::from(len);
                    let is_inside = |segment: &Segment| {
                        segment.handle == key
                            && segment.offset <= address
                            && end <= segment.offset + u64::from(segment.length)
                    };
                    let offered = self.offers.get(&call.xid).expect("a Write behind its Send");
                    assert!(offered.iter().any(is_inside), "a Write where nothing was offered");
                    self.service.handle_written();
                }
                Output::Send { xid, octets, .. } => {
                    assert!(octets.len() <= INLINE as usize);
                    match Message::decode(&octets).expect("an answer decodes") {
                        Message::Transport(reply) => assert!((1..=4).contains(&reply.credit)),
                        Message::Error { credit, .. } => assert!((1..=4).contains(&credit)),
                    }
                    match xid {
                        Some(xid) => {
                            self.offers.remove(&xid);
                        }
                        None => self.withheld = self.withheld.checked_sub(1).expect("an answer to a message"),
                    }
                    self.sends.push_back(xid);
                }
                Output::Reserve { len } => self.claims.push_back(len),
                Output::Segment(want) => self.segments.push_back(want),
                Output::Retry => self.is_retry_asked = true,
            }
        }
        if !self.service.is_serving() {
            self.offers.clear();
        }
    }

    fn read(&mut self, read: Option<(Xid, u64, Vec<u8>)>) -> bool {
        let Some((xid, number, buf)) = read else { return false };
        self.service.handle_read(xid, number, buf, self.now);
        true
    }

    fn fill(&mut self, is_lost: bool) -> bool {
        let Some((ticket, source, _, len)) = self.fills.pop_front() else { return false };
        if is_lost && !matches!(source, PlaceSource::Octets(_)) {
            self.service.handle_failed(ticket);
        } else {
            self.slots.insert(ticket, len);
            self.service.handle_filled(ticket, &[5; WINDOW as usize]);
        }
        true
    }

    /// Does one of what is neither Read nor place. False if there is nothing.
    fn other(&mut self, choice: u8) -> bool {
        if let Some(xid) = self.sends.pop_front() {
            self.service.handle_sent(xid, self.now);
        } else if let Some(len) = self.claims.pop_front() {
            let revoker: Revoker = Arc::new(|| ());
            let claim = if choice & 0x80 == 0 { self.store.try_claim(len, true, &revoker) } else { None };
            self.service.handle_claim(claim);
        } else if let Some(want) = self.segments.pop_front() {
            self.service.handle_segment(self.store.fill(want).ok());
        } else if std::mem::take(&mut self.is_retry_asked) {
            self.now += Duration::from_secs(4);
            self.service.handle_retry(self.now);
        } else if self.service.deadline().is_some_and(|deadline| deadline > self.now) {
            self.now = self.service.deadline().unwrap_or_default();
            self.service.handle_time(self.now);
        } else {
            return false;
        }
        true
    }

    fn finish(mut self) {
        let mut rounds = 0;
        loop {
            self.drive();
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "no rest");
            let read = self.reads.pop_front();
            if !(self.read(read) || self.fill(false) || self.other(0)) {
                break;
            }
        }
        assert!(!self.service.is_serving(), "a call has no answer");
        assert!(!self.service.is_posting() && self.slots.is_empty() && self.withheld == 0);
        let Self { service, store, files, .. } = self;
        drop(service);
        // No draft outlives its commit, and the store has room for all of them.
        assert_eq!(files.handle_time(u64::MAX), 0);
        let gauges = store.gauges();
        assert_eq!((gauges.pins, gauges.pinned_bytes, gauges.claims, gauges.claimed_bytes), (0, 0, 0, 0));
    }
}

fn file_system(store: &Store) -> FileSystem {
    FileSystem::new(store.clone(), Settings { fsid: 1, boot: 2, uid: 3, gid: 4 })
}

/// A call as the super-user makes it: its stream, with the place of its item, if it has one, at the end.
fn call_of(xid: u32, (program, version): (u32, u32), procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let sys = AuthSys { stamp: 1, machine_name: b"host", uid: 0, gid: 0, gids: vec![] }.body();
    let (credential, verifier) = (AuthSys::around(&sys), OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid: Xid(xid), program, version, procedure, credential, verifier }.write(&mut writer);
    arguments(&mut writer);
    writer.finish()
}

/// Messages of NFS and MOUNT.
fn nfs_messages(at: impl Fn(u32, u32) -> Segment) -> Vec<Vec<u8>> {
    let (root, mut xid) = (root_handle(), 200);
    let mut messages = Vec::new();
    let mut say = |procedure: u32,
                   (reads, writes, reply): (&[u32], &[u32], &[u32]),
                   arguments: &dyn Fn(&mut Writer)| {
        xid += 1;
        let program = match procedure {
            MOUNT.. => (mount::PROGRAM_NUMBER, mount::VERSION),
            _ => (nfs::PROGRAM_NUMBER, nfs::VERSION),
        };
        let stream = call_of(xid, program, procedure % MOUNT, arguments);
        let position = stream.len() as u32;
        let segments = |handle: u32, lengths: &[u32]| lengths.iter().map(|len| at(handle, *len)).collect::<Vec<_>>();
        let some = |segments: Vec<Segment>| if segments.is_empty() { None } else { Some(segments) };
        let lists = ChunkLists {
            reads: segments(1, reads).into_iter().map(|target| ReadSegment { position, target }).collect(),
            writes: some(segments(2, writes)).into_iter().collect(),
            reply: some(segments(3, reply)),
        };
        messages
            .push([Header { xid: Xid(xid), credit: 4, placement: Placement::Inline, lists }.encode(), stream].concat());
    };
    let (none, file) = ((&[][..], &[][..], &[][..]), |words: &mut Writer| words.opaque(FILE));
    let place = |name: &'static [u8]| {
        move |words: &mut Writer| {
            root.write(words);
            words.opaque(name);
        }
    };
    let read = |offset: u64, count: u32| {
        move |words: &mut Writer| {
            file(words);
            words.u64(offset);
            words.u32(count);
        }
    };
    let write = |offset: u64, len: u32, stable: u32, data: usize| {
        move |words: &mut Writer| {
            read(offset, len)(words);
            words.u32(stable);
            words.u32(len);
            words.encoded(&vec![9; data]);
        }
    };
    let list = |cookie: u64, count: u32| {
        move |words: &mut Writer| {
            root.write(words);
            words.u64(cookie);
            words.u64(0);
            words.u32(count);
            words.u32(count);
        }
    };
    use nfs::procedure as number;
    say(number::NULL, none, &|_| ());
    say(number::GETATTR, none, &file);
    say(number::LOOKUP, none, &place(b"k"));
    say(number::READ, (&[], &[4000, 5001, 3], &[]), &read(5, 9001));
    say(number::READ, none, &read(0, 300));
    say(number::READ, (&[], &[], &[9000, 9000]), &read(0, 9000));
    say(number::WRITE, none, &write(10, 300, 2, 300));
    say(number::WRITE, (&[4000, 5001, 3], &[], &[]), &write(20_000, 9001, 0, 0));
    say(number::WRITE, (&[9000], &[], &[]), &write(1 << 20, 9000, 1, 0));
    say(number::COMMIT, none, &read(0, 0));
    say(number::CREATE, none, &|words| {
        place(b"new")(words);
        words.u32(0);
        SetAttributes::default().write(words);
    });
    say(number::MKDIR, none, &|words| {
        place(b"dir")(words);
        SetAttributes::default().write(words);
    });
    say(number::SETATTR, none, &|words| {
        file(words);
        SetAttributes { size: Some(77), mode: Some(0o600), ..SetAttributes::default() }.write(words);
        words.u32(0);
    });
    say(number::RENAME, none, &|words| {
        place(b"k")(words);
        place(b"renamed")(words);
    });
    say(number::READDIR, none, &|words| {
        root.write(words);
        words.u64(0);
        words.u64(0);
        words.u32(600);
    });
    say(number::READDIRPLUS, (&[], &[], &[1000, 2000, 6000]), &list(0, 8000));
    say(number::SYMLINK, (&[100], &[], &[]), &|words| {
        place(b"link")(words);
        SetAttributes::default().write(words);
        words.u32(100);
    });
    say(number::FSSTAT, none, &|words| root.write(words));
    say(number::REMOVE, none, &place(b"new"));
    say(number::RMDIR, none, &place(b"dir"));
    say(MOUNT + mount::procedure::MNT, none, &|words| words.opaque(b"/"));
    say(MOUNT + mount::procedure::EXPORT, (&[], &[], &[30_000]), &|_| ());
    messages
}

/// Added to numbers of procedures of MOUNT.
const MOUNT: u32 = 1000;

/// That of every file system with these settings.
fn root_handle() -> FileHandle {
    let store = Store::with_files(Sizes {
        memory_bytes: 8 << 20,
        head_bytes: 64 << 10,
        value_bytes_max: 2 << 20,
        index_bytes_max: 1 << 20,
        pinned_share: 0.25,
        pool_bytes: vec![4 << 20],
    });
    file_system(&store.expect("8 MiB")).root()
}

fn plant() {
    let at = |handle: u32, length: u32| Segment { handle: RemoteKey(handle), length, offset: 1 << 40 };
    let range = |offset, count| RangeOf { key: key("k"), version: 0, offset, count };
    let get = |ranges| Request::Get(GetRequest { crc32c: true, deadline_us: 900, ranges });
    let more = PutMore { draft: 1, offset: 3000, commit: true, crc32c: None, data: Item { token: 0, len: 6000 } };
    let calls: [(Request<'_, Item>, Vec<u32>, Vec<Vec<u32>>, Option<u32>, bool); 12] = [
        (Request::Null, vec![], vec![], None, false),
        (put(0, 100, 100, true), vec![], vec![], None, true),
        (put(0, 9000, 9000, true), vec![4000, 5000], vec![], None, false),
        (put(1, 9000, 3000, false), vec![3000], vec![], None, false),
        (Request::PutMore(more), vec![6000], vec![], None, false),
        (Request::PutDrop { draft: 1 }, vec![], vec![], None, false),
        (get(vec![range(0, 9000)]), vec![], vec![vec![4000, 5000]], None, false),
        (get(vec![range(0, 90), range(5, 9000)]), vec![], vec![vec![], vec![]], Some(20_000), false),
        (Request::Stat(StatRequest { until_miss: false, keys: vec![key("k"), key("l")] }), vec![], vec![], None, false),
        (Request::Delete(vec![Deletion { key: key("k"), version: 0 }]), vec![], vec![], None, false),
        (
            Request::List(ListRequest { prefix: b"", cookie: b"", count: 9, bytes: 9000 }),
            vec![],
            vec![],
            Some(9000),
            false,
        ),
        (Request::Pin(vec![key("k")]), vec![], vec![], None, false),
    ];
    let mut messages: Vec<Vec<u8>> = Vec::new();
    for (xid, (request, reads, writes, reply, is_inline)) in (1..).zip(&calls) {
        let stream = stream(request, xid, *is_inline);
        let position = stream.len() as u32;
        let lists = ChunkLists {
            reads: reads.iter().map(|len| ReadSegment { position, target: at(1, *len) }).collect(),
            writes: writes.iter().map(|chunk| chunk.iter().map(|len| at(2, *len)).collect()).collect(),
            reply: reply.map(|len| vec![at(3, len)]),
        };
        let header = Header { xid: Xid(xid), credit: 4, placement: Placement::Inline, lists };
        messages.push([header.encode(), stream].concat());
    }
    for (xid, settings) in (100..).zip(0..4) {
        let target = at(4, memory(settings, xid).len() as u32);
        let lists = ChunkLists {
            reads: vec![ReadSegment { position: 0, target }],
            writes: vec![],
            reply: Some(vec![at(3, 9000)]),
        };
        messages.push(Header { xid: Xid(xid), credit: 4, placement: Placement::Chunk, lists }.encode());
    }
    let told = |message: &[u8]| [&[0][..], &(message.len() as u16).to_be_bytes(), message].concat();
    let done = [7, 4, 6, 7, 5, 6, 4, 6, 7, 7, 6];
    let each = messages.iter().enumerate().map(|(at, message)| [&[at as u8][..], &told(message), &done].concat());
    let all = messages.iter().flat_map(|message| told(message).into_iter().chain(done)).collect::<Vec<u8>>();
    let at_once = messages.iter().flat_map(|message| told(message)).chain(done).collect::<Vec<u8>>();
    let files = nfs_messages(at);
    let each_of_files = files.iter().map(|message| [&[8][..], &told(message), &done].concat());
    let files_in_turn = files.iter().flat_map(|message| told(message).into_iter().chain(done)).collect::<Vec<u8>>();
    let files_at_once = files.iter().flat_map(|message| told(message)).chain(done).collect::<Vec<u8>>();
    let together = [
        [&[0][..], &all].concat(),
        [&[1][..], &at_once].concat(),
        [&[9][..], &all, &files_in_turn].concat(),
        [&[10][..], &files_at_once, &at_once].concat(),
    ];
    seeds::plant(each.chain(each_of_files).chain(together));
}

fuzz_target!(init: plant(), |input: &[u8]| {
    let Some((settings, rest)) = input.split_first() else { return };
    let mut owner = Owner::new(*settings);
    let mut input = rest.iter().copied();
    while let Some(operation) = input.next() {
        match operation % 8 {
            0..=3 => {
                let len = usize::from(u16::from_be_bytes([input.next().unwrap_or(0), input.next().unwrap_or(0)]));
                let message: Vec<u8> = input.by_ref().take(len.min(INLINE as usize)).collect();
                owner.hear(&message);
            }
            4 => {
                let read = owner.reads.pop_front();
                owner.read(read);
            }
            5 => {
                // RDMA Reads end in their order on one queue pair; nothing here needs that they do.
                let read = owner.reads.pop_back();
                owner.read(read);
            }
            6 => {
                owner.fill(operation & 0x80 != 0);
            }
            _ => {
                owner.other(operation);
            }
        }
        owner.drive();
    }
    owner.finish();
});
