//! What a lane parks on, which the standard library does not offer.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

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

/// An eventfd that is written only while somebody means to sleep on it: ringing an awake lane costs one atomic swap.
#[derive(Debug)]
pub(super) struct Bell {
    file: File,
    armed: AtomicBool,
    /// Set after the descriptor was written, so that whoever clears it finds something to read.
    rung: AtomicBool,
}

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: File::from(eventfd()?), armed: AtomicBool::new(false), rung: AtomicBool::new(false) })
    }

    /// The next [`Bell::ring`] makes the descriptor readable. Look once more for work after this call.
    pub(super) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// There is work.
    pub(super) fn ring(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            // A full counter is readable as well, so a refused write loses nothing.
            let _ = (&self.file).write(&1u64.to_ne_bytes());
            self.rung.store(true, Ordering::SeqCst);
        }
    }

    /// Makes the descriptor silent again. What was armed stays so: the look after [`Bell::arm`] comes through here.
    pub(super) fn silence(&self) {
        if self.rung.swap(false, Ordering::SeqCst) {
            let _ = (&self.file).read(&mut [0; 8]);
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(bell: &Bell) -> bool {
        let file = File::from(bell.as_fd().try_clone_to_owned().unwrap());
        (&file).read(&mut [0; 8]).is_ok()
    }

    #[test]
    fn a_bell_rings_only_while_armed_and_falls_silent() {
        let bell = Bell::new().unwrap();
        bell.ring();
        assert!(!is_readable(&bell));
        bell.arm();
        bell.ring();
        bell.ring();
        bell.silence();
        assert!(!is_readable(&bell), "silence took the readiness back");
        bell.arm();
        bell.ring();
        assert!(is_readable(&bell));
        bell.arm();
        bell.silence();
        bell.ring();
        assert!(is_readable(&bell), "the look after arming does not disarm");
    }
}
