//! One request line, from octets to a [`Command`] or a refusal.

use memchr::{memchr, memchr3};

use super::number::{parse_exptime, parse_len, parse_u32, parse_u64};
use super::request::{Command, Direction, KEY_BYTES_MAX, Keys, StoreHeader, StoreVerb, split_token};
use super::response;

/// Longest line in bytes that is no retrieval, its LF not counted. memcached closes at the same length.
pub const LINE_BYTES_MAX: usize = 2048;

/// Blanks memcached tolerates before the verb of a line longer than [`LINE_BYTES_MAX`].
const INDENT_BYTES_MAX: usize = 100;

/// First octet of every request of memcached's binary protocol.
const BINARY_MAGIC: u8 = 0x80;

/// Octets after a body: CR LF.
pub(super) const TRAILER_BYTES: u64 = 2;

/// What the octets at the start of a line are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Parsed<'a> {
    /// The line is not whole. Comes only while the input is no longer than the line may be.
    NeedMore,
    /// A request. `consumed` octets, LF included, were its line.
    Command { command: Command<'a>, consumed: usize },
    /// A line that is refused. `reply` is `None` under `noreply`. `swallow` octets of body and CR LF follow the
    /// `consumed` ones and must be thrown away.
    Refused { reply: Option<&'static [u8]>, consumed: usize, swallow: u64 },
    /// Nothing that follows can be trusted: close without a word.
    Close(CloseReason),
}

/// Why a stream cannot go on.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum CloseReason {
    /// The peer speaks memcached's binary protocol.
    BinaryProtocol,
    /// The line is an HTTP request: a browser was lured here, and its body may be chosen by somebody else.
    HttpRequest,
    /// The line is longer than its kind may be.
    LineTooLong,
    /// The peer sent `quit`; octets behind it do not count.
    Quit,
}

/// Reads lines. Remembers how far it looked for an LF, so a line that arrives octet by octet costs time linear in its
/// length.
#[derive(Clone, Debug)]
pub struct Parser {
    retrieval_bytes_max: usize,
    scanned_bytes: usize,
}

impl Parser {
    /// A parser for retrieval lines of up to `line_bytes_max` bytes, LF not counted, and for other lines of up to
    /// [`LINE_BYTES_MAX`]. A `line_bytes_max` below that counts as that.
    pub fn new(line_bytes_max: usize) -> Self {
        Self { retrieval_bytes_max: line_bytes_max.max(LINE_BYTES_MAX), scanned_bytes: 0 }
    }

    /// Reads the line at the start of `input`. After [`Parsed::NeedMore`] the next `input` starts with the same octets
    /// and has more behind them.
    pub fn parse<'a>(&mut self, input: &'a [u8]) -> Parsed<'a> {
        if input.first() == Some(&BINARY_MAGIC) {
            return Parsed::Close(CloseReason::BinaryProtocol);
        }
        let scanned = self.scanned_bytes.min(input.len());
        let end = memchr(b'\n', &input[scanned..]).map(|offset| scanned + offset);
        let line_bytes = end.unwrap_or(input.len());
        // The same bound whether the LF is in sight or not: the answer must not depend on how the octets were cut.
        if line_bytes > LINE_BYTES_MAX && (line_bytes > self.retrieval_bytes_max || !starts_retrieval(input)) {
            return Parsed::Close(CloseReason::LineTooLong);
        }
        let Some(end) = end else {
            self.scanned_bytes = input.len();
            return Parsed::NeedMore;
        };
        self.scanned_bytes = 0;
        let line = &input[..end];
        let consumed = end + 1;
        match judge(line.strip_suffix(b"\r").unwrap_or(line)) {
            Judged::Command(command) => Parsed::Command { command, consumed },
            Judged::Refused { reply, swallow } => Parsed::Refused { reply, consumed, swallow },
            Judged::Close(reason) => Parsed::Close(reason),
        }
    }
}

/// Reads one line that the caller has framed, without its ending, of any length. `consumed` is the line's length.
///
/// For transports that end lines with CR LF alone: an LF within the line is an octet like others, and one that no key may
/// have.
pub fn parse_line(line: &[u8]) -> Parsed<'_> {
    if line.first() == Some(&BINARY_MAGIC) {
        return Parsed::Close(CloseReason::BinaryProtocol);
    }
    let consumed = line.len();
    match judge(line) {
        Judged::Command(command) => Parsed::Command { command, consumed },
        Judged::Refused { reply, swallow } => Parsed::Refused { reply, consumed, swallow },
        Judged::Close(reason) => Parsed::Close(reason),
    }
}

enum Judged<'a> {
    Command(Command<'a>),
    Refused { reply: Option<&'static [u8]>, swallow: u64 },
    Close(CloseReason),
}

fn refused<'a>(reply: &'static [u8], noreply: bool, swallow: u64) -> Judged<'a> {
    Judged::Refused { reply: (!noreply).then_some(reply), swallow }
}

/// Whether a line that is still going on after [`LINE_BYTES_MAX`] may do so.
fn starts_retrieval(line: &[u8]) -> bool {
    let indent = line.iter().take(INDENT_BYTES_MAX + 1).take_while(|&&octet| octet == b' ').count();
    indent <= INDENT_BYTES_MAX
        && [&b"get "[..], b"gets ", b"gat ", b"gats "].iter().any(|verb| line[indent..].starts_with(verb))
}

/// Arguments behind the verb. No command takes more than `KEPT`; of a longer line only count and end matter.
struct Arguments<'a> {
    kept: [&'a [u8]; Arguments::KEPT],
    count: usize,
    last: &'a [u8],
}

impl<'a> Arguments<'a> {
    const KEPT: usize = 6;

    fn split(mut rest: &'a [u8]) -> Self {
        let mut arguments = Self { kept: [&[]; Self::KEPT], count: 0, last: &[] };
        while let Some((token, behind)) = split_token(rest) {
            if let Some(place) = arguments.kept.get_mut(arguments.count) {
                *place = token;
            }
            arguments.last = token;
            arguments.count += 1;
            rest = behind;
        }
        arguments
    }

    fn noreply(&self) -> bool {
        self.last == b"noreply"
    }
}

/// Judges one line without its ending.
///
/// A line too short to tell what its last token means is answered even if that token is `noreply`; later errors of the
/// line are silent under it.
fn judge(line: &[u8]) -> Judged<'_> {
    let Some((verb, rest)) = split_token(line) else {
        return refused(response::ERROR, false, 0);
    };
    match verb {
        b"get" => retrieval(rest, false),
        b"gets" => retrieval(rest, true),
        b"set" => storage(StoreVerb::Set, rest),
        b"add" => storage(StoreVerb::Add, rest),
        b"replace" => storage(StoreVerb::Replace, rest),
        b"append" => storage(StoreVerb::Append, rest),
        b"prepend" => storage(StoreVerb::Prepend, rest),
        b"cas" => storage(StoreVerb::Cas, rest),
        b"gat" => retrieval_and_touch(rest, false),
        b"gats" => retrieval_and_touch(rest, true),
        b"delete" => deletion(rest),
        b"incr" => arithmetic(Direction::Increment, rest),
        b"decr" => arithmetic(Direction::Decrement, rest),
        b"touch" => touch(rest),
        b"flush_all" => flush_all(rest),
        b"stats" => {
            let argument = rest.trim_ascii();
            Judged::Command(Command::Stats { argument: (!argument.is_empty()).then_some(argument) })
        }
        b"version" => Judged::Command(Command::Version),
        b"verbosity" => verbosity(rest),
        b"quit" => Judged::Command(Command::Quit),
        b"shutdown" => refused(response::SHUTDOWN_NOT_ENABLED, false, 0),
        _ => unknown(rest),
    }
}

fn retrieval(rest: &[u8], with_cas: bool) -> Judged<'_> {
    match checked_keys(rest) {
        Some(keys) => Judged::Command(Command::Get { keys, with_cas }),
        None => refused(response::BAD_LINE, false, 0),
    }
}

fn retrieval_and_touch(rest: &[u8], with_cas: bool) -> Judged<'_> {
    let Some((time, rest)) = split_token(rest).filter(|(_, rest)| rest.iter().any(|&octet| octet != b' ')) else {
        return refused(response::BAD_LINE, false, 0);
    };
    let Some(exptime) = parse_exptime(time) else {
        return refused(response::INVALID_EXPTIME, false, 0);
    };
    match checked_keys(rest) {
        Some(keys) => Judged::Command(Command::GetAndTouch { exptime, keys, with_cas }),
        None => refused(response::BAD_LINE, false, 0),
    }
}

fn storage(verb: StoreVerb, rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    let argument_count_max = if verb == StoreVerb::Cas { 6 } else { 5 };
    let [key, flags, exptime, len, cas, _] = arguments.kept;
    let reply = if arguments.count > argument_count_max { response::ERROR } else { response::BAD_LINE };
    let Some(len) = parse_len(len) else {
        return refused(reply, false, 0);
    };
    let noreply = arguments.noreply();
    // Whatever is wrong with the line, a body of that length follows it, and must not be read as commands.
    let swallow = len + TRAILER_BYTES;
    let header = || {
        if arguments.count > argument_count_max || !is_key(key) {
            return None;
        }
        let cas = if verb == StoreVerb::Cas { parse_u64(cas)? } else { 0 };
        let (flags, exptime) = (parse_u32(flags)?, parse_exptime(exptime)?);
        Some(StoreHeader { verb, key, flags, exptime, len, cas, noreply })
    };
    match header() {
        Some(header) => Judged::Command(Command::Store(header)),
        None => refused(reply, noreply, swallow),
    }
}

fn arithmetic(direction: Direction, rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    let noreply = arguments.noreply();
    let [key, delta, ..] = arguments.kept;
    match arguments.count {
        0 | 1 => return refused(response::BAD_LINE, false, 0),
        2 | 3 => {}
        _ => return refused(response::ERROR, noreply, 0),
    }
    if !is_key(key) {
        return refused(response::BAD_LINE, noreply, 0);
    }
    match parse_u64(delta) {
        Some(delta) => Judged::Command(Command::Arithmetic { key, delta, direction, noreply }),
        None => refused(response::INVALID_DELTA, noreply, 0),
    }
}

fn touch(rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    let noreply = arguments.noreply();
    let [key, exptime, ..] = arguments.kept;
    match arguments.count {
        0 | 1 => return refused(response::BAD_LINE, false, 0),
        2 | 3 => {}
        _ => return refused(response::ERROR, noreply, 0),
    }
    if !is_key(key) {
        return refused(response::BAD_LINE, noreply, 0);
    }
    match parse_exptime(exptime) {
        Some(exptime) => Judged::Command(Command::Touch { key, exptime, noreply }),
        None => refused(response::INVALID_EXPTIME, noreply, 0),
    }
}

fn deletion(rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    // `delete noreply` is about a key of that name.
    let noreply = arguments.count > 1 && arguments.noreply();
    let [key, time, ..] = arguments.kept;
    // Old clients send a time to hold the key for. Zero is harmless; any other would be a promise not kept.
    let holds_nothing = time == b"0";
    let valid = match arguments.count {
        0 => return refused(response::BAD_LINE, false, 0),
        1 => true,
        2 => holds_nothing || noreply,
        3 => holds_nothing && noreply,
        _ => return refused(response::ERROR, noreply, 0),
    };
    if !valid {
        return refused(response::DELETE_USAGE, noreply, 0);
    }
    if !is_key(key) {
        return refused(response::BAD_LINE, noreply, 0);
    }
    Judged::Command(Command::Delete { key, noreply })
}

fn flush_all(rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    let noreply = arguments.noreply();
    if arguments.count > 2 {
        return refused(response::ERROR, noreply, 0);
    }
    let delay = if arguments.count == usize::from(noreply) { Some(0) } else { parse_exptime(arguments.kept[0]) };
    match delay {
        Some(delay) => Judged::Command(Command::FlushAll { delay, noreply }),
        None => refused(response::INVALID_EXPTIME, noreply, 0),
    }
}

fn verbosity(rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    let noreply = arguments.noreply();
    if arguments.count > 2 {
        return refused(response::ERROR, noreply, 0);
    }
    match parse_u32(arguments.kept[0]) {
        Some(_) => Judged::Command(Command::Verbosity { noreply }),
        None => refused(response::BAD_LINE, noreply, 0),
    }
}

fn unknown(rest: &[u8]) -> Judged<'_> {
    let arguments = Arguments::split(rest);
    if arguments.last.starts_with(b"HTTP/") {
        return Judged::Close(CloseReason::HttpRequest);
    }
    refused(response::ERROR, arguments.noreply(), 0)
}

fn is_key(token: &[u8]) -> bool {
    (1..=KEY_BYTES_MAX).contains(&token.len()) && memchr3(b'\0', b'\r', b'\n', token).is_none()
}

/// The keys of a retrieval line, if there is one at least and each is a key.
fn checked_keys(rest: &[u8]) -> Option<Keys<'_>> {
    let start = rest.iter().position(|&octet| octet != b' ')?;
    let keys = Keys::from_validated(&rest[start..]);
    // One pass for the octets and one for the lengths: both are cheaper than a look at each key.
    let valid = memchr3(b'\0', b'\r', b'\n', rest).is_none() && keys.clone().all(|key| key.len() <= KEY_BYTES_MAX);
    valid.then_some(keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(input: &[u8]) -> Parsed<'_> {
        Parser::new(65_536).parse(input)
    }

    #[test]
    fn a_line_ends_at_the_first_line_feed() {
        for input in [&b"version\r\nget a\r\n"[..], b"version\nget a\r\n", b"  version  \r\nget a\r\n"] {
            let end = memchr(b'\n', input).unwrap() + 1;
            assert_eq!(parse(input), Parsed::Command { command: Command::Version, consumed: end });
        }
        assert_eq!(parse(b""), Parsed::NeedMore);
        assert_eq!(parse(b"version\r"), Parsed::NeedMore);
    }

    #[test]
    fn only_one_carriage_return_belongs_to_the_ending() {
        assert_eq!(parse(b"get a\r\r\n"), Parsed::Refused { reply: Some(response::BAD_LINE), consumed: 8, swallow: 0 });
    }

    #[test]
    fn a_line_found_late_is_read_from_its_start() {
        let mut parser = Parser::new(0);
        let line = b"gets a b\r\n";
        for seen in 0..line.len() {
            assert_eq!(parser.parse(&line[..seen]), Parsed::NeedMore);
        }
        let keys = Keys::from_validated(b"a b");
        assert_eq!(
            parser.parse(line),
            Parsed::Command { command: Command::Get { keys, with_cas: true }, consumed: line.len() }
        );
        // The next line is looked through from its own start.
        assert_eq!(parser.parse(b"quit\n"), Parsed::Command { command: Command::Quit, consumed: 5 });
    }

    #[test]
    fn a_storage_line_carries_every_field() {
        let header = StoreHeader {
            verb: StoreVerb::Cas,
            key: b"k",
            flags: 7,
            exptime: -1,
            len: i64::MAX as u64,
            cas: 9,
            noreply: true,
        };
        let line = b"cas k 7 -1 9223372036854775807 9 noreply\r\n";
        assert_eq!(parse(line), Parsed::Command { command: Command::Store(header), consumed: line.len() });
    }

    #[test]
    fn a_refused_storage_line_has_its_body_swallowed_when_its_length_is_readable() {
        type Case = (&'static [u8], Option<&'static [u8]>, u64);
        let cases: [Case; 10] = [
            (b"set a foo 0 1\r\n", Some(response::BAD_LINE), 3),
            (b"set a foo 0 1 noreply\r\n", None, 3),
            (b"set a foo 0 9223372036854775807\r\n", Some(response::BAD_LINE), (1 << 63) + 1),
            (b"set a foo 0 9223372036854775808\r\n", Some(response::BAD_LINE), 0),
            (b"set a 0 0 18446744073709551615 noreply\r\n", Some(response::BAD_LINE), 0),
            (b"set a 0 0 1 noreply extra\r\n", Some(response::ERROR), 3),
            (b"set a 0 0 1 extra noreply\r\n", None, 3),
            (b"set a 0 0 foo noreply\r\n", Some(response::BAD_LINE), 0),
            (b"set a 0 0\r\n", Some(response::BAD_LINE), 0),
            (b"set a 0 0 x y z\r\n", Some(response::ERROR), 0),
        ];
        for (line, reply, swallow) in cases {
            assert_eq!(parse(line), Parsed::Refused { reply, consumed: line.len(), swallow }, "{line:?}");
        }
    }

    #[test]
    fn a_line_of_the_longest_length_is_read_and_one_octet_more_closes() {
        for (verb, max) in [("frob", LINE_BYTES_MAX), ("get", 3000), ("gets", 3000), ("gat", 3000), ("gats", 3000)] {
            let mut parser = Parser::new(3000);
            let mut line = format!("{verb} {}", "1 ".repeat(2000)).into_bytes();
            line.truncate(max);
            assert_eq!(parser.parse(&line), Parsed::NeedMore, "{verb}");
            line.push(b'\n');
            assert!(!matches!(parser.clone().parse(&line), Parsed::NeedMore | Parsed::Close(_)), "{verb}");
            line.insert(max, b'1');
            assert_eq!(parser.parse(&line[..=max]), Parsed::Close(CloseReason::LineTooLong), "{verb}");
            assert_eq!(Parser::new(3000).parse(&line), Parsed::Close(CloseReason::LineTooLong), "{verb}");
        }
    }

    #[test]
    fn a_long_retrieval_may_be_indented_by_a_hundred_blanks() {
        let line = |indent: usize| format!("{}get {}", " ".repeat(indent), "k ".repeat(2000)).into_bytes();
        assert_eq!(parse(&line(INDENT_BYTES_MAX)), Parsed::NeedMore);
        assert_eq!(parse(&line(INDENT_BYTES_MAX + 1)), Parsed::Close(CloseReason::LineTooLong));
    }

    #[test]
    fn the_binary_protocol_is_known_by_its_first_octet() {
        assert_eq!(parse(b"\x80"), Parsed::Close(CloseReason::BinaryProtocol));
    }

    #[test]
    fn a_silent_error_needs_a_line_long_enough_to_mean_it() {
        let silent: [&[u8]; 9] = [
            b"incr a x noreply\n",
            b"incr a 1 2 noreply\n",
            b"touch a x noreply\n",
            b"delete a 10 noreply\n",
            b"delete a 0 0 noreply\n",
            b"flush_all x noreply\n",
            b"verbosity x noreply\n",
            b"verbosity noreply\n",
            b"frob x noreply\n",
        ];
        for line in silent {
            assert_eq!(parse(line), Parsed::Refused { reply: None, consumed: line.len(), swallow: 0 }, "{line:?}");
        }
        for line in [&b"incr noreply\n"[..], b"touch noreply\n", b"set noreply\n", b"gat noreply\n", b"noreply\n"] {
            assert!(matches!(parse(line), Parsed::Refused { reply: Some(_), .. }), "{line:?}");
        }
        let delete = Command::Delete { key: b"noreply", noreply: false };
        assert_eq!(parse(b"delete noreply\n"), Parsed::Command { command: delete, consumed: 15 });
    }

    #[test]
    fn one_bad_key_refuses_the_whole_line() {
        let long = "k".repeat(KEY_BYTES_MAX + 1);
        for keys in ["a\0b", "a b\rc d", &long, &format!("a {long} b")] {
            for verb in ["get", "gets", "gat 0", "gats 0"] {
                let line = format!("{verb} {keys}\r\n");
                let refused = Parsed::Refused { reply: Some(response::BAD_LINE), consumed: line.len(), swallow: 0 };
                assert_eq!(parse(line.as_bytes()), refused, "{line:?}");
            }
        }
    }

    #[test]
    fn a_key_with_a_forbidden_octet_is_refused_by_every_verb() {
        for line in [
            "set a\0b 0 0 1",
            "cas a\0b 0 0 1 1",
            "incr a\0b 1",
            "decr a\rb 1",
            "touch a\0b 0",
            "delete a\0b",
            "delete a\rb noreply x",
        ] {
            assert!(
                matches!(parse(format!("{line}\n").as_bytes()), Parsed::Refused { reply: Some(_), .. }),
                "{line:?}"
            );
        }
    }

    #[test]
    fn the_argument_of_stats_is_the_rest_of_the_line() {
        let cases: [(&[u8], Option<&[u8]>); 4] = [
            (b"stats\r\n", None),
            (b"stats  \r\n", None),
            (b"stats settings \r\n", Some(b"settings")),
            (b"stats detail on\r\n", Some(b"detail on")),
        ];
        for (line, argument) in cases {
            let command = Command::Stats { argument };
            assert_eq!(parse(line), Parsed::Command { command, consumed: line.len() });
        }
    }

    #[test]
    fn a_framed_line_may_hold_an_lf_but_no_key_may() {
        for line in [&b"get a\nb"[..], b"delete a\nflush_all", b"get a b\n", b"touch a\nb 0", b"incr \n 1"] {
            assert!(matches!(parse_line(line), Parsed::Refused { reply: Some(_), swallow: 0, .. }), "{line:?}");
        }
        let refused = Parsed::Refused { reply: Some(response::BAD_LINE), consumed: 13, swallow: 7 };
        assert_eq!(parse_line(b"set a\nb 0 0 5"), refused);
        let command = Command::Get { keys: Keys::from_validated(b"a"), with_cas: false };
        assert_eq!(parse_line(b"get a"), Parsed::Command { command, consumed: 5 });
        assert_eq!(parse_line(b"\x80x"), Parsed::Close(CloseReason::BinaryProtocol));
    }
}
