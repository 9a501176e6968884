//! What is known of one call.

use super::PlaceSource;
use super::getting::Getting;
use super::putting::Putting;
use super::writing::Writing;
use crate::programs::bulkhead::put::PutId;
use crate::wire::onc_rpc::Payload;
use crate::wire::rpcrdma::RemoteKey;
use crate::wire::rpcrdma::chunk::ReadChunk;
use crate::wire::rpcrdma::duplicate::{CallKey, CallMark};
use crate::wire::rpcrdma::pull::Pull;
use crate::wire::rpcrdma::responder::Offer;
use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

/// Octets that may be held.
#[derive(Debug)]
pub(super) struct Budget {
    pub max: u64,
    pub held: u64,
}

impl Budget {
    pub const fn new(max: u64) -> Self {
        Self { max, held: 0 }
    }

    pub fn take(&mut self, bytes: u64) -> bool {
        let fits = bytes <= self.max - self.held;
        if fits {
            self.held += bytes;
        }
        fits
    }

    pub fn give_back(&mut self, bytes: &mut u64) {
        self.held -= mem::take(bytes);
    }
}

#[derive(Debug)]
pub(super) enum Stage<B> {
    /// A long call waits for room.
    Queued {
        long: ReadChunk,
    },
    Pulling {
        pull: Pull<B>,
        stream: Vec<u8>,
    },
    /// It may belong to a draft, and a long call that came before it may too.
    Held,
    /// Waits for this much room for its reply.
    Waiting {
        need: u64,
    },
    /// A READ whose file cannot be pinned, for what other readers hold: it is dispatched again when something came free.
    Busy,
    /// The same call runs on another connection.
    Twin {
        again_at: Duration,
    },
    /// Being dispatched, or its stream has nothing to tell any more.
    Dispatched,
    Getting(Getting),
    Putting(Putting<B>),
    Writing(Writing<B>),
    /// Its answer waits for RDMA Reads that nobody needs.
    Closing(Payload),
    Answering(Answering),
}

/// The answer is decided.
#[derive(Debug)]
pub(super) struct Answering {
    pub octets: Arc<Vec<u8>>,
    /// Of what is not placed: from where, to where.
    pub writes: VecDeque<OctetWrite>,
    /// Placed and not posted.
    pub places: usize,
    pub send: Option<(Vec<u8>, Option<RemoteKey>)>,
    /// What was read for it stays pinned.
    pub _getting: Option<Getting>,
}

/// A part of a long reply.
#[derive(Debug)]
pub(super) struct OctetWrite {
    pub octets: Arc<Vec<u8>>,
    pub start: u64,
    pub len: u64,
    pub key: RemoteKey,
    pub address: u64,
}

#[derive(Debug)]
pub(super) struct Call<B> {
    pub mark: CallMark,
    /// In the order of arrival.
    pub number: u64,
    pub came: Duration,
    pub stream: Vec<u8>,
    pub reads: Vec<ReadChunk>,
    pub offer: Arc<Offer>,
    /// It is running in the cache of duplicates, which keeps its reply.
    pub key: Option<CallKey>,
    /// It is a WRITE, and not looked for in that cache before the first octets of its data are here: its key without them.
    pub head: Option<CallKey>,
    /// Its key, of a WRITE of which those were here.
    pub known: Option<CallKey>,
    pub stage: Stage<B>,
    /// Of the budgets.
    pub held_call: u64,
    pub held_reply: u64,
    pub reads_out: usize,
}

/// A place that is out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub call: CallMark,
    pub len: u32,
    pub to: Target,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// Octets of range `token` from its octet `start` on, to the peer.
    Push { token: u32, start: u32, key: RemoteKey, address: u64 },
    /// The same, into the reply.
    Gather { token: u32, start: u32 },
    /// Octets of the reply itself, to the peer.
    Octets { key: RemoteKey, address: u64 },
}

/// What is to be placed next.
pub(super) struct Found {
    pub to: Target,
    pub source: PlaceSource,
    pub offset: u64,
    pub len: u32,
    pub slow: bool,
}

/// What a dispatch came to.
#[derive(Clone, Copy)]
pub(super) enum Next {
    /// The stream is not needed any more.
    Done,
    Keep,
    Run(PutId),
    Write,
}

impl<B> Stage<B> {
    pub fn pull(&mut self) -> Option<&mut Pull<B>> {
        match self {
            Self::Pulling { pull, .. } => Some(pull),
            Self::Putting(putting) => putting.pull.as_mut(),
            Self::Writing(writing) => writing.pull_mut(),
            _ => None,
        }
    }

    pub fn deadline(&self) -> Option<Duration> {
        match self {
            Self::Getting(getting) => getting.deadline(),
            Self::Twin { again_at } => Some(*again_at),
            _ => None,
        }
    }
}

impl Answering {
    pub fn next_place(&mut self, window: u64) -> Option<Found> {
        let write = self.writes.front_mut()?;
        let len = write.len.min(window);
        let (offset, to) = (write.start, Target::Octets { key: write.key, address: write.address });
        let source = PlaceSource::Octets(write.octets.clone());
        write.start += len;
        write.address += len;
        write.len -= len;
        if write.len == 0 {
            self.writes.pop_front();
        }
        self.places += 1;
        // Not more than a window.
        Some(Found { to, source, offset, len: len as u32, slow: false })
    }
}
