//! GET and READ: octets to write chunks as they come, those without a chunk into the reply.

use super::call::{Call, Found, Place, Stage, Target};
use super::reading::{Ranges, Read};
use super::{Output, PlaceSource, Service};
use crate::programs::bulkhead::get::Get;
use crate::programs::nfs::files::Reading;
use crate::store::segment::Content;
use crate::wire::native::window::Ticket;
use crate::wire::rpcrdma::Xid;
use crate::wire::rpcrdma::responder::{Fault, Span, Write};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A GET or READ between its call and its answer.
#[derive(Debug)]
pub(super) struct Getting {
    ranges: Ranges,
    deadline: Option<Duration>,
    /// Since when it waits for what other readers hold.
    busy_since: Option<Duration>,
    /// Room in the reply that it waits for.
    need: u64,
    /// Not placed.
    writes: VecDeque<Write>,
    gathers: VecDeque<(u32, Range<u32>)>,
    /// Ranges without a chunk.
    gathered: HashMap<u32, Arc<Vec<u8>>>,
}

/// Whether any of these octets are on disk alone.
fn is_slow(source: &PlaceSource, offset: u64, len: u64) -> bool {
    source.pieces(offset, len).any(|piece| !piece.segment.is_resident())
}

impl Getting {
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    pub(super) fn need(&self) -> u64 {
        self.need
    }

    pub(super) fn gathered(&self, token: u32) -> Option<Arc<Vec<u8>>> {
        self.gathered.get(&token).cloned()
    }

    /// Octets of a range have come that go into the reply.
    pub(super) fn gather(&mut self, token: u32, start: u32, octets: &[u8]) {
        if let Some(all) = self.gathered.get_mut(&token).and_then(Arc::get_mut) {
            all[start as usize..start as usize + octets.len()].copy_from_slice(octets);
        }
    }

    /// What is placed next. Pieces end where the windows of the value do, so that segments lie in them as a whole.
    pub(super) fn next_place(&mut self, window: u64) -> Option<Found> {
        while let Some(write) = self.writes.front_mut() {
            let Span::Item { token, start, len } = &mut write.from else {
                self.writes.pop_front();
                continue;
            };
            let Some((source, range)) = self.ranges.reading(*token) else {
                self.writes.pop_front();
                continue;
            };
            let (token, at) = (*token, *start);
            let offset = range.start + at;
            let count = (*len).min(window - offset % window);
            // A range has at most 2^32 - 1 octets.
            let to = Target::Push { token, start: at as u32, key: write.handle, address: write.offset };
            let slow = is_slow(&source, offset, count);
            *start += count;
            *len -= count;
            write.offset += count;
            if *len == 0 {
                self.writes.pop_front();
            }
            return Some(Found { to, source, offset, len: count as u32, slow });
        }
        while let Some((token, rest)) = self.gathers.front_mut() {
            let Some((source, range)) = self.ranges.reading(*token) else {
                self.gathers.pop_front();
                continue;
            };
            let (token, at) = (*token, rest.start);
            let offset = range.start + u64::from(at);
            let count = u64::from(rest.end - at).min(window - offset % window) as u32;
            let slow = is_slow(&source, offset, count.into());
            rest.start += count;
            if rest.start == rest.end {
                self.gathers.pop_front();
            }
            return Some(Found { to: Target::Gather { token, start: at }, source, offset, len: count, slow });
        }
        None
    }
}

/// The octets of a range, if all are in RAM.
fn octets_in_ram(source: &PlaceSource, range: &Range<u64>) -> Option<Vec<u8>> {
    let len = range.end - range.start;
    let mut octets = Vec::with_capacity(len as usize);
    for piece in source.pieces(range.start, len) {
        let Content::Ram(ram) = piece.segment.content() else { return None };
        octets.extend_from_slice(piece.octets(&ram));
    }
    Some(octets)
}

impl<B: AsRef<[u8]>> Service<B> {
    pub(super) fn begin_get(&mut self, xid: Xid, get: Get, now: Duration) {
        self.begin_ranges(xid, Ranges::Get(get), now);
    }

    /// Octets from `offset` of a file on.
    pub(super) fn begin_read(&mut self, xid: Xid, reading: Reading, offset: u64, now: Duration) {
        self.begin_ranges(xid, Ranges::Read(Read::new(reading, offset)), now);
    }

    fn begin_ranges(&mut self, xid: Xid, ranges: Ranges, now: Duration) {
        let Some(call) = self.calls.get(&xid) else { return };
        let deadline_us = ranges.deadline_us();
        let deadline = (deadline_us > 0).then(|| call.came + Duration::from_micros(deadline_us.into()));
        let getting = Getting {
            ranges,
            deadline,
            busy_since: None,
            need: 0,
            writes: VecDeque::new(),
            gathers: VecDeque::new(),
            gathered: HashMap::new(),
        };
        self.set_stage(xid, Stage::Getting(getting));
        self.find_ranges(xid, now);
    }

    /// Goes on once nothing is busy. Whoever holds pins does not wait for more: two such calls would wait for each other.
    fn find_ranges(&mut self, xid: Xid, now: Duration) {
        let reserve_wait = self.terms.reserve_wait;
        let Some(getting) = self.getting(xid) else { return };
        let ranges = &mut getting.ranges;
        if ranges.is_busy() {
            let holds = (0..ranges.len() as u32).any(|index| ranges.reading(index).is_some());
            let since = *getting.busy_since.get_or_insert(now);
            if !holds && now.saturating_sub(since) < reserve_wait {
                return self.ask_retry();
            }
            ranges.give_up();
        }
        getting.busy_since = None;
        self.find_places(xid);
    }

    fn getting(&mut self, xid: Xid) -> Option<&mut Getting> {
        match self.calls.get_mut(&xid)? {
            Call { stage: Stage::Getting(getting), .. } => Some(getting),
            _ => None,
        }
    }

    /// All is found: where do its octets go?
    fn find_places(&mut self, xid: Xid) {
        let Some(Call { stage: Stage::Getting(getting), offer, held_reply, .. }) = self.calls.get_mut(&xid) else {
            return;
        };
        let preview = match self.responder.preview_reply(xid, &getting.ranges.answer(xid)) {
            Ok(preview) => preview,
            Err(fault) => return self.refuse(xid, fault),
        };
        let has_chunk = |token: u32| offer.writes.get(token as usize).is_some_and(|chunk| !chunk.is_empty());
        let is_pushed = |write: &Write| matches!(write.from, Span::Item { token, .. } if has_chunk(token));
        getting.writes = preview.writes.into_iter().filter(is_pushed).collect();
        // All but the octets of values, and those of ranges that have no chunk.
        let mut bytes = preview.octets.len() as u64;
        for token in (0..getting.ranges.len() as u32).filter(|token| !has_chunk(*token)) {
            if let Some((_, range)) = getting.ranges.reading(token) {
                bytes += range.end - range.start;
                getting.gathers.push_back((token, 0..0));
            }
        }
        if bytes <= u64::from(self.terms.agreed.reply_inline_bytes) {
            return self.read_ranges(xid);
        }
        let bytes_max = self.long_replies.max;
        if bytes > bytes_max {
            return self.refuse(xid, Fault::LongReply { bytes, bytes_max });
        }
        if self.waiting.is_empty() && self.long_replies.take(bytes) {
            *held_reply = bytes;
            return self.read_ranges(xid);
        }
        // It holds pins and no room; whoever has room waits for disk and peer alone.
        getting.need = bytes;
        self.waiting.push_back(xid);
    }

    /// There is room for all that goes into the reply.
    pub(super) fn read_ranges(&mut self, xid: Xid) {
        let copied = &self.around.metrics.clone().copied;
        let Some(getting) = self.getting(xid) else { return };
        getting.need = 0;
        for (token, _) in std::mem::take(&mut getting.gathers) {
            let Some((source, range)) = getting.ranges.reading(token) else { continue };
            // A range has at most 2^32 - 1 octets.
            let len = (range.end - range.start) as u32;
            if let Some(octets) = octets_in_ram(&source, &range) {
                copied.arena_to_reply.add(octets.len() as u64);
                getting.ranges.handle_piece(token, 0, &octets);
                getting.gathered.insert(token, Arc::new(octets));
            } else {
                getting.gathered.insert(token, Arc::new(vec![0; len as usize]));
                getting.gathers.push_back((token, 0..len));
            }
        }
        if !self.finish_get(xid) {
            self.placing.push_back(xid);
        }
    }

    /// Octets of a range are where they have to be.
    pub(super) fn handle_piece(&mut self, xid: Xid, token: u32, start: u32, octets: &[u8]) {
        if let Some(getting) = self.getting(xid) {
            getting.ranges.handle_piece(token, start, octets);
            self.finish_get(xid);
        }
    }

    /// Octets of a range are lost.
    pub(super) fn handle_lost(&mut self, xid: Xid, token: u32) {
        if let Some(getting) = self.getting(xid) {
            getting.ranges.handle_failure(token);
            self.cancel(|place| place.call.xid == xid && place.to.token() == Some(token));
            self.finish_get(xid);
        }
    }

    /// Takes places back that nobody needs.
    fn cancel(&mut self, is_over: impl Fn(&Place) -> bool) {
        let over = self.places.iter().filter(|(_, place)| is_over(place)).map(|(ticket, _)| *ticket);
        let mut over: Vec<Ticket> = over.collect();
        over.sort_unstable();
        for ticket in over {
            self.places.remove(&ticket);
            self.outputs.push_back(Output::Cancel(ticket));
        }
    }

    /// Answers if nothing is left to read. False if something is.
    fn finish_get(&mut self, xid: Xid) -> bool {
        let Some(getting) = self.getting(xid).filter(|getting| getting.ranges.is_done()) else { return false };
        getting.writes.clear();
        getting.gathers.clear();
        getting.deadline = None;
        let payload = getting.ranges.answer(xid);
        // Nothing of it is written after its Send.
        self.cancel(|place| place.call.xid == xid);
        self.waiting.retain(|waiting| *waiting != xid);
        self.answer(xid, payload);
        true
    }

    pub(super) fn handle_get_times(&mut self, now: Duration) {
        let is_late = |call: &Call<B>| call.stage.deadline().is_some_and(|deadline| deadline <= now);
        for xid in self.calls_that(is_late) {
            if let Some(getting) = self.getting(xid) {
                getting.ranges.handle_deadline();
                self.finish_get(xid);
            }
        }
    }

    pub(super) fn retry_gets(&mut self, now: Duration) {
        let is_busy = |call: &Call<B>| matches!(&call.stage, Stage::Getting(Getting { busy_since: Some(_), .. }));
        for xid in self.calls_that(is_busy) {
            let store = self.around.store.clone();
            if let Some(getting) = self.getting(xid) {
                getting.ranges.handle_retry(&store);
                self.find_ranges(xid, now);
            }
        }
    }
}

impl Target {
    const fn token(&self) -> Option<u32> {
        match self {
            Self::Push { token, .. } | Self::Gather { token, .. } => Some(*token),
            Self::Octets { .. } => None,
        }
    }
}
