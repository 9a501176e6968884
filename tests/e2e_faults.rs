//! The real daemon among peers that stall, vanish and ask for everything at once, on drives that change under it, and
//! with everything it can be refused at its start.

mod common;

use common::{Client, Daemon, KIB, MIB, Pattern};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Far beyond what any wait here takes; what does not come by then does not come.
const PATIENCE: Duration = Duration::from_secs(60);

#[track_caller]
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "it does not come about that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn gauge(daemon: &Daemon, name: &str) -> u64 {
    daemon.metric(&format!("bulkhead_{name}")).unwrap_or_else(|| panic!("no metric bulkhead_{name}")) as u64
}

fn cause(daemon: &Daemon, name: &str, cause: &str) -> u64 {
    let page = daemon.admin_get("/metrics");
    let prefix = format!("bulkhead_{name}_total{{cause=\"{cause}\"}} ");
    let value = page.lines().find_map(|line| line.strip_prefix(&prefix));
    value.unwrap_or_else(|| panic!("no {prefix}")).parse().expect("a number")
}

/// Everything that peers can hold is back.
#[track_caller]
fn assert_nothing_held(daemon: &Daemon) {
    eventually("nothing is held", || {
        gauge(daemon, "store_pins") == 0
            && gauge(daemon, "store_pinned_bytes") == 0
            && gauge(daemon, "store_claims") == 0
            && gauge(daemon, "store_claimed_bytes") == 0
            && gauge(daemon, "store_writers_waiting") == 0
            && gauge(daemon, "staging_buffers") == gauge(daemon, "staging_free_buffers")
    });
}

/// Deletes `keys`, and then no octet of arena and pool is in use.
#[track_caller]
fn assert_no_space_leaks(daemon: &Daemon, keys: impl Iterator<Item = String>) {
    let mut client = daemon.connect();
    for key in keys {
        client.send(format!("delete {key}\r\n"));
        assert!(["DELETED", "NOT_FOUND"].contains(&client.line().as_str()));
    }
    eventually("all space is free", || {
        gauge(daemon, "arena_free_bytes") == gauge(daemon, "arena_total_bytes") && gauge(daemon, "pool_used_bytes") == 0
    });
}

#[test]
fn writers_that_stall_evict_nothing_and_keep_nobody_from_storing() {
    let daemon = Daemon::builder().pool("64MiB").start();
    let mut good = daemon.connect();
    for key in 0..20 {
        good.set(&format!("k{key}"), Pattern(key), MIB);
    }
    // Ten times the pool, in values of 10 MiB.
    let mut stalled: Vec<Client> = (0..64).map(|_| daemon.connect()).collect();
    for (n, client) in stalled.iter_mut().enumerate() {
        client.send(format!("set s{n} 0 0 {}\r\n", 10 * MIB));
    }
    for key in 20..24 {
        good.set(&format!("k{key}"), Pattern(key), MIB);
    }
    assert_eq!(gauge(&daemon, "store_claims"), 0, "a header alone claims nothing");
    for client in &mut stalled {
        client.send(vec![b's'; 20_000]);
    }
    eventually("the claims are taken", || gauge(&daemon, "store_claims") + gauge(&daemon, "store_writers_waiting") > 5);
    for key in 24..28 {
        good.set(&format!("k{key}"), Pattern(key), MIB);
        good.set(&format!("small{key}"), Pattern(key), 3000);
    }
    assert_eq!(daemon.stat("evictions"), 0);
    for key in 0..28 {
        good.get(&format!("k{key}"), Pattern(key), MIB);
    }
    drop(stalled);
    assert_nothing_held(&daemon);
    assert_eq!(daemon.stat("evictions"), 0);
    let small = (24..28).map(|key| format!("small{key}"));
    assert_no_space_leaks(&daemon, (0..28).map(|key| format!("k{key}")).chain(small));
}

#[test]
fn a_thousand_pipelined_gets_pin_a_bounded_part_and_are_all_answered() {
    let daemon = Daemon::builder().pool("256MiB").start();
    let mut good = daemon.connect();
    for key in 0..100 {
        good.set(&format!("k{key}"), Pattern(key), MIB);
    }
    let mut reader = daemon.connect();
    let asked: Vec<u64> = (0..1000).map(|n| (n * 7) % 100).collect();
    let request: String = asked.iter().map(|key| format!("get k{key}\r\n")).collect();
    reader.send(request);
    eventually("values are pinned as far as is looked ahead", || gauge(&daemon, "store_pins") >= 2);
    // As much memory as there is, all of which the reader would like to keep.
    for round in 0..2 {
        for key in 0..40 {
            good.set(&format!("other{key}"), Pattern(key + round), MIB);
        }
    }
    // What is looked ahead is 4 MiB at most, and the value that goes beyond it.
    assert!(gauge(&daemon, "store_pins") <= 6);
    assert!(gauge(&daemon, "store_pinned_bytes") <= 6 * MIB);
    for key in asked {
        reader.expect_value(&format!("k{key}"), 0, Pattern(key), MIB);
        reader.expect("END\r\n");
    }
    assert!(daemon.rss_max_bytes() < daemon.memory_sum_bytes());
    assert_eq!(daemon.stat("evictions"), 0);
    assert_nothing_held(&daemon);
}

#[test]
fn a_stalled_reader_and_a_stalled_writer_are_cut_and_hold_nothing() {
    let daemon = Daemon::builder().pool("256MiB").setting("TIMERS__STALL_TIMEOUT", "1s").start();
    let mut idle = daemon.connect();
    idle.set("big", Pattern(1), 32 * MIB);
    let mut reader = Client::tcp_with_buffers(daemon.address(), Some(4096), None);
    reader.send("get big\r\n");
    let mut writer = daemon.connect();
    writer.send(format!("set half 0 0 {}\r\n", 8 * MIB));
    writer.send_pattern(Pattern(2), 0, MIB);
    eventually("both hold something", || gauge(&daemon, "store_pins") == 1 && gauge(&daemon, "store_claims") == 1);
    eventually("both are cut", || cause(&daemon, "connection_closed", "stalled") == 2);
    assert_nothing_held(&daemon);
    writer.expect_end();
    // Whoever has nothing under way is not cut, and nobody sees half a value.
    idle.get("big", Pattern(1), 32 * MIB);
    idle.get_nothing("half");
    assert_no_space_leaks(&daemon, ["big".to_owned()].into_iter());
}

#[test]
fn peers_killed_in_the_middle_leave_nothing_and_disturb_nobody() {
    let daemon = Daemon::builder().pool("512MiB").start();
    let mut good = daemon.connect();
    for key in 0..80 {
        good.set(&format!("k{key}"), Pattern(key), MIB);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let rounds = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) {
                let key = rounds % 80;
                good.get(&format!("k{key}"), Pattern(key), MIB);
                good.set(&format!("good{}", rounds % 10), Pattern(rounds), 700 * KIB);
                rounds += 1;
            }
            rounds
        });
        for batch in 0..10u64 {
            let mut killed: Vec<Client> = (0..50).map(|_| daemon.connect()).collect();
            for (n, client) in killed.iter_mut().enumerate() {
                let n = batch * 50 + n as u64;
                if n.is_multiple_of(2) {
                    client.send(format!("set bad{n} 0 0 {}\r\n", 2 * MIB));
                    client.send_pattern(Pattern(n), 0, n % 200 * 5000);
                } else {
                    client.send(format!("get k{} k{}\r\n", n % 80, (n * 3) % 80));
                    client.read(n as usize * 1000);
                }
                if n.is_multiple_of(3) {
                    // A reset instead of an orderly end.
                    client.socket().set_linger(Some(Duration::ZERO)).expect("SO_LINGER");
                }
            }
        }
        done.store(true, Ordering::Relaxed);
        assert!(rounds.join().expect("the good client is served") > 0);
    });
    eventually("all are gone", || gauge(&daemon, "connection_current") <= 1);
    assert_nothing_held(&daemon);
    assert_eq!(daemon.stat("evictions"), 0);
    let keys = (0..80).map(|key| format!("k{key}")).chain((0..10).map(|key| format!("good{key}")));
    assert_no_space_leaks(&daemon, keys);
}

#[test]
fn connections_beyond_the_limit_are_told_and_counted_and_the_others_served() {
    let daemon = Daemon::builder().setting("LIMITS__CONNECTIONS_MAX", "4").start();
    let mut admitted: Vec<Client> = (0..4).map(|_| daemon.connect()).collect();
    for client in &mut admitted {
        client.expect_in_step();
    }
    for _ in 0..3 {
        let mut refused = daemon.connect();
        refused.expect("ERROR Too many open connections\r\n");
        refused.expect_end();
    }
    assert_eq!(gauge(&daemon, "connection_refused_total"), 3);
    for (n, client) in (0..).zip(&mut admitted) {
        client.set("key", Pattern(n), MIB);
        client.get("key", Pattern(n), MIB);
    }
    drop(admitted.pop());
    eventually("a place is free", || gauge(&daemon, "connection_current") == 3);
    daemon.connect().get("key", Pattern(3), MIB);
}

/// Values, most of which lie on disk alone.
fn cold_values(daemon: &Daemon, count: u64) {
    let mut client = daemon.connect();
    for key in 0..count {
        client.set(&format!("k{key}"), Pattern(key), MIB);
    }
}

/// Gets every value once: how many were right, absent, or ended the connection.
fn judge_values(daemon: &Daemon, count: u64) -> BTreeMap<&'static str, u64> {
    let mut verdicts = BTreeMap::new();
    let mut client = daemon.connect();
    for key in 0..count {
        client.send(format!("get k{key}\r\n"));
        let verdict = if client.line() == "END" {
            "absent"
        } else if right_as_far_as_it_goes(&mut client, key) {
            client.expect("\r\nEND\r\n");
            "right"
        } else {
            client = daemon.connect();
            "ended"
        };
        *verdicts.entry(verdict).or_default() += 1;
    }
    verdicts
}

/// Receives a value of 1 MiB. False if the connection ends before it does; no octet before that is wrong.
fn right_as_far_as_it_goes(client: &mut Client, key: u64) -> bool {
    let (mut at, mut chunk) = (0, vec![0; 64 << 10]);
    while at < MIB {
        let most = chunk.len().min((MIB - at) as usize);
        match client.try_receive(&mut chunk[..most]) {
            Ok(0) | Err(_) => return false,
            Ok(count) => {
                Pattern(key).check(at, &chunk[..count], "a value on a bad drive");
                at += count as u64;
            }
        }
    }
    true
}

fn pool_files(daemon: &Daemon) -> Vec<PathBuf> {
    let entries = fs::read_dir(daemon.dir().join("pool")).expect("the pool");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "bulkhead")).collect()
}

#[test]
fn flipped_octets_on_disk_are_errors_or_misses_and_never_values() {
    let daemon = Daemon::builder().pool("256MiB").memory("32MiB").start();
    cold_values(&daemon, 96);
    eventually("the drive rests", || gauge(&daemon, "disk_in_flight") + gauge(&daemon, "disk_waiting") == 0);
    for path in pool_files(&daemon) {
        let file = OpenOptions::new().read(true).write(true).open(&path).expect("a pool file");
        let len = file.metadata().expect("its length").len();
        // One octet in each 320 KiB: some values keep all of their blocks, at first.
        for offset in (1000..len).step_by(320 << 10) {
            let mut octet = [0];
            file.read_exact_at(&mut octet, offset).expect("an octet");
            file.write_all_at(&[!octet[0]], offset).expect("another octet");
        }
        // Linux reports once, as EIO, that the daemon's direct writes met pages that are dirty here.
        file.sync_all().or_else(|_| file.sync_all()).expect("on disk");
    }
    let verdicts = judge_values(&daemon, 96);
    let bad = verdicts.get("absent").unwrap_or(&0) + verdicts.get("ended").unwrap_or(&0);
    assert!(bad > 30 && verdicts.contains_key("right"), "{verdicts:?}");
    assert!(cause(&daemon, "disk_failed", "checksum") >= 2 * bad, "each is tried twice and counted");
    assert_eq!(cause(&daemon, "store_removed", "lost"), bad);
    assert_eq!(cause(&daemon, "connection_closed", "failed_read"), *verdicts.get("ended").unwrap_or(&0));
    // What was found bad is gone, what is good stays, and new values are taken.
    let again = judge_values(&daemon, 96);
    assert_eq!((again.get("right"), again.get("absent")), (verdicts.get("right"), Some(&bad)));
    let mut client = daemon.connect();
    client.set("new", Pattern(1000), 2 * MIB);
    client.get("new", Pattern(1000), 2 * MIB);
    assert_nothing_held(&daemon);
}

#[test]
fn a_truncated_pool_file_is_errors_or_misses_and_the_daemon_goes_on() {
    let daemon = Daemon::builder().pool("256MiB").memory("32MiB").start();
    cold_values(&daemon, 96);
    for path in pool_files(&daemon) {
        OpenOptions::new().write(true).open(&path).expect("a pool file").set_len(8 * MIB).expect("shorter");
    }
    let verdicts = judge_values(&daemon, 96);
    let bad = verdicts.get("absent").unwrap_or(&0) + verdicts.get("ended").unwrap_or(&0);
    assert!(bad > 30, "{verdicts:?}");
    // Write-behind may have made a file longer again: what is missing in between then fails its checksum.
    let failed = cause(&daemon, "disk_failed", "read_error") + cause(&daemon, "disk_failed", "checksum");
    assert!(failed >= 2 * bad, "{failed} failures for {bad} values");
    let mut client = daemon.connect();
    client.set("new", Pattern(1000), 2 * MIB);
    client.get("new", Pattern(1000), 2 * MIB);
    assert_nothing_held(&daemon);
}

#[test]
fn a_pool_directory_that_vanishes_takes_no_value_along() {
    let daemon = Daemon::builder().pool("256MiB").memory("32MiB").start();
    cold_values(&daemon, 60);
    fs::remove_dir_all(daemon.dir().join("pool")).expect("it can be removed");
    let mut client = daemon.connect();
    for key in 60..120 {
        client.set(&format!("k{key}"), Pattern(key), MIB);
    }
    assert_eq!(judge_values(&daemon, 120), BTreeMap::from([("right", 120)]));
}

/// `bulkhead serve` that is expected to fail: its exit code and its stderr.
fn refused(args: &[&str], environment: &[(&str, &str)]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command
        .arg("serve")
        .args(["--memory", "32MiB", "--admin", "off", "--native", "off", "--log-level", "error"])
        .args(args);
    command.envs(environment.iter().copied()).stdin(Stdio::null());
    let output = command.output().expect("it runs");
    assert!(output.stdout.is_empty(), "it said {:?}", String::from_utf8_lossy(&output.stdout));
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[track_caller]
fn assert_one_line(stderr: &str, words: &[&str]) {
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("bulkhead: "), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{word:?} is not in {stderr:?}");
    }
}

/// Every file below `dir` with its octets.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path());
    entries.map(|path| (path.clone(), fs::read(&path).expect("a file"))).collect()
}

#[test]
fn a_start_that_must_fail_says_why_in_one_line_and_touches_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    let pool = |name: &str| format!("{}:64MiB", at(name).display());
    let door = ["--memcache", "127.0.0.1:0"];

    // A pool of an earlier daemon.
    fs::create_dir(at("used")).expect("a directory");
    let init = Command::new(env!("CARGO_BIN_EXE_bulkhead")).args(["pool", "init"]).arg(at("used")).output();
    assert!(init.expect("it runs").status.success());
    fs::write(at("used").join("extents-0000.bulkhead"), b"earlier octets").expect("a file");
    let before = contents(&at("used"));

    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its number").to_string();
    let (code, stderr) = refused(&["--memcache", &address, "--pool", &pool("used")], &[]);
    assert_eq!(code, 69, "{stderr}");
    assert_one_line(&stderr, &[&address]);
    assert_eq!(contents(&at("used")), before, "a busy port wipes no pool");

    fs::create_dir(at("empty")).expect("a directory");
    let (code, stderr) = refused(&[&door[..], &["--pool", &pool("empty")]].concat(), &[]);
    assert_eq!(code, 78, "{stderr}");
    assert_one_line(&stderr, &["pool init", &at("empty").display().to_string()]);
    assert!(contents(&at("empty")).is_empty());

    fs::create_dir(at("home")).expect("a directory");
    fs::write(at("home").join("thesis"), b"years of work").expect("a file");
    fs::write(at("home").join("extents-0000.bulkhead"), b"looks like ours").expect("a file");
    let before = contents(&at("home"));
    let (code, stderr) = refused(&[&door[..], &["--pool", &pool("home")]].concat(), &[]);
    assert_eq!(code, 78, "{stderr}");
    assert_one_line(&stderr, &[&at("home").display().to_string()]);
    assert_eq!(contents(&at("home")), before);
    // A good pool named before it does not change that.
    let both = ["--pool", &pool("used"), "--pool", &pool("home")];
    let (code, stderr) = refused(&[&door[..], &both].concat(), &[]);
    assert_eq!(code, 78, "{stderr}");
    assert_eq!(contents(&at("home")), before);

    fs::write(at("bad.toml"), "[store]\nmemroy = \"1GiB\"\n").expect("a file");
    let (code, stderr) = refused(&["--config", &at("bad.toml").display().to_string(), "--pool", &pool("new")], &[]);
    assert_eq!(code, 78, "{stderr}");
    assert_one_line(&stderr, &["memroy"]);
    let (code, stderr) = refused(&["--config", &at("none.toml").display().to_string(), "--pool", &pool("new")], &[]);
    assert_eq!(code, 78, "{stderr}");
    assert_one_line(&stderr, &["none.toml"]);
    let (code, stderr) = refused(&["--pool", &pool("new")], &[("BULKHEAD_TIMERS__STALL_TIMEOUT", "soon")]);
    assert_eq!(code, 78, "{stderr}");
    assert_one_line(&stderr, &["soon"]);
    // An ordinary user cannot read it; root reads everything, and then what is in it is refused.
    fs::set_permissions(at("bad.toml"), fs::Permissions::from_mode(0o000)).expect("its mode");
    let (code, stderr) = refused(&["--config", &at("bad.toml").display().to_string(), "--pool", &pool("new")], &[]);
    assert_eq!(code, 78, "{stderr}");
    assert_one_line(&stderr, &[]);
    let (code, _) = refused(&["--no-such-flag"], &[]);
    assert_eq!(code, 64);
    assert!(!at("new").exists(), "a start that fails makes no pool");
}

/// A daemon with a pool directory of the test's, so that another can follow it there.
struct Raw {
    child: Child,
    address: String,
}

impl Raw {
    fn start(pool: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
        command.args([
            "serve",
            "--memory",
            "32MiB",
            "--admin",
            "off",
            "--native",
            "off",
            "--memcache",
            "127.0.0.1:0",
            "--pool",
            pool,
        ]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("it runs");
        let mut address = None;
        for line in BufReader::new(child.stdout.take().expect("a pipe")).lines() {
            let line = line.expect("a line");
            if let Some(url) = line.strip_prefix("listening memcache://") {
                address = Some(url.to_owned());
            }
            if line == "ready" {
                break;
            }
        }
        Self { child, address: address.expect("a door") }
    }

    fn connect(&self) -> Client {
        Client::tcp(self.address.parse().expect("an address"))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_pool_has_one_daemon_and_after_a_kill_another_starts_it_empty() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = format!("{}:128MiB", dir.path().join("pool").display());
    let first = Raw::start(&pool);
    first.connect().set("key", Pattern(1), 40 * MIB);
    let (code, stderr) = refused(&["--memcache", "127.0.0.1:0", "--pool", &pool], &[]);
    assert_eq!(code, 69, "{stderr}");
    assert_one_line(&stderr, &["in use"]);
    first.connect().get("key", Pattern(1), 40 * MIB);
    // `kill` is SIGKILL.
    drop(first);
    fs::write(dir.path().join("pool/notes"), b"mine").expect("a file");
    let second = Raw::start(&pool);
    let mut client = second.connect();
    client.get_nothing("key");
    client.set("key", Pattern(2), 40 * MIB);
    client.get("key", Pattern(2), 40 * MIB);
    assert_eq!(fs::read(dir.path().join("pool/notes")).expect("still there"), b"mine");
}

#[test]
fn transfers_under_way_finish_after_sigterm_and_nobody_new_comes_in() {
    let mut daemon = Daemon::builder().pool("256MiB").start();
    let mut reader = Client::tcp_with_buffers(daemon.address(), Some(64 << 10), None);
    reader.set("big", Pattern(1), 48 * MIB);
    reader.send("get big\r\n");
    reader.expect(format!("VALUE big 0 {}\r\n", 48 * MIB));
    reader.expect_pattern(Pattern(1), 0, MIB, "big");
    let mut writer = daemon.connect();
    writer.send(format!("set half 0 0 {}\r\n", 8 * MIB));
    writer.send_pattern(Pattern(2), 0, MIB);
    let mut idle = daemon.connect();
    idle.expect_in_step();
    eventually("the writer was heard", || gauge(&daemon, "store_claims") == 1);
    let address = daemon.address();
    daemon.signal("TERM");
    eventually("the door is closed", || TcpStream::connect(address).is_err());
    idle.expect_end();
    writer.send_pattern(Pattern(2), MIB, 7 * MIB);
    writer.send("\r\n");
    writer.expect("STORED\r\n");
    writer.expect_end();
    reader.expect_pattern(Pattern(1), MIB, 47 * MIB, "big");
    reader.expect("\r\nEND\r\n");
    reader.expect_end();
    assert_eq!(daemon.wait(), 0, "{}", daemon.log());
    assert!(!daemon.log().contains(" ERROR "), "{}", daemon.log());
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let mut daemon = Daemon::builder().setting("TIMERS__SHUTDOWN_GRACE", "600s").start();
    let mut reader = Client::tcp_with_buffers(daemon.address(), Some(4096), None);
    reader.set("big", Pattern(1), 32 * MIB);
    reader.send("get big\r\n");
    reader.expect(format!("VALUE big 0 {}\r\n", 32 * MIB));
    let address = daemon.address();
    daemon.signal("TERM");
    eventually("it drains", || TcpStream::connect(address).is_err());
    daemon.signal("INT");
    assert_eq!(daemon.wait(), 1, "{}", daemon.log());
    let log = daemon.log();
    assert!(log.contains("bulkhead: ended by SIGINT") && !log.contains("panicked"), "{log}");
}

/// A transfer that never finishes is cut when the grace is over, and the daemon leaves with 0.
#[test]
fn shutdown_grace_has_an_end() {
    let mut daemon = Daemon::builder().setting("TIMERS__SHUTDOWN_GRACE", "300ms").start();
    let mut writer = daemon.connect();
    writer.send("set half 0 0 5000000\r\n");
    writer.send(vec![b'x'; 100_000]);
    eventually("it was heard", || gauge(&daemon, "store_claims") == 1);
    daemon.stop();
    writer.expect_end();
}

/// Nothing but the daemon's own marker and files is ever in a pool that it made.
#[test]
fn a_daemon_that_ended_leaves_a_pool_that_holds_only_what_is_its_own() {
    let dir = tempfile::tempdir().expect("a directory");
    let pool = dir.path().join("deep/er/pool");
    drop(Raw::start(&format!("{}:64MiB", pool.display())));
    let mut marker = String::new();
    File::open(pool.join("bulkhead-pool")).expect("a marker").read_to_string(&mut marker).expect("text");
    assert!(marker.contains("version = 1"), "{marker}");
    let names: Vec<_> = contents(&pool).into_keys().map(|path| path.file_name().expect("a name").to_owned()).collect();
    assert_eq!(names, ["bulkhead-pool", "extents-0000.bulkhead"]);
}
