//! Requester and responder of RPC-over-RDMA over a faulty fabric, in fake time.
//!
//! Queue pairs, regions, completions and wake-ups are those of the loopback fabric; connections drop, requests are held,
//! events come late, posts and memory are refused by the wrapper around it; the server answers in any order and remembers
//! what it answered; the client closes regions late, gives calls up, and either side goes at any step. Every octet of
//! every argument and result is checked, that each call is carried out once however often it was sent, that nobody writes
//! to memory that was given back, and that no region, buffer or queue pair is lost. Everything follows from a seed:
//!
//! ```text
//! BULKHEAD_SIM_SEED=17 cargo test --test sim_rpcrdma -- --nocapture
//! ```
//!
//! runs that seed alone and, where it fails, prints what happened last; `BULKHEAD_SIM_TIMES=100` runs as many times more
//! seeds than usual.

#[path = "sim_rpc/client.rs"]
mod client;
#[path = "sim_rpc/plan.rs"]
mod plan;
mod rig;
#[path = "sim_rpc/server.rs"]
mod server;
mod sim;

use client::{Client, Tally};
use plan::{Ending, Fault, Plan, RpcRdma};
use server::Server;
use sim::{CLIENT, Client as _, Cut, Replay, SERVER, assert_replays, replayed, seeds};
use std::collections::BTreeMap;
use std::time::Duration;

type Run = sim::Run<RpcRdma>;

fn run(plan: Plan, is_traced: bool) -> Run {
    Run::new(plan, Client::new(plan), Server::new(plan), is_traced)
}

#[test]
fn ten_thousand_exchanges_come_out_right_over_every_kind_of_link() {
    let (mut sum, mut slowest, mut resent) = (Tally::default(), Duration::ZERO, 0);
    let mut endings: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in seeds(1, 120) {
        let mut run = run(Plan::of(seed), false);
        for ending in run.finish() {
            let name = match ending {
                Ending::Whole => "whole",
                Ending::Lost(_) => "lost",
                Ending::Refused => "refused",
                Ending::Fault(Fault::Revoked) => "revoked",
                ending => panic!("{ending:?}"),
            };
            *endings.entry(name).or_default() += 1;
        }
        sum += run.client.tally;
        resent += run.server.replayed;
        slowest = slowest.max(run.world.slowest);
    }
    println!("{sum:?}, {resent} answered again, the slowest in {slowest:?}; {endings:?}");
    if replayed().is_none() {
        assert!(sum.answered >= 10_000, "{sum:?}");
        assert_eq!(endings.len(), 4, "one kind of end did not come: {endings:?}");
        for (name, count) in [
            ("answers from memory", resent),
            ("long calls", sum.long_calls),
            ("long replies", sum.long_replies),
            ("results in chunks", sum.chunks),
            ("results inline", sum.inline),
            ("cancelled", sum.cancelled),
        ] {
            assert!(count > 100, "{count} {name}: {sum:?}");
        }
    }
}

#[test]
fn a_seed_replays_what_happened_to_the_last_event() {
    for seed in seeds(1, 8) {
        let plan = Plan { exchanges: 40, ..Plan::of(seed) };
        assert_replays(plan, || run(plan, true));
    }
}

#[test]
fn either_side_may_go_at_every_step_and_the_next_connection_ends_what_was_begun() {
    for seed in seeds(500, 4) {
        let plan = Plan { exchanges: 8, ..Plan::of(seed).lasting() };
        let (ending, steps) = run(plan, false).connect(None);
        assert_eq!(ending, Ending::Whole);
        for step in 0..steps {
            for side in [CLIENT, SERVER] {
                let mut run = run(plan, false);
                let (ending, _) = run.connect(Some(Cut { step, side }));
                let _replay = Replay(plan);
                assert_eq!(ending, Ending::Cut, "side {side} at step {step}");
                if !run.client.is_done() {
                    assert_eq!(run.finish(), [Ending::Whole], "side {side} at step {step}");
                }
                assert_eq!(run.client.tally.answered, 8);
            }
        }
    }
}
