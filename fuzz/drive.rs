//! Drives a memcache conversation over a stream cut at will, and checks after each step what must always hold. Shared
//! by the property tests and the fuzz target: the same stream and the same choices must come to the same events, however
//! the octets arrive.

use bulkhead::wire::memcache::{CloseReason, Command, Conversation, KEY_BYTES_MAX, Keys, LINE_BYTES_MAX, Step};

/// What a stream came to. Bodies are put together again, so that events do not depend on the cuts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Event {
    Command(String),
    Refused(Option<&'static [u8]>),
    Body(Vec<u8>),
    BodyEnd { intact: bool },
    Abandoned,
    Close(CloseReason),
}

/// What becomes of one body.
enum Choice {
    Accept,
    AbandonAfter(u64),
    Swallow,
}

/// Numbers that look random and follow from `seed` alone (SplitMix64).
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }
}

/// Feeds `stream` in pieces of `next_piece(octets left)` octets. `seed` decides what becomes of each body. Gives the
/// events, and how many octets were consumed or taken.
pub fn drive(
    stream: &[u8],
    line_bytes_max: usize,
    seed: u64,
    mut next_piece: impl FnMut(usize) -> usize,
) -> (Vec<Event>, usize) {
    let line_bytes_max = line_bytes_max.max(LINE_BYTES_MAX);
    let mut choices = Dice(seed);
    let mut conversation = Conversation::new(line_bytes_max);
    let mut events = Vec::new();
    let (mut start, mut end) = (0, 0);
    let mut abandon_after = u64::MAX;
    loop {
        let input = &stream[start..end];
        let (consumed, step) = conversation.step(input);
        assert!(consumed <= input.len(), "{consumed} of {} octets were consumed", input.len());
        start += consumed;
        let progress = consumed > 0;
        let starved = match step {
            Step::NeedMore => {
                assert!(end - start <= line_bytes_max, "more octets are wanted than a line may have");
                true
            }
            Step::Command(command) => {
                assert!(progress);
                check(&command);
                events.push(Event::Command(format!("{command:?}")));
                if let Command::Store(header) = command {
                    match choose(&mut choices, header.len) {
                        Choice::Accept => {
                            abandon_after = u64::MAX;
                            conversation.accept_body(header.len);
                        }
                        Choice::AbandonAfter(octets) => {
                            abandon_after = octets;
                            conversation.accept_body(header.len);
                        }
                        Choice::Swallow => {
                            conversation.swallow_body(header.len);
                            assert!(conversation.is_swallowing());
                        }
                    }
                }
                false
            }
            Step::Refused { reply } => {
                assert!(progress);
                events.push(Event::Refused(reply));
                false
            }
            Step::Body { remaining, available } => {
                assert!(remaining > 0 && available as u64 <= remaining && available <= end - start);
                assert_eq!(remaining, conversation.body_remaining());
                let taken = (available as u64).min(abandon_after) as usize;
                if taken > 0 {
                    let piece = &stream[start..start + taken];
                    match events.last_mut() {
                        Some(Event::Body(body)) => body.extend_from_slice(piece),
                        _ => events.push(Event::Body(piece.to_vec())),
                    }
                    conversation.body_taken(taken as u64);
                    start += taken;
                    abandon_after -= taken as u64;
                }
                if abandon_after == 0 {
                    conversation.abandon_body();
                    assert!(conversation.is_swallowing());
                    events.push(Event::Abandoned);
                    false
                } else {
                    taken == 0
                }
            }
            Step::BodyEnd { intact } => {
                assert_eq!(consumed, 2);
                assert_eq!(intact, stream[start - 2..start] == *b"\r\n");
                events.push(Event::BodyEnd { intact });
                false
            }
            Step::Close(reason) => {
                events.push(Event::Close(reason));
                assert_eq!(conversation.step(&stream[start..end]), (0, Step::Close(reason)));
                return (events, start);
            }
        };
        if starved {
            let left = stream.len() - end;
            if left == 0 {
                return (events, start);
            }
            end += next_piece(left).clamp(1, left);
        }
    }
}

fn choose(choices: &mut Dice, len: u64) -> Choice {
    match choices.roll(8) {
        0..=3 => Choice::Accept,
        // Abandoning begins within a body: an empty one has no such place.
        4 | 5 if len > 0 => Choice::AbandonAfter(choices.roll(len.min(64)).max(1)),
        _ => Choice::Swallow,
    }
}

fn check(command: &Command<'_>) {
    let keys = match command {
        Command::Get { keys, .. } | Command::GetAndTouch { keys, .. } => {
            let octets = keys.as_bytes();
            assert!(keys.clone().eq(octets.split(|&octet| octet == b' ').filter(|key| !key.is_empty())));
            let copy = octets.to_vec();
            assert!(keys.clone().eq(Keys::from_validated(&copy)));
            keys.clone()
        }
        Command::Store(header) => Keys::from_validated(header.key),
        Command::Arithmetic { key, .. } | Command::Touch { key, .. } | Command::Delete { key, .. } => {
            Keys::from_validated(key)
        }
        _ => return,
    };
    assert!(keys.clone().count() > 0, "a command without a key");
    for key in keys {
        assert!((1..=KEY_BYTES_MAX).contains(&key.len()));
        assert!(key.iter().all(|octet| !b" \r\n\0".contains(octet)));
    }
}
