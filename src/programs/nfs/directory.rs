//! READDIR and READDIRPLUS, encoded entry by entry until there is no more room (RFC 1813 §3.3.16, §3.3.17).
//!
//! ```text
//!        | dir_attributes | cookieverf | { 1 | fileid | name | cookie | attributes | handle }* | 0 | eof |
//! count, maxcount  ◀──────────────────────────────────── all of it ───────────────────────────────────▶
//! dircount                             the entries ◀─────────────────▶ as far as READDIR has them too
//! ```

use super::types::{Attributes, Cookie, CookieVerifier, FileHandle, FileId, NfsError};
use super::{DIRECTORY_BYTES_MAX, NAME_BYTES_MAX};
use crate::wire::codec::{Codec, Writer, roundup_bytes};

/// Octets of the words behind the last entry.
const END_BYTES: usize = 8;
/// Octets of an entry3 but for its name, the word before it included.
const ENTRY_BYTES: usize = 24;

/// What READDIR says of a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Entry<'a> {
    pub fileid: FileId,
    /// At most 255 octets.
    pub name: &'a [u8],
    /// Where the directory is read on behind this entry. Never zero.
    pub cookie: Cookie,
}

impl Entry<'_> {
    fn encoded_bytes(&self) -> usize {
        ENTRY_BYTES + self.name.len() + roundup_bytes(self.name.len() as u64) as usize
    }

    fn write(&self, words: &mut Writer) {
        assert!(self.name.len() <= NAME_BYTES_MAX, "a name of {} octets", self.name.len());
        words.bool(true);
        self.fileid.write(words);
        words.opaque(self.name);
        self.cookie.write(words);
    }
}

/// What READDIRPLUS says of a name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct EntryPlus<'a> {
    pub entry: Entry<'a>,
    pub attributes: Option<Attributes>,
    pub handle: Option<FileHandle>,
}

/// A part of a directory, encoded as READDIR3resok or READDIRPLUS3resok.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listing {
    octets: Vec<u8>,
}

impl Listing {
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.octets
    }
}

/// What is written of either.
#[derive(Debug)]
struct Page {
    words: Writer,
    /// Octets at most, the words behind the last entry included.
    bytes_max: usize,
    has_entries: bool,
    /// An entry was refused, and so is every one after it.
    is_full: bool,
}

impl Page {
    fn new(bytes_max: u32, attributes: Option<&Attributes>, verifier: CookieVerifier) -> Result<Self, NfsError> {
        let mut words = Writer::new();
        words.optional(attributes, |words, attributes| attributes.write(words));
        verifier.write(&mut words);
        let bytes_max = bytes_max.min(DIRECTORY_BYTES_MAX) as usize;
        if words.len() + END_BYTES > bytes_max {
            return Err(NfsError::TooSmall);
        }
        Ok(Self { words, bytes_max, has_entries: false, is_full: false })
    }

    /// Has `write` write an entry of `bytes` octets if there is room and `fits`.
    fn push(&mut self, bytes: usize, fits: bool, write: impl FnOnce(&mut Writer)) -> bool {
        let end = self.words.len() + bytes;
        self.is_full |= !fits || end + END_BYTES > self.bytes_max;
        if !self.is_full {
            write(&mut self.words);
            assert_eq!(self.words.len(), end, "an entry is as long as it was said to be");
            self.has_entries = true;
        }
        !self.is_full
    }

    fn finish(mut self, is_end: bool) -> Result<Listing, NfsError> {
        if self.is_full && !self.has_entries {
            return Err(NfsError::TooSmall);
        }
        self.words.bool(false);
        self.words.bool(is_end && !self.is_full);
        Ok(Listing { octets: self.words.finish() })
    }
}

/// The results of a READDIR in the making.
#[derive(Debug)]
pub struct DirectoryPage {
    page: Page,
}

impl DirectoryPage {
    /// For `count` octets. `attributes` are those of the directory.
    ///
    /// # Errors
    /// [`NfsError::TooSmall`] if not even a page without entries has room.
    pub fn new(count: u32, attributes: Option<&Attributes>, verifier: CookieVerifier) -> Result<Self, NfsError> {
        Page::new(count, attributes, verifier).map(|page| Self { page })
    }

    /// Whether there was room for the entry. Where there was none, there is none for any other.
    ///
    /// # Panics
    /// If the name has more than 255 octets.
    pub fn push(&mut self, entry: &Entry<'_>) -> bool {
        self.page.push(entry.encoded_bytes(), true, |words| entry.write(words))
    }

    /// `is_end` says that there are no entries but those that were pushed, whether there was room or not.
    ///
    /// # Errors
    /// [`NfsError::TooSmall`] if there was no room for the first.
    pub fn finish(self, is_end: bool) -> Result<Listing, NfsError> {
        self.page.finish(is_end)
    }
}

/// The results of a READDIRPLUS in the making.
#[derive(Debug)]
pub struct PlusPage {
    page: Page,
    /// Octets left of what counts without attributes and handles.
    dir_bytes_left: usize,
}

impl PlusPage {
    /// For `maxcount` octets, of which `dircount` are of the entries but for attributes and handles. `attributes` are those
    /// of the directory.
    ///
    /// # Errors
    /// [`NfsError::TooSmall`] if not even a page without entries has room.
    pub fn new(
        dircount: u32,
        maxcount: u32,
        attributes: Option<&Attributes>,
        verifier: CookieVerifier,
    ) -> Result<Self, NfsError> {
        Page::new(maxcount, attributes, verifier).map(|page| Self { page, dir_bytes_left: dircount as usize })
    }

    /// Whether there was room for the entry. Where there was none, there is none for any other.
    ///
    /// # Panics
    /// If the name has more than 255 octets.
    pub fn push(&mut self, plus: &EntryPlus<'_>) -> bool {
        let dir_bytes = plus.entry.encoded_bytes();
        let attribute_bytes = plus.attributes.map_or(0, |_| Attributes::BYTES_MIN);
        let handle_bytes = plus.handle.map_or(0, |handle| {
            let len = handle.as_bytes().len();
            4 + len + roundup_bytes(len as u64) as usize
        });
        let bytes = dir_bytes + 4 + attribute_bytes + 4 + handle_bytes;
        let left = self.dir_bytes_left.checked_sub(dir_bytes);
        let is_pushed = self.page.push(bytes, left.is_some(), |words| {
            plus.entry.write(words);
            plus.attributes.write(words);
            plus.handle.write(words);
        });
        if let Some(left) = left.filter(|_| is_pushed) {
            self.dir_bytes_left = left;
        }
        is_pushed
    }

    /// `is_end` says that there are no entries but those that were pushed, whether there was room or not.
    ///
    /// # Errors
    /// [`NfsError::TooSmall`] if there was no room for the first.
    pub fn finish(self, is_end: bool) -> Result<Listing, NfsError> {
        self.page.finish(is_end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERIFIER: CookieVerifier = CookieVerifier([3; 8]);
    /// Octets of a page without attributes and entries.
    const EMPTY: u32 = 4 + 8 + 8;

    fn entry(name: &[u8]) -> Entry<'_> {
        Entry { fileid: FileId(7), name, cookie: Cookie(9) }
    }

    fn plus(name: &[u8]) -> EntryPlus<'_> {
        EntryPlus { entry: entry(name), attributes: None, handle: FileHandle::new(&[1; 5]) }
    }

    fn page(count: u32) -> Result<DirectoryPage, NfsError> {
        DirectoryPage::new(count, None, VERIFIER)
    }

    #[test]
    fn a_page_takes_what_fits_to_the_octet() {
        // Two entries of 28 octets, by their names of one and of four.
        let two = EMPTY + 2 * 28;
        for (count, pushed) in [(EMPTY + 28, 1), (two - 1, 1), (two, 2), (two + 27, 2)] {
            let mut page = page(count).unwrap();
            let found = [b"a".as_slice(), b"four", b"c"].iter().take_while(|name| page.push(&entry(name))).count();
            assert_eq!(found, pushed, "{count} octets");
            let listing = page.finish(true).unwrap();
            assert_eq!(listing.as_bytes().len(), EMPTY as usize + 28 * pushed);
            assert_eq!(listing.as_bytes().last(), Some(&0), "the third did not fit");
        }
    }

    #[test]
    fn the_end_is_said_only_where_every_entry_had_room() {
        let eof = |is_end, names: &[&[u8]]| {
            let mut page = page(EMPTY + 28).unwrap();
            for name in names {
                page.push(&entry(name));
            }
            *page.finish(is_end).unwrap().as_bytes().last().unwrap()
        };
        assert_eq!(eof(true, &[]), 1);
        assert_eq!(eof(true, &[b"a"]), 1);
        assert_eq!(eof(false, &[b"a"]), 0);
        assert_eq!(eof(true, &[b"a", b"b"]), 0);
    }

    #[test]
    fn behind_an_entry_without_room_there_is_none_for_a_shorter_one() {
        let mut page = page(EMPTY + 28 + 28).unwrap();
        assert!(page.push(&entry(b"a")));
        assert!(!page.push(&entry(b"longer")));
        assert!(!page.push(&entry(b"b")));
    }

    #[test]
    fn too_little_room_is_an_error_only_where_nothing_can_be_said() {
        assert_eq!(page(EMPTY - 1).map(|_| ()), Err(NfsError::TooSmall));
        assert!(page(EMPTY).unwrap().finish(true).is_ok());
        let mut full = page(EMPTY + 27).unwrap();
        assert!(!full.push(&entry(b"a")));
        assert_eq!(full.finish(true), Err(NfsError::TooSmall));
    }

    #[test]
    fn no_count_makes_a_page_longer_than_there_is_room_for_replies() {
        let mut page = page(u32::MAX).unwrap();
        let name = [b'n'; NAME_BYTES_MAX];
        while page.push(&entry(&name)) {}
        let len = page.finish(false).unwrap().as_bytes().len();
        assert!(len <= DIRECTORY_BYTES_MAX as usize && len > DIRECTORY_BYTES_MAX as usize - 280, "{len} octets");
    }

    #[test]
    fn dircount_counts_what_readdir_would_say_and_maxcount_everything() {
        // 28 octets, then two words and a handle of 5 octets with length and roundup: 28 + 8 + 12.
        for (dircount, maxcount, pushed) in [
            (56, EMPTY + 96, 2),
            (55, EMPTY + 96, 1),
            (56, EMPTY + 95, 1),
            (u32::MAX, EMPTY + 96 + 47, 2),
            (83, u32::MAX, 2),
        ] {
            let mut page = PlusPage::new(dircount, maxcount, None, VERIFIER).unwrap();
            let found = [b"a", b"b", b"c"].iter().take_while(|name| page.push(&plus(&name[..]))).count();
            assert_eq!(found, pushed, "dircount {dircount}, maxcount {maxcount}");
            assert_eq!(page.finish(false).unwrap().as_bytes().len(), EMPTY as usize + 48 * pushed);
        }
        let mut page = PlusPage::new(27, u32::MAX, None, VERIFIER).unwrap();
        assert!(!page.push(&plus(b"a")));
        assert_eq!(page.finish(true), Err(NfsError::TooSmall));
    }
}
