//! The memcache conversation under hostile octets, random cuts, and random acceptance, swallowing and abandoning of
//! bodies.
//!
//! Input: `[choices: 8 octets | cuts: 8 octets | stream…]`. The stream is driven whole, octet by octet and in random
//! pieces; all three must come to the same events.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../drive.rs"]
mod drive;
#[path = "../seeds.rs"]
mod seeds;

use drive::{Dice, drive};

/// Short enough for the fuzzer to reach beyond it.
const LINE_BYTES_MAX: usize = 3000;

fuzz_target!(
    init: {
        let streams: [&[u8]; 8] = [
            b"set k 1 0 5\r\nhello\r\nget k\r\n",
            b"gets a b c\r\ngat 5 a\r\nversion\r\n",
            b"cas k 0 0 2 77\r\nhi\r\nappend k 0 0 1 noreply\r\nx\r\n",
            b"incr k 18446744073709551615\r\ndecr k 1\r\ntouch k -1\r\ndelete k\r\n",
            b"flush_all 10\r\nverbosity 1\r\nstats items\r\nquit\r\n",
            b"set k 0 0 3\r\nlonger\r\nget k\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"set k 0 0 18446744073709551616\r\nmn\r\n",
        ];
        seeds::plant(streams.map(|stream| [&[3; 16][..], stream].concat()));
    },
    |input: &[u8]| {
        let Some((choices, input)) = input.split_first_chunk::<8>() else { return };
        let Some((cuts, stream)) = input.split_first_chunk::<8>() else { return };
        let seed = u64::from_le_bytes(*choices);
        let whole = drive(stream, LINE_BYTES_MAX, seed, |left| left);
        assert_eq!(drive(stream, LINE_BYTES_MAX, seed, |_| 1), whole);
        let mut cuts = Dice(u64::from_le_bytes(*cuts));
        assert_eq!(drive(stream, LINE_BYTES_MAX, seed, |left| cuts.roll(left as u64 + 1) as usize), whole);
    }
);
