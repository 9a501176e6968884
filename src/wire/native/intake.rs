//! The one way in: the own ring and the own windows, as what they bring.
//!
//! ```text
//!            RingReader::poll                              Inbound::read
//!   ring ----------------------> what came, in order ----------------------> read
//!     ^  stops at an INLINE for which `came - read` leaves no room                |
//!     +---------- goes on <--------- Room::handle_read: there is room again <-----+
//! ```
//!
//! Whoever reads the ring and whoever reads the text may be two: what they share is a [`Room`].

use super::descriptor::{Negotiated, RingGeometry, WindowGeometry};
use super::egress::InlineText;
use super::endpoint::EndCause;
use super::poison::Poison;
use super::record::{INLINE_BYTES_MAX, Record};
use super::ring::{ControlRing, RingMemory};
use super::stream::PIPELINE_BYTES_MIN;
use super::window::{Releases, RxLease, RxWindows};
use crate::wire::seq::BulkSequence;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a record brought.
#[derive(Debug)]
pub enum Arrival {
    /// The next octets of the stream.
    Inline(InlineText),
    /// The next octets of the stream lie in this window.
    Ready(RxLease),
    /// The peer gave windows of its own back: for [`Egress::handle_released`](super::egress::Egress::handle_released).
    Released(BulkSequence),
}

/// What one look at the ring found.
#[derive(Debug)]
pub enum Look {
    /// Nothing has come.
    Empty,
    /// An INLINE has come that is longer than the room for it. It stays in the ring, and all behind it.
    Full,
    Arrived(Arrival),
}

/// Reads the own ring. Every record is consumed as it is seen, whatever becomes of what it brought, so that what is behind
/// it is always reached: a RELEASE that nobody sees would hold up the answer that the peer waits for.
#[derive(Debug)]
pub struct Intake {
    ring: ControlRing,
    windows: RxWindows,
}

impl Intake {
    /// Before the first record.
    pub fn new(ring: RingGeometry, windows: WindowGeometry, limits: Negotiated) -> Self {
        Self { ring: ControlRing::new(ring.slot_count()), windows: RxWindows::new(windows, limits) }
    }

    /// Takes the next record, unless it is an INLINE of more than `room` octets.
    ///
    /// # Errors
    /// [`Poison`]; the ring must not be looked at again.
    pub fn poll(&mut self, memory: &impl RingMemory, room: usize) -> Result<Look, Poison> {
        let Some(copy) = self.ring.poll(memory)? else { return Ok(Look::Empty) };
        let arrival = match Record::decode(copy.octets())? {
            Record::Inline(text) if text.len() > room => return Ok(Look::Full),
            Record::Inline(text) => Arrival::Inline(InlineText::first_of(text)),
            Record::Ready { sequence, len } => Arrival::Ready(self.windows.handle_ready(sequence, len)?),
            Record::Release { sequence } => Arrival::Released(sequence),
        };
        self.ring.consume(memory);
        Ok(Look::Arrived(arrival))
    }

    /// Where its dropped leases become releases.
    pub fn releases(&self) -> Releases {
        self.windows.releases()
    }
}

/// The text between a ring and whoever reads it.
#[derive(Debug)]
struct Text {
    /// Octets read so far, as far as the ring's reader was told.
    read: u64,
    /// The ring is stopped until so many are read.
    resume_at: Option<u64>,
}

/// How a ring's reader learns that text was read. Clones are the same.
#[derive(Clone, Debug)]
pub struct Room(Arc<Mutex<Text>>);

impl Room {
    /// `read` octets of text were read so far. True if the ring was stopped and must be polled again: said once.
    #[must_use = "a ring that was stopped goes on only if somebody polls it"]
    pub fn handle_read(&self, read: u64) -> bool {
        let mut text = self.text();
        text.read = read;
        text.resume_at.take_if(|at| *at <= read).is_some()
    }

    fn text(&self) -> MutexGuard<'_, Text> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a look at the ring ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Reading {
    /// No record is left.
    Empty,
    /// As many were taken as were asked for.
    More,
    /// The next record is an INLINE without room. [`Room::handle_read`] says when to go on.
    Stopped,
}

/// Reads the own ring for somebody else, who keeps up to `text_bytes_max` octets of unread text.
#[derive(Debug)]
pub struct RingReader {
    intake: Intake,
    text_bytes_max: u64,
    /// Octets of text taken so far.
    came: u64,
    room: Room,
}

impl RingReader {
    /// `text_bytes_max` is at least [`PIPELINE_BYTES_MIN`].
    pub fn new(intake: Intake, text_bytes_max: usize) -> Self {
        let room = Room(Arc::new(Mutex::new(Text { read: 0, resume_at: None })));
        Self { intake, text_bytes_max: text_bytes_max.max(PIPELINE_BYTES_MIN) as u64, came: 0, room }
    }

    /// For whoever reads the text.
    pub fn room(&self) -> Room {
        self.room.clone()
    }

    /// Takes up to `count_max` records and gives each to `take`.
    ///
    /// # Errors
    /// [`Poison`]; the ring must not be looked at again.
    pub fn poll(
        &mut self,
        memory: &impl RingMemory,
        count_max: usize,
        mut take: impl FnMut(Arrival),
    ) -> Result<Reading, Poison> {
        let mut read = self.room.text().read;
        let mut count = 0;
        while count < count_max {
            let unread = self.came.saturating_sub(read);
            // Within usize, as the bound was one.
            match self.intake.poll(memory, self.text_bytes_max.saturating_sub(unread) as usize)? {
                Look::Empty => return Ok(Reading::Empty),
                Look::Full => {
                    let mut text = self.room.text();
                    if text.read == read {
                        // Under the lock: what is read from now on finds this.
                        text.resume_at =
                            Some((self.came + INLINE_BYTES_MAX as u64).saturating_sub(self.text_bytes_max));
                        return Ok(Reading::Stopped);
                    }
                    read = text.read;
                    continue;
                }
                Look::Arrived(arrival) => {
                    if let Arrival::Inline(text) = &arrival {
                        self.came += text.as_bytes().len() as u64;
                    }
                    take(arrival);
                }
            }
            count += 1;
        }
        Ok(Reading::More)
    }
}

/// How long a ring has been stopped without any text being read.
#[derive(Clone, Copy, Debug, Default)]
pub struct StopWatch {
    /// Since when, and what was read by then.
    since: Option<(Duration, u64)>,
}

impl StopWatch {
    /// The ring is stopped, and `read` octets of text were read so far.
    pub fn handle_stopped(&mut self, now: Duration, read: u64) {
        if self.since.is_none_or(|(_, before)| before != read) {
            self.since = Some((now, read));
        }
    }

    /// A record came: the ring is not stopped.
    pub fn handle_arrival(&mut self) {
        self.since = None;
    }

    /// Since when nothing has moved.
    pub fn since(&self) -> Option<Duration> {
        self.since.map(|(since, _)| since)
    }

    /// Looks at the time. A stop may last as long as what is before it is read.
    ///
    /// # Errors
    /// [`EndCause::PipelineTooDeep`] if nothing was read for `timeout`.
    pub fn check(&mut self, now: Duration, read: u64, timeout: Duration) -> Result<(), EndCause> {
        let Some((since, before)) = self.since else { return Ok(()) };
        if before == read && now >= since.saturating_add(timeout) {
            return Err(EndCause::PipelineTooDeep);
        }
        self.handle_stopped(now, read);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::tests::TestRegion;
    use super::super::ring::{CONSUMED_OFFSET, SlotWrite};
    use super::super::stream::Inbound;
    use super::*;
    use crate::wire::seq::ControlSequence;
    use std::num::NonZeroU32;

    const SLOTS: u32 = 256;

    /// A reader, its ring, and a peer that writes to it as long as there are slots.
    struct Pair {
        region: TestRegion,
        reader: RingReader,
        next: ControlSequence,
    }

    impl Pair {
        fn new() -> Self {
            let windows = WindowGeometry::new(4096, 2).unwrap();
            let ring = RingGeometry::new(SLOTS).unwrap();
            let intake = Intake::new(ring, windows, Negotiated::between(windows, windows));
            Self { region: TestRegion::new(SLOTS), reader: RingReader::new(intake, 0), next: ControlSequence::FIRST }
        }

        fn write(&mut self, record: &Record<'_>) {
            let consumed = self.region.load(CONSUMED_OFFSET);
            assert!(self.next.get() - consumed <= u64::from(SLOTS), "the peer has no slot");
            self.region.write(&SlotWrite::new(record, self.next, SLOTS));
            self.next = self.next.next().unwrap();
        }

        /// Words for what comes out, and where it ended.
        fn poll(&mut self, count_max: usize) -> (Vec<String>, Result<Reading, Poison>) {
            let mut words = Vec::new();
            let reading = self.reader.poll(&self.region, count_max, |arrival| {
                words.push(match arrival {
                    Arrival::Inline(text) => format!("text {}", text.as_bytes().len()),
                    Arrival::Ready(lease) => format!("ready {}", lease.len()),
                    Arrival::Released(sequence) => format!("released {}", sequence.get()),
                });
            });
            (words, reading)
        }
    }

    fn ready(sequence: u64) -> Record<'static> {
        Record::Ready { sequence: BulkSequence::new(sequence).unwrap(), len: NonZeroU32::new(7).unwrap() }
    }

    const RELEASE: Record<'static> = Record::Release { sequence: BulkSequence::FIRST };

    #[test]
    fn records_come_out_in_order_and_no_more_than_asked() {
        let mut pair = Pair::new();
        for record in [Record::Inline(b"get k"), ready(1), RELEASE, Record::Inline(b"\r\n")] {
            pair.write(&record);
        }
        let (words, reading) = pair.poll(3);
        assert_eq!((words.join(", ").as_str(), reading), ("text 5, ready 7, released 1", Ok(Reading::More)));
        let (words, reading) = pair.poll(3);
        assert_eq!((words.join(", ").as_str(), reading), ("text 2", Ok(Reading::Empty)));
    }

    /// Each kind of record behind a full buffer, and what becomes of it before and after `read` octets were read.
    #[test]
    fn a_stop_is_judged_by_this_table() {
        let long = [b'x'; INLINE_BYTES_MAX];
        let whole = PIPELINE_BYTES_MIN / INLINE_BYTES_MAX;
        let rest = PIPELINE_BYTES_MIN % INLINE_BYTES_MAX;
        let table: [(Record<'_>, u64, bool, Reading); 7] = [
            // the record, octets read, whether that rings, and how the next look ends
            (Record::Inline(&long), 0, false, Reading::Stopped),
            (Record::Inline(&long), (INLINE_BYTES_MAX - rest - 1) as u64, false, Reading::Stopped),
            (Record::Inline(&long), (INLINE_BYTES_MAX - rest) as u64, true, Reading::Empty),
            (Record::Inline(&long), PIPELINE_BYTES_MIN as u64 - rest as u64, true, Reading::Empty),
            (Record::Inline(&long[..rest]), 0, false, Reading::Empty),
            (ready(1), 0, false, Reading::Empty),
            (RELEASE, 0, false, Reading::Empty),
        ];
        for (record, read, rings, expected) in table {
            let mut pair = Pair::new();
            (0..whole).for_each(|_| pair.write(&Record::Inline(&long)));
            assert_eq!(pair.poll(usize::MAX).1, Ok(Reading::Empty));
            pair.write(&record);
            let is_stopped = expected == Reading::Stopped || rings;
            let first = if is_stopped { Reading::Stopped } else { Reading::Empty };
            assert_eq!(pair.poll(usize::MAX).1, Ok(first), "{record:?}");
            let room = pair.reader.room();
            assert_eq!(room.handle_read(read), rings, "{record:?}, {read} read");
            assert!(!room.handle_read(read), "it rings once");
            assert_eq!(pair.poll(usize::MAX).1, Ok(expected), "{record:?}, {read} read");
        }
    }

    /// Reads as slowly as it can be told: every wake-up is needed, none is missing, and the buffer keeps its bound.
    #[test]
    fn a_slow_reader_is_given_everything_in_order() {
        let mut pair = Pair::new();
        let room = pair.reader.room();
        let mut inbound = Inbound::new(0);
        let text: Vec<u8> = (0..PIPELINE_BYTES_MIN as u32 * 4).map(|at| (at / 3) as u8).collect();
        let (mut chunks, mut found, mut stops) = (text.chunks(187), Vec::new(), 0);
        loop {
            while pair.next.get() - pair.region.load(CONSUMED_OFFSET) <= u64::from(SLOTS)
                && let Some(chunk) = chunks.next()
            {
                pair.write(&Record::Inline(chunk));
            }
            let taken = |arrival: Arrival| {
                let Arrival::Inline(text) = arrival else { panic!("{arrival:?}") };
                inbound.handle_inline(text.as_bytes());
            };
            let reading = pair.reader.poll(&pair.region, usize::MAX, taken).unwrap();
            if reading == Reading::Empty && chunks.len() == 0 {
                break;
            }
            if reading == Reading::Stopped {
                stops += 1;
                while !room.handle_read(inbound.read_bytes()) {
                    found.extend_from_slice(inbound.read(1));
                }
            }
        }
        found.extend_from_slice(inbound.text());
        assert!(found == text && stops > 100, "{stops} stops");
    }

    #[test]
    fn a_ring_with_a_bad_record_gives_what_came_before_it() {
        let mut pair = Pair::new();
        pair.write(&Record::Inline(b"get k\r\n"));
        pair.write(&ready(2));
        let (words, reading) = pair.poll(8);
        assert_eq!(words, ["text 7"]);
        assert_eq!(reading, Err(Poison::ReadySequence { found: 2, expected: 1 }));
    }

    #[test]
    fn a_stop_ends_a_connection_by_this_table() {
        type Looks = &'static [(u32, u64, Result<(), EndCause>)];
        const DEEP: Result<(), EndCause> = Err(EndCause::PipelineTooDeep);
        let second = Duration::from_secs(1);
        // (seconds of the stop's beginning and what was read, those of looks and what they come to)
        let table: [(Option<u64>, Looks); 4] = [
            (None, &[(100, 0, Ok(()))]),
            (Some(7), &[(9, 7, Ok(())), (10, 7, DEEP)]),
            // Something was read: it counts from then.
            (Some(7), &[(9, 8, Ok(())), (11, 8, Ok(())), (12, 8, DEEP)]),
            (Some(7), &[(50, 8, Ok(())), (52, 9, Ok(())), (54, 10, Ok(())), (57, 10, DEEP)]),
        ];
        for (stopped, looks) in table {
            let mut watch = StopWatch::default();
            if let Some(read) = stopped {
                watch.handle_stopped(7 * second, read);
            }
            for (at, read, expected) in looks {
                assert_eq!(watch.check(*at * second, *read, 3 * second), *expected, "{stopped:?} at {at} s");
            }
            watch.handle_arrival();
            assert_eq!((watch.since(), watch.check(1000 * second, 0, second)), (None, Ok(())));
        }
    }
}
