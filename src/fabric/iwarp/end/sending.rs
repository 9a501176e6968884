//! From requests and owed Responses to frames.

use super::{Failure, Link, Message, SINK_OFFSET, Stage, memory_fault};
use crate::fabric::iwarp::outbound::Sequence;
use crate::fabric::queue::SendQueue;
use crate::fabric::registered::{Regions, Right};
use crate::fabric::{Event, QpNum, RemoteKey, Status, Work};
use crate::wire::iwarp::mpa;
use crate::wire::iwarp::rdmap::{Operation, ReadRequest};
use std::collections::VecDeque;

impl Link {
    /// Reports every oldest request that is complete, up to the first that is not.
    pub(super) fn retire_done(&mut self, queue: &mut SendQueue<Stage>, events: &mut VecDeque<Event>, qp: QpNum) {
        while let Some(front) = queue.get(0) {
            let done = match front.state {
                Stage::Queued(end) => end <= self.out.sent(),
                Stage::Answered => true,
                Stage::Waiting | Stage::Asked => false,
            };
            if !done {
                break;
            }
            let completion = queue.retire(Status::Done);
            events.extend(completion.map(|completion| Event::Completed { qp, completion }));
            self.retired += 1;
            self.next -= 1;
        }
    }

    /// Whether the request at `next` may start.
    fn is_startable(&self, queue: &SendQueue<Stage>) -> bool {
        queue.get(self.next).is_some_and(|posted| {
            let fenced = posted.work.flags().fenced && !self.reads.is_empty();
            let read_count = self.reads.len() + usize::from(self.awaits_ready_response);
            let too_many = matches!(posted.work, Work::Read { .. }) && read_count >= self.read_depth;
            !fenced && !too_many
        })
    }

    pub(super) fn has_work(&self, queue: &SendQueue<Stage>) -> bool {
        !self.out.is_empty()
            || self.may_send && (self.message != Message::None || !self.owed.is_empty() || self.is_startable(queue))
    }

    /// Cuts frames until the batch has `bytes_max` octets. Messages are never mixed: a tagged one inside another could
    /// not be told apart.
    pub(super) fn fill(
        &mut self,
        queue: &mut SendQueue<Stage>,
        regions: &Regions,
        bytes_max: usize,
    ) -> Result<(), Failure> {
        while self.out.has_room(bytes_max) {
            match self.message {
                Message::None => {
                    let (owes, works) = (!self.owed.is_empty(), self.is_startable(queue));
                    self.message = match (owes, works) {
                        (true, true) if self.response_was_last => Message::Work(0),
                        (true, _) => Message::Response(0),
                        (false, true) => Message::Work(0),
                        (false, false) => return Ok(()),
                    };
                    self.response_was_last = matches!(self.message, Message::Response(_));
                }
                Message::Response(done) => self.put_response(regions, done)?,
                Message::Work(done) => self.put_work(queue, regions, done),
            }
        }
        Ok(())
    }

    fn put_response(&mut self, regions: &Regions, done: u32) -> Result<(), Failure> {
        let request = self.owed[0];
        let rest = u64::from(request.len - done);
        let (sink, source) = (request.sink_offset.wrapping_add(u64::from(done)), request.source_offset);
        let part = self.sender.tagged(Operation::ReadResponse, request.sink_stag, sink, rest);
        let crc = self.sender.crc();
        let payload = &mut self.scratch;
        payload.resize(part.len, 0);
        if part.len > 0 {
            let key = RemoteKey(request.source_stag);
            let fetched = regions.with(key, source + u64::from(done), part.len as u64, Right::Read, |span, at| {
                span.copy_out(at, payload);
            });
            // It was in order when it was asked for: its owner has taken the key out of service since.
            fetched.map_err(|error| Failure {
                ends_batch: true,
                ..self.receiver.owed_fault(&request, done, memory_fault(error)).into()
            })?;
        }
        self.out.frame(|out| mpa::put_fpdu(out, part.header(), payload, crc));
        self.message = Message::Response(done + part.len as u32);
        if part.last {
            self.owed.pop_front();
            self.receiver.response_sent();
            self.message = Message::None;
        }
        Ok(())
    }

    fn put_work(&mut self, queue: &mut SendQueue<Stage>, regions: &Regions, done: usize) {
        let sequence = self.retired + self.next as Sequence;
        let posted = queue.get_mut(self.next).expect("it was startable");
        let rest = (posted.work.len() - done) as u64;
        let (part, from) = match &posted.work {
            Work::Write { from, key, address, .. } => {
                let offset = address.wrapping_add(done as u64);
                (self.sender.tagged(Operation::Write, key.0, offset, rest), from)
            }
            Work::Send { from, invalidate, flags } => {
                let invalidate = invalidate.map(|key| key.0);
                (self.sender.send(invalidate, flags.solicited, done as u32, rest), from)
            }
            Work::Read { range, key, address, .. } => {
                let sink = regions.mint_key();
                let request = ReadRequest {
                    sink_stag: sink.0,
                    sink_offset: SINK_OFFSET,
                    len: range.len() as u32,
                    source_stag: key.0,
                    source_offset: *address,
                };
                self.receiver.await_read(request.sink_stag, request.sink_offset, request.len);
                let sender = &mut self.sender;
                self.out.frame(|out| sender.put_read_request(out, &request));
                self.reads.push_back(sequence);
                posted.state = Stage::Asked;
                self.next += 1;
                self.message = Message::None;
                return;
            }
        };
        self.out.segment(&part, sequence, from.as_slice(), done..done + part.len, self.sender.crc());
        self.message = Message::Work(done + part.len);
        if part.last {
            posted.state = Stage::Queued(self.out.queued());
            self.next += 1;
            self.message = Message::None;
        }
    }
}
