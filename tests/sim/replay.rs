//! The seeds of a run, and how it is replayed.

use super::Plan;

/// Says which seed it was when an assertion fails.
pub struct Replay<P: Plan>(pub P);

impl<P: Plan> Drop for Replay<P> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with BULKHEAD_SIM_SEED={}: {:?}", self.0.seed(), self.0);
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
