//! What can go wrong between a client and its server.

use std::io;

use super::ServerUrl;
use crate::error::Exit;

/// Why a command failed. A miss is no error: it is `None` or `false`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The text names no server this client can reach.
    #[error(
        "`{url}`: {reason}; servers are named memcache://HOST:PORT, memcache+unix:/path, \
         native+iwarp://HOST:PORT[?crc=off] or rpc+iwarp://HOST:PORT[?crc=off], and native+verbs://HOST:PORT or \
         rpc+verbs://HOST:PORT with the feature verbs"
    )]
    Url { url: String, reason: String },
    /// The key cannot be sent: 1 to 250 octets, none of them a space, CR, LF or NUL.
    #[error("the key ({len} octets) cannot be sent: want 1 to 250 octets without space, CR, LF and NUL")]
    Key { len: usize },
    /// The key cannot be sent over RPC: 1 to 1,024 octets.
    #[error("the key has {len} octets: want 1 to 1,024")]
    RpcKey { len: usize },
    /// No connection could be made.
    #[error("cannot reach {url}: {source}")]
    Unreachable { url: ServerUrl, source: io::Error },
    /// The connection broke, or stood still for longer than the time-out, before the reply was complete.
    #[error("lost {url}: {source}")]
    Lost { url: ServerUrl, source: io::Error },
    /// The server sent something that is no reply to what was asked.
    #[error("{url} breaks the protocol: {what}")]
    Protocol { url: ServerUrl, what: String },
    /// The server understood and said no.
    #[error("refused: {reply}")]
    Refused { reply: String },
    /// The caller's buffer is shorter than the value.
    #[error("the value has {len} octets, the buffer {capacity}")]
    TooLong { len: u64, capacity: usize },
    /// The caller's reader or writer failed; the server is not at fault.
    #[error("{source}")]
    Local { source: io::Error },
}

impl ClientError {
    /// The exit code of a command that ends with this error.
    pub const fn exit_code(&self) -> Exit {
        match self {
            Self::Url { .. } | Self::Key { .. } | Self::RpcKey { .. } => Exit::Usage,
            Self::Unreachable { .. } | Self::Lost { .. } => Exit::Unavailable,
            Self::Protocol { .. } => Exit::Protocol,
            Self::Refused { .. } | Self::TooLong { .. } | Self::Local { .. } => Exit::Refused,
        }
    }
}
