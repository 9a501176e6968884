//! Protocols, pure: no sockets, no clock, no actors, no unsafe.
pub mod codec;
pub mod iwarp;
pub mod memcache;
pub mod native;
pub mod onc_rpc;
pub mod rpcrdma;
pub mod seq;
