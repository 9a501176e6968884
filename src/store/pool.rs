//! Pool directories: which directory the store may write to, and the preallocated files that hold its extents.
//!
//! A pool directory is one that carries the marker file `bulkhead-pool`. The store writes nowhere else, and in a pool
//! it removes nothing but regular files named `extents-NNNN.bulkhead`:
//!
//! ```text
//!  directory            open (serve)                 init
//!  does not exist       create, bless                create, bless
//!  empty, no marker     refuse: run `pool init`      bless
//!  others, no marker    refuse                       refuse
//!  marker, version 1    lock, wipe extents files     nothing to do
//!  marker, unreadable   refuse                       refuse
//!  marker, locked       refuse                       nothing to do
//! ```
//! A directory whose one entry is the `lost+found` of a fresh file system counts as empty.

use crate::error::Exit;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use thiserror::Error;
use tracing::{info, warn};

use super::uring::sys;

/// Name of the file that makes a directory a pool.
pub const MARKER_NAME: &str = "bulkhead-pool";
/// Alignment of an extent and its smallest size, in bytes.
pub const EXTENT_ALIGN: u64 = 4096;
/// Longest pool file, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Bytes that share one CRC32C.
pub const CRC_BLOCK_BYTES: usize = 64 * 1024;
/// Checksums of one segment (256 KiB at most).
pub const CRC_BLOCK_COUNT: usize = 4;

/// Capacities and file lengths are whole MiB.
const UNIT_BYTES: u64 = 1 << 20;
/// Least a pool sized by itself may have.
const DEFAULT_BYTES_MIN: u64 = 64 << 20;
/// No marker of version 1 is longer.
const MARKER_BYTES_MAX: u64 = 4096;
/// File names have four digits.
const FILE_COUNT_MAX: u32 = 10_000;

/// Why a directory is not, or cannot be, a pool.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// A path to, or through, something that is no directory.
    #[error("{} is not a directory", dir.display())]
    NotADirectory { dir: PathBuf },
    /// An existing directory nobody has blessed; `init` would.
    #[error("{} is empty but no pool yet: run `bulkhead pool init {}`", dir.display(), dir.display())]
    Empty { dir: PathBuf },
    /// Somebody else's directory.
    #[error("{} is no pool and holds other files; nothing in it was touched: choose another directory", dir.display())]
    Unmarked { dir: PathBuf },
    /// A marker that is none of version 1.
    #[error("{} does not mark a pool this version can use: {reason}", marker.display())]
    BadMarker { marker: PathBuf, reason: String },
    /// Another process has the pool open.
    #[error("{} is in use by another daemon", dir.display())]
    Locked { dir: PathBuf },
    /// The directory was removed while it was in use.
    #[error("{} has vanished", dir.display())]
    Vanished { dir: PathBuf },
    /// The file system refuses: permissions, a read-only or broken drive.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    /// More was asked for than the drive has free.
    #[error("a pool of {asked_bytes} bytes was asked for in {}, where {free_bytes} bytes are free", dir.display())]
    TooLarge { dir: PathBuf, asked_bytes: u64, free_bytes: u64 },
    /// Less was asked for than a pool can use.
    #[error("a pool of {asked_bytes} bytes is too small: {UNIT_BYTES} is the least")]
    TooSmall { asked_bytes: u64 },
    /// No size was given and the drive has too little free.
    #[error("half of the {free_bytes} bytes free in {} is less than {DEFAULT_BYTES_MIN}, the least a pool takes \
             when no size is given", dir.display())]
    NoRoom { dir: PathBuf, free_bytes: u64 },
}

impl PoolError {
    /// What the daemon exits with: 78 when the configuration has to change, 69 when the drive or directory is
    /// unavailable as it is now.
    pub fn exit_code(&self) -> Exit {
        match self {
            Self::NotADirectory { .. }
            | Self::Empty { .. }
            | Self::Unmarked { .. }
            | Self::BadMarker { .. }
            | Self::TooLarge { .. }
            | Self::TooSmall { .. } => Exit::Config,
            Self::Locked { .. } | Self::Vanished { .. } | Self::Io { .. } | Self::NoRoom { .. } => Exit::Unavailable,
        }
    }
}

impl PoolError {
    /// Whether the same may work later with nothing but time: no descriptor was left.
    pub fn is_passing(&self) -> bool {
        let Self::Io { source, .. } = self else { return false };
        matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
    }
}

/// What [`init`] found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Initialized {
    /// The directory is a pool since this call.
    Now,
    /// It was one before; nothing was changed.
    Before,
}

/// Makes `dir` a pool: creates it with its parents, or blesses it if it is empty.
///
/// # Errors
/// [`PoolError::Unmarked`] if it holds anything but a marker, which is then not touched; [`PoolError::BadMarker`] if
/// the marker there is none of this version; else what the file system says.
pub fn init(dir: &Path) -> Result<Initialized, PoolError> {
    loop {
        match DirState::of(dir)? {
            DirState::Absent => {
                if !create(dir)? {
                    continue;
                }
            }
            DirState::Marked(mut marker) => {
                return match read_marker(dir, &mut marker)? {
                    MarkerState::Valid => {
                        info!(dir = %dir.display(), "already a pool");
                        Ok(Initialized::Before)
                    }
                    MarkerState::Blank => {
                        lock(dir, &marker)?;
                        finish_marker(dir, &mut marker)?;
                        Ok(Initialized::Now)
                    }
                };
            }
            DirState::Empty => {}
            DirState::Others => return Err(PoolError::Unmarked { dir: dir.into() }),
        }
        if bless(dir)?.is_some() {
            return Ok(Initialized::Now);
        }
    }
}

/// A pool directory that is locked for this process and holds no extents of an earlier one.
#[derive(Debug)]
pub struct PoolDir {
    dir: PathBuf,
    capacity_bytes: u64,
    /// Holds the exclusive lock for as long as it is open.
    _marker: File,
}

impl PoolDir {
    /// Opens `dir` as a pool of `bytes`, or of half the free space. A directory that does not exist is created; one
    /// that does is used only if marked, and then earlier extents files in it are removed.
    ///
    /// The capacity is rounded down to whole MiB.
    ///
    /// # Errors
    /// See the table of this module and [`PoolError`]; nothing is removed when this fails before the lock is held.
    pub fn open(dir: &Path, bytes: Option<u64>) -> Result<Self, PoolError> {
        if let Some(asked_bytes) = bytes.filter(|&bytes| bytes < UNIT_BYTES) {
            return Err(PoolError::TooSmall { asked_bytes });
        }
        let marker = loop {
            match DirState::of(dir)? {
                DirState::Absent => {
                    // Whoever made it in the meantime decides what it is: look again.
                    if create(dir)?
                        && let Some(marker) = bless(dir)?
                    {
                        break marker;
                    }
                }
                DirState::Marked(mut marker) => {
                    lock(dir, &marker)?;
                    same_marker(dir, &marker)?;
                    if let MarkerState::Blank = read_marker(dir, &mut marker)? {
                        finish_marker(dir, &mut marker)?;
                    }
                    break marker;
                }
                DirState::Empty => return Err(PoolError::Empty { dir: dir.into() }),
                DirState::Others => return Err(PoolError::Unmarked { dir: dir.into() }),
            }
        };
        wipe(dir)?;
        let free_bytes = sys::free_bytes(&marker).map_err(|source| failed("ask for the free space of", dir, source))?;
        let capacity_bytes = capacity(dir, bytes, free_bytes)?;
        Ok(Self { dir: dir.into(), capacity_bytes, _marker: marker })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Bytes the pool may take, a multiple of 1 MiB.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }
}

/// What [`PoolDir::open`] would find, and what files there would be like.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Inspection {
    /// The directory exists; else it would be made.
    pub exists: bool,
    /// Bytes the pool may take, a multiple of 1 MiB.
    pub capacity_bytes: u64,
    /// Files there do without the page cache.
    pub is_direct: bool,
}

/// Looks at `dir` as [`PoolDir::open`] with the same arguments would, and changes nothing. A daemon that starts at the same
/// moment may find the pool locked.
///
/// # Errors
/// What `open` would say.
pub fn inspect(dir: &Path, bytes: Option<u64>) -> Result<Inspection, PoolError> {
    if let Some(asked_bytes) = bytes.filter(|&bytes| bytes < UNIT_BYTES) {
        return Err(PoolError::TooSmall { asked_bytes });
    }
    let exists = match DirState::of(dir)? {
        DirState::Absent => false,
        DirState::Empty => return Err(PoolError::Empty { dir: dir.into() }),
        DirState::Others => return Err(PoolError::Unmarked { dir: dir.into() }),
        DirState::Marked(mut marker) => {
            lock(dir, &marker)?;
            read_marker(dir, &mut marker)?;
            true
        }
    };
    let from = if dir.is_absolute() { dir.to_owned() } else { Path::new(".").join(dir) };
    let place = from.ancestors().find(|above| above.is_dir()).unwrap_or(dir);
    let probe = probe_file(place).map_err(|source| failed("create a file in", place, source))?;
    let wiped_bytes = if exists { extents_bytes(dir)? } else { 0 };
    let free_bytes = sys::free_bytes(&probe).map_err(|source| failed("ask for the free space of", place, source))?;
    let capacity_bytes = capacity(dir, bytes, free_bytes.saturating_add(wiped_bytes))?;
    let block = probe.set_len(EXTENT_ALIGN).and_then(|()| sys::set_direct(&probe));
    let is_direct = block.map_err(|source| failed("open O_DIRECT in", place, source))?;
    Ok(Inspection { exists, capacity_bytes, is_direct })
}

/// A file in `dir` that has no name, where the file system has such files, or none any more.
fn probe_file(dir: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(libc::O_TMPFILE).open(dir) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {}
        opened => return opened,
    }
    let path = dir.join(format!(".bulkhead-probe-{}", std::process::id()));
    let file = options.create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// What the drive gets back when `dir` is wiped.
fn extents_bytes(dir: &Path) -> Result<u64, PoolError> {
    let files = entries(dir)?.flatten().filter(|entry| is_extents_name(&entry.file_name()));
    // `blocks` counts 512 bytes each, whatever the file system's block is.
    let held = files.filter_map(|file| file.metadata().ok()).filter(std::fs::Metadata::is_file);
    Ok(held.map(|metadata| metadata.blocks().saturating_mul(512)).sum())
}

enum DirState {
    Absent,
    Empty,
    Others,
    Marked(File),
}

impl DirState {
    fn of(dir: &Path) -> Result<Self, PoolError> {
        match std::fs::metadata(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::Absent),
            // A component of the path that is a file, say.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                return Err(PoolError::NotADirectory { dir: dir.into() });
            }
            Err(error) => return Err(failed("look at", dir, error)),
            Ok(metadata) if !metadata.is_dir() => return Err(PoolError::NotADirectory { dir: dir.into() }),
            Ok(_) => {}
        }
        let path = dir.join(MARKER_NAME);
        // O_NONBLOCK: a FIFO of that name must not hang us.
        match OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path) {
            Ok(marker) => {
                let metadata = marker.metadata().map_err(|source| failed("look at", &path, source))?;
                if !metadata.is_file() {
                    return Err(bad_marker(dir, "it is not a regular file"));
                }
                return Ok(Self::Marked(marker));
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT) => {}
                Some(libc::ELOOP | libc::EISDIR | libc::ENXIO) => {
                    return Err(bad_marker(dir, "it is not a regular file"));
                }
                _ => return Err(failed("open", &path, error)),
            },
        }
        let others = entries(dir)?.any(|entry| entry.map_or(true, |entry| entry.file_name() != "lost+found"));
        Ok(if others { Self::Others } else { Self::Empty })
    }
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> PoolError {
    PoolError::Io { action, path: path.into(), source }
}

fn bad_marker(dir: &Path, reason: impl Into<String>) -> PoolError {
    PoolError::BadMarker { marker: dir.join(MARKER_NAME), reason: reason.into() }
}

/// Like [`failed`] for what happens inside a directory that was there a moment ago.
fn failed_inside(dir: &Path, action: &'static str, path: &Path, source: io::Error) -> PoolError {
    if source.kind() == io::ErrorKind::NotFound && !dir.is_dir() {
        PoolError::Vanished { dir: dir.into() }
    } else {
        failed(action, path, source)
    }
}

fn entries(dir: &Path) -> Result<std::fs::ReadDir, PoolError> {
    std::fs::read_dir(dir).map_err(|source| failed_inside(dir, "list", dir, source))
}

/// Creates `dir` and its parents for this user alone; `false` if somebody else made it first.
fn create(dir: &Path) -> Result<bool, PoolError> {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        builder.recursive(true).create(parent).map_err(|source| failed("create", parent, source))?;
    }
    match builder.recursive(false).create(dir) {
        Ok(()) => Ok(true),
        // A link that leads nowhere is absent to `metadata` and present to `mkdir`; following it is not ours to do.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.exists() => Ok(false),
        Err(error) => Err(failed("create", dir, error)),
    }
}

/// Puts a locked marker into an empty directory; `None` if somebody else was first.
fn bless(dir: &Path) -> Result<Option<File>, PoolError> {
    let path = dir.join(MARKER_NAME);
    let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
    let mut marker = match opened {
        Ok(marker) => marker,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        Err(error) => return Err(failed_inside(dir, "create", &path, error)),
    };
    // From creation to lock the marker is blank; who locks it in between finishes it, and we are locked out.
    lock(dir, &marker)?;
    if let MarkerState::Blank = read_marker(dir, &mut marker)? {
        finish_marker(dir, &mut marker)?;
    }
    Ok(Some(marker))
}

/// A lock outlives its owner for a moment where another thread of the owner starts a program: until that program is
/// executed, it has every descriptor too. So who finds the marker locked looks again for so long.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);

fn lock(dir: &Path, marker: &File) -> Result<(), PoolError> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match marker.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Err(TryLockError::WouldBlock) => return Err(PoolError::Locked { dir: dir.into() }),
            Err(TryLockError::Error(source)) => return Err(failed("lock", &dir.join(MARKER_NAME), source)),
        }
    }
}

/// A lock protects only if it is on the marker that others will open.
fn same_marker(dir: &Path, marker: &File) -> Result<(), PoolError> {
    let path = dir.join(MARKER_NAME);
    let named = std::fs::symlink_metadata(&path).map_err(|source| failed_inside(dir, "look at", &path, source))?;
    let opened = marker.metadata().map_err(|source| failed("look at", &path, source))?;
    if (named.dev(), named.ino()) == (opened.dev(), opened.ino()) {
        Ok(())
    } else {
        Err(PoolError::Locked { dir: dir.into() })
    }
}

enum MarkerState {
    Valid,
    /// Nothing but the marker is there, and nothing is in it: blessing was interrupted.
    Blank,
}

#[derive(Deserialize)]
struct Marker {
    version: u32,
    #[serde(rename = "created")]
    _created: u64,
    #[serde(rename = "id")]
    _id: String,
}

fn read_marker(dir: &Path, marker: &mut File) -> Result<MarkerState, PoolError> {
    let path = dir.join(MARKER_NAME);
    let mut text = Vec::new();
    marker.take(MARKER_BYTES_MAX + 1).read_to_end(&mut text).map_err(|source| failed("read", &path, source))?;
    if text.is_empty() {
        let alone = |entry: io::Result<std::fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name() == MARKER_NAME || entry.file_name() == "lost+found")
        };
        return if entries(dir)?.all(alone) { Ok(MarkerState::Blank) } else { Err(bad_marker(dir, "it is empty")) };
    }
    if text.len() as u64 > MARKER_BYTES_MAX {
        return Err(bad_marker(dir, format!("it is longer than {MARKER_BYTES_MAX} bytes")));
    }
    let text = std::str::from_utf8(&text).map_err(|_| bad_marker(dir, "it is not text"))?;
    // The version first: what else a later version writes is not ours to judge.
    let table: toml::Table = text.parse().map_err(|_| bad_marker(dir, "it is not TOML"))?;
    match table.get("version").and_then(toml::Value::as_integer) {
        Some(1) => {}
        Some(version) => return Err(bad_marker(dir, format!("its version is {version}, not 1"))),
        None => return Err(bad_marker(dir, "it has no version")),
    }
    let marker: Marker = toml::from_str(text).map_err(|error| bad_marker(dir, error.message()))?;
    debug_assert_eq!(marker.version, 1);
    Ok(MarkerState::Valid)
}

fn finish_marker(dir: &Path, marker: &mut File) -> Result<(), PoolError> {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    // Not a secret, only something two pools do not share.
    let id = (RandomState::new().hash_one(created), RandomState::new().hash_one(std::process::id()));
    let text = format!(
        "# This directory belongs to bulkhead, which removes the files extents-NNNN.bulkhead in it at every start.\n\
         version = 1\n\
         created = {created} # seconds since 1970\n\
         id = \"{:016x}{:016x}\"\n",
        id.0, id.1
    );
    marker
        .write_all(text.as_bytes())
        .and_then(|()| marker.sync_all())
        .map_err(|source| failed("write", &dir.join(MARKER_NAME), source))
}

fn extents_name(number: u32) -> String {
    format!("extents-{number:04}.bulkhead")
}

fn is_extents_name(name: &std::ffi::OsStr) -> bool {
    let Some(digits) = name.to_str().and_then(|name| name.strip_prefix("extents-")?.strip_suffix(".bulkhead")) else {
        return false;
    };
    digits.len() == 4 && digits.bytes().all(|digit| digit.is_ascii_digit())
}

/// Removes what an earlier process left. Removal takes the name away and never what a link points to.
fn wipe(dir: &Path) -> Result<(), PoolError> {
    let mut removed_count = 0u64;
    for entry in entries(dir)? {
        let entry = entry.map_err(|source| failed_inside(dir, "list", dir, source))?;
        if !is_extents_name(&entry.file_name()) {
            continue;
        }
        let path = entry.path();
        let kind = entry.file_type().map_err(|source| failed_inside(dir, "look at", &path, source))?;
        if kind.is_file() {
            std::fs::remove_file(&path).map_err(|source| failed_inside(dir, "remove", &path, source))?;
            removed_count += 1;
        }
    }
    if removed_count > 0 {
        info!(dir = %dir.display(), removed_count, "pool wiped");
    }
    Ok(())
}

fn capacity(dir: &Path, bytes: Option<u64>, free_bytes: u64) -> Result<u64, PoolError> {
    match bytes {
        Some(asked_bytes) if asked_bytes > free_bytes => {
            Err(PoolError::TooLarge { dir: dir.into(), asked_bytes, free_bytes })
        }
        Some(asked_bytes) => Ok(whole_units(asked_bytes)),
        None if free_bytes / 2 < DEFAULT_BYTES_MIN => Err(PoolError::NoRoom { dir: dir.into(), free_bytes }),
        None => Ok(whole_units(free_bytes / 2)),
    }
}

fn whole_units(bytes: u64) -> u64 {
    bytes - bytes % UNIT_BYTES
}

/// The files of one pool: made one by one as the store grows, kept open until the last user lets go.
#[derive(Debug)]
pub struct PoolFiles {
    dir: PoolDir,
    file_bytes_max: u64,
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

    fn grow_with(&self, preallocate: &dyn Fn(&File, u64) -> io::Result<()>) -> Result<Option<Grown>, PoolError> {
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

/// Where one segment lies: `2^order` units of 4 KiB in one file of one drive.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ExtentId {
    offset: u32,
    drive: u16,
    file: u16,
    order: u8,
}

impl ExtentId {
    /// Largest order: one whole file of 1 GiB.
    pub const ORDER_MAX: u8 = 18;

    /// `offset` counts units of 4 KiB from the start of the file.
    ///
    /// # Panics
    /// When `order` is above [`ORDER_MAX`](Self::ORDER_MAX).
    pub const fn new(drive: u16, file: u16, offset: u32, order: u8) -> Self {
        assert!(order <= Self::ORDER_MAX, "an extent is no longer than a file");
        Self { offset, drive, file, order }
    }

    /// Index of the drive, in the order of the configuration.
    pub const fn drive(self) -> u16 {
        self.drive
    }

    /// Index of the file within its pool.
    pub const fn file(self) -> u16 {
        self.file
    }

    /// Start in units of 4 KiB.
    pub const fn offset(self) -> u32 {
        self.offset
    }

    /// Size as a power of two of units of 4 KiB.
    pub const fn order(self) -> u8 {
        self.order
    }

    /// Start in bytes from the start of the file.
    pub const fn byte_offset(self) -> u64 {
        self.offset as u64 * EXTENT_ALIGN
    }

    /// Size in bytes.
    pub const fn byte_len(self) -> u64 {
        EXTENT_ALIGN << self.order
    }
}

/// CRC32C of each 64 KiB of a segment, the last one perhaps shorter; zero for blocks it does not have.
///
/// # Panics
/// When `segment` is longer than 256 KiB.
pub fn block_crcs(segment: &[u8]) -> [u32; CRC_BLOCK_COUNT] {
    assert!(segment.len() <= CRC_BLOCK_BYTES * CRC_BLOCK_COUNT, "a segment has at most four blocks");
    let mut crcs = [0; CRC_BLOCK_COUNT];
    for (crc, block) in crcs.iter_mut().zip(segment.chunks(CRC_BLOCK_BYTES)) {
        *crc = crc32c::crc32c(block);
    }
    crcs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

    const MIB: u64 = 1 << 20;

    /// Every path below `dir` with what it is and holds; extents files are left out.
    fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            let path = entry.path();
            if kind.is_symlink() {
                found.insert(path.clone(), std::fs::read_link(path).unwrap().into_os_string().into_encoded_bytes());
            } else if kind.is_dir() {
                found.extend(snapshot(&path));
                found.insert(path, b"directory".into());
            } else {
                found.insert(path.clone(), std::fs::read(path).unwrap());
            }
        }
        found
    }

    fn marked(dir: &Path) {
        init(dir).unwrap();
    }

    /// Peers that took all descriptors made the pool smaller for ever.
    #[test]
    fn want_of_descriptors_passes_and_other_errors_stay() {
        let error = |number| failed("create", Path::new("x"), io::Error::from_raw_os_error(number));
        assert!(error(libc::EMFILE).is_passing() && error(libc::ENFILE).is_passing());
        assert!(!error(libc::EROFS).is_passing() && !error(libc::ENOSPC).is_passing());
        assert!(!PoolError::Vanished { dir: "x".into() }.is_passing());
    }

    #[test]
    fn an_absent_directory_is_created_for_this_user_alone_and_blessed() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("a/b/pool");
        let pool = PoolDir::open(&dir, Some(8 * MIB + 5)).unwrap();
        assert_eq!(pool.capacity_bytes(), 8 * MIB);
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let text = std::fs::read_to_string(dir.join(MARKER_NAME)).unwrap();
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["version"].as_integer(), Some(1));
        assert_eq!(table["id"].as_str().unwrap().len(), 32);
        assert!(table["created"].as_integer().unwrap() > 0);
    }

    #[test]
    fn an_empty_directory_is_refused_until_init_blesses_it() {
        let temp = tempfile::tempdir().unwrap();
        let error = PoolDir::open(temp.path(), None).unwrap_err();
        assert!(matches!(error, PoolError::Empty { .. }), "{error}");
        assert!(error.to_string().contains("bulkhead pool init"), "{error}");
        assert_eq!(error.exit_code(), Exit::Config);
        assert!(snapshot(temp.path()).is_empty());
        assert_eq!(init(temp.path()).unwrap(), Initialized::Now);
        assert_eq!(init(temp.path()).unwrap(), Initialized::Before);
        PoolDir::open(temp.path(), Some(MIB)).unwrap();
    }

    #[test]
    fn a_fresh_file_system_with_its_lost_and_found_counts_as_empty() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::create_dir(temp.path().join("lost+found")).unwrap();
        assert!(matches!(PoolDir::open(temp.path(), None), Err(PoolError::Empty { .. })));
        assert_eq!(init(temp.path()).unwrap(), Initialized::Now);
        PoolDir::open(temp.path(), Some(MIB)).unwrap();
        assert!(temp.path().join("lost+found").is_dir());
    }

    #[test]
    fn a_directory_with_other_files_is_refused_and_not_touched() {
        for name in ["notes.txt", "extents-0000.bulkhead", ".hidden"] {
            let temp = tempfile::tempdir().unwrap();
            std::fs::write(temp.path().join(name), b"precious").unwrap();
            let before = snapshot(temp.path());
            let error = PoolDir::open(temp.path(), None).unwrap_err();
            assert!(matches!(error, PoolError::Unmarked { .. }), "{error}");
            assert_eq!(error.exit_code(), Exit::Config);
            assert!(matches!(init(temp.path()), Err(PoolError::Unmarked { .. })));
            assert_eq!(snapshot(temp.path()), before);
        }
    }

    #[test]
    fn what_is_no_directory_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        std::fs::write(&file, b"x").unwrap();
        for path in [file.clone(), file.join("below")] {
            let error = PoolDir::open(&path, None).unwrap_err();
            assert!(matches!(error, PoolError::NotADirectory { .. }), "{error}");
            assert!(init(&path).is_err());
        }
        let dangling = temp.path().join("dangling");
        symlink(temp.path().join("nowhere"), &dangling).unwrap();
        let error = PoolDir::open(&dangling, None).unwrap_err();
        assert!(matches!(error, PoolError::Io { action: "create", .. }), "{error}");
        assert_eq!(error.exit_code(), Exit::Unavailable);
        assert!(!temp.path().join("nowhere").exists());
    }

    #[test]
    fn a_place_where_nothing_can_be_created_says_so() {
        let error = PoolDir::open(Path::new("/proc/bulkhead-test/pool"), None).unwrap_err();
        assert!(matches!(error, PoolError::Io { action: "create", .. }), "{error}");
        assert_eq!(error.exit_code(), Exit::Unavailable);
    }

    #[test]
    fn a_lock_that_goes_soon_is_waited_for() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("pool");
        let first = PoolDir::open(&dir, Some(MIB)).unwrap();
        // As a program that is about to be executed has it.
        let inherited = first._marker.try_clone().unwrap();
        drop(first);
        let executed = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            drop(inherited);
        });
        PoolDir::open(&dir, Some(MIB)).unwrap();
        executed.join().unwrap();
    }

    #[test]
    fn a_second_daemon_is_locked_out_until_the_first_lets_go() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("pool");
        let first = PoolFiles::new(PoolDir::open(&dir, Some(2 * MIB)).unwrap());
        first.grow().unwrap().unwrap();
        let error = PoolDir::open(&dir, Some(MIB)).unwrap_err();
        assert!(matches!(error, PoolError::Locked { .. }), "{error}");
        assert_eq!(error.exit_code(), Exit::Unavailable);
        assert!(dir.join("extents-0000.bulkhead").exists(), "who is locked out wipes nothing");
        assert_eq!(init(&dir).unwrap(), Initialized::Before);
        drop(first);
        PoolDir::open(&dir, Some(MIB)).unwrap();
        assert!(!dir.join("extents-0000.bulkhead").exists());
    }

    #[test]
    fn wiping_removes_regular_extents_files_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("pool");
        marked(&dir);
        let target = temp.path().join("target");
        std::fs::write(&target, b"outside").unwrap();
        symlink(&target, dir.join("extents-0001.bulkhead")).unwrap();
        std::fs::create_dir(dir.join("extents-0002.bulkhead")).unwrap();
        std::fs::create_dir(dir.join("sub")).unwrap();
        for name in [
            "extents-1.bulkhead",
            "extents-00003.bulkhead",
            "extents-000a.bulkhead",
            "extents-0004.bulkhead.bak",
            "xextents-0004.bulkhead",
            "EXTENTS-0004.bulkhead",
            "notes.txt",
            "sub/extents-0005.bulkhead",
        ] {
            std::fs::write(dir.join(name), name).unwrap();
        }
        let before = snapshot(temp.path());
        for name in ["extents-0000.bulkhead", "extents-0007.bulkhead", "extents-9999.bulkhead"] {
            std::fs::write(dir.join(name), b"old").unwrap();
        }
        let files = PoolFiles::new(PoolDir::open(&dir, Some(2 * MIB)).unwrap());
        assert_eq!(snapshot(temp.path()), before);

        let mut files = files;
        files.file_bytes_max = MIB;
        files.grow().unwrap().unwrap();
        files.grow().unwrap().unwrap();
        assert!(dir.join("extents-0003.bulkhead").is_file(), "names that are taken are passed over");
        assert_eq!(std::fs::read(&target).unwrap(), b"outside");
    }

    #[test]
    fn a_marker_that_is_not_of_this_version_is_refused_and_left_alone() {
        for text in [
            "version = 2\nnew = true\n",
            "version = \"1\"\ncreated = 1\nid = \"a\"\n",
            "created = 1\nid = \"a\"\n",
            "version = 1\n",
            "version 1",
            "\u{0}\u{1}",
            &"#".repeat(5000),
        ] {
            let temp = tempfile::tempdir().unwrap();
            std::fs::write(temp.path().join(MARKER_NAME), text).unwrap();
            std::fs::write(temp.path().join("extents-0000.bulkhead"), b"other").unwrap();
            let before = snapshot(temp.path());
            let error = PoolDir::open(temp.path(), Some(MIB)).unwrap_err();
            assert!(matches!(error, PoolError::BadMarker { .. }), "{text:?}: {error}");
            assert_eq!(error.exit_code(), Exit::Config);
            assert!(matches!(init(temp.path()), Err(PoolError::BadMarker { .. })));
            assert_eq!(snapshot(temp.path()), before);
        }
    }

    #[test]
    fn a_marker_that_is_no_regular_file_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let link = temp.path().join("link");
        std::fs::create_dir(&link).unwrap();
        std::fs::write(temp.path().join("real"), "version = 1\ncreated = 1\nid = \"a\"\n").unwrap();
        symlink("../real", link.join(MARKER_NAME)).unwrap();
        let folder = temp.path().join("folder");
        std::fs::create_dir_all(folder.join(MARKER_NAME)).unwrap();
        for dir in [link, folder] {
            let error = PoolDir::open(&dir, Some(MIB)).unwrap_err();
            assert!(matches!(error, PoolError::BadMarker { .. }), "{error}");
        }
    }

    #[test]
    fn an_interrupted_blessing_is_finished_only_if_nothing_else_is_there() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(MARKER_NAME), b"").unwrap();
        std::fs::write(temp.path().join("other"), b"x").unwrap();
        assert!(matches!(PoolDir::open(temp.path(), Some(MIB)), Err(PoolError::BadMarker { .. })));
        std::fs::remove_file(temp.path().join("other")).unwrap();
        drop(PoolDir::open(temp.path(), Some(MIB)).unwrap());
        assert_eq!(init(temp.path()).unwrap(), Initialized::Before);
    }

    #[test]
    fn a_size_is_refused_with_both_numbers_when_the_drive_has_less() {
        let temp = tempfile::tempdir().unwrap();
        marked(temp.path());
        let error = PoolDir::open(temp.path(), Some(u64::MAX)).unwrap_err();
        let PoolError::TooLarge { asked_bytes, free_bytes, .. } = error else { panic!("{error}") };
        assert_eq!(asked_bytes, u64::MAX);
        let text = error.to_string();
        assert!(text.contains(&asked_bytes.to_string()) && text.contains(&free_bytes.to_string()), "{text}");
        assert_eq!(error.exit_code(), Exit::Config);
        assert!(matches!(PoolDir::open(temp.path(), Some(MIB - 1)), Err(PoolError::TooSmall { .. })));
    }

    #[test]
    fn without_a_size_a_pool_takes_half_of_what_is_free_or_says_it_is_too_little() {
        let dir = Path::new("/pool");
        assert_eq!(capacity(dir, None, 128 * MIB).unwrap(), 64 * MIB);
        assert_eq!(capacity(dir, None, 131 * MIB).unwrap(), 65 * MIB);
        let error = capacity(dir, None, 128 * MIB - 1).unwrap_err();
        assert!(matches!(error, PoolError::NoRoom { .. }), "{error}");
        assert_eq!(error.exit_code(), Exit::Unavailable);
        assert_eq!(capacity(dir, Some(3 * MIB + 1), 4 * MIB).unwrap(), 3 * MIB);
    }

    #[test]
    fn inspection_says_what_opening_would_and_changes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("a/pool");
        let size = Some(8 * UNIT_BYTES);
        let seen = inspect(&dir, size).unwrap();
        assert_eq!((seen.exists, seen.capacity_bytes), (false, 8 * UNIT_BYTES));
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "nothing was made");
        let opened = PoolDir::open(&dir, size).unwrap();
        assert!(matches!(inspect(&dir, size), Err(PoolError::Locked { .. })));
        drop(opened);
        std::fs::write(dir.join(extents_name(0)), [1; 100_000]).unwrap();
        let files = || std::fs::read_dir(&dir).unwrap().count();
        let before = files();
        assert!(inspect(&dir, size).unwrap().exists);
        assert_eq!(files(), before, "nothing was wiped, nothing left");
        let free_bytes = match inspect(&dir, Some(u64::MAX)) {
            Err(PoolError::TooLarge { free_bytes, .. }) => free_bytes,
            other => panic!("{other:?}"),
        };
        assert!(free_bytes > 8 * UNIT_BYTES, "what would be wiped counts as free");
        assert!(matches!(inspect(&dir, Some(1)), Err(PoolError::TooSmall { .. })));
        std::fs::remove_file(dir.join(MARKER_NAME)).unwrap();
        assert!(matches!(inspect(&dir, size), Err(PoolError::Unmarked { .. })));
        std::fs::remove_file(dir.join(extents_name(0))).unwrap();
        assert!(matches!(inspect(&dir, size), Err(PoolError::Empty { .. })));
        assert!(matches!(inspect(&dir.join("x"), size), Ok(Inspection { exists: false, .. })));
    }

    #[test]
    fn files_are_made_in_steps_until_the_capacity_is_reached() {
        let temp = tempfile::tempdir().unwrap();
        let mut files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(5 * MIB)).unwrap());
        files.file_bytes_max = 2 * MIB;
        assert!(files.file(0).is_none());
        let grown: Vec<_> =
            std::iter::from_fn(|| files.grow().unwrap()).map(|grown| (grown.index, grown.bytes)).collect();
        assert_eq!(grown, [(0, 2 * MIB), (1, 2 * MIB), (2, MIB)]);
        assert_eq!((files.file_count(), files.allocated_bytes()), (3, 5 * MIB));
        let last = files.file(2).unwrap();
        let metadata = last.as_file().metadata().unwrap();
        assert_eq!((metadata.len(), last.byte_len()), (MIB, MIB));
        assert!(metadata.blocks() * 512 >= MIB, "preallocated, not sparse");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        let mut buf = crate::fabric::region::aligned::AlignedBuf::new(4096).unwrap();
        buf.as_mut_slice().fill(9);
        last.as_file().write_all_at(buf.as_slice(), MIB - 4096).unwrap();
        assert_ne!(files.file(0).unwrap().serial(), files.file(1).unwrap().serial());
    }

    #[test]
    fn a_full_file_system_shrinks_the_capacity_to_what_there_is() {
        let temp = tempfile::tempdir().unwrap();
        let mut files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(16 * MIB)).unwrap());
        files.file_bytes_max = 8 * MIB;
        let room = |most: u64| {
            move |file: &File, bytes: u64| {
                if bytes > most {
                    file.set_len(most)?;
                    return Err(io::Error::from_raw_os_error(libc::ENOSPC));
                }
                sys::preallocate(file, bytes)
            }
        };
        files.grow().unwrap().unwrap();
        let grown = files.grow_with(&room(3 * MIB)).unwrap().unwrap();
        assert_eq!(grown, Grown { index: 1, bytes: 3 * MIB });
        assert_eq!(files.capacity_bytes(), 11 * MIB);
        assert_eq!(files.file(1).unwrap().as_file().metadata().unwrap().len(), 3 * MIB);
        assert_eq!(files.grow().unwrap(), None);

        let mut files = PoolFiles::new(PoolDir::open(&temp.path().join("other"), Some(16 * MIB)).unwrap());
        files.file_bytes_max = 8 * MIB;
        assert_eq!(files.grow_with(&room(0)).unwrap(), None);
        assert_eq!((files.capacity_bytes(), files.file_count()), (0, 0));
        assert!(!temp.path().join("other/extents-0000.bulkhead").exists());
    }

    #[test]
    fn growing_in_a_directory_that_vanished_says_so() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("pool");
        let files = PoolFiles::new(PoolDir::open(&dir, Some(MIB)).unwrap());
        std::fs::remove_dir_all(&dir).unwrap();
        let error = files.grow().unwrap_err();
        assert!(matches!(error, PoolError::Vanished { .. }), "{error}");
        assert_eq!(error.exit_code(), Exit::Unavailable);
    }

    #[test]
    fn an_extent_id_is_small_and_counts_in_units() {
        assert_eq!(size_of::<ExtentId>(), 12);
        let extent = ExtentId::new(1, 2, u32::MAX, 6);
        assert_eq!(extent.byte_offset(), u64::from(u32::MAX) * 4096);
        assert_eq!(extent.byte_len(), 256 * 1024);
        assert_eq!((extent.drive(), extent.file(), extent.offset(), extent.order()), (1, 2, u32::MAX, 6));
        assert_eq!(ExtentId::new(0, 0, 0, ExtentId::ORDER_MAX).byte_len(), FILE_BYTES_MAX);
    }

    #[test]
    fn blocks_are_summed_one_by_one() {
        let segment: Vec<u8> = (0..CRC_BLOCK_BYTES + 9).map(|at| at as u8).collect();
        let crcs = block_crcs(&segment);
        assert_eq!(crcs[0], crc32c::crc32c(&segment[..CRC_BLOCK_BYTES]));
        assert_eq!(crcs[1], crc32c::crc32c(&segment[CRC_BLOCK_BYTES..]));
        assert_eq!(crcs[2..], [0, 0]);
        // RFC 3720 §B.4: 32 octets of zeros.
        assert_eq!(block_crcs(&[0; 32])[0], 0x8a91_36aa);
    }
}
