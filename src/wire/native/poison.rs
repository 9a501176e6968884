//! Why a connection cannot go on. The wire has no error record: the peer only sees the queue pair go away.

use super::record::RecordError;
use super::ring::RingError;
use thiserror::Error;

/// What the peer, or the fabric, did that leaves the byte stream beyond trust.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
#[non_exhaustive]
pub enum Poison {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("READY of fragment {found} where {expected} was expected")]
    ReadySequence { found: u64, expected: u64 },
    #[error("READY of {len} octets, and {max} were agreed on")]
    ReadyLength { len: u32, max: u32 },
    #[error("fragment {sequence} came while {max} before it were not released")]
    WindowOverrun { sequence: u64, max: u32 },
    #[error("RELEASE of fragment {found} after that of {last}")]
    ReleaseRegression { found: u64, last: u64 },
    #[error("RELEASE of fragment {found}, which was never sent; {sent} were")]
    ReleaseUnsent { found: u64, sent: u64 },
    #[error("the peer's count of consumed records went back from {last} to {found}")]
    CreditRegression { found: u64, last: u64 },
    #[error("the peer has consumed {found} records of {sent} sent")]
    CreditAhead { found: u64, sent: u64 },
    #[error("the control sequence is used up")]
    ControlExhausted,
    #[error("the bulk sequence is used up")]
    BulkExhausted,
    #[error("a completion of work request {found} came, and that of {expected} was due")]
    UnexpectedCompletion { found: u64, expected: u64 },
    #[error("octets in an INLINE where a body of {remaining} more was due by bulk")]
    InlineBody { remaining: u64 },
    #[error("READY where no body was due")]
    StrayReady,
    #[error("READY of {len} octets where {remaining} of the body were due")]
    ReadyBeyondBody { len: u32, remaining: u64 },
    #[error("a body is not followed by CR LF")]
    Trailer,
    #[error("a line of more than {max} octets")]
    LineTooLong { max: usize },
    #[error("an answer that fits no request")]
    StrayAnswer,
    #[error("an answer of the wrong shape")]
    AnswerShape,
}

impl Poison {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Ring(error) => error.cause(),
            Self::Record(error) => error.cause(),
            Self::ReadySequence { .. } => "ready_sequence",
            Self::ReadyLength { .. } => "ready_length",
            Self::WindowOverrun { .. } => "window_overrun",
            Self::ReleaseRegression { .. } => "release_regression",
            Self::ReleaseUnsent { .. } => "release_unsent",
            Self::CreditRegression { .. } => "credit_regression",
            Self::CreditAhead { .. } => "credit_ahead",
            Self::ControlExhausted => "control_exhausted",
            Self::BulkExhausted => "bulk_exhausted",
            Self::UnexpectedCompletion { .. } => "unexpected_completion",
            Self::InlineBody { .. } => "inline_body",
            Self::StrayReady => "stray_ready",
            Self::ReadyBeyondBody { .. } => "ready_beyond_body",
            Self::Trailer => "trailer",
            Self::LineTooLong { .. } => "line_too_long",
            Self::StrayAnswer => "stray_answer",
            Self::AnswerShape => "answer_shape",
        }
    }
}
