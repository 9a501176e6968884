//! What one connection has to put on its stream: frames whose payload stays where it is until the socket takes it.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::ops::Range;

use socket2::SockRef;

use crate::wire::iwarp::mpa;
use crate::wire::iwarp::stream::Part;

/// Payloads up to this length are copied beside their header: a slice of their own costs more.
const COPY_BYTES_MAX: usize = 2048;
/// Octets that were sent are cut off in steps of this.
const SENT_BYTES_MAX: usize = 128 << 10;
/// Octets of the batch's own buffer that are kept at rest.
const KEPT_BYTES: usize = 16 << 10;
/// Slices of one system call (`IOV_MAX` is 1,024).
const CHUNK_COUNT_MAX: usize = 960;

/// The length field and the longer of the headers.
const HEAD_BYTES_MAX: usize = 20;

/// Names a posted request by how many were posted before it.
pub(super) type Sequence = u64;

#[derive(Debug)]
enum Chunk {
    /// A range of all that was ever in `Outbound::bytes`.
    Own(Range<usize>),
    /// A range of the payload of a request in flight.
    Payload(Sequence, Range<usize>),
}

/// A batch of frames, partly sent.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    bytes: Vec<u8>,
    /// Octets that were cut off the front of `bytes`.
    cut: usize,
    chunks: VecDeque<Chunk>,
    /// Where on the stream each frame of the batch ends.
    frame_ends: VecDeque<u64>,
    /// Octets of the stream so far, up to the end of the batch.
    queued: u64,
    /// Octets the socket has taken.
    sent: u64,
    /// Where the last frame that was sent whole ends.
    boundary: u64,
}

impl Outbound {
    /// Whether all was sent.
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Octets not sent.
    pub(super) fn pending_bytes(&self) -> usize {
        (self.queued - self.sent) as usize
    }

    /// Whether another frame may join the batch.
    pub(super) fn has_room(&self, bytes_max: usize) -> bool {
        self.pending_bytes() < bytes_max && self.chunks.len() < CHUNK_COUNT_MAX
    }

    pub(super) fn queued(&self) -> u64 {
        self.queued
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Adds what `put` appends: one whole frame.
    pub(super) fn frame(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        self.own(put);
        self.frame_ends.push_back(self.queued);
    }

    /// Adds one segment of the request `sequence`, whose payload is `range` of `octets`.
    pub(super) fn segment(&mut self, part: &Part, sequence: Sequence, octets: &[u8], range: Range<usize>, crc: bool) {
        let payload = &octets[range.clone()];
        if payload.len() <= COPY_BYTES_MAX {
            self.frame(|out| mpa::put_fpdu(out, part.header(), payload, crc));
            return;
        }
        let start = self.bytes.len();
        self.own(|out| mpa::put_head(out, part.header(), payload.len()));
        let end = self.bytes.len();
        self.queued += payload.len() as u64;
        self.chunks.push_back(Chunk::Payload(sequence, range));
        let mut copy = [0; HEAD_BYTES_MAX];
        let head = &mut copy[..end - start];
        head.copy_from_slice(&self.bytes[start..end]);
        self.frame(|out| mpa::put_trailer(out, head, payload, crc));
    }

    fn own(&mut self, put: impl FnOnce(&mut Vec<u8>)) {
        let start = self.cut + self.bytes.len();
        put(&mut self.bytes);
        let end = self.cut + self.bytes.len();
        self.queued += (end - start) as u64;
        match self.chunks.back_mut() {
            Some(Chunk::Own(range)) if range.end == start => range.end = end,
            _ => self.chunks.push_back(Chunk::Own(start..end)),
        }
    }

    /// Gives the socket as much as it takes in one call. `false` when it is full.
    pub(super) fn write<'a>(
        &mut self,
        stream: &TcpStream,
        payload_of: impl Fn(Sequence) -> &'a [u8],
    ) -> io::Result<bool> {
        while !self.chunks.is_empty() {
            let slices: Vec<_> = self
                .chunks
                .iter()
                .map(|chunk| match chunk {
                    Chunk::Own(range) => IoSlice::new(self.own_octets(range)),
                    Chunk::Payload(sequence, range) => IoSlice::new(&payload_of(*sequence)[range.clone()]),
                })
                .collect();
            match SockRef::from(stream).send_vectored_with_flags(&slices, libc::MSG_NOSIGNAL) {
                Ok(taken) => self.advance(taken),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn advance(&mut self, mut taken: usize) {
        self.sent += taken as u64;
        while taken > 0 {
            let chunk = self.chunks.front_mut().expect("the socket takes what it was given");
            let (Chunk::Own(range) | Chunk::Payload(_, range)) = chunk;
            let part = taken.min(range.len());
            range.start += part;
            taken -= part;
            if range.start == range.end {
                self.chunks.pop_front();
            }
        }
        while let Some(end) = self.frame_ends.pop_front_if(|end| *end <= self.sent) {
            self.boundary = end;
        }
        if self.chunks.is_empty() {
            self.bytes.clear();
            self.cut = 0;
            return;
        }
        // A peer that takes slowly may keep the batch from ever being empty.
        let first = self.chunks.iter().find_map(|chunk| match chunk {
            Chunk::Own(range) => Some(range.start),
            Chunk::Payload(..) => None,
        });
        let sent = first.map_or(self.bytes.len(), |first| first - self.cut);
        if sent >= SENT_BYTES_MAX {
            self.bytes.drain(..sent);
            self.cut += sent;
        }
    }

    fn own_octets(&self, range: &Range<usize>) -> &[u8] {
        &self.bytes[range.start - self.cut..range.end - self.cut]
    }

    /// Gives back what a long batch has made grow.
    pub(super) fn rest(&mut self) {
        if self.chunks.is_empty() && self.bytes.capacity() > KEPT_BYTES {
            self.bytes = Vec::new();
        }
    }

    /// A copy of what is missing of a frame that was begun: nothing else may follow it on the stream.
    pub(super) fn rest_of_frame<'a>(&self, payload_of: impl Fn(Sequence) -> &'a [u8]) -> Vec<u8> {
        match self.frame_ends.front() {
            Some(end) if self.sent != self.boundary => self.copy_out((end - self.sent) as usize, payload_of),
            _ => Vec::new(),
        }
    }

    /// A copy of all that was not sent.
    pub(super) fn rest_of_batch<'a>(&self, payload_of: impl Fn(Sequence) -> &'a [u8]) -> Vec<u8> {
        self.copy_out(self.pending_bytes(), payload_of)
    }

    fn copy_out<'a>(&self, mut missing: usize, payload_of: impl Fn(Sequence) -> &'a [u8]) -> Vec<u8> {
        let mut rest = Vec::with_capacity(missing);
        for chunk in &self.chunks {
            let octets = match chunk {
                Chunk::Own(range) => self.own_octets(range),
                Chunk::Payload(sequence, range) => &payload_of(*sequence)[range.clone()],
            };
            let part = octets.len().min(missing);
            rest.extend_from_slice(&octets[..part]);
            missing -= part;
            if missing == 0 {
                break;
            }
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Octets that were sent stayed until a batch was empty, which a peer that takes slowly and asks without pause can
    /// prevent for ever.
    #[test]
    fn a_batch_that_is_never_empty_does_not_grow() {
        let mut out = Outbound::default();
        let mut expected = VecDeque::new();
        for round in 0..2000_u32 {
            let frame: Vec<u8> = (0..5000).map(|at| (at * 7 + round) as u8).collect();
            out.frame(|bytes| bytes.extend_from_slice(&frame));
            expected.extend(frame);
            if out.pending_bytes() > 20_000 {
                out.advance(4999);
                expected.drain(..4999);
            }
            assert!(out.bytes.len() <= SENT_BYTES_MAX + out.pending_bytes() + 5000, "{} octets", out.bytes.len());
        }
        let found: Vec<u8> = out
            .chunks
            .iter()
            .flat_map(|chunk| match chunk {
                Chunk::Own(range) => out.own_octets(range).to_vec(),
                Chunk::Payload(..) => Vec::new(),
            })
            .collect();
        assert!(expected == found);
        out.advance(found.len());
        out.rest();
        assert_eq!((out.bytes.capacity(), out.cut), (0, 0));
    }
    use crate::wire::iwarp::rdmap::Operation;
    use crate::wire::iwarp::stream::{Receiver, Sender};

    #[test]
    fn a_frame_that_was_begun_can_be_finished_wherever_it_was_cut() {
        let payload = vec![7u8; 10_000];
        let sender = Sender::new(true, 6000);
        let batch = || {
            let mut out = Outbound::default();
            let mut at = 0;
            while at < payload.len() {
                let part = sender.tagged(Operation::Write, 5, at as u64, (payload.len() - at) as u64);
                out.segment(&part, 0, &payload, at..at + part.len, true);
                at += part.len;
            }
            out
        };
        let total = batch().pending_bytes();
        for cut in (0..=total).step_by(7).chain([total]) {
            let mut out = batch();
            let (first_end, _) = (out.frame_ends[0] as usize, ());
            out.advance(cut);
            let rest = out.rest_of_frame(|_| &payload);
            let end = if cut == 0 {
                0
            } else if cut <= first_end {
                first_end
            } else {
                total
            };
            assert_eq!(cut + rest.len(), end, "cut at {cut}");
            let batch = out.rest_of_batch(|_| &payload);
            assert_eq!(cut + batch.len(), total);
            assert!(batch.starts_with(&rest));
        }
        // And the octets are those of the frame.
        let mut whole = batch();
        let mut octets = Vec::new();
        whole.advance(1);
        octets.push(0x17);
        octets.extend(whole.rest_of_frame(|_| &payload));
        assert!(Receiver::new(true, 1).next(&octets).unwrap().is_some());
    }
}
