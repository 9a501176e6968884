//! Whether to look once more before sleeping.
//!
//! A wake costs 10 to 16 us one way, a look less than one. Looking pays where the last wait was short: two ends that
//! answer each other find each other awake. Where it was not, the next wait begins asleep.
//!
//! Streams are waited for asleep where octets wake a sleeper, and awake where they do not
//! ([`Lane::wakes_for_writes`]).

use super::Lane;
use std::hint;
use std::thread;
use std::time::{Duration, Instant};

/// Waits up to this are spent looking, once one of them was. A peer that sleeps answers within it as well, so two ends
/// that both slept find out; whoever looks in vain loses no more than this.
const SPIN_MAX: Duration = Duration::from_micros(50);

/// While octets stream, and so long after, waits are slept: each wake then finds more of them, where looking finds them in
/// small pieces at a system call each. Where nothing wakes for them they are looked for as long: a look is no system call,
/// and a sleep is too short or too long.
const STREAM_REST: Duration = Duration::from_millis(1);

/// Looks that cost no system call, before whoever shares the processor has a turn.
const LOOKS_PER_YIELD: u32 = 8;

/// The memory of one waiting loop.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    wakes_for_writes: bool,
    /// Looks since the processor was given away.
    looks: u32,
    limit: Duration,
    /// When the wait under way began.
    since: Option<Instant>,
    streamed_at: Option<Instant>,
}

impl Spin {
    /// For whoever waits for `lane`.
    pub fn new(lane: &dyn Lane) -> Self {
        Self::with(lane.wakes_for_writes())
    }

    fn with(wakes_for_writes: bool) -> Self {
        Self { wakes_for_writes, looks: 0, limit: Duration::ZERO, since: None, streamed_at: None }
    }

    /// Nothing was found at `now`: look again? If so, whoever shares the processor has had a turn, at the latest after a
    /// few looks: it may be the peer.
    pub fn is_worth_it(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let is_streaming = self.streamed_at.is_some_and(|at| now.saturating_duration_since(at) < STREAM_REST);
        let is_worth_it = match is_streaming {
            true => !self.wakes_for_writes,
            false => now.saturating_duration_since(since) < self.limit,
        };
        if is_worth_it {
            self.looks += 1;
            if self.wakes_for_writes || self.looks.is_multiple_of(LOOKS_PER_YIELD) {
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
        is_worth_it
    }

    /// Many octets at once came at `now`.
    pub fn handle_stream(&mut self, now: Instant) {
        self.streamed_at = Some(now);
    }

    /// Something was found at `now`.
    pub fn handle_news(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            let waited = now.saturating_duration_since(since);
            self.limit = if waited <= SPIN_MAX { SPIN_MAX } else { Duration::ZERO };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_wait_makes_the_next_one_look_and_a_long_one_ends_that() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut spin = Spin::with(true);
        assert!(!spin.is_worth_it(at(0)), "the first wait begins asleep");
        spin.handle_news(at(30));
        assert!(spin.is_worth_it(at(40)));
        assert!(spin.is_worth_it(at(89)));
        assert!(!spin.is_worth_it(at(90)), "it was in vain");
        spin.handle_news(at(1_000));
        assert!(!spin.is_worth_it(at(1_010)));
        spin.handle_news(at(1_020));
        spin.handle_news(at(9_000));
        assert!(spin.is_worth_it(at(9_001)), "news without a wait say nothing about waits");
        spin.handle_news(at(9_002));
        spin.handle_stream(at(9_002));
        assert!(!spin.is_worth_it(at(9_003)), "a stream is slept for");
        spin.handle_news(at(9_040));
        assert!(!spin.is_worth_it(at(10_001)));
        spin.handle_news(at(10_010));
        assert!(spin.is_worth_it(at(10_011)));
    }

    #[test]
    fn a_stream_that_wakes_nobody_is_looked_for() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut spin = Spin::with(false);
        assert!(!spin.is_worth_it(at(0)));
        spin.handle_news(at(5_000));
        spin.handle_stream(at(5_000));
        assert!(spin.is_worth_it(at(5_001)) && spin.is_worth_it(at(5_999)), "however long the last wait was");
        assert!(!spin.is_worth_it(at(6_000)));
    }
}
