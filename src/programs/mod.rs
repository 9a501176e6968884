//! What peers ask of the store, pure: requests in, replies out, no sockets and no actors.
pub mod bulkhead;
pub mod memcache;
pub mod mount;
pub mod nfs;
pub mod rpc;
pub mod rpcbind;
pub mod service;
pub mod stream;
