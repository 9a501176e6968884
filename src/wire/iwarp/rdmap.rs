//! RDMAP operations and Terminate (RFC 5040 §4).
//!
//! ```text
//! control octet:  0xc0 version = 1  0x30 reserved  0x0f operation
//! Read Request:   sink STag (4) | sink offset (8) | length (4) | source STag (4) | source offset (8)
//! Terminate:      layer, type (1) | code (1) | 0x80 M 0x40 D 0x20 R (1) | reserved (1)
//!                 | if D: segment length (2), DDP header (14 or 18) | if R: Read Request (28)
//! ```

use std::fmt;

const VERSION_MASK: u8 = 0xc0;
const VERSION: u8 = 0x40;

/// Octets of a Read Request's payload.
pub const READ_REQUEST_BYTES: usize = 28;

/// What a message does.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum Operation {
    Write = 0,
    ReadRequest = 1,
    ReadResponse = 2,
    Send = 3,
    SendInvalidate = 4,
    SendSolicited = 5,
    SendSolicitedInvalidate = 6,
    Terminate = 7,
}

/// Why a control octet names no operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum OperationError {
    #[error("RDMAP version {0}")]
    Version(u8),
    #[error("RDMAP operation {0}")]
    Unknown(u8),
}

impl Operation {
    /// Reads the control octet.
    ///
    /// # Errors
    /// [`OperationError`]; Immediate Data and atomics (RFC 7306) are unknown here.
    pub fn decode(control: u8) -> Result<Self, OperationError> {
        if control & VERSION_MASK != VERSION {
            return Err(OperationError::Version(control >> 6));
        }
        Ok(match control & 0x0f {
            0 => Self::Write,
            1 => Self::ReadRequest,
            2 => Self::ReadResponse,
            3 => Self::Send,
            4 => Self::SendInvalidate,
            5 => Self::SendSolicited,
            6 => Self::SendSolicitedInvalidate,
            7 => Self::Terminate,
            unknown => return Err(OperationError::Unknown(unknown)),
        })
    }

    /// The control octet.
    pub const fn control(self) -> u8 {
        VERSION | self as u8
    }

    /// The Send with these properties.
    pub const fn send(solicited: bool, invalidates: bool) -> Self {
        match (solicited, invalidates) {
            (false, false) => Self::Send,
            (false, true) => Self::SendInvalidate,
            (true, false) => Self::SendSolicited,
            (true, true) => Self::SendSolicitedInvalidate,
        }
    }

    /// Whether its segments name their target.
    pub const fn is_tagged(self) -> bool {
        matches!(self, Self::Write | Self::ReadResponse)
    }

    /// The queue of an untagged operation.
    pub const fn queue(self) -> u32 {
        match self {
            Self::ReadRequest => 1,
            Self::Terminate => 2,
            _ => 0,
        }
    }

    /// Whether it is a Send that takes a key out of service.
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }

    /// Whether it is a Send that asks for attention.
    pub const fn is_solicited(self) -> bool {
        matches!(self, Self::SendSolicited | Self::SendSolicitedInvalidate)
    }
}

/// A Read Request's payload.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReadRequest {
    pub sink_stag: u32,
    pub sink_offset: u64,
    /// Octets wanted.
    pub len: u32,
    pub source_stag: u32,
    pub source_offset: u64,
}

impl ReadRequest {
    /// Reads the payload.
    pub fn decode(p: &[u8; READ_REQUEST_BYTES]) -> Self {
        let word = |at: usize| u32::from_be_bytes([p[at], p[at + 1], p[at + 2], p[at + 3]]);
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        Self { sink_stag: word(0), sink_offset: long(4), len: word(12), source_stag: word(16), source_offset: long(20) }
    }

    /// The payload.
    pub fn encode(&self) -> [u8; READ_REQUEST_BYTES] {
        let mut out = [0; READ_REQUEST_BYTES];
        out[..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        out[4..12].copy_from_slice(&self.sink_offset.to_be_bytes());
        out[12..16].copy_from_slice(&self.len.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        out[20..].copy_from_slice(&self.source_offset.to_be_bytes());
        out
    }
}

/// Why a stream is ended: layer, type and code (RFC 5040 §4.8, RFC 5041 §7.2, RFC 5044 §8, RFC 6581 §8).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Reason {
    pub layer: u8,
    pub kind: u8,
    pub code: u8,
}

impl Reason {
    pub const LOCAL: Self = Self::new(0, 0, 0);
    pub const READ_STAG: Self = Self::new(0, 1, 0);
    pub const READ_BOUNDS: Self = Self::new(0, 1, 1);
    pub const READ_RIGHTS: Self = Self::new(0, 1, 2);
    pub const READ_WRAP: Self = Self::new(0, 1, 4);
    pub const CANNOT_INVALIDATE: Self = Self::new(0, 1, 9);
    pub const RDMAP_VERSION: Self = Self::new(0, 2, 5);
    pub const OPERATION: Self = Self::new(0, 2, 6);
    pub const UNSPECIFIED: Self = Self::new(0, 2, 0xff);
    pub const TAGGED_STAG: Self = Self::new(1, 1, 0);
    pub const TAGGED_BOUNDS: Self = Self::new(1, 1, 1);
    pub const TAGGED_WRAP: Self = Self::new(1, 1, 3);
    pub const TAGGED_VERSION: Self = Self::new(1, 1, 4);
    pub const QUEUE: Self = Self::new(1, 2, 1);
    pub const NO_BUFFER: Self = Self::new(1, 2, 2);
    pub const MSN: Self = Self::new(1, 2, 3);
    pub const MESSAGE_OFFSET: Self = Self::new(1, 2, 4);
    pub const TOO_LONG: Self = Self::new(1, 2, 5);
    pub const UNTAGGED_VERSION: Self = Self::new(1, 2, 6);
    pub const CRC: Self = Self::new(2, 0, 2);
    pub const LENGTH: Self = Self::new(2, 0, 3);
    pub const READ_DEPTH: Self = Self::new(2, 0, 6);
    pub const NO_READY_FRAME: Self = Self::new(2, 0, 7);

    const fn new(layer: u8, kind: u8, code: u8) -> Self {
        Self { layer, kind, code }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layer = match self.layer {
            0 => "RDMAP",
            1 => "DDP",
            2 => "MPA",
            _ => "unknown layer",
        };
        write!(f, "{layer} error, type {} code {}", self.kind, self.code)
    }
}

impl Reason {
    /// Whether an RFC gives it a meaning.
    const fn is_defined(self) -> bool {
        match (self.layer, self.kind) {
            (0 | 1, 0) => true,
            (0, 1) => matches!(self.code, 0..=4 | 9 | 0xff),
            (0, 2) => matches!(self.code, 5..=9 | 0xff),
            (1, 1) => self.code <= 4,
            (1, 2) => matches!(self.code, 1..=6),
            (2, 0) => matches!(self.code, 1..=7),
            _ => false,
        }
    }
}

/// The first four octets of a Terminate, which say why. For the log alone: never act on it.
///
/// Linux `siw` on a little-endian machine writes the octets of layer and type, and of the flags, with their bit fields in
/// reverse: the layer in the low half, M, D and R as 0x01, 0x02 and 0x04. Without flags some reasons mean one thing as the
/// RFC has them and another as siw does; then both are told.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct TerminateHead(pub [u8; 4]);

impl TerminateHead {
    /// As RFC 5040 §4.8 has it.
    const fn as_specified(self) -> Reason {
        Reason::new(self.0[0] >> 4, self.0[0] & 0x0f, self.0[1])
    }

    /// As siw has it.
    const fn as_siw(self) -> Reason {
        Reason::new(self.0[0] & 0x0f, self.0[0] >> 4, self.0[1])
    }

    /// Whether its flags can only be siw's.
    const fn is_siw(self) -> bool {
        self.0[2] & 0xe0 == 0 && self.0[2] & 0x07 != 0
    }

    /// The likely reason, and the other one if that may be meant too.
    pub fn readings(self) -> (Reason, Option<Reason>) {
        let (specified, siw) = (self.as_specified(), self.as_siw());
        match (specified.is_defined(), siw.is_defined()) {
            _ if self.is_siw() => (siw, None),
            _ if self.0[2] & 0xe0 != 0 || specified == siw => (specified, None),
            (true, true) => (specified, Some(siw)),
            (false, true) => (siw, None),
            (_, false) => (specified, None),
        }
    }

    /// Whether the culprit's segment length and DDP header follow, and whether its Read Request does.
    const fn follows(self) -> (bool, bool) {
        let (header, request) = if self.is_siw() { (0x02, 0x04) } else { (0x40, 0x20) };
        (self.0[2] & header != 0, self.0[2] & request != 0)
    }
}

impl fmt::Display for TerminateHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (reason, other) = self.readings();
        reason.fmt(f)?;
        if let Some(other) = other {
            write!(f, ", or {other} if it is Linux siw")?;
        }
        let [a, b, c, d] = self.0;
        write!(f, " (octets {a:02x} {b:02x} {c:02x} {d:02x})")
    }
}

/// A Terminate message.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Terminate {
    pub reason: Reason,
    /// What offended: the length of its segment and its DDP header, for most errors.
    pub culprit: Option<Culprit>,
}

/// The segment a Terminate speaks of.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Culprit {
    /// ULPDU octets.
    pub segment_len: u16,
    /// Its DDP header, 14 or 18 octets.
    pub header: Vec<u8>,
    /// Its Read Request.
    pub read_request: Option<[u8; READ_REQUEST_BYTES]>,
}

impl Terminate {
    /// One without a culprit.
    pub const fn bare(reason: Reason) -> Self {
        Self { reason, culprit: None }
    }

    /// Reads the payload. Tolerant: the details are for the log, whatever they are, the connection is over.
    /// `None` below four octets.
    pub fn decode(payload: &[u8]) -> Option<Self> {
        let (head, rest) = payload.split_first_chunk::<4>()?;
        let head = TerminateHead(*head);
        let (reason, _) = head.readings();
        let (has_header, has_request) = head.follows();
        let culprit = rest.split_first_chunk::<2>().filter(|_| has_header).and_then(|(len, rest)| {
            let header_len = if rest.first()? & 0x80 != 0 { 14 } else { 18 };
            let (header, rest) = rest.split_at_checked(header_len)?;
            let read_request = if has_request { rest.first_chunk().copied() } else { None };
            Some(Culprit { segment_len: u16::from_be_bytes(*len), header: header.to_vec(), read_request })
        });
        Some(Self { reason, culprit })
    }

    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.reason.layer << 4 | self.reason.kind, self.reason.code, 0, 0];
        if let Some(culprit) = &self.culprit {
            out[2] = 0xc0;
            out.extend_from_slice(&culprit.segment_len.to_be_bytes());
            out.extend_from_slice(&culprit.header);
            if let Some(request) = &culprit.read_request {
                out[2] |= 0x20;
                out.extend_from_slice(request);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_implemented_has_a_name() {
        for operation in 0..8 {
            assert_eq!(Operation::decode(0x40 | operation).map(Operation::control), Ok(0x40 | operation));
            assert!(Operation::decode(0x70 | operation).is_ok(), "reserved bits are ignored");
        }
        for operation in 8..16 {
            assert_eq!(Operation::decode(0x40 | operation), Err(OperationError::Unknown(operation)));
        }
        assert_eq!(Operation::decode(0x83), Err(OperationError::Version(2)));
    }

    /// What siw of Linux 6.1.192 sent (`docs/interop.md`), and what it meant.
    #[test]
    fn a_terminate_of_siw_is_understood_though_its_bit_fields_are_reversed() {
        for (head, reason, other) in [
            ([0x02, 2, 0, 0], Reason::CRC, None),
            ([0x02, 3, 0, 0], Reason::LENGTH, None),
            ([0x11, 0, 3, 0], Reason::TAGGED_STAG, None),
            ([0x11, 1, 3, 0], Reason::TAGGED_BOUNDS, None),
            ([0x01, 0, 3, 0], Reason::new(1, 0, 0), None),
            ([0x10, 0, 7, 0], Reason::READ_STAG, None),
            ([0x10, 1, 7, 0], Reason::READ_BOUNDS, None),
            ([0x21, 2, 3, 0], Reason::NO_BUFFER, None),
            ([0x21, 6, 0, 0], Reason::UNTAGGED_VERSION, None),
            ([0x11, 4, 0, 0], Reason::TAGGED_VERSION, None),
            ([0x20, 5, 0, 0], Reason::new(2, 0, 5), Some(Reason::RDMAP_VERSION)),
            ([0x20, 9, 3, 0], Reason::new(0, 2, 9), None),
            ([0x20, 6, 0, 0], Reason::READ_DEPTH, Some(Reason::OPERATION)),
            // As the RFC has them.
            ([0x10, 0, 0xc0, 0], Reason::new(1, 0, 0), None),
            ([0x01, 0, 0xe0, 0], Reason::READ_STAG, None),
            ([0x12, 2, 0xc0, 0], Reason::NO_BUFFER, None),
            ([0x20, 2, 0, 0], Reason::CRC, None),
            ([0xff, 0xff, 0, 0], Reason::new(15, 15, 0xff), None),
        ] {
            assert_eq!(TerminateHead(head).readings(), (reason, other), "{head:02x?}");
        }
        assert_eq!(
            TerminateHead([0x20, 6, 0, 0]).to_string(),
            "MPA error, type 0 code 6, or RDMAP error, type 2 code 6 if it is Linux siw (octets 20 06 00 00)"
        );
        let read_refused = [&[0x10, 1, 7, 0, 0, 0, 0x41, 0x41][..], &[5; 16], &[9; 28]].concat();
        let culprit = Terminate::decode(&read_refused).and_then(|terminate| terminate.culprit).expect("quoted");
        assert_eq!((culprit.segment_len, culprit.header.len(), culprit.read_request), (0, 18, Some([9; 28])));
    }

    #[test]
    fn a_terminate_survives_the_trip_and_any_cut_of_it_is_tolerated() {
        let culprit =
            Culprit { segment_len: 46, header: [&[0x41, 0x41][..], &[0; 16]].concat(), read_request: Some([9; 28]) };
        let terminate = Terminate { reason: Reason::READ_BOUNDS, culprit: Some(culprit) };
        let octets = terminate.encode();
        assert_eq!(Terminate::decode(&octets), Some(terminate));
        for len in 0..octets.len() {
            assert_eq!(
                Terminate::decode(&octets[..len]).map(|cut| cut.reason),
                (len >= 4).then_some(Reason::READ_BOUNDS)
            );
        }
    }
}
