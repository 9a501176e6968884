//! What operators and users write: URLs, addresses, networks, sizes, times, cores, pools, the configuration file and its
//! variables; and the numbers of memcache text. What is read is shown as it is read again.
//!
//! Input: `[kind: 1 octet | text…]`.
#![no_main]

use std::fmt::{Debug, Display};
use std::fs;
use std::str::FromStr;

use bulkhead::client::ServerUrl;
use bulkhead::config::{
    Auto, ByteSize, Flags, LogFormat, NativeAddress, Network, Pin, PoolConfig, Settings, Switch, TimeSpan,
};
use bulkhead::store::uring::Backend;
use bulkhead::wire::memcache::number::{parse_exptime, parse_len, parse_stored_number, parse_u32, parse_u64};
use bulkhead::wire::memcache::{LINE_BYTES_MAX, parse_line};
use libfuzzer_sys::fuzz_target;

#[path = "../seeds.rs"]
mod seeds;

/// What is read is shown as it is read again.
fn trip<T: FromStr<Err: Debug> + Display + PartialEq + Debug>(text: &str) {
    if let Ok(value) = text.parse::<T>() {
        let shown = value.to_string();
        assert_eq!(shown.parse::<T>().expect("as it is shown"), value, "{shown}");
    }
}

/// Whole decimal numbers, and nothing else, as the standard library reads them.
fn numbers(token: &[u8]) {
    let is_digits = !token.is_empty() && token.iter().all(u8::is_ascii_digit);
    let text = str::from_utf8(token).ok().filter(|_| is_digits);
    if let Some(number) = parse_u64(token) {
        assert_eq!(text.and_then(|text| text.parse().ok()), Some(number));
    }
    if let Some(number) = parse_u32(token) {
        assert_eq!(parse_u64(token), Some(number.into()));
    }
    if let Some(len) = parse_len(token) {
        assert_eq!(parse_u64(token), Some(len));
    }
    parse_exptime(token);
    parse_stored_number(token);
}

fn load(toml: &str, variables: Vec<(String, String)>) -> Option<Settings> {
    let path = std::env::temp_dir().join(format!("bulkhead-fuzz-{}.toml", std::process::id()));
    fs::write(&path, toml).expect("a file of our own");
    let settings = Settings::load(Some(&path), variables, &Flags::default());
    settings.map_err(|error| assert!(error.to_string().len() < 20_000)).ok()
}

fuzz_target!(
    init: {
        let texts = [
            "memcache://host:11211", "memcache+unix:/run/a.sock", "native+iwarp://[::1]:1?crc=off", "native+verbs://10.0.0.1:7",
        ];
        let texts = texts.map(|text| (0, text)).into_iter().chain([
            (1, "native+iwarp://127.0.0.1:1?crc=on"), (1, "native+loopback:a"), (2, "10.0.0.0/8"), (2, "fd00::/8"),
            (3, "256KiB"), (3, "8 PiB"), (4, "100ms"), (4, "7d"), (5, "/dir:with:4GiB"), (5, "/dir"), (6, "0,2,8-11"),
            (6, "auto"), (7, "auto"), (7, "off"), (7, "64KiB"), (8, "json"), (8, "uring"),
            (9, include_str!("../../configs/bulkhead.toml")), (9, "[store]\nmemory = \"64MiB\"\npools = [\"/a:1GiB\"]\n"),
            (10, "STORE__MEMORY=64MiB\nLISTEN__MEMCACHE=127.0.0.1:1"), (11, "18446744073709551615"), (11, "-1"),
            (12, "cas k 0 0 2 1 noreply"), (12, "gat 5 a b c"),
        ]);
        seeds::plant(texts.map(|(kind, text)| [&[kind][..], text.as_bytes()].concat()));
    },
    |input: &[u8]| {
        let Some((kind, octets)) = input.split_first() else { return };
        match kind % 16 {
            11 => return numbers(octets),
            12 => {
                let line = &octets[..octets.len().min(LINE_BYTES_MAX)];
                assert_eq!(format!("{:?}", parse_line(line)), format!("{:?}", parse_line(&line.to_vec())));
                return;
            }
            _ => {}
        }
        let Ok(text) = str::from_utf8(octets) else { return };
        match kind % 16 {
            0 => trip::<ServerUrl>(text),
            1 => trip::<NativeAddress>(text),
            2 => trip::<Network>(text),
            3 => trip::<ByteSize>(text),
            4 => trip::<TimeSpan>(text),
            5 => drop(text.parse::<PoolConfig>()),
            6 => trip::<Pin>(text),
            7 => {
                trip::<Auto<ByteSize>>(text);
                trip::<Switch<TimeSpan>>(text);
            }
            8 => {
                trip::<LogFormat>(text);
                drop(text.parse::<Backend>());
            }
            9 => {
                if let Some(settings) = load(text, Vec::new()) {
                    let again = load(&settings.to_toml(), Vec::new());
                    assert_eq!(again.as_ref(), Some(&settings), "{}", settings.to_toml());
                }
            }
            _ => {
                let variables = text.lines().filter_map(|line| line.split_once('='));
                let variables = variables.map(|(name, value)| (format!("BULKHEAD_{name}"), value.to_owned()));
                if let Some(settings) = load("", variables.collect()) {
                    assert_eq!(load(&settings.to_toml(), Vec::new()).as_ref(), Some(&settings));
                }
            }
        }
    }
);
