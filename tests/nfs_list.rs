//! The list of what clients of the file system must be able to do, tried on a local directory: what fails here is a mistake of
//! the list, not of a server.

mod common;

#[path = "nfs_load/mod.rs"]
mod load;
mod rig;

use load::mounted::Mounted;
use load::scrambler::{Plan, scramble};
use load::{Counts, Files, Stat};
use std::cell::Cell;
use std::io;

#[test]
fn a_local_directory_passes_the_list() {
    let directory = tempfile::tempdir().unwrap();
    let files = Mounted::new(directory.path());
    let counts = Counts { operations: 3000, alignments_apart: 1, ..Counts::BRIEF };
    let mut said = Vec::new();
    load::run(&files, &counts, |step| said.push(step.to_owned()));
    assert_eq!(said.len(), 10);
    assert_eq!(files.list("").unwrap().len(), 0, "nothing is left");
}

/// A file system that does one thing wrong, every seventh time.
struct Wrong {
    files: Mounted,
    fault: Fault,
    count: Cell<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A write goes one octet too far on.
    Shifted,
    /// A write is forgotten.
    Lost,
    /// A file that is made shorter is as long as before.
    Long,
    /// A read ends an octet too early.
    Short,
}

impl Wrong {
    /// Whether this is one.
    fn now(&self) -> bool {
        self.count.set(self.count.get() + 1);
        self.count.get().is_multiple_of(7)
    }
}

impl Files for Wrong {
    type File = std::fs::File;

    fn create(&self, path: &str) -> io::Result<Self::File> {
        self.files.create(path)
    }
    fn create_new(&self, path: &str) -> io::Result<Self::File> {
        self.files.create_new(path)
    }
    fn open(&self, path: &str) -> io::Result<Self::File> {
        self.files.open(path)
    }
    fn write_at(&self, file: &Self::File, offset: u64, octets: &[u8]) -> io::Result<()> {
        match self.fault {
            Fault::Shifted if self.now() => self.files.write_at(file, offset + 1, &octets[..octets.len() - 1]),
            Fault::Lost if self.now() => Ok(()),
            _ => self.files.write_at(file, offset, octets),
        }
    }
    fn read_at(&self, file: &Self::File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let count = self.files.read_at(file, offset, into)?;
        Ok(count - usize::from(count > 0 && matches!(self.fault, Fault::Short) && self.now()))
    }
    fn set_len(&self, file: &Self::File, len: u64) -> io::Result<()> {
        let is_shorter = len < self.files.len(file)?;
        if is_shorter && matches!(self.fault, Fault::Long) && self.now() {
            return Ok(());
        }
        self.files.set_len(file, len)
    }
    fn len(&self, file: &Self::File) -> io::Result<u64> {
        self.files.len(file)
    }
    fn commit(&self, _: &Self::File) -> io::Result<()> {
        Ok(())
    }
    fn forget(&self, _: &Self::File) -> io::Result<()> {
        Ok(())
    }
    fn close(&self, _: Self::File) -> io::Result<()> {
        Ok(())
    }
    fn stat(&self, path: &str) -> io::Result<Stat> {
        self.files.stat(path)
    }
    fn set_mode(&self, path: &str, mode: u32) -> io::Result<()> {
        self.files.set_mode(path, mode)
    }
    fn set_modified(&self, path: &str, seconds: u64) -> io::Result<()> {
        self.files.set_modified(path, seconds)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.files.rename(from, to)
    }
    fn remove(&self, path: &str) -> io::Result<()> {
        self.files.remove(path)
    }
    fn make_directory(&self, path: &str) -> io::Result<()> {
        self.files.make_directory(path)
    }
    fn remove_directory(&self, path: &str) -> io::Result<()> {
        self.files.remove_directory(path)
    }
    fn list(&self, path: &str) -> io::Result<Vec<String>> {
        self.files.list(path)
    }
    fn another(&self) -> Self {
        Self { files: self.files.clone(), fault: self.fault, count: Cell::new(0) }
    }
}

/// A tester that finds nothing is worth nothing. What is wrong once may be written over before anybody has looked.
#[test]
fn the_scrambler_finds_a_file_system_that_is_wrong_now_and_then() {
    for fault in [Fault::Shifted, Fault::Lost, Fault::Long, Fault::Short] {
        let finds = |seed: u64| {
            let directory = tempfile::tempdir().unwrap();
            let files = Wrong { files: Mounted::new(directory.path()), fault, count: Cell::new(0) };
            let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                scramble(&files, "f", &Plan::new(seed, 1500));
            }));
            tried.is_err_and(|said| {
                let said = *said.downcast::<String>().unwrap();
                assert!(said.contains(&format!("of seed {seed}: ")), "{said}");
                true
            })
        };
        assert!((1..6).all(finds), "{fault:?} goes unnoticed");
    }
}
