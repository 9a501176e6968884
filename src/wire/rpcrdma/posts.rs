//! What a responder posts, and when: Writes and Sends in the order in which they were decided, Reads beside them.
//!
//! ```text
//!  egress   Write Write Send | Write Send ...   ──┐  a place in the send queue; a Send also its buffer
//!  reads    Read Read ...                       ──┴─▶ posted, completes in the order of posting
//! ```
//! Writes come before the Send of their reply because they are handed in before it; nothing here ever overtakes within
//! the egress. Reads wait only for Reads (there is a bound to how many are outstanding) and for the send queue.

use super::duplicate::CallMark;
use std::collections::VecDeque;

/// What a request is, as far as its turn depends on it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    Read,
    Write,
    /// `buffered` if it takes one of the Send buffers until it completes.
    Send {
        buffered: bool,
    },
}

/// Bounds of one connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// Requests in the send queue.
    pub depth: usize,
    /// Reads outstanding, at least 1.
    pub reads: usize,
    /// Send buffers, at least 1.
    pub send_buffers: usize,
}

/// The queue of one connection; `P` is a request.
#[derive(Debug)]
pub struct Posts<P> {
    limits: Limits,
    egress: VecDeque<(Kind, Option<CallMark>, P)>,
    reads: VecDeque<(Option<CallMark>, P)>,
    in_flight: VecDeque<(Kind, Option<CallMark>)>,
    /// The call of the Write that was posted last.
    written: Option<CallMark>,
    reads_in_flight: usize,
    buffers_in_use: usize,
}

impl<P> Posts<P> {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            egress: VecDeque::new(),
            reads: VecDeque::new(),
            in_flight: VecDeque::new(),
            written: None,
            reads_in_flight: 0,
            buffers_in_use: 0,
        }
    }

    /// Something to be posted, for a call.
    pub fn push(&mut self, kind: Kind, call: Option<CallMark>, post: P) {
        match kind {
            Kind::Read => self.reads.push_back((call, post)),
            Kind::Write | Kind::Send { .. } => self.egress.push_back((kind, call, post)),
        }
    }

    /// What is posted now. Its completion is told to [`Posts::handle_completed`].
    pub fn poll_post(&mut self) -> Option<P> {
        if self.in_flight.len() >= self.limits.depth {
            return None;
        }
        // Reads first: there are few, and whoever waits for them has not begun to answer.
        if self.reads_in_flight < self.limits.reads
            && let Some((call, read)) = self.reads.pop_front()
        {
            self.reads_in_flight += 1;
            self.in_flight.push_back((Kind::Read, call));
            return Some(read);
        }
        let (kind, ..) = self.egress.front()?;
        if let Kind::Send { buffered: true } = kind {
            if self.buffers_in_use == self.limits.send_buffers {
                return None;
            }
            self.buffers_in_use += 1;
        }
        let (kind, call, post) = self.egress.pop_front()?;
        if kind == Kind::Write {
            self.written = call;
        }
        self.in_flight.push_back((kind, call));
        Some(post)
    }

    /// The oldest request in flight has completed. `None` if there is none.
    pub fn handle_completed(&mut self) -> Option<Kind> {
        let (kind, _) = self.in_flight.pop_front()?;
        match kind {
            Kind::Read => self.reads_in_flight -= 1,
            Kind::Send { buffered: true } => self.buffers_in_use -= 1,
            Kind::Write | Kind::Send { buffered: false } => {}
        }
        Some(kind)
    }

    /// Whose memory it was, most likely, if the peer refused something just now. Requests end in order, so it is the oldest
    /// that accesses memory and has not ended; where a Write ends before the peer has seen it, it is the last one.
    pub fn suspect(&self) -> Option<CallMark> {
        let accesses = |(kind, _): &&(Kind, _)| matches!(kind, Kind::Read | Kind::Write);
        let oldest = self.in_flight.iter().find(accesses);
        oldest.map_or(self.written, |(_, call)| *call)
    }

    /// Nothing is in flight, nothing waits.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.egress.is_empty() && self.reads.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::rpcrdma::Xid;
    use proptest::prelude::*;

    const fn mark(xid: u32) -> CallMark {
        CallMark { xid: Xid(xid), checksum: 0 }
    }

    const SEND: Kind = Kind::Send { buffered: false };
    const BUFFERED: Kind = Kind::Send { buffered: true };

    fn posts(depth: usize, reads: usize, send_buffers: usize, pushed: &[(Kind, u32)]) -> Posts<u32> {
        let mut posts = Posts::new(Limits { depth, reads, send_buffers });
        pushed.iter().for_each(|(kind, post)| posts.push(*kind, Some(mark(*post)), *post));
        posts
    }

    fn all(posts: &mut Posts<u32>) -> Vec<u32> {
        std::iter::from_fn(|| posts.poll_post()).collect()
    }

    #[test]
    fn who_waits_for_what_is_decided_by_this_table() {
        let pushed = [(Kind::Write, 1), (BUFFERED, 2), (BUFFERED, 3), (SEND, 4), (Kind::Read, 5), (Kind::Read, 6)];
        // depth, reads, buffers, posted at once
        let table: [(usize, usize, usize, &[u32]); 5] = [
            (9, 9, 9, &[5, 6, 1, 2, 3, 4]),
            (9, 1, 9, &[5, 1, 2, 3, 4]),
            // A Send without a buffer does not overtake one that waits for it.
            (9, 9, 1, &[5, 6, 1, 2]),
            (3, 9, 9, &[5, 6, 1]),
            (1, 1, 1, &[5]),
        ];
        for (depth, reads, buffers, expected) in table {
            assert_eq!(all(&mut posts(depth, reads, buffers, &pushed)), expected, "{depth} {reads} {buffers}");
        }
    }

    #[test]
    fn each_completion_lets_in_what_waited_for_it() {
        let mut posts = posts(9, 1, 1, &[(Kind::Read, 1), (Kind::Read, 2), (BUFFERED, 3), (BUFFERED, 4), (SEND, 5)]);
        assert_eq!(all(&mut posts), [1, 3]);
        assert_eq!((posts.handle_completed(), all(&mut posts)), (Some(Kind::Read), vec![2]));
        assert_eq!((posts.handle_completed(), all(&mut posts)), (Some(BUFFERED), vec![4, 5]));
        assert_eq!(posts.handle_completed(), Some(Kind::Read));
        assert_eq!(posts.handle_completed(), Some(BUFFERED));
        assert!(!posts.is_empty());
        assert_eq!((posts.handle_completed(), posts.handle_completed()), (Some(SEND), None));
        assert!(posts.is_empty());
    }

    #[test]
    fn whose_memory_was_refused_is_told_by_this_table() {
        /// What was posted, how many have ended, who is suspected.
        type Row = (&'static [(Kind, u32)], usize, Option<u32>);
        let table: [Row; 6] = [
            (&[], 0, None),
            (&[(SEND, 1)], 0, None),
            (&[(Kind::Read, 1), (Kind::Read, 2)], 0, Some(1)),
            (&[(Kind::Read, 1), (Kind::Read, 2)], 1, Some(2)),
            (&[(Kind::Write, 1), (SEND, 1), (Kind::Write, 2), (SEND, 2)], 1, Some(2)),
            (&[(Kind::Write, 1), (SEND, 1), (Kind::Write, 2), (SEND, 2)], 4, Some(2)),
        ];
        for (row, (pushed, ended, expected)) in table.into_iter().enumerate() {
            let mut posts = posts(9, 9, 9, pushed);
            all(&mut posts);
            (0..ended).for_each(|_| assert!(posts.handle_completed().is_some()));
            assert_eq!(posts.suspect(), expected.map(mark), "row {row}");
        }
    }

    proptest! {
        #[test]
        fn everything_is_posted_once_within_the_bounds_and_the_egress_in_order(
            kinds in prop::collection::vec(prop_oneof![Just(Kind::Read), Just(Kind::Write), Just(SEND), Just(BUFFERED)], 0..80),
            depth in 1usize..6, reads in 1usize..4, send_buffers in 1usize..4,
            chances in prop::collection::vec(any::<bool>(), 1..40),
        ) {
            let mut posts = Posts::new(Limits { depth, reads, send_buffers });
            let (mut waiting, mut chances) = (kinds.iter().enumerate(), chances.into_iter().cycle());
            let (mut posted, mut flight, mut pushed): (Vec<usize>, VecDeque<Kind>, usize) = Default::default();
            while posted.len() < kinds.len() || !flight.is_empty() {
                if (chances.next().unwrap() || flight.is_empty()) && let Some((index, kind)) = waiting.next() {
                    posts.push(*kind, None, index);
                    pushed += 1;
                }
                while let Some(index) = posts.poll_post() {
                    posted.push(index);
                    flight.push_back(kinds[index]);
                }
                let count = |kind: Kind| flight.iter().filter(|found| **found == kind).count();
                prop_assert!(flight.len() <= depth && count(Kind::Read) <= reads && count(BUFFERED) <= send_buffers);
                if let Some(kind) = flight.pop_front() {
                    prop_assert_eq!(posts.handle_completed(), Some(kind));
                } else {
                    prop_assert!(posted.len() == pushed, "nothing in flight, and something waits");
                }
            }
            let egress: Vec<_> = posted.iter().filter(|index| kinds[**index] != Kind::Read).collect();
            prop_assert!(egress.is_sorted());
            let fetched: Vec<_> = posted.iter().filter(|index| kinds[**index] == Kind::Read).collect();
            prop_assert!(fetched.is_sorted() && posts.is_empty());
        }
    }
}
