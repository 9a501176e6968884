//! The command line and the client library against a server that is scripted here, so that it can also misbehave.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use bulkhead::client::{Client, ClientError, Info, Options, ServerUrl};
use bulkhead::config::{Flags, Settings};

type Values = Arc<Mutex<HashMap<String, (u32, Vec<u8>)>>>;

/// A server whose every connection is handled by `script` on a thread of its own; its URL.
fn server(script: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("memcache://{}", listener.local_addr().unwrap());
    let script = Arc::new(script);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (script, stream) = (Arc::clone(&script), stream.unwrap());
            // A client that goes away in the middle is part of many scripts.
            thread::spawn(move || script(stream));
        }
    });
    url
}

/// A well-behaved server over `values`; the command lines it was sent end up in `lines`.
fn answer(stream: impl Read, mut out: impl Write, values: &Values, lines: &Mutex<Vec<String>>) -> io::Result<()> {
    let mut input = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        lines.lock().unwrap().push(line.trim_end().to_owned());
        let words: Vec<_> = line.split_whitespace().collect();
        let reply = match words[..] {
            ["set", key, flags, _, len] => {
                let mut body = vec![0; len.parse::<usize>().unwrap() + 2];
                input.read_exact(&mut body)?;
                assert!(body.ends_with(b"\r\n"), "the body of {key} has the announced length");
                body.truncate(body.len() - 2);
                values.lock().unwrap().insert(key.to_owned(), (flags.parse().unwrap(), body));
                b"STORED\r\n".to_vec()
            }
            ["get" | "gets", key] => match values.lock().unwrap().get(key) {
                Some((flags, value)) => {
                    let cas = if words[0] == "gets" { " 9" } else { "" };
                    let mut reply = format!("VALUE {key} {flags} {}{cas}\r\n", value.len()).into_bytes();
                    reply.extend_from_slice(value);
                    reply.extend_from_slice(b"\r\nEND\r\n");
                    reply
                }
                None => b"END\r\n".to_vec(),
            },
            ["delete", key] => match values.lock().unwrap().remove(key) {
                Some(_) => b"DELETED\r\n".to_vec(),
                None => b"NOT_FOUND\r\n".to_vec(),
            },
            ["touch", key, _] if values.lock().unwrap().contains_key(key) => b"TOUCHED\r\n".to_vec(),
            ["touch", ..] => b"NOT_FOUND\r\n".to_vec(),
            ["version"] => b"VERSION 1.2.3\r\n".to_vec(),
            ["stats"] => b"STAT pid 7\r\nSTAT version 1.2.3 x\r\nSTAT empty \r\nEND\r\n".to_vec(),
            ["stats", "reset"] => b"RESET\r\n".to_vec(),
            _ => b"ERROR\r\n".to_vec(),
        };
        out.write_all(&reply)?;
    }
}

struct Good {
    url: String,
    values: Values,
    lines: Arc<Mutex<Vec<String>>>,
}

fn good_server() -> Good {
    let (values, lines) = (Values::default(), Arc::new(Mutex::new(Vec::new())));
    let (for_values, for_lines) = (Arc::clone(&values), Arc::clone(&lines));
    let url = server(move |stream| answer(stream.try_clone()?, stream, &for_values, &for_lines));
    Good { url, values, lines }
}

/// A server that reads one command line, sends `reply`, and then does `after`.
fn one_reply(reply: &'static [u8], after: fn(TcpStream) -> io::Result<()>) -> String {
    server(move |stream| {
        BufReader::with_capacity(1, &stream).read_line(&mut String::new())?;
        (&stream).write_all(reply)?;
        after(stream)
    })
}

fn close(_: TcpStream) -> io::Result<()> {
    Ok(())
}

/// Waits, without reading, until the test's process ends.
fn hold(stream: TcpStream) -> io::Result<()> {
    std::mem::forget(stream);
    Ok(())
}

/// Reads and forgets all that comes.
fn drain(mut stream: TcpStream) -> io::Result<()> {
    io::copy(&mut stream, &mut io::sink()).map(drop)
}

fn command(url: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    command.args(args).env("BULKHEAD_SERVER", url).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(url: &str, args: &[&str]) -> Output {
    command(url, args).output().unwrap()
}

fn run_with_input(url: &str, args: &[&str], input: &[u8]) -> Output {
    let mut child = command(url, args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    thread::scope(|scope| {
        // A command that refuses its input early closes the pipe; that is the command's business.
        scope.spawn(move || stdin.write_all(input));
        child.wait_with_output().unwrap()
    })
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("ended by itself")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The command ended with `expected` and said why in one line.
fn assert_fails(output: &Output, expected: i32, says: &str) {
    let text = stderr(output);
    assert_eq!(code(output), expected, "{text}");
    assert!(text.contains(says), "`{text}` does not say `{says}`");
    assert_eq!((text.lines().count(), text.starts_with("bulkhead: ")), (1, true), "{text}");
}

fn octets(len: usize) -> Vec<u8> {
    (0..len as u32).map(|index| (index.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect()
}

fn client(url: &str) -> Client {
    Client::connect(url.parse().unwrap(), Options::default()).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(60), "still waiting: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn values_of_every_size_come_back_the_same_by_every_way() {
    let good = good_server();
    let dir = tempfile::tempdir().unwrap();
    let (source, copy) = (dir.path().join("source"), dir.path().join("copy"));
    let (source_name, copy_name) = (source.to_str().unwrap(), copy.to_str().unwrap());
    for len in [0, 1, 4_095, 4_097, 65_536, 262_117, 262_143, 262_144, 262_145, 3_000_001] {
        let value = octets(len);
        fs::write(&source, &value).unwrap();
        let size = len.to_string();
        for (key, args, input) in [
            ("file", vec!["put", "file", source_name], &[][..]),
            ("spooled", vec!["put", "spooled", "-"], &value),
            ("streamed", vec!["put", "streamed", "-", "--size", &size], &value),
        ] {
            let output = run_with_input(&good.url, &args, input);
            assert_eq!((code(&output), stderr(&output)), (0, String::new()), "{key} {len}");
            assert!(good.values.lock().unwrap()[key].1 == value, "{key} {len}");
            let output = run(&good.url, &["get", key]);
            assert!(code(&output) == 0 && output.stdout == value, "{key} {len}");
        }
        fs::write(&copy, "what was there before").unwrap();
        assert_eq!(code(&run(&good.url, &["get", "file", "-o", copy_name])), 0);
        assert!(fs::read(&copy).unwrap() == value, "{len}");
    }
    assert_eq!(names(dir.path()).len(), 2, "no part file is left");
}

#[test]
fn flags_and_time_to_live_reach_the_server() {
    let good = good_server();
    run_with_input(&good.url, &["put", "k", "-", "--size", "3", "--flags", "4294967295", "--ttl", "90s"], b"abc");
    run_with_input(&good.url, &["put", "k", "-", "--size", "3", "--ttl", "5"], b"abc");
    run_with_input(&good.url, &["put", "k", "-", "--size", "3"], b"abc");
    let lines = good.lines.lock().unwrap();
    assert_eq!(*lines, ["set k 4294967295 90 3", "set k 0 5 3", "set k 0 0 3"]);
}

#[test]
fn stat_rm_and_stats_print_text_and_json() {
    let good = good_server();
    good.values.lock().unwrap().insert("k".to_owned(), (7, octets(100)));
    let out = |args: &[&str]| String::from_utf8(run(&good.url, args).stdout).unwrap();
    assert_eq!(out(&["stat", "k"]), "key k\nlen_bytes 100\nflags 7\ncas 9\n");
    let json: serde_json::Value = serde_json::from_str(&out(&["stat", "k", "--json"])).unwrap();
    assert_eq!(json, serde_json::json!({ "key": "k", "len_bytes": 100, "flags": 7, "cas": 9 }));
    assert_eq!(out(&["stats"]), "pid 7\nversion 1.2.3 x\nempty \n");
    let json: serde_json::Value = serde_json::from_str(&out(&["stats", "--json"])).unwrap();
    assert_eq!(json, serde_json::json!({ "pid": 7, "version": "1.2.3 x", "empty": "" }));
    assert_eq!(code(&run(&good.url, &["stats", "reset"])), 0);
    assert_fails(&run(&good.url, &["stats", "nonsense"]), 1, "ERROR");
    assert_eq!(code(&run(&good.url, &["rm", "k"])), 0);
    assert!(good.values.lock().unwrap().is_empty());
}

#[test]
fn a_miss_is_exit_code_1_and_leaves_no_file() {
    let good = good_server();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    assert_fails(&run(&good.url, &["get", "k", "-o", file.to_str().unwrap()]), 1, "no value under `k`");
    assert_fails(&run(&good.url, &["stat", "k"]), 1, "no value under `k`");
    assert_fails(&run(&good.url, &["rm", "k"]), 1, "no value under `k`");
    assert!(names(dir.path()).is_empty());
}

#[test]
fn input_shorter_or_longer_than_announced_stores_nothing() {
    let good = good_server();
    let long = octets(2_000_000);
    for (size, says) in [("1999999", "more than 1999999"), ("2000001", "after 2000000 of 2000001")] {
        assert_fails(&run_with_input(&good.url, &["put", "k", "-", "--size", size], &long), 1, says);
    }
    assert_eq!(code(&run_with_input(&good.url, &["put", "k", "-", "--size", "0"], b"x")), 64);
    assert!(good.values.lock().unwrap().is_empty());
}

#[test]
fn a_refusal_is_heard_whatever_the_server_does_with_the_body() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("large");
    // More than any socket buffers: who only writes, and then reads, hangs on `hold`.
    fs::File::create(&file).unwrap().set_len(256 << 20).unwrap();
    for after in [hold, drain, close] {
        let url = one_reply(b"SERVER_ERROR object too large for cache\r\n", after);
        assert_fails(&run(&url, &["put", "k", file.to_str().unwrap()]), 1, "SERVER_ERROR object too large for cache");
    }
    let url = one_reply(b"CLIENT_ERROR bad command line format\r\n", drain);
    assert_fails(&run_with_input(&url, &["put", "k", "-"], b"abc"), 1, "CLIENT_ERROR bad command line format");
}

#[test]
fn an_early_stored_is_a_protocol_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("large");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let url = one_reply(b"STORED\r\n", hold);
    assert_fails(&run(&url, &["put", "k", file.to_str().unwrap()]), 76, "STORED");
}

#[test]
fn what_is_no_reply_is_exit_code_76_a_cut_one_69_and_both_leave_the_old_file_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "old").unwrap();
    for (reply, exit) in [
        (&b"VALUE k 0 100 1\r\nhalf of it"[..], 69),
        (&b"VALUE k 0 3 1\r\nabc"[..], 69),
        (&b"VALUE k 0 3 1\r\nabc\r\nEN"[..], 69),
        (&b"VALUE k 0 3 1\r\nabcdefghijkl"[..], 76),
        (&b"VALUE k 0 3 1\r\nabc\r\nVALUE k 0 3 1\r\nabc\r\nEND\r\n"[..], 76),
        (&b"VALUE other 0 3 1\r\nabc\r\nEND\r\n"[..], 76),
        (&b"VALUE k 0 -3 1\r\nabc\r\nEND\r\n"[..], 76),
        (&b"VALUE k 0 18446744073709551616 1\r\nabc\r\nEND\r\n"[..], 76),
        (&b"VALUE k 0 18446744073709551615 1\r\nabc\r\nEND\r\n"[..], 69),
        (&b"VALUE k 0 3\r\nabc\r\nEND\r\n"[..], 76),
        (&b"VAL"[..], 69),
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], 76),
        (&b"\r\n"[..], 76),
        (&b"\0\xff\n"[..], 76),
        (&[b'x'; 100_000], 76),
    ] {
        let url = one_reply(reply, close);
        let output = run(&url, &["get", "k", "-o", file.to_str().unwrap()]);
        assert_fails(&output, exit, if exit == 76 { "protocol" } else { "inside a reply" });
        assert_eq!((fs::read(&file).unwrap(), names(dir.path()).len()), (b"old".to_vec(), 1));
        assert_eq!(code(&run(&url, &["get", "k"])), exit);
        assert_eq!(code(&run(&url, &["version-is-no-command"])), 64);
    }
    for args in [&["rm", "k"][..], &["stat", "k"], &["stats"], &["put", "k", "/dev/null"]] {
        assert_fails(&run(&one_reply(b"GARBAGE\r\n", close), args), 76, "GARBAGE");
    }
}

#[test]
fn a_refused_get_is_exit_code_1() {
    for reply in [&b"SERVER_ERROR out of memory\r\n"[..], b"CLIENT_ERROR bad\r\n", b"ERROR\r\n"] {
        assert_fails(&run(&one_reply(reply, hold), &["get", "k"]), 1, std::str::from_utf8(reply).unwrap().trim_end());
    }
}

#[test]
fn a_server_that_closes_or_stands_still_is_exit_code_69() {
    let closing = one_reply(b"", close);
    assert_fails(&run(&closing, &["get", "k"]), 69, "closed the connection");
    let silent = one_reply(b"", hold);
    assert_fails(&run(&silent, &["get", "k", "--timeout", "100ms"]), 69, "time-out");
    let stalled = one_reply(b"VALUE k 0 100 1\r\nhalf", hold);
    assert_fails(&run(&stalled, &["get", "k", "--timeout", "100ms"]), 69, "time-out");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("large");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let deaf = one_reply(b"", hold);
    assert_fails(&run(&deaf, &["put", "k", file.to_str().unwrap(), "--timeout", "100ms"]), 69, "time-out");
}

#[test]
fn an_interrupted_get_leaves_nothing_that_looks_whole() {
    for (signal, expected) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let url = one_reply(b"VALUE k 0 100 1\r\nhalf", hold);
        let mut child: Child = command(&url, &["get", "k", "-o", file.to_str().unwrap()]).spawn().unwrap();
        wait_until("the part file is there", || !names(dir.path()).is_empty());
        assert!(names(dir.path())[0].starts_with("file.part-"));
        let kill = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
        assert!(kill.success());
        assert_eq!(child.wait().unwrap().code(), Some(expected));
        assert!(names(dir.path()).is_empty(), "SIG{signal} left {:?}", names(dir.path()));
    }
}

#[test]
fn a_get_into_what_cannot_be_written_fails_and_devices_stay_devices() {
    let good = good_server();
    good.values.lock().unwrap().insert("k".to_owned(), (0, octets(1_000)));
    let dir = tempfile::tempdir().unwrap();
    let dir_name = dir.path().to_str().unwrap();
    assert_fails(&run(&good.url, &["get", "k", "-o", dir_name]), 1, "is a directory");
    assert_fails(&run(&good.url, &["get", "k", "-o", &format!("{dir_name}/none/file")]), 1, "none/file");
    assert_fails(&run(&good.url, &["get", "k", "-o", "/dev/full"]), 1, "/dev/full");
    assert_eq!(code(&run(&good.url, &["get", "k", "-o", "/dev/null"])), 0);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("target", &link).unwrap();
    fs::write(dir.path().join("target"), "old").unwrap();
    assert_eq!(code(&run(&good.url, &["get", "k", "-o", link.to_str().unwrap()])), 0);
    assert!(link.is_symlink() && fs::read(&link).unwrap() == octets(1_000));
}

#[test]
fn what_makes_no_sense_is_exit_code_64_and_who_is_away_69() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let gone = format!("memcache://127.0.0.1:{port}");
    assert_fails(&run(&gone, &["get", "k"]), 69, &gone);
    assert_fails(&run("memcache+unix:/nonexistent/socket", &["get", "k"]), 69, "/nonexistent/socket");
    assert_fails(&run("native+verbs://host:1", &["get", "k"]), 64, "memcache://HOST:PORT");
    let good = good_server();
    assert_fails(&run(&good.url, &["get", "two words"]), 64, "key");
    assert_fails(&run(&good.url, &["put", "k", "/nonexistent"]), 64, "/nonexistent");
    assert_fails(&run(&good.url, &["put", "k", "/"]), 64, "directory");
    for args in [
        &[][..],
        &["get"],
        &["put", "k"],
        &["frob"],
        &["put", "k", "-", "--ttl", "0"],
        &["put", "k", "-", "--size", "1KB"],
        &["get", "k", "--server", "http://x"],
        &["serve", "--memory", "much"],
        &["serve", "--lanes", "x"],
        &["bench", "--op", "frob"],
        &["bench", "--op", "get", "--depth", "0"],
        &["pool"],
    ] {
        assert_eq!(code(&run(&good.url, args)), 64, "{args:?}");
    }
    for args in [&["--help"][..], &["--version"], &["serve", "--help"], &["help", "get"]] {
        assert_eq!(code(&run(&good.url, args)), 0, "{args:?}");
    }
}

#[test]
fn the_printed_configuration_is_the_one_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let (file, printed) = (dir.path().join("in.toml"), dir.path().join("out.toml"));
    fs::write(&file, "[store]\nhead = \"64KiB\"\nmemory = \"16MiB\"\n").unwrap();
    let args = ["serve", "--config", file.to_str().unwrap(), "--print-config", "--lanes", "3", "--pool", "/a:9GiB"];
    let mut command = command("memcache://unused", &args);
    let output = command.env("BULKHEAD_STORE__MEMORY", "32MiB").env("BULKHEAD_LISTEN__ADMIN", "off").output().unwrap();
    assert_eq!((code(&output), stderr(&output)), (0, String::new()));
    fs::write(&printed, &output.stdout).unwrap();
    let settings = Settings::load(Some(&printed), [], &Flags::default()).unwrap();
    assert_eq!(settings.to_toml().into_bytes(), output.stdout);
    let daemon = settings.daemon;
    assert_eq!((daemon.store.head_bytes, daemon.store.memory_bytes, daemon.lanes), (64 << 10, 32 << 20, 3));
    assert_eq!((daemon.listen.admin, daemon.store.pools[0].bytes), (None, Some(9 << 30)));
}

#[test]
fn serve_says_where_it_listens_keeps_its_pool_to_itself_and_ends_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let pool = format!("{}:64MiB", dir.path().join("pool").display());
    let args = [
        "serve",
        "--memcache",
        "127.0.0.1:0",
        "--native",
        "off",
        "--admin",
        "off",
        "--memory",
        "16MiB",
        "--pool",
        &pool,
    ];
    let mut daemon = command("memcache://unused", &args).spawn().unwrap();
    let lines = BufReader::new(daemon.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut told = Vec::new();
    for line in lines {
        told.push(line);
        if told.last().unwrap() == "ready" {
            break;
        }
    }
    assert_eq!(told.len(), 3, "{told:?}");
    let url = told[0].strip_prefix("listening ").unwrap();
    assert!(told[1].starts_with("memory "), "{told:?}");
    let value = octets(5_000_000);
    assert_eq!(code(&run_with_input(url, &["put", "k", "-"], &value)), 0);
    assert!(run(url, &["get", "k"]).stdout == value);
    let second = run("memcache://unused", &args);
    assert_eq!((code(&second), second.stdout.is_empty()), (69, true), "{}", stderr(&second));
    let kill = Command::new("sh").args(["-c", &format!("kill -TERM {}", daemon.id())]).status().unwrap();
    assert!(kill.success());
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
    assert_fails(&run(url, &["get", "k"]), 69, "cannot reach");
}

#[test]
fn a_bad_configuration_is_exit_code_78() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.toml");
    fs::write(&file, "[store]\nmemroy = \"16MiB\"\n").unwrap();
    let url = "memcache://unused";
    assert_fails(&run(url, &["serve", "--config", file.to_str().unwrap()]), 78, "memroy");
    assert_fails(&run(url, &["serve", "--config", "/nonexistent.toml"]), 78, "/nonexistent.toml");
    assert_fails(&run(url, &["serve", "--memory", "9MiB", "--head", "4MiB"]), 78, "quarter of store.memory = 9MiB");
    assert_fails(&run(url, &["serve", "--memcache", "off", "--native", "off"]), 78, "no door");
    assert_fails(&run(url, &["serve", "--log-level", "bulkhead=loudly"]), 78, "log.level");
    let output = command(url, &["serve"]).env("BULKHEAD_STORE__MEMROY", "1").output().unwrap();
    assert_fails(&output, 78, "memroy");
}

#[test]
fn replies_may_come_one_octet_at_a_time() {
    let (values, lines) = (Values::default(), Mutex::new(Vec::new()));
    struct Slow(TcpStream);
    impl Write for Slow {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.0.set_nodelay(true)?;
            self.0.write(&from[..1.min(from.len())])
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let url = server(move |stream| answer(stream.try_clone()?, Slow(stream), &values, &lines));
    let mut client = client(&url);
    let value = octets(1_000);
    client.put("k", &mut &value[..], 1_000, 3, None).unwrap();
    let mut copy = Vec::new();
    assert_eq!(client.get("k", &mut copy).unwrap(), Some(Info { len: 1_000, flags: 3, cas: 9 }));
    assert!(copy == value);
    let mut front = vec![0; 1_500];
    assert_eq!(client.get_into("k", &mut front).unwrap().unwrap().len, 1_000);
    assert!(front[..1_000] == value && front[1_000..] == [0; 500]);
    assert_eq!(client.version().unwrap(), "1.2.3");
    assert_eq!(client.stats(None).unwrap().len(), 3);
}

#[test]
fn one_client_does_everything_in_turn() {
    let good = good_server();
    let mut client = client(&good.url);
    let value = octets(5_000_000);
    for _ in 0..2 {
        client.put("k", &mut &value[..], value.len() as u64, 0, Some(Duration::from_millis(1))).unwrap();
        assert!(client.exists("k").unwrap() && !client.exists("other").unwrap());
        assert_eq!(client.stat("k").unwrap().unwrap().len, 5_000_000);
        assert!(matches!(
            client.get_into("k", &mut [0; 10]),
            Err(ClientError::TooLong { len: 5_000_000, capacity: 10 })
        ));
        let mut whole = vec![0; value.len()];
        client.get_into("k", &mut whole).unwrap().unwrap();
        assert!(whole == value);
        assert!(client.touch("k", None).unwrap() && !client.touch("other", Some(Duration::from_secs(9))).unwrap());
        let full = client.get("k", &mut &mut [0; 9][..]).unwrap_err();
        assert!(matches!(full, ClientError::Local { .. }), "{full}");
        assert!(client.delete("k").unwrap() && !client.delete("k").unwrap());
        assert_eq!(client.get("k", &mut Vec::new()).unwrap(), None);
    }
    assert_eq!(good.lines.lock().unwrap()[0], "set k 0 1 5000000");
}

#[test]
fn a_connection_closed_while_idle_is_made_anew() {
    let (closed, is_closed) = mpsc::channel();
    let url = server(move |stream| {
        BufReader::with_capacity(1, &stream).read_line(&mut String::new())?;
        (&stream).write_all(b"END\r\n")?;
        drop(stream);
        closed.send(()).map_err(io::Error::other)
    });
    let mut client = client(&url);
    for _ in 0..3 {
        assert_eq!(client.get("k", &mut Vec::new()).unwrap(), None);
        is_closed.recv().unwrap();
    }
}

#[test]
fn a_unix_socket_serves_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let (values, lines) = (Values::default(), Mutex::new(Vec::new()));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(stream.try_clone().unwrap(), stream, &values, &lines);
        }
    });
    let url = format!("memcache+unix:{}", path.display());
    assert_eq!(url.parse::<ServerUrl>().unwrap().to_string(), url);
    let value = octets(700_000);
    assert_eq!(code(&run_with_input(&url, &["put", "k", "-"], &value)), 0);
    assert!(run(&url, &["get", "k"]).stdout == value);
}

#[test]
fn bench_prints_one_object_with_every_figure() {
    let good = good_server();
    for (op, connections, depth) in [("get", "2", "3"), ("set", "1", "2"), ("get", "70", "1"), ("set", "66", "2")] {
        let args = [
            "bench",
            "--op",
            op,
            "--size",
            "1..40000",
            "--connections",
            connections,
            "--depth",
            depth,
            "--seconds",
            "300ms",
            "--keys",
            "5",
            "--json",
            "--verify",
        ];
        let output = run(&good.url, &args);
        assert_eq!((code(&output), stderr(&output)), (0, String::new()), "{op} {connections} {depth}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for name in [
            "ops_per_second",
            "bytes_per_second",
            "p50_us",
            "p99_us",
            "ttfb_p50_us",
            "pingpong_64_p50_us",
            "cpu_seconds_client",
        ] {
            assert!(report[name].is_f64(), "{name} in {report}");
        }
        assert!(report["operations"].as_u64() > Some(0), "{report}");
        for name in ["errors", "misses", "corrupt"] {
            assert_eq!(report[name], 0, "{name} in {report}");
        }
    }
}

#[test]
fn bench_notices_wrong_octets_misses_and_lost_connections() {
    let good = good_server();
    let bench = |url: &str, more: &[&str]| {
        let args = ["bench", "--op", "get", "--size", "1000", "--keys", "3", "--seconds", "100ms", "--json"];
        let output = run(url, &[&args[..], more].concat());
        (code(&output), serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap())
    };
    let (exit, report) = bench(&good.url, &["--no-load"]);
    assert!(exit == 0 && report["misses"].as_u64() > Some(0), "{report}");
    assert_eq!(bench(&good.url, &["--verify"]).0, 0);
    good.values.lock().unwrap().values_mut().for_each(|(_, value)| value[999] ^= 1);
    let (exit, report) = bench(&good.url, &["--verify", "--no-load"]);
    assert!(exit == 76 && report["corrupt"].as_u64() > Some(0), "{report}");
    // Answers `version`, then closes at the first `get`.
    let url = one_reply(b"VERSION 1.2.3\r\n", close);
    let (exit, report) = bench(&url, &["--no-load"]);
    assert!(exit == 1 && report["errors"].as_u64() > Some(0), "{report}");
}
