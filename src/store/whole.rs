//! Whole values in one call, for callers in this process that have all octets at hand. Nothing here waits: what
//! is not to be had at once is refused.

use crate::store::key::KEY_BYTES_MAX;
use crate::store::segment::Content;
use crate::store::{Committed, Condition, Pinned, Short, Store};

/// Why a value was not stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PutError {
    #[error("a key has 1 to {KEY_BYTES_MAX} octets, not {len}")]
    Key { len: usize },
    #[error("a value of {len} octets is longer than {max}, the largest taken")]
    TooLarge { len: u64, max: u64 },
    #[error("no space: {0}")]
    Short(#[from] Short),
}

impl Store {
    /// Stores `octets`, replacing what is there, and returns the version. `expiry` is a second of the store's
    /// [clock](Store::clock), 0 is never.
    ///
    /// # Errors
    /// [`PutError`]; nothing was changed then.
    pub fn put(&self, key: &[u8], octets: &[u8], flags: u32, expiry: u64) -> Result<u64, PutError> {
        let len = self.check_put(key, octets.len() as u64)?;
        let mut draft = self.draft(len, None);
        let mut rest = octets;
        while let Some(want) = draft.want() {
            draft.begin(self.fill(want)?);
            rest = &rest[draft.put(rest)..];
        }
        match self.commit(key, draft, flags, expiry, Condition::Any, self.clock().now()) {
            Committed::Stored { version } => Ok(version),
            refused => unreachable!("a put without a condition was {refused:?}"),
        }
    }

    /// Whether a value of `len` octets may have that key; returns `len`.
    pub(crate) fn check_put(&self, key: &[u8], len: u64) -> Result<u64, PutError> {
        if key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(PutError::Key { len: key.len() });
        }
        let max = self.value_bytes_max();
        if len > max { Err(PutError::TooLarge { len, max }) } else { Ok(len) }
    }
}

impl Pinned {
    /// A copy of the value if all of it is in RAM now; `None` if a part has to be read from disk.
    pub fn to_vec(&self) -> Option<Vec<u8>> {
        let mut octets = Vec::with_capacity(usize::try_from(self.len()).ok()?);
        for piece in self.pieces() {
            let Content::Ram(ram) = piece.segment.content() else { return None };
            octets.extend_from_slice(piece.octets(&ram));
        }
        Some(octets)
    }
}
