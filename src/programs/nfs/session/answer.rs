//! What a gathered call comes to: it is understood, looked for among those that were answered, and executed.

use super::arriving::Arriving;
use super::{Context, Session};
use crate::programs::mount;
use crate::programs::nfs::export::Executed;
use crate::programs::nfs::files::Reading;
use crate::programs::nfs::{self, Failure, NfsError, PROGRAM, Request};
use crate::programs::rpc::{self, Arguments, Refusal, bare_reply};
use crate::programs::service::denial_of;
use crate::wire::onc_rpc::{AcceptStatus, CallHeader, Credential, Part, Payload, Reply, ReplyHeader, Xid};
use crate::wire::rpcrdma::duplicate::{Admission, CallKey, arguments_checksum};

/// Octets of a READDIR or READDIRPLUS, which FSINFO says is the best. More may be asked for: it is held until it has left.
const LISTING_BYTES_MAX: u32 = 64 << 10;

/// What a call came to.
pub(super) enum Answer {
    /// This message.
    Message(Vec<u8>),
    Read(Xid, Reading),
    Write(Box<Arriving>),
    /// It is to be executed again later.
    Later,
    /// It is none: the peer is no client.
    NoCall,
}

impl Session {
    /// What a call comes to, as far as it can be executed now. Of a WRITE `first` are the first octets of its data.
    pub(super) fn answer(&mut self, arguments: Arguments<'_>, first: &[u8]) -> Answer {
        let counts = &self.context.metrics.rpc_calls;
        let call = match rpc::accept(&[&PROGRAM, &mount::PROGRAM], arguments) {
            Ok(call) => call,
            Err(Refusal::Reply(header)) => return self.deny(&header),
            // A chunk is at the data of a WRITE, which is behind the header.
            Err(Refusal::Silence | Refusal::ChunkError) => {
                counts.dropped.add("not_a_call");
                return Answer::NoCall;
            }
        };
        let (header, name) = (call.header, call.procedure.name);
        let Context { export, client, .. } = &self.context;
        if header.program == mount::PROGRAM_NUMBER {
            let Ok(request) = mount::Request::parse(call) else { return self.garbage(header.xid) };
            counts.mount.add(name);
            return message_of(&export.execute_mount(client, &request).encode(header.xid));
        }
        let Ok(mut request) = Request::parse(call) else { return self.garbage(header.xid) };
        match &mut request {
            Request::ReadDir(read) => read.count = read.count.min(LISTING_BYTES_MAX),
            Request::ReadDirPlus(read) => read.maxcount = read.maxcount.min(LISTING_BYTES_MAX),
            _ => {}
        }
        let key = match self.admit(&header, &request, arguments.stream, first) {
            Ok(key) => key,
            Err(Answer::Later) => return Answer::Later,
            Err(answer) => {
                counts.nfs.add(name);
                return answer;
            }
        };
        // Of NULL it need not be understood.
        let credential = header.credential.credential().unwrap_or(Credential::None);
        let executed = export.execute(client, &credential, &request);
        if let Executed::Reply(nfs::Reply::Read(Err(Failure { error: NfsError::Jukebox, .. }))) = &executed {
            // Pins come free as replies leave, and a client that is told to try again waits for seconds.
            let now_ms = self.now_ms();
            let since_ms = *self.busy_since_ms.get_or_insert(now_ms);
            if now_ms.saturating_sub(since_ms) < self.context.reserve_wait_ms {
                return Answer::Later;
            }
        }
        self.busy_since_ms = None;
        counts.nfs.add(name);
        match (executed, key) {
            (Executed::Reply(reply), key) => {
                let answer = reply.encode(header.xid);
                self.complete(key.as_ref(), &answer);
                message_of(&answer)
            }
            (Executed::Read(reading), _) => Answer::Read(header.xid, reading),
            (Executed::Write { writing, data, stable }, Some(key)) => {
                let first = first.to_vec();
                Answer::Write(Box::new(Arriving::new(header.xid, key, writing, stable, data.len(), first)))
            }
            (Executed::Write { .. }, None) => unreachable!("a WRITE has a lasting effect"),
        }
    }

    /// Looks for a duplicate of a call that must not be executed twice; its key, if it is executed now.
    #[expect(clippy::result_large_err, reason = "an answer is moved once, to the queue of answers")]
    fn admit(
        &self,
        header: &CallHeader<'_>,
        request: &Request<'_>,
        stream: &[u8],
        first: &[u8],
    ) -> Result<Option<CallKey>, Answer> {
        if !request.has_lasting_effect() {
            return Ok(None);
        }
        let key = CallKey {
            peer: self.context.client.address,
            program: header.program,
            version: header.version,
            procedure: header.procedure,
            xid: header.xid,
            // The data of a WRITE is not in it, nor where it is in a chunk.
            checksum: arguments_checksum(stream, &[]),
            spoilt: None,
        }
        .with_first(first);
        match self.context.shared.admit(key) {
            Admission::Execute => Ok(Some(key)),
            Admission::Running => Err(Answer::Later),
            Admission::Replay(reply) => {
                self.context.metrics.rpc_calls.replayed.add(1);
                Err(Answer::Message(reply.to_vec()))
            }
        }
    }

    pub(super) fn complete(&self, key: Option<&CallKey>, reply: &Payload) {
        if let (Some(key), [Part::Bytes(octets)]) = (key, reply.parts()) {
            self.context.shared.complete(key, octets);
        }
    }

    pub(super) fn garbage(&self, xid: Xid) -> Answer {
        self.deny(&ReplyHeader { xid, reply: Reply::accepted(AcceptStatus::GarbageArgs) })
    }

    fn deny(&self, header: &ReplyHeader<'_>) -> Answer {
        self.context.metrics.rpc_calls.denied.add(denial_of(header));
        message_of(&bare_reply(header))
    }
}

/// A reply that has no data.
pub(super) fn message_of(payload: &Payload) -> Answer {
    match payload.parts() {
        [Part::Bytes(octets)] => Answer::Message(octets.clone()),
        _ => unreachable!("only what is read is sent from where it lies"),
    }
}
