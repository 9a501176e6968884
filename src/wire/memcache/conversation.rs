//! Lines and bodies of one ordered stream, in order.
//!
//! ```text
//!          Command(Store)        accept_body(n)            body_taken             2 octets
//!   Line ----------------> Header -----------> Body(n) -------------> Trailer -------------> Line
//!    |  \                    |                   |                      |        BodyEnd
//!    |   \ Refused           | swallow_body(n)   | abandon_body         | abandon_body
//!    |    v                  v                   v                      v
//!    |   Swallow(m) --------------------- m octets have vanished ----------------------------> Line
//!    |
//!    +-- Close, Quit --> Closed
//! ```

use super::parse::{CloseReason, Parsed, Parser, TRAILER_BYTES};
use super::request::Command;

/// What one call of [`Conversation::step`] found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step<'a> {
    /// Nothing can be said before more octets are there.
    NeedMore,
    /// A request. After [`Command::Store`] the caller says [`Conversation::accept_body`] or
    /// [`Conversation::swallow_body`] before the next step. After [`Command::Quit`] every step is a [`Step::Close`].
    Command(Command<'a>),
    /// A line that is refused, without a word under `noreply`. If a body follows it, the coming steps throw it away.
    Refused { reply: Option<&'static [u8]> },
    /// A body with `remaining` octets still to come, at least one, of which the first `available` octets given are the
    /// next; none was consumed. The caller takes some, from these or straight from its socket, and says
    /// [`Conversation::body_taken`].
    Body { remaining: u64, available: usize },
    /// The body is whole and the two octets behind it were consumed. Unless they were CR LF the answer is
    /// [`BAD_DATA_CHUNK`](super::response::BAD_DATA_CHUNK), nothing under `noreply`, the value is not stored, and what
    /// follows is read as a line.
    BodyEnd { intact: bool },
    /// Nothing that follows can be trusted, or counts: close without a word.
    Close(CloseReason),
}

/// The framing of one connection's octets.
#[derive(Clone, Debug)]
pub struct Conversation {
    parser: Parser,
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Line,
    /// A storage line was given out; the caller has not yet said what becomes of its body of `len` octets.
    Header {
        len: u64,
    },
    /// Never with zero remaining.
    Body {
        remaining: u64,
    },
    Trailer,
    /// Never with zero remaining.
    Swallow {
        remaining: u64,
    },
    Closed(CloseReason),
}

impl Conversation {
    /// A conversation before its first octet. Retrieval lines have up to `line_bytes_max` bytes, see [`Parser::new`].
    ///
    /// The caller's buffer must hold one line and its LF, `max(line_bytes_max, 2048) + 1` octets: with so many given,
    /// no step is [`Step::NeedMore`] unless it consumed some.
    pub fn new(line_bytes_max: usize) -> Self {
        Self { parser: Parser::new(line_bytes_max), state: State::Line }
    }

    /// Goes on by one step: `(octets consumed, what was found)`. The next call gets the octets behind the consumed ones,
    /// and after [`Step::NeedMore`] more of them than were left.
    ///
    /// Every step but [`Step::NeedMore`], [`Step::Body`] and [`Step::Close`] consumes at least one octet.
    ///
    /// # Panics
    /// If the caller has not said what becomes of the body of the storage line before: its octets would be read as
    /// commands.
    pub fn step<'a>(&mut self, input: &'a [u8]) -> (usize, Step<'a>) {
        match self.state {
            State::Line => self.step_line(input, 0),
            State::Header { .. } => panic!("a storage line was given out, and its body neither accepted nor swallowed"),
            State::Body { remaining } => {
                (0, Step::Body { remaining, available: input.len().min(clamp_usize(remaining)) })
            }
            State::Trailer => match input {
                [first, second, ..] => {
                    self.state = State::Line;
                    (TRAILER_BYTES as usize, Step::BodyEnd { intact: [*first, *second] == *b"\r\n" })
                }
                _ => (0, Step::NeedMore),
            },
            State::Swallow { remaining } => {
                let swallowed = input.len().min(clamp_usize(remaining));
                self.skip(swallowed as u64);
                if self.is_swallowing() { (swallowed, Step::NeedMore) } else { self.step_line(input, swallowed) }
            }
            State::Closed(reason) => (0, Step::Close(reason)),
        }
    }

    /// Reads a line that starts `start` octets into `input`.
    fn step_line<'a>(&mut self, input: &'a [u8], start: usize) -> (usize, Step<'a>) {
        match self.parser.parse(&input[start..]) {
            Parsed::NeedMore => (start, Step::NeedMore),
            Parsed::Command { command, consumed } => {
                match command {
                    Command::Store(header) => self.state = State::Header { len: header.len },
                    Command::Quit => self.state = State::Closed(CloseReason::Quit),
                    _ => {}
                }
                (start + consumed, Step::Command(command))
            }
            Parsed::Refused { reply, consumed, swallow } => {
                self.swallow(swallow);
                (start + consumed, Step::Refused { reply })
            }
            Parsed::Close(reason) => {
                self.state = State::Closed(reason);
                (start, Step::Close(reason))
            }
        }
    }

    /// The body of the storage line just given out is wanted: [`Step::Body`] comes next, or [`Step::BodyEnd`] if it is
    /// empty.
    ///
    /// # Panics
    /// If no storage line was just given out, or `len` is not its length.
    pub fn accept_body(&mut self, len: u64) {
        self.expect_header(len);
        self.state = if len == 0 { State::Trailer } else { State::Body { remaining: len } };
    }

    /// The body of the storage line just given out is not wanted: it and the two octets behind it vanish, and no
    /// [`Step::BodyEnd`] tells of it.
    ///
    /// # Panics
    /// As [`Conversation::accept_body`].
    pub fn swallow_body(&mut self, len: u64) {
        self.expect_header(len);
        self.swallow(len.saturating_add(TRAILER_BYTES));
    }

    /// The rest of the body under way is no longer wanted: it and the two octets behind it vanish. Does nothing where
    /// no body is under way.
    pub fn abandon_body(&mut self) {
        match self.state {
            State::Header { len } => self.swallow(len.saturating_add(TRAILER_BYTES)),
            State::Body { remaining } => self.swallow(remaining.saturating_add(TRAILER_BYTES)),
            State::Trailer => self.swallow(TRAILER_BYTES),
            State::Line | State::Swallow { .. } | State::Closed(_) => {}
        }
    }

    /// The caller has taken the next `n` octets of the body, or thrown away the next `n` of those that are to vanish.
    ///
    /// # Panics
    /// If fewer than `n` remain, see [`Conversation::body_remaining`].
    pub fn body_taken(&mut self, n: u64) {
        assert!(n <= self.body_remaining(), "{n} octets of a body were taken and {} remained", self.body_remaining());
        self.skip(n);
    }

    /// Octets of the body still to come, without the two behind it; while swallowing, the octets still to vanish; zero
    /// otherwise.
    pub fn body_remaining(&self) -> u64 {
        match self.state {
            State::Body { remaining } | State::Swallow { remaining } => remaining,
            State::Line | State::Header { .. } | State::Trailer | State::Closed(_) => 0,
        }
    }

    /// Whether the next octets vanish: nobody waits for them.
    pub fn is_swallowing(&self) -> bool {
        matches!(self.state, State::Swallow { .. })
    }

    fn expect_header(&self, len: u64) {
        assert_eq!(self.state, State::Header { len }, "no storage line with a body of {len} octets was just given out");
    }

    fn swallow(&mut self, remaining: u64) {
        self.state = if remaining == 0 { State::Line } else { State::Swallow { remaining } };
    }

    /// Counts `n` octets down that are known to remain.
    fn skip(&mut self, n: u64) {
        match &mut self.state {
            State::Body { remaining } => {
                *remaining -= n;
                if *remaining == 0 {
                    self.state = State::Trailer;
                }
            }
            State::Swallow { remaining } => {
                *remaining -= n;
                if *remaining == 0 {
                    self.state = State::Line;
                }
            }
            State::Line | State::Header { .. } | State::Trailer | State::Closed(_) => {}
        }
    }
}

/// `n`, or the most octets a buffer can hold.
fn clamp_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::number::append_number;
    use super::super::request::{Direction, Keys, StoreHeader, StoreVerb};
    use super::*;

    const LINE_BYTES: usize = 64 * 1024;

    /// What a stream that arrives cut at `cuts` comes to, one phrase a step, every body accepted.
    fn phrases(stream: &[u8], cuts: &[usize]) -> Vec<String> {
        let mut conversation = Conversation::new(LINE_BYTES);
        let mut phrases = Vec::new();
        let mut body = None::<Vec<u8>>;
        let mut start = 0;
        for end in cuts.iter().copied().chain([stream.len()]) {
            loop {
                let (consumed, step) = conversation.step(&stream[start..end]);
                start += consumed;
                match step {
                    Step::NeedMore => break,
                    Step::Command(command) => {
                        phrases.push(phrase(&command));
                        if let Command::Store(header) = command {
                            conversation.accept_body(header.len);
                            body = Some(Vec::new());
                        }
                    }
                    Step::Refused { reply } => phrases.push(match reply {
                        Some(reply) => String::from_utf8(reply.strip_suffix(b"\r\n").unwrap().to_vec()).unwrap(),
                        None => "refused silently".into(),
                    }),
                    Step::Body { available: 0, .. } => break,
                    Step::Body { available, .. } => {
                        body.as_mut().unwrap().extend_from_slice(&stream[start..start + available]);
                        conversation.body_taken(available as u64);
                        start += available;
                    }
                    Step::BodyEnd { intact } => {
                        let body = body.take().unwrap();
                        phrases.push(format!("{} [{}]", if intact { "body" } else { "bad data chunk" }, text(&body)));
                    }
                    Step::Close(reason) => {
                        phrases.push(format!("close {reason:?}"));
                        return phrases;
                    }
                }
            }
        }
        if let Some(body) = body {
            phrases.push(format!("half a body [{}]", text(&body)));
        }
        phrases
    }

    fn text(octets: &[u8]) -> String {
        octets.iter().flat_map(|&octet| std::ascii::escape_default(octet)).map(char::from).collect()
    }

    fn keys(keys: &Keys<'_>) -> String {
        keys.clone().map(text).collect::<Vec<_>>().join(",")
    }

    fn phrase(command: &Command<'_>) -> String {
        let quiet = |noreply: &bool| if *noreply { " quiet" } else { "" };
        match command {
            Command::Get { keys: k, with_cas } => format!("get{} {}", if *with_cas { "s" } else { "" }, keys(k)),
            Command::GetAndTouch { exptime, keys: k, with_cas } => {
                format!("gat{} {exptime} {}", if *with_cas { "s" } else { "" }, keys(k))
            }
            Command::Store(header) => {
                let StoreHeader { verb, key, flags, exptime, len, cas, noreply } = header;
                let cas = if *verb == StoreVerb::Cas { format!(" cas{cas}") } else { String::new() };
                format!("{verb:?} {} f{flags} t{exptime} l{len}{cas}{}", text(key), quiet(noreply)).to_lowercase()
            }
            Command::Arithmetic { key, delta, direction, noreply } => {
                let verb = if *direction == Direction::Increment { "incr" } else { "decr" };
                format!("{verb} {} by {delta}{}", text(key), quiet(noreply))
            }
            Command::Touch { key, exptime, noreply } => format!("touch {} t{exptime}{}", text(key), quiet(noreply)),
            Command::Delete { key, noreply } => format!("delete {}{}", text(key), quiet(noreply)),
            Command::FlushAll { delay, noreply } => format!("flush_all t{delay}{}", quiet(noreply)),
            Command::Stats { argument } => format!("stats {:?}", argument.map(text)),
            Command::Version => "version".into(),
            Command::Verbosity { noreply } => format!("verbosity{}", quiet(noreply)),
            Command::Quit => "quit".into(),
        }
    }

    const BAD: &str = "CLIENT_ERROR bad command line format";
    const TIME: &str = "CLIENT_ERROR invalid exptime argument";
    const DELTA: &str = "CLIENT_ERROR invalid numeric delta argument";
    const USAGE: &str = "CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]";
    const SET: &str = "set a f0 t0 l1";
    const X: &str = "body [x]";

    /// Requests as memcached's releases were asked them, and what becomes of each here.
    const TABLE: &[(&[u8], &[&str])] = &[
        // Words, endings, blanks.
        (b"\r\n", &["ERROR"]),
        (b"\n", &["ERROR"]),
        (b"   \r\n", &["ERROR"]),
        (b"frob\r\n", &["ERROR"]),
        (b"boguscommand slkdsldkfjsd\r\n", &["ERROR"]),
        (b"version\n", &["version"]),
        (b"GET a\r\n", &["ERROR"]),
        (b"set  a  0  0  1\r\nx\r\nget  a\r\n", &[SET, X, "get a"]),
        (b" get a\r\n", &["get a"]),
        (b"get a \r\n", &["get a"]),
        // Retrieval.
        (b"get\r\n", &[BAD]),
        (b"get \r\n", &[BAD]),
        (b"gets\r\n", &[BAD]),
        (b"get a\r\n", &["get a"]),
        (b"gets a b  c\r\n", &["gets a,b,c"]),
        (b"gat 0 zz6\r\n", &["gat 0 zz6"]),
        (b"set a 5 0 1\r\nx\r\ngat 0 a zz6 a\r\n", &["set a f5 t0 l1", X, "gat 0 a,zz6,a"]),
        (b"gats 0 a\r\n", &["gats 0 a"]),
        (b"gat -1 a\r\n", &["gat -1 a"]),
        (b"gat 0\r\n", &[BAD]),
        (b"gat 0 \r\n", &[BAD]),
        (b"gat foo a\r\n", &[TIME]),
        (b"gat foo\r\n", &[BAD]),
        (b"gat\r\n", &[BAD]),
        (b"gats\r\n", &[BAD]),
        // Storage: the line.
        (b"set a 0 0\r\n", &[BAD]),
        (b"set a 0 0 1 noreply extra\r\nx\r\n", &["ERROR"]),
        (b"set a foo 0 1\r\nx\r\n", &[BAD]),
        (b"set a -1 0 1\r\nx\r\n", &[BAD]),
        (b"set a 18446744073709551616 0 1\r\nx\r\n", &[BAD]),
        (b"set a 4294967295 0 1\r\nx\r\nget a\r\n", &["set a f4294967295 t0 l1", X, "get a"]),
        (b"set a 4294967296 0 1\r\nx\r\n", &[BAD]),
        (b"set a 0 foo 1\r\nx\r\n", &[BAD]),
        (b"set a 0 -1 1\r\nx\r\nget a\r\n", &["set a f0 t-1 l1", X, "get a"]),
        (b"set a 0 2592001 1\r\nx\r\nget a\r\n", &["set a f0 t2592001 l1", X, "get a"]),
        (b"set a 0 2592000 1\r\nx\r\n", &["set a f0 t2592000 l1", X]),
        (b"set a 0 2592000 1\r\nx\r\nmg a t\r\n", &["set a f0 t2592000 l1", X, "ERROR"]),
        (b"set a 0 99999999999 1\r\nx\r\n", &["set a f0 t99999999999 l1", X]),
        (b"set a 0 0 foo\r\nx\r\n", &[BAD, "ERROR"]),
        (b"set a 0 0 -1\r\nx\r\n", &[BAD, "ERROR"]),
        (b"set a 0 0 2147483648\r\nx\r\n", &["set a f0 t0 l2147483648", "half a body [x\\r\\n]"]),
        (b"set a 0 0 2147483647\r\n", &["set a f0 t0 l2147483647", "half a body []"]),
        (b"set a 0 0 9223372036854775807\r\n", &["set a f0 t0 l9223372036854775807", "half a body []"]),
        (b"set a 0 0 9223372036854775808\r\nx\r\n", &[BAD, "ERROR"]),
        (b"set a 0 0 18446744073709551615\r\nget a\r\n", &[BAD, "get a"]),
        (b"set a 0 0 18446744073709551616\r\n", &[BAD]),
        (b"set a 0 0 1 noreply\r\nx\r\nget a\r\n", &["set a f0 t0 l1 quiet", X, "get a"]),
        (b"set a 0 0 1 other\r\nx\r\n", &[SET, X]),
        (b"set a foo 0 1 noreply\r\nx\r\nversion\r\n", &["refused silently", "version"]),
        // Storage: the body.
        (b"set a 0 0 1\r\nxyz\r\n", &[SET, "bad data chunk [x]", "ERROR"]),
        (b"set a 0 0 4\r\nab\r\ncd\r\n", &["set a f0 t0 l4", "bad data chunk [ab\\r\\n]", "ERROR"]),
        (b"set a 0 0 0\r\n\r\nget a\r\n", &["set a f0 t0 l0", "body []", "get a"]),
        (b"set a 0 0 1\r\nx\nversion\r\n", &[SET, "bad data chunk [x]", "ERROR"]),
        (
            b"set a 0 0 1 noreply\r\nxyz\r\nversion\r\n",
            &["set a f0 t0 l1 quiet", "bad data chunk [x]", "ERROR", "version"],
        ),
        (b"set a 0 0 7\r\nnoreply\r\nversion\r\n", &["set a f0 t0 l7", "body [noreply]", "version"]),
        (
            b"set a 0 0 22\r\n\r\nEND\r\nVALUE x 0 1\r\n\r\n\r\nversion\r\n",
            &["set a f0 t0 l22", "body [\\r\\nEND\\r\\nVALUE x 0 1\\r\\n\\r\\n]", "version"],
        ),
        // Storage: the other verbs.
        (b"set a 0 0 1\r\nx\r\nadd a 0 0 1\r\ny\r\n", &[SET, X, "add a f0 t0 l1", "body [y]"]),
        (b"replace zz1 0 0 1\r\ny\r\n", &["replace zz1 f0 t0 l1", "body [y]"]),
        (b"append zz2 0 0 1\r\ny\r\n", &["append zz2 f0 t0 l1", "body [y]"]),
        (b"prepend a 8 0 1\r\nz\r\nget a\r\n", &["prepend a f8 t0 l1", "body [z]", "get a"]),
        (
            b"set a 7 0 1\r\nx\r\nappend a 9 0 1\r\ny\r\nprepend a 8 0 1\r\nz\r\nget a\r\n",
            &["set a f7 t0 l1", X, "append a f9 t0 l1", "body [y]", "prepend a f8 t0 l1", "body [z]", "get a"],
        ),
        (b"set a 0 0 1\r\nx\r\ncas a 0 0 1 0\r\ny\r\n", &[SET, X, "cas a f0 t0 l1 cas0", "body [y]"]),
        (b"cas zz3 0 0 1 1\r\ny\r\n", &["cas zz3 f0 t0 l1 cas1", "body [y]"]),
        (b"cas a 0 0 1 0 noreply\r\ny\r\n", &["cas a f0 t0 l1 cas0 quiet", "body [y]"]),
        (b"cas a 0 0 1\r\nx\r\n", &[BAD]),
        (b"cas a 0 0 1 foo\r\nx\r\n", &[BAD]),
        (b"cas a 0 0 1 noreply\r\nx\r\nversion\r\n", &["refused silently", "version"]),
        (b"cas a 0 0 1 18446744073709551616\r\nx\r\n", &[BAD]),
        // Arithmetic.
        (b"incr zz4 1\r\n", &["incr zz4 by 1"]),
        (b"decr a 11\r\n", &["decr a by 11"]),
        (b"incr a 18446744073709551615 noreply\r\n", &["incr a by 18446744073709551615 quiet"]),
        (b"set a 0 0 20\r\n18446744073709551615\r\nincr a 1\r\nget a\r\n", &["set a f0 t0 l20", "body [18446744073709551615]", "incr a by 1", "get a"]),
        (b"set a 0 0 20\r\n18446744073709551616\r\nincr a 1\r\n", &["set a f0 t0 l20", "body [18446744073709551616]", "incr a by 1"]),
        (b"set a 0 0 2\r\n10\r\ndecr a 11\r\nget a\r\n", &["set a f0 t0 l2", "body [10]", "decr a by 11", "get a"]),
        (b"set a 0 0 3\r\n100\r\ndecr a 1\r\nget a\r\n", &["set a f0 t0 l3", "body [100]", "decr a by 1", "get a"]),
        (b"set a 0 0 2\r\n99\r\nincr a 1\r\nget a\r\n", &["set a f0 t0 l2", "body [99]", "incr a by 1", "get a"]),
        (b"set a 0 0 2\r\n-1\r\nincr a 1\r\n", &["set a f0 t0 l2", "body [-1]", "incr a by 1"]),
        (b"set a 0 0 0\r\n\r\nincr a 1\r\n", &["set a f0 t0 l0", "body []", "incr a by 1"]),
        (b"set a 0 0 3\r\n007\r\nincr a 1\r\nget a\r\n", &["set a f0 t0 l3", "body [007]", "incr a by 1", "get a"]),
        (b"set a 0 0 3\r\n 7 \r\nincr a 1\r\n", &["set a f0 t0 l3", "body [ 7 ]", "incr a by 1"]),
        (b"set a 0 0 21\r\n000000000000000000001\r\nincr a 1\r\n", &["set a f0 t0 l21", "body [000000000000000000001]", "incr a by 1"]),
        (b"set a 0 0 1\r\nx\r\nincr a 1\r\n", &["set a f0 t0 l1", "body [x]", "incr a by 1"]),
        (b"set a 0 0 1\r\n1\r\nincr a x\r\n", &["set a f0 t0 l1", "body [1]", DELTA]),
        (b"incr a x\r\n", &[DELTA]),
        (b"incr a -1\r\n", &[DELTA]),
        (b"decr a 18446744073709551616\r\n", &[DELTA]),
        (b"incr a\r\n", &[BAD]),
        (b"incr a 1 2 3\r\n", &["ERROR"]),
        // Touch, delete.
        (b"touch zz5 0\r\n", &["touch zz5 t0"]),
        (b"touch a foo\r\n", &[TIME]),
        (b"touch a\r\n", &[BAD]),
        (b"touch a -1\r\n", &["touch a t-1"]),
        (b"touch nokey 0 noreply\r\n", &["touch nokey t0 quiet"]),
        (b"set a 0 0 1\r\nx\r\ntouch a 0\r\n", &[SET, X, "touch a t0"]),
        (b"set a 0 0 1\r\nx\r\ntouch a -1\r\nget a\r\n", &[SET, X, "touch a t-1", "get a"]),
        (b"set a 0 0 1\r\nx\r\ndelete a\r\n", &[SET, X, "delete a"]),
        (b"set a 0 0 1\r\nx\r\ndelete a 0\r\n", &[SET, X, "delete a"]),
        (b"delete zz7\r\n", &["delete zz7"]),
        (b"delete a 0\r\n", &["delete a"]),
        (b"delete a 1\r\n", &[USAGE]),
        (b"delete a 10 noreply\r\nversion\r\n", &["refused silently", "version"]),
        (b"delete a noreply\r\nversion\r\n", &["delete a quiet", "version"]),
        (b"delete\r\n", &[BAD]),
        (b"delete a 0 noreply\r\nversion\r\n", &["delete a quiet", "version"]),
        (b"delete a noreply 0\r\n", &[USAGE]),
        (b"delete a 0 0 0\r\n", &["ERROR"]),
        // Flush, verbosity.
        (b"flush_all\r\n", &["flush_all t0"]),
        (b"flush_all 0\r\n", &["flush_all t0"]),
        (b"flush_all noreply\r\nversion\r\n", &["flush_all t0 quiet", "version"]),
        (b"flush_all 0 noreply\r\nversion\r\n", &["flush_all t0 quiet", "version"]),
        (b"flush_all 86400\r\n", &["flush_all t86400"]),
        (b"flush_all foo\r\n", &[TIME]),
        (b"flush_all -1\r\n", &["flush_all t-1"]),
        (b"flush_all 1 noreply x\r\nversion\r\n", &["ERROR", "version"]),
        (b"verbosity 0\r\n", &["verbosity"]),
        (b"verbosity 0 noreply\r\n", &["verbosity quiet"]),
        (b"verbosity\r\n", &[BAD]),
        (b"verbosity noreply\r\nversion\r\n", &["refused silently", "version"]),
        (b"verbosity foo\r\n", &[BAD]),
        (b"verbosity foo bar my\r\n", &["ERROR"]),
        // Service.
        (b"version\r\n", &["version"]),
        (b"version x\r\n", &["version"]),
        (b"quit\r\n", &["quit", "close Quit"]),
        (b"quit x\r\n", &["quit", "close Quit"]),
        (b"quit x\r\nversion\r\n", &["quit", "close Quit"]),
        (b"shutdown\r\n", &["ERROR: shutdown not enabled"]),
        (b"shutdown graceful\r\n", &["ERROR: shutdown not enabled"]),
        (b"stats bogus\r\n", &["stats Some(\"bogus\")"]),
        (b"stats reset\r\n", &["stats Some(\"reset\")"]),
        (b"stats\r\n", &["stats None"]),
        (b"lru mode flat\r\n", &["ERROR"]),
        (b"lru\r\n", &["ERROR"]),
        (b"slabs\r\n", &["ERROR"]),
        (b"slabs reassign 0 1\r\n", &["ERROR"]),
        (b"cache_memlimit 4\r\n", &["ERROR"]),
        (b"lru_crawler enable\r\n", &["ERROR"]),
        (b"watch frob\r\n", &["ERROR"]),
        (b"watch fetchers\r\n", &["ERROR"]),
        (b"misbehave\r\n", &["ERROR"]),
        (b"debugtime 1\r\n", &["ERROR"]),
        (b"mn\r\n", &["ERROR"]),
        (b"mg a v\r\nms a 2\r\nhi\r\n", &["ERROR", "ERROR", "ERROR"]),
        (b"md a\r\nma a\r\nme a\r\n", &["ERROR", "ERROR", "ERROR"]),
        // Keys.
        (b"set a\x01b 0 0 1\r\nx\r\nget a\x01b\r\n", &["set a\\x01b f0 t0 l1", X, "get a\\x01b"]),
        (b"set \xc3\xa9\xff 0 0 1\r\nx\r\nget \xc3\xa9\xff\r\n", &["set \\xc3\\xa9\\xff f0 t0 l1", X, "get \\xc3\\xa9\\xff"]),
        (b"set \xa0\xa1\xc3\xa9 0 0 1\r\nx\r\n", &["set \\xa0\\xa1\\xc3\\xa9 f0 t0 l1", X]),
        (b"set a\x00b 0 0 1\r\nx\r\nget a\x00b\r\nget a\r\n", &[BAD, BAD, "get a"]),
        (b"set a\tb 0 0 1\r\nx\r\nget a\tb\r\n", &["set a\\tb f0 t0 l1", X, "get a\\tb"]),
        // Other protocols.
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &["close HttpRequest"]),
        (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", &["close HttpRequest"]),
        (b"PUT /asdf/asd/fasdfasdf/sadf HTTP/1.1\r\n", &["close HttpRequest"]),
        (b"DELETE HTTP/1.1\r\n", &["close HttpRequest"]),
        (b"\x80\x0b\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", &["close BinaryProtocol"]),
        (b"\x16\x03\x01\x02\x00\x01\r\n", &["ERROR"]),
        (b"Host: x\r\n", &["ERROR"]),
        // Every kind of silence in one stream.
        (
            b"set a 0 0 1 noreply\r\nx\r\nadd a 0 0 1 noreply\r\ny\r\ndelete n noreply\r\nincr n 1 noreply\r\nget a\r\n",
            &[
                "set a f0 t0 l1 quiet",
                X,
                "add a f0 t0 l1 quiet",
                "body [y]",
                "delete n quiet",
                "incr n by 1 quiet",
                "get a",
            ],
        ),
    ];

    #[test]
    fn each_request_comes_to_what_memcached_taught_its_clients() {
        for (stream, expected) in TABLE {
            assert_eq!(phrases(stream, &[]), *expected, "{}", text(stream));
        }
    }

    #[test]
    fn a_cut_at_any_octet_changes_nothing() {
        for (stream, _) in TABLE {
            let whole = phrases(stream, &[]);
            for first in 0..=stream.len() {
                assert_eq!(phrases(stream, &[first]), whole, "{} cut at {first}", text(stream));
                let second = first.midpoint(stream.len());
                assert_eq!(phrases(stream, &[first, second]), whole, "{} cut at {first}, {second}", text(stream));
            }
            let every = (0..stream.len()).collect::<Vec<_>>();
            assert_eq!(phrases(stream, &every), whole, "{} octet by octet", text(stream));
        }
    }

    #[test]
    fn a_key_of_251_octets_is_refused_and_its_body_vanishes() {
        let (good, long) = ("k".repeat(250), "k".repeat(251));
        let good_set = format!("set {good} f0 t0 l1");
        let cases = [
            (format!("get {good}\r\n"), vec![format!("get {good}")]),
            (format!("get {long}\r\n"), vec![BAD.into()]),
            (format!("get a {long} b\r\n"), vec![BAD.into()]),
            (format!("gat 0 {long}\r\n"), vec![BAD.into()]),
            (format!("incr {long} 1\r\n"), vec![BAD.into()]),
            (format!("touch {long} 1\r\n"), vec![BAD.into()]),
            (format!("delete {long}\r\n"), vec![BAD.into()]),
            (format!("set {good} 0 0 1\r\nx\r\n"), vec![good_set, X.into()]),
            (format!("set {long} 0 0 9\r\nflush_all\r\nget a\r\n"), vec![BAD.into(), "get a".into()]),
            (
                format!("set {long} 0 0 9 noreply\r\nflush_all\r\nget a\r\n"),
                vec!["refused silently".into(), "get a".into()],
            ),
        ];
        for (stream, expected) in cases {
            assert_eq!(phrases(stream.as_bytes(), &[]), expected, "{stream:?}");
        }
    }

    /// A first request above 2 KiB once closed the connection of a server that bounded all lines alike.
    #[test]
    fn a_retrieval_of_many_keys_is_one_command_however_it_is_cut() {
        let names = (0..1000).map(|i| format!("key-of-25-octets-{i:08}")).collect::<Vec<_>>();
        let stream = format!("get {}\r\n", names.join(" "));
        let expected = [format!("get {}", names.join(","))];
        assert_eq!(phrases(stream.as_bytes(), &[]), expected);
        for cut in (0..stream.len()).step_by(1021) {
            assert_eq!(phrases(stream.as_bytes(), &[cut]), expected);
        }
    }

    #[test]
    fn an_endless_line_is_closed_at_2048_octets_unless_it_is_a_retrieval() {
        assert_eq!(phrases(&[b'x'; 2047], &[]), [""; 0]);
        assert_eq!(phrases(format!("get {}", "a".repeat(4096)).as_bytes(), &[]), [""; 0]);
        assert_eq!(phrases(&[b'x'; 2049], &[]), ["close LineTooLong"]);
        for verb in ["get ", "gets ", "gat 0 ", "gats 0 "] {
            assert_eq!(phrases(format!("{verb}{}", "a ".repeat(10_000)).as_bytes(), &[]), [""; 0]);
            assert_eq!(phrases(format!("{verb}{}", "a ".repeat(40_000)).as_bytes(), &[]), ["close LineTooLong"]);
        }
    }

    /// Left-over octets of a large value once stopped a debug build of memcached.
    #[test]
    fn a_large_value_without_its_ending_is_one_bad_chunk() {
        let mut stream = b"set k 0 0 600000\r\n".to_vec();
        stream.resize(stream.len() + 600_000, b'x');
        stream.extend_from_slice(b"zz\r\nversion\r\n");
        let phrases = phrases(&stream, &[70_000, 600_019]);
        assert!(phrases[1].starts_with("bad data chunk [xxx"));
        assert_eq!(phrases[2..], ["ERROR", "version"]);
    }

    /// A conversation that has just given out `set a 0 0 <len>`.
    fn after_header(len: u64) -> Conversation {
        let mut line = b"set a 0 0 ".to_vec();
        append_number(&mut line, len);
        line.extend_from_slice(b"\r\n");
        let mut conversation = Conversation::new(LINE_BYTES);
        assert!(matches!(conversation.step(&line), (_, Step::Command(Command::Store(_)))));
        conversation
    }

    #[test]
    fn a_swallowed_body_and_its_ending_vanish_without_a_word() {
        let mut conversation = after_header(5);
        conversation.swallow_body(5);
        assert!(conversation.is_swallowing());
        assert_eq!(conversation.step(b"12"), (2, Step::NeedMore));
        assert_eq!(conversation.body_remaining(), 5);
        assert_eq!(conversation.step(b"345\r\nversion\n"), (13, Step::Command(Command::Version)));
        assert!(!conversation.is_swallowing());
    }

    #[test]
    fn octets_to_be_swallowed_may_be_thrown_away_by_the_caller() {
        let len = i64::MAX as u64;
        let mut conversation = after_header(len);
        conversation.swallow_body(len);
        conversation.body_taken(len + 1);
        assert_eq!(conversation.step(b"xquit\n"), (6, Step::Command(Command::Quit)));
    }

    #[test]
    fn a_body_is_told_of_and_taken_by_the_caller() {
        let mut conversation = after_header(6);
        conversation.accept_body(6);
        assert_eq!(conversation.step(b""), (0, Step::Body { remaining: 6, available: 0 }));
        conversation.body_taken(2);
        assert_eq!(conversation.step(b"345"), (0, Step::Body { remaining: 4, available: 3 }));
        conversation.body_taken(3);
        assert_eq!(conversation.step(b"6\r\n"), (0, Step::Body { remaining: 1, available: 1 }));
        conversation.body_taken(1);
        assert_eq!(conversation.body_remaining(), 0);
        assert_eq!(conversation.step(b"\r"), (0, Step::NeedMore));
        assert_eq!(conversation.step(b"\r\n"), (2, Step::BodyEnd { intact: true }));
    }

    #[test]
    fn an_abandoned_body_vanishes_wherever_it_stood() {
        for taken in 0..=4 {
            let mut conversation = after_header(4);
            conversation.accept_body(4);
            conversation.body_taken(taken);
            conversation.abandon_body();
            assert_eq!(conversation.body_remaining(), 6 - taken);
            let rest = &b"abcd\r\nversion\n"[taken as usize..];
            assert_eq!(conversation.step(rest), (rest.len(), Step::Command(Command::Version)));
        }
        let mut conversation = after_header(4);
        conversation.abandon_body();
        assert_eq!(conversation.step(b"abcd\r\nversion\n"), (14, Step::Command(Command::Version)));
    }

    #[test]
    fn abandoning_where_no_body_is_under_way_does_nothing() {
        let mut conversation = Conversation::new(LINE_BYTES);
        conversation.abandon_body();
        assert_eq!(conversation.step(b"version\n"), (8, Step::Command(Command::Version)));
        let mut conversation = after_header(4);
        conversation.swallow_body(4);
        conversation.abandon_body();
        assert_eq!(conversation.body_remaining(), 6);
    }

    #[test]
    fn a_closed_conversation_stays_closed() {
        let mut conversation = Conversation::new(LINE_BYTES);
        for input in [&b"\x80"[..], b"version\r\n", b""] {
            assert_eq!(conversation.step(input), (0, Step::Close(CloseReason::BinaryProtocol)));
        }
    }

    #[test]
    #[should_panic(expected = "neither accepted nor swallowed")]
    fn a_body_nobody_decided_on_is_never_read_as_commands() {
        after_header(1).step(b"x\r\n");
    }

    #[test]
    #[should_panic(expected = "4 octets of a body were taken and 3 remained")]
    fn taking_more_than_remains_is_a_bug_of_the_caller() {
        let mut conversation = after_header(3);
        conversation.accept_body(3);
        conversation.body_taken(4);
    }
}
