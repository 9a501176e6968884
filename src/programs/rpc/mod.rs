//! RPC programs as data, and dispatch: from a call message to a procedure and a reader of its arguments, pure.
//!
//! ```text
//!                       accept                          read_all                     execute
//! stream + read chunks ───────▶ Call: header, procedure ────────▶ the program's      ───────▶ Payload
//!                         │            and arguments        │     own request
//!                         └─ Refusal: silence, a reply      └─ ArgumentFault: GARBAGE_ARGS or ERR_CHUNK
//!                            (PROG_UNAVAIL …), ERR_CHUNK
//! ```
//!
//! **Upper-layer bindings** (RFC 8166 §6) are the lists of eligible items in each [`Procedure`]. An argument is read as an
//! eligible item through [`ArgumentReader::data`] and nowhere else, and that takes a chunk only for what the procedure
//! lists: a chunk anywhere else is refused, whatever the reader of the arguments thinks.

mod arguments;
mod results;

pub use arguments::{ArgumentFault, ArgumentReader, Arguments, Reduced};
pub use results::{ReplyFault, ResultReader};

use crate::wire::codec::{Reader, roundup_bytes};
use crate::wire::onc_rpc::{
    AcceptStatus, AuthStatus, CallError, CallHeader, Credential, Denial, Payload, PayloadWriter, Reply, ReplyHeader,
    Versions, Xid,
};
use std::ops::Range;

/// A variable-length opaque that a binding may list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Eligible {
    /// What the program's definition calls it.
    pub name: &'static str,
    /// Octets at most.
    pub bytes_max: u32,
}

/// A procedure, and which of its arguments and results may be reduced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Procedure {
    pub number: u32,
    pub name: &'static str,
    pub arguments: &'static [Eligible],
    pub results: &'static [Eligible],
}

/// One version of a program. By convention its procedure 0 does nothing and asks for no credential (RFC 5531 §12.1).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Program {
    pub number: u32,
    pub version: u32,
    pub procedures: &'static [Procedure],
}

/// Where the octets of an eligible item are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Data {
    /// In the stream that was read.
    Inline(Range<usize>),
    /// In a chunk, `index` of its list. Whatever the chunk has beyond `len` octets is roundup.
    Chunk { index: usize, len: u32 },
}

impl Data {
    /// Octets of the item.
    pub fn len(&self) -> u32 {
        match self {
            // The length was a word of the stream.
            Self::Inline(range) => range.len() as u32,
            Self::Chunk { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A call that goes to a procedure.
#[derive(Debug)]
pub struct Call<'a> {
    pub header: CallHeader<'a>,
    pub program: &'static Program,
    pub procedure: &'static Procedure,
    pub arguments: ArgumentReader<'a>,
}

/// What is said to a call that goes nowhere.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// It is no call.
    Silence,
    /// This, as an RDMA_MSG.
    Reply(ReplyHeader<'static>),
    /// RDMA_ERROR with ERR_CHUNK: a part of the call's header was reduced (RFC 8166 §8.2.2).
    ChunkError,
}

/// Finds the procedure that a message calls. `programs` may have several versions of one.
///
/// # Errors
/// [`Refusal`].
pub fn accept<'a>(programs: &[&'static Program], message: Arguments<'a>) -> Result<Call<'a>, Refusal> {
    let mut reader = Reader::new(message.stream);
    let header = CallHeader::read(&mut reader);
    // The first argument may be in a chunk, but what is missing where a cut header ends was taken out of the header.
    let end = reader.offset() as u64 + u64::from(header.is_err());
    let is_reduced = message.chunks.first().is_some_and(|chunk| chunk.position < end);
    let header = match header {
        Err(CallError::NotACall) => return Err(Refusal::Silence),
        _ if is_reduced => return Err(Refusal::ChunkError),
        Err(CallError::Faulty { xid, fault }) => return Err(Refusal::Reply(ReplyHeader { xid, reply: fault.reply() })),
        Ok(header) => header,
    };
    let refuse = |reply| Refusal::Reply(ReplyHeader { xid: header.xid, reply });
    if header.procedure != 0 {
        check_credential(&header).map_err(|status| refuse(Reply::Denied(Denial::AuthError(status))))?;
    }
    let refuse = |status| refuse(Reply::accepted(status));
    let versions = || programs.iter().filter(|program| program.number == header.program);
    let Some(program) = versions().find(|program| program.version == header.version) else {
        let numbers = || versions().map(|program| program.version);
        return Err(refuse(match (numbers().min(), numbers().max()) {
            (Some(low), Some(high)) => AcceptStatus::ProgMismatch(Versions { low, high }),
            _ => AcceptStatus::ProgUnavail,
        }));
    };
    let procedure = program.procedures.iter().find(|procedure| procedure.number == header.procedure);
    let procedure = procedure.ok_or_else(|| refuse(AcceptStatus::ProcUnavail))?;
    let arguments = ArgumentReader::new(reader, message.chunks, procedure.arguments);
    Ok(Call { header, program, procedure, arguments })
}

/// Nobody is told apart by a credential, but one that is not understood might ask for protection that there is not.
fn check_credential(header: &CallHeader<'_>) -> Result<(), AuthStatus> {
    match header.credential.credential() {
        Ok(Credential::None | Credential::Sys(_)) => Ok(()),
        Ok(Credential::Other { .. }) => Err(AuthStatus::REJECTEDCRED),
        Err(_) => Err(AuthStatus::BADCRED),
    }
}

/// A reply that has nothing behind its header.
pub fn bare_reply(header: &ReplyHeader<'_>) -> Payload {
    let mut writer = PayloadWriter::new();
    header.write(writer.words());
    writer.finish()
}

/// Octets of the header of a successful reply with a verifier without body.
pub const REPLY_HEADER_BYTES: u64 = 24;

/// How large a reply can be, known before anything is done: so that there is room for it (RFC 8267 §3).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReplyBound {
    /// Octets of the message at most, with the eligible item, if it has one, left out.
    pub reduced_bytes: u64,
    /// Octets of the eligible item at most, roundup not included.
    pub item_bytes: Option<u32>,
}

impl ReplyBound {
    /// For results of `results_bytes`, behind a verifier without body.
    pub const fn new(results_bytes: u64) -> Self {
        Self { reduced_bytes: REPLY_HEADER_BYTES + results_bytes, item_bytes: None }
    }

    /// With an eligible item of `item_bytes`, whose length is in the results.
    #[must_use]
    pub const fn with_item(self, item_bytes: Option<u32>) -> Self {
        Self { item_bytes, ..self }
    }

    /// Octets of the message at most, with the item and its roundup in it.
    pub fn whole_bytes(&self) -> u64 {
        self.reduced_bytes + self.item_bytes.map_or(0, |len| u64::from(len) + roundup_bytes(len.into()))
    }
}

/// The beginning of a reply; results follow.
pub fn success(xid: Xid) -> PayloadWriter {
    let mut writer = PayloadWriter::new();
    ReplyHeader { xid, reply: Reply::accepted(AcceptStatus::Success) }.write(writer.words());
    writer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::codec::Writer;
    use crate::wire::onc_rpc::OpaqueAuth;

    const ARGUMENT: Eligible = Eligible { name: "argument", bytes_max: 100 };
    static ONE: Program = Program {
        number: 0x2000_0001,
        version: 3,
        procedures: &[
            Procedure { number: 0, name: "NULL", arguments: &[], results: &[] },
            Procedure { number: 7, name: "SEVEN", arguments: &[ARGUMENT], results: &[] },
        ],
    };
    static TWO: Program = Program { version: 5, procedures: &[], ..ONE };
    static OTHER: Program = Program { number: 0x2000_0002, version: 9, procedures: &[] };

    fn call(program: u32, version: u32, procedure: u32, credential: OpaqueAuth<'_>) -> Vec<u8> {
        let verifier = OpaqueAuth::NONE;
        let mut writer = Writer::new();
        CallHeader { xid: Xid(5), program, version, procedure, credential, verifier }.write(&mut writer);
        writer.finish()
    }

    fn accepted(stream: &[u8], chunks: &[Reduced]) -> Result<&'static str, Refusal> {
        accept(&[&ONE, &TWO, &OTHER], Arguments { stream, chunks }).map(|call| call.procedure.name)
    }

    fn refusal(status: AcceptStatus) -> Refusal {
        Refusal::Reply(ReplyHeader { xid: Xid(5), reply: Reply::accepted(status) })
    }

    fn denial(status: AuthStatus) -> Refusal {
        Refusal::Reply(ReplyHeader { xid: Xid(5), reply: Reply::Denied(Denial::AuthError(status)) })
    }

    #[test]
    fn a_call_finds_its_procedure_or_learns_what_there_is() {
        let named = |program, version, procedure| accepted(&call(program, version, procedure, OpaqueAuth::NONE), &[]);
        assert_eq!(named(0x2000_0001, 3, 7), Ok("SEVEN"));
        assert_eq!(named(0x2000_0001, 3, 0), Ok("NULL"));
        assert_eq!(named(0x2000_0003, 3, 7), Err(refusal(AcceptStatus::ProgUnavail)));
        for version in [0, 2, 4, 6, u32::MAX] {
            let mismatch = AcceptStatus::ProgMismatch(Versions { low: 3, high: 5 });
            assert_eq!(named(0x2000_0001, version, 7), Err(refusal(mismatch)));
        }
        assert_eq!(named(0x2000_0002, 3, 7), Err(refusal(AcceptStatus::ProgMismatch(Versions { low: 9, high: 9 }))));
        for procedure in [1, 6, 8, u32::MAX] {
            assert_eq!(named(0x2000_0001, 3, procedure), Err(refusal(AcceptStatus::ProcUnavail)));
        }
        assert_eq!(named(0x2000_0001, 5, 0), Err(refusal(AcceptStatus::ProcUnavail)));
    }

    #[test]
    fn credentials_are_none_or_sys_and_procedure_0_asks_for_none() {
        let bad = OpaqueAuth { flavor: 1, body: b"cut" };
        let unknown = OpaqueAuth { flavor: 6, body: b"gss" };
        let with = |procedure, credential| accepted(&call(0x2000_0001, 3, procedure, credential), &[]);
        assert_eq!(with(7, bad), Err(denial(AuthStatus::BADCRED)));
        assert_eq!(with(7, unknown), Err(denial(AuthStatus::REJECTEDCRED)));
        assert_eq!(with(0, bad), Ok("NULL"));
        assert_eq!(with(0, unknown), Ok("NULL"));
    }

    #[test]
    fn what_is_no_call_is_not_answered_and_a_faulty_one_is() {
        assert_eq!(accepted(&[0; 7], &[]), Err(Refusal::Silence));
        let mut reply = call(0x2000_0001, 3, 7, OpaqueAuth::NONE);
        reply[7] = 1;
        assert_eq!(accepted(&reply, &[]), Err(Refusal::Silence));
        let octets = call(0x2000_0001, 3, 7, OpaqueAuth::NONE);
        assert_eq!(accepted(&octets[..20], &[]), Err(refusal(AcceptStatus::GarbageArgs)));
    }

    #[test]
    fn a_header_with_a_part_in_a_chunk_is_a_chunk_error_even_if_it_is_cut() {
        let octets = call(0x2000_0001, 3, 7, OpaqueAuth { flavor: 6, body: b"control!" });
        for position in (0..octets.len()).step_by(4) {
            let chunk = [Reduced { position: position as u64, len: 8 }];
            assert_eq!(accepted(&octets, &chunk), Err(Refusal::ChunkError), "at {position}");
        }
        let reduced = [&octets[..32], &octets[40..44]].concat();
        assert_eq!(accepted(&reduced, &[Reduced { position: 32, len: 8 }]), Err(Refusal::ChunkError));
        assert_eq!(accepted(&octets[..32], &[Reduced { position: 32, len: 16 }]), Err(Refusal::ChunkError));
    }
}
