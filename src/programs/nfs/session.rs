//! NFS and MOUNT for one peer on a byte stream, without its socket: records in, replies out.
//!
//! ```text
//!                    +--------------------- process ----------------------+
//!  socket -> input   | Head ──no WRITE──▶ Whole ──▶ execute ──▶ reply      | -> output -> socket
//!                    |   └─▶ First ─▶ Data ──▶ write … ──▶ end_write ──▶ reply |    ^
//!                    |   └─refused, or no call of ours─▶ Drained ──▶ reply   |      | disk
//!                    +----------------------------------------------------+
//!                        │ ▲
//!                        ▼ │ waits for space, or for the same call on another connection
//! ```
//! A message is gathered until it tells whether it is a WRITE. The data of one goes from the input buffer into the draft of
//! its file as it comes, and is never held but for its first octets, by which the call is known when it comes again. Any
//! other message is gathered to its end. A call is answered when its record has come to its end, not before: clients do not
//! expect replies to what they have not said. What cannot go on, holds back the stream, and so the peer.
//!
//! **Order.** Calls begin in the order in which they came, and are done at once but for the data of READs and WRITEs. Of a
//! READ the octets are decided then, whatever is written later. What leaves when is decided in `output`.
//!
//! **Ends.** Nothing tells where the next record begins behind one that is too long or has too many fragments, and whoever
//! sends what is no call is no client: the connection ends. Calls that are not understood are answered as RFC 5531 says.

mod answer;
mod arriving;
mod output;
#[cfg(test)]
mod tests;

pub use output::MESSAGE_BYTES_MAX;

use super::export::{Client, Export};
use super::{Bulk, CALL_BYTES_MAX, FILE_HANDLE_BYTES_MAX, Stable, TRANSFER_BYTES_MAX};
use crate::fabric::staging::StagingBuf;
use crate::metrics::Metrics;
use crate::programs::rpc::{Arguments, Reduced};
use crate::programs::service::Shared;
use crate::programs::stream::{Action, Ask, End, StreamSession};
use crate::store::claims::Claim;
use crate::store::segment::Filling;
use crate::wire::codec::roundup_bytes;
use crate::wire::onc_rpc::Xid;
use crate::wire::onc_rpc::auth::AUTH_BODY_BYTES_MAX;
use crate::wire::onc_rpc::record::{Piece, RecordDecoder, RecordLimits};
use crate::wire::rpcrdma::duplicate::first_bytes;
use answer::{Answer, message_of};
use arriving::Arriving;
use output::{Lost, Output};
use std::io::IoSlice;
use std::mem;
use std::sync::Arc;

/// Input buffer of a connection that is not idle: so much of a WRITE is copied at a time.
pub const INPUT_BYTES: usize = 128 << 10;
/// A record is a WRITE at most. A client sends one fragment for each, or one for each of its buffers.
const RECORD_LIMITS: RecordLimits =
    RecordLimits { bytes_max: CALL_BYTES_MAX as u32 + TRANSFER_BYTES_MAX, fragments_max: 1024 };
/// Octets after which a message has told whether it is a WRITE: header with credential and verifier, handle, five words.
const HEAD_BYTES_MAX: usize = 24 + 2 * (8 + AUTH_BODY_BYTES_MAX) + 4 + FILE_HANDLE_BYTES_MAX + 24;

/// Milliseconds after which no further call is begun before replies have left: a rename of a directory takes tens of them, and
/// hundreds of such calls fit into the input buffer.
const TURN_MS: u64 = 5;

/// What a session is made of.
#[derive(Clone)]
pub struct Context {
    pub export: Arc<Export>,
    pub client: Client,
    /// Calls that all connections remember together.
    pub shared: Arc<Shared>,
    pub metrics: Arc<Metrics>,
    /// Calls that are not answered, beyond which no further is read.
    pub calls_max: usize,
    /// How long a WRITE waits for space, in milliseconds.
    pub reserve_wait_ms: u64,
}

/// What becomes of the record under way.
#[derive(Debug)]
enum Record {
    /// Not enough of it is there to tell.
    Head,
    /// It is gathered.
    Whole,
    /// It is complete, and waits: the same call runs on another connection, or readers pin as much as they may.
    Held,
    /// The head of a WRITE is there, up to `position`, and the first octets of its data are gathered behind it.
    First { position: usize, len: u32 },
    /// Those are there too, and the same call runs on another connection.
    TwinOfWrite { position: usize, len: u32 },
    /// A WRITE whose data is arriving.
    Data(Box<Arriving>),
    /// The rest is of no use; at its end it is answered with this.
    Drained(Vec<u8>),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Waiting {
    Nothing,
    /// For space, for octets of a WRITE.
    Space,
    /// For what a whole call needs to be executed.
    Call,
}

/// The machine of one connection.
pub struct Session {
    context: Context,
    decoder: RecordDecoder,
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// Octets at `start` that are of the record, and were not taken.
    piece_left: usize,
    /// What is gathered of the record.
    message: Vec<u8>,
    record: Record,
    waiting: Waiting,
    /// When a READ began to wait for pins.
    busy_since_ms: Option<u64>,
    asked: Option<Ask>,
    output: Output,
    ending: Option<End>,
    eof: bool,
    /// There may be whole calls in the input, which others of the lane go before.
    is_turn_over: bool,
    /// What was offered to the peer was taken back before it took it.
    held_back: bool,
    /// Millisecond of the store's clock at which the peer last moved an octet, or its turn began.
    moved_ms: u64,
}

impl Session {
    pub fn new(context: Context) -> Self {
        let moved_ms = context.export.files().store().clock().now_ms();
        Self {
            context,
            decoder: RecordDecoder::new(RECORD_LIMITS),
            input: Vec::new(),
            start: 0,
            end: 0,
            piece_left: 0,
            message: Vec::new(),
            record: Record::Head,
            waiting: Waiting::Nothing,
            busy_since_ms: None,
            asked: None,
            output: Output::default(),
            ending: None,
            eof: false,
            is_turn_over: false,
            held_back: false,
            moved_ms,
        }
    }

    fn now_ms(&self) -> u64 {
        self.context.export.files().store().clock().now_ms()
    }

    fn is_full(&self) -> bool {
        self.output.is_full(self.context.calls_max)
    }

    /// A part of a record is here, and the rest is not.
    fn is_inside_record(&self) -> bool {
        self.piece_left > 0 || !self.decoder.is_between_records()
    }

    fn process_input(&mut self, input: &[u8]) {
        let turn_ends_ms = self.now_ms() + TURN_MS;
        self.is_turn_over = false;
        while self.waiting == Waiting::Nothing && self.ending.is_none() && !self.is_full() && !self.is_turn_over {
            match mem::replace(&mut self.record, Record::Head) {
                Record::Held => {
                    self.execute();
                    continue;
                }
                Record::TwinOfWrite { position, len } => {
                    self.begin_write(position, len);
                    continue;
                }
                Record::Data(arriving) if arriving.has_first() => {
                    self.write_first(arriving);
                    continue;
                }
                record => self.record = record,
            }
            if self.piece_left == 0 {
                let mut rest = &input[self.start..self.end];
                let next = self.decoder.next(&mut rest, usize::MAX);
                let behind = self.end - rest.len();
                match next {
                    Ok(None) => {
                        self.start = behind;
                        return;
                    }
                    Ok(Some(Piece::Octets(octets))) => {
                        self.start = behind - octets.len();
                        self.piece_left = octets.len();
                    }
                    Ok(Some(Piece::End)) => {
                        self.start = behind;
                        self.handle_record_end();
                        // Each call that ended has a reply: when that leaves, the turn comes back.
                        self.is_turn_over = self.now_ms() >= turn_ends_ms;
                        continue;
                    }
                    Err(fault) => {
                        tracing::debug!(%fault, "a stream cannot be read on");
                        self.ending = Some(End::Protocol);
                        return;
                    }
                }
            }
            let taken = self.take(&input[self.start..self.start + self.piece_left]);
            self.start += taken;
            self.piece_left -= taken;
        }
    }

    /// Takes octets of the record off the front of `octets`, and says how many. None if it waits from now on, or if others are
    /// to be taken otherwise.
    fn take(&mut self, octets: &[u8]) -> usize {
        match &mut self.record {
            Record::Head => self.take_head(octets),
            Record::Whole => {
                let taken = octets.len().min(CALL_BYTES_MAX - self.message.len());
                self.message.extend_from_slice(&octets[..taken]);
                if taken == 0 {
                    // Its header is well, so it is a call with more arguments than there are.
                    self.refuse_message();
                }
                taken
            }
            Record::Data(arriving) => {
                let count = arriving.take(&self.context, octets);
                if arriving.is_waiting() {
                    self.wait(Waiting::Space);
                }
                count
            }
            Record::First { position, len } => {
                let (position, len) = (*position, *len);
                let taken = octets.len().min(position + first_bytes(len) - self.message.len());
                self.message.extend_from_slice(&octets[..taken]);
                if self.message.len() == position + first_bytes(len) {
                    self.begin_write(position, len);
                }
                taken
            }
            Record::Drained(_) => octets.len(),
            Record::Held | Record::TwinOfWrite { .. } => unreachable!("nothing is taken while a call waits"),
        }
    }

    fn take_head(&mut self, octets: &[u8]) -> usize {
        let before = self.message.len();
        let taken = octets.len().min(HEAD_BYTES_MAX - before);
        self.message.extend_from_slice(&octets[..taken]);
        match Bulk::find(&self.message) {
            Bulk::NeedMore if self.message.len() < HEAD_BYTES_MAX => taken,
            Bulk::NeedMore | Bulk::None => {
                self.record = Record::Whole;
                taken
            }
            Bulk::Data { position, len } => {
                // Its last word has come just now, or it would have been found before.
                self.message.truncate(position);
                let taken = position - before;
                let here = octets.len() - taken;
                match self.decoder.left_of_record() {
                    // Known to be of another length, it is refused before anything of it is written.
                    Some(left) if u64::from(left) + here as u64 != u64::from(len) + roundup_bytes(len.into()) => {
                        self.refuse_message();
                    }
                    _ if len > 0 => self.record = Record::First { position, len },
                    _ => self.begin_write(position, len),
                }
                taken
            }
        }
    }

    /// The gathered message is a call whose arguments are not understood.
    fn refuse_message(&mut self) {
        let xid = Xid(self.message.first_chunk().map_or(0, |octets| u32::from_be_bytes(*octets)));
        let answer = self.garbage(xid);
        self.message.clear();
        self.record = match answer {
            Answer::Message(octets) => Record::Drained(octets),
            _ => unreachable!("it is answered at once"),
        };
    }

    /// The head of a WRITE is gathered, up to `position`, with the first of its `len` octets.
    fn begin_write(&mut self, position: usize, len: u32) {
        let message = mem::take(&mut self.message);
        let (head, first) = message.split_at(position);
        let chunk = Reduced { position: position as u64, len: len.into() };
        match self.answer(Arguments { stream: head, chunks: &[chunk] }, first) {
            Answer::Message(octets) => self.record = Record::Drained(octets),
            Answer::Write(arriving) => self.record = Record::Data(arriving),
            Answer::Later => {
                self.record = Record::TwinOfWrite { position, len };
                self.message = message;
                self.wait(Waiting::Call);
            }
            Answer::NoCall | Answer::Read(..) => unreachable!("it was found to be a WRITE"),
        }
    }

    /// The first octets of a WRITE go before all others.
    fn write_first(&mut self, mut arriving: Box<Arriving>) {
        arriving.write_first(&self.context);
        if arriving.is_waiting() {
            self.wait(Waiting::Space);
        }
        self.record = Record::Data(arriving);
    }

    fn handle_record_end(&mut self) {
        if matches!(self.record, Record::First { .. }) {
            // It is shorter than it says.
            self.refuse_message();
        }
        match mem::replace(&mut self.record, Record::Head) {
            Record::Head | Record::Whole => self.execute(),
            Record::Drained(octets) => self.output.message(&octets),
            Record::Data(arriving) => self.end_write(*arriving),
            Record::First { .. } => unreachable!("it was refused"),
            Record::Held | Record::TwinOfWrite { .. } => unreachable!("nothing is read while a call waits"),
        }
    }

    /// The gathered message is a call.
    fn execute(&mut self) {
        let message = mem::take(&mut self.message);
        match self.answer(Arguments { stream: &message, chunks: &[] }, &[]) {
            Answer::Message(octets) => self.output.message(&octets),
            Answer::Read(xid, reading) => self.output.read(xid, reading),
            Answer::Later => {
                self.record = Record::Held;
                self.message = message;
                return self.wait(Waiting::Call);
            }
            Answer::NoCall => self.ending = Some(End::Protocol),
            Answer::Write(_) => unreachable!("the data of a WRITE is found before its record ends"),
        }
        // Its memory serves the next.
        self.message = message;
        self.message.clear();
    }

    /// The record of a WRITE has come to its end.
    fn end_write(&mut self, arriving: Arriving) {
        let is_whole = arriving.is_whole();
        let Arriving { xid, key, writing, stable, len, .. } = arriving;
        let files = self.context.export.files();
        if !is_whole {
            // What came of it is written: its sender could have written that much by itself.
            let _ = files.end_write(writing, len, Stable::Unstable);
            self.context.shared.forget(&key);
            if let Answer::Message(octets) = self.garbage(xid) {
                self.output.message(&octets);
            }
            return;
        }
        let reply = super::Reply::Write(files.end_write(writing, len, stable)).encode(xid);
        self.complete(Some(&key), &reply);
        if let Answer::Message(octets) = message_of(&reply) {
            self.output.message(&octets);
        }
    }

    fn wait(&mut self, what: Waiting) {
        self.waiting = what;
        self.asked = Some(Ask::Retry);
    }

    fn check_reads(&mut self) {
        let store = self.context.export.files().store();
        while let Some(lost) = self.output.poll_lost() {
            let (Lost::Refused(object) | Lost::Broken(object)) = &lost;
            if let Some(object) = object {
                store.drop_lost(object);
            }
            if matches!(lost, Lost::Broken(_)) {
                return self.ending = Some(End::FailedRead);
            }
        }
    }
}

impl StreamSession for Session {
    fn wants_input(&self) -> bool {
        !self.eof
            && self.ending.is_none()
            && self.waiting == Waiting::Nothing
            && !self.is_full()
            && (self.start > 0 || self.end < self.input.len() || self.input.is_empty())
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
        }
        (&mut [], &mut self.input[self.end..])
    }

    fn handle_input(&mut self, count: usize) {
        self.moved_ms = self.now_ms();
        self.context.metrics.connections.bytes_read.add(count as u64);
        self.end += count;
    }

    fn handle_eof(&mut self) {
        self.eof = true;
    }

    fn process(&mut self) {
        let input = mem::take(&mut self.input);
        self.process_input(&input);
        self.input = input;
        self.check_reads();
        if self.eof
            && self.ending.is_none()
            && self.waiting == Waiting::Nothing
            && !self.is_full()
            && !self.is_turn_over
        {
            // Whatever is left of the input can never become whole.
            self.ending = Some(End::ByPeer);
        }
    }

    fn set_tail_reads(&mut self, count: usize) {
        self.output.set_tail_reads(count);
    }

    fn has_tail_reads(&self) -> bool {
        self.output.has_tail_reads()
    }

    fn poll_action(&mut self) -> Option<Action> {
        self.asked.take().map(Action::Ask).or_else(|| self.output.poll_read().map(Action::Read))
    }

    fn gather<'a>(&'a self, slices: &mut Vec<IoSlice<'a>>) -> usize {
        self.output.gather(slices)
    }

    fn handle_sent(&mut self, count: usize) {
        self.moved_ms = self.now_ms();
        self.context.metrics.connections.bytes_written.add(count as u64);
        self.held_back = false;
        self.output.handle_sent(count);
    }

    /// None is asked for: a draft claims by itself what it needs.
    fn handle_claim(&mut self, _: Option<Claim>) {}

    /// None is asked for.
    fn handle_segment(&mut self, _: Option<Filling>) {}

    fn handle_retry(&mut self) {
        if self.waiting != Waiting::Nothing {
            self.waiting = Waiting::Nothing;
            // It is the peer's turn from now on: the wait was ours.
            self.moved_ms = self.now_ms();
        }
    }

    /// No claim is this session's.
    fn handle_revoked(&mut self) {}

    fn handle_read(&mut self, ticket: u64, buf: Option<StagingBuf>) {
        match (&buf, self.output.target(ticket)) {
            (None, _) => self.context.metrics.failed_reads.add(1),
            (Some(buf), Some(segment)) => {
                let store = self.context.export.files().store();
                store.warm(&segment, &buf.as_slice()[..segment.len() as usize]);
            }
            (Some(_), None) => {}
        }
        self.output.handle_read(ticket, buf);
    }

    fn handle_read_back(&mut self, ticket: u64) {
        self.output.read_back(ticket);
    }

    fn give_back(&mut self) -> usize {
        self.held_back |= self.output.gather(&mut Vec::new()) > 0;
        let count = self.output.give_back();
        self.context.metrics.reads_repeated.add(count as u64);
        count
    }

    fn give_back_memory(&mut self) {
        self.held_back |= self.output.gather(&mut Vec::new()) > 0;
        self.output.give_back_memory();
        self.context.export.files().store().wake().signal();
    }

    fn ended(&self) -> Option<End> {
        self.ending.filter(|end| *end == End::FailedRead || self.output.is_empty())
    }

    fn is_idle(&self) -> bool {
        self.output.is_empty() && self.start == self.end && !self.is_inside_record()
    }

    fn is_stalled(&self, since_ms: u64) -> bool {
        if self.moved_ms >= since_ms {
            return false;
        }
        self.held_back
            || self.output.gather(&mut Vec::new()) > 0
            || self.is_inside_record() && self.waiting == Waiting::Nothing && self.output.is_empty()
    }

    fn moved_ms(&self) -> u64 {
        self.moved_ms
    }

    fn is_busy(&self) -> bool {
        // A call that has not begun, because it is not all here, can as well be sent to whoever comes next. A WRITE begins
        // before all of its data is here.
        !self.output.is_empty()
            || matches!(self.record, Record::Data(_))
            || self.waiting != Waiting::Nothing
            || self.is_turn_over
    }

    fn rest(&mut self) {
        if self.is_idle() {
            (self.input, self.start, self.end) = (Vec::new(), 0, 0);
            self.message = Vec::new();
            self.output.rest();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Record::Data(arriving) = mem::replace(&mut self.record, Record::Head) {
            let Arriving { key, writing, len, .. } = *arriving;
            // What came of it is in the file, and its times say so. The call may come again, on the next connection.
            let _ = self.context.export.files().end_write(writing, len, Stable::Unstable);
            self.context.shared.forget(&key);
        }
    }
}
