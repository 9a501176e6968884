#![deny(unsafe_code)]
pub mod actors;
pub mod client;
pub mod config;
pub mod error;
pub mod fabric;
pub mod metrics;
pub mod programs;
pub mod store;
pub mod wire;
