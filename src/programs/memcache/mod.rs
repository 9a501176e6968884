//! The memcache program: the one engine behind every door that speaks memcache text.
//!
//! [`engine`] meets the store: one function a command. [`session`] is the life of one TCP or Unix-socket connection around
//! it: octets in, places of the reply stream out. [`output`] is that reply stream.

pub mod engine;
pub mod output;
pub mod session;
