//! The queue pair as its owner has it.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;

use super::super::queue::lock;
use super::super::{
    Access, Attributes, Cause, FabricError, LocalBuf, MemoryRegion, PRIVATE_DATA_BYTES_MAX, PostError, QpNum,
    QueuePair, SharedSpan, Work, WorkId,
};
use super::end::{End, Link, Phase};
use super::sockets::Pending;

pub(super) struct IwarpQueuePair {
    pub(super) end: Arc<End>,
}

impl QueuePair for IwarpQueuePair {
    fn number(&self) -> QpNum {
        self.end.number
    }

    fn attributes(&self) -> Attributes {
        lock(&self.end.state).attributes
    }

    fn allocate(&self, buf_bytes: usize, count: usize) -> Result<Vec<LocalBuf>, FabricError> {
        let allocated = self.end.domain.allocate(buf_bytes, count);
        allocated.map_err(|source| FabricError::System { what: "allocate registered buffers", source })
    }

    fn register(&self, span: SharedSpan, access: Access) -> Result<MemoryRegion, FabricError> {
        if !span.is_aligned() {
            return Err(FabricError::Unaligned);
        }
        Ok(self.end.regions.register(span, access))
    }

    fn establish(&self, private_data: &[u8]) -> Result<(), FabricError> {
        if private_data.len() > PRIVATE_DATA_BYTES_MAX {
            return Err(FabricError::PrivateDataTooLong { len: private_data.len() });
        }
        let mut state = lock(&self.end.state);
        if state.failure.is_some() {
            return Err(FabricError::State);
        }
        let token = self.end.number.0;
        let epoll = &self.end.lane.epoll;
        let mut lost = None;
        match std::mem::replace(&mut state.phase, Phase::Connecting) {
            Phase::Dialled(address) => {
                state.question = private_data.to_vec();
                match connect(address).and_then(|stream| {
                    epoll.add(stream.as_fd(), token, true, true)?;
                    Ok(stream)
                }) {
                    Ok(stream) => state.link = Some(Link::new(stream, (true, true))),
                    Err(error) => lost = Some(error.to_string()),
                }
            }
            Phase::Admitted(pending) => {
                let Pending { stream, request, _counted } = *pending;
                match epoll.add(stream.as_fd(), token, true, false) {
                    Ok(()) => {
                        state.link = Some(Link::new(stream, (true, false)));
                        self.end.accept(&mut state, &request, private_data);
                    }
                    Err(error) => lost = Some(error.to_string()),
                }
            }
            phase => {
                state.phase = phase;
                return Err(FabricError::State);
            }
        }
        drop(state);
        if let Some(error) = lost {
            self.end.fail(Cause::Lost(error));
        }
        self.end.mark_ready();
        Ok(())
    }

    fn post(&self, work: &mut Vec<Work>) -> Result<WorkId, PostError> {
        let mut state = lock(&self.end.state);
        match state.phase {
            Phase::Ended => return Err(PostError::Ended),
            _ if state.failure.is_some() => return Err(PostError::Ended),
            Phase::Connected => {}
            Phase::Dialled(_) | Phase::Admitted(_) | Phase::Connecting | Phase::Asking => {
                return Err(PostError::NotConnected);
            }
        }
        let id = state.queue.post(work)?;
        drop(state);
        self.end.mark_ready();
        Ok(id)
    }

    fn post_receive(&self, buf: LocalBuf) -> Result<WorkId, (PostError, LocalBuf)> {
        let mut state = lock(&self.end.state);
        if state.failure.is_some() || matches!(state.phase, Phase::Ended) {
            return Err((PostError::Ended, buf));
        }
        state.receives.post(buf)
    }

    fn kick(&self) {
        self.end.kick();
    }

    fn rest(&self) {
        if let Some(link) = &mut lock(&self.end.state).link {
            link.rest();
        }
    }

    fn disconnect(&self) {
        self.end.fail(Cause::Local);
    }
}

impl Drop for IwarpQueuePair {
    fn drop(&mut self) {
        // Not yet answered: the peer hears a rejection.
        let mut state = lock(&self.end.state);
        let unanswered = match state.phase {
            Phase::Admitted(_) => Some(std::mem::replace(&mut state.phase, Phase::Connecting)),
            _ => None,
        };
        drop(state);
        if let Some(Phase::Admitted(pending)) = unanswered {
            super::super::Pending::reject(pending, &[]);
        }
        self.disconnect();
    }
}

impl fmt::Debug for IwarpQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IwarpQueuePair").field("number", &self.end.number).finish()
    }
}

pub(super) fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}
