//! PUT and PUT_MORE: octets are pulled once the store has room for them, and copied once, into the draft.

use super::call::{Call, Stage};
use super::{Output, Service};
use crate::programs::bulkhead::put::{PutId, Step};
use crate::programs::bulkhead::{Answer, PutResult};
use crate::programs::rpc::Data;
use crate::wire::onc_rpc::Item;
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::pull::Pull;

/// A range of a value on its way into its draft.
#[derive(Debug)]
pub(super) struct Putting<B> {
    pub(super) id: PutId,
    data: Data,
    /// Of a chunk, from when there is room for it.
    pub(super) pull: Option<Pull<B>>,
}

impl<B: AsRef<[u8]>> Service<B> {
    /// Call `xid` brings the next range of a value.
    pub(super) fn begin_span(&mut self, xid: Xid, id: PutId, data: Data) {
        let spans = self.spans.entry(id).or_default();
        let before = spans.back().copied();
        spans.push_back(xid);
        self.set_stage(xid, Stage::Putting(Putting { id, data, pull: None }));
        if let Some(before) = before.filter(|before| self.is_asked(*before)) {
            self.pull_ahead(before);
        }
    }

    fn answer_put(&mut self, xid: Xid, result: PutResult) {
        let answer: Answer<Item> = Answer::Put(result);
        self.answer(xid, answer.encode(xid));
    }

    /// Takes a value as far as it goes now.
    pub(super) fn run(&mut self, id: PutId) {
        loop {
            match self.session.drafts().poll(id, &self.around.store, &self.revoker) {
                Step::Claim { len } => {
                    self.claims.push_back(id);
                    self.outputs.push_back(Output::Reserve { len });
                }
                Step::Segment(want) => {
                    self.segments.push_back(id);
                    self.outputs.push_back(Output::Segment(want));
                }
                Step::Room { xid, at, .. } => {
                    if !self.move_octets(id, xid, at) {
                        return;
                    }
                }
                Step::Answer { xid, result } => self.end_span(id, xid, result),
                Step::Wait => return,
                Step::End => return,
            }
        }
    }

    /// Copies octets of call `xid`, from its octet `at` on, into the draft. False if they have not come.
    fn move_octets(&mut self, id: PutId, xid: Xid, at: u32) -> bool {
        let now_ms = self.around.store.clock().now_ms();
        let copied = &self.around.metrics.copied;
        let Some(Call { stage: Stage::Putting(putting), stream, .. }) = self.calls.get_mut(&xid) else { return false };
        let drafts = self.session.drafts();
        let room = drafts.room(id);
        match &putting.data {
            Data::Inline(range) => {
                let octets = &stream[range.start + at as usize..range.end];
                let count = room.len().min(octets.len());
                room[..count].copy_from_slice(&octets[..count]);
                copied.input_to_arena.add(count as u64);
                drafts.advance(id, count, now_ms);
                true
            }
            Data::Chunk { .. } => {
                let Some(pull) = &mut putting.pull else {
                    self.begin_pull(xid);
                    return false;
                };
                let octets = pull.octets();
                let count = room.len().min(octets.len());
                if count == 0 {
                    return false;
                }
                room[..count].copy_from_slice(&octets[..count]);
                copied.pulled_to_arena.add(count as u64);
                self.free.extend(pull.take(count));
                drafts.advance(id, count, now_ms);
                true
            }
        }
    }

    /// Pulls the chunk of a call, if it has one.
    fn begin_pull(&mut self, xid: Xid) {
        let window = self.terms.window_bytes;
        let Some(Call { stage: Stage::Putting(putting), reads, .. }) = self.calls.get_mut(&xid) else { return };
        if let (Data::Chunk { index, len }, None) = (&putting.data, &putting.pull) {
            putting.pull = Some(Pull::new(&reads[*index].segments, (*len).into(), window));
            self.pulls.push_back(xid);
        }
    }

    fn is_asked(&self, xid: Xid) -> bool {
        match self.calls.get(&xid) {
            Some(Call { stage: Stage::Putting(putting), .. }) => putting.pull.as_ref().is_some_and(Pull::is_asked),
            _ => false,
        }
    }

    /// All of a chunk is asked for: that of the value's next range may be pulled.
    pub(super) fn pull_ahead(&mut self, xid: Xid) {
        let Some(Call { stage: Stage::Putting(putting), .. }) = self.calls.get(&xid) else { return };
        let Some(spans) = self.spans.get(&putting.id) else { return };
        let mut behind = spans.iter().skip_while(|span| **span != xid).skip(1);
        if let Some(next) = behind.next().copied() {
            self.begin_pull(next);
        }
    }

    /// A range is dealt with. What is still being pulled of it comes for nobody, before it is answered.
    fn end_span(&mut self, id: PutId, xid: Xid, result: PutResult) {
        if let Some(spans) = self.spans.get_mut(&id) {
            spans.retain(|span| *span != xid);
            if spans.is_empty() {
                self.spans.remove(&id);
            }
        }
        self.pulls.retain(|pulled| *pulled != xid);
        if let Some(Call { stage: Stage::Putting(putting), .. }) = self.calls.get_mut(&xid)
            && let Some(pull) = putting.pull.take()
        {
            self.free.extend(pull.into_buffers());
        }
        self.answer_put(xid, result);
    }
}
