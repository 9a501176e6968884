//! Octets on record, one test for each kind of them: they decode to what is written beside them and encode back.

use bulkhead::wire::memcache::{Command, response};
use bulkhead::wire::native::conversation::{Conversation, Step};
use bulkhead::wire::native::credit::{Credits, Purpose};
use bulkhead::wire::native::descriptor::{
    Descriptor, Negotiated, Nonce, RemoteAddress, RemoteKey, RingGeometry, WindowGeometry,
};
use bulkhead::wire::native::egress::Post;
use bulkhead::wire::native::endpoint::{Endpoint, Settings};
use bulkhead::wire::native::poison::Poison;
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::requester::{Answer, Requester, Shape};
use bulkhead::wire::native::ring::{COMMIT_BYTES, CommitWord, RingMemory, SLOT_BYTES, SlotWrite};
use bulkhead::wire::native::stream::{Outbound, Value as StreamValue};
use bulkhead::wire::native::window::{PeerWindows, RxWindows};
use bulkhead::wire::seq::{BulkSequence, ControlSequence};
use serde_json::Value;
use std::cell::RefCell;
use std::time::Duration;

/// The vectors of one kind: `(id, given, expected)`. Fails if there are not `count` of them, so that none is skipped
/// unseen.
fn vectors(kind: &str, count: usize) -> Vec<(String, Value, Value)> {
    let all: Value = serde_json::from_str(include_str!("vectors/v3.json")).unwrap();
    let found: Vec<_> = all["vectors"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|vector| vector["kind"] == kind)
        .map(|vector| (text(&vector["id"]), vector["given"].clone(), vector["expect"].clone()))
        .collect();
    assert_eq!(found.len(), count, "vectors of kind {kind}");
    found
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn octets(value: &Value) -> Vec<u8> {
    let hex = value.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A number, or a string of hexadecimal digits behind `0x`.
fn number(value: &Value) -> u64 {
    match value.as_str() {
        Some(hex) => u64::from_str_radix(hex.strip_prefix("0x").unwrap(), 16).unwrap(),
        None => value.as_u64().unwrap(),
    }
}

fn described(fields: &Value) -> Descriptor {
    let windows = number(&fields["bulk_bytes"]) >> (number(&fields["window_shift"]) + 1);
    Descriptor {
        ring: RingGeometry::new(number(&fields["slot_count"]) as u32).unwrap(),
        ring_at: RemoteAddress {
            address: number(&fields["ring_address"]),
            key: RemoteKey(number(&fields["ring_rkey"]) as u32),
        },
        ring_bytes: number(&fields["ring_bytes"]) as u32,
        nonce: Nonce(number(&fields["nonce"])),
        windows: WindowGeometry::new(1 << number(&fields["window_shift"]), windows as u32).unwrap(),
        bulk_at: RemoteAddress {
            address: number(&fields["bulk_address"]),
            key: RemoteKey(number(&fields["bulk_rkey"]) as u32),
        },
    }
}

#[test]
fn every_vector_has_a_test_of_its_kind() {
    let kinds = [
        "desc_encode",
        "desc_decode",
        "ring_geometry",
        "bulk_geometry",
        "negotiate",
        "bulk_address",
        "fragments",
        "slot_post",
        "slot_poll",
        "frame",
        "ready_state",
        "release_state",
        "credit_read",
        "exchange",
    ];
    let all: Value = serde_json::from_str(include_str!("vectors/v3.json")).unwrap();
    for vector in all["vectors"].as_array().unwrap() {
        assert!(kinds.contains(&vector["kind"].as_str().unwrap()), "{vector}");
    }
}

#[test]
fn descriptors_encode() {
    for (id, given, expect) in vectors("desc_encode", 2) {
        let descriptor = described(&given);
        assert_eq!(descriptor.encode().to_vec(), octets(&expect["hex"]), "{id}");
        assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor), "{id}");
    }
}

#[test]
fn descriptors_decode_or_are_refused_for_the_right_reason() {
    for (id, given, expect) in vectors("desc_decode", 23) {
        let decoded = Descriptor::decode(&octets(&given["hex"]));
        if expect["accept"].as_bool().unwrap() {
            let decoded = decoded.unwrap();
            assert_eq!(decoded, described(&expect), "{id}");
            assert_eq!(u64::from(decoded.windows.window_bytes()), number(&expect["window_bytes"]), "{id}");
            assert_eq!(u64::from(decoded.windows.window_count()), number(&expect["window_count"]), "{id}");
            assert_eq!(decoded.encode()[..], octets(&given["hex"])[..56], "{id}");
        } else {
            assert_eq!(decoded.unwrap_err().cause(), expect["reason"], "{id}");
        }
    }
}

#[test]
fn rings_fit_their_budget() {
    for (id, given, expect) in vectors("ring_geometry", 3) {
        let ring = RingGeometry::within(number(&given["ring_budget"])).unwrap();
        assert_eq!(u64::from(ring.slot_count()), number(&expect["slots"]), "{id}");
        assert_eq!(ring.mapping_bytes(number(&given["page"])), number(&expect["mapping_bytes"]), "{id}");
    }
}

#[test]
fn windows_are_divided_or_refused() {
    for (id, given, expect) in vectors("bulk_geometry", 5) {
        let windows = WindowGeometry::new(number(&given["window_bytes"]), number(&given["window_count"]) as u32);
        assert_eq!(windows.is_ok(), expect["ok"].as_bool().unwrap(), "{id}");
        if let Ok(windows) = windows {
            assert_eq!(windows.mapping_bytes(), number(&expect["mapping_bytes"]), "{id}");
            assert_eq!(windows.half_bytes(), number(&expect["rx_offset"]), "{id}");
        }
    }
}

#[test]
fn the_smaller_geometry_limits_a_sender() {
    for (id, given, expect) in vectors("negotiate", 2) {
        let side = |name: &str| WindowGeometry::new(number(&given[name][0]), number(&given[name][1]) as u32).unwrap();
        let limits = Negotiated::between(side("local"), side("remote"));
        assert_eq!(limits, Negotiated::between(side("remote"), side("local")), "{id}");
        assert_eq!(u64::from(limits.fragment_bytes_max), number(&expect["max_fragment"]), "{id}");
        assert_eq!(u64::from(limits.in_flight_max), number(&expect["max_in_flight"]), "{id}");
    }
}

#[test]
fn fragments_go_to_the_window_of_their_sequence() {
    for (id, given, expect) in vectors("bulk_address", 4) {
        let windows =
            WindowGeometry::new(number(&given["window_bytes"]), number(&given["window_count"]) as u32).unwrap();
        let bulk_at = RemoteAddress { address: number(&given["bulk_address"]), key: RemoteKey(5) };
        let ring_at = RemoteAddress { address: 1, key: RemoteKey(4) };
        let ring = RingGeometry::new(2).unwrap();
        let descriptor = Descriptor { ring, ring_at, ring_bytes: 4096, nonce: Nonce(0), windows, bulk_at };
        let sequence = BulkSequence::new(number(&given["sequence"])).unwrap();
        let index = u64::from(sequence.window_index(windows.window_count()));
        assert_eq!(index, number(&expect["slot_index"]), "{id}");
        let at = RemoteAddress { address: number(&expect["rx_address"]), key: RemoteKey(5) };
        assert_eq!(descriptor.window_at(sequence), at, "{id}");
    }
}

#[test]
fn records_are_written_before_their_commit_word() {
    for (id, given, expect) in vectors("slot_post", 8) {
        let sequence = ControlSequence::new(number(&given["sequence"])).unwrap();
        let slot_count = number(&given["slot_count"]) as u32;
        let record = octets(&given["record_hex"]);
        let write = SlotWrite::new(&Record::decode(&record).unwrap(), sequence, slot_count);
        assert_eq!(u64::from(sequence.slot_index(slot_count)), number(&expect["slot_index"]), "{id}");
        assert_eq!(number(&given["ring_address"]) + write.offset(), number(&expect["write_address"]), "{id}");
        assert_eq!(write.octets().len() as u64, number(&expect["write_len"]), "{id}");
        assert_eq!(write.octets(), octets(&expect["write_hex"]), "{id}");
    }
}

/// What a record turned out to be, against what was expected of it.
fn check_record(id: &str, octets_of_record: &[u8], expect: &Value) {
    match Record::decode(octets_of_record) {
        Ok(record) => {
            assert!(expect["ok"].as_bool().unwrap(), "{id}");
            match record {
                Record::Inline(payload) => {
                    assert_eq!(expect["type"], "INLINE", "{id}");
                    assert_eq!(payload, octets(&expect["payload_hex"]), "{id}");
                }
                Record::Ready { sequence, len } => {
                    assert_eq!(expect["type"], "BULK_READY", "{id}");
                    assert_eq!(u64::from(len.get()), number(&expect["length"]), "{id}");
                    assert_eq!(sequence.get(), number(&expect["sequence"]), "{id}");
                }
                Record::Release { sequence } => {
                    assert_eq!(expect["type"], "BULK_RELEASE", "{id}");
                    assert_eq!(sequence.get(), number(&expect["sequence"]), "{id}");
                }
            }
            let mut encoded = [0xee; 192];
            let len = record.encode(&mut encoded);
            assert_eq!(&encoded[..len], octets_of_record, "{id}");
        }
        Err(error) => {
            let reason = match expect["reason"].as_str().unwrap() {
                "length" => "frame_length",
                "type" => "record_type",
                "reserved" => "record_reserved",
                "zero" => "record_zero",
                other => other,
            };
            assert_eq!(error.cause(), reason, "{id}");
        }
    }
}

#[test]
fn slots_are_empty_or_hold_a_record_or_are_wrong() {
    for (id, given, expect) in vectors("slot_poll", 10) {
        let slot = octets(&given["slot_hex"]);
        assert_eq!(slot.len(), SLOT_BYTES, "{id}");
        let (front, word) = slot.split_last_chunk::<COMMIT_BYTES>().unwrap();
        let expected = ControlSequence::new(number(&given["expect_sequence"])).unwrap();
        match CommitWord::from_word(u64::from_le_bytes(*word)).judge(expected) {
            Ok(None) => assert_eq!(expect["state"], "empty", "{id}"),
            Ok(Some(len)) => {
                let frame_is_wrong = expect["state"] == "poison";
                assert!(frame_is_wrong || expect["state"] == "record", "{id}");
                check_record(&id, &front[front.len() - len..], &expect);
            }
            Err(error) => assert_eq!(error.cause(), expect["reason"], "{id}"),
        }
    }
}

#[test]
fn frames_decode_or_are_refused_for_the_right_reason() {
    for (id, given, expect) in vectors("frame", 12) {
        check_record(&id, &octets(&given["record_hex"]), &expect);
    }
}

/// A descriptor with room for `window_count` windows of 256 KiB.
fn peer_with(window_count: u32) -> Descriptor {
    let at = RemoteAddress { address: 1 << 40, key: RemoteKey(5) };
    let ring = RingGeometry::new(256).unwrap();
    let windows = WindowGeometry::new(256 << 10, window_count).unwrap();
    Descriptor { ring, ring_at: at, ring_bytes: 69_632, nonce: Nonce(0), windows, bulk_at: at }
}

#[test]
fn a_ready_is_the_next_fragment_and_no_longer_than_agreed() {
    for (id, given, expect) in vectors("ready_state", 3) {
        let next = BulkSequence::new(number(&given["next_rx_sequence"])).unwrap();
        let fragment_bytes_max = number(&given["max_fragment"]) as u32;
        let limits = Negotiated { fragment_bytes_max, in_flight_max: 4 };
        let mut windows = RxWindows::resumed(WindowGeometry::new(256 << 10, 4).unwrap(), limits, next);
        let record = octets(&given["record_hex"]);
        let Ok(Record::Ready { sequence, len }) = Record::decode(&record) else { panic!("{id}") };
        let judged = windows.handle_ready(sequence, len);
        match (judged, expect["reason"].as_str()) {
            (Ok(lease), None) => assert_eq!(lease.sequence().get() + 1, number(&expect["next_rx_sequence"]), "{id}"),
            (Err(Poison::ReadySequence { .. }), Some("sequence"))
            | (Err(Poison::ReadyLength { .. }), Some("length")) => {}
            (judged, _) => panic!("{id}: {judged:?}"),
        }
    }
}

#[test]
fn a_release_is_no_older_than_the_last_and_was_sent() {
    for (id, given, expect) in vectors("release_state", 4) {
        let (released, next) = (number(&given["released"]), number(&given["next_tx_sequence"]));
        let peer = peer_with(64);
        let limits = Negotiated::between(peer.windows, peer.windows);
        let mut windows = PeerWindows::resumed(peer, limits, BulkSequence::new(released + 1).unwrap());
        while windows.sent() + 1 < next {
            windows.take().unwrap();
        }
        let record = octets(&given["record_hex"]);
        let Ok(Record::Release { sequence }) = Record::decode(&record) else { panic!("{id}") };
        match (windows.handle_release(sequence), expect["reason"].as_str()) {
            (Ok(()), None) => {
                assert_eq!(windows.in_flight(), number(&expect["in_flight"]), "{id}");
                assert_eq!(windows.sent() - windows.in_flight(), number(&expect["released"]), "{id}");
            }
            (Err(Poison::ReleaseRegression { .. }), Some("regression"))
            | (Err(Poison::ReleaseUnsent { .. }), Some("unsent")) => {}
            (judged, _) => panic!("{id}: {judged:?}"),
        }
    }
}

#[test]
fn a_counter_read_back_frees_slots_or_is_wrong() {
    for (id, given, expect) in vectors("credit_read", 3) {
        let (cached, next) = (number(&given["cached_consumed"]), number(&given["next_tx_sequence"]));
        let slot_count = number(&given["slot_count"]) as u32;
        let mut credits = Credits::resumed(slot_count, ControlSequence::new(cached + 1).unwrap());
        while credits.sent() + 1 < next {
            assert!(credits.is_free(Purpose::Release));
            credits.take().unwrap();
        }
        let consumed = u64::from_le_bytes(octets(&given["readback_hex"]).try_into().unwrap());
        let judged = credits.handle_read(consumed, Duration::ZERO);
        assert_eq!(judged.is_ok(), expect["ok"].as_bool().unwrap(), "{id}");
        if judged.is_ok() {
            assert_eq!(u64::from(credits.free()), number(&expect["free_slots"]), "{id}");
        }
    }
}

#[test]
fn values_are_cut_into_full_windows_and_a_remainder() {
    for (id, given, expect) in vectors("fragments", 4) {
        let mut outbound = Outbound::new(number(&given["max_fragment"]) as u32);
        let len = number(&given["length"]);
        outbound.value(b"VALUE k 0 0\r\n", StreamValue { source: (), len, quick_len: len });
        let pieces = std::iter::from_fn(|| outbound.poll_place()).filter_map(|(_, fill)| fill);
        let lengths: Vec<u64> = pieces.map(|fill| u64::from(fill.piece.len)).collect();
        let expected: Vec<u64> = expect["lengths"].as_array().unwrap().iter().map(number).collect();
        assert_eq!(lengths, expected, "{id}");
    }
}

/// A control region and an RX half of one thread.
struct Region {
    ring: RefCell<Vec<u8>>,
    rx: RefCell<Vec<u8>>,
}

impl RingMemory for Region {
    fn load(&self, offset: usize) -> u64 {
        u64::from_le_bytes(*self.ring.borrow()[offset..].first_chunk().unwrap())
    }

    fn store(&self, offset: usize, word: u64) {
        self.ring.borrow_mut()[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
    }
}

/// Posts all that `endpoint` has, straight into the memory of the other side, and keeps what was written to its ring.
fn deliver<M>(endpoint: &mut Endpoint<Vec<u8>, M>, to: &Region, written: &mut Vec<Vec<u8>>) {
    let ring_at = peer_with(4).ring_at.address;
    let mut slots = std::collections::HashMap::new();
    while let Some(grant) = endpoint.poll_fill() {
        let piece = grant.source;
        let octets = &piece.value[piece.offset as usize..][..piece.len as usize];
        slots.insert(grant.slot, octets.to_vec());
        endpoint.handle_filled(grant.ticket);
    }
    while let Some(post) = endpoint.poll_post(Duration::ZERO).unwrap() {
        let (at, octets) = match &post {
            Post::Control { to, write, .. } => (to.address, write.octets()),
            Post::Body { slot, len, ready_to, ready, .. } => {
                assert_eq!(slots[slot].len(), *len as usize);
                to.rx.borrow_mut()[..*len as usize].copy_from_slice(&slots[slot]);
                (ready_to.address, ready.octets())
            }
            Post::Credits { .. } => panic!("the ring is far from full"),
        };
        let at = (at - ring_at) as usize;
        to.ring.borrow_mut()[at..at + octets.len()].copy_from_slice(octets);
        written.push(octets.to_vec());
    }
}

#[test]
fn exchanges_put_exactly_these_octets_into_the_rings() {
    for (id, _, expect) in vectors("exchange", 2) {
        let (mut own, peer) = (peer_with(4), peer_with(4));
        own.nonce = Nonce::ours(1);
        let stall_timeout = Duration::from_secs(30);
        let settings = Settings { own, peer, queue_depth: 512, pipeline_bytes_max: 1 << 20, stall_timeout };
        let region = || Region { ring: RefCell::new(vec![0; 69_632]), rx: RefCell::new(vec![0; 1 << 20]) };
        let memory = [region(), region()];
        let mut client = Endpoint::<Vec<u8>, _>::new(settings, Requester::new(true));
        let mut server = Endpoint::<Vec<u8>, _>::new(settings, Conversation::new());
        let (mut from_client, mut from_server) = (Vec::new(), Vec::new());
        let (mut stored, mut body, mut received) = (Vec::new(), Vec::new(), None);

        let steps = expect["steps"].as_array().unwrap();
        let mut lines = steps.iter().filter(|step| step["from"] == "client").filter_map(|step| step["text"].as_str());
        let sent = steps.iter().find(|step| step["body_hex"].is_string()).map(|step| octets(&step["body_hex"]));
        let sent = sent.unwrap_or_default();
        let line = lines.next().unwrap();
        client.ask_store(line.as_bytes(), sent.clone(), sent.len() as u64);
        assert_eq!(lines.next(), Some("\r\n"));
        while client.machine.unanswered_count() > 0 {
            deliver(&mut client, &memory[1], &mut from_client);
            server.poll_ring(&memory[1], Duration::ZERO, 100).unwrap();
            loop {
                let Endpoint { inbound, outbound, machine, .. } = &mut server;
                match machine.step(inbound).unwrap() {
                    Step::NeedMore => break,
                    Step::Command(Command::Store(header)) => {
                        let len = header.len;
                        machine.accept_body(len);
                    }
                    Step::Command(Command::Get { keys, .. }) => {
                        let (value, key) = (stored.clone(), keys.as_bytes());
                        let len = value.len() as u64;
                        let mut line = Vec::new();
                        response::value_line(&mut line, key, if key == b"foo" { 7 } else { 0 }, len, None);
                        outbound.value(&line, StreamValue { source: value, len, quick_len: len });
                        outbound.text(response::END);
                    }
                    Step::Body { .. } => {
                        let lease = machine.take_body(inbound);
                        let at = lease.offset() as usize;
                        stored.extend_from_slice(&memory[1].rx.borrow()[at..at + lease.len() as usize]);
                    }
                    Step::BodyEnd => outbound.text(response::STORED),
                    step => panic!("{step:?}"),
                }
            }
            deliver(&mut server, &memory[0], &mut from_server);
            client.poll_ring(&memory[0], Duration::ZERO, 100).unwrap();
            loop {
                match client.step().unwrap() {
                    Answer::NeedMore => break,
                    Answer::Line(line) => {
                        assert_eq!(line, b"STORED");
                        client.ask(lines.next().unwrap().as_bytes(), Shape::Values);
                    }
                    Answer::Body { .. } => {
                        let lease = client.take_body();
                        let at = lease.offset() as usize;
                        body.extend_from_slice(&memory[0].rx.borrow()[at..at + lease.len() as usize]);
                    }
                    Answer::End => received = Some(std::mem::take(&mut body)),
                    Answer::Value { .. } | Answer::ValueEnd => {}
                    answer => panic!("{answer:?}"),
                }
            }
        }
        deliver(&mut client, &memory[1], &mut from_client);
        assert_eq!(received, Some(sent), "{id}");
        for (side, written) in [("client", from_client), ("server", from_server)] {
            let expected: Vec<Vec<u8>> =
                steps.iter().filter(|step| step["from"] == side).map(|step| octets(&step["write_hex"])).collect();
            assert_eq!(written, expected, "{id}: what the {side} wrote");
        }
    }
}
