//! `CqPoller`: one lane of a fabric. The only one that polls: the lane's completions and the rings of its connections.
//!
//! ```text
//!   progress, up to 32 events ---> for each connection with news: its ring, up to 128 records
//!       ^                              |
//!       |                              v
//!       |                          one Events(batch) each: completions, what the records brought, the end
//!       |                              |
//!       +---- more to do, or news <- yield
//!       |
//!       +-- arm, progress once more: nothing -> park: descriptor, bell, or the lane's deadline
//! ```
//!
//! A connection sees one ordered history: whatever its peer wrote before it went comes before [`TransportEvent::Disconnected`].
//! A parked lane costs nothing, however many idle connections it has. A ring is looked at when the fabric has news of its
//! queue pair, when it was left with more, or when its connection [says](Attachments::wake) that there is room again. A ring that is empty
//! is [watched](fabric::MemoryRegion::watch), for fabrics that do not report each Write.
//!
//! Who gets the news of a queue pair is said by a plain call, [`Attachments::attach`], so that no event can overtake it.

use crate::fabric::spin::Spin;
use crate::fabric::{self, Address, Cause, Completion, ConnectRequest, Event, QpNum, WorkKind};
use crate::wake::Wake;
use crate::wire::native::intake::Reading;
use crate::wire::native::poison::Poison;
use crate::wire::native::window::RxLease;
use crate::wire::seq::BulkSequence;
use actix::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Instant;
use tokio::time::timeout_at;

/// Events taken in one turn.
const EVENTS_PER_TURN: usize = 32;
/// Connections that are served in one turn. Not fewer than events, so that what waits does not pile up.
const CONNECTIONS_PER_TURN: usize = EVENTS_PER_TURN;
/// A body with more octets than these is part of a stream.
const SHORT_BYTES_MAX: usize = 16 << 10;
/// How far news can travel between the actors of a connection before something is posted.
const ACTORS_PER_CONNECTION: usize = 3;
/// Records taken out of one ring in one turn.
const RECORDS_PER_TURN: usize = 128;

/// What happened to one connection.
#[derive(Debug)]
pub enum TransportEvent {
    /// The next so many octets of the peer's text: they follow each other in [`Batch::text`].
    Inline(usize),
    /// A window holds octets.
    BulkReady(RxLease),
    /// The peer gave windows of its own back.
    Released(BulkSequence),
    /// The ring is stopped at text for which there is no room. Said once; the next record says that it goes on.
    Stopped,
    /// A Write of ours ended: a slot was sent from, or control records are on their way.
    WriteDone(Completion),
    /// A Read of ours ended.
    ReadDone(Completion),
    /// A Send of ours ended.
    SendDone(Completion),
    /// The peer's Send filled a Receive, or it was flushed.
    Received(Completion),
    /// The peer broke the protocol of the ring, which is not read any more.
    Poisoned(Poison),
    /// The queue pair has ended. Nothing follows.
    Disconnected(Cause),
}

/// What happened, in order.
#[derive(Debug, Default)]
pub struct Batch {
    /// The octets of all [`TransportEvent::Inline`].
    pub text: Vec<u8>,
    pub events: Vec<TransportEvent>,
}

impl Batch {
    /// Adds text.
    pub fn inline(&mut self, text: &[u8]) {
        self.text.extend_from_slice(text);
        match self.events.last_mut() {
            Some(TransportEvent::Inline(len)) => *len += text.len(),
            _ => self.events.push(TransportEvent::Inline(text.len())),
        }
    }

    /// Adds an event.
    pub fn push(&mut self, event: TransportEvent) {
        self.events.push(event);
    }
}

/// What happened to one connection in one turn.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Events {
    /// Number of the first event, from 0 for the connection's first: none is missing and none comes twice.
    pub first: u64,
    pub batch: Batch,
}

/// A peer wants a connection.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Asked(pub ConnectRequest);

/// A peer came and never asked; `why` is one word for counting.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Unmade {
    pub peer: Address,
    pub why: &'static str,
}

/// The actor ends; queue pairs of its lane that live are not served any more.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stop;

/// Memory that a peer puts records into. Whoever has it is the only one to read it.
pub trait Ring: Send {
    /// Takes up to `count_max` records and adds what they brought.
    ///
    /// # Errors
    /// [`Poison`]; it is not polled again.
    fn poll(&mut self, batch: &mut Batch, count_max: usize) -> Result<Reading, Poison>;
}

/// Who gets what of a lane. Cheap to clone.
#[derive(Clone, Default)]
pub struct Attachments {
    table: Arc<Mutex<Table>>,
    bell: Arc<Wake>,
}

#[derive(Default)]
struct Table {
    connections: HashMap<QpNum, Attached>,
    /// Connections to serve, each once.
    due: VecDeque<QpNum>,
    listener: Option<Door>,
}

/// Who takes what peers that are not connected do.
#[derive(Clone)]
pub struct Door {
    pub asked: Recipient<Asked>,
    pub unmade: Recipient<Unmade>,
}

/// One connection.
struct Attached {
    connection: Recipient<Events>,
    ring: Option<Box<dyn Ring>>,
    batch: Batch,
    /// Events sent so far.
    sent: u64,
    is_due: bool,
    /// The queue pair has ended; said when the ring is empty.
    ended: Option<Cause>,
}

impl Attached {
    fn take(&mut self, event: Event) {
        self.batch.push(match event {
            Event::Completed { completion, .. } => match completion.kind {
                WorkKind::Write => TransportEvent::WriteDone(completion),
                WorkKind::Read => TransportEvent::ReadDone(completion),
                WorkKind::Send => TransportEvent::SendDone(completion),
                WorkKind::Receive => TransportEvent::Received(completion),
            },
            Event::Disconnected { cause, .. } => {
                self.ended = Some(cause);
                return;
            }
            // A look at the ring follows in any case.
            Event::Written { .. } | Event::Established { .. } => return,
            // Of those who dial, or of nobody.
            Event::Rejected { .. } | Event::ConnectRequest(_) | Event::HandshakeFailed { .. } => return,
        });
    }

    /// Takes records, and sends what has come. True if records are left.
    fn serve(&mut self) -> bool {
        let reading = self.ring.as_mut().map(|ring| ring.poll(&mut self.batch, RECORDS_PER_TURN));
        let more = matches!(reading, Some(Ok(Reading::More)));
        if let Some(Err(poison)) = reading {
            self.ring = None;
            self.batch.push(TransportEvent::Poisoned(poison));
        }
        if !more && let Some(cause) = self.ended.take() {
            // Nobody writes to the ring any more; what it is stopped at is lost with its connection.
            self.ring = None;
            self.batch.push(TransportEvent::Disconnected(cause));
        }
        if !self.batch.events.is_empty() {
            let (first, batch) = (self.sent, std::mem::take(&mut self.batch));
            self.sent += batch.events.len() as u64;
            self.connection.do_send(Events { first, batch });
        }
        more
    }
}

impl Table {
    fn mark_due(&mut self, qp: QpNum) {
        if let Some(attached) = self.connections.get_mut(&qp)
            && !std::mem::replace(&mut attached.is_due, true)
        {
            self.due.push_back(qp);
        }
    }

    /// Serves a number of connections. True if there is more to do.
    fn serve_due(&mut self) -> bool {
        for _ in 0..self.due.len().min(CONNECTIONS_PER_TURN) {
            let Some(qp) = self.due.pop_front() else { break };
            let Some(attached) = self.connections.get_mut(&qp) else { continue };
            attached.is_due = attached.serve();
            if attached.is_due {
                self.due.push_back(qp);
            }
        }
        !self.due.is_empty()
    }
}

impl Attachments {
    /// News of `qp` goes to `connection` from now on, with what comes into `ring`. Call it before the queue pair is
    /// established.
    pub fn attach(&self, qp: QpNum, connection: Recipient<Events>, ring: Option<Box<dyn Ring>>) {
        let attached = Attached { connection, ring, batch: Batch::default(), sent: 0, is_due: false, ended: None };
        self.table().connections.insert(qp, attached);
        // Looking at a ring is what makes the fabric watch it.
        self.wake(qp);
    }

    /// The ring of `qp` has room again: it is polled though nothing comes from the fabric.
    pub fn wake(&self, qp: QpNum) {
        self.table().mark_due(qp);
        self.bell.ring();
    }

    /// The ring of `qp` is not read any more: its connection is over. Other news goes on, up to the last.
    pub fn silence(&self, qp: QpNum) {
        let mut table = self.table();
        let gone = table.connections.get_mut(&qp).and_then(|attached| attached.ring.take());
        drop(table);
        drop(gone);
    }

    /// News of `qp` goes nowhere; the buffers it carries are freed.
    pub fn detach(&self, qp: QpNum) {
        let mut table = self.table();
        let gone = table.connections.remove(&qp);
        drop(table);
        drop(gone);
    }

    /// Requests of peers go to `listener`; without one they are rejected.
    pub fn listen(&self, listener: Option<Door>) {
        let gone = std::mem::replace(&mut self.table().listener, listener);
        drop(gone);
    }

    /// Connections attached.
    pub fn len(&self) -> usize {
        self.table().connections.len()
    }

    /// No connection is attached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands `events` out, and what the rings hold: one message per connection. True if there is more to do, or was news.
    fn hand_out(&self, events: &mut Vec<Event>) -> bool {
        let has_news = !events.is_empty();
        let mut strangers = Vec::new();
        let mut table = self.table();
        for event in events.drain(..) {
            match (event.qp(), event) {
                (_, event @ (Event::ConnectRequest(_) | Event::HandshakeFailed { .. })) => strangers.push(event),
                (Some(qp), event) => {
                    if let Some(attached) = table.connections.get_mut(&qp) {
                        attached.take(event);
                        table.mark_due(qp);
                    }
                }
                (None, _) => {}
            }
        }
        let more = table.serve_due();
        let listener = if strangers.is_empty() { None } else { table.listener.clone() };
        drop(table);
        if let Some(listener) = listener {
            for event in strangers {
                match event {
                    Event::ConnectRequest(request) => listener.asked.do_send(Asked(request)),
                    Event::HandshakeFailed { peer, why } => listener.unmade.do_send(Unmade { peer, why }),
                    _ => {}
                }
            }
        }
        has_news || more
    }
}

/// The actor. One per lane and fabric, on the thread of the lane.
pub struct CqPoller {
    lane: Arc<dyn fabric::Lane>,
    attachments: Attachments,
}

impl CqPoller {
    pub fn new(lane: Arc<dyn fabric::Lane>, attachments: Attachments) -> Self {
        Self { lane, attachments }
    }
}

/// A window with more than a few octets has left.
fn is_of_stream(event: &Event) -> bool {
    matches!(event, Event::Completed { completion, .. } if completion.len > SHORT_BYTES_MAX)
}

/// What a batch brings about, posts above all, comes before the next one: a message to the connection, one of it to each of
/// its other two actors, one between these. The runtime's own way to yield costs two system calls, as it looks at its
/// descriptors each time; this thread's queue comes round without any, and the runtime looks at them now and then.
async fn give_turns() {
    for _ in 0..ACTORS_PER_CONNECTION {
        let mut is_done = false;
        poll_fn(|ctx| {
            if std::mem::replace(&mut is_done, true) {
                return Poll::Ready(());
            }
            ctx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}

/// Drives `lane` for ever.
async fn poll(lane: Arc<dyn fabric::Lane>, attachments: Attachments) {
    let readiness = match fabric::watch(&*lane) {
        Ok(readiness) => readiness,
        Err(error) => return tracing::error!(%error, "a fabric lane cannot be watched: its connections stand still"),
    };
    let mut events = Vec::with_capacity(EVENTS_PER_TURN);
    let mut spin = Spin::new(&*lane);
    loop {
        let now = Instant::now();
        let more = lane.progress(now, &mut events, EVENTS_PER_TURN);
        if events.iter().any(is_of_stream) {
            spin.handle_stream(now);
        }
        let has_news = attachments.hand_out(&mut events) || more;
        if has_news {
            spin.handle_news(now);
        }
        if has_news || spin.is_worth_it(now) {
            give_turns().await;
            continue;
        }
        lane.arm();
        let more = lane.progress(Instant::now(), &mut events, EVENTS_PER_TURN);
        if attachments.hand_out(&mut events) || more {
            give_turns().await;
            continue;
        }
        let news = async {
            tokio::select! {
                ready = readiness.readable() => Some(ready),
                () = attachments.bell.rung() => None,
            }
        };
        let ready = match lane.deadline() {
            None => news.await,
            Some(until) => timeout_at(until.into(), news).await.ok().flatten(),
        };
        match ready {
            Some(Ok(mut guard)) => guard.clear_ready(),
            Some(Err(error)) => return tracing::error!(%error, "a fabric lane cannot be watched any more"),
            None => {}
        }
    }
}

impl Actor for CqPoller {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.spawn(poll(self.lane.clone(), self.attachments.clone()).into_actor(self));
    }
}

impl Handler<Stop> for CqPoller {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        self.attachments.listen(None);
        ctx.stop();
    }
}
