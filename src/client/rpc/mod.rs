//! RPC over RDMA, the requester's side.

pub mod port;
