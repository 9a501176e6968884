//! Objects: immutable values, as a list of pieces.
//!
//! ```text
//! | piece 0        | piece 1        | ... | piece n      |
//!   segment, start,  segment, start,        segment, ...
//!   len              len
//! |<- head (head_bytes) ->|<------- body ------------->|
//! ```

use crate::store::eviction::{Candidate, Standing};
use crate::store::key::ObjectKey;
use crate::store::segment::{Class, Segment};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A part of a segment that is a part of a value.
#[derive(Clone, Debug)]
pub struct Piece {
    pub segment: Arc<Segment>,
    /// First octet within the segment.
    pub start: u32,
    /// Octets.
    pub len: u32,
}

/// Counted reads that save an object from eviction.
const USES_MAX: u8 = 3;

/// One version of one value. Only its expiry, its counters and where its segments lie ever change.
#[derive(Debug)]
pub struct Object {
    pub(super) key: ObjectKey,
    pub(super) key_hash: u64,
    pub(super) flags: u32,
    pub(super) len: u64,
    pub(super) class: Class,
    pub(super) pieces: Box<[Piece]>,
    /// Octets of blocks or extents that its eviction frees.
    pub(super) footprint: u64,
    /// Given at commit, unique in the process: the CAS token.
    pub(super) version: AtomicU64,
    /// Second since the epoch of the store's clock at which it is gone; 0 is never.
    pub(super) expiry: AtomicU64,
    pub(super) uses: AtomicU8,
    pub(super) read: AtomicBool,
    pub(super) pins: AtomicU32,
    /// Where eviction keeps it. Changed under the policy's lock alone.
    pub(super) standing: Mutex<Option<Standing>>,
}

impl Object {
    pub fn key(&self) -> &[u8] {
        self.key.as_bytes()
    }

    pub fn flags(&self) -> u32 {
        self.flags
    }

    /// Octets of the value.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The CAS token.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// 0 is never; see [`crate::store::Clock`].
    pub fn expiry(&self) -> u64 {
        self.expiry.load(Ordering::Relaxed)
    }

    pub fn class(&self) -> Class {
        self.class
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// What the index spends on it, in octets, estimated from the sizes of its parts.
    pub(super) fn index_bytes(&self) -> u64 {
        let pieces = self.pieces.len() * (size_of::<Piece>() + size_of::<Segment>() + 64);
        (size_of::<Self>() + pieces + self.key.as_bytes().len() + 128) as u64
    }

    pub(super) fn count_use(&self) {
        self.read.store(true, Ordering::Relaxed);
        let uses = self.uses.load(Ordering::Relaxed);
        if uses < USES_MAX {
            self.uses.store(uses + 1, Ordering::Relaxed);
        }
    }
}

impl Candidate for Arc<Object> {
    fn key_hash(&self) -> u64 {
        self.key_hash
    }

    fn weight(&self) -> u64 {
        self.footprint
    }

    fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Relaxed) > 0
    }

    fn spend_use(&self) -> bool {
        let uses = self.uses.load(Ordering::Relaxed);
        if uses > 0 {
            self.uses.store(uses - 1, Ordering::Relaxed);
        }
        uses > 0
    }
}
