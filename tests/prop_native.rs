//! The native protocol under any octets, any cuts and any order of events.

use bulkhead::wire::memcache::Command;
use bulkhead::wire::native::conversation::{Conversation, Step};
use bulkhead::wire::native::descriptor::{
    DESCRIPTOR_BYTES, Descriptor, Negotiated, Nonce, RemoteAddress, RemoteKey, RingGeometry, WindowGeometry,
};
use bulkhead::wire::native::egress::{Completed, Egress, Failure, Place, Post, WorkId};
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::ring::RECORD_BYTES_MAX;
use bulkhead::wire::native::stream::{Inbound, Outbound, Value};
use bulkhead::wire::native::window::{FailedFill, RxWindows, Ticket, TxSlots};
use bulkhead::wire::seq::BulkSequence;
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

fn descriptor() -> impl Strategy<Value = Descriptor> {
    let geometry = (2_u32..5000, 12_u32..20, 1_u32..100);
    (geometry, 1_u64..1 << 62, 1_u64..1 << 62, any::<[u32; 2]>(), any::<u64>()).prop_map(
        |((slots, shift, count), ring_address, bulk_address, keys, nonce)| {
            let ring = RingGeometry::new(slots).unwrap();
            Descriptor {
                ring,
                ring_at: RemoteAddress { address: ring_address, key: RemoteKey(keys[0]) },
                ring_bytes: ring.mapping_bytes(4096) as u32,
                nonce: Nonce(nonce),
                windows: WindowGeometry::new(1 << shift, count).unwrap(),
                bulk_at: RemoteAddress { address: bulk_address, key: RemoteKey(keys[1]) },
            }
        },
    )
}

/// What comes on a connection: text, or a window of so many octets.
#[derive(Clone, Debug)]
enum Come {
    Text(Vec<u8>),
    Ready(u32),
}

/// Requests that are right, or nearly.
fn come() -> impl Strategy<Value = Vec<Come>> {
    let line = prop::sample::select(
        &[
            "get a b\r\n",
            "version\r\n",
            "quit\r\n",
            "\r\n",
            "frob\r\n",
            "set a 0 0 5\r\n",
            "get a\n\r\n",
            "set a x 0 3\r\n",
        ][..],
    );
    let store = (0_u32..9000, any::<bool>(), 0_u32..30).prop_map(|(len, is_bad, error)| {
        let flags = if is_bad { "x" } else { "0" };
        let mut comes = vec![Come::Text(format!("set key {flags} 0 {len}\r\n").into_bytes())];
        let mut left = if error == 0 { len + 1 } else { len };
        while left > 0 {
            comes.push(Come::Ready(left.min(4096)));
            left -= left.min(4096);
        }
        let trailer: &[u8] = if error == 1 { b"\rx" } else { b"\r\n" };
        comes.push(Come::Text(trailer.to_vec()));
        comes
    });
    prop_oneof![
        3 => line.prop_map(|line| vec![Come::Text(line.as_bytes().to_vec())]),
        6 => store,
        1 => prop::collection::vec(any::<u8>(), 1..20).prop_map(|octets| vec![Come::Text(octets)]),
        1 => Just(vec![Come::Ready(1)]),
    ]
}

/// What a server makes of what comes, when it looks after every `piece`-th octet of text and after every window.
fn steps(comes: &[Come], accepts: u64, mut piece: impl FnMut() -> usize) -> Vec<String> {
    let windows = WindowGeometry::new(4096, 1000).unwrap();
    let mut windows = RxWindows::new(windows, Negotiated::between(windows, windows));
    let (mut inbound, mut conversation) = (Inbound::new(0), Conversation::new());
    let (mut steps, mut next, mut accepts) = (Vec::new(), 1, accepts);
    for come in comes {
        let mut text: &[u8] = match come {
            Come::Text(text) => text,
            Come::Ready(len) => {
                let sequence = BulkSequence::new(next).unwrap();
                next += 1;
                inbound.handle_ready(windows.handle_ready(sequence, NonZeroU32::new(*len).unwrap()).unwrap());
                windows.releases().poll();
                &[]
            }
        };
        loop {
            let (now, later) = text.split_at(piece().clamp(1, 191).min(text.len()));
            inbound.handle_inline(now);
            text = later;
            loop {
                match conversation.step(&mut inbound) {
                    Ok(Step::NeedMore) => break,
                    Ok(Step::Command(Command::Store(header))) => {
                        steps.push(format!("{header:?}"));
                        let len = header.len;
                        accepts = accepts.rotate_left(1);
                        if accepts & 1 == 0 { conversation.accept_body(len) } else { conversation.swallow_body(len) }
                    }
                    Ok(Step::Body { len, .. }) => {
                        steps.push(format!("body {len}"));
                        drop(conversation.take_body(&mut inbound));
                    }
                    Ok(step @ Step::Close(_)) => {
                        steps.push(format!("{step:?}"));
                        return steps;
                    }
                    Ok(step) => steps.push(format!("{step:?}")),
                    Err(poison) => {
                        steps.push(poison.cause().to_owned());
                        return steps;
                    }
                }
            }
            if text.is_empty() {
                break;
            }
        }
    }
    steps
}

/// Something to send: text, or a value of so many octets of which so many are quick.
#[derive(Clone, Debug)]
enum Send {
    Text(usize),
    Fresh(usize),
    Value { len: u64, quick_len: u64 },
}

fn sends() -> impl Strategy<Value = Vec<Send>> {
    let send = prop_oneof![
        (1_usize..500).prop_map(Send::Text),
        (1_usize..50).prop_map(Send::Fresh),
        (0_u64..60_000, prop::sample::select(&[0_u64, 1, 5000, 60_000][..]))
            .prop_map(|(len, quick)| Send::Value { len, quick_len: quick.min(len) }),
    ];
    prop::collection::vec(send, 1..20)
}

/// Adds what is to be sent; gives the octets of the whole stream, value octets as `#`.
fn add(outbound: &mut Outbound<()>, sends: &[Send]) -> Vec<u8> {
    let mut stream = Vec::new();
    for (index, send) in sends.iter().enumerate() {
        let letter = b'a' + (index % 26) as u8;
        match send {
            Send::Text(len) => {
                outbound.text(&vec![letter; *len]);
                stream.extend(vec![letter; *len]);
            }
            Send::Fresh(len) => {
                outbound.fresh_text(&vec![letter; *len]);
                stream.extend(vec![letter; *len]);
            }
            Send::Value { len, quick_len } => {
                let line = vec![letter; 300];
                outbound.value(&line, Value { source: (), len: *len, quick_len: *quick_len });
                stream.extend([&line[..], &vec![b'#'; *len as usize], b"\r\n"].concat());
            }
        }
    }
    stream
}

fn peer(slots: u32, window_count: u32) -> Descriptor {
    let at = |address| RemoteAddress { address, key: RemoteKey(1) };
    let (ring, windows) = (RingGeometry::new(slots).unwrap(), WindowGeometry::new(4096, window_count).unwrap());
    let ring_bytes = ring.mapping_bytes(4096) as u32;
    Descriptor { ring, ring_at: at(1 << 32), ring_bytes, nonce: Nonce(0), windows, bulk_at: at(1 << 40) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn descriptors_decode_to_what_was_encoded(descriptor in descriptor(), tail in prop::collection::vec(any::<u8>(), 0..140)) {
        let octets = [&descriptor.encode()[..], &tail].concat();
        prop_assert_eq!(Descriptor::decode(&octets), Ok(descriptor));
    }

    #[test]
    fn damaged_descriptors_are_refused_or_mean_what_they_say(
        descriptor in descriptor(),
        damages in prop::collection::vec((0..DESCRIPTOR_BYTES, any::<u8>()), 1..4),
    ) {
        let mut octets = descriptor.encode();
        for (at, octet) in damages {
            octets[at] = octet;
        }
        if let Ok(decoded) = Descriptor::decode(&octets) {
            prop_assert_eq!(decoded.encode(), octets);
            let last = BulkSequence::new(u64::from(decoded.windows.window_count())).unwrap();
            let end = decoded.window_at(last).address.checked_add(u64::from(decoded.windows.window_bytes()));
            let bulk_end = decoded.bulk_at.address.checked_add(decoded.windows.mapping_bytes());
            prop_assert!(end.is_some() && end == bulk_end, "the last window ends the mapping");
            prop_assert!(u64::from(decoded.ring_bytes) >= decoded.ring.region_bytes());
        }
    }

    #[test]
    fn records_decode_to_what_encodes_to_them(octets in prop::collection::vec(any::<u8>(), 0..250), kind in 0_u8..5) {
        let mut octets = octets;
        if let Some(first) = octets.first_mut() {
            *first = kind;
        }
        if let Ok(record) = Record::decode(&octets) {
            let mut encoded = [0; RECORD_BYTES_MAX];
            let len = record.encode(&mut encoded);
            prop_assert_eq!(&encoded[..len], &octets[..]);
        }
    }

    #[test]
    fn what_is_made_of_a_stream_does_not_depend_on_how_its_text_is_cut(
        comes in prop::collection::vec(come(), 1..10),
        accepts: u64,
        cuts in prop::collection::vec(1_usize..192, 1..20),
    ) {
        let comes = comes.concat();
        let whole = steps(&comes, accepts, || 191);
        prop_assert_eq!(&steps(&comes, accepts, || 1), &whole);
        let mut cuts = cuts.iter().cycle();
        prop_assert_eq!(&steps(&comes, accepts, || *cuts.next().unwrap()), &whole);
    }

    #[test]
    fn places_together_are_the_stream(sends in sends(), fragment in prop::sample::select(&[4096_u32, 8192, 65_536][..])) {
        let mut outbound = Outbound::new(fragment);
        let stream = add(&mut outbound, &sends);
        let (mut sent, mut ticket, mut inlines) = (Vec::new(), 0, 0);
        while let Some((place, fill)) = outbound.poll_place() {
            match place {
                Place::Inline { text, .. } => {
                    inlines += 1;
                    sent.extend_from_slice(text.as_bytes());
                }
                Place::Body { ticket: of, len, .. } => {
                    prop_assert_eq!(of, Ticket(ticket));
                    ticket += 1;
                    prop_assert!(len.get() <= fragment);
                    prop_assert_eq!(fill.unwrap().piece.len, len.get());
                    sent.extend(vec![b'#'; len.get() as usize]);
                }
            }
        }
        prop_assert_eq!(sent, stream.clone());
        prop_assert!(outbound.is_empty() && outbound.text_bytes() == 0 && outbound.value_count() == 0);
        let bodies: u64 = sends.iter().map(|send| match send {
            Send::Value { len, .. } => len.div_ceil(u64::from(fragment)),
            _ => 0,
        }).sum();
        prop_assert_eq!(ticket, bodies, "full windows and a remainder");
        prop_assert!(inlines <= stream.len() / 191 + 3 * sends.len(), "text is not scattered");
    }

    /// Slots are filled, fail, and retire in any order; the peer consumes and releases when it likes.
    #[test]
    fn the_egress_sends_the_stream_whatever_happens_when(
        sends in sends(),
        slots in prop::sample::select(&[2_u32, 3, 8, 64][..]),
        window_count in 1_u32..5,
        slot_count in 1_u32..5,
        choices in prop::collection::vec(any::<u8>(), 64),
        fails in prop::sample::select(&[0_u8, 60][..]),
    ) {
        let mut outbound = Outbound::new(4096);
        add(&mut outbound, &sends);
        let peer = peer(slots, window_count);
        let limits = Negotiated::between(peer.windows, peer.windows);
        let mut egress = Egress::new(peer, limits, 8);
        let mut tx = TxSlots::new(slot_count);
        let mut choices = choices.iter().copied().cycle();
        let mut now = Duration::from_secs(1);
        let (mut filling, mut failing_twice) = (Vec::new(), BTreeSet::new());
        let (mut doing, mut consumed, mut records, mut bodies) = (VecDeque::<(WorkId, bool)>::new(), 0_u64, 0_u64, 0_u64);
        let (mut sent, mut missed, mut lens) = (Vec::new(), BTreeSet::new(), HashMap::new());
        let mut is_broken = false;
        for round in 0_u64.. {
            prop_assert!(round < 100_000, "it stands still");
            // Shifted from lap to lap: with choices that merely repeat, something could be put off for ever.
            let mut choose = |below: u8| choices.next().unwrap().wrapping_add((round / 64) as u8) % below;
            while egress.room() > 0 && let Some((place, fill)) = outbound.poll_place() {
                egress.enqueue(place);
                if let Some(fill) = fill {
                    lens.insert(fill.ticket, fill.piece.len);
                    tx.handle_fill(fill.ticket, fill.piece, fill.slow);
                }
            }
            while let Some(grant) = tx.poll_grant() {
                filling.push(grant.ticket);
            }
            if !filling.is_empty() && choose(2) == 0 {
                let ticket = filling.swap_remove(choose(filling.len() as u8) as usize);
                if failing_twice.contains(&ticket) || choose(250) < fails {
                    failing_twice.insert(ticket);
                    if let FailedFill::GaveUp(piece) = tx.handle_failed(ticket)
                        && let Failure::Missed { value, cancelled, freed } = egress.handle_failed(ticket)
                    {
                        prop_assert_eq!(value, piece.id);
                        missed.insert(value.0);
                        cancelled.into_iter().for_each(|ticket| tx.cancel(ticket));
                        freed.into_iter().for_each(|slot| tx.handle_retired(slot));
                        outbound.handle_missed(value);
                    }
                } else if let Some(slot) = tx.handle_filled(ticket) {
                    prop_assert_eq!(egress.handle_filled(ticket, slot), None);
                }
            }
            if choose(3) == 0 && consumed < records {
                consumed = records;
            }
            if choose(3) == 0 && let Some(released) = BulkSequence::new(bodies) {
                egress.handle_released(released).unwrap();
            }
            if choose(2) == 0 && let Some((id, _)) = doing.pop_front() {
                match egress.handle_completion(id).unwrap() {
                    Completed::Slot(slot) => tx.handle_retired(slot),
                    Completed::Credits => egress.handle_credits(consumed, now).unwrap(),
                    Completed::Control => {}
                }
            }
            now += Duration::from_micros(50);
            while let Some(post) = egress.poll_post(now).unwrap() {
                let ready = match &post {
                    Post::Control { id, write, signaled, .. } => {
                        if *signaled {
                            doing.push_back((*id, false));
                        }
                        write
                    }
                    Post::Body { id, len, ready, .. } => {
                        doing.push_back((*id, false));
                        sent.extend(vec![b'#'; *len as usize]);
                        bodies += 1;
                        ready
                    }
                    Post::Credits { id, .. } => {
                        prop_assert!(!doing.iter().any(|(_, is_read)| *is_read), "one Read at a time");
                        doing.push_back((*id, true));
                        continue;
                    }
                };
                records += 1;
                prop_assert!(records - consumed < u64::from(slots), "the last slot is for a RELEASE");
                let (record, commit) = ready.octets().split_last_chunk::<8>().unwrap();
                prop_assert_eq!(u64::from_le_bytes(*commit), records << 8 | record.len() as u64);
                match Record::decode(record).unwrap() {
                    Record::Inline(text) => sent.extend_from_slice(text),
                    Record::Ready { sequence, .. } => prop_assert_eq!(sequence.get(), bodies),
                    Record::Release { .. } => prop_assert!(false, "nothing was received"),
                }
            }
            is_broken = egress.broken().is_some();
            if is_broken || outbound.is_empty() && egress.is_empty() && filling.is_empty() {
                break;
            }
        }
        let kept: Vec<Send> = {
            let mut values = 0..;
            sends.iter().map(|send| match send {
                Send::Value { .. } if missed.contains(&values.next().unwrap()) => Send::Text(0),
                send => send.clone(),
            }).collect()
        };
        let stream = add(&mut Outbound::new(4096), &kept);
        if is_broken {
            prop_assert!(stream.starts_with(&sent), "what has left is the front of the stream");
        } else {
            prop_assert_eq!(sent, stream);
        }
        tx.cancel_all();
        for ticket in filling {
            prop_assert!(tx.handle_filled(ticket).is_none());
        }
        egress.take_slots().into_iter().for_each(|slot| tx.handle_retired(slot));
        prop_assert!(tx.is_idle(), "a slot was lost");
    }

    #[test]
    fn releases_never_pass_a_lease_that_lives(drops in prop::collection::vec(any::<u16>(), 1..60)) {
        let windows = WindowGeometry::new(4096, 64).unwrap();
        let mut windows = RxWindows::new(windows, Negotiated::between(windows, windows));
        let (mut leases, mut next, mut released) = (Vec::new(), 1, 0);
        for choice in drops {
            if choice % 3 > 0 {
                let sequence = BulkSequence::new(next).unwrap();
                if let Ok(lease) = windows.handle_ready(sequence, NonZeroU32::MIN) {
                    leases.push(lease);
                    next += 1;
                }
            } else if !leases.is_empty() {
                drop(leases.swap_remove(usize::from(choice) % leases.len()));
            }
            if let Some(release) = windows.releases().poll() {
                prop_assert!(release.get() > released);
                released = release.get();
            }
            let oldest = leases.iter().map(|lease| lease.sequence().get()).min().unwrap_or(next);
            prop_assert_eq!(released, oldest - 1);
        }
    }
}
