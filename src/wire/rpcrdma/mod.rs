//! RPC-over-RDMA version 1 (RFC 8166) with RDMA-CM private data (RFC 8797), pure.
//!
//! ```text
//! a message, in one Send:
//!   | xid | vers = 1 | credit | proc | read list | write list | reply chunk |  payload stream …
//!   '--------------- transport stream (header) -----------------------------'  (RDMA_MSG alone)
//! ```
//! All numbers are words, big-endian. The payload stream is the RPC message, less the items that chunks carry: the
//! requester names memory of its own, the responder pulls read chunks from it and pushes results into write chunks, and
//! never shows memory itself. A call too long for a Send is pulled from the chunk at position zero; a reply too long is
//! pushed into the reply chunk; then the header goes alone (RDMA_NOMSG).
//!
//! [`header`] and [`chunk`] are the octets, [`private_data`] what is agreed on when connecting, [`credit`] who may send
//! how much. [`requester`] makes calls and judges replies; [`responder`] judges calls and places replies, and
//! [`duplicate`] remembers what was answered.
pub mod chunk;
pub mod credit;
pub mod duplicate;
pub mod header;
pub mod posts;
pub mod private_data;
pub mod pull;
pub mod requester;
pub mod responder;
pub mod session;

pub use crate::wire::native::descriptor::RemoteKey;
pub use crate::wire::onc_rpc::Xid;
