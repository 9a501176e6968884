//! Chunks: memory of the requester that carries an item, or a whole stream, instead of the Send (RFC 8166 §3.4).
//!
//! ```text
//! segment (16)       handle | length | offset (8)
//! read list          { 1 | position | segment }* | 0              segments of one position make one read chunk
//! write chunk        n | segment × n                              n = 0: empty; all lengths zero in a reply: unused
//! write list         { 1 | write chunk }* | 0
//! reply chunk        0   or   1 | write chunk
//! ```
//! Lists that arrive are views over the message, checked whole before one exists; what is sent is values.

use super::RemoteKey;
use crate::wire::codec::{Codec, Reader, Writer, XdrError, codec_struct, roundup_bytes};
use thiserror::Error;

impl Codec for RemoteKey {
    const BYTES_MIN: usize = u32::BYTES_MIN;

    fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        reader.u32().map(Self)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u32(self.0);
    }
}

codec_struct! {
    /// A piece of the requester's memory. Offered with the octets it has; returned, from a write or reply chunk, with the
    /// octets written. Length zero moves nothing.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct Segment {
        pub handle: RemoteKey,
        pub length: u32,
        pub offset: u64,
    }
}

codec_struct! {
    /// A piece of a read chunk.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub struct ReadSegment {
        /// Where the item belongs, in octets from the start of the payload stream as it was before anything was taken out
        /// of it (§3.4.5).
        pub position: u32,
        pub target: Segment,
    }
}

/// Octets of a segment.
pub const SEGMENT_BYTES: usize = Segment::BYTES_MIN;
/// Octets that one segment takes in a read list.
pub const READ_ITEM_BYTES: usize = 4 + ReadSegment::BYTES_MIN;

impl Segment {
    /// Whether its end is an address too: a segment that reaches past 2^64 - 1 is nobody's memory.
    pub const fn is_addressable(&self) -> bool {
        self.offset.checked_add(self.length as u64).is_some()
    }
}

/// A read list in a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReadList<'a> {
    /// Items of [`READ_ITEM_BYTES`], without the end word.
    octets: &'a [u8],
}

impl<'a> ReadList<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let octets = span(reader, |reader| {
            while reader.bool()? {
                ReadSegment::read(reader)?;
            }
            Ok(())
        })?;
        Ok(Self { octets: &octets[..octets.len() - 4] })
    }

    pub const fn is_empty(&self) -> bool {
        self.octets.is_empty()
    }

    /// Segments, in list order.
    pub fn segments(&self) -> impl Iterator<Item = ReadSegment> + use<'a> {
        let items = self.octets.chunks_exact(READ_ITEM_BYTES);
        items.map(|item| ReadSegment::read(&mut Reader::new(&item[4..])).expect("read once already"))
    }
}

/// A write or reply chunk in a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WriteChunk<'a> {
    octets: &'a [u8],
}

impl<'a> WriteChunk<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let count = reader.count(usize::MAX, SEGMENT_BYTES)?;
        Ok(Self { octets: reader.opaque_fixed(count * SEGMENT_BYTES)? })
    }

    /// Segments, in array order.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = Segment> + use<'a> {
        let items = self.octets.chunks_exact(SEGMENT_BYTES);
        items.map(|item| Segment::read(&mut Reader::new(item)).expect("read once already"))
    }

    pub const fn segment_count(&self) -> usize {
        self.octets.len() / SEGMENT_BYTES
    }

    /// Octets of all segments together.
    pub fn len(&self) -> u64 {
        self.segments().map(|segment| u64::from(segment.length)).sum()
    }

    /// Without octets: empty, or unused.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn to_vec(&self) -> Vec<Segment> {
        self.segments().collect()
    }
}

/// A write list in a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct WriteList<'a> {
    octets: &'a [u8],
}

impl<'a> WriteList<'a> {
    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let octets = span(reader, |reader| {
            while reader.bool()? {
                WriteChunk::read(reader)?;
            }
            Ok(())
        })?;
        Ok(Self { octets: &octets[..octets.len() - 4] })
    }

    pub const fn is_empty(&self) -> bool {
        self.octets.is_empty()
    }

    /// Write chunks, in list order.
    pub fn chunks(&self) -> impl Iterator<Item = WriteChunk<'a>> + use<'a> {
        let mut reader = Reader::new(self.octets);
        std::iter::from_fn(move || {
            if reader.left() == 0 {
                return None;
            }
            reader.bool().expect("read once already");
            Some(WriteChunk::read(&mut reader).expect("read once already"))
        })
    }
}

/// The octets that `read` takes.
fn span<'a>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<(), XdrError>,
) -> Result<&'a [u8], XdrError> {
    let mut before = reader.clone();
    read(reader)?;
    before.opaque_fixed(reader.offset() - before.offset())
}

/// The three lists of a header, as values.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ChunkLists {
    pub reads: Vec<ReadSegment>,
    pub writes: Vec<Vec<Segment>>,
    pub reply: Option<Vec<Segment>>,
}

impl ChunkLists {
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.list(&self.reads, |writer, segment| segment.write(writer));
        let chunk = |writer: &mut Writer, chunk: &Vec<Segment>| {
            writer.array(chunk, |writer, segment| segment.write(writer));
        };
        writer.list(&self.writes, chunk);
        writer.optional(self.reply.as_ref(), chunk);
    }

    /// Octets as sent: at least 12.
    pub fn encoded_bytes(&self) -> usize {
        let chunk = |chunk: &Vec<Segment>| 4 + chunk.len() * SEGMENT_BYTES;
        let writes: usize = self.writes.iter().map(|each| 4 + chunk(each)).sum();
        12 + self.reads.len() * READ_ITEM_BYTES + writes + self.reply.as_ref().map_or(0, chunk)
    }
}

/// A read chunk: one item of the arguments, or, at position zero, the stream itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ReadChunk {
    /// A multiple of four, from the start of the stream with all items in it.
    pub position: u32,
    pub segments: Vec<Segment>,
    /// Octets of all segments together.
    pub len: u64,
}

impl ReadChunk {
    /// The chunks that `segments` make up, by position. Segments of one position follow each other in list order,
    /// wherever they stand in the list (§3.4.5).
    pub fn gather(segments: impl IntoIterator<Item = ReadSegment>) -> Vec<Self> {
        let mut segments: Vec<ReadSegment> = segments.into_iter().collect();
        segments.sort_by_key(|segment| segment.position);
        let chunk = |same: &[ReadSegment]| Self {
            position: same[0].position,
            segments: same.iter().map(|segment| segment.target).collect(),
            len: same.iter().map(|segment| u64::from(segment.target.length)).sum(),
        };
        segments.chunk_by(|one, next| one.position == next.position).map(chunk).collect()
    }

    /// Octets that the chunk takes in the stream: a roundup that it leaves out is there all the same.
    pub const fn stream_bytes(&self) -> u64 {
        self.len + roundup_bytes(self.len)
    }

    /// Whether it can be an item of `item_bytes` octets: exactly these, or these and the roundup (§3.4.5.2).
    pub const fn carries(&self, item_bytes: u64) -> bool {
        self.len == item_bytes || self.len == item_bytes + roundup_bytes(item_bytes)
    }
}

/// Octets of all `segments` together.
pub fn chunk_bytes(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.length)).sum()
}

/// The segments of octets `start..start + len` of the chunk that `segments` make up, in order, none of them empty: what
/// to Read or Write to move these octets. `None` past the end of the chunk.
pub fn pieces(segments: &[Segment], start: u64, len: u64) -> Option<Vec<Segment>> {
    if start.checked_add(len)? > chunk_bytes(segments) {
        return None;
    }
    let (mut skip, mut left) = (start, len);
    let mut out = Vec::new();
    for segment in segments {
        if left == 0 {
            break;
        }
        let before = skip.min(u64::from(segment.length));
        skip -= before;
        let length = left.min(u64::from(segment.length) - before) as u32;
        if length > 0 {
            left -= u64::from(length);
            out.push(Segment { handle: segment.handle, length, offset: segment.offset.wrapping_add(before) });
        }
    }
    Some(out)
}

/// What is returned of an offered write or reply chunk after `len` octets were written to it: the same segments, filled in
/// order without a gap (§3.4.6). `None` if the chunk is too small.
pub fn returned(offered: &[Segment], len: u64) -> Option<Vec<Segment>> {
    let mut left = len;
    let fill = |segment: &Segment| {
        let length = left.min(u64::from(segment.length)) as u32;
        left -= u64::from(length);
        Segment { length, ..*segment }
    };
    let filled = offered.iter().map(fill).collect();
    if left == 0 { Some(filled) } else { None }
}

/// Why a chunk that came back is not the one that was offered, filled in order. Indices count segments from zero.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum ReturnedError {
    #[error("{returned} segments came back of {offered}")]
    Count { offered: usize, returned: usize },
    #[error("segment {0} came back with another handle or offset")]
    Segment(usize),
    #[error("segment {index} came back with {returned} octets of {offered}")]
    Length { index: usize, offered: u32, returned: u32 },
    #[error("segment {0} came back with octets behind one that is not full")]
    Gap(usize),
}

/// Octets that were written to a write or reply chunk, by what was offered and what came back.
///
/// # Errors
/// [`ReturnedError`]: the data is not to be used.
pub fn octets_returned(
    offered: &[Segment],
    returned: impl ExactSizeIterator<Item = Segment>,
) -> Result<u64, ReturnedError> {
    if returned.len() != offered.len() {
        return Err(ReturnedError::Count { offered: offered.len(), returned: returned.len() });
    }
    let (mut total, mut is_full) = (0, true);
    for (index, (offered, returned)) in offered.iter().zip(returned).enumerate() {
        if (offered.handle, offered.offset) != (returned.handle, returned.offset) {
            return Err(ReturnedError::Segment(index));
        }
        if returned.length > offered.length {
            return Err(ReturnedError::Length { index, offered: offered.length, returned: returned.length });
        }
        if returned.length > 0 && !is_full {
            return Err(ReturnedError::Gap(index));
        }
        is_full &= returned.length == offered.length;
        total += u64::from(returned.length);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segment(handle: u32, length: u32, offset: u64) -> Segment {
        Segment { handle: RemoteKey(handle), length, offset }
    }

    fn segments() -> impl Strategy<Value = Vec<Segment>> {
        let one = (any::<u32>(), 0_u32..50, 0_u64..1 << 40).prop_map(|(handle, len, at)| segment(handle, len, at));
        prop::collection::vec(one, 0..6)
    }

    #[test]
    fn read_segments_of_one_position_make_one_chunk_wherever_they_stand() {
        let read = |position, handle, length| ReadSegment { position, target: segment(handle, length, 0) };
        let chunks = ReadChunk::gather([read(8, 1, 10), read(0, 2, 20), read(8, 3, 30), read(0, 4, 0)]);
        assert_eq!(chunks.len(), 2);
        assert_eq!((chunks[0].position, chunks[0].len), (0, 20));
        assert_eq!(chunks[0].segments, [segment(2, 20, 0), segment(4, 0, 0)]);
        assert_eq!((chunks[1].position, chunks[1].len), (8, 40));
        assert_eq!(chunks[1].segments, [segment(1, 10, 0), segment(3, 30, 0)]);
        assert_eq!(ReadChunk::gather([]), []);
    }

    #[test]
    fn a_chunk_is_the_item_or_the_item_and_its_roundup() {
        let chunk = |len| ReadChunk { position: 4, segments: Vec::new(), len };
        for (len, item, carries) in [
            (5, 5, true),
            (8, 5, true),
            (6, 5, false),
            (7, 5, false),
            (4, 5, false),
            (8, 8, true),
            (0, 0, true),
            (4, 0, false),
        ] {
            assert_eq!(chunk(len).carries(item), carries, "{len} octets for an item of {item}");
        }
        assert_eq!((chunk(5).stream_bytes(), chunk(8).stream_bytes()), (8, 8));
    }

    /// The cut exactly on, one before and one after the end of each segment.
    #[test]
    fn a_window_of_a_chunk_cut_around_a_segment_end_reads_the_right_octets() {
        let chunk = [segment(1, 4096, 100), segment(2, 0, 200), segment(3, 512, 300)];
        assert_eq!(pieces(&chunk, 0, 4095), Some(vec![segment(1, 4095, 100)]));
        assert_eq!(pieces(&chunk, 0, 4096), Some(vec![segment(1, 4096, 100)]));
        assert_eq!(pieces(&chunk, 0, 4097), Some(vec![segment(1, 4096, 100), segment(3, 1, 300)]));
        assert_eq!(pieces(&chunk, 4095, 1), Some(vec![segment(1, 1, 4195)]));
        assert_eq!(pieces(&chunk, 4095, 2), Some(vec![segment(1, 1, 4195), segment(3, 1, 300)]));
        assert_eq!(pieces(&chunk, 4096, 1), Some(vec![segment(3, 1, 300)]));
        assert_eq!(pieces(&chunk, 4097, 511), Some(vec![segment(3, 511, 301)]));
        assert_eq!(pieces(&chunk, 4608, 0), Some(vec![]));
        assert_eq!(pieces(&chunk, 4608, 1), None);
        assert_eq!(pieces(&chunk, 1, u64::MAX), None);
        assert_eq!(pieces(&[], 0, 0), Some(vec![]));
    }

    #[test]
    fn one_octet_more_than_a_chunk_holds_does_not_fit() {
        let chunk = [segment(1, 64, 0), segment(2, 36, 500)];
        assert_eq!(returned(&chunk, 99), Some(vec![segment(1, 64, 0), segment(2, 35, 500)]));
        assert_eq!(returned(&chunk, 100), Some(chunk.to_vec()));
        assert_eq!(returned(&chunk, 101), None);
        assert_eq!(returned(&chunk, 0), Some(vec![segment(1, 0, 0), segment(2, 0, 500)]));
        assert_eq!(returned(&[], 0), Some(vec![]));
        assert_eq!(returned(&[], 1), None);
    }

    #[test]
    fn a_chunk_that_came_back_otherwise_is_not_used() {
        let offered = [segment(1, 10, 100), segment(2, 10, 200)];
        let judge = |returned: &[Segment]| octets_returned(&offered, returned.iter().copied());
        assert_eq!(judge(&[segment(1, 10, 100), segment(2, 3, 200)]), Ok(13));
        assert_eq!(judge(&[segment(1, 0, 100), segment(2, 0, 200)]), Ok(0));
        assert_eq!(judge(&offered[..1]), Err(ReturnedError::Count { offered: 2, returned: 1 }));
        assert_eq!(judge(&[]), Err(ReturnedError::Count { offered: 2, returned: 0 }));
        assert_eq!(judge(&[segment(1, 10, 100), segment(3, 3, 200)]), Err(ReturnedError::Segment(1)));
        assert_eq!(judge(&[segment(1, 10, 101), segment(2, 3, 200)]), Err(ReturnedError::Segment(0)));
        let too_long = ReturnedError::Length { index: 0, offered: 10, returned: 11 };
        assert_eq!(judge(&[segment(1, 11, 100), segment(2, 3, 200)]), Err(too_long));
        assert_eq!(judge(&[segment(1, 9, 100), segment(2, 1, 200)]), Err(ReturnedError::Gap(1)));
    }

    #[test]
    fn memory_ends_before_two_to_the_sixty_four() {
        assert!(segment(1, 1, u64::MAX - 1).is_addressable());
        assert!(!segment(1, 2, u64::MAX - 1).is_addressable());
        assert!(!segment(1, u32::MAX, u64::MAX).is_addressable());
        assert!(segment(1, 0, u64::MAX).is_addressable());
    }

    proptest! {
        #[test]
        fn what_is_returned_is_what_was_written(offered in segments(), len in 0_u64..320) {
            match returned(&offered, len) {
                Some(back) => {
                    prop_assert_eq!(octets_returned(&offered, back.iter().copied()), Ok(len));
                    let written = pieces(&offered, 0, len).unwrap();
                    let not_empty: Vec<Segment> = back.into_iter().filter(|segment| segment.length > 0).collect();
                    prop_assert_eq!(written, not_empty);
                }
                None => prop_assert!(len > chunk_bytes(&offered)),
            }
        }

        /// Octet by octet, against a chunk spelt out.
        #[test]
        fn pieces_are_the_octets_of_the_chunk(offered in segments(), start in 0_u64..320, len in 0_u64..320) {
            let spell = |segments: &[Segment]| -> Vec<(u32, u64)> {
                let octets = |segment: &Segment| (0..u64::from(segment.length)).map(|at| (segment.handle.0, segment.offset + at)).collect::<Vec<_>>();
                segments.iter().flat_map(octets).collect()
            };
            let whole = spell(&offered);
            let wanted = whole.get(start as usize..(start + len) as usize).map(<[_]>::to_vec);
            let found = pieces(&offered, start, len);
            prop_assert!(found.iter().flatten().all(|segment| segment.length > 0));
            prop_assert_eq!(found.map(|segments| spell(&segments)), wanted);
        }

        #[test]
        fn lists_that_were_written_are_read(
            reads in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), any::<u64>()), 0..5),
            writes in prop::collection::vec(segments(), 0..4),
            reply in prop::option::of(segments()),
        ) {
            let read = |(position, handle, length, offset)| ReadSegment { position, target: segment(handle, length, offset) };
            let lists = ChunkLists { reads: reads.into_iter().map(read).collect(), writes, reply };
            let mut writer = Writer::new();
            lists.write(&mut writer);
            let octets = writer.finish();
            prop_assert_eq!(octets.len(), lists.encoded_bytes());
            let mut reader = Reader::new(&octets);
            prop_assert_eq!(ReadList::read(&mut reader).unwrap().segments().collect::<Vec<_>>(), lists.reads);
            let writes = WriteList::read(&mut reader).unwrap();
            prop_assert_eq!(writes.chunks().map(|chunk| chunk.to_vec()).collect::<Vec<_>>(), lists.writes);
            let reply = reader.optional(WriteChunk::read).unwrap();
            prop_assert_eq!(reply.map(|chunk| chunk.to_vec()), lists.reply);
            prop_assert_eq!(reader.finish(), Ok(()));
        }
    }
}
