//! From a payload stream to what is done about it.

use super::Service;
use super::call::{Next, Stage};
use super::request::Request;
use super::writing::Writing;
use crate::programs::bulkhead::session::Executed;
use crate::programs::bulkhead::{self, LIST_BYTES_MAX, Put, PutMore};
use crate::programs::mount;
use crate::programs::nfs::{self, NfsError};
use crate::programs::rpc::{self, Arguments, Data, Program, Reduced};
use crate::wire::onc_rpc::{AcceptStatus, CallHeader, Credential, PayloadWriter, Reply, ReplyHeader};
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::chunk::ReadChunk;
use crate::wire::rpcrdma::duplicate::{Admission, CallKey, arguments_checksum};
use crate::wire::rpcrdma::responder::Fault;
use std::mem;
use std::time::Duration;

/// Programs that are served where there is no export.
static ALONE: [&Program; 1] = [&bulkhead::PROGRAM];
static WITH_NFS: [&Program; 3] = [&bulkhead::PROGRAM, &nfs::PROGRAM, &mount::PROGRAM];

/// What is left of the room for long replies beside the entries of a LIST or a directory.
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
            (Next::Keep | Next::Run(_) | Next::Write, Some(call)) => call.stream = stream,
            (_, None) => {}
        }
        self.begin_long();
        self.handle_dispatched(xid, now);
        match next {
            Next::Run(id) => self.run(id),
            Next::Write => self.begin_write(xid, now),
            Next::Done | Next::Keep => {}
        }
    }

    pub(super) fn execute(&mut self, xid: Xid, arguments: Arguments<'_>, now: Duration) -> Next {
        let programs: &[&Program] = if self.around.nfs.is_some() { &WITH_NFS } else { &ALONE };
        let call = match rpc::accept(programs, arguments) {
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
        let (header, program, name) = (call.header, call.program.number, call.procedure.name);
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
        // It was counted when its data began to be pulled.
        let is_counted = call.known.is_some();
        if request.is_of_draft() && self.is_behind_long(call.number) {
            self.held.insert(call.number, xid);
            self.set_stage(xid, Stage::Held);
            return Next::Keep;
        }
        if !self.has_room_for_reply(xid, &request) {
            return Next::Keep;
        }
        if request.has_lasting_effect() {
            let key = self.key(xid, &header, arguments.stream, &request);
            if let Some(key) = key
                && let Err(next) = self.admit(xid, key, now)
            {
                if matches!(next, Next::Done) && !is_counted {
                    self.count(program, name);
                }
                return next;
            }
        }
        let next = match request {
            Request::Bulkhead(request) => self.execute_bulkhead(xid, request, now),
            Request::Nfs(request) => {
                // NULL is answered whatever it says.
                let credential = header.credential.credential().unwrap_or(Credential::None);
                self.execute_nfs(xid, &credential, request, now)
            }
            Request::Mount(request) => self.execute_mount(xid, &request),
        };
        if !matches!(next, Next::Keep) && !is_counted {
            self.count(program, name);
        }
        next
    }

    /// The key of a call that must not be executed twice. None of a WRITE whose first octets have to be pulled; that is
    /// admitted then. Whoever is not let in has nothing pulled.
    fn key(&mut self, xid: Xid, header: &CallHeader<'_>, stream: &[u8], request: &Request<'_>) -> Option<CallKey> {
        let call = self.calls.get_mut(&xid)?;
        if call.known.is_some() {
            return call.known;
        }
        let key = CallKey {
            peer: self.around.peer,
            program: header.program,
            version: header.version,
            procedure: header.procedure,
            xid,
            checksum: arguments_checksum(stream, request.inline_item().as_slice()),
            spoilt: None,
        };
        let is_allowed = self.around.nfs.as_ref().is_some_and(|nfs| nfs.client.is_allowed);
        if request.first_bytes_to_come() > 0 && is_allowed {
            call.head = Some(key);
            return None;
        }
        Some(key.with_inline_data(request.data_here(stream)))
    }

    fn count(&self, program: u32, procedure: &'static str) {
        let counts = &self.around.metrics.rpc_calls;
        let procedures = match program {
            nfs::PROGRAM_NUMBER => &counts.nfs,
            mount::PROGRAM_NUMBER => &counts.mount,
            _ => &counts.procedures,
        };
        procedures.add(procedure);
    }

    /// Room for the longest answer there can be, unless that fits a message. That of a GET or READ is taken when its ranges are
    /// found: whoever has room waits for no pins.
    pub(super) fn has_room_for_reply(&mut self, xid: Xid, request: &Request<'_>) -> bool {
        if request.is_read() {
            return true;
        }
        let Some(call) = self.calls.get_mut(&xid) else { return false };
        let mut need = request.reply_bytes_max();
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
    fn admit(&mut self, xid: Xid, key: CallKey, now: Duration) -> Result<(), Next> {
        let admission = self.around.shared.admit(key);
        self.handle_admission(xid, key, admission, now)
    }

    pub(super) fn handle_admission(
        &mut self,
        xid: Xid,
        key: CallKey,
        admission: Admission,
        now: Duration,
    ) -> Result<(), Next> {
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
        for xid in self.calls_that(|call| matches!(call.stage, Stage::Twin { again_at } if again_at <= now)) {
            if self.calls.get(&xid).is_some_and(|call| call.reads_out > 0) {
                // What is still being pulled for it would be taken for what it pulls anew.
                self.set_stage(xid, Stage::Twin { again_at: now + TWIN_PAUSE });
            } else {
                self.dispatch(xid, now);
            }
        }
    }

    /// Octets of entries that there is room for in any reply.
    fn listing_bytes_max(&self) -> u32 {
        self.long_replies.max.saturating_sub(LIST_REST_BYTES).min(LIST_BYTES_MAX.into()) as u32
    }

    fn execute_nfs(
        &mut self,
        xid: Xid,
        credential: &Credential<'_>,
        mut request: nfs::Request<'_>,
        now: Duration,
    ) -> Next {
        let Some(nfs) = &self.around.nfs else { return Next::Done };
        let bytes_max = self.listing_bytes_max();
        let mut offset = 0;
        match &mut request {
            nfs::Request::ReadDir(read) => read.count = read.count.min(bytes_max),
            nfs::Request::ReadDirPlus(read) => read.maxcount = read.maxcount.min(bytes_max),
            nfs::Request::Read(read) => offset = read.offset,
            _ => {}
        }
        match nfs.export.execute(&nfs.client, credential, &request) {
            nfs::Executed::Reply(nfs::Reply::Read(Err(nfs::Failure { error: NfsError::Jukebox, .. })))
                if self.is_patient(xid, now) =>
            {
                // It holds nothing, so it can wait as a GET does: a client that is told to try again waits for seconds.
                self.set_stage(xid, Stage::Busy);
                self.ask_retry();
                Next::Keep
            }
            nfs::Executed::Reply(reply) => {
                if let nfs::Request::Write(nfs::Write { data, stable, .. }) = request
                    && self.calls.get(&xid).is_some_and(|call| call.head.is_some())
                {
                    // It may have been executed when it could be.
                    self.set_stage(xid, Stage::Writing(Writing::new(None, data, stable)));
                    return Next::Write;
                }
                self.answer(xid, reply.encode(xid));
                Next::Done
            }
            nfs::Executed::Read(reading) => {
                self.begin_read(xid, reading, offset, now);
                Next::Done
            }
            nfs::Executed::Write { writing, data, stable } => {
                self.set_stage(xid, Stage::Writing(Writing::new(Some(writing), data, stable)));
                Next::Write
            }
        }
    }

    fn is_patient(&self, xid: Xid, now: Duration) -> bool {
        self.calls.get(&xid).is_some_and(|call| now.saturating_sub(call.came) < self.terms.reserve_wait)
    }

    /// Something came free.
    pub(super) fn retry_reads(&mut self, now: Duration) {
        for xid in self.calls_that(|call| matches!(call.stage, Stage::Busy)) {
            self.dispatch(xid, now);
        }
    }

    fn execute_mount(&mut self, xid: Xid, request: &mount::Request<'_>) -> Next {
        let Some(nfs) = &self.around.nfs else { return Next::Done };
        let reply = nfs.export.execute_mount(&nfs.client, request);
        self.answer(xid, reply.encode(xid));
        Next::Done
    }

    fn execute_bulkhead(&mut self, xid: Xid, mut request: bulkhead::Request<'_, Data>, now: Duration) -> Next {
        if let bulkhead::Request::List(list) = &mut request {
            list.bytes = list.bytes.min(self.listing_bytes_max());
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
                let (bulkhead::Request::Put(Put { data, .. }) | bulkhead::Request::PutMore(PutMore { data, .. })) =
                    request
                else {
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

/// Why a call was not executed, as it is counted.
pub(in crate::programs) fn denial_of(header: &ReplyHeader<'_>) -> &'static str {
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
