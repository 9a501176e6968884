//! Slots of the peer's control ring: how many are free, and when to look at its counter.
//!
//! A slot is free again once the peer has counted its record as consumed. The peer does not tell: its counter is read by
//! RDMA Read, one at a time, into [`READBACK_OFFSET`](super::ring::READBACK_OFFSET).
//!
//! ```text
//!            want, few slots free              handle_read: more consumed
//!   Idle ---------------------------> Reading ----------------------------> Idle
//!     ^                                 |
//!     |   time, or an inbound record    | handle_read: the same as before
//!     +--------- Resting <--------------+ 10 us, doubling to 1 ms
//! ```

use super::poison::Poison;
use crate::wire::seq::ControlSequence;
use std::time::Duration;

/// Rest after the first Read that brought nothing new.
pub const REST_MIN: Duration = Duration::from_micros(10);
/// Longest rest between two Reads.
pub const REST_MAX: Duration = Duration::from_millis(1);

/// What a slot is wanted for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Purpose {
    /// INLINE or READY: never the last free slot.
    Stream,
    /// RELEASE: any slot. One is kept for it, or two full rings would wait for each other.
    Release,
}

/// The sender's account of the peer's ring. Times are since any fixed moment.
#[derive(Debug)]
pub struct Credits {
    slot_count: u32,
    /// `None` once the last sequence was taken.
    next: Option<ControlSequence>,
    consumed: u64,
    reading: bool,
    rest: Duration,
    resting_until: Option<Duration>,
}

impl Credits {
    /// A ring of `slot_count` slots, at least 2, with nothing in it.
    pub fn new(slot_count: u32) -> Self {
        Self::resumed(slot_count, ControlSequence::FIRST)
    }

    /// A ring whose records before `next` were all consumed.
    pub fn resumed(slot_count: u32, next: ControlSequence) -> Self {
        let consumed = next.get() - 1;
        Self { slot_count, next: Some(next), consumed, reading: false, rest: REST_MIN, resting_until: None }
    }

    /// Slots of the ring.
    pub fn slot_count(&self) -> u32 {
        self.slot_count
    }

    /// Records sent so far.
    pub fn sent(&self) -> u64 {
        self.next.map_or(ControlSequence::LAST.get(), |next| next.get() - 1)
    }

    /// Slots known to be free.
    pub fn free(&self) -> u32 {
        self.slot_count - (self.sent() - self.consumed) as u32
    }

    /// A slot can be had for this.
    pub fn is_free(&self, purpose: Purpose) -> bool {
        self.free() > u32::from(purpose == Purpose::Stream)
    }

    /// Takes the next slot, which [`Credits::is_free`].
    ///
    /// # Errors
    /// [`Poison::ControlExhausted`].
    pub fn take(&mut self) -> Result<ControlSequence, Poison> {
        assert!(self.free() > 0, "a slot is taken when one is free");
        let taken = self.next.ok_or(Poison::ControlExhausted)?;
        self.next = taken.next();
        Ok(taken)
    }

    /// Whether a Read of the peer's counter should be posted now. Says yes once; [`Credits::handle_read`] must follow.
    /// Call it while something waits for a slot, or to look ahead while few are free.
    pub fn poll_read(&mut self, now: Duration) -> bool {
        if self.reading || self.resting_until.is_some_and(|until| now < until) || self.sent() == self.consumed {
            return false;
        }
        self.reading = true;
        true
    }

    /// So few slots are free that looking ahead saves a wait.
    pub fn is_low(&self) -> bool {
        self.free() <= self.slot_count / 4
    }

    /// What the Read brought.
    ///
    /// # Errors
    /// [`Poison`]: a count that went back, or ran ahead of what was sent.
    pub fn handle_read(&mut self, consumed: u64, now: Duration) -> Result<(), Poison> {
        self.reading = false;
        if consumed < self.consumed {
            return Err(Poison::CreditRegression { found: consumed, last: self.consumed });
        }
        if consumed > self.sent() {
            return Err(Poison::CreditAhead { found: consumed, sent: self.sent() });
        }
        if consumed == self.consumed {
            self.resting_until = Some(now + self.rest);
            self.rest = (self.rest * 2).min(REST_MAX);
        } else {
            self.consumed = consumed;
            self.handle_record();
        }
        Ok(())
    }

    /// The peer sent a record: it is awake, and the next Read need not rest.
    pub fn handle_record(&mut self) {
        self.rest = REST_MIN;
        self.resting_until = None;
    }

    /// When [`Credits::poll_read`] will say yes, if only time is missing.
    pub fn deadline(&self) -> Option<Duration> {
        self.resting_until.filter(|_| !self.reading)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(5);

    fn full(slot_count: u32) -> Credits {
        let mut credits = Credits::new(slot_count);
        while credits.is_free(Purpose::Release) {
            credits.take().unwrap();
        }
        credits
    }

    #[test]
    fn the_last_slot_is_kept_for_a_release() {
        let mut credits = Credits::new(2);
        assert!(credits.is_free(Purpose::Stream));
        credits.take().unwrap();
        assert!(!credits.is_free(Purpose::Stream));
        assert!(credits.is_free(Purpose::Release));
        credits.take().unwrap();
        assert!(!credits.is_free(Purpose::Release));
    }

    #[test]
    fn one_read_is_in_flight_and_idle_ones_rest_longer_and_longer() {
        let mut credits = full(4);
        let mut now = START;
        for rest_us in [10, 20, 40, 80, 160, 320, 640, 1000, 1000] {
            assert!(credits.poll_read(now));
            assert!(!credits.poll_read(now), "one in flight");
            credits.handle_read(0, now).unwrap();
            let until = now + Duration::from_micros(rest_us);
            assert_eq!(credits.deadline(), Some(until));
            assert!(!credits.poll_read(until - Duration::from_nanos(1)));
            now = until;
        }
        credits.handle_record();
        assert!(credits.poll_read(now), "an inbound record ends the rest");
        credits.handle_read(0, now).unwrap();
        assert_eq!(credits.deadline(), Some(now + REST_MIN), "and starts it over");
    }

    #[test]
    fn nothing_is_read_while_nothing_is_in_the_ring() {
        let mut credits = Credits::new(4);
        assert!(!credits.poll_read(START));
        credits.take().unwrap();
        assert!(credits.poll_read(START));
        credits.handle_read(1, START).unwrap();
        assert!(!credits.poll_read(START));
    }

    #[test]
    fn counters_that_go_back_or_run_ahead_are_poison() {
        let mut credits = full(4);
        credits.handle_read(3, START).unwrap();
        assert_eq!(credits.free(), 3);
        assert_eq!(credits.handle_read(2, START), Err(Poison::CreditRegression { found: 2, last: 3 }));
        assert_eq!(credits.handle_read(5, START), Err(Poison::CreditAhead { found: 5, sent: 4 }));
        assert_eq!(credits.handle_read(u64::MAX, START), Err(Poison::CreditAhead { found: u64::MAX, sent: 4 }));
        credits.handle_read(4, START).unwrap();
        assert_eq!(credits.free(), 4);
    }

    #[test]
    fn the_sequence_ends_and_does_not_wrap() {
        let mut credits = Credits::resumed(2, ControlSequence::LAST);
        assert_eq!(credits.take(), Ok(ControlSequence::LAST));
        assert_eq!(credits.take(), Err(Poison::ControlExhausted));
        credits.handle_read(ControlSequence::LAST.get(), START).unwrap();
        assert_eq!(credits.free(), 2);
        assert_eq!(credits.take(), Err(Poison::ControlExhausted));
    }
}
