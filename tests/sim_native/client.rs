//! A client that asks at random, and knows what the answers must be.

use super::pattern::Pattern;
use super::plan::{Clock, Ending, Filled, Native, Plan};
use super::server::{STALL_TIMEOUT, Store, check_cause, key_of};
use super::sim::{self, CLIENT, Side};
use bulkhead::client::native::port::{Port, Prepared, attributes};
use bulkhead::fabric::{Address, Attributes, Event, Lane};
use bulkhead::wire::native::descriptor::{Descriptor, Negotiated, Nonce};
use bulkhead::wire::native::requester::{Answer, Requester, Shape};
use bulkhead::wire::native::window::RxLease;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

const KEY_COUNT: u8 = 8;

#[derive(Clone, Debug)]
enum Asked {
    Set {
        key: u8,
        flags: u32,
    },
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

pub struct Client {
    plan: Plan,
    store: Rc<RefCell<Store>>,
    /// As towards a server that is no Bulkhead, or not; `None`: as the server's nonce says.
    pub cautious: Option<bool>,
    prepared: Option<Prepared>,
    port: Option<Port<ClientValue, Requester>>,
    is_over: bool,
    /// What the server must have once all that was asked is answered: flags by key.
    model: BTreeMap<u8, u32>,
    /// What it had by the last answer.
    confirmed: BTreeMap<u8, u32>,
    /// Of every value ever sent.
    lens: BTreeMap<u32, u64>,
    asked: VecDeque<Asked>,
    receiving: Option<(u32, u64, Vec<u8>)>,
    /// Leases that are kept for a while, and dropped in any order.
    kept: Vec<RxLease>,
    drop_at: Option<Instant>,
    /// Requests still to be made.
    pub left: u64,
    answered: u64,
    next_flags: u32,
    /// Of values to be sent.
    choice: Vec<u64>,
    fills: usize,
}

impl Client {
    pub fn new(plan: Plan, store: Rc<RefCell<Store>>) -> Self {
        let windows = plan.geometry.map(|geometry| geometry.parts().expect("a geometry that can be had").1);
        let fragment = u64::from(Negotiated::between(windows[0], windows[1]).fragment_bytes_max);
        Self {
            plan,
            store,
            cautious: None,
            prepared: None,
            port: None,
            is_over: false,
            model: BTreeMap::new(),
            confirmed: BTreeMap::new(),
            lens: BTreeMap::new(),
            asked: VecDeque::new(),
            receiving: None,
            kept: Vec::new(),
            drop_at: None,
            left: plan.exchanges,
            answered: 0,
            next_flags: 1,
            choice: vec![0, 1, 191, 192, 193, fragment - 1, fragment, fragment + 1, 3 * fragment + 7, 9 * fragment],
            fills: 0,
        }
    }

    /// After a connection: the store holds whole values, those that were answered for or asked for since.
    pub fn check_store(&self) {
        let store = self.store.borrow();
        for key in 0..KEY_COUNT {
            let mut may_be = BTreeSet::from([self.confirmed.get(&key).copied()]);
            may_be.extend(self.asked.iter().filter_map(|asked| match asked {
                Asked::Set { key: of, flags } if *of == key => Some(Some(*flags)),
                Asked::Delete { key: of, .. } if *of == key => Some(None),
                _ => None,
            }));
            let found = store.values.get(&key);
            if let Some(value) = found {
                Pattern(value.flags.into()).check(0, &value.octets, "kept");
                assert_eq!(self.lens[&value.flags], value.octets.len() as u64);
            }
            let is_lost = |flags: &Option<u32>| flags.is_some_and(|flags| store.lost.contains(&(key, flags)));
            let found = found.map(|value| value.flags);
            let is_right = may_be.contains(&found) || found.is_none() && may_be.iter().any(is_lost);
            assert!(is_right, "key {key} has {found:?}, which is none of {may_be:?}");
        }
    }

    /// What was not answered never will be.
    pub fn forget(&mut self) {
        self.asked.clear();
    }

    fn ask(&mut self, clock: &mut Clock) -> bool {
        let Some(port) = &mut self.port else { return false };
        let endpoint = &mut port.endpoint;
        if self.left == 0 || self.asked.len() >= self.plan.depth || !endpoint.machine.can_ask(300) {
            return false;
        }
        self.left -= 1;
        let key = clock.dice.below(KEY_COUNT.into()) as u8;
        let asked = match clock.dice.below(if self.plan.sets_only { 4 } else { 10 }) {
            0..=3 => {
                let (flags, len) = (self.next_flags, *clock.dice.pick(&self.choice));
                self.next_flags += 1;
                self.lens.insert(flags, len);
                self.model.insert(key, flags);
                endpoint.ask_store(format!("set k{key} {flags} 0 {len}\r\n").as_bytes(), flags, len);
                Asked::Set { key, flags }
            }
            4..=7 => {
                let count = if clock.dice.one_in(4) { 5 } else { 1 };
                let keys: Vec<u8> = (0..count).map(|at| (key + at) % KEY_COUNT).collect();
                let line: String = keys.iter().map(|key| format!(" k{key}")).collect();
                endpoint.ask(format!("get{line}\r\n").as_bytes(), Shape::Values);
                Asked::Get { keys: keys.iter().map(|key| (*key, self.model.get(key).copied())).collect() }
            }
            8 => {
                endpoint.ask(format!("delete k{key}\r\n").as_bytes(), Shape::Line);
                Asked::Delete { key, was: self.model.remove(&key) }
            }
            _ => {
                endpoint.ask(b"version\r\n", Shape::Line);
                Asked::Version
            }
        };
        clock.note(|| format!("asks {asked:?}"));
        self.asked.push_back(asked);
        true
    }

    /// A value may be absent only if a disk lost it.
    fn check_lost(&self, key: u8, flags: Option<u32>) {
        if let Some(flags) = flags {
            assert!(self.store.borrow().lost.contains(&(key, flags)), "value {flags} of key {key} is missing");
        }
    }

    fn answer(&mut self, clock: &mut Clock) {
        let asked = self.asked.pop_front();
        match asked {
            Some(Asked::Set { key, flags }) => drop(self.confirmed.insert(key, flags)),
            Some(Asked::Delete { key, .. }) => drop(self.confirmed.remove(&key)),
            _ => {}
        }
        clock.note(|| format!("has its answer to {asked:?}"));
        self.answered += 1;
    }

    fn step(&mut self, clock: &mut Clock) -> Result<bool, Ending> {
        let Some(port) = &mut self.port else { return Ok(false) };
        let step = port.endpoint.machine.step(&mut port.endpoint.inbound)?;
        match (step, self.asked.front_mut()) {
            (Answer::NeedMore, _) => return Ok(false),
            (Answer::Line(line), Some(asked)) => {
                match asked.clone() {
                    Asked::Set { .. } => assert_eq!(line, b"STORED"),
                    Asked::Version => assert_eq!(line, b"VERSION 1"),
                    Asked::Delete { key, was } => match (line, was) {
                        (b"DELETED", Some(_)) | (b"NOT_FOUND", None) => {}
                        (b"NOT_FOUND", Some(_)) => self.check_lost(key, was),
                        (line, was) => panic!("{was:?} answered by {}", line.escape_ascii()),
                    },
                    Asked::Get { .. } => panic!("{}", line.escape_ascii()),
                }
                self.answer(clock);
            }
            (Answer::Value { key, flags, len, .. }, Some(Asked::Get { keys })) => {
                let found = key_of(key);
                let at = keys.iter().position(|(key, _)| *key == found).expect("a key that was asked for");
                let skipped: Vec<_> = keys.drain(..=at).collect();
                let (last, before) = skipped.split_last().expect("one at least");
                assert_eq!(last.1, Some(flags), "key {found}");
                assert_eq!(self.lens[&flags], len);
                self.receiving = Some((flags, len, Vec::new()));
                for (key, flags) in before {
                    self.check_lost(*key, *flags);
                }
            }
            (Answer::Body { .. }, _) => {
                let lease = port.endpoint.take_body();
                let octets = &mut self.receiving.as_mut().expect("a line came before").2;
                let start = octets.len();
                octets.resize(start + lease.len() as usize, 0);
                port.copy_out(&lease, &mut octets[start..]);
                if clock.dice.one_in(3) {
                    self.kept.push(lease);
                    self.drop_at = Some(clock.now + clock.delay() * 3);
                }
            }
            (Answer::ValueEnd, _) => {
                let (flags, len, octets) = self.receiving.take().expect("a line came before");
                assert_eq!(octets.len() as u64, len);
                Pattern(flags.into()).check(0, &octets, "received");
            }
            (Answer::End, Some(Asked::Get { keys })) => {
                for (key, flags) in keys.clone() {
                    self.check_lost(key, flags);
                }
                self.answer(clock);
            }
            (answer, asked) => panic!("{answer:?} to {asked:?}"),
        }
        Ok(true)
    }

    /// Copies values into the slots they leave from, at once or a little later.
    fn fill(&mut self, clock: &mut Clock) -> bool {
        let Some(port) = &mut self.port else { return false };
        let mut moved = false;
        while let Some(grant) = port.endpoint.poll_fill() {
            moved = true;
            let piece = grant.source;
            let octets = Pattern(piece.value.into()).octets(piece.offset, piece.len as usize);
            let slot = &mut port.slot_mut(grant.slot)[..octets.len()];
            if clock.dice.one_in(2) {
                slot.copy_from_slice(&octets);
                port.handle_filled(grant.ticket);
            } else {
                slot.fill(0xee);
                self.fills += 1;
                let (delay, octets) = (clock.delay(), Some(octets));
                clock.after(delay, CLIENT, Filled { ticket: grant.ticket, slot: grant.slot, octets });
            }
        }
        moved
    }

    fn end(&mut self) {
        (self.is_over, self.prepared, self.receiving, self.drop_at) = (true, None, None, None);
        self.kept.clear();
        if let Some(port) = &mut self.port {
            port.handle_disconnected();
        }
    }
}

impl sim::Client<Native> for Client {
    fn dial(&mut self, lane: &dyn Lane, to: &Address) -> Result<(), Ending> {
        let store = self.store.borrow();
        self.model = store.values.iter().map(|(key, value)| (*key, value.flags)).collect();
        self.confirmed = self.model.clone();
        self.is_over = false;
        let attributes = Attributes { send_depth: self.plan.send_depth, ..attributes(Duration::from_secs(5)) };
        let qp = lane.dial(to, attributes).map_err(|_| Ending::Refused)?;
        let prepared = Prepared::new(qp, self.plan.geometry[CLIENT], Nonce::ours(0)).map_err(|_| Ending::Refused)?;
        prepared.establish().map_err(|_| Ending::Refused)?;
        self.prepared = Some(prepared);
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.asked.is_empty() && self.kept.is_empty()
    }

    fn answered(&self) -> u64 {
        self.answered
    }
}

impl Side<Native> for Client {
    fn handle_event(&mut self, event: Event, _: &dyn Lane, clock: &mut Clock) -> Result<(), Ending> {
        match event {
            Event::Established { private_data, .. } => {
                let Some(prepared) = self.prepared.take() else { return Ok(()) };
                let peer = Descriptor::decode(&private_data).expect("a descriptor of ours");
                let requester = Requester::new(self.cautious.unwrap_or(!peer.nonce.is_ours()));
                self.port = Some(prepared.attach(peer, requester, STALL_TIMEOUT, clock.now));
                Ok(())
            }
            Event::Rejected { .. } => {
                self.end();
                Err(Ending::Refused)
            }
            Event::Completed { completion, .. } => match &mut self.port {
                Some(port) => Ok(port.handle_completed(completion, clock.now)?),
                None => Ok(()),
            },
            Event::Disconnected { cause, .. } => {
                self.end();
                check_cause(&cause);
                Err(Ending::Lost(cause))
            }
            Event::ConnectRequest(_) | Event::HandshakeFailed { .. } | Event::Written { .. } => Ok(()),
        }
    }

    fn handle_due(&mut self, filled: Filled, clock: &mut Clock) {
        let Filled { ticket, slot, octets } = filled;
        clock.note(|| format!("client's slot {slot} for {ticket:?}: {}", octets.is_some()));
        self.fills -= 1;
        let port = self.port.as_mut().expect("a port outlives its fills");
        let octets = octets.expect("memory does not fail");
        port.slot_mut(slot)[..octets.len()].copy_from_slice(&octets);
        port.handle_filled(ticket);
    }

    fn drive(&mut self, clock: &mut Clock) -> Result<(), Ending> {
        if self.is_over {
            return Ok(());
        }
        while !self.kept.is_empty() && clock.dice.one_in(2) {
            let at = clock.dice.below(self.kept.len() as u64) as usize;
            drop(self.kept.swap_remove(at));
        }
        loop {
            let Some(port) = &mut self.port else { return Ok(()) };
            let mut moved = port.poll_ring(clock.now)? > 0;
            while self.step(clock)? {
                moved = true;
            }
            while self.ask(clock) {
                moved = true;
            }
            moved |= self.fill(clock);
            let Some(port) = &mut self.port else { return Ok(()) };
            moved |= port.poll_post(clock.now)? > 0;
            if !moved {
                port.endpoint.rest();
                break;
            }
        }
        self.drop_at = (!self.kept.is_empty()).then(|| clock.now + clock.delay());
        Ok(())
    }

    fn wakes_at(&self) -> Option<Instant> {
        let deadline = self.port.as_ref().filter(|_| !self.is_over).and_then(Port::deadline);
        [deadline, self.drop_at].into_iter().flatten().min()
    }

    fn disconnect(&mut self) -> bool {
        // A queue pair that was never established ends with its handle.
        let dialled = self.prepared.take().is_some();
        self.port.as_mut().map(Port::disconnect).is_some() || dialled
    }

    fn is_over(&self) -> bool {
        self.prepared.is_none() && (self.port.is_none() || self.is_over && self.fills == 0)
    }

    fn release(&mut self) {
        if let Some(port) = self.port.take() {
            assert!(port.is_released(), "the client has lost something: {port:?}");
        }
    }
}
