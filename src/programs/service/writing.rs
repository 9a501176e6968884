//! WRITE: octets are pulled once it is known that they may be written, and copied once, into the draft of their file.
//!
//! By the first of them a WRITE is known, so those of a chunk are here before anything is written: if it turns out to have been
//! executed already, what was pulled is dropped. They are waited for even if it could not be executed now. One that waits
//! for its twin holds no buffers, which that may be waiting for, and pulls anew if it is its turn.

use super::Service;
use super::call::{Call, Stage};
use crate::programs::nfs::files::{self, WriteStep};
use crate::programs::nfs::{Reply, Stable};
use crate::programs::rpc::Data;
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::duplicate::{Admission, first_bytes};
use crate::wire::rpcrdma::pull::Pull;
use std::mem;
use std::time::Duration;

/// A WRITE between its call and its answer.
#[derive(Debug)]
pub(super) struct Writing<B> {
    /// None: it cannot be executed now, and only what it is known by is pulled.
    writing: Option<files::Writing>,
    data: Data,
    stable: Stable,
    /// The first octets, if they came in several pieces; until they are written.
    first: Vec<u8>,
    pull: Option<Pull<B>>,
    /// Since when it waits for space.
    short_since: Option<Duration>,
}

impl<B> Writing<B> {
    pub fn new(writing: Option<files::Writing>, data: Data, stable: Stable) -> Self {
        Self { writing, data, stable, first: Vec::new(), pull: None, short_since: None }
    }

    pub fn pull_mut(&mut self) -> Option<&mut Pull<B>> {
        self.pull.as_mut()
    }
}

impl<B: AsRef<[u8]>> Writing<B> {
    /// The first octets, by which it is known, as soon as they are all here. Buffers that were taken to their end go to `free`.
    fn first(&mut self, free: &mut Vec<B>) -> Option<&[u8]> {
        let want = first_bytes(self.data.len());
        let pull = self.pull.as_mut()?;
        if self.first.is_empty() && pull.octets().len() >= want {
            return Some(&pull.octets()[..want]);
        }
        while self.first.len() < want {
            let octets = pull.octets();
            let count = octets.len().min(want - self.first.len());
            if count == 0 {
                return None;
            }
            self.first.extend_from_slice(&octets[..count]);
            free.extend(pull.take(count));
        }
        Some(&self.first)
    }
}

impl<B: AsRef<[u8]>> Service<B> {
    /// Its octets are wanted: all if its file can be written to, or those by which it is known.
    pub(super) fn begin_write(&mut self, xid: Xid, now: Duration) {
        let window = self.terms.window_bytes;
        let Some(Call { stage: Stage::Writing(writing), reads, .. }) = self.calls.get_mut(&xid) else { return };
        if let Data::Chunk { index, len } = &writing.data {
            let wanted = if writing.writing.is_some() { u64::from(*len) } else { first_bytes(*len) as u64 };
            writing.pull = Some(Pull::new(&reads[*index].segments, wanted, window));
            self.pulls.push_back(xid);
        }
        self.write(xid, now);
    }

    /// Looks for a duplicate of a WRITE as soon as its first octets are here. True if it is executed.
    fn admit_write(&mut self, xid: Xid, now: Duration) -> bool {
        let Some(call) = self.calls.get_mut(&xid) else { return false };
        let Some(head) = call.head else { return true };
        let Stage::Writing(writing) = &mut call.stage else { return false };
        let Some(first) = writing.first(&mut self.free) else { return false };
        let key = head.with_first(first);
        (call.head, call.known) = (None, Some(key));
        if writing.writing.is_none() {
            // All that was asked for is here.
            self.drop_pull(xid);
            self.dispatch(xid, now);
            return false;
        }
        let admission = self.around.shared.admit(key);
        if admission != Admission::Execute {
            self.drop_pull(xid);
        }
        self.handle_admission(xid, key, admission, now).is_ok()
    }

    /// Nothing of what is or will be pulled for a WRITE is wanted.
    fn drop_pull(&mut self, xid: Xid) {
        self.pulls.retain(|pulled| *pulled != xid);
        if let Some(Call { stage: Stage::Writing(writing), .. }) = self.calls.get_mut(&xid) {
            self.free.extend(writing.pull.take().into_iter().flat_map(Pull::into_buffers));
        }
    }

    /// Takes a WRITE as far as it goes now.
    pub(super) fn write(&mut self, xid: Xid, now: Duration) {
        if !self.admit_write(xid, now) {
            return;
        }
        let Some(nfs) = self.around.nfs.clone() else { return };
        let metrics = self.around.metrics.clone();
        loop {
            let Some(Call { stage: Stage::Writing(writing), stream, .. }) = self.calls.get_mut(&xid) else { return };
            let Writing { writing: Some(writing), data, first, pull, short_since, .. } = writing else { return };
            let octets = match (&*data, &*pull) {
                (Data::Inline(range), _) => &stream[range.start + writing.written() as usize..range.end],
                (Data::Chunk { .. }, _) if !first.is_empty() => &first[..],
                (Data::Chunk { .. }, Some(pull)) => pull.octets(),
                (Data::Chunk { .. }, None) => &[],
            };
            if octets.is_empty() {
                if writing.written() == data.len() {
                    self.end_write(xid);
                }
                return;
            }
            match nfs.export.files().write(writing, octets) {
                WriteStep::Done(count) => {
                    let was_short = short_since.take().is_some();
                    if let Some(pull) = pull {
                        metrics.copied.pulled_to_arena.add(count as u64);
                        if first.is_empty() {
                            self.free.extend(pull.take(count));
                        } else {
                            first.drain(..count);
                        }
                        if was_short && !pull.is_asked() {
                            self.pulls.push_back(xid);
                        }
                    } else {
                        metrics.copied.input_to_arena.add(count as u64);
                    }
                }
                WriteStep::Wait(_) => {
                    let since = *short_since.get_or_insert(now);
                    if now.saturating_sub(since) >= self.terms.reserve_wait {
                        return self.end_write(xid);
                    }
                    // Buffers are for those that can go on.
                    self.pulls.retain(|pulled| *pulled != xid);
                    return self.ask_retry();
                }
                WriteStep::Refused(_) => return self.end_write(xid),
            }
        }
    }

    /// It has all its octets, or gets no more. What is still being pulled comes for nobody, before it is answered.
    fn end_write(&mut self, xid: Xid) {
        let Some(nfs) = self.around.nfs.clone() else { return };
        let Some(call) = self.calls.get_mut(&xid) else { return };
        match mem::replace(&mut call.stage, Stage::Dispatched) {
            Stage::Writing(Writing { writing: Some(writing), data, stable, pull, .. }) => {
                self.pulls.retain(|pulled| *pulled != xid);
                self.free.extend(pull.into_iter().flat_map(Pull::into_buffers));
                let outcome = nfs.export.files().end_write(writing, data.len(), stable);
                self.answer(xid, Reply::Write(outcome).encode(xid));
            }
            stage => call.stage = stage,
        }
    }

    /// Something came free.
    pub(super) fn retry_writes(&mut self, now: Duration) {
        let is_short = |call: &Call<B>| matches!(&call.stage, Stage::Writing(Writing { short_since: Some(_), .. }));
        for xid in self.calls_that(is_short) {
            self.write(xid, now);
        }
    }
}
