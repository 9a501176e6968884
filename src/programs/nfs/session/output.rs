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
use crate::programs::stream::TailRead;
use crate::programs::stream::pieces::{Gather, Slot, TailBuffers, Unsent};
use crate::store::object::Object;
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
    /// A slot for each piece that was not sent.
    unsent: Unsent,
    /// Octets of the roundup that were not.
    roundup: usize,
}

impl Data {
    /// That of a slot.
    fn segment(&self, slot: usize) -> &Arc<Segment> {
        &self.unsent.rest(&self.reading.pieces)[slot].segment
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
#[derive(Debug, Default)]
pub struct Output {
    leaving: VecDeque<Reply>,
    /// In the order of the calls.
    reading: VecDeque<Reply>,
    /// Octets of all messages, and of all data, that were not sent.
    message_bytes: usize,
    data_bytes: u64,
    tails: TailBuffers,
    /// There are failed slots.
    has_lost: bool,
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
        let unsent = Unsent::wanted(reading.pieces.len());
        let data = Data { xid, reading, unsent, roundup };
        self.reading.push_back(Reply { message, sent: 0, data: Some(Box::new(data)) });
        self.find();
    }

    pub fn has_tail_reads(&self) -> bool {
        !self.tails.is_empty()
    }

    pub fn set_tail_reads(&mut self, count: usize) {
        self.tails.set_count_max(count);
    }

    /// Looks for what is in RAM.
    fn find(&mut self) {
        let mut has_lost = false;
        for data in self.all_data() {
            let rest = data.unsent.rest(&data.reading.pieces);
            for (slot, piece) in data.unsent.slots.iter_mut().zip(rest) {
                slot.look_for(&piece.segment);
                has_lost |= slot.is_failed();
            }
        }
        self.has_lost |= has_lost;
        self.leave();
    }

    /// What is whole leaves.
    fn leave(&mut self) {
        let mut at = 0;
        while let Some(reply) = self.reading.get(at) {
            if reply.data.as_ref().is_none_or(|data| data.unsent.are_at_hand()) {
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
        if !self.tails.has_room(wanted.is_earliest) {
            if !wanted.is_earliest || !self.make_way(&wanted) {
                return None;
            }
            wanted = self.first_wanted()?;
        }
        let data = self.data_mut(wanted.reply)?;
        let segment = data.segment(wanted.slot).clone();
        let Content::Disk { extent, crcs } = segment.content() else { return None };
        let ticket = self.tails.take();
        self.data_mut(wanted.reply)?.unsent.slots[wanted.slot].begin_read(ticket);
        Some(TailRead { ticket, segment, extent, crcs })
    }

    /// The first slot that nothing is on its way for.
    fn first_wanted(&self) -> Option<Wanted> {
        let mut is_earliest = true;
        for (reply, data) in self.replies().enumerate() {
            for (slot, state) in data.iter().flat_map(|data| data.unsent.slots.iter().enumerate()) {
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
            if data.unsent.give_last_back(first) {
                self.tails.give_back(1);
                return true;
            }
        }
        self.begin_earliest();
        false
    }

    /// The earliest READ leaves before it is whole, if it can begin: its buffers come free only so.
    fn begin_earliest(&mut self) -> bool {
        let earliest = self.reading.front().and_then(|reply| reply.data.as_ref());
        let can_begin = earliest.is_some_and(|data| data.unsent.is_front_at_hand());
        if can_begin {
            self.leaving.extend(self.reading.pop_front());
        }
        can_begin
    }

    /// A read that [`Output::poll_read`] gave was not started, for want of a buffer. Nobody keeps buffers while waiting for one:
    /// what is behind the earliest READ gives them back, and that one leaves with those that it has.
    pub fn read_back(&mut self, ticket: u64) {
        self.tails.give_back(1);
        if let Some((data, slot)) = self.slot_of(ticket) {
            data.unsent.slots[slot].read_back();
        }
        self.begin_earliest();
        let reading = self.reading.iter_mut().filter_map(|reply| reply.data.as_mut());
        self.tails.give_back(reading.map(|data| data.unsent.give_back(Slot::is_staged)).sum());
    }

    /// A read ended; `None` if it failed, and then it is tried once more.
    pub fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) {
        let Some((data, slot)) = self.slot_of(ticket) else {
            return self.tails.give_back(1);
        };
        let slot = &mut data.unsent.slots[slot];
        slot.handle_read(buf);
        let (is_staged, is_failed) = (slot.is_staged(), slot.is_failed());
        self.tails.give_back(usize::from(!is_staged));
        self.has_lost |= is_failed;
        self.leave();
    }

    /// The segment that a read in flight is for.
    pub fn target(&mut self, ticket: u64) -> Option<Arc<Segment>> {
        let (data, slot) = self.slot_of(ticket)?;
        Some(data.segment(slot).clone())
    }

    /// Drops buffers that were read and not sent, for others that wait for one; they are read again. Returns how many.
    pub fn give_back(&mut self) -> usize {
        let count = self.all_data().map(|data| data.unsent.give_back(Slot::is_staged)).sum();
        self.tails.give_back(count);
        count
    }

    /// Lets go of pages of RAM that were found and not sent, so that they may leave it; they are looked up again.
    pub fn give_back_memory(&mut self) {
        self.all_data().for_each(|data| _ = data.unsent.give_back(Slot::is_in_ram));
    }

    /// The next READ whose octets are lost.
    pub fn poll_lost(&mut self) -> Option<Lost> {
        if !self.has_lost {
            return None;
        }
        let is_lost =
            |reply: &Reply| reply.data.as_ref().is_some_and(|data| data.unsent.slots.iter().any(Slot::is_failed));
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
        self.data_bytes -= data.unsent.bytes_left(&data.reading.pieces);
        // What is still on its way finds nobody when it comes.
        self.tails.give_back(data.unsent.slots.iter().filter(|slot| slot.is_staged()).count());
        match data.reading.lost().encode(data.xid).parts() {
            [Part::Bytes(octets)] => self.message(octets),
            _ => unreachable!("an error has no data"),
        }
        Some(Lost::Refused(data.reading.pinned.as_ref().map(|pinned| pinned.object().clone())))
    }

    /// What can be sent now, from the front, as much as a [`Gather`] takes. Returns the octets.
    pub fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        let mut gather = Gather::new(slices);
        for Reply { message, sent, data } in &self.leaving {
            // Its first octets may have been given back meanwhile: as long as nothing has left it can be refused.
            let first = data.as_ref().and_then(|data| data.unsent.slots.front());
            if *sent == 0 && first.is_some_and(|slot| !slot.is_at_hand()) || !gather.add(&message[*sent..]) {
                break;
            }
            let Some(data) = data else { continue };
            if !data.unsent.gather(&data.reading.pieces, &mut gather) || !gather.add(&ROUNDUP[..data.roundup]) {
                break;
            }
        }
        gather.bytes()
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
                let of_pieces = data.unsent.handle_sent(&data.reading.pieces, count);
                self.data_bytes -= of_pieces.bytes as u64;
                self.tails.give_back(of_pieces.buffers);
                count -= of_pieces.bytes;
                let of_roundup = count.min(data.roundup);
                data.roundup -= of_roundup;
                count -= of_roundup;
                if !data.unsent.slots.is_empty() || data.roundup > 0 {
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
        self.all_data().find_map(|data| {
            let slot = data.unsent.position(ticket)?;
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
