//! Values go in and come out octet by octet: every size, command, door, and place where a value may lie.
//!
//! What takes gigabytes is ignored by default and run by `cargo test --release --test e2e_roundtrip -- --ignored`.

mod common;

use common::place::{Location, push_bodies, push_heads, reads};
use common::{Client, Daemon, GIB, KIB, MIB, Pattern, serve};
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// A stretch of a pattern: its seed, where it starts, how long it is. Values that were joined have several.
type Part = (u64, u64, u64);

fn len_of(parts: &[Part]) -> u64 {
    parts.iter().map(|(_, _, len)| len).sum()
}

fn send_storage(client: &mut Client, line: &str, part: Part) {
    let (seed, offset, len) = part;
    client.send(format!("{line}\r\n"));
    client.send_pattern(Pattern(seed), offset, len);
    client.send("\r\n");
}

fn expect_parts(client: &mut Client, key: &str, flags: u32, parts: &[Part]) {
    client.expect(format!("VALUE {key} {flags} {}\r\n", len_of(parts)));
    for &(seed, offset, len) in parts {
        client.expect_pattern(Pattern(seed), offset, len, key);
    }
    client.expect("\r\n");
}

fn get_parts(client: &mut Client, key: &str, flags: u32, parts: &[Part]) {
    client.send(format!("get {key}\r\n"));
    expect_parts(client, key, flags, parts);
    client.expect("END\r\n");
}

/// `get key` finds `parts`, and the counters tell where they were.
fn get_from(daemon: &Daemon, client: &mut Client, location: Location, key: &str, parts: &[Part]) {
    let before = reads(daemon);
    get_parts(client, key, 7, parts);
    let found = Location::between(before, reads(daemon));
    assert_eq!(found, location, "{key} lies elsewhere");
}

#[test]
fn one_value_of_each_interesting_size_comes_back_over_tcp_and_unix_sockets() {
    let daemon = Daemon::builder().unix().start();
    let sizes = [0, 1, 4095, 4096, 4097, 65_535, 65_536, 65_537, 262_143, 262_144, 262_145, MIB, 8 * MIB, 100 * MIB];
    for (door, mut client) in [daemon.connect(), daemon.connect_unix()].into_iter().enumerate() {
        for (index, size) in sizes.into_iter().enumerate() {
            let pattern = Pattern((100 * door + index) as u64);
            client.set("key", pattern, size);
            client.get("key", pattern, size);
        }
    }
    daemon.assert_nothing_leaks();
}

#[test]
#[ignore = "writes 4 GiB to disk, more than every run should: cargo test --release --test e2e_roundtrip -- --ignored"]
fn a_value_of_four_gibibytes_comes_back_within_the_memory_bound() {
    stream_through(4 * GIB, "6GiB");
}

#[test]
fn a_value_of_sixteen_times_the_memory_streams_in_and_out_within_the_memory_bound() {
    stream_through(GIB, "2GiB");
}

fn stream_through(size: u64, pool: &str) {
    let daemon = Daemon::builder().memory("64MiB").pool(pool).flags(&["--head", "256KiB"]).start();
    let mut client = daemon.connect();
    client.set("big", Pattern(1), size);
    client.get("big", Pattern(1), size);
    let most = daemon.rss_max_bytes();
    assert!(most < 200 * MIB, "{} MiB were resident", most / MIB);
    assert!(most < daemon.memory_sum_bytes(), "{} MiB were resident, more than the sum printed", most / MIB);
    daemon.assert_nothing_leaks();
}

#[test]
fn sixteen_clients_at_once_read_what_they_wrote_and_never_a_mixture() {
    let daemon = serve(&[]);
    thread::scope(|scope| {
        for id in 0..16 {
            let daemon = &daemon;
            scope.spawn(move || {
                let mut client = daemon.connect();
                for round in 0..8 {
                    let own = Pattern(u64::from(id * 100 + round));
                    client.set(&format!("own-{id}"), own, MIB);
                    client.get(&format!("own-{id}"), own, MIB);
                    // One key that all write: what is read is one writer's value, whole. The flags say whose.
                    client.send_set("shared", id, Pattern(u64::from(id)), MIB);
                    client.expect("STORED\r\n");
                    client.send("get shared\r\n");
                    let line = client.line();
                    let writer = line.split(' ').nth(2).expect("flags").parse::<u64>().expect("a number");
                    assert!(writer < 16 && line.ends_with(&format!(" {MIB}")), "{line:?}");
                    client.expect_pattern(Pattern(writer), 0, MIB, "shared");
                    client.expect("\r\nEND\r\n");
                }
            });
        }
    });
    daemon.assert_nothing_leaks();
}

#[test]
fn sizes_around_every_multiple_of_16_and_64_kib_come_back_pipelined() {
    let daemon = serve(&[]);
    let sizes: Vec<usize> = (1..=32).flat_map(|n: usize| n * 16384 - 96..=n * 16384 + 96).collect();
    let octets = Pattern(5).octets(0, 512 * 1024 + 96 + sizes.len());
    let mut reader = daemon.connect();
    let mut writer = reader.try_clone();
    thread::scope(|scope| {
        scope.spawn(|| {
            for (index, &size) in sizes.iter().enumerate() {
                // A new start for each, so that what is left over from another does not look right.
                writer.send(format!("set key {index} 0 {size}\r\n"));
                writer.send(&octets[index..index + size]);
                writer.send("\r\nget key\r\n");
            }
        });
        for (index, &size) in sizes.iter().enumerate() {
            reader.expect(format!("STORED\r\nVALUE key {index} {size}\r\n"));
            let found = reader.read(size);
            assert!(found == octets[index..index + size], "{size} octets came back changed");
            reader.expect("\r\nEND\r\n");
        }
    });
    daemon.assert_nothing_leaks();
}

#[test]
fn every_command_is_right_wherever_the_value_lies() {
    for location in [Location::Ram, Location::HalfOut, Location::Disk] {
        every_command_on_values(location);
    }
}

fn every_command_on_values(location: Location) {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    // Longer than a head, and no multiple of anything.
    const LEN: u64 = 3 * MIB / 2 + 12_345;
    let keys: Vec<String> = (0..26).map(|index| format!("{location:?}-{index}")).collect();
    let whole = |seed: usize| (seed as u64, 0, LEN);
    for (seed, key) in keys.iter().enumerate() {
        send_storage(&mut client, &format!("set {key} 7 0 {LEN}"), whole(seed));
        client.expect("STORED\r\n");
    }
    match location {
        Location::Ram => {}
        Location::HalfOut => push_bodies(&mut client, 96 * MIB),
        Location::Disk => push_heads(&mut client, 112 * MIB),
    }
    for (seed, key) in keys.iter().enumerate() {
        get_from(&daemon, &mut client, location, key, &[whole(seed)]);
    }
    let client = &mut client;
    let mut next = 0;
    let mut take = || {
        next += 1;
        (keys[next - 1].as_str(), whole(next - 1))
    };
    let fresh = |seed: u64, len: u64| (1000 + seed, 77, len);

    let (key, value) = take();
    get_parts(client, key, 7, &[value]);

    let (key, value) = take();
    let cas = client.cas_of(key);
    client.send(format!("gets {key}\r\n"));
    client.expect(format!("VALUE {key} 7 {LEN} {cas}\r\n"));
    client.expect_pattern(Pattern(value.0), 0, LEN, key);
    client.expect("\r\nEND\r\n");

    let (key, value) = take();
    client.send(format!("gat 1000 {key}\r\n"));
    expect_parts(client, key, 7, &[value]);
    client.expect("END\r\n");

    let (key, value) = take();
    let cas = client.cas_of(key);
    client.send(format!("gats -1 {key}\r\nget {key}\r\n"));
    client.expect(format!("VALUE {key} 7 {LEN} {cas}\r\n"));
    client.expect_pattern(Pattern(value.0), 0, LEN, key);
    client.expect("\r\nEND\r\nEND\r\n");

    let (first, one) = take();
    let (second, two) = take();
    client.send(format!("get {first} nothing {second} {first}\r\n"));
    expect_parts(client, first, 7, &[one]);
    expect_parts(client, second, 7, &[two]);
    expect_parts(client, first, 7, &[one]);
    client.expect("END\r\n");

    for verb in ["set", "replace"] {
        for quiet in ["", " noreply"] {
            let (key, _) = take();
            for new in [fresh(1, MIB), fresh(2, 10), fresh(3, 0), fresh(4, 2 * MIB)] {
                send_storage(client, &format!("{verb} {key} 3 0 {}{quiet}", new.2), new);
                if quiet.is_empty() {
                    client.expect("STORED\r\n");
                }
                get_parts(client, key, 3, &[new]);
            }
        }
    }

    let (key, value) = take();
    send_storage(client, &format!("add {key} 3 0 {MIB}"), fresh(1, MIB));
    client.expect("NOT_STORED\r\n");
    send_storage(client, &format!("add {key} 3 0 {MIB} noreply"), fresh(1, MIB));
    get_parts(client, key, 7, &[value]);

    for quiet in ["", " noreply"] {
        let (key, value) = take();
        let mut parts = vec![value];
        let growth = [1, 100, 5000, 70_000, 300 * KIB, 100, 1, 0, MIB + 1];
        for (index, len) in growth.into_iter().enumerate() {
            let new = fresh(index as u64, len);
            let front = index % 2 == 1;
            let verb = if front { "prepend" } else { "append" };
            // Flags and exptime of the line do not count.
            send_storage(client, &format!("{verb} {key} 99 -1 {len}{quiet}"), new);
            if quiet.is_empty() {
                client.expect("STORED\r\n");
            }
            parts.insert(if front { 0 } else { parts.len() }, new);
            get_parts(client, key, 7, &parts);
        }
    }

    let (key, value) = take();
    let cas = client.cas_of(key);
    send_storage(client, &format!("cas {key} 3 0 {MIB} {}", cas + 1_000_000), fresh(1, MIB));
    client.expect("EXISTS\r\n");
    send_storage(client, &format!("cas {key} 3 0 {MIB} {} noreply", cas + 1_000_000), fresh(1, MIB));
    get_parts(client, key, 7, &[value]);
    send_storage(client, &format!("cas {key} 3 0 {MIB} {cas}"), fresh(2, MIB));
    client.expect("STORED\r\n");
    let cas = client.cas_of(key);
    send_storage(client, &format!("cas {key} 4 0 {} {cas} noreply", 2 * MIB), fresh(3, 2 * MIB));
    get_parts(client, key, 4, &[fresh(3, 2 * MIB)]);
    send_storage(client, &format!("cas nothing 4 0 {MIB} {cas}"), fresh(3, MIB));
    client.expect("NOT_FOUND\r\n");

    let (key, value) = take();
    for verb in ["incr", "decr"] {
        client.ask(format!("{verb} {key} 1\r\n"), "CLIENT_ERROR cannot increment or decrement non-numeric value\r\n");
        client.send(format!("{verb} {key} 1 noreply\r\n"));
    }
    get_parts(client, key, 7, &[value]);

    let (key, value) = take();
    client.ask(format!("touch {key} 1000\r\n"), "TOUCHED\r\n");
    client.send(format!("touch {key} 2000 noreply\r\n"));
    get_parts(client, key, 7, &[value]);
    client.ask(format!("touch {key} -1\r\n"), "TOUCHED\r\n");
    client.get_nothing(key);
    client.ask(format!("touch {key} 0\r\n"), "NOT_FOUND\r\n");

    let (key, _) = take();
    client.send(format!("touch {key} -1 noreply\r\n"));
    client.get_nothing(key);

    let (key, _) = take();
    client.ask(format!("delete {key}\r\n"), "DELETED\r\n");
    client.get_nothing(key);
    client.ask(format!("delete {key}\r\n"), "NOT_FOUND\r\n");
    send_storage(client, &format!("append {key} 0 0 10"), fresh(1, 10));
    client.expect("NOT_STORED\r\n");
    send_storage(client, &format!("replace {key} 0 0 10"), fresh(1, 10));
    client.expect("NOT_STORED\r\n");
    send_storage(client, &format!("add {key} 5 0 {MIB}"), fresh(1, MIB));
    client.expect("STORED\r\n");
    get_parts(client, key, 5, &[fresh(1, MIB)]);

    let (key, _) = take();
    client.send(format!("delete {key} noreply\r\n"));
    client.get_nothing(key);

    client.expect_in_step();
    let last: Vec<_> = std::iter::from_fn(|| {
        (next < keys.len()).then(|| {
            next += 1;
            &keys[next - 1]
        })
    })
    .collect();
    assert!(last.len() >= 4, "{} keys are left for flush_all", last.len());
    client.send("flush_all noreply\r\n");
    for key in last {
        client.get_nothing(key);
    }
    send_storage(client, &format!("set {} 7 0 {LEN}", keys[0]), whole(500));
    client.expect("STORED\r\n");
    get_parts(client, &keys[0], 7, &[whole(500)]);
    client.ask("flush_all\r\n", "OK\r\n");
    client.get_nothing(&keys[0]);
    client.expect_in_step();
    daemon.assert_nothing_leaks();
}

/// A value that is short enough for RAM alone gets room on disk when it grows past a head. Its parts may be blocks of a
/// few octets, which no drive can write as they are: each has to reach the disk and come back right all the same, and
/// must not be taken for a fault of the drive.
#[test]
fn values_that_grow_past_the_head_go_to_disk_and_come_back() {
    let daemon = serve(&["--head", "64KiB"]);
    let mut client = daemon.connect();
    let olds = [0, 1, 63, 64, 100, 1000, 4000, 4096, 5000, 33_000, 65_000, 65_535, 65_536, 65_537, 300_000];
    let news = [1, 64, 100, 700, 4095, 4097, 40_000, 65_536, 70_000, 262_145];
    let mut grown = Vec::new();
    for (verb, front) in [("append", false), ("prepend", true)] {
        for old in olds {
            for new in news {
                let key = format!("{verb}-{old}-{new}");
                let (one, two) = ((old, 3, old), (new, 5, new));
                send_storage(&mut client, &format!("set {key} 7 0 {old}"), one);
                send_storage(&mut client, &format!("{verb} {key} 0 0 {new}"), two);
                client.expect("STORED\r\nSTORED\r\n");
                let parts = if front { [two, one] } else { [one, two] };
                get_parts(&mut client, &key, 7, &parts);
                grown.push((key, parts));
            }
        }
    }
    // Many small steps across the bound.
    let mut steps = vec![(1, 0, 1000)];
    send_storage(&mut client, "set steps 7 0 1000", steps[0]);
    client.expect("STORED\r\n");
    for index in 0..200 {
        let step = (2, steps.len() as u64 * 1000, 700 + index);
        let front = index % 3 == 0;
        let verb = if front { "prepend" } else { "append" };
        send_storage(&mut client, &format!("{verb} steps 0 0 {}", step.2), step);
        client.expect("STORED\r\n");
        steps.insert(if front { 0 } else { steps.len() }, step);
    }
    get_parts(&mut client, "steps", 7, &steps);
    push_bodies(&mut client, 96 * MIB);
    for index in 0..1200 {
        client.set(&format!("filler-{index}"), Pattern(index), 64 * KIB + 1);
    }
    for (key, parts) in &grown {
        get_parts(&mut client, key, 7, parts);
    }
    get_parts(&mut client, "steps", 7, &steps);
    assert!(reads(&daemon)[2] > 0, "nothing was read from disk");
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
    daemon.assert_nothing_leaks();
}

#[test]
fn numbers_and_short_values_are_right_in_every_command() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    client.ask("set n 5 0 2\r\n10\r\n", "STORED\r\n");
    client.ask("incr n 5\r\nincr n 5 noreply\r\ndecr n 1\r\n", "15\r\n19\r\n");
    client.ask("append n 0 0 1\r\n0\r\nincr n 1\r\n", "STORED\r\n191\r\n");
    client.ask("prepend n 0 0 1\r\n1\r\ndecr n 191 noreply\r\nget n\r\n", "STORED\r\nVALUE n 5 4\r\n1000\r\nEND\r\n");
    client.ask("decr n 1 noreply\r\ngat 0 n\r\n", "VALUE n 5 4\r\n999 \r\nEND\r\n");
    client.ask("incr nothing 1\r\ndecr nothing 1\r\nincr nothing 1 noreply\r\n", "NOT_FOUND\r\nNOT_FOUND\r\n");
    client.expect_in_step();
    daemon.assert_nothing_leaks();
}

#[test]
fn sixteen_clients_counting_at_once_lose_no_count() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    client.ask("set count 0 0 1\r\n0\r\nset list 0 0 0\r\n\r\n", "STORED\r\nSTORED\r\n");
    thread::scope(|scope| {
        for id in 0..16u8 {
            let daemon = &daemon;
            scope.spawn(move || {
                let mut client = daemon.connect();
                for _ in 0..100 {
                    client.send("incr count 1\r\n");
                    client.line().trim().parse::<u64>().expect("a number");
                    client.send(format!(
                        "append list 0 0 1000\r\n{}\r\n",
                        char::from(b'a' + id).to_string().repeat(1000)
                    ));
                    client.expect("STORED\r\n");
                }
            });
        }
    });
    client.ask("get count\r\n", "VALUE count 0 4\r\n1600\r\nEND\r\n");
    client.ask("get list\r\n", "VALUE list 0 1600000\r\n");
    let mut counts = [0; 16];
    for _ in 0..1600 {
        let part = client.read(1000);
        assert!(part.iter().all(|octet| *octet == part[0]), "two appends are mixed");
        counts[usize::from(part[0] - b'a')] += 1;
    }
    client.expect("\r\nEND\r\n");
    assert_eq!(counts, [100; 16]);
    daemon.assert_nothing_leaks();
}

#[test]
fn readers_finish_the_value_they_began_whatever_becomes_of_its_key() {
    let daemon = serve(&[]);
    const LEN: u64 = 12 * MIB;
    let new = (777, 0, 3 * MIB);
    let changes = [
        "set",
        "noreply",
        "replace",
        "cas",
        "append",
        "prepend",
        "delete",
        "touch",
        "gat",
        "expiry",
        "bad chunk",
        "flush",
    ];
    let mut client = daemon.connect();
    let mut readers = Vec::new();
    for (seed, change) in changes.into_iter().enumerate() {
        let key = change.replace(' ', "-");
        let value = (seed as u64, 0, LEN);
        send_storage(&mut client, &format!("set {key} 7 {} {LEN}", if change == "expiry" { 2 } else { 0 }), value);
        client.expect("STORED\r\n");
        let mut reader = Client::tcp_with_buffers(daemon.address(), Some(4096), None);
        reader.send(format!("get {key}\r\n"));
        reader.expect(format!("VALUE {key} 7 {LEN}\r\n"));
        reader.expect_pattern(Pattern(value.0), 0, 1000, &key);
        readers.push((reader, key, change, value));
    }
    for (_, key, change, value) in &readers {
        match *change {
            "set" | "replace" => {
                send_storage(&mut client, &format!("{change} {key} 7 0 {}", new.2), new);
                client.expect("STORED\r\n");
            }
            "noreply" => send_storage(&mut client, &format!("set {key} 7 0 {} noreply", new.2), new),
            "cas" => {
                let cas = client.cas_of(key);
                send_storage(&mut client, &format!("cas {key} 7 0 {} {cas}", new.2), new);
                client.expect("STORED\r\n");
            }
            "append" | "prepend" => {
                send_storage(&mut client, &format!("{change} {key} 0 0 {}", new.2), new);
                client.expect("STORED\r\n");
            }
            "delete" => client.ask(format!("delete {key}\r\n"), "DELETED\r\n"),
            "touch" => client.ask(format!("touch {key} -1\r\n"), "TOUCHED\r\n"),
            "gat" => {
                client.send(format!("gat -1 {key}\r\n"));
                expect_parts(&mut client, key, 7, &[*value]);
                client.expect("END\r\n");
            }
            "expiry" => loop {
                client.send(format!("add {key} 7 0 0\r\n\r\n"));
                if client.line() == "STORED" {
                    break;
                }
                thread::sleep(Duration::from_millis(50));
            },
            "bad chunk" => {
                client.ask(format!("set {key} 0 0 3\r\nabcdef\r\n"), "CLIENT_ERROR bad data chunk\r\nERROR\r\n")
            }
            _ => {}
        }
    }
    for (_, key, change, value) in &readers {
        match *change {
            "append" => get_parts(&mut client, key, 7, &[*value, new]),
            "prepend" => get_parts(&mut client, key, 7, &[new, *value]),
            "delete" | "touch" | "gat" => client.get_nothing(key),
            "expiry" => client.ask(format!("get {key}\r\n"), format!("VALUE {key} 7 0\r\n\r\nEND\r\n")),
            "bad chunk" | "flush" => get_parts(&mut client, key, 7, &[*value]),
            _ => get_parts(&mut client, key, 7, &[new]),
        }
    }
    client.ask("flush_all\r\n", "OK\r\n");
    // What the readers still want leaves RAM, and what it had on disk would be written over if it were free.
    push_bodies(&mut client, 160 * MIB);
    for (reader, key, _, value) in &mut readers {
        reader.expect_pattern(Pattern(value.0), 1000, LEN - 1000, key);
        reader.expect("\r\nEND\r\n");
        reader.get_nothing(key);
    }
    daemon.assert_nothing_leaks();
}

/// Values are evicted while others stream: whoever began to read gets the whole value or, had it gone before, a miss.
#[test]
fn eviction_never_takes_a_value_from_its_readers() {
    let daemon = Daemon::builder().memory("32MiB").pool("128MiB").start();
    let writing = AtomicUsize::new(4);
    thread::scope(|scope| {
        for id in 0..4u64 {
            let (daemon, writing) = (&daemon, &writing);
            scope.spawn(move || {
                let mut client = daemon.connect();
                for index in 0..24 {
                    client.set(&format!("{id}-{index}"), Pattern(id * 1000 + index), 4 * MIB + index);
                }
                writing.fetch_sub(1, Ordering::Relaxed);
            });
            scope.spawn(move || {
                let mut client = Client::tcp_with_buffers(daemon.address(), Some(16 << 10), None);
                let mut hits = 0;
                let mut last_round = false;
                while !last_round {
                    last_round = writing.load(Ordering::Relaxed) == 0;
                    for index in 0..24 {
                        let len = 4 * MIB + index;
                        client.send(format!("get {id}-{index}\r\n"));
                        let line = client.line();
                        if line != "END" {
                            assert_eq!(line, format!("VALUE {id}-{index} 0 {len}"));
                            client.expect_pattern(Pattern(id * 1000 + index), 0, len, "evicted while it was read");
                            client.expect("\r\nEND\r\n");
                            hits += 1;
                        }
                    }
                }
                assert!(hits > 0, "no reader found anything");
            });
        }
    });
    assert!(daemon.stat("evictions") > 0, "nothing was evicted");
    daemon.assert_nothing_leaks();
}

/// Pins are bounded so that readers cannot keep the store from its writers. A value longer than the bound is read all the
/// same, neither put off for ever by others that come and go, nor putting them off while its own reader is slow.
#[test]
fn a_value_longer_than_readers_may_pin_is_read_beside_others() {
    // A reader that is cut for being slow would hide that others wait for it.
    let daemon = Daemon::builder().pool("256MiB").setting("TIMERS__STALL_TIMEOUT", "10m").start();
    let mut client = daemon.connect();
    // A quarter of the pool is 64 MiB.
    client.set("long", Pattern(1), 100 * MIB);
    for index in 0..8 {
        client.set(&format!("short-{index}"), Pattern(10 + index), 8 * MIB);
    }
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for index in 0..8 {
            let (daemon, done) = (&daemon, &done);
            scope.spawn(move || {
                let mut client = Client::tcp_with_buffers(daemon.address(), Some(64 << 10), None);
                while done.load(Ordering::Relaxed) == 0 {
                    client.get(&format!("short-{index}"), Pattern(10 + index), 8 * MIB);
                }
            });
        }
        // Several at once would keep each other from it if the place were not given back.
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let daemon = &daemon;
                scope.spawn(move || {
                    let mut client = daemon.connect();
                    (0..2).for_each(|_| client.get("long", Pattern(1), 100 * MIB));
                })
            })
            .collect();
        let failed = readers.into_iter().any(|reader| reader.join().is_err());
        done.store(1, Ordering::Relaxed);
        assert!(!failed, "the long value was not read");
    });
    let mut slow = Client::tcp_with_buffers(daemon.address(), Some(4096), None);
    slow.send("get long\r\n");
    slow.expect(format!("VALUE long 0 {}\r\n", 100 * MIB));
    for index in 0..8 {
        client.get(&format!("short-{index}"), Pattern(10 + index), 8 * MIB);
    }
    drop(slow);
    daemon.assert_nothing_leaks();
}

/// Values are cut into segments of 256 KiB and smaller blocks at their end, and disks take whole pages.
#[test]
fn sizes_around_every_cut_come_back_from_disk() {
    let daemon = serve(&["--head", "64KiB"]);
    let mut client = daemon.connect();
    let mut sizes: Vec<u64> = Vec::new();
    for whole in [64 * KIB, 128 * KIB, 256 * KIB, 320 * KIB, 512 * KIB, 576 * KIB, MIB] {
        for rest in [0, 1, 63, 64, 65, 511, 513, 4095, 4096, 4097, 16_383, 16_385, 40_000, 65_535, 65_537, 130_000] {
            sizes.extend([whole + rest, whole - rest.min(whole - 1)]);
        }
    }
    for (index, &size) in sizes.iter().enumerate() {
        client.set(&format!("{index}"), Pattern(index as u64), size);
    }
    for index in 0..1200 {
        client.set(&format!("filler-{index}"), Pattern(index), 64 * KIB + 1);
    }
    let before = reads(&daemon);
    for round in 0..2 {
        for (index, &size) in sizes.iter().enumerate() {
            client.get(&format!("{index}"), Pattern(index as u64), size);
        }
        let now = reads(&daemon);
        let large = sizes.iter().filter(|&&size| size > 64 * KIB).count() as u64;
        assert!(round > 0 || now[1] - before[1] == large, "some values still had their heads in RAM");
    }
    daemon.assert_nothing_leaks();
}

#[test]
fn one_retrieval_names_hundreds_of_values_wherever_they_lie() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    let sizes = [0, 10, 4096, 4097, 70_000, 262_144, 262_145, 700_000, 2_000_000];
    let values: Vec<(String, u64)> = (0..270).map(|index| (format!("v{index}"), sizes[index % sizes.len()])).collect();
    for (index, (key, len)) in values.iter().enumerate() {
        client.set(key, Pattern(index as u64), *len);
    }
    let keys: String = values.iter().flat_map(|(key, _)| [" ", key, " nothing"]).collect();
    // The short ones among them live in RAM alone, and some of those may be gone.
    let mut is_there = |index: usize| {
        let (key, len) = &values[index];
        client.send(format!("get {key}\r\n"));
        if client.line() == "END" {
            return false;
        }
        client.expect_pattern(Pattern(index as u64), 0, *len, key);
        client.expect("\r\nEND\r\n");
        true
    };
    let present: Vec<usize> = (0..values.len()).filter(|&index| is_there(index)).collect();
    assert!(present.len() > 200, "{} values are left", present.len());
    for (verb, receive) in [("get", None), ("gat 0", Some(4096))] {
        let mut reader = Client::tcp_with_buffers(daemon.address(), receive, None);
        reader.send(format!("{verb}{keys}\r\n{verb}{keys}\r\n"));
        for _ in 0..2 {
            for &index in &present {
                let (key, len) = &values[index];
                reader.expect_value(key, 0, Pattern(index as u64), *len);
            }
            reader.expect("END\r\n");
        }
    }
    daemon.assert_nothing_leaks();
}

/// memcached answers 59,999 of 100,000 and then END, as if the rest were missing.
#[test]
fn a_key_that_is_named_a_hundred_thousand_times_is_answered_as_often() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    for (key, len) in [("a", 1), ("b", 5000)] {
        client.set(key, Pattern(1), len);
        let count = if len == 1 { 100_000 } else { 60_010 };
        client.send(format!("get{}\r\n", format!(" {key}").repeat(count)));
        let value =
            [format!("VALUE {key} 0 {len}\r\n").into_bytes(), Pattern(1).octets(0, len as usize), b"\r\n".to_vec()]
                .concat();
        for _ in 0..count {
            assert!(client.read(value.len()) == value, "one of them is wrong");
        }
        client.expect("END\r\n");
    }
    daemon.assert_nothing_leaks();
}

#[test]
fn a_delayed_flush_takes_what_is_there_when_it_comes_and_nothing_later() {
    let daemon = serve(&[]);
    let mut client = daemon.connect();
    client.set("large", Pattern(1), MIB);
    client.ask("set a 0 0 1\r\nx\r\nflush_all 2\r\nget a\r\n", "STORED\r\nOK\r\nVALUE a 0 1\r\nx\r\nEND\r\n");
    client.ask("set b 0 0 1\r\nx\r\n", "STORED\r\n");
    client.get("large", Pattern(1), MIB);
    loop {
        client.send("get b\r\n");
        if client.line() == "END" {
            break;
        }
        client.expect("x\r\nEND\r\n");
        thread::sleep(Duration::from_millis(50));
    }
    client.get_nothing("large");
    client.get_nothing("a");
    client.ask("add a 0 0 1\r\ny\r\n", "STORED\r\n");
    thread::sleep(Duration::from_millis(300));
    client.ask("get a\r\n", "VALUE a 0 1\r\ny\r\nEND\r\n");
    // A later call takes the place of one that has not come yet.
    client.ask("flush_all 1\r\nflush_all 100\r\n", "OK\r\nOK\r\n");
    thread::sleep(Duration::from_millis(1500));
    client.ask("get a\r\n", "VALUE a 0 1\r\ny\r\nEND\r\n");
    daemon.assert_nothing_leaks();
}

#[test]
fn what_was_answered_stored_at_full_speed_is_there_and_right() {
    load_at_full_speed(512 * MIB, "64MiB", "1GiB");
}

#[test]
#[ignore = "writes 4 GiB to disk, more than every run should: cargo test --release --test e2e_roundtrip -- --ignored"]
fn four_gibibytes_stored_at_full_speed_are_there_and_right() {
    load_at_full_speed(4 * GIB, "256MiB", "8GiB");
}

fn load_at_full_speed(total: u64, memory: &str, pool: &str) {
    const CLIENTS: u64 = 4;
    let daemon = Daemon::builder().memory(memory).pool(pool).start();
    let counts: Vec<u64> = thread::scope(|scope| {
        let writers: Vec<_> = (0..CLIENTS)
            .map(|id| {
                let daemon = &daemon;
                scope.spawn(move || {
                    let mut client = daemon.connect();
                    let (mut index, mut bytes) = (0, 0);
                    while bytes < total / CLIENTS {
                        let len = length(id, index);
                        client.set(&format!("load-{id}-{index}"), Pattern(id << 32 | index), len);
                        bytes += len;
                        index += 1;
                    }
                    index
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().expect("all are STORED")).collect()
    });
    thread::scope(|scope| {
        for (id, count) in (0..CLIENTS).zip(counts) {
            let daemon = &daemon;
            scope.spawn(move || {
                let mut client = daemon.connect();
                for index in 0..count {
                    client.get(&format!("load-{id}-{index}"), Pattern(id << 32 | index), length(id, index));
                }
            });
        }
    });
    assert_eq!(daemon.stat("evictions"), 0);
    assert_eq!(daemon.stat("get_misses"), 0);
    /// From 1 to 8 MiB, rarely a multiple of anything.
    fn length(id: u64, index: u64) -> u64 {
        MIB + u64::from_le_bytes(Pattern(id).octets(index * 8, 8).try_into().expect("8 octets")) % (7 * MIB)
    }
    daemon.assert_nothing_leaks();
}

/// A conversation that uses every command and most answers, the same however it is cut.
fn conversation() -> (Vec<u8>, Vec<u8>) {
    let turns = [
        ("flush_all\r\n", "OK\r\n"),
        ("set a 4294967295 0 3\r\nabc\r\n", "STORED\r\n"),
        ("add a 0 0 1\r\nx\r\n", "NOT_STORED\r\n"),
        ("add b 1 0 2\r\n\r\n\r\n", "STORED\r\n"),
        ("replace b 2 0 5\r\nget a\r\n", "STORED\r\n"),
        ("append a 0 0 3\r\ndef\r\n", "STORED\r\n"),
        ("prepend a 0 0 1\r\n0\r\n", "STORED\r\n"),
        (
            "get a b c a\r\n",
            "VALUE a 4294967295 7\r\n0abcdef\r\nVALUE b 2 5\r\nget a\r\nVALUE a 4294967295 7\r\n0abcdef\r\nEND\r\n",
        ),
        ("gat 0 b\r\n", "VALUE b 2 5\r\nget a\r\nEND\r\n"),
        ("gets c\r\ngats 100 c\r\n", "END\r\nEND\r\n"),
        ("cas a 0 0 1 18446744073709551615\r\nx\r\n", "EXISTS\r\n"),
        ("cas c 0 0 1 1\r\nx\r\n", "NOT_FOUND\r\n"),
        (
            "set n 0 0 2 noreply\r\n10\r\nincr n 90\r\ndecr n 1\r\nget n\r\n",
            "100\r\n99\r\nVALUE n 0 3\r\n99 \r\nEND\r\n",
        ),
        ("incr n x\r\n", "CLIENT_ERROR invalid numeric delta argument\r\n"),
        ("touch a 100\r\ntouch c 100\r\n", "TOUCHED\r\nNOT_FOUND\r\n"),
        ("delete a noreply\r\ndelete a\r\ndelete b\r\n", "NOT_FOUND\r\nDELETED\r\n"),
        ("set a 0 0 3\r\nabcde\r\n", "CLIENT_ERROR bad data chunk\r\nERROR\r\n"),
        ("bogus\r\n\r\nget\r\n", "ERROR\r\nERROR\r\nCLIENT_ERROR bad command line format\r\n"),
        ("set k -1 0 3\r\nget\r\n", "CLIENT_ERROR bad command line format\r\n"),
        ("set z 0 0 0\r\n\r\nget z\r\n", "STORED\r\nVALUE z 0 0\r\n\r\nEND\r\n"),
        ("verbosity 1\nflush_all 0 noreply\r\nget n\r\n", "OK\r\nEND\r\n"),
    ];
    let (mut requests, mut replies) = (Vec::new(), Vec::new());
    for (request, reply) in turns {
        requests.extend_from_slice(request.as_bytes());
        replies.extend_from_slice(reply.as_bytes());
    }
    // A value that does not fit the input buffer, another behind it.
    requests.extend_from_slice(b"set v 0 0 40000\r\n");
    requests.extend_from_slice(&Pattern(3).octets(0, 40_000));
    requests.extend_from_slice(b"\r\nget v\r\n");
    replies.extend_from_slice(b"STORED\r\nVALUE v 0 40000\r\n");
    replies.extend_from_slice(&Pattern(3).octets(0, 40_000));
    replies.extend_from_slice(b"\r\nEND\r\n");
    (requests, replies)
}

#[test]
fn a_conversation_is_the_same_one_octet_at_a_time_and_at_every_cut() {
    let daemon = Daemon::builder().unix().start();
    let (requests, replies) = conversation();
    for mut client in [daemon.connect(), daemon.connect_unix()] {
        for octet in &requests {
            client.send([*octet]);
        }
        client.expect(&replies);
        for cut in (1..requests.len() - 40_020).chain((requests.len() - 40_020..requests.len()).step_by(997)) {
            client.send(&requests[..cut]);
            // Enough for the daemon to see the first part alone most of the time; right or not does not hang on it.
            thread::sleep(Duration::from_micros(300));
            client.send(&requests[cut..]);
            client.expect(&replies);
        }
    }
    daemon.assert_nothing_leaks();
}

#[test]
fn a_conversation_is_the_same_for_a_reader_with_tiny_buffers() {
    let daemon = serve(&[]);
    let (requests, replies) = conversation();
    let mut reader = Client::tcp_with_buffers(daemon.address(), Some(1), Some(1));
    let mut writer = reader.try_clone();
    const ROUNDS: usize = 20;
    thread::scope(|scope| {
        scope.spawn(|| (0..ROUNDS).for_each(|_| writer.send(&requests)));
        for _ in 0..ROUNDS {
            let mut at = 0;
            while at < replies.len() {
                let mut chunk = [0; 997];
                let count = reader.try_receive(&mut chunk).expect("the daemon answers");
                assert!(count > 0 && chunk[..count] == replies[at..at + count], "wrong at octet {at}");
                at += count;
                // The next round's replies would be taken for a mistake of this one.
                if replies.len() - at < chunk.len() {
                    reader.expect(&replies[at..]);
                    break;
                }
            }
        }
    });
    reader.expect_in_step();
    daemon.assert_nothing_leaks();
}

#[test]
fn everything_asked_before_half_a_close_is_answered_and_then_the_end_comes() {
    let daemon = Daemon::builder().unix().start();
    let (requests, replies) = conversation();
    for mut client in [daemon.connect(), daemon.connect_unix()] {
        client.send(&requests);
        client.finish();
        client.expect(&replies);
        client.expect_end();
    }
    // A value far longer than the socket holds, from RAM and from disk.
    let mut client = daemon.connect();
    client.set("big", Pattern(8), 24 * MIB);
    for pushed in [false, true] {
        if pushed {
            push_bodies(&mut client, 96 * MIB);
        }
        let mut reader = daemon.connect();
        reader.send("get big\r\nget big\r\nget nothing\r\n");
        reader.finish();
        thread::sleep(Duration::from_millis(50));
        for _ in 0..2 {
            reader.expect_value("big", 0, Pattern(8), 24 * MIB);
            reader.expect("END\r\n");
        }
        reader.expect("END\r\n");
        let mut rest = Vec::new();
        reader.socket().read_to_end(&mut rest).expect("the end");
        assert!(rest.is_empty(), "{} octets behind the last reply", rest.len());
    }
    // Half a value is no value.
    let mut writer = daemon.connect();
    writer.send("set half 0 0 1000000\r\n");
    writer.send_pattern(Pattern(1), 0, 600_000);
    writer.finish();
    writer.expect_end();
    client.get_nothing("half");
    daemon.assert_nothing_leaks();
}
