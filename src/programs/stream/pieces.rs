//! Pieces on their way to a peer: looked for in RAM, read from disk where they are not, sent from where they lie.
//!
//! ```text
//!  pieces   | sent | front, some octets of it sent | in RAM | read from disk | being read | not looked for yet |
//!                  +------------------- slots --------------------------------------------+
//! ```
//! [`Unsent`] has a slot for each of the next pieces of one value; [`TailBuffers`] counts the buffers that all slots of one
//! connection have; [`Gather`] is what leaves in one call. The pieces themselves are the owner's.

use super::{GATHER_BYTES_MAX, SLICES_MAX, TAIL_READS, TAIL_READS_MAX};
use crate::fabric::region::Block;
use crate::fabric::staging::StagingBuf;
use crate::store::object::Piece;
use crate::store::pool::ExtentId;
use crate::store::segment::{Content, Crcs, Segment};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::Arc;

/// Where the octets of one piece are that is to be sent.
#[derive(Debug)]
pub enum Slot {
    Ram(Arc<Block>),
    Staged(StagingBuf),
    /// Its octets are being read: for the second time, if the first failed.
    Reading {
        ticket: u64,
        again: bool,
    },
    Wanted {
        again: bool,
    },
    Failed,
}

impl Slot {
    /// Its octets can be sent.
    pub fn is_at_hand(&self) -> bool {
        matches!(self, Self::Ram(_) | Self::Staged(_))
    }

    pub fn is_in_ram(&self) -> bool {
        matches!(self, Self::Ram(_))
    }

    /// It has a buffer that is filled.
    pub fn is_staged(&self) -> bool {
        matches!(self, Self::Staged(_))
    }

    pub fn is_failed(&self) -> bool {
        matches!(self, Self::Failed)
    }

    /// Looks for wanted octets: takes those that are in RAM, and says where to read those that are on disk.
    pub fn look_for(&mut self, segment: &Segment) -> Option<(ExtentId, Crcs)> {
        if let Self::Wanted { .. } = self {
            match segment.content() {
                Content::Ram(ram) => *self = Self::Ram(ram),
                Content::Lost => *self = Self::Failed,
                Content::Disk { extent, crcs } => return Some((extent, crcs)),
            }
        }
        None
    }

    /// The read of wanted octets starts.
    pub fn begin_read(&mut self, ticket: u64) {
        *self = Self::Reading { ticket, again: matches!(self, Self::Wanted { again: true }) };
    }

    /// The read did not start.
    pub fn read_back(&mut self) {
        if let Self::Reading { again, .. } = *self {
            *self = Self::Wanted { again };
        }
    }

    /// The read ended; `None` if it failed, and then it is tried once more.
    pub fn handle_read(&mut self, buf: Option<StagingBuf>) {
        *self = match buf {
            Some(buf) => Self::Staged(buf),
            None if matches!(self, Self::Reading { again: true, .. }) => Self::Failed,
            None => Self::Wanted { again: true },
        };
    }

    fn octets<'a>(&'a self, piece: &'a Piece) -> Option<&'a [u8]> {
        match self {
            Self::Ram(ram) => Some(piece.octets(ram)),
            Self::Staged(buf) => Some(&buf.as_slice()[piece.start as usize..(piece.start + piece.len) as usize]),
            _ => None,
        }
    }
}

/// What of one value was not sent: the slots of its pieces from the front on, and how far the front was. Every call that
/// takes pieces takes the same ones.
#[derive(Debug, Default)]
pub struct Unsent {
    pub slots: VecDeque<Slot>,
    /// The piece of the front slot.
    front: usize,
    /// Octets of it that were sent.
    sent: usize,
}

/// What [`Unsent::handle_sent`] came to.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    /// Octets of the pieces.
    pub bytes: usize,
    /// Buffers that came free.
    pub buffers: usize,
}

impl Unsent {
    /// A slot for each of so many pieces.
    pub fn wanted(count: usize) -> Self {
        Self { slots: (0..count).map(|_| Slot::Wanted { again: false }).collect(), ..Self::default() }
    }

    /// The pieces that were not sent to their ends; the first slots are theirs.
    pub fn rest<'a>(&self, pieces: &'a [Piece]) -> &'a [Piece] {
        &pieces[self.front..]
    }

    /// Octets that were not sent.
    pub fn bytes_left(&self, pieces: &[Piece]) -> u64 {
        self.rest(pieces).iter().map(|piece| u64::from(piece.len)).sum::<u64>() - self.sent as u64
    }

    /// All octets that have slots can be sent.
    pub fn are_at_hand(&self) -> bool {
        self.slots.iter().all(Slot::is_at_hand)
    }

    /// The next octets can be sent.
    pub fn is_front_at_hand(&self) -> bool {
        self.slots.front().is_some_and(Slot::is_at_hand)
    }

    /// Where the read in flight goes.
    pub fn position(&self, ticket: u64) -> Option<usize> {
        self.slots.iter().position(|slot| matches!(slot, Slot::Reading { ticket: at, .. } if *at == ticket))
    }

    /// Wants the slots again that `is_given_back` says. Returns how many.
    pub fn give_back(&mut self, is_given_back: impl Fn(&Slot) -> bool) -> usize {
        let slots = self.slots.iter_mut().filter(|slot| is_given_back(slot));
        slots.map(|slot| *slot = Slot::Wanted { again: false }).count()
    }

    /// Gives the buffer back that is the last, and at `first` or behind. `false` if there is none.
    pub fn give_last_back(&mut self, first: usize) -> bool {
        let last = self.slots.iter_mut().skip(first).rfind(|slot| slot.is_staged());
        last.map(|slot| *slot = Slot::Wanted { again: false }).is_some()
    }

    /// Adds what can be sent. `false` if nothing behind it can.
    pub fn gather<'a>(&'a self, pieces: &'a [Piece], gather: &mut Gather<'a, '_>) -> bool {
        let rest = self.rest(pieces);
        let mut skip = self.sent;
        for (slot, piece) in self.slots.iter().zip(rest) {
            let Some(octets) = slot.octets(piece) else { return false };
            if !gather.add(&octets[skip..]) {
                return false;
            }
            skip = 0;
        }
        self.slots.len() == rest.len()
    }

    /// `count` octets were sent, these first.
    pub fn handle_sent(&mut self, pieces: &[Piece], count: usize) -> Sent {
        let (mut left, mut buffers) = (count, 0);
        while left > 0 && self.front < pieces.len() {
            let len = pieces[self.front].len as usize;
            let taken = left.min(len - self.sent);
            self.sent += taken;
            left -= taken;
            if self.sent < len {
                break;
            }
            buffers += usize::from(self.slots.pop_front().is_some_and(|slot| slot.is_staged()));
            self.front += 1;
            self.sent = 0;
        }
        Sent { bytes: count - left, buffers }
    }
}

/// Buffers of one connection's disk reads, filled or on their way.
#[derive(Debug)]
pub struct TailBuffers {
    count: usize,
    count_max: usize,
    next_ticket: u64,
}

impl Default for TailBuffers {
    fn default() -> Self {
        Self { count: 0, count_max: TAIL_READS, next_ticket: 0 }
    }
}

impl TailBuffers {
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub fn count_max(&self) -> usize {
        self.count_max
    }

    /// [`TAIL_READS`] to [`TAIL_READS_MAX`].
    pub fn set_count_max(&mut self, count: usize) {
        self.count_max = count.clamp(TAIL_READS, TAIL_READS_MAX);
    }

    /// Whether one is left. The last is for the earliest piece that is not at hand, so reads ahead cannot starve the front.
    pub fn has_room(&self, is_earliest: bool) -> bool {
        self.count + usize::from(!is_earliest) < self.count_max
    }

    /// Takes one for a read. Returns the ticket of that.
    pub fn take(&mut self) -> u64 {
        self.count += 1;
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    pub fn give_back(&mut self, count: usize) {
        self.count -= count;
    }
}

/// What one call sends, [`GATHER_BYTES_MAX`] octets in [`SLICES_MAX`] slices at most.
#[derive(Debug)]
pub struct Gather<'a, 'b> {
    slices: &'b mut Vec<IoSlice<'a>>,
    bytes: usize,
}

impl<'a, 'b> Gather<'a, 'b> {
    pub fn new(slices: &'b mut Vec<IoSlice<'a>>) -> Self {
        Self { slices, bytes: 0 }
    }

    /// Octets that were added.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds as many as there is room for. `false` if there is none behind them.
    pub fn add(&mut self, octets: &'a [u8]) -> bool {
        let octets = &octets[..octets.len().min(GATHER_BYTES_MAX - self.bytes)];
        if !octets.is_empty() {
            self.slices.push(IoSlice::new(octets));
            self.bytes += octets.len();
        }
        self.bytes < GATHER_BYTES_MAX && self.slices.len() < SLICES_MAX
    }
}
