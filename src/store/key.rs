//! Keys: octet strings kept and compared whole.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// Longest key of any door, in octets; doors may allow less.
pub const KEY_BYTES_MAX: usize = 1024;

/// A key, shared between the index and its object.
#[derive(Clone, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ObjectKey(Arc<[u8]>);

impl ObjectKey {
    /// # Panics
    /// If `key` is longer than [`KEY_BYTES_MAX`]: doors check that first.
    pub fn new(key: &[u8]) -> Self {
        assert!(key.len() <= KEY_BYTES_MAX, "key of {} octets", key.len());
        Self(key.into())
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for ObjectKey {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}
