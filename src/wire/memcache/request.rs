//! What a request line asks for. Everything borrows from the line.

use memchr::memchr;

/// Longest key in bytes.
pub const KEY_BYTES_MAX: usize = 250;

/// One request. Keys are 1..=[`KEY_BYTES_MAX`] octets without space, CR, LF or NUL; all other octets are
/// allowed. Times are as in [`StoreHeader::exptime`]. Under `noreply` nothing is answered, whatever happens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Command<'a> {
    /// `get`, or `gets` with `with_cas`.
    Get { keys: Keys<'a>, with_cas: bool },
    /// `gat`, or `gats` with `with_cas`: as `get`, and each object found expires at `exptime`.
    GetAndTouch { exptime: i64, keys: Keys<'a>, with_cas: bool },
    /// `set`, `add`, `replace`, `append`, `prepend`, `cas`: a body of `len` octets and CR LF follow the line.
    Store(StoreHeader<'a>),
    /// `incr`, `decr`: what `delta` does is [`Direction::apply`].
    Arithmetic { key: &'a [u8], delta: u64, direction: Direction, noreply: bool },
    /// `touch`: the object expires at `exptime`.
    Touch { key: &'a [u8], exptime: i64, noreply: bool },
    /// `delete`.
    Delete { key: &'a [u8], noreply: bool },
    /// `flush_all`. `delay` is read like an expiry time; zero and below mean now.
    FlushAll { delay: i64, noreply: bool },
    /// `stats`. `argument` is the rest of the line without blanks at its ends, such as `settings` or `detail on`.
    Stats { argument: Option<&'a [u8]> },
    /// `version`.
    Version,
    /// `verbosity`. The level was checked to be a number and is not kept.
    Verbosity { noreply: bool },
    /// `quit`: what was answered so far goes out, then the connection ends.
    Quit,
}

/// The line before a body: `<verb> <key> <flags> <exptime> <len> [<cas>] [noreply]`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StoreHeader<'a> {
    /// What is asked for the body.
    pub verb: StoreVerb,
    /// 1..=[`KEY_BYTES_MAX`] octets.
    pub key: &'a [u8],
    /// Opaque to the store.
    pub flags: u32,
    /// As sent: zero is never, up to 30 days counts from now in seconds, more is a Unix time, negative is at once.
    pub exptime: i64,
    /// Octets of the body, its closing CR LF not counted. Not bounded here: any `u64`.
    pub len: u64,
    /// The version [`StoreVerb::Cas`] wants to replace; zero with other verbs.
    pub cas: u64,
    /// Nothing is answered, whatever happens.
    pub noreply: bool,
}

/// Which storage command.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum StoreVerb {
    /// Stores always.
    Set,
    /// Stores if the key is absent.
    Add,
    /// Stores if the key is present.
    Replace,
    /// Adds behind the value that is present; flags and expiry stay.
    Append,
    /// Adds before the value that is present; flags and expiry stay.
    Prepend,
    /// Stores if the object present still has the version named.
    Cas,
}

/// Which way [`Command::Arithmetic`] counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Direction {
    /// `incr`.
    Increment,
    /// `decr`.
    Decrement,
}

impl Direction {
    /// The new number: counting up wraps at 2^64, counting down stops at zero.
    pub fn apply(self, number: u64, delta: u64) -> u64 {
        match self {
            Self::Increment => number.wrapping_add(delta),
            Self::Decrement => number.saturating_sub(delta),
        }
    }
}

/// The keys of a retrieval line, as an iterator. Each was checked before the first is given, so a line with one bad key
/// is refused whole and never answered in part.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Keys<'a> {
    rest: &'a [u8],
}

impl<'a> Keys<'a> {
    /// Makes the iterator again from octets that [`Keys::as_bytes`] gave. Other octets are cut at blanks all the same,
    /// into pieces that may be no valid keys.
    pub const fn from_validated(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The part of the line that holds the keys not yet given, blanks included.
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.rest
    }
}

impl<'a> Iterator for Keys<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let (key, rest) = split_token(self.rest)?;
        self.rest = rest;
        Some(key)
    }
}

impl std::iter::FusedIterator for Keys<'_> {}

/// Cuts the first token off: `(token, what follows it)`, or `None` when there are only blanks.
pub(super) fn split_token(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let start = bytes.iter().position(|&octet| octet != b' ')?;
    let bytes = &bytes[start..];
    Some(bytes.split_at(memchr(b' ', bytes).unwrap_or(bytes.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counting_up_wraps_and_counting_down_stops_at_zero() {
        assert_eq!(Direction::Increment.apply(99, 1), 100);
        assert_eq!(Direction::Increment.apply(u64::MAX, 1), 0);
        assert_eq!(Direction::Decrement.apply(10, 11), 0);
        assert_eq!(Direction::Decrement.apply(100, 1), 99);
    }

    #[test]
    fn keys_are_cut_at_any_number_of_blanks() {
        let keys = Keys::from_validated(b"  a bb   ccc ");
        assert_eq!(keys.clone().collect::<Vec<_>>(), [&b"a"[..], b"bb", b"ccc"]);
        assert_eq!(Keys::from_validated(b"   ").next(), None);
    }

    #[test]
    fn keys_continue_from_their_remaining_bytes() {
        let mut keys = Keys::from_validated(b"a bb ccc");
        keys.next();
        let copy = keys.as_bytes().to_vec();
        assert!(Keys::from_validated(&copy).eq(keys));
    }
}
