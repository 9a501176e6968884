//! The reply stream of one connection: text and values in the order they were asked for, filled in any order.
//!
//! ```text
//!  front                                                                     back
//!  | text | VALUE line, pieces of a value, CR LF | text | VALUE line, ... | text |
//!                        |
//!                        +- each piece: in RAM, on its way from disk, read from disk, or not asked for yet
//! ```
//!
//! A value is never held whole: only the next few of its pieces are. Tail reads start as soon as a value takes its place,
//! while its head leaves from RAM, and run ahead over values behind it. A connection has [`TAIL_READS`] buffers for
//! them, more while its lane has plenty, the last of which only the earliest unfilled piece may take, so reads ahead cannot
//! starve the front.

use crate::fabric::staging::StagingBuf;
use crate::programs::stream::{GATHER_BYTES_MAX, SLICES_MAX, Slot};
use crate::store::Pinned;
use crate::store::object::Object;
use crate::store::segment::{Content, SEGMENT_BYTES_MAX, Segment};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

pub use crate::programs::stream::{TAIL_READS, TAIL_READS_MAX, TailRead};

/// Segments that are looked up ahead, over all values of the stream, or as many as there are buffers: so much memory a
/// slow reader keeps, and one segment.
const WINDOW_SEGMENTS: usize = 8;
/// Text beyond this stops parsing until some has left.
pub const TEXT_BYTES_MAX: usize = 32 << 10;
/// Text that was sent is let go of once there is as much of it: of what a slow peer takes octet by octet.
const SENT_TEXT_BYTES_MAX: usize = 4 << 10;
#[derive(Debug)]
struct Value {
    pinned: Pinned,
    /// Octets of the VALUE line at the front of the text, not yet sent.
    line: usize,
    /// Some of it was sent.
    begun: bool,
    /// The front piece of `slots`.
    piece: usize,
    /// Octets of it that were sent.
    sent: usize,
    slots: VecDeque<Slot>,
    /// Octets of the closing CR LF not yet sent.
    closing: usize,
}

#[derive(Debug)]
enum Place {
    Text(usize),
    Value(Box<Value>),
}

/// What to do about a value whose octets cannot be had.
#[derive(Debug)]
pub enum Failure {
    /// Nothing of it was sent; it left the stream as if it were a miss.
    Missed(Arc<Object>),
    /// Its VALUE line was sent: only closing the connection tells the peer.
    Broken(Arc<Object>),
}

/// The reply stream.
#[derive(Debug)]
pub struct Output {
    text: Vec<u8>,
    text_sent: usize,
    places: VecDeque<Place>,
    values: usize,
    /// Octets of them that were not sent.
    value_bytes: u64,
    /// Buffers filled or on their way.
    tails: usize,
    tails_max: usize,
    next_ticket: u64,
    /// Octets of values copied into `text` and not yet counted.
    pub(super) copied_bytes: u64,
}

impl Default for Output {
    fn default() -> Self {
        Self {
            text: Vec::new(),
            text_sent: 0,
            places: VecDeque::new(),
            values: 0,
            value_bytes: 0,
            tails: 0,
            tails_max: TAIL_READS,
            next_ticket: 0,
            copied_bytes: 0,
        }
    }
}

impl Output {
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Values in the stream, each a pin.
    pub fn value_count(&self) -> usize {
        self.values
    }

    /// So much waits that no further request should be read: text, or as many octets of values as are looked up ahead.
    /// Values behind those would be pinned for nothing, and keep others from being read.
    pub fn is_long(&self) -> bool {
        self.text.len() - self.text_sent >= TEXT_BYTES_MAX || self.value_bytes >= self.window_bytes()
    }

    /// Octets that are looked up ahead.
    fn window_bytes(&self) -> u64 {
        self.tails_max.max(WINDOW_SEGMENTS) as u64 * SEGMENT_BYTES_MAX
    }

    /// Adds what `write` appends.
    pub fn text(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.text.len();
        write(&mut self.text);
        let added = self.text.len() - before;
        match self.places.back_mut() {
            _ if added == 0 => {}
            Some(Place::Text(len)) => *len += added,
            _ => self.places.push_back(Place::Text(added)),
        }
    }

    /// Adds a value: the VALUE line that `write` appends, its octets, CR LF.
    pub fn value(&mut self, pinned: Pinned, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.text.len();
        write(&mut self.text);
        let line = self.text.len() - before;
        self.values += 1;
        self.value_bytes += pinned.len();
        let value = Value { pinned, line, begun: false, piece: 0, sent: 0, slots: VecDeque::new(), closing: 2 };
        self.places.push_back(Place::Value(Box::new(value)));
    }

    /// Whether buffers are filled or on their way.
    pub fn has_tail_reads(&self) -> bool {
        self.tails > 0
    }

    /// How many buffers this connection may have, [`TAIL_READS`] to [`TAIL_READS_MAX`]. It keeps those it has.
    pub fn set_tail_reads(&mut self, count: usize) {
        self.tails_max = count.clamp(TAIL_READS, TAIL_READS_MAX);
    }

    /// The next disk read to start, if a buffer is left for it; see [`Output::read_back`] when there is none for it
    /// after all. Also finds pieces that are in RAM.
    pub fn poll_read(&mut self) -> Option<TailRead> {
        let (mut earliest, mut ahead_bytes) = (true, 0);
        let window_bytes = self.window_bytes();
        for (at, place) in self.places.iter_mut().enumerate() {
            let Place::Value(value) = place else { continue };
            for index in 0..value.pinned.pieces().len() - value.piece {
                if ahead_bytes >= window_bytes {
                    return None;
                }
                let segment = &value.pinned.pieces()[value.piece + index].segment;
                ahead_bytes += u64::from(segment.len());
                if index == value.slots.len() {
                    value.slots.push_back(Slot::Wanted { again: false });
                }
                if let Slot::Wanted { again } = value.slots[index] {
                    match segment.content() {
                        Content::Ram(ram) => value.slots[index] = Slot::Ram(ram),
                        Content::Lost => value.slots[index] = Slot::Failed,
                        Content::Disk { extent, crcs } => {
                            if self.tails + usize::from(!earliest) < self.tails_max {
                                let ticket = self.next_ticket;
                                self.next_ticket += 1;
                                self.tails += 1;
                                value.slots[index] = Slot::Reading { ticket, again };
                                return Some(TailRead { ticket, segment: segment.clone(), extent, crcs });
                            }
                            // A piece that left RAM before it was sent may find all buffers behind it.
                            if earliest && self.give_back_behind(at, index) {
                                return self.poll_read();
                            }
                            return None;
                        }
                    }
                }
                if !value.slots[index].is_at_hand() {
                    earliest = false;
                }
            }
        }
        None
    }

    /// Gives one buffer back that was read for a piece behind the one at `slot` of the value at `place`.
    fn give_back_behind(&mut self, place: usize, slot: usize) -> bool {
        for at in (place..self.places.len()).rev() {
            let Place::Value(value) = &mut self.places[at] else { continue };
            let first = if at == place { slot + 1 } else { 0 };
            for index in (first..value.slots.len()).rev() {
                if matches!(value.slots[index], Slot::Staged(_)) {
                    value.slots[index] = Slot::Wanted { again: false };
                    self.tails -= 1;
                    return true;
                }
            }
        }
        false
    }

    /// A read that [`Output::poll_read`] gave was not started.
    pub fn read_back(&mut self, ticket: u64) {
        self.tails -= 1;
        if let Some((value, index)) = self.reading(ticket)
            && let Slot::Reading { again, .. } = value.slots[index]
        {
            value.slots[index] = Slot::Wanted { again };
        }
    }

    /// A read ended; `None` if it failed, and then it is tried once more. True if the octets have a place.
    pub fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) -> bool {
        let Some((value, index)) = self.reading(ticket) else {
            self.tails -= 1;
            return false;
        };
        let again = matches!(value.slots[index], Slot::Reading { again: true, .. });
        let staged = buf.is_some();
        value.slots[index] = match buf {
            Some(buf) => Slot::Staged(buf),
            None if again => Slot::Failed,
            None => Slot::Wanted { again: true },
        };
        if !staged {
            self.tails -= 1;
        }
        staged
    }

    /// The segment that a read in flight is for.
    pub fn target(&self, ticket: u64) -> Option<&Arc<Segment>> {
        self.places.iter().find_map(|place| {
            let Place::Value(value) = place else { return None };
            let index = value
                .slots
                .iter()
                .position(|slot| matches!(slot, Slot::Reading { ticket: at, .. } if *at == ticket))?;
            Some(&value.pinned.pieces()[value.piece + index].segment)
        })
    }

    /// Drops buffers that were read and not sent, for others that wait for one; they are read again. Returns how many.
    pub fn give_back(&mut self) -> usize {
        let mut count = 0;
        for place in &mut self.places {
            let Place::Value(value) = place else { continue };
            for slot in &mut value.slots {
                if matches!(slot, Slot::Staged(_)) {
                    *slot = Slot::Wanted { again: false };
                    count += 1;
                }
            }
        }
        self.tails -= count;
        count
    }

    /// Lets go of pages of RAM that were found and not sent, so that they may leave it; they are looked up again.
    pub fn give_back_memory(&mut self) {
        for place in &mut self.places {
            let Place::Value(value) = place else { continue };
            for slot in &mut value.slots {
                if matches!(slot, Slot::Ram(_)) {
                    *slot = Slot::Wanted { again: false };
                }
            }
        }
    }

    /// If the front of the stream cannot be sent because its octets are lost: what became of it.
    pub fn poll_failure(&mut self) -> Option<Failure> {
        let Some(Place::Value(value)) = self.places.front() else { return None };
        if !matches!(value.slots.front(), Some(Slot::Failed)) {
            return None;
        }
        let object = value.pinned.object().clone();
        if !value.begun {
            self.text_sent += value.line;
            let others = value.slots.iter().filter(|slot| matches!(slot, Slot::Staged(_))).count();
            self.tails -= others;
            self.values -= 1;
            self.value_bytes -= object.len();
            self.places.pop_front();
            self.compact();
            return Some(Failure::Missed(object));
        }
        Some(Failure::Broken(object))
    }

    /// What can be sent now, from the front, at most [`GATHER_BYTES_MAX`] octets. Returns the octets.
    pub fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        let (mut total, mut text) = (0, self.text_sent);
        let mut add = |octets: &'a [u8]| {
            let octets = &octets[..octets.len().min(GATHER_BYTES_MAX - total)];
            if !octets.is_empty() {
                slices.push(IoSlice::new(octets));
                total += octets.len();
            }
            total < GATHER_BYTES_MAX && slices.len() < SLICES_MAX
        };
        'places: for place in &self.places {
            match place {
                Place::Text(len) => {
                    if !add(&self.text[text..text + len]) {
                        break;
                    }
                    text += len;
                }
                Place::Value(value) => {
                    // The line waits for the first piece, so that a value that cannot be read is still a miss.
                    if value.line > 0 && !value.slots.front().is_some_and(Slot::is_at_hand) {
                        break;
                    }
                    if !add(&self.text[text..text + value.line]) {
                        break;
                    }
                    text += value.line;
                    let mut skip = value.sent;
                    for (slot, piece) in value.slots.iter().zip(&value.pinned.pieces()[value.piece..]) {
                        let octets = match slot {
                            Slot::Ram(ram) => piece.octets(ram),
                            Slot::Staged(buf) => {
                                &buf.as_slice()[piece.start as usize..(piece.start + piece.len) as usize]
                            }
                            _ => break 'places,
                        };
                        if !add(&octets[skip..]) {
                            break 'places;
                        }
                        skip = 0;
                    }
                    if value.piece + value.slots.len() < value.pinned.pieces().len()
                        || !add(&b"\r\n"[2 - value.closing..])
                    {
                        break;
                    }
                }
            }
        }
        total
    }

    /// The first `count` octets of what [`Output::gather`] gave were sent.
    pub fn handle_sent(&mut self, mut count: usize) {
        while count > 0 {
            let Some(place) = self.places.front_mut() else { panic!("more was sent than there is") };
            match place {
                Place::Text(len) => {
                    let sent = count.min(*len);
                    self.text_sent += sent;
                    *len -= sent;
                    count -= sent;
                    if *len > 0 {
                        break;
                    }
                    self.places.pop_front();
                }
                Place::Value(value) => {
                    value.begun = true;
                    let sent = count.min(value.line);
                    self.text_sent += sent;
                    value.line -= sent;
                    count -= sent;
                    while count > 0 && value.piece < value.pinned.pieces().len() {
                        let len = value.pinned.pieces()[value.piece].len as usize;
                        let sent = count.min(len - value.sent);
                        value.sent += sent;
                        self.value_bytes -= sent as u64;
                        count -= sent;
                        if value.sent < len {
                            break;
                        }
                        if let Some(Slot::Staged(_)) = value.slots.pop_front() {
                            self.tails -= 1;
                        }
                        value.piece += 1;
                        value.sent = 0;
                    }
                    if value.piece < value.pinned.pieces().len() {
                        break;
                    }
                    let sent = count.min(value.closing);
                    value.closing -= sent;
                    count -= sent;
                    if value.closing > 0 {
                        break;
                    }
                    self.values -= 1;
                    self.places.pop_front();
                }
            }
        }
        self.compact();
    }

    /// Gives memory back while there is nothing to send.
    pub fn rest(&mut self) {
        if self.places.is_empty() {
            self.text = Vec::new();
            self.text_sent = 0;
            self.places = VecDeque::new();
        }
    }

    fn reading(&mut self, ticket: u64) -> Option<(&mut Value, usize)> {
        self.places.iter_mut().find_map(|place| {
            let Place::Value(value) = place else { return None };
            let index = value
                .slots
                .iter()
                .position(|slot| matches!(slot, Slot::Reading { ticket: at, .. } if *at == ticket))?;
            Some((&mut **value, index))
        })
    }

    fn compact(&mut self) {
        if self.text_sent == self.text.len() {
            self.text.clear();
            self.text_sent = 0;
        } else if self.text_sent >= SENT_TEXT_BYTES_MAX {
            self.text.drain(..self.text_sent);
            self.text_sent = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It kept as much again of what was sent already.
    #[test]
    fn text_of_a_slow_peer_stays_near_its_bound() {
        let mut output = Output::default();
        for _ in 0..100 {
            while !output.is_long() {
                output.text(|out| out.extend_from_slice(&[b'x'; 100]));
            }
            output.handle_sent(3000);
            assert!(output.text.len() <= TEXT_BYTES_MAX + 100 + SENT_TEXT_BYTES_MAX, "{}", output.text.len());
        }
    }
}
