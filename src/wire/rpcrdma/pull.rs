//! A read chunk on its way here, in pieces: each an RDMA Read into a buffer of its own.
//!
//! ```text
//!  segments    | 5 |        20        | 3 |          piece_bytes_max = 8
//!  pieces      | 5 |  8  |  8  |  4   | 3 |          no piece reaches into the next segment
//!               taken | arrived | asked for |  to be asked for
//! ```
//! Pieces may arrive in any order; their octets are taken in the order of the chunk.

use super::RemoteKey;
use super::chunk::Segment;
use std::collections::VecDeque;

/// One RDMA Read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PieceRead {
    /// Which piece it brings.
    pub number: u64,
    pub handle: RemoteKey,
    /// Offset in what the handle names, as the peer counts.
    pub offset: u64,
    /// At least 1.
    pub len: u32,
}

#[derive(Debug)]
enum Piece<B> {
    Asked { len: u32 },
    Arrived { buf: B, len: u32, taken: u32 },
}

/// The machine of one chunk; `B` is a buffer.
#[derive(Debug)]
pub struct Pull<B> {
    /// Not asked for, wholly or in part.
    segments: VecDeque<Segment>,
    /// Octets not asked for.
    left: u64,
    piece_bytes_max: u32,
    pieces: VecDeque<Piece<B>>,
    /// Number of the front of `pieces`.
    first: u64,
}

impl<B: AsRef<[u8]>> Pull<B> {
    /// The first `len` octets of `segments`.
    ///
    /// # Panics
    /// For pieces of no octets, or if the segments have fewer.
    pub fn new(segments: &[Segment], len: u64, piece_bytes_max: u32) -> Self {
        let has: u64 = segments.iter().map(|segment| u64::from(segment.length)).sum();
        assert!(piece_bytes_max > 0 && len <= has, "{len} octets of {has}");
        let segments = segments.iter().copied().collect();
        Self { segments, left: len, piece_bytes_max, pieces: VecDeque::new(), first: 0 }
    }

    /// The next piece to ask for; [`Pull::handle_arrived`] follows.
    pub fn poll_read(&mut self) -> Option<PieceRead> {
        while self.left > 0 {
            let segment = self.segments.front_mut().expect("segments have all octets");
            let len = u64::from(segment.length.min(self.piece_bytes_max)).min(self.left) as u32;
            let (handle, offset) = (segment.handle, segment.offset);
            segment.length -= len;
            segment.offset += u64::from(len);
            if segment.length == 0 {
                self.segments.pop_front();
            }
            if len == 0 {
                continue;
            }
            self.left -= u64::from(len);
            let number = self.first + self.pieces.len() as u64;
            self.pieces.push_back(Piece::Asked { len });
            return Some(PieceRead { number, handle, offset, len });
        }
        None
    }

    /// All pieces were asked for.
    pub const fn is_asked(&self) -> bool {
        self.left == 0
    }

    /// Pieces that were asked for and not taken.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// A piece lies at the start of `buf`.
    ///
    /// # Panics
    /// Unless it was asked for and has not come.
    pub fn handle_arrived(&mut self, number: u64, buf: B) {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        let piece = index.and_then(|index| self.pieces.get_mut(index)).expect("pieces come that were asked for");
        let Piece::Asked { len } = *piece else { panic!("piece {number} came twice") };
        *piece = Piece::Arrived { buf, len, taken: 0 };
    }

    /// The octets that come next, as far as they lie in one buffer. None: they have not arrived, or all are taken.
    pub fn octets(&self) -> &[u8] {
        match self.pieces.front() {
            Some(Piece::Arrived { buf, len, taken }) => &buf.as_ref()[*taken as usize..*len as usize],
            _ => &[],
        }
    }

    /// The first `count` of [`Pull::octets`] were taken. Gives the buffer back when it is empty.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn take(&mut self, count: usize) -> Option<B> {
        assert!(count <= self.octets().len(), "{count} octets of {}", self.octets().len());
        let Some(Piece::Arrived { len, taken, .. }) = self.pieces.front_mut() else { return None };
        // Not more than a piece has, which fits.
        *taken += count as u32;
        if taken < len {
            return None;
        }
        self.first += 1;
        match self.pieces.pop_front() {
            Some(Piece::Arrived { buf, .. }) => Some(buf),
            _ => None,
        }
    }

    /// Everything was taken.
    pub fn is_done(&self) -> bool {
        self.is_asked() && self.pieces.is_empty()
    }

    /// The buffers of what arrived and was not taken: nobody wants the chunk any more.
    pub fn into_buffers(self) -> impl Iterator<Item = B> {
        self.pieces.into_iter().filter_map(|piece| match piece {
            Piece::Asked { .. } => None,
            Piece::Arrived { buf, .. } => Some(buf),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn segment(handle: u32, length: u32, offset: u64) -> Segment {
        Segment { handle: RemoteKey(handle), length, offset }
    }

    fn reads(pull: &mut Pull<Vec<u8>>) -> Vec<(u32, u64, u32)> {
        std::iter::from_fn(|| pull.poll_read()).map(|read| (read.handle.0, read.offset, read.len)).collect()
    }

    #[test]
    fn pieces_end_where_segments_do_and_empty_segments_are_passed_over() {
        let segments = [segment(1, 5, 100), segment(2, 0, 7), segment(2, 20, 200), segment(3, 3, 300)];
        let mut pull = Pull::new(&segments, 28, 8);
        assert_eq!(reads(&mut pull), [(1, 100, 5), (2, 200, 8), (2, 208, 8), (2, 216, 4), (3, 300, 3)]);
        assert!(pull.is_asked() && !pull.is_done());
    }

    #[test]
    fn a_roundup_behind_the_item_is_not_pulled() {
        let segments = [segment(1, 5, 100), segment(9, 3, 0)];
        let mut pull = Pull::new(&segments, 5, 8);
        assert_eq!(reads(&mut pull), [(1, 100, 5)]);
        let mut within = Pull::new(&[segment(1, 8, 100)], 5, 8);
        assert_eq!(reads(&mut within), [(1, 100, 5)]);
    }

    #[test]
    fn a_chunk_of_nothing_is_done_at_once() {
        let mut pull: Pull<Vec<u8>> = Pull::new(&[segment(1, 0, 100)], 0, 8);
        assert_eq!((pull.poll_read(), pull.is_done()), (None, true));
    }

    #[test]
    fn a_segment_at_the_end_of_memory_is_pulled_to_its_last_octet() {
        let mut pull = Pull::new(&[segment(1, 16, u64::MAX - 16)], 16, 8);
        assert_eq!(reads(&mut pull), [(1, u64::MAX - 16, 8), (1, u64::MAX - 8, 8)]);
    }

    #[test]
    fn buffers_of_what_nobody_wants_come_back() {
        let mut pull = Pull::new(&[segment(1, 16, 0)], 16, 8);
        assert_eq!(reads(&mut pull).len(), 2);
        pull.handle_arrived(1, vec![7; 8]);
        assert_eq!(pull.octets(), b"", "the first piece is still on its way");
        assert_eq!(pull.into_buffers().collect::<Vec<_>>(), [vec![7; 8]]);
    }

    #[test]
    #[should_panic(expected = "came twice")]
    fn a_piece_comes_once() {
        let mut pull = Pull::new(&[segment(1, 8, 0)], 8, 8);
        pull.poll_read();
        pull.handle_arrived(0, vec![0; 8]);
        pull.handle_arrived(0, vec![0; 8]);
    }

    proptest! {
        #[test]
        fn the_octets_come_out_in_order_however_they_are_cut_and_arrive(
            lengths in prop::collection::vec(0u32..50, 0..8),
            beyond in 0u64..5,
            piece_bytes_max in 1u32..20,
            choices in prop::collection::vec((any::<prop::sample::Index>(), 1usize..30), 1..60),
        ) {
            let mut memory = Vec::new();
            let mut segments = Vec::new();
            for (index, &length) in lengths.iter().enumerate() {
                segments.push(segment(index as u32, length, memory.len() as u64));
                memory.extend((0..length).map(|at| (at * 7 + index as u32 * 31) as u8));
            }
            let len = (memory.len() as u64).saturating_sub(beyond);
            let mut pull = Pull::new(&segments, len, piece_bytes_max);
            let (mut asked, mut taken, mut buffers) = (Vec::new(), Vec::new(), 0);
            let mut choices = choices.into_iter().cycle();
            while !pull.is_done() {
                let (pick, count) = choices.next().unwrap();
                if pick.index(2) == 0 && let Some(read) = pull.poll_read() {
                    prop_assert!(read.len >= 1 && read.len <= piece_bytes_max);
                    buffers += 1;
                    asked.push(read);
                } else if !asked.is_empty() {
                    let read = asked.swap_remove(pick.index(asked.len()));
                    let mut buf = memory[read.offset as usize..][..read.len as usize].to_vec();
                    buf.extend([0xff; 3]);
                    pull.handle_arrived(read.number, buf);
                } else if let Some(read) = pull.poll_read() {
                    buffers += 1;
                    asked.push(read);
                }
                let octets = pull.octets();
                let count = count.min(octets.len());
                taken.extend_from_slice(&octets[..count]);
                if count > 0 && pull.take(count).is_some() {
                    buffers -= 1;
                }
            }
            prop_assert_eq!(&taken, &memory[..len as usize]);
            prop_assert_eq!((buffers, pull.into_buffers().count()), (0, 0));
        }
    }
}
