//! From an answer to its Send, and what goes before.

use super::call::{Answering, Call, Found, OctetWrite, Place, Stage, Target};
use super::{Output, Service};
use crate::wire::native::window::Ticket;
use crate::wire::onc_rpc::{Part, Payload};
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::responder::{Fault, Span};
use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

impl<B: AsRef<[u8]>> Service<B> {
    pub(super) fn refuse(&mut self, xid: Xid, fault: Fault) {
        self.around.metrics.rpc_calls.refused.add(fault.cause());
        let refusal = self.responder.refuse(xid, fault);
        self.send(xid, refusal.octets);
    }

    /// The answer to a call is this, less than which it must not be shown.
    pub(super) fn answer(&mut self, xid: Xid, payload: Payload) {
        let Some(call) = self.calls.get_mut(&xid) else { return };
        call.stream = Vec::new();
        self.long_calls.give_back(&mut call.held_call);
        self.end_key(xid, Some(&payload));
        let Some(call) = self.calls.get_mut(&xid) else { return };
        if call.reads_out > 0 {
            call.stage = Stage::Closing(payload);
        } else {
            self.plan(xid, &payload);
        }
    }

    pub(super) fn end_key(&mut self, xid: Xid, reply: Option<&Payload>) {
        let Some(key) = self.calls.get_mut(&xid).and_then(|call| call.key.take()) else { return };
        let shared = &self.around.shared;
        match reply.map(Payload::parts) {
            Some([Part::Bytes(reply)]) => shared.complete(&key, reply),
            _ => shared.forget(&key),
        }
    }

    /// An RDMA Read that nobody needed has ended.
    pub(super) fn close(&mut self, xid: Xid) {
        let Some(call) = self.calls.get_mut(&xid).filter(|call| call.reads_out == 0) else { return };
        match mem::replace(&mut call.stage, Stage::Dispatched) {
            Stage::Closing(payload) => self.plan(xid, &payload),
            stage => call.stage = stage,
        }
    }

    /// Decides where the reply goes.
    pub(super) fn plan(&mut self, xid: Xid, payload: &Payload) {
        let plan = self.responder.plan_reply(xid, payload);
        if let Some(fault) = &plan.fault {
            self.around.metrics.rpc_calls.refused.add(fault.cause());
        }
        let Some(call) = self.calls.get_mut(&xid) else { return };
        let getting = match mem::replace(&mut call.stage, Stage::Dispatched) {
            Stage::Getting(getting) => Some(getting),
            _ => None,
        };
        let message_bytes = plan.message_bytes() as usize;
        let octets = Arc::new(plan.octets);
        let gathered = |token: u32| getting.as_ref().and_then(|getting| getting.gathered(token));
        let mut writes = VecDeque::new();
        for write in &plan.writes {
            let (octets, start, len) = match &write.from {
                Span::Octets(range) => (octets.clone(), range.start as u64, range.len() as u64),
                Span::Item { token, start, len } => match gathered(*token) {
                    Some(octets) => (octets, *start, *len),
                    // It went to its write chunk.
                    None => continue,
                },
            };
            writes.push_back(OctetWrite { octets, start, len, key: write.handle, address: write.offset });
        }
        let mut message = Vec::with_capacity(message_bytes);
        for span in &plan.message {
            match span {
                Span::Octets(range) => message.extend_from_slice(&octets[range.clone()]),
                Span::Item { token, start, len } => {
                    let gathered = gathered(*token).expect("what has no chunk was gathered");
                    message.extend_from_slice(&gathered[*start as usize..(*start + *len) as usize]);
                }
            }
        }
        let send = Some((message, plan.invalidate));
        let is_placed = writes.is_empty();
        call.stage = Stage::Answering(Answering { octets, writes, places: 0, send, _getting: getting });
        if is_placed {
            self.send_answer(xid);
        } else {
            self.placing.push_back(xid);
        }
    }

    /// Sends the answer if all before it was handed out.
    pub(super) fn send_answer(&mut self, xid: Xid) {
        let Some(Call { stage: Stage::Answering(answering), .. }) = self.calls.get_mut(&xid) else { return };
        if answering.places > 0 || !answering.writes.is_empty() {
            return;
        }
        answering.octets = Arc::default();
        if let Some((octets, invalidate)) = answering.send.take() {
            self.outputs.push_back(Output::Send { xid: Some(xid), octets, invalidate });
        }
    }

    /// Sends an RDMA_ERROR as the answer to a call.
    pub(super) fn send(&mut self, xid: Xid, octets: Vec<u8>) {
        self.end_key(xid, None);
        let octets_of_reply = Arc::default();
        let send = Some((octets, None));
        let (writes, places, _getting) = (VecDeque::new(), 0, None);
        self.set_stage(xid, Stage::Answering(Answering { octets: octets_of_reply, writes, places, send, _getting }));
        self.send_answer(xid);
    }

    /// A Send has completed: what the call held is free.
    pub fn handle_sent(&mut self, xid: Option<Xid>, now: Duration) {
        self.posted -= 1;
        if let Some(xid) = xid {
            self.responder.handle_sent(xid);
            self.forget(xid);
            self.begin_long();
            self.serve_waiting(now);
        }
    }

    /// A Write has completed; its slot is free.
    pub fn handle_written(&mut self) {
        self.posted -= 1;
    }

    pub(super) fn forget(&mut self, xid: Xid) {
        if let Some(mut call) = self.calls.remove(&xid) {
            self.long_calls.give_back(&mut call.held_call);
            self.long_replies.give_back(&mut call.held_reply);
        }
    }

    /// Hands out places while there may be more, each call in its turn.
    pub(super) fn place(&mut self) {
        while self.places.len() < self.terms.places_max
            && let Some(xid) = self.placing.pop_front()
        {
            let window = u64::from(self.terms.window_bytes);
            let Some(call) = self.calls.get_mut(&xid) else { continue };
            let found = match &mut call.stage {
                Stage::Getting(getting) => getting.next_place(window),
                Stage::Answering(answering) => answering.next_place(window),
                _ => None,
            };
            let Some(Found { to, source, offset, len, slow }) = found else { continue };
            let ticket = Ticket(self.next_ticket);
            self.next_ticket += 1;
            let place = Place { call: call.mark, len, to };
            self.places.insert(ticket, place);
            self.outputs.push_back(Output::Fill { ticket, source, offset, len, slow });
            self.placing.push_back(xid);
        }
    }

    /// A slot begins with the octets of a place.
    pub fn handle_filled(&mut self, ticket: Ticket, octets: &[u8]) {
        let Some(Place { call, len, to }) = self.places.remove(&ticket) else {
            return self.outputs.push_back(Output::Retire(ticket));
        };
        let (octets, xid) = (&octets[..len as usize], call.xid);
        match to {
            Target::Push { token, start, key, address } => {
                self.outputs.push_back(Output::Write { call, ticket, len, key, address });
                self.handle_piece(xid, token, start, octets);
            }
            Target::Gather { token, start } => {
                if let Some(Call { stage: Stage::Getting(getting), .. }) = self.calls.get_mut(&xid) {
                    getting.gather(token, start, octets);
                    self.around.metrics.copied.slot_to_reply.add(octets.len() as u64);
                }
                self.outputs.push_back(Output::Retire(ticket));
                self.handle_piece(xid, token, start, octets);
            }
            Target::Octets { key, address } => {
                self.outputs.push_back(Output::Write { call, ticket, len, key, address });
                if let Some(Call { stage: Stage::Answering(answering), .. }) = self.calls.get_mut(&xid) {
                    answering.places -= 1;
                }
                self.send_answer(xid);
            }
        }
    }

    /// The octets of a place are lost.
    pub fn handle_failed(&mut self, ticket: Ticket) {
        // Octets of a reply are at hand.
        let Some(Place { call, to: Target::Push { token, .. } | Target::Gather { token, .. }, .. }) =
            self.places.remove(&ticket)
        else {
            return;
        };
        self.handle_lost(call.xid, token);
    }
}
