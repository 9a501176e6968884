//! The one way in: the own ring and the own windows, as what they bring.

use super::descriptor::{Negotiated, RingGeometry, WindowGeometry};
use super::egress::InlineText;
use super::poison::Poison;
use super::record::Record;
use super::ring::{ControlRing, RingMemory};
use super::window::{Releases, RxLease, RxWindows};
use crate::wire::seq::BulkSequence;

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
