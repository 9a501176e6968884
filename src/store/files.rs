//! Files: what a door that shows keys as files has beside the [namespace](crate::store::namespace): numbers that name one
//! file for as long as its key is there, attributes that values do not have, and directories.
//!
//! ```text
//!   index        key ──▶ Object ──▶ FileRecord { number, key, metadata }     from the first commit to the last removal
//!   records      number ──────────▶   "                                     overwriting hands it on
//!   directories  "a/b/" ─┬────────▶ Directory { number, path, metadata }    seen: once somebody asked for it
//!                number ─┘                                                  made: with or without keys below
//!   departed     number ──▶ key                                             for who still has a place to go on from
//! ```
//! `/` parts a key into directories. A directory is there while a key lies below it, or since it was made. Whoever adds or
//! removes a key, by any door, changes the times of the directories that lose or gain an entry, if they are known. Made by
//! [`Store::with_files`]; other stores have nothing of this. See docs/decisions/0014-files-over-keys.md.

use crate::store::Store;
use crate::store::key::{KEY_BYTES_MAX, ObjectKey};
use crate::store::namespace::Query;
use crate::store::object::Object;
use dashmap::DashMap;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Parts keys into directories and a name.
pub const DELIMITER: u8 = b'/';
/// What the index spends on the record of one key, in octets: the record, its two counts, a place in a table half full.
pub(super) const FILE_BYTES: u64 = (size_of::<FileRecord>() + 16 + 2 * 32) as u64;
/// And on a directory, beside its path: the record, and its places in three tables.
const DIRECTORY_BYTES: u64 = (size_of::<Directory>() + 16 + 4 * 48) as u64;
/// And on a key that departed, beside its octets.
const DEPARTED_BYTES: u64 = 96;
/// Made directories may take this part of the index, those that were seen as much again.
const DIRECTORIES_DIVISOR: u64 = 8;
/// Keys that departed may take this part of the index.
const DEPARTED_DIVISOR: u64 = 32;
const ROOT: FileNumber = FileNumber(1);

/// Names one file or directory of one run of a store; never given twice. The root is 1, others are at least 2^32.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FileNumber(pub u64);

impl FileNumber {
    pub const ROOT: Self = ROOT;
}

/// Who may do what.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Owner {
    /// Permission bits, the lower twelve.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// What is kept of a file or directory beside its octets. Times are nanoseconds of the epoch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Metadata {
    /// `None` until somebody sets it: then it is what the door gives to all such files.
    pub owner: Option<Owner>,
    pub accessed_ns: u64,
    pub modified_ns: u64,
    pub changed_ns: u64,
}

impl Metadata {
    /// Of something that begins at `now_ns`.
    pub fn new(owner: Option<Owner>, now_ns: u64) -> Self {
        Self { owner, accessed_ns: now_ns, modified_ns: now_ns, changed_ns: now_ns }
    }

    /// Something but the content changed: no two changes have the same time.
    pub fn change(&mut self, now_ns: u64) {
        self.changed_ns = now_ns.max(self.changed_ns + 1);
    }

    /// The content changed.
    pub fn modify(&mut self, now_ns: u64) {
        self.change(now_ns);
        self.modified_ns = self.changed_ns;
    }
}

/// What makes a new version of a value.
#[derive(Clone, Copy, Debug)]
pub(super) enum Making {
    /// A door that knows no files: the time of the commit is that of the change.
    Stored,
    /// The file door, which keeps times itself: they are left as they are. A new file begins with these.
    File(Metadata),
}

/// A key as a file.
#[derive(Debug)]
pub struct FileRecord {
    number: FileNumber,
    key: ObjectKey,
    /// Somebody may go on behind it.
    is_listed: AtomicBool,
    metadata: Mutex<Metadata>,
}

impl FileRecord {
    pub fn number(&self) -> FileNumber {
        self.number
    }

    pub fn key(&self) -> &[u8] {
        self.key.as_bytes()
    }

    pub fn metadata(&self) -> Metadata {
        *self.lock()
    }

    /// Changes the attributes in one step.
    pub fn update<T>(&self, change: impl FnOnce(&mut Metadata) -> T) -> T {
        change(&mut self.lock())
    }

    /// The place behind it is one to go on from: see [`Store::place_of`].
    pub fn mark_listed(&self) {
        self.is_listed.store(true, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Metadata> {
        self.metadata.lock().expect("no panic under this lock")
    }
}

/// A directory that somebody asked for.
#[derive(Debug)]
pub struct Directory {
    number: FileNumber,
    /// Empty for the root, else it ends with the delimiter.
    path: ObjectKey,
    is_made: AtomicBool,
    /// Times that an entry came or went.
    changes: AtomicU64,
    metadata: Mutex<Metadata>,
}

impl Directory {
    pub fn number(&self) -> FileNumber {
        self.number
    }

    /// What the keys below it begin with: empty for the root, else it ends with `/`.
    pub fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }

    pub fn is_root(&self) -> bool {
        self.number == ROOT
    }

    /// It stays without keys below.
    pub fn is_made(&self) -> bool {
        self.is_made.load(Ordering::Relaxed)
    }

    pub fn metadata(&self) -> Metadata {
        *self.lock()
    }

    /// Attributes, and how often an entry came or went until then.
    pub fn snapshot(&self) -> (Metadata, u64) {
        let metadata = self.lock();
        (*metadata, self.changes.load(Ordering::Relaxed))
    }

    /// Changes the attributes in one step.
    pub fn update<T>(&self, change: impl FnOnce(&mut Metadata) -> T) -> T {
        change(&mut self.lock())
    }

    fn modify(&self, now_ns: u64) {
        let mut metadata = self.lock();
        metadata.modify(now_ns);
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Metadata> {
        self.metadata.lock().expect("no panic under this lock")
    }

    fn bytes(&self) -> u64 {
        DIRECTORY_BYTES + self.path.as_bytes().len() as u64
    }
}

/// Why there is no such directory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    #[error("a path of {len} octets with its end is longer than a key may be")]
    TooLong { len: usize },
    #[error("directories take {bytes} octets of the index, and may take {bytes_max}")]
    Full { bytes: u64, bytes_max: u64 },
    #[error("something lies below it")]
    NotEmpty,
}

#[derive(Debug, Default)]
struct Directories {
    by_path: HashMap<ObjectKey, Arc<Directory>>,
    by_number: HashMap<FileNumber, Arc<Directory>>,
    made: BTreeSet<ObjectKey>,
    /// Those that are not made, oldest first, and others that were.
    seen: VecDeque<FileNumber>,
    seen_bytes: u64,
    made_bytes: u64,
}

impl Directories {
    fn insert(&mut self, directory: &Arc<Directory>) {
        self.by_path.insert(directory.path.clone(), directory.clone());
        self.by_number.insert(directory.number, directory.clone());
        let is_counted = !directory.is_root();
        if directory.is_made() {
            self.made.insert(directory.path.clone());
            self.made_bytes += if is_counted { directory.bytes() } else { 0 };
        } else {
            self.seen.push_back(directory.number);
            self.seen_bytes += directory.bytes();
        }
    }

    fn remove(&mut self, directory: &Directory) {
        if self.by_number.remove(&directory.number).is_none() {
            return;
        }
        self.by_path.remove(&directory.path);
        if directory.is_made() {
            self.made.remove(&directory.path);
            self.made_bytes -= directory.bytes();
        } else {
            self.seen_bytes -= directory.bytes();
        }
        // Numbers of those that are gone would be kept for ever where directories come and go.
        if self.seen.len() > 64 && self.seen.len() > 2 * self.by_number.len() {
            let by_number = &self.by_number;
            // One that was moved is there twice.
            let mut kept = HashSet::new();
            let is_seen = |number: &FileNumber| by_number.get(number).is_some_and(|directory| !directory.is_made());
            self.seen.retain(|number| is_seen(number) && kept.insert(*number));
        }
    }

    fn bytes(&self) -> u64 {
        self.seen_bytes + self.made_bytes
    }

    /// The first path behind `from` that begins with `prefix` and is longer.
    fn made_below(&self, from: Bound<&[u8]>, prefix: &[u8]) -> Option<&ObjectKey> {
        let found = self.made.range::<[u8], _>((from, Bound::Unbounded)).find(|path| path.as_bytes() != prefix)?;
        found.as_bytes().starts_with(prefix).then_some(found)
    }
}

#[derive(Debug, Default)]
struct Departed {
    order: VecDeque<(FileNumber, ObjectKey)>,
    keys: HashMap<FileNumber, ObjectKey>,
    bytes: u64,
}

/// All of it.
#[derive(Debug)]
pub(super) struct Files {
    next: AtomicU64,
    records: DashMap<u64, Arc<FileRecord>, ahash::RandomState>,
    directories: RwLock<Directories>,
    departed: Mutex<Departed>,
    departed_bytes_max: u64,
    directories_bytes_max: u64,
}

/// The directory that `path`, a key or a directory but the root, is an entry of.
pub fn parent(path: &[u8]) -> &[u8] {
    let inner = path.strip_suffix(&[DELIMITER]).unwrap_or(path);
    inner.iter().rposition(|octet| *octet == DELIMITER).map_or(&[], |at| &path[..=at])
}

impl Files {
    /// `now_ms` tells this run from others: no number is given in two of them.
    pub(super) fn new(index_bytes_max: u64, now_ms: u64, now_ns: u64) -> Self {
        let root = Directory {
            number: ROOT,
            path: ObjectKey::new(b""),
            is_made: true.into(),
            changes: 0.into(),
            metadata: Mutex::new(Metadata::new(None, now_ns)),
        };
        let mut directories = Directories::default();
        directories.insert(&Arc::new(root));
        Self {
            next: AtomicU64::new((now_ms << 16).max(1 << 32)),
            records: DashMap::with_hasher(ahash::RandomState::new()),
            directories: RwLock::new(directories),
            departed: Mutex::default(),
            departed_bytes_max: index_bytes_max / DEPARTED_DIVISOR,
            directories_bytes_max: index_bytes_max / DIRECTORIES_DIVISOR,
        }
    }

    fn number(&self) -> FileNumber {
        FileNumber(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Under the entry of `key`: the record of its new object. `previous` is that of the living object it replaces.
    pub(super) fn adopt(
        &self,
        key: &ObjectKey,
        previous: Option<&Arc<FileRecord>>,
        making: Making,
        now_ns: u64,
    ) -> Arc<FileRecord> {
        if let Some(record) = previous {
            if matches!(making, Making::Stored) {
                record.lock().modify(now_ns);
            }
            return record.clone();
        }
        let metadata = match making {
            Making::Stored => Metadata::new(None, now_ns),
            Making::File(metadata) => metadata,
        };
        self.add(self.number(), key.clone(), metadata)
    }

    fn add(&self, number: FileNumber, key: ObjectKey, metadata: Metadata) -> Arc<FileRecord> {
        let record = Arc::new(FileRecord { number, key, is_listed: false.into(), metadata: Mutex::new(metadata) });
        self.records.insert(number.0, record.clone());
        record
    }

    /// Under the entries of both keys: `record` is that of `key` from now on.
    pub(super) fn move_record(&self, record: &FileRecord, key: &ObjectKey, now_ns: u64) -> Arc<FileRecord> {
        let mut metadata = record.metadata();
        metadata.change(now_ns);
        let moved = self.add(record.number, key.clone(), metadata);
        moved.is_listed.store(record.is_listed.load(Ordering::Relaxed), Ordering::Relaxed);
        moved
    }

    /// Under the entry of a file that is no more. Returns by how much the index grows or shrinks for it, but for
    /// [`FILE_BYTES`].
    #[must_use]
    pub(super) fn depart(&self, record: &FileRecord) -> i64 {
        self.records.remove(&record.number.0);
        if record.is_listed.load(Ordering::Relaxed) { self.remember(record.number, &record.key) } else { 0 }
    }

    fn remember(&self, number: FileNumber, key: &ObjectKey) -> i64 {
        let mut departed = self.departed.lock().expect("no panic under this lock");
        let before = departed.bytes;
        departed.order.push_back((number, key.clone()));
        departed.keys.insert(number, key.clone());
        departed.bytes += DEPARTED_BYTES + key.as_bytes().len() as u64;
        while departed.bytes > self.departed_bytes_max
            && let Some((number, key)) = departed.order.pop_front()
        {
            // It may have departed once more since.
            if departed.keys.get(&number) == Some(&key) {
                departed.keys.remove(&number);
            }
            departed.bytes -= DEPARTED_BYTES + key.as_bytes().len() as u64;
        }
        departed.bytes as i64 - before as i64
    }

    /// Under the entry of a key that came or goes: the directories that have an entry more or less are modified. `shared` is
    /// the length of the longest directory that another key lies below too.
    pub(super) fn touch(&self, key: &[u8], shared: usize, now_ns: u64) {
        let directories = self.read();
        let mut path = key;
        loop {
            path = parent(path);
            if let Some(directory) = directories.by_path.get(path) {
                directory.modify(now_ns);
                if directory.is_made() {
                    return;
                }
            }
            if path.len() <= shared {
                return;
            }
        }
    }

    /// Under all entries: what is below `from` is below `to` from now on. `to` is no directory that is known.
    pub(super) fn move_directories(&self, from: &[u8], to: &[u8], now_ns: u64) -> i64 {
        let mut directories = self.write();
        let before = directories.bytes();
        let below = |directory: &&Arc<Directory>| directory.path().starts_with(from);
        let moved: Vec<_> = directories.by_path.values().filter(below).cloned().collect();
        // What was known of the place they come to is of another directory.
        let replaced: Vec<_> =
            directories.by_path.values().filter(|found| found.path().starts_with(to)).cloned().collect();
        moved.iter().chain(&replaced).for_each(|directory| directories.remove(directory));
        for old in moved {
            let path = [to, &old.path()[from.len()..]].concat();
            if path.len() > KEY_BYTES_MAX {
                // Only one that was seen, and has nothing below it any more.
                continue;
            }
            let mut metadata = old.metadata();
            if old.path() == from {
                metadata.change(now_ns);
            }
            directories.insert(&Arc::new(Directory {
                number: old.number,
                path: ObjectKey::new(&path),
                is_made: old.is_made().into(),
                changes: old.changes.load(Ordering::Relaxed).into(),
                metadata: Mutex::new(metadata),
            }));
        }
        for path in [parent(from), parent(to)] {
            if let Some(directory) = directories.by_path.get(path) {
                directory.modify(now_ns);
            }
        }
        directories.bytes() as i64 - before as i64
    }

    /// Whether a made directory lies below `path`, itself not counted.
    pub(super) fn has_made_below(&self, path: &[u8]) -> bool {
        self.read().made_below(Bound::Included(path), path).is_some()
    }

    /// The longest path that a made directory would have, were it moved from below `from` to below `to`.
    pub(super) fn longest_moved(&self, from: &[u8], to: &[u8]) -> usize {
        let directories = self.read();
        let below = directories.made.range::<[u8], _>((Bound::Included(from), Bound::Unbounded));
        let below = below.take_while(|path| path.as_bytes().starts_with(from));
        below.map(|path| path.as_bytes().len() - from.len() + to.len()).max().unwrap_or(0)
    }

    fn read(&self) -> RwLockReadGuard<'_, Directories> {
        self.directories.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Directories> {
        self.directories.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// Whether it was made with files.
    pub fn has_files(&self) -> bool {
        self.shared.files.is_some()
    }
}

/// Calls of the file door. All of them panic on a store without files.
impl Store {
    fn files(&self) -> &Files {
        self.shared.files.as_ref().expect("the store was made with files")
    }

    fn count_index(&self, by: i64) {
        self.shared.index_bytes.fetch_add(by as u64, Ordering::Relaxed);
    }

    /// The living object that is the file of that number, if it is none of a directory.
    pub fn file(&self, number: FileNumber, now: u64) -> Option<(Arc<FileRecord>, Arc<Object>)> {
        // Once more where it was renamed in between.
        for _ in 0..2 {
            let record = self.files().records.get(&number.0)?.value().clone();
            if let Some(object) = self.living(record.key(), now)
                && object.record().is_some_and(|found| found.number == number)
            {
                return Some((object.record()?.clone(), object));
            }
        }
        None
    }

    /// Where below `prefix` something of that number is, or was a while ago: a key, or a path that ends with the delimiter.
    pub fn place_of(&self, number: FileNumber, prefix: &[u8]) -> Option<ObjectKey> {
        let files = self.files();
        let record = files.records.get(&number.0).map(|record| record.key.clone());
        let living = record.or_else(|| files.read().by_number.get(&number).map(|directory| directory.path.clone()));
        let is_below = |place: &ObjectKey| place.as_bytes().starts_with(prefix);
        if let Some(place) = living.filter(is_below) {
            return Some(place);
        }
        let departed = files.departed.lock().expect("no panic under this lock");
        departed.keys.get(&number).cloned().filter(is_below)
    }

    /// A file that was listed has another place by now; who goes on behind it does so at `from`.
    pub(super) fn remember_place(&self, to: &[u8], from: &[u8], now: u64) {
        let record = self.peek(to, now).and_then(|object| object.record().cloned());
        if let Some(record) = record.filter(|record| record.is_listed.load(Ordering::Relaxed)) {
            self.count_index(self.files().remember(record.number, &ObjectKey::new(from)));
        }
    }

    /// The directory of that number, if it is known; perhaps there is nothing in it any more.
    pub fn known_directory(&self, number: FileNumber) -> Option<Arc<Directory>> {
        self.files().read().by_number.get(&number).cloned()
    }

    /// Whether something lies below the directory `path`, which ends with the delimiter or is empty.
    pub fn has_below(&self, path: &[u8], now: u64) -> bool {
        if self.files().has_made_below(path) {
            return true;
        }
        let mut after = Vec::new();
        loop {
            let Some(listing) = self.list(&Query { after: &after, ..Query::new(path, 1) }, now) else { return false };
            if !listing.entries.is_empty() {
                return true;
            }
            let Some(next) = listing.next else { return false };
            after = next.as_bytes().to_vec();
        }
    }

    /// Whether the directory of that path is there.
    pub fn is_directory(&self, path: &[u8], now: u64) -> bool {
        // Let go before the index is looked at.
        let is_made = self.files().read().made.contains(path);
        is_made || self.has_below(path, now)
    }

    /// The directory of that path, known from now on, if it is there.
    ///
    /// # Errors
    /// [`DirectoryError::TooLong`].
    pub fn directory(&self, path: &[u8], now: u64) -> Result<Option<Arc<Directory>>, DirectoryError> {
        check_path(path)?;
        let known = self.files().read().by_path.get(path).cloned();
        if known.as_ref().is_some_and(|known| known.is_made()) {
            return Ok(known);
        }
        if !self.has_below(path, now) {
            if let Some(known) = known {
                self.forget_directory(&known);
            }
            return Ok(None);
        }
        Ok(Some(self.see_directory(path)))
    }

    /// As [`Store::directory`] for one that is there, as a listing showed.
    pub fn see_directory(&self, path: &[u8]) -> Arc<Directory> {
        let files = self.files();
        if let Some(known) = files.read().by_path.get(path) {
            return known.clone();
        }
        let now_ns = self.shared.clock.now_ns();
        let mut directories = files.write();
        if let Some(known) = directories.by_path.get(path) {
            return known.clone();
        }
        let before = directories.bytes();
        let directory = self.new_directory(path, false, Metadata::new(None, now_ns));
        directories.insert(&directory);
        while directories.seen_bytes > files.directories_bytes_max
            && let Some(oldest) = directories.seen.pop_front()
        {
            if let Some(oldest) = directories.by_number.get(&oldest).filter(|oldest| !oldest.is_made()).cloned() {
                directories.remove(&oldest);
            }
        }
        self.count_index(directories.bytes() as i64 - before as i64);
        directory
    }

    fn new_directory(&self, path: &[u8], is_made: bool, metadata: Metadata) -> Arc<Directory> {
        Arc::new(Directory {
            number: self.files().number(),
            path: ObjectKey::new(path),
            is_made: is_made.into(),
            changes: 0.into(),
            metadata: Mutex::new(metadata),
        })
    }

    /// A directory that stays without keys below; one that is known keeps its number and attributes. The directory it
    /// is an entry of is modified, unless this one was known before.
    ///
    /// # Errors
    /// [`DirectoryError`], but `NotEmpty`.
    pub fn make_directory(&self, path: &[u8], metadata: Metadata) -> Result<Arc<Directory>, DirectoryError> {
        check_path(path)?;
        let files = self.files();
        let now_ns = self.shared.clock.now_ns();
        let mut directories = files.write();
        let before = directories.bytes();
        let known = directories.by_path.get(path).cloned();
        if let Some(known) = known.as_ref().filter(|known| known.is_made()) {
            return Ok(known.clone());
        }
        let bytes = directories.made_bytes + DIRECTORY_BYTES + path.len() as u64;
        if bytes > files.directories_bytes_max {
            return Err(DirectoryError::Full { bytes, bytes_max: files.directories_bytes_max });
        }
        let directory = match known {
            Some(known) => {
                directories.remove(&known);
                known.is_made.store(true, Ordering::Relaxed);
                known
            }
            None => {
                if let Some(above) = directories.by_path.get(parent(path)) {
                    above.modify(now_ns);
                }
                self.new_directory(path, true, metadata)
            }
        };
        directories.insert(&directory);
        self.count_index(directories.bytes() as i64 - before as i64);
        Ok(directory)
    }

    /// The directory is one no more. Keys that come below it later make another.
    ///
    /// # Errors
    /// [`DirectoryError::NotEmpty`].
    ///
    /// # Panics
    /// If it is the root.
    pub fn remove_directory(&self, directory: &Directory, now: u64) -> Result<(), DirectoryError> {
        assert!(!directory.is_root(), "the root stays");
        if self.has_below(directory.path(), now) {
            return Err(DirectoryError::NotEmpty);
        }
        self.forget_directory(directory);
        let now_ns = self.shared.clock.now_ns();
        if let Some(above) = self.files().read().by_path.get(parent(directory.path())) {
            above.modify(now_ns);
        }
        Ok(())
    }

    fn forget_directory(&self, directory: &Directory) {
        let files = self.files();
        let mut directories = files.write();
        let before = directories.bytes();
        directories.remove(directory);
        let by = directories.bytes() as i64 - before as i64;
        drop(directories);
        self.count_index(by + files.remember(directory.number, &directory.path));
    }

    /// Directories that were made, or lie above one that was, right below `prefix` and behind `after` (empty: from the first
    /// on), each with its delimiter: `count` at most, in order.
    pub fn made_directories(&self, prefix: &[u8], after: &[u8], count: usize) -> Vec<ObjectKey> {
        let directories = self.files().read();
        let mut found: Vec<ObjectKey> = Vec::new();
        let mut from = if after <= prefix { prefix.to_vec() } else { behind(after) };
        while found.len() < count
            && let Some(path) = directories.made_below(Bound::Included(&from), prefix)
        {
            let path = path.as_bytes();
            let end = memchr::memchr(DELIMITER, &path[prefix.len()..]).expect("paths end with one");
            let child = &path[..=prefix.len() + end];
            from = behind(child);
            found.push(ObjectKey::new(child));
        }
        found
    }
}

/// The first octets behind `place`, and behind all that lies below it if it ends with the delimiter.
fn behind(place: &[u8]) -> Vec<u8> {
    let mut behind = place.to_vec();
    match behind.last_mut() {
        // The octet that follows it: '0'.
        Some(last) if *last == DELIMITER => *last += 1,
        _ => behind.push(0),
    }
    behind
}

fn check_path(path: &[u8]) -> Result<(), DirectoryError> {
    assert!(path.is_empty() || path.ends_with(&[DELIMITER]), "a path ends with the delimiter");
    if path.len() > KEY_BYTES_MAX { Err(DirectoryError::TooLong { len: path.len() }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sizes;

    const MIB: u64 = 1 << 20;

    fn store() -> Store {
        Store::with_files(Sizes {
            memory_bytes: 4 * MIB,
            head_bytes: 64 << 10,
            value_bytes_max: MIB,
            index_bytes_max: 4 * MIB,
            pinned_share: 0.25,
            pool_bytes: vec![MIB],
        })
        .unwrap()
    }

    fn number_of(store: &Store, key: &[u8]) -> FileNumber {
        store.peek(key, store.clock().now()).unwrap().record().unwrap().number()
    }

    #[test]
    fn records_cost_what_the_decision_says() {
        assert_eq!((FILE_BYTES, DIRECTORY_BYTES), (160, 296));
    }

    #[test]
    fn a_number_is_kept_by_whoever_overwrites_and_lost_by_whoever_takes_away() {
        let store = store();
        let now = store.clock().now();
        store.put(b"key", b"one", 0, 0).unwrap();
        let first = number_of(&store, b"key");
        store.put(b"key", b"two", 0, now + 5).unwrap();
        assert_eq!(number_of(&store, b"key"), first);
        // Dead, and set once more before anybody noticed.
        let later = now + 5;
        assert!(store.file(first, later).is_none());
        store.put(b"key", b"three", 0, now + 5).unwrap();
        let second = number_of(&store, b"key");
        assert_ne!(second, first);
        let draft = store.draft(0, None);
        store.commit(b"key", draft, 0, 0, crate::store::Condition::Any, later);
        let third = number_of(&store, b"key");
        assert!(third != second && store.file(second, now).is_none());
        store.rename(b"key", b"other", now).unwrap();
        assert_eq!(number_of(&store, b"other"), third);
        assert!(store.delete(b"other", now) && store.file(third, now).is_none());
        assert!(first.0 >= 1 << 32 && first < second && second < third);
    }

    #[test]
    fn a_place_is_remembered_where_somebody_may_go_on_behind_it() {
        let store = store();
        let now = store.clock().now();
        for key in [&b"d/listed"[..], b"d/other"] {
            store.put(key, b"", 0, 0).unwrap();
        }
        let (listed, other) = (number_of(&store, b"d/listed"), number_of(&store, b"d/other"));
        store.peek(b"d/listed", now).unwrap().record().unwrap().mark_listed();
        store.rename(b"d/listed", b"e/listed", now).unwrap();
        let place = |number, prefix: &[u8]| store.place_of(number, prefix).map(|key| key.as_bytes().to_vec());
        assert_eq!(place(listed, b"d/"), Some(b"d/listed".to_vec()));
        assert_eq!(place(listed, b"e/"), Some(b"e/listed".to_vec()));
        store.delete(b"d/other", now);
        assert_eq!(place(other, b"d/"), None);
        let before = store.gauges().index_bytes;
        for number in 0..5000_u32 {
            let key = [b"e/".as_slice(), &number.to_be_bytes()].concat();
            store.put(&key, b"", 0, 0).unwrap();
            store.peek(&key, now).unwrap().record().unwrap().mark_listed();
            store.delete(&key, now);
        }
        assert!(store.gauges().index_bytes - before <= 4 * MIB / DEPARTED_DIVISOR, "the oldest are forgotten");
        assert_eq!(place(listed, b"d/"), None);
    }

    #[test]
    fn a_path_lies_in_the_directory_before_its_last_part() {
        for (path, above) in
            [(&b"a"[..], &b""[..]), (b"a/", b""), (b"a/b", b"a/"), (b"a/b/", b"a/"), (b"a//", b"a/"), (b"", b"")]
        {
            assert_eq!(parent(path), above, "{}", path.escape_ascii());
        }
    }
}
