//! A timer that can be slept on beside other descriptors, finer than a runtime's.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Timer {
    file: File,
}

impl Timer {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nothing else owns.
        Ok(Self { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// Becomes readable once, `wait` from now.
    pub(super) fn set(&self, wait: Duration) -> io::Result<()> {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = libc::timespec {
            tv_sec: wait.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: wait.subsec_nanos().max(1).into(),
        };
        let setting = libc::itimerspec { it_interval: zero, it_value };
        // SAFETY: an open timer and a setting valid for reading; the old one is not asked for.
        if unsafe { libc::timerfd_settime(self.file.as_raw_fd(), 0, &setting, std::ptr::null_mut()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Makes it silent again.
    pub(super) fn silence(&self) {
        // Nothing to read means that it was silent.
        let _ = (&self.file).read(&mut [0; 8]);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::sys::wait_readable;
    use super::*;

    #[test]
    fn it_wakes_a_sleeper_once() {
        let timer = Timer::new().unwrap();
        timer.set(Duration::ZERO).unwrap();
        wait_readable(timer.as_fd(), None).unwrap();
        timer.silence();
        assert_eq!((&timer.file).read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
