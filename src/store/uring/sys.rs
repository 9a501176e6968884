//! Memory and system calls the disk side needs and the standard library does not offer.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

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

    /// Cuts the memory into pieces of `piece_bytes` (a multiple of 4 KiB); a remainder is left unused.
    /// The region names the whole, for registration; the pieces own the bytes.
    ///
    /// # Panics
    /// When `piece_bytes` is zero or no multiple of 4 KiB.
    pub fn split(self, piece_bytes: usize) -> (Region, Vec<AlignedPiece>) {
        assert!(piece_bytes > 0 && piece_bytes.is_multiple_of(ALIGN_BYTES), "a piece is whole pages");
        let piece_count = self.len / piece_bytes;
        let whole = Arc::new(self);
        let pieces =
            (0..piece_count).map(|index| AlignedPiece { whole: Arc::clone(&whole), index, len: piece_bytes }).collect();
        (Region { whole, piece_bytes, piece_count }, pieces)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; no slice of it can be alive, they all borrow from this value.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// One piece of a split [`AlignedBuf`], exclusively owned: no two pieces overlap and the whole lends nothing any more.
pub struct AlignedPiece {
    whole: Arc<AlignedBuf>,
    index: usize,
    len: usize,
}

impl AlignedPiece {
    /// Position in its region, from zero.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether this piece was cut from `region`.
    pub fn is_of(&self, region: &Region) -> bool {
        Arc::ptr_eq(&self.whole, &region.whole)
    }

    /// The piece.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `split` made `(index + 1) * len` fit the mapping, which the `Arc` keeps; after `split` bytes are
        // reached through pieces alone, pieces are disjoint and not `Clone`, and `&self` keeps writers out.
        unsafe { std::slice::from_raw_parts(self.whole.base.as_ptr().add(self.index * self.len), self.len) }
    }

    /// The piece, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.whole.base.as_ptr().add(self.index * self.len), self.len) }
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
    pub(super) fn iovecs(&self) -> Vec<libc::iovec> {
        (0..self.piece_count)
            .map(|index| libc::iovec {
                iov_base: self.whole.base.as_ptr().wrapping_add(index * self.piece_bytes).cast(),
                iov_len: self.piece_bytes,
            })
            .collect()
    }
}

/// A non-blocking eventfd with count zero.
///
/// # Errors
/// What `eventfd` says: no descriptor or no memory left.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Lets a tokio runtime (that of the calling thread) watch `file`, a non-blocking descriptor that can be polled.
///
/// # Errors
/// What `epoll_ctl` says.
///
/// # Panics
/// Outside of a runtime.
pub fn watch(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: the `AsyncFd` owns `file`, which names one descriptor from here to its drop.
    Ok(unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }?)
}

/// Bytes an unprivileged process may still allocate on the file system that holds `file`.
///
/// # Errors
/// What `fstatvfs` says.
pub fn free_bytes(file: &File) -> io::Result<u64> {
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the descriptor is open and `stat` is writable memory of the right type.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed is a valid value of this plain struct, and the call succeeded.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Allocates the first `bytes` of `file` on disk.
///
/// # Errors
/// What `posix_fallocate` says; `ENOSPC` when the file system has less.
pub fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        // SAFETY: the descriptor is open; no pointers are passed.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
            0 => return Ok(()),
            libc::EINTR => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Switches the page cache off for `file`; `false` when the file system does not do O_DIRECT with offsets and memory
/// aligned to 4 KiB, and then nothing has changed.
///
/// # Errors
/// What `fcntl` says, other than that O_DIRECT is not supported.
pub fn set_direct(file: &File) -> io::Result<bool> {
    if let Some((memory, offset)) = direct_alignment(file) {
        let usable = |align: u32| align != 0 && align as usize <= ALIGN_BYTES;
        if !usable(memory) || !usable(offset) {
            return Ok(false);
        }
    }
    // SAFETY: the descriptor is open; F_GETFL takes no argument.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open; F_SETFL takes an int.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_DIRECT) } < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::EINVAL) { Ok(false) } else { Err(error) };
    }
    // What statx says (or cannot say, before Linux 6.1) is a promise; one read is the proof.
    let mut probe = AlignedBuf::new(ALIGN_BYTES)?;
    match std::os::unix::fs::FileExt::read_at(file, probe.as_mut_slice(), 0) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: as above.
            if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) } < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(false)
        }
        Err(error) => Err(error),
        Ok(_) => Ok(true),
    }
}

/// (memory, offset) alignment for O_DIRECT as statx reports it; zeros mean "not supported", `None` "cannot say".
fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the descriptor is open, the path is an empty C string, `stat` is writable memory of the right type.
    let status = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, stat.as_mut_ptr())
    };
    if status != 0 {
        return None;
    }
    // SAFETY: zeroed is a valid value of this plain struct, and the call succeeded.
    let stat = unsafe { stat.assume_init() };
    (stat.stx_mask & libc::STATX_DIOALIGN != 0).then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
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
    fn preallocation_makes_the_file_that_long_and_direct_reads_follow() {
        let file = tempfile::tempfile().unwrap();
        preallocate(&file, 1 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        set_direct(&file).unwrap();
        let mut buf = AlignedBuf::new(ALIGN_BYTES).unwrap();
        assert_eq!(std::os::unix::fs::FileExt::read_at(&file, buf.as_mut_slice(), 4096).unwrap(), ALIGN_BYTES);
        assert!(free_bytes(&file).unwrap() > 0);
        assert_eq!(
            preallocate(&file, u64::MAX).unwrap_err().kind(),
            io::ErrorKind::InvalidInput,
            "a length the system call cannot carry never reaches it"
        );
    }
}
