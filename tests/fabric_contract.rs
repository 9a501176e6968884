//! The contract of a fabric, proven for each by the same tests: what `bulkhead::fabric` promises in its head comment.

use std::collections::{BTreeSet, HashSet};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bulkhead::fabric::faulty::{Faults, Faulty};
use bulkhead::fabric::iwarp::{self, Iwarp};
use bulkhead::fabric::loopback::Loopback;
use bulkhead::fabric::traced::Traced;
use bulkhead::fabric::*;

/// Long enough for any machine, an emulated one too; nothing waits this long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(300);
const KEY_LEN: usize = 4096;

/// A fabric, an address where it listens, and what the contract leaves to a fabric.
struct Bed {
    fabric: Arc<dyn Fabric>,
    address: Address,
    traits: Traits,
}

/// What holds of software fabrics and not of every device.
#[derive(Clone, Copy)]
struct Traits {
    /// Every Write is an event; a Receive says whether it was solicited, and which key it took out of service.
    tells_all: bool,
    /// Octets that the private data of a [`Request`], an [`Answer`] and a [`Rejection`] is padded to, with zeros. Without it
    /// private data arrives as it was.
    padding: Option<[usize; 3]>,
    /// A violation is told from a disconnection, at both ends.
    names_violations: bool,
    /// The rights to read and to invalidate are checked.
    guards_keys: bool,
    /// The lane moves the octets, a bounded number each turn.
    moves_octets: bool,
}

const SOFTWARE: Traits =
    Traits { tells_all: true, padding: None, names_violations: true, guards_keys: true, moves_octets: true };

/// What the messages of the InfiniBand connection manager carry; of a request, the connection manager of IP addresses takes 36
/// octets for itself (InfiniBand Architecture Specification, volume 1, 12.6 and annex A11).
#[cfg(feature = "verbs")]
const INFINIBAND_PADDING: [usize; 3] = [56, 196, 148];

/// What carries private data.
#[derive(Clone, Copy)]
enum Carrier {
    Request,
    Answer,
    Rejection,
}
use Carrier::{Answer, Rejection, Request};

impl Traits {
    fn assert_said(self, by: Carrier, got: &[u8], sent: &[u8]) {
        let len = self.padding.map_or(sent.len(), |padding| padding[by as usize]);
        let mut expected = sent.to_vec();
        expected.resize(len, 0);
        assert_eq!(got, expected);
    }
}

fn loopback() -> Bed {
    Bed { fabric: Arc::new(Loopback::new()), address: Address::Name("contract".into()), traits: SOFTWARE }
}

fn iwarp_with(options: iwarp::Options) -> Bed {
    let address = Address::Socket(([127, 0, 0, 1], 0).into());
    Bed { fabric: Arc::new(Iwarp::new(options)), address, traits: SOFTWARE }
}

/// soft-RoCE: what InfiniBand hardware does too. The addresses are those of tests/rdma-vm.
#[cfg(feature = "verbs")]
fn verbs_over_rxe() -> Bed {
    let traits = Traits {
        tells_all: false,
        padding: Some(INFINIBAND_PADDING),
        names_violations: true,
        guards_keys: true,
        moves_octets: false,
    };
    Bed { fabric: Arc::new(verbs::Verbs), address: Address::Socket(([10, 99, 0, 1], 0).into()), traits }
}

/// soft-iWARP.
#[cfg(feature = "verbs")]
fn verbs_over_siw() -> Bed {
    let traits =
        Traits { tells_all: false, padding: None, names_violations: false, guards_keys: false, moves_octets: false };
    Bed { fabric: Arc::new(verbs::Verbs), address: Address::Socket(([10, 98, 0, 1], 0).into()), traits }
}

fn iwarp_large() -> Bed {
    iwarp_with(iwarp::Options::default())
}

/// Frames of one TCP segment, without CRCs: the other ends of both choices.
fn iwarp_small() -> Bed {
    iwarp_with(iwarp::Options { crc: false, segments: iwarp::Segments::UpTo(1442), ..iwarp::Options::default() })
}

/// The wrappers change nothing of the contract; here the delays of one, of requests and of events, and the log of the
/// other are both in the way.
fn wrapped_loopback() -> Bed {
    let faults = Faults { delay_per_mille: 300, hold_per_mille: 300, ..Faults::default() };
    let faulty = Faulty::new(Arc::new(Loopback::new()), 42, faults);
    Bed { fabric: Arc::new(Traced::new(Arc::new(faulty))), ..loopback() }
}

/// One end: its lane, and the events nobody has asked for yet.
struct Side {
    lane: Arc<dyn Lane>,
    events: Vec<Event>,
}

impl Side {
    fn new(fabric: &Arc<dyn Fabric>) -> Self {
        Self { lane: fabric.lane().unwrap(), events: Vec::new() }
    }

    /// The first event `take` wants, if it is there.
    fn find<T>(&mut self, mut take: impl FnMut(Event) -> Result<T, Event>) -> Option<T> {
        let mut found = None;
        let mut rest = Vec::with_capacity(self.events.len());
        for event in self.events.drain(..) {
            if found.is_some() {
                rest.push(event);
                continue;
            }
            match take(event) {
                Ok(value) => found = Some(value),
                Err(event) => rest.push(event),
            }
        }
        self.events = rest;
        found
    }
}

/// Two lanes in one thread.
struct World {
    bed: Bed,
    near: Side,
    far: Side,
    listener: Box<dyn Listener>,
}

#[derive(Clone, Copy)]
enum At {
    Near,
    Far,
}
use At::{Far, Near};

/// A connection: `near` dialled, `far` was admitted.
struct Pair {
    near: Box<dyn QueuePair>,
    far: Box<dyn QueuePair>,
}

impl World {
    fn new(bed: Bed) -> Self {
        let (near, far) = (Side::new(&bed.fabric), Side::new(&bed.fabric));
        let listener = far.lane.listen(&bed.address).unwrap();
        Self { bed, near, far, listener }
    }

    fn side(&mut self, at: At) -> &mut Side {
        match at {
            Near => &mut self.near,
            Far => &mut self.far,
        }
    }

    fn turn(&mut self) {
        let now = Instant::now();
        self.near.lane.progress(now, &mut self.near.events, 32);
        self.far.lane.progress(now, &mut self.far.events, 32);
    }

    fn wait<T>(&mut self, at: At, what: &str, mut take: impl FnMut(Event) -> Result<T, Event>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = self.side(at).find(&mut take) {
                return found;
            }
            self.turn();
            assert!(start.elapsed() < PATIENCE, "no {what}; near {:?}, far {:?}", self.near.events, self.far.events);
        }
    }

    fn completion(&mut self, at: At, qp: &dyn QueuePair) -> Completion {
        let number = qp.number();
        self.wait(at, "completion", |event| match event {
            Event::Completed { qp, completion } if qp == number => Ok(completion),
            event => Err(event),
        })
    }

    fn done(&mut self, at: At, qp: &dyn QueuePair) -> Completion {
        let completion = self.completion(at, qp);
        assert_eq!(completion.status, Status::Done, "{completion:?}");
        completion
    }

    fn cause(&mut self, at: At, qp: &dyn QueuePair) -> Cause {
        let number = qp.number();
        self.wait(at, "disconnection", |event| match event {
            Event::Disconnected { qp, cause } if qp == number => Ok(cause),
            event => Err(event),
        })
    }

    fn request(&mut self) -> ConnectRequest {
        self.wait(Far, "connection request", |event| match event {
            Event::ConnectRequest(request) => Ok(request),
            event => Err(event),
        })
    }

    fn established(&mut self, at: At, qp: &dyn QueuePair) -> Vec<u8> {
        let number = qp.number();
        self.wait(at, "established", |event| match event {
            Event::Established { qp, private_data } if qp == number => Ok(private_data),
            event => Err(event),
        })
    }

    fn dial(&self, attributes: Attributes) -> Box<dyn QueuePair> {
        self.near.lane.dial(&self.listener.address(), attributes).unwrap()
    }

    fn pair(&mut self) -> Pair {
        self.pair_with(Attributes::default())
    }

    fn pair_with(&mut self, attributes: Attributes) -> Pair {
        let near = self.dial(attributes);
        near.establish(b"near").unwrap();
        let request = self.request();
        let far = self.far.lane.admit(request, attributes).unwrap();
        far.establish(b"far").unwrap();
        self.established(Near, &*near);
        self.established(Far, &*far);
        Pair { near, far }
    }

    /// Nothing but octets in both directions.
    fn assert_works(&mut self, pair: &Pair) {
        for (from, to, at, away) in [(&pair.near, &pair.far, Near, Far), (&pair.far, &pair.near, Far, Near)] {
            to.post_receive(buf(&**to, 1)).unwrap();
            from.post(&mut vec![send(b"still here")]).unwrap();
            let received = self.done(away, &**to);
            assert_eq!(&received.buf.unwrap().as_slice()[..received.len], b"still here");
            self.done(at, &**from);
        }
    }

    /// The initiator of a request that breaks the rules, and its target.
    fn assert_violated(&self, initiator: &Cause, target: &Cause, why: &str) {
        let is_ended = |cause: &Cause| matches!(cause, Cause::Peer | Cause::Lost(_));
        let lenient = !self.bed.traits.names_violations;
        // Hardware does not answer a Send that it may not carry out; the target ends the connection.
        let unanswered = why == NOT_INVALIDATABLE && !self.bed.traits.moves_octets;
        let refused = matches!(initiator, Cause::RefusedByPeer(_)) || (lenient || unanswered) && is_ended(initiator);
        assert!(refused, "{why}: {initiator:?}");
        // A queue pair of hardware only asks for the Send to be repeated, and learns no more of it.
        let lenient = lenient || why == NO_RECEIVE && !self.bed.traits.moves_octets;
        assert!(matches!(target, Cause::PeerFault(_)) || lenient && is_ended(target), "{why}: {target:?}");
    }

    /// The rest of a connection's life, after which nothing is left of it.
    fn assert_gone(mut self) {
        let start = Instant::now();
        drop(self.listener);
        loop {
            let now = Instant::now();
            self.near.lane.progress(now, &mut self.near.events, 32);
            self.far.lane.progress(now, &mut self.far.events, 32);
            let left = [self.near.lane.resources(), self.far.lane.resources()];
            if left == [Resources::default(); 2] {
                return;
            }
            self.near.events.clear();
            self.far.events.clear();
            assert!(start.elapsed() < PATIENCE, "left behind: {left:?}");
        }
    }
}

fn buf(qp: &dyn QueuePair, len: usize) -> LocalBuf {
    qp.allocate(len, 1).unwrap().remove(0)
}

fn filled(qp: &dyn QueuePair, octets: &[u8]) -> Source {
    let mut buf = buf(qp, octets.len().max(1));
    buf.as_mut_slice()[..octets.len()].copy_from_slice(octets);
    Source::Buffer { buf, range: 0..octets.len() }
}

fn send(octets: &[u8]) -> Work {
    Work::Send { from: Source::Inline(octets.to_vec()), invalidate: None, flags: Flags::SIGNALED }
}

fn write(octets: &[u8], to: RemoteSpan, offset: u64) -> Work {
    let from = Source::Inline(octets.to_vec());
    Work::Write { from, key: to.key, address: to.address.wrapping_add(offset), flags: Flags::SIGNALED }
}

fn write_bulk(qp: &dyn QueuePair, octets: &[u8], to: RemoteSpan, offset: u64) -> Work {
    Work::Write { from: filled(qp, octets), key: to.key, address: to.address + offset, flags: Flags::default() }
}

fn read(qp: &dyn QueuePair, len: usize, from: RemoteSpan, offset: u64) -> Work {
    let into = buf(qp, len.max(1));
    let address = from.address.wrapping_add(offset);
    Work::Read { into, range: 0..len, key: from.key, address, flags: Flags::default() }
}

fn octets_of(span: &SharedSpan) -> Vec<u8> {
    let mut octets = vec![0; span.len()];
    span.copy_out(0, &mut octets);
    octets
}

/// Octets that differ at every place and with every seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|n| (n.wrapping_mul(0x9e37_79b9).wrapping_add(seed * 77) >> 7) as u8).collect()
}

fn private_data_goes_both_ways(bed: Bed) {
    let mut world = World::new(bed);
    for len in [0, 1, 55, 56] {
        let (question, answer) = (pattern(len, 1), pattern(len, 2));
        let near = world.dial(Attributes::default());
        near.establish(&question).unwrap();
        assert!(matches!(near.establish(&question), Err(FabricError::State)));
        let request = world.request();
        world.bed.traits.assert_said(Request, request.private_data(), &question);
        assert_eq!(*request.listener(), world.listener.address());
        let far = world.far.lane.admit(request, Attributes::default()).unwrap();
        far.establish(&answer).unwrap();
        let said = world.established(Near, &*near);
        world.bed.traits.assert_said(Answer, &said, &answer);
        assert_eq!(world.established(Far, &*far), b"");
        world.assert_works(&Pair { near, far });
    }
    let near = world.dial(Attributes::default());
    assert!(matches!(near.establish(&[0; 57]), Err(FabricError::PrivateDataTooLong { len: 57 })));
    near.establish(&[0; 56]).unwrap();
    drop(world.request());
    drop(near);
    world.assert_gone();
}

fn a_rejection_carries_its_reason_and_a_dropped_request_or_queue_pair_rejects(bed: Bed) {
    let mut world = World::new(bed);
    let ways: [fn(&World, ConnectRequest); 3] = [
        |_, request| request.reject(b"busy"),
        |_, request| drop(request),
        |world, request| drop(world.far.lane.admit(request, Attributes::default()).unwrap()),
    ];
    for (way, reason) in ways.iter().zip([&b"busy"[..], b"", b""]) {
        let near = world.dial(Attributes::default());
        let sink = buf(&*near, 1);
        near.post_receive(sink).unwrap();
        near.establish(b"").unwrap();
        let request = world.request();
        way(&world, request);
        let number = near.number();
        let said = world.wait(Near, "rejection", |event| match event {
            Event::Rejected { qp, private_data } if qp == number => Ok(private_data),
            event => Err(event),
        });
        world.bed.traits.assert_said(Rejection, &said, reason);
        assert_eq!(world.completion(Near, &*near).status, Status::Flushed);
        assert_eq!(near.post(&mut vec![send(b"x")]), Err(PostError::Ended));
    }
    world.assert_gone();
}

fn who_dials_where_nobody_listens_is_told(bed: Bed) {
    let mut world = World::new(bed);
    let address = world.listener.address();
    world.listener = world
        .far
        .lane
        .listen(&match address.clone() {
            Address::Socket(mut socket) => {
                socket.set_port(0);
                Address::Socket(socket)
            }
            Address::Name(name) => Address::Name(name + " elsewhere"),
        })
        .unwrap();
    let near = world.near.lane.dial(&address, Attributes::default()).unwrap();
    near.establish(b"").unwrap();
    let cause = world.cause(Near, &*near);
    assert!(matches!(cause, Cause::Lost(_)), "{cause:?}");
    world.assert_gone();
}

fn a_handshake_that_nobody_answers_ends_at_its_deadline(bed: Bed) {
    let mut world = World::new(bed);
    let near = world.dial(Attributes::default());
    near.establish(b"").unwrap();
    let request = world.request();
    world.turn();
    let deadline = world.near.lane.deadline().expect("a handshake under way has a deadline");
    let mut events = Vec::new();
    world.near.lane.progress(deadline - Duration::from_millis(1), &mut events, 32);
    assert!(events.is_empty(), "{events:?}");
    while events.is_empty() {
        world.near.lane.progress(deadline, &mut events, 32);
    }
    assert!(matches!(events[..], [Event::Disconnected { cause: Cause::TimedOut, .. }]), "{events:?}");
    assert_eq!(world.near.lane.deadline(), None);
    // The peer is gone, which shows at once or a little later.
    match world.far.lane.admit(request, Attributes::default()) {
        Ok(far) if far.establish(b"").is_ok() => {
            let cause = world.cause(Far, &*far);
            assert!(matches!(cause, Cause::Peer | Cause::Lost(_)), "{cause:?}");
        }
        Ok(_) | Err(FabricError::System { .. }) => {}
        Err(error) => panic!("{error}"),
    }
    drop(near);
    world.assert_gone();
}

fn a_polling_receiver_sees_writes_in_order_and_the_last_word_last(bed: Bed) {
    const SLOTS: u64 = 16;
    const BULK: usize = 96 << 10;
    let mut world = World::new(bed);
    let pair = world.pair();
    let (ring, bulk) = (SharedSpan::new(SLOTS as usize * 256).unwrap(), SharedSpan::new(2 * BULK).unwrap());
    let ring_region = pair.far.register(ring.clone(), Access::WRITE).unwrap();
    let bulk_region = pair.far.register(bulk.clone(), Access::WRITE).unwrap();
    // The first record is the second slot's.
    ring_region.watch(256 + 248, 0);
    let seen = AtomicU64::new(0);
    let rounds = 300;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut octets = vec![0; BULK];
            for round in 1..=rounds {
                let slot = (round % SLOTS) as usize * 256;
                while ring.load_u64_acquire(slot + 248) != round {
                    std::thread::yield_now();
                }
                let mut record = [0; 192];
                ring.copy_out(slot + 56, &mut record);
                assert_eq!(record[..], pattern(192, round));
                bulk.copy_out((round % 2) as usize * BULK, &mut octets);
                assert_eq!(octets, pattern(BULK, round), "a Write before the record is visible with it");
                seen.store(round, Ordering::Release);
            }
        });
        let mut posted = 0;
        let start = Instant::now();
        while seen.load(Ordering::Acquire) < rounds {
            if posted < rounds && posted < seen.load(Ordering::Acquire) + 2 {
                posted += 1;
                let record = [&pattern(192, posted)[..], &posted.to_le_bytes()].concat();
                let bulk_offset = (posted % 2) * BULK as u64;
                let body = write_bulk(&*pair.near, &pattern(BULK, posted), bulk_region.remote(), bulk_offset);
                let record = write(&record, ring_region.remote(), (posted % SLOTS) * 256 + 56);
                pair.near.post(&mut vec![body, record]).unwrap();
                pair.near.kick();
            }
            world.turn();
            assert!(start.elapsed() < PATIENCE);
        }
    });
    let written: HashSet<_> = world
        .far
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Written { key, .. } => Some(*key),
            _ => None,
        })
        .collect();
    let mut expected = HashSet::from([ring_region.key()]);
    if world.bed.traits.tells_all {
        expected.insert(bulk_region.key());
    }
    assert_eq!(written, expected);
}

fn a_send_is_delivered_after_earlier_writes(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let span = SharedSpan::new(1 << 20).unwrap();
    let region = pair.far.register(span.clone(), Access::WRITE).unwrap();
    for round in 1..20 {
        pair.far.post_receive(buf(&*pair.far, KEY_LEN)).unwrap();
        let body = pattern(1 << 20, round);
        let message = pattern(round as usize * 100, round + 1);
        let message_work = Work::Send {
            from: filled(&*pair.near, &message),
            invalidate: None,
            flags: Flags { solicited: true, ..Flags::default() },
        };
        pair.near.post(&mut vec![write_bulk(&*pair.near, &body, region.remote(), 0), message_work]).unwrap();
        let received = world.done(Far, &*pair.far);
        assert_eq!(octets_of(&span), body);
        assert_eq!((received.kind, received.len), (WorkKind::Receive, message.len()));
        assert!(received.solicited || !world.bed.traits.tells_all);
        assert_eq!(received.buf.unwrap().as_slice()[..received.len], message);
        let (first, second) = (world.done(Near, &*pair.near), world.done(Near, &*pair.near));
        assert_eq!((first.kind, first.len, second.kind), (WorkKind::Write, 1 << 20, WorkKind::Send));
    }
}

fn a_read_sees_what_was_written_before_it(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let region = pair.far.register(SharedSpan::new(1 << 20).unwrap(), Access::BOTH).unwrap();
    for (round, len) in [1, 7, 8, 200, 4096, 65_537, 1 << 20].into_iter().enumerate() {
        let body = pattern(len, round as u64);
        let mut work = vec![
            write_bulk(&*pair.near, &body, region.remote(), 0),
            read(&*pair.near, len, region.remote(), 0),
            write_bulk(&*pair.near, &vec![0; len], region.remote(), 0),
        ];
        if let Work::Write { flags, .. } = &mut work[2] {
            flags.fenced = true;
        }
        pair.near.post(&mut work).unwrap();
        assert_eq!(world.done(Near, &*pair.near).kind, WorkKind::Write);
        let completion = world.done(Near, &*pair.near);
        assert_eq!((completion.kind, completion.len), (WorkKind::Read, len));
        assert_eq!(&completion.buf.unwrap().as_slice()[..len], body);
        world.done(Near, &*pair.near);
    }
}

fn many_reads_wait_for_their_turn_and_both_ends_may_read(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair_with(Attributes { read_depth: 2, ..Attributes::default() });
    let body = pattern(300 << 10, 9);
    for (qp, peer, at) in [(&pair.near, &pair.far, Near), (&pair.far, &pair.near, Far)] {
        let span = SharedSpan::new(body.len()).unwrap();
        span.copy_in(0, &body);
        let region = peer.register(span, Access::READ).unwrap();
        let mut work = (0..20).map(|n| read(&**qp, 200 << 10, region.remote(), n * 5000)).collect();
        qp.post(&mut work).unwrap();
        for n in 0..20 {
            let completion = world.done(at, &**qp);
            let buf = completion.buf.unwrap();
            assert_eq!(buf.as_slice()[..200 << 10], body[n * 5000..][..200 << 10]);
        }
    }
}

fn completions_come_in_the_order_of_posting(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let region = pair.far.register(SharedSpan::new(KEY_LEN).unwrap(), Access::BOTH).unwrap();
    for _ in 0..4 {
        pair.far.post_receive(buf(&*pair.far, 1)).unwrap();
    }
    let silent = |mut work: Work| {
        if let Work::Write { flags, .. } | Work::Send { flags, .. } = &mut work {
            flags.signaled = false;
        }
        work
    };
    let remote = region.remote();
    let mut work = vec![
        read(&*pair.near, 4000, remote, 0),
        silent(write(b"a", remote, 0)),
        send(b"b"),
        write(b"c", remote, 1),
        silent(send(b"d")),
        read(&*pair.near, 8, remote, 0),
        send(b"e"),
        send(b"f"),
    ];
    let first = pair.near.post(&mut work).unwrap();
    let indexes: Vec<_> = (0..6).map(|_| world.done(Near, &*pair.near).id.index.wrapping_sub(first.index)).collect();
    assert_eq!(indexes, [0, 2, 3, 5, 6, 7]);
    let messages: Vec<_> = (0..4).map(|_| world.done(Far, &*pair.far).buf.unwrap().as_slice()[0]).collect();
    assert_eq!(messages, *b"bdef");
}

fn nothing_moves_for_requests_of_no_octets(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let nothing = RemoteSpan { key: RemoteKey(77), address: u64::MAX, len: 0 };
    pair.far.post_receive(buf(&*pair.far, 1)).unwrap();
    pair.near.post(&mut vec![write(b"", nothing, 0), read(&*pair.near, 0, nothing, 0), send(b"")]).unwrap();
    for _ in 0..3 {
        assert_eq!(world.done(Near, &*pair.near).len, 0);
    }
    assert_eq!(world.done(Far, &*pair.far).len, 0);
    world.assert_works(&pair);
}

const NO_RECEIVE: &str = "no Receive";
const NOT_INVALIDATABLE: &str = "not invalidatable";

/// Posts `work` at the near end, which must cost exactly that connection.
fn assert_refused(world: &mut World, pair: Pair, witness: &Pair, mut work: Vec<Work>, why: &str) {
    let sinks = 3;
    for _ in 0..sinks {
        // Behind the culprit: nothing of it may be carried out.
        work.push(read(&*pair.near, 1, RemoteSpan { key: RemoteKey(5), address: 1 << 33, len: 8 }, 0));
    }
    pair.near.post(&mut work).unwrap();
    let culprit = world.completion(Near, &*pair.near);
    let refused = culprit.status != Status::Done;
    // The sender of a Write or Send may hear of the refusal only after its octets left.
    assert!(refused || culprit.kind != WorkKind::Read, "{why}: {culprit:?}");
    for _ in 0..sinks {
        let flushed = world.completion(Near, &*pair.near);
        assert!(flushed.status == Status::Flushed && flushed.buf.is_some(), "{why}: {flushed:?}");
    }
    let (near, far) = (world.cause(Near, &*pair.near), world.cause(Far, &*pair.far));
    world.assert_violated(&near, &far, why);
    assert_eq!(pair.near.post(&mut vec![send(b"x")]), Err(PostError::Ended));
    world.assert_works(witness);
}

fn the_target_refuses_rights_bounds_and_keys_and_only_that_connection_ends(bed: Bed) {
    let mut world = World::new(bed);
    let witness = world.pair();
    let other = SharedSpan::new(KEY_LEN).unwrap();
    let foreign = witness.far.register(other.clone(), Access::BOTH).unwrap();
    let octets = [0x55; 16];
    let untouched = vec![0xaa; KEY_LEN];
    type Attempt<'a> = Box<dyn Fn(&dyn QueuePair, RemoteSpan) -> Work + 'a>;
    let cases: Vec<(&str, Access, bool, Attempt<'_>)> = vec![
        ("write without the right", Access::READ, false, Box::new(|_, to| write(&octets, to, 0))),
        ("read without the right", Access::WRITE, false, Box::new(|qp, to| read(qp, 16, to, 0))),
        ("write over the end", Access::BOTH, false, Box::new(|_, to| write(&octets, to, KEY_LEN as u64 - 15))),
        ("write before the start", Access::BOTH, false, Box::new(|_, to| write(&octets, to, 0u64.wrapping_sub(1)))),
        ("write beyond the end", Access::BOTH, false, Box::new(|_, to| write(&octets, to, 1 << 40))),
        ("read over the end", Access::BOTH, false, Box::new(|qp, to| read(qp, 17, to, KEY_LEN as u64 - 16))),
        (
            "write that wraps",
            Access::BOTH,
            false,
            Box::new(|_, to| write(&octets, RemoteSpan { address: u64::MAX - 7, ..to }, 0)),
        ),
        (
            "read that wraps",
            Access::BOTH,
            false,
            Box::new(|qp, to| read(qp, 16, RemoteSpan { address: u64::MAX - 7, ..to }, 0)),
        ),
        (
            "unknown key",
            Access::BOTH,
            false,
            Box::new(|_, to| write(&octets, RemoteSpan { key: RemoteKey(to.key.0 ^ 1), ..to }, 0)),
        ),
        ("key of another connection", Access::BOTH, false, Box::new(|_, _| write(&octets, foreign.remote(), 0))),
        (
            "read by the key of another connection",
            Access::BOTH,
            false,
            Box::new(|qp, _| read(qp, 16, foreign.remote(), 0)),
        ),
        ("invalidated key", Access::BOTH, true, Box::new(|_, to| write(&octets, to, 0))),
        ("read of an invalidated key", Access::BOTH, true, Box::new(|qp, to| read(qp, 16, to, 0))),
    ];
    for (why, access, invalidate, attempt) in cases {
        if why == "read without the right" && !world.bed.traits.guards_keys {
            continue;
        }
        let pair = world.pair();
        let span = SharedSpan::new(KEY_LEN).unwrap();
        span.copy_in(0, &untouched);
        let region = pair.far.register(span.clone(), access).unwrap();
        if invalidate {
            assert!(region.invalidate());
        }
        let work = attempt(&*pair.near, region.remote());
        assert_refused(&mut world, pair, &witness, vec![work], why);
        assert_eq!(octets_of(&span), untouched, "{why}");
        assert_eq!(octets_of(&other), vec![0; KEY_LEN], "{why}");
    }
    // A region whose guard is gone, and the responder as the culprit.
    let pair = world.pair();
    let remote = pair.near.register(SharedSpan::new(8).unwrap(), Access::BOTH).unwrap().remote();
    pair.far.post(&mut vec![write(&[1; 8], remote, 0)]).unwrap();
    let (far, near) = (world.cause(Far, &*pair.far), world.cause(Near, &*pair.near));
    world.assert_violated(&far, &near, "the responder");
    world.assert_works(&witness);
    drop((pair, witness, foreign));
    world.assert_gone();
}

fn a_send_needs_a_receive_that_is_long_enough(bed: Bed) {
    let mut world = World::new(bed);
    let witness = world.pair();
    let pair = world.pair();
    assert_refused(&mut world, pair, &witness, vec![send(b"nobody waits")], NO_RECEIVE);
    let pair = world.pair();
    pair.far.post_receive(buf(&*pair.far, 4096)).unwrap();
    let long = Work::Send { from: filled(&*pair.near, &[1; 4097]), invalidate: None, flags: Flags::SIGNALED };
    let far = pair.far.number();
    assert_refused(&mut world, pair, &witness, vec![long], "Receive too short");
    let status = world.wait(Far, "flushed Receive", |event| match event {
        Event::Completed { qp, completion } if qp == far => Ok(completion.status),
        event => Err(event),
    });
    assert_ne!(status, Status::Done);
}

fn a_send_takes_a_key_out_of_service_where_its_owner_permits(bed: Bed) {
    let mut world = World::new(bed);
    let witness = world.pair();
    let pair = world.pair();
    let span = SharedSpan::new(KEY_LEN).unwrap();
    let region = pair.far.register(span.clone(), Access::BOTH.invalidatable()).unwrap();
    let key = region.key();
    pair.far.post_receive(buf(&*pair.far, 1)).unwrap();
    let flags = Flags { signaled: true, fenced: true, solicited: false };
    let farewell = Work::Send { from: Source::Inline(b"yours".to_vec()), invalidate: Some(key), flags };
    let mut work = vec![read(&*pair.near, 100, region.remote(), 0), write(b"last", region.remote(), 0), farewell];
    pair.near.post(&mut work).unwrap();
    let received = world.done(Far, &*pair.far);
    assert_eq!(received.len, 5);
    assert_eq!(octets_of(&span)[..4], *b"last");
    if world.bed.traits.tells_all {
        assert_eq!(received.invalidated, Some(key));
        assert!(!region.invalidate(), "it is invalid already");
    }
    for _ in 0..3 {
        world.done(Near, &*pair.near);
    }
    let late = write(b"late", region.remote(), 0);
    assert_refused(&mut world, pair, &witness, vec![late], "write after invalidation");
    assert_eq!(octets_of(&span)[..4], *b"last");

    if !world.bed.traits.guards_keys {
        return;
    }
    let pair = world.pair();
    let region = pair.far.register(span, Access::BOTH).unwrap();
    pair.far.post_receive(buf(&*pair.far, 1)).unwrap();
    let work = Work::Send { from: Source::Inline(vec![1]), invalidate: Some(region.key()), flags };
    assert_refused(&mut world, pair, &witness, vec![work], NOT_INVALIDATABLE);
}

fn a_failure_gives_every_buffer_back_and_the_disconnection_comes_last(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let bad = RemoteSpan { key: RemoteKey(3), address: 1 << 33, len: 8 };
    for _ in 0..5 {
        pair.near.post_receive(buf(&*pair.near, 1)).unwrap();
        pair.far.post_receive(buf(&*pair.far, 1)).unwrap();
    }
    let mut work: Vec<_> = (0..10).map(|_| read(&*pair.near, 8, bad, 0)).collect();
    pair.near.post(&mut work).unwrap();
    let mut far_work: Vec<_> = (0..10).map(|_| read(&*pair.far, 8, bad, 0)).collect();
    // Both ends break the rules at once; whoever is found first, all comes back.
    pair.far.post(&mut far_work).unwrap();
    let start = Instant::now();
    let ended = |side: &Side| side.events.iter().any(|event| matches!(event, Event::Disconnected { .. }));
    while !ended(&world.near) || !ended(&world.far) {
        world.turn();
        assert!(start.elapsed() < PATIENCE);
    }
    for _ in 0..3 {
        world.turn();
    }
    for side in [&mut world.near, &mut world.far] {
        assert!(matches!(side.events.pop(), Some(Event::Disconnected { .. })), "the last event");
        let (mut sends, mut receives) = (Vec::new(), 0);
        for event in side.events.drain(..) {
            let Event::Completed { completion, .. } = event else { panic!("{event:?}") };
            assert!(completion.status != Status::Done && completion.buf.is_some());
            match completion.kind {
                WorkKind::Receive => receives += 1,
                _ => sends.push(completion.id.index),
            }
        }
        assert_eq!((sends, receives), ((0..10).collect(), 5));
    }
}

fn queues_and_requests_have_limits_and_a_refused_request_stays_with_its_poster(bed: Bed) {
    let mut world = World::new(bed);
    let attributes = Attributes { send_depth: 4, receive_depth: 2, inline_bytes_max: 64, ..Attributes::default() };
    let near = world.dial(attributes);
    assert_eq!(near.post(&mut vec![send(b"early")]), Err(PostError::NotConnected));
    near.establish(b"").unwrap();
    assert_eq!(near.post(&mut vec![send(b"early")]), Err(PostError::NotConnected));
    let request = world.request();
    let far = world.far.lane.admit(request, attributes).unwrap();
    assert_eq!(far.post(&mut vec![send(b"early")]), Err(PostError::NotConnected));
    for _ in 0..2 {
        far.post_receive(buf(&*far, 1)).unwrap();
    }
    let (error, back) = far.post_receive(buf(&*far, 1)).unwrap_err();
    assert_eq!((error, back.len()), (PostError::Full { posted: 1, depth: 2 }, 4096));
    let (error, _) = near.post_receive(back).unwrap_err();
    assert_eq!(error, PostError::ForeignBuffer);
    far.establish(b"").unwrap();
    world.established(Near, &*near);
    world.established(Far, &*far);

    let mut work = vec![send(&[0; 65])];
    assert_eq!(near.post(&mut work), Err(PostError::InlineTooLong { len: 65, max: 64 }));
    assert_eq!(work.len(), 1);
    let from = Source::Buffer { buf: buf(&*near, 4096), range: 4000..4097 };
    let mut work = vec![Work::Send { from, invalidate: None, flags: Flags::default() }];
    assert_eq!(near.post(&mut work), Err(PostError::Range { start: 4000, end: 4097, len: 4096 }));
    let mut work = vec![Work::Send { from: filled(&*far, b"not mine"), invalidate: None, flags: Flags::default() }];
    assert_eq!(near.post(&mut work), Err(PostError::ForeignBuffer));
    let mut work = (0..5).map(|_| send(&[])).collect();
    assert_eq!(near.post(&mut work), Err(PostError::Full { posted: 5, depth: 4 }));
    assert_eq!(work.len(), 5);
    work.truncate(2);
    near.post(&mut work).unwrap();
    world.done(Near, &*near);
    world.done(Near, &*near);
    let region = far.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap();
    let mut work = (0..4).map(|_| write(&[1], region.remote(), 0)).collect();
    near.post(&mut work).unwrap();
    for _ in 0..4 {
        world.done(Near, &*near);
    }
    let deep = Attributes { send_depth: 0, ..attributes };
    assert!(matches!(world.near.lane.dial(&world.listener.address(), deep), Err(FabricError::Attributes { .. })));
    let none = Attributes { read_depth: 0, ..attributes };
    assert!(matches!(world.near.lane.dial(&world.listener.address(), none), Err(FabricError::Attributes { .. })));
    let Pair { near: mute, far } = world.pair_with(Attributes { never_reads: true, ..Attributes::default() });
    let region = far.register(SharedSpan::new(8).unwrap(), Access::BOTH).unwrap();
    let mut work = vec![write(&[1], region.remote(), 0), read(&*mute, 8, region.remote(), 0)];
    assert_eq!(mute.post(&mut work), Err(PostError::NeverReads));
    work.truncate(1);
    mute.post(&mut work).unwrap();
    world.done(Near, &*mute);
    let odd = SharedSpan::new(64).unwrap().slice(4..64);
    assert!(matches!(near.register(odd, Access::BOTH), Err(FabricError::Unaligned)));
}

fn both_ends_see_the_end(bed: Bed) {
    let mut world = World::new(bed);
    for end in 0..4 {
        let Pair { near, far } = world.pair();
        // The peer has a right to it until the end: of rxe a queue pair with such regions took 50 s to end.
        let access = if end % 2 == 0 { Access::WRITE } else { Access::WRITE.invalidatable() };
        let region = near.register(SharedSpan::new(8).unwrap(), access).unwrap();
        near.post_receive(buf(&*near, 1)).unwrap();
        far.post_receive(buf(&*far, 1)).unwrap();
        // What completed before still arrives.
        near.post(&mut vec![send(b"goodbye")]).unwrap();
        world.done(Near, &*near);
        let (near_number, far_number) = (near.number(), far.number());
        match end {
            0 => near.disconnect(),
            1 => far.disconnect(),
            2 => {
                let received = world.done(Far, &*far);
                far.post_receive(received.buf.unwrap()).unwrap();
                drop(near);
            }
            _ => {
                drop(far);
            }
        }
        let mut causes = Vec::new();
        for (at, number) in [(Near, near_number), (Far, far_number)] {
            causes.push(world.wait(at, "the end", |event| match event {
                Event::Disconnected { qp, cause } if qp == number => Ok(cause),
                event => Err(event),
            }));
        }
        let expected = if end % 2 == 0 { [Cause::Local, Cause::Peer] } else { [Cause::Peer, Cause::Local] };
        assert_eq!(causes, expected, "way {end}");
        if end == 0 {
            let received = world.side(Far).find(|event| match event {
                Event::Completed { completion, .. } if completion.status == Status::Done => Ok(completion),
                event => Err(event),
            });
            let received = received.expect("the message sent before the end");
            assert_eq!(&received.buf.unwrap().as_slice()[..received.len], b"goodbye");
        }
        assert!(!region.invalidate(), "the region ended with its queue pair");
        for (at, number) in [(Near, near_number), (Far, far_number)] {
            let flushed = world.side(at).find(|event| match event {
                Event::Completed { qp, completion } if qp == number && completion.status == Status::Flushed => {
                    Ok(completion)
                }
                event => Err(event),
            });
            let expects_flush = matches!((end, at), (_, Near) | (2, Far));
            assert!(flushed.is_some() || !expects_flush, "the Receive came back");
        }
        world.near.events.clear();
        world.far.events.clear();
    }
    world.assert_gone();
}

fn a_turn_is_bounded(bed: Bed) {
    const LEN: usize = 4 << 20;
    if !bed.traits.moves_octets {
        return;
    }
    let mut world = World::new(bed);
    let pair = world.pair();
    let region = pair.far.register(SharedSpan::new(LEN).unwrap(), Access::WRITE).unwrap();
    pair.near.post(&mut vec![write_bulk(&*pair.near, &pattern(LEN, 1), region.remote(), 0)]).unwrap();
    let mut turns = 0;
    let start = Instant::now();
    while !world.near.events.iter().any(|event| matches!(event, Event::Completed { .. })) {
        world.turn();
        turns += 1;
        assert!(start.elapsed() < PATIENCE);
    }
    // One more segment may end a turn, no more.
    assert!(turns + 1 >= LEN / (TURN_BYTES_MAX + (64 << 10)), "{turns} turns for {LEN} octets");
}

fn events_come_in_batches_no_larger_than_asked(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let region = pair.far.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap();
    pair.near.post(&mut (0..100).map(|_| write(&[1], region.remote(), 0)).collect()).unwrap();
    let mut total = 0;
    let start = Instant::now();
    while total < 100 {
        let mut events = Vec::new();
        world.near.lane.progress(Instant::now(), &mut events, 7);
        assert!(events.len() <= 7);
        total += events.len();
        assert!(start.elapsed() < PATIENCE);
    }
}

fn a_thousand_connections_leave_nothing_behind(bed: Bed) {
    let mut world = World::new(bed);
    for round in 0..1000u32 {
        let pair = world.pair();
        let region = pair.far.register(SharedSpan::new(KEY_LEN).unwrap(), Access::BOTH).unwrap();
        pair.far.post_receive(buf(&*pair.far, 1)).unwrap();
        let mut work = vec![write(b"w", region.remote(), 0), read(&*pair.near, 8, region.remote(), 0), send(b"s")];
        pair.near.post(&mut work).unwrap();
        if round % 2 == 0 {
            for _ in 0..3 {
                world.done(Near, &*pair.near);
            }
        }
        match round % 3 {
            0 => drop(pair.near),
            1 => drop(pair.far),
            _ => pair.far.disconnect(),
        }
        world.near.events.clear();
        world.far.events.clear();
    }
    world.assert_gone();
}

/// A lane asleep on its descriptor is woken by its peer, from another thread.
fn a_sleeping_lane_is_woken(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let near_region = pair.near.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap();
    let far_region = pair.far.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap();
    let rounds = 200;
    let bounce = |lane: Arc<dyn Lane>, qp: Box<dyn QueuePair>, region: MemoryRegion, to: RemoteSpan, serves: bool| {
        let span = region.span().clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let descriptor = watch(&*lane).unwrap();
                let (mut events, mut last) = (Vec::new(), None);
                for round in 1..=rounds {
                    if serves {
                        qp.post(&mut vec![write(&u64::to_le_bytes(round), to, 0)]).unwrap();
                    }
                    while span.load_u64_acquire(0) != round {
                        let mut more = lane.progress(Instant::now(), &mut events, 32);
                        let seen = span.load_u64_acquire(0);
                        if !more && seen != round {
                            region.watch(0, seen);
                            lane.arm();
                            more = lane.progress(Instant::now(), &mut events, 32);
                            if more || span.load_u64_acquire(0) == round || !events.is_empty() {
                                events.clear();
                                continue;
                            }
                            let wake = tokio::time::timeout(PATIENCE, descriptor.readable()).await;
                            wake.expect("a wake was lost").unwrap().clear_ready();
                        }
                        events.clear();
                    }
                    if !serves {
                        last = Some(qp.post(&mut vec![write(&u64::to_le_bytes(round), to, 0)]).unwrap());
                    }
                }
                // The last Write has left before the queue pair goes.
                let start = Instant::now();
                let is_last =
                    |event: &Event| matches!(event, Event::Completed { completion, .. } if Some(completion.id) == last);
                while !serves && !events.iter().any(is_last) {
                    lane.progress(Instant::now(), &mut events, 32);
                    assert!(start.elapsed() < PATIENCE);
                }
                (lane.clone(), qp, region)
            })
        }
    };
    let (to_near, to_far) = (near_region.remote(), far_region.remote());
    let near = bounce(world.near.lane.clone(), pair.near, near_region, to_far, true);
    let far = bounce(world.far.lane.clone(), pair.far, far_region, to_near, false);
    std::thread::scope(|scope| {
        let (near, far) = (scope.spawn(near), scope.spawn(far));
        let _alive = (near.join().unwrap(), far.join().unwrap());
    });
}

/// A lane that waits for its descriptor's edges is told of all that came, also where a Write takes many turns, none of
/// which has anything to report.
fn long_writes_reach_a_lane_that_sleeps_between_turns(bed: Bed) {
    const LEN: usize = 3 << 19;
    const COUNT: u64 = 40;
    let mut world = World::new(bed);
    let pair = world.pair();
    let region = pair.far.register(SharedSpan::new(LEN).unwrap(), Access::WRITE).unwrap();
    let (lane, to) = (world.far.lane.clone(), region.remote());
    let far = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let descriptor = watch(&*lane).unwrap();
            let mut events = Vec::new();
            loop {
                let word = region.span().load_u64_acquire(LEN - 8);
                if word == COUNT {
                    break;
                }
                region.watch(LEN - 8, word);
                lane.arm();
                if lane.progress(Instant::now(), &mut events, 32) || !events.is_empty() {
                    events.clear();
                    continue;
                }
                let wake = tokio::time::timeout(Duration::from_secs(20), descriptor.readable()).await;
                wake.expect("it sleeps with octets unread").unwrap().clear_ready();
            }
        });
        region
    });
    for number in 1..=COUNT {
        let mut from = buf(&*pair.near, LEN);
        from.as_mut_slice()[LEN - 8..].copy_from_slice(&number.to_le_bytes());
        let (key, address) = (to.key, to.address);
        let from = Source::Buffer { buf: from, range: 0..LEN };
        pair.near.post(&mut vec![Work::Write { from, key, address, flags: Flags::SIGNALED }]).unwrap();
        let start = Instant::now();
        while !std::mem::take(&mut world.near.events).iter().any(|event| matches!(event, Event::Completed { .. })) {
            world.near.lane.progress(Instant::now(), &mut world.near.events, 32);
            assert!(start.elapsed() < PATIENCE);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    drop(far.join().unwrap());
}

/// Where the owner looks at its memory and finds nothing after the lane went to sleep.
fn a_word_watched_while_the_lane_sleeps_wakes_it(bed: Bed) {
    let mut world = World::new(bed);
    let pair = world.pair();
    let region = pair.far.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap();
    let (lane, key) = (world.far.lane.clone(), region.key());
    let woken = std::thread::spawn(move || {
        let start = Instant::now();
        let mut events = Vec::new();
        while !events.iter().any(|event| matches!(event, Event::Written { key: of, .. } if *of == key)) {
            lane.arm();
            // Whoever got events does not sleep: they may be what is waited for.
            let before = events.len();
            if !lane.progress(Instant::now(), &mut events, 32) && events.len() == before {
                sleep(&*lane, Some(start + PATIENCE)).unwrap();
                lane.progress(Instant::now(), &mut events, 32);
            }
            assert!(start.elapsed() < PATIENCE, "it slept on");
        }
    });
    // Time enough to fall asleep; if it is not, the test proves less and passes.
    std::thread::sleep(Duration::from_millis(200));
    region.watch(0, 0);
    std::thread::sleep(Duration::from_millis(50));
    pair.near.post(&mut vec![write(&[1; 8], region.remote(), 0)]).unwrap();
    while !woken.is_finished() {
        // The other lane is the other thread's.
        world.near.lane.progress(Instant::now(), &mut world.near.events, 32);
    }
    woken.join().unwrap();
}

fn a_listener_has_its_address_alone_and_gives_it_back(bed: Bed) {
    let world = World::new(bed);
    let address = world.listener.address();
    assert!(matches!(world.near.lane.listen(&address), Err(FabricError::AddressInUse(taken)) if taken == address));
    assert_eq!(world.far.lane.resources().listeners, 1);
    drop(world.listener);
    let again = world.near.lane.listen(&address).unwrap();
    assert_eq!(again.address(), address);
    assert_eq!(world.far.lane.resources(), Resources::default());
    assert!(!world.bed.fabric.name().is_empty());
}

/// Whether the bed is to be tried. `BULKHEAD_TEST_BEDS` names the wanted ones by how they begin, with commas between;
/// without it those are wanted that need no device. Says once of each bed that it is skipped, and why.
fn is_wanted(bed: &str) -> bool {
    static SKIPPED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let why = match std::env::var("BULKHEAD_TEST_BEDS") {
        Ok(beds) if beds.split(',').any(|begin| bed.starts_with(begin)) => return true,
        Ok(beds) => format!("BULKHEAD_TEST_BEDS={beds}"),
        Err(_) if !bed.starts_with("verbs") => return true,
        Err(_) => "it needs an RDMA device; tests/rdma-vm/suite brings one".into(),
    };
    if SKIPPED.lock().unwrap().insert(bed.into()) {
        // Past the test harness, which shows nothing of a test that passes.
        let _ = std::io::stderr().write_all(format!("skipped: bed {bed}: {why}\n").as_bytes());
    }
    false
}

macro_rules! contract {
    ($($test:ident),* $(,)?) => {
        contract!(@ loopback, loopback, [$($test),*]);
        contract!(@ wrapped, wrapped_loopback, [$($test),*]);
        contract!(@ iwarp_large, iwarp_large, [$($test),*]);
        contract!(@ iwarp_small, iwarp_small, [$($test),*]);
        #[cfg(feature = "verbs")]
        contract!(@ verbs_over_rxe, verbs_over_rxe, [$($test),*]);
        #[cfg(feature = "verbs")]
        contract!(@ verbs_over_siw, verbs_over_siw, [$($test),*]);
    };
    (@ $module:ident, $bed:ident, [$($test:ident),*]) => {
        mod $module {
            $(#[test] fn $test() {
                if super::is_wanted(stringify!($module)) {
                    super::$test(super::$bed());
                }
            })*
        }
    };
}

contract!(
    private_data_goes_both_ways,
    a_rejection_carries_its_reason_and_a_dropped_request_or_queue_pair_rejects,
    who_dials_where_nobody_listens_is_told,
    a_handshake_that_nobody_answers_ends_at_its_deadline,
    a_polling_receiver_sees_writes_in_order_and_the_last_word_last,
    a_send_is_delivered_after_earlier_writes,
    a_read_sees_what_was_written_before_it,
    many_reads_wait_for_their_turn_and_both_ends_may_read,
    completions_come_in_the_order_of_posting,
    nothing_moves_for_requests_of_no_octets,
    the_target_refuses_rights_bounds_and_keys_and_only_that_connection_ends,
    a_send_needs_a_receive_that_is_long_enough,
    a_send_takes_a_key_out_of_service_where_its_owner_permits,
    a_failure_gives_every_buffer_back_and_the_disconnection_comes_last,
    queues_and_requests_have_limits_and_a_refused_request_stays_with_its_poster,
    both_ends_see_the_end,
    a_turn_is_bounded,
    events_come_in_batches_no_larger_than_asked,
    a_thousand_connections_leave_nothing_behind,
    a_sleeping_lane_is_woken,
    a_word_watched_while_the_lane_sleeps_wakes_it,
    long_writes_reach_a_lane_that_sleeps_between_turns,
    a_listener_has_its_address_alone_and_gives_it_back,
);
