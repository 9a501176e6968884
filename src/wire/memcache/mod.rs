//! The memcache text protocol: requests, replies, and the framing of one ordered stream.
//!
//! Pure: no sockets, no clock, and no allocation but in the response writers, which append to the caller's buffer.
//! [`Parser`] reads one line, [`Conversation`] puts lines and bodies in order, [`response`] holds what is answered, and
//! [`number`] the decimal numbers on lines and in the values that `incr` and `decr` work on.
//!
//! Where memcached's releases answer differently, the reply that keeps the stream in step was taken: the body of a
//! refused storage line is swallowed whenever its length can be read, and errors are silent under `noreply`.

pub mod conversation;
pub mod number;
pub mod parse;
pub mod request;
pub mod response;

pub use conversation::{Conversation, Step};
pub use parse::{CloseReason, LINE_BYTES_MAX, Parsed, Parser, parse_line};
pub use request::{Command, Direction, KEY_BYTES_MAX, Keys, StoreHeader, StoreVerb};
