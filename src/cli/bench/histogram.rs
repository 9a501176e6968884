//! Distribution of times with a fixed size, whatever their number.

use std::time::Duration;

/// Bits of a time that are kept below its highest one: 64 steps for each doubling, so an error of at most 0.8 %.
const STEP_BITS: u32 = 6;
const STEPS: usize = 1 << STEP_BITS;

/// Counts of times, in nanoseconds: exact below 64, then in 64 steps for each doubling up to 2^64.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
}

impl Histogram {
    pub fn new() -> Self {
        let buckets = (64 - STEP_BITS as usize + 1) * STEPS;
        Self { counts: vec![0; buckets].into_boxed_slice(), count: 0 }
    }

    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(ns)] += 1;
        self.count += 1;
    }

    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.count += other.count;
    }

    /// Time in microseconds that `share` (0..1) of all were at or below; 0 if there were none.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut below = 0;
        for (index, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return middle_ns(index) / 1_000.0;
            }
        }
        0.0
    }
}

fn bucket(ns: u64) -> usize {
    if ns < STEPS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - STEP_BITS;
    // The highest bit is always set, so it is left out of the step.
    (shift as usize + 1) * STEPS + ((ns >> shift) as usize - STEPS)
}

fn middle_ns(index: usize) -> f64 {
    if index < STEPS {
        return index as f64;
    }
    let (shift, step) = (index / STEPS - 1, index % STEPS);
    let width = 2f64.powi(shift as i32);
    (STEPS + step) as f64 * width + width / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_one_hundredth_of_the_truth() {
        let mut histogram = Histogram::new();
        for us in 1..=10_000 {
            histogram.record(Duration::from_micros(us));
        }
        for (share, truth) in [(0.5, 5_000.0), (0.99, 9_900.0), (0.0, 1.0), (1.0, 10_000.0)] {
            let found = histogram.quantile_us(share);
            assert!((found - truth).abs() <= truth / 100.0, "{share}: {found} is not {truth}");
        }
    }

    #[test]
    fn the_longest_and_the_shortest_time_have_a_bucket() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.quantile_us(0.5), 0.0);
        for time in [Duration::ZERO, Duration::from_nanos(63), Duration::from_nanos(64), Duration::MAX] {
            histogram.record(time);
        }
        assert_eq!(histogram.count, 4);
        assert_eq!(histogram.quantile_us(0.5), 0.063);
    }

    #[test]
    fn merging_adds_counts() {
        let (mut a, mut b) = (Histogram::new(), Histogram::new());
        a.record(Duration::from_nanos(10));
        b.record(Duration::from_nanos(20));
        b.record(Duration::from_nanos(20));
        a.merge(&b);
        assert_eq!(a.quantile_us(0.5), 0.02);
    }
}
