//! Two endpoints of the native protocol over a faulty fabric, in fake time, against a map of what was stored.
//!
//! Queue pairs, regions, completions and wake-ups are those of the loopback fabric; connections drop, requests are held,
//! events come late, posts and memory are refused by the wrapper around it; disks answer in any order or fail; either
//! side goes at any step. Both sides check every octet of every value, that no window, slot, buffer, region or queue pair
//! is lost, and that nothing stands still. Everything follows from a seed:
//!
//! ```text
//! BULKHEAD_SIM_SEED=17 cargo test --test sim_native -- --nocapture
//! ```
//!
//! runs that seed alone and, where it fails, prints what happened last; `BULKHEAD_SIM_TIMES=100` runs as many times more
//! seeds than usual.

#[path = "sim_native/client.rs"]
mod client;
#[path = "common/pattern.rs"]
#[allow(dead_code, reason = "shared by several tests, of which this needs a part")]
mod pattern;
#[path = "sim_native/plan.rs"]
mod plan;
mod rig;
#[path = "sim_native/server.rs"]
mod server;
mod sim;
#[path = "sim_native/trace.rs"]
mod trace;

use bulkhead::client::Geometry;
use bulkhead::fabric::faulty::Faults;
use bulkhead::wire::native::poison::Poison;
use client::Client;
use plan::{Ending, Fault, Native, Plan};
use server::{Server, Store};
use sim::{CLIENT, Client as _, Cut, Replay, SERVER, assert_replays, replayed, seeds};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

type Run = sim::Run<Native>;

/// A run with a server of ours, or one with the faults of the reference.
fn run(plan: Plan, is_traced: bool, is_reference: bool) -> Run {
    let store = Rc::new(RefCell::new(Store::default()));
    let client = Client::new(plan, Rc::clone(&store));
    Run::new(plan, client, Server::new(plan, store, is_reference), is_traced)
}

#[test]
fn ten_thousand_exchanges_come_out_right_over_every_kind_of_link() {
    let (mut answered, mut slowest) = (0, Duration::ZERO);
    let mut endings: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in seeds(1, 100) {
        let mut run = run(Plan::of(seed), false, false);
        for ending in run.finish() {
            let name = match ending {
                Ending::Whole => "whole",
                Ending::Lost(_) => "lost",
                Ending::Refused => "refused",
                Ending::Fault(Fault::FailedRead) => "failed read",
                ending => panic!("{ending:?}"),
            };
            *endings.entry(name).or_default() += 1;
        }
        answered += run.client.answered();
        slowest = slowest.max(run.world.slowest);
    }
    println!("{answered} exchanges, the slowest in {slowest:?}; {endings:?}");
    if replayed().is_none() {
        assert!(answered >= 10_000, "{answered} exchanges");
        assert_eq!(endings.len(), 4, "one kind of end did not come: {endings:?}");
    }
}

#[test]
fn a_seed_replays_what_happened_to_the_last_event() {
    for seed in seeds(1, 12) {
        let plan = Plan { exchanges: 60, ..Plan::of(seed) };
        assert_replays(plan, || run(plan, true, false));
    }
}

#[test]
fn either_side_may_go_at_every_step() {
    for seed in seeds(500, 4) {
        let mut plan = Plan { exchanges: 8, ..Plan::of(seed).lasting() };
        plan.geometry.iter_mut().for_each(|side| side.window_bytes = side.window_bytes.min(8192));
        let (ending, steps) = run(plan, false, false).connect(None);
        assert_eq!(ending, Ending::Whole);
        for step in 0..steps {
            for side in [CLIENT, SERVER] {
                let mut run = run(plan, false, false);
                let (ending, _) = run.connect(Some(Cut { step, side }));
                let _replay = Replay(plan);
                assert_eq!(ending, Ending::Cut, "side {side} at step {step}");
                if step % 16 == 0 {
                    // The next connection finds all in order.
                    run.client.left = 8;
                    assert_eq!(run.finish(), [Ending::Whole]);
                }
            }
        }
    }
}

/// A client of ours against a server with the faults of the reference.
fn connect_to_reference(seed: u64, cautious: Option<bool>, sets_only: bool) -> Ending {
    let geometry = [Geometry { ring_bytes: 64 * 256, window_bytes: 4096, window_count: 2 }; 2];
    let faults = Faults { delay_per_mille: 100, hold_per_mille: 300, ..Faults::default() };
    let plan = Plan { geometry, faults, exchanges: 200, depth: 8, failing: false, sets_only, ..Plan::of(seed) };
    let mut run = run(plan, false, true);
    run.client.cautious = cautious;
    run.connect(None).0
}

#[test]
fn a_client_works_with_a_server_that_has_the_faults_of_the_reference() {
    for seed in seeds(900, 10) {
        for sets_only in [false, true] {
            assert_eq!(connect_to_reference(seed, None, sets_only), Ending::Whole, "seed {seed}");
        }
    }
}

#[test]
fn a_client_that_is_not_cautious_hangs_or_is_closed_by_such_a_server() {
    let mixed: Vec<Ending> = (900..910).map(|seed| connect_to_reference(seed, Some(false), false)).collect();
    assert!(mixed.contains(&Ending::Stalled), "a release behind an unread command was never seen: {mixed:?}");
    assert!(!mixed.contains(&Ending::Whole), "{mixed:?}");
    let sets: Vec<Ending> = (900..910).map(|seed| connect_to_reference(seed, Some(false), true)).collect();
    let stray = Ending::Fault(Fault::Poison(Poison::StrayReady));
    assert!(sets.contains(&stray), "a header behind a trailer was not read in time: {sets:?}");
}
