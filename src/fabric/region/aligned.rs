//! Page-aligned memory, and pieces of it that have one owner each: what O_DIRECT and registered buffers are made of.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of every [`AlignedBuf`] and of every extent, in bytes. O_DIRECT asks for 512 to 4,096.
pub const ALIGN_BYTES: usize = 4096;

/// Anonymous, page-aligned, zeroed memory that goes back to the system when dropped.
///
/// It is owned memory like a `Box<[u8]>`, only aligned for O_DIRECT and never moved, so the kernel may be given its
/// address for as long as the value (or a piece of it) is kept.
pub struct AlignedBuf {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is private to this value and has no tie to the thread that made it.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared `AlignedBuf` only lends `&[u8]`; writing needs `&mut self`, or a piece, which is exclusive.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Memory of `len` bytes, rounded up to whole pages of 4 KiB.
    ///
    /// # Errors
    /// `InvalidInput` for zero or an overflowing length, else what `mmap` says (mostly `ENOMEM`).
    pub fn new(len: usize) -> io::Result<Self> {
        let len = match len.checked_next_multiple_of(ALIGN_BYTES) {
            Some(len) if len > 0 => len,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// Length in bytes, a multiple of 4 KiB, never zero.
    pub fn byte_len(&self) -> usize {
        self.len
    }

    /// The memory.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `base` maps `len` readable, initialised (zeroed) bytes until drop, and `&self` keeps writers out.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The memory, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Address and length, for memory that is reached in another way than by slices.
    pub(super) fn as_raw(&self) -> (NonNull<u8>, usize) {
        (self.base, self.len)
    }

    /// Cuts the memory into pieces of `piece_bytes` (a multiple of 4 KiB); a remainder is left unused.
    /// The region names the whole, for registration; the pieces own the bytes.
    ///
    /// # Panics
    /// When `piece_bytes` is zero or no multiple of 4 KiB.
    pub fn split(self, piece_bytes: usize) -> (Region, Vec<AlignedPiece>) {
        assert!(piece_bytes > 0 && piece_bytes.is_multiple_of(ALIGN_BYTES), "a piece is whole pages");
        let piece_count = self.len / piece_bytes;
        let whole = Arc::new(self);
        let pieces = (0..piece_count)
            .map(|index| AlignedPiece {
                whole: Arc::clone(&whole),
                index,
                start: index * piece_bytes,
                len: piece_bytes,
            })
            .collect();
        (Region { whole, piece_bytes, piece_count }, pieces)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; no slice of it can be alive, they all borrow from this value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// One piece of a split [`AlignedBuf`], or a part of one, exclusively owned: no two overlap and the whole lends nothing any
/// more.
pub struct AlignedPiece {
    whole: Arc<AlignedBuf>,
    index: usize,
    /// First byte within `whole`.
    start: usize,
    len: usize,
}

impl AlignedPiece {
    /// Position in its region, from zero; all parts of a piece have that of the piece.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Keeps the first `at` bytes and gives the rest.
    ///
    /// # Panics
    /// When `at` is no multiple of 4 KiB, or one of the two would be empty.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at.is_multiple_of(ALIGN_BYTES) && 0 < at && at < self.len, "{at} of {} is no place to cut", self.len);
        let rest =
            Self { whole: Arc::clone(&self.whole), index: self.index, start: self.start + at, len: self.len - at };
        self.len = at;
        rest
    }

    /// Takes back what [`split_off`](Self::split_off) gave.
    ///
    /// # Panics
    /// When `rest` does not begin where this ends, or belongs to another piece.
    pub fn rejoin(&mut self, rest: Self) {
        let follows = self.start + self.len == rest.start && self.index == rest.index;
        assert!(Arc::ptr_eq(&self.whole, &rest.whole) && follows, "a part is joined with the one it was cut from");
        self.len += rest.len;
    }

    /// Whether this piece was cut from `region`.
    pub fn is_of(&self, region: &Region) -> bool {
        Arc::ptr_eq(&self.whole, &region.whole)
    }

    /// The piece.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `split` made `start + len` fit the mapping, which the `Arc` keeps, `split_off` divides and `rejoin` adds
        // up; after `split` bytes are reached through pieces alone, pieces are disjoint and not `Clone`, and `&self`
        // keeps writers out.
        unsafe { std::slice::from_raw_parts(self.whole.base.as_ptr().add(self.start), self.len) }
    }

    /// The piece, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.whole.base.as_ptr().add(self.start), self.len) }
    }
}

/// The whole of a split [`AlignedBuf`]: gives no access to bytes, only names them for registration with a ring.
#[derive(Clone)]
pub struct Region {
    whole: Arc<AlignedBuf>,
    piece_bytes: usize,
    piece_count: usize,
}

impl Region {
    /// Pieces the region was cut into.
    pub fn piece_count(&self) -> usize {
        self.piece_count
    }

    /// Bytes of one piece.
    pub fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// One entry per piece, in order, for `io_uring_register`.
    pub(crate) fn iovecs(&self) -> Vec<libc::iovec> {
        (0..self.piece_count)
            .map(|index| libc::iovec {
                iov_base: self.whole.base.as_ptr().wrapping_add(index * self.piece_bytes).cast(),
                iov_len: self.piece_bytes,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_whole_pages() {
        let buf = AlignedBuf::new(5000).unwrap();
        assert_eq!(buf.byte_len(), 8192);
        assert_eq!(buf.as_slice().as_ptr() as usize % ALIGN_BYTES, 0);
        assert!(buf.as_slice().iter().all(|&byte| byte == 0));
        assert!(AlignedBuf::new(0).is_err());
        assert!(AlignedBuf::new(usize::MAX).is_err());
    }

    #[test]
    fn pieces_do_not_overlap_and_outlive_the_region() {
        let (region, mut pieces) = AlignedBuf::new(5 * 4096).unwrap().split(8192);
        assert_eq!((region.piece_count(), pieces.len()), (2, 2));
        assert!(pieces.iter().all(|piece| piece.is_of(&region)));
        drop(region);
        pieces[0].as_mut_slice().fill(1);
        pieces[1].as_mut_slice().fill(2);
        assert!(pieces[0].as_slice().iter().all(|&byte| byte == 1));
        assert!(pieces[1].as_slice().iter().all(|&byte| byte == 2));
        let (other, _) = AlignedBuf::new(4096).unwrap().split(4096);
        assert!(!pieces[0].is_of(&other));
    }

    #[test]
    fn a_piece_that_is_cut_and_joined_again_is_the_same_piece() {
        let (region, mut pieces) = AlignedBuf::new(6 * 4096).unwrap().split(3 * 4096);
        let address = pieces[1].as_slice().as_ptr();
        let mut third = pieces[1].split_off(4096);
        let mut last = third.split_off(4096);
        for (value, part) in (1..).zip([&mut pieces[1], &mut third, &mut last]) {
            assert_eq!((part.as_slice().len(), part.index()), (4096, 1));
            assert!(part.is_of(&region));
            part.as_mut_slice().fill(value);
        }
        third.rejoin(last);
        pieces[1].rejoin(third);
        assert_eq!((pieces[1].as_slice().as_ptr(), pieces[1].as_slice().len()), (address, 3 * 4096));
        for (value, part) in (1..).zip(pieces[1].as_slice().chunks(4096)) {
            assert!(part.iter().all(|&byte| byte == value));
        }
        assert!(pieces[0].as_slice().iter().all(|&byte| byte == 0), "the neighbour is untouched");
    }

    #[test]
    #[should_panic(expected = "joined with the one it was cut from")]
    fn pieces_that_are_neighbours_by_chance_are_not_joined() {
        let (_, mut pieces) = AlignedBuf::new(8192).unwrap().split(4096);
        let second = pieces.pop().unwrap();
        pieces[0].rejoin(second);
    }

    #[test]
    #[should_panic(expected = "joined with the one it was cut from")]
    fn parts_are_not_joined_over_a_gap() {
        let (_, mut pieces) = AlignedBuf::new(3 * 4096).unwrap().split(3 * 4096);
        let mut rest = pieces[0].split_off(4096);
        let last = rest.split_off(4096);
        pieces[0].rejoin(last);
    }
}
