//! Time as the store sees it.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Time as the store sees it: seconds of the Unix epoch that never run backwards.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    start_unix_ms: u64,
}

impl Default for Clock {
    fn default() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { start: Instant::now(), start_unix_ms: since.as_millis() as u64 }
    }
}

impl Clock {
    /// Milliseconds of the epoch.
    pub fn now_ms(&self) -> u64 {
        self.start_unix_ms + self.start.elapsed().as_millis() as u64
    }

    /// Nanoseconds of the epoch.
    pub fn now_ns(&self) -> u64 {
        self.start_unix_ms * 1_000_000 + self.start.elapsed().as_nanos() as u64
    }

    /// Seconds of the epoch.
    pub fn now(&self) -> u64 {
        self.now_ms() / 1000
    }
}
