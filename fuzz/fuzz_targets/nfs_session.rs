//! A peer of the NFS door on TCP with a whole file system behind it: octets of a hostile stream in any cuts, sends, disk reads
//! that end in any order, fail or find no buffer, space that comes late. Whatever comes, replies are whole records with the xid
//! of a call, what waits to leave is bounded, and once all is over nothing is held.
//!
//! Input: `[settings: 1 | { operation: 1 | operands }…]`; operation modulo 8 is octets of the stream (0 to 3: length 2, octets),
//! octets that leave (4: length 2), a disk read that ends (5: which, how), what is given back (6), or all else (7).
#![no_main]

use bulkhead::fabric::staging::Staging;
use bulkhead::metrics::Metrics;
use bulkhead::programs::mount;
use bulkhead::programs::nfs::files::{Caller, Settings};
use bulkhead::programs::nfs::session::{Context, Session};
use bulkhead::programs::nfs::{
    self, Client, Create, CreateHow, Export, FileHandle, FileSystem, Name, Place, Rules, SetAttributes, procedure,
};
use bulkhead::programs::service::Shared;
use bulkhead::programs::stream::{Action, Ask, StreamSession, TailRead};
use bulkhead::store::draft::Want;
use bulkhead::store::pool::ExtentId;
use bulkhead::store::segment::Class;
use bulkhead::store::{Sizes, Store};
use bulkhead::wire::codec::{Codec, Writer};
use bulkhead::wire::onc_rpc::record::{Mark, marked};
use bulkhead::wire::onc_rpc::{AuthSys, CallHeader, OpaqueAuth, Xid};
use libfuzzer_sys::fuzz_target;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

#[path = "../seeds.rs"]
mod seeds;

const STAGING: usize = 5;
const FILE_BYTES: usize = 700_000;
/// Octets that may wait to leave: data of READs, messages, and one of each beyond the bound.
const WAITING_BYTES_MAX: usize = (4 << 20) + (1 << 20) + (64 << 10) + (400 << 10);
/// Rounds in which everything must come to rest.
const ROUNDS_MAX: usize = 100_000;

/// A store with a file on disk, one in RAM and a directory, and the handles of root, disk and RAM.
struct World {
    export: Arc<Export>,
    disk: HashMap<ExtentId, Vec<u8>>,
    handles: [FileHandle; 3],
}

impl World {
    fn new() -> Self {
        let store = Store::with_files(Sizes {
            memory_bytes: 4 << 20,
            head_bytes: 64 << 10,
            value_bytes_max: 2 << 20,
            index_bytes_max: 1 << 20,
            pinned_share: 0.5,
            pool_bytes: vec![4 << 20],
        })
        .expect("4 MiB");
        store.extents().add_file(0, 4 << 20);
        let files = FileSystem::new(store.clone(), Settings { fsid: 7, boot: 9, uid: 1, gid: 2 });
        let root = Caller { uid: 0, gid: 0, gids: Vec::new() };
        let mut create = |name: &'static [u8]| {
            let place = Place { dir: files.root(), name: Name(name) };
            let how = CreateHow::Guarded(SetAttributes::default());
            files.create(&root, &Create { place, how }).expect("a new file").obj.expect("its handle")
        };
        let [cold, warm] = [create(b"cold"), create(b"warm")];
        let handles = [files.root(), cold, warm];
        store.put(b"cold", &vec![5; FILE_BYTES], 0, 0).expect("there is room");
        store.put(b"warm", &[6; 5000], 0, 0).expect("there is room");
        store.put(b"dir/a", b"x", 0, 0).expect("there is room");
        let export = Arc::new(Export::new(Arc::new(files), Rules::default()));
        let mut world = Self { export, disk: HashMap::new(), handles };
        world.make_cold();
        world
    }

    fn store(&self) -> &Store {
        self.export.files().store()
    }

    fn write_behind(&mut self) {
        let store = self.store().clone();
        while let Some(job) = store.next_write(true) {
            self.disk.insert(job.extent, job.ram.as_slice()[..job.segment.len() as usize].to_vec());
            drop(job.ram);
            store.handle_written(&job.segment, usize::from(job.extent.drive()), Some([0; 4]));
        }
    }

    fn make_cold(&mut self) {
        self.write_behind();
        let mut held = Vec::new();
        while self.store().gauges().memory_clean_bytes > 0 {
            let want = Want { class: Class::Large, remaining: 32 << 10, head: false };
            let Ok(filling) = self.store().fill(want) else { break };
            held.push(filling);
        }
    }
}

struct Peer {
    session: Session,
    staging: Staging,
    reads: Vec<TailRead>,
    is_asked: bool,
    received: Vec<u8>,
    replies: usize,
}

impl Peer {
    fn new(world: &World, settings: u8) -> Self {
        let session = Session::new(Context {
            export: world.export.clone(),
            client: Client { address: IpAddr::from([192, 0, 2, 1]), is_allowed: settings & 1 == 0 },
            shared: Arc::new(Shared::default()),
            metrics: Arc::new(Metrics::default()),
            calls_max: 1 + usize::from(settings >> 4),
            reserve_wait_ms: if settings & 2 == 0 { 0 } else { u64::MAX },
        });
        let staging = Staging::new(STAGING).expect("five buffers");
        Self { session, staging, reads: Vec::new(), is_asked: false, received: Vec::new(), replies: 0 }
    }

    fn turn(&mut self) {
        self.session.process();
        while let Some(action) = self.session.poll_action() {
            match action {
                Action::Read(read) => self.reads.push(read),
                Action::Ask(Ask::Retry) => self.is_asked = true,
                Action::Ask(other) => panic!("{other:?}"),
            }
        }
        let waiting = self.session.gather(&mut Vec::new());
        assert!(waiting <= WAITING_BYTES_MAX, "{waiting} octets wait to leave");
        assert!(self.reads.len() <= 16, "{} reads at a time", self.reads.len());
    }

    fn feed(&mut self, mut octets: &[u8]) {
        while !octets.is_empty() && self.session.wants_input() {
            let (direct, buffer) = self.session.targets();
            assert!(direct.is_empty() && !buffer.is_empty());
            let count = buffer.len().min(octets.len());
            buffer[..count].copy_from_slice(&octets[..count]);
            self.session.handle_input(count);
            octets = &octets[count..];
            self.turn();
        }
    }

    fn send(&mut self, most: usize) -> usize {
        let mut slices = Vec::new();
        let offered = self.session.gather(&mut slices);
        let mut left = offered.min(most);
        let count = left;
        for slice in &slices {
            let part = &slice[..slice.len().min(left)];
            self.received.extend_from_slice(part);
            left -= part.len();
        }
        drop(slices);
        if count > 0 {
            self.session.handle_sent(count);
            self.turn();
        }
        while let Some((mark, behind)) = self.received.split_first_chunk::<4>() {
            let mark = Mark::read(*mark);
            assert!(mark.is_last && mark.len >= 20 && mark.len % 4 == 0, "{mark:?}");
            if behind.len() < mark.len as usize {
                break;
            }
            assert_eq!(behind[4..8], [0, 0, 0, 1], "a reply");
            self.replies += 1;
            self.received.drain(..4 + mark.len as usize);
        }
        count
    }

    /// `how`: it ends well, fails, or finds no buffer.
    fn read(&mut self, world: &World, which: u8, how: u8) {
        if self.reads.is_empty() {
            return;
        }
        let read = self.reads.swap_remove(usize::from(which) % self.reads.len());
        let buf = self.staging.try_take();
        match (how % 8, buf) {
            (0, _) => self.session.handle_read(read.ticket, None),
            (1, _) | (_, None) => self.session.handle_read_back(read.ticket),
            (_, Some(mut buf)) => {
                let octets = &world.disk[&read.extent];
                buf.as_mut_slice()[..octets.len()].copy_from_slice(octets);
                self.session.handle_read(read.ticket, Some(buf));
            }
        }
        self.turn();
    }

    fn retry(&mut self) {
        if std::mem::take(&mut self.is_asked) {
            self.session.handle_retry();
            self.turn();
        }
    }
}

fn call(program: u32, procedure: u32, arguments: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let sys = AuthSys { stamp: 1, machine_name: b"h", uid: 0, gid: 0, gids: vec![] }.body();
    let (xid, version, credential, verifier) = (Xid(7), 3, AuthSys::around(&sys), OpaqueAuth::NONE);
    let mut writer = Writer::new();
    CallHeader { xid, program, version, procedure, credential, verifier }.write(&mut writer);
    arguments(&mut writer);
    marked(&writer.finish())
}

fn plant() {
    let world = World::new();
    let [root, cold, warm] = world.handles;
    let words = |writer: &mut Writer, words: &[u32]| words.iter().for_each(|word| writer.u32(*word));
    let with = |number: u32, handle: FileHandle, rest: &[u32]| {
        call(nfs::PROGRAM_NUMBER, number, |writer| {
            handle.write(writer);
            words(writer, rest);
        })
    };
    let named = |number: u32, name: &[u8]| {
        call(nfs::PROGRAM_NUMBER, number, |writer| {
            root.write(writer);
            writer.opaque(name);
        })
    };
    let write = |handle: FileHandle, data: &[u8], stable: u32| {
        call(nfs::PROGRAM_NUMBER, procedure::WRITE, |writer| {
            handle.write(writer);
            words(writer, &[0, 100, data.len() as u32, stable]);
            writer.opaque(data);
        })
    };
    let mnt = call(mount::PROGRAM_NUMBER, mount::procedure::MNT, |writer| writer.opaque(b"/dir"));
    let streams = [
        with(procedure::READ, cold, &[0, 0, 600_000]),
        [with(procedure::READ, cold, &[0, 1000, 300_000]), with(procedure::READ, warm, &[0, 0, 9000])].concat(),
        write(warm, &[9; 1000], 2),
        [write(cold, &[9; 1000], 0), with(procedure::COMMIT, cold, &[0, 0, 0])].concat(),
        [named(procedure::LOOKUP, b"cold"), named(procedure::REMOVE, b"warm"), named(procedure::RMDIR, b"dir")]
            .concat(),
        with(procedure::READDIRPLUS, root, &[0, 0, 0, 0, 4096, 8192]),
        [mnt, with(procedure::FSINFO, root, &[]), with(procedure::SETATTR, warm, &[0; 7])].concat(),
    ];
    seeds::plant(streams.iter().flat_map(|stream| {
        let input = |settings: u8, cut: usize, between: &[u8]| {
            let mut input = vec![settings];
            for part in stream.chunks(cut) {
                input.push(0);
                input.extend((part.len() as u16).to_be_bytes());
                input.extend(part);
                input.extend(between);
            }
            input
        };
        [input(0xf0, 60_000, &[5, 0, 2, 4, 0xff, 0xff]), input(0x30, 77, &[5, 1, 0, 6, 0, 4, 0, 9, 7])]
    }));
}

fuzz_target!(init: plant(), |input: &[u8]| {
    let Some((settings, mut rest)) = input.split_first() else { return };
    let mut world = World::new();
    let mut peer = Peer::new(&world, *settings);
    while let Some((operation, behind)) = rest.split_first() {
        rest = behind;
        match operation % 8 {
            0..=4 => {
                let Some((len, behind)) = rest.split_first_chunk::<2>() else { break };
                let len = usize::from(u16::from_be_bytes(*len));
                if operation % 8 == 4 {
                    rest = behind;
                    peer.send(len);
                } else {
                    let (octets, behind) = behind.split_at(len.min(behind.len()));
                    rest = behind;
                    peer.feed(octets);
                }
            }
            5 => {
                let Some(([which, how], behind)) = rest.split_first_chunk::<2>() else { break };
                rest = behind;
                peer.read(&world, *which, *how);
            }
            6 => {
                let count = peer.session.give_back();
                assert!(count <= STAGING);
                peer.session.give_back_memory();
                peer.turn();
            }
            _ => {
                world.make_cold();
                peer.retry();
                world.export.files().handle_time(u64::MAX);
            }
        }
    }
    // The peer sends no more, and takes all that there is.
    peer.session.handle_eof();
    peer.turn();
    let mut rounds = 0;
    while peer.session.ended().is_none() {
        rounds += 1;
        assert!(rounds < ROUNDS_MAX, "it comes to no end");
        world.write_behind();
        world.export.files().handle_time(u64::MAX);
        peer.retry();
        peer.read(&world, 0, 7);
        peer.send(usize::MAX);
        // Who finds no buffer asks again.
        peer.turn();
    }
    let Peer { session, staging, .. } = peer;
    drop(session);
    assert_eq!(staging.available(), STAGING);
    world.write_behind();
    world.export.files().handle_time(u64::MAX);
    assert_eq!(world.store().gauges().pins, 0);
});
