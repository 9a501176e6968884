#![deny(unsafe_code)]
#[cfg(test)]
extern crate self as bulkhead; // test code shared with tests/ names the crate so

pub mod actors;
pub mod buddy;
pub mod client;
pub mod config;
pub mod error;
pub mod fabric;
pub mod machine;
pub mod metrics;
pub mod programs;
pub mod store;
pub mod wake;
pub mod wire;
