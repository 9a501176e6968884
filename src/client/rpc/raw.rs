//! Calls of any program.

use super::port::{Argument, Lent};
use crate::fabric::SharedSpan;
use crate::wire::codec::Writer;
use crate::wire::onc_rpc::{CallHeader, Item, OpaqueAuth, PayloadWriter, Xid};
use crate::wire::rpcrdma::requester::{Call, Reduction};

/// Octets of the header of a reply that succeeded, with the longest verifier there is.
const REPLY_HEADER_BYTES_MAX: u64 = 24 + 400;

/// A call of any program: its arguments as they are written, memory for its results.
///
/// Which arguments and results may travel in chunks is a matter of the program's binding (RFC 8166 §6). Here every
/// [`item`](RawCall::item) and [`result`](RawCall::result) may.
#[derive(Debug)]
pub struct RawCall {
    message: PayloadWriter,
    lent: Lent,
    results: Vec<u32>,
    reply_bytes_max: u64,
    arguments_reduction: Reduction,
    results_reduction: Reduction,
}

impl RawCall {
    /// A call without arguments and results.
    pub fn new(program: u32, version: u32, procedure: u32, credential: OpaqueAuth<'_>) -> Self {
        let mut message = PayloadWriter::new();
        let verifier = OpaqueAuth::NONE;
        CallHeader { xid: Xid(0), program, version, procedure, credential, verifier }.write(message.words());
        Self {
            message,
            lent: Lent::default(),
            results: Vec::new(),
            reply_bytes_max: REPLY_HEADER_BYTES_MAX,
            arguments_reduction: Reduction::Fit,
            results_reduction: Reduction::Fit,
        }
    }

    /// Takes the next arguments.
    pub fn words(&mut self) -> &mut Writer {
        self.message.words()
    }

    /// The next argument, a variable-length opaque that may travel in a chunk: its length and its octets.
    ///
    /// # Panics
    /// Past 2^32 - 1 octets.
    pub fn item(&mut self, octets: Argument) {
        let len = u32::try_from(octets.len()).expect("an opaque has fewer than 2^32 octets");
        let token = u32::try_from(self.lent.arguments.len()).expect("a message is in memory");
        self.message.item(Item { token, len });
        self.lent.arguments.push(octets);
    }

    /// The next result that may travel in a chunk, of at most `len` octets, which land in `into` then if that is given.
    pub fn result(&mut self, len: u32, into: Option<SharedSpan>) {
        self.results.push(len);
        self.lent.results.push(into);
    }

    /// All results but the octets of those that may travel in chunks take at most `bytes` octets.
    pub fn reply_bytes_max(&mut self, bytes: u64) {
        self.reply_bytes_max = REPLY_HEADER_BYTES_MAX + bytes;
    }

    /// When arguments and results travel in chunks. [`Reduction::Fit`] unless this says otherwise.
    pub fn reduce(&mut self, arguments: Reduction, results: Reduction) {
        (self.arguments_reduction, self.results_reduction) = (arguments, results);
    }

    /// What a [`Port`](super::port::Port) is called with.
    pub fn into_call(self) -> (Call, Lent) {
        let call = Call {
            message: self.message.finish(),
            arguments: self.arguments_reduction,
            results: self.results,
            results_reduction: self.results_reduction,
            reply_bytes_max: self.reply_bytes_max,
        };
        (call, self.lent)
    }
}
