//! What a run is made of, and how it is replayed.

use super::rig::Seeded;
use bulkhead::fabric::faulty::Faults;
use bulkhead::wire::rpcrdma::private_data::PrivateData;
use std::num::NonZeroU32;

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

/// Says which seed it was when an assertion fails.
pub struct Replay(pub Plan);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with BULKHEAD_SIM_SEED={}: {:?}", self.0.seed, self.0);
        }
    }
}

/// The seed that is to be replayed alone.
pub fn replayed() -> Option<u64> {
    std::env::var("BULKHEAD_SIM_SEED").ok().map(|seed| seed.parse().expect("BULKHEAD_SIM_SEED is a number"))
}

/// `count` seeds from `from` on, or the one of the environment.
pub fn seeds(from: u64, count: u64) -> Vec<u64> {
    let times = std::env::var("BULKHEAD_SIM_TIMES").map_or(1, |times| times.parse().expect("a number"));
    replayed().map_or_else(|| (from..from + count * times).collect(), |seed| vec![seed])
}
