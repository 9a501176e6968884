//! The native protocol under hostile octets: a descriptor, and a ring full of records against a server and a client.
//!
//! Input: `[descriptor: 56 octets | records: (sequence and length octet, then so many octets)…]`. Half of the records
//! are what a peer that counts right would write; the others are raw commit words.
#![no_main]

use bulkhead::wire::memcache::Command;
use bulkhead::wire::native::conversation::{Conversation, Step};
use bulkhead::wire::native::descriptor::{Descriptor, Nonce, RemoteAddress, RemoteKey, RingGeometry, WindowGeometry};
use bulkhead::wire::native::endpoint::{EndCause, Endpoint, Settings};
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::requester::{Answer, Requester, Shape};
use bulkhead::wire::native::ring::{CommitWord, RECORD_BYTES_MAX, RingMemory, SLOT_BYTES, SLOTS_OFFSET};
use bulkhead::wire::native::stream::Value;
use bulkhead::wire::seq::ControlSequence;
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use std::time::Duration;

const SLOT_COUNT: u32 = 4;
const NOW: Duration = Duration::from_secs(1);

struct Region(RefCell<Vec<u8>>);

impl RingMemory for Region {
    fn load(&self, offset: usize) -> u64 {
        u64::from_le_bytes(*self.0.borrow()[offset..].first_chunk().unwrap())
    }

    fn store(&self, offset: usize, word: u64) {
        self.0.borrow_mut()[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
    }
}

fn own() -> Descriptor {
    let at = |address| RemoteAddress { address, key: RemoteKey(1) };
    let (ring, windows) = (RingGeometry::new(SLOT_COUNT).unwrap(), WindowGeometry::new(4096, 2).unwrap());
    Descriptor { ring, ring_at: at(1 << 32), ring_bytes: 4096, nonce: Nonce::ours(0), windows, bulk_at: at(1 << 40) }
}

/// Puts records of the input into the ring one by one; `drive` looks after each.
fn feed(mut input: &[u8], mut drive: impl FnMut(&Region) -> Result<(), EndCause>) {
    let region = Region(RefCell::new(vec![0; SLOTS_OFFSET + SLOT_BYTES * SLOT_COUNT as usize]));
    let mut sequence = ControlSequence::FIRST;
    while let [kind, len, rest @ ..] = input {
        let octets = &rest[..rest.len().min(usize::from(*len)).min(RECORD_BYTES_MAX)];
        input = &rest[octets.len()..];
        let slot = SLOTS_OFFSET + sequence.slot_index(SLOT_COUNT) as usize * SLOT_BYTES;
        let word = if kind & 0xf0 != 0xf0 {
            CommitWord::new(sequence, octets.len() as u8).word()
        } else {
            (sequence.get() + u64::from(kind & 3)).wrapping_sub(1) << 8 | u64::from(*len)
        };
        region.0.borrow_mut()[slot + 248 - octets.len()..slot + 248].copy_from_slice(octets);
        region.store(slot + 248, word);
        if drive(&region).is_err() {
            return;
        }
        // A record that was not taken is overwritten by the next, as a peer without manners would.
        let Some(next) = ControlSequence::new(region.load(0) + 1) else { return };
        sequence = next;
    }
}

fn turn<M>(endpoint: &mut Endpoint<(), M>) -> Result<(), EndCause> {
    while let Some(grant) = endpoint.poll_fill() {
        endpoint.handle_filled(grant.ticket);
    }
    while endpoint.poll_post(NOW)?.is_some() {}
    Ok(())
}

fuzz_target!(|input: &[u8]| {
    let Ok(peer) = Descriptor::decode(input) else { return };
    assert_eq!(peer.encode()[..], input[..56]);
    let records = &input[56..];
    if let Ok(record) = Record::decode(records) {
        let mut encoded = [0; RECORD_BYTES_MAX];
        let len = record.encode(&mut encoded);
        assert_eq!(&encoded[..len], records);
    }
    let stall_timeout = Duration::from_secs(30);
    let settings = Settings { own: own(), peer, queue_depth: 64, pipeline_bytes_max: 16 << 10, stall_timeout };

    let mut server = Endpoint::<(), _>::new(settings, Conversation::new());
    feed(records, |region| {
        server.poll_ring(region, NOW, 8)?;
        loop {
            let Endpoint { inbound, outbound, machine, .. } = &mut server;
            match machine.step(inbound)? {
                Step::NeedMore | Step::Close(_) => break,
                Step::Command(Command::Store(header)) => {
                    let len = header.len;
                    if len < 10_000 { machine.accept_body(len) } else { machine.swallow_body(len) }
                }
                Step::Command(Command::Get { keys, .. }) => {
                    for key in keys.take(3) {
                        let len = key.len() as u64 * 999;
                        outbound.value(key, Value { source: (), len, quick_len: len / 2 });
                    }
                }
                Step::Body { .. } => drop(machine.take_body(inbound)),
                Step::Command(_) | Step::Refused { .. } | Step::BodyEnd => {}
            }
        }
        turn(&mut server)
    });
    server.handle_disconnected();
    assert!(server.is_released());

    let mut client = Endpoint::<(), _>::new(settings, Requester::new(false));
    for shape in [Shape::Values, Shape::Line, Shape::Stats, Shape::Values] {
        client.ask(b"any\r\n", shape);
    }
    client.ask_store(b"any\r\n", (), 50_000);
    feed(records, |region| {
        client.poll_ring(region, NOW, 8)?;
        loop {
            match client.step()? {
                Answer::NeedMore => break,
                Answer::Body { .. } => drop(client.take_body()),
                _ => {}
            }
        }
        turn(&mut client)
    });
    client.handle_disconnected();
    assert!(client.is_released());
});
