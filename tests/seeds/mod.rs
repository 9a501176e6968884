//! Random numbers that replay: a test that uses them prints its seed when it fails.
#![allow(dead_code, reason = "every test binary uses a part of it")]

/// A small generator (splitmix64), the same on every machine.
pub struct Seeded(u64);

impl Seeded {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `bound`, which is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

/// Octets that tell where they come from: no two ids agree in many places.
pub fn octets(id: u64, len: usize) -> Vec<u8> {
    let mut random = Seeded::new(id);
    let mut octets = Vec::with_capacity(len + 8);
    while octets.len() < len {
        octets.extend_from_slice(&random.next().to_le_bytes());
    }
    octets.truncate(len);
    octets
}

/// Runs `test` with each of `seeds`, or with the one of the environment variable `BULKHEAD_SEED` alone.
pub fn for_each_seed(seeds: std::ops::Range<u64>, test: impl Fn(u64)) {
    struct Told(u64);
    impl Drop for Told {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("failed with seed {0}; BULKHEAD_SEED={0} replays it", self.0);
            }
        }
    }
    let one = std::env::var("BULKHEAD_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    for seed in one.map_or(seeds, |seed| seed..seed + 1) {
        let told = Told(seed);
        test(seed);
        drop(told);
    }
}
