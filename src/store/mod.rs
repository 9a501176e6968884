//! store
pub mod pool;
pub mod uring;
