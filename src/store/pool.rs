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

mod extent;
mod files;
#[cfg(test)]
mod tests;

pub use extent::{ExtentId, block_crcs};
pub use files::{Grown, PoolFile, PoolFiles};

use crate::error::Exit;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use thiserror::Error;
use tracing::info;

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
