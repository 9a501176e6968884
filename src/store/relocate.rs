//! Moving objects to other keys, all in one step: every other call finds all of them here, or all of them there.

use crate::store::Store;
use crate::store::files::DELIMITER;
use crate::store::key::{KEY_BYTES_MAX, ObjectKey};
use crate::store::object::Object;
use dashmap::SharedValue;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Why nothing was moved.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RelocateError {
    #[error("there is no such key")]
    NotFound,
    #[error("something lies where it should go")]
    NotEmpty,
    #[error("a key of {len} octets would be too long")]
    TooLong { len: usize },
    #[error("more than {count_max} keys")]
    TooMany { count_max: usize },
}

/// Calls of the file door, on a store with files.
impl Store {
    /// The object `from` has the key `to` from now on, in the place of what had it. It is the same file, another version, and
    /// nobody's pin or hold: readers go on with what they have.
    ///
    /// # Errors
    /// `NotFound`.
    ///
    /// # Panics
    /// If `to` is longer than a key may be.
    pub fn rename(&self, from: &[u8], to: &[u8], now: u64) -> Result<(), RelocateError> {
        if self.living(from, now).is_none() {
            return Err(RelocateError::NotFound);
        }
        let to = ObjectKey::new(to);
        if from == to.as_bytes() {
            return Ok(());
        }
        if self.relocate(now, || Ok(vec![(ObjectKey::new(from), to.clone())]), |_| 0)? == 0 {
            return Err(RelocateError::NotFound);
        }
        self.remember_place(to.as_bytes(), from, now);
        Ok(())
    }

    /// All that lies below the directory `from` lies below `to` from now on, directories too: up to `count_max` keys. Both
    /// end with the delimiter.
    ///
    /// # Errors
    /// [`RelocateError`]; `NotFound` is none of them.
    ///
    /// # Panics
    /// If one of them lies below the other, or is the root.
    pub fn rename_directory(&self, from: &[u8], to: &[u8], count_max: usize, now: u64) -> Result<(), RelocateError> {
        assert!(from.ends_with(&[DELIMITER]) && to.ends_with(&[DELIMITER]), "paths of directories end with one");
        assert!(!from.starts_with(to) && !to.starts_with(from), "a directory does not move into itself");
        // The dead are buried first: what is left there is in the way.
        if self.has_below(to, now) {
            return Err(RelocateError::NotEmpty);
        }
        let shared = &self.shared;
        let (Some(namespace), Some(files)) = (&shared.namespace, &shared.files) else {
            panic!("the store was made with files");
        };
        let pick = || {
            if namespace.all(to, 0).is_none() || files.directories.has_made_below(to) {
                return Err(RelocateError::NotEmpty);
            }
            let keys = namespace.all(from, count_max).ok_or(RelocateError::TooMany { count_max })?;
            let longest = keys.iter().map(|key| key.as_bytes().len() - from.len() + to.len()).max().unwrap_or(0);
            let len = longest.max(files.directories.longest_moved(from, to));
            if len > KEY_BYTES_MAX {
                return Err(RelocateError::TooLong { len });
            }
            let moved = |key: ObjectKey| {
                let to = ObjectKey::new(&[to, &key.as_bytes()[from.len()..]].concat());
                (key, to)
            };
            Ok(keys.into_iter().map(moved).collect())
        };
        self.relocate(now, pick, |now_ns| files.directories.relocate(from, to, now_ns))?;
        Ok(())
    }

    /// Moves what `pick` says, then does `finish`, and returns how many there were. Both run while all entries of the index are
    /// locked, so neither may look into it; `finish` says by how much it makes the index grow.
    fn relocate(
        &self,
        now: u64,
        pick: impl FnOnce() -> Result<Vec<(ObjectKey, ObjectKey)>, RelocateError>,
        finish: impl FnOnce(u64) -> i64,
    ) -> Result<usize, RelocateError> {
        let shared = &self.shared;
        let index = &shared.index;
        let now_ns = shared.clock.now_ns();
        let mut gone = Vec::new();
        // Nobody else holds two of these locks, so any order will do.
        let mut shards: Vec<_> = index.shards().iter().map(|shard| shard.write()).collect();
        let moves = pick()?;
        let mut count = 0;
        for (from, to) in moves {
            let hash = |key: &ObjectKey| index.hash_usize(key) as u64;
            let (hash_from, hash_to) = (hash(&from), hash(&to));
            let shard = &mut shards[index.determine_shard(hash_from as usize)];
            let Some((_, old)) = shard.remove_entry(hash_from, |(key, _)| *key == from) else { continue };
            let old = old.into_inner();
            let is_dead = self.death(&old, now).is_some();
            self.unlink(&old);
            if is_dead {
                self.remove_name(&old);
                gone.push(old);
                continue;
            }
            let shard = &mut shards[index.determine_shard(hash_to as usize)];
            if let Some((_, replaced)) = shard.remove_entry(hash_to, |(key, _)| *key == to) {
                let replaced = replaced.into_inner();
                self.depart(&replaced);
                gone.push(replaced);
            }
            let object = self.renamed(&old, to.clone(), now_ns);
            self.link(&object);
            // The record goes on under the other key, so only the name departs.
            self.move_name(&from, &to, now_ns);
            shard.insert(hash_to, (to, SharedValue::new(object)), |(key, _)| hash(key));
            gone.push(old);
            count += 1;
        }
        let by = finish(now_ns);
        shared.index_bytes.fetch_add(by as u64, Ordering::Relaxed);
        drop(shards);
        // Blocks and extents of what was replaced come free here.
        drop(gone);
        Ok(count)
    }

    fn renamed(&self, old: &Object, key: ObjectKey, now_ns: u64) -> Arc<Object> {
        let record = match (&self.shared.files, old.record()) {
            (Some(files), Some(record)) => OnceLock::from(files.move_record(record, &key, now_ns)),
            _ => OnceLock::new(),
        };
        Arc::new(Object {
            key_hash: self.shared.index.hasher().hash_one(key.as_bytes()),
            key,
            flags: old.flags,
            len: old.len,
            class: old.class,
            pieces: old.pieces.clone(),
            marks: old.marks.clone(),
            footprint: old.footprint,
            version: AtomicU64::new(u64::MAX),
            expiry: AtomicU64::new(old.expiry()),
            uses: old.uses.load(Ordering::Relaxed).into(),
            read: old.read.load(Ordering::Relaxed).into(),
            pins: 0.into(),
            holds: 0.into(),
            standing: Mutex::new(None),
            holes: old.holes,
            record,
        })
    }

    /// Under both entries.
    fn move_name(&self, from: &ObjectKey, to: &ObjectKey, now_ns: u64) {
        let Some(namespace) = &self.shared.namespace else { return };
        self.shared.index_bytes.fetch_sub(namespace.remove(from.as_bytes()), Ordering::Relaxed);
        self.shared.index_bytes.fetch_add(namespace.insert(to.clone()), Ordering::Relaxed);
        if let Some(files) = &self.shared.files {
            for key in [from.as_bytes(), to.as_bytes()] {
                files.directories.touch(key, namespace.shared(key, DELIMITER), now_ns);
            }
        }
    }
}
