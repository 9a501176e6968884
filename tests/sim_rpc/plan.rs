//! What is simulated, and what a run of it is made of.

use super::client::Client;
use super::rig::Seeded;
use super::server::Server;
use super::sim::{self, Protocol};
use bulkhead::fabric::faulty::Faults;
use bulkhead::wire::onc_rpc::Xid;
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use bulkhead::wire::rpcrdma::requester::{Cancel, Output};
use std::num::NonZeroU32;
use std::time::Duration;

/// RPC-over-RDMA, version 1.
pub struct RpcRdma;

pub type Ending = sim::Ending<Fault>;
pub type Clock = sim::Clock<Due>;

#[derive(Debug)]
pub enum Due {
    /// The client does what it has put off, of this connection.
    Obey { generation: u64, output: Output },
    /// The client gives a call up.
    Cancel { xid: Xid, when: Cancel },
    /// The server has carried a call out, of this connection.
    Executed { generation: u64, xid: Xid },
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Fault {
    /// A call was given up whose memory the server was still at.
    Revoked,
}

impl Protocol for RpcRdma {
    type Plan = Plan;
    type Client = Client;
    type Server = Server;
    type Due = Due;
    type Fault = Fault;

    const PATIENCE: Duration = Duration::from_millis(500);
    const CONNECTIONS_MAX: usize = 2000;

    fn is_expected(plan: &Plan, fault: &Fault) -> bool {
        match fault {
            Fault::Revoked => plan.cancels,
        }
    }

    fn check(client: &mut Client, server: &Server) {
        client.check(server);
    }
}

/// All that a seed decides before the first step.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    /// What client and server tell each other.
    pub told: [PrivateData; 2],
    pub segment_bytes_max: NonZeroU32,
    /// What the client asks for, and what the server grants at most.
    pub credits: [NonZeroU32; 2],
    pub faults: Faults,
    pub exchanges: u64,
    /// Calls without an answer, at most.
    pub depth: usize,
    /// Calls are given up at times.
    pub cancels: bool,
    /// Regions are closed late at times.
    pub late: bool,
}

impl Plan {
    pub fn of(seed: u64) -> Self {
        let mut dice = Seeded::new(seed ^ 0x5a5a);
        let mut told = || {
            let size = |dice: &mut Seeded| *dice.pick(&[1024, 1024, 4096]);
            let remote_invalidate = !dice.one_in(4);
            PrivateData { remote_invalidate, send_bytes: size(&mut dice), receive_bytes: size(&mut dice) }
        };
        let told = [told(), told()];
        let faults = Faults {
            drop_per_mille: *dice.pick(&[0, 0, 5, 20]),
            delay_per_mille: *dice.pick(&[0, 100, 500]),
            hold_per_mille: *dice.pick(&[0, 300, 700]),
            refuse_per_mille: *dice.pick(&[0, 0, 50]),
            shortage_per_mille: *dice.pick(&[0, 0, 20]),
        };
        let credit = |dice: &mut Seeded| NonZeroU32::new(*dice.pick(&[1, 2, 5, 16])).unwrap();
        Self {
            seed,
            told,
            segment_bytes_max: NonZeroU32::new(*dice.pick(&[512, 4096, u32::MAX])).unwrap(),
            credits: [credit(&mut dice), credit(&mut dice)],
            faults,
            exchanges: 120,
            depth: *dice.pick(&[1, 2, 5, 16, 30]),
            cancels: dice.one_in(3),
            late: dice.one_in(2),
        }
    }

    /// Nothing ends the connection by itself.
    pub fn lasting(self) -> Self {
        let faults = Faults { drop_per_mille: 0, shortage_per_mille: 0, ..self.faults };
        Self { faults, cancels: false, ..self }
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
