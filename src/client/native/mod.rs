//! The native protocol's client: any [`Fabric`], no actix, requests in flight as many as the caller likes.
//!
//! ```no_run
//! use bulkhead::client::{NativeClient, Options, Outcome};
//!
//! # fn main() -> Result<(), bulkhead::client::ClientError> {
//! let url = "native+iwarp://127.0.0.1:11212".parse()?;
//! let mut client = NativeClient::connect(url, Options::default())?;
//! client.put("model", &mut &b"bytes of a model"[..], 16, 0, None)?;
//! // Each value lands in the caller's memory, straight out of the window that the server wrote to.
//! client.submit_get("model")?;
//! client.submit_get("no such model")?;
//! let mut copy = [0; 64];
//! assert!(matches!(client.wait_into(&mut copy)?, Outcome::Value(info) if info.len == 16));
//! assert_eq!(client.wait_into(&mut copy)?, Outcome::Miss);
//! # Ok(())
//! # }
//! ```
//!
//! | part | what it is |
//! |---|---|
//! | [`NativeClient`] | blocking: one call at a time, or `submit_*` and [`wait`](NativeClient::wait) |
//! | [`AsyncClient`] | the same for tasks of tokio: calls of all clones share one connection and overlap |
//! | [`port`] | an endpoint with a queue pair and memory: what a server of one's own is made of as well |
//!
//! A server that is no Bulkhead is asked one thing at a time: what else was submitted waits here.

mod asynchronous;
mod link;
pub mod port;

pub use asynchronous::AsyncClient;
pub use link::Outcome;
pub use port::Geometry;

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::link::{Dial, Into, Kind, Link, Nothing, Sink, Source, Writing};
use super::connection::{Info, Options, command, expiry};
use super::{ClientError, ServerUrl};
use crate::fabric::{self, Address, Fabric, iwarp};

/// A blocking client of one native server.
///
/// A value on its way in is copied once, from the window that the server wrote to into the caller's memory; on its way
/// out it is read into the very slot that it is sent from. So what a client holds is its windows and slots.
///
/// After an error of the connection it is dropped, and the next call makes a new one; requests that were submitted and
/// not waited for are lost with it. Nothing is repeated by itself, with one exception: a single read that finds the
/// connection closed while it was idle is asked once more on a new one.
pub struct NativeClient {
    url: ServerUrl,
    fabric: Arc<dyn Fabric>,
    options: Options,
    link: Option<Link>,
    bounce: Vec<u8>,
}

impl NativeClient {
    /// Connects to a `native+…` URL.
    ///
    /// # Errors
    /// [`ClientError::Url`] if it is another, [`ClientError::Unreachable`], [`ClientError::Protocol`] if no version-3
    /// server answers there, [`ClientError::Local`] for a geometry that cannot be had.
    pub fn connect(url: ServerUrl, options: Options) -> Result<Self, ClientError> {
        let fabric = fabric_of(&url)?;
        Self::make(url, fabric, options)
    }

    /// Connects to a server at `address` of any fabric.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn over(fabric: Arc<dyn Fabric>, address: Address, options: Options) -> Result<Self, ClientError> {
        let url = ServerUrl::Native { fabric: fabric.name(), address };
        Self::make(url, fabric, options)
    }

    fn make(url: ServerUrl, fabric: Arc<dyn Fabric>, options: Options) -> Result<Self, ClientError> {
        let mut client = Self { url, fabric, options, link: None, bounce: Vec::new() };
        client.link = Some(client.dial()?);
        Ok(client)
    }

    /// The server's name.
    pub fn url(&self) -> &ServerUrl {
        &self.url
    }

    /// Stores exactly `len` octets from `value`, replacing what is there. `ttl`: `None` keeps it; else at least one second.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with the server's words; [`ClientError::Local`] if `value` fails or ends early, after
    /// which nothing is stored, or while requests are [pending](Self::pending_count); and those of the connection.
    pub fn put(
        &mut self,
        key: impl AsRef<[u8]>,
        value: &mut impl Read,
        len: u64,
        flags: u32,
        ttl: Option<Duration>,
    ) -> Result<(), ClientError> {
        let line = set_line(key.as_ref(), flags, ttl, len)?;
        self.ask(line, Kind::Store { source: Some(Source::Caller), len }, &mut Nothing, value).map(|_| ())
    }

    /// Streams a value into `sink`; `None` is a miss. On an error `sink` may hold a part of the value.
    ///
    /// # Errors
    /// [`ClientError::Local`] if `sink` fails or while requests are [pending](Self::pending_count),
    /// [`ClientError::Refused`], and those of the connection.
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
        let (line, kind) = get_request(key.as_ref())?;
        let mut bounce = std::mem::take(&mut self.bounce);
        let mut sink = Writing { open: Some(open), writer: None, bounce: &mut bounce };
        let outcome = self.ask_again(line, kind, &mut sink);
        let writer = sink.writer;
        self.bounce = bounce;
        Ok(value(outcome?).zip(writer))
    }

    /// Reads a value into the front of `buffer`; `None` is a miss.
    ///
    /// # Errors
    /// [`ClientError::TooLong`] if it does not fit; else as [`get`](Self::get).
    pub fn get_into(&mut self, key: impl AsRef<[u8]>, buffer: &mut [u8]) -> Result<Option<Info>, ClientError> {
        let (line, kind) = get_request(key.as_ref())?;
        self.ask_again(line, kind, &mut Into::new(buffer)).map(value)
    }

    /// Length, flags and version of a value, without its octets; `None` is a miss.
    ///
    /// There is no command for this: the value is asked for, and unless it is short the connection is closed after its
    /// first line, which costs the server what it has sent by then.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn stat(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Info>, ClientError> {
        let (line, kind) = get_request(key.as_ref())?;
        self.ask_again(line, kind, &mut Nothing).map(value)
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
    /// As [`get`](Self::get).
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        let line = ended(command(b"delete", key.as_ref())?);
        Ok(self.ask(line, Kind::YesOrNo { yes: b"DELETED" }, &mut Nothing, &mut io::empty())? == Outcome::Done)
    }

    /// Gives a value a new time to live (`None`: for ever); `false` if there is none.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn touch(&mut self, key: impl AsRef<[u8]>, ttl: Option<Duration>) -> Result<bool, ClientError> {
        let mut line = command(b"touch", key.as_ref())?;
        line.extend_from_slice(format!(" {}", expiry(ttl)).as_bytes());
        let kind = Kind::YesOrNo { yes: b"TOUCHED" };
        Ok(self.ask(ended(line), kind, &mut Nothing, &mut io::empty())? == Outcome::Done)
    }

    /// The server's version.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn version(&mut self) -> Result<String, ClientError> {
        match self.ask_again(b"version\r\n".to_vec(), || Kind::Version, &mut Nothing)? {
            Outcome::Version(version) => Ok(version),
            outcome => unreachable!("{outcome:?} is no version"),
        }
    }

    /// Names and values of one group of statistics, in the server's order; `None` is the general one.
    ///
    /// # Errors
    /// [`ClientError::Refused`] for an unknown group, else as [`get`](Self::get).
    pub fn stats(&mut self, group: Option<&str>) -> Result<Vec<(String, String)>, ClientError> {
        let mut line = b"stats".to_vec();
        for word in group.into_iter().flat_map(str::split_whitespace) {
            line.push(b' ');
            line.extend_from_slice(word.as_bytes());
        }
        match self.ask(ended(line), Kind::Stats(Vec::new()), &mut Nothing, &mut io::empty())? {
            Outcome::Stats(stats) => Ok(stats),
            _ => Ok(Vec::new()),
        }
    }

    /// Asks for a value without waiting for it. [`wait`](Self::wait) takes the answers in the order of submission.
    ///
    /// # Errors
    /// [`ClientError::Key`], and those of the connection.
    pub fn submit_get(&mut self, key: impl AsRef<[u8]>) -> Result<(), ClientError> {
        let (line, kind) = get_request(key.as_ref())?;
        self.submit(line, kind())
    }

    /// Stores exactly `len` octets of `value` without waiting for it. They are read by this and later calls, as the
    /// server takes them; if `value` fails or ends early, the connection is given up.
    ///
    /// # Errors
    /// [`ClientError::Key`], [`ClientError::Local`] for a reader that failed, and those of the connection.
    pub fn submit_set(
        &mut self,
        key: impl AsRef<[u8]>,
        value: impl Read + Send + 'static,
        len: u64,
        flags: u32,
        ttl: Option<Duration>,
    ) -> Result<(), ClientError> {
        let line = set_line(key.as_ref(), flags, ttl, len)?;
        self.submit(line, Kind::Store { source: Some(Source::Owned(Box::new(value))), len })
    }

    /// Removes a value without waiting for it: [`Outcome::Done`], or [`Outcome::Miss`].
    ///
    /// # Errors
    /// [`ClientError::Key`], and those of the connection.
    pub fn submit_delete(&mut self, key: impl AsRef<[u8]>) -> Result<(), ClientError> {
        let line = ended(command(b"delete", key.as_ref())?);
        self.submit(line, Kind::YesOrNo { yes: b"DELETED" })
    }

    /// Requests submitted whose answers were not waited for. After an error of the connection there are none.
    pub fn pending_count(&self) -> usize {
        self.link.as_ref().map_or(0, Link::pending_count)
    }

    /// Waits for the answer to the oldest request; a value goes to `sink`. Values of later requests wait in the windows,
    /// which holds the server back and costs no memory.
    ///
    /// # Errors
    /// [`ClientError::Refused`], which leaves the later requests as they are; [`ClientError::Local`] if `sink` fails or
    /// nothing is pending; and those of the connection.
    pub fn wait(&mut self, sink: &mut impl Write) -> Result<Outcome, ClientError> {
        let mut bounce = std::mem::take(&mut self.bounce);
        let open = |_: &Info| Ok(sink);
        let outcome = self.settle(&mut Writing { open: Some(open), writer: None, bounce: &mut bounce });
        self.bounce = bounce;
        outcome
    }

    /// As [`wait`](Self::wait); a value goes to the front of `buffer`.
    ///
    /// # Errors
    /// [`ClientError::TooLong`] if it does not fit; else as [`wait`](Self::wait).
    pub fn wait_into(&mut self, buffer: &mut [u8]) -> Result<Outcome, ClientError> {
        self.settle(&mut Into::new(buffer))
    }

    fn submit(&mut self, line: Vec<u8>, kind: Kind) -> Result<(), ClientError> {
        let mut link = match self.link.take() {
            Some(link) if link.pending_count() > 0 => link,
            link => {
                self.link = link;
                self.take_link()?.0
            }
        };
        let now = Instant::now();
        link.submit(line, kind, now);
        let turned = link.turn(now, &mut io::empty());
        self.keep(link);
        turned.map(|_| ())
    }

    fn settle(&mut self, sink: &mut dyn Sink) -> Result<Outcome, ClientError> {
        match self.link.take() {
            Some(mut link) if link.pending_count() > 0 => {
                let settled = settle(&mut link, sink, &mut io::empty());
                self.keep(link);
                settled
            }
            link => {
                self.link = link;
                let source = io::Error::new(ErrorKind::InvalidInput, "no request is pending");
                Err(ClientError::Local { source })
            }
        }
    }

    fn ask(
        &mut self,
        line: Vec<u8>,
        kind: Kind,
        sink: &mut dyn Sink,
        caller: &mut dyn Read,
    ) -> Result<Outcome, ClientError> {
        let (mut link, _) = self.take_link()?;
        link.submit(line, kind, Instant::now());
        let settled = settle(&mut link, sink, caller);
        // A server may answer before it has the value. What is left of it is not sent.
        link.is_broken |= link.is_sending();
        self.keep(link);
        settled
    }

    /// As [`ask`](Self::ask), for what does no harm when it is asked twice.
    fn ask_again(
        &mut self,
        line: Vec<u8>,
        kind: impl Fn() -> Kind,
        sink: &mut dyn Sink,
    ) -> Result<Outcome, ClientError> {
        let (mut link, is_reused) = self.take_link()?;
        link.submit(line.clone(), kind(), Instant::now());
        let mut settled = settle(&mut link, sink, &mut io::empty());
        // The server's close can be on its way when the connection still looks open.
        if let Err(ClientError::Lost { source, .. }) = &settled
            && is_reused
            && !link.reply_began
            && source.kind() != ErrorKind::TimedOut
        {
            link = self.dial()?;
            link.submit(line, kind(), Instant::now());
            settled = settle(&mut link, sink, &mut io::empty());
        }
        self.keep(link);
        settled
    }

    /// The connection, out of `self`, and whether it was used before.
    fn take_link(&mut self) -> Result<(Link, bool), ClientError> {
        match self.link.take() {
            Some(link) if link.pending_count() > 0 => {
                let what = format!("{} requests are pending, and must be waited for first", link.pending_count());
                self.link = Some(link);
                Err(ClientError::Local { source: io::Error::new(ErrorKind::InvalidInput, what) })
            }
            Some(mut link) => match link.is_fresh(Instant::now()) {
                true => Ok((link, true)),
                false => Ok((self.dial()?, false)),
            },
            None => Ok((self.dial()?, false)),
        }
    }

    fn keep(&mut self, link: Link) {
        self.link = Some(link).filter(|link| !link.is_broken);
    }

    /// Every address of the server's name is tried in turn, each with the whole time-out.
    fn dial(&self) -> Result<Link, ClientError> {
        let unreachable = |source| ClientError::Unreachable { url: self.url.clone(), source };
        let addresses = match &self.url {
            ServerUrl::Native { address, .. } => vec![address.clone()],
            url => match url.native_place() {
                Some(place) => place.to_socket_addrs().map_err(unreachable)?.map(Address::Socket).collect(),
                None => Vec::new(),
            },
        };
        let mut last = unreachable(io::Error::new(ErrorKind::NotFound, "the name has no address"));
        for address in addresses {
            match self.dial_one(&address) {
                Err(error @ ClientError::Unreachable { .. }) => last = error,
                link => return link,
            }
        }
        Err(last)
    }

    fn dial_one(&self, address: &Address) -> Result<Link, ClientError> {
        let mut dial = Dial::start(&self.url, &*self.fabric, address, self.options)?;
        loop {
            if let Some(link) = dial.turn(Instant::now())? {
                return Ok(link);
            }
            dial.lane().arm();
            if let Some(link) = dial.turn(Instant::now())? {
                return Ok(link);
            }
            let slept = fabric::sleep(&**dial.lane(), Some(dial.wakes_at()));
            slept.map_err(|source| ClientError::Unreachable { url: self.url.clone(), source })?;
        }
    }
}

impl fmt::Debug for NativeClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NativeClient").field("url", &self.url).field("pending", &self.pending_count()).finish()
    }
}

/// Drives a link until the oldest request is answered.
fn settle(link: &mut Link, sink: &mut dyn Sink, caller: &mut dyn Read) -> Result<Outcome, ClientError> {
    let mut is_armed = false;
    link.handle_waiting(Instant::now());
    loop {
        let now = Instant::now();
        let moved = link.turn(now, caller)?;
        if moved {
            link.spin.handle_news(now);
            if link.holds_bulk() {
                link.spin.handle_stream(now);
            }
        }
        if let Some(settled) = link.poll_answer(sink) {
            return settled;
        }
        if moved {
            is_armed = false;
            continue;
        }
        link.judge_rest(now)?;
        if !is_armed && link.spin.is_worth_it(now) {
            continue;
        }
        if !is_armed {
            link.lane().arm();
            is_armed = true;
            continue;
        }
        fabric::sleep(&**link.lane(), link.wakes_at()).map_err(|source| ClientError::Local { source })?;
        is_armed = false;
    }
}

fn fabric_of(url: &ServerUrl) -> Result<Arc<dyn Fabric>, ClientError> {
    match url {
        ServerUrl::NativeIwarp { crc, .. } => {
            Ok(Arc::new(iwarp::Iwarp::new(iwarp::Options { crc: *crc, ..iwarp::Options::default() })))
        }
        #[cfg(feature = "verbs")]
        ServerUrl::NativeVerbs { .. } => Ok(Arc::new(crate::fabric::verbs::Verbs)),
        _ => Err(ClientError::Url { url: url.to_string(), reason: "no native server that a URL leads to".to_owned() }),
    }
}

fn ended(mut line: Vec<u8>) -> Vec<u8> {
    line.extend_from_slice(b"\r\n");
    line
}

fn set_line(key: &[u8], flags: u32, ttl: Option<Duration>, len: u64) -> Result<Vec<u8>, ClientError> {
    let mut line = command(b"set", key)?;
    line.extend_from_slice(format!(" {flags} {} {len}", expiry(ttl)).as_bytes());
    Ok(ended(line))
}

fn get_request(key: &[u8]) -> Result<(Vec<u8>, impl Fn() -> Kind + use<>), ClientError> {
    let line = ended(command(b"gets", key)?);
    let key = key.to_vec();
    Ok((line, move || Kind::Get { key: key.clone(), info: None }))
}

fn value(outcome: Outcome) -> Option<Info> {
    match outcome {
        Outcome::Value(info) => Some(info),
        _ => None,
    }
}
