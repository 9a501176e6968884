//! Holds: pins that outlive a request, for peers that ask to keep an object.
//!
//! A held object is pinned, and counts among what readers pin; its head, while in RAM, stays there. Held objects may take up
//! to half of what readers may pin, so that readers always have the other half; their heads half of that part of the
//! arena; their records a quarter of the index. An object counts once, however many hold it.
//!
//! Overwriting or deleting a held key leaves the held version as it is: nobody finds it any more, and its space comes free
//! with the last hold.

use crate::store::object::Object;
use crate::store::pin::Pinned;
use crate::store::segment::{Class, Segment, block_bytes_min};
use crate::store::{Miss, Store};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

/// Held objects may take this part of what readers may pin.
const PINS_DIVISOR: u64 = 2;
/// And this part of the index.
const INDEX_DIVISOR: u64 = 4;

/// What all holds together take, in octets.
#[derive(Debug, Default)]
pub(super) struct HoldBooks {
    count: u64,
    /// Footprints, by class.
    bytes: [u64; 2],
    /// Blocks of the heads, whether they are in RAM or not.
    head_bytes: u64,
    index_bytes: u64,
}

/// The books, a leaf in the order of locks.
#[derive(Debug, Default)]
pub(super) struct AllHolds(Mutex<HoldBooks>);

impl AllHolds {
    fn books(&self) -> MutexGuard<'_, HoldBooks> {
        self.0.lock().expect("no panic under this lock")
    }

    /// Objects held, and the octets of their footprints.
    pub(super) fn held(&self) -> (u64, u64) {
        let books = self.books();
        (books.count, books.bytes.iter().sum())
    }
}

/// Why an object is not held.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum HoldError {
    #[error("there is no such object")]
    NotFound,
    /// Ask again when some readers are done.
    #[error("readers pin as much as they may")]
    Busy,
    /// Ask again when others gave up holds; never, if `bytes` alone are more than `bytes_max`.
    #[error("{bytes} octets more than the {held_bytes} that are held would exceed {bytes_max}")]
    Full { bytes: u64, held_bytes: u64, bytes_max: u64 },
    #[error("{count_max} objects are held already")]
    TooMany { count_max: usize },
}

impl Store {
    /// Keeps the living object of `key`, and its head in RAM if it is there, until the hold is dropped.
    ///
    /// # Errors
    /// [`HoldError`], but `TooMany`.
    pub fn hold(&self, key: &[u8], now: u64) -> Result<Hold, HoldError> {
        let (object, miss) = {
            let Some(entry) = self.shared.index.get(key) else { return Err(HoldError::NotFound) };
            match self.death(entry.value(), now) {
                None => return self.hold_object(entry.value()),
                Some(miss) => (entry.value().clone(), miss),
            }
        };
        debug_assert!(miss != Miss::Absent);
        self.bury(&object, miss);
        Err(HoldError::NotFound)
    }

    /// Under the index entry of the object: it cannot be evicted meanwhile.
    fn hold_object(&self, object: &Arc<Object>) -> Result<Hold, HoldError> {
        let shared = &self.shared;
        let mut books = shared.holds.books();
        let is_first = object.holds.load(Ordering::Relaxed) == 0;
        let needs = Needs::of(object, shared.sizes.head_bytes);
        if is_first {
            let slot = object.class as usize;
            let head_bytes_max = (shared.region.len() as f64 * shared.sizes.pinned_share) as u64 / PINS_DIVISOR;
            check(needs.bytes, books.bytes[slot], self.pins_bytes_max(object.class) / PINS_DIVISOR)?;
            check(needs.head_bytes, books.head_bytes, head_bytes_max)?;
            check(needs.index_bytes, books.index_bytes, shared.sizes.index_bytes_max / INDEX_DIVISOR)?;
        }
        // The one place beyond the bound is for readers, who leave it soon.
        if shared.extra_pins[object.class as usize].is_of(object.version()) {
            return Err(HoldError::Busy);
        }
        let pinned = self.pin_within(object).ok_or(HoldError::Busy)?;
        object.holds.fetch_add(1, Ordering::Relaxed);
        if is_first {
            books.count += 1;
            books.bytes[object.class as usize] += needs.bytes;
            books.head_bytes += needs.head_bytes;
            books.index_bytes += needs.index_bytes;
            shared.held_index_bytes.store(books.index_bytes, Ordering::Relaxed);
            heads(object, shared.sizes.head_bytes).for_each(|segment| segment.hold());
        }
        Ok(Hold { pinned })
    }

    fn release(&self, object: &Object) {
        let shared = &self.shared;
        let mut books = shared.holds.books();
        if object.holds.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        let needs = Needs::of(object, shared.sizes.head_bytes);
        books.count -= 1;
        books.bytes[object.class as usize] -= needs.bytes;
        books.head_bytes -= needs.head_bytes;
        books.index_bytes -= needs.index_bytes;
        shared.held_index_bytes.store(books.index_bytes, Ordering::Relaxed);
        heads(object, shared.sizes.head_bytes).for_each(Segment::release);
    }
}

/// What holding an object takes; the same at its beginning and its end.
struct Needs {
    bytes: u64,
    head_bytes: u64,
    index_bytes: u64,
}

impl Needs {
    fn of(object: &Object, head_bytes: u64) -> Self {
        let block =
            |segment: &Arc<Segment>| u64::from(segment.len()).next_power_of_two().max(block_bytes_min(Class::Large));
        Self {
            bytes: object.footprint,
            head_bytes: heads(object, head_bytes).map(block).sum(),
            index_bytes: object.index_bytes(),
        }
    }
}

/// The segments of the head of an object that could leave RAM.
fn heads(object: &Object, head_bytes: u64) -> impl Iterator<Item = &Arc<Segment>> {
    let large = object.class == Class::Large;
    let mut at = 0;
    let leading = object.pieces().iter().take_while(move |piece| {
        let within = large && at < head_bytes;
        at += u64::from(piece.len);
        within
    });
    leading.map(|piece| &piece.segment)
}

fn check(bytes: u64, held_bytes: u64, bytes_max: u64) -> Result<(), HoldError> {
    if held_bytes.saturating_add(bytes) > bytes_max {
        return Err(HoldError::Full { bytes, held_bytes, bytes_max });
    }
    Ok(())
}

/// An object that is kept until this is dropped.
#[must_use = "dropping a hold lets the object go"]
pub struct Hold {
    pinned: Pinned,
}

impl Hold {
    /// The version that is held, whatever has its key by now.
    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.pinned.store().release(self.pinned.object());
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hold").field(&self.pinned.key().escape_ascii()).finish()
    }
}

/// What one peer holds: dropped with its connection. Its memory is bounded by `count_max`: about [`Holds::ENTRY_BYTES_MAX`]
/// for each.
#[derive(Debug)]
pub struct Holds {
    held: HashMap<Box<[u8]>, Hold>,
    count_max: usize,
}

impl Holds {
    /// The longest key and what keeps it.
    pub const ENTRY_BYTES_MAX: usize = crate::store::key::KEY_BYTES_MAX + 128;

    /// Nothing yet, and at most `count_max` objects.
    pub fn new(count_max: usize) -> Self {
        Self { held: HashMap::new(), count_max }
    }

    /// Objects held.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Holds what has that key now and returns its version. A version of that key held before is let go; if this fails, it
    /// stays held.
    ///
    /// # Errors
    /// [`HoldError`].
    pub fn hold(&mut self, store: &Store, key: &[u8], now: u64) -> Result<u64, HoldError> {
        if self.held.len() >= self.count_max && !self.held.contains_key(key) {
            return Err(HoldError::TooMany { count_max: self.count_max });
        }
        let hold = store.hold(key, now)?;
        let version = hold.pinned().version();
        self.held.insert(key.into(), hold);
        Ok(version)
    }

    /// False if nothing of that key was held.
    pub fn release(&mut self, key: &[u8]) -> bool {
        self.held.remove(key).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::rig::with_pools;
    use crate::store::{Committed, Condition, Lookup, Sizes};

    const MIB: u64 = 1 << 20;

    fn store() -> Store {
        let pool_bytes = vec![32 * MIB];
        with_pools(Store::new, Sizes { head_bytes: 256 << 10, pinned_share: 0.5, pool_bytes, ..Sizes::small() })
    }

    /// Stores a value, which is on disk too then.
    fn put(store: &Store, key: &[u8], len: u64) {
        let mut draft = store.draft(len, None);
        while let Some(want) = draft.want() {
            match store.fill(want) {
                Ok(filling) => draft.begin(filling),
                Err(short) => assert!(write_behind(store) > 0, "{short} with nothing to write: {store:?}"),
            }
            draft.put(&[7; 256 << 10]);
        }
        assert!(matches!(store.commit(key, draft, 0, 0, Condition::Any, 0), Committed::Stored { .. }));
        write_behind(store);
    }

    fn write_behind(store: &Store) -> usize {
        let jobs = std::iter::from_fn(|| store.next_write(true));
        jobs.map(|job| store.handle_written(&job.segment, 0, Some([0; 4]))).count()
    }

    fn resident_bytes(object: &Object) -> u64 {
        object.range(0, u64::MAX).filter(|piece| piece.segment.is_resident()).map(|piece| u64::from(piece.len)).sum()
    }

    #[test]
    fn a_held_object_outlives_any_pressure_and_its_head_stays_in_memory() {
        let store = store();
        put(&store, b"held", MIB);
        put(&store, b"other", MIB);
        let hold = store.hold(b"held", 0).unwrap();
        assert!(store.gauges().memory_clean_bytes > 0, "both could leave RAM");
        for number in 0..100_u8 {
            put(&store, &[number], MIB);
        }
        assert!(store.peek(b"other", 0).is_none(), "the pool is full three times over");
        let held = store.peek(b"held", 0).expect("it is held");
        assert_eq!(resident_bytes(&held), 256 << 10);
        assert!(hold.pinned().pieces()[0].segment.is_resident());
        assert_eq!((store.gauges().held, store.gauges().held_bytes, store.gauges().pins), (1, MIB, 1));
        drop((hold, held));
        for number in 0..100_u8 {
            put(&store, &[number], MIB);
        }
        assert!(store.peek(b"held", 0).is_none(), "it went like any other");
        assert_eq!((store.gauges().held, store.gauges().held_bytes, store.gauges().pinned_bytes), (0, 0, 0));
    }

    #[test]
    fn a_head_that_comes_back_from_disk_stays_too() {
        let store = store();
        put(&store, b"held", MIB);
        let _all: Vec<_> = std::iter::from_fn(|| {
            store.fill(crate::store::draft::Want { class: Class::Large, remaining: MIB, head: false }).ok()
        })
        .collect();
        let hold = store.hold(b"held", 0).unwrap();
        let head = hold.pinned().pieces()[0].segment.clone();
        assert!(!head.is_resident());
        drop(_all);
        // Twice read from disk within an arena full.
        store.warm(&head, &[7; 256 << 10]);
        store.warm(&head, &[7; 256 << 10]);
        for number in 0..50_u8 {
            put(&store, &[number], MIB);
        }
        assert!(head.is_resident());
        drop(hold);
        for number in 0..50_u8 {
            put(&store, &[number], MIB);
        }
        assert!(!head.is_resident());
    }

    #[test]
    fn a_held_version_is_left_as_it_is_by_whatever_happens_to_its_key() {
        for fate in 0..3 {
            let store = store();
            put(&store, b"key", MIB);
            let hold = store.hold(b"key", 0).unwrap();
            match fate {
                0 => put(&store, b"key", 1000),
                1 => assert!(store.delete(b"key", 0)),
                _ => store.flush_all(0),
            }
            assert!(store.get(b"key", 0).hit().is_some() == (fate == 0));
            let used = store.gauges().pool_used_bytes;
            assert!(used >= MIB, "its space is not given to others");
            assert_eq!(hold.pinned().range(0, u64::MAX).map(|piece| u64::from(piece.len)).sum::<u64>(), MIB);
            drop(hold);
            assert_eq!(store.gauges().pool_used_bytes, used - MIB);
            assert_eq!((store.gauges().held, store.gauges().pinned_bytes), (0, 0));
            assert!(store.hold(b"key", 0).is_ok() == (fate == 0));
        }
    }

    #[test]
    fn holds_leave_readers_their_half_and_say_by_how_much_they_are_full() {
        let store = store();
        for number in 0..14_u8 {
            put(&store, &[number], MIB);
        }
        let mut held: Vec<Hold> = Vec::new();
        let full = (0..14_u8)
            .find_map(|number| match store.hold(&[number], 0) {
                Ok(hold) => {
                    held.push(hold);
                    None
                }
                Err(error) => Some(error),
            })
            .unwrap();
        assert_eq!(full, HoldError::Full { bytes: MIB, held_bytes: 8 * MIB, bytes_max: 8 * MIB });
        assert_eq!(held.len(), 8, "a half of a half of 32 MiB");
        held.push(store.hold(&[0], 0).expect("who holds one more time takes nothing"));
        let readers: Vec<_> = (8..14_u8).filter_map(|number| store.get(&[number], 0).hit()).collect();
        assert_eq!(readers.len(), 6);
        assert_eq!(store.gauges().held_bytes, 8 * MIB);
        drop(held.remove(0));
        assert!(store.hold(&[9], 0).is_err(), "the first is still held by another");
        drop(held.remove(0));
        assert!(store.hold(&[9], 0).is_ok());
        put(&store, b"long", 9 * MIB);
        let never = store.hold(b"long", 0).unwrap_err();
        assert!(matches!(never, HoldError::Full { bytes, bytes_max, .. } if bytes > bytes_max), "{never}");
    }

    #[test]
    fn heads_and_records_of_held_objects_are_bounded_too() {
        let store = store();
        // Nearly all of each is its head: they fill their part of the arena before their part of the pool.
        let count = (0..20_u8)
            .map(|number| {
                put(&store, &[number], 300 << 10);
                store.hold(&[number], 0)
            })
            .take_while(Result::is_ok)
            .collect::<Vec<_>>();
        assert_eq!(count.len(), 8, "a half of a half of 8 MiB are eight heads");
        drop(count);
        let mut holds = Holds::new(usize::MAX);
        let before = store.gauges().index_bytes;
        store.put(&[0; 4], b"", 0, 0).unwrap();
        let each = store.gauges().index_bytes - before;
        for number in 0..2000_u32 {
            store.put(&number.to_be_bytes(), b"", 0, 0).unwrap();
            _ = holds.hold(&store, &number.to_be_bytes(), 0);
        }
        assert!(holds.len() > 100, "{}", holds.len());
        store.flush_all(0);
        for number in 0..4000_u32 {
            store.put(&number.to_be_bytes(), b"", 0, 0).unwrap();
        }
        let gauges = store.gauges();
        assert!((holds.len() as u64 * each) <= MIB / 4, "{} of {each}", holds.len());
        assert!(gauges.index_bytes + holds.len() as u64 * each <= MIB, "what is held without a key counts");
    }

    #[test]
    fn what_a_peer_holds_goes_with_it() {
        let store = store();
        for number in 0..3_u8 {
            put(&store, &[number], 1000);
        }
        let mut holds = Holds::new(2);
        assert_eq!(holds.hold(&store, b"none", 0), Err(HoldError::NotFound));
        let version = holds.hold(&store, &[0], 0).unwrap();
        assert_eq!(holds.hold(&store, &[0], 0), Ok(version), "once more is the same");
        holds.hold(&store, &[1], 0).unwrap();
        assert_eq!(holds.hold(&store, &[2], 0), Err(HoldError::TooMany { count_max: 2 }));
        put(&store, &[1], 2000);
        assert!(store.delete(&[0], 0));
        assert_eq!(holds.hold(&store, &[0], 0), Err(HoldError::NotFound));
        assert_eq!((holds.len(), store.gauges().held), (2, 2), "the deleted one is held still");
        assert_ne!(holds.hold(&store, &[1], 0), Ok(version));
        assert_eq!(store.gauges().held, 2, "the new version took the place of the old one");
        assert!(holds.release(&[1]) && !holds.release(&[1]) && !holds.is_empty());
        drop(holds);
        assert_eq!((store.gauges().held, store.gauges().pins), (0, 0));
    }

    #[test]
    fn an_object_that_has_the_place_beyond_the_bound_is_not_held() {
        let store = store();
        put(&store, b"long", 6 * MIB);
        for number in 0..12_u8 {
            put(&store, &[number], MIB);
        }
        let others: Vec<_> = (0..12_u8).map(|number| store.get(&[number], 0).hit().unwrap()).collect();
        let reader = store.get(b"long", 0).hit().expect("one may exceed the bound");
        assert_eq!(store.hold(b"long", 0).unwrap_err(), HoldError::Busy);
        drop((others, reader));
        assert!(store.hold(b"long", 0).is_ok());
    }

    impl Lookup {
        fn hit(self) -> Option<Pinned> {
            if let Self::Hit(pinned) = self { Some(pinned) } else { None }
        }
    }
}
