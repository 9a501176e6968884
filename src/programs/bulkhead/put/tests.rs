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
