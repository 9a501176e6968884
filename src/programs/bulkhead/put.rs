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
mod tests {
    use super::*;
    use crate::programs::bulkhead::request::Key;
    use crate::programs::bulkhead::rig::{octets, put, store};
    use crate::store::segment::Class;
    use std::sync::Arc;

    /// A connection whose peer has the octets at hand.
    struct Peer {
        store: Store,
        drafts: Drafts,
        revoker: Revoker,
        data: HashMap<Xid, Vec<u8>>,
        answers: Vec<(u32, PutResult)>,
    }

    const IDLE_MS: u64 = 1000;

    fn peer() -> Peer {
        let drafts = Drafts::new(IDLE_MS);
        Peer { store: store(), drafts, revoker: Arc::new(|| ()), data: HashMap::new(), answers: Vec::new() }
    }

    /// A value of `len` octets, of which the call brings `data` in a chunk.
    fn first(draft: u64, len: u64, data: &[u8], commit: bool) -> Put<'static, Data> {
        Put {
            key: Key::new(b"key").unwrap(),
            draft,
            len,
            flags: 3,
            ttl_s: 0,
            condition: Condition::Any,
            commit,
            crc32c: None,
            data: Data::Chunk { index: 0, len: data.len() as u32 },
        }
    }

    impl Peer {
        fn put(&mut self, xid: u32, data: &[u8], put: Put<'_, Data>) -> Result<PutId, Status> {
            self.data.insert(Xid(xid), data.to_vec());
            self.drafts.begin(&self.store, Xid(xid), &put)
        }

        fn more(&mut self, xid: u32, draft: u64, offset: u64, data: &[u8], commit: bool) -> Result<PutId, Status> {
            self.more_with(xid, draft, offset, data, commit, None)
        }

        fn more_with(
            &mut self,
            xid: u32,
            draft: u64,
            offset: u64,
            data: &[u8],
            commit: bool,
            crc32c: Option<u32>,
        ) -> Result<PutId, Status> {
            self.data.insert(Xid(xid), data.to_vec());
            let data = Data::Chunk { index: 0, len: data.len() as u32 };
            self.drafts.more(&self.store, Xid(xid), &PutMore { draft, offset, commit, crc32c, data })
        }

        /// Moves octets until there is nothing to do; gives the last step.
        fn run(&mut self, id: PutId) -> Step {
            loop {
                match self.drafts.poll(id, &self.store, &self.revoker) {
                    Step::Room { xid, at, len } => {
                        let data = &self.data[&xid][at as usize..];
                        let count = len.min(5000).min(data.len());
                        assert!(count > 0);
                        self.drafts.room(id)[..count].copy_from_slice(&data[..count]);
                        self.drafts.advance(id, count, self.store.clock().now_ms());
                    }
                    Step::Answer { xid, result } => self.answers.push((xid.0, result)),
                    step => return step,
                }
            }
        }

        fn statuses(&self) -> Vec<(u32, Status)> {
            self.answers.iter().map(|&(xid, result)| (xid, result.status)).collect()
        }

        fn stored(&self) -> Option<Vec<u8>> {
            octets(&self.store, b"key")
        }
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at * 31 % 251) as u8).collect()
    }

    #[test]
    fn a_small_value_is_one_call() {
        let mut peer = peer();
        let id = peer.put(1, b"value", first(0, 5, b"value", true)).unwrap();
        assert_eq!(peer.run(id), Step::End);
        assert_eq!(peer.stored().unwrap(), b"value");
        let object = peer.store.peek(b"key", 0).unwrap();
        assert_eq!(peer.answers, [(1, PutResult { status: Status::Ok, version: object.version() })]);
        assert_eq!((object.flags(), object.expiry()), (3, 0));
        assert!(peer.drafts.is_empty());
    }

    #[test]
    fn a_value_without_octets_is_one_call_too() {
        let mut peer = peer();
        let id = peer.put(1, b"", first(0, 0, b"", true)).unwrap();
        assert_eq!(peer.run(id), Step::End);
        assert_eq!(peer.stored().unwrap(), b"");
        let id = peer.put(2, b"", first(9, 0, b"", false)).unwrap();
        assert_eq!(peer.run(id), Step::Wait);
        let id = peer.more(3, 9, 0, b"", true).unwrap();
        assert_eq!(peer.run(id), Step::End);
        assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::Ok), (3, Status::Ok)]);
    }

    #[test]
    fn a_long_value_comes_in_ranges_that_need_not_wait_for_answers() {
        let mut peer = peer();
        let value = pattern(700_001);
        let id = peer.put(1, &value[..300_000], first(7, 700_001, &value[..300_000], false)).unwrap();
        // All are accepted before the first has an octet.
        assert_eq!(peer.more(2, 7, 300_000, &value[300_000..650_000], false), Ok(id));
        assert_eq!(peer.more(3, 7, 650_000, &[], false), Ok(id));
        assert_eq!(peer.more(4, 7, 650_000, &value[650_000..], true), Ok(id));
        assert_eq!(peer.more(5, 7, 700_001, &[], true), Err(Status::BadDraft), "nothing follows a commit");
        assert_eq!(peer.stored(), None);
        assert_eq!(peer.run(id), Step::End);
        assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::Ok), (3, Status::Ok), (4, Status::Ok)]);
        assert!(peer.answers[..3].iter().all(|(_, result)| result.version == 0));
        assert_eq!(peer.stored().unwrap(), value);
        assert_eq!(peer.store.gauges().claims, 0);
    }

    #[test]
    fn nobody_sees_a_draft_and_a_dropped_connection_leaves_nothing() {
        let mut peer = peer();
        let old = put(&peer.store, b"key", b"old");
        let id = peer.put(1, &pattern(90_000), first(7, 100_000, &pattern(90_000), false)).unwrap();
        assert_eq!(peer.run(id), Step::Wait);
        assert_eq!(peer.store.peek(b"key", 0).unwrap().version(), old);
        assert_eq!(peer.store.gauges().claims, 1);
        peer.drafts = Drafts::new(IDLE_MS);
        assert_eq!(peer.store.gauges().claims, 0);
        assert_eq!(peer.stored().unwrap(), b"old");
    }

    #[test]
    fn a_range_out_of_place_ends_the_draft_once_those_before_it_are_answered() {
        for (offset, len, commit) in [(9, 4, false), (11, 4, false), (0, 10, false), (10, 11, false), (10, 9, true)] {
            let mut peer = peer();
            let id = peer.put(1, &[1; 10], first(7, 20, &[1; 10], false)).unwrap();
            assert_eq!(peer.more(2, 7, offset, &vec![2; len], commit), Ok(id));
            assert_eq!(peer.more(3, 7, 10, &[3; 10], true), Err(Status::BadDraft), "a bad range is the last");
            assert_eq!(peer.run(id), Step::End);
            assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::BadRange)], "{len} octets at {offset}");
            assert_eq!(peer.stored(), None);
            assert_eq!(peer.store.gauges().claims, 0);
        }
    }

    #[test]
    fn an_offset_near_the_end_of_numbers_is_out_of_place() {
        let mut peer = peer();
        let id = peer.put(1, &[1; 10], first(7, 20, &[1; 10], false)).unwrap();
        assert_eq!(peer.more(2, 7, u64::MAX, &[2; 10], false), Ok(id));
        assert_eq!(peer.run(id), Step::End);
        assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::BadRange)]);
    }

    #[test]
    fn a_first_range_that_does_not_fit_its_value_begins_nothing() {
        let mut peer = peer();
        assert_eq!(peer.put(1, &[1; 6], first(7, 5, &[1; 6], false)), Err(Status::BadRange));
        assert_eq!(peer.put(2, &[1; 4], first(7, 5, &[1; 4], true)), Err(Status::BadRange));
        assert_eq!(peer.put(3, &[1; 4], first(7, u64::MAX, &[1; 4], false)), Err(Status::TooLarge));
        assert!(peer.drafts.is_empty());
        assert_eq!(peer.more(4, 7, 4, &[1], false), Err(Status::BadDraft));
    }

    #[test]
    fn a_checksum_that_does_not_match_ends_the_draft_and_what_was_sent_behind() {
        let mut peer = peer();
        let good = crc32c::crc32c(&[1; 10]);
        let whole = Put { crc32c: Some(good ^ 1), ..first(0, 10, &[1; 10], true) };
        let id = peer.put(1, &[1; 10], whole).unwrap();
        assert_eq!(peer.run(id), Step::End);
        let opening = Put { crc32c: Some(good), ..first(7, 30, &[1; 10], false) };
        let id = peer.put(2, &[1; 10], opening).unwrap();
        assert_eq!(peer.more_with(3, 7, 10, &[1; 10], false, Some(good + 1)), Ok(id));
        assert_eq!(peer.more_with(4, 7, 20, &[1; 10], true, Some(good)), Ok(id));
        assert_eq!(peer.run(id), Step::End);
        let (ok, bad) = (Status::Ok, Status::BadChecksum);
        assert_eq!(peer.statuses(), [(1, bad), (2, ok), (3, bad), (4, Status::BadDraft)]);
        assert_eq!(peer.stored(), None);
    }

    #[test]
    fn conditions_are_looked_at_first_and_judged_at_the_commit() {
        let mut peer = peer();
        let with = |condition, draft, commit| Put { condition, ..first(draft, 5, b"value", commit) };
        assert_eq!(peer.put(1, b"value", with(Condition::Present, 0, true)), Err(Status::NotFound));
        assert_eq!(peer.put(1, b"value", with(Condition::Version(1), 0, true)), Err(Status::NotFound));
        let absent = peer.put(2, b"value", with(Condition::Absent, 7, false)).unwrap();
        let version = put(&peer.store, b"key", b"faster");
        assert_eq!(peer.put(1, b"value", with(Condition::Absent, 0, true)), Err(Status::Exists));
        assert_eq!(peer.put(1, b"value", with(Condition::Version(version + 1), 0, true)), Err(Status::Changed));
        let replaced = peer.put(3, b"value", with(Condition::Version(version), 8, false)).unwrap();
        let current = put(&peer.store, b"key", b"faster still");
        let present = peer.put(4, b"value", with(Condition::Present, 9, false)).unwrap();
        peer.store.delete(b"key", 0);
        for (xid, draft, id) in [(5, 7, absent), (6, 8, replaced), (7, 9, present)] {
            peer.run(id);
            if xid == 5 {
                put(&peer.store, b"key", b"somebody's");
            } else if xid == 7 {
                peer.store.delete(b"key", 0);
            }
            assert_eq!(peer.more(xid, draft, 5, b"", true), Ok(id));
            assert_eq!(peer.run(id), Step::End);
        }
        let last: Vec<_> = peer.statuses().into_iter().filter(|(xid, _)| *xid > 4).collect();
        assert_eq!(last, [(5, Status::Exists), (6, Status::Changed), (7, Status::NotFound)]);
        assert!(current > version);
    }

    #[test]
    fn a_draft_that_is_dropped_answers_what_was_sent_for_it() {
        let mut peer = peer();
        let id = peer.put(1, &[1; 10], first(7, 30, &[1; 10], false)).unwrap();
        peer.more(2, 7, 10, &[1; 10], false).unwrap();
        assert_eq!(peer.drafts.drop_draft(8), (Status::BadDraft, None));
        assert_eq!(peer.drafts.drop_draft(7), (Status::Ok, Some(id)));
        assert!(peer.drafts.room(id).is_empty());
        assert_eq!(peer.run(id), Step::End);
        assert_eq!(peer.statuses(), [(1, Status::BadDraft), (2, Status::BadDraft)]);
        assert_eq!(peer.drafts.drop_draft(7), (Status::BadDraft, None));
        assert!(peer.put(3, &[1; 10], first(7, 30, &[1; 10], false)).is_ok(), "its number is free");
    }

    #[test]
    fn one_connection_has_so_many_drafts_and_each_number_once() {
        let mut peer = peer();
        for draft in 0..DRAFTS_MAX as u64 {
            peer.put(1, b"", first(draft, 5, b"", false)).unwrap();
            let again = peer.put(1, b"", first(draft, 5, b"", false));
            assert_eq!(again, Err(Status::BadDraft));
        }
        assert_eq!(peer.put(1, b"", first(99, 5, b"", false)), Err(Status::Limit));
        let whole = peer.put(2, b"value", first(0, 5, b"value", true)).expect("a whole value is no open draft");
        assert_eq!(peer.run(whole), Step::End);
        peer.more(3, 4, 0, b"value", true).unwrap();
        assert!(peer.put(4, b"", first(99, 5, b"", false)).is_ok());
    }

    #[test]
    fn an_idle_draft_ends_and_one_with_a_call_does_not() {
        let mut peer = peer();
        let idle = peer.put(1, b"", first(1, 5, b"", false)).unwrap();
        let busy = peer.put(2, b"value", first(2, 5, b"value", false)).unwrap();
        assert_eq!(peer.run(idle), Step::Wait);
        let now_ms = peer.store.clock().now_ms();
        assert_eq!(peer.drafts.handle_time(now_ms + IDLE_MS / 2), 0);
        assert_eq!(peer.drafts.handle_time(now_ms + 2 * IDLE_MS), 1);
        assert_eq!(peer.more(3, 1, 0, b"value", true), Err(Status::BadDraft));
        assert_eq!(peer.more(4, 2, 5, b"", true), Ok(busy));
    }

    #[test]
    fn a_claim_is_asked_for_waited_for_and_may_be_refused() {
        let mut peer = peer();
        let len = 1 << 20;
        // Somebody waits for space already: nobody passes him.
        peer.store.claims().set_queued(1);
        let data = pattern(10);
        let granted = peer.put(1, &data, first(1, len, &data, false)).unwrap();
        let refused = peer.put(2, &data, first(2, len, &data, false)).unwrap();
        peer.more(3, 2, 10, &data, false).unwrap();
        for id in [granted, refused] {
            assert_eq!(peer.run(id), Step::Claim { len });
            assert_eq!(peer.run(id), Step::Wait);
        }
        let claim = peer.store.try_claim(len, true, &peer.revoker);
        assert!(claim.is_some());
        peer.drafts.handle_claim(granted, &peer.store, claim);
        assert_eq!(peer.run(granted), Step::Wait);
        peer.drafts.handle_claim(refused, &peer.store, None);
        assert_eq!(peer.run(refused), Step::End);
        assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::NoSpace), (3, Status::BadDraft)]);
        // Too late for whom nothing is asked any more.
        let claim = peer.store.try_claim(len, true, &peer.revoker);
        peer.drafts.handle_claim(refused, &peer.store, claim);
        assert_eq!(peer.store.gauges().claims, 1);
    }

    #[test]
    fn a_claim_that_was_taken_back_ends_the_draft() {
        let mut peer = peer();
        let (data, len) = (pattern(10), 1 << 20);
        let idle = peer.put(1, &data, first(1, len, &data, false)).unwrap();
        peer.run(idle);
        let busy = peer.put(2, &data, first(2, len, &data, false)).unwrap();
        assert!(matches!(peer.drafts.poll(busy, &peer.store, &peer.revoker), Step::Room { .. }));
        let now_ms = peer.store.clock().now_ms();
        assert_eq!(peer.store.claims().revoke_idle(now_ms + 10_000, 1000), 2);
        let mut ended = peer.drafts.handle_revoked();
        ended.sort_by_key(|id| id.0);
        assert_eq!(ended, [idle, busy]);
        for id in ended {
            assert_eq!(peer.run(id), Step::End);
        }
        assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::NoSpace)]);
        assert_eq!(peer.more(3, 1, 10, &data, false), Err(Status::BadDraft));
        assert_eq!(peer.store.gauges().claims, 0);
    }

    #[test]
    fn a_segment_is_asked_for_when_memory_is_short_and_may_be_refused() {
        let mut peer = peer();
        // All of the arena, held by fillings that nobody seals.
        let want = Want { class: Class::Small, remaining: 256 << 10, head: true };
        let mut held = Vec::new();
        while let Ok(filling) = peer.store.fill(want) {
            held.push(filling);
        }
        let mut rest = Vec::new();
        while let Ok(filling) = peer.store.fill(Want { remaining: 1, ..want }) {
            rest.push(filling);
        }
        let data = pattern(10);
        let inline = Put { data: Data::Inline(0..10), ..first(0, 10, &data, true) };
        let patient = peer.put(1, &data, inline.clone()).unwrap();
        let refused = peer.put(2, &data, inline).unwrap();
        for id in [patient, refused] {
            assert!(matches!(peer.run(id), Step::Segment(Want { remaining: 10, .. })));
            assert_eq!(peer.run(id), Step::Wait);
        }
        assert_eq!(peer.store.gauges().claims, 0, "what came with its call claims nothing");
        drop((held, rest));
        let filling = peer.store.fill(Want { class: Class::Small, remaining: 10, head: true }).ok();
        peer.drafts.handle_segment(patient, &peer.store, filling);
        assert_eq!(peer.run(patient), Step::End);
        peer.drafts.handle_segment(refused, &peer.store, None);
        assert_eq!(peer.run(refused), Step::End);
        assert_eq!(peer.statuses(), [(1, Status::Ok), (2, Status::NoSpace)]);
        assert_eq!(peer.stored().unwrap(), data);
    }
}
