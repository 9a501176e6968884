//! Files: what a door that shows keys as files has beside the [namespace](crate::store::namespace): numbers that name one
//! file for as long as its key is there, attributes that values do not have, and directories.
//!
//! ```text
//!   index        key ──▶ Object ──▶ FileRecord { number, key, metadata }     from the first commit to the last removal
//!   records      number ──────────▶   "                                     overwriting hands it on
//!   directories  path, number ────▶ Directory { number, path, metadata }    those that were made or asked for
//!   departed     number ──▶ key                                             for who still has a place to go on from
//! ```
//! `/` parts a key into directories. A directory is there while a key lies below it, or since it was made. Whoever adds or
//! removes a key, by any door, changes the times of the directories that lose or gain an entry, if they are known. Made by
//! [`Store::with_files`]; other stores have nothing of this. See docs/decisions/0014-files-over-keys.md.

use crate::store::Store;
use crate::store::directories::AllDirectories;
use crate::store::key::ObjectKey;
use crate::store::object::Object;
use dashmap::DashMap;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Parts keys into directories and a name.
pub const DELIMITER: u8 = b'/';
/// Longest name of a file or directory, in octets.
pub const NAME_BYTES_MAX: usize = 255;
/// What the index spends on the record of one key, in octets: the record, its two counts, a place in a table half full.
pub(super) const FILE_BYTES: u64 = (size_of::<FileRecord>() + 16 + 2 * 32) as u64;
/// And on a key that departed, beside its octets.
const DEPARTED_BYTES: u64 = 96;
/// Keys that departed may take this part of the index.
const DEPARTED_DIVISOR: u64 = 32;

/// Whether a part of a key, between delimiters, can be the name of something in a directory.
pub fn is_name(part: &[u8]) -> bool {
    !matches!(part, b"" | b"." | b"..") && part.len() <= NAME_BYTES_MAX && memchr::memchr(0, part).is_none()
}

/// Names one file or directory of one run of a store; never given twice. The root is 1, others are at least 2^32.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FileNumber(pub u64);

impl FileNumber {
    pub const ROOT: Self = Self(1);
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
    pub(super) directories: AllDirectories,
    departed: Mutex<Departed>,
    departed_bytes_max: u64,
}

impl Files {
    /// `now_ms` tells this run from others: no number is given in two of them.
    pub(super) fn new(index_bytes_max: u64, now_ms: u64, now_ns: u64) -> Self {
        Self {
            next: AtomicU64::new((now_ms << 16).max(1 << 32)),
            records: DashMap::with_hasher(ahash::RandomState::new()),
            directories: AllDirectories::new(index_bytes_max, now_ns),
            departed: Mutex::default(),
            departed_bytes_max: index_bytes_max / DEPARTED_DIVISOR,
        }
    }

    pub(super) fn number(&self) -> FileNumber {
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

    pub(super) fn remember(&self, number: FileNumber, key: &ObjectKey) -> i64 {
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
}

impl Store {
    /// Whether it was made with files.
    pub fn has_files(&self) -> bool {
        self.shared.files.is_some()
    }
}

/// Calls of the file door. All of them panic on a store without files.
impl Store {
    pub(super) fn files(&self) -> &Files {
        self.shared.files.as_ref().expect("the store was made with files")
    }

    pub(super) fn count_index(&self, by: i64) {
        self.shared.index_bytes.fetch_add(by as u64, Ordering::Relaxed);
    }

    /// The living object that is the file of that number, if it is none of a directory.
    pub fn file(&self, number: FileNumber, now: u64) -> Option<(Arc<FileRecord>, Arc<Object>)> {
        let record = |number: FileNumber| Some(self.files().records.get(&number.0)?.value().clone());
        let mut found = record(number)?;
        loop {
            if let Some(object) = self.living(found.key(), now)
                && object.record().is_some_and(|found| found.number == number)
            {
                return Some((object.record()?.clone(), object));
            }
            // Once more where it was renamed in between.
            let moved = record(number)?;
            if Arc::ptr_eq(&found, &moved) {
                return None;
            }
            found = moved;
        }
    }

    /// Where below `prefix` something of that number is, or was a while ago: a key, or a path that ends with the delimiter.
    pub fn place_of(&self, number: FileNumber, prefix: &[u8]) -> Option<ObjectKey> {
        let files = self.files();
        let record = files.records.get(&number.0).map(|record| record.key.clone());
        let living = record.or_else(|| files.directories.place_of(number));
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sizes;

    const MIB: u64 = 1 << 20;

    fn store() -> Store {
        let sizes = Sizes { memory_bytes: 4 * MIB, value_bytes_max: MIB, index_bytes_max: 4 * MIB, ..Sizes::small() };
        Store::with_files(Sizes { pool_bytes: vec![MIB], ..sizes }).unwrap()
    }

    fn number_of(store: &Store, key: &[u8]) -> FileNumber {
        store.peek(key, store.clock().now()).unwrap().record().unwrap().number()
    }

    #[test]
    fn records_cost_what_the_decision_says() {
        assert_eq!((FILE_BYTES, crate::store::directories::DIRECTORY_BYTES), (160, 296));
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
}
