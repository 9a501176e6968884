//! What a lane parks on: eventfd and epoll, which the standard library does not offer.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

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

/// Sleeps until `fd` is readable or has failed, or `timeout` has passed; `None` waits for ever. A signal ends it early.
///
/// # Errors
/// What `ppoll` says, a signal aside.
pub(super) fn wait_readable(fd: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<()> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let until = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let until = until.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `entry` is valid for one entry and `until` null or a valid time; both outlive the call, no mask is passed.
    if unsafe { libc::ppoll(&mut entry, 1, until, std::ptr::null()) } < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
    }
    Ok(())
}

/// An eventfd that is written only while somebody means to sleep on it: ringing an awake lane costs one atomic swap.
///
/// ```text
///  AWAKE ──arm──► ARMED ──look──► LOOKED ──(sleep) look──► AWAKE
///    ▲              └──────ring──────┴─ writes the descriptor
///    └─────────────────────────────────┘
/// ```
#[derive(Debug)]
pub(super) struct Bell {
    file: File,
    state: AtomicU8,
    /// Set after the descriptor was written, so that whoever clears it finds something to read.
    rung: AtomicBool,
}

const AWAKE: u8 = 0;
/// Armed, and the last look has been taken.
const LOOKED: u8 = 1;
const ARMED: u8 = 2;

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: File::from(eventfd()?), state: AtomicU8::new(AWAKE), rung: AtomicBool::new(false) })
    }

    /// The next [`Bell::ring`] makes the descriptor readable. Look once more for work after this call.
    pub(super) fn arm(&self) {
        self.state.store(ARMED, Ordering::SeqCst);
    }

    /// There is work.
    pub(super) fn ring(&self) {
        if self.state.load(Ordering::SeqCst) != AWAKE && self.state.swap(AWAKE, Ordering::SeqCst) != AWAKE {
            // A full counter is readable as well, so a refused write loses nothing.
            let _ = (&self.file).write(&1u64.to_ne_bytes());
            self.rung.store(true, Ordering::SeqCst);
        }
    }

    /// The lane looks for work: the first look after arming leaves the bell armed, the next one means the sleep is over.
    pub(super) fn look(&self) {
        let step = |state| match state {
            ARMED => Some(LOOKED),
            LOOKED => Some(AWAKE),
            _ => None,
        };
        // Refused when it is awake already.
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step);
    }

    /// Makes the descriptor silent again. True if it was rung: whoever rang took the arming back, so a lane that goes to
    /// sleep after this without arming anew is not woken by the next ring.
    #[must_use]
    pub(super) fn silence(&self) -> bool {
        let was_rung = self.rung.swap(false, Ordering::SeqCst);
        if was_rung {
            let _ = (&self.file).read(&mut [0; 8]);
        }
        was_rung
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Descriptors of one [`Epoll::poll`].
pub(super) const READY_COUNT_MAX: usize = 64;

/// What a descriptor is ready for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Ready {
    pub(super) token: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
}

/// A level-triggered epoll instance; itself a descriptor that is readable while one of its members is ready.
#[derive(Debug)]
pub(super) struct Epoll {
    fd: OwnedFd,
}

impl Epoll {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nothing else owns.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, read, write)
    }

    pub(super) fn change(&self, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, read, write)
    }

    pub(super) fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, false, false)
    }

    fn control(&self, operation: i32, fd: BorrowedFd<'_>, token: u64, read: bool, write: bool) -> io::Result<()> {
        let mut events = 0;
        if read {
            events |= libc::EPOLLIN | libc::EPOLLRDHUP;
        }
        if write {
            events |= libc::EPOLLOUT;
        }
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: both descriptors are open for the length of the call and `event` is valid memory of the right type.
        if unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd.as_raw_fd(), &mut event) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// What is ready now, at most [`READY_COUNT_MAX`] descriptors; never waits.
    pub(super) fn poll(&self, ready: &mut Vec<Ready>) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; READY_COUNT_MAX];
        // SAFETY: `events` is writable memory for that many events.
        let count = unsafe { libc::epoll_wait(self.fd.as_raw_fd(), events.as_mut_ptr(), events.len() as i32, 0) };
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        let failed = libc::EPOLLERR | libc::EPOLLHUP;
        ready.extend(events[..count as usize].iter().map(|event| {
            let flags = event.events as i32;
            Ready {
                token: event.u64,
                readable: flags & (libc::EPOLLIN | libc::EPOLLRDHUP | failed) != 0,
                writable: flags & (libc::EPOLLOUT | failed) != 0,
            }
        }));
        Ok(())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(epoll: &Epoll) -> Vec<u64> {
        let mut ready = Vec::new();
        epoll.poll(&mut ready).unwrap();
        ready.iter().map(|ready| ready.token).collect()
    }

    #[test]
    fn a_sleeper_wakes_by_the_bell_and_by_the_clock() {
        let bell = Bell::new().unwrap();
        wait_readable(bell.as_fd(), Some(Duration::from_nanos(1))).unwrap();
        bell.arm();
        bell.ring();
        wait_readable(bell.as_fd(), None).unwrap();
    }

    #[test]
    fn a_bell_rings_only_while_armed_and_falls_silent() {
        let (epoll, bell) = (Epoll::new().unwrap(), Bell::new().unwrap());
        epoll.add(bell.as_fd(), 7, true, false).unwrap();
        bell.ring();
        assert!(tokens(&epoll).is_empty());
        bell.arm();
        bell.ring();
        bell.ring();
        assert_eq!(tokens(&epoll), [7]);
        assert!(bell.silence());
        assert!(tokens(&epoll).is_empty());
        assert!(!bell.silence(), "a lane hears of a ring once");
        bell.arm();
        bell.look();
        bell.ring();
        assert_eq!(tokens(&epoll), [7], "the look after arming does not disarm");
        assert!(bell.silence());
        bell.arm();
        bell.look();
        bell.look();
        bell.ring();
        assert!(tokens(&epoll).is_empty(), "the sleep is over");
    }
}
