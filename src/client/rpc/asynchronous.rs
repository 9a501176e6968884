//! The client for tasks of tokio: one connection, any number of callers.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use super::keys::yes_or_no;
use super::link::{Link, RpcOptions, random};
use super::objects::{PutOptions, PutPlan, deadline_us, put_version, refused, ttl_s};
use super::operation::{self, GetRange, GotRange, OfKeys, Operation};
use super::port::{Finished, Lent};
use super::raw::RawCall;
use super::{Answer, Argument, Cancel, fabric_of, not_rpc};
use crate::client::{ClientError, ServerUrl};
use crate::fabric::{self, Address, Fabric, SharedSpan};
use crate::programs::bulkhead::{self, Page, PinnedVersion, Stat, Status};
use crate::wire::onc_rpc::Xid;
use crate::wire::rpcrdma::requester::{Call, Failure, Terms};

/// Calls accepted and not over, at most.
const PENDING_COUNT_MAX: usize = 1024;

/// A client of one server for any number of tasks: clones share one connection, and their calls overlap on it.
///
/// The connection lives in a task of its own, which ends with the last clone. A call whose future is dropped is given up:
/// its memory stays lent until the server has answered, and [`SharedSpan::get_mut`] says when that is over.
#[derive(Clone, Debug)]
pub struct AsyncRpcClient {
    url: ServerUrl,
    options: RpcOptions,
    calls: mpsc::Sender<Command>,
    cancels: mpsc::UnboundedSender<(u64, Cancel)>,
    terms: watch::Receiver<Terms>,
    next_id: Arc<AtomicU64>,
    next_draft: Arc<AtomicU64>,
}

struct Command {
    id: u64,
    call: Call,
    lent: Lent,
    answer: oneshot::Sender<Settled>,
}

/// A call that is over, in words for its caller.
#[derive(Debug)]
struct Settled {
    finished: Finished,
    outcome: Result<Answer, ClientError>,
}

/// A call under way. Dropping it gives it up, see [`AsyncRpcClient`].
#[derive(Debug)]
#[must_use = "dropping a call gives it up"]
pub struct AsyncCall {
    id: u64,
    cancels: mpsc::UnboundedSender<(u64, Cancel)>,
    answered: Option<oneshot::Receiver<Settled>>,
    url: ServerUrl,
}

impl AsyncCall {
    /// The reply message.
    ///
    /// # Errors
    /// As [`RpcClient::call`](super::RpcClient::call).
    pub async fn wait(mut self) -> Result<Answer, ClientError> {
        self.settled().await?.outcome
    }

    /// Gives the call up, and waits until nobody can reach its memory. `false` if its reply has come already.
    pub async fn cancel(mut self, when: Cancel) -> bool {
        // Whoever would hear of it may have gone, and the connection with it.
        let _ = self.cancels.send((self.id, when));
        self.settled().await.is_ok_and(|settled| settled.outcome.is_err())
    }

    async fn settled(&mut self) -> Result<Settled, ClientError> {
        let lost = || lost(&self.url);
        let Some(answered) = &mut self.answered else { return Err(lost()) };
        let settled = answered.await.map_err(|_| lost());
        self.answered = None;
        settled
    }
}

impl Drop for AsyncCall {
    fn drop(&mut self) {
        if self.answered.is_some() {
            let _ = self.cancels.send((self.id, Cancel::Answered));
        }
    }
}

fn lost(url: &ServerUrl) -> ClientError {
    let source = io::Error::new(ErrorKind::NotConnected, "the task of the connection has ended");
    ClientError::Lost { url: url.clone(), source }
}

impl AsyncRpcClient {
    /// Connects to an `rpc+…` URL.
    ///
    /// # Errors
    /// As [`RpcClient::connect`](super::RpcClient::connect).
    ///
    /// # Panics
    /// Outside of a tokio runtime with I/O and time.
    pub async fn connect(url: ServerUrl, options: RpcOptions) -> Result<Self, ClientError> {
        let fabric = fabric_of(&url)?;
        let place = url.rpc_place().ok_or_else(|| not_rpc(&url))?;
        let unreachable = |source| ClientError::Unreachable { url: url.clone(), source };
        let found = tokio::net::lookup_host(place).await.map_err(unreachable)?.map(Address::Socket).collect();
        Self::make(Link::new(url, &*fabric, found, options)?).await
    }

    /// Connects to a server at `address` of any fabric.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Panics
    /// As [`connect`](Self::connect).
    pub async fn over(fabric: &Arc<dyn Fabric>, address: Address, options: RpcOptions) -> Result<Self, ClientError> {
        let url = ServerUrl::Rpc { fabric: fabric.name(), address: address.clone() };
        Self::make(Link::new(url, &**fabric, vec![address], options)?).await
    }

    async fn make(mut link: Link) -> Result<Self, ClientError> {
        let unreachable = |source| ClientError::Unreachable { url: link.url().clone(), source };
        let watched = fabric::watch(&**link.lane()).map_err(unreachable)?;
        link.connect(Instant::now());
        let terms = loop {
            moved(&mut link, &watched).await;
            if let Some(terms) = link.terms() {
                break terms;
            }
            if let Some(error) = link.unreachable() {
                return Err(error);
            }
        };
        let (calls, received) = mpsc::channel(PENDING_COUNT_MAX);
        let (cancels, cancelled) = mpsc::unbounded_channel();
        let (told, terms) = watch::channel(terms);
        let (url, options) = (link.url().clone(), *link.options());
        tokio::spawn(drive(link, watched, received, cancelled, told));
        let next_draft = Arc::new(AtomicU64::new(random()));
        Ok(Self { url, options, calls, cancels, terms, next_id: Arc::default(), next_draft })
    }

    /// The server's name.
    pub fn url(&self) -> &ServerUrl {
        &self.url
    }

    /// Calls `call` and waits for the reply message, whatever it says.
    ///
    /// # Errors
    /// As [`RpcClient::call`](super::RpcClient::call).
    pub async fn call(&self, call: RawCall) -> Result<Answer, ClientError> {
        self.submit(call).await?.wait().await
    }

    /// Makes a call without waiting for it. Calls go out in their order; replies come in any.
    ///
    /// # Errors
    /// [`ClientError::Lost`].
    pub async fn submit(&self, call: RawCall) -> Result<AsyncCall, ClientError> {
        let (call, lent) = call.into_call();
        self.submit_call(call, lent).await
    }

    async fn submit_call(&self, call: Call, lent: Lent) -> Result<AsyncCall, ClientError> {
        let (answer, answered) = oneshot::channel();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let command = Command { id, call, lent, answer };
        self.calls.send(command).await.map_err(|_| lost(&self.url))?;
        Ok(AsyncCall { id, cancels: self.cancels.clone(), answered: Some(answered), url: self.url.clone() })
    }

    /// Calls the procedure that does nothing.
    ///
    /// # Errors
    /// As [`RpcClient::ping`](super::RpcClient::ping).
    pub async fn ping(&self) -> Result<(), ClientError> {
        self.run(Operation::null()).await.map(drop)
    }

    /// Reads ranges of values, see [`RpcClient::get_ranges`](super::RpcClient::get_ranges).
    ///
    /// # Errors
    /// As there.
    pub async fn get_ranges(
        &self,
        ranges: &[GetRange],
        deadline: Option<Duration>,
    ) -> Result<Vec<GotRange>, ClientError> {
        let terms = *self.terms.borrow();
        let calls = operation::gets(ranges, self.options.crc32c, deadline_us(deadline), &terms)?;
        let mut got = Vec::with_capacity(ranges.len());
        for (settled, answered, answer) in self.run_all(calls.into_iter().map(|(_, operation)| operation)).await? {
            got.extend(operation::ranges(&settled, &answered, answer));
        }
        Ok(got)
    }

    /// Reads the whole of a value; `None` is a miss. Its memory is made once its length is known.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the value was replaced meanwhile, else as [`get_ranges`](Self::get_ranges).
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<(Stat, Vec<u8>)>, ClientError> {
        let key = key.as_ref();
        let Some(stat) = self.stats(&[key]).await?.into_iter().next().filter(|stat| stat.status == Status::Ok) else {
            return Ok(None);
        };
        let len =
            usize::try_from(stat.len).map_err(|_| ClientError::Local { source: ErrorKind::OutOfMemory.into() })?;
        let mut span = SharedSpan::new(len.max(1)).map_err(|source| ClientError::Local { source })?;
        let step = self.range_bytes();
        let parts = (0..len.div_ceil(step)).map(|at| GetRange {
            key: key.to_vec(),
            version: stat.version,
            offset: (at * step) as u64,
            into: span.slice(at * step..len.min((at + 1) * step)),
        });
        let parts: Vec<GetRange> = parts.collect();
        for (part, got) in parts.iter().zip(self.get_ranges(&parts, None).await?) {
            match got.status {
                Status::Ok if got.count as usize == part.into.len() => {}
                Status::Ok => return Err(refused(Status::IoError)),
                Status::NotFound => return Err(refused(Status::Changed)),
                status => return Err(refused(status)),
            }
        }
        drop(parts);
        let octets = span.get_mut().map(|memory| memory[..len].to_vec());
        octets.map(|octets| Some((stat, octets))).ok_or_else(|| refused(Status::IoError))
    }

    /// Stores all of `value`, which is lent meanwhile: nobody writes to it. Gives the version.
    ///
    /// # Errors
    /// As [`RpcClient::put`](super::RpcClient::put).
    pub async fn put(
        &self,
        key: impl AsRef<[u8]>,
        value: &SharedSpan,
        options: PutOptions,
    ) -> Result<u64, ClientError> {
        let draft = self.next_draft.fetch_add(1, Ordering::Relaxed);
        let plan = PutPlan { key: key.as_ref(), draft, len: value.len() as u64, options };
        let step = self.range_bytes();
        let part = |at: usize| -> Result<Operation, ClientError> {
            let span = value.slice(at..value.len().min(at + step));
            let crc32c = self.options.crc32c.then(|| operation::crc32c_of(&span, span.len()));
            plan.call(
                at as u64,
                if span.is_empty() { Argument::Octets(Vec::new()) } else { Argument::Span(span) },
                crc32c,
            )
        };
        let starts = (0..value.len().div_ceil(step).max(1)).map(|at| at * step);
        let calls: Vec<Operation> = starts.map(part).collect::<Result<_, _>>()?;
        let mut version = 0;
        for (_, _, answer) in self.run_all(calls).await? {
            version = put_version(answer)?;
        }
        Ok(version)
    }

    /// What is known of each key, in the order of `keys`.
    ///
    /// # Errors
    /// As [`get_ranges`](Self::get_ranges).
    pub async fn stats<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Stat>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        for answer in self.ask_keys(OfKeys::Stat { until_miss: false }, keys).await? {
            if let bulkhead::Answer::Stat { stats, .. } = answer {
                found.extend(stats);
            }
        }
        Ok(found)
    }

    /// Removes a value; `false` if there was none.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool, ClientError> {
        yes_or_no(&self.delete_all(&[key]).await?)
    }

    /// Removes values, whatever their version. One status for each key.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub async fn delete_all<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Status>, ClientError> {
        self.statuses(OfKeys::Delete, keys).await
    }

    /// Gives values a new time to live (`None`: for ever). One status for each key.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub async fn touch_all<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        ttl: Option<Duration>,
    ) -> Result<Vec<Status>, ClientError> {
        self.statuses(OfKeys::Touch { ttl_s: ttl_s(ttl) }, keys).await
    }

    /// Keeps values from being evicted, see [`RpcClient::pin`](super::RpcClient::pin).
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub async fn pin<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<PinnedVersion>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        for answer in self.ask_keys(OfKeys::Pin, keys).await? {
            if let bulkhead::Answer::Pin(pinned) = answer {
                found.extend(pinned);
            }
        }
        Ok(found)
    }

    /// Ends what [`pin`](Self::pin) began. One status for each key.
    ///
    /// # Errors
    /// As [`stats`](Self::stats).
    pub async fn unpin<K: AsRef<[u8]>>(&self, keys: &[K]) -> Result<Vec<Status>, ClientError> {
        self.statuses(OfKeys::Unpin, keys).await
    }

    /// One page of keys, see [`RpcClient::list_page`](super::RpcClient::list_page).
    ///
    /// # Errors
    /// As there.
    pub async fn list_page(
        &self,
        prefix: impl AsRef<[u8]>,
        cookie: impl AsRef<[u8]>,
        count_max: u32,
    ) -> Result<Page, ClientError> {
        let terms = *self.terms.borrow();
        match self.run(Operation::list(prefix.as_ref(), cookie.as_ref(), count_max, &terms)?).await? {
            bulkhead::Answer::List(page) if page.status == Status::Ok => Ok(page),
            bulkhead::Answer::List(page) => Err(refused(page.status)),
            answer => unreachable!("{answer:?} to a LIST"),
        }
    }

    /// Octets of one range, from a word boundary to a word boundary.
    fn range_bytes(&self) -> usize {
        (self.options.range_bytes as usize).next_multiple_of(8)
    }

    async fn run(&self, operation: Operation) -> Result<bulkhead::Answer, ClientError> {
        let answers = self.run_all([operation]).await?;
        answers.into_iter().next().map(|(_, _, answer)| answer).ok_or_else(|| lost(&self.url))
    }

    /// Makes all calls, then waits for the answers in their order. The first error is given once all are over.
    async fn run_all(
        &self,
        calls: impl IntoIterator<Item = Operation>,
    ) -> Result<Vec<(Finished, Answer, bulkhead::Answer)>, ClientError> {
        let mut under_way = Vec::new();
        for Operation { call, lent, expectation } in calls {
            under_way.push((self.submit_call(call, lent).await?, expectation));
        }
        let (mut found, mut first_error) = (Vec::with_capacity(under_way.len()), None);
        for (mut call, expectation) in under_way {
            let read = call.settled().await.and_then(|Settled { finished, outcome }| {
                let answered = outcome?;
                let answer = operation::read(&finished, &answered, &expectation, &self.url)?;
                Ok((finished, answered, answer))
            });
            match read {
                Ok(read) => found.push(read),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        first_error.map_or(Ok(found), Err)
    }

    async fn ask_keys<K: AsRef<[u8]>>(&self, what: OfKeys, keys: &[K]) -> Result<Vec<bulkhead::Answer>, ClientError> {
        let terms = *self.terms.borrow();
        let calls = operation::of_keys(what, keys, &terms)?;
        let read = self.run_all(calls.into_iter().map(|(_, operation)| operation)).await?;
        Ok(read.into_iter().map(|(_, _, answer)| answer).collect())
    }

    async fn statuses<K: AsRef<[u8]>>(&self, what: OfKeys, keys: &[K]) -> Result<Vec<Status>, ClientError> {
        let mut found = Vec::with_capacity(keys.len());
        for answer in self.ask_keys(what, keys).await? {
            if let bulkhead::Answer::Statuses(statuses) = answer {
                found.extend(statuses);
            }
        }
        Ok(found)
    }
}

type Watched = tokio::io::unix::AsyncFd<std::fs::File>;

/// Moves what can be moved, or waits until something can be.
async fn moved(link: &mut Link, watched: &Watched) {
    if link.turn(Instant::now()) {
        return tokio::task::yield_now().await;
    }
    link.lane().arm();
    if link.turn(Instant::now()) {
        return;
    }
    let wakes_at = link.wakes_at();
    let alarm = async {
        match wakes_at {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        ready = watched.readable() => match ready {
            Ok(mut ready) => ready.clear_ready(),
            Err(error) => {
                tracing::error!(%error, "a lane cannot be waited for");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        },
        () = alarm => {}
    }
}

/// Calls under way, and who waits for each.
#[derive(Default)]
struct UnderWay {
    waiting: HashMap<Xid, (u64, oneshot::Sender<Settled>)>,
    xids: HashMap<u64, Xid>,
}

impl UnderWay {
    fn accept(&mut self, command: Command, link: &mut Link) {
        let Command { id, call, lent, answer } = command;
        // It was given up before its turn came.
        if answer.is_closed() {
            return;
        }
        let xid = link.submit(call, lent, Instant::now());
        self.waiting.insert(xid, (id, answer));
        self.xids.insert(id, xid);
    }

    fn cancel(&self, id: u64, when: Cancel, link: &mut Link) {
        if let Some(xid) = self.xids.get(&id) {
            link.cancel(*xid, when);
        }
    }

    /// Somebody waits for a call.
    fn is_waited_for(&self) -> bool {
        self.waiting.values().any(|(_, answer)| !answer.is_closed())
    }

    fn settle(&mut self, mut finished: Finished, link: &Link) {
        let Some((id, answer)) = self.waiting.remove(&finished.xid) else { return };
        self.xids.remove(&id);
        let outcome = std::mem::replace(&mut finished.outcome, Err(Failure::Cancelled));
        let outcome = outcome.map_err(|failure| link.error(failure));
        // Whoever asked may have gone.
        let _ = answer.send(Settled { finished, outcome });
    }
}

/// Owns the link until nobody can ask any more, and nobody waits.
async fn drive(
    mut link: Link,
    watched: Watched,
    mut calls: mpsc::Receiver<Command>,
    mut cancels: mpsc::UnboundedReceiver<(u64, Cancel)>,
    told: watch::Sender<Terms>,
) {
    let mut under_way = UnderWay::default();
    let mut is_open = true;
    // Calls outlive the clients that made them.
    while is_open || under_way.is_waited_for() {
        while link.pending_count() < PENDING_COUNT_MAX
            && let Ok(command) = calls.try_recv()
        {
            under_way.accept(command, &mut link);
        }
        while let Ok((id, when)) = cancels.try_recv() {
            under_way.cancel(id, when, &mut link);
        }
        tokio::select! {
            biased;
            () = moved(&mut link, &watched) => {}
            command = calls.recv(), if is_open && under_way.waiting.len() < PENDING_COUNT_MAX => match command {
                Some(command) => under_way.accept(command, &mut link),
                None => is_open = false,
            },
            Some((id, when)) = cancels.recv() => under_way.cancel(id, when, &mut link),
        }
        if let Some(terms) = link.terms() {
            told.send_if_modified(|known| std::mem::replace(known, terms) != terms);
        }
        while let Some(finished) = link.take_finished() {
            under_way.settle(finished, &link);
        }
    }
}
