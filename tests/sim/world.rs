//! One thread, two lanes of a faulty loopback fabric, and a clock that stands still between steps.
//!
//! ```text
//!   awake   --- turn: progress, events, drive --->  news: another turn soon
//!     ^                                             none: arm, one more progress
//!     |  the lane's descriptor is readable, a deadline   |  none
//!     +-------------------- asleep <---------------------+
//! ```
//!
//! So a side that must act and that nothing wakes stands still, as it would on a machine.

use super::rig::Seeded;
use super::{CLIENT, Client, Ending, Narrator, Plan, Protocol, Replay, SERVER, Side, replayed};
use bulkhead::fabric::faulty::Faulty;
use bulkhead::fabric::loopback::Loopback;
use bulkhead::fabric::traced::{Trace, Traced};
use bulkhead::fabric::{Address, Fabric, Lane, Listener, Resources};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Steps from the end of a connection to the rest of both sides, at most.
const REST_STEPS_MAX: u64 = 20_000;
/// Lines of the trace that a failure prints.
const TAIL_LINES: usize = 100;

/// What will happen at a time.
enum Due<D> {
    /// A side that is awake looks again.
    Turn(usize),
    Of(usize, D),
}

/// Time, and all that is random in it.
pub struct Clock<D> {
    pub now: Instant,
    base: Instant,
    due: BTreeMap<(Instant, u64), Due<D>>,
    count: u64,
    pub dice: Seeded,
    lines: Option<Vec<String>>,
}

impl<D> Clock<D> {
    fn new(seed: u64, is_traced: bool) -> Self {
        // Only differences to it are ever looked at.
        let base = Instant::now();
        let lines = is_traced.then(Vec::new);
        Self { now: base, base, due: BTreeMap::new(), count: 0, dice: Seeded::new(seed), lines }
    }

    /// `due` happens to a side after `delay`; in their order if at the same time.
    pub fn after(&mut self, delay: Duration, side: usize, due: D) {
        self.add(delay, Due::Of(side, due));
    }

    fn add(&mut self, delay: Duration, due: Due<D>) {
        self.count += 1;
        self.due.insert((self.now + delay, self.count), due);
    }

    pub fn delay(&mut self) -> Duration {
        Duration::from_nanos(self.dice.below(20_000) + 1)
    }

    /// Since the world began.
    pub fn elapsed(&self) -> Duration {
        self.now - self.base
    }

    pub fn note(&mut self, line: impl FnOnce() -> String) {
        let time = self.elapsed();
        if let Some(lines) = &mut self.lines {
            lines.push(format!("{time:>12?} {}", line()));
        }
    }
}

/// Who goes, before which step.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    pub step: u64,
    pub side: usize,
}

pub struct World<P: Protocol> {
    plan: P::Plan,
    clock: Clock<P::Due>,
    lanes: [Arc<dyn Lane>; 2],
    bells: [File; 2],
    is_asleep: [bool; 2],
    listener: Box<dyn Listener>,
    trace: Option<(Trace, Narrator)>,
    /// Longest time without an answer.
    pub slowest: Duration,
}

impl<P: Protocol> World<P> {
    pub fn new(plan: P::Plan, is_traced: bool) -> Self {
        let is_traced = is_traced || replayed().is_some();
        let mut fabric: Arc<dyn Fabric> = Arc::new(Faulty::new(Arc::new(Loopback::new()), plan.seed(), plan.faults()));
        let trace = is_traced.then(P::narrator).flatten().map(|narrator| {
            let traced = Traced::new(Arc::clone(&fabric));
            let trace = traced.trace();
            fabric = Arc::new(traced);
            (trace, narrator)
        });
        let lanes = [fabric.lane().unwrap(), fabric.lane().unwrap()];
        // An eventfd: what the lane would be woken by.
        let bells = lanes.each_ref().map(|lane| File::from(lane.descriptor().try_clone_to_owned().unwrap()));
        let listener = lanes[SERVER].listen(&Address::Name("simulated".into())).unwrap();
        let clock = Clock::new(plan.seed(), is_traced);
        let is_asleep = [false; 2];
        let mut world = Self { plan, clock, lanes, bells, is_asleep, listener, trace, slowest: Duration::ZERO };
        world.turn_soon(CLIENT);
        world.turn_soon(SERVER);
        world
    }

    /// Everything that has happened, a line each. Nothing if this is not traced.
    pub fn take_lines(&mut self) -> Vec<String> {
        self.clock.lines.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// One connection, from the request to the rest of both sides. Gives the steps until it began to end.
    ///
    /// # Panics
    /// If anything of it is left.
    pub fn connect(
        &mut self,
        client: &mut P::Client,
        server: &mut P::Server,
        cut: Option<Cut>,
    ) -> (Ending<P::Fault>, u64) {
        let _replay = Replay(self.plan);
        let mut ending = client.dial(&*self.lanes[CLIENT], &self.listener.address()).err();
        let (mut steps, mut rest_steps) = (0, 0);
        let mut last = (client.answered(), self.clock.now);
        loop {
            let mut ends = None;
            if ending.is_some() {
                if self.is_at_rest(client, server) {
                    break;
                }
                rest_steps += 1;
                assert!(rest_steps < REST_STEPS_MAX, "no rest after {ending:?}");
            } else if client.is_done() {
                client.check_done(&*self.lanes[CLIENT]);
                ends = Some((CLIENT, Ending::Whole));
            } else if let Some(cut) = cut.filter(|cut| cut.step == steps) {
                ends = Some((cut.side, Ending::Cut));
            }
            self.wake();
            if ends.is_none() {
                steps += u64::from(ending.is_none());
                ends = match self.step(client, server) {
                    Ok(true) => None,
                    Ok(false) => Some((CLIENT, Ending::Stalled)),
                    Err(ends) => Some(ends),
                };
                self.note_fabric();
            }
            if client.answered() != last.0 {
                last = (client.answered(), self.clock.now);
            }
            if ending.is_none() {
                let waited = self.clock.now - last.1;
                self.slowest = self.slowest.max(waited);
                if waited > P::PATIENCE {
                    ends = ends.or(Some((CLIENT, Ending::Stalled)));
                }
            }
            let Some((side, why)) = ends else { continue };
            assert!(ending.is_none() || why != Ending::Stalled, "nothing moves after {ending:?}");
            self.clock.note(|| format!("{side} ends: {why:?}"));
            let sides: [&mut dyn Side<P>; 2] = [client, server];
            if !sides[side].disconnect() && ending.is_none() {
                sides[1 - side].disconnect();
            }
            ending.get_or_insert(why);
        }
        client.release();
        server.release();
        for (lane, listeners) in self.lanes.iter().zip([0, 1]) {
            assert_eq!(lane.resources(), Resources { listeners, ..Resources::default() }, "something was lost");
        }
        self.note_fabric();
        (ending.expect("it has ended"), steps)
    }

    fn is_at_rest(&self, client: &P::Client, server: &P::Server) -> bool {
        let is_empty = |lane: &Arc<dyn Lane>| lane.resources().queue_pairs + lane.resources().half_open == 0;
        client.is_over() && server.is_over() && self.lanes.iter().all(is_empty)
    }

    /// Sides whose lane has something to do have a turn soon.
    fn wake(&mut self) {
        for side in [CLIENT, SERVER] {
            // To read takes the wake-up back, as the lane itself would.
            if self.is_asleep[side] && self.bells[side].read(&mut [0; 8]).is_ok() {
                self.is_asleep[side] = false;
                self.turn_soon(side);
            }
        }
    }

    fn turn_soon(&mut self, side: usize) {
        let factor = if self.clock.dice.one_in(50) { 50 } else { 1 };
        let delay = self.clock.delay() * factor;
        self.clock.add(delay, Due::Turn(side));
    }

    /// What comes next; `false` if nothing ever will. An error says whose it is.
    fn step(&mut self, client: &mut P::Client, server: &mut P::Server) -> Result<bool, (usize, Ending<P::Fault>)> {
        let sides: [&mut dyn Side<P>; 2] = [client, server];
        let sleeper = [CLIENT, SERVER].into_iter().filter(|side| self.is_asleep[*side]).filter_map(|side| {
            let wakes_at = [sides[side].wakes_at(), self.lanes[side].deadline()].into_iter().flatten().min();
            wakes_at.map(|time| (time, side))
        });
        let due = self.clock.due.first_key_value().map(|((time, _), _)| *time);
        if let Some((time, side)) = sleeper.min()
            && due.is_none_or(|due| time < due)
        {
            self.clock.now = self.clock.now.max(time);
            self.is_asleep[side] = false;
            self.turn_soon(side);
            return Ok(true);
        }
        let Some(((time, _), due)) = self.clock.due.pop_first() else { return Ok(false) };
        assert!(time >= self.clock.now, "time goes forward");
        self.clock.now = time;
        match due {
            Due::Turn(side) => self.turn(side, sides[side]).map_err(|ending| (side, ending))?,
            Due::Of(side, due) => {
                sides[side].handle_due(due, &mut self.clock);
                sides[side].drive(&mut self.clock).map_err(|ending| (side, ending))?;
            }
        }
        Ok(true)
    }

    /// Drives a side as its poller would.
    fn turn(&mut self, side: usize, who: &mut dyn Side<P>) -> Result<(), Ending<P::Fault>> {
        let lane = Arc::clone(&self.lanes[side]);
        let events_max = *self.clock.dice.pick(&[1, 4, 32]);
        for is_armed in [false, true] {
            let mut events = Vec::new();
            let mut has_news = lane.progress(self.clock.now, &mut events, events_max);
            has_news |= !events.is_empty();
            let mut result = Ok(());
            for event in events {
                result = result.and(who.handle_event(event, &*lane, &mut self.clock));
            }
            if result.is_ok() && (has_news || !is_armed) {
                result = who.drive(&mut self.clock);
            }
            if has_news || result.is_err() {
                self.turn_soon(side);
                return result;
            }
            if !is_armed {
                lane.arm();
            }
        }
        self.is_asleep[side] = true;
        Ok(())
    }

    fn note_fabric(&mut self) {
        if let Some((trace, narrator)) = &mut self.trace {
            for entry in trace.take() {
                let line = narrator(entry);
                self.clock.note(|| line);
            }
        }
    }
}

impl<P: Protocol> Drop for World<P> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let lines = self.take_lines();
            lines[lines.len().saturating_sub(TAIL_LINES)..].iter().for_each(|line| eprintln!("{line}"));
        }
    }
}
