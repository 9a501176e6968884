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

#[path = "sim/client.rs"]
mod client;
#[path = "common/pattern.rs"]
#[allow(dead_code, reason = "shared by several tests, of which this needs a part")]
mod pattern;
#[path = "sim/plan.rs"]
mod plan;
mod rig;
#[path = "sim/server.rs"]
mod server;
#[path = "sim/trace.rs"]
mod trace;
#[path = "sim/world.rs"]
mod world;

use bulkhead::client::Geometry;
use bulkhead::fabric::faulty::Faults;
use bulkhead::wire::native::poison::Poison;
use client::Client;
use plan::{Plan, Replay, replayed, seeds};
use server::{Server, Store};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use world::{CLIENT, Cut, Ending, SERVER, World};

/// Connections that one run takes to get all its answers, at most.
const CONNECTIONS_MAX: usize = 1000;

/// A world with a client and a server in it.
struct Run {
    plan: Plan,
    world: World,
    client: Client,
    server: Server,
}

impl Run {
    fn new(plan: Plan, is_traced: bool) -> Self {
        Self::with_server(plan, is_traced, false)
    }

    fn with_server(plan: Plan, is_traced: bool, is_reference: bool) -> Self {
        let store = Rc::new(RefCell::new(Store::default()));
        let client = Client::new(plan, Rc::clone(&store));
        Self { plan, world: World::new(plan, is_traced), client, server: Server::new(plan, store, is_reference) }
    }

    fn connect(&mut self, cut: Option<Cut>) -> (Ending, u64) {
        let ended = self.world.connect(&mut self.client, &mut self.server, cut);
        let _replay = Replay(self.plan);
        self.client.check_store();
        self.client.forget();
        ended
    }

    /// Connects until all was asked. Gives how the connections ended.
    fn finish(&mut self) -> Vec<Ending> {
        let mut endings = Vec::new();
        while !self.client.is_done() {
            assert!(endings.len() < CONNECTIONS_MAX, "too many connections");
            let (ending, _) = self.connect(None);
            let _replay = Replay(self.plan);
            let is_expected = match &ending {
                Ending::Whole => true,
                Ending::Lost(_) => self.plan.faults.drop_per_mille > 0,
                Ending::Refused => self.plan.faults.shortage_per_mille > 0,
                Ending::FailedRead => self.plan.failing,
                Ending::Cut | Ending::Poison(_) | Ending::Stalled => false,
            };
            assert!(is_expected, "{ending:?} after {} answers", self.client.answered);
            endings.push(ending);
        }
        endings
    }
}

#[test]
fn ten_thousand_exchanges_come_out_right_over_every_kind_of_link() {
    let (mut answered, mut slowest) = (0, Duration::ZERO);
    let mut endings: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in seeds(1, 100) {
        let mut run = Run::new(Plan::of(seed), false);
        for ending in run.finish() {
            let name = match ending {
                Ending::Whole => "whole",
                Ending::Lost(_) => "lost",
                Ending::Refused => "refused",
                Ending::FailedRead => "failed read",
                ending => panic!("{ending:?}"),
            };
            *endings.entry(name).or_default() += 1;
        }
        answered += run.client.answered;
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
        let lines = || {
            let mut run = Run::new(Plan { exchanges: 60, ..Plan::of(seed) }, true);
            run.finish();
            run.world.take_lines()
        };
        let (first, second) = (lines(), lines());
        let _replay = Replay(Plan::of(seed));
        assert!(first.len() > 100, "{} lines", first.len());
        for (at, (first, second)) in first.iter().zip(&second).enumerate() {
            assert_eq!(first, second, "line {at}");
        }
        assert_eq!(first.len(), second.len());
    }
}

#[test]
fn either_side_may_go_at_every_step() {
    for seed in seeds(500, 4) {
        let mut plan = Plan { exchanges: 8, ..Plan::of(seed).lasting() };
        plan.geometry.iter_mut().for_each(|side| side.window_bytes = side.window_bytes.min(8192));
        let (ending, steps) = Run::new(plan, false).connect(None);
        assert_eq!(ending, Ending::Whole);
        for step in 0..steps {
            for side in [CLIENT, SERVER] {
                let mut run = Run::new(plan, false);
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
    let mut run = Run::with_server(plan, false, true);
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
    let stray = Ending::Poison(Poison::StrayReady);
    assert!(sets.contains(&stray), "a header behind a trailer was not read in time: {sets:?}");
}
