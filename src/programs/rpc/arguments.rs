//! Arguments, some of which may be in read chunks.
//!
//! ```text
//! unreduced   | header | words | length n | item: n octets | roundup | words |
//!             0                           ^ Position (RFC 8166 §3.4.5)
//! stream      | header | words | length n |                            words |
//! read chunk                              | n octets, or n and roundup |
//! ```

use super::{Data, Eligible};
use crate::wire::codec::{Reader, XdrError, roundup_bytes};
use thiserror::Error;

/// A part of the stream that came in a read chunk, all segments of one position together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Reduced {
    /// Of its first octet in the unreduced stream, which begins with the xid.
    pub position: u64,
    /// Octets.
    pub len: u64,
}

/// A call message: what came inline (or in a position-zero chunk), and the read chunks beside it in order of position.
#[derive(Clone, Copy, Debug)]
pub struct Arguments<'a> {
    /// The reduced payload stream, xid first.
    pub stream: &'a [u8],
    pub chunks: &'a [Reduced],
}

/// Why arguments were not understood.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum ArgumentFault {
    #[error("arguments: {0}")]
    Xdr(#[from] XdrError),
    /// Neither the item nor the item and its roundup (RFC 8166 §3.4.5.2).
    #[error("the read chunk at {position} has {chunk_bytes} octets, its item {item_bytes}")]
    ChunkLength { position: u64, chunk_bytes: u64, item_bytes: u32 },
    /// RFC 8166 §6.1.
    #[error("the read chunk at {position} is not at an item that may be reduced")]
    Ineligible { position: u64 },
    #[error("the read chunk at {position} has {chunk_bytes} octets, for an item of {bytes_max} at most")]
    ChunkTooLarge { position: u64, chunk_bytes: u64, bytes_max: u32 },
}

impl ArgumentFault {
    /// Whether it is answered with ERR_CHUNK; GARBAGE_ARGS if not (RFC 8166 §4.5.2).
    pub const fn is_chunk_error(&self) -> bool {
        matches!(self, Self::Ineligible { .. } | Self::ChunkTooLarge { .. })
    }
}

/// Reads the arguments of one procedure.
#[derive(Clone, Debug)]
pub struct ArgumentReader<'a> {
    reader: Reader<'a>,
    chunks: &'a [Reduced],
    eligible: &'static [Eligible],
    /// Chunks that were met.
    next: usize,
    /// Octets, roundup included, that were taken out of the stream before what is read next.
    removed: u64,
}

impl<'a> ArgumentReader<'a> {
    /// `reader` stands behind the call's header.
    pub(super) const fn new(reader: Reader<'a>, chunks: &'a [Reduced], eligible: &'static [Eligible]) -> Self {
        Self { reader, chunks, eligible, next: 0, removed: 0 }
    }

    /// For everything that may not be reduced.
    pub const fn words(&mut self) -> &mut Reader<'a> {
        &mut self.reader
    }

    /// An item that may be reduced if the binding lists it.
    ///
    /// # Errors
    /// [`ArgumentFault`].
    pub fn data(&mut self, item: &Eligible) -> Result<Data, ArgumentFault> {
        let before = self.reader.clone();
        let len = self.reader.u32()?;
        let position = self.position_of(self.reader.offset());
        let chunk = self.chunks.get(self.next).filter(|chunk| chunk.position == position);
        let Some(chunk) = chunk.filter(|_| self.eligible.contains(item)) else {
            self.reader = before;
            let len = self.reader.opaque(item.bytes_max as usize)?.len();
            let end = self.reader.offset() - roundup_bytes(len as u64) as usize;
            return Ok(Data::Inline(end - len..end));
        };
        let roundup = roundup_bytes(u64::from(len));
        if len > item.bytes_max || chunk.len > u64::from(item.bytes_max) + roundup_bytes(u64::from(item.bytes_max)) {
            let (chunk_bytes, bytes_max) = (chunk.len, item.bytes_max);
            return Err(ArgumentFault::ChunkTooLarge { position, chunk_bytes, bytes_max });
        }
        if chunk.len != u64::from(len) && chunk.len != u64::from(len) + roundup {
            return Err(ArgumentFault::ChunkLength { position, chunk_bytes: chunk.len, item_bytes: len });
        }
        let index = self.next;
        self.next += 1;
        self.removed += u64::from(len) + roundup;
        Ok(Data::Chunk { index, len })
    }

    /// Reads everything with `arguments`; nothing may be left, no octet and no chunk.
    ///
    /// # Errors
    /// [`ArgumentFault`].
    pub fn read_all<T>(
        mut self,
        arguments: impl FnOnce(&mut Self) -> Result<T, ArgumentFault>,
    ) -> Result<T, ArgumentFault> {
        let result = arguments(&mut self);
        let result = result.and_then(|value| self.reader.finish().map(|()| value).map_err(ArgumentFault::Xdr));
        let Some(&Reduced { position, .. }) = self.chunks.get(self.next) else { return result };
        match result {
            // An item that was taken out makes what follows unreadable: the chunk is the cause, not what came of it.
            Err(ArgumentFault::Xdr(error)) if self.position_of(error.offset) < position => result,
            Err(ArgumentFault::Xdr(_)) | Ok(_) => Err(ArgumentFault::Ineligible { position }),
            Err(_) => result,
        }
    }

    fn position_of(&self, offset: usize) -> u64 {
        self.removed + offset as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec::Writer;

    const FIRST: Eligible = Eligible { name: "first", bytes_max: 100 };
    const SECOND: Eligible = Eligible { name: "second", bytes_max: 5 };
    const BOTH: &[Eligible] = &[FIRST, SECOND];

    type Read = (Data, u32, Data, u32);

    /// | first<100> | word | second<5> | word |
    fn read(stream: &[u8], chunks: &[Reduced], eligible: &'static [Eligible]) -> Result<Read, ArgumentFault> {
        ArgumentReader::new(Reader::new(stream), chunks, eligible).read_all(|arguments| {
            let first = arguments.data(&FIRST)?;
            let word = arguments.words().u32()?;
            Ok((first, word, arguments.data(&SECOND)?, arguments.words().u32()?))
        })
    }

    /// The stream above with items of `lens` octets, those with `reduced` left out.
    fn stream(lens: [u32; 2], reduced: [bool; 2]) -> Vec<u8> {
        let mut writer = Writer::new();
        for (index, (len, reduced)) in lens.into_iter().zip(reduced).enumerate() {
            if reduced {
                writer.u32(len);
            } else {
                writer.opaque(&vec![index as u8; len as usize]);
            }
            writer.u32(77 + index as u32);
        }
        writer.finish()
    }

    const fn at(position: u64, len: u64) -> Reduced {
        Reduced { position, len }
    }

    const fn chunk(index: usize, len: u32) -> Data {
        Data::Chunk { index, len }
    }

    #[test]
    fn positions_count_what_was_taken_out_with_its_roundup() {
        // First item at 4, 5 octets and 3 of roundup, word at 12, second item at 20.
        for first_len in [5, 8] {
            for second_len in [3, 4] {
                let chunks = [at(4, first_len), at(20, second_len)];
                let found = read(&stream([5, 3], [true, true]), &chunks, BOTH);
                assert_eq!(found, Ok((chunk(0, 5), 77, chunk(1, 3), 78)));
            }
        }
        let found = read(&stream([5, 3], [false, true]), &[at(20, 3)], BOTH);
        assert_eq!(found, Ok((Data::Inline(4..9), 77, chunk(0, 3), 78)));
        let found = read(&stream([5, 3], [true, false]), &[at(4, 5)], BOTH);
        assert_eq!(found, Ok((chunk(0, 5), 77, Data::Inline(12..15), 78)));
        let found = read(&stream([5, 3], [false, false]), &[], BOTH);
        assert_eq!(found, Ok((Data::Inline(4..9), 77, Data::Inline(20..23), 78)));
    }

    #[test]
    fn a_chunk_of_neither_length_is_garbage() {
        for chunk_bytes in [0, 4, 6, 7, 9, 12] {
            let found = read(&stream([5, 3], [true, false]), &[at(4, chunk_bytes)], BOTH);
            assert_eq!(found, Err(ArgumentFault::ChunkLength { position: 4, chunk_bytes, item_bytes: 5 }));
            assert!(!found.unwrap_err().is_chunk_error());
        }
    }

    #[test]
    fn an_item_of_no_octets_may_have_a_chunk_of_none() {
        let found = read(&stream([0, 3], [true, false]), &[at(4, 0)], BOTH);
        assert_eq!(found, Ok((chunk(0, 0), 77, Data::Inline(12..15), 78)));
    }

    #[test]
    fn a_chunk_at_no_eligible_item_is_a_chunk_error() {
        let whole = stream([5, 3], [false, false]);
        for position in (0..=whole.len() as u64).step_by(4).filter(|position| ![4, 20].contains(position)) {
            let fault = read(&whole, &[at(position, 4)], BOTH).unwrap_err();
            assert_eq!(fault, ArgumentFault::Ineligible { position });
            assert!(fault.is_chunk_error());
        }
        // Reduced as if it were eligible, whatever is misread behind it.
        for binding in [&BOTH[..0], &BOTH[1..]] {
            let fault = read(&stream([5, 3], [true, false]), &[at(4, 5)], binding).unwrap_err();
            assert_eq!(fault, ArgumentFault::Ineligible { position: 4 }, "{binding:?}");
        }
        let fault = read(&stream([5, 3], [true, true]), &[at(4, 5), at(20, 3)], &BOTH[..1]).unwrap_err();
        assert_eq!(fault, ArgumentFault::Ineligible { position: 20 });
        let fault = read(&stream([5, 3], [true, false]), &[at(4, 5), at(28, 3)], BOTH).unwrap_err();
        assert_eq!(fault, ArgumentFault::Ineligible { position: 28 });
    }

    #[test]
    fn a_chunk_longer_than_the_item_may_be_is_a_chunk_error_and_inline_it_is_garbage() {
        let fault = read(&stream([5, 6], [false, true]), &[at(20, 6)], BOTH).unwrap_err();
        assert_eq!(fault, ArgumentFault::ChunkTooLarge { position: 20, chunk_bytes: 6, bytes_max: 5 });
        assert!(fault.is_chunk_error());
        let fault = read(&stream([5, 3], [false, true]), &[at(20, 9)], BOTH).unwrap_err();
        assert_eq!(fault, ArgumentFault::ChunkTooLarge { position: 20, chunk_bytes: 9, bytes_max: 5 });
        let fault = read(&stream([5, 6], [false, false]), &[], BOTH).unwrap_err();
        assert!(matches!(fault, ArgumentFault::Xdr(XdrError { offset: 16, .. })), "{fault}");
    }

    #[test]
    fn what_is_wrong_before_a_chunk_is_garbage_all_the_same() {
        // The first item is too long by its own word; the chunk behind it was never reached.
        let mut octets = stream([5, 3], [false, true]);
        octets[..4].copy_from_slice(&101_u32.to_be_bytes());
        assert!(matches!(read(&octets, &[at(20, 3)], BOTH), Err(ArgumentFault::Xdr(_))));
    }

    #[test]
    fn octets_left_over_are_garbage() {
        let mut octets = stream([5, 3], [false, false]);
        octets.extend([0; 4]);
        assert!(matches!(read(&octets, &[], BOTH), Err(ArgumentFault::Xdr(_))));
        octets.truncate(octets.len() - 5);
        assert!(matches!(read(&octets, &[], BOTH), Err(ArgumentFault::Xdr(_))));
    }

    #[test]
    fn the_longest_item_does_not_wrap_a_position() {
        const LONGEST: Eligible = Eligible { name: "longest", bytes_max: u32::MAX };
        let mut writer = Writer::new();
        writer.u32(u32::MAX);
        writer.u32(3);
        let stream = writer.finish();
        let second = (1_u64 << 32) + 8;
        for len in [u64::from(u32::MAX), 1 << 32] {
            let chunks = [at(4, len), at(second, 3)];
            let reader = ArgumentReader::new(Reader::new(&stream), &chunks, &[LONGEST]);
            let found = reader.read_all(|arguments| Ok((arguments.data(&LONGEST)?, arguments.data(&LONGEST)?)));
            assert_eq!(found, Ok((chunk(0, u32::MAX), chunk(1, 3))));
        }
    }
}
