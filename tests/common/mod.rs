//! Starts the real daemon and talks to it over real sockets.
//!
//! [`Daemon`] is one `bulkhead serve` on free ports with a pool of its own that dies with it; [`Client`] is a blocking
//! socket that says exactly what it is told and compares exactly what it gets; [`Pattern`] is a value of any length that
//! is never held whole.
#![allow(dead_code, unused_imports, reason = "every test file is a crate of its own and uses a part of this")]

pub mod client;
pub mod daemon;
pub mod pattern;
pub mod place;

pub use client::Client;
pub use daemon::{Builder, Daemon};
pub use pattern::Pattern;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// Starts a daemon with [`Builder`]'s defaults and `flags`.
pub fn serve(flags: &[&str]) -> Daemon {
    Daemon::builder().flags(flags).start()
}
