//! `CqPoller`: one lane of a fabric. The only one that polls it; many connections share it.
//!
//! ```text
//!   progress, up to 32 events -> one Events(batch) per connection -> yield -+
//!       ^                                                                   |
//!       +------ more to do, or events came <--------------------------------+
//!       |
//!       +-- arm, progress once more: nothing -> park: descriptor readable, or the lane's deadline
//! ```
//!
//! A parked lane costs nothing, however many idle connections it has. Who gets the events of a queue pair is said by a
//! plain call, [`Attachments::attach`], so that no event can overtake it.

use crate::fabric::spin::Spin;
use crate::fabric::{self, Address, ConnectRequest, Event, QpNum};
use actix::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::time::timeout_at;

/// What happened to one queue pair, in order.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Events(pub Vec<Event>);

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

/// Events taken in one turn.
const EVENTS_PER_TURN: usize = 32;

/// Who gets what of a lane. Cheap to clone.
#[derive(Clone, Default)]
pub struct Attachments {
    table: Arc<Mutex<Table>>,
}

#[derive(Default)]
struct Table {
    connections: HashMap<QpNum, Recipient<Events>>,
    listener: Option<Door>,
}

/// Who takes what peers that are not connected do.
#[derive(Clone)]
pub struct Door {
    pub asked: Recipient<Asked>,
    pub unmade: Recipient<Unmade>,
}

impl Attachments {
    /// Events of `qp` go to `connection` from now on. Call it before the queue pair is established.
    pub fn attach(&self, qp: QpNum, connection: Recipient<Events>) {
        self.table().connections.insert(qp, connection);
    }

    /// Events of `qp` go nowhere; the buffers they carry are freed.
    pub fn detach(&self, qp: QpNum) {
        let gone = self.table().connections.remove(&qp);
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

    /// Hands `events` out: one message per connection, in order of its first event. True if there were any.
    fn hand_out(&self, events: &mut Vec<Event>) -> bool {
        let any = !events.is_empty();
        let mut batches: Vec<(QpNum, Vec<Event>)> = Vec::new();
        for event in events.drain(..) {
            match event {
                Event::ConnectRequest(request) => {
                    let listener = self.table().listener.clone();
                    if let Some(listener) = listener {
                        listener.asked.do_send(Asked(request));
                    }
                }
                Event::HandshakeFailed { peer, why } => {
                    let listener = self.table().listener.clone();
                    if let Some(listener) = listener {
                        listener.unmade.do_send(Unmade { peer, why });
                    }
                }
                event => {
                    let Some(qp) = event.qp() else { continue };
                    match batches.iter_mut().find(|(of, _)| *of == qp) {
                        Some((_, batch)) => batch.push(event),
                        None => batches.push((qp, vec![event])),
                    }
                }
            }
        }
        for (qp, batch) in batches {
            let connection = self.table().connections.get(&qp).cloned();
            if let Some(connection) = connection {
                connection.do_send(Events(batch));
            }
        }
        any
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

/// Drives `lane` for ever.
async fn poll(lane: Arc<dyn fabric::Lane>, attachments: Attachments) {
    let readiness = match fabric::watch(&*lane) {
        Ok(readiness) => readiness,
        Err(error) => return tracing::error!(%error, "a fabric lane cannot be watched: its connections stand still"),
    };
    let mut events = Vec::with_capacity(EVENTS_PER_TURN);
    let mut spin = Spin::default();
    loop {
        let now = Instant::now();
        let more = lane.progress(now, &mut events, EVENTS_PER_TURN);
        let has_news = attachments.hand_out(&mut events) || more;
        if has_news {
            spin.handle_news(now);
        }
        if has_news || spin.is_worth_it(now) {
            // What the batch brings about, posts above all, comes before the next one.
            tokio::task::yield_now().await;
            continue;
        }
        lane.arm();
        let more = lane.progress(Instant::now(), &mut events, EVENTS_PER_TURN);
        if attachments.hand_out(&mut events) || more {
            tokio::task::yield_now().await;
            continue;
        }
        let ready = match lane.deadline() {
            None => Some(readiness.readable().await),
            Some(deadline) => timeout_at(deadline.into(), readiness.readable()).await.ok(),
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
