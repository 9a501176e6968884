//! One direction of a connection in full operation: octets into checked segments, messages into segments.
//!
//! Nothing here knows memory. The [`Receiver`] checks all that can be known without: framing, CRC, versions, operations,
//! sequence, Read Responses against the Reads that were asked for. Keys, rights, bounds and Receives are judged by whoever
//! has them, who then makes a [`Fault`] of the segment with [`Segment::fault`].

use std::collections::VecDeque;

use super::ddp::{Header, HeaderError, Msn, TAGGED_BYTES, Tagged, UNTAGGED_BYTES, Untagged};
use super::mpa::{self, FpduError};
use super::rdmap::{
    Culprit, Operation, OperationError, READ_REQUEST_BYTES, ReadRequest, Reason, Terminate, TerminateHead,
};

/// What a segment is for, its payload aside.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Octets for our memory. The message ends with `last`.
    Write { stag: u32, offset: u64, last: bool },
    /// Octets for the oldest Read of ours, `done` of which came before.
    ReadResponse { done: u32, last: bool },
    /// The peer wants octets of our memory.
    ReadRequest(ReadRequest),
    /// A part of a message for the oldest Receive, at `offset` in it. With `last` the message is complete.
    Send { offset: u32, last: bool, invalidate: Option<u32>, solicited: bool },
    /// The peer ends the connection.
    Terminate(TerminateHead),
}

/// A checked segment.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Segment<'a> {
    pub kind: Kind,
    pub payload: &'a [u8],
    /// Header and payload, for a Terminate to quote.
    ulpdu: &'a [u8],
}

/// Why memory does not take or give what a segment wants.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MemoryFault {
    #[error("the STag opens nothing on this stream")]
    Stag,
    #[error("the STag does not give this right")]
    Rights,
    #[error("outside of the region")]
    Bounds,
    #[error("the tagged offset wraps")]
    Wrap,
}

/// What the peer did wrong.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    #[error(transparent)]
    Fpdu(#[from] FpduError),
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error(transparent)]
    Operation(#[from] OperationError),
    #[error("{0:?} in the wrong kind of segment")]
    Model(Operation),
    #[error("{operation:?} on queue {queue}")]
    Queue { operation: Operation, queue: u32 },
    #[error("message {} in place of {}", .found.0, .expected.0)]
    Sequence { expected: Msn, found: Msn },
    #[error("message offset {found} in place of {expected}")]
    MessageOffset { expected: u32, found: u32 },
    #[error("a message of more than 2^32 octets")]
    Endless,
    #[error("a {0:?} in several segments, or of the wrong length")]
    Shape(Operation),
    #[error("a tagged message within another")]
    Interleaved,
    #[error("a Read Response nobody asked for")]
    Unasked,
    #[error("a Read Response under another STag than its Read's")]
    WrongSink,
    #[error("a Read Response that does not fit its Read")]
    Misplaced,
    #[error("more than {0} Reads at once")]
    TooManyReads(usize),
    #[error("{0}")]
    Memory(MemoryFault),
    #[error("a key that cannot be invalidated")]
    CannotInvalidate,
    #[error("a message without a Receive")]
    NoReceive,
    #[error("a message longer than its Receive of {0} octets")]
    TooLong(usize),
}

/// What the peer did wrong, and what to tell it. The stream is out of use.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{error}")]
pub struct Fault {
    pub error: PeerError,
    pub terminate: Terminate,
}

impl Fault {
    /// The fault `error` of the segment `ulpdu`.
    fn new(error: PeerError, ulpdu: &[u8]) -> Self {
        let is_read_request = !ulpdu.is_empty() && ulpdu[0] & 0x80 == 0 && ulpdu.get(1).is_some_and(|c| c & 0xf == 1);
        let reason = match error {
            PeerError::Fpdu(FpduError::Crc { .. }) => Reason::CRC,
            PeerError::Fpdu(FpduError::TooShort(_)) | PeerError::Header(HeaderError::TooShort(_)) => Reason::LENGTH,
            PeerError::Header(HeaderError::Version { tagged: true, .. }) => Reason::TAGGED_VERSION,
            PeerError::Header(HeaderError::Version { tagged: false, .. }) => Reason::UNTAGGED_VERSION,
            PeerError::Operation(OperationError::Version(_)) => Reason::RDMAP_VERSION,
            PeerError::Operation(OperationError::Unknown(_)) | PeerError::Model(_) => Reason::OPERATION,
            PeerError::Queue { .. } => Reason::QUEUE,
            PeerError::Sequence { .. } => Reason::MSN,
            PeerError::MessageOffset { .. } | PeerError::Endless => Reason::MESSAGE_OFFSET,
            PeerError::Shape(_) => Reason::UNSPECIFIED,
            PeerError::Interleaved | PeerError::Misplaced => Reason::TAGGED_BOUNDS,
            PeerError::Unasked | PeerError::WrongSink => Reason::TAGGED_STAG,
            PeerError::TooManyReads(_) | PeerError::NoReceive => Reason::NO_BUFFER,
            PeerError::TooLong(_) => Reason::TOO_LONG,
            PeerError::CannotInvalidate => Reason::CANNOT_INVALIDATE,
            PeerError::Memory(fault) if is_read_request => match fault {
                MemoryFault::Stag => Reason::READ_STAG,
                MemoryFault::Rights => Reason::READ_RIGHTS,
                MemoryFault::Bounds => Reason::READ_BOUNDS,
                MemoryFault::Wrap => Reason::READ_WRAP,
            },
            PeerError::Memory(fault) => match fault {
                // DDP has no code for rights; the peer learns no more than that the key does not serve.
                MemoryFault::Stag | MemoryFault::Rights => Reason::TAGGED_STAG,
                MemoryFault::Bounds => Reason::TAGGED_BOUNDS,
                MemoryFault::Wrap => Reason::TAGGED_WRAP,
            },
        };
        // RFC 5040 Figure 10: the LLP's errors quote nothing, and protection errors alone the Read Request.
        let is_protection = (reason.layer, reason.kind) == (0, 1);
        let culprit = (reason.layer < 2).then(|| culprit(ulpdu, is_read_request && is_protection)).flatten();
        Self { error, terminate: Terminate { reason, culprit } }
    }
}

fn culprit(ulpdu: &[u8], with_request: bool) -> Option<Culprit> {
    let header_len = if ulpdu.first()? & 0x80 != 0 { TAGGED_BYTES } else { UNTAGGED_BYTES };
    let (header, payload) = ulpdu.split_at_checked(header_len)?;
    Some(Culprit {
        segment_len: u16::try_from(ulpdu.len()).ok()?,
        header: header.to_vec(),
        read_request: if with_request { payload.first_chunk().copied() } else { None },
    })
}

impl Segment<'_> {
    /// The fault of this segment that only the owner of memory and Receives could find.
    pub fn fault(&self, error: PeerError) -> Fault {
        Fault::new(error, self.ulpdu)
    }
}

/// A Read whose Response is awaited.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct AwaitedRead {
    stag: u32,
    offset: u64,
    len: u32,
    done: u32,
}

/// The inbound direction.
#[derive(Debug)]
pub struct Receiver {
    crc: bool,
    /// Next message of the queues for Sends, Read Requests and Terminates.
    expected: [Msn; 3],
    /// Octets that came of the Send in progress.
    send_offset: u32,
    /// The unfinished tagged message: its operation and STag.
    tagged: Option<(Operation, u32)>,
    reads: VecDeque<AwaitedRead>,
    owed_count: usize,
    owed_max: usize,
}

impl Receiver {
    /// A stream at its first FPDU. The peer may have `owed_max` Reads outstanding.
    pub fn new(crc: bool, owed_max: usize) -> Self {
        Self {
            crc,
            expected: [Msn::FIRST; 3],
            send_offset: 0,
            tagged: None,
            reads: VecDeque::new(),
            owed_count: 0,
            owed_max,
        }
    }

    /// A stream in full use: the next Send is `msn`. For tests of what takes 2^32 messages to happen.
    pub fn with_next_send(mut self, msn: Msn) -> Self {
        self.expected[0] = msn;
        self
    }

    /// A Read was asked for, with this sink.
    pub fn await_read(&mut self, sink_stag: u32, sink_offset: u64, len: u32) {
        self.reads.push_back(AwaitedRead { stag: sink_stag, offset: sink_offset, len, done: 0 });
    }

    /// A Read Response to the peer is complete.
    ///
    /// # Panics
    /// When none was owed.
    pub fn response_sent(&mut self) {
        self.owed_count = self.owed_count.checked_sub(1).expect("a response answers a request");
    }

    /// The fault of the oldest Read Request not answered, `request`, of which `done` octets went out before its memory was
    /// not to be had any more. What a Terminate quotes of it says where it stopped (RFC 5040 §4.8).
    ///
    /// # Panics
    /// When none is owed, or `done` is more than was asked for.
    pub fn owed_fault(&self, request: &ReadRequest, done: u32, fault: MemoryFault) -> Fault {
        let owed_count = u32::try_from(self.owed_count).expect("few are served at once");
        assert!(owed_count > 0, "a Response answers a request");
        let advanced = ReadRequest {
            sink_offset: request.sink_offset.wrapping_add(u64::from(done)),
            len: request.len.checked_sub(done).expect("no more goes out than was asked for"),
            source_offset: request.source_offset.wrapping_add(u64::from(done)),
            ..*request
        };
        let msn = Msn(self.expected[1].0.wrapping_sub(owed_count));
        let control = Operation::ReadRequest.control();
        let header = Untagged { last: true, control, own: 0, queue: 1, msn, offset: 0 }.encode();
        Fault::new(PeerError::Memory(fault), &[&header[..], &advanced.encode()].concat())
    }

    /// Whether the stream stands between two messages: its end there is in order.
    pub fn is_between_messages(&self) -> bool {
        self.send_offset == 0 && self.tagged.is_none() && self.reads.is_empty()
    }

    /// The first segment of `input`, and how many octets its FPDU has. `None` until all of it is there, which is after at
    /// most [`mpa::FPDU_BYTES_MAX`] octets.
    ///
    /// # Errors
    /// The [`Fault`] that ends the stream.
    pub fn next<'a>(&mut self, input: &'a [u8]) -> Result<Option<(Segment<'a>, usize)>, Fault> {
        let split = mpa::split_fpdu(input, self.crc).map_err(|error| Fault::new(error.into(), &[]))?;
        let Some((ulpdu, total)) = split else { return Ok(None) };
        match self.judge(ulpdu) {
            Ok((kind, payload)) => Ok(Some((Segment { kind, payload, ulpdu }, total))),
            Err(error) => Err(Fault::new(error, ulpdu)),
        }
    }

    fn judge<'a>(&mut self, ulpdu: &'a [u8]) -> Result<(Kind, &'a [u8]), PeerError> {
        let (header, payload) = Header::decode(ulpdu)?;
        let control = match header {
            Header::Tagged(Tagged { control, .. }) | Header::Untagged(Untagged { control, .. }) => control,
        };
        let operation = Operation::decode(control)?;
        let kind = match header {
            Header::Tagged(header) if operation.is_tagged() => self.judge_tagged(operation, header, payload)?,
            Header::Untagged(header) if !operation.is_tagged() => self.judge_untagged(operation, header, payload)?,
            _ => return Err(PeerError::Model(operation)),
        };
        Ok((kind, payload))
    }

    fn judge_tagged(&mut self, operation: Operation, header: Tagged, payload: &[u8]) -> Result<Kind, PeerError> {
        let Tagged { last, stag, offset, .. } = header;
        if self.tagged.is_some_and(|unfinished| unfinished != (operation, stag)) {
            return Err(PeerError::Interleaved);
        }
        let kind = if operation == Operation::Write {
            Kind::Write { stag, offset, last }
        } else {
            let read = self.reads.front_mut().ok_or(PeerError::Unasked)?;
            let done = read.done;
            let after = u32::try_from(payload.len()).ok().and_then(|len| done.checked_add(len));
            let after = after.filter(|after| *after <= read.len).ok_or(PeerError::Misplaced)?;
            // Tagged segments of no octets have neither STag nor offset to look at (RFC 5041 §5.2).
            if !payload.is_empty() && stag != read.stag {
                return Err(PeerError::WrongSink);
            }
            let fits = payload.is_empty() || offset == read.offset.wrapping_add(u64::from(done));
            if !fits || last != (after == read.len) {
                return Err(PeerError::Misplaced);
            }
            read.done = after;
            if last {
                self.reads.pop_front();
            }
            Kind::ReadResponse { done, last }
        };
        self.tagged = (!last).then_some((operation, stag));
        Ok(kind)
    }

    fn judge_untagged(&mut self, operation: Operation, header: Untagged, payload: &[u8]) -> Result<Kind, PeerError> {
        let Untagged { last, own, queue, msn, offset, .. } = header;
        if queue != operation.queue() {
            return Err(PeerError::Queue { operation, queue });
        }
        let expected = &mut self.expected[queue as usize];
        if msn != *expected {
            return Err(PeerError::Sequence { expected: *expected, found: msn });
        }
        let expected_offset = if queue == 0 { self.send_offset } else { 0 };
        if offset != expected_offset {
            return Err(PeerError::MessageOffset { expected: expected_offset, found: offset });
        }
        if last {
            *expected = msn.next();
        }
        match operation {
            Operation::ReadRequest => {
                let whole = <&[u8; READ_REQUEST_BYTES]>::try_from(payload).ok().filter(|_| last);
                let request = ReadRequest::decode(whole.ok_or(PeerError::Shape(operation))?);
                if self.owed_count == self.owed_max {
                    return Err(PeerError::TooManyReads(self.owed_max));
                }
                self.owed_count += 1;
                Ok(Kind::ReadRequest(request))
            }
            Operation::Terminate => {
                let head = payload.first_chunk().filter(|_| last).ok_or(PeerError::Shape(operation))?;
                Ok(Kind::Terminate(TerminateHead(*head)))
            }
            _ => {
                let len = u32::try_from(payload.len()).ok();
                let after = len.and_then(|len| offset.checked_add(len)).ok_or(PeerError::Endless)?;
                // A message that does not advance could go on for ever.
                if payload.is_empty() && !last {
                    return Err(PeerError::Shape(operation));
                }
                self.send_offset = if last { 0 } else { after };
                let invalidate = operation.invalidates().then_some(own);
                Ok(Kind::Send { offset, last, invalidate, solicited: operation.is_solicited() })
            }
        }
    }
}

/// One segment to send: its header, and how many octets of the message go with it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Part {
    octets: [u8; UNTAGGED_BYTES],
    octets_len: usize,
    /// Payload octets.
    pub len: usize,
    /// The message is complete with it.
    pub last: bool,
}

impl Part {
    /// The DDP header.
    pub fn header(&self) -> &[u8] {
        &self.octets[..self.octets_len]
    }

    fn new(header: &[u8], len: usize, last: bool) -> Self {
        let mut octets = [0; UNTAGGED_BYTES];
        octets[..header.len()].copy_from_slice(header);
        Self { octets, octets_len: header.len(), len, last }
    }
}

/// The outbound direction: headers, in order.
#[derive(Debug)]
pub struct Sender {
    crc: bool,
    ulpdu_max: usize,
    next_send: Msn,
    next_read: Msn,
}

impl Sender {
    /// A stream at its first FPDU, with ULPDUs of at most `ulpdu_max` octets (128 to [`mpa::ULPDU_BYTES_MAX`]).
    pub fn new(crc: bool, ulpdu_max: usize) -> Self {
        let ulpdu_max = ulpdu_max.clamp(128, mpa::ULPDU_BYTES_MAX);
        Self { crc, ulpdu_max, next_send: Msn::FIRST, next_read: Msn::FIRST }
    }

    /// Whether CRCs are computed.
    pub fn crc(&self) -> bool {
        self.crc
    }

    /// The next segment of a Write or Read Response of which `rest` octets are left, for `offset`.
    pub fn tagged(&self, operation: Operation, stag: u32, offset: u64, rest: u64) -> Part {
        let (len, last) = cut(rest, self.ulpdu_max - TAGGED_BYTES);
        Part::new(&Tagged { last, control: operation.control(), stag, offset }.encode(), len, last)
    }

    /// The next segment of a Send of which `rest` octets are left, after `offset`. The last one ends the message.
    pub fn send(&mut self, invalidate: Option<u32>, solicited: bool, offset: u32, rest: u64) -> Part {
        let (len, last) = cut(rest, self.ulpdu_max - UNTAGGED_BYTES);
        let control = Operation::send(solicited, invalidate.is_some()).control();
        let header =
            Untagged { last, control, own: invalidate.unwrap_or(0), queue: 0, msn: self.next_send, offset }.encode();
        if last {
            self.next_send = self.next_send.next();
        }
        Part::new(&header, len, last)
    }

    /// Appends a Read Request as a whole FPDU.
    pub fn put_read_request(&mut self, out: &mut Vec<u8>, request: &ReadRequest) {
        let control = Operation::ReadRequest.control();
        let header = Untagged { last: true, control, own: 0, queue: 1, msn: self.next_read, offset: 0 };
        self.next_read = self.next_read.next();
        mpa::put_fpdu(out, &header.encode(), &request.encode(), self.crc);
    }

    /// Appends a Terminate as a whole FPDU: the last one of the stream.
    pub fn put_terminate(&self, out: &mut Vec<u8>, terminate: &Terminate) {
        let control = Operation::Terminate.control();
        let header = Untagged { last: true, control, own: 0, queue: 2, msn: Msn::FIRST, offset: 0 };
        mpa::put_fpdu(out, &header.encode(), &terminate.encode(), self.crc);
    }
}

/// How much of `rest` goes into a segment, in steps of 8 octets so that the next one begins at a word.
fn cut(rest: u64, room: usize) -> (usize, bool) {
    match usize::try_from(rest) {
        Ok(rest) if rest <= room => (rest, true),
        _ => (room / 8 * 8, false),
    }
}

#[cfg(test)]
mod tests {
    use super::ReadRequest as Request;
    use super::*;

    fn tagged(operation: Operation, last: bool, stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let header = Tagged { last, control: operation.control(), stag, offset };
        mpa::put_fpdu(&mut out, &header.encode(), payload, true);
        out
    }

    fn untagged(operation: Operation, last: bool, msn: u32, offset: u32, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let queue = operation.queue();
        let header = Untagged { last, control: operation.control(), own: 0, queue, msn: Msn(msn), offset };
        mpa::put_fpdu(&mut out, &header.encode(), payload, true);
        out
    }

    type Case = (Vec<Vec<u8>>, Result<(), PeerError>);

    /// What a fresh receiver that awaits one Read of 16 octets (STag 9, offset 100) says to these FPDUs.
    fn verdict(fpdus: &[Vec<u8>]) -> Result<(), PeerError> {
        let mut receiver = Receiver::new(true, 2);
        receiver.await_read(9, 100, 16);
        for fpdu in fpdus {
            let (_, total) = receiver.next(fpdu).map_err(|fault| fault.error)?.expect("whole");
            assert_eq!(total, fpdu.len());
        }
        Ok(())
    }

    #[test]
    fn sequences_of_segments_are_judged() {
        use Operation::*;
        let request = || Request { sink_stag: 1, sink_offset: 2, len: 3, source_stag: 4, source_offset: 5 }.encode();
        let w = |last, stag| tagged(Write, last, stag, 0, b"12345678");
        let r = |last, stag, offset, len| tagged(ReadResponse, last, stag, offset, &[0; 32][..len]);
        let s = |last, msn, offset| untagged(Send, last, msn, offset, b"abcd");
        let q = |msn| untagged(ReadRequest, true, msn, 0, &request());
        let table: Vec<Case> = vec![
            (vec![w(false, 5), w(true, 5), w(true, 6)], Ok(())),
            (vec![w(false, 5), w(true, 6)], Err(PeerError::Interleaved)),
            (vec![w(false, 5), r(true, 9, 100, 16)], Err(PeerError::Interleaved)),
            (vec![w(false, 5), s(true, 1, 0), w(true, 5)], Ok(())),
            (vec![r(false, 9, 100, 8), r(true, 9, 108, 8)], Ok(())),
            (vec![r(false, 9, 100, 8), r(true, 9, 100, 8)], Err(PeerError::Misplaced)),
            (vec![r(true, 9, 100, 8)], Err(PeerError::Misplaced)),
            (vec![r(false, 9, 100, 16)], Err(PeerError::Misplaced)),
            (vec![r(true, 9, 100, 24)], Err(PeerError::Misplaced)),
            (vec![r(true, 8, 100, 16)], Err(PeerError::WrongSink)),
            (vec![r(true, 9, 100, 16), r(true, 9, 100, 16)], Err(PeerError::Unasked)),
            (vec![s(false, 1, 0), s(true, 1, 4), s(true, 2, 0)], Ok(())),
            (vec![s(false, 1, 0), s(true, 1, 8)], Err(PeerError::MessageOffset { expected: 4, found: 8 })),
            (vec![s(false, 1, 0), s(true, 2, 4)], Err(PeerError::Sequence { expected: Msn(1), found: Msn(2) })),
            (vec![s(true, 1, 0), s(true, 1, 0)], Err(PeerError::Sequence { expected: Msn(2), found: Msn(1) })),
            (vec![untagged(Send, false, 1, 0, b"")], Err(PeerError::Shape(Send))),
            (vec![s(false, 1, 0), q(1), s(true, 1, 4)], Ok(())),
            (vec![q(1), q(2)], Ok(())),
            (vec![q(1), q(2), q(3)], Err(PeerError::TooManyReads(2))),
            (vec![untagged(ReadRequest, false, 1, 0, &request())], Err(PeerError::Shape(ReadRequest))),
            (vec![untagged(Terminate, true, 1, 0, b"abc")], Err(PeerError::Shape(Terminate))),
            (vec![untagged(Write, true, 1, 0, b"")], Err(PeerError::Model(Write))),
            (vec![tagged(Send, true, 1, 0, b"")], Err(PeerError::Model(Send))),
        ];
        for (n, (fpdus, expected)) in table.into_iter().enumerate() {
            assert_eq!(verdict(&fpdus), expected, "case {n}");
        }
    }

    #[test]
    fn a_fault_quotes_the_segment_and_names_the_layer() {
        let request = ReadRequest { sink_stag: 1, sink_offset: 2, len: 3, source_stag: 4, source_offset: 5 };
        let mut octets = Vec::new();
        Sender::new(true, 1 << 10).put_read_request(&mut octets, &request);
        let (segment, _) = Receiver::new(true, 1).next(&octets).unwrap().unwrap();
        let fault = segment.fault(PeerError::Memory(MemoryFault::Bounds));
        assert_eq!(fault.terminate.reason, Reason::READ_BOUNDS);
        let culprit = fault.terminate.culprit.expect("quoted");
        assert_eq!((culprit.segment_len, culprit.header.len()), (46, 18));
        assert_eq!(culprit.read_request, Some(request.encode()));
        octets[10] ^= 1;
        let fault = Receiver::new(true, 1).next(&octets).unwrap_err();
        assert_eq!(fault.terminate, Terminate::bare(Reason::CRC));
    }

    #[test]
    fn messages_are_cut_to_fit_and_each_has_at_least_one_segment() {
        let mut sender = Sender::new(false, 128);
        for (len, parts) in [(0, 1), (110, 1), (111, 2), (104, 1), (1000, 10)] {
            let (mut offset, mut count) = (0, 0);
            loop {
                let part = sender.send(None, false, offset, len - u64::from(offset));
                assert!(part.header().len() + part.len <= 128);
                offset += part.len as u32;
                count += 1;
                if part.last {
                    break;
                }
                assert_eq!(offset % 8, 0);
            }
            assert_eq!((u64::from(offset), count), (len, parts));
        }
        assert_eq!(sender.next_send, Msn(6));
        assert_eq!(sender.tagged(Operation::Write, 1, 2, u64::MAX).len, 112);
    }
}
