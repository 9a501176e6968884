//! `BulkWindow`: the TX slots of a native connection. It alone fills them.
//!
//! ```text
//!  Connection -- Fill --> waits for a slot --> in RAM: copied at once ----------------------> Filled -> CreditManager
//!                                        `--> on disk: staging buffer -> DiskTail -> copied ->    |
//!  CreditManager -- SlotsRetired, Cancel --> slots are free again <-------------------------------+
//! ```
//!
//! A window may cover parts of several segments, and a segment several windows: a segment that was read stays in its
//! staging buffer until its last window is filled, unless others of the lane wait for buffers.
//!
//! Its mailbox is used by `do_send` alone: `Fill` for each place of the connection, one answer for each read.

use crate::actors::connection::Lane;
use crate::actors::credit_manager::{Failed, Filled};
use crate::actors::disk_tail::{ReadTail, TailRead};
use crate::fabric::LocalBuf;
use crate::fabric::staging::StagingBuf;
use crate::store::Pinned;
use crate::store::segment::{Content, Segment};
use crate::wire::native::stream::{FillRequest, Piece};
use crate::wire::native::window::{FailedFill, Grant, Ticket, TxSlot, TxSlots};
use actix::prelude::*;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A value that is being sent, pinned until the last of it lies in a slot.
#[derive(Clone)]
pub struct Source(Arc<Held>);

struct Held {
    pinned: Pinned,
    count: Arc<AtomicUsize>,
}

impl Source {
    /// `count` counts it for as long as it lives.
    pub fn new(pinned: Pinned, count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(Held { pinned, count }))
    }

    /// The value.
    pub fn pinned(&self) -> &Pinned {
        &self.0.pinned
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.pinned.fmt(f)
    }
}

/// Places that want their octets, in the order of the stream.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Fill(pub Vec<FillRequest<Source>>);

/// Slots were sent from, or are not wanted; each with its octets, unless it never had any.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct SlotsRetired(pub Vec<(TxSlot, Option<LocalBuf>)>);

/// Places that are gone.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Cancel(pub Vec<Ticket>);

/// Who gets what is filled: known only once this actor is.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Serve {
    pub filled: Recipient<Filled>,
    pub failed: Recipient<Failed>,
}

/// End now: reads under way give their buffers back to nobody.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stop;

/// A slot that is being filled.
struct Job {
    slot: u32,
    buf: LocalBuf,
    parts: Vec<Part>,
    failed: bool,
}

/// Octets `from` to `from + len` of a segment on disk go to `at` of the slot.
struct Part {
    segment: Arc<Segment>,
    from: usize,
    len: usize,
    at: usize,
    /// The segment has no octets of the value behind these.
    last: bool,
}

/// A segment that is wanted from disk.
struct Read {
    segment: Arc<Segment>,
    started: bool,
}

/// The actor. One per connection.
pub struct BulkWindow {
    slots: TxSlots<Piece<Source>>,
    bufs: Vec<Option<LocalBuf>>,
    jobs: HashMap<Ticket, Job>,
    reads: HashMap<u64, Read>,
    next_read: u64,
    /// The segment read last, while windows of it are to come.
    kept: Option<(Arc<Segment>, StagingBuf)>,
    waits_for_staging: bool,
    lane: Lane,
    credit: Option<Serve>,
}

impl BulkWindow {
    /// Slots of `bufs`, one each.
    pub fn new(bufs: Vec<LocalBuf>, lane: Lane) -> Self {
        Self {
            slots: TxSlots::new(u32::try_from(bufs.len()).unwrap_or(u32::MAX)),
            bufs: bufs.into_iter().map(Some).collect(),
            jobs: HashMap::new(),
            reads: HashMap::new(),
            next_read: 0,
            kept: None,
            waits_for_staging: false,
            lane,
            credit: None,
        }
    }

    /// The one place that acts.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        while let Some(grant) = self.slots.poll_grant() {
            self.begin(grant);
        }
        self.start_reads(ctx);
        if self.jobs.is_empty() && self.slots.filling_count() == 0 {
            self.kept = None;
        }
    }

    fn begin(&mut self, grant: Grant<Piece<Source>>) {
        let Grant { ticket, slot, source: piece } = grant;
        let mut buf = self.bufs[slot as usize].take().expect("a free slot has its octets");
        let (start, end) = (piece.offset, piece.offset + u64::from(piece.len));
        let (mut parts, mut failed, mut before) = (Vec::new(), false, 0);
        for stored in piece.value.pinned().pieces() {
            let (first, behind) = (before, before + u64::from(stored.len));
            before = behind;
            if behind <= start {
                continue;
            }
            if first >= end {
                break;
            }
            // All within a segment and a slot, so within usize.
            let (from, to) = (start.max(first), end.min(behind));
            let (skip, len, at) = ((from - first) as usize, (to - from) as usize, (from - start) as usize);
            let in_segment = stored.start as usize + skip;
            match stored.segment.content() {
                Content::Ram(ram) => {
                    buf.as_mut_slice()[at..at + len].copy_from_slice(&stored.octets(&ram)[skip..skip + len]);
                }
                Content::Lost => failed = true,
                Content::Disk { .. } => {
                    let kept = self.kept.as_ref().filter(|(segment, _)| Arc::ptr_eq(segment, &stored.segment));
                    if let Some((_, staged)) = kept {
                        let octets = &staged.as_slice()[in_segment..in_segment + len];
                        buf.as_mut_slice()[at..at + len].copy_from_slice(octets);
                        if to == behind {
                            self.kept = None;
                        }
                        continue;
                    }
                    let (segment, last) = (stored.segment.clone(), to == behind);
                    parts.push(Part { segment, from: in_segment, len, at, last });
                }
            }
        }
        if failed {
            parts.clear();
        }
        for part in &parts {
            if !self.reads.values().any(|read| Arc::ptr_eq(&read.segment, &part.segment)) {
                self.reads.insert(self.next_read, Read { segment: part.segment.clone(), started: false });
                self.next_read += 1;
            }
        }
        self.jobs.insert(ticket, Job { slot, buf, parts, failed });
        self.finish_if_whole(ticket);
    }

    fn start_reads(&mut self, ctx: &mut Context<Self>) {
        let mut waiting: Vec<u64> =
            self.reads.iter().filter(|(_, read)| !read.started).map(|(ticket, _)| *ticket).collect();
        waiting.sort_unstable();
        for ticket in waiting {
            if self.waits_for_staging {
                return;
            }
            let Some(into) = self.lane.staging.try_take() else {
                // Others wait as well: what is kept here goes first.
                self.kept = None;
                self.waits_for_staging = true;
                let wait = self.lane.staging.take().into_actor(self).map(move |into, actor, ctx| {
                    actor.waits_for_staging = false;
                    actor.start_read(ticket, into, ctx);
                    actor.drive(ctx);
                });
                ctx.spawn(wait);
                return;
            };
            self.start_read(ticket, into, ctx);
        }
    }

    fn start_read(&mut self, ticket: u64, into: StagingBuf, ctx: &mut Context<Self>) {
        let Some(read) = self.reads.get_mut(&ticket).filter(|read| !read.started) else { return };
        match read.segment.content() {
            Content::Disk { extent, crcs } => {
                read.started = true;
                let (len, keep, reply) = (read.segment.len(), read.segment.clone(), ctx.address().recipient());
                self.lane.tail.do_send(ReadTail { extent, len, crcs, into, keep, ticket, reply });
                self.lane.session.metrics.connections.messages.add(1);
            }
            // It came back to RAM, or its drive was lost, while this waited.
            Content::Ram(ram) => {
                let octets = &ram.as_slice()[..read.segment.len() as usize];
                let mut staged = into;
                staged.as_mut_slice()[..octets.len()].copy_from_slice(octets);
                self.handle_read(ticket, Some(staged));
            }
            Content::Lost => self.handle_read(ticket, None),
        }
    }

    fn handle_read(&mut self, ticket: u64, staged: Option<StagingBuf>) {
        let Some(Read { segment, .. }) = self.reads.remove(&ticket) else { return };
        let mut is_used_up = false;
        let mut touched = Vec::new();
        for (ticket, job) in &mut self.jobs {
            let Job { buf, parts, failed, .. } = job;
            parts.retain(|part| {
                if !Arc::ptr_eq(&part.segment, &segment) {
                    return true;
                }
                match &staged {
                    Some(staged) => {
                        let octets = &staged.as_slice()[part.from..part.from + part.len];
                        buf.as_mut_slice()[part.at..part.at + part.len].copy_from_slice(octets);
                    }
                    None => *failed = true,
                }
                is_used_up |= part.last;
                touched.push(*ticket);
                false
            });
        }
        if let Some(staged) = staged {
            self.lane.session.store.warm(&segment, &staged.as_slice()[..segment.len() as usize]);
            if !is_used_up && self.lane.staging.available() > 0 {
                self.kept = Some((segment, staged));
            }
        } else {
            self.lane.session.metrics.failed_reads.add(1);
        }
        touched.sort_unstable();
        touched.dedup();
        touched.into_iter().for_each(|ticket| self.finish_if_whole(ticket));
    }

    /// Gives a slot on once all its parts are there.
    fn finish_if_whole(&mut self, ticket: Ticket) {
        if !self.jobs.get(&ticket).is_some_and(|job| job.parts.is_empty()) {
            return;
        }
        let Some(Job { slot: index, buf, failed, .. }) = self.jobs.remove(&ticket) else { return };
        let messages = &self.lane.session.metrics.connections.messages;
        if failed {
            self.bufs[index as usize] = Some(buf);
            if let FailedFill::GaveUp(piece) = self.slots.handle_failed(ticket) {
                self.lane.session.store.drop_lost(piece.value.pinned().object());
                if let Some(credit) = &self.credit {
                    messages.add(1);
                    credit.failed.do_send(Failed { ticket });
                }
            }
            return;
        }
        match (self.slots.handle_filled(ticket), &self.credit) {
            (Some(slot), Some(credit)) => {
                messages.add(1);
                credit.filled.do_send(Filled { ticket, slot, buf });
            }
            (Some(slot), None) => {
                self.bufs[index as usize] = Some(buf);
                self.slots.handle_retired(slot);
            }
            (None, _) => self.bufs[index as usize] = Some(buf),
        }
    }
}

impl Actor for BulkWindow {
    type Context = Context<Self>;
}

impl Handler<Serve> for BulkWindow {
    type Result = ();

    fn handle(&mut self, serve: Serve, _: &mut Self::Context) {
        self.credit = Some(serve);
    }
}

impl Handler<Fill> for BulkWindow {
    type Result = ();

    fn handle(&mut self, fill: Fill, ctx: &mut Self::Context) {
        for FillRequest { ticket, piece, slow } in fill.0 {
            self.slots.handle_fill(ticket, piece, slow);
        }
        self.drive(ctx);
    }
}

impl Handler<SlotsRetired> for BulkWindow {
    type Result = ();

    fn handle(&mut self, retired: SlotsRetired, ctx: &mut Self::Context) {
        for (slot, buf) in retired.0 {
            if buf.is_some() {
                self.bufs[slot.index() as usize] = buf;
            }
            self.slots.handle_retired(slot);
        }
        self.drive(ctx);
    }
}

impl Handler<Cancel> for BulkWindow {
    type Result = ();

    fn handle(&mut self, cancel: Cancel, ctx: &mut Self::Context) {
        cancel.0.into_iter().for_each(|ticket| self.slots.cancel(ticket));
        self.drive(ctx);
    }
}

impl Handler<TailRead> for BulkWindow {
    type Result = ();

    fn handle(&mut self, read: TailRead, ctx: &mut Self::Context) {
        let TailRead { ticket, buf, result } = read;
        self.lane.session.metrics.connections.messages.add(1);
        if let Err(error) = &result {
            tracing::error!(%error, "a segment could not be read");
        }
        self.handle_read(ticket, result.is_ok().then_some(buf));
        self.drive(ctx);
    }
}

impl Handler<Stop> for BulkWindow {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        ctx.stop();
    }
}
