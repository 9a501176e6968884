//! A directory of this machine, which may be one that it has mounted.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::{Files, Stat};

#[derive(Clone, Debug)]
pub struct Mounted {
    root: PathBuf,
    /// Past the page cache: each read and write is a call to the server, of this length and with this memory.
    is_direct: bool,
}

impl Mounted {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), is_direct: false }
    }

    #[must_use]
    pub fn direct(&self) -> Self {
        Self { is_direct: true, ..self.clone() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn options(&self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if self.is_direct {
            options.custom_flags(libc::O_DIRECT);
        }
        options
    }
}

impl Files for Mounted {
    type File = File;

    fn create(&self, path: &str) -> io::Result<File> {
        self.options().create(true).truncate(true).open(self.at(path))
    }

    fn create_new(&self, path: &str) -> io::Result<File> {
        self.options().create_new(true).open(self.at(path))
    }

    fn open(&self, path: &str) -> io::Result<File> {
        // What git has made is for nobody to write.
        match self.options().open(self.at(path)) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.options().write(false).open(self.at(path))
            }
            opened => opened,
        }
    }

    fn write_at(&self, file: &File, offset: u64, octets: &[u8]) -> io::Result<()> {
        file.write_all_at(octets, offset)
    }

    fn read_at(&self, file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < into.len() {
            match file.read_at(&mut into[done..], offset + done as u64)? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    fn set_len(&self, file: &File, len: u64) -> io::Result<()> {
        file.set_len(len)
    }

    fn len(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len())
    }

    fn commit(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn forget(&self, file: &File) -> io::Result<()> {
        Ok(posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
    }

    fn close(&self, file: File) -> io::Result<()> {
        // The error of close(2) is nowhere to be had, so what it would flush is flushed before.
        file.sync_all()
    }

    fn stat(&self, path: &str) -> io::Result<Stat> {
        let found = fs::symlink_metadata(self.at(path))?;
        Ok(Stat {
            is_directory: found.is_dir(),
            len: found.len(),
            mode: found.mode() & 0o7777,
            modified: u64::try_from(found.mtime()).unwrap_or(0),
        })
    }

    fn set_mode(&self, path: &str, mode: u32) -> io::Result<()> {
        fs::set_permissions(self.at(path), fs::Permissions::from_mode(mode))
    }

    fn set_modified(&self, path: &str, seconds: u64) -> io::Result<()> {
        let file = File::open(self.at(path))?;
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.at(from), self.at(to))
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        fs::remove_file(self.at(path))
    }

    fn make_directory(&self, path: &str) -> io::Result<()> {
        fs::create_dir(self.at(path))
    }

    fn remove_directory(&self, path: &str) -> io::Result<()> {
        fs::remove_dir(self.at(path))
    }

    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        let name = |entry: io::Result<fs::DirEntry>| {
            entry?.file_name().into_string().map_err(|name| io::Error::other(format!("{name:?} is no UTF-8")))
        };
        fs::read_dir(self.at(path))?.map(name).collect()
    }

    fn another(&self) -> Self {
        self.clone()
    }
}
