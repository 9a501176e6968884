//! From a payload stream to what is done about it.

use super::Service;
use super::call::{Call, Next, Stage};
use crate::programs::bulkhead::request::Request;
use crate::programs::bulkhead::session::Executed;
use crate::programs::bulkhead::{LIST_BYTES_MAX, PROGRAM, Put, PutMore};
use crate::programs::rpc::{self, Arguments, Data, Reduced};
use crate::wire::onc_rpc::{AcceptStatus, CallHeader, PayloadWriter, Reply, ReplyHeader};
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::chunk::ReadChunk;
use crate::wire::rpcrdma::duplicate::{Admission, CallKey, arguments_checksum};
use crate::wire::rpcrdma::responder::Fault;
use std::mem;
use std::ops::Range;
use std::time::Duration;

/// What is left of the room for long replies beside the entries of a LIST.
const LIST_REST_BYTES: u64 = 4096;
/// Before a call is looked for again that runs on another connection.
const TWIN_PAUSE: Duration = Duration::from_millis(5);

impl<B: AsRef<[u8]>> Service<B> {
    /// Parses a call and executes it, or finds what it has to wait for.
    pub(super) fn dispatch(&mut self, xid: Xid, now: Duration) {
        let Some(call) = self.calls.get_mut(&xid) else { return };
        call.stage = Stage::Dispatched;
        let stream = mem::take(&mut call.stream);
        let reduced = |chunk: &ReadChunk| Reduced { position: chunk.position.into(), len: chunk.len };
        let chunks: Vec<Reduced> = call.reads.iter().map(reduced).collect();
        let next = self.execute(xid, Arguments { stream: &stream, chunks: &chunks }, now);
        match (next, self.calls.get_mut(&xid)) {
            (Next::Done, Some(call)) => self.long_calls.give_back(&mut call.held_call),
            (Next::Keep | Next::Run(_), Some(call)) => call.stream = stream,
            (_, None) => {}
        }
        self.begin_long();
        self.handle_dispatched(xid, now);
        if let Next::Run(id) = next {
            self.run(id);
        }
    }

    pub(super) fn execute(&mut self, xid: Xid, arguments: Arguments<'_>, now: Duration) -> Next {
        let call = match rpc::accept(&[&PROGRAM], arguments) {
            Ok(call) => call,
            Err(rpc::Refusal::Silence) => {
                self.around.metrics.rpc_calls.dropped.add("not_a_call");
                self.responder.handle_dropped(xid);
                self.forget(xid);
                return Next::Done;
            }
            Err(rpc::Refusal::Reply(header)) => {
                self.around.metrics.rpc_calls.denied.add(denial_of(&header));
                self.answer(xid, rpc::bare_reply(&header));
                return Next::Done;
            }
            Err(rpc::Refusal::ChunkError) => {
                self.refuse(xid, Fault::Ineligible);
                return Next::Done;
            }
        };
        let (header, name) = (call.header, call.procedure.name);
        let request = match Request::parse(call) {
            Ok(request) => request,
            Err(fault) if fault.is_chunk_error() => {
                self.refuse(xid, Fault::Ineligible);
                return Next::Done;
            }
            Err(_) => {
                let header = ReplyHeader { xid, reply: Reply::accepted(AcceptStatus::GarbageArgs) };
                self.around.metrics.rpc_calls.denied.add(denial_of(&header));
                self.answer(xid, rpc::bare_reply(&header));
                return Next::Done;
            }
        };
        let Some(call) = self.calls.get(&xid) else { return Next::Done };
        let is_of_draft = matches!(request, Request::Put(_) | Request::PutMore(_) | Request::PutDrop { .. });
        if is_of_draft && self.is_behind_long(call.number) {
            self.held.insert(call.number, xid);
            self.set_stage(xid, Stage::Held);
            return Next::Keep;
        }
        if !self.has_room_for_reply(xid, &request) {
            return Next::Keep;
        }
        if request.has_lasting_effect()
            && let Err(next) = self.admit(xid, &header, arguments.stream, inline_item(&request), now)
        {
            if matches!(next, Next::Done) {
                self.around.metrics.rpc_calls.procedures.add(name);
            }
            return next;
        }
        self.around.metrics.rpc_calls.procedures.add(name);
        self.execute_request(xid, request, now)
    }

    /// Room for the longest answer there can be, unless that fits a message. That of a GET is taken when its ranges are found:
    /// whoever has room waits for no pins.
    pub(super) fn has_room_for_reply(&mut self, xid: Xid, request: &Request<'_>) -> bool {
        if matches!(request, Request::Get(_)) {
            return true;
        }
        let Some(call) = self.calls.get_mut(&xid) else { return false };
        let mut need = request.expectation().reduced_bytes_max();
        if need <= self.terms.agreed.reply_inline_bytes.into() || call.held_reply > 0 {
            return true;
        }
        need = need.min(self.long_replies.max);
        if self.waiting.is_empty() && self.long_replies.take(need) {
            call.held_reply = need;
            return true;
        }
        call.stage = Stage::Waiting { need };
        self.waiting.push_back(xid);
        false
    }

    /// Room came free.
    pub(super) fn serve_waiting(&mut self, now: Duration) {
        while let Some(xid) = self.waiting.front().copied() {
            let Some(call) = self.calls.get_mut(&xid) else {
                self.waiting.pop_front();
                continue;
            };
            let need = match &call.stage {
                Stage::Waiting { need } => *need,
                Stage::Getting(getting) => getting.need(),
                _ => 0,
            };
            if !self.long_replies.take(need) {
                return;
            }
            call.held_reply = need;
            self.waiting.pop_front();
            match &call.stage {
                Stage::Waiting { .. } => self.dispatch(xid, now),
                _ => self.read_ranges(xid),
            }
        }
    }

    /// Looks for a duplicate of a call that must not be executed twice.
    pub(super) fn admit(
        &mut self,
        xid: Xid,
        header: &CallHeader<'_>,
        stream: &[u8],
        item: Option<Range<usize>>,
        now: Duration,
    ) -> Result<(), Next> {
        let key = CallKey {
            peer: self.around.peer,
            program: header.program,
            version: header.version,
            procedure: header.procedure,
            xid,
            checksum: arguments_checksum(stream, item.as_slice()),
        };
        let admission = self.around.shared.duplicates().admit(key);
        match admission {
            Admission::Execute => {
                if let Some(call) = self.calls.get_mut(&xid) {
                    call.key = Some(key);
                }
                Ok(())
            }
            Admission::Running => {
                // Its connection may be one that is lost, which nobody here has noticed: then its answer goes nowhere, or it
                // is given up. Who made the call has this connection alone, and does not send it once more.
                self.set_stage(xid, Stage::Twin { again_at: now + TWIN_PAUSE });
                Err(Next::Keep)
            }
            Admission::Replay(reply) => {
                self.around.metrics.rpc_calls.replayed.add(1);
                let mut writer = PayloadWriter::new();
                writer.words().encoded(&reply);
                self.answer(xid, writer.finish());
                Err(Next::Done)
            }
        }
    }

    /// Looks again for what became of first copies.
    pub(super) fn retry_twins(&mut self, now: Duration) {
        let is_due = |call: &Call<B>| matches!(call.stage, Stage::Twin { again_at } if again_at <= now);
        let mut due: Vec<Xid> = self.calls.iter().filter(|(_, call)| is_due(call)).map(|(xid, _)| *xid).collect();
        due.sort_unstable_by_key(|xid| self.calls.get(xid).map(|call| call.number));
        for xid in due {
            self.dispatch(xid, now);
        }
    }

    pub(super) fn execute_request(&mut self, xid: Xid, mut request: Request<'_>, now: Duration) -> Next {
        if let Request::List(list) = &mut request {
            let room = self.long_replies.max.saturating_sub(LIST_REST_BYTES).min(LIST_BYTES_MAX.into());
            list.bytes = list.bytes.min(room as u32);
        }
        match self.session.execute(xid, &request, &self.around.store) {
            Executed::Answer(answer) => {
                self.answer(xid, answer.encode(xid));
                Next::Done
            }
            Executed::Get(get) => {
                self.begin_get(xid, get, now);
                Next::Done
            }
            Executed::Put(id) => {
                let (Request::Put(Put { data, .. }) | Request::PutMore(PutMore { data, .. })) = request else {
                    unreachable!("values come with nothing else");
                };
                self.begin_span(xid, id, data);
                Next::Run(id)
            }
            Executed::Dropped(answer, id) => {
                self.answer(xid, answer.encode(xid));
                Next::Run(id)
            }
        }
    }
}

/// Where in the stream the item is that could as well be in a chunk.
fn inline_item(request: &Request<'_>) -> Option<Range<usize>> {
    match request {
        Request::Put(Put { data: Data::Inline(range), .. })
        | Request::PutMore(PutMore { data: Data::Inline(range), .. }) => Some(range.clone()),
        _ => None,
    }
}

fn denial_of(header: &ReplyHeader<'_>) -> &'static str {
    match &header.reply {
        Reply::Denied(_) => "denied",
        Reply::Accepted { status, .. } => match status {
            AcceptStatus::ProgUnavail => "prog_unavail",
            AcceptStatus::ProgMismatch(_) => "prog_mismatch",
            AcceptStatus::ProcUnavail => "proc_unavail",
            AcceptStatus::GarbageArgs => "garbage_args",
            _ => "other",
        },
    }
}
