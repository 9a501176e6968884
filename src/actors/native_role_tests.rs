//! Each actor of the native door alone, over a loopback that fails by seed: who alone polls, posts and fills.

use crate::actors::bulk_window::{self, BulkWindow, Failed, Fill, Filled, Serve, SlotsRetired, Source};
use crate::actors::cq_poller::{Attachments, CqPoller, Events, Stop, TransportEvent};
use crate::actors::credit_manager::{Advance, CreditManager, Finish, Parts, Told, Turn};
use crate::actors::native_memory::{ControlRegion, NativeRing, RxHalf};
use crate::actors::native_tests::spoil;
use crate::actors::rig::{Inbox, Rig, octets, soon, until};
use crate::fabric::faulty::{Faults, Faulty};
use crate::fabric::loopback::Loopback;
use crate::fabric::{
    self, Address, Attributes, Completion, ConnectRequest, Event, Fabric, FabricError, Flags, Lane, Listener, LocalBuf,
    QueuePair, Resources, Status, Work, WorkId, WorkKind,
};
use crate::store::Lookup;
use crate::wire::native::descriptor::{Descriptor, Negotiated, Nonce, RingGeometry, WindowGeometry};
use crate::wire::native::egress::{InlineText, Place, ValueId};
use crate::wire::native::endpoint::EndCause;
use crate::wire::native::intake::{Intake, RingReader, Room};
use crate::wire::native::poison::Poison;
use crate::wire::native::record::{INLINE_BYTES_MAX, Record};
use crate::wire::native::ring::SlotWrite;
use crate::wire::native::stream::{FillRequest, PIPELINE_BYTES_MIN, Piece};
use crate::wire::native::window::{Releases, Ticket, TxSlots};
use crate::wire::seq::{BulkSequence, ControlSequence};
use actix::prelude::*;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;

const SLOTS: u32 = 256;
const WINDOW_BYTES: u32 = 64 << 10;
const WINDOWS: u32 = 4;
const LATE: Faults =
    Faults { drop_per_mille: 0, delay_per_mille: 400, refuse_per_mille: 0, shortage_per_mille: 0, hold_per_mille: 0 };

/// A lane that counts its turns.
#[derive(Debug)]
struct Watched {
    inner: Arc<dyn Lane>,
    turns: AtomicU64,
}

impl Lane for Watched {
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError> {
        self.inner.listen(address)
    }

    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        self.inner.dial(address, attributes)
    }

    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        self.inner.admit(request, attributes)
    }

    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool {
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.inner.progress(now, events, events_max)
    }

    fn arm(&self) {
        self.inner.arm();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.inner.descriptor()
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn resources(&self) -> Resources {
        self.inner.resources()
    }
}

/// One side of a connection: a queue pair and the memory that the other side writes to.
struct Side {
    qp: Arc<dyn QueuePair>,
    _control: ControlRegion,
    rx: RxHalf,
    own: Descriptor,
    ring: Option<NativeRing>,
    room: Room,
    releases: Releases,
    next: ControlSequence,
}

impl Side {
    fn new(qp: Box<dyn QueuePair>) -> Self {
        let (ring, windows) =
            (RingGeometry::new(SLOTS).unwrap(), WindowGeometry::new(u64::from(WINDOW_BYTES), WINDOWS).unwrap());
        let qp: Arc<dyn QueuePair> = Arc::from(qp);
        let (control, rx) = (ControlRegion::open(&*qp, ring).unwrap(), RxHalf::open(&*qp, windows).unwrap());
        let own = Descriptor {
            ring,
            ring_at: control.address(),
            ring_bytes: control.mapping_bytes(),
            nonce: Nonce::ours(1),
            windows,
            bulk_at: rx.address(),
        };
        let intake = Intake::new(ring, windows, Negotiated::between(windows, windows));
        let releases = intake.releases();
        let reader = RingReader::new(intake, PIPELINE_BYTES_MIN);
        let room = reader.room();
        let ring = Some(control.ring(reader));
        Self { qp, _control: control, rx, own, ring, room, releases, next: ControlSequence::FIRST }
    }

    fn limits(&self) -> Negotiated {
        Negotiated::between(self.own.windows, self.own.windows)
    }

    /// Puts `record` into the ring of `to`, at once.
    fn write(&mut self, to: &Descriptor, record: &Record<'_>) {
        let write = SlotWrite::new(record, self.next, SLOTS);
        self.next = self.next.next().unwrap();
        let from = fabric::Source::Inline(write.octets().to_vec());
        let (key, address) = (to.ring_at.key, to.ring_at.address + write.offset());
        let work = Work::Write { from, key, address, flags: Flags::default() };
        self.qp.post(&mut vec![work]).unwrap();
        self.qp.kick();
    }
}

/// One lane of a poller, and peers on another lane of the same network.
struct Net {
    lane: Arc<Watched>,
    far_lane: Arc<dyn Lane>,
    attachments: Attachments,
    address: Address,
    _listener: Box<dyn Listener>,
}

/// A connection that the poller serves: our side, the peer's, and what the poller says.
struct Link {
    near: Side,
    far: Side,
    said: UnboundedReceiver<Events>,
    next: u64,
}

impl Net {
    fn new(seed: u64, faults: Faults) -> Self {
        let network = Loopback::new();
        let faulty = Faulty::new(Arc::new(network.clone()), seed, faults);
        let lane = Arc::new(Watched { inner: faulty.lane().unwrap(), turns: AtomicU64::new(0) });
        let address = Address::Name("near".to_owned());
        let listener = lane.listen(&address).unwrap();
        let far_lane = network.lane().unwrap();
        Self { lane, far_lane, attachments: Attachments::default(), address, _listener: listener }
    }

    /// Before the poller is started.
    fn connect(&self) -> Link {
        let far = Side::new(self.far_lane.dial(&self.address, Attributes::default()).unwrap());
        far.qp.establish(&[]).unwrap();
        let mut events = Vec::new();
        let request = loop {
            self.lane.progress(Instant::now(), &mut events, 8);
            if let Some(Event::ConnectRequest(request)) = events.pop() {
                break request;
            }
        };
        let mut near = Side::new(self.lane.admit(request, Attributes::default()).unwrap());
        let (inbox, said) = Inbox::<Events>::open();
        let ring = Box::new(near.ring.take().unwrap());
        self.attachments.attach(near.qp.number(), inbox.recipient(), Some(ring));
        near.qp.establish(&[]).unwrap();
        while !matches!(events.pop(), Some(Event::Established { .. })) {
            self.far_lane.progress(Instant::now(), &mut events, 8);
        }
        Link { near, far, said, next: 0 }
    }

    fn start(&self) -> Addr<CqPoller> {
        CqPoller::new(self.lane.clone(), self.attachments.clone()).start()
    }

    /// The lane takes no turns while nothing happens.
    async fn assert_parked(&self) {
        for _ in 0..500 {
            let before = self.lane.turns.load(Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(20)).await;
            if self.lane.turns.load(Ordering::Relaxed) == before {
                return;
            }
        }
        panic!("the lane is awake for nothing");
    }
}

impl Link {
    fn write(&mut self, record: &Record<'_>) {
        self.far.write(&self.near.own, record);
    }

    /// Words for the next message, whose numbers must fit.
    async fn words(&mut self) -> Vec<String> {
        let events = soon(self.said.recv()).await.expect("the inbox lives");
        assert_eq!(events.first, self.next, "nothing is missing, nothing comes twice");
        assert!(!events.batch.events.is_empty(), "no message for nothing");
        self.next += events.batch.events.len() as u64;
        let mut text = &events.batch.text[..];
        let word = |event| match event {
            TransportEvent::Inline(len) => {
                let (octets, rest) = text.split_at(len);
                text = rest;
                format!("text {}", octets.escape_ascii())
            }
            TransportEvent::BulkReady(lease) => format!("ready {}+{}", lease.sequence().get(), lease.len()),
            TransportEvent::Released(sequence) => format!("released {}", sequence.get()),
            TransportEvent::Stopped => "stopped".to_owned(),
            TransportEvent::WriteDone(completion) => format!("write {:?}", completion.status),
            TransportEvent::ReadDone(completion) => format!("read {:?}", completion.status),
            TransportEvent::SendDone(completion) => format!("send {:?}", completion.status),
            TransportEvent::Received(completion) => format!("received {:?}", completion.status),
            TransportEvent::Poisoned(poison) => format!("poisoned {}", poison.cause()),
            TransportEvent::Disconnected(_) => "disconnected".to_owned(),
        };
        events.batch.events.into_iter().map(word).collect()
    }

    /// Words up to one that begins with `last`; text that was cut is joined.
    async fn words_to(&mut self, last: &str) -> Vec<String> {
        let mut words: Vec<String> = Vec::new();
        while !words.last().is_some_and(|word| word.starts_with(last)) {
            for word in self.words().await {
                match (words.last_mut(), word.strip_prefix("text ")) {
                    (Some(before), Some(text)) if before.starts_with("text ") => before.push_str(text),
                    _ => words.push(word),
                }
            }
        }
        words
    }
}

fn release(sequence: u64) -> Record<'static> {
    Record::Release { sequence: BulkSequence::new(sequence).unwrap() }
}

fn ready(sequence: u64, len: u32) -> Record<'static> {
    Record::Ready { sequence: BulkSequence::new(sequence).unwrap(), len: NonZeroU32::new(len).unwrap() }
}

#[actix::test]
async fn a_connection_sees_one_history_in_the_order_of_the_ring_and_its_end_last() {
    for seed in 0..20 {
        let net = Net::new(seed, LATE);
        let (mut link, mut other) = (net.connect(), net.connect());
        let poller = net.start();
        for round in 0..4 {
            link.write(&Record::Inline(b"get "));
            link.write(&Record::Inline(b"k"));
            other.write(&Record::Inline(b"other"));
            link.write(&ready(round + 1, 7));
            link.write(&release(round + 1));
            link.write(&Record::Inline(b"!"));
            let mut words = link.words_to("text !").await;
            let expected = ["text get k", &format!("ready {}+7", round + 1), &format!("released {}", round + 1)];
            assert_eq!(words.pop().unwrap(), "text !");
            assert_eq!(words, expected, "seed {seed}");
            // The lease was dropped by the test: its connection would say so.
            assert!(link.near.releases.poll().is_some());
        }
        link.write(&Record::Inline(b"bye"));
        link.far.qp.disconnect();
        assert_eq!(link.words_to("disconnected").await, ["text bye", "disconnected"], "seed {seed}");
        assert_eq!(other.words_to("text otherotherotherother").await.len(), 1);
        net.attachments.detach(link.near.qp.number());
        net.assert_parked().await;
        assert!(link.said.try_recv().is_err() && other.said.try_recv().is_err());
        poller.send(Stop).await.unwrap();
    }
}

#[actix::test]
async fn completions_come_in_order_with_their_buffers() {
    let net = Net::new(3, LATE);
    let mut link = net.connect();
    let _poller = net.start();
    let to = link.far.own.ring_at;
    let bufs = link.near.qp.allocate(4096, 8).unwrap();
    let mut works: Vec<Work> = Vec::new();
    for (index, buf) in bufs.into_iter().enumerate() {
        let (key, address, flags) = (to.key, to.address, Flags::SIGNALED);
        works.push(if index % 2 == 0 {
            Work::Read { into: buf, range: 0..8, key, address, flags }
        } else {
            Work::Write { from: fabric::Source::Buffer { buf, range: 0..8 }, key, address, flags }
        });
    }
    link.near.qp.post(&mut works).unwrap();
    let mut words = Vec::new();
    while words.len() < 8 {
        words.extend(link.words().await);
    }
    assert_eq!(words, ["read Done", "write Done"].repeat(4));
}

#[actix::test]
async fn a_poisoned_ring_ends_its_own_history_and_no_other() {
    let net = Net::new(1, LATE);
    let (mut bad, mut good) = (net.connect(), net.connect());
    let poller = net.start();
    bad.write(&Record::Inline(b"get k"));
    bad.write(&ready(2, 7));
    let words = bad.words_to("poisoned").await;
    assert_eq!(words, ["text get k", "poisoned ready_sequence"]);
    for round in 0..10 {
        bad.write(&Record::Inline(b"more"));
        good.write(&Record::Inline(b"x"));
        assert_eq!(good.words().await, ["text x"], "round {round}");
    }
    net.assert_parked().await;
    assert!(bad.said.try_recv().is_err(), "it is not read any more");
    bad.far.qp.disconnect();
    assert_eq!(bad.words().await, ["disconnected"]);
    poller.send(Stop).await.unwrap();
}

#[actix::test]
async fn a_ring_stops_where_there_is_no_room_and_goes_on_when_told() {
    for seed in [0, 1] {
        let net = Net::new(seed, LATE);
        let mut link = net.connect();
        let _poller = net.start();
        let number = link.near.qp.number();
        let whole = PIPELINE_BYTES_MIN / INLINE_BYTES_MAX;
        let (mut came, mut read) = (0, 0);
        let mut sent = 0;
        for round in 0..6 {
            while sent < (round + 1) * (whole + 20) {
                link.write(&Record::Inline(&[b'x'; INLINE_BYTES_MAX]));
                sent += 1;
            }
            let words = link.words_to("stopped").await;
            came += words.iter().map(|word| word.strip_prefix("text ").map_or(0, str::len)).sum::<usize>();
            assert!(came - read <= PIPELINE_BYTES_MIN, "{came} came, {read} read");
            assert!(came - read > PIPELINE_BYTES_MIN - INLINE_BYTES_MAX, "{came} came, {read} read");
            net.assert_parked().await;
            assert!(link.said.try_recv().is_err(), "it is said once");
            // All is read but one octet: there is room, and nothing but the wake-up says so.
            read = came - 1;
            assert!(link.near.room.handle_read(read as u64));
            net.attachments.wake(number);
        }
    }
}

#[actix::test]
async fn the_unread_ring_of_a_connection_that_is_over_keeps_nobody_awake() {
    let net = Net::new(5, LATE);
    let (mut stopped, mut silent, mut gone) = (net.connect(), net.connect(), net.connect());
    let _poller = net.start();
    for _ in 0..100 {
        stopped.write(&Record::Inline(&[b'x'; INLINE_BYTES_MAX]));
    }
    stopped.words_to("stopped").await;
    // Nobody reads; then its peer goes: the end is told all the same.
    stopped.far.qp.disconnect();
    assert_eq!(stopped.words_to("disconnected").await, ["disconnected"]);
    net.attachments.silence(silent.near.qp.number());
    net.attachments.detach(gone.near.qp.number());
    for _ in 0..200 {
        silent.write(&Record::Inline(b"x"));
        gone.write(&Record::Inline(b"x"));
    }
    net.assert_parked().await;
    for link in [&stopped, &silent, &gone] {
        net.attachments.wake(link.near.qp.number());
    }
    net.assert_parked().await;
    assert!(silent.said.try_recv().is_err() && gone.said.try_recv().is_err());
    silent.far.qp.disconnect();
    assert_eq!(silent.words().await, ["disconnected"]);
    net.assert_parked().await;
}

#[actix::test]
async fn one_turn_takes_a_bounded_part_of_a_ring_and_others_come_in_between() {
    let net = Net::new(0, Faults::default());
    let (mut busy, mut other) = (net.connect(), net.connect());
    for _ in 0..SLOTS {
        busy.write(&release(1));
    }
    other.write(&Record::Inline(b"x"));
    let _poller = net.start();
    let mut counts = Vec::new();
    while counts.iter().sum::<usize>() < SLOTS as usize {
        counts.push(busy.words().await.len());
    }
    assert_eq!(counts, [128, 128]);
    assert_eq!(other.words().await, ["text x"]);
}

/// A `CreditManager`, its peer, and the test in the roles of connection and slots.
struct Post {
    net: Net,
    link: Link,
    credit: Addr<CreditManager>,
    told: UnboundedReceiver<Told>,
    bufs: Vec<LocalBuf>,
    slots: TxSlots<()>,
    _rig: Rig,
    _poller: Addr<CqPoller>,
}

impl Post {
    fn new(seed: u64) -> Self {
        let faults = Faults { refuse_per_mille: 300, ..LATE };
        let net = Net::new(seed, faults);
        let link = net.connect();
        let rig = Rig::new(|_| {});
        let (inbox, told) = Inbox::<Told>::open();
        let qp = link.near.qp.clone();
        let bufs = qp.allocate(WINDOW_BYTES as usize, WINDOWS as usize).unwrap();
        let credit = CreditManager::new(Parts {
            peer: link.far.own,
            limits: link.near.limits(),
            qp: qp.clone(),
            releases: link.near.releases.clone(),
            connection: inbox.recipient(),
            bulk: BulkWindow::new(
                qp.allocate(4096, WINDOWS as usize).unwrap(),
                rig.lane.clone(),
                Rc::new(()),
                Arc::default(),
            )
            .start(),
            metrics: rig.metrics.clone(),
            sinks: qp.allocate(4096, 2).unwrap(),
        })
        .start();
        let poller = net.start();
        Self { net, link, credit, told, bufs, slots: TxSlots::new(WINDOWS), _rig: rig, _poller: poller }
    }

    /// Fills the place of `ticket`, which asked before, with octets of `seed`.
    fn fill(&mut self, ticket: u64, seed: u32, len: usize) {
        let mut buf = self.bufs.pop().unwrap();
        buf.as_mut_slice()[..len].copy_from_slice(&octets(len, seed));
        let slot = self.slots.handle_filled(Ticket(ticket)).unwrap();
        self.credit.do_send(Filled { ticket: Ticket(ticket), slot, buf });
    }

    /// Passes completions on, as the connection does, until `holds`.
    async fn forward_until(&mut self, mut holds: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !holds(self) {
            assert!(start.elapsed() < Duration::from_secs(30), "never");
            while let Ok(events) = self.link.said.try_recv() {
                let mut turn = Turn::default();
                for event in events.batch.events {
                    match event {
                        TransportEvent::WriteDone(done) | TransportEvent::ReadDone(done) => {
                            turn.advances.push(Advance::Done(done));
                        }
                        TransportEvent::Released(sequence) => turn.advances.push(Advance::Released(sequence)),
                        _ => {}
                    }
                }
                self.credit.do_send(turn);
            }
            self.net.far_lane.progress(Instant::now(), &mut Vec::new(), 32);
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }
}

fn text(text: &str) -> Place {
    Place::Inline { text: InlineText::first_of(text.as_bytes()), part_of: None }
}

fn body(ticket: u64, len: u32) -> Place {
    Place::Body { ticket: Ticket(ticket), len: NonZeroU32::new(len).unwrap(), value: ValueId(0) }
}

#[actix::test]
async fn places_leave_in_their_order_in_whatever_order_they_are_filled() {
    use crate::actors::cq_poller::{Batch, Ring};
    for (seed, order) in [(0, [0, 1, 2]), (1, [2, 1, 0]), (2, [1, 2, 0]), (3, [2, 0, 1])] {
        let mut post = Post::new(seed);
        let lens = [5_usize, WINDOW_BYTES as usize, 77];
        let bodies = (0..3).map(|at| body(at, lens[at as usize] as u32));
        let places = [text("VALUE")].into_iter().chain(bodies).chain([text("END")]).collect();
        post.credit.do_send(Turn { places, ..Turn::default() });
        (0..3).for_each(|ticket| post.slots.handle_fill(Ticket(ticket), (), false));
        while let Some(grant) = post.slots.poll_grant() {
            assert!(grant.ticket.0 < 3);
        }
        for ticket in order {
            post.fill(ticket, ticket as u32, lens[ticket as usize]);
            tokio::task::yield_now().await;
        }
        post.credit.do_send(Finish);
        let mut posted = 0;
        post.forward_until(|post| {
            let mut finished = false;
            while let Ok(told) = post.told.try_recv() {
                match told {
                    Told::Posted(count) => posted += count,
                    Told::Finished => finished = true,
                    told => panic!("{told:?}"),
                }
            }
            finished
        })
        .await;
        assert_eq!(posted, 5);
        // All of it lies in the peer's memory by now.
        let mut batch = Batch::default();
        let far = &mut post.link.far;
        far.ring.as_mut().unwrap().poll(&mut batch, 100).unwrap();
        assert_eq!(batch.text, b"VALUEEND");
        let mut at = 0;
        for event in &batch.events {
            if let TransportEvent::BulkReady(lease) = event {
                let mut found = vec![0; lease.len() as usize];
                far.rx.copy_out(lease, 0, &mut found);
                assert!(found == octets(lens[at], at as u32), "body {at}, seed {seed}");
                at += 1;
            }
        }
        let kinds = batch.events.iter().map(|event| matches!(event, TransportEvent::BulkReady(_)));
        assert_eq!(kinds.collect::<Vec<_>>(), [false, true, true, true, false]);
    }
}

#[actix::test]
async fn a_release_goes_out_with_the_turn_that_follows_it() {
    let mut post = Post::new(7);
    let near = post.link.near.own;
    post.link.far.write(&near, &ready(1, 7));
    post.link.far.write(&near, &ready(2, 7));
    // The leases are dropped by the test, and turns come from it.
    let mut batch = crate::actors::cq_poller::Batch::default();
    post.forward_until(|post| {
        let ring = post.link.far.ring.as_mut().unwrap();
        crate::actors::cq_poller::Ring::poll(ring, &mut batch, 100).unwrap();
        matches!(batch.events.last(), Some(TransportEvent::Released(sequence)) if sequence.get() == 2)
    })
    .await;
}

#[actix::test]
async fn what_cannot_have_happened_ends_the_connection() {
    let id = WorkId { slot: 0, generation: 0, index: 9 };
    let completion = Completion {
        id,
        kind: WorkKind::Write,
        status: Status::Done,
        buf: None,
        len: 0,
        invalidated: None,
        solicited: false,
    };
    let unexpected = Poison::UnexpectedCompletion { found: 9, expected: 0 };
    let unsent = Poison::ReleaseUnsent { found: 3, sent: 0 };
    for (advance, expected) in
        [(Advance::Done(completion), unexpected), (Advance::Released(BulkSequence::new(3).unwrap()), unsent)]
    {
        let mut post = Post::new(1);
        post.credit.do_send(Turn { advances: vec![advance], ..Turn::default() });
        let Some(Told::Over(cause)) = soon(post.told.recv()).await else { panic!("it goes on") };
        assert_eq!(cause, EndCause::Poison(expected));
        post.credit.do_send(Turn { places: vec![text("more")], ..Turn::default() });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(post.told.try_recv().is_err(), "said once, and nothing is posted");
    }
}

/// A `BulkWindow` of two slots, and the test in the role of whoever sends from them.
struct Slots {
    rig: Rig,
    bulk: Addr<BulkWindow>,
    filled: UnboundedReceiver<Filled>,
    failed: UnboundedReceiver<Failed>,
    _link: Link,
    _net: Net,
}

impl Slots {
    fn new() -> Self {
        let net = Net::new(0, LATE);
        let link = net.connect();
        let rig = Rig::new(|config| config.store.value_bytes_max = 16 << 20);
        let bufs = link.near.qp.allocate(WINDOW_BYTES as usize, 2).unwrap();
        let bulk = BulkWindow::new(bufs, rig.lane.clone(), Rc::new(()), Arc::default()).start();
        let ((fills, filled), (fails, failed)) = (Inbox::<Filled>::open(), Inbox::<Failed>::open());
        bulk.do_send(Serve { filled: fills.recipient(), failed: fails.recipient() });
        Self { rig, bulk, filled, failed, _link: link, _net: net }
    }

    /// Asks for all windows of `key`; gives their number.
    fn ask(&self, key: &[u8], pins: &Arc<AtomicUsize>) -> u64 {
        let Lookup::Hit(pinned) = self.rig.store.get(key, self.rig.store.clock().now()) else { panic!("{key:?}") };
        let len = pinned.len();
        let source = Source::new(pinned, pins.clone());
        let count = len.div_ceil(u64::from(WINDOW_BYTES));
        let fill = |at: u64| {
            let offset = at * u64::from(WINDOW_BYTES);
            let len = (len - offset).min(u64::from(WINDOW_BYTES)) as u32;
            let piece = Piece { value: source.clone(), id: ValueId(0), offset, len };
            FillRequest { ticket: Ticket(at), piece, slow: false }
        };
        self.bulk.do_send(Fill((0..count).map(fill).collect()));
        count
    }

    async fn assert_quiet(&self, pins: &AtomicUsize) {
        until("no value is pinned", || pins.load(Ordering::Relaxed) == 0 && self.rig.store.gauges().pins == 0).await;
        let staging = &self.rig.lane.staging;
        until("all staging buffers are back", || staging.available() == staging.count()).await;
    }
}

#[actix::test]
async fn windows_are_filled_whole_from_ram_and_from_disk_and_never_more_than_there_are_slots() {
    for is_cold in [false, true] {
        let mut slots = Slots::new();
        let value = octets(1_000_003, 4);
        slots.rig.local.put(b"key", &value, 0, 0).await.unwrap();
        if is_cold {
            assert!(slots.rig.push_out(b"key").await >= 3);
        }
        let pins = Arc::new(AtomicUsize::new(0));
        let count = slots.ask(b"key", &pins);
        assert_eq!(count, 16);
        let mut tickets = Vec::new();
        for at in 0..count {
            let Filled { ticket, slot, buf } = soon(slots.filled.recv()).await.unwrap();
            tickets.push(ticket.0);
            let from = (ticket.0 * u64::from(WINDOW_BYTES)) as usize;
            let expected = &value[from..value.len().min(from + WINDOW_BYTES as usize)];
            assert!(buf.as_slice()[..expected.len()] == *expected, "window {at}, cold: {is_cold}");
            if at == 1 {
                // Earlier slots were given back; this one is not, and the one left serves what comes next.
                tokio::time::sleep(Duration::from_millis(20)).await;
                assert!(slots.filled.len() <= 1, "two slots, and one of them is here");
            }
            slots.bulk.do_send(SlotsRetired(vec![(slot, Some(buf))]));
        }
        tickets.sort_unstable();
        assert_eq!(tickets, (0..count).collect::<Vec<_>>());
        slots.assert_quiet(&pins).await;
        slots.bulk.do_send(bulk_window::Stop);
    }
}

#[actix::test]
async fn a_window_that_cannot_be_read_is_said_to_have_failed_once() {
    let mut slots = Slots::new();
    slots.rig.local.put(b"key", &octets(1 << 20, 4), 0, 0).await.unwrap();
    slots.rig.push_out(b"key").await;
    spoil(&slots.rig, b"key", 2);
    let pins = Arc::new(AtomicUsize::new(0));
    slots.ask(b"key", &pins);
    let bad = (512 << 10) / u64::from(WINDOW_BYTES);
    let mut filled = 0;
    loop {
        tokio::select! {
            biased;
            Some(Filled { ticket, slot, buf }) = slots.filled.recv() => {
                filled += 1;
                assert!(ticket.0 < bad, "the pieces before it are whole");
                slots.bulk.do_send(SlotsRetired(vec![(slot, Some(buf))]));
            }
            Some(Failed { ticket }) = slots.failed.recv() => {
                assert_eq!((ticket, filled), (Ticket(bad), bad));
                break;
            }
        }
    }
    assert!(slots.rig.store.peek(b"key", slots.rig.store.clock().now()).is_none(), "the value is dropped");
    slots.bulk.do_send(bulk_window::Cancel((0..16).map(Ticket).collect()));
    slots.assert_quiet(&pins).await;
}
