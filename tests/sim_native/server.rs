//! A server: the conversation over a map, and disks that answer in any order, late, or not at all.

use super::pattern::Pattern;
use super::plan::{Clock, Ending, Filled, Native, Plan};
use super::sim::{SERVER, Side};
use bulkhead::client::native::port::{Port, Prepared, attributes};
use bulkhead::fabric::{Attributes, Cause, Event, Lane, SharedSpan};
use bulkhead::wire::memcache::{Command, response};
use bulkhead::wire::native::conversation::{Conversation, Step};
use bulkhead::wire::native::descriptor::{Descriptor, Nonce};
use bulkhead::wire::native::endpoint::{Endpoint, FailedPiece};
use bulkhead::wire::native::poison::Poison;
use bulkhead::wire::native::record::Record;
use bulkhead::wire::native::ring::{ControlRing, RingMemory};
use bulkhead::wire::native::stream::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Longer than an exchange may take.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// A value as the server keeps it: octets that follow from the flags.
#[derive(Clone, Debug)]
pub struct Stored {
    pub key: u8,
    pub flags: u32,
    pub octets: Rc<Vec<u8>>,
}

/// What outlives connections.
#[derive(Default)]
pub struct Store {
    pub values: BTreeMap<u8, Stored>,
    /// Key and flags of values whose octets a disk lost.
    pub lost: BTreeSet<(u8, u32)>,
}

/// A key as a number.
pub fn key_of(text: &[u8]) -> u8 {
    text.strip_prefix(b"k")
        .and_then(|n| std::str::from_utf8(n).ok())
        .and_then(|n| n.parse().ok())
        .expect("a key of ours")
}

/// Two faults of the reference: while an answer is under way it leaves the next INLINE in the ring and all behind it
/// unseen; and a READY behind a second line that it has not read is poison to it.
struct Reference {
    memory: Own,
    ring: ControlRing,
}

struct Own(SharedSpan);

impl RingMemory for Own {
    fn load(&self, offset: usize) -> u64 {
        self.0.load_u64_acquire(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.0.store_u64_release(offset, word);
    }
}

pub struct Server {
    plan: Plan,
    store: Rc<RefCell<Store>>,
    is_reference: bool,
    reference: Option<Reference>,
    port: Option<Port<Stored, Conversation>>,
    is_over: bool,
    storing: Option<(u8, u32, Vec<u8>)>,
    paused_until: Option<Instant>,
    /// Slots that are being filled must all come back.
    reads: usize,
}

impl Server {
    pub fn new(plan: Plan, store: Rc<RefCell<Store>>, is_reference: bool) -> Self {
        Self {
            plan,
            store,
            is_reference,
            reference: None,
            port: None,
            is_over: false,
            storing: None,
            paused_until: None,
            reads: 0,
        }
    }

    /// Accepts. When memory is short the peer is declined by what is dropped.
    fn admit(&mut self, event: Event, lane: &dyn Lane, clock: &Clock) {
        let Event::ConnectRequest(request) = event else { return };
        let peer = Descriptor::decode(request.private_data()).expect("a descriptor of ours");
        let attributes = Attributes { send_depth: self.plan.send_depth, ..attributes(Duration::from_secs(5)) };
        let nonce = if self.is_reference { Nonce(0x1234_5678) } else { Nonce::ours(1) };
        let Ok(qp) = lane.admit(request, attributes) else { return };
        let Ok(prepared) = Prepared::new(qp, self.plan.geometry[SERVER], nonce) else { return };
        let (memory, slot_count) = (Own(prepared.ring().clone()), prepared.descriptor().ring.slot_count());
        self.reference = self.is_reference.then(|| Reference { memory, ring: ControlRing::new(slot_count) });
        if prepared.establish().is_err() {
            return;
        }
        self.port = Some(prepared.attach(peer, Conversation::new(), STALL_TIMEOUT, clock.now));
        self.is_over = false;
    }

    /// Whether an answer is under way and this is a server that does nothing else then.
    fn is_busy(&self) -> bool {
        self.is_reference && self.port.as_ref().is_some_and(|port| !port.endpoint.is_sent())
    }

    /// `true` if the ring gave something.
    fn take_records(&mut self, now: Instant) -> Result<bool, Ending> {
        let is_busy = self.is_busy();
        let Some(port) = &mut self.port else { return Ok(false) };
        let Some(Reference { memory, ring }) = &mut self.reference else { return Ok(port.poll_ring(now)? > 0) };
        let Some(copy) = ring.poll(memory).map_err(Poison::from)? else { return Ok(false) };
        match Record::decode(copy.octets()).map_err(Poison::from)? {
            Record::Inline(_) if is_busy => return Ok(false),
            Record::Ready { .. } if is_busy => return Err(Poison::StrayReady.into()),
            _ => {}
        }
        ring.consume(memory);
        let time = port.time(now);
        Ok(port.endpoint.poll_ring(memory, time, 1)? > 0)
    }

    /// One step of the conversation; `false` if there is none now.
    fn step(&mut self, clock: &mut Clock) -> Result<bool, Ending> {
        if self.is_busy() || self.paused_until.is_some() {
            return Ok(false);
        }
        let Some(port) = &mut self.port else { return Ok(false) };
        if port.endpoint.outbound.text_bytes() > 4096 {
            return Ok(false);
        }
        if !self.is_reference && clock.dice.one_in(16) {
            self.paused_until = Some(clock.now + clock.delay() * 4);
            return Ok(false);
        }
        let Endpoint { inbound, outbound, machine, .. } = &mut port.endpoint;
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
                    let quick_len = if self.is_reference { len } else { *clock.dice.pick(&[0, 0, len / 2, len]) };
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
                let octets = &mut self.storing.as_mut().expect("a header came before").2;
                let start = octets.len();
                octets.resize(start + lease.len() as usize, 0);
                port.copy_out(&lease, &mut octets[start..]);
            }
            Step::BodyEnd => {
                let (key, flags, octets) = self.storing.take().expect("a header came before");
                Pattern(flags.into()).check(0, &octets, "stored");
                let stored = Stored { key, flags, octets: Rc::new(octets) };
                self.store.borrow_mut().values.insert(key, stored);
                outbound.text(response::STORED);
            }
            step => panic!("{step:?}"),
        }
        Ok(true)
    }

    /// Starts the reads that have a slot.
    fn fill(&mut self, clock: &mut Clock) -> bool {
        let Some(port) = &mut self.port else { return false };
        let mut moved = false;
        while let Some(grant) = port.endpoint.poll_fill() {
            moved = true;
            let piece = grant.source;
            let octets = &piece.value.octets[piece.offset as usize..][..piece.len as usize];
            let slot = &mut port.slot_mut(grant.slot)[..octets.len()];
            if self.is_reference {
                slot.copy_from_slice(octets);
                port.handle_filled(grant.ticket);
                continue;
            }
            // What a slot holds before its read has ended is for nobody's eyes.
            slot.fill(0xee);
            self.reads += 1;
            let fails = self.plan.failing && clock.dice.one_in(12);
            let octets = (!fails).then(|| octets.to_vec());
            let delay = if clock.dice.one_in(3) { clock.delay() * 20 } else { clock.delay() };
            clock.after(delay, SERVER, Filled { ticket: grant.ticket, slot: grant.slot, octets });
        }
        moved
    }
}

impl Side<Native> for Server {
    fn handle_event(&mut self, event: Event, lane: &dyn Lane, clock: &mut Clock) -> Result<(), Ending> {
        if let Event::ConnectRequest(_) = event {
            self.admit(event, lane, clock);
            return Ok(());
        }
        // The rest of a queue pair for which memory was short is nobody's.
        let Some(port) = self.port.as_mut().filter(|port| port.owns(&event)) else { return Ok(()) };
        match event {
            Event::Completed { completion, .. } => Ok(port.handle_completed(completion, clock.now)?),
            Event::Disconnected { cause, .. } => {
                port.handle_disconnected();
                (self.is_over, self.storing, self.paused_until) = (true, None, None);
                check_cause(&cause);
                Err(Ending::Lost(cause))
            }
            _ => Ok(()),
        }
    }

    fn handle_due(&mut self, filled: Filled, clock: &mut Clock) {
        let Filled { ticket, slot, octets } = filled;
        clock.note(|| format!("server's slot {slot} for {ticket:?}: {}", octets.is_some()));
        self.reads -= 1;
        let port = self.port.as_mut().expect("a port outlives its reads");
        if let Some(octets) = octets {
            port.slot_mut(slot)[..octets.len()].copy_from_slice(&octets);
            return port.handle_filled(ticket);
        }
        let failed = port.endpoint.handle_fill_failed(ticket);
        if let Some(FailedPiece::Missed(value) | FailedPiece::Broken(value)) = failed {
            let mut store = self.store.borrow_mut();
            store.lost.insert((value.key, value.flags));
            if store.values.get(&value.key).is_some_and(|stored| stored.flags == value.flags) {
                store.values.remove(&value.key);
            }
        }
    }

    fn drive(&mut self, clock: &mut Clock) -> Result<(), Ending> {
        if self.is_over {
            return Ok(());
        }
        self.paused_until = self.paused_until.filter(|until| clock.now < *until);
        loop {
            let mut moved = self.step(clock)?;
            // The reference looks at all that has come before it sends what it has to say.
            while self.take_records(clock.now)? {
                moved = true;
                while self.step(clock)? {}
            }
            while self.step(clock)? {
                moved = true;
            }
            moved |= self.fill(clock);
            let Some(port) = &mut self.port else { return Ok(()) };
            moved |= port.poll_post(clock.now)? > 0;
            if !moved {
                return Ok(());
            }
        }
    }

    fn wakes_at(&self) -> Option<Instant> {
        let deadline = self.port.as_ref().filter(|_| !self.is_over).and_then(Port::deadline);
        [deadline, self.paused_until].into_iter().flatten().min()
    }

    fn disconnect(&mut self) -> bool {
        self.port.as_mut().map(Port::disconnect).is_some()
    }

    fn is_over(&self) -> bool {
        self.port.is_none() || self.is_over && self.reads == 0
    }

    fn release(&mut self) {
        if let Some(port) = self.port.take() {
            assert!(port.is_released(), "the server has lost something: {port:?}");
        }
        self.reference = None;
    }
}

/// Neither side may ever do what the other's fabric refuses.
pub fn check_cause(cause: &Cause) {
    assert!(matches!(cause, Cause::Local | Cause::Peer | Cause::Lost(_)), "{cause}");
}
