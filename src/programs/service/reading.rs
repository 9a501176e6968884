//! What is read for an answer: the ranges of a GET, or the one of a READ.

use super::PlaceSource;
use crate::programs::bulkhead::get::Get;
use crate::programs::nfs::files;
use crate::store::Store;
use crate::store::object::Run;
use crate::wire::onc_rpc::{Payload, Xid};
use std::mem;
use std::ops::Range;
use std::sync::Arc;

/// Each range is named by its index, the token of its item in the answer.
#[derive(Debug)]
pub(super) enum Ranges {
    Get(Get),
    Read(Read),
}

/// The range of a READ of NFS.
#[derive(Debug)]
pub(super) struct Read {
    /// It has the pin.
    reading: files::Reading,
    source: PlaceSource,
    /// Of the first octet in the file.
    offset: u64,
    /// Octets that are not where they have to be.
    left: u32,
    is_lost: bool,
}

impl Read {
    /// Octets from `offset` of the file on.
    pub fn new(mut reading: files::Reading, offset: u64) -> Self {
        let pieces = mem::take(&mut reading.pieces);
        let source = match &reading.pinned {
            Some(pinned) => PlaceSource::Value(pinned.object().clone()),
            None => PlaceSource::Run(Arc::new(Run { offset, pieces })),
        };
        Self { left: reading.len, reading, source, offset, is_lost: false }
    }

    const fn is_done(&self) -> bool {
        self.is_lost || self.left == 0
    }
}

impl Ranges {
    pub fn len(&self) -> usize {
        match self {
            Self::Get(get) => get.len(),
            Self::Read(_) => 1,
        }
    }

    /// See [`Get::deadline_us`].
    pub fn deadline_us(&self) -> u32 {
        match self {
            Self::Get(get) => get.deadline_us(),
            Self::Read(_) => 0,
        }
    }

    /// See [`Get::is_busy`].
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Get(get) => get.is_busy(),
            Self::Read(_) => false,
        }
    }

    /// Nothing is left to do but to answer.
    pub fn is_done(&self) -> bool {
        match self {
            Self::Get(get) => get.is_done(),
            Self::Read(read) => read.is_done(),
        }
    }

    /// What has to be read for range `index`, and the octets of it. `None` if there is nothing, or no more.
    pub fn reading(&self, index: u32) -> Option<(PlaceSource, Range<u64>)> {
        match self {
            Self::Get(get) => {
                let (pinned, range) = get.reading(index as usize)?;
                Some((PlaceSource::Value(pinned.object().clone()), range))
            }
            Self::Read(read) if read.is_done() => None,
            Self::Read(read) => Some((read.source.clone(), read.offset..read.offset + u64::from(read.reading.len))),
        }
    }

    /// `octets` of range `index`, from its octet `start` on, are where they have to be; each octet once.
    pub fn handle_piece(&mut self, index: u32, start: u32, octets: &[u8]) {
        match self {
            Self::Get(get) => get.handle_piece(index as usize, start, octets),
            // A piece has no more than was asked for.
            Self::Read(read) => read.left -= octets.len() as u32,
        }
    }

    /// Octets of range `index` are lost.
    pub fn handle_failure(&mut self, index: u32) {
        match self {
            Self::Get(get) => get.handle_failure(index as usize),
            Self::Read(read) => read.is_lost = true,
        }
    }

    /// The time is over.
    pub fn handle_deadline(&mut self) {
        if let Self::Get(get) = self {
            get.handle_deadline();
        }
    }

    /// What is busy is looked up again.
    pub fn handle_retry(&mut self, store: &Store) {
        if let Self::Get(get) = self {
            get.handle_retry(store);
        }
    }

    /// What is busy waited long enough.
    pub fn give_up(&mut self) {
        if let Self::Get(get) = self {
            get.give_up();
        }
    }

    /// The reply, as it is if all that is not read yet will be.
    pub fn answer(&self, xid: Xid) -> Payload {
        match self {
            Self::Get(get) => get.answer().encode(xid),
            Self::Read(Read { reading, is_lost: true, .. }) => reading.lost().encode(xid),
            Self::Read(Read { reading, .. }) => reading.reply(0).encode(xid),
        }
    }
}
