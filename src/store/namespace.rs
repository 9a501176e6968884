//! The namespace: the keys of the index in order, for doors that list. A store that was not asked for one has none.
//!
//! ```text
//!   index  (hash)     key -> Arc<Object>       the truth: a key is there exactly while the index has it
//!   names  (ordered)  { key }                  follows under the lock of the index entry; a replaced value leaves it alone
//! ```
//! A listing walks the names in slices, and looks each one up in the index once the lock is let go: what died or left
//! meanwhile is left out. So a key that is there all the time a listing goes on is listed once, and no writer waits
//! longer than for one slice. What was measured: docs/decisions/0011-namespace.md.
//!
//! A store with [files](crate::store::files) keeps apart the keys that have no name there, of which there may be any number
//! in one directory, so that whoever lists it for people walks over none of them:
//! ```text
//!   named     { key }             every key of a store without files
//!   nameless  { key }             a part of it is no name
//!   above     { path: count }     the directories right above that part, which are there for it
//! ```

use crate::store::Store;
use crate::store::files::{DELIMITER, is_name};
use crate::store::key::ObjectKey;
use crate::store::object::Object;
use std::collections::{BTreeMap, BTreeSet, btree_map, btree_set};
use std::iter::Peekable;
use std::ops::Bound;
use std::sync::{PoisonError, RwLock};

/// What the index spends on one name beside the key that it shares with the index, in octets: 16 in a tree node that
/// is half full at worst, and the node's own share.
const NAME_BYTES: u64 = 40;
/// And on a directory above nameless keys, beside its path: a place in a tree, likewise, and the counts of its path.
const ABOVE_BYTES: u64 = (2 * size_of::<(ObjectKey, usize)>() + 16) as u64;
/// Names looked at under one hold of the lock.
const SLICE: usize = 64;
/// Names of the dead that one call of [`Store::list`] looks at before it returns without being done: each costs a
/// removal.
const DEAD_MAX: usize = 256;

/// The keys of an index in the order of their octets.
///
/// One lock: a tree for each hash shard made setting no faster and listing tens of times slower (decision 11 has the figures).
#[derive(Debug, Default)]
pub(super) struct Namespace {
    names: RwLock<Names>,
    has_files: bool,
}

#[derive(Debug, Default)]
struct Names {
    named: BTreeSet<ObjectKey>,
    nameless: BTreeSet<ObjectKey>,
    above: BTreeMap<ObjectKey, usize>,
}

impl Names {
    /// From there on, in order.
    fn range(&self, from: Bound<&[u8]>, which: Which) -> Merged<'_> {
        let range = (from, Bound::Unbounded);
        let nameless = match which {
            Which::All if !self.nameless.is_empty() => Some(self.nameless.range::<[u8], _>(range).peekable()),
            _ => None,
        };
        Merged { named: self.named.range::<[u8], _>(range).peekable(), nameless }
    }

    /// The keys beside `key` in either set.
    fn neighbours(&self, key: &[u8]) -> impl Iterator<Item = &ObjectKey> {
        [&self.named, &self.nameless].into_iter().flat_map(move |names| {
            let before = names.range::<[u8], _>((Bound::Unbounded, Bound::Excluded(key))).next_back();
            let behind = names.range::<[u8], _>((Bound::Excluded(key), Bound::Unbounded)).next();
            before.into_iter().chain(behind)
        })
    }
}

/// Which keys are looked at.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Which {
    All,
    Named,
}

/// Both sets in one order.
struct Merged<'a> {
    named: Peekable<btree_set::Range<'a, ObjectKey>>,
    nameless: Option<Peekable<btree_set::Range<'a, ObjectKey>>>,
}

impl<'a> Iterator for Merged<'a> {
    type Item = &'a ObjectKey;

    fn next(&mut self) -> Option<&'a ObjectKey> {
        let Some(nameless) = &mut self.nameless else { return self.named.next() };
        match (self.named.peek(), nameless.peek()) {
            (Some(named), Some(other)) if other < named => nameless.next(),
            (None, _) => nameless.next(),
            _ => self.named.next(),
        }
    }
}

impl Namespace {
    /// Of a store with files.
    pub(super) fn of_files() -> Self {
        Self { has_files: true, ..Self::default() }
    }

    /// The directory right above the part of a key that is no name.
    fn above<'a>(&self, key: &'a [u8]) -> Option<&'a [u8]> {
        if self.has_files { above_nameless(key) } else { None }
    }

    /// Under the entry of `key`, which the index has from now on. Returns by how many octets that grows.
    pub(super) fn insert(&self, key: ObjectKey) -> u64 {
        let above = self.above(key.as_bytes()).map(ObjectKey::new);
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let Some(above) = above else {
            names.named.insert(key);
            return NAME_BYTES;
        };
        names.nameless.insert(key);
        match names.above.entry(above) {
            btree_map::Entry::Occupied(mut count) => {
                *count.get_mut() += 1;
                NAME_BYTES
            }
            btree_map::Entry::Vacant(vacant) => {
                let bytes = above_bytes(vacant.key());
                vacant.insert(1);
                NAME_BYTES + bytes
            }
        }
    }

    /// Under the entry of `key`, which leaves the index. Returns by how many octets that shrinks.
    pub(super) fn remove(&self, key: &[u8]) -> u64 {
        let above = self.above(key);
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        // What is taken is let go after the lock.
        let Some(above) = above else {
            let _name = names.named.take(key);
            drop(names);
            return NAME_BYTES;
        };
        let _name = names.nameless.take(key);
        let count = names.above.get_mut(above).expect("it was counted when its key was inserted");
        *count -= 1;
        let gone = if *count == 0 { names.above.remove_entry(above) } else { None };
        drop(names);
        NAME_BYTES + gone.map_or(0, |(path, _)| above_bytes(&path))
    }

    /// Octets of the longest directory that `key` shares with a key that is not `key`: up to and with a delimiter.
    pub(super) fn shared(&self, key: &[u8], delimiter: u8) -> usize {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        // Whoever shares most with it is beside it.
        let shared = |other: &ObjectKey| {
            let common = key.iter().zip(other.as_bytes()).take_while(|(one, other)| one == other).count();
            key[..common].iter().rposition(|octet| *octet == delimiter).map_or(0, |at| at + 1)
        };
        names.neighbours(key).map(shared).max().unwrap_or(0)
    }

    /// The keys that begin with `prefix`, if they are no more than `count_max`.
    pub(super) fn all(&self, prefix: &[u8], count_max: usize) -> Option<Vec<ObjectKey>> {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let range = names.range(Bound::Included(prefix), Which::All);
        let found: Vec<_> =
            range.take_while(|name| name.as_bytes().starts_with(prefix)).take(count_max + 1).cloned().collect();
        (found.len() <= count_max).then_some(found)
    }

    pub(super) fn len(&self) -> usize {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        names.named.len() + names.nameless.len()
    }

    /// The first path from `from` on, other than `prefix` itself, that begins with it and lies right above nameless keys.
    fn above_from(&self, from: &[u8], prefix: &[u8]) -> Option<ObjectKey> {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let mut paths = names.above.range::<[u8], _>((Bound::Included(from), Bound::Unbounded));
        let (found, _) = paths.find(|(path, _)| path.as_bytes() != prefix)?;
        found.as_bytes().starts_with(prefix).then(|| found.clone())
    }

    /// Up to `count` names from `from` on that begin with `prefix`: with a delimiter, of all that agree up to the first
    /// one behind the prefix only the first.
    fn slice(&self, from: Bound<&[u8]>, query: &Query<'_>, count: usize) -> Vec<ObjectKey> {
        let Query { prefix, delimiter, .. } = *query;
        let which = if query.named_only { Which::Named } else { Which::All };
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<ObjectKey> = Vec::new();
        let mut range = names.range(from, which);
        while found.len() < count
            && let Some(name) = range.next()
            && name.as_bytes().starts_with(prefix)
        {
            if let Some(directory) = directory(name.as_bytes(), prefix, delimiter) {
                let Some(behind) = successor(directory) else {
                    found.push(name.clone());
                    break;
                };
                range = names.range(Bound::Included(behind.as_slice()), which);
            }
            found.push(name.clone());
        }
        found
    }
}

fn above_bytes(path: &ObjectKey) -> u64 {
    ABOVE_BYTES + path.as_bytes().len() as u64
}

/// The directory, all of whose parts are names, right above the first part of `key` that is none; `None` if all are.
fn above_nameless(key: &[u8]) -> Option<&[u8]> {
    let mut start = 0;
    for part in key.split(|octet| *octet == DELIMITER) {
        if !is_name(part) {
            return Some(&key[..start]);
        }
        start += part.len() + 1;
    }
    None
}

/// Directories right below `prefix` and behind `after` (empty: from the first on), each with its delimiter: `count` at most, in
/// order. `next` finds the first path from somewhere on that begins with the prefix and is longer.
pub(super) fn children(
    prefix: &[u8],
    after: &[u8],
    count: usize,
    next: impl Fn(&[u8]) -> Option<ObjectKey>,
) -> Vec<ObjectKey> {
    let mut found: Vec<ObjectKey> = Vec::new();
    let mut from = if after <= prefix { prefix.to_vec() } else { behind_place(after) };
    while found.len() < count
        && let Some(path) = next(&from)
    {
        let path = path.as_bytes();
        let end = memchr::memchr(DELIMITER, &path[prefix.len()..]).expect("paths end with one");
        let child = &path[..=prefix.len() + end];
        from = behind_place(child);
        found.push(ObjectKey::new(child));
    }
    found
}

/// The first octets behind `place`, and behind all that lies below it if it ends with the delimiter.
fn behind_place(place: &[u8]) -> Vec<u8> {
    let mut behind = place.to_vec();
    match behind.last_mut() {
        // The octet that follows it: '0'.
        Some(last) if *last == DELIMITER => *last += 1,
        _ => behind.push(0),
    }
    behind
}

/// The part of `name` up to and with the first delimiter behind `prefix`, if there is one.
fn directory<'a>(name: &'a [u8], prefix: &[u8], delimiter: Option<u8>) -> Option<&'a [u8]> {
    let at = memchr::memchr(delimiter?, name.get(prefix.len()..)?)?;
    Some(&name[..=prefix.len() + at])
}

/// The first octet string behind all that begin with `prefix`; none if there is none.
fn successor(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|octet| *octet != u8::MAX)?;
    let mut behind = prefix[..=last].to_vec();
    behind[last] += 1;
    Some(behind)
}

/// What to list.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Names that begin with this.
    pub prefix: &'a [u8],
    /// And come behind this one: the last name listed before, or [`Listing::next`]. Empty: from the first on.
    pub after: &'a [u8],
    /// With one, all names that agree up to the first delimiter behind the prefix are listed as one [`Listed`] without an
    /// object: with `/` and the prefix `a/`, the entries of the directory `a`. What lies below is skipped, not walked.
    pub delimiter: Option<u8>,
    /// Entries, at least 1.
    pub count_max: usize,
    /// Octets of their names together, with `overhead_bytes` for each. The first is listed though it be longer.
    pub bytes_max: usize,
    pub overhead_bytes: usize,
    /// Without the keys that have no name in a store with files, and without the directories in which nothing else is: those are
    /// [`Store::directories_above_nameless`].
    pub named_only: bool,
}

impl<'a> Query<'a> {
    /// Up to `count_max` names that begin with `prefix`.
    pub fn new(prefix: &'a [u8], count_max: usize) -> Self {
        Self {
            prefix,
            after: b"",
            delimiter: None,
            count_max,
            bytes_max: usize::MAX,
            overhead_bytes: 0,
            named_only: false,
        }
    }
}

/// One name.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listed {
    /// A key; or what keys have in common, up to and with the delimiter.
    pub name: ObjectKey,
    /// `None` for what keys have in common.
    pub object: Option<Facts>,
}

/// What an object was when it was listed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Facts {
    /// Octets of the value.
    pub len: u64,
    pub version: u64,
    pub flags: u32,
    /// Second of the store's clock; 0 is never.
    pub expiry: u64,
}

impl From<&Object> for Facts {
    fn from(object: &Object) -> Self {
        Self { len: object.len(), version: object.version(), flags: object.flags(), expiry: object.expiry() }
    }
}

/// A part of a listing.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Listing {
    /// In the order of the names' octets.
    pub entries: Vec<Listed>,
    /// What to go on [`after`](Query::after); `None` at the end. It is the last name of `entries`, but where there were so many
    /// dead names behind it that looking further is left to the next call.
    pub next: Option<ObjectKey>,
}

impl Store {
    /// Whether it was made with a namespace.
    pub fn has_namespace(&self) -> bool {
        self.shared.namespace.is_some()
    }

    /// Directories right below `prefix`, each with its delimiter, that keys without a name are somewhere in, whether they live or
    /// not: those behind `after` (empty: from the first on), `count` at most, in order. None but in a store with files.
    pub fn directories_above_nameless(&self, prefix: &[u8], after: &[u8], count: usize) -> Vec<ObjectKey> {
        let Some(names) = &self.shared.namespace else { return Vec::new() };
        children(prefix, after, count, |from| names.above_from(from, prefix))
    }

    /// Living objects in the order of their keys. `None` from a store without a namespace.
    ///
    /// Objects that come or go while a listing takes several calls may be in it or not; all others are, once.
    pub fn list(&self, query: &Query<'_>, now: u64) -> Option<Listing> {
        let names = self.shared.namespace.as_ref()?;
        let Query { prefix, after, delimiter, .. } = *query;
        let count_max = query.count_max.max(1);
        let mut listing = Listing::default();
        let (mut bytes, mut dead) = (0_usize, 0);
        // The last name that is dealt with.
        let mut seen: Option<ObjectKey> = None;
        let mut from = begin(prefix, after, delimiter);
        while let Some(bound) = from {
            // One more than there is place for tells whether there are more.
            let wanted = (count_max - listing.entries.len()).saturating_add(1).min(SLICE);
            let slice = names.slice(bound.as_ref().map(Vec::as_slice), query, wanted);
            from = if slice.len() < wanted { None } else { slice.last().and_then(|last| behind(last, query)) };
            for name in slice {
                let directory = directory(name.as_bytes(), prefix, delimiter);
                let Some(object) = self.living(name.as_bytes(), now) else {
                    dead += 1;
                    // Not where the name is that of the directory too: going on after it would pass over the directory.
                    if dead >= DEAD_MAX && directory.is_none_or(|directory| directory.len() < name.as_bytes().len()) {
                        listing.next = Some(name);
                        return Some(listing);
                    }
                    if directory.is_some() {
                        // Another name below it may be alive.
                        from = Some(Bound::Excluded(name.as_bytes().to_vec()));
                        break;
                    }
                    seen = Some(name);
                    continue;
                };
                let listed = match directory {
                    Some(directory) => Listed { name: ObjectKey::new(directory), object: None },
                    None => Listed { name, object: Some(Facts::from(&*object)) },
                };
                let more = listed.name.as_bytes().len().saturating_add(query.overhead_bytes);
                bytes = bytes.saturating_add(more);
                let full = listing.entries.len() == count_max || bytes > query.bytes_max;
                if full && !listing.entries.is_empty() {
                    listing.next = seen;
                    return Some(listing);
                }
                seen = Some(listed.name.clone());
                listing.entries.push(listed);
            }
        }
        Some(listing)
    }
}

/// Where a listing of `prefix` begins that goes on after `after`; `None` if that is its end.
fn begin(prefix: &[u8], after: &[u8], delimiter: Option<u8>) -> Option<Bound<Vec<u8>>> {
    if after < prefix || after.is_empty() {
        return Some(Bound::Included(prefix.to_vec()));
    }
    if !after.starts_with(prefix) {
        return None;
    }
    match directory(after, prefix, delimiter) {
        Some(directory) if directory.len() == after.len() => successor(after).map(Bound::Included),
        _ => Some(Bound::Excluded(after.to_vec())),
    }
}

/// Where the listing goes on after a slice that ends with `name`.
fn behind(name: &ObjectKey, query: &Query<'_>) -> Option<Bound<Vec<u8>>> {
    match directory(name.as_bytes(), query.prefix, query.delimiter) {
        Some(directory) => successor(directory).map(Bound::Included),
        None => Some(Bound::Excluded(name.as_bytes().to_vec())),
    }
}
