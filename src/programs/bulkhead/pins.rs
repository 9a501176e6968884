//! What a client keeps from being evicted: PIN and UNPIN.

use super::request::Key;
use super::{Answer, Item, PinnedVersion, Status};
use crate::store::Store;
use crate::store::hold::{HoldError, Holds};

/// PIN.
pub fn pin(holds: &mut Holds, store: &Store, keys: &[Key<'_>]) -> Answer<Item> {
    let now = store.clock().now();
    let pin = |key: &Key<'_>| match holds.hold(store, key.as_bytes(), now) {
        Ok(version) => PinnedVersion { status: Status::Ok, version },
        Err(error) => PinnedVersion { status: status_of(error), version: 0 },
    };
    Answer::Pin(keys.iter().map(pin).collect())
}

/// UNPIN.
pub fn unpin(holds: &mut Holds, keys: &[Key<'_>]) -> Answer<Item> {
    let unpin = |key: &Key<'_>| if holds.release(key.as_bytes()) { Status::Ok } else { Status::NotFound };
    Answer::Statuses(keys.iter().map(unpin).collect())
}

fn status_of(error: HoldError) -> Status {
    match error {
        HoldError::NotFound => Status::NotFound,
        HoldError::Busy => Status::Busy,
        HoldError::Full { .. } | HoldError::TooMany { .. } => Status::Limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::bulkhead::PINS_MAX;
    use crate::programs::bulkhead::rig::{put, store};

    fn pin_one(store: &Store, holds: &mut Holds, key: &[u8]) -> PinnedVersion {
        match pin(holds, store, &[Key::new(key).unwrap()]) {
            Answer::Pin(pinned) => pinned[0],
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pin_holds_until_it_is_taken_back() {
        let (store, mut holds) = (store(), Holds::new(PINS_MAX));
        let version = put(&store, b"a", b"value");
        let a = Key::new(b"a").unwrap();
        let none = Key::new(b"none").unwrap();
        let expected = [
            PinnedVersion { status: Status::Ok, version },
            PinnedVersion { status: Status::NotFound, version: 0 },
            PinnedVersion { status: Status::Ok, version },
        ];
        assert_eq!(pin(&mut holds, &store, &[a, none, a]), Answer::Pin(expected.to_vec()));
        assert_eq!((holds.len(), store.gauges().pins), (1, 1));
        let statuses = vec![Status::Ok, Status::NotFound, Status::NotFound];
        assert_eq!(unpin(&mut holds, &[a, none, a]), Answer::Statuses(statuses));
        assert_eq!((holds.len(), store.gauges().pins), (0, 0));
    }

    #[test]
    fn pins_end_with_the_connection_and_are_bounded_over_all_of_them() {
        let (store, mut holds) = (store(), Holds::new(PINS_MAX));
        // Half of a quarter of 4 MiB.
        put(&store, b"long", &vec![1; 400 << 10]);
        put(&store, b"longer", &vec![1; 400 << 10]);
        assert_eq!(pin_one(&store, &mut holds, b"long").status, Status::Ok);
        let mut other = Holds::new(PINS_MAX);
        assert_eq!(pin_one(&store, &mut other, b"longer").status, Status::Limit);
        drop(holds);
        assert_eq!(store.gauges().pins, 0);
        assert_eq!(pin_one(&store, &mut other, b"longer").status, Status::Ok);
    }

    #[test]
    fn one_connection_pins_so_many_keys() {
        let (store, mut holds) = (store(), Holds::new(2));
        for key in [b"a", b"b", b"c"] {
            put(&store, key, b"v");
        }
        let statuses: Vec<_> = [b"a", b"b", b"c", b"a"].map(|key| pin_one(&store, &mut holds, key).status).to_vec();
        assert_eq!(statuses, [Status::Ok, Status::Ok, Status::Limit, Status::Ok]);
    }
}
