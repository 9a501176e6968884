//! The replies of one connection, each a record, on their way out.
//!
//! ```text
//!                       all octets at hand
//!  reading: READ, READ ───────────────────▶ leaving: | mark, message | mark, message, pieces, roundup | …
//!    │ ▲                                       ▲
//!    ▼ │ disk                     every other reply
//! ```
//! Calls are independent and clients tell replies apart by their xids, so a READ that waits for the disk holds up nobody, and
//! as nothing of it has left, it can still be answered with an error. Only a READ that needs more buffers than there are for
//! it begins to leave before it is whole.

use crate::fabric::staging::StagingBuf;
use crate::programs::nfs::files::Reading;
use crate::programs::stream::{GATHER_BYTES_MAX, SLICES_MAX, Slot, TAIL_READS, TAIL_READS_MAX, TailRead};
use crate::store::object::{Object, Piece};
use crate::store::segment::{Content, Segment};
use crate::wire::codec::roundup_bytes;
use crate::wire::onc_rpc::record::Mark;
use crate::wire::onc_rpc::{Part, Payload, Xid};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

/// Octets of messages, data of READs apart, beyond which no further call is read.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The same for the data of READs: four of the longest are read from disk at a time, and a fifth may be begun.
const DATA_BYTES_MAX: u64 = 4 << 20;

const ROUNDUP: [u8; 3] = [0; 3];

/// What was read, and where it is now.
#[derive(Debug)]
struct Data {
    xid: Xid,
    reading: Reading,
    /// One for each piece that was not sent.
    slots: VecDeque<Slot>,
    /// The piece of the front slot.
    piece: usize,
    /// Octets of it that were sent.
    sent: usize,
    /// Octets of the roundup that were not.
    roundup: usize,
}

impl Data {
    fn is_at_hand(&self) -> bool {
        self.slots.iter().all(Slot::is_at_hand)
    }

    /// Octets not sent.
    fn left(&self) -> u64 {
        let rest = &self.reading.pieces[self.piece..];
        rest.iter().map(|piece| u64::from(piece.len)).sum::<u64>() - self.sent as u64
    }

    /// Wants the slots again that `is_given_back` says. Returns how many.
    fn give_back(&mut self, is_given_back: impl Fn(&Slot) -> bool) -> usize {
        let slots = self.slots.iter_mut().filter(|slot| is_given_back(slot));
        slots.map(|slot| *slot = Slot::Wanted { again: false }).count()
    }
}

#[derive(Debug)]
struct Reply {
    /// Record mark and message, less the data of a READ and what follows it.
    message: Vec<u8>,
    /// Octets of it that were sent.
    sent: usize,
    data: Option<Box<Data>>,
}

/// What became of a READ whose octets are lost.
#[derive(Debug)]
pub enum Lost {
    /// It is answered with an error.
    Refused(Option<Arc<Object>>),
    /// A part of it was sent: only closing the connection tells the peer.
    Broken(Option<Arc<Object>>),
}

/// See the module.
#[derive(Debug)]
pub struct Output {
    leaving: VecDeque<Reply>,
    /// In the order of the calls.
    reading: VecDeque<Reply>,
    /// Octets of all messages, and of all data, that were not sent.
    message_bytes: usize,
    data_bytes: u64,
    /// Buffers filled or on their way.
    tails: usize,
    tails_max: usize,
    next_ticket: u64,
    /// There are failed slots.
    has_lost: bool,
}

impl Default for Output {
    fn default() -> Self {
        Self {
            leaving: VecDeque::new(),
            reading: VecDeque::new(),
            message_bytes: 0,
            data_bytes: 0,
            tails: 0,
            tails_max: TAIL_READS,
            next_ticket: 0,
            has_lost: false,
        }
    }
}

fn record(octets: &[u8], behind: u64) -> Vec<u8> {
    let mark = Mark::whole(octets.len() as u64 + behind).octets();
    [&mark, octets].concat()
}

impl Output {
    pub fn is_empty(&self) -> bool {
        self.leaving.is_empty() && self.reading.is_empty()
    }

    /// So much waits to leave that no further call should be read.
    pub fn is_full(&self, replies_max: usize) -> bool {
        self.leaving.len() + self.reading.len() >= replies_max
            || self.message_bytes >= MESSAGE_BYTES_MAX
            || self.data_bytes >= DATA_BYTES_MAX
    }

    /// Adds a reply that is a whole message.
    pub fn message(&mut self, octets: &[u8]) {
        let message = record(octets, 0);
        self.message_bytes += message.len();
        self.leaving.push_back(Reply { message, sent: 0, data: None });
    }

    /// Adds the reply to a READ.
    pub fn read(&mut self, xid: Xid, reading: Reading) {
        let payload: Payload = reading.reply(0).encode(xid);
        let mut parts = payload.parts().iter();
        let (Some(Part::Bytes(octets)), Some(Part::Item(item)), None) = (parts.next(), parts.next(), parts.next())
        else {
            unreachable!("the data is the last of the results");
        };
        let roundup = roundup_bytes(item.len.into()) as usize;
        let message = record(octets, u64::from(item.len) + roundup as u64);
        self.message_bytes += message.len();
        self.data_bytes += u64::from(item.len);
        let slots = reading.pieces.iter().map(|_| Slot::Wanted { again: false }).collect();
        let data = Data { xid, reading, slots, piece: 0, sent: 0, roundup };
        self.reading.push_back(Reply { message, sent: 0, data: Some(Box::new(data)) });
        self.find();
    }

    pub fn has_tail_reads(&self) -> bool {
        self.tails > 0
    }

    pub fn set_tail_reads(&mut self, count: usize) {
        self.tails_max = count.clamp(TAIL_READS, TAIL_READS_MAX);
    }

    /// Looks for what is in RAM.
    fn find(&mut self) {
        let mut has_lost = false;
        for data in self.all_data() {
            for (slot, piece) in data.slots.iter_mut().zip(&data.reading.pieces[data.piece..]) {
                if let Slot::Wanted { .. } = slot {
                    match piece.segment.content() {
                        Content::Ram(ram) => *slot = Slot::Ram(ram),
                        Content::Lost => {
                            *slot = Slot::Failed;
                            has_lost = true;
                        }
                        Content::Disk { .. } => {}
                    }
                }
            }
        }
        self.has_lost |= has_lost;
        self.leave();
    }

    /// What is whole leaves.
    fn leave(&mut self) {
        let mut at = 0;
        while let Some(reply) = self.reading.get(at) {
            if reply.data.as_ref().is_none_or(|data| data.is_at_hand()) {
                self.leaving.extend(self.reading.remove(at));
            } else {
                at += 1;
            }
        }
    }

    /// The next disk read to start, if a buffer is left for it; see [`Output::read_back`] when there is none for it
    /// after all.
    pub fn poll_read(&mut self) -> Option<TailRead> {
        self.find();
        let mut wanted = self.first_wanted()?;
        if self.tails + usize::from(!wanted.is_earliest) >= self.tails_max {
            if !wanted.is_earliest || !self.make_way(&wanted) {
                return None;
            }
            wanted = self.first_wanted()?;
        }
        let ticket = self.next_ticket;
        let data = self.data_mut(wanted.reply)?;
        let segment = data.reading.pieces[data.piece + wanted.slot].segment.clone();
        let Content::Disk { extent, crcs } = segment.content() else { return None };
        let again = matches!(data.slots[wanted.slot], Slot::Wanted { again: true });
        data.slots[wanted.slot] = Slot::Reading { ticket, again };
        self.next_ticket += 1;
        self.tails += 1;
        Some(TailRead { ticket, segment, extent, crcs })
    }

    /// The first slot that nothing is on its way for.
    fn first_wanted(&self) -> Option<Wanted> {
        let mut is_earliest = true;
        for (reply, data) in self.replies().enumerate() {
            for (slot, state) in data.iter().flat_map(|data| data.slots.iter().enumerate()) {
                if matches!(state, Slot::Wanted { .. }) {
                    return Some(Wanted { reply, slot, is_earliest });
                }
                is_earliest &= state.is_at_hand();
            }
        }
        None
    }

    /// All that are before the wanted slot are at hand, and no buffer is left for it. True if there is one now.
    fn make_way(&mut self, wanted: &Wanted) -> bool {
        for reply in (wanted.reply..self.leaving.len() + self.reading.len()).rev() {
            let Some(data) = self.data_mut(reply) else { continue };
            let first = if reply == wanted.reply { wanted.slot + 1 } else { 0 };
            let staged = data.slots.iter().skip(first).rposition(|slot| matches!(slot, Slot::Staged(_)));
            if let Some(at) = staged {
                data.slots[first + at] = Slot::Wanted { again: false };
                self.tails -= 1;
                return true;
            }
        }
        self.begin_earliest();
        false
    }

    /// The earliest READ leaves before it is whole, if it can begin: its buffers come free only so.
    fn begin_earliest(&mut self) -> bool {
        let earliest = self.reading.front().and_then(|reply| reply.data.as_ref());
        let can_begin = earliest.and_then(|data| data.slots.front()).is_some_and(Slot::is_at_hand);
        if can_begin {
            self.leaving.extend(self.reading.pop_front());
        }
        can_begin
    }

    /// A read that [`Output::poll_read`] gave was not started, for want of a buffer. Nobody keeps buffers while waiting for one:
    /// what is behind the earliest READ gives them back, and that one leaves with those that it has.
    pub fn read_back(&mut self, ticket: u64) {
        self.tails -= 1;
        if let Some((data, slot)) = self.slot_of(ticket)
            && let Slot::Reading { again, .. } = data.slots[slot]
        {
            data.slots[slot] = Slot::Wanted { again };
        }
        self.begin_earliest();
        let reading = self.reading.iter_mut().filter_map(|reply| reply.data.as_mut());
        self.tails -= reading.map(|data| data.give_back(is_staged)).sum::<usize>();
    }

    /// A read ended; `None` if it failed, and then it is tried once more.
    pub fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) {
        let Some((data, slot)) = self.slot_of(ticket) else {
            self.tails -= 1;
            return;
        };
        let again = matches!(data.slots[slot], Slot::Reading { again: true, .. });
        let is_staged = buf.is_some();
        data.slots[slot] = match buf {
            Some(buf) => Slot::Staged(buf),
            None if again => Slot::Failed,
            None => Slot::Wanted { again: true },
        };
        if !is_staged {
            self.tails -= 1;
            self.has_lost |= again;
        }
        self.leave();
    }

    /// The segment that a read in flight is for.
    pub fn target(&mut self, ticket: u64) -> Option<Arc<Segment>> {
        let (data, slot) = self.slot_of(ticket)?;
        Some(data.reading.pieces[data.piece + slot].segment.clone())
    }

    /// Drops buffers that were read and not sent, for others that wait for one; they are read again. Returns how many.
    pub fn give_back(&mut self) -> usize {
        let count = self.all_data().map(|data| data.give_back(is_staged)).sum();
        self.tails -= count;
        count
    }

    /// Lets go of pages of RAM that were found and not sent, so that they may leave it; they are looked up again.
    pub fn give_back_memory(&mut self) {
        self.all_data().for_each(|data| _ = data.give_back(|slot| matches!(slot, Slot::Ram(_))));
    }

    /// The next READ whose octets are lost.
    pub fn poll_lost(&mut self) -> Option<Lost> {
        if !self.has_lost {
            return None;
        }
        let is_lost = |reply: &Reply| {
            reply.data.as_ref().is_some_and(|data| data.slots.iter().any(|slot| matches!(slot, Slot::Failed)))
        };
        if let Some(at) = self.reading.iter().position(is_lost) {
            let reply = self.reading.remove(at)?;
            return self.refuse(reply);
        }
        let Some(at) = self.leaving.iter().position(is_lost) else {
            self.has_lost = false;
            return None;
        };
        if self.leaving[at].sent == 0 {
            let reply = self.leaving.remove(at)?;
            return self.refuse(reply);
        }
        let data = self.leaving[at].data.as_ref()?;
        Some(Lost::Broken(data.reading.pinned.as_ref().map(|pinned| pinned.object().clone())))
    }

    fn refuse(&mut self, reply: Reply) -> Option<Lost> {
        let data = reply.data?;
        self.message_bytes -= reply.message.len();
        self.data_bytes -= data.left();
        // What is still on its way finds nobody when it comes.
        self.tails -= data.slots.iter().filter(|slot| is_staged(slot)).count();
        match data.reading.lost().encode(data.xid).parts() {
            [Part::Bytes(octets)] => self.message(octets),
            _ => unreachable!("an error has no data"),
        }
        Some(Lost::Refused(data.reading.pinned.as_ref().map(|pinned| pinned.object().clone())))
    }

    /// What can be sent now, from the front, at most [`GATHER_BYTES_MAX`] octets. Returns the octets.
    pub fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        let mut total = 0;
        let mut add = |octets: &'a [u8]| {
            let octets = &octets[..octets.len().min(GATHER_BYTES_MAX - total)];
            if !octets.is_empty() {
                slices.push(IoSlice::new(octets));
                total += octets.len();
            }
            total < GATHER_BYTES_MAX && slices.len() < SLICES_MAX
        };
        'replies: for Reply { message, sent, data } in &self.leaving {
            // Its first octets may have been given back meanwhile: as long as nothing has left it can be refused.
            let first = data.as_ref().and_then(|data| data.slots.front());
            if *sent == 0 && first.is_some_and(|slot| !slot.is_at_hand()) || !add(&message[*sent..]) {
                break;
            }
            let Some(data) = data else { continue };
            let mut skip = data.sent;
            for (slot, piece) in data.slots.iter().zip(&data.reading.pieces[data.piece..]) {
                let Some(octets) = octets_of(slot, piece) else { break 'replies };
                if !add(&octets[skip..]) {
                    break 'replies;
                }
                skip = 0;
            }
            if !add(&ROUNDUP[..data.roundup]) {
                break;
            }
        }
        total
    }

    /// The first `count` octets of what [`Output::gather`] gave were sent.
    pub fn handle_sent(&mut self, mut count: usize) {
        while count > 0 {
            let Some(Reply { message, sent, data }) = self.leaving.front_mut() else {
                panic!("more was sent than there is")
            };
            let of_message = count.min(message.len() - *sent);
            *sent += of_message;
            self.message_bytes -= of_message;
            count -= of_message;
            if let Some(data) = data {
                while count > 0 && !data.slots.is_empty() {
                    let len = data.reading.pieces[data.piece].len as usize;
                    let of_piece = count.min(len - data.sent);
                    data.sent += of_piece;
                    self.data_bytes -= of_piece as u64;
                    count -= of_piece;
                    if data.sent < len {
                        return;
                    }
                    self.tails -= usize::from(data.slots.pop_front().is_some_and(|slot| is_staged(&slot)));
                    data.piece += 1;
                    data.sent = 0;
                }
                let of_roundup = count.min(data.roundup);
                data.roundup -= of_roundup;
                count -= of_roundup;
                if !data.slots.is_empty() || data.roundup > 0 {
                    return;
                }
            }
            if *sent < message.len() {
                return;
            }
            self.leaving.pop_front();
        }
    }

    /// Gives memory back while there is nothing to send.
    pub fn rest(&mut self) {
        if self.is_empty() {
            self.leaving = VecDeque::new();
            self.reading = VecDeque::new();
        }
    }

    /// What each reply reads, in the order in which buffers are given.
    fn replies(&self) -> impl Iterator<Item = Option<&Data>> {
        self.leaving.iter().chain(&self.reading).map(|reply| reply.data.as_deref())
    }

    fn all_data(&mut self) -> impl Iterator<Item = &mut Data> {
        self.leaving.iter_mut().chain(&mut self.reading).filter_map(|reply| reply.data.as_deref_mut())
    }

    /// That of a reply by its place in [`Output::replies`].
    fn data_mut(&mut self, reply: usize) -> Option<&mut Data> {
        let leaving = self.leaving.len();
        let reply = match reply.checked_sub(leaving) {
            Some(at) => self.reading.get_mut(at),
            None => self.leaving.get_mut(reply),
        };
        reply?.data.as_deref_mut()
    }

    fn slot_of(&mut self, ticket: u64) -> Option<(&mut Data, usize)> {
        let is_for = |slot: &Slot| matches!(slot, Slot::Reading { ticket: at, .. } if *at == ticket);
        self.all_data().find_map(|data| {
            let slot = data.slots.iter().position(is_for)?;
            Some((data, slot))
        })
    }
}

/// A slot, by the place of its reply in [`Output::replies`].
struct Wanted {
    reply: usize,
    slot: usize,
    /// All before it are at hand.
    is_earliest: bool,
}

fn is_staged(slot: &Slot) -> bool {
    matches!(slot, Slot::Staged(_))
}

fn octets_of<'a>(slot: &'a Slot, piece: &'a Piece) -> Option<&'a [u8]> {
    match slot {
        Slot::Ram(ram) => Some(piece.octets(ram)),
        Slot::Staged(buf) => Some(&buf.as_slice()[piece.start as usize..(piece.start + piece.len) as usize]),
        _ => None,
    }
}
