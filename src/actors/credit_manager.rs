//! `CreditManager`: the one way out of a native connection. It alone posts.
//!
//! ```text
//!  Connection  -- Turn: completions, releases, places --> +---------------+ -- post, kick --> queue pair
//!  BulkWindow  -- Filled, Failed ----------------------->  | Egress        |
//!                                                          | peer's ring   | -- SlotRetired, Cancel --> BulkWindow
//!  Connection  <-- Posted, Missed, Over, Finished -------- +---------------+
//! ```
//!
//! Its mailbox is used by `do_send` alone: one `Turn` for each turn of its connection, one `Filled` or `Failed` for each
//! place, of which there are at most [`PLACES_MAX`].

use crate::actors::bulk_window::{BulkWindow, Cancel, Failed, Filled, SlotsRetired};
use crate::fabric::{self, Completion, Flags, LocalBuf, PostError, QueuePair, Status, Work};
use crate::metrics::Metrics;
use crate::wire::native::descriptor::{Descriptor, Negotiated, RemoteAddress};
use crate::wire::native::egress::{Completed, Egress, Failure, InlineText, PartOf, Place, Post, ValueId, WorkId};
use crate::wire::native::endpoint::EndCause;
use crate::wire::native::poison::Poison;
use crate::wire::native::ring::SlotWrite;
use crate::wire::native::window::{Releases, Ticket};
use crate::wire::seq::BulkSequence;
use actix::prelude::*;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Places that a connection takes ahead, however large the peer's ring is.
pub const PLACES_MAX: usize = 1024;
/// A wait shorter than this is spent yielding: the timer of the runtime is coarser.
const SPIN_MAX: Duration = Duration::from_micros(100);
/// Pause before a post that the queue refused is tried again.
const POST_PAUSE: Duration = Duration::from_millis(1);
/// Values that turned out to be none while places of theirs may still come. As many as can be pinned, and some.
const MISSED_MAX: usize = 1024;

/// What one turn of the connection found and decided.
#[derive(Debug, Default, Message)]
#[rtype(result = "()")]
pub struct Turn {
    /// What the fabric and the peer did, in order.
    pub advances: Vec<Advance>,
    /// The peer sent a record: it is awake.
    pub is_peer_awake: bool,
    /// What to send next.
    pub places: Vec<Place>,
}

/// Something moved that posts wait for.
#[derive(Debug)]
pub enum Advance {
    /// A request of ours ended.
    Done(Completion),
    /// The peer gave windows back.
    Released(BulkSequence),
}

/// Say [`Told::Finished`] once all places have reached the peer.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Finish;

/// End now.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stop;

/// What the manager tells its connection.
#[derive(Clone, Debug, Message)]
#[rtype(result = "()")]
pub enum Told {
    /// So many places have left, or are gone: as many can be taken anew.
    Posted(usize),
    /// A value turned out to be none: what of it has no place must take none.
    Missed(ValueId),
    /// The connection cannot go on.
    Over(EndCause),
    /// A request could not be posted.
    Refused(PostError),
    /// All places have reached the peer.
    Finished,
}

/// What a completion that will come is about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Expected {
    Egress(WorkId),
    /// The Read behind the last place.
    Finish,
}

/// The actor. One per connection.
pub struct CreditManager {
    egress: Egress,
    peer: Descriptor,
    qp: Arc<dyn QueuePair>,
    releases: Releases,
    connection: Recipient<Told>,
    bulk: Addr<BulkWindow>,
    metrics: Arc<Metrics>,
    started: Instant,
    /// Octets of filled slots, by slot.
    filled: HashMap<u32, LocalBuf>,
    /// Where Reads of the peer's counter land: one for refreshing, one for the end.
    sinks: Vec<LocalBuf>,
    /// Posted by the egress, not yet taken by the queue.
    unposted: Vec<Work>,
    /// The queue has taken something that the fabric was not told to hurry.
    kick_is_due: bool,
    expected: VecDeque<Expected>,
    missed: VecDeque<ValueId>,
    finishing: bool,
    over: bool,
    timer: Option<SpawnHandle>,
}

/// What a manager is made of.
pub struct Parts {
    pub peer: Descriptor,
    pub limits: Negotiated,
    pub qp: Arc<dyn QueuePair>,
    pub releases: Releases,
    pub connection: Recipient<Told>,
    pub bulk: Addr<BulkWindow>,
    pub metrics: Arc<Metrics>,
    /// Two private buffers of the queue pair.
    pub sinks: Vec<LocalBuf>,
}

impl CreditManager {
    pub fn new(parts: Parts) -> Self {
        let Parts { peer, limits, qp, releases, connection, bulk, metrics, sinks } = parts;
        let depth = u32::try_from(qp.attributes().send_depth).unwrap_or(u32::MAX).min(512);
        // One work request is kept for the Read behind the last place.
        let egress = Egress::new(peer, limits, depth - 1);
        Self {
            egress,
            peer,
            qp,
            releases,
            connection,
            bulk,
            metrics,
            started: Instant::now(),
            filled: HashMap::new(),
            sinks,
            unposted: Vec::new(),
            kick_is_due: false,
            expected: VecDeque::new(),
            missed: VecDeque::new(),
            finishing: false,
            over: false,
            timer: None,
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn tell(&mut self, told: Told) {
        self.metrics.connections.messages.add(1);
        self.connection.do_send(told);
    }

    fn end(&mut self, cause: EndCause) {
        if !std::mem::replace(&mut self.over, true) {
            self.tell(Told::Over(cause));
        }
    }

    /// The one place that acts.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        if self.over {
            return;
        }
        if let Err(cause) = self.post_all() {
            return self.end(cause);
        }
        let posted = self.egress.take_posted();
        if posted > 0 {
            self.tell(Told::Posted(posted));
        }
        if self.finishing && self.egress.is_empty() && self.unposted.is_empty() && self.sinks.len() == 2 {
            self.finishing = false;
            let Some(into) = self.sinks.pop() else { return };
            self.unposted.push(self.read(into));
            self.expected.push_back(Expected::Finish);
        }
        self.post_unposted();
        self.set_timer(ctx);
    }

    fn post_all(&mut self) -> Result<(), EndCause> {
        if let Some(sequence) = self.releases.poll() {
            self.egress.handle_release_due(sequence);
        }
        while let Some(post) = self.egress.poll_post(self.now())? {
            self.translate(post);
        }
        if self.egress.broken().is_some() {
            return Err(EndCause::FailedRead);
        }
        Ok(())
    }

    fn read(&self, into: LocalBuf) -> Work {
        let RemoteAddress { address, key } = self.peer.ring_at;
        Work::Read { into, range: 0..8, key, address, flags: Flags::SIGNALED }
    }

    fn control(to: RemoteAddress, write: &SlotWrite, signaled: bool) -> Work {
        let from = fabric::Source::Inline(write.octets().to_vec());
        let flags = Flags { signaled, ..Flags::default() };
        Work::Write { from, key: to.key, address: to.address, flags }
    }

    fn translate(&mut self, post: Post) {
        let written = &self.metrics.connections.bytes_written;
        match post {
            Post::Control { id, to, write, signaled } => {
                written.add(write.octets().len() as u64);
                self.unposted.push(Self::control(to, &write, signaled));
                if signaled {
                    self.expected.push_back(Expected::Egress(id));
                }
            }
            Post::Body { id, slot, len, to, ready_to, ready, .. } => {
                written.add(u64::from(len) + ready.octets().len() as u64);
                let buf = self.filled.remove(&slot).expect("a filled slot has its octets");
                let from = fabric::Source::Buffer { buf, range: 0..len as usize };
                let key = to.key;
                self.unposted.push(Work::Write { from, key, address: to.address, flags: Flags::SIGNALED });
                self.unposted.push(Self::control(ready_to, &ready, false));
                self.expected.push_back(Expected::Egress(id));
            }
            Post::Credits { id, .. } => {
                let into = self.sinks.pop().expect("one Read of the counter is out at a time");
                self.unposted.push(self.read(into));
                self.expected.push_back(Expected::Egress(id));
            }
        }
    }

    fn post_unposted(&mut self) {
        if !self.unposted.is_empty() {
            match self.qp.post(&mut self.unposted) {
                Ok(_) => self.kick_is_due = true,
                // Tried again by the timer.
                Err(PostError::Full { .. }) => {}
                Err(error) => {
                    self.over = true;
                    return self.tell(Told::Refused(error));
                }
            }
        }
        // The line of a short value waits for the value: one system call and one wake of the peer instead of two.
        if self.kick_is_due && !self.egress.awaits_short_body() {
            self.kick_is_due = false;
            self.qp.kick();
        }
    }

    fn set_timer(&mut self, ctx: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        let retry = (!self.unposted.is_empty()).then_some(POST_PAUSE);
        let now = self.now();
        let refresh = self.egress.deadline().map(|deadline| deadline.saturating_sub(now));
        let Some(wait) = [retry, refresh].into_iter().flatten().min() else { return };
        let until = Instant::now() + wait;
        let waiting = async move {
            if wait > SPIN_MAX {
                return tokio::time::sleep(wait).await;
            }
            while Instant::now() < until {
                tokio::task::yield_now().await;
            }
        };
        let timer = waiting.into_actor(self).map(|(), actor, ctx| {
            actor.timer = None;
            actor.drive(ctx);
        });
        self.timer = Some(ctx.spawn(timer));
    }

    fn handle_completion(&mut self, completion: Completion, retired: &mut SlotsRetired) -> Result<(), EndCause> {
        let Completion { status, buf, .. } = completion;
        if status != Status::Done {
            // The end of the queue pair follows, and says why.
            self.over = true;
            return Ok(());
        }
        let found = completion.id.index.into();
        let Some(expected) = self.expected.pop_front() else {
            return Err(Poison::UnexpectedCompletion { found, expected: 0 }.into());
        };
        let Expected::Egress(id) = expected else {
            self.sinks.extend(buf);
            self.tell(Told::Finished);
            return Ok(());
        };
        match (self.egress.handle_completion(id)?, buf) {
            (Completed::Control, _) => {}
            (Completed::Slot(slot), Some(buf)) => retired.0.push((slot, Some(buf))),
            (Completed::Credits, Some(buf)) => {
                let octets = buf.as_slice().first_chunk().copied().unwrap_or_default();
                self.sinks.push(buf);
                let now = self.now();
                self.egress.handle_credits(u64::from_le_bytes(octets), now)?;
            }
            (Completed::Slot(_) | Completed::Credits, None) => {
                return Err(Poison::UnexpectedCompletion { found, expected: id.0 }.into());
            }
        }
        Ok(())
    }

    fn handle_turn(&mut self, turn: Turn) -> Result<(), EndCause> {
        let mut retired = SlotsRetired(Vec::new());
        for advance in turn.advances {
            match advance {
                Advance::Done(completion) => self.handle_completion(completion, &mut retired)?,
                Advance::Released(sequence) => self.egress.handle_released(sequence)?,
            }
        }
        if !retired.0.is_empty() {
            self.metrics.connections.messages.add(1);
            self.bulk.do_send(retired);
        }
        if turn.is_peer_awake {
            self.egress.handle_record();
        }
        let mut cancelled = Vec::new();
        let mut dropped = 0;
        for place in turn.places {
            match self.without_missed(place) {
                Ok(place) => self.egress.enqueue(place),
                Err(ticket) => {
                    dropped += 1;
                    cancelled.extend(ticket);
                }
            }
        }
        if !cancelled.is_empty() {
            self.metrics.connections.messages.add(1);
            self.bulk.do_send(Cancel(cancelled));
        }
        if dropped > 0 {
            self.tell(Told::Posted(dropped));
        }
        Ok(())
    }

    /// A place that was taken before its connection heard that its value is none.
    fn without_missed(&mut self, place: Place) -> Result<Place, Option<Ticket>> {
        let is_missed = |value: &ValueId| self.missed.contains(value);
        match place {
            Place::Body { ticket, value, .. } if is_missed(&value) => Err(Some(ticket)),
            Place::Inline { part_of: Some(PartOf::Line { value, .. }), .. } if is_missed(&value) => Err(None),
            Place::Inline { text, part_of: Some(PartOf::Trailer { value, prefix }) } if is_missed(&value) => {
                match text.as_bytes().get(usize::from(prefix)..) {
                    Some(rest @ [_, ..]) => Ok(Place::Inline { text: InlineText::first_of(rest), part_of: None }),
                    _ => Err(None),
                }
            }
            place => Ok(place),
        }
    }
}

impl Actor for CreditManager {
    type Context = Context<Self>;
}

impl Handler<Turn> for CreditManager {
    type Result = ();

    fn handle(&mut self, turn: Turn, ctx: &mut Self::Context) {
        if self.over {
            return;
        }
        match self.handle_turn(turn) {
            Ok(()) => self.drive(ctx),
            Err(cause) => self.end(cause),
        }
    }
}

impl Handler<Filled> for CreditManager {
    type Result = ();

    fn handle(&mut self, filled: Filled, ctx: &mut Self::Context) {
        let Filled { ticket, slot, buf } = filled;
        let index = slot.index();
        match self.egress.handle_filled(ticket, slot) {
            None => _ = self.filled.insert(index, buf),
            Some(slot) => self.bulk.do_send(SlotsRetired(vec![(slot, Some(buf))])),
        }
        self.drive(ctx);
    }
}

impl Handler<Failed> for CreditManager {
    type Result = ();

    fn handle(&mut self, failed: Failed, ctx: &mut Self::Context) {
        if let Failure::Missed { value, cancelled, freed } = self.egress.handle_failed(failed.ticket) {
            self.metrics.connections.messages.add(2);
            self.bulk.do_send(Cancel(cancelled));
            let freed = freed.into_iter().map(|slot| {
                let buf = self.filled.remove(&slot.index());
                (slot, buf)
            });
            self.bulk.do_send(SlotsRetired(freed.collect()));
            if self.missed.len() == MISSED_MAX {
                self.missed.pop_front();
            }
            self.missed.push_back(value);
            self.tell(Told::Missed(value));
        }
        self.drive(ctx);
    }
}

impl Handler<Finish> for CreditManager {
    type Result = ();

    fn handle(&mut self, _: Finish, ctx: &mut Self::Context) {
        self.finishing = true;
        self.drive(ctx);
    }
}

impl Handler<Stop> for CreditManager {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        self.over = true;
        ctx.stop();
    }
}
