//! System calls the disk side needs and the standard library does not offer.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::fabric::region::aligned::{ALIGN_BYTES, AlignedBuf};
pub use crate::fabric::sys::{eventfd, watch};

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
