//! What one connection asks of the store, and what it holds there.

use super::get::Get;
use super::put::{Drafts, PutId};
use super::{Answer, Item, PINS_MAX, PutResult, Request, execute, pins};
use crate::programs::rpc::Data;
use crate::store::Store;
use crate::store::hold::Holds;
use crate::wire::onc_rpc::Xid;

/// What became of a call.
#[derive(Debug)]
pub enum Executed {
    /// It is done.
    Answer(Answer<Item>),
    /// Octets are to be read: see [`Get`].
    Get(Get),
    /// Octets are to come: see [`Session::drafts`]. The answer is a [`Step`](super::put::Step) of that value.
    Put(PutId),
    /// It is done, and it ended a value for which calls may wait.
    Dropped(Answer<Item>, PutId),
}

/// The drafts and pins of one connection, which end with it.
#[derive(Debug)]
pub struct Session {
    drafts: Drafts,
    holds: Holds,
}

impl Session {
    /// Drafts may be without a call for `draft_idle_ms`.
    pub fn new(draft_idle_ms: u64) -> Self {
        Self { drafts: Drafts::new(draft_idle_ms), holds: Holds::new(PINS_MAX) }
    }

    pub fn drafts(&mut self) -> &mut Drafts {
        &mut self.drafts
    }

    /// What is pinned.
    pub fn holds(&self) -> &Holds {
        &self.holds
    }

    /// Executes what can be at once, and begins the rest. Calls are executed in the order in which they came.
    pub fn execute(&mut self, xid: Xid, request: &Request<'_, Data>, store: &Store) -> Executed {
        let begun = |put: Result<PutId, super::Status>| match put {
            Ok(id) => Executed::Put(id),
            Err(status) => Executed::Answer(Answer::Put(PutResult::bare(status))),
        };
        Executed::Answer(match request {
            Request::Null => Answer::Null,
            Request::Stat(stat) => execute::stat(stat, store),
            Request::Get(get) => return Executed::Get(Get::begin(get, store)),
            Request::Put(put) => return begun(self.drafts.begin(store, xid, put)),
            Request::PutMore(more) => return begun(self.drafts.more(store, xid, more)),
            Request::PutDrop { draft } => match self.drafts.drop_draft(*draft) {
                (status, Some(id)) => return Executed::Dropped(Answer::PutDrop(status), id),
                (status, None) => Answer::PutDrop(status),
            },
            Request::Delete(deletions) => execute::delete(deletions, store),
            Request::Touch(touches) => execute::touch(touches, store),
            Request::List(list) => execute::list(list, store),
            Request::Pin(keys) => pins::pin(&mut self.holds, store, keys),
            Request::Unpin(keys) => pins::unpin(&mut self.holds, keys),
        })
    }
}
