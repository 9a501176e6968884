//! The memcache program: the one engine behind every door that speaks memcache text.
//!
//! [`engine`] meets the store: one function a command. [`exchange`] is what lies between a command and its answer, the
//! waits for space among it, the same for every door. [`session`] is the life of one TCP or Unix-socket connection around
//! both: octets in, places of the reply stream out. [`output`] is that reply stream.

pub mod engine;
pub mod exchange;
pub mod output;
pub mod session;
