//! A small store for the tests of this program.

use crate::store::rig::with_pools;
use crate::store::{Sizes, Store};

/// 8 MiB of arena and a pool of 4 MiB; values above 64 KiB go to the pool.
pub fn store() -> Store {
    let sizes = Sizes { value_bytes_max: 2 << 20, pool_bytes: vec![4 << 20], ..Sizes::small() };
    with_pools(Store::with_namespace, sizes)
}

/// Stores `octets` and gives their version.
pub fn put(store: &Store, key: &[u8], octets: &[u8]) -> u64 {
    store.put(key, octets, 7, 0).unwrap()
}

/// The octets of `key`, all of them in RAM.
pub fn octets(store: &Store, key: &[u8]) -> Option<Vec<u8>> {
    let object = store.peek(key, store.clock().now())?;
    let piece = |piece: &crate::store::object::Piece| match piece.segment.content() {
        crate::store::segment::Content::Ram(ram) => piece.octets(&ram).to_vec(),
        other => panic!("{other:?}"),
    };
    Some(object.pieces().iter().flat_map(piece).collect())
}
