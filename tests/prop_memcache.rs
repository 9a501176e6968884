//! The memcache parser under any octets, and under requests that are nearly right.

use bulkhead::wire::memcache::number::{
    append_padded_number, parse_exptime, parse_len, parse_stored_number, parse_u64,
};
use bulkhead::wire::memcache::{Command, Keys, Parsed, Parser, StoreHeader, StoreVerb, response};
use proptest::prelude::*;

#[path = "../fuzz/drive.rs"]
mod drive;
use drive::{Dice, Event, drive};

const LINE_BYTES_MAX: usize = 4096;

/// Words that make a line interesting, right or wrong.
#[rustfmt::skip]
const WORDS: &[&str] = &[
    "get", "gets", "gat", "gats", "set", "add", "replace", "append", "prepend", "cas", "incr", "decr", "touch",
    "delete", "flush_all", "stats", "version", "verbosity", "quit", "shutdown", "noreply", "0", "1", "2", "5", "-1",
    "4294967296", "18446744073709551615", "18446744073709551616", "a", "key", "HTTP/1.1", "mg", "settings",
];

fn token() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        8 => prop::sample::select(WORDS).prop_map(|word| word.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..8),
        1 => (245usize..256).prop_map(|len| vec![b'k'; len]),
    ]
}

fn line() -> impl Strategy<Value = Vec<u8>> {
    let ending = prop::sample::select(&["\r\n", "\n", "\r\r\n", " \r\n", ""][..]);
    (prop::collection::vec(token(), 0..9), ending)
        .prop_map(|(tokens, ending)| [tokens.join(&b' '), ending.into()].concat())
}

/// A storage command, most often with a body of the length it declares.
fn storage() -> impl Strategy<Value = Vec<u8>> {
    let verb = prop::sample::select(&["set", "add", "cas", "append"][..]);
    let error = prop_oneof![4 => Just(0usize), 1 => 0usize..4];
    (verb, prop::collection::vec(any::<u8>(), 0..80), error, any::<bool>()).prop_map(|(verb, body, error, noreply)| {
        let cas = if verb == "cas" { " 7" } else { "" };
        let noreply = if noreply { " noreply" } else { "" };
        let header = format!("{verb} key 1 2 {}{cas}{noreply}\r\n", body.len() + error);
        [header.as_bytes(), &body, b"\r\n"].concat()
    })
}

fn stream() -> impl Strategy<Value = Vec<u8>> {
    let retrieval = (0usize..2000).prop_map(|count| [&b"get"[..], &b" kk".repeat(count), b"\r\n"].concat());
    let part = prop_oneof![
        6 => line(),
        4 => storage(),
        1 => retrieval,
        1 => prop::collection::vec(any::<u8>(), 0..200),
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_octets_are_consumed_in_order_and_never_beyond_their_end(
        octets in prop::collection::vec(any::<u8>(), 0..5000),
        seed: u64,
    ) {
        let (_, consumed) = drive(&octets, LINE_BYTES_MAX, seed, |left| left);
        prop_assert!(consumed <= octets.len());
    }

    #[test]
    fn the_events_of_a_stream_do_not_depend_on_how_it_is_cut(stream in stream(), seed: u64, cuts: u64) {
        let whole = drive(&stream, LINE_BYTES_MAX, seed, |left| left);
        let octet_by_octet = drive(&stream, LINE_BYTES_MAX, seed, |_| 1);
        prop_assert_eq!(&octet_by_octet, &whole);
        let mut cuts = Dice(cuts);
        let pieces = drive(&stream, LINE_BYTES_MAX, seed, |left| cuts.roll(left as u64 + 1) as usize);
        prop_assert_eq!(&pieces, &whole);
    }

    #[test]
    fn a_body_comes_out_as_it_went_in(body in prop::collection::vec(any::<u8>(), 1..3000), cuts: u64) {
        let stream = [format!("set k 0 0 {}\r\n", body.len()).as_bytes(), &body, b"\r\nquit\r\n"].concat();
        // The first seed under which the body is accepted: which one does not matter.
        let accepted = (0..).find_map(|seed| {
            let mut cuts = Dice(cuts);
            let (events, _) = drive(&stream, 0, seed, |left| cuts.roll(left as u64 + 1) as usize);
            events.contains(&Event::BodyEnd { intact: true }).then_some(events)
        });
        prop_assert_eq!(&accepted.unwrap()[1], &Event::Body(body));
    }

    #[test]
    fn a_well_formed_storage_line_reads_back(
        verb in prop::sample::select(&[
            ("set", StoreVerb::Set), ("add", StoreVerb::Add), ("replace", StoreVerb::Replace),
            ("append", StoreVerb::Append), ("prepend", StoreVerb::Prepend), ("cas", StoreVerb::Cas),
        ][..]),
        key in prop::collection::vec(any::<u8>().prop_filter("no key octet", |o| !b" \r\n\0".contains(o)), 1..=250),
        flags: u32, exptime: i64, len in 0..1u64 << 63, cas: u64, noreply: bool,
    ) {
        let (name, verb) = verb;
        let cas = if verb == StoreVerb::Cas { cas } else { 0 };
        let cas_token = if verb == StoreVerb::Cas { format!(" {cas}") } else { String::new() };
        let tail = format!(" {flags} {exptime} {len}{cas_token}{}\r\n", if noreply { " noreply" } else { "" });
        let line = [name.as_bytes(), b" ", &key, tail.as_bytes()].concat();
        let header = StoreHeader { verb, key: &key, flags, exptime, len, cas, noreply };
        let expected = Parsed::Command { command: Command::Store(header), consumed: line.len() };
        prop_assert_eq!(Parser::new(0).parse(&line), expected);
    }

    #[test]
    fn keys_are_what_splitting_at_blanks_gives(octets in prop::collection::vec(prop::sample::select(&b"ab  c"[..]), 0..99)) {
        let split = octets.split(|&octet| octet == b' ').filter(|key| !key.is_empty());
        prop_assert!(Keys::from_validated(&octets).eq(split));
    }

    #[test]
    fn a_number_written_padded_reads_back(number: u64, old_len in 0usize..40) {
        let mut value = Vec::new();
        append_padded_number(&mut value, number, old_len);
        prop_assert_eq!(value.len(), number.to_string().len().max(old_len));
        prop_assert_eq!(parse_stored_number(&value), Some(number));
    }

    #[test]
    fn numbers_are_read_as_the_standard_library_reads_them(text in "-?[0-9]{1,22}") {
        let digits = text.trim_start_matches('-');
        prop_assert_eq!(parse_u64(digits.as_bytes()), digits.parse().ok());
        let wide: i128 = text.parse().unwrap();
        let clamped = wide.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64;
        prop_assert_eq!(parse_exptime(text.as_bytes()), Some(clamped));
        let len: Option<i64> = digits.parse().ok();
        prop_assert_eq!(parse_len(digits.as_bytes()), len.map(i64::unsigned_abs));
    }

    #[test]
    fn a_stat_line_is_always_three_tokens(name in ".{0,20}", value in ".{0,20}") {
        let mut line = Vec::new();
        response::stat_line(&mut line, name, value);
        let text = line.strip_suffix(b"\r\n").unwrap();
        prop_assert!(text.iter().all(|octet| !octet.is_ascii_control()));
        prop_assert_eq!(text.split(|&octet| octet == b' ').filter(|token| !token.is_empty()).count(), 3);
    }
}
