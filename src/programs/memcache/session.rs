//! One memcache connection without its socket: octets in, replies out, requests executed in order while their I/O
//! overlaps.
//!
//! ```text
//!                  +------------- process ---------------+
//!  socket -> input | line -> command -> engine -> reply   | -> output -> socket
//!         \        | body -> draft  -> engine -> reply    |      ^
//!          `------>| (straight into its pages)            |      | tail reads
//!                  +--------------------------------------+    disk
//!                        |            ^
//!                        v            |
//!                   waits for a claim, a segment, or another try
//! ```
//!
//! The owner reads into [`Session::targets`], calls [`Session::process`], and does what [`Session::poll_action`] and
//! [`Session::gather`] give. Nothing here waits: what cannot go on says so and is gone on with by a `handle_*` call.

use crate::fabric::staging::StagingBuf;
use crate::metrics::Metrics;
use crate::programs::memcache::engine::{self, Facts, StoreCommand, Stored};
use crate::programs::memcache::output::{Failure, Output, TailRead};
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::{Draft, Want};
use crate::store::segment::{Content, Filling};
use crate::store::{Lookup, Miss, Pinned, Store};
use crate::wire::memcache::conversation::{Conversation, Step};
use crate::wire::memcache::parse::{CloseReason, LINE_BYTES_MAX};
use crate::wire::memcache::request::{Command, Keys, StoreVerb};
use crate::wire::memcache::response as reply;
use std::io::IoSlice;
use std::sync::Arc;

/// Input buffer of a connection that is not idle.
pub const INPUT_BYTES: usize = 16 << 10;
/// A body that has not as many octets in the buffer takes no memory of the store yet: a peer that sends a header and
/// stalls costs nothing.
const BEGIN_BYTES: usize = 8 << 10;
/// Values up to this are copied into the text of the reply: cheaper than a slice and a pin of their own.
const COPIED_BYTES_MAX: u64 = 4 << 10;
/// All input buffers together may grow by this much for long lines.
pub const LONG_LINE_BYTES_MAX: u64 = 64 << 20;

/// What a session is made of besides the store.
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

/// What the owner must do for a session.
#[derive(Debug)]
pub enum Action {
    /// Ask the `Store` actor for a claim; [`Session::handle_claim`] follows.
    Reserve { len: u64 },
    /// Ask it for a segment; [`Session::handle_segment`] follows.
    Fill { want: Want },
    /// Ask it to say when something came free; [`Session::handle_retry`] follows.
    Retry,
    /// Start a disk read; [`Session::handle_read`] follows.
    Read(TailRead),
}

/// Why a session ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    Quit,
    ByPeer,
    Protocol,
    FailedRead,
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
pub struct Session {
    context: Context,
    revoker: Revoker,
    conversation: Conversation,
    input: Vec<u8>,
    start: usize,
    end: usize,
    storing: Option<Storing>,
    retrieving: Option<Retrieving>,
    waiting: Waiting,
    /// When the commit that is tried again and again was tried first.
    retrying_since_ms: Option<u64>,
    asked: Option<Action>,
    output: Output,
    ending: Option<End>,
    eof: bool,
    /// What was offered to the peer was taken back before it took it.
    held_back: bool,
    /// Millisecond of the store's clock at which the peer last moved an octet.
    moved_ms: u64,
}

impl Session {
    /// `revoker` is called when a claim is taken back; [`Session::handle_revoked`] must follow.
    pub fn new(context: Context, revoker: Revoker) -> Self {
        let moved_ms = context.store.clock().now_ms();
        let conversation = Conversation::new(context.line_bytes_max);
        Self {
            context,
            revoker,
            conversation,
            input: Vec::new(),
            start: 0,
            end: 0,
            storing: None,
            retrieving: None,
            waiting: Waiting::Nothing,
            retrying_since_ms: None,
            asked: None,
            output: Output::default(),
            ending: None,
            eof: false,
            held_back: false,
            moved_ms,
        }
    }

    /// Whether octets of the peer are welcome now.
    pub fn wants_input(&self) -> bool {
        !self.eof
            && self.ending.is_none()
            && self.waiting == Waiting::Nothing
            && self.retrieving.is_none()
            && !self.is_full()
            && (self.end < self.input.len() || self.start > 0 || self.input.len() < INPUT_BYTES || self.can_grow())
    }

    /// Where the next octets of the peer go: first into the pages of the value that is arriving, then into the buffer.
    /// Either may be empty, not both while [`Session::wants_input`].
    pub fn targets(&mut self) -> (&mut [u8], &mut [u8]) {
        if self.input.is_empty() {
            self.input = vec![0; INPUT_BYTES];
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.input.len() && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        } else if self.end == self.input.len() && self.can_grow() {
            let more = self.input.len().min(self.context.line_bytes_max + 2 - self.input.len());
            self.context.metrics.connections.long_line_bytes.add(more as u64);
            self.input.resize(self.input.len() + more, 0);
        }
        let buffered = self.start < self.end;
        let direct = self.storing.as_mut().filter(|_| !buffered).and_then(|storing| storing.draft.as_mut());
        let remaining = self.conversation.body_remaining();
        let spare = direct.map_or(&mut [][..], Draft::spare);
        // Until the last segment, the buffer would only take octets that must be copied out of it again.
        let buffer = if spare.is_empty() || spare.len() as u64 == remaining { self.end } else { self.input.len() };
        (spare, &mut self.input[buffer..])
    }

    /// The peer sent `count` octets into [`Session::targets`].
    pub fn handle_input(&mut self, count: usize) {
        self.moved_ms = self.context.store.clock().now_ms();
        self.context.metrics.connections.bytes_read.add(count as u64);
        let mut count = count;
        if self.start == self.end
            && let Some(draft) = self.storing.as_mut().and_then(|storing| storing.draft.as_mut())
        {
            let direct = count.min(draft.spare().len());
            if direct > 0 {
                draft.advance(direct);
                self.conversation.body_taken(direct as u64);
                if let Some(claim) = draft.claim() {
                    claim.touch(self.moved_ms);
                }
                count -= direct;
            }
        }
        self.end += count;
    }

    /// The peer sends no more.
    pub fn handle_eof(&mut self) {
        self.eof = true;
    }

    /// Does all that can be done with what is there. Call it after every `handle_*`.
    pub fn process(&mut self) {
        let input = std::mem::take(&mut self.input);
        self.process_input(&input);
        self.input = input;
        self.check_reads();
        if self.eof && self.ending.is_none() && self.waiting == Waiting::Nothing && self.retrieving.is_none() {
            // Whatever is left of the input can never become whole.
            if !self.is_full() {
                self.ending = Some(End::ByPeer);
                self.storing = None;
            }
        }
    }

    /// How many buffers the tail reads of this connection may have; see [`Output::set_tail_reads`].
    pub fn set_tail_reads(&mut self, count: usize) {
        self.output.set_tail_reads(count);
    }

    /// Whether buffers of the disk are filled or on their way.
    pub fn has_tail_reads(&self) -> bool {
        self.output.has_tail_reads()
    }

    /// What the owner must do next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.asked.take().or_else(|| self.output.poll_read().map(Action::Read))
    }

    /// What can be sent now; see [`Output::gather`].
    pub fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        self.output.gather(slices)
    }

    /// The first `count` octets of it were sent.
    pub fn handle_sent(&mut self, count: usize) {
        self.moved_ms = self.context.store.clock().now_ms();
        self.context.metrics.connections.bytes_written.add(count as u64);
        self.held_back = false;
        self.output.handle_sent(count);
    }

    /// The claim asked for, or none after too long a wait.
    pub fn handle_claim(&mut self, claim: Option<Claim>) {
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
            (None, Some(_)) => self.refuse_for_space(),
            (_, None) => {}
        }
    }

    /// The segment asked for, or none after too long a wait.
    pub fn handle_segment(&mut self, filling: Option<Filling>) {
        if self.waiting != Waiting::Segment {
            return;
        }
        self.waiting = Waiting::Nothing;
        self.moved_ms = self.context.store.clock().now_ms();
        let draft = self.storing.as_mut().and_then(|storing| storing.draft.as_mut());
        match (filling, draft) {
            (_, Some(draft)) if draft.claim().is_some_and(Claim::is_revoked) => self.refuse_for_space(),
            (Some(filling), Some(draft)) => {
                if let Some(claim) = draft.claim() {
                    claim.set_held_up(false);
                    claim.touch(self.context.store.clock().now_ms());
                }
                draft.begin(filling);
            }
            (None, Some(_)) => self.refuse_for_space(),
            (_, None) => {}
        }
    }

    /// Something came free, or some time went by.
    pub fn handle_retry(&mut self) {
        if self.waiting != Waiting::Retry {
            return;
        }
        self.waiting = Waiting::Nothing;
        let late_ms = self.context.store.clock().now_ms().saturating_sub(self.context.reserve_wait_ms);
        if self.retrying_since_ms.is_some_and(|since| since < late_ms) && self.storing.is_some() {
            self.refuse_for_space();
        }
    }

    /// The claim was taken back: its peer was idle while others waited.
    pub fn handle_revoked(&mut self) {
        // The segment that is asked for comes in any case, and must find the value it was asked for.
        if self.waiting == Waiting::Segment {
            return;
        }
        let draft = self.storing.as_ref().and_then(|storing| storing.draft.as_ref());
        // The message may be about a claim that ended well before it came.
        if draft.and_then(Draft::claim).is_some_and(Claim::is_revoked) {
            self.waiting = Waiting::Nothing;
            self.refuse_for_space();
        }
    }

    /// A disk read ended: its octets, or none if it failed.
    pub fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) {
        if buf.is_none() {
            self.context.metrics.failed_reads.add(1);
        }
        if let (Some(buf), Some(segment)) = (&buf, self.output.target(ticket)) {
            self.context.store.warm(segment, &buf.as_slice()[..segment.len() as usize]);
        }
        self.output.handle_read(ticket, buf);
    }

    /// A read that [`Session::poll_action`] gave could not be started for want of a buffer.
    pub fn handle_read_back(&mut self, ticket: u64) {
        self.output.read_back(ticket);
    }

    /// Gives buffers that were read and not sent to others that wait for them.
    pub fn give_back(&mut self) -> usize {
        self.held_back |= self.output.gather(&mut Vec::new()) > 0;
        let count = self.output.give_back();
        self.context.metrics.reads_repeated.add(count as u64);
        count
    }

    /// Lets go of memory that the peer does not take, for writers that wait for some.
    pub fn give_back_memory(&mut self) {
        self.held_back |= self.output.gather(&mut Vec::new()) > 0;
        self.output.give_back_memory();
        self.context.store.wake().signal();
    }

    /// The end, once everything before it was sent.
    pub fn ended(&self) -> Option<End> {
        self.ending.filter(|end| *end == End::FailedRead || self.output.is_empty())
    }

    /// Nobody has anything to do: no request, no reply.
    pub fn is_idle(&self) -> bool {
        self.output.is_empty() && self.start == self.end && self.storing.is_none() && self.retrieving.is_none()
    }

    /// It is the peer's turn to move an octet, and it has not since `since_ms` of the store's clock.
    pub fn is_stalled(&self, since_ms: u64) -> bool {
        if self.moved_ms >= since_ms {
            return false;
        }
        let half_a_request = self.storing.as_ref().is_some_and(|storing| !storing.whole)
            || self.conversation.is_swallowing()
            || self.end - self.start > LINE_BYTES_MAX && self.retrieving.is_none();
        self.held_back
            || self.output.gather(&mut Vec::new()) > 0
            || half_a_request && self.waiting == Waiting::Nothing && self.output.is_empty()
    }

    /// When the peer last moved an octet.
    pub fn moved_ms(&self) -> u64 {
        self.moved_ms
    }

    /// A request is under way: what a shutdown waits for.
    pub fn is_busy(&self) -> bool {
        !self.output.is_empty() || self.storing.is_some() || self.retrieving.is_some()
    }

    /// Gives memory back that only a busy connection needs.
    pub fn rest(&mut self) {
        if self.is_idle() {
            self.release_input();
            self.output.rest();
        }
    }

    fn release_input(&mut self) {
        let long = self.input.len().saturating_sub(INPUT_BYTES) as u64;
        self.context.metrics.connections.long_line_bytes.sub(long);
        self.input = Vec::new();
        (self.start, self.end) = (0, 0);
    }

    fn can_grow(&self) -> bool {
        // One octet more than the longest line, so that the parser can tell one that is too long; see Conversation::new.
        self.input.len() < self.context.line_bytes_max + 2
            && self.context.metrics.connections.long_line_bytes.get() < LONG_LINE_BYTES_MAX
    }

    fn is_full(&self) -> bool {
        self.output.is_long() || self.output.value_count() >= self.context.pins_max
    }

    fn process_input(&mut self, input: &[u8]) {
        while self.waiting == Waiting::Nothing && self.ending.is_none() && !self.is_full() {
            if self.retrieving.is_some() {
                self.retrieve();
                continue;
            }
            if self.storing.as_ref().is_some_and(|storing| storing.whole) {
                self.commit();
                continue;
            }
            let (consumed, step) = self.conversation.step(&input[self.start..self.end]);
            let body = &input[self.start + consumed..self.end];
            self.start += consumed;
            match step {
                Step::NeedMore => {
                    // A line that outgrows what all long lines together may take.
                    if self.end - self.start == input.len() && !input.is_empty() && !self.can_grow() {
                        self.ending = Some(End::Protocol);
                    }
                    break;
                }
                Step::Command(command) => self.execute(command),
                Step::Refused { reply } => {
                    if let Some(reply) = reply {
                        self.output.text(|out| out.extend_from_slice(reply));
                    }
                }
                Step::Body { remaining, available } => {
                    if !self.take_body(remaining, &body[..available]) {
                        break;
                    }
                }
                Step::BodyEnd { intact } => self.handle_body_end(intact),
                Step::Close(reason) => {
                    self.ending = Some(if reason == CloseReason::Quit { End::Quit } else { End::Protocol });
                }
            }
        }
    }

    fn execute(&mut self, command: Command<'_>) {
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
            Command::Get { keys, with_cas } => return self.begin_retrieval(keys, with_cas, None),
            Command::GetAndTouch { exptime, keys, with_cas } => {
                return self.begin_retrieval(keys, with_cas, Some(exptime));
            }
            Command::Store(header) => return self.begin_storing(header.into()),
            Command::Quit => return self.ending = Some(End::Quit),
            Command::Stats { argument } => {
                return self.output.text(|out| engine::stats(store, metrics, facts, argument, out));
            }
            Command::Version => {
                return self.output.text(|out| reply::version_line(out, engine::VERSION));
            }
            Command::Arithmetic { key, delta, direction, .. } => {
                let mut line = Vec::new();
                engine::arithmetic(store, metrics, key, delta, direction, now, &mut line);
                if !quiet {
                    self.output.text(|out| out.extend_from_slice(&line));
                }
                return;
            }
            Command::Touch { key, exptime, .. } => engine::touch(store, metrics, key, exptime, now),
            Command::Delete { key, .. } => engine::delete(store, metrics, key, now),
            Command::FlushAll { delay, .. } => engine::flush_all(store, metrics, delay),
            Command::Verbosity { .. } => reply::OK,
        };
        if !quiet {
            self.output.text(|out| out.extend_from_slice(line));
        }
    }

    fn begin_retrieval(&mut self, mut keys: Keys<'_>, with_cas: bool, exptime: Option<i64>) {
        // The usual retrieval has one key and needs no copy of it.
        let rest = keys.clone();
        if let Some(key) = keys.next()
            && keys.clone().next().is_none()
            && self.look_up(key, with_cas, exptime)
        {
            return self.output.text(|out| out.extend_from_slice(reply::END));
        }
        self.retrieving =
            Some(Retrieving { keys: LongText::new(rest.as_bytes(), &self.context.metrics), at: 0, with_cas, exptime });
    }

    /// Goes on with a retrieval until its end or until the output is full.
    fn retrieve(&mut self) {
        let Some(mut retrieving) = self.retrieving.take() else { return };
        let mut keys = Keys::from_validated(&retrieving.keys.octets[retrieving.at..]);
        loop {
            if self.is_full() {
                break;
            }
            let before = keys.as_bytes().len();
            let Some(key) = keys.next() else {
                return self.output.text(|out| out.extend_from_slice(reply::END));
            };
            if !self.look_up(key, retrieving.with_cas, retrieving.exptime) {
                retrieving.at = retrieving.keys.octets.len() - before;
                return self.retrieving = Some(retrieving);
            }
        }
        retrieving.at = retrieving.keys.octets.len() - keys.as_bytes().len();
        self.retrieving = Some(retrieving);
    }

    /// Answers one key. False if the answer has to wait.
    fn look_up(&mut self, key: &[u8], with_cas: bool, exptime: Option<i64>) -> bool {
        let Context { store, metrics, .. } = &self.context;
        let counts = &metrics.memcache;
        let now = store.clock().now();
        let found = store.get(key, now);
        if let Lookup::Busy = found {
            self.waiting = Waiting::Retry;
            self.asked = Some(Action::Retry);
            return false;
        }
        counts.cmd_get.add(1);
        match found {
            Lookup::Hit(pinned) => {
                counts.get_hits.add(1);
                if let Some(exptime) = exptime {
                    engine::touch(store, metrics, key, exptime, now);
                }
                self.answer(key, pinned, with_cas);
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

    fn answer(&mut self, key: &[u8], pinned: Pinned, with_cas: bool) {
        pinned.count_head();
        let cas = with_cas.then(|| pinned.version());
        let (flags, len) = (pinned.flags(), pinned.len());
        let line = |out: &mut Vec<u8>| reply::value_line(out, key, flags, len, cas);
        if len > COPIED_BYTES_MAX {
            return self.output.value(pinned, line);
        }
        let mut blocks = Vec::with_capacity(pinned.pieces().len());
        for piece in pinned.pieces() {
            match piece.segment.content() {
                Content::Ram(ram) => blocks.push((piece, ram)),
                _ => return self.output.value(pinned, line),
            }
        }
        self.output.text(|out| {
            line(out);
            for (piece, ram) in &blocks {
                out.extend_from_slice(piece.octets(ram));
            }
            out.extend_from_slice(reply::CRLF);
        });
    }

    fn begin_storing(&mut self, command: StoreCommand) {
        let Context { store, metrics, .. } = &self.context;
        metrics.memcache.cmd_set.add(1);
        if command.len > store.value_bytes_max() {
            metrics.memcache.store_too_large.add(1);
            // What the client meant to replace is stale now.
            if command.verb == StoreVerb::Set {
                store.delete(&command.key, store.clock().now());
            }
            self.conversation.swallow_body(command.len);
            if !command.noreply {
                self.output.text(|out| out.extend_from_slice(reply::TOO_LARGE));
            }
            return;
        }
        self.conversation.accept_body(command.len);
        let draft = (command.len == 0).then(|| store.draft(0, None));
        self.storing = Some(Storing { command, draft, whole: false });
    }

    /// Takes octets of the body from the buffer. False if no more can be done now.
    fn take_body(&mut self, remaining: u64, available: &[u8]) -> bool {
        let Some(storing) = &mut self.storing else { return false };
        let store = &self.context.store;
        let Some(draft) = &mut storing.draft else {
            let whole = available.len() as u64 == remaining;
            if !whole && available.len() < BEGIN_BYTES {
                return false;
            }
            let claim = if whole { None } else { store.try_claim(storing.command.len, false, &self.revoker) };
            if whole || claim.is_some() {
                storing.draft = Some(store.draft(storing.command.len, claim));
                return true;
            }
            self.waiting = Waiting::Claim;
            self.asked = Some(Action::Reserve { len: storing.command.len });
            return false;
        };
        if let Some(want) = draft.want() {
            match store.fill(want) {
                Ok(filling) => draft.begin(filling),
                Err(_) => {
                    if let Some(claim) = draft.claim() {
                        claim.set_held_up(true);
                    }
                    self.waiting = Waiting::Segment;
                    self.asked = Some(Action::Fill { want });
                    return false;
                }
            }
        }
        let taken = draft.put(available);
        self.start += taken;
        self.conversation.body_taken(taken as u64);
        taken > 0
    }

    fn handle_body_end(&mut self, intact: bool) {
        let Some(storing) = &mut self.storing else { return };
        if intact {
            storing.whole = true;
            return;
        }
        self.context.metrics.memcache.bad_data_chunks.add(1);
        let quiet = storing.command.noreply;
        self.storing = None;
        if !quiet {
            self.output.text(|out| out.extend_from_slice(reply::BAD_DATA_CHUNK));
        }
    }

    fn commit(&mut self) {
        let Some(mut storing) = self.storing.take() else { return };
        let Some(draft) = storing.draft.take() else { return };
        let Context { store, metrics, .. } = &self.context;
        match engine::store(store, metrics, &storing.command, draft, store.clock().now()) {
            Stored::Reply(line) => {
                self.retrying_since_ms = None;
                if !storing.command.noreply {
                    self.output.text(|out| out.extend_from_slice(line));
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
                self.asked = Some(Action::Retry);
            }
        }
    }

    /// Gives up the value that is arriving: its space is not to be had.
    fn refuse_for_space(&mut self) {
        let Some(storing) = self.storing.take() else { return };
        self.retrying_since_ms = None;
        let Context { store, metrics, .. } = &self.context;
        metrics.memcache.store_no_memory.add(1);
        if storing.command.verb == StoreVerb::Set {
            store.delete(&storing.command.key, store.clock().now());
        }
        if !storing.whole {
            self.conversation.abandon_body();
        }
        self.asked = None;
        if !storing.command.noreply {
            self.output.text(|out| out.extend_from_slice(reply::OUT_OF_MEMORY_STORING));
        }
    }

    fn check_reads(&mut self) {
        while let Some(failure) = self.output.poll_failure() {
            match failure {
                Failure::Missed(object) => self.context.store.drop_lost(&object),
                Failure::Broken(object) => {
                    self.context.store.drop_lost(&object);
                    return self.ending = Some(End::FailedRead);
                }
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.release_input();
    }
}
