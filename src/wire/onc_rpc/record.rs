//! Record marking (RFC 5531 §11): messages on a byte stream.
//!
//! ```text
//! | L, n (4) | n octets | L, n (4) | n octets | …        L: the highest bit, set in the last fragment of a record
//! └──────── fragment ───┘                                n: 31 bits, zero too
//! ```
//!
//! One record is one message. [`RecordDecoder`] holds none of it: it says which octets are of a record as they come, whatever
//! the fragments, so the caller keeps the head of a message and may let its bulk go elsewhere.

use thiserror::Error;

/// Octets of the mark in front of a fragment.
pub const MARK_BYTES: usize = 4;
/// Octets of the longest fragment.
pub const FRAGMENT_BYTES_MAX: u32 = (1 << 31) - 1;

const LAST: u32 = 1 << 31;

/// The mark in front of a fragment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Mark {
    /// The record ends with this fragment.
    pub is_last: bool,
    /// Octets of the fragment, at most [`FRAGMENT_BYTES_MAX`].
    pub len: u32,
}

impl Mark {
    /// In front of a record that is one fragment.
    ///
    /// # Panics
    /// If it is longer than a fragment may be: nobody makes such replies.
    pub fn whole(len: u64) -> Self {
        let len = u32::try_from(len).ok().filter(|len| *len <= FRAGMENT_BYTES_MAX);
        Self { is_last: true, len: len.expect("a message fits a fragment") }
    }

    pub const fn read(octets: [u8; MARK_BYTES]) -> Self {
        let word = u32::from_be_bytes(octets);
        Self { is_last: word & LAST != 0, len: word & !LAST }
    }

    /// # Panics
    /// If `len` is more than a fragment may have.
    pub const fn octets(self) -> [u8; MARK_BYTES] {
        assert!(self.len <= FRAGMENT_BYTES_MAX);
        (if self.is_last { LAST | self.len } else { self.len }).to_be_bytes()
    }
}

/// What a peer may send as one record.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RecordLimits {
    /// Octets of all its fragments.
    pub bytes_max: u32,
    /// Fragments, those without octets too: they cost the peer four octets and us a look.
    pub fragments_max: u32,
}

/// Why a stream cannot be read on: nothing tells where the next record begins.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub enum RecordFault {
    #[error("a record of {bytes} octets or more, of {max} at most")]
    TooLong { bytes: u64, max: u32 },
    #[error("a record of more than {max} fragments")]
    TooManyFragments { max: u32 },
}

/// What came.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Piece<'a> {
    /// The next octets of the record, at least one.
    Octets(&'a [u8]),
    /// The record is complete. One without octets is a record too.
    End,
}

/// Takes the marks out of a stream.
///
/// ```text
/// Mark ──▶ Fragment ──▶ Mark …        a fault ends it: every later call says the same
///   ▲         │ last
///   └── End ◀─┘
/// ```
#[derive(Clone, Debug)]
pub struct RecordDecoder {
    limits: RecordLimits,
    /// Octets of a mark that is not complete.
    mark: [u8; MARK_BYTES],
    mark_bytes: usize,
    /// Octets to come of the fragment.
    left: u32,
    /// The fragment is the last of its record; only while `is_inside`.
    is_last: bool,
    /// Behind a mark, up to the end of its fragment.
    is_inside: bool,
    /// Octets that the fragments of the record have so far by their marks.
    bytes: u32,
    fragments: u32,
    fault: Option<RecordFault>,
}

impl RecordDecoder {
    pub const fn new(limits: RecordLimits) -> Self {
        Self {
            limits,
            mark: [0; MARK_BYTES],
            mark_bytes: 0,
            left: 0,
            is_last: false,
            is_inside: false,
            bytes: 0,
            fragments: 0,
            fault: None,
        }
    }

    /// Octets of the record that must still come, by what its marks say so far. More may follow unless it is the last
    /// fragment.
    pub const fn left(&self) -> u32 {
        self.left
    }

    /// Octets of the record that must still come, once its last fragment has begun.
    pub const fn left_of_record(&self) -> Option<u32> {
        if self.is_inside && self.is_last { Some(self.left) } else { None }
    }

    /// Nothing of a record has come: here the peer may close the stream.
    pub const fn is_between_records(&self) -> bool {
        self.mark_bytes == 0 && !self.is_inside && self.fragments == 0
    }

    /// Takes what comes next off the front of `octets`, at most `len_max` of it: one piece, or `None` if more must come
    /// from the peer.
    ///
    /// # Errors
    /// [`RecordFault`], at the mark that is one too many or promises too much, before any octet of its fragment is taken.
    ///
    /// # Panics
    /// If `len_max` is zero.
    pub fn next<'a>(&mut self, octets: &mut &'a [u8], len_max: usize) -> Result<Option<Piece<'a>>, RecordFault> {
        assert!(len_max > 0, "no progress without room");
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        loop {
            if self.is_inside {
                if self.left == 0 {
                    self.is_inside = false;
                    if self.is_last {
                        (self.bytes, self.fragments) = (0, 0);
                        return Ok(Some(Piece::End));
                    }
                    continue;
                }
                let len = octets.len().min(self.left as usize).min(len_max);
                if len == 0 {
                    return Ok(None);
                }
                let (piece, rest) = octets.split_at(len);
                *octets = rest;
                self.left -= len as u32;
                return Ok(Some(Piece::Octets(piece)));
            }
            let Some((first, rest)) = octets.split_first() else { return Ok(None) };
            *octets = rest;
            self.mark[self.mark_bytes] = *first;
            self.mark_bytes += 1;
            if self.mark_bytes == MARK_BYTES {
                self.mark_bytes = 0;
                self.begin(Mark::read(self.mark)).inspect_err(|fault| self.fault = Some(*fault))?;
            }
        }
    }

    fn begin(&mut self, mark: Mark) -> Result<(), RecordFault> {
        let RecordLimits { bytes_max, fragments_max } = self.limits;
        if self.fragments >= fragments_max {
            return Err(RecordFault::TooManyFragments { max: fragments_max });
        }
        let bytes = u64::from(self.bytes) + u64::from(mark.len);
        self.bytes = match u32::try_from(bytes) {
            Ok(bytes) if bytes <= bytes_max => bytes,
            _ => return Err(RecordFault::TooLong { bytes, max: bytes_max }),
        };
        self.fragments += 1;
        (self.left, self.is_last, self.is_inside) = (mark.len, mark.is_last, true);
        Ok(())
    }
}

/// `message` as a record of one fragment.
///
/// # Panics
/// As [`Mark::whole`].
pub fn marked(message: &[u8]) -> Vec<u8> {
    [&Mark::whole(message.len() as u64).octets(), message].concat()
}

/// Gathers short records, each a message that is wanted whole. A longer message goes through [`RecordDecoder`].
#[derive(Clone, Debug)]
pub struct RecordReader {
    decoder: RecordDecoder,
    message: Vec<u8>,
}

impl RecordReader {
    pub const fn new(limits: RecordLimits) -> Self {
        Self { decoder: RecordDecoder::new(limits), message: Vec::new() }
    }

    /// Takes from the front of `octets` what it needs; gives a message once it is whole, and leaves what comes behind it.
    ///
    /// # Errors
    /// [`RecordFault`], which is final.
    pub fn take(&mut self, octets: &mut &[u8]) -> Result<Option<Vec<u8>>, RecordFault> {
        while let Some(piece) = self.decoder.next(octets, usize::MAX)? {
            match piece {
                Piece::Octets(part) => self.message.extend_from_slice(part),
                Piece::End => return Ok(Some(std::mem::take(&mut self.message))),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_records_are_gathered_whole_however_they_are_cut() {
        let octets = [
            &[0, 0, 0, 3][..],
            b"abc",
            &[0; 4],
            &[0x80, 0, 0, 2],
            b"de",
            &super::marked(b""),
            &super::marked(b"f"),
            &[0x80],
        ]
        .concat();
        for step in 1..octets.len() {
            let mut reader = RecordReader::new(RecordLimits { bytes_max: 5, fragments_max: 3 });
            let mut messages = Vec::new();
            for mut part in octets.chunks(step) {
                while let Some(message) = reader.take(&mut part).unwrap() {
                    messages.push(message);
                }
                assert!(part.is_empty());
            }
            assert_eq!(messages, [&b"abcde"[..], b"", b"f"]);
        }
        let mut reader = RecordReader::new(RecordLimits { bytes_max: 4, fragments_max: 3 });
        assert_eq!(reader.take(&mut &octets[..]), Err(RecordFault::TooLong { bytes: 5, max: 4 }));
        assert_eq!(reader.take(&mut &b"x"[..]), Err(RecordFault::TooLong { bytes: 5, max: 4 }));
    }
    use proptest::prelude::*;

    const LIMITS: RecordLimits = RecordLimits { bytes_max: 64, fragments_max: 4 };

    /// Another splitter: of a whole stream, recursively, with lists instead of states.
    fn split(stream: &[u8]) -> (Vec<Vec<u8>>, Result<(), RecordFault>) {
        fn fragments(stream: &[u8]) -> Vec<(bool, usize, &[u8])> {
            let [a, b, c, d, rest @ ..] = stream else { return Vec::new() };
            let len = usize::from(a % 128) << 24 | usize::from(*b) << 16 | usize::from(*c) << 8 | usize::from(*d);
            let (body, rest) = rest.split_at(len.min(rest.len()));
            [vec![(*a >= 128, len, body)], fragments(rest)].concat()
        }
        let (mut records, mut record, mut count, mut said) = (Vec::new(), Vec::new(), 0, 0);
        for (is_last, len, body) in fragments(stream) {
            count += 1;
            said += len;
            if count > LIMITS.fragments_max {
                return (records, Err(RecordFault::TooManyFragments { max: LIMITS.fragments_max }));
            }
            if said > LIMITS.bytes_max as usize {
                return (records, Err(RecordFault::TooLong { bytes: said as u64, max: LIMITS.bytes_max }));
            }
            record.extend_from_slice(body);
            if is_last && body.len() == len {
                records.push(std::mem::take(&mut record));
                (count, said) = (0, 0);
            }
        }
        (records, Ok(()))
    }

    /// What the decoder makes of the stream when it comes in parts that end at `cuts`, taken `len_max` octets at a time.
    fn decode(stream: &[u8], cuts: &[usize], len_max: usize) -> (Vec<Vec<u8>>, Result<(), RecordFault>, RecordDecoder) {
        let mut decoder = RecordDecoder::new(LIMITS);
        let (mut records, mut record, mut begin) = (Vec::new(), Vec::new(), 0);
        for end in cuts.iter().copied().chain([stream.len()]) {
            let mut part = &stream[begin..end];
            begin = end;
            loop {
                match decoder.next(&mut part, len_max) {
                    Ok(Some(Piece::Octets(octets))) => {
                        assert!(!octets.is_empty() && octets.len() <= len_max);
                        record.extend_from_slice(octets);
                    }
                    Ok(Some(Piece::End)) => records.push(std::mem::take(&mut record)),
                    Ok(None) => break assert!(part.is_empty()),
                    Err(fault) => {
                        assert_eq!(decoder.next(&mut &[0; 9][..], 9), Err(fault), "it stays ended");
                        return (records, Err(fault), decoder);
                    }
                }
            }
        }
        (records, Ok(()), decoder)
    }

    fn marked(fragments: &[(bool, &[u8])]) -> Vec<u8> {
        let parts = fragments
            .iter()
            .map(|(is_last, body)| [&Mark { is_last: *is_last, len: body.len() as u32 }.octets()[..], body].concat());
        parts.collect::<Vec<_>>().concat()
    }

    proptest! {
        #[test]
        fn it_agrees_with_another_splitter_however_the_stream_is_cut(
            fragments in prop::collection::vec((prop::bool::weighted(0.4), prop_oneof![4 => 0_usize..40, 1 => Just(0), 1 => 60_usize..70]), 0..12),
            cut in any::<prop::sample::Index>(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            len_max in 1_usize..70,
        ) {
            let bodies: Vec<(bool, Vec<u8>)> = fragments
                .into_iter()
                .enumerate()
                .map(|(at, (is_last, len))| (is_last, (0..len).map(|octet| (31 * at + octet) as u8).collect()))
                .collect();
            let views: Vec<(bool, &[u8])> = bodies.iter().map(|(is_last, body)| (*is_last, &body[..])).collect();
            let mut stream = marked(&views);
            stream.truncate(cut.index(stream.len() + 1));
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            let (records, end, decoder) = decode(&stream, &cuts, len_max);
            prop_assert_eq!((records, end), split(&stream));
            if end.is_ok() && decoder.is_between_records() {
                prop_assert_eq!(decoder.left(), 0);
            }
        }

        #[test]
        fn any_octets_are_read_as_another_splitter_reads_them(
            stream in prop::collection::vec(prop_oneof![8 => Just(0_u8), 2 => Just(0x80), 3 => 0_u8..9, 1 => any::<u8>()], 0..200),
        ) {
            let (records, end, _) = decode(&stream, &[], 1000);
            prop_assert_eq!((records, end), split(&stream));
        }

        #[test]
        fn a_mark_is_read_as_it_is_written(is_last in any::<bool>(), len in 0..=FRAGMENT_BYTES_MAX) {
            let mark = Mark { is_last, len };
            prop_assert_eq!(Mark::read(mark.octets()), mark);
        }
    }

    #[test]
    fn fragments_of_no_octets_are_nothing_and_a_record_of_none_is_a_record() {
        let stream = marked(&[(false, b""), (false, b"ab"), (true, b""), (true, b""), (true, b"c")]);
        let (records, end, decoder) = decode(&stream, &[], 100);
        assert_eq!((records, end), (vec![b"ab".to_vec(), vec![], b"c".to_vec()], Ok(())));
        assert!(decoder.is_between_records());
    }

    #[test]
    fn limits_hold_at_the_mark_and_begin_anew_with_each_record() {
        let whole = vec![7; 64];
        let good = marked(&[(false, &whole[..60]), (false, b""), (false, &whole[60..]), (true, b"")]);
        let two = good.repeat(2);
        assert_eq!(decode(&two, &[], 100).0, [whole.clone(), whole.clone()]);
        let long = [marked(&[(false, &whole)]), Mark { is_last: true, len: 1 }.octets().to_vec()].concat();
        assert_eq!(decode(&long, &[], 100).1, Err(RecordFault::TooLong { bytes: 65, max: 64 }));
        let longest = Mark { is_last: false, len: FRAGMENT_BYTES_MAX }.octets();
        let fault = RecordFault::TooLong { bytes: FRAGMENT_BYTES_MAX.into(), max: 64 };
        assert_eq!(decode(&longest, &[], 100).1, Err(fault));
        let many = marked(&[(false, &b""[..]); 5]);
        assert_eq!(decode(&many, &[], 100).1, Err(RecordFault::TooManyFragments { max: 4 }));
    }

    #[test]
    fn a_stream_may_end_between_records_and_nowhere_else() {
        let stream = marked(&[(false, b"ab"), (false, b""), (true, b"c")]);
        for end in 0..=stream.len() {
            let (_, _, decoder) = decode(&stream[..end], &[], 100);
            assert_eq!(decoder.is_between_records(), end == 0 || end == stream.len(), "{end} octets");
        }
        assert_eq!(decode(&stream[..5], &[], 100).2.left(), 1);
        // Inside of the first fragment, behind it, behind the mark of the last, and behind that.
        let left: Vec<_> = [5, 6, 14, 15].map(|end| decode(&stream[..end], &[], 100).2.left_of_record()).into();
        assert_eq!(left, [None, None, Some(1), None]);
    }

    #[test]
    fn the_highest_bit_is_the_last_fragment() {
        assert_eq!(Mark::whole(0x0102_0304).octets(), [0x81, 2, 3, 4]);
        assert_eq!(Mark { is_last: false, len: FRAGMENT_BYTES_MAX }.octets(), [0x7f, 0xff, 0xff, 0xff]);
        assert_eq!(Mark::whole(FRAGMENT_BYTES_MAX.into()).octets(), [0xff; 4]);
    }

    #[test]
    #[should_panic = "a message fits a fragment"]
    fn no_record_of_one_fragment_is_longer_than_a_fragment() {
        Mark::whole(1 << 31);
    }
}
