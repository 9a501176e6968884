//! Native version 3: one ordered octet stream each way between two queue pairs, over a control ring and bulk windows.
//!
//! Pure: memory of a peer is reached through [`ring::RingMemory`], time is told, and what has to be posted is given out.
//!
//! | part | what it is |
//! |---|---|
//! | [`descriptor`] | what each side tells the other when it connects; geometry |
//! | [`ring`], [`record`] | slots, commit words, control records |

pub mod descriptor;
pub mod record;
pub mod ring;
