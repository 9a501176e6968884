//! What a run is made of, and how it is replayed.

use super::rig::Seeded;
use bulkhead::client::Geometry;
use bulkhead::fabric::faulty::Faults;

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
