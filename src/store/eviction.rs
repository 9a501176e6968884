//! S3-FIFO weighted by octets: which whole object goes when its kind of space is short.
//!
//! New objects enter the *small* queue (a tenth of the octets). One that was read there before its turn comes moves to the
//! *main* queue; the others go, and their key is remembered for a while, so that one that comes back enters *main* at once.
//! *Main* gives a read object another round for every read counted (at most three). (Yang et al., "FIFO queues are all
//! you need for cache eviction", SOSP 2023.)

use crate::store::fifo::{Fifo, Place};
use std::collections::{HashMap, VecDeque};

/// What the policy must know of a candidate.
pub trait Candidate {
    /// Stable hash of its key.
    fn key_hash(&self) -> u64;
    /// Octets that its eviction brings.
    fn weight(&self) -> u64;
    /// Readers hold it: evicting it would free nothing now.
    fn is_pinned(&self) -> bool;
    /// Takes one counted read off; false if there was none.
    fn spend_use(&self) -> bool;
}

/// Where a candidate stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Standing {
    main: bool,
    place: Place,
}

/// The policy over candidates `T`.
#[derive(Debug)]
pub struct S3Fifo<T> {
    small: Fifo<T>,
    main: Fifo<T>,
    small_bytes: u64,
    main_bytes: u64,
    ghosts: VecDeque<u64>,
    ghost_counts: HashMap<u64, u32>,
}

const GHOSTS_MAX: usize = 1 << 16;

impl<T> Default for S3Fifo<T> {
    fn default() -> Self {
        Self {
            small: Fifo::default(),
            main: Fifo::default(),
            small_bytes: 0,
            main_bytes: 0,
            ghosts: VecDeque::new(),
            ghost_counts: HashMap::new(),
        }
    }
}

impl<T: Candidate> S3Fifo<T> {
    /// Candidates enrolled.
    pub fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their octets.
    pub fn bytes(&self) -> u64 {
        self.small_bytes + self.main_bytes
    }

    pub fn enroll(&mut self, candidate: T) -> Standing {
        let main = self.ghost_counts.contains_key(&candidate.key_hash());
        self.push(candidate, main)
    }

    /// Takes a candidate out, if it is still enrolled.
    pub fn withdraw(&mut self, standing: Standing) -> Option<T> {
        let queue = if standing.main { &mut self.main } else { &mut self.small };
        let candidate = queue.remove(standing.place)?;
        *self.bytes_mut(standing.main) -= candidate.weight();
        Some(candidate)
    }

    /// The next to go, no longer enrolled; `moved` hears of every other whose standing changed. `None` if all are pinned.
    pub fn evict(&mut self, mut moved: impl FnMut(&T, Standing)) -> Option<T> {
        // Every candidate is looked at no more than its uses allow, plus once for each queue.
        let mut looks = 5 * self.len();
        while looks > 0 {
            looks -= 1;
            let from_main = self.small_bytes * 10 <= self.bytes() && !self.main.is_empty() || self.small.is_empty();
            let queue = if from_main { &mut self.main } else { &mut self.small };
            let candidate = queue.pop_front()?;
            *self.bytes_mut(from_main) -= candidate.weight();
            let keep = candidate.is_pinned();
            if !keep && !candidate.spend_use() {
                self.remember(candidate.key_hash());
                return Some(candidate);
            }
            let to_main = from_main || !keep;
            let (place, weight) = {
                let weight = candidate.weight();
                let queue = if to_main { &mut self.main } else { &mut self.small };
                (queue.push_back(candidate), weight)
            };
            *self.bytes_mut(to_main) += weight;
            let standing = Standing { main: to_main, place };
            let queue = if to_main { &self.main } else { &self.small };
            if let Some(candidate) = queue.at(place) {
                moved(candidate, standing);
            }
        }
        None
    }

    /// Looks at about `count` candidates and moves the cursor on; false once all were seen.
    pub fn crawl(&self, cursor: &mut (bool, usize), count: usize, mut see: impl FnMut(&T)) -> bool {
        let queue = if cursor.0 { &self.main } else { &self.small };
        queue.crawl(&mut cursor.1, count).for_each(&mut see);
        if cursor.1 == 0 {
            cursor.0 = !cursor.0;
            return cursor.0;
        }
        true
    }

    fn push(&mut self, candidate: T, main: bool) -> Standing {
        *self.bytes_mut(main) += candidate.weight();
        let queue = if main { &mut self.main } else { &mut self.small };
        Standing { main, place: queue.push_back(candidate) }
    }

    fn bytes_mut(&mut self, main: bool) -> &mut u64 {
        if main { &mut self.main_bytes } else { &mut self.small_bytes }
    }

    fn remember(&mut self, hash: u64) {
        self.ghosts.push_back(hash);
        *self.ghost_counts.entry(hash).or_default() += 1;
        while self.ghosts.len() > GHOSTS_MAX.min(self.len().max(1024)) {
            let Some(oldest) = self.ghosts.pop_front() else { break };
            if let Some(count) = self.ghost_counts.get_mut(&oldest) {
                *count -= 1;
                if *count == 0 {
                    self.ghost_counts.remove(&oldest);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[derive(Debug)]
    struct Item {
        id: u64,
        weight: u64,
        uses: Cell<u8>,
        pinned: Cell<bool>,
    }

    impl Candidate for Rc<Item> {
        fn key_hash(&self) -> u64 {
            self.id
        }
        fn weight(&self) -> u64 {
            self.weight
        }
        fn is_pinned(&self) -> bool {
            self.pinned.get()
        }
        fn spend_use(&self) -> bool {
            let uses = self.uses.get();
            self.uses.set(uses.saturating_sub(1));
            uses > 0
        }
    }

    fn item(id: u64) -> Rc<Item> {
        Rc::new(Item { id, weight: 10, uses: Cell::new(0), pinned: Cell::new(false) })
    }

    fn evicted(policy: &mut S3Fifo<Rc<Item>>) -> Option<u64> {
        policy.evict(|_, _| ()).map(|item| item.id)
    }

    #[test]
    fn unread_objects_go_oldest_first_and_read_ones_stay() {
        let mut policy = S3Fifo::default();
        for id in 0..10 {
            let item = item(id);
            item.uses.set(u8::from(id == 0));
            policy.enroll(item);
        }
        assert_eq!((1..10).map(|_| evicted(&mut policy)).collect::<Vec<_>>(), (1..10).map(Some).collect::<Vec<_>>());
        assert_eq!(evicted(&mut policy), Some(0));
        assert_eq!((evicted(&mut policy), policy.bytes()), (None, 0));
    }

    #[test]
    fn pinned_objects_are_passed_over() {
        let mut policy = S3Fifo::default();
        let pinned = item(0);
        pinned.pinned.set(true);
        policy.enroll(pinned.clone());
        policy.enroll(item(1));
        assert_eq!(evicted(&mut policy), Some(1));
        assert_eq!(evicted(&mut policy), None);
        pinned.pinned.set(false);
        assert_eq!(evicted(&mut policy), Some(0));
    }

    #[test]
    fn one_that_comes_back_soon_is_not_the_next_to_go() {
        let mut policy = S3Fifo::default();
        policy.enroll(item(7));
        for id in 100..110 {
            policy.enroll(item(id));
        }
        assert_eq!(evicted(&mut policy), Some(7));
        policy.enroll(item(7));
        assert_eq!((0..10).filter_map(|_| evicted(&mut policy)).collect::<Vec<_>>(), (100..110).collect::<Vec<_>>());
        assert_eq!(evicted(&mut policy), Some(7));
    }

    #[test]
    fn a_withdrawn_object_is_gone_and_its_standing_follows_moves() {
        let mut policy = S3Fifo::default();
        let read = item(1);
        read.uses.set(1);
        let standing = Rc::new(Cell::new(policy.enroll(read)));
        policy.enroll(item(2));
        assert_eq!(policy.evict(|_, moved| standing.set(moved)).map(|item| item.id), Some(2));
        assert_eq!(policy.withdraw(standing.get()).map(|item| item.id), Some(1));
        assert!(policy.withdraw(standing.get()).is_none() && policy.is_empty());
    }
}
