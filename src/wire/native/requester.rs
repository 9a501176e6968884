//! The client's half of the memcache conversation: what was asked, and what the answers say.
//!
//! ```text
//!   Line: one line                                   Line
//!   Values: VALUE line, windows, CR LF, ... END      Value, Body ..., ValueEnd, ... End
//!   Stats: STAT line, ... END                        Stat, ... End
//!   a refusal, wherever an answer may begin          Line
//! ```

use super::poison::Poison;
use super::stream::Inbound;
use super::window::RxLease;
use crate::wire::memcache::number::{parse_u32, parse_u64};
use std::collections::VecDeque;

/// Octets of commands that may be sent and unanswered; a server keeps many times more before it stops reading.
pub const UNANSWERED_BYTES_MAX: usize = 64 << 10;

/// What shape an answer has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Shape {
    /// One line.
    Line,
    /// Values and END.
    Values,
    /// Statistics and END, or one line.
    Stats,
}

/// The next part of an answer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answer<'a> {
    /// Nothing can be said before more has come.
    NeedMore,
    /// One line: the whole answer, or a refusal that ends it.
    Line(&'a [u8]),
    /// A value of `len` octets follows.
    Value { key: &'a [u8], flags: u32, len: u64, cas: Option<u64> },
    /// The next `len` of the `remaining` octets of the value lie in a window: [`Requester::take_body`] takes it.
    Body { remaining: u64, len: u32 },
    /// The value is whole.
    ValueEnd,
    /// A statistic: what follows `STAT `.
    Stat(&'a [u8]),
    /// The end of values or statistics.
    End,
}

/// Which requests wait for which answers.
///
/// Towards a server that is no Bulkhead it is cautious: such a server may hang if it is sent a command before it has
/// answered the one before, or close if a trailer shares its record with a command. So there is one request at a time.
#[derive(Debug)]
pub struct Requester {
    cautious: bool,
    asked: VecDeque<(Shape, usize)>,
    unanswered_bytes: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Line,
    /// Never with zero remaining.
    Body {
        remaining: u64,
    },
    Trailer,
}

impl Requester {
    /// Nothing is asked yet. `cautious` unless the server's [`Nonce`](super::descriptor::Nonce) is ours.
    pub fn new(cautious: bool) -> Self {
        Self { cautious, asked: VecDeque::new(), unanswered_bytes: 0, state: State::Line }
    }

    /// A request with `command_bytes` octets of line and trailer can be asked now. One that is longer than all may be
    /// waits for an empty pipeline.
    pub fn can_ask(&self, command_bytes: usize) -> bool {
        self.asked.is_empty() || !self.cautious && self.unanswered_bytes + command_bytes <= UNANSWERED_BYTES_MAX
    }

    /// A request was asked. It must be one that is answered: no `noreply`, no `quit`.
    ///
    /// # Panics
    /// If it [can't](Requester::can_ask).
    pub fn handle_asked(&mut self, shape: Shape, command_bytes: usize) {
        assert!(self.can_ask(command_bytes), "{} requests are unanswered", self.asked.len());
        self.asked.push_back((shape, command_bytes));
        self.unanswered_bytes += command_bytes;
    }

    /// Requests without their whole answer.
    pub fn unanswered_count(&self) -> usize {
        self.asked.len()
    }

    /// Goes on by one part. [`Answer::Line`] and [`Answer::End`] end the answer to the oldest request.
    ///
    /// # Errors
    /// [`Poison`]: no server answers like that. The connection must end.
    pub fn step<'a>(&mut self, inbound: &'a mut Inbound) -> Result<Answer<'a>, Poison> {
        match self.state {
            State::Body { remaining } => {
                return Ok(inbound.body(remaining)?.map_or(Answer::NeedMore, |len| Answer::Body { remaining, len }));
            }
            State::Trailer => {
                if !inbound.trailer()? {
                    return Ok(Answer::NeedMore);
                }
                self.state = State::Line;
                return Ok(Answer::ValueEnd);
            }
            State::Line => {}
        }
        let Some((shape, _)) = self.asked.front().copied() else {
            return if inbound.is_empty() { Ok(Answer::NeedMore) } else { Err(Poison::StrayAnswer) };
        };
        let Some(len) = inbound.line()? else { return Ok(Answer::NeedMore) };
        let line = &inbound.read(len + 2)[..len];
        match shape {
            Shape::Values | Shape::Stats if line == b"END" => {
                self.end();
                return Ok(Answer::End);
            }
            Shape::Values if line.starts_with(b"VALUE ") => {
                let (key, flags, len, cas) = parse_value(line).ok_or(Poison::AnswerShape)?;
                self.state = if len == 0 { State::Trailer } else { State::Body { remaining: len } };
                return Ok(Answer::Value { key, flags, len, cas });
            }
            Shape::Values
                if ![&b"ERROR"[..], b"CLIENT_ERROR ", b"SERVER_ERROR "].iter().any(|word| line.starts_with(word)) =>
            {
                return Err(Poison::AnswerShape);
            }
            Shape::Stats if let Some(stat) = line.strip_prefix(b"STAT ") => return Ok(Answer::Stat(stat)),
            Shape::Line | Shape::Values | Shape::Stats => {}
        }
        self.end();
        Ok(Answer::Line(line))
    }

    /// Takes the window that [`Answer::Body`] told of.
    ///
    /// # Panics
    /// If the last step was none.
    pub fn take_body(&mut self, inbound: &mut Inbound) -> RxLease {
        let lease = inbound.take_lease().expect("a step told of a window");
        let State::Body { remaining } = self.state else { panic!("no value is under way") };
        let remaining = remaining - u64::from(lease.len());
        self.state = if remaining == 0 { State::Trailer } else { State::Body { remaining } };
        lease
    }

    fn end(&mut self) {
        if let Some((_, command_bytes)) = self.asked.pop_front() {
            self.unanswered_bytes -= command_bytes;
        }
    }
}

/// `VALUE <key> <flags> <len>[ <cas>]`, with exactly one blank between.
fn parse_value(line: &[u8]) -> Option<(&[u8], u32, u64, Option<u64>)> {
    let mut tokens = line.split(|&octet| octet == b' ').skip(1);
    let key = tokens.next().filter(|key| !key.is_empty())?;
    let flags = parse_u32(tokens.next()?)?;
    let len = parse_u64(tokens.next()?)?;
    let cas = match tokens.next() {
        Some(cas) => Some(parse_u64(cas)?),
        None => None,
    };
    tokens.next().is_none().then_some((key, flags, len, cas))
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Negotiated, WindowGeometry};
    use super::super::window::RxWindows;
    use super::*;
    use crate::wire::seq::BulkSequence;
    use std::num::NonZeroU32;

    fn words(requester: &mut Requester, inbound: &mut Inbound) -> Vec<String> {
        let mut words = Vec::new();
        loop {
            words.push(match requester.step(inbound) {
                Ok(Answer::NeedMore) => return words,
                Ok(Answer::Line(line)) => line.escape_ascii().to_string(),
                Ok(Answer::Value { key, flags, len, cas }) => format!("{} {flags} {len} {cas:?}", key.escape_ascii()),
                Ok(Answer::Body { remaining, len }) => {
                    drop(requester.take_body(inbound));
                    format!("body {len} of {remaining}")
                }
                Ok(Answer::ValueEnd) => "value end".to_owned(),
                Ok(Answer::Stat(stat)) => format!("stat {}", stat.escape_ascii()),
                Ok(Answer::End) => "end".to_owned(),
                Err(poison) => {
                    words.push(poison.cause().to_owned());
                    return words;
                }
            });
        }
    }

    #[test]
    fn answers_of_every_shape_come_in_the_order_of_their_requests() {
        let windows = WindowGeometry::new(4096, 4).unwrap();
        let mut windows = RxWindows::new(windows, Negotiated::between(windows, windows));
        let mut inbound = Inbound::new(0);
        let mut requester = Requester::new(false);
        for shape in [Shape::Line, Shape::Values, Shape::Stats, Shape::Values, Shape::Stats, Shape::Line] {
            requester.handle_asked(shape, 10);
        }
        inbound.handle_inline(b"STORED\r\nVALUE a 1 5 77\r\n");
        inbound.handle_ready(windows.handle_ready(BulkSequence::FIRST, NonZeroU32::new(5).unwrap()).unwrap());
        inbound.handle_inline(b"\r\nVALUE b 2 0\r\n\r\nEND\r\nSTAT pid 1\r\nEND\r\nSERVER_ERROR x\r\nRESET\r\n12\r\n");
        let expected = [
            "STORED",
            "a 1 5 Some(77)",
            "body 5 of 5",
            "value end",
            "b 2 0 None",
            "value end",
            "end",
            "stat pid 1",
            "end",
            "SERVER_ERROR x",
            "RESET",
            "12",
        ];
        assert_eq!(words(&mut requester, &mut inbound), expected);
        assert_eq!(requester.unanswered_count(), 0);
        inbound.handle_inline(b"more");
        assert_eq!(words(&mut requester, &mut inbound), ["stray_answer"]);
    }

    #[test]
    fn value_lines_have_exactly_their_tokens() {
        for line in
            ["VALUE a 1", "VALUE a 1 2 3 4", "VALUE  1 2", "VALUE a  1 2", "VALUE a x 2", "VALUE a 1 2 ", "STORED"]
        {
            let mut inbound = Inbound::new(0);
            let mut requester = Requester::new(true);
            requester.handle_asked(Shape::Values, 1);
            inbound.handle_inline(line.as_bytes());
            inbound.handle_inline(b"\r\n");
            assert_eq!(words(&mut requester, &mut inbound), ["answer_shape"], "{line}");
        }
    }

    #[test]
    fn one_request_at_a_time_is_asked_of_strangers() {
        let mut requester = Requester::new(true);
        assert!(requester.can_ask(UNANSWERED_BYTES_MAX + 1));
        requester.handle_asked(Shape::Line, 3);
        assert!(!requester.can_ask(3));
        let mut inbound = Inbound::new(0);
        inbound.handle_inline(b"OK\r\n");
        assert_eq!(words(&mut requester, &mut inbound), ["OK"]);
        assert!(requester.can_ask(3));
    }

    #[test]
    fn unanswered_octets_are_bounded() {
        let mut requester = Requester::new(false);
        requester.handle_asked(Shape::Line, UNANSWERED_BYTES_MAX - 1);
        assert!(requester.can_ask(1));
        assert!(!requester.can_ask(2));
    }
}
