//! ONC RPC version 2 (RFC 5531): the headers in front of arguments and results, both ways.
//!
//! ```text
//! call:   xid | 0 | rpcvers = 2 | program | version | procedure | credential | verifier | arguments…
//! reply:  xid | 1 | 0 accepted  | verifier | 0 success           | results…
//!                                          | 1 PROG_UNAVAIL, 3 PROC_UNAVAIL, 4 GARBAGE_ARGS, 5 SYSTEM_ERR
//!                                          | 2 PROG_MISMATCH | low | high
//!         xid | 1 | 1 denied    | 0 RPC_MISMATCH | low | high
//!                               | 1 AUTH_ERROR   | auth_stat
//! ```
//!
//! A credential or verifier is | flavor | n <= 400 | n octets | roundup |. RPC-over-RDMA
//! delimits messages by itself; on a byte stream [`record`] does.

pub mod auth;
pub mod call;
pub mod payload;
pub mod record;
pub mod reply;

pub use auth::{AUTH_SYS, AuthSys, Credential, OpaqueAuth};
pub use call::{CallError, CallFault, CallHeader};
pub use payload::{Item, Part, Payload, PayloadWriter};
pub use reply::{AcceptStatus, AuthStatus, Denial, Reply, ReplyHeader, Versions};

/// The only version of ONC RPC there is on the wire.
pub const RPC_VERSION: u32 = 2;

/// Transaction identifier: the same in a call and its reply. Equal or not is all there is to it (RFC 5531 §9).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Xid(pub u32);

/// Which way a message goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MessageType {
    Call,
    Reply,
}

impl MessageType {
    /// That of the message `octets` begin. `None` if they are too few or it is neither.
    pub fn of(octets: &[u8]) -> Option<Self> {
        match octets.get(4..)?.first_chunk()? {
            [0, 0, 0, 0] => Some(Self::Call),
            [0, 0, 0, 1] => Some(Self::Reply),
            _ => None,
        }
    }

    const fn word(self) -> u32 {
        match self {
            Self::Call => 0,
            Self::Reply => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_a_call_or_a_reply_by_its_second_word() {
        assert_eq!(MessageType::of(&[9, 9, 9, 9, 0, 0, 0, 0, 7]), Some(MessageType::Call));
        assert_eq!(MessageType::of(&[9, 9, 9, 9, 0, 0, 0, 1]), Some(MessageType::Reply));
        assert_eq!(MessageType::of(&[9, 9, 9, 9, 0, 0, 0, 2]), None);
        assert_eq!(MessageType::of(&[9, 9, 9, 9, 1, 0, 0, 0]), None);
        assert_eq!(MessageType::of(&[9, 9, 9, 9, 0, 0, 0]), None);
        assert_eq!(MessageType::of(&[]), None);
    }
}
