//! The octet stream of one direction, on its way in and on its way out: text in INLINE records, bodies in windows.

use super::egress::{InlineText, PartOf, Place, ValueId};
use super::poison::Poison;
use super::record::INLINE_BYTES_MAX;
use super::window::{RxLease, Ticket};
use memchr::memmem;
use std::collections::VecDeque;
use std::num::NonZeroU32;

/// Default of [`Inbound`]'s bound: octets of text that came and nobody has read.
pub const PIPELINE_BYTES_MAX: usize = 1 << 20;
/// Smallest bound that holds the longest line and one record more.
pub const PIPELINE_BYTES_MIN: usize = 16 << 10;
/// Longest line in octets, its CR LF not counted.
pub const LINE_BYTES_MAX: usize = 8192;
/// Text kept allocated while there is none.
const KEPT_BYTES: usize = 16 << 10;

/// What came and was not read: text, and between any two octets of it leased windows.
///
/// ```text
///   | set k 0 0 8192 CR LF |#lease#|#lease#| CR LF get a CR LF ... |      at most `pipeline_bytes_max` octets of text
///   ^ read from here
/// ```
#[derive(Debug)]
pub struct Inbound {
    text: Vec<u8>,
    start: usize,
    /// Octets at the front that are known to hold no CR LF.
    scanned: usize,
    /// Octets of text read so far.
    read: u64,
    /// Octets of text that came so far.
    came: u64,
    /// Each with the octets of text that came before it.
    leases: VecDeque<(u64, RxLease)>,
    text_bytes_max: usize,
}

impl Inbound {
    /// Keeps at most `text_bytes_max` octets of text, and no fewer than [`PIPELINE_BYTES_MIN`].
    pub fn new(text_bytes_max: usize) -> Self {
        let text_bytes_max = text_bytes_max.max(PIPELINE_BYTES_MIN);
        Self { text: Vec::new(), start: 0, scanned: 0, read: 0, came: 0, leases: VecDeque::new(), text_bytes_max }
    }

    /// Octets of text that can come before some are read.
    pub fn room(&self) -> usize {
        self.text_bytes_max - (self.text.len() - self.start)
    }

    /// Text came.
    ///
    /// # Panics
    /// If there is no [`Inbound::room`] for it.
    pub fn handle_inline(&mut self, text: &[u8]) {
        assert!(text.len() <= self.room(), "{} octets for {}", text.len(), self.room());
        if self.start > 0 && self.start >= self.text.len() / 2 {
            self.text.drain(..self.start);
            self.start = 0;
        }
        self.text.extend_from_slice(text);
        self.came += text.len() as u64;
    }

    /// A window came.
    pub fn handle_ready(&mut self, lease: RxLease) {
        self.leases.push_back((self.came, lease));
    }

    /// The text up to the next window.
    pub fn text(&self) -> &[u8] {
        let all = &self.text[self.start..];
        match self.leases.front() {
            // A buffer's length fits usize.
            Some((at, _)) => &all[..(at - self.read) as usize],
            None => all,
        }
    }

    /// The window that comes next, with no text before it.
    pub fn lease(&self) -> Option<&RxLease> {
        self.leases.front().filter(|(at, _)| *at == self.read).map(|(_, lease)| lease)
    }

    /// Whether more has come than [`Inbound::text`] shows.
    pub fn has_lease(&self) -> bool {
        !self.leases.is_empty()
    }

    /// Nothing came that was not read.
    pub fn is_empty(&self) -> bool {
        self.start == self.text.len() && self.leases.is_empty()
    }

    /// Takes the window that comes next.
    pub fn take_lease(&mut self) -> Option<RxLease> {
        self.lease()?;
        self.leases.pop_front().map(|(_, lease)| lease)
    }

    /// Reads the next `count` octets of [`Inbound::text`].
    pub fn read(&mut self, count: usize) -> &[u8] {
        assert!(count <= self.text().len(), "{count} octets of {}", self.text().len());
        let octets = self.start..self.start + count;
        self.start += count;
        self.scanned = 0;
        self.read += count as u64;
        &self.text[octets]
    }

    /// Octets of the line at the front, its CR LF not counted; `None` until it is whole. A lone LF ends no line.
    ///
    /// # Errors
    /// [`Poison::LineTooLong`], however the line is cut; [`Poison::StrayReady`] if a window comes within it.
    pub fn line(&mut self) -> Result<Option<usize>, Poison> {
        let text = self.text();
        let found = memmem::find(&text[self.scanned..], b"\r\n").map(|at| self.scanned + at);
        // Without an end in sight, the line has at least all octets but a CR.
        let len = found.unwrap_or(text.len().saturating_sub(1));
        if len > LINE_BYTES_MAX {
            return Err(Poison::LineTooLong { max: LINE_BYTES_MAX });
        }
        if found.is_none() {
            if self.has_lease() {
                return Err(Poison::StrayReady);
            }
            self.scanned = len;
        }
        Ok(found)
    }

    /// Reads the CR LF behind a body; false until it has come.
    ///
    /// # Errors
    /// [`Poison::Trailer`] if something else has.
    pub fn trailer(&mut self) -> Result<bool, Poison> {
        match (self.text(), self.has_lease()) {
            ([b'\r', b'\n', ..], _) => {
                self.read(2);
                Ok(true)
            }
            ([] | [b'\r'], false) => Ok(false),
            _ => Err(Poison::Trailer),
        }
    }

    /// The window that comes next, as a part of a body of which `remaining` octets are due: its octets.
    ///
    /// # Errors
    /// [`Poison`]: octets by INLINE, or more than are due.
    pub fn body(&self, remaining: u64) -> Result<Option<u32>, Poison> {
        match self.lease() {
            Some(lease) if u64::from(lease.len()) > remaining => {
                Err(Poison::ReadyBeyondBody { len: lease.len(), remaining })
            }
            Some(lease) => Ok(Some(lease.len())),
            None if self.text().is_empty() => Ok(None),
            None => Err(Poison::InlineBody { remaining }),
        }
    }

    /// Octets of text read so far.
    pub fn read_bytes(&self) -> u64 {
        self.read
    }

    /// Gives memory back while there is nothing to read.
    pub fn rest(&mut self) {
        if self.is_empty() && self.text.capacity() > KEPT_BYTES {
            self.text = Vec::new();
            self.start = 0;
            self.leases = VecDeque::new();
        }
    }
}

/// One piece of a value, to be put into the slot of `ticket`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Piece<V> {
    pub value: V,
    /// Which value it is.
    pub id: ValueId,
    /// Of its first octet in the value.
    pub offset: u64,
    pub len: u32,
}

/// A piece that takes a place: what [`TxSlots::handle_fill`](super::window::TxSlots::handle_fill) wants to know.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FillRequest<V> {
    pub ticket: Ticket,
    pub piece: Piece<V>,
    pub slow: bool,
}

/// A value to be sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Value<V> {
    /// Whatever the owner finds its octets by.
    pub source: V,
    /// Octets of it.
    pub len: u64,
    /// Octets at its front that are to be had at once. The pieces that reach beyond are slow. If there are none, the
    /// line before the value is held until its first piece is there, and a value that cannot be had was never there.
    pub quick_len: u64,
}

#[derive(Debug)]
enum Part<V> {
    /// So many octets of the text.
    Text {
        len: usize,
        fresh: bool,
    },
    Value {
        id: ValueId,
        value: Value<V>,
        at: u64,
        line: usize,
        line_begun: bool,
        held: bool,
    },
}

/// What is to be sent and has no place yet: text and values, in the order of the stream.
///
/// Text is cut into as few records as it fits; values into pieces of a full window and one remainder.
#[derive(Debug)]
pub struct Outbound<V> {
    text: VecDeque<u8>,
    parts: VecDeque<Part<V>>,
    fragment_bytes_max: u32,
    next_ticket: u64,
    next_value: u64,
    /// The doubtful value whose line, or a body of it, took the last place: its closing CR LF comes next.
    closing: Option<ValueId>,
    values: usize,
}

/// Octets behind a value: CR LF.
const TRAILER: &[u8] = b"\r\n";

impl<V: Clone> Outbound<V> {
    /// Nothing to send, in pieces of up to `fragment_bytes_max` octets.
    pub fn new(fragment_bytes_max: u32) -> Self {
        Self {
            text: VecDeque::new(),
            parts: VecDeque::new(),
            fragment_bytes_max,
            next_ticket: 0,
            next_value: 0,
            closing: None,
            values: 0,
        }
    }

    /// Adds text.
    pub fn text(&mut self, text: &[u8]) {
        self.text.extend(text);
        match self.parts.back_mut() {
            _ if text.is_empty() => {}
            Some(Part::Text { len, .. }) => *len += text.len(),
            _ => self.parts.push_back(Part::Text { len: text.len(), fresh: false }),
        }
    }

    /// Adds text that starts a record of its own: for peers that do not take a trailer joined with what follows.
    pub fn fresh_text(&mut self, text: &[u8]) {
        self.text.extend(text);
        if !text.is_empty() {
            self.parts.push_back(Part::Text { len: text.len(), fresh: true });
        }
    }

    /// Adds a value: the line before it, its octets, and CR LF.
    pub fn value(&mut self, line: &[u8], value: Value<V>) -> ValueId {
        let id = ValueId(self.next_value);
        self.next_value += 1;
        let held = value.quick_len == 0 && value.len > 0;
        if !held {
            self.text(line);
        }
        if value.len > 0 {
            self.values += 1;
            let line = if held { line.len() } else { 0 };
            self.parts.push_back(Part::Value { id, value, at: 0, line, line_begun: false, held });
        }
        if held {
            self.text.extend(line);
        }
        self.text(TRAILER);
        id
    }

    /// Everything has its place.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Octets of text without a place.
    pub fn text_bytes(&self) -> usize {
        self.text.len()
    }

    /// Values that are not wholly placed.
    pub fn value_count(&self) -> usize {
        self.values
    }

    /// A value was missed, see [`Failure::Missed`](super::egress::Failure): what of it has no place yet is dropped.
    pub fn handle_missed(&mut self, missed: ValueId) {
        let Some(Part::Value { id, .. }) = self.parts.front() else {
            // Wholly placed; its closing CR LF may not be.
            return self.drop_closing(missed);
        };
        if *id != missed {
            return self.drop_closing(missed);
        }
        self.parts.pop_front();
        self.values -= 1;
        self.closing = Some(missed);
        self.drop_closing(missed);
    }

    fn drop_closing(&mut self, missed: ValueId) {
        if self.closing != Some(missed) {
            return;
        }
        self.closing = None;
        if let Some(Part::Text { len, .. }) = self.parts.front_mut() {
            self.text.drain(..TRAILER.len());
            *len -= TRAILER.len();
            if *len == 0 {
                self.parts.pop_front();
            }
        }
    }

    /// The next thing to take a place, once there is room for one; a body with what fills it.
    pub fn poll_place(&mut self) -> Option<(Place, Option<FillRequest<V>>)> {
        match self.parts.front_mut()? {
            Part::Text { .. } => {
                let text = self.take_text();
                let part_of = self.closing.take().map(|value| PartOf::Trailer { value, prefix: TRAILER.len() as u8 });
                Some((Place::Inline { text, part_of }, None))
            }
            Part::Value { id, value, at, line, line_begun, held } => {
                let held_by = Ticket(self.next_ticket);
                if *line > 0 {
                    let len = (*line).min(INLINE_BYTES_MAX);
                    let start = !std::mem::replace(line_begun, true);
                    *line -= len;
                    let octets: Vec<u8> = self.text.drain(..len).collect();
                    let part_of = Some(PartOf::Line { value: *id, held_by, start });
                    return Some((Place::Inline { text: InlineText::first_of(&octets), part_of }, None));
                }
                let len = (value.len - *at).min(u64::from(self.fragment_bytes_max)) as u32;
                let piece = Piece { value: value.source.clone(), id: *id, offset: *at, len };
                *at += u64::from(len);
                let slow = *at > value.quick_len;
                let place = Place::Body { ticket: held_by, len: NonZeroU32::new(len)?, value: *id };
                self.next_ticket += 1;
                if *at == value.len {
                    self.closing = held.then_some(*id);
                    self.values -= 1;
                    self.parts.pop_front();
                }
                Some((place, Some(FillRequest { ticket: held_by, piece, slow })))
            }
        }
    }

    /// One record of the text at the front.
    fn take_text(&mut self) -> InlineText {
        let mut octets = [0; INLINE_BYTES_MAX];
        let mut taken = 0;
        while let Some(Part::Text { len, fresh }) = self.parts.front_mut() {
            if taken == INLINE_BYTES_MAX || *fresh && taken > 0 {
                break;
            }
            let count = (*len).min(INLINE_BYTES_MAX - taken);
            for (octet, from) in octets[taken..taken + count].iter_mut().zip(self.text.drain(..count)) {
                *octet = from;
            }
            taken += count;
            *len -= count;
            *fresh = false;
            if *len > 0 {
                break;
            }
            self.parts.pop_front();
        }
        InlineText::first_of(&octets[..taken])
    }

    /// Gives memory back while there is nothing to send.
    pub fn rest(&mut self) {
        if self.parts.is_empty() {
            self.text = VecDeque::new();
            self.parts = VecDeque::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Negotiated, WindowGeometry};
    use super::super::window::RxWindows;
    use super::*;
    use crate::wire::seq::BulkSequence;

    fn leases(count: u64) -> (RxWindows, Vec<RxLease>) {
        let windows = WindowGeometry::new(4096, 64).unwrap();
        let mut windows = RxWindows::new(windows, Negotiated::between(windows, windows));
        let ready = |n| windows.handle_ready(BulkSequence::new(n).unwrap(), NonZeroU32::MIN).unwrap();
        let leases = (1..=count).map(ready).collect();
        (windows, leases)
    }

    #[test]
    fn windows_come_between_the_octets_they_came_between() {
        let (_windows, leases) = leases(3);
        let mut leases = leases.into_iter();
        let mut inbound = Inbound::new(0);
        inbound.handle_inline(b"ab");
        inbound.handle_ready(leases.next().unwrap());
        inbound.handle_ready(leases.next().unwrap());
        inbound.handle_inline(b"c");
        inbound.handle_ready(leases.next().unwrap());
        assert_eq!((inbound.text(), inbound.lease().is_some()), (&b"ab"[..], false));
        assert_eq!(inbound.read(1), b"a");
        assert_eq!((inbound.text(), inbound.lease().is_some()), (&b"b"[..], false));
        assert_eq!(inbound.read(1), b"b");
        assert_eq!(inbound.text(), b"");
        assert_eq!(inbound.take_lease().map(|lease| lease.sequence().get()), Some(1));
        assert_eq!(inbound.take_lease().map(|lease| lease.sequence().get()), Some(2));
        assert!(inbound.take_lease().is_none());
        assert_eq!(inbound.text(), b"c");
        inbound.read(1);
        assert_eq!(inbound.take_lease().map(|lease| lease.sequence().get()), Some(3));
        assert!(inbound.is_empty());
    }

    #[test]
    fn unread_text_is_bounded() {
        let mut inbound = Inbound::new(0);
        assert_eq!(inbound.room(), PIPELINE_BYTES_MIN);
        inbound.handle_inline(&[b'x'; 10_000]);
        assert_eq!(inbound.room(), PIPELINE_BYTES_MIN - 10_000);
        inbound.read(9_000);
        inbound.handle_inline(b"y");
        assert_eq!(inbound.room(), PIPELINE_BYTES_MIN - 1_001);
        assert_eq!(inbound.text().last(), Some(&b'y'));
    }

    /// Places until there are none: text, `#ticket offset+len`, with `~` on slow ones and `?` on held text.
    fn places(outbound: &mut Outbound<char>) -> Vec<String> {
        std::iter::from_fn(|| outbound.poll_place())
            .map(|(place, fill)| match (place, fill) {
                (Place::Inline { text, part_of }, None) => {
                    let held = if let Some(PartOf::Line { .. }) = part_of { "?" } else { "" };
                    format!("{held}{}", text.as_bytes().escape_ascii())
                }
                (Place::Body { ticket, len, .. }, Some(fill)) => {
                    assert_eq!((ticket, len.get()), (fill.ticket, fill.piece.len));
                    let slow = if fill.slow { "~" } else { "" };
                    format!("{slow}#{} {}{}+{}", ticket.0, fill.piece.value, fill.piece.offset, len)
                }
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn a_megabyte_at_the_default_geometry_is_four_pieces() {
        let mut outbound = Outbound::new(256 << 10);
        outbound.value(b"VALUE k 0 1048576\r\n", Value { source: 'k', len: 1 << 20, quick_len: 300_000 });
        outbound.text(b"END\r\n");
        let expected = [
            r"VALUE k 0 1048576\r\n",
            "#0 k0+262144",
            "~#1 k262144+262144",
            "~#2 k524288+262144",
            "~#3 k786432+262144",
            r"\r\nEND\r\n",
        ];
        assert_eq!(places(&mut outbound), expected);
        assert!(outbound.is_empty());
    }

    #[test]
    fn neighbouring_text_shares_records_and_fresh_text_does_not() {
        let mut outbound = Outbound::new(4096);
        outbound.text(b"STORED\r\n");
        outbound.text(b"STORED\r\n");
        outbound.value(b"VALUE a 0 0\r\n", Value { source: 'a', len: 0, quick_len: 0 });
        outbound.text(b"END\r\n");
        outbound.fresh_text(b"set");
        outbound.text(b" k");
        outbound.fresh_text(b"\r\n");
        outbound.text(&[b'x'; 400]);
        let lengths: Vec<usize> = places(&mut outbound).iter().map(String::len).collect();
        assert_eq!(lengths, [16 + 4 + 13 + 2 + 2 + 2 + 5 + 2, 5, 191 + 2, 191, 20]);
    }

    #[test]
    fn the_line_of_a_value_without_quick_octets_is_held() {
        let mut outbound = Outbound::new(4096);
        outbound.text(b"END\r\n");
        outbound.value(b"VALUE a 0 5000\r\n", Value { source: 'a', len: 5000, quick_len: 0 });
        outbound.text(b"END\r\n");
        let expected = [r"END\r\n", r"?VALUE a 0 5000\r\n", "~#0 a0+4096", "~#1 a4096+904", r"\r\nEND\r\n"];
        assert_eq!(places(&mut outbound), expected);
    }

    #[test]
    fn what_of_a_missed_value_has_no_place_is_dropped() {
        for placed in 2..=3 {
            let mut outbound = Outbound::new(4096);
            let id = outbound.value(b"VALUE a 0 5000\r\n", Value { source: 'a', len: 5000, quick_len: 0 });
            outbound.text(b"END\r\n");
            for _ in 0..placed {
                outbound.poll_place().unwrap();
            }
            outbound.handle_missed(id);
            assert_eq!(places(&mut outbound), [r"END\r\n"], "after {placed} places");
            assert_eq!((outbound.text_bytes(), outbound.value_count()), (0, 0));
        }
    }
}
