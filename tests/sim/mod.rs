//! What simulations over a faulty fabric share: a world in fake time, runs in it, and the seeds that replay them. What is
//! particular to a protocol is behind [`Protocol`].

mod replay;
mod run;
mod world;

use super::rig;
use bulkhead::fabric::faulty::Faults;
use bulkhead::fabric::traced::Entry;
use bulkhead::fabric::{Address, Cause, Event, Lane};
use std::fmt;
use std::time::{Duration, Instant};

pub use replay::{Replay, replayed, seeds};
pub use run::{Run, assert_replays};
pub use world::{Clock, Cut, World};

/// The client's and the server's place in every pair.
pub const CLIENT: usize = 0;
pub const SERVER: usize = 1;

/// What is simulated.
pub trait Protocol: Sized {
    type Plan: Plan;
    type Client: Client<Self>;
    type Server: Side<Self>;
    /// What will happen to a side at a time.
    type Due;
    /// An end that only this protocol has.
    type Fault: Clone + Eq + fmt::Debug;

    /// An exchange that takes longer stands still.
    const PATIENCE: Duration;
    /// Connections that one run takes to get all its answers, at most.
    const CONNECTIONS_MAX: usize;

    /// What gives the entries of the fabric's log in words that are the same in every run, if there is one.
    fn narrator() -> Option<Narrator> {
        None
    }

    fn is_expected(plan: &Self::Plan, fault: &Self::Fault) -> bool;

    /// After a connection: nobody has done what it must not.
    ///
    /// # Panics
    /// If somebody has.
    fn check(client: &mut Self::Client, server: &Self::Server);
}

pub type Narrator = Box<dyn FnMut(Entry) -> String>;

/// All that a seed decides before the first step.
pub trait Plan: Copy + fmt::Debug {
    fn seed(&self) -> u64;
    fn faults(&self) -> Faults;
}

/// How a connection ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Ending<F> {
    /// All was answered, and the client went.
    Whole,
    /// A side was told to go.
    Cut,
    /// The fabric let go.
    Lost(Cause),
    /// Memory was too short to connect.
    Refused,
    Stalled,
    Fault(F),
}

/// One side of a connection.
pub trait Side<P: Protocol> {
    fn handle_event(
        &mut self,
        event: Event,
        lane: &dyn Lane,
        clock: &mut Clock<P::Due>,
    ) -> Result<(), Ending<P::Fault>>;
    /// What it gave to [`Clock::after`].
    fn handle_due(&mut self, due: P::Due, clock: &mut Clock<P::Due>);
    /// Does all that can be done now.
    fn drive(&mut self, clock: &mut Clock<P::Due>) -> Result<(), Ending<P::Fault>>;
    fn wakes_at(&self) -> Option<Instant>;
    /// `false` if there is nothing to end.
    fn disconnect(&mut self) -> bool;
    /// Its last event has come, or it has no queue pair; and nothing of it is still to happen.
    fn is_over(&self) -> bool;
    /// Drops the connection, which is over.
    ///
    /// # Panics
    /// If anything of it is missing.
    fn release(&mut self) {}
}

/// The side that asks.
pub trait Client<P: Protocol>: Side<P> {
    fn dial(&mut self, lane: &dyn Lane, to: &Address) -> Result<(), Ending<P::Fault>>;
    /// All was asked and answered.
    fn is_done(&self) -> bool;
    fn answered(&self) -> u64;
    /// It is done, and has not let go of the connection.
    ///
    /// # Panics
    /// If it holds what only an exchange needs.
    fn check_done(&self, _lane: &dyn Lane) {}
}
