//! One `bulkhead serve` for a test.

use super::client::Client;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// How a daemon is started. What is not said: loopback ports that are free, a pool of 1 GiB in a temporary directory,
/// `--memory 64MiB`, no native door, the daemon's own defaults for the rest.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    pool: Option<String>,
    memory: Option<String>,
    unix: bool,
    through: Vec<String>,
}

impl Builder {
    /// More flags, as on the command line. They come last, but a flag that is said twice is an error: for those the
    /// builder sets itself there are calls of their own.
    #[must_use]
    pub fn flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }

    /// A `BULKHEAD_*` variable, e.g. `("TIMERS__STALL_TIMEOUT", "1s")` without its prefix.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.environment.push((format!("BULKHEAD_{name}"), value.to_owned()));
        self
    }

    /// Size of the one pool.
    #[must_use]
    pub fn pool(mut self, size: &str) -> Self {
        self.pool = Some(size.to_owned());
        self
    }

    #[must_use]
    pub fn memory(mut self, size: &str) -> Self {
        self.memory = Some(size.to_owned());
        self
    }

    /// Opens a Unix door too: [`Daemon::connect_unix`].
    #[must_use]
    pub fn unix(mut self) -> Self {
        self.unix = true;
        self
    }

    /// A command that becomes the daemon, e.g. `prlimit --nofile=64`.
    #[must_use]
    pub fn through(mut self, command: Vec<String>) -> Self {
        self.through = command;
        self
    }

    /// Starts it and waits until it is ready.
    ///
    /// # Panics
    /// If it ends before; its log is shown.
    pub fn start(self) -> Daemon {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let pool = dir.path().join("pool");
        let socket = self.unix.then(|| dir.path().join("door.sock"));
        let mut words = self.through.iter().map(String::as_str).chain([env!("CARGO_BIN_EXE_bulkhead")]);
        let mut command = Command::new(words.next().expect("the daemon at least"));
        command.args(words);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("BULKHEAD_") {
                command.env_remove(name);
            }
        }
        command.args(["serve", "--memcache", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        if !self.flags.iter().any(|flag| flag == "--native") {
            command.args(["--native", "off"]);
        }
        command.args(["--memory", self.memory.as_deref().unwrap_or("64MiB")]);
        command.arg("--pool").arg(format!("{}:{}", pool.display(), self.pool.as_deref().unwrap_or("1GiB")));
        if let Some(path) = &socket {
            command.arg("--unix").arg(path);
        }
        command.args(&self.flags).envs(self.environment).stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(File::create(dir.path().join("log")).expect("a file for the log"));
        let mut child = command.spawn().expect("the daemon's binary runs");
        let mut lines = BufReader::new(child.stdout.take().expect("stdout is a pipe")).lines();
        let mut daemon =
            Daemon { child, dir, doors: Vec::new(), socket, memory_sum: String::new(), ended: false, stdout: None };
        loop {
            let Some(Ok(line)) = lines.next() else { panic!("the daemon did not become ready\n{}", daemon.log()) };
            if let Some(door) = line.strip_prefix("listening ") {
                daemon.doors.push(door.to_owned());
            } else if line.starts_with("memory ") {
                daemon.memory_sum = line;
            } else if line == "ready" {
                break;
            } else {
                panic!("the daemon said {line:?} before it was ready\n{}", daemon.log());
            }
        }
        daemon.stdout = Some(Box::new(lines));
        daemon
    }
}

/// A running daemon. Dropping it ends it with SIGTERM and asserts that it leaves with 0 and never panicked.
pub struct Daemon {
    child: Child,
    dir: TempDir,
    doors: Vec<String>,
    socket: Option<PathBuf>,
    memory_sum: String,
    ended: bool,
    /// Held so that the daemon always has a reader.
    stdout: Option<Box<dyn Iterator<Item = std::io::Result<String>> + Send + Sync>>,
}

impl Daemon {
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// URLs as printed.
    pub fn doors(&self) -> &[String] {
        &self.doors
    }

    /// The TCP door.
    pub fn address(&self) -> SocketAddr {
        self.address_of("memcache://")
    }

    /// The admin port.
    pub fn admin(&self) -> SocketAddr {
        self.address_of("http://")
    }

    /// The first NFS door.
    pub fn nfs(&self) -> SocketAddr {
        self.address_of("nfs+tcp://")
    }

    fn address_of(&self, scheme: &str) -> SocketAddr {
        let rest = self.doors.iter().find_map(|door| door.strip_prefix(scheme)).expect("such a door");
        rest.split('/').next().expect("an address").parse().expect("an address and a port")
    }

    /// A connection to the TCP door.
    pub fn connect(&self) -> Client {
        Client::tcp(self.address())
    }

    /// A connection to the Unix door, if [`Builder::unix`] asked for one.
    pub fn connect_unix(&self) -> Client {
        Client::unix(self.socket.as_ref().expect("Builder::unix was called"))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The directory of its pool, log and sockets.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// What it wrote to stderr so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The line that says what memory is for.
    pub fn memory_sum(&self) -> &str {
        &self.memory_sum
    }

    /// Octets of the sum printed at start.
    pub fn memory_sum_bytes(&self) -> u64 {
        let mib = self.memory_sum.split(' ').nth(1).expect("`memory N MiB = ...`");
        mib.parse::<u64>().expect("mebibytes") << 20
    }

    /// One number of `/proc/PID/status` in octets, e.g. `VmRSS` or `VmHWM`.
    pub fn status_bytes(&self, name: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the daemon runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.expect("such a line").trim().trim_end_matches(" kB").parse::<u64>();
        kib.expect("kibibytes") << 10
    }

    /// Octets resident now.
    pub fn rss_bytes(&self) -> u64 {
        self.status_bytes("VmRSS")
    }

    /// Most octets that were ever resident.
    pub fn rss_max_bytes(&self) -> u64 {
        self.status_bytes("VmHWM")
    }

    /// One number of `stats`.
    pub fn stat(&self, name: &str) -> u64 {
        let stats = self.connect().stats("");
        stats.get(name).unwrap_or_else(|| panic!("no `STAT {name}`")).parse().expect("a whole number")
    }

    /// The body of `GET path` at the admin port.
    pub fn admin_get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.admin()).expect("the admin port accepts");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a read timeout");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: bulkhead\r\nConnection: close\r\n\r\n").expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        body.to_owned()
    }

    /// The sum of all samples of the metric `name`, whatever their labels. `None` if there is none.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let text = self.admin_get("/metrics");
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            if !rest.starts_with([' ', '{']) {
                return None;
            }
            rest.rsplit(' ').next()?.parse::<f64>().ok()
        });
        values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    }

    /// Flushes everything and waits until nothing is held any more: no claim, no pin, no block, no extent.
    ///
    /// # Panics
    /// If something stays, or is not counted.
    pub fn assert_nothing_leaks(&self) {
        self.assert_nothing_leaks_but(&[]);
    }

    /// The same, but for gauges that need not be zero.
    ///
    /// # Panics
    /// As [`Daemon::assert_nothing_leaks`].
    pub fn assert_nothing_leaks_but(&self, others: &[&str]) {
        self.connect().ask("flush_all\r\n", "OK\r\n");
        let gauge = |name: &str| self.metric(name).unwrap_or_else(|| panic!("no metric {name}"));
        const ZERO: [&str; 14] = [
            "bulkhead_store_objects",
            "bulkhead_store_value_bytes",
            "bulkhead_store_index_bytes",
            "bulkhead_store_claims",
            "bulkhead_store_claimed_bytes",
            "bulkhead_store_writers_waiting",
            "bulkhead_store_pins",
            "bulkhead_store_pinned_bytes",
            "bulkhead_arena_dirty_bytes",
            "bulkhead_arena_writing_bytes",
            "bulkhead_arena_clean_bytes",
            "bulkhead_arena_ram_only_bytes",
            "bulkhead_pool_used_bytes",
            "bulkhead_pool_extents",
        ];
        let mut held = Vec::new();
        // The flush takes effect on look-up; space comes back as the crawler passes.
        for _ in 0..1200 {
            let zero = ZERO.iter().filter(|name| !others.contains(name));
            held = zero.map(|name| (*name, gauge(name))).filter(|(_, value)| *value != 0.0).collect();
            let missing = gauge("bulkhead_arena_total_bytes") - gauge("bulkhead_arena_free_bytes");
            if missing != 0.0 {
                held.push(("octets missing in the arena", missing));
            }
            if held.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("still held: {held:?}");
    }

    /// Sends a signal by name, e.g. `TERM`.
    pub fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.pid());
        let status = Command::new("sh").args(["-c", &kill]).status().expect("sh runs");
        assert!(status.success(), "{kill}");
    }

    /// Waits for its end and gives its exit code; -1 when a signal ended it.
    pub fn wait(&mut self) -> i32 {
        self.ended = true;
        self.child.wait().expect("the daemon ends").code().unwrap_or(-1)
    }

    /// Ends it as an operator would.
    ///
    /// # Panics
    /// If it does not leave with 0, or something panicked in it.
    pub fn stop(&mut self) {
        self.signal("TERM");
        let code = self.wait();
        let log = self.log();
        assert!(code == 0 && !log.contains("panicked"), "the daemon left with {code}\n{log}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if std::thread::panicking() {
            let _ = self.child.kill();
            let _ = self.child.wait();
            eprintln!("log of the daemon:\n{}", self.log());
            return;
        }
        self.stop();
    }
}
