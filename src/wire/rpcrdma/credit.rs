//! Who may send how much (RFC 8166 §3.3): a credit is the right to have one call unanswered. The requester asks for some
//! with every call, the responder grants some with every reply; only the newest numbers count. The two directions of a
//! connection have credits of their own (RFC 8167 §4.1), so [`CreditGate`] and [`CreditGrant`] never meet.

use std::num::NonZeroU32;

/// Requester's half: how many calls may be unanswered.
///
/// ```text
///  new, handle_disconnected ─▶ window 1 ──first grant──▶ window min(requested, granted), 1 at least
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CreditGate {
    requested: NonZeroU32,
    granted: NonZeroU32,
    in_flight: u32,
}

impl CreditGate {
    /// Asks for `requested` credits: as many calls as there are Receives to post for their replies.
    pub const fn new(requested: NonZeroU32) -> Self {
        Self { requested, granted: NonZeroU32::MIN, in_flight: 0 }
    }

    /// The number that goes into every call.
    pub const fn requested(&self) -> NonZeroU32 {
        self.requested
    }

    /// Calls that may be unanswered now. One until a valid reply has said more (§3.3.3).
    pub fn window(&self) -> NonZeroU32 {
        self.requested.min(self.granted)
    }

    /// Calls unanswered.
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether another call may go out.
    pub fn is_open(&self) -> bool {
        self.in_flight < self.window().get()
    }

    /// A call goes out.
    ///
    /// # Panics
    /// Unless [`CreditGate::is_open`].
    pub fn handle_call(&mut self) {
        assert!(self.is_open(), "a call without a credit");
        self.in_flight += 1;
    }

    /// A valid reply said `granted`. Zero would stop the connection for ever and counts as one; what is more than was
    /// asked for is not used. The window may fall below what is in flight: nothing is recalled, new calls wait.
    pub fn handle_grant(&mut self, granted: u32) {
        self.granted = NonZeroU32::new(granted).unwrap_or(NonZeroU32::MIN);
    }

    /// A call was answered, well or with an error.
    ///
    /// # Panics
    /// If none is in flight.
    pub fn handle_answered(&mut self) {
        self.in_flight = self.in_flight.checked_sub(1).expect("the requester matches answers to calls first");
    }

    /// The connection is lost, and with it what was granted and what was in flight: calls that are sent again take a
    /// credit again.
    pub fn handle_disconnected(&mut self) {
        *self = Self::new(self.requested);
    }
}

/// Responder's half: what may be granted, and how many Receives that takes.
///
/// What a peer may do follows from the replies it has seen, not from the newest alone. So `promised` bounds its
/// unanswered calls: a reply that grants more raises it at once, one that grants less lowers it by the one call that it
/// answers, until it has come down to the grant.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CreditGrant {
    /// Receives that stand for calls, as the owner last said.
    receives: u32,
    grant_max: NonZeroU32,
    promised: u32,
    in_service: u32,
}

impl CreditGrant {
    /// Never more than `grant_max` is granted. A peer assumes one credit before anything was granted.
    pub const fn new(grant_max: NonZeroU32) -> Self {
        Self { receives: 1, grant_max, promised: 1, in_service: 0 }
    }

    /// `receives` Receives stand for calls from now on: posted, or held by a call and posted again before it is answered.
    /// To grant more, they are posted first and told here after (§3.3.1). To grant fewer, this is told first, and Receives
    /// are left out while more than [`CreditGrant::receives_needed`] are posted.
    pub fn set_receives(&mut self, receives: u32) {
        self.receives = receives;
    }

    /// What the next reply grants: never zero.
    pub fn grant(&self) -> u32 {
        self.receives.clamp(1, self.grant_max.get())
    }

    /// Most that is ever granted.
    pub const fn grant_max(&self) -> NonZeroU32 {
        self.grant_max
    }

    /// Calls that were received and not yet answered.
    pub const fn in_service(&self) -> u32 {
        self.in_service
    }

    /// Receives that must be posted now, for the calls that the peer may still send without having heard more.
    pub const fn receives_needed(&self) -> u32 {
        self.promised.saturating_sub(self.in_service)
    }

    /// A call is taken into service.
    pub fn handle_call(&mut self) {
        self.in_service += 1;
    }

    /// The call that was taken into service will have no answer: a duplicate, whose first copy will.
    ///
    /// # Panics
    /// If no call is in service.
    pub fn handle_dropped(&mut self) {
        self.in_service = self.in_service.checked_sub(1).expect("a call is dropped that was taken into service");
    }

    /// An answer to a call is about to be sent; gives the grant to put into it. From here on the peer may use it: Receives
    /// are posted before.
    ///
    /// # Panics
    /// If no call is in service.
    pub fn handle_answer(&mut self) -> u32 {
        self.handle_dropped();
        let grant = self.grant();
        self.promised = self.promised.saturating_sub(1).max(grant);
        grant
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn credits(count: u32) -> NonZeroU32 {
        NonZeroU32::new(count).unwrap()
    }

    #[test]
    fn the_window_is_one_until_the_first_reply_and_again_on_the_next_connection() {
        let mut gate = CreditGate::new(credits(8));
        gate.handle_call();
        assert!(!gate.is_open(), "one call before the first grant");
        gate.handle_answered();
        gate.handle_grant(4);
        for _ in 0..4 {
            gate.handle_call();
        }
        assert!(!gate.is_open());
        gate.handle_disconnected();
        assert_eq!((gate.window().get(), gate.in_flight()), (1, 0));
        gate.handle_call();
        assert!(!gate.is_open(), "credits of the old connection do not count on the new");
    }

    #[test]
    fn a_smaller_grant_recalls_nothing_and_holds_new_calls() {
        let mut gate = CreditGate::new(credits(8));
        gate.handle_grant(4);
        for _ in 0..4 {
            gate.handle_call();
        }
        gate.handle_answered();
        gate.handle_grant(2);
        assert_eq!(gate.in_flight(), 3);
        assert!(!gate.is_open());
        gate.handle_answered();
        assert!(!gate.is_open());
        gate.handle_answered();
        assert!(gate.is_open());
    }

    #[test]
    fn grants_are_clamped_between_one_and_what_was_asked_for() {
        let mut gate = CreditGate::new(credits(8));
        for (granted, window) in [(0, 1), (1, 1), (8, 8), (9, 8), (u32::MAX, 8), (0, 1)] {
            gate.handle_grant(granted);
            assert_eq!(gate.window().get(), window, "granted {granted}");
        }
    }

    #[test]
    fn a_grant_is_never_zero_and_never_past_the_maximum() {
        let mut grant = CreditGrant::new(credits(64));
        for (receives, granted) in [(0, 1), (1, 1), (64, 64), (65, 64), (3, 3)] {
            grant.set_receives(receives);
            assert_eq!(grant.grant(), granted);
        }
    }

    #[test]
    fn more_is_granted_only_once_receives_are_posted() {
        let mut grant = CreditGrant::new(credits(64));
        grant.handle_call();
        assert_eq!(grant.handle_answer(), 1, "nothing was posted beyond the first");
        grant.set_receives(16);
        assert_eq!(grant.receives_needed(), 1, "the peer has not heard of it");
        grant.handle_call();
        assert_eq!(grant.handle_answer(), 16);
        assert_eq!(grant.receives_needed(), 16);
    }

    #[test]
    fn receives_of_a_larger_grant_are_kept_until_the_peer_cannot_use_them() {
        let mut grant = CreditGrant::new(credits(64));
        grant.set_receives(4);
        grant.handle_call();
        grant.handle_answer();
        grant.set_receives(2);
        assert_eq!(grant.receives_needed(), 4);
        let mut needed = Vec::new();
        for _ in 0..4 {
            grant.handle_call();
            assert_eq!(grant.handle_answer(), 2);
            needed.push(grant.receives_needed());
        }
        assert_eq!(needed, [3, 2, 2, 2]);
    }

    /// What happens next between a peer that uses all it is granted and a responder.
    #[derive(Clone, Debug)]
    enum Step {
        PeerCalls,
        PeerHears,
        CallArrives,
        Answer,
        Receives(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::PeerCalls),
            3 => Just(Step::PeerHears),
            4 => Just(Step::CallArrives),
            3 => Just(Step::Answer),
            1 => (0_u32..9).prop_map(Step::Receives),
        ]
    }

    proptest! {
        /// Two halves and a wire that delays: however the grant moves, a call that the peer may send finds a Receive, if
        /// no more Receives are left out than the grant allows.
        #[test]
        fn a_call_always_finds_a_receive(steps in prop::collection::vec(step(), 0..200)) {
            let mut gate = CreditGate::new(credits(8));
            let mut grant = CreditGrant::new(credits(8));
            let (mut calls, mut replies) = (0_u32, VecDeque::new());
            let mut posted = grant.receives_needed();
            for step in steps {
                match step {
                    Step::PeerCalls if gate.is_open() => {
                        gate.handle_call();
                        calls += 1;
                    }
                    Step::PeerHears => if let Some(granted) = replies.pop_front() {
                        gate.handle_answered();
                        gate.handle_grant(granted);
                    },
                    Step::CallArrives if calls > 0 => {
                        calls -= 1;
                        prop_assert!(posted > 0, "no Receive for a call within its credit");
                        posted -= 1;
                        grant.handle_call();
                    }
                    Step::Answer if grant.in_service() > 0 => {
                        let granted = grant.handle_answer();
                        prop_assert!((1..=8).contains(&granted));
                        posted = posted.max(grant.receives_needed());
                        replies.push_back(granted);
                    }
                    Step::Receives(count) => grant.set_receives(count),
                    _ => {}
                }
                prop_assert!(calls <= posted, "{} calls are under way and {} Receives posted", calls, posted);
            }
        }
    }
}
