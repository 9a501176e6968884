//! A GET under way: from looking up to the answer.
//!
//! ```text
//!         begin           pieces, to the last octet
//!  busy ────┬──▶ reading ───────────────────────────▶ done: OK
//!    │ ▲    │      │  └── a piece fails ────────────▶ done: IO_ERROR
//!    │ └────┘      └───── deadline ─────────────────▶ done: LATE
//!    ├── deadline ──────────────────────────────────▶ done: LATE
//!    └── given up ──────────────────────────────────▶ done: BUSY
//! ```
//!
//! Who owns it moves the octets: each range of [`Get::reading`] to its write chunk, or into the reply, in any order, and
//! says so with [`Get::handle_piece`]. All that was found stays pinned while the `Get` lives, so it has to live until the
//! reply has left.

use super::request::{GetRequest, RangeOf};
use super::{Answer, Got, Item, Status};
use crate::store::{Lookup, Pinned, Store};
use std::collections::BTreeMap;
use std::ops::Range;

/// The ranges of one call.
#[derive(Debug)]
pub struct Get {
    crc32c: bool,
    deadline_us: u32,
    places: Vec<Place>,
}

/// One range.
#[derive(Debug)]
struct Place {
    /// The version wanted, 0 for any.
    version: u64,
    offset: u64,
    count: u32,
    found: Option<Found>,
    state: State,
}

/// What is there, as the answer tells it.
#[derive(Clone, Copy, Debug)]
struct Found {
    flags: u32,
    version: u64,
    len: u64,
}

#[derive(Debug)]
enum State {
    /// Readers pin as much as they may.
    Busy { key: Box<[u8]> },
    Reading {
        pinned: Pinned,
        /// Octets of the range, at least one.
        len: u32,
        pieces: Pieces,
    },
    Done {
        status: Status,
        len: u32,
        crc32c: Option<u32>,
        /// Until the reply has left.
        _pinned: Option<Pinned>,
    },
}

impl Get {
    /// Looks up all that `request` asks for.
    pub fn begin(request: &GetRequest<'_>, store: &Store) -> Self {
        let place = |range: &RangeOf<'_>| Place {
            version: range.version,
            offset: range.offset,
            count: range.count,
            found: None,
            state: State::Busy { key: range.key.as_bytes().into() },
        };
        let places = request.ranges.iter().map(place).collect();
        let mut get = Self { crc32c: request.crc32c, deadline_us: request.deadline_us, places };
        get.handle_retry(store);
        get
    }

    /// Microseconds from when the call came until [`Get::handle_deadline`], 0 for never.
    pub fn deadline_us(&self) -> u32 {
        self.deadline_us
    }

    /// Some ranges wait until readers unpin: [`Get::handle_retry`] once something came free.
    pub fn is_busy(&self) -> bool {
        self.places.iter().any(|place| matches!(place.state, State::Busy { .. }))
    }

    /// Nothing is left to do but to answer.
    pub fn is_done(&self) -> bool {
        self.places.iter().all(|place| matches!(place.state, State::Done { .. }))
    }

    /// How many ranges there are.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// What has to be read for range `index`: an object and the octets of it. `None` if there is nothing, or no more.
    pub fn reading(&self, index: usize) -> Option<(&Pinned, Range<u64>)> {
        let place = self.places.get(index)?;
        match &place.state {
            State::Reading { pinned, len, .. } => Some((pinned, place.offset..place.offset + u64::from(*len))),
            _ => None,
        }
    }

    /// Looks up again what was busy.
    pub fn handle_retry(&mut self, store: &Store) {
        let now = store.clock().now();
        for place in &mut self.places {
            place.look_up(store, now, self.crc32c);
        }
    }

    /// `octets` of range `index`, from the octet `start` of the range on, are where they have to be. Each octet is told of
    /// once, in any order.
    pub fn handle_piece(&mut self, index: usize, start: u32, octets: &[u8]) {
        let place = &mut self.places[index];
        let State::Reading { len, pieces, .. } = &mut place.state else { return };
        let len = *len;
        let piece_bytes = octets.len() as u32;
        assert!(start.checked_add(piece_bytes).is_some_and(|end| end <= len), "a piece beyond its range");
        pieces.put(start, piece_bytes, if self.crc32c { crc32c::crc32c(octets) } else { 0 });
        if let Some(crc) = pieces.whole(len) {
            place.finish(Status::Ok, self.crc32c.then_some(crc));
        }
    }

    /// Octets of range `index` are lost.
    pub fn handle_failure(&mut self, index: usize) {
        if let State::Reading { .. } = self.places[index].state {
            self.places[index].finish(Status::IoError, None);
        }
    }

    /// The time is over: what is not read by now is late.
    pub fn handle_deadline(&mut self) {
        for place in &mut self.places {
            if !matches!(place.state, State::Done { .. }) {
                place.finish(Status::Late, None);
            }
        }
    }

    /// What is busy waited long enough.
    pub fn give_up(&mut self) {
        for place in &mut self.places {
            if let State::Busy { .. } = place.state {
                place.finish(Status::Busy, None);
            }
        }
    }

    /// The answer; the token of each item is the index of its range. What is not done yet is taken for whole, so that
    /// places can be had for the octets before they are read.
    pub fn answer(&self) -> Answer<Item> {
        let got = |(index, place): (usize, &Place)| {
            let (status, len, crc32c) = match &place.state {
                State::Busy { .. } => (Status::Busy, 0, None),
                State::Reading { len, .. } => (Status::Ok, *len, self.crc32c.then_some(0)),
                State::Done { status, len, crc32c, .. } => (*status, *len, *crc32c),
            };
            let Found { flags, version, len: value_bytes } =
                place.found.unwrap_or(Found { flags: 0, version: 0, len: 0 });
            Got { status, flags, version, len: value_bytes, crc32c, data: Item { token: index as u32, len } }
        };
        Answer::Get(self.places.iter().enumerate().map(got).collect())
    }
}

impl Place {
    fn look_up(&mut self, store: &Store, now: u64, crc32c: bool) {
        let State::Busy { key } = &self.state else { return };
        let pinned = match store.get(key, now) {
            Lookup::Busy => return,
            Lookup::Miss(_) => return self.finish(Status::NotFound, None),
            Lookup::Hit(pinned) => pinned,
        };
        self.found = Some(Found { flags: pinned.flags(), version: pinned.version(), len: pinned.len() });
        if self.version != 0 && self.version != pinned.version() {
            return self.finish(Status::Changed, None);
        }
        if self.offset == 0 {
            pinned.count_head();
        }
        let len = pinned.len().saturating_sub(self.offset).min(u64::from(self.count)) as u32;
        if len == 0 {
            return self.finish(Status::Ok, crc32c.then_some(0));
        }
        self.state = State::Reading { pinned, len, pieces: Pieces::default() };
    }

    fn finish(&mut self, status: Status, crc32c: Option<u32>) {
        let done = State::Done { status, len: 0, crc32c, _pinned: None };
        self.state = match std::mem::replace(&mut self.state, done) {
            State::Reading { pinned, len, .. } => {
                State::Done { status, len: if status == Status::Ok { len } else { 0 }, crc32c, _pinned: Some(pinned) }
            }
            _ => return,
        };
    }
}

/// Pieces of a range that came in any order, and their checksums.
#[derive(Debug, Default)]
struct Pieces {
    /// By their first octet: octets and checksum. Neighbours are joined.
    runs: BTreeMap<u32, (u32, u32)>,
}

impl Pieces {
    fn put(&mut self, start: u32, len: u32, crc: u32) {
        if len == 0 {
            return;
        }
        let (mut start, mut run) = (start, (len, crc));
        if let Some((&before, &joined)) = self.runs.range(..start).next_back() {
            assert!(before + joined.0 <= start, "octets told of twice");
            if before + joined.0 == start {
                run = join(joined, run);
                start = before;
            }
        }
        let end = start + run.0;
        if let Some((&behind, &joined)) = self.runs.range(start + 1..).next() {
            assert!(end <= behind, "octets told of twice");
            if end == behind {
                self.runs.remove(&behind);
                run = join(run, joined);
            }
        }
        self.runs.insert(start, run);
    }

    /// The checksum, if all `len` octets are there.
    fn whole(&self, len: u32) -> Option<u32> {
        self.runs.get(&0).filter(|run| run.0 == len).map(|run| run.1)
    }
}

fn join(front: (u32, u32), back: (u32, u32)) -> (u32, u32) {
    // Zero stays zero however many octets follow it: all there is where no checksum was asked for, and shifting is dear.
    let shifted = if front.1 == 0 { 0 } else { crc32c::crc32c_combine(front.1, 0, back.0 as usize) };
    (front.0 + back.0, shifted ^ back.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::bulkhead::request::Key;
    use crate::programs::bulkhead::rig::{put, store};
    use proptest::prelude::*;

    fn range(key: &'static [u8], offset: u64, count: u32) -> RangeOf<'static> {
        RangeOf { key: Key::new(key).unwrap(), version: 0, offset, count }
    }

    fn begin(store: &Store, crc32c: bool, ranges: &[RangeOf<'_>]) -> Get {
        Get::begin(&GetRequest { crc32c, deadline_us: 0, ranges: ranges.to_vec() }, store)
    }

    fn got(get: &Get) -> Vec<Got<Item>> {
        match get.answer() {
            Answer::Get(got) => got,
            other => panic!("{other:?}"),
        }
    }

    fn outcome(get: &Get) -> Vec<(Status, u32)> {
        got(get).iter().map(|got| (got.status, got.data.len)).collect()
    }

    #[test]
    fn ranges_are_cut_to_the_value_and_each_has_its_own_status() {
        let store = store();
        let version = put(&store, b"a", b"0123456789");
        let ranges = [
            range(b"a", 0, 4),
            range(b"none", 0, 4),
            range(b"a", 8, 100),
            range(b"a", 10, 1),
            range(b"a", u64::MAX, u32::MAX),
            range(b"a", 0, 0),
            RangeOf { version: version + 1, ..range(b"a", 0, 4) },
            RangeOf { version, ..range(b"a", 9, 4) },
        ];
        let mut get = begin(&store, false, &ranges);
        assert!(!get.is_busy() && !get.is_done());
        let wanted: Vec<_> = (0..get.len()).map(|index| get.reading(index).map(|(_, octets)| octets)).collect();
        assert_eq!(wanted, [Some(0..4), None, Some(8..10), None, None, None, None, Some(9..10)]);
        for (index, octets) in [(0, &b"0123"[..]), (2, b"89"), (7, b"9")] {
            get.handle_piece(index, 0, octets);
        }
        assert!(get.is_done());
        let (ok, none) = (Status::Ok, Status::NotFound);
        let expected = [(ok, 4), (none, 0), (ok, 2), (ok, 0), (ok, 0), (ok, 0), (Status::Changed, 0), (ok, 1)];
        assert_eq!(outcome(&get), expected);
        let answer = got(&get);
        assert_eq!((answer[1].version, answer[1].len), (0, 0));
        assert_eq!((answer[6].version, answer[6].len), (version, 10), "says what is there instead");
        assert!(answer.iter().enumerate().all(|(index, got)| got.data.token == index as u32));
    }

    #[test]
    fn what_is_late_is_said_to_be_and_what_was_read_stays_good() {
        let store = store();
        put(&store, b"a", b"0123456789");
        let mut get = begin(&store, false, &[range(b"a", 0, 4), range(b"a", 4, 4), range(b"none", 0, 1)]);
        get.handle_piece(0, 0, b"0123");
        get.handle_piece(1, 0, b"456");
        get.handle_deadline();
        assert!(get.is_done());
        assert_eq!(outcome(&get), [(Status::Ok, 4), (Status::Late, 0), (Status::NotFound, 0)]);
        get.handle_piece(1, 3, b"7");
        assert_eq!(outcome(&get)[1], (Status::Late, 0), "late is late");
    }

    #[test]
    fn a_range_that_fails_takes_no_other_with_it() {
        let store = store();
        put(&store, b"a", b"0123456789");
        let mut get = begin(&store, true, &[range(b"a", 0, 4), range(b"a", 4, 4)]);
        get.handle_failure(0);
        get.handle_piece(0, 0, b"0123");
        get.handle_piece(1, 0, b"4567");
        assert_eq!(outcome(&get), [(Status::IoError, 0), (Status::Ok, 4)]);
        let checksums: Vec<_> = got(&get).iter().map(|got| got.crc32c).collect();
        assert_eq!(checksums, [None, Some(crc32c::crc32c(b"4567"))]);
    }

    #[test]
    fn what_was_found_stays_pinned_until_the_answer_has_left() {
        let store = store();
        put(&store, b"a", b"0123456789");
        let mut get = begin(&store, false, &[range(b"a", 0, 4)]);
        assert_eq!(store.gauges().pins, 1);
        get.handle_piece(0, 0, b"0123");
        assert!(get.is_done());
        assert_eq!(store.gauges().pins, 1);
        drop(get);
        assert_eq!(store.gauges().pins, 0);
    }

    #[test]
    fn busy_ranges_are_looked_up_again_or_given_up() {
        let store = store();
        // Readers may pin a quarter of the pool, 1 MiB, and one long value more.
        for key in [b"a", b"b", b"c"] {
            put(&store, key, &vec![1; 600 << 10]);
        }
        let ranges = [range(b"a", 0, 1), range(b"b", 0, 1), range(b"c", 0, 1)];
        let readers = begin(&store, false, &ranges[..2]);
        let busy = || {
            let get = begin(&store, false, &ranges[2..]);
            assert!(get.is_busy() && !get.is_done() && get.reading(0).is_none());
            get
        };
        let (mut given_up, mut late, mut patient) = (busy(), busy(), busy());
        given_up.give_up();
        late.handle_deadline();
        assert_eq!((outcome(&given_up), outcome(&late)), (vec![(Status::Busy, 0)], vec![(Status::Late, 0)]));
        patient.handle_retry(&store);
        assert!(patient.is_busy());
        drop(readers);
        patient.handle_retry(&store);
        assert!(!patient.is_busy() && patient.reading(0).is_some());
        given_up.handle_retry(&store);
        assert_eq!(outcome(&given_up), [(Status::Busy, 0)]);
    }

    proptest! {
        #[test]
        fn the_checksum_is_that_of_the_whole_whatever_the_order(
            octets in prop::collection::vec(any::<u8>(), 1..400),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
            order in any::<prop::sample::Index>(),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(octets.len() + 1)).chain([0, octets.len()]).collect();
            cuts.sort_unstable();
            let mut pieces: Vec<_> = cuts.windows(2).map(|pair| pair[0]..pair[1]).collect();
            let count = pieces.len();
            pieces.rotate_left(order.index(count));
            if order.index(2) == 1 {
                pieces.reverse();
            }
            let mut runs = Pieces::default();
            let empty = |piece: &Range<usize>| piece.is_empty();
            for (at, piece) in pieces.iter().enumerate() {
                let rest_is_empty = pieces[at..].iter().all(empty);
                prop_assert_eq!(runs.whole(octets.len() as u32).is_some(), rest_is_empty);
                let part = &octets[piece.clone()];
                runs.put(piece.start as u32, part.len() as u32, crc32c::crc32c(part));
            }
            prop_assert_eq!(runs.whole(octets.len() as u32), Some(crc32c::crc32c(&octets)));
        }
    }
}
