//! `BulkWindow`: the TX slots of a connection on a fabric. It alone fills them.
//!
//! By the native door, where what is filled leaves in the order of the places:
//!
//! ```text
//!  Connection -- Fill --> waits for a slot --> in RAM: copied at once -------------------------> Filled -> CreditManager
//!                                        |--> on disk: the slot -> DiskTail -> the slot ---------->  |
//!                                        `--> on disk, cut otherwise: staging buffer -> copied --->  |
//!  CreditManager -- SlotsRetired, Cancel --> slots are free again <----------------------------------+
//! ```
//!
//! A segment that lies in a window as a whole is read straight into the slot and checked there: nothing is copied. With
//! windows of 256 KiB or more those are all segments but the ones that an append joined. Elsewhere (windows shorter
//! than a segment, cuts that the disk cannot reach) the segment goes through a staging buffer of the lane, where it stays
//! until its last window is filled, unless others of the lane wait for buffers.
//!
//! A part of a slot that is away at the disk belongs to the read alone. When the connection ends, the actor stays until
//! every one is back, and keeps what the connection must not give up before (docs/design.md, section 1): its queue pair, its
//! regions and its place among the connections.
//!
//! Its mailbox is used by `do_send` alone: `Fill` for each place of the connection, one answer for each read.

use crate::actors::connection::Lane;
use crate::actors::disk_tail::{ReadTail, TailError, TailRead};
use crate::actors::slot_memory::SlotMemory;
use crate::fabric::LocalBuf;
use crate::fabric::region::aligned::ALIGN_BYTES;
use crate::fabric::staging::StagingBuf;
use crate::metrics::{CopyCounts, Count};
use crate::store::Pinned;
use crate::store::object::{Object, Range, Run};
use crate::store::segment::{Content, Segment};
use crate::wire::native::stream::{FillRequest, Piece};
use crate::wire::native::window::{FailedFill, Grant, Ticket, TxSlot, TxSlots};
use actix::prelude::*;
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is being sent.
#[derive(Clone)]
pub enum Source {
    /// A value, pinned until the last of it lies in a slot.
    Held(Arc<Held>),
    /// A value that somebody else keeps pinned.
    Object(Arc<Object>),
    /// A part of what is no value yet, or no more.
    Run(Arc<Run>),
    /// What is no value.
    Octets(Arc<Vec<u8>>),
}

/// A pin that is counted.
pub struct Held {
    pinned: Pinned,
    count: Arc<AtomicUsize>,
}

impl Source {
    /// `count` counts it for as long as it lives.
    pub fn new(pinned: Pinned, count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self::Held(Arc::new(Held { pinned, count }))
    }

    /// The value.
    fn object(&self) -> Option<&Arc<Object>> {
        match self {
            Self::Held(held) => Some(held.pinned.object()),
            Self::Object(object) => Some(object),
            Self::Run(_) | Self::Octets(_) => None,
        }
    }

    /// Octets that lie in segments.
    fn range(&self, offset: u64, len: u64) -> Option<Range<'_>> {
        match self {
            Self::Run(run) => Some(run.range(offset, len)),
            _ => self.object().map(|object| object.range(offset, len)),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held(held) => held.pinned.fmt(f),
            Self::Object(object) => write!(f, "{} octets of a value", object.len()),
            Self::Run(run) => write!(f, "{} pieces from {} on", run.pieces.len(), run.offset),
            Self::Octets(octets) => write!(f, "{} octets", octets.len()),
        }
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

/// A slot holds the octets of a place, from its start on.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Filled {
    pub ticket: Ticket,
    pub slot: TxSlot,
    pub buf: LocalBuf,
}

/// A place can never be filled.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Failed {
    pub ticket: Ticket,
}

/// Who gets what is filled: known only once this actor is.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Serve {
    pub filled: Recipient<Filled>,
    pub failed: Recipient<Failed>,
}

/// Fill nothing more, and end as soon as the disk has given back what is of slots.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Stop;

/// What a connection gives back only after its slots have come back: kept, never looked at.
pub type Life = Rc<dyn Any>;

/// A slot that is being filled.
struct Job {
    slot: u32,
    memory: SlotMemory,
    /// What comes through staging buffers.
    parts: Vec<Part>,
    failed: bool,
}

impl Job {
    fn is_done(&self) -> bool {
        self.parts.is_empty() && self.memory.is_whole()
    }
}

/// A segment that is being read to `at` of the slot of `job`.
struct Direct {
    job: Ticket,
    segment: Arc<Segment>,
    at: usize,
}

/// Octets `from` to `from + len` of a segment on disk go to `at` of the slot.
struct Part {
    segment: Arc<Segment>,
    from: usize,
    len: usize,
    at: usize,
    /// The segment has no octets behind these.
    last: bool,
}

/// A segment that is wanted from disk in a staging buffer.
struct Read {
    segment: Arc<Segment>,
    started: bool,
}

/// The actor. One per connection.
pub struct BulkWindow {
    slots: TxSlots<Piece<Source>>,
    bufs: Vec<Option<LocalBuf>>,
    jobs: HashMap<Ticket, Job>,
    /// Parts of slots that the disk has.
    direct: HashMap<u64, Direct>,
    reads: HashMap<u64, Read>,
    next_read: u64,
    /// The segment read last, while windows of it are to come.
    kept: Option<(Arc<Segment>, StagingBuf)>,
    waits_for_staging: bool,
    /// Slots that wait for the disk, for its connection to see.
    filling: Arc<AtomicUsize>,
    lane: Lane,
    credit: Option<Serve>,
    stopping: bool,
    /// Dropped after all memory above.
    _life: Life,
}

impl BulkWindow {
    /// Slots of `bufs`, one each. `life` is kept for as long as any of them may be written to; `filling` shows how many of
    /// them wait for the disk.
    pub fn new(bufs: Vec<LocalBuf>, lane: Lane, life: Life, filling: Arc<AtomicUsize>) -> Self {
        Self {
            slots: TxSlots::new(u32::try_from(bufs.len()).unwrap_or(u32::MAX)),
            bufs: bufs.into_iter().map(Some).collect(),
            jobs: HashMap::new(),
            direct: HashMap::new(),
            reads: HashMap::new(),
            next_read: 0,
            kept: None,
            waits_for_staging: false,
            filling,
            lane,
            credit: None,
            stopping: false,
            _life: life,
        }
    }

    fn count_message(&self) {
        self.lane.session.metrics.connections.messages.add(1);
    }

    fn count_copied(&self, way: fn(&CopyCounts) -> &Count, len: usize) {
        way(&self.lane.session.metrics.copied).add(len as u64);
    }

    /// The one place that acts.
    fn drive(&mut self, ctx: &mut Context<Self>) {
        if self.stopping {
            if self.direct.is_empty() {
                ctx.stop();
            }
            return;
        }
        while let Some(grant) = self.slots.poll_grant() {
            self.begin(grant, ctx);
        }
        self.start_reads(ctx);
        self.filling.store(self.jobs.len(), Ordering::Relaxed);
        if self.jobs.is_empty() && self.slots.filling_count() == 0 {
            self.kept = None;
        }
    }

    fn begin(&mut self, grant: Grant<Piece<Source>>, ctx: &mut Context<Self>) {
        let Grant { ticket, slot, source: piece } = grant;
        let buf = self.bufs[slot as usize].take().expect("a free slot has its octets");
        let mut memory = SlotMemory::new(buf);
        let (start, end) = (piece.offset, piece.offset + u64::from(piece.len));
        let (mut parts, mut direct, mut failed, mut at) = (Vec::new(), Vec::new(), false, 0);
        if let Source::Octets(octets) = &piece.value {
            // They are in memory, so within usize.
            memory.octets_mut(0, piece.len as usize).copy_from_slice(&octets[start as usize..end as usize]);
            self.count_copied(|copied| &copied.reply_to_slot, piece.len as usize);
        }
        for stored in piece.value.range(start, end - start).into_iter().flatten() {
            let (in_segment, len) = (stored.start as usize, stored.len as usize);
            let (place, is_last) = (at, in_segment + len == stored.segment.len() as usize);
            at += len;
            match stored.segment.content() {
                Content::Ram(ram) => {
                    memory.octets_mut(place, len).copy_from_slice(stored.octets(&ram));
                    self.count_copied(|copied| &copied.arena_to_slot, len);
                }
                Content::Lost => failed = true,
                Content::Disk { extent, crcs } => {
                    let kept = self.kept.as_ref().filter(|(segment, _)| Arc::ptr_eq(segment, &stored.segment));
                    if let Some((_, staged)) = kept {
                        let octets = &staged.as_slice()[in_segment..in_segment + len];
                        memory.octets_mut(place, len).copy_from_slice(octets);
                        self.count_copied(|copied| &copied.staging_to_slot, len);
                        if is_last {
                            self.kept = None;
                        }
                        continue;
                    }
                    let segment = stored.segment;
                    let is_whole = in_segment == 0 && is_last;
                    // The disk writes whole blocks of 4 KiB: no other octets may lie in the last of them.
                    let is_end = at == piece.len as usize;
                    let is_aligned = place.is_multiple_of(ALIGN_BYTES) && (is_end || len.is_multiple_of(ALIGN_BYTES));
                    if is_whole && is_aligned && !self.is_wanted(&segment) {
                        direct.push((place, segment, extent, crcs));
                    } else {
                        parts.push(Part { segment, from: in_segment, len, at: place, last: is_last });
                    }
                }
            }
        }
        if failed {
            parts.clear();
            direct.clear();
        }
        for (at, segment, extent, crcs) in direct {
            let (len, keep, reply) = (segment.len(), segment.clone(), ctx.address().recipient());
            let (into, read) = (memory.lend(at, len as usize), self.next_read);
            self.next_read += 1;
            self.direct.insert(read, Direct { job: ticket, segment, at });
            self.lane.tail.do_send(ReadTail { extent, len, crcs, into, keep, ticket: read, reply });
            self.count_message();
        }
        for part in &parts {
            if !self.is_wanted(&part.segment) {
                self.reads.insert(self.next_read, Read { segment: part.segment.clone(), started: false });
                self.next_read += 1;
            }
        }
        self.jobs.insert(ticket, Job { slot, memory, parts, failed });
        self.finish_if_done(ticket);
    }

    /// A staging buffer is to be filled with it.
    fn is_wanted(&self, segment: &Arc<Segment>) -> bool {
        self.reads.values().any(|read| Arc::ptr_eq(&read.segment, segment))
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
                self.count_message();
            }
            // It came back to RAM, or its drive was lost, while this waited.
            Content::Ram(ram) => {
                let octets = &ram.as_slice()[..read.segment.len() as usize];
                self.hand_round(ticket, Some(octets), |copied| &copied.arena_to_slot);
            }
            Content::Lost => self.handle_staged(ticket, None),
        }
    }

    fn handle_staged(&mut self, ticket: u64, staged: Option<StagingBuf>) {
        let Some(staged) = staged else {
            self.lane.session.metrics.failed_reads.add(1);
            self.hand_round(ticket, None, |copied| &copied.staging_to_slot);
            return;
        };
        let taken = self.hand_round(ticket, Some(staged.as_slice()), |copied| &copied.staging_to_slot);
        let Some((segment, is_used_up)) = taken else { return };
        self.lane.session.store.warm(&segment, &staged.as_slice()[..segment.len() as usize]);
        if !is_used_up && self.lane.staging.available() > 0 {
            self.kept = Some((segment, staged));
        }
    }

    /// Copies the octets of the segment that read `ticket` wanted, none if they cannot be had, to where they are wanted.
    /// Returns the segment, and whether windows of it are not to come.
    fn hand_round(
        &mut self,
        ticket: u64,
        octets: Option<&[u8]>,
        way: fn(&CopyCounts) -> &Count,
    ) -> Option<(Arc<Segment>, bool)> {
        let Read { segment, .. } = self.reads.remove(&ticket)?;
        let (mut is_used_up, mut copied_bytes, mut touched) = (false, 0, Vec::new());
        for (ticket, job) in &mut self.jobs {
            let Job { memory, parts, failed, .. } = job;
            parts.retain(|part| {
                if !Arc::ptr_eq(&part.segment, &segment) {
                    return true;
                }
                match octets {
                    Some(octets) => {
                        let octets = &octets[part.from..part.from + part.len];
                        memory.octets_mut(part.at, part.len).copy_from_slice(octets);
                        copied_bytes += part.len;
                    }
                    None => *failed = true,
                }
                is_used_up |= part.last;
                touched.push(*ticket);
                false
            });
        }
        self.count_copied(way, copied_bytes);
        touched.sort_unstable();
        touched.dedup();
        touched.into_iter().for_each(|ticket| self.finish_if_done(ticket));
        Some((segment, is_used_up))
    }

    /// A part of a slot is back.
    fn handle_direct(&mut self, ticket: u64, buf: LocalBuf, result: Result<(), TailError>) {
        let Some(Direct { job: of, segment, at }) = self.direct.remove(&ticket) else { return };
        // None after the end of the connection: the memory is freed here.
        let Some(job) = self.jobs.get_mut(&of) else { return };
        if result.is_ok() {
            self.lane.session.store.warm(&segment, &buf.as_slice()[..segment.len() as usize]);
        } else {
            self.lane.session.metrics.failed_reads.add(1);
            job.failed = true;
        }
        job.memory.take_back(at, buf);
        self.finish_if_done(of);
    }

    /// Gives a slot on once all its octets are there and nobody else has any of it.
    fn finish_if_done(&mut self, ticket: Ticket) {
        if !self.jobs.get(&ticket).is_some_and(Job::is_done) {
            return;
        }
        let Some(Job { slot: index, memory, failed, .. }) = self.jobs.remove(&ticket) else { return };
        let buf = memory.into_whole();
        let messages = &self.lane.session.metrics.connections.messages;
        if failed {
            self.bufs[index as usize] = Some(buf);
            if let FailedFill::GaveUp(piece) = self.slots.handle_failed(ticket) {
                if let Some(object) = piece.value.object() {
                    self.lane.session.store.drop_lost(object);
                }
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
        if self.stopping {
            return;
        }
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
        self.count_message();
        if let Err(error) = &result {
            tracing::error!(%error, "a segment could not be read");
        }
        self.handle_staged(ticket, result.is_ok().then_some(buf));
        self.drive(ctx);
    }
}

impl Handler<TailRead<LocalBuf>> for BulkWindow {
    type Result = ();

    fn handle(&mut self, read: TailRead<LocalBuf>, ctx: &mut Self::Context) {
        let TailRead { ticket, buf, result } = read;
        self.count_message();
        if let Err(error) = &result {
            tracing::error!(%error, "a segment could not be read into a slot");
        }
        self.handle_direct(ticket, buf, result);
        self.drive(ctx);
    }
}

impl Handler<Stop> for BulkWindow {
    type Result = ();

    fn handle(&mut self, _: Stop, ctx: &mut Self::Context) {
        self.stopping = true;
        self.credit = None;
        // The disk needs the segments it reads, which it has, and no pin.
        self.slots.cancel_all();
        self.jobs.clear();
        self.reads.clear();
        self.kept = None;
        self.drive(ctx);
    }
}
