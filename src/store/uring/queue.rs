//! Who goes to the disk next: a pure queue per drive.

use std::collections::VecDeque;

/// What a job does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// Somebody waits for it.
    Read,
    /// Write-behind: only room is waiting for it.
    Write,
}

/// Jobs of one drive, each direction first in, first out, at most `depth` of them at the disk.
///
/// Reads go first, but after eight in a row a waiting write has its turn, or a busy reader would keep
/// dirty pages in RAM for ever. Writes leave a quarter of the depth (at least one place, where there are two) to reads
/// that come later.
pub struct DriveQueue<J> {
    reads: VecDeque<J>,
    writes: VecDeque<J>,
    depth: usize,
    writes_max: usize,
    reads_in_flight: usize,
    writes_in_flight: usize,
    reads_in_row: u32,
}

/// Reads that may pass a waiting write.
const READS_PER_WRITE: u32 = 8;

impl<J> DriveQueue<J> {
    /// A queue with `depth` places at the disk, at least one.
    pub fn new(depth: usize) -> Self {
        let depth = depth.max(1);
        Self {
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            depth,
            writes_max: (depth - (depth / 4).max(1)).max(1),
            reads_in_flight: 0,
            writes_in_flight: 0,
            reads_in_row: 0,
        }
    }

    /// Appends a job.
    pub fn push(&mut self, direction: Direction, job: J) {
        match direction {
            Direction::Read => self.reads.push_back(job),
            Direction::Write => self.writes.push_back(job),
        }
    }

    /// The job to start now, which takes a place at the disk until [`handle_done`](Self::handle_done).
    pub fn pop(&mut self) -> Option<J> {
        if self.in_flight() >= self.depth {
            return None;
        }
        let write_may_go = self.writes_in_flight < self.writes_max;
        let write_is_due = self.reads_in_row >= READS_PER_WRITE && write_may_go && !self.writes.is_empty();
        if !write_is_due && let Some(job) = self.reads.pop_front() {
            self.reads_in_flight += 1;
            // What passes nobody is not counted.
            self.reads_in_row = if self.writes.is_empty() { 0 } else { self.reads_in_row.saturating_add(1) };
            return Some(job);
        }
        if !write_may_go {
            return None;
        }
        let job = self.writes.pop_front()?;
        self.writes_in_flight += 1;
        self.reads_in_row = 0;
        Some(job)
    }

    /// A popped job is back from the disk.
    pub fn handle_done(&mut self, direction: Direction) {
        let in_flight = match direction {
            Direction::Read => &mut self.reads_in_flight,
            Direction::Write => &mut self.writes_in_flight,
        };
        *in_flight = in_flight.checked_sub(1).expect("only what was popped comes back");
    }

    /// Everything that waits, reads first.
    pub fn drain(&mut self) -> impl Iterator<Item = J> + '_ {
        self.reads.drain(..).chain(self.writes.drain(..))
    }

    /// Jobs that wait.
    pub fn waiting(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    /// Jobs at the disk.
    pub fn in_flight(&self) -> usize {
        self.reads_in_flight + self.writes_in_flight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_pass_writes_and_each_keeps_its_order() {
        let mut queue = DriveQueue::new(8);
        for job in ["w1", "w2"] {
            queue.push(Direction::Write, job);
        }
        for job in ["r1", "r2"] {
            queue.push(Direction::Read, job);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, ["r1", "r2", "w1", "w2"]);
        assert_eq!((queue.in_flight(), queue.waiting()), (4, 0));
    }

    #[test]
    fn a_write_has_its_turn_after_eight_reads() {
        for depth in [1, 2, 4] {
            let mut queue = DriveQueue::new(depth);
            queue.push(Direction::Write, Direction::Write);
            let mut reads_before = 0;
            loop {
                queue.push(Direction::Read, Direction::Read);
                let job = queue.pop().expect("the disk is free");
                queue.handle_done(job);
                if job == Direction::Write {
                    break;
                }
                reads_before += 1;
            }
            assert_eq!(reads_before, 8);
        }
    }

    #[test]
    fn a_flood_of_writes_leaves_a_place_to_the_next_read() {
        let mut queue = DriveQueue::new(8);
        for job in 0..20 {
            queue.push(Direction::Write, job);
        }
        assert_eq!(std::iter::from_fn(|| queue.pop()).count(), 6);
        queue.push(Direction::Read, 100);
        assert_eq!(queue.pop(), Some(100));
        assert_eq!(queue.pop(), None);
        queue.handle_done(Direction::Write);
        assert_eq!(queue.pop(), Some(6));
    }

    #[test]
    fn a_depth_of_one_still_writes() {
        let mut queue = DriveQueue::new(0);
        queue.push(Direction::Write, ());
        assert!(queue.pop().is_some());
        queue.push(Direction::Read, ());
        assert!(queue.pop().is_none());
        queue.handle_done(Direction::Write);
        assert!(queue.pop().is_some());
    }

    proptest! {
        #[test]
        fn nothing_is_lost_doubled_or_over_the_depth(
            depth in 1usize..6,
            steps in proptest::collection::vec(0u8..4, 0..200),
        ) {
            let mut queue = DriveQueue::new(depth);
            let (mut pushed, mut at_disk, mut finished) = (0u32, Vec::new(), Vec::new());
            for step in steps {
                match step {
                    0 | 1 => {
                        let direction = if step == 0 { Direction::Read } else { Direction::Write };
                        queue.push(direction, (direction, pushed));
                        pushed += 1;
                    }
                    2 => at_disk.extend(queue.pop()),
                    _ => if let Some((direction, job)) = at_disk.pop() {
                        queue.handle_done(direction);
                        finished.push(job);
                    },
                }
                prop_assert!(queue.in_flight() <= depth);
                prop_assert_eq!(queue.in_flight(), at_disk.len());
            }
            loop {
                at_disk.extend(std::iter::from_fn(|| queue.pop()));
                let Some((direction, job)) = at_disk.pop() else { break };
                queue.handle_done(direction);
                finished.push(job);
            }
            finished.sort_unstable();
            prop_assert_eq!(finished, (0..pushed).collect::<Vec<_>>());
        }
    }
}
