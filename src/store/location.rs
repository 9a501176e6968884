//! Where the octets of an object lie, and how long a reader may expect to wait for the first of them.

use crate::store::Store;
use crate::store::object::Object;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What holds a segment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Medium {
    Ram,
    Disk {
        drive: u16,
    },
    /// Its drive failed.
    Lost,
}

/// Where the octets of an object lie at one moment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Location {
    /// Octets of the value before the first that is not in RAM.
    pub resident_prefix_bytes: u64,
    /// Octets in RAM, whether they are on disk too or not.
    pub ram_bytes: u64,
    /// Octets on disk alone.
    pub disk_bytes: u64,
    /// Microseconds until the first octet can be sent; `None` if it is lost.
    pub first_octet_us: Option<u64>,
}

/// Until octets in RAM can be sent: a look-up, a copy and a wake.
pub const RAM_US: u64 = 10;
/// Taken for the time of a read while no drive has shown its own: a flash drive with a queue.
pub const UNKNOWN_READ_US: u64 = 500;
/// One read in so many makes the average of their times.
const READS_AVERAGED: u64 = 8;

/// What the lanes have seen of one drive lately. Cheap to write and to read; numbers of different moments may stand beside
/// each other.
#[derive(Debug, Default)]
pub struct DriveLoad {
    /// Moving average of the time from a read's start to its end, in nanoseconds; 0: there was none.
    read_ns: AtomicU64,
    reads_waiting: AtomicU64,
    places: AtomicU64,
}

impl DriveLoad {
    /// A read was at the disk for so long.
    pub fn handle_read(&self, took: Duration) {
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        let before = self.read_ns.load(Ordering::Relaxed);
        let average = if before == 0 { took_ns } else { before - before / READS_AVERAGED + took_ns / READS_AVERAGED };
        // Of two at once one is not counted.
        self.read_ns.store(average.max(1), Ordering::Relaxed);
    }

    /// `count` reads came that have to wait for a place.
    pub fn add_waiting(&self, count: u64) {
        self.reads_waiting.fetch_add(count, Ordering::Relaxed);
    }

    /// `count` of them wait no more.
    pub fn sub_waiting(&self, count: u64) {
        self.reads_waiting.fetch_sub(count, Ordering::Relaxed);
    }

    /// A lane with so many places at the drive begins.
    pub fn add_places(&self, count: u64) {
        self.places.fetch_add(count, Ordering::Relaxed);
    }

    /// It ends.
    pub fn sub_places(&self, count: u64) {
        self.places.fetch_sub(count, Ordering::Relaxed);
    }

    /// What it is now.
    pub fn sample(&self) -> Load {
        let read_ns = self.read_ns.load(Ordering::Relaxed);
        Load {
            read_us: if read_ns == 0 { None } else { Some(read_ns.div_ceil(1000)) },
            reads_waiting: self.reads_waiting.load(Ordering::Relaxed),
            places: self.places.load(Ordering::Relaxed),
        }
    }
}

/// How busy a drive is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Load {
    /// How long a read was at the disk on average lately, in microseconds. It grows with what else is there.
    pub read_us: Option<u64>,
    /// Reads that wait for a place at the disk.
    pub reads_waiting: u64,
    /// Operations that all lanes may have there.
    pub places: u64,
}

impl Load {
    /// Microseconds until a read that comes now is done: those that wait are taken to be spread over all places, and go first.
    pub fn next_read_us(self) -> u64 {
        let read_us = self.read_us.unwrap_or(UNKNOWN_READ_US);
        let ahead_us = u128::from(read_us) * u128::from(self.reads_waiting) / u128::from(self.places.max(1));
        read_us.saturating_add(u64::try_from(ahead_us).unwrap_or(u64::MAX))
    }
}

/// Microseconds until the first octet of a segment can be sent, if it ever can. `load` is that of the drive it is on.
pub fn first_octet_us(medium: Medium, load: Load) -> Option<u64> {
    match medium {
        Medium::Ram => Some(RAM_US),
        Medium::Disk { .. } => Some(load.next_read_us().saturating_add(RAM_US)),
        Medium::Lost => None,
    }
}

impl Store {
    /// What is known of each drive. Whoever reads from the drives keeps it up to date.
    pub fn drive_loads(&self) -> &Arc<[DriveLoad]> {
        &self.shared.drive_loads
    }

    /// Where `object` lies. Looks at every segment: 16 GiB have more than 65,536 of them.
    pub fn location(&self, object: &Object) -> Location {
        let mut location = Location { first_octet_us: self.first_octet_us(object, 0), ..Location::default() };
        let mut leading = true;
        for piece in object.pieces() {
            let (len, medium) = (u64::from(piece.len), piece.segment.medium());
            leading &= medium == Medium::Ram;
            match medium {
                Medium::Ram => location.ram_bytes += len,
                Medium::Disk { .. } => location.disk_bytes += len,
                Medium::Lost => {}
            }
            if leading {
                location.resident_prefix_bytes += len;
            }
        }
        location
    }

    /// Microseconds until the octet at `offset` of `object` can be sent; `None` if it is lost.
    pub fn first_octet_us(&self, object: &Object, offset: u64) -> Option<u64> {
        let first = object.range(offset, 1).next();
        // An empty answer comes from RAM.
        let medium = first.map_or(Medium::Ram, |piece| piece.segment.medium());
        let load = match medium {
            Medium::Disk { drive } => self.shared.drive_loads.get(usize::from(drive)).map(DriveLoad::sample),
            Medium::Ram | Medium::Lost => None,
        };
        first_octet_us(medium, load.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sizes;
    use crate::store::rig::with_pools;

    #[test]
    fn the_estimate_is_a_constant_in_ram_and_a_read_behind_those_that_wait_on_disk() {
        let disk = Medium::Disk { drive: 0 };
        let load = |read_us, reads_waiting, places| Load { read_us, reads_waiting, places };
        let cases = [
            (Medium::Ram, load(Some(9000), 9, 1), Some(RAM_US)),
            (Medium::Lost, load(None, 0, 1), None),
            (disk, load(None, 0, 0), Some(UNKNOWN_READ_US + RAM_US)),
            (disk, load(Some(200), 0, 32), Some(200 + RAM_US)),
            (disk, load(Some(200), 32, 32), Some(400 + RAM_US)),
            (disk, load(Some(200), 16, 32), Some(300 + RAM_US)),
            (disk, load(Some(200), 10, 0), Some(2200 + RAM_US)),
            (disk, load(Some(u64::MAX), u64::MAX, 1), Some(u64::MAX)),
        ];
        for (medium, load, wanted) in cases {
            assert_eq!(first_octet_us(medium, load), wanted, "{medium:?}, {load:?}");
        }
    }

    #[test]
    fn the_average_follows_what_reads_take_now() {
        let load = DriveLoad::default();
        assert_eq!(load.sample().read_us, None);
        load.handle_read(Duration::from_micros(100));
        assert_eq!(load.sample().read_us, Some(100));
        load.handle_read(Duration::from_micros(900));
        assert_eq!(load.sample().read_us, Some(200), "one slow read is an eighth of it");
        (0..60).for_each(|_| load.handle_read(Duration::from_micros(900)));
        assert!((890..=900).contains(&load.sample().read_us.unwrap()), "{load:?}");
        (0..200).for_each(|_| load.handle_read(Duration::from_nanos(50)));
        assert_eq!(load.sample().read_us, Some(1));
        load.handle_read(Duration::MAX);
        assert!(load.sample().read_us > Some(1_000_000));
    }

    #[test]
    fn an_object_says_what_of_it_is_where() {
        const KIB: u64 = 1 << 10;
        let sizes = Sizes {
            memory_bytes: 4 << 20,
            head_bytes: 256 * KIB,
            value_bytes_max: 8 << 20,
            pinned_share: 0.5,
            pool_bytes: vec![8 << 20],
            ..Sizes::small()
        };
        let store = with_pools(Store::new, sizes);
        store.put(b"key", &vec![7; 1 << 20], 0, 0).unwrap();
        let object = store.peek(b"key", 0).unwrap();
        let all = Location {
            resident_prefix_bytes: 1 << 20,
            ram_bytes: 1 << 20,
            disk_bytes: 0,
            first_octet_us: Some(RAM_US),
        };
        assert_eq!(store.location(&object), all);
        let push_out = || {
            let jobs = std::iter::from_fn(|| store.next_write(true));
            jobs.for_each(|job| store.handle_written(&job.segment, 0, Some([0; 4])));
            let want = crate::store::draft::Want {
                class: crate::store::segment::Class::Large,
                remaining: KIB << 8,
                head: false,
            };
            drop(std::iter::from_fn(|| store.fill(want).ok()).collect::<Vec<_>>());
        };
        let hold = store.hold(b"key", 0).unwrap();
        push_out();
        let found = store.location(&object);
        assert_eq!((found.resident_prefix_bytes, found.ram_bytes, found.disk_bytes), (256 * KIB, 256 * KIB, 768 * KIB));
        assert_eq!(found.first_octet_us, Some(RAM_US));
        assert_eq!(store.first_octet_us(&object, 256 * KIB), Some(UNKNOWN_READ_US + RAM_US));
        assert_eq!(store.first_octet_us(&object, 1 << 20), Some(RAM_US), "nothing is there, at once");
        drop(hold);
        push_out();
        store.drive_loads()[0].handle_read(Duration::from_micros(70));
        let found = store.location(&object);
        assert_eq!((found.resident_prefix_bytes, found.ram_bytes, found.disk_bytes), (0, 0, 1 << 20));
        assert_eq!(found.first_octet_us, Some(70 + RAM_US));
        // A part in the middle is back.
        let middle = &object.pieces()[1].segment;
        (0..2).for_each(|_| store.warm(middle, &[7; 256 << 10]));
        let found = store.location(&object);
        assert_eq!((found.resident_prefix_bytes, found.ram_bytes, found.disk_bytes), (0, 256 * KIB, 768 * KIB));
        assert_eq!(store.first_octet_us(&object, 300 * KIB), Some(RAM_US));
    }
}
