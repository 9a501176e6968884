//! Any fabric, with a log of every work request, completion and connection event.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{
    Access, Address, Attributes, Cause, ConnectRequest, Event, Fabric, FabricError, Flags, Lane, Listener, LocalBuf,
    MemoryRegion, PostError, QpNum, QueuePair, RemoteKey, Resources, SharedSpan, Source, Status, Work, WorkId,
    WorkKind,
};

/// One line of the log.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// Nothing in a [`ConnectRequest`] entry or a mark.
    pub qp: Option<QpNum>,
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum What {
    Dialled {
        address: Address,
    },
    Admitted {
        peer: Address,
    },
    Establishing {
        private_data: Vec<u8>,
    },
    Registered {
        key: RemoteKey,
        len: usize,
        access: Access,
    },
    /// A request was taken. `inline` octets are copied here, for they are control records; others are only counted.
    Posted {
        id: WorkId,
        kind: WorkKind,
        len: usize,
        target: Option<(RemoteKey, u64)>,
        inline: Option<Vec<u8>>,
        flags: Flags,
    },
    /// Requests were refused when posted.
    NotPosted {
        count: usize,
        error: PostError,
    },
    ReceivePosted {
        id: WorkId,
        len: usize,
    },
    Kicked,
    Disconnecting,
    ConnectRequest {
        peer: Address,
        private_data: Vec<u8>,
    },
    HandshakeFailed {
        peer: Address,
        why: &'static str,
    },
    Established,
    Rejected,
    Completed {
        id: WorkId,
        kind: WorkKind,
        len: usize,
        status: Status,
    },
    Written {
        key: RemoteKey,
    },
    Disconnected {
        cause: Cause,
    },
    /// The handle was dropped.
    Dropped,
    /// Something beside the fabric, noted by [`Trace::mark`].
    Mark(&'static str),
}

/// The log. Clones are the same log.
#[derive(Clone, Default)]
pub struct Trace {
    entries: Arc<Mutex<Vec<Entry>>>,
}

impl Trace {
    /// Everything since the last call.
    pub fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes something that happened beside the fabric, in its place between what happened on it.
    pub fn mark(&self, word: &'static str) {
        self.note(None, What::Mark(word));
    }

    fn note(&self, qp: Option<QpNum>, what: What) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(Entry { qp, what });
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").finish_non_exhaustive()
    }
}

/// A fabric whose work is logged. Both ends of a connection may use it or one alone.
#[derive(Clone, Debug)]
pub struct Traced {
    inner: Arc<dyn Fabric>,
    trace: Trace,
}

impl Traced {
    pub fn new(inner: Arc<dyn Fabric>) -> Self {
        Self { inner, trace: Trace::default() }
    }

    /// The log of all lanes.
    pub fn trace(&self) -> Trace {
        self.trace.clone()
    }
}

impl Fabric for Traced {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn lane(&self) -> Result<Arc<dyn Lane>, FabricError> {
        Ok(Arc::new(TracedLane { inner: self.inner.lane()?, trace: self.trace.clone() }))
    }
}

#[derive(Debug)]
struct TracedLane {
    inner: Arc<dyn Lane>,
    trace: Trace,
}

impl TracedLane {
    fn wrap(&self, inner: Box<dyn QueuePair>, what: What) -> Box<dyn QueuePair> {
        self.trace.note(Some(inner.number()), what);
        Box::new(TracedQueuePair { inner, trace: self.trace.clone() })
    }
}

impl Lane for TracedLane {
    fn listen(&self, address: &Address) -> Result<Box<dyn Listener>, FabricError> {
        self.inner.listen(address)
    }

    fn dial(&self, address: &Address, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        let inner = self.inner.dial(address, attributes)?;
        Ok(self.wrap(inner, What::Dialled { address: address.clone() }))
    }

    fn admit(&self, request: ConnectRequest, attributes: Attributes) -> Result<Box<dyn QueuePair>, FabricError> {
        let peer = request.peer().clone();
        let inner = self.inner.admit(request, attributes)?;
        Ok(self.wrap(inner, What::Admitted { peer }))
    }

    fn progress(&self, now: Instant, events: &mut Vec<Event>, events_max: usize) -> bool {
        let start = events.len();
        let more = self.inner.progress(now, events, events_max);
        for event in &events[start..] {
            let what = match event {
                Event::ConnectRequest(request) => {
                    What::ConnectRequest { peer: request.peer().clone(), private_data: request.private_data().to_vec() }
                }
                Event::HandshakeFailed { peer, why } => What::HandshakeFailed { peer: peer.clone(), why },
                Event::Established { .. } => What::Established,
                Event::Rejected { .. } => What::Rejected,
                Event::Completed { completion, .. } => What::Completed {
                    id: completion.id,
                    kind: completion.kind,
                    len: completion.len,
                    status: completion.status,
                },
                Event::Written { key, .. } => What::Written { key: *key },
                Event::Disconnected { cause, .. } => What::Disconnected { cause: cause.clone() },
            };
            self.trace.note(event.qp(), what);
        }
        more
    }

    fn arm(&self) {
        self.inner.arm();
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.inner.descriptor()
    }

    fn deadline(&self) -> Option<Instant> {
        self.inner.deadline()
    }

    fn wakes_for_writes(&self) -> bool {
        self.inner.wakes_for_writes()
    }

    fn resources(&self) -> Resources {
        self.inner.resources()
    }
}

#[derive(Debug)]
struct TracedQueuePair {
    inner: Box<dyn QueuePair>,
    trace: Trace,
}

impl TracedQueuePair {
    fn note(&self, what: What) {
        self.trace.note(Some(self.inner.number()), what);
    }
}

/// Everything about a request but its id.
fn describe(work: &Work) -> impl FnOnce(WorkId) -> What + use<> {
    let (target, inline) = match work {
        Work::Write { from, key, address, .. } => (Some((*key, *address)), inline_of(from)),
        Work::Read { key, address, .. } => (Some((*key, *address)), None),
        Work::Send { from, .. } => (None, inline_of(from)),
    };
    let (kind, len, flags) = (work.kind(), work.len(), work.flags());
    move |id| What::Posted { id, kind, len, target, inline, flags }
}

fn inline_of(source: &Source) -> Option<Vec<u8>> {
    match source {
        Source::Inline(octets) => Some(octets.clone()),
        Source::Buffer { .. } => None,
    }
}

impl QueuePair for TracedQueuePair {
    fn number(&self) -> QpNum {
        self.inner.number()
    }

    fn attributes(&self) -> Attributes {
        self.inner.attributes()
    }

    fn allocate(&self, buf_bytes: usize, count: usize) -> Result<Vec<LocalBuf>, FabricError> {
        self.inner.allocate(buf_bytes, count)
    }

    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        let len = span.len();
        let region = self.inner.register(span, access)?;
        self.note(What::Registered { key: region.key(), len, access });
        Ok(region)
    }

    fn can_be_invalidated(&self) -> bool {
        self.inner.can_be_invalidated()
    }

    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        self.note(What::Establishing { private_data: private_data.to_vec() });
        self.inner.establish(private_data)
    }

    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        let descriptions: Vec<_> = work.iter().map(describe).collect();
        match self.inner.post(work) {
            Ok(first) => {
                for (n, description) in (0..).zip(descriptions) {
                    self.note(description(WorkId { index: first.index.wrapping_add(n), ..first }));
                }
                Ok(first)
            }
            Err(error) => {
                self.note(What::NotPosted { count: work.len(), error });
                Err(error)
            }
        }
    }

    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        let len = buf.len();
        let id = self.inner.post_receive(buf)?;
        self.note(What::ReceivePosted { id, len });
        Ok(id)
    }

    fn kick(&self) {
        self.note(What::Kicked);
        self.inner.kick();
    }

    fn rest(&self) {
        self.inner.rest();
    }

    fn disconnect(&self) {
        self.note(What::Disconnecting);
        self.inner.disconnect();
    }
}

impl Drop for TracedQueuePair {
    fn drop(&mut self) {
        self.note(What::Dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::super::loopback::Loopback;
    use super::*;

    #[test]
    fn the_log_tells_one_connection_from_dial_to_disconnection() {
        let fabric = Traced::new(Arc::new(Loopback::new()));
        let trace = fabric.trace();
        let lane = fabric.lane().unwrap();
        let address = Address::Name("traced".into());
        let _listener = lane.listen(&address).unwrap();
        let mut events = Vec::new();
        let mut turn = || {
            lane.progress(Instant::now(), &mut events, 32);
            std::mem::take(&mut events)
        };
        let near = lane.dial(&address, Attributes::default()).unwrap();
        near.establish(b"hi").unwrap();
        let request = turn().into_iter().find_map(|event| match event {
            Event::ConnectRequest(request) => Some(request),
            _ => None,
        });
        let far = lane.admit(request.unwrap(), Attributes::default()).unwrap();
        let region = far.register(SharedSpan::new(8).unwrap(), Access::WRITE).unwrap();
        far.establish(b"").unwrap();
        turn();
        let (number, remote) = (near.number(), region.remote());
        let from = Source::Inline(vec![1, 2]);
        let write = Work::Write { from, key: remote.key, address: remote.address, flags: Flags::SIGNALED };
        let id = near.post(&mut vec![write]).unwrap();
        turn();
        drop(near);
        turn();
        let own: Vec<_> =
            trace.take().into_iter().filter(|entry| entry.qp == Some(number)).map(|entry| entry.what).collect();
        let target = Some((remote.key, remote.address));
        assert_eq!(
            own,
            [
                What::Dialled { address },
                What::Establishing { private_data: b"hi".to_vec() },
                What::Established,
                What::Posted {
                    id,
                    kind: WorkKind::Write,
                    len: 2,
                    target,
                    inline: Some(vec![1, 2]),
                    flags: Flags::SIGNALED
                },
                What::Completed { id, kind: WorkKind::Write, len: 2, status: Status::Done },
                What::Dropped,
                What::Disconnected { cause: Cause::Local },
            ]
        );
        assert!(trace.take().is_empty());
    }
}
