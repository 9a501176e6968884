//! What clients keep from being evicted: PIN and UNPIN.

use super::request::Key;
use super::{Answer, Item, PINS_MAX, PinnedVersion, Status};
use crate::store::segment::Class;
use crate::store::{Lookup, Pinned, Store};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Of what readers may pin, clients may hold one in this many: the rest is for those who read and go.
const SHARE_DIVISOR: u64 = 2;

/// Octets of values that the clients of all connections have pinned.
#[derive(Debug, Default)]
pub struct PinBudget {
    bytes: [AtomicU64; 2],
}

impl PinBudget {
    fn take(&self, store: &Store, class: Class, bytes: u64) -> bool {
        let max = store.pins_bytes_max(class) / SHARE_DIVISOR;
        let add = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= max);
        self.bytes[class as usize].fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn give_back(&self, class: Class, bytes: u64) {
        self.bytes[class as usize].fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// A pin with its share of the budget.
#[derive(Debug)]
struct Held {
    pinned: Pinned,
    budget: Arc<PinBudget>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.give_back(self.pinned.class(), self.pinned.len());
    }
}

/// What one connection has pinned. Dropping it unpins all.
#[derive(Debug)]
pub struct Pins {
    held: HashMap<Box<[u8]>, Held>,
    budget: Arc<PinBudget>,
}

impl Pins {
    /// None yet, under the budget of all connections.
    pub fn new(budget: Arc<PinBudget>) -> Self {
        Self { held: HashMap::new(), budget }
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// PIN.
    pub fn pin(&mut self, store: &Store, keys: &[Key<'_>]) -> Answer<Item> {
        let now = store.clock().now();
        Answer::Pin(keys.iter().map(|key| self.pin_one(store, key.as_bytes(), now)).collect())
    }

    /// UNPIN.
    pub fn unpin(&mut self, keys: &[Key<'_>]) -> Answer<Item> {
        let unpin = |key: &Key<'_>| match self.held.remove(key.as_bytes()) {
            Some(_) => Status::Ok,
            None => Status::NotFound,
        };
        Answer::Statuses(keys.iter().map(unpin).collect())
    }

    fn pin_one(&mut self, store: &Store, key: &[u8], now: u64) -> PinnedVersion {
        let refused = |status| PinnedVersion { status, version: 0 };
        let pinned = match store.get(key, now) {
            Lookup::Miss(_) => return refused(Status::NotFound),
            Lookup::Busy => return refused(Status::Busy),
            Lookup::Hit(pinned) => pinned,
        };
        let version = pinned.version();
        let before = self.held.get(key).map(|held| held.pinned.version());
        if before == Some(version) {
            return PinnedVersion { status: Status::Ok, version };
        }
        if before.is_none() && self.held.len() == PINS_MAX {
            return refused(Status::Limit);
        }
        if !self.budget.take(store, pinned.class(), pinned.len()) {
            return refused(Status::Limit);
        }
        let budget = self.budget.clone();
        drop(self.held.insert(key.into(), Held { pinned, budget }));
        PinnedVersion { status: Status::Ok, version }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::bulkhead::rig::{put, store};

    fn pins() -> (Store, Pins) {
        (store(), Pins::new(Arc::default()))
    }

    fn pin(store: &Store, pins: &mut Pins, key: &[u8]) -> PinnedVersion {
        match pins.pin(store, &[Key::new(key).unwrap()]) {
            Answer::Pin(pinned) => pinned[0],
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pin_holds_until_it_is_taken_back() {
        let (store, mut pins) = pins();
        let version = put(&store, b"a", b"value");
        let a = Key::new(b"a").unwrap();
        let none = Key::new(b"none").unwrap();
        let expected = [
            PinnedVersion { status: Status::Ok, version },
            PinnedVersion { status: Status::NotFound, version: 0 },
            PinnedVersion { status: Status::Ok, version },
        ];
        assert_eq!(pins.pin(&store, &[a, none, a]), Answer::Pin(expected.to_vec()));
        assert_eq!((pins.len(), store.gauges().pins), (1, 1));
        let statuses = vec![Status::Ok, Status::NotFound, Status::NotFound];
        assert_eq!(pins.unpin(&[a, none, a]), Answer::Statuses(statuses));
        assert_eq!((pins.len(), store.gauges().pins), (0, 0));
    }

    #[test]
    fn pins_end_with_the_connection_and_give_their_budget_back() {
        let (store, mut pins) = pins();
        let budget = pins.budget.clone();
        // Half of a quarter of 4 MiB.
        put(&store, b"long", &vec![1; 400 << 10]);
        put(&store, b"longer", &vec![1; 400 << 10]);
        assert_eq!(pin(&store, &mut pins, b"long").status, Status::Ok);
        let mut other = Pins::new(budget.clone());
        assert_eq!(pin(&store, &mut other, b"longer").status, Status::Limit, "the budget is that of all connections");
        drop(pins);
        assert_eq!(store.gauges().pins, 0);
        assert_eq!(pin(&store, &mut other, b"longer").status, Status::Ok);
        drop(other);
        assert!(budget.bytes.iter().all(|bytes| bytes.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn another_pin_of_a_key_pins_what_is_there_then() {
        let (store, mut pins) = pins();
        let first = put(&store, b"a", b"value");
        pin(&store, &mut pins, b"a");
        let second = put(&store, b"a", b"another");
        assert_eq!(pins.held[&b"a"[..]].pinned.version(), first);
        assert_eq!(pin(&store, &mut pins, b"a").version, second);
        assert_eq!(pins.held[&b"a"[..]].pinned.version(), second);
        assert_eq!((pins.len(), store.gauges().pins), (1, 1));
    }

    #[test]
    fn one_connection_pins_so_many_keys() {
        let (store, mut pins) = pins();
        for number in 0..=PINS_MAX {
            put(&store, format!("key {number}").as_bytes(), b"v");
        }
        for number in 0..PINS_MAX {
            assert_eq!(pin(&store, &mut pins, format!("key {number}").as_bytes()).status, Status::Ok);
        }
        let last = format!("key {PINS_MAX}");
        assert_eq!(pin(&store, &mut pins, last.as_bytes()).status, Status::Limit);
        assert_eq!(pin(&store, &mut pins, b"key 0").status, Status::Ok, "it is pinned already");
        pins.unpin(&[Key::new(b"key 0").unwrap()]);
        assert_eq!(pin(&store, &mut pins, last.as_bytes()).status, Status::Ok);
    }
}
