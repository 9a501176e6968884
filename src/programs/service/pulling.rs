//! What is pulled: long calls as a whole, before they are dispatched, and the read chunks of others when there is room for
//! their octets.

use super::call::Stage;
use super::{Output, Service};
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::pull::{PieceRead, Pull};
use std::mem;
use std::time::Duration;

impl<B: AsRef<[u8]>> Service<B> {
    /// Long calls for which there is room are pulled, in order.
    pub(super) fn begin_long(&mut self) {
        while let Some(xid) = self.queued.front().copied() {
            let Some(call) = self.calls.get_mut(&xid) else { return };
            let Stage::Queued { long } = &call.stage else { return };
            if !self.long_calls.take(long.len) {
                return;
            }
            call.held_call = long.len;
            let stream = Vec::with_capacity(long.len as usize);
            call.stage = Stage::Pulling { pull: Pull::new(&long.segments, long.len, self.terms.window_bytes), stream };
            self.queued.pop_front();
            self.pulls.push_back(xid);
        }
    }

    /// Hands out Reads while there are buffers, each call in its turn. The last buffer goes only to a call that has none:
    /// what was pulled ahead for one that waits for the store must not stop the others.
    pub(super) fn pull(&mut self) {
        let mut passed = 0;
        while passed < self.pulls.len() && !self.free.is_empty() {
            let Some(xid) = self.pulls.pop_front() else { return };
            let Some(call) = self.calls.get_mut(&xid) else { continue };
            let Some(pull) = call.stage.pull() else { continue };
            if self.free.len() == 1 && pull.pieces() > 0 {
                self.pulls.push_back(xid);
                passed += 1;
                continue;
            }
            let Some(PieceRead { number, handle, offset, len }) = pull.poll_read() else { continue };
            let is_asked = pull.is_asked();
            let Some(buf) = self.free.pop() else { return };
            call.reads_out += 1;
            self.outputs.push_back(Output::Read { call: call.mark, number, buf, len, key: handle, address: offset });
            passed = 0;
            if is_asked {
                self.pull_ahead(xid);
            } else {
                self.pulls.push_back(xid);
            }
        }
    }

    /// An RDMA Read has ended.
    pub fn handle_read(&mut self, xid: Xid, number: u64, buf: B, now: Duration) {
        self.posted -= 1;
        let Some(call) = self.calls.get_mut(&xid) else { return self.free.push(buf) };
        call.reads_out -= 1;
        match &mut call.stage {
            Stage::Pulling { pull, stream } => {
                pull.handle_arrived(number, buf);
                loop {
                    let octets = pull.octets();
                    if octets.is_empty() {
                        break;
                    }
                    stream.extend_from_slice(octets);
                    self.around.metrics.copied.pulled_to_call.add(octets.len() as u64);
                    let count = octets.len();
                    self.free.extend(pull.take(count));
                }
                if pull.is_done() {
                    self.handle_pulled(xid, now);
                }
            }
            Stage::Putting(putting) => {
                if let Some(pull) = &mut putting.pull {
                    pull.handle_arrived(number, buf);
                    let id = putting.id;
                    self.run(id);
                } else {
                    self.free.push(buf);
                }
            }
            Stage::Writing(writing) => {
                if let Some(pull) = writing.pull_mut() {
                    pull.handle_arrived(number, buf);
                    self.write(xid, now);
                } else {
                    self.free.push(buf);
                }
            }
            _ => {
                self.free.push(buf);
                self.close(xid);
            }
        }
    }

    /// A long call is here.
    pub(super) fn handle_pulled(&mut self, xid: Xid, now: Duration) {
        let Some(call) = self.calls.get_mut(&xid) else { return };
        let Stage::Pulling { stream, .. } = mem::replace(&mut call.stage, Stage::Dispatched) else { return };
        match self.responder.handle_pulled(xid, &stream) {
            Ok(()) => {
                call.stream = stream;
                self.dispatch(xid, now);
            }
            Err(refusal) => {
                self.around.metrics.rpc_calls.refused.add(refusal.fault.cause());
                self.send(xid, refusal.octets);
                self.handle_dispatched(xid, now);
            }
        }
    }

    /// A long call was dispatched: unless it is held up itself, those that it held up may go on.
    pub(super) fn handle_dispatched(&mut self, xid: Xid, now: Duration) {
        let Some(number) = self.calls.get(&xid).map(|call| call.number) else { return };
        if self.held.contains_key(&number) || !self.long_numbers.remove(&number) {
            return;
        }
        while let Some((number, xid)) = self.held.first_key_value().map(|(number, xid)| (*number, *xid)) {
            if self.is_behind_long(number) {
                return;
            }
            self.held.remove(&number);
            self.dispatch(xid, now);
        }
    }

    pub(super) fn is_behind_long(&self, number: u64) -> bool {
        self.long_numbers.first().is_some_and(|first| *first < number)
    }
}
