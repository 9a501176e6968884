//! Directories of a store with [files](crate::store::files): a directory is there while a key lies below it, or since it was
//! made.
//!
//! ```text
//!   by_path    "a/b/" ─┬─▶ Directory { number, path, metadata }     once somebody asked for it: seen
//!   by_number  number ─┘                                            with or without keys below: made
//! ```
//! Those that were seen are forgotten, the oldest first, where they take too much of the index; those that were made never.

use crate::store::Store;
use crate::store::files::{DELIMITER, FileNumber, Metadata};
use crate::store::key::{KEY_BYTES_MAX, ObjectKey};
use crate::store::namespace::{Query, children};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What the index spends on a directory, in octets, beside its path: the record, and its places in three tables.
pub(super) const DIRECTORY_BYTES: u64 = (size_of::<Directory>() + 16 + 4 * 48) as u64;
/// Made directories may take this part of the index, those that were seen as much again.
const DIRECTORIES_DIVISOR: u64 = 8;

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
        self.number == FileNumber::ROOT
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
        // One that was moved meanwhile has its number, and stays.
        if self.by_number.get(&directory.number).is_none_or(|known| !std::ptr::eq(&raw const **known, directory)) {
            return;
        }
        self.by_number.remove(&directory.number);
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

/// The directory that `path`, a key or a directory but the root, is an entry of.
pub fn parent(path: &[u8]) -> &[u8] {
    let inner = path.strip_suffix(&[DELIMITER]).unwrap_or(path);
    inner.iter().rposition(|octet| *octet == DELIMITER).map_or(&[], |at| &path[..=at])
}

/// All that are known, a leaf in the order of locks but for what is locked of one.
#[derive(Debug)]
pub(super) struct AllDirectories {
    known: RwLock<Directories>,
    bytes_max: u64,
}

impl AllDirectories {
    /// The root alone.
    pub(super) fn new(index_bytes_max: u64, now_ns: u64) -> Self {
        let root = Directory {
            number: FileNumber::ROOT,
            path: ObjectKey::new(b""),
            is_made: true.into(),
            changes: 0.into(),
            metadata: Mutex::new(Metadata::new(None, now_ns)),
        };
        let mut known = Directories::default();
        known.insert(&Arc::new(root));
        Self { known: RwLock::new(known), bytes_max: index_bytes_max / DIRECTORIES_DIVISOR }
    }

    /// The path of a directory that is known.
    pub(super) fn place_of(&self, number: FileNumber) -> Option<ObjectKey> {
        self.read().by_number.get(&number).map(|directory| directory.path.clone())
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
    pub(super) fn relocate(&self, from: &[u8], to: &[u8], now_ns: u64) -> i64 {
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
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Directories> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls of the file door. All of them panic on a store without files.
impl Store {
    fn directories(&self) -> &AllDirectories {
        &self.files().directories
    }

    /// The directory of that number, if it is known; perhaps there is nothing in it any more.
    pub fn known_directory(&self, number: FileNumber) -> Option<Arc<Directory>> {
        self.directories().read().by_number.get(&number).cloned()
    }

    /// Whether something lies below the directory `path`, which ends with the delimiter or is empty.
    pub fn has_below(&self, path: &[u8], now: u64) -> bool {
        if self.directories().has_made_below(path) {
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
        let is_made = self.directories().read().made.contains(path);
        is_made || self.has_below(path, now)
    }

    /// The directory of that path, known from now on, if it is there.
    ///
    /// # Errors
    /// [`DirectoryError::TooLong`].
    pub fn directory(&self, path: &[u8], now: u64) -> Result<Option<Arc<Directory>>, DirectoryError> {
        check_path(path)?;
        let known = self.directories().read().by_path.get(path).cloned();
        if known.as_ref().is_some_and(|known| known.is_made()) {
            return Ok(known);
        }
        if !self.has_below(path, now) {
            // It may have been made meanwhile.
            let made = known.filter(|known| !self.forget_unless_made(known));
            return Ok(made);
        }
        Ok(Some(self.see_directory(path)))
    }

    /// As [`Store::directory`] for one that is there, as a listing showed.
    pub fn see_directory(&self, path: &[u8]) -> Arc<Directory> {
        let all = self.directories();
        if let Some(known) = all.read().by_path.get(path) {
            return known.clone();
        }
        let now_ns = self.shared.clock.now_ns();
        let mut directories = all.write();
        if let Some(known) = directories.by_path.get(path) {
            return known.clone();
        }
        let before = directories.bytes();
        let directory = self.new_directory(path, false, Metadata::new(None, now_ns));
        directories.insert(&directory);
        while directories.seen_bytes > all.bytes_max
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
        let all = self.directories();
        let now_ns = self.shared.clock.now_ns();
        let mut directories = all.write();
        let before = directories.bytes();
        let known = directories.by_path.get(path).cloned();
        if let Some(known) = known.as_ref().filter(|known| known.is_made()) {
            return Ok(known.clone());
        }
        let bytes = directories.made_bytes + DIRECTORY_BYTES + path.len() as u64;
        if bytes > all.bytes_max {
            return Err(DirectoryError::Full { bytes, bytes_max: all.bytes_max });
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
        if let Some(above) = self.directories().read().by_path.get(parent(directory.path())) {
            above.modify(now_ns);
        }
        Ok(())
    }

    /// False if it was made.
    fn forget_unless_made(&self, directory: &Directory) -> bool {
        let directories = self.directories().write();
        let is_made = directory.is_made();
        if !is_made {
            self.forget_known(directories, directory);
        }
        !is_made
    }

    fn forget_directory(&self, directory: &Directory) {
        self.forget_known(self.directories().write(), directory);
    }

    fn forget_known(&self, mut directories: RwLockWriteGuard<'_, Directories>, directory: &Directory) {
        let before = directories.bytes();
        directories.remove(directory);
        let by = directories.bytes() as i64 - before as i64;
        drop(directories);
        self.count_index(by + self.files().remember(directory.number, &directory.path));
    }

    /// Directories that were made, or lie above one that was, right below `prefix` and behind `after` (empty: from the first
    /// on), each with its delimiter: `count` at most, in order.
    pub fn made_directories(&self, prefix: &[u8], after: &[u8], count: usize) -> Vec<ObjectKey> {
        let directories = self.directories().read();
        children(prefix, after, count, |from| directories.made_below(Bound::Included(from), prefix).cloned())
    }
}

fn check_path(path: &[u8]) -> Result<(), DirectoryError> {
    assert!(path.is_empty() || path.ends_with(&[DELIMITER]), "a path ends with the delimiter");
    if path.len() > KEY_BYTES_MAX { Err(DirectoryError::TooLong { len: path.len() }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sizes;

    fn store() -> Store {
        Store::with_files(Sizes { index_bytes_max: 4 << 20, ..Sizes::small() }).unwrap()
    }

    #[test]
    fn whoever_found_a_directory_empty_does_not_make_others_forget_what_became_of_it() {
        let store = store();
        let now = store.clock().now();
        store.put(b"d/key", b"", 0, 0).unwrap();
        let seen = store.directory(b"d/", now).unwrap().unwrap();
        store.rename_directory(b"d/", b"e/", 10, now).unwrap();
        // By then another call has looked for keys below `d/` and found none.
        store.forget_unless_made(&seen);
        let moved = store.known_directory(seen.number()).expect("its number is good");
        assert_eq!(moved.path(), b"e/");
        store.delete(b"e/key", now);
        let made = store.make_directory(b"e/", moved.metadata()).unwrap();
        assert!(made.is_made() && !store.forget_unless_made(&moved), "it was made");
        assert_eq!(store.directory(b"e/", now).unwrap().map(|found| found.number()), Some(seen.number()));
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
