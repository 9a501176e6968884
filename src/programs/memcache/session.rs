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
//! Its owner drives it as a [`StreamSession`].

use crate::fabric::staging::StagingBuf;
use crate::programs::memcache::exchange::{Bodies, Exchange, Replies};
use crate::programs::memcache::output::{Failure, Output};
use crate::programs::stream::StreamSession;
use crate::store::Pinned;
use crate::store::claims::{Claim, Revoker};
use crate::store::draft::Draft;
use crate::store::segment::{Content, Filling};
use crate::wire::memcache::conversation::{Conversation, Step};
use crate::wire::memcache::parse::{CloseReason, LINE_BYTES_MAX};
use crate::wire::memcache::response as reply;
use std::io::IoSlice;

pub use crate::programs::memcache::exchange::Context;
pub use crate::programs::stream::{Action, End, INPUT_BYTES};

/// A body that has not as many octets in the buffer takes no memory of the store yet: a peer that sends a header and
/// stalls costs nothing.
const BEGIN_BYTES: usize = 8 << 10;
/// Values up to this are copied into the text of the reply: cheaper than a slice and a pin of their own.
const COPIED_BYTES_MAX: u64 = 4 << 10;
/// All input buffers together may grow by this much for long lines.
pub const LONG_LINE_BYTES_MAX: u64 = 64 << 20;

/// The machine of one connection.
pub struct Session {
    exchange: Exchange,
    conversation: Conversation,
    input: Vec<u8>,
    start: usize,
    end: usize,
    output: Output,
    ending: Option<End>,
    eof: bool,
    /// What was offered to the peer was taken back before it took it.
    held_back: bool,
}

impl Session {
    /// `revoker` is called when a claim is taken back; [`StreamSession::handle_revoked`] must follow.
    pub fn new(context: Context, revoker: Revoker) -> Self {
        let conversation = Conversation::new(context.line_bytes_max);
        Self {
            exchange: Exchange::new(context, revoker),
            conversation,
            input: Vec::new(),
            start: 0,
            end: 0,
            output: Output::default(),
            ending: None,
            eof: false,
            held_back: false,
        }
    }

    fn release_input(&mut self) {
        let long = self.input.len().saturating_sub(INPUT_BYTES) as u64;
        self.exchange.context().metrics.connections.long_line_bytes.sub(long);
        self.input = Vec::new();
        (self.start, self.end) = (0, 0);
    }

    fn can_grow(&self) -> bool {
        // One octet more than the longest line, so that the parser can tell one that is too long; see Conversation::new.
        self.input.len() < self.exchange.context().line_bytes_max + 2
            && self.exchange.context().metrics.connections.long_line_bytes.get() < LONG_LINE_BYTES_MAX
    }

    fn is_full(&self) -> bool {
        self.output.is_full(self.exchange.context().pins_max)
    }

    fn process_input(&mut self, input: &[u8]) {
        while !self.exchange.is_waiting() && self.ending.is_none() && !self.is_full() {
            if self.exchange.resume(&mut self.output) {
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
                Step::Command(command) => {
                    if self.exchange.execute(command, &mut self.output, &mut self.conversation) {
                        self.ending = Some(End::Quit);
                    }
                }
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
                Step::BodyEnd { intact } => self.exchange.handle_body_end(intact, &mut self.output),
                Step::Close(reason) => {
                    self.ending = Some(if reason == CloseReason::Quit { End::Quit } else { End::Protocol });
                }
            }
        }
    }

    /// Takes octets of the body from the buffer. False if no more can be done now.
    fn take_body(&mut self, remaining: u64, available: &[u8]) -> bool {
        let whole = available.len() as u64 == remaining;
        if self.exchange.draft().is_none() && !whole && available.len() < BEGIN_BYTES {
            return false;
        }
        let Some(draft) = self.exchange.poll_draft(whole) else { return false };
        let taken = draft.put(available);
        self.exchange.context().metrics.copied.input_to_arena.add(taken as u64);
        self.start += taken;
        self.conversation.body_taken(taken as u64);
        taken > 0
    }

    fn check_reads(&mut self) {
        while let Some(failure) = self.output.poll_failure() {
            match failure {
                Failure::Missed(object) => self.exchange.context().store.drop_lost(&object),
                Failure::Broken(object) => {
                    self.exchange.context().store.drop_lost(&object);
                    return self.ending = Some(End::FailedRead);
                }
            }
        }
    }
}

impl StreamSession for Session {
    fn wants_input(&self) -> bool {
        !self.eof
            && self.ending.is_none()
            && !self.exchange.is_waiting()
            && !self.exchange.is_retrieving()
            && !self.is_full()
            && (self.end < self.input.len() || self.start > 0 || self.input.len() < INPUT_BYTES || self.can_grow())
    }

    fn targets(&mut self) -> (&mut [u8], &mut [u8]) {
        if self.input.is_empty() {
            self.input = vec![0; INPUT_BYTES];
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.input.len() && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        } else if self.end == self.input.len() && self.can_grow() {
            let more = self.input.len().min(self.exchange.context().line_bytes_max + 2 - self.input.len());
            self.exchange.context().metrics.connections.long_line_bytes.add(more as u64);
            self.input.resize(self.input.len() + more, 0);
        }
        let buffered = self.start < self.end;
        let direct = if buffered { None } else { self.exchange.draft_mut() };
        let remaining = self.conversation.body_remaining();
        let spare = direct.map_or(&mut [][..], Draft::spare);
        // Until the last segment, the buffer would only take octets that must be copied out of it again.
        let buffer = if spare.is_empty() || spare.len() as u64 == remaining { self.end } else { self.input.len() };
        (spare, &mut self.input[buffer..])
    }

    fn handle_input(&mut self, count: usize) {
        self.exchange.handle_moved();
        self.exchange.context().metrics.connections.bytes_read.add(count as u64);
        let mut count = count;
        if self.start == self.end
            && let Some(draft) = self.exchange.draft_mut()
        {
            let direct = count.min(draft.spare().len());
            if direct > 0 {
                draft.advance(direct);
                self.conversation.body_taken(direct as u64);
                self.exchange.touch_claim();
                count -= direct;
            }
        }
        self.end += count;
    }

    fn handle_eof(&mut self) {
        self.eof = true;
    }

    fn process(&mut self) {
        let input = std::mem::take(&mut self.input);
        self.process_input(&input);
        self.input = input;
        self.check_reads();
        if self.eof && self.ending.is_none() && !self.exchange.is_waiting() && !self.exchange.is_retrieving() {
            // Whatever is left of the input can never become whole.
            if !self.is_full() {
                self.ending = Some(End::ByPeer);
                self.exchange.forget();
            }
        }
    }

    fn set_tail_reads(&mut self, count: usize) {
        self.output.set_tail_reads(count);
    }

    fn has_tail_reads(&self) -> bool {
        self.output.has_tail_reads()
    }

    fn poll_action(&mut self) -> Option<Action> {
        self.exchange.poll_ask().map(Action::Ask).or_else(|| self.output.poll_read().map(Action::Read))
    }

    fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        self.output.gather(slices)
    }

    fn handle_sent(&mut self, count: usize) {
        self.exchange.handle_moved();
        let metrics = &self.exchange.context().metrics;
        metrics.connections.bytes_written.add(count as u64);
        metrics.copied.arena_to_reply.add(std::mem::take(&mut self.output.copied_bytes));
        self.held_back = false;
        self.output.handle_sent(count);
    }

    fn handle_claim(&mut self, claim: Option<Claim>) {
        self.exchange.handle_claim(claim, &mut self.output, &mut self.conversation);
    }

    fn handle_segment(&mut self, filling: Option<Filling>) {
        self.exchange.handle_segment(filling, &mut self.output, &mut self.conversation);
    }

    fn handle_retry(&mut self) {
        self.exchange.handle_retry(&mut self.output, &mut self.conversation);
    }

    fn handle_revoked(&mut self) {
        self.exchange.handle_revoked(&mut self.output, &mut self.conversation);
    }

    fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) {
        if buf.is_none() {
            self.exchange.context().metrics.failed_reads.add(1);
        }
        if let (Some(buf), Some(segment)) = (&buf, self.output.target(ticket)) {
            self.exchange.context().store.warm(segment, &buf.as_slice()[..segment.len() as usize]);
        }
        self.output.handle_read(ticket, buf);
    }

    fn handle_read_back(&mut self, ticket: u64) {
        self.output.read_back(ticket);
    }

    fn give_back(&mut self) -> usize {
        self.held_back |= self.output.gather(&mut Vec::new()) > 0;
        let count = self.output.give_back();
        self.exchange.context().metrics.reads_repeated.add(count as u64);
        count
    }

    fn give_back_memory(&mut self) {
        self.held_back |= self.output.gather(&mut Vec::new()) > 0;
        self.output.give_back_memory();
        self.exchange.context().store.wake().signal();
    }

    fn ended(&self) -> Option<End> {
        self.ending.filter(|end| *end == End::FailedRead || self.output.is_empty())
    }

    fn is_idle(&self) -> bool {
        self.output.is_empty()
            && self.start == self.end
            && !self.exchange.is_storing()
            && !self.exchange.is_retrieving()
    }

    fn is_stalled(&self, since_ms: u64) -> bool {
        if self.exchange.moved_ms() >= since_ms {
            return false;
        }
        let half_a_request = self.exchange.is_receiving()
            || self.conversation.is_swallowing()
            || self.end - self.start > LINE_BYTES_MAX && !self.exchange.is_retrieving();
        self.held_back
            || self.output.gather(&mut Vec::new()) > 0
            || half_a_request && !self.exchange.is_waiting() && self.output.is_empty()
    }

    fn moved_ms(&self) -> u64 {
        self.exchange.moved_ms()
    }

    fn is_busy(&self) -> bool {
        !self.output.is_empty() || self.exchange.is_storing() || self.exchange.is_retrieving()
    }

    fn rest(&mut self) {
        if self.is_idle() {
            self.release_input();
            self.output.rest();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.release_input();
    }
}

impl Replies for Output {
    fn text(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        Self::text(self, write);
    }

    fn value(&mut self, key: &[u8], pinned: Pinned, cas: Option<u64>) {
        let (flags, len) = (pinned.flags(), pinned.len());
        let line = |out: &mut Vec<u8>| reply::value_line(out, key, flags, len, cas);
        if len > COPIED_BYTES_MAX {
            return Self::value(self, pinned, line);
        }
        let mut blocks = Vec::with_capacity(pinned.pieces().len());
        for piece in pinned.pieces() {
            match piece.segment.content() {
                Content::Ram(ram) => blocks.push((piece, ram)),
                _ => return Self::value(self, pinned, line),
            }
        }
        Self::text(self, |out| {
            line(out);
            for (piece, ram) in &blocks {
                out.extend_from_slice(piece.octets(ram));
            }
            out.extend_from_slice(reply::CRLF);
        });
        self.copied_bytes += len;
    }

    fn is_full(&self, pins_max: usize) -> bool {
        self.is_long() || self.value_count() >= pins_max
    }
}

impl Bodies for Conversation {
    fn accept_body(&mut self, len: u64) {
        Self::accept_body(self, len);
    }

    fn swallow_body(&mut self, len: u64) {
        Self::swallow_body(self, len);
    }

    fn abandon_body(&mut self) {
        Self::abandon_body(self);
    }
}
