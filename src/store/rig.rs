//! Small stores for tests.

use super::{Sizes, Store};
use std::fmt::Debug;

impl Sizes {
    /// 8 MiB of memory for heads of 64 KiB, and one pool of 16 MiB; a quarter of them may be pinned.
    pub(crate) fn small() -> Self {
        Self {
            memory_bytes: 8 << 20,
            head_bytes: 64 << 10,
            value_bytes_max: 16 << 20,
            index_bytes_max: 1 << 20,
            pinned_share: 0.25,
            pool_bytes: vec![16 << 20],
        }
    }
}

/// What `make` makes ([`Store::new`], or a store that has names too), with a file for each of its pools.
pub(crate) fn with_pools<E: Debug>(make: impl FnOnce(Sizes) -> Result<Store, E>, sizes: Sizes) -> Store {
    let pool_bytes = sizes.pool_bytes.clone();
    let store = make(sizes).unwrap();
    (0..).zip(pool_bytes).for_each(|(drive, bytes)| store.extents().add_file(drive, bytes));
    store
}
