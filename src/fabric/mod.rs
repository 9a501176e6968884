//! fabric
pub mod staging;
