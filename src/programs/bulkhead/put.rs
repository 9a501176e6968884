//! Values that arrive: PUT, PUT_MORE and PUT_DROP of one connection.
//!
//! ```text
//!  PUT, PUT_MORE ──▶ accepted: a queue of ranges ──▶ the first of them takes octets ──▶ answered OK, next range
//!                          │                              claim, segments, room           │
//!                          │                                                              └─ commit: answered, ended
//!                          └─ at once: a status, no octet is wanted
//!  ended (refused, dropped, idle, revoked): every range that is queued is answered BAD_DRAFT
//! ```
//!
//! Ranges are accepted in the order of their calls, so each is judged against the one before while that may still be
//! on its way. Who owns it pulls the octets of the first range, and may pull those of the next ahead.

use super::request::{Put, PutMore};
use super::{DRAFTS_MAX, PutResult, Status, expiry_of};
use crate::programs::rpc::Data;
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::{Draft, Want};
use crate::store::segment::Filling;
use crate::store::{Committed, Condition, Store, refusal};
use crate::wire::onc_rpc::Xid;
use std::collections::{HashMap, VecDeque};

/// One value that arrives. Never used twice.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PutId(u64);

/// What comes next for one value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Step {
    /// A claim for this many octets is needed: [`Drafts::handle_claim`] follows.
    Claim { len: u64 },
    /// A segment is needed: [`Drafts::handle_segment`] follows.
    Segment(Want),
    /// Up to `len` octets of the data of call `xid`, from its octet `at` on, go into [`Drafts::room`];
    /// [`Drafts::advance`] follows.
    Room { xid: Xid, at: u32, len: usize },
    /// The answer to a call.
    Answer { xid: Xid, result: PutResult },
    /// Nothing until something is handled.
    Wait,
    /// Nothing any more; the value is forgotten.
    End,
}

/// The values that arrive on one connection.
#[derive(Debug)]
pub struct Drafts {
    /// Milliseconds a draft may be without a call.
    idle_ms: u64,
    next: u64,
    /// Those that take further ranges, by the client's number.
    open: HashMap<u64, PutId>,
    arriving: HashMap<PutId, Arriving>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Waiting {
    Nothing,
    Claim,
    Segment,
}

/// A range that was accepted.
#[derive(Debug)]
struct Span {
    xid: Xid,
    len: u32,
    received: u32,
    /// The checksum there should be.
    expected: Option<u32>,
    /// That of what was received, if one is expected.
    crc32c: u32,
    commit: bool,
    /// It does not fit where it should go.
    is_bad: bool,
}

#[derive(Debug)]
struct Arriving {
    number: u64,
    key: Box<[u8]>,
    len: u64,
    flags: u32,
    ttl_s: u32,
    condition: Condition,
    /// All octets came with the call: no claim is needed, nobody is waited for.
    at_hand: bool,
    /// Octets of the ranges accepted so far.
    accepted: u64,
    spans: VecDeque<Span>,
    draft: Option<Draft>,
    waiting: Waiting,
    /// It takes no octets any more; the next range is answered so, and further ones BAD_DRAFT.
    ended: Option<Status>,
    moved_ms: u64,
}

impl Drafts {
    /// None yet; each may be without a call for `idle_ms`.
    pub fn new(idle_ms: u64) -> Self {
        Self { idle_ms, next: 0, open: HashMap::new(), arriving: HashMap::new() }
    }

    /// A PUT: the value whose first range it is.
    ///
    /// # Errors
    /// The status to answer with; nothing was begun.
    pub fn begin(&mut self, store: &Store, xid: Xid, put: &Put<'_, Data>) -> Result<PutId, Status> {
        let data_len = u64::from(put.data.len());
        if data_len > put.len || (put.commit && data_len < put.len) {
            return Err(Status::BadRange);
        }
        if !put.commit {
            if self.open.contains_key(&put.draft) {
                return Err(Status::BadDraft);
            }
            if self.open.len() == DRAFTS_MAX {
                return Err(Status::Limit);
            }
        }
        if put.len > store.value_bytes_max() {
            return Err(Status::TooLarge);
        }
        let clock = store.clock();
        let living = store.peek(put.key.as_bytes(), clock.now()).map(|object| object.version());
        if let Some(refused) = refusal(put.condition, living) {
            return Err(status_of(refused, put.condition).status);
        }
        let id = PutId(self.next);
        self.next += 1;
        let mut arriving = Arriving {
            number: put.draft,
            key: put.key.as_bytes().into(),
            len: put.len,
            flags: put.flags,
            ttl_s: put.ttl_s,
            condition: put.condition,
            at_hand: put.commit && matches!(put.data, Data::Inline(_)),
            accepted: 0,
            spans: VecDeque::new(),
            draft: None,
            waiting: Waiting::Nothing,
            ended: None,
            moved_ms: clock.now_ms(),
        };
        arriving.accept(xid, 0, &put.data, put.crc32c, put.commit);
        self.arriving.insert(id, arriving);
        if !put.commit {
            self.open.insert(put.draft, id);
        }
        Ok(id)
    }

    /// A PUT_MORE: the value whose next range it is.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn more(&mut self, store: &Store, xid: Xid, more: &PutMore<Data>) -> Result<PutId, Status> {
        let id = *self.open.get(&more.draft).ok_or(Status::BadDraft)?;
        let arriving = self.arriving.get_mut(&id).ok_or(Status::BadDraft)?;
        arriving.moved_ms = store.clock().now_ms();
        let fits = arriving.accept(xid, more.offset, &more.data, more.crc32c, more.commit);
        if more.commit || !fits {
            self.open.remove(&more.draft);
        }
        Ok(id)
    }

    /// A PUT_DROP. The value it ended, if it was open, has to be polled: calls for it may be without an answer.
    pub fn drop_draft(&mut self, draft: u64) -> (Status, Option<PutId>) {
        match self.open.remove(&draft) {
            None => (Status::BadDraft, None),
            Some(id) => {
                if let Some(arriving) = self.arriving.get_mut(&id) {
                    arriving.end(Status::BadDraft);
                }
                (Status::Ok, Some(id))
            }
        }
    }

    /// What comes next for a value. Ask again until it says [`Step::Wait`], [`Step::Room`] or [`Step::End`].
    pub fn poll(&mut self, id: PutId, store: &Store, revoker: &Revoker) -> Step {
        let Some(arriving) = self.arriving.get_mut(&id) else { return Step::End };
        let step = arriving.poll(store, revoker);
        if arriving.ended.is_some() {
            let number = arriving.number;
            if self.open.get(&number) == Some(&id) {
                self.open.remove(&number);
            }
        }
        if step == Step::End {
            self.arriving.remove(&id);
        }
        step
    }

    /// Where the next octets of a value go; empty unless its last step was [`Step::Room`].
    pub fn room(&mut self, id: PutId) -> &mut [u8] {
        self.arriving.get_mut(&id).map_or(&mut [], Arriving::room)
    }

    /// The first `count` octets of [`Drafts::room`] were written.
    pub fn advance(&mut self, id: PutId, count: usize, now_ms: u64) {
        let arriving = self.arriving.get_mut(&id).expect("there was room");
        arriving.advance(count);
        arriving.moved_ms = now_ms;
        if let Some(claim) = arriving.draft.as_ref().and_then(Draft::claim) {
            claim.touch(now_ms);
        }
    }

    /// The claim that was asked for, or none within the time a writer waits.
    pub fn handle_claim(&mut self, id: PutId, store: &Store, claim: Option<Claim>) {
        let Some(arriving) = self.arriving.get_mut(&id).filter(|arriving| arriving.waiting == Waiting::Claim) else {
            return;
        };
        arriving.waiting = Waiting::Nothing;
        match claim {
            Some(claim) => arriving.draft = Some(store.draft(arriving.len, Some(claim))),
            None => arriving.end(Status::NoSpace),
        }
    }

    /// The segment that was asked for, or none within the time a writer waits.
    pub fn handle_segment(&mut self, id: PutId, store: &Store, filling: Option<Filling>) {
        let Some(arriving) = self.arriving.get_mut(&id).filter(|arriving| arriving.waiting == Waiting::Segment) else {
            return;
        };
        arriving.waiting = Waiting::Nothing;
        let Some(draft) = &mut arriving.draft else { return };
        let revoked = draft.is_revoked();
        match filling {
            Some(filling) if !revoked => {
                if let Some(claim) = draft.claim() {
                    claim.set_held_up(false);
                    claim.touch(store.clock().now_ms());
                }
                draft.begin(filling);
            }
            _ => arriving.end(Status::NoSpace),
        }
    }

    /// Claims were taken back from idle owners. The values that were ended, to be polled.
    pub fn handle_revoked(&mut self) -> Vec<PutId> {
        let is_revoked = |arriving: &Arriving| {
            // The segment that is asked for comes in any case, and must find the value it was asked for.
            arriving.waiting != Waiting::Segment && arriving.draft.as_ref().is_some_and(Draft::is_revoked)
        };
        let revoked = self.arriving.iter_mut().filter(|(_, arriving)| is_revoked(arriving));
        revoked
            .map(|(&id, arriving)| {
                arriving.end(Status::NoSpace);
                id
            })
            .collect()
    }

    /// Ends the drafts that were without a call for too long. How many.
    pub fn handle_time(&mut self, now_ms: u64) -> usize {
        let idle_ms = self.idle_ms;
        let is_idle =
            |arriving: &Arriving| arriving.spans.is_empty() && now_ms.saturating_sub(arriving.moved_ms) >= idle_ms;
        let before = self.arriving.len();
        self.arriving.retain(|_, arriving| !is_idle(arriving));
        let arriving = &self.arriving;
        self.open.retain(|_, id| arriving.contains_key(id));
        before - self.arriving.len()
    }

    /// Values that arrive.
    pub fn len(&self) -> usize {
        self.arriving.len()
    }

    pub fn is_empty(&self) -> bool {
        self.arriving.is_empty()
    }
}

impl Arriving {
    /// Queues a range. False if it does not fit: then it ends the value when it comes up.
    fn accept(&mut self, xid: Xid, offset: u64, data: &Data, expected: Option<u32>, commit: bool) -> bool {
        let len = data.len();
        // `accepted` never exceeds the length, which is far from wrapping.
        let end = self.accepted + u64::from(len);
        let fits = offset == self.accepted && end <= self.len && (!commit || end == self.len);
        if fits {
            self.accepted = end;
        }
        self.spans.push_back(Span { xid, len, received: 0, expected, crc32c: 0, commit, is_bad: !fits });
        fits
    }

    fn poll(&mut self, store: &Store, revoker: &Revoker) -> Step {
        if let Some(status) = self.ended {
            let Some(span) = self.spans.pop_front() else { return Step::End };
            self.ended = Some(Status::BadDraft);
            return Step::Answer { xid: span.xid, result: PutResult::bare(status) };
        }
        let Some(span) = self.spans.front() else { return Step::Wait };
        if span.is_bad {
            self.end(Status::BadRange);
            return self.poll(store, revoker);
        }
        if span.received == span.len {
            return self.finish_span(store, revoker);
        }
        if self.waiting != Waiting::Nothing {
            return Step::Wait;
        }
        let draft = match &mut self.draft {
            Some(draft) => draft,
            none => {
                let claim = if self.at_hand { None } else { store.try_claim(self.len, false, revoker) };
                if claim.is_none() && !self.at_hand {
                    self.waiting = Waiting::Claim;
                    return Step::Claim { len: self.len };
                }
                none.insert(store.draft(self.len, claim))
            }
        };
        if let Some(want) = draft.want() {
            match store.fill(want) {
                Ok(filling) => draft.begin(filling),
                Err(_) => {
                    if let Some(claim) = draft.claim() {
                        claim.set_held_up(true);
                    }
                    self.waiting = Waiting::Segment;
                    return Step::Segment(want);
                }
            }
        }
        let (xid, at) = (span.xid, span.received);
        Step::Room { xid, at, len: self.room().len() }
    }

    fn room(&mut self) -> &mut [u8] {
        let (Some(span), Some(draft)) = (self.spans.front(), &mut self.draft) else { return &mut [] };
        if self.ended.is_some() || span.is_bad {
            return &mut [];
        }
        let spare = draft.spare();
        let len = spare.len().min((span.len - span.received) as usize);
        &mut spare[..len]
    }

    fn advance(&mut self, count: usize) {
        let (Some(span), Some(draft)) = (self.spans.front_mut(), &mut self.draft) else { panic!("there was room") };
        if span.expected.is_some() {
            span.crc32c = crc32c::crc32c_append(span.crc32c, &draft.spare()[..count]);
        }
        span.received += count as u32;
        assert!(span.received <= span.len, "more octets than there was room for");
        draft.advance(count);
    }

    /// The first range is whole.
    fn finish_span(&mut self, store: &Store, revoker: &Revoker) -> Step {
        let Some(span) = self.spans.front() else { return Step::Wait };
        if span.expected.is_some_and(|expected| expected != span.crc32c) {
            self.end(Status::BadChecksum);
            return self.poll(store, revoker);
        }
        let xid = span.xid;
        if !span.commit {
            self.spans.pop_front();
            return Step::Answer { xid, result: PutResult::bare(Status::Ok) };
        }
        let now = store.clock().now();
        // A value without octets had none to begin it.
        let draft = self.draft.take().unwrap_or_else(|| store.draft(0, None));
        let expiry = expiry_of(self.ttl_s, now);
        let committed = store.commit(&self.key, draft, self.flags, expiry, self.condition, now);
        self.spans.pop_front();
        self.end(Status::BadDraft);
        Step::Answer { xid, result: status_of(committed, self.condition) }
    }

    /// Gives back what it holds. Its ranges are still to be answered, the first with `status`.
    fn end(&mut self, status: Status) {
        self.ended = Some(status);
        self.draft = None;
    }
}

fn status_of(committed: Committed, condition: Condition) -> PutResult {
    match committed {
        Committed::Stored { version } => PutResult { status: Status::Ok, version },
        Committed::NotStored if condition == Condition::Absent => PutResult::bare(Status::Exists),
        Committed::NotStored | Committed::NotFound => PutResult::bare(Status::NotFound),
        Committed::Exists => PutResult::bare(Status::Changed),
    }
}

#[cfg(test)]
mod tests;
