//! Memory that moves: registered regions today, queue pairs between peers as the other doors arrive.
pub mod region;
pub mod staging;
