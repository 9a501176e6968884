//! What every door that speaks memcache text does between a command and its answer: executing it, and waiting for what it
//! needs. The doors differ in how octets come and go; [`Replies`] and [`Bodies`] are what this needs of them.
//!
//! ```text
//!            want of a claim, a segment, another try
//!   Nothing ----------------------------------------> Claim | Segment | Retry      (one [`Ask`] is given out)
//!      ^                                                      |
//!      +--- handle_claim, handle_segment, handle_retry -------+   no further command is executed until then
//! ```

use crate::metrics::Metrics;
use crate::programs::memcache::engine::{self, Facts, StoreCommand, Stored};
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::Draft;
use crate::store::segment::Filling;
use crate::store::{Lookup, Miss, Pinned, Store};
use crate::wire::memcache::request::{Command, Keys, StoreVerb};
use crate::wire::memcache::response as reply;
use std::sync::Arc;

pub use crate::programs::stream::Ask;

/// What an exchange is made of.
#[derive(Clone)]
pub struct Context {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub facts: Arc<Facts>,
    pub pins_max: usize,
    pub line_bytes_max: usize,
    /// How long a writer waits for space, in milliseconds.
    pub reserve_wait_ms: u64,
}

/// Where answers go, in the order of the requests.
pub trait Replies {
    /// Adds what `write` appends.
    fn text(&mut self, write: impl FnOnce(&mut Vec<u8>));
    /// Adds a value of `key`; `cas` is shown if it is asked for.
    fn value(&mut self, key: &[u8], pinned: Pinned, cas: Option<u64>);
    /// No further request should be executed until some of it has left.
    fn is_full(&self, pins_max: usize) -> bool;
}

/// The conversation's say over the body that follows a storage line.
pub trait Bodies {
    /// The body of the storage line just read is wanted.
    fn accept_body(&mut self, len: u64);
    /// It is not: it vanishes.
    fn swallow_body(&mut self, len: u64);
    /// What is left of the body under way vanishes.
    fn abandon_body(&mut self);
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Waiting {
    Nothing,
    Claim,
    Segment,
    Retry,
}

/// A storage command between its line and its reply.
#[derive(Debug)]
struct Storing {
    command: StoreCommand,
    draft: Option<Draft>,
    /// All octets are there and are the peer's; only space to join them with is missing.
    whole: bool,
}

/// A part of a line that is kept: counted among the long lines that all connections have.
#[derive(Debug)]
struct LongText {
    octets: Vec<u8>,
    metrics: Arc<Metrics>,
}

impl LongText {
    fn new(octets: &[u8], metrics: &Arc<Metrics>) -> Self {
        metrics.connections.long_line_bytes.add(octets.len() as u64);
        Self { octets: octets.to_vec(), metrics: metrics.clone() }
    }
}

impl Drop for LongText {
    fn drop(&mut self) {
        self.metrics.connections.long_line_bytes.sub(self.octets.len() as u64);
    }
}

/// A retrieval whose keys are not all looked up.
#[derive(Debug)]
struct Retrieving {
    keys: LongText,
    at: usize,
    with_cas: bool,
    exptime: Option<i64>,
}

/// The machine of one connection.
pub struct Exchange {
    context: Context,
    revoker: Revoker,
    storing: Option<Storing>,
    retrieving: Option<Retrieving>,
    waiting: Waiting,
    /// When the commit that is tried again and again was tried first.
    retrying_since_ms: Option<u64>,
    asked: Option<Ask>,
    /// Millisecond of the store's clock at which the peer last moved an octet.
    moved_ms: u64,
}

impl Exchange {
    /// `revoker` is called when a claim is taken back; [`Exchange::handle_revoked`] must follow.
    pub fn new(context: Context, revoker: Revoker) -> Self {
        let moved_ms = context.store.clock().now_ms();
        Self {
            context,
            revoker,
            storing: None,
            retrieving: None,
            waiting: Waiting::Nothing,
            retrying_since_ms: None,
            asked: None,
            moved_ms,
        }
    }

    /// What it was made of.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The store owes something before anything goes on.
    pub fn is_waiting(&self) -> bool {
        self.waiting != Waiting::Nothing
    }

    /// A retrieval has keys that are not looked up.
    pub fn is_retrieving(&self) -> bool {
        self.retrieving.is_some()
    }

    /// A value is arriving or waits to be committed.
    pub fn is_storing(&self) -> bool {
        self.storing.is_some()
    }

    /// It has not all arrived.
    pub fn is_receiving(&self) -> bool {
        self.storing.as_ref().is_some_and(|storing| !storing.whole)
    }

    /// When the peer last moved an octet, in milliseconds of the store's clock.
    pub fn moved_ms(&self) -> u64 {
        self.moved_ms
    }

    /// The peer moved an octet, or it is its turn from now on.
    pub fn handle_moved(&mut self) {
        self.moved_ms = self.context.store.clock().now_ms();
    }

    /// Octets of the value that is arriving came: its claim is not idle.
    pub fn touch_claim(&self) {
        if let Some(claim) = self.draft().and_then(Draft::claim) {
            claim.touch(self.moved_ms);
        }
    }

    /// What to ask for now.
    pub fn poll_ask(&mut self) -> Option<Ask> {
        self.asked.take()
    }

    /// The value that is arriving, once its first octets were let in.
    pub fn draft(&self) -> Option<&Draft> {
        self.storing.as_ref().and_then(|storing| storing.draft.as_ref())
    }

    /// As [`Exchange::draft`], to put octets in.
    pub fn draft_mut(&mut self) -> Option<&mut Draft> {
        self.storing.as_mut().and_then(|storing| storing.draft.as_mut())
    }

    /// The value that is arriving is given up: its peer is gone.
    pub fn forget(&mut self) {
        self.storing = None;
    }

    /// Goes on with what was begun before, without new input. False if there is nothing such.
    pub fn resume(&mut self, replies: &mut impl Replies) -> bool {
        if self.retrieving.is_some() {
            self.retrieve(replies);
            return true;
        }
        if self.storing.as_ref().is_some_and(|storing| storing.whole) {
            self.commit(replies);
            return true;
        }
        false
    }

    /// The claim asked for, or none after too long a wait.
    pub fn handle_claim(&mut self, claim: Option<Claim>, replies: &mut impl Replies, bodies: &mut impl Bodies) {
        if self.waiting != Waiting::Claim {
            return;
        }
        self.waiting = Waiting::Nothing;
        // It is the peer's turn from now on: the wait was the store's.
        self.moved_ms = self.context.store.clock().now_ms();
        match (claim, &mut self.storing) {
            (Some(claim), Some(storing)) => {
                storing.draft = Some(self.context.store.draft(storing.command.len, Some(claim)));
            }
            (None, Some(_)) => self.refuse_for_space(replies, bodies),
            (_, None) => {}
        }
    }

    /// The segment asked for, or none after too long a wait.
    pub fn handle_segment(&mut self, filling: Option<Filling>, replies: &mut impl Replies, bodies: &mut impl Bodies) {
        if self.waiting != Waiting::Segment {
            return;
        }
        self.waiting = Waiting::Nothing;
        self.moved_ms = self.context.store.clock().now_ms();
        let draft = self.storing.as_mut().and_then(|storing| storing.draft.as_mut());
        match (filling, draft) {
            (_, Some(draft)) if draft.claim().is_some_and(Claim::is_revoked) => self.refuse_for_space(replies, bodies),
            (Some(filling), Some(draft)) => {
                if let Some(claim) = draft.claim() {
                    claim.set_held_up(false);
                    claim.touch(self.context.store.clock().now_ms());
                }
                draft.begin(filling);
            }
            (None, Some(_)) => self.refuse_for_space(replies, bodies),
            (_, None) => {}
        }
    }

    /// Something came free, or some time went by.
    pub fn handle_retry(&mut self, replies: &mut impl Replies, bodies: &mut impl Bodies) {
        if self.waiting != Waiting::Retry {
            return;
        }
        self.waiting = Waiting::Nothing;
        let late_ms = self.context.store.clock().now_ms().saturating_sub(self.context.reserve_wait_ms);
        if self.retrying_since_ms.is_some_and(|since| since < late_ms) && self.storing.is_some() {
            self.refuse_for_space(replies, bodies);
        }
    }

    /// The claim was taken back: its peer was idle while others waited.
    pub fn handle_revoked(&mut self, replies: &mut impl Replies, bodies: &mut impl Bodies) {
        // The segment that is asked for comes in any case, and must find the value it was asked for.
        if self.waiting == Waiting::Segment {
            return;
        }
        let draft = self.storing.as_ref().and_then(|storing| storing.draft.as_ref());
        // The message may be about a claim that ended well before it came.
        if draft.and_then(Draft::claim).is_some_and(Claim::is_revoked) {
            self.waiting = Waiting::Nothing;
            self.refuse_for_space(replies, bodies);
        }
    }

    /// Executes a command. True if it was the last: the peer quits.
    pub fn execute(&mut self, command: Command<'_>, replies: &mut impl Replies, bodies: &mut impl Bodies) -> bool {
        let Context { store, metrics, facts, .. } = &self.context;
        let now = store.clock().now();
        let quiet = match &command {
            Command::Arithmetic { noreply, .. }
            | Command::Touch { noreply, .. }
            | Command::Delete { noreply, .. }
            | Command::FlushAll { noreply, .. }
            | Command::Verbosity { noreply } => *noreply,
            _ => false,
        };
        let line: &[u8] = match command {
            Command::Get { keys, with_cas } => {
                self.begin_retrieval(keys, with_cas, None, replies);
                return false;
            }
            Command::GetAndTouch { exptime, keys, with_cas } => {
                self.begin_retrieval(keys, with_cas, Some(exptime), replies);
                return false;
            }
            Command::Store(header) => {
                self.begin_storing(header.into(), replies, bodies);
                return false;
            }
            Command::Quit => return true,
            Command::Stats { argument } => {
                replies.text(|out| engine::stats(store, metrics, facts, argument, out));
                return false;
            }
            Command::Version => {
                replies.text(|out| reply::version_line(out, engine::VERSION));
                return false;
            }
            Command::Arithmetic { key, delta, direction, .. } => {
                let mut line = Vec::new();
                engine::arithmetic(store, metrics, key, delta, direction, now, &mut line);
                if !quiet {
                    replies.text(|out| out.extend_from_slice(&line));
                }
                return false;
            }
            Command::Touch { key, exptime, .. } => engine::touch(store, metrics, key, exptime, now),
            Command::Delete { key, .. } => engine::delete(store, metrics, key, now),
            Command::FlushAll { delay, .. } => engine::flush_all(store, metrics, delay),
            Command::Verbosity { .. } => reply::OK,
        };
        if !quiet {
            replies.text(|out| out.extend_from_slice(line));
        }
        false
    }

    fn begin_retrieval(
        &mut self,
        mut keys: Keys<'_>,
        with_cas: bool,
        exptime: Option<i64>,
        replies: &mut impl Replies,
    ) {
        // The usual retrieval has one key and needs no copy of it.
        let rest = keys.clone();
        if let Some(key) = keys.next()
            && keys.clone().next().is_none()
            && self.look_up(key, with_cas, exptime, replies)
        {
            return replies.text(|out| out.extend_from_slice(reply::END));
        }
        self.retrieving =
            Some(Retrieving { keys: LongText::new(rest.as_bytes(), &self.context.metrics), at: 0, with_cas, exptime });
    }

    /// Goes on with a retrieval until its end or until the output is full.
    fn retrieve(&mut self, replies: &mut impl Replies) {
        let Some(mut retrieving) = self.retrieving.take() else { return };
        let mut keys = Keys::from_validated(&retrieving.keys.octets[retrieving.at..]);
        loop {
            if replies.is_full(self.context.pins_max) {
                break;
            }
            let before = keys.as_bytes().len();
            let Some(key) = keys.next() else {
                return replies.text(|out| out.extend_from_slice(reply::END));
            };
            if !self.look_up(key, retrieving.with_cas, retrieving.exptime, replies) {
                retrieving.at = retrieving.keys.octets.len() - before;
                return self.retrieving = Some(retrieving);
            }
        }
        retrieving.at = retrieving.keys.octets.len() - keys.as_bytes().len();
        self.retrieving = Some(retrieving);
    }

    /// Answers one key. False if the answer has to wait.
    fn look_up(&mut self, key: &[u8], with_cas: bool, exptime: Option<i64>, replies: &mut impl Replies) -> bool {
        let Context { store, metrics, .. } = &self.context;
        let counts = &metrics.memcache;
        let now = store.clock().now();
        let found = store.get(key, now);
        if let Lookup::Busy = found {
            self.waiting = Waiting::Retry;
            self.asked = Some(Ask::Retry);
            return false;
        }
        counts.cmd_get.add(1);
        match found {
            Lookup::Hit(pinned) => {
                counts.get_hits.add(1);
                if let Some(exptime) = exptime {
                    engine::touch(store, metrics, key, exptime, now);
                }
                pinned.count_head();
                let cas = with_cas.then(|| pinned.version());
                replies.value(key, pinned, cas);
            }
            Lookup::Miss(miss) => {
                counts.get_misses.add(1);
                match miss {
                    Miss::Expired => counts.get_expired.add(1),
                    Miss::Flushed => counts.get_flushed.add(1),
                    Miss::Absent => {}
                }
                if exptime.is_some() {
                    counts.cmd_touch.add(1);
                    counts.touch_misses.add(1);
                }
            }
            Lookup::Busy => {}
        }
        true
    }

    fn begin_storing(&mut self, command: StoreCommand, replies: &mut impl Replies, bodies: &mut impl Bodies) {
        let Context { store, metrics, .. } = &self.context;
        metrics.memcache.cmd_set.add(1);
        if command.len > store.value_bytes_max() {
            metrics.memcache.store_too_large.add(1);
            // What the client meant to replace is stale now.
            if command.verb == StoreVerb::Set {
                store.delete(&command.key, store.clock().now());
            }
            bodies.swallow_body(command.len);
            if !command.noreply {
                replies.text(|out| out.extend_from_slice(reply::TOO_LARGE));
            }
            return;
        }
        bodies.accept_body(command.len);
        let draft = (command.len == 0).then(|| store.draft(0, None));
        self.storing = Some(Storing { command, draft, whole: false });
    }

    /// The value that is arriving, with room for more octets; `whole` if all that are missing are at hand. `None` if it
    /// has to wait first.
    pub fn poll_draft(&mut self, whole: bool) -> Option<&mut Draft> {
        let storing = self.storing.as_mut()?;
        let store = &self.context.store;
        let draft = match &mut storing.draft {
            Some(draft) => draft,
            none => {
                let claim = if whole { None } else { store.try_claim(storing.command.len, false, &self.revoker) };
                if !whole && claim.is_none() {
                    self.waiting = Waiting::Claim;
                    self.asked = Some(Ask::Reserve { len: storing.command.len });
                    return None;
                }
                none.insert(store.draft(storing.command.len, claim))
            }
        };
        if let Some(want) = draft.want() {
            match store.fill(want) {
                Ok(filling) => draft.begin(filling),
                Err(_) => {
                    if let Some(claim) = draft.claim() {
                        claim.set_held_up(true);
                    }
                    self.waiting = Waiting::Segment;
                    self.asked = Some(Ask::Fill { want });
                    return None;
                }
            }
        }
        Some(draft)
    }

    /// The body has come; not `intact` if no line end followed it.
    pub fn handle_body_end(&mut self, intact: bool, replies: &mut impl Replies) {
        let Some(storing) = &mut self.storing else { return };
        if intact {
            storing.whole = true;
            return;
        }
        self.context.metrics.memcache.bad_data_chunks.add(1);
        let quiet = storing.command.noreply;
        self.storing = None;
        if !quiet {
            replies.text(|out| out.extend_from_slice(reply::BAD_DATA_CHUNK));
        }
    }

    fn commit(&mut self, replies: &mut impl Replies) {
        let Some(mut storing) = self.storing.take() else { return };
        let Some(draft) = storing.draft.take() else { return };
        let Context { store, metrics, .. } = &self.context;
        match engine::store(store, metrics, &storing.command, draft, store.clock().now()) {
            Stored::Reply(line) => {
                self.retrying_since_ms = None;
                if !storing.command.noreply {
                    replies.text(|out| out.extend_from_slice(line));
                }
            }
            Stored::Later(draft) => {
                if let Some(claim) = draft.claim() {
                    claim.set_held_up(true);
                }
                storing.draft = Some(draft);
                self.storing = Some(storing);
                self.retrying_since_ms.get_or_insert(store.clock().now_ms());
                self.waiting = Waiting::Retry;
                self.asked = Some(Ask::Retry);
            }
        }
    }

    /// Gives up the value that is arriving: its space is not to be had.
    fn refuse_for_space(&mut self, replies: &mut impl Replies, bodies: &mut impl Bodies) {
        let Some(storing) = self.storing.take() else { return };
        self.retrying_since_ms = None;
        let Context { store, metrics, .. } = &self.context;
        metrics.memcache.store_no_memory.add(1);
        if storing.command.verb == StoreVerb::Set {
            store.delete(&storing.command.key, store.clock().now());
        }
        if !storing.whole {
            bodies.abandon_body();
        }
        self.asked = None;
        if !storing.command.noreply {
            replies.text(|out| out.extend_from_slice(reply::OUT_OF_MEMORY_STORING));
        }
    }
}
