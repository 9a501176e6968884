//! A bell that is rung only while somebody listens: what a writer short of space leaves behind.

use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// Giving space back is on every request's path and waiting for it is rare, so the giver pays one atomic load.
#[derive(Debug, Default)]
pub struct Wake {
    wanted: AtomicBool,
    bell: Notify,
}

impl Wake {
    /// Asks for the next [`Wake::signal`] to ring. Look once more after this call: what happened in between rings
    /// nothing.
    pub fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Somebody asked, and nothing became free since.
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst)
    }

    /// Something became free. Rings if anyone asked since the last ring.
    pub fn signal(&self) {
        if self.wanted.load(Ordering::SeqCst) && self.wanted.swap(false, Ordering::SeqCst) {
            self.bell.notify_one();
        }
    }

    /// Rings whether or not anyone asked.
    pub fn ring(&self) {
        self.bell.notify_one();
    }

    /// Completes at the next ring, or at once if it rang since the last call.
    pub async fn rung(&self) {
        self.bell.notified().await;
    }
}
