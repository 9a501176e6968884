//! Two endpoints of the native protocol over a link that delays, reorders what may be reordered, fails and breaks; in fake
//! time, against a map of what was stored. Everything follows from a seed:
//!
//! ```text
//! BULKHEAD_SIM_SEED=17 cargo test --test sim_native -- --nocapture
//! ```
//!
//! runs that seed alone, and `BULKHEAD_SIM_TIMES=100` as many times more seeds than usual. Both sides check every octet of every value, that no window or slot is lost, and that nothing
//! stands still.

use bulkhead::wire::memcache::{Command, response};
use bulkhead::wire::native::conversation::{Conversation, Step};
use bulkhead::wire::native::descriptor::{
    Descriptor, Negotiated, Nonce, RemoteAddress, RemoteKey, RingGeometry, WindowGeometry,
};
use bulkhead::wire::native::egress::{Completed, Egress, Post, WorkId};
use bulkhead::wire::native::endpoint::{EndCause, Endpoint, FailedPiece, Settings};
use bulkhead::wire::native::poison::Poison;
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::requester::{Answer, Requester, Shape};
use bulkhead::wire::native::ring::{ControlRing, READBACK_OFFSET, RingMemory, SLOTS_OFFSET};
use bulkhead::wire::native::stream::{Inbound, Outbound, Piece, Value};
use bulkhead::wire::native::window::{RxLease, RxWindows, Ticket, TxSlots};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

#[path = "common/pattern.rs"]
#[allow(dead_code, reason = "shared by several tests, of which this needs a part")]
mod pattern;
use pattern::Pattern;

/// Numbers that look random and follow from a seed alone (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % below
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.roll(count) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len() as u64) as usize]
    }

    fn delay(&mut self) -> Duration {
        Duration::from_nanos(self.roll(20_000) + 1)
    }
}

/// Memory of one side that the other reaches.
struct Memory {
    own: Descriptor,
    ring: RefCell<Vec<u8>>,
    rx: RefCell<Vec<u8>>,
    tx: RefCell<Vec<u8>>,
}

impl RingMemory for Memory {
    fn load(&self, offset: usize) -> u64 {
        u64::from_le_bytes(*self.ring.borrow()[offset..].first_chunk().unwrap())
    }

    fn store(&self, offset: usize, word: u64) {
        self.ring.borrow_mut()[offset..offset + 8].copy_from_slice(&word.to_le_bytes());
    }
}

impl Memory {
    fn new(side: u32, slot_count: u32, window_bytes: u64, window_count: u32, nonce: Nonce) -> Self {
        let ring = RingGeometry::new(slot_count).unwrap();
        let windows = WindowGeometry::new(window_bytes, window_count).unwrap();
        let rx_address = 0x7000_0000_0000 + u64::from(side) * 0x100_0000_0000;
        let own = Descriptor {
            ring,
            ring_at: RemoteAddress { address: 0x6000_0000_0000 + u64::from(side), key: RemoteKey(10 + side) },
            ring_bytes: ring.mapping_bytes(4096) as u32,
            nonce,
            windows,
            bulk_at: RemoteAddress { address: windows.bulk_address(rx_address).unwrap(), key: RemoteKey(20 + side) },
        };
        let half = vec![0; windows.half_bytes() as usize];
        let ring = RefCell::new(vec![0; own.ring_bytes as usize]);
        Self { own, ring, rx: RefCell::new(half.clone()), tx: RefCell::new(half) }
    }

    /// The peer's Write. It must hit the slots or the RX half, with their key.
    fn write(&self, to: RemoteAddress, octets: &[u8]) {
        let (base, memory, from) = if to.key == self.own.ring_at.key {
            (self.own.ring_at.address, &self.ring, SLOTS_OFFSET)
        } else {
            assert_eq!(to.key, self.own.bulk_at.key, "a key of nothing");
            (self.own.bulk_at.address + self.own.windows.half_bytes(), &self.rx, 0)
        };
        let at = to.address.checked_sub(base).expect("a Write below its region") as usize;
        assert!(at >= from, "a Write into the header of the ring");
        memory.borrow_mut()[at..at + octets.len()].copy_from_slice(octets);
    }

    fn copy_lease(&self, lease: &RxLease) -> Vec<u8> {
        self.rx.borrow()[lease.offset() as usize..][..lease.len() as usize].to_vec()
    }

    fn fill(&self, slot: u32, octets: &[u8]) {
        let at = slot as usize * self.own.windows.window_bytes() as usize;
        self.tx.borrow_mut()[at..at + octets.len()].copy_from_slice(octets);
    }
}

#[derive(Debug)]
enum Event {
    WriteArrives {
        side: usize,
        to: RemoteAddress,
        octets: Vec<u8>,
    },
    /// Octets leave the slot only now, as from a network card.
    BodyArrives {
        side: usize,
        slot: u32,
        len: u32,
        to: RemoteAddress,
    },
    CounterIsRead {
        side: usize,
    },
    Done {
        side: usize,
        id: WorkId,
        is_read: bool,
    },
    Filled {
        side: usize,
        ticket: Ticket,
        octets: Option<(u32, Vec<u8>)>,
    },
    Wake {
        side: usize,
    },
}

/// The link, the disks, and time.
struct Net {
    now: Duration,
    events: BTreeMap<(Duration, u64), Event>,
    count: u64,
    dice: Dice,
    arrived: [Duration; 2],
    done: [Duration; 2],
    memory: [Rc<Memory>; 2],
    /// What the one Read of each side has found.
    counter: [u64; 2],
}

impl Net {
    fn new(dice: Dice, memory: [Rc<Memory>; 2]) -> Self {
        let zero = [Duration::ZERO; 2];
        let now = Duration::from_secs(1);
        Self { now, events: BTreeMap::new(), count: 0, dice, arrived: zero, done: zero, memory, counter: [0; 2] }
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.count += 1;
        self.events.insert((time, self.count), event);
    }

    /// When the next request of `side` arrives: in the order of posting.
    fn arrival(&mut self, side: usize) -> Duration {
        let delay = if self.dice.one_in(50) { self.dice.delay() * 50 } else { self.dice.delay() };
        self.arrived[side] = self.arrived[side].max(self.now + delay);
        self.arrived[side]
    }

    fn complete(&mut self, side: usize, arrival: Duration, id: WorkId, is_read: bool) {
        self.done[side] = self.done[side].max(arrival + self.dice.delay());
        self.at(self.done[side], Event::Done { side, id, is_read });
    }

    fn post(&mut self, side: usize, post: Post) {
        match post {
            Post::Control { id, to, write, signaled } => {
                let arrival = self.arrival(side);
                self.at(arrival, Event::WriteArrives { side: 1 - side, to, octets: write.octets().to_vec() });
                if signaled {
                    self.complete(side, arrival, id, false);
                }
            }
            Post::Body { id, slot, len, to, ready_id, ready_to, ready } => {
                assert_eq!(ready_id.0, id.0 + 1);
                let arrival = self.arrival(side);
                self.at(arrival, Event::BodyArrives { side: 1 - side, slot, len, to });
                self.complete(side, arrival, id, false);
                let arrival = self.arrival(side);
                let octets = ready.octets().to_vec();
                self.at(arrival, Event::WriteArrives { side: 1 - side, to: ready_to, octets });
            }
            Post::Credits { id, from } => {
                assert_eq!(from, self.memory[1 - side].own.ring_at);
                let arrival = self.arrival(side);
                self.at(arrival, Event::CounterIsRead { side });
                self.complete(side, arrival, id, true);
            }
        }
    }

    /// What the link does by itself; gives what one side must be told.
    fn happen(&mut self, event: Event) -> Told {
        match event {
            Event::WriteArrives { side, to, octets } => {
                self.memory[side].write(to, &octets);
                // Nobody looks all the time: several records may have come by then.
                if self.dice.one_in(2) {
                    return Told::Look(side);
                }
                let time = self.now + self.dice.delay() * 2;
                self.at(time, Event::Wake { side });
                Told::Nothing
            }
            Event::BodyArrives { side, slot, len, to } => {
                let from = &self.memory[1 - side];
                let at = slot as usize * from.own.windows.window_bytes() as usize;
                let octets = from.tx.borrow()[at..at + len as usize].to_vec();
                self.memory[side].write(to, &octets);
                Told::Nothing
            }
            Event::CounterIsRead { side } => {
                self.counter[side] = self.memory[1 - side].load(0);
                Told::Nothing
            }
            Event::Done { side, id, is_read } => {
                if is_read {
                    self.memory[side].store(READBACK_OFFSET, self.counter[side]);
                }
                Told::Done(side, id)
            }
            Event::Filled { side, ticket, octets } => {
                let is_filled = octets.is_some();
                if let Some((slot, octets)) = octets {
                    self.memory[side].fill(slot, &octets);
                }
                Told::Filled(side, ticket, is_filled)
            }
            Event::Wake { side } => Told::Look(side),
        }
    }
}

enum Told {
    Nothing,
    Look(usize),
    Done(usize, WorkId),
    Filled(usize, Ticket, bool),
}

/// Either side, or a peer that plays one.
trait Side {
    fn done(&mut self, id: WorkId, net: &Net) -> Result<(), EndCause>;
    fn filled(&mut self, ticket: Ticket, is_filled: bool, net: &Net);
    /// Does all that can be done now.
    fn drive(&mut self, net: &mut Net) -> Result<(), EndCause>;
    fn disconnect(&mut self);
    fn is_released(&self) -> bool;
}

/// A value as the server keeps it: octets that follow from the flags.
#[derive(Clone, Debug)]
struct Stored {
    key: u8,
    flags: u32,
    octets: Rc<Vec<u8>>,
}

/// What outlives connections.
#[derive(Default)]
struct Store {
    values: HashMap<u8, Stored>,
    /// Key and flags of values whose octets a disk lost.
    lost: BTreeSet<(u8, u32)>,
}

struct Server {
    endpoint: Endpoint<Stored, Conversation>,
    store: Rc<RefCell<Store>>,
    storing: Option<(u8, u32, Vec<u8>)>,
    paused_until: Duration,
    /// Slots that are being filled must all come back.
    reads: usize,
    failing: bool,
}

fn key_of(text: &[u8]) -> u8 {
    text.strip_prefix(b"k")
        .and_then(|n| std::str::from_utf8(n).ok())
        .and_then(|n| n.parse().ok())
        .expect("a key of ours")
}

impl Server {
    fn step(&mut self, net: &mut Net) -> Result<bool, EndCause> {
        let now = net.now;
        if now < self.paused_until || self.endpoint.outbound.text_bytes() > 4096 {
            return Ok(false);
        }
        let pauses = net.dice.one_in(16);
        if pauses {
            self.paused_until = now + net.dice.delay() * 4;
            let until = self.paused_until;
            net.at(until, Event::Wake { side: 1 });
            return Ok(false);
        }
        let Endpoint { inbound, outbound, machine, .. } = &mut self.endpoint;
        match machine.step(inbound)? {
            Step::NeedMore => return Ok(false),
            Step::Command(Command::Store(header)) => {
                self.storing = Some((key_of(header.key), header.flags, Vec::new()));
                let len = header.len;
                machine.accept_body(len);
            }
            Step::Command(Command::Get { keys, .. }) => {
                for key in keys {
                    let found = self.store.borrow().values.get(&key_of(key)).cloned();
                    let Some(value) = found else { continue };
                    let mut line = Vec::new();
                    let len = value.octets.len() as u64;
                    response::value_line(&mut line, key, value.flags, len, None);
                    let quick_len = net.dice.pick(&[0, 0, len / 2, len]);
                    outbound.value(&line, Value { source: value, len, quick_len });
                }
                outbound.text(response::END);
            }
            Step::Command(Command::Delete { key, .. }) => {
                let found = self.store.borrow_mut().values.remove(&key_of(key)).is_some();
                outbound.text(if found { response::DELETED } else { response::NOT_FOUND });
            }
            Step::Command(Command::Version) => outbound.text(b"VERSION 1\r\n"),
            Step::Body { .. } => {
                let lease = machine.take_body(inbound);
                let octets = net.memory[1].copy_lease(&lease);
                self.storing.as_mut().unwrap().2.extend_from_slice(&octets);
            }
            Step::BodyEnd => {
                let (key, flags, octets) = self.storing.take().unwrap();
                Pattern(flags.into()).check(0, &octets, "stored");
                let stored = Stored { key, flags, octets: Rc::new(octets) };
                self.store.borrow_mut().values.insert(key, stored);
                outbound.text(response::STORED);
            }
            step => panic!("{step:?}"),
        }
        Ok(true)
    }
}

/// The octets of a piece of what a server keeps.
fn piece_of(piece: &Piece<Stored>) -> Vec<u8> {
    piece.value.octets[piece.offset as usize..][..piece.len as usize].to_vec()
}

impl Side for Server {
    fn done(&mut self, id: WorkId, net: &Net) -> Result<(), EndCause> {
        self.endpoint.handle_completion(id, || net.memory[1].load(READBACK_OFFSET), net.now)
    }

    fn filled(&mut self, ticket: Ticket, is_filled: bool, _: &Net) {
        self.reads -= 1;
        if is_filled {
            return self.endpoint.handle_filled(ticket);
        }
        match self.endpoint.handle_fill_failed(ticket) {
            None => {}
            Some(FailedPiece::Missed(value) | FailedPiece::Broken(value)) => {
                let mut store = self.store.borrow_mut();
                store.lost.insert((value.key, value.flags));
                if store.values.get(&value.key).is_some_and(|stored| stored.flags == value.flags) {
                    store.values.remove(&value.key);
                }
            }
        }
    }

    fn drive(&mut self, net: &mut Net) -> Result<(), EndCause> {
        loop {
            let mut moved = self.endpoint.poll_ring(&*net.memory[1].clone(), net.now, 8)? > 0;
            while self.step(net)? {
                moved = true;
            }
            while let Some(grant) = self.endpoint.poll_fill() {
                moved = true;
                self.reads += 1;
                // Disks answer in any order, and fail at times.
                let fails = self.failing && net.dice.one_in(12);
                let octets = (!fails).then(|| (grant.slot, piece_of(&grant.source)));
                let time = net.now + if net.dice.one_in(3) { net.dice.delay() * 20 } else { net.dice.delay() };
                net.at(time, Event::Filled { side: 1, ticket: grant.ticket, octets });
            }
            while let Some(post) = self.endpoint.poll_post(net.now)? {
                moved = true;
                net.post(1, post);
            }
            if !moved {
                break;
            }
        }
        if let Some(deadline) = self.endpoint.deadline() {
            net.at(deadline.max(net.now), Event::Wake { side: 1 });
        }
        Ok(())
    }

    fn disconnect(&mut self) {
        self.storing = None;
        self.endpoint.handle_disconnected();
    }

    fn is_released(&self) -> bool {
        self.reads == 0 && self.endpoint.is_released()
    }
}

#[derive(Clone, Debug)]
enum Asked {
    Set,
    /// Each key with the flags its value must have.
    Get {
        keys: Vec<(u8, Option<u32>)>,
    },
    Delete {
        key: u8,
        was: Option<u32>,
    },
    Version,
}

/// What the client sends a body by: flags of the value.
type ClientValue = u32;

struct Client {
    endpoint: Endpoint<ClientValue, Requester>,
    store: Rc<RefCell<Store>>,
    /// What the server must have once all that was asked is answered: flags and length by key.
    model: HashMap<u8, (u32, u64)>,
    lengths: HashMap<u32, u64>,
    asked: VecDeque<Asked>,
    receiving: Option<(u32, u64, Vec<u8>)>,
    /// Leases that are kept for a while, and dropped in any order.
    kept: Vec<RxLease>,
    left: u64,
    sets_only: bool,
    answered: u64,
    depth: usize,
    next_flags: u32,
    lens: Vec<u64>,
    fills: usize,
}

impl Client {
    fn ask(&mut self, net: &mut Net) -> bool {
        if self.left == 0 || self.asked.len() >= self.depth || !self.endpoint.machine.can_ask(300) {
            return false;
        }
        self.left -= 1;
        let key = net.dice.roll(8) as u8;
        let asked = match net.dice.roll(if self.sets_only { 4 } else { 10 }) {
            0..=3 => {
                let (flags, len) = (self.next_flags, net.dice.pick(&self.lens));
                self.next_flags += 1;
                self.lengths.insert(flags, len);
                self.model.insert(key, (flags, len));
                self.endpoint.ask_store(format!("set k{key} {flags} 0 {len}\r\n").as_bytes(), flags, len);
                Asked::Set
            }
            4..=7 => {
                let count = if net.dice.one_in(4) { 5 } else { 1 };
                let keys: Vec<u8> = (0..count).map(|at| (key + at) % 8).collect();
                let line: String = keys.iter().map(|key| format!(" k{key}")).collect();
                self.endpoint.ask(format!("get{line}\r\n").as_bytes(), Shape::Values);
                let keys = keys.iter().map(|key| (*key, self.model.get(key).map(|(flags, _)| *flags))).collect();
                Asked::Get { keys }
            }
            8 => {
                self.endpoint.ask(format!("delete k{key}\r\n").as_bytes(), Shape::Line);
                Asked::Delete { key, was: self.model.remove(&key).map(|(flags, _)| flags) }
            }
            _ => {
                self.endpoint.ask(b"version\r\n", Shape::Line);
                Asked::Version
            }
        };
        self.asked.push_back(asked);
        true
    }

    /// A value may be absent only if a disk lost it.
    fn check_lost(&self, key: u8, flags: Option<u32>) {
        if let Some(flags) = flags {
            assert!(self.store.borrow().lost.contains(&(key, flags)), "value {flags} of key {key} is missing");
        }
    }

    fn answer(&mut self) {
        self.asked.pop_front();
        self.answered += 1;
    }

    fn step(&mut self, net: &mut Net) -> Result<bool, EndCause> {
        let step = self.endpoint.machine.step(&mut self.endpoint.inbound)?;
        match (step, self.asked.front_mut()) {
            (Answer::NeedMore, _) => return Ok(false),
            (Answer::Line(line), Some(asked)) => {
                match asked.clone() {
                    Asked::Set => assert_eq!(line, b"STORED"),
                    Asked::Version => assert_eq!(line, b"VERSION 1"),
                    Asked::Delete { key, was } => match (line, was) {
                        (b"DELETED", Some(_)) | (b"NOT_FOUND", None) => {}
                        (b"NOT_FOUND", Some(_)) => self.check_lost(key, was),
                        (line, was) => panic!("{was:?} answered by {}", line.escape_ascii()),
                    },
                    Asked::Get { .. } => panic!("{}", line.escape_ascii()),
                }
                self.answer();
            }
            (Answer::Value { key, flags, len, .. }, Some(Asked::Get { keys })) => {
                let found = key_of(key);
                let at = keys.iter().position(|(key, _)| *key == found).expect("a key that was asked for");
                let skipped: Vec<_> = keys.drain(..=at).collect();
                let (last, before) = skipped.split_last().unwrap();
                assert_eq!(last.1, Some(flags), "key {found}");
                assert_eq!(self.lengths[&flags], len);
                self.receiving = Some((flags, len, Vec::new()));
                for (key, flags) in before {
                    self.check_lost(*key, *flags);
                }
            }
            (Answer::Body { .. }, _) => {
                let lease = self.endpoint.take_body();
                let octets = net.memory[0].copy_lease(&lease);
                self.receiving.as_mut().unwrap().2.extend_from_slice(&octets);
                if net.dice.one_in(3) {
                    self.kept.push(lease);
                    let time = net.now + net.dice.delay() * 3;
                    net.at(time, Event::Wake { side: 0 });
                }
            }
            (Answer::ValueEnd, _) => {
                let (flags, len, octets) = self.receiving.take().unwrap();
                assert_eq!(octets.len() as u64, len);
                Pattern(flags.into()).check(0, &octets, "received");
            }
            (Answer::End, Some(Asked::Get { keys })) => {
                for (key, flags) in keys.clone() {
                    self.check_lost(key, flags);
                }
                self.answer();
            }
            (answer, asked) => panic!("{answer:?} to {asked:?}"),
        }
        Ok(true)
    }
}

impl Side for Client {
    fn done(&mut self, id: WorkId, net: &Net) -> Result<(), EndCause> {
        self.endpoint.handle_completion(id, || net.memory[0].load(READBACK_OFFSET), net.now)
    }

    fn filled(&mut self, ticket: Ticket, _: bool, _: &Net) {
        self.fills -= 1;
        self.endpoint.handle_filled(ticket);
    }

    fn drive(&mut self, net: &mut Net) -> Result<(), EndCause> {
        while !self.kept.is_empty() && net.dice.one_in(2) {
            let at = net.dice.roll(self.kept.len() as u64) as usize;
            drop(self.kept.swap_remove(at));
        }
        loop {
            let mut moved = self.endpoint.poll_ring(&*net.memory[0].clone(), net.now, 8)? > 0;
            while self.step(net)? {
                moved = true;
            }
            while self.ask(net) {
                moved = true;
            }
            while let Some(grant) = self.endpoint.poll_fill() {
                moved = true;
                let piece = grant.source;
                let octets = Pattern(piece.value.into()).octets(piece.offset, piece.len as usize);
                if net.dice.one_in(2) {
                    net.memory[0].fill(grant.slot, &octets);
                    self.endpoint.handle_filled(grant.ticket);
                } else {
                    self.fills += 1;
                    let time = net.now + net.dice.delay();
                    let octets = Some((grant.slot, octets));
                    net.at(time, Event::Filled { side: 0, ticket: grant.ticket, octets });
                }
            }
            while let Some(post) = self.endpoint.poll_post(net.now)? {
                moved = true;
                net.post(0, post);
            }
            if !moved {
                break;
            }
        }
        if !self.kept.is_empty() {
            let time = net.now + net.dice.delay();
            net.at(time, Event::Wake { side: 0 });
        }
        self.endpoint.rest();
        if let Some(deadline) = self.endpoint.deadline() {
            net.at(deadline.max(net.now), Event::Wake { side: 0 });
        }
        Ok(())
    }

    fn disconnect(&mut self) {
        self.kept.clear();
        self.endpoint.handle_disconnected();
    }

    fn is_released(&self) -> bool {
        self.fills == 0 && self.endpoint.is_released()
    }
}

/// What a run is made of.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    /// Slots, window octets, window count, of client and server.
    geometry: [(u32, u64, u32); 2],
    exchanges: u64,
    depth: usize,
    failing: bool,
    /// The link breaks at this event.
    cut_at: Option<u64>,
    sets_only: bool,
}

impl Plan {
    fn of(seed: u64) -> Self {
        let mut dice = Dice(seed ^ 0xa5a5);
        let mut side = || {
            let slots = dice.pick(&[2, 2, 3, 4, 8, 64, 256]);
            let (window_bytes, window_count) =
                dice.pick(&[(4096, 1), (4096, 2), (4096, 3), (8192, 2), (16_384, 4), (65_536, 8)]);
            (slots, window_bytes, window_count)
        };
        let geometry = [side(), side()];
        let depth = dice.pick(&[1, 2, 5, 16, 64]);
        let failing = dice.one_in(3);
        Self { seed, geometry, exchanges: 150, depth, failing, cut_at: None, sets_only: false }
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Ending {
    Whole,
    Cut,
    FailedRead,
    Poison(Poison),
    Stalled,
}

/// Says which seed it was when an assertion fails.
struct Replay(Plan);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with BULKHEAD_SIM_SEED={}: {:?}", self.0.seed, self.0);
        }
    }
}

fn memories(plan: &Plan, server_nonce: Nonce) -> [Rc<Memory>; 2] {
    let side = |side: usize, nonce| {
        let (slots, window_bytes, window_count) = plan.geometry[side];
        Rc::new(Memory::new(side as u32, slots, window_bytes, window_count, nonce))
    };
    [side(0, Nonce::ours(0)), side(1, server_nonce)]
}

fn settings(own: &Memory, peer: &Memory) -> Settings {
    // What each side knows of the other, it has from private data.
    let peer = Descriptor::decode(&peer.own.encode()).unwrap();
    let stall_timeout = Duration::from_secs(30);
    Settings { own: own.own, peer, queue_depth: 16, pipeline_bytes_max: 1 << 20, stall_timeout }
}

fn client_of(plan: &Plan, memory: &[Rc<Memory>; 2], store: &Rc<RefCell<Store>>, cautious: bool) -> Client {
    let windows = memory.each_ref().map(|memory| u64::from(memory.own.windows.window_bytes()));
    let fragment = windows[0].min(windows[1]);
    let model = store.borrow().values.iter().map(|(key, v)| (*key, (v.flags, v.octets.len() as u64))).collect();
    let lengths = store.borrow().values.values().map(|value| (value.flags, value.octets.len() as u64)).collect();
    Client {
        endpoint: Endpoint::new(settings(&memory[0], &memory[1]), Requester::new(cautious)),
        store: store.clone(),
        model,
        lengths,
        asked: VecDeque::new(),
        receiving: None,
        kept: Vec::new(),
        left: plan.exchanges,
        sets_only: plan.sets_only,
        answered: 0,
        depth: plan.depth,
        next_flags: 1 + store.borrow().values.values().map(|value| value.flags).max().unwrap_or(0),
        lens: vec![0, 1, 191, 192, 193, fragment - 1, fragment, fragment + 1, 3 * fragment + 7, 9 * fragment],
        fills: 0,
    }
}

/// Events without an answered exchange after which a run stands still. The slowest pause takes a few hundred.
const STALLED_COUNT: u64 = 50_000;

/// Runs until the client has all its answers, or until the end of the connection; then checks that all came back.
fn run(plan: Plan, mut net: Net, client: &mut Client, server: &mut impl Side) -> (Ending, u64) {
    let _replay = Replay(plan);
    let (mut events, mut last) = (0_u64, (0, 0));
    net.at(net.now, Event::Wake { side: 0 });
    let ending = loop {
        if client.left == 0 && client.asked.is_empty() && client.kept.is_empty() {
            break Ending::Whole;
        }
        if client.answered != last.0 {
            last = (client.answered, events);
        }
        let Some(((time, _), event)) = net.events.pop_first() else { break Ending::Stalled };
        if events - last.1 > STALLED_COUNT {
            break Ending::Stalled;
        }
        assert!(time >= net.now, "time goes forward");
        net.now = time;
        events += 1;
        if plan.cut_at == Some(events) {
            net.at(time, event);
            break Ending::Cut;
        }
        let result = match net.happen(event) {
            Told::Nothing => Ok(()),
            Told::Look(0) => client.drive(&mut net),
            Told::Look(_) => server.drive(&mut net),
            Told::Done(0, id) => client.done(id, &net).and_then(|()| client.drive(&mut net)),
            Told::Done(_, id) => server.done(id, &net).and_then(|()| server.drive(&mut net)),
            Told::Filled(0, ticket, is_filled) => {
                client.filled(ticket, is_filled, &net);
                client.drive(&mut net)
            }
            Told::Filled(_, ticket, is_filled) => {
                server.filled(ticket, is_filled, &net);
                server.drive(&mut net)
            }
        };
        match result {
            Ok(()) => {}
            Err(EndCause::FailedRead) => break Ending::FailedRead,
            Err(EndCause::Poison(poison)) => break Ending::Poison(poison),
            Err(EndCause::Stalled) => break Ending::Stalled,
            Err(cause) => panic!("{cause}"),
        }
    };
    // Whatever was under way is flushed; what disks were filling comes back.
    client.disconnect();
    server.disconnect();
    for event in std::mem::take(&mut net.events).into_values() {
        match event {
            Event::Filled { side: 0, ticket, octets } => client.filled(ticket, octets.is_some(), &net),
            Event::Filled { side: _, ticket, octets } => server.filled(ticket, octets.is_some(), &net),
            _ => {}
        }
    }
    assert!(client.is_released(), "the client lost a slot or a window: {:?}", client.endpoint);
    assert!(server.is_released(), "the server lost a slot or a window");
    (ending, events)
}

/// One connection against what `store` holds. Afterwards the store holds old or new values, all of them whole.
fn connect(plan: Plan, store: &Rc<RefCell<Store>>) -> (Ending, u64, u64) {
    let memory = memories(&plan, Nonce::ours(1));
    let mut client = client_of(&plan, &memory, store, false);
    let endpoint = Endpoint::new(settings(&memory[1], &memory[0]), Conversation::new());
    let server = (endpoint, store.clone());
    let mut server = Server {
        endpoint: server.0,
        store: server.1,
        storing: None,
        paused_until: Duration::ZERO,
        reads: 0,
        failing: plan.failing,
    };
    let net = Net::new(Dice(plan.seed), memory);
    let (ending, events) = run(plan, net, &mut client, &mut server);
    let _replay = Replay(plan);
    for value in store.borrow().values.values() {
        Pattern(value.flags.into()).check(0, &value.octets, "kept");
        assert_eq!(client.lengths[&value.flags], value.octets.len() as u64);
    }
    if ending == Ending::Whole {
        let kept: BTreeMap<u8, u32> = store.borrow().values.iter().map(|(key, value)| (*key, value.flags)).collect();
        for (key, (flags, _)) in &client.model {
            if kept.get(key) != Some(flags) {
                client.check_lost(*key, Some(*flags));
            }
        }
        assert!(kept.keys().all(|key| client.model.contains_key(key)), "what was deleted is gone");
    }
    (ending, events, client.answered)
}

fn seeds(from: u64, count: u64) -> Vec<u64> {
    match std::env::var("BULKHEAD_SIM_SEED") {
        Ok(seed) => vec![seed.parse().expect("BULKHEAD_SIM_SEED is a number")],
        Err(_) => {
            let times = std::env::var("BULKHEAD_SIM_TIMES").map_or(1, |times| times.parse().expect("a number"));
            (from..from + count * times).collect()
        }
    }
}

#[test]
fn ten_thousand_exchanges_come_out_right_over_every_kind_of_link() {
    let (mut answered, mut broken) = (0, 0);
    let store = Rc::new(RefCell::new(Store::default()));
    for seed in seeds(1, 100) {
        let plan = Plan::of(seed);
        let (ending, _, count) = connect(plan, &store);
        answered += count;
        match ending {
            Ending::Whole => assert_eq!(count, plan.exchanges),
            Ending::FailedRead if plan.failing => broken += 1,
            ending => {
                let _replay = Replay(plan);
                panic!("{ending:?}");
            }
        }
    }
    if std::env::var_os("BULKHEAD_SIM_SEED").is_none() {
        assert!(answered >= 10_000, "{answered} exchanges");
        assert!(broken > 0, "no read failed for good");
    }
}

#[test]
fn a_connection_may_break_at_every_step() {
    for seed in seeds(500, 6) {
        let mut plan = Plan { exchanges: 12, ..Plan::of(seed) };
        plan.geometry.iter_mut().for_each(|side| side.1 = side.1.min(8192));
        let (_, events, _) = connect(plan, &Rc::default());
        for cut_at in 1..events {
            let store = Rc::default();
            let cut = Plan { cut_at: Some(cut_at), ..plan };
            assert_eq!(connect(cut, &store).0, Ending::Cut);
            if cut_at % 16 == 0 {
                // The next connection finds a store in order.
                let again = Plan { seed: seed + 1, failing: false, ..plan };
                assert_eq!(connect(again, &store).0, Ending::Whole);
            }
        }
    }
}

/// A server with two faults of the reference: while an answer is under way it leaves the next INLINE in the ring and all
/// behind it unseen; and a READY behind a second line that it has not read is poison to it.
struct Reference {
    ring: ControlRing,
    windows: RxWindows,
    inbound: Inbound,
    conversation: Conversation,
    outbound: Outbound<Stored>,
    slots: TxSlots<Piece<Stored>>,
    egress: Egress,
    store: Rc<RefCell<Store>>,
    storing: Option<(u8, u32, Vec<u8>)>,
}

impl Reference {
    fn new(settings: Settings, store: Rc<RefCell<Store>>) -> Self {
        let limits = Negotiated::between(settings.own.windows, settings.peer.windows);
        Self {
            ring: ControlRing::new(settings.own.ring.slot_count()),
            windows: RxWindows::new(settings.own.windows, limits),
            inbound: Inbound::new(0),
            conversation: Conversation::new(),
            outbound: Outbound::new(limits.fragment_bytes_max),
            slots: TxSlots::new(settings.own.windows.window_count()),
            egress: Egress::new(settings.peer, limits, 64),
            store,
            storing: None,
        }
    }

    fn is_answering(&self) -> bool {
        !self.outbound.is_empty() || self.egress.place_count() > 0
    }

    fn step(&mut self, memory: &Memory) -> Result<bool, EndCause> {
        if self.is_answering() {
            return Ok(false);
        }
        match self.conversation.step(&mut self.inbound)? {
            Step::NeedMore => return Ok(false),
            Step::Command(Command::Store(header)) => {
                self.storing = Some((key_of(header.key), header.flags, Vec::new()));
                let len = header.len;
                self.conversation.accept_body(len);
            }
            Step::Command(Command::Get { keys, .. }) => {
                for key in keys {
                    let found = self.store.borrow().values.get(&key_of(key)).cloned();
                    let Some(value) = found else { continue };
                    let mut line = Vec::new();
                    let len = value.octets.len() as u64;
                    response::value_line(&mut line, key, value.flags, len, None);
                    self.outbound.value(&line, Value { source: value, len, quick_len: len });
                }
                self.outbound.text(response::END);
            }
            Step::Command(Command::Delete { key, .. }) => {
                let found = self.store.borrow_mut().values.remove(&key_of(key)).is_some();
                self.outbound.text(if found { response::DELETED } else { response::NOT_FOUND });
            }
            Step::Command(Command::Version) => self.outbound.text(b"VERSION 1\r\n"),
            Step::Body { .. } => {
                let lease = self.conversation.take_body(&mut self.inbound);
                self.storing.as_mut().unwrap().2.extend_from_slice(&memory.copy_lease(&lease));
            }
            Step::BodyEnd => {
                let (key, flags, octets) = self.storing.take().unwrap();
                self.store.borrow_mut().values.insert(key, Stored { key, flags, octets: Rc::new(octets) });
                self.outbound.text(response::STORED);
            }
            step => panic!("{step:?}"),
        }
        Ok(true)
    }

    fn take_record(&mut self, memory: &Memory) -> Result<bool, EndCause> {
        let Some(copy) = self.ring.poll(memory).map_err(Poison::from)? else { return Ok(false) };
        match Record::decode(copy.octets()).map_err(Poison::from)? {
            Record::Inline(_) if self.is_answering() => return Ok(false),
            Record::Inline(text) => self.inbound.handle_inline(text),
            Record::Ready { .. } if self.is_answering() => return Err(Poison::StrayReady.into()),
            Record::Ready { sequence, len } => {
                let lease = self.windows.handle_ready(sequence, len)?;
                self.inbound.handle_ready(lease);
            }
            Record::Release { sequence } => self.egress.handle_released(sequence)?,
        }
        self.ring.consume(memory);
        self.egress.handle_record();
        Ok(true)
    }
}

impl Side for Reference {
    fn done(&mut self, id: WorkId, net: &Net) -> Result<(), EndCause> {
        match self.egress.handle_completion(id)? {
            Completed::Control => {}
            Completed::Slot(slot) => self.slots.handle_retired(slot),
            Completed::Credits => self.egress.handle_credits(net.memory[1].load(READBACK_OFFSET), net.now)?,
        }
        Ok(())
    }

    fn filled(&mut self, _: Ticket, _: bool, _: &Net) {}

    fn drive(&mut self, net: &mut Net) -> Result<(), EndCause> {
        let memory = net.memory[1].clone();
        loop {
            let mut moved = self.step(&memory)?;
            // It looks at all that has come before it sends what it has to say.
            while self.take_record(&memory)? {
                moved = true;
                while self.step(&memory)? {}
            }
            while self.egress.room() > 0
                && let Some((place, fill)) = self.outbound.poll_place()
            {
                self.egress.enqueue(place);
                if let Some(fill) = fill {
                    self.slots.handle_fill(fill.ticket, fill.piece, fill.slow);
                }
            }
            while let Some(grant) = self.slots.poll_grant() {
                memory.fill(grant.slot, &piece_of(&grant.source));
                let slot = self.slots.handle_filled(grant.ticket).unwrap();
                self.egress.handle_filled(grant.ticket, slot);
            }
            if let Some(sequence) = self.windows.releases().poll() {
                self.egress.handle_release_due(sequence);
            }
            while let Some(post) = self.egress.poll_post(net.now)? {
                moved = true;
                net.post(1, post);
            }
            if !moved {
                break;
            }
        }
        if let Some(deadline) = self.egress.deadline() {
            net.at(deadline.max(net.now), Event::Wake { side: 1 });
        }
        Ok(())
    }

    fn disconnect(&mut self) {
        self.slots.cancel_all();
        self.egress.take_slots().into_iter().for_each(|slot| self.slots.handle_retired(slot));
        self.inbound = Inbound::new(0);
    }

    fn is_released(&self) -> bool {
        self.slots.is_idle() && self.windows.releases().held() == 0
    }
}

/// A client of ours against a server with the faults of the reference.
fn connect_to_reference(seed: u64, cautious: bool, sets_only: bool) -> Ending {
    let geometry = [(64, 4096, 2), (64, 4096, 2)];
    let plan = Plan { seed, geometry, exchanges: 200, depth: 8, failing: false, cut_at: None, sets_only };
    let memory = memories(&plan, Nonce(0x1234_5678));
    let store = Rc::default();
    let peer = Descriptor::decode(&memory[1].own.encode()).unwrap();
    assert!(!peer.nonce.is_ours());
    let mut client = client_of(&plan, &memory, &store, cautious);
    let mut server = Reference::new(settings(&memory[1], &memory[0]), store);
    run(plan, Net::new(Dice(seed), memory), &mut client, &mut server).0
}

#[test]
fn a_cautious_client_works_with_a_server_that_has_the_faults_of_the_reference() {
    for seed in seeds(900, 10) {
        for sets_only in [false, true] {
            assert_eq!(connect_to_reference(seed, true, sets_only), Ending::Whole, "seed {seed}");
        }
    }
}

#[test]
fn a_client_that_is_not_cautious_hangs_or_is_closed_by_such_a_server() {
    let mixed: Vec<Ending> = (900..910).map(|seed| connect_to_reference(seed, false, false)).collect();
    assert!(mixed.contains(&Ending::Stalled), "a release behind an unread command was never seen: {mixed:?}");
    assert!(!mixed.contains(&Ending::Whole), "{mixed:?}");
    let sets: Vec<Ending> = (900..910).map(|seed| connect_to_reference(seed, false, true)).collect();
    let stray = Ending::Poison(Poison::StrayReady);
    assert!(sets.contains(&stray), "a header behind a trailer was not read in time: {sets:?}");
}
