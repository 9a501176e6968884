//! Control records: the only thing that lies in a ring.
//!
//! ```text
//!  INLINE   | 1 | 1..191 octets of the byte stream |
//!  READY    | 2 | 0 | 0 0 | length, LE32 | bulk sequence, LE64 |
//!  RELEASE  | 3 | 0 0 0 0 0 0 0          | bulk sequence, LE64 |
//! ```

use super::ring::RECORD_BYTES_MAX;
use crate::wire::seq::BulkSequence;
use std::num::NonZeroU32;
use thiserror::Error;

/// Most octets of the byte stream in one record.
pub const INLINE_BYTES_MAX: usize = RECORD_BYTES_MAX - 1;
/// Octets of a READY and of a RELEASE.
const BULK_RECORD_BYTES: usize = 16;

const INLINE: u8 = 1;
const READY: u8 = 2;
const RELEASE: u8 = 3;

/// One control record.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Record<'a> {
    /// The next octets of the byte stream, 1..=191.
    Inline(&'a [u8]),
    /// The next `len` octets of it lie in the window of `sequence`.
    Ready { sequence: BulkSequence, len: NonZeroU32 },
    /// The sender of this has no more use for windows up to that of `sequence`.
    Release { sequence: BulkSequence },
}

impl<'a> Record<'a> {
    /// Reads a record that was copied out of the ring.
    ///
    /// # Errors
    /// What is wrong with it; the connection cannot go on.
    pub fn decode(octets: &'a [u8]) -> Result<Self, RecordError> {
        let len = octets.len();
        match octets {
            [INLINE, payload @ ..] if (1..=INLINE_BYTES_MAX).contains(&payload.len()) => Ok(Self::Inline(payload)),
            [READY, flags, r0, r1, l0, l1, l2, l3, sequence @ ..] => {
                let sequence = sequence_of(sequence, len)?;
                if [*flags, *r0, *r1] != [0; 3] {
                    return Err(RecordError::Reserved);
                }
                let len = NonZeroU32::new(u32::from_le_bytes([*l0, *l1, *l2, *l3])).ok_or(RecordError::Zero)?;
                Ok(Self::Ready { sequence: BulkSequence::new(sequence).ok_or(RecordError::Zero)?, len })
            }
            [RELEASE, reserved @ .., _, _, _, _, _, _, _, _] => {
                let sequence = sequence_of(&octets[len - 8..], len)?;
                if reserved.iter().any(|&octet| octet != 0) {
                    return Err(RecordError::Reserved);
                }
                Ok(Self::Release { sequence: BulkSequence::new(sequence).ok_or(RecordError::Zero)? })
            }
            [INLINE | READY | RELEASE, ..] => Err(RecordError::Length(len)),
            [kind, ..] => Err(RecordError::Type(*kind)),
            [] => Err(RecordError::Length(0)),
        }
    }

    /// Writes the record to the front of `out` and says how long it is, 2..=192 octets.
    ///
    /// # Panics
    /// If an INLINE has no octets or more than 191.
    pub fn encode(&self, out: &mut [u8; RECORD_BYTES_MAX]) -> usize {
        match self {
            Self::Inline(payload) => {
                assert!((1..=INLINE_BYTES_MAX).contains(&payload.len()), "an INLINE of {} octets", payload.len());
                out[0] = INLINE;
                out[1..=payload.len()].copy_from_slice(payload);
                1 + payload.len()
            }
            Self::Ready { sequence, len } => {
                out[..4].copy_from_slice(&[READY, 0, 0, 0]);
                out[4..8].copy_from_slice(&len.get().to_le_bytes());
                out[8..16].copy_from_slice(&sequence.get().to_le_bytes());
                BULK_RECORD_BYTES
            }
            Self::Release { sequence } => {
                out[..8].copy_from_slice(&[RELEASE, 0, 0, 0, 0, 0, 0, 0]);
                out[8..16].copy_from_slice(&sequence.get().to_le_bytes());
                BULK_RECORD_BYTES
            }
        }
    }
}

fn sequence_of(octets: &[u8], record_bytes: usize) -> Result<u64, RecordError> {
    match octets.try_into() {
        Ok(octets) if record_bytes == BULK_RECORD_BYTES => Ok(u64::from_le_bytes(octets)),
        _ => Err(RecordError::Length(record_bytes)),
    }
}

/// Why a record is refused.
#[derive(Clone, Copy, Debug, Eq, Error, Hash, PartialEq)]
#[non_exhaustive]
pub enum RecordError {
    #[error("a control record of type {0}")]
    Type(u8),
    #[error("a control record of {0} octets is too short or too long for its type")]
    Length(usize),
    #[error("a control record with a reserved octet that is not zero")]
    Reserved,
    #[error("a READY of no octets, or a bulk sequence of zero")]
    Zero,
}

impl RecordError {
    /// One word for counting.
    pub const fn cause(&self) -> &'static str {
        match self {
            Self::Type(_) => "record_type",
            Self::Length(_) => "frame_length",
            Self::Reserved => "record_reserved",
            Self::Zero => "record_zero",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inline_record_carries_one_to_one_hundred_and_ninety_one_octets() {
        for len in 0..=194_usize {
            let record = [&[INLINE][..], &vec![b'x'; len]].concat();
            let decoded = Record::decode(&record);
            assert_eq!(decoded.is_ok(), (1..=191).contains(&len), "{len} octets: {decoded:?}");
        }
    }

    #[test]
    fn every_reserved_octet_must_be_zero() {
        for (kind, reserved) in [(READY, 1..4), (RELEASE, 1..8)] {
            for at in reserved {
                let mut record = [1_u8; 16];
                record[0] = kind;
                record[1..8].fill(0);
                record[4] = u8::from(kind == READY);
                record[at] = 0x80;
                assert_eq!(Record::decode(&record), Err(RecordError::Reserved), "type {kind}, octet {at}");
            }
        }
    }

    #[test]
    fn bulk_records_have_exactly_sixteen_octets() {
        for kind in [READY, RELEASE] {
            for len in (1..16).chain(17..=192) {
                let mut record = vec![0; len];
                record[0] = kind;
                assert_eq!(Record::decode(&record), Err(RecordError::Length(len)), "type {kind}");
            }
        }
    }
}
