//! A WRITE whose data goes into the draft of its file as it comes.

use super::Context;
use crate::programs::nfs::Stable;
use crate::programs::nfs::files::{WriteStep, Writing};
use crate::wire::codec::roundup_bytes;
use crate::wire::onc_rpc::Xid;
use crate::wire::rpcrdma::duplicate::CallKey;
use std::mem;

/// A WRITE, from its arguments to the end of its record.
#[derive(Debug)]
pub(super) struct Arriving {
    pub(super) xid: Xid,
    /// It runs in the cache of duplicates.
    pub(super) key: CallKey,
    pub(super) writing: Writing,
    pub(super) stable: Stable,
    /// The first octets of its data that came, until they are written.
    first: Vec<u8>,
    /// Octets of its data.
    pub(super) len: u32,
    /// Of them, those that have not come, or not been taken.
    left: u32,
    /// Octets of the roundup that have not come.
    roundup: u32,
    /// More came than there may be.
    is_overlong: bool,
    /// Nothing more is taken.
    is_refused: bool,
    /// When it began to wait for space.
    waits_since_ms: Option<u64>,
}

impl Arriving {
    /// `len` octets of data are to come, of which `first` are there.
    pub(super) fn new(xid: Xid, key: CallKey, writing: Writing, stable: Stable, len: u32, first: Vec<u8>) -> Self {
        Self {
            xid,
            key,
            writing,
            stable,
            first,
            len,
            left: len,
            roundup: roundup_bytes(len.into()) as u32,
            is_overlong: false,
            is_refused: false,
            waits_since_ms: None,
        }
    }

    /// Octets that came wait to be written before all others.
    pub(super) fn has_first(&self) -> bool {
        !self.first.is_empty()
    }

    /// Writes as many of those as there is space for.
    pub(super) fn write_first(&mut self, context: &Context) {
        let mut first = mem::take(&mut self.first);
        let count = self.write(context, &first);
        first.drain(..count);
        if self.is_refused {
            self.left -= first.len() as u32;
        } else {
            self.first = first;
        }
    }

    /// Takes octets of its record off the front of `octets`, and says how many.
    pub(super) fn take(&mut self, context: &Context, octets: &[u8]) -> usize {
        if self.left == 0 || self.is_refused {
            let of_data = octets.len().min(self.left as usize);
            let of_roundup = (octets.len() - of_data).min(self.roundup as usize);
            self.left -= of_data as u32;
            self.roundup -= of_roundup as u32;
            self.is_overlong |= of_data + of_roundup < octets.len();
            return octets.len();
        }
        self.write(context, &octets[..octets.len().min(self.left as usize)])
    }

    fn write(&mut self, context: &Context, data: &[u8]) -> usize {
        let files = context.export.files();
        match files.write(&mut self.writing, data) {
            WriteStep::Done(count) => {
                self.left -= count as u32;
                self.waits_since_ms = None;
                context.metrics.copied.input_to_arena.add(count as u64);
                return count;
            }
            WriteStep::Wait(_) => {
                let now_ms = files.store().clock().now_ms();
                let since_ms = *self.waits_since_ms.get_or_insert(now_ms);
                self.is_refused = now_ms.saturating_sub(since_ms) >= context.reserve_wait_ms;
            }
            WriteStep::Refused(_) => self.is_refused = true,
        }
        0
    }

    /// There was no space for it, and there may be.
    pub(super) fn is_waiting(&self) -> bool {
        self.waits_since_ms.is_some() && !self.is_refused
    }

    /// All its data came, and nothing more.
    pub(super) fn is_whole(&self) -> bool {
        self.left == 0 && self.roundup == 0 && !self.is_overlong
    }
}
