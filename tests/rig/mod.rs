//! Random numbers that replay (a test that uses them prints its seed when it fails), and a disk that is a map.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use bulkhead::store::pool::{EXTENT_ALIGN, ExtentId};
use bulkhead::store::{Gauges, Store};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const FILE_BYTES: u64 = 2 << 20;

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

/// What was written where, and which write it was: a checksum names the write, so stale octets are found out.
#[derive(Default)]
pub struct Disk {
    extents: Mutex<HashMap<ExtentId, (u32, Vec<u8>)>>,
    writes: AtomicU64,
}

impl Disk {
    pub fn write(&self, extent: ExtentId, octets: &[u8]) -> [u32; 4] {
        let number = self.writes.fetch_add(1, Ordering::Relaxed) as u32;
        self.extents.lock().unwrap().insert(extent, (number, octets.to_vec()));
        [number, 0, 0, 0]
    }

    pub fn read(&self, extent: ExtentId, crcs: [u32; 4]) -> Vec<u8> {
        let extents = self.extents.lock().unwrap();
        let (number, octets) = extents.get(&extent).expect("what is clean was written");
        assert_eq!(*number, crcs[0], "another write took the place of this one");
        octets.clone()
    }
}

/// One segment written behind; false if there is none to write.
pub fn write_one(store: &Store, disk: &Disk, wanted: bool, fails: bool) -> bool {
    let Some(job) = store.next_write(wanted) else { return false };
    let len = job.segment.len();
    let moved = u64::from(len).next_multiple_of(EXTENT_ALIGN);
    assert!(moved <= job.ram.len() as u64, "{len} octets cannot be written from a block of {}", job.ram.len());
    assert!(moved <= job.extent.byte_len(), "{len} octets do not fit {} of extent", job.extent.byte_len());
    assert!((job.ram.as_slice().as_ptr() as u64).is_multiple_of(EXTENT_ALIGN), "O_DIRECT takes whole sectors");
    let crcs = (!fails).then(|| disk.write(job.extent, &job.ram.as_slice()[..len as usize]));
    drop(job.ram);
    store.handle_written(&job.segment, usize::from(job.extent.drive()), crcs);
    true
}

/// The next pool file, if one may be made.
pub fn grow(store: &Store) -> bool {
    let Some(drive) = store.extents().growth_wanted(u64::MAX) else { return false };
    store.extents().add_file(drive, FILE_BYTES);
    true
}

#[track_caller]
pub fn assert_whole(store: &Store) {
    let gauges = store.gauges();
    let nothing = Gauges {
        memory_bytes: gauges.memory_bytes,
        memory_free_bytes: gauges.memory_bytes,
        pool_bytes: gauges.pool_bytes,
        ..Gauges::default()
    };
    assert_eq!(gauges, nothing, "something was not given back");
}
