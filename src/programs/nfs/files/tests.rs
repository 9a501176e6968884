//! The file system against a map, with other doors in between; and what it promises, one by one.

#[path = "../../../../tests/rig/mod.rs"]
pub mod rig;

use super::*;
use crate::programs::nfs::types::{Cookie, CreateVerifier, Name, Place, Stable};
use crate::programs::nfs::{
    Commit, Create, CreateHow, MakeDirectory, Read, ReadDirectory, ReadDirectoryPlus, Rename, WriteDone,
};
use crate::store::Sizes;
use crate::store::namespace::Query;
use crate::store::segment::Content;
use crate::wire::codec::{Codec, Reader};
use rig::{Seeded, for_each_seed, octets};
use std::collections::{BTreeMap, BTreeSet, HashMap};

const MIB: u64 = 1 << 20;

fn sizes() -> Sizes {
    Sizes {
        memory_bytes: 32 * MIB,
        head_bytes: 64 << 10,
        value_bytes_max: MIB,
        index_bytes_max: 64 * MIB,
        pinned_share: 0.5,
        pool_bytes: vec![32 * MIB],
    }
}

fn system_of(sizes: Sizes, boot: u64) -> FileSystem {
    let pool_bytes = sizes.pool_bytes[0];
    let store = Store::with_files(sizes).unwrap();
    store.extents().add_file(0, pool_bytes);
    FileSystem::new(store, Settings { fsid: 7, boot, uid: 1, gid: 2 })
}

fn system() -> FileSystem {
    system_of(sizes(), 9)
}

fn root() -> Caller {
    user(0)
}

fn user(uid: u32) -> Caller {
    Caller { uid, gid: uid, gids: Vec::new() }
}

/// One entry of READDIRPLUS.
#[derive(Clone, Debug)]
struct Found {
    name: Vec<u8>,
    cookie: Cookie,
    attributes: Attributes,
    handle: FileHandle,
}

fn decode(listing: &super::super::Listing) -> (Vec<Found>, bool) {
    let mut reader = Reader::new(listing.as_bytes());
    let _attributes = Option::<Attributes>::read(&mut reader).unwrap();
    let _verifier = CookieVerifier::read(&mut reader).unwrap();
    let mut found = Vec::new();
    while reader.bool().unwrap() {
        let fileid = FileId::read(&mut reader).unwrap();
        let name = reader.opaque(255).unwrap().to_vec();
        let cookie = Cookie::read(&mut reader).unwrap();
        let attributes = Option::<Attributes>::read(&mut reader).unwrap().unwrap();
        let handle = Option::<FileHandle>::read(&mut reader).unwrap().unwrap();
        assert_eq!(attributes.fileid, fileid);
        found.push(Found { name, cookie, attributes, handle });
    }
    let eof = reader.bool().unwrap();
    reader.finish().unwrap();
    (found, eof)
}

impl FileSystem {
    fn open(&self, path: &[u8]) -> Result<FileHandle, NfsError> {
        let mut handle = self.root();
        for name in path.split(|octet| *octet == b'/').filter(|name| !name.is_empty()) {
            handle =
                self.lookup(&root(), &Place { dir: handle, name: Name(name) }).map_err(|failure| failure.error)?.object;
        }
        Ok(handle)
    }

    fn page_of(&self, dir: FileHandle, cookie: Cookie, maxcount: u32) -> Result<(Vec<Found>, bool, usize), NfsError> {
        let verifier = if cookie.0 == 0 { CookieVerifier([0; 8]) } else { self.cookie_verifier() };
        let arguments = ReadDirectoryPlus { dir, cookie, verifier, dircount: maxcount, maxcount };
        let page = self.read_directory_plus(&root(), &arguments).map_err(|failure| failure.error)?;
        let (found, eof) = decode(&page.listing);
        assert_eq!(found.len(), page.entries);
        Ok((found, eof, page.looked))
    }

    /// All entries but `.` and `..`.
    fn entries(&self, dir: FileHandle, maxcount: u32) -> Vec<Found> {
        let mut all: Vec<Found> = Vec::new();
        loop {
            let cookie = all.last().map_or(Cookie(0), |last| last.cookie);
            let (found, eof, _) = self.page_of(dir, cookie, maxcount).unwrap();
            all.extend(found);
            if eof {
                break;
            }
        }
        assert_eq!((&all[0].name[..], &all[1].name[..]), (&b"."[..], &b".."[..]));
        all.split_off(2)
    }

    fn contents(&self, file: FileHandle, offset: u64, count: u32) -> Result<(Vec<u8>, bool), NfsError> {
        let reading = self.read(&root(), &Read { file, offset, count }).map_err(|failure| failure.error)?;
        let mut octets = Vec::new();
        for piece in &reading.pieces {
            let Content::Ram(ram) = piece.segment.content() else { panic!("all of it is in RAM") };
            octets.extend_from_slice(piece.octets(&ram));
        }
        assert_eq!(octets.len(), reading.len as usize);
        Ok((octets, reading.eof))
    }

    fn put(&self, file: FileHandle, offset: u64, octets: &[u8], stable: Stable) -> Result<WriteDone, NfsError> {
        let error = |failure: Failure<WccData>| failure.error;
        let len = octets.len() as u32;
        let mut writing = self.begin_write(&root(), &file, offset, len).map_err(error)?;
        let mut rest = octets;
        while !rest.is_empty() {
            match self.write(&mut writing, &rest[..rest.len().min(70_000)]) {
                WriteStep::Done(count) => rest = &rest[count..],
                WriteStep::Wait(_) | WriteStep::Refused(_) => break,
            }
        }
        self.end_write(writing, len, stable).map_err(error)
    }

    fn make(&self, dir: FileHandle, name: &[u8]) -> Result<FileHandle, NfsError> {
        let how = CreateHow::Guarded(SetAttributes::default());
        let made = self.create(&root(), &Create { place: Place { dir, name: Name(name) }, how });
        made.map(|made| made.obj.unwrap()).map_err(|failure| failure.error)
    }

    fn make_dir(&self, dir: FileHandle, name: &[u8]) -> Result<FileHandle, NfsError> {
        let attributes = SetAttributes::default();
        let made = self.make_directory(&root(), &MakeDirectory { place: Place { dir, name: Name(name) }, attributes });
        made.map(|made| made.obj.unwrap()).map_err(|failure| failure.error)
    }

    fn resize(&self, object: FileHandle, size: u64) -> Result<(), NfsError> {
        let new_attributes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        let set = self.set_attr(&root(), &SetAttr { object, new_attributes, guard: None });
        set.map(|_| ()).map_err(|failure| failure.error)
    }

    fn take(&self, dir: FileHandle, name: &[u8]) -> Result<(), NfsError> {
        let taken = self.remove(&root(), &Place { dir, name: Name(name) });
        taken.map(|_| ()).map_err(|failure| failure.error)
    }

    fn take_dir(&self, dir: FileHandle, name: &[u8]) -> Result<(), NfsError> {
        let taken = self.remove_directory(&root(), &Place { dir, name: Name(name) });
        taken.map(|_| ()).map_err(|failure| failure.error)
    }

    fn mv(&self, from: (FileHandle, &[u8]), to: (FileHandle, &[u8])) -> Result<(), NfsError> {
        let place = |(dir, name)| Place { dir, name: Name(name) };
        let moved = self.rename(&root(), &Rename { from: place(from), to: place(to) });
        moved.map(|_| ()).map_err(|failure| failure.error)
    }

    fn sync(&self, file: FileHandle) -> Result<(), NfsError> {
        let synced = self.commit(&root(), &Commit { file, offset: 0, count: 0 });
        synced.map(|_| ()).map_err(|failure| failure.error)
    }

    fn attributes_of(&self, object: FileHandle) -> Result<Attributes, NfsError> {
        self.get_attr(&object).map_err(|failure| failure.error)
    }

    fn other_door(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.store.peek(key, self.store.clock().now()).map(|object| {
            let mut octets = Vec::new();
            for piece in object.pieces() {
                let Content::Ram(ram) = piece.segment.content() else { panic!("all of it is in RAM") };
                octets.extend_from_slice(piece.octets(&ram));
            }
            octets
        })
    }
}

/// What there should be.
#[derive(Default)]
struct Model {
    /// What other doors see.
    objects: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What this door sees in their place.
    drafts: HashMap<Vec<u8>, Vec<u8>>,
    made: BTreeSet<Vec<u8>>,
    /// Handles of files that are there.
    handles: HashMap<Vec<u8>, FileHandle>,
    stale: Vec<FileHandle>,
}

/// The directory of a path without a delimiter at its end, and the name in it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let at = path.iter().rposition(|octet| *octet == b'/').map_or(0, |at| at + 1);
    path.split_at(at)
}

impl Model {
    fn is_dir(&self, path: &[u8]) -> bool {
        path.is_empty() || self.made.iter().any(|made| made.starts_with(path)) || self.has_keys(path)
    }

    fn has_keys(&self, path: &[u8]) -> bool {
        self.objects.keys().any(|key| key.starts_with(path))
    }

    fn is_empty(&self, path: &[u8]) -> bool {
        !self.has_keys(path) && !self.made.iter().any(|made| made.starts_with(path) && made != path)
    }

    /// What a path without a delimiter at its end names: `None`, a file, or a directory.
    fn kind(&self, path: &[u8]) -> Option<FileType> {
        if self.is_dir(&[path, b"/"].concat()) {
            Some(FileType::Directory)
        } else {
            self.objects.contains_key(path).then_some(FileType::Regular)
        }
    }

    fn seen(&self, key: &[u8]) -> &Vec<u8> {
        self.drafts.get(key).unwrap_or_else(|| &self.objects[key])
    }

    /// A key goes; its handle is good for nothing any more.
    fn forget(&mut self, key: &[u8]) {
        self.objects.remove(key);
        self.drafts.remove(key);
        self.stale.extend(self.handles.remove(key));
    }

    fn publish(&mut self, key: &[u8]) {
        if let Some(draft) = self.drafts.remove(key) {
            self.objects.insert(key.to_vec(), draft);
        }
    }

    fn keep(&mut self, dir: &[u8]) {
        if !dir.is_empty() {
            self.made.insert(dir.to_vec());
        }
    }

    /// Names in a directory, and whether they are directories.
    fn names(&self, dir: &[u8]) -> BTreeMap<Vec<u8>, bool> {
        let mut names = BTreeMap::new();
        let places = self.objects.keys().chain(&self.made);
        for rest in places.filter_map(|place| place.strip_prefix(dir)) {
            let end = rest.iter().position(|octet| *octet == b'/');
            let name = &rest[..end.unwrap_or(rest.len())];
            if is_good(name) {
                *names.entry(name.to_vec()).or_default() |= end.is_some();
            }
        }
        names
    }
}

fn is_good(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..") && name.len() <= 255
}

/// Holds all of a directory against the model, and what is below it.
fn compare(system: &FileSystem, model: &mut Model, dir: &[u8], handle: FileHandle, maxcount: u32) {
    let found = system.entries(handle, maxcount);
    let wanted = model.names(dir);
    let names: BTreeMap<_, _> =
        found.iter().map(|entry| (entry.name.clone(), entry.attributes.kind == FileType::Directory)).collect();
    assert_eq!(names, wanted, "in {:?}", dir.escape_ascii().to_string());
    assert_eq!(found.len(), wanted.len(), "an entry is there twice");
    for entry in found {
        let path = [dir, &entry.name].concat();
        assert_eq!(system.attributes_of(entry.handle), Ok(entry.attributes));
        if entry.attributes.kind == FileType::Directory {
            compare(system, model, &[&path, &b"/"[..]].concat(), entry.handle, maxcount);
            continue;
        }
        let octets = model.seen(&path);
        assert_eq!(entry.attributes.size, octets.len() as u64);
        assert!(system.contents(entry.handle, 0, MIB as u32).unwrap() == (octets.clone(), true));
        assert_eq!(*model.handles.entry(path).or_insert(entry.handle), entry.handle, "it is the same file still");
    }
}

fn name(random: &mut Seeded) -> &'static [u8] {
    const NAMES: [&[u8]; 4] = [b"a", b"b", b"a-", b"c0"];
    NAMES[random.below(4) as usize]
}

fn path(random: &mut Seeded) -> Vec<u8> {
    let count = 1 + random.below(3);
    (0..count).map(|_| name(random)).collect::<Vec<_>>().join(&b'/')
}

#[test]
fn it_agrees_with_a_map_whatever_other_doors_do() {
    for_each_seed(0..60, |seed| {
        let mut random = Seeded::new(seed);
        let system = system();
        let store = system.store.clone();
        let now = store.clock().now();
        let mut model = Model::default();
        let mut now_ms = store.clock().now_ms();
        for _ in 0..250 {
            let path = path(&mut random);
            let (dir, name) = split(&path);
            let at = system.open(dir);
            let is_dir = model.is_dir(dir);
            assert_eq!(at.is_ok() && system.directory(&at.unwrap()).is_ok(), is_dir, "{}", path.escape_ascii());
            let kind = model.kind(&path);
            match random.below(20) {
                // Other doors.
                0..=2 => {
                    let key = match random.below(8) {
                        0 => [&path[..], b"//x"].concat(),
                        1 => [&path[..], b"/./x"].concat(),
                        2 => [&path[..], b"/"].concat(),
                        3 => [&path[..], b"/", &[b'n'; 256]].concat(),
                        _ => path.clone(),
                    };
                    let value = octets(random.next(), random.below(100_000) as usize);
                    store.put(&key, &value, 3, 0).unwrap();
                    model.drafts.remove(&key);
                    model.objects.insert(key, value);
                }
                3 | 4 => {
                    // Also what has no name here.
                    let some = model.objects.keys().nth(random.below(20) as usize).filter(|_| random.one_in(2));
                    let key = some.cloned().unwrap_or(path);
                    assert_eq!(store.delete(&key, now), model.objects.contains_key(&key));
                    model.forget(&key);
                }
                5 if random.one_in(10) => {
                    store.flush_all(0);
                    for key in model.objects.keys().cloned().collect::<Vec<_>>() {
                        model.forget(&key);
                        _ = store.get(&key, now);
                    }
                }
                6 => {
                    now_ms += 1100;
                    assert_eq!(system.handle_time(now_ms.max(store.clock().now_ms() + 1100)), 0);
                    for key in model.drafts.keys().cloned().collect::<Vec<_>>() {
                        model.publish(&key);
                    }
                }
                _ if !is_dir => {}
                7 | 8 => {
                    let made = system.make(at.unwrap(), name);
                    if kind.is_some() {
                        assert_eq!(made, Err(NfsError::Exist));
                    } else {
                        model.handles.insert(path.clone(), made.unwrap());
                        model.objects.insert(path.clone(), Vec::new());
                    }
                }
                9 | 10 => {
                    let made = system.make_dir(at.unwrap(), name);
                    assert_eq!(made.is_ok(), kind.is_none(), "{made:?}");
                    if made.is_ok() {
                        model.made.insert([&path, &b"/"[..]].concat());
                    }
                }
                11 => {
                    let taken = system.take(at.unwrap(), name);
                    match kind {
                        None => assert_eq!(taken, Err(NfsError::NoEnt)),
                        Some(FileType::Directory) => assert_eq!(taken, Err(NfsError::IsDir)),
                        Some(_) => {
                            assert_eq!(taken, Ok(()));
                            model.keep(dir);
                            model.forget(&path);
                        }
                    }
                }
                12 => {
                    let taken = system.take_dir(at.unwrap(), name);
                    let inner = [&path, &b"/"[..]].concat();
                    match kind {
                        None => assert_eq!(taken, Err(NfsError::NoEnt)),
                        Some(FileType::Regular) => assert_eq!(taken, Err(NfsError::NotDir)),
                        Some(_) if !model.is_empty(&inner) => assert_eq!(taken, Err(NfsError::NotEmpty)),
                        Some(_) => {
                            assert_eq!(taken, Ok(()));
                            model.keep(dir);
                            model.made.remove(&inner);
                        }
                    }
                }
                13 | 14 => rename(&mut random, &system, &mut model, &path),
                _ if kind == Some(FileType::Regular) => {
                    let file = system.open(&path).unwrap();
                    let mut wanted = model.seen(&path).clone();
                    match random.below(5) {
                        0 => {
                            let size = random.below(200_000);
                            system.resize(file, size).unwrap();
                            wanted.resize(size as usize, 0);
                            model.drafts.insert(path.clone(), wanted);
                        }
                        1 => {
                            system.sync(file).unwrap();
                            model.publish(&path);
                        }
                        way => {
                            let (offset, len) = (random.below(150_000) as usize, 1 + random.below(150_000) as usize);
                            let new = octets(random.next(), len);
                            let stable = if way == 2 { Stable::FileSync } else { Stable::Unstable };
                            let done = system.put(file, offset as u64, &new, stable).unwrap();
                            assert_eq!((done.count as usize, done.committed), (len, stable));
                            wanted.resize(wanted.len().max(offset + len), 0);
                            wanted[offset..offset + len].copy_from_slice(&new);
                            assert_eq!(done.file_wcc.after.unwrap().size, wanted.len() as u64);
                            model.drafts.insert(path.clone(), wanted);
                            if way == 2 {
                                model.publish(&path);
                            }
                        }
                    }
                }
                _ => {}
            }
            for (key, value) in &model.objects {
                assert!(system.other_door(key).as_ref() == Some(value), "{}", key.escape_ascii());
            }
            if random.one_in(5) {
                let maxcount = *random.pick(&[600, 1000, 65_536]);
                compare(&system, &mut model, b"", system.root(), maxcount);
            }
            for (key, handle) in &model.handles {
                assert!(matches!(system.node(handle), Ok(Node::File(record, _)) if record.key() == &key[..]));
            }
            for stale in &model.stale {
                assert_eq!(system.attributes_of(*stale), Err(NfsError::Stale));
            }
        }
        assert!(store.gauges().claims as usize <= system.drafts_left(), "claims are of drafts");
        system.handle_time(u64::MAX);
        let gauges = store.gauges();
        assert_eq!((gauges.claims, gauges.pins, gauges.names), (0, 0, gauges.objects));
    });
}

fn rename(random: &mut Seeded, system: &FileSystem, model: &mut Model, from: &[u8]) {
    let to = path(random);
    let ((from_dir, from_name), (to_dir, to_name)) = (split(from), split(&to));
    if !model.is_dir(to_dir) {
        return;
    }
    let (kind, target) = (model.kind(from), model.kind(&to));
    let (inner, to_inner) = ([from, b"/"].concat(), [&to, &b"/"[..]].concat());
    let moved = system.mv((system.open(from_dir).unwrap(), from_name), (system.open(to_dir).unwrap(), to_name));
    match (kind, target) {
        (None, _) => assert_eq!(moved, Err(NfsError::NoEnt)),
        (Some(FileType::Regular), Some(FileType::Directory)) => assert_eq!(moved, Err(NfsError::IsDir)),
        (Some(FileType::Directory), Some(FileType::Regular)) => assert_eq!(moved, Err(NfsError::NotDir)),
        _ if from == to => assert_eq!(moved, Ok(())),
        (Some(FileType::Regular), _) => {
            assert_eq!(moved, Ok(()));
            model.publish(from);
            model.forget(&to);
            model.keep(from_dir);
            let (value, handle) = (model.objects.remove(from).unwrap(), model.handles.remove(from));
            model.objects.insert(to.clone(), value);
            model.handles.extend(handle.map(|handle| (to, handle)));
        }
        _ if to_inner.starts_with(&inner) => assert_eq!(moved, Err(NfsError::Inval)),
        _ if !model.is_empty(&to_inner) => assert_eq!(moved, Err(NfsError::NotEmpty)),
        _ => {
            assert_eq!(moved, Ok(()), "{} to {}", from.escape_ascii(), to.escape_ascii());
            model.keep(from_dir);
            model.made.remove(&to_inner);
            let there = |place: &[u8]| [&to_inner, &place[inner.len()..]].concat();
            for key in model.objects.keys().filter(|key| key.starts_with(&inner)).cloned().collect::<Vec<_>>() {
                model.publish(&key);
                let value = model.objects.remove(&key).unwrap();
                model.objects.insert(there(&key), value);
                let handle = model.handles.remove(&key);
                model.handles.extend(handle.map(|handle| (there(&key), handle)));
            }
            for made in model.made.iter().filter(|made| made.starts_with(&inner)).cloned().collect::<Vec<_>>() {
                model.made.remove(&made);
                model.made.insert(there(&made));
            }
        }
    }
}

#[test]
fn the_root_is_the_same_after_a_restart_and_every_other_handle_is_stale() {
    let before = system_of(sizes(), 1);
    let file = before.make(before.root(), b"file").unwrap();
    before.make_dir(before.root(), b"dir").unwrap();
    let after = system_of(sizes(), 2);
    assert_eq!(before.root(), after.root());
    assert_eq!(after.attributes_of(file), Err(NfsError::Stale));
    assert_eq!(after.attributes_of(before.root()).unwrap().fileid, FileId(1));
    assert_ne!(before.write_verifier(), after.write_verifier());
    let mut other = file.as_bytes().to_vec();
    other[0] ^= 1;
    for bad in [&other[..], &other[1..], b""] {
        assert_eq!(after.attributes_of(FileHandle::new(bad).unwrap()), Err(NfsError::BadHandle));
    }
    let cookie = before.page_of(before.root(), Cookie(0), 4096).unwrap().0.last().unwrap().cookie;
    assert_eq!(after.page_of(after.root(), cookie, 4096).unwrap_err(), NfsError::BadCookie);
    let old = ReadDirectory { dir: after.root(), cookie: Cookie(2), verifier: before.cookie_verifier(), count: 4096 };
    assert_eq!(after.read_directory(&root(), &old).unwrap_err().error, NfsError::BadCookie);
}

/// A page of a directory of 100,000 objects looks at hardly more names than it has, wherever it begins, and so does one of as many directories.
#[test]
fn a_page_costs_what_it_has_whatever_the_directory_has() {
    const COUNT: usize = 100_000;
    for inner in ["", "/x"] {
        let system = system_of(Sizes { index_bytes_max: 1 << 30, ..sizes() }, 9);
        for number in 0..COUNT {
            system.store.put(format!("dir/{number:06}{inner}").as_bytes(), b"", 0, 0).unwrap();
            // Neighbours that are no entries of it.
            if number % 10 == 0 {
                system.store.put(format!("dir/000000{inner}/{number}").as_bytes(), b"", 0, 0).unwrap();
            }
        }
        let dir = system.open(b"dir").unwrap();
        let (mut cookie, mut count) = (Cookie(0), 0);
        loop {
            let (found, eof, looked) = system.page_of(dir, cookie, 32 << 10).unwrap();
            assert!(looked <= found.len() + 64, "{looked} names for {} entries", found.len());
            count += found.len();
            cookie = found.last().unwrap().cookie;
            if eof {
                break;
            }
        }
        assert_eq!(count, COUNT + 2);
    }
}

/// Other doors may put any number of keys into a directory that have no name there. A page walked over all of them.
#[test]
fn keys_that_have_no_name_cost_a_page_nothing() {
    let system = system_of(Sizes { index_bytes_max: 1 << 30, ..sizes() }, 9);
    let store = &system.store;
    let before = store.gauges().index_bytes;
    let long = |number: u32, end: &str| format!("dir/{number:05}{}{end}", "n".repeat(255)).into_bytes();
    let mut nameless: Vec<_> =
        (0..20_000).map(|number| long(number, if number % 2 == 0 { "" } else { "/x" })).collect();
    nameless.extend((0..5000).map(|number| format!("dir/with\0{number}").into_bytes()));
    nameless.extend([&b"dir/"[..], b"dir/.", b"dir/../x", b"dir//x", b"dir/deep/er//x"].map(<[u8]>::to_vec));
    for key in nameless.iter().chain([b"dir/one".to_vec(), b"dir/zwei/x".to_vec()].iter()) {
        store.put(key, b"", 0, 0).unwrap();
    }
    let dir = system.open(b"dir").unwrap();
    let names = |found: &[Found]| found.iter().map(|entry| entry.name.clone()).collect::<Vec<_>>();
    let (found, eof, looked) = system.page_of(dir, Cookie(0), 32 << 10).unwrap();
    assert_eq!(names(&found), [&b"."[..], b"..", b"deep", b"one", b"zwei"]);
    assert!(eof && looked <= 5, "{looked} names for {} entries", found.len());
    assert_eq!(names(&system.entries(found[2].handle, 4096)), [b"er"]);
    // Other doors see all of them, in order, and the directory is not empty for them alone.
    let now = store.clock().now();
    let listed = store.list(&Query::new(b"", usize::MAX), now).unwrap().entries;
    assert!(listed.len() == nameless.len() + 2 && listed.is_sorted_by(|one, other| one.name < other.name));
    assert!(store.delete(b"dir/one", now) && store.delete(b"dir/zwei/x", now));
    assert_eq!(system.take_dir(system.root(), b"dir"), Err(NfsError::NotEmpty));
    // Where only they were in it, it is there as long as one of them lives.
    for key in &nameless {
        assert!(system.open(b"dir").is_ok() && store.delete(key, now));
    }
    assert_eq!(system.entries(system.root(), 4096).len(), 0);
    assert_eq!(store.gauges().names, 0);
    // What is left are the places of what was listed, and the directories that somebody asked for.
    let left = store.gauges().index_bytes - before;
    assert!(left < 4096, "{left} octets");
}

/// `rm -r` and `mv *` go on behind entries that they took out.
#[test]
fn a_listing_goes_on_behind_what_was_removed_and_renamed_meanwhile() {
    let system = system();
    let (from, to) = (system.make_dir(system.root(), b"from").unwrap(), system.make_dir(system.root(), b"to").unwrap());
    for number in 0..300 {
        system.store.put(format!("from/{number:03}").as_bytes(), b"", 0, 0).unwrap();
        system.make_dir(from, format!("{number:03}-dir").as_bytes()).unwrap();
    }
    let (mut cookie, mut count) = (Cookie(0), 0);
    loop {
        let (found, eof, _) = system.page_of(from, cookie, 2000).unwrap();
        for entry in found.iter().filter(|entry| !entry.name.starts_with(b".")) {
            count += 1;
            match (entry.attributes.kind, count % 3) {
                (FileType::Directory, 0) => system.mv((from, &entry.name), (to, &entry.name)).unwrap(),
                (FileType::Directory, _) => system.take_dir(from, &entry.name).unwrap(),
                (_, 0) => system.mv((from, &entry.name), (to, &entry.name)).unwrap(),
                (_, 1) => assert!(system.store.delete(&[b"from/", &entry.name[..]].concat(), 0)),
                _ => system.take(from, &entry.name).unwrap(),
            }
        }
        cookie = found.last().unwrap().cookie;
        if eof {
            break;
        }
    }
    assert_eq!(count, 600);
    assert!(system.entries(from, 4096).is_empty());
}

#[test]
fn times_of_a_directory_change_with_its_entries_and_not_with_what_lies_deeper() {
    let system = system();
    let store = &system.store;
    store.put(b"a/b/one", b"", 0, 0).unwrap();
    let handles = [system.root(), system.open(b"a").unwrap(), system.open(b"a/b").unwrap()];
    let times = || handles.map(|handle| system.attributes_of(handle).map(|found| (found.mtime, found.ctime)));
    let mut before = times();
    let mut expect = |what: &str, changed: [bool; 3]| {
        let after = times();
        let found: Vec<_> = before.iter().zip(&after).map(|(before, after)| before != after).collect();
        assert_eq!(found, changed, "{what}");
        before = after;
    };
    store.put(b"a/b/one", b"again", 0, 0).unwrap();
    expect("overwritten", [false, false, false]);
    store.put(b"a/b/two", b"", 0, 0).unwrap();
    expect("a key more", [false, false, true]);
    store.delete(b"a/b/two", 0);
    expect("a key less", [false, false, true]);
    store.put(b"a/c/d/e", b"", 0, 0).unwrap();
    expect("a directory more", [false, true, false]);
    store.delete(b"a/c/d/e", 0);
    expect("a directory less", [false, true, false]);
    system.make_dir(handles[1], b"made").unwrap();
    expect("made", [false, true, false]);
    store.put(b"a/made/x", b"", 0, 0).unwrap();
    expect("below a made one", [false, false, false]);
    system.mv((handles[2], b"one"), (handles[0], b"one")).unwrap();
    expect("moved", [true, false, true]);
}

#[test]
fn what_a_client_is_told_of_a_directory_is_its_own_change_alone() {
    let system = system();
    let dir = system.make_dir(system.root(), b"dir").unwrap();
    let create = |name: &'static [u8]| {
        let place = Place { dir, name: Name(name) };
        system.create(&root(), &Create { place, how: CreateHow::Unchecked(SetAttributes::default()) }).unwrap()
    };
    let known = system.attributes_of(dir).unwrap();
    let made = create(b"one");
    assert_eq!(made.dir_wcc.before, Some(WccAttributes::from(&known)));
    assert_eq!(made.dir_wcc.after, Some(system.attributes_of(dir).unwrap()));
    assert_eq!(create(b"one").dir_wcc.before, made.dir_wcc.after.as_ref().map(WccAttributes::from));
    let removed = system.remove(&root(), &Place { dir, name: Name(b"one") }).unwrap();
    assert_eq!(removed.before, made.dir_wcc.after.as_ref().map(WccAttributes::from));
}

#[test]
fn names_and_paths_that_are_too_long_are_said_to_be() {
    let system = system();
    let mut dir = system.root();
    let mut path = Vec::new();
    while path.len() + 201 < 1000 {
        dir = system.make_dir(dir, &[b'd'; 200]).unwrap();
        path.extend([&[b'd'; 200][..], b"/"].concat());
    }
    let room = 1024 - path.len();
    let name = vec![b'n'; 255];
    assert_eq!(system.make(dir, &name[..room + 1]), Err(NfsError::NameTooLong));
    assert!(system.make(dir, &name[..room]).is_ok());
    assert_eq!(system.make_dir(dir, &name[..room]), Err(NfsError::Exist));
    assert_eq!(system.make_dir(dir, &[b'm'; 255][..room]), Err(NfsError::NameTooLong));
    assert!(system.make_dir(dir, &[b'm'; 255][..room - 1]).is_ok());
    assert_eq!(system.make(system.root(), &[b'n'; 256]), Err(NfsError::NameTooLong));
    let (source, far) =
        (system.make_dir(system.root(), b"s").unwrap(), system.make_dir(system.root(), b"far").unwrap());
    system.make(source, &[b'n'; 100]).unwrap();
    assert_eq!(
        system.mv((system.root(), b"s"), (dir, b"s")),
        if room > 103 { Ok(()) } else { Err(NfsError::NameTooLong) }
    );
    let _ = far;
}

#[test]
fn a_directory_of_many_keys_moves_in_one_step_or_not_at_all() {
    let system = system_of(Sizes { index_bytes_max: 1 << 30, ..sizes() }, 9);
    let root_dir = system.root();
    for number in 0..tree::RENAMED_KEYS_MAX {
        system.store.put(format!("from/{:02}/{number}", number % 50).as_bytes(), b"", 0, 0).unwrap();
    }
    let inner = system.open(b"from/07").unwrap();
    let file = system.open(b"from/07/57").unwrap();
    let ids = system.attributes_of(file).unwrap().fileid;
    system.mv((root_dir, b"from"), (root_dir, b"to")).unwrap();
    assert_eq!(system.store.gauges().names, tree::RENAMED_KEYS_MAX as u64);
    assert_eq!(system.open(b"to/07"), Ok(inner), "it is the same directory");
    assert_eq!(system.open(b"to/07/57"), Ok(file));
    assert_eq!(system.attributes_of(file).unwrap().fileid, ids);
    assert_eq!(system.entries(inner, 65_536).len(), tree::RENAMED_KEYS_MAX / 50);
    assert_eq!(system.open(b"from"), Err(NfsError::NoEnt));
    system.store.put(b"to/one more", b"", 0, 0).unwrap();
    assert_eq!(system.mv((root_dir, b"to"), (root_dir, b"from")), Err(NfsError::Xdev));
    assert_eq!(system.open(b"to/07/57"), Ok(file));
    assert_eq!(system.open(b"from"), Err(NfsError::NoEnt));
}

#[test]
fn attributes_are_defaults_until_they_are_set_and_outlive_other_doors() {
    let system = system();
    let store = &system.store;
    store.put(b"dir/file", b"octets", 5, 0).unwrap();
    let (dir, file) = (system.open(b"dir").unwrap(), system.open(b"dir/file").unwrap());
    let found = system.attributes_of(file).unwrap();
    assert_eq!((found.mode, found.uid, found.gid, found.size, found.nlink), (0o644, 1, 2, 6, 1));
    assert!(found.mtime == found.ctime && u64::from(found.mtime.seconds).abs_diff(store.clock().now()) <= 5);
    let found = system.attributes_of(dir).unwrap();
    assert_eq!((found.mode, found.uid, found.gid, found.kind), (0o755, 1, 2, FileType::Directory));
    let mtime = Time { seconds: 5, nseconds: 6 };
    let new =
        SetAttributes { mode: Some(0o600), uid: Some(7), mtime: SetTime::ClientTime(mtime), ..Default::default() };
    for object in [dir, file] {
        let before = system.attributes_of(object).unwrap();
        let guard = Some(before.ctime);
        let set = system.set_attr(&root(), &SetAttr { object, new_attributes: new, guard }).unwrap();
        assert_eq!(set.before, Some(WccAttributes::from(&before)));
        let after = set.after.unwrap();
        assert_eq!((after.mode, after.uid, after.gid, after.mtime), (0o600, 7, 2, mtime));
        let again = SetAttr { object, new_attributes: new, guard };
        assert_eq!(system.set_attr(&root(), &again).unwrap_err().error, NfsError::NotSync);
    }
    // What is written sets the time, what is then set stays, whenever others see it.
    system.put(file, 0, b"OCT", Stable::Unstable).unwrap();
    assert!(system.attributes_of(file).unwrap().mtime != mtime);
    let time_alone = SetAttributes { mtime: SetTime::ClientTime(mtime), ..Default::default() };
    system.set_attr(&root(), &SetAttr { object: file, new_attributes: time_alone, guard: None }).unwrap();
    let version = store.peek(b"dir/file", 0).unwrap().version();
    system.sync(file).unwrap();
    let object = store.peek(b"dir/file", 0).unwrap();
    assert_eq!((object.flags(), system.attributes_of(file).unwrap().mtime), (5, mtime));
    assert!(object.version() > version);
    // Another door's commit is a change of the content and of nothing else.
    store.put(b"dir/file", b"x", 0, 0).unwrap();
    let found = system.attributes_of(file).unwrap();
    assert_eq!((found.mode, found.uid, found.size), (0o600, 7, 1));
    assert!(found.mtime != mtime);
    store.delete(b"dir/file", 0);
    assert_eq!(system.attributes_of(file), Err(NfsError::Stale));
    assert!(system.attributes_of(dir).is_ok(), "a directory whose attributes are set is one that was made");
}

#[test]
fn a_file_is_read_and_written_while_it_moves() {
    let system = system();
    let (root, dir) = (system.root(), system.make_dir(system.root(), b"d").unwrap());
    let files = [system.make(root, b"a").unwrap(), system.make(dir, b"x").unwrap()];
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                for (from, to) in [(b"a", b"b"), (b"d", b"e"), (b"b", b"a"), (b"e", b"d")] {
                    system.mv((root, from), (root, to)).unwrap();
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut random = Seeded::new(7);
            let mut models = [vec![0; 3000], vec![0; 3000]];
            for round in 0..20_000 {
                for (file, model) in files.iter().zip(&mut models) {
                    let written = octets(random.next(), 40);
                    let at = random.below(2900) as usize;
                    system.put(*file, at as u64, &written, Stable::Unstable).unwrap();
                    model[at..at + 40].copy_from_slice(&written);
                    let end = system.attributes_of(*file).unwrap().size as usize;
                    assert_eq!(system.contents(*file, 0, 5000), Ok((model[..end].to_vec(), true)), "round {round}");
                }
            }
        }));
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn mode_bits_are_checked() {
    let system = system();
    let dir = system.make_dir(system.root(), b"dir").unwrap();
    let set = |object, mode, uid| {
        let new_attributes = SetAttributes { mode: Some(mode), uid: Some(uid), gid: Some(uid), ..Default::default() };
        system.set_attr(&root(), &SetAttr { object, new_attributes, guard: None }).unwrap();
    };
    set(dir, 0o750, 5);
    let create = |uid| {
        let place = Place { dir, name: Name(b"file") };
        let made = system.create(&user(uid), &Create { place, how: CreateHow::Guarded(SetAttributes::default()) });
        made.map(|made| made.obj.unwrap()).map_err(|failure| failure.error)
    };
    assert_eq!(create(6), Err(NfsError::Acces));
    let file = create(5).unwrap();
    assert_eq!(system.attributes_of(file).unwrap().uid, 5);
    let place = Place { dir, name: Name(b"file") };
    assert_eq!(system.lookup(&user(6), &place).unwrap_err().error, NfsError::Acces);
    let listing = ReadDirectory { dir, cookie: Cookie(0), verifier: CookieVerifier([0; 8]), count: 4096 };
    assert_eq!(system.read_directory(&user(6), &listing).unwrap_err().error, NfsError::Acces);
    assert!(system.read_directory(&user(5), &listing).is_ok());
    let read = Read { file, offset: 0, count: 9 };
    let may = |uid| {
        let read = system.read(&user(uid), &read).is_ok();
        let write = system.begin_write(&user(uid), &file, 0, 1).is_ok();
        (read, write, system.access(&user(uid), &file, bits::ALL).unwrap().access)
    };
    assert_eq!(may(6), (true, false, bits::READ));
    set(file, 0o400, 5);
    assert_eq!(may(5), (true, true, bits::READ), "its owner may have opened it before");
    assert_eq!(may(6), (false, false, 0));
    assert_eq!(may(0), (true, true, bits::READ | bits::MODIFY | bits::EXTEND));
    let chmod = |uid, new_attributes| {
        let set = system.set_attr(&user(uid), &SetAttr { object: file, new_attributes, guard: None });
        set.map(|_| ()).map_err(|failure| failure.error)
    };
    let mode = SetAttributes { mode: Some(0o666), ..Default::default() };
    let owner = SetAttributes { uid: Some(6), ..Default::default() };
    let now = SetAttributes { mtime: SetTime::ServerTime, ..Default::default() };
    assert_eq!(chmod(6, SetAttributes { size: Some(1), ..Default::default() }), Err(NfsError::Acces));
    assert_eq!(chmod(6, mode), Err(NfsError::Perm));
    assert_eq!(chmod(5, owner), Err(NfsError::Perm));
    assert_eq!(chmod(6, now), Err(NfsError::Acces));
    assert_eq!((chmod(5, mode), chmod(6, now)), (Ok(()), Ok(())));
    assert_eq!(system.remove(&user(6), &place).unwrap_err().error, NfsError::Acces);
    assert_eq!(system.access(&user(6), &dir, bits::ALL).unwrap().access, 0);
    assert!(system.remove(&user(5), &place).is_ok());
}

#[test]
fn a_file_acts_as_nobody_who_did_not_say_so() {
    let system = system();
    let set = |uid: u32, object: FileHandle, new_attributes: SetAttributes| {
        let set = system.set_attr(&user(uid), &SetAttr { object, new_attributes, guard: None });
        set.unwrap();
    };
    let mode = |mode: u32| SetAttributes { mode: Some(mode), ..SetAttributes::default() };
    let mode_of = |file: FileHandle| system.attributes_of(file).unwrap().mode;
    // Files made in it are of group 20, which 5 is not in.
    let dir = system.make_dir(system.root(), b"dir").unwrap();
    set(0, dir, SetAttributes { gid: Some(20), ..mode(0o2777) });
    let create = |uid: u32, name: &'static [u8]| {
        let how = CreateHow::Unchecked(mode(0o6755));
        system.create(&user(uid), &Create { place: Place { dir, name: Name(name) }, how }).unwrap().obj.unwrap()
    };
    let file = create(5, b"file");
    assert_eq!((mode_of(file), system.attributes_of(file).unwrap().gid), (0o4755, 20));
    set(5, file, mode(0o6755));
    assert_eq!(mode_of(file), 0o4755, "nor later");
    assert_eq!((mode_of(create(20, b"member's")), mode_of(create(0, b"root's"))), (0o6755, 0o6755));
    // What others put into it does not act as its owner.
    let put = |uid: u32, file: FileHandle| {
        let mut writing = system.begin_write(&user(uid), &file, 0, 1).unwrap();
        assert_eq!(system.write(&mut writing, b"x"), WriteStep::Done(1));
        system.end_write(writing, 1, Stable::FileSync).unwrap();
    };
    let cut = |uid: u32, file: FileHandle| set(uid, file, SetAttributes { size: Some(0), ..SetAttributes::default() });
    for change in [&put as &dyn Fn(u32, FileHandle), &cut] {
        for (before, writer, after) in [(0o6777, 5, 0o777), (0o6767, 5, 0o2767), (0o6777, 0, 0o6777)] {
            set(0, file, mode(before));
            change(writer, file);
            assert_eq!(mode_of(file), after, "{before:o}, {writer}");
        }
    }
}

#[test]
fn an_exclusive_create_comes_twice_and_is_done_once() {
    let system = system();
    let create = |verifier| {
        let place = Place { dir: system.root(), name: Name(b"file") };
        let made = system.create(&root(), &Create { place, how: CreateHow::Exclusive(CreateVerifier(verifier)) });
        made.map(|made| made.obj.unwrap()).map_err(|failure| failure.error)
    };
    let first = create([1; 8]).unwrap();
    assert_eq!(create([1; 8]), Ok(first));
    assert_eq!(create([2; 8]), Err(NfsError::Exist));
}

#[test]
fn writes_are_refused_where_there_is_no_place_for_them() {
    let system = system();
    let file = system.make(system.root(), b"file").unwrap();
    assert_eq!(system.put(file, MIB - 1, b"12", Stable::Unstable), Err(NfsError::FBig));
    assert_eq!(system.put(file, u64::MAX, b"12", Stable::Unstable), Err(NfsError::FBig));
    assert_eq!(system.resize(file, MIB + 1), Err(NfsError::FBig));
    assert_eq!(system.fs_info(&file).unwrap().maxfilesize, MIB);
    system.store.claims().set_queued(1);
    assert_eq!(system.put(file, 0, b"12", Stable::Unstable), Err(NfsError::Jukebox));
    assert_eq!(system.other_door(b"file").unwrap(), b"");
    let version = system.store.peek(b"file", 0).unwrap().version();
    system.store.claims().set_queued(0);
    assert_eq!(system.handle_time(u64::MAX), 0);
    assert_eq!(system.store.peek(b"file", 0).unwrap().version(), version, "nothing was written");
    system.put(file, 0, b"12", Stable::Unstable).unwrap();
    let idle_ms = system.store.clock().now_ms();
    assert_eq!(system.handle_time(idle_ms), 1, "it is not idle yet");
    system.store.claims().revoke_idle(idle_ms + 500, 100);
    assert_eq!(system.handle_time(idle_ms), 0, "others wait for its space");
    assert_eq!(system.other_door(b"file").unwrap(), b"12");
    assert_eq!(system.put(system.root(), 0, b"12", Stable::Unstable), Err(NfsError::IsDir));
}

#[test]
fn directories_have_their_part_of_the_index_and_no_more() {
    let system = system_of(Sizes { index_bytes_max: MIB, ..sizes() }, 9);
    let mut made = 0;
    let error = loop {
        match system.make_dir(system.root(), format!("{made:05}").as_bytes()) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, NfsError::NoSpc);
    assert!((100..1000).contains(&made), "{made}");
    let before = system.store.gauges().index_bytes;
    assert!(before > 100 * made && before <= MIB / 8);
    // Those that are only looked at are forgotten, the oldest first.
    let mut handles = Vec::new();
    for number in 0..600 {
        system.store.put(format!("x{number:05}/y").as_bytes(), b"", 0, 0).unwrap();
        handles.extend(system.open(format!("x{number:05}").as_bytes()));
        assert!(system.store.gauges().index_bytes <= MIB + 4096);
    }
    assert_eq!(system.attributes_of(handles[0]), Err(NfsError::Stale));
    assert!(system.attributes_of(*handles.last().unwrap()).is_ok());
    for number in 0..made {
        system.take_dir(system.root(), format!("{number:05}").as_bytes()).unwrap();
    }
    assert!(system.make_dir(system.root(), b"once more").is_ok());
}

/// Whoever asks again and again for room that only a commit gives does not keep that from happening.
#[test]
fn drafts_that_fill_the_index_are_committed_though_their_peers_do_not_rest() {
    let system = system_of(Sizes { index_bytes_max: MIB, value_bytes_max: 64 << 30, ..sizes() }, 9);
    let files: Vec<_> =
        (0..4).map(|number| system.make(system.root(), format!("{number}").as_bytes()).unwrap()).collect();
    let mut put = [0_u64; 4];
    let (mut later, mut full) = (0, 0);
    let start_ms = system.store.clock().now_ms();
    for round in 0..2000 {
        for (file, put) in files.iter().zip(&mut put) {
            match system.put(*file, *put * MIB, b"x", Stable::Unstable) {
                Ok(_) => *put += 1,
                Err(NfsError::Jukebox) => later += 1,
                Err(NfsError::NoSpc) => full += 1,
                // A committed one had to go for others.
                Err(NfsError::Stale) => {}
                Err(error) => panic!("{error:?}"),
            }
            // A draft begins whether or not there is room for a piece of it.
            assert!(system.store.gauges().index_bytes <= MIB + 4 * 1024);
        }
        if round % 100 == 0 {
            // Nobody is idle for as long as a second.
            system.handle_time(start_ms + 500);
        }
    }
    // Drafts alone would fill it with 2,455: an island costs 427 octets in a draft and 352 when it is committed.
    assert!(later > 0 && put.iter().sum::<u64>() > 2800, "{put:?} put, {later} later, {full} full");
    system.handle_time(u64::MAX);
    assert_eq!((system.drafts_left(), system.store.gauges().pins), (0, 0));
}
