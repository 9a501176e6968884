//! actors
pub mod disk_tail;
