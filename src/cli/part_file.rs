//! A file that appears under its name only when it is complete.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError, mpsc};
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

/// The unfinished file of this process, if there is one. Who renames or removes it holds the lock, so a signal finds
/// either a part to remove or a file that is complete.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

fn unfinished() -> MutexGuard<'static, Option<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `FILE.part-<random>` beside its destination; removed on drop unless [`finish`](Self::finish) was called. One at a
/// time in a process.
#[derive(Debug)]
pub struct PartFile {
    file: File,
    destination: PathBuf,
}

impl PartFile {
    /// Makes the part file and from here on removes it on SIGINT, SIGTERM and SIGHUP.
    ///
    /// # Errors
    /// Those of making the file, or of waiting for signals.
    pub fn create(destination: &Path) -> io::Result<Self> {
        // Through a symbolic link the file it names is replaced, as a shell's redirection would.
        let destination = fs::canonicalize(destination).unwrap_or_else(|_| destination.to_owned());
        remove_on_signals()?;
        let mut unfinished = unfinished();
        assert!(unfinished.is_none(), "one part file at a time");
        loop {
            let mut name: OsString = destination.clone().into();
            // Seeded anew by the standard library each time.
            name.push(format!(".part-{:016x}", RandomState::new().hash_one(std::process::id())));
            match OpenOptions::new().write(true).create_new(true).open(&name) {
                Ok(file) => {
                    *unfinished = Some(name.into());
                    return Ok(Self { file, destination });
                }
                Err(err) if err.kind() == io::ErrorKind::AlreadyExists => {}
                Err(err) => return Err(err),
            }
        }
    }

    /// Gives the file its name, in one step, replacing what had it.
    ///
    /// # Errors
    /// Those of the rename; the part file is gone then.
    pub fn finish(self) -> io::Result<()> {
        let mut unfinished = unfinished();
        let part = unfinished.as_ref().expect("set by create, and cleared by finish and drop only");
        fs::rename(part, &self.destination)?;
        *unfinished = None;
        Ok(())
    }
}

impl io::Write for PartFile {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.file.write(octets)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        remove(&mut unfinished());
    }
}

fn remove(unfinished: &mut Option<PathBuf>) {
    if let Some(part) = unfinished.take() {
        // It may be gone already; there is nobody to tell either way.
        let _ = fs::remove_file(part);
    }
}

/// Removes the part file from inside a panic hook, where the lock may be held by the thread that panicked.
pub fn abandon_after_panic() {
    match UNFINISHED.try_lock() {
        Ok(mut unfinished) => remove(&mut unfinished),
        Err(TryLockError::Poisoned(poisoned)) => remove(&mut poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => {}
    }
}

/// Starts the thread that waits for signals; returns once they are caught.
fn remove_on_signals() -> io::Result<()> {
    let (ready, is_ready) = mpsc::channel();
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let outcome = wait_for_signal(&ready);
        // Only a failure comes back.
        let _ = outcome.map_err(|err| ready.send(Err(err)));
    })?;
    is_ready.recv().unwrap_or_else(|_| Err(io::Error::other("the thread that waits for signals died")))
}

fn wait_for_signal(ready: &mpsc::Sender<io::Result<()>>) -> io::Result<std::convert::Infallible> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _inside = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let _ = ready.send(Ok(()));
    // As a shell reports a process ended by that signal.
    let code = runtime.block_on(async {
        tokio::select! {
            _ = interrupt.recv() => 130,
            _ = terminate.recv() => 143,
            _ = hangup.recv() => 129,
        }
    });
    let mut unfinished = unfinished();
    remove(&mut unfinished);
    // The lock is never given back: nothing may be renamed after this.
    std::process::exit(code)
}
