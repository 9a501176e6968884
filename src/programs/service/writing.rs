//! WRITE: octets are pulled once it is known that they may be written, and copied once, into the draft of their file.

use super::Service;
use super::call::{Call, Stage};
use crate::programs::nfs::files::{self, WriteStep};
use crate::programs::nfs::{Reply, Stable};
use crate::programs::rpc::Data;
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::pull::Pull;
use std::mem;
use std::time::Duration;

/// A WRITE between its call and its answer.
#[derive(Debug)]
pub(super) struct Writing<B> {
    writing: files::Writing,
    data: Data,
    stable: Stable,
    pull: Option<Pull<B>>,
    /// Since when it waits for space.
    short_since: Option<Duration>,
}

impl<B> Writing<B> {
    pub fn new(writing: files::Writing, data: Data, stable: Stable) -> Self {
        Self { writing, data, stable, pull: None, short_since: None }
    }

    pub fn pull_mut(&mut self) -> Option<&mut Pull<B>> {
        self.pull.as_mut()
    }
}

impl<B: AsRef<[u8]>> Service<B> {
    /// Its file can be written to: its octets are wanted.
    pub(super) fn begin_write(&mut self, xid: Xid, now: Duration) {
        let window = self.terms.window_bytes;
        let Some(Call { stage: Stage::Writing(writing), reads, .. }) = self.calls.get_mut(&xid) else { return };
        if let Data::Chunk { index, len } = &writing.data {
            writing.pull = Some(Pull::new(&reads[*index].segments, (*len).into(), window));
            self.pulls.push_back(xid);
        }
        self.write(xid, now);
    }

    /// Takes a WRITE as far as it goes now.
    pub(super) fn write(&mut self, xid: Xid, now: Duration) {
        let Some(nfs) = self.around.nfs.clone() else { return };
        let metrics = self.around.metrics.clone();
        loop {
            let Some(Call { stage: Stage::Writing(writing), stream, .. }) = self.calls.get_mut(&xid) else { return };
            let Writing { writing, data, pull, short_since, .. } = writing;
            let octets = match (&*data, &*pull) {
                (Data::Inline(range), _) => &stream[range.start + writing.written() as usize..range.end],
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
                        self.free.extend(pull.take(count));
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
            Stage::Writing(Writing { writing, data, stable, pull, .. }) => {
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
