//! The life of a connection as its responder sees it: when and why it ends.

use std::time::Duration;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    /// How long something may stand still that the peer must move.
    pub stall_timeout: Duration,
    /// How long nothing may be asked at all.
    pub idle_timeout: Option<Duration>,
}

/// What the owner sees of the work at hand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// A call has no answer, or that has not left.
    pub is_serving: bool,
    /// Requests were posted, or wait to be: the peer has to move for them to complete.
    pub is_posting: bool,
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Over {
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
    pub const fn cause(self) -> &'static str {
        match self {
            Self::Fabric(cause) => cause,
            Self::Stalled => "stalled",
            Self::Idle => "idle",
            Self::Shutdown => "shutdown",
        }
    }
}

/// The machine of one connection.
#[derive(Debug)]
pub struct Session {
    timers: Timers,
    /// When the peer was last heard of.
    heard: Duration,
    /// When it last moved what it had to, or was first asked to.
    moved: Duration,
    is_posting: bool,
    is_draining: bool,
    is_over: bool,
}

impl Session {
    /// Connected at `now`.
    pub const fn new(timers: Timers, now: Duration) -> Self {
        Self { timers, heard: now, moved: now, is_posting: false, is_draining: false, is_over: false }
    }

    /// A message came: whoever talks is not idle, and may still leave lie what it has to move.
    pub const fn handle_heard(&mut self, now: Duration) {
        self.heard = now;
    }

    /// A request completed.
    pub const fn handle_moved(&mut self, now: Duration) {
        self.heard = now;
        self.moved = now;
    }

    /// It ends as soon as nothing is under way.
    pub const fn handle_drain(&mut self) {
        self.is_draining = true;
    }

    /// Nothing is done any more.
    pub const fn is_over(&self) -> bool {
        self.is_over
    }

    /// The connection is over. False if it was before.
    pub const fn end(&mut self) -> bool {
        !std::mem::replace(&mut self.is_over, true)
    }

    /// This is left to do after a turn. Why the connection can end now, if it is to.
    pub const fn poll_over(&mut self, now: Duration, load: &Load) -> Option<Over> {
        // What store or disk took their time for is posted only now.
        if load.is_posting && !self.is_posting {
            self.moved = now;
        }
        self.is_posting = load.is_posting;
        if self.is_draining && !self.is_over && !load.is_serving && !load.is_posting {
            return Some(Over::Shutdown);
        }
        None
    }

    /// Looks at the time: why the connection must end, if it must.
    pub fn handle_tick(&self, now: Duration, load: &Load) -> Option<Over> {
        if self.is_over {
            return None;
        }
        if load.is_posting && now.saturating_sub(self.moved) > self.timers.stall_timeout {
            return Some(Over::Stalled);
        }
        let rested = now.saturating_sub(self.heard);
        let is_idle = self.timers.idle_timeout.is_some_and(|timeout| rested > timeout) && !load.is_serving;
        is_idle.then_some(Over::Idle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn session(idle_timeout: Option<Duration>) -> Session {
        Session::new(Timers { stall_timeout: 3 * SECOND, idle_timeout }, Duration::ZERO)
    }

    const fn load(is_serving: bool, is_posting: bool) -> Load {
        Load { is_serving, is_posting }
    }

    /// Whose turn it is, against how long nothing moved. Nobody is thrown out for what store or disk owe.
    #[test]
    fn the_time_is_judged_by_this_table() {
        let (stalled, idle) = (Some(Over::Stalled), Some(Over::Idle));
        // load, after 3 s, after 4 s, after 10 s, where idle is 9 s
        let table = [
            (load(false, false), None, None, idle),
            (load(true, false), None, None, None),
            (load(true, true), None, stalled, stalled),
            // An RDMA_ERROR belongs to no call.
            (load(false, true), None, stalled, stalled),
        ];
        for (load, three, four, ten) in table {
            for (at, expected) in [(3, three), (4, four), (10, ten)] {
                assert_eq!(session(Some(9 * SECOND)).handle_tick(at * SECOND, &load), expected, "{load:?} at {at} s");
            }
        }
        let mut moved = session(Some(9 * SECOND));
        moved.poll_over(Duration::ZERO, &load(true, true));
        moved.handle_moved(8 * SECOND);
        assert_eq!(moved.handle_tick(11 * SECOND, &load(true, true)), None);
        assert_eq!(moved.handle_tick(12 * SECOND, &load(true, true)), stalled);
        assert_eq!(session(None).handle_tick(1000 * SECOND, &load(false, false)), None);
    }

    /// A peer that takes nothing must not keep what is meant for it by talking all the while.
    #[test]
    fn who_talks_and_takes_nothing_is_stalled_and_not_idle() {
        let mut session = session(Some(9 * SECOND));
        session.poll_over(SECOND, &load(true, true));
        for at in 1..=4 {
            session.handle_heard(at * SECOND);
            assert_eq!(session.handle_tick(at * SECOND, &load(true, true)), None);
        }
        assert_eq!(session.handle_tick(5 * SECOND, &load(true, true)), Some(Over::Stalled));
        assert_eq!(session.handle_tick(13 * SECOND, &load(false, false)), None);
        assert_eq!(session.handle_tick(14 * SECOND, &load(false, false)), Some(Over::Idle));
    }

    #[test]
    fn the_time_of_store_and_disk_is_not_the_peers() {
        let mut session = session(None);
        for (at, posting) in [(1, false), (9, true), (10, true)] {
            session.poll_over(at * SECOND, &load(true, posting));
        }
        assert_eq!(session.handle_tick(12 * SECOND, &load(true, true)), None);
        assert_eq!(session.handle_tick(13 * SECOND, &load(true, true)), Some(Over::Stalled));
        session.poll_over(20 * SECOND, &load(true, false));
        session.poll_over(30 * SECOND, &load(true, true));
        assert_eq!(session.handle_tick(33 * SECOND, &load(true, true)), None);
    }

    #[test]
    fn a_drain_waits_for_what_is_under_way_and_an_end_comes_once() {
        let mut session = session(None);
        assert_eq!(session.poll_over(SECOND, &load(false, false)), None);
        session.handle_drain();
        assert_eq!(session.poll_over(SECOND, &load(true, false)), None);
        assert_eq!(session.poll_over(SECOND, &load(false, true)), None);
        assert_eq!(session.poll_over(SECOND, &load(false, false)), Some(Over::Shutdown));
        assert!(session.end() && !session.end() && session.is_over());
        assert_eq!(session.poll_over(SECOND, &load(false, false)), None);
        assert_eq!(session.handle_tick(1000 * SECOND, &load(true, true)), None);
    }
}
