//! The memcache conversation under hostile octets, random cuts, and random acceptance, swallowing and abandoning of
//! bodies.
//!
//! Input: `[choices: 8 octets | cuts: 8 octets | stream…]`. The stream is driven whole, octet by octet and in random
//! pieces; all three must come to the same events.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../drive.rs"]
mod drive;
use drive::{Dice, drive};

/// Short enough for the fuzzer to reach beyond it.
const LINE_BYTES_MAX: usize = 3000;

fuzz_target!(|input: &[u8]| {
    let Some((choices, input)) = input.split_first_chunk::<8>() else { return };
    let Some((cuts, stream)) = input.split_first_chunk::<8>() else { return };
    let seed = u64::from_le_bytes(*choices);
    let whole = drive(stream, LINE_BYTES_MAX, seed, |left| left);
    assert_eq!(drive(stream, LINE_BYTES_MAX, seed, |_| 1), whole);
    let mut cuts = Dice(u64::from_le_bytes(*cuts));
    assert_eq!(drive(stream, LINE_BYTES_MAX, seed, |left| cuts.roll(left as u64 + 1) as usize), whole);
});
