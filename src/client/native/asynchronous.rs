//! The native client for tasks of tokio.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::link::{BOUNCE_BYTES, Dial, Kind, Link, Outcome, Sink, Source};
use super::{ended, fabric_of, get_request, set_line};
use crate::client::connection::{Info, Options, command};
use crate::client::{ClientError, ServerUrl};
use crate::fabric::{self, Address, Fabric, SharedSpan};

/// Requests in flight on one connection; more wait in their tasks.
const PENDING_COUNT_MAX: usize = 64;
/// A value's buffer is made this large on the server's word; beyond, it grows with what really comes.
const TRUSTED_BYTES_MAX: u64 = 16 << 20;

/// A client of one native server for any number of tasks: clones share one connection, and their requests overlap on it.
///
/// The connection lives in a task of its own, which ends with the last clone. After an error of the connection every
/// call fails: connect anew. A call that is dropped is still carried out by the server.
#[derive(Clone, Debug)]
pub struct AsyncClient {
    url: ServerUrl,
    calls: mpsc::Sender<Call>,
}

struct Call {
    line: Vec<u8>,
    kind: Kind,
    waiter: Box<dyn Waiter>,
}

/// Who waits for an answer, and where a value lands.
trait Waiter: Sink + Send {
    fn answer(self: Box<Self>, outcome: Result<Outcome, ClientError>);
}

/// Where the octets of a value land; it comes back with the answer.
trait Landing: Send {
    fn open(&mut self, _: &Info) -> Result<(), ClientError> {
        Ok(())
    }
    /// Takes the next `len` octets, which lie in `windows` from `offset` on.
    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()>;
    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Waiting<L> {
    answer: oneshot::Sender<(Result<Outcome, ClientError>, L)>,
    landing: L,
}

impl<L: Landing> Sink for Waiting<L> {
    fn open(&mut self, info: &Info) -> Result<bool, ClientError> {
        self.landing.open(info)?;
        Ok(!self.answer.is_closed())
    }

    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()> {
        self.landing.take(windows, offset, len)
    }

    fn close(&mut self) -> io::Result<()> {
        self.landing.close()
    }
}

impl<L: Landing> Waiter for Waiting<L> {
    fn answer(self: Box<Self>, outcome: Result<Outcome, ClientError>) {
        let Self { answer, landing } = *self;
        // Whoever asked may have gone.
        let _ = answer.send((outcome, landing));
    }
}

/// Memory that grows as the value comes.
#[derive(Default)]
struct Growing(Vec<u8>);

impl Landing for Growing {
    fn open(&mut self, info: &Info) -> Result<(), ClientError> {
        self.0.reserve_exact(info.len.min(TRUSTED_BYTES_MAX) as usize);
        Ok(())
    }

    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()> {
        let start = self.0.len();
        self.0.resize(start + len, 0);
        windows.copy_out(offset, &mut self.0[start..]);
        Ok(())
    }
}

/// The front of the caller's memory.
struct Front {
    buffer: Vec<u8>,
    filled: usize,
}

impl Landing for Front {
    fn open(&mut self, info: &Info) -> Result<(), ClientError> {
        let capacity = self.buffer.len();
        if info.len > capacity as u64 {
            return Err(ClientError::TooLong { len: info.len, capacity });
        }
        Ok(())
    }

    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()> {
        let end = self.filled + len;
        windows.copy_out(offset, &mut self.buffer[self.filled..end]);
        self.filled = end;
        Ok(())
    }
}

/// The caller's writer. Octets pass through `bounce`.
struct Through<W> {
    writer: W,
    bounce: Vec<u8>,
    /// The writer's error: the rest of the value is passed over, for others share the connection.
    failed: Option<io::Error>,
}

impl<W: Write> Through<W> {
    fn write(&mut self, windows: &SharedSpan, mut offset: usize, mut len: usize) -> io::Result<()> {
        self.bounce.resize(len.min(BOUNCE_BYTES).max(self.bounce.len()), 0);
        while len > 0 {
            let count = len.min(self.bounce.len());
            windows.copy_out(offset, &mut self.bounce[..count]);
            self.writer.write_all(&self.bounce[..count])?;
            offset += count;
            len -= count;
        }
        Ok(())
    }
}

impl<W: Write + Send> Landing for Through<W> {
    fn take(&mut self, windows: &SharedSpan, offset: usize, len: usize) -> io::Result<()> {
        if self.failed.is_none() {
            self.failed = self.write(windows, offset, len).err();
        }
        Ok(())
    }

    fn close(&mut self) -> io::Result<()> {
        if self.failed.is_none() {
            self.failed = self.writer.flush().err();
        }
        Ok(())
    }
}

impl AsyncClient {
    /// Connects to a `native+…` URL.
    ///
    /// # Errors
    /// As [`NativeClient::connect`](super::NativeClient::connect).
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O and time.
    pub async fn connect(url: ServerUrl, options: Options) -> Result<Self, ClientError> {
        let fabric = fabric_of(&url)?;
        let unreachable = |source| ClientError::Unreachable { url: url.clone(), source };
        let Some(place) = url.native_place() else {
            return Err(unreachable(ErrorKind::Unsupported.into()));
        };
        let found: Vec<_> = tokio::net::lookup_host(place).await.map_err(unreachable)?.collect();
        let mut last = unreachable(io::Error::new(ErrorKind::NotFound, "the name has no address"));
        for address in found {
            match Self::dial(url.clone(), &*fabric, &Address::Socket(address), options).await {
                Err(error @ ClientError::Unreachable { .. }) => last = error,
                client => return client,
            }
        }
        Err(last)
    }

    /// Connects to a server at `address` of any fabric.
    ///
    /// # Errors
    /// As [`NativeClient::over`](super::NativeClient::over).
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub async fn over(fabric: Arc<dyn Fabric>, address: Address, options: Options) -> Result<Self, ClientError> {
        let url = ServerUrl::Native { fabric: fabric.name(), address: address.clone() };
        Self::dial(url, &*fabric, &address, options).await
    }

    async fn dial(
        url: ServerUrl,
        fabric: &dyn Fabric,
        address: &Address,
        options: Options,
    ) -> Result<Self, ClientError> {
        let mut dial = Dial::start(&url, fabric, address, options)?;
        let unreachable = |source| ClientError::Unreachable { url: url.clone(), source };
        let lane = Arc::clone(dial.lane());
        let watched = fabric::watch(&*lane).map_err(unreachable)?;
        let mut link = loop {
            if let Some(link) = dial.turn(Instant::now())? {
                break link;
            }
            lane.arm();
            if let Some(link) = dial.turn(Instant::now())? {
                break link;
            }
            tokio::select! {
                ready = watched.readable() => ready.map_err(unreachable)?.clear_ready(),
                () = tokio::time::sleep_until(dial.wakes_at().into()) => {}
            }
        };
        link.may_leave = false;
        let (calls, received) = mpsc::channel(PENDING_COUNT_MAX);
        tokio::spawn(drive(url.clone(), link, watched, received));
        Ok(Self { url, calls })
    }

    /// The server's name.
    pub fn url(&self) -> &ServerUrl {
        &self.url
    }

    /// A value, in memory that grows as it comes; `None` is a miss.
    ///
    /// # Errors
    /// [`ClientError::Refused`], and those of the connection.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<(Info, Vec<u8>)>, ClientError> {
        let (line, kind) = get_request(key.as_ref())?;
        let (outcome, Growing(value)) = self.ask(line, kind(), Growing::default()).await?;
        Ok(match outcome? {
            Outcome::Value(info) => Some((info, value)),
            _ => None,
        })
    }

    /// Writes a value to `writer` as it comes, one window at a time, and gives the writer back; `None` is a miss. The
    /// task of the connection writes, and all who share it wait meanwhile: a writer that may block for long belongs on a
    /// connection of its own.
    ///
    /// # Errors
    /// [`ClientError::Local`] if `writer` fails, once the rest of the value has passed; else as [`get`](Self::get). The
    /// writer is gone then, with what it has.
    pub async fn get_to<W: Write + Send + 'static>(
        &self,
        key: impl AsRef<[u8]>,
        writer: W,
    ) -> Result<Option<(Info, W)>, ClientError> {
        let (line, kind) = get_request(key.as_ref())?;
        let through = Through { writer, bounce: Vec::new(), failed: None };
        let (outcome, Through { writer, failed, .. }) = self.ask(line, kind(), through).await?;
        match (outcome?, failed) {
            (_, Some(source)) => Err(ClientError::Local { source }),
            (Outcome::Value(info), None) => Ok(Some((info, writer))),
            _ => Ok(None),
        }
    }

    /// Reads a value into the front of `buffer`, which comes back with the answer; `None` is a miss. An error leaves
    /// any octets in the buffer.
    ///
    /// # Errors
    /// [`ClientError::TooLong`] if the value is longer than `buffer`; else as [`get`](Self::get). After an error of the
    /// connection the buffer is gone.
    pub async fn get_into(
        &self,
        key: impl AsRef<[u8]>,
        buffer: Vec<u8>,
    ) -> Result<(Result<Option<Info>, ClientError>, Vec<u8>), ClientError> {
        let (line, kind) = get_request(key.as_ref())?;
        let (outcome, Front { buffer, .. }) = self.ask(line, kind(), Front { buffer, filled: 0 }).await?;
        Ok((outcome.map(super::value), buffer))
    }

    /// Stores a value, replacing what is there. `ttl`: `None` keeps it; else at least one second.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub async fn put(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]> + Send + 'static,
        flags: u32,
        ttl: Option<Duration>,
    ) -> Result<(), ClientError> {
        let len = value.as_ref().len() as u64;
        self.put_from(key, io::Cursor::new(value), len, flags, ttl).await
    }

    /// Stores exactly `len` octets of `value`, which are read as the server takes them, by the task of the connection: see
    /// [`get_to`](Self::get_to). If `value` fails or ends early, the connection is given up.
    ///
    /// # Errors
    /// [`ClientError::Local`] for a reader that failed; else as [`get`](Self::get).
    pub async fn put_from(
        &self,
        key: impl AsRef<[u8]>,
        value: impl Read + Send + 'static,
        len: u64,
        flags: u32,
        ttl: Option<Duration>,
    ) -> Result<(), ClientError> {
        let line = set_line(key.as_ref(), flags, ttl, len)?;
        let source = Some(Source::Owned(Box::new(value)));
        self.ask(line, Kind::Store { source, len }, Growing::default()).await?.0.map(|_| ())
    }

    /// Removes a value; `false` if there was none.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        let line = ended(command(b"delete", key.as_ref())?);
        let kind = Kind::YesOrNo { yes: b"DELETED" };
        Ok(self.ask(line, kind, Growing::default()).await?.0? == Outcome::Done)
    }

    async fn ask<L: Landing + 'static>(
        &self,
        line: Vec<u8>,
        kind: Kind,
        landing: L,
    ) -> Result<(Result<Outcome, ClientError>, L), ClientError> {
        let (answer, answered) = oneshot::channel();
        let call = Call { line, kind, waiter: Box::new(Waiting { answer, landing }) };
        let lost = || ClientError::Lost {
            url: self.url.clone(),
            source: io::Error::new(ErrorKind::NotConnected, "the connection ended before this request"),
        };
        self.calls.send(call).await.map_err(|_| lost())?;
        answered.await.map_err(|_| lost())
    }
}

type Watched = tokio::io::unix::AsyncFd<std::fs::File>;

/// Owns the link until it breaks, or nobody can ask any more.
async fn drive(url: ServerUrl, mut link: Link, watched: Watched, mut calls: mpsc::Receiver<Call>) {
    let mut waiting: VecDeque<Box<dyn Waiter>> = VecDeque::new();
    let error = loop {
        match turns(&mut link, &watched, &mut calls, &mut waiting).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => break error,
        }
    };
    // One of them learns what happened, the others that it did.
    calls.close();
    let what = error.to_string();
    let mut first = Some(error);
    for waiter in waiting {
        let source = io::Error::new(ErrorKind::NotConnected, what.clone());
        let error = first.take().unwrap_or(ClientError::Lost { url: url.clone(), source });
        waiter.answer(Err(error));
    }
}

/// Moves what can be moved, then sleeps until more can; `false` once all is done and nobody can ask.
async fn turns(
    link: &mut Link,
    watched: &Watched,
    calls: &mut mpsc::Receiver<Call>,
    waiting: &mut VecDeque<Box<dyn Waiter>>,
) -> Result<bool, ClientError> {
    let lane = Arc::clone(link.lane());
    let mut is_armed = false;
    loop {
        let now = Instant::now();
        let mut moved = false;
        while waiting.len() < PENDING_COUNT_MAX
            && let Ok(call) = calls.try_recv()
        {
            accept(call, link, waiting);
        }
        moved |= link.turn(now, &mut io::empty())?;
        while let Some(waiter) = waiting.front_mut()
            && let Some(outcome) = link.poll_answer(&mut **waiter)
        {
            moved = true;
            let Some(waiter) = waiting.pop_front() else { break };
            match outcome {
                Err(error) if link.is_broken => {
                    waiting.push_front(waiter);
                    return Err(error);
                }
                outcome => waiter.answer(outcome),
            }
        }
        if moved {
            is_armed = false;
            // The other tasks of this thread have their turns too.
            tokio::task::yield_now().await;
            continue;
        }
        link.judge_rest(now)?;
        if is_armed {
            break;
        }
        lane.arm();
        is_armed = true;
    }
    let wakes_at = link.wakes_at();
    let alarm = async {
        match wakes_at {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    };
    let has_room = waiting.len() < PENDING_COUNT_MAX;
    tokio::select! {
        ready = watched.readable() => ready.map_err(|source| ClientError::Local { source })?.clear_ready(),
        call = calls.recv(), if has_room => match call {
            Some(call) => accept(call, link, waiting),
            // Whoever waits still gets an answer: a call that waits keeps a sender.
            None => return Ok(false),
        },
        () = alarm => {}
    }
    Ok(true)
}

fn accept(call: Call, link: &mut Link, waiting: &mut VecDeque<Box<dyn Waiter>>) {
    let Call { line, kind, waiter } = call;
    link.submit(line, kind, Instant::now());
    waiting.push_back(waiter);
}
