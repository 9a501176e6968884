use super::*;
use crate::fabric::loopback::Loopback;
use crate::fabric::{Address, Attributes, Fabric};
use crate::store::pool::{PoolDir, PoolFile};
use proptest::prelude::*;
use std::os::unix::fs::FileExt;
use tokio::sync::mpsc;

const BACKENDS: [Backend; 2] = [Backend::Auto, Backend::Blocking];
const SEGMENT: usize = STAGING_BUF_BYTES;

#[derive(Debug)]
enum Answer {
    Read(TailRead),
    ReadSlot(TailRead<LocalBuf>),
    Written(TailWritten),
}

impl Answer {
    fn ticket(&self) -> u64 {
        match self {
            Self::Read(read) => read.ticket,
            Self::ReadSlot(read) => read.ticket,
            Self::Written(written) => written.ticket,
        }
    }

    fn error(&self) -> Option<TailError> {
        match self {
            Self::Read(read) => read.result.err(),
            Self::ReadSlot(read) => read.result.err(),
            Self::Written(written) => written.result.err(),
        }
    }
}

/// Hands every answer on to the test.
struct Sink(mpsc::UnboundedSender<Answer>);

impl Actor for Sink {
    type Context = Context<Self>;
}

impl Handler<TailRead> for Sink {
    type Result = ();
    fn handle(&mut self, read: TailRead, _: &mut Self::Context) {
        let _ = self.0.send(Answer::Read(read));
    }
}

impl Handler<TailRead<LocalBuf>> for Sink {
    type Result = ();
    fn handle(&mut self, read: TailRead<LocalBuf>, _: &mut Self::Context) {
        let _ = self.0.send(Answer::ReadSlot(read));
    }
}

impl Handler<TailWritten> for Sink {
    type Result = ();
    fn handle(&mut self, written: TailWritten, _: &mut Self::Context) {
        let _ = self.0.send(Answer::Written(written));
    }
}

struct Bench {
    tail: Option<Addr<DiskTail>>,
    sink: Addr<Sink>,
    answers: mpsc::UnboundedReceiver<Answer>,
    drives: Arc<[Arc<PoolFiles>]>,
    staging: Staging,
    metrics: Arc<TailMetrics>,
    keep: Keep,
    _temp: tempfile::TempDir,
}

impl Bench {
    /// Drives of 16 MiB each, so 64 whole segments.
    fn new(drive_count: usize) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let drives = (0..drive_count)
            .map(|drive| {
                let dir = temp.path().join(drive.to_string());
                let files = PoolFiles::new(PoolDir::open(&dir, Some(16 << 20)).unwrap());
                files.grow().unwrap().unwrap();
                Arc::new(files)
            })
            .collect();
        let (sender, answers) = mpsc::unbounded_channel();
        Self {
            tail: None,
            sink: Sink(sender).start(),
            answers,
            drives,
            staging: Staging::new(64).unwrap(),
            metrics: Arc::default(),
            keep: Arc::new(()),
            _temp: temp,
        }
    }

    fn actor(&self, backend: Backend, depth: usize) -> DiskTail {
        let metrics = Arc::clone(&self.metrics);
        DiskTail::new(Arc::clone(&self.drives), self.staging.clone(), depth, metrics).with_backend(backend)
    }

    fn started(backend: Backend, drive_count: usize, depth: usize) -> Self {
        let mut bench = Self::new(drive_count);
        bench.tail = Some(bench.actor(backend, depth).start());
        bench
    }

    fn tail(&self) -> &Addr<DiskTail> {
        self.tail.as_ref().unwrap()
    }

    fn file(&self, drive: u16) -> Arc<PoolFile> {
        self.drives[usize::from(drive)].file(0).unwrap()
    }

    fn write(&self, ticket: u64, extent: ExtentId, segment: &[u8]) {
        let mut buf = self.staging.try_take().unwrap();
        buf.as_mut_slice()[..segment.len()].copy_from_slice(segment);
        self.write_from(ticket, extent, segment.len(), WriteSource::new(buf));
    }

    fn write_from(&self, ticket: u64, extent: ExtentId, len: usize, from: WriteSource) {
        let (keep, reply) = (Arc::clone(&self.keep), self.sink.clone().recipient());
        self.tail().do_send(WriteTail { extent, len: len as u32, from, keep, ticket, reply });
    }

    fn read(&self, ticket: u64, extent: ExtentId, len: usize, crcs: [u32; 4]) {
        let into = self.staging.try_take().unwrap();
        let (keep, reply) = (Arc::clone(&self.keep), self.sink.clone().recipient());
        self.tail().do_send(ReadTail { extent, len: len as u32, crcs, into, keep, ticket, reply });
    }

    async fn written(&mut self) -> TailWritten {
        match self.answers.recv().await.unwrap() {
            Answer::Written(written) => written,
            other => panic!("{other:?}"),
        }
    }

    async fn was_read(&mut self) -> TailRead {
        match self.answers.recv().await.unwrap() {
            Answer::Read(read) => read,
            other => panic!("{other:?}"),
        }
    }

    fn read_to_slot(&self, ticket: u64, extent: ExtentId, len: usize, crcs: [u32; 4], into: LocalBuf) {
        let (keep, reply) = (Arc::clone(&self.keep), self.sink.clone().recipient());
        self.tail().do_send(ReadTail { extent, len: len as u32, crcs, into, keep, ticket, reply });
    }

    async fn slot_was_read(&mut self) -> TailRead<LocalBuf> {
        match self.answers.recv().await.unwrap() {
            Answer::ReadSlot(read) => read,
            other => panic!("{other:?}"),
        }
    }

    /// Nobody but the test holds a buffer or keeps an extent.
    fn assert_all_back(&self) {
        assert_eq!(self.staging.available(), self.staging.count());
        assert_eq!(Arc::strong_count(&self.keep), 1);
        assert_eq!(self.metrics.in_flight.load(Ordering::Relaxed), 0);
        assert_eq!(self.metrics.waiting.load(Ordering::Relaxed), 0);
    }
}

/// Memory of some queue pair.
fn slot(len: usize) -> LocalBuf {
    let lane = Loopback::new().lane().unwrap();
    let qp = lane.dial(&Address::Name("nobody".to_owned()), Attributes::default()).unwrap();
    qp.allocate(len, 1).unwrap().remove(0)
}

fn octets(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::from_fn(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some((state >> 24) as u8)
    })
    .take(len)
    .collect()
}

fn order(len: usize) -> u8 {
    len.div_ceil(4096).max(1).next_power_of_two().trailing_zeros() as u8
}

/// The extent for `len` octets at the start of slot `slot` of 256 KiB.
fn extent(drive: u16, slot: u32, len: usize) -> ExtentId {
    ExtentId::new(drive, 0, slot * 64, order(len))
}

#[actix::test]
async fn segments_of_any_length_come_back_as_written() {
    for backend in BACKENDS {
        let mut bench = Bench::started(backend, 1, 4);
        let lens = [1, 511, 4095, 4096, 4097, 65_535, 65_536, 65_537, 131_073, 200_000, 262_143, SEGMENT];
        let mut crcs = vec![[0; 4]; lens.len()];
        for (slot, &len) in (0..).zip(&lens) {
            bench.write(slot.into(), extent(0, slot, len), &octets(len, slot.into()));
        }
        for _ in &lens {
            let written = bench.written().await;
            let slot = written.ticket as usize;
            crcs[slot] = written.result.unwrap();
            assert_eq!(crcs[slot], block_crcs(&octets(lens[slot], written.ticket)));
        }
        for (slot, &len) in (0..).zip(&lens) {
            bench.read(slot.into(), extent(0, slot, len), len, crcs[slot as usize]);
        }
        for _ in &lens {
            let read = bench.was_read().await;
            assert_eq!(read.result, Ok(()));
            let len = lens[read.ticket as usize];
            assert!(read.buf.as_slice()[..len] == octets(len, read.ticket));
        }
        bench.assert_all_back();
        let total: usize = lens.iter().sum();
        assert_eq!(bench.metrics.reads.load(Ordering::Relaxed), lens.len() as u64);
        assert_eq!(bench.metrics.write_bytes.load(Ordering::Relaxed), total as u64);
        assert_eq!(bench.metrics.read_bytes.load(Ordering::Relaxed), total as u64);
    }
}

#[actix::test]
async fn parts_of_a_slot_are_read_at_the_same_time_and_checked_where_they_lie() {
    for backend in BACKENDS {
        let mut bench = Bench::started(backend, 1, 4);
        let lens = [SEGMENT, 131_072, 5000];
        let mut crcs = [[0; 4]; 3];
        for (at, &len) in (0..).zip(&lens) {
            bench.write(at.into(), extent(0, at, len), &octets(len, at.into()));
            crcs[at as usize] = bench.written().await.result.unwrap();
        }
        let mut rest = slot(2 * SEGMENT);
        let whole = rest.as_slice().as_ptr();
        for (at, &len) in (0..).zip(&lens) {
            let behind = rest.split_off(len.next_multiple_of(4096));
            let part = std::mem::replace(&mut rest, behind);
            bench.read_to_slot(at.into(), extent(0, at, len), len, crcs[at as usize], part);
        }
        let mut parts = [None, None, None];
        for _ in &lens {
            let read = bench.slot_was_read().await;
            assert_eq!(read.result, Ok(()));
            parts[read.ticket as usize] = Some(read.buf);
        }
        let [first, second, third] = parts.map(Option::unwrap);
        let mut slot = first;
        for part in [second, third, rest] {
            slot.rejoin(part);
        }
        assert_eq!((slot.as_slice().as_ptr(), slot.len()), (whole, 2 * SEGMENT));
        let mut at = 0;
        for (seed, &len) in (0..).zip(&lens) {
            assert!(slot.as_slice()[at..at + len] == octets(len, seed));
            at += len;
        }
        assert!(slot.as_slice()[at.next_multiple_of(4096)..].iter().all(|&octet| octet == 0));
        assert_eq!(bench.staging.available(), bench.staging.count());
        bench.assert_all_back();
    }
}

#[actix::test]
async fn a_slot_comes_back_whatever_becomes_of_its_read() {
    for backend in BACKENDS {
        let mut bench = Bench::started(backend, 1, 1);
        bench.write(0, extent(0, 0, SEGMENT), &octets(SEGMENT, 1));
        let mut crcs = bench.written().await.result.unwrap();
        let short = slot(SEGMENT - 4096);
        bench.read_to_slot(1, extent(0, 0, SEGMENT), SEGMENT, crcs, short);
        let read = bench.slot_was_read().await;
        assert_eq!((read.buf.len(), read.result), (SEGMENT - 4096, Err(TailError::Io(Errno(libc::EINVAL)))));
        crcs[3] ^= 1;
        bench.read_to_slot(2, extent(0, 0, SEGMENT), SEGMENT, crcs, slot(SEGMENT));
        let read = bench.slot_was_read().await;
        assert_eq!((read.buf.len(), read.result), (SEGMENT, Err(TailError::Checksum { block: 3 })));
        // One of them may be at the disk when the end comes, the others wait.
        for ticket in 3..6 {
            bench.read_to_slot(ticket, extent(0, 0, SEGMENT), SEGMENT, crcs, slot(SEGMENT));
        }
        bench.tail().send(Stop).await.unwrap();
        for _ in 3..6 {
            let read = bench.slot_was_read().await;
            assert!(read.result.is_err() && read.buf.len() == SEGMENT);
        }
        bench.assert_all_back();
    }
}

#[actix::test]
async fn whole_blocks_from_the_start_of_a_segment_can_be_read_alone() {
    let mut bench = Bench::started(Backend::Auto, 1, 4);
    let segment = octets(200_000, 3);
    bench.write(0, extent(0, 0, segment.len()), &segment);
    let crcs = bench.written().await.result.unwrap();
    for len in [65_536, 131_072, 196_608] {
        bench.read(0, extent(0, 0, segment.len()), len, crcs);
        let read = bench.was_read().await;
        assert_eq!(read.result, Ok(()));
        assert!(read.buf.as_slice()[..len] == segment[..len]);
    }
    bench.read(0, extent(0, 0, segment.len()), 70_000, crcs);
    assert_eq!(bench.was_read().await.result, Err(TailError::Checksum { block: 1 }), "part of a block is refused");
}

#[actix::test]
async fn a_segment_of_nothing_needs_no_disk() {
    let mut bench = Bench::started(Backend::Auto, 1, 1);
    bench.write(0, extent(0, 0, 0), &[]);
    assert_eq!(bench.written().await.result, Ok([0; 4]));
    bench.read(0, extent(0, 0, 0), 0, [0; 4]);
    assert_eq!(bench.was_read().await.result, Ok(()));
    bench.assert_all_back();
}

#[actix::test]
async fn a_changed_octet_anywhere_is_a_checksum_error_of_its_block() {
    for backend in BACKENDS {
        let mut bench = Bench::started(backend, 1, 4);
        let segment = octets(200_000, 9);
        let place = extent(0, 5, segment.len());
        bench.write(0, place, &segment);
        let crcs = bench.written().await.result.unwrap();
        for (at, block) in [(0, 0), (65_535, 0), (65_536, 1), (150_000, 2), (199_999, 3)] {
            // Through a second, buffered descriptor: any alignment goes.
            let path = bench.drives[0].path().join("extents-0000.bulkhead");
            let file = File::options().write(true).open(path).unwrap();
            let offset = place.byte_offset() + at as u64;
            file.write_all_at(&[segment[at] ^ 0x10], offset).unwrap();
            file.sync_all().unwrap();
            bench.read(1, place, segment.len(), crcs);
            assert_eq!(bench.was_read().await.result, Err(TailError::Checksum { block }));
            file.write_all_at(&[segment[at]], offset).unwrap();
            file.sync_all().unwrap();
        }
        bench.read(2, place, segment.len(), crcs);
        assert_eq!(bench.was_read().await.result, Ok(()), "and the repaired segment is good again");
        assert_eq!(bench.metrics.checksum_failures.load(Ordering::Relaxed), 5);
        bench.assert_all_back();
    }
}

#[actix::test]
async fn a_truncated_file_is_an_io_error_and_the_buffer_comes_back() {
    for backend in BACKENDS {
        let mut bench = Bench::started(backend, 1, 4);
        let segment = octets(SEGMENT, 9);
        bench.write(0, extent(0, 1, SEGMENT), &segment);
        let crcs = bench.written().await.result.unwrap();
        bench.file(0).as_file().set_len(SEGMENT as u64 + 100_000).unwrap();
        for (slot, ticket) in [(1, 7), (3, 8)] {
            bench.read(ticket, extent(0, slot, SEGMENT), SEGMENT, crcs);
            let read = bench.was_read().await;
            assert_eq!((read.ticket, read.result), (ticket, Err(TailError::Io(Errno(libc::EIO)))));
        }
        assert_eq!(bench.metrics.read_errors.load(Ordering::Relaxed), 2);
        bench.assert_all_back();
    }
}

#[actix::test]
async fn requests_that_cannot_be_are_refused_with_everything_back() {
    let mut bench = Bench::started(Backend::Auto, 1, 4);
    let (einval, enxio) = (TailError::Io(Errno(libc::EINVAL)), TailError::Io(Errno(libc::ENXIO)));
    for (place, len, error) in [
        (ExtentId::new(1, 0, 0, 0), 1, enxio),
        (ExtentId::new(u16::MAX, 0, 0, 0), 1, enxio),
        (ExtentId::new(0, 1, 0, 0), 1, enxio),
        (ExtentId::new(0, 0, 0, 0), 4097, einval),
        (ExtentId::new(0, 0, 0, 9), SEGMENT + 1, einval),
        (ExtentId::new(0, 0, u32::MAX, 0), 4096, einval),
        (ExtentId::new(0, 0, 16 * 256 - 1, 1), 4097, einval),
    ] {
        bench.read(4, place, len, [0; 4]);
        assert_eq!(bench.was_read().await.result, Err(error), "{place:?}");
        bench.write_from(5, place, len, WriteSource::new(vec![0u8; 2 * SEGMENT]));
        assert_eq!(bench.written().await.result, Err(error), "{place:?}");
        bench.assert_all_back();
    }
    for short in [0, 4095, 4096] {
        bench.write_from(6, extent(0, 0, 5000), 5000, WriteSource::new(vec![0u8; short]));
        assert_eq!(bench.written().await.result, Err(einval), "memory of {short} octets");
    }
    bench.assert_all_back();
}

#[actix::test]
async fn stopping_with_work_everywhere_answers_everything() {
    for backend in BACKENDS {
        for turns_before in [0, 1, 3] {
            let mut bench = Bench::started(backend, 2, 2);
            for ticket in 0..48u64 {
                let place = extent((ticket % 2) as u16, (ticket / 2) as u32, SEGMENT);
                if ticket % 3 == 0 {
                    bench.write(ticket, place, &octets(SEGMENT, ticket));
                } else {
                    bench.read(ticket, place, 65_536, [0; 4]);
                }
            }
            for _ in 0..turns_before {
                tokio::task::yield_now().await;
            }
            bench.tail().send(Stop).await.unwrap();
            let mut tickets = Vec::new();
            let mut cancelled = 0;
            while tickets.len() < 48 {
                let answer = bench.answers.recv().await.unwrap();
                match answer.error() {
                    Some(TailError::Cancelled) => cancelled += 1,
                    // The reads expect octets nobody wrote.
                    Some(TailError::Checksum { .. }) | None => {}
                    Some(error) => panic!("{error}"),
                }
                tickets.push(answer.ticket());
            }
            tickets.sort_unstable();
            assert_eq!(tickets, (0..48).collect::<Vec<_>>());
            assert_eq!(bench.metrics.cancelled.load(Ordering::Relaxed), cancelled);
            bench.assert_all_back();
            assert!(!bench.tail().connected());
            bench.read(99, extent(0, 0, 1), 1, [0; 4]);
            bench.assert_all_back();
        }
    }
}

#[actix::test]
async fn whoever_asks_while_it_stops_is_cancelled() {
    let mut bench = Bench::started(Backend::Auto, 1, 1);
    bench.write(0, extent(0, 0, SEGMENT), &octets(SEGMENT, 0));
    let stop = bench.tail().send(Stop);
    // Sent in the same turn, so it arrives before the actor can have ended.
    bench.tail().do_send(Stop);
    bench.read(1, extent(0, 0, SEGMENT), SEGMENT, [0; 4]);
    stop.await.unwrap();
    let mut answers = vec![bench.answers.recv().await.unwrap(), bench.answers.recv().await.unwrap()];
    answers.sort_by_key(Answer::ticket);
    assert_eq!(answers[1].error(), Some(TailError::Cancelled));
    drop(answers);
    bench.assert_all_back();
}

#[actix::test]
async fn an_idle_tail_stops_at_once() {
    for backend in BACKENDS {
        let bench = Bench::started(backend, 1, 4);
        bench.tail().send(Stop).await.unwrap();
        bench.assert_all_back();
    }
}

#[actix::test]
async fn the_last_address_gone_ends_it_after_the_answers() {
    let mut bench = Bench::started(Backend::Auto, 1, 2);
    for slot in 0..16 {
        bench.write(slot.into(), extent(0, slot, SEGMENT), &octets(SEGMENT, slot.into()));
    }
    bench.tail = None;
    for _ in 0..16 {
        bench.written().await.result.unwrap();
    }
    while Arc::strong_count(&bench.metrics) > 1 {
        tokio::task::yield_now().await;
    }
    bench.assert_all_back();
}

#[actix::test]
async fn an_arbiter_that_ends_under_it_loses_no_buffer_and_answers_what_it_took() {
    for backend in BACKENDS {
        let mut bench = Bench::new(1);
        let arbiter = Arbiter::new();
        let (drives, staging) = (Arc::clone(&bench.drives), bench.staging.clone());
        let metrics = Arc::clone(&bench.metrics);
        bench.tail = Some(DiskTail::start_in_arbiter(&arbiter.handle(), move |_| {
            DiskTail::new(drives, staging, 4, metrics).with_backend(backend)
        }));
        for slot in 0..32 {
            bench.write(slot.into(), extent(0, slot, SEGMENT), &octets(SEGMENT, slot.into()));
        }
        bench.written().await.result.unwrap();
        arbiter.stop();
        arbiter.join().unwrap();
        bench.assert_all_back();
        // What was still in the mailbox died with it; whatever had reached the actor is answered.
        let writes = bench.metrics.writes.load(Ordering::Relaxed);
        let handled = writes + bench.metrics.cancelled.load(Ordering::Relaxed);
        for _ in 1..handled {
            let written = bench.written().await;
            assert!(matches!(written.result, Ok(_) | Err(TailError::Cancelled)), "{written:?}");
        }
        assert!(writes >= 1 && handled <= 32);
        bench.assert_all_back();
    }
}

#[actix::test]
async fn other_work_of_the_lane_goes_on_under_a_flood() {
    let mut bench = Bench::started(Backend::Auto, 1, 16);
    for slot in 0..64 {
        bench.write(slot.into(), extent(0, slot, SEGMENT), &octets(SEGMENT, slot.into()));
    }
    // Each round of this loop is a turn that the actor did not keep for itself.
    let (mut turns, mut answered) = (0, 0);
    while answered < 64 {
        tokio::task::yield_now().await;
        turns += 1;
        while bench.answers.try_recv().is_ok() {
            answered += 1;
        }
    }
    assert!(turns >= 64 / ANSWERS_PER_TURN, "{turns} turns for 64 answers");
}

#[derive(Clone, Copy, Debug)]
struct Act {
    drive: u16,
    slot: u32,
    len: usize,
    seed: u64,
    write: bool,
    wait: bool,
}

fn act() -> impl Strategy<Value = Act> {
    let len = prop_oneof![1usize..=SEGMENT, Just(SEGMENT), Just(65_536), 1usize..9000];
    (0u16..2, 0u32..6, len, any::<u64>(), any::<bool>(), any::<bool>())
        .prop_map(|(drive, slot, len, seed, write, wait)| Act { drive, slot, len, seed, write, wait })
}

/// What the model knows of one slot.
#[derive(Clone, Default)]
struct Known {
    segment: Vec<u8>,
    crcs: [u32; 4],
    busy: usize,
}

/// A reader may share a slot with readers, a writer with nobody: that is what the store's extents promise.
async fn agree_with_a_model(backend: Backend, depth: usize, acts: Vec<Act>) {
    let mut bench = Bench::started(backend, 2, depth);
    let mut model = vec![Known::default(); 12];
    let mut asked = Vec::new();
    let mut open = 0;
    for act in acts {
        let at = usize::from(act.drive) * 6 + act.slot as usize;
        while model[at].busy > 0 && (act.write || model[at].segment.is_empty() || act.wait) || open >= 32 {
            let answer = bench.answers.recv().await.unwrap();
            settle(answer, &asked, &mut model);
            open -= 1;
        }
        let ticket = asked.len() as u64;
        if act.write {
            let segment = octets(act.len, act.seed);
            bench.write(ticket, extent(act.drive, act.slot, act.len), &segment);
            // Unknown while it is written, so nobody reads it.
            asked.push((at, Some(segment)));
            model[at].segment.clear();
        } else if model[at].segment.is_empty() {
            continue;
        } else {
            let len = model[at].segment.len();
            bench.read(ticket, extent(act.drive, act.slot, len), len, model[at].crcs);
            asked.push((at, None));
        }
        model[at].busy += 1;
        open += 1;
    }
    for _ in 0..open {
        let answer = bench.answers.recv().await.unwrap();
        settle(answer, &asked, &mut model);
    }
    bench.tail().send(Stop).await.unwrap();
    bench.assert_all_back();
}

fn settle(answer: Answer, asked: &[(usize, Option<Vec<u8>>)], model: &mut [Known]) {
    let (at, written) = &asked[answer.ticket() as usize];
    let known = &mut model[*at];
    known.busy -= 1;
    match answer {
        Answer::Read(read) => {
            assert_eq!(read.result, Ok(()));
            assert!(read.buf.as_slice()[..known.segment.len()] == known.segment);
        }
        Answer::ReadSlot(read) => panic!("nobody asked for {read:?}"),
        Answer::Written(answer) => {
            known.segment.clone_from(written.as_ref().expect("a write was asked"));
            known.crcs = answer.result.unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_interleaving_of_reads_and_writes_agrees_with_a_model(
        blocking in any::<bool>(),
        depth in 1usize..9,
        acts in proptest::collection::vec(act(), 1..60),
    ) {
        let backend = if blocking { Backend::Blocking } else { Backend::Auto };
        System::new().block_on(agree_with_a_model(backend, depth, acts));
    }
}
