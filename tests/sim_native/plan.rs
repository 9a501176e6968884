//! What is simulated, and what a run of it is made of.

use super::client::Client;
use super::rig::Seeded;
use super::server::Server;
use super::sim::{self, Narrator, Protocol};
use super::trace::Names;
use bulkhead::client::Geometry;
use bulkhead::fabric::faulty::Faults;
use bulkhead::wire::native::endpoint::EndCause;
use bulkhead::wire::native::poison::Poison;
use bulkhead::wire::native::window::Ticket;
use std::time::Duration;

/// The native protocol, version 3.
pub struct Native;

pub type Ending = sim::Ending<Fault>;
pub type Clock = sim::Clock<Filled>;

/// A disk or a copy ends; no octets: it has failed.
pub struct Filled {
    pub ticket: Ticket,
    pub slot: u32,
    pub octets: Option<Vec<u8>>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Fault {
    FailedRead,
    Poison(Poison),
}

impl From<EndCause> for Ending {
    fn from(cause: EndCause) -> Self {
        match cause {
            EndCause::FailedRead => Self::Fault(Fault::FailedRead),
            EndCause::Poison(poison) => poison.into(),
            EndCause::Stalled => Self::Stalled,
            cause => panic!("{cause}"),
        }
    }
}

impl From<Poison> for Ending {
    fn from(poison: Poison) -> Self {
        Self::Fault(Fault::Poison(poison))
    }
}

impl Protocol for Native {
    type Plan = Plan;
    type Client = Client;
    type Server = Server;
    type Due = Filled;
    type Fault = Fault;

    const PATIENCE: Duration = Duration::from_millis(200);
    const CONNECTIONS_MAX: usize = 1000;

    fn narrator() -> Option<Narrator> {
        let mut names = Names::default();
        Some(Box::new(move |entry| names.line(entry)))
    }

    fn is_expected(plan: &Plan, fault: &Fault) -> bool {
        *fault == Fault::FailedRead && plan.failing
    }

    fn check(client: &mut Client, _: &Server) {
        client.check_store();
        client.forget();
    }
}

/// All that a seed decides before the first step.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    /// Of client and server.
    pub geometry: [Geometry; 2],
    /// Work requests that each queue pair takes.
    pub send_depth: usize,
    pub faults: Faults,
    pub exchanges: u64,
    /// Requests without an answer, at most.
    pub depth: usize,
    /// The server's disks fail at times.
    pub failing: bool,
    pub sets_only: bool,
}

impl Plan {
    pub fn of(seed: u64) -> Self {
        let mut dice = Seeded::new(seed ^ 0xa5a5);
        let mut side = || {
            let slots: u64 = *dice.pick(&[2, 2, 3, 4, 8, 64, 256]);
            let (window_bytes, window_count) =
                *dice.pick(&[(4096, 1), (4096, 2), (4096, 3), (8192, 2), (16_384, 4), (65_536, 8)]);
            Geometry { ring_bytes: slots * 256, window_bytes, window_count }
        };
        let geometry = [side(), side()];
        let faults = Faults {
            drop_per_mille: *dice.pick(&[0, 0, 1, 3]),
            delay_per_mille: *dice.pick(&[0, 100, 500]),
            hold_per_mille: *dice.pick(&[0, 300, 700]),
            refuse_per_mille: *dice.pick(&[0, 0, 50]),
            shortage_per_mille: *dice.pick(&[0, 0, 100]),
        };
        Self {
            seed,
            geometry,
            send_depth: *dice.pick(&[8, 16, 512]),
            faults,
            exchanges: 150,
            depth: *dice.pick(&[1, 2, 5, 16, 64]),
            failing: dice.one_in(3),
            sets_only: false,
        }
    }

    /// Nothing ends the connection by itself.
    pub fn lasting(self) -> Self {
        let faults = Faults { drop_per_mille: 0, shortage_per_mille: 0, ..self.faults };
        Self { faults, failing: false, ..self }
    }
}

impl sim::Plan for Plan {
    fn seed(&self) -> u64 {
        self.seed
    }

    fn faults(&self) -> Faults {
        self.faults
    }
}
