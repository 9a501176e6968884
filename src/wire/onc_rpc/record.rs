//! Record marking (RFC 5531 §11): messages on a stream of octets, such as TCP or a Unix socket.
//!
//! ```text
//! | last? (1 bit) | length (31 bits) | length octets |     one fragment; a message is those up to the last
//! ```

use thiserror::Error;

/// Octets in front of a fragment.
pub const MARK_BYTES: usize = 4;
/// Octets of the longest fragment.
pub const FRAGMENT_BYTES_MAX: usize = (1 << 31) - 1;
const LAST: u32 = 1 << 31;

/// `message` as one fragment: `| mark | message |`.
///
/// # Panics
/// If it is longer than a fragment can be.
pub fn marked(message: &[u8]) -> Vec<u8> {
    assert!(message.len() <= FRAGMENT_BYTES_MAX, "a message of {} octets", message.len());
    let mut out = Vec::with_capacity(MARK_BYTES + message.len());
    out.extend_from_slice(&(LAST | message.len() as u32).to_be_bytes());
    out.extend_from_slice(message);
    out
}

/// The peer sends a message longer than is taken.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("a record of {found} octets or more, at most {limit} are taken")]
pub struct RecordTooLong {
    /// With the marks.
    pub limit: usize,
    /// So far, with what the last mark announces.
    pub found: u64,
}

/// Puts messages together from what a stream delivers, cut anywhere. Nothing is allocated for what is only announced.
#[derive(Clone, Debug)]
pub struct RecordReader {
    bytes_max: usize,
    mark: Vec<u8>,
    /// Octets of the fragment that are still to come, once its mark is there.
    left: Option<usize>,
    is_last: bool,
    message: Vec<u8>,
    /// Octets of this message and its marks, so that fragments without octets come to an end as well.
    taken: usize,
}

impl RecordReader {
    /// Takes messages of at most `bytes_max` octets, marks included.
    pub const fn new(bytes_max: usize) -> Self {
        Self { bytes_max, mark: Vec::new(), left: None, is_last: false, message: Vec::new(), taken: 0 }
    }

    /// Takes from the front of `octets`, up to the end of a message: call it again while octets are left.
    ///
    /// # Errors
    /// [`RecordTooLong`]; nothing that follows has a meaning.
    pub fn take(&mut self, octets: &mut &[u8]) -> Result<Option<Vec<u8>>, RecordTooLong> {
        loop {
            let Some(left) = self.left else {
                let (mark, rest) = octets.split_at(octets.len().min(MARK_BYTES - self.mark.len()));
                self.mark.extend_from_slice(mark);
                *octets = rest;
                let Some(mark) = self.mark.first_chunk().copied().map(u32::from_be_bytes) else { return Ok(None) };
                self.mark.clear();
                let len = (mark & !LAST) as usize;
                let found = (self.taken + MARK_BYTES) as u64 + len as u64;
                if found > self.bytes_max as u64 {
                    return Err(RecordTooLong { limit: self.bytes_max, found });
                }
                self.taken = found as usize;
                (self.left, self.is_last) = (Some(len), mark & LAST != 0);
                continue;
            };
            let (part, rest) = octets.split_at(octets.len().min(left));
            self.message.extend_from_slice(part);
            *octets = rest;
            if part.len() < left {
                self.left = Some(left - part.len());
                return Ok(None);
            }
            self.left = None;
            if self.is_last {
                self.taken = 0;
                return Ok(Some(std::mem::take(&mut self.message)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(reader: &mut RecordReader, mut octets: &[u8]) -> Result<Vec<Vec<u8>>, RecordTooLong> {
        let mut messages = Vec::new();
        while let Some(message) = reader.take(&mut octets)? {
            messages.push(message);
        }
        assert!(octets.is_empty());
        Ok(messages)
    }

    #[test]
    fn a_message_is_the_octets_of_its_fragments() {
        let octets = [
            &[0, 0, 0, 3][..],
            b"abc",
            &[0, 0, 0, 0],
            &[0x80, 0, 0, 2],
            b"de",
            &[0x80, 0, 0, 0],
            &[0x80, 0, 0, 1],
            b"f",
            &[0x80],
        ]
        .concat();
        let whole = [b"abcde".to_vec(), Vec::new(), b"f".to_vec()];
        assert_eq!(all(&mut RecordReader::new(100), &octets).unwrap(), whole);
        let mut slowly = RecordReader::new(100);
        let messages: Vec<_> = octets.chunks(1).flat_map(|octet| all(&mut slowly, octet).unwrap()).collect();
        assert_eq!(messages, whole);
        assert_eq!(marked(b"f"), [0x80, 0, 0, 1, b'f']);
    }

    #[test]
    fn a_record_is_bounded_by_what_it_announces_and_by_its_marks() {
        let mut reader = RecordReader::new(10);
        assert_eq!(all(&mut reader, &marked(b"123456")).unwrap(), [b"123456"]);
        let error = all(&mut reader, &marked(b"1234567")[..4]).unwrap_err();
        assert_eq!(error, RecordTooLong { limit: 10, found: 11 });
        let error = all(&mut RecordReader::new(10), &[0x7f, 0xff, 0xff, 0xff]).unwrap_err();
        assert_eq!(error.found, 0x8000_0003);
        // Empty fragments for ever.
        assert_eq!(all(&mut RecordReader::new(10), &[0; 12]), Err(RecordTooLong { limit: 10, found: 12 }));
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in_however_they_are_cut(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..6),
            cuts in prop::collection::vec(1_usize..9, 1..20),
        ) {
            let octets: Vec<u8> = messages.iter().flat_map(|message| marked(message)).collect();
            let (mut reader, mut rest, mut found) = (RecordReader::new(44), &octets[..], Vec::new());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (part, behind) = rest.split_at(rest.len().min(*cut));
                found.extend(all(&mut reader, part).unwrap());
                rest = behind;
            }
            prop_assert_eq!(found, messages);
        }

        #[test]
        fn any_octets_are_taken_or_refused_and_never_more_than_may_be(
            octets in prop::collection::vec(prop_oneof![Just(0_u8), Just(0x80), any::<u8>()], 0..200),
        ) {
            for message in all(&mut RecordReader::new(64), &octets).unwrap_or_default() {
                prop_assert!(message.len() <= 60);
            }
        }
    }
}
