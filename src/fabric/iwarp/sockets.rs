//! Sockets that have no queue pair: those of peers whose Request is not answered, and those that say goodbye.

use std::any::Any;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use super::super::TURN_BYTES_MAX;
use super::super::queue::{Counted, lock};
use super::LaneShared;
use crate::wire::iwarp::mpa::{FRAME_BYTES_MIN, Frame, FrameKind, PRIVATE_DATA_BYTES_MAX as MPA_DATA_MAX};
use crate::wire::iwarp::startup;

/// Sockets of a lane that wait for a goodbye. One more is closed at once.
const CLOSING_COUNT_MAX: usize = 1024;
/// Octets that those sockets still have to send, of a lane. One that has more is closed at once.
const CLOSING_BYTES_MAX: usize = 4 << 20;

/// A peer that has connected and not sent all of its Request.
pub(super) struct HalfOpen {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) listener: SocketAddr,
    pub(super) inbox: Vec<u8>,
    pub(super) deadline: Instant,
    pub(super) counted: Counted,
}

impl HalfOpen {
    /// The Request, once all of it came; or one word for why it never will.
    pub(super) fn read(&mut self) -> Result<Option<Frame>, &'static str> {
        // One octet more than any Request has shows those that say too much.
        let mut octets = [0; FRAME_BYTES_MIN + MPA_DATA_MAX + 1];
        loop {
            match (&self.stream).read(&mut octets) {
                Ok(0) => return Err("handshake_closed"),
                Ok(len) => self.inbox.extend_from_slice(&octets[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(_) => return Err("handshake_lost"),
            }
            match Frame::decode(FrameKind::Request, &self.inbox) {
                Ok(None) => {}
                Ok(Some((request, len))) if len == self.inbox.len() => return Ok(Some(request)),
                Ok(Some(_)) => return Err("handshake_surplus"),
                Err(_) => return Err("handshake_malformed"),
            }
        }
    }
}

/// A peer whose Request waits for an answer.
pub(super) struct Pending {
    pub(super) stream: TcpStream,
    pub(super) request: Frame,
    pub(super) _counted: Counted,
}

impl super::super::Pending for Pending {
    fn reject(self: Box<Self>, private_data: &[u8]) {
        refuse(&self.stream, &self.request, private_data);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Answers with a refusal. A socket that was never written to has room for it; if not, the peer sees the end alone.
pub(super) fn refuse(stream: &TcpStream, request: &Frame, private_data: &[u8]) {
    let reply = startup::refusal(request, private_data.to_vec());
    let _ = (&*stream).write(&reply.encode(FrameKind::Reply));
    let _ = stream.shutdown(Shutdown::Write);
}

/// A socket after the end of its queue pair: sends what remains, says goodbye and waits for the peer's.
pub(super) struct Closing {
    pub(super) stream: TcpStream,
    rest: Vec<u8>,
    sent: usize,
    pub(super) deadline: Instant,
}

impl Closing {
    pub(super) fn begin(lane: &Arc<LaneShared>, stream: TcpStream, token: u64, rest: Vec<u8>, deadline: Instant) {
        let mut closing = Self { stream, rest, sent: 0, deadline };
        if closing.is_over() {
            return;
        }
        let writes = !closing.has_sent_all();
        let mut state = lock(&lane.state);
        let rest_bytes = state.closing.values().map(|closing| closing.rest.len()).sum::<usize>() + closing.rest.len();
        if state.closing.len() < CLOSING_COUNT_MAX
            && rest_bytes <= CLOSING_BYTES_MAX
            && lane.epoll.change(closing.stream.as_fd(), token, true, writes).is_ok()
        {
            state.closing.insert(token, closing);
        }
    }

    pub(super) fn has_sent_all(&self) -> bool {
        self.sent == self.rest.len()
    }

    /// Goes on, for at most one turn's octets. `true` when nothing is left to wait for.
    pub(super) fn is_over(&mut self) -> bool {
        while self.sent < self.rest.len() {
            match (&self.stream).write(&self.rest[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => return true,
            }
        }
        if self.has_sent_all() {
            // Repeating it does no harm.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        let mut octets = [0; 16 << 10];
        for _ in 0..TURN_BYTES_MAX / octets.len() {
            match (&self.stream).read(&mut octets) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
        false
    }
}
