//! The files that hold the extents of one pool.

use super::{
    FILE_BYTES_MAX, FILE_COUNT_MAX, PoolDir, PoolError, UNIT_BYTES, extents_name, failed, failed_inside, whole_units,
    wipe,
};
use crate::store::uring::sys;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tracing::warn;

/// The files of one pool: made one by one as the store grows, kept open until the last user lets go.
#[derive(Debug)]
pub struct PoolFiles {
    dir: PoolDir,
    pub(super) file_bytes_max: u64,
    capacity_bytes: AtomicU64,
    files: RwLock<Vec<Arc<PoolFile>>>,
    /// Next number to try for a name; the lock makes growing one at a time.
    next_number: Mutex<u32>,
    warned_buffered: AtomicBool,
}

/// What [`PoolFiles::grow`] added.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grown {
    /// Index for [`PoolFiles::file`].
    pub index: u16,
    /// Length of the file, a multiple of 1 MiB.
    pub bytes: u64,
}

impl PoolFiles {
    /// No files yet: [`grow`](Self::grow) makes the first.
    pub fn new(dir: PoolDir) -> Self {
        Self {
            capacity_bytes: AtomicU64::new(dir.capacity_bytes),
            dir,
            file_bytes_max: FILE_BYTES_MAX,
            files: RwLock::default(),
            next_number: Mutex::new(0),
            warned_buffered: AtomicBool::new(false),
        }
    }

    /// The pool's directory.
    pub fn path(&self) -> &Path {
        &self.dir.dir
    }

    /// Bytes the pool may take; less than at start once the file system was found full.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes.load(Ordering::Relaxed)
    }

    /// Bytes the files made so far have.
    pub fn allocated_bytes(&self) -> u64 {
        self.files.read().unwrap_or_else(PoisonError::into_inner).iter().map(|file| file.bytes).sum()
    }

    /// Files made so far.
    pub fn file_count(&self) -> usize {
        self.files.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The file with that index, or `None` if it was not made yet.
    pub fn file(&self, index: u16) -> Option<Arc<PoolFile>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(usize::from(index)).cloned()
    }

    /// Removes the files, whose content no other process can use: the space is free once they are closed. For the end of a
    /// daemon; the pool itself stays and stays locked.
    ///
    /// # Errors
    /// Whatever the file system says.
    pub fn discard(&self) -> Result<(), PoolError> {
        wipe(&self.dir.dir)
    }

    /// Makes the next file, 1 GiB or what is left of the capacity; `None` when nothing is left. Blocks while the file
    /// system allocates.
    ///
    /// A file system that is full lowers the capacity to what there is, with a warning, and is no error.
    ///
    /// # Errors
    /// [`PoolError::Vanished`] when the directory is gone, else what the file system says.
    pub fn grow(&self) -> Result<Option<Grown>, PoolError> {
        self.grow_with(&|file, bytes| sys::preallocate(file, bytes))
    }

    pub(super) fn grow_with(
        &self,
        preallocate: &dyn Fn(&File, u64) -> io::Result<()>,
    ) -> Result<Option<Grown>, PoolError> {
        let mut next_number = self.next_number.lock().unwrap_or_else(PoisonError::into_inner);
        let allocated_bytes = self.allocated_bytes();
        let Ok(index) = u16::try_from(self.file_count()) else { return Ok(None) };
        let left_bytes = whole_units(self.capacity_bytes().saturating_sub(allocated_bytes));
        let mut bytes = left_bytes.min(self.file_bytes_max);
        if bytes == 0 {
            return Ok(None);
        }
        let Some((path, file)) = self.create_file(&mut next_number)? else {
            self.shrink_capacity(allocated_bytes, "no file name is left");
            return Ok(None);
        };
        let remove = |error| {
            // The file is not in use yet and a name without extents helps nobody.
            let _ = std::fs::remove_file(&path);
            error
        };
        loop {
            match preallocate(&file, bytes) {
                Ok(()) => break,
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {
                    // A failed call may have allocated a part, which must not count against the next try.
                    file.set_len(0).map_err(|source| remove(failed("truncate", &path, source)))?;
                    // File systems keep some of what they call free, so what they say is only where to go on.
                    let free_bytes = sys::free_bytes(&file).unwrap_or(0);
                    bytes = whole_units(free_bytes.min(bytes - (bytes / 16).max(UNIT_BYTES)));
                    if bytes == 0 {
                        let _ = std::fs::remove_file(&path);
                        self.shrink_capacity(allocated_bytes, "the file system is full");
                        return Ok(None);
                    }
                }
                Err(error) => return Err(remove(failed("allocate", &path, error))),
            }
        }
        if bytes < left_bytes.min(self.file_bytes_max) {
            self.shrink_capacity(allocated_bytes + bytes, "the file system is full");
        }
        let direct = sys::set_direct(&file).map_err(|source| remove(failed("open O_DIRECT", &path, source)))?;
        if !direct && !self.warned_buffered.swap(true, Ordering::Relaxed) {
            warn!(dir = %self.path().display(), "no O_DIRECT here: the pool goes through the page cache");
        }
        let file = Arc::new(PoolFile::new(file, bytes, direct));
        self.files.write().unwrap_or_else(PoisonError::into_inner).push(file);
        Ok(Some(Grown { index, bytes }))
    }

    /// A new file under the next free name: what is there already is no file of ours, so it is left alone.
    fn create_file(&self, next_number: &mut u32) -> Result<Option<(PathBuf, File)>, PoolError> {
        while *next_number < FILE_COUNT_MAX {
            let path = self.path().join(extents_name(*next_number));
            *next_number += 1;
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => return Ok(Some((path, file))),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    *next_number -= 1;
                    return Err(failed_inside(self.path(), "create", &path, error));
                }
            }
        }
        Ok(None)
    }

    fn shrink_capacity(&self, bytes: u64, reason: &str) {
        let before_bytes = self.capacity_bytes.swap(bytes, Ordering::Relaxed);
        warn!(dir = %self.path().display(), before_bytes, now_bytes = bytes, "the pool's capacity shrinks: {reason}");
    }
}

/// One open file of a pool; usable from any thread.
#[derive(Debug)]
pub struct PoolFile {
    file: File,
    bytes: u64,
    direct: bool,
    serial: u64,
}

impl PoolFile {
    fn new(file: File, bytes: u64, direct: bool) -> Self {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        Self { file, bytes, direct, serial: SERIAL.fetch_add(1, Ordering::Relaxed) }
    }

    /// Length in bytes as it was made.
    pub fn byte_len(&self) -> u64 {
        self.bytes
    }

    /// Whether it bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Names this open file within the process, never reused (a descriptor's number is).
    pub fn serial(&self) -> u64 {
        self.serial
    }

    /// For positioned reads and writes.
    pub fn as_file(&self) -> &File {
        &self.file
    }
}

impl AsRawFd for PoolFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
