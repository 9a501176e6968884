//! One io_uring, used by the thread that made it.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use tracing::{error, warn};

use super::{Completion, Errno, Operation, Payload, Progress, Region, Step, Submitted};
use crate::store::pool::PoolFile;

/// Places in the table of registered files: 1 TiB of pool files. Files beyond it go by descriptor.
const FILE_SLOTS: u32 = 1024;

/// A ring with the table of what it has in flight.
///
/// The kernel reads and writes memory of the operations in `slots`; each stays there, untouched, from the moment its
/// entry is pushed until its completion is taken from the ring.
pub(super) struct Ring<T> {
    ring: IoUring,
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    in_flight: usize,
    /// Registered with the ring, piece by piece.
    region: Option<Region>,
    files: FileTable,
    /// SINGLE_ISSUER: the kernel refuses other threads, so the type does too.
    thread: PhantomData<Rc<()>>,
}

struct Slot<T> {
    /// Counts the uses of the slot, so that a stray completion cannot be taken for a later operation's.
    generation: u32,
    flight: Option<Flight<T>>,
}

struct Flight<T> {
    operation: Operation<T>,
    /// First octet of the operation's memory.
    base: *mut u8,
    progress: Progress,
}

impl<T> Ring<T> {
    pub(super) fn new(in_flight_max: usize, region: &Region, wake: &OwnedFd) -> io::Result<Self> {
        let ring = build(in_flight_max as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if ![opcode::Read::CODE, opcode::Write::CODE, opcode::ReadFixed::CODE].iter().all(|&op| probe.is_supported(op))
        {
            return Err(io::ErrorKind::Unsupported.into());
        }
        ring.submitter().register_eventfd(wake.as_raw_fd())?;
        // SAFETY: the entries name memory of `region`, of which the ring keeps a clone (below) until it is gone.
        let registered = unsafe { ring.submitter().register_buffers(&region.iovecs()) };
        let region = match registered {
            Ok(()) => Some(region.clone()),
            Err(error) => {
                warn!(%error, "staging is not registered with io_uring (locked memory limit?): reads cost more CPU");
                None
            }
        };
        let files = FileTable::new(&ring);
        Ok(Self {
            ring,
            slots: (0..in_flight_max).map(|_| Slot { generation: 0, flight: None }).collect(),
            free: (0..in_flight_max as u32).rev().collect(),
            in_flight: 0,
            region,
            files,
            thread: PhantomData,
        })
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn start(&mut self, mut operation: Operation<T>) {
        let (base, memory_bytes) = match &mut operation.payload {
            Payload::Read(buf) => (buf.as_mut_slice().as_mut_ptr(), buf.as_slice().len()),
            Payload::ReadSlot(buf) => (buf.as_mut_slice().as_mut_ptr(), buf.len()),
            Payload::Write(from) => {
                let slice = from.as_slice();
                (slice.as_ptr().cast_mut(), slice.len())
            }
        };
        // `Operation::new` has looked already, but an owner's `as_ref` is foreign code and this is what the kernel gets.
        assert!(operation.len as usize <= memory_bytes, "memory does not shrink while it is written");
        let progress = Progress::new(operation.len);
        let index = self.free.pop().expect("the caller has looked for room");
        self.slots[index as usize].flight = Some(Flight { operation, base, progress });
        self.in_flight += 1;
        self.push(index);
    }

    /// Pushes an entry for the rest of the operation in slot `index`.
    fn push(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        let flight = slot.flight.as_ref().expect("only slots in flight are pushed");
        let user_data = u64::from(slot.generation) << 32 | u64::from(index);
        let operation = &flight.operation;
        let done = flight.progress.done;
        let (len, offset) = (flight.progress.len - done, operation.offset + u64::from(done));
        // `start` has made sure that `flight.progress.len` octets from `base` are within the memory.
        let memory = flight.base.wrapping_add(done as usize);
        let registered = match (&operation.payload, &self.region) {
            (Payload::Read(buf), Some(region)) if buf.is_of(region) => Some(buf.index()),
            _ => None,
        };
        let fixed = self.files.slot(&self.ring, &operation.file);
        let fd = types::Fd(operation.file.as_raw_fd());
        let entry = match (&operation.payload, registered, fixed) {
            (Payload::Read(_), Some(buf), Some(file)) => {
                opcode::ReadFixed::new(types::Fixed(file), memory, len, buf).offset(offset).build()
            }
            (Payload::Read(_), Some(buf), None) => opcode::ReadFixed::new(fd, memory, len, buf).offset(offset).build(),
            // Slots come and go with connections, so they are not registered.
            (Payload::Read(_) | Payload::ReadSlot(_), _, Some(file)) => {
                opcode::Read::new(types::Fixed(file), memory, len).offset(offset).build()
            }
            (Payload::Read(_) | Payload::ReadSlot(_), _, None) => {
                opcode::Read::new(fd, memory, len).offset(offset).build()
            }
            (Payload::Write(_), _, Some(file)) => {
                opcode::Write::new(types::Fixed(file), memory, len).offset(offset).build()
            }
            (Payload::Write(_), _, None) => opcode::Write::new(fd, memory, len).offset(offset).build(),
        };
        self.push_entry(&entry.user_data(user_data));
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        // SAFETY: the entry names memory and file of an operation that is in `slots`, where it stays, unmoved in
        // memory and unused by us, until its completion has been taken from the ring (`reap`, also in `drop`).
        let pushed = unsafe { self.ring.submission().push(entry) };
        // An operation has one entry at a time, and there are as many entries as slots.
        pushed.expect("the queue has an entry for every slot");
    }

    pub(super) fn submit(&mut self) -> io::Result<Submitted> {
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => return Ok(Submitted::Again),
                    _ => return Err(error),
                },
            }
        }
        Ok(Submitted::All)
    }

    pub(super) fn reap(&mut self, done: &mut VecDeque<Completion<T>>) {
        if self.ring.submission().taskrun() {
            // Completions wait for this thread to enter the kernel. An error here shows again in `submit`.
            let _ = self.ring.submit();
        }
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { break };
            self.complete(entry.user_data(), entry.result(), done);
        }
    }

    fn complete(&mut self, user_data: u64, result: i32, done: &mut VecDeque<Completion<T>>) {
        let (index, generation) = (user_data as u32, (user_data >> 32) as u32);
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation);
        let Some((slot, flight)) = slot.and_then(|slot| slot.flight.take().map(|flight| (slot, flight))) else {
            error!(index, generation, result, "io_uring completed what was never started");
            return;
        };
        let mut flight = flight;
        let moved = if result < 0 { Err(Errno(-result)) } else { Ok(result as u32) };
        match flight.progress.advance(moved) {
            Step::Again => {
                slot.flight = Some(flight);
                self.push(index);
            }
            Step::Done(result) => {
                slot.generation = slot.generation.wrapping_add(1);
                self.free.push(index);
                self.in_flight -= 1;
                done.push_back(Completion { operation: flight.operation, result });
            }
        }
    }

    pub(super) fn wait_all(&mut self, done: &mut VecDeque<Completion<T>>) {
        while self.in_flight > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::EBUSY) => {}
                    Some(libc::EAGAIN | libc::ENOMEM) => std::thread::yield_now(),
                    _ => {
                        // Nobody can say any more what the kernel still writes to: that memory is never used again.
                        error!(%error, in_flight = self.in_flight, "io_uring is broken, its buffers are lost");
                        self.in_flight = 0;
                        self.free.clear();
                        std::mem::forget(std::mem::take(&mut self.slots));
                        return;
                    }
                },
            }
            self.reap(done);
        }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        self.wait_all(&mut VecDeque::new());
    }
}

fn build(in_flight_max: u32) -> io::Result<IoUring> {
    let entries = in_flight_max.next_power_of_two();
    // One entry in flight for each in the submission queue, and the completion queue is twice that: no overflow.
    let built = IoUring::builder().setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().build(entries);
    match built {
        // Before Linux 6.0.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().build(entries),
        built => built,
    }
}

/// Which pool file has which place in the ring's table. A place once given is kept: pool files live as long as the
/// store.
struct FileTable {
    /// By serial; `None` for a file that could not be registered.
    slots: HashMap<u64, Option<u32>>,
    next: u32,
    count: u32,
}

impl FileTable {
    fn new(ring: &IoUring) -> Self {
        let count = match ring.submitter().register_files_sparse(FILE_SLOTS) {
            Ok(()) => FILE_SLOTS,
            Err(error) => {
                warn!(%error, "files are not registered with io_uring: reads and writes cost more CPU");
                0
            }
        };
        Self { slots: HashMap::new(), next: 0, count }
    }

    fn slot(&mut self, ring: &IoUring, file: &Arc<PoolFile>) -> Option<u32> {
        let Self { slots, next, count } = self;
        *slots.entry(file.serial()).or_insert_with(|| {
            if next >= count {
                return None;
            }
            ring.submitter().register_files_update(*next, &[file.as_raw_fd()]).ok()?;
            *next += 1;
            Some(*next - 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::loopback::Loopback;
    use crate::fabric::staging::Staging;
    use crate::fabric::{Address, Attributes, Fabric, LocalBuf};
    use crate::store::pool::{PoolDir, PoolFiles};
    use crate::store::uring::{WriteSource, sys};

    /// A ring of four with its wake and memory, or `None` where the kernel gives none.
    fn ring<T>() -> Option<(Ring<T>, Staging, OwnedFd)> {
        let staging = Staging::new(4).unwrap();
        let wake = sys::eventfd().unwrap();
        match Ring::new(4, staging.region(), &wake) {
            Ok(ring) => Some((ring, staging, wake)),
            Err(error) => {
                eprintln!("skipped: no io_uring ({error})");
                None
            }
        }
    }

    /// Memory of some queue pair.
    fn slot(len: usize) -> LocalBuf {
        let lane = Loopback::new().lane().unwrap();
        let qp = lane.dial(&Address::Name("nobody".to_owned()), Attributes::default()).unwrap();
        qp.allocate(len, 1).unwrap().remove(0)
    }

    fn finish<T>(ring: &mut Ring<T>) -> VecDeque<Completion<T>> {
        let mut done = VecDeque::new();
        ring.wait_all(&mut done);
        done
    }

    #[test]
    fn every_mix_of_registered_and_plain_memory_and_files_moves_the_same_octets() {
        let temp = tempfile::tempdir().unwrap();
        let files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(1 << 20)).unwrap());
        files.grow().unwrap().unwrap();
        for (memory_registered, files_registered) in [(true, true), (true, false), (false, true), (false, false)] {
            let Some((mut ring, staging, _wake)) = ring() else { return };
            if !memory_registered {
                ring.region = None;
            }
            if !files_registered {
                ring.files.count = 0;
            }
            let mut from = staging.try_take().unwrap();
            from.as_mut_slice()[..8192].fill(0x5a);
            let payload = Payload::Write(WriteSource::new(from));
            ring.start(Operation::new(files.file(0).unwrap(), 4096, 8192, payload, ()).unwrap());
            assert_eq!(finish(&mut ring)[0].result, Ok(()));
            let payload = Payload::Read(staging.try_take().unwrap());
            ring.start(Operation::new(files.file(0).unwrap(), 0, 16384, payload, ()).unwrap());
            let done = finish(&mut ring);
            assert_eq!(done[0].result, Ok(()));
            let Payload::Read(buf) = &done[0].operation.payload else { panic!("a read stays one") };
            assert!(buf.as_slice()[4096..12288].iter().all(|&byte| byte == 0x5a));
            assert_eq!(buf.as_slice()[4095], 0);
            let mut slot = slot(12288);
            let rest = slot.split_off(8192);
            let read = Operation::new(files.file(0).unwrap(), 4096, 8192, Payload::ReadSlot(slot), ()).unwrap();
            ring.start(read);
            let done = finish(&mut ring);
            assert_eq!(done[0].result, Ok(()));
            let Payload::ReadSlot(slot) = &done[0].operation.payload else { panic!("a read stays one") };
            assert!(slot.as_slice().iter().all(|&byte| byte == 0x5a));
            assert!(rest.as_slice().iter().all(|&byte| byte == 0), "the part that stayed here is untouched");
            // Where the system allows none the first mixes are the last one again.
            assert!(ring.files.next <= u32::from(files_registered));
        }
    }

    #[test]
    fn completions_that_belong_to_nobody_are_passed_over() {
        let Some((mut ring, staging, _wake)) = ring() else { return };
        let temp = tempfile::tempdir().unwrap();
        let files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(1 << 20)).unwrap());
        files.grow().unwrap().unwrap();
        let payload = Payload::Read(staging.try_take().unwrap());
        ring.start(Operation::new(files.file(0).unwrap(), 0, 4096, payload, 7).unwrap());
        let mut done = VecDeque::new();
        // An unused slot, a slot that does not exist, and the right slot in another life.
        for user_data in [1, 99, 1 << 32] {
            ring.complete(user_data, 4096, &mut done);
        }
        assert!(done.is_empty());
        assert_eq!((ring.in_flight(), staging.available()), (1, 3));
        let done = finish(&mut ring);
        assert_eq!((done.len(), done[0].operation.tag, done[0].result), (1, 7, Ok(())));
    }

    #[test]
    fn a_slot_serves_again_and_again() {
        let Some((mut ring, staging, _wake)) = ring() else { return };
        let temp = tempfile::tempdir().unwrap();
        let files = PoolFiles::new(PoolDir::open(&temp.path().join("pool"), Some(1 << 20)).unwrap());
        files.grow().unwrap().unwrap();
        for round in 0..50 {
            while ring.has_room() {
                let payload = Payload::Read(staging.try_take().unwrap());
                ring.start(Operation::new(files.file(0).unwrap(), 8192, 4096, payload, round).unwrap());
            }
            assert_eq!(ring.in_flight(), 4);
            let done = finish(&mut ring);
            assert!(done.iter().all(|completion| completion.operation.tag == round && completion.result.is_ok()));
            assert_eq!((done.len(), ring.in_flight()), (4, 0));
        }
    }
}
