//! The client of RPC over RDMA: any [`Fabric`], any program, and Bulkhead's own on top. No actix.
//!
//! ```no_run
//! use bulkhead::client::rpc::{GetRange, PutOptions, RpcClient, RpcOptions};
//! use bulkhead::fabric::SharedSpan;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let url = "rpc+iwarp://127.0.0.1:20049".parse()?;
//! let mut client = RpcClient::connect(url, RpcOptions::default())?;
//! client.put("layer-0", &mut &b"octets of a layer"[..], 17, PutOptions::default())?;
//! // Two ranges in one call, each into memory of the caller.
//! let memory = SharedSpan::new(64)?;
//! let range = |offset, at| GetRange { key: b"layer-0".to_vec(), version: 0, offset, into: memory.slice(at..at + 8) };
//! let got = client.get_ranges(&[range(0, 0), range(9, 8)], None)?;
//! assert_eq!((got[0].count, got[1].count), (8, 8));
//! # Ok(())
//! # }
//! ```
//!
//! | part | what it is |
//! |---|---|
//! | [`RpcClient`] | blocking: calls of program `bulkhead`, [`call`](RpcClient::call) for any other; or [`submit`](RpcClient::submit), [`submit_ranges`](RpcClient::submit_ranges), [`submit_put`](RpcClient::submit_put), and wait for them or cancel them later |
//! | [`AsyncRpcClient`] | the same for tasks of tokio: calls of all clones share one connection and overlap |
//! | [`RawCall`] | a call of any program, with items that may travel in chunks |
//! | [`port`] | a requester with queue pairs and memory |
//!
//! Memory is opened to the server for the time of one call and closed before anybody hears of its end: what comes back
//! is the caller's alone. A lost connection is made anew and takes the calls under way along, with the same xid each, so
//! that a server which remembers does not carry them out twice.

mod asynchronous;
mod keys;
mod link;
mod objects;
mod operation;
pub mod port;
mod raw;

pub use asynchronous::{AsyncCall, AsyncRpcClient};
pub use keys::KeyIter;
pub use link::RpcOptions;
pub use objects::{PutCall, PutOptions, RangesCall};
pub use operation::{GetRange, GotRange};
pub use port::{Answer, Argument};
pub use raw::RawCall;

pub use crate::programs::bulkhead::{Entry, Page, PinnedVersion, Stat, Status};
pub use crate::store::Condition;
pub use crate::wire::rpcrdma::requester::{Cancel, Reduction};

use std::collections::HashMap;
use std::fmt;
use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::Instant;

use self::link::Link;
use self::port::{Finished, Lent};
use super::{ClientError, ServerUrl};
use crate::fabric::{self, Address, Fabric, SharedSpan, iwarp};
use crate::wire::onc_rpc::Xid;
use crate::wire::rpcrdma::requester::{Call, Terms};

/// Names a call that was submitted.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct CallId(Xid);

/// A blocking client of one server.
pub struct RpcClient {
    link: Link,
    /// Calls that are over and were not waited for.
    done: HashMap<Xid, Finished>,
    /// Memory of ranges on their way to a writer, for the next.
    spans: Vec<SharedSpan>,
    /// Memory of ranges on their way out: some is still lent.
    lent: Vec<SharedSpan>,
    /// Of the next value, from anywhere on.
    next_draft: u64,
}

impl RpcClient {
    /// Connects to an `rpc+…` URL.
    ///
    /// # Errors
    /// [`ClientError::Url`] if it is another, [`ClientError::Unreachable`], [`ClientError::Local`] for options that cannot
    /// be.
    pub fn connect(url: ServerUrl, options: RpcOptions) -> Result<Self, ClientError> {
        let fabric = fabric_of(&url)?;
        let place = url.rpc_place().ok_or_else(|| not_rpc(&url))?;
        let found = place.to_socket_addrs().map_err(|source| ClientError::Unreachable { url: url.clone(), source })?;
        Self::make(Link::new(url.clone(), &*fabric, found.map(Address::Socket).collect(), options)?)
    }

    /// Connects to a server at `address` of any fabric.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn over(fabric: &Arc<dyn Fabric>, address: Address, options: RpcOptions) -> Result<Self, ClientError> {
        let url = ServerUrl::Rpc { fabric: fabric.name(), address: address.clone() };
        Self::make(Link::new(url, &**fabric, vec![address], options)?)
    }

    fn make(link: Link) -> Result<Self, ClientError> {
        let (done, spans, lent) = (HashMap::new(), Vec::new(), Vec::new());
        let mut client = Self { link, done, spans, lent, next_draft: link::random() };
        client.terms()?;
        Ok(client)
    }

    /// The server's name.
    pub fn url(&self) -> &ServerUrl {
        self.link.url()
    }

    /// Calls `call` and waits for the reply message, whatever it says.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for an RDMA_ERROR, [`ClientError::Protocol`] for a reply that breaks the rules,
    /// [`ClientError::Local`] if the call cannot be made, and those of the connection.
    pub fn call(&mut self, call: RawCall) -> Result<Answer, ClientError> {
        let id = self.submit(call);
        self.wait(id)
    }

    /// Makes a call without waiting for it. Calls go out in their order; replies come in any.
    pub fn submit(&mut self, call: RawCall) -> CallId {
        let (call, lent) = call.into_call();
        let id = self.submit_call(call, lent);
        // So that it is on its way.
        self.link.turn(Instant::now());
        id
    }

    /// Waits for the end of a call.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    ///
    /// # Panics
    /// If it was waited for before.
    pub fn wait(&mut self, id: CallId) -> Result<Answer, ClientError> {
        let finished = self.wait_finished(id);
        finished.outcome.map_err(|failure| self.link.error(failure))
    }

    /// Gives a call up, and waits until nobody can reach its memory. `false` if its reply has come already.
    ///
    /// # Panics
    /// If it was waited for before.
    pub fn cancel(&mut self, id: CallId, when: Cancel) -> bool {
        self.link.cancel(id.0, when);
        self.wait_finished(id).outcome.is_err()
    }

    /// Moves what can be moved without waiting, for callers that have other things to do while calls are under way. `true`
    /// if anything moved.
    pub fn progress(&mut self) -> bool {
        self.link.turn(Instant::now())
    }

    fn submit_call(&mut self, call: Call, lent: Lent) -> CallId {
        CallId(self.link.submit(call, lent, Instant::now()))
    }

    fn wait_finished(&mut self, CallId(xid): CallId) -> Finished {
        loop {
            // What ended in a turn of another call moves nothing any more: it is looked for before anybody sleeps.
            self.collect();
            if let Some(finished) = self.done.remove(&xid) {
                return finished;
            }
            assert!(self.link.pending_count() > 0, "{xid:?} was waited for before");
            self.step();
        }
    }

    fn collect(&mut self) {
        while let Some(finished) = self.link.take_finished() {
            self.done.insert(finished.xid, finished);
        }
    }

    /// What calls are sized for. Connects if there is no connection.
    fn terms(&mut self) -> Result<Terms, ClientError> {
        loop {
            if let Some(terms) = self.link.terms() {
                return Ok(terms);
            }
            self.link.connect(Instant::now());
            self.step();
            if let Some(error) = self.link.unreachable() {
                return Err(error);
            }
        }
    }

    /// Moves what can be moved, or sleeps until something can.
    fn step(&mut self) {
        let mut is_armed = false;
        loop {
            let now = Instant::now();
            if self.link.turn(now) {
                self.link.spin.handle_news(now);
                return;
            }
            if is_armed {
                break;
            }
            if self.link.spin.is_worth_it(now) {
                continue;
            }
            self.link.lane().arm();
            is_armed = true;
        }
        if let Err(error) = fabric::sleep(&**self.link.lane(), self.link.wakes_at()) {
            // Looking goes on without sleep.
            tracing::error!(%error, "a lane cannot be slept on");
        }
    }
}

impl fmt::Debug for RpcClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RpcClient").field("url", self.url()).field("pending", &self.link.pending_count()).finish()
    }
}

fn not_rpc(url: &ServerUrl) -> ClientError {
    ClientError::Url { url: url.to_string(), reason: "no RPC server that a URL leads to".to_owned() }
}

fn fabric_of(url: &ServerUrl) -> Result<Arc<dyn Fabric>, ClientError> {
    match url {
        ServerUrl::RpcIwarp { crc, .. } => {
            Ok(Arc::new(iwarp::Iwarp::new(iwarp::Options { crc: *crc, ..iwarp::Options::default() })))
        }
        #[cfg(feature = "verbs")]
        ServerUrl::RpcVerbs { .. } => Ok(Arc::new(crate::fabric::verbs::Verbs)),
        url => Err(not_rpc(url)),
    }
}
