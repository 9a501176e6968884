//! How values become visible: whole, in one step, under a condition that is judged in that step.

use crate::store::draft::{Draft, Want};
use crate::store::files::{FileRecord, Making, Metadata};
use crate::store::key::ObjectKey;
use crate::store::object::{Object, Piece, marks};
use crate::store::segment::{Class, Content, block_bytes_min, footprint};
use crate::store::sparse::SparseDraft;
use crate::store::{Counters, Short, Store};
use dashmap::mapref::entry::Entry;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Under which condition a value becomes visible; judged in the same step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Condition {
    Any,
    Absent,
    Present,
    /// The object of this version is still there.
    Version(u64),
}

/// What became of a commit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Committed {
    Stored {
        version: u64,
    },
    /// There is one already (`Absent`), or none (`Present`).
    NotStored,
    /// None of that key (`Version`).
    NotFound,
    /// Another version (`Version`).
    Exists,
}

/// What became of a conditional delete.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Deleted {
    Done,
    /// None of that key.
    NotFound,
    /// Another version.
    Exists,
}

/// What became of a commit that joins an object and a draft.
#[derive(Debug)]
pub enum Joined {
    Done(Committed),
    /// The key names another object by now; the draft can be joined with that.
    Changed(Draft),
    /// Not enough space at once; the draft can be joined later.
    Short(Draft, Short),
}

/// On which side a value grows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    Front,
    Back,
}

/// When a new object expires.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Expiry {
    /// At this second of the store's clock; 0 is never.
    At(u64),
    /// When the object expires that is replaced, as it is at that moment. Never, if there is none.
    Kept,
}

impl From<u64> for Expiry {
    fn from(at: u64) -> Self {
        Self::At(at)
    }
}

/// A value that is to become visible.
struct Value {
    pieces: Vec<Piece>,
    class: Class,
    len: u64,
    /// Octets of blocks or extents that it takes.
    footprint: u64,
    flags: u32,
    expiry: Expiry,
}

/// Octets of blocks or extents that `pieces` take, those of one segment once.
fn footprint_of(pieces: &[Piece]) -> u64 {
    let mut seen = HashSet::with_capacity_and_hasher(pieces.len(), ahash::RandomState::new());
    let first = pieces.iter().filter(|piece| seen.insert(Arc::as_ptr(&piece.segment)));
    first.map(|piece| piece.segment.footprint_bytes()).sum()
}

/// Pieces smaller than this are joined when a value grows, so that many small appends do not make many small pieces.
const JOINED_BYTES_MAX: u64 = 64 << 10;

impl Store {
    /// Makes a complete draft visible in one step, or says why not. The old object, if any, lives on with its readers.
    pub fn commit(
        &self,
        key: &[u8],
        draft: Draft,
        flags: u32,
        expiry: impl Into<Expiry>,
        condition: Condition,
        now: u64,
    ) -> Committed {
        let (class, len, pieces, claim) = draft.into_parts();
        let value = Value { footprint: footprint(len, class), pieces, class, len, flags, expiry: expiry.into() };
        let done = self.publish(key, value, condition, Making::Stored, now);
        drop(claim);
        done
    }

    /// A new file without octets; `NotStored` if the key names an object.
    ///
    /// # Panics
    /// On a store without files.
    pub fn create_file(&self, key: &[u8], metadata: Metadata, now: u64) -> Committed {
        assert!(self.shared.files.is_some(), "the store was made with files");
        let value =
            Value { pieces: Vec::new(), class: Class::Small, len: 0, footprint: 0, flags: 0, expiry: Expiry::At(0) };
        self.publish(key, value, Condition::Absent, Making::File(metadata), now)
    }

    /// Makes what a file door wrote visible to all doors, in the place of the object it was begun with: `Exists` or
    /// `NotFound` if that is there no more. Flags, expiry and the times of the file stay as they are.
    ///
    /// # Errors
    /// The draft, and what there is not enough of at once.
    pub fn commit_sparse(&self, mut draft: SparseDraft, now: u64) -> Result<Committed, (Box<SparseDraft>, Short)> {
        let pieces = draft.sealed_pieces();
        let has_extents = pieces.iter().any(|piece| !piece.segment.is_hole() && !piece.segment.is_ram_only());
        // One that was longer may be on disk.
        let class = if has_extents { Class::Large } else { self.class_of(draft.len()) };
        let pieces = match class {
            Class::Small => pieces,
            Class::Large => match self.give_extents(pieces) {
                Ok(pieces) => pieces,
                Err(short) => return Err((Box::new(draft), short)),
            },
        };
        draft.give_back_records();
        let base = draft.base();
        let value = Value {
            footprint: footprint_of(&pieces),
            pieces,
            class,
            len: draft.len(),
            flags: base.flags(),
            expiry: Expiry::Kept,
        };
        let metadata = Metadata::new(None, self.shared.clock.now_ns());
        let condition = Condition::Version(base.version());
        Ok(self.publish(base.key(), value, condition, Making::File(metadata), now))
    }

    /// Takes the object of that version out of the index; another one stays.
    pub fn delete_if(&self, key: &[u8], version: u64, now: u64) -> Deleted {
        let living = self.living(key, now).map(|object| object.version());
        match refusal(Condition::Version(version), living) {
            Some(Committed::NotFound) => return Deleted::NotFound,
            Some(_) => return Deleted::Exists,
            None => {}
        }
        let removed = self.shared.index.remove_if(key, |_, found| found.version() == version && self.depart(found));
        match removed {
            Some(_) => Deleted::Done,
            // Versions are given once: whoever came in between took its place.
            None if self.living(key, now).is_some() => Deleted::Exists,
            None => Deleted::NotFound,
        }
    }

    /// Makes `old` with the octets of `draft` at one side visible. The two share segments.
    pub fn commit_joined(&self, old: &Object, draft: Draft, side: Side, now: u64) -> Joined {
        let len = old.len() + draft.len();
        // One that was longer may be on disk.
        let class = if old.class() == Class::Large { Class::Large } else { self.class_of(len) };
        let pieces = match self.join(old, draft.pieces(), side, class) {
            Ok(pieces) => pieces,
            Err(short) => return Joined::Short(draft, short),
        };
        let footprint = if old.holes > 0 { footprint_of(&pieces) } else { footprint(len, class) };
        let value = Value { pieces, class, len, footprint, flags: old.flags(), expiry: Expiry::Kept };
        match self.publish(old.key(), value, Condition::Version(old.version()), Making::Stored, now) {
            Committed::Exists => Joined::Changed(draft),
            done => Joined::Done(done),
        }
    }

    fn publish(&self, key: &[u8], value: Value, condition: Condition, making: Making, now: u64) -> Committed {
        let key = ObjectKey::new(key);
        let Value { pieces, class, len, footprint, flags, expiry } = value;
        let object = Arc::new(Object {
            key_hash: self.shared.index.hasher().hash_one(key.as_bytes()),
            key: key.clone(),
            flags,
            len,
            class,
            footprint,
            marks: marks(&pieces),
            holes: pieces.iter().filter(|piece| piece.segment.is_hole()).count() as u32,
            pieces: pieces.into(),
            version: AtomicU64::new(u64::MAX),
            expiry: AtomicU64::new(if let Expiry::At(at) = expiry { at } else { 0 }),
            uses: 0.into(),
            read: false.into(),
            pins: 0.into(),
            holds: 0.into(),
            standing: Mutex::new(None),
            record: OnceLock::new(),
        });
        let replaced = match self.shared.index.entry(key) {
            Entry::Occupied(mut entry) => {
                let living = self.death(entry.get(), now).is_none().then(|| entry.get().version());
                if let Some(refusal) = refusal(condition, living) {
                    return refusal;
                }
                if expiry == Expiry::Kept {
                    // Read here and not before: a touch in between must not be lost.
                    object.expiry.store(entry.get().expiry(), Ordering::Relaxed);
                }
                if self.shared.files.is_some() && living.is_none() {
                    // Another file of the same name: the dead one goes first, with all that hangs on it.
                    self.depart(entry.get());
                    self.adopt(&object, None, making);
                    self.link(&object);
                    self.insert_name(entry.key());
                } else {
                    self.unlink(entry.get());
                    self.adopt(&object, entry.get().record(), making);
                    self.link(&object);
                }
                Some(entry.insert(object.clone()))
            }
            Entry::Vacant(entry) => {
                if let Some(refusal) = refusal(condition, None) {
                    return refusal;
                }
                self.adopt(&object, None, making);
                self.link(&object);
                self.insert_name(entry.key());
                drop(entry.insert(object.clone()));
                None
            }
        };
        // Its blocks and extents come free here, after the entry is let go.
        drop(replaced);
        Counters::add(&self.shared.counters.stored, 1);
        self.make_index_room(0);
        Committed::Stored { version: object.version() }
    }

    /// Evicts until the index has room for `more_bytes`; false if it has none then.
    pub(super) fn make_index_room(&self, more_bytes: u64) -> bool {
        let shared = &self.shared;
        // Held records count twice while they are indexed, so that they count once when their key is gone.
        let index_bytes =
            || shared.index_bytes.load(Ordering::Relaxed) + shared.held_index_bytes.load(Ordering::Relaxed);
        while index_bytes() + more_bytes > shared.sizes.index_bytes_max {
            if !self.evict(Class::Small) && !self.evict(Class::Large) {
                return false;
            }
        }
        true
    }

    /// Under the index entry of a new object: its record, in a store that has files.
    fn adopt(&self, object: &Object, previous: Option<&Arc<FileRecord>>, making: Making) {
        if let Some(files) = &self.shared.files {
            let record = files.adopt(&object.key, previous, making, self.shared.clock.now_ns());
            object.record.set(record).expect("nobody else gives it one");
        }
    }

    pub(super) fn link(&self, object: &Arc<Object>) {
        let version = self.shared.versions.fetch_add(1, Ordering::Relaxed) + 1;
        object.version.store(version, Ordering::Relaxed);
        self.enroll(object);
        self.shared.index_bytes.fetch_add(object.index_bytes(), Ordering::Relaxed);
        self.shared.value_bytes.fetch_add(object.len, Ordering::Relaxed);
    }

    fn join(&self, old: &Object, new: &[Piece], side: Side, class: Class) -> Result<Vec<Piece>, Short> {
        let (front, back): (&[Piece], &[Piece]) = match side {
            Side::Front => (new, old.pieces()),
            Side::Back => (old.pieces(), new),
        };
        let mut pieces = Vec::with_capacity(front.len() + back.len());
        pieces.extend_from_slice(front);
        let mut rest = back;
        if let (Some(last), Some(first)) = (front.last(), back.first())
            && u64::from(last.len) + u64::from(first.len) <= JOINED_BYTES_MAX
            && let (Content::Ram(one), Content::Ram(two)) = (last.segment.content(), first.segment.content())
        {
            pieces.pop();
            rest = &back[1..];
            let octets = [last.octets(&one), first.octets(&two)].concat();
            pieces.extend(self.copy(&octets, class)?);
        }
        pieces.extend_from_slice(rest);
        if class == Class::Large {
            pieces = self.give_extents(pieces)?;
        }
        Ok(pieces)
    }

    /// Room on disk for each of `pieces` that has none: pieces of a value that has outgrown its head.
    fn give_extents(&self, pieces: Vec<Piece>) -> Result<Vec<Piece>, Short> {
        let mut given = Vec::with_capacity(pieces.len());
        for piece in pieces {
            if piece.segment.is_ram_only() {
                let bytes = piece.segment.spill_bytes();
                if bytes < block_bytes_min(Class::Large)
                    && let Content::Ram(ram) = piece.segment.content()
                {
                    // The disk takes whole aligned units, and what lies behind such a block is another's.
                    given.extend(self.copy(piece.octets(&ram), Class::Large)?);
                    continue;
                }
                piece.segment.spill(self.take_extent(bytes)?);
            }
            given.push(piece);
        }
        Ok(given)
    }

    /// `octets` in new segments.
    fn copy(&self, octets: &[u8], class: Class) -> Result<Vec<Piece>, Short> {
        let mut pieces = Vec::new();
        let mut rest = octets;
        while !rest.is_empty() {
            let mut filling = self.fill(Want { class, remaining: rest.len() as u64, head: false })?;
            let count = filling.missing();
            filling.spare().copy_from_slice(&rest[..count]);
            filling.advance(count);
            rest = &rest[count..];
            let segment = filling.seal(&self.shared.residency);
            pieces.push(Piece { len: segment.len(), start: 0, segment });
        }
        Ok(pieces)
    }
}

/// Why `condition` does not hold for what is there, if it does not.
pub(crate) fn refusal(condition: Condition, living: Option<u64>) -> Option<Committed> {
    match (condition, living) {
        (Condition::Any, _) | (Condition::Absent, None) | (Condition::Present, Some(_)) => None,
        (Condition::Absent, Some(_)) | (Condition::Present, None) => Some(Committed::NotStored),
        (Condition::Version(_), None) => Some(Committed::NotFound),
        (Condition::Version(wanted), Some(found)) => (wanted != found).then_some(Committed::Exists),
    }
}
