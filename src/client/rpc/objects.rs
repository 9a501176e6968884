//! Program `bulkhead`, blocking: values, whole and by ranges.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::time::{Duration, Instant};

use super::operation::{self, GetRange, GotRange, Operation};
use super::port::{Argument, Finished};
use super::{CallId, Cancel, RpcClient};
use crate::client::{ClientError, Info};
use crate::fabric::SharedSpan;
use crate::programs::bulkhead::{Answer, Expectation, Item, PUT_BYTES_MAX, Put, PutMore, PutResult, Status};
use crate::store::Condition;

/// Before a server that has too much to do is asked again, and how often.
const BUSY_PAUSE: Duration = Duration::from_millis(10);
const BUSY_COUNT_MAX: u32 = 500;

/// What goes with a value, and when it is stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PutOptions {
    /// The client's own, opaque to the server.
    pub flags: u32,
    /// `None` keeps it; else at least one second.
    pub ttl: Option<Duration>,
    /// Judged when the value is whole.
    pub condition: Condition,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self { flags: 0, ttl: None, condition: Condition::Any }
    }
}

/// Seconds to live as the program counts them: 0 is for ever.
pub(super) fn ttl_s(ttl: Option<Duration>) -> u32 {
    ttl.map_or(0, |ttl| u32::try_from(ttl.as_secs().max(1)).unwrap_or(u32::MAX))
}

/// A deadline as the program counts it: 0 is none.
pub(super) fn deadline_us(deadline: Option<Duration>) -> u32 {
    deadline.map_or(0, |deadline| u32::try_from(deadline.as_micros().max(1)).unwrap_or(u32::MAX))
}

pub(super) fn refused(status: Status) -> ClientError {
    let reply = match status {
        Status::Exists => "there is a value of that key",
        Status::NotFound => "there is no value of that key",
        Status::Changed => "there is another version",
        Status::Late => "not read by the deadline",
        Status::Busy => "the server has too many readers",
        Status::NoSpace => "no space",
        Status::TooLarge => "longer than the server takes",
        Status::IoError => "octets of the value are lost",
        Status::BadChecksum => "the octets that came are not those that were sent",
        Status::BadDraft => "the server has given the value up",
        Status::BadRange => "a range that does not follow the one before",
        Status::TooSmall => "the next entry is too long",
        Status::Limit => "this connection holds as much as it may",
        Status::Unsupported => "the server does not do that",
        Status::Ok => "done",
    };
    ClientError::Refused { reply: reply.to_owned() }
}

/// What is to be done next to store a value.
pub(super) struct PutPlan<'a> {
    pub(super) key: &'a [u8],
    pub(super) draft: u64,
    pub(super) len: u64,
    pub(super) options: PutOptions,
}

impl PutPlan<'_> {
    /// The call that stores the octets from `offset` on.
    pub(super) fn call(&self, offset: u64, data: Argument, crc32c: Option<u32>) -> Result<Operation, ClientError> {
        let item = Item { token: 0, len: data.len() as u32 };
        let commit = offset + u64::from(item.len) == self.len;
        if offset > 0 {
            return Ok(Operation::put_more(PutMore { draft: self.draft, offset, commit, crc32c, data: item }, data));
        }
        let put = Put {
            key: operation::key_of(self.key)?,
            draft: self.draft,
            len: self.len,
            flags: self.options.flags,
            ttl_s: ttl_s(self.options.ttl),
            condition: self.options.condition,
            commit,
            crc32c,
            data: item,
        };
        Ok(Operation::put(put, data))
    }
}

/// What a PUT came to: the version, once it is committed.
pub(super) fn put_version(answer: Answer) -> Result<u64, ClientError> {
    match answer {
        Answer::Put(PutResult { status: Status::Ok, version }) => Ok(version),
        Answer::Put(PutResult { status, .. }) => Err(refused(status)),
        answer => unreachable!("{answer:?} to a PUT"),
    }
}

impl RpcClient {
    /// Calls the procedure that does nothing.
    ///
    /// # Errors
    /// Those of the connection, and [`ClientError::Refused`] if the server has no such program.
    pub fn ping(&mut self) -> Result<(), ClientError> {
        self.run(Operation::null()).map(drop)
    }

    /// Reads ranges of values, each into its memory, in as few calls as the connection carries. Each range has its own
    /// status. With a deadline, what is not read by then is [`Status::Late`], and the others are good.
    ///
    /// # Errors
    /// [`ClientError::RpcKey`], [`ClientError::Local`] for memory that cannot be used, [`ClientError::Refused`],
    /// [`ClientError::Protocol`], and those of the connection. The memory may hold anything then.
    pub fn get_ranges(
        &mut self,
        ranges: &[GetRange],
        deadline: Option<Duration>,
    ) -> Result<Vec<GotRange>, ClientError> {
        let call = self.submit_ranges(ranges, deadline)?;
        self.wait_ranges(call)
    }

    /// As [`get_ranges`](Self::get_ranges), without waiting: the calls are on their way.
    ///
    /// # Errors
    /// [`ClientError::RpcKey`], [`ClientError::Local`] for memory that cannot be used, and those of the connection.
    pub fn submit_ranges(
        &mut self,
        ranges: &[GetRange],
        deadline: Option<Duration>,
    ) -> Result<RangesCall, ClientError> {
        let terms = self.terms()?;
        let calls = operation::gets(ranges, self.link.options().crc32c, deadline_us(deadline), &terms)?;
        Ok(RangesCall { calls: self.submit_all(calls) })
    }

    /// Waits for what became of each range.
    ///
    /// # Errors
    /// As [`get_ranges`](Self::get_ranges).
    pub fn wait_ranges(&mut self, call: RangesCall) -> Result<Vec<GotRange>, ClientError> {
        let mut got = Vec::new();
        self.settle_all(call.calls, |finished, answered, answer| {
            got.extend(operation::ranges(finished, answered, answer));
        })?;
        Ok(got)
    }

    /// Gives ranges up, and waits until nobody can reach their memory. `false` if all of them have come already.
    pub fn cancel_ranges(&mut self, call: RangesCall, when: Cancel) -> bool {
        for (id, _) in &call.calls {
            self.link.cancel(id.0, when);
        }
        let ends = call.calls.into_iter().map(|(id, _)| self.wait_finished(id).outcome.is_err());
        ends.fold(false, |any, is_given_up| any | is_given_up)
    }

    /// Streams a value into `sink`; `None` is a miss. On an error `sink` may hold a part of the value.
    ///
    /// # Errors
    /// [`ClientError::Local`] if `sink` fails, [`ClientError::Refused`] if the value was replaced meanwhile, else as
    /// [`get_ranges`](Self::get_ranges).
    pub fn get(&mut self, key: impl AsRef<[u8]>, sink: &mut impl Write) -> Result<Option<Info>, ClientError> {
        Ok(self.get_with(key, |_| Ok(sink))?.map(|(info, _)| info))
    }

    /// As [`get`](Self::get), with a sink that is made once the value is known to exist and its length is known.
    ///
    /// # Errors
    /// As [`get`](Self::get); an error of `open` is [`ClientError::Local`].
    pub fn get_with<W: Write>(
        &mut self,
        key: impl AsRef<[u8]>,
        open: impl FnOnce(&Info) -> io::Result<W>,
    ) -> Result<Option<(Info, W)>, ClientError> {
        self.get_range_with(key, 0..u64::MAX, open)
    }

    /// As [`get_with`](Self::get_with), of the octets in `range` alone, as far as the value has them.
    ///
    /// # Errors
    /// As [`get_with`](Self::get_with).
    pub fn get_range_with<W: Write>(
        &mut self,
        key: impl AsRef<[u8]>,
        range: Range<u64>,
        open: impl FnOnce(&Info) -> io::Result<W>,
    ) -> Result<Option<(Info, W)>, ClientError> {
        let local = |source| ClientError::Local { source };
        let mut stream = Stream { key: key.as_ref().to_vec(), version: 0, under_way: VecDeque::new() };
        let first_len = range.end.saturating_sub(range.start).min(self.link.options().range_bytes.into());
        let first = self.memory()?;
        self.ask(&mut stream, range.start, first_len as u32, first)?;
        let Some((got, mut span)) = self.settle(&mut stream)? else { return Ok(None) };
        let info = Info { len: got.len, flags: got.flags, cas: got.version };
        let (mut next, end) = (range.start + u64::from(got.count), range.end.min(got.len));
        stream.version = got.version;
        // The next ones are on their way while the caller's writer has its turn.
        let asked = self.ask_on(&mut stream, &mut next, end);
        let write = |sink: &mut W, span: &mut SharedSpan, count: u32| {
            let memory = span.get_mut().ok_or_else(|| io::Error::other("memory that is still lent"))?;
            sink.write_all(&memory[..count as usize])
        };
        let outcome = asked.and_then(|()| {
            let mut sink = open(&info).map_err(local)?;
            write(&mut sink, &mut span, got.count).map_err(local)?;
            self.spans.push(span);
            while let Some((got, mut span)) = self.settle(&mut stream)? {
                if got.version != info.cas {
                    return Err(refused(Status::Changed));
                }
                write(&mut sink, &mut span, got.count).map_err(local)?;
                self.spans.push(span);
                self.ask_on(&mut stream, &mut next, end)?;
            }
            sink.flush().map_err(local)?;
            Ok(sink)
        });
        for (id, ..) in stream.under_way {
            let finished = self.wait_finished(id);
            self.spans.extend(finished.lent.results.into_iter().flatten().map(|span| span.whole()));
        }
        outcome.map(|sink| Some((info, sink)))
    }

    /// Reads a value into the front of `buffer`; `None` is a miss.
    ///
    /// # Errors
    /// [`ClientError::TooLong`] if it does not fit; else as [`get`](Self::get).
    pub fn get_into(&mut self, key: impl AsRef<[u8]>, buffer: &mut [u8]) -> Result<Option<Info>, ClientError> {
        let capacity = buffer.len();
        let mut too_long = None;
        let found = self.get_with(key, |info| match info.len <= capacity as u64 {
            true => Ok(buffer),
            false => {
                too_long = Some(info.len);
                Err(ErrorKind::StorageFull.into())
            }
        });
        match too_long {
            Some(len) => Err(ClientError::TooLong { len, capacity }),
            None => Ok(found?.map(|(info, _)| info)),
        }
    }

    /// Stores exactly `len` octets from `value`, in ranges that go out as they are read. Gives the version. Nobody sees the
    /// value before it is whole.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the condition does not hold or the server cannot take it; [`ClientError::Local`] if
    /// `value` fails or ends early, after which nothing is stored; [`ClientError::RpcKey`], and those of the connection. A
    /// value of several ranges does not survive the loss of a connection: the server has given it up then.
    pub fn put(
        &mut self,
        key: impl AsRef<[u8]>,
        value: &mut impl Read,
        len: u64,
        options: PutOptions,
    ) -> Result<u64, ClientError> {
        let plan = PutPlan { key: key.as_ref(), draft: self.mint_draft(), len, options };
        let mut under_way: VecDeque<(CallId, Expectation)> = VecDeque::new();
        let outcome = self.put_ranges(&plan, value, &mut under_way);
        let is_begun = !under_way.is_empty() || len > u64::from(self.link.options().range_bytes);
        let settled: Vec<_> =
            under_way.into_iter().map(|(id, expectation)| self.put_settle(id, &expectation)).collect();
        match (outcome, settled.into_iter().collect::<Result<Vec<u64>, _>>()) {
            (Ok(version), Ok(versions)) => Ok(versions.last().copied().unwrap_or(version)),
            (Err(error @ ClientError::Local { .. }), _) => {
                if is_begun {
                    // Whatever it says: the draft is not there any more.
                    let _dropped = self.run(Operation::put_drop(plan.draft));
                }
                Err(error)
            }
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    /// Stores all of `value` in one call, without waiting for it. The memory is lent meanwhile: nobody writes to it.
    ///
    /// # Errors
    /// [`ClientError::RpcKey`]; [`ClientError::Local`] for a value of more than 2^30 octets or memory that begins at no
    /// multiple of 8 octets; and those of the connection.
    pub fn submit_put(
        &mut self,
        key: impl AsRef<[u8]>,
        value: &SharedSpan,
        options: PutOptions,
    ) -> Result<PutCall, ClientError> {
        if value.len() as u64 > u64::from(PUT_BYTES_MAX) || !value.is_aligned() {
            let what = "a value in one call has at most 2^30 octets and begins at a multiple of 8";
            return Err(ClientError::Local { source: io::Error::new(ErrorKind::InvalidInput, what) });
        }
        self.terms()?;
        let crc32c = self.link.options().crc32c.then(|| operation::crc32c_of(value, value.len()));
        let plan = PutPlan { key: key.as_ref(), draft: self.mint_draft(), len: value.len() as u64, options };
        let data = match value.is_empty() {
            true => Argument::Octets(Vec::new()),
            false => Argument::Span(value.clone()),
        };
        let Operation { call, lent, expectation } = plan.call(0, data, crc32c)?;
        let id = self.submit_call(call, lent);
        self.link.turn(Instant::now());
        Ok(PutCall { id, expectation })
    }

    /// Waits for the end of a [`submit_put`](Self::submit_put), and gives the version.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn wait_put(&mut self, call: PutCall) -> Result<u64, ClientError> {
        self.put_settle(call.id, &call.expectation)
    }

    /// Gives a [`submit_put`](Self::submit_put) up, and waits until nobody can reach its memory. `false` if its reply has
    /// come already; else the value may be stored or not.
    pub fn cancel_put(&mut self, call: PutCall, when: Cancel) -> bool {
        self.cancel(call.id, when)
    }

    /// A number for a draft.
    fn mint_draft(&mut self) -> u64 {
        self.next_draft = self.next_draft.wrapping_add(1);
        self.next_draft
    }

    fn put_ranges(
        &mut self,
        plan: &PutPlan<'_>,
        value: &mut impl Read,
        under_way: &mut VecDeque<(CallId, Expectation)>,
    ) -> Result<u64, ClientError> {
        let options = *self.link.options();
        let (mut offset, mut version) = (0, 0);
        loop {
            let count = (plan.len - offset).min(options.range_bytes.into()) as usize;
            if under_way.len() >= options.range_count.get() as usize
                && let Some((id, expectation)) = under_way.pop_front()
            {
                version = self.put_settle(id, &expectation)?;
            }
            let mut span = self.memory()?;
            let Some(memory) = span.get_mut() else { continue };
            value.read_exact(&mut memory[..count]).map_err(|error| {
                let source = match error.kind() {
                    ErrorKind::UnexpectedEof => {
                        let what = format!("the value ended within its last {} octets", plan.len - offset);
                        io::Error::new(ErrorKind::UnexpectedEof, what)
                    }
                    _ => error,
                };
                ClientError::Local { source }
            })?;
            let crc32c = options.crc32c.then(|| crc32c::crc32c(&memory[..count]));
            let data = match count {
                0 => Argument::Octets(Vec::new()),
                count => Argument::Span(span.slice(0..count)),
            };
            let Operation { call, lent, expectation } = plan.call(offset, data, crc32c)?;
            under_way.push_back((self.submit_call(call, lent), expectation));
            self.lent.push(span);
            self.link.turn(Instant::now());
            offset += count as u64;
            if offset == plan.len {
                return Ok(version);
            }
        }
    }

    fn put_settle(&mut self, id: CallId, expectation: &Expectation) -> Result<u64, ClientError> {
        let finished = self.wait_finished(id);
        let (_, answer) = self.read(finished, expectation)?;
        put_version(answer)
    }

    /// Memory for one range: of a call that is over, or fresh.
    fn memory(&mut self) -> Result<SharedSpan, ClientError> {
        // Memory of values on their way out is back when nobody else has it.
        let lent = std::mem::take(&mut self.lent);
        for mut span in lent {
            if span.get_mut().is_some() {
                self.spans.push(span);
            } else {
                self.lent.push(span);
            }
        }
        match self.spans.pop() {
            Some(span) => Ok(span),
            None => SharedSpan::new(self.link.options().range_bytes as usize)
                .map_err(|source| ClientError::Local { source }),
        }
    }

    /// Asks for the ranges that follow, as many as may be under way.
    fn ask_on(&mut self, stream: &mut Stream, next: &mut u64, end: u64) -> Result<(), ClientError> {
        let options = *self.link.options();
        while *next < end && stream.under_way.len() < options.range_count.get() as usize {
            let len = (end - *next).min(options.range_bytes.into()) as u32;
            let span = self.memory()?;
            self.ask(stream, *next, len, span)?;
            *next += u64::from(len);
        }
        Ok(())
    }

    fn ask(&mut self, stream: &mut Stream, offset: u64, len: u32, span: SharedSpan) -> Result<(), ClientError> {
        let into = span.slice(0..len as usize);
        let range = GetRange { key: stream.key.clone(), version: stream.version, offset, into };
        let terms = self.terms()?;
        let crc32c = self.link.options().crc32c;
        for (_, Operation { call, lent, expectation }) in operation::gets(&[range], crc32c, 0, &terms)? {
            let id = self.submit_call(call, lent);
            stream.under_way.push_back((id, expectation, offset, len));
        }
        // Until it is over, the call alone has the memory.
        drop(span);
        self.link.turn(Instant::now());
        Ok(())
    }

    /// What became of the oldest range, and its memory; `None` is a miss.
    fn settle(&mut self, stream: &mut Stream) -> Result<Option<(GotRange, SharedSpan)>, ClientError> {
        for _ in 0..BUSY_COUNT_MAX {
            let Some((id, expectation, offset, len)) = stream.under_way.pop_front() else { return Ok(None) };
            let finished = self.wait_finished(id);
            let (mut finished, answered, answer) = self.read_whole(finished, &expectation)?;
            let got = operation::ranges(&finished, &answered, answer);
            drop(answered);
            let span = finished.lent.results.pop().flatten();
            let (Some(got), Some(span)) = (got.first().copied(), span) else { return Ok(None) };
            match got.status {
                Status::Ok
                    if got.count == len
                        || offset.checked_add(got.count.into()) == Some(got.len)
                        || got.len <= offset =>
                {
                    return Ok(Some((got, span.whole())));
                }
                Status::Ok => return Err(refused(Status::IoError)),
                Status::NotFound if stream.version == 0 => return Ok(None),
                Status::NotFound => return Err(refused(Status::Changed)),
                Status::Busy => {
                    std::thread::sleep(BUSY_PAUSE);
                    self.ask(stream, offset, len, span.whole())?;
                    // It is the oldest still.
                    stream.under_way.rotate_right(1);
                }
                status => return Err(refused(status)),
            }
        }
        Err(refused(Status::Busy))
    }

    pub(super) fn run(&mut self, operation: Operation) -> Result<Answer, ClientError> {
        let Operation { call, lent, expectation } = operation;
        let id = self.submit_call(call, lent);
        let finished = self.wait_finished(id);
        self.read(finished, &expectation).map(|(_, answer)| answer)
    }

    pub(super) fn submit_all(&mut self, calls: Vec<(Range<usize>, Operation)>) -> Vec<(CallId, Expectation)> {
        let submit = |(_, Operation { call, lent, expectation })| (self.submit_call(call, lent), expectation);
        let under_way = calls.into_iter().map(submit).collect();
        // So that they are on their way.
        self.link.turn(Instant::now());
        under_way
    }

    /// Waits for all calls, and hands out the answers in their order.
    pub(super) fn settle_all(
        &mut self,
        calls: Vec<(CallId, Expectation)>,
        mut take: impl FnMut(&Finished, &super::Answer, Answer),
    ) -> Result<(), ClientError> {
        let mut first_error = None;
        for (id, expectation) in calls {
            let finished = self.wait_finished(id);
            match self.read_whole(finished, &expectation) {
                Ok((finished, answered, answer)) => take(&finished, &answered, answer),
                // The others are waited for all the same: they have memory.
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    fn read(&mut self, finished: Finished, expectation: &Expectation) -> Result<(Finished, Answer), ClientError> {
        let (finished, _, answer) = self.read_whole(finished, expectation)?;
        Ok((finished, answer))
    }

    fn read_whole(
        &mut self,
        mut finished: Finished,
        expectation: &Expectation,
    ) -> Result<(Finished, super::Answer, Answer), ClientError> {
        let outcome =
            std::mem::replace(&mut finished.outcome, Err(crate::wire::rpcrdma::requester::Failure::Cancelled));
        let answered = outcome.map_err(|failure| self.link.error(failure))?;
        let answer = operation::read(&finished, &answered, expectation, self.link.url())?;
        Ok((finished, answered, answer))
    }
}

/// Ranges asked for, see [`RpcClient::submit_ranges`].
#[derive(Debug)]
#[must_use = "what became of it is kept until somebody waits for it"]
pub struct RangesCall {
    calls: Vec<(CallId, Expectation)>,
}

/// A value under way, see [`RpcClient::submit_put`].
#[derive(Debug)]
#[must_use = "what became of it is kept until somebody waits for it"]
pub struct PutCall {
    id: CallId,
    expectation: Expectation,
}

/// A value that is read by ranges.
struct Stream {
    key: Vec<u8>,
    /// Of the value, once it is known.
    version: u64,
    /// The oldest first, with offset and octets.
    under_way: VecDeque<(CallId, Expectation, u64, u32)>,
}
