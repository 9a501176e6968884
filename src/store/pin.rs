//! Pins: what readers hold cannot be evicted, and there is a bound to it.

use crate::store::object::Object;
use crate::store::{Counters, Store};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The place beyond the bound is for objects longer than this part of the bound: short ones get in as others leave.
const EXTRA_PIN_DIVISOR: u64 = 4;

/// An object that cannot be evicted while this lives. Overwriting or deleting its key leaves it as it is.
pub struct Pinned {
    object: Arc<Object>,
    store: Store,
}

impl Pinned {
    pub fn object(&self) -> &Arc<Object> {
        &self.object
    }

    /// Counted for statistics: was the first octet in RAM when the reader came?
    pub fn count_head(&self) {
        let Some(first) = self.object.pieces.first() else { return };
        let counters = &self.store.shared.counters;
        let counter = if first.segment.is_resident() { &counters.head_hits } else { &counters.head_misses };
        Counters::add(counter, 1);
    }
}

impl Deref for Pinned {
    type Target = Object;

    fn deref(&self) -> &Object {
        &self.object
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.store.shared.pins.fetch_sub(1, Ordering::Relaxed);
        if self.object.pins.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.store.shared.extra_pins[self.object.class as usize].give_back(self.object.version());
            self.store.shared.claims.unpin(self.object.class, self.object.footprint);
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.object.key).finish()
    }
}

impl Store {
    /// `None` where readers pin as much as they may.
    pub(super) fn pin(&self, object: &Arc<Object>) -> Option<Pinned> {
        let shared = &self.shared;
        let extra = &shared.extra_pins[object.class as usize];
        let takes_extra = if object.pins.load(Ordering::SeqCst) > 0 {
            false
        } else {
            let bound = self.pins_bytes_max(object.class);
            let pinned = shared.claims.pinned_bytes_of(object.class).saturating_sub(extra.bytes());
            let fits = pinned.saturating_add(object.footprint) <= bound;
            if !fits
                && (object.footprint <= bound / EXTRA_PIN_DIVISOR || !extra.take(object.version(), object.footprint))
            {
                return None;
            }
            !fits
        };
        if object.pins.fetch_add(1, Ordering::SeqCst) == 0 {
            shared.claims.pin(object.class, object.footprint);
        } else if takes_extra {
            // Another reader was faster, and its pin holds within the bound or had the place before.
            extra.give_back(object.version());
        }
        shared.pins.fetch_add(1, Ordering::Relaxed);
        object.count_use();
        Some(Pinned { object: object.clone(), store: self.clone() })
    }
}
