//! Clients of the memcached world against the real daemon: a Rust client, and every reply octet by octet.
//!
//! Clients in other languages and memcached's own tools are tried by `tests/interop/run.sh`.

mod common;

use common::{MIB, serve};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// A peer that is silent for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn client_of(address: SocketAddr) -> memcache::Client {
    memcache::connect(format!("memcache://{address}?timeout=60&tcp_nodelay=true&protocol=ascii")).unwrap()
}

fn value_of(len: u64) -> Vec<u8> {
    common::Pattern(len).octets(0, len as usize)
}

const LENS: [u64; 4] = [0, 100, MIB, 8 * MIB];

#[test]
fn the_rust_client_gets_back_what_it_set_and_appended() {
    let daemon = serve(&[]);
    let client = client_of(daemon.address());
    for len in LENS {
        let (key, value) = (format!("value-{len}"), value_of(len));
        assert_eq!(client.get::<Vec<u8>>(&key).unwrap(), None);
        client.set(&key, &value[..], 60).unwrap();
        assert!(client.get::<Vec<u8>>(&key).unwrap() == Some(value.clone()), "{len} octets");
        client.append(&key, &b"end"[..]).unwrap();
        client.prepend(&key, &b"start"[..]).unwrap();
        let whole = [b"start", &value[..], b"end"].concat();
        assert!(client.get::<Vec<u8>>(&key).unwrap() == Some(whole), "{len} octets with both ends");
        assert!(client.touch(&key, 1000).unwrap());
        assert!(client.delete(&key).unwrap());
        assert!(!client.delete(&key).unwrap());
        assert!(!client.touch(&key, 1000).unwrap());
        assert_eq!(client.get::<Vec<u8>>(&key).unwrap(), None);
    }
}

#[test]
fn the_rust_client_replaces_only_the_version_it_read() {
    let daemon = serve(&[]);
    let client = client_of(daemon.address());
    for len in LENS {
        let (key, value) = (format!("value-{len}"), value_of(len));
        client.add(&key, &value[..], 0).unwrap();
        // The client takes NOT_STORED for a success; what it finds afterwards tells.
        client.add(&key, &b"other"[..], 0).unwrap();
        let found = client.gets::<(Vec<u8>, u32, Option<u64>)>(&[&key]).unwrap();
        let (octets, _, version) = &found[&key];
        assert!(*octets == value, "{len} octets");
        let version = version.expect("gets gives a version");
        assert!(client.cas(&key, &b"second"[..], 0, version).unwrap());
        assert!(!client.cas(&key, &b"third"[..], 0, version).unwrap());
        assert_eq!(client.get::<String>(&key).unwrap().as_deref(), Some("second"));
        client.replace(&key, &value[..], 0).unwrap();
        assert!(client.get::<Vec<u8>>(&key).unwrap() == Some(value), "{len} octets");
    }
    assert!(!client.cas("nothing", &b"x"[..], 0, 1).unwrap_or(false));
}

#[test]
fn the_rust_client_counts_and_flushes() {
    let daemon = serve(&[]);
    let client = client_of(daemon.address());
    client.set("counter", 40, 0).unwrap();
    assert_eq!(client.increment("counter", 2).unwrap(), 42);
    assert_eq!(client.decrement("counter", 50).unwrap(), 0);
    assert!(client.increment("nothing", 1).is_err());
    assert_eq!((daemon.stat("incr_hits"), daemon.stat("incr_misses")), (1, 1));
    let versions = client.version().unwrap();
    assert_eq!(versions[0].1, daemon.connect().stats("")["version"]);
    client.flush().unwrap();
    assert_eq!(client.get::<String>("counter").unwrap(), None);
}

#[test]
fn a_connection_too_many_is_told_so_and_closed() {
    let daemon = common::Daemon::builder().setting("LIMITS__CONNECTIONS_MAX", "2").start();
    let mut first = daemon.connect();
    let mut second = daemon.connect();
    first.expect_in_step();
    second.expect_in_step();
    let mut third = daemon.connect();
    third.expect("ERROR Too many open connections\r\n");
    third.expect_end();
    assert_eq!(first.stats("")["rejected_connections"], "1");
    drop(second);
    // The place is free once the daemon has seen the end of the second; until then peers are refused.
    let admitted = (0..1000).any(|_| {
        let mut next = daemon.connect();
        let mut answer = [0; 7];
        let sent = next.try_send("version\r\n");
        if sent.is_ok() && next.try_receive(&mut answer).is_ok_and(|count| answer[..count] == *b"VERSION") {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
        false
    });
    assert!(admitted, "a place that came free was not given to anybody");
}

#[test]
fn every_reply_of_the_table_is_given_octet_by_octet() {
    let daemon = serve(&["--value-max", "1MiB"]);
    let mut wrong = Vec::new();
    let mut asked = 0;
    for (index, line) in include_str!("interop/probe.tsv").lines().enumerate() {
        let place = index + 1;
        let columns: Vec<&str> = line.split('\t').collect();
        match columns[..] {
            _ if line.starts_with('#') => {}
            ["skip", name, reason] => println!("skipped: {name}: {reason}"),
            [mode @ ("next" | "half" | "close"), name, input, reply] => {
                asked += 1;
                let found = replies(daemon.address(), mode, octets(input));
                let mut expected = octets(reply);
                if mode == "next" {
                    expected.extend_from_slice(b"VERSION {version}\r\n");
                }
                if !matches(&expected, &found) {
                    let (expected, found) = (common::client::shown(&expected), common::client::shown(&found));
                    wrong.push(format!("line {place}, {name}:\n  expected {expected}\n  found    {found}"));
                }
            }
            _ => panic!("line {place} of the table is no row: {line:?}"),
        }
    }
    assert!(wrong.is_empty(), "{} of {asked} replies differ\n{}", wrong.len(), wrong.join("\n"));
    assert!(asked > 100, "the table has {asked} rows");
}

/// All that comes back for `input` on a connection of its own.
fn replies(address: SocketAddr, mode: &str, mut input: Vec<u8>) -> Vec<u8> {
    if mode == "next" {
        input.extend_from_slice(b"version\r\n");
    }
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&input).unwrap();
    if mode != "close" {
        stream.shutdown(Shutdown::Write).unwrap();
    }
    let mut found = Vec::new();
    let mut chunk = [0; 64 << 10];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return found,
            Ok(count) => found.extend_from_slice(&chunk[..count]),
            // A close with octets of ours unread.
            Err(error) if mode == "close" && error.kind() == ErrorKind::ConnectionReset => return found,
            Err(error) => panic!("{error} after {}", common::client::shown(&found)),
        }
    }
}

/// The octets that a column of the table means; placeholders stay.
fn octets(column: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = column;
    while let Some(octet) = rest.bytes().next() {
        match octet {
            b'\\' => {
                let (octet, len) = match rest.as_bytes()[1] {
                    b'r' => (b'\r', 2),
                    b'n' => (b'\n', 2),
                    b't' => (b'\t', 2),
                    b'\\' => (b'\\', 2),
                    b'x' => (u8::from_str_radix(&rest[2..4], 16).expect("two digits"), 4),
                    other => panic!("\\{} means nothing", char::from(other)),
                };
                out.push(octet);
                rest = &rest[len..];
            }
            b'{' => {
                let (inner, behind) = rest[1..].split_once('}').expect("a brace that is closed");
                match inner.rsplit_once('*') {
                    Some((text, count)) => {
                        out.extend_from_slice(&octets(text).repeat(count.parse().expect("a count")));
                    }
                    None => out.extend_from_slice(&rest.as_bytes()[..inner.len() + 2]),
                }
                rest = behind;
            }
            octet => {
                out.push(octet);
                rest = &rest[1..];
            }
        }
    }
    out
}

/// Whether `found` is what `expected` says, placeholders filled.
fn matches(expected: &[u8], found: &[u8]) -> bool {
    let Some(start) = expected.iter().position(|&octet| octet == b'{') else { return expected == found };
    let len = expected[start..].iter().position(|&octet| octet == b'}').expect("a brace that is closed") + 1;
    let fits: fn(&u8) -> bool = match &expected[start..start + len] {
        b"{cas}" => u8::is_ascii_digit,
        b"{version}" => u8::is_ascii_graphic,
        other => panic!("{:?} means nothing", other.escape_ascii().to_string()),
    };
    let Some(rest) = found.strip_prefix(&expected[..start]) else { return false };
    let token = rest.iter().take_while(|octet| fits(octet)).count();
    token > 0 && matches(&expected[start + len..], &rest[token..])
}

#[test]
fn the_table_is_read_as_its_head_says() {
    assert_eq!(octets(r"a\r\n\t\\\x00\xff"), b"a\r\n\t\\\0\xff");
    assert_eq!(octets(r"{ab\n*3}{cas}"), b"ab\nab\nab\n{cas}");
    assert!(matches(b"VALUE {cas}\r\nVERSION {version}\r\n", b"VALUE 17\r\nVERSION 1.6-x\r\n"));
    assert!(!matches(b"VALUE {cas}\r\n", b"VALUE x\r\n"));
    assert!(!matches(b"VALUE {cas}\r\n", b"VALUE 17\r\nmore"));
}
