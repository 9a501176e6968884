//! pread and pwrite on a few threads: for kernels and containers that refuse io_uring.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::{Completion, Errno, Operation, Payload, Progress, Step};

/// More threads than drives have use for cost memory and give nothing.
const THREADS_MAX: usize = 8;

/// Runs operations on threads; same promises as a ring.
pub(super) struct Blocking<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
    in_flight_max: usize,
}

struct Shared<T> {
    todo: Mutex<Todo<T>>,
    more: Condvar,
    done: Mutex<VecDeque<Completion<T>>>,
    wake: File,
}

struct Todo<T> {
    queue: VecDeque<Operation<T>>,
    closed: bool,
}

impl<T: Send + 'static> Blocking<T> {
    pub(super) fn new(in_flight_max: usize, wake: Arc<OwnedFd>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            todo: Mutex::new(Todo { queue: VecDeque::new(), closed: false }),
            more: Condvar::new(),
            done: Mutex::default(),
            wake: File::from(wake.try_clone()?),
        });
        let mut blocking = Self { shared, threads: Vec::new(), in_flight: 0, in_flight_max };
        for index in 0..in_flight_max.min(THREADS_MAX) {
            let shared = Arc::clone(&blocking.shared);
            let thread = std::thread::Builder::new().name(format!("disk-{index}")).spawn(move || shared.run());
            match thread {
                Ok(thread) => blocking.threads.push(thread),
                // Fewer are slower, none are useless.
                Err(error) if blocking.threads.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(blocking)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn has_room(&self) -> bool {
        self.in_flight < self.in_flight_max
    }

    pub(super) fn start(&mut self, operation: Operation<T>) {
        self.in_flight += 1;
        self.shared.todo.lock().unwrap_or_else(PoisonError::into_inner).queue.push_back(operation);
        self.shared.more.notify_one();
    }

    pub(super) fn reap(&mut self, done: &mut VecDeque<Completion<T>>) {
        let mut finished = self.shared.done.lock().unwrap_or_else(PoisonError::into_inner);
        self.in_flight -= finished.len();
        done.append(&mut finished);
    }

    pub(super) fn wait_all(&mut self, done: &mut VecDeque<Completion<T>>) {
        self.shared.todo.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.more.notify_all();
        // Each thread ends once the queue is empty, so all is done after the last.
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.reap(done);
    }
}

impl<T: Send + 'static> Drop for Blocking<T> {
    fn drop(&mut self) {
        self.wait_all(&mut VecDeque::new());
    }
}

impl<T> Shared<T> {
    fn run(&self) {
        while let Some(mut operation) = self.next() {
            let result = transfer(&mut operation);
            self.done.lock().unwrap_or_else(PoisonError::into_inner).push_back(Completion { operation, result });
            // Fails only when 2^64 - 2 wakes are unread, and then the reader is woken anyway.
            let _ = (&self.wake).write(&1u64.to_ne_bytes());
        }
    }

    fn next(&self) -> Option<Operation<T>> {
        let todo = self.todo.lock().unwrap_or_else(PoisonError::into_inner);
        let mut todo = self
            .more
            .wait_while(todo, |todo| todo.queue.is_empty() && !todo.closed)
            .unwrap_or_else(PoisonError::into_inner);
        todo.queue.pop_front()
    }
}

fn transfer<T>(operation: &mut Operation<T>) -> Result<(), Errno> {
    let file = operation.file.as_file();
    let mut progress = Progress::new(operation.len);
    loop {
        let rest = progress.done as usize..progress.len as usize;
        let offset = operation.offset + u64::from(progress.done);
        let moved = match &mut operation.payload {
            Payload::Read(buf) => file.read_at(&mut buf.as_mut_slice()[rest], offset),
            Payload::ReadSlot(buf) => file.read_at(&mut buf.as_mut_slice()[rest], offset),
            Payload::Write(from) => file.write_at(&from.as_slice()[rest], offset),
        };
        // No more is moved than was asked for, and that was a u32.
        let moved = moved.map(|moved| moved as u32).map_err(|error| Errno::of(&error));
        if let Step::Done(result) = progress.advance(moved) {
            return result;
        }
    }
}
