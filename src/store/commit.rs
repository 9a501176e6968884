//! How values become visible: whole, in one step, under a condition that is judged in that step.

use crate::store::draft::{Draft, Want};
use crate::store::key::ObjectKey;
use crate::store::object::{Object, Piece, marks};
use crate::store::segment::{Class, Content, block_bytes_min, footprint};
use crate::store::{Counters, Short, Store};
use dashmap::mapref::entry::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

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
        let done = self.publish(key, pieces, class, len, flags, expiry.into(), condition, now);
        drop(claim);
        done
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
        let class = self.class_of(len);
        let pieces = match self.join(old, draft.pieces(), side, class) {
            Ok(pieces) => pieces,
            Err(short) => return Joined::Short(draft, short),
        };
        let condition = Condition::Version(old.version());
        match self.publish(old.key(), pieces, class, len, old.flags(), Expiry::Kept, condition, now) {
            Committed::Exists => Joined::Changed(draft),
            done => Joined::Done(done),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one object, and when it may appear")]
    fn publish(
        &self,
        key: &[u8],
        pieces: Vec<Piece>,
        class: Class,
        len: u64,
        flags: u32,
        expiry: Expiry,
        condition: Condition,
        now: u64,
    ) -> Committed {
        let key = ObjectKey::new(key);
        let object = Arc::new(Object {
            key_hash: self.shared.index.hasher().hash_one(key.as_bytes()),
            key: key.clone(),
            flags,
            len,
            class,
            footprint: footprint(len, class),
            marks: marks(&pieces),
            pieces: pieces.into(),
            version: AtomicU64::new(u64::MAX),
            expiry: AtomicU64::new(if let Expiry::At(at) = expiry { at } else { 0 }),
            uses: 0.into(),
            read: false.into(),
            pins: 0.into(),
            standing: Mutex::new(None),
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
                self.unlink(entry.get());
                self.link(&object);
                Some(entry.insert(object.clone()))
            }
            Entry::Vacant(entry) => {
                if let Some(refusal) = refusal(condition, None) {
                    return refusal;
                }
                self.link(&object);
                self.insert_name(entry.key());
                drop(entry.insert(object.clone()));
                None
            }
        };
        // Its blocks and extents come free here, after the entry is let go.
        drop(replaced);
        Counters::add(&self.shared.counters.stored, 1);
        while self.shared.index_bytes.load(Ordering::Relaxed) > self.shared.sizes.index_bytes_max {
            if !self.evict(Class::Small) && !self.evict(Class::Large) {
                break;
            }
        }
        Committed::Stored { version: object.version() }
    }

    fn link(&self, object: &Arc<Object>) {
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
