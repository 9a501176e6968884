//! The server's half of the memcache conversation: lines by INLINE, bodies by windows alone.
//!
//! ```text
//!          Command(Store)        accept_body(n)         take_body               CR LF
//!   Line ----------------> Header -----------> Body(n) ----------> Trailer -------------> Line
//!    |  \                    |                   |                    |       BodyEnd
//!    |   \ Refused           | swallow_body      | abandon_body       | abandon_body
//!    |    v                  v                   v                    v
//!    |   Swallow(m) ------------------------------------------> SwallowTrailer ---------> Line
//!    |      windows vanish, each is released at once                  CR LF
//!    +-- Close, Quit --> Closed
//! ```
//!
//! The grammar of lines is that of [`wire::memcache`](crate::wire::memcache); only the framing differs. What comes where it
//! does not belong is refused when the conversation gets there, never earlier: a READY behind a line that was not read
//! yet may well belong to it.

use super::poison::Poison;
use super::stream::Inbound;
use super::window::RxLease;
use crate::wire::memcache::parse::{CloseReason, Parsed, parse_line};
use crate::wire::memcache::request::Command;

/// What one call of [`Conversation::step`] found.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Step<'a> {
    /// Nothing can be said before more has come.
    NeedMore,
    /// A request. After [`Command::Store`] the caller says [`Conversation::accept_body`] or
    /// [`Conversation::swallow_body`] before the next step. After [`Command::Quit`] every step is a [`Step::Close`].
    Command(Command<'a>),
    /// A line that is refused, without a word under `noreply`. If a body follows it, the coming steps throw it away.
    Refused { reply: Option<&'static [u8]> },
    /// The next `len` of the `remaining` octets of a body lie in a window: [`Conversation::take_body`] takes it. Until
    /// then it holds the peer back.
    Body { remaining: u64, len: u32 },
    /// The body is whole and its CR LF was read.
    BodyEnd,
    /// Nothing that follows can be trusted, or counts: close without a word.
    Close(CloseReason),
}

/// The framing of one connection's requests.
#[derive(Clone, Debug)]
pub struct Conversation {
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Line,
    /// A storage line was given out; the caller has not yet said what becomes of its body.
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
    SwallowTrailer,
    Closed(CloseReason),
}

impl Default for Conversation {
    fn default() -> Self {
        Self::new()
    }
}

impl Conversation {
    /// A conversation before its first octet.
    pub const fn new() -> Self {
        Self { state: State::Line }
    }

    /// Goes on by one step.
    ///
    /// # Errors
    /// [`Poison`]: the peer sent what does not belong there. The connection must end.
    ///
    /// # Panics
    /// If the caller has not said what becomes of the body of the storage line before.
    pub fn step<'a>(&mut self, inbound: &'a mut Inbound) -> Result<Step<'a>, Poison> {
        match self.state {
            State::Header { .. } => panic!("a storage line was given out, and its body neither accepted nor swallowed"),
            State::Closed(reason) => return Ok(Step::Close(reason)),
            State::Body { remaining } => {
                return Ok(inbound.body(remaining)?.map_or(Step::NeedMore, |len| Step::Body { remaining, len }));
            }
            State::Trailer => {
                if !inbound.trailer()? {
                    return Ok(Step::NeedMore);
                }
                self.state = State::Line;
                return Ok(Step::BodyEnd);
            }
            State::Line | State::Swallow { .. } | State::SwallowTrailer => {}
        }
        while let State::Swallow { remaining } = self.state {
            if inbound.body(remaining)?.is_none() {
                return Ok(Step::NeedMore);
            }
            drop(self.take_body(inbound));
        }
        if self.state == State::SwallowTrailer {
            if !inbound.trailer()? {
                return Ok(Step::NeedMore);
            }
            self.state = State::Line;
        }
        let Some(len) = inbound.line()? else { return Ok(Step::NeedMore) };
        let line = &inbound.read(len + 2)[..len];
        Ok(match parse_line(line) {
            Parsed::Command { command, .. } => {
                match command {
                    Command::Store(header) => self.state = State::Header { len: header.len },
                    Command::Quit => self.state = State::Closed(CloseReason::Quit),
                    _ => {}
                }
                Step::Command(command)
            }
            Parsed::Refused { reply, swallow, .. } => {
                match swallow.checked_sub(2) {
                    None => {}
                    Some(len) => self.swallow(len),
                }
                Step::Refused { reply }
            }
            Parsed::Close(reason) => {
                self.state = State::Closed(reason);
                Step::Close(reason)
            }
            Parsed::NeedMore => Step::NeedMore,
        })
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

    /// The body of the storage line just given out is not wanted: its windows are released unseen.
    ///
    /// # Panics
    /// As [`Conversation::accept_body`].
    pub fn swallow_body(&mut self, len: u64) {
        self.expect_header(len);
        self.swallow(len);
    }

    /// The rest of the body under way is no longer wanted. Does nothing where no body is under way.
    pub fn abandon_body(&mut self) {
        match self.state {
            State::Header { len } => self.swallow(len),
            State::Body { remaining } => self.swallow(remaining),
            State::Trailer => self.state = State::SwallowTrailer,
            State::Line | State::Swallow { .. } | State::SwallowTrailer | State::Closed(_) => {}
        }
    }

    /// Takes the window that [`Step::Body`] told of.
    ///
    /// # Panics
    /// If the last step was none.
    pub fn take_body(&mut self, inbound: &mut Inbound) -> RxLease {
        let lease = inbound.take_lease().expect("a step told of a window");
        match &mut self.state {
            State::Body { remaining } | State::Swallow { remaining } => *remaining -= u64::from(lease.len()),
            _ => panic!("no body is under way"),
        }
        match self.state {
            State::Body { remaining: 0 } => self.state = State::Trailer,
            State::Swallow { remaining: 0 } => self.state = State::SwallowTrailer,
            _ => {}
        }
        lease
    }

    /// Octets of the body still to come; while swallowing, octets still to vanish; zero otherwise.
    pub fn body_remaining(&self) -> u64 {
        match self.state {
            State::Body { remaining } | State::Swallow { remaining } => remaining,
            _ => 0,
        }
    }

    /// Whether what comes next vanishes: nobody waits for it.
    pub fn is_swallowing(&self) -> bool {
        matches!(self.state, State::Swallow { .. } | State::SwallowTrailer)
    }

    fn expect_header(&self, len: u64) {
        assert_eq!(self.state, State::Header { len }, "no storage line with a body of {len} octets was just given out");
    }

    fn swallow(&mut self, remaining: u64) {
        self.state = if remaining == 0 { State::SwallowTrailer } else { State::Swallow { remaining } };
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Negotiated, WindowGeometry};
    use super::super::window::RxWindows;
    use super::*;
    use crate::wire::memcache::response;
    use crate::wire::seq::BulkSequence;
    use std::num::NonZeroU32;

    /// One side of a conversation: what came, and what becomes of it.
    struct Peer {
        inbound: Inbound,
        windows: RxWindows,
        next: u64,
        conversation: Conversation,
        leases: Vec<RxLease>,
    }

    /// What comes: text, or a window of so many octets.
    #[derive(Clone, Copy)]
    enum Come {
        Text(&'static str),
        Ready(u32),
    }
    use Come::{Ready, Text};

    impl Peer {
        fn new() -> Self {
            let geometry = WindowGeometry::new(4096, 64).unwrap();
            let windows = RxWindows::new(geometry, Negotiated::between(geometry, geometry));
            let (inbound, conversation) = (Inbound::new(0), Conversation::new());
            Self { inbound, windows, next: 1, conversation, leases: Vec::new() }
        }

        fn come(&mut self, come: Come) {
            match come {
                Text(text) => self.inbound.handle_inline(text.as_bytes()),
                Ready(len) => {
                    let sequence = BulkSequence::new(self.next).unwrap();
                    self.next += 1;
                    let lease = self.windows.handle_ready(sequence, NonZeroU32::new(len).unwrap()).unwrap();
                    self.inbound.handle_ready(lease);
                }
            }
        }

        /// Goes on until more is needed: one word for each step; `keep` accepts bodies, else they are swallowed.
        fn words(&mut self, keep: bool) -> Vec<String> {
            let mut words = Vec::new();
            loop {
                let (conversation, inbound) = (&mut self.conversation, &mut self.inbound);
                words.push(match conversation.step(inbound) {
                    Ok(Step::NeedMore) => return words,
                    Ok(Step::Command(Command::Store(header))) => {
                        let (len, word) = (header.len, format!("store {}", header.key.escape_ascii()));
                        if keep {
                            conversation.accept_body(len)
                        } else {
                            conversation.swallow_body(len)
                        }
                        word
                    }
                    Ok(Step::Command(Command::Get { keys, .. })) => {
                        format!("get {}", keys.as_bytes().escape_ascii())
                    }
                    Ok(Step::Command(command)) => format!("{command:?}").to_lowercase(),
                    Ok(Step::Refused { reply }) => if reply.is_some() { "refused" } else { "silent" }.to_owned(),
                    Ok(Step::Body { remaining, len }) => {
                        let word = format!("body {len} of {remaining}");
                        let lease = self.conversation.take_body(&mut self.inbound);
                        self.leases.push(lease);
                        word
                    }
                    Ok(Step::BodyEnd) => "end".to_owned(),
                    Ok(Step::Close(reason)) => {
                        words.push(format!("close {reason:?}").to_lowercase());
                        return words;
                    }
                    Err(poison) => {
                        words.push(poison.cause().to_owned());
                        return words;
                    }
                });
            }
        }
    }

    /// Whatever came is there before the first step, and the same comes step by step: both must come to `expected`.
    fn check(comes: &[Come], keep: bool, expected: &[&str]) {
        let mut at_once = Peer::new();
        comes.iter().for_each(|come| at_once.come(*come));
        assert_eq!(at_once.words(keep), expected, "at once");
        let mut one_by_one = Peer::new();
        let mut words = Vec::new();
        let pieces = comes.iter().flat_map(|come| match come {
            Text(text) => (0..text.len()).map(|at| Text(&text[at..=at])).collect(),
            Ready(_) => vec![*come],
        });
        for piece in pieces {
            if words.len() < expected.len() {
                one_by_one.come(piece);
                words.extend(one_by_one.words(keep));
            }
        }
        assert_eq!(words, expected, "octet by octet");
    }

    /// Every state against every event: text that fits, text that does not, a window that fits, one that does not.
    #[test]
    fn what_belongs_where_is_decided_by_this_table() {
        let table: &[(&[Come], &[&str])] = &[
            // Line.
            (&[Text("get a\r\n")], &["get a"]),
            (&[Ready(1)], &["stray_ready"]),
            (&[Text("get"), Ready(1)], &["stray_ready"]),
            (&[Text("get a\r\n"), Ready(1)], &["get a", "stray_ready"]),
            (&[Text("quit\r\n")], &["quit", "close quit"]),
            (&[Text("\r\n")], &["refused"]),
            // Body.
            (&[Text("set k 0 0 3\r\n"), Ready(3), Text("\r\n")], &["store k", "body 3 of 3", "end"]),
            (
                &[Text("set k 0 0 3\r\n"), Ready(1), Ready(2), Text("\r\n")],
                &["store k", "body 1 of 3", "body 2 of 2", "end"],
            ),
            (&[Text("set k 0 0 3\r\n"), Ready(4)], &["store k", "ready_beyond_body"]),
            (&[Text("set k 0 0 3\r\n"), Ready(2), Ready(2)], &["store k", "body 2 of 3", "ready_beyond_body"]),
            (&[Text("set k 0 0 3\r\n"), Text("a")], &["store k", "inline_body"]),
            (&[Text("set k 0 0 3\r\n\r\n")], &["store k", "inline_body"]),
            (&[Text("set k 0 0 3\r\n"), Ready(2), Text("a")], &["store k", "body 2 of 3", "inline_body"]),
            // Trailer.
            (&[Text("set k 0 0 0\r\n\r\n")], &["store k", "end"]),
            (&[Text("set k 0 0 0\r\n"), Ready(1)], &["store k", "trailer"]),
            (&[Text("set k 0 0 3\r\n"), Ready(3), Ready(1)], &["store k", "body 3 of 3", "trailer"]),
            (&[Text("set k 0 0 3\r\n"), Ready(3), Text("\r"), Ready(1)], &["store k", "body 3 of 3", "trailer"]),
            (&[Text("set k 0 0 3\r\n"), Ready(3), Text("x")], &["store k", "body 3 of 3", "trailer"]),
            (&[Text("set k 0 0 3\r\n"), Ready(3), Text("\rx")], &["store k", "body 3 of 3", "trailer"]),
            (&[Text("set k 0 0 3\r\n"), Ready(3), Text("\n")], &["store k", "body 3 of 3", "trailer"]),
        ];
        for (comes, expected) in table {
            check(comes, true, expected);
        }
    }

    /// The same for bodies that nobody wants, whoever decided so.
    #[test]
    fn what_vanishes_is_decided_by_this_table() {
        let bad = Text("set k x 0 3\r\n");
        let table: &[(&[Come], &[&str])] = &[
            (&[Text("set k 0 0 3\r\n"), Ready(1), Ready(2), Text("\r\nget a\r\n")], &["store k", "get a"]),
            (&[Text("set k 0 0 0\r\n\r\nget a\r\n")], &["store k", "get a"]),
            (&[bad, Ready(3), Text("\r\nget a\r\n")], &["refused", "get a"]),
            (&[Text("set k x 0 3 noreply\r\n"), Ready(3), Text("\r\nget a\r\n")], &["silent", "get a"]),
            (&[Text("set k x 0 0\r\n\r\nget a\r\n")], &["refused", "get a"]),
            (&[bad, Ready(4)], &["refused", "ready_beyond_body"]),
            (&[bad, Text("a")], &["refused", "inline_body"]),
            (&[bad, Ready(3), Text("ab")], &["refused", "trailer"]),
            (&[bad, Ready(3), Ready(1)], &["refused", "trailer"]),
            (&[Text("set k 0 0 x\r\nget a\r\n")], &["refused", "get a"]),
        ];
        for (comes, expected) in table {
            check(comes, false, expected);
        }
    }

    #[test]
    fn a_trailer_may_share_its_record_with_the_next_header() {
        let comes = [
            Text("version\r\nset a 0 0 1\r\n"),
            Ready(1),
            Text("\r\nset b 0 0 2\r\n"),
            Ready(2),
            Text("\r\nget a b\r\n"),
        ];
        let expected = ["version", "store a", "body 1 of 1", "end", "store b", "body 2 of 2", "end", "get a b"];
        check(&comes, true, &expected);
    }

    #[test]
    fn a_window_is_released_once_its_body_is_taken_and_dropped() {
        let mut peer = Peer::new();
        peer.come(Text("set k 0 0 3\r\n"));
        peer.come(Ready(3));
        assert_eq!(peer.words(true), ["store k", "body 3 of 3"]);
        assert_eq!(peer.windows.releases().poll(), None);
        peer.leases.clear();
        assert_eq!(peer.windows.releases().poll(), Some(BulkSequence::FIRST));
    }

    #[test]
    fn an_abandoned_body_vanishes_to_its_end() {
        for taken in 0..=2 {
            let mut peer = Peer::new();
            let comes = [Text("set k 0 0 3\r\n"), Ready(1), Ready(2), Text("\r\nget a\r\n")];
            comes.into_iter().for_each(|come| peer.come(come));
            let Ok(Step::Command(Command::Store(header))) = peer.conversation.step(&mut peer.inbound) else { panic!() };
            let len = header.len;
            if taken > 0 {
                peer.conversation.accept_body(len);
            }
            for _ in 0..taken {
                drop(peer.conversation.take_body(&mut peer.inbound));
            }
            peer.conversation.abandon_body();
            assert!(peer.conversation.is_swallowing());
            assert_eq!(peer.words(true), ["get a"], "{taken} taken");
            assert_eq!(peer.windows.releases().poll().map(BulkSequence::get), Some(2));
        }
    }

    #[test]
    fn lines_end_with_cr_lf_alone_and_have_a_limit() {
        check(&[Text("get a\n"), Text("b\r\n")], true, &["refused"]);
        check(&[Text("get a\rb\r\n")], true, &["refused"]);
        for (count, is_long) in [(8192 - 4, false), (8192 - 3, true)] {
            for end in ["\r\n", ""] {
                let mut peer = Peer::new();
                let line = format!("get {}{end}", " ".repeat(count));
                for piece in line.as_bytes().chunks(191) {
                    peer.inbound.handle_inline(piece);
                }
                let words = peer.words(true);
                match (is_long, end.is_empty()) {
                    (true, false) => assert_eq!(words, ["line_too_long"]),
                    (false, false) => assert_eq!(words, ["refused"]),
                    // One octet more could still be the CR.
                    (_, true) => assert_eq!(words, [""; 0]),
                }
            }
        }
        let mut peer = Peer::new();
        peer.inbound.handle_inline(&[b'x'; 8194]);
        assert_eq!(peer.words(true), ["line_too_long"]);
    }

    #[test]
    fn refusals_are_those_of_the_other_doors() {
        let mut peer = Peer::new();
        peer.come(Text("frob\r\n"));
        assert_eq!(peer.conversation.step(&mut peer.inbound), Ok(Step::Refused { reply: Some(response::ERROR) }));
    }
}
