//! One connection's share of a run: a pipeline of requests as a machine, which a blocking socket or a poll loop drives.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use clap::ValueEnum;

use super::histogram::Histogram;
use super::values::{self, Item};

/// Input and generated output pass through buffers of this size: large enough that system calls are few, small enough
/// to stay in the processor's cache.
pub const BUFFER_BYTES: usize = 256 << 10;
/// Values up to this length are copied behind their header, so that one system call sends several of them.
const COPIED_BYTES_MAX: u64 = 16 << 10;
const LINE_BYTES_MAX: usize = 2048;
const TRAILER: &[u8] = b"\r\nEND\r\n";

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Op {
    Get,
    Set,
}

/// Which key comes next.
#[derive(Clone, Debug)]
pub enum Pick {
    /// Every `step`th item from `next` on, once.
    Each { next: usize, step: usize },
    /// Any, without end.
    Random { state: u64 },
}

/// What a driver is to do.
#[derive(Clone, Debug)]
pub struct Plan {
    pub op: Op,
    /// Requests in flight, at least 1.
    pub depth: usize,
    /// Values in one call, where a protocol has that, at least 1.
    pub batch: usize,
    /// Check every octet read; send octets that can be checked.
    pub is_checked: bool,
    /// Ask only for keys stored in this run.
    pub only_stored: bool,
    /// Nothing is asked, and nothing counted, after this.
    pub deadline: Option<Instant>,
    /// Most requests.
    pub count_max: u64,
}

/// What came of it. Only what was complete by the deadline is counted, but for errors.
#[derive(Clone, Debug)]
pub struct Tally {
    pub operations: u64,
    pub bytes: u64,
    pub misses: u64,
    pub errors: u64,
    /// Values with a wrong length or a wrong octet.
    pub corrupt: u64,
    /// From a request's first octet written to its reply's last octet read.
    pub latency: Histogram,
    /// From a request's first octet written to the first octet of its value (set: of its reply).
    pub first_octet: Histogram,
    pub first_error: Option<String>,
}

impl Tally {
    pub fn new() -> Self {
        let (latency, first_octet) = (Histogram::new(), Histogram::new());
        Self { operations: 0, bytes: 0, misses: 0, errors: 0, corrupt: 0, latency, first_octet, first_error: None }
    }

    pub fn merge(&mut self, other: Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.misses += other.misses;
        self.errors += other.errors;
        self.corrupt += other.corrupt;
        self.latency.merge(&other.latency);
        self.first_octet.merge(&other.first_octet);
        self.first_error = self.first_error.take().or(other.first_error);
    }
}

struct Flight {
    item: usize,
    sent_at: Instant,
}

/// The part of a large value that is still to be sent.
struct Body {
    seed: u64,
    offset: u64,
    len: u64,
}

enum Expect {
    Line,
    Value { offset: u64, len: u64, is_right: bool, seen_first: bool },
    Trailer { len: u64, is_right: bool },
}

pub struct Driver {
    plan: Plan,
    items: Arc<Vec<Item>>,
    pick: Pick,
    tally: Tally,
    asked: u64,
    /// No more requests: the keys, the count or the time have run out.
    is_dry: bool,
    in_flight: VecDeque<Flight>,
    outbox: Vec<u8>,
    outbox_sent: usize,
    body: Option<Body>,
    /// A piece of `body`: from `chunk_start` on still to be sent. For unchecked values it is filled once and sent again
    /// and again, so that the client's own work is a copy into the socket and no more.
    chunk: Box<[u8]>,
    chunk_start: usize,
    chunk_end: usize,
    inbox: Box<[u8]>,
    start: usize,
    end: usize,
    expect: Expect,
}

impl Driver {
    pub fn new(plan: Plan, items: Arc<Vec<Item>>, pick: Pick) -> Self {
        let mut chunk = vec![0; if plan.op == Op::Set { BUFFER_BYTES } else { 0 }].into_boxed_slice();
        values::fill(0, 0, &mut chunk);
        Self {
            in_flight: VecDeque::with_capacity(plan.depth),
            plan,
            items,
            pick,
            tally: Tally::new(),
            asked: 0,
            is_dry: false,
            outbox: Vec::with_capacity(BUFFER_BYTES),
            outbox_sent: 0,
            body: None,
            chunk,
            chunk_start: 0,
            chunk_end: 0,
            inbox: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            expect: Expect::Line,
        }
    }

    pub fn into_tally(self) -> Tally {
        self.tally
    }

    /// Everything in flight is lost with its connection.
    pub fn handle_failure(&mut self, err: &io::Error) {
        self.tally.errors += self.in_flight.len().max(1) as u64;
        self.tally.first_error.get_or_insert_with(|| err.to_string());
    }

    /// Whether there is something to write now; asks for as much as the depth allows.
    pub fn wants_write(&mut self) -> bool {
        if self.outbox_sent == self.outbox.len() && self.body.is_none() {
            self.outbox.clear();
            self.outbox_sent = 0;
            self.ask();
        }
        self.outbox_sent < self.outbox.len() || self.body.is_some()
    }

    /// All that was asked for is answered, and there is nothing more to ask. True only after `wants_write` was false.
    pub fn is_finished(&self) -> bool {
        self.is_dry && self.in_flight.is_empty()
    }

    fn ask(&mut self) {
        while self.in_flight.len() < self.plan.depth && self.body.is_none() && self.outbox.len() < BUFFER_BYTES / 2 {
            let now = Instant::now();
            self.is_dry |= self.asked >= self.plan.count_max || self.plan.deadline.is_some_and(|at| now >= at);
            let Some(index) = self.next_item() else { return };
            self.asked += 1;
            self.in_flight.push_back(Flight { item: index, sent_at: now });
            let item = &self.items[index];
            match self.plan.op {
                Op::Get => {
                    self.outbox.extend_from_slice(b"get ");
                    self.outbox.extend_from_slice(&item.key);
                    self.outbox.extend_from_slice(b"\r\n");
                }
                Op::Set => {
                    self.outbox.extend_from_slice(b"set ");
                    self.outbox.extend_from_slice(&item.key);
                    // Writing to a vector cannot fail.
                    let _ = write!(self.outbox, " 0 0 {}\r\n", item.len);
                    if item.len > COPIED_BYTES_MAX {
                        self.body = Some(Body { seed: item.seed, offset: 0, len: item.len });
                        continue;
                    }
                    let len = item.len as usize;
                    let at = self.outbox.len();
                    self.outbox.extend_from_slice(&self.chunk[..len]);
                    if self.plan.is_checked {
                        values::fill(item.seed, 0, &mut self.outbox[at..]);
                    }
                    self.outbox.extend_from_slice(b"\r\n");
                }
            }
        }
    }

    fn next_item(&mut self) -> Option<usize> {
        while !self.is_dry {
            let index = match &mut self.pick {
                Pick::Each { next, step } => {
                    let index = *next;
                    *next += *step;
                    index
                }
                Pick::Random { state } => {
                    // xorshift: any order that does not follow the server's own will do.
                    *state ^= *state << 13;
                    *state ^= *state >> 7;
                    *state ^= *state << 17;
                    (*state % self.items.len() as u64) as usize
                }
            };
            match self.items.get(index) {
                None => self.is_dry = true,
                Some(item) if self.plan.only_stored && !item.is_stored() => {}
                Some(_) => return Some(index),
            }
        }
        None
    }

    /// What this driver is to do.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The items it takes its requests from.
    pub fn items(&self) -> Arc<Vec<Item>> {
        Arc::clone(&self.items)
    }

    /// The next request for a client that pipelines by itself, as the index of its item; `None` while the depth allows no
    /// more, and once there is nothing more to ask.
    pub fn next_request(&mut self) -> Option<usize> {
        if self.in_flight.len() >= self.plan.depth {
            return None;
        }
        let now = Instant::now();
        self.is_dry |= self.asked >= self.plan.count_max || self.plan.deadline.is_some_and(|at| now >= at);
        let index = self.next_item()?;
        self.asked += 1;
        self.in_flight.push_back(Flight { item: index, sent_at: now });
        Some(index)
    }

    /// The item of the oldest request in flight.
    pub fn oldest(&self) -> Option<usize> {
        self.in_flight.front().map(|flight| flight.item)
    }

    /// The oldest request was done; `first_at` is when the first octet of its value was seen.
    pub fn handle_value(&mut self, len: u64, first_at: Option<Instant>, is_right: bool) {
        let now = Instant::now();
        self.count_first_octet(first_at.unwrap_or(now));
        self.tally.corrupt += u64::from(!is_right);
        self.finish(now, |tally| tally.bytes += len);
    }

    /// The oldest request found nothing.
    pub fn handle_miss(&mut self) {
        self.finish(Instant::now(), |tally| tally.misses += 1);
    }

    /// The oldest request was refused.
    pub fn handle_refusal(&mut self, reply: String) {
        self.in_flight.pop_front();
        self.tally.errors += 1;
        self.tally.first_error.get_or_insert(reply);
    }

    /// Writes once.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn write_some(&mut self, socket: &mut impl Write) -> io::Result<()> {
        let mut is_last = false;
        if let Some(body) = &self.body {
            let remaining = body.len - body.offset;
            if self.chunk_start == self.chunk_end {
                self.chunk_start = 0;
                self.chunk_end = remaining.min(BUFFER_BYTES as u64) as usize;
                if self.plan.is_checked {
                    values::fill(body.seed, body.offset, &mut self.chunk[..self.chunk_end]);
                }
            }
            is_last = remaining == (self.chunk_end - self.chunk_start) as u64;
        }
        let front = &self.outbox[self.outbox_sent..];
        let piece = &self.chunk[self.chunk_start..self.chunk_end];
        let end: &[u8] = if is_last { b"\r\n" } else { b"" };
        let mut count = match socket.write_vectored(&[IoSlice::new(front), IoSlice::new(piece), IoSlice::new(end)]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => count,
            Err(err) if err.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(err) => return Err(err),
        };
        let of_front = count.min(front.len());
        let of_piece = (count - of_front).min(piece.len());
        count -= of_front + of_piece;
        self.outbox_sent += of_front;
        self.chunk_start += of_piece;
        if let Some(body) = &mut self.body {
            body.offset += of_piece as u64;
            if body.offset == body.len {
                self.body = None;
                self.outbox.clear();
                self.outbox_sent = 0;
                self.outbox.extend_from_slice(&end[count..]);
            }
        }
        Ok(())
    }

    /// Reads once and takes in what has come.
    ///
    /// # Errors
    /// Those of the socket; `InvalidData` for octets that are no reply, after which the connection is of no use.
    pub fn read_some(&mut self, socket: &mut impl Read) -> io::Result<()> {
        if self.start > 0 {
            self.inbox.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        match socket.read(&mut self.inbox[self.end..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => self.end += count,
            Err(err) if err.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(err) => return Err(err),
        }
        let now = Instant::now();
        while self.take_in(now)? {}
        Ok(())
    }

    /// One step through the inbox; `false` if it needs more octets.
    fn take_in(&mut self, now: Instant) -> io::Result<bool> {
        let unread = &self.inbox[self.start..self.end];
        match &mut self.expect {
            Expect::Line => {
                let Some(at) = memchr::memchr(b'\n', unread) else {
                    if unread.len() > LINE_BYTES_MAX {
                        return Err(no_reply(unread));
                    }
                    return Ok(false);
                };
                let line = unread[..at].strip_suffix(b"\r").unwrap_or(&unread[..at]);
                let Some(flight) = self.in_flight.front() else { return Err(no_reply(line)) };
                let item = &self.items[flight.item];
                let result = match (self.plan.op, line) {
                    (Op::Set, b"STORED") => {
                        item.mark_stored();
                        Reply::Done(item.len)
                    }
                    (Op::Get, b"END") => Reply::Miss,
                    (Op::Get, line) if line.starts_with(b"VALUE ") => {
                        Reply::Value(value_len(line, &item.key).ok_or_else(|| no_reply(line))?)
                    }
                    (_, line) if line.starts_with(b"SERVER_ERROR ") || line == b"NOT_STORED" => {
                        Reply::Refused(String::from_utf8_lossy(line).into_owned())
                    }
                    _ => return Err(no_reply(line)),
                };
                self.start += at + 1;
                match result {
                    Reply::Value(len) => {
                        let is_right = !self.plan.is_checked || len == item.len;
                        self.expect = Expect::Value { offset: 0, len, is_right, seen_first: false };
                    }
                    Reply::Done(bytes) => {
                        self.count_first_octet(now);
                        self.finish(now, |tally| tally.bytes += bytes);
                    }
                    Reply::Miss => self.finish(now, |tally| tally.misses += 1),
                    Reply::Refused(reply) => self.handle_refusal(reply),
                }
                Ok(true)
            }
            Expect::Value { offset, len, is_right, seen_first } => {
                let remaining = *len - *offset;
                let count = unread.len().min(usize::try_from(remaining).unwrap_or(usize::MAX));
                if count == 0 && remaining > 0 {
                    return Ok(false);
                }
                if self.plan.is_checked && *is_right {
                    let flight = self.in_flight.front().expect("a value is read only for a request in flight");
                    *is_right = values::matches(self.items[flight.item].seed, *offset, &unread[..count]);
                }
                let is_first = !std::mem::replace(seen_first, true);
                *offset += count as u64;
                if *offset == *len {
                    self.expect = Expect::Trailer { len: *len, is_right: *is_right };
                }
                self.start += count;
                if is_first {
                    self.count_first_octet(now);
                }
                Ok(true)
            }
            Expect::Trailer { len, is_right } => {
                let (len, is_right) = (*len, *is_right);
                let Some(trailer) = unread.get(..TRAILER.len()) else { return Ok(false) };
                if trailer != TRAILER {
                    return Err(no_reply(trailer));
                }
                self.start += TRAILER.len();
                self.expect = Expect::Line;
                if !is_right {
                    // Counted whenever it comes: a wrong octet after the deadline is as wrong.
                    self.tally.corrupt += 1;
                }
                self.finish(now, |tally| tally.bytes += len);
                Ok(true)
            }
        }
    }

    fn is_in_time(&self, now: Instant) -> bool {
        self.plan.deadline.is_none_or(|deadline| now <= deadline)
    }

    fn count_first_octet(&mut self, now: Instant) {
        let flight = self.in_flight.front().expect("a reply is read only for a request in flight");
        if self.is_in_time(now) {
            self.tally.first_octet.record(now - flight.sent_at);
        }
    }

    fn finish(&mut self, now: Instant, count: impl FnOnce(&mut Tally)) {
        let flight = self.in_flight.pop_front().expect("a reply is read only for a request in flight");
        if self.is_in_time(now) {
            self.tally.operations += 1;
            self.tally.latency.record(now - flight.sent_at);
            count(&mut self.tally);
        }
    }
}

enum Reply {
    Done(u64),
    Value(u64),
    Miss,
    Refused(String),
}

fn value_len(line: &[u8], key: &[u8]) -> Option<u64> {
    let numbers = line.strip_prefix(b"VALUE ")?.strip_prefix(key)?.strip_prefix(b" ")?;
    let (_, len) = std::str::from_utf8(numbers).ok()?.split_once(' ')?;
    len.parse().ok()
}

fn no_reply(octets: &[u8]) -> io::Error {
    let front = &octets[..octets.len().min(60)];
    io::Error::new(ErrorKind::InvalidData, format!("\"{}\" is no reply", front.escape_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives its octets in pieces of one length, then nothing more for now.
    struct Cut<'a>(&'a [u8], usize);

    impl Read for Cut<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let count = self.0.len().min(self.1).min(into.len());
            if count == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            into[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }

    /// Takes at most so many octets of each write.
    struct Narrow(Vec<u8>, usize);

    impl Write for Narrow {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            let count = from.len().min(self.1);
            self.0.extend_from_slice(&from[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn driver(op: Op, sizes: &str, count: u32, depth: usize) -> Driver {
        let items = Arc::new(values::items("k", count, sizes.parse().unwrap()));
        let plan =
            Plan { op, depth, batch: 1, is_checked: true, only_stored: false, deadline: None, count_max: u64::MAX };
        Driver::new(plan, items, Pick::Each { next: 0, step: 1 })
    }

    fn write_all(driver: &mut Driver, width: usize) -> Vec<u8> {
        let mut socket = Narrow(Vec::new(), width);
        while driver.wants_write() {
            driver.write_some(&mut socket).unwrap();
        }
        socket.0
    }

    fn read_all(driver: &mut Driver, octets: &[u8], width: usize) -> io::Result<()> {
        let mut socket = Cut(octets, width);
        loop {
            match driver.read_some(&mut socket) {
                Err(err) if err.kind() == ErrorKind::WouldBlock => return Ok(()),
                result => result?,
            }
        }
    }

    fn value(item: &Item) -> Vec<u8> {
        let mut octets = vec![0; item.len as usize];
        values::fill(item.seed, 0, &mut octets);
        octets
    }

    #[test]
    fn sets_carry_header_value_and_end_however_the_socket_cuts_them() {
        for sizes in ["0", "1", "16KiB", "16385", "256KiB", "262145", "1KiB..600KiB"] {
            for width in [1_000, 7_777, usize::MAX] {
                let mut driver = driver(Op::Set, sizes, 3, 3);
                let mut expected = Vec::new();
                for item in driver.items.iter() {
                    write!(expected, "set {} 0 0 {}\r\n", String::from_utf8_lossy(&item.key), item.len).unwrap();
                    expected.extend(value(item));
                    expected.extend(b"\r\n");
                }
                assert!(write_all(&mut driver, width) == expected, "{sizes} in steps of {width}");
                read_all(&mut driver, b"STORED\r\nSTORED\r\nSTORED\r\n", 5).unwrap();
                assert!(!driver.wants_write() && driver.is_finished());
                assert_eq!(driver.tally.bytes, driver.items.iter().map(|item| item.len).sum::<u64>());
                assert!(driver.items.iter().all(Item::is_stored));
            }
        }
    }

    #[test]
    fn gets_are_counted_however_the_replies_are_cut() {
        let mut replies = Vec::new();
        let lens = driver(Op::Get, "0..2000", 3, 1);
        for item in lens.items.iter() {
            write!(replies, "VALUE {} 0 {}\r\n", String::from_utf8_lossy(&item.key), item.len).unwrap();
            replies.extend(value(item));
            replies.extend(b"\r\nEND\r\n");
        }
        for width in [1, 2, 3, 100, 10_000] {
            let mut driver = driver(Op::Get, "0..2000", 4, 4);
            assert_eq!(
                write_all(&mut driver, usize::MAX),
                b"get k00000000\r\nget k00000001\r\nget k00000002\r\nget k00000003\r\n"
            );
            read_all(&mut driver, &replies, width).unwrap();
            read_all(&mut driver, b"END\r\n", width).unwrap();
            assert!(!driver.wants_write() && driver.is_finished());
            let tally = driver.into_tally();
            assert_eq!((tally.operations, tally.misses, tally.errors, tally.corrupt), (4, 1, 0, 0));
        }
    }

    #[test]
    fn a_wrong_octet_and_a_wrong_length_are_corrupt() {
        for at in [0, 50, 99] {
            let mut driver = driver(Op::Get, "100", 1, 1);
            write_all(&mut driver, usize::MAX);
            let mut octets = value(&driver.items[0]);
            octets[at] ^= 0x80;
            let reply = [b"VALUE k00000000 0 100\r\n", &octets[..], TRAILER].concat();
            read_all(&mut driver, &reply, 64).unwrap();
            assert_eq!(driver.into_tally().corrupt, 1);
        }
        let mut driver = driver(Op::Get, "100", 1, 1);
        write_all(&mut driver, usize::MAX);
        let reply = [b"VALUE k00000000 0 99\r\n", &value(&driver.items[0])[..99], TRAILER].concat();
        read_all(&mut driver, &reply, 64).unwrap();
        assert_eq!(driver.into_tally().corrupt, 1);
    }

    #[test]
    fn refusals_are_errors_and_the_pipeline_goes_on() {
        let mut driver = driver(Op::Set, "10", 2, 2);
        write_all(&mut driver, usize::MAX);
        read_all(&mut driver, b"SERVER_ERROR out of memory storing object\r\nSTORED\r\n", 9).unwrap();
        let tally = driver.into_tally();
        assert_eq!((tally.operations, tally.errors), (1, 1));
        assert!(tally.first_error.unwrap().contains("out of memory"));
    }

    #[test]
    fn what_is_no_reply_ends_the_connection() {
        for reply in [&b"HTTP/1.1 400\r\n"[..], b"VALUE other 0 1\r\n", b"VALUE k00000000 0 x\r\n", &[b'x'; 5_000]] {
            let mut driver = driver(Op::Get, "10", 1, 1);
            write_all(&mut driver, usize::MAX);
            assert_eq!(read_all(&mut driver, reply, 4_000).unwrap_err().kind(), ErrorKind::InvalidData);
        }
        let mut idle = driver(Op::Get, "10", 1, 1);
        assert_eq!(read_all(&mut idle, b"END\r\n", 9).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
