//! The in-flight tables of a queue pair, and what a lane counts: bookkeeping that fabrics share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::registered::{Domain, is_within};
use super::{Attributes, Completion, FabricError, LocalBuf, PostError, RemoteKey, Status, Work, WorkId, WorkKind};

/// Deepest queue.
const DEPTH_MAX: usize = 1 << 16;
/// Most inline octets.
const INLINE_BYTES_MAX: usize = 1 << 10;
/// Most Reads outstanding in one direction (siw's limit too).
const READ_DEPTH_MAX: usize = 128;

/// Brings what was asked for under the limits of a software fabric.
pub(super) fn grant(asked: Attributes) -> Result<Attributes, FabricError> {
    let within = |depth: usize, max: usize| (1..=max).contains(&depth);
    if !within(asked.send_depth, DEPTH_MAX) || !within(asked.receive_depth, DEPTH_MAX) || asked.read_depth == 0 {
        return Err(FabricError::Attributes { max: DEPTH_MAX });
    }
    Ok(Attributes {
        read_depth: asked.read_depth.min(READ_DEPTH_MAX),
        inline_bytes_max: asked.inline_bytes_max.min(INLINE_BYTES_MAX),
        ..asked
    })
}

/// Locks, whoever panicked with the lock before: that is reported where it happened.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One of the lane's half-open connections.
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A place in a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    slot: u16,
    generation: u16,
}

impl Place {
    fn id(self, index: u32) -> WorkId {
        WorkId { slot: self.slot, generation: self.generation, index }
    }
}

/// The places of a lane, each given to one queue pair at a time.
#[derive(Debug, Default)]
pub(super) struct Places {
    generations: Vec<u16>,
    free: Vec<u16>,
}

impl Places {
    /// `None` when 65,536 queue pairs are there.
    pub(super) fn take(&mut self) -> Option<Place> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = u16::try_from(self.generations.len()).ok()?;
                self.generations.push(0);
                slot
            }
        };
        Some(Place { slot, generation: self.generations[usize::from(slot)] })
    }

    pub(super) fn give_back(&mut self, place: Place) {
        let generation = &mut self.generations[usize::from(place.slot)];
        *generation = generation.wrapping_add(1);
        self.free.push(place.slot);
    }
}

/// The send queue: what was posted and has not completed, with what its fabric notes about each.
#[derive(Debug)]
pub(super) struct SendQueue<S> {
    place: Place,
    domain: Domain,
    attributes: Attributes,
    first_index: u32,
    in_flight: VecDeque<Posted<S>>,
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Posted<S> {
    pub(super) work: Work,
    pub(super) state: S,
}

impl<S: Default> SendQueue<S> {
    pub(super) fn new(place: Place, domain: Domain, attributes: &Attributes) -> Self {
        Self { place, domain, attributes: *attributes, first_index: 0, in_flight: VecDeque::new() }
    }

    /// Takes all or nothing.
    pub(super) fn post(&mut self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        let depth = self.attributes.send_depth;
        if work.len() > depth - self.in_flight.len() {
            return Err(PostError::Full { posted: work.len(), depth });
        }
        work.iter().try_for_each(|request| check(request, Some(self.domain), &self.attributes))?;
        let id = self.place.id(self.first_index.wrapping_add(self.in_flight.len() as u32));
        self.in_flight.extend(work.drain(..).map(|work| Posted { work, state: S::default() }));
        Ok(id)
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// The index of the oldest request in flight, or of the next one if there is none.
    #[cfg(feature = "verbs")]
    pub(super) fn first_index(&self) -> u32 {
        self.first_index
    }

    pub(super) fn get_mut(&mut self, position: usize) -> Option<&mut Posted<S>> {
        self.in_flight.get_mut(position)
    }

    pub(super) fn get(&self, position: usize) -> Option<&Posted<S>> {
        self.in_flight.get(position)
    }

    /// Ends the oldest request. `None` when nobody wants to know.
    ///
    /// # Panics
    /// When nothing is in flight.
    pub(super) fn retire(&mut self, status: Status) -> Option<Completion> {
        let id = self.place.id(self.first_index);
        let Posted { work, .. } = self.in_flight.pop_front().expect("only what is in flight can end");
        self.first_index = self.first_index.wrapping_add(1);
        if status == Status::Done && !work.is_reported() {
            return None;
        }
        let (kind, len) = (work.kind(), if status == Status::Done { work.len() } else { 0 });
        Some(Completion { id, kind, status, buf: work.into_buffer(), len, invalidated: None, solicited: false })
    }
}

/// The receive queue: buffers lent to the peer's messages.
#[derive(Debug)]
pub(super) struct ReceiveQueue {
    place: Place,
    domain: Domain,
    depth: usize,
    first_index: u32,
    posted: VecDeque<LocalBuf>,
}

impl ReceiveQueue {
    pub(super) fn new(place: Place, domain: Domain, attributes: &Attributes) -> Self {
        Self { place, domain, depth: attributes.receive_depth, first_index: 0, posted: VecDeque::new() }
    }

    pub(super) fn post(&mut self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        if self.posted.len() == self.depth {
            return Err((PostError::Full { posted: 1, depth: self.depth }, buf));
        }
        if let Err(error) = check_buffer(self.domain, &buf, &(0..buf.len())) {
            return Err((error, buf));
        }
        let id = self.place.id(self.first_index.wrapping_add(self.posted.len() as u32));
        self.posted.push_back(buf);
        Ok(id)
    }

    /// Buffers that wait.
    #[cfg(feature = "verbs")]
    pub(super) fn len(&self) -> usize {
        self.posted.len()
    }

    /// The buffer posted last, which comes back because nothing knows of it yet.
    #[cfg(feature = "verbs")]
    pub(super) fn take_back(&mut self) -> Option<LocalBuf> {
        self.posted.pop_back()
    }

    /// The buffer posted last.
    #[cfg(feature = "verbs")]
    pub(super) fn back_mut(&mut self) -> Option<&mut LocalBuf> {
        self.posted.back_mut()
    }

    /// The buffer for the next message.
    pub(super) fn front_mut(&mut self) -> Option<&mut LocalBuf> {
        self.posted.front_mut()
    }

    /// Ends the oldest Receive with a message of `len` octets, or none.
    pub(super) fn retire(
        &mut self,
        status: Status,
        len: usize,
        invalidated: Option<RemoteKey>,
        solicited: bool,
    ) -> Option<Completion> {
        let buf = self.posted.pop_front()?;
        let id = self.place.id(self.first_index);
        self.first_index = self.first_index.wrapping_add(1);
        Some(Completion { id, kind: WorkKind::Receive, status, buf: Some(buf), len, invalidated, solicited })
    }
}

/// Whether the queue pair of `domain` (`None`: one that has no buffers) may be given `request`.
pub(super) fn check(request: &Work, domain: Option<Domain>, attributes: &Attributes) -> Result<(), PostError> {
    if attributes.never_reads && request.kind() == WorkKind::Read {
        return Err(PostError::NeverReads);
    }
    let max = attributes.inline_bytes_max;
    match request.buffer() {
        Some((buf, range)) => check_buffer(domain.ok_or(PostError::ForeignBuffer)?, buf, range),
        None if request.len() > max => Err(PostError::InlineTooLong { len: request.len(), max }),
        None => Ok(()),
    }
}

fn check_buffer(domain: Domain, buf: &LocalBuf, range: &std::ops::Range<usize>) -> Result<(), PostError> {
    if !domain.owns(buf) {
        return Err(PostError::ForeignBuffer);
    }
    // A message has less than 2^32 octets in every protocol below.
    if !is_within(range, buf) || u32::try_from(range.len()).is_err() {
        return Err(PostError::Range { start: range.start, end: range.end, len: buf.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Flags, Source};
    use super::*;

    #[test]
    fn a_work_id_survives_the_trip_through_64_bits() {
        let id = WorkId { slot: 0xabcd, generation: 0x1234, index: 0xfedc_ba98 };
        assert_eq!(WorkId::from_bits(id.to_bits()), id);
    }

    #[test]
    fn a_place_given_again_has_another_generation() {
        let mut places = Places::default();
        let first = places.take().unwrap();
        let other = places.take().unwrap();
        assert_ne!(first.slot, other.slot);
        places.give_back(first);
        let again = places.take().unwrap();
        assert_eq!((again.slot, again.generation), (first.slot, 1));
    }

    #[test]
    fn a_batch_is_taken_whole_or_not_at_all() {
        let domain = Domain::new();
        let attributes = Attributes { send_depth: 3, inline_bytes_max: 8, ..Attributes::default() };
        let mut queue = SendQueue::<()>::new(Places::default().take().unwrap(), domain, &attributes);
        let inline = |len| Work::Send { from: Source::Inline(vec![0; len]), invalidate: None, flags: Flags::SIGNALED };
        let foreign = || {
            let buf = Domain::new().allocate(1, 1).unwrap().remove(0);
            Work::Send { from: Source::Buffer { buf, range: 0..1 }, invalidate: None, flags: Flags::default() }
        };
        let mut batch = vec![inline(8), inline(8), inline(8), inline(8)];
        assert_eq!(queue.post(&mut batch), Err(PostError::Full { posted: 4, depth: 3 }));
        assert_eq!((batch.len(), queue.len()), (4, 0));
        batch.truncate(2);
        batch.push(inline(9));
        assert_eq!(queue.post(&mut batch), Err(PostError::InlineTooLong { len: 9, max: 8 }));
        batch[2] = foreign();
        assert_eq!(queue.post(&mut batch), Err(PostError::ForeignBuffer));
        batch[2] = inline(0);
        assert_eq!(queue.post(&mut batch).unwrap().index, 0);
        assert_eq!((batch.len(), queue.len()), (0, 3));
        assert_eq!(queue.retire(Status::Done).unwrap().id.index, 0);
        assert_eq!(queue.post(&mut vec![inline(1)]).unwrap().index, 3);
    }
}
