//! READDIR and READDIRPLUS: the names of a directory in the order of their octets, a page at a time.
//!
//! What a page costs is what it has. Keys that have no name here, of which there may be any number, are walked over by nobody:
//! the store keeps them apart. Names of the dead are buried when they are met, and so are met once.

use super::{Caller, FileSystem, Node, access};
use crate::programs::nfs::types::{Attributes, Cookie, CookieVerifier, FileHandle, FileId, NfsError};
use crate::programs::nfs::{
    DirectoryPage, Entry, EntryPlus, Failure, Listing, Outcome, PlusPage, ReadDirectory, ReadDirectoryPlus,
};
use crate::store::directories::{Directory, parent};
use crate::store::files::{DELIMITER, FileNumber};
use crate::store::key::{KEY_BYTES_MAX, ObjectKey};
use crate::store::namespace::Query;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Cookies of `.` and `..`; those of other entries are their numbers.
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;
/// Names that are asked for at once: so many more than there is room for are looked at, at most.
const STEP: usize = 64;

/// A page, and what it took.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Page {
    pub listing: Listing,
    /// Entries that it has.
    pub entries: usize,
    /// Names that were looked at.
    pub looked: usize,
}

struct Walk {
    entries: usize,
    looked: usize,
    is_end: bool,
}

impl FileSystem {
    /// READDIR.
    ///
    /// # Errors
    /// As the reply says; so in [`FileSystem::read_directory_plus`].
    pub fn read_directory(&self, caller: &Caller, arguments: &ReadDirectory) -> Outcome<Page, Option<Attributes>> {
        let ReadDirectory { dir, cookie, verifier, count } = arguments;
        self.page(caller, dir, *cookie, *verifier, |directory, from, attributes| {
            let mut page = DirectoryPage::new(*count, Some(attributes), self.cookie_verifier())?;
            let walk = self.walk(directory, from, |entry, _| page.push(&entry))?;
            Ok((page.finish(walk.is_end)?, walk))
        })
    }

    /// READDIRPLUS.
    pub fn read_directory_plus(
        &self,
        caller: &Caller,
        arguments: &ReadDirectoryPlus,
    ) -> Outcome<Page, Option<Attributes>> {
        let ReadDirectoryPlus { dir, cookie, verifier, dircount, maxcount } = arguments;
        self.page(caller, dir, *cookie, *verifier, |directory, from, attributes| {
            let mut page = PlusPage::new(*dircount, *maxcount, Some(attributes), self.cookie_verifier())?;
            let walk = self.walk(directory, from, |entry, node| {
                let handle = Some(self.handle(FileNumber(entry.fileid.0)));
                page.push(&EntryPlus { entry, attributes: Some(self.attributes(node)), handle })
            })?;
            Ok((page.finish(walk.is_end)?, walk))
        })
    }

    fn page(
        &self,
        caller: &Caller,
        dir: &FileHandle,
        cookie: Cookie,
        verifier: CookieVerifier,
        fill: impl FnOnce(&Arc<Directory>, u64, &Attributes) -> Result<(Listing, Walk), NfsError>,
    ) -> Outcome<Page, Option<Attributes>> {
        let node = self.node(dir);
        let attributes = self.some_attributes(&node);
        let failed = |error| Failure { error, attributes };
        let Node::Directory(directory) = node.map_err(failed)? else { return Err(failed(NfsError::NotDir)) };
        if !caller.may(self.owner(&directory.metadata(), true), access::READ, true) {
            return Err(failed(NfsError::Acces));
        }
        if cookie.0 != 0 && verifier != self.cookie_verifier() {
            return Err(failed(NfsError::BadCookie));
        }
        let attributes = self.directory_attributes(&directory, &directory.metadata());
        let (listing, walk) = fill(&directory, cookie.0, &attributes).map_err(failed)?;
        Ok(Page { listing, entries: walk.entries, looked: walk.looked })
    }

    /// Pushes the entries behind that of the cookie, until one is not taken.
    fn walk(
        &self,
        directory: &Arc<Directory>,
        cookie: u64,
        mut push: impl FnMut(Entry<'_>, &Node) -> bool,
    ) -> Result<Walk, NfsError> {
        let now = self.store.clock().now();
        let prefix = directory.path();
        let mut walk = Walk { entries: 0, looked: 0, is_end: false };
        let mut after = match cookie {
            0..=DOT_DOT => Vec::new(),
            number => {
                let place = self.store.place_of(FileNumber(number), prefix).ok_or(NfsError::BadCookie)?;
                place.as_bytes().to_vec()
            }
        };
        for (number, name) in [(DOT, &b"."[..]), (DOT_DOT, b"..")] {
            if cookie >= number {
                continue;
            }
            let here = Node::Directory(directory.clone());
            let above = match name {
                b".." => self.store.directory(parent(prefix), now).ok().flatten().map(Node::Directory),
                _ => None,
            };
            let node = above.unwrap_or(here);
            let Node::Directory(found) = &node else { continue };
            let entry = Entry { fileid: FileId(found.number().0), name, cookie: Cookie(number) };
            if !push(entry, &node) {
                return Ok(walk);
            }
            walk.entries += 1;
        }
        let mut last: Vec<u8> = after.clone();
        loop {
            let query =
                Query { after: &after, delimiter: Some(DELIMITER), named_only: true, ..Query::new(prefix, STEP) };
            let listing = self.store.list(&query, now).ok_or(NfsError::ServerFault)?;
            let made = self.store.made_directories(prefix, &after, STEP);
            let above = self.store.directories_above_nameless(prefix, &after, STEP);
            walk.looked += listing.entries.len() + made.len() + above.len();
            // Behind the end of each list there may be more of it, before what the others have.
            let end = |list: &[ObjectKey]| if list.len() == STEP { list.last().cloned() } else { None };
            let horizon = listing.next.into_iter().chain(end(&made)).chain(end(&above)).min();
            let mut names: BTreeSet<_> = listing.entries.into_iter().map(|entry| entry.name).chain(made).collect();
            // What lies in these may be dead.
            names.extend(above.into_iter().filter(|path| self.store.has_below(path.as_bytes(), now)));
            for name in names {
                let name = name.as_bytes();
                if horizon.as_ref().is_some_and(|horizon| name > horizon.as_bytes()) {
                    break;
                }
                // A place within a directory may bring up the directory once more.
                if name <= last.as_slice() && !last.is_empty() {
                    continue;
                }
                if !self.emit(prefix, name, now, &mut push, &mut walk) {
                    return Ok(walk);
                }
                last = name.to_vec();
            }
            match horizon {
                Some(horizon) => after = horizon.as_bytes().to_vec(),
                None => {
                    walk.is_end = true;
                    return Ok(walk);
                }
            }
        }
    }

    /// Pushes the entry of a key or the path of a directory, if it is one. False if it was not taken.
    fn emit(
        &self,
        prefix: &[u8],
        place: &[u8],
        now: u64,
        push: &mut impl FnMut(Entry<'_>, &Node) -> bool,
        walk: &mut Walk,
    ) -> bool {
        let (node, name) = match place.strip_suffix(&[DELIMITER]) {
            Some(path) if path.len() >= prefix.len() => {
                (Node::Directory(self.store.see_directory(place)), &path[prefix.len()..])
            }
            _ => {
                let name = place.get(prefix.len()..).unwrap_or_default();
                // A directory of the same name wins.
                let is_hidden = place.len() < KEY_BYTES_MAX && self.store.is_directory(&[place, b"/"].concat(), now);
                if is_hidden {
                    return true;
                }
                let Some(object) = self.store.peek(place, now) else { return true };
                let Some(record) = object.record().cloned() else { return true };
                record.mark_listed();
                (Node::File(record, object), name)
            }
        };
        let number = match &node {
            Node::File(record, _) => record.number(),
            Node::Directory(directory) => directory.number(),
        };
        let taken = push(Entry { fileid: FileId(number.0), name, cookie: Cookie(number.0) }, &node);
        walk.entries += usize::from(taken);
        taken
    }
}
