//! `RpcCreditManager`: the one way out of an RPC connection. It alone posts, Receives too.
//!
//! ```text
//!  RpcConnection -- Turn: completions, Receives to post again, posts --> +-------+ -- post, kick --> queue pair
//!                <-- Done: what has completed -------------------------- | Posts |
//!                                                                        +-------+ -- SlotsRetired --> BulkWindow
//! ```
//! A Receive is posted before whatever is sent in the same turn, so the peer never hears of a credit that is not there yet.
//!
//! Its mailbox is used by `do_send` alone: one `Turn` for each turn of its connection.

use crate::actors::bulk_window::{BulkWindow, SlotsRetired};
use crate::fabric::{Completion, FabricError, Flags, LocalBuf, PostError, QueuePair, Source, Status, Work};
use crate::metrics::Metrics;
use crate::programs::service::Shared;
use crate::wire::native::window::TxSlot;
use crate::wire::rpcrdma::duplicate::CallMark;
use crate::wire::rpcrdma::posts::{Kind, Limits, Posts};
use crate::wire::rpcrdma::{RemoteKey, Xid};
use actix::prelude::*;
use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

/// What one turn of the connection found and decided.
#[derive(Debug, Default, Message)]
#[rtype(result = "()")]
pub struct Turn {
    /// Requests that ended, in order.
    pub completions: Vec<Completion>,
    /// Receives to post again.
    pub receives: Vec<LocalBuf>,
    pub posts: Vec<Post>,
}

/// Something to post.
#[derive(Debug)]
pub enum Post {
    /// Into the start of `buf`.
    Read { call: CallMark, number: u64, buf: LocalBuf, len: u32, key: RemoteKey, address: u64 },
    /// From the start of `buf`, the octets of `slot`.
    Write { call: CallMark, slot: TxSlot, buf: LocalBuf, len: u32, key: RemoteKey, address: u64 },
    /// `receive` is posted first.
    Send { xid: Option<Xid>, octets: Vec<u8>, invalidate: Option<RemoteKey>, receive: Option<LocalBuf> },
}

/// The connection ended because the peer's memory refused something.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Refused;

/// End now.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stop;

/// What the manager tells its connection.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub enum Told {
    /// These have completed, in order.
    Done(Vec<Done>),
    /// Something could not be posted.
    Refused(PostError),
}

/// A request that has ended.
#[derive(Debug)]
pub enum Done {
    Read { xid: Xid, number: u64, buf: LocalBuf },
    Written,
    Sent(Option<Xid>),
}

/// What a completion that will come is about.
#[derive(Debug)]
enum Expected {
    Read { xid: Xid, number: u64 },
    Write { slot: TxSlot },
    Send(Option<Xid>),
}

/// The actor. One per connection.
pub struct RpcCreditManager {
    posts: Posts<Post>,
    qp: Arc<dyn QueuePair>,
    expected: VecDeque<Expected>,
    /// Free Send buffers.
    sends: Vec<LocalBuf>,
    inline_bytes_max: usize,
    connection: Recipient<Told>,
    bulk: Addr<BulkWindow>,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
    peer: IpAddr,
    /// Whose request was the first that failed.
    suspect: Option<CallMark>,
    over: bool,
}

/// What a manager is made of.
pub struct Parts {
    pub qp: Arc<dyn QueuePair>,
    /// Buffers for Sends, at least one.
    pub sends: Vec<LocalBuf>,
    pub reads_max: usize,
    pub connection: Recipient<Told>,
    pub bulk: Addr<BulkWindow>,
    pub metrics: Arc<Metrics>,
    /// Where refused calls are remembered, as those of this peer.
    pub shared: Arc<Shared>,
    pub peer: IpAddr,
}

/// Posts the Receives of a connection, before it is established.
///
/// # Errors
/// What the fabric lacks.
pub fn post_receives(qp: &dyn QueuePair, bytes: usize, count: usize) -> Result<(), FabricError> {
    for buf in qp.allocate(bytes, count)? {
        let posted = qp.post_receive(buf);
        posted.map_err(|(error, _)| FabricError::System { what: "post a Receive", source: io::Error::other(error) })?;
    }
    Ok(())
}

impl RpcCreditManager {
    pub fn new(parts: Parts) -> Self {
        let Parts { qp, sends, reads_max, connection, bulk, metrics, shared, peer } = parts;
        let attributes = qp.attributes();
        let limits = Limits {
            depth: attributes.send_depth,
            // More may be posted, but would stand in the way of what is not a Read.
            reads: reads_max.min(attributes.read_depth).max(1),
            send_buffers: sends.len(),
        };
        let inline_bytes_max = attributes.inline_bytes_max;
        Self {
            posts: Posts::new(limits),
            qp,
            expected: VecDeque::new(),
            sends,
            inline_bytes_max,
            connection,
            bulk,
            metrics,
            shared,
            peer,
            suspect: None,
            over: false,
        }
    }

    fn count_message(&self) {
        self.metrics.connections.messages.add(1);
    }

    /// The one place that acts.
    fn drive(&mut self) -> Result<(), PostError> {
        let mut works = Vec::new();
        while let Some(post) = self.posts.poll_post() {
            let (work, expected) = self.translate(post)?;
            works.push(work);
            self.expected.push_back(expected);
        }
        if !works.is_empty() {
            self.qp.post(&mut works)?;
            self.qp.kick();
        }
        Ok(())
    }

    fn translate(&mut self, post: Post) -> Result<(Work, Expected), PostError> {
        let written = &self.metrics.connections.bytes_written;
        let flags = Flags::SIGNALED;
        Ok(match post {
            Post::Read { call, number, buf, len, key, address } => {
                let work = Work::Read { into: buf, range: 0..len as usize, key, address, flags };
                (work, Expected::Read { xid: call.xid, number })
            }
            Post::Write { slot, buf, len, key, address, .. } => {
                written.add(len.into());
                let from = Source::Buffer { buf, range: 0..len as usize };
                (Work::Write { from, key, address, flags }, Expected::Write { slot })
            }
            Post::Send { xid, octets, invalidate, receive } => {
                written.add(octets.len() as u64);
                if let Some(receive) = receive {
                    self.qp.post_receive(receive).map_err(|(error, _)| error)?;
                }
                let from = if octets.len() <= self.inline_bytes_max {
                    Source::Inline(octets)
                } else {
                    let mut buf = self.sends.pop().expect("a Send waits until a buffer is free");
                    buf.as_mut_slice()[..octets.len()].copy_from_slice(&octets);
                    Source::Buffer { buf, range: 0..octets.len() }
                };
                (Work::Send { from, invalidate, flags }, Expected::Send(xid))
            }
        })
    }

    /// Takes what has ended apart: what the connection hears, and what `BulkWindow` gets back. False if the queue pair has
    /// come to its end.
    fn handle_completion(&mut self, completion: Completion, done: &mut Vec<Done>, retired: &mut SlotsRetired) -> bool {
        let Completion { status, buf, .. } = completion;
        if status != Status::Done {
            self.suspect = self.posts.suspect();
            if status == Status::Refused {
                self.tell_refused();
            }
            return false;
        }
        let (Some(_), Some(expected)) = (self.posts.handle_completed(), self.expected.pop_front()) else {
            return false;
        };
        match (expected, buf) {
            (Expected::Read { xid, number }, Some(buf)) => done.push(Done::Read { xid, number, buf }),
            (Expected::Write { slot }, buf) => {
                retired.0.push((slot, buf));
                done.push(Done::Written);
            }
            (Expected::Send(xid), buf) => {
                self.sends.extend(buf);
                done.push(Done::Sent(xid));
            }
            (Expected::Read { .. }, None) => return false,
        }
        true
    }

    fn tell_refused(&mut self) {
        if let Some(call) = self.suspect.take() {
            self.shared.handle_refused(self.peer, call);
        }
    }

    fn handle_turn(&mut self, turn: Turn) -> Result<(), PostError> {
        let (mut done, mut retired) = (Vec::new(), SlotsRetired(Vec::new()));
        for completion in turn.completions {
            if !self.handle_completion(completion, &mut done, &mut retired) {
                // Its end follows, and says why.
                self.over = true;
                break;
            }
        }
        if !retired.0.is_empty() {
            self.count_message();
            self.bulk.do_send(retired);
        }
        if !done.is_empty() {
            self.count_message();
            self.connection.do_send(Told::Done(done));
        }
        if self.over {
            return Ok(());
        }
        for receive in turn.receives {
            self.qp.post_receive(receive).map_err(|(error, _)| error)?;
        }
        for post in turn.posts {
            let (kind, call) = match &post {
                Post::Read { call, .. } => (Kind::Read, Some(*call)),
                Post::Write { call, .. } => (Kind::Write, Some(*call)),
                Post::Send { octets, .. } => (Kind::Send { buffered: octets.len() > self.inline_bytes_max }, None),
            };
            self.posts.push(kind, call, post);
        }
        self.drive()
    }
}

impl Actor for RpcCreditManager {
    type Context = Context<Self>;
}

impl Handler<Turn> for RpcCreditManager {
    type Result = ();

    fn handle(&mut self, turn: Turn, _: &mut Self::Context) {
        if self.over {
            return;
        }
        if let Err(error) = self.handle_turn(turn) {
            self.over = true;
            self.count_message();
            self.connection.do_send(Told::Refused(error));
        }
    }
}

impl Handler<Refused> for RpcCreditManager {
    type Result = ();

    fn handle(&mut self, _: Refused, _: &mut Self::Context) {
        // All Reads and Writes may have ended well before the peer said so.
        if !self.over {
            self.suspect = self.posts.suspect();
        }
        self.tell_refused();
    }
}

impl Handler<Stop> for RpcCreditManager {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        self.over = true;
        ctx.stop();
    }
}
