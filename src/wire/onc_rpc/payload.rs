//! An RPC message whose eligible items are still where they are kept.

use super::Xid;
use crate::wire::codec::{Writer, roundup_bytes};
use std::mem;

/// A variable-length opaque that may travel in a chunk. Its length word is in front of it; its roundup is added by
/// whoever places it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Item {
    /// Names the octets to whoever keeps them.
    pub token: u32,
    /// Octets, roundup not included.
    pub len: u32,
}

/// A part of a message.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Part {
    Bytes(Vec<u8>),
    /// Of any length: one without octets takes its chunk too.
    Item(Item),
}

/// A message in stream order.
///
/// ```text
/// | Bytes: …, length of item 0 | Item 0 | Bytes: …, length of item 1 | Item 1 | … | Bytes |
/// ```
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Payload {
    parts: Vec<Part>,
}

impl Payload {
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub fn into_parts(self) -> Vec<Part> {
        self.parts
    }

    /// The items in stream order.
    pub fn items(&self) -> impl Iterator<Item = Item> + '_ {
        self.parts.iter().filter_map(|part| match part {
            Part::Bytes(_) => None,
            Part::Item(item) => Some(*item),
        })
    }

    /// The same message with another xid, its first word.
    ///
    /// # Panics
    /// If it does not begin with a word.
    #[must_use]
    pub fn with_xid(mut self, xid: Xid) -> Self {
        let begin = match self.parts.first_mut() {
            Some(Part::Bytes(bytes)) => bytes.first_chunk_mut(),
            Some(Part::Item(_)) | None => None,
        };
        *begin.expect("a message begins with its xid") = xid.0.to_be_bytes();
        self
    }

    /// Octets of the whole message, items and their roundup included.
    pub fn stream_bytes(&self) -> u64 {
        let bytes = |part: &Part| match part {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Item(item) => u64::from(item.len) + roundup_bytes(u64::from(item.len)),
        };
        self.parts.iter().map(bytes).sum()
    }
}

/// Puts a [`Payload`] together.
#[derive(Debug, Default)]
pub struct PayloadWriter {
    parts: Vec<Part>,
    words: Writer,
}

impl PayloadWriter {
    pub fn new() -> Self {
        Self::default()
    }

    /// Where everything goes that may not be reduced.
    pub const fn words(&mut self) -> &mut Writer {
        &mut self.words
    }

    /// The length of `item`, and its place.
    pub fn item(&mut self, item: Item) {
        self.words.u32(item.len);
        self.cut();
        self.parts.push(Part::Item(item));
    }

    pub fn finish(mut self) -> Payload {
        if !self.words.is_empty() {
            self.cut();
        }
        Payload { parts: self.parts }
    }

    fn cut(&mut self) {
        self.parts.push(Part::Bytes(mem::take(&mut self.words).finish()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_stand_behind_their_lengths_and_empty_ones_stand_too() {
        let mut writer = PayloadWriter::new();
        writer.words().u32(9);
        writer.item(Item { token: 0, len: 5 });
        writer.item(Item { token: 1, len: 0 });
        writer.words().u32(8);
        let payload = writer.finish();
        assert_eq!(
            payload.parts(),
            [
                Part::Bytes(vec![0, 0, 0, 9, 0, 0, 0, 5]),
                Part::Item(Item { token: 0, len: 5 }),
                Part::Bytes(vec![0, 0, 0, 0]),
                Part::Item(Item { token: 1, len: 0 }),
                Part::Bytes(vec![0, 0, 0, 8]),
            ]
        );
        assert_eq!(payload.stream_bytes(), 8 + 8 + 4 + 4);
        assert_eq!(payload.items().map(|item| item.token).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn an_xid_takes_the_first_word_and_no_more() {
        let mut writer = PayloadWriter::new();
        writer.words().u64(0);
        writer.item(Item { token: 0, len: 5 });
        let payload = writer.finish().with_xid(Xid(0x0102_0304));
        let words = vec![1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 5];
        assert_eq!(payload.parts(), [Part::Bytes(words), Part::Item(Item { token: 0, len: 5 })]);
    }

    #[test]
    fn the_longest_item_rounds_up_past_32_bits() {
        let mut writer = PayloadWriter::new();
        writer.item(Item { token: 0, len: u32::MAX });
        assert_eq!(writer.finish().stream_bytes(), 4 + (1 << 32));
    }
}
