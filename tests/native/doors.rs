//! A daemon whose native door and text door meet in one store, and what is asked of them over any fabric.
#![allow(dead_code, reason = "every test file is a crate of its own and uses a part of this")]

use std::time::Duration;

use bulkhead::client::{Client, Geometry, NativeClient, Options, Outcome, ServerUrl};

use super::common::daemon::{Builder, Daemon};
use super::common::pattern::Pattern;
use super::common::place::{Location, push_bodies, push_heads, reads};

/// Lengths where records, windows and pages end.
pub const SIZES: [u64; 12] = [0, 1, 191, 192, 193, 4096, 262_143, 262_144, 262_145, 1 << 20, 8 << 20, 20 << 20];

/// The smallest geometry, the default, the largest that is tried, and one between.
pub const GEOMETRIES: [Geometry; 4] =
    [geometry(2, 4, 2), geometry(8, 64, 3), geometry(256, 256, 4), geometry(64, 1024, 8)];

/// `slots` of the ring; windows of so many KiB.
pub const fn geometry(slots: u64, window_kib: u64, window_count: u32) -> Geometry {
    Geometry { ring_bytes: slots * 256, window_bytes: window_kib << 10, window_count }
}

/// A daemon whose connections have this geometry.
pub fn with_geometry(geometry: Geometry) -> Builder {
    Daemon::builder()
        .setting("NATIVE__RING", &format!("{}B", geometry.ring_bytes))
        .setting("NATIVE__WINDOW", &format!("{}KiB", geometry.window_bytes >> 10))
        .setting("NATIVE__WINDOWS", &geometry.window_count.to_string())
}

/// For a client on a machine that may be emulated and busy.
pub fn options(geometry: Geometry) -> Options {
    Options { connect_timeout: Duration::from_secs(60), geometry, ..Options::default() }
}

/// The first door of `daemon` whose URL begins with `scheme`.
pub fn door_of(daemon: &Daemon, scheme: &str) -> ServerUrl {
    let door = daemon.doors().iter().find(|door| door.starts_with(scheme));
    door.unwrap_or_else(|| panic!("no {scheme} among {:?}", daemon.doors())).parse().expect("a URL as printed")
}

/// A daemon with a native door.
pub struct Doors {
    pub daemon: Daemon,
    pub native: ServerUrl,
    pub text: ServerUrl,
}

impl Doors {
    /// Starts a daemon that listens at `native` too.
    pub fn open(native: &str, builder: Builder) -> Self {
        let daemon = builder.flags(&["--native", native]).start();
        let (native, text) = (door_of(&daemon, "native+"), door_of(&daemon, "memcache://"));
        Self { daemon, native, text }
    }

    pub fn native(&self, geometry: Geometry) -> NativeClient {
        connect(&self.native, geometry)
    }

    pub fn text(&self) -> Client {
        Client::connect(self.text.clone(), options(Geometry::default())).expect("the text door is open")
    }

    /// Values half on disk and wholly, through the native door and compared. The daemon's memory is `memory_bytes`.
    pub fn assert_values_come_from_disk(&self, memory_bytes: u64) {
        const LEN: u64 = (4 << 20) + 1;
        let mut native = self.native(Geometry::default());
        let mut filler = self.daemon.connect();
        for (location, push) in [(Location::HalfOut, push_bodies as fn(&mut _, _)), (Location::Disk, push_heads)] {
            let key = format!("{location:?}");
            native.put(&key, &mut Stream::new(3, LEN), LEN, 7, None).unwrap();
            push(&mut filler, memory_bytes * 7 / 4);
            let before = reads(&self.daemon);
            let mut copy = Stream::new(3, LEN);
            let info = native.get(&key, &mut copy).unwrap().expect("it is on disk");
            assert_eq!((info.len, info.flags, copy.at), (LEN, 7, LEN));
            assert_eq!(Location::between(before, reads(&self.daemon)), location);
        }
    }

    /// `connections` at once, each with `depth` requests in flight, sets and gets by turns.
    pub fn assert_all_are_answered(&self, geometry: Geometry, connections: usize, depths: &[u64]) {
        let mut clients: Vec<_> = (0..connections).map(|_| self.native(geometry)).collect();
        let len_of = |n: u64, index: usize| (n * 97 + index as u64) % 20_000;
        let mut buffer = vec![0; 20_000];
        for &depth in depths {
            // Everything is in flight on all of them before the first answer is waited for.
            for (index, client) in clients.iter_mut().enumerate() {
                for n in 0..depth {
                    let key = |n: u64| format!("{index}-{n}");
                    if n % 2 == 0 {
                        let len = len_of(n, index);
                        client.submit_set(key(n), Stream::new(n, len), len, 0, None).unwrap();
                    } else {
                        client.submit_get(key(n - 1)).unwrap();
                    }
                }
            }
            for (index, client) in clients.iter_mut().enumerate() {
                for n in 0..depth {
                    let outcome = client.wait_into(&mut buffer).unwrap();
                    if n % 2 == 0 {
                        assert_eq!(outcome, Outcome::Stored, "{connections} connections, {depth} deep");
                        continue;
                    }
                    let len = len_of(n - 1, index);
                    assert!(matches!(outcome, Outcome::Value(info) if info.len == len), "{outcome:?}");
                    Pattern(n - 1).check(0, &buffer[..len as usize], "in flight");
                }
            }
        }
    }
}

pub fn connect(native: &ServerUrl, geometry: Geometry) -> NativeClient {
    NativeClient::connect(native.clone(), options(geometry)).unwrap_or_else(|error| panic!("{native}: {error}"))
}

/// Puts a value by each door, and gets it by the other: streamed, so that it is never held whole.
pub fn cross(native: &mut NativeClient, text: &mut Client, len: u64) {
    native.put("by-native", &mut Stream::new(1, len), len, 0, None).unwrap();
    text.put("by-text", &mut Stream::new(2, len), len, 0, None).unwrap();
    for (key, pattern) in [("by-native", 1), ("by-text", 2)] {
        let (mut here, mut there) = (Stream::new(pattern, len), Stream::new(pattern, len));
        assert_eq!(native.get(key, &mut here).unwrap().unwrap().len, len);
        assert_eq!(text.get(key, &mut there).unwrap().unwrap().len, len);
        assert_eq!((here.at, there.at), (len, len), "{key}");
    }
}

/// The same from and into the caller's memory, each size twice and with flags of its own.
pub fn cross_whole(native: &mut NativeClient, text: &mut Client, sizes: &[u64]) {
    for &size in sizes {
        let value = Pattern(size).octets(0, size as usize);
        native.put("a", &mut &value[..], size, 5, None).unwrap();
        text.put("b", &mut &value[..], size, 6, None).unwrap();
        let mut copy = Vec::new();
        let info = text.get("a", &mut copy).unwrap().unwrap();
        assert!(info.flags == 5 && copy == value, "{size} octets by the native door");
        copy.fill(0);
        let info = native.get_into("b", &mut copy).unwrap().unwrap();
        assert!(info.flags == 6 && copy == value, "{size} octets by the text door");
    }
}

/// A pattern as a stream, so that a value of any length is never held whole.
pub struct Stream {
    pattern: Pattern,
    /// Octets read, or written.
    pub at: u64,
    len: u64,
}

impl Stream {
    pub fn new(pattern: u64, len: u64) -> Self {
        Self { pattern: Pattern(pattern), at: 0, len }
    }
}

impl std::io::Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = into.len().min(usize::try_from(self.len - self.at).unwrap_or(usize::MAX));
        self.pattern.fill(self.at, &mut into[..count]);
        self.at += count as u64;
        Ok(count)
    }
}

impl std::io::Write for Stream {
    fn write(&mut self, octets: &[u8]) -> std::io::Result<usize> {
        self.pattern.check(self.at, octets, "what came back");
        self.at += octets.len() as u64;
        Ok(octets.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
