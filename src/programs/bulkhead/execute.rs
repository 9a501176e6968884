//! Procedures that are answered at once.

use super::answer::ENTRY_BYTES;
use super::request::{Deletion, ListRequest, StatRequest, Touch};
use super::{Answer, Entry, Item, LIST_BYTES_MAX, LIST_ENTRIES_MAX, Page, Stat, Status, expiry_of, ttl_of};
use crate::store::namespace::Query;
use crate::store::object::Object;
use crate::store::{Deleted, Store};

/// Most roundup octets behind a key.
const ROUNDUP_BYTES_MAX: usize = 3;

/// STAT.
pub fn stat(request: &StatRequest<'_>, store: &Store) -> Answer<Item> {
    let now = store.clock().now();
    let (mut leading, mut is_leading) = (0, true);
    let mut stats = Vec::with_capacity(request.keys.len());
    for key in &request.keys {
        let found = store.peek(key.as_bytes(), now);
        is_leading &= found.is_some();
        leading += u32::from(is_leading);
        stats.push(found.map_or(Stat::bare(Status::NotFound), |object| stat_of(&object, store, now)));
        if request.until_miss && !is_leading {
            break;
        }
    }
    Answer::Stat { leading, stats }
}

fn stat_of(object: &Object, store: &Store, now: u64) -> Stat {
    let location = store.location(object);
    Stat {
        status: Status::Ok,
        flags: object.flags(),
        version: object.version(),
        len: object.len(),
        ram_bytes: location.ram_bytes,
        disk_bytes: location.disk_bytes,
        lead_bytes: location.resident_prefix_bytes,
        // What is lost is not to be had in any time.
        first_octet_us: location.first_octet_us.map_or(u32::MAX, |us| u32::try_from(us).unwrap_or(u32::MAX)),
        ttl_s: ttl_of(object.expiry(), now),
    }
}

/// DELETE.
pub fn delete(deletions: &[Deletion<'_>], store: &Store) -> Answer<Item> {
    let now = store.clock().now();
    let delete = |deletion: &Deletion<'_>| {
        let key = deletion.key.as_bytes();
        let deleted = if deletion.version != 0 {
            store.delete_if(key, deletion.version, now)
        } else if store.delete(key, now) {
            Deleted::Done
        } else {
            Deleted::NotFound
        };
        match deleted {
            Deleted::Done => Status::Ok,
            Deleted::NotFound => Status::NotFound,
            Deleted::Exists => Status::Changed,
        }
    };
    Answer::Statuses(deletions.iter().map(delete).collect())
}

/// TOUCH.
pub fn touch(touches: &[Touch<'_>], store: &Store) -> Answer<Item> {
    let now = store.clock().now();
    let touch = |touch: &Touch<'_>| {
        let touched = store.touch(touch.key.as_bytes(), expiry_of(touch.ttl_s, now), now);
        if touched { Status::Ok } else { Status::NotFound }
    };
    Answer::Statuses(touches.iter().map(touch).collect())
}

/// LIST.
pub fn list(request: &ListRequest<'_>, store: &Store) -> Answer<Item> {
    let refused = |status| Answer::List(Page { status, next: request.cookie.to_vec(), entries: Vec::new() });
    let bytes_max = request.bytes.min(LIST_BYTES_MAX) as usize;
    let query = Query {
        prefix: request.prefix,
        after: request.cookie,
        delimiter: None,
        count_max: (request.count as usize).min(LIST_ENTRIES_MAX),
        bytes_max,
        overhead_bytes: ENTRY_BYTES + ROUNDUP_BYTES_MAX,
        named_only: false,
    };
    if query.count_max == 0 {
        return refused(Status::TooSmall);
    }
    let Some(listing) = store.list(&query, store.clock().now()) else { return refused(Status::Unsupported) };
    let entry = |listed: crate::store::namespace::Listed| {
        // Without a delimiter there is nothing but objects.
        let facts = listed.object?;
        Some(Entry { key: listed.name.as_bytes().to_vec(), version: facts.version, len: facts.len })
    };
    let entries: Vec<_> = listing.entries.into_iter().filter_map(entry).collect();
    // The first is listed however long it is.
    if entries.first().is_some_and(|entry| Entry::encoded_bytes(entry.key.len()) > bytes_max) {
        return refused(Status::TooSmall);
    }
    let next = listing.next.map_or(Vec::new(), |next| next.as_bytes().to_vec());
    Answer::List(Page { status: Status::Ok, next, entries })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::bulkhead::request::Key;
    use crate::programs::bulkhead::rig::{put, store};
    use crate::store::Sizes;
    use crate::store::draft::Want;
    use crate::store::location;
    use crate::store::segment::Class;
    use std::time::Duration;

    fn key(octets: &[u8]) -> Key<'_> {
        Key::new(octets).unwrap()
    }

    fn stats(store: &Store, until_miss: bool, keys: &[&[u8]]) -> (u32, Vec<Stat>) {
        let request = StatRequest { until_miss, keys: keys.iter().map(|octets| key(octets)).collect() };
        match stat(&request, store) {
            Answer::Stat { leading, stats } => (leading, stats),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_leading_run_ends_at_the_first_key_that_is_not_there() {
        let store = store();
        let version = put(&store, b"a", b"value");
        put(&store, b"b", b"");
        put(&store, b"d", b"value");
        let keys: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
        let (leading, all) = stats(&store, false, &keys);
        let statuses: Vec<_> = all.iter().map(|stat| stat.status).collect();
        assert_eq!(leading, 2);
        assert_eq!(statuses, [Status::Ok, Status::Ok, Status::NotFound, Status::Ok]);
        let first_octet_us = location::RAM_US as u32;
        let there =
            Stat { flags: 7, version, len: 5, ram_bytes: 5, lead_bytes: 5, first_octet_us, ..Stat::bare(Status::Ok) };
        assert_eq!(all[0], there);
        assert_eq!(all[2], Stat::bare(Status::NotFound));
        assert_eq!(stats(&store, true, &keys), (2, all[..3].to_vec()));
        assert_eq!(stats(&store, true, &keys[..2]), (2, all[..2].to_vec()));
        assert_eq!(stats(&store, true, &keys[2..]).0, 0);
        assert_eq!(stats(&store, false, &[]), (0, vec![]));
    }

    #[test]
    fn a_stat_is_no_use_of_a_value_and_tells_its_time_to_live() {
        let store = store();
        put(&store, b"a", b"value");
        assert_eq!(touch(&[Touch { key: key(b"a"), ttl_s: 90 }], &store), Answer::Statuses(vec![Status::Ok]));
        let ttl_s = stats(&store, false, &[b"a"]).1[0].ttl_s;
        assert!((85..=90).contains(&ttl_s), "{ttl_s}");
        assert_eq!(store.gauges().pins, 0);
        touch(&[Touch { key: key(b"a"), ttl_s: 0 }], &store);
        assert_eq!(stats(&store, false, &[b"a"]).1[0].ttl_s, 0);
    }

    #[test]
    fn a_stat_says_what_lies_on_disk_and_how_long_that_takes() {
        let store = store();
        put(&store, b"long", &vec![1; 400 << 10]);
        let before = stats(&store, false, &[b"long"]).1[0];
        assert_eq!((before.ram_bytes, before.disk_bytes, before.lead_bytes), (400 << 10, 0, 400 << 10));
        assert_eq!(u64::from(before.first_octet_us), location::RAM_US);
        // Write it behind, and take all memory there is: then it is on disk alone.
        while let Some(job) = store.next_write(true) {
            store.handle_written(&job.segment, 0, Some([0; 4]));
        }
        let mut held = Vec::new();
        while let Ok(filling) = store.fill(Want { class: Class::Small, remaining: 1, head: true }) {
            held.push(filling);
        }
        let after = stats(&store, false, &[b"long"]).1[0];
        assert_eq!((after.ram_bytes, after.disk_bytes, after.lead_bytes), (0, 400 << 10, 0));
        store.drive_loads()[0].handle_read(Duration::from_micros(900));
        let after = (u64::from(stats(&store, false, &[b"long"]).1[0].first_octet_us), after.len);
        assert_eq!(after, (900 + location::RAM_US, 400 << 10));
    }

    #[test]
    fn a_deletion_takes_any_version_or_the_one_it_names() {
        let store = store();
        let version = put(&store, b"a", b"value");
        put(&store, b"b", b"value");
        let deletion = |octets, version| Deletion { key: key(octets), version };
        let deletions = [
            deletion(&b"a"[..], version + 100),
            deletion(b"a", version),
            deletion(b"a", version),
            deletion(b"b", 0),
            deletion(b"b", 0),
        ];
        let expected = [Status::Changed, Status::Ok, Status::NotFound, Status::Ok, Status::NotFound];
        assert_eq!(delete(&deletions, &store), Answer::Statuses(expected.to_vec()));
        assert_eq!(store.gauges().objects, 0);
    }

    #[test]
    fn a_touch_of_nothing_finds_nothing() {
        let touches = [Touch { key: key(b"a"), ttl_s: 90 }];
        assert_eq!(touch(&touches, &store()), Answer::Statuses(vec![Status::NotFound]));
    }

    fn page(store: &Store, prefix: &[u8], cookie: &[u8], count: u32, bytes: u32) -> Page {
        match list(&ListRequest { prefix, cookie, count, bytes }, store) {
            Answer::List(page) => page,
            other => panic!("{other:?}"),
        }
    }

    fn keys(page: &Page) -> Vec<&[u8]> {
        page.entries.iter().map(|entry| &entry.key[..]).collect()
    }

    #[test]
    fn a_listing_goes_on_behind_its_cookie_until_there_is_no_more() {
        let store = store();
        for name in [b"b/3", b"a/9", b"b/1", b"b/2", b"c/0"] {
            put(&store, name, b"value");
        }
        let first = page(&store, b"b/", b"", 2, 10_000);
        assert_eq!((first.status, keys(&first)), (Status::Ok, vec![&b"b/1"[..], b"b/2"]));
        assert_eq!(first.next, b"b/2", "the last key of the page");
        assert_eq!(first.entries[0].len, 5);
        store.delete(b"b/2", 0);
        let last = page(&store, b"b/", &first.next, 2, 10_000);
        assert_eq!((keys(&last), &last.next[..]), (vec![&b"b/3"[..]], &b""[..]));
        assert_eq!(page(&store, b"none", b"", 2, 10_000), Page { status: Status::Ok, next: vec![], entries: vec![] });
        assert_eq!(keys(&page(&store, b"", b"a/9", 1, 10_000)), [b"b/1"]);
    }

    #[test]
    fn a_page_has_no_more_octets_than_were_asked_for() {
        let store = store();
        for number in 0..50 {
            put(&store, format!("key{number:02}").as_bytes(), b"");
        }
        let entry_bytes = Entry::encoded_bytes(5) as u32;
        for bytes in [entry_bytes, 2 * entry_bytes, 10 * entry_bytes - 1, 1000] {
            let page = page(&store, b"key", b"", 1000, bytes);
            let encoded: usize = page.entries.iter().map(|entry| Entry::encoded_bytes(entry.key.len())).sum();
            assert!(!page.entries.is_empty() && encoded <= bytes as usize, "{bytes}: {encoded}");
            assert_eq!(page.next, page.entries.last().unwrap().key);
        }
        for (count, bytes) in [(1000, entry_bytes - 1), (0, 10_000), (5, 0)] {
            let page = page(&store, b"key", b"key07", count, bytes);
            assert_eq!(page, Page { status: Status::TooSmall, next: b"key07".to_vec(), entries: vec![] });
        }
        assert_eq!(page(&store, b"", b"", u32::MAX, u32::MAX).entries.len(), 50);
    }

    #[test]
    fn a_store_without_a_namespace_lists_nothing_and_says_so() {
        assert_eq!(page(&Store::new(Sizes::small()).unwrap(), b"", b"", 1, 1000).status, Status::Unsupported);
    }
}
