//! A blocking socket that speaks memcache text literally.

use super::pattern::{CHUNK_BYTES, Pattern};
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::path::Path;
use std::time::Duration;

/// A peer that is silent for so long hangs: the test fails where it waits instead of standing still.
const PATIENCE: Duration = Duration::from_secs(120);

/// One connection. Everything that does not match panics and shows both sides.
pub struct Client {
    socket: Socket,
    /// Received and not yet asked for: `buffer[start..]`.
    buffer: Vec<u8>,
    start: usize,
}

impl Client {
    pub fn tcp(address: SocketAddr) -> Self {
        Self::tcp_with_buffers(address, None, None)
    }

    /// With kernel buffers of so many octets, or as the kernel likes.
    pub fn tcp_with_buffers(address: SocketAddr, receive: Option<usize>, send: Option<usize>) -> Self {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).expect("a TCP socket");
        if let Some(bytes) = receive {
            socket.set_recv_buffer_size(bytes).expect("SO_RCVBUF");
        }
        if let Some(bytes) = send {
            socket.set_send_buffer_size(bytes).expect("SO_SNDBUF");
        }
        socket.connect(&address.into()).expect("the daemon accepts TCP connections");
        socket.set_tcp_nodelay(true).expect("TCP_NODELAY");
        Self::new(socket)
    }

    pub fn unix(path: &Path) -> Self {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).expect("a Unix socket");
        let address = SockAddr::unix(path).expect("a path that a Unix socket can have");
        socket.connect(&address).expect("the daemon accepts Unix connections");
        Self::new(socket)
    }

    fn new(socket: Socket) -> Self {
        socket.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
        socket.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
        Self { socket, buffer: Vec::new(), start: 0 }
    }

    /// The same connection for another thread, without what was received and not yet asked for.
    pub fn try_clone(&self) -> Self {
        assert!(self.start == self.buffer.len(), "octets that were received already would be lost");
        Self::new(self.socket.try_clone().expect("a second handle of the socket"))
    }

    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Sends all of `octets`.
    pub fn send(&mut self, octets: impl AsRef<[u8]>) {
        self.try_send(octets).expect("the daemon takes octets");
    }

    pub fn try_send(&mut self, octets: impl AsRef<[u8]>) -> io::Result<()> {
        (&self.socket).write_all(octets.as_ref())
    }

    /// Sends octets `offset..offset + len` of `pattern`.
    pub fn send_pattern(&mut self, pattern: Pattern, offset: u64, len: u64) {
        let mut chunk = vec![0; CHUNK_BYTES.min(len as usize)];
        let mut sent = 0;
        while sent < len {
            let count = chunk.len().min((len - sent) as usize);
            pattern.fill(offset + sent, &mut chunk[..count]);
            self.send(&chunk[..count]);
            sent += count as u64;
        }
    }

    /// Sends no more; receiving goes on.
    pub fn finish(&self) {
        self.socket.shutdown(Shutdown::Write).expect("half a close");
    }

    /// Receives some octets that are there or come: at least one, or none at the end.
    pub fn try_receive(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.start < self.buffer.len() {
            let count = into.len().min(self.buffer.len() - self.start);
            into[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.start += count;
            return Ok(count);
        }
        (&self.socket).read(into)
    }

    pub fn read_exact(&mut self, into: &mut [u8]) {
        let mut at = 0;
        while at < into.len() {
            let count = self.try_receive(&mut into[at..]).expect("the daemon answers");
            assert!(count > 0, "the connection ended {} octets too early", into.len() - at);
            at += count;
        }
    }

    pub fn read(&mut self, len: usize) -> Vec<u8> {
        let mut octets = vec![0; len];
        self.read_exact(&mut octets);
        octets
    }

    /// Receives up to and with the first `end`.
    pub fn read_until(&mut self, end: &[u8]) -> Vec<u8> {
        let mut seen = 0;
        loop {
            let found = &self.buffer[self.start..];
            let from = seen - seen.min(end.len() - 1);
            if let Some(place) = found[from..].windows(end.len()).position(|window| window == end) {
                let octets = found[..from + place + end.len()].to_vec();
                self.start += octets.len();
                return octets;
            }
            seen = found.len();
            self.receive_more(end);
        }
    }

    /// One line without its CR LF.
    pub fn line(&mut self) -> String {
        let mut line = self.read_until(b"\r\n");
        line.truncate(line.len() - 2);
        String::from_utf8_lossy(&line).into_owned()
    }

    /// The next octets are exactly `expected`.
    pub fn expect(&mut self, expected: impl AsRef<[u8]>) {
        let expected = expected.as_ref();
        let mut found = Vec::new();
        while found.len() < expected.len() {
            let mut more = vec![0; expected.len() - found.len()];
            let count = self.try_receive(&mut more).unwrap_or_else(|error| {
                panic!("{error} after {}, waiting for {}", shown(&found), shown(expected));
            });
            found.extend_from_slice(&more[..count]);
            assert!(count > 0, "the end after {}, instead of {}", shown(&found), shown(expected));
            let wrong = found != expected[..found.len()];
            assert!(!wrong, "found {}, wanted {}", shown(&found), shown(expected));
        }
    }

    /// The next octets are those of `pattern` at `offset..offset + len`.
    pub fn expect_pattern(&mut self, pattern: Pattern, offset: u64, len: u64, what: &str) {
        let mut chunk = vec![0; CHUNK_BYTES.min(len as usize)];
        let mut seen = 0;
        while seen < len {
            let count = chunk.len().min((len - seen) as usize);
            self.read_exact(&mut chunk[..count]);
            pattern.check(offset + seen, &chunk[..count], what);
            seen += count as u64;
        }
    }

    /// Nothing comes but the end.
    pub fn expect_end(&mut self) {
        let mut rest = [0; 200];
        match self.try_receive(&mut rest) {
            Ok(0) => {}
            Ok(count) => panic!("found {} instead of the end", shown(&rest[..count])),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => panic!("{error} instead of the end"),
        }
    }

    /// Everything sent so far was answered with what was expected so far, and the connection lives.
    pub fn expect_in_step(&mut self) {
        self.send("version\r\n");
        let line = self.line();
        assert!(line.starts_with("VERSION "), "out of step: found {line:?} instead of a version");
    }

    /// Sends `request` and expects exactly `reply`.
    pub fn ask(&mut self, request: impl AsRef<[u8]>, reply: impl AsRef<[u8]>) {
        self.send(request);
        self.expect(reply);
    }

    /// `set key flags 0 len` with octets `0..len` of `pattern`, without waiting for the answer.
    pub fn send_set(&mut self, key: &str, flags: u32, pattern: Pattern, len: u64) {
        self.send(format!("set {key} {flags} 0 {len}\r\n"));
        self.send_pattern(pattern, 0, len);
        self.send("\r\n");
    }

    /// The same with flags 0, and it is STORED.
    pub fn set(&mut self, key: &str, pattern: Pattern, len: u64) {
        self.send_set(key, 0, pattern, len);
        self.expect("STORED\r\n");
    }

    /// The next octets are a VALUE of these flags and octets `0..len` of `pattern`, with its CR LF.
    pub fn expect_value(&mut self, key: &str, flags: u32, pattern: Pattern, len: u64) {
        self.expect(format!("VALUE {key} {flags} {len}\r\n"));
        self.expect_pattern(pattern, 0, len, key);
        self.expect("\r\n");
    }

    /// `get key` finds octets `0..len` of `pattern`, with flags 0.
    pub fn get(&mut self, key: &str, pattern: Pattern, len: u64) {
        self.send(format!("get {key}\r\n"));
        self.expect_value(key, 0, pattern, len);
        self.expect("END\r\n");
    }

    /// `get key` finds nothing.
    pub fn get_nothing(&mut self, key: &str) {
        self.ask(format!("get {key}\r\n"), "END\r\n");
    }

    /// The version of `key`, which must be there; its octets are thrown away.
    pub fn cas_of(&mut self, key: &str) -> u64 {
        self.send(format!("gets {key}\r\n"));
        let line = self.line();
        let words: Vec<&str> = line.split(' ').collect();
        let &["VALUE", found, _flags, len, cas] = &words[..] else { panic!("no VALUE with a version: {line:?}") };
        assert_eq!(found, key);
        let mut left: usize = len.parse().expect("a length");
        let mut chunk = [0; 4096];
        while left > 0 {
            let count = left.min(chunk.len());
            self.read_exact(&mut chunk[..count]);
            left -= count;
        }
        self.expect("\r\nEND\r\n");
        cas.parse().expect("a version")
    }

    /// `stats [argument]`, as it is.
    pub fn stats(&mut self, argument: &str) -> BTreeMap<String, String> {
        let request = if argument.is_empty() { "stats\r\n".to_owned() } else { format!("stats {argument}\r\n") };
        self.send(request);
        let mut stats = BTreeMap::new();
        loop {
            let line = self.line();
            if line == "END" {
                return stats;
            }
            let words: Vec<&str> = line.split(' ').collect();
            let &["STAT", name, value] = &words[..] else { panic!("not `STAT name value`: {line:?}") };
            let doubled = stats.insert(name.to_owned(), value.to_owned());
            assert!(doubled.is_none(), "{name} comes twice");
        }
    }

    fn receive_more(&mut self, awaited: &[u8]) {
        let mut chunk = [0; 4096];
        let count = (&self.socket).read(&mut chunk).unwrap_or_else(|error| {
            panic!("{error} after {}, waiting for {}", shown(&self.buffer[self.start..]), shown(awaited));
        });
        assert!(count > 0, "the end after {}, waiting for {}", shown(&self.buffer[self.start..]), shown(awaited));
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(&chunk[..count]);
    }
}

/// Octets for a message: both ends of what is long.
pub fn shown(octets: &[u8]) -> String {
    if octets.len() <= 300 {
        return format!("{:?}", octets.escape_ascii().to_string());
    }
    let (front, back) = (&octets[..140], &octets[octets.len() - 140..]);
    format!(
        "{:?} .. {} octets .. {:?}",
        front.escape_ascii().to_string(),
        octets.len(),
        back.escape_ascii().to_string()
    )
}
