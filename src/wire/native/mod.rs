//! Native version 3: one ordered octet stream each way between two queue pairs, over a control ring and bulk windows.
//!
//! Pure: memory of a peer is reached through [`ring::RingMemory`], time is told, and what has to be posted is given out.
//!
//! | part | what it is |
//! |---|---|
//! | [`descriptor`] | what each side tells the other when it connects; geometry |
//! | [`ring`], [`record`] | slots, commit words, control records |
//! | [`credit`] | free slots of the peer's ring |
//! | [`window`] | the peer's windows, our leases, our slots |
//! | [`intake`] | the one way in: ring and windows as what they bring |
//! | [`egress`] | the one way out: places in order, posts |
//! | [`stream`] | the octet stream in and out: text and windows, text and values |
//! | [`conversation`], [`requester`] | the server's and the client's half of memcache over that stream |
//! | [`session`] | the life of a server's side: how far ahead, and why it ends |
//! | [`endpoint`] | one side, whole |
//! | [`poison`] | why a connection cannot go on |

pub mod conversation;
pub mod credit;
pub mod descriptor;
pub mod egress;
pub mod endpoint;
pub mod intake;
pub mod poison;
pub mod record;
pub mod requester;
pub mod ring;
pub mod session;
pub mod stream;
pub mod window;
