//! A client that asks at random, and knows what the answers must be.

use super::plan::{Clock, Due, Ending, Fault, Plan, RpcRdma};
use super::rig::{self, Seeded};
use super::server::{PROGRAM, Server, TRAILER, argument, result};
use super::sim::{self, CLIENT, Side};
use bulkhead::client::rpc::port::{Answer, Argument, Finished, Lent, Port, attributes};
use bulkhead::fabric::{Address, Attributes, Cause, Event, Lane, SharedSpan};
use bulkhead::wire::codec::Reader;
use bulkhead::wire::onc_rpc::{AcceptStatus, CallHeader, Item, OpaqueAuth, PayloadWriter, Reply, ReplyHeader, Xid};
use bulkhead::wire::rpcrdma::requester::{Call, Cancel, Failure, Memory, Output, Reduction, Settings};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::AddAssign;
use std::time::{Duration, Instant};

/// Longer than any exchange here.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// What a landing holds before the server writes to it, and from when it was given back.
const BEFORE: u8 = 0xee;
const CANARY: u8 = 0xc5;
/// Room of a reply for what is no result.
const REPLY_WORDS_BYTES: u64 = 24 + 8 + 4 + 4;

struct Asked {
    number: u64,
    wanted: Vec<u32>,
    /// Memory that was lent for results, with canaries behind their largest.
    landings: Vec<Option<SharedSpan>>,
    is_cancelled: bool,
}

/// What came of all calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub answered: u64,
    pub cancelled: u64,
    pub long_calls: u64,
    pub long_replies: u64,
    pub chunks: u64,
    pub inline: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.answered += other.answered;
        self.cancelled += other.cancelled;
        self.long_calls += other.long_calls;
        self.long_replies += other.long_replies;
        self.chunks += other.chunks;
        self.inline += other.inline;
    }
}

pub struct Client {
    plan: Plan,
    port: Port,
    asked: BTreeMap<u32, Asked>,
    /// Memory of calls that were given up.
    canaries: Vec<SharedSpan>,
    /// Calls still to be made.
    left: u64,
    next_number: u64,
    /// Connections before this one.
    generation: u64,
    /// Outputs that were put off.
    late: u64,
    /// A call was given up at once on this connection.
    has_revoked: bool,
    pub tally: Tally,
}

impl Client {
    pub fn new(plan: Plan) -> Self {
        let port = Port::new(Settings {
            own: plan.told[CLIENT],
            credits: plan.credits[CLIENT],
            segment_bytes_max: plan.segment_bytes_max,
            reply_timeout: REPLY_TIMEOUT,
            attempts_max: NonZeroU32::MAX,
            first_xid: Xid(plan.seed as u32),
        });
        Self {
            plan,
            port,
            asked: BTreeMap::new(),
            canaries: Vec::new(),
            left: plan.exchanges,
            next_number: 1,
            generation: 0,
            late: 0,
            has_revoked: false,
            tally: Tally::default(),
        }
    }

    /// After a connection: each call was carried out once at most, and those that were answered once; and nobody has
    /// written to memory that was given back.
    pub fn check(&self, server: &Server) {
        assert!(server.executed.values().all(|times| *times == 1), "{:?}", server.executed);
        for span in &self.canaries {
            let mut octets = vec![0; span.len()];
            span.copy_out(0, &mut octets);
            assert!(octets.iter().all(|octet| *octet == CANARY), "written after it was given back");
        }
    }

    fn ask(&mut self, clock: &mut Clock) -> bool {
        if self.left == 0 || self.asked.len() >= self.plan.depth {
            return false;
        }
        self.left -= 1;
        let number = self.next_number;
        self.next_number += 1;
        let segment = self.plan.segment_bytes_max.get().min(4096);
        let choice = [0, 1, 5, 80, segment - 1, segment, segment + 1, 2 * segment + 7];
        let dice = &mut clock.dice;
        let lens = |dice: &mut Seeded| -> Vec<u32> { (0..dice.below(4)).map(|_| *dice.pick(&choice)).collect() };
        let (items, maxima) = (lens(dice), lens(dice));
        let wanted: Vec<u32> = maxima.iter().map(|max| *dice.pick(&[*max, *max, max / 2, 0])).collect();
        let padding = *dice.pick(&[0, 0, 0, 300, 1200]);
        let reductions = [Reduction::Fit, Reduction::Always, Reduction::Never];
        let [arguments_reduction, results_reduction] = [*dice.pick(&reductions), *dice.pick(&reductions)];
        let arguments = items.iter().enumerate().map(|(at, len)| {
            let octets = argument(number, at, *len);
            if octets.is_empty() || dice.one_in(2) {
                return Argument::Octets(octets);
            }
            let span = SharedSpan::new(octets.len()).unwrap();
            span.copy_in(0, &octets);
            Argument::Span(span)
        });
        let arguments: Vec<Argument> = arguments.collect();
        let landings: Vec<Option<SharedSpan>> = maxima
            .iter()
            .map(|max| {
                (*max > 0 && dice.one_in(2)).then(|| {
                    let span = SharedSpan::new(*max as usize + 64).unwrap();
                    span.copy_in(0, &vec![BEFORE; span.len()]);
                    span
                })
            })
            .collect();
        let reply_padding = *dice.pick(&[0, 0, 0, 1100, 5000]);
        let lent = Lent { arguments, results: landings.clone() };
        let xid = self.port.call(lent, |xid| {
            let mut message = PayloadWriter::new();
            let words = message.words();
            let header = CallHeader {
                xid,
                program: PROGRAM,
                version: 1,
                procedure: 1,
                credential: OpaqueAuth::NONE,
                verifier: OpaqueAuth::NONE,
            };
            header.write(words);
            words.u64(number);
            words.array(&wanted, |words, len| words.u32(*len));
            words.u32(reply_padding);
            words.opaque(&vec![7; padding]);
            words.count(items.len());
            (0..).zip(&items).for_each(|(token, len)| message.item(Item { token, len: *len }));
            message.words().u32(TRAILER);
            Call {
                message: message.finish(),
                arguments: arguments_reduction,
                results: maxima.clone(),
                results_reduction,
                reply_bytes_max: REPLY_WORDS_BYTES + u64::from(reply_padding) + 4 + 4 * maxima.len() as u64,
            }
        });
        clock.note(|| format!("asks {number}: {items:?} {padding}, {wanted:?} of {maxima:?} {reply_padding}"));
        self.asked.insert(xid.0, Asked { number, wanted, landings, is_cancelled: false });
        if self.plan.cancels && clock.dice.one_in(6) {
            let (delay, factor) = (clock.delay(), clock.dice.below(20) as u32);
            let when = if clock.dice.one_in(4) { Cancel::Now } else { Cancel::Answered };
            clock.after(delay * factor, CLIENT, Due::Cancel { xid, when });
        }
        true
    }

    fn finish(&mut self, finished: Finished, clock: &mut Clock) {
        let Finished { xid, outcome, lent } = finished;
        let asked = self.asked.remove(&xid.0).expect("a call is over once");
        clock.note(|| format!("has {} of {}: {:?}", outcome.is_ok(), asked.number, outcome.as_ref().err()));
        match outcome {
            Ok(answer) => {
                self.check_answer(xid, &asked, &answer);
                self.tally.answered += 1;
            }
            // Nothing of it was sent; another is asked in its place.
            Err(Failure::Refused) if self.plan.faults.shortage_per_mille > 0 => self.left += 1,
            Err(Failure::Cancelled) if asked.is_cancelled => self.tally.cancelled += 1,
            Err(failure) => panic!("call {}: {failure}", asked.number),
        }
        // The caller has its memory, and uses it for something else.
        for span in lent.results.into_iter().flatten() {
            span.copy_in(0, &vec![CANARY; span.len()]);
            self.canaries.push(span);
        }
    }

    fn check_answer(&mut self, xid: Xid, asked: &Asked, answer: &Answer) {
        let mut reader = Reader::new(&answer.stream);
        let header = ReplyHeader::read(&mut reader).unwrap();
        assert_eq!(header, ReplyHeader { xid, reply: Reply::accepted(AcceptStatus::Success) });
        assert_eq!(reader.u64().unwrap(), asked.number);
        let padding = reader.opaque(usize::MAX).unwrap();
        assert!(padding.iter().all(|octet| *octet == 9));
        if padding.len() > 4000 {
            self.tally.long_replies += 1;
        }
        assert_eq!(reader.u32().unwrap() as usize, asked.wanted.len());
        for (at, len) in asked.wanted.iter().enumerate() {
            let expected = result(asked.number, at, *len);
            let Some((span, octets)) = answer.chunks.get(at) else {
                assert_eq!(reader.opaque(usize::MAX).unwrap(), expected, "result {at} of {}", asked.number);
                self.tally.inline += 1;
                continue;
            };
            self.tally.chunks += 1;
            assert_eq!(reader.u32().unwrap(), *len);
            assert_eq!(*octets, u64::from(*len));
            let mut found = vec![0; *len as usize];
            span.copy_out(0, &mut found);
            assert!(found == expected, "result {at} of {}", asked.number);
            if let Some(landing) = &asked.landings[at] {
                let mut whole = vec![0; landing.len()];
                landing.copy_out(0, &mut whole);
                assert!(whole[..expected.len()] == expected, "result {at} of {} is elsewhere", asked.number);
                assert!(whole[expected.len()..].iter().all(|octet| *octet == BEFORE), "written past the result");
            }
        }
        assert_eq!(reader.u32().unwrap(), TRAILER);
        reader.finish().unwrap();
    }
}

impl sim::Client<RpcRdma> for Client {
    fn dial(&mut self, lane: &dyn Lane, to: &Address) -> Result<(), Ending> {
        self.generation += 1;
        (self.late, self.has_revoked) = (0, false);
        let wanted = attributes(self.port.requester(), Duration::from_secs(5));
        // The server's Reads come in at most so many at a time.
        let qp = lane.dial(to, Attributes { read_depth: 4, ..wanted }).map_err(|_| Ending::Refused)?;
        self.port.attach(qp).map_err(|_| Ending::Refused)
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.asked.is_empty() && self.late == 0
    }

    fn answered(&self) -> u64 {
        self.tally.answered
    }

    fn check_done(&self, lane: &dyn Lane) {
        assert_eq!(lane.resources().regions, 0, "a region outlives its call");
    }
}

impl Side<RpcRdma> for Client {
    fn handle_event(&mut self, event: Event, _: &dyn Lane, clock: &mut Clock) -> Result<(), Ending> {
        if event.qp() != self.port.number() {
            return Ok(());
        }
        let ending = match &event {
            Event::Rejected { .. } => Some(Ending::Refused),
            Event::Disconnected { cause, .. } => {
                assert!(self.port.has_all_buffers(), "a buffer was lost");
                match cause {
                    Cause::Local | Cause::Peer | Cause::Lost(_) => Some(Ending::Lost(cause.clone())),
                    Cause::PeerFault(_) | Cause::RefusedByPeer(_) if self.has_revoked => {
                        Some(Ending::Fault(Fault::Revoked))
                    }
                    cause => panic!("{cause}"),
                }
            }
            _ => None,
        };
        self.port.handle_event(event);
        let credits = self.port.requester().credits();
        assert!(credits.window() <= self.plan.credits[CLIENT]);
        let Some(ending) = ending else { return Ok(()) };
        self.late = 0;
        // What the end of the connection means to calls, they are told now: there may be no turn after it.
        self.drive(clock)?;
        let is_revoked = self.has_revoked && matches!(ending, Ending::Lost(_));
        Err(if is_revoked { Ending::Fault(Fault::Revoked) } else { ending })
    }

    fn handle_due(&mut self, due: Due, clock: &mut Clock) {
        match due {
            Due::Obey { generation, output } => {
                // The connection is gone, and the region with it.
                if generation == self.generation && self.port.is_attached() {
                    self.late -= 1;
                    clock.note(|| format!("at last {output:?}"));
                    self.port.obey(output, clock.now);
                }
            }
            Due::Cancel { xid, when } => {
                let is_pending = self.port.cancel(xid, when);
                let asked = self.asked.get_mut(&xid.0).filter(|_| is_pending);
                clock.note(|| format!("cancels {:?}: {when:?}", asked.as_ref().map(|asked| asked.number)));
                if let Some(asked) = asked {
                    asked.is_cancelled = true;
                    self.has_revoked |= when == Cancel::Now;
                }
            }
            due => panic!("{due:?}"),
        }
    }

    fn drive(&mut self, clock: &mut Clock) -> Result<(), Ending> {
        loop {
            let mut moved = false;
            while let Some(output) = self.port.poll_output(clock.now) {
                self.tally.long_calls += u64::from(is_long(&output));
                if matches!(output, Output::Invalidate { .. }) && self.plan.late && clock.dice.one_in(2) {
                    let (delay, generation) = (clock.delay() * 10, self.generation);
                    self.late += 1;
                    clock.after(delay, CLIENT, Due::Obey { generation, output });
                    continue;
                }
                moved |= self.port.obey(output, clock.now);
            }
            while let Some(finished) = self.port.take_finished() {
                self.finish(finished, clock);
                moved = true;
            }
            // Calls wait for the connection and for each other; that is part of it.
            while self.port.is_attached() && self.ask(clock) {
                moved = true;
            }
            if !moved {
                return Ok(());
            }
        }
    }

    fn wakes_at(&self) -> Option<Instant> {
        self.port.deadline()
    }

    fn disconnect(&mut self) -> bool {
        self.port.disconnect();
        self.port.is_attached()
    }

    fn is_over(&self) -> bool {
        !self.port.is_attached()
    }
}

fn is_long(output: &Output) -> bool {
    matches!(output, Output::Register(registration) if matches!(registration.memory, Memory::Call(_)))
}

/// Octets that no other argument or result has.
pub fn octets(number: u64, kind: u64, at: usize, len: u32) -> Vec<u8> {
    rig::octets(number << 8 | kind << 7 | at as u64, len as usize)
}
