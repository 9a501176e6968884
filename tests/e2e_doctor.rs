//! `bulkhead doctor` on this machine, whatever it is, and the daemon placed on its cores.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use bulkhead::machine::numa::allowed_cores;
use serde_json::Value;

mod common;
use common::Daemon;

/// `doctor` for a daemon of a few mebibytes with its pool in `pool`.
fn doctor(pool: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bulkhead"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BULKHEAD_")) {
        command.env_remove(name);
    }
    command.args(["doctor", "--admin", "off", "--memory", "8MiB", "--head", "64KiB"]);
    command.env("BULKHEAD_LIMITS__CONNECTIONS_MAX", "8").env("BULKHEAD_NATIVE__CONNECTIONS_MAX", "8");
    command.env("BULKHEAD_STORE__INDEX_BYTES_MAX", "8MiB");
    if !more.contains(&"--memcache") {
        command.args(["--memcache", "127.0.0.1:0"]);
    }
    if !more.contains(&"--native") {
        command.args(["--native", "native+iwarp://127.0.0.1:0"]);
    }
    command.arg("--pool").arg(format!("{}:16MiB", pool.display())).args(more).output().unwrap()
}

/// Exit code, and the report of `--json`.
fn report(pool: &Path, more: &[&str]) -> (i32, Value) {
    let output = doctor(pool, &[more, &["--json"]].concat());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (output.status.code().unwrap(), serde_json::from_slice(&output.stdout).unwrap())
}

fn findings<'a>(report: &'a Value, check: &str) -> Vec<&'a Value> {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == check).collect()
}

#[test]
fn where_serve_works_doctor_says_so_and_leaves_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let pool = home.path().join("pool");
    let (code, seen) = report(&pool, &["127.0.0.1"]);
    assert_eq!((code, &seen["ok"]), (0, &Value::Bool(true)), "{seen}");
    for check in ["rdma", "door", "numa", "memory", "memlock", "huge pages", "io_uring", "descriptors", "pool"] {
        assert!(!findings(&seen, check).is_empty(), "{check}: {seen}");
    }
    for finding in seen["findings"].as_array().unwrap() {
        let level = finding["level"].as_str().unwrap();
        assert!(["ok", "note"].contains(&level), "{finding}");
        assert_eq!(level == "note", finding["mend"].is_string(), "what could be better has its mend: {finding}");
        let lines = [&finding["text"], &finding["mend"]].map(|text| text.as_str().unwrap_or_default().contains('\n'));
        assert_eq!(lines, [false, false], "one line each: {finding}");
    }
    assert!(findings(&seen, "address")[0]["text"].as_str().unwrap().starts_with("127.0.0.1 is lo's"), "{seen}");
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "nothing was made");
    let text = String::from_utf8(doctor(&pool, &[]).stdout).unwrap();
    assert!(text.ends_with("serve would work\n"), "{text}");
    if seen["devices"].as_array().unwrap().is_empty() {
        assert!(text.contains("no RDMA device: doors on iwarp work over TCP"), "{text}");
    }
}

#[test]
fn what_would_stop_serve_is_a_trouble_with_its_mend() {
    let home = tempfile::tempdir().unwrap();
    let (pool, taken) = (home.path().join("pool"), TcpListener::bind("127.0.0.1:0").unwrap());
    let port = format!("127.0.0.1:{}", taken.local_addr().unwrap().port());
    let core = (allowed_cores().unwrap().last().unwrap() + 1).to_string();
    let cases = [
        ("pool", home.path().to_owned(), vec![], "pool init"),
        ("door", pool.clone(), vec!["--memcache", &port], "another port"),
        ("door", pool.clone(), vec!["--native", "native+iwarp://203.0.113.77:0"], "ip address"),
        ("door", pool.clone(), vec!["--unix", "/nonexistent/door.sock"], "name another"),
        ("numa", pool.clone(), vec!["--pin", &core], "--pin"),
        ("pool", pool.join("x/../../y"), vec!["--pool", "/proc/bulkhead:16MiB"], "make or write"),
    ];
    for (check, pool, more, mend) in cases {
        let (code, seen) = report(&pool, &more);
        let troubles = findings(&seen, check);
        let trouble = troubles.iter().find(|finding| finding["level"] == "trouble");
        let trouble = trouble.unwrap_or_else(|| panic!("no trouble with {check}: {seen}"));
        assert!(trouble["mend"].as_str().unwrap().contains(mend), "{trouble}");
        assert_eq!((code, &seen["ok"]), (1, &Value::Bool(false)), "{seen}");
    }
    let text = String::from_utf8(doctor(home.path(), &[]).stdout).unwrap();
    assert!(text.contains("TROUBLE  pool") && text.contains("mend: bulkhead pool init"), "{text}");
}

#[test]
fn more_memory_than_the_machine_has_is_a_trouble() {
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("large.toml");
    fs::write(&config, "[native]\nconnections_max = 65536\nwindow = \"256MiB\"\n").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_bulkhead"))
        .args([
            "doctor",
            "--json",
            "--admin",
            "off",
            "--memcache",
            "127.0.0.1:0",
            "--native",
            "native+iwarp://127.0.0.1:0",
        ])
        .arg("--config")
        .arg(&config)
        .arg("--pool")
        .arg(format!("{}:16MiB", home.path().join("pool").display()))
        .output()
        .unwrap();
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(findings(&seen, "memory")[0]["level"], "trouble", "{seen}");
}

#[test]
fn what_makes_no_sense_is_told_apart_from_trouble() {
    let home = tempfile::tempdir().unwrap();
    let pool = home.path().join("pool");
    for (more, code, word) in [
        (&["host.example"][..], 64, "numeric"),
        (&["--native-allow", "10.0.0.1/8"], 64, "10.0.0.0/8"),
        (&["--pin", "everywhere"], 64, "auto"),
        (&["--lanes", "0"], 78, "lanes"),
    ] {
        let output = doctor(&pool, more);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && said.contains(word), "{more:?}: {said}");
    }
}

#[test]
fn lanes_run_where_they_are_pinned_and_nothing_else_is_moved() {
    let allowed = allowed_cores().unwrap();
    let core = allowed.last().unwrap().to_string();
    let daemon = Daemon::builder().flags(&["--lanes", "3", "--pin", &core]).start();
    let places = |pid: u32| -> Vec<(String, String)> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        let place = |task: fs::DirEntry| {
            let status = fs::read_to_string(task.path().join("status")).unwrap();
            let list =
                status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned();
            (task.file_name().into_string().unwrap(), list)
        };
        tasks.map(place).collect()
    };
    let places = places(daemon.pid());
    let main = places.iter().find(|(task, _)| *task == daemon.pid().to_string()).unwrap();
    let ours = fs::read_to_string("/proc/self/status").unwrap();
    assert!(ours.contains(&format!("Cpus_allowed_list:\t{}\n", main.1)), "the main thread may run where we may");
    if allowed.len() > 1 {
        // Threads that the kernel or the runtime starts for a lane stay with it.
        let pinned = places.iter().filter(|(_, list)| *list == core).count();
        assert!(pinned >= 3, "{places:?}");
    }
    daemon.connect().ask("get none\r\n", "END\r\n");
}

#[test]
fn an_nfs_door_that_everybody_may_use_is_told() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("bulkhead.toml");
    fs::write(&file, "[nfs]\nallow = []\n").unwrap();
    let file = file.to_str().unwrap();
    let told = |more: &[&str]| {
        let (_, seen) = report(&home.path().join("pool"), more);
        let open: Vec<_> = findings(&seen, "allow").iter().map(|finding| finding["text"].to_string()).collect();
        let served = Daemon::builder().flags(more).start();
        let warned = served.log().contains("everybody who reaches this door may mount");
        assert_eq!(warned, !open.is_empty(), "{open:?}\n{}", served.log());
        warned
    };
    assert!(told(&["--config", file, "--nfs-tcp", "0.0.0.0:0"]));
    assert!(!told(&["--config", file, "--nfs-tcp", "127.0.0.1:0"]), "only this host reaches it");
    assert!(!told(&["--nfs-tcp", "0.0.0.0:0"]), "loopback is allowed unless told otherwise");
}
