//! Public bug reports of memcached, its clients, its proxies and its relatives, each as a test of the class it stands for.
//!
//! The doc comment of each test says what goes wrong elsewhere and where it was reported.

mod common;

use common::{Client, Daemon, KIB, MIB, Pattern, serve};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const STORAGE: [&str; 6] = ["set", "add", "replace", "append", "prepend", "cas"];

/// A storage line for `verb`; `quiet` is empty or " noreply".
fn storage_line(verb: &str, key: &str, flags: &str, exptime: &str, len: u64, quiet: &str) -> String {
    let cas = if verb == "cas" { " 1" } else { "" };
    format!("{verb} {key} {flags} {exptime} {len}{cas}{quiet}\r\n")
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

/// Waits for something that another thread of the daemon brings about.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..600 {
        if holds() {
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
    panic!("not in half a minute: {what}");
}

/// D1. Stores refuse values near the limit that a reader of the manual expects to fit, because keys and headers count
/// towards it, and the refusal of a long body leaves the connection out of step. Here the limit counts the value alone.
/// memcached/memcached#1094, memcached/memcached#831.
#[test]
fn the_limit_counts_the_value_alone_and_a_refused_body_is_swallowed() {
    let daemon = serve(&["--value-max", "1MiB"]);
    let mut client = daemon.connect();
    for len in [MIB - 100, MIB - 1, MIB] {
        client.set(&"k".repeat(250), Pattern(1), len);
        client.get(&"k".repeat(250), Pattern(1), len);
    }
    for len in [MIB + 1, MIB + 2, MIB + 100, 2 * MIB, 5 * MIB] {
        for verb in STORAGE {
            client.set("big", Pattern(2), 100);
            client.send(storage_line(verb, "big", "0", "0", len, ""));
            client.send_pattern(Pattern(3), 0, len);
            client.send("\r\n");
            client.expect("SERVER_ERROR object too large for cache\r\n");
            client.expect_in_step();
            // Whoever sets means to replace: the old value would be stale. The others leave it.
            if verb == "set" {
                client.get_nothing("big");
            } else {
                client.get("big", Pattern(2), 100);
            }
        }
    }
    // Growing past the limit is refused too, and what was there stays.
    for verb in ["append", "prepend"] {
        client.set("grown", Pattern(4), MIB - 1);
        client.ask(format!("{verb} grown 0 0 2\r\nxy\r\n"), "SERVER_ERROR object too large for cache\r\n");
        client.send(format!("{verb} grown 0 0 2 noreply\r\nxy\r\n"));
        client.get("grown", Pattern(4), MIB - 1);
    }
}

/// D2. A value that is too large and was sent under noreply made the server close while the body was still arriving: the
/// client met a broken pipe, or lost the writes behind it without a word. pinterest/pymemcache#377.
#[test]
fn a_value_that_is_too_large_is_swallowed_in_silence_under_noreply() {
    let daemon = serve(&["--value-max", "1MiB"]);
    let mut client = daemon.connect();
    for len in [MIB + 1, 3 * MIB, 40 * MIB] {
        for verb in STORAGE {
            client.set("big", Pattern(2), 100);
            client.send(storage_line(verb, "big", "0", "0", len, " noreply"));
            client.send_pattern(Pattern(3), 0, len);
            client.send("\r\nset after 0 0 2 noreply\r\nok\r\n");
            client.expect_in_step();
            if verb == "set" {
                client.get_nothing("big");
            } else {
                client.get("big", Pattern(2), 100);
            }
            client.ask("get after\r\ndelete after\r\n", "VALUE after 0 2\r\nok\r\nEND\r\nDELETED\r\n");
        }
    }
}

/// D5. A server that answered some commands in spite of noreply shifted every later reply by one: the client took another
/// key's answer for its own. dragonflydb/dragonfly#1203.
#[test]
fn no_command_answers_under_noreply_whether_it_succeeds_or_fails() {
    let daemon = serve(&["--value-max", "1MiB"]);
    let mut client = daemon.connect();
    client.ask(
        "set a 0 0 1 noreply\r\nx\r\nadd a 0 0 1 noreply\r\ny\r\ndelete nokey noreply\r\nincr nokey 1 noreply\r\n\
         touch nokey 0 noreply\r\nget a\r\n",
        "VALUE a 0 1\r\nx\r\nEND\r\n",
    );
    let long = "k".repeat(251);
    let mut quiet: Vec<String> = vec![];
    for key in ["there", "nothing", "text", "full", &long] {
        for verb in STORAGE {
            for (flags, exptime) in [("0", "0"), ("4294967295", "-1"), ("-1", "0"), ("4294967296", "0"), ("0", "soon")]
            {
                let mut request = storage_line(verb, key, flags, exptime, 5, " noreply");
                request.push_str("get x\r\n");
                quiet.push(request);
            }
            quiet.push(storage_line(verb, key, "0", "0", 3, " noreply") + "abc\r\n");
        }
        for delta in ["1", "18446744073709551615"] {
            quiet.push(format!("incr {key} {delta} noreply\r\n"));
            quiet.push(format!("decr {key} {delta} noreply\r\n"));
        }
        quiet.push(format!("touch {key} 100 noreply\r\n"));
        quiet.push(format!("delete {key} noreply\r\n"));
    }
    quiet.push("flush_all 100 noreply\r\n".into());
    quiet.push("flush_all noreply\r\n".into());
    quiet.push("verbosity 1 noreply\r\n".into());
    for request in &quiet {
        client.ask("set there 0 0 2\r\n10\r\nset text 0 0 1\r\nx\r\n", "STORED\r\nSTORED\r\n");
        client.send(request);
        client.send("version\r\n");
        let line = client.line();
        assert!(line.starts_with("VERSION "), "{request:?} was answered {line:?}");
    }
    // All of them in one go.
    client.send(quiet.concat());
    client.expect_in_step();
}

/// D6. A first request longer than a guess at what a line may be (2 KiB) closed the connection of clients that fetch many
/// keys. dragonflydb/dragonfly#1745.
#[test]
fn the_first_request_of_a_connection_may_name_any_number_of_keys() {
    let daemon = serve(&[]);
    for count in [1, 90, 95, 96, 97, 98, 99, 200, 600, 780, 1000, 3000, 20_000] {
        for verb in ["get", "gets", "gat 0", "gats 0"] {
            let mut client = daemon.connect();
            let keys: String = (0..count).map(|index| format!(" key-of-20-octets{index:04}")).collect();
            client.ask(format!("{verb}{keys}\r\n"), "END\r\n");
            client.expect_in_step();
        }
    }
}

/// D7. A client that writes megabytes of requests before it reads, and a server that stops reading requests only when it
/// has run out of room for answers, wait for each other for ever; or the server takes memory without bound.
/// petergoldstein/dalli#776, petergoldstein/dalli#941.
#[test]
fn twenty_thousand_requests_written_before_the_first_read_are_all_answered() {
    let daemon = serve(&[]);
    let len = 64 * KIB as usize;
    let value = Pattern(1).octets(0, len);
    let mut other = daemon.connect();
    other.set("k", Pattern(1), len as u64);
    for verb in ["get", "gat 0"] {
        let mut client = daemon.connect();
        let before = daemon.rss_bytes();
        client.send(format!("{verb} k\r\n").repeat(20_000));
        // The daemon stands still on this connection by now, and works on others.
        for round in 0..50 {
            other.set("other", Pattern(round), 300 * KIB);
            other.get("other", Pattern(round), 300 * KIB);
        }
        // Behind this the value that the other got is not pinned any more: only the one that stands still has pins.
        other.expect_in_step();
        let grown = daemon.rss_bytes().saturating_sub(before);
        assert!(grown < 8 * MIB, "grew by {grown} octets");
        assert!(daemon.metric("bulkhead_store_pins").expect("a gauge of pins") <= 64.0, "pins are not bounded");
        for _ in 0..20_000 {
            client.expect(format!("VALUE k 0 {len}\r\n"));
            assert!(client.read(len) == value, "the value came back changed");
            client.expect("\r\nEND\r\n");
        }
        client.expect_in_step();
    }
}

/// D8. Buffers that grew for big requests stayed with connections that were kept open, so resident memory climbed far
/// above the configured bound. memcached/memcached#1046, memcached/memcached#895.
#[test]
fn idle_connections_give_back_what_big_requests_took() {
    const COUNT: usize = 300;
    let daemon = Daemon::builder().setting("TIMERS__STALL_TIMEOUT", "2s").start();
    let connect_all = || (0..COUNT).map(|_| daemon.connect()).collect::<Vec<_>>();
    let keys: String = (0..5000).map(|index| format!(" key-of-25-octets-{index:08}")).collect();
    let ask = |clients: &mut [Client]| {
        for client in clients.iter_mut() {
            client.ask(format!("get{keys}\r\n"), "END\r\n");
        }
    };
    // Once before, so that what the allocator needs at any rate is there.
    let mut clients = connect_all();
    ask(&mut clients);
    drop(clients);
    eventually("all connections are closed", || daemon.stat("curr_connections") == 1);
    thread::sleep(Duration::from_secs(2));
    let before = daemon.rss_bytes();
    let mut clients = connect_all();
    thread::scope(|scope| clients.chunks_mut(75).for_each(|some| _ = scope.spawn(|| ask(some))));
    let most = before + (before / 10).min(COUNT as u64 * 16 * KIB);
    eventually(&format!("resident memory falls from {} to {most}", daemon.rss_bytes()), || daemon.rss_bytes() < most);
    ask(&mut clients);
}

/// D9. Several clients that upload values of 4 MB while the memory is full were told that there is no memory, though
/// everything in it could have been evicted. memcached/memcached#672, memcached/memcached#1096, memcached/memcached#793.
#[test]
fn uploads_from_many_clients_into_a_full_store_are_all_stored() {
    let daemon = Daemon::builder().memory("32MiB").pool("160MiB").start();
    thread::scope(|scope| {
        for id in 0..16u64 {
            let daemon = &daemon;
            scope.spawn(move || {
                let mut client = daemon.connect();
                for index in 0..5 {
                    client.set(&format!("{id}-{index}"), Pattern(id * 100 + index), 4 * MIB);
                }
            });
        }
    });
    // Whatever is still there is right.
    let mut client = daemon.connect();
    let mut hits = 0;
    for (id, index) in (0..16u64).flat_map(|id| (0..5).map(move |index| (id, index))) {
        client.send(format!("get {id}-{index}\r\n"));
        if client.line() != "END" {
            client.expect_pattern(Pattern(id * 100 + index), 0, 4 * MIB, "after evictions");
            client.expect("\r\nEND\r\n");
            hits += 1;
        }
    }
    assert!(hits >= 30, "{hits} values of 4 MiB are left in 160 MiB");
    assert!(daemon.stat("evictions") > 0, "the store was never full");
    assert_eq!(daemon.stat("store_no_memory"), 0);
}

/// D10. A cache that is full of large values of one size had no room for any other size: memory is cut into classes, and
/// those of the full class were not given up. memcached/memcached#924, memcached/memcached#224, memcached/memcached#467.
#[test]
fn a_store_full_of_one_size_takes_every_other_size() {
    let daemon = Daemon::builder().memory("32MiB").pool("96MiB").start();
    let mut client = daemon.connect();
    for (first, then) in [(1_300_000, [1_000_000, 2_000_000]), (5_000, [100, 200_000]), (200_000, [300_000, 9_000_000])]
    {
        let fill = 128 * MIB / first;
        for index in 0..fill {
            client.set(&format!("first-{index}"), Pattern(index), first);
        }
        let full = daemon.stat("curr_items");
        for index in 0..60 {
            let random = u64::from_le_bytes(Pattern(7).octets(index * 8, 8).try_into().expect("8 octets"));
            let len = then[0] + random % (then[1] - then[0]);
            client.set(&format!("then-{index}"), Pattern(index), len);
            client.get(&format!("then-{index}"), Pattern(index), len);
        }
        let items = daemon.stat("curr_items");
        assert!(items > 5 && items <= full + 60, "{items} items, {full} before");
    }
    assert_eq!(daemon.stat("store_no_memory"), 0);
}

/// D11. With a disk tier behind RAM, writes that came faster than the flush were dropped although the disk had room: most
/// of what had been answered STORED was gone. memcached/memcached#922, memcached/memcached#881, memcached/memcached#794.
#[test]
fn what_outruns_the_flush_waits_and_is_not_dropped() {
    let daemon = Daemon::builder().memory("16MiB").pool("512MiB").start();
    let mut client = daemon.connect();
    let mut writer = client.try_clone();
    let len = |index: u64| MIB + index * 777_777 % (7 * MIB);
    const COUNT: u64 = 48;
    // As fast as the socket takes it: nobody waits for an answer before the next value.
    thread::scope(|scope| {
        scope
            .spawn(|| (0..COUNT).for_each(|index| writer.send_set(&format!("{index}"), 0, Pattern(index), len(index))));
        (0..COUNT).for_each(|_| client.expect("STORED\r\n"));
    });
    for verb in ["get", "gat 0"] {
        for index in 0..COUNT {
            client.send(format!("{verb} {index}\r\n"));
            client.expect_value(&index.to_string(), 0, Pattern(index), len(index));
            client.expect("END\r\n");
        }
    }
    assert_eq!(daemon.stat("evictions"), 0);
}

/// D12. A key that was overwritten while its older value was on the way to disk came back old, and the space of the older
/// value was given away twice, so unrelated keys vanished. memcached/memcached#1047, memcached/memcached#935.
#[test]
fn a_key_that_is_overwritten_while_it_goes_to_disk_never_comes_back_old() {
    let daemon = Daemon::builder().memory("16MiB").pool("256MiB").start();
    let mut client = daemon.connect();
    for index in 0..80 {
        client.set(&format!("fixed-{index}"), Pattern(index), MIB);
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (daemon, done) = (&daemon, &done);
        // One that reads the hot key all the time, so that old values live on while they are replaced.
        let reader = scope.spawn(move || {
            let mut client = daemon.connect();
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                client.send("get hot\r\n");
                let line = client.line();
                if line == "END" {
                    continue;
                }
                let number = line.split(' ').nth(2).expect("flags").parse::<u64>().expect("a number");
                assert!(number >= last, "{number} came after {last}");
                last = number;
                client.expect_pattern(Pattern(10_000 + number), 0, MIB, "hot");
                client.expect("\r\nEND\r\n");
            }
            last
        });
        for number in 0..500 {
            client.send_set("hot", number as u32, Pattern(10_000 + number), MIB);
            client.expect("STORED\r\n");
            if number % 7 == 0 {
                client.send("get hot\r\n");
                client.expect_value("hot", number as u32, Pattern(10_000 + number), MIB);
                client.expect("END\r\n");
            }
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().expect("the reader saw nothing wrong") > 0, "the reader saw nothing");
    });
    client.send("get hot\r\n");
    client.expect_value("hot", 499, Pattern(10_499), MIB);
    client.expect("END\r\n");
    for index in 0..80 {
        client.get(&format!("fixed-{index}"), Pattern(index), MIB);
    }
}

/// D13. A large value whose last two octets were no CR LF ran into an assertion. memcached/memcached#1306.
#[test]
fn a_value_without_its_closing_crlf_is_an_error_of_every_size_and_command() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    for len in [0, 1, 2, 100, 4096, 8190, 16_384, 65_536, 262_143, 262_144, 262_145, 600_000, 3 * MIB] {
        for verb in STORAGE {
            for ending in ["zz", "z\r", "\rz", "\n\r", "  ", "\r\r"] {
                client.set("k", Pattern(2), 10);
                client.send(storage_line(verb, "k", "0", "0", len, ""));
                client.send_pattern(Pattern(3), 0, len);
                client.send(ending);
                client.send("\r\n");
                // What is left is one line, and no command.
                client.expect("CLIENT_ERROR bad data chunk\r\nERROR\r\n");
                client.get("k", Pattern(2), 10);
                client.send(storage_line(verb, "k", "0", "0", len, " noreply"));
                client.send_pattern(Pattern(3), 0, len);
                client.send(ending);
                client.send("\r\n");
                client.expect("ERROR\r\n");
                client.ask("delete k\r\n", "DELETED\r\n");
                client.get_nothing("k");
            }
        }
    }
    client.send("set k 0 0 600000\r\n");
    client.send("x".repeat(600_000));
    client.ask("zz\r\n", "CLIENT_ERROR bad data chunk\r\nERROR\r\n");
    client.get_nothing("k");
    client.expect_in_step();
}

/// D15. Numbers stored with a sign were taken for others: minus nine quintillion counted up as a positive number.
/// memcached/memcached#1105.
#[test]
fn what_is_no_unsigned_number_cannot_be_counted() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let refused = "CLIENT_ERROR cannot increment or decrement non-numeric value\r\n";
    let long = "1".repeat(300);
    for value in [
        "-9223372036854775809",
        "-18446744073709551615",
        "-1",
        "-0",
        "",
        " ",
        "x",
        "1x",
        "x1",
        "1.5",
        "0x10",
        "1 2",
        "1e3",
        "18446744073709551616",
        "99999999999999999999",
        "100000000000000000000000000",
        "\0",
        "1\0",
        &long,
    ] {
        for verb in ["incr", "decr"] {
            client.ask(format!("set a 0 0 {}\r\n{value}\r\n", value.len()), "STORED\r\n");
            client.send(format!("{verb} a 1\r\n"));
            let line = client.line() + "\r\n";
            assert_eq!(line, refused, "{verb} on {value:?}");
            client.send(format!("{verb} a 1 noreply\r\n"));
            client.ask("get a\r\n", format!("VALUE a 0 {}\r\n{value}\r\nEND\r\n", value.len()));
        }
    }
    // Long values are no numbers either, wherever they are.
    client.set("a", Pattern(1), 2 * MIB);
    client.ask("incr a 1\r\ndecr a 1\r\n", format!("{refused}{refused}"));
}

/// D16. The length of a number that changed its digits was not what was sent with it.
/// php-memcached-dev/php-memcached#62, alibaba/ApsaraCache#19.
#[test]
fn a_number_that_gains_or_loses_digits_has_the_right_length() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    client.ask(
        "set a 0 0 3\r\n100\r\ndecr a 1\r\nget a\r\nset a 0 0 2\r\n99\r\nincr a 1\r\nget a\r\n",
        "STORED\r\n99\r\nVALUE a 0 3\r\n99 \r\nEND\r\nSTORED\r\n100\r\nVALUE a 0 3\r\n100\r\nEND\r\n",
    );
    for digits in 1..=19u32 {
        let above = 10u64.pow(digits);
        let below = above - 1;
        let (wide, narrow) = (above.to_string(), below.to_string());
        client.ask(format!("set a 9 0 {}\r\n{wide}\r\ndecr a 1\r\n", wide.len()), format!("STORED\r\n{narrow}\r\n"));
        client.ask("get a\r\n", format!("VALUE a 9 {}\r\n{narrow} \r\nEND\r\n", wide.len()));
        client.ask("incr a 1\r\nget a\r\n", format!("{wide}\r\nVALUE a 9 {}\r\n{wide}\r\nEND\r\n", wide.len()));
        client.ask(format!("decr a {above}\r\n"), "0\r\n");
        let padded = format!("{:<width$}", 0, width = wide.len());
        client.ask("get a\r\n", format!("VALUE a 9 {}\r\n{padded}\r\nEND\r\n", wide.len()));
        client.ask(format!("set a 9 0 {}\r\n{narrow}\r\nincr a 1\r\n", narrow.len()), format!("STORED\r\n{wide}\r\n"));
        client.ask("get a\r\n", format!("VALUE a 9 {}\r\n{wide}\r\nEND\r\n", wide.len()));
    }
}

/// D17. Flags with the top bit set came back negative, and longer ones were cut to 32 bits without a word.
/// memcached/memcached#84, memcached/memcached#1079.
#[test]
fn flags_are_kept_whole_or_refused() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let refused = "CLIENT_ERROR bad command line format\r\n";
    for verb in ["set", "add", "replace", "cas"] {
        for flags in ["0", "1", "65535", "65536", "2147483647", "2147483648", "4294967294", "4294967295"] {
            client.ask("set a 0 0 0\r\n\r\n", "STORED\r\n");
            if verb == "add" {
                client.ask("delete a\r\n", "DELETED\r\n");
            }
            let cas = if verb == "cas" { format!(" {}", client.cas_of("a")) } else { String::new() };
            client.ask(format!("{verb} a {flags} 0 1{cas}\r\nx\r\n"), "STORED\r\n");
            client.ask("append a 1 0 1\r\ny\r\nget a\r\n", format!("STORED\r\nVALUE a {flags} 2\r\nxy\r\nEND\r\n"));
        }
    }
    for verb in STORAGE {
        for flags in
            ["-1", "-0", "4294967296", "18446744073709551615", "18446744073709551616", "x", "1x", "+1", "0x1", "1.0"]
        {
            client.ask("set a 5 0 1\r\nx\r\n", "STORED\r\n");
            // The body looks like a command and is none.
            client.ask(storage_line(verb, "a", flags, "0", 9, "") + "flush_all\r\n", refused);
            client.ask(
                storage_line(verb, "a", flags, "0", 9, " noreply") + "flush_all\r\nget a\r\n",
                "VALUE a 5 1\r\nx\r\nEND\r\n",
            );
        }
    }
}

/// D18. A lifetime above 30 days is a date: clients that did not know lost such items at once, and a server must not keep
/// them. 3rd-Eden/memcached#345, playframework/play2-memcached#36.
#[test]
fn lifetimes_above_thirty_days_are_dates() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let gone = ["2592001", "2592002", "100000000", "-1", "-2592001", "1"];
    let there = [0, 100, 2_592_000, now() + 100, now() + 31_536_000, 99_999_999_999];
    for verb in ["get", "gat"] {
        for exptime in gone {
            client.ask(format!("set a 0 {exptime} 1\r\nx\r\n"), "STORED\r\n");
            if exptime == "1" {
                eventually("a second has passed", || {
                    client.send("get a\r\n");
                    let found = client.line() != "END";
                    if found {
                        client.expect("x\r\nEND\r\n");
                    }
                    !found
                });
            }
            client.ask(if verb == "get" { "get a\r\n" } else { "gat 0 a\r\n" }, "END\r\n");
            client.ask("set b 0 0 1\r\nx\r\n", "STORED\r\n");
            if exptime != "1" {
                match verb {
                    "get" => client.ask(format!("touch b {exptime}\r\n"), "TOUCHED\r\n"),
                    _ => client.ask(format!("gat {exptime} b\r\n"), "VALUE b 0 1\r\nx\r\nEND\r\n"),
                }
                client.get_nothing("b");
                client.ask("touch b 0\r\ngat 0 b\r\n", "NOT_FOUND\r\nEND\r\n");
            }
        }
        for exptime in there {
            client.ask(format!("set a 0 {exptime} 1\r\nx\r\n{verb}"), "STORED\r\n");
            client.ask(if verb == "get" { " a\r\n" } else { " 0 a\r\n" }, "VALUE a 0 1\r\nx\r\nEND\r\n");
            client.ask(format!("gat {exptime} a\r\n"), "VALUE a 0 1\r\nx\r\nEND\r\n");
            client.ask("get a\r\n", "VALUE a 0 1\r\nx\r\nEND\r\n");
        }
    }
}

/// D19. Keys with octets above 0x7f crashed a proxy; nothing says that a key is ASCII. facebook/mcrouter#161.
#[test]
fn keys_are_octets_and_come_back_as_they_were() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let mut keys: Vec<Vec<u8>> =
        (1..=255u8).filter(|octet| !b" \r\n".contains(octet)).map(|octet| vec![b'k', octet]).collect();
    keys.push(b"\xa0\xa1\xc3\xa9".to_vec());
    keys.push("ключ".into());
    keys.push(vec![0xff; 250]);
    for key in &keys {
        let line = |front: &str, back: &str| [front.as_bytes(), key, back.as_bytes()].concat();
        let value =
            |flags: u32, octets: &str| line("VALUE ", &format!(" {flags} {}\r\n{octets}\r\nEND\r\n", octets.len()));
        client.ask(line("set ", " 1 0 2\r\n10\r\n"), "STORED\r\n");
        client.ask(line("get ", "\r\n"), value(1, "10"));
        client.ask(line("add ", " 2 0 1\r\nx\r\n"), "NOT_STORED\r\n");
        client.ask(line("replace ", " 2 0 1\r\n7\r\n"), "STORED\r\n");
        client.ask(line("append ", " 0 0 1\r\n0\r\n"), "STORED\r\n");
        client.ask(line("prepend ", " 0 0 1\r\n1\r\n"), "STORED\r\n");
        client.ask(line("incr ", " 1\r\n"), "171\r\n");
        client.ask(line("decr ", " 2\r\n"), "169\r\n");
        client.ask(line("touch ", " 100\r\n"), "TOUCHED\r\n");
        client.ask(line("gat 0 ", "\r\n"), value(2, "169"));
        client.ask(line("delete ", "\r\n"), "DELETED\r\n");
        client.ask(line("get ", "\r\n"), "END\r\n");
    }
    // No two of them are one.
    for (index, key) in keys.iter().enumerate() {
        client.ask([b"set ", &key[..], format!(" {index} 0 0\r\n\r\n").as_bytes()].concat(), "STORED\r\n");
    }
    for (index, key) in keys.iter().enumerate() {
        let expected = [b"VALUE ", &key[..], format!(" {index} 0\r\n\r\nEND\r\n").as_bytes()].concat();
        client.ask([b"get ", &key[..], b"\r\n"].concat(), expected);
    }
}

/// D20. A key of 251 octets was refused and the value behind it read as commands: replies out of order, and whoever
/// chooses the value chooses commands. 3rd-Eden/memcached#31, Shopify/async-memcached#60.
#[test]
fn the_value_behind_a_key_that_is_too_long_is_never_run() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let refused = "CLIENT_ERROR bad command line format\r\n";
    for len in [251, 252, 300, 1000, 1900] {
        let key = "k".repeat(len);
        for verb in STORAGE {
            client.ask("set a 0 0 1\r\nx\r\n", "STORED\r\n");
            for body in ["flush_all", "delete a\r", "quit\r\nget", "set a 0 0 1\r\ny", ""] {
                let length = body.len() as u64;
                client.ask(storage_line(verb, &key, "0", "0", length, "") + body + "\r\n", refused);
                client.send(storage_line(verb, &key, "0", "0", length, " noreply") + body + "\r\n");
                client.ask("get a\r\n", "VALUE a 0 1\r\nx\r\nEND\r\n");
            }
            // A body of many reads.
            client.send(storage_line(verb, &key, "0", "0", 9 * 50_000, ""));
            client.ask("flush_all".repeat(50_000) + "\r\n", refused);
            client.ask("get a\r\n", "VALUE a 0 1\r\nx\r\nEND\r\n");
        }
        for request in [
            "get K",
            "gets K",
            "gat 0 K",
            "gats 0 K",
            "get a K",
            "get K a",
            "incr K 1",
            "decr K 1",
            "touch K 0",
            "delete K",
        ] {
            client.ask(request.replace('K', &key) + "\r\n", refused);
            client.expect_in_step();
        }
    }
    let key = "k".repeat(250);
    client.ask(
        format!("set {key} 0 0 9\r\nflush_all\r\nget {key}\r\n"),
        format!("STORED\r\nVALUE {key} 0 9\r\nflush_all\r\nEND\r\n"),
    );
}

/// D21. Values with a blank in statistics broke monitoring that splits lines at blanks.
/// influxdata/telegraf#137, pinterest/pymemcache#92, prometheus/memcached_exporter#71.
#[test]
fn every_statistic_is_one_name_and_one_value() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    for argument in ["", "settings", "items", "slabs", "sizes", "conns"] {
        // The reader of the harness refuses whatever is not `STAT name value`.
        assert!(!client.stats(argument).is_empty(), "stats {argument} is empty");
    }
    client.send("version\r\n");
    let line = client.line();
    assert!(
        line.strip_prefix("VERSION ").is_some_and(|version| !version.is_empty() && !version.contains(' ')),
        "{line}"
    );
}

/// D22. Exporters fail where a statistic they know is missing, or where `stats settings`, `items` or `slabs` is an error.
/// prometheus/memcached_exporter#42, prometheus/memcached_exporter#17, prometheus/memcached_exporter#103.
#[test]
fn the_statistics_that_exporters_read_are_there_and_count() {
    let daemon = serve(&["--value-max", "1MiB"]);
    let mut client = daemon.connect();
    const NAMES: &str = "pid uptime time pointer_size rusage_user rusage_system curr_connections total_connections \
        rejected_connections max_connections threads cmd_get cmd_set cmd_flush cmd_touch cmd_meta get_hits get_misses \
        get_expired get_flushed delete_hits delete_misses incr_hits incr_misses decr_hits decr_misses cas_hits cas_misses \
        cas_badval touch_hits touch_misses store_too_large store_no_memory auth_cmds auth_errors idle_kicks bytes_read \
        bytes_written limit_maxbytes accepting_conns listen_disabled_num conn_yields hash_power_level hash_bytes \
        hash_is_expanding bytes curr_items total_items evictions reclaimed expired_unfetched evicted_unfetched \
        evicted_active crawler_reclaimed lrutail_reflocked direct_reclaims";
    let stats = client.stats("");
    for name in NAMES.split_whitespace() {
        let value = stats.get(name).unwrap_or_else(|| panic!("no STAT {name}"));
        assert!(value.parse::<f64>().is_ok(), "{name} is {value}");
    }
    assert!(stats["version"].chars().next().is_some_and(|first| first.is_ascii_digit()), "{}", stats["version"]);
    assert_eq!(stats["pid"], daemon.pid().to_string());
    let settings = client.stats("settings");
    for name in ["maxbytes", "maxconns", "item_size_max"] {
        assert!(settings[name].parse::<u64>().is_ok(), "{name} is {}", settings[name]);
    }
    assert_eq!(settings["item_size_max"], MIB.to_string());
    assert!(settings.contains_key("evictions") && settings.contains_key("cas_enabled"));
    for argument in ["items", "slabs"] {
        assert!(client.stats(argument).values().all(|value| value.parse::<u64>().is_ok()), "stats {argument}");
    }

    // And they count what happens.
    client.ask("stats reset\r\n", "RESET\r\n");
    client.send("set a 0 0 1\r\n1\r\nget a b\r\nget a\r\nincr a 1\r\nincr b 1\r\ndecr a 1\r\ndecr b 1\r\n");
    client
        .send("touch a 0\r\ntouch b 0\r\ncas a 0 0 1 99999999\r\nx\r\ncas b 0 0 1 1\r\nx\r\ndelete a\r\ndelete b\r\n");
    client.send(format!("set big 0 0 {}\r\n", MIB + 1));
    client.send_pattern(Pattern(1), 0, MIB + 1);
    client.send("\r\nflush_all\r\nset e 0 -1 1\r\nx\r\nget e\r\n");
    client.read_until(b"SERVER_ERROR object too large for cache\r\nOK\r\nSTORED\r\nEND\r\n");
    let stats = client.stats("");
    let expected = BTreeMap::from([
        ("cmd_get", 4),
        ("get_hits", 2),
        ("get_misses", 2),
        ("get_expired", 1),
        ("cmd_set", 5),
        ("cmd_flush", 1),
        ("cmd_touch", 2),
        ("touch_hits", 1),
        ("touch_misses", 1),
        ("incr_hits", 1),
        ("incr_misses", 1),
        ("decr_hits", 1),
        ("decr_misses", 1),
        ("cas_badval", 1),
        ("cas_misses", 1),
        ("cas_hits", 0),
        ("delete_hits", 1),
        ("delete_misses", 1),
        ("store_too_large", 1),
    ]);
    for (name, value) in expected {
        assert_eq!(stats[name], value.to_string(), "{name}");
    }
}

/// D23. A retrieval of some 500 keys was answered ERROR now and then: its line spans packets, and was judged before it was
/// whole. memcached/memcached#849.
#[test]
fn a_retrieval_of_a_thousand_keys_is_whole_wherever_its_line_is_cut() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let keys: Vec<String> = (0..1000).map(|index| format!("key-of-25-octets-{index:08}")).collect();
    for key in &keys {
        client.ask(format!("set {key} 0 0 8\r\n{}\r\n", &key[17..]), "STORED\r\n");
    }
    let values: String = keys.iter().map(|key| format!("VALUE {key} 0 8\r\n{}\r\n", &key[17..])).collect();
    let expected = values + "END\r\n";
    for verb in ["get", "gat 0"] {
        let line = format!("{verb} {}\r\n", keys.join(" "));
        let near_the_end = line.len() - 3..line.len();
        for cut in (1021..line.len()).step_by(1021).chain(near_the_end).chain([1, 2, 3, 4, 5, 2047, 2048, 2049]) {
            client.send(&line[..cut]);
            thread::sleep(Duration::from_millis(1));
            client.ask(&line[cut..], &expected);
        }
        // And in many packets.
        for size in [1021, 1460] {
            for part in line.as_bytes().chunks(size) {
                client.send(part);
            }
            client.expect(&expected);
        }
    }
}

/// D26. After a short write the reply started again from its head, so values above what the socket took at once came back
/// corrupt. tarantool/memcached#71, comandeo/crystal-memcached#17.
#[test]
fn a_reader_that_takes_a_little_at_a_time_gets_the_value_once_and_whole() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    thread::scope(|scope| {
        for (seed, len) in [79_000, 81_920, 120_021, 262_145, 700_001, 3_000_003].into_iter().enumerate() {
            let pattern = Pattern(seed as u64);
            client.send(format!("set t{seed} 0 300 {len}\r\n"));
            client.send_pattern(pattern, 0, len);
            client.ask("\r\n", "STORED\r\n");
            let daemon = &daemon;
            scope.spawn(move || {
                let mut reader = Client::tcp_with_buffers(daemon.address(), Some(4096), None);
                reader.send(format!("get t{seed}\r\nget t{seed}\r\n"));
                for _ in 0..2 {
                    reader.expect(format!("VALUE t{seed} 0 {len}\r\n"));
                    let mut at = 0;
                    while at < len {
                        let count = 1000.min(len - at);
                        reader.expect_pattern(pattern, at, count, "read slowly");
                        at += count;
                        if at < 400_000 {
                            thread::sleep(Duration::from_millis(2));
                        }
                    }
                    reader.expect("\r\nEND\r\n");
                }
                reader.expect_in_step();
            });
        }
    });
}

/// D27. A peer that shuts its sending side after its last request is still there to read, but its answer was dropped.
/// memcached/memcached#661.
#[test]
fn a_peer_that_sends_no_more_still_gets_every_answer() {
    let daemon = Daemon::builder().unix().start();
    let mut client = daemon.connect();
    client.set("old", Pattern(1), 2 * MIB);
    for mut half in [daemon.connect(), daemon.connect_unix()] {
        half.send("set hc 0 0 3\r\nabc\r\nget hc\r\n");
        half.finish();
        half.expect("STORED\r\nVALUE hc 0 3\r\nabc\r\nEND\r\n");
        half.expect_end();
    }
    for (request, reply) in [
        ("", ""),
        ("get nothing\r\n", "END\r\n"),
        ("bogus\r\n", "ERROR\r\n"),
        ("set hc 0 0 1\r\n1\r\n", "STORED\r\n"),
        ("set hc 0 0 1 noreply\r\n1\r\n", ""),
        ("incr hc 1\r\n", "2\r\n"),
        ("decr hc 1\r\n", "1\r\n"),
        ("append hc 0 0 1\r\n1\r\n", "STORED\r\n"),
        ("prepend hc 0 0 1\r\n1\r\n", "STORED\r\n"),
        ("add hc 0 0 1\r\n1\r\n", "NOT_STORED\r\n"),
        ("cas hc 0 0 1 18446744073709551615\r\n1\r\n", "EXISTS\r\n"),
        ("touch hc 0\r\n", "TOUCHED\r\n"),
        ("gat 0 hc\r\n", "VALUE hc 0 3\r\n111\r\nEND\r\n"),
        ("delete hc\r\n", "DELETED\r\n"),
        ("verbosity 0\r\n", "OK\r\n"),
        ("get old\r\nquit\r\nget old\r\n", "*"),
        // What is not whole is not answered.
        ("get nothing\r\nget noth", "END\r\n"),
        ("get nothing\r\nset hc 0 0 10\r\nabc", "END\r\n"),
        ("get nothing\r\nset hc 0 0 3\r\nabc\r", "END\r\n"),
        ("flush_all\r\n", "OK\r\n"),
    ] {
        let mut half = daemon.connect();
        half.send(request);
        half.finish();
        if reply == "*" {
            half.expect_value("old", 0, Pattern(1), 2 * MIB);
            half.expect("END\r\n");
        } else {
            half.expect(reply);
        }
        half.expect_end();
    }
}

/// D28. Values were wrong where key and value together came near a multiple of the buffer. twitter/twemproxy#19.
#[test]
fn no_length_of_key_and_value_near_a_multiple_of_a_buffer_matters() {
    let daemon = serve(&[]);
    let mut reader = daemon.connect();
    let mut writer = reader.try_clone();
    let octets = Pattern(1).octets(0, 600_000);
    let mut sizes = vec![(10, 16306), (10, 16307), (10, 32642), (10, 32643), (10, 48978), (10, 65314)];
    for key in [1, 10, 101, 250] {
        let step = if key == 10 { 1 } else { 7 };
        for n in 1..=8usize {
            for buffer in [4096, 16_384, 65_536] {
                sizes.extend((n * buffer - 96..=n * buffer + 96).step_by(step).map(|len| (key, len)));
            }
        }
    }
    let octets = &octets;
    let sizes = &sizes;
    thread::scope(|scope| {
        scope.spawn(move || {
            for (index, &(key, len)) in sizes.iter().enumerate() {
                let key = "k".repeat(key);
                writer.send(format!("set {key} 0 0 {len}\r\n"));
                writer.send(&octets[index..index + len]);
                writer.send(format!("\r\nget {key}\r\n"));
            }
        });
        for (index, &(key, len)) in sizes.iter().enumerate() {
            reader.expect(format!("STORED\r\nVALUE {} 0 {len}\r\n", "k".repeat(key)));
            let same = reader.read(len) == octets[index..index + len];
            assert!(same, "a key of {key} and a value of {len} octets");
            reader.expect("\r\nEND\r\n");
        }
    });
}

/// D29. Negative steps became huge numbers, and counting below zero went wrong in clients and servers alike.
/// bradfitz/gomemcache#61, lericson/pylibmc#73.
#[test]
fn counting_stops_at_zero_wraps_at_the_top_and_takes_no_negative_step() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    client.ask(
        "set a 0 0 2\r\n10\r\ndecr a 11\r\nincr a -1\r\n",
        "STORED\r\n0\r\nCLIENT_ERROR invalid numeric delta argument\r\n",
    );
    client.ask("set a 0 0 20\r\n18446744073709551615\r\nincr a 1\r\n", "STORED\r\n0\r\n");
    for delta in ["-1", "-0", "+1", "x", "1x", "", "1.5", "0x1", "18446744073709551616", "-18446744073709551615"] {
        for verb in ["incr", "decr"] {
            client.ask("set a 0 0 2\r\n10\r\n", "STORED\r\n");
            let reply = if delta.is_empty() { "bad command line format" } else { "invalid numeric delta argument" };
            client.ask(format!("{verb} a {delta}\r\n"), format!("CLIENT_ERROR {reply}\r\n"));
            client.ask("get a\r\n", "VALUE a 0 2\r\n10\r\nEND\r\n");
        }
    }
    let max = u64::MAX;
    for value in [0, 1, 9, 10, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, max - 1, max] {
        for delta in [0, 1, 2, 10, 1 << 32, 1 << 63, max - 1, max] {
            let text = value.to_string();
            client.ask(format!("set a 0 0 {}\r\n{text}\r\n", text.len()), "STORED\r\n");
            client.ask(format!("incr a {delta}\r\n"), format!("{}\r\n", value.wrapping_add(delta)));
            client.ask(format!("set a 0 0 {}\r\n{text}\r\n", text.len()), "STORED\r\n");
            client.ask(format!("decr a {delta}\r\n"), format!("{}\r\n", value.saturating_sub(delta)));
        }
    }
}
