//! `Session` without sockets: pipelined requests cut anywhere, disk reads that end in any order or fail, space that comes
//! late or not at all, claims taken back, and an end of the stream at any octet.
//!
//! What was received is judged afterwards by a model that keeps, for each key, every value it may have: one where all is
//! determined, more where a fault leaves it open. Nothing may panic or hang, no reply may be out of order or wrong, and
//! nothing may be kept.

mod rig;

use bulkhead::fabric::staging::Staging;
use bulkhead::metrics::Metrics;
use bulkhead::programs::memcache::engine::Facts;
use bulkhead::programs::memcache::exchange;
use bulkhead::programs::memcache::output::{TAIL_READS, TailRead};
use bulkhead::programs::memcache::session::{Action, Context, End, Session};
use bulkhead::programs::stream::StreamSession;
use bulkhead::store::claims::Revoker;
use bulkhead::store::draft::Want;
use bulkhead::store::segment::{Class, Filling};
use bulkhead::store::{Condition, Gauges, Lookup, Sizes, Store};
use rig::{Disk, Seeded, assert_whole, for_each_seed, grow, octets, write_one};
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const MIB: u64 = 1 << 20;
const HEAD_BYTES: u64 = 64 << 10;
const VALUE_BYTES_MAX: u64 = 2 * MIB;
const STAGING_COUNT: usize = 6;
const OUT_OF_MEMORY: &str = "SERVER_ERROR out of memory storing object\r\n";
const TOO_LARGE: &str = "SERVER_ERROR object too large for cache\r\n";

type Value = Option<Rc<Vec<u8>>>;

#[derive(Clone, Debug)]
enum Ask {
    Store { verb: &'static str, key: String, value: Rc<Vec<u8>>, noreply: bool, intact: bool },
    Get { keys: Vec<String> },
    Delete { key: String, noreply: bool },
    Fixed { reply: &'static str },
}

/// A request, and where in the stream it ends.
struct Request {
    ask: Ask,
    end: usize,
}

fn requests(random: &mut Seeded, count: u64) -> (Vec<u8>, Vec<Request>) {
    let (mut stream, mut requests) = (Vec::new(), Vec::new());
    let mut id = random.next();
    for _ in 0..count {
        let key = format!("k{}", random.below(8));
        let ask = match random.below(20) {
            0..=8 => {
                id += 1;
                let verb = *random.pick(&["set", "set", "set", "set", "add", "replace", "append", "prepend"]);
                let len = match random.below(7) {
                    0 => random.below(4),
                    1 => random.below(500),
                    2 if random.one_in(2) => random.below(9000),
                    2 => 16_300 + random.below(200),
                    3 => random.below(HEAD_BYTES + 200),
                    4 | 5 => 66_000 + random.below(600_000),
                    _ if random.one_in(8) => VALUE_BYTES_MAX + random.below(100),
                    _ => random.below(900_000),
                };
                // Growth is kept well below the largest value, so that only one value itself is ever too large.
                let len = if verb == "append" || verb == "prepend" { len.min(9000) } else { len };
                let (noreply, intact) = (random.one_in(6), !random.one_in(12));
                let value = Rc::new(octets(id, len as usize));
                let quiet = if noreply { " noreply" } else { "" };
                stream.extend_from_slice(format!("{verb} {key} 5 0 {len}{quiet}\r\n").as_bytes());
                stream.extend_from_slice(&value);
                stream.extend_from_slice(if intact { b"\r\n" } else { b"xy" });
                Ask::Store { verb, key, value, noreply, intact }
            }
            9..=15 => {
                let mut keys = vec![key];
                while random.one_in(3) {
                    keys.push(format!("k{}", random.below(9)));
                }
                stream.extend_from_slice(format!("get {}\r\n", keys.join(" ")).as_bytes());
                Ask::Get { keys }
            }
            16 | 17 => {
                let noreply = random.one_in(3);
                let quiet = if noreply { " noreply" } else { "" };
                stream.extend_from_slice(format!("delete {key}{quiet}\r\n").as_bytes());
                Ask::Delete { key, noreply }
            }
            18 => {
                stream.extend_from_slice(b"verbosity 1\r\n");
                Ask::Fixed { reply: "OK\r\n" }
            }
            _ => {
                stream.extend_from_slice(b"nonsense\r\n");
                Ask::Fixed { reply: "ERROR\r\n" }
            }
        };
        requests.push(Request { ask, end: stream.len() });
    }
    (stream, requests)
}

/// What may be stored under each key, and how far the received octets were judged.
struct Judge<'a> {
    may_be: BTreeMap<String, Vec<Value>>,
    received: &'a [u8],
    /// Space was refused or a value evicted at some time: a storage command may fail and a key be gone.
    refused: bool,
    /// A disk read failed: any key may be gone.
    failed: bool,
}

impl<'a> Judge<'a> {
    fn values(&mut self, key: &str) -> Vec<Value> {
        let mut values = self.may_be.get(key).cloned().unwrap_or_else(|| vec![None]);
        if (self.failed || self.refused) && !values.contains(&None) {
            values.push(None);
        }
        values
    }

    fn take(&mut self, reply: &str) -> bool {
        let Some(rest) = self.received.strip_prefix(reply.as_bytes()) else { return false };
        self.received = rest;
        true
    }

    fn shown(&self) -> String {
        format!("{:?}", self.received[..self.received.len().min(80)].escape_ascii().to_string())
    }

    /// Keeps what agrees with the reply that was received.
    fn settle(&mut self, key: &str, outcomes: Vec<(&str, Value)>, noreply: bool) {
        let mut left: Vec<Value> = Vec::new();
        if noreply {
            left.extend(outcomes.into_iter().map(|(_, value)| value));
        } else {
            let found =
                outcomes.iter().map(|(reply, _)| *reply).find(|reply| self.received.starts_with(reply.as_bytes()));
            let Some(reply) = found else {
                let wanted: Vec<&str> = outcomes.iter().map(|(reply, _)| *reply).collect();
                panic!("{} instead of one of {wanted:?}", self.shown());
            };
            assert!(self.take(reply));
            left.extend(outcomes.into_iter().filter(|(other, _)| *other == reply).map(|(_, value)| value));
        }
        left.dedup();
        self.may_be.insert(key.to_owned(), left);
    }

    fn judge(&mut self, ask: &Ask) {
        match ask {
            Ask::Fixed { reply } => assert!(self.take(reply), "{} instead of {reply:?}", self.shown()),
            Ask::Delete { key, noreply } => {
                let outcomes = self.values(key).into_iter();
                let outcomes =
                    outcomes.map(|value| (if value.is_some() { "DELETED\r\n" } else { "NOT_FOUND\r\n" }, None));
                self.settle(key, outcomes.collect(), *noreply);
            }
            Ask::Store { verb, key, value, noreply, intact } => {
                let mut outcomes: Vec<(&str, Value)> = Vec::new();
                for old in self.values(key) {
                    if value.len() as u64 > VALUE_BYTES_MAX {
                        outcomes.push((TOO_LARGE, if *verb == "set" { None } else { old }));
                        continue;
                    }
                    if self.refused {
                        outcomes.push((OUT_OF_MEMORY, if *verb == "set" { None } else { old.clone() }));
                    }
                    if !intact {
                        outcomes.push(("CLIENT_ERROR bad data chunk\r\n", old));
                        continue;
                    }
                    let joined = |front: &[u8], back: &[u8]| Some(Rc::new([front, back].concat()));
                    outcomes.push(match (*verb, &old) {
                        ("add", Some(_)) | ("replace" | "append" | "prepend", None) => ("NOT_STORED\r\n", old),
                        ("append", Some(old)) => ("STORED\r\n", joined(old, value)),
                        ("prepend", Some(old)) => ("STORED\r\n", joined(value, old)),
                        _ => ("STORED\r\n", Some(value.clone())),
                    });
                }
                self.settle(key, outcomes, *noreply);
            }
            Ask::Get { keys } => {
                for key in keys {
                    let values = self.values(key);
                    if !self.received.starts_with(format!("VALUE {key} ").as_bytes()) {
                        // A read that failed makes a miss, whatever the index says meanwhile.
                        let may_miss = self.failed || values.contains(&None);
                        assert!(may_miss, "{} instead of {key}", self.shown());
                        if !self.failed {
                            self.may_be.insert(key.clone(), vec![None]);
                        }
                        continue;
                    }
                    let matches = |value: &&Rc<Vec<u8>>| {
                        let line = format!("VALUE {key} 5 {}\r\n", value.len());
                        self.received.strip_prefix(line.as_bytes()).is_some_and(|rest| {
                            rest.strip_prefix(value.as_slice()).is_some_and(|rest| rest.starts_with(b"\r\n"))
                        })
                    };
                    let found = values.iter().flatten().find(matches).cloned();
                    let Some(found) = found else { panic!("wrong octets for {key}: {}", self.shown()) };
                    let len = format!("VALUE {key} 5 {}\r\n", found.len()).len() + found.len() + 2;
                    self.received = &self.received[len..];
                    self.may_be.insert(key.clone(), vec![Some(found)]);
                }
                assert!(self.take("END\r\n"), "{} instead of the end of a retrieval", self.shown());
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Faults {
    /// Space is refused and claims are taken back.
    space: bool,
    /// Reads fail.
    reads: bool,
}

struct Sim {
    random: Seeded,
    faults: Faults,
    store: Store,
    disk: Disk,
    staging: Staging,
    session: Session,
    actions: Vec<Action>,
    /// Memory that others hold.
    hog: Vec<Filling>,
    /// Messages of revoked claims not yet delivered.
    revoked: Arc<AtomicUsize>,
    received: Vec<u8>,
    refusals: u64,
    failures: u64,
}

impl Sim {
    fn new(seed: u64, faults: Faults) -> Self {
        let store = Store::new(Sizes {
            memory_bytes: 4 * MIB,
            head_bytes: HEAD_BYTES,
            value_bytes_max: VALUE_BYTES_MAX,
            index_bytes_max: 16 * MIB,
            pinned_share: 0.25,
            pool_bytes: vec![64 * MIB],
        })
        .unwrap();
        while grow(&store) {}
        let context = Context {
            store: store.clone(),
            metrics: Arc::new(Metrics::default()),
            facts: Arc::new(Facts { started: Instant::now(), lanes: 1, connections_max: 1 }),
            pins_max: 8,
            line_bytes_max: 2048,
            reserve_wait_ms: 60_000,
        };
        let revoked = Arc::new(AtomicUsize::new(0));
        let told = revoked.clone();
        let revoker: Revoker = Arc::new(move || _ = told.fetch_add(1, Ordering::Relaxed));
        Self {
            random: Seeded::new(seed),
            faults,
            store,
            disk: Disk::default(),
            staging: Staging::new(STAGING_COUNT).unwrap(),
            session: Session::new(context, revoker),
            actions: Vec::new(),
            hog: Vec::new(),
            revoked,
            received: Vec::new(),
            refusals: 0,
            failures: 0,
        }
    }

    /// As a connection does after everything that happened.
    fn turn(&mut self) {
        self.session.process();
        while let Some(action) = self.session.poll_action() {
            self.actions.push(action);
        }
    }

    fn feed(&mut self, octets: &[u8]) -> usize {
        if !self.session.wants_input() || octets.is_empty() {
            return 0;
        }
        let most = *self.random.pick(&[1, 2, 50, 3000, 20_000, 300_000]);
        let count = (1 + self.random.below(most) as usize).min(octets.len());
        let (direct, buffer) = self.session.targets();
        let first = count.min(direct.len());
        direct[..first].copy_from_slice(&octets[..first]);
        let second = (count - first).min(buffer.len());
        buffer[..second].copy_from_slice(&octets[first..first + second]);
        assert!(first + second > 0, "octets are wanted and there is nowhere to put them");
        self.session.handle_input(first + second);
        first + second
    }

    fn send(&mut self) -> bool {
        let mut slices: Vec<IoSlice<'_>> = Vec::new();
        let offered = self.session.gather(&mut slices);
        assert_eq!(offered, slices.iter().map(|slice| slice.len()).sum::<usize>());
        if offered == 0 {
            return false;
        }
        let count = if self.random.one_in(3) { offered } else { 1 + self.random.below(offered as u64) as usize };
        let whole: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        self.received.extend_from_slice(&whole[..count]);
        drop(slices);
        self.session.handle_sent(count);
        true
    }

    fn refuses(&mut self) -> bool {
        let refuses = self.faults.space && self.random.one_in(10);
        self.refusals += u64::from(refuses);
        refuses
    }

    /// Does one of the things the session asked for.
    fn answer(&mut self) {
        if self.actions.is_empty() {
            return;
        }
        let index = self.random.below(self.actions.len() as u64) as usize;
        match self.actions.swap_remove(index) {
            Action::Ask(exchange::Ask::Reserve { len }) => {
                let told = self.revoked.clone();
                let revoker: Revoker = Arc::new(move || _ = told.fetch_add(1, Ordering::Relaxed));
                let claim = if self.refuses() { None } else { self.store.try_claim(len, true, &revoker) };
                self.store.claims().set_queued(0);
                self.refusals += u64::from(claim.is_none());
                self.session.handle_claim(claim);
            }
            Action::Ask(exchange::Ask::Fill { want }) => match self.store.fill(want) {
                _ if self.refuses() => self.session.handle_segment(None),
                Ok(filling) => self.session.handle_segment(Some(filling)),
                Err(_) if self.make_room() => self.actions.push(Action::Ask(exchange::Ask::Fill { want })),
                Err(_) => {
                    self.refusals += 1;
                    self.session.handle_segment(None);
                }
            },
            Action::Ask(exchange::Ask::Retry) => {
                self.make_room();
                self.session.handle_retry();
            }
            Action::Read(read) => self.read(read),
        }
    }

    fn read(&mut self, read: TailRead) {
        let TailRead { ticket, segment, extent, crcs } = read;
        if self.random.one_in(8) {
            return self.session.handle_read_back(ticket);
        }
        if self.faults.reads && self.random.one_in(4) {
            self.failures += 1;
            return self.session.handle_read(ticket, None);
        }
        let Some(mut buf) = self.staging.try_take() else { return self.session.handle_read_back(ticket) };
        let octets = self.disk.read(extent, crcs);
        assert_eq!(octets.len(), segment.len() as usize);
        buf.as_mut_slice()[..octets.len()].copy_from_slice(&octets);
        self.session.handle_read(ticket, Some(buf));
    }

    /// What the `Store` actor and the peer's patience do: write behind, and let go of what is not taken.
    fn make_room(&mut self) -> bool {
        let mut wrote = !self.hog.is_empty();
        self.hog.clear();
        while write_one(&self.store, &self.disk, true, false) {
            wrote = true;
        }
        self.session.give_back_memory();
        wrote || self.store.fill(Want { class: Class::Large, remaining: 256 << 10, head: false }).is_ok()
    }

    /// Sends everything clean out of RAM.
    fn make_cold(&mut self) {
        while write_one(&self.store, &self.disk, true, false) {}
        self.session.give_back_memory();
        // Small enough to be found among what is clean, so that nothing has to be evicted for it.
        let want = Want { class: Class::Large, remaining: 32 << 10, head: false };
        let mut held: Vec<Filling> = Vec::new();
        let goes_on = |gauges: Gauges| {
            gauges.memory_clean_bytes > 0 && gauges.memory_free_bytes.max(gauges.memory_clean_bytes) >= 512 << 10
        };
        while goes_on(self.store.gauges()) {
            let Ok(filling) = self.store.fill(want) else { break };
            held.push(filling);
        }
    }

    /// Others take all the memory there is.
    fn hog(&mut self) {
        let want = Want { class: Class::Large, remaining: 256 << 10, head: false };
        while let Ok(filling) = self.store.fill(want) {
            self.hog.push(filling);
        }
    }

    fn revoke(&mut self) {
        let later_ms = self.store.clock().now_ms() + 10;
        self.refusals += self.store.claims().revoke_idle(later_ms, 0) as u64;
    }

    fn deliver_revocation(&mut self) {
        if self.revoked.load(Ordering::Relaxed) > 0 {
            self.revoked.fetch_sub(1, Ordering::Relaxed);
            self.session.handle_revoked();
        }
    }

    /// Runs until the session is over or, if `until_idle`, has answered all of `stream`. Returns the octets it took.
    fn run(&mut self, stream: &[u8], until_idle: bool) -> usize {
        let (mut fed, mut ended) = (0, false);
        for _ in 0..2_000_000 {
            match self.random.below(24) {
                0..=6 => {
                    fed += self.feed(&stream[fed..]);
                    if fed == stream.len() && !until_idle && !ended && self.session.wants_input() {
                        self.session.handle_eof();
                        ended = true;
                    }
                }
                7..=12 => _ = self.send(),
                13..=17 => self.answer(),
                18 => _ = write_one(&self.store, &self.disk, true, false),
                19 if !self.faults.space || self.random.one_in(2) => self.make_cold(),
                19 if self.faults.space => self.hog(),
                20 if self.random.one_in(4) => _ = self.session.give_back(),
                21 if self.random.one_in(4) => self.session.give_back_memory(),
                22 if self.faults.space && self.random.one_in(6) => self.revoke(),
                23 => self.deliver_revocation(),
                _ => {}
            }
            self.turn();
            if self.session.ended().is_some() {
                return fed;
            }
            if until_idle && fed == stream.len() && self.session.is_idle() {
                return fed;
            }
        }
        panic!("the session hangs: {fed} of {} octets in, {} actions", stream.len(), self.actions.len());
    }

    fn judge(&self, requests: &[Request], fed: usize) {
        let evicted = self.store.counters().evictions.load(Ordering::Relaxed) > 0;
        assert!(self.faults.space || !evicted, "evicted with room for all");
        let mut judge = Judge {
            may_be: BTreeMap::new(),
            received: &self.received,
            refused: self.refusals > 0 || evicted,
            failed: self.failures > 0,
        };
        let broken = self.session.ended() == Some(End::FailedRead);
        if broken {
            assert!(self.failures >= 2, "given up without two failed tries");
            // What was begun and never ended cannot be judged as a whole; the replies before it can.
            return;
        }
        for request in requests.iter().take_while(|request| request.end <= fed) {
            judge.judge(&request.ask);
        }
        // A request cut short may have been refused before its end.
        let rest = judge.received;
        assert!(
            rest.is_empty() || rest == TOO_LARGE.as_bytes() || rest == OUT_OF_MEMORY.as_bytes() && judge.refused,
            "{} after the last reply",
            judge.shown()
        );
    }

    fn finish(self) {
        let Self { store, staging, session, actions, hog, .. } = self;
        drop((session, actions, hog));
        assert_eq!(staging.available(), STAGING_COUNT, "a buffer was kept");
        let gauges = store.gauges();
        assert_eq!((gauges.pins, gauges.pinned_bytes, gauges.claims), (0, 0, 0));
        let now = store.clock().now();
        (0..9).for_each(|key| _ = store.delete(format!("k{key}").as_bytes(), now));
        store.delete(b"big", now);
        assert_whole(&store);
    }

    fn store_value(&mut self, key: &[u8], value: &[u8]) {
        let mut draft = self.store.draft(value.len() as u64, None);
        let mut at = 0;
        while at < value.len() {
            if let Some(want) = draft.want() {
                let Ok(filling) = self.store.fill(want) else {
                    assert!(self.make_room(), "no room with nothing held");
                    continue;
                };
                draft.begin(filling);
            }
            at += draft.put(&value[at..]);
        }
        self.store.commit(key, draft, 0, 0, Condition::Any, self.store.clock().now());
    }

    /// Feeds all of `octets` and processes them.
    fn feed_all(&mut self, mut octets: &[u8]) {
        while !octets.is_empty() {
            let fed = self.feed(octets);
            assert!(fed > 0, "octets are not wanted");
            octets = &octets[fed..];
            self.session.process();
        }
    }

    /// Answers every disk read the session wants; how many that were.
    fn answer_reads(&mut self) -> usize {
        let mut reads = 0;
        while let Some(action) = self.session.poll_action() {
            let Action::Read(TailRead { ticket, segment, extent, crcs }) = action else { panic!("{action:?}") };
            let mut buf = self.staging.try_take().expect("a buffer is free");
            buf.as_mut_slice()[..segment.len() as usize].copy_from_slice(&self.disk.read(extent, crcs));
            self.session.handle_read(ticket, Some(buf));
            reads += 1;
        }
        reads
    }

    /// After all was sent, every buffer of the connection can be used again.
    fn assert_buffers_usable(&mut self) {
        assert_eq!(self.staging.available(), STAGING_COUNT, "a buffer was kept");
        self.faults = Faults { space: false, reads: false };
        let value = octets(77, 1_900_000);
        self.store_value(b"big", &value);
        let now = self.store.clock().now();
        self.make_cold();
        self.hog();
        self.hog.clear();
        let Lookup::Hit(pinned) = self.store.get(b"big", now) else { panic!("it was just stored") };
        assert!(pinned.pieces().iter().all(|piece| !piece.segment.is_resident()), "{:?}", self.store.gauges());
        drop(pinned);
        self.feed_all(b"get big\r\n");
        let reads = self.answer_reads();
        assert_eq!(reads, TAIL_READS, "the count of buffers in use went wrong");
        self.received.clear();
        self.run(b"", true);
        let wanted = [format!("VALUE big 0 {}\r\n", value.len()).as_bytes(), &value, b"\r\nEND\r\n"].concat();
        assert!(self.received == wanted, "wrong octets at the end");
    }
}

fn simulate(seed: u64, faults: Faults) {
    let mut random = Seeded::new(seed ^ 0xabcd);
    let count = 5 + random.below(80);
    let (stream, requests) = requests(&mut random, count);
    let mut sim = Sim::new(seed, faults);
    if random.one_in(2) {
        let cut = random.below(stream.len() as u64 + 1) as usize;
        let fed = sim.run(&stream[..cut], false);
        sim.judge(&requests, fed);
    } else {
        let fed = sim.run(&stream, true);
        sim.judge(&requests, fed);
        if sim.session.ended().is_none() {
            // Reads of a value that became a miss may still be under way.
            for action in std::mem::take(&mut sim.actions) {
                if let Action::Read(read) = action {
                    sim.session.handle_read_back(read.ticket);
                }
            }
            sim.assert_buffers_usable();
        }
    }
    sim.finish();
}

#[test]
fn replies_are_right_and_in_order_however_the_stream_is_cut() {
    for_each_seed(0..60, |seed| simulate(seed, Faults { space: false, reads: false }));
}

#[test]
fn refused_space_and_revoked_claims_lose_values_but_never_the_order() {
    for_each_seed(1000..1060, |seed| simulate(seed, Faults { space: true, reads: false }));
}

#[test]
fn failed_reads_are_misses_or_the_end_and_never_wrong_octets() {
    for_each_seed(2000..2060, |seed| simulate(seed, Faults { space: false, reads: true }));
}

#[test]
fn all_faults_at_once_leave_nothing_behind() {
    for_each_seed(3000..3060, |seed| simulate(seed, Faults { space: true, reads: true }));
}

/// The claim is judged idle, then the peer moves and its next segment has to be waited for, then word of the judgement
/// comes. The segment that was asked for must not reach the value behind, which is shorter.
#[test]
fn a_value_whose_claim_is_taken_back_takes_the_segment_it_waits_for() {
    let mut sim = Sim::new(1, Faults { space: false, reads: false });
    sim.feed_all(b"set a 5 0 700000\r\n");
    sim.feed_all(&vec![b'a'; 65_536]);
    sim.revoke();
    assert_eq!(sim.refusals, 1);
    sim.hog();
    let mut sent = 65_536;
    while sim.session.wants_input() {
        sent += sim.feed(&vec![b'a'; 700_000 - sent]);
        sim.session.process();
    }
    let Some(Action::Ask(exchange::Ask::Fill { want: first })) = sim.session.poll_action() else {
        panic!("a segment is wanted")
    };
    sim.deliver_revocation();
    sim.session.process();
    if sim.session.wants_input() {
        let rest = [&vec![b'a'; 700_000 - sent][..], b"\r\nset b 5 0 70000\r\n", &[b'b'; 20_000]].concat();
        sim.feed_all(&rest);
    }
    sim.hog.clear();
    sim.session.handle_segment(sim.store.fill(first).ok());
    sim.session.process();
    while sim.send() {}
    assert_eq!(String::from_utf8_lossy(&sim.received), OUT_OF_MEMORY);
    assert_eq!(sim.store.gauges().claims, 0);
    sim.finish();
}

/// All buffers hold pieces behind one that was in RAM and left it while the peer took nothing.
#[test]
fn a_piece_that_left_ram_before_it_was_sent_gets_a_buffer() {
    let mut sim = Sim::new(1, Faults { space: false, reads: false });
    let value = octets(5, 1_900_000);
    sim.store_value(b"big", &value);
    sim.make_cold();
    sim.hog();
    sim.hog.clear();
    let now = sim.store.clock().now();
    let Lookup::Hit(pinned) = sim.store.get(b"big", now) else { panic!("it was just stored") };
    let head = pinned.pieces()[0].segment.clone();
    // Read twice in a row: kept.
    for _ in 0..2 {
        sim.store.warm(&head, &value[..head.len() as usize]);
    }
    assert!(head.is_resident());
    drop(pinned);
    sim.feed_all(b"get big\r\n");
    let mut bufs = Vec::new();
    while let Some(action) = sim.session.poll_action() {
        let Action::Read(read) = action else { panic!("{action:?}") };
        let mut buf = sim.staging.try_take().expect("a buffer is free");
        buf.as_mut_slice()[..read.segment.len() as usize].copy_from_slice(&sim.disk.read(read.extent, read.crcs));
        sim.session.handle_read(read.ticket, Some(buf));
        bufs.push(read.ticket);
    }
    assert_eq!(bufs.len(), TAIL_READS);
    sim.session.give_back_memory();
    sim.hog();
    sim.hog.clear();
    assert!(!head.is_resident());
    let Some(Action::Read(read)) = sim.session.poll_action() else { panic!("the front is not read") };
    assert!(Arc::ptr_eq(&read.segment, &head));
    sim.session.handle_read_back(read.ticket);
    drop((read, head));
    sim.run(b"", true);
    let wanted = [format!("VALUE big 0 {}\r\n", value.len()).as_bytes(), &value, b"\r\nEND\r\n"].concat();
    assert!(sim.received == wanted, "wrong octets");
    sim.finish();
}

/// A reader that takes nothing keeps no more memory than the window, whatever it asked for, and none that a writer
/// waits for.
#[test]
fn a_reader_that_takes_nothing_leaves_the_memory_to_writers() {
    let mut sim = Sim::new(1, Faults { space: false, reads: false });
    let value = octets(6, 400_000);
    for key in 0..8 {
        sim.store_value(format!("k{key}").as_bytes(), &value);
    }
    while write_one(&sim.store, &sim.disk, true, false) {}
    sim.feed_all(b"get k0 k1 k2 k3 k4 k5 k6 k7\r\n");
    assert!(sim.session.poll_action().is_none(), "all is in RAM");
    assert!(sim.session.is_stalled(u64::MAX), "the peer's turn, and it does nothing");
    // Everybody else may have all but the window and a segment.
    sim.hog();
    let hogged = sim.hog.len() as u64 * (256 << 10);
    assert!(hogged >= 4 * MIB - (2 * MIB + (512 << 10)), "{hogged} of {}", 4 * MIB);
    sim.session.give_back_memory();
    assert!(sim.session.is_stalled(u64::MAX), "letting go is no sign of life");
    sim.hog();
    assert_eq!(sim.store.gauges().memory_clean_bytes, 0, "memory is kept for a peer that takes nothing");
    sim.hog.clear();
    sim.run(b"", true);
    let mut wanted = Vec::new();
    for key in 0..8 {
        wanted.extend_from_slice(format!("VALUE k{key} 0 400000\r\n").as_bytes());
        wanted.extend_from_slice(&value);
        wanted.extend_from_slice(b"\r\n");
    }
    wanted.extend_from_slice(b"END\r\n");
    assert!(sim.received == wanted, "wrong octets");
    sim.finish();
}
