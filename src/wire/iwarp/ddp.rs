//! DDP segment headers (RFC 5041 §4).
//!
//! ```text
//! control:   0x80 tagged  0x40 last  0x3c reserved  0x03 version = 1
//! tagged:    control (1) | RDMAP (1) | STag (4) | tagged offset (8)
//! untagged:  control (1) | RDMAP (1) | RDMAP's own (4) | queue (4) | MSN (4) | message offset (4)
//! ```

pub use crate::wire::seq::Msn;

/// Octets of a tagged header.
pub const TAGGED_BYTES: usize = 14;
/// Octets of an untagged header.
pub const UNTAGGED_BYTES: usize = 18;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const VERSION_MASK: u8 = 0x03;
const VERSION: u8 = 1;

/// What every segment of a message that names its target has in front.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tagged {
    pub last: bool,
    /// RDMAP's control octet.
    pub control: u8,
    pub stag: u32,
    /// Tagged offset: where in the target's address space the payload goes.
    pub offset: u64,
}

/// What every segment of a message to a queue has in front.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Untagged {
    pub last: bool,
    /// RDMAP's control octet.
    pub control: u8,
    /// Four octets that belong to RDMAP: the STag to invalidate, or zero.
    pub own: u32,
    pub queue: u32,
    pub msn: Msn,
    /// Where in its message the payload begins.
    pub offset: u32,
}

/// Either header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Header {
    Tagged(Tagged),
    Untagged(Untagged),
}

/// Why a segment has no header.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum HeaderError {
    #[error("{0} octets are too few for a segment header")]
    TooShort(usize),
    #[error("DDP version {version}")]
    Version { tagged: bool, version: u8 },
}

impl Header {
    /// Reads the header of a segment; gives the payload too.
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn decode(segment: &[u8]) -> Result<(Self, &[u8]), HeaderError> {
        let too_short = HeaderError::TooShort(segment.len());
        let first = *segment.first().ok_or(too_short)?;
        let tagged = first & TAGGED != 0;
        let version = first & VERSION_MASK;
        if version != VERSION {
            return Err(HeaderError::Version { tagged, version });
        }
        let last = first & LAST != 0;
        if tagged {
            let (h, payload) = segment.split_first_chunk::<TAGGED_BYTES>().ok_or(too_short)?;
            let offset = u64::from_be_bytes([h[6], h[7], h[8], h[9], h[10], h[11], h[12], h[13]]);
            Ok((Self::Tagged(Tagged { last, control: h[1], stag: word(h, 2), offset }), payload))
        } else {
            let (h, payload) = segment.split_first_chunk::<UNTAGGED_BYTES>().ok_or(too_short)?;
            let header = Untagged {
                last,
                control: h[1],
                own: word(h, 2),
                queue: word(h, 6),
                msn: Msn(word(h, 10)),
                offset: word(h, 14),
            };
            Ok((Self::Untagged(header), payload))
        }
    }
}

fn word(octets: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
}

impl Tagged {
    /// The octets of the header.
    pub fn encode(&self) -> [u8; TAGGED_BYTES] {
        let mut out = [0; TAGGED_BYTES];
        out[0] = TAGGED | VERSION | if self.last { LAST } else { 0 };
        out[1] = self.control;
        out[2..6].copy_from_slice(&self.stag.to_be_bytes());
        out[6..14].copy_from_slice(&self.offset.to_be_bytes());
        out
    }
}

impl Untagged {
    /// The octets of the header.
    pub fn encode(&self) -> [u8; UNTAGGED_BYTES] {
        let mut out = [0; UNTAGGED_BYTES];
        out[0] = VERSION | if self.last { LAST } else { 0 };
        out[1] = self.control;
        for (at, value) in [(2, self.own), (6, self.queue), (10, self.msn.0), (14, self.offset)] {
            out[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_trip_and_reserved_bits_are_not_looked_at() {
        let tagged = Tagged { last: true, control: 0x40, stag: 0x0102_0304, offset: 0x1122_3344_5566_7788 };
        let mut octets = tagged.encode();
        octets[0] |= 0x3c;
        assert_eq!(Header::decode(&octets), Ok((Header::Tagged(tagged), &[][..])));
        let untagged = Untagged { last: false, control: 0x43, own: 7, queue: 0, msn: Msn(u32::MAX), offset: 9 };
        let octets = [&untagged.encode()[..], b"xyz"].concat();
        assert_eq!(Header::decode(&octets), Ok((Header::Untagged(untagged), &b"xyz"[..])));
        assert_eq!(untagged.msn.next(), Msn(0));
    }

    #[test]
    fn a_short_segment_has_no_header() {
        assert_eq!(Header::decode(&[]), Err(HeaderError::TooShort(0)));
        assert_eq!(Header::decode(&[0x81; 13]), Err(HeaderError::TooShort(13)));
        assert_eq!(Header::decode(&[0x01; 17]), Err(HeaderError::TooShort(17)));
        assert_eq!(Header::decode(&[0x00; 18]), Err(HeaderError::Version { tagged: false, version: 0 }));
    }
}
