//! What every client of the file system must be able to do, written once over [`Files`]: the same list runs on a directory
//! that Linux has mounted ([`mounted`]) and on a client that speaks NFS itself.
//!
//! Every step works in a directory of its own, compares each octet that comes back, and leaves nothing behind.
#![allow(dead_code, reason = "every test file is a crate of its own and uses a part of this")]

pub mod mounted;
pub mod scrambler;

use std::collections::BTreeSet;
use std::io;
use std::sync::Barrier;

use crate::common::pattern::Pattern;
use crate::rig::Seeded;

/// A file system as one client sees it. Paths are relative to its root, with `/` between the names; errors are those that Linux
/// gives (`io::Error::from_raw_os_error`), whoever makes them.
pub trait Files: Sized + Send {
    /// An open file. It may be dropped without [`Files::close`]. None is removed while it is open: Linux's client renames those.
    type File;

    /// Makes an empty file, or empties the one that is there.
    fn create(&self, path: &str) -> io::Result<Self::File>;
    /// Makes a file; `EEXIST` if there is one.
    fn create_new(&self, path: &str) -> io::Result<Self::File>;
    /// For reading and writing.
    fn open(&self, path: &str) -> io::Result<Self::File>;
    /// All of `octets`.
    fn write_at(&self, file: &Self::File, offset: u64, octets: &[u8]) -> io::Result<()>;
    /// As many octets as there are and fit, and how many that was: fewer only where the file ends.
    fn read_at(&self, file: &Self::File, offset: u64, into: &mut [u8]) -> io::Result<usize>;
    fn set_len(&self, file: &Self::File, len: u64) -> io::Result<()>;
    fn len(&self, file: &Self::File) -> io::Result<u64>;
    /// What was written is with the server for good.
    fn commit(&self, file: &Self::File) -> io::Result<()>;
    /// What was read is asked for again.
    fn forget(&self, file: &Self::File) -> io::Result<()>;
    /// As [`Files::commit`], and the file is not used any more.
    fn close(&self, file: Self::File) -> io::Result<()>;

    fn stat(&self, path: &str) -> io::Result<Stat>;
    fn set_mode(&self, path: &str, mode: u32) -> io::Result<()>;
    /// Seconds since 1970.
    fn set_modified(&self, path: &str, seconds: u64) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    fn remove(&self, path: &str) -> io::Result<()>;
    fn make_directory(&self, path: &str) -> io::Result<()>;
    fn remove_directory(&self, path: &str) -> io::Result<()>;
    /// Names but `.` and `..`, as they come.
    fn list(&self, path: &str) -> io::Result<Vec<String>>;

    /// A client of its own that sees the same.
    fn another(&self) -> Self;
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stat {
    pub is_directory: bool,
    pub len: u64,
    /// The lower twelve bits.
    pub mode: u32,
    /// Seconds since 1970.
    pub modified: u64,
}

/// How much of each step is done.
#[derive(Clone, Copy, Debug)]
pub struct Counts {
    /// Octets of the longest file that is copied.
    pub copied_bytes_max: usize,
    /// Files as tar writes them.
    pub small_files: usize,
    /// Objects of the tree as git writes it.
    pub objects: usize,
    /// Of each of the sixteen.
    pub rounds_of_readers: usize,
    /// Operations of the scrambler.
    pub operations: usize,
    /// Entries of one directory.
    pub entries: usize,
    /// Length of the sparse file.
    pub sparse_bytes: u64,
    /// Every how many of the combinations of offset and length are tried: a number that has no common divisor with them.
    pub alignments_apart: usize,
}

impl Counts {
    /// What must hold on every transport.
    pub const FULL: Self = Self {
        copied_bytes_max: 64 << 20,
        small_files: 1000,
        objects: 400,
        rounds_of_readers: 40,
        operations: 10_000,
        entries: 5000,
        sparse_bytes: 12 << 30,
        alignments_apart: 1,
    };

    /// A part of all of it, for machines that are slow.
    pub const BRIEF: Self = Self {
        copied_bytes_max: (1 << 20) + 1,
        small_files: 60,
        objects: 40,
        rounds_of_readers: 4,
        operations: 600,
        entries: 400,
        sparse_bytes: 12 << 30,
        alignments_apart: 23,
    };
}

/// A step of the list.
pub type Step<F> = fn(&F, &Counts);

/// All steps and their names, in order.
pub fn steps<F: Files>() -> Vec<(&'static str, Step<F>)> {
    vec![
        ("names", names),
        ("copies of every size", copies),
        ("blocks of odd sizes", odd_blocks),
        ("every alignment", alignments),
        ("many small files", small_files),
        ("a tree as git writes it", tree),
        ("sixteen readers", readers),
        ("a large directory", large_directory),
        ("a sparse file", sparse),
        ("random operations", random_operations),
    ]
}

/// Runs the whole list; `say` is told of each step before it begins.
pub fn run<F: Files>(files: &F, counts: &Counts, mut say: impl FnMut(&str)) {
    for (name, step) in steps() {
        say(name);
        step(files, counts);
    }
}

/// Octets of one READ or WRITE of a client that copies.
pub const COPIED_BYTES: usize = 1 << 20;

/// Lengths where words, pages, segments and transfers end.
pub const SIZES: [usize; 20] = [
    0,
    1,
    2,
    3,
    4,
    5,
    1023,
    1024,
    4095,
    4096,
    4097,
    65_535,
    65_536,
    262_143,
    262_145,
    (1 << 20) - 1,
    1 << 20,
    (1 << 20) + 1,
    (8 << 20) + 3,
    64 << 20,
];

const NOT_FOUND: i32 = libc::ENOENT;

/// Asserts that `result` failed with one of `errors`.
#[track_caller]
pub fn assert_fails<T>(result: io::Result<T>, errors: &[i32], what: &str) {
    match result {
        Ok(_) => panic!("{what}: done, though it cannot be"),
        Err(error) => assert!(
            error.raw_os_error().is_some_and(|number| errors.contains(&number)),
            "{what}: {error}, and not one of {errors:?}"
        ),
    }
}

/// As `cp` writes.
pub fn copy_in<F: Files>(files: &F, path: &str, pattern: u64, len: usize) {
    let file = files.create(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut buffer = vec![0; COPIED_BYTES.min(len)];
    let mut at = 0;
    while at < len {
        let part = &mut buffer[..COPIED_BYTES.min(len - at)];
        Pattern(pattern).fill(at as u64, part);
        files.write_at(&file, at as u64, part).unwrap_or_else(|error| panic!("{path} from {at} on: {error}"));
        at += part.len();
    }
    files.close(file).unwrap_or_else(|error| panic!("{path}, when closed: {error}"));
}

/// As `cp` reads; compares, and asserts that it ends there.
pub fn copy_out<F: Files>(files: &F, path: &str, pattern: u64, len: usize) {
    let file = files.open(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    files.forget(&file).unwrap();
    assert_eq!(files.len(&file).unwrap(), len as u64, "{path}");
    let mut buffer = vec![0; COPIED_BYTES.min(len + 1)];
    let mut at = 0;
    loop {
        let count = files.read_at(&file, at as u64, &mut buffer).unwrap_or_else(|error| panic!("{path}: {error}"));
        Pattern(pattern).check(at as u64, &buffer[..count], path);
        at += count;
        if count < buffer.len() {
            break;
        }
    }
    assert_eq!(at, len, "{path} ends");
}

/// An empty directory, and it is empty again when the step is done.
struct Place<'a, F: Files> {
    files: &'a F,
    path: &'static str,
}

impl<'a, F: Files> Place<'a, F> {
    fn new(files: &'a F, path: &'static str) -> Self {
        files.make_directory(path).unwrap_or_else(|error| panic!("mkdir {path}: {error}"));
        Self { files, path }
    }

    fn at(&self, name: &str) -> String {
        format!("{}/{name}", self.path)
    }

    /// As `rm -r` does it.
    fn clear(self) {
        remove_all(self.files, self.path);
        assert_fails(self.files.stat(self.path), &[NOT_FOUND], self.path);
    }
}

/// Removes a directory and all below it; gives how many entries that were.
pub fn remove_all<F: Files>(files: &F, path: &str) -> usize {
    let mut count = 1;
    // A listing that is removed while it is read may leave some out.
    loop {
        let names = files.list(path).unwrap_or_else(|error| panic!("ls {path}: {error}"));
        if names.is_empty() {
            break;
        }
        for name in names {
            let path = format!("{path}/{name}");
            if files.stat(&path).unwrap_or_else(|error| panic!("{path}: {error}")).is_directory {
                count += remove_all(files, &path);
            } else {
                files.remove(&path).unwrap_or_else(|error| panic!("rm {path}: {error}"));
                count += 1;
            }
        }
    }
    files.remove_directory(path).unwrap_or_else(|error| panic!("rmdir {path}: {error}"));
    count
}

/// Asserts that these and no others are there, each once.
#[track_caller]
pub fn assert_listed<F: Files>(files: &F, path: &str, expected: impl IntoIterator<Item = String>) {
    let mut found = files.list(path).unwrap_or_else(|error| panic!("ls {path}: {error}"));
    found.sort_unstable();
    let expected: Vec<String> = expected.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
    if found != expected {
        let missing: Vec<_> = expected.iter().filter(|name| found.binary_search(name).is_err()).take(10).collect();
        let surplus: Vec<_> = found.iter().filter(|name| expected.binary_search(name).is_err()).take(10).collect();
        panic!("{path}: {} of {}; missing {missing:?}, surplus {surplus:?}", found.len(), expected.len());
    }
}

/// What names may be, and what is refused.
pub fn names<F: Files>(files: &F, _: &Counts) {
    let place = Place::new(files, "names");
    let long = "n".repeat(255);
    let good = ["a", "with space", "größe", "-rf", "...", "new\nline", "percent%2F", &*long];
    for (seed, name) in good.into_iter().enumerate() {
        copy_in(files, &place.at(name), seed as u64, 100 + seed);
    }
    assert_listed(files, place.path, good.map(str::to_owned));
    for (seed, name) in good.into_iter().enumerate() {
        copy_out(files, &place.at(name), seed as u64, 100 + seed);
    }
    assert_fails(files.create(&place.at(&"n".repeat(256))), &[libc::ENAMETOOLONG], "256 octets");
    assert_fails(files.make_directory(&place.at(&"n".repeat(256))), &[libc::ENAMETOOLONG], "256 octets");
    assert_fails(files.open(&place.at("nothing")), &[NOT_FOUND], "what is not there");
    assert_fails(files.open(&place.at("nothing/below")), &[NOT_FOUND], "below what is not there");
    assert_fails(files.create(&place.at("a/below")), &[libc::ENOTDIR], "below a file");
    assert_fails(files.create_new(&place.at("a")), &[libc::EEXIST], "what is there");
    drop(files.create_new(&place.at("new")).unwrap());
    assert_fails(files.make_directory(&place.at("a")), &[libc::EEXIST], "what is there");
    assert_fails(files.remove_directory(&place.at("a")), &[libc::ENOTDIR], "rmdir of a file");
    assert_fails(files.remove(&place.at("nothing")), &[NOT_FOUND], "rm of nothing");

    // Of renaming: a file over a file, an empty directory over an empty directory; nothing else goes over something.
    files.rename(&place.at("a"), &place.at("...")).unwrap();
    copy_out(files, &place.at("..."), 0, 100);
    assert_fails(files.stat(&place.at("a")), &[NOT_FOUND], "what was renamed");
    for name in ["one", "one/deep", "two", "three"] {
        files.make_directory(&place.at(name)).unwrap();
    }
    copy_in(files, &place.at("one/deep/file"), 77, 5000);
    assert_fails(files.remove_directory(&place.at("one")), &[libc::ENOTEMPTY, libc::EEXIST], "rmdir of a full one");
    assert_fails(files.remove(&place.at("one")), &[libc::EISDIR, libc::EPERM], "rm of a directory");
    let over = files.rename(&place.at("two"), &place.at("one"));
    assert_fails(over, &[libc::ENOTEMPTY, libc::EEXIST], "over a full one");
    assert_fails(files.rename(&place.at("two"), &place.at("...")), &[libc::ENOTDIR], "a directory over a file");
    assert_fails(files.rename(&place.at("..."), &place.at("two")), &[libc::EISDIR, libc::EEXIST], "the reverse");
    files.rename(&place.at("one"), &place.at("two")).unwrap();
    copy_out(files, &place.at("two/deep/file"), 77, 5000);
    assert_fails(files.open(&place.at("one/deep/file")), &[NOT_FOUND], "below what was renamed");
    files.rename(&place.at("two/deep"), &place.at("three/deeper")).unwrap();
    copy_out(files, &place.at("three/deeper/file"), 77, 5000);
    assert_listed(files, &place.at("two"), []);
    assert_fails(files.rename(&place.at("nothing"), &place.at("x")), &[NOT_FOUND], "nothing renamed");

    // What attributes are set stay set.
    files.set_mode(&place.at("..."), 0o640).unwrap();
    files.set_modified(&place.at("..."), 1_000_000_007).unwrap();
    let stat = files.another().stat(&place.at("...")).unwrap();
    assert_eq!(stat, Stat { is_directory: false, len: 100, mode: 0o640, modified: 1_000_000_007 });
    files.set_mode(&place.at("two"), 0o711).unwrap();
    let stat = files.stat(&place.at("two")).unwrap();
    assert_eq!((stat.is_directory, stat.mode), (true, 0o711));
    place.clear();
}

/// In and out, then shorter over longer.
pub fn copies<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "copies");
    let sizes = SIZES.into_iter().filter(|len| *len <= counts.copied_bytes_max);
    let name = |len: usize| place.at(&format!("of {len}"));
    for len in sizes.clone() {
        copy_in(files, &name(len), len as u64, len);
        copy_out(files, &name(len), len as u64, len);
    }
    // All are as they were once the others are there.
    for len in sizes.clone() {
        copy_out(&files.another(), &name(len), len as u64, len);
        assert_eq!(files.stat(&name(len)).unwrap().len, len as u64);
    }
    for len in sizes.rev() {
        let shorter = len / 3;
        copy_in(files, &name(len), 1, shorter);
        copy_out(files, &name(len), 1, shorter);
    }
    place.clear();
}

/// As `dd` with a block size of its own, in order, from the end to the front, every other block first, and with gaps that are filled
/// later; read with another block size.
pub fn odd_blocks<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "blocks");
    let path = place.at("f");
    let len_max = counts.copied_bytes_max.min(4 << 20);
    for (seed, block, other) in [(1, 777, 4099), (2, 4097, 1021), (3, 65_537, 99_991), (4, 300_007, 12_289)] {
        let len = (block * 61 + 13).min(len_max);
        let blocks: Vec<usize> = (0..len.div_ceil(block)).collect();
        let (even, odd): (Vec<usize>, Vec<usize>) = blocks.iter().partition(|block| *block % 2 == 0);
        let mut shuffled = blocks.clone();
        let mut random = Seeded::new(seed);
        for at in (1..shuffled.len()).rev() {
            shuffled.swap(at, random.below(at as u64 + 1) as usize);
        }
        for (order, name) in [
            (blocks.clone(), "in order"),
            (blocks.iter().rev().copied().collect(), "backwards"),
            ([even, odd].concat(), "every other one first"),
            (shuffled, "at random"),
        ] {
            let file = files.create(&path).unwrap();
            for index in order {
                let (at, end) = (index * block, len.min((index + 1) * block));
                files.write_at(&file, at as u64, &Pattern(seed).octets(at as u64, end - at)).unwrap();
            }
            files.commit(&file).unwrap();
            files.forget(&file).unwrap();
            assert_eq!(files.len(&file).unwrap(), len as u64, "blocks of {block} {name}");
            let mut buffer = vec![0; other];
            let mut at = 7;
            while at < len {
                let count = files.read_at(&file, at as u64, &mut buffer).unwrap();
                assert_eq!(count, other.min(len - at), "blocks of {block} {name}, from {at} on");
                Pattern(seed).check(at as u64, &buffer[..count], name);
                at += other + 3;
            }
            // One block in the middle anew, as `conv=notrunc seek=`.
            let at = (len / 2) as u64;
            files.write_at(&file, at, &Pattern(99).octets(at, 1001)).unwrap();
            files.close(file).unwrap();
            let file = files.open(&path).unwrap();
            files.forget(&file).unwrap();
            let mut around = vec![0; 3003];
            assert_eq!(files.read_at(&file, at - 1001, &mut around).unwrap(), 3003);
            Pattern(seed).check(at - 1001, &around[..1001], "before");
            Pattern(99).check(at, &around[1001..2002], "the block");
            Pattern(seed).check(at + 1001, &around[2002..], "behind");
        }
    }
    place.clear();
}

/// Every length modulo four, at every kind of place in a page: of the file, and of the caller's memory.
pub fn alignments<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "alignments");
    let path = place.at("f");
    let lens = (1..=9).chain(1021..=1027).chain(4093..=4100).chain(8190..=8194).chain(65_533..=65_540);
    let offsets: Vec<usize> = (0..=5).chain(1022..=1025).chain(4091..=4097).collect();
    let file = files.create(&path).unwrap();
    let len_all = 70_000 + 8192;
    let mut model = vec![0; len_all];
    files.set_len(&file, len_all as u64).unwrap();
    // Begins with a page, so that places in it are places in a page.
    let mut memory = vec![0_u8; 65_540 + 3 * 4096];
    let page = memory.as_ptr().align_offset(4096);
    let mut tried = 0;
    for (number, (len, offset)) in lens.flat_map(|len| offsets.iter().map(move |offset| (len, *offset))).enumerate() {
        if number % counts.alignments_apart != 0 {
            continue;
        }
        let start = page + (number * 37 + offset) % 4096;
        let octets = &mut memory[start..start + len];
        Pattern(number as u64).fill(0, octets);
        files.write_at(&file, offset as u64, octets).unwrap();
        model[offset..offset + len].copy_from_slice(octets);
        files.commit(&file).unwrap();
        files.forget(&file).unwrap();
        // What was written, then with what lies beside it, then one that crosses the end.
        let start = page + (number * 53) % 4096;
        for (at, len) in [(offset, len), (offset.saturating_sub(3), len + 5), (len_all - len.min(len_all), len + 9)] {
            let into = &mut memory[start..start + len];
            into.fill(0xEE);
            let count = files.read_at(&file, at as u64, into).unwrap();
            let expected = &model[at..len_all.min(at + len)];
            assert_eq!(count, expected.len(), "{len} from {at} on");
            assert!(into[..count] == *expected, "{len} octets from {at} on, write {number}");
            // Roundup of the protocol may come too.
            let beside = &into[len.min(count.next_multiple_of(4))..];
            assert!(beside.iter().all(|octet| *octet == 0xEE), "{len} from {at} on, {count}: {beside:02x?}");
        }
        tried += 1;
    }
    assert!(tried >= 10, "only {tried}");
    files.close(file).unwrap();
    let file = files.open(&path).unwrap();
    files.forget(&file).unwrap();
    let mut all = vec![0; len_all + 1];
    assert_eq!(files.read_at(&file, 0, &mut all).unwrap(), len_all);
    assert!(all[..len_all] == model, "the whole of it");
    drop(file);
    place.clear();
}

fn small_len(index: usize) -> usize {
    (index * 1237) % 20_011
}

/// As tar unpacks: created, written, closed, mode and time set; then listed, read, renamed, removed.
pub fn small_files<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "small");
    let name = |index: usize| format!("file-{index:05}.txt");
    for index in 0..counts.small_files {
        let path = place.at(&name(index));
        let file = files.create_new(&path).unwrap();
        let octets = Pattern(index as u64).octets(0, small_len(index));
        files.write_at(&file, 0, &octets).unwrap();
        files.close(file).unwrap();
        files.set_mode(&path, if index % 3 == 0 { 0o755 } else { 0o600 }).unwrap();
        files.set_modified(&path, 1_600_000_000 + index as u64).unwrap();
    }
    assert_listed(files, place.path, (0..counts.small_files).map(name));
    let other = files.another();
    for index in 0..counts.small_files {
        let path = place.at(&name(index));
        let mode = if index % 3 == 0 { 0o755 } else { 0o600 };
        let modified = 1_600_000_000 + index as u64;
        let expected = Stat { is_directory: false, len: small_len(index) as u64, mode, modified };
        assert_eq!(other.stat(&path).unwrap(), expected, "{path}");
        copy_out(&other, &path, index as u64, small_len(index));
    }
    for index in (0..counts.small_files).step_by(2) {
        files.rename(&place.at(&name(index)), &place.at(&format!("moved-{index}"))).unwrap();
    }
    let moved = |index: usize| if index.is_multiple_of(2) { format!("moved-{index}") } else { name(index) };
    assert_listed(files, place.path, (0..counts.small_files).map(moved));
    for index in (0..counts.small_files).step_by(17) {
        copy_out(files, &place.at(&moved(index)), index as u64, small_len(index));
    }
    place.clear();
}

/// As `git clone` writes: objects under temporary names that are renamed into directories by their first octet, references
/// by lock files, then the working tree. Git links an object to its name where it can, and renames it otherwise.
pub fn tree<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "clone");
    for path in [".git", ".git/objects", ".git/objects/pack", ".git/refs", ".git/refs/heads", ".git/info", "src"] {
        files.make_directory(&place.at(path)).unwrap();
    }
    let head = place.at(".git/HEAD");
    let lock = place.at(".git/HEAD.lock");
    let object = |index: usize| {
        let id = index.wrapping_mul(0x9e37_79b1) as u32;
        (format!(".git/objects/{:02x}", id >> 24), format!("{:06x}{index:032x}", id & 0xff_ffff))
    };
    let mut directories = BTreeSet::new();
    for index in 0..counts.objects {
        let (directory, name) = object(index);
        if directories.insert(directory.clone()) {
            files.make_directory(&place.at(&directory)).unwrap();
        } else {
            assert_fails(files.make_directory(&place.at(&directory)), &[libc::EEXIST], &directory);
        }
        let temporary = place.at(&format!("{directory}/tmp_obj_{index}"));
        let file = files.create_new(&temporary).unwrap();
        let octets = Pattern(index as u64).octets(0, small_len(index));
        for (at, part) in octets.chunks(4096).enumerate() {
            files.write_at(&file, at as u64 * 4096, part).unwrap();
        }
        files.close(file).unwrap();
        files.set_mode(&temporary, 0o444).unwrap();
        files.rename(&temporary, &place.at(&format!("{directory}/{name}"))).unwrap();
        if index % 20 == 0 {
            let file = files.create_new(&lock).unwrap();
            assert_fails(files.create_new(&lock), &[libc::EEXIST], "it is locked");
            files.write_at(&file, 0, format!("ref {index:08}\n").as_bytes()).unwrap();
            files.close(file).unwrap();
            files.rename(&lock, &head).unwrap();
        }
    }
    for depth in 1..12 {
        let path = (0..depth).fold("src".to_owned(), |path, level| format!("{path}/level-{level}"));
        files.make_directory(&place.at(&path)).unwrap();
        copy_in(files, &place.at(&format!("{path}/file.rs")), depth as u64, depth * 997);
    }
    let other = files.another();
    for index in 0..counts.objects {
        let (directory, name) = object(index);
        copy_out(&other, &place.at(&format!("{directory}/{name}")), index as u64, small_len(index));
    }
    let file = other.open(&head).unwrap();
    let mut said = [0; 13];
    assert_eq!(other.read_at(&file, 0, &mut said).unwrap(), 13);
    assert_eq!(said[..], *format!("ref {:08}\n", (counts.objects - 1) / 20 * 20).as_bytes());
    drop(file);
    let path = (0..11).fold("src".to_owned(), |path, level| format!("{path}/level-{level}"));
    copy_out(&other, &place.at(&format!("{path}/file.rs")), 11, 11 * 997);
    let directories = directories.iter().map(|path| path.rsplit('/').next().unwrap().to_owned());
    assert_listed(&other, &place.at(".git/objects"), directories.chain(["pack".to_owned()]));
    place.clear();
}

/// Sixteen clients at once, each with its own places of the same three files.
pub fn readers<F: Files>(files: &F, counts: &Counts) {
    const READERS: usize = 16;
    let place = Place::new(files, "readers");
    let len = counts.copied_bytes_max.min(8 << 20);
    let paths: Vec<String> = (0..3).map(|index| place.at(&format!("f{index}"))).collect();
    for (seed, path) in (0..).zip(&paths) {
        copy_in(files, path, seed, len);
    }
    let clients: Vec<F> = (0..READERS).map(|_| files.another()).collect();
    let barrier = Barrier::new(READERS);
    std::thread::scope(|scope| {
        for (index, client) in clients.into_iter().enumerate() {
            let (paths, barrier) = (&paths, &barrier);
            scope.spawn(move || {
                let opened: Vec<F::File> = paths.iter().map(|path| client.open(path).unwrap()).collect();
                let mut random = Seeded::new(index as u64);
                let mut buffer = vec![0; 300_000];
                barrier.wait();
                for _ in 0..counts.rounds_of_readers {
                    let which = random.below(3) as usize;
                    let (at, count) = (random.below(len as u64), 1 + random.below(300_000) as usize);
                    client.forget(&opened[which]).unwrap();
                    let into = &mut buffer[..count];
                    let found = client.read_at(&opened[which], at, into).unwrap();
                    assert_eq!(found, count.min(len - at as usize));
                    Pattern(which as u64).check(at, &into[..found], &paths[which]);
                }
            });
        }
    });
    place.clear();
}

/// More entries than one reply has room for, listed while some go and come.
pub fn large_directory<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "large");
    // Names of many lengths, so that replies end anywhere.
    let name = |index: usize| format!("{index:05}-{}", "x".repeat(index * 7 % 120));
    for index in 0..counts.entries {
        if index.is_multiple_of(50) {
            files.make_directory(&place.at(&name(index))).unwrap();
        } else {
            drop(files.create_new(&place.at(&name(index))).unwrap());
        }
    }
    assert_listed(files, place.path, (0..counts.entries).map(name));
    assert_listed(&files.another(), place.path, (0..counts.entries).map(name));
    for index in (1..counts.entries).step_by(3) {
        if index % 50 != 0 {
            files.remove(&place.at(&name(index))).unwrap();
        }
    }
    let stays = |index: &usize| index % 3 != 1 || index.is_multiple_of(50);
    assert_listed(&files.another(), place.path, (0..counts.entries).filter(stays).map(name));
    place.clear();
}

/// Islands of octets in a file of many gigabytes; what lies between is zeros, and its length is what was said.
pub fn sparse<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "sparse");
    let path = place.at("f");
    let len = counts.sparse_bytes;
    let file = files.create(&path).unwrap();
    let islands: Vec<(u64, usize)> = vec![
        (len - 70_001, 70_001),
        (0, 5),
        ((1 << 32) - 4097, 8200),
        ((1 << 31) - 3, 7),
        (len / 2 + 1, 1),
        (len / 3 * 2, 300_000),
    ];
    for (at, count) in &islands {
        files.write_at(&file, *at, &Pattern(8).octets(*at, *count)).unwrap();
    }
    files.close(file).unwrap();
    let check = |len: u64, islands: &[(u64, usize)]| {
        let client = files.another();
        let file = client.open(&path).unwrap();
        client.forget(&file).unwrap();
        assert_eq!(client.len(&file).unwrap(), len);
        let mut buffer = vec![0; 310_000];
        for (at, count) in islands {
            // A page and more on each side.
            let from = at.saturating_sub(5000);
            let before = (at - from) as usize;
            let into = &mut buffer[..before + count + 5000];
            let found = client.read_at(&file, from, into).unwrap();
            assert_eq!(found as u64, (into.len() as u64).min(len - from), "around {at}");
            assert!(into[..before].iter().all(|octet| *octet == 0), "before {at}");
            Pattern(8).check(*at, &into[before..before + count], "an island");
            assert!(into[before + count..found].iter().all(|octet| *octet == 0), "behind {at}");
        }
        for at in (0..17).map(|index| len / 17 * index + 400_000) {
            let found = client.read_at(&file, at, &mut buffer[..4096]).unwrap();
            assert!(buffer[..found].iter().all(|octet| *octet == 0), "in a hole at {at}");
        }
    };
    check(len, &islands);
    // Shorter, then longer: what was cut off is zeros.
    let file = files.open(&path).unwrap();
    files.set_len(&file, (1 << 32) + 1).unwrap();
    files.set_len(&file, len + 12_345).unwrap();
    files.close(file).unwrap();
    check(len + 12_345, &[(0, 5), ((1 << 31) - 3, 7), ((1 << 32) - 4097, 4098)]);
    place.clear();
}

/// One file by one client, with the number of operations that is wanted.
pub fn random_operations<F: Files>(files: &F, counts: &Counts) {
    let place = Place::new(files, "random");
    scrambler::scramble(files, &place.at("f"), &scrambler::Plan::new(seed(), counts.operations));
    place.clear();
}

/// That of `BULKHEAD_SEED`, or one that never changes.
pub fn seed() -> u64 {
    std::env::var("BULKHEAD_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}
