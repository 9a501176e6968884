//! The RDMA devices of tests/rdma-vm: their addresses, how siw is set up, what the kernel counts of them and says, and a peer
//! that is not ours.
#![allow(dead_code, reason = "every test file is a crate of its own and uses a part of this")]

pub mod mounts;
pub mod ours;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// An emulated machine is slow; who waits this long waits for ever.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// A device, and its addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Bed {
    pub device: &'static str,
    pub v4: &'static str,
    pub v6: &'static str,
    pub is_iwarp: bool,
}

pub const RXE: Bed = Bed { device: "rxe0", v4: "10.99.0.1", v6: "fd99::1", is_iwarp: false };
pub const SIW: Bed = Bed { device: "siw0", v4: "10.98.0.1", v6: "fd98::1", is_iwarp: true };

/// The devices to try; none, and the reason said, where there are none.
pub fn beds() -> &'static [Bed] {
    let beds = std::env::var("BULKHEAD_TEST_BEDS").unwrap_or_default();
    if !beds.split(',').any(|bed| bed == "verbs") {
        skipped("it needs RDMA devices; tests/rdma-vm/suite brings them");
        return &[];
    }
    &[RXE, SIW]
}

/// Says once that something is skipped, past the test harness, which shows nothing of a test that passes.
pub fn skipped(why: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(why.to_owned()) {
        let _ = std::io::stderr().write_all(format!("skipped: {why}\n").as_bytes());
    }
}

/// Polls until `holds`; `what` says what is missing.
#[track_caller]
pub fn until(what: impl Fn() -> String, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < limit, "{}", what());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What the kernel counts of a device, e.g. `pd 1 cq 1 qp 1 cm_id 0 mr 0 srq 0`. Contexts are left out: librdmacm keeps one
/// open in every process that has used the device. Memory windows are not counted anywhere, but a protection domain goes
/// only when the windows allocated in it are gone, so where no domain is left no window is.
pub fn resources(device: &str) -> String {
    let said = Command::new("rdma").arg("resource").output().expect("iproute2's rdma");
    let said = String::from_utf8(said.stdout).unwrap();
    let line = said.lines().find_map(|line| line.split_once(&format!(" {device}: "))).expect("the device").1;
    let words: Vec<_> = line.split_whitespace().collect();
    let kept = words.chunks_exact(2).filter(|pair| pair[0] != "ctx").map(|pair| pair.join(" "));
    kept.collect::<Vec<_>>().join(" ")
}

/// Waits until the kernel counts as before.
#[track_caller]
pub fn assert_back(device: &str, before: &str) {
    until(|| format!("{device}: {}, before {before}", resources(device)), || resources(device) == before);
}

/// What the kernel counts once it has stopped changing: the last of a connection goes when both ends have said goodbye.
pub fn settled(device: &str) -> String {
    let start = Instant::now();
    let mut before = resources(device);
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let now = resources(device);
        if now == before {
            return now;
        }
        assert!(start.elapsed() < PATIENCE, "{device}: {now}, and it goes on changing");
        before = now;
    }
}

/// How siw is set up. Off, off, 2 is how it comes.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub crc: bool,
    pub peer_to_peer: bool,
    pub revision: u8,
}

pub const STOCK: Settings = Settings { crc: false, peer_to_peer: false, revision: 2 };

/// The settings of siw are the machine's: whoever holds this may change them, and they are as they were afterwards.
pub struct Siw {
    _turn: MutexGuard<'static, ()>,
}

impl Siw {
    pub fn take() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        Self { _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    pub fn set(&self, settings: Settings) {
        let flag = |set| if set { "Y" } else { "N" };
        for (name, value) in [
            ("mpa_crc_required", flag(settings.crc)),
            ("peer_to_peer", flag(settings.peer_to_peer)),
            ("mpa_version", if settings.revision == 1 { "1" } else { "2" }),
        ] {
            let path = format!("/sys/module/siw/parameters/{name}");
            std::fs::write(&path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
        }
    }
}

impl Drop for Siw {
    fn drop(&mut self) {
        self.set(STOCK);
    }
}

/// A running `siw_peer` (tests/rdma-vm/siw_peer.c): a peer on librdmacm alone that does what it is told.
pub struct Program {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl Program {
    /// Where it is, if the suite has built one.
    pub fn path() -> Option<String> {
        std::env::var("BULKHEAD_SIW_PEER").ok()
    }

    pub fn start() -> Self {
        let path = Self::path().expect("tests/rdma-vm/suite builds siw_peer");
        let spawned = Command::new(&path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.unwrap_or_else(|error| panic!("{path}: {error}"));
        let (say, lines) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).all(|line| say.send(line).is_ok()));
        Self { stdin: child.stdin.take(), child, lines }
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.stdin.as_mut().expect("open"), "{command}").expect("the peer lives");
    }

    /// The words of the next line. Meanwhile `turn` is called again and again.
    pub fn hear(&mut self, mut turn: impl FnMut()) -> Vec<String> {
        let start = Instant::now();
        loop {
            match self.lines.recv_timeout(Duration::from_millis(1)) {
                Ok(line) => return line.split(' ').map(str::to_owned).collect(),
                Err(mpsc::RecvTimeoutError::Timeout) => turn(),
                Err(error) => panic!("the peer is gone: {error}"),
            }
            assert!(start.elapsed() < PATIENCE, "the peer says nothing");
        }
    }

    /// Asks for what cannot fail, and gives what comes behind the first word.
    pub fn order(&mut self, turn: impl FnMut(), command: &str, answer: &str) -> Vec<String> {
        self.tell(command);
        let mut words = self.hear(turn);
        assert_eq!(words.remove(0), answer, "{command}: {words:?}");
        words
    }

    /// Asks, and gives all words of the answer.
    pub fn ask(&mut self, command: &str) -> Vec<String> {
        self.tell(command);
        self.hear(|| {})
    }

    /// Listens at any port of `ip`; says which.
    pub fn listen(&mut self, ip: &str) -> u16 {
        self.order(|| {}, &format!("listen {ip} 0"), "listening")[0].parse().unwrap()
    }
}

/// It is killed, with SIGKILL, wherever it stands.
impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As siw_peer writes octets and reads them.
pub fn hex(octets: &[u8]) -> String {
    if octets.is_empty() {
        return "-".into();
    }
    // Megabytes of it, on an emulated machine.
    let digit = |value| char::from(b"0123456789abcdef"[usize::from(value)]);
    octets.iter().flat_map(|octet| [digit(octet >> 4), digit(octet & 15)]).collect()
}

pub fn unhex(word: &str) -> Vec<u8> {
    let octets = if word == "-" { "" } else { word };
    let value = |digit: u8| char::from(digit).to_digit(16).expect("hexadecimal") as u8;
    octets.as_bytes().chunks_exact(2).map(|pair| value(pair[0]) << 4 | value(pair[1])).collect()
}
