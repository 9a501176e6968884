//! The life of a connection as its server sees it: how far ahead it may work, and when and why it ends.
//!
//! ```text
//!            quit, drained                 nothing left to place          all has reached the peer
//!   Open -------------------> Ending ---------------------------> Finishing ------------------------> Over
//!     |                          |                                    |                                ^
//!     +--------------------------+------------------------------------+--- end: poison, stall, ... ----+
//! ```

use super::endpoint::EndCause;
use super::intake::StopWatch;
use std::time::Duration;

/// Bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Places taken and not posted.
    pub places_max: usize,
    /// How long something may stand still that the peer must move.
    pub stall_timeout: Duration,
    /// How long nothing may be asked at all.
    pub idle_timeout: Option<Duration>,
}

/// How much may be decided before it can be sent. Beyond it, no request is executed.
#[derive(Clone, Copy, Debug)]
pub struct LookAhead {
    /// Octets of text without a place.
    pub text_bytes_max: usize,
    /// Values that are not wholly in slots: more are of no use, the slots are full before.
    pub pins_max: usize,
}

impl LookAhead {
    /// Nothing more should be executed until some has left. `pins_max` is what others allow.
    pub fn is_full(&self, text_bytes: usize, pins: usize, pins_max: usize) -> bool {
        text_bytes >= self.text_bytes_max || pins >= pins_max.min(self.pins_max)
    }
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Over {
    /// The peer asked for it.
    Quit,
    LineTooLong,
    End(EndCause),
    /// The fabric reported the end of the queue pair, and this cause.
    Fabric(&'static str),
    /// The peer has not moved what it had to.
    Stalled,
    /// The peer asked for nothing.
    Idle,
    Shutdown,
}

impl Over {
    /// One word for counting.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Quit => "quit",
            Self::LineTooLong => "line_too_long",
            Self::End(end) => end.cause(),
            Self::Fabric(cause) => cause,
            Self::Stalled => "stalled",
            Self::Idle => "idle",
            Self::Shutdown => "shutdown",
        }
    }
}

/// What the owner sees of the work at hand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Something of an answer has no place.
    pub is_placing: bool,
    /// A value is arriving.
    pub is_storing: bool,
    /// Octets of the peer are due: of that value, or of one that nobody wants.
    pub is_receiving: bool,
    /// Something else than the peer has to move first.
    pub is_waiting: bool,
    /// Keys are still to be looked up.
    pub is_retrieving: bool,
    /// When the peer last moved an octet.
    pub moved: Duration,
    /// Octets of its text that were read.
    pub read: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    Open,
    Ending(Over),
    Finishing(Over),
    Over,
}

/// The machine of one connection.
#[derive(Debug)]
pub struct Session {
    limits: Limits,
    /// Places that can be taken.
    room: usize,
    stopped: StopWatch,
    stage: Stage,
    is_draining: bool,
}

impl Session {
    /// Before the first record.
    pub fn new(limits: Limits) -> Self {
        let room = limits.places_max;
        Self { limits, room, stopped: StopWatch::default(), stage: Stage::Open, is_draining: false }
    }

    /// A place can be taken.
    pub fn has_room(&self) -> bool {
        self.room > 0
    }

    /// A place was taken.
    ///
    /// # Panics
    /// If there was no room for it.
    pub fn handle_place(&mut self) {
        assert!(self.room > 0, "more than {} places", self.limits.places_max);
        self.room -= 1;
    }

    /// So many places have left, or are gone.
    pub fn handle_posted(&mut self, count: usize) {
        self.room += count;
        assert!(self.room <= self.limits.places_max, "{} places of {}", self.room, self.limits.places_max);
    }

    /// A record came.
    pub fn handle_arrival(&mut self) {
        self.stopped.handle_arrival();
    }

    /// The own ring is stopped; `read` octets of text were read.
    pub fn handle_stopped(&mut self, now: Duration, read: u64) {
        self.stopped.handle_stopped(now, read);
    }

    /// No further request is executed; what was decided is sent, then the connection ends as `over` says.
    pub fn handle_ending(&mut self, over: Over) {
        if self.stage == Stage::Open {
            self.stage = Stage::Ending(over);
        }
    }

    /// It ends as soon as nothing is under way.
    pub fn handle_drain(&mut self) {
        self.is_draining = true;
    }

    /// Requests are executed.
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Nothing is done any more.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Something of an answer has not left.
    fn is_sending(&self, load: &Load) -> bool {
        load.is_placing || self.room < self.limits.places_max
    }

    fn is_busy(&self, load: &Load) -> bool {
        self.is_sending(load) || load.is_storing || load.is_retrieving
    }

    /// Once, when the last place was taken: say when all of it has reached the peer, by [`Session::handle_finished`].
    pub fn poll_finish(&mut self, load: &Load) -> bool {
        if self.is_draining && !self.is_busy(load) {
            self.handle_ending(Over::Shutdown);
        }
        match self.stage {
            Stage::Ending(over) if !load.is_placing => {
                self.stage = Stage::Finishing(over);
                true
            }
            _ => false,
        }
    }

    /// All that was sent has reached the peer. Why the connection ends now.
    pub fn handle_finished(&self) -> Over {
        match self.stage {
            Stage::Ending(over) | Stage::Finishing(over) => over,
            Stage::Open | Stage::Over => Over::Shutdown,
        }
    }

    /// The connection is over. False if it was before.
    pub fn end(&mut self) -> bool {
        std::mem::replace(&mut self.stage, Stage::Over) != Stage::Over
    }

    /// Looks at the time: why the connection must end, if it must.
    pub fn handle_tick(&mut self, now: Duration, load: &Load) -> Option<Over> {
        if self.is_over() {
            return None;
        }
        let Limits { stall_timeout, idle_timeout, .. } = self.limits;
        if let Err(cause) = self.stopped.check(now, load.read, stall_timeout) {
            return Some(Over::End(cause));
        }
        let rested = now.saturating_sub(load.moved);
        let is_its_turn = self.is_sending(load) || load.is_receiving && !load.is_waiting;
        if rested > stall_timeout && is_its_turn {
            return Some(Over::Stalled);
        }
        let is_idle = idle_timeout.is_some_and(|timeout| rested > timeout) && !self.is_busy(load);
        is_idle.then_some(Over::Idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn session(idle_timeout: Option<Duration>) -> Session {
        Session::new(Limits { places_max: 2, stall_timeout: 3 * SECOND, idle_timeout })
    }

    const NOTHING: Load = Load {
        is_placing: false,
        is_storing: false,
        is_receiving: false,
        is_waiting: false,
        is_retrieving: false,
        moved: Duration::ZERO,
        read: 0,
    };

    #[test]
    fn places_are_bounded_and_come_back() {
        let mut session = session(None);
        session.handle_place();
        assert!(session.has_room());
        session.handle_place();
        assert!(!session.has_room());
        session.handle_posted(2);
        assert!(session.has_room());
    }

    #[test]
    fn how_far_ahead_is_decided_by_this_table() {
        let ahead = LookAhead { text_bytes_max: 100, pins_max: 5 };
        let table = [
            // text, pins, pins allowed by others
            (99, 4, 64, false),
            (100, 0, 64, true),
            (0, 5, 64, true),
            (0, 4, 4, true),
            (0, 3, 4, false),
        ];
        for (text_bytes, pins, pins_max, expected) in table {
            assert_eq!(ahead.is_full(text_bytes, pins, pins_max), expected, "{text_bytes} {pins} {pins_max}");
        }
    }

    /// Each stage against each event.
    #[test]
    fn the_end_comes_by_this_table() {
        let placing = Load { is_placing: true, ..NOTHING };
        let (open, ending, finishing, over) =
            (Stage::Open, Stage::Ending(Over::Quit), Stage::Finishing(Over::Quit), Stage::Over);
        // stage, event, whether it says to finish, stage afterwards
        type Event = fn(&mut Session, &Load) -> bool;
        let quit: Event = |session, _| {
            session.handle_ending(Over::Quit);
            false
        };
        let long_line: Event = |session, _| {
            session.handle_ending(Over::LineTooLong);
            false
        };
        let poll: Event = |session, load| session.poll_finish(load);
        let drain: Event = |session, load| {
            session.handle_drain();
            session.poll_finish(load)
        };
        let end: Event = |session, _| session.end();
        let table: [(Stage, Event, Load, bool, Stage); 17] = [
            (open, quit, NOTHING, false, ending),
            (open, poll, NOTHING, false, open),
            (open, drain, NOTHING, true, Stage::Finishing(Over::Shutdown)),
            (open, drain, placing, false, open),
            (open, drain, Load { is_storing: true, ..NOTHING }, false, open),
            (open, drain, Load { is_retrieving: true, ..NOTHING }, false, open),
            (open, end, NOTHING, true, over),
            (ending, long_line, NOTHING, false, ending),
            (ending, poll, placing, false, ending),
            (ending, poll, NOTHING, true, finishing),
            (ending, drain, placing, false, ending),
            (ending, end, placing, true, over),
            (finishing, quit, NOTHING, false, finishing),
            (finishing, poll, NOTHING, false, finishing),
            (finishing, end, NOTHING, true, over),
            (over, drain, NOTHING, false, over),
            (over, end, NOTHING, false, over),
        ];
        for (index, (stage, event, load, said, expected)) in table.into_iter().enumerate() {
            let mut session = session(None);
            session.stage = stage;
            assert_eq!((event(&mut session, &load), session.stage), (said, expected), "row {index}");
        }
        let mut draining = session(None);
        draining.handle_place();
        draining.handle_drain();
        assert!(!draining.poll_finish(&NOTHING), "a place has not left");
        draining.handle_posted(1);
        assert!(draining.poll_finish(&NOTHING));
        assert_eq!(draining.handle_finished(), Over::Shutdown);
    }

    /// Whose turn it is, against how long nothing moved. Nobody is thrown out for what others owe.
    #[test]
    fn the_time_is_judged_by_this_table() {
        let (stalled, idle) = (Some(Over::Stalled), Some(Over::Idle));
        let body = Load { is_storing: true, is_receiving: true, ..NOTHING };
        // load, places taken, after 3 s, after 4 s, after 10 s, where idle is 9 s
        let table = [
            (NOTHING, 0, None, None, idle),
            (NOTHING, 1, None, stalled, stalled),
            (Load { is_placing: true, ..NOTHING }, 0, None, stalled, stalled),
            (body, 0, None, stalled, stalled),
            (Load { is_waiting: true, ..body }, 0, None, None, None),
            (Load { is_receiving: true, ..NOTHING }, 0, None, stalled, stalled),
            (Load { is_retrieving: true, is_waiting: true, ..NOTHING }, 0, None, None, None),
            (Load { moved: 4 * SECOND, ..body }, 0, None, None, stalled),
            (Load { moved: 4 * SECOND, ..NOTHING }, 0, None, None, None),
        ];
        for (load, places, three, four, ten) in table {
            for (at, expected) in [(3, three), (4, four), (10, ten)] {
                let mut session = session(Some(9 * SECOND));
                (0..places).for_each(|_| session.handle_place());
                assert_eq!(session.handle_tick(at * SECOND, &load), expected, "{load:?} at {at} s");
            }
        }
        let mut patient = session(None);
        assert_eq!(patient.handle_tick(1000 * SECOND, &NOTHING), None);
        patient.handle_stopped(1000 * SECOND, 0);
        let waiting = Load { is_waiting: true, moved: 1000 * SECOND, ..body };
        assert_eq!(patient.handle_tick(1002 * SECOND, &waiting), None);
        assert_eq!(patient.handle_tick(1003 * SECOND, &waiting), Some(Over::End(EndCause::PipelineTooDeep)));
        patient.end();
        assert_eq!(patient.handle_tick(2000 * SECOND, &waiting), None);
    }
}
