//! Queue whose members can leave from the middle: what eviction and write-behind keep their candidates in.

/// Where a member stands; stale once the member left.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    index: u32,
    generation: u32,
}

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Node<T> {
    value: Option<T>,
    generation: u32,
    previous: u32,
    next: u32,
}

/// First in, first out, with O(1) removal by [`Place`]. Nodes are reused, so memory follows the longest it has been.
#[derive(Debug)]
pub struct Fifo<T> {
    nodes: Vec<Node<T>>,
    unused: u32,
    head: u32,
    tail: u32,
    len: usize,
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Self { nodes: Vec::new(), unused: NONE, head: NONE, tail: NONE, len: 0 }
    }
}

impl<T> Fifo<T> {
    /// What each of as many members as it has had at a time takes at worst, in octets: a vector is half full when it has grown.
    pub const MEMBER_BYTES: usize = 2 * size_of::<Node<T>>();

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Joins at the end.
    ///
    /// # Panics
    /// Beyond 2^32 - 1 members.
    pub fn push_back(&mut self, value: T) -> Place {
        let index = if self.unused == NONE {
            let index = u32::try_from(self.nodes.len()).ok().filter(|index| *index != NONE).expect("fewer than 2^32");
            self.nodes.push(Node { value: None, generation: 0, previous: NONE, next: NONE });
            index
        } else {
            let index = self.unused;
            self.unused = self.nodes[index as usize].next;
            index
        };
        let tail = self.tail;
        let node = &mut self.nodes[index as usize];
        node.value = Some(value);
        node.previous = tail;
        node.next = NONE;
        let generation = node.generation;
        if tail == NONE {
            self.head = index;
        } else {
            self.nodes[tail as usize].next = index;
        }
        self.tail = index;
        self.len += 1;
        Place { index, generation }
    }

    pub fn pop_front(&mut self) -> Option<T> {
        let head = self.head;
        if head == NONE {
            return None;
        }
        let generation = self.nodes[head as usize].generation;
        self.remove(Place { index: head, generation })
    }

    /// The member at `place`, unless it left already.
    pub fn remove(&mut self, place: Place) -> Option<T> {
        let node = self.nodes.get_mut(place.index as usize)?;
        if node.generation != place.generation {
            return None;
        }
        let value = node.value.take()?;
        node.generation = node.generation.wrapping_add(1);
        let (previous, next) = (node.previous, node.next);
        node.next = self.unused;
        self.unused = place.index;
        if previous == NONE {
            self.head = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
        if next == NONE {
            self.tail = previous;
        } else {
            self.nodes[next as usize].previous = previous;
        }
        self.len -= 1;
        Some(value)
    }

    /// The member at `place`, unless it left.
    pub fn at(&self, place: Place) -> Option<&T> {
        let node = self.nodes.get(place.index as usize)?;
        if node.generation == place.generation { node.value.as_ref() } else { None }
    }

    /// Looks at up to `count` node slots from slot `*cursor` on, in storage order, and moves the cursor: a crawl over
    /// all members in bounded steps. Wraps to 0 at the end.
    pub fn crawl(&self, cursor: &mut usize, count: usize) -> impl Iterator<Item = &T> {
        let start = if *cursor >= self.nodes.len() { 0 } else { *cursor };
        let end = (start + count).min(self.nodes.len());
        *cursor = if end >= self.nodes.len() { 0 } else { end };
        self.nodes[start..end].iter().filter_map(|node| node.value.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[test]
    fn a_place_is_stale_once_its_member_left() {
        let mut fifo = Fifo::default();
        let first = fifo.push_back(1);
        assert_eq!(fifo.remove(first), Some(1));
        let second = fifo.push_back(2);
        assert_eq!(fifo.remove(first), None);
        assert_eq!(fifo.remove(second), Some(2));
        assert!(fifo.is_empty());
    }

    #[test]
    fn a_crawl_sees_every_member_in_bounded_steps() {
        let mut fifo = Fifo::default();
        for n in 0..10 {
            fifo.push_back(n);
        }
        let mut cursor = 0;
        let mut seen = Vec::new();
        for _ in 0..4 {
            let step: Vec<_> = fifo.crawl(&mut cursor, 3).copied().collect();
            assert!(step.len() <= 3);
            seen.extend(step);
        }
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
        assert_eq!(cursor, 0);
    }

    proptest! {
        #[test]
        fn agrees_with_a_deque(steps in prop::collection::vec((0u8..3, any::<prop::sample::Index>()), 0..200)) {
            let mut fifo = Fifo::default();
            let mut model: VecDeque<(u32, Place)> = VecDeque::new();
            let mut next = 0;
            for (step, pick) in steps {
                match step {
                    0 => {
                        model.push_back((next, fifo.push_back(next)));
                        next += 1;
                    }
                    1 => prop_assert_eq!(fifo.pop_front(), model.pop_front().map(|(value, _)| value)),
                    _ => {
                        if !model.is_empty() {
                            let (value, place) = model.remove(pick.index(model.len())).unwrap();
                            prop_assert_eq!(fifo.remove(place), Some(value));
                            prop_assert_eq!(fifo.remove(place), None);
                        }
                    }
                }
                prop_assert_eq!(fifo.len(), model.len());
            }
        }
    }
}
