//! One conversation with one server, in memcache text.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::native::Geometry;
use super::{ClientError, ServerUrl, Stream};

/// Longest key that memcache text carries, in octets.
pub const KEY_BYTES_MAX: usize = 250;

/// The one buffer of a client: a reply on its way in or a body on its way out, never both.
const BUFFER_BYTES: usize = 256 << 10;
/// Longest line of a reply, in octets. A VALUE line has at most 250 of key and 60 of numbers; stats lines are longer.
const LINE_BYTES_MAX: usize = 8 << 10;
/// Most lines of one `stats` reply.
pub(super) const STATS_COUNT_MAX: usize = 100_000;
/// A body nobody asked to see is read to its end up to this length; beyond it a new connection is cheaper.
pub(super) const DRAIN_BYTES_MAX: u64 = 64 << 10;
/// How often a writer that cannot write looks whether the server has answered already.
const WRITE_TURN: Duration = Duration::from_millis(100);
/// Above this many seconds memcache takes an expiry for a date.
const RELATIVE_EXPIRY_SECONDS_MAX: u64 = 30 * 24 * 3600;

/// Time-outs of a client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Options {
    /// Bound on making a connection, for each address of the server's name.
    pub connect_timeout: Duration,
    /// Bound on standing still: no octet moved either way. Above the server's `reserve_wait`, or a writer gives up first.
    pub io_timeout: Duration,
    /// Own ring and windows of a native connection.
    pub geometry: Geometry,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            io_timeout: Duration::from_secs(60),
            geometry: Geometry::default(),
        }
    }
}

/// What the server knows about a value beside its octets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Info {
    /// Length of the value, in octets.
    pub len: u64,
    /// The number stored with it, opaque to the server.
    pub flags: u32,
    /// Version of the value: changes with every store.
    pub cas: u64,
}

/// A blocking client of one server: one request at a time, values streamed through one buffer of 256 KiB.
///
/// After an error the connection is dropped, and the next call makes a new one. Nothing is repeated by itself, with one
/// exception: a read that finds the connection closed while it was idle is asked once more on a new one.
#[derive(Debug)]
pub struct Client {
    url: ServerUrl,
    options: Options,
    link: Option<Link>,
}

/// A connection and the octets read from it that nobody has taken: `buffer[start..end]`.
#[derive(Debug)]
struct Link {
    url: ServerUrl,
    stream: Stream,
    io_timeout: Duration,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// An octet of the reply to the present command has come.
    reply_began: bool,
}

/// How far sending got.
enum Sent {
    All,
    /// The server answered, or closed, before it had everything.
    Answered,
}

impl Client {
    /// Connects to `url`.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`].
    pub fn connect(url: ServerUrl, options: Options) -> Result<Self, ClientError> {
        let link = Link::connect(&url, options)?;
        Ok(Self { url, options, link: Some(link) })
    }

    /// The server's name.
    pub fn url(&self) -> &ServerUrl {
        &self.url
    }

    /// Stores exactly `len` octets from `value`, replacing what is there. `ttl`: `None` keeps it; else at least one second.
    ///
    /// The value goes out as it is read. A server may refuse before it has everything: its reply is taken as soon as it
    /// is there, and the rest is not sent.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with the server's words; [`ClientError::Local`] if `value` fails or ends early, after
    /// which nothing is stored; and those of the connection.
    pub fn put(
        &mut self,
        key: impl AsRef<[u8]>,
        value: &mut impl Read,
        len: u64,
        flags: u32,
        ttl: Option<Duration>,
    ) -> Result<(), ClientError> {
        let mut header = command(b"set", key.as_ref())?;
        header.extend_from_slice(format!(" {flags} {} {len}\r\n", expiry(ttl)).as_bytes());
        let mut link = self.take_link()?;
        link.buffer[..header.len()].copy_from_slice(&header);
        let mut filled = header.len();
        let mut remaining = len;
        loop {
            if remaining > 0 {
                let room = (link.buffer.len() - filled).min(usize::try_from(remaining).unwrap_or(usize::MAX));
                let count = read_some(value, &mut link.buffer[filled..filled + room])
                    .map_err(|source| ClientError::Local { source })?;
                if count == 0 {
                    let what = format!("the value ended after {} of {len} octets", len - remaining);
                    return Err(ClientError::Local { source: io::Error::new(ErrorKind::UnexpectedEof, what) });
                }
                remaining -= count as u64;
                filled += count;
            }
            let is_last = remaining == 0 && filled + 2 <= link.buffer.len();
            if is_last {
                link.buffer[filled..filled + 2].copy_from_slice(b"\r\n");
                filled += 2;
            }
            match link.send(filled)? {
                Sent::All if is_last => break,
                Sent::All => filled = 0,
                Sent::Answered => return Err(link.early_answer()),
            }
        }
        match link.read_line()?.as_slice() {
            b"STORED" => {
                self.link = Some(link);
                Ok(())
            }
            line => {
                let err = link.refusal(line);
                // Other refusals leave open whether the server took the body for commands.
                if line == b"NOT_STORED" || line.starts_with(b"SERVER_ERROR ") {
                    self.link = Some(link);
                }
                Err(err)
            }
        }
    }

    /// Streams a value into `sink`; `None` is a miss. On an error `sink` may hold a part of the value.
    ///
    /// # Errors
    /// [`ClientError::Local`] if `sink` fails, [`ClientError::Refused`], and those of the connection.
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
        let local = |source| ClientError::Local { source };
        let (mut link, info) = self.ask_value(key.as_ref())?;
        let Some(info) = info else {
            self.link = Some(link);
            return Ok(None);
        };
        let mut sink = open(&info).map_err(local)?;
        let mut remaining = info.len;
        while remaining > 0 {
            if link.start == link.end {
                link.fill()?;
            }
            let count = link.take_ahead(remaining);
            sink.write_all(&link.buffer[link.start..link.start + count]).map_err(local)?;
            link.start += count;
            remaining -= count as u64;
        }
        link.end_value()?;
        sink.flush().map_err(local)?;
        self.link = Some(link);
        Ok(Some((info, sink)))
    }

    /// Reads a value into the front of `buffer`; `None` is a miss.
    ///
    /// # Errors
    /// [`ClientError::TooLong`] if it does not fit; [`ClientError::Refused`], and those of the connection.
    pub fn get_into(&mut self, key: impl AsRef<[u8]>, buffer: &mut [u8]) -> Result<Option<Info>, ClientError> {
        let (mut link, info) = self.ask_value(key.as_ref())?;
        let Some(info) = info else {
            self.link = Some(link);
            return Ok(None);
        };
        let capacity = buffer.len();
        let into = usize::try_from(info.len).ok().and_then(|len| buffer.get_mut(..len));
        let into = into.ok_or(ClientError::TooLong { len: info.len, capacity })?;
        let ahead = link.take_ahead(info.len);
        into[..ahead].copy_from_slice(&link.buffer[link.start..link.start + ahead]);
        link.start += ahead;
        let mut filled = ahead;
        while filled < into.len() {
            let count = read_some(&mut link.stream, &mut into[filled..]);
            filled += link.judge_read(count)?;
        }
        link.end_value()?;
        self.link = Some(link);
        Ok(Some(info))
    }

    /// Length, flags and version of a value, without its octets; `None` is a miss.
    ///
    /// Classic text has no command for this: the value is asked for, and unless it is short the connection is closed
    /// after its first line, which costs the server what it has sent by then.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn stat(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Info>, ClientError> {
        let (mut link, info) = self.ask_value(key.as_ref())?;
        match info {
            None => self.link = Some(link),
            Some(info) if info.len <= DRAIN_BYTES_MAX => {
                let mut remaining = info.len;
                while remaining > 0 {
                    if link.start == link.end {
                        link.fill()?;
                    }
                    let count = link.take_ahead(remaining);
                    link.start += count;
                    remaining -= count as u64;
                }
                link.end_value()?;
                self.link = Some(link);
            }
            Some(_) => {}
        }
        Ok(info)
    }

    /// Whether the key has a value; costs what [`stat`](Self::stat) costs.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub fn exists(&mut self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        Ok(self.stat(key)?.is_some())
    }

    /// Removes a value; `false` if there was none.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        let line = command(b"delete", key.as_ref())?;
        self.ask_yes_or_no(line, b"DELETED")
    }

    /// Gives a value a new time to live (`None`: for ever); `false` if there is none.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn touch(&mut self, key: impl AsRef<[u8]>, ttl: Option<Duration>) -> Result<bool, ClientError> {
        let mut line = command(b"touch", key.as_ref())?;
        line.extend_from_slice(format!(" {}", expiry(ttl)).as_bytes());
        self.ask_yes_or_no(line, b"TOUCHED")
    }

    /// The server's version.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub fn version(&mut self) -> Result<String, ClientError> {
        let mut link = self.take_link()?;
        link.send_line(b"version")?;
        let line = link.read_line()?;
        let version = line.strip_prefix(b"VERSION ").ok_or_else(|| link.refusal(&line))?;
        let version = String::from_utf8_lossy(version).into_owned();
        self.link = Some(link);
        Ok(version)
    }

    /// Names and values of one group of statistics, in the server's order; `None` is the general one.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for an unknown group, and those of the connection.
    pub fn stats(&mut self, group: Option<&str>) -> Result<Vec<(String, String)>, ClientError> {
        let mut command = b"stats".to_vec();
        for word in group.into_iter().flat_map(str::split_whitespace) {
            command.push(b' ');
            command.extend_from_slice(word.as_bytes());
        }
        let mut link = self.take_link()?;
        link.send_line(&command)?;
        let mut stats = Vec::new();
        loop {
            let line = link.read_line()?;
            if line == b"END" || (stats.is_empty() && matches!(line.as_slice(), b"RESET" | b"OK")) {
                break;
            }
            let stat = line.strip_prefix(b"STAT ").ok_or_else(|| link.refusal(&line))?;
            let text = String::from_utf8_lossy(stat);
            let (name, value) = text.split_once(' ').unwrap_or((&text, ""));
            stats.push((name.to_owned(), value.to_owned()));
            if stats.len() > STATS_COUNT_MAX {
                return Err(link.protocol(format!("more than {STATS_COUNT_MAX} statistics")));
            }
        }
        self.link = Some(link);
        Ok(stats)
    }

    fn ask_yes_or_no(&mut self, command: Vec<u8>, yes: &[u8]) -> Result<bool, ClientError> {
        let mut link = self.take_link()?;
        link.send_line(&command)?;
        let line = link.read_line()?;
        let is_done = line == yes;
        if !is_done && line != b"NOT_FOUND" {
            return Err(link.refusal(&line));
        }
        self.link = Some(link);
        Ok(is_done)
    }

    /// Asks for a value; the link stands at its first octet.
    fn ask_value(&mut self, key: &[u8]) -> Result<(Link, Option<Info>), ClientError> {
        let is_reused = self.link.is_some();
        let mut link = self.take_link()?;
        match link.ask_value(key) {
            // The server's close can be on its way when the connection still looks open. Reading twice does no harm.
            Err(ClientError::Lost { source, .. })
                if is_reused && !link.reply_began && source.kind() != ErrorKind::TimedOut =>
            {
                link = Link::connect(&self.url, self.options)?;
                let info = link.ask_value(key)?;
                Ok((link, info))
            }
            info => info.map(|info| (link, info)),
        }
    }

    /// The connection, out of `self`: who ends in step with the server puts it back, every other way drops it.
    fn take_link(&mut self) -> Result<Link, ClientError> {
        match self.link.take() {
            // Input before a command means that the server has closed, or that the two are out of step.
            Some(link) if link.start == link.end && !link.stream.has_input() => Ok(Link { reply_began: false, ..link }),
            _ => Link::connect(&self.url, self.options),
        }
    }
}

impl Link {
    fn connect(url: &ServerUrl, options: Options) -> Result<Self, ClientError> {
        let stream = Stream::connect(url, options.connect_timeout)?;
        // Zero would mean no time-out to the socket and an error to std.
        let io_timeout = options.io_timeout.max(Duration::from_millis(1));
        stream
            .set_timeouts(Some(io_timeout), Some(WRITE_TURN.min(io_timeout)))
            .map_err(|source| ClientError::Unreachable { url: url.clone(), source })?;
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        Ok(Self { url: url.clone(), stream, io_timeout, buffer, start: 0, end: 0, reply_began: false })
    }

    /// Sends `gets key` and reads the reply up to the value's first octet; `None` is a miss.
    fn ask_value(&mut self, key: &[u8]) -> Result<Option<Info>, ClientError> {
        let command = command(b"gets", key)?;
        self.send_line(&command)?;
        let line = self.read_line()?;
        if line == b"END" {
            return Ok(None);
        }
        if !line.starts_with(b"VALUE ") {
            return Err(self.refusal(&line));
        }
        let info = parse_value_line(&line, key);
        info.map(Some).ok_or_else(|| self.protocol(format!("no VALUE line of this key: {}", shown(&line))))
    }

    fn end_value(&mut self) -> Result<(), ClientError> {
        const TRAILER: &[u8] = b"\r\nEND\r\n";
        while self.end - self.start < TRAILER.len() {
            self.fill()?;
        }
        let trailer = &self.buffer[self.start..self.start + TRAILER.len()];
        if trailer != TRAILER {
            return Err(self.protocol(format!("{} where the value should end", shown(trailer))));
        }
        self.start += TRAILER.len();
        Ok(())
    }

    fn send_line(&mut self, command: &[u8]) -> Result<(), ClientError> {
        let len = command.len() + 2;
        let Some(into) = self.buffer.get_mut(..len) else {
            let source = io::Error::new(ErrorKind::InvalidInput, format!("a command of {len} octets"));
            return Err(ClientError::Local { source });
        };
        into[..command.len()].copy_from_slice(command);
        into[command.len()..].copy_from_slice(b"\r\n");
        match self.send(len)? {
            Sent::All => Ok(()),
            Sent::Answered => Err(self.early_answer()),
        }
    }

    /// Writes `buffer[..len]`. Both directions are watched: whenever the socket takes nothing for a turn, and once
    /// before each call, a reply that came early ends the sending. So neither side can wait for the other for ever.
    fn send(&mut self, len: usize) -> Result<Sent, ClientError> {
        assert!(self.start == self.end, "a command is sent after the reply before it was taken");
        let mut sent = 0;
        let mut moved_at = Instant::now();
        if self.stream.has_input() {
            return Ok(Sent::Answered);
        }
        while sent < len {
            match self.stream.write(&self.buffer[sent..len]) {
                Ok(count) if count > 0 => {
                    sent += count;
                    moved_at = Instant::now();
                }
                Err(err) if err.kind() == ErrorKind::Interrupted => {}
                Err(err) if err.kind() == ErrorKind::WouldBlock => {
                    if self.stream.has_input() {
                        return Ok(Sent::Answered);
                    }
                    if moved_at.elapsed() >= self.io_timeout {
                        return Err(self.lost(ErrorKind::TimedOut.into()));
                    }
                }
                // The server has closed, but what it said before can still be read.
                Err(_) if self.stream.has_input() => return Ok(Sent::Answered),
                Err(err) => return Err(self.lost(err)),
                Ok(_) => return Err(self.lost(ErrorKind::WriteZero.into())),
            }
        }
        Ok(Sent::All)
    }

    /// The error a reply means that came before everything was sent.
    fn early_answer(&mut self) -> ClientError {
        match self.read_line() {
            Ok(line) => self.refusal(&line),
            Err(err) => err,
        }
    }

    /// The next line without its end. It is copied: the buffer moves on under it.
    fn read_line(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut seen = 0;
        loop {
            let unread = &self.buffer[self.start..self.end];
            if let Some(at) = memchr::memchr(b'\n', &unread[seen..]) {
                let line = &unread[..seen + at];
                let line = line.strip_suffix(b"\r").unwrap_or(line).to_vec();
                self.start += seen + at + 1;
                return Ok(line);
            }
            seen = unread.len();
            if seen >= LINE_BYTES_MAX {
                let what = format!("{} octets without the end of a line: {}", seen, shown(unread));
                return Err(self.protocol(what));
            }
            self.fill()?;
        }
    }

    /// Reads at least one octet behind what is unread.
    fn fill(&mut self) -> Result<(), ClientError> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let count = read_some(&mut self.stream, &mut self.buffer[self.end..]);
        self.end += self.judge_read(count)?;
        Ok(())
    }

    fn judge_read(&mut self, count: io::Result<usize>) -> Result<usize, ClientError> {
        match count {
            Ok(0) if self.reply_began => {
                let what = "it closed the connection inside a reply";
                Err(self.lost(io::Error::new(ErrorKind::UnexpectedEof, what)))
            }
            Ok(0) => Err(self.lost(ErrorKind::UnexpectedEof.into())),
            Ok(count) => {
                self.reply_began = true;
                Ok(count)
            }
            Err(err) if err.kind() == ErrorKind::WouldBlock => Err(self.lost(ErrorKind::TimedOut.into())),
            Err(err) => Err(self.lost(err)),
        }
    }

    /// How many unread octets belong to a value of which `remaining` are due.
    fn take_ahead(&self, remaining: u64) -> usize {
        (self.end - self.start).min(usize::try_from(remaining).unwrap_or(usize::MAX))
    }

    fn refusal(&self, line: &[u8]) -> ClientError {
        let known = [&b"SERVER_ERROR "[..], b"CLIENT_ERROR ", b"ERROR"].iter().any(|word| line.starts_with(word));
        if known || matches!(line, b"NOT_STORED" | b"EXISTS" | b"NOT_FOUND") {
            return ClientError::Refused { reply: String::from_utf8_lossy(line).into_owned() };
        }
        self.protocol(format!("{} is no reply to this command", shown(line)))
    }

    fn protocol(&self, what: String) -> ClientError {
        ClientError::Protocol { url: self.url.clone(), what }
    }

    fn lost(&self, source: io::Error) -> ClientError {
        let source = match source.kind() {
            ErrorKind::UnexpectedEof if source.get_ref().is_none() => {
                io::Error::new(source.kind(), "it closed the connection without a reply")
            }
            ErrorKind::TimedOut => io::Error::new(source.kind(), "no octet moved within the time-out"),
            _ => source,
        };
        ClientError::Lost { url: self.url.clone(), source }
    }
}

fn read_some(from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(into) {
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// `verb key`, if the key can stand in a line.
pub(super) fn command(verb: &[u8], key: &[u8]) -> Result<Vec<u8>, ClientError> {
    let is_sendable = (1..=KEY_BYTES_MAX).contains(&key.len()) && !key.iter().any(|octet| b" \r\n\0".contains(octet));
    if !is_sendable {
        return Err(ClientError::Key { len: key.len() });
    }
    let mut line = Vec::with_capacity(verb.len() + key.len() + 64);
    line.extend_from_slice(verb);
    line.push(b' ');
    line.extend_from_slice(key);
    Ok(line)
}

/// `VALUE key flags len cas`.
fn parse_value_line(line: &[u8], key: &[u8]) -> Option<Info> {
    let numbers = line.strip_prefix(b"VALUE ")?.strip_prefix(key)?.strip_prefix(b" ")?;
    let mut numbers = std::str::from_utf8(numbers).ok()?.split(' ');
    let info = Info {
        flags: numbers.next()?.parse().ok()?,
        len: numbers.next()?.parse().ok()?,
        cas: numbers.next()?.parse().ok()?,
    };
    numbers.next().is_none().then_some(info)
}

/// Memcache's expiry: 0 never, up to 30 days a number of seconds, beyond that a date.
pub(super) fn expiry(ttl: Option<Duration>) -> u64 {
    let Some(ttl) = ttl else { return 0 };
    let seconds = ttl.as_secs().saturating_add(u64::from(ttl.subsec_nanos() > 0)).max(1);
    if seconds <= RELATIVE_EXPIRY_SECONDS_MAX {
        return seconds;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    now.saturating_add(seconds)
}

/// The front of what a peer sent, fit for a message.
pub(super) fn shown(octets: &[u8]) -> String {
    const SHOWN_MAX: usize = 60;
    let front = &octets[..octets.len().min(SHOWN_MAX)];
    let more = if octets.len() > SHOWN_MAX { "…" } else { "" };
    format!("\"{}{more}\"", front.escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_lines_give_their_numbers_and_nothing_else_does() {
        let info = Info { len: 18_446_744_073_709_551_615, flags: 7, cas: 12 };
        assert_eq!(parse_value_line(b"VALUE k 7 18446744073709551615 12", b"k"), Some(info));
        for line in [
            &b"VALUE k 7 5"[..],
            b"VALUE k 7 5 12 9",
            b"VALUE other 7 5 12",
            b"VALUE kk 7 5 12",
            b"VALUE k -7 5 12",
            b"VALUE k 7 18446744073709551616 12",
            b"VALUE k 4294967296 5 12",
            b"VALUE k  5 12",
            b"VALUE k",
            b"VALUE \xff 1 2 3",
        ] {
            assert_eq!(parse_value_line(line, b"k"), None, "{}", line.escape_ascii());
        }
    }

    #[test]
    fn keys_that_would_break_the_line_are_refused() {
        for key in [&b""[..], b"a b", b"a\r", b"a\nflush_all", b"a\0", &[b'x'; 251]] {
            assert!(matches!(command(b"get", key), Err(ClientError::Key { len }) if len == key.len()));
        }
        for key in [&b"k"[..], b"\t\x01\xff", &[b'x'; 250]] {
            assert!(command(b"get", key).is_ok());
        }
    }

    #[test]
    fn expiry_is_relative_up_to_thirty_days_and_a_date_beyond() {
        assert_eq!(expiry(None), 0);
        assert_eq!(expiry(Some(Duration::ZERO)), 1);
        assert_eq!(expiry(Some(Duration::from_millis(1_001))), 2);
        assert_eq!(expiry(Some(Duration::from_secs(2_592_000))), 2_592_000);
        assert!(expiry(Some(Duration::from_secs(2_592_001))) > 1_700_000_000 + 2_592_001);
        assert_eq!(expiry(Some(Duration::MAX)), u64::MAX);
    }
}
