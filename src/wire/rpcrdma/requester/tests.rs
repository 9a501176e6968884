use super::super::header::encode_error;
use super::*;
use crate::wire::onc_rpc::{Item, Payload, PayloadWriter};
use proptest::prelude::*;
use std::collections::BTreeSet;

const TIMEOUT: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    Settings {
        own: PrivateData { remote_invalidate: true, send_bytes: 4096, receive_bytes: 4096 },
        credits: NonZeroU32::new(4).unwrap(),
        segment_bytes_max: NonZeroU32::new(4096).unwrap(),
        reply_timeout: TIMEOUT,
        attempts_max: NonZeroU32::new(3).unwrap(),
        first_xid: Xid(0xffff_fffe),
    }
}

/// A call message of `words` words behind its xid and direction, with items of these lengths before the last.
fn message(xid: Xid, words: usize, items: &[u32]) -> Payload {
    let mut message = PayloadWriter::new();
    message.words().u32(xid.0);
    message.words().u32(0);
    (1..words).for_each(|word| message.words().u32(word as u32));
    (0..).zip(items).for_each(|(token, len)| message.item(Item { token: xid.0 << 8 | token, len: *len }));
    message.words().u32(99);
    message.finish()
}

/// The octets of an argument.
fn octets(item: Item) -> Vec<u8> {
    (0..item.len).map(|at| (at.wrapping_mul(31) ^ item.token) as u8).collect()
}

/// Parts spelt out. Items have no roundup here.
fn spelt(parts: &[Part]) -> Vec<u8> {
    let spell = |part: &Part| match part {
        Part::Bytes(bytes) => bytes.clone(),
        Part::Item(item) => octets(*item),
    };
    parts.iter().flat_map(spell).collect()
}

/// The message as it is before anything is taken out of it.
fn whole(message: &Payload) -> Vec<u8> {
    let mut out = Vec::new();
    for part in message.parts() {
        out.extend(spelt(std::slice::from_ref(part)));
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// Memory that the responder can reach, or could.
#[derive(Clone, Debug)]
struct Opened {
    id: RegionId,
    xid: Xid,
    memory: Memory,
    key: RemoteKey,
    address: u64,
    right: Right,
    octets: Vec<u8>,
    is_open: bool,
}

/// An owner that obeys, as far as it is asked to.
struct Rig {
    requester: Requester,
    now: Instant,
    opened: Vec<Opened>,
    /// Messages with the responder.
    sent: Vec<(Xid, Vec<u8>)>,
    completed: Vec<(Xid, Result<Reply, Failure>)>,
    ended: Vec<Reason>,
    /// Outputs are noted and left alone.
    is_idle: bool,
    noted: Vec<Output>,
    next_key: u32,
}

impl Rig {
    fn new(settings: Settings) -> Self {
        Self {
            requester: Requester::new(settings),
            now: Instant::now(),
            opened: Vec::new(),
            sent: Vec::new(),
            completed: Vec::new(),
            ended: Vec::new(),
            is_idle: false,
            noted: Vec::new(),
            next_key: 0x100,
        }
    }

    fn connected(settings: Settings) -> Self {
        let mut rig = Self::new(settings);
        rig.requester.handle_connected(PrivateData::ABSENT);
        rig.drive();
        rig
    }

    fn call(&mut self, words: usize, items: &[u32], results: &[u32]) -> Xid {
        let xid = self.requester.mint_xid();
        let call = Call {
            message: message(xid, words, items),
            arguments: Reduction::Fit,
            results: results.to_vec(),
            results_reduction: Reduction::Always,
            reply_bytes_max: 40,
        };
        self.requester.call(xid, call);
        self.drive();
        xid
    }

    /// One with two results in chunks of one and two segments, and a reply chunk.
    fn call_with_all(&mut self) -> Xid {
        let xid = self.requester.mint_xid();
        let call = Call {
            message: message(xid, 2, &[]),
            arguments: Reduction::Fit,
            results: vec![100, 8000],
            results_reduction: Reduction::Fit,
            reply_bytes_max: 2000,
        };
        self.requester.call(xid, call);
        self.drive();
        xid
    }

    fn drive(&mut self) {
        while let Some(output) = self.requester.poll_output(self.now) {
            if self.is_idle {
                self.noted.push(output);
                continue;
            }
            self.obey(output);
        }
    }

    fn obey(&mut self, output: Output) {
        match output {
            Output::Receive(count) => self.requester.handle_receives_posted(count),
            Output::Register(Registration { id, xid, memory, len, right, remote_invalidate }) => {
                assert!(remote_invalidate && len > 0);
                let (key, address) = (RemoteKey(self.next_key), u64::from(self.next_key) << 32);
                self.next_key += 1;
                let octets = match &memory {
                    Memory::Call(parts) => spelt(parts),
                    Memory::Argument(item) => octets(*item),
                    Memory::Result(_) | Memory::Reply => vec![0xee; len as usize],
                };
                assert_eq!(octets.len() as u64, len);
                self.opened.push(Opened { id, xid, memory, key, address, right, octets, is_open: true });
                self.requester.handle_registered(id, key, address);
            }
            Output::Send { xid, message } => {
                self.sent.push((xid, spelt(&message)));
                self.requester.handle_sent();
            }
            Output::Invalidate { id, .. } => {
                let region = self.opened.iter_mut().find(|region| region.id == id).expect("it was opened");
                assert!(std::mem::take(&mut region.is_open), "closed twice");
                self.requester.handle_invalidated(id);
            }
            Output::Completed { xid, outcome } => {
                assert!(!self.opened.iter().any(|region| region.xid == xid && region.is_open), "not fenced");
                assert!(!self.completed.iter().any(|(other, _)| *other == xid), "completed twice");
                self.completed.push((xid, outcome));
            }
            Output::Disconnect(reason) => self.ended.push(reason),
        }
    }

    fn receive(&mut self, message: &[u8], invalidated: Option<RemoteKey>) -> Received {
        if let Some(key) = invalidated {
            self.opened.iter_mut().filter(|region| region.key == key).for_each(|region| region.is_open = false);
        }
        let received = self.requester.handle_received(message, invalidated);
        self.drive();
        received
    }

    fn disconnect(&mut self) {
        self.opened.iter_mut().for_each(|region| region.is_open = false);
        self.sent.clear();
        self.requester.handle_disconnected();
        self.drive();
    }

    fn outcome(&self, xid: Xid) -> Option<&Result<Reply, Failure>> {
        self.completed.iter().find(|(completed, _)| *completed == xid).map(|(_, outcome)| outcome)
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn word(octets: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(octets[at..at + 4].try_into().unwrap())
}

/// A reply that has nothing but its header.
fn plain(xid: Xid, credit: u32) -> Vec<u8> {
    words(&[xid.0, 1, credit, 0, 0, 0, 0, xid.0, 1])
}

#[test]
fn every_row_of_the_error_table_is_held() {
    enum Verdict {
        Drop,
        Fail(Failure),
        Accept,
    }
    use Verdict::{Accept, Drop, Fail};
    // Keys 0x100 and 0x101 are the results', of 100 and 4096 + 3904 octets, 0x102 the reply's of 2000.
    let x = 0xffff_fffe_u32;
    let w = |head: &[u32], lists: &[u32], payload: &[u32]| words(&[head, lists, payload].concat());
    let none = [0, 0, 0];
    let (rpc, first, second) = ([x, 1, 0, 0, 0, 0], [1, 0x100, 100, 0x100, 0], |a: u32, b: u32| {
        [2, 0x101, a, 0x101, 0, 0x101, b, 0x101, 4096]
    });
    let lists = |a: u32, b: u32, c: u32, reply: &[u32]| {
        [&[0, 1, 1, 0x100, a, 0x100, 0, 1], &second(b, c)[..], &[0], reply].concat()
    };
    let unused = [1, 1, 0x102, 0, 0x102, 0];
    let used = |len: u32| [1, 1, 0x102, len, 0x102, 0];
    let bad = |fault| Fail(Failure::Reply(fault));
    let chunk = |index, error| bad(ReplyFault::WriteChunk { index, error });
    let msg = [x, 1, 4, 0];
    let nomsg = [x, 1, 4, 1];
    let good = w(&msg, &lists(100, 4096, 904, &unused), &rpc);
    let rows: Vec<(&str, Vec<u8>, Verdict)> = vec![
        ("shorter than 16", good[..15].to_vec(), Drop),
        ("16 octets", good[..16].to_vec(), Drop),
        ("27 octets", good[..27].to_vec(), Drop),
        ("ERR_CHUNK of 20 octets", w(&[x, 1, 4, 4, 2], &[], &[]), Fail(Failure::Rdma(RdmaError::Chunk))),
        (
            "ERR_VERS of 28 octets, version 2",
            w(&[x, 2, 4, 4, 1, 2, 3], &[], &[]),
            Fail(Failure::Rdma(RdmaError::Version { low: 2, high: 3 })),
        ),
        ("ERR_VERS, cut", w(&[x, 1, 4, 4, 1, 2], &[], &[]), Drop),
        ("an error of code 3", w(&[x, 1, 4, 4, 3, 0, 0], &[], &[]), Drop),
        ("an error without code", w(&[x, 1, 4, 4], &[], &[]), Drop),
        ("an error for nobody", w(&[7, 1, 4, 4, 2], &[], &[]), Drop),
        ("version 0", w(&[x, 0, 4, 0], &none, &rpc), Drop),
        ("version 2", w(&[x, 2, 4, 0], &none, &rpc), Drop),
        ("MSGP", w(&[x, 1, 4, 2, 4, 4096], &none, &rpc), Drop),
        ("DONE", w(&[x, 1, 4, 3], &none, &rpc), Drop),
        ("procedure 5", w(&[x, 1, 4, 5], &none, &rpc), Drop),
        ("procedure 2^32 - 1", w(&[x, 1, 4, u32::MAX], &none, &rpc), Drop),
        ("a boolean of 2", w(&msg, &[2, 0, 0], &rpc), Drop),
        ("a list that is cut", w(&msg, &[0, 1, 1, 0x100], &[]), Drop),
        ("a count beyond the message", w(&msg, &[0, 1, 0x1000_0001, 0x100, 100, 0x100, 0, 0, 0], &rpc), Drop),
        ("NOMSG without reply chunk", w(&nomsg, &lists(0, 0, 0, &[0]), &[]), bad(ReplyFault::NoPayload)),
        ("NOMSG with an unused reply chunk", w(&nomsg, &lists(0, 0, 0, &unused), &[]), bad(ReplyFault::NoPayload)),
        ("NOMSG with octets behind it", w(&nomsg, &lists(0, 0, 0, &used(40)), &[1]), Drop),
        ("another xid in the RPC message", w(&msg, &none, &[x + 1, 1, 0, 0, 0, 0]), Drop),
        ("no RPC message", w(&msg, &none, &[]), Drop),
        ("a call from the server", w(&msg, &none, &[x, 0, 2, 0, 0, 0]), Drop),
        ("neither call nor reply", w(&msg, &none, &[x, 2]), Drop),
        ("an xid that is not pending", w(&[7, 1, 4, 0], &none, &[7, 1, 0, 0]), Drop),
        ("a read list", w(&msg, &[1, 0, 9, 4, 0, 64, 0, 0, 0], &rpc), Drop),
        ("a read list in a NOMSG", w(&nomsg, &[&[1, 0, 9, 4, 0, 64, 0, 0][..], &used(40)].concat(), &[]), Drop),
        ("a segment past 2^64", w(&msg, &[0, 1, 1, 0x100, 2, u32::MAX, u32::MAX, 0, 0], &rpc), Drop),
        (
            "one write chunk of two",
            w(&msg, &[&[0, 1][..], &first, &[0, 0]].concat(), &rpc),
            bad(ReplyFault::WriteChunks { offered: 2, returned: 1 }),
        ),
        (
            "a segment too few",
            w(&msg, &[&[0, 1][..], &first, &[1, 1, 0x101, 4, 0x101, 0, 0], &unused].concat(), &rpc),
            chunk(1, ReturnedError::Count { offered: 2, returned: 1 }),
        ),
        (
            "no segments",
            w(&msg, &[&[0, 1, 0, 1][..], &second(0, 0), &[0], &unused].concat(), &rpc),
            chunk(0, ReturnedError::Count { offered: 1, returned: 0 }),
        ),
        (
            "another handle",
            w(&msg, &[&[0, 1, 1, 0x999, 100, 0x100, 0, 1][..], &second(0, 0), &[0], &unused].concat(), &rpc),
            chunk(0, ReturnedError::Segment(0)),
        ),
        (
            "another offset",
            w(&msg, &[&[0, 1, 1, 0x100, 100, 0x100, 4, 1][..], &second(0, 0), &[0], &unused].concat(), &rpc),
            chunk(0, ReturnedError::Segment(0)),
        ),
        (
            "longer than offered",
            w(&msg, &lists(101, 0, 0, &unused), &rpc),
            chunk(0, ReturnedError::Length { index: 0, offered: 100, returned: 101 }),
        ),
        ("a gap", w(&msg, &lists(100, 4095, 1, &unused), &rpc), chunk(1, ReturnedError::Gap(1))),
        (
            "a reply chunk of other memory",
            w(&nomsg, &lists(0, 0, 0, &[1, 1, 0x100, 40, 0x100, 0]), &[]),
            bad(ReplyFault::Returned(ReturnedError::Segment(0))),
        ),
        (
            "a reply longer than its chunk",
            w(&nomsg, &lists(0, 0, 0, &used(2001)), &[]),
            bad(ReplyFault::Returned(ReturnedError::Length { index: 0, offered: 2000, returned: 2001 })),
        ),
        ("a payload and a reply chunk", w(&msg, &lists(0, 0, 0, &used(40)), &rpc), bad(ReplyFault::Both(40))),
        ("all used", good.clone(), Accept),
        ("all unused", w(&msg, &lists(0, 0, 0, &unused), &rpc), Accept),
        ("no reply chunk", w(&msg, &lists(0, 0, 0, &[0]), &rpc), Accept),
        ("no lists", w(&msg, &none, &rpc), Accept),
        ("in the reply chunk", w(&nomsg, &lists(1, 1, 0, &used(2000)), &[]), Accept),
    ];
    for (name, message, verdict) in rows {
        let mut rig = Rig::connected(settings());
        let xid = rig.call_with_all();
        assert_eq!((xid.0, rig.sent.len(), rig.requester.region_count()), (x, 1, 3), "{name}");
        let received = rig.receive(&message, None);
        assert_eq!(rig.requester.receives_posted, rig.requester.receive_count(), "{name}: the Receive is posted again");
        assert!(rig.ended.is_empty(), "{name}");
        assert_eq!(rig.sent.len(), 1, "{name}: a requester answers nothing");
        match (verdict, received) {
            (Drop, Received::Dropped(_)) => {
                assert!(rig.completed.is_empty(), "{name}");
                assert_eq!(rig.requester.credits().in_flight(), 1, "{name}");
                assert_eq!(rig.receive(&good, None), Received::Answer(xid), "{name}");
                assert!(matches!(rig.outcome(xid), Some(Ok(_))), "{name}");
            }
            (Fail(failure), Received::Answer(of)) => {
                assert_eq!((of, rig.outcome(xid)), (xid, Some(&Err(failure))), "{name}");
            }
            (Accept, Received::Answer(of)) => {
                assert_eq!(of, xid, "{name}");
                assert!(matches!(rig.outcome(xid), Some(Ok(_))), "{name}: {:?}", rig.outcome(xid));
            }
            (_, received) => panic!("{name}: {received:?}"),
        }
        assert_eq!((rig.requester.pending_count(), rig.requester.region_count()), (0, 0), "{name}");
        assert!(
            matches!(rig.receive(&good, None), Received::Dropped(Dropped::NotPending(_))),
            "{name}: a second reply"
        );
    }
}

#[test]
fn what_the_reply_says_was_written_is_what_its_caller_hears() {
    let mut rig = Rig::connected(settings());
    let xid = rig.call_with_all();
    let lists = [0, 1, 1, 0x100, 7, 0x100, 0, 1, 2, 0x101, 4096, 0x101, 0, 0x101, 9, 0x101, 4096, 0];
    rig.receive(&words(&[&[xid.0, 1, 4, 1][..], &lists, &[1, 1, 0x102, 400, 0x102, 0]].concat()), None);
    let reply = Reply { stream: Stream::Chunk(400), results: vec![7, 4105] };
    assert_eq!(rig.outcome(xid), Some(&Ok(reply)));
}

#[test]
fn grants_are_clamped_and_zero_is_one() {
    for (granted, window) in [(0, 1), (1, 1), (3, 3), (4, 4), (5, 4), (u32::MAX, 4)] {
        let mut rig = Rig::connected(settings());
        let first = rig.call(2, &[], &[]);
        let _others: Vec<Xid> = (0..10).map(|_| rig.call(2, &[], &[])).collect();
        assert_eq!(rig.sent.len(), 1, "one until the first reply");
        rig.receive(&plain(first, granted), None);
        assert_eq!(rig.sent.len(), 1 + window, "granted {granted}");
    }
}

#[test]
fn a_dropped_message_grants_nothing() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[]);
    rig.call(2, &[], &[]);
    rig.receive(&words(&[first.0, 1, 4, 0, 0, 0, 0, first.0, 0]), None);
    assert_eq!(rig.sent.len(), 1, "a call of the server's speaks of other credits");
    rig.receive(&encode_error(first, 1, 2, RdmaError::Chunk), None);
    assert_eq!(rig.sent.len(), 2);
}

#[test]
fn a_smaller_grant_is_honoured_by_not_sending() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[]);
    let others: Vec<Xid> = (0..8).map(|_| rig.call(2, &[], &[])).collect();
    rig.receive(&plain(first, 4), None);
    assert_eq!(rig.sent.len(), 5);
    rig.receive(&plain(others[0], 1), None);
    rig.receive(&plain(others[1], 1), None);
    rig.receive(&plain(others[2], 1), None);
    assert_eq!((rig.sent.len(), rig.requester.credits().in_flight()), (5, 1));
    rig.receive(&plain(others[3], 1), None);
    assert_eq!(rig.sent.len(), 6);
}

#[test]
fn no_call_goes_out_before_its_receive_is_posted() {
    let mut rig = Rig::new(settings());
    rig.is_idle = true;
    rig.requester.handle_connected(PrivateData::ABSENT);
    rig.call(2, &[], &[]);
    assert_eq!(rig.noted, [Output::Receive(8)]);
    rig.requester.handle_receives_posted(1);
    rig.drive();
    assert!(matches!(rig.noted[1..], [Output::Send { .. }]), "{:?}", rig.noted);
}

#[test]
fn a_buffer_is_free_for_each_send() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[]);
    rig.receive(&plain(first, 4), None);
    rig.is_idle = true;
    let xids: Vec<Xid> = (0..4).map(|_| rig.call(2, &[], &[])).collect();
    assert_eq!(rig.noted.len(), 4);
    for xid in xids {
        rig.receive(&plain(xid, 4), None);
    }
    rig.noted.clear();
    rig.call(2, &[], &[]);
    assert!(!rig.noted.iter().any(|output| matches!(output, Output::Send { .. })), "no Send has completed");
    rig.requester.handle_sent();
    rig.drive();
    assert!(rig.noted.iter().any(|output| matches!(output, Output::Send { .. })));
}

#[test]
fn calls_are_sent_in_their_order_however_late_memory_comes() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[]);
    rig.receive(&plain(first, 4), None);
    rig.is_idle = true;
    let (slow, quick) = (rig.call(2, &[], &[50]), rig.call(2, &[], &[]));
    let ids: Vec<RegionId> = rig
        .noted
        .iter()
        .filter_map(|output| match output {
            Output::Register(registration) => Some(registration.id),
            _ => None,
        })
        .collect();
    assert_eq!((ids.len(), rig.noted.len()), (1, 1), "{:?}", rig.noted);
    rig.requester.handle_registered(ids[0], RemoteKey(1), 1 << 32);
    rig.drive();
    let sent: Vec<Xid> = rig
        .noted
        .iter()
        .filter_map(|output| match output {
            Output::Send { xid, .. } => Some(*xid),
            _ => None,
        })
        .collect();
    assert_eq!(sent, [slow, quick]);
}

#[test]
fn the_next_connection_has_its_own_thresholds_and_keys_and_the_same_xid() {
    let mut rig = Rig::new(settings());
    rig.requester.handle_connected(PrivateData { remote_invalidate: true, send_bytes: 4096, receive_bytes: 4096 });
    let xid = rig.call(500, &[], &[300]);
    let [(_, first)] = &rig.sent[..] else { panic!("{}", rig.sent.len()) };
    assert_eq!((word(first, 0), word(first, 12), word(first, 16)), (xid.0, 0, 0));
    let key = rig.opened[0].key;
    rig.disconnect();
    assert_eq!((rig.sent.len(), rig.requester.region_count(), rig.requester.agreed()), (0, 0, None));
    rig.requester.handle_connected(PrivateData::ABSENT);
    rig.drive();
    let [(_, second)] = &rig.sent[..] else { panic!("{}", rig.sent.len()) };
    assert_eq!((word(second, 0), word(second, 12), word(second, 16)), (xid.0, 1, 1), "a long call now");
    assert!(rig.opened[1..].iter().all(|region| region.key != key));
    assert_eq!((rig.opened[1].right, &rig.opened[1].octets), (Right::Read, &whole(&message(xid, 500, &[]))));
    assert_eq!(rig.requester.credits().window().get(), 1);
}

/// An error is final: sent again as it was, the call would only fail again.
#[test]
fn what_was_answered_with_an_error_is_not_sent_again() {
    for error in [RdmaError::Chunk, RdmaError::Version { low: 2, high: 2 }] {
        let mut rig = Rig::connected(settings());
        let xid = rig.call(2, &[], &[300]);
        rig.receive(&encode_error(xid, 1, 4, error), None);
        assert_eq!(rig.outcome(xid), Some(&Err(Failure::Rdma(error))));
        rig.disconnect();
        rig.requester.handle_connected(PrivateData::ABSENT);
        rig.drive();
        assert!(rig.sent.is_empty());
    }
}

/// Memory is open to the responder no longer than its call needs it (RFC 8166 §8.1.3).
#[test]
fn memory_is_opened_when_its_call_goes_out_and_not_before() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[300]);
    let second = rig.call(2, &[], &[300]);
    assert_eq!(rig.opened.iter().map(|region| region.xid).collect::<Vec<_>>(), [first], "one credit");
    rig.receive(&plain(first, 1), None);
    assert_eq!(
        rig.opened.iter().map(|region| (region.xid, region.is_open)).collect::<Vec<_>>(),
        [(first, false), (second, true)]
    );
}

/// A responder that cannot tell whose memory refused it took a GET for the one that had been given up beside it.
#[test]
fn a_call_that_was_beside_one_cancelled_at_once_is_sent_again_when_it_is_refused_for_that() {
    let refusal = |xid: Xid| words(&[xid.0, 1, 4, 4, 2]);
    for is_cancelled in [true, false] {
        let mut rig = Rig::connected(settings());
        let opener = rig.call(2, &[], &[]);
        rig.receive(&plain(opener, 4), None);
        let (first, second) = (rig.call(2, &[], &[300]), rig.call(2, &[], &[300]));
        if is_cancelled {
            rig.requester.cancel(first, Cancel::Now);
            rig.drive();
            assert_eq!(rig.outcome(first), Some(&Err(Failure::Cancelled)));
        }
        rig.disconnect();
        rig.requester.handle_connected(PrivateData::ABSENT);
        rig.drive();
        let next = if is_cancelled { second } else { first };
        assert_eq!(rig.sent.iter().map(|(xid, _)| *xid).collect::<Vec<_>>(), [next]);
        rig.receive(&refusal(next), None);
        let failed = Err(Failure::Rdma(RdmaError::Chunk));
        if !is_cancelled {
            assert_eq!(rig.outcome(next), Some(&failed));
            continue;
        }
        assert_eq!((rig.outcome(next), rig.ended.as_slice()), (None, &[Reason::Mistaken][..]));
        assert_eq!(rig.requester.region_count(), 0);
        rig.disconnect();
        rig.requester.handle_connected(PrivateData::ABSENT);
        rig.drive();
        assert_eq!(rig.sent.iter().map(|(xid, _)| *xid).collect::<Vec<_>>(), [next]);
        assert_eq!(rig.opened.iter().filter(|region| region.xid == next && region.is_open).count(), 1);
        // Once: what is refused again is at fault.
        rig.receive(&refusal(next), None);
        assert_eq!((rig.outcome(next), rig.ended.len()), (Some(&failed), 1));
        assert_eq!((rig.requester.region_count(), rig.requester.pending_count()), (0, 0));
    }
}

#[test]
fn a_call_fails_after_as_many_lost_connections_as_it_may_have() {
    let mut rig = Rig::new(settings());
    let xid = rig.call(2, &[], &[300]);
    for attempt in 1..=3 {
        assert_eq!(rig.outcome(xid), None, "attempt {attempt}");
        rig.requester.handle_connected(PrivateData::ABSENT);
        rig.drive();
        assert_eq!(rig.sent.len(), 1);
        rig.disconnect();
    }
    assert_eq!(rig.outcome(xid), Some(&Err(Failure::Lost(3))));
}

#[test]
fn when_no_connection_can_be_had_all_calls_fail() {
    let mut rig = Rig::new(settings());
    let xids = [rig.call(2, &[], &[300]), rig.call(2, &[], &[])];
    rig.requester.handle_disconnected();
    rig.requester.abandon();
    rig.drive();
    assert_eq!(xids.map(|xid| rig.outcome(xid).cloned()), [(); 2].map(|()| Some(Err(Failure::Lost(0)))));
}

#[test]
fn a_call_that_the_thresholds_do_not_carry_fails_and_others_go_on() {
    let mut rig = Rig::connected(settings());
    let (long, short) = (rig.call(2, &[], &[300; 50]), rig.call(2, &[], &[]));
    assert!(matches!(rig.outcome(long), Some(Err(Failure::TooLong(TooLong { threshold: 1024, .. })))));
    assert_eq!(rig.sent.iter().map(|(xid, _)| *xid).collect::<Vec<_>>(), [short]);
}

#[test]
fn a_handle_that_the_server_closed_is_not_closed_again() {
    let mut rig = Rig::connected(settings());
    let xid = rig.call(2, &[], &[300, 300]);
    let key = rig.opened[0].key;
    rig.receive(&plain(xid, 4), Some(key));
    assert!(matches!(rig.outcome(xid), Some(Ok(_))));
    assert!(rig.ended.is_empty());
}

#[test]
fn a_handle_of_another_call_closed_by_the_server_ends_the_connection() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[]);
    rig.receive(&plain(first, 4), None);
    let (one, other) = (rig.call(2, &[], &[300]), rig.call(2, &[], &[300]));
    let key = rig.opened[1].key;
    rig.receive(&plain(one, 4), Some(key));
    assert_eq!(rig.ended, [Reason::ForeignInvalidation]);
    assert!(matches!(rig.outcome(one), Some(Ok(_))), "its own memory is closed");
    rig.disconnect();
    assert_eq!(rig.outcome(other), None, "it is sent again");

    let mut rig = Rig::connected(settings());
    rig.call(2, &[], &[300]);
    rig.receive(&plain(Xid(7), 4), Some(RemoteKey(0x100)));
    assert_eq!(rig.ended, [Reason::ForeignInvalidation], "a reply to nothing has no handle to close");
}

#[test]
fn what_cannot_be_closed_is_completed_by_the_end_of_the_connection() {
    let mut rig = Rig::connected(settings());
    let xid = rig.call(2, &[], &[300]);
    rig.is_idle = true;
    rig.receive(&plain(xid, 4), None);
    let Some(Output::Invalidate { id, .. }) = rig.noted.pop() else { panic!("{:?}", rig.noted) };
    rig.is_idle = false;
    rig.requester.handle_invalidate_failed(id);
    rig.drive();
    assert_eq!((&rig.ended[..], rig.outcome(xid)), (&[Reason::Invalidation][..], None));
    rig.disconnect();
    assert!(matches!(rig.outcome(xid), Some(Ok(_))));
}

#[test]
fn ten_thousand_messages_that_are_no_replies_do_no_harm() {
    let mut rig = Rig::connected(settings());
    let xid = rig.call(2, &[], &[300]);
    let strange = [
        vec![0; 8],
        words(&[1, 1, 1, 3, 0, 0, 0]),
        words(&[xid.0, 1, 1, 0, 0, 0, 0, xid.0, 0, 2]),
        words(&[xid.0, 1, 1, 4, 9]),
    ];
    for message in strange.iter().cycle().take(10_000) {
        assert!(matches!(rig.receive(message, None), Received::Dropped(_)));
    }
    assert_eq!(rig.receive(&plain(xid, 1), None), Received::Answer(xid));
}

/// A call with one region, in each of its states, and all that can happen there: what becomes of it, and what is asked of
/// the owner.
#[test]
fn every_event_in_every_state() {
    const STATES: [&str; 7] = ["Waiting", "Registering", "Sent", "Cancelled", "Fencing", "Revoking", "Orphan"];
    const EVENTS: [&str; 11] = [
        "registered",
        "refused",
        "reply",
        "reply and handle",
        "error",
        "invalidated",
        "invalidate failed",
        "cancel",
        "cancel now",
        "disconnected",
        "timeout",
    ];
    #[rustfmt::skip]
    const TABLE: [[&str; 11]; 7] = [
        // Waiting
        ["Waiting", "Waiting", "Waiting", "Waiting", "Waiting", "Waiting", "Waiting",
         "gone: Cancelled", "gone: Cancelled", "Waiting", "Waiting"],
        // Registering
        ["Sent: Send", "gone: Refused", "Registering", "Registering: Disconnect", "Registering", "Registering", "Registering",
         "Fencing", "Fencing", "Waiting", "Registering"],
        // Sent
        ["Sent", "Sent", "Fencing: Invalidate", "gone: Ok", "Fencing: Invalidate", "Sent", "Sent",
         "Sent", "Fencing: Invalidate", "Waiting", "Sent: Disconnect"],
        // Cancelled: sent, and its caller has given it up
        ["Sent", "Sent", "Fencing: Invalidate", "gone: Cancelled", "Fencing: Invalidate", "Sent", "Sent",
         "Sent", "Fencing: Invalidate", "gone: Cancelled", "Sent: Disconnect"],
        // Fencing: answered
        ["Fencing", "Fencing", "Fencing", "Fencing: Disconnect", "Fencing", "gone: Ok", "Fencing: Disconnect",
         "Fencing", "Fencing", "gone: Ok", "Fencing"],
        // Revoking: cancelled at once, not answered
        ["Fencing", "Fencing", "Fencing", "Fencing", "Fencing", "Orphan: Cancelled", "Fencing: Disconnect",
         "Fencing", "Fencing", "gone: Cancelled", "Fencing: Disconnect"],
        // Orphan
        ["Orphan", "Orphan", "gone", "gone", "gone", "Orphan", "Orphan",
         "Orphan", "Orphan", "gone", "Orphan: Disconnect"],
    ];
    for (state, row) in STATES.iter().zip(&TABLE) {
        for (event, expected) in EVENTS.iter().zip(row) {
            let mut rig = Rig::new(settings());
            if *state != "Waiting" {
                rig.requester.handle_connected(PrivateData::ABSENT);
                rig.drive();
            }
            rig.is_idle = true;
            let xid = rig.call(2, &[], &[300]);
            let (id, key) = (RegionId(0), RemoteKey(0x77));
            if !["Waiting", "Registering"].contains(state) {
                rig.requester.handle_registered(id, key, 1 << 32);
                rig.drive();
            }
            match *state {
                "Cancelled" => assert!(rig.requester.cancel(xid, Cancel::Answered)),
                "Fencing" => {
                    rig.receive(&plain(xid, 4), None);
                }
                "Revoking" | "Orphan" => assert!(rig.requester.cancel(xid, Cancel::Now)),
                _ => {}
            }
            if *state == "Orphan" {
                rig.requester.handle_invalidated(id);
            }
            rig.drive();
            rig.noted.clear();
            let requester = &mut rig.requester;
            match *event {
                "registered" => requester.handle_registered(id, key, 1 << 32),
                "refused" => requester.handle_refused(id),
                "reply" => {
                    requester.handle_received(&plain(xid, 4), None);
                }
                "reply and handle" if *state == "Waiting" => {}
                "reply and handle" => {
                    requester.handle_received(&plain(xid, 4), Some(key));
                }
                "error" => {
                    requester.handle_received(&encode_error(xid, 1, 4, RdmaError::Chunk), None);
                }
                "invalidated" => requester.handle_invalidated(id),
                "invalidate failed" => requester.handle_invalidate_failed(id),
                "cancel" => {
                    requester.cancel(xid, Cancel::Answered);
                }
                "cancel now" => {
                    requester.cancel(xid, Cancel::Now);
                }
                "disconnected" => requester.handle_disconnected(),
                "timeout" => requester.handle_timeout(rig.now + TIMEOUT),
                event => panic!("{event}"),
            }
            rig.drive();
            let mut found = match rig.requester.calls.get(&xid.0).map(|pending| &pending.stage) {
                None => "gone".to_owned(),
                Some(Stage::Fencing(_)) => "Fencing".to_owned(),
                Some(stage) => format!("{stage:?}"),
            };
            for output in rig.noted.iter().filter(|output| !matches!(output, Output::Receive(_))) {
                found += match output {
                    Output::Send { .. } => ": Send",
                    Output::Invalidate { .. } => ": Invalidate",
                    Output::Disconnect(_) => ": Disconnect",
                    Output::Completed { outcome: Ok(_), .. } => ": Ok",
                    Output::Completed { outcome: Err(Failure::Cancelled), .. } => ": Cancelled",
                    Output::Completed { outcome: Err(Failure::Refused), .. } => ": Refused",
                    output => panic!("{output:?}"),
                };
            }
            assert_eq!(found, *expected, "{event} while {state}");
        }
    }
}

#[test]
fn a_send_that_the_owner_has_not_got_is_taken_back() {
    let mut rig = Rig::connected(settings());
    let first = rig.call(2, &[], &[]);
    rig.receive(&plain(first, 4), None);
    rig.is_idle = true;
    // Both messages are decided in one go; the owner takes the first.
    let (one, two) = (rig.call(2, &[], &[10]), rig.call(2, &[], &[10]));
    for output in std::mem::take(&mut rig.noted) {
        let Output::Register(Registration { id, .. }) = output else { panic!("{output:?}") };
        rig.requester.handle_registered(id, RemoteKey(id.0 as u32), 1 << 32);
    }
    assert!(matches!(rig.requester.poll_output(rig.now), Some(Output::Send { xid, .. }) if xid == one));
    assert!(rig.requester.cancel(two, Cancel::Answered));
    rig.drive();
    assert!(!rig.noted.iter().any(|output| matches!(output, Output::Send { .. })), "{:?}", rig.noted);
    assert_eq!(rig.requester.credits().in_flight(), 1);
    assert!(matches!(rig.receive(&plain(two, 4), None), Received::Dropped(Dropped::NotPending(_))));
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// What a call asks for, and what a responder found in its message.
struct Asked {
    xid: Xid,
    whole: Vec<u8>,
    maxima: Vec<u32>,
    is_cancelled: bool,
}

/// A responder written from RFC 8166 §3 and §4 without anything of this crate: words, lists and memory by hand. Its
/// results are random octets of random lengths.
struct Naive<'a> {
    dice: &'a mut Dice,
    memory: &'a mut [Opened],
    reply_inline_bytes: usize,
}

impl Naive<'_> {
    fn region(&mut self, handle: u32, offset: u64, len: usize, right: Right) -> &mut [u8] {
        let region = self.memory.iter_mut().find(|region| region.key.0 == handle && region.is_open);
        let region = region.unwrap_or_else(|| panic!("handle {handle:#x} opens nothing"));
        assert_eq!(region.right, right);
        assert!(len > 0, "an empty segment");
        let start = (offset - region.address) as usize;
        &mut region.octets[start..start + len]
    }

    /// The message put together, the reply and what it closes, and the results.
    fn serve(&mut self, message: &[u8], maxima: &[u32], credit: u32) -> (Vec<u8>, Vec<u8>, Option<u32>, Vec<Vec<u8>>) {
        let mut at = 16;
        let mut next = || {
            at += 4;
            word(message, at - 4)
        };
        let (mut reads, mut writes, mut reply) = (Vec::new(), Vec::new(), None);
        while next() == 1 {
            let position = next() as usize;
            reads.push((position, next(), next() as usize, (u64::from(next()) << 32) + u64::from(next())));
        }
        let chunk = |next: &mut dyn FnMut() -> u32| -> Vec<(u32, usize, u64)> {
            let count = next();
            assert!(count > 0, "an empty chunk");
            (0..count).map(|_| (next(), next() as usize, (u64::from(next()) << 32) + u64::from(next()))).collect()
        };
        while next() == 1 {
            writes.push(chunk(&mut next));
        }
        if next() == 1 {
            reply = Some(chunk(&mut next));
        }
        let xid = word(message, 0);
        assert_eq!((word(message, 4), word(message, 12) <= 1), (1, true));

        let mut rest = message[at..].to_vec();
        let pull = |this: &mut Self, position: usize| -> Vec<u8> {
            let of = reads.iter().filter(|read| read.0 == position);
            of.flat_map(|read| this.region(read.1, read.3, read.2, Right::Read).to_vec()).collect()
        };
        if word(message, 12) == 1 {
            assert!(rest.is_empty());
            rest = pull(self, 0);
        }
        let positions: BTreeSet<usize> = reads.iter().map(|read| read.0).filter(|position| *position > 0).collect();
        let (mut whole, mut taken) = (Vec::new(), 0);
        for position in positions {
            let before = position - whole.len();
            whole.extend_from_slice(&rest[taken..taken + before]);
            taken += before;
            whole.extend(pull(self, position));
            whole.resize(whole.len().next_multiple_of(4), 0);
        }
        whole.extend_from_slice(&rest[taken..]);

        let mut results = Vec::new();
        let mut stream = words(&[xid, 1, 0]);
        let mut returned = writes.clone();
        returned.iter_mut().flatten().for_each(|segment| segment.1 = 0);
        for (index, max) in maxima.iter().enumerate() {
            let len = if self.dice.one_in(3) { u64::from(*max) } else { self.dice.below(u64::from(*max) + 1) };
            let result: Vec<u8> = (0..len).map(|_| self.dice.below(256) as u8).collect();
            stream.extend(words(&[result.len() as u32]));
            match writes.get(index) {
                None => {
                    stream.extend_from_slice(&result);
                    stream.resize(stream.len().next_multiple_of(4), 0);
                }
                Some(segments) => {
                    let mut left = &result[..];
                    for (which, (handle, room, offset)) in segments.iter().enumerate() {
                        let (now, later) = left.split_at(left.len().min(*room));
                        left = later;
                        returned[index][which].1 = now.len();
                        if !now.is_empty() {
                            self.region(*handle, *offset, now.len(), Right::Write).copy_from_slice(now);
                        }
                    }
                    assert!(left.is_empty(), "a chunk too small");
                }
            }
            results.push(result);
        }
        let spell = |chunk: &[(u32, usize, u64)]| -> Vec<u8> {
            let segments = chunk
                .iter()
                .flat_map(|(handle, len, offset)| [*handle, *len as u32, (offset >> 32) as u32, *offset as u32]);
            words(&[chunk.len() as u32].into_iter().chain(segments).collect::<Vec<_>>())
        };
        let mut lists = words(&[0]);
        for chunk in &returned {
            lists.extend([0, 0, 0, 1].into_iter().chain(spell(chunk)));
        }
        lists.extend([0; 4]);
        let fits = |reply_list: usize| 16 + lists.len() + reply_list + stream.len() <= self.reply_inline_bytes;
        let (proc, reply_list, payload) = match &reply {
            None => (0, words(&[0]), stream.clone()),
            Some(segments) => {
                let mut segments = segments.clone();
                let unused: Vec<_> = segments.iter().map(|(handle, _, offset)| (*handle, 0, *offset)).collect();
                let unused = [words(&[1]), spell(&unused)].concat();
                if fits(unused.len()) && self.dice.one_in(2) {
                    (0, if self.dice.one_in(2) { unused } else { words(&[0]) }, stream.clone())
                } else {
                    let mut left = &stream[..];
                    for (handle, room, offset) in &mut segments {
                        let (now, later) = left.split_at(left.len().min(*room));
                        (left, *room) = (later, now.len());
                        if !now.is_empty() {
                            self.region(*handle, *offset, now.len(), Right::Write).copy_from_slice(now);
                        }
                    }
                    assert!(left.is_empty(), "a reply chunk too small");
                    (1, [words(&[1]), spell(&segments)].concat(), Vec::new())
                }
            }
        };
        let answer = [words(&[xid, 1, credit, proc]), lists, reply_list, payload].concat();
        assert!(answer.len() <= self.reply_inline_bytes, "a reply longer than the threshold");
        let handles: BTreeSet<u32> = reads
            .iter()
            .map(|read| read.1)
            .chain(writes.iter().chain(&reply).flatten().map(|segment| segment.0))
            .collect();
        let closes = handles.first().copied().filter(|_| handles.len() == 1 && self.dice.one_in(2));
        (whole, answer, closes, results)
    }
}

/// Random calls, a responder that answers in any order, strange messages, cancels and lost connections: every call is
/// completed once, with the octets that the responder meant, and nothing stays open.
fn converse(seed: u64) {
    let mut dice = Dice(seed);
    let own = PrivateData {
        remote_invalidate: true,
        send_bytes: dice.pick(&[1024, 4096]),
        receive_bytes: dice.pick(&[1024, 4096]),
    };
    let mut rig = Rig::new(Settings {
        own,
        segment_bytes_max: NonZeroU32::new(dice.pick(&[77, 4096, u32::MAX])).unwrap(),
        credits: NonZeroU32::new(dice.pick(&[1, 2, 16])).unwrap(),
        attempts_max: NonZeroU32::MAX,
        ..settings()
    });
    let mut asked: Vec<Asked> = Vec::new();
    let mut answers: Vec<(Xid, Vec<u8>, Option<u32>)> = Vec::new();
    let mut meant: BTreeMap<u32, Vec<Vec<u8>>> = BTreeMap::new();
    let (mut is_connected, mut reply_inline_bytes, mut left) = (false, 0, 40);
    loop {
        if !is_connected {
            let peer =
                PrivateData { remote_invalidate: true, send_bytes: dice.pick(&[1024, 4096]), receive_bytes: 4096 };
            rig.requester.handle_connected(peer);
            reply_inline_bytes = rig.requester.agreed().unwrap().reply_inline_bytes as usize;
            is_connected = true;
        }
        rig.drive();
        assert!(rig.ended.is_empty(), "{:?}", rig.ended);
        assert!(rig.requester.credits().in_flight() <= 16);
        if left == 0 && rig.requester.calls.is_empty() {
            break;
        }
        match dice.below(20) {
            0..=5 if left > 0 => {
                left -= 1;
                let xid = rig.requester.mint_xid();
                let lens = |dice: &mut Dice| {
                    (0..dice.below(4)).map(|_| dice.pick(&[0, 1, 5, 76, 77, 78, 400, 3000])).collect::<Vec<u32>>()
                };
                let (items, maxima) = (lens(&mut dice), lens(&mut dice));
                let reductions = [Reduction::Fit, Reduction::Always, Reduction::Never];
                let call = Call {
                    message: message(xid, dice.pick(&[2, 50, 300]), &items),
                    arguments: dice.pick(&reductions),
                    results: maxima.clone(),
                    results_reduction: dice.pick(&reductions),
                    reply_bytes_max: 12 + 4 * maxima.len() as u64,
                };
                asked.push(Asked { xid, whole: whole(&call.message), maxima, is_cancelled: false });
                rig.requester.call(xid, call);
            }
            6..=11 if !rig.sent.is_empty() => {
                // A call that was sent before and answered already is carried out again.
                let at = dice.below(rig.sent.len() as u64) as usize;
                let (xid, message) = rig.sent.remove(at);
                let of = asked.iter().find(|asked| asked.xid == xid).unwrap();
                let credit = dice.pick(&[0, 1, 2, 16, u32::MAX]);
                let mut naive = Naive { dice: &mut dice, memory: &mut rig.opened, reply_inline_bytes };
                let (whole, answer, closes, results) = naive.serve(&message, &of.maxima, credit);
                assert_eq!(whole, of.whole, "the message of {xid:?}");
                meant.insert(xid.0, results);
                answers.push((xid, answer, closes));
            }
            12..=16 if !answers.is_empty() => {
                let at = dice.below(answers.len() as u64) as usize;
                let (xid, answer, closes) = answers.remove(at);
                assert_eq!(rig.receive(&answer, closes.map(RemoteKey)), Received::Answer(xid));
                if dice.one_in(4) {
                    assert_eq!(rig.receive(&answer, None), Received::Dropped(Dropped::NotPending(xid)));
                }
            }
            17 => {
                let mut strange = answers.last().map_or_else(|| vec![1; 30], |(_, answer, _)| answer.clone());
                strange.truncate(dice.below(28) as usize);
                rig.receive(&strange, None);
            }
            18 if dice.one_in(2) && !asked.is_empty() => {
                let at = dice.below(asked.len() as u64) as usize;
                let of = &mut asked[at];
                let is_late = answers.iter().any(|(xid, _, _)| *xid == of.xid);
                of.is_cancelled |= rig.requester.cancel(of.xid, Cancel::Answered) && rig.outcome(of.xid).is_none();
                assert!(!is_late || of.is_cancelled);
            }
            19 if dice.one_in(4) => {
                answers.clear();
                rig.disconnect();
                is_connected = false;
            }
            _ => {}
        }
    }
    assert_eq!(rig.requester.region_count(), 0);
    assert!(rig.requester.regions.is_empty() && rig.opened.iter().all(|region| !region.is_open));
    assert_eq!(rig.completed.len(), asked.len());
    for of in &asked {
        let reply = match rig.outcome(of.xid).unwrap() {
            Ok(reply) => reply,
            // Many short segments have no room in a header.
            Err(Failure::TooLong(_)) => continue,
            Err(failure) => {
                assert!(of.is_cancelled, "{failure}");
                continue;
            }
        };
        let memory = |wanted: &Memory| {
            &rig.opened.iter().rfind(|region| region.xid == of.xid && region.memory == *wanted).unwrap().octets
        };
        let stream = match &reply.stream {
            Stream::Inline(stream) => stream.clone(),
            Stream::Chunk(len) => memory(&Memory::Reply)[..*len as usize].to_vec(),
        };
        let mut at = 12;
        for (index, expected) in meant[&of.xid.0].iter().enumerate() {
            assert_eq!(word(&stream, at) as usize, expected.len());
            at += 4;
            match reply.results.get(index) {
                Some(octets) => {
                    let region = memory(&Memory::Result(index));
                    assert_eq!(&region[..*octets as usize], &expected[..], "result {index}");
                    assert!(region[*octets as usize..].iter().all(|octet| *octet == 0xee), "written past its end");
                }
                None => {
                    assert_eq!(&stream[at..at + expected.len()], &expected[..], "result {index}");
                    at += expected.len().next_multiple_of(4);
                }
            }
        }
        assert_eq!(at, stream.len());
    }
}

proptest! {
    #[test]
    fn a_responder_that_knows_nothing_of_this_code_understands_every_call(seed in any::<u64>()) {
        converse(seed);
    }

    /// Whatever comes, nothing panics, and what is pending can still be ended.
    #[test]
    fn any_messages_leave_the_requester_whole(
        messages in prop::collection::vec((prop::collection::vec(prop_oneof![Just(0_u32), Just(1), Just(4), Just(0x100), Just(0xffff_fffe), any::<u32>()], 0..30), any::<bool>()), 0..30),
    ) {
        let mut rig = Rig::connected(settings());
        let xid = rig.call_with_all();
        for (message, closes) in messages {
            if rig.ended.is_empty() {
                rig.receive(&words(&message), closes.then_some(RemoteKey(0x100)));
            }
        }
        rig.requester.cancel(xid, Cancel::Now);
        rig.disconnect();
        prop_assert!(rig.outcome(xid).is_some());
        prop_assert_eq!((rig.requester.pending_count(), rig.requester.region_count()), (0, 0));
    }
}
