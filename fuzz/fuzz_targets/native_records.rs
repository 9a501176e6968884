//! The native protocol under hostile octets: a descriptor, and a ring full of records against a server and a client.
//!
//! Input: `[choices: 1 octet | descriptor: 56 octets | records: (kind and length octet, then so many octets)…]`. Choices: 0x03
//! how many slots the ring has, 0x04 more and larger windows, 0x08 a cautious client, 0x10 that asks for lines first. Most
//! records are what a peer that counts right would write; those of kind 0xf0 and above are raw commit words.
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

#[path = "../seeds.rs"]
mod seeds;

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

/// Slots of the ring.
fn slots(choices: u8) -> u32 {
    [4, 2, 16, 256][usize::from(choices & 3)]
}

fn own(choices: u8) -> Descriptor {
    let at = |address| RemoteAddress { address, key: RemoteKey(1) };
    let ring = RingGeometry::new(slots(choices)).unwrap();
    let (window_bytes, window_count) = if choices & 4 == 0 { (4096, 2) } else { (1 << 16, 32) };
    let windows = WindowGeometry::new(window_bytes, window_count).unwrap();
    let ring_bytes = (SLOTS_OFFSET + SLOT_BYTES * slots(choices) as usize) as u32;
    Descriptor { ring, ring_at: at(1 << 32), ring_bytes, nonce: Nonce::ours(0), windows, bulk_at: at(1 << 40) }
}

/// Puts records of the input into the ring one by one; `drive` looks after each.
fn feed(slot_count: u32, mut input: &[u8], mut drive: impl FnMut(&Region) -> Result<(), EndCause>) {
    let region = Region(RefCell::new(vec![0; SLOTS_OFFSET + SLOT_BYTES * slot_count as usize]));
    let mut sequence = ControlSequence::FIRST;
    while let [kind, len, rest @ ..] = input {
        let octets = &rest[..rest.len().min(usize::from(*len)).min(RECORD_BYTES_MAX)];
        input = &rest[octets.len()..];
        let slot = SLOTS_OFFSET + sequence.slot_index(slot_count) as usize * SLOT_BYTES;
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

fuzz_target!(
    init: {
        let vectors = seeds::vectors(include_str!("../../tests/vectors/v3.json"));
        let octets: Vec<_> = vectors.iter().flat_map(seeds::octets_in).collect();
        let descriptors: Vec<_> = octets.iter().filter(|octets| Descriptor::decode(octets).is_ok()).collect();
        let record = |octets: &[u8]| [&[0, octets.len() as u8], octets].concat();
        let lines: [&[u8]; 6] = [
            b"\x01get a\r\n", b"\x01set a 0 0 5\r\nhello\r\n", b"\x01VALUE a 0 5 1\r\nhello\r\nEND\r\n", b"\x01STORED\r\n",
            b"\x01STAT a 1\r\nEND\r\n", b"\x01stats\r\nquit\r\n",
        ];
        let records = octets.iter().map(Vec::as_slice).filter(|octets| Record::decode(octets).is_ok()).chain(lines);
        let first = descriptors.first().expect("the vectors have one");
        let of_records = records.map(|octets| [&[0][..], &first[..56], &record(octets), &record(octets)].concat());
        let of_descriptors = descriptors.iter().map(|octets| [&[5][..], octets, &record(lines[0])].concat());
        seeds::plant(of_records.chain(of_descriptors));
    },
    |input: &[u8]| {
        let Some((choices, input)) = input.split_first() else { return };
        let Ok(peer) = Descriptor::decode(input) else { return };
        assert_eq!(peer.encode()[..], input[..56]);
        let records = &input[56..];
        if let Ok(record) = Record::decode(records) {
            let mut encoded = [0; RECORD_BYTES_MAX];
            let len = record.encode(&mut encoded);
            assert_eq!(&encoded[..len], records);
        }
            let stall_timeout = Duration::from_secs(30);
        let settings = Settings { own: own(*choices), peer, queue_depth: 64, pipeline_bytes_max: 16 << 10, stall_timeout };

        let mut server = Endpoint::<(), _>::new(settings, Conversation::new());
        feed(slots(*choices), records, |region| {
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

        let mut client = Endpoint::<(), _>::new(settings, Requester::new(choices & 8 != 0));
        let shapes = match (choices & 8 != 0, choices & 0x10 != 0) {
            (true, false) => &[Shape::Values][..],
            (true, true) => &[Shape::Stats],
            (false, false) => &[Shape::Values, Shape::Line, Shape::Stats, Shape::Values],
            (false, true) => &[Shape::Line, Shape::Line, Shape::Values],
        };
        for shape in shapes {
            client.ask(b"any\r\n", *shape);
        }
        if choices & 8 == 0 {
            client.ask_store(b"any\r\n", (), 50_000);
        }
        feed(slots(*choices), records, |region| {
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
    }
);
