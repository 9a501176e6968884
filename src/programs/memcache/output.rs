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
use crate::programs::stream::pieces::{Gather, Slot, TailBuffers, Unsent};
use crate::store::Pinned;
use crate::store::object::Object;
use crate::store::segment::{SEGMENT_BYTES_MAX, Segment};
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
    /// Slots for those of its pieces that are looked up ahead.
    unsent: Unsent,
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
#[derive(Debug, Default)]
pub struct Output {
    text: Vec<u8>,
    text_sent: usize,
    places: VecDeque<Place>,
    values: usize,
    /// Octets of them that were not sent.
    value_bytes: u64,
    tails: TailBuffers,
    /// Octets of values copied into `text` and not yet counted.
    pub(super) copied_bytes: u64,
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
        self.tails.count_max().max(WINDOW_SEGMENTS) as u64 * SEGMENT_BYTES_MAX
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
        let value = Value { pinned, line, begun: false, unsent: Unsent::default(), closing: 2 };
        self.places.push_back(Place::Value(Box::new(value)));
    }

    /// Whether buffers are filled or on their way.
    pub fn has_tail_reads(&self) -> bool {
        !self.tails.is_empty()
    }

    /// How many buffers this connection may have, [`TAIL_READS`] to [`TAIL_READS_MAX`]. It keeps those it has.
    pub fn set_tail_reads(&mut self, count: usize) {
        self.tails.set_count_max(count);
    }

    /// The next disk read to start, if a buffer is left for it; see [`Output::read_back`] when there is none for it
    /// after all. Also finds pieces that are in RAM.
    pub fn poll_read(&mut self) -> Option<TailRead> {
        let (mut earliest, mut ahead_bytes) = (true, 0);
        let window_bytes = self.window_bytes();
        for (at, place) in self.places.iter_mut().enumerate() {
            let Place::Value(value) = place else { continue };
            let Value { pinned, unsent, .. } = &mut **value;
            for (index, piece) in unsent.rest(pinned.pieces()).iter().enumerate() {
                if ahead_bytes >= window_bytes {
                    return None;
                }
                let segment = &piece.segment;
                ahead_bytes += u64::from(segment.len());
                if index == unsent.slots.len() {
                    unsent.slots.push_back(Slot::Wanted { again: false });
                }
                let slot = &mut unsent.slots[index];
                if let Some((extent, crcs)) = slot.look_for(segment) {
                    if self.tails.has_room(earliest) {
                        let ticket = self.tails.take();
                        slot.begin_read(ticket);
                        return Some(TailRead { ticket, segment: segment.clone(), extent, crcs });
                    }
                    // A piece that left RAM before it was sent may find all buffers behind it.
                    if earliest && self.give_back_behind(at, index) {
                        return self.poll_read();
                    }
                    return None;
                }
                earliest &= slot.is_at_hand();
            }
        }
        None
    }

    /// Gives one buffer back that was read for a piece behind the one at `slot` of the value at `place`.
    fn give_back_behind(&mut self, place: usize, slot: usize) -> bool {
        for at in (place..self.places.len()).rev() {
            let Place::Value(value) = &mut self.places[at] else { continue };
            let first = if at == place { slot + 1 } else { 0 };
            if value.unsent.give_last_back(first) {
                self.tails.give_back(1);
                return true;
            }
        }
        false
    }

    /// A read that [`Output::poll_read`] gave was not started.
    pub fn read_back(&mut self, ticket: u64) {
        self.tails.give_back(1);
        if let Some(slot) = self.slot_of(ticket) {
            slot.read_back();
        }
    }

    /// A read ended; `None` if it failed, and then it is tried once more.
    pub fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) {
        let is_kept = self.slot_of(ticket).is_some_and(|slot| {
            slot.handle_read(buf);
            slot.is_staged()
        });
        self.tails.give_back(usize::from(!is_kept));
    }

    /// The segment that a read in flight is for.
    pub fn target(&self, ticket: u64) -> Option<&Arc<Segment>> {
        self.places.iter().find_map(|place| {
            let Place::Value(value) = place else { return None };
            let index = value.unsent.position(ticket)?;
            Some(&value.unsent.rest(value.pinned.pieces())[index].segment)
        })
    }

    /// Drops buffers that were read and not sent, for others that wait for one; they are read again. Returns how many.
    pub fn give_back(&mut self) -> usize {
        let count = self.values_mut().map(|value| value.unsent.give_back(Slot::is_staged)).sum();
        self.tails.give_back(count);
        count
    }

    /// Lets go of pages of RAM that were found and not sent, so that they may leave it; they are looked up again.
    pub fn give_back_memory(&mut self) {
        self.values_mut().for_each(|value| _ = value.unsent.give_back(Slot::is_in_ram));
    }

    /// If the front of the stream cannot be sent because its octets are lost: what became of it.
    pub fn poll_failure(&mut self) -> Option<Failure> {
        let Some(Place::Value(value)) = self.places.front() else { return None };
        if !value.unsent.slots.front().is_some_and(Slot::is_failed) {
            return None;
        }
        let object = value.pinned.object().clone();
        if !value.begun {
            self.text_sent += value.line;
            self.tails.give_back(value.unsent.slots.iter().filter(|slot| slot.is_staged()).count());
            self.values -= 1;
            self.value_bytes -= object.len();
            self.places.pop_front();
            self.compact();
            return Some(Failure::Missed(object));
        }
        Some(Failure::Broken(object))
    }

    /// What can be sent now, from the front, as much as a [`Gather`] takes. Returns the octets.
    pub fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        let (mut gather, mut text) = (Gather::new(slices), self.text_sent);
        for place in &self.places {
            match place {
                Place::Text(len) => {
                    if !gather.add(&self.text[text..text + len]) {
                        break;
                    }
                    text += len;
                }
                Place::Value(value) => {
                    // The line waits for the first piece, so that a value that cannot be read is still a miss.
                    if value.line > 0 && !value.unsent.is_front_at_hand() {
                        break;
                    }
                    if !gather.add(&self.text[text..text + value.line]) {
                        break;
                    }
                    text += value.line;
                    if !value.unsent.gather(value.pinned.pieces(), &mut gather)
                        || !gather.add(&b"\r\n"[2 - value.closing..])
                    {
                        break;
                    }
                }
            }
        }
        gather.bytes()
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
                    let of_pieces = value.unsent.handle_sent(value.pinned.pieces(), count);
                    self.value_bytes -= of_pieces.bytes as u64;
                    self.tails.give_back(of_pieces.buffers);
                    count -= of_pieces.bytes;
                    if !value.unsent.rest(value.pinned.pieces()).is_empty() {
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

    fn values_mut(&mut self) -> impl Iterator<Item = &mut Value> {
        self.places.iter_mut().filter_map(|place| match place {
            Place::Value(value) => Some(&mut **value),
            Place::Text(_) => None,
        })
    }

    /// Where the read in flight goes.
    fn slot_of(&mut self, ticket: u64) -> Option<&mut Slot> {
        self.values_mut().find_map(|value| {
            let index = value.unsent.position(ticket)?;
            Some(&mut value.unsent.slots[index])
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
